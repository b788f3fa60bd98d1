"""The helpers that users test their own operators with must be able to fail."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing


def test_check_returns_what_the_operator_made(runtime: gpuos.Runtime) -> None:
    a, b = np.arange(33, dtype=np.float32), np.float32(2) * np.ones((3, 1), np.float32)
    np.testing.assert_array_equal(testing.check(runtime, "mul", a, b), a * b)


def test_check_fails_where_the_spec_differs(runtime: gpuos.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dict(testing.TABLE)
    operator = copy.copy(wrong["add"])
    object.__setattr__(operator, "spec", np.subtract)
    wrong["add"] = operator
    monkeypatch.setattr(testing, "TABLE", wrong)
    with pytest.raises(AssertionError, match="Mismatched"):
        testing.check(runtime, "add", np.ones(5, np.float32), np.ones(5, np.float32))


def test_check_names_what_it_cannot_check(runtime: gpuos.Runtime) -> None:
    with pytest.raises(gpuos.UnknownOperatorError, match="twist"):
        testing.check(runtime, "twist")
    with pytest.raises(gpuos.ArgumentError, match="nop"):
        testing.check(runtime, "nop")
