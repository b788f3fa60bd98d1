"""Holds: executors leave and nobody launches them, and what Runtimes of one process do to each other."""

from __future__ import annotations

import ctypes
import dis
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuos_numba
from gpuos_numba import Runtime
from gpuos_numba.errors import ClosedError, MachineError
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
    gpu.open.add(machine._bus)
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


def test_to_close_a_machine_again_frees_nothing_twice() -> None:
    driver = StandIn()
    gpu = cuda._Gpu(driver, 0)
    machine = closable(gpu, driver, 11)
    driver.calls.clear()
    machine.close()
    machine.close()
    assert driver.calls == [("cuLibraryUnload", 11), ("cuMemFreeAsync", 7)]


def test_beside_a_stuck_machine_nothing_is_unloaded() -> None:
    """Another machine may get its id once it is forgotten."""
    driver = StandIn()
    gpu = cuda._Gpu(driver, 0)
    bus = closable(gpu, driver, 11)._bus  # and its machine goes
    for library in (21, 31):
        closable(gpu, driver, library).close()
    assert gpu.open == {bus} and gpu.retired == [21, 31]


@pytest.mark.parametrize("what", ["load", "swap"])
def test_ctrl_c_anywhere_unloads_nothing_that_may_be_launched(what: str) -> None:
    def generation(number: int) -> Any:
        return cuda._Generation(b"", number, ctypes.c_void_p(number))

    step, came = 0, True
    while came:
        machine: Any = cuda.CudaMachine.__new__(cuda.CudaMachine)
        machine._driver, machine._context_handle = StandIn(), 0
        machine._ready = lambda opened: opened
        machine._active, machine._standby, opened = generation(1), generation(2), generation(3)
        machine._unused, machine.arrays = [opened], SimpleNamespace(launch={"kernel": 1})
        arguments = (opened,) if what == "load" else ()
        came = interrupted(lambda do=getattr(machine, what), given=arguments: do(*given), step)
        used = machine._active, machine._standby
        assert used[0] is not used[1] and not {*used} & {*machine._unused}
        assert machine.arrays.launch["kernel"] == machine._active.function.value
        step += 1
    assert step > 1


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


# --- the end of a Runtime ---


def threads_of(rt: Runtime) -> list[threading.Thread]:
    machine: Any = rt._machine
    return [rt._keeper._thread, *machine._threads]


def are_gone(threads: list[threading.Thread]) -> bool:
    end = time.monotonic() + 20
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        gc.collect()  # a thread that was in the middle of something may have let go of it since
        time.sleep(0.001)
    return not any(thread.is_alive() for thread in threads)


def resident() -> Runtime:
    return Runtime("cpu", workers=2, lease_s=None, idle_s=None, deadline_s=60)


def test_ctrl_c_in_a_submission_leaves_a_launch_that_ends() -> None:
    """Forbidden: counted, and a block of it that nobody wakes once the keeper has gone."""
    x, out = np.ones(8, F32), np.zeros(8, F32)
    step, came = 0, True
    while came:
        rt: Any = resident()
        rt.add(x, x, out=out).wait(10)
        rt.park()
        came = interrupted(lambda rt=rt: rt.add(x, x, out=out), step)
        rt.close(force=True)
        assert rt._machine._closed, f"after the Ctrl-C at look {step}"
        step += 1 if step > 120 else 7
    assert step > 120


def test_ctrl_c_in_close_leaves_the_rest_to_the_next_close_or_the_collector() -> None:
    x, out = np.ones(8, F32), np.zeros(8, F32)
    step, came = 0, True
    while came:
        rt = resident()
        rt.add(x, x, out=out).wait(10)
        threads = threads_of(rt)
        came = interrupted(rt.close, step)
        if step % 2:
            rt.close()
        del rt
        gc.collect()
        assert are_gone(threads), f"after the Ctrl-C at look {step}"
        step += 1 + step // 8
    assert step > 20


def test_ctrl_c_while_a_runtime_is_made_leaves_no_thread() -> None:
    before, step, came = {*threading.enumerate()}, 0, True
    while came:
        made: list[Runtime] = []
        came = interrupted(lambda made=made: made.append(Runtime("cpu", workers=1, capacity=4)), step)
        made.clear()
        gc.collect()
        assert are_gone([each for each in {*threading.enumerate()} - before if "gpuos-" in each.name])
        step += 1 + step // 5
    assert step > 200


