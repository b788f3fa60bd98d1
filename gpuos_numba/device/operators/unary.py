"""Functions of one element."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ...machines.base import Body, Primitives
from ..angles import make_cosine, make_sine
from ..division import make_reciprocal as make_inverse
from .functions import GOOD, TINY, Array, Function, wide
from .table import Parameter, Tolerance

# NaN fails every comparison, and `x if x > 0 else 0` would become max.f32, which drops it: each choice below
# is written so that NaN takes the branch that keeps it.


def make_copy(m: Primitives) -> Body:
    def copy(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x

    return copy


def make_neg(m: Primitives) -> Body:
    def neg(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return -x

    return neg


def make_abs(m: Primitives) -> Body:
    bits_f32, f32_bits, BUT_SIGN = m.bits_f32, m.f32_bits, m.u64(0x7FFFFFFF)

    def absolute(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return bits_f32(f32_bits(x) & BUT_SIGN)

    return absolute


def make_abs_i64(m: Primitives) -> Body:
    ZERO = np.int64(0)

    def absolute(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return -x if x < ZERO else x

    return absolute


def _make_sign(zero: Any, one: Any, minus: Any) -> Body:
    def sign(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if x > zero:
            return one
        if x < zero:
            return minus
        return zero

    return sign


def make_sign(m: Primitives) -> Body:
    return _make_sign(m.f32(0), m.f32(1), m.f32(-1))


def make_sign_i64(m: Primitives) -> Body:
    return _make_sign(np.int64(0), np.int64(1), np.int64(-1))


def truth_sign(x: Array) -> Array:
    return np.where(x > 0, 1, np.where(x < 0, -1, 0))


def make_square(m: Primitives) -> Body:
    def square(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x * x

    return square


def make_floor(m: Primitives) -> Body:
    round_down = m.round_down

    def floor(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return round_down(x)

    return floor


def make_ceil(m: Primitives) -> Body:
    round_up = m.round_up

    def ceil(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return round_up(x)

    return ceil


def truth_round(x: Array) -> Array:
    return np.rint(x) if x.dtype.kind == "f" else x


def make_round(m: Primitives) -> Body:
    round_even = m.round_even

    def round(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return round_even(x)

    return round


def make_reciprocal(m: Primitives) -> Body:
    ONE = m.f32(1)

    def reciprocal(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE / x

    return reciprocal


def make_sqrt(m: Primitives) -> Body:
    sqrt_of = math.sqrt

    def sqrt(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return sqrt_of(x)

    return sqrt


def make_rsqrt(m: Primitives) -> Body:
    sqrt_of, ONE = math.sqrt, m.f32(1)

    def rsqrt(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE / sqrt_of(x)

    return rsqrt


def make_exp(m: Primitives) -> Body:
    exp_of = math.exp

    def exp(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return exp_of(x)

    return exp


def make_expm1(m: Primitives) -> Body:
    expm1_of = math.expm1

    def expm1(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return expm1_of(x)

    return expm1


def make_log(m: Primitives) -> Body:
    log_of = math.log

    def log(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return log_of(x)

    return log


def make_log1p(m: Primitives) -> Body:
    log1p_of = math.log1p

    def log1p(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return log1p_of(x)

    return log1p


def make_sin(m: Primitives) -> Body:
    sin_of = make_sine(m)

    def sin(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return sin_of(x)

    return sin


def make_cos(m: Primitives) -> Body:
    cos_of = make_cosine(m)

    def cos(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return cos_of(x)

    return cos


def make_tanh(m: Primitives) -> Body:
    tanh_of = math.tanh

    def tanh(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return tanh_of(x)

    return tanh


def make_erf(m: Primitives) -> Body:
    erf_of = math.erf

    def erf(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return erf_of(x)

    return erf


def truth_erf(x: Array) -> Array:
    return np.array([math.erf(each) for each in x.reshape(-1)], np.float64).reshape(x.shape)


def make_sigmoid(m: Primitives) -> Body:
    exp_of, f32_bits, bits_f32, reciprocal = math.exp, m.f32_bits, m.bits_f32, make_inverse(m)
    ZERO, ONE, SIGN = m.f32(0), m.f32(1), m.u64(0x80000000)

    def sigmoid(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        # exp of a negative number only: 1 / (1 + exp(100)) would be 0 where 3.8e-44 is right.
        e = exp_of(bits_f32(f32_bits(x) | SIGN))
        share = reciprocal(ONE + e)
        return e * share if x < ZERO else share

    return sigmoid


def truth_sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e / (1 + e), 1 / (1 + e))


def make_silu(m: Primitives) -> Body:
    sigmoid_of = m.device(make_sigmoid(m))

    def silu(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x * sigmoid_of(x, x, x, p, q)

    return silu


def make_gelu(m: Primitives) -> Body:
    erfc_of, HALF, ROOT = math.erfc, m.f32(0.5), m.f32(-math.sqrt(0.5))

    def gelu(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        # 1 + erf(x / sqrt 2) would cancel for negative x; erfc says the same without.
        return HALF * x * erfc_of(x * ROOT)

    return gelu


def truth_gelu(x: Array) -> Array:
    erfc = np.array([math.erfc(-each * math.sqrt(0.5)) for each in x.reshape(-1)], np.float64)
    return 0.5 * x * erfc.reshape(x.shape)


def make_gelu_tanh(m: Primitives) -> Body:
    sigmoid_of = m.device(make_sigmoid(m))
    TWICE, CUBE, ONE = m.f32(2 * math.sqrt(2 / math.pi)), m.f32(0.044715), m.f32(1)

    def gelu_tanh(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        # (1 + tanh u) / 2 = sigmoid(2 u), which does not cancel for negative u.
        return x * sigmoid_of(TWICE * x * (ONE + CUBE * x * x), x, x, p, q)

    return gelu_tanh


def truth_gelu_tanh(x: Array) -> Array:
    return x * truth_sigmoid(2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))


def make_relu(m: Primitives) -> Body:
    ZERO = m.f32(0)

    def relu(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ZERO if x < ZERO else x

    return relu


def make_relu_i64(m: Primitives) -> Body:
    ZERO = np.int64(0)

    def relu(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ZERO if x < ZERO else x

    return relu


def make_softplus(m: Primitives) -> Body:
    exp_of, log1p_of = math.exp, math.log1p

    def softplus(x: Any, y: Any, z: Any, beta: Any, threshold: Any) -> Any:
        scaled = x * beta
        if scaled > threshold:
            return x
        return log1p_of(exp_of(scaled)) / beta

    return softplus


def truth_softplus(x: Array, beta: float, threshold: float) -> Array:
    scaled = x * np.float32(beta)
    exact = np.log1p(np.exp(x.astype(np.float64) * float(np.float32(beta)))) / float(np.float32(beta))
    return np.where(scaled > np.float32(threshold), x, exact)


def make_elu(m: Primitives) -> Body:
    expm1_of, ZERO = math.expm1, m.f32(0)

    def elu(x: Any, y: Any, z: Any, alpha: Any, q: Any) -> Any:
        if x > ZERO:
            return x
        return alpha * expm1_of(x)

    return elu


def truth_elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, float(np.float32(alpha)) * np.expm1(x))


def make_leaky_relu(m: Primitives) -> Body:
    ZERO = m.f32(0)

    def leaky_relu(x: Any, y: Any, z: Any, slope: Any, q: Any) -> Any:
        return x if x > ZERO else x * slope

    return leaky_relu


def truth_leaky_relu(x: Array, negative_slope: float) -> Array:
    return np.where(x > 0, x, x * np.float32(negative_slope))


def make_clip(m: Primitives) -> Body:
    def clip(x: Any, y: Any, z: Any, low: Any, high: Any) -> Any:
        result = low if x < low else x
        return high if result > high else result

    return clip


def truth_clip(x: Array, low: Any, high: Any) -> Array:
    low, high = x.dtype.type(low), x.dtype.type(high)
    result = np.where(x < low, low, x)
    return np.where(result > high, high, result)


def truth_hardtanh(x: Array, min_val: float, max_val: float) -> Array:
    return truth_clip(x, min_val, max_val)


def make_hardsigmoid(m: Primitives) -> Body:
    f32 = m.f32
    ZERO, ONE, THREE, SIX = f32(0), f32(1), f32(3), f32(6)

    def hardsigmoid(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        result = (x + THREE) / SIX
        if result < ZERO:
            result = ZERO
        return ONE if result > ONE else result

    return hardsigmoid


def truth_hardsigmoid(x: Array) -> Array:
    return np.clip((x + 3) / 6, 0, 1)


def make_hardswish(m: Primitives) -> Body:
    f32 = m.f32
    ZERO, THREE, SIX = f32(0), f32(3), f32(6)

    def hardswish(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        inside = x + THREE
        if inside < ZERO:
            inside = ZERO
        if inside > SIX:
            inside = SIX
        return x * (inside / SIX)

    return hardswish


def truth_hardswish(x: Array) -> Array:
    return x * (np.clip(x + 3, 0, 6) / 6)


def make_logical_not(m: Primitives) -> Body:
    ZERO, ONE = m.f32(0), m.f32(1)

    def logical_not(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x == ZERO else ZERO

    return logical_not


def make_logical_not_i64(m: Primitives) -> Body:
    ZERO, ONE = np.int64(0), np.int64(1)

    def logical_not(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x == ZERO else ZERO

    return logical_not


def make_isnan(m: Primitives) -> Body:
    ZERO, ONE = m.f32(0), m.f32(1)

    def isnan(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ONE if x != x else ZERO

    return isnan


def make_isnan_i64(m: Primitives) -> Body:
    ZERO = np.int64(0)

    def isnan(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return ZERO

    return isnan


# erfc of an argument t that is off by half an ulp is off by 2 t^2 of them: 2^-18 reaches to t = 4, and beyond
# that the function is below atol. The same goes for exp of what gelu's tanh form makes of x.
_GELU: Final = Tolerance(f32=2.0**-18, atol=1e-9)
# exp is good to 1 ulp of 2^-23, and the sum, the quotient and a product or two add half of one each.
_SIGMOID: Final = Tolerance(f32=8 * 2.0**-24, atol=TINY)
# Where the sigmoid is among the smallest f32, a is about -104, and multiplies its half of one of them.
_SILU: Final = Tolerance(f32=8 * 2.0**-24, atol=2.0**-143)
# exp(beta x) is off by |beta x| half ulp, of which 100 are left before it vanishes.
_SOFTPLUS: Final = Tolerance(f32=2.0**-17, atol=TINY)

FUNCTIONS: Final = (
    Function("copy", 1, "a", np.copy, make_copy, make_copy),
    Function("neg", 1, "-a", np.negative, make_neg, make_neg, bools=False),
    Function("abs", 1, "|a|", np.abs, make_abs, make_abs_i64, bools=False),
    Function("sign", 1, "-1, 0 or 1; 0 of NaN", truth_sign, make_sign, make_sign_i64, source="torch.sign."),
    Function("square", 1, "a * a", np.square, make_square, make_square, bools=False),
    Function("floor", 1, "largest integer <= a", np.floor, make_floor, make_copy, bools=False),
    Function("ceil", 1, "smallest integer >= a", np.ceil, make_ceil, make_copy, bools=False),
    Function("round", 1, "nearest integer, ties to even", truth_round, make_round, make_copy, bools=False),
    Function("reciprocal", 1, "1 / a", lambda x: 1 / x, make_reciprocal, result="float"),
    Function(
        "sqrt",
        1,
        "square root of a",
        wide(np.sqrt),
        make_sqrt,
        result="float",
        tolerance=Tolerance(f32=2.0**-23),
    ),
    Function(
        "rsqrt",
        1,
        "1 / square root of a",
        wide(lambda x: 1 / np.sqrt(x)),
        make_rsqrt,
        result="float",
        tolerance=GOOD,
    ),
    Function("exp", 1, "e^a", wide(np.exp), make_exp, result="float", tolerance=GOOD),
    Function("expm1", 1, "e^a - 1", wide(np.expm1), make_expm1, result="float", tolerance=GOOD),
    Function("log", 1, "natural logarithm of a", wide(np.log), make_log, result="float", tolerance=GOOD),
    Function("log1p", 1, "log(1 + a)", wide(np.log1p), make_log1p, result="float", tolerance=GOOD),
    Function("sin", 1, "sine of a", wide(np.sin), make_sin, result="float", tolerance=GOOD),
    Function("cos", 1, "cosine of a", wide(np.cos), make_cos, result="float", tolerance=GOOD),
    Function(
        "tanh",
        1,
        "hyperbolic tangent of a",
        wide(np.tanh),
        make_tanh,
        result="float",
        tolerance=GOOD,
    ),
    Function(
        "erf",
        1,
        "error function of a",
        wide(truth_erf),
        make_erf,
        result="float",
        tolerance=GOOD,
    ),
    Function(
        "sigmoid",
        1,
        "1 / (1 + e^-a)",
        wide(truth_sigmoid),
        make_sigmoid,
        result="float",
        tolerance=_SIGMOID,
    ),
    Function(
        "relu",
        1,
        "max(a, 0), NaN stays",
        lambda x: np.where(x < 0, 0, x),
        make_relu,
        make_relu_i64,
        bools=False,
    ),
    Function(
        "silu",
        1,
        "a / (1 + e^-a)",
        wide(lambda x: x * truth_sigmoid(x)),
        make_silu,
        tolerance=_SILU,
        source="torch.nn.functional.silu.",
        bools=False,
        integers=False,
    ),
    Function(
        "softplus",
        1,
        "log(1 + e^(beta a)) / beta; a where beta a > threshold",
        truth_softplus,
        make_softplus,
        parameters=(Parameter("beta", "float", 1.0), Parameter("threshold", "float", 20.0)),
        tolerance=_SOFTPLUS,
        source="torch.nn.functional.softplus.",
        bools=False,
        integers=False,
    ),
    Function(
        "elu",
        1,
        "a > 0 ? a : alpha (e^a - 1)",
        wide(truth_elu),
        make_elu,
        parameters=(Parameter("alpha", "float", 1.0),),
        tolerance=GOOD,
        source="torch.nn.functional.elu.",
        bools=False,
        integers=False,
    ),
    Function(
        "leaky_relu",
        1,
        "a > 0 ? a : negative_slope a",
        truth_leaky_relu,
        make_leaky_relu,
        parameters=(Parameter("negative_slope", "float", 0.01),),
        source="torch.nn.functional.leaky_relu.",
        bools=False,
        integers=False,
    ),
    Function(
        "hardtanh",
        1,
        "a held between min_val and max_val",
        truth_hardtanh,
        make_clip,
        parameters=(Parameter("min_val", "float", -1.0), Parameter("max_val", "float", 1.0)),
        source="torch.nn.functional.hardtanh.",
        bools=False,
        integers=False,
    ),
    Function(
        "hardsigmoid",
        1,
        "(a + 3) / 6 held between 0 and 1",
        wide(truth_hardsigmoid),
        make_hardsigmoid,
        tolerance=GOOD,
        source="torch.nn.functional.hardsigmoid.",
        bools=False,
        integers=False,
    ),
    Function(
        "hardswish",
        1,
        "a * hardsigmoid(a)",
        wide(truth_hardswish),
        make_hardswish,
        tolerance=GOOD,
        source="torch.nn.functional.hardswish.",
        bools=False,
        integers=False,
    ),
    Function(
        "logical_not", 1, "a == 0", lambda x: x == 0, make_logical_not, make_logical_not_i64, result="bool"
    ),
    Function("isnan", 1, "a is NaN", np.isnan, make_isnan, make_isnan_i64, result="bool"),
)

GELU: Final = Function(
    "gelu", 1, "a Φ(a)", wide(truth_gelu), make_gelu, tolerance=_GELU, bools=False, integers=False
)
GELU_TANH: Final = Function(
    "gelu.tanh",
    1,
    "tanh form",
    wide(truth_gelu_tanh),
    make_gelu_tanh,
    tolerance=_GELU,
    bools=False,
    integers=False,
)
