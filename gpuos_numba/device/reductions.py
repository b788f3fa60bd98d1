"""Reductions in a warp or a block: each thread brings a value, all leave with the result of all.

A warp joins by shuffles: all of its lanes must call. A block joins its warps through scratch: all of its
threads must call, with the same address. One barrier lies between writing the area and reading it, none
after: before the same area is written again there must be another barrier, so give two reductions in a row
areas of their own and take them in turn. Then the barrier of the second frees the area of the first.

With a block of one thread (the CPU machine) a value is its own reduction.
"""

from __future__ import annotations

import functools
from typing import Any

from ..machines.base import Body, Primitives

AREA_BYTES = 512
"""Scratch that one block reduction may use: 32 warps, up to 16 bytes each."""


@functools.cache
def make_larger(m: Primitives) -> Body:
    """`larger(x, y)`: the larger f32, NaN where either is NaN."""

    def larger(x: Any, y: Any) -> Any:
        # NaN fails the first comparison and passes the second. max.f32 would drop it.
        if y > x or y != y:
            return y
        return x

    return m.device(larger)


@functools.cache
def make_comes_before(m: Primitives) -> Body:
    """`comes_before(x, i, y, j)`: whether argmax prefers x at index i: NaN first, then the larger, then the
    lower index."""

    def comes_before(x: Any, i: Any, y: Any, j: Any) -> Any:
        if x != x:
            return y == y or i < j
        return x > y or (x == y and i < j)

    return m.device(comes_before)


@functools.cache
def make_warp_sum(m: Primitives) -> Body:
    """`warp_sum(x)`: the sum of the lanes' f32, the same bits in every lane."""
    u64 = m.u64
    warp_width, shuffle_xor_f32 = m.warp_width, m.shuffle_xor_f32
    ZERO, ONE = u64(0), u64(1)

    def warp_sum(x: Any) -> Any:
        mask = warp_width() >> ONE
        while mask > ZERO:
            x += shuffle_xor_f32(x, mask)
            mask >>= ONE
        return x

    return m.device(warp_sum)


@functools.cache
def make_warp_max(m: Primitives) -> Body:
    """`warp_max(x)`: the largest of the lanes' f32, NaN where one is NaN."""
    u64 = m.u64
    warp_width, shuffle_xor_f32, larger = m.warp_width, m.shuffle_xor_f32, make_larger(m)
    ZERO, ONE = u64(0), u64(1)

    def warp_max(x: Any) -> Any:
        mask = warp_width() >> ONE
        while mask > ZERO:
            x = larger(x, shuffle_xor_f32(x, mask))
            mask >>= ONE
        return x

    return m.device(warp_max)


@functools.cache
def make_warp_argmax(m: Primitives) -> Body:
    """`warp_argmax(x, i)` -> (x, i) of the lane that argmax prefers; see `make_comes_before`."""
    u64 = m.u64
    warp_width, shuffle_xor_f32, shuffle_xor_u64 = m.warp_width, m.shuffle_xor_f32, m.shuffle_xor_u64
    comes_before = make_comes_before(m)
    ZERO, ONE = u64(0), u64(1)

    def warp_argmax(x: Any, i: Any) -> Any:
        mask = warp_width() >> ONE
        while mask > ZERO:
            y = shuffle_xor_f32(x, mask)
            j = shuffle_xor_u64(i, mask)
            if comes_before(y, j, x, i):
                x, i = y, j
            mask >>= ONE
        return x, i

    return m.device(warp_argmax)


@functools.cache
def make_join_sums(m: Primitives) -> Body:
    """`join_sums(x, area)`: the sum over the block's warps of an f32 that is the same in all lanes of one."""
    u64, f32 = m.u64, m.f32
    thread_index, block_width, warp_width, barrier = m.thread_index, m.block_width, m.warp_width, m.barrier
    load_scratch_f32, store_scratch_f32, divide = m.load_scratch_f32, m.store_scratch_f32, m.divide
    ZERO, ONE, FOUR, EIGHT, TWELVE, SIXTEEN = (u64(n) for n in (0, 1, 4, 8, 12, 16))
    NOTHING = f32(0)

    def join_sums(x: Any, area: Any) -> Any:
        thread, warp = thread_index(), warp_width()
        if block_width() == warp:
            return x
        if thread & (warp - ONE) == ZERO:
            store_scratch_f32(area + divide(thread, warp) * FOUR, x)
        barrier()
        # Every thread adds the warps' sums itself, in the same order: that takes no second barrier.
        end = area + divide(block_width(), warp) * FOUR
        total = NOTHING
        while area + SIXTEEN <= end:
            a = load_scratch_f32(area)
            b = load_scratch_f32(area + FOUR)
            c = load_scratch_f32(area + EIGHT)
            d = load_scratch_f32(area + TWELVE)
            total += (a + b) + (c + d)
            area += SIXTEEN
        while area < end:
            total += load_scratch_f32(area)
            area += FOUR
        return total

    return m.device(join_sums)


