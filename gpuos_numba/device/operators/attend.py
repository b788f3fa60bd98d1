"""Attention: queries, keys and values arrive, weighted means of the values leave.

The work is cut into units: one chunk of the keys of one kv head, for up to four queries that share it (a
bundle: query heads of the group, then neighbouring queries), so that keys and values are read once for all
of them. A unit's result is a largest score, a sum of exp(score - largest) and a sum of values so weighted.
With one chunk it is written as it is; with more it goes to the workspace, and the merge call joins the
chunks.

Groups of lanes share the keys of a unit. Where rows are aligned and whole they take eight at a time, see
`attend_batches`. Elsewhere, and on a machine whose warps are single threads, a group works on one key at a
time, on any part of it, with its sums in scratch.

A key whose weight is exactly 0, because it is masked or far below the largest, takes nothing from its value,
also where that is infinite or NaN.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ...descriptor import FIFTH_INPUT, DType, Status, layout_offset, offset
from ...machines.base import Body, Primitives
from ..chunks import make_at, make_chunk_count, make_fill8, make_load8
from ..elements import make_itemsize, make_load_f32, make_load_i64, make_store_f32
from ..operands import OUTPUT, make_address_of, make_is_strided, make_kind_of, make_layout_of
from ..reductions import make_larger
from .attend_batches import make_bundle, make_fetch
from .attend_parts import (
    BUNDLE,
    CAUSAL_AT,
    CAUSAL_BITS,
    CHUNK_AT,
    CHUNK_BITS,
    DIM_BITS,
    GROUP_AT,
    GROUP_BITS,
    JOBS,
    KEYS,
    KEYS_AT,
    LOWER_RIGHT,
    MASK,
    MOST_THREADS,
    PAGE,
    PAGED,
    PAGES,
    PAGING_AT,
    QUERIES_AT,
    QUERY,
    QUERY_BYTES,
    RECORD_HEAD,
    REST_AT,
    ROWS_AT,
    STOP,
    SUMS_AT,
    TARGET,
    TOPS_AT,
    TOTALS_AT,
    UPPER_LEFT,
    VALUES_AT,
    WINDOW,
    make_add_weighted8,
    make_admit,
    make_base,
    make_dot8,
    make_field,
    make_look_up,
    make_row_place,
    make_scale8,
    make_scratch8,
    make_shape,
    make_steps,
)
from .table import ATTENTION_IDS


@functools.cache
def make_join(m: Primitives) -> Body:
    """`join(context, task, arena, row, group, part, lane_bits, groups, largest, sum)`: write a row.

    Each group brings its largest score and its sum, and in scratch its weighted values. All threads call; the
    last barrier frees the scratch.
    """
    u64, f32 = m.u64, m.f32
    thread_index, block_width, barrier = m.thread_index, m.block_width, m.barrier
    load_u64, load_u32, bits_f32 = m.load_task_u64, m.load_task_u32, m.bits_f32
    store_scratch, store_word, load_layout = m.store_scratch_f32, m.store_f32, m.load_u64
    store_element, itemsize, kind_of = make_store_f32(m), make_itemsize(m), make_kind_of(m)
    larger, base_of, field_of, scale8 = make_larger(m), make_base(m), make_field(m), make_scale8(m)
    layout_of, is_strided = make_layout_of(m), make_is_strided(m)
    load_totals, store_totals = make_scratch8(m)
    exp = math.exp
    ZERO, ONE, TWO, THREE, FOUR, FIVE, EIGHT = (u64(n) for n in (0, 1, 2, 3, 4, 5, 8))
    TOPS, SUMS, TOTALS = u64(TOPS_AT), u64(SUMS_AT), u64(TOTALS_AT)
    AT_TARGET, HEAD = u64(ROWS_AT + TARGET), u64(RECORD_HEAD)
    BITS_DIM, AT_CHUNKS, BITS_CHUNKS = u64(DIM_BITS), u64(CHUNK_AT), u64(CHUNK_BITS)
    INNERMOST, OUT = u64(layout_offset("strides") + 24), u64(OUTPUT)
    NOTHING, LEAST = f32(0), f32(-np.inf)

    def join(
        context: Any,
        task: Any,
        arena: Any,
        row: Any,
        group: Any,
        part: Any,
        lane_bits: Any,
        groups: Any,
        largest: Any,
        sum: Any,
    ) -> None:
        dim = field_of(task, ZERO, BITS_DIM) + ONE
        parts = (field_of(task, ZERO, BITS_DIM) + EIGHT) >> THREE
        if part == ZERO and group < groups:
            store_scratch(arena + TOPS + (group << TWO), largest)
        barrier()
        top = LEAST
        at = ZERO
        while at < groups:
            top = larger(top, bits_f32(load_u32(arena + TOPS + (at << TWO))))
            at += ONE
        factor = f32(exp(largest - base_of(top)))
        if group < groups:
            c = part
            while c < parts:
                mine = arena + TOTALS + ((group * parts + c) << FIVE)
                store_totals(mine, scale8(load_totals(mine), factor))
                c += ONE << lane_bits
            if part == ZERO:
                store_scratch(arena + SUMS + (group << TWO), sum * factor)
        barrier()
        total = NOTHING
        at = ZERO
        while at < groups:
            total += bits_f32(load_u32(arena + SUMS + (at << TWO)))
            at += ONE
        whole = field_of(task, AT_CHUNKS, BITS_CHUNKS) == ZERO
        target = load_u64(arena + AT_TARGET + (row << FIVE))
        kind = kind_of(task, OUT)
        step = itemsize(kind)
        if is_strided(task):
            step *= load_layout(layout_of(context, task, OUT) + INNERMOST)
        d = thread_index()
        if d == ZERO and not whole:
            store_word(target, top)
            store_word(target + FOUR, total)
        while d < dim:
            value = NOTHING
            place = arena + TOTALS + (d << TWO)
            at = ZERO
            while at < groups:
                value += bits_f32(load_u32(place))
                place += parts << FIVE
                at += ONE
            if whole:
                if total != NOTHING:  # it is 0 where no key takes part, and so is the result
                    value = value / total
                store_element(kind, target + d * step, value)
            else:
                store_word(target + HEAD + (d << TWO), value)
            d += block_width()
        barrier()

    return m.device(join)


@functools.cache
def make_single(m: Primitives) -> Body:
    """`single(...)` -> (largest, sum, whether a page was missing): one row of the bundle, key by key.

    Lanes share a key; the parts of it that a lane has need not be one. Works for any layout and width.
    """
    u64, f32 = m.u64, m.f32
    load_pair, shuffle = m.load_task_pair, m.shuffle_xor_f32
    kind_of, field_of = make_kind_of(m), make_field(m)
    load8, fill8, chunk_count = make_load8(m), make_fill8(m), make_chunk_count(m)
    look_up, admit, base_of, larger = make_look_up(m), make_admit(m), make_base(m), make_larger(m)
    dot8, scale8 = make_dot8(m), make_scale8(m)
    _, add_taken = make_add_weighted8(m)
    load_scratch, store_scratch = make_scratch8(m)
    exp = math.exp
    ZERO, ONE, TWO, THREE, FIVE, SEVEN = (u64(n) for n in (0, 1, 2, 3, 5, 7))
    KEYS, VALUES, REST, SIXTEEN = u64(KEYS_AT), u64(VALUES_AT), u64(REST_AT), u64(16)
    QUERIES, ROW, TOTALS, BITS_DIM = u64(QUERIES_AT), u64(QUERY_BYTES), u64(TOTALS_AT), u64(DIM_BITS)
    NOTHING, LEAST = f32(0), f32(-np.inf)
    NOTHING8 = (NOTHING,) * 8

    def single(
        task: Any,
        paged: Any,
        arena: Any,
        row: Any,
        vector: Any,
        group: Any,
        part: Any,
        lane_bits: Any,
        groups: Any,
    ) -> Any:
        kind = kind_of(task, ZERO)
        dim = field_of(task, ZERO, BITS_DIM) + ONE
        parts, lanes = (dim + SEVEN) >> THREE, ONE << lane_bits
        mine = arena + TOTALS + ((group * parts) << FIVE)
        query = arena + QUERIES + row * ROW
        if group < groups:
            c = part
            while c < parts:
                store_scratch(mine + (c << FIVE), NOTHING8)
                c += lanes
        turn, end = load_pair(arena + REST)
        first_k, page_k = load_pair(arena + KEYS)
        key_k, step_k = load_pair(arena + KEYS + SIXTEEN)
        first_v, page_v = load_pair(arena + VALUES)
        key_v, step_v = load_pair(arena + VALUES + SIXTEEN)
        largest, sum, missing = LEAST, NOTHING, False
        key = turn + group
        if group >= groups:
            turn = end
        # The lanes of a warp stay together: all go on while the first group has a key.
        while turn < end:
            page, inside, there = ZERO, ZERO, False
            if key < end:
                page, inside, there = look_up(task, arena, paged, key)
                if not there:
                    missing = True
            score = NOTHING
            if there:
                at = first_k + page * page_k + inside * key_k
                c = part
                while c < parts:
                    j = c << THREE
                    n = chunk_count(j, dim, ONE)
                    v = fill8(load8(vector, kind, at + j * step_k, step_k, n), n, NOTHING)
                    score += dot8(v, load_scratch(query + (j << TWO)))
                    c += lanes
            apart = lanes >> ONE
            while apart > ZERO:
                score += shuffle(score, apart)
                apart >>= ONE
            score = admit(task, arena, row, there, key, score)
            top = larger(largest, score)
            base = base_of(top)
            shrink = f32(exp(largest - base))
            weight = f32(exp(score - base))
            largest = top
            sum = sum * shrink + weight
            if there:
                at = first_v + page * page_v + inside * key_v
                c = part
                while c < parts:
                    j = c << THREE
                    total = scale8(load_scratch(mine + (c << FIVE)), shrink)
                    if weight != NOTHING:
                        n = chunk_count(j, dim, ONE)
                        v = fill8(load8(vector, kind, at + j * step_v, step_v, n), n, NOTHING)
                        total = add_taken(total, weight, v)
                    store_scratch(mine + (c << FIVE), total)
                    c += lanes
            key += groups
            turn += groups
        return largest, sum, missing

    return m.device(single)


@functools.cache
def make_merge(m: Primitives) -> Body:
    """`merge(context, task, paged)`: join the chunks of every row from the workspace and write the rows."""
    u64, f32 = m.u64, m.f32
    thread_index, block_width, divide = m.thread_index, m.block_width, m.divide_u32
    load_u64, load_f32x4, fma = m.load_task_u64, m.load_f32x4, m.fused_multiply_add
    address_of, kind_of, field_of, shape_of = (
        make_address_of(m),
        make_kind_of(m),
        make_field(m),
        make_shape(m),
    )
    row_place, steps_of, store_element = make_row_place(m), make_steps(m), make_store_f32(m)
    larger, base_of, at, exp = make_larger(m), make_base(m), make_at(m), math.exp
    ZERO, ONE, TWO, THREE, FOUR = (u64(n) for n in range(5))
    BITS_DIM, AT_CHUNKS, BITS_CHUNKS = u64(DIM_BITS), u64(CHUNK_AT), u64(CHUNK_BITS)
    AT_GROUP, BITS_GROUP, HEAD, COUNT = u64(GROUP_AT), u64(GROUP_BITS), u64(RECORD_HEAD), u64(offset("count"))
    OUT, WORKSPACE = u64(OUTPUT), u64(OUTPUT + 1)
    NOTHING, LEAST = f32(0), f32(-np.inf)

    def weight_of(head: Any, there: Any, base: Any) -> Any:
        if there:
            return f32(exp(head[0] - base))
        return NOTHING

    def add(total: Any, weight: Any, v: Any) -> Any:
        if weight != NOTHING:
            total = (
                fma(weight, v[0], total[0]),
                fma(weight, v[1], total[1]),
                fma(weight, v[2], total[2]),
                fma(weight, v[3], total[3]),
            )
        return total

    def share(x: Any, sum: Any) -> Any:
        if sum != NOTHING:  # it is 0 where no key takes part, and so is the result
            return x / sum
        return NOTHING

    weight_of, add, share = m.device(weight_of), m.device(add), m.device(share)

    def merge(context: Any, task: Any, paged: Any) -> None:
        heads, queries = shape_of(context, task, paged)
        dim = field_of(task, ZERO, BITS_DIM) + ONE
        chunks = field_of(task, AT_CHUNKS, BITS_CHUNKS) + ONE
        rows = queries * (field_of(task, AT_GROUP, BITS_GROUP) + ONE)
        parts = (dim + THREE) >> TWO
        record = HEAD + (parts << FOUR)
        kind = kind_of(task, OUT)
        step = steps_of(context, task, OUT, heads, queries, dim)[3]
        item = thread_index()
        items = load_u64(task + COUNT) * rows * parts
        while item < items:
            index = divide(item, parts)
            d = (item - index * parts) << TWO
            place = address_of(task, WORKSPACE) + index * chunks * record
            largest, sum = LEAST, NOTHING
            total = (NOTHING, NOTHING, NOTHING, NOTHING)
            left = chunks
            while left > ZERO:
                # Four at a time, so that their loads fly together; behind the last the first again.
                p, q, r = (
                    at(place, record, left, ONE),
                    at(place, record, left, TWO),
                    at(place, record, left, THREE),
                )
                h0, h1, h2, h3 = load_f32x4(place), load_f32x4(p), load_f32x4(q), load_f32x4(r)
                skip = HEAD + (d << TWO)
                v0, v1 = load_f32x4(place + skip), load_f32x4(p + skip)
                v2, v3 = load_f32x4(q + skip), load_f32x4(r + skip)
                top = larger(larger(larger(largest, h0[0]), h1[0]), larger(h2[0], h3[0]))
                base = base_of(top)
                shrink = f32(exp(largest - base))
                a, b = weight_of(h0, True, base), weight_of(h1, left > ONE, base)
                c, e = weight_of(h2, left > TWO, base), weight_of(h3, left > THREE, base)
                largest = top
                sum = sum * shrink + ((a * h0[1] + b * h1[1]) + (c * h2[1] + e * h3[1]))
                total = total[0] * shrink, total[1] * shrink, total[2] * shrink, total[3] * shrink
                total = add(add(add(add(total, a, v0), b, v1), c, v2), e, v3)
                place += FOUR * record
                if left > FOUR:
                    left -= FOUR
                else:
                    left = ZERO
            pair = divide(index, rows)
            target = row_place(context, task, paged, OUT, pair, index - pair * rows) + d * step
            store_element(kind, target, share(total[0], sum))
            if d + ONE < dim:
                store_element(kind, target + step, share(total[1], sum))
            if d + TWO < dim:
                store_element(kind, target + TWO * step, share(total[2], sum))
            if d + THREE < dim:
                store_element(kind, target + THREE * step, share(total[3], sum))
            item += block_width()

    return m.device(merge)


@functools.cache
def make_prepare(m: Primitives) -> Body:
    """`prepare(context, task, paged, arena, pair, bundle, chunk, keys)`: write to scratch what a unit is."""
    u64, divide, thread_index, block_width = m.u64, m.divide_u32, m.thread_index, m.block_width
    load_u32, load_layout, store_u64, warp_width = m.load_task_u32, m.load_u64, m.store_u64, m.warp_width
    address_of, kind_of, field_of, shape_of = (
        make_address_of(m),
        make_kind_of(m),
        make_field(m),
        make_shape(m),
    )
    layout_of, itemsize, steps_of, row_place = (
        make_layout_of(m),
        make_itemsize(m),
        make_steps(m),
        make_row_place(m),
    )
    ZERO, ONE, TWO, THREE, FOUR, FIVE, SEVEN = (u64(n) for n in (0, 1, 2, 3, 4, 5, 7))
    EIGHT, SIXTEEN, LAST, JOB_COUNT = u64(8), u64(16), u64(24), u64(JOBS)
    ROWS, AT_STOP, AT_MASK, AT_TARGET = u64(ROWS_AT), u64(STOP), u64(MASK), u64(TARGET)
    KEYS_PLACE, REST, PAGING = u64(KEYS_AT), u64(REST_AT), u64(PAGING_AT)
    BITS_DIM, AT_CHUNKS, BITS_CHUNKS = u64(DIM_BITS), u64(CHUNK_AT), u64(CHUNK_BITS)
    AT_GROUP, BITS_GROUP, HEAD = u64(GROUP_AT), u64(GROUP_BITS), u64(RECORD_HEAD)
    AT_CAUSAL, BITS_CAUSAL, UPPER, LOWER = u64(CAUSAL_AT), u64(CAUSAL_BITS), u64(UPPER_LEFT), u64(LOWER_RIGHT)
    OUT, WORKSPACE, SCALARS = u64(OUTPUT), u64(OUTPUT + 1), u64(offset("scalars"))
    AT_PAGE, AT_WINDOW, EVERYTHING = u64(PAGE), u64(WINDOW), u64(1 << 62)
    STRIDES, SHAPE = u64(layout_offset("strides")), u64(layout_offset("shape"))
    assert VALUES_AT == KEYS_AT + 32 and ROWS_AT % 16 == 0

    def stop_of(task: Any, queries: Any, query: Any, keys: Any) -> Any:
        """The key behind a query's own, 0 where that is before all."""
        causal = field_of(task, AT_CAUSAL, BITS_CAUSAL)
        if causal == UPPER:
            return query + ONE
        if causal == LOWER:
            if keys + query < queries:
                return ZERO
            return keys + query + ONE - queries
        return keys

    stop_of = m.device(stop_of)

    def prepare(
        context: Any, task: Any, paged: Any, arena: Any, pair: Any, bundle: Any, chunk: Any, keys: Any
    ) -> None:
        heads, queries = shape_of(context, task, paged)
        group = field_of(task, AT_GROUP, BITS_GROUP) + ONE
        rows = queries * group
        chunks = field_of(task, AT_CHUNKS, BITS_CHUNKS) + ONE
        dim = field_of(task, ZERO, BITS_DIM) + ONE
        batch = divide(pair, heads)
        # Each on a warp of its own, where there are so many.
        job, warps = thread_index(), block_width()
        if warp_width() > ONE:
            job, warps = job >> FIVE, warps >> FIVE
            if thread_index() & (warp_width() - ONE) != ZERO:
                job = JOB_COUNT
        while job < JOB_COUNT:
            if job < FOUR:
                row = (bundle << TWO) + job
                target, stop, mask = ZERO, ZERO, ZERO
                if row >= rows:
                    row = bundle << TWO  # some row that there is
                else:
                    query = divide(row, group)
                    stop = stop_of(task, queries, query, keys)
                    if not paged:
                        mask = address_of(task, THREE)
                        if mask != ZERO:
                            steps = steps_of(context, task, THREE, heads, queries, dim)
                            head = (pair - batch * heads) * group + (row - query * group)
                            mask += batch * steps[0] + head * steps[1] + query * steps[2]
                    if chunks == ONE:
                        target = row_place(context, task, paged, OUT, pair, row)
                    else:
                        record = HEAD + ((dim + THREE) >> TWO << FOUR)
                        target = address_of(task, WORKSPACE) + ((pair * rows + row) * chunks + chunk) * record
                at = arena + ROWS + (job << FIVE)
                store_u64(at, row_place(context, task, paged, ZERO, pair, row))
                store_u64(at + AT_STOP, stop)
                store_u64(at + AT_MASK, mask)
                store_u64(at + AT_TARGET, target)
            elif job < FOUR + TWO:
                place = job - THREE
                head = pair - batch * heads
                steps = steps_of(context, task, place, heads, keys, dim)
                start = address_of(task, place)
                at = arena + KEYS_PLACE + ((place - ONE) << FIVE)
                if paged:
                    store_u64(at, start + head * steps[2])
                    store_u64(at + EIGHT, steps[0])
                    store_u64(at + SIXTEEN, steps[1])
                else:
                    store_u64(at, start + batch * steps[0] + head * steps[1])
                    store_u64(at + EIGHT, ZERO)
                    store_u64(at + SIXTEEN, steps[2])
                store_u64(at + LAST, steps[3])
            else:
                span, mask_step = EVERYTHING, ZERO
                if paged:
                    layout = layout_of(context, task, THREE)
                    size = itemsize(kind_of(task, THREE))
                    start = address_of(task, THREE) + batch * load_layout(layout + STRIDES) * size
                    at = arena + PAGING
                    store_u64(at, start)
                    store_u64(at + EIGHT, load_layout(layout + STRIDES + EIGHT) * size)
                    store_u64(at + SIXTEEN, load_u32(task + SCALARS + AT_PAGE))
                    store_u64(at + LAST, load_layout(layout_of(context, task, ONE) + SHAPE))
                else:
                    if load_u32(task + SCALARS + AT_WINDOW) != ZERO:
                        span = load_u32(task + SCALARS + AT_WINDOW)
                    if address_of(task, THREE) != ZERO:
                        mask_step = steps_of(context, task, THREE, heads, queries, dim)[3]
                # Later rows see no fewer keys. The first key is a multiple of eight: a batch is in one page.
                row = (bundle << TWO) + THREE
                if row >= rows:
                    row = rows - ONE
                first = stop_of(task, queries, divide(bundle << TWO, group), keys)
                end = stop_of(task, queries, divide(row, group), keys)
                if end > keys:
                    end = keys
                if first > span:
                    first -= span
                else:
                    first = ZERO
                if first > end:
                    first = end
                first = first >> THREE << THREE
                piece = (divide(end - first + chunks - ONE, chunks) + SEVEN) >> THREE << THREE
                first += chunk * piece
                if first + piece < end:
                    end = first + piece
                at = arena + REST
                store_u64(at, first)
                store_u64(at + EIGHT, end)
                store_u64(at + SIXTEEN, span)
                store_u64(at + LAST, mask_step)
            job += warps

    return m.device(prepare)


