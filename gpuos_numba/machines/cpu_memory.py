"""The CPU machine's primitives: LLVM atomics through Numba intrinsics, one thread a block.

Every `gpu` and `sys` pair is the same instruction here, since all threads share one coherent memory.
x86 and Arm give each named ordering at least the strength that the CUDA machine's has.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..descriptor import Status
from ..protocol import CONTEXT, field

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

u64 = np.uint64
f32 = np.float32

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _pointer(builder: Any, address: Any, to: ir.Type) -> Any:
    return builder.inttoptr(address, ir.PointerType(to))


def _atomic_load(ordering: str) -> Any:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load_atomic(_pointer(builder, args[0], _I64), ordering=ordering, align=8)

        return types.uint64(types.uint64), codegen

    return load


def _atomic_store(ordering: str) -> Any:
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            builder.store_atomic(args[1], _pointer(builder, args[0], _I64), ordering=ordering, align=8)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), codegen

    return store


def _read_modify_write(operation: str, ordering: str, bits: int = 64) -> Any:
    integer = ir.IntType(bits)

    @intrinsic
    def modify(typingctx, address, value):
        def codegen(context, builder, signature, args):
            operand = args[1] if bits == 64 else builder.trunc(args[1], integer)
            old = builder.atomic_rmw(operation, _pointer(builder, args[0], integer), operand, ordering)
            return old if bits == 64 else builder.zext(old, _I64)

        return types.uint64(types.uint64, types.uint64), codegen

    return modify


load_relaxed_gpu = load_relaxed_sys = _atomic_load("monotonic")
load_acquire_gpu = load_acquire_sys = _atomic_load("acquire")
store_relaxed_gpu = store_relaxed_sys = _atomic_store("monotonic")
store_release_gpu = store_release_sys = _atomic_store("release")
atomic_add_gpu = _read_modify_write("add", "acq_rel")
atomic_max_gpu = _read_modify_write("umax", "monotonic")
shared_min_u32 = _read_modify_write("umin", "monotonic", 32)
shared_max_u32 = _read_modify_write("umax", "monotonic", 32)


@intrinsic
def compare_and_swap(typingctx, address, expected, desired):
    """(address, expected, desired) -> 1 where the swap happened. Host memory only, never across a bus."""

    def codegen(context, builder, signature, args):
        pair = builder.cmpxchg(_pointer(builder, args[0], _I64), args[1], args[2], "acq_rel", "acquire")
        return builder.zext(builder.extract_value(pair, 1), _I64)

    return types.uint64(types.uint64, types.uint64, types.uint64), codegen


def _fence(ordering: str) -> Any:
    @intrinsic
    def fence(typingctx):
        def codegen(context, builder, signature, args):
            builder.fence(ordering)
            return context.get_dummy_value()

        return types.void(), codegen

    return fence


fence_acq_rel_gpu = fence_acq_rel_sys = _fence("acq_rel")
fence_sc_sys = _fence("seq_cst")


def _plain_load(integer: ir.Type, result: Any) -> Any:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            value = builder.load(_pointer(builder, args[0], integer))
            narrow = isinstance(integer, ir.IntType) and integer.width < 64
            return builder.zext(value, _I64) if narrow else value

        return result(types.uint64), codegen

    return load


def _plain_store(integer: ir.Type, argument: Any) -> Any:
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            narrow = isinstance(integer, ir.IntType) and integer.width < 64
            stored = builder.trunc(args[1], integer) if narrow else args[1]
            builder.store(stored, _pointer(builder, args[0], integer))
            return context.get_dummy_value()

        return types.void(types.uint64, argument), codegen

    return store


@intrinsic
def divide_u32(typingctx, dividend, divisor):
    def codegen(context, builder, signature, args):
        narrow = [builder.trunc(each, _I32) for each in args]
        return builder.zext(builder.udiv(*narrow), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def divide(typingctx, dividend, divisor):
    """Unsigned division without Python's check for zero; the divisor is an extent, never 0."""

    def codegen(context, builder, signature, args):
        return builder.udiv(*args)

    return types.uint64(types.uint64, types.uint64), codegen


