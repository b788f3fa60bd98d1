"""Injected operators run at once, are replaced and rolled back, and what is refused changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.inject.audit import AuditLog

F32 = np.float32


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("GPUOS_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def rt(machine: str, own_folders: None) -> Iterator[gpuos.Runtime]:
    with gpuos.Runtime(machine) as runtime:
        yield runtime


def on(rt: gpuos.Runtime, values: Any, dtype: Any = F32) -> Any:
    return testing.to_device(rt, np.asarray(values, dtype))


def values(ticket: gpuos.Ticket) -> Any:
    return testing.to_host(ticket.result(timeout_s=30))


def test_an_expression_is_an_operator_at_once(rt: gpuos.Runtime) -> None:
    x = np.linspace(-4, 4, 1001).astype(F32)
    swish = rt.inject("swish", "x / (1 + exp(-x))")
    wanted = x / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(values(rt.swish(on(rt, x))), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values(rt.submit("swish", [on(rt, x)])), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values(rt.submit(swish, [on(rt, x)])), wanted, rtol=1e-5, atol=1e-6)
    half = values(rt.swish(on(rt, x, np.float16)))
    assert half.dtype == np.float16
    assert rt.stats().generation == 2


def test_a_function_is_read_and_names_itself(rt: gpuos.Runtime) -> None:
    @rt.operator
    def mix(x, y, weight):  # type: ignore[no-untyped-def]
        kept = 1 - weight
        return x * kept + y * weight

    a, b, w = (on(rt, each) for each in ([1, 2, 3], [5, 6, 7], [0, 0.5, 1]))
    np.testing.assert_array_equal(values(rt.submit(mix, [a, b, w])), [1, 4, 7])
    np.testing.assert_array_equal(values(rt.mix(a, b, 0.5)), [3, 4, 5])


def test_operands_broadcast_and_have_any_strides(rt: gpuos.Runtime) -> None:
    rt.inject("twice_and", "2 * x + y")
    x, y = np.arange(12, dtype=F32).reshape(3, 4), np.arange(3, dtype=F32)
    np.testing.assert_array_equal(values(rt.twice_and(on(rt, x).T, on(rt, y))), 2 * x.T + y)
    batch = rt.batch("twice_and", [((on(rt, x[0]), 1.0), on(rt, np.zeros(4)))] * 3)
    rt.submit_batch(batch).wait(timeout_s=30)
    np.testing.assert_array_equal(testing.to_host(batch.outputs[2]), 2 * x[0] + 1)


def test_a_replaced_operator_serves_what_comes_after(rt: gpuos.Runtime) -> None:
    x = on(rt, [1, 2, 3])
    rt.inject("f", "x + 1")
    with pytest.raises(gpuos.ArgumentError, match="replace=True"):
        rt.inject("f", "x + 2")
    assert rt.stats().generation == 2
    np.testing.assert_array_equal(values(rt.f(x)), [2, 3, 4])
    rt.inject("f", "x + 2", replace=True)
    np.testing.assert_array_equal(values(rt.f(x)), [3, 4, 5])
    assert rt.rollback() == "f"
    np.testing.assert_array_equal(values(rt.f(x)), [2, 3, 4])
    assert rt.rollback() == "f" and rt.stats().generation == 5
    with pytest.raises(AttributeError, match="'f'"):
        rt.f(x)
    with pytest.raises(gpuos.UnknownOperatorError):
        rt.submit("f", [x])
    with pytest.raises(gpuos.ArgumentError, match="nothing to roll back"):
        rt.rollback()


def test_tasks_submitted_before_keep_their_program(rt: gpuos.Runtime) -> None:
    x = on(rt, np.ones(4096))
    wrong = 0
    for turn in range(20):
        rt.inject("g", f"x + {turn}", replace=True)
        tickets = [rt.g(x) for _ in range(50)]
        rt.inject("g", "x - 1000", replace=True)
        wrong += sum(float(values(ticket)[0]) != turn + 1 for ticket in tickets)
    assert wrong == 0


def test_producers_never_wait_for_an_injection(rt: gpuos.Runtime) -> None:
    stop, failures, done = threading.Event(), [], [0]
    x, y = on(rt, np.ones(256)), on(rt, np.ones(256))

    def produce() -> None:
        out = on(rt, np.zeros(256))
        while not stop.is_set():
            try:
                rt.add(x, y, out=out).wait(timeout_s=30)
                done[0] += 1
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        for turn in range(100):
            rt.inject("h", f"x * {turn}", replace=True)
            assert values(rt.h(x))[0] == turn
    finally:
        stop.set()
        thread.join()
    assert not failures and done[0] > 0
    assert rt.stats().failed == 0


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "x.__class__", "x[0]", "(lambda: x)()", "10**10**10", "x if", "w + 1"]
)
def test_what_is_refused_changes_nothing(rt: gpuos.Runtime, expression: str) -> None:
    with pytest.raises(gpuos.ExpressionError):
        rt.inject("bad", expression)
    assert rt.stats().generation == 1 and not hasattr(rt, "bad")


@pytest.mark.parametrize("name", ["add", "submit", "exp", "close", "for", "a b", "_x", ""])
def test_names_that_mean_something_are_refused(rt: gpuos.Runtime, name: str) -> None:
    with pytest.raises(gpuos.ArgumentError):
        rt.inject(name, "x + 1")


def test_wrong_operands_are_refused_in_the_callers_words(rt: gpuos.Runtime) -> None:
    rt.inject("f", "x + y")
    x = on(rt, [1.0])
    with pytest.raises(gpuos.ArgumentError, match=r"f takes 2 input\(s\), 1 given: x \+ y"):
        rt.f(x)
    with pytest.raises(gpuos.DTypeError, match=r"inputs\[1\] has dtype int32, f takes"):
        rt.f(x, on(rt, [1], np.int32))


def test_every_change_is_in_the_audit_log(rt: gpuos.Runtime) -> None:
    rt.inject("f", "x + 1")
    rt.inject("f", "x + 2", replace=True)
    with pytest.raises(gpuos.ExpressionError):
        rt.inject("g", "x[0]")
    rt.rollback()
    log = AuditLog()
    assert [line["what"] for line in log.lines()] == ["inject", "replace", "refuse", "rollback"]
    assert log.verify() == []
