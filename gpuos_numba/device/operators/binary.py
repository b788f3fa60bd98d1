"""Functions of two elements."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ...machines.base import Body, Primitives
from ..division import make_divide4
from .functions import TINY, Array, Function
from .table import Parameter, Tolerance


def make_add(m: Primitives) -> Body:
    def add(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x + y

    return add


def make_add_scaled(m: Primitives) -> Body:
    fma = m.fused_multiply_add

    def add_scaled(x: Any, y: Any, z: Any, alpha: Any, q: Any) -> Any:
        return fma(alpha, y, x)

    return add_scaled


def make_add_scaled_i64(m: Primitives) -> Body:
    def add_scaled(x: Any, y: Any, z: Any, alpha: Any, q: Any) -> Any:
        return x + alpha * y

    return add_scaled


def truth_add(x: Array, y: Array, alpha: float = 1) -> Array:
    if alpha == 1:
        return x + y
    if x.dtype.kind == "f":  # rounded once
        return float(np.float32(alpha)) * y.astype(np.float64) + x.astype(np.float64)
    return x + np.int64(alpha) * y


def make_sub(m: Primitives) -> Body:
    def sub(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x - y

    return sub


def make_sub_scaled(m: Primitives) -> Body:
    fma = m.fused_multiply_add

    def sub_scaled(x: Any, y: Any, z: Any, alpha: Any, q: Any) -> Any:
        return fma(-alpha, y, x)

    return sub_scaled


def make_sub_scaled_i64(m: Primitives) -> Body:
    def sub_scaled(x: Any, y: Any, z: Any, alpha: Any, q: Any) -> Any:
        return x - alpha * y

    return sub_scaled


def truth_sub(x: Array, y: Array, alpha: float = 1) -> Array:
    return x - y if alpha == 1 else truth_add(x, y, -alpha)


def make_mul(m: Primitives) -> Body:
    def mul(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x * y

    return mul


def make_div(m: Primitives) -> Body:
    def div(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x / y

    return div


def make_floor_divide(m: Primitives) -> Body:
    modulo, round_down, f32 = m.modulo, m.round_down, m.f32
    bits_f32, f32_bits, SIGN = m.bits_f32, m.f32_bits, m.u64(0x80000000)
    ZERO, HALF, ONE = f32(0), f32(0.5), f32(1)

    def floor_divide(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if y == ZERO:
            return x / y
        rest = modulo(x, y)
        quotient = (x - rest) / y
        if rest != ZERO and (y < ZERO) != (rest < ZERO):
            quotient -= ONE
        if quotient == ZERO:
            return bits_f32(f32_bits(x / y) & SIGN)
        whole = round_down(quotient)
        if quotient - whole > HALF:
            whole += ONE
        return whole

    return floor_divide


def truth_floor_divide(x: Array, y: Array) -> Array:
    if x.dtype.kind != "f":
        return np.floor_divide(x, y)
    rest = np.fmod(x, y)
    quotient = (x - rest) / y
    quotient = np.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - np.float32(1), quotient)
    whole = np.floor(quotient)
    whole = np.where(quotient - whole > 0.5, whole + np.float32(1), whole)
    whole = np.where(quotient == 0, np.copysign(np.float32(0), x / y), whole)
    return np.where(y == 0, x / y, whole)


def _make_divided(m: Primitives, wants_rest: bool) -> Body:
    """Division of i64 rounded down, without the trap of -2^63 / -1; by 0 it gives 0."""
    u64, divide = m.u64, m.divide
    ZERO, ONE, NONE = np.int64(0), np.int64(1), u64(0)

    def divided(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if y == ZERO:
            return ZERO
        a = NONE - u64(x) if x < ZERO else u64(x)
        b = NONE - u64(y) if y < ZERO else u64(y)
        quotient = divide(a, b)
        rest = np.int64(a - quotient * b)
        whole = np.int64(quotient)
        apart = (x < ZERO) != (y < ZERO)
        if x < ZERO:
            rest = -rest
        if apart:
            whole = -whole
            if rest != ZERO:
                whole -= ONE
                rest += y
        if wants_rest:
            return rest
        return whole

    return divided


def make_floor_divide_i64(m: Primitives) -> Body:
    return _make_divided(m, False)


def make_remainder_i64(m: Primitives) -> Body:
    return _make_divided(m, True)


def make_remainder(m: Primitives) -> Body:
    modulo, ZERO = m.modulo, m.f32(0)

    def remainder(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        rest = modulo(x, y)
        if rest != ZERO and (y < ZERO) != (rest < ZERO):
            rest += y
        return rest

    return remainder


def truth_remainder(x: Array, y: Array) -> Array:
    if x.dtype.kind != "f":
        return np.remainder(x, y)
    rest = np.fmod(x, y)
    return np.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest)


def make_pow(m: Primitives) -> Body:
    pow_of = math.pow

    def power(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return pow_of(x, y)

    return power


def make_pow_i64(m: Primitives) -> Body:
    ZERO, ONE, MINUS = np.int64(0), np.int64(1), np.int64(-1)

    def power(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if y < ZERO:
            if x == ONE:
                return ONE
            if x == MINUS:
                return MINUS if y & ONE != ZERO else ONE
            return ZERO
        result = ONE
        base = x
        left = y
        while left > ZERO:
            if left & ONE != ZERO:
                result *= base
            base *= base
            left >>= ONE
        return result

    return power


def truth_pow(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return np.power(x.astype(np.float64), y.astype(np.float64))
    positive = np.power(x, np.maximum(y, 0))
    inverse = np.where(x == 1, 1, np.where(x == -1, np.where(y % 2 == 0, 1, -1), 0))
    return np.where(y < 0, inverse, positive)


def make_maximum(m: Primitives) -> Body:
    def maximum(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if x != x:
            return x
        return x if x >= y else y  # a y of NaN fails, and is it

    return maximum


def make_minimum(m: Primitives) -> Body:
    def minimum(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if x != x:
            return x
        return x if x <= y else y

    return minimum


def make_fmax(m: Primitives) -> Body:
    def fmax(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if y != y:
            return x
        return x if x >= y else y

    return fmax


def make_fmin(m: Primitives) -> Body:
    def fmin(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if y != y:
            return x
        return x if x <= y else y

    return fmin


# --- truths of two elements: 1 or 0, stored as bool ---


def _ones(m: Primitives, integers: bool) -> tuple[Any, Any]:
    return (np.int64(1), np.int64(0)) if integers else (m.f32(1), m.f32(0))


def _make_eq(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def eq(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x == y else ZERO

    return eq


def _make_ne(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def ne(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x != y else ZERO

    return ne


def _make_lt(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def lt(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x < y else ZERO

    return lt


def _make_le(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def le(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x <= y else ZERO

    return le


def _make_gt(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def gt(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x > y else ZERO

    return gt


def _make_ge(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def ge(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x >= y else ZERO

    return ge


def _make_and(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def logical_and(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x != ZERO and y != ZERO else ZERO

    return logical_and


def _make_or(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def logical_or(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x != ZERO or y != ZERO else ZERO

    return logical_or


def _make_xor(m: Primitives, integers: bool) -> Body:
    ONE, ZERO = _ones(m, integers)

    def logical_xor(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if (x != ZERO) != (y != ZERO) else ZERO

    return logical_xor


def _truth(name: str, formula: str, truth: Any, make: Any) -> Function:
    return Function(name, 2, formula, truth, lambda m: make(m, False), lambda m: make(m, True), result="bool")


_ALPHA: Final = (Parameter("alpha", "number", 1),)

FUNCTIONS: Final = (
    Function("add", 2, "a + alpha b", truth_add, make_add, make_add, parameters=_ALPHA),
    Function("sub", 2, "a - alpha b", truth_sub, make_sub, make_sub, parameters=_ALPHA, bools=False),
    Function("mul", 2, "a * b", np.multiply, make_mul, make_mul),
    Function("div", 2, "a / b, of integers too", np.divide, make_div, result="float", f32x4=make_divide4),
    Function(
        "floor_divide",
        2,
        "a / b rounded down",
        truth_floor_divide,
        make_floor_divide,
        make_floor_divide_i64,
        bools=False,
        divides=True,
        source="torch.floor_divide, CPython's float_divmod.",
    ),
    Function(
        "remainder",
        2,
        "a - b floor(a / b): the divisor's sign",
        truth_remainder,
        make_remainder,
        make_remainder_i64,
        bools=False,
        divides=True,
        source="torch.remainder.",
    ),
    Function(
        "pow",
        2,
        "a^b; of integers with negative b 0, but for a = 1 or -1",
        truth_pow,
        make_pow,
        make_pow_i64,
        bools=False,
        tolerance=Tolerance(f32=16 * 2.0**-24, atol=TINY),
        source="torch.pow.",
    ),
    Function("maximum", 2, "larger of a, b; NaN wins", np.maximum, make_maximum, make_maximum),
    Function("minimum", 2, "smaller of a, b; NaN wins", np.minimum, make_minimum, make_minimum),
    Function("fmax", 2, "larger of a, b; NaN loses", np.fmax, make_fmax, make_maximum),
    Function("fmin", 2, "smaller of a, b; NaN loses", np.fmin, make_fmin, make_minimum),
    _truth("eq", "a == b", np.equal, _make_eq),
    _truth("ne", "a != b", np.not_equal, _make_ne),
    _truth("lt", "a < b", np.less, _make_lt),
    _truth("le", "a <= b", np.less_equal, _make_le),
    _truth("gt", "a > b", np.greater, _make_gt),
    _truth("ge", "a >= b", np.greater_equal, _make_ge),
    _truth("logical_and", "a and b", np.logical_and, _make_and),
    _truth("logical_or", "a or b", np.logical_or, _make_or),
    _truth("logical_xor", "a or b, not both", np.logical_xor, _make_xor),
)

SCALED: Final = (
    Function("add.alpha", 2, "a + alpha b", truth_add, make_add_scaled, make_add_scaled_i64),
    Function("sub.alpha", 2, "a - alpha b", truth_sub, make_sub_scaled, make_sub_scaled_i64),
)
"""What add and sub become with an alpha."""
