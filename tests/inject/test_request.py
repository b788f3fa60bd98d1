"""Requests: equal ones are equal text, and their text is read back, and no other."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from gpuos_numba.errors import ArgumentError, ExpressionError
from gpuos_numba.inject import request
from gpuos_numba.inject.expression import describe, evaluate
from gpuos_numba.inject.request import Request

SOFTMAX = {
    "combine": "max(a, b)",
    "identity": "-inf",
    "map2": "exp(x - r)",
    "value": "exp(x - r) / s",
}


def examples() -> list[Request]:
    return [
        request.elementwise("swish", "x / (1 + exp(-x))"),
        request.elementwise("mix", "where(x > y, z, nan)"),
        request.elementwise(None, "def twice(a, b):\n    t = a * b\n    return t + t"),
        request.chain("chained", [("mul", "x", "y"), ("relu", 0), ("add", 1, 0.1)]),
        request.reduce("mean_square", map="x * x", finalise="a / n"),
        request.rowwise("centre", value="x - r / n"),
        request.rowwise("my_softmax", **SOFTMAX),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("made", examples(), ids=lambda made: made.name)
def test_the_canonical_text_is_read_back(made: Request) -> None:
    text = made.to_json()
    assert Request.from_json(text) == made
    assert text.isascii() and " " not in text
    assert hash(made) == hash(Request.from_json(text))


def test_what_the_author_called_things_does_not_matter() -> None:
    one = request.elementwise("f", "a * b", arguments=["a", "b"])
    other = request.elementwise("f", "( y*x )", arguments=["y", "x"])
    assert one == other and one.to_json() == other.to_json() and one.texts != other.texts


def test_arity_is_that_of_the_names_in_use() -> None:
    for text, arity in [("x", 1), ("x + y", 2), ("z", 3), ("y", 2), ("1", 1)]:
        made = request.elementwise("f", text)
        assert made.arity == arity and len(made["value"].arguments) == arity
    assert request.elementwise("f", "a", arguments=["a", "b", "c"]).template == "ternary"
    assert request.elementwise("g", "def f(x): return x").name == "g"


def test_a_chain_is_its_operators_one_after_the_other() -> None:
    made = request.chain("c", [("mul", "x", "y"), ("copy", 0), ("max", 1, 0.0), ("exp", 2)])
    assert describe(made["value"]) == "t0 = (x * y); t1 = t0; t2 = larger(t1, 0.0); exp(t2)"
    x = np.array([-1.0, 0.5], np.float32)
    np.testing.assert_allclose(evaluate(made["value"], x, x), np.exp(x * x), rtol=1e-6)


BAD_CHAINS = [
    ([], "give one"),
    ([("add", "x", 0)], "earlier step"),
    ([("add", "x", "w")], "x, y, z"),
    ([("add", "x", True)], "x, y, z"),
    ([("add", "x")], "takes 2"),
    ([("softmax", "x")], "cannot be fused"),
    ([("less", "x", "y")], "cannot be fused"),
    ([("__import__", "x")], "cannot be fused"),
    ([(["add"], "x", "y")], "cannot be fused"),
]


@pytest.mark.parametrize(("steps", "why"), BAD_CHAINS)
def test_a_chain_of_anything_else_is_refused(steps: Any, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        request.chain("c", steps)


def test_a_combination_that_depends_on_the_order_is_refused() -> None:
    for combine, identity, why in [
        ("a - b", "0", "the order of a row"),
        ("a + 2 * b", "0", "the order of a row"),
        ("(a + b) / 2", "0", "associative"),
        ("a + b", "1", r"combine\(1.0, 1.0\) is not 1.0"),
        ("max(a, b)", "0", "identity"),
    ]:
        with pytest.raises(ArgumentError, match=why):
            request.reduce("r", combine=combine, identity=identity)
    for combine, identity in [("a * b", "1"), ("min(a, b)", "inf"), ("log(exp(a) + exp(b))", "-inf")]:
        request.reduce("r", combine=combine, identity=identity)


def test_an_error_says_which_expression() -> None:
    with pytest.raises(ExpressionError, match=r"finalise: the name x at column 5") as caught:
        request.reduce("r", finalise="a + x")
    assert caught.value.column == 5
    with pytest.raises(ExpressionError, match="identity: the name x"):
        request.reduce("r", identity="x")
    with pytest.raises(ArgumentError, match="keyword"):
        request.elementwise("class", "x")
    with pytest.raises(ArgumentError, match="dtypes"):
        request.elementwise("f", "x", dtypes=["int32"])
    with pytest.raises(ArgumentError, match="dtypes"):
        request.elementwise("f", "x", dtypes=[])


def test_a_request_holds_what_its_template_takes() -> None:
    made = request.elementwise("f", "x")
    with pytest.raises(ArgumentError, match="choose from"):
        dataclasses.replace(made, template="../../etc")
    with pytest.raises(ArgumentError, match="value takes"):
        dataclasses.replace(made, template="binary")
    with pytest.raises(ArgumentError, match="needs map"):
        dataclasses.replace(made, template="reduce")


def mutated(made: Request, change: Any) -> str:
    plain = json.loads(made.to_json())
    change(plain)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


CHANGES = {
    "schema": lambda p: p.update(schema=2),
    "name": lambda p: p.update(name="__x__"),
    "newline in name": lambda p: p.update(name="a\nb"),
    "template": lambda p: p.update(template="shell"),
    "dtype": lambda p: p.update(dtypes=["int32"]),
    "unknown function": lambda p: p["expressions"]["value"].update(result=["system", "x"]),
    "arity": lambda p: p["expressions"]["value"].update(result=["exp", "x", "x"]),
    "unknown value": lambda p: p["expressions"]["value"].update(result="os"),
    "source as value": lambda p: p["expressions"]["value"].update(result="x)\nimport os"),
    "truth for number": lambda p: p["expressions"]["value"].update(result=["less", "x", "x"]),
    "number for truth": lambda p: p["expressions"]["value"].update(result=["where", "x", "x", "x"]),
    "constant beyond f32": lambda p: p["expressions"]["value"].update(result={"constant": "0.1"}),
    "constant in another form": lambda p: p["expressions"]["value"].update(result={"constant": "1"}),
    "no constant": lambda p: p["expressions"]["value"].update(result={"constant": "__import__('os')"}),
    "step name": lambda p: p["expressions"]["value"].update(steps=[["x", "x"]]),
    "later step": lambda p: p["expressions"]["value"].update(steps=[["t0", "t1"], ["t1", "x"]]),
    "more": lambda p: p.update(more=1),
    "less": lambda p: p.pop("fused"),
    "depth": lambda p: p["expressions"]["value"].update(result=deep(500)),
}


def deep(levels: int) -> Any:
    node: Any = "x"
    for _ in range(levels):
        node = ["neg", node]
    return node


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_text_is_no_request(change: str) -> None:
    with pytest.raises(ArgumentError):
        Request.from_json(mutated(request.elementwise("f", "x"), CHANGES[change]))


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "3", '{"schema":1}', "[" * 100_000])
def test_other_text_is_no_request(text: str) -> None:
    with pytest.raises(ArgumentError):
        Request.from_json(text)


def test_minus_zero_is_not_zero() -> None:
    assert request.elementwise("f", "x * -0.0") != request.elementwise("f", "x * 0.0")
    assert request.elementwise("f", "x * nan") == request.elementwise("f", "x * nan")
