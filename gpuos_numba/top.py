"""`python -m gpuos_numba top`: what the running processes of this user do, read from their boards."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from .host.board import Board, boards

ANSWER_S = 2.0
"""A keeper answers within a tick, or a quarter of a second where its executor is parked."""


class Watched:
    """One Runtime's board, and its figures of two times."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._before: dict[str, Any] | None = None
        self.now: dict[str, Any] | None = None

    def look(self) -> None:
        figures = self.board.read()
        if figures is not None and (self.now is None or figures["at_ns"] > self.now["at_ns"]):
            self._before, self.now = self.now, figures

    def rates(self) -> dict[str, float | None]:
        """Tasks and launches a second between the last two looks, None after one."""
        if self._before is None or self.now is None:
            return {"tasks_per_s": None, "launches_per_s": None}
        passed = (self.now["at_ns"] - self._before["at_ns"]) / 1e9
        return {
            f"{name}_per_s": (self.now.get(key, 0) - self._before.get(key, 0)) / passed
            for name, key in (("tasks", "completed"), ("launches", "launches"))
        }

    def record(self) -> dict[str, Any]:
        """All figures as plain data."""
        return {**(self.now or {}), **self.rates(), "pid": self.board.pid}


class Viewer:
    """All boards, or those of one process."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._watched: dict[str, Watched] = {}

    def look(self, ask_s: float) -> list[Watched]:
        """Find boards, ask for figures, take up those that are there."""
        found = {}
        for board in boards():
            if self._pid not in (None, board.pid):
                board.close()
                continue
            known = self._watched.get(board.path.name)
            if known is not None:
                board.close()
            found[board.path.name] = known or Watched(board)
        for name, gone in self._watched.items():
            if name not in found:
                gone.board.close()
        self._watched = found
        for watched in found.values():
            watched.board.ask(ask_s)
            watched.look()
        return list(found.values())

    def look_twice(self, interval_s: float) -> list[Watched]:
        """Figures of an interval, from all that answer in time."""
        end = time.monotonic() + ANSWER_S
        while True:
            watched = self.look(interval_s + ANSWER_S)
            if all(each.now is not None for each in watched) or time.monotonic() > end:
                break
            time.sleep(0.02)
        if watched:
            time.sleep(interval_s)
        end = time.monotonic() + ANSWER_S
        while any(each.rates()["tasks_per_s"] is None for each in watched) and time.monotonic() < end:
            watched = self.look(ANSWER_S)
            time.sleep(0.02)
        return watched


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def render(watched: list[Watched]) -> Group | str:
    """What a terminal shows."""
    if not watched:
        return "no process of this user has a Runtime open"
    overview = Table(title=f"{len(watched)} Runtime(s)")
    for column in ("pid", "program", "machine", "tasks/s", "queue", "busy workers", "state", "launches/s"):
        overview.add_column(column)
    overview.add_column("failed", justify="right")
    operators = Table(title="operators, while somebody watched")
    for column in ("pid", "operator", "tasks", "tasks/s", "busy s", "us a task"):
        operators.add_column(column)
    for each in watched:
        row = each.record()
        if each.now is None:
            overview.add_row(str(row["pid"]), "does not answer")
            continue
        state = f"parked ({row.get('park_reason')})" if row.get("parked") else "serving"
        overview.add_row(
            str(row["pid"]),
            escape(row["program"]),
            escape(f"{row.get('machine')} {row.get('device', '')}"),
            _number(row["tasks_per_s"]),
            f"{row.get('queue_depth')} of {row.get('capacity')}",
            f"{row['busy_workers']:.1f} of {row.get('workers')}",
            state,
            _number(row["launches_per_s"]),
            str(row.get("failed")),
        )
        about = "" if row["exact"] else "~"
        for name, entry in sorted(row["operators"].items(), key=lambda item: -item[1]["tasks"])[:20]:
            tasks, busy = entry["tasks"], entry["busy_s"]
            operators.add_row(
                str(row["pid"]),
                escape(name),
                about + _number(tasks),
                about + _number(tasks / row["watched_s"] if row["watched_s"] else None),
                f"~{busy:.3g}",
                f"~{busy / tasks * 1e6:.3g}" if tasks else "-",
            )
    return Group(overview, operators)


def top(
    once: Annotated[bool, typer.Option("--once", help="One look, then end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data, one line a look.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks.")] = 0.5,
    pid: Annotated[int | None, typer.Option(help="Of this process alone.")] = None,
) -> None:
    """Watch what running processes do: throughput, queue, workers, parks, operators.

    Counts marked ~ are estimates, and times are samples.
    """
    viewer = Viewer(pid)
    if once:
        watched = viewer.look_twice(interval_s)
        if as_json:
            typer.echo(json.dumps([each.record() for each in watched]))
        else:
            Console().print(render(watched))
        return
    try:
        if as_json:
            while True:
                typer.echo(json.dumps([each.record() for each in viewer.look(4 * interval_s)]))
                time.sleep(interval_s)
        with Live(render(viewer.look(4 * interval_s)), auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(render(viewer.look(4 * interval_s)), refresh=True)
    except KeyboardInterrupt:
        return
