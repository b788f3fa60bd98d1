"""What does one small operation cost? `python -m experiments.microbench [--machine auto|cpu|cuda] [--quick]`

Adds of f32 arrays, by gpuos and by everything else that is installed, in the same rounds:

- `independent/<n>`: many adds on distinct arrays, as one batch known to be independent; `gpuos/ordered` finds
  that out within the time;
- `dependent/<n>`: a chain of 1,000, `x = x + b`;
- `variable/<n>`: like independent, but each call in a row has another size: n, n - 1, n - 2, ...; its
  counterpart `variable/<n>/f32/stable` has as many calls of size n. `gpuos` submits a batch prepared
  before, `gpuos/prepare` prepares it within the time;
- `one_at_a_time`: `rt.add(a, b, out=o)` from Python, back to back, then one wait;
- `submit_wait`: one add and the wait for it, from Python;
- `round_trip`: the same without Python: submit to completion seen by the host;
- `relaunch/nop`: from the submit to a parked executor to the completion, from Python.

Before each sample of a competitor the executor is parked, so that it has the machine to itself; each
sample of any system follows an untimed run of the same work. The arrays of a size fit into the L2 cache
of a data centre GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import gpuos_numba as gpuos

from .baselines import COMPETITORS, OUTPUTS, Call, DeviceSlab, HostSlab, Run, expected, views
from .harness import Case, Results, Row, System, baseline, measure
from .lab import MachineChoice
from .present import amount, times

SIZES, QUICK_SIZES = (64, 256, 1024, 4096, 16384, 65536), (1024, 16384)
ROUNDS, QUICK_ROUNDS = 30, 5
CALLS = 1000  # in a chain, a graph, or one run of a baseline
BATCH = 8192  # tasks in one run of gpuos
ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}  # in one run of anybody, so fewer calls when they are big
POOL, POOL_BYTES = 500, 24 << 20  # distinct calls, fewer when they are big
EVERY = {"numba": 5, "graph/recapture": 5}  # tens of milliseconds a run: in each fifth round
TIMEOUT_S = 60.0
SWEPT = ("independent", "dependent", "variable")


@dataclass(slots=True)
class Work:
    """Memory, the calls to perform on it, and what they must give."""

    host: np.ndarray
    slab: HostSlab | DeviceSlab
    calls: list[Call]
    elements: int

    def repeated(self, count: int) -> list[Call]:
        """The calls again and again, about `count` in all, or as many as `elements` allows."""
        count = min(count, self.elements // self.host.shape[-1])
        return self.calls * max(1, count // len(self.calls))

    def case(self, name: str, systems: list[System], metric: str = "time_per_op") -> Case:
        want = expected(self.host, self.calls, gpuos.operators()["add"].spec)
        return Case(name, systems, lambda: self.slab.write(self.host), self.slab.read, want, metric=metric)


class Bench:
    """Builds the cases for one Runtime: what is computed, who computes it, and the questions."""

    def __init__(self, rt: gpuos.Runtime) -> None:
        self.rt = rt
        self.name = "gpuos" if rt.machine == "cuda" else "gpuos-cpu"
        self.random = np.random.default_rng(2604)

    def park(self) -> None:
        self.rt.park(TIMEOUT_S)

    # What is computed

    def work(self, rows: int, n: int, calls: list[Call]) -> Work:
        host = np.full((3, rows, n), np.nan, np.float32)
        host[:OUTPUTS] = self.random.standard_normal((OUTPUTS, rows, n), np.float32)
        slab = DeviceSlab(host) if self.rt.machine == "cuda" else HostSlab(host)
        return Work(host, slab, calls, ELEMENTS[self.rt.machine])

    def pool(self, n: int, rows: int = POOL, shrink: int = 0) -> Work:
        """Independent calls on distinct arrays, each `shrink` elements shorter than the one before."""
        rows = min(rows, POOL_BYTES // (12 * n))
        return self.work(rows, n, [((0, i), (1, i), (2, i), n - shrink * i) for i in range(rows)])

    def chain(self, n: int) -> Work:
        """x = x0 + b, then x = x + b and so on: it starts anew, and can be repeated."""
        x, addend = (OUTPUTS, 0), (1, 0)
        return self.work(1, n, [((0, 0), addend, x, n)] + [(x, addend, x, n)] * (CALLS - 1))

    # Who computes it

    def ours(self, run: Callable[[], Any], suffix: str = "", **settings: Any) -> System:
        return System(self.name + suffix, run, required=True, **settings)

    def tasks(self, work: Work, calls: Sequence[Call]) -> list[Any]:
        return [((x, y), out) for x, y, out in views(work.slab.array, calls)]

    def submitted(
        self,
        work: Work,
        calls: Sequence[Call],
        suffix: str = "",
        *,
        linked: bool = False,
        ordered: bool = False,
    ) -> System:
        """A batch prepared before."""
        batch, submit = self.rt.batch("add", self.tasks(work, calls)), self.rt.submit_batch
        return self.ours(
            lambda: submit(batch, linked=linked, ordered=ordered).wait(TIMEOUT_S), suffix, count=len(batch)
        )

    def prepared(self, work: Work, calls: Sequence[Call]) -> System:
        """A batch prepared within the time."""
        tasks = self.tasks(work, calls)

        def run() -> None:
            self.rt.submit_batch(self.rt.batch("add", tasks)).wait(TIMEOUT_S)

        return self.ours(run, "/prepare", count=len(tasks))

    def others(
        self, work: Work, calls: Sequence[Call], leave_out: Sequence[str] = (), times: int = 1
    ) -> list[System]:
        """This machine's competitors; one run performs the calls `times` times."""
        self.park()  # the first use of a kernel, and graph capture, wait until the executor has left

        def system(name: str, bind: Callable[..., Run]) -> System:
            settings = {"count": len(calls) * times, "before": self.park, "every": EVERY.get(name, 1)}
            return baseline(name, lambda: again(bind(work.slab, calls), times), **settings)

        return [system(*item) for item in COMPETITORS[self.rt.machine].items() if item[0] not in leave_out]

    # The questions: each answers with cases that share their rounds

    def independent(self, n: int) -> list[Case]:
        work = self.pool(n)
        calls = work.repeated(BATCH)
        ours = [self.submitted(work, calls), self.submitted(work, calls, "/ordered", ordered=True)]
        return [work.case(f"independent/{n}/f32", [*ours, *self.others(work, work.repeated(CALLS))])]

    def dependent(self, n: int) -> list[Case]:
        work = self.chain(n)
        ours = self.submitted(work, work.calls, linked=True)
        return [work.case(f"dependent/{n}/f32", [ours, *self.others(work, work.calls, ["graph/branches"])])]

    def variable(self, n: int) -> list[Case]:
        def case(variant: str, shrink: int, leave_out: Sequence[str]) -> Case:
            work = self.pool(n, min(POOL // 2, n // 2), shrink)
            calls = work.repeated(CALLS)
            ours = self.submitted(work, work.repeated(BATCH))
            systems = [ours, self.prepared(work, calls), *self.others(work, calls, leave_out)]
            return work.case(f"variable/{n}/f32{variant}", systems)

        # A graph is captured for its shapes: for new ones its user can only capture again.
        stable = case("/stable", 0, ["numba", "graph/branches"])
        return [case("", 1, ["numba", "graph", "graph/branches"]), stable]

    def one_at_a_time(self, n: int) -> list[Case]:
        work = self.pool(n)
        calls = work.repeated(CALLS)
        arrays, add = views(work.slab.array, calls), self.rt.add

        def run() -> None:
            for x, y, out in arrays:
                add(x, y, out=out)
            self.rt.synchronize(TIMEOUT_S)

        others = self.others(work, calls, ["graph", "graph/branches", "graph/recapture"])
        return [work.case(f"one_at_a_time/{n}/f32", [self.ours(run, count=len(calls)), *others])]

    def submit_wait(self, n: int) -> list[Case]:
        work = self.pool(n, rows=1)
        ((x, y, out),) = views(work.slab.array, work.calls)
        ours = self.ours(again(lambda: self.rt.add(x, y, out=out).wait(TIMEOUT_S), 100), count=100)
        others = self.others(work, work.calls, ["graph/branches", "graph/recapture"], times=100)
        return [work.case(f"submit_wait/{n}/f32", [ours, *others], "latency")]

    def round_trip(self, n: int) -> list[Case]:
        work = self.pool(n, rows=1)
        batch = self.rt.batch("add", self.tasks(work, work.calls))
        measure_ns = self.rt.round_trip_ns
        ours = self.ours(lambda: measure_ns(batch, 1), sample=lambda: measure_ns(batch, 200))
        return [work.case(f"round_trip/{n}/f32", [ours], "latency")]

    def relaunch(self) -> list[Case]:
        def run() -> None:
            self.rt.nop().wait(TIMEOUT_S)

        def sample() -> Iterable[float]:
            for _ in range(10):
                self.park()
                begin = time.perf_counter_ns()
                run()
                yield time.perf_counter_ns() - begin

        return [Case("relaunch/nop", [self.ours(run, sample=sample)], metric="latency")]

    def questions(self, sizes: Sequence[int]) -> list[tuple[str, Callable[[], list[Case]]]]:
        """All of them, by name."""
        asked: list[tuple[Callable[[int], list[Case]], int]] = [
            (ask, n) for ask in (self.independent, self.dependent, self.variable) for n in sizes
        ]
        asked += [(self.one_at_a_time, 1024), (self.submit_wait, 1024), (self.round_trip, 1024)]
        return [(f"{ask.__name__} {n}", lambda ask=ask, n=n: ask(n)) for ask, n in asked] + [
            ("relaunch", self.relaunch)
        ]


def again(run: Callable[[], Any], times: int) -> Run:
    """`run`, `times` times."""

    def repeated() -> None:
        for _ in range(times):
            run()

    return run if times == 1 else repeated


def run(machine: str, quick: bool, console: Console) -> Results:
    """Measure everything on one machine.

    Raises:
        WrongResult: some system computed something else than the NumPy spec.
    """
    sizes, rounds = (QUICK_SIZES, QUICK_ROUNDS) if quick else (SIZES, ROUNDS)
    columns = TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("start the executor", total=None)
        with gpuos.Runtime(machine=machine) as rt:
            results = Results("microbench-quick" if quick else "microbench", rt.device_name, rt.machine)
            questions = Bench(rt).questions(sizes)
            progress.update(bar, total=len(questions) * rounds)
            with results.kept():
                for name, ask in questions:
                    progress.update(bar, description=name)
                    results.rows += measure(ask(), rounds, lambda: progress.advance(bar))
                    rt.synchronize(TIMEOUT_S)  # raises if any task failed
    return results


# What was found


def table(results: Results) -> Table:
    """A line per case: every system's median, and how many times longer than gpuos the others take."""
    ours = results.rows[0].system
    systems = list(dict.fromkeys(row.system for row in results.rows))
    # Ratios are to be read as "gpuos is so many times faster"; for new shapes a graph is captured again.
    against = {f"{name} / {ours}": [name] for name in ("numpy", "eager") if name in systems}
    if "graph" in systems:
        against[f"graph / {ours}"] = ["graph", "graph/recapture"]
    made = Table(title=f"{results.device}, {results.machine}: medians", caption=f"commit {results.commit}")
    made.add_column("case", no_wrap=True)
    for heading in (*systems, *against, "strongest other"):
        made.add_column(heading, justify="right", no_wrap=True)
    for case in dict.fromkeys(row.case for row in results.rows):
        rows = {row.system: row for row in results.rows if row.case == case}
        cells = [amount(rows.get(system)) for system in systems]
        for names in against.values():
            cells.append(times(results, case, next((name for name in names if name in rows), None), ours))
        rivals = {r.median: name for name, r in rows.items() if r.median and not name.startswith("gpuos")}
        best = rivals[min(rivals)] if rivals else None
        cells.append(f"{best} {times(results, case, best, ours)}" if best else "")
        made.add_row(case, *cells)
    return made


def new_shapes(results: Results) -> str:
    """What it costs that every call has another shape."""
    ours = results.rows[0].system
    stable = [row.case for row in results.rows if row.system == ours and row.case.endswith("/stable")]
    ratios = [(case, results.ratio(case.removesuffix("/stable"), ours, ours, case)) for case in stable]
    text = ", ".join(f"{ratio:.2f} ({case.split('/')[1]})" for case, ratio in ratios)
    return f"{ours}, time with new shapes / with stable shapes: {text}"


def plot(results: Results, path: Path) -> None:
    """Time per operation over size, a panel a workload, the band from p10 to p90; latencies beside."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(22, 5.5), layout="constrained")
    measured = [row for row in results.rows if row.median is not None]
    systems = list(dict.fromkeys(row.system for row in measured))
    for panel, workload in zip(panels, SWEPT, strict=False):
        lines: dict[str, list[tuple[int, Row]]] = {}
        for row in measured:
            if row.case.startswith(f"{workload}/"):
                _, size, _, *variant = row.case.split("/")
                lines.setdefault(" ".join([row.system, *variant]), []).append((int(size), row))
        for label, points in lines.items():
            sizes, rows = zip(*points, strict=True)
            color = f"C{systems.index(rows[0].system)}"
            style = {"linewidth": 2.5 if label.startswith("gpuos") else 1.2, "marker": "o", "markersize": 3}
            style["linestyle"] = "--" if label.endswith("stable") else "-"
            panel.plot(sizes, [row.median for row in rows], label=label, color=color, **style)
            band = [row.p10 for row in rows], [row.p90 for row in rows]
            panel.fill_between(sizes, *band, color=color, alpha=0.12)
        panel.set(title=workload, xscale="log", yscale="log", xlabel="f32 elements", ylabel="ns per add")
        panel.legend(fontsize="small")
    singles = [row for row in measured if row.case.split("/")[0] not in SWEPT]
    labels = [f"{row.case.split('/')[0]}: {row.system}" for row in singles]
    spread = [[row.median - row.p10 for row in singles], [row.p90 - row.median for row in singles]]
    colors = [f"C{systems.index(row.system)}" for row in singles]
    panels[3].barh(labels, [row.median for row in singles], xerr=spread, color=colors)
    panels[3].invert_yaxis()
    panels[3].set(title="one at a time, 1,024 f32", xscale="log", xlabel="ns")
    figure.suptitle(f"{results.device}, commit {results.commit[:12]}, {results.when}; medians, p10 to p90")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    machine: Annotated[MachineChoice, typer.Option(help="auto: a GPU if there is one.")] = MachineChoice.auto,
    quick: Annotated[bool, typer.Option("--quick", help="Two sizes, few repeats: does it work?")] = False,
    json: Annotated[Path | None, typer.Option(help="Results; default experiments/results/local/.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="PNG; default beside the JSON.")] = None,
) -> None:
    """Time small operations by gpuos and by its competitors, verified against NumPy, in the same rounds."""
    # A file or a pipe has no width of its own: take what the table needs.
    console = Console(width=None if Console().is_terminal else 220)
    results = run(machine, quick, console)
    json = json or results.default_path
    results.write(json)
    plot(results, plot_path or json.with_suffix(".png"))
    console.print(table(results))
    console.print(new_shapes(results))
    for row in results.rows:
        if row.why:
            console.print(f"{row.case}: {row.system} could not run: {row.why}", markup=False)
    console.print(f"Results in {json}, plot in {plot_path or json.with_suffix('.png')}", markup=False)


if __name__ == "__main__":
    typer.run(main)
