"""Axes: an operand and the dims that are worked along arrive, rows to walk leave.

Whatever the axes, a kernel sees `rows` (the other dims, flattened) of `length` elements (the axes,
flattened). Its layouts hold the dims of the rows first, then those of the length, each collapsed as far as
all operands allow: element j of row r is element `r * length + j` of the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import ArgumentError
from ...shapes import Shape, Strides, collapse


class Rows(NamedTuple):
    """How operands are walked.

    Attributes:
        rows, length: so many rows of so many elements.
        row_shape, row_steps: the collapsed dims of the rows, and for each operand its strides over them.
        shape, steps: the same of the length.
    """

    rows: int
    length: int
    row_shape: Shape
    row_steps: tuple[Strides, ...]
    shape: Shape
    steps: tuple[Strides, ...]

    @property
    def linear(self) -> bool:
        """Whether each operand steps evenly along a row."""
        return len(self.shape) <= 1

    def contiguous(self, operand: int) -> bool:
        """Whether an operand's rows lie one after the other without gaps."""
        return (
            self.linear
            and len(self.row_shape) <= 1
            and self.steps[operand] in ((), (1,))
            and self.row_steps[operand] in ((), (self.length,))
        )


def read_axes(name: str, axes: tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
    """Axes as non-negative numbers in order; None and () are all. Raises ArgumentError."""
    if not axes:
        return tuple(range(ndim))
    limit = max(ndim, 1)  # a 0-d operand has one axis, as in PyTorch
    for axis in axes:
        if not -limit <= axis < limit:
            raise ArgumentError(
                f"{name}: dim={axis} of an input with {ndim} dims: choose from {-limit} to {limit - 1}"
            )
    found = sorted({axis % limit for axis in axes})
    if len(found) != len(axes):
        raise ArgumentError(f"{name}: dim={axes} names a dim twice: name each once")
    return tuple(found) if ndim else ()


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdim: bool) -> Shape:
    """The shape that is left when `axes` are reduced."""
    if keepdim:
        return tuple(1 if dim in axes else extent for dim, extent in enumerate(shape))
    return tuple(extent for dim, extent in enumerate(shape) if dim not in axes)


def arrange(shape: Shape, strides: Sequence[Strides], axes: tuple[int, ...], ordered: bool = True) -> Rows:
    """Rows of operands that all have `shape`, along `axes`.

    The dims of the rows are taken in the order of the first operand's memory. So are those of the length
    unless they are `ordered`: then j counts them in row-major order.
    """

    def gather(dims: list[int]) -> tuple[Shape, tuple[Strides, ...]]:
        extents, walks = collapse(
            tuple(shape[dim] for dim in dims), [tuple(steps[dim] for dim in dims) for steps in strides]
        )
        return extents, tuple(walks)

    def outermost(dim: int) -> float:
        return -abs(strides[0][dim]) or -math.inf  # a broadcast dim is never the innermost

    kept = [dim for dim in range(len(shape)) if dim not in axes and shape[dim] != 1]
    along = [dim for dim in axes if shape[dim] != 1]
    rows, length = math.prod(shape[dim] for dim in kept), math.prod(shape[dim] for dim in along)
    kept.sort(key=outermost)
    if not ordered:
        along.sort(key=outermost)
    return Rows(rows, length, *gather(kept), *gather(along))
