"""experiments/harness.py: what it measures is right, in turn, and stored so that it can be told again."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments.harness import STORED, Case, Results, Row, System, WrongResult, baseline, measure


class Doubling:
    """A case whose systems are to write 2, 4, 6, 8."""

    def __init__(self) -> None:
        self.inputs = np.arange(1, 5, dtype=np.float32)
        self.out = np.empty(4, np.float32)
        self.ran: list[str] = []

    def system(self, name: str, compute: Callable[[], None] | None = None, **settings: object) -> System:
        def run() -> None:
            self.ran.append(name)
            (compute or self.double)()

        return System(name, run, **settings)  # type: ignore[arg-type]

    def double(self) -> None:
        np.multiply(self.inputs, 2, out=self.out)

    def case(self, *systems: System, **settings: object) -> Case:
        poison = lambda: self.out.fill(np.nan)  # noqa: E731
        want = np.array([2, 4, 6, 8], np.float32)
        return Case("double/4/f32", list(systems), poison, self.out.copy, want, **settings)  # type: ignore[arg-type]


@pytest.fixture
def doubling() -> Doubling:
    return Doubling()


def test_a_wrong_result_names_case_system_and_element(doubling: Doubling) -> None:
    def one_off() -> None:
        doubling.double()
        doubling.out[2] = 7

    message = r"double/4/f32: sloppy has .*7.* instead of .*6.* at \(2,\), 1 of 4"
    with pytest.raises(WrongResult, match=message):
        measure([doubling.case(doubling.system("right"), doubling.system("sloppy", one_off))], rounds=1)


def test_a_system_that_skips_work_is_not_saved_by_what_another_wrote(doubling: Doubling) -> None:
    with pytest.raises(WrongResult, match=r"lazy has .*nan"):
        measure([doubling.case(doubling.system("right"), doubling.system("lazy", lambda: None))], rounds=1)


def test_a_system_that_goes_wrong_while_it_is_timed_is_found(doubling: Doubling) -> None:
    def tires() -> None:
        if len(doubling.ran) < 5:
            doubling.double()

    with pytest.raises(WrongResult, match="tiring"):
        measure([doubling.case(doubling.system("tiring", tires))], rounds=10)


def test_nan_equals_nan_and_tolerance_is_relative(doubling: Doubling) -> None:
    def nearly() -> None:
        np.multiply(doubling.inputs, np.float32(2 + 1e-5), out=doubling.out)

    measure([doubling.case(doubling.system("near", nearly), tolerance=1e-4)], rounds=1)
    with pytest.raises(WrongResult):
        measure([doubling.case(doubling.system("near", nearly), tolerance=1e-7)], rounds=1)
    case = doubling.case(doubling.system("nan", lambda: doubling.out.fill(np.nan)))
    case.expected = np.full(4, np.nan, np.float32)
    measure([case], rounds=1)


def test_systems_take_turns_and_another_one_begins_each_round(doubling: Doubling) -> None:
    case = doubling.case(*(doubling.system(name, warm=0) for name in "abc"))
    measure([case], rounds=4)
    assert "".join(doubling.ran[3:-3]) == "abcbcacababc"


def test_a_dear_system_takes_part_in_some_rounds_only(doubling: Doubling) -> None:
    rows = measure([doubling.case(doubling.system("a"), doubling.system("dear", every=5))], rounds=10)
    assert [row.repeats for row in rows] == [10, 2]


def test_before_and_the_warm_run_come_ahead_of_each_timed_run(doubling: Doubling) -> None:
    system = doubling.system("run", before=lambda: doubling.ran.append("before"))
    measure([doubling.case(system)], rounds=2)
    assert doubling.ran == ["before", "run", *["before", "run", "run"] * 2, "before", "run"]


def test_statistics_are_percentiles_of_all_samples_in_the_unit_of_the_case(doubling: Doubling) -> None:
    batches = iter([np.arange(0, 50) * 1e3, np.arange(50, 101) * 1e3])
    case = doubling.case(doubling.system("self_timed", sample=lambda: next(batches)), unit="us")
    (row,) = measure([case], rounds=2)
    assert (row.p10, row.median, row.p90, row.repeats, row.unit) == (10.0, 50.0, 90.0, 101, "us")


def test_time_is_divided_by_the_operations_of_a_run(
    doubling: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**9, 8000))
    monkeypatch.setattr("experiments.harness.time.perf_counter_ns", lambda: next(clock))
    (row,) = measure([doubling.case(doubling.system("batch", count=100))], rounds=3)
    assert (row.median, row.p10, row.p90) == (80.0, 80.0, 80.0)


def test_a_baseline_that_fails_is_a_row_with_a_reason(doubling: Doubling) -> None:
    def absent() -> Callable[[], None]:
        raise ModuleNotFoundError("No module named 'cupy'")

    def breaks_when_timed() -> None:
        if doubling.ran.count("timed") > 1:
            raise RuntimeError("out of memory\nlong trace")
        doubling.double()

    systems = [
        doubling.system("gpuos", before=lambda: doubling.ran.append("timed")),
        doubling.system("eager", breaks_when_timed),
        baseline("cupy", absent),
    ]
    ours, broken, missing = measure([doubling.case(*systems)], rounds=3)
    assert ours.repeats == 3
    assert (broken.median, broken.repeats, broken.why) == (None, 0, "RuntimeError: out of memory")
    assert (missing.median, missing.why) == (None, "ModuleNotFoundError: No module named 'cupy'")


def test_a_required_system_fails_loudly_and_the_collector_is_on_again(doubling: Doubling) -> None:
    def breaks() -> None:
        if len(doubling.ran) > 3:
            raise RuntimeError("task lost")
        doubling.double()

    with pytest.raises(RuntimeError, match="task lost"):
        measure([doubling.case(doubling.system("gpuos", breaks, required=True))], rounds=5)
    assert gc.isenabled()


@pytest.fixture
def results() -> Results:
    rows = [
        Row("add/64/f32", "gpuos", "time_per_op", "ns", 50.0, 45.0, 60.0, 30),
        Row("add/64/f32", "eager", "time_per_op", "ns", 6000.0, 5500.0, 7000.0, 30),
        Row("add/64/f32", "cupy", "time_per_op", "ns", why="not installed"),
        Row("add/64/f32", "numpy", "latency", "ns", 1.0, 1.0, 1.0, 1),
        Row("add/64/f32/stable", "gpuos", "time_per_op", "ns", 40.0, 40.0, 40.0, 30),
    ]
    return Results("demo", "NVIDIA H200 (TM) CPU", "cuda", driver="580.1", rows=rows)


def test_the_file_has_the_documented_fields_and_reads_back(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.json"
    results.write(path)
    stored = json.loads(path.read_text())
    head = {"experiment", "device", "driver", "machine", "commit", "when", "versions", "rows"}
    assert set(stored) == head
    assert stored["versions"]["numpy"] == np.__version__
    assert np.datetime64(stored["when"].removesuffix("Z")) > np.datetime64("2026-01-01")
    measured = {"case", "system", "metric", "unit", "median", "p10", "p90", "repeats"}
    assert set(stored["rows"][0]) == measured
    assert set(stored["rows"][2]) == measured | {"why"}
    assert stored["rows"][2]["median"] is None
    assert Results.load(path) == results


def test_ratios_are_between_rows_of_one_file_and_one_metric(results: Results) -> None:
    assert results.ratio("add/64/f32", "eager", "gpuos") == 120.0
    assert results.ratio("add/64/f32", "cupy", "gpuos") is None
    assert results.ratio("add/64/f32", "gpuos", "gpuos", "add/64/f32/stable") == 1.25
    with pytest.raises(KeyError, match=r"demo has no row 'add/64/f32' of 'graph'"):
        results.ratio("add/64/f32", "graph", "gpuos")
    with pytest.raises(ValueError, match="do not compare"):
        results.ratio("add/64/f32", "numpy", "gpuos")


def test_the_file_is_named_after_experiment_and_device(results: Results) -> None:
    assert results.file_name == "demo.nvidia-h200.json"
    results.device = "Intel(R) Xeon(R) CPU @ 2.10GHz"
    assert results.file_name == "demo.intel-xeon-2.10ghz.json"


def test_to_measure_changes_no_stored_result(results: Results) -> None:
    assert results.default_path.parent not in (STORED, *STORED.parents)
    ignored = (STORED / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert f"{results.default_path.parent.relative_to(STORED)}/" in ignored


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_what_was_measured_before_an_interrupt_is_written(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.harness.LOCAL", tmp_path)
    results, before = Results("some", "a GPU", "cuda"), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), results.kept():
        results.rows.append(Row("a/1/f32", "gpuos", "time_per_op", "ns", 1.0, 1.0, 1.0, 3))
        if how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt
    (path,) = tmp_path.iterdir()
    assert path.name == "some-unfinished.a-gpu.json"
    assert [row.case for row in Results.load(path).rows] == ["a/1/f32"]
    assert signal.getsignal(signal.SIGTERM) is before
