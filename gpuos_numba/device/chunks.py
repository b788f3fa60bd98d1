"""Eight elements at a time, wherever they lie: a kind, an address and a step arrive, registers leave.

Where elements are neighbours and aligned a chunk is one or two 16-byte accesses, otherwise eight accesses
`step` bytes apart. Loads come apart from conversions: while a thread converts it waits, so whoever needs
several chunks loads them all before it unpacks the first.
"""

from __future__ import annotations

import functools
from typing import Any

from ..descriptor import DType
from ..machines.base import Body, Primitives
from .elements import make_load_f32x8, make_load_i64, make_store_f32, make_store_f32x8

CHUNK = 8


@functools.cache
def make_load_raw8(m: Primitives) -> Body:
    """`load_raw8(kind, address)`: eight f32, f16 or bf16, aligned to 16 bytes, as 4 words to unpack."""
    u64, load_pair = m.u64, m.load_pair
    F32, ZERO, SIXTEEN = u64(DType.F32), u64(0), u64(16)

    def load_raw8(kind: Any, address: Any) -> Any:
        a, b = load_pair(address)
        c, d = ZERO, ZERO
        if kind == F32:
            c, d = load_pair(address + SIXTEEN)
        return a, b, c, d

    return m.device(load_raw8)


@functools.cache
def make_unpack8(m: Primitives) -> Body:
    """`unpack8(kind, raw)`: the 8 f32 that `load_raw8` loaded."""
    u64 = m.u64
    bits_f32, f16_to_f32, bf16_to_f32 = m.bits_f32, m.f16_to_f32, m.bf16_to_f32
    F32, F16, S16, S32, S48 = u64(DType.F32), u64(DType.F16), u64(16), u64(32), u64(48)

    def unpack8(kind: Any, raw: Any) -> Any:
        a, b, c, d = raw
        if kind == F32:
            return (
                bits_f32(a),
                bits_f32(a >> S32),
                bits_f32(b),
                bits_f32(b >> S32),
                bits_f32(c),
                bits_f32(c >> S32),
                bits_f32(d),
                bits_f32(d >> S32),
            )
        if kind == F16:
            return (
                f16_to_f32(a),
                f16_to_f32(a >> S16),
                f16_to_f32(a >> S32),
                f16_to_f32(a >> S48),
                f16_to_f32(b),
                f16_to_f32(b >> S16),
                f16_to_f32(b >> S32),
                f16_to_f32(b >> S48),
            )
        return (
            bf16_to_f32(a),
            bf16_to_f32(a >> S16),
            bf16_to_f32(a >> S32),
            bf16_to_f32(a >> S48),
            bf16_to_f32(b),
            bf16_to_f32(b >> S16),
            bf16_to_f32(b >> S32),
            bf16_to_f32(b >> S48),
        )

    return m.device(unpack8)


@functools.cache
def make_at(m: Primitives) -> Body:
    """`at(address, step, count, k)`: address of element k, or of element 0 where there are no more than k."""
    u64 = m.u64
    ZERO = u64(0)

    def at(address: Any, step: Any, count: Any, k: Any) -> Any:
        return address + (k * step if k < count else ZERO)

    return m.device(at)


@functools.cache
def make_spread_f32(m: Primitives) -> Body:
    """`spread_f32(kind, address, step, count)`: `count` (1 to 8) elements `step` bytes apart as f32, then
    copies of the first. Float kinds."""
    u64 = m.u64
    load_f32, load_u16 = m.load_f32, m.load_u16
    f16_to_f32, bf16_to_f32, at = m.f16_to_f32, m.bf16_to_f32, make_at(m)
    F32, F16 = u64(DType.F32), u64(DType.F16)
    ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN = (u64(k) for k in range(1, 8))

    def spread_f32(kind: Any, address: Any, step: Any, count: Any) -> Any:
        # Without branches: all eight loads fly together.
        p1, p2 = at(address, step, count, ONE), at(address, step, count, TWO)
        p3, p4 = at(address, step, count, THREE), at(address, step, count, FOUR)
        p5, p6 = at(address, step, count, FIVE), at(address, step, count, SIX)
        p7 = at(address, step, count, SEVEN)
        if kind == F32:
            return (
                load_f32(address),
                load_f32(p1),
                load_f32(p2),
                load_f32(p3),
                load_f32(p4),
                load_f32(p5),
                load_f32(p6),
                load_f32(p7),
            )
        a, b, c, d = load_u16(address), load_u16(p1), load_u16(p2), load_u16(p3)
        e, f, g, h = load_u16(p4), load_u16(p5), load_u16(p6), load_u16(p7)
        if kind == F16:
            return (
                f16_to_f32(a),
                f16_to_f32(b),
                f16_to_f32(c),
                f16_to_f32(d),
                f16_to_f32(e),
                f16_to_f32(f),
                f16_to_f32(g),
                f16_to_f32(h),
            )
        return (
            bf16_to_f32(a),
            bf16_to_f32(b),
            bf16_to_f32(c),
            bf16_to_f32(d),
            bf16_to_f32(e),
            bf16_to_f32(f),
            bf16_to_f32(g),
            bf16_to_f32(h),
        )

    return m.device(spread_f32)


@functools.cache
def make_spread_i64(m: Primitives) -> Body:
    """`spread_i64(kind, address, step, count)`: as `spread_f32`, of the integer kinds as i64."""
    load, at = make_load_i64(m), make_at(m)
    ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN = (m.u64(k) for k in range(1, 8))

    def spread_i64(kind: Any, address: Any, step: Any, count: Any) -> Any:
        return (
            load(kind, address),
            load(kind, at(address, step, count, ONE)),
            load(kind, at(address, step, count, TWO)),
            load(kind, at(address, step, count, THREE)),
            load(kind, at(address, step, count, FOUR)),
            load(kind, at(address, step, count, FIVE)),
            load(kind, at(address, step, count, SIX)),
            load(kind, at(address, step, count, SEVEN)),
        )

    return m.device(spread_i64)


