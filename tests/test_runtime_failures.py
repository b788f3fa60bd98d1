"""What goes wrong, and what is then said and left behind: refusals, Ctrl-C, exits, forks, hangs."""

from __future__ import annotations

import ctypes
import dis
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuos_numba import (
    ArgumentError,
    ClosedError,
    DTypeError,
    GpuosError,
    HangError,
    MachineError,
    Runtime,
    Status,
    UnknownOperatorError,
)

F32 = np.float32
ROOT = Path(__file__).parent.parent


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, F32)


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


LINE = f32(9)
REFUSED: dict[str, tuple[str, Any, Any, dict[str, Any], type[GpuosError], str]] = {
    # case: operator, inputs, out, keywords, exception, what the message must match: the value and the remedy
    "unknown operator": ("ad", [f32(2)], None, {}, UnknownOperatorError, "'ad'.*add"),
    "float64": ("add", [np.ones(2), f32(2)], None, {}, DTypeError, r"inputs\[0\].*float64.*convert"),
    "int32 out": ("copy", [f32(2)], np.ones(2, np.int32), {}, DTypeError, "out.*int32.*pass an out"),
    "complex": ("copy", [np.ones(2, complex)], None, {}, DTypeError, "complex128.*convert"),
    "byte-swapped": ("copy", [np.ones(2, ">f4")], None, {}, DTypeError, ">f4.*newbyteorder"),
    "object": ("copy", [np.array([None])], None, {}, DTypeError, "object.*convert"),
    "a list": ("copy", [[1.0, 2.0]], None, {}, ArgumentError, r"inputs\[0\] is a list.*asarray"),
    "too few inputs": ("add", [f32(2)], None, {}, ArgumentError, r"2 input\(s\), 1 given"),
    "too many inputs": ("relu", [f32(2)] * 3, None, {}, ArgumentError, r"1 input\(s\), 3 given"),
    "not broadcastable": ("add", [f32(2, 3), f32(4)], None, {}, ArgumentError, "3.*4.*reshape"),
    "shape of out": ("add", [f32(2, 3), f32(3)], f32(3), {}, ArgumentError, r"\(3,\).*\(2, 3\).*pass"),
    "partial overlap": ("copy", [LINE[:-1]], LINE[1:], {}, ArgumentError, r"out overlaps inputs\[0\].*copy"),
    "backwards in place": ("copy", [LINE], LINE[::-1], {}, ArgumentError, r"out overlaps inputs\[0\].*copy"),
    "out overlaps itself": (
        "copy",
        [f32(3, 3)],
        np.lib.stride_tricks.as_strided(f32(9), (3, 3), (4, 4)),
        {},
        ArgumentError,
        "overlaps itself.*array of its own",
    ),
    "expanded out": (
        "copy",
        [f32(3, 3)],
        np.lib.stride_tricks.as_strided(f32(9), (3, 3), (0, 4)),
        {},
        ArgumentError,
        "overlaps itself.*array of its own",
    ),
    "read-only out": ("copy", [f32(2)], read_only(f32(2)), {}, ArgumentError, r"read-only.*copy\(\)"),
    "9 dims": ("copy", [f32(*[1] * 9)], None, {}, ArgumentError, "9 dimensions.*at most 8.*reshape"),
    "missing scalar": ("fill", [], f32(2), {}, ArgumentError, "needs the parameter 'value'"),
    "unknown scalar": (
        "add",
        [f32(2), f32(2)],
        None,
        {"beta": 2.0},
        ArgumentError,
        "no parameter 'beta'.*takes",
    ),
    "scalar without a number": ("fill", [], f32(2), {"value": "x"}, ArgumentError, "'x'.*not of kind number"),
    "nothing to take a shape from": ("fill", [], None, {"value": 1.0}, ArgumentError, "pass out="),
    "out of what writes nothing": ("nop", [], f32(2), {}, ArgumentError, "writes nothing"),
    "after something else": ("nop", [], None, {"after": 3}, ArgumentError, "after=.*tickets of this Runtime"),
    "misaligned": (
        "copy",
        [np.zeros(9, np.uint8)[1:5].view(F32)],
        None,
        {},
        ArgumentError,
        r"not aligned.*copy\(\)",
    ),
}


