"""Movement: elements arrive in one order and leave in another, as they are, whatever their dtype.

A unit is what a thread moves at once: 16 bytes where rows of neighbours allow it, else one element. What an
index selects may be anything; one outside of its dim fails the task, and touches no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...descriptor import ITEMSIZE, MASK_64, DType, Status, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ...shapes import Shape, Strides, collapse
from ..elements import make_itemsize, make_load_f32, make_load_i64, make_tile_range
from ..moves import make_move4
from ..operands import OUTPUT, make_access, make_address_of, make_kind_of
from .axes import read_axes
from .planning import STRIDED_IDS, TILE, both_ways, fits_vectors, tile_count, walk_flat
from .table import (
    FLOATS,
    INDICES,
    INTS,
    MOVEMENT_IDS,
    Draw,
    Example,
    Infer,
    Operand,
    Operator,
    Parameter,
    Plan,
    Planner,
    Result,
    Walk,
    infer_nothing,
    pack,
    refuse_dtype,
)

Array = Any
CONCAT_ID: Final = MOVEMENT_IDS
SLICE_ID, SELECT_ID, GATHER_ID, SCATTER_ADD_ID = (MOVEMENT_IDS + n for n in (1, 2, 3, 4))
ANY: Final = (*FLOATS, *INTS)
VECTORS: Final = 1 << 56
"""In a scalar beside a length: units may be 16 bytes."""
INDEXED: Final = 1 << 57
LENGTH_MASK: Final = VECTORS - 1


def make_pick(m: Primitives, strided: bool) -> Body:
    """The body of slice_copy, index_select and gather: out[e] = x[start(e) + index(e) * step].

    Rows are `run` elements of the output that share an index and are neighbours in x as well. Unless
    strided, all rows of an indexed x start at its beginning.
    """
    u64 = m.u64
    thread_index, block_width, divide = m.thread_index, m.block_width, m.divide
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    address_of, kind_of, (element_of, _) = make_address_of(m), make_kind_of(m), make_access(m, strided)
    itemsize, tile_range = make_itemsize(m), make_tile_range(m)
    load_i64, move4 = make_load_i64(m), make_move4(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    X, INDEX, OUT = u64(0), u64(1), u64(OUTPUT)
    ZERO, ONE, FOUR, EIGHT, FIFTEEN, SIXTEEN = (u64(n) for n in (0, 1, 4, 8, 15, 16))
    FITS, IS_INDEXED, LENGTH = u64(VECTORS), u64(INDEXED), u64(LENGTH_MASK)
    OK, OUT_OF_RANGE = np.int32(Status.OK), np.int32(Status.INDEX_OUT_OF_RANGE)

    def source(context: Any, task: Any, unit: Any, per_row: Any, lanes: Any, extent: Any, step: Any) -> Any:
        """Where a unit comes from, 0 where its index is out of range."""
        run = load_task_u64(task + SCALARS + SIXTEEN)
        size = itemsize(kind_of(task, X))
        row = unit
        inside = ZERO
        if per_row > ONE:
            row = divide(unit, per_row)
            inside = (unit - row * per_row) * lanes
        element = row * (run & LENGTH) + inside
        if run & IS_INDEXED == ZERO:
            return element_of(context, task, X, element) + extent
        if strided:
            row = element
        index = u64(load_i64(kind_of(task, INDEX), element_of(context, task, INDEX, row)))
        if index >= extent:
            return ZERO
        start = address_of(task, X) + inside * size
        if strided:
            start = element_of(context, task, X, element)
        return start + index * step

    source = m.device(source)

    def pick(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        extent = load_task_u64(task + SCALARS)  # of the dim that is indexed; of a slice: bytes before it
        step = load_task_u64(task + SCALARS + EIGHT)
        packed = load_task_u64(task + SCALARS + SIXTEEN)
        run = packed & LENGTH
        size = itemsize(kind_of(task, X))
        first = address_of(task, X) | address_of(task, OUT)
        if packed & IS_INDEXED == ZERO:
            first |= extent
        vector = packed & FITS != ZERO and first & FIFTEEN == ZERO
        lanes = ONE
        if vector:
            lanes = divide(SIXTEEN, size)
        per_row = divide(run, lanes)
        units = load_task_u64(task + COUNT) * per_row
        begin, end = tile_range(units, load_task_u32(task + TILES), tile)
        width = block_width()
        unit = begin + thread_index()
        status = OK
        while unit < end:
            unit_b = unit + width
            unit_c = unit_b + width
            unit_d = unit_c + width
            a = source(context, task, unit, per_row, lanes, extent, step)
            b = ZERO
            c = ZERO
            d = ZERO
            if unit_b < end:
                b = source(context, task, unit_b, per_row, lanes, extent, step)
                if b == ZERO:
                    status = OUT_OF_RANGE
            if unit_c < end:
                c = source(context, task, unit_c, per_row, lanes, extent, step)
                if c == ZERO:
                    status = OUT_OF_RANGE
            if unit_d < end:
                d = source(context, task, unit_d, per_row, lanes, extent, step)
                if d == ZERO:
                    status = OUT_OF_RANGE
            if a == ZERO:
                status = OUT_OF_RANGE
            move4(
                vector,
                size,
                a,
                b,
                c,
                d,
                element_of(context, task, OUT, unit * lanes),
                element_of(context, task, OUT, unit_b * lanes),
                element_of(context, task, OUT, unit_c * lanes),
                element_of(context, task, OUT, unit_d * lanes),
            )
            unit += FOUR * width
        return status

    return pick


def make_concat(m: Primitives, strided: bool) -> Body:
    """A row of the output is a row of each input after the other; rows begin at the dim that is joined."""
    u64 = m.u64
    thread_index, block_width, divide = m.thread_index, m.block_width, m.divide
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    address_of, kind_of, (element_of, _) = make_address_of(m), make_kind_of(m), make_access(m, strided)
    itemsize, tile_range, move4 = make_itemsize(m), make_tile_range(m), make_move4(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    OUT, INPUTS = u64(OUTPUT), u64(4)
    ZERO, ONE, FOUR, FIFTEEN = (u64(n) for n in (0, 1, 4, 15))
    SIXTEEN, TWENTY = u64(16), u64(20)
    OK = np.int32(0)

    def target(context: Any, task: Any, unit: Any, per_row: Any, lanes: Any, start: Any, length: Any) -> Any:
        row = divide(unit, per_row)
        element = row * length + start + (unit - row * per_row) * lanes
        return element_of(context, task, OUT, element)

    target = m.device(target)

    def concat(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        rows = load_task_u64(task + COUNT)
        tiles = load_task_u32(task + TILES)
        inner = load_task_u32(task + SCALARS)
        size = itemsize(kind_of(task, OUT))
        length = ZERO
        bases = address_of(task, OUT)
        place = ZERO
        while place < INPUTS:
            length += load_task_u32(task + SCALARS + FOUR + place * FOUR) * inner
            bases |= address_of(task, place)
            place += ONE
        vector = load_task_u32(task + SCALARS + TWENTY) != ZERO and bases & FIFTEEN == ZERO
        lanes = ONE
        if vector:
            lanes = divide(SIXTEEN, size)
        width = block_width()
        start = ZERO
        place = ZERO
        while place < INPUTS:
            part = load_task_u32(task + SCALARS + FOUR + place * FOUR) * inner
            per_row = divide(part, lanes)
            begin, end = tile_range(rows * per_row, tiles, tile)
            unit = begin + thread_index()
            while unit < end:
                unit_b = unit + width
                unit_c = unit_b + width
                unit_d = unit_c + width
                a = element_of(context, task, place, unit * lanes)
                b = ZERO
                c = ZERO
                d = ZERO
                if unit_b < end:
                    b = element_of(context, task, place, unit_b * lanes)
                if unit_c < end:
                    c = element_of(context, task, place, unit_c * lanes)
                if unit_d < end:
                    d = element_of(context, task, place, unit_d * lanes)
                move4(
                    vector,
                    size,
                    a,
                    b,
                    c,
                    d,
                    target(context, task, unit, per_row, lanes, start, length),
                    target(context, task, unit_b, per_row, lanes, start, length),
                    target(context, task, unit_c, per_row, lanes, start, length),
                    target(context, task, unit_d, per_row, lanes, start, length),
                )
                unit += FOUR * width
            start += part
            place += ONE
        return OK

    return concat


def make_scatter_add(m: Primitives, strided: bool) -> Body:
    """out[start(e) + index(e) * step] += source[e], atomically. Of elements narrower than a word the word is
    swapped; a neighbour in it is written as it was found."""
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    load_word, compare_and_swap_word = m.load_word, m.compare_and_swap_word
    atomic_add_f32, atomic_add_gpu = m.atomic_add_f32, m.atomic_add_gpu
    f16_to_f32, bf16_to_f32, f32_to_f16, f32_to_bf16 = (
        m.f16_to_f32,
        m.bf16_to_f32,
        m.f32_to_f16,
        m.f32_to_bf16,
    )
    address_of, kind_of, (element_of, _) = make_address_of(m), make_kind_of(m), make_access(m, strided)
    tile_range = make_tile_range(m)
    itemsize, load_i64, load_element_f32 = make_itemsize(m), make_load_i64(m), make_load_f32(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    INDEX, SOURCE, OUT = u64(0), u64(1), u64(OUTPUT)
    THREE, EIGHT, WORD, ONES = u64(3), u64(8), u64(32), u64(0xFFFFFFFF)
    F32, F16, BF16, I64, BOOL = (u64(k) for k in (DType.F32, DType.F16, DType.BF16, DType.I64, DType.BOOL))
    OK, OUT_OF_RANGE = np.int32(Status.OK), np.int32(Status.INDEX_OUT_OF_RANGE)

    def add_lane(kind: Any, old: Any, source: Any) -> Any:
        """What a lane becomes; bits above it are of no meaning."""
        if kind == F16:
            return f32_to_f16(f16_to_f32(old) + load_element_f32(kind, source))
        if kind == BF16:
            return f32_to_bf16(bf16_to_f32(old) + load_element_f32(kind, source))
        if kind == BOOL:
            return old | u64(load_i64(kind, source))
        return old + u64(load_i64(kind, source))

    add_lane = m.device(add_lane)

    def scatter_add(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        extent = load_task_u64(task + SCALARS)
        step = load_task_u64(task + SCALARS + EIGHT)
        kind = kind_of(task, OUT)
        size = itemsize(kind)
        begin, end = tile_range(load_task_u64(task + COUNT), load_task_u32(task + TILES), tile)
        element = begin + thread_index()
        status = OK
        while element < end:
            index = u64(load_i64(kind_of(task, INDEX), element_of(context, task, INDEX, element)))
            if index < extent:
                source = element_of(context, task, SOURCE, element)
                target = address_of(task, OUT) + index * step
                if strided:
                    target = element_of(context, task, OUT, element) + index * step
                if kind == F32:
                    atomic_add_f32(target, load_element_f32(kind, source))
                elif kind == I64:
                    atomic_add_gpu(target, u64(load_i64(kind, source)))
                else:
                    word = target & ~THREE
                    shift = (target & THREE) << THREE
                    lane = (ONES >> (WORD - (size << THREE))) << shift
                    old = load_word(word)
                    while True:
                        new = add_lane(kind, old >> shift, source) << shift
                        seen = compare_and_swap_word(word, old, (old & ~lane) | (new & lane))
                        if seen == old:
                            break
                        old = seen
            else:
                status = OUT_OF_RANGE
            element += block_width()
        return status

    return scatter_add


# --- plans ---

_PICK: Final = "gpuos_pick"
SELECT: Final = both_ways(SELECT_ID, "index_select", make_pick, _PICK)


def read_dim(operator: str, dim: int, shape: Shape) -> tuple[int, int]:
    """A dim counted from the front, and its extent; that of a number is 1."""
    (axis,) = read_axes(operator, (dim,), len(shape)) or (0,)
    return axis, shape[axis] if shape else 1


def refuse_other(operator: str, name: str, dtype: DType, wanted: Sequence[DType]) -> None:
    """Raise where a dtype is not among those wanted."""
    if dtype not in wanted:
        raise refuse_dtype(operator, name, dtype, wanted)


def plan_pick(
    op_id: int,
    blocks: int,
    x: Operand,
    starts: Strides,
    index: tuple[Operand, Strides] | None,
    out: Operand,
    first: int,
    step: int,
) -> Plan:
    """A plan of `make_pick`.

    Args:
        starts: strides by which an element of x is reached from one of out.
        index: how it is reached from one of out.
        first: extent of the dim that is indexed; without an index, elements of x before the first.
        step: elements between neighbours of that dim.
    """
    if not out.elements:
        return Plan(op_id, 0)
    every = [starts, out.strides, *([index[1]] if index else [])]
    shape, (into, onto, *rest) = collapse(out.shape, every)
    of = rest[0] if rest else (0,) * len(shape)
    run = shape[-1] if shape and into[-1] == onto[-1] == 1 and of[-1] == 0 else 1
    lead = len(shape) - 1 if run > 1 else len(shape)
    flat = lead == 0 or (lead == 1 and onto[0] == run and (into[0], of[0]) == ((0, 1) if index else (run, 0)))
    size = ITEMSIZE[x.dtype]
    far = [run, step if index else 0, *into[:lead], *onto[:lead]]
    flags = (INDEXED if index else 0) | (VECTORS if all(each * size % 16 == 0 for each in far) else 0)
    walks = None
    if not flat:
        of_index = Walk(index[0].dtype, shape, of) if index else None
        walks = (Walk(x.dtype, shape, into), of_index, None, None, Walk(out.dtype, shape, onto))
    scalars = pack("QQQ", first if index else first * size & MASK_64, step * size & MASK_64, run | flags)
    return Plan(
        op_id + (STRIDED_IDS if walks else 0),
        out.elements // run,
        tile_count(out.elements, blocks),
        walks,
        scalars,
    )


def infer_concat(inputs: Sequence[Operand], /, dim: int) -> tuple[Result, ...]:
    first = inputs[0]
    refuse_other("concat", "inputs[0]", first.dtype, ANY)
    if not first.shape:
        raise ArgumentError("concat: inputs[0] has no dims: reshape numbers to (1,)")
    axis, _ = read_dim("concat", dim, first.shape)
    total = 0
    for place, each in enumerate(inputs):
        if each is None:
            raise ArgumentError(f"concat: inputs[{place}] is None: leave it out")
        refuse_other("concat", f"inputs[{place}]", each.dtype, (first.dtype,))
        others = [
            tuple(side for d, side in enumerate(shape) if d != axis) for shape in (each.shape, first.shape)
        ]
        if len(each.shape) != len(first.shape) or others[0] != others[1]:
            raise ArgumentError(
                f"concat: inputs[{place}] has shape {each.shape}, inputs[0] {first.shape}: "
                f"they may differ in dim {axis} alone"
            )
        total += each.shape[axis]
    return (Result((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype),)


def plan_concat(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, dim: int) -> Plan:
    out = outputs[0]
    axis, _ = read_dim("concat", dim, out.shape)
    inner = math.prod(out.shape[axis + 1 :])
    extents = [each.shape[axis] for each in inputs]
    if max(inner, *extents) >= 1 << 32:
        raise ArgumentError(f"concat: {out.shape} along dim {axis}: sides of 2^32 and more are not joined")
    everyone = [*inputs, out]
    size = ITEMSIZE[out.dtype]
    whole = all(each.contiguous for each in everyone)
    fits = all(
        (extents[place] * inner if whole else each.shape[-1]) * size % 16 == 0
        and (whole or fits_vectors(each))
        for place, each in enumerate(inputs)
    ) and (whole or fits_vectors(out))
    walks = None
    if not whole:
        ways = [walk_flat(each) for each in everyone]
        walks = (*ways[:-1], *[None] * (4 - len(inputs)), ways[-1])
    return Plan(
        CONCAT_ID + (STRIDED_IDS if walks else 0),
        math.prod(out.shape[:axis]) if out.elements else 0,
        tile_count(out.elements, blocks),
        walks,
        pack("6I", inner, *[*extents, 0, 0][:4], int(fits)),
    )


def _span(x: Operand, dim: int, start: int, stop: int | None, step: int) -> tuple[int, range]:
    refuse_other("slice_copy", "inputs[0]", x.dtype, ANY)
    if not x.shape:
        raise ArgumentError("slice_copy: inputs[0] has no dims to slice")
    if step < 1:
        raise ArgumentError(f"slice_copy: step={step}: it must be positive")
    axis, extent = read_dim("slice_copy", dim, x.shape)
    return axis, range(extent)[start:stop:step]


def infer_slice(
    inputs: Sequence[Operand], /, dim: int, start: int, stop: int | None, step: int
) -> tuple[Result, ...]:
    x = inputs[0]
    axis, span = _span(x, dim, start, stop, step)
    return (Result((*x.shape[:axis], len(span), *x.shape[axis + 1 :]), x.dtype),)


def plan_slice(
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    blocks: int,
    /,
    dim: int,
    start: int,
    stop: int | None,
    step: int,
) -> Plan:
    x = inputs[0]
    axis, span = _span(x, dim, start, stop, step)
    starts = tuple(stride * (step if d == axis else 1) for d, stride in enumerate(x.strides))
    first = (span.start * x.strides[axis]) if span else 0
    return plan_pick(SLICE_ID, blocks, x, starts, None, outputs[0], first, 0)


def _select(name: str, inputs: Sequence[Operand], dim: int) -> tuple[Operand, Operand, int]:
    x, index = inputs
    refuse_other(name, "inputs[0]", x.dtype, ANY)
    refuse_other(name, "inputs[1]", index.dtype, INDICES)
    if not x.shape:
        raise ArgumentError(f"{name}: inputs[0] has no dims to select from")
    return x, index, read_dim(name, dim, x.shape)[0]


def infer_select(name: str, flat: bool) -> Infer:
    """`infer` of a selection along dim. flat: the index has one dim, or none."""

    def infer(inputs: Sequence[Operand], /, dim: int = 0) -> tuple[Result, ...]:
        x, index, axis = _select(name, inputs, dim)
        if flat and len(index.shape) > 1:
            raise ArgumentError(
                f"{name}: inputs[1] has shape {index.shape}: an index has one dim, reshape it"
            )
        picked = (index.shape or (1,)) if flat else index.shape
        return (Result((*x.shape[:axis], *picked, *x.shape[axis + 1 :]), x.dtype),)

    return infer


def plan_select(name: str) -> Planner:
    """`plan` of a selection along dim."""

    def plan(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, dim: int = 0) -> Plan:
        x, index, axis = _select(name, inputs, dim)
        before, after = x.strides[:axis], x.strides[axis + 1 :]
        picked = len(outputs[0].shape) - len(before) - len(after)
        starts = (*before, *[0] * picked, *after)
        steps = (*[0] * len(before), *(index.strides or (0,) * picked), *[0] * len(after))
        ways = (index, steps)
        return plan_pick(SELECT_ID, blocks, x, starts, ways, outputs[0], x.shape[axis], x.strides[axis])

    return plan


def _within(name: str, what: str, index: Shape, shape: Shape, free: int | None) -> None:
    if len(index) != len(shape) or any(
        i > n for d, (i, n) in enumerate(zip(index, shape, strict=True)) if d != free
    ):
        but = "" if free is None else f", but in dim {free}"
        raise ArgumentError(f"{name}: the index has shape {index}, {what} {shape}: it must fit into it{but}")


def _gather(inputs: Sequence[Operand], dim: int) -> tuple[Operand, Operand, int, int]:
    x, index = inputs
    refuse_other("gather", "inputs[0]", x.dtype, ANY)
    refuse_other("gather", "inputs[1]", index.dtype, INDICES)
    axis, extent = read_dim("gather", dim, x.shape)
    _within("gather", "inputs[0]", index.shape, x.shape, axis)
    return x, index, axis, extent


def infer_gather(inputs: Sequence[Operand], /, dim: int) -> tuple[Result, ...]:
    x, index, _, _ = _gather(inputs, dim)
    return (Result(index.shape, x.dtype),)


def plan_gather(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, dim: int) -> Plan:
    x, index, axis, extent = _gather(inputs, dim)
    starts = tuple(0 if d == axis else stride for d, stride in enumerate(x.strides))
    step = x.strides[axis] if x.shape else 0
    return plan_pick(GATHER_ID, blocks, x, starts, (index, index.strides), outputs[0], extent, step)


def plan_scatter_add(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, dim: int) -> Plan:
    index, source = inputs
    out = outputs[0]
    refuse_other("scatter_add", "inputs[0]", index.dtype, INDICES)
    refuse_other("scatter_add", "out", out.dtype, ANY)
    refuse_other("scatter_add", "inputs[1]", source.dtype, (out.dtype,))
    axis, extent = read_dim("scatter_add", dim, out.shape)
    _within("scatter_add", "inputs[1]", index.shape, source.shape, None)
    _within("scatter_add", "out", index.shape, out.shape, axis)
    starts = tuple(0 if d == axis else stride for d, stride in enumerate(out.strides))
    shape, steps = collapse(index.shape, [index.strides, source.strides, starts])
    walks = None
    if shape and (len(shape) > 1 or steps != [(1,), (1,), (0,)]):
        index_way, source_way, out_way = (
            Walk(each.dtype, shape, way) for each, way in zip((index, source, out), steps, strict=True)
        )
        walks = (index_way, source_way, None, None, out_way)
    step = (out.strides[axis] if out.shape else 0) * ITEMSIZE[out.dtype]
    return Plan(
        SCATTER_ADD_ID + (STRIDED_IDS if walks else 0),
        index.elements,
        tile_count(index.elements, blocks),
        walks,
        pack("QQ", extent, step & MASK_64),
    )


# --- the truth ---


def spec_concat(*arrays: Array, dim: int = 0) -> Array:
    return np.concatenate(arrays, dim)


def spec_slice_copy(x: Array, *, dim: int, start: int, stop: int | None = None, step: int = 1) -> Array:
    return x[(*[slice(None)] * (dim % x.ndim), slice(start, stop, step))]


def spec_index_select(x: Array, index: Array, dim: int = 0) -> Array:
    return np.take(x, index.reshape(-1), dim)


def spec_embedding(weight: Array, index: Array) -> Array:
    return weight[index]


def spec_gather(x: Array, index: Array, *, dim: int) -> Array:
    if not x.ndim:
        return x.reshape(1)[index]
    places = list(np.indices(index.shape, sparse=True))
    places[dim] = index
    return x[tuple(places)]


def spec_scatter_add(index: Array, source: Array, *, out: Array, dim: int = 0) -> Array:
    if not out.ndim:
        return np.asarray(out + source)
    places = list(np.indices(index.shape, sparse=True))
    places[dim] = index
    result = out.astype(np.float64) if out.dtype.kind not in "iub" else out.copy()
    values = source[tuple(slice(side) for side in index.shape)].astype(result.dtype)
    (np.logical_or if out.dtype == np.bool_ else np.add).at(result, tuple(places), values)
    return result


def _indices(draw: Draw, shape: Shape, extent: int) -> Array:
    """Indices below an extent, of any layout."""
    drawn = draw.array(shape, draw.choice(INDICES), "small")
    return np.asarray(drawn % max(1, extent)).astype(drawn.dtype)


def _example_concat(draw: Draw) -> Example:
    shape, dtype = draw.shape(1), draw.choice(ANY)
    axis = draw.integer(0, len(shape) - 1)
    inputs = []
    for _ in range(draw.integer(2, 4)):
        extent = draw.choice([shape[axis], draw.integer(0, 9), 16])
        inputs.append(draw.array((*shape[:axis], extent, *shape[axis + 1 :]), dtype))
    return inputs, {"dim": axis - draw.choice([0, len(shape)])}


def _example_slice(draw: Draw) -> Example:
    shape = draw.shape(1)
    return [draw.array(shape, draw.choice(ANY))], {
        "dim": draw.integer(-len(shape), len(shape) - 1),
        "start": draw.integer(-12, 12),
        "stop": draw.choice([None, draw.integer(-12, 12)]),
        "step": draw.choice([1, 1, 2, 3, 10]),
    }


def _example_select(draw: Draw) -> Example:
    shape = draw.shape(1)
    axis = draw.integer(0, len(shape) - 1)
    index = _indices(draw, (draw.integer(0, 9) if shape[axis] else 0,), shape[axis])
    return [draw.array(shape, draw.choice(ANY)), index], {"dim": axis - draw.choice([0, len(shape)])}


def _example_embedding(draw: Draw) -> Example:
    weight = draw.array((draw.integer(1, 9), *draw.shape(0, 2)), draw.choice(ANY))
    return [weight, _indices(draw, draw.shape(0, 3), weight.shape[0])], {}


def _example_gather(draw: Draw) -> Example:
    shape = draw.shape()
    dim = draw.integer(-max(1, len(shape)), max(1, len(shape)) - 1)
    fitting = list(shape)
    if shape:
        fitting[dim] = draw.integer(0, 9) if shape[dim] else 0
    x = draw.array(shape, draw.choice(ANY))
    return [x, _indices(draw, tuple(fitting), shape[dim] if shape else 1)], {"dim": dim}


def _example_scatter_add(draw: Draw) -> Example:
    shape, dtype = draw.shape(), draw.choice(ANY)
    dim = draw.integer(-max(1, len(shape)), max(1, len(shape)) - 1)
    out = draw.array(shape, dtype, "small")
    out = out if out.flags.writeable else out.copy()
    fitting = list(shape)
    if shape:
        fitting[dim] = draw.integer(0, 9) if shape[dim] else 0
    index = _indices(draw, tuple(fitting), shape[dim] if shape else 1)
    return [index, draw.array(tuple(fitting), dtype, "small")], {"dim": dim, "out": out}


# --- the table ---

_DIM: Final = (Parameter("dim", "int", 0),)
_TILING: Final = f"above {TILE} elements"
_OUT_OF_RANGE: Final = "An index out of range, or negative, fails the task: what it selects is left out."

OPERATORS: Final = (
    Operator(
        "concat",
        "movement",
        (2, 4),
        1,
        ANY,
        "a, b and so on one after the other along dim",
        infer_concat,
        plan_concat,
        both_ways(CONCAT_ID, "concat", make_concat),
        spec_concat,
        parameters=_DIM,
        tiling=_TILING,
        source="torch.cat.",
        example=_example_concat,
    ),
    Operator(
        "slice_copy",
        "movement",
        (1, 1),
        1,
        ANY,
        "a[start:stop:step] along dim",
        infer_slice,
        plan_slice,
        both_ways(SLICE_ID, "slice_copy", make_pick, _PICK),
        spec_slice_copy,
        parameters=(
            Parameter("dim", "int"),
            Parameter("start", "int"),
            Parameter("stop", "int", None),
            Parameter("step", "int", 1),
        ),
        tiling=_TILING,
        source="Python's slices, of a positive step.",
        example=_example_slice,
    ),
    Operator(
        "index_select",
        "movement",
        (2, 2),
        1,
        ANY,
        "a[..., index, ...] along dim",
        infer_select("index_select", True),
        plan_select("index_select"),
        SELECT,
        spec_index_select,
        parameters=_DIM,
        tiling=_TILING,
        source=f"torch.index_select. {_OUT_OF_RANGE}",
        example=_example_select,
    ),
    Operator(
        "embedding",
        "movement",
        (2, 2),
        1,
        ANY,
        "a[index]: a row for each index",
        infer_select("embedding", False),
        plan_select("embedding"),
        SELECT,
        spec_embedding,
        tiling=_TILING,
        source=f"torch.nn.functional.embedding. {_OUT_OF_RANGE}",
        example=_example_embedding,
    ),
    Operator(
        "gather",
        "movement",
        (2, 2),
        1,
        ANY,
        "a at the place of each index, which counts along dim",
        infer_gather,
        plan_gather,
        both_ways(GATHER_ID, "gather", make_pick, _PICK),
        spec_gather,
        parameters=(Parameter("dim", "int"),),
        tiling=_TILING,
        source=f"torch.gather. {_OUT_OF_RANGE}",
        example=_example_gather,
    ),
    Operator(
        "scatter_add",
        "movement",
        (2, 2),
        1,
        ANY,
        "out at the place of each index, which counts along dim, += source",
        infer_nothing,
        plan_scatter_add,
        both_ways(SCATTER_ADD_ID, "scatter_add", make_scatter_add),
        spec_scatter_add,
        parameters=_DIM,
        updates=True,
        tiling=f"above {TILE} indices",
        cost="One atomic a source element. float16 and bfloat16 round at each addition; the order is any.",
        source=f"torch.Tensor.scatter_add_. Inputs: index, source. {_OUT_OF_RANGE}",
        example=_example_scatter_add,
    ),
)
