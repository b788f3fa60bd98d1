"""Elements of operands of any dtype: an address and a DType code arrive, values to compute with leave.

Floating point is computed in f32, everything else in 64-bit integers. The code is the same for a whole task,
so its branches are uniform. Vectors are eight neighbours whose address is 16-byte aligned: one access of 16
bytes for 2-byte elements, two for f32 and i32, four for i64, one of 8 bytes for the 1-byte ones.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..descriptor import ITEMSIZE, DType, layout_offset
from ..machines.base import Body, Primitives

VECTOR = 8
"""Elements that a vector access moves."""


@functools.cache
def make_itemsize(m: Primitives) -> Body:
    """`itemsize(kind)`: bytes of an element."""
    u64 = m.u64
    sizes = 0
    for code, size in enumerate(ITEMSIZE):
        sizes |= size << 4 * code
    SIZES, FIFTEEN, TWO = u64(sizes), u64(15), u64(2)
    assert max(ITEMSIZE) < 16

    def itemsize(kind: Any) -> Any:
        return (SIZES >> (kind << TWO)) & FIFTEEN

    return m.device(itemsize)


@functools.cache
def make_tile_range(m: Primitives) -> Body:
    """`tile_range(count, tiles, tile) -> (begin, end)`: a tile's elements; starts are multiples of 16."""
    u64, divide = m.u64, m.divide
    ZERO, ONE, FOUR, FIFTEEN = u64(0), u64(1), u64(4), u64(15)

    def tile_range(count: Any, tiles: Any, tile: Any) -> Any:
        if tiles <= ONE:
            return ZERO, count
        size = ((divide(count + tiles - ONE, tiles) + FIFTEEN) >> FOUR) << FOUR
        begin = tile * size
        end = begin + size
        if begin > count:
            begin = count
        if end > count:
            end = count
        return begin, end

    return m.device(tile_range)


@functools.cache
def make_element_address(m: Primitives) -> Body:
    """`element_address(layout, base, index)`: address of element `index` of a view, in row-major order.

    Strides are two's complement words: a negative one wraps to the right address.
    """
    u64 = m.u64
    load_u64, load_u32, divide = m.load_u64, m.load_u32, m.divide
    itemsize = make_itemsize(m)
    KIND, NDIM, SHAPE = u64(layout_offset("dtype")), u64(layout_offset("ndim")), u64(layout_offset("shape"))
    STRIDES, ZERO, ONE, EIGHT = u64(layout_offset("strides")), u64(0), u64(1), u64(8)

    def element_address(layout: Any, base: Any, index: Any) -> Any:
        dim = load_u32(layout + NDIM)
        steps = ZERO
        while dim > ZERO:
            dim -= ONE
            extent = load_u64(layout + SHAPE + dim * EIGHT)
            rest = divide(index, extent)
            steps += (index - rest * extent) * load_u64(layout + STRIDES + dim * EIGHT)
            index = rest
        return base + steps * itemsize(load_u32(layout + KIND))

    return m.device(element_address)


@functools.cache
def make_load_i64(m: Primitives) -> Body:
    """`load_element_i64(kind, address)`: a bool, i8, u8, i32 or i64 as i64."""
    u64 = m.u64
    load_u8, load_word, load_long = m.load_u8, m.load_word, m.load_long
    I8, I32, I64, S56, S32 = u64(DType.I8), u64(DType.I32), u64(DType.I64), np.int64(56), np.int64(32)

    def load_element_i64(kind: Any, address: Any) -> Any:
        if kind == I32:
            return (np.int64(load_word(address)) << S32) >> S32
        if kind == I64:
            return np.int64(load_long(address))
        byte = np.int64(load_u8(address))
        if kind == I8:
            return (byte << S56) >> S56
        return byte

    return m.device(load_element_i64)


@functools.cache
def make_store_i64(m: Primitives) -> Body:
    """`store_element_i64(kind, address, value)`: wraps to the narrower kind; a bool is value != 0."""
    u64 = m.u64
    store_u8, store_word, store_long = m.store_u8, m.store_word, m.store_long
    BOOL, I32, I64, ZERO = u64(DType.BOOL), u64(DType.I32), u64(DType.I64), np.int64(0)

    def store_element_i64(kind: Any, address: Any, value: Any) -> None:
        if kind == I32:
            store_word(address, u64(value))
        elif kind == I64:
            store_long(address, u64(value))
        elif kind == BOOL:
            store_u8(address, u64(value != ZERO))
        else:
            store_u8(address, u64(value))

    return m.device(store_element_i64)


@functools.cache
def make_load_f32(m: Primitives) -> Body:
    """`load_element_f32(kind, address)`: an element of any kind as f32, integers rounded to nearest."""
    u64, f32 = m.u64, m.f32
    load_f32, load_u16 = m.load_f32, m.load_u16
    f16_to_f32, bf16_to_f32, load_i64 = m.f16_to_f32, m.bf16_to_f32, make_load_i64(m)
    F32, F16, BF16 = u64(DType.F32), u64(DType.F16), u64(DType.BF16)

    def load_element_f32(kind: Any, address: Any) -> Any:
        if kind == F32:
            return load_f32(address)
        if kind == F16:
            return f16_to_f32(load_u16(address))
        if kind == BF16:
            return bf16_to_f32(load_u16(address))
        return f32(load_i64(kind, address))

    return m.device(load_element_f32)


