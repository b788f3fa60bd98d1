"""Compiled bodies take over, are replaced, tried and rolled back; what fails leaves all as it was."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.inject import live, publish
from gpuos_numba.inject.audit import AuditLog
from gpuos_numba.inject.compile import body_key, server
from gpuos_numba.inject.store import Store

F32 = np.float32
SILU = "x / (1 + exp(-x))"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for all tests here, so that equal bodies are compiled once."""
    place = tmp_path_factory.mktemp("inject")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUOS_KEY_FILE", str(place / "key"))
        patch.setenv("GPUOS_CACHE_DIR", str(place / "cache"))
        yield place


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUOS_AUDIT_FILE", str(tmp_path / "audit.jsonl"))


@pytest.fixture
def rt(machine: str, folders: Path, audit: None) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine, allow_device_operators=True) as runtime:
        yield runtime


def on(rt: gpuos.Runtime, values: Any, dtype: Any = F32) -> Any:
    return testing.to_device(rt, np.asarray(values, dtype))


def values(ticket: gpuos.Ticket) -> Any:
    return testing.to_host(ticket.result(timeout_s=30))


def stage(rt: gpuos.Runtime, name: str) -> str:
    version = rt._injected.version(name)
    assert version is not None
    return version.stage


def wait_compiled(rt: gpuos.Runtime, name: str) -> None:
    version = rt._injected.version(name)
    assert version is not None and version.done.wait(60)
    assert version.error is None and version.stage == "compiled"


@gpuos.device_operator(inputs=1, spec=lambda x: x.ravel()[::-1].reshape(x.shape))
def backwards(m):  # type: ignore[no-untyped-def]
    from gpuos_numba.descriptor import offset

    u64, thread_index, block_width = m.u64, m.thread_index, m.block_width
    load_task_u64, load_f32, store_f32 = m.load_task_u64, m.load_f32, m.store_f32
    X, OUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
    ONE, FOUR, OK = u64(1), u64(4), np.int32(0)

    def body(context, task, tile, arena):  # type: ignore[no-untyped-def]
        x, out, n = load_task_u64(task + X), load_task_u64(task + OUT), load_task_u64(task + COUNT)
        i = thread_index()
        while i < n:
            store_f32(out + i * FOUR, load_f32(x + (n - ONE - i) * FOUR))
            i += block_width()
        return OK

    return body


@gpuos.device_operator(inputs=1, spec=lambda x: x + 1)
def untrue(m):  # type: ignore[no-untyped-def]
    OK = np.int32(0)

    def body(context, task, tile, arena):  # type: ignore[no-untyped-def]
        return OK

    return body


@gpuos.device_operator(inputs=1)
def broken(m):  # type: ignore[no-untyped-def]
    def body(context, task, tile, arena):  # type: ignore[no-untyped-def]
        return context.nothing_like_this

    return body


# --- taking over ---


def test_what_was_waited_for_is_machine_code_for_all_operands(rt: gpuos.Runtime) -> None:
    x = np.linspace(-4, 4, 1001).astype(F32)
    swish = rt.inject("swish", SILU, wait="compiled")
    assert stage(rt, "swish") in ("partly", "compiled")
    for _ in range(2):  # partly compiled, then whole
        for operand in (x, x[::2], x.astype(np.float16), np.broadcast_to(x[:7], (3, 7))):
            wide = operand.astype(np.float64)
            found = values(rt.submit(swish, [on(rt, operand, operand.dtype)])).astype(np.float64)
            np.testing.assert_allclose(found, wide / (1 + np.exp(-wide)), rtol=2e-3, atol=1e-6)
        wait_compiled(rt, "swish")
    assert rt.stats().generation == 2


def test_a_program_of_what_was_waited_for_takes_all_operands(rt: gpuos.Runtime) -> None:
    """Forbidden: an operator that is compiled for contiguous arrays only is recorded, then given others."""
    x = np.linspace(-4, 4, 64).astype(F32)
    rt.inject("swish", f"{SILU} + 3", wait="compiled")
    assert stage(rt, "swish") == "partly"  # nobody else compiles this
    program = rt.program(lambda x: rt.swish(x), (on(rt, x),))
    for given in (x, x[::2], x.reshape(8, 8)):
        wide = given.astype(np.float64)
        found = values(program(on(rt, given)))
        np.testing.assert_allclose(found, wide / (1 + np.exp(-wide)) + 3, rtol=1e-5, atol=1e-6)


