"""The CPU machine: the same bodies on OS threads, one a block. It really runs; nothing is simulated.

Threads start with the first launch, run blocks without the GIL, and sleep between launches. Launches follow
each other as kernels in a CUDA stream do: the next begins when the last block of this one has left.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..config import Config
from ..host.arrays import ArrayView, view_cpu
from ..protocol import SCRATCH_BYTES
from . import areas


@cache
def compiled() -> SimpleNamespace:
    """The executor's block as machine code, compiled once a process (some seconds)."""
    from numba import njit, types

    from ..device.executor import make_block
    from ..device.pump import make_pump
    from ..device.worker import make_worker
    from . import cpu_memory as m

    u64 = types.uint64
    block = make_block(
        m.device(make_pump(m)), m.device(make_worker(m)), m.u64, njit(types.void(*[u64] * 4), nogil=True)
    )
    return SimpleNamespace(block=block)


_compiling = threading.Lock()


@cache
def _compile_body(make: Any) -> Any:
    from numba import cfunc, types

    from . import cpu_memory as m

    signature = types.int32(*[types.uint64] * 4)
    return cfunc(signature, error_model="numpy")(make(m))


def compiled_kernel(op_id: int) -> Any:
    """A kernel as a C function, compiled at its first use in the process; kernels of one factory are one."""
    from ..device.operators import KERNELS

    with _compiling:
        return _compile_body(KERNELS[op_id].make)


class CpuMachine:
    """See `base.Machine`."""

    name = "cpu"
    idle_floor_s = 0.002

    def __init__(self, config: Config) -> None:
        self._code = compiled()
        self.device_name = platform.processor() or platform.machine()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.max_workers = config.workers or max(1, cores - 1)
        self.quiet_workers = min(config.quiet_workers or self.max_workers, self.max_workers)
        capacity, start = config.capacity, config.start_position
        bus_offsets, bus_size = areas.carve(areas.bus_sizes(capacity))
        bus = areas.aligned_bytes(bus_size)
        self.arrays = areas.HostArrays(bus, capacity, start, config.max_run)
        self._sizes = areas.device_sizes(capacity, self.max_workers)
        self._offsets, device_size = areas.carve(self._sizes)
        self._device = areas.aligned_bytes(device_size)
        base, bus_base = int(self._device.ctypes.data), int(bus.ctypes.data)
        addresses = {name: base + at for name, at in self._offsets.items()}
        addresses |= {name: bus_base + at for name, at in bus_offsets.items()}
        addresses["table"] = int(self.arrays.table.ctypes.data)
        self._put("device_done", areas.first_words(capacity, start, stamp=False))
        self._put("device_state", areas.device_state(start))
        self._put("context", areas.device_context(addresses, capacity))
        self._context = addresses["context"]
        self.tables_address = addresses["tables"]
        self._scratch = [areas.aligned_bytes(SCRATCH_BYTES) for _ in range(self.max_workers + 1)]
        self._changed = threading.Condition()
        self._launches: deque[int] = deque()  # workers of the launches that have not ended; [0] runs
        self._ended = 0  # launches that have
        self._left = 0  # blocks that have left the running launch
        self._closed = False
        self._threads: list[threading.Thread] = []

    def _put(self, name: str, values: np.ndarray[Any, Any]) -> None:
        at = self._offsets[name]
        self._device[at : at + values.nbytes] = values.view(np.uint8)

    def prepare(self, op_id: int) -> None:
        self.arrays.table[op_id] = compiled_kernel(op_id).address

    def launch(self, workers: int) -> None:
        with self._changed:
            self._launches.append(workers)
            if not self._threads:
                for number in range(self.max_workers + 1):
                    thread = threading.Thread(
                        target=self._serve, args=(number,), name=f"gpuos-block-{number}", daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()
            self._changed.notify_all()

    def _serve(self, number: int) -> None:
        scratch = int(self._scratch[number].ctypes.data)
        launch = 0
        while True:
            with self._changed:
                while not self._closed and not (self._launches and self._ended == launch):
                    self._changed.wait()
                if self._closed:
                    return
                workers = self._launches[0]
            if number <= workers:
                self._code.block(self._context, number, workers, scratch)
            with self._changed:
                self._left += 1
                if self._left == self.max_workers + 1:
                    self._left = 0
                    self._ended += 1
                    self._launches.popleft()
                    self._changed.notify_all()
            launch += 1

    def wait_exited(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._launches:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(min(left, 0.1)):
                    if until <= time.monotonic():
                        return False
        return True

    def read(self, name: str) -> np.ndarray[Any, Any]:
        at = self._offsets[name]
        return self._device[at : at + self._sizes[name]].copy()

    def upload(self, data: bytes) -> np.ndarray[Any, Any]:
        return np.frombuffer(data, np.uint8).copy()

    def allocate(self, size: int) -> np.ndarray[Any, Any]:
        return areas.aligned_bytes(size)

    def view(self, array: Any, name: str) -> ArrayView:
        return view_cpu(array, name)

    def settle(self, owners: list[Any], streams: list[int]) -> None:
        """Host memory is whole when Python can name it."""

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)
