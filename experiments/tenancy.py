"""How do several processes share a GPU? `python -m experiments.tenancy [--quick]`

1 to 8 processes run rounds of 1,000 small adds (1,024 f32) at once, each round submitted and waited for:

- `tenancy/<processes>`: each process as it is, the driver takes turns between them;
- `tenancy/<processes>/mps`: under NVIDIA's Multi-Process Service, where it can be started;
- `tenancy/<processes>/mps/width`: under MPS, and every executor holds its share of the multiprocessors
  (`workers`). This stands in for MIG partitions, which isolate memory too: it is no MIG measurement.

`throughput` is of all processes together, `round_p50` and `round_p99` of the rounds of each. By gpuos, eager
PyTorch and CUDA Graphs; on a CPU by gpuos and NumPy. Each process is a Python of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import typer

import gpuos_numba as gpuos

from .baselines import graph_replay, numpy_add, torch_add
from .harness import ROOT, Results, Row, WrongResult, reason
from .lab import TIMEOUT_S, Lab, Question, command
from .microbench import Bench
from .present import bars

PROCESSES = (1, 2, 4, 8)
OPERATIONS, N = 1000, 1024
SECONDS, QUICK_SECONDS = 1.0, 0.2


# --- a tenant ---


def tenant(machine: str, workers: int) -> None:
    """Answer lines of `<system> <seconds>` on stdin with a line of JSON: operations, and times of rounds."""
    settings: dict[str, Any] = {"workers": workers} if workers else {}
    with gpuos.Runtime(machine=machine, **settings) as rt:
        bench = Bench(rt)
        work = bench.pool(N)
        calls = work.repeated(OPERATIONS)
        case = work.case("tenancy", [])
        builders: dict[str, Callable[[], Callable[[], Any]]] = {
            bench.name: lambda: bench.submitted(work, calls).run,  # type: ignore[dict-item, return-value]
            "eager": lambda: torch_add(work.slab, calls),  # type: ignore[arg-type]
            "graph": lambda: graph_replay(work.slab, calls),  # type: ignore[arg-type]
            "numpy": lambda: numpy_add(work.slab, calls),  # type: ignore[arg-type]
        }
        runs: dict[str, Callable[[], Any]] = {}
        print("ready", flush=True)
        for line in sys.stdin:
            name, seconds, begin_at = line.split()
            try:
                if name not in runs:
                    rt.park(TIMEOUT_S)
                    runs[name] = builders[name]()
                run = runs[name]
                if not name.startswith("gpuos"):
                    rt.park(TIMEOUT_S)
                case.poison()
                run()
                assert case.read is not None
                if not np.array_equal(case.read(), case.expected, equal_nan=True):
                    raise WrongResult(f"{name}: a sum is wrong")
                time.sleep(max(0.0, float(begin_at) - time.time()))
                times, end = [], time.perf_counter() + float(seconds)
                while time.perf_counter() < end:
                    begin = time.perf_counter_ns()
                    run()
                    times.append(time.perf_counter_ns() - begin)
                print(json.dumps({"operations": len(times) * len(calls), "times": times}), flush=True)
            except Exception as error:  # the parent makes a row of it
                print(json.dumps({"why": reason(error)}), flush=True)


class Tenants:
    """Processes that wait for orders."""

    def __init__(self, machine: str, workers: list[int], environment: dict[str, str]) -> None:
        package = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        started = {**os.environ, **environment, "PYTHONPATH": package}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "experiments.tenancy", "--tenant", machine, str(each)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, cwd=ROOT, env=started,
            )
            for each in workers
        ]  # fmt: skip
        for process in self.processes:
            self._line(process)

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a tenant ended before it answered")
        return line

    def measure(self, system: str, count: int, seconds: float, warm: float) -> list[dict[str, Any]]:
        """What `count` of them say after running a system at once; they begin `warm` seconds from now."""
        chosen, begin_at = self.processes[:count], time.time() + warm
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(f"{system} {seconds} {begin_at}\n")
            process.stdin.flush()
        return [json.loads(self._line(process)) for process in chosen]

    def close(self) -> None:
        for process in self.processes:
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


# --- the landlord ---


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The Multi-Process Service in a folder of its own; yields the environment of its clients."""
    with tempfile.TemporaryDirectory() as folder:
        where = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **where}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=20)
        try:
            yield where
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", env=environment, text=True,
                           check=False, timeout=30)  # fmt: skip


def rows(lab: Lab, variant: str, environment: dict[str, str], widths: bool = False) -> list[Row]:
    """All systems, all numbers of processes."""
    lab.park()
    systems = [lab.name, "eager", "graph"] if lab.cuda else [lab.name, "numpy"]
    numbers = PROCESSES[:2] if lab.quick or not lab.cuda else PROCESSES
    seconds = QUICK_SECONDS if lab.quick else SECONDS
    made: list[Row] = []
    most = lab.rt._machine.max_workers if lab.cuda else 1
    groups = [(number,) for number in numbers] if widths else [numbers]
    for group in groups:
        width = max(1, most // group[0] - 1) if widths else 0 if lab.cuda else 1
        tenants = Tenants(lab.rt.machine, [width] * max(group), environment)
        try:
            for number in group:
                for system in systems[:1] if widths else systems:
                    tenants.measure(system, number, 0.05, 0.0)  # builds and warms up
                    answers = tenants.measure(system, number, seconds, 0.3)
                    made += summary(f"tenancy/{number}{variant}", system, answers)
        finally:
            tenants.close()
    return made


def summary(case: str, system: str, answers: list[dict[str, Any]]) -> list[Row]:
    """Rows of what the tenants of one run said."""
    why = next((each["why"] for each in answers if "why" in each), "")
    rate, p50, p99 = (
        Row(case, system, metric, unit, why=why)
        for metric, unit in (("throughput", "1/s"), ("round_p50", "ns"), ("round_p99", "ns"))
    )
    if not why:
        rate.summarize([sum(each["operations"] / sum(each["times"]) * 1e9 for each in answers)])
        p50.summarize([np.percentile(each["times"], 50) for each in answers])
        p99.summarize([np.percentile(each["times"], 99) for each in answers])
    return [rate, p50, p99]


def under_mps(lab: Lab) -> list[Row]:
    try:
        with mps() as environment:
            found = rows(lab, "/mps", environment)
            return found + rows(lab, "/mps/width", environment, widths=True)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        why = f"MPS could not be used: {reason(error)}"
        return [Row("tenancy/2/mps", lab.name, "throughput", "1/s", why=why)]


def questions(lab: Lab) -> list[Question]:
    asked: list[Question] = [("plain", lambda: rows(lab, "", {}))]
    if lab.cuda:
        asked.append(("MPS", lambda: under_mps(lab)))
    return asked


def draw(results: Results, figure: Any) -> None:
    figure.set_size_inches(14, 6)
    left, right = figure.subplots(1, 2)
    bars(left, [row for row in results.rows if row.metric == "throughput"], "adds of all processes")
    bars(right, [row for row in results.rows if row.metric == "round_p99"], "1,000 adds, 99th percentile")


main = command("tenancy", questions, draw)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--tenant"]:
        tenant(sys.argv[2], int(sys.argv[3]))
    else:
        typer.run(main)
