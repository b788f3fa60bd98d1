"""`python -m gpuos_numba`: what is here, what the operator table holds, what injection leaves on disk."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from . import info as found

if found.numpy_problem(found.version_of("numpy")) is not None:  # nothing else can be imported
    found.show(found.gather())
    sys.exit(1)

import typer
from rich.console import Console
from rich.table import Table

from .descriptor import DTYPE_NAMES
from .device.operators import TABLE, Operator
from .device.operators.table import REQUIRED, describe
from .inject import commands
from .top import top

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(commands.cache, name="cache")
app.add_typer(commands.audit, name="audit")
app.command(name="top")(top)


@app.callback()
def main() -> None:
    """Micro-operations on a GPU without launches."""


def record(operator: Operator) -> dict[str, Any]:
    """An operator's table entry as plain data."""
    fewest, most = operator.inputs
    return {
        "name": operator.name,
        "family": operator.family,
        "dtypes": [DTYPE_NAMES[dtype] for dtype in operator.dtypes],
        "inputs": {"fewest": fewest, "most": most},
        "outputs": operator.outputs,
        "parameters": {
            each.name: "required" if each.default is REQUIRED else each.default
            for each in operator.parameters
        },
        "formula": operator.formula,
        "tiling": operator.tiling,
        "cost": operator.cost,
        "tolerance": {
            "float32": operator.tolerance.f32,
            "float16": operator.tolerance.f16,
            "bfloat16": operator.tolerance.bf16,
            "absolute": operator.tolerance.atol,
        },
        "source": operator.source,
        "op_ids": [kernel.op_id for kernel in operator.kernels],
    }


@app.command()
def ops(
    name: Annotated[str | None, typer.Argument(help="One operator, in full.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data instead of a table.")] = False,
) -> None:
    """List the operators."""
    if name is not None and name not in TABLE:
        raise typer.BadParameter(f"no operator {name!r}; there are {', '.join(TABLE)}")
    chosen = list(TABLE.values()) if name is None else [TABLE[name]]
    console = Console()
    if as_json:
        typer.echo(json.dumps([record(operator) for operator in chosen], indent=2, default=str))
    elif name is not None:
        console.print(f"[bold]{name}[/] ({chosen[0].family})")
        console.print(describe(chosen[0]), markup=False, highlight=False)
    else:
        table = Table(title=f"{len(chosen)} operators")
        for column in ("name", "family", "inputs", "dtypes", "parameters", "formula", "tiling"):
            table.add_column(column, overflow="fold")
        for operator in chosen:
            row = record(operator)
            few, most = operator.inputs
            table.add_row(
                row["name"],
                row["family"],
                str(few) if few == most else f"{few}-{most}",
                " ".join(row["dtypes"]),
                " ".join(f"{key}={value}" for key, value in row["parameters"].items()),
                row["formula"],
                row["tiling"],
            )
        console.print(table)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Plain data instead of a table.")] = False,
) -> None:
    """Say what was found: GPU, driver, toolchain, versions, cache, and how to mend what is missing.

    The exit status is 1 where no Runtime can run.
    """
    facts = found.gather()
    if as_json:
        typer.echo(json.dumps(found.as_data(facts), indent=2))
    elif not found.show(facts):
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m gpuos_numba")
