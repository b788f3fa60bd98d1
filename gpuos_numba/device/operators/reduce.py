"""Reductions: rows of any axes of an operand arrive, one value for each leaves.

The threads of a group share a row: each folds its elements into a state, then the states are joined, by
shuffles within a warp and through scratch across warps. What differs between operators is the state. There
are two kinds: floats keep three f32, integers and comparisons a 64-bit integer and an index.

    group    a row is read by     rows at once (256 threads)   for
    WARP     a warp               8                            short rows
    BLOCK    the block            1                            long rows
    COLUMN   a lane of each warp  32                           rows that lie across memory

Few long rows are split: each tile leaves the state of its part in the workspace, and the merge joins them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...descriptor import MAX_INPUTS, DType, Flag, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ..chunks import (
    make_add_exactly,
    make_chunk_count,
    make_fill8,
    make_load_raw8,
    make_max8,
    make_settle,
    make_spread_f32,
    make_spread_i64,
    make_sum8,
    make_unpack8,
)
from ..elements import (
    make_itemsize,
    make_load_f32,
    make_load_f32x8,
    make_load_i64,
    make_load_i64x8,
    make_store_f32,
    make_store_i64,
)
from ..operands import OUTPUT, make_address_of, make_element_of, make_kind_of, make_step_of
from ..reductions import make_larger
from .axes import Rows, arrange, read_axes, reduced_shape
from .planning import TILE
from .table import (
    FLOATS,
    INTS,
    REDUCE_IDS,
    Draw,
    Example,
    Kernel,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    Shared,
    Tolerance,
    Walk,
    pack,
    refuse_dtype,
)

Array = Any
WARP, BLOCK, COLUMN = 0, 1, 2
GROUP_MASK, LINEAR = 3, 4
STATE_BYTES = 16

FLOAT_IDS = REDUCE_IDS
SUM, MEAN, PROD, VAR, LOGSUMEXP, MAX, MIN = range(7)

INTEGER_IDS = REDUCE_IDS + 12
I_SUM, I_PROD, I_MAX, I_MIN, I_ANY, I_ALL, I_ARGMAX, I_ARGMIN = range(8)


# --- what a group does, whatever the state ---


@dataclass(frozen=True)
class Algebra:
    """What a state is and how states are made, joined and read. All are device functions.

    Attributes:
        first_id: op_id of operator 0.
        unroll: whether four chunks are loaded before the first is used.
        start: `(op, kind, row)` -> what elements of the row at that address are measured from.
        identity: `(op)` -> the state of no elements.
        load: `(kind, address)` -> eight aligned neighbours, raw.
        unpack: `(op, kind, raw)` -> eight values.
        spread: `(op, kind, address, step, count)` -> eight values, those from `count` on such that they
            change no state.
        single: `(op, kind, address)` -> the same of one element.
        fold: `(op, state, start, v, count, j, stride)` -> the state with eight values, elements j,
            j + stride, ..., of which `count` count.
        join: `(op, state, state)` -> the state of the elements of both.
        shuffle: `(state, mask)` -> that of the lane whose index differs by mask.
        put_scratch, get_scratch, put, get: a state to and from scratch and global memory.
        finish: `(op, state, length, parameter, kind, address)`: store the result.
    """

    first_id: int
    unroll: bool
    start: Body
    identity: Body
    load: Body
    unpack: Body
    spread: Body
    single: Body
    fold: Body
    join: Body
    shuffle: Body
    put_scratch: Body
    get_scratch: Body
    put: Body
    get: Body
    finish: Body


def make_reduce(m: Primitives, algebra: Algebra) -> Body:
    """The body of all reductions with one kind of state."""
    u64 = m.u64
    thread_index, block_width, warp_width, barrier = m.thread_index, m.block_width, m.warp_width, m.barrier
    load_u64, load_u32, load_scratch_f32, divide = m.load_u64, m.load_u32, m.load_scratch_f32, m.divide
    address_of, kind_of = make_address_of(m), make_kind_of(m)
    element_of, step_of = make_element_of(m), make_step_of(m)
    itemsize, chunk_count = make_itemsize(m), make_chunk_count(m)
    start, identity, load, unpack = algebra.start, algebra.identity, algebra.load, algebra.unpack
    spread, single, fold, join = algebra.spread, algebra.single, algebra.fold, algebra.join
    shuffle, put_scratch, get_scratch = algebra.shuffle, algebra.put_scratch, algebra.get_scratch
    put, get, finish, unroll = algebra.put, algebra.get, algebra.finish, algebra.unroll

    FIRST, COUNT, TILES, SCALARS = (
        u64(algebra.first_id),
        *(u64(offset(n)) for n in ("count", "tiles", "scalars")),
    )
    IS_WARP, IS_BLOCK, IS_COLUMN, GROUP, EVEN = (u64(n) for n in (WARP, BLOCK, COLUMN, GROUP_MASK, LINEAR))
    OUT, WORKSPACE, MERGE = u64(OUTPUT), u64(OUTPUT + 1), u64(Flag.MERGE)
    ZERO, ONE, THREE, FOUR, SEVEN, EIGHT, TWELVE, FIFTEEN = (u64(n) for n in (0, 1, 3, 4, 7, 8, 12, 15))
    SIXTEEN, HALF, STATE = u64(16), u64(32), u64(STATE_BYTES)
    OK = np.int32(0)

    def is_merging(task: Any, tile: Any) -> Any:
        flags = load_u64(task) >> HALF
        return flags & MERGE != ZERO and tile == load_u32(task + TILES)

    is_merging = m.device(is_merging)

    def arrangement(group: Any, merging: Any) -> Any:
        """(rows at once, the thread's among them, its part of the row, how many parts)"""
        thread, width, lanes = thread_index(), block_width(), warp_width()
        if group == IS_COLUMN:
            return lanes, thread & (lanes - ONE), divide(thread, lanes), divide(width, lanes)
        if group == IS_WARP or merging:
            return divide(width, lanes), divide(thread, lanes), thread & (lanes - ONE), lanes
        return ONE, ZERO, thread, width

    arrangement = m.device(arrangement)

    def place(task: Any, merging: Any, unit: Any, together: Any, mine: Any) -> Any:
        """(row, piece of it, pieces that rows are split into) of a unit of this call."""
        pieces = load_u32(task + SCALARS + SIXTEEN)
        if pieces == ONE or merging:
            return unit * together + mine, ZERO, ONE
        first = divide(unit, pieces)
        return first * together + mine, unit - first * pieces, pieces

    place = m.device(place)

    def reduce(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        # What is not needed in the loops is read from the task where it is: registers are short there.
        op = load_u32(task) - FIRST
        rows = load_u64(task + COUNT)
        length = load_u64(task + SCALARS)
        even = load_u32(task + SCALARS + TWELVE) & EVEN != ZERO
        merging = is_merging(task, tile)
        group = load_u32(task + SCALARS + TWELVE) & GROUP
        unit = tile
        if merging:
            unit = ZERO
        while True:
            together, mine, part, parts = arrangement(group, merging)
            row, piece, pieces = place(task, merging, unit, together, mine)
            if row - mine >= rows:
                break
            state = identity(op)
            if row < rows:
                if merging:
                    splits = load_u32(task + SCALARS + SIXTEEN)
                    index = part
                    while index < splits:
                        at = address_of(task, WORKSPACE) + (row * splits + index) * STATE
                        state = join(op, state, get(at))
                        index += parts
                else:
                    share = (divide(length + pieces - ONE, pieces) + SEVEN) & ~SEVEN
                    begin = piece * share
                    end = begin + share
                    if end > length:
                        end = length
                    if begin < end:
                        kind = kind_of(task, ZERO)
                        size = itemsize(kind)
                        index = row * length
                        base = element_of(context, task, ZERO, index)
                        step = size
                        if even:
                            step = step_of(context, task, ZERO, length)
                        origin = start(op, kind, base)
                        j = begin + part
                        if even and step == size and base & FIFTEEN == ZERO and group != IS_COLUMN:
                            done = begin + ((end - begin) & ~SEVEN)
                            stride = parts * EIGHT
                            j = begin + part * EIGHT
                            if unroll:
                                while j + THREE * stride < done:
                                    at = base + j * size
                                    leap = stride * size
                                    p = load(kind, at)
                                    q = load(kind, at + leap)
                                    r = load(kind, at + leap + leap)
                                    s = load(kind, at + leap + leap + leap)
                                    state = fold(op, state, origin, unpack(op, kind, p), EIGHT, j, ONE)
                                    state = fold(op, state, origin, unpack(op, kind, q), EIGHT, j, ONE)
                                    state = fold(op, state, origin, unpack(op, kind, r), EIGHT, j, ONE)
                                    state = fold(op, state, origin, unpack(op, kind, s), EIGHT, j, ONE)
                                    j += stride * FOUR
                            while j < done:
                                v = unpack(op, kind, load(kind, base + j * size))
                                state = fold(op, state, origin, v, EIGHT, j, ONE)
                                j += stride
                            j = done + part
                        while j < end:
                            count = ONE
                            if even:
                                count = chunk_count(j, end, parts)
                                v = spread(op, kind, base + j * step, parts * step, count)
                            else:
                                v = single(op, kind, element_of(context, task, ZERO, index + j))
                            state = fold(op, state, origin, v, count, j, parts)
                            j += count * parts

            group = load_u32(task + SCALARS + TWELVE) & GROUP  # anew, as what follows from it
            together, mine, part, parts = arrangement(group, merging)
            if group == IS_BLOCK and merging:
                group = IS_WARP
            lanes = warp_width()
            if group != IS_COLUMN:
                mask = lanes >> ONE
                while mask > ZERO:
                    state = join(op, state, shuffle(state, mask))
                    mask >>= ONE
            if group != IS_WARP and block_width() > lanes:
                warp = divide(thread_index(), lanes)
                warps = divide(block_width(), lanes)
                apart = lanes  # states a warp leaves
                if group == IS_BLOCK:
                    apart = ONE
                if group == IS_COLUMN or thread_index() & (lanes - ONE) == ZERO:
                    put_scratch(arena + (warp * apart + mine) * STATE, state)
                barrier()
                if warp == ZERO:
                    other = ONE
                    while other < warps:
                        state = join(op, state, get_scratch(arena + (other * apart + mine) * STATE))
                        other += ONE
                barrier()  # before the next unit writes there
            row, piece, pieces = place(task, merging, unit, together, mine)
            if part == ZERO and row < load_u64(task + COUNT):
                if pieces > ONE:
                    put(address_of(task, WORKSPACE) + (row * pieces + piece) * STATE, state)
                else:
                    parameter = load_scratch_f32(task + SCALARS + EIGHT)
                    at = element_of(context, task, OUT, row)
                    finish(op, state, load_u64(task + SCALARS), parameter, kind_of(task, OUT), at)
            if merging:
                unit += ONE
            else:
                unit += load_u32(task + TILES)
        return OK

    return reduce


# --- floats: three f32 ---


def make_reduce_f32(m: Primitives) -> Body:
    """sum, mean, prod, var, logsumexp, max and min of f32, f16 and bf16.

    State of sum and mean: the sum and what rounding took from it. prod: the product. var: mean, sum of
    squared distances from it, and number of elements, all of x - x[0] (Chan, Golub and LeVeque, 1979).
    logsumexp: the largest element, the sum of exp(x - largest) and what rounding took from that. max: the
    largest; min: the largest of -x.
    """
    u64, f32 = m.u64, m.f32
    shuffle_xor_f32, load_f32, store_f32 = m.shuffle_xor_f32, m.load_f32, m.store_f32
    load_scratch_f32, store_scratch_f32 = m.load_scratch_f32, m.store_scratch_f32
    load_element, store_element = make_load_f32(m), make_store_f32(m)
    load, unpack8, spread8, fill8 = make_load_raw8(m), make_unpack8(m), make_spread_f32(m), make_fill8(m)
    sum8, max8, larger = make_sum8(m), make_max8(m), make_larger(m)
    add_exactly, settle = make_add_exactly(m), make_settle(m)
    exp, log = math.exp, math.log
    IS_MEAN, IS_PROD, IS_VAR, IS_LOGSUMEXP, IS_MIN = (u64(op) for op in (MEAN, PROD, VAR, LOGSUMEXP, MIN))
    NOTHING, UNIT, LEAST, OTHERS = f32(0), f32(1), f32(-np.inf), f32(7)
    ONE, FOUR, EIGHT = u64(1), u64(4), u64(8)

    def start(op: Any, kind: Any, row: Any) -> Any:
        if op == IS_VAR:
            return load_element(kind, row)
        return NOTHING

    def identity(op: Any) -> Any:
        if op <= IS_MEAN or op == IS_VAR:
            return NOTHING, NOTHING, NOTHING
        if op == IS_PROD:
            return UNIT, NOTHING, NOTHING
        return LEAST, NOTHING, NOTHING

    def negated(op: Any, v: Any) -> Any:
        if op == IS_MIN:
            return -v[0], -v[1], -v[2], -v[3], -v[4], -v[5], -v[6], -v[7]
        return v

    negated = m.device(negated)

    def unpack(op: Any, kind: Any, raw: Any) -> Any:
        return negated(op, unpack8(kind, raw))

    def filled(op: Any, v: Any, count: Any) -> Any:
        # Copies of the first element change no largest, and var counts how often it stands.
        if op <= IS_MEAN:
            return fill8(v, count, NOTHING)
        if op == IS_PROD:
            return fill8(v, count, UNIT)
        if op == IS_LOGSUMEXP:
            return fill8(v, count, LEAST)
        return negated(op, v)

    filled = m.device(filled)

    def spread(op: Any, kind: Any, address: Any, step: Any, count: Any) -> Any:
        return filled(op, spread8(kind, address, step, count), count)

    def single(op: Any, kind: Any, address: Any) -> Any:
        x = load_element(kind, address)
        return filled(op, (x, x, x, x, x, x, x, x), ONE)

    def moments(n: Any, mean: Any, squares: Any, n2: Any, mean2: Any, squares2: Any) -> Any:
        if n2 == NOTHING:
            return mean, squares, n
        if n == NOTHING:
            return mean2, squares2, n2
        both = n + n2
        apart = mean2 - mean
        share = n2 / both
        return mean + apart * share, squares + squares2 + apart * apart * (n * share), both

    moments = m.device(moments)

    def fold_moments(state: Any, origin: Any, v: Any, count: Any) -> Any:
        first = v[0]
        a, b, c, d = v[1] - first, v[2] - first, v[3] - first, v[4] - first
        e, f, g = v[5] - first, v[6] - first, v[7] - first
        n = f32(count)
        mean = (((a + b) + (c + d)) + ((e + f) + g)) / n
        a, b, c, d, e, f, g = a - mean, b - mean, c - mean, d - mean, e - mean, f - mean, g - mean
        # Copies of the first element lie -mean away from the mean, as it does itself.
        squares = ((a * a + b * b) + (c * c + d * d)) + ((e * e + f * f) + g * g)
        squares += (n - OTHERS) * (mean * mean)
        if squares < NOTHING:
            squares = NOTHING
        return moments(state[2], state[0], state[1], n, (first - origin) + mean, squares)

    fold_moments = m.device(fold_moments)

    def fold_exponentials(state: Any, v: Any) -> Any:
        largest, total, error = state
        top = larger(largest, max8(v))
        if top - top == NOTHING:  # else it is the result
            shrink = exp(largest - top)
            more = (
                ((exp(v[0] - top) + exp(v[1] - top)) + (exp(v[2] - top) + exp(v[3] - top)))
                + (exp(v[4] - top) + exp(v[5] - top))
            ) + (exp(v[6] - top) + exp(v[7] - top))
            total, error = add_exactly(total * shrink, error * shrink, more)
        return top, total, error

    fold_exponentials = m.device(fold_exponentials)

    def fold(op: Any, state: Any, origin: Any, v: Any, count: Any, j: Any, stride: Any) -> Any:
        if op <= IS_MEAN:
            total, error = add_exactly(state[0], state[1], sum8(v))
            return total, error, NOTHING
        if op == IS_PROD:
            product = ((v[0] * v[1]) * (v[2] * v[3])) * ((v[4] * v[5]) * (v[6] * v[7]))
            return state[0] * product, NOTHING, NOTHING
        if op == IS_VAR:
            return fold_moments(state, origin, v, count)
        if op == IS_LOGSUMEXP:
            return fold_exponentials(state, v)
        return larger(state[0], max8(v)), NOTHING, NOTHING

    def join(op: Any, s: Any, t: Any) -> Any:
        if op <= IS_MEAN:
            total, error = add_exactly(s[0], s[1] + t[1], t[0])
            return total, error, NOTHING
        if op == IS_PROD:
            return s[0] * t[0], NOTHING, NOTHING
        if op == IS_VAR:
            return moments(s[2], s[0], s[1], t[2], t[0], t[1])
        top = larger(s[0], t[0])
        if op == IS_LOGSUMEXP:
            if top - top == NOTHING:
                p, q = exp(s[0] - top), exp(t[0] - top)
                total, error = add_exactly(s[1] * p, s[2] * p + t[2] * q, t[1] * q)
                return top, total, error
        return top, NOTHING, NOTHING

    def shuffle(state: Any, mask: Any) -> Any:
        return (
            shuffle_xor_f32(state[0], mask),
            shuffle_xor_f32(state[1], mask),
            shuffle_xor_f32(state[2], mask),
        )

    def put_scratch(address: Any, state: Any) -> None:
        store_scratch_f32(address, state[0])
        store_scratch_f32(address + FOUR, state[1])
        store_scratch_f32(address + EIGHT, state[2])

    def get_scratch(address: Any) -> Any:
        return (
            load_scratch_f32(address),
            load_scratch_f32(address + FOUR),
            load_scratch_f32(address + EIGHT),
        )

    def put(address: Any, state: Any) -> None:
        store_f32(address, state[0])
        store_f32(address + FOUR, state[1])
        store_f32(address + EIGHT, state[2])

    def get(address: Any) -> Any:
        return load_f32(address), load_f32(address + FOUR), load_f32(address + EIGHT)

    def finish(op: Any, state: Any, length: Any, correction: Any, kind: Any, address: Any) -> None:
        result = state[0]
        if op <= IS_MEAN:
            result = settle(state[0], state[1])
            if op == IS_MEAN:
                result = result / f32(length)
        elif op == IS_VAR:
            freedom = f32(length) - correction
            if freedom < NOTHING:
                freedom = NOTHING
            result = state[1] / freedom
        elif op == IS_LOGSUMEXP:
            if result - result == NOTHING:
                result += log(state[1] + state[2])
        elif op == IS_MIN:
            result = -result
        store_element(kind, address, result)

    return make_reduce(
        m,
        Algebra(
            FLOAT_IDS,
            True,
            m.device(start),
            m.device(identity),
            load,
            m.device(unpack),
            m.device(spread),
            m.device(single),
            m.device(fold),
            m.device(join),
            m.device(shuffle),
            m.device(put_scratch),
            m.device(get_scratch),
            m.device(put),
            m.device(get),
            m.device(finish),
        ),
    )


# --- integers and comparisons: one i64 and an index ---


def make_reduce_i64(m: Primitives) -> Body:
    """sum, prod, max and min of integers; any, all, argmax and argmin of everything.

    Floats are compared by keys: integers in the same order, with -0.0 equal to 0.0 and NaN above all. Least
    is largest of what is turned round: ~x of integers, -x of floats. any and all are the largest of x != 0
    and of x == 0. Sums and products wrap at 64 bits.
    """
    u64, i64 = m.u64, np.int64
    f32, f32_bits = m.f32, m.f32_bits
    shuffle_xor_u64 = m.shuffle_xor_u64
    load_u64, store_u64, load_long, store_long = m.load_u64, m.store_u64, m.load_long, m.store_long
    store_element = make_store_i64(m)
    load_f32, load_f32x8 = make_load_f32(m), make_load_f32x8(m)
    load_i64, load_i64x8 = make_load_i64(m), make_load_i64x8(m)
    spread_f32, spread_i64, fill8 = make_spread_f32(m), make_spread_i64(m), make_fill8(m)
    IS_SUM, IS_PROD, IS_MIN, IS_ANY, IS_ALL, IS_ARGMAX, IS_ARGMIN = (
        u64(op) for op in (I_SUM, I_PROD, I_MIN, I_ANY, I_ALL, I_ARGMAX, I_ARGMIN)
    )
    F16 = u64(DType.F16)
    NOTHING, UNIT, LEAST, NAN = i64(0), i64(1), i64(-(1 << 63)), i64(0x7FFFFFFF)
    MAGNITUDE, S32, S63 = i64(0x7FFFFFFF), i64(32), i64(63)
    NO_F32 = f32(0)
    ZERO, ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN, EIGHT = (u64(n) for n in range(9))

    def start(op: Any, kind: Any, row: Any) -> Any:
        return NOTHING

    def identity(op: Any) -> Any:
        if op == IS_SUM:
            return NOTHING, ZERO
        if op == IS_PROD:
            return UNIT, ZERO
        return LEAST, ZERO

    def of_float(op: Any, x: Any) -> Any:
        if op == IS_ANY:
            return i64(x != NO_F32)
        if op == IS_ALL:
            return i64(x == NO_F32)
        if x != x:
            return NAN
        if op == IS_ARGMIN:
            x = -x
        bits = (i64(f32_bits(x + NO_F32)) << S32) >> S32
        return bits ^ ((bits >> S63) & MAGNITUDE)

    def of_integer(op: Any, x: Any) -> Any:
        if op == IS_ANY:
            return i64(x != NOTHING)
        if op == IS_ALL:
            return i64(x == NOTHING)
        if op == IS_MIN or op == IS_ARGMIN:
            return ~x
        return x

    of_float, of_integer = m.device(of_float), m.device(of_integer)

    def floats(op: Any, v: Any) -> Any:
        return (
            of_float(op, v[0]),
            of_float(op, v[1]),
            of_float(op, v[2]),
            of_float(op, v[3]),
            of_float(op, v[4]),
            of_float(op, v[5]),
            of_float(op, v[6]),
            of_float(op, v[7]),
        )

    def integers(op: Any, v: Any) -> Any:
        return (
            of_integer(op, v[0]),
            of_integer(op, v[1]),
            of_integer(op, v[2]),
            of_integer(op, v[3]),
            of_integer(op, v[4]),
            of_integer(op, v[5]),
            of_integer(op, v[6]),
            of_integer(op, v[7]),
        )

    floats, integers = m.device(floats), m.device(integers)

    def load(kind: Any, address: Any) -> Any:
        return address

    def unpack(op: Any, kind: Any, address: Any) -> Any:
        if kind >= F16:
            return floats(op, load_f32x8(kind, address))
        return integers(op, load_i64x8(kind, address))

    def filled(op: Any, v: Any, count: Any) -> Any:
        if op == IS_SUM:
            return fill8(v, count, NOTHING)
        if op == IS_PROD:
            return fill8(v, count, UNIT)
        return v  # copies of the first element change nothing else

    filled = m.device(filled)

    def spread(op: Any, kind: Any, address: Any, step: Any, count: Any) -> Any:
        if kind >= F16:
            return floats(op, spread_f32(kind, address, step, count))
        return filled(op, integers(op, spread_i64(kind, address, step, count)), count)

    def single(op: Any, kind: Any, address: Any) -> Any:
        x = NOTHING
        if kind >= F16:
            x = of_float(op, load_f32(kind, address))
        else:
            x = of_integer(op, load_i64(kind, address))
        return filled(op, (x, x, x, x, x, x, x, x), ONE)

    def preferred(s: Any, t: Any) -> Any:
        if t[0] > s[0] or (t[0] == s[0] and t[1] < s[1]):
            return t
        return s

    preferred = m.device(preferred)

    def fold_index(state: Any, v: Any, j: Any, stride: Any) -> Any:
        a, b = preferred((v[0], j), (v[1], j + stride)), (v[2], j + TWO * stride)
        a = preferred(a, preferred(b, (v[3], j + THREE * stride)))
        c = preferred((v[4], j + FOUR * stride), (v[5], j + FIVE * stride))
        c = preferred(c, preferred((v[6], j + SIX * stride), (v[7], j + SEVEN * stride)))
        return preferred(state, preferred(a, c))

    fold_index = m.device(fold_index)

    def fold_largest(largest: Any, v: Any) -> Any:
        largest = v[0] if v[0] > largest else largest
        largest = v[1] if v[1] > largest else largest
        largest = v[2] if v[2] > largest else largest
        largest = v[3] if v[3] > largest else largest
        largest = v[4] if v[4] > largest else largest
        largest = v[5] if v[5] > largest else largest
        largest = v[6] if v[6] > largest else largest
        return v[7] if v[7] > largest else largest

    fold_largest = m.device(fold_largest)

    def fold(op: Any, state: Any, origin: Any, v: Any, count: Any, j: Any, stride: Any) -> Any:
        if op == IS_SUM:
            return state[0] + v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7], ZERO
        if op == IS_PROD:
            return state[0] * v[0] * v[1] * v[2] * v[3] * v[4] * v[5] * v[6] * v[7], ZERO
        if op >= IS_ARGMAX:
            return fold_index(state, v, j, stride)
        return fold_largest(state[0], v), ZERO

    def join(op: Any, s: Any, t: Any) -> Any:
        if op == IS_SUM:
            return s[0] + t[0], ZERO
        if op == IS_PROD:
            return s[0] * t[0], ZERO
        return preferred(s, t)

    def shuffle(state: Any, mask: Any) -> Any:
        return i64(shuffle_xor_u64(u64(state[0]), mask)), shuffle_xor_u64(state[1], mask)

    def put_scratch(address: Any, state: Any) -> None:
        store_u64(address, u64(state[0]))
        store_u64(address + EIGHT, state[1])

    def get_scratch(address: Any) -> Any:
        return i64(load_u64(address)), load_u64(address + EIGHT)

    def put(address: Any, state: Any) -> None:
        store_long(address, u64(state[0]))
        store_long(address + EIGHT, state[1])

    def get(address: Any) -> Any:
        return i64(load_long(address)), load_long(address + EIGHT)

    def finish(op: Any, state: Any, length: Any, parameter: Any, kind: Any, address: Any) -> None:
        result = state[0]
        if op == IS_MIN:
            result = ~result
        elif op == IS_ANY:
            result = i64(result > NOTHING)
        elif op == IS_ALL:
            result = i64(result <= NOTHING)
        elif op >= IS_ARGMAX:
            result = i64(state[1])
        store_element(kind, address, result)

    return make_reduce(
        m,
        Algebra(
            INTEGER_IDS,
            False,
            m.device(start),
            m.device(identity),
            m.device(load),
            m.device(unpack),
            m.device(spread),
            m.device(single),
            m.device(fold),
            m.device(join),
            m.device(shuffle),
            m.device(put_scratch),
            m.device(get_scratch),
            m.device(put),
            m.device(get),
            m.device(finish),
        ),
    )


# --- plans ---

WARP_LENGTH: Final = 1024
"""Rows up to so long are read by one warp each."""

SPLIT_LENGTH: Final = 4096
"""Least elements of a row that are worth a tile of their own."""

COLUMNS: Final = 512
"""Most rows across memory that are split: one block merges what the tiles leave."""


def choose_group(rows: Rows) -> int:
    """Which threads share a row of the first operand."""
    inner_row, inner = abs((rows.row_steps[0] or (0,))[-1]), abs((rows.steps[0] or (0,))[-1])
    if rows.rows >= 8 and 0 < inner_row < inner:
        return COLUMN
    return WARP if rows.length <= WARP_LENGTH else BLOCK


def share(rows: int, length: int, group: int, blocks: int) -> tuple[int, int]:
    """(tiles, pieces of a row)."""
    elements = rows * length
    if elements <= TILE:
        return 1, 1
    wanted = min(4 * blocks, -(-elements // (TILE // 2)))
    units = -(-rows // {WARP: 8, BLOCK: 1, COLUMN: 32}[group])
    least = SPLIT_LENGTH if group == BLOCK else SPLIT_LENGTH // 32
    if 2 * units <= wanted and (group != COLUMN or rows <= COLUMNS):
        pieces = min(-(-wanted // units), length // least)
        if pieces > 1:
            return units * pieces, pieces
    return min(units, wanted), 1


def make_plan(op_id: int, x: Operand, out: Operand, rows: Rows, blocks: int, parameter: float = 0.0) -> Plan:
    """The plan of a reduction of x over `rows`, arranged with the output's strides, 0 along the length."""
    group = choose_group(rows)
    tiles, pieces = share(rows.rows, rows.length, group, blocks)
    walks = None
    if not (rows.contiguous(0) and rows.row_steps[1] in ((), (1,))):
        shape, steps = (*rows.row_shape, *rows.shape), (*rows.row_steps[0], *rows.steps[0])
        if rows.length == 0:  # no address is asked for, but a division by an extent of 0 might be
            shape, steps = (), ()
        into = Walk(x.dtype, shape, steps)
        walks = (into, *[None] * (MAX_INPUTS - 1), Walk(out.dtype, rows.row_shape, rows.row_steps[1]))
    return Plan(
        op_id,
        rows.rows,
        tiles,
        walks,
        pack("QfII", rows.length, parameter, group | (LINEAR if rows.linear else 0), pieces),
        merge=pieces > 1,
        workspace=rows.rows * pieces * STATE_BYTES if pieces > 1 else 0,
    )


_FLOAT: Final = Shared("gpuos_reduce_f32", make_reduce_f32)
_INTEGER: Final = Shared("gpuos_reduce_i64", make_reduce_i64)


def _float(op: int, name: str) -> Kernel:
    return Kernel(FLOAT_IDS + op, f"{name}.float", make_reduce_f32, _FLOAT)


def _integer(op: int, name: str) -> Kernel:
    return Kernel(INTEGER_IDS + op, f"{name}.integer", make_reduce_i64, _INTEGER)


# --- the truth ---


def _exact(x: Array) -> Array:
    """f64 of floats, i64 of the rest: in these no sum of a test rounds where it matters."""
    return x.astype(np.float64 if np.dtype(x.dtype).kind not in "biu" else np.int64)


def _axes(x: Array, dim: tuple[int, ...] | int | None) -> tuple[int, ...]:
    return read_axes("spec", (dim,) if isinstance(dim, int) else dim, x.ndim)


def spec_sum(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return np.sum(_exact(x), axis=_axes(x, dim), keepdims=keepdim)


def spec_mean(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    axes = _axes(x, dim)
    count = math.prod(x.shape[axis] for axis in axes)
    return np.divide(np.sum(_exact(x), axis=axes, keepdims=keepdim), np.float64(count))


def spec_prod(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return np.prod(_exact(x), axis=_axes(x, dim), keepdims=keepdim)


def spec_max(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return np.max(_exact(x), axis=_axes(x, dim), keepdims=keepdim)


def spec_min(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return np.min(_exact(x), axis=_axes(x, dim), keepdims=keepdim)


def spec_any(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return np.any(_exact(x) != 0, axis=_axes(x, dim), keepdims=keepdim)


def spec_all(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return np.all(_exact(x) != 0, axis=_axes(x, dim), keepdims=keepdim)


def spec_var(x: Array, dim: Any = None, keepdim: bool = False, correction: float = 1.0) -> Array:
    axes = _axes(x, dim)
    count = math.prod(x.shape[axis] for axis in axes)
    distance = _exact(x) - spec_mean(x, dim, True)
    return np.sum(distance * distance, axis=axes, keepdims=keepdim) / np.float64(max(0.0, count - correction))


def spec_logsumexp(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    axes = _axes(x, dim)
    top = np.max(_exact(x), axis=axes, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0.0)
    sums = np.log(np.sum(np.exp(_exact(x) - shift), axis=axes, keepdims=True)) + shift
    result = np.where(np.isfinite(top), sums, top)
    return result if keepdim else result.reshape(reduced_shape(x.shape, axes, False))


def spec_argmax(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return _spec_arg(np.argmax, x, dim, keepdim)


def spec_argmin(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return _spec_arg(np.argmin, x, dim, keepdim)


def _spec_arg(function: Any, x: Array, dim: Any, keepdim: bool) -> Array:
    axes = _axes(x, dim)
    one = axes[0] if len(axes) == 1 else None
    return np.reshape(function(_exact(x), axis=one), reduced_shape(x.shape, axes, keepdim))


# --- the table ---

_DIM: Final = (Parameter("dim", "axes", None), Parameter("keepdim", "bool", False))


def _operator(
    name: str,
    formula: str,
    spec: Callable[..., Any],
    floats: Kernel | None,
    integers: Kernel | None,
    *,
    result: DType | None = None,
    widens: bool = False,
    identity: bool = True,
    ordered: bool = False,
    correction: bool = False,
    tolerance: Tolerance = Tolerance(),
    values: Sequence[str] = ("any",),
    max_side: int = 9,
) -> Operator:
    """One reduction. `floats` and `integers` are its kernels for such inputs, None where it takes none.

    Args:
        result: dtype of the result, None for the input's.
        widens: integers give int64.
        identity: the reduction of no elements is defined.
        ordered: the result is an index in row-major order.
    """
    takes = (*(FLOATS if floats else ()), *(INTS if integers else ()))

    def read(inputs: Sequence[Operand], dim: tuple[int, ...] | None) -> tuple[Operand, tuple[int, ...]]:
        x = inputs[0]
        if x.dtype not in takes:
            raise refuse_dtype(name, "inputs[0]", x.dtype, takes)
        axes = read_axes(name, dim, len(x.shape))
        if ordered and dim and len(dim) > 1:
            raise ArgumentError(f"{name}: dim={dim} names {len(dim)} dims: give one, or None for all of them")
        empty = [axis for axis in axes if x.shape[axis] == 0]
        if empty and not identity:
            raise ArgumentError(
                f"{name} of no elements is not defined: dim {empty[0]} of shape {x.shape} has extent 0; "
                "reduce a dim that has elements, or leave the call out"
            )
        return x, axes

    def infer(
        inputs: Sequence[Operand], /, dim: Any = None, keepdim: bool = False, **_: Any
    ) -> tuple[Result, ...]:
        x, axes = read(inputs, dim)
        dtype = DType.I64 if widens and x.dtype in INTS else x.dtype
        return (Result(reduced_shape(x.shape, axes, keepdim), dtype if result is None else result),)

    def plan(
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        blocks: int,
        /,
        dim: Any = None,
        keepdim: bool = False,
        **parameters: float,
    ) -> Plan:
        x, axes = read(inputs, dim)
        out = outputs[0]
        kept = iter(out.strides)
        steps = []
        for axis in range(len(x.shape)):
            step = next(kept) if keepdim or axis not in axes else 0
            steps.append(0 if axis in axes else step)
        rows = arrange(x.shape, [x.strides, tuple(steps)], axes, ordered)
        kernel = floats if x.dtype in FLOATS else integers
        assert kernel is not None
        return make_plan(kernel.op_id, x, out, rows, blocks, parameters.get("correction", 0.0))

    def example(draw: Draw) -> Example:
        shape = draw.shape(max_side=max_side)
        if not identity:
            shape = tuple(max(1, extent) for extent in shape)
        dims = range(-len(shape), len(shape))
        options: list[Any] = [None, *dims]
        if len(shape) > 1 and not ordered:
            options += [(0, -1), (len(shape) - 2, len(shape) - 1)]
        given: dict[str, Any] = {"dim": draw.choice(options), "keepdim": draw.choice([False, True])}
        if correction:
            given["correction"] = draw.choice([0, 1, 0.5])
        return [draw.array(shape, draw.choice(takes), draw.choice(values))], given

    return Operator(
        name,
        "reduction",
        (1, 1),
        1,
        takes,
        formula,
        infer,
        plan,
        tuple(kernel for kernel in (floats, integers) if kernel is not None),
        spec,
        parameters=(*_DIM, Parameter("correction", "float", 1.0)) if correction else _DIM,
        tolerance=tolerance,
        tiling=f"above {TILE} elements: over rows, and few long rows over their parts",
        cost="Reads each element once.",
        source=f"torch.{name}. dim=None is all dims.",
        example=example,
    )


# A sum is right to the roundings within a chunk of eight, three in a row, and that of the result: four times
# 2^-24, where nothing cancels.
_SUMMED: Final = Tolerance(f32=4 * 2.0**-24)
# Each of n factors is rounded once more; examples have up to 27.
_MULTIPLIED: Final = Tolerance(f32=32 * 2.0**-24, atol=2.0**-25)
# The squares of a chunk round four times each; joining n chunks one after the other, as a single thread does,
# adds about the root of n roundings, for rows of up to some thousand elements.
_SQUARED: Final = Tolerance(f32=128 * 2.0**-24, atol=2.0**-25)
# exp is good to 2 ulp, and log of the sum has an absolute error where the result is near 0.
_EXPONENTIATED: Final = Tolerance(f32=8 * 2.0**-24, atol=8 * 2.0**-24)

_AMAX: Final = (_float(MAX, "amax"), _integer(I_MAX, "amax"))
_AMIN: Final = (_float(MIN, "amin"), _integer(I_MIN, "amin"))
_LARGEST: Final = "largest of a over dim, NaN if one is"
_SMALLEST: Final = "smallest of a over dim, NaN if one is"
_VALUES_ONLY: Final = "; the values only, no indices"

OPERATORS: Final = (
    _operator(
        "sum",
        "sum of a over dim",
        spec_sum,
        _float(SUM, "sum"),
        _integer(I_SUM, "sum"),
        widens=True,
        tolerance=_SUMMED,
        values=("positive", "small"),
    ),
    _operator(
        "mean",
        "sum of a over dim / how many",
        spec_mean,
        _float(MEAN, "mean"),
        None,
        tolerance=Tolerance(f32=5 * 2.0**-24),  # one more division
        values=("positive", "small"),
    ),
    _operator(
        "prod",
        "product of a over dim",
        spec_prod,
        _float(PROD, "prod"),
        _integer(I_PROD, "prod"),
        widens=True,
        tolerance=_MULTIPLIED,
        values=("positive",),
        max_side=3,
    ),
    _operator(
        "var",
        "sum of (a - mean)^2 over dim / max(0, how many - correction)",
        spec_var,
        _float(VAR, "var"),
        None,
        correction=True,
        tolerance=_SQUARED,
        values=("finite", "small"),
    ),
    _operator(
        "logsumexp",
        "log of the sum of exp(a) over dim",
        spec_logsumexp,
        _float(LOGSUMEXP, "logsumexp"),
        None,
        tolerance=_EXPONENTIATED,
    ),
    _operator("amax", _LARGEST, spec_max, *_AMAX, identity=False),
    _operator("amin", _SMALLEST, spec_min, *_AMIN, identity=False),
    _operator("max", _LARGEST + _VALUES_ONLY, spec_max, *_AMAX, identity=False),
    _operator("min", _SMALLEST + _VALUES_ONLY, spec_min, *_AMIN, identity=False),
    *(
        _operator(
            name,
            formula,
            spec,
            kernel,
            kernel,
            result=result,
            identity=identity,
            ordered=not identity,
        )
        for name, formula, spec, kernel, result, identity in (
            ("any", "whether some a is not 0", spec_any, _integer(I_ANY, "any"), DType.BOOL, True),
            ("all", "whether no a is 0", spec_all, _integer(I_ALL, "all"), DType.BOOL, True),
            (
                "argmax",
                "index of the first NaN along dim, else of the first largest a; dim=None: in a flattened",
                spec_argmax,
                _integer(I_ARGMAX, "argmax"),
                DType.I64,
                False,
            ),
            (
                "argmin",
                "index of the first NaN along dim, else of the first smallest a; dim=None: in a flattened",
                spec_argmin,
                _integer(I_ARGMIN, "argmin"),
                DType.I64,
                False,
            ),
        )
    ),
)
