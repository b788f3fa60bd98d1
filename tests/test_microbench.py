"""experiments/microbench.py: one command measures and stores everything, and a wrong system stops it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda
from rich.console import Console

from experiments import microbench
from experiments.baselines import COMPETITORS, OUTPUTS, Call, DeviceSlab, HostSlab, expected
from experiments.harness import ROOT, Case, Results, Row, WrongResult, baseline, measure

POOL: list[Call] = [((0, i), (1, i), (OUTPUTS, i), 64 - i) for i in range(32)]
CHAIN: list[Call] = [((0, 0), (1, 0), (OUTPUTS, 0), 64)] + [((OUTPUTS, 0), (1, 0), (OUTPUTS, 0), 64)] * 31


def host_memory() -> np.ndarray:
    host = np.random.default_rng(1).standard_normal((3, 32, 64)).astype(np.float32)
    host[OUTPUTS] = np.nan
    return host


def case_of(slab: HostSlab | DeviceSlab, machine: str, calls: list[Call]) -> Case:
    host = host_memory()
    binds = COMPETITORS[machine]
    systems = [baseline(name, lambda bind=bind: bind(slab, calls)) for name, bind in binds.items()]
    return Case("add", systems, lambda: slab.write(host), slab.read, expected(host, calls, np.add))


def test_what_is_expected_is_nan_where_no_call_writes() -> None:
    host = host_memory()
    want = expected(host, POOL, np.add)
    assert np.array_equal(want[3, :61], host[0, 3, :61] + host[1, 3, :61])
    assert np.isnan(want[3, 61:]).all()
    assert np.isnan(host[OUTPUTS]).all()


@pytest.mark.parametrize("calls", [POOL, CHAIN], ids=["pool", "chain"])
def test_baselines_of_the_cpu_compute_what_they_should(calls: list[Call]) -> None:
    rows = measure([case_of(HostSlab(host_memory()), "cpu", calls)], rounds=2)
    assert [(row.system, row.repeats, row.why) for row in rows] == [("numpy", 2, "")]


@pytest.mark.gpu
@pytest.mark.skipif(not cuda.is_available(), reason="no GPU: that the CUDA baselines work stays unproved")
@pytest.mark.parametrize("calls", [POOL, CHAIN], ids=["pool", "chain"])
def test_baselines_of_the_gpu_compute_what_they_should(calls: list[Call]) -> None:
    case = case_of(DeviceSlab(host_memory()), "cuda", calls)
    if calls is CHAIN:
        case.systems = [system for system in case.systems if system.name != "graph/branches"]
    reasons = [row.why for row in measure([case], rounds=2) if row.why]
    assert all("No module named" in why for why in reasons), reasons


@pytest.mark.skipif(cuda.is_available(), reason="a GPU: that baselines can do without one stays unproved")
def test_a_baseline_without_its_gpu_or_package_has_a_reason() -> None:
    rows = measure([case_of(HostSlab(host_memory()), "cuda", POOL)], rounds=1)
    assert {row.system: bool(row.why) for row in rows} == dict.fromkeys(COMPETITORS["cuda"], True)


@pytest.mark.slow
def test_one_command_measures_every_question_on_the_cpu(tmp_path: Path) -> None:
    stored, drawn = tmp_path / "found.json", tmp_path / "found.png"
    command = [sys.executable, "-m", "experiments.microbench", "--machine", "cpu", "--quick"]
    command += ["--json", str(stored), "--plot", str(drawn)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one_at_a_time/1024/f32" in done.stdout
    assert drawn.read_bytes().startswith(b"\x89PNG")

    results = Results.load(stored)
    assert (results.machine, results.driver) == ("cpu", None)
    swept = {f"{kind}/{n}/f32" for kind in microbench.SWEPT for n in microbench.QUICK_SIZES}
    swept |= {f"variable/{n}/f32/stable" for n in microbench.QUICK_SIZES}
    single = {"one_at_a_time/1024/f32", "submit_wait/1024/f32", "round_trip/1024/f32", "relaunch/nop"}
    assert {row.case for row in results.rows} == swept | single
    assert all(row.median and row.p10 and row.p90 and row.repeats >= 5 for row in results.rows)
    assert {row.system for row in results.rows} == {"gpuos-cpu", "gpuos-cpu/prepare", "numpy"}
    assert json.loads(stored.read_text())["experiment"] == "microbench-quick"


@pytest.mark.slow
def test_results_that_differ_from_the_spec_stop_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = {"add": SimpleNamespace(spec=lambda a, b: a - b)}
    monkeypatch.setattr(microbench.gpuos, "operators", lambda: operators)
    with pytest.raises(WrongResult, match="independent/1024/f32: gpuos-cpu has"):
        microbench.run("cpu", True, Console(quiet=True))


def test_the_table_shows_the_strongest_competitor_and_who_failed() -> None:
    rows = [
        Row("independent/64/f32", "gpuos", "time_per_op", "ns", 50.0, 50.0, 50.0, 30),
        Row("independent/64/f32", "eager", "time_per_op", "ns", 6500.0, 6500.0, 6500.0, 30),
        Row("independent/64/f32", "cupy", "time_per_op", "ns", why="not installed"),
        Row("independent/64/f32", "graph", "time_per_op", "ns", 950.0, 950.0, 950.0, 30),
        Row("variable/64/f32", "gpuos", "time_per_op", "ns", 55.0, 55.0, 55.0, 30),
        Row("variable/64/f32", "graph/recapture", "time_per_op", "ns", 22000.0, 1.0, 1.0, 30),
        Row("variable/64/f32/stable", "gpuos", "time_per_op", "ns", 50.0, 50.0, 50.0, 30),
    ]
    results = Results("microbench", "NVIDIA H200", "cuda", rows=rows)
    printed = io.StringIO()
    Console(width=200, file=printed).print(microbench.table(results))
    lines = {line.split("│")[1].strip(): line for line in printed.getvalue().splitlines() if "/64/" in line}
    independent = [cell.strip() for cell in lines["independent/64/f32"].split("│")[1:-1]]
    assert independent[1:] == ["50 ns", "6.5 µs", "failed", "950 ns", "", "130x", "19x", "graph 19x"]
    assert "graph/recapture 400x" in lines["variable/64/f32"]
    assert microbench.new_shapes(results).endswith("1.10 (64)")
