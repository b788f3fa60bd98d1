"""Which operator a name means: versions arrive, and every task that is submitted asks here.

A version runs the moment it is checked: by the interpreter, which every executor has, from a program in
memory that the device reads. So injecting, replacing and rolling back pause nobody: they change what the next
task will be. When its compiled body is linked in (publish.py), the version gets that. Tasks already submitted
keep what they were submitted with: they hold the operator, and each body has an id that is its own for good.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..device.operators import TABLE, Operator
from ..device.operators.interpreter import infer, run_program
from ..errors import ArgumentError
from .audit import AuditLog, Event
from .postfix import compile_postfix
from .request import Request

if TYPE_CHECKING:
    from .trial import Trial

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


HISTORY: Final = 64
"""So many changes can be rolled back."""


class Version:
    """What a name meant from one change on.

    Attributes:
        name: of the operator.
        request: what it is; None for one that was written as a device body.
        operator: what runs it, the fastest that there is by now.
        stage: "interpreted", "partly" (compiled for the commonest operands), "compiled" or "inlined".
        first_id: of its bodies; 0 until one is compiled.
        done: set once it is compiled, or cannot be.
        error: why it cannot be.
    """

    __slots__ = ("__weakref__", "done", "error", "first_id", "name", "operator", "request", "stage")

    def __init__(self, name: str, request: Request | None, operator: Operator | None, stage: str) -> None:
        self.name, self.request, self.operator, self.stage = name, request, operator, stage
        self.first_id = 0
        self.done = threading.Event()
        self.error: Exception | None = None


class Injected:
    """The injected operators of a Runtime, and the version counter. Safe to call from any thread.

    `generation` starts at 1 and grows with each change; it never goes back, also where a change undoes one.
    That a compiled body takes over from the interpreter is no change: the operator computes the same.
    """

    def __init__(self) -> None:
        self.generation = 1
        self._lock = threading.Lock()
        self._current: dict[str, Version] = {}
        self._undo: deque[tuple[str, Version | None]] = deque()  # what each change replaced
        # Weak both ways, for a version holds its operator: what nobody can ask for any more goes.
        self._versions: weakref.WeakKeyDictionary[Operator, weakref.ref[Version]]
        self._versions = weakref.WeakKeyDictionary()
        self._trials: dict[str, Trial] = {}
        self._audit: AuditLog | None = None
        self._warned = False

    def get(self, name: str) -> Operator | None:
        """The operator that a task of this name is to run now."""
        trial = self._trials.get(name)
        if trial is not None:
            return self.latest(trial.draw())
        version = self._current.get(name)
        return None if version is None else version.operator

    def version_of(self, operator: Operator) -> Version | None:
        """The version that an operator runs or ran, while anybody holds it."""
        known = self._versions.get(operator)
        return known() if known is not None else None

    def latest(self, operator: Operator) -> Operator:
        """What runs by now what an operator was when it was injected."""
        version = self.version_of(operator)
        return operator if version is None or version.operator is None else version.operator

    def version(self, name: str) -> Version | None:
        """The current one."""
        return self._current.get(name)

    def before(self, name: str) -> Version | None:
        """What the current version of a name replaced last."""
        with self._lock:
            return next((each for known, each in reversed(self._undo) if known == name and each), None)

    def is_current(self, version: Version) -> bool:
        """Whether tasks of its name run it."""
        return self._current.get(version.name) is version

    def names(self) -> tuple[str, ...]:
        """All that are current."""
        return tuple(self._current)

    def on_trial(self) -> tuple[str, ...]:
        """Names that a trial draws for."""
        return tuple(self._trials)

    def check_free(self, name: str, replace: bool) -> None:
        """Raises ArgumentError where the name is taken and `replace` is False."""
        if not replace and name in self._current:
            raise ArgumentError(f"{name} was injected before: pass replace=True, or choose another name")

    def publish(self, version: Version, replace: bool, timings_s: Mapping[str, float]) -> None:
        """Make a version current. Raises ArgumentError where its name is taken and `replace` is False."""
        with self._lock:
            self.check_free(version.name, replace)
            before = self._current.get(version.name)
            self._put(version.name, version)
            self._undo.append((version.name, before))
            forgotten = self._undo.popleft()[1] if len(self._undo) > HISTORY else None
            self.generation += 1
            what, operator = "inject" if before is None else "replace", version.operator
            template = version.request.template if version.request else "device"
            formula = operator.formula[:200] if operator else ""
            self._write(Event(what, version.name, template, generation=self.generation,
                              timings_s=timings_s, detail=formula))  # fmt: skip
        del before, forgotten

    def _put(self, name: str, version: Version | None) -> None:
        self._trials.pop(name, None)
        if version is None:
            self._current.pop(name, None)
        else:
            if version.operator is not None:
                self._versions[version.operator] = weakref.ref(version)
            self._current[name] = version

    def upgrade(self, version: Version, operator: Operator, stage: str, event: Event | None = None) -> None:
        """Let an operator run a version from now on, in all tasks that are submitted after this."""
        with self._lock:
            version.operator, version.stage = operator, stage
            self._versions[operator] = weakref.ref(version)
            if event is not None:
                self._write(dataclasses.replace(event, generation=self.generation))

    def rollback(self) -> str:
        """Undo the last change; returns the operator's name. Raises ArgumentError where there is none."""
        with self._lock:
            if not self._undo:
                raise ArgumentError("nothing was injected: there is nothing to roll back")
            name, before = self._undo.pop()
            self._put(name, before)
            self.generation += 1
            self._write(Event("rollback", name, before.stage if before else "", generation=self.generation))
            return name

    def begin_trial(self, name: str, trial: Trial) -> None:
        """Let a trial draw who runs the tasks of a name, until the name changes or `end_trial`."""
        with self._lock:
            if name in self._trials:
                raise ArgumentError(f"{name} is on trial already: stop that one first")
            self._trials[name] = trial
            self._write(Event("ab", name, generation=self.generation, detail=f"fraction {trial.fraction}"))

    def end_trial(self, name: str, trial: Trial) -> None:
        with self._lock:
            if self._trials.get(name) is trial:
                del self._trials[name]

    def refuse(self, name: str, why: str) -> None:
        """Note what was not injected."""
        self.note(Event("refuse", str(name)[:100], outcome=why[:200]))

    def note(self, event: Event) -> None:
        """Write down what changes nothing."""
        with self._lock:
            self._write(dataclasses.replace(event, generation=self.generation))

    def _write(self, event: Event) -> None:
        try:
            self._audit = self._audit or AuditLog()
            self._audit.append(event)
        except OSError as error:  # IntegrityError too
            if not self._warned:
                self._warned = True
                warnings.warn(f"the audit log is not written: {error}", RuntimeWarning, stacklevel=4)
