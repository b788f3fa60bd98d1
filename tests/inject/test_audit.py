"""The audit log shows every line that was edited, removed, reordered or forged, at its end too."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuos_numba.errors import IntegrityError
from gpuos_numba.inject.audit import AuditLog, Event, audit_file

SECRET, OTHER = b"s" * 32, b"o" * 32


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    made = AuditLog(tmp_path / "logs" / "audit.jsonl", SECRET)
    for number in range(5):
        made.append(
            Event(
                "inject",
                f"op{number}",
                "unary",
                "a" * 64,
                "b" * 64,
                "ok",
                number,
                {"check": 0.001, "render": 1},
            )
        )
    return made


def lines_of(log: AuditLog) -> list[str]:
    return log.path.read_text().splitlines()


def write(log: AuditLog, lines: list[str]) -> None:
    log.path.write_text("".join(line + "\n" for line in lines))


def test_a_log_as_it_was_written_verifies(log: AuditLog) -> None:
    assert log.verify() == []
    lines = log.lines()
    assert [line["name"] for line in lines] == [f"op{n}" for n in range(5)]
    assert lines[0]["timings_s"] == {"check": 0.001, "render": 1.0} and lines[0]["generation"] == 0
    assert str(os.getpid()) in lines[0]["who"] and lines[0]["when"].endswith("+00:00")
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert AuditLog(log.path, SECRET).append(Event("rollback"))["line"] == 6
    assert log.verify() == []


def test_no_log_is_an_empty_log(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "none" / "audit.jsonl", SECRET)
    assert log.verify() == [] and log.lines() == [] and not log.path.parent.exists()


def edited(lines: list[str]) -> list[str]:
    return [*lines[:2], lines[2].replace("op2", "op9"), *lines[3:]]


ATTACKS: dict[str, Callable[[list[str]], list[str]]] = {
    "edited": edited,
    "first edited": lambda lines: [lines[0].replace('"ok"', '"no"'), *lines[1:]],
    "last edited": lambda lines: [*lines[:-1], lines[-1].replace('"ok"', '"no"')],
    "white space": lambda lines: [lines[0].replace(":", ": ", 1), *lines[1:]],
    "first removed": lambda lines: lines[1:],
    "one removed": lambda lines: lines[:2] + lines[3:],
    "last removed": lambda lines: lines[:-1],
    "last two removed": lambda lines: lines[:-2],
    "all removed": lambda lines: [],
    "reordered": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "last reordered": lambda lines: [*lines[:3], lines[4], lines[3]],
    "doubled": lambda lines: [*lines, lines[-1]],
    "blank": lambda lines: [*lines[:2], "", *lines[2:]],
    "cut": lambda lines: [*lines[:4], lines[4][:40]],
    "rubbish": lambda lines: [*lines, "rubbish"],
    "no object": lambda lines: [*lines, "[]"],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_log_does_not_verify(log: AuditLog, attack: str) -> None:
    write(log, ATTACKS[attack](lines_of(log)))
    assert log.verify(), attack
    log.lines()  # shows what there is
    log.append(Event("inject", "after"))
    assert log.verify(), f"{attack}, after another line"


def test_a_removed_log_does_not_verify(log: AuditLog) -> None:
    log.path.unlink()
    assert log.verify() == ["head: 5 lines were written, 0 are here"]
    log.append(Event("inject"))
    assert log.verify()


def test_a_removed_or_forged_head_shows_also_later(log: AuditLog) -> None:
    head = log.head_path.read_text()
    for text in (None, "", "{}", "[]", head.replace('"lines":5', '"lines":4'), head[:-20]):
        if text is None:
            log.head_path.unlink()
        else:
            log.head_path.write_text(text)
        write(log, lines_of(log)[:4])
        assert any("head" in problem for problem in log.verify())
    log.append(Event("inject"))
    assert any("damaged when this was written" in problem for problem in log.verify())


def test_lines_and_head_of_another_key_do_not_verify(log: AuditLog) -> None:
    forger = AuditLog(log.path, OTHER)
    assert len(forger.verify()) >= 5
    forger.append(Event("inject", "evil"))
    problems = log.verify()
    assert any("line 6" in problem or "line 7" in problem for problem in problems)
    assert any("not signed" in problem for problem in problems)


def test_a_line_of_another_place_is_no_line_here(log: AuditLog, tmp_path: Path) -> None:
    other = AuditLog(tmp_path / "other.jsonl", SECRET)
    other.append(Event("inject", "elsewhere"))
    write(log, [*lines_of(other), *lines_of(log)[1:]])
    assert "line 2: does not follow the line before it: lines were removed or reordered" in log.verify()


def test_a_crash_between_line_and_head_is_not_an_attack(log: AuditLog) -> None:
    head = log.head_path.read_text()
    log.append(Event("inject", "then it crashed"))
    log.head_path.write_text(head)
    assert log.verify() == []
    log.append(Event("inject", "and went on"))
    assert log.verify() == [] and [line["line"] for line in log.lines()] == list(range(1, 8))


def test_a_line_that_was_cut_off_stays_visible(log: AuditLog) -> None:
    with log.path.open("a") as file:
        file.write(lines_of(log)[0][:50])
    log.append(Event("inject", "after"))
    assert log.lines()[-1]["name"] == "after" and log.lines()[-2]["outcome"] == "a line was cut off"
    assert any(problem.startswith("line 6: is no line") for problem in log.verify())


def test_what_is_written_is_one_line(log: AuditLog) -> None:
    log.append(Event("refuse", 'a\nb"\u2028', outcome="no\r\n{}", detail="\0"))
    assert (
        log.verify() == []
        and len(log.lines()) == 6
        and json.loads(lines_of(log)[-1])["name"] == 'a\nb"\u2028'
    )


def test_a_log_that_others_may_write_to_or_a_link_is_refused(log: AuditLog, tmp_path: Path) -> None:
    log.path.chmod(0o622)
    with pytest.raises(IntegrityError, match="alone to write"):
        log.append(Event("inject"))
    log.path.unlink()
    (tmp_path / "target").write_text("")
    log.path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        log.append(Event("inject"))
    assert (tmp_path / "target").read_text() == ""


def _append(path: Path, number: int) -> None:
    log = AuditLog(path, SECRET)
    for _ in range(40):
        log.append(Event("inject", f"process{number}"))


def test_processes_share_a_log(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "audit.jsonl"
    workers = [context.Process(target=_append, args=(path, n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    log = AuditLog(path, SECRET)
    assert log.verify() == [] and len(log.lines()) == 120


def test_the_place_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUOS_AUDIT_FILE", str(tmp_path / "a"))
    assert audit_file() == tmp_path / "a"
    monkeypatch.delenv("GPUOS_AUDIT_FILE")
    assert audit_file().name == "audit.jsonl"
