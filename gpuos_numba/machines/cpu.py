"""The CPU machine: the same bodies on OS threads, one a block. It really runs; nothing is simulated.

Threads run blocks without the GIL, and sleep between launches. Launches follow each other as kernels in a
CUDA stream do: the next begins when the last block of this one has left.
"""

from __future__ import annotations

import contextlib
import os
import platform
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ..config import Config
from ..device.operators.table import INJECTED_IDS
from ..errors import MachineError
from ..host.arrays import ArrayView, view_cpu
from ..inject.keys import cpu_target
from ..protocol import CONTEXT, SCRATCH_BYTES
from . import areas
from .base import Code

NO_STREAMS = (
    "the CPU machine has no CUDA streams, and its tasks see all that the host wrote before: leave the call "
    'out, or use Runtime(machine="cuda")'
)

_QUEUED: Final = 64
"""Launches that may be queued; there is one that runs, and at most one or two behind it."""


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


def compile_object(body: Any, symbol: str) -> bytes:
    """An injected body as an object file with one C function, for `CpuMachine.link` in another process."""
    from llvmlite import binding
    from numba import cfunc, types

    made = cfunc(types.int32(*[types.uint64] * 4), error_model="numpy")(body)
    module = binding.parse_assembly(made.inspect_llvm())
    module.get_function(made.native_name).name = symbol
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
    return bytes(machine.emit_object(module))


def compiled_kernel(op_id: int) -> Any:
    """A kernel as a C function, compiled at its first use in the process; kernels of one factory are one."""
    from ..device.operators import KERNELS

    with _compiling:
        return _compile_body(KERNELS[op_id].make)


