"""Attention: queries, keys and values arrive, weighted means of the values leave.

The work is cut into units: one chunk of the keys of one kv head, for up to four queries that share it (a
bundle: query heads of the group, then neighbouring queries), so that keys and values are read once for all of
them. A unit's result is a largest score, a sum of exp(score - largest) and a sum of values so weighted. With
one chunk it is written as it is; with more it goes to the workspace, and the merge call joins the chunks.

Within a unit a group of 8, 16 or 32 lanes works on eight keys at a time (four of f32): each lane has eight
elements of every key, a 16-byte access. Lanes exchange partial products until each has the whole score of one
key. While one batch is computed with, the next is on its way. Where rows of keys or values are not aligned,
not contiguous, or not a multiple of eight long, and on a machine whose warps are single threads, a group
works on one key at a time instead, on any part of it, with its sums in scratch.

A key whose weight is exactly 0, because it is masked or far below the largest, takes nothing from its value,
also where that is infinite or NaN.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np

from ...descriptor import FIFTH_INPUT, LAYOUT_BYTES, DType, Status, layout_offset, offset
from ...machines.base import Body, Primitives
from ...protocol import ARENA_BYTES
from ..chunks import make_at, make_chunk_count, make_fill8, make_load8, make_unpack8
from ..elements import make_itemsize, make_load_f32, make_load_i64, make_store_f32
from ..operands import OUTPUT, make_address_of, make_is_strided, make_kind_of, make_layout_of
from ..reductions import make_larger
from .table import ATTENTION_IDS

SDPA, PAGED = range(2)
MANY: Final = 2
"""From the kernel for one query a unit to that for several: it needs more registers, which it has to save."""

BUNDLE: Final = 4
"""Queries of a unit."""

LARGEST_DIM: Final = 256

# The scalars: f32 scale; a word of small numbers; then four 32-bit numbers, or two and the fifth address.
SMALL: Final = 4
DIM_BITS, CAUSAL_BITS, CHUNK_BITS, GROUP_BITS = 8, 2, 10, 12
CAUSAL_AT: Final = DIM_BITS
CHUNK_AT: Final = CAUSAL_AT + CAUSAL_BITS
GROUP_AT: Final = CHUNK_AT + CHUNK_BITS
KEYS, QUERIES, HEADS, WINDOW = 8, 12, 16, 20
PAGE, PAGES = 8, 12
assert GROUP_AT + GROUP_BITS == 32 and PAGES + 4 <= FIFTH_INPUT

NOT_CAUSAL, UPPER_LEFT, LOWER_RIGHT = range(3)

RECORD_HEAD: Final = 16
"""Bytes before the weighted values of a record in the workspace: f32 largest and sum, and 8 unused."""

# Scratch: what prepare writes for all threads, then what groups join.
#   a row of the bundle: its query, the first key behind those it sees, its mask, where its result goes
#   a place, of the keys and of the values: the first, and bytes from page to page, key to key, and element to
#   element
#   paging: the sequence's row of the table, bytes from entry to entry, keys a page, pages
#   the rest: first and last key of the chunk, most keys that a query sees, bytes from mask to mask
ROWS_AT: Final = 0
ROW_BYTES: Final = 32
QUERY, STOP, MASK, TARGET = 0, 8, 16, 24
KEYS_AT: Final = ROWS_AT + BUNDLE * ROW_BYTES
VALUES_AT: Final = KEYS_AT + 32
PAGING_AT: Final = VALUES_AT + 32
REST_AT: Final = PAGING_AT + 32
JOBS: Final = BUNDLE + 3
MOST_THREADS: Final = 256  # of a block that work; more are idle
MOST_GROUPS: Final = MOST_THREADS // 8
TOPS_AT: Final = REST_AT + 32  # f32 of each group
SUMS_AT: Final = TOPS_AT + 4 * MOST_GROUPS
QUERIES_AT: Final = SUMS_AT + 4 * MOST_GROUPS  # f32 of each row, scaled
QUERY_BYTES: Final = 4 * LARGEST_DIM
TOTALS_AT: Final = QUERIES_AT + BUNDLE * QUERY_BYTES  # f32 of each group: weighted values, eight a thread
assert TOTALS_AT + 4 * 8 * MOST_THREADS <= ARENA_BYTES and QUERIES_AT % 16 == 0


def record_bytes(dim: int) -> int:
    """Bytes that one chunk of one row takes in the workspace."""
    return RECORD_HEAD + (dim + 3) // 4 * 16


def pack_small(dim: int, causal: int, chunks: int, group: int) -> int:
    """The word of small numbers."""
    return dim - 1 | causal << CAUSAL_AT | chunks - 1 << CHUNK_AT | group - 1 << GROUP_AT


@functools.cache
def make_field(m: Primitives) -> Body:
    """`field_of(task, at, bits)`: a small number."""
    u64, load_u32 = m.u64, m.load_task_u32
    AT, ONE = u64(offset("scalars") + SMALL), u64(1)

    def field_of(task: Any, at: Any, bits: Any) -> Any:
        return (load_u32(task + AT) >> at) & ((ONE << bits) - ONE)

    return m.device(field_of)


@functools.cache
def make_shape(m: Primitives) -> Body:
    """`shape_of(context, task, paged)` -> (kv heads, queries): the sizes that a unit's number is made of."""
    u64, load_u64, load_u32 = m.u64, m.load_u64, m.load_task_u32
    layout_of = make_layout_of(m)
    SCALARS, AT_HEADS, AT_QUERIES = u64(offset("scalars")), u64(HEADS), u64(QUERIES)
    ONE, DIM_2 = u64(1), u64(layout_offset("shape") + 16)

    def shape_of(context: Any, task: Any, paged: Any) -> Any:
        if paged:
            return load_u64(layout_of(context, task, ONE) + DIM_2), ONE
        return load_u32(task + SCALARS + AT_HEADS), load_u32(task + SCALARS + AT_QUERIES)

    return m.device(shape_of)


