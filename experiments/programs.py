"""What does a resident program cost? `python -m experiments.programs [--machine auto|cpu|cuda] [--quick]`

- `program/<count>x1024/f32`: as many independent adds, recorded once, submitted by one call: time of each
  from the call to its end. `gpuos/batch` submits the same adds as a batch known to be independent;
- `program_call/<count>x1024/f32`: the host's part of that, until the call returns;
- `program_chain/100x2048/f32`: a hundred dependent adds; `.../new_shapes` has another size in every call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count as counter
from typing import Any

import numpy as np
import typer

from .baselines import cuda_torch
from .harness import Case, Results
from .lab import TIMEOUT_S, Lab, Question, command
from .ordering import _torch
from .present import bars

COUNT, QUICK_COUNT, N = 10_000, 500, 1024
LENGTH, LONG = 100, 2048


def independent(lab: Lab) -> list[Case]:
    """`out[i] = a[i] + b[i]`, each an operation."""
    count = QUICK_COUNT if lab.quick else COUNT
    host = np.zeros((3, count, N), np.float32)
    host[0], host[1] = np.arange(count)[:, None] % 1000, np.arange(N) % 7
    a, b, out = (lab.device(each) for each in host)
    rt = lab.rt

    def body(a: Any, b: Any, out: Any) -> None:
        for i in range(count):
            rt.add(a[i], b[i], out=out[i])

    program = rt.program(body, (a, b, out))
    batch = rt.batch("add", [((a[i], b[i]), out[i]) for i in range(count)])
    systems = [
        lab.ours(lambda: program(a, b, out).wait(TIMEOUT_S), "/program", count=count),
        lab.ours(lambda: rt.submit_batch(batch, ordered=False).wait(TIMEOUT_S), "/batch", count=count),
    ]
    if lab.cuda:
        rows = list(zip(a, b, out, strict=True))

        def perform() -> None:
            torch = cuda_torch()
            for x, y, z in rows:
                torch.add(x, y, out=z)

        systems += _torch(lab, perform, count)[:2]
    whole = Case(
        f"program/{count}x{N}/f32",
        systems,
        lambda: lab.fill(out, np.nan),
        lambda: lab.host(out),
        host[0] + host[1],
    )

    def calls() -> Iterable[float]:
        begin = time.perf_counter_ns()
        ticket = program(a, b, out)
        yield (time.perf_counter_ns() - begin) / count
        ticket.wait(TIMEOUT_S)

    def call() -> None:
        program(a, b, out).wait(TIMEOUT_S)

    return [whole, Case(f"program_call/{count}x{N}/f32", [lab.ours(call, "/program", sample=calls)])]


def chain(lab: Lab) -> list[Case]:
    """`x = x + b`, a hundred times."""
    host = np.zeros((2, LONG), np.float32)
    host[1] = np.arange(LONG) % 7
    x, b = (lab.device(each) for each in host)
    rt = lab.rt

    def body(x: Any, b: Any) -> None:
        for _ in range(LENGTH):
            rt.add(x, b, out=x)

    program, sizes = rt.program(body, (x, b)), counter(LONG - 1, -1)

    def fresh(run: Callable[[], None]) -> Callable[[], None]:
        def whole() -> None:
            rt.fill(out=x, value=0.0)
            run()

        return whole

    def new_size() -> None:
        n = next(sizes)
        program(x[:n], b[:n]).wait(TIMEOUT_S)

    stable = [lab.ours(fresh(lambda: program(x, b).wait(TIMEOUT_S)), "/program", count=LENGTH)]
    if lab.cuda:

        def perform() -> None:
            torch = cuda_torch()
            x.zero_()
            for _ in range(LENGTH):
                torch.add(x, b, out=x)

        stable += _torch(lab, perform, LENGTH)
    name = f"program_chain/{LENGTH}x{LONG}/f32"
    return [
        Case(name, stable, lambda: lab.fill(x, np.nan), lambda: lab.host(x), host[1] * LENGTH, absolute=1e-3,
             tolerance=1e-6),
        Case(f"{name}/new_shapes", [lab.ours(fresh(new_size), "/program", count=LENGTH)]),
    ]  # fmt: skip


def questions(lab: Lab) -> list[Question]:
    return [("independent", lambda: independent(lab)), ("a chain", lambda: chain(lab))]


def draw(results: Results, figure: Any) -> None:
    names = list(dict.fromkeys(row.case for row in results.rows))
    figure.set_size_inches(6 * len(names), 6)
    for panel, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        bars(panel, [row for row in results.rows if row.case == name], name)


main = command("programs", questions, draw)

if __name__ == "__main__":
    typer.run(main)
