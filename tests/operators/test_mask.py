"""masked_fill and causal_mask: every dtype and layout, bits that stay, diagonals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
DTYPES = [F32, F16, BF16, np.int64, np.int32, np.int8, np.uint8, np.bool_]


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=3) as rt:
        yield rt


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_and_length(runtime: gpuos.Runtime, dtype: Any) -> None:
    random = np.random.default_rng(0)
    for count in (0, 1, 3, 15, 16, 17, 64, 1000):
        x = random.integers(0, 2, count).astype(dtype)
        mask = random.random(count) < 0.4
        testing.check(runtime, "masked_fill", x, mask, value=1.0)
        if count > 1:
            testing.check(runtime, "masked_fill", x[1:], mask[1:], value=0.0)
            testing.check(runtime, "masked_fill", x[::-2], mask[::-2], value=1.0)


def test_integers_keep_every_bit(runtime: gpuos.Runtime) -> None:
    x, mask = np.zeros(5, np.int64), np.arange(5) > 2
    for value in ((1 << 62) + 1, -(1 << 63), np.int64(-3)):
        testing.check(runtime, "masked_fill", x, mask, value=value)
    testing.check(runtime, "masked_fill", x.astype(np.bool_), mask, value=True)


def test_it_broadcasts_both_ways(runtime: gpuos.Runtime) -> None:
    x = np.random.default_rng(1).standard_normal((2, 1, 5, 16)).astype(F32)
    mask = np.tril(np.ones((5, 16), np.bool_))
    testing.check(runtime, "masked_fill", x, mask, value=-np.inf)
    testing.check(runtime, "masked_fill", x[0, 0, 0], mask, value=np.nan)
    testing.check(runtime, "masked_fill", x, np.array(True), value=0.0)


def test_what_stays_keeps_its_bits_and_torch_agrees(runtime: gpuos.Runtime) -> None:
    torch = pytest.importorskip("torch")
    x = np.array([0x7FA00001, 0x80000000, 0x00000001, 0xFF800000] * 5, np.uint32).view(F32)
    mask = np.arange(20) % 3 == 0
    result = testing.to_host(
        runtime.masked_fill(
            testing.to_device(runtime, x), testing.to_device(runtime, mask), value=-2.5
        ).result()
    )
    wanted = torch.from_numpy(x).masked_fill(torch.from_numpy(mask), -2.5).numpy()
    np.testing.assert_array_equal(result.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("dtype", [F32, F16, np.int8, np.int64])
def test_tiles_cover_all(tiled: gpuos.Runtime, dtype: Any) -> None:
    x = (np.arange(100_003) % 2000).astype(dtype)
    testing.check(tiled, "masked_fill", x, np.arange(100_003) % 7 == 2, value=5.0)
    out = np.zeros((257, 1024), np.bool_ if dtype == np.int8 else F16 if dtype == F16 else F32)
    testing.check(tiled, "causal_mask", out=out, diagonal=3)


def test_in_place(runtime: gpuos.Runtime) -> None:
    x = testing.to_device(runtime, np.arange(40, dtype=F32))
    runtime.masked_fill(x, testing.to_device(runtime, np.arange(40) > 20), value=-1.0, out=x).result()
    assert testing.to_host(x).tolist() == [*range(21), *[-1] * 19]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, np.bool_])
def test_diagonals(runtime: gpuos.Runtime, dtype: Any) -> None:
    for shape in [(5, 16), (2, 3, 9, 64), (16, 7), (1, 1), (4, 0), (0, 4), (3, 33)]:
        for diagonal in (0, 1, -1, -3, 8, 15, 100, -100, 1 << 40, -(1 << 40)):
            testing.check(runtime, "causal_mask", out=np.ones(shape, dtype), diagonal=diagonal)
    for view in (np.ones((6, 20), dtype).T, np.ones((6, 20), dtype)[::-1, ::2]):
        testing.check(runtime, "causal_mask", out=view, value=-5.0)


def test_the_bool_mask_is_that_of_torch(runtime: gpuos.Runtime) -> None:
    torch = pytest.importorskip("torch")
    out = testing.to_device(runtime, np.zeros((6, 10), np.bool_))
    runtime.causal_mask(out=out, diagonal=4).result()
    np.testing.assert_array_equal(testing.to_host(out), torch.ones(6, 10).bool().tril(4).numpy())


def test_refusals_come_before_enqueueing(runtime: gpuos.Runtime) -> None:
    submitted = runtime.stats().submitted
    x, mask = testing.to_device(runtime, np.ones(4, F16)), testing.to_device(runtime, np.ones(4, np.bool_))
    bytes_ = testing.to_device(runtime, np.ones(4, np.uint8))
    for inputs, value, message in [
        ((x, mask), 1e6, r"value=1000000\.0 does not fit float16"),
        ((bytes_, mask), 256, r"does not fit uint8"),
        ((bytes_, mask), 0.5, r"does not fit uint8"),
        ((bytes_, mask), np.nan, r"does not fit uint8"),
    ]:
        with pytest.raises(gpuos.ArgumentError, match=message):
            runtime.masked_fill(*inputs, value=value)
    with pytest.raises(gpuos.DTypeError, match=r"inputs\[1\] has dtype uint8.*bool"):
        runtime.masked_fill(x, bytes_, value=0)
    with pytest.raises(gpuos.ArgumentError, match=r"causal_mask updates out where it lies: pass out="):
        runtime.causal_mask()
    with pytest.raises(gpuos.ArgumentError, match=r"queries, keys"):
        runtime.causal_mask(out=x)
    with pytest.raises(gpuos.DTypeError, match="out has dtype uint8"):
        runtime.causal_mask(out=bytes_.reshape(2, 2))
    assert runtime.stats().submitted == submitted
