"""The operator table: which operators there are. Each family is a module of its own."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ...descriptor import JOIN_OP, MAX_INPUTS, STATUS_BITS, DType, offset
from ...machines.base import Body, Primitives
from ...protocol import CONTEXT, field
from . import attention, cache, elementwise, interpreter, mask, matrix, movement, norm, reduce, rope, softmax
from .planning import TILE
from .table import CONTROL_IDS, Kernel, Plan
from .table import Operator as Operator


def make_nop(m: Primitives) -> Body:
    """Does nothing: for measuring, and for ordering."""
    OK = np.int32(0)

    def nop(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        return OK

    return nop


def make_join(m: Primitives) -> Body:
    """Waits for lower positions, which see `descriptor.JOIN_OP`: a task itself can name but two."""
    u64, thread_index, block_width = m.u64, m.thread_index, m.block_width
    load_u64, load_task_u64, load_acquire_gpu, pause = (
        m.load_u64,
        m.load_task_u64,
        m.load_acquire_gpu,
        m.pause,
    )
    DEVICE_DONE, MASK = u64(field(CONTEXT, "device_done")), u64(field(CONTEXT, "mask"))
    LISTED, COUNT, RANGE = u64(offset("inputs")), u64(offset("count")), u64(offset("scalars"))
    ZERO, ONE, EIGHT, SHIFT, TOP_BIT = u64(0), u64(1), u64(8), u64(STATUS_BITS), u64(1 << 63)
    OK = np.int32(0)
    assert offset("outputs") == offset("inputs") + 8 * MAX_INPUTS and offset("scalars") % 8 == 0

    def join(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        done = load_u64(context + DEVICE_DONE)
        mask = load_u64(context + MASK)
        listed = load_task_u64(task + COUNT)
        low = load_task_u64(task + RANGE)
        total = listed + load_task_u64(task + RANGE + EIGHT)
        index = thread_index()
        while index < total:
            position = low + (index - listed)
            if index < listed:
                position = load_task_u64(task + LISTED + index * EIGHT)
            target = (position + ONE) << SHIFT
            spins = ZERO
            # Acquire: what the task wrote is visible; the worker's barrier and publish carry that on. Pairs
            # with publish in device/worker.py. A later lap's word counts as done.
            while load_acquire_gpu(done + (position & mask) * EIGHT) - target >= TOP_BIT:
                pause(spins)
                spins += ONE
            index += block_width()
        return OK

    return join


_NOP: Final = Kernel(CONTROL_IDS, "nop", make_nop)
JOIN: Final = Kernel(JOIN_OP, "join", make_join)
"""Internal: see host/order.py and host/streams.py."""

_CONTROL: Final = (
    Operator(
        "nop",
        "control",
        (0, 0),
        0,
        (DType.F32,),
        "nothing: for measuring, and for ordering",
        infer=lambda inputs: (),
        plan=lambda inputs, outputs, blocks: Plan(_NOP.op_id, 0),
        kernels=(_NOP, JOIN),
        spec=None,
    ),
)

FAMILIES: Final = (
    _CONTROL,
    elementwise.OPERATORS,
    reduce.OPERATORS,
    softmax.OPERATORS,
    norm.OPERATORS,
    rope.OPERATORS,
    mask.OPERATORS,
    movement.OPERATORS,
    cache.OPERATORS,
    matrix.OPERATORS,
    attention.OPERATORS,
    interpreter.OPERATORS,
)

TABLE: Final = MappingProxyType({operator.name: operator for family in FAMILIES for operator in family})
"""Operators by name."""

KERNELS: Final = MappingProxyType(
    {kernel.op_id: kernel for operator in TABLE.values() for kernel in operator.kernels}
)
"""Cases of the switch by op_id."""

PLAIN_LIMIT: Final = TILE
"""Elements up to which an element-wise task is never tiled."""

assert len(TABLE) == sum(map(len, FAMILIES)), "two operators of one name"
for _operator in TABLE.values():
    for _kernel in _operator.kernels:
        assert KERNELS[_kernel.op_id] == _kernel, f"two kernels of id {_kernel.op_id}"
