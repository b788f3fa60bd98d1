"""Everything, one after another: `python -m experiments.all [--quick] [NAME ...]`

Each experiment runs in a process of its own, so that one that fails leaves the others alone; the exit status
is that of the worst.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console

from .harness import ROOT
from .lab import MachineChoice

NAMES = ("microbench", "operators", "mixed_pipeline", "attention_decode", "variable_shapes", "breakeven",
         "contention", "coexistence", "tenancy", "injection", "ordering", "programs", "energy")  # fmt: skip


def available() -> list[str]:
    """Of `NAMES`, those that this checkout has."""
    return [name for name in NAMES if find_spec(f"experiments.{name}") is not None]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Only these.")] = None,
    machine: Annotated[MachineChoice, typer.Option(help="auto: a GPU if there is one.")] = MachineChoice.auto,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and repeats: does it work?")] = False,
    timeout_s: Annotated[float, typer.Option(help="Of one experiment.")] = 900.0,
) -> None:
    """Run the experiments that this machine can; `python -m experiments.report` shows what they found."""
    console, worst = Console(), 0
    for name in names or available():
        if name not in available():
            raise typer.BadParameter(f"no experiment {name!r}; there are {', '.join(available())}")
        command = [sys.executable, "-m", f"experiments.{name}", "--machine", machine.value]
        begin = time.monotonic()
        console.rule(name)
        try:
            status = subprocess.run([*command, *["--quick"] * quick], cwd=ROOT, timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            status = 124
        console.print(f"{name}: exit status {status} after {time.monotonic() - begin:.0f} s")
        worst = max(worst, abs(status))
    raise typer.Exit(worst)


if __name__ == "__main__":
    typer.run(main)