@pytest.fixture(scope="module")
def cpu() -> Any:
    with Runtime("cpu") as rt:
        yield rt


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("way", ["submit", "try_submit", "batch"])
def test_refused_before_anything_is_enqueued(cpu: Runtime, case: str, way: str) -> None:
    op, inputs, out, keywords, error, message = REFUSED[case]
    if way == "batch" and "after" in keywords:
        pytest.skip("a batch has no after=")
    before = cpu.stats().submitted
    with pytest.raises(error) as caught:
        if way == "batch":
            cpu.batch(op, [(inputs, out)], **keywords)
        else:
            getattr(cpu, way)(op, inputs, out, **keywords)
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
    assert cpu.stats().submitted == before


def test_a_foreign_ticket_is_refused(cpu: Runtime) -> None:
    with Runtime("cpu") as other:
        tickets = [cpu.nop() for _ in range(3)]
        before = cpu.stats().submitted
        with pytest.raises(ArgumentError, match="tickets of this Runtime"):
            cpu.nop(after=other.nop())
        assert cpu.stats().submitted == before
        assert cpu.nop(after=tickets).wait(20).status == Status.OK


def test_an_empty_batch_is_refused(cpu: Runtime) -> None:
    with pytest.raises(ArgumentError, match="empty batch"):
        cpu.submit_batch(cpu.batch("nop", []))


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": 3},
        {"lease_s": 0},
        {"workers": 0},
        {"max_run": 257},
        {"input_order": "x"},
        {"capasity": 4},
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ArgumentError, match=f"{name}={value!r}"):
        Runtime("cpu", **settings)


def test_a_closed_runtime_says_so() -> None:
    rt = Runtime("cpu")
    x = f32(3)
    ticket, batch = rt.add(x, x, out=x), rt.batch("nop", [((), None)])
    rt.close()
    rt.close()
    assert ticket.result()[0] == 2  # what was published was finished
    for use in (
        lambda: rt.add(x, x),
        lambda: rt.try_submit("nop"),
        lambda: rt.batch("nop", []),
        lambda: rt.submit_batch(batch),
        rt.synchronize,
        rt.park,
    ):
        with pytest.raises(ClosedError, match="closed: make a new one"):
            use()
    assert "closed" in repr(rt)


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_inside_with_goes_through_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, Runtime("cpu") as rt:
        rt.nop()
        raise error
    assert caught.value is error
    with pytest.raises(ClosedError):
        rt.nop()


# --- Ctrl-C ---


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
@pytest.mark.parametrize("what", ["wait", "synchronize", "submit to a full ring"])
def test_ctrl_c_in_a_wait(what: str) -> None:
    # A shell's background job inherits an ignored SIGINT, and Python then raises nothing.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _interrupt(what)
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(what: str) -> None:
    with Runtime("cpu", capacity=4) as rt:
        rt.nop().wait(20)
        holds = rt._keeper.holds()
        holds.take()
        assert rt._machine.wait_exited(10)
        ticket = rt.nop()
        if what.startswith("submit"):
            for _ in range(3):
                rt.nop()
        sent: list[float] = []

        def press() -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.2, press)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            if what == "wait":
                ticket.wait(20)
            elif what == "synchronize":
                rt.synchronize(20)
            else:
                rt.nop()
        assert time.monotonic() - sent[0] < 0.5
        timer.join()
        holds.give_back()
        holds.serve()
        ticket.wait(20)
        x = f32(2)
        assert rt.add(x, x).result(timeout_s=20)[0] == 2


# --- the life of processes and threads ---


