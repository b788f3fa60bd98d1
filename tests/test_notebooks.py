"""notebooks/: each runs from top to bottom, then in reverse; the .ipynb says what the .py says.

Cells run in this process, whose machines are compiled already. The slow test restarts a kernel a notebook.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

jupytext = pytest.importorskip("jupytext", reason="no jupytext: that the notebooks work stays unproved")
nbformat = pytest.importorskip("nbformat")
interactive = pytest.importorskip("IPython.core.interactiveshell")

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))


def _build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = _build()


def test_every_topic_has_a_notebook() -> None:
    assert [path.stem[:2] for path in SOURCES] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem[:2])
def test_a_notebook_is_its_script(source: Path) -> None:
    stored = nbformat.read(source.with_suffix(".ipynb"), 4)
    nbformat.validate(stored)
    assert BUILD.code(stored) == BUILD.code(BUILD.convert(source)), "run python notebooks/build.py"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem[:2])
def test_cells_run_from_top_to_bottom_and_again_in_reverse(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import matplotlib

    monkeypatch.setenv("GPUOS_AUDIT_FILE", str(tmp_path / "audit.jsonl"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a shell replaces it
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    shell = interactive.InteractiveShell()
    try:
        cells = [cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code"]
        for cell in [*cells, *reversed(cells)]:
            shell.run_cell(cell, silent=True).raise_error()
    finally:
        if "rt" in shell.user_ns:
            shell.user_ns["rt"].close()
        matplotlib.pyplot.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem[:2])
def test_a_notebook_survives_restart_and_run_all(source: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    notebook = BUILD.convert(source)
    nbclient.NotebookClient(notebook, timeout=300).execute()
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")
