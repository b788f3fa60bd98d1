"""Holds: executors leave and nobody launches them, and what Runtimes of one process do to each other."""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuos_numba
from gpuos_numba import Runtime
from gpuos_numba.host import query
from gpuos_numba.host.holds import Holds
from gpuos_numba.machines import cuda

F32 = np.float32
PACKAGE = os.path.dirname(gpuos_numba.__file__)
# After these CPython looks for signals, and after no other instruction.
LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD", *(
    f"POP_JUMP_BACKWARD_IF_{each}" for each in ("TRUE", "FALSE", "NONE", "NOT_NONE")
)}  # fmt: skip


def held(rt: Runtime) -> int:
    return int(rt._machine.arrays.launch["holds"][0])


def interrupted(do: Callable[[], Any], step: int) -> bool:
    """Call it, with a Ctrl-C where CPython looks for signals in the package the `step`-th time; whether it
    came."""
    left, last = step, dict[Any, str]()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, last[frame] = last.get(frame), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before in LOOKS:
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        last.clear()
    return False


@pytest.fixture
def cpu() -> Any:
    with Runtime("cpu", workers=1, deadline_s=60) as rt:
        yield rt


def test_holds_add_up_and_each_is_given_back_once(cpu: Runtime) -> None:
    x, out = np.ones(8, F32), np.zeros(8, F32)
    one, other = cpu._keeper.holds(), cpu._keeper.holds()
    one.give_back()
    assert held(cpu) == 0
    one.take()
    one.take()
    other.take()
    assert held(cpu) == 2 and one.wait(10)
    ticket = cpu.add(x, x, out=out)
    other.give_back()
    other.give_back()
    assert held(cpu) == 1 and cpu._keeper.parked and not ticket.done
    one.give_back()
    one.serve()
    assert held(cpu) == 0 and ticket.wait(10).result()[0] == 2


def load(rt: Runtime) -> None:
    rt._publisher._load(rt._machine.link({}, None), True, {})


@pytest.mark.parametrize("do", [Runtime.park, load])
def test_ctrl_c_anywhere_leaves_no_hold(cpu: Runtime, do: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu._machine, "loads_parked", True)
    x, out = np.ones(8, F32), np.zeros(8, F32)
    do(cpu)
    step, came = 0, True
    while came:
        cpu.add(x, x, out=out).wait(10)
        came = interrupted(lambda: do(cpu), step)
        step += 1
        assert held(cpu) == 0, f"after the Ctrl-C at the {step}th look"
    assert step > 20
    assert cpu.add(x, x).wait(10).result()[0] == 2


def test_threads_that_hold_and_serve_at_once_lose_no_task(cpu: Runtime) -> None:
    stop = threading.Event()

    def park() -> None:
        while not stop.is_set():
            cpu.park(30)

    threads = [threading.Thread(target=park) for _ in range(3)]
    for thread in threads:
        thread.start()
    x, out = np.ones(8, F32), np.zeros(8, F32)
    try:
        for _ in range(300):
            cpu.add(x, x, out=out).wait(30)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert held(cpu) == 0 and cpu.stats().completed == 300


def test_a_closing_executor_is_not_waited_for() -> None:
    with Runtime("cpu", workers=1) as rt:
        keeper = rt._keeper
        holds = Holds([keeper])
        holds.take()
    assert holds.wait(0.0)
    holds.give_back()
    holds.serve()


def test_runtimes_beside_one_that_never_exits_come_inject_and_go(machine: str, arrays: Any) -> None:
    """Loading, unloading and freeing wait until nothing runs on a GPU: here that would be for ever."""
    with Runtime(machine, lease_s=None, idle_s=None) as resident:
        x = arrays.to_device(np.ones(64))
        out = arrays.to_device(np.zeros(64))
        for round_ in range(3):
            resident.add(x, x, out=out).wait(30)
            with Runtime(machine) as other:
                ticket = other.add(x, x)
                assert arrays.to_host(ticket.wait(30).result())[0] == 2
                f = other.inject("f", f"x * {round_ + 3} + 0.5", wait="compiled")
                assert arrays.to_host(other.submit(f, (x,)).wait(30).result())[0] == round_ + 3.5
            resident.add(x, x, out=out).wait(30)
            assert not resident._keeper.parked
            del other, ticket, f
            gc.collect()
            assert arrays.to_host(resident.mul(x, out).wait(30).result())[0] == 2
        with Runtime(machine, threads=128) as narrower:  # an executor that this process may not have loaded
            assert arrays.to_host(narrower.add(x, x).wait(30).result())[0] == 2


