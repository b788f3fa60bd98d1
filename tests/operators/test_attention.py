"""Attention: as PyTorch, alignments, masks, empty rows, layouts, chunks, pages, and blocks of threads."""

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
from gpuos_numba.device.operators import KERNELS, TABLE, attention
from gpuos_numba.device.operators.table import Plan
from tests.operators import blocks

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
NAN, INF = np.nan, np.inf
DTYPES = [F32, F16, BF16]


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=3) as rt:
        yield rt


def normal(*shape: int, dtype: Any = F32, seed: int = 0) -> np.ndarray[Any, Any]:
    """Ordinary numbers that begin on a 16-byte line, as an allocator would give them."""
    array = blocks.empty(shape, dtype)
    array[...] = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)
    return array


def run(rt: gpuos.Runtime, name: str, *inputs: Any, **given: Any) -> np.ndarray[Any, Any]:
    arrays = [x if x is None else testing.to_device(rt, x) for x in inputs]
    return testing.to_host(rt.submit(name, arrays, **given).result())


def plan_of(name: str, *inputs: Any, workers: int, **given: Any) -> Plan:
    operator = TABLE[name]
    operands = [None if x is None else blocks.operand_of(x) for x in inputs]
    parameters = operator.read_parameters(given)
    ((shape, dtype),) = operator.infer(operands, **parameters)
    out = blocks.operand_of(np.empty(shape, testing.numpy_dtype(dtype)))
    return operator.plan(operands, [out], workers, **parameters)


# --- numbers ---


