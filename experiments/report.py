"""What was found, in words and tables: `python -m experiments.report [--store] [--check]`

Makes `experiments/REPORT.md`, the part of README.md between its markers, and the plots, from the stored JSON
files: no figure is typed. Beside each stands what the paper claims, and the strongest competitor, also where
it wins. `--store` first takes what was measured on this machine (experiments/results/local/) into them.
`--check` writes nothing and fails where a text is not what the files say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .all import NAMES
from .harness import LOCAL, ROOT, STORED, Results, Row
from .present import advantage, amount, best, failures, groups, is_ours, save

REPORT, README = ROOT / "experiments" / "REPORT.md", ROOT / "README.md"
BEGIN, END = "<!-- results: made by python -m experiments.report -->", "<!-- /results -->"

CLAIMS = [
    (r"independent/\d+/f32|dependent/\d+/f32", "15.3x eager"),
    (r"variable/.*/stable", "graphs 6.2x eager"),
    (r"variable/", "graphs 2.1x eager; gpuos unchanged by shape"),
    (r"one_at_a_time|round_trip|submit_wait", "submission < 100 ns, 3-7 us a launch"),
    (r"attention_", "8.7x eager (140 -> 16 us a token); graphs 4.3x"),
    (r"mixed_", "23.1x eager"),
    (r"contention/", "< 100 ns, negligible contention to 64 threads"),
    (r"tenancy/.*width", "3.4x in MIG partitions"),
    (r"energy/", "-20 to -22 % energy"),
    (r"tier0/|pause_|cold/|cached/", "ms, no stop"),
]
"""(pattern of a case, what arXiv 2604.17861 says of it, on an H100)."""

CPU_REASON = """On a CPU there is no launch to save, and NumPy's loops are as good as the CPU machine's,
which is there for tests and for reading along."""
REASONS = [
    (
        r"mixed_",
        """torch.compile fuses the five operations into one kernel that moves a third of the memory;
gpuos runs five tasks, or one in its interpreter at some 30 instructions an operation.""",
    ),
    (
        r"(in)?dependent/attention|attention_|(breakeven|variable)/sdpa",
        """Attention to a long context is memory traffic, not launches, and the kernels behind
PyTorch's SDPA use tensor cores and asynchronous copies; a chain of tiled tasks also pays a
hop between blocks a task.""",
    ),
    (
        r".*matvec",
        """Reading a matrix is bound by bandwidth: the launch is a small part of it, and cuBLAS reads
faster.""",
    ),
    (
        r"dependent/|breakeven/.*/dependent",
        """A chain runs in one block, on one multiprocessor; a graph node of many elements has all of
them. From some 16,384 elements on, and for bodies that are called rather than inlined, that
is more than a node costs.""",
    ),
    (
        r"submit_wait|one_at_a_time|.*/python",
        """A call from Python pays for checks in Python, a graph is replayed by one call. Batches and