def test_a_program_is_recorded_where_the_rest_cannot_be_compiled(
    rt: gpuos.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.linspace(-4, 4, 64).astype(F32)
    monkeypatch.setattr(rt._publisher, "later", lambda version: None)
    rt.inject("swish", f"{SILU} + 2", wait="compiled")
    version = rt._injected.version("swish")
    assert version is not None
    assert version.stage == "partly"

    def fails(*_: object, **__: object) -> None:
        raise gpuos.MachineError("no compiler today")

    monkeypatch.setattr(rt._publisher, "build", fails)
    with pytest.warns(RuntimeWarning, match="no compiler today"):
        program = rt.program(lambda x: rt.swish(x[::2]), (on(rt, x),))
    wide = x[::2].astype(np.float64)
    np.testing.assert_allclose(
        values(program(on(rt, x))), wide / (1 + np.exp(-wide)) + 2, rtol=1e-5, atol=1e-6
    )


def test_a_compiled_body_takes_over_while_tasks_run(rt: gpuos.Runtime) -> None:
    x = np.linspace(-4, 4, 300).astype(F32)
    wanted = x / (1 + np.exp(-x.astype(np.float64)))
    rt.inject("swish", SILU)
    version = rt._injected.version("swish")
    assert version is not None
    operand, runs = on(rt, x), 0
    while not version.done.is_set() or runs < 20:
        np.testing.assert_allclose(values(rt.swish(operand)), wanted, rtol=1e-5, atol=1e-6)
        runs += 1
    assert version.stage == "compiled"
    lines = AuditLog().lines()
    assert [line["what"] for line in lines][:2] == ["inject", "compile"]
    assert lines[-1]["key"] and lines[-1]["signature"] and lines[-1]["timings_s"]["load"] > 0


def test_rows_and_chains_are_compiled_first(rt: gpuos.Runtime) -> None:
    x = np.random.default_rng(1).standard_normal((6, 300)).astype(F32)
    rt.inject("mean_square", template="reduce", map="x * x", finalise="a / n")
    np.testing.assert_allclose(values(rt.mean_square(on(rt, x), dim=1)), (x * x).mean(1), rtol=1e-5)
    rt.inject("centre", "x - r / n", template="rowwise")
    found = values(rt.centre(on(rt, x), dim=0))
    np.testing.assert_allclose(found, x - x.mean(0), rtol=1e-4, atol=1e-5)
    rt.inject("scaled", steps=[("mul", "x", "y"), ("relu", 0)])
    np.testing.assert_array_equal(values(rt.scaled(on(rt, x), 2.0)), np.maximum(2 * x, 0))


def test_equal_code_is_loaded_once_and_swapped_without_loading(rt: gpuos.Runtime) -> None:
    x = on(rt, np.arange(5))
    rt.inject("f", SILU, wait="compiled")
    wait_compiled(rt, "f")
    rt.inject("f", "x * 3", replace=True, wait="compiled")
    wait_compiled(rt, "f")
    loads = rt._publisher.loads
    for _ in range(10):
        rt.inject("f", SILU, replace=True, wait="compiled")
        assert values(rt.f(x))[4] < 4
        rt.inject("f", "x * 3", replace=True, wait="compiled")
        assert values(rt.f(x))[4] == 12
        assert rt.rollback() == "f" and values(rt.f(x))[4] < 4
    assert rt._publisher.loads == loads


def swap_under_producers(rt: gpuos.Runtime, swaps: int, producers: int) -> None:
    """Replace an operator again and again while threads use it and another one."""
    rt.inject("f", "x * 3", wait="compiled")
    wait_compiled(rt, "f")
    rt.inject("f", "x * 5", replace=True, wait="compiled")
    wait_compiled(rt, "f")
    wrong: list[str] = []
    done = [0] * producers
    stop = threading.Event()

    def produce(number: int) -> None:
        x, out = on(rt, np.ones(3000)), on(rt, np.zeros(3000))
        while not stop.is_set():
            rt.f(x, out=out).wait(timeout_s=30)
            found = set(np.unique(testing.to_host(out)).tolist())
            if found not in ({3.0}, {5.0}):
                wrong.append(f"mixed: {found}")
            rt.add(x, x, out=out).wait(timeout_s=30)
            if set(np.unique(testing.to_host(out)).tolist()) != {2.0}:
                wrong.append("add")
            done[number] += 1

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(producers)]
    for thread in threads:
        thread.start()
    try:
        x = on(rt, np.ones(10))
        for swap in range(swaps):
            factor = 3 if swap % 2 else 5
            rt.inject("f", f"x * {factor}", replace=True, wait="compiled")
            if values(rt.f(x))[0] != factor:
                wrong.append(f"swap {swap} was not seen by the next task")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    rt.synchronize()
    stats = rt.stats()
    assert wrong == [] and min(done) > 0
    assert stats.failed == 0 and stats.completed == stats.submitted


