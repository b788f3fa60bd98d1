"""Do producers get in each other's way? `python -m experiments.contention [--quick]`

1 to 128 threads submit adds of 256 f32 elements, each on arrays of its own, in bursts that fit into the ring:
so no producer waits for room, and a time is that of submitting alone.

- `contention/<threads>`, `throughput`: submissions a second of all threads together;
- `submit_p50`, `submit_p99`: ns of one submission, the clock's two readings (about 40 ns) included.

By gpuos from producers in machine code (without the GIL; from Python `/python`), and by eager PyTorch or
NumPy calls from as many Python threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import typer

from .baselines import cuda_torch
from .harness import Results, Row, WrongResult, reason
from .lab import TIMEOUT_S, Lab, Question, command
from .present import sweep
from .producers import Producer, run_together

THREADS = (1, 2, 4, 8, 16, 32, 64, 128)
CAPACITY = 1 << 16
TASKS, PYTHON_TASKS = 1 << 14, 1 << 12  # of all threads, in a burst
ROUNDS, QUICK_ROUNDS = 9, 3
N = 256
Work = Callable[[np.ndarray, np.ndarray], None]


class Producers:
    """So many threads' arrays, and everybody's way to add them."""

    def __init__(self, lab: Lab, threads: int) -> None:
        self.lab, self.threads = lab, threads
        host = np.random.default_rng(threads).standard_normal((3, threads, N)).astype(np.float32)
        self.expected = host[0] + host[1]
        self.slab = lab.device(host)
        self.arrays = [tuple(self.slab[plane, row] for plane in range(3)) for row in range(threads)]
        rt = lab.rt
        self.batches = [rt.batch("add", [((a, b), out)]) for a, b, out in self.arrays]

    def native(self) -> tuple[list[Work], int]:
        count = TASKS // self.threads
        return [Producer(self.lab.rt, batch, count) for batch in self.batches], count

    def python(self, add: Callable[..., Any]) -> tuple[list[Work], int]:
        count, now = PYTHON_TASKS // self.threads, time.perf_counter_ns

        def work(a: Any, b: Any, out: Any) -> Work:
            def run(gate: np.ndarray, times: np.ndarray) -> None:
                while not gate[0]:
                    time.sleep(0)
                for i in range(count):
                    begin = now()
                    add(a, b, out=out)
                    times[i] = begin, now()

            return run

        return [work(*arrays) for arrays in self.arrays], count

    def sample(
        self, works: list[Work], count: int, begin: Callable[[], Any], finish: Callable[[], Any]
    ) -> tuple[float, float, float]:
        """(submissions a second, p50 ns, p99 ns) of a burst whose results were right."""
        self.lab.park()  # to fill an array may wait for an executor that is about to leave
        self.lab.fill(self.slab[2], np.nan)
        begin()
        times = run_together(works, [count] * len(works)).astype(np.int64)
        finish()
        if not np.array_equal(self.lab.host(self.slab[2]), self.expected):
            raise WrongResult(f"contention/{self.threads}: an array does not hold its sum")
        p50, p99 = np.percentile(times[:, 1] - times[:, 0], (50, 99))
        return len(times) / (times.max() - times.min()) * 1e9, float(p50), float(p99)


def rows(lab: Lab, threads: int) -> list[Row]:
    """All systems with so many threads, taking turns."""
    p, rt = Producers(lab, threads), lab.rt
    done: Callable[[], Any] = lambda: rt.synchronize(TIMEOUT_S)  # noqa: E731
    native, count = p.native()
    systems: dict[str, tuple[list[Work], int, Callable[[], Any]]] = {
        lab.name: (native, count, done),
        f"{lab.name}/python": (*p.python(rt.add), done),
    }
    why: dict[str, str] = {}
    if lab.cuda:
        try:
            torch = cuda_torch()
            systems["eager"] = (*p.python(torch.add), torch.cuda.synchronize)
        except Exception as error:  # as in harness.baseline
            why["eager"] = reason(error)
    else:
        systems["numpy"] = (*p.python(np.add), lambda: None)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in [*systems, *why]}
    for number in range(1 + (QUICK_ROUNDS if lab.quick else ROUNDS)):
        for name, (works, each, finish) in systems.items():
            # gpuos is serving, whatever the competitor needed; a competitor has the machine to itself.
            begin = (lambda: rt.nop().wait(TIMEOUT_S)) if name.startswith("gpuos") else lab.park
            taken = p.sample(works, each, begin, finish)
            if number:  # the first warms up
                found[name].append(taken)
    metrics = (("throughput", "1/s"), ("submit_p50", "ns"), ("submit_p99", "ns"))
    made = []
    for index, (metric, unit) in enumerate(metrics):
        for name, samples in found.items():
            row = Row(f"contention/{threads}", name, metric, unit, why=why.get(name, ""))
            made.append(row.summarize([sample[index] for sample in samples]))
    return made


def questions(lab: Lab) -> list[Question]:
    numbers = (1, 16) if lab.quick else THREADS
    return [(f"{n} threads", lambda n=n: rows(lab, n)) for n in numbers]  # type: ignore[misc]


def draw(results: Results, figure: Any) -> None:
    figure.set_size_inches(15, 5)
    metrics = ("throughput", "submit_p50", "submit_p99")
    for panel, metric in zip(figure.subplots(1, 3), metrics, strict=True):
        found = [row for row in results.rows if row.metric == metric]
        sweep(panel, found, lambda row: int(row.case.split("/")[1]), metric, "threads")


main = command("contention", questions, draw, capacity=CAPACITY, idle_s=0.1)

if __name__ == "__main__":
    typer.run(main)
