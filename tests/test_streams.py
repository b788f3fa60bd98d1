"""Tasks that wait for a CUDA stream, and streams that wait for tasks.

What withholds a task is a word that somebody outside stores; on the CPU machine the tests store it
themselves, so that withholding, parking and launching again really run there.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments import streams
from gpuos_numba import Runtime
from gpuos_numba.errors import ArgumentError, DeviceError, MachineError, QueueFull, WaitTimeout
from gpuos_numba.host.streams import FEW, handle_of
from gpuos_numba.machines import cuda

TIMEOUT_S = 60.0


class Gate:
    """Stands for a stream: stores the word when it is told to."""

    def __init__(self, rt: Runtime) -> None:
        self.position = rt._streams.hold(self._later)

    def _later(self, word: int, value: int) -> None:
        self.word, self.value = word, value

    def open(self) -> None:
        ctypes.c_uint64.from_address(self.word).value = self.value


@pytest.fixture
def cpu() -> Iterator[Runtime]:
    with Runtime("cpu", workers=2, capacity=64) as rt:
        yield rt


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that must come true without this thread's help."""
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(1e-3)


def numbers(count: int) -> list[np.ndarray[Any, Any]]:
    return [np.full(8, i, np.float32) for i in range(count)]


def test_what_comes_after_a_withheld_position_waits_and_what_came_before_does_not(cpu: Runtime) -> None:
    a, b = numbers(2)
    before = cpu.add(a, b)
    gate = Gate(cpu)
    after = cpu.add(b, b)
    before.wait(TIMEOUT_S)
    with pytest.raises(WaitTimeout):
        after.wait(0.05)
    gate.open()
    assert (after.result(TIMEOUT_S) == 2).all()


def test_the_executor_parks_before_a_withheld_task_and_submitting_more_does_not_launch_it(
    cpu: Runtime,
) -> None:
    a, b = numbers(2)
    cpu.add(a, b).wait(TIMEOUT_S)
    gate = Gate(cpu)
    until(lambda: cpu.stats().parked)
    launches = cpu.stats().launches
    tickets = [cpu.add(a, b) for _ in range(20)]
    with pytest.raises(WaitTimeout):
        tickets[-1].wait(0.05)
    assert cpu.stats().launches == launches
    gate.open()
    tickets[-1].wait(TIMEOUT_S)
    assert cpu.stats().launches > launches


def test_what_stands_behind_a_withheld_task_does_not_widen_a_launch() -> None:
    a, b = numbers(2)
    with Runtime("cpu", workers=3, quiet_workers=1) as rt:
        gate = Gate(rt)
        until(lambda: rt.stats().parked)
        first = rt.add(a, b)
        second = Gate(rt)
        tickets = [rt.add(a, b) for _ in range(100)]
        gate.open()
        first.wait(TIMEOUT_S)
        assert rt.stats().workers == 1
        until(lambda: rt.stats().parked)
        second.open()
        for ticket in tickets:
            ticket.wait(TIMEOUT_S)
        assert rt.stats().workers == 3


def test_a_task_that_nobody_waits_for_runs_when_its_position_is_opened(cpu: Runtime) -> None:
    a, b = numbers(2)
    out = np.zeros(8, np.float32)
    gate = Gate(cpu)
    ticket = cpu.add(a, b, out=out)
    until(lambda: cpu.stats().parked)
    gate.open()
    until(lambda: ticket.done)
    assert (out == 1).all()


def test_withheld_positions_are_passed_in_order_however_they_are_opened(cpu: Runtime) -> None:
    a, b = numbers(2)
    gates, tickets = [], []
    for _ in range(5):
        gates.append(Gate(cpu))
        tickets.append(cpu.add(a, b))
    for gate in reversed(gates[1:]):
        gate.open()
    with pytest.raises(WaitTimeout):
        tickets[0].wait(0.02)
    assert not any(ticket.done for ticket in tickets)
    gates[0].open()
    for ticket in tickets:
        ticket.wait(TIMEOUT_S)


