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

from ...descriptor import LAYOUT_BYTES, MAX_INPUTS, Flag, layout_offset, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ...protocol import CONTEXT, field
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
from ..elements import make_element_address, make_itemsize, make_store_f32x8
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
    element_address = m.external("gpuos_element_address", make_element_address)
    itemsize, chunk_count, fill8 = make_itemsize(m), make_chunk_count(m), make_fill8(m)
    load_raw8, unpack8, load8, round8 = make_load_raw8(m), make_unpack8(m), make_load8(m), make_round8(m)
    store_vector, store8 = make_store_f32x8(m), make_store8(m)
    sum8, add_exactly, settle = make_sum8(m), make_add_exactly(m), make_settle(m)
    group_sum, group_sum2 = make_group_sum(m), make_group_sum2(m)
    sqrt = math.sqrt

    FIRST, INPUTS, OUTPUTS = u64(NORM_IDS), u64(offset("inputs")), u64(offset("outputs"))
    COUNT, TILES, DTYPES = u64(offset("count")), u64(offset("tiles")), u64(offset("dtypes"))
    SCALARS, LAYOUTS_AT = u64(offset("scalars")), u64(offset("layouts"))
    LAYOUTS, LAYOUT_SIZE = u64(field(CONTEXT, "layouts")), u64(LAYOUT_BYTES)
    NDIM, STRIDES = u64(layout_offset("ndim")), u64(layout_offset("strides"))
    STRIDED, SLOT_MASK, IS_WIDE, EVEN = u64(Flag.STRIDED), u64(0xFFFF), u64(WIDE), u64(LINEAR)
    ZERO, ONE, TWO, FOUR, SEVEN, EIGHT, TWELVE, FIFTEEN = (u64(n) for n in (0, 1, 2, 4, 7, 8, 12, 15))
    SIXTEEN, TWENTY, HALF, AREA = u64(16), u64(20), u64(32), u64(AREA_BYTES)
    NOTHING, UNIT = f32(0), f32(1)
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

    def slot(word: Any, place: Any) -> Any:
        return ((word >> (place * SIXTEEN)) & SLOT_MASK) * LAYOUT_SIZE

    slot = m.device(slot)

    def row_of(strided: Any, layout: Any, address: Any, index: Any, size: Any) -> Any:
        if strided and address != ZERO:
            return element_address(layout, address, index)
        return address + index * size

    row_of = m.device(row_of)

    def step_of(layout: Any, kind: Any) -> Any:
        """Bytes from one element of a row to the next."""
        return load_u64(layout + STRIDES + (load_u32(layout + NDIM) - ONE) * EIGHT) * itemsize(kind)

    step_of = m.device(step_of)

    def at(even: Any, layout: Any, address: Any, row: Any, step: Any, index: Any, j: Any) -> Any:
        """Address of element j of the row that begins at element `index`."""
        if even:
            return row + j * step
        return element_address(layout, address, index + j)

    at = m.device(at)

    def norm(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        op = load_u32(task) - FIRST
        centred = op & ONE == ZERO
        adds = op >= TWO
        strided = (load_u64(task) >> HALF) & STRIDED != ZERO
        rows = load_u64(task + COUNT)
        tiles = load_u32(task + TILES)
        kinds = load_u32(task + DTYPES)
        length = load_u64(task + SCALARS)
        epsilon = load_scratch_f32(task + SCALARS + EIGHT)
        how = load_u32(task + SCALARS + TWELVE)
        wide = how & IS_WIDE != ZERO
        even = how & EVEN != ZERO

        place = ONE  # of the weight
        more = ZERO  # the residual
        if adds:
            place = TWO
            more = load_u64(task + INPUTS + EIGHT)
        x = load_u64(task + INPUTS)
        weight = load_u64(task + INPUTS + place * EIGHT)
        bias = ZERO
        if centred:
            bias = load_u64(task + INPUTS + (place + ONE) * EIGHT)
        out = load_u64(task + OUTPUTS)
        total_out = load_u64(task + OUTPUTS + EIGHT)
        kind = kinds & FIFTEEN
        kind_more = (kinds >> FOUR) & FIFTEEN
        kind_weight = (kinds >> (place * FOUR)) & FIFTEEN
        kind_bias = (kinds >> ((place + ONE) * FOUR)) & FIFTEEN
        kind_out = (kinds >> SIXTEEN) & FIFTEEN
        kind_total = (kinds >> TWENTY) & FIFTEEN

        step, step_more, step_weight = itemsize(kind), itemsize(kind_more), itemsize(kind_weight)
        step_bias, step_out, step_total = itemsize(kind_bias), itemsize(kind_out), itemsize(kind_total)
        layout, layout_more, layout_weight, layout_bias = ZERO, ZERO, ZERO, ZERO
        layout_out, layout_total = ZERO, ZERO
        neighbours = even
        if strided:
            table = load_u64(context + LAYOUTS)
            slots = load_u64(task + LAYOUTS_AT)
            slots_out = load_u32(task + LAYOUTS_AT + EIGHT)
            layout = table + slot(slots, ZERO)
            layout_more = table + slot(slots, ONE)
            layout_weight = table + slot(slots, place)
            layout_bias = table + slot(slots, place + ONE)
            layout_out = table + slot(slots_out, ZERO)
            layout_total = table + slot(slots_out, ONE)
            if even and length > ONE:
                a = step_of(layout, kind)
                neighbours = a == step
                step = a
                a = step_of(layout_out, kind_out)
                neighbours = neighbours and a == step_out
                step_out = a
                if adds:
                    a = step_of(layout_more, kind_more)
                    neighbours = neighbours and a == step_more
                    step_more = a
                    a = step_of(layout_total, kind_total)
                    neighbours = neighbours and a == step_total
                    step_total = a
                if weight != ZERO:
                    a = step_of(layout_weight, kind_weight)
                    neighbours = neighbours and a == step_weight
                    step_weight = a
                if bias != ZERO:
                    a = step_of(layout_bias, kind_bias)
                    neighbours = neighbours and a == step_bias
                    step_bias = a

        thread = thread_index()
        lanes = warp_width()
        part = thread
        parts = block_width()
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
        count_all = f32(length)
        first_area = arena
        second_area = arena + AREA

        while row < end:
            index = row * length
            base = row_of(strided, layout, x, index, itemsize(kind))
            base_out = row_of(strided, layout_out, out, index, itemsize(kind_out))
            base_more = ZERO
            base_total = ZERO
            if adds:
                base_more = row_of(strided, layout_more, more, index, itemsize(kind_more))
                base_total = row_of(strided, layout_total, total_out, index, itemsize(kind_total))
            ragged = (base | base_out | base_more | base_total | weight | bias) & FIFTEEN
            vector = neighbours and ragged | (length & SEVEN) == ZERO
            mean = NOTHING
            if vector and length <= parts * SIXTEEN:
                j = part * EIGHT
                k = j + parts * EIGHT
                has_a = j < length
                has_b = k < length
                if not has_a:
                    j = ZERO
                if not has_b:
                    k = ZERO
                # All loads fly together; the weights arrive while the sums are on their way.
                raw_a = load_raw8(kind, base + j * step)
                raw_b = load_raw8(kind, base + k * step)
                more_a, more_b, weight_a, weight_b, bias_a, bias_b = raw_a, raw_b, raw_a, raw_b, raw_a, raw_b
                if adds:
                    more_a = load_raw8(kind_more, base_more + j * step_more)
                    more_b = load_raw8(kind_more, base_more + k * step_more)
                if weight != ZERO:
                    weight_a = load_raw8(kind_weight, weight + j * step_weight)
                    weight_b = load_raw8(kind_weight, weight + k * step_weight)
                if bias != ZERO:
                    bias_a = load_raw8(kind_bias, bias + j * step_bias)
                    bias_b = load_raw8(kind_bias, bias + k * step_bias)
                a = unpack8(kind, raw_a)
                b = unpack8(kind, raw_b)
                if adds:
                    a = round8(kind_total, add8(a, unpack8(kind_more, more_a)))
                    b = round8(kind_total, add8(b, unpack8(kind_more, more_b)))
                    if has_a:
                        store_vector(kind_total, base_total + j * step_total, a)
                    if has_b:
                        store_vector(kind_total, base_total + k * step_total, b)
                if centred:
                    total = NOTHING
                    if has_a:
                        total = sum8(a)
                    if has_b:
                        total += sum8(b)
                    mean = group_sum(wide, total, first_area) / count_all
                    a = shift8(a, mean)
                    b = shift8(b, mean)
                total = NOTHING
                squares = NOTHING
                if has_a:
                    total = sum8(a)
                    squares = sum8(multiply8(a, a))
                if has_b:
                    total += sum8(b)
                    squares += sum8(multiply8(b, b))
                total, squares = group_sum2(wide, total, squares, second_area)
                off = NOTHING
                if centred:
                    off = total / count_all
                scale = UNIT / sqrt(larger_of_zero(squares / count_all - off * off) + epsilon)
                a = scale8(shift8(a, off), scale)
                b = scale8(shift8(b, off), scale)
                if weight != ZERO:
                    a = multiply8(a, unpack8(kind_weight, weight_a))
                    b = multiply8(b, unpack8(kind_weight, weight_b))
                if bias != ZERO:
                    a = add8(a, unpack8(kind_bias, bias_a))
                    b = add8(b, unpack8(kind_bias, bias_b))
                if has_a:
                    store_vector(kind_out, base_out + j * step_out, a)
                if has_b:
                    store_vector(kind_out, base_out + k * step_out, b)
            else:
                # The elements of a thread: j, j + apart, ..., in chunks of eight (or one, where the row
                # steps unevenly) that are `leap` apart.
                apart = parts
                start = part
                leap = parts * EIGHT
                if vector:
                    apart = ONE
                    start = part * EIGHT
                if not even:
                    leap = parts
                source, kind_source, layout_source, step_source, base_source = x, kind, layout, step, base
                if adds:
                    j = start
                    while j < length:
                        n = chunk_count(j, length, apart)
                        if not even:
                            n = ONE
                        p = at(even, layout, x, base, step, index, j)
                        q = at(even, layout_more, more, base_more, step_more, index, j)
                        v = add8(
                            load8(vector, kind, p, apart * step, n),
                            load8(vector, kind_more, q, apart * step_more, n),
                        )
                        p = at(even, layout_total, total_out, base_total, step_total, index, j)
                        store8(vector, kind_total, p, apart * step_total, n, v)
                        j += leap
                    source, kind_source, layout_source = total_out, kind_total, layout_total
                    step_source, base_source = step_total, base_total
                if centred:
                    total = NOTHING
                    error = NOTHING
                    j = start
                    while j < length:
                        n = chunk_count(j, length, apart)
                        if not even:
                            n = ONE
                        p = at(even, layout_source, source, base_source, step_source, index, j)
                        v = load8(vector, kind_source, p, apart * step_source, n)
                        total, error = add_exactly(total, error, sum8(fill8(v, n, NOTHING)))
                        j += leap
                    mean = group_sum(wide, settle(total, error), first_area) / count_all
                total = NOTHING
                squares = NOTHING
                error = NOTHING
                j = start
                while j < length:
                    n = chunk_count(j, length, apart)
                    if not even:
                        n = ONE
                    p = at(even, layout_source, source, base_source, step_source, index, j)
                    v = load8(vector, kind_source, p, apart * step_source, n)
                    v = fill8(shift8(v, mean), n, NOTHING)
                    total += sum8(v)
                    squares, error = add_exactly(squares, error, sum8(multiply8(v, v)))
                    j += leap
                total, squares = group_sum2(wide, total, settle(squares, error), second_area)
                off = NOTHING
                if centred:
                    off = total / count_all
                scale = UNIT / sqrt(larger_of_zero(squares / count_all - off * off) + epsilon)
                j = start
                while j < length:
                    n = chunk_count(j, length, apart)
                    if not even:
                        n = ONE
                    p = at(even, layout_source, source, base_source, step_source, index, j)
                    v = load8(vector, kind_source, p, apart * step_source, n)
                    v = scale8(shift8(shift8(v, mean), off), scale)
                    if weight != ZERO:
                        p = at(even, layout_weight, weight, weight, step_weight, index, j)
                        v = multiply8(v, load8(vector, kind_weight, p, apart * step_weight, n))
                    if bias != ZERO:
                        p = at(even, layout_bias, bias, bias, step_bias, index, j)
                        v = add8(v, load8(vector, kind_bias, p, apart * step_bias, n))
                    p = at(even, layout_out, out, base_out, step_out, index, j)
                    store8(vector, kind_out, p, apart * step_out, n, v)
                    j += leap
            row += ahead
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
