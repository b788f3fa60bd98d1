"""experiments/: everybody's way through each workload gives what the specs say, at sizes that take no time.

That the commands measure everything on the CPU is the slow test; on a GPU, `python -m experiments.all`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import attention_decode, coexistence, contention, energy, mixed_pipeline, tenancy
from experiments.all import NAMES, available
from experiments.harness import ROOT, Case, Results, WrongResult, measure
from experiments.lab import Lab
from experiments.workloads import WORKLOADS, Calls, Workload
from gpuos_numba import Runtime

OWN = ("mixed_pipeline", "attention_decode", "variable_shapes", "breakeven", "contention", "coexistence",
       "tenancy", "energy")  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Runtime("cpu") as rt:
        yield Lab(rt, quick=True)


def medians(case: Case) -> dict[str, float | None]:
    """Verified, measured once, verified again."""
    return {row.system: row.median for row in measure([case], rounds=1)}


def test_every_experiment_says_its_question_and_its_command() -> None:
    assert set(OWN) <= set(available()) <= set(NAMES)
    for name in available():
        text = import_module(f"experiments.{name}").__doc__ or ""
        assert text.split("\n")[0].partition("? `")[1] and f"experiments.{name}" in text, name


@pytest.mark.parametrize("dependent", [False, True], ids=["in flight", "dependent"])
def test_mixed_pipelines_give_what_the_specs_say(
    lab: Lab, dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_pipeline, "N", 64)
    found = medians(mixed_pipeline.case(lab, "mixed", dependent, shrink=0 if dependent else 1))
    assert found["gpuos-cpu"] and found["gpuos-cpu/injected"] and found["numpy"]


@pytest.mark.parametrize("kind", ["fixed", "growing", "paged"])
def test_decoded_tokens_are_those_of_the_f64_spec(lab: Lab, kind: str) -> None:
    shape = (2, 64, 32)
    decode = (
        attention_decode.Paged(lab, shape, 3)
        if kind == "paged"
        else attention_decode.Decode(lab, shape, 3, kind == "growing")
    )
    found = medians(decode.case("attention", decode.systems()))
    assert all(found.values()) and set(found) == {"gpuos-cpu", "gpuos-cpu/prepare", "numpy"}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.operator)
def test_numpy_says_each_workload_as_the_operator_does(lab: Lab, workload: Workload) -> None:
    sizes = [8 * 4096, 4 * 4096] if workload.operator == "sdpa" else [256, 121]
    calls = Calls(lab, workload, sizes, 4)
    found = medians(calls.case("case", [calls.ours(), *calls.others(["numpy", "eager"])]))
    assert found["gpuos-cpu"] and set(found) == {"gpuos-cpu", "numpy"}
    assert found["numpy"] or workload.operator == "gelu"


def test_producers_in_machine_code_lose_no_task(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "TASKS", 1024)
    monkeypatch.setattr(contention, "PYTHON_TASKS", 64)
    before = lab.rt.stats().submitted
    rows = contention.rows(lab, 4)
    bursts = 1 + contention.QUICK_ROUNDS
    assert lab.rt.stats().submitted - before >= bursts * (1024 + 64)
    assert {row.metric for row in rows} == {"throughput", "submit_p50", "submit_p99"}
    assert all(row.median for row in rows)


def test_a_burst_whose_sums_are_wrong_stops_the_experiment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "TASKS", 64)
    producers = contention.Producers(lab, 1)
    producers.expected = producers.expected + 1
    with pytest.raises(WrongResult, match="contention/1"):
        producers.sample(*producers.native(), lambda: None, lambda: lab.rt.synchronize(10))


def test_a_starved_kernel_is_a_row_and_freed_by_ending_the_executor(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coexistence, "STARVED_S", 0.05)
    with Runtime("cpu", lease_s=None, idle_s=None) as rt:
        load = coexistence.Load(lab, rt)
        stuck = coexistence.Large("gemm", lambda: None, lambda: rt._closed)
        times, _, why = coexistence.beside(stuck, load, runs=2)
    assert times == [] and why.startswith("starved: gemm had not finished")


def test_energy_is_joules_over_operations() -> None:
    joules = iter(range(10, 100, 10))
    used, took, runs = energy.window(lambda: float(next(joules)), 0.02, lambda: time.sleep(0.001))
    assert used == 10.0 and took >= 0.02 and 1 <= runs <= 20


def test_a_tenant_that_failed_is_a_reason_and_no_figure() -> None:
    rows = tenancy.summary("tenancy/2", "graph", [{"operations": 5, "times": [10]}, {"why": "no GPU"}])
    assert all(row.median is None and row.why == "no GPU" for row in rows)
    rate, *_ = tenancy.summary("tenancy/2", "gpuos", [{"operations": 5, "times": [10]}] * 2)
    assert rate.median == 1e9


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_one_command_measures_and_draws_on_the_cpu(name: str, tmp_path: Path) -> None:
    stored = tmp_path / "found.json"
    command: list[Any] = [sys.executable, "-m", f"experiments.{name}", "--machine", "cpu", "--quick"]
    done = subprocess.run([*command, "--json", stored], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = Results.load(stored)
    assert results.rows and all(np.isfinite(row.median) if row.median else row.why for row in results.rows)
    assert stored.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
