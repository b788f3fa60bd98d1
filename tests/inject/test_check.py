"""Nothing outside the language passes the gate, everything inside means what NumPy says, and nothing runs."""

from __future__ import annotations

import ast
import math
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuos_numba.device.functions import FUNCTIONS, NUMBER, TRUTH
from gpuos_numba.errors import ArgumentError, ExpressionError
from gpuos_numba.inject.check import MAX_BYTES, MAX_DEPTH, check, check_function, check_name
from gpuos_numba.inject.expression import (
    Apply,
    Constant,
    Expression,
    Node,
    Value,
    constants,
    describe,
    evaluate,
    kind,
    show,
)

F32 = np.float32
pytestmark = pytest.mark.filterwarnings("ignore:.*:SyntaxWarning", "ignore:.*:DeprecationWarning")
WATCHED: list[str] | None = None


def _hook(event: str, arguments: Any) -> None:
    if WATCHED is not None and event in ("exec", "import", "os.system", "subprocess.Popen"):
        WATCHED.append(event)


sys.addaudithook(_hook)  # stays: it cannot be removed


@pytest.fixture
def nothing_runs() -> Any:
    global WATCHED
    WATCHED = []
    yield
    events, WATCHED = WATCHED, None
    assert events == []


def well_formed(node: Node, wanted: str = NUMBER) -> None:
    assert type(node) in (Constant, Value, Apply)
    assert kind(node) == wanted
    if isinstance(node, Constant):
        assert type(node.value) is float
        assert math.isnan(node.value) or F32(node.value) == node.value
    elif isinstance(node, Value):
        assert node.name in ("x", "y", "z", "t0", "t1", "t2", "t3")
    else:
        for operand, takes in zip(node.operands, FUNCTIONS[node.function].takes, strict=True):
            well_formed(operand, takes)


# --- what is refused ---

REFUSED = [
    ("__import__('os')", 12, "strings"),
    ("__import__(x)", 1, "there are abs, ceil"),
    ("x.__class__", 1, "no attributes"),
    ("x.real", 1, "no attributes"),
    ("x[0]", 2, "no subscripts"),
    ("lambda: x", 7, "no lambda"),
    ("lambda x", 9, "syntax"),
    ("[x for x in y]", 1, "no subscripts and no lists"),
    ("(x for x in y)", 1, "no comprehensions"),
    ("(x := 1)", 4, "no assignment"),
    ("f'{x}'", 2, "strings"),
    ("'x'", 1, "strings"),
    ('"x"', 1, "strings"),
    ("10**10**10", 1, "write its value"),
    ("2 ** 1024", 1, "write its value"),
    ("0 ** -1", 1, "write its value"),
    ("(-8) ** 0.5", 1, "write its value"),
    ("{{ 7*7 }}", 1, "templates"),
    ("x = 1", 3, "syntax"),
    ("x; y", 2, "one expression"),
    ("x # y", 3, "comments"),
    ("x @ y", 3, "matmul"),
    ("x % y", 3, "floor"),
    ("x // y", 1, "floor"),
    ("x << y", 1, r"\+ - \* /"),
    ("x & y", 3, "and"),
    ("~x", 1, "not"),
    ("x < y < z", 1, "a < b and b < c"),
    ("x in y", 1, "there are <"),
    ("x is y", 1, "there are <"),
    ("w + 1", 1, "known here are x, y, z, pi, e, inf, nan"),
    ("print(x)", 1, "there are abs"),
    ("exp", 1, r"write exp\(...\)"),
    ("exp(x, y)", 1, "it takes 1"),
    ("exp()", 1, "it takes 1"),
    ("exp(x=x)", 5, "by place"),
    ("exp(*x)", 5, "one by one"),
    ("exp(x)(y)", 1, "bare names"),
    ("add(x, y)", 1, "there are"),
    ("x(y)", 1, "there are"),
    ("True", 1, "write 1 or 0"),
    ("None", 1, "use numbers"),
    ("...", 1, "use numbers"),
    ("1j", 1, "use numbers"),
    ("1e39", 1, "write inf"),
    ("1e999", 1, "write inf"),
    ("9" * 400, 1, "write inf"),
    ("x, y", 1, "one value"),
    ("(yield x)", 2, "plain"),
    ("await x", 1, "plain"),
    ("", 1, "syntax"),
    ("   ", 4, "syntax"),
    ("x +", 4, "syntax"),
    ("x\\\n", 2, "no meaning"),
    ("x\0", 2, "leave it out"),
    ("\x7fx", 1, "leave it out"),
    ("\u0445 + 1", 1, "U\\+0445.*ASCII"),
    ("x + \uff58", 5, "U\\+FF58.*ASCII"),
    ("x \u2212 1", 3, "ASCII"),
    ("\N{BOM}x", 1, "ASCII"),
    ("x\N{RIGHT-TO-LEFT OVERRIDE}", 2, "ASCII"),
    ("(" * 100_000 + "x" + ")" * 100_000, MAX_BYTES + 1, "at most 4096"),
    ("(" * 2000 + "x" + ")" * 2000, MAX_DEPTH + 1, "at most 48"),
    ("-" * 4000 + "x", None, None),
    ("not " * 1000 + "x", None, None),
    ("x" + "+x" * 2000, None, "at most 48"),
    ("x" + "**x" * 1300, None, None),
    ("x" * 1_000_000, MAX_BYTES + 1, "at most 4096"),
]


