"""What do five small operations in a row cost? `python -m experiments.mixed_pipeline [--quick]`

`sigmoid(relu((a + b) * c)) / c` on f32 arrays, the paper's mixed pipeline, time per pipeline:

- `mixed_in_flight/<n>`: 256 instances that do not depend on each other;
- `mixed_dependent/<n>`: one after another, each beginning with what the one before ended with;
- `mixed_in_flight/<n>/new_shapes`: every instance one element shorter than the one before.

By gpuos (a batch an operation over all instances; `/chains` a linked chain an instance; `/injected` one
operator injected for the whole expression; `/auto` and `/program` where this version finds the order itself
and has programs), by eager PyTorch, by torch.compile (fused; also with CUDA Graphs of its own), and by CUDA
Graphs of either, captured before, or within the time where shapes are new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import typer

import gpuos_numba as gpuos

from .baselines import cuda_torch
from .harness import Case, Results, System, WrongResult
from .lab import TIMEOUT_S, Lab, Question, command
from .present import bars

N, INSTANCES = 2048, 256
A, B, C, T, OUT = range(5)
TOLERANCE = 1e-5
EXPRESSION = "sigmoid(relu((x + y) * z)) / z"


def truth(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The pipeline by the operators' NumPy specs."""
    spec = {name: each.spec for name, each in gpuos.operators().items()}
    t = spec["relu"](spec["mul"](spec["add"](a, b), c).astype(np.float32))
    return np.asarray(spec["div"](spec["sigmoid"](t).astype(np.float32), c), np.float32)


class Pipelines:
    """Arrays of all instances, and everybody's way through them."""

    def __init__(self, lab: Lab, dependent: bool, shrink: int) -> None:
        self.lab, self.dependent = lab, dependent
        self.instances = 32 if lab.quick else INSTANCES
        random = np.random.default_rng(5)
        host = np.full((5, self.instances, N), np.nan, np.float32)
        host[[A, B]] = random.standard_normal((2, self.instances, N))
        host[C] = random.uniform(0.5, 2.0, (self.instances, N))
        self.first, self.slab = host, lab.device(host)
        self.sizes = [N - shrink * i for i in range(self.instances)]
        self.places: list[list[tuple[int, int]]] = []  # planes and rows of a, b, c, t and out
        self.expected = np.full((self.instances, N), np.nan, np.float32)
        self.calls: list[tuple[Any, ...]] = []  # (a, b, c, t, out)
        for i, size in enumerate(self.sizes):
            before = (OUT, i - 1) if dependent and i else (A, i)
            places = [before, (B, i), (C, i), (T, i), (OUT, i)]
            self.places.append(places)
            self.calls.append(tuple(self.slab[plane, row, :size] for plane, row in places))
            a = self.expected[i - 1, :size] if dependent and i else host[A, i, :size]
            self.expected[i, :size] = truth(a, host[B, i, :size], host[C, i, :size])

    def stages(self) -> list[tuple[str, list[tuple[Any, Any]]]]:
        """Operator, and (inputs, out) of every instance, in order."""
        calls = self.calls
        return [
            ("add", [((a, b), t) for a, b, c, t, out in calls]),
            ("mul", [((t, c), t) for a, b, c, t, out in calls]),
            ("relu", [((t,), t) for a, b, c, t, out in calls]),
            ("sigmoid", [((t,), t) for a, b, c, t, out in calls]),
            ("div", [((t, c), out) for a, b, c, t, out in calls]),
        ]

    # By gpuos

    def chains(self) -> list[gpuos.Batch]:
        """A batch an instance."""
        rt = self.lab.rt
        batches = [rt.batch(name, stage) for name, stage in self.stages()]
        return [
            gpuos.Batch.concatenate([batch[i : i + 1] for batch in batches]) for i in range(self.instances)
        ]

    def by_stages(self) -> Callable[[], None]:
        rt = self.lab.rt
        batches = [rt.batch(name, stage) for name, stage in self.stages()]

        def run() -> None:
            for batch in batches:
                rt.submit_batch(batch).wait(TIMEOUT_S)

        return run

    def by_chains(self) -> Callable[[], None]:
        rt, chains = self.lab.rt, self.chains()

        def run() -> None:
            for chain in chains:
                rt.submit_batch(chain, linked=True)
            rt.synchronize(TIMEOUT_S)

        return run

    def by_one_chain(self, linked: bool = True) -> Callable[[], None]:
        rt, whole = self.lab.rt, gpuos.Batch.concatenate(self.chains())
        return lambda: rt.submit_batch(whole, linked=linked).wait(TIMEOUT_S)

    def by_auto(self) -> Callable[[], None]:
        if getattr(self.lab.rt.config, "order", "none") != "auto":
            raise NotImplementedError("this version does not find the order of tasks itself")
        return self.by_one_chain(linked=False)

    def by_injected(self) -> Callable[[], None]:
        rt = self.lab.rt
        whole = rt.inject("mixed_pipeline", EXPRESSION, replace=True, wait="compiled")
        batch = rt.batch(whole, [((a, b, c), out) for a, b, c, t, out in self.calls])
        return lambda: rt.submit_batch(batch, linked=self.dependent).wait(TIMEOUT_S)

    def by_program(self) -> Callable[[], None]:
        rt: Any = self.lab.rt
        if "program" not in dir(rt):
            raise NotImplementedError("this version has no programs")

        def body(slab: Any) -> None:
            for places, size in zip(self.places, self.sizes, strict=True):
                a, b, c, t, out = (slab[plane, row, :size] for plane, row in places)
                rt.add(a, b, out=t)
                rt.mul(t, c, out=t)
                rt.relu(t, out=t)
                rt.sigmoid(t, out=t)
                rt.div(t, c, out=out)

        program = rt.program(body, [self.slab])
        return lambda: program(self.slab).wait(TIMEOUT_S)

    # By the others

    def numpy(self) -> Callable[[], None]:
        def run() -> None:
            for a, b, c, t, out in self.calls:
                np.add(a, b, out=t)
                np.multiply(t, c, out=t)
                np.maximum(t, 0, out=t)
                np.negative(t, out=t)
                np.exp(t, out=t)
                np.add(t, 1, out=t)
                np.reciprocal(t, out=t)
                np.divide(t, c, out=out)

        return run

    def perform(self) -> None:
        """Eager PyTorch, without allocations."""
        torch = cuda_torch()
        for a, b, c, t, out in self.calls:
            torch.add(a, b, out=t)
            torch.mul(t, c, out=t)
            t.relu_()
            torch.sigmoid(t, out=t)
            torch.div(t, c, out=out)

    def eager(self) -> Callable[[], None]:
        synchronize = cuda_torch().cuda.current_stream().synchronize

        def run() -> None:
            self.perform()
            synchronize()

        return run

    def compiled(self, mode: str) -> Callable[[], None]:
        """One fused kernel a call. Results are new tensors: those that are kept are checked here."""
        torch = cuda_torch()
        fused = torch.compile(lambda a, b, c: torch.sigmoid(torch.relu((a + b) * c)) / c, mode=mode)
        again = mode == "reduce-overhead"  # replays into the same output: it must be copied to go on

        def run() -> None:
            result = None
            for a, b, c, _, _ in self.calls:
                if again:
                    torch.compiler.cudagraph_mark_step_begin()
                if self.dependent and result is not None:
                    a = result.clone() if again else result
                result = fused(a, b, c)
            torch.cuda.current_stream().synchronize()
            self.last = result

        for _ in range(3):
            run()
        got, want = self.last.cpu().numpy(), self.expected[-1]
        if not np.allclose(got, want[~np.isnan(want)], rtol=TOLERANCE, atol=0):
            raise WrongResult(f"torch.compile(mode={mode!r}) differs from the spec")
        return run

    def graph(self, perform: Callable[[], None]) -> Callable[[], None]:
        torch = cuda_torch()
        perform()  # loads the kernels, which a capture must not
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            perform()

        def run() -> None:
            captured.replay()
            torch.cuda.current_stream().synchronize()

        return run

    def graph_compiled(self) -> Callable[[], None]:
        """The strongest rival: a captured graph of fused kernels, one node a pipeline."""
        torch = cuda_torch()

        def step(a: Any, b: Any, c: Any, out: Any) -> None:
            out.copy_(torch.sigmoid(torch.relu((a + b) * c)) / c)

        fused = torch.compile(step, dynamic=False)

        def perform() -> None:
            for a, b, c, _, out in self.calls:
                fused(a, b, c, out)

        return self.graph(perform)

    def recapture(self) -> Callable[[], None]:
        torch = cuda_torch()
        self.perform()
        stream = torch.cuda.Stream()

        def run() -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                self.perform()
                graph.capture_end()
            graph.replay()
            torch.cuda.current_stream().synchronize()

        return run


