"""The functions of one element that expressions may use: f32 values arrive, one leaves.

Each is given once: its opcode for the interpreter, how it is written in rendered source, its truth in NumPy
and, in `make_functions`, its device code. Comparisons and logic give a truth, everything else a number;
the interpreter holds a truth as 1 or 0. NaN and infinities are as NumPy has them: min and max propagate NaN,
a comparison with it is false, round takes ties to even, sign keeps NaN. Of two zeros min and max take the
first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ..machines.base import Body, Primitives
from .angles import make_cosine, make_sine
from .reductions import make_larger

Array = Any
NUMBER: Final = "number"
TRUTH: Final = "truth"


@dataclass(frozen=True, slots=True)
class Function:
    """One function.

    Attributes:
        name: as it is looked up; the name in an expression where `public`.
        opcode: in the interpreter's programs. Its range tells the arity, see `ARITIES`.
        takes: NUMBER or TRUTH for each operand.
        gives: NUMBER or TRUTH.
        text: how rendered source says it, over `{0}`, `{1}`, `{2}`.
        truth: the same in NumPy, over and to f32 arrays (bool ones for a truth).
        public: whether an expression may call it by name; the others are what operators become.
    """

    name: str
    opcode: int
    takes: tuple[str, ...]
    gives: str
    text: str
    truth: Callable[..., Array]
    public: bool = True


def _exactly(function: Callable[..., Array]) -> Callable[..., Array]:
    """In f64, rounded once."""

    @functools.wraps(function)
    def truth(*operands: Array) -> Array:
        with np.errstate(all="ignore"):
            result = function(*(np.asarray(each, np.float64) for each in operands))
            return np.asarray(result).astype(np.float32)

    return truth


def _quietly(function: Callable[..., Array]) -> Callable[..., Array]:
    """In f32 itself: correctly rounded there and on the device."""

    @functools.wraps(function)
    def truth(*operands: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(*operands))

    return truth


_ONE, _NOTHING = np.float32(1), np.float32(0)
_erf = np.vectorize(math.erf, otypes=[np.float64])


# NumPy leaves it to its build which zero is the smaller one, and which sign that of -0.0 has.


def _smaller(x: Array, y: Array) -> Array:
    return np.where((y < x) | (y != y), y, x)


def _larger(x: Array, y: Array) -> Array:
    return np.where((y > x) | (y != y), y, x)


def _sign(x: Array) -> Array:
    return np.where(x == 0, _NOTHING, np.sign(x))


def _as_f32(truth: Array) -> Array:
    return np.asarray(truth).astype(np.float32)


def _unary(name: str, opcode: int, truth: Callable[..., Array]) -> Function:
    return Function(name, opcode, (NUMBER,), NUMBER, name + "({0})", truth)


def _inner(name: str, opcode: int, takes: str, gives: str, text: str, truth: Any) -> Function:
    kinds = {"n": NUMBER, "t": TRUTH}
    return Function(
        name, opcode, tuple(kinds[k] for k in takes), kinds[gives], text, _quietly(truth), public=False
    )


_FUNCTIONS: Final = (
    _unary("exp", 1, _exactly(np.exp)),
    _unary("log", 2, _exactly(np.log)),
    _unary("log1p", 3, _exactly(np.log1p)),
    _unary("expm1", 4, _exactly(np.expm1)),
    _unary("sqrt", 5, _quietly(np.sqrt)),
    _unary("rsqrt", 6, _exactly(lambda x: 1.0 / np.sqrt(x))),
    _unary("sin", 7, _exactly(np.sin)),
    _unary("cos", 8, _exactly(np.cos)),
    _unary("tanh", 9, _exactly(np.tanh)),
    _unary("sigmoid", 10, _exactly(lambda x: 1.0 / (1.0 + np.exp(-x)))),
    _unary("erf", 11, _exactly(lambda x: _erf(x) if x.size else x)),
    _unary("abs", 12, _quietly(np.abs)),
    _unary("floor", 13, _quietly(np.floor)),
    _unary("ceil", 14, _quietly(np.ceil)),
    _unary("round", 15, _quietly(np.rint)),
    _unary("sign", 16, _quietly(_sign)),
    _unary("relu", 17, _quietly(lambda x: np.where(x < 0, _NOTHING, x))),
    _inner("neg", 18, "n", "n", "(-{0})", np.negative),
    _inner("square", 19, "n", "n", "square({0})", lambda x: x * x),
    _inner("cube", 20, "n", "n", "cube({0})", lambda x: x * x * x),
    _inner("not", 21, "t", "t", "(not {0})", np.logical_not),
    _inner("number", 22, "t", "n", "(ONE if {0} else NOTHING)", _as_f32),
    _inner("truth", 23, "n", "t", "({0} != NOTHING)", lambda x: x != 0),
    Function("min", 32, (NUMBER,) * 2, NUMBER, "smaller({0}, {1})", _quietly(_smaller)),
    Function("max", 33, (NUMBER,) * 2, NUMBER, "larger({0}, {1})", _quietly(_larger)),
    Function("pow", 34, (NUMBER,) * 2, NUMBER, "power({0}, {1})", _exactly(np.power)),
    _inner("add", 35, "nn", "n", "({0} + {1})", np.add),
    _inner("sub", 36, "nn", "n", "({0} - {1})", np.subtract),
    _inner("mul", 37, "nn", "n", "({0} * {1})", np.multiply),
    _inner("div", 38, "nn", "n", "({0} / {1})", np.divide),
    _inner("less", 39, "nn", "t", "({0} < {1})", np.less),
    _inner("less_equal", 40, "nn", "t", "({0} <= {1})", np.less_equal),
    _inner("equal", 41, "nn", "t", "({0} == {1})", np.equal),
    _inner("and", 42, "tt", "t", "({0} and {1})", np.logical_and),
    _inner("or", 43, "tt", "t", "({0} or {1})", np.logical_or),
    Function("where", 48, (TRUTH, NUMBER, NUMBER), NUMBER, "({1} if {0} else {2})", _quietly(np.where)),
    Function("fma", 49, (NUMBER,) * 3, NUMBER, "fma({0}, {1}, {2})", _exactly(lambda a, b, c: a * b + c)),
)

FUNCTIONS: Final = MappingProxyType({each.name: each for each in _FUNCTIONS})
"""By name."""

CONSTANTS: Final = MappingProxyType({"pi": math.pi, "e": math.e, "inf": math.inf, "nan": math.nan})
"""Names that stand for numbers."""

UNARY, BINARY, TERNARY = range(1, 32), range(32, 48), range(48, 64)
"""Opcodes by arity."""

assert len({each.opcode for each in _FUNCTIONS}) == len(FUNCTIONS) == len(_FUNCTIONS)
for _each in _FUNCTIONS:
    assert _each.opcode in (UNARY, BINARY, TERNARY)[len(_each.takes) - 1]


@functools.cache
def make_functions(m: Primitives) -> dict[str, Body]:
    """The device code of all functions that rendered source calls, by the name it calls them.

    Everything else is an operator of the language, see `Function.text`.
    """
    f32 = m.f32
    ONE, NOTHING = f32(1), f32(0)

    def exp(x: Any) -> Any:
        return math.exp(x)

    def log(x: Any) -> Any:
        return math.log(x)

    def log1p(x: Any) -> Any:
        return math.log1p(x)

    def expm1(x: Any) -> Any:
        return math.expm1(x)

    def sqrt(x: Any) -> Any:
        return math.sqrt(x)

    def rsqrt(x: Any) -> Any:
        return ONE / math.sqrt(x)

    def tanh(x: Any) -> Any:
        return math.tanh(x)

    def sigmoid(x: Any) -> Any:
        return ONE / (ONE + math.exp(-x))

    def erf(x: Any) -> Any:
        return math.erf(x)

    def absolute(x: Any) -> Any:
        return math.fabs(x)

    def sign(x: Any) -> Any:
        if x > NOTHING:
            return ONE
        if x < NOTHING:
            return -ONE
        if x == NOTHING:
            return NOTHING
        return x

    def relu(x: Any) -> Any:
        return NOTHING if x < NOTHING else x

    def smaller(x: Any, y: Any) -> Any:
        if y < x or y != y:
            return y
        return x

    def power(x: Any, y: Any) -> Any:
        return math.pow(x, y)

    def square(x: Any) -> Any:
        return x * x

    def cube(x: Any) -> Any:
        return x * x * x

    made: tuple[Body, ...] = (
        exp,
        log,
        log1p,
        expm1,
        sqrt,
        rsqrt,
        tanh,
        sigmoid,
        erf,
        sign,
        relu,
    )
    made = (*made, smaller, power, square, cube)
    named = {each.__name__: m.device(each) for each in made}
    return named | {
        "abs": m.device(absolute),
        "round": m.round_even,
        "floor": m.round_down,
        "ceil": m.round_up,
        "larger": make_larger(m),
        "sin": make_sine(m),
        "cos": make_cosine(m),
        "fma": m.fused_multiply_add,
    }