@functools.cache
def make_steps(m: Primitives) -> Body:
    """`steps_of(context, task, place, heads, rows, dim)`: bytes from one element to the next along each of
    the 4 dims, where an operand without a layout is [.., heads, rows, dim] without gaps."""
    u64, load_u64 = m.u64, m.load_u64
    layout_of, is_strided, kind_of, itemsize = (
        make_layout_of(m),
        make_is_strided(m),
        make_kind_of(m),
        make_itemsize(m),
    )
    STRIDES, EIGHT, SIXTEEN, LAST = u64(layout_offset("strides")), u64(8), u64(16), u64(24)
    assert layout_offset("strides") + 32 <= LAYOUT_BYTES

    def steps_of(context: Any, task: Any, place: Any, heads: Any, rows: Any, dim: Any) -> Any:
        size = itemsize(kind_of(task, place))
        if is_strided(task):
            steps = layout_of(context, task, place) + STRIDES
            return (
                load_u64(steps) * size,
                load_u64(steps + EIGHT) * size,
                load_u64(steps + SIXTEEN) * size,
                load_u64(steps + LAST) * size,
            )
        row = dim * size
        return heads * rows * row, rows * row, row, size

    return m.device(steps_of)


@functools.cache
def make_row_place(m: Primitives) -> Body:
    """`row_place(context, task, paged, place, pair, row)`: address of a row of the queries, or of the output.

    Rows of a pair of batch and kv head are counted with the query heads of the group innermost.
    """
    u64, divide = m.u64, m.divide_u32
    address_of, field_of, shape_of, steps_of = make_address_of(m), make_field(m), make_shape(m), make_steps(m)
    ONE, BITS_DIM, AT_GROUP, BITS_GROUP = u64(1), u64(DIM_BITS), u64(GROUP_AT), u64(GROUP_BITS)
    ZERO = u64(0)

    def row_place(context: Any, task: Any, paged: Any, place: Any, pair: Any, row: Any) -> Any:
        heads, queries = shape_of(context, task, paged)
        group = field_of(task, AT_GROUP, BITS_GROUP) + ONE
        dim = field_of(task, ZERO, BITS_DIM) + ONE
        batch = divide(pair, heads)
        query = divide(row, group)
        head = (pair - batch * heads) * group + (row - query * group)
        steps = steps_of(context, task, place, heads * group, queries, dim)
        return address_of(task, place) + batch * steps[0] + head * steps[1] + query * steps[2]

    return m.device(row_place)


@functools.cache
def make_look_up(m: Primitives) -> Body:
    """`look_up(task, arena, paged, key)` -> (page, key within it, whether there is such a page)."""
    u64, divide, load_pair = m.u64, m.divide_u32, m.load_task_pair
    load_i64, kind_of = make_load_i64(m), make_kind_of(m)
    PAGING, SIXTEEN, ZERO, TABLES = u64(PAGING_AT), u64(16), u64(0), u64(3)

    def look_up(task: Any, arena: Any, paged: Any, key: Any) -> Any:
        page, inside, there = ZERO, key, True
        if paged:
            table, step = load_pair(arena + PAGING)
            length, pages = load_pair(arena + PAGING + SIXTEEN)
            turn = divide(key, length)
            inside = key - turn * length
            page = u64(load_i64(kind_of(task, TABLES), table + turn * step))  # negative: past all pages
            there = page < pages
        return page, inside, there

    return m.device(look_up)


