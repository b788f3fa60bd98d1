"""Normalisations over the last dims: rows arrive, with weights that all rows share; rows leave.

layer_norm and rms_norm, and both fused with the residual addition before them: those write the sum, rounded
to the residual's dtype, as a second output and normalise what they wrote. A warp works on a short row, the
block on a long one. Up to 16 elements a thread stay in registers, so that rows of up to 512 or 4,096
contiguous elements are read once. Each thread reads the elements of a row that it will write, before any of
that row is normalised, so an output may be exactly x or the residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...descriptor import MAX_INPUTS, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ...shapes import Strides, aligned_strides
from ..chunks import (
    make_add_exactly,
    make_chunk_count,
    make_fill8,
    make_load8,
    make_load_raw8,
    make_round8,
    make_settle,
    make_store8,
    make_sum8,
    make_unpack8,
)
from ..elements import make_itemsize, make_store_f32x8
from ..operands import (
    OUTPUT,
    make_address_of,
    make_element_of,
    make_is_strided,
    make_kind_of,
    make_place,
    make_rows_fit,
    make_step_of,
)
from ..reductions import AREA_BYTES, make_group_sum, make_group_sum2
from .axes import arrange
from .softmax import ALONE, choose_wide, share_rows
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
WIDE, LINEAR = 1, 2
NORM_IDS: Final = REDUCE_IDS + 40
LAYER_NORM, RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM = range(4)


def make_norm(m: Primitives) -> Body:
    """The body of all four.

    The mean is taken twice: the second pass also sums x - mean, which says how much the rounding of the mean
    was off, and the squares of those differences. A row 10,000 + N(0, 0.01) comes out right.
    """
    u64, f32 = m.u64, m.f32
    thread_index, block_width, warp_width, divide = m.thread_index, m.block_width, m.warp_width, m.divide
    load_u64, load_u32, load_scratch_f32 = m.load_u64, m.load_u32, m.load_scratch_f32
    address_of, kind_of, element_of, step_of = (
        make_address_of(m),
        make_kind_of(m),
        make_element_of(m),
        make_step_of(m),
    )
    is_strided, rows_fit, place_of = make_is_strided(m), make_rows_fit(m), make_place(m)
    itemsize, chunk_count, fill8 = make_itemsize(m), make_chunk_count(m), make_fill8(m)
    load_raw8, unpack8, load8, round8 = make_load_raw8(m), make_unpack8(m), make_load8(m), make_round8(m)
    store_vector, store8 = make_store_f32x8(m), make_store8(m)
    sum8, add_exactly, settle = make_sum8(m), make_add_exactly(m), make_settle(m)
    group_sum, group_sum2 = make_group_sum(m), make_group_sum2(m)
    sqrt = math.sqrt

    FIRST, COUNT, TILES, SCALARS = u64(NORM_IDS), *(u64(offset(n)) for n in ("count", "tiles", "scalars"))
    IS_WIDE, EVEN, OUT, TOTAL = u64(WIDE), u64(LINEAR), u64(OUTPUT), u64(OUTPUT + 1)
    ZERO, ONE, TWO, THREE, SEVEN, EIGHT, TWELVE, FIFTEEN = (u64(n) for n in (0, 1, 2, 3, 7, 8, 12, 15))
    SIXTEEN, AREA = u64(16), u64(AREA_BYTES)
    NOTHING, UNIT = f32(0), f32(1)
    NOTHING8 = (NOTHING,) * 8
    OK = np.int32(0)

    def add8(v: Any, w: Any) -> Any:
        return (
            v[0] + w[0],
            v[1] + w[1],
            v[2] + w[2],
            v[3] + w[3],
            v[4] + w[4],
            v[5] + w[5],
            v[6] + w[6],
            v[7] + w[7],
        )

    def multiply8(v: Any, w: Any) -> Any:
        return (
            v[0] * w[0],
            v[1] * w[1],
            v[2] * w[2],
            v[3] * w[3],
            v[4] * w[4],
            v[5] * w[5],
            v[6] * w[6],
            v[7] * w[7],
        )

    def shift8(v: Any, by: Any) -> Any:
        return v[0] - by, v[1] - by, v[2] - by, v[3] - by, v[4] - by, v[5] - by, v[6] - by, v[7] - by

    def scale8(v: Any, by: Any) -> Any:
        return v[0] * by, v[1] * by, v[2] * by, v[3] * by, v[4] * by, v[5] * by, v[6] * by, v[7] * by

    add8, multiply8, shift8, scale8 = m.device(add8), m.device(multiply8), m.device(shift8), m.device(scale8)

    def larger_of_zero(x: Any) -> Any:
        if x < NOTHING:  # by rounding; NaN stays
            return NOTHING
        return x

    larger_of_zero = m.device(larger_of_zero)

    def spot(task: Any, tile: Any, turn: Any) -> Any:
        """(the thread's place in its group, threads of a group, row of this turn, end of the tile's rows)"""
        rows, tiles = load_u64(task + COUNT), load_u32(task + TILES)
        thread, parts, lanes = thread_index(), block_width(), warp_width()
        part, ahead, first = thread, ONE, ZERO
        if load_u32(task + SCALARS + TWELVE) & IS_WIDE == ZERO:
            ahead = divide(parts, lanes)
            first = divide(thread, lanes)
            part = thread & (lanes - ONE)
            parts = lanes
        mine = divide(divide(rows + ahead - ONE, ahead) + tiles - ONE, tiles) * ahead
        row = tile * mine
        end = row + mine
        if end > rows:
            end = rows
        return part, parts, row + first + turn * ahead, end

    spot = m.device(spot)

    def scale_of(task: Any, length: Any, squares: Any, off: Any) -> Any:
        variance = squares / length - off * off
        if variance < NOTHING:  # by rounding; NaN stays
            variance = NOTHING
        return UNIT / sqrt(variance + load_scratch_f32(task + SCALARS + EIGHT))

    scale_of = m.device(scale_of)

    def keep(
        task: Any, op: Any, index: Any, length: Any, wide: Any, part: Any, parts: Any, arena: Any
    ) -> None:
        """Normalise one contiguous row whose elements stay in registers."""
        centred, adds = op & ONE == ZERO, op >= TWO
        j = part * EIGHT
        k = j + parts * EIGHT
        has_a, has_b = j < length, k < length
        if not has_a:
            j = ZERO
        if not has_b:
            k = ZERO
        place = ONE  # of the weight
        kind = kind_of(task, ZERO)
        size = itemsize(kind)
        row = address_of(task, ZERO) + index * size
        raw_a, raw_b = load_raw8(kind, row + j * size), load_raw8(kind, row + k * size)
        a, b = NOTHING8, NOTHING8
        if adds:
            place = TWO
            kind_more = kind_of(task, ONE)
            size = itemsize(kind_more)
            row = address_of(task, ONE) + index * size
            more_a, more_b = load_raw8(kind_more, row + j * size), load_raw8(kind_more, row + k * size)
            kind_total = kind_of(task, TOTAL)
            size = itemsize(kind_total)
            row = address_of(task, TOTAL) + index * size
            a = round8(kind_total, add8(unpack8(kind, raw_a), unpack8(kind_more, more_a)))
            b = round8(kind_total, add8(unpack8(kind, raw_b), unpack8(kind_more, more_b)))
            if has_a:
                store_vector(kind_total, row + j * size, a)
            if has_b:
                store_vector(kind_total, row + k * size, b)
        # The weights arrive while the sums are on their way.
        weight = address_of(task, place)
        weight_a, weight_b = raw_a, raw_b
        if weight != ZERO:
            kind_weight = kind_of(task, place)
            size = itemsize(kind_weight)
            weight_a = load_raw8(kind_weight, weight + j * size)
            weight_b = load_raw8(kind_weight, weight + k * size)
        bias_a, bias_b = weight_a, weight_b
        if centred:
            bias = address_of(task, place + ONE)
            if bias != ZERO:
                kind_bias = kind_of(task, place + ONE)
                size = itemsize(kind_bias)
                bias_a = load_raw8(kind_bias, bias + j * size)
                bias_b = load_raw8(kind_bias, bias + k * size)
        if not adds:
            a, b = unpack8(kind, raw_a), unpack8(kind, raw_b)
        count = f32(length)
        if centred:
            total = NOTHING
            if has_a:
                total = sum8(a)
            if has_b:
                total += sum8(b)
            mean = group_sum(wide, total, arena) / count
            a, b = shift8(a, mean), shift8(b, mean)
        total, squares = NOTHING, NOTHING
        if has_a:
            total = sum8(a)
            squares = sum8(multiply8(a, a))
        if has_b:
            total += sum8(b)
            squares += sum8(multiply8(b, b))
        total, squares = group_sum2(wide, total, squares, arena + AREA)
        off = NOTHING
        if centred:
            off = total / count
        scale = scale_of(task, count, squares, off)
        a, b = scale8(shift8(a, off), scale), scale8(shift8(b, off), scale)
        if address_of(task, place) != ZERO:
            kind = kind_of(task, place)
            a = multiply8(a, unpack8(kind, weight_a))
            b = multiply8(b, unpack8(kind, weight_b))
        if centred and address_of(task, place + ONE) != ZERO:
            kind = kind_of(task, place + ONE)
            a = add8(a, unpack8(kind, bias_a))
            b = add8(b, unpack8(kind, bias_b))
        kind = kind_of(task, OUT)
        size = itemsize(kind)
        row = address_of(task, OUT) + index * size
        if has_a:
            store_vector(kind, row + j * size, a)
        if has_b:
            store_vector(kind, row + k * size, b)

    keep = m.device(keep)

    def stream(
        context: Any,
        task: Any,
        op: Any,
        index: Any,
        length: Any,
        wide: Any,
        even: Any,
        part: Any,
        parts: Any,
        arena: Any,
    ) -> None:
        """Normalise one row of any length and strides, reading it again for each of its passes.

        The elements of a thread: j, j + apart, ..., in chunks of eight (of one, where the row steps unevenly)
        that are `leap` apart.
        """
        centred, adds = op & ONE == ZERO, op >= TWO
        vector = rows_fit(context, task, index, length, even)
        apart, start, leap = parts, part, parts * EIGHT
        if vector:
            apart = ONE
            start = part * EIGHT
        if not even:
            leap = parts
        place = ONE  # of the weight
        source = ZERO  # what is normalised: x, or the sum that was written
        if adds:
            place = TWO
            source = TOTAL
            kind, kind_more, kind_total = kind_of(task, ZERO), kind_of(task, ONE), kind_of(task, TOTAL)
            row = element_of(context, task, ZERO, index)
            row_more = element_of(context, task, ONE, index)
            row_total = element_of(context, task, TOTAL, index)
            step = step_of(context, task, ZERO, length)
            step_more = step_of(context, task, ONE, length)
            step_total = step_of(context, task, TOTAL, length)
            j = start
            while j < length:
                n = chunk_count(j, length, apart)
                if not even:
                    n = ONE
                p = place_of(context, task, ZERO, even, row, step, index, j)
                q = place_of(context, task, ONE, even, row_more, step_more, index, j)
                v = load8(vector, kind, p, apart * step, n)
                v = add8(v, load8(vector, kind_more, q, apart * step_more, n))
                p = place_of(context, task, TOTAL, even, row_total, step_total, index, j)
                store8(vector, kind_total, p, apart * step_total, n, v)
                j += leap
        row = element_of(context, task, source, index)
        step = step_of(context, task, source, length)
        count = f32(length)
        mean = NOTHING
        total, error = NOTHING, NOTHING
        if centred:
            j = start
            while j < length:
                n = chunk_count(j, length, apart)
                if not even:
                    n = ONE
                p = place_of(context, task, source, even, row, step, index, j)
                v = load8(vector, kind_of(task, source), p, apart * step, n)
                total, error = add_exactly(total, error, sum8(fill8(v, n, NOTHING)))
                j += leap
            mean = group_sum(wide, settle(total, error), arena) / count
        total, squares, error = NOTHING, NOTHING, NOTHING
        j = start
        while j < length:
            n = chunk_count(j, length, apart)
            if not even:
                n = ONE
            p = place_of(context, task, source, even, row, step, index, j)
            v = fill8(shift8(load8(vector, kind_of(task, source), p, apart * step, n), mean), n, NOTHING)
            total += sum8(v)
            squares, error = add_exactly(squares, error, sum8(multiply8(v, v)))
            j += leap
        total, squares = group_sum2(wide, total, settle(squares, error), arena + AREA)
        off = NOTHING
        if centred:
            off = total / count
        scale = scale_of(task, count, squares, off)

        row_out = element_of(context, task, OUT, index)
        step_out = step_of(context, task, OUT, length)
        weight = address_of(task, place)
        bias = ZERO
        if centred:
            bias = address_of(task, place + ONE)
        # Weights have the rows' layout with strides of 0 between rows, so that a row of them is the first.
        step_weight, step_bias = ZERO, ZERO
        if weight != ZERO:
            step_weight = step_of(context, task, place, length)
        if bias != ZERO:
            step_bias = step_of(context, task, place + ONE, length)
        j = start
        while j < length:
            n = chunk_count(j, length, apart)
            if not even:
                n = ONE
            p = place_of(context, task, source, even, row, step, index, j)
            v = load8(vector, kind_of(task, source), p, apart * step, n)
            v = scale8(shift8(shift8(v, mean), off), scale)
            if weight != ZERO:
                p = place_of(context, task, place, even, weight, step_weight, index, j)
                v = multiply8(v, load8(vector, kind_of(task, place), p, apart * step_weight, n))
            if bias != ZERO:
                p = place_of(context, task, place + ONE, even, bias, step_bias, index, j)
                v = add8(v, load8(vector, kind_of(task, place + ONE), p, apart * step_bias, n))
            p = place_of(context, task, OUT, even, row_out, step_out, index, j)
            store8(vector, kind_of(task, OUT), p, apart * step_out, n, v)
            j += leap

    stream = m.device(stream)

    def norm(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        # Nothing is held over a row that the task or the turn says again: registers are short there.
        turn = ZERO
        while True:
            part, parts, row, end = spot(task, tile, turn)
            if row >= end:
                break
            op = load_u32(task) - FIRST
            length = load_u64(task + SCALARS)
            how = load_u32(task + SCALARS + TWELVE)
            wide = how & IS_WIDE != ZERO
            fits = False
            if length <= parts * SIXTEEN and not is_strided(task):
                ragged = address_of(task, ZERO) | address_of(task, ONE) | address_of(task, TWO)
                ragged |= address_of(task, THREE) | address_of(task, OUT) | address_of(task, TOTAL)
                fits = (ragged & FIFTEEN) | (length & SEVEN) == ZERO
            if fits:
                keep(task, op, row * length, length, wide, part, parts, arena)
            else:
                even = how & EVEN != ZERO
                stream(context, task, op, row * length, length, wide, even, part, parts, arena)
            turn += ONE
        return OK

    return norm


# --- plans ---


def _plan(
    op_id: int,
    inputs: Sequence[Operand | None],
    outputs: Sequence[Operand],
    blocks: int,
    dims: int,
    eps: float,
) -> Plan:
    x = inputs[0]
    assert x is not None
    axes = tuple(range(len(x.shape) - dims, len(x.shape)))
    present = [each for each in (*inputs, *outputs) if each is not None]
    steps: list[Strides] = [aligned_strides(each, x.shape) for each in present]
    rows = arrange(x.shape, steps, axes, ordered=False)
    wide = choose_wide(rows)
    walks = None
    whole = [len(each.shape) == len(x.shape) for each in present]
    contiguous = all(
        rows.contiguous(i) if whole[i] else rows.linear and rows.steps[i] in ((), (1,))
        for i in range(len(present))
    )
    if rows.length and not contiguous:
        shape = (*rows.row_shape, *rows.shape)
        places = iter(
            Walk(each.dtype, shape, (*rows.row_steps[i], *rows.steps[i])) for i, each in enumerate(present)
        )
        walks = (
            *(None if each is None else next(places) for each in inputs),
            *[None] * (MAX_INPUTS - len(inputs)),
            *places,
        )
    how = (WIDE if wide else 0) | (LINEAR if rows.linear else 0)
    return Plan(
        op_id,
        rows.rows if rows.length else 0,
        share_rows(rows, wide, blocks),
        walks,
        pack("QfI", rows.length, eps, how),
    )


# --- the truth ---


def _axes(x: Array, dims: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - dims, x.ndim))


def spec_layer_norm(
    x: Array, weight: Array = None, bias: Array = None, eps: float = 1e-5, normalized_dims: int = 1
) -> Array:
    exact = x.astype(np.float64)
    centred = exact - np.mean(exact, axis=_axes(x, normalized_dims), keepdims=True)
    result = spec_rms_norm(centred, weight, eps, normalized_dims)
    return result if bias is None else result + bias.astype(np.float64)


def spec_rms_norm(x: Array, weight: Array = None, eps: float = 1e-6, normalized_dims: int = 1) -> Array:
    exact = x.astype(np.float64)
    squares = np.mean(exact * exact, axis=_axes(x, normalized_dims), keepdims=True)
    result = exact / np.sqrt(squares + eps)
    return result if weight is None else result * weight.astype(np.float64)


def spec_add_layer_norm(
    x: Array,
    residual: Array,
    weight: Array = None,
    bias: Array = None,
    eps: float = 1e-5,
    normalized_dims: int = 1,
) -> tuple[Array, Array]:
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(residual.dtype)
    return spec_layer_norm(total, weight, bias, eps, normalized_dims), total


def spec_add_rms_norm(
    x: Array, residual: Array, weight: Array = None, eps: float = 1e-6, normalized_dims: int = 1
) -> tuple[Array, Array]:
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(residual.dtype)
    return spec_rms_norm(total, weight, eps, normalized_dims), total


# --- the table ---

_BODY: Final = Shared("gpuos_norm", make_norm)


def _operator(name: str, op: int, formula: str, spec: Any, eps: float, source: str) -> Operator:
    kernel = Kernel(NORM_IDS + op, name, make_norm, _BODY)
    adds, centred = op >= ADD_LAYER_NORM, op in (LAYER_NORM, ADD_LAYER_NORM)
    most = 2 + adds + centred
    names = ("x", *(("residual",) if adds else ()), "weight", *(("bias",) if centred else ()))

    def infer(inputs: Sequence[Operand | None], /, eps: float, normalized_dims: int) -> tuple[Result, ...]:
        x = inputs[0]
        assert x is not None
        for place, each in enumerate(inputs):
            if each is not None and each.dtype not in FLOATS:
                raise refuse_dtype(name, f"inputs[{place}] ({names[place]})", each.dtype, FLOATS)
        if not 1 <= normalized_dims <= len(x.shape):
            raise ArgumentError(
                f"{name}: normalized_dims={normalized_dims} of an input of shape {x.shape}: "
                f"choose from 1 to {len(x.shape)}"
                + (
                    ""
                    if x.shape
                    else "; an input without dims has none to normalise over: reshape it to (1,)"
                )
            )
        wanted = x.shape[len(x.shape) - normalized_dims :]
        for place, each in enumerate(inputs[1:], 1):
            shape = x.shape if adds and place == 1 else wanted
            if each is not None and each.shape != shape:
                raise ArgumentError(
                    f"{name}: inputs[{place}] ({names[place]}) has shape {each.shape}, but x of shape "
                    f"{x.shape} and normalized_dims={normalized_dims} need {shape}: reshape or expand it"
                )
        result = Result(x.shape, x.dtype)
        residual = inputs[1] if adds else None
        return (result, Result(x.shape, residual.dtype)) if residual is not None else (result,)

    def plan(
        inputs: Sequence[Operand | None],
        outputs: Sequence[Operand],
        blocks: int,
        /,
        eps: float,
        normalized_dims: int,
    ) -> Plan:
        return _plan(kernel.op_id, inputs, outputs, blocks, normalized_dims, eps)

    def example(draw: Draw) -> Example:
        shape = draw.shape(min_dims=1)
        dims = draw.integer(1, len(shape))
        dtype = draw.choice(FLOATS)
        inputs: list[Any] = [draw.array(shape, dtype, "finite")]
        if adds:
            inputs.append(draw.array(shape, draw.choice([dtype, dtype, *FLOATS]), "finite"))
        for _ in range(draw.integer(0, most - len(inputs))):
            weight = draw.array(shape[len(shape) - dims :], draw.choice([dtype, *FLOATS]), "finite")
            inputs.append(draw.choice([weight, weight, None]))
        return inputs, {"normalized_dims": dims, "eps": draw.choice([1e-5, 1e-6, 0.1])}

    return Operator(
        name,
        "norm",
        (1 + adds, most),
        1 + adds,
        FLOATS,
        formula,
        infer,
        plan,
        (kernel,),
        spec,
        parameters=(Parameter("eps", "float", eps), Parameter("normalized_dims", "int", 1)),
        # A mean of squares is right to a few roundings, its root halves them, and 4 products follow. What is
        # left of a mean that cancels, or of a bias, is an absolute error of values about 1 to 10.
        tolerance=Tolerance(f32=16 * 2.0**-24, atol=64 * 2.0**-24),
        same_ok=(0, 1) if adds else (0,),
        tiling=f"above {ALONE} elements, over rows",
        cost="Reads rows of up to 4,096 contiguous elements once, others two or three times.",
        source=source,
        example=example,
    )


_SHARE: Final = "x / sqrt(mean of x^2 + eps) * weight, over the last dims"
_CENTRED: Final = "(x - mean) / sqrt(mean of (x - mean)^2 + eps) * weight + bias, over the last dims"
_SUM: Final = " of x + residual; and x + residual, of the residual's dtype"

OPERATORS: Final = (
    _operator(
        "layer_norm", LAYER_NORM, _CENTRED, spec_layer_norm, 1e-5, "torch.layer_norm; Ba et al., 2016."
    ),
    _operator("rms_norm", RMS_NORM, _SHARE, spec_rms_norm, 1e-6, "torch.rms_norm; Zhang and Sennrich, 2019."),
    _operator(
        "add_layer_norm",
        ADD_LAYER_NORM,
        _CENTRED + _SUM,
        spec_add_layer_norm,
        1e-5,
        "torch.layer_norm(x + residual).",
    ),
    _operator(
        "add_rms_norm",
        ADD_RMS_NORM,
        _SHARE + _SUM,
        spec_add_rms_norm,
        1e-6,
        "vLLM's fused_add_rms_norm.",
    ),
)
