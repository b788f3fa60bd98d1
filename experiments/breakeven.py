"""Up to which size does gpuos pay? `python -m experiments.breakeven [--quick]`

The quantity that the paper never gives. For each operator, over sizes (elements of the largest array read):

- `breakeven/<operator>/<size>/<dtype>`: independent calls, one batch, against eager PyTorch and a CUDA Graph;
- `breakeven/<operator>/<size>/<dtype>/dependent`: the same, each call after the one before.

and from these `breakeven/<operator>/<dtype>[/dependent]`: the size from which on a competitor is faster,
between the two measured sizes around it on a logarithmic scale. Without a figure the row says why: gpuos was
faster at all sizes, or at none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import typer

from .harness import Case, Results, Row
from .lab import Lab, Question, command
from .present import best, is_ours, sweep
from .workloads import WORKLOADS, Calls, Workload

SIZES = [1 << power for power in range(8, 23, 2)]
KEYS = [4096 * keys for keys in (16, 64, 256, 1024, 4096)]
COUNT = 200
ELEMENTS = 1 << 26  # read in one run at most, so fewer calls when they are big
DISTINCT_ELEMENTS = 1 << 22  # in the arrays of a case, which fit into the L2 cache and are soon compared
COMPETITORS = ("numpy", "eager", "graph")


def sizes_of(workload: Workload, lab: Lab) -> Sequence[int]:
    sizes = KEYS if workload.operator == "sdpa" else SIZES
    return sizes[:2] if lab.quick else sizes if lab.cuda else sizes[:5]


def cases(lab: Lab, workload: Workload, size: int) -> list[Case]:
    elements = ELEMENTS if lab.cuda else ELEMENTS >> 5
    count = max(4, min(COUNT if lab.cuda else COUNT // 4, elements // size))
    distinct = max(1, min(count, 16, DISTINCT_ELEMENTS // size))
    found = []
    for variant in ("", "/dependent"):
        calls = Calls(lab, workload, [size] * distinct, count, linked=bool(variant))
        # Launches in a stream follow each other either way: competitors are measured once a case.
        systems = [calls.ours(), *calls.others(COMPETITORS)]
        found.append(calls.case(f"breakeven/{workload.operator}/{size}/{workload.dtype}{variant}", systems))
    return found


def questions(lab: Lab) -> list[Question]:
    chosen = [each for each in WORKLOADS if not lab.quick or each.operator in ("add", "softmax")]
    return [
        (f"{workload.operator} {size}", lambda w=workload, s=size: cases(lab, w, s))  # type: ignore[misc]
        for workload in chosen
        for size in sizes_of(workload, lab)
    ]


def crossing(points: Sequence[tuple[int, float]]) -> tuple[float | None, str]:
    """Where the ratio competitor / gpuos falls below 1 for good: (size, why there is none).

    `points`: (size, ratio), sizes ascending.
    """
    slower = [index for index, (_, ratio) in enumerate(points) if ratio < 1]
    if not slower or slower[-1] != len(points) - 1:
        return None, f"gpuos is faster up to the largest size measured, {points[-1][0]}"
    first = len(points) - 1
    while first > 0 and points[first - 1][1] < 1:
        first -= 1
    if first == 0:
        return None, f"the competitor is faster from the smallest size measured, {points[0][0]}, on"
    (below, gain), (above, loss) = points[first - 1], points[first]
    share = math.log(gain) / (math.log(gain) - math.log(loss))
    return float(f"{below * (above / below) ** share:.3g}"), ""


def add_crossings(results: Results) -> None:
    """Rows of the sizes where competitors take over, from the medians."""
    swept: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in results.rows:
        _, operator, size, dtype, *variant = row.case.split("/")
        if row.median and not is_ours(row.system):
            ours = best(r for r in results.rows if r.case == row.case and is_ours(r.system))
            if ours is not None and ours.median:
                key = f"breakeven/{'/'.join([operator, dtype, *variant])}", row.system
                swept.setdefault(key, {}).setdefault("", []).append((int(size), row.median / ours.median))
    for (case, system), found in swept.items():
        size, why = crossing(sorted(found[""]))
        repeats = len(found[""])
        results.rows.append(Row(case, system, "breakeven", "elements", size, size, size, repeats, why))


def draw(results: Results, figure: Any) -> None:
    timed = [row for row in results.rows if row.metric == "time_per_op"]
    operators = list(dict.fromkeys(row.case.split("/")[1] for row in timed))
    figure.set_size_inches(4.5 * len(operators), 9)
    panels = figure.subplots(2, len(operators), squeeze=False)
    for column, operator in enumerate(operators):
        for line, variant in enumerate(("", "/dependent")):
            rows = [
                row
                for row in timed
                if row.case.split("/")[1] == operator and row.case.endswith("dependent") == bool(variant)
            ]
            panel = panels[line][column]
            sweep(panel, rows, lambda row: int(row.case.split("/")[2]), operator + variant, "elements")


main = command("breakeven", questions, draw, rounds=(7, 2), finish=add_crossings)

if __name__ == "__main__":
    typer.run(main)