@functools.cache
def make_admit(m: Primitives) -> Body:
    """`admit(task, arena, row, there, key, score)`: the score with its mask, -inf where the key is hidden."""
    u64, load_u8, load_pair = m.u64, m.load_u8, m.load_task_pair
    kind_of, load_f32 = make_kind_of(m), make_load_f32(m)
    ZERO, OF_MASK, BOOL, LEAST, NOTHING = u64(0), u64(3), u64(DType.BOOL), m.f32(-np.inf), m.f32(0)
    FIVE, SIXTEEN, AT_STOP, AT_MASK = u64(5), u64(16), u64(ROWS_AT + STOP), u64(ROWS_AT + MASK)
    REST, load_u64 = u64(REST_AT), m.load_task_u64
    assert ROW_BYTES == 1 << 5

    def admit(task: Any, arena: Any, row: Any, there: Any, key: Any, score: Any) -> Any:
        stop = load_u64(arena + AT_STOP + (row << FIVE))
        mask = load_u64(arena + AT_MASK + (row << FIVE))
        span, step = load_pair(arena + REST + SIXTEEN)
        result = LEAST
        if there and key < stop and key + span >= stop:
            result = score
            if mask != ZERO:
                kind = kind_of(task, OF_MASK)
                bias = NOTHING
                if kind == BOOL:
                    if load_u8(mask + key * step) == ZERO:
                        bias = LEAST
                else:
                    bias = load_f32(kind, mask + key * step)
                result = score + bias
                if bias == LEAST:
                    result = LEAST
        return result

    return m.device(admit)


@functools.cache
def make_base(m: Primitives) -> Body:
    """`base_of(largest)`: what scores are taken relative to: the largest, 0 where none takes part."""
    LEAST, NOTHING = m.f32(-np.inf), m.f32(0)

    def base_of(largest: Any) -> Any:
        if largest == LEAST:
            return NOTHING
        return largest

    return m.device(base_of)


@functools.cache
def make_dot8(m: Primitives) -> Body:
    """`dot8(v, w)`: the sum of eight products."""
    fma = m.fused_multiply_add

    def dot8(v: Any, w: Any) -> Any:
        total = fma(v[1], w[1], v[0] * w[0])
        total = fma(v[2], w[2], total)
        total = fma(v[3], w[3], total)
        total = fma(v[4], w[4], total)
        total = fma(v[5], w[5], total)
        total = fma(v[6], w[6], total)
        return fma(v[7], w[7], total)

    return m.device(dot8)


@functools.cache
def make_add_weighted8(m: Primitives) -> tuple[Body, Body]:
    """`add(total, weight, v)`: total + weight * v, and the same but total alone where the weight is 0."""
    fma, NOTHING = m.fused_multiply_add, m.f32(0)

    def add(total: Any, weight: Any, v: Any) -> Any:
        return (
            fma(weight, v[0], total[0]),
            fma(weight, v[1], total[1]),
            fma(weight, v[2], total[2]),
            fma(weight, v[3], total[3]),
            fma(weight, v[4], total[4]),
            fma(weight, v[5], total[5]),
            fma(weight, v[6], total[6]),
            fma(weight, v[7], total[7]),
        )

    add = m.device(add)

    def add_taken(total: Any, weight: Any, v: Any) -> Any:
        if weight != NOTHING:
            total = add(total, weight, v)
        return total

    return add, m.device(add_taken)


@functools.cache
def make_scale8(m: Primitives) -> Body:
    """`scale8(v, by)`: eight products."""

    def scale8(v: Any, by: Any) -> Any:
        return v[0] * by, v[1] * by, v[2] * by, v[3] * by, v[4] * by, v[5] * by, v[6] * by, v[7] * by

    return m.device(scale8)


