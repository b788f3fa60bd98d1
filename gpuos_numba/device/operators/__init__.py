"""The operator table: which operators there are. Each family is a module of its own."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ...descriptor import DType
from ...machines.base import Body, Primitives
from . import attention, cache, elementwise, interpreter, mask, matrix, movement, norm, reduce, rope, softmax
from .planning import TILE
from .table import CONTROL_IDS, Kernel, Plan
from .table import Operator as Operator


def make_nop(m: Primitives) -> Body:
    """Does nothing: for measuring, and for ordering."""
    OK = np.int32(0)

    def nop(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        return OK

    return nop


_NOP: Final = Kernel(CONTROL_IDS, "nop", make_nop)

_CONTROL: Final = (
    Operator(
        "nop",
        "control",
        (0, 0),
        0,
        (DType.F32,),
        "nothing: for measuring, and for ordering",
        infer=lambda inputs: (),
        plan=lambda inputs, outputs, blocks: Plan(_NOP.op_id, 0),
        kernels=(_NOP,),
        spec=None,
    ),
)

FAMILIES: Final = (
    _CONTROL,
    elementwise.OPERATORS,
    reduce.OPERATORS,
    softmax.OPERATORS,
    norm.OPERATORS,
    rope.OPERATORS,
    mask.OPERATORS,
    movement.OPERATORS,
    cache.OPERATORS,
    matrix.OPERATORS,
    attention.OPERATORS,
    interpreter.OPERATORS,
)

TABLE: Final = MappingProxyType({operator.name: operator for family in FAMILIES for operator in family})
"""Operators by name."""

KERNELS: Final = MappingProxyType(
    {kernel.op_id: kernel for operator in TABLE.values() for kernel in operator.kernels}
)
"""Cases of the switch by op_id."""

PLAIN_LIMIT: Final = TILE
"""Elements up to which an element-wise task is never tiled."""

assert len(TABLE) == sum(map(len, FAMILIES)), "two operators of one name"
for _operator in TABLE.values():
    for _kernel in _operator.kernels:
        assert KERNELS[_kernel.op_id] == _kernel, f"two kernels of id {_kernel.op_id}"
