"""Which dtype a result has: PyTorch's promotion, from https://pytorch.org/docs/stable/tensor_attributes.html.

Arrays with dims decide first, 0-d arrays next, Python numbers last: the later only raise the category, from
bool to integer to float.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...descriptor import DTYPE_NAMES, DType
from ...errors import DTypeError
from .table import FLOATS, Operand, read_dtype

_WIDTH = {DType.BOOL: 0, DType.U8: 1, DType.I8: 1, DType.I32: 2, DType.I64: 3}


def category(dtype: DType) -> int:
    """0 for bool, 1 for integers, 2 for floats."""
    return 0 if dtype is DType.BOOL else 2 if dtype in FLOATS else 1


def promote_pair(a: DType, b: DType, int16: DType | None = None) -> DType:
    """The dtype that holds both; `int16` is given for the one that gpuos has not, or it raises DTypeError."""
    if a is b:
        return a
    if category(a) != category(b):
        return a if category(a) > category(b) else b
    if a in FLOATS:
        return DType.F32
    if _WIDTH[a] != _WIDTH[b]:
        return a if _WIDTH[a] > _WIDTH[b] else b
    if int16 is not None:
        return int16
    raise DTypeError(
        f"{DTYPE_NAMES[a]} and {DTYPE_NAMES[b]} together are int16, which gpuos has not: cast one of them"
    )


def promote(operands: Sequence[Operand], int16: DType | None = None) -> DType:
    """The common dtype of a call's operands. Raises DTypeError where there is none, see `promote_pair`."""
    groups: list[DType | None] = [None, None, None]  # arrays with dims, 0-d arrays, numbers
    for operand in operands:
        rank = 2 if operand.immediate else 0 if operand.shape else 1
        held = groups[rank]
        groups[rank] = operand.dtype if held is None else promote_pair(held, operand.dtype, int16)
    result = groups[0]
    for lower in groups[1:]:
        if lower is not None and (result is None or category(lower) > category(result)):
            result = lower if result is None else promote_pair(result, lower, int16)
    assert result is not None, "a call without operands"
    return result


def operand_of(value: Any) -> Operand:
    """What planning sees of a NumPy array or a Python number; strides apart, which promotion ignores."""
    if isinstance(value, np.ndarray | np.generic):
        return Operand(read_dtype(value.dtype.name), value.shape, (), True)
    return Operand(number_dtype(value), (), (), True, True)


def number_dtype(value: bool | int | float) -> DType:
    """bool, int64 or float32: what PyTorch calls the default dtypes."""
    return DType.BOOL if isinstance(value, bool) else DType.I64 if isinstance(value, int) else DType.F32
