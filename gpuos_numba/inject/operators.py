"""A request and the factories of its bodies become an `Operator`: how it is called, planned and checked.

What a table entry is for a built-in operator, this is for an injected one. It runs nothing and registers
nothing: whoever keeps the generations gives it ids and puts its kernels into the switch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..descriptor import DTYPE_NAMES, MAX_INPUTS, DType
from ..device.injected import WIDE
from ..device.operators.axes import arrange, read_axes, reduced_shape
from ..device.operators.planning import TILE, tile_count, walks_of
from ..device.operators.softmax import choose_wide, share_rows
from ..device.operators.table import (
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
from ..errors import ArgumentError
from ..shapes import broadcast_shape
from .expression import Expression, describe, evaluate
from .render import Factory
from .request import ELEMENTWISE, Request

Array = Any
FAMILY: Final = "injected"
TOLERANCE: Final = Tolerance(f32=2.0**-18, atol=2.0**-18)
"""Of injected operators, whose own conditioning nobody knows: 64 roundings, of values about 1."""

_BY_NAME: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def make_operator(request: Request, factories: Mapping[str, Factory], first_id: int) -> Operator:
    """The operator of a request.

    Args:
        request: what it is.
        factories: of its bodies by variant, see `render.load`. Without "any", `plan` answers None to calls
            that need it: the operator must be given a fallback.
        first_id: its kernels take as many ids from here on as there are factories.
    """
    kernels = {
        variant: Kernel(first_id + place, f"{request.name}.{variant}", make)
        for place, (variant, make) in enumerate(factories.items())
    }
    make = _elementwise if request.template in ELEMENTWISE else _rows
    return make(request, kernels)


def _result_dtype(request: Request, inputs: Sequence[Operand]) -> DType:
    """The arrays' dtype, f32 where they differ."""
    takes = tuple(_BY_NAME[name] for name in request.dtypes)
    arrays = []
    for place, each in enumerate(inputs):
        if not each.immediate:
            if each.dtype not in takes:
                raise refuse_dtype(request.name, f"inputs[{place}]", each.dtype, takes)
            arrays.append(each.dtype)
    if not arrays:
        raise ArgumentError(f"{request.name} of numbers alone: give it at least one array")
    return arrays[0] if len(set(arrays)) == 1 else DType.F32


# --- each element alone ---


def _elementwise(request: Request, kernels: Mapping[str, Kernel]) -> Operator:
    name, arity, expression = request.name, request.arity, request["value"]

    def infer(inputs: Sequence[Operand], /) -> tuple[Result, ...]:
        dtype = _result_dtype(request, inputs)
        return (Result(broadcast_shape(inputs, [f"inputs[{i}]" for i in range(arity)]), dtype),)

    def plan(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /) -> Plan | None:
        out = outputs[0]
        walks = walks_of(inputs, out)
        alike = all(
            each.dtype is out.dtype and not each.immediate and each.shape == out.shape for each in inputs
        )
        variant = "any"
        if walks is None and alike:
            variant = "plain" if out.dtype is DType.F32 else "half"
        kernel = kernels.get(variant) or kernels.get("any")
        if kernel is None:  # not compiled yet
            return None
        return Plan(kernel.op_id, out.elements, tile_count(out.elements, blocks), walks)

    def spec(*operands: Array) -> Array:
        return evaluate(expression, *(np.asarray(each).astype(np.float32) for each in operands))

    def example(draw: Draw) -> Example:
        shape = draw.shape()
        dtype = _BY_NAME[draw.choice(request.dtypes)]
        return [draw.array(draw.broadcastable(shape), dtype) for _ in range(arity)], {}

    return Operator(
        name,
        FAMILY,
        (arity, arity),
        1,
        tuple(_BY_NAME[each] for each in request.dtypes),
        describe(expression),
        infer,
        plan,
        tuple(kernels.values()),
        spec,
        tolerance=TOLERANCE,
        same_ok=tuple(range(arity)),
        tiling=f"above {TILE} elements",
        cost="Moves each element once.",
        source="Injected.",
        example=example,
        numbers=arity > 1,
        plain="plain" in kernels and DTYPE_NAMES[DType.F32] in request.dtypes,
    )


# --- along a row ---


