"""The CUDA machine's primitives: inline PTX through numba-cuda intrinsics.

Acquire and release do not exist in numba-cuda's API, and its cache-hint loads have no side effect, so a
polling loop on them is compiled to one load. Everything here that polls or publishes is therefore volatile
inline PTX with a memory clobber. Kernels port to numba-cuda's successors, these do not: keep them here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

u64 = np.uint64
f32 = np.float32

_I32, _I64, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()


def device(body: Any) -> Any:
    """Mark a helper that bodies call; it is inlined into them."""
    return cuda.jit(device=True, forceinline=True)(body)


def _load(ptx: str) -> Any:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(_I64, [_I64])
            asm = ir.InlineAsm(kind, f"{ptx} $0, [$1];", "=l,l,~{memory}", side_effect=True)
            return builder.call(asm, args)

        return types.uint64(types.uint64), codegen

    return load


def _store(ptx: str) -> Any:
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(_VOID, [_I64, _I64])
            asm = ir.InlineAsm(kind, f"{ptx} [$0], $1;", "l,l,~{memory}", side_effect=True)
            builder.call(asm, args)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), codegen

    return store


def _atomic(ptx: str) -> Any:
    @intrinsic
    def modify(typingctx, address, value):
        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(_I64, [_I64, _I64])
            asm = ir.InlineAsm(kind, f"{ptx} $0, [$1], $2;", "=l,l,l,~{memory}", side_effect=True)
            return builder.call(asm, args)

        return types.uint64(types.uint64, types.uint64), codegen

    return modify


def _shared_atomic(operation: str) -> Any:
    @intrinsic
    def modify(typingctx, address, value):
        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(_I32, [_I64, _I32])
            asm = ir.InlineAsm(
                kind, f"atom.{operation}.u32 $0, [$1], $2;", "=r,l,r,~{memory}", side_effect=True
            )
            return builder.zext(builder.call(asm, [args[0], builder.trunc(args[1], _I32)]), _I64)

        return types.uint64(types.uint64, types.uint64), codegen

    return modify


def _statement(ptx: str) -> Any:
    @intrinsic
    def statement(typingctx):
        def codegen(context, builder, signature, args):
            builder.call(ir.InlineAsm(ir.FunctionType(_VOID, []), ptx, "~{memory}", side_effect=True), [])
            return context.get_dummy_value()

        return types.void(), codegen

    return statement


load_relaxed_gpu = _load("ld.relaxed.gpu.global.u64")
load_acquire_gpu = _load("ld.acquire.gpu.global.u64")
load_relaxed_sys = _load("ld.relaxed.sys.global.u64")
load_acquire_sys = _load("ld.acquire.sys.global.u64")
store_relaxed_gpu = _store("st.relaxed.gpu.global.u64")
store_release_gpu = _store("st.release.gpu.global.u64")
store_relaxed_sys = _store("st.relaxed.sys.global.u64")
store_release_sys = _store("st.release.sys.global.u64")
atomic_add_gpu = _atomic("atom.add.acq_rel.gpu.global.u64")
atomic_max_gpu = _atomic("atom.max.relaxed.gpu.global.u64")
shared_min_u32 = _shared_atomic("min")
shared_max_u32 = _shared_atomic("max")
fence_acq_rel_gpu = _statement("fence.acq_rel.gpu;")
fence_acq_rel_sys = _statement("fence.acq_rel.sys;")
fence_sc_sys = _statement("fence.sc.sys;")
copy_wait = _statement("cp.async.wait_all;")


@intrinsic
def load_pair_relaxed_sys(typingctx, address):
    """Both words in one 16-byte access; used to move descriptors, whose stamp was acquired before."""
    result = types.UniTuple(types.uint64, 2)

    def codegen(context, builder, signature, args):
        pair = ir.LiteralStructType([_I64, _I64])
        asm = ir.InlineAsm(
            ir.FunctionType(pair, [_I64]),
            "ld.relaxed.sys.global.v2.u64 {$0, $1}, [$2];",
            "=l,=l,l,~{memory}",
            side_effect=True,
        )
        both = builder.call(asm, args)
        words = [builder.extract_value(both, word) for word in (0, 1)]
        return context.make_tuple(builder, result, words)

    return result(types.uint64), codegen


@intrinsic
def store_pair(typingctx, address, low, high):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VOID, [_I64] * 3)
        asm = ir.InlineAsm(kind, "st.global.v2.u64 [$0], {$1, $2};", "l,l,l,~{memory}", side_effect=True)
        builder.call(asm, args)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 3), codegen


@intrinsic
def copy_async(typingctx, destination, source):
    """16 bytes from global to shared memory through L2 alone: a stale L1 line cannot be read."""

    def codegen(context, builder, signature, args):
        ptx = (
            "{ .reg .u64 shared; cvta.to.shared.u64 shared, $0; "
            "cp.async.cg.shared.global [shared], [$1], 16; }"
        )
        kind = ir.FunctionType(_VOID, [_I64] * 2)
        builder.call(ir.InlineAsm(kind, ptx, "l,l,~{memory}", side_effect=True), args)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


def _pointer(builder: Any, address: Any, to: ir.Type) -> Any:
    return builder.inttoptr(address, ir.PointerType(to))


def _plain_load(element: ir.Type, result: Any) -> Any:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            value = builder.load(_pointer(builder, args[0], element))
            return builder.zext(value, _I64) if element == _I32 else value

        return result(types.uint64), codegen

    return load


def _plain_store(element: ir.Type, argument: Any) -> Any:
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            stored = builder.trunc(args[1], _I32) if element == _I32 else args[1]
            builder.store(stored, _pointer(builder, args[0], element))
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
load_scratch_f32 = _plain_load(ir.FloatType(), types.float32)
store_u64 = _plain_store(_I64, types.uint64)
store_u32 = _plain_store(_I32, types.uint64)


def _shared_pointer(builder: Any, address: Any, to: ir.Type) -> Any:
    """The shared window begins at a multiple of 2^32: the low half of a generic address is the offset."""
    return builder.inttoptr(builder.trunc(address, _I32), ir.PointerType(to, addrspace=3))


def _shared_load(element: ir.Type) -> Any:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            value = builder.load(_shared_pointer(builder, args[0], element))
            return builder.zext(value, _I64) if element == _I32 else value

        return types.uint64(types.uint64), codegen

    return load


load_task_u64 = _shared_load(_I64)
load_task_u32 = _shared_load(_I32)


@intrinsic
def load_task_pair(typingctx, address):
    result = types.UniTuple(types.uint64, 2)

    def codegen(context, builder, signature, args):
        pair = ir.VectorType(_I64, 2)
        both = builder.load(_shared_pointer(builder, args[0], pair), align=16)
        words = [builder.extract_element(both, _I32(word)) for word in (0, 1)]
        return context.make_tuple(builder, result, words)

    return result(types.uint64), codegen


# Operands are global memory always; saying so spares the address-space check of a generic access.


@intrinsic
def load_f32(typingctx, address):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [_I64])
        asm = ir.InlineAsm(kind, "ld.global.f32 $0, [$1];", "=f,l,~{memory}", side_effect=True)
        return builder.call(asm, args)

    return types.float32(types.uint64), codegen


@intrinsic
def store_f32(typingctx, address, value):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VOID, [_I64, ir.FloatType()])
        builder.call(ir.InlineAsm(kind, "st.global.f32 [$0], $1;", "l,f,~{memory}", side_effect=True), args)
        return context.get_dummy_value()

    return types.void(types.uint64, types.float32), codegen


@intrinsic
def load_f32x4(typingctx, address):
    result = types.UniTuple(types.float32, 4)

    def codegen(context, builder, signature, args):
        lanes = ir.LiteralStructType([ir.FloatType()] * 4)
        asm = ir.InlineAsm(
            ir.FunctionType(lanes, [_I64]),
            "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,l,~{memory}",
            side_effect=True,
        )
        four = builder.call(asm, args)
        return context.make_tuple(builder, result, [builder.extract_value(four, lane) for lane in range(4)])

    return result(types.uint64), codegen


@intrinsic
def store_f32x4(typingctx, address, x, y, z, w):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VOID, [_I64, *[ir.FloatType()] * 4])
        ptx = "st.global.v4.f32 [$0], {$1, $2, $3, $4};"
        builder.call(ir.InlineAsm(kind, ptx, "l,f,f,f,f,~{memory}", side_effect=True), args)
        return context.get_dummy_value()

    return types.void(types.uint64, *[types.float32] * 4), codegen


def _global_load(ptx: str, kind: Any) -> Any:
    """A narrow plain load, zero-extended: PTX has no 8-bit registers, so it lands in a wider one."""

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            letter = "l" if kind == _I64 else "r"
            asm = ir.InlineAsm(
                ir.FunctionType(kind, [_I64]),
                ptx,
                f"={letter},l,~{{memory}}",
                side_effect=True,
            )
            value = builder.call(asm, args)
            return value if kind == _I64 else builder.zext(value, _I64)

        return types.uint64(types.uint64), codegen

    return load


def _global_store(ptx: str, kind: Any) -> Any:
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            letter = "l" if kind == _I64 else "r"
            word = args[1] if kind == _I64 else builder.trunc(args[1], kind)
            asm = ir.InlineAsm(
                ir.FunctionType(_VOID, [_I64, kind]),
                ptx,
                f"l,{letter},~{{memory}}",
                side_effect=True,
            )
            builder.call(asm, [args[0], word])
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), codegen

    return store


load_u8 = _global_load("ld.global.u8 $0, [$1];", _I32)
load_u16 = _global_load("{ .reg .u16 half; ld.global.u16 half, [$1]; cvt.u32.u16 $0, half; }", _I32)
load_word = _global_load("ld.global.u32 $0, [$1];", _I32)
load_long = _global_load("ld.global.u64 $0, [$1];", _I64)
store_u8 = _global_store("st.global.u8 [$0], $1;", _I32)
store_u16 = _global_store("{ .reg .u16 half; cvt.u16.u32 half, $1; st.global.u16 [$0], half; }", _I32)
store_word = _global_store("st.global.u32 [$0], $1;", _I32)
store_long = _global_store("st.global.u64 [$0], $1;", _I64)


@intrinsic
def load_pair(typingctx, address):
    result = types.UniTuple(types.uint64, 2)

    def codegen(context, builder, signature, args):
        pair = ir.LiteralStructType([_I64, _I64])
        asm = ir.InlineAsm(
            ir.FunctionType(pair, [_I64]),
            "ld.global.v2.u64 {$0, $1}, [$2];",
            "=l,=l,l,~{memory}",
            side_effect=True,
        )
        both = builder.call(asm, args)
        return context.make_tuple(builder, result, [builder.extract_value(both, word) for word in (0, 1)])

    return result(types.uint64), codegen


def _pure(ptx: str, constraints: str, result: Any, *arguments: Any) -> Any:
    """An instruction on registers alone, which the compiler may move, merge and drop."""
    kinds = {types.float32: ir.FloatType(), types.uint64: _I64}
    function = ir.FunctionType(kinds[result], [kinds[each] for each in arguments])

    def codegen(context, builder, signature, args):
        return builder.call(ir.InlineAsm(function, ptx, constraints, side_effect=False), args)

    if len(arguments) == 1:

        @intrinsic
        def one(typingctx, x):
            return result(*arguments), codegen

        return one

    @intrinsic
    def three(typingctx, x, y, z):
        return result(*arguments), codegen

    return three


_F32, _U64 = types.float32, types.uint64
_ROUND = "{{ .reg .b16 half, none; mov.b16 none, 0; {} half, $1; mov.b64 $0, {{half, none, none, none}}; }}"
f16_to_f32 = _pure(
    "{ .reg .b16 half, a, b, c; mov.b64 {half, a, b, c}, $1; cvt.f32.f16 $0, half; }", "=f,l", _F32, _U64
)
f32_to_f16 = _pure(_ROUND.format("cvt.rn.f16.f32"), "=l,f", _U64, _F32)
bf16_to_f32 = _pure(
    "{ .reg .u32 low; cvt.u32.u64 low, $1; shl.b32 low, low, 16; mov.b32 $0, low; }", "=f,l", _F32, _U64
)
f32_to_bf16 = _pure(_ROUND.format("cvt.rn.bf16.f32"), "=l,f", _U64, _F32)
f32_bits = _pure("{ .reg .u32 low; mov.b32 low, $1; cvt.u64.u32 $0, low; }", "=l,f", _U64, _F32)
bits_f32 = _pure("{ .reg .u32 low; cvt.u32.u64 low, $1; mov.b32 $0, low; }", "=f,l", _F32, _U64)
approximate_reciprocal = _pure("rcp.approx.ftz.f32 $0, $1;", "=f,f", _F32, _F32)
fused_multiply_add = _pure("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", _F32, _F32, _F32, _F32)
round_even = _pure("cvt.rni.f32.f32 $0, $1;", "=f,f", _F32, _F32)
round_down = _pure("cvt.rmi.f32.f32 $0, $1;", "=f,f", _F32, _F32)
round_up = _pure("cvt.rpi.f32.f32 $0, $1;", "=f,f", _F32, _F32)


@device
def modulo(x, y):
    return math.fmod(x, y)


@intrinsic
def store_scratch_f32(typingctx, address, value):
    def codegen(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], ir.FloatType()))
        return context.get_dummy_value()

    return types.void(types.uint64, types.float32), codegen


@intrinsic
def warp_width(typingctx):
    def codegen(context, builder, signature, args):
        return _I64(32)

    return types.uint64(), codegen


@intrinsic
def shuffle_xor_f32(typingctx, value, mask):
    def codegen(context, builder, signature, args):
        ptx = (
            "{ .reg .b32 from, to, mask; mov.b32 from, $1; cvt.u32.u64 mask, $2; "
            "shfl.sync.bfly.b32 to, from, mask, 31, -1; mov.b32 $0, to; }"
        )
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _I64])
        return builder.call(ir.InlineAsm(kind, ptx, "=f,f,l,~{memory}", side_effect=True), args)

    return types.float32(types.float32, types.uint64), codegen


@intrinsic
def shuffle_xor_u64(typingctx, value, mask):
    def codegen(context, builder, signature, args):
        ptx = (
            "{ .reg .b32 low, high, mask; mov.b64 {low, high}, $1; cvt.u32.u64 mask, $2; "
            "shfl.sync.bfly.b32 low, low, mask, 31, -1; shfl.sync.bfly.b32 high, high, mask, 31, -1; "
            "mov.b64 $0, {low, high}; }"
        )
        kind = ir.FunctionType(_I64, [_I64, _I64])
        return builder.call(ir.InlineAsm(kind, ptx, "=l,l,l,~{memory}", side_effect=True), args)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def prefetch(typingctx, address):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VOID, [_I64])
        builder.call(ir.InlineAsm(kind, "prefetch.global.L2 [$0];", "l", side_effect=True), args)
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


@intrinsic
def ballot(typingctx, vote):
    def codegen(context, builder, signature, args):
        ptx = (
            "{ .reg .pred yes; .reg .b32 all; setp.ne.u64 yes, $1, 0; "
            "vote.sync.ballot.b32 all, yes, -1; cvt.u64.u32 $0, all; }"
        )
        kind = ir.FunctionType(_I64, [_I64])
        return builder.call(ir.InlineAsm(kind, ptx, "=l,l,~{memory}", side_effect=True), args)

    return types.uint64(types.uint64), codegen


@intrinsic
def uniform(typingctx, value):
    """Shuffled from the first lane: then the assembler knows that no branch on it divides the warp."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I32])
        ptx = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
        return builder.call(ir.InlineAsm(kind, ptx, "=r,r", side_effect=True), args)

    return types.uint32(types.uint32), codegen


