"""What the kernels of products share: how a task says what it is, and small pieces of their bodies."""

from __future__ import annotations

import functools
from typing import Any, Final

from ...descriptor import LAYOUT_BYTES, Flag, layout_offset, offset
from ...machines.base import Body, Primitives
from ...protocol import CONTEXT, field
from ..elements import make_load_f32, make_store_f32
from ..operands import OUTPUT, make_address_of, make_element_of

ROWS, COLUMNS, TILES = range(3)
BIAS: Final = 2
"""Place of the bias. The other inputs are a and b, or the matrix and the vector, in either order."""

AT_ONCE: Final = 4
"""Rows that a team of ROWS works on together: each element of the vector is unpacked once for them."""

# Scalars: k, then four 32-bit words.
K_AT: Final = offset("scalars")
ROWS_AT: Final = K_AT + 8
COLS_AT: Final = K_AT + 12  # TILES: columns; else log2 of a team's threads, or of neighbours in COLUMNS
PIECES_AT: Final = K_AT + 16
MATRIX_AT: Final = K_AT + 20  # place of the matrix; the vector has the other one


@functools.cache
def make_stride_of(m: Primitives) -> Body:
    """`stride_of(context, task, place, back, default)`: stride of the dim `back` from the end, in elements.

    `default` where the operands are contiguous.
    """
    u64, load_u64, load_u32 = m.u64, m.load_u64, m.load_u32
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    STRIDED, HALF, ZERO, ONE, TWO, FOUR, EIGHT = (u64(n) for n in (Flag.STRIDED, 32, 0, 1, 2, 4, 8))
    SLOTS, LAYOUTS, SIZE = u64(offset("layouts")), u64(field(CONTEXT, "layouts")), u64(LAYOUT_BYTES)
    NDIM, STRIDES, SLOT_MASK = u64(layout_offset("ndim")), u64(layout_offset("strides")), u64(0xFFFF)

    def stride_of(context: Any, task: Any, place: Any, back: Any, default: Any) -> Any:
        if (load_task_u64(task) >> HALF) & STRIDED == ZERO:
            return default
        pair = load_task_u32(task + SLOTS + ((place >> ONE) << TWO))
        slot = (pair >> ((place & ONE) << FOUR)) & SLOT_MASK
        layout = load_u64(context + LAYOUTS) + slot * SIZE
        return load_u64(layout + STRIDES + (load_u32(layout + NDIM) - back) * EIGHT)

    return m.device(stride_of)


@functools.cache
def make_dtype_of(m: Primitives) -> Body:
    """`dtype_of(task)`: DType code, the same for all operands."""
    u64, load_task_u32 = m.u64, m.load_task_u32
    DTYPES, FIFTEEN = u64(offset("dtypes")), u64(15)

    def dtype_of(task: Any) -> Any:
        return load_task_u32(task + DTYPES) & FIFTEEN

    return m.device(dtype_of)


@functools.cache
def make_base_of(m: Primitives) -> Body:
    """`base_of(context, task, place, batch, size)`: address of a matrix, or vector, of `size` elements."""
    u64 = m.u64
    address_of, element_of = make_address_of(m), make_element_of(m)
    ZERO = u64(0)

    def base_of(context: Any, task: Any, place: Any, batch: Any, size: Any) -> Any:
        if batch == ZERO:  # mostly there is but one
            return address_of(task, place)
        return element_of(context, task, place, batch * size)

    return m.device(base_of)


@functools.cache
def make_finish(m: Primitives) -> Body:
    """`finish(context, task, kind, row, value)`: output element `row` of a product with one column.

    Counted over the batch. In the workspace where k is in pieces, and there this call's; else with the bias.
    """
    u64 = m.u64
    address_of, element_of = make_address_of(m), make_element_of(m)
    load_element, store_element = make_load_f32(m), make_store_f32(m)
    OUT, THE_BIAS, ZERO = u64(OUTPUT), u64(BIAS), u64(0)

    def finish(context: Any, task: Any, kind: Any, row: Any, value: Any) -> None:
        if address_of(task, THE_BIAS) != ZERO:
            value += load_element(kind, element_of(context, task, THE_BIAS, row))
        store_element(kind, element_of(context, task, OUT, row), value)

    return m.device(finish)


