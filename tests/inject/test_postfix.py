"""Programs mean what their expressions mean, in NumPy and in the interpreter, and broken ones do no harm."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.descriptor import Status
from gpuos_numba.device.functions import FUNCTIONS, NUMBER
from gpuos_numba.device.operators import TABLE
from gpuos_numba.device.operators.interpreter import (
    CONSTANT,
    DEPTH,
    LOCALS,
    MAX_CODE,
    PUSH_LOCAL,
    PUSH_X,
    STORE_LOCAL,
    pack_program,
    run_program,
    unpack_program,
)
from gpuos_numba.inject.check import check, check_function
from gpuos_numba.inject.expression import Apply, Constant, Expression, Value, evaluate
from gpuos_numba.inject.postfix import compile_postfix, evaluate_postfix

F32 = np.float32
SPECIAL = np.array(
    [
        -np.inf,
        -1e30,
        -300,
        -2.5,
        -1,
        -0.5,
        -1e-3,
        -1e-40,
        -0.0,
        0,
        1e-40,
        1e-3,
        0.5,
        1,
        1.5,
        2.5,
        89,
        1e30,
        np.inf,
        np.nan,
    ],
    F32,
)


def program_of(text: str, arguments: str = "xyz") -> np.ndarray[Any, Any]:
    program = compile_postfix(check(text, list(arguments)))
    assert program is not None
    return np.frombuffer(program, np.uint8).copy()


def interpret(rt: gpuos.Runtime, program: Any, *operands: Any) -> Any:
    sent = [
        testing.to_device(rt, each) if isinstance(each, np.ndarray) else each for each in (program, *operands)
    ]
    return testing.to_host(rt.submit("interpret", sent).result())


# --- compiling ---


def test_a_program_is_postfix() -> None:
    code, constants = unpack_program(program_of("x / (1 + exp(-x))").tobytes())
    names = ["neg", "exp", "add", "div"]
    neg, exp, add, div = (FUNCTIONS[name].opcode for name in names)
    assert list(code) == [PUSH_X, CONSTANT, PUSH_X, neg, exp, add, div, 0]
    assert list(constants) == [1.0]


def test_equal_constants_are_one() -> None:
    _, constants = unpack_program(program_of("0.5 * x + 0.5 + nan * 0 + nan - -0.5 + 0.0 - -0.0").tobytes())
    assert [repr(float(each)) for each in constants] == ["0.5", "nan", "0.0", "-0.5", "-0.0"]


def test_steps_share_locals_when_they_are_done_with() -> None:
    lines = ["    a = x + 1"] + [f"    a = a * {i} + x" for i in range(2, 12)]
    _, expression = check_function("def f(x):\n" + "\n".join(lines) + "\n    return a")
    program = compile_postfix(expression)
    assert program is not None
    x = np.array([0.25, -1], F32)
    np.testing.assert_array_equal(run_program(program, x), evaluate(expression, x))
    alive = "\n".join(f"    a{i} = x + {i}" for i in range(LOCALS + 1))
    total = " + ".join(f"a{i}" for i in range(LOCALS + 1))
    assert compile_postfix(check_function(f"def f(x):\n{alive}\n    return {total}")[1]) is None


def test_what_does_not_fit_has_no_program() -> None:
    assert compile_postfix(check("x + (" * (DEPTH - 1) + "x" + ")" * (DEPTH - 1), ["x"])) is not None
    assert compile_postfix(check("x + (" * DEPTH + "x" + ")" * DEPTH, ["x"])) is None
    assert compile_postfix(check("+".join(["x"] * 40), ["x"])) is not None
    wide = " + ".join(["x*x*x*x*x*x*x*x"] * 20)
    assert compile_postfix(check(wide, ["x"])) is None
    many = "+".join(f"{i}.5" for i in range(33))
    assert compile_postfix(check(f"({many}) * x + ({many.replace('.5', '.25')})", ["x"])) is None
    assert compile_postfix(check("x", list("xyzuv"))) is None


def nodes(steps: int) -> st.SearchStrategy[Any]:
    names = [*"xyz", *(f"t{i}" for i in range(steps))]
    leaves = st.one_of(
        st.sampled_from(names).map(Value),
        st.sampled_from([0.0, -0.0, 1.0, 0.5, np.inf, np.nan]).map(Constant),
    )

    def apply(inner: Any) -> Any:
        def build(name: str) -> Any:
            takes = FUNCTIONS[name].takes
            operands = [
                inner if kind == NUMBER else inner.map(lambda node: Apply("truth", (node,))) for kind in takes
            ]
            made = st.tuples(*operands).map(lambda given: Apply(name, given))
            return (
                made if FUNCTIONS[name].gives == NUMBER else made.map(lambda node: Apply("number", (node,)))
            )

        return st.sampled_from([name for name in FUNCTIONS if name not in ("number", "truth")]).flatmap(build)

    return st.recursive(leaves, apply, max_leaves=8)


expressions = st.tuples(nodes(0), nodes(1), nodes(2)).map(
    lambda given: Expression(("x", "y", "z"), (("t0", given[0]), ("t1", given[1])), given[2])
)


@settings(max_examples=300, deadline=None, database=None)
@given(expressions)
def test_a_program_equals_its_expression(expression: Expression) -> None:
    program = compile_postfix(expression)
    if program is None:
        return
    x, y = np.meshgrid(SPECIAL, SPECIAL)
    z = x[::-1]
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(evaluate_postfix(program, x, y, z), evaluate(expression, x, y, z))


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=80))
def test_bytes_that_are_no_program_are_refused_by_the_truth(data: bytes) -> None:
    try:
        result = run_program(data, SPECIAL)
    except gpuos.ArgumentError:
        return
    assert result.shape == SPECIAL.shape


# --- every function, on a machine ---

TOLERANCE = 8 * 2.0**-24


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_equals_its_truth(runtime: gpuos.Runtime, name: str) -> None:
    function = FUNCTIONS[name]
    random = np.random.default_rng(1)
    many = (random.standard_normal(300) * 10.0 ** random.integers(-6, 7, 300)).astype(F32)
    x, y, z = (each.ravel() for each in np.meshgrid(SPECIAL, SPECIAL, SPECIAL[::3]))
    x, y, z = (np.concatenate([each, random.permutation(many)]) for each in (x, y, z))
    operands = [x, y, z][: len(function.takes)]
    sent = [
        (each > 0).astype(F32) if kind != NUMBER else each
        for each, kind in zip(operands, function.takes, strict=True)
    ]
    code = [PUSH_X + place for place in range(len(sent))] + [function.opcode]
    program = np.frombuffer(pack_program(code, []), np.uint8).copy()
    with np.errstate(all="ignore"):
        expected = run_program(program.tobytes(), *sent)
        # Sums that cancel: relative to what went in.
        slack = np.abs(sent[0] * sent[1]) * 2.0**-24 if name == "fma" else 0.0
    slack = np.nan_to_num(slack, posinf=0.0) + 2.0**-126
    result = interpret(runtime, program, *sent)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(result[~finite], expected[~finite])
    off = np.abs(result[finite].astype(np.float64) - expected[finite])
    room = TOLERANCE * np.abs(expected[finite]) + np.broadcast_to(slack, expected.shape)[finite]
    if name == "pow":
        room = room * 4
    worst = np.argmax(off - room)
    assert (off <= room).all(), (
        name,
        [each[finite][worst] for each in sent],
        result[finite][worst],
        expected[finite][worst],
    )


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles_of_any_size(runtime: gpuos.Runtime, name: str) -> None:
    random = np.random.default_rng(2)
    x = random.integers(0, 0x7F800000, 20_000).astype(np.uint32).view(F32)
    near = (np.arange(1, 4000) * (np.pi / 2)).astype(F32)
    known_hard = np.array(
        [65535.9, 65536, 65536.5, 105615, 16367173.0 * 2.0**72, 3.4028235e38, 2.0**-12], F32
    )
    x = np.concatenate([x, near, known_hard])
    x = np.concatenate([x, -x])
    mp = getattr(np, name)(x.astype(np.longdouble)) if np.finfo(np.longdouble).nmant >= 63 else None
    expected = getattr(np, name)(x.astype(np.float64)) if mp is None else mp.astype(np.float64)
    result = interpret(runtime, program_of(f"{name}(x)"), x).astype(np.float64)
    assert (np.abs(result - expected) <= 4 * 2.0**-24 * np.abs(expected) + 2.0**-126).all()


# --- layouts, dtypes, limits ---


@pytest.mark.parametrize("dtype", [F32, np.float16, ml_dtypes.bfloat16])
def test_dtypes_layouts_numbers_and_tiles(runtime: gpuos.Runtime, dtype: Any) -> None:
    random = np.random.default_rng(3)
    program = program_of("where(x > y, x, y) * z + 0.5")
    a = random.standard_normal((40, 1, 60)).astype(dtype)
    b = random.standard_normal((25, 60)).astype(dtype)[::-1, ::1]
    testing.check(runtime, "interpret", program, a, b, 2.0)
    testing.check(runtime, "interpret", program, a.T, random.standard_normal(40).astype(dtype), a.T[:1])
    testing.check(runtime, "interpret", program, *random.standard_normal((3, 100_003)).astype(dtype))
    testing.check(runtime, "interpret", program, np.zeros((0, 3), dtype), np.zeros(3, dtype), 1)
    testing.check(runtime, "interpret", program, np.array(2, dtype), np.array(3, dtype), np.array(4, dtype))


def test_mixed_dtypes_give_f32_and_the_output_may_be_an_input(runtime: gpuos.Runtime) -> None:
    a, b = np.ones(9, np.float16), np.full(9, 3, ml_dtypes.bfloat16)
    result = interpret(runtime, program_of("x + y"), a, b)
    assert result.dtype == F32 and (result == 4).all()
    x = testing.to_device(runtime, np.arange(9, dtype=F32))
    runtime.submit("interpret", [testing.to_device(runtime, program_of("x * x")), x], out=x).result()
    np.testing.assert_array_equal(testing.to_host(x), np.arange(9) ** 2)


def test_a_program_may_begin_at_any_byte(runtime: gpuos.Runtime) -> None:
    program = program_of("x * 3 + 1")
    memory = testing.to_device(runtime, np.concatenate([np.zeros(3, np.uint8), program]))
    x = testing.to_device(runtime, np.arange(5, dtype=F32))
    result = runtime.submit("interpret", [memory[3:], x]).result()
    np.testing.assert_array_equal(testing.to_host(result), np.arange(5) * 3 + 1)


def test_the_longest_program_runs(runtime: gpuos.Runtime) -> None:
    code = [PUSH_X]
    constants = [float(i) for i in range(64)]
    add = FUNCTIONS["add"].opcode
    for i in range(64):
        code += [CONSTANT + i, add]
    code += [FUNCTIONS["neg"].opcode] * (MAX_CODE - len(code))
    program = np.frombuffer(pack_program(code, constants), np.uint8).copy()
    testing.check(runtime, "interpret", program, np.arange(1000, dtype=F32))


BROKEN = {
    "no opcode": pack_program([PUSH_X, 30], []),
    "no opcode among two": pack_program([PUSH_X, PUSH_X, 47], []),
    "no opcode among three": pack_program([PUSH_X, PUSH_X, PUSH_X, 60], []),
    "no push": pack_program([70], []),
    "no such constant": pack_program([CONSTANT + 3], [1.0]),
    "more words than bytes": (99).to_bytes(4, "little") + bytes(12),
    "more constants than bytes": (1).to_bytes(4, "little") + (5).to_bytes(4, "little") + bytes(8),
    "far more words": b"\xff" * 16,
    "constants that wrap": (1).to_bytes(4, "little") + b"\xff\xff\xff\x7f" + bytes(8),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_program_is_a_status(runtime: gpuos.Runtime, broken: str) -> None:
    program = np.frombuffer(BROKEN[broken], np.uint8).copy()
    with pytest.raises(gpuos.TaskError) as caught:
        interpret(runtime, program, np.ones(500, F32))
    assert caught.value.status == Status.BAD_DESCRIPTOR
    assert (interpret(runtime, program_of("x + 1"), np.ones(500, F32)) == 2).all()


def test_an_underflowing_stack_holds_zeros(runtime: gpuos.Runtime) -> None:
    code = [FUNCTIONS["add"].opcode] * 20 + [PUSH_LOCAL, FUNCTIONS["where"].opcode, STORE_LOCAL]
    program = np.frombuffer(pack_program(code, []), np.uint8).copy()
    assert (interpret(runtime, program, np.ones(5, F32)) == 0).all()


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.floats(width=32), max_size=3))
def test_any_bytes_end_with_a_status(runtime: gpuos.Runtime, code: list[int], constants: list[float]) -> None:
    program = np.frombuffer(pack_program(code, constants), np.uint8).copy()
    try:
        interpret(runtime, program, np.ones(70, F32), SPECIAL[0])
    except gpuos.TaskError as error:
        assert error.status == Status.BAD_DESCRIPTOR


REFUSED: list[tuple[Any, str]] = [
    ((np.zeros(16, np.int8), np.ones(3, F32)), r"inputs\[0\] has dtype int8"),
    ((np.zeros(12, np.uint8), np.ones(3, F32)), "multiple of 8"),
    ((np.zeros(8 * 100, np.uint8), np.ones(3, F32)), "multiple of 8"),
    ((np.zeros((2, 8), np.uint8), np.ones(3, F32)), "its bytes as they are"),
    ((np.zeros(32, np.uint8)[::2], np.ones(3, F32)), "its bytes as they are"),
    ((np.zeros(16, np.uint8), np.ones(3, np.int32)), r"inputs\[1\] has dtype int32"),
    ((np.zeros(16, np.uint8), 1.0), "at least one array"),
    ((np.zeros(16, np.uint8), np.ones(3, F32), None, np.ones(3, F32)), r"inputs\[2\] is None"),
    ((np.zeros(16, np.uint8), np.ones(3, F32), np.ones(4, F32)), "broadcast"),
]


@pytest.mark.parametrize(("inputs", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_refusals_come_before_enqueueing(runtime: gpuos.Runtime, inputs: Any, why: str) -> None:
    submitted = runtime.stats().submitted
    with pytest.raises(gpuos.ArgumentError, match=why):
        interpret(runtime, *inputs)
    assert runtime.stats().submitted == submitted


def test_it_compiles_without_local_memory() -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptx = cuda_compile.compile_kernel(TABLE["interpret"].kernels[0], cuda_compile.OLDEST)
    assert not re.search(r"\b(ld|st)\.local|\.local ", ptx)
    assert "max.f32" not in ptx and "min.f32" not in ptx
    assert not re.search(r"\bcall\b", ptx)  # so that it saves no registers of its caller


@pytest.mark.parametrize("target", [(8, 0), (9, 0), (10, 0)], ids=lambda target: f"sm_{target[0]}{target[1]}")
def test_it_saves_no_registers_of_its_caller(target: tuple[int, int]) -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptxas = cuda_compile.find_ptxas()
    if ptxas is None:
        pytest.skip("no ptxas here: what the GPU would run stays unproved")
    ptx = cuda_compile.compile_kernel(TABLE["interpret"].kernels[0], cuda_compile.OLDEST)
    _, log = cuda_compile.assemble(ptx, target, 256, ptxas)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert frames and set(frames) == {("0", "0", "0")}, log
