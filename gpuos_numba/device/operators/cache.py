"""Caches of keys and values: rows of new tokens arrive and are stored where a slot or a position says, or
rows that block tables name are brought together; and what goes with it.

A row is the elements that lie behind one token: all heads of a paged cache, one head of a contiguous one. An
index outside of its cache fails the task, and touches no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...descriptor import DTYPE_NAMES, ITEMSIZE, DType, Status, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ...shapes import aligned_strides
from ..chunks import make_chunk_count, make_fill8, make_load8, make_max8
from ..elements import (
    make_itemsize,
    make_load_i64,
    make_load_i64x8,
    make_store_f32,
    make_store_f32x8,
    make_store_i64x8,
    make_tile_range,
)
from ..moves import make_load_unit, make_store_unit
from ..operands import OUTPUT, make_access, make_address_of, make_kind_of
from ..reductions import AREA_BYTES, make_group_max, make_larger
from .movement import ANY, SELECT, infer_select, plan_select, refuse_other, spec_index_select
from .planning import STRIDED_IDS, TILE, both_ways, fits_vectors, tile_count, walk, walk_flat
from .table import (
    CACHE_IDS,
    FLOATS,
    INDICES,
    Draw,
    Example,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    Tolerance,
    infer_nothing,
    pack,
)

Array = Any
UPDATE_ID, APPEND_ID, GATHER_ID, PREFIX_ID, QUANTIZE_ID, DEQUANTIZE_ID = (CACHE_IDS + n for n in range(6))
VECTORS: Final = 1
WIDE: Final = 2
SKIP: Final = -1
"""A slot or position that stores nothing."""


def make_store_rows(m: Primitives, strided: bool) -> Body:
    """The body of kv_update and kv_append: a row of k and of v each to row `index` of their caches.

    The caches are [outer, extent] rows, and k and v [outer, queries] rows; a paged cache has outer = 1.
    """
    u64 = m.u64
    thread_index, block_width, divide = m.thread_index, m.block_width, m.divide
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    address_of, kind_of, (element_of, _) = make_address_of(m), make_kind_of(m), make_access(m, strided)
    itemsize, tile_range, load_i64 = make_itemsize(m), make_tile_range(m), make_load_i64(m)
    load_unit, store_unit = make_load_unit(m), make_store_unit(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    K, V, INDEX, K_CACHE, V_CACHE = u64(0), u64(1), u64(2), u64(OUTPUT), u64(OUTPUT + 1)
    ZERO, ONE, EIGHT, TWELVE, FIFTEEN, SIXTEEN, TWENTY = (u64(n) for n in (0, 1, 8, 12, 15, 16, 20))
    NOWHERE, SKIPPED = u64((1 << 64) - 1), np.int64(SKIP)
    OK, OUT_OF_RANGE = np.int32(Status.OK), np.int32(Status.INDEX_OUT_OF_RANGE)

    def find(context: Any, task: Any, unit: Any, per_row: Any, lanes: Any) -> Any:
        """(status, element of the caches at which a unit goes; NOWHERE where it is not stored)."""
        rows = load_task_u64(task + COUNT)
        extent = load_task_u64(task + SCALARS)
        queries = load_task_u32(task + SCALARS + TWELVE)
        row = ZERO
        inside = unit * lanes
        if rows > ONE:
            row = divide(unit, per_row)
            inside = (unit - row * per_row) * lanes
        outer = ZERO
        at = row
        if rows > queries:
            outer = divide(row, queries)
            batch = divide(outer, load_task_u32(task + SCALARS + SIXTEEN))
            at = batch * queries + (row - outer * queries)
        index = load_i64(kind_of(task, INDEX), element_of(context, task, INDEX, at))
        if u64(index) < extent:
            return OK, (outer * extent + u64(index)) * load_task_u32(task + SCALARS + EIGHT) + inside
        if index == SKIPPED:
            return OK, NOWHERE
        return OUT_OF_RANGE, NOWHERE

    find = m.device(find)

    def store_rows(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        size = itemsize(kind_of(task, K))
        bases = address_of(task, K) | address_of(task, V)
        bases |= address_of(task, K_CACHE) | address_of(task, V_CACHE)
        vector = load_task_u32(task + SCALARS + TWENTY) != ZERO and bases & FIFTEEN == ZERO
        lanes = ONE
        if vector:
            lanes = divide(SIXTEEN, size)
        per_row = divide(load_task_u32(task + SCALARS + EIGHT), lanes)
        begin, end = tile_range(load_task_u64(task + COUNT) * per_row, load_task_u32(task + TILES), tile)
        width = block_width()
        unit = begin + thread_index()
        status = OK
        while unit < end:
            other = unit + width
            if other >= end:
                other = unit
            # Where they go is still on its way while they come.
            k = load_unit(vector, size, element_of(context, task, K, unit * lanes))
            v = load_unit(vector, size, element_of(context, task, V, unit * lanes))
            more_k = load_unit(vector, size, element_of(context, task, K, other * lanes))
            more_v = load_unit(vector, size, element_of(context, task, V, other * lanes))
            problem, to = find(context, task, unit, per_row, lanes)
            more_problem, more_to = find(context, task, other, per_row, lanes)
            if to != NOWHERE:
                store_unit(vector, size, element_of(context, task, K_CACHE, to), k)
                store_unit(vector, size, element_of(context, task, V_CACHE, to), v)
            if more_to != NOWHERE and other != unit:
                store_unit(vector, size, element_of(context, task, K_CACHE, more_to), more_k)
                store_unit(vector, size, element_of(context, task, V_CACHE, more_to), more_v)
            if problem != OK or more_problem != OK:
                status = OUT_OF_RANGE
            unit += width + width
        return status

    return store_rows


def make_gather_blocks(m: Primitives, strided: bool) -> Body:
    u64 = m.u64
    thread_index, block_width, divide = m.thread_index, m.block_width, m.divide
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    address_of, kind_of, (element_of, _) = make_address_of(m), make_kind_of(m), make_access(m, strided)
    itemsize, tile_range, load_i64 = make_itemsize(m), make_tile_range(m), make_load_i64(m)
    load_unit, store_unit = make_load_unit(m), make_store_unit(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    CACHE, BLOCKS, LENGTHS, OUT = u64(0), u64(1), u64(2), u64(OUTPUT)
    ZERO, ONE, FOUR, EIGHT, TWELVE, FIFTEEN = (u64(n) for n in (0, 1, 4, 8, 12, 15))
    SIXTEEN, TWENTY = u64(16), u64(20)
    PADDING, MISSING = u64(0), u64(1)  # in place of an address
    OK, OUT_OF_RANGE = np.int32(Status.OK), np.int32(Status.INDEX_OUT_OF_RANGE)

    def find(context: Any, task: Any, unit: Any, per_row: Any, lanes: Any) -> Any:
        """Where a unit of the output comes from."""
        length = load_task_u32(task + SCALARS + EIGHT)
        block_size = load_task_u32(task + SCALARS + TWELVE)
        most = load_task_u32(task + SCALARS + SIXTEEN)
        row = divide(unit, per_row)
        inside = (unit - row * per_row) * lanes
        sequence = divide(row, length)
        token = row - sequence * length
        used = load_i64(kind_of(task, LENGTHS), element_of(context, task, LENGTHS, sequence))
        if np.int64(token) >= used:
            return PADDING
        block = divide(token, block_size)
        if block >= most:
            return MISSING
        at = element_of(context, task, BLOCKS, sequence * most + block)
        number = u64(load_i64(kind_of(task, BLOCKS), at))
        if number >= load_task_u32(task + SCALARS):
            return MISSING
        slot = number * block_size + (token - block * block_size)
        return element_of(context, task, CACHE, slot * load_task_u32(task + SCALARS + FOUR) + inside)

    find = m.device(find)

    def gather_blocks(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        size = itemsize(kind_of(task, CACHE))
        vector = load_task_u32(task + SCALARS + TWENTY) != ZERO
        vector = vector and (address_of(task, CACHE) | address_of(task, OUT)) & FIFTEEN == ZERO
        lanes = ONE
        if vector:
            lanes = divide(SIXTEEN, size)
        per_row = divide(load_task_u32(task + SCALARS + FOUR), lanes)
        begin, end = tile_range(load_task_u64(task + COUNT) * per_row, load_task_u32(task + TILES), tile)
        width = block_width()
        unit = begin + thread_index()
        status = OK
        while unit < end:
            other = unit + width
            if other >= end:
                other = unit
            a = find(context, task, unit, per_row, lanes)
            b = find(context, task, other, per_row, lanes)
            p = ZERO, ZERO
            q = ZERO, ZERO
            if a > MISSING:
                p = load_unit(vector, size, a)
            if b > MISSING:
                q = load_unit(vector, size, b)
            store_unit(vector, size, element_of(context, task, OUT, unit * lanes), p)
            if other != unit:
                store_unit(vector, size, element_of(context, task, OUT, other * lanes), q)
            if a == MISSING or b == MISSING:
                status = OUT_OF_RANGE
            unit += width + width
        return status

    return gather_blocks


def make_prefix_match(m: Primitives, strided: bool) -> Body:
    """A row at a time, for the whole block: threads stop behind the first difference that any has found."""
    u64 = m.u64
    thread_index, block_width, barrier = m.thread_index, m.block_width, m.barrier
    load_task_u64, load_task_u32, divide = m.load_task_u64, m.load_task_u32, m.divide
    load_u32, store_u32, shared_min_u32, store_long = m.load_u32, m.store_u32, m.shared_min_u32, m.store_long
    kind_of, (element_of, step_of) = make_kind_of(m), make_access(m, strided)
    load_i64 = make_load_i64(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    TOKENS, PREFIX, OUT = u64(0), u64(1), u64(OUTPUT)
    ZERO, ONE, EIGHT = u64(0), u64(1), u64(8)
    OK = np.int32(0)

    def prefix_match(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        rows = load_task_u64(task + COUNT)
        tiles = load_task_u32(task + TILES)
        length = load_task_u64(task + SCALARS)
        prefix_length = load_task_u64(task + SCALARS + EIGHT)
        shortest = length
        if prefix_length < length:
            shortest = prefix_length
        step = step_of(context, task, TOKENS, length)
        prefix_step = step_of(context, task, PREFIX, prefix_length)
        row = ZERO
        end = rows
        if tiles > ONE:
            mine = divide(rows + tiles - ONE, tiles)
            row = tile * mine
            end = row + mine
            if end > rows:
                end = rows
        thread = thread_index()
        width = block_width()
        while row < end:
            if thread == ZERO:
                store_u32(arena, shortest)
            barrier()
            tokens = ZERO
            prefix = ZERO
            if shortest > ZERO:  # a layout without elements has no addresses
                tokens = element_of(context, task, TOKENS, row * length)
                prefix = element_of(context, task, PREFIX, row * prefix_length)
            j = thread
            while j < load_u32(arena):
                other = j + width
                if other >= shortest:
                    other = j
                a = load_i64(kind_of(task, TOKENS), tokens + j * step)
                b = load_i64(kind_of(task, PREFIX), prefix + j * prefix_step)
                c = load_i64(kind_of(task, TOKENS), tokens + other * step)
                d = load_i64(kind_of(task, PREFIX), prefix + other * prefix_step)
                if a != b:
                    shared_min_u32(arena, j)
                    break
                if c != d:
                    shared_min_u32(arena, other)
                    break
                j += width + width
            barrier()
            if thread == ZERO:
                store_long(element_of(context, task, OUT, row), load_u32(arena))
            row += ONE
        return OK

    return prefix_match


def make_quantize(m: Primitives, strided: bool) -> Body:
    """A row a warp, or a row at a time for the block where few or long: its scale, then its codes."""
    u64, f32 = m.u64, m.f32
    thread_index, block_width, warp_width, divide = m.thread_index, m.block_width, m.warp_width, m.divide
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    store_f32, store_u8 = m.store_f32, m.store_u8
    round_even, fused_multiply_add = m.round_even, m.fused_multiply_add
    kind_of, (element_of, step_of) = make_kind_of(m), make_access(m, strided)
    itemsize, chunk_count, fill8, load8 = make_itemsize(m), make_chunk_count(m), make_fill8(m), make_load8(m)
    max8, group_max, store_i64x8 = make_max8(m), make_group_max(m), make_store_i64x8(m)
    larger = make_larger(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    X, CODES, SCALES = u64(0), u64(OUTPUT), u64(OUTPUT + 1)
    ZERO, ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN = (u64(n) for n in range(8))
    EIGHT, FIFTEEN, IS_WIDE, AREA, I8 = u64(8), u64(15), u64(WIDE), u64(AREA_BYTES), u64(DType.I8)
    NOTHING, UNIT, MOST, LEAST = f32(0), f32(1), f32(127), f32(-127)
    SMALL, LARGE, UP, DOWN = f32(2.0**-60), f32(2.0**60), f32(2.0**64), f32(2.0**-64)
    NO_CODE = np.int64(0)
    OK = np.int32(0)

    def magnitude(x: Any) -> Any:
        return -x if x < NOTHING else x

    magnitude = m.device(magnitude)

    def magnitude8(v: Any) -> Any:
        return (
            magnitude(v[0]),
            magnitude(v[1]),
            magnitude(v[2]),
            magnitude(v[3]),
            magnitude(v[4]),
            magnitude(v[5]),
            magnitude(v[6]),
            magnitude(v[7]),
        )

    magnitude8 = m.device(magnitude8)

    def balance(scale: Any) -> Any:
        """A power of two that takes the scale, and rows with it, to where reciprocals are exact enough."""
        if scale < SMALL:
            return UP
        if scale > LARGE:
            return DOWN
        return UNIT

    balance = m.device(balance)

    def code(x: Any, scale: Any, share: Any) -> Any:
        """x / scale, rounded to even. share is 1 / scale: two fused steps make of it the rounded quotient."""
        value = x * share
        value = round_even(fused_multiply_add(fused_multiply_add(-value, scale, x), share, value))
        if value != value:
            return NO_CODE
        # A scale that was rounded down, among the smallest numbers, may lead further out.
        if value > MOST:
            value = MOST
        if value < LEAST:
            value = LEAST
        return np.int64(value)

    code = m.device(code)

    def quantize(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        kind = kind_of(task, X)
        size = itemsize(kind)
        rows = load_task_u64(task + COUNT)
        tiles = load_task_u32(task + TILES)
        length = load_task_u64(task + SCALARS)
        wide = load_task_u32(task + SCALARS + EIGHT) & IS_WIDE != ZERO
        step = step_of(context, task, X, length)
        step_out = step_of(context, task, CODES, length)
        thread = thread_index()
        lanes = warp_width()
        part = thread
        parts = block_width()
        ahead = ONE
        if not wide:
            ahead = divide(parts, lanes)
            part = thread & (lanes - ONE)
            parts = lanes
        groups = divide(rows + ahead - ONE, ahead)
        mine = divide(groups + tiles - ONE, tiles) * ahead
        row = tile * mine
        end = row + mine
        if end > rows:
            end = rows
        if not wide:
            row += divide(thread, lanes)
        area = arena
        while row < end:
            base = ZERO
            target = ZERO
            if length > ZERO:  # a layout without elements has no addresses
                base = element_of(context, task, X, row * length)
                target = element_of(context, task, CODES, row * length)
            vector = step == size and step_out == ONE
            vector = vector and (base & FIFTEEN) | ((target | length) & SEVEN) == ZERO
            apart = parts
            start = part
            if vector:
                apart = ONE
                start = part * EIGHT
            leap = parts * EIGHT
            most = NOTHING
            j = start
            while j < length:
                count = chunk_count(j, length, apart)
                v = load8(vector, kind, base + j * step, apart * step, count)
                most = larger(most, max8(fill8(magnitude8(v), count, NOTHING)))
                j += leap
            scale = group_max(wide, most, area) / MOST
            factor = balance(scale)
            balanced = scale * factor
            share = NOTHING
            if scale != NOTHING:
                share = UNIT / balanced
            area = arena + (arena + AREA - area)  # the other one: see reductions
            j = start
            while j < length:
                count = chunk_count(j, length, apart)
                v = load8(vector, kind, base + j * step, apart * step, count)
                codes = (
                    code(v[0] * factor, balanced, share),
                    code(v[1] * factor, balanced, share),
                    code(v[2] * factor, balanced, share),
                    code(v[3] * factor, balanced, share),
                    code(v[4] * factor, balanced, share),
                    code(v[5] * factor, balanced, share),
                    code(v[6] * factor, balanced, share),
                    code(v[7] * factor, balanced, share),
                )
                at = target + j * step_out
                if vector:
                    store_i64x8(I8, at, codes)
                else:
                    move = apart * step_out
                    store_u8(at, u64(codes[0]))
                    if count > ONE:
                        store_u8(at + move, u64(codes[1]))
                    if count > TWO:
                        store_u8(at + TWO * move, u64(codes[2]))
                    if count > THREE:
                        store_u8(at + THREE * move, u64(codes[3]))
                    if count > FOUR:
                        store_u8(at + FOUR * move, u64(codes[4]))
                    if count > FIVE:
                        store_u8(at + FIVE * move, u64(codes[5]))
                    if count > SIX:
                        store_u8(at + SIX * move, u64(codes[6]))
                    if count > SEVEN:
                        store_u8(at + SEVEN * move, u64(codes[7]))
                j += leap
            if part == ZERO:
                store_f32(element_of(context, task, SCALES, row), scale)
            row += ahead
        return OK

    return quantize


def make_dequantize(m: Primitives, strided: bool) -> Body:
    u64, f32 = m.u64, m.f32
    thread_index, block_width, divide, load_f32 = m.thread_index, m.block_width, m.divide, m.load_f32
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    address_of, kind_of, (element_of, _) = make_address_of(m), make_kind_of(m), make_access(m, strided)
    tile_range = make_tile_range(m)
    load_i64, load_i64x8 = make_load_i64(m), make_load_i64x8(m)
    store_element, store_f32x8 = make_store_f32(m), make_store_f32x8(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    CODES, SCALES, OUT, I8 = u64(0), u64(1), u64(OUTPUT), u64(DType.I8)
    ZERO, ONE, SEVEN, EIGHT, FIFTEEN = (u64(n) for n in (0, 1, 7, 8, 15))
    OK = np.int32(0)

    def dequantize(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        kind = kind_of(task, OUT)
        length = load_task_u64(task + SCALARS)
        vector = not strided and (address_of(task, OUT) & FIFTEEN) | (length & SEVEN) == ZERO
        vector = vector and address_of(task, CODES) & SEVEN == ZERO
        lanes = ONE
        if vector:
            lanes = EIGHT
        per_row = divide(length, lanes)
        begin, end = tile_range(load_task_u64(task + COUNT) * per_row, load_task_u32(task + TILES), tile)
        unit = begin + thread_index()
        while unit < end:
            scale = load_f32(element_of(context, task, SCALES, divide(unit, per_row)))
            codes = element_of(context, task, CODES, unit * lanes)
            out = element_of(context, task, OUT, unit * lanes)
            if vector:
                v = load_i64x8(I8, codes)
                result = (
                    f32(v[0]) * scale,
                    f32(v[1]) * scale,
                    f32(v[2]) * scale,
                    f32(v[3]) * scale,
                    f32(v[4]) * scale,
                    f32(v[5]) * scale,
                    f32(v[6]) * scale,
                    f32(v[7]) * scale,
                )
                store_f32x8(kind, out, result)
            else:
                store_element(kind, out, f32(load_i64(I8, codes)) * scale)
            unit += block_width()
        return OK

    return dequantize


# --- plans ---

_STORE: Final = "gpuos_store_rows"
ALONE: Final = 16 * 1024
"""Elements of rows up to which one block does it all."""


def _walks(places: Sequence[Operand | None], inputs: int) -> Any:
    """Each operand in its own order, None where all are contiguous."""
    if all(each is None or each.contiguous for each in places):
        return None
    ways = [None if each is None else walk_flat(each) for each in places]
    return (*ways[:inputs], *[None] * (4 - inputs), *ways[inputs:])


def _fits(rows: Sequence[Operand], length: int) -> bool:
    """Whether rows of `length` elements can be moved by 16 bytes."""
    size = ITEMSIZE[rows[0].dtype]
    if all(each.contiguous for each in rows):
        return length * size % 16 == 0
    return all(fits_vectors(each) and each.shape[-1] * size % 16 == 0 for each in rows)


def _check_kv(
    name: str, inputs: Sequence[Operand], outputs: Sequence[Operand], dims: tuple[int, int, tuple[int, ...]]
) -> None:
    k, v, index = inputs
    refuse_other(name, "inputs[0]", k.dtype, ANY)
    refuse_other(name, "inputs[2]", index.dtype, INDICES)
    for what, each in (("inputs[1]", v), ("out[0]", outputs[0]), ("out[1]", outputs[1])):
        refuse_other(name, what, each.dtype, (k.dtype,))
    new, old, of_index = dims
    if len(k.shape) != new or v.shape != k.shape or len(index.shape) not in of_index:
        raise ArgumentError(
            f"{name}: k, v and their places have shapes {k.shape}, {v.shape} and {index.shape}: k and v need "
            f"{new} dims of one shape, their places {' or '.join(map(str, of_index))}"
        )
    if len(outputs[0].shape) != old or outputs[1].shape != outputs[0].shape:
        raise ArgumentError(
            f"{name}: the caches have shapes {outputs[0].shape} and {outputs[1].shape}: both need {old} dims "
            "of one shape"
        )


def _small(name: str, *sides: int) -> None:
    if max(sides) >= 1 << 32:
        raise ArgumentError(f"{name}: a side of {max(sides)}: at most 2^32 - 1")


def plan_update(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /) -> Plan:
    k, v, slots = inputs
    cache = outputs[0]
    _check_kv("kv_update", inputs, outputs, (3, 4, (1,)))
    if cache.shape[2:] != k.shape[1:] or slots.shape != k.shape[:1]:
        raise ArgumentError(
            f"kv_update: k of shape {k.shape}, slots of shape {slots.shape}, caches of shape {cache.shape}: "
            "they must be [tokens, heads, head_dim], [tokens] and [blocks, block_size, heads, head_dim]"
        )
    tokens, row = k.shape[0], math.prod(k.shape[1:])
    _small("kv_update", tokens, row)
    extent = cache.shape[0] * cache.shape[1]
    fits = _fits([k, v, *outputs], row)
    walks = _walks([*inputs, *outputs], 3)
    return Plan(
        UPDATE_ID + (STRIDED_IDS if walks else 0),
        tokens if row else 0,
        1 if k.elements <= ALONE else tile_count(4 * k.elements, blocks),
        walks,
        pack("QIIII", extent, row, tokens, 1, VECTORS if fits else 0),
    )


def plan_append(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /) -> Plan:
    k, v, positions = inputs
    cache = outputs[0]
    _check_kv("kv_append", inputs, outputs, (4, 4, (1, 2)))
    batch, heads, queries, width = k.shape
    if (cache.shape[0], cache.shape[1], cache.shape[3]) != (batch, heads, width) or (
        positions.shape not in ((queries,), (batch, queries))
    ):
        raise ArgumentError(
            f"kv_append: k of shape {k.shape}, positions of shape {positions.shape}, caches of shape "
            f"{cache.shape}: they must be [batch, heads, queries, head_dim], [batch, queries] or [queries], "
            "and [batch, heads, length, head_dim]"
        )
    _small("kv_append", width, queries, heads)
    if len(positions.shape) == 1:
        strides = aligned_strides(positions, (batch, queries))
        positions = Operand(positions.dtype, (batch, queries), strides, batch == 1 and positions.contiguous)
    walks = _walks([k, v, positions, *outputs], 3)
    return Plan(
        APPEND_ID + (STRIDED_IDS if walks else 0),
        batch * heads * queries if width else 0,
        1 if k.elements <= ALONE else tile_count(4 * k.elements, blocks),
        walks,
        pack(
            "QIIII", cache.shape[2], width, queries, heads, VECTORS if _fits([k, v, *outputs], width) else 0
        ),
    )


def infer_gather(inputs: Sequence[Operand], /, length: int) -> tuple[Result, ...]:
    cache, tables, lengths = inputs
    refuse_other("kv_gather", "inputs[0]", cache.dtype, ANY)
    refuse_other("kv_gather", "inputs[1]", tables.dtype, INDICES)
    refuse_other("kv_gather", "inputs[2]", lengths.dtype, INDICES)
    if len(cache.shape) != 4 or len(tables.shape) != 2 or lengths.shape != tables.shape[:1] or length < 0:
        raise ArgumentError(
            f"kv_gather: cache of shape {cache.shape}, block tables of shape {tables.shape}, context lengths "
            f"of shape {lengths.shape}, length={length}: they must be [blocks, block_size, heads, head_dim], "
            "[sequences, blocks of each], [sequences] and not negative"
        )
    return (Result((lengths.shape[0], length, *cache.shape[2:]), cache.dtype),)


def plan_gather(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, length: int) -> Plan:
    cache, tables, _ = inputs
    out = outputs[0]
    count, block_size, *rest = cache.shape
    row = math.prod(rest)
    _small("kv_gather", count, row, length, block_size, tables.shape[1])
    fits = _fits([cache, out], row)
    # No block of a size of 0 can be named: none is there then.
    sides = (count if block_size else 0, row, length, max(1, block_size), tables.shape[1])
    walks = _walks([*inputs, out], 3)
    return Plan(
        GATHER_ID + (STRIDED_IDS if walks else 0),
        out.shape[0] * length if row else 0,
        tile_count(out.elements, blocks),
        walks,
        pack("6I", *sides, VECTORS if fits else 0),
    )


def infer_prefix(inputs: Sequence[Operand], /) -> tuple[Result, ...]:
    tokens, prefix = inputs
    refuse_other("prefix_match", "inputs[0]", tokens.dtype, INDICES)
    refuse_other("prefix_match", "inputs[1]", prefix.dtype, INDICES)
    if len(tokens.shape) != 2 or prefix.shape[:-1] not in ((), tokens.shape[:1]) or not prefix.shape:
        raise ArgumentError(
            f"prefix_match: tokens of shape {tokens.shape}, prefix of shape {prefix.shape}: they must be "
            "[sequences, length], and [sequences, length] or [length]"
        )
    _small("prefix_match", tokens.shape[1])
    return (Result(tokens.shape[:1], DType.I64),)


def plan_prefix(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /) -> Plan:
    tokens, prefix = inputs
    rows, length = tokens.shape
    whole = (rows, prefix.shape[-1])
    each = Operand(
        prefix.dtype, whole, aligned_strides(prefix, whole), prefix.contiguous and prefix.shape == whole
    )
    walks = None
    if not (tokens.contiguous and each.contiguous and outputs[0].contiguous):
        walks = (walk(tokens), walk(each), None, None, walk(outputs[0]))
    tiles = 1 if tokens.elements <= ALONE else max(1, min(rows, 4 * blocks, tokens.elements // 4096))
    return Plan(
        PREFIX_ID + (STRIDED_IDS if walks else 0), rows, tiles, walks, pack("QQ", length, prefix.shape[-1])
    )


def infer_quantize(inputs: Sequence[Operand], /) -> tuple[Result, ...]:
    x = inputs[0]
    refuse_other("kv_quantize", "inputs[0]", x.dtype, FLOATS)
    if not x.shape:
        raise ArgumentError("kv_quantize: inputs[0] has no dims: reshape a number to (1,)")
    return Result(x.shape, DType.I8), Result(x.shape[:-1], DType.F32)


def plan_quantize(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /) -> Plan:
    x = inputs[0]
    codes, scales = outputs
    length, rows = x.shape[-1], scales.elements
    wide = length > (512 if rows < 8 else 2048)
    walks = None
    if not (x.contiguous and codes.contiguous and scales.contiguous):
        walks = (walk(x), None, None, None, walk(codes), walk(scales))
    groups = rows if wide else -(-rows // 8)
    tiles = 1 if x.elements <= ALONE else max(1, min(groups, 4 * blocks, x.elements // 4096))
    return Plan(
        QUANTIZE_ID + (STRIDED_IDS if walks else 0),
        rows,
        tiles,
        walks,
        pack("QI", length, WIDE if wide else 0),
    )


def infer_dequantize(inputs: Sequence[Operand], /, dtype: DType) -> tuple[Result, ...]:
    codes, scales = inputs
    refuse_other("kv_dequantize", "inputs[0]", codes.dtype, (DType.I8,))
    refuse_other("kv_dequantize", "inputs[1]", scales.dtype, (DType.F32,))
    if dtype not in FLOATS:
        known = ", ".join(DTYPE_NAMES[each] for each in FLOATS)
        raise ArgumentError(f"kv_dequantize: dtype={DTYPE_NAMES[dtype]}: choose one of {known}")
    if not codes.shape or scales.shape != codes.shape[:-1]:
        raise ArgumentError(
            f"kv_dequantize: codes of shape {codes.shape}, scales of shape {scales.shape}: there is a scale "
            "for each row of the last dim"
        )
    return (Result(codes.shape, dtype),)


def plan_dequantize(
    inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, dtype: DType
) -> Plan:
    codes, scales = inputs
    length = codes.shape[-1]
    walks = _walks([*inputs, *outputs], 2)
    return Plan(
        DEQUANTIZE_ID + (STRIDED_IDS if walks else 0),
        scales.elements if length else 0,
        tile_count(codes.elements, blocks),
        walks,
        pack("Q", length),
    )


# --- the truth ---


def spec_update(k: Array, v: Array, slots: Array, *, out: tuple[Array, Array]) -> tuple[Array, ...]:
    results = []
    for new, cache in zip((k, v), out, strict=True):
        result = cache.copy()
        rows = result.reshape(-1, *cache.shape[2:])
        for token, slot in enumerate(slots):
            if slot != SKIP:
                rows[slot] = new[token]
        results.append(rows.reshape(cache.shape))
    return tuple(results)


def spec_append(k: Array, v: Array, positions: Array, *, out: tuple[Array, Array]) -> tuple[Array, ...]:
    results = []
    places = np.broadcast_to(positions, (k.shape[0], k.shape[2]))
    for new, cache in zip((k, v), out, strict=True):
        result = cache.copy()
        for batch, query in np.ndindex(places.shape):
            if places[batch, query] != SKIP:
                result[batch, :, places[batch, query]] = new[batch, :, query]
        results.append(result)
    return tuple(results)


def spec_gather(cache: Array, tables: Array, lengths: Array, *, length: int) -> Array:
    block_size = cache.shape[1]
    result = np.zeros((len(lengths), length, *cache.shape[2:]), cache.dtype)
    for sequence, token in np.ndindex(result.shape[:2]):
        if token < lengths[sequence]:
            result[sequence, token] = cache[tables[sequence, token // block_size], token % block_size]
    return result


def spec_prefix(tokens: Array, prefix: Array) -> Array:
    shortest = min(tokens.shape[-1], prefix.shape[-1])
    differ = tokens[:, :shortest] != prefix[..., :shortest]
    ends = np.ones((len(tokens), 1), np.bool_)
    return np.argmax(np.concatenate([differ, ends], 1), 1).astype(np.int64)


def spec_quantize(x: Array) -> tuple[Array, Array]:
    exact = x.astype(np.float32)
    scale = np.max(np.abs(exact), -1, initial=0) / np.float32(127)
    codes = np.rint(exact / scale[..., None])
    codes = np.where(np.isnan(codes) | (scale[..., None] == 0), 0, np.clip(codes, -127, 127))
    return codes.astype(np.int8), scale


def spec_dequantize(codes: Array, scales: Array, *, dtype: Any = "float16") -> Array:
    return codes.astype(np.float32) * scales[..., None]


def spec_compact(cache: Array, index: Array, dim: int = -2) -> Array:
    return spec_index_select(cache, index, dim)


def _writable(array: Array) -> Array:
    return array if array.flags.writeable else array.copy()


def _places(draw: Draw, shape: tuple[int, ...], extent: int) -> Array:
    """Different ones along the last dim, and some that are skipped."""
    first = draw.integer(0, max(0, extent - shape[-1]))
    places = np.broadcast_to(np.arange(first, first + shape[-1]), shape).astype(
        draw.choice([np.int32, np.int64])
    )
    places = np.where(draw.array(shape, DType.BOOL), places, SKIP).astype(places.dtype)
    return places[..., ::-1] if draw.integer(0, 1) else places


def _example_update(draw: Draw) -> Example:
    heads, width, dtype = draw.integer(1, 3), draw.choice([1, 5, 8, 16, 64]), draw.choice(ANY)
    size, blocks = draw.choice([1, 4, 16]), draw.integer(1, 5)
    tokens = draw.integer(0, min(9, size * blocks))
    k, v = (draw.array((tokens, heads, width), dtype) for _ in range(2))
    out = tuple(_writable(draw.array((blocks, size, heads, width), dtype)) for _ in range(2))
    return [k, v, _places(draw, (tokens,), size * blocks)], {"out": out}


def _example_append(draw: Draw) -> Example:
    batch, heads, length = draw.integer(1, 3), draw.integer(1, 3), draw.integer(1, 12)
    queries, width, dtype = draw.integer(0, length), draw.choice([1, 5, 8, 16, 64]), draw.choice(ANY)
    k, v = (draw.array((batch, heads, queries, width), dtype) for _ in range(2))
    out = tuple(_writable(draw.array((batch, heads, length, width), dtype)) for _ in range(2))
    shape = (queries,) if draw.integer(0, 1) else (batch, queries)
    return [k, v, _places(draw, shape, length)], {"out": out}


def _example_gather(draw: Draw) -> Example:
    blocks, size, most, sequences = (
        draw.integer(1, 6),
        draw.choice([1, 4, 16]),
        draw.integer(0, 4),
        draw.integer(0, 4),
    )
    cache = draw.array((blocks, size, draw.integer(1, 3), draw.choice([1, 5, 16, 64])), draw.choice(ANY))
    tables = np.asarray(draw.array((sequences, most), draw.choice(INDICES), "small"))
    lengths = np.asarray(draw.array((sequences,), draw.choice(INDICES), "small"))
    tables, lengths = tables % blocks, lengths * (size + 1) % (most * size + 1)
    return [cache, tables, lengths], {"length": draw.integer(0, most * size + 3)}


def _example_prefix(draw: Draw) -> Example:
    rows, length = draw.integer(0, 5), draw.choice([0, 1, 7, 64, 1000])
    one = draw.array((length,), draw.choice(INDICES))
    tokens = np.array(np.broadcast_to(one, (rows, length)), draw.choice([np.int32, np.int64]))
    for row in tokens:
        if length and draw.integer(0, 2):
            row[draw.integer(0, length - 1)] ^= 1 << draw.choice([0, 20])
    if draw.integer(0, 1):
        return [tokens, one[: draw.integer(0, length)]], {}
    return [tokens[:, ::-1], np.broadcast_to(one, (rows, length))[:, ::-1]], {}


def _example_quantize(draw: Draw) -> Example:
    return [draw.array(draw.shape(1), draw.choice(FLOATS), draw.choice(["finite", "any", "small"]))], {}


def _example_dequantize(draw: Draw) -> Example:
    shape = draw.shape(1)
    codes, scales = (
        draw.array(shape, DType.I8),
        draw.array(shape[:-1], DType.F32, draw.choice(["finite", "any"])),
    )
    return [codes, scales], {"dtype": draw.choice(FLOATS)}


def _example_compact(draw: Draw) -> Example:
    cache = draw.array((*draw.shape(0, 2, 3), 9, draw.choice([5, 16, 64])), draw.choice(ANY))
    index = np.asarray(draw.array((draw.integer(0, 9),), draw.choice(INDICES), "small"))
    return [cache, index % 9], {"dim": draw.choice([-2, cache.ndim - 2])}


# --- the table ---


def _operator(name: str, inputs: int, outputs: int, formula: str, **more: Any) -> Operator:
    return Operator(name, "cache", (inputs, inputs), outputs, formula=formula, **more)


_TILING: Final = f"above {TILE} elements"
_STORED: Final = (
    "An index of -1 is skipped; another one outside of the caches fails the task, and its row is left out. "
    "Of two rows for one place, either stays."
)

OPERATORS: Final = (
    _operator(
        "kv_update",
        3,
        2,
        "cache[slot // block_size, slot % block_size] = k[token], and v likewise, for each token",
        dtypes=ANY,
        infer=infer_nothing,
        plan=plan_update,
        kernels=both_ways(UPDATE_ID, "kv_update", make_store_rows, _STORE),
        spec=spec_update,
        updates=True,
        tiling=f"above {ALONE} elements of k",
        source=(
            "Inputs: k, v [tokens, heads, head_dim], slots [tokens]; out: k and v cache "
            f"[blocks, block_size, heads, head_dim]. {_STORED}"
        ),
        example=_example_update,
    ),
    _operator(
        "kv_append",
        3,
        2,
        "cache[:, :, position] = k[:, :, query], and v likewise, for each query",
        dtypes=ANY,
        infer=infer_nothing,
        plan=plan_append,
        kernels=both_ways(APPEND_ID, "kv_append", make_store_rows, _STORE),
        spec=spec_append,
        updates=True,
        tiling=f"above {ALONE} elements of k",
        source=(
            "Inputs: k, v [batch, heads, queries, head_dim], positions [batch, queries] or [queries]; out: k "
            f"and v cache [batch, heads, length, head_dim]. {_STORED}"
        ),
        example=_example_append,
    ),
    _operator(
        "kv_gather",
        3,
        1,
        "cache[table[token // block_size], token % block_size] for each token of the context, then zeros",
        dtypes=ANY,
        infer=infer_gather,
        plan=plan_gather,
        kernels=both_ways(GATHER_ID, "kv_gather", make_gather_blocks),
        spec=spec_gather,
        parameters=(Parameter("length", "int"),),
        tiling=_TILING,
        source=(
            "Inputs: cache [blocks, block_size, heads, head_dim], block tables [sequences, blocks of each], "
            "context lengths [sequences]; gives [sequences, length, heads, head_dim], cut off at length. A "
            "block of the context that is none of the cache's fails the task, its tokens are zeros."
        ),
        example=_example_gather,
    ),
    _operator(
        "prefix_match",
        2,
        1,
        "how many tokens of each sequence are those of the prefix, up to the first that is not",
        dtypes=INDICES,
        infer=infer_prefix,
        plan=plan_prefix,
        kernels=both_ways(PREFIX_ID, "prefix_match", make_prefix_match),
        spec=spec_prefix,
        tiling=f"above {ALONE} tokens, over sequences",
        source="Inputs: tokens [sequences, length], prefix [sequences, length] or [length]; gives int64.",
        example=_example_prefix,
    ),
    _operator(
        "kv_quantize",
        1,
        2,
        "codes a / scale, rounded to even, and scale = largest magnitude / 127, for each row of the last dim",
        dtypes=FLOATS,
        infer=infer_quantize,
        plan=plan_quantize,
        kernels=both_ways(QUANTIZE_ID, "kv_quantize", make_quantize),
        spec=spec_quantize,
        tiling=f"above {ALONE} elements, over rows",
        cost="Reads a twice, the second time from a cache.",
        source=(
            "A row of zeros has scale 0. A row with a NaN has scale NaN, one with an infinity scale inf; "
            "their codes are 0 and they decode to NaN."
        ),
        example=_example_quantize,
    ),
    _operator(
        "kv_dequantize",
        2,
        1,
        "code * scale of its row",
        dtypes=(DType.I8, DType.F32),
        infer=infer_dequantize,
        plan=plan_dequantize,
        kernels=both_ways(DEQUANTIZE_ID, "kv_dequantize", make_dequantize),
        spec=spec_dequantize,
        parameters=(Parameter("dtype", "dtype", DType.F16),),
        tolerance=Tolerance(),
        tiling=_TILING,
        source="Inputs: int8 codes [..., n] and float32 scales [...], of kv_quantize.",
        example=_example_dequantize,
    ),
    _operator(
        "kv_compact",
        2,
        1,
        "cache[..., index, :]: the tokens that stay, in their new order",
        dtypes=ANY,
        infer=infer_select("kv_compact", True),
        plan=plan_select("kv_compact"),
        kernels=SELECT,
        spec=spec_compact,
        parameters=(Parameter("dim", "int", -2),),
        tiling=_TILING,
        source="index_select along the dim of tokens; into another cache, for rows move over each other.",
        example=_example_compact,
    ),
)
