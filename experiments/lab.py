"""What every experiment shares: a Runtime, memory of its machine, its competitors, and the command line.

An experiment is a function from a `Lab` to questions, and a function that draws what was found:

    def questions(lab: Lab) -> list[Question]: ...
    def draw(results: Results, figure: Figure) -> None: ...

    main = command("name", __doc__, questions, draw)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import gpuos_numba as gpuos

from .harness import Case, Results, Row, System, baseline, measure
from .present import failures, save, table

TIMEOUT_S = 60.0
Question = tuple[str, Callable[[], Sequence[Case | Row]]]
"""A name for the progress bar, and what answers: cases to be measured in shared rounds, or rows."""
Questions = Callable[["Lab"], list[Question]]
Draw = Callable[[Results, Any], None]


class MachineChoice(StrEnum):
    """For the command line."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(slots=True)
class Lab:
    """What an experiment works with.

    Attributes:
        rt: on the machine that was asked for.
        quick: few sizes and repeats, to see that everything works.
    """

    rt: gpuos.Runtime
    quick: bool

    @property
    def cuda(self) -> bool:
        return self.rt.machine == "cuda"

    @property
    def name(self) -> str:
        """The system that gpuos is here."""
        return "gpuos" if self.cuda else "gpuos-cpu"

    def park(self) -> None:
        """Leave the machine to somebody else."""
        self.rt.park(TIMEOUT_S)

    def ours(self, run: Callable[[], Any], suffix: str = "", **settings: Any) -> System:
        """gpuos: whatever it raises ends the experiment."""
        return System(self.name + suffix, run, required=True, **settings)

    def planned(self, suffix: str, build: Callable[[], Callable[[], Any]], **settings: Any) -> System:
        """A way of gpuos that this version may not have: then a row says so."""
        return baseline(self.name + suffix, build, **settings)

    def other(self, name: str, build: Callable[[], Callable[[], Any]], **settings: Any) -> System:
        """A competitor. It has the machine to itself: the executor is parked while it is built and timed."""
        self.park()
        return baseline(name, build, before=self.park, **settings)

    def device(self, array: np.ndarray) -> Any:
        """A copy in memory that the machine reaches: NumPy, or a tensor of PyTorch, CuPy or Numba."""
        if not self.cuda:
            return array.copy()
        try:
            import torch

            return torch.from_numpy(array.copy()).cuda()
        except ImportError:
            pass
        try:
            import cupy

            return cupy.asarray(array)
        except ImportError:
            from numba import cuda

            return cuda.to_device(array)

    def host(self, array: Any) -> np.ndarray:
        """A copy on the host, once all that was submitted is done."""
        for name in ("cpu", "get", "copy_to_host"):
            if hasattr(array, name):
                return np.asarray(getattr(array, name)())
        return np.array(array)

    def fill(self, array: Any, values: Any) -> None:
        """Overwrite, and wait."""
        if isinstance(array, np.ndarray):
            array[...] = values
        elif "torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor):
            torch = sys.modules["torch"]
            array.copy_(torch.as_tensor(values, dtype=array.dtype).expand(array.shape))
            torch.cuda.synchronize()
        else:
            array[...] = values


def answer(lab: Lab, questions: Sequence[Question], rounds: int, results: Results, console: Console) -> None:
    """Ask everything, into `results`."""
    columns = TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(questions) * rounds)
        for number, (name, ask) in enumerate(questions, 1):
            progress.update(bar, description=name)
            found = ask()
            cases = [each for each in found if isinstance(each, Case)]
            results.rows += [each for each in found if isinstance(each, Row)]
            if cases:
                results.rows += measure(cases, rounds, lambda: progress.advance(bar))
            progress.update(bar, completed=number * rounds)
            lab.rt.synchronize(TIMEOUT_S)  # raises if any task failed


def command(
    name: str,
    questions: Questions,
    draw: Draw,
    *,
    rounds: tuple[int, int] = (20, 3),
    finish: Callable[[Results], None] = lambda results: None,
    **settings: Any,
) -> Callable[..., None]:
    """The command of an experiment.

    Args:
        name: of the experiment, as in `<name>.<device>.json`.
        questions: what is asked.
        draw: `draw(results, figure)`.
        rounds: in full and with --quick.
        finish: adds rows that follow from others.
        settings: of the Runtime.
    """

    def main(
        machine: Annotated[
            MachineChoice, typer.Option(help="auto: a GPU if there is one.")
        ] = MachineChoice.auto,
        quick: Annotated[bool, typer.Option("--quick", help="Few sizes and repeats: does it work?")] = False,
        json: Annotated[
            Path | None, typer.Option(help="Results; default experiments/results/local/.")
        ] = None,
        plot: Annotated[Path | None, typer.Option(help="PNG; default beside the JSON.")] = None,
    ) -> None:
        # A file or a pipe has no width of its own: take what the table needs.
        console = Console(width=None if Console().is_terminal else 220)
        with gpuos.Runtime(machine=machine, **settings) as rt:
            results = Results(f"{name}-quick" if quick else name, rt.device_name, rt.machine)
            lab = Lab(rt, quick)
            with results.kept():
                answer(lab, questions(lab), rounds[1] if quick else rounds[0], results, console)
        finish(results)
        stored = json or results.default_path
        results.write(stored)
        drawn = plot or stored.with_suffix(".png")
        save(results, drawn, draw)
        console.print(table(results))
        for line in failures(results):
            console.print(f"could not run: {line}", markup=False)
        console.print(f"Results in {stored}, plot in {drawn}", markup=False)

    return main
