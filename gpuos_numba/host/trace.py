"""The trace: what host and blocks noted down arrives, a Chrome trace leaves, which Perfetto shows.

While a trace is taken the host notes each submission and the blocks write records of what they ran
(device/trace.py); buffers are given to the executor and taken back while it is parked. The device's clock is
mapped onto the host's by tasks that do nothing: each was seen to run between two looks at the host's clock.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from ..descriptor import MASK_64
from ..errors import ArgumentError
from ..protocol import LINE, TRACE, ParkReason, TraceKind

RECORDS: Final = 1 << 14
"""Records that each block keeps; the newest win."""
MAX_RECORDS: Final = 1 << 22
_PINGS: Final = 12
_HOST, _DEVICE = 1, 2
_PUMP, _LAUNCHES = 0, 1_000_000


def ring_bytes(records: int) -> int:
    """Size of one block's ring."""
    return LINE + records * TRACE.itemsize


class Clock:
    """The device's clock on the host's: what was seen of both at two times, and a line through it."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int]] = []  # (device, device - host), each the best of its round

    def add(self, rounds: list[tuple[int, int, int]]) -> None:
        """Take up the best of several (host before, device, host after)."""
        if rounds:
            before, device, after = min(rounds, key=lambda each: each[2] - each[0])
            self._seen.append((device, device - (before + after) // 2))

    def to_host(self, device: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Host nanoseconds of device nanoseconds; both i64."""
        if not self._seen:
            return device
        (first, offset), (last, end) = self._seen[0], self._seen[-1]
        drift = (end - offset) / (last - first) if last > first else 0.0
        moved: np.ndarray[Any, Any] = device - offset - ((device - first) * drift).astype(np.int64)
        return moved

    @property
    def offset_ns(self) -> int | None:
        """The device's clock minus the host's at the beginning; None where it was not seen."""
        return self._seen[0][1] if self._seen else None


