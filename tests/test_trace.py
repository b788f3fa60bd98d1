"""The trace: all that happened in the block is in the file, in the order and at the time it happened."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpuos_numba import Runtime
from gpuos_numba.errors import ArgumentError
from gpuos_numba.host.trace import Clock
from gpuos_numba.protocol import TraceKind

TIMEOUT_S = 60.0
HOST, DEVICE = 1, 2


def load(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    assert isinstance(document["traceEvents"], list)
    return document["traceEvents"]  # type: ignore[no-any-return]


def spans(events: list[dict[str, Any]], pid: int, name: str) -> list[dict[str, Any]]:
    found = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["name"].startswith(name)]
    return sorted(found, key=lambda e: e["ts"])


def workers(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [e for e in spans(events, DEVICE, name) if 1 <= e["tid"] < 1_000_000]


def test_every_task_is_in_the_trace_once_with_its_operator(
    runtime: Runtime, to_device: Any, tmp_path: Path
) -> None:
    a, b = to_device(np.ones(64)), to_device(np.ones(64))
    path = tmp_path / "t.json"
    with runtime.trace(path) as trace:
        positions = [runtime.add(a, b).position for _ in range(20)]
        chain = runtime.submit_batch(runtime.batch("mul", [((a, b), a)] * 30), linked=True)
        runtime.synchronize(TIMEOUT_S)
    first, count = chain.ranges[0]
    events = load(path)
    assert [e["args"]["position"] for e in workers(events, "add")] == sorted(positions)
    assert sorted(e["args"]["position"] for e in workers(events, "mul")) == list(range(first, first + count))
    submitted = spans(events, HOST, "submit mul")
    # The chain, and a task that waits for what it depends on, where that is still under way.
    assert len(submitted) == 1 and 30 <= submitted[0]["args"]["tasks"] <= 31
    ingested = [(e["args"]["position"], e["args"]["tasks"]) for e in spans(events, DEVICE, "ingest")]
    assert {first + i for first, count in ingested for i in range(count)} >= set(positions)
    assert trace.records >= 20 + 30 / 8 and trace.dropped == 0


def test_a_task_runs_after_its_submission_began_and_before_its_end_was_seen(
    runtime: Runtime, to_device: Any, tmp_path: Path
) -> None:
    """The clocks are one: to within the round trip that aligned them."""
    a, b = to_device(np.ones(64)), to_device(np.ones(64))
    path, seen = tmp_path / "t.json", {}
    with runtime.trace(path):
        for _ in range(20):
            begin = time.monotonic_ns()
            position = runtime.add(a, b).wait(TIMEOUT_S).position
            seen[position] = begin, time.monotonic_ns()
            time.sleep(1e-3)
    document = json.loads(path.read_text())
    origin = document["otherData"]["began_monotonic_ns"]
    for event in workers(document["traceEvents"], "add"):
        begin, end = seen[event["args"]["position"]]
        slack = end - begin  # of that round trip; those that align the clocks are the shortest
        assert begin - slack <= origin + event["ts"] * 1e3 <= end + slack
        assert event["dur"] >= 0


def test_a_worker_does_one_thing_at_a_time(runtime: Runtime, to_device: Any, tmp_path: Path) -> None:
    a, b = to_device(np.ones(4096)), to_device(np.ones(4096))
    path = tmp_path / "t.json"
    with runtime.trace(path):
        for _ in range(50):
            runtime.exp(a, out=b)
        runtime.synchronize(TIMEOUT_S)
    by_worker: dict[int, list[dict[str, Any]]] = {}
    for event in workers(load(path), ""):
        by_worker.setdefault(event["tid"], []).append(event)
    for events in by_worker.values():
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3  # times are rounded to doubles


def test_launches_parks_and_new_operators_are_in_the_trace(
    runtime: Runtime, to_device: Any, tmp_path: Path
) -> None:
    a = to_device(np.ones(64))
    path = tmp_path / "t.json"
    with runtime.trace(path):
        runtime.exp(a).wait(TIMEOUT_S)
        runtime.park(TIMEOUT_S)
        runtime.inject("traced", "x + 1")
        runtime.traced(a).wait(TIMEOUT_S)
        runtime.rollback()
    events = load(path)
    launches = spans(events, DEVICE, "launch")
    assert len(launches) >= 2 and all(e["args"]["workers"] >= 1 for e in launches)
    for before, after in itertools.pairwise(launches):
        assert before["ts"] + before["dur"] <= after["ts"]
    assert {e["args"]["parked"] for e in launches} <= {"idle", "lease", "request", "widen"}
    marks = [e for e in events if e["ph"] == "i" and e["name"].startswith("generation")]
    assert [list(e["args"]) for e in marks] == [["operator"], ["rollback"]]
    named = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"host", "executor", "pump", "launches", "worker 1"} <= named


def test_each_thread_that_submits_is_a_track(runtime: Runtime, to_device: Any, tmp_path: Path) -> None:
    a = to_device(np.ones(64))
    path = tmp_path / "t.json"

    def producer(name: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: runtime.exp(a).wait(TIMEOUT_S), name=name)
        thread.start()
        return thread

    with runtime.trace(path):
        for thread in [producer("beside 0"), producer("beside 1")]:
            thread.join()
        for number in range(3):  # each likely has the identity of the one before, which has ended
            producer(f"after {number}").join()
    named = [e for e in load(path) if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == HOST]
    tracks = {e["args"]["name"]: e["tid"] for e in named}
    assert {"beside 0", "beside 1", "after 0", "after 1", "after 2"} <= set(tracks)
    assert len(set(tracks.values())) == len(named)
    spans = [e for e in load(path) if e["ph"] == "X" and e["pid"] == HOST]
    assert all(any(e["tid"] == track for e in spans) for track in tracks.values())


def test_records_that_do_not_fit_are_counted_and_the_newest_are_kept(tmp_path: Path) -> None:
    a = np.ones(8, np.float32)
    path = tmp_path / "t.json"
    with Runtime("cpu", workers=1) as rt:
        with rt.trace(path, records=64) as trace:
            tickets = [rt.exp(a) for _ in range(300)]
            rt.synchronize(TIMEOUT_S)
        events = load(path)
        ran = [e["args"]["position"] for e in workers(events, "exp")]
        assert trace.dropped >= 300 - 64
        assert json.loads(path.read_text())["otherData"]["dropped"] == trace.dropped
        assert ran == [ticket.position for ticket in tickets][-len(ran) :] and 0 < len(ran) <= 64


def test_a_trace_may_follow_another_and_not_overlap_it(tmp_path: Path) -> None:
    a = np.ones(8, np.float32)
    with Runtime("cpu", workers=1) as rt:
        for number in range(2):
            with rt.trace(tmp_path / f"{number}.json"):
                rt.exp(a).wait(TIMEOUT_S)
                with pytest.raises(ArgumentError, match="already"):
                    rt.trace(tmp_path / "other.json")
            rt.exp(a).wait(TIMEOUT_S)
            assert len(workers(load(tmp_path / f"{number}.json"), "exp")) == 1


def test_an_exception_in_the_block_still_leaves_a_trace(tmp_path: Path) -> None:
    with Runtime("cpu", workers=1) as rt:
        with pytest.raises(ZeroDivisionError), rt.trace(tmp_path / "t.json"):
            rt.exp(np.ones(8, np.float32)).wait(TIMEOUT_S)
            raise ZeroDivisionError
        assert workers(load(tmp_path / "t.json"), "exp")
        rt.exp(np.ones(8, np.float32)).wait(TIMEOUT_S)


@pytest.mark.parametrize("records", [0, 1, 3, 1 << 23])
def test_a_ring_of_records_has_a_sensible_size(records: int, runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="records="):
        runtime.trace(tmp_path / "t.json", records=records)
    with pytest.raises(ArgumentError, match="does not exist"):
        runtime.trace(tmp_path / "nowhere" / "t.json")


def test_submissions_are_nvtx_ranges_where_nvtx_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ranges: set[str] = set()
    said: list[str] = []

    def start_range(message: str, domain: str) -> str:
        said.append(message)
        open_ranges.add(message)
        return message

    fake = SimpleNamespace(start_range=start_range, end_range=open_ranges.discard)
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    with Runtime("cpu", workers=1) as rt, rt.trace(tmp_path / "t.json"):
        rt.exp(np.ones(8, np.float32)).wait(TIMEOUT_S)
    assert "submit exp" in said and not open_ranges


def test_the_clocks_are_joined_by_the_shortest_round_trips() -> None:
    clock = Clock()
    clock.add([(0, 1500, 1000), (2000, 3010, 2020), (4000, 9000, 8000)])
    assert clock.offset_ns == 1000
    clock.add([(1_000_000, 1_001_100, 1_000_200)])
    device = np.array([3010, 1_001_100], np.int64)
    assert clock.to_host(device).tolist() == [2010, 1_000_100]
    assert Clock().to_host(device).tolist() == device.tolist()


def test_without_a_trace_no_block_has_a_buffer(runtime: Runtime, to_device: Any, tmp_path: Path) -> None:
    from gpuos_numba.protocol import CONTEXT

    def buffer() -> int:
        return int(runtime._machine.read("context").view(CONTEXT)["trace"][0])

    assert buffer() == 0
    with runtime.trace(tmp_path / "t.json"):
        assert buffer() != 0
    assert buffer() == 0
    assert TraceKind.TASKS == 0


def test_calls_that_go_the_short_way_are_in_the_trace_and_go_it_again_afterwards(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="no torch here: the short way's traces stay unproved")
    a, b, out = (torch.ones(64) for _ in range(3))
    with Runtime("cpu", workers=1) as rt:
        for _ in range(4):
            rt.add(a, b, out=out).wait(TIMEOUT_S)
        if rt._calls is None or rt._calls.sent == 0:
            pytest.skip("this torch has no short way: its traces stay unproved")
        with rt.trace(tmp_path / "t.json"):
            before = rt._calls
            position = rt.add(a, b, out=out).wait(TIMEOUT_S).position
            assert before is None
        assert [e["args"]["position"] for e in workers(load(tmp_path / "t.json"), "add")] == [position]
        sent = rt._calls.sent
        rt.add(a, b, out=out).wait(TIMEOUT_S)
        assert rt._calls.sent == sent + 1 and (out == 2).all()
