"""What does injection cost, and what do 1,000 swaps lose? `python -m experiments.injection [--quick]`

The largest pause is what a producer without the GIL sees: it submits one task after another and remembers the
longest time between two completions. `pause_none` is the same while nothing is injected: the noise. Every
expression holds a number of its own, so that nothing is in the cache that was not put there on purpose.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.host import ring

from .harness import Case, Results, Row, System, measure

console = Console()
_numbers = iter(range(1, 1 << 30))


def fresh() -> str:
    """An expression that nobody compiled before."""
    return f"x / ({next(_numbers)} + exp(-x))"


def row(case: str, system: str, metric: str, unit: str, samples: list[float]) -> Row:
    p10, median, p90 = (float(f"{each:.5g}") for each in np.percentile(samples, (10, 50, 90)))
    console.print(f"{case}: {median} {unit} (p10 {p10}, p90 {p90}, largest {max(samples):.5g})")
    return Row(case, system, metric, unit, median, p10, p90, len(samples))


def timed_ms(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


class Watcher:
    """A producer without the GIL: the longest time between two completions, and how many there were."""

    def __init__(self, rt: gpuos.Runtime) -> None:
        from numba import njit, types

        from gpuos_numba.machines import cpu_memory

        m: Any = cpu_memory
        u64 = m.u64
        submit, wait_range, now_ns = ring.make_submit(m), ring.make_wait_range(m), m.now_ns
        load, store = m.load_relaxed_sys, m.store_relaxed_sys
        ZERO, ONE, EIGHT, SIXTEEN, DONE = u64(0), u64(1), u64(8), u64(16), u64(ring.DONE)
        SLICE = u64(10_000_000)

        def watch(host: Any, task: Any, ranges: Any, words: Any) -> None:
            last = now_ns()
            while load(words) == ZERO:
                sent, _, _ = submit(host, task, ONE, ZERO, ZERO, ZERO, ZERO, now_ns() + SLICE, ranges, ONE)
                if sent == ZERO:
                    continue
                position = load(ranges)
                answer = ZERO
                while answer != DONE:
                    answer, _ = wait_range(host, position, position + ONE, now_ns() + SLICE)
                now = now_ns()
                if now - last > load(words + EIGHT):
                    store(words + EIGHT, now - last)
                store(words + SIXTEEN, load(words + SIXTEEN) + ONE)
                last = now

        self._watch = njit(types.void(*[types.uint64] * 4), nogil=True)(watch)
        x = testing.to_device(rt, np.ones(256, np.float32))
        out = testing.to_device(rt, np.zeros(256, np.float32))
        self._rt, self._batch = rt, rt.batch("add", [((x, x), out)])
        self.words = np.zeros(3, np.uint64)  # stop, largest gap, completions
        self._ranges = np.zeros((4, 2), np.uint64)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.words[:] = 0
        self._rt.submit_batch(self._batch).wait()
        addresses = (int(each.ctypes.data) for each in (self._batch.tasks, self._ranges, self.words))
        thread = threading.Thread(target=self._watch, args=(self._rt._address, *addresses))
        thread.start()
        try:
            yield
        finally:
            self.words[0] = 1
            thread.join()

    def largest_us(self, run: Callable[[], Any]) -> float:
        """The longest pause while something runs, and a little before and after."""
        time.sleep(0.003)
        self.words[1] = 0
        run()
        time.sleep(0.003)
        return float(self.words[1]) / 1e3


def latencies(rt: gpuos.Runtime, system: str, repeats: int) -> Iterator[Row]:
    x = testing.to_device(rt, np.linspace(-4, 4, 1024, dtype=np.float32))
    rt.inject("warm", fresh(), wait="compiled")  # starts the compiling process
    rt.inject("warm2", fresh(), wait="compiled")
    wait_idle(rt, "warm2")

    def runnable() -> None:
        rt.inject("t", fresh(), replace=True)
        rt.t(x).result()

    yield row("tier0/1024/f32", system, "time_to_result", "ms", [timed_ms(runnable) for _ in range(repeats)])
    wait_idle(rt, "t")

    def cold() -> None:
        rt.inject("c", fresh(), replace=True, wait="compiled")

    samples = []
    for _ in range(max(3, repeats // 3)):
        samples.append(timed_ms(cold))
        wait_idle(rt, "c")
    yield row("cold/1024/f32", system, "time_to_live", "ms", samples)


def wait_idle(rt: gpuos.Runtime, name: str) -> None:
    """Until nothing is compiled in the background."""
    version = rt._injected.version(name)
    if version is None or not version.done.wait(120):
        raise AssertionError(f"{name} was never compiled")


def from_cache(machine: str, system: str, repeats: int) -> Iterator[Row]:
    """Bodies that another Runtime compiled: latency, and the pause that loading makes."""
    expressions = [fresh() for _ in range(2 * max(3, repeats // 3))]
    with gpuos.Runtime(machine) as rt:
        for number, expression in enumerate(expressions):
            rt.inject(f"op{number}", expression, wait="compiled")
            wait_idle(rt, f"op{number}")
    half = len(expressions) // 2
    with gpuos.Runtime(machine) as rt:
        rt.inject("warm", expressions[0].replace("1", "1"), wait="compiled")
        samples = [
            timed_ms(lambda: rt.inject(f"op{number}", expressions[number], wait="compiled"))
            for number in range(1, half)
        ]
        yield row("cached/1024/f32", system, "time_to_live", "ms", samples)
    with gpuos.Runtime(machine, lease_s=None, idle_s=None) as rt:
        watcher = Watcher(rt)
        rt.inject("warm", expressions[0], wait="compiled")
        with watcher.watching():
            none = [watcher.largest_us(lambda: time.sleep(0.01)) for _ in range(half)]
            yield row("pause_none/256/f32", system, "largest_gap", "us", none)
            loads = [
                watcher.largest_us(lambda: rt.inject(f"op{number}", expressions[number], wait="compiled"))
                for number in range(half, len(expressions))
            ]
            yield row("pause_load/256/f32", system, "largest_gap", "us", loads)
            pair = expressions[half : half + 2]
            swaps = [
                watcher.largest_us(
                    lambda: rt.inject("op0", pair[turn % 2], replace=turn > 0, wait="compiled")
                )
                for turn in range(repeats)
            ]
            yield row("pause_swap/256/f32", system, "largest_gap", "us", swaps)
            backs = [watcher.largest_us(rt.rollback) for _ in range(repeats - 1)]
            yield row("pause_swap/256/f32/rollback", system, "largest_gap", "us", backs)

            def generation() -> None:
                rt._keeper.hand_over(swap=True)

            if rt._machine.loads_parked:
                parked = [watcher.largest_us(generation) for _ in range(2 * (repeats // 2))]
                yield row("pause_swap/256/f32/generation", system, "largest_gap", "us", parked)


def swaps(machine: str, system: str, count: int) -> Iterator[Row]:
    """Many swaps under four producers: what is lost, wrong or mixed, and what memory grows by."""
    with gpuos.Runtime(machine) as rt:
        for factor in (3, 5):
            rt.inject("f", f"x * {factor}", replace=factor == 5, wait="compiled")
            wait_idle(rt, "f")
        counts = {"wrong": 0, "mixed": 0, "stale": 0}
        stop = threading.Event()
        errors: list[BaseException] = []

        def produce() -> None:
            x = testing.to_device(rt, np.ones(3000, np.float32))
            out = testing.to_device(rt, np.zeros(3000, np.float32))
            try:
                while not stop.is_set():
                    rt.f(x, out=out).wait(timeout_s=30)
                    found = set(np.unique(testing.to_host(out)).tolist())
                    counts["mixed"] += len(found) > 1
                    counts["wrong"] += not found <= {3.0, 5.0}
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=produce) for _ in range(4)]
        for thread in threads:
            thread.start()
        x = testing.to_device(rt, np.ones(10, np.float32))
        took: list[float] = []
        memory: list[tuple[float, float]] = []
        for turn in range(count):
            factor = 3 if turn % 2 else 5
            took.append(
                1e3 * timed_ms(lambda: rt.inject("f", f"x * {factor}", replace=True, wait="compiled"))
            )
            counts["stale"] += float(testing.to_host(rt.f(x).result())[0]) != factor
            if turn in (count // 5, count - 1):
                memory.append(memory_mib(rt))
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
        rt.synchronize()
        if errors:
            raise errors[0]
        stats = rt.stats()
        console.print(f"{count} swaps beside {stats.completed:,} tasks: {counts}, memory {memory} MiB")
        counts["lost"] = stats.submitted - stats.completed + stats.failed
        for name, number in counts.items():
            yield Row(f"swaps{count}/3000/f32", system, name, "count", float(number), repeats=1)
        for place, name in enumerate(("host_growth", "device_growth")):
            yield Row(
                f"swaps{count}/3000/f32", system, name, "MiB", memory[1][place] - memory[0][place], repeats=1
            )
        yield row(f"swaps{count}/3000/f32", system, "time_per_swap", "us", took)


def memory_mib(rt: gpuos.Runtime) -> tuple[float, float]:
    """What this process holds of the host, and what is taken of the device."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    taken = 0.0
    if rt.machine == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(rt.device)
        taken = (total - free) / 2**20
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, taken


