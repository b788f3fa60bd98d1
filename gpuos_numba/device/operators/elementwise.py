"""Element-wise operators: every function under its name, with its kernels.

A function has up to three kernels: one for contiguous f32 alone, one that computes in f32 and one in i64,
whatever dtypes come and go; see device/elementwise.py. Element `i` of the output depends on element `i` of
the inputs alone, so the output may be exactly an input.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from ...descriptor import DTYPE_NAMES, DType
from ...errors import ArgumentError, DTypeError
from ...machines.base import Body, Primitives
from ...shapes import broadcast_shape
from .. import elementwise as bodies
from .. import runs
from ..elementwise import Entry
from . import binary, ternary, unary
from .functions import ROUNDED_ONCE, Array, Function
from .planning import TILE, tile_count, walks_of
from .promotion import category, number_dtype, operand_of, promote
from .table import (
    ELEMENTWISE_IDS,
    FLOATS,
    INTS,
    Draw,
    Example,
    Kernel,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    Shared,
    pack,
    refuse_dtype,
)

DTYPES: Final = (*FLOATS, *INTS)

# --- functions that are not called by their own name ---


def make_fill(m: Primitives) -> Body:
    def fill(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return p

    return fill


def make_truncate(m: Primitives) -> Body:
    """f32 toward zero, held between p and q, which are the target's limits; NaN is 0."""
    NOTHING, TOP = np.int64(0), m.f32(2.0**63)
    MOST, LEAST = np.int64(2**63 - 1), np.int64(-(2**63))

    def truncate(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if x != x:
            return NOTHING
        if x >= TOP:
            result = MOST
        elif x <= -TOP:
            result = LEAST
        else:
            result = np.int64(x)
        if result < p:
            result = p
        if result > q:
            result = q
        return result

    return truncate


def _truth_fill(value: float) -> Array:
    return np.asarray(value)


_FILL: Final = Function("fill", 0, "value", _truth_fill, make_fill, make_fill)
_CLAMP: Final = Function("clamp", 1, "", unary.truth_clip, unary.make_clip, unary.make_clip)
_TRUNCATE: Final = Function("truncate", 1, "", np.trunc, make_truncate)

# --- kernels: an id for each function and compute type ---

_ALL: Final = (
    *unary.FUNCTIONS,
    unary.GELU,
    unary.GELU_TANH,
    *binary.FUNCTIONS,
    *binary.SCALED,
    *ternary.FUNCTIONS,
    _FILL,
    _CLAMP,
)
# What models call all the time: contiguous operands of one float dtype have kernels of their own.
_UNARY: Final = ("copy", "neg", "relu", "exp", "tanh", "sigmoid", "silu", "gelu")
_BINARY: Final = ("add", "sub", "mul", "div", "maximum", "minimum")
_PLAIN: Final = [f for name in (*_UNARY, *_BINARY) for f in _ALL if f.name == name]

# On the CUDA machine in a body of their own.
_LONG: Final = frozenset(
    ("expm1", "log", "log1p", "sin", "cos", "erf", "softplus", "elu", "floor_divide", "remainder", "pow")
)
_F32: Final = sorted((f for f in _ALL if f.f32), key=lambda f: f.name in _LONG)
_I64: Final = sorted((f for f in _ALL if f.i64), key=lambda f: f.name in _LONG)

PLAIN_IDS: Final = ELEMENTWISE_IDS
HALF_IDS: Final = PLAIN_IDS + len(_PLAIN)  # without a gap: is_plain is one comparison
F32_IDS: Final = ELEMENTWISE_IDS + 31
I64_IDS: Final = ELEMENTWISE_IDS + 135
TRUNCATE_ID: Final = ELEMENTWISE_IDS + 254
assert HALF_IDS + len(_PLAIN) <= F32_IDS
assert len(_F32) <= I64_IDS - F32_IDS
assert len(_I64) <= TRUNCATE_ID - I64_IDS

_plain_entries: Final = [Entry(PLAIN_IDS + i, f.f32, make4=f.f32x4) for i, f in enumerate(_PLAIN) if f.f32]
_f32_entries: Final = [Entry(F32_IDS + i, f.f32, f.name in _LONG) for i, f in enumerate(_F32) if f.f32]
_i64_entries: Final = [
    Entry(I64_IDS + i, f.i64, f.name in _LONG, f.divides) for i, f in enumerate(_I64) if f.i64
]
_half_entries: Final = [Entry(HALF_IDS + i, f.f32, make4=f.f32x4) for i, f in enumerate(_PLAIN) if f.f32]


def _make_shared(long: bool, integers: bool) -> Any:
    entries = [each for each in (_i64_entries if integers else _f32_entries) if each.long is long]

    def make(m: Primitives) -> Body:
        compute = bodies.compute_i64(m) if integers else bodies.compute_f32(m)
        return bodies.make_typed_shared(m, compute, entries)

    return make


def _make_shared_plain(m: Primitives) -> Body:
    return bodies.make_plain_shared(m, _plain_entries, PLAIN_IDS + len(_UNARY))


def _make_shared_half(m: Primitives) -> Body:
    return bodies.make_plain_shared(m, _half_entries, HALF_IDS + len(_UNARY), half=True)


def make_run_plain(m: Primitives, inlined: Sequence[runs.Inlined] = ()) -> tuple[Body, Body]:
    """What the worker runs itself, without a call. See `device/runs.py`."""
    return runs.make_run_plain(m, _plain_entries, _half_entries, len(_UNARY), inlined)


_SHARED_PLAIN: Final = Shared("gpuos_plain", _make_shared_plain)
_SHARED_HALF: Final = Shared("gpuos_half", _make_shared_half)
# By whether they are long: what is called all the time lies close together.
_BOTH: Final = (False, True)
_SHARED_F32: Final = {
    long: Shared(f"gpuos_{'long' if long else 'typed'}_f32", _make_shared(long, False))
    for long in (False, True)
}
_SHARED_I64: Final = {
    long: Shared(f"gpuos_{'long' if long else 'typed'}_i64", _make_shared(long, True))
    for long in (False, True)
}


def _make_plain_kernels(half: bool, shared: Shared, first_id: int) -> dict[str, Kernel]:
    kernels = {}
    for i, function in enumerate(_PLAIN):
        assert function.f32 is not None
        make = partial(bodies.make_plain, arity=function.arity, make=function.f32, half=half)
        name = f"{function.name}.half" if half else function.name
        kernels[function.name] = Kernel(first_id + i, name, make, shared)
    return kernels


def _make_typed_kernel(entry: Entry, name: str, compute: Any, shared: dict[bool, Shared]) -> Kernel:
    def make(m: Primitives) -> Body:
        return bodies.make_typed(m, compute(m), entry)

    return Kernel(entry.op_id, name, make, shared[entry.long])


_PLAIN_KERNELS: Final = _make_plain_kernels(False, _SHARED_PLAIN, PLAIN_IDS)
_HALF_KERNELS: Final = _make_plain_kernels(True, _SHARED_HALF, HALF_IDS)
_F32_KERNELS: Final = {
    f.name: _make_typed_kernel(e, f"{f.name}.f32", bodies.compute_f32, _SHARED_F32)
    for f, e in zip(_F32, _f32_entries, strict=True)
}
_I64_KERNELS: Final = {
    f.name: _make_typed_kernel(e, f"{f.name}.i64", bodies.compute_i64, _SHARED_I64)
    for f, e in zip(_I64, _i64_entries, strict=True)
}


def _make_truncate_kernel(m: Primitives) -> Body:
    return bodies.make_typed(m, bodies.compute_truncated(m), Entry(TRUNCATE_ID, make_truncate))


_TRUNCATE_KERNEL: Final = Kernel(TRUNCATE_ID, "truncate", _make_truncate_kernel)

# --- calls ---


def _check_dtypes(name: str, inputs: Sequence[Operand]) -> None:
    for place, operand in enumerate(inputs):
        if operand.dtype not in DTYPES:
            raise refuse_dtype(name, f"inputs[{place}]", operand.dtype, DTYPES)
    if all(operand.immediate for operand in inputs):
        raise ArgumentError(f"{name} of numbers alone: give it at least one array")


def _shape(inputs: Sequence[Operand]) -> tuple[int, ...]:
    return broadcast_shape(inputs, [f"inputs[{i}]" for i in range(len(inputs))])


def _f32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _run(
    function: Function,
    in_f32: bool,
    inputs: Sequence[Operand],
    out: Operand,
    blocks: int,
    scalars: Sequence[float] = (),
) -> Plan:
    """The plan of a function's kernel."""
    count, walks = out.elements, walks_of(inputs, out)
    tiles = tile_count(count, blocks)
    if in_f32 and out.dtype in INTS and out.dtype is not DType.BOOL:
        raise DTypeError(
            f"out has dtype {DTYPE_NAMES[out.dtype]}, {function.name} of floats does not write integers: "
            "pass an out of bool or a float dtype"
        )
    plain = (_PLAIN_KERNELS if out.dtype is DType.F32 else _HALF_KERNELS).get(function.name)
    if (
        plain
        and out.dtype in FLOATS
        and walks is None
        and not scalars
        and all(each.dtype is out.dtype and not each.immediate and each.shape == out.shape for each in inputs)
    ):
        return Plan(plain.op_id, count, tiles)
    if in_f32:
        packed = pack("f" * len(scalars), *map(_f32, scalars))
        return Plan(_F32_KERNELS[function.name].op_id, count, tiles, walks, packed)
    try:
        packed = pack("q" * len(scalars), *map(int, scalars))
    except (struct.error, OverflowError, ValueError) as error:
        raise ArgumentError(f"{function.name}: {tuple(scalars)} do not fit 64 bits") from error
    return Plan(_I64_KERNELS[function.name].op_id, count, tiles, walks, packed, number=DType.I64)


def _lanes(dtype: DType, in_f32: bool, operands: Sequence[Any]) -> list[Array]:
    """Operands as a truth takes them."""
    kind = np.float32 if in_f32 else np.int64
    return list(np.broadcast_arrays(*(np.asarray(each).astype(kind) for each in operands)))


def _draw_operand(draw: Draw, shape: tuple[int, ...], dtype: DType, values: str) -> Any:
    return draw.array(draw.broadcastable(shape), dtype, values)


def _operator(function: Function, variant: Any = None) -> Operator:
    """The operator of a function. `variant(parameters)` may name another function and its scalars."""
    name, arity = function.name, function.arity
    takes_condition = name == "where"

    def common(inputs: Sequence[Operand]) -> DType:
        _check_dtypes(name, inputs)
        if takes_condition and inputs[0].dtype is not DType.BOOL:
            raise refuse_dtype(name, "inputs[0]", inputs[0].dtype, (DType.BOOL,))
        # Where the result has another dtype anyway, uint8 and int8 may be computed as int64.
        unnamed = None if function.result == "same" else DType.I64
        dtype = promote(inputs[1:] if takes_condition else inputs, unnamed)
        if (category(dtype) == 0 and not function.bools) or (category(dtype) == 1 and not function.integers):
            wanted = [d for d in DTYPES if category(d) == 2 or (category(d) == 1 and function.integers)]
            raise refuse_dtype(name, "its operand", dtype, wanted)
        return dtype

    def in_f32(dtype: DType) -> bool:
        return dtype in FLOATS or function.i64 is None

    def infer(inputs: Sequence[Operand], /, **parameters: Any) -> tuple[Result, ...]:
        dtype = common(inputs)
        if dtype not in FLOATS:
            for key, value in parameters.items():
                if isinstance(value, float) and function.i64 is not None:
                    raise ArgumentError(f"{name} of integers: {key}={value!r} must be an integer too")
            if function.result == "float":
                dtype = DType.F32
        return (Result(_shape(inputs), DType.BOOL if function.result == "bool" else dtype),)

    def plan(
        inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, **parameters: Any
    ) -> Plan:
        dtype = common(inputs)
        chosen, scalars = variant(parameters) if variant else (function, tuple(parameters.values()))
        return _run(chosen, in_f32(dtype), inputs, outputs[0], blocks, scalars)

    def spec(*operands: Any, **parameters: Any) -> Array:
        dtype = common([operand_of(each) for each in operands])
        given = {each.name: each.default for each in function.parameters} | parameters
        return function.truth(*_lanes(dtype, in_f32(dtype), operands), **given)

    def draw_inputs(draw: Draw) -> list[Any]:
        shape = draw.shape()
        dtypes = [draw.choice(DTYPES) for _ in range(arity)]
        if draw.integer(0, 1):
            dtypes = dtypes[:1] * arity
        if takes_condition:
            dtypes[0] = DType.BOOL
        inputs: list[Any] = []
        for place, each in enumerate(dtypes):
            if place and draw.integer(0, 5) == 0:
                inputs.append(draw.choice([2, True, -3, 0.5, -1.25]))
                continue
            array = _draw_operand(draw, shape, each, function.values)
            if function.divides and place == 1 and each in INTS:
                array = np.where(array == 0, array.dtype.type(1), array)
            inputs.append(array)
        return inputs

    def example(draw: Draw) -> Example:
        while True:
            inputs = draw_inputs(draw)
            try:
                dtype = common([operand_of(each) for each in inputs])
                break
            except DTypeError:
                continue
        parameters = {}
        for parameter in function.parameters:
            if isinstance(parameter.kind, tuple):
                parameters[parameter.name] = draw.choice(parameter.kind)
            elif draw.integer(0, 1):
                whole = parameter.kind == "number" and category(dtype) < 2
                parameters[parameter.name] = draw.choice([2, 3] if whole else [0.5, 2.0])
        return inputs, parameters

    kinds = [function.bools, function.integers, True]
    takes = tuple(each for each in DTYPES if kinds[category(each)])
    names = (name, *{"add": ("add.alpha",), "sub": ("sub.alpha",), "gelu": ("gelu.tanh",)}.get(name, ()))
    kernels = [table[each] for table in _TABLES for each in names if each in table]
    # The first kernel needs no scalars.
    bare = variant is not None or not function.parameters
    return Operator(
        name,
        "element-wise",
        (arity, arity),
        1,
        takes,
        function.formula,
        infer,
        plan,
        tuple(kernels),
        spec,
        parameters=function.parameters,
        tolerance=function.tolerance,
        same_ok=tuple(range(arity)),
        tiling=f"above {TILE} elements",
        cost="Moves each element once.",
        source=function.source or f"torch.{name}.",
        example=example,
        numbers=arity > 1,
        casts=True,
        plain=function.f32 is not None and arity in (1, 2) and function.result != "bool" and bare,
    )


_TABLES: Final = (_PLAIN_KERNELS, _HALF_KERNELS, _F32_KERNELS, _I64_KERNELS)


def _scaled(scaled: Function, function: Function) -> Any:
    def variant(parameters: dict[str, Any]) -> tuple[Function, tuple[Any, ...]]:
        alpha = parameters["alpha"]
        return (function, ()) if alpha == 1 else (scaled, (alpha,))

    return variant


def _gelu(parameters: dict[str, Any]) -> tuple[Function, tuple[Any, ...]]:
    return (unary.GELU if parameters["approximate"] == "none" else unary.GELU_TANH), ()


# --- operators whose dtypes follow rules of their own ---


def _infer_clamp(inputs: Sequence[Operand], /, min: Any, max: Any) -> tuple[Result, ...]:
    return (Result(inputs[0].shape, _clamped(inputs[0], min, max)),)


def _clamped(x: Operand, low: Any, high: Any) -> DType:
    _check_dtypes("clamp", [x])
    bounds = [each for each in (low, high) if each is not None]
    if not bounds:
        raise ArgumentError("clamp without min and max: give at least one")
    return promote([x, *(Operand(number_dtype(each), (), (), True, True) for each in bounds)])


def _bounds(dtype: DType, low: Any, high: Any) -> tuple[Any, Any]:
    limits = (-np.inf, np.inf) if dtype in FLOATS else (-(2**63), 2**63 - 1)
    return limits[0] if low is None else low, limits[1] if high is None else high


def _plan_clamp(
    inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, min: Any, max: Any
) -> Plan:
    dtype = _clamped(inputs[0], min, max)
    return _run(_CLAMP, dtype in FLOATS, inputs, outputs[0], blocks, _bounds(dtype, min, max))


def _spec_clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    dtype = _clamped(operand_of(x), min, max)
    (lanes,) = _lanes(dtype, dtype in FLOATS, [x])
    return unary.truth_clip(lanes, *_bounds(dtype, min, max))


def _example_clamp(draw: Draw) -> Example:
    bounds = {"min": draw.choice([-1, 0.5, 2, None]), "max": draw.choice([-1, 0.5, 1])}
    return [_draw_operand(draw, draw.shape(), draw.choice(DTYPES), "any")], bounds


def _kernel_of_copy(source: DType, target: DType) -> Kernel:
    if source in FLOATS and target in INTS and target is not DType.BOOL:
        return _TRUNCATE_KERNEL
    return (_F32_KERNELS if source in FLOATS or target in FLOATS else _I64_KERNELS)["copy"]


def _infer_cast(inputs: Sequence[Operand], /, dtype: DType) -> tuple[Result, ...]:
    _check_dtypes("cast", inputs)
    if dtype not in DTYPES:
        raise refuse_dtype("cast", "the target", dtype, DTYPES)
    return (Result(inputs[0].shape, dtype),)


def _plan_cast(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, dtype: DType) -> Plan:
    out, count = outputs[0], outputs[0].elements
    kernel, scalars = _kernel_of_copy(inputs[0].dtype, out.dtype), b""
    if kernel is _TRUNCATE_KERNEL:
        limits = np.iinfo(DTYPE_NAMES[out.dtype])
        scalars = pack("qq", limits.min, limits.max)
    return Plan(kernel.op_id, count, tile_count(count, blocks), walks_of(inputs, out), scalars)


def _spec_cast(x: Array, dtype: Any) -> Array:
    from .table import read_dtype

    target = read_dtype(dtype)
    if target in FLOATS:
        return x.astype(np.float32)  # from there as PyTorch goes
    if target is DType.BOOL:
        return x.astype(np.float32) != 0
    kind = np.dtype(DTYPE_NAMES[target])
    if x.dtype.name not in ("float16", "bfloat16", "float32"):
        return x.astype(kind)
    limits, exact = np.iinfo(kind), np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
    inside = (exact >= float(limits.min)) & (exact < float(limits.max))
    edge = np.where(exact < 0, limits.min, limits.max)
    return np.where(inside, np.where(inside, exact, 0).astype(np.int64), edge).astype(kind)


def _example_cast(draw: Draw) -> Example:
    x = _draw_operand(draw, draw.shape(), draw.choice(DTYPES), "any")
    return [x], {"dtype": DTYPE_NAMES[draw.choice(DTYPES)]}


def _plan_fill(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, value: Any) -> Plan:
    out = outputs[0]
    if out.dtype not in DTYPES:
        raise refuse_dtype("fill", "out", out.dtype, DTYPES)
    in_f32 = out.dtype in FLOATS
    if not in_f32 and isinstance(value, float):
        if value != value or value in (np.inf, -np.inf):
            raise ArgumentError(f"fill: {value!r} is no {DTYPE_NAMES[out.dtype]}: give a number that is")
        value = int(value != 0) if out.dtype is DType.BOOL else int(value)
    return _run(_FILL, in_f32, inputs, out, blocks, (value,))


def _spec_fill(shape: tuple[int, ...], value: float) -> Array:
    return np.full(shape, value, np.float32)


_ALPHAS: Final = {"add": binary.SCALED[0], "sub": binary.SCALED[1]}
_GELU: Final = Function(
    "gelu",
    1,
    "a Φ(a), Φ the normal distribution; or its tanh form, which differs by up to 5e-4",
    lambda x, approximate: (unary.GELU if approximate == "none" else unary.GELU_TANH).truth(x),
    unary.GELU.f32,
    bools=False,
    integers=False,
    parameters=(Parameter("approximate", ("none", "tanh"), "none"),),
    tolerance=unary.GELU.tolerance,
    source="torch.nn.functional.gelu; Hendrycks and Gimpel, arXiv 1606.08415.",
)

OPERATORS: Final = (
    *(
        _operator(f, _scaled(_ALPHAS[f.name], f) if f.name in _ALPHAS else None)
        for f in (*unary.FUNCTIONS, *binary.FUNCTIONS, *ternary.FUNCTIONS)
    ),
    _operator(_GELU, _gelu),
    Operator(
        "clamp",
        "element-wise",
        (1, 1),
        1,
        DTYPES,
        "a held between min and max; max where min > max; NaN stays",
        _infer_clamp,
        _plan_clamp,
        (_F32_KERNELS["clamp"], _I64_KERNELS["clamp"]),
        _spec_clamp,
        parameters=(Parameter("min", "number", None), Parameter("max", "number", None)),
        tolerance=ROUNDED_ONCE,
        same_ok=(0,),
        tiling=f"above {TILE} elements",
        cost="Moves each element once.",
        source="torch.clamp.",
        example=_example_clamp,
        casts=True,
    ),
    Operator(
        "cast",
        "data movement",
        (1, 1),
        1,
        DTYPES,
        "a as another dtype; float to integer goes toward zero, to the nearest that there is, NaN to 0",
        _infer_cast,
        _plan_cast,
        (_F32_KERNELS["copy"], _I64_KERNELS["copy"], _TRUNCATE_KERNEL),
        _spec_cast,
        parameters=(Parameter("dtype", "dtype"),),
        tolerance=ROUNDED_ONCE,
        tiling=f"above {TILE} elements",
        cost="Moves each element once.",
        source="torch.Tensor.to, but for floats that no integer of the dtype is near.",
        example=_example_cast,
    ),
    Operator(
        "fill",
        "data movement",
        (0, 0),
        1,
        DTYPES,
        "value",
        lambda inputs, **parameters: (),
        _plan_fill,
        (_F32_KERNELS["fill"], _I64_KERNELS["fill"]),
        _spec_fill,
        parameters=(Parameter("value", "number"),),
        tiling=f"above {TILE} elements",
        cost="Writes each element once.",
        source="torch.Tensor.fill_.",
        like_out=True,
    ),
)
