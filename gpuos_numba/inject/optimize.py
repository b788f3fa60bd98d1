"""Tier 2: injected bodies become part of the worker, and stay there if that is measured to be faster.

A called body costs a task some tenths of a microsecond. Linking everything with LTO would inline all of them
and takes too long, and spills; so only the worker is compiled anew, around the bodies that were asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import ArgumentError
from .publish import Publisher
from .request import Request
from .selftest import Placed

if TYPE_CHECKING:
    from ..runtime import Runtime

MOST: Final = 4
"""So many are inlined at most: each makes the worker larger for all."""
ELEMENTS: Final = 1024
TASKS: Final = 256
ROUNDS: Final = 15
GAIN: Final = 0.98
"""The new generation is kept where its tasks take at most this part of what they took."""


def _choose(rt: Runtime, names: Sequence[str]) -> dict[str, tuple[int, Request]]:
    """Kernel id and request of what can be inlined."""
    chosen: dict[str, tuple[int, Request]] = {}
    for name in names or rt._injected.names():
        version = rt._injected.version(name)
        operator = None if version is None else version.operator
        plain = [each for each in operator.kernels if each.name.endswith(".plain")] if operator else []
        if version is None or version.request is None or not plain:
            if names:
                raise ArgumentError(
                    f"{name} cannot be inlined: only what was injected element-wise, of one or two arrays, "
                    'and is compiled by now; inject it with wait="compiled"'
                )
            continue
        chosen[name] = (plain[0].op_id, version.request)
    return chosen


def time_chain_ns(rt: Runtime, name: str, arity: int) -> float:
    """Median time of one of many tasks that wait for each other."""
    values = np.linspace(-1, 1, ELEMENTS, dtype=np.float32)
    inputs = [Placed(rt._machine, values, 1) for _ in range(arity)]
    out = Placed(rt._machine, values, 1)
    batch = rt.batch(name, [([each.array for each in inputs], out.array)] * TASKS)
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        rt.submit_batch(batch, linked=True).wait()
        times.append((time.perf_counter_ns() - begin) / TASKS)
    return float(np.median(times))


def optimize(rt: Runtime, publisher: Publisher, names: Sequence[str]) -> dict[str, Any]:
    """See `Runtime.optimize`."""
    chosen = _choose(rt, names)
    if not rt._machine.inlines:
        return {"kept": False, "why": f"a call costs nothing on the {rt.machine} machine",
                "before_ns": {}, "after_ns": {}}  # fmt: skip
    if not chosen:
        return {"kept": False, "why": "nothing is compiled that could be inlined",
                "before_ns": {}, "after_ns": {}}  # fmt: skip
    if len(chosen) > MOST:
        raise ArgumentError(f"{len(chosen)} operators to inline: name at most {MOST}")

    for name in chosen:  # one that is inlined is complete: nobody compiles its rarer bodies later
        version = rt._injected.version(name)
        if version is not None and version.stage == "partly":
            publisher.build(version, now=True)

    def measure() -> dict[str, float]:
        return {name: time_chain_ns(rt, name, request.arity) for name, (_, request) in chosen.items()}

    before, after = measure(), {}

    def better() -> bool:
        rt.park()  # what runs next is of the new generation
        after.update(measure())
        return sum(after.values()) <= GAIN * sum(before.values())

    kept = publisher.inline(list(chosen.values()), better)
    for name in chosen if kept else ():
        version = rt._injected.version(name)
        if version is not None and version.operator is not None:
            rt._injected.upgrade(version, version.operator, "inlined")
    why = "it is faster" if kept else "it is not faster, so what ran before serves again"
    return {"kept": kept, "why": why, "before_ns": before, "after_ns": after}
