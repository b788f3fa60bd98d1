"""Which kernel computes a product, in how many tiles, over which pieces of k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from ...descriptor import MAX_DIMS, MAX_INPUTS, DType
from ...errors import ArgumentError
from ...shapes import Shape, Strides, collapse
from .matrix_parts import AT_ONCE, COLUMNS, ROWS, TILES
from .matrix_tiles import SIDE
from .table import (
    MATRIX_IDS,
    Plan,
    Walk,
    pack,
)

ALONE: Final = 16 * 1024
"""Elements of the matrix up to which one block does it all: a task of one tile can be part of a run."""

SHARE: Final = 16 * 1024
"""Least elements of the matrix that are worth a tile of their own."""

HAND_OUT: Final = 48 * 1024
"""Bytes that a block reads in the time that it takes to hand it a tile, about 1.5 µs."""

PIECE: Final = 256
"""Least k of a piece."""

MERGED: Final = 32 * 1024
"""Most partial sums that one block adds up in the end."""

LINE: Final = 128
"""Bytes of a row of the matrix that neighbouring threads of COLUMNS read together: a line of L2."""

SECTORS: Final = 64
"""The same where lines are too few to share evenly: half of one, which spares splitting k."""

EXTENT: Final = 1 << 32


class Side(NamedTuple):
    """An operand's strides: over the batch, over its two dims."""

    batch: Strides
    first: int
    second: int


class Product(NamedTuple):
    """left[rows, k] @ right[k, cols] for each of a batch.

    Attributes:
        batch: its extents, collapsed, without those that became rows or columns.
        left, right, out, bias: how each is walked; bias is None where there is none.
    """

    batch: Shape
    rows: int
    k: int
    cols: int
    left: Side
    right: Side
    out: Side
    bias: Side | None


def _fold(side: Side | None, dim: int, extent: int, second: bool) -> Side | None:
    """An operand with a batch dim as part of its rows, or columns where `second`; None where it cannot be."""
    if side is None:
        return None
    step = side.second if second else side.first
    if extent == 1:
        step = side.batch[dim]
    elif side.batch[dim] != step * extent:
        return None
    batch = side.batch[:dim] + side.batch[dim + 1 :]
    return Side(batch, side.first, step) if second else Side(batch, step, side.second)


def fold_batch(product: Product) -> Product:
    """The same product with the batch dims that only one side has as its rows or columns."""
    for dim in reversed(range(len(product.batch))):
        for second in (False, True):
            extent = product.cols if second else product.rows
            shared, own = (product.left, product.right) if second else (product.right, product.left)
            if shared.batch[dim] != 0 or extent * product.batch[dim] >= EXTENT:
                continue
            own_folded, out = (_fold(each, dim, extent, second) for each in (own, product.out))
            bias = _fold(product.bias, dim, extent, second)
            if own_folded is None or out is None or (bias is None) != (product.bias is None):
                continue
            shared = shared._replace(batch=shared.batch[:dim] + shared.batch[dim + 1 :])
            product = Product(
                product.batch[:dim] + product.batch[dim + 1 :],
                product.rows if second else product.rows * product.batch[dim],
                product.k,
                product.cols * product.batch[dim] if second else product.cols,
                shared if second else own_folded,
                own_folded if second else shared,
                out,
                bias,
            )
            break
    return product


def transpose(product: Product) -> Product:
    """The same product with rows as columns."""

    def turn(side: Side) -> Side:
        return Side(side.batch, side.second, side.first)

    return Product(
        product.batch,
        product.cols,
        product.k,
        product.rows,
        turn(product.right),
        turn(product.left),
        turn(product.out),
        None if product.bias is None else turn(product.bias),
    )


