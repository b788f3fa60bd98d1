"""Normalisations: rows far from zero, constant rows, weights of other dtypes, the fused sums, any layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.device.operators import TABLE

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
NAMES = ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"]


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=3) as rt:
        yield rt


def run(rt: gpuos.Runtime, name: str, *inputs: Any, **parameters: Any) -> Any:
    arrays = [None if x is None else testing.to_device(rt, x) for x in inputs]
    return rt.submit(name, arrays, **parameters).result()


def inputs_of(name: str, x: Any, random: Any, dims: int = 1, dtype: Any = F32) -> list[Any]:
    """x, a residual where the operator adds one, a weight, and a bias where it takes one."""
    inputs = [x]
    if name.startswith("add"):
        inputs.append(random.standard_normal(x.shape).astype(x.dtype))
    shape = x.shape[x.ndim - dims :]
    inputs.append(random.standard_normal(shape).astype(dtype))
    if "layer" in name:
        inputs.append(random.standard_normal(shape).astype(dtype))
    return inputs


@pytest.mark.parametrize("length", [16, 1000, 4096, 5000])
def test_a_row_far_from_zero(runtime: gpuos.Runtime, length: int) -> None:
    x = (10_000 + 0.01 * np.random.default_rng(1).standard_normal((3, length))).astype(F32)
    result = testing.to_host(run(runtime, "layer_norm", x))
    np.testing.assert_allclose(result, TABLE["layer_norm"].spec(x), atol=1e-3)  # type: ignore[misc]


@pytest.mark.parametrize("length", [7, 16, 300])
def test_a_constant_row_gives_the_bias(runtime: gpuos.Runtime, length: int) -> None:
    weight, bias = np.full(length, 3, F32), np.arange(length, dtype=F32)
    for value in (0.0, 1.0, 0.1, 12345.678):
        result = run(runtime, "layer_norm", np.full((2, length), value, F32), weight, bias)
        np.testing.assert_allclose(testing.to_host(result), np.stack([bias, bias]), atol=1e-5)


def test_alternating_halves(runtime: gpuos.Runtime) -> None:
    x = np.where(np.arange(2048) % 2, -200, 200).astype(F16)
    result = testing.to_host(run(runtime, "layer_norm", x))
    np.testing.assert_array_equal(result, np.sign(x))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_length(runtime: gpuos.Runtime, name: str, dtype: Any) -> None:
    random = np.random.default_rng(2)
    for length in (1, 2, 7, 8, 9, 16, 24, 33, 512, 520, 1000, 1024, 4096, 4104):
        for rows in (1, 9):
            x = random.standard_normal((rows, length)).astype(dtype)
            testing.check(runtime, name, *inputs_of(name, x, random, dtype=dtype))
            testing.check(runtime, name, *inputs_of(name, x, random))  # weights in f32


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_it_equals_pytorch(runtime: gpuos.Runtime, name: str) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(3)
    x = random.standard_normal((3, 4, 5, 8)).astype(F32)
    for dims in (1, 2, 3, 4):
        inputs = inputs_of(name, x, random, dims)
        tensors = [torch.from_numpy(each).double() for each in inputs]
        function = getattr(torch.nn.functional, name)
        wanted = function(tensors[0], x.shape[4 - dims :], *tensors[1:], eps=1e-3).numpy()
        result = testing.to_host(run(runtime, name, *inputs, eps=1e-3, normalized_dims=dims))
        np.testing.assert_allclose(result, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_weights_may_be_left_out(runtime: gpuos.Runtime, name: str) -> None:
    random = np.random.default_rng(4)
    for length in (9, 16):
        inputs = inputs_of(name, random.standard_normal((2, length)).astype(F32), random)
        first = 1 + name.startswith("add")
        testing.check(runtime, name, *inputs[:first])
        if "layer" in name:
            testing.check(runtime, name, *inputs[:first], None, inputs[-1])
            testing.check(runtime, name, *inputs[:first], inputs[first], None)


@pytest.mark.parametrize("name", NAMES)
def test_any_layout(runtime: gpuos.Runtime, name: str) -> None:
    random = np.random.default_rng(5)
    x = random.standard_normal((6, 4, 10, 8)).astype(F32)
    for view in (
        x,
        x.T,
        x[:, ::2],
        x[::-1],
        x[..., ::-1],
        np.broadcast_to(x[:1], x.shape),
        x[:, :, 1:9, 2:6],
    ):
        for dims in (1, 2, 4):
            inputs = inputs_of(name, view, random, dims)
            testing.check(runtime, name, *inputs, normalized_dims=dims)
            inputs[-1] = np.ascontiguousarray(inputs[-1].T).T  # a weight that is walked
            testing.check(runtime, name, *inputs, normalized_dims=dims)
    for shape in ((0, 4), (4, 0)):
        testing.check(runtime, name, *inputs_of(name, np.zeros(shape, F32), random))


@pytest.mark.parametrize("length", [16, 40, 4096])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_the_sum_is_rounded_once_and_may_replace_its_parts(
    runtime: gpuos.Runtime, name: str, length: int
) -> None:
    random = np.random.default_rng(6)
    x = random.standard_normal((5, length)).astype(BF16)
    inputs = inputs_of(name, x, random, dtype=BF16)
    normal, total = (testing.to_host(each) for each in run(runtime, name, *inputs))
    np.testing.assert_array_equal(total, (x.astype(F32) + inputs[1].astype(F32)).astype(BF16))
    arrays = [testing.to_device(runtime, each.copy()) for each in inputs]
    runtime.submit(name, arrays, out=(arrays[0], arrays[1])).result()
    np.testing.assert_array_equal(testing.to_host(arrays[0]), normal)
    np.testing.assert_array_equal(testing.to_host(arrays[1]), total)
    arrays = [testing.to_device(runtime, each.copy()) for each in inputs]
    runtime.submit(name, arrays, out=(arrays[1], arrays[0])).result()
    np.testing.assert_array_equal(testing.to_host(arrays[1]), normal)
    np.testing.assert_array_equal(testing.to_host(arrays[0]), total)


def test_a_residual_stream_in_f32(runtime: gpuos.Runtime) -> None:
    random = np.random.default_rng(7)
    x, residual = random.standard_normal((3, 24)).astype(BF16), random.standard_normal((3, 24)).astype(F32)
    normal, total = testing.check(runtime, "add_rms_norm", x, residual)
    assert normal.dtype == BF16 and total.dtype == F32


@pytest.mark.parametrize("name", NAMES)
def test_tiles_cover_all_rows(tiled: gpuos.Runtime, name: str) -> None:
    random = np.random.default_rng(8)
    for shape in ((700, 40), (9, 5000), (45, 504)):
        testing.check(tiled, name, *inputs_of(name, random.standard_normal(shape).astype(F32), random))


@pytest.mark.parametrize("name", NAMES)
def test_refusals_come_before_enqueueing(runtime: gpuos.Runtime, name: str) -> None:
    submitted = runtime.stats().submitted
    x, random = np.ones((2, 8), F32), np.random.default_rng(9)
    inputs = inputs_of(name, x, random)
    for dims in (0, 3):
        with pytest.raises(gpuos.ArgumentError, match=f"normalized_dims={dims}.*choose from 1 to 2"):
            run(runtime, name, *inputs, normalized_dims=dims)
    with pytest.raises(gpuos.ArgumentError, match=r"has shape \(7,\).*need \(8,\): reshape or expand it"):
        run(runtime, name, *inputs[:-1], np.ones(7, F32))
    with pytest.raises(gpuos.DTypeError, match=r"(weight|bias)\) has dtype int32.*convert it first"):
        run(runtime, name, *inputs[:-1], np.ones(8, np.int32))
    weight = testing.to_device(runtime, np.ones((1, 8), F32))
    arrays = [testing.to_device(runtime, each) for each in inputs]
    outs = (weight, None) if name.startswith("add") else weight
    arrays[0] = arrays[0][:1]
    if name.startswith("add"):
        arrays[1] = arrays[1][:1]
    arrays[-1] = weight[0]
    with pytest.raises(gpuos.ArgumentError, match=r"same memory|overlaps"):
        runtime.submit(name, arrays, out=outs)
    assert runtime.stats().submitted == submitted


def test_it_compiles_to_vector_accesses_and_no_local_memory() -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptx = cuda_compile.compile_kernel(TABLE["layer_norm"].kernels[0], cuda_compile.OLDEST)
    assert "ld.global.v2.u64" in ptx and "st.global.v4.f32" in ptx
    assert not re.search(r"\b(ld|st)\.local|\.local ", ptx)
    assert not re.search(r"\b\w+\.f64", ptx)