@functools.cache
def make_fill8(m: Primitives) -> Body:
    """`fill8(v, count, fill)`: the first `count` of 8 values, then `fill`."""
    ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN = (m.u64(k) for k in range(1, 8))

    def fill8(v: Any, count: Any, fill: Any) -> Any:
        return (
            v[0],
            v[1] if count > ONE else fill,
            v[2] if count > TWO else fill,
            v[3] if count > THREE else fill,
            v[4] if count > FOUR else fill,
            v[5] if count > FIVE else fill,
            v[6] if count > SIX else fill,
            v[7] if count > SEVEN else fill,
        )

    return m.device(fill8)


@functools.cache
def make_load8(m: Primitives) -> Body:
    """`load8(vector, kind, address, step, count)`: 8 f32, by one way or the other; see the module."""
    vector8, spread = make_load_f32x8(m), make_spread_f32(m)

    def load8(vector: Any, kind: Any, address: Any, step: Any, count: Any) -> Any:
        if vector:
            return vector8(kind, address)
        return spread(kind, address, step, count)

    return m.device(load8)


@functools.cache
def make_store8(m: Primitives) -> Body:
    """`store8(vector, kind, address, step, count, v)`: the first `count` of 8 f32, all where `vector`."""
    vector8, store = make_store_f32x8(m), make_store_f32(m)
    ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN = (m.u64(k) for k in range(1, 8))

    def store8(vector: Any, kind: Any, address: Any, step: Any, count: Any, v: Any) -> None:
        if vector:
            vector8(kind, address, v)
        else:
            store(kind, address, v[0])
            if count > ONE:
                store(kind, address + step, v[1])
            if count > TWO:
                store(kind, address + TWO * step, v[2])
            if count > THREE:
                store(kind, address + THREE * step, v[3])
            if count > FOUR:
                store(kind, address + FOUR * step, v[4])
            if count > FIVE:
                store(kind, address + FIVE * step, v[5])
            if count > SIX:
                store(kind, address + SIX * step, v[6])
            if count > SEVEN:
                store(kind, address + SEVEN * step, v[7])

    return m.device(store8)


@functools.cache
def make_round8(m: Primitives) -> Body:
    """`round8(kind, v)`: what 8 f32 would be after a store as a float kind and a load."""
    u64 = m.u64
    f16_to_f32, bf16_to_f32, f32_to_f16, f32_to_bf16 = (
        m.f16_to_f32,
        m.bf16_to_f32,
        m.f32_to_f16,
        m.f32_to_bf16,
    )
    F32, F16 = u64(DType.F32), u64(DType.F16)

    def half(x: Any) -> Any:
        return f16_to_f32(f32_to_f16(x))

    def brain(x: Any) -> Any:
        return bf16_to_f32(f32_to_bf16(x))

    half, brain = m.device(half), m.device(brain)

    def round8(kind: Any, v: Any) -> Any:
        if kind == F32:
            return v
        if kind == F16:
            return (
                half(v[0]),
                half(v[1]),
                half(v[2]),
                half(v[3]),
                half(v[4]),
                half(v[5]),
                half(v[6]),
                half(v[7]),
            )
        return (
            brain(v[0]),
            brain(v[1]),
            brain(v[2]),
            brain(v[3]),
            brain(v[4]),
            brain(v[5]),
            brain(v[6]),
            brain(v[7]),
        )

    return m.device(round8)


@functools.cache
def make_chunk_count(m: Primitives) -> Body:
    """`chunk_count(j, end, parts)`: how many of j, j + parts, j + 2 parts, ... lie below end; at most 8."""
    u64 = m.u64
    divide = m.divide
    ONE, EIGHT = u64(1), u64(CHUNK)

    def chunk_count(j: Any, end: Any, parts: Any) -> Any:
        if j + (EIGHT - ONE) * parts < end:
            return EIGHT
        return divide(end - j + parts - ONE, parts)

    return m.device(chunk_count)


@functools.cache
def make_sum8(m: Primitives) -> Body:
    """`sum8(v)`: the sum of 8 f32, pairwise."""

    def sum8(v: Any) -> Any:
        return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))

    return m.device(sum8)


@functools.cache
def make_max8(m: Primitives) -> Body:
    """`max8(v)`: the largest of 8 f32, NaN where one is NaN."""
    from .reductions import make_larger

    larger = make_larger(m)

    def max8(v: Any) -> Any:
        return larger(
            larger(larger(v[0], v[1]), larger(v[2], v[3])), larger(larger(v[4], v[5]), larger(v[6], v[7]))
        )

    return m.device(max8)


@functools.cache
def make_add_exactly(m: Primitives) -> Body:
    """`add_exactly(total, error, x)` -> (total + x, error + what the rounding lost).

    Knuth's TwoSum: a long sum of f32 that ends with total + error is right to about one rounding of each
    chunk, and total alone is infinite or NaN where the sum is.
    """

    def add_exactly(total: Any, error: Any, x: Any) -> Any:
        new = total + x
        part = new - total
        return new, error + ((total - (new - part)) + (x - part))

    return m.device(add_exactly)


@functools.cache
def make_settle(m: Primitives) -> Body:
    """`settle(total, error)`: the sum that `add_exactly` kept; without the error where that is NaN."""
    ZERO = m.f32(0)

    def settle(total: Any, error: Any) -> Any:
        if error - error == ZERO:
            return total + error
        return total

    return m.device(settle)
