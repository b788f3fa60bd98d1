"""Softmax: infinities, halves, any dim and layout, rows of every length, tiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.device.operators import TABLE, softmax
from gpuos_numba.device.operators.axes import arrange

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
NAN, INF = np.nan, np.inf
NAMES = ["softmax", "log_softmax"]


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=3) as rt:
        yield rt


def run(rt: gpuos.Runtime, name: str, x: Any, **parameters: Any) -> np.ndarray[Any, Any]:
    array = testing.to_device(rt, np.asarray(x))
    return testing.to_host(rt.submit(name, [array], **parameters).result())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [5, 8, 16, 40])
def test_infinities_are_as_in_pytorch(runtime: gpuos.Runtime, name: str, length: int) -> None:
    torch = pytest.importorskip("torch")
    x = np.zeros((6, length), F32)
    x[0] = -INF
    x[1, 1] = INF
    x[2, 2] = NAN
    x[3, :4] = -INF
    x[4, 4:] = -INF
    x[5, 3] = 1e4
    wanted = getattr(torch, name)(torch.from_numpy(x), -1).numpy()
    result = run(runtime, name, x)
    np.testing.assert_allclose(result, wanted, rtol=1e-6)
    assert np.isnan(result[0]).all() and np.isfinite(result[5]).all()


def test_the_logarithm_reaches_far_down(runtime: gpuos.Runtime) -> None:
    np.testing.assert_array_equal(run(runtime, "log_softmax", np.array([1e4, 0], F32)), [0, -1e4])


def test_softmax_of_4096_equal_halves(runtime: gpuos.Runtime) -> None:
    assert (run(runtime, "softmax", np.zeros(4096, F16)) == 2.0**-12).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_length(runtime: gpuos.Runtime, name: str, dtype: Any) -> None:
    random = np.random.default_rng(1)
    for length in (1, 2, 7, 8, 9, 16, 24, 33, 512, 520, 1024, 1000, 4096, 4104, 5000):
        for rows in (1, 3, 9):
            testing.check(runtime, name, (3 * random.standard_normal((rows, length))).astype(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_any_dim_and_layout(runtime: gpuos.Runtime, name: str) -> None:
    x = np.random.default_rng(2).standard_normal((6, 5, 10, 8)).astype(F32)
    views = [x, x.T, x[:, ::2], x[::-1], x[..., ::-1], np.broadcast_to(x[:1], x.shape), x[2, 3], x[0, 0, 0]]
    for view in views:
        for dim in range(-view.ndim, view.ndim):
            testing.check(runtime, name, view, dim=dim)
    testing.check(runtime, name, np.array(3, F32), dim=0)
    assert run(runtime, name, np.zeros((0, 4), F32)).shape == (0, 4)
    assert run(runtime, name, np.zeros((4, 0), F32)).shape == (4, 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_output_of_any_layout_and_in_place(runtime: gpuos.Runtime, name: str) -> None:
    x = np.random.default_rng(3).standard_normal((33, 48)).astype(F32)
    for dim in (0, 1):
        wanted = TABLE[name].spec(x, dim)  # type: ignore[misc]
        array = testing.to_device(runtime, x.copy())
        runtime.submit(name, [array], out=array, dim=dim).result()
        np.testing.assert_allclose(testing.to_host(array), wanted, rtol=2e-6, atol=1e-6)
        out = testing.to_device(runtime, np.zeros((48, 33), F32))
        runtime.submit(name, [testing.to_device(runtime, x)], out=out.T, dim=dim).result()
        np.testing.assert_allclose(testing.to_host(out).T, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dim"), [((700, 40), 1), ((9, 5000), 1), ((40, 700), 0), ((21, 9, 100), 1)]
)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_cover_all_rows(tiled: gpuos.Runtime, name: str, shape: Any, dim: int) -> None:
    x = np.random.default_rng(4).standard_normal(shape).astype(F32)
    rows = arrange(shape, [tuple(s // 4 for s in x.strides)] * 2, (dim,))
    assert softmax.share_rows(rows, softmax.choose_wide(rows), 3) > 1
    testing.check(tiled, name, x, dim=dim)


@pytest.mark.parametrize("name", NAMES)
def test_refusals_come_before_enqueueing(runtime: gpuos.Runtime, name: str) -> None:
    submitted = runtime.stats().submitted
    with pytest.raises(gpuos.ArgumentError, match="dim=2 of an input with 2 dims: choose from -2 to 1"):
        run(runtime, name, np.ones((2, 2), F32), dim=2)
    with pytest.raises(gpuos.DTypeError, match=r"int32.*convert it first"):
        run(runtime, name, np.ones((2, 2), np.int32))
    x = testing.to_device(runtime, np.ones((5, 8), F32))
    with pytest.raises(gpuos.ArgumentError, match="overlaps"):
        runtime.submit(name, [x[:-1]], out=x[1:])
    assert runtime.stats().submitted == submitted


def test_it_compiles_to_vector_accesses_and_no_local_memory() -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptx = cuda_compile.compile_kernel(TABLE["softmax"].kernels[0], cuda_compile.OLDEST)
    assert "ld.global.v2.u64" in ptx and "st.global.v4.f32" in ptx
    assert not re.search(r"\b(ld|st)\.local|\.local ", ptx)
    assert "max.f32" not in ptx
