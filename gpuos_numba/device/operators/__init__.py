"""The operator table: the one place that says which operators there are and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ...descriptor import DType
from ...machines.base import Body, Primitives
from . import elementwise as e


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator.

    Attributes:
        name: as in `rt.submit(name, ...)` and `rt.<name>`.
        op_id: its case in the switch; 0 is NOP.
        family: for people.
        inputs: how many arrays it reads.
        outputs: how many arrays it writes.
        dtypes: element types it takes; inputs and outputs share one.
        scalars: names of its f32 parameters, in the order in which they are packed.
        tile: elements above which a task is shared by several blocks, and about as many per tile; 0: never.
        formula: what one element, row or matrix becomes.
        make: factory of the body.
        spec: the same in NumPy; results equal it to `tolerance`.
        tolerance: relative, against `spec`; 0 means bit for bit (NaN equal to NaN).
    """

    name: str
    op_id: int
    family: str
    inputs: int
    outputs: int
    dtypes: tuple[DType, ...]
    scalars: tuple[str, ...]
    tile: int
    formula: str
    make: Callable[[Primitives], Body]
    spec: Callable[..., Any] | None
    tolerance: float = 0.0

    @property
    def symbol(self) -> str:
        """Name of the compiled body."""
        return f"gpuos_op_{self.op_id}_{self.name}"


_F32 = (DType.F32,)
_TILE = 32 * 1024  # a block moves this many f32 in a few µs, about what handing out a tile costs

_ALL: Final = (
    Operator("nop", 0, "control", 0, 0, _F32, (), 0, "nothing", e.make_nop, None),
    Operator("copy", 1, "element-wise", 1, 1, _F32, (), _TILE, "a", e.make_copy, e.spec_copy),
    Operator("fill", 2, "element-wise", 0, 1, _F32, ("value",), _TILE, "value", e.make_fill, e.spec_fill),
    Operator("add", 3, "element-wise", 2, 1, _F32, (), _TILE, "a + b", e.make_add, e.spec_add),
    Operator("sub", 4, "element-wise", 2, 1, _F32, (), _TILE, "a - b", e.make_sub, e.spec_sub),
    Operator("mul", 5, "element-wise", 2, 1, _F32, (), _TILE, "a * b", e.make_mul, e.spec_mul),
    Operator("div", 6, "element-wise", 2, 1, _F32, (), _TILE, "a / b", e.make_div, e.spec_div),
    Operator("relu", 7, "element-wise", 1, 1, _F32, (), _TILE, "max(a, 0)", e.make_relu, e.spec_relu),
)

TABLE: Final = MappingProxyType({operator.name: operator for operator in _ALL})
"""Operators by name."""
