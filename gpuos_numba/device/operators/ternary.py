"""Functions of three elements."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...machines.base import Body, Primitives
from .functions import Array, Function
from .table import Parameter, Tolerance


def _make_where(zero: Any) -> Body:
    def where(condition: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return y if condition != zero else z

    return where


def make_where(m: Primitives) -> Body:
    return _make_where(m.f32(0))


def make_where_i64(m: Primitives) -> Body:
    return _make_where(np.int64(0))


def truth_where(condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition != 0, a, b)


def make_addcmul(m: Primitives) -> Body:
    fma = m.fused_multiply_add

    def addcmul(x: Any, y: Any, z: Any, value: Any, q: Any) -> Any:
        return fma(value * y, z, x)

    return addcmul


def make_addcmul_i64(m: Primitives) -> Body:
    def addcmul(x: Any, y: Any, z: Any, value: Any, q: Any) -> Any:
        return x + value * y * z

    return addcmul


def truth_addcmul(x: Array, y: Array, z: Array, value: float) -> Array:
    if x.dtype.kind == "f":
        return (np.float32(value) * y).astype(np.float64) * z.astype(np.float64) + x.astype(np.float64)
    return x + np.int64(value) * y * z


def make_fma(m: Primitives) -> Body:
    fused = m.fused_multiply_add

    def fma(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return fused(x, y, z)

    return fma


def make_fma_i64(m: Primitives) -> Body:
    def fma(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x * y + z

    return fma


def truth_fma(x: Array, y: Array, z: Array) -> Array:
    if x.dtype.kind == "f":
        return x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    return x * y + z


def make_lerp(m: Primitives) -> Body:
    fma, HALF, ONE = m.fused_multiply_add, m.f32(0.5), m.f32(1)

    def lerp(start: Any, end: Any, weight: Any, p: Any, q: Any) -> Any:
        # Both ends are hit exactly.
        step = end - start
        if weight < HALF and weight > -HALF:
            return fma(weight, step, start)
        return fma(weight - ONE, step, end)

    return lerp


def truth_lerp(start: Array, end: Array, weight: Array) -> Array:
    step = (end - start).astype(np.float64)
    near = weight.astype(np.float64) * step + start
    far = (weight - np.float32(1)).astype(np.float64) * step + end
    return np.where(np.abs(weight) < 0.5, near, far)


FUNCTIONS: Final = (
    Function(
        "where",
        3,
        "a ? b : c",
        truth_where,
        make_where,
        make_where_i64,
        source="torch.where; nothing is taken from the side not chosen.",
    ),
    Function(
        "addcmul",
        3,
        "a + value b c",
        truth_addcmul,
        make_addcmul,
        make_addcmul_i64,
        parameters=(Parameter("value", "number", 1),),
        tolerance=Tolerance(f32=2.0**-23),
        bools=False,
        source="torch.addcmul.",
    ),
    Function(
        "fma",
        3,
        "a b + c, rounded once",
        truth_fma,
        make_fma,
        make_fma_i64,
        tolerance=Tolerance(f32=2.0**-23),
        bools=False,
        source="IEEE 754 fusedMultiplyAdd.",
    ),
    Function(
        "lerp",
        3,
        "a + c (b - a)",
        truth_lerp,
        make_lerp,
        tolerance=Tolerance(f32=2.0**-23),
        bools=False,
        integers=False,
        source="torch.lerp.",
    ),
)
