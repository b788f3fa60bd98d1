"""Products of matrices and vectors: batches of matrices of any strides arrive, their products leave.

All three operators are one product `left[rows, k] @ right[k, cols] + bias[rows, cols]` for each of a batch.
Batch dims that one side does not have become rows or columns of the other, so that a weight shared by a batch
is read once. Which kernel runs follows from what is left:

    kernel    for                               the threads of a block
    ROWS      one column, matrix even along k   teams; each takes dot products of four rows at once
    COLUMNS   one column, matrix even along     neighbours take neighbouring rows, and teams of them share k
              the rows (x @ a of a row-major a)
    TILES     everything else                   32 x 32 outputs, 4 x 4 a thread, k shared by four groups

One row is one column of the transposed product. Where ROWS and COLUMNS have too few rows for all blocks, k is
cut into pieces: each tile leaves its sums in the workspace, and the merge adds them. Sums are f32, by fused
multiply-add.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ...descriptor import LAYOUT_BYTES, MAX_DIMS, MAX_INPUTS, DType, Flag, layout_offset, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ...protocol import ARENA_BYTES, CONTEXT, field
from ...shapes import Shape, Strides, aligned_strides, broadcast_shape, collapse
from ..chunks import make_chunk_count, make_fill8, make_load_raw8, make_spread_f32, make_unpack8
from ..elements import make_itemsize, make_load_f32, make_store_f32
from ..operands import OUTPUT, make_address_of, make_element_of
from .table import (
    FLOATS,
    MATRIX_IDS,
    Draw,
    Example,
    Kernel,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    Tolerance,
    Walk,
    pack,
    refuse_dtype,
)

Array = Any
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


# --- what the kernels share ---


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


# --- ROWS ---


def make_rows(m: Primitives) -> Body:
    """Dot products of a matrix's rows with one vector.

    A team is a power of two of threads. It takes four rows at once, 16 bytes of each a thread. Two such
    chunks of each row are multiplied while the next two fly: 8 to 16 loads of the matrix in flight. At the
    matrix's end rows are taken twice, not stored.
    """
    u64, f32 = m.u64, m.f32
    thread_index, block_width, warp_width, barrier = m.thread_index, m.block_width, m.warp_width, m.barrier
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    bits_of, batch_of, tile_share, log2 = (
        make_bits_of(m),
        make_batch_of(m),
        make_tile_share(m),
        make_log2(m),
    )
    load_scratch_f32, store_scratch_f32 = m.load_scratch_f32, m.store_scratch_f32
    load_pair, shuffle, fma = m.load_pair, m.shuffle_xor_f32, m.fused_multiply_add
    bits_f32, f16_to_f32, bf16_to_f32 = m.bits_f32, m.f16_to_f32, m.bf16_to_f32
    dtype_of, stride_of, base_of = make_dtype_of(m), make_stride_of(m), make_base_of(m)
    pick, is_merging, merge, share_k = make_pick(m), make_is_merging(m), make_merge(m), make_share_k(m)
    itemsize, leave_sum, load_pairs2 = make_itemsize(m), make_leave_sum(m), make_load_pairs2(m)
    chunk_count, spread, fill8 = make_chunk_count(m), make_spread_f32(m), make_fill8(m)

    K, ROWS_WORD, MATRIX = u64(K_AT), u64(ROWS_AT), u64(MATRIX_AT)
    F32, F16 = u64(DType.F32), u64(DType.F16)
    ZERO, ONE, TWO, THREE, FOUR, EIGHT, FIFTEEN, SIXTEEN = (u64(n) for n in (0, 1, 2, 3, 4, 8, 15, 16))
    S16, S32, S48 = u64(16), u64(32), u64(48)
    NOTHING = f32(0)
    OK = np.int32(0)

    def halves(kind: Any, pair: Any) -> Any:
        low, high = pair
        if kind == F16:
            return (
                f16_to_f32(low),
                f16_to_f32(low >> S16),
                f16_to_f32(low >> S32),
                f16_to_f32(low >> S48),
                f16_to_f32(high),
                f16_to_f32(high >> S16),
                f16_to_f32(high >> S32),
                f16_to_f32(high >> S48),
            )
        return (
            bf16_to_f32(low),
            bf16_to_f32(low >> S16),
            bf16_to_f32(low >> S32),
            bf16_to_f32(low >> S48),
            bf16_to_f32(high),
            bf16_to_f32(high >> S16),
            bf16_to_f32(high >> S32),
            bf16_to_f32(high >> S48),
        )

    halves = m.device(halves)

    def dot8(v: Any, x: Any, total: Any) -> Any:
        total = fma(v[3], x[3], fma(v[2], x[2], fma(v[1], x[1], fma(v[0], x[0], total))))
        return fma(v[7], x[7], fma(v[6], x[6], fma(v[5], x[5], fma(v[4], x[4], total))))

    dot8 = m.device(dot8)

    def dot4(pair: Any, x: Any, total: Any) -> Any:
        low, high = pair
        total = fma(bits_f32(low >> S32), x[1], fma(bits_f32(low), x[0], total))
        return fma(bits_f32(high >> S32), x[3], fma(bits_f32(high), x[2], total))

    dot4 = m.device(dot4)

    def step(kind: Any, x: Any, a: Any, b: Any, c: Any, d: Any, t: Any) -> Any:
        """The sums of four rows with a 16-byte chunk of each."""
        if kind == F32:
            y = bits_f32(x[0]), bits_f32(x[0] >> S32), bits_f32(x[1]), bits_f32(x[1] >> S32)
            return dot4(a, y, t[0]), dot4(b, y, t[1]), dot4(c, y, t[2]), dot4(d, y, t[3])
        z = halves(kind, x)
        return (
            dot8(halves(kind, a), z, t[0]),
            dot8(halves(kind, b), z, t[1]),
            dot8(halves(kind, c), z, t[2]),
            dot8(halves(kind, d), z, t[3]),
        )

    step = m.device(step)

    def spans(task: Any, tile: Any) -> Any:
        """The tile's groups of four rows, each in one of the batch."""
        teams = block_width() >> bits_of(task, block_width())
        return tile_share(task, tile, (load_task_u32(task + ROWS_WORD) + THREE) >> TWO, log2(teams))

    spans = m.device(spans)

    def rows_kernel(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        kind = dtype_of(task)
        if is_merging(task, tile):
            merge(context, task, kind)
            return OK
        first, last = spans(task, tile)
        while first < last:  # all threads of the block together: there are barriers inside
            # Nothing is held over the loops that the task says again: registers are short there.
            size = itemsize(kind)
            rows, k = load_task_u32(task + ROWS_WORD), load_task_u64(task + K)
            matrix = load_task_u32(task + MATRIX)
            vector = matrix ^ ONE
            _, _, _, begin, end = share_k(task, tile)
            bits = bits_of(task, block_width())
            parts = ONE << bits
            part = thread_index() & (parts - ONE)
            group = first + (thread_index() >> bits)
            if group >= last:
                group = last - ONE
            groups = (rows + THREE) >> TWO
            batch = batch_of(task, group, groups)
            row = (group - batch * groups) << TWO
            row_step = stride_of(context, task, matrix, TWO, k) * size
            element_step = stride_of(context, task, matrix, ONE, ONE) * size
            x_step = stride_of(context, task, vector, ONE, ONE) * size
            x = base_of(context, task, vector, batch, k)
            p = base_of(context, task, matrix, batch, rows * k) + row * row_step
            q, r, s = p, p, p
            if row + ONE < rows:
                q = p + row_step
            if row + TWO < rows:
                r = q + row_step
            if row + THREE < rows:
                s = r + row_step
            t = NOTHING, NOTHING, NOTHING, NOTHING
            done = begin
            if (x | p | q | r | s) & FIFTEEN == ZERO and element_step == size and x_step == size:
                chunk = SIXTEEN >> (size >> ONE)
                done = begin + ((end - begin) & ~(chunk - ONE))
                at = (begin + part * chunk) * size
                stop = done * size
                leap = parts * SIXTEEN
                if at + leap < stop:
                    a, b = load_pairs2(p + at, leap), load_pairs2(q + at, leap)
                    c, d = load_pairs2(r + at, leap), load_pairs2(s + at, leap)
                    y = x + at
                    at += leap + leap
                    while at + leap < stop:
                        a_next, b_next = load_pairs2(p + at, leap), load_pairs2(q + at, leap)
                        c_next, d_next = load_pairs2(r + at, leap), load_pairs2(s + at, leap)
                        # The vector comes from L1: other warps read it too.
                        t = step(kind, load_pair(y), a[0], b[0], c[0], d[0], t)
                        t = step(kind, load_pair(y + leap), a[1], b[1], c[1], d[1], t)
                        a, b, c, d = a_next, b_next, c_next, d_next
                        y = x + at
                        at += leap + leap
                    t = step(kind, load_pair(y), a[0], b[0], c[0], d[0], t)
                    t = step(kind, load_pair(y + leap), a[1], b[1], c[1], d[1], t)
                while at < stop:
                    y0 = load_pair(x + at)
                    a0, b0, c0, d0 = (
                        load_pair(p + at),
                        load_pair(q + at),
                        load_pair(r + at),
                        load_pair(s + at),
                    )
                    t = step(kind, y0, a0, b0, c0, d0, t)
                    at += leap
            j = done + part
            while j < end:
                # Past the end there are copies of the first element: times 0 an inf of those would be NaN.
                n = chunk_count(j, end, parts)
                y = fill8(spread(kind, x + j * x_step, parts * x_step, n), n, NOTHING)
                at = j * element_step
                apart = parts * element_step
                t = (
                    dot8(fill8(spread(kind, p + at, apart, n), n, NOTHING), y, t[0]),
                    dot8(fill8(spread(kind, q + at, apart, n), n, NOTHING), y, t[1]),
                    dot8(fill8(spread(kind, r + at, apart, n), n, NOTHING), y, t[2]),
                    dot8(fill8(spread(kind, s + at, apart, n), n, NOTHING), y, t[3]),
                )
                j += parts * EIGHT

            bits = bits_of(task, block_width())
            parts = ONE << bits
            part = thread_index() & (parts - ONE)
            lanes = parts
            if lanes > warp_width():
                lanes = warp_width()
            mask = lanes >> ONE
            while mask > ZERO:
                t = (
                    t[0] + shuffle(t[0], mask),
                    t[1] + shuffle(t[1], mask),
                    t[2] + shuffle(t[2], mask),
                    t[3] + shuffle(t[3], mask),
                )
                mask >>= ONE
            across = parts > lanes
            if across:
                if part & (lanes - ONE) == ZERO:
                    at = arena + (thread_index() >> log2(lanes)) * SIXTEEN
                    store_scratch_f32(at, t[0])
                    store_scratch_f32(at + FOUR, t[1])
                    store_scratch_f32(at + EIGHT, t[2])
                    store_scratch_f32(at + EIGHT + FOUR, t[3])
                barrier()
            rows = load_task_u32(task + ROWS_WORD)
            groups = (rows + THREE) >> TWO
            group = first + (thread_index() >> bits)
            batch = batch_of(task, group, groups)
            row = (group - batch * groups) << TWO
            _, _, piece, _, _ = share_k(task, tile)
            which = part
            while which < FOUR:
                value = pick(t, which)
                if across:
                    at = arena + ((thread_index() - part) >> log2(lanes)) * SIXTEEN + which * FOUR
                    stop = at + (parts >> log2(lanes)) * SIXTEEN
                    value = NOTHING
                    while at < stop:
                        value += load_scratch_f32(at)
                        at += SIXTEEN
                if group < last and row + which < rows:
                    leave_sum(context, task, kind, piece, batch * rows + row + which, value)
                which += parts
            if across:
                barrier()  # before the next sums are written there
            first += block_width() >> bits
        return OK

    return rows_kernel


# --- COLUMNS ---


def make_columns(m: Primitives) -> Body:
    """Sums of a matrix's columns, each times an element of the vector: x @ a.

    The matrix arrives as [k, rows]: the outputs are its columns. Where they are neighbours a thread takes 16
    bytes of them, otherwise one. `width` threads side by side read neighbouring columns, and the block's
    teams of so many share k. A thread has 16 of its k in flight.
    """
    u64, f32 = m.u64, m.f32
    thread_index, block_width, warp_width, barrier = m.thread_index, m.block_width, m.warp_width, m.barrier
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    bits_of, batch_of, tile_share, log2 = (
        make_bits_of(m),
        make_batch_of(m),
        make_tile_share(m),
        make_log2(m),
    )
    load_scratch_f32, store_scratch_f32 = m.load_scratch_f32, m.store_scratch_f32
    load_pair, load_f32, load_u16 = m.load_pair, m.load_f32, m.load_u16
    shuffle, fma = m.shuffle_xor_f32, m.fused_multiply_add
    bits_f32, f16_to_f32, bf16_to_f32 = m.bits_f32, m.f16_to_f32, m.bf16_to_f32
    dtype_of, stride_of, base_of = make_dtype_of(m), make_stride_of(m), make_base_of(m)
    is_merging, merge, share_k = make_is_merging(m), make_merge(m), make_share_k(m)
    itemsize, leave_sum, load_pairs4 = make_itemsize(m), make_leave_sum(m), make_load_pairs4(m)
    chunk_count, spread, fill8 = make_chunk_count(m), make_spread_f32(m), make_fill8(m)
    unpack8, load_element = make_unpack8(m), make_load_f32(m)

    K, ROWS_WORD, MATRIX = u64(K_AT), u64(ROWS_AT), u64(MATRIX_AT)
    F32, F16 = u64(DType.F32), u64(DType.F16)
    ZERO, ONE, TWO, THREE, FOUR, EIGHT = (u64(n) for n in (0, 1, 2, 3, 4, 8))
    FIFTEEN, SIXTEEN, THIRTY_TWO = u64(15), u64(16), u64(32)
    NOTHING = f32(0)
    NOTHING8 = (NOTHING,) * 8
    OK = np.int32(0)

    def load_vector4(kind: Any, address: Any, step: Any) -> Any:
        """Four elements. Loaded after those of the matrix: who converts waits, but not for longer."""
        if kind == F32:
            a, b = load_f32(address), load_f32(address + step)
            address += step + step
            return a, b, load_f32(address), load_f32(address + step)
        c, d = load_u16(address), load_u16(address + step)
        address += step + step
        e, f = load_u16(address), load_u16(address + step)
        if kind == F16:
            return f16_to_f32(c), f16_to_f32(d), f16_to_f32(e), f16_to_f32(f)
        return bf16_to_f32(c), bf16_to_f32(d), bf16_to_f32(e), bf16_to_f32(f)

    load_vector4 = m.device(load_vector4)

    def add_row(kind: Any, pair: Any, x: Any, t: Any) -> Any:
        """The sums of the thread's columns with one more of k; f32 has four, the others eight."""
        low, high = pair
        if kind == F32:
            return (
                fma(bits_f32(low), x, t[0]),
                fma(bits_f32(low >> THIRTY_TWO), x, t[1]),
                fma(bits_f32(high), x, t[2]),
                fma(bits_f32(high >> THIRTY_TWO), x, t[3]),
                t[4],
                t[5],
                t[6],
                t[7],
            )
        v = unpack8(kind, (low, high, ZERO, ZERO))
        return (
            fma(v[0], x, t[0]),
            fma(v[1], x, t[1]),
            fma(v[2], x, t[2]),
            fma(v[3], x, t[3]),
            fma(v[4], x, t[4]),
            fma(v[5], x, t[5]),
            fma(v[6], x, t[6]),
            fma(v[7], x, t[7]),
        )

    add_row = m.device(add_row)

    def add_rows4(kind: Any, v: Any, x: Any, t: Any) -> Any:
        t = add_row(kind, v[0], x[0], t)
        t = add_row(kind, v[1], x[1], t)
        t = add_row(kind, v[2], x[2], t)
        return add_row(kind, v[3], x[3], t)

    add_rows4 = m.device(add_rows4)

    def dot8(v: Any, x: Any, total: Any) -> Any:
        total = fma(v[3], x[3], fma(v[2], x[2], fma(v[1], x[1], fma(v[0], x[0], total))))
        return fma(v[7], x[7], fma(v[6], x[6], fma(v[5], x[5], fma(v[4], x[4], total))))

    dot8 = m.device(dot8)

    def add_lanes(t: Any, mask: Any) -> Any:
        return (
            t[0] + shuffle(t[0], mask),
            t[1] + shuffle(t[1], mask),
            t[2] + shuffle(t[2], mask),
            t[3] + shuffle(t[3], mask),
            t[4] + shuffle(t[4], mask),
            t[5] + shuffle(t[5], mask),
            t[6] + shuffle(t[6], mask),
            t[7] + shuffle(t[7], mask),
        )

    add_lanes = m.device(add_lanes)

    def put8(at: Any, t: Any) -> None:
        store_scratch_f32(at, t[0])
        store_scratch_f32(at + FOUR, t[1])
        store_scratch_f32(at + EIGHT, t[2])
        store_scratch_f32(at + EIGHT + FOUR, t[3])
        at += SIXTEEN
        store_scratch_f32(at, t[4])
        store_scratch_f32(at + FOUR, t[5])
        store_scratch_f32(at + EIGHT, t[6])
        store_scratch_f32(at + EIGHT + FOUR, t[7])

    put8 = m.device(put8)

    def spans(task: Any, tile: Any, kind: Any) -> Any:
        """The tile's strips of columns, each in one of the batch."""
        strip_bits = bits_of(task, warp_width()) + FOUR - (itemsize(kind) >> ONE)
        strips = (load_task_u32(task + ROWS_WORD) + (ONE << strip_bits) - ONE) >> strip_bits
        return tile_share(task, tile, strips, ZERO)

    spans = m.device(spans)

    def columns_kernel(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        kind = dtype_of(task)
        if is_merging(task, tile):
            merge(context, task, kind)
            return OK
        strip, last = spans(task, tile, kind)
        while strip < last:
            # Nothing is held over the loops that the task says again: registers are short there.
            size = itemsize(kind)
            rows, k = load_task_u32(task + ROWS_WORD), load_task_u64(task + K)
            matrix = load_task_u32(task + MATRIX)
            vector = matrix ^ ONE
            _, _, piece, begin, end = share_k(task, tile)
            lanes = warp_width()
            bits = bits_of(task, lanes)
            width = ONE << bits
            teams = block_width() >> bits
            team = thread_index() >> bits
            part = thread_index() & (width - ONE)
            chunk_bits = FOUR - (size >> ONE)
            strip_bits = bits + chunk_bits
            strips = (rows + (ONE << strip_bits) - ONE) >> strip_bits
            step = stride_of(context, task, matrix, TWO, rows) * size  # from one of k to the next
            row_step = stride_of(context, task, matrix, ONE, ONE) * size
            x_step = stride_of(context, task, vector, ONE, ONE) * size
            batch = batch_of(task, strip, strips)
            row = (strip - batch * strips) << strip_bits  # the strip's first
            until = row + (ONE << strip_bits)
            if until > rows:
                until = rows
            x = base_of(context, task, vector, batch, k)
            a = base_of(context, task, matrix, batch, rows * k)
            whole = until == row + (ONE << strip_bits)
            fits = row_step == size and whole and (a | step) & FIFTEEN == ZERO
            each = ZERO  # log2 of the columns that a thread takes at once
            if fits:
                each = chunk_bits
            while row < until:
                mine_at = row + (part << each)  # the thread's first column
                if mine_at >= until:
                    mine_at = until - ONE
                at = a + mine_at * row_step
                j = begin + team
                t = NOTHING8
                if fits:
                    leap = teams * step
                    x_leap = teams * x_step
                    at += j * step
                    y = x + j * x_step
                    while j + FIFTEEN * teams < end:
                        v0, v1 = load_pairs4(at, leap), load_pairs4(at + leap * FOUR, leap)
                        at += leap << THREE
                        v2, v3 = load_pairs4(at, leap), load_pairs4(at + leap * FOUR, leap)
                        at += leap << THREE
                        x0, x1 = load_vector4(kind, y, x_leap), load_vector4(kind, y + x_leap * FOUR, x_leap)
                        y += x_leap << THREE
                        x2, x3 = load_vector4(kind, y, x_leap), load_vector4(kind, y + x_leap * FOUR, x_leap)
                        y += x_leap << THREE
                        t = add_rows4(kind, v0, x0, t)
                        t = add_rows4(kind, v1, x1, t)
                        t = add_rows4(kind, v2, x2, t)
                        t = add_rows4(kind, v3, x3, t)
                        j += teams << FOUR
                    while j + THREE * teams < end:
                        v0 = load_pairs4(at, leap)
                        x0 = load_vector4(kind, y, x_leap)
                        t = add_rows4(kind, v0, x0, t)
                        j += teams << TWO
                        at += leap << TWO
                        y += x_leap << TWO
                    while j < end:
                        pair = load_pair(at)
                        t = add_row(kind, pair, load_element(kind, y), t)
                        j += teams
                        at += leap
                        y += x_leap
                else:
                    total = NOTHING
                    while j < end:
                        n = chunk_count(j, end, teams)
                        y8 = fill8(spread(kind, x + j * x_step, teams * x_step, n), n, NOTHING)
                        v8 = fill8(spread(kind, at + j * step, teams * step, n), n, NOTHING)
                        total = dot8(v8, y8, total)
                        j += teams << THREE
                    t = total, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING

                mask = width
                while mask < lanes:
                    t = add_lanes(t, mask)
                    mask <<= ONE
                if thread_index() & (lanes - ONE) < width:
                    warp = thread_index() >> log2(lanes)
                    put8(arena + (((warp << bits) + part) << (TWO + THREE)), t)
                barrier()
                rows = load_task_u32(task + ROWS_WORD)
                column = thread_index()
                while column < width << each:
                    owner = column >> each
                    at = arena + (owner << (TWO + THREE)) + ((column - (owner << each)) << TWO)
                    stop = at + ((block_width() >> log2(lanes)) << bits << (TWO + THREE))
                    total = NOTHING
                    while at < stop:
                        total += load_scratch_f32(at)
                        at += width << (TWO + THREE)
                    if row + column < until:
                        leave_sum(context, task, kind, piece, batch * rows + row + column, total)
                    column += block_width()
                barrier()  # before the next sums are written there
                row += width << each
            strip += ONE
        return OK

    return columns_kernel


# --- TILES ---

DEPTH: Final = 64
"""Elements of k that a block stages at a time."""

SIDE: Final = 32
"""Rows and columns of a block's output tile. A block of one thread takes 4 x 4."""

GROUPS: Final = 4
"""Groups of 64 threads that share the staged k."""

assert 2 * DEPTH * SIDE * 4 <= ARENA_BYTES and GROUPS * SIDE * SIDE * 4 <= ARENA_BYTES


def make_tiles(m: Primitives) -> Body:
    """Products of matrices.

    Slabs of both, 64 of k deep, go through scratch as f32, k first, so that a thread finds its four rows and
    its four columns in 16 bytes each. The next slab flies while this one is multiplied. Groups of threads
    share a slab's k and add their sums at the end.
    """
    u64, f32 = m.u64, m.f32
    thread_index, block_width, barrier, divide = m.thread_index, m.block_width, m.barrier, m.divide
    load_task_u64, load_task_u32, load_task_pair = m.load_task_u64, m.load_task_u32, m.load_task_pair
    load_scratch_f32, store_u64 = m.load_scratch_f32, m.store_u64
    store_scratch_f32 = m.store_scratch_f32
    fma, bits_f32, f32_bits = m.fused_multiply_add, m.bits_f32, m.f32_bits
    address_of, dtype_of, stride_of, base_of = (
        make_address_of(m),
        make_dtype_of(m),
        make_stride_of(m),
        make_base_of(m),
    )
    itemsize, load_element, store_element = make_itemsize(m), make_load_f32(m), make_store_f32(m)
    spread, fill8, log2 = make_spread_f32(m), make_fill8(m), make_log2(m)
    load_raw8, unpack8 = make_load_raw8(m), make_unpack8(m)

    COUNT, TILES_WORD, K, ROWS_WORD, COLS_WORD = (
        u64(n) for n in (offset("count"), offset("tiles"), K_AT, ROWS_AT, COLS_AT)
    )
    OUT, THE_BIAS, F32 = u64(OUTPUT), u64(BIAS), u64(DType.F32)
    ZERO, ONE, TWO, THREE, FOUR, EIGHT, FIFTEEN, SIXTEEN = (u64(n) for n in (0, 1, 2, 3, 4, 8, 15, 16))
    SIX, HALF, SLAB_DEPTH, GROUP_THREADS = u64(6), u64(32), u64(DEPTH), u64(64)
    WHOLE_BITS, MOST_GROUP_BITS = u64(SIDE.bit_length() - 1), u64(GROUPS.bit_length() - 1)
    NOTHING = f32(0)
    NOTHING4 = (NOTHING,) * 4
    OK = np.int32(0)

    def words(x: Any, y: Any) -> Any:
        return f32_bits(x) | (f32_bits(y) << HALF)

    words = m.device(words)

    def fetch(kind: Any, base: Any, step: Any, free_step: Any, free: Any, j: Any, n: Any, deep: Any) -> Any:
        """(kind to unpack by, 4 words): eight elements from (free, j) on, along k where `deep`.

        `n` of them count; the others are 0.
        """
        size = itemsize(kind)
        at = base + j * step + free * free_step
        along = free_step
        if deep:
            along = step
        if n == EIGHT and along == size and at & FIFTEEN == ZERO:
            a, b, c, d = load_raw8(kind, at)
            return kind, a, b, c, d
        if n == ZERO:
            return F32, ZERO, ZERO, ZERO, ZERO
        v = fill8(spread(kind, at, along, n), n, NOTHING)
        return F32, words(v[0], v[1]), words(v[2], v[3]), words(v[4], v[5]), words(v[6], v[7])

    fetch = m.device(fetch)

    def spot(index: Any, bits: Any, deep: Any) -> Any:
        """(free, k) of the eight elements that job `index` stages, of a side of 2^bits."""
        if deep:  # neighbours write neighbouring words of scratch
            return index & ((ONE << bits) - ONE), (index >> bits) << THREE
        if bits < THREE:
            return ZERO, index
        return (index & ((ONE << (bits - THREE)) - ONE)) << THREE, index >> (bits - THREE)

    spot = m.device(spot)

    def left_over(at: Any, end: Any) -> Any:
        """How many of eight from `at` on lie below `end`."""
        if at >= end:
            return ZERO
        if at + EIGHT <= end:
            return EIGHT
        return end - at

    left_over = m.device(left_over)

    def bring(kind: Any, source: Any, bits: Any, j0: Any, k: Any, index: Any) -> Any:
        """Job `index` of a slab, from global memory."""
        base, step, free_step, first, extent, deep = source
        free, j = spot(index, bits, deep)
        if deep:
            n = left_over(j0 + j, k)
            if first + free >= extent:
                n = ZERO
        else:
            end = first + (ONE << bits)
            if end > extent:
                end = extent
            n = left_over(first + free, end)
            if j0 + j >= k:
                n = ZERO
        return fetch(kind, base, step, free_step, first + free, j0 + j, n, deep)

    bring = m.device(bring)

    def keep(slab: Any, bits: Any, deep: Any, index: Any, raw: Any) -> None:
        """Job `index` of a slab, to scratch."""
        free, j = spot(index, bits, deep)
        v = unpack8(raw[0], (raw[1], raw[2], raw[3], raw[4]))
        at = slab + (((j << bits) + free) << TWO)
        if deep:
            leap = FOUR << bits
            store_scratch_f32(at, v[0])
            store_scratch_f32(at + leap, v[1])
            store_scratch_f32(at + leap * TWO, v[2])
            store_scratch_f32(at + leap * THREE, v[3])
            at += leap * FOUR
            store_scratch_f32(at, v[4])
            store_scratch_f32(at + leap, v[5])
            store_scratch_f32(at + leap * TWO, v[6])
            store_scratch_f32(at + leap * THREE, v[7])
        else:
            store_u64(at, words(v[0], v[1]))
            store_u64(at + EIGHT, words(v[2], v[3]))
            if bits >= THREE:
                store_u64(at + SIXTEEN, words(v[4], v[5]))
                store_u64(at + SIXTEEN + EIGHT, words(v[6], v[7]))

    keep = m.device(keep)

    def four(at: Any) -> Any:
        low, high = load_task_pair(at)
        return bits_f32(low), bits_f32(low >> HALF), bits_f32(high), bits_f32(high >> HALF)

    four = m.device(four)

    def multiply(a: Any, b: Any, t: Any) -> Any:
        return fma(a, b[0], t[0]), fma(a, b[1], t[1]), fma(a, b[2], t[2]), fma(a, b[3], t[3])

    multiply = m.device(multiply)

    def put4(at: Any, t: Any) -> None:
        store_u64(at, words(t[0], t[1]))
        store_u64(at + EIGHT, words(t[2], t[3]))

    put4 = m.device(put4)

    def locate(task: Any, unit: Any, bits: Any) -> Any:
        """(batch, first row, first column) of an output tile; a batch too many behind the last."""
        more = (ONE << bits) - ONE
        row_tiles = (load_task_u32(task + ROWS_WORD) + more) >> bits
        column_tiles = (load_task_u32(task + COLS_WORD) + more) >> bits
        row = divide(unit, column_tiles)
        column = unit - row * column_tiles
        batch = ZERO
        if row >= row_tiles:
            batch = divide(row, row_tiles)
        return batch, (row - batch * row_tiles) << bits, column << bits

    locate = m.device(locate)

    def tiles_kernel(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        kind = dtype_of(task)
        if load_task_u64(task + COUNT) == ZERO:
            return OK
        thread, width = thread_index(), block_width()
        bits, across_bits, group_bits = TWO, ZERO, ZERO  # log2 of the side, of threads across it, of groups
        if width >= GROUP_THREADS:
            bits, across_bits = WHOLE_BITS, THREE
            group_bits = log2(width) - SIX
            if group_bits > MOST_GROUP_BITS:
                group_bits = MOST_GROUP_BITS
        side = ONE << bits
        group = thread >> (across_bits + across_bits)
        y = (thread >> across_bits) & ((ONE << across_bits) - ONE)
        x = thread & ((ONE << across_bits) - ONE)
        works = group >> group_bits == ZERO  # the others stage, and come to the barriers
        deep_share = SLAB_DEPTH >> group_bits
        right_slab = arena + (SLAB_DEPTH << (bits + TWO))
        jobs = SLAB_DEPTH << bits >> THREE
        row_jobs = jobs
        if bits < THREE:
            row_jobs = SLAB_DEPTH

        unit = tile
        while True:
            # Nothing is held over the loops that the task says again: registers are short there.
            size = itemsize(kind)
            k, rows, cols = (
                load_task_u64(task + K),
                load_task_u32(task + ROWS_WORD),
                load_task_u32(task + COLS_WORD),
            )
            batch, row, column = locate(task, unit, bits)
            if batch * rows * cols >= load_task_u64(task + COUNT):
                break
            row_step = stride_of(context, task, ZERO, TWO, k) * size
            left_step = stride_of(context, task, ZERO, ONE, ONE) * size
            right_step = stride_of(context, task, ONE, TWO, cols) * size
            column_step = stride_of(context, task, ONE, ONE, ONE) * size
            left_deep = left_step == size or row_step != size
            right_deep = right_step == size and column_step != size
            left_jobs, right_jobs = row_jobs, row_jobs
            if left_deep:
                left_jobs = jobs
            if right_deep:
                right_jobs = jobs
            left = base_of(context, task, ZERO, batch, rows * k)
            right = base_of(context, task, ONE, batch, k * cols)
            t0, t1, t2, t3 = NOTHING4, NOTHING4, NOTHING4, NOTHING4
            raw_a = F32, ZERO, ZERO, ZERO, ZERO
            raw_b = F32, ZERO, ZERO, ZERO, ZERO
            source_a = left, left_step, row_step, row, rows, left_deep
            source_b = right, right_step, column_step, column, cols, right_deep
            if thread < left_jobs:
                raw_a = bring(kind, source_a, bits, ZERO, k, thread)
            if thread < right_jobs:
                raw_b = bring(kind, source_b, bits, ZERO, k, thread)
            j0 = ZERO
            while j0 < k:
                index = thread
                while index < left_jobs:
                    if index != thread:  # of narrow blocks
                        raw_a = bring(kind, source_a, bits, j0, k, index)
                    keep(arena, bits, left_deep, index, raw_a)
                    index += width
                index = thread
                while index < right_jobs:
                    if index != thread:
                        raw_b = bring(kind, source_b, bits, j0, k, index)
                    keep(right_slab, bits, right_deep, index, raw_b)
                    index += width
                barrier()
                j0 += SLAB_DEPTH
                if j0 < k:
                    if thread < left_jobs:
                        raw_a = bring(kind, source_a, bits, j0, k, thread)
                    if thread < right_jobs:
                        raw_b = bring(kind, source_b, bits, j0, k, thread)
                if works:
                    leap = FOUR << bits
                    at = arena + group * deep_share * leap + (y << FOUR)
                    bt = right_slab + group * deep_share * leap + (x << FOUR)
                    stop = at + deep_share * leap
                    while at < stop:
                        a, b = four(at), four(bt)
                        c, d = four(at + leap), four(bt + leap)
                        t0, t1 = multiply(a[0], b, t0), multiply(a[1], b, t1)
                        t2, t3 = multiply(a[2], b, t2), multiply(a[3], b, t3)
                        t0, t1 = multiply(c[0], d, t0), multiply(c[1], d, t1)
                        t2, t3 = multiply(c[2], d, t2), multiply(c[3], d, t3)
                        at += leap * TWO
                        bt += leap * TWO
                barrier()  # before the next slab, or the sums, are written there

            if works:
                at = arena + (((group << bits) + (y << TWO)) << (bits + TWO)) + (x << FOUR)
                leap = FOUR << bits
                put4(at, t0)
                put4(at + leap, t1)
                put4(at + leap * TWO, t2)
                put4(at + leap * THREE, t3)
            barrier()
            size = itemsize(kind)
            rows, cols = load_task_u32(task + ROWS_WORD), load_task_u32(task + COLS_WORD)
            batch, row, column = locate(task, unit, bits)
            out = base_of(context, task, OUT, batch, rows * cols)
            bias = address_of(task, THE_BIAS)
            if bias != ZERO:
                bias = base_of(context, task, THE_BIAS, batch, rows * cols)
            index = thread
            while index < ONE << (bits + bits):
                r = index >> bits
                c = index & (side - ONE)
                if row + r < rows and column + c < cols:
                    total = NOTHING
                    at = arena + (index << TWO)
                    stop = at + (FOUR << (bits + bits + group_bits))
                    while at < stop:
                        total += load_scratch_f32(at)
                        at += FOUR << (bits + bits)
                    if bias != ZERO:
                        steps = (row + r) * stride_of(context, task, THE_BIAS, TWO, cols)
                        steps += (column + c) * stride_of(context, task, THE_BIAS, ONE, ONE)
                        total += load_element(kind, bias + steps * size)
                    steps = (row + r) * stride_of(context, task, OUT, TWO, cols)
                    steps += (column + c) * stride_of(context, task, OUT, ONE, ONE)
                    store_element(kind, out + steps * size, total)
                index += width
            barrier()  # before the next unit's slab is written there
            unit += load_task_u32(task + TILES_WORD)
        return OK

    return tiles_kernel


# --- plans ---

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
        kernel, width = _ROWS, team
        matrix = (*batch, rows, max(k, 1)), (*left.batch, left.first, left.second)
    else:
        kernel, width = _COLUMNS, 32
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
        kernel.op_id,
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
        _TILES.op_id,
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
        return Plan(_TILES.op_id, 0)
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


class _Named(NamedTuple):
    """A batch to broadcast, for `broadcast_shape`."""

    shape: Shape


def _check(
    name: str, places: Sequence[str], inputs: Sequence[Operand | None], least: tuple[int, int]
) -> None:
    """Raises ArgumentError or DTypeError where dtypes differ or dims are missing."""
    first = inputs[0]
    assert first is not None
    for place, each in enumerate(inputs):
        if each is None:
            continue
        named = f"inputs[{place}] ({places[place]})"
        if each.dtype not in FLOATS:
            raise refuse_dtype(name, named, each.dtype, FLOATS)
        if each.dtype != first.dtype:
            raise refuse_dtype(f"{name} of this inputs[0] ({places[0]})", named, each.dtype, (first.dtype,))
        if place < BIAS and len(each.shape) < least[place]:
            raise ArgumentError(
                f"{name}: {named} has shape {each.shape}, but needs {least[place]} dims at least: reshape it"
                + (", or use matvec or vecmat" if name == "matmul" else "")
            )


class _Call(NamedTuple):
    """A call as a product: what infer and plan both need to know."""

    dtype: DType
    batch: Shape
    rows: int
    k: int
    cols: int
    shape: Shape
    left: Side
    right: Side


def _read(
    name: str, inputs: Sequence[Operand | None], transpose_a: bool = False, transpose_b: bool = False
) -> _Call:
    """Check the shapes of a call. Raises ArgumentError or DTypeError."""
    places = {"matvec": ("a", "x"), "vecmat": ("x", "a"), "matmul": ("a", "b")}[name]
    least = (1 if name == "vecmat" else 2, 1 if name == "matvec" else 2)
    _check(name, (*places, "bias"), inputs, least)
    a, b = inputs[0], inputs[1]
    assert a is not None and b is not None

    def split(
        operand: Operand, vector: bool, turned: bool, first: bool
    ) -> tuple[Shape, Strides, Shape, Strides]:
        """(batch, its strides, the two dims, their strides)"""
        if vector:
            dims, steps = (operand.shape[-1],), (operand.strides[-1],)
            pair = ((1, *dims), (0, *steps)) if first else ((*dims, 1), (*steps, 0))
            return operand.shape[:-1], operand.strides[:-1], *pair
        order = (-1, -2) if turned else (-2, -1)
        shape, strides = operand.shape, operand.strides
        return shape[:-2], strides[:-2], tuple(shape[i] for i in order), tuple(strides[i] for i in order)

    batch_a, steps_a, (rows, k), (row_step, left_step) = split(a, name == "vecmat", transpose_a, True)
    batch_b, steps_b, (k_b, cols), (right_step, column_step) = split(b, name == "matvec", transpose_b, False)
    if k != k_b:
        raise ArgumentError(
            f"{name}: inputs[0] ({places[0]}) of shape {a.shape} has {k} elements along the dim that is "
            f"summed, inputs[1] ({places[1]}) of shape {b.shape} has {k_b}: reshape or transpose one of them"
        )
    if max(rows, cols) >= EXTENT:
        raise ArgumentError(f"{name}: {max(rows, cols)} rows or columns are 2^32 or more: split the call")
    batch = broadcast_shape(
        (_Named(batch_a), _Named(batch_b)), (f"{name}: batch of {places[0]}", f"batch of {places[1]}")
    )
    shape = (*batch, *((rows,) if name != "vecmat" else ()), *((cols,) if name != "matvec" else ()))
    if len(shape) > MAX_DIMS:
        raise ArgumentError(f"{name}: the result would have {len(shape)} dims, at most {MAX_DIMS} are taken")
    wide_a, wide_b = _Steps(batch_a, steps_a), _Steps(batch_b, steps_b)
    call = _Call(
        a.dtype,
        batch,
        rows,
        k,
        cols,
        shape,
        Side(aligned_strides(wide_a, batch), row_step, left_step),
        Side(aligned_strides(wide_b, batch), right_step, column_step),
    )
    bias = inputs[BIAS] if len(inputs) > BIAS else None
    if bias is not None:
        _bias_strides(name, bias, shape)
    return call


class _Steps(NamedTuple):
    shape: Shape
    strides: Strides


def _bias_strides(name: str, bias: Operand, shape: Shape) -> Strides:
    try:
        return aligned_strides(bias, shape)
    except ArgumentError:
        raise ArgumentError(
            f"{name}: inputs[2] (bias) of shape {bias.shape} does not broadcast to the result's "
            f"shape {shape}: reshape it so that aligned from the right each extent is equal or 1"
        ) from None


# --- the truth ---


def _spec(product: Array, bias: Array) -> Array:
    return product if bias is None else product + bias.astype(np.float64)


def spec_matvec(a: Array, x: Array, bias: Array = None) -> Array:
    return _spec((a.astype(np.float64) @ x.astype(np.float64)[..., None])[..., 0], bias)


def spec_vecmat(x: Array, a: Array, bias: Array = None) -> Array:
    return _spec((x.astype(np.float64)[..., None, :] @ a.astype(np.float64))[..., 0, :], bias)


def spec_matmul(
    a: Array, b: Array, bias: Array = None, transpose_a: bool = False, transpose_b: bool = False
) -> Array:
    a = a.swapaxes(-1, -2) if transpose_a else a
    b = b.swapaxes(-1, -2) if transpose_b else b
    return _spec(a.astype(np.float64) @ b.astype(np.float64), bias)


# --- the table ---

_ROWS: Final = Kernel(MATRIX_IDS + ROWS, "matrix.rows", make_rows)
_COLUMNS: Final = Kernel(MATRIX_IDS + COLUMNS, "matrix.columns", make_columns)
_TILES: Final = Kernel(MATRIX_IDS + TILES, "matrix.tiles", make_tiles)


def _sprinkle(draw: Draw, x: Array) -> Array:
    """Some elements nan, inf or -0.0, also in a view."""
    if x.size and x.flags.writeable and draw.integer(0, 3) == 0:
        for _ in range(draw.integer(1, 3)):
            x[tuple(draw.integer(0, side - 1) for side in x.shape)] = draw.choice(
                [np.nan, np.inf, -np.inf, -0.0]
            )
    return x


def _operator(
    name: str, formula: str, spec: Any, source: str, parameters: tuple[Parameter, ...] = ()
) -> Operator:
    def infer(inputs: Sequence[Operand | None], /, **turned: bool) -> tuple[Result, ...]:
        call = _read(name, inputs, **turned)
        return (Result(call.shape, call.dtype),)

    def plan(
        inputs: Sequence[Operand | None], outputs: Sequence[Operand], blocks: int, /, **turned: bool
    ) -> Plan:
        call = _read(name, inputs, **turned)
        bias = inputs[BIAS] if len(inputs) > BIAS else None

        def side(strides: Strides) -> Side:
            if name == "matvec":
                return Side(strides[:-1], strides[-1], 0)
            if name == "vecmat":
                return Side(strides[:-1], 0, strides[-1])
            return Side(strides[:-2], *strides[-2:])

        sides = (
            call.left,
            call.right,
            side(outputs[0].strides),
            None if bias is None else side(_bias_strides(name, bias, call.shape)),
        )
        return plan_product(name, call.dtype, call.batch, (call.rows, call.k, call.cols), sides, blocks)

    def example(draw: Draw) -> Example:
        def extent() -> int:
            usual = [1, draw.integer(0, 9), draw.integer(2, 40)]
            return int(draw.choice([*usual, *usual, draw.choice([64, 65, 127, 128, 264, 520])]))

        batch = draw.shape(max_dims=3, max_side=3) if draw.integer(0, 2) == 0 else ()
        batch = tuple(min(each, 3) for each in batch)
        rows, k, cols = extent(), extent(), extent()
        if rows * cols * k > 1 << 18:
            rows = min(rows, 9)
        batch_a, batch_b = (batch, draw.broadcastable(batch))[:: draw.choice([1, -1])]
        dtype, given = draw.choice(FLOATS), {each.name: draw.choice([False, True]) for each in parameters}
        a = (k, rows) if given.get("transpose_a") else (rows, k)
        b = (cols, k) if given.get("transpose_b") else (k, cols)
        inputs = [
            _sprinkle(draw, draw.array(shape, dtype, draw.choice(["finite", "small"])))
            for shape in (
                (*batch_a, *((k,) if name == "vecmat" else a)),
                (*batch_b, *((k,) if name == "matvec" else b)),
            )
        ]
        whole = np.broadcast_shapes(batch_a, batch_b)
        result = (*whole, *((rows,) if name != "vecmat" else ()), *((cols,) if name != "matvec" else ()))
        if draw.choice([True, False]):
            inputs.append(
                _sprinkle(draw, draw.array(draw.broadcastable(result), dtype, "finite"))
                if draw.integer(0, 3)
                else None
            )
        return inputs, given

    return Operator(
        name,
        "matrix",
        (2, 3),
        1,
        FLOATS,
        formula,
        infer,
        plan,
        (_ROWS, _COLUMNS, _TILES),
        spec,
        parameters=parameters,
        # Each of the roundings of a sum over k is half an ulp of a partial sum: of normal values those reach
        # about sqrt(k), and k such errors of either sign sqrt(k) times one: k * 2^-24, for k of 520 2^-15.
        # Eight times that for the worst of many sums. What cancels leaves that much beside any result.
        tolerance=Tolerance(f32=4 * 2.0**-24, atol=2.0**-12),
        same_ok=(BIAS,),
        tiling=f"a matrix above {ALONE} elements over rows, then k; of two, over {SIDE} x {SIDE} outputs",
        cost="Reads a matrix once for a vector, and once for each 32 rows or columns of another matrix.",
        source=source,
        example=example,
    )


OPERATORS: Final = (
    _operator(
        "matvec",
        "a @ x + bias: [..., m, k] @ [..., k], batch dims broadcast",
        spec_matvec,
        "torch.mv, torch.addmv; a shared by a batch of x: torch.nn.functional.linear.",
    ),
    _operator(
        "vecmat",
        "x @ a + bias: [..., k] @ [..., k, n], batch dims broadcast",
        spec_vecmat,
        "torch.matmul; a shared by a batch of x: torch.addmm.",
    ),
    _operator(
        "matmul",
        "a @ b + bias: [..., m, k] @ [..., k, n], batch dims broadcast",
        spec_matmul,
        "torch.matmul, torch.addmm, torch.baddbmm.",
        (Parameter("transpose_a", "bool", False), Parameter("transpose_b", "bool", False)),
    ),
)
