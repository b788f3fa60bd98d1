"""The CUDA machine: one resident kernel on a GPU, driven through the driver API.

The Numba launcher costs 62 µs and Numba's deferred frees call cuMemFree, which waits for the resident kernel:
so numba-cuda compiles here and nothing else. The stream is non-blocking, or the legacy default stream would
wait for the executor.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import Config
from ..errors import MachineError
from ..host import query, ring
from ..host.arrays import ArrayView, view_cuda
from ..host.streams import BUSY, CAPTURING, IDLE
from ..protocol import CONTEXT, field
from . import areas
from .base import Code

MAPPED_PORTABLE = 0x01 | 0x02  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
WAIT_CYCLIC_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int64)(word - value) >= 0
QUIET_WORKERS = 16
STATES = {
    query.READY: IDLE,
    query.NOT_READY: BUSY,
    query.CAPTURING: CAPTURING,
    query.CAPTURE_IMPLICIT: CAPTURING,
}
SPIN_S = 200e-6
"""An executor without long tasks parks sooner, and the shortest sleep takes longer than it does."""


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MachineError(
            "the CUDA machine needs cuda-bindings and numba-cuda: pip install 'gpuos_numba[cu13]' "
            "(or cu12 for a CUDA 12 driver)"
        ) from error
    return driver


def available() -> bool:
    """Whether a GPU and all that drives it are here."""
    try:
        driver = _driver()
        if int(driver.cuInit(0)[0]) != 0:
            return False
        error, count = driver.cuDeviceGetCount()
        return int(error) == 0 and count > 0
    except Exception:  # a driver library that does not load raises whatever the loader raises
        return False


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or its error as an exception."""
    error = result[0]
    if int(error) != 0:
        raise MachineError(f"the CUDA driver answered {error!r}")
    return result[1] if len(result) == 2 else result[1:]


def _free_device(driver: Any, context: Any, pointer: int) -> None:
    if int(driver.cuCtxPushCurrent(context)[0]) != 0:
        return  # the context is gone, and its memory with it
    driver.cuMemFreeAsync(pointer, 0)
    driver.cuCtxPopCurrent()


@dataclass(slots=True, eq=False)
class _Generation:
    """An executor on its way into the driver, which may read its cubin lazily.

    Attributes:
        library: once it was handed over.
        function: once it can be launched.
        shared: the process's, and never unloaded.
    """

    cubin: bytes
    library: Any = None
    function: ctypes.c_void_p | None = None
    shared: bool = False


@dataclass(slots=True, eq=False)
class _Bus:
    """What a Runtime has that its executor, its tickets and other Runtimes' waits look at: pinned memory, the
    executor's stream, and one for copies.

    Attributes:
        free: the executor has left for good.
        awaited: by CUDA stream that was given a word to write or to wait for, an event behind it.
    """

    size: int
    pinned: int
    stream: Any
    copies: Any
    free: bool = False
    awaited: dict[int, Any] = dataclasses.field(default_factory=dict)

    def settled(self, driver: Any) -> bool:
        """Whether no stream has still to write or to read a word."""
        for stream, event in list(self.awaited.items()):
            if int(driver.cuEventQuery(event)[0]) == query.NOT_READY:
                return False
            driver.cuEventDestroy(event)
            del self.awaited[stream]
        return True


class _Gpu:
    """What the Runtimes of this process share of one GPU.

    To unload a library or to free pinned memory waits until nothing runs on the GPU: for ever, where another
    Runtime's executor has no lease; and the garbage collector, which may bring the last ticket of a closed
    Runtime, comes anywhere. So what was used is used again, and unloaded while every executor is parked.

    Attributes:
        context: the primary context, retained until the process ends.
        executors: the built-in generation by threads of a block.
        spare: what closed Runtimes had.
        retired: libraries that nobody launches any more.
        open: what machines have that are not closed; that of a stuck one stays.
    """

    def __init__(self, driver: Any, handle: Any) -> None:
        self.context = _check(driver.cuDevicePrimaryCtxRetain(handle))
        self.executors: dict[int, _Generation] = {}
        self.spare: list[_Bus] = []
        self.retired: list[Any] = []
        self.open: set[_Bus] = set()

    def bus(self, driver: Any, size: int) -> _Bus | None:
        """A spare one of that size. Nobody else has it: one `pop` decides."""
        for _ in range(len(self.spare)):
            try:
                bus = self.spare.pop(0)
            except IndexError:
                break
            if bus.size == size and bus.settled(driver):
                bus.free = False
                return bus
            self.spare.append(bus)
        return None


