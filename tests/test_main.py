"""`python -m gpuos_numba ops` tells what the table holds, and refuses what it does not."""

from __future__ import annotations

import json

from typer.testing import CliRunner

import gpuos_numba
from gpuos_numba.__main__ import app

RUN = CliRunner()


def test_ops_lists_every_operator() -> None:
    result = RUN.invoke(app, ["ops", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == list(gpuos_numba.operators())
    assert rows["add"]["inputs"] == {"fewest": 2, "most": 2} and "bfloat16" in rows["add"]["dtypes"]
    assert rows["fill"]["parameters"] == {"value": "required"}
    assert rows["sum"]["op_ids"] and rows["softmax"]["tolerance"]["float32"] > 0


def test_ops_shows_a_table_and_one_operator_in_full() -> None:
    table = RUN.invoke(app, ["ops"], env={"COLUMNS": "200"})
    assert table.exit_code == 0 and f"{len(gpuos_numba.operators())} operators" in table.output
    one = RUN.invoke(app, ["ops", "rms_norm"])
    assert one.exit_code == 0 and "rms_norm" in one.output and "eps" in one.output


def test_ops_names_what_it_does_not_know() -> None:
    result = RUN.invoke(app, ["ops", "twist"])
    assert result.exit_code == 2 and "twist" in result.output
