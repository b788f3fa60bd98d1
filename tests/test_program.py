"""A program is its calls one after another, whatever arrays and shapes come and however it is cut."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuos_numba import ArgumentError, DTypeError, Runtime, TaskError, Ticket, testing
from gpuos_numba.device.operators import TABLE
from gpuos_numba.program import Program

F32 = np.float32
TIMEOUT_S = 30.0
UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.fixture(scope="module")
def rt(machine: str) -> Iterator[Runtime]:
    """More workers than one, so that runs of a program meet."""
    with Runtime(machine, workers=3 if machine == "cpu" else None) as runtime:
        yield runtime


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(F32)


def result(ticket: Ticket) -> Any:
    return ticket.result(TIMEOUT_S)


def same(a: Any, b: Any) -> None:
    """Equal arrays, NaN equal to NaN: older ml_dtypes do not tell NumPy which bfloat16 those are."""
    wide = [each.astype(F32) if each.dtype.name == "bfloat16" else each for each in (a, b)]
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(*wide)


# --- random programs ---


class RandomProgram:
    """Instructions drawn once, to be carried out on recorded arrays or, one after another, on real ones.

    Over matrices of shape (n, m): whole ones, single rows and pairs of neighbouring rows are operands and
    outputs; results are drawn again like arguments.
    """

    ROWS = 4

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], matrices: int, length: int) -> None:
        self.matrices = matrices
        made = {"matrix": matrices, "row": 0, "pair": 0}
        self.steps: list[tuple[str, list[Any], Any, str]] = []

        def operand(kind: str) -> tuple[str, int, str, int]:
            """(kind of the array, its number, how it is viewed, row)."""
            number = draw(st.integers(0, made["matrix"] + made[kind] * (kind != "matrix") - 1))
            if kind == "matrix":
                return "matrix", number, "whole", 0
            if number >= made["matrix"]:
                return kind, number - made["matrix"], "whole", 0
            last = self.ROWS - 1 if kind == "row" else self.ROWS - 2
            return "matrix", number, kind, draw(st.integers(-1 if kind == "row" else 0, last))

        for _ in range(length):
            kind = draw(st.sampled_from(["matrix", "row", "row", "pair"]))
            name = draw(st.sampled_from(["add", "mul", "relu", "neg", "softmax", "scale"]))
            inputs: list[Any] = [operand(kind)]
            if name in ("add", "mul"):
                inputs.append(operand(draw(st.sampled_from([kind, "row"]))))
                if draw(st.booleans()):
                    inputs.reverse()
            out = operand(kind) if draw(st.booleans()) else None
            if out is not None and any(out[:2] == each[:2] and out != each for each in inputs):
                out = None  # it could overlap an input in part, which is refused
            if out is not None and name == "softmax" and out in inputs:
                out = None
            self.steps.append((name, inputs, out, kind))
            if out is None:
                made[kind] += 1

    def __call__(self, rt: Runtime, *arguments: Any) -> tuple[Any, ...]:
        *matrices, number = arguments
        made: dict[str, list[Any]] = {"matrix": list(matrices), "row": [], "pair": []}

        def view(operand: tuple[str, int, str, int]) -> Any:
            kind, number, how, row = operand
            array = made[kind][number]
            return array if how == "whole" else array[row] if how == "row" else array[row : row + 2]

        results = []
        for name, inputs, out, kind in self.steps:
            arrays = [view(each) for each in inputs]
            target = None if out is None else view(out)
            if name == "scale":
                ticket = rt.submit("mul", [*arrays, number], target)
            elif name == "softmax":
                ticket = rt.submit("softmax", arrays, target, dim=-1)
            else:
                ticket = rt.submit(name, arrays, target)
            array = ticket.result()
            if out is None:
                made[kind].append(array)
                results.append(array)
        return tuple(results)


def check_random(rt: Runtime, arrays: Any, data: st.DataObject) -> None:
    program = RandomProgram(data.draw, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 25)))
    recorded: Program | None = None
    shapes = data.draw(st.lists(st.sampled_from([(4, 8), (5, 33), (7, 1)]), min_size=1, max_size=3))
    for turn, shape in enumerate([*shapes, shapes[0]]):
        host = [normal(*shape, seed=10 * turn + i) for i in range(program.matrices)]
        ours, theirs = [[arrays.to_device(each) for each in host] for _ in range(2)]
        number = 0.5 + turn
        if recorded is None:
            recorded = rt.program(lambda *args: program(rt, *args), (*ours, number))
        got = result(recorded(*ours, number))
        want = program(rt, *theirs, number)
        rt.synchronize(TIMEOUT_S)
        for a, b in zip([*ours, *(got or ())], [*theirs, *want], strict=True):
            same(arrays.to_host(a), arrays.to_host(b))


@settings(max_examples=12, **UNHURRIED)
@given(st.data())
def test_a_random_program_equals_its_calls_in_order(rt: Runtime, arrays: Any, data: st.DataObject) -> None:
    check_random(rt, arrays, data)


@pytest.mark.slow
@settings(max_examples=3000, **UNHURRIED)
@given(st.data())
def test_many_random_programs_equal_their_calls_in_order(
    rt: Runtime, arrays: Any, data: st.DataObject
) -> None:
    check_random(rt, arrays, data)


# --- every operator ---

FAMILIES = ["add", "sum", "softmax", "add_rms_norm", "rope", "masked_fill", "concat", "kv_append", "matmul",
            "sdpa"]  # fmt: skip


def check_operator(rt: Runtime, arrays: Any, name: str, seed: int) -> None:
    """A program of one call, and of another call on its result's memory, against the calls themselves."""
    operator = TABLE[name]
    if operator.example is None:
        pytest.skip(f"{name} has no example")
    inputs, parameters = operator.example(testing.RandomDraw(seed))
    given = parameters.pop("out", None)
    # Views of arguments are arguments of their own here: what they are made of does not matter.
    outs = [given] if given is not None and not isinstance(given, tuple) else list(given or ())
    places = [i for i, each in enumerate(inputs) if isinstance(each, np.ndarray)]

    def call(*args: Any) -> Any:
        read = list(inputs)
        for place, each in zip(places, args, strict=False):
            read[place] = each
        written = args[len(places) :]
        out = None if given is None else written[0] if operator.outputs == 1 else tuple(written)
        return rt.submit(name, read, out, **parameters).result()

    def fresh() -> list[Any]:
        return [testing.to_device(rt, each.copy()) for each in [*(inputs[i] for i in places), *outs]]

    if not places and given is None and operator.outputs:
        pytest.skip(f"{name} has nothing to take a shape from")
    program = rt.program(lambda *args: _flat(call(*args)), fresh())
    for _ in range(2):
        ours, theirs = fresh(), fresh()
        got, want = result(program(*ours)), _flat(call(*theirs))
        rt.synchronize(TIMEOUT_S)
        for a, b in zip([*ours, *(got or ())], [*theirs, *want], strict=True):
            same(testing.to_host(a), testing.to_host(b))