@pytest.mark.parametrize(("text", "column", "remedy"), REFUSED, ids=lambda value: repr(value)[:30])
def test_it_is_refused_with_the_column_and_a_remedy(
    text: str, column: int | None, remedy: str | None, nothing_runs: None
) -> None:
    began = time.monotonic()
    with pytest.raises(ExpressionError, match=remedy) as caught:
        check(text, ["x", "y", "z"])
    assert time.monotonic() - began < 1
    assert caught.value.line == 1
    assert column is None or caught.value.column == column, str(caught.value)
    assert len(str(caught.value)) < 500 and str(caught.value).isascii()


def test_columns_count_what_comes_before() -> None:
    for text in ("  x + w", "\nx + w", "\t\tx+ w", "x\n\n + w"):
        with pytest.raises(ExpressionError) as caught:
            check(text, ["x"])
        assert caught.value.line == 1 and text[caught.value.column - 1] == "w", text
    with pytest.raises(ExpressionError) as caught:
        check("  x +", ["x"])
    assert caught.value.column >= 5


@pytest.mark.parametrize(
    "value", [None, 3, b"x", ["x"], ast.parse("x", mode="eval"), compile("x", "", "eval")]
)
def test_only_text_is_read(value: Any) -> None:
    with pytest.raises(ExpressionError, match="give a string"):
        check(value, ["x"])


NAMES = [
    "",
    "1a",
    "a b",
    "a\n",
    "a-b",
    "_a",
    "__a__",
    "a__",
    "if",
    "None",
    "match",
    "type",
    "exp",
    "pi",
    "larger",
]
NAMES += [
    "barrier",
    "load_u64",
    "thread_index",
    "u64",
    "f32",
    "device",
    "{{ 7*7 }}",
    "\u0445",
    "a" * 64,
    "a.b",
]
NAMES += ["a;import os", "a/../b", "con\0"]


@pytest.mark.parametrize("name", [*NAMES, None, 3, b"a"])
def test_names_that_are_refused(name: Any, nothing_runs: None) -> None:
    with pytest.raises(ArgumentError, match="name"):
        check_name(name)


def test_names_that_are_taken() -> None:
    assert check_name("swish") == "swish" and check_name("Swish_2") == "Swish_2"
    with pytest.raises(ArgumentError, match="'submit' is taken: choose another"):
        check_name("submit", ["submit"])


@pytest.mark.parametrize(
    "arguments", [["x", "x"], ["exp"], ["pi"], ["a b"], ["_"], ["x", "y", "z", "a", "b", "c"]]
)
def test_arguments_that_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ArgumentError):
        check("1", arguments)


# --- what it means ---

X = np.array([-np.inf, -3, -1.5, -0.5, -0.0, 0, 0.5, 1, 2.5, 1e4, np.inf, np.nan], F32)

