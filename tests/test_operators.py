"""Every operator of the table, whatever the dtype, shape, strides and values, equals its NumPy spec.

A new operator is covered by being in the table. GPUOS_EXAMPLES sets how many examples each gets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.device.operators import KERNELS, TABLE

EXAMPLES = int(os.environ.get("GPUOS_EXAMPLES", "20"))


class DataDraw(testing.RandomDraw):
    """Choices are hypothesis', so that a failure shrinks; bulk values come from a seed."""

    def __init__(self, data: Any) -> None:
        super().__init__(data.draw(st.integers(0, 1 << 32)))
        self.data = data

    def integer(self, low: int, high: int) -> int:
        return int(self.data.draw(st.integers(low, high)))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]


@pytest.mark.parametrize("name", [name for name, operator in TABLE.items() if operator.example])
def test_an_operator_equals_its_spec(runtime: gpuos.Runtime, name: str) -> None:
    operator = TABLE[name]

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.data())
    def run(data: Any) -> None:
        assert operator.example is not None
        inputs, parameters = operator.example(DataDraw(data))
        testing.check(runtime, name, *inputs, **parameters)

    run()


def test_every_operator_can_be_tested_and_is_documented() -> None:
    for operator in TABLE.values():
        assert operator.formula
        if operator.family != "control" and not operator.like_out:
            assert operator.example is not None, f"{operator.name} has no example to test"
            assert operator.spec is not None, f"{operator.name} has no spec"


def test_kernels_have_names_and_places_of_their_own() -> None:
    assert len({kernel.name for kernel in KERNELS.values()}) == len(KERNELS)
    assert all(0 <= op_id < 1024 for op_id in KERNELS)
