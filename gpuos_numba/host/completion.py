"""Tickets: what a submission gives back, and how its end is seen.

A Ticket holds the outputs; the Runtime holds every array of a task until the task is retired, so dropping a
ticket or an input early is safe.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..descriptor import MASK_64, Status
from ..errors import TaskError
from .ring import PENDING_STATUS
from .streams import Streams

REMEDIES = {
    Status.UNKNOWN_OPERATOR: "no operator has this op_id in the running generation; submit it by name",
    Status.BAD_DESCRIPTOR: "it asks for more tiles than the ring has slots; submit through the API",
    Status.INDEX_OUT_OF_RANGE: "an index lies outside its tensor, nothing outside was touched; check indices",
    Status.DIVISION_BY_ZERO: "an integer was divided by zero; mask the divisor",
    Status.FORGOTTEN: "it ended too many failures ago; look at results sooner",
}


class Waiter(Protocol):
    """What a ticket needs of its Runtime."""

    _host: Any
    _address: int
    _streams: Streams

    def _wait(self, ranges: list[tuple[int, int]], timeout_s: float | None) -> None: ...


def explain(operator: str, position: int, status: int) -> TaskError:
    """The exception for a status that is not OK."""
    known = Status(status) if status in Status._value2member_map_ else None
    name = known.name if known is not None else f"status {status}"
    remedy = (
        REMEDIES.get(known, "the operator defines this status") if known is not None else "see the operator"
    )
    return TaskError(
        f"{operator} at position {position} ended with {name}: {remedy}",
        operator=operator,
        position=position,
        status=status,
    )


class Ticket:
    """One submission: a task, or a batch of them.

    Attributes:
        operator: name of the operator, for messages.
    """

    __slots__ = ("_count", "_linked", "_out", "_runtime", "_status", "_where", "operator")

    def __init__(self, runtime: Waiter, operator: str, ranges: list[tuple[int, int]] | int, out: Any) -> None:
        self._runtime = runtime
        self._where = ranges  # or the position of the one task
        self._out = out
        self._status: Status | int | None = None
        self._linked = False  # the last task completes last
        self._count: int | None = None  # tasks without joins, where that is known
        self.operator = operator

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        where = self._where
        return [(where, 1)] if isinstance(where, int) else where

    @property
    def position(self) -> int:
        """Position of the last task. An event of a lane without tasks has none: IndexError."""
        first, count = self._ranges[-1]
        return (first + count - 1) & MASK_64

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first position, count) of the consecutive parts, which may hold joins besides the tasks."""
        return tuple(self._ranges)

    @property
    def _last(self) -> list[tuple[int, int]]:
        """First and last positions whose completion is the ticket's."""
        if self._linked or self._count == 1:
            return [(self.position, self.position)]
        return [(first, (first + count - 1) & MASK_64) for first, count in self._ranges]

    def __len__(self) -> int:
        return sum(count for _, count in self._ranges) if self._count is None else self._count

    @property
    def done(self) -> bool:
        """Whether all tasks have ended. Never blocks."""
        return self.status is not None

    @property
    def status(self) -> Status | int | None:
        """None while a task is pending, then the worst status among the tasks. Never blocks."""
        if self._status is None:
            worst = 0
            status_of, address = self._runtime._host.status_of, self._runtime._address
            for first, count in self._ranges:
                for index in range(count):
                    status = status_of(address, (first + index) & MASK_64)
                    if status == PENDING_STATUS:
                        return None
                    worst = max(worst, status)
            self._status = Status(worst) if worst in Status._value2member_map_ else worst
        return self._status

    def wait(self, timeout_s: float | None = None) -> Ticket:
        """Block until all tasks have ended, whatever their status.

        Raises:
            WaitTimeout: `timeout_s` has passed; the tasks stay queued.
            HangError: no task at all completed within `Config.deadline_s`.
            ClosedError: the Runtime was closed before they ran.
        """
        if self._status is None:
            self._runtime._wait(self._ranges, timeout_s)
        return self

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait, then the output (a list of outputs for a batch).

        Raises:
            TaskError: a task ended with another status than OK; it names operator and position.
        """
        self.wait(timeout_s)
        if self.status != Status.OK:
            status_of, address = self._runtime._host.status_of, self._runtime._address
            for first, count in self._ranges:
                for index in range(count):
                    position = (first + index) & MASK_64
                    status = status_of(address, position)
                    if status not in (0, PENDING_STATUS):
                        raise explain(self.operator, position, status)
        return self._out

    def block_stream(self, stream: Any = None) -> Ticket:
        """What a CUDA stream is given from now on waits until all tasks have ended, whatever their status.

        The stream itself waits; the host does not. Arguments and errors as `Runtime.after_stream`.
        """
        linked = self._linked
        self._runtime._streams.block(
            stream, self._ranges if not linked else [(self.position, 1)], "block_stream"
        )
        return self

    def __repr__(self) -> str:
        state = "pending" if self.status is None else getattr(self.status, "name", str(self.status))
        return f"<Ticket {self.operator} x{len(self)} at {self.position}: {state}>"
