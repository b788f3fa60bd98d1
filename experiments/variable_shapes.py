"""What does it cost that every call has another shape? `python -m experiments.variable_shapes [--quick]`

- `variable/<operator>/<size>/<dtype>`: independent calls, each smaller than the one before;
- `.../stable`: as many calls of one size, in the same rounds.

By gpuos (a batch prepared before; `/prepare` prepares it within the time, which is what a caller pays who has
just learnt the shapes), by eager PyTorch, by a CUDA Graph (stable shapes only: it is captured for its shapes)
and by one captured within the time, which is all that its user can do about new ones.
"""

from __future__ import annotations

from typing import Any

import typer

from .harness import Case, Results
from .lab import Lab, Question, command
from .present import bars
from .workloads import WORKLOADS, Calls

SIZES = {"add": 2048, "layer_norm": 4096, "softmax": 4096, "matvec": 1 << 16, "sdpa": 4096 * 256}
STEP = {"matvec": 257, "sdpa": 4096}
COUNT, DISTINCT = 500, 50


def cases(lab: Lab, name: str) -> list[Case]:
    """New shapes and one shape."""
    workload = next(each for each in WORKLOADS if each.operator == name)
    size, step = SIZES[name], STEP.get(name, 1)
    count = COUNT // (10 if lab.quick or not lab.cuda else 1)
    found = []
    for variant, shrink, names in (("", step, ()), ("/stable", 0, ("graph",))):
        sizes = [size - shrink * i for i in range(min(DISTINCT, count))]
        calls = Calls(lab, workload, sizes, count)
        systems = [calls.ours(), calls.ours(prepare=True)]
        systems += calls.others(["numpy", "eager", *names, "graph/recapture"])
        found.append(calls.case(f"variable/{name}/{size}/{workload.dtype}{variant}", systems))
    return found


def questions(lab: Lab) -> list[Question]:
    names = ["add", "softmax"] if lab.quick else list(SIZES)
    return [(name, lambda name=name: cases(lab, name)) for name in names]  # type: ignore[misc]


def draw(results: Results, figure: Any) -> None:
    operators = list(dict.fromkeys(row.case.split("/")[1] for row in results.rows))
    figure.set_size_inches(5 * len(operators), 5)
    for panel, name in zip(figure.subplots(1, len(operators), squeeze=False)[0], operators, strict=True):
        rows = [row for row in results.rows if row.case.split("/")[1] == name]
        bars(panel, rows, f"{name}, a call")


main = command("variable_shapes", questions, draw, rounds=(15, 3))

if __name__ == "__main__":
    typer.run(main)
