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
from .operators import Operator


def render(operators: Sequence[Operator]) -> str:
    """Source of `gpuos_dispatch(context, op_id, task, tile, arena)` over these operators."""
    cases = sorted(operators, key=lambda operator: operator.op_id)
    return environment().get_template("switch.py.jinja").render(cases=cases, unknown="UNKNOWN_OPERATOR")


def build(operators: Sequence[Operator], externals: dict[str, Any]) -> Callable[..., Any]:
    """The switch as a function; `externals` maps each operator's symbol to something callable."""
    namespace: dict[str, Any] = {
        **externals,
        "int64": np.int64,
        "UNKNOWN_OPERATOR": np.int32(Status.UNKNOWN_OPERATOR),
    }
    exec(compile(render(operators), "templates/switch.py.jinja", "exec"), namespace)
    switch: Callable[..., Any] = namespace["gpuos_dispatch"]
    return switch
