"""`python -m gpuos_numba cache ...` and `audit ...`: look at what injection left on disk."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import GpuosError
from .audit import AuditLog
from .store import Problem, Store

cache = typer.Typer(no_args_is_help=True, help="Compiled operators that are kept.")
audit = typer.Typer(no_args_is_help=True, help="What happened to the operators.")

AsJson = Annotated[bool, typer.Option("--json", help="Plain data instead of a table.")]


def _store() -> tuple[Store, list[Problem]]:
    problems: list[Problem] = []
    return Store(report=problems.append), problems


def _end(problems: list[Any]) -> None:
    for problem in problems:
        typer.echo(str(problem), err=True)
    if problems:
        raise typer.Exit(1)


@cache.command("list")
def list_entries(as_json: AsJson = False) -> None:
    """List the entries, verified or not."""
    store, problems = _store()
    entries = store.entries()
    if as_json:
        rows = [
            {"kind": each.kind, "key": each.key, "bytes": each.size, "written_at": each.written_at}
            for each in entries
        ]
        typer.echo(json.dumps({"folder": str(store.folder), "entries": rows}, indent=2))
    else:
        table = Table(title=f"{len(entries)} entries in {store.folder}")
        for column in ("kind", "key", "bytes", "written"):
            table.add_column(column, overflow="fold")
        for each in entries:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.written_at))
            table.add_row(each.kind, each.key, f"{each.size:,}", when)
        Console().print(table)
    _end(problems)


@cache.command("verify")
def verify_entries() -> None:
    """Verify every entry; exit with 1 where one does not."""
    store, problems = _store()
    problems += store.verify()
    if not problems:
        typer.echo(f"{len(store.entries())} entries in {store.folder}, all as this user signed them")
    _end(problems)


@cache.command("clear")
def clear_entries() -> None:
    """Remove all entries; what is needed is compiled anew."""
    store, problems = _store()
    typer.echo(f"{store.clear()} files removed from {store.folder}")
    _end(problems)


def _log() -> AuditLog:
    try:
        return AuditLog()
    except (GpuosError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@audit.command("show")
def show_log(
    as_json: AsJson = False,
    last: Annotated[int, typer.Option(help="So many of the latest lines; 0 for all.", min=0)] = 0,
) -> None:
    """Show the lines, verified or not."""
    log = _log()
    lines = log.lines()[-last:]
    if as_json:
        typer.echo(json.dumps(lines, indent=2))
        return
    table = Table(title=f"{len(lines)} lines of {log.path}")
    columns = ("line", "when", "who", "what", "name", "outcome", "generation", "key")
    for column in columns:
        table.add_column(column, overflow="fold")
    for each in lines:
        if "unreadable" in each:
            table.add_row("?", "", "", "unreadable", str(each["unreadable"])[:40])
        else:
            table.add_row(*("" if each.get(column) is None else str(each[column]) for column in columns))
    Console().print(table)


@audit.command("verify")
def verify_log() -> None:
    """Verify the chain; exit with 1 where a line was edited, removed, reordered or forged."""
    log = _log()
    problems = log.verify()
    if not problems:
        typer.echo(f"{len(log.lines())} lines in {log.path}, all as they were written")
    _end(problems)
