"""Movement: every dtype moves as it is, along any dim and layout; indices out of range touch nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.descriptor import Status
from gpuos_numba.device.operators import TABLE

F16, F32, BF16, I32, I64 = np.float16, np.float32, ml_dtypes.bfloat16, np.int32, np.int64
DTYPES = [F32, F16, BF16, I64, I32, np.int8, np.uint8, np.bool_]


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=3) as rt:
        yield rt


def draw(*shape: int, dtype: Any = F32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def run(rt: gpuos.Runtime, name: str, *inputs: Any, **parameters: Any) -> np.ndarray[Any, Any]:
    arrays = [testing.to_device(rt, np.asarray(x)) for x in inputs]
    return testing.to_host(rt.submit(name, arrays, **parameters).result())


# --- concat ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_concat_of_two_to_four(runtime: gpuos.Runtime, dtype: Any) -> None:
    for dim in (0, 1, 2, -1):
        for extents in [(3, 4), (0, 5, 0), (16, 32, 16, 64), (1, 2, 3, 4)]:
            for side in (5, 16):
                arrays = []
                for seed, extent in enumerate(extents):
                    shape = [side, 3, 16]
                    shape[dim] = extent
                    arrays.append(draw(*shape, dtype=dtype, seed=seed))
                testing.check(runtime, "concat", *arrays, dim=dim)


def test_concat_of_views(runtime: gpuos.Runtime) -> None:
    x = draw(4, 6, 32)
    for view in (x[..., ::-1], x[:, ::2].repeat(2, 1), x.swapaxes(0, 1)[:4], np.broadcast_to(x[:1], x.shape)):
        for dim in (0, 1, 2):
            if all(a == b for d, (a, b) in enumerate(zip(view.shape, x.shape, strict=True)) if d != dim):
                testing.check(runtime, "concat", view, x, view, dim=dim)
    cache = draw(2, 3, 8, 16)  # a cache of length 5 of 8 that grows by a token
    testing.check(runtime, "concat", cache[:, :, :5], draw(2, 3, 1, 16, seed=1), dim=2)


def test_concat_refuses(runtime: gpuos.Runtime) -> None:
    with pytest.raises(gpuos.ArgumentError, match="may differ in dim 0 alone"):
        run(runtime, "concat", draw(2, 3), draw(2, 4))
    with pytest.raises(gpuos.DTypeError, match=r"inputs\[1\] has dtype float16.*float32"):
        run(runtime, "concat", draw(2, 3), draw(2, 3, dtype=F16))
    with pytest.raises(gpuos.ArgumentError, match="takes 2 to 4"):
        run(runtime, "concat", draw(2))
    with pytest.raises(gpuos.DTypeError, match="float64"):
        run(runtime, "concat", draw(2, dtype=np.float64), draw(2, dtype=np.float64))


# --- slices ---


@pytest.mark.parametrize("dtype", [F32, F16, np.int8, I64])
def test_slices(runtime: gpuos.Runtime, dtype: Any) -> None:
    x = draw(6, 5, 48, dtype=dtype)
    for view in (x, x[::-1], x[..., ::2], x.T, x[1:, :, 16:]):
        for dim in (0, 1, 2):
            for start, stop, step in [
                (0, None, 1),
                (1, 4, 1),
                (-3, -1, 1),
                (0, None, 2),
                (4, 2, 1),
                (1, 99, 3),
            ]:
                testing.check(runtime, "slice_copy", view, dim=dim, start=start, stop=stop, step=step)
    testing.check(runtime, "slice_copy", draw(64, dtype=dtype), dim=0, start=16, stop=48)
    with pytest.raises(gpuos.ArgumentError, match="step=-1"):
        run(runtime, "slice_copy", x, dim=0, start=0, step=-1)


# --- indices ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [I32, I64])
def test_rows_by_index(runtime: gpuos.Runtime, dtype: Any, kind: Any) -> None:
    for width in (1, 7, 16, 64, 1000):
        weight = draw(11, width, dtype=dtype)
        index = draw(2, 9, dtype=kind, seed=3) % 11
        testing.check(runtime, "embedding", weight, index.astype(kind))
        testing.check(runtime, "embedding", weight, index[0, :1])
        testing.check(runtime, "index_select", weight, index[1])
        testing.check(runtime, "index_select", weight.T, index[1], dim=1)
        testing.check(runtime, "index_select", weight.T, index[1, ::-2], dim=-1)
    cache = draw(2, 3, 10, 16, dtype=dtype)
    for dim in range(4):
        testing.check(
            runtime, "index_select", cache, np.array([9, 0, 0, 1], kind) % cache.shape[dim], dim=dim
        )
    testing.check(runtime, "index_select", cache[..., ::2], np.array(2, kind), dim=1)


def test_gather_and_scatter_are_those_of_torch(runtime: gpuos.Runtime) -> None:
    torch = pytest.importorskip("torch")
    x, index = draw(5, 6, 7), draw(4, 6, 3, dtype=I64, seed=1)
    for dim in range(-3, 3):
        smaller = index % x.shape[dim]
        wanted = torch.gather(torch.from_numpy(x), dim, torch.from_numpy(smaller)).numpy()
        np.testing.assert_array_equal(run(runtime, "gather", x, smaller, dim=dim), wanted)
        testing.check(runtime, "gather", x[:, ::-1], smaller[..., ::2].astype(I32), dim=dim)
        for dtype in (F32, F16, np.int8, np.bool_, np.uint8, I32, I64):
            out, source = draw(5, 6, 7, dtype=dtype), draw(5, 6, 7, dtype=dtype, seed=2)
            result = testing.check(runtime, "scatter_add", smaller, source, out=out, dim=dim)
            wanted = torch.from_numpy(out).scatter_add_(
                dim, torch.from_numpy(smaller), torch.from_numpy(source)
            )
            np.testing.assert_array_equal(result, wanted.numpy())


def test_numbers_without_dims(runtime: gpuos.Runtime) -> None:
    x, zero = np.array(3, F32), np.array(0)
    testing.check(runtime, "gather", x, zero, dim=0)
    testing.check(runtime, "scatter_add", zero, x, out=np.array(4, F32), dim=0)


@pytest.mark.parametrize("bad", [5, -1, -(1 << 40), (1 << 32) + 1])
@pytest.mark.parametrize("width", [3, 16])
def test_an_index_out_of_range_fails_and_touches_nothing(
    runtime: gpuos.Runtime, bad: int, width: int
) -> None:
    x, index = draw(5, width), np.array([4, bad, 0])
    out = testing.to_device(runtime, np.full((3, width), -1, F32))
    arrays = [testing.to_device(runtime, each) for each in (x, index)]
    for name, parameters in [("embedding", {}), ("index_select", {"dim": 0})]:
        with pytest.raises(gpuos.TaskError) as error:
            runtime.submit(name, arrays, out=out, **parameters).result()
        assert error.value.status == Status.INDEX_OUT_OF_RANGE
        np.testing.assert_array_equal(testing.to_host(out), np.stack([x[4], np.full(width, -1), x[0]]))
    wide = testing.to_device(runtime, np.broadcast_to(index[:, None], (3, width)).copy())
    with pytest.raises(gpuos.TaskError):
        runtime.gather(arrays[0], wide, dim=0, out=out).result()
    np.testing.assert_array_equal(testing.to_host(out)[1], np.full(width, -1))
    memory = testing.to_device(runtime, np.zeros((9, width), F32))
    with pytest.raises(gpuos.TaskError):
        runtime.scatter_add(
            wide, testing.to_device(runtime, np.ones((3, width), F32)), out=memory[2:7]
        ).result()
    wanted = np.zeros((9, width), F32)
    wanted[[6, 2]] = 1
    np.testing.assert_array_equal(testing.to_host(memory), wanted)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, np.uint8, I64])
def test_tiles_cover_all(tiled: gpuos.Runtime, dtype: Any) -> None:
    x = draw(300, 4, 64, dtype=dtype)
    testing.check(tiled, "concat", x, x[:, :3], dim=1)
    testing.check(tiled, "concat", x[..., 1:], x[..., :3], dim=2)
    testing.check(tiled, "slice_copy", x, dim=1, start=1, stop=None)
    testing.check(tiled, "slice_copy", x, dim=2, start=1, stop=None)
    index = draw(500, dtype=I64, seed=1)
    testing.check(tiled, "index_select", x, index)
    testing.check(tiled, "index_select", x.reshape(4, 300, 64), index, dim=1)
    testing.check(tiled, "gather", x[..., 1:], np.broadcast_to(index[:, None, None], (500, 4, 63)), dim=0)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, I32, I64, np.uint8])
def test_many_tiles_add_to_the_same_elements(tiled: gpuos.Runtime, dtype: Any) -> None:
    index = np.zeros(100_000, I64)
    index[::2] = 1
    source = np.zeros(100_000, dtype)
    source[:200] = 1  # what f16 and u8 count exactly
    source[-50:] = 1
    testing.check(tiled, "scatter_add", index, source, out=np.zeros(3, dtype))


def test_outputs_that_are_updated_are_checked(runtime: gpuos.Runtime) -> None:
    submitted = runtime.stats().submitted
    index, source, out = (
        testing.to_device(runtime, each) for each in (np.zeros(3, I64), np.ones(3, F32), np.zeros(4, F32))
    )
    with pytest.raises(gpuos.ArgumentError, match="updates out where it lies: pass out="):
        runtime.scatter_add(index, source)
    with pytest.raises(gpuos.ArgumentError, match="same memory as inputs"):
        runtime.scatter_add(index, source, out=source)
    with pytest.raises(gpuos.ArgumentError, match=r"overlaps inputs\[1\] in part"):
        runtime.scatter_add(index, out[:3], out=out)
    with pytest.raises(gpuos.ArgumentError, match="fit into it"):
        runtime.scatter_add(index, source[:2], out=out)
    with pytest.raises(gpuos.DTypeError, match=r"inputs\[1\] has dtype int64"):
        runtime.scatter_add(index, index, out=out)
    if runtime.machine == "cpu":
        with pytest.raises(gpuos.ArgumentError, match="overlaps itself"):
            runtime.scatter_add(index, source, out=np.lib.stride_tricks.as_strided(out, (4,), (0,)))
        out.flags.writeable = False
        with pytest.raises(gpuos.ArgumentError, match="read-only"):
            runtime.scatter_add(index, source, out=out)
    assert runtime.stats().submitted == submitted


@pytest.mark.parametrize("name", ["concat", "gather", "scatter_add"])
def test_it_compiles_without_local_memory(name: str) -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptx = cuda_compile.compile_kernel(TABLE[name].kernels[0], cuda_compile.OLDEST)
    assert not re.search(r"\b(ld|st)\.local|\.local ", ptx)
    if name == "scatter_add":
        assert "red.relaxed.gpu.global.add.f32" in ptx and "atom.relaxed.gpu.global.cas.b32" in ptx
    else:
        assert "ld.global.v2.u64" in ptx and "st.global.v2.u64" in ptx
