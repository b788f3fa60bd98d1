"""A request arrives, Python source of its bodies leaves: the same text for the same request, always.

Templates choose and call; what they are given is a name that `check` let through, numbers, and expressions
printed from their checked trees. Rendered sources are real files, so that errors of the compiler show a line.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..descriptor import ABI_VERSION
from ..device.functions import FUNCTIONS
from ..machines.base import Body, Primitives
from ..templates import environment
from .expression import Apply, Expression, constants, describe, show, show_lanes
from .request import ELEMENTWISE, SCHEMA, Request

TEMPLATES: Final[Mapping[str, str]] = {
    **dict.fromkeys(ELEMENTWISE, "injected_elementwise.py.jinja"),
    "reduce": "injected_reduce.py.jinja",
    "rowwise": "injected_rowwise.py.jinja",
    "rowwise2": "injected_rowwise.py.jinja",
}
VARIANTS: Final[Mapping[str, tuple[str, ...]]] = {
    "unary": ("plain", "half", "any"),
    "binary": ("plain", "half", "any"),
    "ternary": ("any",),
    "reduce": ("rows",),
    "rowwise": ("rows",),
    "rowwise2": ("rows",),
}
"""The bodies that a source makes, by template: `make_<name>_<variant>(m)`.

plain: contiguous f32; half: contiguous f16 or bf16; any: every dtype, layout and Python numbers.
"""

Factory = Callable[[Primitives], Body]
_CALLED: Final = re.compile(r"([a-z][a-z0-9]*)\(", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Function:
    """An expression as a template takes it."""

    role: str
    steps: list[tuple[str, str]]
    result: str
    lanes: list[tuple[str, str]]  # the same on four lanes at once, where that is better


@dataclass(frozen=True, slots=True)
class Rendered:
    """Source of an operator's bodies.

    Attributes:
        name: the operator's.
        source: Python text.
        variants: see `VARIANTS`.
        file_name: of its own, for it holds a hash of the source.
    """

    name: str
    source: str
    variants: tuple[str, ...]
    file_name: str


def render(request: Request) -> Rendered:
    """The source of a request's bodies."""
    from .. import __version__  # not above: the package is still being imported when this module may be

    expressions = dict(request.expressions)
    named = constants(list(expressions.values()))
    template = TEMPLATES[request.template]
    source = (
        environment()
        .get_template(template)
        .render(
            name=request.name,
            arity=request.arity,
            version=__version__,
            schema=SCHEMA,
            abi=ABI_VERSION,
            digest=hashlib.sha256(request.to_json().encode()).hexdigest(),
            formulas=[f"{role} = {_clip(describe(each))}" for role, each in expressions.items()],
            symbols=_symbols(expressions.values()),
            constants=[(name, value) for value, name in named.items()],
            functions={role: _function(role, each, named) for role, each in expressions.items()},
        )
    )
    short = hashlib.sha256(source.encode()).hexdigest()[:16]
    return Rendered(request.name, source, VARIANTS[request.template], f"{request.name}-{short}.py")


def _function(role: str, expression: Expression, named: Mapping[str, str]) -> _Function:
    steps = [(name, show(node, named)) for name, node in expression.steps]
    return _Function(role, steps, show(expression.result, named), show_lanes(expression, named))


def _symbols(expressions: Any) -> list[str]:
    """The functions of `make_functions` that expressions call."""
    used = {
        found
        for expression in expressions
        for node in expression.nodes()
        if isinstance(node, Apply)
        for found in _CALLED.findall(FUNCTIONS[node.function].text)
    }
    return sorted(used)


def _clip(text: str, most: int = 96) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def write(rendered: Rendered, folder: Path) -> Path:
    """Put the source where a traceback finds it. Raises OSError."""
    path = folder / rendered.file_name
    try:
        if path.read_text("ascii") == rendered.source:
            return path
    except (OSError, ValueError):
        pass
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = folder / f".{rendered.file_name}.{os.getpid()}.{secrets.token_hex(4)}"
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(rendered.source)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return path


def load(rendered: Rendered, path: Path | None = None) -> dict[str, Factory]:
    """The factories of a source's bodies, by variant.

    What is run is the text that was rendered here; `path` is only where a traceback says that it is.
    """
    namespace: dict[str, Any] = {"__name__": f"gpuos_injected_{rendered.name}"}
    exec(compile(rendered.source, str(path or f"<{rendered.file_name}>"), "exec"), namespace)
    return {variant: namespace[f"make_{rendered.name}_{variant}"] for variant in rendered.variants}
