"""A program is its calls one after another, whatever arrays and shapes come, and however it is cut into
runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuos_numba import Runtime, Ticket, testing
from gpuos_numba.device.operators import TABLE
from gpuos_numba.program import Program

F32 = np.float32
TIMEOUT_S = 30.0
UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.fixture(scope="module")
def rt(machine: str) -> Iterator[Runtime]:
    """More workers than one, so that runs of a program meet."""
    with Runtime(machine, workers=3 if machine == "cpu" else None) as runtime:
        yield runtime


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(F32)


def result(ticket: Ticket) -> Any:
    return ticket.result(TIMEOUT_S)


# --- random programs ---


class RandomProgram:
    """Instructions drawn once, to be carried out on recorded arrays or, one after another, on real ones.

    Over matrices of shape (n, m): whole ones, single rows and pairs of neighbouring rows are operands and
    outputs; results are drawn again like arguments.
    """

    ROWS = 4

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], matrices: int, length: int) -> None:
        self.matrices = matrices
        made = {"matrix": matrices, "row": 0, "pair": 0}
        self.steps: list[tuple[str, list[Any], Any, str]] = []

        def operand(kind: str) -> tuple[str, int, str, int]:
            """(kind of the array, its number, how it is viewed, row)."""
            number = draw(st.integers(0, made["matrix"] + made[kind] * (kind != "matrix") - 1))
            if kind == "matrix":
                return "matrix", number, "whole", 0
            if number >= made["matrix"]:
                return kind, number - made["matrix"], "whole", 0
            last = self.ROWS - 1 if kind == "row" else self.ROWS - 2
            return "matrix", number, kind, draw(st.integers(-1 if kind == "row" else 0, last))

        for _ in range(length):
            kind = draw(st.sampled_from(["matrix", "row", "row", "pair"]))
            name = draw(st.sampled_from(["add", "sub", "mul", "maximum", "relu", "neg", "softmax", "scale"]))
            inputs: list[Any] = [operand(kind)]
            if name in ("add", "sub", "mul", "maximum"):
                inputs.append(operand(draw(st.sampled_from([kind, "row"]))))
                if draw(st.booleans()):
                    inputs.reverse()
            out = operand(kind) if draw(st.booleans()) else None
            if out is not None and any(out[:2] == each[:2] and out != each for each in inputs):
                out = None  # it could overlap an input in part, which is refused
            if out is not None and name == "softmax" and out in inputs:
                out = None
            self.steps.append((name, inputs, out, kind))
            if out is None:
                made[kind] += 1

    def __call__(self, rt: Runtime, *arguments: Any) -> tuple[Any, ...]:
        *matrices, number = arguments
        made: dict[str, list[Any]] = {"matrix": list(matrices), "row": [], "pair": []}

        def view(operand: tuple[str, int, str, int]) -> Any:
            kind, number, how, row = operand
            array = made[kind][number]
            return array if how == "whole" else array[row] if how == "row" else array[row : row + 2]

        results = []
        for name, inputs, out, kind in self.steps:
            arrays = [view(each) for each in inputs]
            target = None if out is None else view(out)
            if name == "scale":
                ticket = rt.submit("mul", [*arrays, number], target)
            elif name == "softmax":
                ticket = rt.submit("softmax", arrays, target, dim=-1)
            else:
                ticket = rt.submit(name, arrays, target)
            array = ticket.result()
            if out is None:
                made[kind].append(array)
                results.append(array)
        return tuple(results)


def check_random(rt: Runtime, arrays: Any, data: st.DataObject) -> None:
    program = RandomProgram(data.draw, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 25)))
    recorded: Program | None = None
    shapes = data.draw(st.lists(st.sampled_from([(4, 8), (5, 33), (7, 1)]), min_size=1, max_size=3))
    for turn, shape in enumerate([*shapes, shapes[0]]):
        host = [normal(*shape, seed=10 * turn + i) for i in range(program.matrices)]
        ours, theirs = [[arrays.to_device(each) for each in host] for _ in range(2)]
        number = 0.5 + turn
        if recorded is None:
            recorded = rt.program(lambda *args: program(rt, *args), (*ours, number))
        got = result(recorded(*ours, number))
        want = program(rt, *theirs, number)
        rt.synchronize(TIMEOUT_S)
        for a, b in zip([*ours, *(got or ())], [*theirs, *want], strict=True):
            np.testing.assert_array_equal(arrays.to_host(a), arrays.to_host(b))


@settings(max_examples=15, **UNHURRIED)
@given(st.data())
def test_a_random_program_equals_its_calls_in_order(rt: Runtime, arrays: Any, data: st.DataObject) -> None:
    check_random(rt, arrays, data)


@pytest.mark.slow
@settings(max_examples=3000, **UNHURRIED)
@given(st.data())
def test_many_random_programs_equal_their_calls_in_order(
    rt: Runtime, arrays: Any, data: st.DataObject
) -> None:
    check_random(rt, arrays, data)


# --- every operator ---

FAMILIES = ["add", "where", "gelu", "cast", "copy", "sum", "max", "softmax", "add_rms_norm", "rope",
"masked_fill", "concat", "gather", "scatter_add", "kv_append", "kv_quantize", "matvec", "matmul", "sdpa",
            "paged_attention", "fill", "nop"]  # fmt: skip


def check_operator(rt: Runtime, arrays: Any, name: str, seed: int) -> None:
    """A program of one call, and of another call on its result's memory, against the calls themselves."""
    operator = TABLE[name]
    if operator.example is None:
        pytest.skip(f"{name} has no example")
    inputs, parameters = operator.example(testing.RandomDraw(seed))
    given = parameters.pop("out", None)
    # Views of arguments are arguments of their own here: what they are made of does not matter.
    outs = [given] if given is not None and not isinstance(given, tuple) else list(given or ())
    places = [i for i, each in enumerate(inputs) if isinstance(each, np.ndarray)]

    def call(*args: Any) -> Any:
        read = list(inputs)
        for place, each in zip(places, args, strict=False):
            read[place] = each
        written = args[len(places) :]
        out = None if given is None else written[0] if operator.outputs == 1 else tuple(written)
        return rt.submit(name, read, out, **parameters).result()

    def fresh() -> list[Any]:
        return [testing.to_device(rt, each.copy()) for each in [*(inputs[i] for i in places), *outs]]

    if not places and given is None and operator.outputs:
        pytest.skip(f"{name} has nothing to take a shape from")
    program = rt.program(lambda *args: _flat(call(*args)), fresh())
    for _ in range(2):
        ours, theirs = fresh(), fresh()
        got, want = result(program(*ours)), _flat(call(*theirs))
        rt.synchronize(TIMEOUT_S)
        for a, b in zip([*ours, *(got or ())], [*theirs, *want], strict=True):
            np.testing.assert_array_equal(testing.to_host(a), testing.to_host(b))


def _flat(made: Any) -> tuple[Any, ...]:
    return () if made is None else tuple(made) if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_operator_in_a_program_is_that_operator(rt: Runtime, arrays: Any, name: str) -> None:
    for seed in range(3):
        check_operator(rt, arrays, name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TABLE))
def test_every_operator_in_a_program_is_that_operator(rt: Runtime, arrays: Any, name: str) -> None:
    for seed in range(10):
        check_operator(rt, arrays, name, seed)