@functools.cache
def make_scratch8(m: Primitives) -> tuple[Body, Body]:
    """`load(address)` and `store(address, v)` of eight f32 in scratch, on a 16-byte line."""
    u64, load_pair, bits_f32, store_f32 = m.u64, m.load_task_pair, m.bits_f32, m.store_scratch_f32
    P1, P2, P3, P4, P5, P6, P7 = (u64(4 * k) for k in range(1, 8))
    HALF = u64(32)

    def load(address: Any) -> Any:
        a, b = load_pair(address)
        c, d = load_pair(address + P4)
        return (
            bits_f32(a),
            bits_f32(a >> HALF),
            bits_f32(b),
            bits_f32(b >> HALF),
            bits_f32(c),
            bits_f32(c >> HALF),
            bits_f32(d),
            bits_f32(d >> HALF),
        )

    def store(address: Any, v: Any) -> None:
        store_f32(address, v[0])
        store_f32(address + P1, v[1])
        store_f32(address + P2, v[2])
        store_f32(address + P3, v[3])
        store_f32(address + P4, v[4])
        store_f32(address + P5, v[5])
        store_f32(address + P6, v[6])
        store_f32(address + P7, v[7])

    return m.device(load), m.device(store)


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
def make_load_batch(m: Primitives) -> Body:
    """`load_batch(live, wide, address, step, count)`: 16 bytes of each of eight keys, or 32 of each of four
    where `wide`, as 16 words. Behind the first `count` keys it loads the first again; 0 where not `live`."""
    u64, load_pair, at = m.u64, m.load_pair, make_at(m)
    ZERO, ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN, SIXTEEN = (u64(n) for n in (*range(8), 16))

    def load_batch(live: Any, wide: Any, address: Any, step: Any, count: Any) -> Any:
        a, b, c, d = (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO)
        e, f, g, h = (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO)
        if live:
            if wide:
                second, third = at(address, step, count, ONE), at(address, step, count, TWO)
                fourth = at(address, step, count, THREE)
                a, b = load_pair(address), load_pair(address + SIXTEEN)
                c, d = load_pair(second), load_pair(second + SIXTEEN)
                e, f = load_pair(third), load_pair(third + SIXTEEN)
                g, h = load_pair(fourth), load_pair(fourth + SIXTEEN)
            else:
                a, b = load_pair(address), load_pair(at(address, step, count, ONE))
                c, d = load_pair(at(address, step, count, TWO)), load_pair(at(address, step, count, THREE))
                e, f = load_pair(at(address, step, count, FOUR)), load_pair(at(address, step, count, FIVE))
                g, h = load_pair(at(address, step, count, SIX)), load_pair(at(address, step, count, SEVEN))
        return (
            a[0],
            a[1],
            b[0],
            b[1],
            c[0],
            c[1],
            d[0],
            d[1],
            e[0],
            e[1],
            f[0],
            f[1],
            g[0],
            g[1],
            h[0],
            h[1],
        )

    return m.device(load_batch)


@functools.cache
def make_gather_score(m: Primitives) -> Body:
    """`gather_score(part, lane_bits, d)`: lane k of every eight has the sum of d[k] over the group."""
    u64, shuffle = m.u64, m.shuffle_xor_f32
    ZERO, ONE, TWO, THREE, FOUR = (u64(n) for n in range(5))

    def gather_score(part: Any, lane_bits: Any, d: Any) -> Any:
        # Half of what is left is handed to the lane that keeps that half, so eight sums take 7 exchanges.
        a, b, c, e = d[0], d[1], d[2], d[3]
        p, q, r, s = d[4], d[5], d[6], d[7]
        if part & FOUR != ZERO:
            a, b, c, e, p, q, r, s = p, q, r, s, a, b, c, e
        a += shuffle(p, FOUR)
        b += shuffle(q, FOUR)
        c += shuffle(r, FOUR)
        e += shuffle(s, FOUR)
        if part & TWO != ZERO:
            a, b, c, e = c, e, a, b
        a += shuffle(c, TWO)
        b += shuffle(e, TWO)
        if part & ONE != ZERO:
            a, b = b, a
        a += shuffle(b, ONE)
        bit = THREE
        while bit < lane_bits:
            a += shuffle(a, ONE << bit)
            bit += ONE
        return a

    return m.device(gather_score)


@functools.cache
def make_share_weights(m: Primitives) -> Body:
    """`share_weights(part, w)`: the w of lanes 0 to 7 of every eight, in all of them."""
    u64, shuffle = m.u64, m.shuffle_xor_f32
    ZERO, ONE, TWO, FOUR = (u64(n) for n in (0, 1, 2, 4))

    def share_weights(part: Any, w: Any) -> Any:
        a, b = w, shuffle(w, ONE)
        if part & ONE != ZERO:
            a, b = b, a
        c, d = shuffle(a, TWO), shuffle(b, TWO)
        if part & TWO != ZERO:
            a, b, c, d = c, d, a, b
        e, f, g, h = shuffle(a, FOUR), shuffle(b, FOUR), shuffle(c, FOUR), shuffle(d, FOUR)
        if part & FOUR != ZERO:
            a, b, c, d, e, f, g, h = e, f, g, h, a, b, c, d
        return a, b, c, d, e, f, g, h

    return m.device(share_weights)


@functools.cache
def make_soften(m: Primitives) -> Body:
    """`soften(largest, sum, score)` -> (largest, sum, what earlier sums shrink by, weight of the score).

    The largest is that of every eight lanes, the sum each lane's own.
    """
    u64, f32, shuffle = m.u64, m.f32, m.shuffle_xor_f32
    larger, base_of, exp = make_larger(m), make_base(m), math.exp
    ONE, TWO, FOUR = u64(1), u64(2), u64(4)

    def soften(largest: Any, sum: Any, score: Any) -> Any:
        top = larger(largest, score)
        top = larger(top, shuffle(top, ONE))
        top = larger(top, shuffle(top, TWO))
        top = larger(top, shuffle(top, FOUR))
        base = base_of(top)
        shrink = f32(exp(largest - base))
        weight = f32(exp(score - base))
        return top, sum * shrink + weight, shrink, weight

    return m.device(soften)


