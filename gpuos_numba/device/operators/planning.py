"""What plans of many families share: walking operands together, and how many tiles share the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from ...descriptor import ITEMSIZE, MAX_INPUTS
from ...machines.base import Body, Primitives
from ...shapes import aligned_strides, collapse
from .table import Kernel, Operand, Shared, Walk

TILE: Final = 32 * 1024
"""Elements of an element-wise tile: a block moves them in a few µs, about what handing out a tile costs."""


def tile_count(count: int, blocks: int) -> int:
    """How many tiles share `count` elements."""
    return min(-(-count // TILE), 4 * blocks) if count > TILE else 1


def walk(operand: Operand) -> Walk:
    """An operand walked as it is, dimension by dimension."""
    return Walk(operand.dtype, operand.shape, operand.strides)


def walk_flat(operand: Operand) -> Walk:
    """An operand walked in its own order, as flat as it allows."""
    shape, (steps,) = collapse(operand.shape, [operand.strides])
    return Walk(operand.dtype, shape, steps)


def walks_of(inputs: Sequence[Operand | None], output: Operand) -> tuple[Walk | None, ...] | None:
    """How inputs broadcast to the output are walked together, None where all is contiguous."""
    operands = [operand for operand in inputs if operand is not None and not operand.immediate]
    if output.contiguous and all(each.contiguous and each.shape == output.shape for each in operands):
        return None
    everyone = [*operands, output]
    shape, steps = collapse(output.shape, [aligned_strides(each, output.shape) for each in everyone])
    if len(shape) <= 1 and all(step in ((), (1,)) for step in steps):
        return None
    walked = iter([Walk(each.dtype, shape, step) for each, step in zip(everyone, steps, strict=True)])
    places = [None if each is None or each.immediate else next(walked) for each in inputs]
    return (*places, *[None] * (MAX_INPUTS - len(places)), next(walked))


def fits_vectors(operand: Operand) -> bool:
    """Whether rows of the last dim can be moved 16 bytes at a time wherever the first one can."""
    size = ITEMSIZE[operand.dtype]
    *outer, last = zip(operand.shape, operand.strides, strict=True)
    if last[0] > 1 and last[1] != 1:
        return False
    return all(extent <= 1 or stride * size % 16 == 0 for extent, stride in outer)


STRIDED_IDS: Final = 8
"""From the kernel for contiguous operands to that for any others."""


def both_ways(
    op_id: int, name: str, make: Callable[[Primitives, bool], Body], symbol: str = ""
) -> tuple[Kernel, Kernel]:
    """The kernels of an operator: for contiguous operands, and for any. symbol: where others share them."""
    kernels = []
    for strided in (False, True):
        way = _way(make, strided)
        shared = Shared(f"{symbol}_strided" if strided else symbol, way) if symbol else None
        suffix = ".strided" if strided else ""
        kernels.append(Kernel(op_id + STRIDED_IDS * strided, f"{name}{suffix}", way, shared))
    return kernels[0], kernels[1]


@cache
def _way(make: Callable[[Primitives, bool], Body], strided: bool) -> Callable[[Primitives], Body]:
    """Remembered: a machine compiles a factory once, by its identity."""

    def way(m: Primitives) -> Body:
        return make(m, strided)

    return way
