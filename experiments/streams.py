"""What does it cost when tasks and streams wait for each other? And a trace?

`python -m experiments.streams [--machine auto|cpu|cuda] [--quick]`

- `gemm_sandwich/<n>/bf16`: four tasks write a row of a matrix, a stream multiplies it, four tasks copy a row
  of the product away, again and again, and the host waits once at the end. Its parts alone: `.../gemm`, the
  products by themselves, and `.../tasks`, the tasks by themselves. Every row is compared. The goal is
  sandwich <= 1.2 x (gemm + tasks);
- `gemm_sandwich/<n>/bf16/host`: the same with the host waiting for each, for comparison;
- `stream_pair/nop`: one stream waits for a task that waits for the stream, as a chain: time of a pair.
  `.../parked` has 300 us of work in the stream before each, so that the executor parks meanwhile; its
  counterpart `.../sleep` is that work alone;
- `submit_wait/nop/crowded`: a round trip from Python while another stream is full of big products;
- `dependent/1024/f32` and `independent/1024/f32`: `gpuos` and `gpuos/traced` side by side: the goal is 15 %.

On the CPU machine there are no streams, and only the last are measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import gpuos_numba as gpuos

from .harness import Case, Results, System, measure
from .microbench import MachineChoice

TIMEOUT_S = 120.0
SLEEP_US = 300
PIECES = 4
ROUNDS, QUICK_ROUNDS = 10, 3


class Sandwich:
    """A product between two groups of tasks, `repeats` times."""

    def __init__(self, rt: gpuos.Runtime, n: int, repeats: int) -> None:
        import torch

        self.rt, self.torch, self.repeats = rt, torch, repeats
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.stream = torch.cuda.Stream()
        self.a, self.b = torch.zeros(n, n, **options), torch.eye(n, **options)
        self.c = torch.zeros(n, n, **options)
        # Whole numbers below 256 are bf16 numbers, and times the unit matrix they stay what they are.
        values = (torch.arange(repeats, device="cuda") * 7 % 251).to(torch.bfloat16)
        self.rows = values[:, None].expand(repeats, n).contiguous()
        self.seen = torch.zeros(repeats, n, **options)
        zero = torch.zeros(n, **options)
        step = n // PIECES

        def copy(source: Any, target: Any) -> gpuos.Batch:
            parts = [slice(i * step, (i + 1) * step) for i in range(PIECES)]
            return rt.batch("add", [((source[part], zero[part]), target[part]) for part in parts])

        self.before = [copy(self.rows[i], self.a[0]) for i in range(repeats)]
        self.after = [copy(self.c[0], self.seen[i]) for i in range(repeats)]
        torch.mm(self.a, self.b, out=self.c)  # loads the kernel
        torch.cuda.synchronize()

    def poison(self) -> None:
        self.rt.park(TIMEOUT_S)
        self.seen.fill_(float("nan"))
        self.a.zero_()
        self.torch.cuda.synchronize()

    def read(self) -> np.ndarray:
        return self.seen.float().cpu().numpy()

    @property
    def expected(self) -> np.ndarray:
        return self.rows.float().cpu().numpy()

    def sandwich(self) -> None:
        rt, stream = self.rt, self.stream
        with self.torch.cuda.stream(stream):
            for before, after in zip(self.before, self.after, strict=True):
                rt.submit_batch(before)
                rt.before_stream(stream)  # the copies of the last round too: they read what is overwritten
                self.torch.mm(self.a, self.b, out=self.c)
                rt.after_stream(stream)
                ticket = rt.submit_batch(after)
        ticket.wait(TIMEOUT_S)
        rt.synchronize(TIMEOUT_S)

    def host(self) -> None:
        rt = self.rt
        with self.torch.cuda.stream(self.stream):
            for before, after in zip(self.before, self.after, strict=True):
                rt.submit_batch(before).wait(TIMEOUT_S)
                self.torch.mm(self.a, self.b, out=self.c)
                self.stream.synchronize()
                rt.submit_batch(after).wait(TIMEOUT_S)

    def gemm(self) -> None:
        with self.torch.cuda.stream(self.stream):
            for _ in range(self.repeats):
                self.torch.mm(self.a, self.b, out=self.c)
        self.stream.synchronize()

    def tasks(self) -> None:
        for before, after in zip(self.before, self.after, strict=True):
            self.rt.submit_batch(before)
            self.rt.submit_batch(after)
        self.rt.synchronize(TIMEOUT_S)


class Bench:
    """Builds the cases for one Runtime."""

    def __init__(self, rt: gpuos.Runtime, quick: bool) -> None:
        self.rt, self.quick = rt, quick
        self.name = "gpuos" if rt.machine == "cuda" else "gpuos-cpu"

    def park(self) -> None:
        self.rt.park(TIMEOUT_S)

    def ours(self, run: Callable[[], Any], suffix: str = "", **settings: Any) -> System:
        return System(self.name + suffix, run, required=True, **settings)

    def sandwich(self) -> list[Case]:
        n, repeats = (2048, 50) if self.quick else (4096, 1000)
        work = Sandwich(self.rt, n, repeats)
        name, each = f"gemm_sandwich/{n}/bf16", {"metric": "time_per_iteration", "unit": "us"}
        checked = {"poison": work.poison, "read": work.read, "expected": work.expected}
        return [
            Case(name, [self.ours(work.sandwich, count=repeats)], **checked, **each),
            Case(f"{name}/host", [self.ours(work.host, count=repeats, every=3)], **checked, **each),
            Case(f"{name}/tasks", [self.ours(work.tasks, count=repeats)], **each),
            Case(
                f"{name}/gemm",
                [System("eager", work.gemm, count=repeats, before=self.park, required=True)],
                **each,
            ),
        ]

    def pair(self) -> list[Case]:
        import torch

        rt, stream, repeats = self.rt, torch.cuda.Stream(), 50 if self.quick else 200
        cycles = self._cycles_a_us(torch) * SLEEP_US

        def pairs(work: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                with torch.cuda.stream(stream):
                    for _ in range(repeats):
                        work()
                        rt.after_stream(stream)
                        rt.nop().block_stream(stream)
                stream.synchronize()

            return run

        def sleep() -> None:
            torch.cuda._sleep(cycles)

        def alone() -> None:
            with torch.cuda.stream(stream):
                for _ in range(repeats):
                    sleep()
            stream.synchronize()

        def host() -> None:
            for _ in range(repeats):
                stream.synchronize()
                rt.nop().wait(TIMEOUT_S)

        about = {"metric": "latency", "unit": "us"}
        return [
            Case("stream_pair/nop", [self.ours(pairs(lambda: None), count=repeats)], **about),
            Case("stream_pair/nop/host", [self.ours(host, count=repeats)], **about),
            Case("stream_pair/nop/parked", [self.ours(pairs(sleep), count=repeats)], **about),
            Case("stream_pair/nop/sleep", [System("eager", alone, count=repeats, required=True)], **about),
        ]

    def _cycles_a_us(self, torch: Any) -> int:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.park()
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        torch.cuda.synchronize()
        return int(20_000_000 / (begin.elapsed_time(end) * 1e3))

    def crowded(self) -> list[Case]:
        import torch

        rt, stream, n = self.rt, torch.cuda.Stream(), 8192
        self.park()
        a = torch.ones(n, n, device="cuda", dtype=torch.bfloat16)
        c = torch.mm(a, a)
        torch.cuda.synchronize()

        def run() -> None:
            rt.nop().wait(TIMEOUT_S)

        def busy() -> Iterable[float]:
            with torch.cuda.stream(stream):
                for _ in range(10 if self.quick else 30):
                    torch.mm(a, a, out=c)
            while not stream.query():
                time.sleep(1e-3)
                begin = time.perf_counter_ns()
                run()
                yield time.perf_counter_ns() - begin
                self.park()

        def quiet() -> Iterable[float]:
            for _ in range(10):
                self.park()
                time.sleep(1e-3)
                begin = time.perf_counter_ns()
                run()
                yield time.perf_counter_ns() - begin

        about = {"metric": "latency", "unit": "us"}
        return [
            Case("submit_wait/nop/crowded", [self.ours(run, sample=busy)], **about),
            Case("submit_wait/nop/quiet", [self.ours(run, sample=quiet)], **about),
        ]

    def traced(self) -> list[Case]:
        rt, n, count = self.rt, 1024, 500 if self.quick else 2000
        if rt.machine == "cuda":
            import torch

            x, b, *outs = torch.ones(102, n, device="cuda").unbind()
        else:
            x, b, *outs = np.ones((102, n), np.float32)
        chain = rt.batch("add", [((x, b), x)] * count)
        apart = rt.batch("add", [((x, b), outs[i % 100]) for i in range(count)])
        rt.park(TIMEOUT_S)

        def case(name: str, run: Callable[[], Any]) -> Case:
            def second() -> list[float]:
                run()  # a trace begins and ends with the executor parked: the first run launches it
                begin = time.perf_counter_ns()
                run()
                return [(time.perf_counter_ns() - begin) / count]

            def untraced() -> Iterable[float]:
                rt.park(TIMEOUT_S)
                return second()

            def traced() -> Iterable[float]:
                with tempfile.TemporaryDirectory() as folder, rt.trace(Path(folder, "trace.json")):
                    return second()

            plain = self.ours(run, count=count, sample=untraced)
            return Case(f"{name}/{n}/f32", [plain, self.ours(run, "/traced", count=count, sample=traced)])

        return [
            case("dependent", lambda: rt.submit_batch(chain, linked=True).wait(TIMEOUT_S)),
            case("independent", lambda: rt.submit_batch(apart).wait(TIMEOUT_S)),
        ]


def run(machine: str, quick: bool) -> Results:
    """Measure everything on one machine. Raises WrongResult where a row arrived wrong."""
    # Without an order of its own: what follows what is what is measured here.
    with gpuos.Runtime(machine=machine, input_order="none") as rt:
        bench = Bench(rt, quick)
        results = Results("streams-quick" if quick else "streams", rt.device_name, rt.machine)
        asked = [bench.sandwich, bench.pair, bench.crowded] if rt.machine == "cuda" else []
        for ask in [*asked, bench.traced]:
            results.rows += measure(ask(), QUICK_ROUNDS if quick else ROUNDS)
            rt.synchronize(TIMEOUT_S)
    return results


def goals(results: Results) -> list[str]:
    """What was asked for, and what came out."""
    ours = results.rows[0].system
    found = []
    for row in results.rows:
        parts = [r for r in results.rows if r.case in (f"{row.case}/gemm", f"{row.case}/tasks")]
        if row.case.startswith("gemm_sandwich") and len(parts) == 2:
            alone = sum(part.median or 0.0 for part in parts)
            found.append(f"{row.case}: {(row.median or 0.0) / alone:.3f} x (gemm + tasks); goal 1.2")
        if row.system.endswith("/traced"):
            ratio = results.ratio(row.case, row.system, row.system.removesuffix("/traced"))
            found.append(f"{row.case}: traced takes {ratio:.3f} x untraced; goal 1.15")
    assert ours.startswith("gpuos")
    return found


def main(
    machine: Annotated[MachineChoice, typer.Option(help="auto: a GPU if there is one.")] = MachineChoice.auto,
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats: does it work?")] = False,
    json: Annotated[Path | None, typer.Option(help="Results; default experiments/results/local/.")] = None,
) -> None:
    """Time tasks and streams that wait for each other, and what a trace costs."""
    console = Console(width=None if Console().is_terminal else 160)
    results = run(machine, quick)
    json = json or results.default_path
    results.write(json)
    table = Table(title=f"{results.device}, {results.machine}", caption=f"commit {results.commit}")
    for column in ("case", "system", "median", "p10", "p90"):
        table.add_column(column)
    for row in results.rows:
        values = [f"{value:.4g} {row.unit}" if value is not None else "failed" for value in _spread(row)]
        table.add_row(row.case, row.system, *values)
    console.print(table)
    for line in goals(results):
        console.print(line, markup=False)
    console.print(f"Results in {json}", markup=False)


def _spread(row: Any) -> tuple[float | None, float | None, float | None]:
    return row.median, row.p10, row.p90


if __name__ == "__main__":
    typer.run(main)
