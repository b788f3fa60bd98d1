"""What a stream is doing is asked in an order that ends no capture; here of a driver that is made up."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba.errors import MachineError
from gpuos_numba.host import calls, query
from gpuos_numba.machines.cuda import CudaMachine

OURS, ANOTHERS = 0x7000, 0x8000


class Driver:
    """libcuda's three functions, and which of them were called."""

    def __init__(self) -> None:
        self.current, self.capturing, self.capturing_error, self.answer = OURS, 0, 0, 0
        self.asked: list[str] = []
        self.stream = -1

        def current(context: Any) -> int:
            self.asked.append("current")
            context[0] = self.current
            return 0

        def capturing(stream: int | None, answer: Any) -> int:
            self.asked.append("capturing")
            self.stream = stream or 0
            answer[0] = self.capturing
            return self.capturing_error

        def ask(stream: int | None) -> int:
            self.asked.append("query")
            return self.answer

        word = ctypes.c_void_p
        library = SimpleNamespace(
            cuCtxGetCurrent=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))(current),
            cuStreamIsCapturing=ctypes.CFUNCTYPE(ctypes.c_int, word, ctypes.POINTER(ctypes.c_int))(capturing),
            cuStreamQuery=ctypes.CFUNCTYPE(ctypes.c_int, word)(ask),
        )
        self._library = library
        self.record = query.driver_record(library, OURS)
        self.address = int(self.record.ctypes.data)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def machine(driver: Driver) -> CudaMachine:
    """A CudaMachine of this driver, as far as its streams go."""

    @contextmanager
    def current() -> Iterator[None]:
        before, driver.current = driver.current, OURS
        yield
        driver.current = before

    made = CudaMachine.__new__(CudaMachine)
    made.stream_driver, made._query = driver.address, query.compiled().query
    made._current = current  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(("answer", "state"), [(0, "idle"), (query.NOT_READY, "busy")])
def test_an_idle_stream_and_a_busy_one(machine: CudaMachine, driver: Driver, answer: int, state: str) -> None:
    driver.answer = answer
    assert machine.stream_state(0x55) == state
    assert driver.asked == ["current", "capturing", "query"] and driver.stream == 0x55


@pytest.mark.parametrize(("status", "error"), [(1, 0), (2, 0), (0, query.CAPTURE_IMPLICIT)])
def test_a_stream_that_is_captured_is_not_queried(
    machine: CudaMachine, driver: Driver, status: int, error: int
) -> None:
    driver.capturing, driver.capturing_error = status, error
    assert machine.stream_state(0x55) == "capturing"
    assert "query" not in driver.asked


@pytest.mark.parametrize("context", [0, ANOTHERS])
def test_another_contexts_stream_is_not_asked_for_ours(
    machine: CudaMachine, driver: Driver, context: int
) -> None:
    driver.current, driver.answer = context, query.NOT_READY
    assert machine._query(driver.address, 0) == query.INVALID_CONTEXT
    assert driver.asked == ["current"]
    assert machine.stream_state(0) == "busy", "asked again with ours current"
    assert driver.current == context


@pytest.mark.parametrize("where", ["capturing", "query"])
def test_an_error_of_the_driver_is_raised(machine: CudaMachine, driver: Driver, where: str) -> None:
    driver.capturing_error, driver.answer = (400, 0) if where == "capturing" else (0, 400)
    with pytest.raises(MachineError, match="answered 400"):
        machine.stream_state(0x55)


def test_the_short_way_asks_the_same_and_leaves_the_rest_to_the_long_one(driver: Driver) -> None:
    torch = pytest.importorskip("torch", reason="the short way takes torch tensors")
    api = calls.exchange_api(torch.Tensor)
    if api is None:
        pytest.skip("this torch has no DLPack exchange API: unproved")
    with gpuos.Runtime("cpu", workers=1) as rt:
        x, out = torch.ones(8), torch.empty(8)
        for _ in range(3):
            rt.add(x, x, out=out).wait()
        assert rt._calls is not None and rt._calls.sent
        nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
        stream = nothing(lambda kind, ordinal, where: where.__setitem__(0, 0x55) or 0)
        rt._calls._record["stream"] = ctypes.cast(stream, ctypes.c_void_p).value
        rt._calls._record["driver"] = driver.address

        def asked() -> tuple[int, list[str]]:
            before = rt._calls.sent  # type: ignore[union-attr]
            driver.asked.clear()
            assert (rt.add(x, x, out=out).result() == 2).all()
            return rt._calls.sent - before, list(driver.asked)  # type: ignore[union-attr]

        assert asked() == (1, ["current", "capturing", "query"])
        assert driver.stream == 0x55
        driver.answer = query.NOT_READY
        assert asked() == (0, ["current", "capturing", "query"])
        driver.answer, driver.capturing = 0, 1
        assert asked() == (0, ["current", "capturing"])
        driver.capturing, driver.current = 0, ANOTHERS
        assert asked() == (0, ["current"])


@pytest.mark.parametrize("tracked", [True, False])
def test_the_plain_way_asks_the_same(driver: Driver, tracked: bool) -> None:
    x, y, out = np.ones((3, 8), np.float32)
    with gpuos.Runtime("cpu", workers=1, order="auto" if tracked else "none") as rt:
        rt.add(x, y, out=out).wait()
        where = (rt._address, rt._order) if tracked else (rt._address,)
        submit = rt._ordered.submit_plain if tracked else rt._host.submit_plain
        addresses = [int(each.ctypes.data) for each in (x, y, out)]
        driver.capturing = 1
        _, answer = submit(*where, 1, *addresses, 8, driver.address, 0x55)
        assert answer == 0 and driver.asked == ["current", "capturing"]
        assert rt.stats().submitted == 1
