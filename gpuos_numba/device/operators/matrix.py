"""Products of matrices and vectors: batches of matrices of any strides arrive, their products leave.

All three operators are one product `left[rows, k] @ right[k, cols] + bias[rows, cols]` for each of a batch.
Batch dims that one side does not have become rows or columns of the other, so that a weight shared by a batch
is read once. Which kernel runs follows from what is left:

    kernel    for                               the threads of a block
    ROWS      one column, matrix even along k   teams; each takes dot products of four rows at once
    COLUMNS   one column, matrix even along     neighbours take neighbouring rows, and teams of them share k
              the rows (x @ a of a row-major a)
    TILES     everything else                   32 x 32 outputs, 4 x 4 a thread, k shared by four groups

One row is one column of the transposed product. Where ROWS and COLUMNS have too few rows for all blocks, k is
cut into pieces: each tile leaves its sums in the workspace, and the merge adds them. Sums are f32, by fused
multiply-add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ...descriptor import MAX_DIMS, DType
from ...errors import ArgumentError
from ...shapes import Shape, Strides, aligned_strides, broadcast_shape
from .matrix_parts import BIAS, COLUMNS, ROWS, TILES
from .matrix_plans import ALONE, EXTENT, Side, plan_product
from .matrix_tiles import SIDE, make_tiles
from .matrix_vectors import make_columns, make_rows
from .table import (
    FLOATS,
    MATRIX_IDS,
    Draw,
    Example,
    Kernel,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    Tolerance,
    refuse_dtype,
)

Array = Any


class _Named(NamedTuple):
    """A batch to broadcast, for `broadcast_shape`."""

    shape: Shape


def _check(
    name: str, places: Sequence[str], inputs: Sequence[Operand | None], least: tuple[int, int]
) -> None:
    """Raises ArgumentError or DTypeError where dtypes differ or dims are missing."""
    first = inputs[0]
    assert first is not None
    for place, each in enumerate(inputs):
        if each is None:
            continue
        named = f"inputs[{place}] ({places[place]})"
        if each.dtype not in FLOATS:
            raise refuse_dtype(name, named, each.dtype, FLOATS)
        if each.dtype != first.dtype:
            raise refuse_dtype(f"{name} of this inputs[0] ({places[0]})", named, each.dtype, (first.dtype,))
        if place < BIAS and len(each.shape) < least[place]:
            raise ArgumentError(
                f"{name}: {named} has shape {each.shape}, but needs {least[place]} dims at least: reshape it"
                + (", or use matvec or vecmat" if name == "matmul" else "")
            )


class _Call(NamedTuple):
    """A call as a product: what infer and plan both need to know."""

    dtype: DType
    batch: Shape
    rows: int
    k: int
    cols: int
    shape: Shape
    left: Side
    right: Side


def _read(
    name: str, inputs: Sequence[Operand | None], transpose_a: bool = False, transpose_b: bool = False
) -> _Call:
    """Check the shapes of a call. Raises ArgumentError or DTypeError."""
    places = {"matvec": ("a", "x"), "vecmat": ("x", "a"), "matmul": ("a", "b")}[name]
    least = (1 if name == "vecmat" else 2, 1 if name == "matvec" else 2)
    _check(name, (*places, "bias"), inputs, least)
    a, b = inputs[0], inputs[1]
    assert a is not None and b is not None

    def split(
        operand: Operand, vector: bool, turned: bool, first: bool
    ) -> tuple[Shape, Strides, Shape, Strides]:
        """(batch, its strides, the two dims, their strides)"""
        if vector:
            dims, steps = (operand.shape[-1],), (operand.strides[-1],)
            pair = ((1, *dims), (0, *steps)) if first else ((*dims, 1), (*steps, 0))
            return operand.shape[:-1], operand.strides[:-1], *pair
        order = (-1, -2) if turned else (-2, -1)
        shape, strides = operand.shape, operand.strides
        return shape[:-2], strides[:-2], tuple(shape[i] for i in order), tuple(strides[i] for i in order)

    batch_a, steps_a, (rows, k), (row_step, left_step) = split(a, name == "vecmat", transpose_a, True)
    batch_b, steps_b, (k_b, cols), (right_step, column_step) = split(b, name == "matvec", transpose_b, False)
    if k != k_b:
        raise ArgumentError(
            f"{name}: inputs[0] ({places[0]}) of shape {a.shape} has {k} elements along the dim that is "
            f"summed, inputs[1] ({places[1]}) of shape {b.shape} has {k_b}: reshape or transpose one of them"
        )
    if max(rows, cols) >= EXTENT:
        raise ArgumentError(f"{name}: {max(rows, cols)} rows or columns are 2^32 or more: split the call")
    batch = broadcast_shape(
        (_Named(batch_a), _Named(batch_b)), (f"{name}: batch of {places[0]}", f"batch of {places[1]}")
    )
    shape = (*batch, *((rows,) if name != "vecmat" else ()), *((cols,) if name != "matvec" else ()))
    if len(shape) > MAX_DIMS:
        raise ArgumentError(f"{name}: the result would have {len(shape)} dims, at most {MAX_DIMS} are taken")
    wide_a, wide_b = _Steps(batch_a, steps_a), _Steps(batch_b, steps_b)
    call = _Call(
        a.dtype,
        batch,
        rows,
        k,
        cols,
        shape,
        Side(aligned_strides(wide_a, batch), row_step, left_step),
        Side(aligned_strides(wide_b, batch), right_step, column_step),
    )
    bias = inputs[BIAS] if len(inputs) > BIAS else None
    if bias is not None:
        _bias_strides(name, bias, shape)
    return call


class _Steps(NamedTuple):
    shape: Shape
    strides: Strides


def _bias_strides(name: str, bias: Operand, shape: Shape) -> Strides:
    try:
        return aligned_strides(bias, shape)
    except ArgumentError:
        raise ArgumentError(
            f"{name}: inputs[2] (bias) of shape {bias.shape} does not broadcast to the result's "
            f"shape {shape}: reshape it so that aligned from the right each extent is equal or 1"
        ) from None


# --- the truth ---


def _spec(product: Array, bias: Array) -> Array:
    return product if bias is None else product + bias.astype(np.float64)


def spec_matvec(a: Array, x: Array, bias: Array = None) -> Array:
    return _spec((a.astype(np.float64) @ x.astype(np.float64)[..., None])[..., 0], bias)


def spec_vecmat(x: Array, a: Array, bias: Array = None) -> Array:
    return _spec((x.astype(np.float64)[..., None, :] @ a.astype(np.float64))[..., 0, :], bias)


def spec_matmul(
    a: Array, b: Array, bias: Array = None, transpose_a: bool = False, transpose_b: bool = False
) -> Array:
    a = a.swapaxes(-1, -2) if transpose_a else a
    b = b.swapaxes(-1, -2) if transpose_b else b
    return _spec(a.astype(np.float64) @ b.astype(np.float64), bias)


# --- the table ---

_ROWS: Final = Kernel(MATRIX_IDS + ROWS, "matrix.rows", make_rows)
_COLUMNS: Final = Kernel(MATRIX_IDS + COLUMNS, "matrix.columns", make_columns)
_TILES: Final = Kernel(MATRIX_IDS + TILES, "matrix.tiles", make_tiles)


def _sprinkle(draw: Draw, x: Array) -> Array:
    """Some elements nan, inf or -0.0, also in a view."""
    if x.size and x.flags.writeable and draw.integer(0, 3) == 0:
        for _ in range(draw.integer(1, 3)):
            x[tuple(draw.integer(0, side - 1) for side in x.shape)] = draw.choice(
                [np.nan, np.inf, -np.inf, -0.0]
            )
    return x


def _operator(
    name: str, formula: str, spec: Any, source: str, parameters: tuple[Parameter, ...] = ()
) -> Operator:
    def infer(inputs: Sequence[Operand | None], /, **turned: bool) -> tuple[Result, ...]:
        call = _read(name, inputs, **turned)
        return (Result(call.shape, call.dtype),)

    def plan(
        inputs: Sequence[Operand | None], outputs: Sequence[Operand], blocks: int, /, **turned: bool
    ) -> Plan:
        call = _read(name, inputs, **turned)
        bias = inputs[BIAS] if len(inputs) > BIAS else None

        def side(strides: Strides) -> Side:
            if name == "matvec":
                return Side(strides[:-1], strides[-1], 0)
            if name == "vecmat":
                return Side(strides[:-1], 0, strides[-1])
            return Side(strides[:-2], *strides[-2:])

        sides = (
            call.left,
            call.right,
            side(outputs[0].strides),
            None if bias is None else side(_bias_strides(name, bias, call.shape)),
        )
        return plan_product(name, call.dtype, call.batch, (call.rows, call.k, call.cols), sides, blocks)

    def example(draw: Draw) -> Example:
        def extent() -> int:
            usual = [1, draw.integer(0, 9), draw.integer(2, 40)]
            return int(draw.choice([*usual, *usual, draw.choice([64, 65, 127, 128, 264, 520])]))

        batch = draw.shape(max_dims=3, max_side=3) if draw.integer(0, 2) == 0 else ()
        batch = tuple(min(each, 3) for each in batch)
        rows, k, cols = extent(), extent(), extent()
        if rows * cols * k > 1 << 18:
            rows = min(rows, 9)
        batch_a, batch_b = (batch, draw.broadcastable(batch))[:: draw.choice([1, -1])]
        dtype, given = draw.choice(FLOATS), {each.name: draw.choice([False, True]) for each in parameters}
        a = (k, rows) if given.get("transpose_a") else (rows, k)
        b = (cols, k) if given.get("transpose_b") else (k, cols)
        inputs = [
            _sprinkle(draw, draw.array(shape, dtype, draw.choice(["finite", "small"])))
            for shape in (
                (*batch_a, *((k,) if name == "vecmat" else a)),
                (*batch_b, *((k,) if name == "matvec" else b)),
            )
        ]
        whole = np.broadcast_shapes(batch_a, batch_b)
        result = (*whole, *((rows,) if name != "vecmat" else ()), *((cols,) if name != "matvec" else ()))
        if draw.choice([True, False]):
            inputs.append(
                _sprinkle(draw, draw.array(draw.broadcastable(result), dtype, "finite"))
                if draw.integer(0, 3)
                else None
            )
        return inputs, given

    return Operator(
        name,
        "matrix",
        (2, 3),
        1,
        FLOATS,
        formula,
        infer,
        plan,
        (_ROWS, _COLUMNS, _TILES),
        spec,
        parameters=parameters,
        # A sum over k is off by at most k * 2^-24 times that of the products' magnitudes (Higham, Accuracy
        # and Stability of Numerical Algorithms, 3.1); k of 520 gives 2^-15. Equal products, as of a broadcast
        # vector, round the same way each time and come near it relative to the result. Where normal values
        # cancel, partial sums reach sqrt(k), and k errors of either sign sqrt(k) times their half ulp:
        # k * 2^-24 beside any result, and eight times that for the worst of many sums.
        tolerance=Tolerance(f32=2.0**-15, atol=2.0**-12),
        same_ok=(BIAS,),
        tiling=f"a matrix above {ALONE} elements over rows, then k; of two, over {SIDE} x {SIDE} outputs",
        cost="Reads a matrix once for a vector, and once for each 32 rows or columns of another matrix.",
        source=source,
        example=example,
    )


OPERATORS: Final = (
    _operator(
        "matvec",
        "a @ x + bias: [..., m, k] @ [..., k], batch dims broadcast",
        spec_matvec,
        "torch.mv, torch.addmv; a shared by a batch of x: torch.nn.functional.linear.",
    ),
    _operator(
        "vecmat",
        "x @ a + bias: [..., k] @ [..., k, n], batch dims broadcast",
        spec_vecmat,
        "torch.matmul; a shared by a batch of x: torch.addmm.",
    ),
    _operator(
        "matmul",
        "a @ b + bias: [..., m, k] @ [..., k, n], batch dims broadcast",
        spec_matmul,
        "torch.matmul, torch.addmm, torch.baddbmm.",
        (Parameter("transpose_a", "bool", False), Parameter("transpose_b", "bool", False)),
    ),
)
