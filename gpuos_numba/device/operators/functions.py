"""What an element-wise operator is made of: its function of one element, in f32 and in i64, and its truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..elementwise import Factory
from .table import Parameter, Tolerance

Array = Any
"""numpy.ndarray."""

Truth = Callable[..., Array]
"""`truth(*operands, **parameters)` in NumPy: f32 or i64 operands of one shape; exact or f64 out."""

TINY: Final = 2.0**-147
"""Two of the smallest f32: below 2^-126 there is no relative precision."""

ROUNDED_ONCE: Final = Tolerance(f16=0.0, bf16=0.0)
"""Of a function that rounds once."""

GOOD: Final = Tolerance(f32=4 * 2.0**-24, atol=TINY)
"""Of a function that CUDA's libdevice gives to 2 ulp."""


@dataclass(frozen=True, slots=True)
class Function:
    """An element-wise operator.

    Attributes:
        name, arity: as in the table.
        formula: what an element becomes.
        truth: see there. Given f32 it says what an f32 result should be; bools come back as such.
        f32: factory of `function(x, y, z, p, q)` on f32. Integers come here too where there is no `i64`.
        f32x4: factory of `function(x, y)` on four lanes of f32, where that is better than four times one.
        i64: the same on i64, for integers and bools.
        result: "same" is the promoted dtype; "float" is it too, or f32 where it is none; "bool".
        bools: whether bools alone are taken.
        integers: whether integers are taken.
        parameters: keywords; the first two that are numbers reach the function as p and q.
        divides: an integer y of 0 is an error.
        values: which ones an example draws.
    """

    name: str
    arity: int
    formula: str
    truth: Truth
    f32: Factory | None
    i64: Factory | None = None
    result: str = "same"
    bools: bool = True
    integers: bool = True
    parameters: tuple[Parameter, ...] = ()
    tolerance: Tolerance = ROUNDED_ONCE
    divides: bool = False
    values: str = "any"
    source: str = ""
    f32x4: Factory | None = None


def wide(function: Callable[..., Array]) -> Truth:
    """A truth in f64: for what f32 can only approach."""

    def truth(*operands: Array, **parameters: Any) -> Array:
        return function(*(np.asarray(x, np.float64) for x in operands), **parameters)

    return truth
