"""What is to be injected: checked expressions in the places of a template. Canonical, hashable, sendable.

    elementwise     value(x), value(x, y), value(x, y, z), from text or from a Python function
    chain           the same, from operators that exist already
    reduce          finalise(combine of map(x, n) over a row, n)
    rowwise         r = combine of map(x, n) over a row, then value(x, r, n) for each element
    rowwise2        r as before, s = combine2 of map2(x, r, n), then value(x, r, s, n): softmax, layer norm

`n` is the row's length. The canonical JSON of equal requests is equal, whatever their authors called things.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ..descriptor import DTYPE_NAMES
from ..device.functions import FUNCTIONS, NUMBER
from ..device.operators.table import FLOATS
from ..errors import ArgumentError, ExpressionError
from .check import MAX_DEPTH, check, check_function, check_name
from .expression import ARGUMENTS, Apply, Constant, Expression, Node, Value, evaluate, kind

SCHEMA: Final = 1
"""Version of the canonical form, and of everything that is derived from it."""

_MAP: Final = ("x", "n")
_COMBINE: Final = ("a", "b")
ROLES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = MappingProxyType(
    {
        "unary": {"value": ARGUMENTS[:1]},
        "binary": {"value": ARGUMENTS[:2]},
        "ternary": {"value": ARGUMENTS[:3]},
        "reduce": {"map": _MAP, "combine": _COMBINE, "identity": (), "finalise": ("a", "n")},
        "rowwise": {"map": _MAP, "combine": _COMBINE, "identity": (), "value": ("x", "r", "n")},
        "rowwise2": {
            "map": _MAP,
            "combine": _COMBINE,
            "identity": (),
            "map2": ("x", "r", "n"),
            "combine2": _COMBINE,
            "identity2": (),
            "value": ("x", "r", "s", "n"),
        },
    }
)
"""The expressions of each template, and what each may use."""

ELEMENTWISE: Final = ("unary", "binary", "ternary")
FLOAT_NAMES: Final = tuple(DTYPE_NAMES[each] for each in FLOATS)

Text = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request.

    Attributes:
        name: the operator's.
        template: one of `ROLES`.
        expressions: by role, in the order of `ROLES`.
        dtypes: names of the element types that it takes.
        fused: whether it is a chain of operators that exist already.
        texts: what the user wrote, by role, for messages alone: no part of equality, JSON or key.
    """

    name: str
    template: str
    expressions: tuple[tuple[str, Expression], ...]
    dtypes: tuple[str, ...] = FLOAT_NAMES
    fused: bool = False
    texts: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.template not in ROLES:
            raise ArgumentError(f"template={self.template!r}: choose from {', '.join(ROLES)}")
        wanted = ROLES[self.template]
        if [role for role, _ in self.expressions] != list(wanted):
            raise ArgumentError(f"{self.name}: the template {self.template} needs {', '.join(wanted)}")
        for role, expression in self.expressions:
            if expression.arguments != wanted[role]:
                raise ArgumentError(f"{self.name}: {role} takes {wanted[role]}, not {expression.arguments}")
        if not self.dtypes or any(dtype not in FLOAT_NAMES for dtype in self.dtypes):
            raise ArgumentError(f"dtypes={self.dtypes!r}: choose from {', '.join(FLOAT_NAMES)}")

    @property
    def arity(self) -> int:
        """How many arrays the operator takes."""
        return ELEMENTWISE.index(self.template) + 1 if self.template in ELEMENTWISE else 1

    def __getitem__(self, role: str) -> Expression:
        return dict(self.expressions)[role]

    def to_json(self) -> str:
        """The canonical form: ASCII, sorted, without spaces."""
        plain = {
            "schema": SCHEMA,
            "name": self.name,
            "template": self.template,
            "fused": self.fused,
            "dtypes": list(self.dtypes),
            "expressions": {
                role: {
                    "steps": [[name, _plain(node)] for name, node in each.steps],
                    "result": _plain(each.result),
                }
                for role, each in self.expressions
            },
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Request:
        """The request of a canonical form, checked again: it may come from another process.

        Raises:
            ArgumentError: the text is not one.
        """
        try:
            plain = json.loads(text)
            if plain["schema"] != SCHEMA:
                raise ArgumentError(f"a request of schema {plain['schema']!r}: this library reads {SCHEMA}")
            wanted = ROLES[plain["template"]]
            expressions = tuple(
                (role, _read_expression(plain["expressions"][role], arguments))
                for role, arguments in wanted.items()
            )
            request = Request(
                plain["name"], plain["template"], expressions, tuple(plain["dtypes"]), plain["fused"] is True
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"not a request ({type(error).__name__}): make it anew") from None
        if request.to_json() != text:
            raise ArgumentError("not the canonical form of a request: make it anew")
        return request


def _plain(node: Node) -> Any:
    if isinstance(node, Constant):
        return {"constant": repr(node.value)}  # nan and inf have no JSON
    if isinstance(node, Value):
        return node.name
    return [node.function, *(_plain(operand) for operand in node.operands)]


def _read_expression(plain: Any, arguments: tuple[str, ...]) -> Expression:
    known = set(arguments)
    steps = []
    for place, (name, node) in enumerate(plain["steps"]):
        if name != f"t{place}":
            raise ValueError
        steps.append((name, _read(node, known, NUMBER, 0)))
        known.add(name)
    return Expression(arguments, tuple(steps), _read(plain["result"], known, NUMBER, 0))


def _read(plain: Any, known: set[str], wanted: str, depth: int) -> Node:
    if depth > 4 * MAX_DEPTH:
        raise ValueError
    node: Node
    if isinstance(plain, str):
        if plain not in known:
            raise ValueError
        node = Value(plain)
    elif isinstance(plain, dict):
        node = Constant(float(plain["constant"]))
        if not math.isnan(node.value) and float(np.float32(node.value)) != node.value:
            raise ValueError
    else:
        name, *operands = plain
        takes = FUNCTIONS[name].takes
        node = Apply(
            name,
            tuple(
                _read(each, known, wanted_of, depth + 1)
                for each, wanted_of in zip(operands, takes, strict=True)
            ),
        )
    if kind(node) != wanted:
        raise ValueError
    return node


# --- making requests ---


def elementwise(
    name: str | None,
    expression: Text,
    arguments: Sequence[str] | None = None,
    dtypes: Sequence[str] = FLOAT_NAMES,
) -> Request:
    """An operator on each element of one to three arrays.

    Args:
        name: of the operator; None takes the function's.
        expression: text over `arguments`, or a Python function, or the source of one.
        arguments: default those of x, y, z that occur, with all before them.
        dtypes: element types that it takes.

    Raises:
        ExpressionError, ArgumentError: see `check`.
    """
    if name is not None:
        check_name(name)
    if callable(expression) or (isinstance(expression, str) and _is_source(expression)):
        found, checked = check_function(expression)
        name = name or found
        text = found
    else:
        text = expression
        checked = check(expression, arguments or ARGUMENTS[:3])
        if arguments is None:
            used = {node.name for node in checked.nodes() if isinstance(node, Value)}
            arity = max((ARGUMENTS.index(each) + 1 for each in used), default=1)
            checked = Expression(ARGUMENTS[:arity], (), checked.result)
    arity = len(checked.arguments)
    if not 1 <= arity <= len(ELEMENTWISE):
        raise ArgumentError(f"{name}: {arity} arguments: take one to {len(ELEMENTWISE)}")
    return Request(
        check_name(name),
        ELEMENTWISE[arity - 1],
        (("value", checked),),
        tuple(dtypes),
        texts=(("value", text),),
    )


def _is_source(text: str) -> bool:
    return text.lstrip().startswith(("def ", "@", "async "))


def chain(name: str, steps: Sequence[Sequence[Any]], dtypes: Sequence[str] = FLOAT_NAMES) -> Request:
    """A fused chain of existing operators: `chain("f", [("mul", "x", "y"), ("relu", 0), ("add", 1, "z")])`.

    Args:
        name: of the operator.
        steps: (operator, operands...) in order; an operand is "x", "y" or "z", a float, or the number of an
            earlier step as an int. The last step is the result.
        dtypes: element types that it takes.

    Raises:
        ArgumentError: a step's operator has no formula of one element, or an operand is none of these.
    """
    check_name(name)
    made: list[tuple[str, Node]] = []
    arity = 1
    if not 1 <= len(steps) <= MAX_DEPTH:
        raise ArgumentError(f"{name}: {len(steps)} steps: give one to {MAX_DEPTH}")
    for place, (operator, *operands) in enumerate(steps):
        nodes: list[Node] = []
        for operand in operands:
            if type(operand) is int and 0 <= operand < place:
                nodes.append(Value(f"t{operand}"))
            elif type(operand) is float:
                nodes.append(Constant(float(np.float32(operand))))
            elif operand in ARGUMENTS[: len(ELEMENTWISE)]:
                arity = max(arity, ARGUMENTS.index(operand) + 1)
                nodes.append(Value(operand))
            else:
                raise ArgumentError(
                    f"{name}: step {place}: operand {operand!r}: give x, y, z, a float or an earlier step"
                )
        function = FUNCTIONS.get(operator) if isinstance(operator, str) else None
        if operator == "copy" and len(nodes) == 1:
            made.append((f"t{place}", nodes[0]))
        elif function is None or function.gives != NUMBER or set(function.takes) != {NUMBER}:
            known = [each.name for each in FUNCTIONS.values() if {each.gives, *each.takes} == {NUMBER}]
            raise ArgumentError(f"{name}: step {place}: {operator!r} cannot be fused; {', '.join(known)} can")
        elif len(nodes) != len(function.takes):
            raise ArgumentError(f"{name}: step {place}: {operator} takes {len(function.takes)} operands")
        else:
            made.append((f"t{place}", Apply(operator, tuple(nodes))))
    checked = Expression(ARGUMENTS[:arity], tuple(made[:-1]), made[-1][1])
    return Request(
        name,
        ELEMENTWISE[arity - 1],
        (("value", checked),),
        tuple(dtypes),
        fused=True,
        texts=(("value", repr(list(steps))),),
    )


def reduce(
    name: str,
    *,
    map: str = "x",
    combine: str = "a + b",
    identity: str = "0",
    finalise: str = "a",
    dtypes: Sequence[str] = FLOAT_NAMES,
) -> Request:
    """A reduction along a dim: `finalise(combine over map(x, n), n)`.

    Raises:
        ExpressionError, ArgumentError: see `check`; or the combination is no such thing.
    """
    texts = {"map": map, "combine": combine, "identity": identity, "finalise": finalise}
    return _rows(name, "reduce", texts, dtypes)


def rowwise(
    name: str,
    *,
    map: str = "x",
    combine: str = "a + b",
    identity: str = "0",
    map2: str | None = None,
    combine2: str = "a + b",
    identity2: str = "0",
    value: str,
    dtypes: Sequence[str] = FLOAT_NAMES,
) -> Request:
    """Each element from its row: softmax is `rowwise("softmax", combine="max(a, b)", identity="-inf",
    map2="exp(x - r)", value="exp(x - r) / s")`.

    Raises:
        ExpressionError, ArgumentError: see `check`; or a combination is no such thing.
    """
    texts = {"map": map, "combine": combine, "identity": identity}
    if map2 is not None:
        texts |= {"map2": map2, "combine2": combine2, "identity2": identity2}
    template = "rowwise" if map2 is None else "rowwise2"
    return _rows(name, template, texts | {"value": value}, dtypes)


def _rows(name: str, template: str, texts: Mapping[str, str], dtypes: Sequence[str]) -> Request:
    check_name(name)
    expressions = {}
    for role, arguments in ROLES[template].items():
        try:
            expressions[role] = check(texts[role], arguments, canonical=arguments)
        except ExpressionError as error:
            raise ExpressionError(
                f"{role}: {error}", line=error.line, column=error.column, remedy=error.remedy
            ) from None
    for suffix in ("", "2"):
        if f"combine{suffix}" in expressions:
            role = f"identity{suffix}"
            number = float(evaluate(expressions[role]))
            expressions[role] = Expression((), (), Constant(number))
            _check_combination(f"combine{suffix}", expressions[f"combine{suffix}"], number)
    return Request(
        name,
        template,
        tuple(expressions.items()),
        tuple(dtypes),
        texts=tuple((k, str(v)) for k, v in texts.items()),
    )


_SAMPLES: Final = np.array([-3.5, -1, -0.25, 0, 0.5, 1, 2, 7], np.float32)


def _check_combination(role: str, combine: Expression, identity: float) -> None:
    """Threads combine in any order: refuse what shows on a few numbers that the order matters."""
    a, b, c = (each.ravel() for each in np.meshgrid(_SAMPLES, _SAMPLES, _SAMPLES))

    def same(left: Any, right: Any) -> bool:
        return bool(np.allclose(left, right, rtol=1e-3, atol=1e-5, equal_nan=True))

    if not same(evaluate(combine, a, b), evaluate(combine, b, a)):
        raise ArgumentError(
            f"{role}: combine(a, b) differs from combine(b, a): the order of a row is not kept"
        )
    left, right = evaluate(combine, evaluate(combine, a, b), c), evaluate(combine, a, evaluate(combine, b, c))
    if not same(left, right):
        raise ArgumentError(
            f"{role}: combine is not associative: threads combine parts of a row in any order"
        )
    own = np.float32(identity)
    if not same(evaluate(combine, own, own), own):
        raise ArgumentError(
            f"{role}: combine({identity}, {identity}) is not {identity}: empty parts must not show"
        )
    if not same(evaluate(combine, own, _SAMPLES), _SAMPLES):
        raise ArgumentError(
            f"{role}: combine({identity}, a) is not a: give its identity, as -inf for max(a, b)"
        )
