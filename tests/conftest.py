"""Both machines for every test that asks for `machine`: the CPU always, the GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpuos_numba import Runtime
from gpuos_numba.machines import cuda

F32 = np.float32


class Arrays:
    """NumPy arrays to and from what a machine takes: NumPy on the CPU, torch on the GPU."""

    def __init__(self, machine: str) -> None:
        self.machine = machine

    def to_device(self, array: Any, dtype: Any = F32) -> Any:
        """A row-major copy that begins on a 64-byte line."""
        array = np.asarray(array, dtype)
        if self.machine == "cuda":
            import torch

            return torch.from_numpy(array.copy()).cuda()
        raw = np.empty(array.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        return array.cpu().numpy() if self.machine == "cuda" else np.asarray(array)

    def walk(self, buffer: Any, index: np.ndarray[Any, Any], offset: int) -> Any:
        """View of a flat buffer with the shape and strides of an array of indices; the first is `offset`."""
        steps = tuple(step // index.itemsize for step in index.strides)
        if self.machine == "cuda":
            if min(steps, default=0) < 0:
                pytest.skip("torch has no negative strides")
            return buffer.as_strided(index.shape, steps, offset)
        strides = tuple(step * buffer.itemsize for step in steps)
        return np.lib.stride_tricks.as_strided(buffer[offset:], index.shape, strides)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        if not cuda.available():
            pytest.skip("no GPU here: that the CUDA machine does the same stays unproved")
        torch = pytest.importorskip("torch", reason="no torch here: the CUDA machine stays unproved")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU here: that the CUDA machine does the same stays unproved")
    return str(request.param)


@pytest.fixture(scope="session")
def arrays(machine: str) -> Arrays:
    return Arrays(machine)


@pytest.fixture(scope="session")
def to_device(arrays: Arrays) -> Any:
    return arrays.to_device


@pytest.fixture(scope="session")
def to_host(arrays: Arrays) -> Any:
    return arrays.to_host


@pytest.fixture(scope="session")
def runtime(machine: str) -> Iterator[Runtime]:
    with Runtime(machine) as rt:
        yield rt
