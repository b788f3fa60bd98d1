"""Softmax and its logarithm along one dim: rows arrive, rows of the same shape leave.

A warp works on a short row, the block on a long one. Up to 16 elements a thread stay in registers, so that
rows of up to 512 or 4,096 contiguous elements are read once; longer and strided ones are read twice. Each
thread reads the elements of a row that it will write, before any of that row is written, so the output may
be exactly the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...descriptor import LAYOUT_BYTES, MAX_INPUTS, Flag, layout_offset, offset
from ...machines.base import Body, Primitives
from ...protocol import CONTEXT, field
from ..chunks import (
    make_add_exactly,
    make_chunk_count,
    make_fill8,
    make_load8,
    make_load_raw8,
    make_max8,
    make_store8,
    make_sum8,
    make_unpack8,
)
from ..elements import (
    make_element_address,
    make_itemsize,
    make_store_f32x8,
)
from ..reductions import AREA_BYTES, make_group_max, make_group_sum, make_larger
from .axes import Rows, arrange, read_axes
from .table import (
    FLOATS,
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
WIDE = 1
SOFTMAX_IDS: Final = REDUCE_IDS + 32
SOFTMAX, LOG_SOFTMAX = range(2)


def make_softmax(m: Primitives) -> Body:
    """The body of softmax and log_softmax."""
    u64, f32 = m.u64, m.f32
    thread_index, block_width, warp_width, divide = m.thread_index, m.block_width, m.warp_width, m.divide
    load_u64, load_u32 = m.load_u64, m.load_u32
    element_address = make_element_address(m)
    itemsize, chunk_count, fill8 = make_itemsize(m), make_chunk_count(m), make_fill8(m)
    load_raw8, unpack8, load8 = make_load_raw8(m), make_unpack8(m), make_load8(m)
    store_vector, store8 = make_store_f32x8(m), make_store8(m)
    sum8, max8, larger, add_exactly = make_sum8(m), make_max8(m), make_larger(m), make_add_exactly(m)
    group_sum, group_max = make_group_sum(m), make_group_max(m)
    exp, log = math.exp, math.log

    FIRST, INPUT, OUTPUT = u64(SOFTMAX_IDS), u64(offset("inputs")), u64(offset("outputs"))
    COUNT, TILES, DTYPES = u64(offset("count")), u64(offset("tiles")), u64(offset("dtypes"))
    SCALARS, LAYOUTS_AT = u64(offset("scalars")), u64(offset("layouts"))
    LAYOUTS, LAYOUT_SIZE = u64(field(CONTEXT, "layouts")), u64(LAYOUT_BYTES)
    NDIM, STRIDES = u64(layout_offset("ndim")), u64(layout_offset("strides"))
    STRIDED, SLOT_MASK, IS_WIDE = u64(Flag.STRIDED), u64(0xFFFF), u64(WIDE)
    ZERO, ONE, SEVEN, EIGHT, FIFTEEN = (u64(n) for n in (0, 1, 7, 8, 15))
    SIXTEEN, HALF, AREA = u64(16), u64(32), u64(AREA_BYTES)
    IS_LOG = u64(LOG_SOFTMAX)
    NOTHING, UNIT, LEAST = f32(0), f32(1), f32(-np.inf)
    OK = np.int32(0)

    def exp8(v: Any, top: Any) -> Any:
        return (
            exp(v[0] - top),
            exp(v[1] - top),
            exp(v[2] - top),
            exp(v[3] - top),
            exp(v[4] - top),
            exp(v[5] - top),
            exp(v[6] - top),
            exp(v[7] - top),
        )

    exp8 = m.device(exp8)

    def scale8(v: Any, by: Any) -> Any:
        return v[0] * by, v[1] * by, v[2] * by, v[3] * by, v[4] * by, v[5] * by, v[6] * by, v[7] * by

    scale8 = m.device(scale8)

    def logarithm8(v: Any, top: Any, log_sum: Any) -> Any:
        # Subtracting the largest first: their sum would lose log_sum beside a large top.
        return (
            (v[0] - top) - log_sum,
            (v[1] - top) - log_sum,
            (v[2] - top) - log_sum,
            (v[3] - top) - log_sum,
            (v[4] - top) - log_sum,
            (v[5] - top) - log_sum,
            (v[6] - top) - log_sum,
            (v[7] - top) - log_sum,
        )

    logarithm8 = m.device(logarithm8)

    def fold(state: Any, v: Any) -> Any:
        """(largest, sum of exp(x - largest), its error) with eight elements more."""
        largest, total, error = state
        top = larger(largest, max8(v))
        if top == LEAST:  # nothing but -inf so far
            return top, total, error
        shrink = exp(largest - top)
        total, error = add_exactly(total * shrink, error * shrink, sum8(exp8(v, top)))
        return top, total, error

    fold = m.device(fold)

    def softmax(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        is_log = load_u32(task) - FIRST == IS_LOG
        strided = (load_u64(task) >> HALF) & STRIDED != ZERO
        x = load_u64(task + INPUT)
        out = load_u64(task + OUTPUT)
        rows = load_u64(task + COUNT)
        tiles = load_u32(task + TILES)
        kinds = load_u32(task + DTYPES)
        kind = kinds & FIFTEEN
        kind_out = (kinds >> SIXTEEN) & FIFTEEN
        length = load_u64(task + SCALARS)
        how = load_u32(task + SCALARS + EIGHT)
        wide = how & IS_WIDE != ZERO
        size = itemsize(kind)
        size_out = itemsize(kind_out)
        step = size
        step_out = size_out
        layout = ZERO
        layout_out = ZERO
        if strided:
            table = load_u64(context + LAYOUTS)
            layout = table + (load_u64(task + LAYOUTS_AT) & SLOT_MASK) * LAYOUT_SIZE
            layout_out = table + (load_u32(task + LAYOUTS_AT + EIGHT) & SLOT_MASK) * LAYOUT_SIZE
            if length > ONE:
                step = load_u64(layout + STRIDES + (load_u32(layout + NDIM) - ONE) * EIGHT) * size
                step_out = load_u64(layout_out + STRIDES + (load_u32(layout_out + NDIM) - ONE) * EIGHT)
                step_out *= size_out

        thread = thread_index()
        lanes = warp_width()
        part = thread
        parts = block_width()
        # A tile takes neighbouring rows: where rows lie across memory they share what an access brings.
        ahead = ONE
        if not wide:
            ahead = divide(parts, lanes)
            part = thread & (lanes - ONE)
            parts = lanes
        groups = divide(rows + ahead - ONE, ahead)
        mine = divide(groups + tiles - ONE, tiles) * ahead
        row = tile * mine
        end = row + mine
        if end > rows:
            end = rows
        if not wide:
            row += divide(thread, lanes)
        maxima = arena
        sums = arena + AREA

        while row < end:
            index = row * length
            base = x + index * size
            target = out + index * size_out
            if strided:
                base = element_address(layout, x, index)
                target = element_address(layout_out, out, index)
            vector = step == size and step_out == size_out
            vector = vector and ((base | target) & FIFTEEN) | (length & SEVEN) == ZERO
            if vector and length <= parts * SIXTEEN:
                a = part * EIGHT
                b = a + parts * EIGHT
                has_a = a < length
                has_b = b < length
                if not has_a:
                    a = ZERO
                if not has_b:
                    b = ZERO
                raw_a = load_raw8(kind, base + a * size)
                raw_b = load_raw8(kind, base + b * size)
                p = unpack8(kind, raw_a)
                q = unpack8(kind, raw_b)
                most = LEAST
                if has_a:
                    most = max8(p)
                if has_b:
                    most = larger(most, max8(q))
                top = group_max(wide, most, maxima)
                e = exp8(p, top)
                f = exp8(q, top)
                total = NOTHING
                if has_a:
                    total = sum8(e)
                if has_b:
                    total += sum8(f)
                total = group_sum(wide, total, sums)
                if is_log:
                    log_sum = log(total)
                    e = logarithm8(p, top, log_sum)
                    f = logarithm8(q, top, log_sum)
                else:
                    share = UNIT / total
                    e = scale8(e, share)
                    f = scale8(f, share)
                if has_a:
                    store_vector(kind_out, target + a * size_out, e)
                if has_b:
                    store_vector(kind_out, target + b * size_out, f)
            else:
                # The elements of a thread: j, j + apart, ..., in chunks of eight that are `leap` apart.
                apart = parts
                start = part
                if vector:
                    apart = ONE
                    start = part * EIGHT
                leap = parts * EIGHT
                state = LEAST, NOTHING, NOTHING
                j = start
                while j < length:
                    count = chunk_count(j, length, apart)
                    v = load8(vector, kind, base + j * step, apart * step, count)
                    state = fold(state, fill8(v, count, LEAST))
                    j += leap
                top = group_max(wide, state[0], maxima)
                total = NOTHING
                if state[0] != LEAST:
                    total = (state[1] + state[2]) * exp(state[0] - top)
                total = group_sum(wide, total, sums)
                log_sum = log(total)
                share = UNIT / total
                j = start
                while j < length:
                    count = chunk_count(j, length, apart)
                    v = load8(vector, kind, base + j * step, apart * step, count)
                    if is_log:
                        v = logarithm8(v, top, log_sum)
                    else:
                        v = scale8(exp8(v, top), share)
                    store8(vector, kind_out, target + j * step_out, apart * step_out, count, v)
                    j += leap
            row += ahead
        return OK

    return softmax


# --- plans ---

REGISTERS: Final = 16
"""Elements of a row that a thread keeps."""

ALONE: Final = 8 * 1024
"""Elements up to which one block does it all: a task of one tile can be part of a run."""

TILE: Final = 4 * 1024
"""Elements of a tile otherwise."""


def choose_wide(rows: Rows) -> bool:
    """Whether the block works on a row, rather than each warp on one of its own."""
    inner_row, inner = abs((rows.row_steps[0] or (0,))[-1]), abs((rows.steps[0] or (0,))[-1])
    if rows.rows >= 8 and 0 < inner_row < inner:
        return False  # eight rows side by side share the bytes that an access brings
    return rows.length > (32 * REGISTERS if rows.rows < 8 else 64 * REGISTERS)


def share_rows(rows: Rows, wide: bool, blocks: int) -> int:
    """How many tiles share the rows."""
    elements = rows.rows * rows.length
    if elements <= ALONE:
        return 1
    groups = rows.rows if wide else -(-rows.rows // 8)
    return max(1, min(groups, 4 * blocks, elements // TILE))


def _infer(name: str, inputs: Sequence[Operand], dim: int) -> tuple[Operand, tuple[int, ...]]:
    x = inputs[0]
    if x.dtype not in FLOATS:
        raise refuse_dtype(name, "inputs[0]", x.dtype, FLOATS)
    return x, read_axes(name, (dim,), len(x.shape))


# --- the truth ---


def spec_log_softmax(x: Array, dim: int = -1) -> Array:
    if x.ndim == 0:
        return spec_log_softmax(x.reshape(1)).reshape(())
    exact = x.astype(np.float64)
    shifted = exact - np.max(exact, axis=dim, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.sum(np.exp(shifted), axis=dim, keepdims=True))


def spec_softmax(x: Array, dim: int = -1) -> Array:
    return np.exp(spec_log_softmax(x, dim))


# --- the table ---

_BODY: Final = Shared("gpuos_softmax", make_softmax)


def _operator(name: str, op: int, formula: str, spec: Any, tolerance: Tolerance) -> Operator:
    kernel = Kernel(SOFTMAX_IDS + op, name, make_softmax, _BODY)

    def infer(inputs: Sequence[Operand], /, dim: int) -> tuple[Result, ...]:
        x, _ = _infer(name, inputs, dim)
        return (Result(x.shape, x.dtype),)

    def plan(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, dim: int) -> Plan:
        x, axes = _infer(name, inputs, dim)
        out = outputs[0]
        rows = arrange(x.shape, [x.strides, out.strides], axes)
        wide = choose_wide(rows)
        walks = None
        if rows.length and not (rows.contiguous(0) and rows.contiguous(1)):
            shape = (*rows.row_shape, *rows.shape)
            into, onto = ((*rows.row_steps[i], *rows.steps[i]) for i in (0, 1))
            walks = (
                Walk(x.dtype, shape, into),
                *[None] * (MAX_INPUTS - 1),
                Walk(out.dtype, shape, onto),
            )
        return Plan(
            kernel.op_id,
            rows.rows if rows.length else 0,
            share_rows(rows, wide, blocks),
            walks,
            pack("QI", rows.length, WIDE if wide else 0),
        )

    def example(draw: Draw) -> Example:
        shape = draw.shape()
        x = draw.array(shape, draw.choice(FLOATS), draw.choice(["finite", "any"]))
        return [x], {"dim": draw.integer(-max(1, len(shape)), max(1, len(shape)) - 1)}

    return Operator(
        name,
        "softmax",
        (1, 1),
        1,
        FLOATS,
        formula,
        infer,
        plan,
        (kernel,),
        spec,
        parameters=(Parameter("dim", "int", -1),),
        tolerance=tolerance,
        same_ok=(0,),
        tiling=f"above {ALONE} elements, over rows",
        cost="Reads rows of up to 4,096 contiguous elements once, others twice.",
        source=f"torch.{name}.",
        example=example,
    )


# exp is good to 2 ulp and its argument to half of one, which for a probability that matters (above e^-16) is
# 16 * 2^-24; the sum and the quotient add a few. Below 2^-126 f32 has no relative precision.
OPERATORS: Final = (
    _operator(
        "softmax",
        SOFTMAX,
        "exp(a - largest) / sum of exp(a - largest), over dim",
        spec_softmax,
        Tolerance(f32=32 * 2.0**-24, atol=2.0**-30),
    ),
    _operator(
        "log_softmax",
        LOG_SOFTMAX,
        "a - largest - log(sum of exp(a - largest)), over dim",
        spec_log_softmax,
        Tolerance(f32=4 * 2.0**-24, atol=8 * 2.0**-24),
    ),
)