@functools.cache
def make_fill_queries(m: Primitives) -> Body:
    """`fill_queries(context, task, arena, count)`: the bundle's queries to scratch, scaled, as f32.

    A quarter of the block takes a row. Behind its last element there are zeros, up to a multiple of eight.
    """
    u64, divide, thread_index, block_width = m.u64, m.divide_u32, m.thread_index, m.block_width
    load_u64, load_u32, load_layout, bits_f32 = m.load_task_u64, m.load_task_u32, m.load_u64, m.bits_f32
    store_f32, load_f32, kind_of, field_of = (
        m.store_scratch_f32,
        make_load_f32(m),
        make_kind_of(m),
        make_field(m),
    )
    itemsize, layout_of, is_strided = make_itemsize(m), make_layout_of(m), make_is_strided(m)
    ZERO, ONE, TWO, FOUR, FIVE, LOW = (u64(n) for n in (0, 1, 2, 4, 5, 7))
    ROWS, QUERIES, ROW = u64(ROWS_AT + QUERY), u64(QUERIES_AT), u64(QUERY_BYTES)
    SCALARS, BITS_DIM = u64(offset("scalars")), u64(DIM_BITS)
    INNERMOST, NOTHING = u64(layout_offset("strides") + 24), m.f32(0)

    def fill_queries(context: Any, task: Any, arena: Any, count: Any) -> None:
        dim = field_of(task, ZERO, BITS_DIM) + ONE
        padded = (dim + LOW) & ~LOW
        kind = kind_of(task, ZERO)
        step = itemsize(kind)
        if is_strided(task):
            step *= load_layout(layout_of(context, task, ZERO) + INNERMOST)
        scale = bits_f32(load_u32(task + SCALARS))
        quarter, ahead = block_width() >> TWO, FOUR
        if quarter == ZERO:
            quarter, ahead = ONE, ONE
        row = divide(thread_index(), quarter)
        start = thread_index() - row * quarter
        while row < count:
            query = load_u64(arena + ROWS + (row << FIVE))
            d = start
            while d < padded:
                element = NOTHING
                if d < dim:
                    element = load_f32(kind, query + d * step) * scale
                store_f32(arena + QUERIES + row * ROW + (d << TWO), element)
                d += quarter
            row += ahead

    return m.device(fill_queries)