@functools.cache
def make_leave_sum(m: Primitives) -> Body:
    """`leave_sum(context, task, kind, piece, row, value)`: a sum over one piece of k."""
    u64, store_f32 = m.u64, m.store_f32
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    address_of, finish = make_address_of(m), make_finish(m)
    COUNT, PIECES, WORKSPACE = u64(offset("count")), u64(PIECES_AT), u64(OUTPUT + 1)
    ONE, TWO = u64(1), u64(2)

    def leave_sum(context: Any, task: Any, kind: Any, piece: Any, row: Any, value: Any) -> None:
        if load_task_u32(task + PIECES) == ONE:
            finish(context, task, kind, row, value)
        else:
            at = piece * load_task_u64(task + COUNT) + row
            store_f32(address_of(task, WORKSPACE) + (at << TWO), value)

    return m.device(leave_sum)


@functools.cache
def make_pick(m: Primitives) -> Body:
    """`pick(t, which)`: one of four."""
    ZERO, ONE, TWO = m.u64(0), m.u64(1), m.u64(2)

    def pick(t: Any, which: Any) -> Any:
        if which == ZERO:
            return t[0]
        if which == ONE:
            return t[1]
        if which == TWO:
            return t[2]
        return t[3]

    return m.device(pick)


@functools.cache
def make_merge(m: Primitives) -> Body:
    """`merge(context, task, kind)`: add the pieces' sums, in the same order always."""
    u64, f32 = m.u64, m.f32
    thread_index, block_width = m.thread_index, m.block_width
    load_f32, load_f32x4 = m.load_f32, m.load_f32x4
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    address_of, finish, pick = make_address_of(m), make_finish(m), make_pick(m)
    COUNT, PIECES, WORKSPACE = u64(offset("count")), u64(PIECES_AT), u64(OUTPUT + 1)
    ZERO, ONE, TWO, THREE, FOUR, FIFTEEN = (u64(n) for n in (0, 1, 2, 3, 4, 15))
    NOTHING = f32(0)

    def add4(t: Any, v: Any) -> Any:
        return t[0] + v[0], t[1] + v[1], t[2] + v[2], t[3] + v[3]

    add4 = m.device(add4)

    def merge(context: Any, task: Any, kind: Any) -> None:
        rows = load_task_u64(task + COUNT)
        pieces = load_task_u32(task + PIECES)
        step = rows << TWO
        sums = address_of(task, WORKSPACE)
        row = thread_index()
        if (sums | step) & FIFTEEN == ZERO:
            row <<= TWO
            while row < rows:
                at = sums + (row << TWO)
                t = NOTHING, NOTHING, NOTHING, NOTHING
                piece = ZERO
                while piece + THREE < pieces:
                    a, b = load_f32x4(at), load_f32x4(at + step)
                    at += step + step
                    c, d = load_f32x4(at), load_f32x4(at + step)
                    at += step + step
                    t = add4(t, add4(add4(a, b), add4(c, d)))
                    piece += FOUR
                while piece < pieces:
                    t = add4(t, load_f32x4(at))
                    at += step
                    piece += ONE
                which = ZERO
                while which < FOUR:
                    finish(context, task, kind, row + which, pick(t, which))
                    which += ONE
                row += block_width() << TWO
        else:
            while row < rows:
                at = sums + (row << TWO)
                total = NOTHING
                piece = ZERO
                while piece < pieces:
                    total += load_f32(at)
                    at += step
                    piece += ONE
                finish(context, task, kind, row, total)
                row += block_width()

    return m.device(merge)


@functools.cache
def make_share_k(m: Primitives) -> Body:
    """`share_k(task, tile)` -> (tile of the rows, tiles of the rows, piece of k, its begin, its end)"""
    u64, divide = m.u64, m.divide
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    TILES_WORD, K, PIECES = u64(offset("tiles")), u64(K_AT), u64(PIECES_AT)
    ZERO, ONE, SEVEN = u64(0), u64(1), u64(7)

    def share_k(task: Any, tile: Any) -> Any:
        tiles, pieces = load_task_u32(task + TILES_WORD), load_task_u32(task + PIECES)
        k = load_task_u64(task + K)
        if tiles == ZERO:
            tiles = ONE
        if pieces == ONE:
            return tile, tiles, ZERO, ZERO, k
        row_tile = divide(tile, pieces)
        piece = tile - row_tile * pieces
        share = (divide(k + pieces - ONE, pieces) + SEVEN) & ~SEVEN
        begin, end = piece * share, piece * share + share
        if begin > k:
            begin = k
        if end > k:
            end = k
        return row_tile, divide(tiles, pieces), piece, begin, end

    return m.device(share_k)


