"""experiments/report.py: what README and REPORT say is what the stored files say, losses included."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import report
from experiments.breakeven import crossing
from experiments.harness import Results, Row
from experiments.present import amount


def row(case: str, system: str, median: float | None, metric: str = "time_per_op", unit: str = "ns") -> Row:
    why = "" if median else "not here"
    return Row(case, system, metric, unit, median, median, median, 9 if median else 0, why)


MIXED = [
    row("mixed_dependent/2048/f32", "gpuos", 2300.0, "time_per_pipeline"),
    row("mixed_dependent/2048/f32", "eager", 44000.0, "time_per_pipeline"),
    row("mixed_dependent/2048/f32", "graph/compile", 1100.0, "time_per_pipeline"),
    row("mixed_dependent/2048/f32", "compile", None, "time_per_pipeline"),
]


def results(*rows: Row, experiment: str = "mixed_pipeline", machine: str = "cuda") -> Results:
    return Results(
        experiment, "NVIDIA H200", machine, "580", "c0ffee", "2026-12-02T00:00:00Z", {}, list(rows)
    )


def test_the_readme_and_the_report_are_what_the_stored_results_say() -> None:
    every = report.stored()
    readme = report.README.read_text(encoding="utf-8")
    assert report.with_front(readme, report.front(every)) == readme, "run python -m experiments.report"
    assert report.REPORT.read_text(encoding="utf-8") == report.document(every), "as above"


def test_what_was_measured_here_is_stored_when_asked_and_quick_runs_are_not(tmp_path: Path) -> None:
    local, kept = tmp_path / "local", tmp_path
    old, new = results(*MIXED, experiment="kept"), results(*MIXED, experiment="measured")
    old.write(kept / old.file_name)
    new.write(kept / new.file_name)
    new.commit = "new"
    new.write(local / new.file_name)
    (local / new.file_name).with_suffix(".png").write_bytes(b"")
    results(*MIXED, experiment="measured-quick").write(local / "measured-quick.nvidia-h200.json")
    assert [each.commit for each in report.stored(kept)] == ["c0ffee", "c0ffee"]  # nothing of local/
    assert report.store(local, kept) == [new.file_name]
    commits = {each.experiment: each.commit for each in report.stored(kept)}
    assert commits == {"kept": "c0ffee", "measured": "new"}
    assert [path.name for path in local.iterdir()] == ["measured-quick.nvidia-h200.json"]


def test_a_loss_is_listed_with_its_factor_and_a_reason() -> None:
    said = report.losses([results(*MIXED)])
    assert "mixed_dependent/2048/f32: 2.3 µs, graph/compile 1.1 µs, 2.09x better" in said
    assert said.startswith("torch.compile fuses")


def test_the_table_names_the_strongest_competitor_also_where_it_wins() -> None:
    text = report.section(results(*MIXED))
    assert "graph/compile, gpuos 0.478x" in text and "23.1x eager" in text
    assert "compile: mixed_dependent/2048/f32: not here" in text


def test_the_front_compares_with_eager_and_the_strongest() -> None:
    line = report.front([results(*MIXED, experiment="ordering")]).splitlines()[4]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:] == ["44 µs", "", "2.3 µs", "19.1x", "graph/compile 1.1 µs, 0.478x", "23.1x"]


def test_more_is_better_for_rates() -> None:
    rows = [
        row("tenancy/2", "gpuos", 2e6, "throughput", "1/s"),
        row("tenancy/2", "eager", 1e6, "throughput", "1/s"),
    ]
    assert report.losses([results(*rows, experiment="tenancy")]) == ""
    assert "eager, gpuos 2x" in report.section(results(*rows, experiment="tenancy"))


def test_a_readme_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README\.md lacks"):
        report.with_front("# nothing", "text")


@pytest.mark.parametrize(
    ("points", "size"),
    [
        ([(100, 4.0), (10_000, 0.25)], 1000.0),
        ([(100, 4.0), (1000, 2.0)], None),
        ([(100, 0.5), (1000, 0.4)], None),
        ([(100, 0.9), (1000, 2.0), (100_000, 0.5)], 10_000.0),
    ],
    ids=["between", "never", "always", "for good"],
)
def test_the_break_even_is_where_the_competitor_takes_over_for_good(
    points: list[tuple[int, float]], size: float | None
) -> None:
    found, why = crossing(points)
    assert found == size and bool(why) == (size is None)


def test_amounts_are_read_at_once() -> None:
    assert amount(row("", "", 2.0e6)) == "2 ms"
    assert amount(row("", "", 1.25e6, "throughput", "1/s")) == "1.25 M/s"
    assert amount(row("", "", 12.0, "power", "W")) == "12 W"
    assert amount(row("", "", 3.1, "time", "s")) == "3.1 s"
