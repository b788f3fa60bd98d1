"""A checked element-wise expression becomes a program for the interpreter: runnable before it is compiled.

The format, its limits and its truth in NumPy are the interpreter's: device/operators/interpreter.py.
"""

from __future__ import annotations

from typing import Any, Final

from ..device.functions import FUNCTIONS
from ..device.operators.interpreter import (
    CONSTANT,
    DEPTH,
    LOCALS,
    MAX_CODE,
    MAX_CONSTANTS,
    PUSH_LOCAL,
    PUSH_X,
    STORE_LOCAL,
    pack_program,
    run_program,
)
from .expression import ARGUMENTS, Constant, Expression, Node, Value, walk

Array = Any
MOST_OPERANDS: Final = 3


def compile_postfix(expression: Expression) -> bytes | None:
    """The program of an expression, None where it does not fit: too deep, too long, or too many steps alive.

    None is no error: the operator then waits until it is compiled.
    """
    if len(expression.arguments) > MOST_OPERANDS:
        return None
    code: list[int] = []
    constants: dict[str, int] = {}
    values: list[float] = []
    last_use = _last_uses(expression)
    place: dict[str, int] = {}  # of steps that are alive

    def emit(node: Node) -> int:
        """Appends a node's code; how many values the stack holds at most meanwhile."""
        if isinstance(node, Constant):
            number = constants.setdefault(repr(node.value), len(values))
            if number == len(values):
                values.append(node.value)
            code.append(CONSTANT + min(number, MAX_CONSTANTS - 1))
            return 1
        if isinstance(node, Value):
            if node.name in place:
                code.append(PUSH_LOCAL + place[node.name])
            else:
                code.append(PUSH_X + ARGUMENTS.index(node.name))
            return 1
        deepest = max(held + emit(operand) for held, operand in enumerate(node.operands))
        code.append(FUNCTIONS[node.function].opcode)
        return deepest

    deepest = 0
    for step, (name, node) in enumerate(expression.steps):
        deepest = max(deepest, emit(node))
        for each in [each for each in place if last_use.get(each, -1) <= step]:
            del place[each]
        free = sorted(set(range(LOCALS)) - set(place.values()))
        if not free:
            return None
        place[name] = free[0]
        code.append(STORE_LOCAL + free[0])
    deepest = max(deepest, emit(expression.result))
    if deepest > DEPTH or len(code) > MAX_CODE or len(values) > MAX_CONSTANTS:
        return None
    return pack_program(code, values)


def _last_uses(expression: Expression) -> dict[str, int]:
    """For each step that is used, the number of the last that does; the result counts as one more."""
    last: dict[str, int] = {}
    for number, node in enumerate([*(node for _, node in expression.steps), expression.result]):
        for each in walk(node):
            if isinstance(each, Value):
                last[each.name] = number
    return last


def evaluate_postfix(program: bytes, *operands: Array) -> Array:
    """What the interpreter makes of operands, in NumPy: the truth for programs."""
    return run_program(program, *operands)
