"""The templates are found wherever the package is installed; the switch calls the operator asked for."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from gpuos_numba import templates
from gpuos_numba.descriptor import Status
from gpuos_numba.device.operators.table import INJECTED_IDS, Kernel, Shared
from gpuos_numba.device.switch import INJECTED, build, cases
from gpuos_numba.errors import MachineError
from gpuos_numba.templates import environment, templates_folder

CHECKOUT = Path(__file__).resolve().parents[1]
UNKNOWN = -1


def test_checkout_uses_its_own_templates_folder() -> None:
    assert templates_folder() == CHECKOUT / "templates"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder without templates."""
    package = tmp_path / "gpuos_numba"
    package.mkdir()
    monkeypatch.setattr(templates, "_PACKAGE", package)
    return package


def place(folder: Path) -> Path:
    folder.mkdir()
    (folder / "switch.py.jinja").touch()
    return folder


def test_wheel_copy_is_found_and_goes_before_a_folder_beside_the_package(installed: Path) -> None:
    place(installed.parent / "templates")  # a stranger's `templates` in site-packages
    own = place(installed / "_templates")
    assert templates_folder() == own


def test_folder_beside_the_package_is_found(installed: Path) -> None:
    beside = place(installed.parent / "templates")
    assert templates_folder() == beside


def test_strangers_templates_folder_is_not_taken_for_ours(installed: Path) -> None:
    (installed.parent / "templates").mkdir()
    with pytest.raises(MachineError):
        templates_folder()


def test_broken_installation_names_both_places_and_the_remedy(installed: Path) -> None:
    with pytest.raises(MachineError, match="install gpuos_numba again") as caught:
        templates_folder()
    for looked in (installed / "_templates", installed.parent / "templates"):
        assert str(looked) in str(caught.value)


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="missing"):
        environment().from_string("{{ missing }}").render()


def test_blocks_leave_no_trace_and_text_is_kept_as_it_is() -> None:
    text = "a\n    {% if yes %}\n{{ '<&>' }}\n    {% endif %}\n"
    assert environment().from_string(text).render(yes=True) == "a\n<&>\n"


@pytest.mark.parametrize("name", environment().list_templates(extensions=["jinja"]))
def test_every_template_compiles_says_what_it_is_and_is_listed(name: str) -> None:
    environment().get_template(name)
    assert (templates_folder() / name).read_text().startswith("{#")
    assert f"`{name}`" in (templates_folder() / "README.md").read_text()


def render(ids: list[int], hot: int | None = None) -> str:
    cases = [(i, i, f"operator_{i}") for i in ids]
    template = environment().get_template("switch.py.jinja")
    return template.render(cases=cases, hot=f"operator_{hot}", injected="")


def switch(ids: list[int], hot: int | None = None) -> Callable[..., Any]:
    """The rendered switch over operators that return their own id and what they were given."""

    def operator(op_id: int) -> Callable[..., Any]:
        return lambda *arguments: (op_id, arguments)

    namespace: dict[str, Any] = {f"operator_{i}": operator(i) for i in ids}
    namespace |= {"uint32": int, "UNKNOWN_OPERATOR": UNKNOWN}
    exec(compile(render(ids, hot), "switch", "exec"), namespace)
    dispatch: Callable[..., Any] = namespace["gpuos_dispatch"]
    return dispatch


DENSE = [list(range(n)) for n in (1, 2, 3, 7, 8, 9, 42)]
SPARSE = [[5], [0, 9], [1, 2, 4, 8, 16, 32, 64], [3, 1000, 1001, 65535]]


@pytest.mark.parametrize("hot", [None, 0, -1])
@pytest.mark.parametrize("ids", DENSE + SPARSE, ids=lambda ids: f"{len(ids)}_to_{ids[-1]}")
def test_switch_calls_the_asked_operator_and_no_other(ids: list[int], hot: int | None) -> None:
    dispatch = switch(ids, None if hot is None else ids[hot])
    near = {i + step for i in ids for step in (-1, 0, 1)} | {0, 2**31, 2**62}
    for op_id in sorted(near):
        got = dispatch("context", op_id, "task", "tile", "arena")
        if op_id in ids:
            assert got == (op_id, ("context", "task", "tile", "arena"))
        else:
            assert got == UNKNOWN


def test_neighbours_that_share_a_body_are_one_case() -> None:
    shared = Shared("both", lambda m: lambda *arguments: None)
    kernels = [
        Kernel(i, f"k{i}", shared.make, None if i in (4, 9) else shared) for i in (9, 4, 2, 1, 3, 5, 7)
    ]
    found = cases(kernels)
    assert found == [
        (1, 3, "both"),
        (4, 4, "gpuos_op_4_k4"),
        (5, 5, "both"),
        (7, 7, "both"),
        (9, 9, "gpuos_op_9_k9"),
    ]
    text = environment().get_template("switch.py.jinja").render(cases=found, hot="", injected="")
    namespace: dict[str, Any] = {"uint32": int, "UNKNOWN_OPERATOR": UNKNOWN, "both": lambda *a: "both"}
    namespace |= {f"gpuos_op_{i}_k{i}": lambda *a, i=i: i for i in (4, 9)}
    exec(compile(text, "switch", "exec"), namespace)
    got = [namespace["gpuos_dispatch"]("context", i, "task", "tile", "arena") for i in range(11)]
    assert got == [UNKNOWN, *["both"] * 3, 4, "both", UNKNOWN, "both", UNKNOWN, 9, UNKNOWN]


def test_injected_ids_go_to_one_function_and_others_do_not() -> None:
    kernels = [Kernel(i, "k", lambda m: lambda *arguments: None) for i in (1, 5)]
    bodies = {kernel.symbol: lambda *arguments: arguments for kernel in kernels}
    both = build(kernels, {**bodies, INJECTED: lambda *arguments: ("injected", arguments)})
    given = ("context", "task", "tile", "arena")
    for op_id in (INJECTED_IDS, INJECTED_IDS + 1, 2**32 - 1):
        assert both("context", op_id, "task", "tile", "arena") == (
            "injected", ("context", op_id, "task", "tile", "arena"))  # fmt: skip
        assert build(kernels, bodies)("context", op_id, *given[1:]) == Status.UNKNOWN_OPERATOR
    assert both("context", 5, *given[1:]) == given
    assert both("context", INJECTED_IDS - 1, *given[1:]) == Status.UNKNOWN_OPERATOR


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 42, 100])
def test_switch_is_balanced(count: int) -> None:
    def depth(node: ast.AST) -> int:
        below = max((depth(child) for child in ast.iter_child_nodes(node)), default=0)
        return below + isinstance(node, ast.If)

    assert depth(ast.parse(render(list(range(count))))) <= math.ceil(math.log2(count)) + 1
