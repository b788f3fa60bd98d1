"""Products: as PyTorch, within the error bound of f32, any layout, batches, tiles, and blocks of threads."""

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
from gpuos_numba.device.operators import KERNELS, TABLE, matrix, matrix_plans
from gpuos_numba.device.operators.table import Operand, Plan
from tests.operators import blocks

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
NAN, INF = np.nan, np.inf
NAMES = ["matvec", "vecmat", "matmul"]
DTYPES = [F32, F16, BF16]


@pytest.fixture(scope="module")
def tiled(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, workers=4) as rt:
        yield rt


def normal(*shape: int, dtype: Any = F32, seed: int = 0) -> np.ndarray[Any, Any]:
    """On a 16-byte line."""
    array = blocks.empty(shape, dtype)
    array[...] = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)
    return array


def run(rt: gpuos.Runtime, name: str, *inputs: Any, **parameters: Any) -> np.ndarray[Any, Any]:
    arrays = [None if each is None else testing.to_device(rt, each) for each in inputs]
    return testing.to_host(rt.submit(name, arrays, **parameters).result())


def plan_of(name: str, *shapes: tuple[int, ...], workers: int = 131, dtype: DType = DType.F16) -> Plan:
    """The plan for contiguous operands."""

    def operand(shape: tuple[int, ...]) -> Operand:
        strides = tuple(int(np.prod(shape[dim + 1 :])) for dim in range(len(shape)))
        return Operand(dtype, shape, strides, True)

    inputs, given = [operand(shape) for shape in shapes], TABLE[name].read_parameters({})
    (result,) = TABLE[name].infer(inputs, **given)
    return TABLE[name].plan(inputs, [operand(result.shape)], workers, **given)


def check_bound(name: str, result: Any, *inputs: Any, **parameters: Any) -> None:
    """k products and the bias, summed in any order with k roundings, and one rounding to the dtype."""
    spec: Any = TABLE[name].spec
    exact = spec(*inputs, **parameters)
    sizes = spec(*(None if each is None else np.abs(each) for each in inputs), **parameters)
    k = inputs[0].shape[-2 if parameters.get("transpose_a") else -1]
    least = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[inputs[0].dtype.name]
    error = np.abs(result.astype(np.float64) - exact)
    bound = (k + 2) * 2.0**-24 * sizes
    assert (error <= bound + least * (np.abs(exact) + bound)).all()


# --- values ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_equals_pytorch(runtime: gpuos.Runtime, dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    for rows, k, cols in [
        (1, 1, 1),
        (3, 5, 7),
        (16, 64, 8),
        (33, 130, 17),
        (64, 256, 40),
        (1, 300, 65),
        (65, 300, 1),
    ]:
        a, b, bias = normal(rows, k, dtype=dtype), normal(k, cols, dtype=dtype), normal(cols, dtype=dtype)
        ta, tb, tbias = (testing._tensor(each) for each in (a, b, bias))
        scale = np.sqrt(k) * {4: 2.0**-20, 2: 2.0**-7 if dtype is BF16 else 2.0**-10}[a.itemsize]
        for name, inputs, wanted in [
            ("matmul", (a, b), torch.matmul(ta, tb)),
            ("matmul", (a, b, bias), torch.addmm(tbias, ta, tb)),
            ("matvec", (a, b[:, 0].copy()), torch.mv(ta, tb[:, 0])),
            ("vecmat", (a[0], b, bias), torch.addmm(tbias, ta[:1], tb)[0]),
            ("vecmat", (a, b, bias), torch.addmm(tbias, ta, tb)),
            ("matvec", (b.T.copy(), a, bias), torch.nn.functional.linear(ta, tb.T.contiguous(), tbias)),
        ]:
            result = run(runtime, name, *inputs)
            wanted = testing.to_host(wanted).astype(np.float64)
            assert result.dtype == dtype and result.shape == wanted.shape
            np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=2 * scale, atol=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_sums_keep_to_the_error_bound_of_f32(runtime: gpuos.Runtime, name: str, dtype: Any) -> None:
    for rows, k, cols in [(5, 1, 6), (9, 8, 24), (8, 1000, 9), (3, 4096, 3), (37, 65, 70), (1, 5000, 33)]:
        a, b = normal(rows, k, dtype=dtype), normal(k, cols, dtype=dtype)
        inputs = {"matvec": (a, b[:, 0].copy()), "vecmat": (a[0], b), "matmul": (a, b)}[name]
        check_bound(name, run(runtime, name, *inputs), *inputs)


