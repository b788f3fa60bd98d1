"""Is every operator right, and is it worth it? `python -m experiments.operators [--machine auto|cpu|cuda]`

- `examples/<operator>`: how many drawn examples (any dtype, shape, strides and values that the operator
  takes) equal its NumPy spec to the tolerance of the table, with the bytes around its outputs untouched;
- `dependent/<case>`, `independent/<case>`: time of a call in a chain and among many, by gpuos, by eager
  PyTorch and by a replayed CUDA Graph of the same calls, in the same rounds. Results are held to the spec
  first. A competitor without such an operation gets the formula that its users write.
- `bandwidth/copy`: GB/s of a large device copy, read and write, to compare what moves much.

A time is taken of what was right before and after only. An example that is wrong is named, and the exit
status says so.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import gpuos_numba as gpuos
from gpuos_numba import testing

from .harness import Case, Results, Row, System, baseline, measure
from .microbench import MachineChoice, amount, times

ROUNDS, QUICK_ROUNDS = 15, 3
EXAMPLES, QUICK_EXAMPLES = 2000, 5
SHARE = 250  # examples that a process takes at a time
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Call:
    """One call, and how PyTorch says it.

    Attributes:
        name: `<operator>/<shape>/<dtype>`.
        operator: by name.
        inputs: NumPy arrays.
        out: NumPy arrays that hold what outputs hold before.
        eager: `eager(inputs, outs)` over tensors.
        parameters: of the operator.
        chain: calls in a run.
        bytes: moved at least, for the bandwidth.
    """

    name: str
    operator: str
    inputs: list[np.ndarray]
    out: list[np.ndarray]
    eager: Callable[[list[Any], list[Any]], Any] | None
    parameters: dict[str, Any] = field(default_factory=dict)
    chain: int = 2000
    bytes: int = 0


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def calls() -> list[Call]:
    """The cases. Eager forms write to their outputs where PyTorch can."""
    f32, f16 = np.float32, np.float16
    made: list[Call] = []

    def torch_of(name: str) -> Callable[[list[Any], list[Any]], Any]:
        def eager(inputs: list[Any], outs: list[Any]) -> Any:
            import torch

            return getattr(torch, name)(*inputs, out=outs[0])

        return eager

    def functional(name: str, *arguments: Any) -> Callable[[list[Any], list[Any]], Any]:
        def eager(inputs: list[Any], outs: list[Any]) -> Any:
            import torch

            return getattr(torch.nn.functional, name)(inputs[0], *arguments)

        return eager

    n = 1024
    x, y = normal(n), normal(n) + 3
    for name, inputs in (("add", [x, y]), ("mul", [x, y]), ("div", [x, y]), ("maximum", [x, y]),
                         ("relu", [x]), ("sigmoid", [x]), ("exp", [x]), ("sin", [x]), ("pow", [y + 1, x]),
                         ("lt", [x, y])):  # fmt: skip
        out = np.zeros(n, np.bool_ if name == "lt" else f32)
        made.append(Call(f"{name}/{n}/f32", name, inputs, [out], torch_of(name)))
    made[4].eager = functional("relu")
    made.append(Call(f"gelu/{n}/f32", "gelu", [x], [np.zeros(n, f32)], functional("gelu")))
    half = x.astype(f16)
    made.append(Call(f"add/{n}/f16", "add", [half, half], [np.zeros(n, f16)], torch_of("add")))
    whole = np.arange(n, dtype=np.int32)
    made.append(Call(f"add/{n}/i32", "add", [whole, whole], [np.zeros(n, np.int32)], torch_of("add")))
    grid = normal(32, 32)
    made.append(Call("add/32x32t/f32", "add", [grid.T, grid.T], [np.zeros((32, 32), f32)], torch_of("add")))
    made.append(Call("add/32x32+32/f32", "add", [grid, x[:32]], [np.zeros((32, 32), f32)], torch_of("add")))

    for rows in (1, 2, 4, 8):
        a, out = normal(rows, 4096), [np.zeros((rows, 4096), f32)]
        shape = f"{rows}x4096/f32"
        made.append(
            Call(f"softmax/{shape}", "softmax", [a], out, functional("softmax", -1), {"dim": -1}, 500)
        )
        made.append(
            Call(f"layer_norm/{shape}", "layer_norm", [a], out, functional("layer_norm", (4096,)), {}, 500)
        )
        made.append(
            Call(
                f"rms_norm/{shape}",
                "rms_norm",
                [a],
                out,
                functional("rms_norm", (4096,), None, 1e-6),
                {},
                500,
            )
        )
    made.append(
        Call("sum/1x4096/f32", "sum", [normal(1, 4096) + 3], [np.zeros(1, f32)],
             lambda i, o: i[0].sum(-1), {"dim": -1})
    )  # fmt: skip

    weights, vector = normal(4096, 4096, dtype=f16) / 64, normal(4096, dtype=f16)
    made.append(
        Call("matvec/4096x4096/f16", "matvec", [weights.astype(f16), vector], [np.zeros(4096, f16)],
             torch_of("mv"), chain=50, bytes=4096 * 4096 * 2)
    )  # fmt: skip

    heads, positions = normal(1, 32, 128, dtype=f16), np.array([1000])
    angles = 1000.0 * 10000.0 ** (-np.arange(64) / 64)
    cos, sin = (np.concatenate([f(angles)] * 2).astype(f16) for f in (np.cos, np.sin))

    def rotate(inputs: list[Any], outs: list[Any]) -> Any:
        import torch

        x, c, s = inputs[0], inputs[2], inputs[3]
        low, high = x[..., :64], x[..., 64:]
        return x * c + torch.cat((-high, low), -1) * s

    made.append(
        Call("rope/1x32x128/f16", "rope", [heads, positions, cos, sin], [np.zeros_like(heads)], rotate)
    )

    cache, slots = np.zeros((64, 16, 32, 128), f16), np.array([77])

    def update(inputs: list[Any], outs: list[Any]) -> Any:
        for new, kept in zip(inputs[:2], outs, strict=True):
            kept.view(-1, 32, 128).index_copy_(0, inputs[2], new)

    made.append(
        Call("kv_update/1x32x128/f16", "kv_update", [heads, heads, slots], [cache, cache.copy()], update)
    )

    def attend(inputs: list[Any], outs: list[Any]) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(*inputs)

    for keys in (128, 512, 2048, 8192):
        query, key, value = (normal(1, 32, side, 128, dtype=f16) for side in (1, keys, keys))
        made.append(
            Call(f"attention_decode/32x128x{keys}/f16", "sdpa", [query, key, value],
                 [np.zeros((1, 32, 1, 128), f16)], attend, chain=50, bytes=2 * key.nbytes)
        )  # fmt: skip
    return made


class Bench:
    """Cases for one Runtime."""

    def __init__(self, rt: gpuos.Runtime) -> None:
        self.rt = rt
        self.name = "gpuos" if rt.machine == "cuda" else "gpuos-cpu"

    def cases(self, call: Call) -> list[Case]:
        """Dependent and independent runs of a call."""
        rt, operator = self.rt, gpuos.operators()[call.operator]
        tensors = [testing.to_device(rt, each) for each in call.inputs]
        outs = [testing.to_device(rt, each.copy()) for each in call.out]
        own = tensors[:2] if call.operator == "rope" else tensors
        given = [np.asarray(each) for each in call.inputs[: len(own)]]
        before = tuple(each.copy() for each in call.out)
        extra = {"out": before} if operator.updates else {}
        assert operator.spec is not None
        with np.errstate(all="ignore"):
            truth = operator.spec(*given, **call.parameters, **extra)
        truths = truth if isinstance(truth, tuple) else (truth,)

        def poison() -> None:
            for kept, first in zip(outs, call.out, strict=True):
                fresh = testing.to_device(rt, first)
                kept[...] = fresh
            if rt.machine == "cuda":
                import torch

                torch.cuda.synchronize()

        def read() -> np.ndarray:
            right = []
            for kept, expected in zip(outs, truths, strict=True):
                try:
                    result = testing.to_host(kept)
                    code = next(c for c in operator.dtypes if testing.numpy_dtype(c) == result.dtype)
                    testing.compare(call.operator, result, np.asarray(expected).reshape(result.shape), code)
                    right.append(True)
                except (AssertionError, StopIteration):
                    right.append(result.dtype == np.bool_ and bool((result == expected).all()))
            return np.array(right)

        target = outs[0] if operator.outputs == 1 else tuple(outs)
        batch = rt.batch(call.operator, [(own, target)] * call.chain, **call.parameters)
        rt.park(TIMEOUT_S)

        def competitor(name: str, build: Callable[[], Callable[[], Any]]) -> System:
            return baseline(name, build, count=call.chain, before=lambda: rt.park(TIMEOUT_S))

        found = []
        for linked in (True, False):

            def run(linked: bool = linked) -> None:
                rt.submit_batch(batch, linked=linked).wait(TIMEOUT_S)

            systems = [System(self.name, run, count=call.chain, required=True)]
            if rt.machine == "cuda" and call.eager is not None and linked:
                systems += [
                    competitor("eager", lambda: self.eager(call, tensors, outs)),
                    competitor("graph", lambda: self.graph(call, tensors, outs)),
                ]
            kind = "dependent" if linked else "independent"
            # Competitors' results go where they like: only ours are looked at, which come first and last.
            case = Case(f"{kind}/{call.name}", systems[:1], poison, read, np.array([True] * len(outs)))
            found.append(case)
            if len(systems) > 1:
                found.append(Case(case.name, systems[1:]))
        return found

    def eager(self, call: Call, tensors: list[Any], outs: list[Any]) -> Callable[[], None]:
        import torch

        assert call.eager is not None
        eager = call.eager
        eager(tensors, outs)

        def run() -> None:
            for _ in range(call.chain):
                eager(tensors, outs)
            torch.cuda.synchronize()

        return run

    def graph(self, call: Call, tensors: list[Any], outs: list[Any]) -> Callable[[], None]:
        import torch

        assert call.eager is not None
        for _ in range(3):
            call.eager(tensors, outs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(call.chain):
                call.eager(tensors, outs)

        def run() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return run


def bandwidth(rt: gpuos.Runtime) -> Row:
    """GB/s of a copy of 1 GiB by PyTorch, read and write counted."""
    import torch

    rt.park(TIMEOUT_S)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2 * source.numel() / begin.elapsed_time(end) / 1e6)
    low, middle, high = (float(f"{value:.5g}") for value in np.percentile(rates[2:], (10, 50, 90)))
    return Row("bandwidth/copy", "eager", "rate", "GB/s", middle, low, high, 10)


# --- examples, in processes: each is a round trip that leaves the machine idle ---

own: gpuos.Runtime  # of a process that tries examples


def begin(machine: str) -> None:
    """A Runtime for this process that leaves the GPU to the others as soon as it has nothing to do."""
    global own
    own = gpuos.Runtime(machine=machine, idle_s=10e-6)


def try_examples(name: str, seeds: range) -> tuple[int, str]:
    """How many examples of an operator equal its spec, and what the first says that does not."""
    operator = gpuos.operators()[name]
    assert operator.example is not None
    right, why = 0, ""
    for seed in seeds:
        inputs, parameters = operator.example(testing.RandomDraw(seed))
        try:
            testing.check(own, name, *inputs, **parameters)
            right += 1
        except AssertionError as error:
            why = why or f"seed {seed}: " + " ".join(str(error).split())[:400]
    return right, why


def tried(
    machine: str, names: list[str], count: int, processes: int, advance: Callable[[], Any]
) -> Iterator[Row]:
    """A row per operator: `count` examples of it, dealt to the processes in parts."""
    system = "gpuos" if machine == "cuda" else "gpuos-cpu"
    shares = [range(first, min(first + SHARE, count)) for first in range(0, count, SHARE)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, begin, (machine,)) as pool:
        asked = {name: [pool.submit(try_examples, name, seeds) for seeds in shares] for name in names}
        for name, parts in asked.items():
            answers = [part.result() for part in parts]
            right, why = sum(each for each, _ in answers), next((why for _, why in answers if why), "")
            advance()
            yield Row(f"examples/{name}", system, "examples", "count", right, right, right, count, why)


def run(machine: str, quick: bool, examples: int, processes: int, console: Console) -> Results:
    """Everything on one machine. Raises AssertionError where a result is wrong."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    columns = TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    names = [name for name, operator in gpuos.operators().items() if operator.example]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("examples", total=len(names) + len(calls()) * rounds)
        with gpuos.Runtime(machine=machine) as rt:
            results = Results("operators-quick" if quick else "operators", rt.device_name, rt.machine)
            bench = Bench(rt)
            with results.kept():
                for call in calls():
                    progress.update(bar, description=call.name)
                    results.rows += measure(bench.cases(call), rounds, lambda: progress.advance(bar))
                if rt.machine == "cuda":
                    results.rows.append(bandwidth(rt))
            rt.synchronize(TIMEOUT_S)
        # The CPU machine has the cores to itself already.
        processes = processes or (min(12, os.cpu_count() or 1) if results.machine == "cuda" else 1)
        progress.update(bar, description=f"examples, {processes} processes")
        with results.kept():
            for row in tried(results.machine, names, examples, processes, lambda: progress.advance(bar)):
                results.rows.append(row)
    return results