@functools.cache
def make_store_f32(m: Primitives) -> Body:
    """`store_element_f32(kind, address, value)`: rounded to nearest even. Float kinds only."""
    u64 = m.u64
    store_f32, store_u16 = m.store_f32, m.store_u16
    f32_to_f16, f32_to_bf16 = m.f32_to_f16, m.f32_to_bf16
    F32, F16 = u64(DType.F32), u64(DType.F16)

    def store_element_f32(kind: Any, address: Any, value: Any) -> None:
        if kind == F32:
            store_f32(address, value)
        elif kind == F16:
            store_u16(address, f32_to_f16(value))
        else:
            store_u16(address, f32_to_bf16(value))

    return m.device(store_element_f32)


@functools.cache
def make_unpack_half(m: Primitives) -> Body:
    """`unpack_half(kind, (low, high)) -> 8 f32`: two words of f16, or of bf16."""
    u64, f16_to_f32, bf16_to_f32 = m.u64, m.f16_to_f32, m.bf16_to_f32
    F16, S16, S32, S48 = u64(DType.F16), u64(16), u64(32), u64(48)

    def unpack_half(kind: Any, pair: Any) -> Any:
        low, high = pair
        if kind == F16:
            return (
                f16_to_f32(low),
                f16_to_f32(low >> S16),
                f16_to_f32(low >> S32),
                f16_to_f32(low >> S48),
                f16_to_f32(high),
                f16_to_f32(high >> S16),
                f16_to_f32(high >> S32),
                f16_to_f32(high >> S48),
            )
        return (
            bf16_to_f32(low),
            bf16_to_f32(low >> S16),
            bf16_to_f32(low >> S32),
            bf16_to_f32(low >> S48),
            bf16_to_f32(high),
            bf16_to_f32(high >> S16),
            bf16_to_f32(high >> S32),
            bf16_to_f32(high >> S48),
        )

    return m.device(unpack_half)


@functools.cache
def make_pack_half(m: Primitives) -> Body:
    """`pack_half(kind, 8 f32) -> (low, high)`: two words of f16, or of bf16; to nearest even."""
    u64, f32_to_f16, f32_to_bf16 = m.u64, m.f32_to_f16, m.f32_to_bf16
    F16, S16, S32, S48 = u64(DType.F16), u64(16), u64(32), u64(48)

    def pack_half(kind: Any, v: Any) -> Any:
        if kind == F16:
            low = f32_to_f16(v[0]) | (f32_to_f16(v[1]) << S16)
            low |= (f32_to_f16(v[2]) << S32) | (f32_to_f16(v[3]) << S48)
            high = f32_to_f16(v[4]) | (f32_to_f16(v[5]) << S16)
            high |= (f32_to_f16(v[6]) << S32) | (f32_to_f16(v[7]) << S48)
        else:
            low = f32_to_bf16(v[0]) | (f32_to_bf16(v[1]) << S16)
            low |= (f32_to_bf16(v[2]) << S32) | (f32_to_bf16(v[3]) << S48)
            high = f32_to_bf16(v[4]) | (f32_to_bf16(v[5]) << S16)
            high |= (f32_to_bf16(v[6]) << S32) | (f32_to_bf16(v[7]) << S48)
        return low, high

    return m.device(pack_half)


@functools.cache
def make_load_f32x8(m: Primitives) -> Body:
    """`load_f32x8(kind, address)`: eight neighbours as a tuple of f32. Any kind; aligned to 16 bytes, or 8
    for one-byte elements."""
    u64, f32 = m.u64, m.f32
    load_f32x4, load_pair = m.load_f32x4, m.load_pair
    load_i64x8, unpack_half = make_load_i64x8(m), make_unpack_half(m)
    F32, F16, BF16, SIXTEEN = u64(DType.F32), u64(DType.F16), u64(DType.BF16), u64(16)

    def load_f32x8(kind: Any, address: Any) -> Any:
        if kind == F32:
            a = load_f32x4(address)
            b = load_f32x4(address + SIXTEEN)
            return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]
        if kind == F16 or kind == BF16:
            return unpack_half(kind, load_pair(address))
        v = load_i64x8(kind, address)
        return f32(v[0]), f32(v[1]), f32(v[2]), f32(v[3]), f32(v[4]), f32(v[5]), f32(v[6]), f32(v[7])

    return m.device(load_f32x8)


@functools.cache
def make_store_f32x8(m: Primitives) -> Body:
    """`store_f32x8(kind, address, values)`: eight f32 to neighbours; float kinds, 16-byte aligned."""
    u64 = m.u64
    store_f32x4, store_pair, pack_half = m.store_f32x4, m.store_pair, make_pack_half(m)
    F32, SIXTEEN = u64(DType.F32), u64(16)

    def store_f32x8(kind: Any, address: Any, v: Any) -> None:
        if kind == F32:
            store_f32x4(address, v[0], v[1], v[2], v[3])
            store_f32x4(address + SIXTEEN, v[4], v[5], v[6], v[7])
        else:
            low, high = pack_half(kind, v)
            store_pair(address, low, high)

    return m.device(store_f32x8)


