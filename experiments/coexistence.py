"""Does the program around the executor get its turn? `python -m experiments.coexistence [--quick]`

A large kernel alone, beside an executor that is busy with small adds, and beside one that is parked:

- `coexist/gemm`: a product of two square matrices (CUDA: bf16, 8,192; CPU: NumPy, f32, 1,024);
- `coexist/whole_gpu`: a kernel all of whose blocks must be resident at once because they wait for each other,
  as those of collectives do: a block of 1,024 threads on every multiprocessor, 100 barriers. CUDA only.

`time` is that of the large kernel, from its launch to its end. `beside/lease` is the default executor,
`beside/never_exit` the paper's (`lease_s=None`), `beside/parked` an executor without work. A kernel that has
not finished after `STARVED_S` is starved: then the executor is told to leave, which must free it, and the row
says so. `tasks_per_s` is what the executor serves meanwhile, against what it serves alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import typer

import gpuos_numba as gpuos

from .baselines import cuda_torch
from .harness import Results, Row, WrongResult, reason
from .lab import TIMEOUT_S, Lab, Question, command
from .present import bars

STARVED_S = 2.0
RUNS, QUICK_RUNS = 12, 3
SECONDS_ALONE = 1.0
N, BATCH = 1024, 4096
MODES: dict[str, dict[str, Any]] = {"lease": {}, "never_exit": {"lease_s": None, "idle_s": None}}


class Starved(RuntimeError):
    """A kernel did not finish beside the executor."""


@dataclass(slots=True)
class Large:
    """A large kernel: `launch()` it, and ask whether it is `finished()`."""

    name: str
    launch: Callable[[], Any]
    finished: Callable[[], bool]

    def run(self) -> float:
        """Seconds of one run. Raises Starved."""
        begin = time.perf_counter()
        self.launch()
        while not self.finished():
            if time.perf_counter() - begin > STARVED_S:
                raise Starved(f"{self.name} had not finished after {STARVED_S} s")
            time.sleep(20e-6)
        return time.perf_counter() - begin

    def settle(self) -> None:
        """Wait until nothing of it is left."""
        until = time.perf_counter() + TIMEOUT_S
        while not self.finished():
            if time.perf_counter() > until:
                raise Starved(f"{self.name} has not finished {TIMEOUT_S} s after the executor left")
            time.sleep(1e-3)


def numpy_gemm() -> Large:
    a = np.random.default_rng(1).standard_normal((1024, 1024)).astype(np.float32)
    out = np.empty_like(a)
    return Large("gemm", lambda: np.matmul(a, a, out=out), lambda: True)


def torch_gemm() -> Large:
    torch = cuda_torch()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out, event, stream = torch.empty_like(a), torch.cuda.Event(), torch.cuda.Stream()

    def launch() -> None:
        with torch.cuda.stream(stream):
            torch.matmul(a, a, out=out)
            event.record()

    launch()  # loads the kernel, which waits for any executor
    torch.cuda.synchronize()
    return Large("gemm", launch, event.query)


@cache
def meeting_kernel() -> Any:
    from numba import cuda

    @cuda.jit("void(int32[::1], int32, int32)")
    def meet(count, first, rounds):  # type: ignore[no-untyped-def]
        for number in range(rounds):
            if cuda.threadIdx.x == 0:
                cuda.atomic.add(count, 0, 1)
                # An atomic, for a plain load of a polling loop may be hoisted.
                while cuda.atomic.add(count, 0, 0) - first < (number + 1) * cuda.gridDim.x:
                    pass
            cuda.syncthreads()

    return meet


def whole_gpu() -> Large:
    """Launched as collectives are, not cooperatively: blocks that find room wait for the others."""
    from numba import cuda

    torch = cuda_torch()
    kernel, rounds = meeting_kernel(), 100
    blocks = torch.cuda.get_device_properties("cuda").multi_processor_count
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    stream = cuda.external_stream(side.cuda_stream)
    count = cuda.to_device(np.zeros(1, np.int32))
    arrived = 0

    def launch() -> None:
        nonlocal arrived
        kernel[blocks, 1024, stream](count, arrived, rounds)
        arrived += blocks * rounds
        event.record(side)

    launch()
    torch.cuda.synchronize()
    if int(count.copy_to_host()[0]) != arrived:
        raise WrongResult("whole_gpu: the blocks did not all meet")
    return Large("whole_gpu", launch, event.query)


class Load:
    """Small adds, as many as the executor takes, on a thread."""

    def __init__(self, lab: Lab, rt: gpuos.Runtime) -> None:
        self.rt = rt
        host = np.ones((3, 64, N), np.float32)
        slab = lab.device(host)
        calls = [((slab[0, i % 64], slab[1, i % 64]), slab[2, i % 64]) for i in range(BATCH)]
        self.batch = rt.batch("add", calls)
        self.stop, self.error = threading.Event(), None  # type: ignore[var-annotated]

    @contextmanager
    def running(self) -> Iterator[Load]:
        thread = threading.Thread(target=self.feed, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            thread.join(TIMEOUT_S)
            self.stop.clear()
        if self.error is not None:
            raise self.error

    def feed(self) -> None:
        try:
            while not self.stop.is_set():
                self.rt.submit_batch(self.batch).wait(TIMEOUT_S)
        except BaseException as error:
            self.error = error

    def rate(self, work: Callable[[], Any]) -> float:
        """Tasks a second that are served while `work` runs."""
        before, begin = self.rt.stats().completed, time.perf_counter()
        work()
        return (self.rt.stats().completed - before) / (time.perf_counter() - begin)


def beside(large: Large, load: Load, runs: int) -> tuple[list[float], list[float], str]:
    """(ms of each run, tasks a second meanwhile, why it was starved)."""
    times: list[float] = []
    rates: list[float] = []
    try:
        with load.running():
            time.sleep(0.05)
            for _ in range(runs):
                rates.append(load.rate(lambda: times.append(large.run() * 1e3)))
    except Starved as error:
        begin = time.perf_counter()
        load.rt.close()  # ends the executor
        large.settle()
        took = time.perf_counter() - begin
        return [], rates, f"starved: {error}; {took:.2g} s after the executor was ended it had"
    return times, rates, ""


def rows(lab: Lab, build: Callable[[], Large]) -> list[Row]:
    """One large kernel in all modes."""
    runs = QUICK_RUNS if lab.quick else RUNS
    lab.park()
    large = build()
    case = f"coexist/{large.name}"
    found: dict[str, list[float]] = {"alone": [], "beside/parked": []}
    for number in range(1 + 2 * runs):
        name = "alone" if number % 2 else "beside/parked"
        if name == "beside/parked":
            lab.rt.nop().wait(TIMEOUT_S)
        lab.park() if name == "alone" else time.sleep(2e-3)
        if number:
            found[name].append(large.run() * 1e3)
    made = [Row(case, name, "time", "ms").summarize(samples) for name, samples in found.items()]
    for mode, settings in MODES.items():
        with gpuos.Runtime(machine=lab.rt.machine, **settings) as rt:
            load = Load(lab, rt)
            with load.running():
                time.sleep(0.05)
                pieces = 10
                pause = SECONDS_ALONE / pieces / (10 if lab.quick else 1)
                alone = [load.rate(lambda: time.sleep(pause)) for _ in range(pieces)]
            times, rates, why = beside(large, load, runs)
        made.append(Row(case, f"beside/{mode}", "time", "ms", why=why).summarize(times))
        suffix = "" if mode == "lease" else f"/{mode}"
        made.append(Row("coexist/tasks_alone", lab.name + suffix, "tasks_per_s", "1/s").summarize(alone))
        served = Row(f"{case}/tasks_beside", lab.name + suffix, "tasks_per_s", "1/s", why=why)
        made.append(served.summarize([] if why else rates))
    return made


def attempt(lab: Lab, name: str, build: Callable[[], Large]) -> list[Row]:
    try:
        return rows(lab, build)
    except (ImportError, RuntimeError, AttributeError) as error:  # no PyTorch, or no cooperative launches
        return [Row(f"coexist/{name}", "alone", "time", "ms", why=reason(error))]


def questions(lab: Lab) -> list[Question]:
    if not lab.cuda:
        return [("gemm", lambda: rows(lab, numpy_gemm))]
    return [
        ("gemm", lambda: attempt(lab, "gemm", torch_gemm)),
        ("whole GPU", lambda: attempt(lab, "whole_gpu", whole_gpu)),
    ]


def draw(results: Results, figure: Any) -> None:
    figure.set_size_inches(14, 5)
    left, right = figure.subplots(1, 2)
    bars(left, [row for row in results.rows if row.metric == "time"], "time of the large kernel")
    bars(right, [row for row in results.rows if row.metric == "tasks_per_s"], "small tasks served")


main = command("coexistence", questions, draw)

if __name__ == "__main__":
    typer.run(main)
