"""The switch: an op_id arrives, the operator's body is called, its status leaves.

On CUDA the switch is generated source, compiled alone and linked with executor and operators; on the CPU
it is a table of function addresses (machines/cpu_memory.py, dispatch). Both answer UNKNOWN_OPERATOR to an id
that nobody registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..descriptor import Status
from ..templates import environment
from .operators.table import INJECTED_IDS, Kernel

HOT = "gpuos_plain"
"""The body that is looked for first."""

INJECTED = "gpuos_injected"
"""What all ids from INJECTED_IDS on go to: `(context, op_id, task, tile, arena)`, linked in anew with each
generation, so that the worker need not be compiled for it."""


def cases(kernels: Sequence[Kernel]) -> list[tuple[int, int, str]]:
    """(first id, last id, symbol) in order; neighbours that share a body are one case."""
    merged: list[tuple[int, int, str]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.op_id):
        if merged and merged[-1][1] == kernel.op_id - 1 and merged[-1][2] == kernel.symbol:
            merged[-1] = (merged[-1][0], kernel.op_id, kernel.symbol)
        else:
            merged.append((kernel.op_id, kernel.op_id, kernel.symbol))
    return merged


def render_injected(cases: Sequence[tuple[int, str]]) -> str:
    """PTX of `gpuos_injected` over (id, symbol of its body): a text of its own, for Numba takes too long."""
    template = environment().get_template("injected_switch.ptx.jinja")
    return template.render(
        cases=sorted(cases),
        symbols=sorted({symbol for _, symbol in cases}),
        name=INJECTED,
        unknown=int(Status.UNKNOWN_OPERATOR),
    )


def render(kernels: Sequence[Kernel]) -> str:
    """Source of `gpuos_dispatch(context, op_id, task, tile, arena)` over these kernels."""
    template = environment().get_template("switch.py.jinja")
    return template.render(cases=cases(kernels), hot=HOT, injected=INJECTED, injected_ids=INJECTED_IDS)


def _nothing_injected(context: Any, op_id: Any, task: Any, tile: Any, arena: Any) -> Any:
    return np.int32(Status.UNKNOWN_OPERATOR)


def build(kernels: Sequence[Kernel], externals: dict[str, Any]) -> Callable[..., Any]:
    """The switch as a function; `externals` maps each body's symbol to something callable.

    INJECTED may be missing there: no id is injected then.
    """
    namespace: dict[str, Any] = {
        INJECTED: _nothing_injected,
        **externals,
        "uint32": np.uint32,
        "UNKNOWN_OPERATOR": np.int32(Status.UNKNOWN_OPERATOR),
    }
    exec(compile(render(kernels), "templates/switch.py.jinja", "exec"), namespace)
    switch: Callable[..., Any] = namespace["gpuos_dispatch"]
    return switch
