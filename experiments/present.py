"""How rows are shown: results arrive, tables and axes leave. What is typed here is form, never a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .harness import SCALE, Results, Row

MORE_IS_BETTER = {"throughput", "rate", "tasks_served", "tasks_per_s", "breakeven"}
"""Metrics of which the larger is the better; of all others the smaller."""


def amount(row: Row | None) -> str:
    """Three digits and the unit a person reads at once."""
    if row is None:
        return ""
    if row.median is None:
        return "none" if row.metric == "breakeven" else "failed"
    if row.unit in SCALE:
        value = row.median * SCALE[row.unit]
        steps = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 0.0))
        unit, size = next((u, s) for u, s in steps if value >= s)
        return f"{value / (size or 1.0):.3g} {unit}"
    unit = row.unit.removeprefix("1")  # "1/s" reads "M/s"
    steps = (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 0.0))
    letter, size = next((letter, size) for letter, size in steps if row.median >= size)
    space = "" if unit.startswith("/") else " "
    return f"{row.median / (size or 1.0):.3g} {letter}{space if letter else ''}{unit}"


def times(results: Results, case: str, system: str | None, ours: str) -> str:
    """How many times longer `system` takes than `ours`."""
    ratio = results.ratio(case, system, ours) if system else None
    return f"{ratio:.3g}x" if ratio else ""


def is_ours(system: str) -> bool:
    """Whether gpuos computed the row; what runs beside it is not."""
    return system.split("/")[0] in ("gpuos", "gpuos-cpu")


def best(rows: Iterable[Row]) -> Row | None:
    """The best of rows of one metric that have a figure."""
    measured = [row for row in rows if row.median]
    if not measured:
        return None
    pick: Callable[..., Row] = max if measured[0].metric in MORE_IS_BETTER else min
    return pick(measured, key=lambda row: row.median)


def groups(results: Results) -> dict[tuple[str, str], list[Row]]:
    """Rows by (case, metric), in their order."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        found.setdefault((row.case, row.metric), []).append(row)
    return found


def advantage(ours: Row | None, other: Row | None) -> float | None:
    """How many times better ours is than the other; below 1 where it is worse."""
    if ours is None or other is None or not ours.median or not other.median:
        return None
    ratio = other.median / ours.median
    return 1 / ratio if ours.metric in MORE_IS_BETTER else ratio


def table(results: Results) -> Table:
    """A line per case and metric: every system, and how gpuos stands against the strongest other."""
    systems = list(dict.fromkeys(row.system for row in results.rows))
    found = groups(results)
    several = len({metric for _, metric in found}) > 1
    made = Table(title=f"{results.device}, {results.machine}: medians", caption=f"commit {results.commit}")
    made.add_column("case", no_wrap=True)
    if several:
        made.add_column("metric", no_wrap=True)
    for heading in (*systems, "strongest other"):
        made.add_column(heading, justify="right", no_wrap=True)
    for (case, metric), rows in found.items():
        by_system = {row.system: row for row in rows}
        ours, other = (
            best(row for row in rows if is_ours(row.system)),
            best(row for row in rows if not is_ours(row.system)),
        )
        gain = advantage(ours, other)
        last = f"{other.system} {gain:.3g}x" if other and gain else ""
        cells = [case, metric] if several else [case]
        made.add_row(*cells, *(amount(by_system.get(system)) for system in systems), last)
    return made


def failures(results: Results) -> list[str]:
    """A line for each system that could not run: which cases, and why."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in results.rows:
        if row.why:
            said.setdefault((row.system, row.why), []).append(row.case)
    return [
        f"{system}: {cases[0]}{f' and {len(cases) - 1} more' if len(cases) > 1 else ''}: {why}"
        for (system, why), cases in said.items()
    ]


# --- drawing ---


def sweep(panel: Any, rows: Sequence[Row], size: Callable[[Row], float], title: str, label: str) -> None:
    """A line a system over a swept size, the band from p10 to p90."""
    systems = list(dict.fromkeys(row.system for row in rows))
    for number, system in enumerate(systems):
        points = sorted((size(row), row) for row in rows if row.system == system and row.median)
        if not points:
            continue
        xs, found = zip(*points, strict=True)
        wide = 2.5 if is_ours(system) else 1.2
        panel.plot(xs, [row.median for row in found], label=system, color=f"C{number}", marker="o",
                   markersize=3, linewidth=wide)  # fmt: skip
        panel.fill_between(xs, [r.p10 for r in found], [r.p90 for r in found], color=f"C{number}", alpha=0.12)
    unit = next((row.unit for row in rows), "")
    panel.set(title=title, xscale="log", yscale="log", xlabel=label, ylabel=unit)
    if panel.get_legend_handles_labels()[1]:
        panel.legend(fontsize="small")


def bars(panel: Any, rows: Sequence[Row], title: str, *, log: bool = True) -> None:
    """A bar a row, with its spread."""
    rows = [row for row in rows if row.median]
    colors = {system: f"C{number}" for number, system in enumerate(dict.fromkeys(r.system for r in rows))}
    several = len({row.case for row in rows}) > 1
    labels = [f"{row.case}: {row.system}" if several else row.system for row in rows]
    spread = [
        [max(0.0, row.median - row.p10) for row in rows],
        [max(0.0, row.p90 - row.median) for row in rows],
    ]
    places = range(len(rows))
    panel.barh(places, [row.median for row in rows], xerr=spread, color=[colors[r.system] for r in rows])
    panel.set_yticks(places, labels)
    panel.invert_yaxis()
    panel.set(title=title, xlabel=rows[0].unit if rows else "", xscale="log" if log and rows else "linear")


def save(results: Results, path: Path, draw: Callable[[Results, Any], None]) -> None:
    """`draw(results, figure)` as a PNG that says where its figures come from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(layout="constrained")
    draw(results, figure)
    figure.suptitle(f"{results.device}, commit {results.commit[:12]}, {results.when}; medians, p10 to p90")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