def _fold(map: Callable[[Array], Array], combine: Expression, identity: float, x: Array) -> Array:
    """Pairwise, over the last dim: as exact as the device, whose order is another."""
    values = np.asarray(map(x), np.float32)
    while values.shape[-1] != 1:
        if values.shape[-1] % 2 or not values.shape[-1]:
            own = np.full((*values.shape[:-1], 1), identity, np.float32)
            values = np.concatenate([values, own], axis=-1)
            continue
        values = evaluate(combine, values[..., ::2], values[..., 1::2])
    return values


def _rows(request: Request, kernels: Mapping[str, Kernel]) -> Operator:
    name, (kernel,) = request.name, kernels.values()
    reduces = request.template == "reduce"
    formula = "; ".join(f"{role} = {describe(each)}" for role, each in request.expressions)

    def infer(inputs: Sequence[Operand], /, dim: int, keepdim: bool = False) -> tuple[Result, ...]:
        x = inputs[0]
        dtype = _result_dtype(request, inputs)
        axes = read_axes(name, (dim,), len(x.shape))
        return (Result(reduced_shape(x.shape, axes, keepdim) if reduces else x.shape, dtype),)

    def plan(
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        blocks: int,
        /,
        dim: int,
        keepdim: bool = False,
    ) -> Plan:
        x, out = inputs[0], outputs[0]
        axes = read_axes(name, (dim,), len(x.shape))
        steps = out.strides
        if reduces and axes:
            before = axes[0]
            rest = out.strides[before + 1 :] if keepdim else out.strides[before:]
            steps = (*out.strides[:before], 0, *rest)
        rows = arrange(x.shape, [x.strides, steps], axes)
        wide = choose_wide(rows)
        walks = None
        plain_out = len(rows.row_shape) <= 1 and rows.row_steps[1] in ((), (1,))
        if not (rows.contiguous(0) and (plain_out if reduces else rows.contiguous(1))):
            into = Walk(x.dtype, (*rows.row_shape, *rows.shape), (*rows.row_steps[0], *rows.steps[0]))
            if reduces:
                onto = Walk(out.dtype, rows.row_shape, rows.row_steps[1])
            else:
                onto = Walk(out.dtype, into.shape, (*rows.row_steps[1], *rows.steps[1]))
            walks = (into, *[None] * (MAX_INPUTS - 1), onto)
        return Plan(
            kernel.op_id,
            rows.rows if rows.length or reduces else 0,
            share_rows(rows, wide, blocks),
            walks,
            pack("QI", rows.length, WIDE if wide else 0),
        )

    def spec(x: Array, dim: int = -1, keepdim: bool = False) -> Array:
        lanes = np.moveaxis(x.reshape(x.shape or (1,)).astype(np.float32), dim, -1)
        n = np.float32(lanes.shape[-1])
        first = dict(request.expressions)

        def row(suffix: str, map: Callable[[Array], Array]) -> Array:
            identity = float(evaluate(first[f"identity{suffix}"]))
            return _fold(map, first[f"combine{suffix}"], identity, lanes)

        r = row("", lambda values: evaluate(first["map"], values, n))
        if reduces:
            result = np.moveaxis(evaluate(first["finalise"], r, n), -1, dim)
            return result.reshape(reduced_shape(x.shape, read_axes(name, (dim,), x.ndim), keepdim))
        arguments = [lanes, r, n]
        if "map2" in first:
            arguments.insert(2, row("2", lambda values: evaluate(first["map2"], values, r, n)))
        return np.moveaxis(evaluate(first["value"], *arguments), -1, dim).reshape(x.shape)

    def example(draw: Draw) -> Example:
        shape = draw.shape()
        parameters: dict[str, Any] = {"dim": draw.integer(-max(1, len(shape)), max(1, len(shape)) - 1)}
        if reduces:
            parameters["keepdim"] = draw.choice([True, False])
        return [draw.array(shape, _BY_NAME[draw.choice(request.dtypes)], "finite")], parameters

    keepdim = (Parameter("keepdim", "bool", False),) if reduces else ()
    return Operator(
        name,
        FAMILY,
        (1, 1),
        1,
        tuple(_BY_NAME[each] for each in request.dtypes),
        formula,
        infer,
        plan,
        (kernel,),
        spec,
        parameters=(Parameter("dim", "int", -1), *keepdim),
        tolerance=TOLERANCE,
        same_ok=() if reduces else (0,),
        tiling="over rows",
        cost="Reads a row once for each pass.",
        source="Injected.",
        example=example,
    )