def run_python(code: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """A process of its own; hanging fails the test."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = "import numpy as np\nfrom gpuos_numba import *\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def test_exit_without_close_and_fork_in_one_process() -> None:
    """One process for several things, because a new one compiles for a quarter of a minute."""
    done = run_python(
        """
        import os, sys, time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        rt = Runtime("cpu")
        x = np.ones(5, np.float32)
        batch = rt.batch("nop", [((), None)])
        ticket = rt.add(x, x, out=x)
        ticket.wait(20)
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (lambda: rt.add(x, x, out=x), lambda: rt.try_submit("nop"), rt.synchronize,
                        lambda: rt.submit_batch(batch), rt.park):
                try:
                    use()
                except ClosedError as error:
                    refused += "parent process" in str(error)
            rt.close()
            os._exit(0 if refused == 5 else 1)
        begin = time.monotonic()
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid or time.monotonic() - begin > 20:
                break
            time.sleep(0.01)
        print("child", pid == child and os.waitstatus_to_exitcode(status))
        print("parent", rt.add(x, x).result(timeout_s=20)[0])
        for _ in range(1000):
            rt.add(x, x)
        print("end", flush=True)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["child", "0", "parent", "4.0", "end"], done.stdout
    assert done.stderr == ""


def _in_spawned(queue: Any) -> None:
    with Runtime("cpu") as rt:
        x = f32(3)
        queue.put(float(rt.add(x, x).result(timeout_s=20)[0]))


@pytest.mark.slow
def test_a_spawned_child_has_a_runtime_of_its_own(cpu: Runtime) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_in_spawned, args=(queue,))
    child.start()
    assert queue.get(timeout=120) == 2
    child.join(20)
    assert child.exitcode == 0
    assert cpu.nop().wait(20).status == Status.OK


def threads_of_runtimes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gpuos-")}


def test_thirty_runtimes_leak_no_thread() -> None:
    before = threads_of_runtimes()
    for turn in range(30):
        rt = Runtime("cpu", capacity=16)
        x = f32(3)
        assert rt.add(x, x).result(timeout_s=20)[0] == 2
        if turn % 2:
            rt.close()
    rt.close()
    del rt
    gc.collect()
    deadline = time.monotonic() + 10
    while threads_of_runtimes() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads_of_runtimes() - before


def test_a_forgotten_runtime_ends_its_threads() -> None:
    before = threads_of_runtimes()
    rt = Runtime("cpu")
    rt.nop().wait(20)
    assert threads_of_runtimes() > before
    del rt
    gc.collect()
    assert threads_of_runtimes() == before


def test_two_runtimes_at_once(cpu: Runtime) -> None:
    with Runtime("cpu", capacity=8) as other:
        x, y, one = np.zeros(3, F32), np.zeros(3, F32), f32(3)
        for _ in range(200):
            a, b = cpu.add(x, one, out=x), other.add(y, one, out=y)
            a.wait(20), b.wait(20)
        assert x[0] == y[0] == 200


def test_an_idle_runtime_uses_next_to_nothing(cpu: Runtime) -> None:
    cpu.nop().wait(20)
    deadline = time.monotonic() + 5
    while not cpu.stats().parked and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cpu.stats().parked and cpu.stats().park_reason.lower() in ("idle", "lease")
    time.sleep(0.1)
    begin = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - begin < 0.01


# --- hangs ---


def test_a_hang_raises_with_a_dump_and_a_forced_close_ends_it() -> None:
    rt = Runtime("cpu", deadline_s=0.3, start_position=1000)
    rt.nop().wait(20)
    holds = rt._keeper.holds()
    holds.take()
    assert rt._machine.wait_exited(10)
    x = f32(2)
    tickets = [rt.add(x, x, out=x) for _ in range(3)]
    begin = time.monotonic()
    for wait in (tickets[0].wait, rt.synchronize):
        with pytest.raises(HangError) as caught:
            wait()
        text = str(caught.value)
        assert "no task completed for 0.3 s" in text
        assert "claimed 1004, ingested 1001, retired 1001" in text and "workers are idle" in text
    assert 0.5 < time.monotonic() - begin < 5
    begin = time.monotonic()
    rt.close(force=True)
    assert time.monotonic() - begin < 3
    with pytest.raises(ClosedError, match="position 1001"):
        tickets[0].wait(5)
    assert tickets[0].status is None


