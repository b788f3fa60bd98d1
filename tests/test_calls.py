"""The short way of calls that were checked before: it must never take what the long way would not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gpuos_numba as gpuos
from gpuos_numba.host import calls

torch = pytest.importorskip("torch", reason="the short way takes torch tensors")
pytestmark = pytest.mark.skipif(
    calls.exchange_api(torch.Tensor) is None, reason="this torch has no DLPack exchange API: unproved"
)


@pytest.fixture
def rt(machine: str) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, deadline_s=30) as runtime:
        yield runtime


@pytest.fixture
def device(machine: str) -> str:
    return machine


def sent(rt: gpuos.Runtime) -> int:
    return 0 if rt._calls is None else rt._calls.sent


def three_times(call: Any) -> Any:
    """The first two go the long way, the third the short one."""
    call().result()
    call().result()
    return call().result()


def test_a_call_goes_the_short_way_when_it_comes_again(rt: gpuos.Runtime, device: str) -> None:
    x, y, out = torch.randn(3, 4, 5, device=device).unbind()
    for _ in range(3):
        rt.add(x, y, out=out).wait()
    before = sent(rt)
    for _ in range(6):
        x.normal_()
        if device == "cuda":
            torch.cuda.synchronize()  # a call that a stream must still prepare goes the long way
        assert rt.sub(x, y, out=out).result() is out
        assert torch.equal(out, x - y)
    assert sent(rt) >= before + 3, "the first three times at most it was checked and learned"


@pytest.mark.parametrize(
    "layout", ["contiguous", "transposed", "reversed rows", "broadcast", "scalar", "empty"]
)
def test_any_layout_gives_what_the_long_way_gives(rt: gpuos.Runtime, device: str, layout: str) -> None:
    base = torch.randn(6, 8, device=device)
    x = {
        "contiguous": base,
        "transposed": base.t(),
        "reversed rows": base[:, ::2],
        "broadcast": base[:1].expand(4, 8),
        "scalar": base[0, 0],
        "empty": base[:0],
    }[layout]
    y = torch.randn(x.shape, device=device)
    before = sent(rt)
    for _ in range(4):
        base.normal_()
        assert torch.equal(rt.mul(x, y).result(), x * y)
        assert torch.allclose(rt.softmax(x, dim=-1).result(), x.softmax(-1), atol=1e-6)
    assert sent(rt) > before


def test_outputs_are_allocated_anew(rt: gpuos.Runtime, device: str) -> None:
    x = torch.randn(16, device=device)
    results = [rt.neg(x).result() for _ in range(5)]
    assert len({result.data_ptr() for result in results}) == 5
    assert all(torch.equal(result, -x) for result in results)


def test_several_outputs_and_a_workspace(rt: gpuos.Runtime, device: str) -> None:
    x = torch.randn(3, 32, device=device)
    for _ in range(4):
        codes, scales = rt.kv_quantize(x).result()
        assert torch.allclose(codes.float() * scales[..., None], x, atol=float(x.abs().max()) / 127)
    q, k, v = torch.randn(3, 1, 2, 1, 64, device=device).unbind()
    k, v = k.expand(1, 2, 700, 64).clone().normal_(), v.expand(1, 2, 700, 64).clone().normal_()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for _ in range(4):
        assert torch.allclose(rt.sdpa(q, k, v).result(), wanted, atol=1e-4)


def test_an_output_that_overlaps_in_part_is_refused_also_when_the_call_is_known(
    rt: gpuos.Runtime, device: str
) -> None:
    memory = torch.randn(64, device=device)
    y = torch.randn(16, device=device)
    three_times(lambda: rt.add(memory[:16], y, out=memory[32:48]))
    with pytest.raises(gpuos.ArgumentError, match="overlaps"):
        rt.add(memory[:16], y, out=memory[8:24])
    with pytest.raises(gpuos.ArgumentError, match="overlaps"):
        rt.add(memory[8:24], y, out=memory[:16])
    expected = memory[:16] + y
    assert torch.equal(rt.add(memory[:16], y, out=memory[:16]).result(), expected), "exactly an input is fine"
    rows = torch.randn(2, 8, device=device)
    index = torch.zeros(8, dtype=torch.int64, device=device)
    three_times(lambda: rt.index_select(rows[0], index, out=rows[1]))
    with pytest.raises(gpuos.ArgumentError, match="same memory"):
        rt.index_select(rows[0], index, out=rows[0])


def test_parameters_that_are_equal_and_not_the_same_are_told_apart(rt: gpuos.Runtime, device: str) -> None:
    out = torch.empty(3, device=device)
    for value in (0.0, -0.0, 0.0, -0.0, 0.0, -0.0):
        rt.fill(out=out, value=value).wait()
        assert torch.equal(torch.signbit(out), torch.signbit(torch.full((3,), value, device=device)))
    x = torch.ones(3, dtype=torch.int32, device=device)
    three_times(lambda: rt.add(x, x, alpha=2))
    with pytest.raises(gpuos.GpuosError):
        rt.add(x, x, alpha=2.5)


def test_a_wrong_call_is_refused_after_right_ones(rt: gpuos.Runtime, device: str) -> None:
    x, out = torch.randn(8, device=device), torch.empty(8, device=device)
    three_times(lambda: rt.exp(x, out=out))
    with pytest.raises(gpuos.GpuosError):
        rt.exp(x, out=torch.empty(9, device=device))
    with pytest.raises(gpuos.DTypeError):
        rt.exp(x, out=torch.empty(8, dtype=torch.int32, device=device))
    with pytest.raises(gpuos.GpuosError):
        rt.exp(x.to_sparse(), out=out)
    with pytest.raises(gpuos.GpuosError):
        rt.exp(x, x, out=out)
    with pytest.raises(gpuos.GpuosError):
        rt.exp(x, out=out, nonsense=1)
    if device == "cuda":
        with pytest.raises(gpuos.DeviceError):
            rt.exp(x.cpu(), out=out)


def test_a_lazily_negated_tensor_is_refused_also_when_the_call_is_known(
    rt: gpuos.Runtime, device: str
) -> None:
    numbers = torch.randn(8, dtype=torch.cfloat, device=device)
    plain, negated = numbers.imag, numbers.conj().imag
    assert negated.is_neg() and negated.stride() == plain.stride()
    out = torch.empty(8, device=device)
    torch.testing.assert_close(three_times(lambda: rt.exp(plain, out=out)), plain.exp())
    with pytest.raises(gpuos.ArgumentError, match="negated"):
        rt.exp(negated, out=out)


def test_a_replaced_operator_is_not_mistaken_for_the_one_before(rt: gpuos.Runtime, device: str) -> None:
    x = torch.randn(8, device=device)
    for factor in (2.0, 3.0):
        rt.inject("scaled", f"x * {factor}", replace=True)
        for _ in range(4):
            assert torch.equal(rt.scaled(x).result(), x * factor)
    rt.rollback()
    for _ in range(4):
        assert torch.equal(rt.scaled(x).result(), x * 2.0)


def test_layouts_that_are_used_again_make_templates_invalid(rt: gpuos.Runtime, device: str) -> None:
    x = torch.randn(6, 4, device=device).t()
    three_times(lambda: rt.neg(x))
    before = sent(rt)
    assert before
    rt._drain()  # as when the layout table is full
    for _ in range(4):
        assert torch.equal(rt.neg(x).result(), -x)
    assert sent(rt) == before + 2, "twice the long way, to learn it anew"


def test_more_kinds_of_calls_than_fit_are_all_right(rt: gpuos.Runtime, device: str) -> None:
    memory = torch.randn(3000, device=device)
    for _ in range(3):
        for n in range(1, 2300):
            ticket = rt.neg(memory[:n])
            if n % 100 == 0:
                assert torch.equal(ticket.result(), -memory[:n])
    rt.synchronize()


def test_a_full_ring_is_waited_for(machine: str, device: str) -> None:
    with gpuos.Runtime(machine, capacity=4, deadline_s=30) as rt:
        x = torch.zeros(4, device=device)
        one = torch.ones(4, device=device)
        three_times(lambda: rt.add(x, one))
        for _ in range(2000):
            ticket = rt.add(x, one)
        assert torch.equal(ticket.result(), one)
        assert rt.stats().completed == 2003


def test_memory_lives_until_its_task_has_run(rt: gpuos.Runtime, device: str) -> None:
    def fresh(value: float) -> Any:
        return torch.full((256,), value, device=device)

    three_times(lambda: rt.add(fresh(1.0), fresh(2.0)))
    tickets = [rt.add(fresh(float(i)), fresh(1.0)) for i in range(500)]
    for i, ticket in enumerate(tickets):
        assert bool((ticket.result() == i + 1).all())


def test_a_closed_runtime_refuses_what_it_knew(machine: str, device: str) -> None:
    with gpuos.Runtime(machine, deadline_s=30) as rt:
        x = torch.randn(8, device=device)
        three_times(lambda: rt.neg(x))
    with pytest.raises(gpuos.ClosedError):
        rt.neg(x)


def test_where_inputs_end_and_outputs_begin_is_part_of_a_known_call(rt: gpuos.Runtime, device: str) -> None:
    a, b, out = torch.ones(3, 64, device=device).unbind()
    three_times(lambda: rt.add(a, b, out=out))
    with pytest.raises(gpuos.ArgumentError):
        rt.submit("add", (a,), out=(b, out))
    with pytest.raises(gpuos.ArgumentError):
        rt.submit("add", (a, b), out=(out,))
    rt.synchronize()
    assert torch.equal(out, a + b)


@pytest.mark.parametrize("offset", [0, 8])
def test_a_tensor_whose_storage_was_freed_is_refused(rt: gpuos.Runtime, device: str, offset: int) -> None:
    a, b, out = torch.ones(3, 64, device=device).unbind()
    three_times(lambda: rt.add(a, b, out=out))
    gone = torch.ones(64 + offset, device=device)[offset:]
    gone.untyped_storage().resize_(0)  # as FSDP does
    for inputs, target in (((gone, b), out), ((a, b), gone)):
        with pytest.raises(gpuos.ArgumentError, match="no memory"):
            rt.add(*inputs, out=target)
    rt.synchronize()


def test_threads_that_learn_calls_at_once_learn_each_its_own(rt: gpuos.Runtime, device: str) -> None:
    if device == "cuda":
        pytest.skip("the same code, and there a stream is in the way")
    wrong: list[str] = []

    def work(seed: int, ready: threading.Barrier) -> None:
        ready.wait()
        for step in range(40):
            count = 64 + 4 * step + 7 * seed
            name, truth = (("add", torch.add), ("mul", torch.mul), ("sub", torch.sub))[(step + seed) % 3]
            for _ in range(4):
                x, y, out = torch.rand(count), torch.rand(count), torch.full((count,), -7.0)
                rt.submit(name, (x, y), out=out).wait()
                if not torch.equal(out, truth(x, y)):
                    wrong.append(f"{name} of {count}")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        ready = threading.Barrier(4)
        threads = [threading.Thread(target=work, args=(seed, ready)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    entries = rt._calls._table[rt._calls._table != 0].tolist()  # type: ignore[union-attr]
    assert len(entries) == len(set(entries)) == len(rt._calls.wants)  # type: ignore[union-attr]