class Trace:
    """A trace being taken: a context manager, see `Runtime.trace`.

    Attributes:
        path: the file written at the end.
        records: records that blocks wrote.
        dropped: of these, how many were overwritten because a block's ring was full; they are missing.
        offset_ns: the device's clock minus the host's, as measured.
    """

    def __init__(
        self,
        path: str | Path,
        records: int,
        *,
        start: Callable[[Trace], None],
        stop: Callable[[], np.ndarray[Any, Any]],
        ping: Callable[[], int],
        names: Callable[[int], str],
    ) -> None:
        if records < 2 or records > MAX_RECORDS or records & (records - 1):
            raise ArgumentError(f"records={records}: give a power of two from 2 to {MAX_RECORDS}")
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ArgumentError(f"{self.path}: the folder {self.path.parent} does not exist")
        self.capacity = records
        self.records = self.dropped = 0
        self.offset_ns: int | None = None
        self._start, self._stop, self._ping, self._names = start, stop, ping, names
        self._events: list[dict[str, Any]] = []
        self._tasks: list[tuple[int, int, str]] = []  # (first position, count, operator)
        self._pings: list[list[tuple[int, int, int]]] = []  # rounds of (host before, position, host after)
        self._threads: dict[int, str] = {}
        self._track = threading.local()  # not the thread's identity, which a later thread may get
        self._tracks = itertools.count(1)
        try:
            import nvtx
        except ImportError:
            nvtx = None
        self._nvtx = nvtx

    # --- while it is taken ---

    def __enter__(self) -> Self:
        self._start(self)
        self._calibrate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._calibrate()  # the last task, so all before it are in the trace
        finally:
            self.write(self._stop())

    def _calibrate(self) -> None:
        rounds = []
        for _ in range(_PINGS):
            before = time.monotonic_ns()
            position = self._ping()
            rounds.append((before, position, time.monotonic_ns()))
        self._pings.append(rounds)

    def begin(self, name: str) -> tuple[int, Any]:
        """The host begins something; hand the answer to `end` or `submitted`."""
        mark = self._nvtx.start_range(message=name, domain="gpuos_numba") if self._nvtx else None
        return time.monotonic_ns(), mark

    def end(self, began: tuple[int, Any], name: str, **arguments: Any) -> None:
        """It is through."""
        now = time.monotonic_ns()
        if began[1] is not None:
            self._nvtx.end_range(began[1])
        thread = getattr(self._track, "number", 0)
        if thread == 0:
            thread = self._track.number = next(self._tracks)
            self._threads[thread] = threading.current_thread().name
        self._events.append(_span(name, _HOST, thread, began[0], now, arguments))

    def submitted(
        self, began: tuple[int, Any], operator: str, ranges: list[tuple[int, int]], lane: str = ""
    ) -> None:
        """Tasks are in the ring."""
        for first, count in ranges:
            self._tasks.append((first, count, operator))
        count = sum(count for _, count in ranges)
        arguments = {"position": ranges[0][0] if ranges else None, "tasks": count}
        self.end(began, f"submit {operator}", **arguments | ({"lane": lane} if lane else {}))

    def mark(self, name: str, **arguments: Any) -> None:
        """Something happened on the host, such as a new generation of operators."""
        self._events.append(
            {"name": name, "ph": "i", "s": "g", "ts": time.monotonic_ns(), "pid": _HOST, "tid": 0}
            | {"args": arguments}
        )

    # --- at its end ---

    def write(self, blocks: np.ndarray[Any, Any]) -> None:
        """Write the file, from the bytes of all blocks' rings."""
        rings = blocks.reshape(-1, ring_bytes(self.capacity))
        tables = [self._ring(ring) for ring in rings]
        clock = self._clock(tables)
        self.offset_ns = clock.offset_ns
        events = list(self._events)
        names = _Names(self._tasks, self._names)
        for block, table in enumerate(tables):
            begin, end = (clock.to_host(table[each].astype(np.int64)).tolist() for each in ("begin", "end"))
            rows = zip(begin, end, table["position"].tolist(), table["what"].tolist(), strict=True)
            for row in rows:
                events.extend(_device_events(block, *row, names))
        origin = min((event["ts"] for event in events), default=0)
        for event in events:
            event["ts"] = (event["ts"] - origin) / 1e3
            if "dur" in event:
                event["dur"] /= 1e3
        events += self._labels(len(tables))
        document = {
            "traceEvents": events,
            "displayTimeUnit": "ns",
            "otherData": {
                "records": self.records,
                "dropped": self.dropped,
                "device_clock_offset_ns": self.offset_ns,
                "began_monotonic_ns": origin,
            },
        }
        self.path.write_text(json.dumps(document), encoding="utf-8")

    def _ring(self, ring: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A block's records, the oldest first."""
        count = int(ring[:8].view(np.uint64)[0])
        table = ring[LINE:].view(TRACE)
        self.records += count
        if count <= self.capacity:
            return table[:count]
        self.dropped += count - self.capacity
        return np.roll(table, -(count % self.capacity))

    def _clock(self, tables: list[np.ndarray[Any, Any]]) -> Clock:
        wanted = {position for rounds in self._pings for _, position, _ in rounds}
        began: dict[int, int] = {}
        for table in tables[1:]:
            kinds = table["what"] & 0xFF == TraceKind.TASKS
            hits = table[kinds & np.isin(table["position"], np.array(sorted(wanted), np.uint64))]
            began.update(zip(hits["position"].tolist(), hits["end"].tolist(), strict=True))
        clock = Clock()
        for rounds in self._pings:
            clock.add([(before, began[at], after) for before, at, after in rounds if at in began])
        return clock

    def _labels(self, blocks: int) -> list[dict[str, Any]]:
        def label(kind: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
            return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}

        found = [label("process_name", "host", _HOST), label("process_name", "executor", _DEVICE)]
        found += [label("thread_name", name, _HOST, thread) for thread, name in self._threads.items()]
        found += [
            label("thread_name", "pump", _DEVICE, _PUMP),
            label("thread_name", "launches", _DEVICE, _LAUNCHES),
        ]
        return found + [label("thread_name", f"worker {n}", _DEVICE, n) for n in range(1, blocks)]


class _Names:
    """Which operator the task at a position was submitted as."""

    def __init__(self, tasks: list[tuple[int, int, str]], kernel_name: Callable[[int], str]) -> None:
        ordered = sorted(tasks)
        self._firsts = [first for first, _, _ in ordered]
        self._tasks, self.kernel = ordered, kernel_name

    def of(self, position: int, op_id: int) -> str:
        at = bisect_right(self._firsts, position) - 1
        if at >= 0:
            first, count, operator = self._tasks[at]
            if position - first < count and operator:
                return operator
        return self.kernel(op_id)


def _span(name: str, pid: int, tid: int, begin: int, end: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": begin,
        "dur": max(0, end - begin),
        "pid": pid,
        "tid": tid,
        "args": arguments,
    }


def _device_events(
    block: int, begin: int, end: int, position: int, what: int, names: _Names
) -> list[dict[str, Any]]:
    kind, number = what & 0xFF, what >> 32
    if kind == TraceKind.INGEST:
        return [
            _span(f"ingest {number}", _DEVICE, _PUMP, begin, end, {"position": position, "tasks": number})
        ]
    if kind == TraceKind.LAUNCH:
        reason = ParkReason(number).name.lower()
        arguments = {"launch": position, "workers": what >> 16 & 0xFFFF, "parked": reason}
        parked = {"name": f"parked: {reason}", "ph": "i", "s": "p", "ts": end, "pid": _DEVICE, "tid": _PUMP}
        return [_span(f"launch {position}", _DEVICE, _LAUNCHES, begin, end, arguments), parked]
    count, tile = max(1, what >> 8 & 0xFF), what >> 16 & 0xFFFF
    found = []
    for index in range(count):
        # Tasks that a worker ran in one go: the time of each is a share of the whole.
        at = (position + index) & MASK_64
        low, high = (begin + (end - begin) * each // count for each in (index, index + 1))
        place = {"position": at, "tile": tile} | ({"of a group of": count} if count > 1 else {})
        found.append(_span(names.of(at, number), _DEVICE, block, low, high, place))
    return found
