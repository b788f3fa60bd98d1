"""Products with one column: `ROWS`, dot products of rows, and `COLUMNS`, sums of scaled rows.

See `matrix.py` for which serves when.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...descriptor import DType
from ...machines.base import Body, Primitives
from ..chunks import make_chunk_count, make_fill8, make_spread_f32, make_unpack8
from ..elements import make_itemsize, make_load_f32, make_unpack_half
from .matrix_parts import (
    K_AT,
    MATRIX_AT,
    ROWS_AT,
    make_base_of,
    make_batch_of,
    make_bits_of,
    make_dtype_of,
    make_is_merging,
    make_leave_sum,
    make_load_pairs2,
    make_load_pairs4,
    make_log2,
    make_merge,
    make_pick,
    make_share_k,
    make_stride_of,
    make_tile_share,
)

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
    bits_f32 = m.bits_f32
    dtype_of, stride_of, base_of = make_dtype_of(m), make_stride_of(m), make_base_of(m)
    pick, is_merging, merge, share_k = make_pick(m), make_is_merging(m), make_merge(m), make_share_k(m)
    itemsize, leave_sum, load_pairs2 = make_itemsize(m), make_leave_sum(m), make_load_pairs2(m)
    chunk_count, spread, fill8 = make_chunk_count(m), make_spread_f32(m), make_fill8(m)
    halves = make_unpack_half(m)

    K, ROWS_WORD, MATRIX = u64(K_AT), u64(ROWS_AT), u64(MATRIX_AT)
    F32 = u64(DType.F32)
    ZERO, ONE, TWO, THREE, FOUR, EIGHT, FIFTEEN, SIXTEEN = (u64(n) for n in (0, 1, 2, 3, 4, 8, 15, 16))
    S32 = u64(32)
    NOTHING = f32(0)
    OK = np.int32(0)

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