def test_halves_are_summed_in_f32(runtime: gpuos.Runtime) -> None:
    ones = np.ones((1, 5000), F16)
    assert run(runtime, "matvec", ones, ones[0]) == 5000  # a running f16 sum stops at 2,048
    x = np.full((2, 2), 300, F16)
    assert (run(runtime, "matmul", x, x) == INF).all()
    assert run(runtime, "matvec", np.full((1, 2), 300, F16), np.array([300, -299], F16)) == 300
    ones = np.ones((4, 600), BF16)
    assert (run(runtime, "matmul", ones, ones.T) == 600).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "k", "cols"), [(7, 9, 6), (40, 72, 33), (5, 200, 1), (1, 200, 50), (8, 64, 1)]
)
def test_what_is_not_finite_reaches_its_own_outputs_alone(
    runtime: gpuos.Runtime, dtype: Any, rows: int, k: int, cols: int
) -> None:
    torch = pytest.importorskip("torch")
    a, b = normal(rows, k, dtype=dtype), normal(k, cols, dtype=dtype)
    a[-1, -1], b[0, -1], b[-1, 0] = INF, NAN, 0  # inf at an edge; times 0 it is NaN
    wanted = testing.to_host(torch.matmul(testing._tensor(a), testing._tensor(b))).astype(F32)
    result = run(runtime, "matmul", a, b).astype(F32)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_sum_gives_the_bias_or_zeros(runtime: gpuos.Runtime, dtype: Any) -> None:
    bias = normal(3, dtype=dtype)
    for given in (None, bias):
        wanted = np.zeros(3, dtype) if given is None else bias
        for inputs in [((3, 0), (0,)), ((5, 3, 0), (0,)), ((3, 0), (5, 0))]:
            a, x = (np.zeros(shape, dtype) for shape in inputs)
            result = run(runtime, "matvec", a, x, given)
            np.testing.assert_array_equal(result, np.broadcast_to(wanted, result.shape))
        for shape in [(0,), (4, 0)]:
            result = run(runtime, "vecmat", np.zeros(shape, dtype), np.zeros((0, 3), dtype), given)
            np.testing.assert_array_equal(result, np.broadcast_to(wanted, result.shape))
        result = run(runtime, "matmul", np.zeros((2, 4, 0), dtype), np.zeros((2, 0, 3), dtype), given)
        np.testing.assert_array_equal(result, np.broadcast_to(wanted, (2, 4, 3)))


def test_results_without_elements(runtime: gpuos.Runtime) -> None:
    assert run(runtime, "matmul", np.zeros((0, 3), F32), np.zeros((3, 4), F32)).shape == (0, 4)
    assert run(runtime, "matmul", np.zeros((2, 0, 4, 3), F32), np.zeros((3, 4), F32)).shape == (2, 0, 4, 4)
    assert run(runtime, "matvec", np.zeros((0, 3), F32), np.zeros(3, F32)).shape == (0,)
    assert run(runtime, "vecmat", np.zeros((0, 3), F32), np.zeros((3, 2), F32)).shape == (0, 2)


# --- layouts and batches ---