def torch_tensor(array: Any) -> Any:
    torch = pytest.importorskip("torch")
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (5, 1)])
def test_it_is_as_pytorch(runtime: gpuos.Runtime, dtype: Any, dim: int, heads: int, kv_heads: int) -> None:
    torch = pytest.importorskip("torch")
    for queries, keys, causal in [
        (1, 77, "none"),
        (5, 40, "none"),
        (7, 7, "upper_left"),
        (9, 5, "upper_left"),
    ]:
        q = normal(2, heads, queries, dim, dtype=dtype, seed=1)
        k, v = (normal(2, kv_heads, keys, dim, dtype=dtype, seed=seed) for seed in (2, 3))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(torch_tensor(x).double() for x in (q, k, v)), is_causal=causal != "none", enable_gqa=True
        )
        result = run(runtime, "sdpa", q, k, v, causal=causal)
        atol = {F32: 2e-6, F16: 1e-3, BF16: 1e-2}[dtype]
        np.testing.assert_allclose(result.astype(np.float64), wanted.numpy(), rtol=atol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_as_in_pytorch(runtime: gpuos.Runtime, dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (normal(2, 3, n, 64, dtype=dtype, seed=n) for n in (6, 20, 21))
    v = v[:, :, :20]
    random = np.random.default_rng(4)
    shown = random.random((2, 1, 6, 20)) < 0.6
    shown[..., 0] = True
    bias = random.standard_normal((3, 6, 20)).astype(dtype)
    bias[random.random(bias.shape) < 0.3] = -INF
    for mask in (shown, bias, bias.astype(F32), shown[0, 0, :, :], bias[:, :1]):
        wide = torch_tensor(mask) if mask.dtype == bool else torch_tensor(mask).double()
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(torch_tensor(x).double() for x in (q, k, v)), attn_mask=wide
        )
        result = run(runtime, "sdpa", q, k, v, mask, scale=None)
        atol = {F32: 4e-6, F16: 2e-3, BF16: 2e-2}[dtype]
        np.testing.assert_allclose(result.astype(np.float64), wanted.numpy(), rtol=atol, atol=atol)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_query_with_nothing_to_attend_to_gets_exactly_zero(runtime: gpuos.Runtime, dtype: Any) -> None:
    q, k, v = (normal(1, 2, 6, 64, dtype=dtype, seed=seed) for seed in range(3))
    hidden = np.zeros((6, 6), bool)
    hidden[1] = True
    everything = np.zeros((6, 6), dtype)
    everything[[0, 2, 3, 4, 5]] = -INF
    for mask in (hidden, everything):
        result = run(runtime, "sdpa", q, k, v, mask)
        assert (np.delete(result, 1, axis=2) == 0).all()
        assert np.isfinite(result[:, :, 1]).all() and (result[:, :, 1] != 0).any()
    # More queries than keys, aligned to the last: the first see none. A window of 1 on a hidden diagonal.
    result = run(runtime, "sdpa", q, k[:, :, :2], v[:, :, :2], causal="lower_right")
    assert (result[:, :, :4] == 0).all() and (result[:, :, 4:] != 0).any()
    result = run(runtime, "sdpa", q, k, v, ~np.eye(6, dtype=bool), causal="upper_left", window=1)
    assert (result == 0).all()
    assert (run(runtime, "sdpa", q, k[:, :, :0], v[:, :, :0]) == 0).all()


def test_alignments(runtime: gpuos.Runtime) -> None:
    q, k, v = normal(1, 4, 1, 64), normal(1, 4, 9, 64, seed=1), normal(1, 4, 9, 64, seed=2)
    whole = run(runtime, "sdpa", q, k, v)
    np.testing.assert_array_equal(run(runtime, "sdpa", q, k, v, causal="lower_right"), whole)
    np.testing.assert_allclose(run(runtime, "sdpa", q, k, v, causal="upper_left"), v[:, :, :1], rtol=1e-6)
    last = run(runtime, "sdpa", q, k[:, :, -3:], v[:, :, -3:])
    np.testing.assert_allclose(run(runtime, "sdpa", q, k, v, causal="lower_right", window=3), last, rtol=1e-5)


@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
@pytest.mark.parametrize("window", [0, 1, 4, 1000])
def test_windows(runtime: gpuos.Runtime, causal: str, window: int) -> None:
    for queries, keys in [(1, 30), (13, 30), (30, 13), (9, 9), (3, 1)]:
        for heads in (1, 3):
            q, k = normal(heads, queries, 16), normal(1, keys, 16, seed=1)
            testing.check(runtime, "sdpa", q, k, k[:, ::-1], causal=causal, window=window)


@pytest.mark.parametrize("strange", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_what_hides_a_key_hides_its_nan(runtime: gpuos.Runtime, strange: float, dtype: Any) -> None:
    q, k, v = (normal(1, 4, 5, 64, dtype=dtype, seed=seed) for seed in range(3))
    k[:, :, 3], v[:, :, 3] = strange, strange
    shown = np.ones((5, 5), bool)
    shown[:, 3] = False
    shown[4, 3] = True
    result = run(runtime, "sdpa", q, k, v, shown)
    assert np.isfinite(result[:, :, :4]).all()
    bias = np.where(shown, 0, -INF).astype(dtype)
    np.testing.assert_array_equal(run(runtime, "sdpa", q, k, v, bias), result)
    if np.isnan(strange):
        assert np.isnan(result[:, :, 4]).all()
    causal = run(runtime, "sdpa", q, k, v, causal="upper_left")
    assert np.isfinite(causal[:, :, :3]).all()


def test_large_scores_do_not_overflow(runtime: gpuos.Runtime) -> None:
    q, k = np.full((1, 2, 64), 30, F16), np.stack([np.full((40, 64), 30), np.full((40, 64), -30)]).astype(F16)
    v = normal(2, 40, 64, dtype=F16)
    result = run(runtime, "sdpa", np.concatenate([q, q]), k, v, scale=1.0)
    np.testing.assert_allclose(result[:, 0], v.astype(F32).mean(1), atol=1e-3)


# --- shapes ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_layout(runtime: gpuos.Runtime, dtype: Any) -> None:
    def views(heads: int, rows: int, dim: int, seed: int) -> list[Any]:
        whole = normal(2, rows + 1, heads, 2 * dim, dtype=dtype, seed=seed)
        return [
            whole[:, 1:, :, :dim].swapaxes(1, 2),
            whole[:, :-1, :, ::2].swapaxes(1, 2),
            whole[:, :0:-1, ::-1, dim:].swapaxes(1, 2),
            whole[:, 1:, :, 1 : dim + 1].swapaxes(1, 2),
            np.broadcast_to(whole[:1, :1, :1, :dim], (2, heads, rows, dim)),
            np.ascontiguousarray(whole[:, 1:, :, :dim].swapaxes(1, 2)),
        ]

    for dim in (16, 20):
        q, k, v = views(4, 3, dim, 1), views(2, 19, dim, 2), views(2, 19, dim, 3)
        mask = np.random.default_rng(5).random((2, 19, 3, 4)) < 0.7
        for at in range(6):
            testing.check(runtime, "sdpa", q[at], k[at - 1], v[at - 2])
            testing.check(runtime, "sdpa", q[at], k[at - 1], v[at - 2], mask.swapaxes(1, 3)[..., ::-1])
        out = testing.to_device(runtime, np.zeros((2, 3, 4, dim), dtype))
        arrays = [testing.to_device(runtime, x[0]) for x in (q, k, v)]
        runtime.submit("sdpa", arrays, out=out.swapaxes(1, 2)).result()
        wanted = TABLE["sdpa"].spec(q[0], k[0], v[0])  # type: ignore[misc]
        testing.compare("sdpa", testing.to_host(out).swapaxes(1, 2), wanted, arrays_dtype(dtype))


def arrays_dtype(dtype: Any) -> Any:
    return blocks.operand_of(np.zeros(1, dtype)).dtype


def test_every_head_size_to_256(runtime: gpuos.Runtime) -> None:
    for dim in (*range(1, 40), 63, 72, 100, 127, 192, 248, 255, 256):
        testing.check(
            runtime, "sdpa", normal(2, 1, dim), normal(1, 9, dim, seed=1), normal(1, 9, dim, seed=2)
        )


def test_nothing_to_do(runtime: gpuos.Runtime) -> None:
    k = normal(2, 3, 5, 8)
    assert run(runtime, "sdpa", k[:, :, :0], k, k).shape == (2, 3, 0, 8)
    assert run(runtime, "sdpa", k[:0], k[:0], k[:0]).shape == (0, 3, 5, 8)
    assert run(runtime, "sdpa", k[:, :0], k[:, :0], k[:, :0]).shape == (2, 0, 5, 8)
    assert run(runtime, "sdpa", k[..., :0], k[..., :0], k[..., :0]).shape == (2, 3, 5, 0)
    table, lengths = np.zeros((0, 2), np.int32), np.zeros(0, np.int32)
    assert run(runtime, "paged_attention", k[0, :0], k, k, table, lengths).shape == (0, 5, 8)


def test_keys_2_to_the_31_elements_apart(runtime: gpuos.Runtime) -> None:
    apart = (1 << 31) + 24
    if runtime.machine == "cuda":
        torch = pytest.importorskip("torch")
        memory = torch.zeros(apart + 64, dtype=torch.float16, device="cuda")
        keys = memory.as_strided((1, 2, 32), (0, apart, 1))
        keys[0, 0], keys[0, 1] = 1, 2
        q = torch.zeros(1, 1, 32, dtype=torch.float16, device="cuda")
    else:
        memory = np.zeros(apart + 64, F16)  # untouched pages take no memory
        keys = np.lib.stride_tricks.as_strided(memory, (1, 2, 32), (0, 2 * apart, 2))
        keys[0, 0], keys[0, 1] = 1, 2
        q = np.zeros((1, 1, 32), F16)
    result = testing.to_host(runtime.submit("sdpa", [q, keys, keys]).result())
    assert (result == 1.5).all()


# --- chunks and tiles ---


@pytest.mark.parametrize(("keys", "heads", "chunks"), [(513, 1, 3), (1100, 1, 3), (1025, 2, 1)])
def test_tiles_share_the_keys(tiled: gpuos.Runtime, keys: int, heads: int, chunks: int) -> None:
    q = normal(1, heads, 1, 64)
    k, v = normal(1, heads, keys, 64, seed=1), normal(1, heads, keys, 64, seed=2)
    plan = plan_of("sdpa", q, k, v, workers=3)
    assert plan.tiles == max(chunks, heads) and plan.merge is (chunks > 1)
    testing.check(tiled, "sdpa", q, k, v)
    many = normal(1, 3 * heads, 2, 64)
    testing.check(tiled, "sdpa", many, k, v, causal="lower_right", window=keys - 7)


def test_hidden_chunks_do_not_poison_the_others(tiled: gpuos.Runtime) -> None:
    q, k, v = normal(1, 1, 64), normal(1, 1100, 64, seed=1), normal(1, 1100, 64, seed=2)
    for shown in (slice(0, 40), slice(500, 520), slice(1099, 1100), slice(0, 0), slice(300, 900)):
        mask = np.zeros((1, 1100), bool)
        mask[:, shown] = True
        result = testing.check(tiled, "sdpa", q, k, v, mask)
        assert np.isfinite(result).all() and (result != 0).any() == (shown.stop > shown.start)


def test_small_calls_stay_in_one_tile_and_large_ones_fill_the_machine() -> None:
    def tiles(heads: int, keys: int, kv_heads: int = 0) -> tuple[int, bool]:
        q, k = np.empty((1, heads, 1, 128), F16), np.empty((1, kv_heads or heads, keys, 128), F16)
        plan = plan_of("sdpa", q, k, k, workers=131)
        return plan.tiles, plan.merge

    assert tiles(1, 128) == (1, False)
    assert tiles(32, 128) == (32, False)
    assert tiles(32, 512) == (32, False)
    assert tiles(32, 2048) == (128, True)
    assert tiles(32, 8192) == (128, True)
    assert tiles(32, 8192, 4) == (128, True)


# --- pages ---


def pages(
    sequences: int, most: int, page: int, kv_heads: int, dim: int, dtype: Any, index: Any = np.int32
) -> list[Any]:
    """A cache whose pages lie in any order."""
    random = np.random.default_rng(6)
    count = sequences * most + 2
    k, v = (normal(count, page, kv_heads, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    tables = random.permutation(count)[: sequences * most].reshape(sequences, most).astype(index)
    lengths = random.integers(0, most * page, sequences, endpoint=True).astype(index)
    lengths[-1] = most * page
    return [k, v, tables, lengths]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page", "group", "dim"), [(16, 1, 128), (8, 4, 64), (5, 2, 80), (1, 8, 20)])
def test_pages_in_any_order(runtime: gpuos.Runtime, dtype: Any, page: int, group: int, dim: int) -> None:
    for index in (np.int32, np.int64):
        cache = pages(3, 6, page, 2, dim, dtype, index)
        q = normal(3, 2 * group, dim, dtype=dtype)
        testing.check(runtime, "paged_attention", q, *cache)
        k, v, tables, lengths = cache
        strided = [np.repeat(x, 2, axis=1)[:, ::2] for x in (k, v, tables)]
        testing.check(runtime, "paged_attention", q, *strided, np.repeat(lengths, 2)[::2], scale=0.3)
        testing.check(
            runtime,
            "paged_attention",
            q,
            *(x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (k, v)),
            tables,
            lengths,
        )


def test_pages_are_whole_attention(runtime: gpuos.Runtime) -> None:
    k, v, tables, lengths = pages(2, 5, 8, 2, 64, F16)
    q = normal(2, 4, 64, dtype=F16)
    result = run(runtime, "paged_attention", q, k, v, tables, lengths)
    for s in range(2):
        keys, values = (x[tables[s]].reshape(-1, 2, 64)[: lengths[s]].swapaxes(0, 1) for x in (k, v))
        whole = run(runtime, "sdpa", q[s][:, None], keys, values)[:, 0]
        np.testing.assert_allclose(result[s].astype(F32), whole.astype(F32), atol=2e-3)


def test_a_shared_cache_in_tiles(tiled: gpuos.Runtime) -> None:
    for group, page in [(1, 16), (3, 16), (1, 7)]:
        cache = pages(1, 1100 // page, page, 1, 64, F32)
        q = normal(1, group, 64)
        assert plan_of("paged_attention", q, *cache, workers=3).merge
        testing.check(tiled, "paged_attention", q, *cache)
        cache[-1][:] = 9
        testing.check(tiled, "paged_attention", q, *cache)


@pytest.mark.parametrize("page", [8, 5])
@pytest.mark.parametrize("bad", [14, -1, -(1 << 31), (1 << 31) - 1])
def test_a_bad_entry_within_the_length_is_a_status(runtime: gpuos.Runtime, bad: int, page: int) -> None:
    cache = pages(2, 6, page, 1, 64, F16)
    q = normal(2, 2, 64, dtype=F16)
    cache[3][0] = 3 * page
    cache[2][0, 3:] = bad  # behind the length: nobody looks
    testing.check(runtime, "paged_attention", q, *cache)
    cache[2][0, 2] = bad
    with pytest.raises(gpuos.TaskError) as caught:
        run(runtime, "paged_attention", q, *cache)
    assert caught.value.status == Status.INDEX_OUT_OF_RANGE


@pytest.mark.parametrize("length", [-1, 41, 1 << 31, -(1 << 63), (1 << 63) - 1])
def test_a_bad_length_is_a_status(runtime: gpuos.Runtime, length: int) -> None:
    cache = pages(2, 5, 8, 1, 64, F16, np.int64)
    cache[3][1] = length
    with pytest.raises(gpuos.TaskError) as caught:
        run(runtime, "paged_attention", normal(2, 2, 64, dtype=F16), *cache)
    assert caught.value.status == Status.INDEX_OUT_OF_RANGE


# --- blocks of threads, without a GPU ---


def on_blocks(
    name: str, *inputs: Any, workers: int = 1, width: int = 64, status: int = 0, **given: Any
) -> Plan:
    """Run on `workers` blocks in plain Python, and check."""
    plan = plan_of(name, *inputs, workers=workers, **given)
    operator = TABLE[name]
    operands = [None if x is None else blocks.operand_of(x) for x in inputs]
    (result,) = operator.infer(operands, **operator.read_parameters(given))
    out = blocks.empty(result.shape, testing.numpy_dtype(result.dtype))
    plan, found = blocks.submit(name, inputs, out, blocks=workers, width=width, seed=width, **given)
    assert found == status
    if status == 0:
        with np.errstate(invalid="ignore"):
            wanted = operator.spec(*inputs, **given)  # type: ignore[misc]
        testing.compare(name, out, wanted, result.dtype)
    return plan


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU splits is large; here is little."""
    for name, value in {"SPLIT": 4096, "PIECE": 2048, "ALONE": 2048}.items():
        monkeypatch.setattr(attention, name, value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 80, 128, 256))])
def test_a_block_of_threads_does_the_same(dtype: Any, dim: int) -> None:
    for group, queries, width in [(1, 1, 64), (3, 1, 32), (2, 3, 64)]:
        q = normal(1, group, queries, dim, dtype=dtype)
        k, v = (normal(1, 1, 45, dim, dtype=dtype, seed=seed) for seed in (1, 2))
        plan = on_blocks("sdpa", q, k, v, width=width)
        assert KERNELS[plan.op_id].name == ("sdpa" if group * queries == 1 else "sdpa.many")
    on_blocks("sdpa", q, k, v, causal="lower_right", window=11)
    on_blocks("sdpa", q, k, v, np.random.default_rng(1).random((3, 45)) < 0.5, causal="lower_right")
    on_blocks("sdpa", q, k, v, normal(1, 3, 45, dtype=dtype))


def test_a_block_of_threads_takes_any_layout() -> None:
    q = normal(1, 3, 30, dtype=F16)[..., ::2]
    k = normal(1, 20, 31, dtype=F16)
    on_blocks("sdpa", q, k[..., :15], k[..., 16:])
    k = normal(1, 20, 48, dtype=F16)
    on_blocks("sdpa", normal(1, 1, 16, dtype=F16), k[..., 4:20], k[..., 16:32])
    on_blocks("sdpa", normal(3, 1, 16, dtype=F16), k[..., 8:24], k[:, ::-1, 32:], width=256)


@pytest.mark.parametrize("width", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (256, 512))])
def test_blocks_of_threads_share_the_keys(small_tiles: None, width: int) -> None:
    k, v = normal(1, 70, 64, dtype=F16, seed=1), normal(1, 70, 64, dtype=F16, seed=2)
    assert on_blocks("sdpa", normal(1, 1, 64, dtype=F16), k, v, workers=4, width=width).merge
    hidden = np.zeros((1, 70), bool)
    hidden[:, 30] = True
    assert on_blocks("sdpa", normal(2, 1, 64, dtype=F16), k, v, hidden, workers=5, width=width).merge
    assert on_blocks("sdpa", normal(2, 1, 64, dtype=F16), k, v, ~hidden[:, :1] & False, workers=2).merge


@pytest.mark.parametrize("dtype", [F16, F32])
def test_blocks_of_threads_hide_nan(dtype: Any) -> None:
    q, k, v = normal(3, 1, 64, dtype=dtype), normal(1, 20, 64, dtype=dtype), normal(1, 20, 64, dtype=dtype)
    k[:, [3, 17]], v[:, [3, 17]] = NAN, INF
    shown = np.ones((3, 1, 20), bool)
    shown[:, :, [3, 17]] = False
    shown[1, :, 3] = True
    on_blocks("sdpa", q, k, v, shown)
    on_blocks("sdpa", q[:1], k, v, shown[:1])


@pytest.mark.parametrize(("page", "group"), [(8, 1), (16, 3), (5, 1)])
def test_blocks_of_threads_find_pages(small_tiles: None, page: int, group: int) -> None:
    for dtype in (F16, F32):
        cache = pages(2, 5, page, 1, 64, dtype)
        q = normal(2, group, 64, dtype=dtype)
        on_blocks("paged_attention", q, *cache, workers=6)
        cache[2][1, 2] = -5
        on_blocks("paged_attention", q, *cache, workers=1, status=Status.INDEX_OUT_OF_RANGE)
        cache[3][1] = -1
        on_blocks("paged_attention", q, *cache, workers=3, status=Status.INDEX_OUT_OF_RANGE)


def test_a_missing_barrier_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        (normal(n, 1, dim, dtype=F16), normal(1, 40, dim, dtype=F16, seed=1), normal(1, 40, dim, dtype=F16))
        for n, dim in [(1, 64), (3, 64), (2, 20)]
    ]
    for call in calls:
        on_blocks("sdpa", *call)
    monkeypatch.setattr(blocks.Block, "barrier", lambda self: None)
    for call in calls:
        with pytest.raises((AssertionError, ValueError)):
            on_blocks("sdpa", *call)


# --- refusals ---


def test_refusals_come_before_enqueueing(runtime: gpuos.Runtime) -> None:
    submitted = runtime.stats().submitted
    q, k = np.ones((4, 2, 8), F32), np.ones((2, 5, 8), F32)
    cache, table, lengths = np.ones((3, 4, 2, 8), F32), np.zeros((4, 2), np.int32), np.zeros(4, np.int32)
    error, dtype = gpuos.ArgumentError, gpuos.DTypeError
    for name, inputs, given, kind, message in [
        ("sdpa", (q, k[0], k), {}, error, r"give all as \[B, H, T, D\]"),
        ("sdpa", (q, k, k[:, 1:]), {}, error, "they must be equal"),
        ("sdpa", (q, k[..., 1:], k[..., 1:]), {}, error, "q has heads of 8 elements, k of 7"),
        ("sdpa", (q[:3], k, k), {}, error, "3 query heads are not a multiple of 2 kv heads"),
        ("sdpa", (q, k[:0], k[:0]), {}, error, "no kv head"),
        ("sdpa", (q[None], np.stack([k, k]), np.stack([k, k])), {}, error, "expand one of them"),
        ("sdpa", (q, k, k), {"window": 3}, error, "window= needs causal="),
        ("sdpa", (q, k, k), {"window": -1, "causal": "upper_left"}, error, "or 0 for all"),
        ("sdpa", (q, k, k), {"causal": "both"}, error, "is not one of"),
        ("sdpa", (np.ones((1, 1, 264), F32),) * 3, {}, error, "at most 256"),
        ("sdpa", (q, k.astype(F16), k.astype(F16)), {}, dtype, "convert one of them"),
        ("sdpa", (q.astype(int), k.astype(int), k.astype(int)), {}, dtype, "convert it first"),
        ("sdpa", (q, k, k, np.ones((2, 5), F16)), {}, dtype, "mask has dtype float16"),
        ("sdpa", (q, k, k, np.ones((3, 5), bool)), {}, error, r"does not broadcast to \(4, 2, 5\)"),
        ("paged_attention", (q, cache, cache[1:], table, lengths), {}, error, r"two caches \[blocks"),
        ("paged_attention", (q[:, :1], cache, cache, table, lengths), {}, error, "not a multiple"),
        ("paged_attention", (q, cache, cache, table[1:], lengths), {}, error, "block_tables has shape"),
        ("paged_attention", (q, cache, cache, table, lengths[1:]), {}, error, "context_lens has shape"),
        ("paged_attention", (q, cache, cache, q[0], lengths), {}, dtype, "block_tables has dtype float32"),
        ("paged_attention", (q, cache, cache, table, table > 0), {}, dtype, "context_lens has dtype bool"),
    ]:
        with pytest.raises(kind, match=message):
            run(runtime, name, *inputs, **given)
    array = testing.to_device(runtime, q)
    with pytest.raises(error, match="is the same memory as"):
        runtime.submit("sdpa", [array, *(testing.to_device(runtime, k) for _ in range(2))], out=array)
    assert runtime.stats().submitted == submitted


# --- what a GPU would run ---


@pytest.mark.parametrize("kernel", TABLE["sdpa"].kernels, ids=lambda kernel: kernel.name)
def test_it_compiles_to_vector_accesses_and_no_local_memory(kernel: Any) -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptx = cuda_compile.compile_kernel(kernel, cuda_compile.OLDEST)
    assert not re.search(r"\b(ld|st)\.local|\.local ", ptx)
    assert "max.f32" not in ptx and "fma.rn.f32" in ptx
    assert ptx.count("ld.global.v2.u64") >= 32  # keys and values, eight of each in flight
    assert "shfl.sync.bfly" in ptx and "ld.shared.v2.u64" in ptx
