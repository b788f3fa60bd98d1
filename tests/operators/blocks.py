"""A block of any width in plain Python: a kernel, a plan and arrays arrive, results leave.

The CPU machine's blocks have one thread. What bodies do with warps, barriers and scratch would be proved on a
GPU alone; here each thread of a block runs the body as it is written, one at a time in any order, until it
comes to a barrier or to a shuffle. A barrier that is missing lets one thread run ahead of the others.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gpuos_numba.descriptor import (
    DTYPE_NAMES,
    FIFTH_INPUT,
    LAYOUT,
    MAX_INPUTS,
    SCALAR_BYTES,
    TASK,
    DType,
    Flag,
)
from gpuos_numba.device.operators import KERNELS, TABLE
from gpuos_numba.device.operators.table import Operand, Plan, pack_dtypes
from gpuos_numba.protocol import ARENA_BYTES, CONTEXT, field

u64, f32 = np.uint64, np.float32
GARBAGE = 0xA5


class Block:
    """A block's primitives, and its threads. See `machines.base.Primitives`.

    Args:
        width: threads.
        lanes: of a warp, a power of two.
        seed: of the order in which threads run.
    """

    u64, f32 = u64, f32

    def __init__(self, width: int, lanes: int = 32, seed: int = 0) -> None:
        self.width, self.lanes = width, min(lanes, width)
        self.random = np.random.default_rng(seed)
        self._mine = threading.local()
        self._wake = [threading.Semaphore(0) for _ in range(width)]
        self._back = threading.Semaphore(0)
        self._waits: list[Any] = [None] * width
        self.barriers = 0

    # --- threads ---

    def run(self, body: Callable[..., Any], *arguments: Any) -> list[int]:
        """What each thread returned."""
        results: list[Any] = [None] * self.width

        def thread(index: int) -> None:
            self._mine.index = index
            self._wake[index].acquire()
            try:
                with np.errstate(all="ignore"):
                    results[index] = int(body(*arguments))
                self._waits[index] = "left"
            except BaseException as error:
                results[index] = error
                self._waits[index] = "failed"
            self._back.release()

        threads = [threading.Thread(target=thread, args=(index,), daemon=True) for index in range(self.width)]
        for each in threads:
            each.start()
        ready = list(range(self.width))
        while ready:
            for index in self.random.permutation(ready):
                self._wake[index].release()
                self._back.acquire()
                if self._waits[index] == "failed":
                    raise results[index]
            ready = self._ready()
        assert all(wait == "left" for wait in self._waits), f"threads wait for others: {self._waits}"
        return results

    def _ready(self) -> list[int]:
        """Threads that whatever they waited for lets go on."""
        found = []
        for first in range(0, self.width, self.lanes):
            warp = self._waits[first : first + self.lanes]
            if all(isinstance(wait, tuple) for wait in warp):
                values = [wait[0] for wait in warp]
                for lane, (_, mask) in enumerate(warp):
                    self._waits[first + lane] = [values[lane ^ mask]]
                found += range(first, first + self.lanes)
        if not found and all(wait == "barrier" for wait in self._waits):
            self.barriers += 1
            found = list(range(self.width))
        return found

    def _wait(self, reason: Any) -> Any:
        index = self._mine.index
        self._waits[index] = reason
        self._back.release()
        self._wake[index].acquire()
        return self._waits[index]

    # --- primitives ---

    def device(self, body: Any) -> Any:
        return body

    def thread_index(self) -> Any:
        return u64(self._mine.index)

    def block_width(self) -> Any:
        return u64(self.width)

    def warp_width(self) -> Any:
        return u64(self.lanes)

    def barrier(self) -> None:
        self._wait("barrier")

    def shuffle_xor_f32(self, value: Any, mask: Any) -> Any:
        assert isinstance(value, f32), type(value)
        return self._wait((value, int(mask)))[0]

    def divide_u32(self, dividend: Any, divisor: Any) -> Any:
        assert dividend < 1 << 32 and 0 < divisor < 1 << 32
        return u64(int(dividend) // int(divisor))

    def divide(self, dividend: Any, divisor: Any) -> Any:
        assert isinstance(dividend, u64) and isinstance(divisor, u64)
        return dividend // divisor

    def fused_multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        assert isinstance(a, f32) and isinstance(b, f32) and isinstance(c, f32)
        return f32(np.float64(a) * np.float64(b) + np.float64(c))

    def bits_f32(self, bits: Any) -> Any:
        return np.uint32(int(bits) & 0xFFFFFFFF).view(f32)

    def f32_bits(self, value: Any) -> Any:
        return u64(f32(value).view(np.uint32))

    def f16_to_f32(self, bits: Any) -> Any:
        return f32(np.uint16(int(bits) & 0xFFFF).view(np.float16))

    def f32_to_f16(self, value: Any) -> Any:
        return u64(np.float16(value).view(np.uint16))

    def bf16_to_f32(self, bits: Any) -> Any:
        return np.uint32((int(bits) & 0xFFFF) << 16).view(f32)

    def f32_to_bf16(self, value: Any) -> Any:
        return u64(np.array(value).astype(ml_dtypes.bfloat16).view(np.uint16))

    def load_pair(self, address: Any) -> Any:
        assert int(address) % 16 == 0
        return _load(ctypes.c_uint64, address), _load(ctypes.c_uint64, int(address) + 8)

    load_task_pair = load_pair

    def store_pair(self, address: Any, low: Any, high: Any) -> None:
        assert int(address) % 16 == 0
        _store(ctypes.c_uint64, address, low)
        _store(ctypes.c_uint64, int(address) + 8, high)

    def load_f32x4(self, address: Any) -> Any:
        assert int(address) % 16 == 0
        return tuple(self.load_f32(int(address) + 4 * lane) for lane in range(4))

    def store_f32x4(self, address: Any, *values: Any) -> None:
        assert int(address) % 16 == 0
        for lane, value in enumerate(values):
            self.store_f32(int(address) + 4 * lane, value)

    def load_f32(self, address: Any) -> Any:
        return self.bits_f32(_load(ctypes.c_uint32, address))

    def store_f32(self, address: Any, value: Any) -> None:
        assert isinstance(value, f32), type(value)
        _store(ctypes.c_uint32, address, self.f32_bits(value))

    load_scratch_f32, store_scratch_f32 = load_f32, store_f32


def _load(kind: Any, address: Any) -> Any:
    assert int(address) % ctypes.sizeof(kind) == 0
    return u64(kind.from_address(int(address)).value)


def _store(kind: Any, address: Any, value: Any) -> None:
    assert int(address) % ctypes.sizeof(kind) == 0
    kind.from_address(int(address)).value = int(value) & ((1 << 8 * ctypes.sizeof(kind)) - 1)


for _suffix, _kind in {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "task_u32": ctypes.c_uint32,
    "task_u64": ctypes.c_uint64,
    "word": ctypes.c_uint32,
    "long": ctypes.c_uint64,
}.items():
    setattr(Block, f"load_{_suffix}", staticmethod(functools.partial(_load, _kind)))
    setattr(Block, f"store_{_suffix}", staticmethod(functools.partial(_store, _kind)))


def operand_of(array: np.ndarray[Any, Any]) -> Operand:
    """An array as planning sees it."""
    dtype = next(code for code, name in DTYPE_NAMES.items() if name == array.dtype.name)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Operand(dtype, array.shape, strides, array.flags.c_contiguous)


def submit(
    name: str,
    inputs: Sequence[Any],
    out: np.ndarray[Any, Any],
    *,
    blocks: int,
    width: int,
    lanes: int = 32,
    seed: int = 0,
    **parameters: Any,
) -> tuple[Plan, int]:
    """Run an operator with one output as `blocks` workers would: its tiles in any order, then the merge.

    Returns:
        the plan, and the worst status that a thread returned.
    """
    operator = TABLE[name]
    given = operator.read_parameters(parameters)
    operands = [None if each is None else operand_of(each) for each in inputs]
    plan = operator.plan(operands, [operand_of(out)], blocks, **given)
    task, layouts = np.zeros(1, TASK), np.zeros(1 + MAX_INPUTS + 2, LAYOUT)
    context = np.zeros(1, CONTEXT)
    workspace = np.full(plan.workspace + 1, GARBAGE, np.uint8)
    task["op_id"], task["tiles"], task["count"] = plan.op_id, plan.tiles, plan.count
    flags = (Flag.STRIDED if plan.walks else 0) | (Flag.MERGE if plan.merge else 0)
    task["flags"] = int(flags)
    for place, each in enumerate(inputs[:MAX_INPUTS]):
        task["inputs"][0][place] = 0 if each is None else each.ctypes.data
    task["outputs"][0][:] = out.ctypes.data, workspace.ctypes.data if plan.workspace else 0
    task["dtypes"] = pack_dtypes(operands, [operand_of(out)])
    task["scalars"][0] = np.frombuffer(plan.scalars.ljust(SCALAR_BYTES, b"\0"), np.uint8)
    for fifth in inputs[MAX_INPUTS:]:
        task["scalars"][0][FIFTH_INPUT:].view(np.uint64)[:] = fifth.ctypes.data
    for place, walk in enumerate(plan.walks or ()):
        if walk is not None:
            slot = layouts[1 + place]
            slot["dtype"], slot["ndim"] = int(walk.dtype), len(walk.shape)
            slot["shape"][: len(walk.shape)], slot["strides"][: len(walk.shape)] = walk.shape, walk.strides
            task["layouts"][0][place] = 1 + place
    context["layouts"] = layouts.ctypes.data
    assert field(CONTEXT, "layouts") % 8 == 0

    memory = np.full(ARENA_BYTES + 16 + 256, GARBAGE, np.uint8)
    start = -memory.ctypes.data % 16
    order = [*np.random.default_rng(seed).permutation(plan.tiles), *([plan.tiles] if plan.merge else [])]
    worst = 0
    for tile in order:
        block = Block(width, lanes, seed)
        kernel = KERNELS[plan.op_id]
        body = (kernel.shared or kernel).make(block)  # type: ignore[arg-type]
        memory[:] = GARBAGE
        addresses = (context.ctypes.data, task.ctypes.data, tile, memory.ctypes.data + start)
        worst = max(worst, *block.run(body, *(u64(each) for each in addresses)))
        assert (memory[:start] == GARBAGE).all() and (memory[start + ARENA_BYTES :] == GARBAGE).all()
    return plan, worst


def empty(shape: Sequence[int], dtype: DType | Any) -> np.ndarray[Any, Any]:
    """Garbage that begins on a 16-byte line, as an allocator would give it."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.full(size + 16, GARBAGE, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + size].view(kind).reshape(tuple(shape))