@pytest.mark.parametrize("seed", range(3))
def test_no_task_is_lost_or_early_when_threads_submit_and_positions_open_at_any_moment(seed: int) -> None:
    """Forbidden: a task behind a gate that ran before it was opened; one that never ran."""
    with Runtime("cpu", workers=2, capacity=32) as rt:
        opened: list[int] = []
        early: list[int] = []

        def produce(number: int) -> None:
            random = np.random.default_rng((seed, number))
            a, b = numbers(2)
            for _ in range(40):
                gate = Gate(rt)
                ticket = rt.add(a, b)
                time.sleep(random.choice([0.0, 1e-4, 3e-3]))
                if ticket.done:
                    early.append(gate.position)
                opened.append(gate.position)
                gate.open()
                if random.random() < 0.5:
                    ticket.wait(TIMEOUT_S)

        threads = [threading.Thread(target=produce, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        rt.synchronize(TIMEOUT_S)
        assert not early
        assert len(opened) == 120 and rt.stats().completed == 240


def test_a_lease_that_ends_hands_the_withheld_position_to_the_next_launch() -> None:
    a, b = numbers(2)
    with Runtime("cpu", workers=1, lease_s=0.004, idle_s=10.0, hold_s=10.0) as rt:
        rt.add(a, b).wait(TIMEOUT_S)
        gate = Gate(rt)
        ticket = rt.add(a, b)
        begun = rt.stats().launches
        until(lambda: rt.stats().parked or rt.stats().launches > begun + 1)
        gate.open()
        assert (ticket.result(TIMEOUT_S) == 1).all()


def test_parking_on_request_works_while_a_task_is_withheld(cpu: Runtime) -> None:
    a, b = numbers(2)
    gate = Gate(cpu)
    ticket = cpu.add(a, b)
    cpu.park(TIMEOUT_S)
    assert not ticket.done
    gate.open()
    ticket.wait(TIMEOUT_S)


def test_a_ring_that_is_full_behind_a_withheld_task_refuses_and_recovers() -> None:
    a, b = numbers(2)
    with Runtime("cpu", workers=1, capacity=4) as rt:
        gate = Gate(rt)
        tickets = [rt.add(a, b) for _ in range(3)]
        assert rt.try_submit("add", (a, b)) is None
        with pytest.raises(QueueFull):
            rt._streams.hold(lambda word, value: None, timeout_s=0.01)
        gate.open()
        tickets.append(rt.add(a, b))
        for ticket in tickets:
            ticket.wait(TIMEOUT_S)


def test_a_stream_that_takes_long_is_no_hang() -> None:
    a, b = numbers(2)
    with Runtime("cpu", workers=1, deadline_s=0.1) as rt:
        gate = Gate(rt)
        ticket = rt.add(a, b)
        with pytest.raises(WaitTimeout):  # and not a HangError
            ticket.wait(0.4)
        gate.open()
        ticket.wait(TIMEOUT_S)


def test_a_stream_that_refuses_the_store_does_not_end_the_ring(cpu: Runtime) -> None:
    def refuse(word: int, value: int) -> None:
        raise MachineError("the driver answered 999")

    with pytest.raises(MachineError, match="999"):
        cpu._streams.hold(refuse)
    cpu.add(*numbers(2)).wait(TIMEOUT_S)


def test_positions_may_wrap_while_withheld() -> None:
    a, b = numbers(2)
    with Runtime("cpu", workers=1, capacity=4, start_position=(1 << 64) - 3) as rt:
        for _ in range(6):
            gate = Gate(rt)
            ticket = rt.add(a, b)
            assert not ticket.done
            gate.open()
            ticket.wait(TIMEOUT_S)


def test_closing_waits_for_what_is_withheld() -> None:
    a, b = numbers(2)
    rt = Runtime("cpu", workers=1)
    gate = Gate(rt)
    ticket = rt.add(a, b)
    threading.Timer(0.05, gate.open).start()
    rt.close()
    assert ticket.done


# --- streams that wait ---


class Recorded:
    """A machine's stream operations, written down: which words a stream would wait for, and for what."""

    def __init__(self, rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words: list[tuple[int, int]] = []
        monkeypatch.setattr(rt._machine, "stream_state", lambda stream: "idle")
        monkeypatch.setattr(rt._machine, "stream_wait", lambda stream, words: self.words.extend(words))

    def passes(self) -> bool:
        """What a stream's cyclic comparison says."""
        words = ((ctypes.c_uint64.from_address(word).value, value) for word, value in self.words)
        return all((now - value) & (1 << 64) - 1 < 1 << 63 for now, value in words)


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 60])
def test_a_stream_waits_for_all_tasks_of_a_ticket_and_a_lap_later_still_passes(
    count: int, cpu: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = numbers(2)
    stream = Recorded(cpu, monkeypatch)
    batch = cpu.batch("add", [((a, b), np.zeros(8, np.float32)) for _ in range(count)])
    gate = Gate(cpu)
    ticket = cpu.submit_batch(batch)
    ticket.block_stream(0)
    assert stream.words and not stream.passes()
    gate.open()
    until(stream.passes)
    assert ticket.done
    for _ in range(200):  # three laps
        cpu.add(a, b)
    cpu.synchronize(TIMEOUT_S)
    assert stream.passes()


def test_a_stream_waits_for_every_task_submitted_before(
    cpu: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = numbers(2)
    stream = Recorded(cpu, monkeypatch)
    cpu.before_stream(0)
    assert not stream.words  # nothing to wait for
    gate = Gate(cpu)
    tickets = [cpu.add(a, b) for _ in range(30)]
    cpu.before_stream(0)
    assert not stream.passes()
    gate.open()
    until(stream.passes)
    assert all(ticket.done for ticket in tickets)


def test_a_chain_is_waited_for_by_its_last_task(cpu: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = numbers(2)
    stream = Recorded(cpu, monkeypatch)
    gate = Gate(cpu)
    ticket = cpu.submit_batch(cpu.batch("add", [((a, b), a)] * 20), linked=True)
    ticket.block_stream(0)
    assert len(stream.words) == 1 and not stream.passes()
    gate.open()
    until(stream.passes)
    assert ticket.done


# --- what is refused ---


def test_the_cpu_machine_has_no_streams(cpu: Runtime) -> None:
    ticket = cpu.add(*numbers(2))
    for call in (cpu.after_stream, cpu.before_stream, ticket.block_stream):
        with pytest.raises(MachineError, match="no CUDA streams"):
            call(0)
    cpu.synchronize(TIMEOUT_S)


def test_a_stream_that_is_being_captured_is_refused_before_anything_is_enqueued(
    cpu: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu._machine, "stream_state", lambda stream: "capturing")
    for call in (cpu.after_stream, cpu.before_stream):
        with pytest.raises(ArgumentError, match="captured"):
            call(7)
    assert cpu.stats().submitted == 0


def test_handles_of_every_librarys_stream() -> None:
    assert handle_of(0, 0) == 0 and handle_of(np.uint64(7), 0) == 7
    assert handle_of(SimpleNamespace(cuda_stream=5, device_index=0), 0) == 5
    assert handle_of(SimpleNamespace(ptr=6, device_id=-1), 0) == 6
    assert handle_of(SimpleNamespace(handle=ctypes.c_void_p(0)), 0) == 0
    assert handle_of(SimpleNamespace(handle=ctypes.c_void_p(9)), 0) == 9
    assert handle_of(SimpleNamespace(__cuda_stream__=lambda: (0, 11)), 0) == 11
    with pytest.raises(DeviceError, match="GPU 1"):
        handle_of(SimpleNamespace(cuda_stream=5, device_index=1), 0)
    for wrong in ("0", 1.5, True, -1, object()):
        with pytest.raises(ArgumentError, match="stream="):
            handle_of(wrong, 0)


def test_the_experiment_measures_what_this_machine_has() -> None:
    results = streams.run("cpu", quick=True)
    assert {row.system for row in results.rows} == {"gpuos-cpu", "gpuos-cpu/traced"}
    assert all(row.median for row in results.rows)
    assert len(streams.goals(results)) == 2


# --- on a GPU ---


@pytest.fixture(scope="module")
def torch() -> Any:
    if not cuda.available():
        pytest.skip("no GPU here: that streams and tasks wait for each other stays unproved")
    torch = pytest.importorskip("torch", reason="no torch here: that streams wait for tasks stays unproved")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here: that streams and tasks wait for each other stays unproved")
    return torch


@pytest.fixture(scope="module")
def gpu(torch: Any) -> Iterator[Runtime]:
    with Runtime("cuda") as rt:
        yield rt


@pytest.mark.gpu
@pytest.mark.parametrize("input_order", ["stream", "none"])
def test_a_slow_kernel_a_task_and_a_reader_on_three_streams_are_in_order(
    torch: Any, input_order: str
) -> None:
    with Runtime("cuda", input_order=input_order) as rt:
        writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
        for round in range(200):
            x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(writer):
                torch.cuda._sleep(1 + round % 4 * 300_000)
                x.fill_(1.0)
                if input_order == "none":
                    rt.after_stream(writer)
                ticket = rt.add(x, x, out=y)
            with torch.cuda.stream(reader):
                ticket.block_stream(reader)
                seen = y.clone()
            reader.synchronize()
            assert (seen == 2).all()


@pytest.mark.gpu
def test_a_big_product_between_two_groups_of_tasks(torch: Any, gpu: Runtime) -> None:
    n = 2048
    a = torch.ones(n, n, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(n, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(200):
            c = torch.mm(a, a)
            gpu.after_stream(stream)
            chain = gpu.batch("add", [((x, torch.ones_like(x)), x)] * 4)
            gpu.submit_batch(chain, linked=True)
            gpu.before_stream(stream)
        stream.synchronize()
    gpu.synchronize(TIMEOUT_S)
    assert (x == 800).all() and (c == n).all()


@pytest.mark.gpu
def test_streams_of_every_library(torch: Any, gpu: Runtime) -> None:
    x = torch.zeros(256, device="cuda")
    streams: list[Any] = [None, 0, torch.cuda.Stream(), torch.cuda.current_stream()]
    cupy = pytest.importorskip("cupy")
    numba = pytest.importorskip("numba.cuda")
    streams += [cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null, numba.stream()]
    for stream in streams:
        gpu.after_stream(stream)
        ticket = gpu.add(x, x)
        ticket.block_stream(stream)
        gpu.before_stream(stream)
        ticket.wait(TIMEOUT_S)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_capture_is_refused_and_goes_on(torch: Any, gpu: Runtime) -> None:
    x = torch.zeros(256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        for call in (gpu.after_stream, gpu.before_stream):
            with pytest.raises(ArgumentError, match="captured"):
                call(torch.cuda.current_stream())
        with pytest.raises(ArgumentError, match="captured"):
            gpu.submit("exp", (y,))
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 1).all()


@pytest.mark.gpu
def test_a_stream_that_waits_for_a_parked_executor_is_served(torch: Any, gpu: Runtime) -> None:
    x = torch.ones(1024, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(50):
        gpu.park(TIMEOUT_S)
        out = torch.zeros_like(x)
        torch.cuda.synchronize()
        gpu.add(x, x, out=out).block_stream(stream)
        with torch.cuda.stream(stream):
            seen = out.clone()
        stream.synchronize()
        assert (seen == 2).all()
