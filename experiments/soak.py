"""Does it hold, and does the program around it live? `python -m experiments.soak [--seconds 60]`

Four producer threads submit chains of `x = x + 1` without pause, each on arrays of its own, so every task's
effect is counted: after n rounds each array must be exactly n mod 2^20 (it is reset there; f32 is exact).
Meanwhile, on CUDA, whatever blocks beside a kernel that never exits is done: a first torch kernel, GEMMs,
`empty_cache`, `synchronize`, graph capture, a new numba kernel, CuPy's pool. Each must complete; its time is
kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

import gpuos_numba as gpuos

from .harness import Results, Row

PRODUCERS, ARRAYS, LAPS, ELEMENTS = 4, 64, 256, 256
WRAP = 1 << 20  # an array counts to here, then is filled with 0; f32 counts exactly to 2^24


class LostTask(AssertionError):
    """An array does not hold the number of tasks that were submitted for it."""


class Producer(threading.Thread):
    """Submits batches of ARRAYS x LAPS adds; each array's LAPS adds are one chain."""

    def __init__(self, rt: gpuos.Runtime, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.rt, self.stop, self.tasks = rt, stop, 0
        self.error: BaseException | None = None
        if rt.machine == "cuda":
            import torch

            zeros = lambda: torch.zeros(ELEMENTS, device="cuda")  # noqa: E731
            self.one = torch.ones(ELEMENTS, device="cuda")
            torch.cuda.synchronize()
        else:
            zeros = lambda: np.zeros(ELEMENTS, np.float32)  # noqa: E731
            self.one = np.ones(ELEMENTS, np.float32)
        self.arrays = [zeros() for _ in range(ARRAYS)]
        self.chains = [rt.batch("add", [((x, self.one), x)] * LAPS) for x in self.arrays]
        self.reset = [rt.batch("fill", [((), x)], value=0.0) for x in self.arrays]
        self.count = 0  # of adds on each array since the last reset

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.lap()
            self.check()
        except BaseException as error:
            self.error = error

    def lap(self) -> None:
        # A chain waits for the one before it on the same array through the ticket.
        tickets = [self.rt.submit_batch(chain, linked=True) for chain in self.chains]
        for ticket in tickets:
            ticket.wait()
        self.tasks += ARRAYS * LAPS
        self.count += LAPS
        if self.count == WRAP:
            self.check()
            for reset in self.reset:
                self.rt.submit_batch(reset).wait()
            self.tasks += ARRAYS
            self.count = 0

    def check(self) -> None:
        for x in self.arrays:
            values = x.cpu().numpy() if self.rt.machine == "cuda" else x
            if not (values == np.float32(self.count)).all():
                raise LostTask(f"{self.count} adds were submitted, the array holds {np.unique(values)}")


def neighbours() -> dict[str, Callable[[], Any]]:
    """What must complete beside a busy executor, by name."""
    import torch

    def first_kernel() -> None:
        torch.erfinv(torch.rand(512, 512, device="cuda") * 0.01)
        torch.cuda.synchronize()

    def gemm() -> None:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(5):
            a @ a
        torch.cuda.synchronize()

    def empty_cache() -> None:
        torch.empty(1 << 28, device="cuda").fill_(1)
        torch.cuda.empty_cache()

    def graph() -> None:
        x = torch.ones(1024, device="cuda")
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            y = x + 2
        captured.replay()
        torch.cuda.synchronize()
        assert float(y.sum()) == 3 * 1024

    def numba_kernel() -> None:
        from numba import cuda

        @cuda.jit
        def double(x: Any) -> None:
            i = cuda.grid(1)
            if i < x.size:
                x[i] *= 2

        x = cuda.to_device(np.ones(1024, np.float32))
        double[4, 256](x)
        assert x.copy_to_host().sum() == 2048

    def cupy_pool() -> None:
        import cupy

        x = cupy.ones(1 << 24)
        del x
        cupy.get_default_memory_pool().free_all_blocks()

    return {
        "torch first kernel": first_kernel,
        "bf16 GEMM 8192 x5": gemm,
        "torch empty_cache": empty_cache,
        "torch synchronize": torch.cuda.synchronize,
        "graph capture and replay": graph,
        "new numba kernel": numba_kernel,
        "cupy pool free": cupy_pool,
    }


def main(
    seconds: Annotated[float, typer.Option(help="How long the producers run")] = 60.0,
    machine: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    json: Annotated[Path | None, typer.Option(help="Where to write the results")] = None,
) -> None:
    console = Console()
    with gpuos.Runtime(machine=machine) as rt:
        results = Results("soak", rt.device_name, rt.machine)
        stop = threading.Event()
        producers = [Producer(rt, stop) for _ in range(PRODUCERS)]
        begin = time.monotonic()
        for producer in producers:
            producer.start()
        time.sleep(min(1.0, seconds / 10))
        if rt.machine == "cuda":
            for name, run in neighbours().items():
                before, start = rt.stats().completed, time.monotonic()
                why = ""
                try:
                    run()
                except ImportError as error:
                    why = str(error)
                took = time.monotonic() - start
                served = rt.stats().completed - before
                console.print(f"{name}: {took * 1e3:.1f} ms, {served:,} tasks meanwhile {why}")
                case = f"beside/{name.replace(' ', '-').replace('/', '-')}"
                time_ms = None if why else took * 1e3
                results.rows.append(Row(case, "gpuos", "time", "ms", time_ms, repeats=1, why=why))
                results.rows.append(Row(case, "gpuos", "tasks_served", "count", float(served), repeats=1))
        while time.monotonic() - begin < seconds and all(p.is_alive() for p in producers):
            time.sleep(0.05)
        stop.set()
        for producer in producers:
            producer.join(timeout=60)
        elapsed = time.monotonic() - begin
        rt.synchronize(60)
        for producer in producers:
            if producer.error is not None:
                raise producer.error
            if producer.is_alive():
                raise LostTask("a producer still waits: a task was lost")
        stats, tasks = rt.stats(), sum(producer.tasks for producer in producers)
        if stats.completed != tasks or stats.failed:
            raise LostTask(f"{tasks} tasks were submitted, {stats}")
        console.print(f"{tasks:,} tasks in {elapsed:.1f} s, each counted once in its array; {stats}")
        results.rows.append(Row("soak/tasks", "gpuos", "tasks", "count", float(tasks), repeats=1))
        results.rows.append(
            Row("soak/launches", "gpuos", "launches", "count", float(stats.launches), repeats=1)
        )
        results.rows.append(Row("soak/seconds", "gpuos", "time", "s", elapsed, repeats=1))
        results.write(json or results.default_path)


if __name__ == "__main__":
    typer.run(main)