@functools.cache
def make_bits_of(m: Primitives) -> Body:
    """`bits_of(task, most)`: log2 of the threads that work together; at most `most`, a power of two."""
    u64, load_task_u32 = m.u64, m.load_task_u32
    BITS, ONE = u64(COLS_AT), u64(1)

    def bits_of(task: Any, most: Any) -> Any:
        bits = load_task_u32(task + BITS)
        while ONE << bits > most:
            bits -= ONE
        return bits

    return m.device(bits_of)


@functools.cache
def make_batch_of(m: Primitives) -> Body:
    """`batch_of(task, unit, units)`: which of the batch a unit is in, where each has so many."""
    u64, divide = m.u64, m.divide
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    COUNT, ROWS_WORD, ZERO = u64(offset("count")), u64(ROWS_AT), u64(0)

    def batch_of(task: Any, unit: Any, units: Any) -> Any:
        if load_task_u64(task + COUNT) == load_task_u32(task + ROWS_WORD):
            return ZERO
        return divide(unit, units)

    return m.device(batch_of)


@functools.cache
def make_tile_share(m: Primitives) -> Body:
    """`tile_share(task, tile, units, bits)` -> (first unit, end): those of a tile.

    `units` are those of one of the batch, and 2^bits of them are worked on at once.
    """
    u64, divide = m.u64, m.divide
    load_task_u64, load_task_u32, share_k = m.load_task_u64, m.load_task_u32, make_share_k(m)
    COUNT, ROWS_WORD, ONE = u64(offset("count")), u64(ROWS_AT), u64(1)

    def tile_share(task: Any, tile: Any, units: Any, bits: Any) -> Any:
        row_tile, row_tiles, _, _, _ = share_k(task, tile)
        rows, count = load_task_u32(task + ROWS_WORD), load_task_u64(task + COUNT)
        if rows != count:
            units *= divide(count, rows)
        mine = (units + (ONE << bits) - ONE) >> bits
        if row_tiles != ONE:
            mine = divide(mine + row_tiles - ONE, row_tiles)
        mine <<= bits
        first = row_tile * mine
        last = first + mine
        if last > units:
            last = units
        return first, last

    return m.device(tile_share)


@functools.cache
def make_log2(m: Primitives) -> Body:
    """`log2(n)`, rounded down."""
    u64 = m.u64
    ZERO, ONE = u64(0), u64(1)

    def log2(n: Any) -> Any:
        bits = ZERO
        while n > ONE:
            n >>= ONE
            bits += ONE
        return bits

    return m.device(log2)


@functools.cache
def make_is_merging(m: Primitives) -> Body:
    """`is_merging(task, tile)`: whether this is the call after the last tile."""
    u64, load_task_u64, load_task_u32 = m.u64, m.load_task_u64, m.load_task_u32
    MERGE, HALF, ZERO, TILES_WORD = u64(Flag.MERGE), u64(32), u64(0), u64(offset("tiles"))

    def is_merging(task: Any, tile: Any) -> Any:
        return (load_task_u64(task) >> HALF) & MERGE != ZERO and tile == load_task_u32(task + TILES_WORD)

    return m.device(is_merging)


@functools.cache
def make_load_pairs4(m: Primitives) -> Body:
    """`load_pairs4(address, step)`: four 16-byte chunks `step` bytes apart, each as two words."""
    load_pair = m.load_pair

    def load_pairs4(address: Any, step: Any) -> Any:
        a = load_pair(address)
        b = load_pair(address + step)
        address += step + step
        return a, b, load_pair(address), load_pair(address + step)

    return m.device(load_pairs4)


@functools.cache
def make_load_pairs2(m: Primitives) -> Body:
    """`load_pairs2(address, step)`: two of them."""
    load_pair = m.load_pair

    def load_pairs2(address: Any, step: Any) -> Any:
        return load_pair(address), load_pair(address + step)

    return m.device(load_pairs2)
