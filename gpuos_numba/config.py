"""What a user may set about a Runtime, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import ArgumentError

MAX_CAPACITY: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one `Runtime`. Every time is in seconds.

    Attributes:
        capacity: slots of the ring, a power of two between 2 and 2^20.
        lease_s: how long a launched executor serves before it parks and lets the driver in; None is the
            paper's never-exit mode, in which module loads, frees and device synchronization block.
        idle_s: the executor parks after this long without work; None never (only useful in measurements).
        hold_s: the executor parks after this long where the next task waits for a CUDA stream: about what a
            launch costs, so that a short wait is sat out and a long one leaves the GPU to others.
        workers: most worker blocks (CUDA) or threads (CPU); None lets the machine choose: one per
            multiprocessor less one, or one per core less one.
        quiet_workers: worker blocks of a launch that found little work; None lets the machine choose.
        threads: threads per block on CUDA, a multiple of 32 from 64 to 512.
        max_run: longest run of linked tasks that one block executes before it publishes their completion.
        submit_timeout_s: how long `submit` waits for room in a full ring before it raises `QueueFull`.
        deadline_s: a wait in which no task at all completes for this long raises `HangError`; None never.
        start_position: position of the first task. For tests of wrap-around.
        input_order: "stream" has a task wait until the work already queued on the current torch or CuPy
            stream is done, so that inputs are whole, as `Runtime.after_stream` does; the host does not wait.
            "none" leaves that to the caller.
        allow_device_operators: whether `inject` takes device bodies that a user wrote, see
            `gpuos_numba.device_operator`.
        order: "auto" gives what one task after another would, whatever memory they share, and runs what is
            independent in parallel; "lane" runs the tasks of a lane in order and looks at no memory, and
            what is submitted outside any lane is a lane of its own; "none" orders nothing but lanes, linked
            batches and `after=`.
        low_priority_depth: tasks that lanes of lower priority may have unfinished while there is a lane of a
            higher one.
    """

    capacity: int = 4096
    lease_s: float | None = 0.020
    idle_s: float | None = 100e-6
    hold_s: float = 10e-6
    workers: int | None = None
    quiet_workers: int | None = None
    threads: int = 256
    max_run: int = 256
    submit_timeout_s: float = 30.0
    deadline_s: float | None = 30.0
    start_position: int = 0
    input_order: str = "stream"
    allow_device_operators: bool = False
    order: str = "auto"
    low_priority_depth: int = 256

    def __post_init__(self) -> None:
        if not 2 <= self.capacity <= MAX_CAPACITY or self.capacity & (self.capacity - 1):
            raise ArgumentError(
                f"capacity={self.capacity}: the ring needs a power of two from 2 to {MAX_CAPACITY}"
            )
        for name in ("lease_s", "idle_s", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"{name}={value!r}: give a positive number of seconds, or None")
        if not self.hold_s > 0:
            raise ArgumentError(f"hold_s={self.hold_s!r}: give a positive number of seconds")
        if not self.submit_timeout_s >= 0:
            raise ArgumentError(f"submit_timeout_s={self.submit_timeout_s!r}: give seconds, 0 or more")
        for name in ("workers", "quiet_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name}={value}: at least one worker must run, or None to choose")
        if self.threads % 32 or not 64 <= self.threads <= 512:
            raise ArgumentError(
                f"threads={self.threads}: a block has a multiple of 32 from 64 to 512 threads"
            )
        if not 1 <= self.max_run <= 256:
            raise ArgumentError(f"max_run={self.max_run}: a run has 1 to 256 tasks")
        if not 0 <= self.start_position < 1 << 64:
            raise ArgumentError(f"start_position={self.start_position}: positions are 64-bit unsigned")
        if self.input_order not in ("stream", "none"):
            raise ArgumentError(f'input_order={self.input_order!r}: choose "stream" or "none"')
        if self.order not in ("auto", "lane", "none"):
            raise ArgumentError(f'order={self.order!r}: choose "auto", "lane" or "none"')
        if self.low_priority_depth < 1:
            raise ArgumentError(f"low_priority_depth={self.low_priority_depth}: at least one task must run")