def test_a_stalled_producer_shows_in_the_dump_and_blocks_nobody_for_ever() -> None:
    rt = Runtime("cpu", deadline_s=0.3, capacity=4)
    position, granted = rt._host.try_claim(rt._address, 1)  # and never published
    assert (position, granted) == (0, 1)
    later = rt.nop()
    with pytest.raises(HangError, match="position 0 is claimed and not published"):
        later.wait()
    assert rt.try_submit("nop") is not None and rt.try_submit("nop") is not None
    assert rt.try_submit("nop") is None
    rt._host.fill(rt._address, rt.batch("nop", [((), None)]).tasks.ctypes.data, 1, 0, 0, 0, 0, 0)
    if rt._host.publish(rt._address, 0, 1):
        rt._keeper.ensure_served()
    rt.synchronize(20)
    assert later.done and rt.stats().completed == 4
    rt.close()


def test_a_launch_that_fails_is_reported_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime("cpu") as rt:
        rt.nop().wait(20)
        rt.park()
        with monkeypatch.context() as patched:

            def refuse(workers: int) -> None:
                raise RuntimeError("no device today")

            patched.setattr(rt._machine, "launch", refuse)
            with pytest.raises(RuntimeError, match="no device today"):
                rt.nop()
        rt.synchronize(20)
        assert rt.stats().queue_depth == 0


def test_a_launch_that_fails_is_tried_again_for_a_task_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Runtime("cpu") as rt:
        launch, failures = rt._machine.launch, iter([MachineError("no launch today")])

        def sometimes(workers: int) -> None:
            for failure in failures:
                raise failure
            launch(workers)

        monkeypatch.setattr(rt._machine, "launch", sometimes)
        with pytest.raises(MachineError, match="no launch today"):
            rt.nop()
        until = time.monotonic() + 10
        while rt.stats().completed < 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert rt.stats().completed == 1  # the keeper launched; nobody submitted or waited


# --- Ctrl-C while tasks are enqueued ---

SENDERS = {"_send", "_sent", "_send_known", "_short", "_complete"}
# CPython looks for signals at calls and backward jumps, so never before these two; an exception raised
# there by a trace function would leave the one that is handled, with its frame, as the thread's own.
NO_SIGNAL_BEFORE = {dis.opmap["PUSH_EXC_INFO"], dis.opmap["POP_EXCEPT"]}


class Withheld:
    """Nothing that is submitted runs until `open`."""

    def __init__(self, rt: Runtime) -> None:
        rt._streams.hold(self._later)

    def _later(self, word: int, value: int) -> None:
        self._word, self._value = word, value

    def open(self) -> None:
        ctypes.c_uint64.from_address(self._word).value = self._value


def interrupted(do: Callable[..., Any], step: int, *arguments: Any) -> bool:
    """Call it, with a Ctrl-C before the bytecode instruction of this number in SENDERS; whether it came."""
    left = step

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_name not in SENDERS:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0 and frame.f_code.co_code[frame.f_lasti] not in NO_SIGNAL_BEFORE:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do(*arguments)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def numpy_call(rt: Runtime) -> Callable[[Any, Any], Any]:
    return lambda x, out: rt.add(x, x, out=out)


def batch_call(rt: Runtime) -> Callable[[Any, Any], Any]:
    return lambda x, out: rt.submit_batch(rt.batch("add", [((x, x), out)] * 2))


