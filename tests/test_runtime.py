"""What a Runtime computes and in which order, on every machine: results, chains, tickets, laps, threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuos_numba
from gpuos_numba import Batch, QueueFull, Runtime, Status, TaskError, Ticket, WaitTimeout, testing
from gpuos_numba.protocol import FAILURE_SLOTS

F32 = np.float32
CANARY = F32(-1234.5)
PAD = 8
SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 1.0, -1.0, 2.0], F32
)
OPERATORS = ["copy", "fill", "add", "sub", "mul", "div", "relu"]
"""Bit for bit, with every layout; tests/test_operators.py covers the whole table."""

# --- how an operand lies in memory: shape of its base, and the view of it ---

Layout = tuple[tuple[int, ...], Callable[[Any], Any]]


def plain(*shape: int) -> Layout:
    return shape, lambda base: base


def expand(base_shape: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    return base_shape, lambda base: np.broadcast_to(base, shape)


SIZES = (1, 3, 4, 5, 15, 16, 17, 1023, 40_000, 300_001)
BIG = (3, 300, 301)
LAYOUTS: dict[str, tuple[Layout, Layout, Layout]] = {
    # name: a, b, out
    **{f"size {size}": (plain(size),) * 3 for size in SIZES},
    "no dimension": (plain(),) * 3,
    "no element": (plain(0),) * 3,
    "no element in 3 dims": (plain(4, 0, 3),) * 3,
    "no element, strided": (((4, 6), lambda b: b[:, 6:6:2]), plain(4, 0), ((4, 6), lambda b: b[:, 3:3])),
    "broadcast to no element": (plain(0, 3), plain(1, 3), plain(0, 3)),
    "scalar with matrix": (plain(), plain(5, 7), plain(5, 7)),
    "row with column": (plain(1, 33), plain(21, 1), plain(21, 33)),
    "expanded": (expand((1, 9), (8, 9)), plain(8, 9), plain(8, 9)),
    "expanded both": (expand((1, 1), (8, 9)), expand((8, 1), (8, 9)), plain(8, 9)),
    "every second": (((6, 20), lambda b: b[:, ::2]), plain(6, 10), ((6, 20), lambda b: b[:, 1::2])),
    "transposed": (((7, 5), lambda b: b.T), plain(5, 7), plain(5, 7)),
    "transposed out": (plain(5, 7), plain(5, 7), ((7, 5), lambda b: b.T)),
    "all transposed": (((7, 5), lambda b: b.T),) * 3,
    "backwards": (((31,), lambda b: b[::-1]), plain(31), plain(31)),
    "backwards out": (plain(4, 6), plain(4, 6), ((4, 6), lambda b: b[::-1, ::-1])),
    "backwards by two": (((12, 9), lambda b: b[::-2, ::-1]), plain(6, 9), ((6, 18), lambda b: b[:, ::-2])),
    "extents of 1": (
        ((2, 4, 3), lambda b: b[:1, :, 1:2]),
        plain(1, 4, 1),
        ((5, 4, 2), lambda b: b[2:3, :, :1]),
    ),
    "8 dims": (plain(2, 1, 3, 2, 1, 2, 3, 2), plain(2, 2, 1, 2, 2, 1, 3, 2), plain(2, 2, 3, 2, 2, 2, 3, 2)),
    "8 dims permuted": (
        ((2, 3, 2, 3, 2, 3, 2, 2), lambda b: b.transpose(7, 0, 6, 1, 5, 2, 4, 3)),
        plain(2, 2, 2, 3, 3, 2, 2, 3),
        ((2, 2, 2, 3, 3, 2, 2, 6), lambda b: b[..., ::2]),
    ),
    "tiled broadcast": (plain(3, 1, 301), plain(300, 1), plain(*BIG)),
    "tiled strided out": (plain(*BIG), plain(*BIG), ((3, 300, 602), lambda b: b[..., 1::2])),
    "a at 4 bytes": (((1024,), lambda b: b[1:1001]), plain(1000), plain(1000)),
    "b at 8 bytes": (plain(1000), ((1024,), lambda b: b[2:1002]), plain(1000)),
    "out at 12 bytes": (plain(1000), plain(1000), ((1024,), lambda b: b[3:1003])),
    "all at 4 bytes": (((1024,), lambda b: b[1:1006]),) * 3,
    "tiled, all at 4 bytes": (((300_008,), lambda b: b[1:300_002]),) * 3,
}


class Operand:
    """A view inside a buffer of its own, with room around it that must stay as it is."""

    def __init__(self, arrays: Any, layout: Layout, fill: Callable[[int], Any]) -> None:
        base_shape, view = layout
        size = int(np.prod(base_shape, dtype=np.int64))
        self.index = view(np.arange(PAD, PAD + size).reshape(base_shape))
        self.host = np.asarray(fill(size + 2 * PAD), F32)
        self.buffer = arrays.to_device(self.host)
        first = int(self.index.reshape(-1)[0]) if self.index.size else PAD
        self.view = arrays.walk(self.buffer, self.index, first)

    @property
    def values(self) -> np.ndarray[Any, Any]:
        return self.host[self.index]


def assert_same_bits(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    """Equal bit for bit, but one NaN is as good as another."""
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


def numbers(seed: int) -> Callable[[int], np.ndarray[Any, Any]]:
    """Random numbers with the special ones among them, in an order that pairs them all in the long run."""

    def fill(count: int) -> np.ndarray[Any, Any]:
        random = np.random.default_rng(seed)
        values = random.standard_normal(count).astype(F32) * F32(10)
        at = random.random(count) < 0.5
        values[at] = random.choice(SPECIAL, int(at.sum()))
        return values

    return fill


def canaries(count: int) -> np.ndarray[Any, Any]:
    return np.full(count, CANARY, F32)


def spec_of(name: str, inputs: list[np.ndarray[Any, Any]], shape: tuple[int, ...], value: float) -> Any:
    spec = gpuos_numba.operators()[name].spec
    assert spec is not None
    with np.errstate(all="ignore"):
        return spec(shape, value) if name == "fill" else spec(*inputs)


def check(rt: Runtime, arrays: Any, name: str, layouts: tuple[Layout, Layout, Layout], seed: int = 1) -> None:
    arity = gpuos_numba.operators()[name].inputs[1]
    target = Operand(arrays, layouts[2], canaries)
    # One input takes the output's shape.
    sources = layouts[:2] if arity == 2 else layouts[1:2] if arity == 1 else ()
    inputs = [Operand(arrays, layout, numbers(seed + i)) for i, layout in enumerate(sources)]
    if arity == 1 and inputs[0].index.shape != target.index.shape:
        inputs = [Operand(arrays, plain(*target.index.shape), numbers(seed))]
    scalars = {"value": -2.5} if name == "fill" else {}
    rt.submit(name, [x.view for x in inputs], target.view, **scalars).result(timeout_s=20)
    target.host[target.index] = spec_of(name, [x.values for x in inputs], target.index.shape, -2.5)
    assert_same_bits(arrays.to_host(target.buffer), target.host)
    for x in inputs:
        assert_same_bits(arrays.to_host(x.buffer), x.host)


# --- operators ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_equals_its_spec_and_touches_nothing_else(
    runtime: Runtime, arrays: Any, name: str, layout: str
) -> None:
    check(runtime, arrays, name, LAYOUTS[layout])


@pytest.mark.parametrize("name", OPERATORS)
def test_special_numbers_meet_each_other(runtime: Runtime, arrays: Any, name: str) -> None:
    arity = gpuos_numba.operators()[name].inputs[1]
    a, b = (x.reshape(-1) for x in np.meshgrid(SPECIAL, SPECIAL))
    for value in SPECIAL if name == "fill" else [F32(0)]:
        inputs = [arrays.to_device(x) for x in (a, b)[:arity]]
        out = arrays.to_device(canaries(a.size))
        scalars = {"value": float(value)} if name == "fill" else {}
        got = runtime.submit(name, inputs, out, **scalars).result(timeout_s=20)
        assert_same_bits(arrays.to_host(got), spec_of(name, [a, b][:arity], a.shape, float(value)))


@st.composite
def two_operands(draw: Any) -> tuple[Layout, Layout, Layout]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))

    def layout(may_expand: bool) -> Layout:
        steps = [draw(st.sampled_from((1, 1, 2, 3) + ((0,) if may_expand else ()))) for _ in shape]
        base = tuple(1 if step == 0 else extent * step for extent, step in zip(shape, steps, strict=True))
        order = tuple(draw(st.permutations(range(len(shape)))))
        back = tuple(np.argsort(order).tolist()) if order else ()
        cut = tuple(slice(None, None, max(step, 1)) for step in steps)
        stored = tuple(base[axis] for axis in order)
        return stored, lambda b: np.broadcast_to(b.transpose(back)[cut], shape)

    return layout(True), layout(True), layout(False)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts=two_operands(), name=st.sampled_from(OPERATORS), seed=st.integers(0, 1000))
def test_any_layout_equals_the_spec(
    runtime: Runtime, arrays: Any, layouts: tuple[Layout, Layout, Layout], name: str, seed: int
) -> None:
    check(runtime, arrays, name, layouts, seed)


@pytest.mark.parametrize("count", [1, 5, 1000, 300_001])
@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "fill"])
def test_the_output_may_be_an_input(runtime: Runtime, arrays: Any, name: str, count: int) -> None:
    arity = gpuos_numba.operators()[name].inputs[1]
    host = [numbers(i)(count) for i in range(arity)]
    for which in range(arity):
        inputs = [arrays.to_device(x) for x in host]
        runtime.submit(name, inputs, inputs[which]).result(timeout_s=20)
        assert_same_bits(arrays.to_host(inputs[which]), spec_of(name, host, (count,), 0))
    same = arrays.to_device(host[0])
    runtime.submit(name, [same] * arity, same).result(timeout_s=20)
    assert_same_bits(arrays.to_host(same), spec_of(name, [host[0]] * arity, (count,), 0))


def test_sugar_allocates_outputs(runtime: Runtime, arrays: Any) -> None:
    a, b = arrays.to_device([[1.0], [2.0]]), arrays.to_device([10.0, 20.0, 30.0])
    out = runtime.add(a, b).result(timeout_s=20)
    np.testing.assert_array_equal(arrays.to_host(out), [[11, 21, 31], [12, 22, 32]])
    assert runtime.nop().result(timeout_s=20) is None


def test_arrays_and_bases_may_be_dropped_once_submitted(runtime: Runtime, arrays: Any) -> None:
    results = []
    for turn in range(200):
        a = arrays.to_device(np.full(5000, turn))[::2]
        results.append(runtime.add(a, a))
        del a
        arrays.to_device(np.full(5000, -1.0))  # would land where the dropped one was
    for turn, ticket in enumerate(results):
        np.testing.assert_array_equal(arrays.to_host(ticket.result(timeout_s=20)), np.full(2500, 2 * turn))


# --- batches, chains, after ---


@pytest.mark.parametrize("max_run", [1, 3, 256])
def test_a_linked_batch_is_a_chain(machine: str, arrays: Any, max_run: int) -> None:
    with Runtime(machine, max_run=max_run) as rt:
        x, one = arrays.to_device(np.zeros(5)), arrays.to_device(np.ones(5))
        batch = rt.batch("add", [((x, one), x)] * 1000)
        for _ in range(3):
            ticket = rt.submit_batch(batch, linked=True)
        assert len(ticket) == 1000
        ticket.wait(20)
        rt.synchronize(20)
        assert arrays.to_host(x)[0] <= 3000  # three chains, unordered among themselves
        x2 = arrays.to_device(np.zeros(5))
        rt.submit_batch(rt.batch("add", [((x2, one), x2)] * 1000), linked=True).result(timeout_s=20)
        np.testing.assert_array_equal(arrays.to_host(x2), np.full(5, 1000))


@pytest.mark.parametrize("capacity", [2, 4, 64])
@pytest.mark.parametrize("max_run", [1, 3, 256])
def test_a_chain_holds_tiled_and_strided_tasks(
    machine: str, arrays: Any, capacity: int, max_run: int
) -> None:
    with Runtime(machine, max_run=max_run, capacity=capacity, submit_timeout_s=5, deadline_s=5) as rt:
        one, small = arrays.to_device([1.0]), arrays.to_device([0.0])
        big, copy = arrays.to_device(np.zeros(100_000)), arrays.to_device(np.zeros(100_000))
        up = rt.batch("add", [((small, one), small)] * 4)
        gather = rt.batch("add", [((big, small), big)])
        keep = rt.batch("copy", [((big,), copy)])
        chain = Batch.concatenate([up, gather, keep[0:1], up[:2], keep] * 5)
        ticket = rt.submit_batch(chain, linked=True)
        ticket.result(timeout_s=30)
        expected = small_now = 0
        for _ in range(5):
            small_now += 4
            expected += small_now
            small_now += 2
        assert arrays.to_host(small)[0] == small_now
        np.testing.assert_array_equal(arrays.to_host(big), np.full(100_000, expected))
        np.testing.assert_array_equal(arrays.to_host(copy), np.full(100_000, expected))


def test_after_orders_single_tasks(runtime: Runtime, arrays: Any) -> None:
    x, one, ticket = arrays.to_device(np.zeros(3)), arrays.to_device(np.ones(3)), None
    for _ in range(500):
        ticket = runtime.add(x, one, out=x, after=ticket)
    assert ticket is not None
    np.testing.assert_array_equal(arrays.to_host(ticket.result(timeout_s=20)), np.full(3, 500))


def test_after_joins_a_diamond(runtime: Runtime, arrays: Any) -> None:
    size = 100_000  # tiled, so that both sides take a while
    one = arrays.to_device(np.ones(size))
    outs = [arrays.to_device(np.zeros(size)) for _ in range(4)]
    for turn in range(1, 30):
        top = runtime.fill(out=outs[0], value=float(turn))
        left = runtime.add(outs[0], one, out=outs[1], after=top)
        right = runtime.mul(outs[0], outs[0], out=outs[2], after=[top])
        end = runtime.add(outs[1], outs[2], out=outs[3], after=(left, right))
        np.testing.assert_array_equal(
            arrays.to_host(end.result(timeout_s=20)), np.full(size, turn + 1 + turn * turn)
        )


@pytest.mark.parametrize("linked", [False, True])
def test_after_a_batch_means_after_all_of_it(runtime: Runtime, arrays: Any, linked: bool) -> None:
    x, one = arrays.to_device(np.zeros(64)), arrays.to_device(np.ones(1))
    calls = [((x[i : i + 1], one), x[i : i + 1]) for i in range(64)]
    first = runtime.submit_batch(runtime.batch("add", calls), linked=linked)
    second = runtime.submit_batch(runtime.batch("add", calls), after=first)
    total = runtime.copy(x, after=second).result(timeout_s=20)
    np.testing.assert_array_equal(arrays.to_host(total), np.full(64, 2))


def test_a_batch_is_sliced_joined_and_sent_again(runtime: Runtime, arrays: Any) -> None:
    x, one = arrays.to_device(np.zeros((8, 6))), arrays.to_device(np.ones((8, 3)))
    halves = x[:, ::2]  # layouts travel with slices
    batch = runtime.batch("add", [((halves[i], one[i]), halves[i]) for i in range(8)])
    assert len(batch) == 8 and len(batch[2:5]) == 3 and len(batch[::2]) == 4
    for _ in range(2):
        runtime.submit_batch(batch[2:5]).result(timeout_s=20)
    runtime.submit_batch(Batch.concatenate([batch[:1], batch[7:]])).result(timeout_s=20)
    got = arrays.to_host(x)
    np.testing.assert_array_equal(got[:, 0], [1, 0, 2, 2, 2, 0, 0, 1])
    np.testing.assert_array_equal(got[:, 1::2], np.zeros((8, 3)))


def test_the_result_of_a_batch_is_its_outputs(runtime: Runtime, arrays: Any) -> None:
    xs = [arrays.to_device(np.full(3, i)) for i in range(5)]
    outs = runtime.submit_batch(runtime.batch("mul", [((x, x), None) for x in xs])).result(timeout_s=20)
    assert [arrays.to_host(out)[0] for out in outs] == [0, 1, 4, 9, 16]


# --- tickets ---


def unknown(rt: Runtime, count: int = 1) -> Batch:
    """Tasks whose operator no table has."""
    batch = rt.batch("nop", [((), None)] * count)
    batch.tasks["op_id"] = 999
    return batch


def test_a_ticket_looked_at_ten_laps_later_has_its_own_status(machine: str) -> None:
    with Runtime(machine, capacity=4) as rt:
        tickets = []
        for turn in range(44):
            tickets.append(rt.submit_batch(unknown(rt)) if turn % 5 == 3 else rt.nop())
        with pytest.raises(TaskError):
            rt.synchronize(20)
        for turn, ticket in enumerate(tickets):
            assert ticket.done
            assert ticket.status == (Status.UNKNOWN_OPERATOR if turn % 5 == 3 else Status.OK), turn
            assert ticket.wait(0) is ticket


def test_a_worker_side_error_is_raised_at_result_and_at_synchronize(machine: str, arrays: Any) -> None:
    with Runtime(machine) as rt:
        bad = rt.submit_batch(unknown(rt))
        good = rt.add(arrays.to_device([1.0]), arrays.to_device([2.0]))
        assert arrays.to_host(good.result(timeout_s=20))[0] == 3
        with pytest.raises(TaskError, match="UNKNOWN_OPERATOR") as caught:
            bad.result(timeout_s=20)
        assert caught.value.position == bad.position and caught.value.status == Status.UNKNOWN_OPERATOR
        assert bad.wait() is bad  # waiting never raises for a status
        with pytest.raises(TaskError, match=f"position {bad.position} "):
            rt.synchronize(20)
        rt.synchronize(20)  # said once
        stats = rt.stats()
        assert (stats.submitted, stats.completed, stats.failed) == (2, 2, 1)


@pytest.mark.parametrize("linked", [False, True])
def test_one_failed_task_of_a_batch_leaves_the_others_alone(machine: str, arrays: Any, linked: bool) -> None:
    with Runtime(machine) as rt:
        x, one = arrays.to_device(np.zeros(2)), arrays.to_device(np.ones(2))
        add = rt.batch("add", [((x, one), x)])
        ticket = rt.submit_batch(Batch.concatenate([add, unknown(rt), unknown(rt)]), linked=linked).wait(20)
        assert ticket.status == Status.UNKNOWN_OPERATOR
        with pytest.raises(TaskError) as caught:
            ticket.result()
        assert caught.value.position == ticket.ranges[0][0] + 1
        assert arrays.to_host(x)[0] == 1
        rt.submit_batch(add).result(timeout_s=20)
        assert arrays.to_host(x)[0] == 2


def test_an_error_older_than_the_failure_log_is_never_called_ok(machine: str) -> None:
    with Runtime(machine, capacity=1024) as rt:
        first, fine = rt.submit_batch(unknown(rt)), rt.nop()
        many = unknown(rt, 1024)
        for _ in range(FAILURE_SLOTS // 1024):
            last = rt.submit_batch(many)
            with pytest.raises(TaskError):
                rt.synchronize(20)
        second = rt.submit_batch(unknown(rt)).wait(20)
        with pytest.raises(TaskError):
            rt.synchronize(20)
        assert first.status == Status.FORGOTTEN
        with pytest.raises(TaskError, match="FORGOTTEN"):
            first.result()
        assert fine.status != Status.UNKNOWN_OPERATOR
        assert second.status == Status.UNKNOWN_OPERATOR and last.done
        assert rt.nop().wait(20).status == Status.OK
        assert rt.stats().failed == FAILURE_SLOTS + 2


def test_a_ticket_says_what_it_is(runtime: Runtime) -> None:
    ticket = runtime.submit_batch(runtime.batch("nop", [((), None)] * 3)).wait(20)
    assert len(ticket) == 3 and "nop x3" in repr(ticket) and "OK" in repr(ticket)
    assert ticket.position == ticket.ranges[-1][0] + ticket.ranges[-1][1] - 1


# --- the ring ---


@pytest.mark.parametrize("capacity", [2, 4])
@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3, 2**63 - 3, 2**64 - 3])
def test_positions_wrap(machine: str, arrays: Any, start: int, capacity: int) -> None:
    with Runtime(machine, capacity=capacity, start_position=start) as rt:
        one, xs = arrays.to_device([1.0]), arrays.to_device(np.zeros(20))
        bad = rt.submit_batch(unknown(rt))
        assert bad.position == start
        tickets = [rt.add(xs[i : i + 1], one, out=xs[i : i + 1]) for i in range(20)]
        assert [ticket.position for ticket in tickets] == [(start + 1 + i) % 2**64 for i in range(20)]
        chain = rt.batch("add", [((xs[:1], one), xs[:1])] * 30)
        rt.submit_batch(chain, linked=True, after=tickets[0]).result(timeout_s=20)
        assert all(ticket.wait(20).status == Status.OK for ticket in tickets)
        np.testing.assert_array_equal(arrays.to_host(xs), [31] + [1] * 19)
        assert bad.status == Status.UNKNOWN_OPERATOR
        with pytest.raises(TaskError):
            rt.synchronize(20)
        stats = rt.stats()
        assert (stats.submitted, stats.completed, stats.failed, stats.queue_depth) == (51, 51, 1, 0)


@pytest.mark.parametrize("capacity", [2, 8])
def test_many_producers_each_task_once(machine: str, arrays: Any, capacity: int) -> None:
    threads, each = 8, 2000 if machine == "cpu" else 500
    with Runtime(machine, capacity=capacity) as rt:
        counts, one = arrays.to_device(np.zeros(threads * each)), arrays.to_device([1.0])
        tickets: list[list[Ticket]] = [[] for _ in range(threads)]
        errors: list[BaseException] = []

        def produce(which: int) -> None:
            try:
                for index in range(which * each, (which + 1) * each):
                    x = counts[index : index + 1]
                    tickets[which].append(rt.add(x, one, out=x))
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=produce, args=(which,)) for which in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        assert not errors
        rt.synchronize(60)
        np.testing.assert_array_equal(arrays.to_host(counts), np.ones(threads * each))
        positions = [[ticket.position for ticket in mine] for mine in tickets]
        assert all(mine == sorted(mine) for mine in positions)
        assert sorted(p for mine in positions for p in mine) == list(range(threads * each))
        stats = rt.stats()
        assert stats.submitted == stats.completed == stats.ingested == threads * each
        assert stats.failed == stats.queue_depth == 0


def test_a_full_ring_refuses_and_forgets_nothing(machine: str) -> None:
    with Runtime(machine, capacity=4) as rt:
        rt.nop().wait(20)
        holds = rt._keeper.holds()
        holds.take()  # nobody will serve
        assert rt._machine.wait_exited(10)
        tickets = [rt.nop() for _ in range(4)]
        begin = time.monotonic()
        assert rt.try_submit("nop") is None
        assert time.monotonic() - begin < 0.2
        with pytest.raises(QueueFull, match=r"4 slots.*0\.15 s.*0 of 1"):
            rt.submit("nop", timeout_s=0.15)
        with pytest.raises(QueueFull, match="0 of 3"):
            rt.submit_batch(rt.batch("nop", [((), None)] * 3), timeout_s=0.05)
        assert 0.2 < time.monotonic() - begin < 5
        with pytest.raises(WaitTimeout, match=r"0\.1 s"):
            tickets[0].wait(0.1)
        with pytest.raises(WaitTimeout):
            rt.synchronize(0.05)
        assert not tickets[0].done and tickets[0].status is None and "pending" in repr(tickets[0])
        stats = rt.stats()
        assert (stats.submitted, stats.completed, stats.queue_depth, stats.parked) == (5, 1, 4, True)
        holds.give_back()
        holds.serve()
        for ticket in tickets:
            assert ticket.wait(20).status == Status.OK
        ticket = rt.try_submit("nop")
        assert ticket is not None
        ticket.wait(20)


def test_a_batch_larger_than_the_ring_says_how_much_was_sent(machine: str) -> None:
    with Runtime(machine, capacity=4) as rt:
        holds = rt._keeper.holds()
        holds.take()
        with pytest.raises(QueueFull, match="4 of 10"):
            rt.submit_batch(rt.batch("nop", [((), None)] * 10), timeout_s=0.05)
        holds.give_back()
        holds.serve()
        rt.synchronize(20)
        assert rt.stats().completed == 4


# --- parking ---


def test_parking_and_coming_back(machine: str, arrays: Any) -> None:
    with Runtime(machine) as rt:
        x, one = arrays.to_device([0.0]), arrays.to_device([1.0])
        for turn in range(1, 20):
            rt.add(x, one, out=x).result(timeout_s=20)
            rt.park()
            stats = rt.stats()
            assert stats.parked and stats.queue_depth == 0 and stats.completed == turn
        assert arrays.to_host(x)[0] == 19
        assert rt.stats().relaunches == rt.stats().launches - 1 >= 18


def test_leases_end_under_load(machine: str) -> None:
    with Runtime(machine, lease_s=0.002) as rt:
        batch, sent, end = rt.batch("nop", [((), None)] * 100), 0, time.monotonic() + 0.5
        while time.monotonic() < end:
            rt.submit_batch(batch)
            sent += 100
        rt.synchronize(20)
        stats = rt.stats()
        assert stats.completed == sent and stats.launches > 3


def test_parking_while_others_submit_strands_nothing(machine: str) -> None:
    with Runtime(machine, capacity=64) as rt:
        stop, sent = threading.Event(), [0, 0]

        def produce(which: int) -> None:
            while not stop.is_set():
                rt.nop().wait(20)
                sent[which] += 1

        threads = [threading.Thread(target=produce, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            rt.park()
            time.sleep(0.002)  # a park right after a park ends a launch before it has taken anything
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert rt.stats().completed == sum(sent) and min(sent) > 0


def test_round_trips_are_measured(machine: str) -> None:
    with Runtime(machine) as rt:
        times = rt.round_trip_ns(rt.batch("nop", [((), None)]), 100)
        assert times.shape == (100,) and (times > 0).all()


# --- stress ---


def _stress(machine: str, total: int, threads: int = 3, capacity: int = 4) -> None:
    """Adds to one counter a lane, as chains, between batches of nop: each exactly once and in order."""
    from conftest import Arrays

    arrays, chunk = Arrays(machine), 2000
    with Runtime(machine, capacity=capacity, submit_timeout_s=120, deadline_s=60) as rt:
        counters = [arrays.to_device([0.0]) for _ in range(threads)]
        one, errors = arrays.to_device([1.0]), []
        rounds = total // (threads * chunk)
        spare = rt.batch("nop", [((), None)] * (chunk // 2))

        def produce(x: Any) -> None:
            try:
                chain = rt.batch("add", [((x, one), x)] * (chunk // 2))
                ticket = None
                for _ in range(rounds):
                    if ticket is not None:
                        ticket.wait(120)
                    ticket = rt.submit_batch(chain, linked=True)
                    rt.submit_batch(spare)
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=produce, args=(x,)) for x in counters]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not errors
        rt.synchronize(120)
        for x in counters:
            assert arrays.to_host(x)[0] == rounds * chunk // 2
        stats = rt.stats()
        assert stats.completed == stats.submitted == rounds * threads * chunk and stats.failed == 0


def test_a_million_tasks_through_four_slots() -> None:
    _stress("cpu", 1_000_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_million_tasks_through_four_slots() -> None:
    _stress("cpu", 10_000_000)


def test_a_launch_is_as_wide_as_the_tiles_that_wait(machine: str) -> None:
    """One tiled task is work for many blocks."""
    with Runtime(machine, workers=2, quiet_workers=1) as rt:
        rt.nop().wait(10)
        rt.park()
        rt.nop().wait(10)
        assert rt.stats().workers == 1
        rt.park()
        out = testing.to_device(rt, np.zeros(1 << 20, np.float32))
        batch = rt.batch("fill", [((), out)], value=1.0)
        assert batch.tasks["tiles"][0] > 2
        rt.submit_batch(batch).wait(10)
        assert rt.stats().workers == 2
