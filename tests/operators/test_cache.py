"""KV caches: paged and contiguous, any layout; skipped and bad places touch nothing; codes and prefixes."""

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
NAN, INF = np.nan, np.inf


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=3) as rt:
        yield rt


def draw(*shape: int, dtype: Any = F32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(-100, 100, shape).astype(dtype)


def run(rt: gpuos.Runtime, name: str, *inputs: Any, **parameters: Any) -> Any:
    result = rt.submit(name, [testing.to_device(rt, np.asarray(x)) for x in inputs], **parameters).result()
    if isinstance(result, tuple):
        return tuple(testing.to_host(each) for each in result)
    return testing.to_host(result)


# --- storing ---


@pytest.mark.parametrize("dtype", [F32, F16, BF16, np.int8])
@pytest.mark.parametrize("kind", [I32, I64])
def test_tokens_go_to_their_slots(runtime: gpuos.Runtime, dtype: Any, kind: Any) -> None:
    for heads, width in [(1, 1), (3, 5), (2, 16), (8, 64), (32, 128)]:
        out = (draw(5, 4, heads, width, dtype=dtype, seed=1), draw(5, 4, heads, width, dtype=dtype, seed=2))
        for slots in ([], [7], [-1], [19, 0, -1, 3, 4, -1, 12]):
            k, v = (draw(len(slots), heads, width, dtype=dtype, seed=seed) for seed in (3, 4))
            testing.check(runtime, "kv_update", k, v, np.array(slots, kind), out=out)


def test_paged_caches_of_any_layout(runtime: gpuos.Runtime) -> None:
    slots = np.array([9, -1, 2, 11, 0])
    both = draw(3, 2, 4, 2, 16, dtype=F16)  # k and v of a block side by side
    heads_first = draw(3, 2, 4, 16, dtype=F16).swapaxes(1, 2)
    qkv = draw(5, 8, 16, dtype=F16, seed=1)
    for k, v in [(qkv[:, 4:6], qkv[:, 6:8]), (qkv[::-1, :2], qkv[:, 1::-1]), (qkv[:, ::4], qkv[:, 1::4])]:
        testing.check(runtime, "kv_update", k, v, slots, out=(both[:, 0], both[:, 1]))
        testing.check(runtime, "kv_update", k, v, slots[::-1], out=(heads_first, heads_first.copy()))
        testing.check(runtime, "kv_update", k, v, slots, out=(both[:, 0, ..., ::-1], both[:, 1]))


@pytest.mark.parametrize("dtype", [F32, F16, np.int8])
def test_tokens_are_appended_at_their_positions(runtime: gpuos.Runtime, dtype: Any) -> None:
    for batch, heads, queries, width in [(1, 1, 1, 3), (2, 3, 1, 16), (2, 3, 4, 64), (3, 2, 5, 5)]:
        k, v = (draw(batch, heads, queries, width, dtype=dtype, seed=seed) for seed in (1, 2))
        out = (draw(batch, heads, 9, width, dtype=dtype, seed=3), draw(batch, heads, 9, width, dtype=dtype))
        each = np.stack([np.random.default_rng(b).permutation(10)[:queries] - 1 for b in range(batch)])
        testing.check(runtime, "kv_append", k, v, each, out=out)
        testing.check(runtime, "kv_append", k, v, each[0].astype(I32), out=out)
        tokens_first = tuple(c.swapaxes(1, 2).copy().swapaxes(1, 2) for c in out)
        testing.check(runtime, "kv_append", k[:, ::-1], v, each[:, ::-1], out=tokens_first)
        testing.check(runtime, "kv_append", k, v, each, out=(out[0][:, :, ::-1], out[1]))


@pytest.mark.parametrize("bad", [12, -2, 1 << 40, -(1 << 31)])
@pytest.mark.parametrize("width", [3, 16])
def test_a_slot_outside_of_the_cache_fails_and_touches_nothing(
    runtime: gpuos.Runtime, bad: int, width: int
) -> None:
    k = draw(3, 2, width)
    memory = testing.to_device(runtime, np.zeros((2, 7, 4, 2, width), F32))
    caches = memory[0, 2:5], memory[1, 2:5]
    arrays = [testing.to_device(runtime, each) for each in (k, k + 1, np.array([1, bad, 11]))]
    with pytest.raises(gpuos.TaskError) as error:
        runtime.kv_update(*arrays, out=caches).result()
    assert error.value.status == Status.INDEX_OUT_OF_RANGE
    wanted = np.zeros((2, 7, 4, 2, width), F32)
    wanted[0, 2, 1], wanted[0, 4, 3], wanted[1, 2, 1], wanted[1, 4, 3] = k[0], k[2], k[0] + 1, k[2] + 1
    np.testing.assert_array_equal(testing.to_host(memory), wanted)

    new = [testing.to_device(runtime, each[None].swapaxes(1, 2).copy()) for each in (k, k + 1)]
    memory = testing.to_device(runtime, np.zeros((2, 3, 2, 12, width), F32))
    with pytest.raises(gpuos.TaskError) as error:
        runtime.kv_append(*new, arrays[2], out=(memory[0, 1:2], memory[1, 1:2])).result()
    assert error.value.status == Status.INDEX_OUT_OF_RANGE
    result = testing.to_host(memory)
    np.testing.assert_array_equal(result[0, 1, :, 1], k[0])
    np.testing.assert_array_equal(result[1, 1, :, 11], k[2] + 1)
    result = result.copy()
    result[:, 1, :, [1, 11]] = 0
    assert not result.any()


def test_outputs_must_be_two_caches_apart(runtime: gpuos.Runtime) -> None:
    submitted = runtime.stats().submitted
    k, slots = testing.to_device(runtime, draw(2, 3, 8)), testing.to_device(runtime, np.arange(2))
    cache = testing.to_device(runtime, np.zeros((4, 2, 3, 8), F32))
    other = testing.to_device(runtime, np.zeros((4, 2, 3, 8), F32))
    for out, message in [
        (None, r"updates out\[0\] where it lies: pass out\[0\]="),
        (cache, r"writes 2 arrays, out is a .*: pass a tuple"),
        ((cache,), "writes 2 arrays, out has 1"),
        ((cache, cache), r"out\[1\] is the same memory as out\[0\]"),
        ((cache[:3], cache[1:]), r"out\[1\] overlaps out\[0\] in part"),
        ((cache[:, :, :2], other[:, :, :2]), "they must be"),
        ((cache, other[:3]), "both need 4 dims of one shape"),
    ]:
        with pytest.raises(gpuos.ArgumentError, match=message):
            runtime.kv_update(k, k, slots, out=out)
    with pytest.raises(gpuos.ArgumentError, match="overlaps inputs"):
        runtime.kv_update(cache[0], k, slots, out=(cache, other))
    with pytest.raises(gpuos.DTypeError, match=r"out\[0\] has dtype float16"):
        half = testing.to_device(runtime, np.zeros((4, 2, 3, 8), F16))
        runtime.kv_update(k, k, slots, out=(half, other))
    assert runtime.stats().submitted == submitted


def test_a_run_of_updates_sees_those_before(runtime: gpuos.Runtime) -> None:
    cache = [testing.to_device(runtime, np.zeros((4, 4, 2, 16), F32)) for _ in range(2)]
    calls = []
    for step in range(16):
        k = testing.to_device(runtime, np.full((1, 2, 16), step + 1, F32))
        calls.append(([k, k, testing.to_device(runtime, np.array([step]))], tuple(cache)))
    runtime.submit_batch(runtime.batch("kv_update", calls), linked=True).wait()
    np.testing.assert_array_equal(testing.to_host(cache[1])[..., 0, 0].reshape(-1), np.arange(1, 17))


# --- gathering ---


@pytest.mark.parametrize("dtype", [F32, F16, BF16, np.int8])
def test_blocks_come_together_and_zeros_follow(runtime: gpuos.Runtime, dtype: Any) -> None:
    for heads, width in [(1, 3), (2, 16), (8, 64)]:
        cache = draw(7, 4, heads, width, dtype=dtype)
        tables, lengths = np.array([[6, 0, 3], [2, 2, -1], [-1, 99, 5]]), np.array([12, 7, 0], I32)
        for length in (0, 1, 7, 12, 15):
            testing.check(runtime, "kv_gather", cache, tables, lengths, length=length)
        testing.check(runtime, "kv_gather", cache[::-1], tables.astype(I32), lengths, length=12)
        testing.check(runtime, "kv_gather", cache[..., ::-1], tables[::1], lengths[::1], length=12)


@pytest.mark.parametrize(("table", "length"), [([6, -1], 5), ([6, 7], 8), ([0, 1 << 40], 5), ([0, 1], 9)])
def test_a_block_outside_of_the_cache_fails(runtime: gpuos.Runtime, table: list[int], length: int) -> None:
    cache = draw(7, 4, 2, 16) + 200
    arrays = [testing.to_device(runtime, each) for each in (cache, np.array([table]), np.array([length]))]
    out = testing.to_device(runtime, np.ones((1, 10, 2, 16), F32))
    with pytest.raises(gpuos.TaskError) as error:
        runtime.kv_gather(*arrays, length=10, out=out).result()
    assert error.value.status == Status.INDEX_OUT_OF_RANGE
    result = testing.to_host(out)
    np.testing.assert_array_equal(result[0, :4], cache[table[0]])
    assert not result[0, 8:].any()


def test_what_was_stored_is_gathered(runtime: gpuos.Runtime) -> None:
    k, v = draw(10, 2, 16), draw(10, 2, 16, seed=1)
    table = np.array([[5, 1, 3]])
    slots = np.array([table[0, t // 4] * 4 + t % 4 for t in range(10)])
    caches = tuple(testing.to_device(runtime, np.zeros((6, 4, 2, 16), F32)) for _ in range(2))
    runtime.kv_update(*(testing.to_device(runtime, each) for each in (k, v, slots)), out=caches).result()
    for new, cache in zip((k, v), caches, strict=True):
        place = [testing.to_device(runtime, each) for each in (table, np.array([10]))]
        result = testing.to_host(runtime.kv_gather(cache, *place, length=12).result())
        np.testing.assert_array_equal(result[0, :10], new)
        assert not result[0, 10:].any()


def test_compacting_keeps_the_tokens_named(runtime: gpuos.Runtime) -> None:
    cache = draw(2, 3, 10, 16, dtype=F16)
    keep = np.array([9, 0, 4])
    np.testing.assert_array_equal(run(runtime, "kv_compact", cache, keep), cache[:, :, keep])
    testing.check(runtime, "kv_compact", cache, keep, dim=1 - 3)
    with pytest.raises(gpuos.TaskError):
        run(runtime, "kv_compact", cache, np.array([10]))
    array = testing.to_device(runtime, cache)
    with pytest.raises(gpuos.ArgumentError, match="overlaps"):
        runtime.kv_compact(array, testing.to_device(runtime, keep), out=array[:, :, :3])


# --- prefixes ---


@pytest.mark.parametrize("kind", [I32, I64])
def test_the_first_difference_counts(runtime: gpuos.Runtime, kind: Any) -> None:
    for length in (0, 1, 5, 255, 256, 257, 600, 5000):
        prefix = draw(length, dtype=kind)
        tokens = np.broadcast_to(prefix, (6, length)).copy()
        wanted = [length] * 6
        for row, at in enumerate([0, length // 2, length - 1, length // 3]):
            if 0 <= at < length:
                tokens[row, at:] += 1
                wanted[row] = at
        np.testing.assert_array_equal(run(runtime, "prefix_match", tokens, prefix), wanted)
        testing.check(runtime, "prefix_match", tokens, np.broadcast_to(prefix, tokens.shape).copy())
        testing.check(runtime, "prefix_match", tokens, prefix[: length // 2].astype(I64))
        testing.check(runtime, "prefix_match", tokens[::-1, ::-1], prefix[::-1])


# --- codes ---


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_codes_of_every_length_and_layout(runtime: gpuos.Runtime, dtype: Any) -> None:
    random = np.random.default_rng(0)
    for length in (0, 1, 7, 8, 24, 128, 513, 2056, 5000):
        for rows in (1, 3, 9):
            x = random.standard_normal((rows, length)).astype(dtype)
            codes, scales = testing.check(runtime, "kv_quantize", x)
            testing.check(runtime, "kv_dequantize", codes, scales, dtype=dtype)
    x = random.standard_normal((3, 4, 2, 64)).astype(dtype)
    testing.check(runtime, "kv_quantize", x[:, ::2, :, :0])
    for view in (x[..., ::-1], x.swapaxes(1, 3), x[:, ::2], np.broadcast_to(x[:1], x.shape), x[0, 0, 0]):
        codes, scales = testing.check(runtime, "kv_quantize", view)
        testing.check(runtime, "kv_dequantize", codes[..., ::-1], scales)


def test_codes_of_special_rows(runtime: gpuos.Runtime) -> None:
    x = np.zeros((7, 16), F32)
    x[1], x[2, 3], x[3, 5], x[4] = np.linspace(-1, 1, 16), NAN, -INF, 1e-45
    x[5, 0], x[6, :2] = np.finfo(F32).max, (-0.0, 1e-44)
    codes, scales = testing.check(runtime, "kv_quantize", x)
    assert scales[0] == 0 and not codes[0].any()
    assert codes[1, 0] == -127 and codes[1, -1] == 127
    assert np.isnan(scales[2]) and not codes[2].any() and np.isinf(scales[3]) and not codes[3].any()
    decoded = testing.check(runtime, "kv_dequantize", codes, scales, dtype="float32")
    assert not decoded[0].any() and np.isnan(decoded[2:4]).all()
    assert decoded.dtype == F32 and run(runtime, "kv_dequantize", codes, scales).dtype == F16
    np.testing.assert_allclose(decoded[1], x[1], atol=0.5 / 127)


def test_codes_are_those_of_a_division(runtime: gpuos.Runtime) -> None:
    random = np.random.default_rng(0)
    for exponent in (-149, -140, -126, -100, -60, -53, -1, 0, 7, 60, 67, 100, 120):
        x = np.ldexp(random.random((64, 128)).astype(F32) * 2 - 1, exponent).astype(F32)
        testing.check(runtime, "kv_quantize", x)
        # Quotients at and beside halves: a scale of one and of what is no power of two.
        halves = np.ldexp((np.arange(128) - 64).astype(F32) + 0.5, exponent)
        for most in (127, 126.9, 100):
            row = np.concatenate([halves, np.nextafter(halves, F32(0)), [np.ldexp(F32(most), exponent)]])
            testing.check(runtime, "kv_quantize", row.astype(F32))


def test_refusals_come_before_enqueueing(runtime: gpuos.Runtime) -> None:
    submitted = runtime.stats().submitted
    codes, scales = np.zeros((2, 8), np.int8), np.zeros(2, F32)
    for name, inputs, parameters, message in [
        ("kv_dequantize", (codes, scales), {"dtype": "int32"}, "choose one of"),
        ("kv_dequantize", (codes, scales[:1]), {}, "a scale for each row"),
        ("kv_quantize", (np.float32(1),), {}, "no dims"),
        ("prefix_match", (np.zeros((2, 3), I64), np.zeros((3, 3), I64)), {}, r"\[sequences, length\]"),
        (
            "kv_gather",
            (np.zeros((1, 1, 1, 1), F32), np.zeros((2, 2), I64), np.zeros(3, I64)),
            {"length": 2},
            "they must be",
        ),
    ]:
        with pytest.raises(gpuos.ArgumentError, match=message):
            run(runtime, name, *inputs, **parameters)
    with pytest.raises(gpuos.DTypeError, match="int8"):
        run(runtime, "kv_dequantize", codes.astype(np.uint8), scales)
    assert runtime.stats().submitted == submitted


# --- tiles, code ---


def test_tiles_cover_all(tiled: gpuos.Runtime) -> None:
    slots = np.random.default_rng(0).permutation(400)[:300]
    slots[::7] = -1
    out = (np.zeros((25, 16, 4, 32), F16), np.ones((25, 16, 4, 32), F16))
    k, v = draw(300, 4, 32, dtype=F16), draw(300, 4, 32, dtype=F16, seed=1)
    testing.check(tiled, "kv_update", k, v, slots, out=out)
    testing.check(tiled, "kv_update", k[..., ::-1], v, slots, out=out)
    append = tuple(np.zeros((2, 4, 400, 33), F32) for _ in range(2))
    k = draw(2, 4, 300, 33)
    testing.check(tiled, "kv_append", k, k + 1, slots, out=append)
    tables = np.random.default_rng(1).integers(0, 25, (9, 20))
    testing.check(tiled, "kv_gather", out[1], tables, np.arange(9) * 40, length=320)
    tokens = np.zeros((50, 1000), I64)
    tokens[np.arange(50), np.arange(50) * 20] = 1
    testing.check(tiled, "prefix_match", tokens, np.zeros(1000, I64))
    for shape in [(700, 40), (9, 5000)]:
        codes, scales = testing.check(tiled, "kv_quantize", draw(*shape))
        testing.check(tiled, "kv_dequantize", codes, scales)


@pytest.mark.parametrize("name", ["kv_update", "kv_gather", "kv_quantize", "kv_dequantize", "prefix_match"])
def test_it_compiles_without_local_memory(name: str) -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptx = cuda_compile.compile_kernel(TABLE[name].kernels[0], cuda_compile.OLDEST)
    assert not re.search(r"\b(ld|st)\.local|\.local ", ptx)
    if name in ("kv_update", "kv_gather"):
        assert "ld.global.v2.u64" in ptx and "st.global.v2.u64" in ptx
    if name == "prefix_match":
        assert "atom.min.u32" in ptx
    if name == "kv_quantize":
        assert "div.rn.f32" in ptx and "max.f32" not in ptx