def test_threads_that_close_at_once_close_once() -> None:
    errors: list[BaseException] = []
    for _ in range(5):
        rt = resident()
        rt.nop()
        together = threading.Barrier(4)

        def close(rt: Runtime = rt, together: threading.Barrier = together) -> None:
            together.wait()
            try:
                rt.close()
            except BaseException as error:
                errors.append(error)

        closing = [threading.Thread(target=close) for _ in range(4)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        assert are_gone(threads_of(rt))
    assert not errors


@pytest.mark.parametrize("what", ["task", "withheld task"])
def test_who_waits_for_room_hears_of_the_end(what: str) -> None:
    """Forbidden: to wait on at a ring that nobody empties any more."""
    rt = Runtime("cpu", workers=1, capacity=4)
    holds = rt._keeper.holds()
    holds.take()
    for _ in range(4):
        rt.nop()
    errors: list[BaseException] = []
    begins = threading.Event()

    def ask() -> None:
        begins.set()
        try:
            if what == "task":
                rt._join(0, 1)
            else:
                rt._streams.hold(lambda word, value: None)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    begins.wait()
    rt.close(force=True)
    waiting.join()
    assert [type(error) for error in errors] == [ClosedError]


def test_a_closed_runtime_goes_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        rt = resident()
        rt.nop().wait(10)
        rt.close()
        gone = weakref.ref(rt)
        del rt
        assert gone() is None
    finally:
        gc.enable()


def test_the_collector_in_the_keepers_turn_ends_no_runtime_there() -> None:
    """Forbidden: the memory of a launch that is being decided goes."""
    rt: Any = resident()
    rt.itself = rt
    machine, nudge = rt._machine, rt._machine.nudge
    forgotten, seen = threading.Event(), list[bool]()

    def collect() -> None:
        if forgotten.is_set() and threading.current_thread() is keeper and not seen:
            gc.collect()
            seen.append(machine._closed)
        nudge()

    keeper = rt._keeper._thread
    gc.disable()
    try:
        machine.nudge = collect
        rt.nop().wait(10)
        threads = threads_of(rt)
        del rt
        forgotten.set()
        end = time.monotonic() + 20
        while not seen and time.monotonic() < end:
            time.sleep(0.001)
    finally:
        gc.enable()
    gc.collect()
    assert seen == [False] and are_gone(threads)


def test_the_collector_on_a_thread_that_loads_waits_for_nobody() -> None:
    rt: Any = resident()
    rt.itself = rt
    loading, forgotten, collected = threading.Event(), threading.Event(), threading.Event()

    def collect(swap: bool) -> None:
        loading.set()
        forgotten.wait(20)
        gc.collect()
        collected.set()

    rt._keeper.hand_over = collect
    threads = threads_of(rt)
    gc.disable()
    try:
        threading.Thread(target=rt._publisher._swap_back, daemon=True).start()
        assert loading.wait(20)
        del rt
        forgotten.set()
        assert collected.wait(20)
    finally:
        gc.enable()
    assert are_gone(threads)


def test_no_launch_follows_the_end() -> None:
    """Where the collector ends a Runtime in the middle of deciding on a launch, the lock keeps nobody out."""
    from gpuos_numba.host import ring

    rt = resident()
    rt._keeper.stop()
    before = rt._keeper.launches
    assert ring.compiled().launch(rt._address, 1) == 0 and rt._keeper.launches == before
    rt.close()


def test_a_launch_that_failed_keeps_no_runtime_alive() -> None:
    rt: Any = resident()
    machine, launch, me = rt._machine, rt._machine.launch, threading.current_thread()

    def fail(workers: int) -> None:
        if threading.current_thread() is me:
            raise MachineError("not now")
        launch(workers)

    machine.launch = fail
    failed = False
    while not failed:  # the keeper may be the first to launch
        rt.park()
        try:
            rt.nop()
        except MachineError:
            failed = True
    machine.launch = launch
    threads = threads_of(rt)
    gone = weakref.ref(rt)
    del rt
    gc.collect()
    assert gone() is None and are_gone(threads)


def test_a_machine_without_threads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            if self.name == "gpuos-block-1":
                raise RuntimeError("can't start new thread")
            super().start()

    before = {*threading.enumerate()}
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Refused)
        with pytest.raises(MachineError, match="can't start new thread"):
            Runtime("cpu", workers=2)
    gc.collect()
    assert are_gone([each for each in {*threading.enumerate()} - before if "gpuos-" in each.name])


def test_arrays_of_a_task_that_did_not_end_stay() -> None:
    rt: Any = resident()
    x, out = np.ones(8, F32), np.zeros(8, F32)
    rt.nop().wait(10)
    wait_exited = rt._machine.wait_exited
    holds = rt._keeper.holds()
    holds.take()
    rt.add(x, x, out=out)
    kept = weakref.ref(x)
    del x
    rt._machine.wait_exited = lambda timeout_s: False  # it is stuck
    rt.close(force=True)
    del rt, holds
    gc.collect()
    assert kept() is not None
    assert wait_exited(10)