def known_program(rt: Runtime) -> Callable[[Any, Any], Any]:
    x, out = np.ones((2, 8), F32)
    program = rt.program(lambda x: rt.add(x, x), (x,))
    program(x, out=out).wait()

    def call(x: Any, out: Any) -> Any:
        program._interrupted = False  # the call that was has run
        return program(x, out=out)

    return call


def short_call(rt: Runtime) -> Callable[[Any, Any], Any]:
    torch = pytest.importorskip("torch", reason="the short way takes torch tensors")
    x, out = torch.ones(2, 8)
    for _ in range(3):
        rt.add(x, x, out=out).wait()
        rt.add(x, x).wait()
    if rt._calls is None or rt._calls.sent == 0:
        pytest.skip("this torch has no short way: unproved")

    def call(x: Any, out: Any) -> Any:
        return rt.add(torch.from_numpy(x), torch.from_numpy(x), out=torch.from_numpy(out))

    return call


@pytest.mark.parametrize("made", [numpy_call, batch_call, known_program, short_call])
def test_ctrl_c_at_any_instruction_frees_no_array_of_a_task_and_keeps_no_other_for_ever(made: Any) -> None:
    """Forbidden: a task that is enqueued and not run, and an array of it that is gone."""
    with Runtime("cpu", workers=1, deadline_s=60) as rt:
        call = made(rt)

        def once(step: int) -> tuple[bool, bool]:
            x, out = np.ones(8, F32), np.zeros(8, F32)
            gate = Withheld(rt)
            before = rt.stats().submitted
            came = interrupted(call, step, x, out)
            sent = rt.stats().submitted > before
            kept = weakref.ref(x), weakref.ref(out)
            del x, out
            there = [each() is not None for each in kept]
            gate.open()
            rt.synchronize(60)
            assert not sent or all(there)
            if kept[0]() is not None:
                gc.collect()  # an interrupt within an `except` leaves frames that hold each other
            assert kept[0]() is None
            assert (
                kept[1]() is None or made is known_program
            )  # which keeps its last ticket, and that its result
            return came, sent

        found = []
        while not found or found[-1][0]:
            found.append(once(len(found)))
        assert len(found) > 20 and {sent for _, sent in found} == {False, True}


def test_a_program_whose_call_was_interrupted_waits_for_it_before_the_next(cpu: Runtime) -> None:
    x, out = np.ones((2, 8), F32)
    program = cpu.program(lambda x: cpu.add(x, x), (x,))
    steps = 0
    while interrupted(lambda: program(x, out=out), steps):
        steps += 7
        other = np.full(8, steps, F32)
        assert (program(other).result(60) == 2 * steps).all()
        assert cpu.stats().queue_depth == 0
    assert steps > 20


def test_a_call_that_a_full_ring_refuses_leaves_its_arrays_alone() -> None:
    with Runtime("cpu", workers=1, capacity=4, deadline_s=60) as rt:
        gate = Withheld(rt)
        for _ in range(3):
            rt.add(f32(8), f32(8))
        held = len(rt._held)
        x = f32(8)
        for _ in range(5):
            assert rt.try_submit("add", (x, x)) is None
        assert len(rt._held) == held
        kept = weakref.ref(x)
        del x
        gc.collect()
        assert kept() is None
        gate.open()


def test_threads_that_tidy_at_once_let_go_of_no_array_too_early() -> None:
    """Forbidden: two look at the same note, and the second removes another one."""
    with Runtime("cpu", workers=1, deadline_s=60) as rt:
        rt.add(f32(8), f32(8)).wait()
        gate = Withheld(rt)
        kept = []
        for _ in range(50):
            x = f32(8)
            kept.append(weakref.ref(x))
            rt.add(x, x)
        del x
        threads = [threading.Thread(target=lambda: [rt._tidy() for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(each() is not None for each in kept)
        gate.open()
        rt.synchronize(60)
        gc.collect()
        assert all(each() is None for each in kept)
