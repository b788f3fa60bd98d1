"""`top` sees what a running process does, and costs it nothing while nobody looks."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gpuos_numba import Runtime
from gpuos_numba.__main__ import app
from gpuos_numba.host.board import FOLDER_VARIABLE, SIZE, Board, boards
from gpuos_numba.top import Viewer, render

TIMEOUT_S = 60.0
RUN = CliRunner()

CHILD = """
import sys, numpy as np
from gpuos_numba import Runtime
a = np.ones(64, np.float32)
with Runtime("cpu", workers=1) as rt:
    batch = rt.batch("exp", [((a,), np.empty_like(a)) for _ in range(20)])
    rt.submit_batch(batch).wait()
    print("ready", flush=True)
    while not sys.stdin.closed and sys.argv[1] == "work":
        rt.submit_batch(batch).wait()
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "boards"))
    return tmp_path / "boards"


def until(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + TIMEOUT_S
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(5e-3)
    return found


def test_once_shows_the_work_of_another_process(folder: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        result = RUN.invoke(app, ["top", "--once", "--json", "--interval", "0.3"])
        assert result.exit_code == 0, result.output
        (row,) = json.loads(result.stdout)
        assert row["pid"] == child.pid and row["machine"] == "cpu" and row["max_workers"] == 1
        assert row["tasks_per_s"] > 0 and row["operators"]["exp"]["tasks"] > 0
        assert row["completed"] >= row["operators"]["exp"]["tasks"] > 0 and row["launches"] >= 1
        assert 0 <= row["busy_workers"] <= row["workers"]
        assert f"{child.pid}" in RUN.invoke(app, ["top", "--once"], env={"COLUMNS": "200"}).output
        none = RUN.invoke(app, ["top", "--once", "--json", "--pid", "1"])
        assert json.loads(none.stdout) == []
    finally:
        child.kill()
        child.communicate()
    # What it left behind is not taken for a living process, and is cleared away.
    assert list(folder.glob("*.board")) and list(boards()) == [] and not list(folder.glob("*.board"))


def test_an_idle_runtime_answers_too_and_its_board_goes_with_it(folder: Path) -> None:
    a = np.ones(64, np.float32)
    with Runtime("cpu", workers=1) as rt:
        rt.exp(a).wait(TIMEOUT_S)
        until(lambda: rt.stats().parked)
        viewer = Viewer(None)
        (watched,) = until(lambda: [each for each in viewer.look(5.0) if each.now])
        assert watched.record()["parked"] and watched.record()["completed"] == 1
        assert watched.record()["failed"] == 0
        render([watched])
    assert not list(folder.iterdir())
    assert "no process" in RUN.invoke(app, ["top", "--once"]).output


def test_nothing_is_written_while_nobody_looks(folder: Path) -> None:
    a = np.ones(64, np.float32)
    with Runtime("cpu", workers=1) as rt:
        end = time.monotonic() + 0.6  # several ticks, and a wake of the sleeping keeper
        while time.monotonic() < end:
            rt.exp(a).wait(TIMEOUT_S)
        (board,) = boards()
        assert board.read() is None
        board.ask(30.0)
        until(board.read)
        board.close()


@pytest.mark.parametrize("capacity", [64, 4096])
def test_operators_are_counted_exactly_where_ticks_keep_up_and_estimated_else(
    capacity: int, folder: Path
) -> None:
    a = np.ones(64, np.float32)
    with Runtime("cpu", workers=1, capacity=capacity) as rt:
        rt.exp(a).wait(TIMEOUT_S)
        (board,) = boards()
        board.ask(30.0)
        until(board.read)
        exps = rt.batch("exp", [((a,), np.empty_like(a)) for _ in range(300)])
        adds = rt.batch("add", [((a, a), np.empty_like(a)) for _ in range(100)])
        for batch in (exps, adds):
            rt.submit_batch(batch).wait(TIMEOUT_S)
        counted: Callable[[], Any] = lambda: (board.read() or {}).get("operators", {})  # noqa: E731
        until(lambda: sum(each["tasks"] for each in counted().values()) >= 399.5)
        if capacity == 4096:
            assert {name: each["tasks"] for name, each in counted().items()} == {"exp": 300, "add": 100}
        assert sum(each["tasks"] for each in counted().values()) == pytest.approx(400)
        board.close()


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's: who may read a board stays unproved")
def test_a_board_is_the_users_alone_and_a_folder_of_others_is_not_used(folder: Path) -> None:
    with Runtime("cpu", workers=1):
        (path,) = folder.glob("*.board")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert Board.create() is None
    with Runtime("cpu", workers=1) as rt:  # works without
        rt.exp(np.ones(8, np.float32)).wait(TIMEOUT_S)
    assert list(boards()) == []


def test_what_is_no_board_is_left_out(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    board = Board.create()
    assert board is not None
    board._map[:8] = b"whatever"
    (folder / "1-1.board").write_bytes(b"")
    (folder / "2-1.board").mkdir()
    assert list(boards()) == []
    board.close(remove=True)


def test_figures_that_are_being_written_or_too_long_are_not_shown(folder: Path) -> None:
    board = Board.create()
    assert board is not None and board.read() is None
    board.write({"a": 1})
    assert board.read() == {"a": 1}
    board.write({"a": "x" * SIZE})
    assert board.read() == {"a": 1}
    board._map[16] |= 1
    assert board.read() is None
    board.close(remove=True)
