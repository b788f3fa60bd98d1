"""The CUDA machine: one resident kernel on a GPU, driven through the driver API.

The Numba launcher costs 62 µs and Numba's deferred frees call cuMemFree, which waits for the resident kernel:
so numba-cuda compiles here and nothing else. The stream is non-blocking, or the legacy default stream would
wait for the executor.
"""

from __future__ import annotations

import ctypes
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..config import Config
from ..errors import MachineError
from ..host.arrays import ArrayView, view_cuda
from . import areas

MAPPED_PORTABLE = 0x01 | 0x02  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
NOT_READY = 600  # CUDA_ERROR_NOT_READY
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
QUIET_WORKERS = 16


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


def _free_host(driver: Any, context: Any, pinned: int, device: Any) -> None:
    driver.cuCtxPushCurrent(context)
    driver.cuMemFreeHost(pinned)
    driver.cuCtxPopCurrent()
    driver.cuDevicePrimaryCtxRelease(device)


def _free_device(driver: Any, context: Any, pointer: int) -> None:
    if int(driver.cuCtxPushCurrent(context)[0]) != 0:
        return  # the context is gone, and its memory with it
    driver.cuMemFreeAsync(pointer, 0)
    driver.cuCtxPopCurrent()


class DeviceBytes:
    """Device memory: what `__cuda_array_interface__` says, and nothing else."""

    def __init__(self, pointer: int, size: int) -> None:
        self.shape = (size,)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaMachine:
    """See `base.Machine`. Raises MachineError where no suitable GPU, driver or toolchain is found."""

    name = "cuda"
    idle_floor_s = 0.0

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
        raw = _check(driver.cuDeviceGetName(128, handle))
        self.device_name = raw.split(b"\0")[0].decode() if isinstance(raw, bytes) else str(raw)
        self.max_workers = config.workers or max(1, multiprocessors - 1)
        self.quiet_workers = min(config.quiet_workers or QUIET_WORKERS, self.max_workers)
        self._threads = config.threads

        from . import cuda_compile

        generation = cuda_compile.build((capability[0], capability[1]), config.threads)
        self._context_handle = _check(driver.cuDevicePrimaryCtxRetain(handle))
        with self._current():
            self._allocate(config)
            self._load(generation)
        # Tickets and stats read the done words after close(): they go with the last who can ask.
        finalizer = weakref.finalize(
            self, _free_host, driver, self._context_handle, self._pinned, self._handle
        )
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
        self._stream = _check(driver.cuStreamCreate(NON_BLOCKING))
        self._copies = _check(driver.cuStreamCreate(NON_BLOCKING))
        bus_offsets, bus_size = areas.carve(areas.bus_sizes(capacity))
        self._pinned = int(_check(driver.cuMemHostAlloc(bus_size, MAPPED_PORTABLE)))
        ctypes.memset(self._pinned, 0, bus_size)
        bus = np.ctypeslib.as_array(ctypes.cast(self._pinned, ctypes.POINTER(ctypes.c_uint8)), (bus_size,))
        bus_base = int(_check(driver.cuMemHostGetDevicePointer(self._pinned, 0)))
        self.arrays = areas.HostArrays(bus, capacity, start, config.max_run)
        self._sizes = areas.device_sizes(capacity, self.max_workers)
        self._offsets, device_size = areas.carve(self._sizes)
        self._memory = int(_check(driver.cuMemAlloc(device_size)))
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

    def _load(self, generation: Any) -> None:
        driver = self._driver
        self._cubin = generation.cubin  # the driver may read it lazily
        self._library = _check(driver.cuLibraryLoadData(self._cubin, [], [], 0, [], [], 0))
        (kernel,) = _check(driver.cuLibraryEnumerateKernels(1, self._library))  # there is one
        self._function = _check(driver.cuKernelGetFunction(kernel))
        self._function_handle = ctypes.c_void_p(int(self._function))
        self._stream_handle = ctypes.c_void_p(int(self._stream))
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self._launch_kernel = library.cuLaunchKernel
        self._launch_kernel.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        record = self.arrays.launch
        record["kernel"], record["stream"] = int(self._function), int(self._stream)
        record["arguments"], record["threads"] = ctypes.addressof(self._arguments), self._threads
        record["call"] = int(ctypes.cast(library.cuLaunchKernel, ctypes.c_void_p).value or 0)
        self.stream_query = int(ctypes.cast(library.cuStreamQuery, ctypes.c_void_p).value or 0)
        """Address of cuStreamQuery, for compiled code."""

    def prepare(self, op_id: int) -> None:
        """Every kernel is linked in."""

    def launch(self, workers: int) -> None:
        # Straight through ctypes: cuda-python's packing of arguments takes several microseconds.
        grid, block = (workers + 1, 1, 1), (self._threads, 1, 1)
        arguments = (self._function_handle, *grid, *block, 0, self._stream_handle, self._arguments, None)
        error = self._launch_kernel(*arguments)
        if error == INVALID_CONTEXT:  # this thread has not used CUDA yet
            with self._current():
                error = self._launch_kernel(*arguments)
        if error != 0:
            raise MachineError(f"the CUDA driver refused the executor's launch with error {error}")

    def wait_exited(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        with self._current():
            while True:
                error = int(self._driver.cuStreamQuery(self._stream)[0])
                if error == 0:
                    return True
                if error != NOT_READY:
                    _check((error,))
                if time.monotonic() > until:
                    return False
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

    def device_of(self, pointer: int) -> int | None:
        """Ordinal of the GPU that a pointer belongs to, None where it is not device memory."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        error, ordinal = self._driver.cuPointerGetAttribute(attribute, pointer)
        return int(ordinal) if int(error) == 0 else None

    def view(self, array: Any, name: str) -> ArrayView:
        return view_cuda(array, self.device, name, self.device_of)

    def settle(self, owners: list[Any], streams: list[int]) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and any(isinstance(owner, torch.Tensor) for owner in owners):
            streams = [*streams, int(torch._C._cuda_getCurrentRawStream(self.device))]
        if not streams:
            return
        with self._current():
            for stream in set(streams):
                error = int(self._driver.cuStreamQuery(stream)[0])
                if error == NOT_READY:
                    _check(self._driver.cuStreamSynchronize(stream))
                elif error != 0:
                    _check((error,))

    def close(self) -> None:
        driver = self._driver
        with self._current():
            _check(driver.cuLibraryUnload(self._library))
            _check(driver.cuMemFree(self._memory))
            _check(driver.cuStreamDestroy(self._stream))
            _check(driver.cuStreamDestroy(self._copies))
