"""Quotients of four lanes at once are what IEEE 754 says, whatever the reciprocal's last bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from gpuos_numba.device import division
from gpuos_numba.machines import cpu_memory

F32, U32 = np.float32, np.uint32
ENDS = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 2.0**-126, 3.4e38, 1, -1], F32)


def _off_by(ulps: int) -> Any:
    """A reciprocal that is so much too large: hardware may be an ulp off either way."""
    exact, STEP = cpu_memory.approximate_reciprocal, np.uint64(ulps & (2**64 - 1))

    @njit(inline="always")
    def approximate(y: Any) -> Any:
        return cpu_memory.bits_f32(cpu_memory.f32_bits(exact(y)) + STEP)

    return approximate


@pytest.fixture(scope="module", params=[-1, 0, 1])
def divide(request: pytest.FixtureRequest) -> Any:
    primitives = {name: getattr(cpu_memory, name) for name in dir(cpu_memory) if not name.startswith("__")}
    m: Any = SimpleNamespace(**primitives | {"approximate_reciprocal": _off_by(request.param)})
    divide4 = division.make_divide4(m)

    @njit
    def run(x: Any, y: Any, out: Any) -> None:
        for i in range(0, len(x), 4):
            quotients = divide4((x[i], x[i + 1], x[i + 2], x[i + 3]), (y[i], y[i + 1], y[i + 2], y[i + 3]))
            out[i], out[i + 1], out[i + 2], out[i + 3] = quotients

    def call(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        run(x, y, out)
        return out

    return call


def check(divide: Any, x: np.ndarray, y: np.ndarray) -> None:
    found = divide(x, y)
    with np.errstate(all="ignore"):
        right = x / y
    same = (found.view(U32) == right.view(U32)) | (np.isnan(found) & np.isnan(right))
    worst = np.flatnonzero(~same)[:3]
    assert same.all(), f"{x[worst]} / {y[worst]} gives {found[worst]}, not {right[worst]}"


def _numbers(rng: np.random.Generator, how: int, count: int) -> np.ndarray:
    if how == 0:  # all there are
        return rng.integers(0, 2**32, count, U32).view(F32)
    if how == 1:  # around the ends of what is ordinary
        return (rng.integers(2**23, 2**24, count) * 2.0 ** rng.integers(-70, 30, count)).astype(F32)
    # mantissas of almost all ones, for which a reciprocal is hardest to round
    return ((2**24 - 1 - rng.integers(0, 64, count)) * 2.0 ** rng.integers(-40, 10, count)).astype(F32)


@pytest.mark.parametrize("how", range(3))
def test_many_quotients_are_right_to_the_bit(divide: Any, how: int) -> None:
    rng, count = np.random.default_rng(how), 1 << 20
    x, y = _numbers(rng, how, count), _numbers(rng, how, count)
    for operand in (x, y):
        at = rng.integers(0, count, count // 500)
        operand[at] = rng.choice(ENDS, len(at))
    check(divide, x, y)


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=4, max_size=4))
def test_any_four_quotients_are_right_to_the_bit(divide: Any, pairs: list[tuple[float, float]]) -> None:
    check(divide, np.array([x for x, _ in pairs], F32), np.array([y for _, y in pairs], F32))


def test_a_reciprocal_of_ordinary_size_is_within_an_ulp() -> None:
    reciprocal = division.make_reciprocal(cpu_memory)  # type: ignore[arg-type]

    @njit
    def run(y: Any, out: Any) -> None:
        for i in range(len(y)):
            out[i] = reciprocal(y[i])

    low, high = division.ORDINARY
    y = np.exp2(np.random.default_rng(0).uniform(np.log2(low), np.log2(high), 1 << 20)).astype(F32)
    out = np.empty_like(y)
    run(y, out)
    assert np.abs(out.view(np.int32) - (1 / y.astype(np.float64)).astype(F32).view(np.int32)).max() <= 1
    run(np.full(1, np.nan, F32), out[:1])
    assert np.isnan(out[0])
