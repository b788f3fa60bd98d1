"""Helpers for tests of operators: draw an example, run it on a Runtime, and hold it to its NumPy spec.

from gpuos_numba import Runtime, testing

with Runtime() as rt:
    testing.check(rt, "add", a, b)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .descriptor import DTYPE_NAMES, DType
from .device.operators import TABLE
from .device.operators.table import FLOATS
from .errors import ArgumentError, UnknownOperatorError
from .runtime import Runtime
from .shapes import Shape

CANARY_BYTES = 256
"""Before and after an output, to stay as they were."""


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of a code; bfloat16 is that of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if dtype is DType.BF16 else np.dtype(DTYPE_NAMES[dtype])


def to_device(rt: Runtime, array: np.ndarray[Any, Any]) -> Any:
    """The array where `rt` can reach it: itself on the CPU machine, a torch tensor on the CUDA machine.

    Strides are kept, also of a broadcast view; a reversed one is copied, for torch has none.
    """
    if rt.machine == "cpu":
        return array
    import torch

    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    base = array
    while isinstance(base.base, np.ndarray) and base.base.dtype == array.dtype:
        base = base.base
    whole = _tensor(np.ascontiguousarray(base).reshape(-1)).to(f"cuda:{rt.device}")
    if base.flags.c_contiguous:
        start = (array.ctypes.data - base.ctypes.data) // array.itemsize
        steps = [stride // array.itemsize for stride in array.strides]
        tensor = whole.as_strided(array.shape, steps, start)
    else:
        tensor = _tensor(np.ascontiguousarray(array)).to(f"cuda:{rt.device}").reshape(array.shape)
    torch.cuda.synchronize()
    return tensor


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    if array.dtype == ml_dtypes.bfloat16:  # torch knows no ml_dtypes
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of the same values."""
    if hasattr(array, "cpu"):
        array = array.cpu()
        if str(array.dtype) == "torch.bfloat16":
            import torch

            return np.asarray(array.contiguous().view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.asarray(array)


class RandomDraw:
    """Examples from a NumPy generator. See `device.operators.table.Draw`."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high, endpoint=True))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def shape(self, min_dims: int = 0, max_dims: int = 4, max_side: int = 9) -> Shape:
        dims = self.integer(min_dims, max_dims)
        sides = [self.choice([1, self.integer(0, max_side), self.integer(2, max_side)]) for _ in range(dims)]
        if dims and self.integer(0, 7) == 0:
            sides[-1] = self.choice([15, 16, 17, 127, 128, 257, 1024])
        return tuple(sides)

    def broadcastable(self, shape: Shape) -> Shape:
        kept = shape[self.integer(0, len(shape)) if self.integer(0, 4) == 0 else 0 :]
        return tuple(1 if self.integer(0, 4) == 0 else side for side in kept)

    def array(self, shape: Shape, dtype: DType, values: str = "any") -> Any:
        layout = self.choice(
            ["plain", "plain", "plain", "steps", "reversed", "transposed", "broadcast", "offset"]
        )
        kind = numpy_dtype(dtype)
        if layout == "steps" and shape:
            return self.values((*shape[:-1], shape[-1] * 2), kind, dtype, values)[..., ::2]
        if layout == "reversed" and shape:
            return self.values(shape, kind, dtype, values)[..., ::-1]
        if layout == "transposed" and len(shape) > 1:
            return self.values((*shape[:-2], shape[-1], shape[-2]), kind, dtype, values).swapaxes(-1, -2)
        if layout == "broadcast" and shape:
            return np.broadcast_to(self.values((1, *shape[1:]), kind, dtype, values), shape)
        if layout == "offset":  # not aligned to 16 bytes
            size = int(np.prod(shape))
            return self.values((size + 1,), kind, dtype, values)[1:].reshape(shape)
        return self.values(shape, kind, dtype, values)

    def values(self, shape: Shape, kind: np.dtype[Any], dtype: DType, values: str) -> Any:
        """A row-major array. `values` as in `array`."""
        random, size = self.random, int(np.prod(shape))
        if dtype is DType.BOOL:
            return (random.random(size) < 0.5).reshape(shape)
        if dtype not in FLOATS:
            info = np.iinfo(kind)
            low, high = max(info.min, -9), 9
            drawn: Any = random.integers(low, high, size, endpoint=True)
            if values == "any":
                extremes = np.array([info.min, info.max, info.max - 1, 0, 1, 1 << 24 | 1], np.int64)
                extremes = extremes[(extremes >= info.min) & (extremes <= info.max)]
                drawn = np.where(random.random(size) < 0.2, random.choice(extremes, size), drawn)
            return drawn.astype(kind).reshape(shape)
        drawn = random.standard_normal(size)
        if values == "positive":
            drawn = np.abs(drawn) + 0.01
        elif values == "small":
            drawn = random.integers(-4, 4, size, endpoint=True).astype(np.float64)
        elif values == "any":
            limits: Any = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
            tiny, least = float(limits.tiny), float(limits.smallest_subnormal)
            special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, tiny, least, -least]
            special += [float(limits.max), float(limits.min)]
            scale = random.choice([1.0, 1.0, 10.0, 100.0, 1e-4], size)
            drawn = np.where(random.random(size) < 0.15, random.choice(special, size), drawn * scale)
        with np.errstate(over="ignore", invalid="ignore"):
            return drawn.astype(kind).reshape(shape)


def check(rt: Runtime, name: str, *inputs: Any, out: Any = None, **parameters: Any) -> Any:
    """Run an operator on NumPy inputs, compare with its spec, and see that nothing beside it changed.

    Args:
        inputs: arrays (bfloat16 of ml_dtypes), Python numbers, or None, as the operator takes them.
        out: of an operator that updates its outputs: an array, or a tuple of them, of their contents before;
            they are copied, with their strides, to memory where every byte between and around is watched.
        parameters: the operator's parameters.

    Returns:
        the operator's result, a tuple where it has several outputs.

    Raises:
        AssertionError: the result differs from the spec by more than the table's tolerance, or memory
            between or next to the elements of an output was written.
        UnknownOperatorError, ArgumentError: there is no such operator, or it has no spec or no input.
    """
    operator = TABLE.get(name)
    if operator is None:
        raise UnknownOperatorError(f"operator {name!r} is not in the table: {', '.join(TABLE)}")
    if operator.spec is None or operator.like_out or not (inputs or operator.updates):
        raise ArgumentError(f"{name} has no spec of inputs to be checked against")
    if operator.updates == (out is None):
        raise ArgumentError(
            f"{name} {'updates' if operator.updates else 'allocates'} its outputs, out={out!r}"
        )
    arrays = [to_device(rt, x) if isinstance(x, np.ndarray) else x for x in inputs]
    if operator.updates:
        before = list(out) if isinstance(out, tuple) else [out]
        given = {"out": tuple(each.copy() for each in before) if isinstance(out, tuple) else out.copy()}
    else:
        kinds = [(shape, numpy_dtype(dtype)) for shape, dtype in rt.infer(name, arrays, **parameters)]
        before = [np.empty(shape, kind) for shape, kind in kinds]
        for each in before:
            each.reshape(-1).view(np.uint8)[...] = _CANARY
        given = {}
    with np.errstate(all="ignore"):
        expected = operator.spec(*inputs, **parameters, **given)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(expected) == len(before), f"{name}: the spec gives {len(expected)} outputs"
    guarded = [_Guarded(rt, each) for each in before]
    outs = tuple(each.array for each in guarded)
    rt.submit(name, arrays, outs[0] if operator.outputs == 1 else outs, **parameters).result()
    results = []
    for spec, each in zip(expected, guarded, strict=True):
        result, intact = each.read()
        compare(name, result, spec, each.dtype)
        assert intact, f"{name} wrote between or beside the elements of its output"
        results.append(result)
    return results[0] if operator.outputs == 1 else tuple(results)


_CANARY = 0xA5


class _Guarded:
    """A copy of an array on the device, with its strides, in memory of which every other byte is watched."""

    def __init__(self, rt: Runtime, source: np.ndarray[Any, Any]) -> None:
        steps = [
            abs(step) if extent > 1 else 0 for step, extent in zip(source.strides, source.shape, strict=True)
        ]
        if rt.machine != "cpu" and min(source.strides, default=0) < 0:  # torch has no negative strides
            plain = np.empty(source.shape, source.dtype)
            plain[...] = source
            source, steps = plain, list(plain.strides)
        self.shape, self.kind, self.strides = source.shape, source.dtype, source.strides
        self.dtype = next(code for code in DTYPE_NAMES if numpy_dtype(code) == self.kind)
        reach = sum(step * (extent - 1) for step, extent in zip(steps, self.shape, strict=True))
        size = reach + self.kind.itemsize if source.size else 0
        below = sum(
            -step * (side - 1) for step, side in zip(self.strides, self.shape, strict=True) if step < 0
        )
        self.start = CANARY_BYTES + (below if source.size else 0)
        memory = np.full(size + 2 * CANARY_BYTES, _CANARY, np.uint8)
        self._inside(memory)[...] = source
        self.memory = to_device(rt, memory)
        if rt.machine == "cpu":
            self.array = self._inside(self.memory)
        else:
            import torch

            whole = self.memory[: len(memory) // self.kind.itemsize * self.kind.itemsize]
            whole = whole.view(getattr(torch, DTYPE_NAMES[self.dtype]))
            elements = [step // self.kind.itemsize for step in self.strides]
            self.array = whole.as_strided(self.shape, elements, self.start // self.kind.itemsize)

    def _inside(
        self, memory: np.ndarray[Any, Any], kind: np.dtype[Any] | None = None
    ) -> np.ndarray[Any, Any]:
        return np.ndarray(self.shape, kind or self.kind, memory.data, self.start, self.strides)

    def read(self) -> tuple[np.ndarray[Any, Any], bool]:
        """The elements, and whether all other bytes are as they were."""
        memory = to_host(self.memory).copy()
        result = self._inside(memory).copy()
        raw = np.dtype(f"V{self.kind.itemsize}")
        self._inside(memory, raw)[...] = np.frombuffer(bytes([_CANARY]) * raw.itemsize, raw)[0]
        return result, bool((memory == _CANARY).all())


def compare(name: str, result: np.ndarray[Any, Any], spec: Any, dtype: DType) -> None:
    """Hold a result to a spec's answer, rounded to the output's dtype, within the table's tolerance."""
    kind = numpy_dtype(dtype)
    rtol, atol = TABLE[name].tolerance.of(dtype)
    with np.errstate(all="ignore"):
        expected = np.asarray(spec).astype(kind)
    assert result.shape == expected.shape, f"{name}: shape {result.shape}, the spec has {expected.shape}"
    if dtype in FLOATS:
        np.testing.assert_allclose(
            result.astype(np.float64),
            expected.astype(np.float64),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            err_msg=name,
        )
    else:
        np.testing.assert_array_equal(result, expected, err_msg=name)
