"""Operators that run the moment they are checked: a request arrives, an Operator of one Runtime leaves.

Its kernel is the interpreter, which every executor has, and its program lies in memory that the device reads:
injecting, replacing and rolling back pause nobody. Tasks already submitted keep the program they were
submitted with, because they hold its memory; the next ones get the one that is current.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from ..device.operators import TABLE, Operator
from ..device.operators.interpreter import infer, run_program
from ..errors import ArgumentError
from .audit import AuditLog, Event
from .postfix import compile_postfix
from .request import Request

INTERPRETER: Final = TABLE["interpret"]


def make_interpreted(request: Request, upload: Callable[[bytes], Any]) -> Operator:
    """The operator of an element-wise request. `upload` puts bytes where the device can read them.

    Raises:
        ArgumentError: the request is no element-wise one, or needs more than the interpreter holds.
    """
    if "value" not in dict(request.expressions):
        raise ArgumentError(f"{request.name}: only element-wise expressions can be interpreted")
    program = compile_postfix(request["value"])
    if program is None:
        raise ArgumentError(
            f"{request.name}: the expression holds more than the interpreter does: make it smaller, or two "
            "operators of it"
        )
    formula = dict(request.texts).get("value", request.name)
    return dataclasses.replace(
        INTERPRETER,
        name=request.name,
        family="injected",
        inputs=(request.arity, request.arity),
        formula=str(formula),
        infer=partial(infer, operator=request.name, first=0),
        spec=partial(run_program, program),
        leading=(upload(program),),
        example=None,
        source="injected",
    )


class Injected:
    """The injected operators of a Runtime, and the version counter. Safe to call from any thread.

    `generation` starts at 1 and grows with each change; it never goes back, also where a change undoes one.
    """

    def __init__(self) -> None:
        self.generation = 1
        self._lock = threading.Lock()
        self._current: dict[str, Operator] = {}
        self._undo: list[tuple[str, Operator | None]] = []  # what each change replaced
        self._audit: AuditLog | None = None
        self._warned = False

    def get(self, name: str) -> Operator | None:
        """The current operator of a name."""
        return self._current.get(name)

    def names(self) -> tuple[str, ...]:
        """All that are current."""
        return tuple(self._current)

    def publish(self, operator: Operator, replace: bool, timings_s: Mapping[str, float]) -> None:
        """Make an operator current. Raises ArgumentError where its name is taken and `replace` is False."""
        with self._lock:
            before = self._current.get(operator.name)
            if before is not None and not replace:
                raise ArgumentError(
                    f"{operator.name} was injected before: pass replace=True, or choose another name"
                )
            self._current[operator.name] = operator
            self._undo.append((operator.name, before))
            self.generation += 1
            what = "inject" if before is None else "replace"
            self._write(Event(what, operator.name, "interpreted", generation=self.generation,
                              timings_s=timings_s, detail=operator.formula[:200]))  # fmt: skip

    def rollback(self) -> str:
        """Undo the last change; returns the operator's name. Raises ArgumentError where there is none."""
        with self._lock:
            if not self._undo:
                raise ArgumentError("nothing was injected: there is nothing to roll back")
            name, before = self._undo.pop()
            if before is None:
                del self._current[name]
            else:
                self._current[name] = before
            self.generation += 1
            self._write(Event("rollback", name, "interpreted", generation=self.generation))
            return name

    def refuse(self, name: str, why: str) -> None:
        """Note what was not injected."""
        with self._lock:
            self._write(Event("refuse", str(name)[:100], outcome=why[:200], generation=self.generation))

    def _write(self, event: Event) -> None:
        try:
            self._audit = self._audit or AuditLog()
            self._audit.append(event)
        except OSError as error:  # IntegrityError too
            if not self._warned:
                self._warned = True
                warnings.warn(f"the audit log is not written: {error}", RuntimeWarning, stacklevel=4)