_GPUS: dict[int, _Gpu] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_GPUS.clear)


def _put_back(gpu: _Gpu, bus: _Bus) -> None:
    """Nobody looks at it any more. From the garbage collector: no call of the driver."""
    if bus.free:  # else its executor is stuck, and may still write
        gpu.spare.append(bus)


class DeviceBytes:
    """Device memory: what `__cuda_array_interface__` says, and nothing else."""

    def __init__(self, pointer: int, size: int) -> None:
        self.shape = (size,)
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaMachine:
    """See `base.Machine`. Usable after `move_in`.

    Raises MachineError where no suitable GPU, driver or toolchain is found.
    """

    name = "cuda"
    idle_floor_s = 0.0
    loads_parked = inlines = True

    def __init__(self, config: Config, device: int) -> None:
        driver = self._driver = _driver()
        _check(driver.cuInit(0))
        count = _check(driver.cuDeviceGetCount())
        if not 0 <= device < count:
            raise MachineError(f"device={device}: this machine has {count} GPU(s), numbered from 0")
        self.device = device
        handle = self._handle = _check(driver.cuDeviceGet(device))
        attribute = driver.CUdevice_attribute
        capability = tuple(
            int(_check(driver.cuDeviceGetAttribute(which, handle)))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        multiprocessors = int(
            _check(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle))
        )
        stream_words = attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        self._stream_words = bool(int(_check(driver.cuDeviceGetAttribute(stream_words, handle))))
        raw = _check(driver.cuDeviceGetName(128, handle))
        self.device_name = raw.split(b"\0")[0].decode() if isinstance(raw, bytes) else str(raw)
        self.max_workers = config.workers or max(1, multiprocessors - 1)
        self.quiet_workers = min(config.quiet_workers or QUIET_WORKERS, self.max_workers)
        self.threads, self._capability = config.threads, (capability[0], capability[1])
        self.target = f"sm_{capability[0]}{capability[1]}"
        self._trace = (0, 0)

        from . import cuda_compile

        self._executor = cuda_compile.build(self._capability, config.threads).cubin

    def move_in(self, config: Config) -> None:
        """Take memory, and load the executor if this process has not. No executor of it should run."""
        driver = self._driver
        gpu = self._gpu = _GPUS.get(self.device) or _GPUS.setdefault(self.device, _Gpu(driver, self._handle))
        self._context_handle = gpu.context
        with self._current():
            self._allocate(config)
            self._bind()
            loading = driver.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING
            self._lazy = _check(driver.cuModuleGetLoadingMode()) == loading
            self._unused: list[_Generation] = []  # neither active nor standby, the oldest first
            executor = gpu.executors.get(config.threads)
            if executor is None:
                executor = self._ready(_Generation(self._executor, shared=True))
                gpu.executors[config.threads] = executor
            self._activate(executor, None)
        gpu.open.add(self._bus)
        # Tickets and stats read the done words after close(): they go with the last who can ask.
        finalizer = weakref.finalize(self, _put_back, gpu, self._bus)
        finalizer.atexit = False

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the primary context current for this thread, and put back what was."""
        _check(self._driver.cuCtxPushCurrent(self._context_handle))
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()

    def _allocate(self, config: Config) -> None:
        driver, capacity, start = self._driver, config.capacity, config.start_position
        bus_offsets, bus_size = areas.carve(areas.bus_sizes(capacity))
        self._bus = self._gpu.bus(driver, bus_size) or self._new_bus(bus_size)
        self._stream, self._copies, self._pinned = self._bus.stream, self._bus.copies, self._bus.pinned
        ctypes.memset(self._pinned, 0, bus_size)
        bus = np.ctypeslib.as_array(ctypes.cast(self._pinned, ctypes.POINTER(ctypes.c_uint8)), (bus_size,))
        bus_base = self._bus_base = int(_check(driver.cuMemHostGetDevicePointer(self._pinned, 0)))
        self.arrays = areas.HostArrays(bus, capacity, start, config.max_run)
        self._sizes = areas.device_sizes(capacity, self.max_workers)
        self._offsets, device_size = areas.carve(self._sizes)
        # From a pool: cuMemFree would wait until every executor has left.
        self._memory = int(_check(driver.cuMemAllocAsync(device_size, self._stream)))
        addresses = {name: self._memory + at for name, at in self._offsets.items()}
        addresses |= {name: bus_base + at for name, at in bus_offsets.items()}
        self.tables_address = addresses["tables"]
        _check(driver.cuMemsetD8Async(self._memory, 0, device_size, self._stream))
        first = {
            "device_done": areas.first_words(capacity, start, stamp=False),
            "device_state": areas.device_state(start),
            "context": areas.device_context(addresses, capacity),
        }
        for name, values in first.items():
            _check(driver.cuMemcpyHtoDAsync(addresses[name], values.ctypes.data, values.nbytes, self._stream))
        _check(driver.cuStreamSynchronize(self._stream))  # before `first` goes
        self._argument = ctypes.c_uint64(addresses["context"])
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._argument))

    def _new_bus(self, size: int) -> _Bus:
        driver = self._driver
        # The first in line for a multiprocessor that a big kernel's block has left.
        _, highest = _check(driver.cuCtxGetStreamPriorityRange())
        stream = _check(driver.cuStreamCreateWithPriority(NON_BLOCKING, highest))
        copies = _check(driver.cuStreamCreate(NON_BLOCKING))
        return _Bus(size, int(_check(driver.cuMemHostAlloc(size, MAPPED_PORTABLE))), stream, copies)

    def _bind(self) -> None:
        """What compiled launches and queries need."""
        self._stream_handle = ctypes.c_void_p(int(self._stream))
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        record = self.arrays.launch
        record["stream"], record["arguments"] = int(self._stream), ctypes.addressof(self._arguments)
        record["threads"] = self.threads
        record["call"] = int(ctypes.cast(library.cuLaunchKernel, ctypes.c_void_p).value or 0)
        self._driver_record = query.driver_record(library, int(self._context_handle))
        self.stream_driver = int(self._driver_record.ctypes.data)
        """Address of the `query.DRIVER`, for compiled code."""
        self._query = query.compiled().query

    def prepare(self, op_id: int) -> None:
        """Every kernel is linked in."""

    # --- generations ---

    def _hand_over(self, generation: _Generation) -> None:
        library = self._driver.cuLibraryLoadData(generation.cubin, [], [], 0, [], [], 0)
        generation.library = _check(library)

    def _ready(self, generation: _Generation) -> _Generation:
        """Load an executor. Blocks until the one that runs has left."""
        if generation.library is None:
            self._hand_over(generation)
        (kernel,) = _check(self._driver.cuLibraryEnumerateKernels(1, generation.library))  # there is one
        function = _check(self._driver.cuKernelGetFunction(kernel))
        generation.function = ctypes.c_void_p(int(function))
        return generation

    def _activate(self, generation: _Generation, standby: _Generation | None) -> None:
        """Launches from now on are of this one, those of compiled code too. No call: no Ctrl-C within."""
        assert generation.function is not None
        self._active, self._standby = generation, standby
        self.arrays.launch["kernel"] = generation.function.value or 0

    def expect(self, symbols: Mapping[int, str]) -> None:
        from . import cuda_switch

        cuda_switch.begin(self._capability, self.threads, list(symbols.items()))

    def link(self, codes: Mapping[int, Code], worker: Code | None = None) -> bytes:
        from . import cuda_compile

        return cuda_compile.link(self._capability, self.threads, codes, worker).cubin

    def open(self, generation: bytes) -> _Generation:
        opened = _Generation(generation)
        # A library that is loaded lazily waits for nobody until a function of it is asked for: the driver
        # only parses it. Loaded eagerly, it would wait for the executor here.
        if self._lazy:
            with self._current():
                self._hand_over(opened)
        self._unused.append(opened)
        return opened

    def load(self, opened: _Generation) -> None:
        with self._current():
            self._ready(opened)
        old = self._standby
        # One that a Ctrl-C leaves in no list is never unloaded, which harms nobody.
        self._unused.remove(opened)
        self._activate(opened, self._active)
        if old is not None:
            self._unused.append(old)

    @property
    def unused(self) -> int:
        return len(self._gpu.retired) + len(self._unused)

    def discard(self) -> None:
        # Unloading waits for the device, as loading does.
        if self._unused:
            self._retire(self._unused.pop(0))
        try:
            library = self._gpu.retired.pop(0)
        except IndexError:
            return
        with self._current():
            self._driver.cuLibraryUnload(library)  # an error: it stays, and nobody needs it

    def _retire(self, generation: _Generation | None) -> None:
        if generation is not None and generation.library is not None and not generation.shared:
            self._gpu.retired.append(generation.library)

    def swap(self) -> None:
        if self._standby is None:
            raise MachineError("there is no standby generation: nothing was injected yet")
        self._activate(self._standby, self._active)

    def start(self) -> None:
        """The GPU needs no threads."""

    def launch(self, workers: int) -> None:
        launch, address = ring.compiled().launch, self.arrays.address
        error = launch(address, workers)
        if error == query.INVALID_CONTEXT:  # this thread has not used CUDA yet
            with self._current():
                error = launch(address, workers)
        if error != 0:
            raise MachineError(f"the CUDA driver refused the executor's launch with error {error}")

    def nudge(self) -> None:
        """The driver knows of every launch that was counted."""

    def adopt_thread(self) -> None:
        _check(self._driver.cuCtxPushCurrent(self._context_handle))

    def wait_exited(self, timeout_s: float) -> bool:
        begin = time.monotonic()
        with self._current():
            while True:
                error = self._query(self.stream_driver, self._stream_handle.value)
                if error == 0:
                    return True
                if error != query.NOT_READY:
                    _check((error,))
                waited_s = time.monotonic() - begin
                if waited_s > timeout_s:
                    return False
                if waited_s > SPIN_S:
                    time.sleep(20e-6)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        values = np.zeros(self._sizes[name], np.uint8)
        with self._current():
            source = self._memory + self._offsets[name]
            _check(self._driver.cuMemcpyDtoHAsync(values.ctypes.data, source, values.nbytes, self._copies))
            _check(self._driver.cuStreamSynchronize(self._copies))
        return values

    def upload(self, data: bytes) -> DeviceBytes:
        return self._device_bytes(len(data), data)

    def allocate(self, size: int) -> DeviceBytes:
        return self._device_bytes(size, None)

    def _device_bytes(self, size: int, data: bytes | None) -> DeviceBytes:
        driver = self._driver
        with self._current():
            # From a pool: cuMemFree would wait until the executor has left.
            pointer = int(_check(driver.cuMemAllocAsync(size, self._copies)))
            if data is not None:
                _check(driver.cuMemcpyHtoDAsync(pointer, data, size, self._copies))
            _check(driver.cuStreamSynchronize(self._copies))
        array = DeviceBytes(pointer, size)
        finalizer = weakref.finalize(array, _free_device, driver, self._context_handle, pointer)
        finalizer.atexit = False
        return array

    def download(self, array: DeviceBytes) -> np.ndarray[Any, Any]:
        values = np.zeros(array.shape, np.uint8)
        with self._current():
            _check(
                self._driver.cuMemcpyDtoHAsync(values.ctypes.data, array.pointer, values.nbytes, self._copies)
            )
            _check(self._driver.cuStreamSynchronize(self._copies))
        return values

    def device_of(self, pointer: int) -> int | None:
        """Ordinal of the GPU that a pointer belongs to, None where it is not device memory."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        error, ordinal = self._driver.cuPointerGetAttribute(attribute, pointer)
        return int(ordinal) if int(error) == 0 else None

    def view(self, array: Any, name: str) -> ArrayView:
        return view_cuda(array, self.device, name, self.device_of)

    def trace_start(self, ring_bytes: int, records: int) -> None:
        driver, size = self._driver, (self.max_workers + 1) * ring_bytes
        with self._current():
            self._trace = (int(_check(driver.cuMemAllocAsync(size, self._copies))), size)
            _check(driver.cuMemsetD8Async(self._trace[0], 0, size, self._copies))
            self._put_context(self._trace[0], records - 1)

    def trace_stop(self) -> np.ndarray[Any, Any]:
        pointer, size = self._trace
        values = np.zeros(size, np.uint8)
        with self._current():
            self._put_context(0, 0)
            _check(self._driver.cuMemcpyDtoHAsync(values.ctypes.data, pointer, size, self._copies))
            _check(self._driver.cuStreamSynchronize(self._copies))
            _check(self._driver.cuMemFreeAsync(pointer, self._copies))
        return values

    def _put_context(self, trace: int, mask: int) -> None:
        """Change what the next launch copies; the executor is parked."""
        words = np.array([trace, mask], np.uint64)
        at = self._memory + self._offsets["context"] + field(CONTEXT, "trace")
        _check(self._driver.cuMemcpyHtoDAsync(at, words.ctypes.data, words.nbytes, self._copies))
        _check(self._driver.cuStreamSynchronize(self._copies))

    def streams_of(self, owners: list[Any], streams: list[int]) -> Iterable[int]:
        torch = sys.modules.get("torch")
        if torch is not None and any(isinstance(owner, torch.Tensor) for owner in owners):
            return {*streams, int(torch._C._cuda_getCurrentRawStream(self.device))}
        return set(streams)

    def current_stream(self) -> int:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return int(torch._C._cuda_getCurrentRawStream(self.device))
        return 0

    def stream_state(self, stream: int) -> str:
        error = self._query(self.stream_driver, stream)
        if error == query.INVALID_CONTEXT:  # this thread has not used CUDA yet, or uses another GPU now
            with self._current():
                error = self._query(self.stream_driver, stream)
        if error not in STATES:
            raise MachineError(f"the CUDA driver answered {error} when asked about stream {stream:#x}")
        return STATES[error]

    def stream_write(self, stream: int, word: int, value: int) -> None:
        with self._current():
            if self._stream_words:
                # Without the flag that forgoes it there is a fence of system scope before the store.
                _check(self._driver.cuStreamWriteValue64(stream, self._on_bus(word), value, 0))
                self._await(stream)
                return
            _check(self._driver.cuStreamSynchronize(stream))
        ctypes.c_uint64.from_address(word).value = value

    def stream_wait(self, stream: int, words: list[tuple[int, int]]) -> None:
        if not self._stream_words:
            raise MachineError(
                f"{self.device_name} has no 64-bit stream memory operations: wait for the tickets on the host"
            )
        with self._current():
            for word, value in words:
                _check(self._driver.cuStreamWaitValue64(stream, self._on_bus(word), value, WAIT_CYCLIC_GEQ))
            self._await(stream)

    def _await(self, stream: int) -> None:
        """Note that a stream has a word before it: until it has come there the word is nobody else's."""
        event = self._bus.awaited.get(stream)
        if event is None:
            event = self._bus.awaited[stream] = _check(self._driver.cuEventCreate(DISABLE_TIMING))
        _check(self._driver.cuEventRecord(event, stream))

    def _on_bus(self, word: int) -> int:
        """The device's address of a word of the bus area."""
        return self._bus_base + (word - self._pinned)

    def close(self) -> None:
        memory, self._memory = self._memory, 0
        if memory == 0:  # another thread does, or did
            return
        self._gpu.open.discard(self._bus)
        with self._current():
            for generation in (self._active, self._standby, *self._unused):
                self._retire(generation)
            self._standby, self._unused = None, []
            while self._gpu.retired and not self._gpu.open:  # nothing of this process can run
                self.discard()
            _check(self._driver.cuMemFreeAsync(memory, self._stream))
        self._bus.free = True
