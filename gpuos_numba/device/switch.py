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
from .operators.table import Kernel

HOT = "gpuos_plain"
"""The body that is looked for first."""


def cases(kernels: Sequence[Kernel]) -> list[tuple[int, int, str]]:
    """(first id, last id, symbol) in order; neighbours that share a body are one case."""
    merged: list[tuple[int, int, str]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.op_id):
        if merged and merged[-1][1] == kernel.op_id - 1 and merged[-1][2] == kernel.symbol:
            merged[-1] = (merged[-1][0], kernel.op_id, kernel.symbol)
        else:
            merged.append((kernel.op_id, kernel.op_id, kernel.symbol))
    return merged


def render(kernels: Sequence[Kernel]) -> str:
    """Source of `gpuos_dispatch(context, op_id, task, tile, arena)` over these kernels."""
    return environment().get_template("switch.py.jinja").render(cases=cases(kernels), hot=HOT)


def build(kernels: Sequence[Kernel], externals: dict[str, Any]) -> Callable[..., Any]:
    """The switch as a function; `externals` maps each body's symbol to something callable."""
    namespace: dict[str, Any] = {
        **externals,
        "uint32": np.uint32,
        "UNKNOWN_OPERATOR": np.int32(Status.UNKNOWN_OPERATOR),
    }
    exec(compile(render(kernels), "templates/switch.py.jinja", "exec"), namespace)
    switch: Callable[..., Any] = namespace["gpuos_dispatch"]
    return switch