def _is_whole(data: bytes) -> bool:
    """Whether an ELF file holds the sections that it says it has. Other formats are LLVM's to judge."""
    if data[:4] != b"\x7fELF":
        return bool(data) and sys.platform != "linux"
    if len(data) < 64:
        return False
    (sections,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    return bool(0 < sections and count > 0 and sections + size * count <= len(data))


class _Loaded:
    """An injected body as machine code in this process; gone when nobody holds it.

    Raises:
        MachineError: it is no object file of this machine's, or lacks its symbol.
    """

    __slots__ = ("__weakref__", "_engine", "address")

    def __init__(self, code: Code) -> None:
        from llvmlite import binding

        if not _is_whole(code.data):  # LLVM does not survive it
            raise MachineError(f"{code.symbol} is no whole object file: clear the cache")
        compiled()  # Numba's helpers have names from here on
        target = binding.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
        try:
            self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
            self._engine.add_object_file(binding.ObjectFileRef.from_data(code.data))
            self._engine.finalize_object()
        except RuntimeError as error:
            raise MachineError(f"{code.symbol} cannot be loaded: {error}") from error
        self.address = int(self._engine.get_function_address(code.symbol))
        if self.address == 0:
            raise MachineError(f"{code.symbol} is not in its object file")


class CpuMachine:
    """See `base.Machine`."""

    name = "cpu"
    idle_floor_s = 0.002
    loads_parked = inlines = False
    threads, unused = 1, 0

    def __init__(self, config: Config) -> None:
        self._code = compiled()
        self.target = cpu_target()
        self._loaded: weakref.WeakValueDictionary[str, _Loaded] = weakref.WeakValueDictionary()
        self._active: dict[int, _Loaded] = {}
        self._standby: dict[int, _Loaded] = {}
        self.device = 0
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
        self._enqueued = self.arrays.words["enqueued"]
        self._widths = np.zeros(_QUEUED, np.uint64)  # workers of each launch that has not ended
        # Who launches may be interrupted between any two steps, so no Condition: a lock for each block, which
        # waits while nobody has released it.
        self._bells = [threading.Lock() for _ in range(self.max_workers + 1)]
        self._leaving = threading.Lock()
        self._ended = 0  # launches that have
        self._left = 0  # blocks that have left the running launch
        self._trace = areas.aligned_bytes(0)
        self._closed = False
        self._threads: list[threading.Thread] = []

    def _put(self, name: str, values: np.ndarray[Any, Any]) -> None:
        at = self._offsets[name]
        self._device[at : at + values.nbytes] = values.view(np.uint8)

    def prepare(self, op_id: int) -> None:
        if self.arrays.table[op_id] == 0:  # otherwise it came with a generation
            self.arrays.table[op_id] = compiled_kernel(op_id).address

    # --- generations: what the table holds for the injected ids ---

    def link(self, codes: Mapping[int, Code], worker: Code | None = None) -> dict[int, _Loaded]:
        if max(codes, default=0) >= len(self.arrays.table):
            raise MachineError(
                f"{len(self.arrays.table) - INJECTED_IDS} bodies were injected into this Runtime, more than "
                "its table holds: make a new Runtime"
            )
        bodies = {}
        for op_id, code in codes.items():
            body = self._loaded.get(code.symbol)
            if body is None:
                body = self._loaded[code.symbol] = _Loaded(code)
            bodies[op_id] = body
        return bodies

    def expect(self, symbols: Mapping[int, str]) -> None:
        """Nothing is linked."""

    def open(self, generation: dict[int, _Loaded]) -> dict[int, _Loaded]:
        return generation

    def load(self, opened: dict[int, _Loaded]) -> None:
        self._standby, self._active = self._active, opened
        self._fill()

    def discard(self) -> None:
        """None is unused: they go when nobody holds them."""

    def swap(self) -> None:
        self._active, self._standby = self._standby, self._active
        self._fill()

    def _fill(self) -> None:
        """Each place is one word, and who submits a task of it does so after this."""
        for op_id in self._standby.keys() - self._active.keys():
            self.arrays.table[op_id] = 0
        for op_id, body in self._active.items():
            self.arrays.table[op_id] = body.address

    def start(self) -> None:
        for number in range(self.max_workers + 1):
            thread = threading.Thread(
                target=self._serve, args=(number,), name=f"gpuos-block-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def launch(self, workers: int) -> None:
        enqueued = self._enqueued
        number = int(enqueued[0])
        if number - self._ended >= _QUEUED:
            raise MachineError(f"{_QUEUED} launches are queued already")
        self._widths[number % _QUEUED] = workers
        enqueued += 1  # from here on it will run
        self.nudge()

    def nudge(self) -> None:
        for bell in self._bells:
            with contextlib.suppress(RuntimeError):  # it is released already
                bell.release()

    def _serve(self, number: int) -> None:
        scratch, bell = int(self._scratch[number].ctypes.data), self._bells[number]
        launch = 0
        while True:
            while not self._closed and (self._ended != launch or int(self._enqueued[0]) == launch):
                bell.acquire()
            if self._closed:
                return
            workers = int(self._widths[launch % _QUEUED])
            if number <= workers:
                self._code.block(self._context, number, workers, scratch)
            launch += 1
            with self._leaving:
                self._left += 1
                last = self._left > self.max_workers
                if last:
                    self._left, self._ended = 0, launch
            if last:
                self.nudge()

    def adopt_thread(self) -> None:
        """Every thread is."""

    def wait_exited(self, timeout_s: float) -> bool:
        self.nudge()  # an interrupt may have come while the last launch did
        until, pause_s = time.monotonic() + timeout_s, 20e-6
        while self._ended != int(self._enqueued[0]):
            if time.monotonic() > until:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        return True

    def read(self, name: str) -> np.ndarray[Any, Any]:
        at = self._offsets[name]
        return self._device[at : at + self._sizes[name]].copy()

    def upload(self, data: bytes) -> np.ndarray[Any, Any]:
        return np.frombuffer(data, np.uint8).copy()

    def download(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return array.copy()

    def allocate(self, size: int) -> np.ndarray[Any, Any]:
        return areas.aligned_bytes(size)

    def view(self, array: Any, name: str) -> ArrayView:
        return view_cpu(array, name)

    def trace_start(self, ring_bytes: int, records: int) -> None:
        self._trace = areas.aligned_bytes((self.max_workers + 1) * ring_bytes)
        self._put_context(int(self._trace.ctypes.data), records - 1)

    def trace_stop(self) -> np.ndarray[Any, Any]:
        self._put_context(0, 0)
        trace, self._trace = self._trace, areas.aligned_bytes(0)
        return trace

    def _put_context(self, trace: int, mask: int) -> None:
        at = self._offsets["context"]
        context = self._device[at : at + CONTEXT.itemsize].view(CONTEXT)
        context["trace"], context["trace_mask"] = trace, mask

    def streams_of(self, owners: list[Any], streams: list[int]) -> Iterable[int]:
        return ()  # host memory is whole when Python can name it

    def current_stream(self) -> int:
        raise MachineError(NO_STREAMS)

    def stream_state(self, stream: int) -> str:
        raise MachineError(NO_STREAMS)

    def stream_write(self, stream: int, word: int, value: int) -> None:
        raise MachineError(NO_STREAMS)

    def stream_wait(self, stream: int, words: list[tuple[int, int]]) -> None:
        raise MachineError(NO_STREAMS)

    def close(self) -> None:
        self._closed = True
        self.nudge()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)
