"""What attention's bodies share: where a task and a unit say what, and steps that every way of working takes.

A unit is described in scratch by `make_prepare` in `attend`, for all threads of the block to read.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from ...descriptor import FIFTH_INPUT, LAYOUT_BYTES, DType, layout_offset, offset
from ...machines.base import Body, Primitives
from ...protocol import ARENA_BYTES
from ..elements import make_itemsize, make_load_f32, make_load_i64
from ..operands import make_address_of, make_is_strided, make_kind_of, make_layout_of

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
#   of the keys, and of the values: the first, bytes from page to page, key to key, element to element
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
    """`steps_of(context, task, place, heads, rows, dim)`: bytes between neighbours along each of the 4 dims.

    An operand without a layout is [.., heads, rows, dim] without gaps.
    """
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
