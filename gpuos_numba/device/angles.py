"""Cosines and sines: angles in turns arrive, as 64-bit fixed point, which reduces itself.

CUDA's own functions keep the digits of 2 / pi in local memory, and reduce large angles in a loop.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ..machines.base import Body, Primitives


def _digits(bits: int) -> int:
    """1 / (2 pi) times 2^bits, rounded down. pi from Machin's formula, in integers."""
    one = 1 << (bits + 64)

    def arctan_of_inverse(n: int) -> int:
        power, total, k = one // n, 0, 0
        while power:
            total += (power if k % 2 == 0 else -power) // (2 * k + 1)
            power //= n * n
            k += 1
        return total

    pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
    return (one << bits) // (2 * pi)


INVERSE: Final = _digits(256)
"""The turns of an angle of 1, as 256-bit fixed point: enough for every f32."""


def make_turn(m: Primitives) -> Body:
    """`turn(turns)` -> (cosine, sine) of turns / 2^64 of a full turn."""
    u64, f32 = m.u64, m.f32
    EIGHTH, QUARTER_BITS, TO_QUADRANT = u64(1 << 61), u64((1 << 62) - 1), u64(62)
    HALF_QUARTER, SCALE = np.int64(1 << 61), f32(2 * math.pi / 2**64)
    ZERO, ONE, TWO = u64(0), u64(1), u64(2)
    # Cephes' polynomials for |angle| <= pi / 4: right to 2^-24.
    S1, S2, S3 = f32(-1.6666654611e-1), f32(8.3321608736e-3), f32(-1.9515295891e-4)
    C1, C2, C3 = f32(4.166664568298827e-2), f32(-1.388731625493765e-3), f32(2.443315711809948e-5)
    HALF, UNIT = f32(0.5), f32(1)

    def turn(turns: Any) -> Any:
        turns += EIGHTH
        quadrant = turns >> TO_QUADRANT
        angle = f32(np.int64(turns & QUARTER_BITS) - HALF_QUARTER) * SCALE
        square = angle * angle
        across = angle + angle * square * (S1 + square * (S2 + square * S3))
        along = (UNIT - HALF * square) + square * square * (C1 + square * (C2 + square * C3))
        cosine = along
        sine = across
        if quadrant & ONE != ZERO:
            cosine = across
            sine = along
        if (quadrant + ONE) & TWO != ZERO:
            cosine = -cosine
        if quadrant & TWO != ZERO:
            sine = -sine
        return cosine, sine

    return m.device(turn)


def make_turns_of(m: Primitives) -> Body:
    """`turns_of(x)`: an angle of finite f32 as turns modulo 1, times 2^64; a negative angle's are negated.

    x is M 2^e with a whole M of 24 bits; the bits of 1 / (2 pi) from the e-th on, times M, are the turns.
    """
    u64, f32_bits = m.u64, m.f32_bits
    WORDS = [u64(INVERSE >> (192 - 64 * i) & (2**64 - 1)) for i in range(4)]
    W0, W1, W2, W3 = WORDS
    ZERO, ONE, SIX, LOW_SIX = u64(0), u64(1), u64(6), u64(63)
    MANTISSA, HIDDEN, TO_EXPONENT, EXPONENT = u64((1 << 23) - 1), u64(1 << 23), u64(23), u64(255)
    BIAS, FORTY, TWENTY_FOUR, SIXTY_FOUR, SIGN = u64(150), u64(40), u64(24), u64(64), u64(1 << 31)

    def turns_of(x: Any) -> Any:
        bits = f32_bits(x)
        exponent = (bits >> TO_EXPONENT) & EXPONENT
        whole = bits & MANTISSA
        if exponent != ZERO:
            whole |= HIDDEN
        high = ZERO
        low = ZERO
        if exponent >= BIAS:  # M 2^left
            left = exponent - BIAS
            word = left >> SIX
            shift = left & LOW_SIX
            high = W0
            low = W1
            rest = W2
            if word == ONE:
                high = W1
                low = W2
                rest = W3
            if shift != ZERO:
                high = (high << shift) | (low >> (SIXTY_FOUR - shift))
                low = (low << shift) | (rest >> (SIXTY_FOUR - shift))
        else:  # M / 2^right
            right = BIAS - exponent
            if right < SIXTY_FOUR:
                high = W0 >> right
                low = (W0 << (SIXTY_FOUR - right)) | (W1 >> right)
            elif right < SIXTY_FOUR + FORTY:
                low = W0 >> (right - SIXTY_FOUR)
        turns = whole * high + ((whole * (low >> TWENTY_FOUR)) >> FORTY)
        if bits & SIGN != ZERO:
            turns = ZERO - turns
        return turns

    return m.device(turns_of)


def make_sine(m: Primitives) -> Body:
    """`sine(x)` of any f32, to 2^-23."""
    turns_of, turn, f32_bits, bits_f32 = make_turns_of(m), make_turn(m), m.f32_bits, m.bits_f32
    SMALL, BUT_SIGN = m.f32(2.0**-12), m.u64(0x7FFFFFFF)

    def sine(x: Any) -> Any:
        if x - x != x - x:  # infinite or NaN
            return x - x
        if bits_f32(f32_bits(x) & BUT_SIGN) < SMALL:
            return x  # x^3 / 6 is less than half an ulp, and fixed point would lose digits
        return turn(turns_of(x))[1]

    return m.device(sine)


def make_cosine(m: Primitives) -> Body:
    """`cosine(x)` of any f32, to 2^-23."""
    turns_of, turn = make_turns_of(m), make_turn(m)

    def cosine(x: Any) -> Any:
        if x - x != x - x:
            return x - x
        return turn(turns_of(x))[0]

    return m.device(cosine)
