"""Make the .ipynb files from the .py ones beside them: `python notebooks/build.py [--execute]`

With --execute the outputs are those of this machine; without, unchanged notebooks keep theirs.
Needs the packages of the `notebooks` extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jupytext
import nbformat
import typer

FOLDER = Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def sources() -> list[Path]:
    """The notebooks as percent scripts, in order."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def convert(source: Path) -> Any:
    """The notebook of a script, without outputs and with ids that do not change."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "jupytext": {"formats": "ipynb,py:percent"}}
    )
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def code(notebook: Any) -> list[tuple[str, str]]:
    """What a notebook says, outputs aside."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def main(
    execute: Annotated[bool, typer.Option("--execute", help="Run them, and keep the outputs.")] = False,
) -> None:
    """Make the notebooks."""
    for source in sources():
        target, notebook = source.with_suffix(".ipynb"), convert(source)
        if execute:
            from nbclient import NotebookClient

            NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
            for cell in notebook.cells:  # when and how long is no content
                cell.metadata.pop("execution", None)
        elif target.exists() and code(nbformat.read(target, 4)) == code(notebook):
            continue
        nbformat.write(notebook, target)
        typer.echo(f"{target.name} written")


if __name__ == "__main__":
    typer.run(main)