load_u64 = _plain_load(_I64, types.uint64)
load_u32 = _plain_load(_I32, types.uint64)
load_f32 = load_scratch_f32 = _plain_load(ir.FloatType(), types.float32)
store_u64 = _plain_store(_I64, types.uint64)
store_u32 = _plain_store(_I32, types.uint64)
store_f32 = store_scratch_f32 = _plain_store(ir.FloatType(), types.float32)
load_u8, load_u16 = _plain_load(ir.IntType(8), types.uint64), _plain_load(ir.IntType(16), types.uint64)
store_u8, store_u16 = _plain_store(ir.IntType(8), types.uint64), _plain_store(ir.IntType(16), types.uint64)
load_task_u64, load_task_u32 = load_u64, load_u32
load_word, load_long, store_word, store_long = load_u32, load_u64, store_u32, store_u64


def device(body: Any) -> Any:
    """Compile a helper that bodies call."""
    return njit(nogil=True, error_model="numpy")(body)


@njit(nogil=True, inline="always")
def load_pair_relaxed_sys(address):
    return load_relaxed_sys(address), load_relaxed_sys(address + u64(8))


@njit(nogil=True, inline="always")
def load_pair(address):
    return load_u64(address), load_u64(address + u64(8))


load_task_pair = load_pair


def _pure(build: Any, result: Any, *arguments: Any) -> Any:
    """`build(builder, args)`: an expression on registers alone."""

    def codegen(context, builder, signature, args):
        return build(builder, args)

    if len(arguments) == 1:

        @intrinsic
        def one(typingctx, x):
            return result(*arguments), codegen

        return one

    if len(arguments) == 2:

        @intrinsic
        def two(typingctx, x, y):
            return result(*arguments), codegen

        return two

    @intrinsic
    def three(typingctx, x, y, z):
        return result(*arguments), codegen

    return three


def _half_to_f32(builder: Any, args: Any) -> Any:
    half = builder.bitcast(builder.trunc(args[0], ir.IntType(16)), ir.HalfType())
    return builder.fpext(half, ir.FloatType())


def _f32_to_half(builder: Any, args: Any) -> Any:
    half = builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
    return builder.zext(half, _I64)


def _bits(builder: Any, args: Any) -> Any:
    return builder.zext(builder.bitcast(args[0], _I32), _I64)


def _from_bits(builder: Any, args: Any) -> Any:
    return builder.bitcast(builder.trunc(args[0], _I32), ir.FloatType())


f16_to_f32 = _pure(_half_to_f32, types.float32, types.uint64)
f32_to_f16 = _pure(_f32_to_half, types.uint64, types.float32)
f32_bits = _pure(_bits, types.uint64, types.float32)
bits_f32 = _pure(_from_bits, types.float32, types.uint64)
approximate_reciprocal = _pure(
    lambda builder, args: builder.fdiv(args[0].type(1.0), args[0]), types.float32, types.float32
)
fused_multiply_add = _pure(
    lambda builder, args: builder.fma(*args), types.float32, types.float32, types.float32, types.float32
)


def _rounding(name: str) -> Any:
    def codegen(builder: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic(name, [ir.FloatType()]), args)

    return _pure(codegen, types.float32, types.float32)


round_even = _rounding("llvm.rint")
round_down = _rounding("llvm.floor")
round_up = _rounding("llvm.ceil")
modulo = _pure(lambda builder, args: builder.frem(*args), types.float32, types.float32, types.float32)


@njit(nogil=True, inline="always")
def bf16_to_f32(half):
    return bits_f32(half << u64(16))


@njit(nogil=True, inline="always")
def f32_to_bf16(value):
    bits = f32_bits(value)
    if value != value:
        return (bits >> u64(16)) | u64(0x40)  # stays NaN, whatever bits are dropped
    return (bits + u64(0x7FFF) + ((bits >> u64(16)) & u64(1))) >> u64(16)


@njit(nogil=True, inline="always")
def warp_width():
    return u64(1)


@njit(nogil=True, inline="always")
def shuffle_xor_f32(value, mask):
    return value


