"""What `Runtime.inject` and its kin do: a user's words arrive, a version that is live leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ..device.operators import TABLE, Operator
from ..errors import ArgumentError, GpuosError
from . import request
from .check import check_name
from .device_operator import DeviceOperator
from .live import Version, make_interpreted
from .request import ELEMENTWISE, FLOAT_NAMES, ROLES, Request
from .trial import Trial

if TYPE_CHECKING:
    from ..runtime import Runtime

TEMPLATES: Final = ("elementwise", *ELEMENTWISE, "chain", "reduce", "rowwise")
WAITS: Final = ("runnable", "compiled")


def _make_request(
    name: Any,
    expression: Any,
    template: str | None,
    arguments: Sequence[str] | None,
    dtypes: Sequence[Any] | None,
    steps: Sequence[Sequence[Any]] | None,
    roles: dict[str, Any],
) -> Request:
    template = template or ("chain" if steps is not None else "elementwise")
    if template not in TEMPLATES:
        raise ArgumentError(f"template={template!r}: choose from {', '.join(TEMPLATES)}")
    taken = tuple(getattr(each, "__name__", str(each)) for each in dtypes) if dtypes else FLOAT_NAMES
    if template == "chain":
        if steps is None or expression is not None or roles:
            raise ArgumentError('a chain needs steps=[("mul", "x", "y"), ("relu", 0)] and nothing else')
        return request.chain(name, steps, taken)
    if template in ("reduce", "rowwise"):
        known = set(ROLES["reduce"]) if template == "reduce" else set(ROLES["rowwise2"])
        if steps is not None or arguments is not None:
            raise ArgumentError(f"{name}: steps and arguments are of other templates than {template}")
        if expression is not None:
            if template == "reduce":
                raise ArgumentError(
                    f"{name}: a reduction has no one expression: give map=, combine=, identity="
                )
            roles = {"value": expression, **roles}
        wrong = sorted(roles.keys() - known)
        if wrong or (template == "rowwise" and "value" not in roles):
            what = f"{wrong[0]}=" if wrong else "no value="
            raise ArgumentError(
                f"{name}: {what} given, the template {template} takes {', '.join(sorted(known))}"
            )
        make = request.reduce if template == "reduce" else request.rowwise
        return make(name, **roles, dtypes=taken)
    if roles or steps is not None:
        given = next(iter(roles), "steps")
        raise ArgumentError(f'{name}: {given}= is of another template: pass template="reduce" or "rowwise"')
    if expression is None and callable(name):
        name, expression = None, name
    if expression is None:
        raise ArgumentError(f'{name!r}: give an expression, as in rt.inject("swish", "x / (1 + exp(-x))")')
    made = request.elementwise(name, expression, arguments, taken)
    if template in ELEMENTWISE and made.template != template:
        raise ArgumentError(
            f"{made.name}: takes {made.arity} array(s), which is {made.template}, not {template}"
        )
    return made


def inject(
    rt: Runtime,
    name: Any,
    expression: Any,
    *,
    replace: bool,
    wait: str,
    builtin: bool = False,
    **given: Any,
) -> Operator:
    """See `Runtime.inject`. builtin: an operator of the table may be replaced."""
    from ..runtime import Runtime

    rt._check_open()
    begin = time.perf_counter()
    injected, publisher = rt._injected, rt._publisher
    try:
        if wait not in WAITS:
            raise ArgumentError(f"wait={wait!r}: choose from {', '.join(WAITS)}")
        if getattr(name, "gpuos_device_operator", None) is not None:
            device: DeviceOperator = name.gpuos_device_operator
            return device.inject(rt, replace)
        asked = _make_request(name, expression, **given)
        own = {each for each in dir(Runtime) if each not in TABLE}
        check_name(asked.name, reserved=own if builtin else {*TABLE, *own})
        if builtin and asked.name in TABLE:
            _check_stands_in(asked)
        injected.check_free(asked.name, replace)
        checked = time.perf_counter()
        version = Version(asked.name, asked, None, "new")
        if asked.template in ELEMENTWISE:
            try:
                version.operator = make_interpreted(asked, rt._machine.upload)
                version.stage = "interpreted"
                rt._checker.prepare(version.operator.kernels[0].op_id)
            except ArgumentError:
                if wait == "runnable":  # more than the interpreter holds: it must be compiled first
                    wait = "compiled"
        else:
            wait = "compiled"
        if wait == "compiled":
            publisher.build(version, now=True)
        now = time.perf_counter()
        injected.publish(version, replace, {"check": checked - begin, "place": now - checked})
        if version.operator is None:
            raise AssertionError(version.stage)
        if not version.done.is_set() and version.stage == "interpreted":
            publisher.later(version)
        rt._look_for_overrides()
    except GpuosError as error:
        injected.refuse(str(name), str(error))
        raise
    return version.operator


def _check_stands_in(asked: Request) -> None:
    """An operator of the table may only be replaced by one that is called in the same way."""
    operator = TABLE[asked.name]
    if operator.parameters or operator.inputs != (asked.arity, asked.arity) or operator.outputs != 1:
        raise ArgumentError(
            f"{asked.name} of the table takes {operator.inputs} inputs and "
            f"{[each.name for each in operator.parameters]}: only what takes the same can replace it"
        )


def replace(rt: Runtime, name: Any, expression: Any, wait: str, **given: Any) -> Operator:
    """See `Runtime.replace`."""
    known = getattr(name, "__name__", name)
    if rt._injected.version(known) is None and known not in TABLE:
        raise ArgumentError(f"there is no operator {known!r} to replace: inject it")
    return inject(rt, name, expression, replace=True, wait=wait, builtin=True, **given)


def ab(rt: Runtime, name: str, fraction: float, candidate: Operator | str | None) -> Trial:
    """See `Runtime.ab`."""
    rt._check_open()
    injected = rt._injected
    version = injected.version(name)
    current = version.operator if version is not None else TABLE.get(name)
    if current is None:
        raise ArgumentError(f"there is no operator {name!r} to put on trial")
    if candidate is None:
        before = injected.before(name)
        candidate = (
            before.operator if before is not None else TABLE.get(name) if version is not None else None
        )
    if candidate is None:
        raise ArgumentError(
            f"{name} replaced nothing: pass candidate=, an operator or the name of one, injected or not"
        )
    other = rt._operator(candidate)

    def end(trial: Trial) -> None:
        injected.end_trial(name, trial)
        rt._look_for_overrides()

    trial = Trial(rt, name, fraction, current, other, end)
    injected.begin_trial(name, trial)
    rt._look_for_overrides()
    return trial
