"""Rendered operators compile on both machines and equal their requests; no user's text is in them."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import njit

import gpuos_numba as gpuos
from gpuos_numba import runtime as runtime_module
from gpuos_numba import testing
from gpuos_numba.device import operators as table_module
from gpuos_numba.device.operators import KERNELS, TABLE, Operator
from gpuos_numba.device.operators.table import INJECTED_IDS
from gpuos_numba.inject import request
from gpuos_numba.inject.operators import make_operator
from gpuos_numba.inject.render import VARIANTS, load, render, write
from gpuos_numba.inject.request import Request
from gpuos_numba.machines import cpu_memory

F32 = np.float32
ODD = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -3, 1e-45, 2.0**-126, 3e38, 0.99999994], F32)

REQUESTS = {
    made.name: made
    for made in [
        request.elementwise("swish", "x / (1 + exp(-x))"),
        request.elementwise("smooth", "where(abs(x - y) < 0.5, (x - y) ** 2, abs(x - y) - 0.25)"),
        request.elementwise("blend", "x if z > 0 and not y == x else (y >= 0) * fma(x, y, z) + nan * 0"),
        request.elementwise(
            "functions", "def f(x):\n    a = max(x, 0)\n    a = a * tanh(a)\n    return a + 1"
        ),
        request.chain("mul_relu_add", [("mul", "x", "y"), ("relu", 0), ("add", 1, "z"), ("min", 2, 6.0)]),
        request.reduce("mean_square", map="x * x", finalise="a / n"),
        request.reduce("log_sum_exp", map="exp(x)", finalise="log(a)"),
        request.reduce("least", combine="min(a, b)", identity="inf"),
        request.rowwise("centre", value="x - r / n"),
        request.rowwise(
            "my_softmax", combine="max(a, b)", identity="-inf", map2="exp(x - r)", value="exp(x - r) / s"
        ),
        request.rowwise("my_norm", map2="(x - r / n) ** 2", value="(x - r / n) * rsqrt(s / n + 1e-5)"),
    ]
}


def build(requests: dict[str, Request]) -> dict[str, Operator]:
    operators, op_id = {}, INJECTED_IDS
    for name, made in requests.items():
        operators[name] = make_operator(made, load(render(made)), op_id)
        op_id += len(operators[name].kernels)
    return operators


OPERATORS = build(REQUESTS)


@pytest.fixture
def injected(machine: str, monkeypatch: pytest.MonkeyPatch) -> gpuos.Runtime:
    """A Runtime whose tables hold the rendered operators too, as publishing them will do."""
    if machine == "cuda":
        pytest.skip(
            "injected kernels are linked by the runtime integration: on the GPU they stay unproved here"
        )
    table = MappingProxyType({**TABLE, **OPERATORS})
    kernels = {kernel.op_id: kernel for each in OPERATORS.values() for kernel in each.kernels}
    for module in (runtime_module, testing):
        monkeypatch.setattr(module, "TABLE", table)
    for module in (runtime_module, table_module):
        monkeypatch.setattr(module, "KERNELS", MappingProxyType({**KERNELS, **kernels}))
    rt = gpuos.Runtime("cpu", workers=2)
    yield rt
    rt.close()


# --- the text ---


@pytest.mark.parametrize("name", REQUESTS)
def test_the_source_is_python_of_known_names_with_a_header(name: str) -> None:
    rendered = render(REQUESTS[name])
    assert rendered.source == render(REQUESTS[name]).source
    header = rendered.source.splitlines()[:2]
    assert header[0].startswith("# Generated from templates/injected_") and name in header[1]
    tree = ast.parse(rendered.source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {node.module for node in imports if isinstance(node, ast.ImportFrom)} == {"gpuos_numba.device"}
    assert len(imports) == 2 + ("division" in rendered.source)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    bodies = {
        "make_divide4",
        "make_plain",
        "make_typed",
        "compute_f32",
        "Entry",
        "make_reduce",
        "make_rowwise",
    }
    assert attributes <= {"make_functions", "f32", *bodies}
    assert not [line for line in rendered.source.splitlines() if line.strip() == "" and line]
    assert list(load(rendered)) == list(rendered.variants) == list(VARIANTS[REQUESTS[name].template])


@pytest.mark.parametrize(
    "text",
    [
        "x / (1 + exp(-x))",
        "where(x > y, x / y, y / (x + 1)) / (2 + abs(x))",
        "def f(x, y):\n    a = x / 3\n    b = 2 / a\n    return max(b, y / b) - (a if a < 1 / y else b)",
        "1 / x",
    ],
)
def test_four_lanes_at_once_are_four_times_one(text: str) -> None:
    made = request.elementwise("f", text)
    namespace: dict[str, Any] = {}
    exec(render(made).source, namespace)
    inline = njit(inline="always", error_model="numpy")
    one, four = inline(namespace["make_f"](cpu_memory)), inline(namespace["make_f_four"](cpu_memory))
    ZERO = F32(0)

    @njit(error_model="numpy")
    def both(x: Any, y: Any, ones: Any, fours: Any) -> None:
        for i in range(0, len(x), 4):
            fours[i], fours[i + 1], fours[i + 2], fours[i + 3] = four(
                (x[i], x[i + 1], x[i + 2], x[i + 3]), (y[i], y[i + 1], y[i + 2], y[i + 3])
            )
            for lane in range(i, i + 4):
                ones[lane] = one(x[lane], y[lane], ZERO, ZERO, ZERO)

    rng = np.random.default_rng(0)
    x, y = np.exp2(rng.uniform(-40, 40, (2, 4096))).astype(F32) * rng.choice([-1, 1], (2, 4096)).astype(F32)
    x[: len(ODD) ** 2], y[: len(ODD) ** 2] = np.repeat(ODD, len(ODD)), np.tile(ODD, len(ODD))
    ones, fours = np.empty_like(x), np.empty_like(x)
    both(x, y, ones, fours)
    np.testing.assert_array_equal(fours.view(np.uint32), ones.view(np.uint32))


def test_without_a_quotient_there_is_nothing_for_four_lanes() -> None:
    assert "four" not in render(request.elementwise("f", "x * exp(x) + y")).source


def test_users_characters_are_not_in_the_source() -> None:
    made = request.elementwise("f", "first + second  +  1.50", arguments=["first", "second"])
    source = render(made).source
    assert "first" not in source and "1.50" not in source and "((x + y) + K0)" in source


def test_equal_requests_have_equal_sources_and_others_do_not() -> None:
    texts = ["x + y", "x - y", "x + y + 0.0", "x + y - 0.0", "x + y * 1.0"]
    sources = [render(request.elementwise("f", text)).source for text in texts]
    assert len(set(sources)) == len(texts)
    assert (
        render(request.elementwise("g", "x + y")).file_name
        != render(request.elementwise("f", "x + y")).file_name
    )


@pytest.mark.parametrize(
    "name", ["x", "bodies", "library", "functions_of", "m", "value", "plain", "Entry", "K0", "t0"]
)
def test_any_name_that_passes_the_check_works(name: str) -> None:
    made = request.elementwise(name, "exp(x) + 1")
    make = load(render(made))["any"]
    assert make.__name__ == f"make_{name}_any"
    assert make_operator(made, load(render(made)), INJECTED_IDS).name == name
    rows = request.rowwise(name, map="exp(x)", value="x / r")
    assert load(render(rows))["rows"].__name__ == f"make_{name}_rows"


def test_deep_and_long_expressions_are_still_python() -> None:
    deep = "exp((x<" * 40 + "x" + "))" * 40
    with pytest.raises(gpuos.ArgumentError):
        request.elementwise("deep", deep)  # too deep
    deep = "exp((x<" * 15 + "x" + "))" * 15
    for text in (
        deep,
        "exp(" * 47 + "x" + ")" * 47,
        "x" + "+x" * 46,
        "-" * 46 + "x",
        " and ".join(["x<y"] * 300),
    ):
        load(render(request.elementwise("deep", text)))


def test_the_source_is_a_file_that_errors_name(tmp_path: Path) -> None:
    rendered = render(REQUESTS["swish"])
    path = write(rendered, tmp_path / "sources")
    assert path.read_text() == rendered.source and path.stat().st_mode & 0o777 == 0o600
    assert write(rendered, tmp_path / "sources") == path
    path.write_text("raise SystemExit")
    make = load(rendered, path)["plain"]  # what is run is what was rendered
    assert write(rendered, tmp_path / "sources").read_text() == rendered.source
    try:
        make(None)  # type: ignore[arg-type]
    except AttributeError:
        assert str(path) in traceback.format_exc() or "elementwise.py" in traceback.format_exc()


# --- what it computes ---


@pytest.mark.parametrize("name", REQUESTS)
def test_a_rendered_operator_equals_its_request(injected: gpuos.Runtime, name: str) -> None:
    random = np.random.default_rng(5)
    operator = OPERATORS[name]
    few = operator.inputs[0]
    for dtype in (F32, np.float16, ml_dtypes.bfloat16):
        for shape in [(), (5,), (16,), (3, 40), (2, 3, 17), (9, 1200), (1, 5000), (0, 4), (700, 65)]:
            operands = [random.standard_normal(shape).astype(dtype) for _ in range(few)]
            testing.check(injected, name, *operands)
            if len(shape) > 1:
                views = [each.T for each in operands], [each[..., ::-1] for each in operands]
                for view in (*views, [each[::-1, ..., ::2] for each in operands]):
                    testing.check(injected, name, *view)
                if operator.parameters:
                    for dim in range(-len(shape), len(shape)):
                        testing.check(injected, name, operands[0], dim=dim)


@pytest.mark.parametrize("name", REQUESTS)
def test_examples_of_any_shape(injected: gpuos.Runtime, name: str) -> None:
    class Draws(testing.RandomDraw):
        pass

    for seed in range(25):
        inputs, parameters = OPERATORS[name].example(Draws(seed))  # type: ignore[misc]
        testing.check(injected, name, *inputs, **parameters)


def test_a_reduction_of_nothing_is_its_identity(injected: gpuos.Runtime) -> None:
    nothing = np.zeros((3, 0), F32)
    assert (injected.submit("least", [nothing]).result() == np.inf).all()
    assert (injected.submit("least", [nothing.T], dim=0).result() == np.inf).all()
    assert np.isnan(injected.submit("mean_square", [nothing]).result()).all()
    assert injected.submit("my_softmax", [nothing]).result().shape == (3, 0)


def test_in_place_mixed_dtypes_and_numbers(injected: gpuos.Runtime) -> None:
    x = np.random.default_rng(6).standard_normal((40, 2000)).astype(F32)
    for name in ("swish", "my_softmax", "my_norm", "centre"):
        array = x.copy()
        injected.submit(name, [array], out=array).result()
        np.testing.assert_allclose(array, OPERATORS[name].spec(x), rtol=1e-4, atol=1e-5)  # type: ignore[misc]
    mixed = injected.submit("smooth", [x.astype(np.float16), x]).result()
    assert mixed.dtype == F32
    halves = injected.submit("smooth", [x.astype(np.float16), 0.5]).result()
    assert halves.dtype == np.float16
    with pytest.raises(gpuos.DTypeError, match="int32"):
        injected.submit("swish", [x.astype(np.int32)])
    with pytest.raises(gpuos.ArgumentError, match="dim=2"):
        injected.submit("my_softmax", [x], dim=2)


def test_softmax_and_silu_are_those_of_pytorch(injected: gpuos.Runtime) -> None:
    torch = pytest.importorskip("torch", reason="no torch here: that PyTorch says the same stays unproved")
    x = (3 * np.random.default_rng(7).standard_normal((6, 5, 300))).astype(F32)
    functions: dict[str, Callable[..., Any]] = {
        "swish": torch.nn.functional.silu,
        "my_softmax": lambda t: torch.softmax(t, -1),
        "my_norm": lambda t: torch.nn.functional.layer_norm(t, (300,)),
        "log_sum_exp": lambda t: torch.logsumexp(t, -1),
    }
    for name, function in functions.items():
        result = injected.submit(name, [x]).result()
        np.testing.assert_allclose(result, function(torch.from_numpy(x)).numpy(), rtol=2e-5, atol=1e-6)


@settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_generated_expressions_compile_and_equal_numpy(data: Any) -> None:
    """A body of its own for each, called as the worker would, without a Runtime."""
    from test_postfix import SPECIAL, nodes

    from gpuos_numba.inject.expression import Expression, evaluate
    from gpuos_numba.machines import cpu_memory as m

    expression = Expression(("x", "y", "z"), (("t0", data.draw(nodes(0))),), data.draw(nodes(1)))
    made = Request("generated", "ternary", (("value", expression),))
    namespace: dict[str, Any] = {}
    exec(compile(render(made).source, "generated", "exec"), namespace)
    function = m.device(namespace["make_generated"](m))
    x, y = (each.ravel() for each in np.meshgrid(SPECIAL, SPECIAL))
    z = x[::-1].copy()
    zero = F32(0)
    result = np.array([function(*each, zero, zero) for each in zip(x, y, z, strict=True)], F32)
    with np.errstate(all="ignore"):
        expected = evaluate(expression, x, y, z)
    same = (result == expected) | (np.isnan(result) & np.isnan(expected))
    # Where a value is only close, what comes after may go another way: most are the same to the bit.
    close = np.isclose(result, expected, rtol=1e-5, atol=1e-30, equal_nan=True)
    assert (same | close).mean() > 0.8, render(made).source


# --- the GPU's code ---


@pytest.mark.parametrize("name", REQUESTS)
def test_it_compiles_for_the_gpu_without_local_memory(name: str) -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    for kernel in OPERATORS[name].kernels:
        ptx = cuda_compile.compile_kernel(kernel, cuda_compile.OLDEST)
        assert not re.search(r"\b(ld|st)\.local|\.local ", ptx), kernel.name
        assert kernel.symbol in ptx
        assert ".f64" not in ptx