def case(lab: Lab, name: str, dependent: bool = False, shrink: int = 0) -> Case:
    """One question, with all who can answer it."""
    p = Pipelines(lab, dependent, shrink)
    count: dict[str, Any] = {"count": p.instances}
    systems: list[System] = [
        lab.ours(p.by_one_chain() if dependent else p.by_stages(), **count),
        lab.planned("/injected", p.by_injected, **count),
        lab.planned("/auto", p.by_auto, **count),
        lab.planned("/program", p.by_program, **count),
    ]
    if not dependent:
        systems.insert(1, lab.ours(p.by_chains(), "/chains", **count))
    if lab.cuda:
        unread: dict[str, Any] = {**count, "read": lambda: p.expected}  # was checked when it was built
        systems.append(lab.other("eager", p.eager, **count))
        if shrink:
            systems.append(lab.other("graph/recapture", p.recapture, every=2, **count))
        else:
            systems += [
                lab.other("compile", lambda: p.compiled("default"), **unread),
                lab.other("compile/reduce-overhead", lambda: p.compiled("reduce-overhead"), **unread),
                lab.other("graph", lambda: p.graph(p.perform), **count),
                lab.other("graph/compile", p.graph_compiled, **count),
            ]
    else:
        systems.append(lab.other("numpy", p.numpy, **count))

    def poison() -> None:
        lab.fill(p.slab, p.first)

    return Case(name, systems, poison, lambda: lab.host(p.slab[OUT]), p.expected, TOLERANCE,
                metric="time_per_pipeline")  # fmt: skip


def questions(lab: Lab) -> list[Question]:
    return [
        ("in flight", lambda: [case(lab, f"mixed_in_flight/{N}/f32")]),
        ("dependent", lambda: [case(lab, f"mixed_dependent/{N}/f32", dependent=True)]),
        ("new shapes", lambda: [case(lab, f"mixed_in_flight/{N}/f32/new_shapes", shrink=1)]),
    ]


def draw(results: Results, figure: Any) -> None:
    figure.set_size_inches(16, 5)
    names: Sequence[str] = list(dict.fromkeys(row.case for row in results.rows))
    for panel, name in zip(figure.subplots(1, len(names)), names, strict=True):
        bars(panel, [row for row in results.rows if row.case == name], f"{name}, a pipeline")


main = command("mixed_pipeline", questions, draw)

if __name__ == "__main__":
    typer.run(main)