def against_builtin(machine: str, system: str, rounds: int) -> Iterator[Row]:
    """The injected silu beside that of the table: interpreted, compiled, and inlined where that is kept."""
    with gpuos.Runtime(machine) as rt:
        operator = rt.inject("swish", "x / (1 + exp(-x))", wait="compiled")
        wait_idle(rt, "swish")
        from gpuos_numba.inject.live import make_interpreted

        version = rt._injected.version("swish")
        assert version is not None and version.request is not None
        interpreted = make_interpreted(version.request, rt._machine.upload)

        def cases(systems: dict[str, Any]) -> list[Case]:
            made = []
            for name, size, count, linked in (
                ("dependent/1024/f32/silu", 1024, 256, True),
                ("independent/1024/f32/silu", 1024, 2000, False),
                ("independent/1048576/f32/silu", 1 << 20, 8, False),
            ):
                x = testing.to_device(rt, np.linspace(-4, 4, size, dtype=np.float32))
                out = testing.to_device(rt, np.zeros(size, np.float32))
                entries = []
                for label, what in systems.items():
                    batch = rt.batch(what, [((x,), out)] * count)

                    def run(batch: Any = batch, linked: bool = linked) -> None:
                        rt.submit_batch(batch, linked=linked).wait()

                    entries.append(System(label, run, count, required=True))
                made.append(Case(name, entries))
            return made

        before = {
            f"{system}/builtin": "silu",
            f"{system}/injected": operator,
            f"{system}/interpreted": interpreted,
        }
        yield from measure(cases(before), rounds)
        answer = rt.optimize("swish")
        console.print(f"optimize: {answer}")
        why = "" if answer["kept"] else str(answer["why"])
        if answer["kept"]:
            yield from measure(
                cases({f"{system}/inlined": operator, f"{system}/builtin-again": "silu"}), rounds
            )
        else:
            yield Row("dependent/1024/f32/silu", f"{system}/inlined", "time_per_op", "ns", why=why)


def main(
    machine: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    quick: Annotated[bool, typer.Option(help="A tenth of everything.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where the results go.")] = None,
) -> None:
    """Measure injection."""
    repeats, count, rounds = (6, 100, 5) if quick else (30, 1000, 30)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUOS_AUDIT_FILE"] = str(Path(folder, "audit.jsonl"))
        os.environ.setdefault("GPUOS_CACHE_DIR", str(Path(folder, "cache")))
        with gpuos.Runtime(machine) as rt:
            results = Results("injection", rt.device_name, rt.machine)
            system = "gpuos" if rt.machine == "cuda" else "gpuos-cpu"
            with results.kept():
                results.rows += latencies(rt, system, repeats)
        with results.kept():
            results.rows += from_cache(results.machine, system, repeats)
            results.rows += swaps(results.machine, system, count)
            results.rows += against_builtin(results.machine, system, rounds)
    for each in results.rows:
        if each.case.endswith("silu"):
            console.print(f"{each.case} {each.system}: {each.median} {each.unit} {each.why}")
    path = json or results.default_path
    results.write(path)
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