MEANS = [
    ("x / (1 + exp(-x))", lambda x: x / (1 + np.exp(-x))),
    ("x ** 2", lambda x: x * x),
    ("pow(x, 3)", lambda x: x * x * x),
    ("x ** 2 ** 2", lambda x: x.astype(np.float64) ** 4),
    ("2 ** x", lambda x: np.exp2(x)),
    ("-x ** 2", lambda x: -(x * x)),
    ("+x", lambda x: x),
    ("max(x, 0)", lambda x: np.maximum(x, 0)),
    ("min(x, nan)", lambda x: x * np.nan),
    ("x if x > 0 else 0.1 * x", lambda x: np.where(x > 0, x, F32(0.1) * x)),
    ("where(x >= 1, 1, x)", lambda x: np.where(x >= 1, 1, x)),
    ("where(x, 1, 2)", lambda x: np.where(x != 0, 1, 2)),
    ("(x > 0) * x", lambda x: (x > 0) * x),
    ("x == x", lambda x: x == x),
    ("x != x", lambda x: x != x),
    ("not x", lambda x: x == 0),
    ("x > 0 and x < 2 and x != 1", lambda x: (x > 0) & (x < 2) & (x != 1)),
    ("x < 0 or x > 1 or not x", lambda x: (x < 0) | (x > 1) | (x == 0)),
    ("x - x", lambda x: x - x),
    ("1 / x", lambda x: 1 / x),
    ("fma(x, 2, 1)", lambda x: x * 2 + 1),
    ("sign(x) + round(x) + floor(x) - ceil(x)", lambda x: np.sign(x) + np.rint(x) + np.floor(x) - np.ceil(x)),
    ("1_000 * x + 0x10", lambda x: 1000 * x + 16),
    ("pi * e", lambda x: np.full_like(x, F32(np.pi) * F32(np.e))),
    ("inf", lambda x: np.full_like(x, np.inf)),
]


@pytest.mark.parametrize(("text", "means"), MEANS, ids=[text for text, _ in MEANS])
def test_it_means_what_numpy_says(text: str, means: Any) -> None:
    expression = check(text, ["x"])
    well_formed(expression.result)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(evaluate(expression, X), means(X).astype(F32), rtol=1e-6, equal_nan=True)


def test_users_names_do_not_survive() -> None:
    one, other = check("a * exp(b)", ["a", "b"]), check("  (first*exp( second ))", ["first", "second"])
    assert one == other and describe(one) == "(x * exp(y))"
    assert check("n + a", ["a", "n"], canonical=("v", "n")).result == Apply("add", (Value("n"), Value("v")))


def test_constants_are_named_once() -> None:
    expression = check("2.5 * x + 2.5 + nan + 0.1", ["x"])
    named = constants([expression, expression])
    assert named == {"2.5": "K0", "nan": "K1", "0.10000000149011612": "K2"}
    assert show(expression.result, named) == "((((K0 * x) + K0) + K1) + K2)"


# --- functions ---


def swish(x):  # type: ignore[no-untyped-def]
    """Times its sigmoid."""
    s = 1 / (1 + exp(-x))  # type: ignore[name-defined]  # noqa: F821
    return x * s


def test_a_function_becomes_steps() -> None:
    name, expression = check_function(swish)
    assert name == "swish"
    assert describe(expression) == "t0 = (1.0 / (1.0 + exp((-x)))); (x * t0)"
    for node in (node for _, node in expression.steps):
        well_formed(node)
    np.testing.assert_allclose(evaluate(expression, X[1:-2]), X[1:-2] / (1 + np.exp(-X[1:-2])), rtol=1e-6)


def test_names_may_be_assigned_again() -> None:
    _, expression = check_function("def f(a, b):\n    a = a + 1\n    a *= b\n    b = a\n    return a - b")
    assert describe(expression) == "t0 = (x + 1.0); t1 = (t0 * y); t2 = t1; (t1 - t2)"
    decorated = "    @rt.operator\n    def f(a):\n        # why\n        return a\n"
    assert check_function(decorated) == ("f", Expression(("x",), (), Value("x")))