programs are the remedy.""",
    ),
    (r"breakeven/|independent/", "Beyond this size the operation itself is what takes the time."),
    (r"tenancy/", "Executors of several processes take turns on the GPU like any kernels."),
    (r"energy/", "A system that takes longer pays for the GPU's idle power too."),
]
"""(pattern of a case, why gpuos loses there), the first that matches."""

HEADLINES: list[tuple[str, ...]] = [
    ("Independent adds, 1,024 f32, known to be", "microbench", "independent/1024/f32", "15.3x", "gpuos"),
    ("The same, their order found", "microbench", "independent/1024/f32", "15.3x", "gpuos/ordered"),
    ("Dependent adds, 1,024 f32", "microbench", "dependent/1024/f32", ""),
    ("Independent adds, a new shape each", "microbench", "variable/1024/f32", "15.3x"),
    ("Mixed pipeline of 5, 256 in flight", "ordering", "mixed_in_flight/2048/f32", "23.1x"),
    ("Mixed pipeline of 5, one after another", "ordering", "mixed_dependent/2048/f32", "23.1x"),
    ("Attention, 32 x 128, 512 keys", "attention_decode", "attention_decode/32x128x512/f16", "8.7x"),
    ("Attention, growing from 512 keys", "attention_decode", "attention_growing/32x128x512/f16", "8.7x"),
    ("Attention, growing from 2,048 keys", "attention_decode", "attention_growing/32x128x2048/f16", "8.7x"),
    ("Energy of an independent add", "energy", "energy/independent/1024/f32", "1.28x"),
    ("Submit one add from Python and wait", "microbench", "submit_wait/1024/f32", ""),
]
"""(what it is, experiment, case, the paper's gain over eager on an H100) for the README; and which of gpuos's
systems is meant, where it is not the best."""


def stored(folder: Path = STORED) -> list[Results]:
    """All stored results: GPUs first, then in the order of the experiments."""
    found = [Results.load(path) for path in sorted(folder.glob("*.json"))]
    place = {name: number for number, name in enumerate(NAMES)}
    return sorted(found, key=lambda r: (r.machine != "cuda", r.device, place.get(r.experiment, 99)))


def store(source: Path = LOCAL, target: Path = STORED) -> list[str]:
    """Move what was measured into the stored results, in place of the same experiment on the same device;
    names of the files. A quick run is a check, not a result, and so is an unfinished one: they stay."""
    unfit = ("-quick.", "-unfinished.")
    names = sorted(path.name for path in source.glob("*.json") if not any(u in path.name for u in unfit))
    for name in names:
        (source / name).replace(target / name)
        (source / name).with_suffix(".png").unlink(missing_ok=True)  # drawn anew from the file
    return names


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others figures."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * 1}{'---:|' * (len(heads) - 1)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def claim(case: str) -> str:
    return next((text for pattern, text in CLAIMS if re.match(pattern, case)), "")


def rivals(rows: Iterable[Row]) -> list[Row]:
    """What is not gpuos, and does not run beside it."""
    return [row for row in rows if not is_ours(row.system) and not row.system.startswith("beside/")]


def ours_and_best(rows: Sequence[Row]) -> tuple[Row | None, Row | None, float | None]:
    """gpuos at its best, the strongest competitor, and how many times better gpuos is."""
    ours, other = best(row for row in rows if is_ours(row.system)), best(rivals(rows))
    return ours, other, advantage(ours, other)


def measurements(results: Results) -> str:
    """The table of one file."""
    found = {key: rows for key, rows in groups(results).items() if key[1] != "examples"}
    systems = list(dict.fromkeys(row.system for rows in found.values() for row in rows))
    several = len({metric for _, metric in found}) > 1
    heads = ["case", *(["metric"] if several else []), *systems, "gpuos p10-p90", "strongest competitor",
             "paper's claim"]  # fmt: skip
    lines = []
    for (case, metric), rows in found.items():
        by_system = {row.system: row for row in rows}
        ours, other, gain = ours_and_best(rows)
        spread = ""
        if ours is not None and ours.p10 is not None:
            ends = [Row("", "", ours.metric, ours.unit, value) for value in (ours.p10, ours.p90)]
            spread = " - ".join(amount(each) for each in ends)
        verdict = f"{other.system}, gpuos {gain:.3g}x" if other is not None and gain else ""
        cells = [case, *([metric] if several else [])]
        cells += [amount(by_system.get(system)) for system in systems]
        lines.append([*cells, spread, verdict, claim(case)])
    return markdown(heads, lines)


def examples(results: Results) -> str:
    """One sentence about operators held to their specs."""
    tried = [row for row in results.rows if row.metric == "examples"]
    if not tried:
        return ""
    wrong = [row for row in tried if row.why]
    said = f"{len(tried) - len(wrong)} of {len(tried)} operators equal their NumPy spec on "
    said += f"{tried[0].repeats:,} drawn examples each."
    return "\n\n" + " ".join([said, *(f"{row.case}: {row.why}." for row in wrong)])


def losses(every: Sequence[Results]) -> str:
    """Where a competitor is better, by reason."""
    by_reason: dict[str, list[str]] = {}
    for results in every:
        for (case, metric), rows in groups(results).items():
            ours, other, gain = ours_and_best(rows)
            if gain is None or gain >= 1 or metric == "breakeven":
                continue
            why = next((text for pattern, text in REASONS if re.match(pattern, case)), "Not explained yet.")
            why = CPU_REASON if results.machine == "cpu" else why
            line = f"{case}{f' ({metric})' if not metric.startswith('time_per') else ''}: {amount(ours)}, "
            line += f"{other.system if other else ''} {amount(other)}, {1 / gain:.3g}x better"
            by_reason.setdefault(why, []).append(f"- {results.device}, {line}")
    return "\n\n".join(f"{' '.join(why.split())}\n\n" + "\n".join(lines) for why, lines in by_reason.items())


def question(experiment: str) -> str:
    """The first sentence of the experiment's docstring."""
    if find_spec(f"experiments.{experiment}") is None:
        return ""
    text = import_module(f"experiments.{experiment}").__doc__ or experiment
    return text.split("`python")[0].split("\n")[0].strip()


def section(results: Results) -> str:
    """One file."""
    png = (STORED / results.file_name).with_suffix(".png")
    plot = f"![{results.experiment} on {results.device}](results/{png.name})\n\n" if png.exists() else ""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    said = [f"- {line}" for line in failures(results) if "examples/" not in line]
    missing = "\n\nNo figure:\n\n" + "\n".join(said) if said else ""
    driver = f", driver {results.driver}" if results.driver else ""
    return (
        f"### {results.experiment}: {question(results.experiment)}\n\n"
        f"{results.device}{driver}, commit {results.commit[:12]}, {results.when}; {versions}\n\n"
        f"{plot}{measurements(results)}{examples(results)}{missing}\n"
    )


HEAD = """# What was measured

Made by `python -m experiments.report` from [results/](results/). Every figure is a median; its spread and
repeats are in the file. `gpuos 2x` beside a competitor means that gpuos is twice as good; below 1x it loses.
Ratios are formed within one file, of interleaved runs. The claims of the paper
([arXiv 2604.17861](https://arxiv.org/abs/2604.17861)) are for an H100; they are repeated, not measured."""


def document(every: Sequence[Results]) -> str:
    """REPORT.md."""
    parts = [HEAD]
    lost = losses(every)
    if lost:
        parts.append(f"## Where gpuos loses\n\n{lost}")
    for device in dict.fromkeys(results.device for results in every):
        parts.append(f"## {device}")
        parts += [section(results) for results in every if results.device == device]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def headline(results: Results, text: str, case: str, paper: str, system: str = "") -> list[str] | None:
    """A line of the README's table, None where the case was not measured."""
    rows = [row for row in results.rows if row.case == case and row.metric != "power"]
    if system:
        rows = [row for row in rows if row.system == system or not row.system.startswith("gpuos")]
    ours, other, gain = ours_and_best(rows)
    if ours is None:
        return None
    by_system = {row.system: row for row in rows}
    eager = by_system.get("eager/naive") or by_system.get("eager")
    graph = by_system.get("graph") or by_system.get("graph/recapture")
    against = advantage(ours, eager)
    variant = ours.system.partition("/")[2]
    return [
        text,
        amount(eager),
        amount(graph),
        amount(ours) + (f" ({variant})" if variant else ""),
        f"{against:.3g}x" if against else "",
        f"{other.system} {amount(other)}, {gain:.3g}x" if other is not None and gain else "",
        paper,
    ]


def front(every: Sequence[Results]) -> str:
    """The README's part: a table and a plot of the first GPU."""
    device = next((results.device for results in every if results.machine == "cuda"), None)
    files = {results.experiment: results for results in every if results.device == device}
    lines = [
        line
        for text, experiment, case, *rest in HEADLINES
        if experiment in files and (line := headline(files[experiment], text, case, *rest)) is not None
    ]
    heads = ["one operation", "eager PyTorch", "CUDA Graph", "gpuos", "against eager", "strongest competitor",
             "paper, H100"]  # fmt: skip
    plots = [(STORED / r.file_name).with_suffix(".png") for r in (files.get("microbench"),) if r is not None]
    drawn = "".join(
        f"\n\n![Time per operation on {device}](experiments/results/{path.name})" for path in plots
    )
    return f"{device}, medians:\n\n{markdown(heads, lines)}{drawn}"


def with_front(readme: str, text: str) -> str:
    """The README with its part replaced. Raises ValueError where the markers are not there."""
    before, marker, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise ValueError(f"README.md lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def redraw(every: Sequence[Results]) -> None:
    """All plots of experiments that draw."""
    for results in every:
        name, path = f"experiments.{results.experiment}", (STORED / results.file_name).with_suffix(".png")
        module = import_module(name) if find_spec(name) else None
        if module is not None and hasattr(module, "draw"):
            save(results, path, module.draw)
        elif module is not None and hasattr(module, "plot"):
            module.plot(results, path)


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where something differs.")
    ] = False,
    plots: Annotated[bool, typer.Option(help="Draw the plots anew.")] = True,
    take: Annotated[bool, typer.Option("--store", help="First store what was measured here.")] = False,
) -> None:
    """Make REPORT.md, the README's tables and the plots from the stored results."""
    if take and check:
        raise typer.BadParameter("--check writes nothing: give it without --store")
    for name in store() if take else []:
        typer.echo(f"{name} stored")
    every = stored()
    if plots and not check:
        redraw(every)
    texts = {REPORT: document(every), README: with_front(README.read_text(encoding="utf-8"), front(every))}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if check:
            typer.echo(f"{path.relative_to(ROOT)} is not what the results say: python -m experiments.report")
        else:
            path.write_text(texts[path], encoding="utf-8")
            typer.echo(f"{path.relative_to(ROOT)} written")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
