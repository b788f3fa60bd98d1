"""Eight keys at a time, by 8, 16 or 32 lanes: scores and weighted values of one query or of four.

A batch is eight keys of two bytes an element, or four of f32: each lane has 16 bytes of each, or 32, which
are eight elements. Lanes exchange partial products until each of every eight has the whole score of one key;
they all learn all weights, and each adds its own elements of the values. A batch of keys is loaded as soon
as the one before has been multiplied, and so are values. Needs warps of 32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ...descriptor import DType
from ...machines.base import Body, Primitives
from ..chunks import make_at, make_unpack8
from ..operands import make_kind_of
from ..reductions import make_larger
from .attend_parts import (
    BUNDLE,
    KEYS_AT,
    QUERIES_AT,
    QUERY_BYTES,
    VALUES_AT,
    make_add_weighted8,
    make_admit,
    make_base,
    make_dot8,
    make_look_up,
    make_scale8,
    make_scratch8,
)


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
    """`gather_score(part, lane_bits, d)`: lane k of every eight leaves with the group's sum of d[k]."""
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