def _flat(made: Any) -> tuple[Any, ...]:
    return () if made is None else tuple(made) if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_operator_in_a_program_is_that_operator(rt: Runtime, arrays: Any, name: str) -> None:
    for seed in range(2):
        check_operator(rt, arrays, name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TABLE))
def test_every_operator_in_a_program_is_that_operator(rt: Runtime, arrays: Any, name: str) -> None:
    for seed in range(10):
        check_operator(rt, arrays, name, seed)


# --- one thing at a time ---


def test_a_wide_program_takes_rows_by_number_whatever_their_length(rt: Runtime, arrays: Any) -> None:
    rows = 300
    x, y, out = (arrays.to_device(np.zeros((rows, 16))) for _ in range(3))

    def body(x: Any, y: Any, out: Any) -> None:
        for row in range(rows):
            rt.add(x[row], y[rows - 1 - row], out=out[row])

    program = rt.program(body, (x, y, out))
    for length in (16, 1, 40):
        a, b = normal(rows, length), normal(rows, length, seed=1)
        out = arrays.to_device(np.full((rows, length), np.nan))
        result(program(arrays.to_device(a), arrays.to_device(b), out))
        np.testing.assert_array_equal(arrays.to_host(out), a + b[::-1])


def test_three_indices_and_large_ones_reach_their_elements(rt: Runtime, arrays: Any) -> None:
    host = normal(3, 4, 5, 6)
    x, out = arrays.to_device(host), arrays.to_device(np.zeros((3, 4, 5, 6)))
    places = [(i, j, k) for i in range(3) for j in range(4) for k in range(5)]

    def body(x: Any, out: Any) -> None:
        for i, j, k in places:
            rt.relu(x[i, j, k], out=out[i][j][k])

    result(rt.program(body, (x, out))(x, out))
    np.testing.assert_array_equal(arrays.to_host(out), np.maximum(host, 0))
    long = arrays.to_device(np.arange(100_000))
    parts = [0, 70_000, 99_999, 65_536]
    chosen = rt.program(lambda x: tuple(rt.neg(x[p : p + 1]).result() for p in parts), (long,))
    assert [float(arrays.to_host(each)[0]) for each in result(chosen(long))] == [-p for p in parts]