SOURCES = [
    ("def f(x): return x.y", 1, 18, "no attributes"),
    ("def f(x):\n    import os\n    return x", 2, 5, "no imports"),
    ("def f(x):\n    for i in x: pass\n    return x", 2, 5, "no loops"),
    ("def f(x):\n    if x: return 1\n    return x", 2, 5, "a if condition else b"),
    ("def f(x):\n    y = 1", 1, 1, "end it with one"),
    ("def f(x):\n    return", 2, 5, "return a value"),
    ("def f(x):\n    return x\n    y = 1", 3, 5, "leave it out"),
    ("def f(x):\n    x.y = 1\n    return x", 2, 5, "assign to one name"),
    ("def f(x):\n    x[0] += 1\n    return x", 2, 5, "assign to one name"),
    ("def f(x):\n    a = b = x\n    return x", 2, 5, "assign to names"),
    ("def f(x):\n    exp = x\n    return x", 2, 5, "choose another"),
    ("def f(x):\n    __y__ = x\n    return x", 2, 5, "ASCII letters"),
    ("def f(x):\n    y: 'print(1)' = x\n    return y", 2, 5, "assign to names"),
    ("def f(x):\n    y = 'a'\n    return y", 2, 9, "use numbers"),
    ("def f(x):\n    'a'\n    'b'\n    return x", 3, 5, "assign to names"),
    ("def f(x):\n    y = f'{print(1)}'\n    return y", 2, 9, "strings"),
    ("def f(x):\n    return y\n", 2, 12, "known here are x"),
    ("def f(x=1): return x", 1, 9, "without defaults"),
    ("def f(*x): return 1", 1, 8, "plain arguments"),
    ("def f(x, **k): return 1", 1, 12, "plain arguments"),
    ("def f(x, *, k): return 1", 1, 13, "plain arguments"),
    ("def f(x, /): return 1", 1, 7, "plain arguments"),
    ("def f(x: int): return 1", 1, 10, "leave it out"),
    ("def f(x) -> int: return 1", 1, 13, "leave it out"),
    ("def f(): return 1", 1, 1, "take 1 to 3"),
    ("def f(a, b, c, d): return 1", 1, 1, "take 1 to 3"),
    ("async def f(x): return x", 1, 1, "alone"),
    ("lambda x: x", 1, 1, "alone"),
    ("def f(x): return x\nprint(1)", 2, 1, "alone"),
    ("class f: pass", 1, 1, "alone"),
    ("", 1, 1, "alone"),
    ("def f(x): return (lambda: x)", 1, 19, "the expression itself"),
    ("def f(x): return [x][0]", 1, 18, "no subscripts"),
    ("def f(x): return (y := x)", 1, 19, "assignments"),
    ("def f(x):\n\treturn x if", 2, 13, "syntax"),
    ("def f(x): return '\u0445'", 1, 19, "ASCII"),
    ("def f(x):\n" + "    x = x + 1\n" * 400, None, None, "at most 4096"),
]


@pytest.mark.parametrize(("source", "line", "column", "remedy"), SOURCES, ids=lambda value: repr(value)[:40])
def test_a_function_is_refused(
    source: str, line: int | None, column: int | None, remedy: str, nothing_runs: None
) -> None:
    with pytest.raises(ExpressionError, match=remedy) as caught:
        check_function(source)
    assert line is None or (caught.value.line, caught.value.column) == (line, column), str(caught.value)


def test_a_function_without_source_is_refused() -> None:
    for function in (len, eval("lambda x: x"), 3):
        with pytest.raises(ArgumentError, match="give it as a string"):
            check_function(function)
    for source in ("def exp(x): return x", "def __f__(x): return x", "def f(exp): return exp"):
        with pytest.raises(ArgumentError, match=r"choose another|ASCII letters"):
            check_function(source)


# --- fuzz ---

PIECES = [
    "x",
    "y",
    "w",
    "1",
    "2.5",
    "1e39",
    "10",
    "**",
    "*",
    "/",
    "+",
    "-",
    "(",
    ")",
    ",",
    "<",
    "==",
    "<=",
    ">",
]
PIECES += [
    "exp(",
    "max(",
    "where(",
    "pow(",
    "sin",
    "if",
    "else",
    "and",
    "or",
    "not",
    "lambda",
    "for",
    "in",
    ":",
]
PIECES += [
    "[",
    "]",
    "{",
    "}",
    ".",
    "__",
    "'",
    '"',
    "f'",
    ":=",
    "=",
    "import",
    "print(",
    "eval(",
    "\n",
    "\t",
    " ",
]
PIECES += [
    "\\",
    ";",
    "#",
    "@",
    "%",
    "&",
    "|",
    "~",
    "await",
    "yield",
    "None",
    "True",
    "1j",
    "\u0445",
    "\0",
    "pi",
    "0x",
]


