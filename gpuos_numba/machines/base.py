"""The seam between bodies and machines.

A body (pump, worker, operator) is a plain Python function made by a factory that receives `Primitives` and
binds those it needs to local names, because Numba types closure variables but not attributes of objects:

    def make_worker(m: Primitives) -> Body:
        load_acquire_gpu, barrier = m.load_acquire_gpu, m.barrier
        def worker(context, ...): ...
        return worker

Addresses, positions and counters are `u64`; every constant beside them is wrapped in `m.u64`, because
mixed arithmetic promotes to signed or float in Numba. A machine compiles the body for its target, and
tests run the same body in plain Python, one memory operation a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from .areas import HostArrays

Body = Callable[..., Any]
Primitive = Callable[..., Any]


class Primitives(Protocol):
    """What a body may call. `gpu` scope is among the blocks of one executor, `sys` includes the host.

    Shared-memory words (`load_u64` and friends on scratch addresses) are plain: `barrier` orders them.
    """

    def __hash__(self) -> int: ...

    u64: Any
    """Constructor of unsigned 64-bit values."""
    f32: Any

    def device(self, body: Body, /) -> Body:
        """Decorator for helpers that bodies call; inlined on CUDA."""

    # Who am I
    thread_index: Primitive  # () -> u64, within the block
    block_width: Primitive  # () -> u64, threads of the block; 1 on the CPU

    # Ordering
    barrier: Primitive  # () all threads of the block arrive before any leaves; orders their memory accesses
    fence_acq_rel_gpu: Primitive  # () a relaxed store after it is a release, scope gpu
    fence_acq_rel_sys: Primitive  # () the same, scope sys
    fence_sc_sys: Primitive  # () sequentially consistent: a store before it, a load after it (Dekker)

    # Shared words in global memory, 8 bytes, aligned
    load_relaxed_gpu: Primitive  # (address) -> u64
    load_acquire_gpu: Primitive
    load_relaxed_sys: Primitive
    load_acquire_sys: Primitive
    store_relaxed_gpu: Primitive  # (address, value)
    store_release_gpu: Primitive
    store_relaxed_sys: Primitive
    store_release_sys: Primitive
    load_pair_relaxed_sys: Primitive  # (address, 16-byte aligned) -> (u64, u64)
    store_pair: Primitive  # (address, u64, u64) plain, 16-byte aligned
    atomic_add_gpu: Primitive  # (address, u64) -> old value; acquire and release
    atomic_max_gpu: Primitive  # (address, u64) -> old value; relaxed

    # Scratch
    load_u64: Primitive  # (address) -> u64, plain
    store_u64: Primitive
    load_u32: Primitive  # (address) -> u64, zero-extended
    store_u32: Primitive  # (address, u64), truncated
    load_task_pair: (
        Primitive  # (scratch address, 16-byte aligned) -> (u64, u64); of scratch alone, and fastest
    )
    load_task_u64: Primitive  # (scratch address) -> u64
    load_task_u32: Primitive  # (scratch address) -> u64, zero-extended
    shared_min_u32: Primitive  # (address, u64) atomic among the block's threads
    shared_max_u32: Primitive
    copy_async: Primitive  # (scratch address, global address) 16 bytes, complete after copy_wait + barrier
    copy_wait: Primitive  # () this thread's copy_async are complete

    # Elements of operands, which are global memory always; device/elements.py builds on these
    load_f32: Primitive  # (address) -> f32
    store_f32: Primitive  # (address, f32)
    load_f32x4: Primitive  # (address, 16-byte aligned) -> 4 f32
    store_f32x4: Primitive  # (address, f32, f32, f32, f32)
    load_pair: Primitive  # (address, 16-byte aligned) -> (u64, u64), plain
    prefetch: Primitive  # (address): its 128 bytes may be read soon; they are an operand's
    load_u8: Primitive  # (address) -> u64, zero-extended
    load_u16: Primitive
    load_word: Primitive  # 32 bits -> u64, zero-extended
    load_long: Primitive  # 64 bits
    store_u8: Primitive  # (address, u64), truncated
    store_u16: Primitive
    store_word: Primitive  # 32 bits
    store_long: Primitive  # 64 bits
    f32_bits: Primitive  # (f32) -> u64, the high half 0
    bits_f32: Primitive  # (u64) -> f32 of the low half
    f16_to_f32: Primitive  # (u64, low 16 bits) -> f32
    f32_to_f16: Primitive  # (f32) -> u64; to nearest even
    bf16_to_f32: Primitive
    f32_to_bf16: Primitive
    approximate_reciprocal: Primitive  # (f32 between 2^-100 and 2^100) -> f32, to an ulp
    fused_multiply_add: Primitive  # (f32, f32, f32) -> f32, rounded once
    round_even: Primitive  # (f32) -> f32, ties to even
    round_down: Primitive  # (f32) -> f32
    round_up: Primitive
    modulo: Primitive  # (f32, f32) -> f32: C's fmod, exact, with the sign of the first

    # Sharing among threads of a block
    warp_width: Primitive  # () -> u64: 32, or 1 on the CPU
    shuffle_xor_f32: Primitive  # (f32, u64 mask) -> that of the thread whose index differs by mask
    shuffle_xor_u64: Primitive
    uniform: Primitive  # (u32, equal in all threads of the warp) -> u32: which the compiler then knows
    ballot: Primitive  # (u64 0 or 1) -> u64: bit i from thread i of the warp; all of its threads
    load_scratch_f32: Primitive  # (scratch address) -> f32
    store_scratch_f32: Primitive  # (scratch address, f32)

    # Adding to an output that several tiles or threads share
    atomic_add_f32: Primitive  # (address, f32); relaxed, scope gpu
    compare_and_swap_word: Primitive  # (address, u64 expected, u64 desired) 32 bits -> old; relaxed, gpu

    divide: Primitive  # (u64, u64 not 0) -> u64, rounded down
    divide_u32: Primitive  # the same of two that fit 32 bits

    # Time and the outside
    now_ns: Primitive  # () -> u64, monotonic
    pause: Primitive  # (u64 spins so far): be polite while polling
    dispatch: Primitive  # (context, op_id, task address, tile, arena address), all u64 -> i32 status
    is_plain: Primitive  # (op_id) -> whether the worker may run the task itself
    run_plain: Primitive  # (scratch, position of a staged task) -> the last position that was run


class HostPrimitives(Primitives, Protocol):
    """What host functions may call besides; only the CPU has these. No read-modify-write crosses a bus."""

    compare_and_swap: Primitive  # (address, expected, desired) -> 1 where it happened; acquire and release
    call_query: Primitive  # (address of a C function, its pointer argument) -> its int result, as u64
    call_current: Primitive  # (address of cuCtxGetCurrent) -> the context, 0 where there is none
    call_capturing: Primitive  # (address of cuStreamIsCapturing, stream) -> its result << 32 | its answer
    call_launch: Primitive  # (address of cuLaunchKernel, kernel, blocks, threads, stream, arguments) -> error
    sleep_us: Primitive  # (u64)
    # With the GIL held, by address:
    call_read: Primitive  # (DLPack's dltensor_from_py_object_no_sync, PyObject *, DLTensor *) -> 0 if it did
    call_stream: Primitive  # (DLPack's current_work_stream, device, address for the stream) -> 0 if it did
    call_number: Primitive  # (address of PyLong_FromLongLong, number as u64) -> PyObject *, owned
    call_nothing: Primitive  # (a function without arguments or result)


@dataclass(frozen=True, slots=True)
class Code:
    """Machine code of one injected body.

    Attributes:
        symbol: its name, which no other body has.
        data: what the machine loads or links.
    """

    symbol: str
    data: bytes


class Machine(Protocol):
    """What a Runtime asks of the place where its executor runs."""

    name: str
    """ "cpu" or "cuda"."""
    device: int
    device_name: str
    max_workers: int
    quiet_workers: int
    idle_floor_s: float
    """Parking sooner than this costs more than it saves."""
    arrays: HostArrays
    tables_address: int
    """Of `arrays.tables`, as the device sees it."""

    def prepare(self, op_id: int) -> None:
        """Make a kernel runnable. Before the first task of it is submitted."""

    target: str
    """What injected bodies are compiled for, as `inject.keys` has it."""
    threads: int
    """A block's."""
    loads_parked: bool
    """Whether `load` and `discard` need an executor that has left, and stays away until they return."""

    inlines: bool
    """Whether a worker can be compiled that has injected bodies inlined."""

    def expect(self, symbols: Mapping[int, str]) -> None:
        """A generation with bodies of these symbols, by id, is to be linked soon: begin what can be begun."""

    def link(self, codes: Mapping[int, Code], worker: Code | None = None) -> Any:
        """A generation with these injected bodies by id, to be loaded; worker: that instead of the usual one.

        Raises MachineError.
        """

    def open(self, generation: Any) -> Any:
        """What `load` takes: do of loading what waits for no executor. Raises MachineError."""

    def load(self, opened: Any) -> None:
        """Make a generation the active one, and the active one the standby; what stood by may be discarded.

        An id that the generation has not must have no task under way. Raises MachineError, and then nothing
        has changed.
        """

    @property
    def unused(self) -> int:
        """Generations that were replaced, or opened and never loaded."""

    def discard(self) -> None:
        """Unload the oldest of them."""

    def swap(self) -> None:
        """Exchange active and standby generation, which are both loaded: launches from now on have it.

        Under the launch lock, as `load` is while launches are held.
        """

    def start(self) -> None:
        """Once, from the keeper's thread, where no Ctrl-C comes: what the machine does in Python threads.

        Raises RuntimeError where one more thread is too many.
        """

    def launch(self, workers: int) -> None:
        """Count a launch in `enqueued` and queue it behind those before it. Under the launch lock.

        Returns at once unless the driver is busy freeing memory. Raises MachineError, and then it is not
        counted. A Ctrl-C leaves a launch that is counted and will run, or one that is neither.
        """

    def nudge(self) -> None:
        """From the keeper's thread, now and then while a launch runs or should: see that it does."""

    def adopt_thread(self) -> None:
        """The calling thread is the Runtime's own and will launch: make it ready."""

    def wait_exited(self, timeout_s: float) -> bool:
        """Whether every launch has left, waiting at most so long."""

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A copy of a device array's bytes, also while the executor runs. For dumps."""

    def upload(self, data: bytes) -> Any:
        """Bytes as an array that the device reads, freed when nobody holds it. Waits for no executor."""

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        """The bytes of what `upload` gave."""

    def allocate(self, size: int) -> Any:
        """The same without contents, on a line of its own."""

    def view(self, array: Any, name: str) -> Any:
        """`host.arrays.ArrayView` of an operand, or the error that says why it cannot be one."""

    def trace_start(self, ring_bytes: int, records: int) -> None:
        """Give each block of later launches a ring of so many records. While parked only."""

    def trace_stop(self) -> np.ndarray[Any, Any]:
        """Take the rings back: their bytes, block after block. While parked only."""

    def streams_of(self, owners: list[Any], streams: list[int]) -> Iterable[int]:
        """Streams that may still work on operands: `streams`, and torch's current one for its tensors."""

    def current_stream(self) -> int:
        """Torch's current stream, or the default stream. Raises MachineError where there are no streams."""

    def stream_state(self, stream: int) -> str:
        """ "idle", "busy" or "capturing". Raises MachineError where there are no streams."""

    def stream_write(self, stream: int, word: int, value: int) -> None:
        """Have a stream store a 64-bit word of the bus area once it has done what it was given, with all that
        it wrote visible before. `word` is the host's address of it."""

    def stream_wait(self, stream: int, words: list[tuple[int, int]]) -> None:
        """Have a stream wait until each word, of the bus area, is at its value or cyclically beyond."""

    def close(self) -> None:
        """Free everything. Every launch must have left. Harmless a second time, or by two threads."""
