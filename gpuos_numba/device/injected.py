"""Bodies that rendered operators fill in: functions of one element arrive, a body of a kernel leaves.

Element-wise ones are those of device/elementwise.py. Here are the two along a row of `n` elements:

    make_reduce   finalise(combine of map(x, n), n)                    one value a row
    make_rowwise  r = combine of map(x, n), s = combine2 of map2(x, r, n), then value(x, r, s, n) for each

`combine` is associative and commutative up to rounding, and its identity joined with itself is the identity:
threads join the parts of a row in any order. All is f32, `n` too. A warp works on a short row, the block on a
long one. A row is read once for each pass; the output may be exactly the input, for a thread reads what it
will write after everybody has passed the last reduction.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..descriptor import LAYOUT_BYTES, Flag, layout_offset, offset
from ..machines.base import Body, Primitives
from ..protocol import CONTEXT, field
from .chunks import make_chunk_count, make_load8, make_store8
from .elements import make_element_address, make_itemsize, make_store_f32
from .reductions import AREA_BYTES

WIDE: Final = 1
"""In the second scalar: the block works on a row, rather than each warp on one of its own."""


def _make_join(m: Primitives, combine: Body) -> Body:
    """`join(wide, x, area)`: the threads' values combined, in every thread. See device/reductions.py."""
    u64 = m.u64
    thread_index, block_width, warp_width, barrier = m.thread_index, m.block_width, m.warp_width, m.barrier
    load_scratch_f32, store_scratch_f32, divide = m.load_scratch_f32, m.store_scratch_f32, m.divide
    shuffle_xor_f32 = m.shuffle_xor_f32
    ZERO, ONE, FOUR = u64(0), u64(1), u64(4)

    def join(wide: Any, x: Any, area: Any) -> Any:
        warp = warp_width()
        mask = warp >> ONE
        while mask > ZERO:
            x = combine(x, shuffle_xor_f32(x, mask))
            mask >>= ONE
        if wide and block_width() > warp:
            thread = thread_index()
            if thread & (warp - ONE) == ZERO:
                store_scratch_f32(area + divide(thread, warp) * FOUR, x)
            barrier()
            # Every thread joins the warps' values itself, in the same order.
            end = area + divide(block_width(), warp) * FOUR
            x = load_scratch_f32(area)
            area += FOUR
            while area < end:
                x = combine(x, load_scratch_f32(area))
                area += FOUR
        return x

    return m.device(join)


def _make_fold(m: Primitives, map: Body, combine: Body, identity: Any) -> Body:
    """`fold(vector, kind, base, step, start, apart, leap, length, r, n)`: a thread's part of a row."""
    u64 = m.u64
    chunk_count, load8 = make_chunk_count(m), make_load8(m)
    IDENTITY = m.f32(identity)
    ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN = (u64(k) for k in range(1, 8))

    def fold(
        vector: Any,
        kind: Any,
        base: Any,
        step: Any,
        start: Any,
        apart: Any,
        leap: Any,
        length: Any,
        r: Any,
        n: Any,
    ) -> Any:
        total = IDENTITY
        j = start
        while j < length:
            count = chunk_count(j, length, apart)
            v = load8(vector, kind, base + j * step, apart * step, count)
            a = map(v[0], r, n)
            b = map(v[1], r, n) if count > ONE else IDENTITY
            c = map(v[2], r, n) if count > TWO else IDENTITY
            d = map(v[3], r, n) if count > THREE else IDENTITY
            e = map(v[4], r, n) if count > FOUR else IDENTITY
            f = map(v[5], r, n) if count > FIVE else IDENTITY
            g = map(v[6], r, n) if count > SIX else IDENTITY
            h = map(v[7], r, n) if count > SEVEN else IDENTITY
            eight = combine(combine(combine(a, b), combine(c, d)), combine(combine(e, f), combine(g, h)))
            total = combine(total, eight)
            j += leap
        return total

    return m.device(fold)


