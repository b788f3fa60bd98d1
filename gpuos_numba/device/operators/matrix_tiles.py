"""Products of two matrices: a block computes a tile of the output from staged pieces of both."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...descriptor import DType, offset
from ...machines.base import Body, Primitives
from ...protocol import ARENA_BYTES
from ..chunks import make_fill8, make_load_raw8, make_spread_f32, make_unpack8
from ..elements import make_itemsize, make_load_f32, make_store_f32
from ..operands import OUTPUT, make_address_of
from .matrix_parts import BIAS, COLS_AT, K_AT, ROWS_AT, make_base_of, make_dtype_of, make_log2, make_stride_of

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
