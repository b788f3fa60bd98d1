"""Element-wise operators: operands arrive as addresses in the task, results leave in its output.

One body serves them all; an operator is the function of one element that is inlined into it. Contiguous
operands take 16-byte accesses, anything else walks its layout. Element `i` of the output depends on element
`i` of the inputs alone, so the output may be exactly an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...descriptor import LAYOUT_BYTES, DType, Flag, offset
from ...machines.base import Body, Primitives
from ...protocol import CONTEXT, field
from ...shapes import broadcast_shape
from ..elements import make_element_address, make_tile_range
from .planning import TILE, tile_count, walks_of
from .table import (
    ELEMENTWISE_IDS,
    Draw,
    Example,
    Kernel,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    pack,
    refuse_dtype,
)

Array = Any
"""numpy.ndarray of f32, or a scalar of it."""


def make_elementwise(m: Primitives, arity: int, function: Body) -> Body:
    """The body of an element-wise f32 operator of 0, 1 or 2 inputs: `op(context, task, tile, arena)`.

    `function(x, y, value)` computes one element; a missing input is 0, `value` is the first scalar.
    """
    u64, f32 = m.u64, m.f32
    thread_index, block_width = m.thread_index, m.block_width
    load_u64, load_f32, store_f32 = m.load_u64, m.load_f32, m.store_f32
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    load_f32x4, store_f32x4, load_scratch_f32 = m.load_f32x4, m.store_f32x4, m.load_scratch_f32
    tile_range = make_tile_range(m)
    element_address = m.external("gpuos_element_address", make_element_address)
    function = m.device(function)

    INPUTS, OUTPUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
    TILES, SCALARS, LAYOUTS_AT = u64(offset("tiles")), u64(offset("scalars")), u64(offset("layouts"))
    LAYOUTS, LAYOUT_SIZE = u64(field(CONTEXT, "layouts")), u64(LAYOUT_BYTES)
    STRIDED = u64(Flag.STRIDED)
    ZERO, TWO, FOUR, EIGHT = u64(0), u64(2), u64(4), u64(8)
    FIFTEEN, HALF, SLOT_MASK, TO_SECOND = u64(15), u64(32), u64(0xFFFF), u64(16)
    OK = np.int32(0)
    NOTHING = f32(0)
    takes_x, takes_y = arity > 0, arity > 1

    if takes_y:

        def four(x: Any, y: Any, value: Any) -> Any:
            a = load_f32x4(x)
            b = load_f32x4(y)
            return (
                function(a[0], b[0], value),
                function(a[1], b[1], value),
                function(a[2], b[2], value),
                function(a[3], b[3], value),
            )

        def one(x: Any, y: Any, value: Any) -> Any:
            return function(load_f32(x), load_f32(y), value)
    elif takes_x:

        def four(x: Any, y: Any, value: Any) -> Any:
            a = load_f32x4(x)
            return (
                function(a[0], NOTHING, value),
                function(a[1], NOTHING, value),
                function(a[2], NOTHING, value),
                function(a[3], NOTHING, value),
            )

        def one(x: Any, y: Any, value: Any) -> Any:
            return function(load_f32(x), NOTHING, value)
    else:

        def four(x: Any, y: Any, value: Any) -> Any:
            result = function(NOTHING, NOTHING, value)
            return result, result, result, result

        def one(x: Any, y: Any, value: Any) -> Any:
            return function(NOTHING, NOTHING, value)

    four = m.device(four)
    one = m.device(one)

    def elementwise(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        x = load_task_u64(task + INPUTS)
        y = load_task_u64(task + INPUTS + EIGHT)
        out = load_task_u64(task + OUTPUT)
        value = load_scratch_f32(task + SCALARS)
        begin, end = tile_range(load_task_u64(task + COUNT), load_task_u32(task + TILES), tile)
        index = begin + thread_index()
        width = block_width()
        if (load_task_u64(task) >> HALF) & STRIDED != ZERO:
            # Slots of the four inputs fill one word, those of the outputs begin the next.
            slots = load_task_u64(task + LAYOUTS_AT)
            table = load_u64(context + LAYOUTS)
            layout_x = table + (slots & SLOT_MASK) * LAYOUT_SIZE
            layout_y = table + ((slots >> TO_SECOND) & SLOT_MASK) * LAYOUT_SIZE
            layout_out = table + (load_task_u32(task + LAYOUTS_AT + EIGHT) & SLOT_MASK) * LAYOUT_SIZE
            at_x = x
            at_y = y
            while index < end:
                if takes_x:
                    at_x = element_address(layout_x, x, index)
                if takes_y:
                    at_y = element_address(layout_y, y, index)
                store_f32(element_address(layout_out, out, index), one(at_x, at_y, value))
                index += width
        else:
            done = begin  # elements before it belong to the 16-byte path
            if (x | y | out) & FIFTEEN == ZERO:
                done = begin + (((end - begin) >> TWO) << TWO)
                vector = begin + thread_index() * FOUR
                step = width * FOUR
                while vector + step + step + step < done:
                    a = vector * FOUR
                    b = (vector + step) * FOUR
                    c = (vector + step + step) * FOUR
                    d = (vector + step + step + step) * FOUR
                    p = four(x + a, y + a, value)
                    q = four(x + b, y + b, value)
                    r = four(x + c, y + c, value)
                    s = four(x + d, y + d, value)
                    store_f32x4(out + a, p[0], p[1], p[2], p[3])
                    store_f32x4(out + b, q[0], q[1], q[2], q[3])
                    store_f32x4(out + c, r[0], r[1], r[2], r[3])
                    store_f32x4(out + d, s[0], s[1], s[2], s[3])
                    vector += step * FOUR
                while vector < done:
                    a = vector * FOUR
                    p = four(x + a, y + a, value)
                    store_f32x4(out + a, p[0], p[1], p[2], p[3])
                    vector += step
            index = done + thread_index()
            while index < end:
                store_f32(out + index * FOUR, one(x + index * FOUR, y + index * FOUR, value))
                index += width
        return OK

    return elementwise


# --- the operators: the function of one element, and beside it what it means ---


def make_nop(m: Primitives) -> Body:
    """Does nothing: for measuring, and for ordering."""
    OK = np.int32(0)

    def nop(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        return OK

    return nop


def make_copy(m: Primitives) -> Body:
    def copy(x: Any, y: Any, value: Any) -> Any:
        return x

    return make_elementwise(m, 1, copy)


def spec_copy(a: Array) -> Array:
    return a.copy()


def make_fill(m: Primitives) -> Body:
    def fill(x: Any, y: Any, value: Any) -> Any:
        return value

    return make_elementwise(m, 0, fill)


def spec_fill(shape: tuple[int, ...], value: float) -> Array:
    return np.full(shape, value, np.float32)


def make_add(m: Primitives) -> Body:
    def add(x: Any, y: Any, value: Any) -> Any:
        return x + y

    return make_elementwise(m, 2, add)


def spec_add(a: Array, b: Array) -> Array:
    return np.add(a, b)


def make_sub(m: Primitives) -> Body:
    def sub(x: Any, y: Any, value: Any) -> Any:
        return x - y

    return make_elementwise(m, 2, sub)


def spec_sub(a: Array, b: Array) -> Array:
    return np.subtract(a, b)


def make_mul(m: Primitives) -> Body:
    def mul(x: Any, y: Any, value: Any) -> Any:
        return x * y

    return make_elementwise(m, 2, mul)


def spec_mul(a: Array, b: Array) -> Array:
    return np.multiply(a, b)


def make_div(m: Primitives) -> Body:
    def div(x: Any, y: Any, value: Any) -> Any:
        return x / y

    return make_elementwise(m, 2, div)


def spec_div(a: Array, b: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        return np.divide(a, b)


def make_relu(m: Primitives) -> Body:
    ZERO = m.f32(0)

    def relu(x: Any, y: Any, value: Any) -> Any:
        # Written this way round NaN fails the comparison and passes through; max.f32 would drop it.
        return ZERO if x < ZERO else x

    return make_elementwise(m, 1, relu)


def spec_relu(a: Array) -> Array:
    return np.where(a < 0, np.float32(0), a)


# --- the table ---


def _operator(name: str, op_id: int, arity: int, formula: str, make: Any, spec: Any, **more: Any) -> Operator:
    kernel = Kernel(op_id, name, make)

    def infer(inputs: Sequence[Operand], /) -> tuple[Result, ...]:
        for place, operand in enumerate(inputs):
            if operand.dtype is not DType.F32:
                raise refuse_dtype(name, f"inputs[{place}]", operand.dtype, (DType.F32,))
        return (Result(broadcast_shape(inputs, [f"inputs[{i}]" for i in range(arity)]), DType.F32),)

    def plan(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, **scalars: float) -> Plan:
        if outputs[0].dtype is not DType.F32:
            raise refuse_dtype(name, "out", outputs[0].dtype, (DType.F32,))
        count = outputs[0].elements
        return Plan(
            op_id,
            count,
            tile_count(count, blocks),
            walks_of(inputs, outputs[0]),
            pack("f" * len(scalars), *scalars.values()),
        )

    def example(draw: Draw) -> Example:
        shape = draw.shape()
        return [draw.array(draw.broadcastable(shape), DType.F32) for _ in range(arity)], {}

    return Operator(
        name,
        "element-wise",
        (arity, arity),
        1,
        (DType.F32,),
        formula,
        infer,
        plan,
        (kernel,),
        spec,
        same_ok=tuple(range(arity)),
        like_out=arity == 0,
        plain=arity > 0,
        tiling=f"above {TILE} elements",
        example=example if arity else None,
        **more,
    )


OPERATORS = (
    _operator("copy", ELEMENTWISE_IDS + 0, 1, "a", make_copy, spec_copy),
    _operator(
        "fill", ELEMENTWISE_IDS + 1, 0, "value", make_fill, spec_fill, parameters=(Parameter("value"),)
    ),
    _operator("add", ELEMENTWISE_IDS + 2, 2, "a + b", make_add, spec_add),
    _operator("sub", ELEMENTWISE_IDS + 3, 2, "a - b", make_sub, spec_sub),
    _operator("mul", ELEMENTWISE_IDS + 4, 2, "a * b", make_mul, spec_mul),
    _operator("div", ELEMENTWISE_IDS + 5, 2, "a / b", make_div, spec_div),
    _operator("relu", ELEMENTWISE_IDS + 6, 1, "max(a, 0)", make_relu, spec_relu),
)