@functools.cache
def make_products(m: Primitives, rows: int) -> Body:
    """`products(kind, raw, q)`: a lane's part of the scores of a batch, eight; with rows=4 four such, of a
    tuple of four queries."""
    u64, unpack8, dot8 = m.u64, make_unpack8(m), make_dot8(m)
    ZERO, F32, F16, BF16, NOTHING = u64(0), u64(DType.F32), u64(DType.F16), u64(DType.BF16), m.f32(0)

    def narrow_1(kind: Any, raw: Any, q: Any) -> Any:
        return (
            dot8(unpack8(kind, (raw[0], raw[1], ZERO, ZERO)), q),
            dot8(unpack8(kind, (raw[2], raw[3], ZERO, ZERO)), q),
            dot8(unpack8(kind, (raw[4], raw[5], ZERO, ZERO)), q),
            dot8(unpack8(kind, (raw[6], raw[7], ZERO, ZERO)), q),
            dot8(unpack8(kind, (raw[8], raw[9], ZERO, ZERO)), q),
            dot8(unpack8(kind, (raw[10], raw[11], ZERO, ZERO)), q),
            dot8(unpack8(kind, (raw[12], raw[13], ZERO, ZERO)), q),
            dot8(unpack8(kind, (raw[14], raw[15], ZERO, ZERO)), q),
        )

    narrow_1 = m.device(narrow_1)

    def products_1(kind: Any, raw: Any, q: Any) -> Any:
        if kind == F16:
            return narrow_1(F16, raw, q)
        if kind == BF16:
            return narrow_1(BF16, raw, q)
        return (
            dot8(unpack8(F32, (raw[0], raw[1], raw[2], raw[3])), q),
            dot8(unpack8(F32, (raw[4], raw[5], raw[6], raw[7])), q),
            dot8(unpack8(F32, (raw[8], raw[9], raw[10], raw[11])), q),
            dot8(unpack8(F32, (raw[12], raw[13], raw[14], raw[15])), q),
            NOTHING,
            NOTHING,
            NOTHING,
            NOTHING,
        )

    def four(v: Any, q: Any) -> Any:
        return dot8(v, q[0]), dot8(v, q[1]), dot8(v, q[2]), dot8(v, q[3])

    four = m.device(four)

    def narrow_4(kind: Any, raw: Any, q: Any) -> Any:
        a = four(unpack8(kind, (raw[0], raw[1], ZERO, ZERO)), q)
        b = four(unpack8(kind, (raw[2], raw[3], ZERO, ZERO)), q)
        c = four(unpack8(kind, (raw[4], raw[5], ZERO, ZERO)), q)
        d = four(unpack8(kind, (raw[6], raw[7], ZERO, ZERO)), q)
        e = four(unpack8(kind, (raw[8], raw[9], ZERO, ZERO)), q)
        f = four(unpack8(kind, (raw[10], raw[11], ZERO, ZERO)), q)
        g = four(unpack8(kind, (raw[12], raw[13], ZERO, ZERO)), q)
        h = four(unpack8(kind, (raw[14], raw[15], ZERO, ZERO)), q)
        return (
            (a[0], b[0], c[0], d[0], e[0], f[0], g[0], h[0]),
            (a[1], b[1], c[1], d[1], e[1], f[1], g[1], h[1]),
            (a[2], b[2], c[2], d[2], e[2], f[2], g[2], h[2]),
            (a[3], b[3], c[3], d[3], e[3], f[3], g[3], h[3]),
        )

    narrow_4 = m.device(narrow_4)

    def products_4(kind: Any, raw: Any, q: Any) -> Any:
        if kind == F16:
            return narrow_4(F16, raw, q)
        if kind == BF16:
            return narrow_4(BF16, raw, q)
        a = four(unpack8(F32, (raw[0], raw[1], raw[2], raw[3])), q)
        b = four(unpack8(F32, (raw[4], raw[5], raw[6], raw[7])), q)
        c = four(unpack8(F32, (raw[8], raw[9], raw[10], raw[11])), q)
        d = four(unpack8(F32, (raw[12], raw[13], raw[14], raw[15])), q)
        return (
            (a[0], b[0], c[0], d[0], NOTHING, NOTHING, NOTHING, NOTHING),
            (a[1], b[1], c[1], d[1], NOTHING, NOTHING, NOTHING, NOTHING),
            (a[2], b[2], c[2], d[2], NOTHING, NOTHING, NOTHING, NOTHING),
            (a[3], b[3], c[3], d[3], NOTHING, NOTHING, NOTHING, NOTHING),
        )

    return m.device(products_4 if rows == BUNDLE else products_1)


