"""Layouts arrive, slots of the layout table leave: how each operand of a task is walked.

`LayoutTable.intern` gives each layout (see `shapes` for where they come from) a slot that the pump copies to
the device once. A task then carries two bytes an operand instead of a shape. Contiguous tasks need none of
this.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import numpy as np

from ..descriptor import LAYOUT, MAX_DIMS, MAX_INPUTS, MAX_OUTPUTS, DType
from ..errors import ArgumentError, HangError
from ..protocol import LAYOUT_SLOTS
from ..shapes import Shape, Strides

TASK_LAYOUTS: Final = MAX_INPUTS + MAX_OUTPUTS
"""Most layouts that one task can need."""

SECTION_LIMIT_S: Final = 60.0
"""A full table waits so long for submissions in progress."""


class LayoutTable:
    """Layouts by slot, in memory that the pump reads.

    An entry is written, then its count is published (a release, the caller's), then other threads can find
    it: so a task that is published after `intern` returned comes after a count that covers it. An entry stays
    as it is for an epoch. When the table is full everything that may use it is waited for, the epoch moves on
    and the slots are used again; the count never goes back.

    "Everything that may use it" is queued tasks, which `drain` waits for, and threads that hold a slot whose
    task they have not submitted yet. Those announce themselves:

        with table.using():
            slots = [table.intern(...) for operand in operands]
            ...submit the task...

    A section counts itself in, and a full table waits until all are out before it drains. Why so: to check
    the epoch again after the submit would be too late (the task may have run with another's layout), to check
    it between claim and publish would put Python into the middle of the compiled submit, and a lock held from
    intern to submit would line up all producers. Counting in and out is an append to and a pop from a deque,
    each atomic: no lock while the table is not full, and contiguous tasks do not come here at all.

    A section never waits for the table in its middle (two sections that did would wait for each other). It
    asks on entry for the layouts that it may add, so `intern` always finds room, and what it returned stays
    valid until the section ends.

    What keeps slots for longer (a Batch that is submitted again) remembers `epoch` and, in a section, interns
    again when it has moved.
    """

    __slots__ = (
        "_alone",
        "_base",
        "_drain",
        "_lock",
        "_memory",
        "_publish",
        "_recycling",
        "_sections",
        "_slots",
        "count",
        "epoch",
    )

    def __init__(
        self,
        memory: np.ndarray[Any, Any],
        publish_count: Callable[[int], None],
        drain: Callable[[], None],
    ) -> None:
        if memory.dtype != LAYOUT or not TASK_LAYOUTS <= len(memory) <= LAYOUT_SLOTS:
            raise ArgumentError(
                f"layout memory has dtype {memory.dtype} and {len(memory)} entries: it needs dtype "
                f"LAYOUT and {TASK_LAYOUTS} to {LAYOUT_SLOTS} entries"
            )
        self._memory = memory
        self._publish = publish_count
        self._drain = drain
        self._lock = threading.Lock()  # guards additions
        self._alone = threading.Lock()  # one recycles at a time
        self._slots: dict[tuple[DType, Shape, Strides], int] = {}
        self._base = 0  # count when this epoch began
        # Whoever enters appends, then looks at `recycling`; whoever recycles sets it, then looks at
        # `sections`: one of the two sees the other. An entry for each TASK_LAYOUTS that a section may add.
        self._sections: deque[None] = deque()
        self._recycling = False
        self.count = 0
        """Layouts interned so far. Written under the lock."""
        self.epoch = 0
        """Moves on when slots are used again. Constant within a section."""

    def __len__(self) -> int:
        return len(self._slots)

    def using(self, layouts: int = TASK_LAYOUTS) -> _Section:
        """A section in which up to `layouts` new layouts are interned and the tasks that use them submitted.

        Not to be nested: the inner one could wait for the outer. It may wait for the ring to have room.
        """
        return _Section(self, -(-layouts // TASK_LAYOUTS))

    def enter(self, units: int = 1) -> None:
        """Begin a section without the `with`. Pairs with `leave(units)`."""
        if not self._try_enter(units):
            self._enter_alone(units)

    def leave(self, units: int = 1) -> None:
        """End a section: its tasks are submitted, `drain` will wait for them."""
        pop = self._sections.pop
        for _ in range(units):
            pop()

    def intern(self, dtype: DType, shape: Shape, strides: Strides) -> int:
        """The slot of a layout, new or known, valid until the section ends. Only within `using()`."""
        try:
            return self._slots[dtype, shape, strides]
        except KeyError:
            return self._add(dtype, shape, strides)

    def _add(self, dtype: DType, shape: Shape, strides: Strides) -> int:
        key = (dtype, shape, strides)
        if len(shape) > MAX_DIMS or len(shape) != len(strides):
            raise ArgumentError(
                f"a layout of shape {shape} and strides {strides}: at most {MAX_DIMS} dims, one each"
            )
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                return slot
            if self.count - self._base >= len(self._memory):
                raise ArgumentError(
                    f"more new layouts in one submission than it asked room for, and all {len(self._memory)} "
                    "slots are taken: submit it in parts"
                )
            slot = self.count % len(self._memory)
            entry = self._memory[slot]
            entry["dtype"], entry["ndim"], entry["count"] = dtype, len(shape), math.prod(shape)
            entry["shape"] = shape + (0,) * (MAX_DIMS - len(shape))
            entry["strides"] = strides + (0,) * (MAX_DIMS - len(strides))
            # Release: the entry is visible before the count that covers it. Pairs with the pump's read of
            # HOST_CONTROL["layouts"]. And before the dict: who finds the slot there needs the count.
            self._publish(self.count + 1)
            self.count += 1
            self._slots[key] = slot
            return slot

    def _try_enter(self, units: int) -> bool:
        sections = self._sections
        if units == 1:
            sections.append(None)
        else:
            sections.extend([None] * units)
        # Room for what all sections may still add, this one included: whoever comes last sees them all.
        room = len(self._memory) - (self.count - self._base)
        if not self._recycling and room >= TASK_LAYOUTS * len(sections):
            return True
        self.leave(units)
        return False

    def _enter_alone(self, units: int) -> None:
        """Wait until no section is open, recycle the table if it is full, and enter while nobody else may."""
        layouts = units * TASK_LAYOUTS
        if layouts > len(self._memory):
            raise ArgumentError(
                f"a submission of up to {layouts} different layouts does not fit in the table of "
                f"{len(self._memory)}: submit it in parts"
            )
        with self._alone:
            if self._try_enter(units):  # another thread has made room meanwhile
                return
            self._recycling = True
            try:
                self._wait_sections()
                if self.count - self._base + layouts > len(self._memory):
                    self._drain()  # if it raises nothing has changed, and the next one tries again
                    self._slots = {}
                    self._base = self.count
                    self.epoch += 1
                self._sections.extend([None] * units)
            finally:
                self._recycling = False

    def _wait_sections(self) -> None:
        """Sections end by themselves: none waits for the table in its middle."""
        deadline_s, pause_s = time.monotonic() + SECTION_LIMIT_S, 0.0
        while self._sections:
            if time.monotonic() > deadline_s:
                raise HangError(
                    f"the layout table is full, and a submission has held layouts for {SECTION_LIMIT_S} s: "
                    "a producer is stuck between interning and submitting, or was killed there; "
                    "close the Runtime"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s + 1e-5, 1e-3)


class _Section:
    __slots__ = ("_table", "_units")

    def __init__(self, table: LayoutTable, units: int) -> None:
        self._table = table
        self._units = units

    def __enter__(self) -> LayoutTable:
        self._table.enter(self._units)
        return self._table

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._table.leave(self._units)