@functools.cache
def make_join_maxima(m: Primitives) -> Body:
    """`join_maxima(x, area)`: as `join_sums`, the largest, NaN where one is NaN."""
    u64 = m.u64
    thread_index, block_width, warp_width, barrier = m.thread_index, m.block_width, m.warp_width, m.barrier
    load_scratch_f32, store_scratch_f32, divide = m.load_scratch_f32, m.store_scratch_f32, m.divide
    larger = make_larger(m)
    ZERO, ONE, FOUR, EIGHT, TWELVE, SIXTEEN = (u64(n) for n in (0, 1, 4, 8, 12, 16))

    def join_maxima(x: Any, area: Any) -> Any:
        thread, warp = thread_index(), warp_width()
        if block_width() == warp:
            return x
        if thread & (warp - ONE) == ZERO:
            store_scratch_f32(area + divide(thread, warp) * FOUR, x)
        barrier()
        end = area + divide(block_width(), warp) * FOUR
        while area + SIXTEEN <= end:
            a = load_scratch_f32(area)
            b = load_scratch_f32(area + FOUR)
            c = load_scratch_f32(area + EIGHT)
            d = load_scratch_f32(area + TWELVE)
            x = larger(x, larger(larger(a, b), larger(c, d)))
            area += SIXTEEN
        while area < end:
            x = larger(x, load_scratch_f32(area))
            area += FOUR
        return x

    return m.device(join_maxima)


@functools.cache
def make_block_sum(m: Primitives) -> Body:
    """`block_sum(x, area)`: the sum of the threads' f32, the same bits in every thread."""
    warp_sum, join_sums = make_warp_sum(m), make_join_sums(m)

    def block_sum(x: Any, area: Any) -> Any:
        return join_sums(warp_sum(x), area)

    return m.device(block_sum)


@functools.cache
def make_block_max(m: Primitives) -> Body:
    """`block_max(x, area)`: the largest of the threads' f32, NaN where one is NaN."""
    warp_max, join_maxima = make_warp_max(m), make_join_maxima(m)

    def block_max(x: Any, area: Any) -> Any:
        return join_maxima(warp_max(x), area)

    return m.device(block_max)


@functools.cache
def make_block_argmax(m: Primitives) -> Body:
    """`block_argmax(x, i, area)` -> (x, i) of the thread that argmax prefers; see `make_comes_before`."""
    u64 = m.u64
    thread_index, block_width, warp_width, barrier = m.thread_index, m.block_width, m.warp_width, m.barrier
    load_scratch_f32, store_scratch_f32 = m.load_scratch_f32, m.store_scratch_f32
    load_u64, store_u64 = m.load_u64, m.store_u64
    divide, comes_before, warp_argmax = m.divide, make_comes_before(m), make_warp_argmax(m)
    ZERO, ONE, EIGHT, SIXTEEN = u64(0), u64(1), u64(8), u64(16)

    def block_argmax(x: Any, i: Any, area: Any) -> Any:
        x, i = warp_argmax(x, i)
        thread, warp = thread_index(), warp_width()
        if block_width() == warp:
            return x, i
        if thread & (warp - ONE) == ZERO:
            mine = area + divide(thread, warp) * SIXTEEN
            store_scratch_f32(mine, x)
            store_u64(mine + EIGHT, i)
        barrier()
        end = area + divide(block_width(), warp) * SIXTEEN
        while area < end:
            y = load_scratch_f32(area)
            j = load_u64(area + EIGHT)
            if comes_before(y, j, x, i):
                x, i = y, j
            area += SIXTEEN
        return x, i

    return m.device(block_argmax)


@functools.cache
def make_group_sum(m: Primitives) -> Body:
    """`group_sum(wide, x, area)`: the sum of a block where `wide`, else of a warp; see `make_block_sum`."""
    warp_sum, join_sums = make_warp_sum(m), make_join_sums(m)

    def group_sum(wide: Any, x: Any, area: Any) -> Any:
        x = warp_sum(x)
        if wide:
            x = join_sums(x, area)
        return x

    return m.device(group_sum)


@functools.cache
def make_group_max(m: Primitives) -> Body:
    """`group_max(wide, x, area)`: the largest of a block where `wide`, else of a warp."""
    warp_max, join_maxima = make_warp_max(m), make_join_maxima(m)

    def group_max(wide: Any, x: Any, area: Any) -> Any:
        x = warp_max(x)
        if wide:
            x = join_maxima(x, area)
        return x

    return m.device(group_max)


@functools.cache
def make_group_sum2(m: Primitives) -> Body:
    """`group_sum2(wide, x, y, area)` -> (sum of x, sum of y), for the latency of one."""
    u64 = m.u64
    warp_width, shuffle_xor_f32 = m.warp_width, m.shuffle_xor_f32
    thread_index, block_width, barrier, divide = m.thread_index, m.block_width, m.barrier, m.divide
    load_scratch_f32, store_scratch_f32 = m.load_scratch_f32, m.store_scratch_f32
    ZERO, ONE, FOUR, EIGHT = u64(0), u64(1), u64(4), u64(8)
    NOTHING = m.f32(0)

    def group_sum2(wide: Any, x: Any, y: Any, area: Any) -> Any:
        warp = warp_width()
        mask = warp >> ONE
        while mask > ZERO:
            x += shuffle_xor_f32(x, mask)
            y += shuffle_xor_f32(y, mask)
            mask >>= ONE
        if wide and block_width() > warp:
            thread = thread_index()
            if thread & (warp - ONE) == ZERO:
                mine = area + divide(thread, warp) * EIGHT
                store_scratch_f32(mine, x)
                store_scratch_f32(mine + FOUR, y)
            barrier()
            end = area + divide(block_width(), warp) * EIGHT
            x, y = NOTHING, NOTHING
            while area < end:
                x += load_scratch_f32(area)
                y += load_scratch_f32(area + FOUR)
                area += EIGHT
        return x, y

    return m.device(group_sum2)
