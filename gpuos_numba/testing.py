"""Helpers for tests of operators: run one on a Runtime and hold it to its NumPy spec.

from gpuos_numba import Runtime, testing

with Runtime() as rt:
    testing.check(rt, "add", a, b)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .device.operators import TABLE
from .errors import ArgumentError, UnknownOperatorError
from .runtime import Runtime

CANARIES = 64
"""Elements before and after an output that must stay as they were."""


def to_device(rt: Runtime, array: np.ndarray[Any, Any]) -> Any:
    """The array where `rt` can reach it: itself on the CPU machine, a torch tensor on the CUDA machine."""
    if rt.machine == "cpu":
        return array
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(f"cuda:{rt.device}")
    torch.cuda.synchronize()
    return tensor


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of the same values."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def check(rt: Runtime, name: str, *inputs: np.ndarray[Any, Any], **scalars: Any) -> np.ndarray[Any, Any]:
    """Run an operator on NumPy inputs, compare with its spec, and see that nothing beside the output changed.

    Args:
        inputs: f32 arrays, broadcast against each other.
        scalars: the operator's parameters.

    Returns:
        the operator's result.

    Raises:
        AssertionError: the result differs from the spec by more than the table's tolerance, or memory next
            to the output was written.
        UnknownOperatorError, ArgumentError: there is no such operator, or it has no spec or no input.
    """
    operator = TABLE.get(name)
    if operator is None:
        raise UnknownOperatorError(f"operator {name!r} is not in the table: {', '.join(TABLE)}")
    if operator.spec is None or not inputs:
        raise ArgumentError(f"{name} has no spec of inputs to be checked against")
    expected = np.asarray(operator.spec(*inputs, **scalars), np.float32)
    around = np.full(expected.size + 2 * CANARIES, np.float32(-7.25))
    inside = slice(CANARIES, CANARIES + expected.size)
    memory = to_device(rt, around)
    out = memory[inside].reshape(expected.shape)
    rt.submit(name, [to_device(rt, x) for x in inputs], out, **scalars).result()
    after = to_host(memory)
    result = after[inside].reshape(expected.shape)
    np.testing.assert_allclose(result, expected, rtol=operator.tolerance, atol=0, equal_nan=True)
    canaries = np.delete(after, np.arange(CANARIES, CANARIES + expected.size))
    assert (canaries == np.float32(-7.25)).all(), f"{name} wrote outside its output"
    return result.copy()