def views(rows: int, cols: int, dtype: Any, seed: int) -> list[np.ndarray[Any, Any]]:
    """Matrices of one shape, each walked in another way."""
    x = normal(rows, cols, dtype=dtype, seed=seed)
    return [
        x,
        normal(cols, rows, dtype=dtype, seed=seed).T,
        x[::-1],
        x[:, ::-1],
        normal(cols, rows, dtype=dtype, seed=seed)[::-1].T,
        normal(rows, 2 * cols, dtype=dtype, seed=seed)[:, ::2],
        normal(2 * cols, 3 * rows, dtype=dtype, seed=seed)[::2, ::3].T,
        np.broadcast_to(x[:1], x.shape),
        np.broadcast_to(x[:, :1], x.shape),
        normal(1 + rows * cols, dtype=dtype, seed=seed)[1:].reshape(rows, cols),  # not on a 16-byte line
        normal(rows, cols + 8, dtype=dtype, seed=seed)[:, :cols],
    ]


@pytest.mark.parametrize("dtype", [F32, F16])
def test_any_layout(runtime: gpuos.Runtime, dtype: Any) -> None:
    for rows, k, cols in [(6, 16, 9), (40, 72, 40)]:
        x = views(1, 2 * k, dtype, 3)[0][0, ::-2]
        for a in views(rows, k, dtype, 1):
            testing.check(runtime, "matvec", a, x)
            testing.check(runtime, "vecmat", x, a.T)
        for a, b in zip(views(rows, k, dtype, 1), views(k, cols, dtype, 2)[::-1], strict=True):
            testing.check(runtime, "matmul", a, b)
        for bias in views(rows, cols, dtype, 4):
            testing.check(runtime, "matmul", views(rows, k, dtype, 1)[0], views(k, cols, dtype, 2)[0], bias)


