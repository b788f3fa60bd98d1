"""The gate: text from a user arrives, an `Expression` leaves, or an ExpressionError that says where and why.

Nothing is ever evaluated. Size and nesting are bounded before the parser sees the text, every node of its
tree is on a list or refused, and what leaves is built from our own tables: no character of the text survives.

    expression := number | name | f(...) | -a | a + b | a - b | a * b | a / b | a ** b
                | a < b ... a != b | not a | a and b | a or b | a if c else b

All arithmetic is f32. A comparison is a truth; used as a number it is 1 or 0, and a number used as a truth is
whether it is not 0, as NumPy has it.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ..device.functions import CONSTANTS, FUNCTIONS, NUMBER
from ..errors import ArgumentError, ExpressionError
from ..machines.base import Primitives
from .expression import ARGUMENTS, Apply, Constant, Expression, Node, Value, kind

MAX_BYTES: Final = 4096
MAX_DEPTH: Final = 48
MAX_NODES: Final = 1024
MAX_NAME: Final = 63

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_PLAIN: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ .,+-*/()<>=!\t\n\r"
)
_ONE_LINE: Final = {ord(each): " " for each in "\t\n\r"}
_WHY: Final = {
    "'": "there are no strings",
    '"': "there are no strings",
    "[": "there are no subscripts and no lists; give arrays as arguments",
    "]": "there are no subscripts and no lists; give arrays as arguments",
    "{": "there are no sets, dicts or templates",
    "}": "there are no sets, dicts or templates",
    ":": "there is no lambda and no assignment in an expression",
    ";": "give one expression",
    "#": "leave comments out",
    "@": "there is no matrix product; use the operator matmul",
    "%": "write x - y * floor(x / y)",
    "&": "write `and`",
    "|": "write `or`",
    "~": "write `not`",
    "^": "write ** for a power",
}
_MATH: Final = frozenset(name for name, each in FUNCTIONS.items() if each.public)
_BINARY: Final[dict[type, str]] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_COMPARE: Final[dict[type, tuple[str, bool]]] = {  # function, operands swapped
    ast.Lt: ("less", False),
    ast.LtE: ("less_equal", False),
    ast.Gt: ("less", True),
    ast.GtE: ("less_equal", True),
    ast.Eq: ("equal", False),
}
_REMEDY: Final = {
    "Attribute": "there are no attributes; use the functions by their bare names",
    "Subscript": "there are no subscripts; give arrays as arguments",
    "Lambda": "give the expression itself",
    "ListComp": "there are no comprehensions; the expression is applied to every element",
    "SetComp": "there are no comprehensions; the expression is applied to every element",
    "DictComp": "there are no comprehensions; the expression is applied to every element",
    "GeneratorExp": "there are no comprehensions; the expression is applied to every element",
    "NamedExpr": "use @rt.operator and a function with assignments",
    "JoinedStr": "there are no strings",
    "Tuple": "give one value",
    "List": "give one value",
    "Starred": "give the operands one by one",
    "Await": "give a plain expression",
    "Yield": "give a plain expression",
    "If": "write a if condition else b",
    "For": "there are no loops; the function is applied to every element",
    "While": "there are no loops; the function is applied to every element",
    "Import": "there are no imports; the functions are known by their bare names",
    "ImportFrom": "there are no imports; the functions are known by their bare names",
}


def _reserved() -> frozenset[str]:
    primitives = {
        name for name in (*vars(Primitives), *Primitives.__annotations__) if not name.startswith("_")
    }
    return frozenset(
        {*primitives, *FUNCTIONS, *CONSTANTS, "larger", "smaller", "power", "cube", "ONE", "NOTHING"}
    )


RESERVED: Final = _reserved()
"""Names that nothing injected may have: primitives, functions and constants."""


def _bad_name(name: object) -> str | None:
    """Why a name is none, with the remedy."""
    if not isinstance(name, str):
        return "is not a string"
    if len(name) > MAX_NAME:
        return f"has {len(name)} characters: use at most {MAX_NAME}"
    if not _NAME.fullmatch(name):
        return "is no name: use ASCII letters, digits and _, a letter first"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name == "type":
        return "is a keyword: choose another"
    if name.endswith("__"):
        return "ends in two underscores: choose another"
    return None


def check_name(name: Any, reserved: Iterable[str] = ()) -> str:
    """The name of an operator, unchanged.

    Args:
        name: what the user gave.
        reserved: names that are taken, besides those of primitives, functions and constants.

    Raises:
        ArgumentError: it is no ASCII identifier, a keyword, or the name of something else.
    """
    why = _bad_name(name)
    if why is None and name in RESERVED:
        why = "is the name of a primitive, function or constant: choose another"
    if why is None and name in set(reserved):
        why = "is taken: choose another"
    if why is not None:
        raise ArgumentError(f"name {_clip(repr(name))} {why}")
    return str(name)


def check(text: Any, arguments: Sequence[str], canonical: Sequence[str] = ARGUMENTS) -> Expression:
    """An expression over arguments.

    Args:
        text: what the user wrote.
        arguments: names that it may use. Those of a template may be any, also single letters; they may not
            shadow functions.
        canonical: what the arguments are called from here on, by place.

    Raises:
        ExpressionError: the text is not an expression of the language above.
        ArgumentError: the names of the arguments are none.
    """
    names = _check_arguments(arguments, len(canonical))
    text = _bounded(text, _PLAIN).translate(_ONE_LINE)
    shift = len(text) - len(text.lstrip())
    try:
        tree = ast.parse(text[shift:], mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _syntax(text, error, shift) from None
    reader = _Reader(text, dict(zip(names, canonical, strict=False)), shift)
    result = reader.number(tree.body, 0)
    return Expression(tuple(canonical[: len(names)]), (), result)


def check_function(function: Any, arity: range = range(1, 4)) -> tuple[str, Expression]:
    """The name and expression of a Python function, or of its source.

    The function may assign numbers to local names and ends in its only return. It is read, never called.

    Args:
        function: a function whose source can be found, or the source of one.
        arity: how many arguments it may take.

    Raises:
        ExpressionError: its body is more than that.
        ArgumentError: its source cannot be found, or its name or arguments are none.
    """
    if isinstance(function, str):
        source = function
    else:
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):
            raise ArgumentError(
                f"the source of {_clip(repr(function))} cannot be found: give it as a string"
            ) from None
    source = textwrap.dedent(_bounded(source, None))
    try:
        tree = ast.parse(source, mode="exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _syntax(source, error, 0) from None
    reader = _Reader(source, {})
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        at = tree.body[1] if len(tree.body) > 1 else tree.body[0] if tree.body else None
        raise reader.refuse(at, "that is not one function", "give `def name(x): return ...` alone")
    definition = tree.body[0]
    name = check_name(definition.name)
    given = definition.args
    extra = [*given.posonlyargs, *given.kwonlyargs, given.vararg, given.kwarg, *given.defaults]
    for each in extra:
        if each is not None:
            raise reader.refuse(
                each, "an argument that is not a plain one", "take plain arguments, without defaults"
            )
    for argument in given.args:
        if argument.annotation is not None:
            raise reader.refuse(argument.annotation, "an annotation", "leave it out; every value is a number")
    if definition.returns is not None:
        raise reader.refuse(definition.returns, "an annotation", "leave it out; every value is a number")
    names = _check_arguments([argument.arg for argument in given.args], len(ARGUMENTS))
    if len(names) not in arity:
        raise reader.refuse(
            definition, f"{name} takes {len(names)} arguments", f"take {arity.start} to {arity.stop - 1}"
        )
    return name, reader.function(definition, names)


def _check_arguments(arguments: Sequence[str], most: int) -> tuple[str, ...]:
    for each in arguments:
        why = _bad_name(each)
        if why is None and (each in _MATH or each in CONSTANTS):
            why = "is the name of a function or constant: choose another"
        if why is not None:
            raise ArgumentError(f"argument {_clip(repr(each))} {why}")
    if len(set(arguments)) != len(arguments):
        raise ArgumentError(f"arguments {_clip(repr(list(arguments)))}: name each once")
    if len(arguments) > most:
        raise ArgumentError(f"{len(arguments)} arguments: take at most {most}")
    return tuple(arguments)


def _clip(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


def _error(text: str, line: int, column: int, what: str, remedy: str) -> ExpressionError:
    """`column` counts from 1."""
    lines = text.splitlines() or [""]
    shown = lines[min(line, len(lines)) - 1]
    start = max(0, column - 41)
    snippet = shown[start : column + 39].replace("\t", " ")
    snippet = snippet.encode("ascii", "replace").decode()
    mark = " " * (column - 1 - start) + "^"
    place = f"line {line}, column {column}" if len(lines) > 1 else f"column {column}"
    return ExpressionError(
        f"{what} at {place}: {remedy}\n    {snippet}\n    {mark}", line=line, column=column, remedy=remedy
    )


def _bounded(text: Any, allowed: frozenset[str] | None) -> str:
    """Text that is safe to give to the parser: short, ASCII, shallow."""
    if not isinstance(text, str):
        raise ExpressionError(
            f"{_clip(repr(type(text)))} is not text: give a string",
            line=1,
            column=1,
            remedy="give a string",
        )
    text = "".join(text)  # of a subclass too
    if len(text) > MAX_BYTES:
        head = text[:MAX_BYTES]
        line, column = head.count("\n") + 1, MAX_BYTES - (head.rfind("\n") + 1) + 1
        raise _error(head, line, column, f"{len(text)} characters", f"use at most {MAX_BYTES}")
    line, column, depth = 1, 0, 0
    for character in text:
        column += 1
        if character == "\n":
            line, column = line + 1, 0
        elif not character.isascii():
            code = f"U+{ord(character):04X}"
            raise _error(
                text, line, column, f"the character {code}", "use ASCII alone; some letters only look so"
            )
        elif not character.isprintable() and character not in "\t\r":
            raise _error(text, line, column, f"the control character {ord(character)}", "leave it out")
        elif allowed is not None and character not in allowed:
            remedy = _WHY.get(character, "it has no meaning here")
            raise _error(text, line, column, f"the character {character}", remedy)
        elif character in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _error(text, line, column, "parentheses nested too deep", f"use at most {MAX_DEPTH}")
        elif character in ")]}":
            depth -= 1
    return str(text)


def _syntax(text: str, error: BaseException, shift: int) -> ExpressionError:
    if isinstance(error, SyntaxError):
        lines = text.splitlines() or [""]
        line, column = error.lineno or 0, error.offset or 0
        if not 1 <= line <= len(lines) or column < 1:  # the text ended too soon
            line, column = len(lines), len(lines[-1]) + 1
        elif line == 1:
            column += shift
        return _error(text, line, column, f"no expression ({error.msg})", "check the syntax")
    return _error(text, 1, 1, "an expression that cannot be parsed", "split it into smaller ones")


class _Reader:
    """Reads a parsed tree, node by node; whatever it does not name is refused."""

    def __init__(self, text: str, names: dict[str, str], shift: int = 0) -> None:
        self.text = text
        self.shift = shift  # characters of the first line that the parser did not see
        self.names = names  # as the user calls them -> canonical
        self.count = 0

    def refuse(self, node: Any, what: str, remedy: str) -> ExpressionError:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        if line == 1:
            column += self.shift
        return _error(self.text, line, column, what, remedy)

    def function(self, definition: ast.FunctionDef, arguments: Sequence[str]) -> Expression:
        canonical = ARGUMENTS[: len(arguments)]
        self.names = dict(zip(arguments, canonical, strict=True))
        body = list(definition.body)
        first = body[0]
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and type(first.value.value) is str
        ):
            body.pop(0)  # a docstring
        steps: list[tuple[str, Node]] = []
        for place, statement in enumerate(body):
            last = place == len(body) - 1
            if isinstance(statement, ast.Return):
                if not last:
                    raise self.refuse(body[place + 1], "a statement behind the return", "leave it out")
                if statement.value is None:
                    raise self.refuse(statement, "a return of nothing", "return a value")
                return Expression(canonical, tuple(steps), self.number(statement.value, 0))
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target, node = statement.targets[0], self.number(statement.value, 0)
            elif isinstance(statement, ast.AugAssign):
                target = statement.target
                read = ast.copy_location(ast.Name(getattr(target, "id", ""), ast.Load()), target)
                both = ast.copy_location(ast.BinOp(read, statement.op, statement.value), statement)
                if not isinstance(target, ast.Name):
                    raise self.refuse(target, "an assignment to more than a name", "assign to one name")
                node = self.number(both, 0)
            else:
                kind_of = type(statement).__name__
                remedy = _REMEDY.get(kind_of, "assign to names, then return a value")
                raise self.refuse(statement, f"a statement of the kind {kind_of}", remedy)
            if not isinstance(target, ast.Name):
                raise self.refuse(target, "an assignment to more than a name", "assign to one name")
            why = _bad_name(target.id)
            if why is None and (target.id in _MATH or target.id in CONSTANTS):
                why = "is the name of a function or constant: choose another"
            if why is not None:
                raise self.refuse(target, f"the name {_clip(target.id)}", why)
            name = f"t{len(steps)}"
            steps.append((name, node))
            self.names[target.id] = name
        raise self.refuse(definition, "a function without a return", "end it with one")

    def number(self, node: ast.AST, depth: int) -> Node:
        """A node as a number."""
        read = self.read(node, depth)
        return read if kind(read) == NUMBER else Apply("number", (read,))

    def truth(self, node: ast.AST, depth: int) -> Node:
        """A node as a truth."""
        read = self.read(node, depth)
        return Apply("truth", (read,)) if kind(read) == NUMBER else read

    def apply(self, name: str, operands: Sequence[ast.AST], depth: int) -> Node:
        takes = FUNCTIONS[name].takes
        return Apply(
            name,
            tuple(
                self.number(each, depth) if wanted == NUMBER else self.truth(each, depth)
                for each, wanted in zip(operands, takes, strict=True)
            ),
        )

    def read(self, node: ast.AST, depth: int) -> Node:
        self.count += 1
        depth += 1
        if depth > MAX_DEPTH:
            raise self.refuse(node, "an expression nested too deep", f"use at most {MAX_DEPTH} levels")
        if self.count > MAX_NODES:
            raise self.refuse(node, "too long an expression", f"use at most {MAX_NODES} operations")
        if type(node) is ast.Constant:
            return self.constant(node)
        if type(node) is ast.Name:
            return self.name(node)
        if type(node) is ast.Call:
            return self.call(node, depth)
        if type(node) is ast.UnaryOp:
            return self.unary(node, depth)
        if type(node) is ast.BinOp:
            return self.binary(node, depth)
        if type(node) is ast.BoolOp:
            # `a and b and c` is one node; f32 numbers here, so its value is a truth.
            return self.logic("and" if type(node.op) is ast.And else "or", node.values, depth)
        if type(node) is ast.Compare:
            return self.compare(node, depth)
        if type(node) is ast.IfExp:
            return self.apply("where", (node.test, node.body, node.orelse), depth)
        what = type(node).__name__
        raise self.refuse(node, f"a node of the kind {what}", _REMEDY.get(what, "it is not in the language"))

    def constant(self, node: ast.Constant) -> Node:
        value = node.value
        if type(value) is not int and type(value) is not float:
            kind_of = {str: "a string", bool: "a bool", complex: "a complex number"}.get(
                type(value), "a constant"
            )
            remedy = "write 1 or 0" if type(value) is bool else "use numbers"
            raise self.refuse(node, kind_of, remedy)
        try:
            return self.rounded(float(value), node)
        except OverflowError:
            raise self.refuse(node, "a number beyond float32", "write inf") from None

    def rounded(self, value: float, node: ast.AST) -> Constant:
        with np.errstate(over="ignore"):
            held = float(np.float32(value))
        if math.isinf(held):
            raise self.refuse(node, "a number beyond float32", "write inf")
        return Constant(held)

    def name(self, node: ast.Name) -> Node:
        name = node.id
        if name in self.names:
            return Value(self.names[name])
        if name in CONSTANTS:
            return Constant(float(np.float32(CONSTANTS[name])))
        if name in _MATH:
            raise self.refuse(node, f"the function {name} without operands", f"write {name}(...)")
        known = ", ".join([*self.names, *CONSTANTS])
        raise self.refuse(node, f"the name {_clip(name)}", f"known here are {known}")

    def call(self, node: ast.Call, depth: int) -> Node:
        if type(node.func) is not ast.Name:
            raise self.refuse(
                node.func, "a call of more than a name", "call the functions by their bare names"
            )
        name = node.func.id
        if name in self.names or name not in _MATH:
            known = ", ".join(sorted(_MATH))
            raise self.refuse(node.func, f"the function {_clip(name)}", f"there are {known}")
        for word in node.keywords:
            raise self.refuse(word, "a keyword", "give operands by place")
        for each in node.args:
            if type(each) is ast.Starred:
                raise self.refuse(each, "a starred operand", _REMEDY["Starred"])
        arity = len(FUNCTIONS[name].takes)
        if len(node.args) != arity:
            raise self.refuse(node, f"{name} of {len(node.args)} operands", f"it takes {arity}")
        if name == "pow":
            return self.power(node, node.args[0], node.args[1], depth)
        return self.apply(name, node.args, depth)

    def unary(self, node: ast.UnaryOp, depth: int) -> Node:
        if type(node.op) is ast.Not:
            return self.apply("not", (node.operand,), depth)
        if type(node.op) is ast.Invert:
            raise self.refuse(node, "the operator ~", _WHY["~"])
        operand = self.number(node.operand, depth)
        if type(node.op) is ast.UAdd:
            return operand
        if isinstance(operand, Constant):
            return Constant(-operand.value)
        return Apply("neg", (operand,))

    def binary(self, node: ast.BinOp, depth: int) -> Node:
        if type(node.op) is ast.Pow:
            return self.power(node, node.left, node.right, depth)
        name = _BINARY.get(type(node.op))
        if name is None:
            remedy = {
                ast.FloorDiv: "write floor(x / y)",
                ast.Mod: _WHY["%"],
                ast.MatMult: _WHY["@"],
                ast.BitAnd: _WHY["&"],
                ast.BitOr: _WHY["|"],
                ast.BitXor: _WHY["^"],
            }.get(type(node.op), "there are + - * / **")
            raise self.refuse(node, f"the operator {type(node.op).__name__}", remedy)
        return self.apply(name, (node.left, node.right), depth)

    def power(self, node: ast.AST, base: ast.AST, exponent: ast.AST, depth: int) -> Node:
        """Powers of two numbers are folded in float64, never in integers; squares and cubes multiply."""
        left, right = self.number(base, depth), self.number(exponent, depth)
        if isinstance(left, Constant) and isinstance(right, Constant):
            try:
                value = left.value**right.value
            except (OverflowError, ZeroDivisionError):
                value = math.inf
            if isinstance(value, complex) or not math.isfinite(value):
                raise self.refuse(node, "a power of two numbers that is no float32", "write its value")
            return self.rounded(value, node)
        if isinstance(right, Constant):
            for value, name in ((2.0, "square"), (3.0, "cube")):
                if right.value == value:
                    return Apply(name, (left,))
        return Apply("pow", (left, right))

    def logic(self, name: str, values: Sequence[ast.AST], depth: int) -> Node:
        truths = [self.truth(each, depth) for each in values]
        while len(truths) > 1:  # a balanced tree, so that depth stays bounded
            pairs = zip(truths[::2], truths[1::2], strict=False)
            truths = [Apply(name, pair) for pair in pairs] + truths[len(truths) & ~1 :]
        return truths[0]

    def compare(self, node: ast.Compare, depth: int) -> Node:
        if len(node.ops) != 1:
            raise self.refuse(node, "a chain of comparisons", "write a < b and b < c")
        left, right = self.number(node.left, depth), self.number(node.comparators[0], depth)
        operator = type(node.ops[0])
        if operator is ast.NotEq:
            return Apply("not", (Apply("equal", (left, right)),))
        if operator not in _COMPARE:
            raise self.refuse(node, f"the comparison {operator.__name__}", "there are < <= > >= == !=")
        name, swapped = _COMPARE[operator]
        return Apply(name, (right, left) if swapped else (left, right))