@njit(nogil=True, inline="always")
def shuffle_xor_u64(value, mask):
    return value


@njit(nogil=True, inline="always")
def prefetch(address):
    pass


@njit(nogil=True, inline="always")
def ballot(vote):
    return vote


@njit(nogil=True, inline="always")
def uniform(value):
    return value


@intrinsic
def compare_and_swap_word(typingctx, address, expected, desired):
    def codegen(context, builder, signature, args):
        words = [builder.trunc(word, _I32) for word in args[1:]]
        pair = builder.cmpxchg(_pointer(builder, args[0], _I32), *words, "monotonic", "monotonic")
        return builder.zext(builder.extract_value(pair, 0), _I64)

    return types.uint64(*[types.uint64] * 3), codegen


@njit(nogil=True)
def atomic_add_f32(address, value):
    old = load_u32(address)
    while True:
        seen = compare_and_swap_word(address, old, f32_bits(bits_f32(old) + value))
        if seen == old:
            break
        old = seen


@njit(nogil=True, inline="always")
def store_pair(address, low, high):
    store_u64(address, low)
    store_u64(address + u64(8), high)


@njit(nogil=True, inline="always")
def copy_async(destination, source):
    store_u64(destination, load_u64(source))
    store_u64(destination + u64(8), load_u64(source + u64(8)))


@njit(nogil=True, inline="always")
def copy_wait():
    pass


@intrinsic
def call_query(typingctx, function, stream):
    """Call `int function(void *stream)`, such as cuStreamQuery, by address; host functions only."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64])
        return builder.zext(builder.call(_pointer(builder, args[0], kind), [args[1]]), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def call_current(typingctx, function):
    """Call `int function(void **value)`, such as cuCtxGetCurrent: the value, 0 where it fails."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [ir.PointerType(_I64)])
        value = cgutils.alloca_once_value(builder, _I64(0))
        error = builder.call(_pointer(builder, args[0], kind), [value])
        failed = builder.icmp_unsigned("!=", error, _I32(0))
        return builder.select(failed, _I64(0), builder.load(value))

    return types.uint64(types.uint64), codegen


