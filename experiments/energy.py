"""What does an operation cost in joules, and what does waiting cost? `python -m experiments.energy [--quick]`

From the GPU's total energy counter (NVML) over windows of at least 20 s each; on a CPU from RAPL, where that
may be read:

- `energy/<independent|dependent>/1024/f32`, `energy_per_op`: adds, by gpuos, eager PyTorch and CUDA Graphs.
  All energy of the GPU counts, its idle power too: a slow system pays for the time it takes;
- `idle`, `power`: of an executor that is parked, of one that is resident without work and backs off, and of
  one that spins because a task comes every 20 us.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

import gpuos_numba as gpuos

from .harness import Results, Row, System, reason
from .lab import TIMEOUT_S, Lab, Question, command
from .microbench import BATCH, CALLS, Bench
from .present import bars

WINDOW_S, QUICK_WINDOW_S = 20.0, 0.5
N = 1024
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")


def meter(lab: Lab) -> Callable[[], float]:
    """A function that reads the joules used so far. Raises whatever says that there is no counter."""
    if not lab.cuda:
        float(RAPL.read_text())
        return lambda: float(RAPL.read_text()) * 1e-6
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(lab.rt.device)
    pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3


def window(joules: Callable[[], float], seconds: float, run: Callable[[], Any]) -> tuple[float, float, int]:
    """(J, s, runs) of running again and again for so long."""
    run()
    runs, begin, first = 0, time.perf_counter(), joules()
    while time.perf_counter() - begin < seconds:
        run()
        runs += 1
    return joules() - first, time.perf_counter() - begin, runs


class Energy:
    """All windows of one machine."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.bench = lab, Bench(lab.rt)
        self.seconds = QUICK_WINDOW_S if lab.quick else WINDOW_S
        self.why, self.joules = "", lambda: 0.0
        try:
            self.joules = meter(lab)
        except Exception as error:  # no NVML, no RAPL, or not for this user
            self.why = f"no energy counter: {reason(error)}"

    def rows(self, case: str, systems: list[System]) -> list[Row]:
        """Energy and time of each system's operations."""
        made = []
        for system in systems:
            energy = Row(f"energy/{case}", system.name, "energy_per_op", "uJ", why=self.why or system.why)
            if not energy.why and system.run is not None:
                system.before()
                used, took, runs = window(self.joules, self.seconds, system.run)
                operations = runs * system.count
                energy.summarize([used / operations * 1e6])
                power = Row(f"energy/{case}", system.name, "power", "W").summarize([used / took])
                made.append(power)
            made.append(energy)
        return made

    def independent(self) -> list[Row]:
        bench, work = self.bench, self.bench.pool(N)
        systems = [bench.submitted(work, work.repeated(BATCH)), *bench.others(work, work.repeated(CALLS))]
        return self.rows(f"independent/{N}/f32", self.chosen(systems))

    def dependent(self) -> list[Row]:
        bench, work = self.bench, self.bench.chain(N)
        others = bench.others(work, work.calls, ["graph/branches"])
        return self.rows(
            f"dependent/{N}/f32", self.chosen([bench.submitted(work, work.calls, linked=True), *others])
        )

    @staticmethod
    def chosen(systems: list[System]) -> list[System]:
        """The competitors of the claim; the graph in branches is the fastest."""
        wanted = ("gpuos", "gpuos-cpu", "numpy", "eager", "graph", "graph/branches")
        return [system for system in systems if system.name in wanted]

    def idle(self) -> list[Row]:
        """Power of executors that have nothing to do, or almost nothing."""
        lab, made = self.lab, []
        lab.park()
        resident: dict[str, Any] = {"lease_s": None, "idle_s": None}
        states: dict[str, tuple[dict[str, Any], float]] = {
            "parked": ({}, 0.0),
            "backing_off": (resident, 0.0),
            "spinning": (resident, 20e-6),
        }
        for state, (settings, every_s) in states.items():
            row = Row("idle", f"{lab.name}/{state}", "power", "W", why=self.why)
            made.append(row)
            if self.why:
                continue
            with gpuos.Runtime(machine=lab.rt.machine, **settings) as rt:
                rt.nop().wait(TIMEOUT_S)
                if state == "parked":
                    rt.park(TIMEOUT_S)

                def wait(rt: gpuos.Runtime = rt, every_s: float = every_s) -> None:
                    if not every_s:
                        time.sleep(0.05)
                        return
                    rt.nop()
                    until = time.perf_counter() + every_s
                    while time.perf_counter() < until:
                        pass

                used, took, _ = window(self.joules, self.seconds, wait)
                row.summarize([used / took])
        return made


def questions(lab: Lab) -> list[Question]:
    energy = Energy(lab)
    return [
        ("independent", energy.independent),
        ("dependent", energy.dependent),
        ("idle", energy.idle),
    ]


def draw(results: Results, figure: Any) -> None:
    figure.set_size_inches(14, 5)
    left, right = figure.subplots(1, 2)
    bars(left, [row for row in results.rows if row.metric == "energy_per_op"], "energy of an add, 1,024 f32")
    bars(right, [row for row in results.rows if row.metric == "power"], "power", log=False)


main = command("energy", questions, draw)

if __name__ == "__main__":
    typer.run(main)