# --- what the machine does of it; the driver is a stand-in ---


class StandIn:
    """A driver that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if not name.startswith("cuCtx"):
                self.calls.append((name, arguments[0] if arguments else None))
            return 0, len(self.calls)

        return call


def closable(gpu: Any, driver: Any, *libraries: int) -> Any:
    machine: Any = cuda.CudaMachine.__new__(cuda.CudaMachine)
    machine._driver, machine._context_handle, machine._gpu = driver, 0, gpu
    machine._memory, machine._stream = 7, 8
    machine._bus = cuda._Bus(100, 1, 2, 3)
    executor = cuda._Generation(b"", 1000, shared=True)
    machine._active, machine._standby = cuda._Generation(b"", libraries[0]), executor
    machine._unused = [cuda._Generation(b"", library) for library in libraries[1:]]
    gpu.open.add(id(machine))
    return machine


def test_to_close_a_machine_waits_for_no_other() -> None:
    driver = StandIn()
    gpu = cuda._Gpu(driver, 0)
    one, other = closable(gpu, driver, 11, 12), closable(gpu, driver, 21)
    driver.calls.clear()
    one.close()
    assert driver.calls == [("cuMemFreeAsync", 7)] and gpu.retired == [11, 12] and other.unused == 2
    other.discard()
    assert driver.calls[1:] == [("cuLibraryUnload", 11)]
    other.close()
    assert driver.calls[2:] == [("cuLibraryUnload", 12), ("cuLibraryUnload", 21), ("cuMemFreeAsync", 7)]
    assert not gpu.retired and not gpu.open


def test_what_a_closed_machine_had_is_used_again_and_what_a_stuck_one_has_is_not() -> None:
    driver = StandIn()
    gpu = cuda._Gpu(driver, 0)
    driver.calls.clear()
    left, stuck, larger = (
        cuda._Bus(size, 1, 2, 3, free) for size, free in ((100, True), (100, False), (200, True))
    )
    for bus in (left, stuck, larger):
        cuda._put_back(gpu, bus)
    assert gpu.bus(driver, 200) is larger and gpu.bus(driver, 100) is left and gpu.bus(driver, 100) is None
    assert not left.free and not driver.calls


def test_words_that_a_stream_has_still_to_write_or_to_read_are_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forbidden: a word is used again, and the stream waits for ever, or writes into another's ring."""
    driver = StandIn()
    gpu = cuda._Gpu(driver, 0)
    machine = closable(gpu, driver, 11)
    machine._stream_words, machine._bus_base, machine._pinned = True, 0, 0
    driver.calls.clear()
    machine.stream_wait(5, [(8, 1), (16, 1)])
    machine.stream_write(5, 24, 1)
    machine.stream_write(6, 32, 1)
    names = [name for name, _ in driver.calls]
    events = [name for name in names if "Event" in name]
    assert events == ["cuEventCreate", "cuEventRecord", "cuEventRecord", "cuEventCreate", "cuEventRecord"]
    assert names.index("cuEventRecord") > names.index("cuStreamWaitValue64")
    machine.close()
    cuda._put_back(gpu, machine._bus)
    ready = iter([query.NOT_READY, 0, query.NOT_READY, 0])
    monkeypatch.setattr(driver, "cuEventQuery", lambda event: (next(ready),), raising=False)
    assert [gpu.bus(driver, 100) for _ in range(2)] == [None, None]
    assert gpu.bus(driver, 100) is machine._bus and not machine._bus.awaited