def table(results: Results) -> Table:
    """A line per case: medians, and how many times longer than gpuos the others take."""
    timed = [row for row in results.rows if row.metric == "time_per_op"]
    systems = list(dict.fromkeys(row.system for row in timed))
    ours = systems[0]
    made = Table(title=f"{results.device}, {results.machine}: medians", caption=f"commit {results.commit}")
    made.add_column("case", no_wrap=True)
    for heading in (*systems, *(f"{each} / {ours}" for each in systems[1:])):
        made.add_column(heading, justify="right", no_wrap=True)
    for case in dict.fromkeys(row.case for row in timed):
        rows = {row.system: row for row in timed if row.case == case}
        made.add_row(
            case,
            *(amount(rows.get(system)) for system in systems),
            *(times(results, case, each, ours) if each in rows else "" for each in systems[1:]),
        )
    return made


def main(
    machine: Annotated[MachineChoice, typer.Option(help="auto: a GPU if there is one.")] = MachineChoice.auto,
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats and examples.")] = False,
    examples: Annotated[int | None, typer.Option(help="How many of each operator.")] = None,
    processes: Annotated[int, typer.Option(help="That try examples at once; 0: as many as pay.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Results; default experiments/results/local/.")] = None,
) -> None:
    """Hold every operator to its spec, and time the common ones against PyTorch and CUDA Graphs."""
    console = Console(width=None if Console().is_terminal else 160)
    count = examples or (QUICK_EXAMPLES if quick else EXAMPLES)
    results = run(machine, quick, count, processes, console)
    results.write(json or results.default_path)
    console.print(table(results))
    held = [row for row in results.rows if row.metric == "examples"]
    wrong = [row for row in held if row.why]
    for row in wrong:
        console.print(f"{row.case}: {row.repeats - (row.median or 0):.0f} wrong, {row.why}", markup=False)
    console.print(
        f"{len(held) - len(wrong)} of {len(held)} operators, {held[0].repeats} examples each: right"
    )
    console.print(f"Results in {json or results.default_path}", markup=False)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