def _make_rows(m: Primitives, first: Body, second: Body | None, end_row: Body, per_element: bool) -> Body:
    """The walk over rows that both kinds share: `first` and `second` of `_make_pass` give r and s.

    per_element: the output has the input's shape, rather than one element a row.
    """
    u64, f32 = m.u64, m.f32
    thread_index, block_width, warp_width, divide = m.thread_index, m.block_width, m.warp_width, m.divide
    load_u64, load_u32 = m.load_u64, m.load_u32
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    element_address = make_element_address(m)
    itemsize = make_itemsize(m)

    INPUT, OUTPUT = u64(offset("inputs")), u64(offset("outputs"))
    COUNT, TILES, DTYPES = u64(offset("count")), u64(offset("tiles")), u64(offset("dtypes"))
    SCALARS, LAYOUTS_AT = u64(offset("scalars")), u64(offset("layouts"))
    LAYOUTS, LAYOUT_SIZE = u64(field(CONTEXT, "layouts")), u64(LAYOUT_BYTES)
    NDIM, STRIDES = u64(layout_offset("ndim")), u64(layout_offset("strides"))
    STRIDED, SLOT_MASK, IS_WIDE = u64(Flag.STRIDED), u64(0xFFFF), u64(WIDE)
    ZERO, ONE, SEVEN, EIGHT, FIFTEEN = (u64(n) for n in (0, 1, 7, 8, 15))
    SIXTEEN, HALF, AREA = u64(16), u64(32), u64(AREA_BYTES)
    NOTHING, OK = f32(0), np.int32(0)
    two_passes = second is not None
    fold2 = second if second is not None else first

    def rows_body(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        strided = (load_task_u64(task) >> HALF) & STRIDED != ZERO
        x = load_task_u64(task + INPUT)
        out = load_task_u64(task + OUTPUT)
        rows = load_task_u64(task + COUNT)
        tiles = load_task_u32(task + TILES)
        kinds = load_task_u32(task + DTYPES)
        kind = kinds & FIFTEEN
        kind_out = (kinds >> SIXTEEN) & FIFTEEN
        length = load_task_u64(task + SCALARS)
        wide = load_task_u32(task + SCALARS + EIGHT) & IS_WIDE != ZERO
        n = f32(length)
        size = itemsize(kind)
        size_out = itemsize(kind_out)
        step = size
        step_out = size_out
        layout = ZERO
        layout_out = ZERO
        if strided:
            table = load_u64(context + LAYOUTS)
            layout = table + (load_task_u64(task + LAYOUTS_AT) & SLOT_MASK) * LAYOUT_SIZE
            layout_out = table + (load_task_u32(task + LAYOUTS_AT + EIGHT) & SLOT_MASK) * LAYOUT_SIZE
            if length > ONE:
                step = load_u64(layout + STRIDES + (load_u32(layout + NDIM) - ONE) * EIGHT) * size
                if per_element:
                    step_out = load_u64(layout_out + STRIDES + (load_u32(layout_out + NDIM) - ONE) * EIGHT)
                    step_out *= size_out
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
        if tiles < ONE:
            tiles = ONE
        mine = divide(groups + tiles - ONE, tiles) * ahead
        row = tile * mine
        end = row + mine
        if end > rows:
            end = rows
        if not wide:
            row += divide(thread, lanes)
        area = arena
        other = arena + AREA
        while row < end:
            index = row * length
            base = x + index * size
            target = out + row * size_out
            if per_element:
                target = out + index * size_out
            if strided:
                if length > ZERO:
                    base = element_address(layout, x, index)
                if per_element:
                    target = element_address(layout_out, out, index)
                else:
                    target = element_address(layout_out, out, row)
            vector = step == size and (base & FIFTEEN) | (length & SEVEN) == ZERO
            if per_element:
                vector = vector and step_out == size_out and target & FIFTEEN == ZERO
            # The elements of a thread: j, j + apart, ..., in chunks of eight that are `leap` apart.
            apart = parts
            start = part
            if vector:
                apart = ONE
                start = part * EIGHT
            leap = parts * EIGHT
            r = first(wide, vector, kind, base, step, start, apart, leap, length, NOTHING, n, area)
            s = NOTHING
            # Two reductions in a row write to areas in turn: the barrier of one frees the area of the other.
            area, other = other, area
            if two_passes:
                s = fold2(wide, vector, kind, base, step, start, apart, leap, length, r, n, area)
                area, other = other, area
            end_row(
                vector,
                kind,
                kind_out,
                base,
                target,
                step,
                step_out,
                start,
                apart,
                leap,
                length,
                part,
                r,
                s,
                n,
            )
            row += ahead
        return OK

    return rows_body


def _make_pass(m: Primitives, map: Body, combine: Body, identity: Any) -> Body:
    """`reduce_row(wide, vector, ..., area)`: map and combine over a row, the same in all of its threads."""
    combine = m.device(combine)
    fold, join = _make_fold(m, m.device(map), combine, identity), _make_join(m, combine)

    def reduce_row(
        wide: Any,
        vector: Any,
        kind: Any,
        base: Any,
        step: Any,
        start: Any,
        apart: Any,
        leap: Any,
        length: Any,
        r: Any,
        n: Any,
        area: Any,
    ) -> Any:
        return join(wide, fold(vector, kind, base, step, start, apart, leap, length, r, n), area)

    return m.device(reduce_row)


def make_reduce(m: Primitives, map: Body, combine: Body, identity: Any, finalise: Body) -> Body:
    """The body of a reduction. `map(x, r, n)` is given 0 for r."""
    store, finalise = make_store_f32(m), m.device(finalise)
    FIRST = m.u64(0)

    def end_row(
        vector: Any,
        kind: Any,
        kind_out: Any,
        base: Any,
        target: Any,
        step: Any,
        step_out: Any,
        start: Any,
        apart: Any,
        leap: Any,
        length: Any,
        part: Any,
        r: Any,
        s: Any,
        n: Any,
    ) -> None:
        if part == FIRST:
            store(kind_out, target, finalise(r, n))

    return _make_rows(m, _make_pass(m, map, combine, identity), None, m.device(end_row), False)


def make_rowwise(
    m: Primitives,
    map: Body,
    combine: Body,
    identity: Any,
    value: Body,
    map2: Body | None = None,
    combine2: Body | None = None,
    identity2: Any = 0.0,
) -> Body:
    """The body of `value(x, r, s, n)` for each element of a row; s is 0 where there is no second pass."""
    chunk_count, load8, store8 = make_chunk_count(m), make_load8(m), make_store8(m)
    value = m.device(value)

    def end_row(
        vector: Any,
        kind: Any,
        kind_out: Any,
        base: Any,
        target: Any,
        step: Any,
        step_out: Any,
        start: Any,
        apart: Any,
        leap: Any,
        length: Any,
        part: Any,
        r: Any,
        s: Any,
        n: Any,
    ) -> None:
        j = start
        while j < length:
            count = chunk_count(j, length, apart)
            v = load8(vector, kind, base + j * step, apart * step, count)
            w = (
                value(v[0], r, s, n),
                value(v[1], r, s, n),
                value(v[2], r, s, n),
                value(v[3], r, s, n),
                value(v[4], r, s, n),
                value(v[5], r, s, n),
                value(v[6], r, s, n),
                value(v[7], r, s, n),
            )
            store8(vector, kind_out, target + j * step_out, apart * step_out, count, w)
            j += leap

    second = None
    if map2 is not None and combine2 is not None:
        second = _make_pass(m, map2, combine2, identity2)
    return _make_rows(m, _make_pass(m, map, combine, identity), second, m.device(end_row), True)