@intrinsic
def atomic_add_f32(typingctx, address, value):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VOID, [_I64, ir.FloatType()])
        ptx = "red.relaxed.gpu.global.add.f32 [$0], $1;"
        builder.call(ir.InlineAsm(kind, ptx, "l,f,~{memory}", side_effect=True), args)
        return context.get_dummy_value()

    return types.void(types.uint64, types.float32), codegen


@intrinsic
def compare_and_swap_word(typingctx, address, expected, desired):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64, _I32, _I32])
        ptx = "atom.relaxed.gpu.global.cas.b32 $0, [$1], $2, $3;"
        asm = ir.InlineAsm(kind, ptx, "=r,l,r,r,~{memory}", side_effect=True)
        words = [args[0], builder.trunc(args[1], _I32), builder.trunc(args[2], _I32)]
        return builder.zext(builder.call(asm, words), _I64)

    return types.uint64(*[types.uint64] * 3), codegen


def _special_register(ptx: str) -> Any:
    @intrinsic
    def read(typingctx):
        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(_I32, [])
            value = builder.call(ir.InlineAsm(kind, f"mov.u32 $0, {ptx};", "=r", side_effect=False), [])
            return builder.zext(value, _I64)

        return types.uint64(), codegen

    return read


thread_index = _special_register("%tid.x")
block_width = _special_register("%ntid.x")
block_index = _special_register("%ctaid.x")
grid_width = _special_register("%nctaid.x")
barrier = cuda.syncthreads


@intrinsic
def now_ns(typingctx):
    """%globaltimer: nanoseconds, the same on every multiprocessor; it advances in coarse ticks."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I64, [])
        asm = ir.InlineAsm(kind, "mov.u64 $0, %globaltimer;", "=l,~{memory}", side_effect=True)
        return builder.call(asm, [])

    return types.uint64(), codegen


@intrinsic
def pause(typingctx, spins):
    """Poll at full rate at first, then let the multiprocessor rest between polls."""

    def codegen(context, builder, signature, args):
        ptx = "{ .reg .pred long; setp.gt.u64 long, $0, 4096; @long nanosleep.u32 200; }"
        kind = ir.FunctionType(_VOID, [_I64])
        builder.call(ir.InlineAsm(kind, ptx, "l,~{memory}", side_effect=True), args)
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


OPERATOR_SIGNATURE = types.int32(*[types.uint64] * 4)
"""(context, task, tile, arena) -> status. Not void: a void C-ABI function still returns a .b64 in PTX."""


@intrinsic
def address_of(typingctx, array):
    """Generic address of a shared array's first element."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        return builder.ptrtoint(data, _I64)

    return types.uint64(array), codegen
