"""Reductions: the values that users of this field tripped over, any layout, tiles that add up, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.descriptor import DType
from gpuos_numba.device.operators import TABLE, reduce

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
NAN, INF = np.nan, np.inf
SINGLE = ["sum", "mean", "prod", "amax", "amin", "any", "all", "var", "logsumexp", "argmax", "argmin"]


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=3) as rt:
        yield rt


def run(rt: gpuos.Runtime, name: str, x: Any, **parameters: Any) -> np.ndarray[Any, Any]:
    array = testing.to_device(rt, np.asarray(x))
    return testing.to_host(rt.submit(name, [array], **parameters).result())


# --- cases ---


def test_logsumexp_of_infinities(runtime: gpuos.Runtime) -> None:
    x = np.array([[-INF, -INF], [0, INF], [-INF, 3], [NAN, INF]], F32)
    np.testing.assert_array_equal(run(runtime, "logsumexp", x, dim=1), np.array([-INF, INF, 3, NAN], F32))


@pytest.mark.parametrize("name", ["max", "min", "amax", "amin"])
def test_largest_and_smallest_propagate_nan(runtime: gpuos.Runtime, name: str) -> None:
    for place in range(40):
        x = np.arange(40, dtype=F32)
        x[place] = NAN
        assert np.isnan(run(runtime, name, x))


def test_argmax_returns_the_first_nan_and_among_equals_the_first(runtime: gpuos.Runtime) -> None:
    x = np.zeros((4, 3000), F32)
    x[0, [700, 2000]] = 5
    x[1, [1500, 2900]] = NAN
    x[2, [0, 1]] = -0.0, 0.0
    x[3] = -INF
    assert run(runtime, "argmax", x, dim=1).tolist() == [700, 1500, 0, 0]
    x[0, [700, 2000]] = -5
    assert run(runtime, "argmin", x, dim=1).tolist() == [700, 1500, 0, 0]
    least = np.full(20, np.iinfo(np.int64).min)
    assert run(runtime, "argmax", least) == 0
    assert run(runtime, "argmin", np.full(20, np.iinfo(np.int64).max)) == 0


def test_reductions_of_nothing(runtime: gpuos.Runtime) -> None:
    x = np.zeros((0, 3), F32)
    answers = {"sum": 0, "prod": 1, "mean": NAN, "any": False, "all": True, "var": NAN, "logsumexp": -INF}
    for name, answer in answers.items():
        np.testing.assert_array_equal(run(runtime, name, x), answer)
        np.testing.assert_array_equal(run(runtime, name, x, dim=0), [answer] * 3)
        assert run(runtime, name, x, dim=1).shape == (0,)
    assert np.isnan(run(runtime, "var", np.ones(1, F32)))


@pytest.mark.parametrize("name", ["max", "min", "amax", "amin", "argmax", "argmin"])
def test_largest_of_nothing_is_refused_before_enqueueing(runtime: gpuos.Runtime, name: str) -> None:
    submitted = runtime.stats().submitted
    with pytest.raises(gpuos.ArgumentError, match=r"dim 0 of shape \(0, 3\).*reduce a dim that has elements"):
        run(runtime, name, np.zeros((0, 3), F32), dim=0)
    assert runtime.stats().submitted == submitted
    assert run(runtime, name, np.zeros((0, 3), F32), dim=1).shape == (0,)


def test_a_long_sum_does_not_stop(runtime: gpuos.Runtime, tiled: gpuos.Runtime) -> None:
    ones = testing.to_device(runtime, np.ones(1 << 25, F32))
    for rt in (runtime, tiled):
        assert float(testing.to_host(rt.submit("sum", [ones]).result())) == 33_554_432


def test_a_long_sum_in_one_block_is_right(runtime: gpuos.Runtime) -> None:
    x = np.random.default_rng(1).random((1, 30_000)).astype(F32)  # below the tile rule
    np.testing.assert_allclose(run(runtime, "sum", x, dim=1), x.astype(np.float64).sum(1), rtol=2.5e-7)


def test_sums_of_halves(runtime: gpuos.Runtime) -> None:
    assert run(runtime, "mean", np.full(4096, 60_000, F16)) == 60_000
    assert run(runtime, "sum", np.ones(4096, F16)) == 4096
    assert run(runtime, "sum", np.ones(70_000, F16)) == INF
    assert run(runtime, "sum", np.ones(512, BF16)) == 512


def test_variance_does_not_cancel(runtime: gpuos.Runtime) -> None:
    x = (10_000 + 0.01 * np.random.default_rng(2).standard_normal((3, 5000))).astype(F32)
    exact = x.astype(np.float64).var(axis=1, ddof=1)
    np.testing.assert_allclose(run(runtime, "var", x, dim=1), exact, rtol=1e-6)
    x[:, 0] = 1e6  # what the rest is measured from is an outlier
    exact = x.astype(np.float64).var(axis=1, ddof=1)
    np.testing.assert_allclose(run(runtime, "var", x, dim=1), exact, rtol=1e-6)


def test_integers_widen_and_stay_exact(runtime: gpuos.Runtime) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (np.int8, np.uint8, np.int32, np.int64, np.bool_):
        x = (np.arange(300) % 3).astype(dtype)
        for name in ("sum", "prod", "amax", "amin", "any", "all"):
            result = run(runtime, name, x)
            wanted = getattr(torch, name)(torch.from_numpy(x))
            assert result == wanted.numpy()
            if dtype is not np.uint8 or name not in ("any", "all"):  # there torch keeps uint8
                assert result.dtype == wanted.numpy().dtype, (name, dtype)
    big = np.array([(1 << 24) + 1, 1 << 40, -3], np.int64)
    assert run(runtime, "sum", big) == int(big.sum())
    assert run(runtime, "amax", np.array([(1 << 24) + 1, 1 << 24], np.int32)) == (1 << 24) + 1


# --- as PyTorch, whatever the axes and the layout ---


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", SINGLE)
def test_it_equals_pytorch(runtime: gpuos.Runtime, name: str, dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(3).standard_normal((3, 17, 40)).astype(dtype)
    x[0, 0, 0] = 0
    double = torch.from_numpy(x.astype(np.float64))
    for dim in (None, 0, 1, 2, -1, (0, 2), (1, 2), (0, 1, 2)):
        if isinstance(dim, tuple) and (name.startswith("arg") or name == "prod"):
            continue
        for keepdim in (False, True) if dim is not None else (False,):
            given: dict[str, Any] = {} if dim is None else {"dim": dim, "keepdim": keepdim}
            if name == "logsumexp" and dim is None:
                wanted = torch.logsumexp(double, (0, 1, 2))
            else:
                wanted = getattr(torch, name)(double, **given)
            result = run(runtime, name, x, **given)
            assert result.shape == tuple(wanted.shape)
            rtol = {F32: 5e-6, F16: 2e-3, BF16: 1.6e-2}[dtype]
            np.testing.assert_allclose(
                result.astype(np.float64), wanted.numpy(), rtol=rtol, atol=2e-6, err_msg=f"{name} {dim}"
            )


LAYOUTS = {
    "transposed": lambda x: x.T,
    "every second": lambda x: x[:, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "offset": lambda x: x.reshape(-1)[3:-5].reshape(-1, 8),
    "expanded": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one row of many": lambda x: x[5:6],
    "inner": lambda x: x.reshape(8, 8, 8, 12)[:, 2:5, :, 1:9],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SINGLE)
def test_any_layout(runtime: gpuos.Runtime, name: str, layout: str) -> None:
    values = np.random.default_rng(4).random((64, 96)) + 0.5
    for dtype in (F32, F16) if name in ("mean", "var", "logsumexp", "prod") else (F32, F16, np.int32):
        x = LAYOUTS[layout](values.astype(dtype))
        if name == "prod":
            x = np.minimum(x, 1)
        for dim in (None, *range(x.ndim)):
            if not (name == "prod" and dim is None):
                testing.check(runtime, name, x, dim=dim)


def test_eight_dims_and_odd_strides_of_size_1(runtime: gpuos.Runtime) -> None:
    x = np.random.default_rng(5).random((2, 3, 1, 2, 1, 3, 2, 2)).astype(F32)
    odd = np.lib.stride_tricks.as_strided(x, x.shape, (*x.strides[:2], 12345, *x.strides[3:]))
    for dim in (None, (0, 2, 5), (7, 1), 2):
        testing.check(runtime, "sum", odd, dim=dim)
    with pytest.raises(gpuos.ArgumentError):
        run(runtime, "sum", x.reshape((*x.shape, 1)))


# --- tiles ---


@pytest.mark.parametrize(
    ("shape", "dim", "pieces"),
    [
        ((3, 40_000), 1, True),  # few long rows are split
        ((120_000,), None, True),
        ((3000, 40), 0, True),  # few rows across memory are, too
        ((2000, 33), 1, False),  # many short rows
        ((90, 2000), 1, False),
        ((40, 2000), 0, False),
    ],
)
@pytest.mark.parametrize("name", SINGLE)
def test_tiles_add_up(tiled: gpuos.Runtime, name: str, shape: Any, dim: Any, pieces: bool) -> None:
    x = (1 + 1e-3 * np.random.default_rng(6).standard_normal(shape)).astype(F32)
    axes = reduce.read_axes(name, None if dim is None else (dim,), len(shape))
    rows = reduce.arrange(shape, [tuple(s // 4 for s in x.strides), (0,) * len(shape)], axes)
    tiles, parts = reduce.share(rows.rows, rows.length, reduce.choose_group(rows), 3)
    assert tiles > 1 and (parts > 1) is pieces
    if name == "prod":
        np.testing.assert_allclose(run(tiled, name, x, dim=dim), x.astype(np.float64).prod(dim), rtol=1e-2)
    else:
        testing.check(tiled, name, x, dim=dim)


def test_a_split_argmax_finds_the_first(tiled: gpuos.Runtime) -> None:
    x = np.zeros(200_000, F32)
    x[[1234, 150_000]] = 1
    assert run(tiled, "argmax", x) == 1234
    x[[160_000, 199_999]] = NAN
    assert run(tiled, "argmax", x) == 160_000
    assert run(tiled, "argmin", x) == 160_000


# --- refusals ---


@pytest.mark.parametrize(
    ("name", "x", "parameters", "says"),
    [
        ("sum", np.ones(3, F32), {"dim": 1}, "dim=1 of an input with 1 dims: choose from -1 to 0"),
        ("sum", np.ones((2, 2), F32), {"dim": (0, -2)}, "names a dim twice"),
        ("argmax", np.ones((2, 2), F32), {"dim": (0, 1)}, "give one, or None"),
        ("sum", np.ones(3, F32), {"dim": 1.5}, "dim=1.5 is not"),
    ],
)
def test_wrong_axes_are_refused(
    runtime: gpuos.Runtime, name: str, x: Any, parameters: Any, says: str
) -> None:
    submitted = runtime.stats().submitted
    with pytest.raises(gpuos.ArgumentError, match=re.escape(says)):
        run(runtime, name, x, **parameters)
    assert runtime.stats().submitted == submitted


@pytest.mark.parametrize("name", ["mean", "var", "logsumexp"])
def test_only_floats_have_a_mean(runtime: gpuos.Runtime, name: str) -> None:
    with pytest.raises(gpuos.DTypeError, match=r"int32.*float32 or float16 or bfloat16: convert it first"):
        run(runtime, name, np.ones(3, np.int32))


def test_outputs_that_overlap_are_refused(runtime: gpuos.Runtime) -> None:
    x = testing.to_device(runtime, np.ones((4, 4), F32))
    with pytest.raises(gpuos.ArgumentError, match="overlaps"):
        runtime.submit("sum", [x], out=x[0], dim=0)
    with pytest.raises(gpuos.DTypeError, match="int64"):
        runtime.submit("argmax", [x], out=testing.to_device(runtime, np.ones(4, F32)), dim=0)


# --- what the GPU would run ---


def ptx_of(kernel: Any) -> str:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    return str(cuda_compile.compile_kernel(kernel, cuda_compile.OLDEST))


@pytest.mark.parametrize("kernel", [0, 1], ids=["floats", "integers"])
def test_it_compiles_to_vector_loads_and_no_local_memory(kernel: int) -> None:
    ptx = ptx_of(TABLE["sum"].kernels[kernel])
    assert "ld.global.v2.u64" in ptx
    assert "shfl.sync.bfly" in ptx and "bar.sync" in ptx
    assert not re.search(r"\b(ld|st)\.local|\.local ", ptx)
    assert "max.f32" not in ptx and "min.f32" not in ptx  # they drop NaN
    assert not re.search(r"\b\w+\.f64", ptx)


def test_kernels_of_a_kind_share_one_body() -> None:
    symbols = {kernel.symbol for name in (*SINGLE, "max", "min") for kernel in TABLE[name].kernels}
    assert symbols == {"gpuos_reduce_f32", "gpuos_reduce_i64"}
    assert TABLE["max"].kernels == TABLE["amax"].kernels
    assert DType.BF16 in TABLE["sum"].dtypes
