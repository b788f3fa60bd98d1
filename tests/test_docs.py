"""The API reference builds from the docstrings without a warning, and the documents link to what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_api_reference_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="no pdoc: that the API reference builds stays unproved")
    command = [sys.executable, "-m", "pdoc", "--docformat", "google", "-o", str(tmp_path), "gpuos_numba"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not re.search(r"(?i)warn|error", done.stderr), done.stderr
    page = (tmp_path / "gpuos_numba.html").read_text(encoding="utf-8")
    for name in ("Runtime", "submit_batch", "inject", "Ticket", "Config", "QueueFull"):
        assert f">{name}<" in page


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


def test_the_example_of_the_readme_runs() -> None:
    (example,) = re.findall(r"## Example\n\n```python\n(.*?)```", DOCUMENTS[0].read_text("utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert (names["a"] == np.arange(1024)).all() and (names["c"] == np.arange(1024)).all()