def test_transposed_by_parameters(runtime: gpuos.Runtime) -> None:
    for rows, k, cols in [(6, 16, 9), (1, 40, 33), (33, 40, 1)]:
        a, b = normal(2, rows, k), normal(k, cols)
        wanted = run(runtime, "matmul", a, b)
        turned_a, turned_b = a.swapaxes(-1, -2).copy(), b.T.copy()
        for inputs, given in [
            ((turned_a, b), {"transpose_a": True}),
            ((a, turned_b), {"transpose_b": True}),
            ((turned_a, turned_b), {"transpose_a": True, "transpose_b": True}),
        ]:
            result = run(runtime, "matmul", *inputs, **given)
            np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_batches_broadcast(runtime: gpuos.Runtime, dtype: Any) -> None:
    for batch_a, batch_b in [((3,), ()), ((), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((2, 3), (2, 3))]:
        for rows, k, cols in [(4, 10, 6), (1, 10, 6), (5, 16, 1)]:
            a, b = normal(*batch_a, rows, k, dtype=dtype), normal(*batch_b, k, cols, dtype=dtype)
            for bias in (None, normal(cols, dtype=dtype), normal(rows, 1, dtype=dtype)):
                testing.check(runtime, "matmul", a, b, bias)
            testing.check(runtime, "matvec", a, b[..., 0], normal(rows, dtype=dtype))
            testing.check(runtime, "vecmat", a[..., 0, :], b, normal(1, dtype=dtype))


def test_an_output_of_any_layout(runtime: gpuos.Runtime) -> None:
    a, b, bias = normal(33, 40), normal(40, 35), normal(35)
    wanted = matrix.spec_matmul(a, b, bias)
    inputs = [testing.to_device(runtime, each) for each in (a, b, bias)]
    for shape, view in [
        ((35, 33), lambda x: x.T),
        ((33, 70), lambda x: x[:, ::2]),
        ((66, 36), lambda x: x[::2, 1:]),
    ]:
        memory = testing.to_device(runtime, np.full(shape, 7, F32))
        runtime.submit("matmul", inputs, out=view(memory)).result()
        host = testing.to_host(memory)
        np.testing.assert_allclose(view(host), wanted, rtol=1e-5, atol=1e-5)
        assert (host == 7).sum() == host.size - wanted.size
    memory = testing.to_device(runtime, np.full((33, 2), 7, F32))
    runtime.submit("matvec", [inputs[0], inputs[1][:, 3]], out=memory[:, 1]).result()
    np.testing.assert_allclose(testing.to_host(memory)[:, 1], (a @ b[:, 3]), rtol=1e-5, atol=1e-5)
    assert (testing.to_host(memory)[:, 0] == 7).all()


def test_a_product_is_added_to_its_bias_in_place(runtime: gpuos.Runtime) -> None:
    for rows, k, cols in [(40, 50, 36), (40, 50, 1), (1, 50, 36)]:
        inputs = [normal(rows, k), normal(k, cols), normal(rows, cols)]
        wanted = matrix.spec_matmul(*inputs)
        arrays = [testing.to_device(runtime, each) for each in inputs]
        runtime.submit("matmul", arrays, out=arrays[2]).result()
        np.testing.assert_allclose(testing.to_host(arrays[2]), wanted, rtol=1e-5, atol=1e-5)


def test_offsets_past_two_to_the_31(machine: str, runtime: gpuos.Runtime) -> None:
    apart = (1 << 31) + 24
    try:
        if machine == "cuda":
            import torch

            memory: Any = torch.empty(apart + 16, dtype=torch.float16, device="cuda")
        else:
            memory = np.empty(apart + 16, F16)  # pages that nobody touches are not there
    except (MemoryError, RuntimeError):
        pytest.skip("no 4 GiB here: that far offsets are right stays unproved")
    rows, values = [], normal(3, 16, dtype=F16)
    for row in (0, 1):
        memory[row * apart : row * apart + 16] = testing.to_device(runtime, values[row])
    if machine == "cuda":
        torch.cuda.synchronize()
        rows = memory.as_strided((2, 16), (apart, 1))
    else:
        rows = np.lib.stride_tricks.as_strided(memory, (2, 16), (2 * apart, 2))
    x, b = testing.to_device(runtime, values[2]), testing.to_device(runtime, normal(16, 5, dtype=F16))
    submit = runtime.submit
    near = values[:2]
    pairs = [
        (submit("matvec", [rows, x]), matrix.spec_matvec(near, values[2])),
        (submit("vecmat", [x[:2], rows]), matrix.spec_vecmat(values[2][:2], near)),
        (submit("matmul", [rows, b]), matrix.spec_matmul(near, testing.to_host(b))),
    ]
    for ticket, wanted in pairs:
        np.testing.assert_allclose(testing.to_host(ticket.result()).astype(F32), wanted, rtol=2e-3, atol=1e-3)


# --- plans ---


@pytest.mark.parametrize("name", ["matvec", "vecmat"])
def test_a_large_matrix_is_read_by_all_blocks_at_once(name: str) -> None:
    for side in (4096, 8192, 11008):
        shapes = [(side, 4096), (4096,)] if name == "matvec" else [(4096,), (4096, side)]
        plan = plan_of(name, *shapes)
        assert not plan.merge and plan.walks is None
        rounds = -(-plan.tiles // 131)
        assert plan.tiles / (131 * rounds) > 0.8, plan


def test_few_outputs_of_a_long_sum_are_cut_along_k() -> None:
    for name, shapes in [("matvec", [(16, 1 << 18), (1 << 18,)]), ("vecmat", [(1 << 18,), (1 << 18, 64)])]:
        plan = plan_of(name, *shapes)
        assert plan.merge and 66 <= plan.tiles <= 131 and plan.workspace


@pytest.mark.parametrize("name", NAMES)
def test_a_small_call_stays_in_one_block(name: str) -> None:
    shapes = {"matvec": [(64, 256), (256,)], "vecmat": [(256,), (256, 64)], "matmul": [(32, 128), (128, 64)]}
    assert plan_of(name, *shapes[name]).tiles == 1
    assert plan_of("matmul", (64, 256), (256, 256)).tiles == 16


def test_a_weight_that_a_batch_shares_is_one_matrix() -> None:
    for name, shapes in [
        ("matvec", [(48, 64), (2, 20, 64)]),
        ("vecmat", [(2, 20, 64), (64, 48)]),
        ("matmul", [(2, 20, 64), (64, 48)]),
        ("matmul", [(2, 5, 4, 64), (64, 48)]),
    ]:
        plan = plan_of(name, *shapes)
        assert KERNELS[plan.op_id].name == "matrix.tiles" and plan.tiles == 4, plan  # 40 x 48 in 32 x 32
    assert KERNELS[plan_of("matmul", (3, 1, 64), (3, 64, 48)).op_id].name == "matrix.columns"
    assert KERNELS[plan_of("matmul", (3, 48, 64), (3, 64, 1)).op_id].name == "matrix.rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "shapes", "merges"),
    [
        ("matvec", [(300, 264), (264,), (300,)], False),
        ("matvec", [(3, 20_000), (20_000,), (3,)], True),
        ("matvec", [(1, 40_001), (40_001,)], True),
        ("vecmat", [(264,), (264, 300), (300,)], False),
        ("vecmat", [(9000,), (9000, 9), (9,)], True),
        ("vecmat", [(2, 9000), (2, 9000, 8), (2, 8)], True),
        ("matmul", [(100, 70), (70, 90), (90,)], False),
        ("matmul", [(3, 40, 70), (70, 90)], False),
    ],
)
def test_tiles_cover_everything(
    tiled: gpuos.Runtime, name: str, shapes: list[tuple[int, ...]], merges: bool, dtype: Any
) -> None:
    inputs = [normal(*shape, dtype=dtype, seed=at) for at, shape in enumerate(shapes)]
    plan = plan_of(name, *shapes, workers=4, dtype=DType.F32 if dtype is F32 else DType.F16)
    assert plan.tiles > 1 and plan.merge is merges
    check_bound(name, run(tiled, name, *inputs), *inputs)


# --- blocks of threads, without a GPU ---


def on_blocks(
    name: str, *inputs: Any, workers: int, width: int, lanes: int, seed: int = 0, **given: Any
) -> Plan:
    """Run on `workers` blocks in plain Python, and check."""
    operator = TABLE[name]
    operands = [None if each is None else blocks.operand_of(each) for each in inputs]
    (result,) = operator.infer(operands, **operator.read_parameters(given))
    out = blocks.empty(result.shape, testing.numpy_dtype(result.dtype))
    plan, status = blocks.submit(
        name, inputs, out, blocks=workers, width=width, lanes=lanes, seed=seed, **given
    )
    assert status == 0
    check_bound(name, out, *inputs, **given)
    return plan


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU splits is large; here is little."""
    for name, value in {"ALONE": 256, "SHARE": 256, "PIECE": 16}.items():
        monkeypatch.setattr(matrix_plans, name, value)


@pytest.mark.parametrize(
    ("width", "lanes"), [(64, 8), *(pytest.param(n, 32, marks=pytest.mark.slow) for n in (64, 256))]
)
@pytest.mark.parametrize(
    ("name", "shapes", "kernel", "merges"),
    [
        ("matvec", [(9, 1040), (1040,), (9,)], "matrix.rows", None),
        ("matvec", [(2, 5, 133), (133,), (2, 5)], "matrix.rows", None),
        ("matvec", [(1, 1100), (1100,)], "matrix.rows", True),
        ("vecmat", [(150,), (150, 72), (72,)], "matrix.columns", None),
        ("vecmat", [(2, 60), (2, 60, 12)], "matrix.columns", True),
        ("matmul", [(40, 72), (72, 33), (33,)], "matrix.tiles", False),
    ],
)
def test_a_block_of_threads_does_the_same(
    small_tiles: None, name: str, shapes: Any, kernel: str, merges: Any, width: int, lanes: int
) -> None:
    for dtype, workers in [(F32, 6), (F16, 5)]:
        inputs = [normal(*shape, dtype=dtype, seed=at) for at, shape in enumerate(shapes)]
        plan = on_blocks(name, *inputs, workers=workers, width=width, lanes=lanes, seed=workers)
        assert KERNELS[plan.op_id].name == kernel
        assert merges is None or plan.merge is merges


def test_a_block_of_threads_takes_any_layout(small_tiles: None) -> None:
    for at, (a, b) in enumerate(zip(views(6, 16, F16, 1), views(16, 9, F16, 2)[::-1], strict=True)):
        on_blocks("matmul", a, b, workers=1, width=64, lanes=16, seed=at)
        on_blocks("matvec", a, b[:, 1], workers=2, width=32, lanes=8, seed=at)


def test_a_missing_barrier_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [normal(4, 1040), normal(1040)], [normal(60), normal(60, 24)], [normal(9, 70), normal(70, 9)]
    for name, each in zip(NAMES, inputs, strict=True):
        on_blocks(name, *each, workers=1, width=64, lanes=8)
    monkeypatch.setattr(blocks.Block, "barrier", lambda self: None)
    for name, each in zip(NAMES, inputs, strict=True):
        with pytest.raises(AssertionError):
            on_blocks(name, *each, workers=1, width=64, lanes=8)


# --- refusals ---


def test_refusals_come_before_enqueueing(runtime: gpuos.Runtime) -> None:
    submitted = runtime.stats().submitted
    a, b, x = np.ones((3, 4), F32), np.ones((5, 6), F32), np.ones(4, F32)
    for name, inputs, error, message in [
        ("matmul", (a, b), gpuos.ArgumentError, r"\(b\) of shape \(5, 6\) has 5: reshape or transpose"),
        ("matvec", (a, b[0]), gpuos.ArgumentError, r"4 elements along the dim that is summed.*has 6"),
        ("matmul", (x, a), gpuos.ArgumentError, r"needs 2 dims at least.*use matvec or vecmat"),
        ("matvec", (x, x), gpuos.ArgumentError, r"inputs\[0\] \(a\).*needs 2 dims"),
        ("matmul", (a, a.T.astype(F16)), gpuos.DTypeError, r"\(b\) has dtype float16.*float32: convert"),
        ("matvec", (a.astype(np.int32), x), gpuos.DTypeError, r"int32.*convert it first"),
        ("matvec", (a, x, np.ones(3, F16)), gpuos.DTypeError, r"\(bias\) has dtype float16"),
        ("matvec", (a, x, np.ones(4, F32)), gpuos.ArgumentError, r"bias.*\(4,\).*broadcast.*\(3,\).*reshape"),
        ("matmul", (np.ones((2, 3, 4), F32), np.ones((3, 4, 4), F32)), gpuos.ArgumentError, "batch of a"),
    ]:
        with pytest.raises(error, match=message):
            run(runtime, name, *inputs)
    square = testing.to_device(runtime, np.ones((4, 4), F32))
    with pytest.raises(gpuos.ArgumentError, match="is the same memory as"):
        runtime.submit("matmul", [square, square], out=square)
    with pytest.raises(gpuos.ArgumentError, match="overlaps"):
        ones = testing.to_device(runtime, np.ones((4, 4), F32))
        runtime.submit("matmul", [ones, ones, square[0]], out=square)
    assert runtime.stats().submitted == submitted


# --- what a GPU would run ---


@pytest.mark.parametrize("kernel", TABLE["matmul"].kernels, ids=lambda kernel: kernel.name)
def test_it_compiles_to_vector_accesses_and_no_local_memory(kernel: Any) -> None:
    pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
    pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")
    from gpuos_numba.machines import cuda_compile

    ptx = cuda_compile.compile_kernel(kernel, cuda_compile.OLDEST)
    assert not re.search(r"\b(ld|st)\.local|\.local ", ptx)
    assert "fma.rn.f32" in ptx and "ld.global.v2.u64" in ptx
    assert "bar.sync" in ptx
    if kernel.name == "matrix.tiles":
        assert re.search(r"ld\.shared\.v2\.[ubf]64", ptx)
    else:
        assert ptx.count("ld.global.v2.u64") >= 16  # in flight together
