"""Element-wise operators: dtypes as PyTorch promotes them, edges of every function, numbers, casts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.descriptor import DTYPE_NAMES, DType
from gpuos_numba.device.operators import TABLE, elementwise
from gpuos_numba.device.operators.table import Operand

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
NAN, INF = np.nan, np.inf
NAMES = [operator.name for operator in elementwise.OPERATORS if operator.family == "element-wise"]
SEVERAL = [name for name in NAMES if TABLE[name].inputs[0] > 1]


def run(rt: gpuos.Runtime, name: str, *inputs: Any, **parameters: Any) -> np.ndarray[Any, Any]:
    arrays = [testing.to_device(rt, x) if isinstance(x, np.ndarray) else x for x in inputs]
    return testing.to_host(rt.submit(name, arrays, **parameters).result())


# --- dtypes ---


def torch_call(torch: Any, name: str, operands: list[Any]) -> Any:
    if name == "clamp":
        return torch.clamp(operands[0], min=1)
    if name == "fma":  # torch has none; addcmul has its dtypes
        return torch.addcmul(*operands)
    if name == "copy":
        return torch.clone(*operands)
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    return function(*operands)


@pytest.mark.parametrize("name", NAMES)
def test_results_have_the_dtype_that_pytorch_gives_them(name: str) -> None:
    torch = pytest.importorskip("torch")
    operator = TABLE[name]
    kinds = [getattr(torch, DTYPE_NAMES[each]) for each in elementwise.DTYPES]
    shapes = [(2,), ()]
    for given in itertools.product(
        zip(elementwise.DTYPES, kinds, strict=True), repeat=min(2, operator.inputs[0])
    ):
        given = given if operator.inputs[0] < 3 else (given[0], *given)
        if name == "where":
            given = ((DType.BOOL, torch.bool), *given[1:])
        if name in ("lerp", "addcmul", "fma") and len({each[0] for each in given}) > 1:
            continue  # torch does not promote here, or not all three
        for sides in itertools.product(shapes, repeat=len(given)):
            operands = [
                Operand(each[0], side, (1,) * len(side), True)
                for each, side in zip(given, sides, strict=True)
            ]
            parameters = operator.read_parameters({"min": 1} if name == "clamp" else {})
            try:
                wanted = torch_call(
                    torch,
                    name,
                    [torch.ones(side, dtype=each[1]) for each, side in zip(given, sides, strict=True)],
                ).dtype
            except (RuntimeError, NotImplementedError):
                continue  # what torch refuses is ours to decide
            try:
                found = operator.infer(operands, **parameters)[0].dtype
            except gpuos.DTypeError:
                assert wanted == torch.int16 or (name in REFUSED and given[0][0] in REFUSED[name]), (
                    given,
                    wanted,
                )
                continue
            assert DTYPE_NAMES[found] == str(wanted).removeprefix("torch."), (given, sides)


REFUSED = {
    # torch squares bools to int64, and holds integers in floats' hardtanh
    "square": [DType.BOOL],
    "hardtanh": [DType.I8, DType.I32, DType.I64],
}


@pytest.mark.parametrize("number, wanted", [(2, "int32"), (2.0, "float32"), (True, "int32")])
def test_a_number_only_raises_the_category(number: Any, wanted: str, runtime: gpuos.Runtime) -> None:
    assert run(runtime, "add", np.ones(3, np.int32), number).dtype == wanted
    assert run(runtime, "add", np.ones(3, F16), number).dtype == F16
    assert run(runtime, "mul", np.ones(3, np.bool_), 2).dtype == np.int64


def test_refusals_name_value_and_remedy(cpu: gpuos.Runtime) -> None:
    a, b = np.ones(3, np.uint8), np.ones(3, np.int8)
    with pytest.raises(gpuos.DTypeError, match=r"int16.*cast one"):
        cpu.add(a, b)
    with pytest.raises(gpuos.DTypeError, match=r"bool.*convert"):
        cpu.neg(np.ones(3, np.bool_))
    with pytest.raises(gpuos.DTypeError, match="float64"):
        cpu.add(np.ones(3), np.ones(3))
    with pytest.raises(gpuos.DTypeError, match=r"inputs\[0\] has dtype float32.*bool"):
        cpu.where(np.ones(3, F32), 1.0, np.ones(3, F32))
    with pytest.raises(gpuos.ArgumentError, match=r"alpha=1.5 must be an integer"):
        cpu.add(np.ones(3, np.int32), 1, alpha=1.5)
    with pytest.raises(gpuos.ArgumentError, match="clamp without min and max"):
        cpu.clamp(np.ones(3, F32))
    with pytest.raises(gpuos.DTypeError, match="out has dtype int32"):
        cpu.add(np.ones(3, F32), np.ones(3, F32), out=np.empty(3, np.int32))
    with pytest.raises(gpuos.ArgumentError, match="numbers alone"):
        cpu.add(1, 2, out=np.empty(3, np.int64))
    assert cpu.stats().submitted == 0


@pytest.fixture
def cpu() -> Any:
    with gpuos.Runtime("cpu") as rt:
        yield rt


# --- values ---


def test_division_is_as_ieee_has_it(runtime: gpuos.Runtime) -> None:
    a, b = np.array([1, -1, 0, 1], F32), np.array([0, 0, 0, -0.0], F32)
    np.testing.assert_array_equal(run(runtime, "div", a, b), [INF, -INF, NAN, -INF])


def test_integer_division_takes_the_sign_of_the_divisor(runtime: gpuos.Runtime) -> None:
    a, b = np.array([-7, 7, -7, 7, 6], np.int32), np.array([2, -2, -2, 2, 3], np.int32)
    np.testing.assert_array_equal(run(runtime, "floor_divide", a, b), [-4, -4, 3, 3, 2])
    np.testing.assert_array_equal(run(runtime, "remainder", a, b), [1, -1, -1, 1, 0])
    least = np.array([np.iinfo(np.int64).min], np.int64)
    np.testing.assert_array_equal(run(runtime, "floor_divide", least, -1), least)  # no trap
    np.testing.assert_array_equal(run(runtime, "remainder", least, -1), [0])


@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
@pytest.mark.parametrize("size", [3, 8, 1000])
def test_integer_division_by_zero_is_an_error(runtime: gpuos.Runtime, name: str, size: int) -> None:
    divisor = np.ones(size, np.int32)
    divisor[-1] = 0
    ticket = runtime.submit(name, [testing.to_device(runtime, x) for x in (np.ones(size, np.int32), divisor)])
    with pytest.raises(gpuos.TaskError, match=f"{name} at .*divided by zero"):
        ticket.result()


def test_integers_stay_integers(runtime: gpuos.Runtime) -> None:
    big = np.array([2**24 + 1, 2**31 - 1], np.int32)
    np.testing.assert_array_equal(run(runtime, "add", big, 0), big)
    np.testing.assert_array_equal(run(runtime, "add", big, 1), (big.astype(np.int64) + 1).astype(np.int32))
    huge = np.array([2**53 + 1], np.int64)
    np.testing.assert_array_equal(run(runtime, "mul", huge, 3), huge * 3)


@pytest.mark.parametrize(
    "name, ignores", [("maximum", False), ("minimum", False), ("fmax", True), ("fmin", True)]
)
def test_nan_wins_or_is_ignored(runtime: gpuos.Runtime, name: str, ignores: bool) -> None:
    a, b = np.array([NAN, 1, NAN] * 5, F32), np.array([2, NAN, NAN] * 5, F32)
    wanted = [2, 1, NAN] if ignores else [NAN] * 3
    np.testing.assert_array_equal(run(runtime, name, a, b), wanted * 5)


def test_relu_and_clamp_keep_nan(runtime: gpuos.Runtime) -> None:
    x = np.array([NAN, -1, 5] * 4, F32)
    np.testing.assert_array_equal(run(runtime, "relu", x), [NAN, 0, 5] * 4)
    np.testing.assert_array_equal(run(runtime, "clamp", x, min=3.0, max=2.0), [NAN, 2, 2] * 4)
    np.testing.assert_array_equal(run(runtime, "clamp", x.astype(F16), max=2.0), [NAN, -1, 2] * 4)


def test_halves_are_rounded_to_nearest_even(runtime: gpuos.Runtime) -> None:
    x = np.array([65520, 65519, 2049, 2051, 6e-8, 1e-9], F32)
    np.testing.assert_array_equal(run(runtime, "cast", x, dtype="float16"), x.astype(F16))
    y = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, NAN], F32)
    result = run(runtime, "cast", y, dtype="bfloat16").astype(F32)
    np.testing.assert_array_equal(result, y.astype(BF16).astype(F32))


def test_floats_that_no_integer_is_near_become_the_nearest(runtime: gpuos.Runtime) -> None:
    x = np.array([NAN, INF, -INF, 3e9, -3e9, 1.9, -1.9, 300, -5], F32)
    np.testing.assert_array_equal(
        run(runtime, "cast", x, dtype="int32"), [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 1, -1, 300, -5]
    )
    np.testing.assert_array_equal(run(runtime, "cast", x, dtype="uint8"), [0, 255, 0, 255, 0, 1, 0, 255, 0])
    np.testing.assert_array_equal(run(runtime, "cast", x, dtype="bool"), [True] * 9)


def test_sigmoid_reaches_into_the_subnormals(runtime: gpuos.Runtime) -> None:
    result = run(runtime, "sigmoid", np.array([-100, 100, 0, NAN], F32))
    assert result[0] == pytest.approx(3.8e-44, rel=0.05) and result[0] > 0
    np.testing.assert_array_equal(result[1:], [1, 0.5, NAN])


def test_small_arguments_keep_their_digits(runtime: gpuos.Runtime) -> None:
    x = np.array([1e-10, -1e-10], F32)
    np.testing.assert_allclose(run(runtime, "expm1", x), x, rtol=1e-6)
    np.testing.assert_allclose(run(runtime, "log1p", x), x, rtol=1e-6)


def test_activations_at_their_edges(runtime: gpuos.Runtime) -> None:
    ends = np.array([-INF, INF, NAN, -0.0], F32)
    np.testing.assert_array_equal(run(runtime, "silu", ends), [NAN, INF, NAN, 0])
    np.testing.assert_array_equal(run(runtime, "gelu", ends), [NAN, INF, NAN, 0])
    np.testing.assert_array_equal(run(runtime, "gelu", ends, approximate="tanh"), [NAN, INF, NAN, 0])
    np.testing.assert_array_equal(run(runtime, "softplus", np.array([30, 1000], F32)), [30, 1000])
    np.testing.assert_array_equal(run(runtime, "tanh", np.array([50, -50], F32)), [1, -1])


def test_the_two_forms_of_gelu_differ_as_they_should(runtime: gpuos.Runtime) -> None:
    x = np.linspace(-6, 6, 4001).astype(F32)
    exact, approximate = run(runtime, "gelu", x), run(runtime, "gelu", x, approximate="tanh")
    assert 1e-4 < np.abs(exact - approximate).max() < 5e-4
    assert run(runtime, "gelu", np.array([-5], F32))[0] == pytest.approx(
        -5 * 0.5 * math.erfc(5 / math.sqrt(2)), rel=1e-5
    )


def test_round_and_powers(runtime: gpuos.Runtime) -> None:
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1e20], F32)
    np.testing.assert_array_equal(run(runtime, "round", halves), np.rint(halves))
    a, b = np.array([0, -8, -2, 2], F32), np.array([0, 1 / 3, 3, -1], F32)
    np.testing.assert_allclose(run(runtime, "pow", a, b), [1, NAN, -8, 0.5])
    c, d = np.array([2, -1, -1, 0, 3], np.int64), np.array([-1, -3, -2, 0, 5], np.int64)
    np.testing.assert_array_equal(run(runtime, "pow", c, d), [0, -1, 1, 1, 243])


def test_where_takes_nothing_from_the_other_side(runtime: gpuos.Runtime) -> None:
    condition = np.array([True, False] * 6)
    a, b = np.where(condition, 1, NAN).astype(F32), np.where(condition, NAN, 2).astype(F32)
    np.testing.assert_array_equal(run(runtime, "where", condition, a, b), [1, 2] * 6)
    np.testing.assert_array_equal(run(runtime, "where", condition, a.astype(F16), 7.0)[1::2], [7] * 6)


def test_alpha_is_applied_with_one_rounding(runtime: gpuos.Runtime) -> None:
    a, b = np.array([1, 2, 3], F32), np.array([0.1, 0.2, 0.3], F32)
    np.testing.assert_array_equal(
        run(runtime, "add", a, b, alpha=3), (a.astype(np.float64) + 3 * b.astype(np.float64)).astype(F32)
    )
    np.testing.assert_array_equal(run(runtime, "sub", np.array([5, 6]), np.array([1, 2]), alpha=2), [3, 2])


def test_an_output_may_have_a_wider_dtype(runtime: gpuos.Runtime) -> None:
    a = testing.to_device(runtime, np.array([1, 2, 3], np.int32))
    out = testing.to_device(runtime, np.zeros(3, F16))
    runtime.add(a, a, out=out).result()
    np.testing.assert_array_equal(testing.to_host(out), [2, 4, 6])
    runtime.lt(a, 2, out=out).result()
    np.testing.assert_array_equal(testing.to_host(out), [1, 0, 0])


@pytest.mark.parametrize("dtype", [F32, F16, BF16, np.int32, np.uint8, np.bool_])
def test_fill_writes_every_dtype(runtime: gpuos.Runtime, dtype: Any) -> None:
    out = testing.to_device(runtime, np.zeros((3, 70), dtype))
    runtime.fill(out=out, value=1).result()
    assert (testing.to_host(out).astype(F32) == 1).all()
    with pytest.raises(gpuos.ArgumentError, match="nan"):
        runtime.fill(out=testing.to_device(runtime, np.zeros(3, np.int32)), value=NAN)


@pytest.mark.parametrize("dtype", [F32, F16, np.int64, np.uint8])
def test_tiles_cover_every_element_once(runtime: gpuos.Runtime, dtype: Any) -> None:
    x = (np.arange(200_003) % 251).astype(dtype)
    np.testing.assert_array_equal(run(runtime, "add", x, x), (x + x).astype(dtype))
    y = np.broadcast_to(x[:1003], (101, 1003))
    np.testing.assert_array_equal(run(runtime, "mul", y, x[:101, None]), (y * x[:101, None]).astype(dtype))
