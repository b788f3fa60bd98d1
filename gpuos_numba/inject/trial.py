"""An A/B trial: two operators of one name arrive, counts, timings and a comparison leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..device.operators import Operator
    from ..runtime import Runtime


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial knows by now.

    Attributes:
        current, candidate: tasks that each was given.
        current_ns, candidate_ns: median round trip of one task, as measured by `Trial.measure`; None before.
        compared: elements that `measure` compared.
        different: those that differ, NaN equal to NaN.
        largest: the largest difference of two finite elements.
    """

    current: int
    candidate: int
    current_ns: float | None
    candidate_ns: float | None
    compared: int
    different: int
    largest: float


class Trial:
    """While it runs, `fraction` of the tasks of a name go to the candidate; the result is used all the same.

    As a context manager it stops at the end of the block. It stops by itself where the name changes.
    """

    def __init__(
        self, rt: Runtime, name: str, fraction: float, current: Operator, candidate: Operator,
        end: Callable[[Trial], None],
    ) -> None:  # fmt: skip
        if not 0 <= fraction <= 1:
            raise ArgumentError(
                f"fraction={fraction!r}: give the candidate's share of the tasks, from 0 to 1"
            )
        if candidate.inputs != current.inputs or candidate.outputs != current.outputs:
            raise ArgumentError(
                f"{name}: the candidate takes {candidate.inputs} inputs, the current one {current.inputs}: "
                "they cannot stand in for each other"
            )
        self.name, self.fraction = name, fraction
        self._rt, self._current, self._candidate, self._end = rt, current, candidate, end
        self._lock = threading.Lock()
        self._counts = [0, 0]
        self._times_ns: list[float | None] = [None, None]
        self._compared, self._different, self._largest = 0, 0, 0.0

    def draw(self) -> Operator:
        """Who runs the next task: evenly spread, so that any stretch of tasks has nearly its share."""
        with self._lock:
            drawn = sum(self._counts)
            chosen = int((drawn + 1) * self.fraction) > int(drawn * self.fraction)
            self._counts[chosen] += 1
        return self._candidate if chosen else self._current

    def measure(self, *inputs: Any, repeats: int = 200, **parameters: Any) -> Outcome:
        """Run both on these operands, in turns: compare the results, and time round trips of one task.

        Raises:
            ArgumentError, DTypeError, TaskError: as submitting does.
        """
        from ..testing import to_host

        rt = self._rt
        pair = [rt._operator(self._current), rt._operator(self._candidate)]
        results = [rt.submit(each, inputs, **parameters).result() for each in pair]
        found, other = (np.asarray(to_host(each)).astype(np.float64) for each in results)
        same = (found == other) | (np.isnan(found) & np.isnan(other))
        with np.errstate(invalid="ignore"):
            apart = np.abs(found - other)[~same]
        finite = apart[np.isfinite(apart)]
        batches = [
            rt.batch(each, [(inputs, out)], **parameters) for each, out in zip(pair, results, strict=True)
        ]
        times: list[list[float]] = [[], []]
        turns = 10
        for turn in range(turns):
            for which in (turn % 2, 1 - turn % 2):
                times[which] += rt.round_trip_ns(batches[which], max(1, repeats // turns)).tolist()
        with self._lock:
            self._compared += same.size
            self._different += int(np.count_nonzero(~same))
            self._largest = max([self._largest, *finite.tolist()])
            self._times_ns = [float(np.median(each)) for each in times]
        return self.outcome()

    def outcome(self) -> Outcome:
        """What is known by now."""
        with self._lock:
            current, candidate = self._counts
            current_ns, candidate_ns = self._times_ns
            return Outcome(
                current, candidate, current_ns, candidate_ns, self._compared, self._different, self._largest
            )

    def stop(self) -> Outcome:
        """Give all tasks to the current operator again. Stopping twice is harmless."""
        self._end(self)
        return self.outcome()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
