"""What does it cost that the order of tasks is found, not given? `python -m experiments.ordering [--quick]`

- `chain100/2048/f32`: 100 operations in a row, time per operation;
- `chains/1000x5/64/f32`: 1,000 chains of five that do not depend on each other, time per operation;
- `mixed_in_flight`, `mixed_dependent`, `.../new_shapes`: as in mixed_pipeline, by `/auto` among others;
- `tracking/<case>`: host time of finding the order alone, per task of a batch of 4,096.

gpuos submits unlinked batches in program order and finds runs and waits itself.

`--equivalence N` runs N random programs instead and compares them with NumPy; `--stress N` submits N tasks
whose temporaries are dropped at once and counts wrong results. Both exit with 1 if anything is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

import gpuos_numba as gpuos
from gpuos_numba.host.order import ACCESS, DEPS, Tracker, compiled_trace

from . import mixed_pipeline
from .baselines import cuda_torch
from .equivalence import check
from .harness import Case, Results, Row
from .lab import TIMEOUT_S, Lab, MachineChoice, Question, command
from .present import bars

N, LENGTH = 2048, 100
CHAINS, LINKS, SHORT = 1000, 5, 64
TRACKED = 4096


def chain100(lab: Lab) -> Case:
    """x = x + b, a hundred times, from a fresh x."""
    host = np.zeros((2, N), np.float32)
    host[1] = np.arange(N) % 7
    slab = lab.device(host)
    x, b = slab[0], slab[1]
    rt = lab.rt
    chain = rt.batch("add", [((x, b), x)] * LENGTH)
    fresh = rt.batch("fill", [((), x)], value=0.0)
    whole = gpuos.Batch.concatenate([fresh, chain])
    systems = [
        lab.ours(lambda: rt.submit_batch(whole).wait(TIMEOUT_S), count=LENGTH),
        lab.ours(lambda: rt.submit_batch(whole, linked=True).wait(TIMEOUT_S), "/linked", count=LENGTH),
    ]

    def one_by_one() -> None:
        rt.fill(out=x, value=0.0)
        for _ in range(LENGTH):
            rt.add(x, b, out=x)
        rt.synchronize(TIMEOUT_S)

    systems.append(lab.ours(one_by_one, "/one_by_one", count=LENGTH))
    if lab.cuda:

        def perform() -> None:
            torch = cuda_torch()
            x.zero_()
            for _ in range(LENGTH):
                torch.add(x, b, out=x)

        systems += _torch(lab, perform, LENGTH)
        systems += [
            lab.other(name, lambda mode=mode: _compiled_chain(x, b, mode), count=LENGTH)
            for name, mode in (("compile", "default"), ("compile/reduce-overhead", "reduce-overhead"))
        ]
    else:

        def numpy() -> None:
            x[...] = 0
            for _ in range(LENGTH):
                np.add(x, b, out=x)

        systems.append(lab.other("numpy", lambda: numpy, count=LENGTH))
    return Case(
        f"chain100/{N}/f32",
        systems,
        lambda: lab.fill(x, np.nan) if lab.cuda else lab.fill(x, 3.0),
        lambda: lab.host(x),
        host[1] * LENGTH,
    )


def _compiled_chain(x: Any, b: Any, mode: str) -> Callable[[], None]:
    """One fused kernel for all: what a compiler makes of a chain that it sees whole."""
    torch = cuda_torch()

    def step(b: Any) -> Any:
        y = torch.zeros_like(b)
        for _ in range(LENGTH):
            y = y + b
        return y

    fused = torch.compile(step, mode=mode)

    def run() -> None:
        x.copy_(fused(b))
        torch.cuda.current_stream().synchronize()

    for _ in range(3):
        run()
    return run


def chains(lab: Lab) -> Case:
    """Chain by chain, as a program would submit them."""
    count = 100 if lab.quick else CHAINS
    host = np.zeros((2, count, SHORT), np.float32)
    host[0] = np.arange(count)[:, None]
    slab = lab.device(host)
    rt = lab.rt
    rows = [(slab[0, i], slab[1, i]) for i in range(count)]
    start = rt.batch("add", [((x, 1.0), y) for x, y in rows])
    links = rt.batch("add", [((y, 1.0), y) for _, y in rows])
    whole = gpuos.Batch.concatenate(
        [part[i : i + 1] for i in range(count) for part in (start, *[links] * (LINKS - 1))]
    )
    mixed = gpuos.Batch.concatenate([start, *[links] * (LINKS - 1)])
    total = count * LINKS
    systems = [
        lab.ours(lambda: rt.submit_batch(whole).wait(TIMEOUT_S), count=total),
        lab.ours(lambda: rt.submit_batch(mixed).wait(TIMEOUT_S), "/interleaved", count=total),
    ]
    if lab.cuda:

        def perform() -> None:
            torch = cuda_torch()
            for x, y in rows:
                torch.add(x, 1.0, out=y)
                for _ in range(LINKS - 1):
                    torch.add(y, 1.0, out=y)

        systems += _torch(lab, perform, total)
    else:

        def numpy() -> None:
            for x, y in rows:
                np.add(x, np.float32(1), out=y)
                for _ in range(LINKS - 1):
                    np.add(y, np.float32(1), out=y)

        systems.append(lab.other("numpy", lambda: numpy, count=total))
    return Case(
        f"chains/{count}x{LINKS}/{SHORT}/f32",
        systems,
        lambda: lab.fill(slab[1], np.nan),
        lambda: lab.host(slab[1]),
        host[0] + LINKS,
    )


def _torch(lab: Lab, perform: Callable[[], None], count: int) -> list[Any]:
    """Eager PyTorch, a graph of it, and a graph captured within the time."""

    def synchronize() -> None:
        cuda_torch().cuda.current_stream().synchronize()

    def eager() -> Callable[[], None]:
        def run() -> None:
            perform()
            synchronize()

        return run

    def capture() -> Any:
        torch = cuda_torch()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            perform()
            graph.capture_end()
        return graph

    def replay() -> Callable[[], None]:
        perform()
        synchronize()
        graph = capture()

        def run() -> None:
            graph.replay()
            synchronize()

        return run

    def recapture() -> Callable[[], None]:
        def run() -> None:
            capture().replay()
            synchronize()

        return run

    return [
        lab.other("eager", eager, count=count),
        lab.other("graph", replay, count=count),
        lab.other("graph/recapture", recapture, count=count, every=5),
    ]


def tracking(lab: Lab) -> list[Case]:
    """Three operands of 8 KB a task."""
    random = np.random.default_rng(1)

    def row(number: Any) -> Any:
        return (1 << 40) + 8192 * np.asarray(number, np.uint64)

    numbers = np.arange(TRACKED)
    patterns = {
        "same_buffers": np.stack([numbers * 0 + 1, numbers * 0, numbers * 0 + 1], 1),
        "independent": np.stack([3 * numbers, 3 * numbers + 1, 3 * numbers + 2], 1),
        "chains_of_5": np.stack(
            [7 * (numbers // 5) + numbers % 5 + 1, 7 * (numbers // 5) + numbers % 5, 7 * (numbers // 5) + 6],
            1,
        ),
        "random_of_500": random.integers(0, 500, (TRACKED, 3)),
    }
    cases = []
    for name, rows in patterns.items():
        accesses = np.zeros(TRACKED, ACCESS)
        accesses["writes"], accesses["count"] = 1, 3
        accesses["ranges"][:, :3, 0], accesses["ranges"][:, :3, 1] = row(rows), row(rows + 1)
        tracker, found = Tracker(TRACKED), np.zeros((TRACKED, DEPS + 4), np.uint64)
        trace = compiled_trace()

        def run(accesses: Any = accesses, tracker: Any = tracker, found: Any = found) -> None:
            trace(tracker.address, accesses.ctypes.data, TRACKED, found.ctypes.data, found.strides[0])

        cases.append(Case(f"tracking/{name}", [lab.ours(run, count=TRACKED)]))
    return cases


def questions(lab: Lab) -> list[Question]:
    return [
        ("tracking", lambda: tracking(lab)),
        ("a chain of 100", lambda: [chain100(lab)]),
        ("a thousand chains", lambda: [chains(lab)]),
        *mixed_pipeline.questions(lab),
    ]


def draw(results: Results, figure: Any) -> None:
    figure.set_size_inches(20, 8)
    names = list(dict.fromkeys(row.case for row in results.rows if not row.case.startswith("tracking")))
    panels = np.atleast_1d(figure.subplots(1, len(names)))
    for panel, name in zip(panels, names, strict=True):
        rows: list[Row] = [row for row in results.rows if row.case == name]
        bars(panel, rows, name)


def stress(rt: gpuos.Runtime, tasks: int) -> int:
    """Chains of temporaries, each dropped as soon as it was passed on; how many elements came out wrong.

    Allocators hand the memory of a dropped array to the next: only if it stays alive until its last task has
    completed is what a later task reads what an earlier one wrote.
    """
    if rt.machine == "cuda":
        torch = cuda_torch()

        def make(value: float, size: int) -> Any:
            return torch.full((size,), value, dtype=torch.float32, device="cuda")

        def read(array: Any) -> np.ndarray:
            return array.cpu().numpy()  # type: ignore[no-any-return]

    else:

        def make(value: float, size: int) -> Any:
            return np.full(size, value, np.float32)

        read = np.asarray
    one, wrong, left = {size: make(1.0, size) for size in (256, 1000, 2048)}, 0, tasks
    kept: list[tuple[Any, float]] = []
    while left > 0:
        for ones in one.values():
            x = ones
            for _ in range(10):
                x = rt.add(x, ones)._out  # the ticket, and what it was made of, is dropped here
                left -= 1
            kept.append((x, 11.0))
        if len(kept) >= 300:
            rt.synchronize(TIMEOUT_S)
            wrong += sum(int(np.count_nonzero(read(array) != value)) for array, value in kept)
            kept.clear()
    rt.synchronize(TIMEOUT_S)
    return wrong + sum(int(np.count_nonzero(read(array) != value)) for array, value in kept)


measure = command("ordering", questions, draw)


def main(
    machine: Annotated[MachineChoice, typer.Option(help="auto: a GPU if there is one.")] = MachineChoice.auto,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and repeats: does it work?")] = False,
    json: Annotated[Path | None, typer.Option(help="Results; default experiments/results/local/.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG; default beside the JSON.")] = None,
    equivalence: Annotated[int, typer.Option(help="Run so many random programs instead.")] = 0,
    first_seed: Annotated[int, typer.Option(help="Seed of the first of them.")] = 0,
    tasks: Annotated[int, typer.Option("--stress", help="Submit so many tasks on temporaries instead.")] = 0,
) -> None:
    """Measure, or look for wrong results."""
    if not equivalence and not tasks:
        measure(machine, quick, json, plot)
        return
    console, wrong, begin = Console(), 0, time.monotonic()
    with gpuos.Runtime(machine=machine) as rt:
        if equivalence:
            seeds = range(first_seed, first_seed + equivalence)
            for start in track(range(0, len(seeds), 100), "random programs", console=console):
                for line in check(rt, seeds[start : start + 100]):
                    console.print(line, markup=False)
                    wrong += 1
            console.print(f"{equivalence} random programs on {rt.device_name}: {wrong} differ")
        if tasks:
            found = stress(rt, tasks)
            wrong += found
            console.print(f"{tasks} tasks on temporaries on {rt.device_name}: {found} wrong elements")
    console.print(f"{time.monotonic() - begin:.0f} s")
    raise typer.Exit(int(wrong > 0))


if __name__ == "__main__":
    typer.run(main)