def test_tiles_and_their_merge_lie_between_small_steps(rt: Runtime, arrays: Any) -> None:
    def body(x: Any, y: Any) -> Any:
        wide = rt.add(x, y).result()  # tiled
        total = rt.sum(wide, dim=-1).result()  # tiled and joined
        return wide, rt.neg(rt.relu(total).result())

    small, large = (normal(2, 8), normal(2, 8, seed=1)), (normal(1, 300_000), normal(1, 300_000, seed=1))
    program = rt.program(body, [arrays.to_device(each) for each in small])
    for pair in (small, large, small, large):
        x, y = (arrays.to_device(each) for each in pair)
        got, want = result(program(x, y)), rt.add(x, y).result()
        total = rt.neg(rt.relu(rt.sum(want, dim=-1).result()).result()).result()
        np.testing.assert_array_equal(arrays.to_host(got[0]), arrays.to_host(want))
        np.testing.assert_array_equal(arrays.to_host(got[1]), arrays.to_host(total))


def test_a_function_that_looks_at_a_shape_is_recorded_for_each(rt: Runtime, arrays: Any) -> None:
    def body(x: Any) -> Any:
        half = x.shape[0] // 2
        return rt.add(x[:half], x[half : 2 * half])

    program = rt.program(body, (arrays.to_device(np.zeros(8)),))
    for size in (8, 6, 100, 6):
        host = normal(size)
        got = arrays.to_host(result(program(arrays.to_device(host))))
        np.testing.assert_array_equal(got, host[: size // 2] + host[size // 2 :])


def test_arguments_that_were_alike_may_differ_later(rt: Runtime, arrays: Any) -> None:
    program = rt.program(lambda x, y: rt.add(rt.relu(x).result(), rt.relu(y).result()),
                         [arrays.to_device(np.zeros((4, 6))) for _ in range(2)])  # fmt: skip
    for shape in ((4, 6), (1, 6), (4, 1), (4, 6)):
        x, y = normal(4, 6), normal(*shape, seed=1)
        got = arrays.to_host(result(program(arrays.to_device(x), arrays.to_device(y))))
        np.testing.assert_array_equal(got, np.maximum(x, 0) + np.maximum(y, 0))


def test_recorded_arrays_are_arguments_in_the_order_in_which_they_came(rt: Runtime, arrays: Any) -> None:
    a, b, d = (arrays.to_device(normal(16, seed=i)) for i in range(3))
    with rt.record() as program:
        t = rt.mul(a, b).result()
        rt.add(t, b, out=d)
    before = arrays.to_host(d).copy()
    np.testing.assert_array_equal(arrays.to_host(d), before)  # nothing has run
    assert result(program()) is None
    a_host, b_host = arrays.to_host(a), arrays.to_host(b)
    np.testing.assert_array_equal(arrays.to_host(d), a_host * b_host + b_host)
    x, y, out = (arrays.to_device(normal(9, seed=i)) for i in range(3))
    result(program(x, y, out))
    x_host, y_host = arrays.to_host(x), arrays.to_host(y)
    np.testing.assert_array_equal(arrays.to_host(out), x_host * y_host + y_host)


def test_recorded_views_of_a_declared_array_are_ordered(rt: Runtime, arrays: Any) -> None:
    slab = arrays.to_device(normal(4, 8))
    with rt.record(slab) as program:
        rt.add(slab[0], slab[1], out=slab[2])
        rt.add(slab[2], slab[1], out=slab[3])
        rt.neg(slab, out=slab)
    for seed in (1, 2):
        host = normal(4, 8, seed=seed)
        other = arrays.to_device(host)
        result(program(other))
        host[2] = host[0] + host[1]
        host[3] = host[2] + host[1]
        np.testing.assert_array_equal(arrays.to_host(other), -host)


def test_numbers_are_arguments(rt: Runtime, arrays: Any) -> None:
    program = rt.program(lambda x, s, e: rt.layer_norm(rt.mul(x, s).result(), eps=e),
                         (arrays.to_device(np.zeros((2, 8))), 1.0, 1e-5))  # fmt: skip
    for s, e in ((2.0, 1e-5), (-0.5, 1.0), (0.0, 1e-5), (-0.0, 1e-5)):
        x = arrays.to_device(normal(2, 8))
        want = rt.layer_norm(rt.mul(x, s).result(), eps=e).result()
        np.testing.assert_array_equal(arrays.to_host(result(program(x, s, e))), arrays.to_host(want))


def test_calls_without_waiting_follow_each_other(rt: Runtime, arrays: Any) -> None:
    x = arrays.to_device(np.zeros(64))
    one = arrays.to_device(np.ones(64))

    def body(x: Any, one: Any) -> None:
        rt.add(rt.add(x, one).result(), one, out=x)

    program = rt.program(body, (x, one))
    tickets = [program(x, one) for _ in range(500)]
    result(tickets[-1])
    assert all(ticket.done for ticket in tickets)
    np.testing.assert_array_equal(arrays.to_host(x), np.full(64, 1000.0, F32))


def test_calls_with_new_arrays_each_keep_their_own(rt: Runtime, arrays: Any) -> None:
    program = rt.program(lambda x: rt.neg(rt.relu(x).result()), (arrays.to_device(np.zeros(32)),), copies=2)
    hosts = [normal(32, seed=seed) for seed in range(60)]
    tickets = [program(arrays.to_device(host)) for host in hosts]
    gc.collect()  # arguments that only the calls know stay
    for host, ticket in zip(hosts, tickets, strict=True):
        np.testing.assert_array_equal(arrays.to_host(result(ticket)), -np.maximum(host, 0))


def test_threads_share_a_program(rt: Runtime, arrays: Any) -> None:
    program = rt.program(lambda x, y: rt.mul(rt.add(x, y).result(), y),
                         [arrays.to_device(np.zeros(16)) for _ in range(2)], copies=2)  # fmt: skip
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for turn in range(40):
            x, y = normal(8 + turn % 3, seed=seed), normal(8 + turn % 3, seed=turn)
            got = arrays.to_host(result(program(arrays.to_device(x), arrays.to_device(y))))
            if not np.array_equal(got, (x + y) * y):
                wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_another_thread_submits_while_one_records(rt: Runtime, arrays: Any) -> None:
    x = arrays.to_device(normal(8))
    with rt.record() as program:
        rt.neg(x, out=x)
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.append(rt.relu(x).result(TIMEOUT_S)))
        thread.start()
        thread.join(60.0)
    assert len(done) == 1
    assert "1 tasks" in program.describe()


def test_more_runs_than_the_ring_has_slots_are_joined(machine: str, arrays: Any) -> None:
    with Runtime(machine, capacity=8, workers=3) as rt:
        host = normal(40, 4)
        x, out = arrays.to_device(host), arrays.to_device(np.zeros((40, 4)))

        def body(x: Any, out: Any) -> None:
            for row in range(40):
                rt.relu(rt.neg(x[row]).result(), out=out[row])

        program = rt.program(body, (x, out))
        for _ in range(5):
            tickets = [program(x, out) for _ in range(20)]
            result(tickets[-1])
        np.testing.assert_array_equal(arrays.to_host(out), np.maximum(-host, 0))


def test_a_failed_task_is_the_call_s_status(rt: Runtime, arrays: Any) -> None:
    table = arrays.to_device(normal(4, 8))
    index = arrays.to_device([1, 3], np.int64)
    program = rt.program(lambda t, i: rt.neg(rt.embedding(t, i).result()), (table, index))
    result(program(table, index))
    with pytest.raises(TaskError, match=r"program .*INDEX_OUT_OF_RANGE"):
        result(program(table, arrays.to_device([1, 4], np.int64)))
    result(program(table, index))
    with pytest.raises(TaskError):
        rt.synchronize(TIMEOUT_S)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda x, y, z: (x, y), ArgumentError, "takes 3 argument"),
        (lambda x, y, z: (x, y.astype(np.float64), z), DTypeError, r"arguments\[1\] has dtype float64"),
        (lambda x, y, z: (x[:3], y, z), ArgumentError, "broadcast"),
        (lambda x, y, z: (x, y, z[:4]), ArgumentError, "out has shape"),
        (lambda x, y, z: (z[:-1], y[:-1], z[1:]), ArgumentError, "overlap"),
        (lambda x, y, z: (x, y, 3.0), ArgumentError, "not an array"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_enqueued(
    wrong: Any, error: type[Exception], message: str
) -> None:
    with Runtime("cpu") as rt:
        x, y, z = (normal(8, seed=i) for i in range(3))
        program = rt.program(lambda x, y, z: rt.add(x, y, out=z), (x, y, z))
        with pytest.raises(error, match=message):
            program(*wrong(x, y, z))
        assert rt.stats().submitted == 0
        result(program(x, y, z))
        np.testing.assert_array_equal(z, x + y)


def test_a_recording_refuses_what_it_cannot_hold(rt: Runtime, arrays: Any) -> None:
    x = arrays.to_device(normal(8))
    with pytest.raises(ArgumentError, match="nothing was recorded"):
        rt.program(lambda x: None, (x,))
    with pytest.raises(ArgumentError, match="no elements"):
        rt.program(lambda x: x + 1, (x,))
    with pytest.raises(ArgumentError, match="another recording"):
        kept: list[Any] = []
        rt.program(lambda x: kept.append(rt.neg(x).result()), (x,))
        rt.program(lambda x: rt.add(x, kept[0]), (x,))
    with pytest.raises(ArgumentError, match="changes with every call"):
        rt.program(lambda x, s: rt.mul(x, s * 2), (x, 1.0))
    with pytest.raises(ArgumentError, match="share memory"), rt.record():
        rt.add(x[:5], x[3:8])
    program = rt.program(lambda x: rt.neg(x), (x,))
    with pytest.raises(ArgumentError, match="inside a recording"):
        rt.program(lambda x: program(x), (x,))
    assert result(program(x)) is not None


def test_a_result_is_written_where_the_caller_wants_it(rt: Runtime, arrays: Any) -> None:
    x = arrays.to_device(normal(8))
    program = rt.program(lambda x: (rt.neg(x), rt.relu(x).result()), (x,))
    outs = tuple(arrays.to_device(np.zeros(8)) for _ in range(2))
    got = result(program(x, out=outs))
    assert got[0] is outs[0] and got[1] is outs[1]
    host = arrays.to_host(x)
    np.testing.assert_array_equal(arrays.to_host(outs[0]), -host)
    with pytest.raises(ArgumentError, match="out has 1 array"):
        program(x, out=outs[0])
    with pytest.raises(ArgumentError, match="shape"):
        program(x, out=(outs[0], arrays.to_device(np.zeros(9))))


def test_a_program_is_described_and_drawn(rt: Runtime, arrays: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    x = arrays.to_device(normal(1, 300_000))
    program = rt.program(lambda x: rt.neg(rt.sum(rt.relu(x).result(), dim=-1).result()), (x,))
    text = program.describe()
    assert "3 tasks" in text and "; after 0" in text and "tile 1" in text
    assert program.plot().get_title().startswith("3 tasks")


def test_a_wrong_count_of_inputs_is_said_wherever_a_call_is_checked(rt: Runtime, arrays: Any) -> None:
    x = arrays.to_device(np.ones(4))
    with pytest.raises(ArgumentError, match=r"add takes 2 input\(s\), 1 given"):
        rt.infer("add", (x,))
    with pytest.raises(ArgumentError, match=r"add takes 2 input\(s\), 1 given"):
        rt.program(lambda x: rt.submit("add", (x,)), (x,))