@intrinsic
def call_capturing(typingctx, function, stream):
    """Call `int function(void *stream, int *answer)`, such as cuStreamIsCapturing: result << 32 | answer."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64, ir.PointerType(_I32)])
        answer = cgutils.alloca_once_value(builder, _I32(0))
        error = builder.call(_pointer(builder, args[0], kind), [args[1], answer])
        high = builder.shl(builder.zext(error, _I64), _I64(32))
        return builder.or_(high, builder.zext(builder.load(answer), _I64))

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def call_number(typingctx, function, number):
    """Call `void *function(int64)`, such as PyLong_FromLongLong, by address, holding the GIL."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I64, [_I64])
        return builder.call(_pointer(builder, args[0], kind), [args[1]])

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def call_read(typingctx, function, object, tensor):
    """Call `int function(PyObject *, void *)` by address, holding the GIL."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64, _I64])
        return builder.zext(builder.call(_pointer(builder, args[0], kind), args[1:]), _I64)

    return types.uint64(*[types.uint64] * 3), codegen


@intrinsic
def call_stream(typingctx, function, device, current):
    """Call `int function(int device_type, int ordinal, void **stream)` by address, holding the GIL."""

    def codegen(context, builder, signature, args):
        function, device, current = args
        kind = ir.FunctionType(_I32, [_I32, _I32, _I64])
        ordinal = builder.trunc(builder.lshr(device, _I64(32)), _I32)
        values = [builder.trunc(device, _I32), ordinal, current]
        return builder.zext(builder.call(_pointer(builder, function, kind), values), _I64)

    return types.uint64(*[types.uint64] * 3), codegen


@intrinsic
def call_nothing(typingctx, function):
    """Call `void function(void)` by address."""

    def codegen(context, builder, signature, args):
        builder.call(_pointer(builder, args[0], ir.FunctionType(ir.VoidType(), [])), [])
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


@intrinsic
def call_launch(typingctx, function, kernel, blocks, threads, stream, arguments):
    """Call cuLaunchKernel by address, one-dimensional and without dynamic shared memory."""

    def codegen(context, builder, signature, args):
        function, kernel, blocks, threads, stream, arguments = args
        kind = ir.FunctionType(_I32, [_I64, *[_I32] * 7, _I64, _I64, _I64])
        one, none = _I32(1), _I32(0)
        grid, block = builder.trunc(blocks, _I32), builder.trunc(threads, _I32)
        values = [kernel, grid, one, one, block, one, one, none, stream, arguments, _I64(0)]
        return builder.zext(builder.call(_pointer(builder, function, kind), values), _I64)

    return types.uint64(*[types.uint64] * 6), codegen


_VECTOR = ir.VectorType(ir.FloatType(), 4)


@intrinsic
def load_f32x4(typingctx, address):
    result = types.UniTuple(types.float32, 4)

    def codegen(context, builder, signature, args):
        vector = builder.load(_pointer(builder, args[0], _VECTOR), align=16)
        lanes = [builder.extract_element(vector, _I32(lane)) for lane in range(4)]
        return context.make_tuple(builder, result, lanes)

    return result(types.uint64), codegen


@intrinsic
def store_f32x4(typingctx, address, x, y, z, w):
    def codegen(context, builder, signature, args):
        vector = ir.Constant(_VECTOR, ir.Undefined)
        for lane in range(4):
            vector = builder.insert_element(vector, args[1 + lane], _I32(lane))
        builder.store(vector, _pointer(builder, args[0], _VECTOR), align=16)
        return context.get_dummy_value()

    return types.void(types.uint64, *[types.float32] * 4), codegen


@njit(nogil=True, inline="always")
def thread_index():
    return u64(0)


@njit(nogil=True, inline="always")
def block_width():
    return u64(1)


@njit(nogil=True, inline="always")
def barrier():
    pass


# --- time, politeness ---

_CLOCK = time.CLOCK_MONOTONIC
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@intrinsic
def now_ns(typingctx):
    """CLOCK_MONOTONIC, which a set system clock does not move."""

    def codegen(context, builder, signature, args):
        # Once a function: a loop that reads the clock would eat the stack.
        timespec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        get = builder.module.globals.get("clock_gettime")
        if get is None:
            get = ir.Function(builder.module, ir.FunctionType(_I32, [_I32, _I64]), "clock_gettime")
        builder.call(get, [_I32(_CLOCK), builder.ptrtoint(timespec, _I64)])
        seconds, nanoseconds = (builder.load(builder.gep(timespec, [_I32(0), _I32(word)])) for word in (0, 1))
        return builder.add(builder.mul(seconds, _I64(1_000_000_000)), nanoseconds)

    return types.uint64(), codegen


@njit(nogil=True)
def sleep_us(duration):
    _usleep(np.uint32(duration))


@njit(nogil=True)
def pause(spins):
    """Spin briefly, then give the core away, then sleep: 2 cores may have 3 threads to run."""
    if spins > u64(2000):
        _usleep(np.uint32(50))
    elif spins > u64(40):
        _sched_yield()


# --- the switch: a table of function addresses ---

_UNKNOWN = np.int32(Status.UNKNOWN_OPERATOR)
_TABLE = u64(field(CONTEXT, "table"))
_TABLE_LENGTH = u64(field(CONTEXT, "table_length"))


@intrinsic
def _call_operator(typingctx, function, context, task, tile, arena):
    def codegen(_, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64] * 4)
        return builder.call(_pointer(builder, args[0], kind), args[1:])

    return types.int32(*[types.uint64] * 5), codegen


@njit(nogil=True)
def dispatch(context, op_id, task, tile, arena):
    if op_id >= load_u64(context + _TABLE_LENGTH):
        return _UNKNOWN
    function = load_u64(load_u64(context + _TABLE) + op_id * u64(8))
    if function == u64(0):
        return _UNKNOWN
    return _call_operator(function, context, task, tile, arena)


@njit(nogil=True)
def is_plain(op_id):
    """Every operator is called: a call costs little here."""
    return False


@njit(nogil=True)
def run_plain(scratch, position):
    return position
