"""Lanes: queues of tasks that run in order, beside each other.

A lane is one word, the position of its last task, which the next one waits for (host/order.py). What is new
here is for people: submitting to a lane, waiting between lanes, and priorities.

The ring is first in, first out, so priority is a matter of what gets into it: while a lane of a higher
priority exists, work of lower ones is submitted in parts, each when few enough tasks are unfinished. That
bounds what lies ahead of an urgent task without a second queue, and moves no task past one that it depends
on.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .completion import Ticket
from .order import LANE


class Lane:
    """An in-order queue; made by `Runtime.lane`.

    Its tasks run one after another, whatever memory they touch. With `Config.order` "auto" they also wait
    for tasks of other lanes that touch the same memory, and the other way round; with "lane" and "none" only
    `wait` and `after=` order lanes.

    Attributes:
        name: for people.
        priority: see `Runtime.lane`.
    """

    def __init__(self, runtime: Any, name: str, priority: int) -> None:
        self._runtime = weakref.ref(runtime)
        self.name, self.priority = name, priority
        self._record = np.zeros(1, LANE)
        self.address = int(self._record.ctypes.data)
        self._waits: list[tuple[int, int]] = []

    def _owner(self) -> Any:
        runtime = self._runtime()
        if runtime is None:
            raise ArgumentError(f"lane {self.name!r}: its Runtime is gone, make a new one")
        return runtime

    def submit(
        self,
        op: Any,
        inputs: Any = (),
        out: Any = None,
        *,
        after: Any = None,
        timeout_s: float | None = None,
        **scalars: Any,
    ) -> Ticket:
        """`Runtime.submit`, after all that was submitted to this lane before."""
        ticket: Ticket = self._owner()._submit_one(op, inputs, out, after, timeout_s, scalars, self)
        return ticket

    def submit_batch(self, batch: Any, *, after: Any = None, timeout_s: float | None = None) -> Ticket:
        """`Runtime.submit_batch`; the tasks are a chain, as all of a lane's are."""
        ticket: Ticket = self._owner()._submit_batch(batch, True, after, timeout_s, self)
        return ticket

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._owner(), name):
            raise AttributeError(f"{type(self).__name__} has no attribute or operator {name!r}")

        def call(*inputs: Any, out: Any = None, after: Any = None, **scalars: Any) -> Ticket:
            return self.submit(name, inputs, out, after=after, **scalars)

        return call

    def event(self) -> Ticket:
        """What stands for all that was submitted to this lane so far; for `wait` and `after=`, or to wait
        for."""
        tail = [(int(self._record["tail"][0]), 1)] if self._record["begun"][0] else []
        ticket = Ticket(self._owner(), f"lane {self.name}", tail, None)
        ticket._linked = bool(tail)
        return ticket

    def wait(self, *others: Ticket | Lane) -> None:
        """What is submitted to this lane from now on waits for tickets, and for what other lanes hold so far.

        Returns at once. Raises ArgumentError for anything of another Runtime.
        """
        tickets = [other.event() if isinstance(other, Lane) else other for other in others]
        self._waits += self._owner()._afters(tickets)

    def _take_waits(self) -> list[tuple[int, int]]:
        waits, self._waits = self._waits, []
        return waits

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for every task of this lane. Raises as `Ticket.wait` does."""
        self.event().wait(timeout_s)

    def __repr__(self) -> str:
        return f"<Lane {self.name!r}, priority {self.priority}>"


class Lanes:
    """The lanes of one Runtime.

    Args:
        in_order: whether what is submitted outside any lane is a lane too.
        depth: unfinished tasks allowed to those of lower priority.

    Attributes:
        own: the lane of what is submitted outside any lane, or None.
        simple: that such work needs no more than its memory looked at.
    """

    def __init__(self, in_order: bool, depth: int) -> None:
        self._depth = depth
        self._in_order = in_order
        self._lock = threading.Lock()
        self._made = 0
        self._alive: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._highest = 0
        self.own: Lane | None = None
        self.simple = not in_order

    def begin(self, runtime: Any) -> None:
        """Make the Runtime's own lane, where it has one."""
        if self._in_order:
            self.own = Lane(runtime, "default", 0)

    def make(self, runtime: Any, name: str | None, priority: int) -> Lane:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ArgumentError(f"priority={priority!r}: give an int, 0 is ordinary and more is more urgent")
        with self._lock:
            self._made += 1
            lane = Lane(runtime, name or f"lane {self._made}", priority)
            self._alive.add(lane)
            self._look()
        weakref.finalize(lane, self._forget).atexit = False
        return lane

    def _forget(self) -> None:
        with self._lock:
            self._look()

    def _look(self) -> None:
        self._highest = max((lane.priority for lane in self._alive), default=0)
        self.simple = not self._in_order and self._highest <= 0

    def limit(self, lane: Lane | None) -> int:
        """How many tasks this lane, or no lane, may add to those unfinished; 0 for any number."""
        priority = 0 if lane is None else lane.priority
        return self._depth if priority < self._highest else 0