def _make_attention(m: Primitives, rows_at_once: int) -> Body:
    u64, f32, divide = m.u64, m.f32, m.divide_u32
    thread_index, barrier, block_width, warp_width = m.thread_index, m.barrier, m.block_width, m.warp_width
    load_u64, load_u32, load_layout, load_pair = (
        m.load_task_u64,
        m.load_task_u32,
        m.load_u64,
        m.load_task_pair,
    )
    kind_of, field_of, shape_of = make_kind_of(m), make_field(m), make_shape(m)
    layout_of, itemsize, load_i64 = make_layout_of(m), make_itemsize(m), make_load_i64(m)
    prepare, merge, single, join = make_prepare(m), make_merge(m), make_single(m), make_join(m)
    fill_queries, (_, store_scratch) = make_fill_queries(m), make_scratch8(m)
    wide, many = rows_at_once > 0, rows_at_once > 1
    if wide:
        bundle_up, (fetch, load) = make_bundle(m, rows_at_once), make_fetch(m)
    ZERO, ONE, TWO, THREE, FOUR, FIVE, SEVEN = (u64(n) for n in (0, 1, 2, 3, 4, 5, 7))
    FIFTEEN, SIXTEEN, THIRTY_ONE = u64(15), u64(16), u64(31)
    COUNT, TILES, SCALARS = (u64(offset(n)) for n in ("count", "tiles", "scalars"))
    FIRST, IS_PAGED, F32 = u64(ATTENTION_IDS), u64(PAGED), u64(DType.F32)
    AT_KEYS, AT_PAGE, AT_PAGES = u64(KEYS), u64(PAGE), u64(PAGES)
    FIFTH, FIFTH_PLACE = u64(FIFTH_INPUT), u64(OUTPUT + 1)
    KEYS_PLACE, VALUES_PLACE, REST, TOTALS = u64(KEYS_AT), u64(VALUES_AT), u64(REST_AT), u64(TOTALS_AT)
    BITS_DIM, AT_CHUNKS, BITS_CHUNKS = u64(DIM_BITS), u64(CHUNK_AT), u64(CHUNK_BITS)
    AT_GROUP, BITS_GROUP, STRIDES = u64(GROUP_AT), u64(GROUP_BITS), u64(layout_offset("strides"))
    WORKING, EIGHT_LANES, SIXTEEN_LANES = u64(MOST_THREADS), u64(8 * 8), u64(16 * 8)
    NOTHING, LEAST = f32(0), f32(-np.inf)
    NOTHING8 = (NOTHING,) * 8
    OK, OUT_OF_RANGE = np.int32(Status.OK), np.int32(Status.INDEX_OUT_OF_RANGE)

    def key_count(context: Any, task: Any, paged: Any, batch: Any) -> Any:
        """(keys of a sequence, whether that is a number that its pages can hold)"""
        if not paged:
            return load_u32(task + SCALARS + AT_KEYS), True
        kind = kind_of(task, FIFTH_PLACE)
        step = load_layout(layout_of(context, task, FIFTH_PLACE) + STRIDES) * itemsize(kind)
        length = u64(load_i64(kind, load_u64(task + SCALARS + FIFTH) + batch * step))
        # A negative one is larger than any number of keys.
        if length > load_u32(task + SCALARS + AT_PAGE) * load_u32(task + SCALARS + AT_PAGES):
            return ZERO, False
        return length, True

    key_count = m.device(key_count)

    def ragged(task: Any, arena: Any, place: Any) -> Any:
        """0 where 16-byte accesses serve all rows of the keys, or of the values."""
        first, page = load_pair(arena + place)
        key, step = load_pair(arena + place + SIXTEEN)
        return ((first | page | key) & FIFTEEN) | (step ^ itemsize(kind_of(task, ZERO)))

    ragged = m.device(ragged)

    def attend(context: Any, task: Any, paged: Any, unit: Any, arena: Any) -> Any:
        heads, queries = shape_of(context, task, paged)
        dim = field_of(task, ZERO, BITS_DIM) + ONE
        rows = queries * (field_of(task, AT_GROUP, BITS_GROUP) + ONE)
        bundles = (rows + THREE) >> TWO
        chunks = field_of(task, AT_CHUNKS, BITS_CHUNKS) + ONE
        rest = divide(unit, chunks)
        pair = divide(rest, bundles)
        bundle = rest - pair * bundles
        keys, fine = key_count(context, task, paged, divide(pair, heads))
        prepare(context, task, paged, arena, pair, bundle, unit - rest * chunks, keys)
        count = rows - (bundle << TWO)
        if count > FOUR:
            count = FOUR
        lane_bits = ZERO
        if warp_width() > ONE:
            lane_bits = FIVE
            if dim <= EIGHT_LANES:
                lane_bits = THREE
            elif dim <= SIXTEEN_LANES:
                lane_bits = FOUR
        groups = block_width()
        if groups > WORKING:
            groups = WORKING
        groups >>= lane_bits
        thread = thread_index()
        group, part = thread >> lane_bits, thread & ((ONE << lane_bits) - ONE)
        parts = (dim + SEVEN) >> THREE
        missing = not fine
        barrier()

        vector = ragged(task, arena, KEYS_PLACE) | ragged(task, arena, VALUES_PLACE) | (dim & SEVEN) == ZERO
        batches = False
        largest, sum, total = LEAST, NOTHING, NOTHING8
        if many:
            tops = (LEAST, LEAST, LEAST, LEAST)
            sums = (NOTHING, NOTHING, NOTHING, NOTHING)
            totals = (NOTHING8, NOTHING8, NOTHING8, NOTHING8)
        if wide:
            batches = vector and warp_width() > ONE
            if paged and load_u32(task + SCALARS + AT_PAGE) & SEVEN != ZERO:
                batches = False  # a batch would be in several pages
            if batches:
                kind = kind_of(task, ZERO)
                batch_bits = THREE
                if kind == F32:
                    batch_bits = TWO
                own = part < parts
                skip = (part << THREE) * itemsize(kind)
                first, end = load_pair(arena + REST)
                key = first + (group << batch_bits)
                # The lanes of a warp stay together: all go on while their first group has a key.
                turn = first + ((thread & ~THIRTY_ONE) >> lane_bits << batch_bits)
                if group >= groups:
                    turn = end
                    key = end
                n, page, inside, there, lost = fetch(task, arena, paged, ONE << batch_bits, key, end)
                missing = missing or lost
                k = load(arena, KEYS_PLACE, skip, there and own, kind == F32, page, inside, n)
                v = load(arena, VALUES_PLACE, skip, there and own, kind == F32, page, inside, n)
        fill_queries(context, task, arena, count)
        barrier()
        if wide:
            if batches:
                leap = groups << batch_bits
                found = bundle_up(
                    task,
                    paged,
                    arena,
                    part,
                    own,
                    lane_bits,
                    batch_bits,
                    skip,
                    turn,
                    key,
                    end,
                    leap,
                    k,
                    v,
                    there,
                )
                if many:
                    tops, sums, totals = found[0], found[1], found[2]
                else:
                    largest, sum, total = found[0], found[1], found[2]
                missing = missing or found[3]
        row = ZERO
        while row < count:
            if many:
                largest, sum, total = tops[0], sums[0], totals[0]
                tops = (tops[1], tops[2], tops[3], tops[0])
                sums = (sums[1], sums[2], sums[3], sums[0])
                totals = (totals[1], totals[2], totals[3], totals[0])
            if not batches:
                largest, sum, lost = single(task, paged, arena, row, vector, group, part, lane_bits, groups)
                missing = missing or lost
            elif group < groups and part < parts:
                store_scratch(arena + TOTALS + ((group * parts + part) << FIVE), total)
            join(context, task, arena, row, group, part, lane_bits, groups, largest, sum)
            row += ONE
        return missing

    attend = m.device(attend)

    def attention(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        paged = (load_u32(task) - FIRST) & ONE == IS_PAGED
        tiles = load_u32(task + TILES)
        chunks = field_of(task, AT_CHUNKS, BITS_CHUNKS) + ONE
        if chunks > ONE and tile == tiles:
            merge(context, task, paged)
            return OK
        _, queries = shape_of(context, task, paged)
        rows = queries * (field_of(task, AT_GROUP, BITS_GROUP) + ONE)
        units = load_u64(task + COUNT) * ((rows + THREE) >> TWO) * chunks
        share = units
        if tiles > ONE:
            share = divide(units + tiles - ONE, tiles)
        unit = tile * share
        end = unit + share
        if end > units:
            end = units
        status = OK
        while unit < end:
            if attend(context, task, paged, unit, arena):
                status = OUT_OF_RANGE
            unit += ONE
        return status

    return attention


def make_attention(m: Primitives) -> Body:
    """The body of both operators where a unit is one query."""
    return _make_attention(m, 1)


def make_attention_many(m: Primitives) -> Body:
    """The body of both operators where a unit is up to four queries."""
    return _make_attention(m, BUNDLE)


def make_attention_single(m: Primitives) -> Body:
    """The same for a machine whose warps are single threads: it never takes keys in batches."""
    return _make_attention(m, 0)