@functools.cache
def make_load_i64x8(m: Primitives) -> Body:
    """`load_i64x8(kind, address)`: eight neighbours as a tuple of i64; 16-byte aligned, one-byte kinds 8."""
    u64 = m.u64
    load_pair, load_long = m.load_pair, m.load_long
    I8, I32, I64 = u64(DType.I8), u64(DType.I32), u64(DType.I64)
    SIXTEEN, THIRTY_TWO, FORTY_EIGHT = u64(16), u64(32), u64(48)
    S32, S56, BYTE = np.int64(32), np.int64(56), u64(0xFF)
    B1, B2, B3, B4, B5, B6, B7 = (u64(8 * byte) for byte in range(1, 8))

    def low_word(pair: Any) -> Any:
        return (np.int64(pair) << S32) >> S32

    def high_word(pair: Any) -> Any:
        return np.int64(pair) >> S32

    def signed(byte: Any) -> Any:
        return (np.int64(byte) << S56) >> S56

    low_word, high_word, signed = m.device(low_word), m.device(high_word), m.device(signed)

    def load_i64x8(kind: Any, address: Any) -> Any:
        if kind == I32:
            a, b = load_pair(address)
            c, d = load_pair(address + SIXTEEN)
            return (
                low_word(a),
                high_word(a),
                low_word(b),
                high_word(b),
                low_word(c),
                high_word(c),
                low_word(d),
                high_word(d),
            )
        if kind == I64:
            a, b = load_pair(address)
            c, d = load_pair(address + SIXTEEN)
            e, f = load_pair(address + THIRTY_TWO)
            g, h = load_pair(address + FORTY_EIGHT)
            return (
                np.int64(a),
                np.int64(b),
                np.int64(c),
                np.int64(d),
                np.int64(e),
                np.int64(f),
                np.int64(g),
                np.int64(h),
            )
        w = load_long(address)
        if kind == I8:
            return (
                signed(w),
                signed(w >> B1),
                signed(w >> B2),
                signed(w >> B3),
                signed(w >> B4),
                signed(w >> B5),
                signed(w >> B6),
                signed(w >> B7),
            )
        return (
            np.int64(w & BYTE),
            np.int64((w >> B1) & BYTE),
            np.int64((w >> B2) & BYTE),
            np.int64((w >> B3) & BYTE),
            np.int64((w >> B4) & BYTE),
            np.int64((w >> B5) & BYTE),
            np.int64((w >> B6) & BYTE),
            np.int64(w >> B7),
        )

    return m.device(load_i64x8)


@functools.cache
def make_store_i64x8(m: Primitives) -> Body:
    """`store_i64x8(kind, address, values)`: eight i64 to neighbours, as `store_element_i64` does."""
    u64 = m.u64
    store_pair, store_long = m.store_pair, m.store_long
    BOOL, I32, I64, ZERO = u64(DType.BOOL), u64(DType.I32), u64(DType.I64), np.int64(0)
    SIXTEEN, THIRTY_TWO, FORTY_EIGHT, HALF = u64(16), u64(32), u64(48), u64(32)
    LOW_HALF, BYTE = u64(0xFFFFFFFF), u64(0xFF)
    B1, B2, B3, B4, B5, B6, B7 = (u64(8 * byte) for byte in range(1, 8))

    def words(low: Any, high: Any) -> Any:
        return (u64(low) & LOW_HALF) | (u64(high) << HALF)

    def byte_of(kind: Any, value: Any) -> Any:
        if kind == BOOL:
            return u64(value != ZERO)
        return u64(value) & BYTE

    words, byte_of = m.device(words), m.device(byte_of)

    def store_i64x8(kind: Any, address: Any, v: Any) -> None:
        if kind == I32:
            store_pair(address, words(v[0], v[1]), words(v[2], v[3]))
            store_pair(address + SIXTEEN, words(v[4], v[5]), words(v[6], v[7]))
        elif kind == I64:
            store_pair(address, u64(v[0]), u64(v[1]))
            store_pair(address + SIXTEEN, u64(v[2]), u64(v[3]))
            store_pair(address + THIRTY_TWO, u64(v[4]), u64(v[5]))
            store_pair(address + FORTY_EIGHT, u64(v[6]), u64(v[7]))
        else:
            w = byte_of(kind, v[0]) | (byte_of(kind, v[1]) << B1) | (byte_of(kind, v[2]) << B2)
            w |= (byte_of(kind, v[3]) << B3) | (byte_of(kind, v[4]) << B4) | (byte_of(kind, v[5]) << B5)
            w |= (byte_of(kind, v[6]) << B6) | (byte_of(kind, v[7]) << B7)
            store_long(address, w)

    return m.device(store_i64x8)
