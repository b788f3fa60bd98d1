"""Rotary embedding: both pairings, angles far out, tables, any layout, in place, tiles."""

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

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
NAN, INF = np.nan, np.inf


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=3) as rt:
        yield rt


def draw(*shape: int, seed: int = 0, dtype: Any = F32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def run(rt: gpuos.Runtime, *inputs: Any, **parameters: Any) -> np.ndarray[Any, Any]:
    arrays = [testing.to_device(rt, np.asarray(x)) for x in inputs]
    return testing.to_host(rt.rope(*arrays, **parameters).result())


def torch_rope(x: Any, positions: Any, interleaved: bool) -> Any:
    """As the Llama and GPT-J models of transformers compute it, in f64."""
    torch = pytest.importorskip("torch")
    x, width = torch.from_numpy(x).double(), x.shape[-1]
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, width, 2).double() / width)
    angle = torch.from_numpy(positions)[:, None].double() * frequencies
    if interleaved:
        cos, sin = (f(angle).repeat_interleave(2, -1)[:, None] for f in (torch.cos, torch.sin))
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        rotated = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
    return (x * cos + rotated * sin).numpy()


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_those_of_llama_and_of_gpt_j(runtime: gpuos.Runtime, interleaved: bool) -> None:
    x, positions = draw(7, 4, 64), np.array([3, 0, 1, 1, 100, 4096, 2])
    wanted = torch_rope(x, positions, interleaved)
    np.testing.assert_allclose(run(runtime, x, positions, interleaved=interleaved), wanted, atol=1e-6)
    assert not np.allclose(run(runtime, x, positions, interleaved=not interleaved), wanted, atol=1e-2)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_angles_are_right_at_any_position(runtime: gpuos.Runtime, base: float) -> None:
    x = np.zeros((6, 1, 128), F32)
    x[..., :64] = 1  # the result is the cosine and the sine
    positions = np.array([1_000_000, 1 << 20, (1 << 24) + 1, (1 << 31) - 1, 12345, -1_000_000])
    angle = positions[:, None].astype(np.longdouble) * np.longdouble(base) ** (-np.arange(64) / 64)
    wanted = np.concatenate([np.cos(angle), np.sin(angle)], -1)[:, None].astype(np.float64)
    result = run(runtime, x, positions, base=base)
    np.testing.assert_allclose(result[[0, 1, 2, 4, 5]], wanted[[0, 1, 2, 4, 5]], atol=3e-7)
    np.testing.assert_allclose(result, wanted, atol=2e-6)  # of the spec's own angle, 1e-7 of them


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_widths_and_parts_of_them(runtime: gpuos.Runtime, dtype: Any, interleaved: bool) -> None:
    for width, rotary in [(128, 128), (128, 64), (80, 80), (96, 32), (80, 20), (64, 0), (6, 2), (100, 98)]:
        for index in (np.int32, np.int64):
            x = draw(3, 5, width, dtype=dtype)
            positions = np.array([2, 0, 70000], index)
            result = testing.check(runtime, "rope", x, positions, rotary_dim=rotary, interleaved=interleaved)
            np.testing.assert_array_equal(result[..., rotary:], x[..., rotary:])


def test_what_is_not_rotated_keeps_its_bits(runtime: gpuos.Runtime) -> None:
    for dtype, bits, pattern in [(F16, np.uint16, 0x7D01), (F32, np.uint32, 0x7FA00001)]:
        for width in (32, 30):
            x = np.full((2, 3, width), pattern, bits).view(dtype)
            result = run(runtime, x, np.arange(2), rotary_dim=16)
            assert (result.view(bits)[..., 16:] == pattern).all()