@functools.cache
def make_blend(m: Primitives, rows: int) -> Body:
    """`blend(kind, raw, w, totals, holes, batch)`: totals with a batch of values, each with its weight.

    With rows=4 for four rows. holes: some weight is 0, so its value may not even be multiplied with.
    """
    u64, unpack8 = m.u64, make_unpack8(m)
    add, add_taken = make_add_weighted8(m)
    ZERO, ONE, F32, F16, BF16 = u64(0), u64(1), u64(DType.F32), u64(DType.F16), u64(DType.BF16)

    def next_key(raw: Any) -> Any:
        return (*raw[2:], raw[0], raw[1])

    def next_weight(w: Any) -> Any:
        return (*w[1:], w[0])

    def unpack_narrow(kind: Any, raw: Any) -> Any:
        if kind == F16:
            return unpack8(F16, (raw[0], raw[1], ZERO, ZERO))
        return unpack8(BF16, (raw[0], raw[1], ZERO, ZERO))

    next_key, next_weight, unpack_narrow = m.device(next_key), m.device(next_weight), m.device(unpack_narrow)

    def narrow_1(kind: Any, raw: Any, w: Any, total: Any) -> Any:
        total = add(total, w[0], unpack8(kind, (raw[0], raw[1], ZERO, ZERO)))
        total = add(total, w[1], unpack8(kind, (raw[2], raw[3], ZERO, ZERO)))
        total = add(total, w[2], unpack8(kind, (raw[4], raw[5], ZERO, ZERO)))
        total = add(total, w[3], unpack8(kind, (raw[6], raw[7], ZERO, ZERO)))
        total = add(total, w[4], unpack8(kind, (raw[8], raw[9], ZERO, ZERO)))
        total = add(total, w[5], unpack8(kind, (raw[10], raw[11], ZERO, ZERO)))
        total = add(total, w[6], unpack8(kind, (raw[12], raw[13], ZERO, ZERO)))
        return add(total, w[7], unpack8(kind, (raw[14], raw[15], ZERO, ZERO)))

    narrow_1 = m.device(narrow_1)

    def blend_1(kind: Any, raw: Any, w: Any, total: Any, holes: Any, batch: Any) -> Any:
        if kind == F32:
            total = add_taken(total, w[0], unpack8(F32, (raw[0], raw[1], raw[2], raw[3])))
            total = add_taken(total, w[1], unpack8(F32, (raw[4], raw[5], raw[6], raw[7])))
            total = add_taken(total, w[2], unpack8(F32, (raw[8], raw[9], raw[10], raw[11])))
            total = add_taken(total, w[3], unpack8(F32, (raw[12], raw[13], raw[14], raw[15])))
        elif holes:
            while batch > ZERO:  # the same few instructions for each key: this is rare
                total = add_taken(total, w[0], unpack_narrow(kind, raw))
                raw, w = next_key(raw), next_weight(w)
                batch -= ONE
        elif kind == F16:
            total = narrow_1(F16, raw, w, total)
        else:
            total = narrow_1(BF16, raw, w, total)
        return total

    def add4(t: Any, w: Any, v: Any) -> Any:
        return add(t[0], w[0], v), add(t[1], w[1], v), add(t[2], w[2], v), add(t[3], w[3], v)

    def taken4(t: Any, w: Any, v: Any) -> Any:
        return (
            add_taken(t[0], w[0], v),
            add_taken(t[1], w[1], v),
            add_taken(t[2], w[2], v),
            add_taken(t[3], w[3], v),
        )

    add4, taken4 = m.device(add4), m.device(taken4)

    def narrow_4(kind: Any, raw: Any, w: Any, t: Any) -> Any:
        a, b, c, d = w
        t = add4(t, (a[0], b[0], c[0], d[0]), unpack8(kind, (raw[0], raw[1], ZERO, ZERO)))
        t = add4(t, (a[1], b[1], c[1], d[1]), unpack8(kind, (raw[2], raw[3], ZERO, ZERO)))
        t = add4(t, (a[2], b[2], c[2], d[2]), unpack8(kind, (raw[4], raw[5], ZERO, ZERO)))
        t = add4(t, (a[3], b[3], c[3], d[3]), unpack8(kind, (raw[6], raw[7], ZERO, ZERO)))
        t = add4(t, (a[4], b[4], c[4], d[4]), unpack8(kind, (raw[8], raw[9], ZERO, ZERO)))
        t = add4(t, (a[5], b[5], c[5], d[5]), unpack8(kind, (raw[10], raw[11], ZERO, ZERO)))
        t = add4(t, (a[6], b[6], c[6], d[6]), unpack8(kind, (raw[12], raw[13], ZERO, ZERO)))
        return add4(t, (a[7], b[7], c[7], d[7]), unpack8(kind, (raw[14], raw[15], ZERO, ZERO)))

    narrow_4 = m.device(narrow_4)

    def blend_4(kind: Any, raw: Any, w: Any, t: Any, holes: Any, batch: Any) -> Any:
        a, b, c, d = w
        if kind == F32:
            t = taken4(t, (a[0], b[0], c[0], d[0]), unpack8(F32, (raw[0], raw[1], raw[2], raw[3])))
            t = taken4(t, (a[1], b[1], c[1], d[1]), unpack8(F32, (raw[4], raw[5], raw[6], raw[7])))
            t = taken4(t, (a[2], b[2], c[2], d[2]), unpack8(F32, (raw[8], raw[9], raw[10], raw[11])))
            t = taken4(t, (a[3], b[3], c[3], d[3]), unpack8(F32, (raw[12], raw[13], raw[14], raw[15])))
        elif holes:
            while batch > ZERO:
                t = taken4(t, (a[0], b[0], c[0], d[0]), unpack_narrow(kind, raw))
                raw, a, b, c, d = (
                    next_key(raw),
                    next_weight(a),
                    next_weight(b),
                    next_weight(c),
                    next_weight(d),
                )
                batch -= ONE
        elif kind == F16:
            t = narrow_4(F16, raw, w, t)
        else:
            t = narrow_4(BF16, raw, w, t)
        return t

    return m.device(blend_4 if rows == BUNDLE else blend_1)


