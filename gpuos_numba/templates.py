"""Where the Jinja templates are, and how they are rendered.

They are the project's top-level `templates/` folder; a wheel carries a copy inside the package.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .errors import MachineError

_PACKAGE = Path(__file__).resolve().parent


def templates_folder() -> Path:
    """The folder that holds the templates.

    Raises:
        MachineError: neither place has it; the installation is broken.
    """
    places = (_PACKAGE / "_templates", _PACKAGE.parent / "templates")
    for place in places:
        if (place / "switch.py.jinja").is_file():
            return place
    looked = " nor ".join(str(place) for place in places)
    raise MachineError(f"no templates in {looked}: install gpuos_numba again")


@cache
def environment() -> Environment:
    """How templates are rendered: an unknown name is an error, blocks leave no blank lines."""
    return Environment(
        loader=FileSystemLoader(templates_folder()),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