def test_special_values(runtime: gpuos.Runtime) -> None:
    x = draw(4, 2, 32)
    x[0, 0, 0], x[1, 0, 3], x[2, 1, 17], x[3, 1, 4] = NAN, INF, -INF, -0.0
    testing.check(runtime, "rope", x, np.array([0, 1, 2, 3]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_any_layout(runtime: gpuos.Runtime, interleaved: bool, dtype: Any) -> None:
    qkv = draw(2, 9, 8 * 32, dtype=dtype)  # batch, tokens, 4 q heads, 2 k heads, 2 v heads
    positions = np.arange(18).reshape(2, 9)
    views = [
        qkv[..., :128].reshape(2, 9, 4, 32),
        qkv[..., 128:192].reshape(2, 9, 2, 32),
        qkv.reshape(2, 9, 8, 32)[..., 4:6, :],
        qkv.reshape(2, 9, 8, 32)[..., ::2],
        qkv.reshape(2, 9, 8, 32)[..., ::-1, ::-1],
        np.swapaxes(draw(2, 4, 9, 32, dtype=dtype), 1, 2),
        np.broadcast_to(qkv[:1].reshape(1, 9, 8, 32), (2, 9, 8, 32)),
    ]
    for view in views:
        for where in (positions, positions[::-1], positions[0], np.int32(7)):
            testing.check(runtime, "rope", view, np.asarray(where), interleaved=interleaved)
    testing.check(runtime, "rope", draw(3, 16, dtype=dtype), np.array(11))  # one token


def test_in_place_and_into_a_view(runtime: gpuos.Runtime) -> None:
    x, positions = draw(5, 4, 64, dtype=F16), np.arange(5)
    wanted = run(runtime, x, positions)
    where = testing.to_device(runtime, positions)
    for interleaved in (False, True):
        wanted = run(runtime, x, positions, interleaved=interleaved)
        array = testing.to_device(runtime, x.copy())
        runtime.rope(array, where, out=array, interleaved=interleaved).result()
        np.testing.assert_array_equal(testing.to_host(array), wanted)
        wide = testing.to_device(runtime, np.zeros((5, 6, 64), F16))
        runtime.rope(testing.to_device(runtime, x), where, out=wide[:, 1:5], interleaved=interleaved).result()
        np.testing.assert_array_equal(testing.to_host(wide)[:, 1:5], wanted)
        assert not testing.to_host(wide)[:, ::5].any()


def test_tables_in_place_of_a_base(runtime: gpuos.Runtime) -> None:
    x, positions = draw(4, 3, 64), np.array([9, 0, 9, 3], np.int32)
    angle = np.arange(10)[:, None] * 10000.0 ** (-np.arange(32) / 32)
    cos, sin = np.cos(angle).astype(F32), np.sin(angle).astype(F32)
    np.testing.assert_allclose(run(runtime, x, positions, cos, sin), run(runtime, x, positions), atol=1e-6)
    testing.check(runtime, "rope", x, positions, cos.astype(F16)[:, ::2], sin.astype(BF16)[:, ::2])
    testing.check(runtime, "rope", x, positions, cos[:, 1:], sin[:, 1:], interleaved=True)


@pytest.mark.parametrize("bad", [10, -1, 1 << 40])
def test_a_position_outside_of_the_tables_fails_the_task(runtime: gpuos.Runtime, bad: int) -> None:
    x, positions = draw(4, 3, 64), np.array([9, 0, bad, 3])
    cos = np.ones((10, 32), F32)
    out = testing.to_device(runtime, np.zeros_like(x))
    arrays = [testing.to_device(runtime, each) for each in (x, positions, cos, np.zeros_like(cos))]
    with pytest.raises(gpuos.TaskError) as error:
        runtime.rope(*arrays, out=out).result()
    assert error.value.status == Status.INDEX_OUT_OF_RANGE
    result = testing.to_host(out)
    np.testing.assert_array_equal(result[[0, 1, 3]], x[[0, 1, 3]])
    assert np.isnan(result[2]).all()


@pytest.mark.parametrize("shape", [(300, 2, 64), (3, 50, 4, 80), (40, 33, 32), (2, 1, 4096)])
def test_tiles_cover_all_tokens(tiled: gpuos.Runtime, shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    positions = np.random.default_rng(1).integers(0, 1000, shape[:-2])
    testing.check(tiled, "rope", x, positions)
    testing.check(tiled, "rope", x, positions, interleaved=True)


def test_nothing_to_do(runtime: gpuos.Runtime) -> None:
    for shape in [(0, 4, 32), (3, 0, 32), (3, 4, 0)]:
        assert run(runtime, np.zeros(shape, F32), np.zeros(shape[0], np.int64)).shape == shape


def test_refusals_come_before_enqueueing(runtime: gpuos.Runtime) -> None:
    x, positions, tables = np.ones((2, 3, 8), F32), np.arange(2), [np.ones((5, 4), F32)] * 2
    submitted = runtime.stats().submitted
    for inputs, parameters, message in [
        ((x, positions), {"rotary_dim": 3}, "rotary_dim is 3"),
        ((x, positions), {"rotary_dim": 10}, "head_dim of 8"),
        ((x, positions), {"base": 0.5}, "base=0.5"),
        ((x, np.arange(3)), {}, r"\(3,\) does not broadcast to \(2,\)"),
        ((x, np.zeros((2, 3), int)), {}, r"one for each token, shape \(2,\)"),
        ((x[0, 0], positions), {}, "heads, head_dim"),
        ((x, positions, tables[0]), {}, "come together"),
        ((x, positions, *tables), {"rotary_dim": 6}, r"\[positions, 3\]"),
    ]:
        with pytest.raises(gpuos.ArgumentError, match=message):
            run(runtime, *inputs, **parameters)
    with pytest.raises(gpuos.DTypeError, match=r"inputs\[1\] has dtype float32"):
        run(runtime, x, np.ones(2, F32))
    with pytest.raises(gpuos.DTypeError, match=r"inputs\[0\] has dtype int32"):
        run(runtime, x.astype(np.int32), positions)
    assert runtime.stats().submitted == submitted


def test_it_compiles_to_vector_accesses_and_no_local_memory() -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptx = cuda_compile.compile_kernel(TABLE["rope"].kernels[0], cuda_compile.OLDEST)
    assert "ld.global.v2.u64" in ptx and "st.global.v2.u64" in ptx
    assert not re.search(r"\b(ld|st)\.local|\.local |sin\.approx", ptx)
