"""Producers in machine code, without the GIL: what submitting costs when Python is not in the way.

This calls the compiled host functions of the ring as the Runtime does (`gpuos_numba/host/ring.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

import gpuos_numba as gpuos
from gpuos_numba.host import ring
from gpuos_numba.machines import cpu_memory as m


@cache
def compiled_burst() -> Callable[..., int]:
    """`burst(host, task, count, until_ns, ranges, gate, times) -> tasks submitted`.

    Waits until the word at `gate` is not 0, then submits one task after another; `times[2 * i]` is when the
    i-th submission began and `times[2 * i + 1]` when it returned, in ns.
    """
    from numba import njit, types

    u64, submit = types.uint64, ring.compiled().submit
    now_ns, load, store, pause = m.now_ns, m.load_acquire_sys, m.store_u64, m.pause
    ZERO, ONE, SIXTEEN, EIGHT = u64(0), u64(1), u64(16), u64(8)
    YIELD = u64(100)  # so many spins give the core away: there may be fewer cores than producers

    @njit("uint64(uint64, uint64, uint64, uint64, uint64, uint64, uint64)", nogil=True)
    def burst(host, task, count, until_ns, ranges, gate, times):  # type: ignore[no-untyped-def]
        while load(gate) == ZERO:
            pause(YIELD)
        done = ZERO
        while done < count:
            store(times + done * SIXTEEN, now_ns())
            sent, _, _ = submit(host, task, ONE, ZERO, ZERO, ZERO, ZERO, until_ns, ranges, ONE)
            store(times + done * SIXTEEN + EIGHT, now_ns())
            if sent == ZERO:
                break
            done += ONE
        return done

    return burst


def run_together(
    works: Sequence[Callable[[np.ndarray, np.ndarray], None]], counts: Sequence[int]
) -> np.ndarray:
    """Run each `work(gate, times)` on a thread of its own; they begin when gate[0] becomes 1.

    Returns the times of all submissions, [submissions, 2]: begin and end in ns.
    """
    gate = np.zeros(1, np.uint64)
    times = [np.zeros((count, 2), np.uint64) for count in counts]
    errors: list[BaseException] = []

    def guarded(work: Callable[[np.ndarray, np.ndarray], None], mine: np.ndarray) -> None:
        try:
            work(gate, mine)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(work, mine)) for work, mine in zip(works, times, strict=True)
    ]
    for thread in threads:
        thread.start()
    gate[0] = 1
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return np.concatenate(times)


class Producer:
    """Submits the one task of a batch again and again."""

    def __init__(self, rt: gpuos.Runtime, batch: gpuos.Batch, count: int) -> None:
        self.rt, self.batch, self.count = rt, batch, count
        self.ranges = np.zeros((1, 2), np.uint64)
        self.burst = compiled_burst()

    def __call__(self, gate: np.ndarray, times: np.ndarray) -> None:
        until = (1 << 64) - 1
        addresses: list[Any] = [each.ctypes.data for each in (self.batch.tasks, self.ranges, gate, times)]
        task, ranges, at_gate, at_times = addresses
        host: int = self.rt._address
        sent = self.burst(host, task, self.count, until, ranges, at_gate, at_times)
        if sent != self.count:
            raise RuntimeError(f"{sent} of {self.count} tasks were submitted, then the ring was full")
