"""The protocol's source arrives, possibly with one line changed, and factories leave.

The bodies are plain Python, so a mutation is a change of their text. What the model needs to know about
the text besides running it is here too: which local variables still matter at a given instruction.
"""

from __future__ import annotations

import ast
import dis
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType
from typing import Any

MODULES = (
    "gpuos_numba.device.ring",
    "gpuos_numba.device.pump",
    "gpuos_numba.device.worker",
    "gpuos_numba.host.ring",
)


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in one module; `old` must occur exactly `times` times."""

    name: str
    module: str
    old: str
    new: str
    times: int = 1


@cache
def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


def load(*mutations: Mutation) -> dict[str, ModuleType]:
    """The protocol's modules under their short names ("pump", "host.ring", ...), mutated."""
    loaded: dict[str, ModuleType] = {}
    for name in MODULES:
        text = source_of(name)
        for mutation in mutations:
            if mutation.module == name.removeprefix("gpuos_numba."):
                found = text.count(mutation.old)
                assert found == mutation.times, f"{mutation.name}: {found} places instead of {mutation.times}"
                text = text.replace(mutation.old, mutation.new)
        short = name.removeprefix("gpuos_numba.")
        filename = f"<{short}{''.join('+' + m.name for m in mutations)}>"
        module = ModuleType(name)
        module.__package__ = name.rpartition(".")[0]
        exec(compile(text, filename, "exec"), module.__dict__)
        for other in loaded.values():  # a mutated device.ring reaches the modules that imported from it
            if other.__package__ == module.__package__:
                for key, value in vars(other).items():
                    if key.startswith("make_") and key in vars(module):
                        setattr(module, key, value)
        loaded[short] = module
        _sources[filename] = text
    return loaded


_sources: dict[str, str] = {}


def register(filename: str) -> None:
    """Let `live_locals` know the source of bodies that live in a file of their own."""
    with open(filename, encoding="utf-8") as file:
        _sources[filename] = file.read()


def is_body(filename: str) -> bool:
    return filename in _sources


@cache
def _statements(filename: str) -> dict[int, frozenset[str]]:
    """For each line, the names read by the statement (or the condition of one) that the line belongs to.

    A value computed earlier in the same statement may wait on the evaluation stack, where nobody sees it. It
    is a function of these names, because no statement makes a second access while it holds the result
    of a first one (`holds_no_result` checks that).
    """
    names: dict[int, frozenset[str]] = {}
    for node in ast.walk(ast.parse(_sources[filename])):
        part: ast.AST | None = None
        if isinstance(node, ast.If | ast.While):
            part = node.test
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Return | ast.AnnAssign):
            part = node
        if part is not None:
            read = frozenset(
                n.id for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
            )
            if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                read |= {part.target.id}
            for line in range(part.lineno, (part.end_lineno or part.lineno) + 1):  # type: ignore[attr-defined]
                names[line] = names.get(line, frozenset()) | read
    return names


@cache
def live_locals(code: CodeType, at: int) -> tuple[str, ...]:
    """The local variables of `code` that decide what happens after the call at byte offset `at`."""
    offsets, live, lines = _liveness(code)
    index = max(i for i, offset in enumerate(offsets) if offset <= at)
    names = live[index] | (_statements(code.co_filename)[lines[index]] & set(code.co_varnames))
    return tuple(sorted(names))


@cache
def _liveness(code: CodeType) -> tuple[list[int], list[set[str]], list[int]]:
    """Byte offset, locals live after it, and source line of each instruction."""
    instructions = list(dis.get_instructions(code))
    number = {instruction.offset: i for i, instruction in enumerate(instructions)}
    jumps = set(dis.hasjrel) | set(dis.hasjabs)
    effects: list[list[tuple[str, str]]] = []
    follow: list[list[int]] = []
    lines: list[int] = []
    line = code.co_firstlineno
    for i, instruction in enumerate(instructions):
        position = instruction.positions
        if position is not None and position.lineno is not None:
            line = position.lineno
        lines.append(line)
        fast = re.findall(r"(LOAD|STORE|DELETE)_FAST", instruction.opname)
        argument: Any = instruction.argval
        variables = argument if isinstance(argument, tuple) else (argument,)
        effects.append(list(zip(fast, variables, strict=True)) if fast else [])
        after = []
        if instruction.opcode in jumps:
            after.append(number[instruction.argval])
        unconditional = instruction.opname.startswith(
            ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")
        )
        if not unconditional and i + 1 < len(instructions):
            after.append(i + 1)
        follow.append(after)
    before: list[set[str]] = [set() for _ in instructions]
    after_each: list[set[str]] = [set() for _ in instructions]
    changed = True
    while changed:
        changed = False
        for i in range(len(instructions) - 1, -1, -1):
            live = set().union(*(before[j] for j in follow[i]))
            after_each[i] = set(live)
            for kind, variable in reversed(effects[i]):
                if kind == "LOAD":
                    live.add(variable)
                else:
                    live.discard(variable)
            if live != before[i]:
                before[i] = live
                changed = True
    return [instruction.offset for instruction in instructions], after_each, lines


_ACCESS = re.compile(
    r"(load|store)_(relaxed|acquire|release|pair)\w*|atomic_\w+|compare_and_swap|dispatch|take|await_position"
    r"|publish|fly|hand_out|decide|make_room|copy_layouts|count_tile|finish_tiles|leave|nobody_serves|status_of|try_claim|retire"
    r"|fill|wait_range|submit|hold|watch"
)


def held_results(text: str) -> Iterator[str]:
    """Statements with two accesses, one of whose results could wait on the stack during the other.

    Operands of `and` and `or` are no such place: each is used up before the next is evaluated.
    """

    def accesses(node: ast.AST) -> int:
        if isinstance(node, ast.BoolOp):
            return max(accesses(value) for value in node.values)
        mine = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _ACCESS.fullmatch(node.func.id)
        )
        return bool(mine) + sum(accesses(child) for child in ast.iter_child_nodes(node))

    for node in ast.walk(ast.parse(text)):
        part = node.test if isinstance(node, ast.If | ast.While) else node
        if isinstance(node, ast.If | ast.While | ast.Assign | ast.AugAssign | ast.Expr | ast.Return):
            own_result_goes_nowhere = isinstance(node, ast.Expr | ast.Assign) and isinstance(
                node.value, ast.Call
            )
            count = accesses(part)
            if own_result_goes_nowhere and _ACCESS.fullmatch(getattr(node.value.func, "id", "")):
                count = max(1, count - 1)  # type: ignore[union-attr]  # arguments first, then the call itself
            if count > 1:
                yield ast.unparse(part)
