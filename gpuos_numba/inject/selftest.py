"""A body that was just linked in is run on a few operands and held to the truth, before anybody's task is.

Compiled functions may differ from NumPy's in their last bits, and an expression may make much of that, or
compare: so most elements must agree, rather than all. A body that is another's, or walks wrongly, has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import MachineError
from ..machines.base import Machine

if TYPE_CHECKING:
    from ..device.operators import Operator
    from ..runtime import Runtime

ENOUGH: Final = 0.8
"""The part of the elements that must agree."""
TIMEOUT_S: Final = 30.0
_GUARD: Final = 64
"""Bytes behind an output that must stay as they are."""


class Placed:
    """An array that the device reads, of a dtype and with a step."""

    def __init__(self, machine: Machine, values: np.ndarray[Any, Any], step: int) -> None:
        spread = np.zeros((*values.shape[:-1], values.shape[-1] * step), values.dtype)
        spread[..., ::step] = values
        self._machine, self._shape, self._dtype = machine, spread.shape, values.dtype
        self._bytes = machine.upload(spread.tobytes() + b"\xa5" * _GUARD)
        self.step, self.shape = step, values.shape

    @property
    def array(self) -> Any:
        """What a Runtime takes."""
        if isinstance(self._bytes, np.ndarray):
            return self._bytes[:-_GUARD].view(self._dtype).reshape(self._shape)[..., :: self.step]
        return self

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = np.zeros(self._shape, self._dtype)[..., :: self.step].strides
        pointer = self._bytes.__cuda_array_interface__["data"]
        return {
            "shape": self.shape,
            "typestr": self._dtype.str,
            "data": pointer,
            "strides": strides if self.step > 1 else None,
            "version": 3,
        }

    def read(self) -> tuple[np.ndarray[Any, Any], bool]:
        """The elements, and whether what lies behind them is as it was."""
        data = self._machine.download(self._bytes)
        whole = data[:-_GUARD].view(self._dtype).reshape(self._shape)
        return whole[..., :: self.step], bool((data[-_GUARD:] == 0xA5).all())


def _cases(operator: Operator) -> Iterator[tuple[list[np.ndarray[Any, Any]], int]]:
    """Operands, and their step: one case for each way through the bodies."""
    random = np.random.default_rng(len(operator.kernels))
    names = {dtype.name for dtype in operator.dtypes}
    shapes: list[tuple[tuple[int, ...], int]] = [((515,), 1), ((77,), 2)]
    if operator.parameters:
        shapes = [((5, 33), 1), ((2, 1100), 1), ((4, 50), 2)]
    if operator.kernels[0].name.endswith(".body"):
        shapes = shapes[:1]  # of a user, who takes contiguous operands alone
    for name, kind in (("F32", np.float32), ("F16", np.float16)):
        if name in names:
            for shape, step in shapes if name == "F32" else shapes[:1]:
                operands = [random.standard_normal(shape).astype(kind) for _ in range(operator.inputs[0])]
                yield operands, step


def self_test(rt: Runtime, machine: Machine, operator: Operator) -> None:
    """Run an operator that is linked in and not yet current.

    Raises:
        MachineError: it computes something else than its spec.
        TaskError, HangError, WaitTimeout: it does not run.
    """
    for operands, step in _cases(operator):
        inputs = [Placed(machine, each, step) for each in operands]
        with np.errstate(all="ignore"):
            wanted = None if operator.spec is None else np.asarray(operator.spec(*operands))
        shape = operands[0].shape if wanted is None else wanted.shape
        out = Placed(machine, np.full(shape or (1,), np.nan, operands[0].dtype), 1)
        rt.submit(operator, [each.array for each in inputs], out.array).result(TIMEOUT_S)
        found, untouched = out.read()
        if not untouched:
            raise MachineError(
                f"{operator.name} wrote behind its output in its self-test: it is not made live"
            )
        if wanted is None:
            continue
        rtol, atol = (1e-4, 1e-6) if operands[0].dtype == np.float32 else (4e-3, 1e-6)
        with np.errstate(all="ignore"):
            expected = wanted.astype(operands[0].dtype).astype(np.float64)
            same = np.isclose(found.astype(np.float64), expected, rtol, atol, equal_nan=True)
        if same.mean() < ENOUGH:
            raise MachineError(
                f"{operator.name}: {same.size - np.count_nonzero(same)} of {same.size} elements differ from "
                "its formula in its self-test: it is not made live"
            )
