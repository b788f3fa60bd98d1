"""A checked expression: what `check` makes of text, and all that any later stage sees of it.

Three kinds of node over `device.functions.FUNCTIONS`, immutable and typed: an operand that must be a truth is
one. Later stages print and evaluate these; the user's characters are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..device.functions import FUNCTIONS, NUMBER

Array = Any


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A number that f32 holds exactly, NaN and infinities too. Equal where it prints the same."""

    value: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True, slots=True)
class Value:
    """An argument or the result of an earlier step, by its canonical name."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of `FUNCTIONS` over as many operands as it takes, each of the kind it takes."""

    function: str
    operands: tuple[Node, ...]


Node = Constant | Value | Apply

ARGUMENTS: Final = ("x", "y", "z", "u", "v")
"""Canonical names of arguments, by place."""


def kind(node: Node) -> str:
    """NUMBER or TRUTH."""
    return FUNCTIONS[node.function].gives if isinstance(node, Apply) else NUMBER


@dataclass(frozen=True, slots=True)
class Expression:
    """What one element becomes.

    Attributes:
        arguments: canonical names of its arguments.
        steps: (canonical name, number) in order; each may use what came before.
        result: a number.
    """

    arguments: tuple[str, ...]
    steps: tuple[tuple[str, Node], ...]
    result: Node

    def nodes(self) -> Iterator[Node]:
        """Every node, operands before what uses them."""
        for _, node in self.steps:
            yield from walk(node)
        yield from walk(self.result)


def walk(node: Node) -> Iterator[Node]:
    """A node's operands, then itself."""
    if isinstance(node, Apply):
        for operand in node.operands:
            yield from walk(operand)
    yield node


def constants(expressions: Sequence[Expression]) -> dict[str, str]:
    """Names for the constants of some expressions: `repr` of each -> "K0", "K1", ... in order of use."""
    named: dict[str, str] = {}
    for expression in expressions:
        for node in expression.nodes():
            if isinstance(node, Constant):
                named.setdefault(repr(node.value), f"K{len(named)}")
    return named


def show(node: Node, named: Mapping[str, str] | None = None) -> str:
    """A node as Python text, made of `FUNCTIONS`' texts alone; constants by name where names are given."""
    if isinstance(node, Constant):
        text = repr(node.value)
        return named[text] if named is not None else text
    if isinstance(node, Value):
        return node.name
    return FUNCTIONS[node.function].text.format(*(show(operand, named) for operand in node.operands))


def show_lanes(expression: Expression, named: Mapping[str, str]) -> list[tuple[str, str]]:
    """The expression on four lanes at once: (name, text) of each step, the last the result, "value".

    Arguments are tuples. A quotient is a step of its own, `divide4` of two tuples; all else is written four
    times. Empty where there is no quotient: then nothing is better than four times the whole.
    """
    steps: list[tuple[str, str]] = []
    quotients = 0

    def lane(node: Node, number: int) -> Node:
        if isinstance(node, Apply):
            return Apply(node.function, tuple(lane(each, number) for each in node.operands))
        return Value(f"{node.name}[{number}]") if isinstance(node, Value) else node

    def four(node: Node) -> str:
        return f"({', '.join(show(lane(node, number), named) for number in range(4))})"

    def lift(node: Node) -> Node:
        """The node, where the quotients in it are names of steps."""
        nonlocal quotients
        if not isinstance(node, Apply):
            return node
        node = Apply(node.function, tuple(lift(each) for each in node.operands))
        if node.function != "div":
            return node
        name, (dividend, divisor) = f"d{quotients}", node.operands
        quotients += 1
        steps.append((name, f"divide4({four(dividend)}, {four(divisor)})"))
        return Value(name)

    for name, node in (*expression.steps, ("value", expression.result)):
        lifted = lift(node)
        steps.append((name, four(lifted)))
    return steps if quotients else []


def describe(expression: Expression) -> str:
    """The whole in one line, for people: `t0 = (x + 1.0); (t0 * t0)`."""
    return "; ".join(
        [f"{name} = {show(node)}" for name, node in expression.steps] + [show(expression.result)]
    )


def evaluate(expression: Expression, *arguments: Array) -> Array:
    """The truth in NumPy: f32 arrays (or numbers) in, an f32 array out."""
    values = {
        name: np.asarray(each, np.float32) for name, each in zip(expression.arguments, arguments, strict=True)
    }

    def run(node: Node) -> Array:
        if isinstance(node, Constant):
            return np.float32(node.value)
        if isinstance(node, Value):
            return values[node.name]
        return FUNCTIONS[node.function].truth(*(run(operand) for operand in node.operands))

    for name, node in expression.steps:
        values[name] = run(node)
    shape = np.broadcast_shapes(*(np.shape(each) for each in values.values()))
    return np.broadcast_to(np.asarray(run(expression.result), np.float32), shape)