@functools.cache
def make_fetch(m: Primitives) -> tuple[Body, Body]:
    """`fetch(task, arena, paged, batch, key, end)` -> (keys of the batch, page, key within it, whether it is
    there, whether it is missing), and `load(arena, place, skip, live, wide, page, inside, count)` of it."""
    u64, load_pair, load_u64 = m.u64, m.load_task_pair, m.load_task_u64
    look_up, load_batch = make_look_up(m), make_load_batch(m)
    ZERO, SIXTEEN = u64(0), u64(16)

    def fetch(task: Any, arena: Any, paged: Any, batch: Any, key: Any, end: Any) -> Any:
        count, page, inside, there = ZERO, ZERO, ZERO, False
        if key < end:
            count = end - key
            if count > batch:
                count = batch
            page, inside, there = look_up(task, arena, paged, key)
        return count, page, inside, there, key < end and not there

    def load(
        arena: Any, place: Any, skip: Any, live: Any, wide: Any, page: Any, inside: Any, count: Any
    ) -> Any:
        step = load_u64(arena + place + SIXTEEN)
        first, page_step = load_pair(arena + place)
        return load_batch(live, wide, first + skip + page * page_step + inside * step, step, count)

    return m.device(fetch), m.device(load)


@functools.cache
def make_bundle(m: Primitives, rows: int) -> Body:
    """`bundle(...)`: 1 or 4 rows, a batch of keys at a time, the first of which has been loaded.

    Returns for each row the largest score, the sum and the weighted values; and whether a page was missing.
    """
    u64, f32 = m.u64, m.f32
    shuffle, kind_of, admit, soften, scale8 = (
        m.shuffle_xor_f32,
        make_kind_of(m),
        make_admit(m),
        make_soften(m),
        make_scale8(m),
    )
    (fetch, load), (load_scratch, _) = make_fetch(m), make_scratch8(m)
    gather_score, share_weights = make_gather_score(m), make_share_weights(m)
    products, blend = make_products(m, rows), make_blend(m, rows)
    ZERO, ONE, TWO, THREE, FOUR, FIVE, SEVEN = (u64(n) for n in (0, 1, 2, 3, 4, 5, 7))
    KEYS, VALUES, F32 = u64(KEYS_AT), u64(VALUES_AT), u64(DType.F32)
    QUERIES, ROW = u64(QUERIES_AT), u64(QUERY_BYTES)
    NOTHING, UNIT, LEAST = f32(0), f32(1), f32(-np.inf)
    NOTHING8 = (NOTHING,) * 8

    def load_query(arena: Any, row: Any, part: Any, own: Any) -> Any:
        if own:
            return load_scratch(arena + QUERIES + row * ROW + (part << FIVE))
        return NOTHING8

    def sum_lanes(sum: Any) -> Any:
        sum += shuffle(sum, ONE)
        sum += shuffle(sum, TWO)
        return sum + shuffle(sum, FOUR)

    load_query, sum_lanes = m.device(load_query), m.device(sum_lanes)

    def any_hole(hole: Any) -> Any:
        """Whether some lane of the eight has one."""
        holes = NOTHING
        if hole:
            holes = UNIT
        return sum_lanes(holes) != NOTHING

    any_hole = m.device(any_hole)

    def bundle_1(
        task: Any,
        paged: Any,
        arena: Any,
        part: Any,
        own: Any,
        lane_bits: Any,
        batch_bits: Any,
        skip: Any,
        turn: Any,
        key: Any,
        end: Any,
        leap: Any,
        k: Any,
        v: Any,
        there: Any,
    ) -> Any:
        kind = kind_of(task, ZERO)
        wide, batch, lane = kind == F32, ONE << batch_bits, part & SEVEN
        q = load_query(arena, ZERO, part, own)
        largest, sum, total, missing = LEAST, NOTHING, NOTHING8, False
        while turn < end:
            d = products(kind, k, q)
            mine = key + lane
            there = there and lane < batch and mine < end
            key += leap
            turn += leap
            count, page, inside, coming, lost = fetch(task, arena, paged, batch, key, end)
            missing = missing or lost
            k = load(arena, KEYS, skip, coming and own, wide, page, inside, count)
            score = admit(task, arena, ZERO, there, mine, gather_score(part, lane_bits, d))
            largest, sum, shrink, w = soften(largest, sum, score)
            holes = any_hole(w == NOTHING)
            total = blend(kind, v, share_weights(part, w), scale8(total, shrink), holes, batch)
            v = load(arena, VALUES, skip, coming and own, wide, page, inside, count)
            there = coming
        return largest, sum_lanes(sum), total, missing

    def bundle_4(
        task: Any,
        paged: Any,
        arena: Any,
        part: Any,
        own: Any,
        lane_bits: Any,
        batch_bits: Any,
        skip: Any,
        turn: Any,
        key: Any,
        end: Any,
        leap: Any,
        k: Any,
        v: Any,
        there: Any,
    ) -> Any:
        kind = kind_of(task, ZERO)
        wide, batch, lane = kind == F32, ONE << batch_bits, part & SEVEN
        top_0, top_1, top_2, top_3 = LEAST, LEAST, LEAST, LEAST
        sum_0, sum_1, sum_2, sum_3 = NOTHING, NOTHING, NOTHING, NOTHING
        t = (NOTHING8, NOTHING8, NOTHING8, NOTHING8)
        missing = False
        while turn < end:
            # The queries are read again for each batch: to hold all four takes registers that are short here.
            d = products(
                kind,
                k,
                (
                    load_query(arena, ZERO, part, own),
                    load_query(arena, ONE, part, own),
                    load_query(arena, TWO, part, own),
                    load_query(arena, THREE, part, own),
                ),
            )
            mine = key + lane
            there = there and lane < batch and mine < end
            key += leap
            turn += leap
            count, page, inside, coming, lost = fetch(task, arena, paged, batch, key, end)
            missing = missing or lost
            k = load(arena, KEYS, skip, coming and own, wide, page, inside, count)
            score = admit(task, arena, ZERO, there, mine, gather_score(part, lane_bits, d[0]))
            top_0, sum_0, shrink, w_0 = soften(top_0, sum_0, score)
            t_0 = scale8(t[0], shrink)
            score = admit(task, arena, ONE, there, mine, gather_score(part, lane_bits, d[1]))
            top_1, sum_1, shrink, w_1 = soften(top_1, sum_1, score)
            t_1 = scale8(t[1], shrink)
            score = admit(task, arena, TWO, there, mine, gather_score(part, lane_bits, d[2]))
            top_2, sum_2, shrink, w_2 = soften(top_2, sum_2, score)
            t_2 = scale8(t[2], shrink)
            score = admit(task, arena, THREE, there, mine, gather_score(part, lane_bits, d[3]))
            top_3, sum_3, shrink, w_3 = soften(top_3, sum_3, score)
            t_3 = scale8(t[3], shrink)
            holes = any_hole(w_0 == NOTHING or w_1 == NOTHING or w_2 == NOTHING or w_3 == NOTHING)
            w = (
                share_weights(part, w_0),
                share_weights(part, w_1),
                share_weights(part, w_2),
                share_weights(part, w_3),
            )
            t = blend(kind, v, w, (t_0, t_1, t_2, t_3), holes, batch)
            v = load(arena, VALUES, skip, coming and own, wide, page, inside, count)
            there = coming
        return (
            (top_0, top_1, top_2, top_3),
            (sum_lanes(sum_0), sum_lanes(sum_1), sum_lanes(sum_2), sum_lanes(sum_3)),
            t,
            missing,
        )

    return m.device(bundle_4 if rows == BUNDLE else bundle_1)


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
                # Later rows see no fewer keys. The first key is a multiple of eight, so that a batch is in
                # one page.
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
    """`fill_queries(context, task, paged, arena, count)`: the bundle's queries to scratch, scaled, as f32.

    A quarter of the block takes a row. Behind a row's last element there are zeros, to a multiple of eight.
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
    ZERO, ONE, TWO, FIVE, LOW = (u64(n) for n in (0, 1, 2, 5, 7))
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
        quarter, ahead = block_width() >> TWO, u64(4)
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
