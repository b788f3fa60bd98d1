"""CUDA streams and tasks that wait for each other: no host waits for either.

*A task waits for a stream.* A position is claimed and its stamp says that it is withheld; the stream is told
to store the stamp when it gets there. So the stream is one more producer, which publishes late: the pump
takes nothing from that position on, workers never wait, and parking needs to know nothing of it, because the
stamp stays where it is. A stream does not look whether anybody serves; host/watch.py does, while tasks are
withheld.

*A stream waits for tasks.* It polls their done words in host memory. A done word only grows, lap by lap, and
the comparison is cyclic, so one that is looked at late is right as well. Many tasks are first joined by one
that waits for them all on the GPU.

Neither can end in a circle: what a stream waits for and what waits for a stream is put into ring and stream
under one lock, in the same order, so a position waits only on what its stream was given before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from ..descriptor import MASK_64, done_word
from ..errors import ArgumentError, ClosedError, DeviceError, QueueFull
from ..machines.base import Machine
from . import ring
from .lease import Keeper
from .watch import Watch

FEW: Final = 4
"""A stream polls so many done words itself; more tasks are joined first."""
NOP: Final = 0
"""The op_id of a task that does nothing."""
_SLICE_NS: Final = 10_000_000
IDLE, BUSY, CAPTURING = "idle", "busy", "capturing"
"""What `Machine.stream_state` answers."""


Join = Callable[[int, int], int]
"""`join(first, count)` -> position of a task that ends after the `count` tasks from `first`."""


def handle_of(stream: Any, device: int) -> int:
    """The raw handle of a torch, CuPy, numba or cuda.core stream, or of a plain number.

    Raises:
        ArgumentError: it is none of these.
        DeviceError: it belongs to another GPU.
    """
    if isinstance(stream, int | np.integer) and not isinstance(stream, bool):
        if stream < 0:
            raise ArgumentError(f"stream={stream}: a raw stream handle is the address of a CUstream, or 0")
        return int(stream)
    where = getattr(stream, "device_index", None)  # torch
    if where is None:
        where = getattr(stream, "device_id", None)  # CuPy; -1 where it is any device's
    if isinstance(where, int) and where >= 0 and where != device:
        raise DeviceError(f"{stream!r} is a stream of GPU {where}, this Runtime is on GPU {device}")
    for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, numba
        value = getattr(stream, name, None)
        if value is not None:
            value = getattr(value, "value", value)  # numba wraps the number; 0 comes out as None
            try:
                return int(value or 0)
            except (TypeError, ValueError):
                continue
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    raise ArgumentError(
        f"stream={stream!r} is a {type(stream).__name__}: pass a torch, CuPy, numba or cuda.core stream, or "
        "the handle of a CUstream as a number"
    )


class Streams:
    """The streams of one Runtime.

    Args:
        machine, keeper, watch, host: its parts.
        join: see there.
        device: which GPU.
        timeout_s: how long to wait for room in a full ring.
    """

    def __init__(
        self,
        machine: Machine,
        keeper: Keeper,
        watch: Watch,
        host: Any,
        join: Join,
        device: int,
        timeout_s: float,
    ) -> None:
        self._machine, self._keeper, self._watch = machine, keeper, watch
        self._host, self._join = host, join
        arrays = machine.arrays
        self._address, self._words = arrays.address, arrays.words
        self._stamps, self._done = arrays.stamps, arrays.done
        self._capacity = len(arrays.stamps)
        self._device, self._timeout_s = device, timeout_s
        self._prepared = False  # what a withheld position holds
        self._lock = threading.Lock()
        """What is put into ring and stream together is put there in one order."""

    def handle(self, stream: Any, what: str) -> int:
        """The stream's handle, if work may be put into it now. None: torch's current stream, or stream 0.

        Raises MachineError on a machine without streams, and ArgumentError while a graph is captured.
        """
        handle = self._machine.current_stream() if stream is None else handle_of(stream, self._device)
        if self._machine.stream_state(handle) == CAPTURING:
            raise ArgumentError(
                f"{what}: stream {handle:#x} is being captured into a CUDA graph, whose replays would know "
                "nothing of the task: submit before or after the capture"
            )
        return handle

    def after(self, stream: Any, timeout_s: float | None = None) -> int:
        """Withhold what is submitted from now on until the stream has done what it was given so far.

        Returns the position of the task that the stream opens. Raises as `Runtime.after_stream`.
        """
        handle = self.handle(stream, "after_stream")
        return self.hold(lambda word, value: self._machine.stream_write(handle, word, value), timeout_s)

    def hold(self, open_later: Callable[[int, int], None], timeout_s: float | None = None) -> int:
        """Claim a position and withhold it; `open_later(address, value)` says who stores its stamp."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic_ns() + int(timeout_s * 1e9)
        if not self._prepared:
            self._machine.prepare(NOP)
            self._prepared = True
        with self._lock:
            while True:
                until = min(deadline, time.monotonic_ns() + _SLICE_NS)
                position, answer = self._host.hold(self._address, until)
                if answer == ring.DONE:
                    break
                if answer == ring.PARKED:
                    self._keeper.ensure_served()
                if self._keeper.closing:
                    raise ClosedError("the Runtime was closed: nothing was enqueued")
                if time.monotonic_ns() >= deadline:
                    raise QueueFull(
                        f"the ring of {self._capacity} slots stayed full for {timeout_s} s: nothing was "
                        "enqueued; wait for tickets, or raise capacity or timeout_s"
                    )
            slot = position % self._capacity
            word = int(self._stamps.ctypes.data) + 8 * slot
            try:
                self._watch.until_passed(position)
                open_later(word, (position + 1) & MASK_64)
            except BaseException:
                self._host.publish(self._address, position, 1)  # or the ring would end here
                raise
        return int(position)

    def block(self, stream: Any, ranges: Iterable[tuple[int, int]], what: str) -> None:
        """Have the stream wait until all tasks of the ranges have ended. Raises as `before_stream`."""
        handle = self.handle(stream, what)
        with self._lock:
            self._block(handle, self._pending(ranges))

    def block_all(self, stream: Any) -> None:
        """The same for every task submitted so far."""
        handle = self.handle(stream, "before_stream")
        with self._lock:
            claimed, retired = int(self._words["claimed"][0]), int(self._words["retired"][0])
            self._block(handle, self._pending([(retired, (claimed - retired) & MASK_64)]))

    def _pending(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of the ranges has not ended, without going through long ones."""
        status_of, pending = self._host.status_of, []
        for first, count in ranges:
            end = (first + count) & MASK_64
            for _ in range(min(count, 2 * FEW)):
                if status_of(self._address, first) == ring.PENDING_STATUS:
                    break
                first = (first + 1) & MASK_64
            if first != end:
                pending.append((first, (end - first) & MASK_64))
        return pending

    def _block(self, handle: int, pending: list[tuple[int, int]]) -> None:
        positions: list[int] = []
        few = sum(count for _, count in pending) <= FEW
        for first, count in pending:
            if few:
                positions += [(first + index) & MASK_64 for index in range(count)]
            else:
                positions.append(self._join(first, count))
        if not positions:
            return
        base = int(self._done.ctypes.data)
        words = [(base + 8 * (position % self._capacity), done_word(position)) for position in positions]
        # A launch that parks before them is followed by another at once.
        self._watch.until_passed(positions[-1])
        self._machine.stream_wait(handle, words)

    def settle(self, owners: list[Any], streams: list[int], timeout_s: float | None = None) -> None:
        """Withhold what is submitted next while streams still work on its operands.

        Raises ArgumentError where one of them is being captured.
        """
        for handle in self._machine.streams_of(owners, streams):
            state = self._machine.stream_state(handle)
            if state == BUSY:
                self.after(handle, timeout_s)
            elif state == CAPTURING:
                self.handle(handle, "submit")