@settings(max_examples=1500, deadline=None, database=None)
@given(st.one_of(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.text(max_size=60)))
def test_nothing_outside_the_language_passes(text: str) -> None:
    global WATCHED
    WATCHED = []
    try:
        expression = check(text, ["x", "y"])
    except ExpressionError as error:
        assert 1 <= error.column <= len(text) + 2
    else:
        well_formed(expression.result)
        with np.errstate(all="ignore"):
            assert evaluate(expression, X, X).shape == X.shape
    events, WATCHED = WATCHED, None
    assert events == []


@settings(max_examples=500, deadline=None, database=None)
@given(st.lists(st.sampled_from([*PIECES, "\n    ", "return ", "y = ", "x += "]), max_size=30).map("".join))
def test_no_function_outside_the_language_passes(body: str) -> None:
    try:
        name, expression = check_function(f"def f(x, y):\n    {body}")
    except ExpressionError:
        return
    assert name == "f"
    for node in (*(node for _, node in expression.steps), expression.result):
        well_formed(node)


NUMPY = {"round": "np.rint", "sign": "sign"}
NAMESPACE = {
    "np": np,
    "F": F32,
    "sign": lambda a: np.where(a == 0, F32(0), np.sign(a)),
    "pick_max": lambda a, b: np.where(a >= b, a, np.where(a != a, a, b)),
    "pick_min": lambda a, b: np.where(a <= b, a, np.where(a != a, a, b)),
}
EXACT = ("abs", "floor", "ceil", "round", "sign", "sqrt")


def texts() -> st.SearchStrategy[tuple[str, str]]:
    """Pairs of an expression and the same for NumPy, of operations that are exact."""
    number = st.floats(-8, 8, width=16).map(abs).map(lambda value: (repr(value), f"F({value!r})"))
    leaves = st.one_of(st.sampled_from([("x", "x"), ("y", "y")]), number)

    def grow(inner: Any) -> Any:
        two = st.tuples(inner, inner)
        return st.one_of(
            st.tuples(st.sampled_from("+-*/"), two).map(
                lambda c: (f"({c[1][0][0]} {c[0]} {c[1][1][0]})", f"({c[1][0][1]} {c[0]} {c[1][1][1]})")
            ),
            st.tuples(st.sampled_from(EXACT), inner).map(
                lambda c: (f"{c[0]}({c[1][0]})", f"{NUMPY.get(c[0], 'np.' + c[0])}({c[1][1]})")
            ),
            st.tuples(st.sampled_from(["max", "min"]), two).map(
                lambda c: (
                    f"{c[0]}({c[1][0][0]}, {c[1][1][0]})",
                    f"pick_{c[0]}({c[1][0][1]}, {c[1][1][1]})",
                )
            ),
            st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), two, two).map(
                lambda c: (
                    f"({c[2][0][0]} if {c[1][0][0]} {c[0]} {c[1][1][0]} else {c[2][1][0]})",
                    f"np.where({c[1][0][1]} {c[0]} {c[1][1][1]}, {c[2][0][1]}, {c[2][1][1]})",
                )
            ),
            inner.map(lambda c: (f"-{c[0]}", f"(-{c[1]})")),
        )

    return st.recursive(leaves, grow, max_leaves=12)


@settings(max_examples=500, deadline=None, database=None)
@given(texts())
def test_it_equals_numpy_to_the_bit(pair: tuple[str, str]) -> None:
    text, numpy_text = pair
    x, y = np.meshgrid(X, X)
    with np.errstate(all="ignore"):
        expected = np.broadcast_to(eval(numpy_text, NAMESPACE | {"x": x, "y": y}), x.shape)
    np.testing.assert_array_equal(evaluate(check(text, ["x", "y"]), x, y), expected.astype(F32))


def test_kinds_fit_the_table() -> None:
    for function in FUNCTIONS.values():
        assert function.gives in (NUMBER, TRUTH)
        well_formed_text = function.text.format(*(["x"] * len(function.takes)))
        ast.parse(well_formed_text)