def _is_plain(shape: Shape, strides: Strides) -> bool:
    """Whether a walk is row-major without gaps."""
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def _walks(
    name: str, dtype: DType, operands: Sequence[tuple[Shape, Strides] | None]
) -> tuple[Walk | None, ...] | None:
    """Walks of a, b, bias and the output, in this order; None where all are row-major."""
    if all(each is None or _is_plain(*each) for each in operands):
        return None
    walks: list[Walk | None] = []
    for each in operands:
        if each is None:
            walks.append(None)
            continue
        shape, strides = each
        if len(shape) > MAX_DIMS:
            raise ArgumentError(
                f"{name}: batches of strides that make {len(shape)} dims: copy the inputs to contiguous ones"
            )
        walks.append(Walk(dtype, shape, strides))
    return (*walks[:-1], *[None] * (MAX_INPUTS + 1 - len(walks)), walks[-1])


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def share_tiles(elements: int, blocks: int) -> int:
    """How many tiles a matrix of so many elements is worth, at most one a block."""
    return 1 if elements <= ALONE else max(1, min(blocks, elements // SHARE))


def share_units(units: int, unit_bytes: int, blocks: int) -> int:
    """How many tiles share so many units of work on all blocks: few, but so that all blocks end together."""

    def duration(mine: int) -> int:
        return math.ceil(math.ceil(units / mine) / blocks) * (mine * unit_bytes + HAND_OUT)

    most = -(-units // min(units, blocks))
    mine = min(range(-(-units // (4 * blocks)), most + 1), key=duration)
    return -(-units // mine)


def share_k(wanted: int, units: int, k: int, rows: int) -> int:
    """Pieces of k, where `units` groups of rows are too few for `wanted` tiles."""
    if 2 * units > wanted:
        return 1
    return max(1, min(wanted // units, k // PIECE, MERGED // max(1, rows)))


def _plan_vector(name: str, dtype: DType, product: Product, swapped: bool, blocks: int) -> Plan:
    """A product with one column, by ROWS or COLUMNS. `swapped`: the matrix is b."""
    batch, rows, k, left, right = product.batch, product.rows, product.k, product.left, product.right
    batches = math.prod(batch)
    row_step, step = abs(left.first) if rows > 1 else 0, abs(left.second) if k > 1 else 0
    by_rows = rows == 1 or step == 1 or (row_step != 1 and step <= row_step)
    size = 4 if dtype is DType.F32 else 2
    per_chunk = 16 // size
    wanted = share_tiles(batches * rows * k, blocks)
    if by_rows:
        groups = batches * -(-rows // AT_ONCE)
        # A thread takes four chunks of a row at a time. More than a warp a row only where rows are few.
        team = min(_power_of_two(-(-k // (4 * per_chunk))), 256)
        team = min(team, max(32, _power_of_two(256 * wanted // groups)))
        units = -(-groups // max(1, 256 // team))
        kernel, width = ROWS, team
        matrix = (*batch, rows, max(k, 1)), (*left.batch, left.first, left.second)
    else:
        kernel, width = COLUMNS, 32
        if row_step == 1:
            line = LINE
            if batches * -(-rows * size // LINE) < 4 * wanted:
                line = SECTORS
            width = min(_power_of_two(-(-rows // per_chunk)), line // 16)
        units = batches * -(-rows // (width * per_chunk))
        matrix = (*batch, max(k, 1), rows), (*left.batch, left.second, left.first)
    pieces = share_k(wanted, units, k, batches * rows)
    tiles = units
    if pieces == 1:
        tiles = min(wanted, units)
        if wanted == blocks < units:
            tiles = share_units(units, batches * rows * k * size // units, blocks)
    vector = (*batch, max(k, 1)), (*right.batch, right.first)
    operands = [
        *((vector, matrix) if swapped else (matrix, vector)),
        None if product.bias is None else ((*batch, rows), (*product.bias.batch, product.bias.first)),
        ((*batch, rows), (*product.out.batch, product.out.first)),
    ]
    return Plan(
        MATRIX_IDS + kernel,
        batches * rows,
        tiles * pieces,
        _walks(name, dtype, operands),
        pack("QIIII", k, rows, width.bit_length() - 1, pieces, int(swapped)),
        merge=pieces > 1,
        workspace=4 * batches * rows * pieces if pieces > 1 else 0,
    )


def _plan_tiles(name: str, dtype: DType, product: Product, blocks: int) -> Plan:
    batch, rows, k, cols = product.batch, product.rows, product.k, product.cols
    units = math.prod(batch) * -(-rows // SIDE) * -(-cols // SIDE)

    def walk(side: Side | None, first: int, second: int) -> tuple[Shape, Strides] | None:
        return None if side is None else ((*batch, first, second), (*side.batch, side.first, side.second))

    operands = [
        walk(product.left, rows, max(k, 1)),
        walk(product.right, max(k, 1), cols),
        walk(product.bias, rows, cols),
        walk(product.out, rows, cols),
    ]
    return Plan(
        MATRIX_IDS + TILES,
        math.prod(batch) * rows * cols,
        1 if units <= 2 else min(units, 4 * blocks),
        _walks(name, dtype, operands),
        pack("QIIII", k, rows, cols, 1, 0),
    )


def plan_product(
    name: str,
    dtype: DType,
    batch: Shape,
    extents: tuple[int, int, int],
    sides: Sequence[Side | None],
    blocks: int,
) -> Plan:
    """The plan of a product. sides: those of left, right, out and bias over the whole batch."""
    rows, k, cols = extents
    if 0 in batch or rows == 0 or cols == 0:
        return Plan(MATRIX_IDS + TILES, 0)
    flat, steps = collapse(batch, [each.batch for each in sides if each is not None])
    collapsed = iter(steps)
    left, right, out, bias = (
        None if each is None else each._replace(batch=next(collapsed)) for each in sides
    )
    assert left is not None and right is not None and out is not None
    product = fold_batch(Product(flat, rows, k, cols, left, right, out, bias))
    if product.cols == 1:
        return _plan_vector(name, dtype, product, False, blocks)
    if product.rows == 1:
        return _plan_vector(name, dtype, transpose(product), True, blocks)
    return _plan_tiles(name, dtype, product, blocks)