def test_swaps_lose_nothing_and_mix_nothing(rt: gpuos.Runtime) -> None:
    swap_under_producers(rt, 60, 4)


@pytest.mark.slow
def test_a_thousand_swaps_lose_nothing_and_mix_nothing(rt: gpuos.Runtime) -> None:
    swap_under_producers(rt, 1000, 4)


def test_a_batch_keeps_the_body_it_was_made_with(rt: gpuos.Runtime) -> None:
    x, out = on(rt, np.ones(10)), on(rt, np.zeros(10))
    rt.inject("f", "x * 3", wait="compiled")
    batch = rt.batch("f", [([x], out)])
    rt.inject("f", "x * 5", replace=True, wait="compiled")
    rt.submit_batch(batch).wait(timeout_s=30)
    assert testing.to_host(out)[0] == 3 and values(rt.f(x))[0] == 5


def test_bodies_that_nobody_holds_are_left_out(rt: gpuos.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HISTORY", 1)
    x = on(rt, np.ones(10))
    rt.inject("f", "x * 3", wait="compiled")
    wait_compiled(rt, "f")
    out = on(rt, np.zeros(10))
    batch = rt.batch("f", [([x], out)])
    for text in ("x - 1", "x - 2"):  # the second makes the history forget the compiled one
        rt.inject("f", text, replace=True)

    def held() -> bool:
        rt.synchronize()
        gc.collect()
        rt.inject(backwards, replace=True)  # the next generation
        found = [ref() for refs, _ in rt._publisher._bodies.values() for ref in refs]
        return "x * 3" in {each.formula for each in found if each is not None}

    assert held()
    rt.submit_batch(batch).wait(timeout_s=30)
    assert testing.to_host(out)[0] == 3
    del batch
    assert not held()
    assert values(rt.f(x))[0] == -1


def test_one_load_for_the_commonest_operands_and_one_for_the_rest(rt: gpuos.Runtime) -> None:
    f = rt.inject("f", "x / (17 + exp(x))", wait="compiled")
    assert stage(rt, "f") in ("partly", "compiled")
    wait_compiled(rt, "f")
    whole = rt._injected.latest(f)
    assert rt._publisher.loads == 2 and whole is not f
    assert [each.op_id for each in f.kernels] == [whole.kernels[0].op_id]


def test_from_the_cache_bodies_have_the_ids_that_they_had(
    rt: gpuos.Runtime, machine: str, folders: Path
) -> None:
    found: list[list[int]] = []
    with gpuos.Runtime(machine) as second:
        for each in (rt, second):
            for number in (21, 22):
                each.inject(f"f{number}", f"x / ({number} + exp(x))", wait="compiled")
                wait_compiled(each, f"f{number}")
            found.append(sorted(each._publisher._bodies))
        assert second._publisher.loads == 2
    assert found[0] == found[1]


def test_a_body_stays_for_the_last_who_holds_it(rt: gpuos.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HISTORY", 1)
    x, out = on(rt, np.ones(10)), on(rt, np.zeros(10))
    rt.inject("f", "x * 31 + 1", wait="compiled")
    batch = rt.batch("f", [([x], out)])  # of the partly compiled operator, whose id the whole one has too
    wait_compiled(rt, "f")
    for text in ("x - 1", "x - 2"):
        rt.inject("f", text, replace=True)
    rt.synchronize()
    gc.collect()
    rt.inject(backwards)
    rt.submit_batch(batch).wait(timeout_s=30)
    assert testing.to_host(out)[0] == 32


@pytest.fixture
def parked_loads(rt: gpuos.Runtime, monkeypatch: pytest.MonkeyPatch) -> gpuos.Runtime:
    """Generations are loaded while parked, as on a GPU."""
    monkeypatch.setattr(rt._machine, "loads_parked", True)
    return rt


def test_launches_are_held_back_for_the_load_alone(
    parked_loads: gpuos.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, seen = parked_loads._machine, set()

    def watch(name: str) -> None:
        real = getattr(machine, name)

        def watched(*arguments: Any) -> Any:
            seen.add((name, int(machine.arrays.launch["holds"][0]), parked_loads._keeper.parked))
            return real(*arguments)

        monkeypatch.setattr(machine, name, watched)

    stop = threading.Event()
    x, out = on(parked_loads, np.ones(100)), on(parked_loads, np.zeros(100))

    def produce() -> None:
        while not stop.is_set():
            parked_loads.add(x, x, out=out).wait(timeout_s=30)

    producer = threading.Thread(target=produce)
    producer.start()
    for name in ("expect", "link", "open", "load"):
        watch(name)
    try:
        parked_loads.inject("f", "x / (41 + exp(x))", wait="compiled")
        wait_compiled(parked_loads, "f")
    finally:
        stop.set()
        producer.join()
    assert {(name, held) for name, held, _ in seen} == {("expect", 0), ("link", 0), ("open", 0), ("load", 1)}
    assert ("load", 1, False) not in seen
    assert values(parked_loads.f(on(parked_loads, [0])))[0] == 0


def test_generations_are_swapped_with_the_next_launch_behind_the_running_one(machine: str) -> None:
    with gpuos.Runtime(machine, lease_s=None, idle_s=None) as rt:
        x = on(rt, np.ones(10))
        assert values(rt.add(x, x))[0] == 2
        for _ in range(20):
            before = rt._keeper.launches
            rt._keeper.hand_over()
            assert rt._keeper.launches == before + 1 and not rt._keeper.parked
            assert values(rt.add(x, x))[0] == 2
        assert int(rt._machine.arrays.state["parked"][0]) >= before
        holds = rt._keeper.holds()
        holds.take()
        rt._keeper.hand_over()  # launches are held back
        assert rt._keeper.launches == before + 1
        holds.give_back()
        holds.serve()
        assert values(rt.add(x, x))[0] == 2


# --- failing ---


def test_a_rest_that_fails_its_self_test_leaves_what_ran(
    parked_loads: gpuos.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt, tested = parked_loads, []
    real = publish.self_test

    def fail_second(runtime: Any, machine: Any, operator: Any) -> None:
        tested.append(operator)
        if len(tested) == 2:
            raise gpuos.MachineError("planned")
        real(runtime, machine, operator)

    monkeypatch.setattr(publish, "self_test", fail_second)
    rt.inject("f", "x * 51 + 1", wait="compiled")
    version = rt._injected.version("f")
    assert version is not None
    with pytest.warns(RuntimeWarning, match="planned"):  # from the thread
        assert version.done.wait(60)
        time.sleep(0.1)
    assert version.stage == "partly" and values(rt.f(on(rt, [2])))[0] == 103
    rt.inject(backwards)
    assert values(rt.f(on(rt, [2])))[0] == 103
    assert values(rt.f(on(rt, [2], np.float16)))[0] == 103


def test_what_does_not_compile_is_never_live(rt: gpuos.Runtime) -> None:
    rt.inject(backwards)
    before = rt.stats().generation
    with pytest.raises(gpuos.MachineError, match="nothing_like_this"):
        rt.inject(broken)
    assert rt.stats().generation == before and not hasattr(rt, "broken")
    np.testing.assert_array_equal(values(rt.backwards(on(rt, [1, 2, 3]))), [3, 2, 1])


def test_what_fails_its_self_test_is_never_live(rt: gpuos.Runtime) -> None:
    rt.inject(backwards)
    with pytest.raises(gpuos.MachineError, match="self-test"):
        rt.inject(untrue)
    assert not hasattr(rt, "untrue")
    np.testing.assert_array_equal(values(rt.backwards(on(rt, [1, 2, 3]))), [3, 2, 1])
    rt.inject("f", "x * 3", wait="compiled")
    assert values(rt.f(on(rt, [2])))[0] == 6
    assert [line["what"] for line in AuditLog().lines()].count("refuse") == 1
    assert AuditLog().verify() == []


def test_what_cannot_be_loaded_is_never_live(rt: gpuos.Runtime) -> None:
    """What this user signed as one body, and that is another one, or no machine code."""
    rt.inject(backwards)
    target, threads = rt._machine.target, rt._machine.threads
    keys = [
        body_key(each.gpuos_device_operator.rendered(), "body", target, threads)
        for each in (backwards, untrue)
    ]
    another = Store().get("object", keys[0])
    assert another is not None
    for data in (another, b"\x7fELF and no more", b""):
        Store().put("object", keys[1], data)
        with pytest.raises(gpuos.MachineError):
            rt.inject(untrue)
        assert not hasattr(rt, "untrue")
        np.testing.assert_array_equal(values(rt.backwards(on(rt, [1, 2, 3]))), [3, 2, 1])
    Store().clear()


def test_a_tampered_body_is_refused_and_compiled_anew(rt: gpuos.Runtime) -> None:
    rt.inject(backwards)
    rendered = backwards.gpuos_device_operator.rendered()
    key = body_key(rendered, "body", rt._machine.target, rt._machine.threads)
    (entry,) = [each for each in Store().entries() if each.key == key]
    data = bytearray(entry.path.read_bytes())
    data[-1] ^= 1
    entry.path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="the signature is not that of this user's key"):
        rt.inject(backwards, replace=True)
    np.testing.assert_array_equal(values(rt.backwards(on(rt, [1, 2, 3]))), [3, 2, 1])


def test_a_killed_compiler_is_started_again(rt: gpuos.Runtime) -> None:
    rt.inject(backwards)
    process = server()._start()
    process.kill()
    process.wait()
    rt.inject("g", template="reduce", map="x + 1")
    assert values(rt.g(on(rt, [1, 2]))) == 5


def test_closing_does_not_wait_for_what_is_being_compiled(machine: str, folders: Path, audit: None) -> None:
    rt = gpuos.Runtime(machine)
    rt.inject("slow_to_compile", "x * 0.123 + tanh(x) + sin(x)")
    version = rt._injected.version("slow_to_compile")
    rt.close()
    assert version is not None and version.stage == "interpreted"
    loads = rt._publisher.loads
    version.done.wait(60)
    assert version.stage == "interpreted" and rt._publisher.loads == loads


# --- device operators ---


def test_device_operators_must_be_allowed_and_are_audited(rt: gpuos.Runtime, machine: str) -> None:
    with (
        gpuos.Runtime(machine) as careful,
        pytest.raises(gpuos.ArgumentError, match="allow_device_operators"),
    ):
        careful.inject(backwards)
    rt.inject(backwards)
    (line,) = [each for each in AuditLog().lines() if each["what"] == "inject"]
    assert line["template"] == "device"
    with pytest.raises(gpuos.DTypeError, match="float16"):
        rt.backwards(on(rt, [1], np.float16))
    with pytest.raises(gpuos.ArgumentError, match="contiguous"):
        rt.backwards(on(rt, np.zeros((4, 4)))[:, ::2])


def test_a_device_operator_uses_nothing_from_around_it() -> None:
    with pytest.raises(gpuos.ArgumentError, match="'F32' from around it"):

        @gpuos.device_operator()
        def narrow(m):  # type: ignore[no-untyped-def]
            return F32


# --- trying and replacing ---


def test_a_trial_gives_the_candidate_its_share_and_compares(rt: gpuos.Runtime) -> None:
    x = on(rt, np.ones(100))
    rt.inject("f", "x * 3", wait="compiled")
    rt.inject("f", "x * 5", replace=True, wait="compiled")
    with rt.ab("f", 0.25) as trial:
        found = [float(values(rt.f(x))[0]) for _ in range(100)]
        assert found.count(3.0) == 25 and found.count(5.0) == 75
        with pytest.raises(gpuos.ArgumentError, match="already"):
            rt.ab("f", 0.5)
        outcome = trial.measure(x, repeats=20)
        assert (outcome.current, outcome.candidate) == (75, 25)
        assert outcome.different == outcome.compared == 100 and outcome.largest == 2
        assert outcome.current_ns and outcome.candidate_ns
    assert {float(values(rt.f(x))[0]) for _ in range(10)} == {5.0}
    with pytest.raises(gpuos.ArgumentError, match="replaced nothing"):
        rt.ab("add")
    with pytest.raises(gpuos.ArgumentError, match="fraction=2"):
        rt.ab("f", 2)


def test_an_operator_of_the_table_is_fixed_and_put_back(rt: gpuos.Runtime) -> None:
    x = on(rt, [1, 2, 3])
    with pytest.raises(gpuos.ArgumentError):
        rt.inject("silu", "x * 2")
    rt.replace("silu", "x * 2")
    np.testing.assert_array_equal(values(rt.silu(x)), [2, 4, 6])
    rt.replace("silu", "x * 3")
    np.testing.assert_array_equal(values(rt.silu(x)), [3, 6, 9])
    assert rt.rollback() == "silu" and rt.rollback() == "silu"
    assert values(rt.silu(x))[0] < 1
    with pytest.raises(gpuos.ArgumentError, match="no operator 'nothing'"):
        rt.replace("nothing", "x")
    with pytest.raises(gpuos.ArgumentError, match="only what takes the same"):
        rt.replace("softmax", "x")


def test_optimizing_keeps_what_computes_the_same(rt: gpuos.Runtime, machine: str) -> None:
    x = on(rt, np.ones(10))
    assert rt.optimize()["kept"] is False
    rt.inject("f", "x * 3", wait="compiled")
    wait_compiled(rt, "f")
    answer = rt.optimize("f")
    assert answer["why"] and values(rt.f(x))[0] == 3
    assert machine == "cuda" or not answer["kept"]
    with pytest.raises(gpuos.ArgumentError, match="cannot be inlined"):
        rt.optimize("add")


def test_what_is_inlined_is_complete(rt: gpuos.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbidden: rarer operands run the interpreter for good, for nobody compiles what is inlined."""
    monkeypatch.setattr(rt._publisher, "later", lambda version: None)
    rt.inject("swish", f"{SILU} + 5", wait="compiled")
    version = rt._injected.version("swish")
    assert version is not None
    if version.stage == "compiled":
        pytest.skip("the cache had all of it")
    monkeypatch.setattr(rt._machine, "inlines", True, raising=False)
    monkeypatch.setattr(rt._publisher, "inline", lambda chosen, better: True)
    assert rt.optimize("swish")["kept"]
    assert version.stage == "inlined" and version.operator is not None and version.operator.fallback is None


# --- what a user may get wrong ---


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"wait": "never"}, "wait='never'"),
        ({"template": "matrix"}, "template='matrix'"),
        ({"expression": None}, "give an expression"),
        ({"map": "x"}, "map= is of another template"),
        ({"template": "reduce"}, "a reduction has no one expression"),
        ({"template": "rowwise", "expression": None}, "no value= given"),
        ({"template": "chain"}, "a chain needs steps="),
        ({"template": "binary"}, "which is unary"),
        ({"dtypes": ["int32"]}, "choose from"),
        ({"template": "reduce", "expression": None, "map": "x", "combined": "a"}, "combined= given"),
    ],
)
def test_what_makes_no_operator_is_said_with_the_remedy(
    rt: gpuos.Runtime, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(gpuos.ArgumentError, match=says):
        rt.inject("f", **{"expression": "x", **given})
    assert rt.stats().generation == 1
