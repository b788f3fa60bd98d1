"""Quotients of f32, several lanes at once.

The compiler tests in each lane whether its short sequence gives the right answer, and branches: the lanes
wait for each other's reciprocal. Here one test of all lanes decides for the sequence that the compiler uses:
a reciprocal by hardware, good to an ulp, a Newton step, a quotient, and its remainder, which rounds it.

Source: P. W. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", IBM
Journal of Research and Development 34 (1990): a Newton step on a reciprocal within an ulp rounds it right
unless all bits of y's mantissa are 1, and then the last step rounds the quotient right.
"""

from __future__ import annotations

from typing import Any

from ..machines.base import Body, Primitives

ORDINARY = (2.0**-31, 2.0**33)
"""Sizes of operands, the second excluded, whose quotient and remainder are far from where f32 ends."""


def make_reciprocal(m: Primitives) -> Body:
    """`reciprocal(y)`: 1 / y for y of ordinary size, to an ulp; NaN of NaN. Without a branch."""
    approximate, fma, ONE = m.approximate_reciprocal, m.fused_multiply_add, m.f32(1)

    def reciprocal(y: Any) -> Any:
        r = approximate(y)
        return fma(r, fma(r, -y, ONE), r)

    return m.device(reciprocal)


def make_divide4(m: Primitives) -> Body:
    """`divide4(x, y)`: x / y lane by lane, each rounded as IEEE 754 says."""
    f32_bits, fma, reciprocal, u64 = m.f32_bits, m.fused_multiply_add, make_reciprocal(m), m.u64
    ZERO, ONE, MANTISSA = u64(0), u64(1), u64(0x7FFFFF)
    LOOKED_AT, AS_IT_SHOULD_BE = u64(3 << 29), u64(1 << 30)

    def differs(bits: Any) -> Any:
        """Bits LOOKED_AT are 0 where the size is ordinary: its exponent begins with 011 or 100."""
        return bits ^ (bits << ONE) ^ AS_IT_SHOULD_BE

    def quotient(x: Any, y: Any) -> Any:
        r = reciprocal(y)
        q = x * r
        return fma(r, fma(q, -y, x), q)

    differs, quotient = m.device(differs), m.device(quotient)

    def divide4(x: Any, y: Any) -> Any:
        a, b, c, d = f32_bits(y[0]), f32_bits(y[1]), f32_bits(y[2]), f32_bits(y[3])
        bad = differs(a) | differs(b) | differs(c) | differs(d)
        bad |= differs(f32_bits(x[0])) | differs(f32_bits(x[1]))
        bad |= differs(f32_bits(x[2])) | differs(f32_bits(x[3]))
        ones = (a & MANTISSA == MANTISSA) | (b & MANTISSA == MANTISSA)
        ones |= (c & MANTISSA == MANTISSA) | (d & MANTISSA == MANTISSA)
        if (bad & LOOKED_AT == ZERO) & (not ones):
            return (
                quotient(x[0], y[0]),
                quotient(x[1], y[1]),
                quotient(x[2], y[2]),
                quotient(x[3], y[3]),
            )
        return x[0] / y[0], x[1] / y[1], x[2] / y[2], x[3] / y[3]

    return m.device(divide4)
