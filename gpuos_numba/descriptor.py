"""What travels: one task is 128 bytes, and this dtype is the only place that says where each word lies.

The host fills a `TASK` record, the pump copies it over the bus, a worker stages it in shared memory and
hands its address to the operator body. Host code, the CPU machine and the CUDA machine all take their
offsets from here, so a field that moves, moves everywhere; `ABI_VERSION` is bumped when it does.

Until its stamp is published a record belongs to the producer that claimed its slot; from then until the
task completes nobody writes it.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

import numpy as np

ABI_VERSION: Final = 2

MAX_INPUTS: Final = 4
MAX_OUTPUTS: Final = 2
MAX_AFTER: Final = 2
MAX_DIMS: Final = 8
SCALAR_BYTES: Final = 24
FIFTH_INPUT: Final = SCALAR_BYTES - 8
"""Offset within the scalars where an operator of five inputs finds the address of the last."""

TASK: Final = np.dtype(
    [
        ("op_id", "<u4"),  # which operator; 0 is NOP, so zeroed memory is a valid task
        ("flags", "<u4"),  # Flag bits
        ("run", "<u4"),  # 1-based place in a run of linked tasks; 0 and 1: the task stands alone
        ("tiles", "<u4"),  # how many blocks share the task; 0 and 1 mean one
        ("inputs", "<u8", MAX_INPUTS),  # addresses; operands that the operator does not take are 0
        ("outputs", "<u8", MAX_OUTPUTS),  # addresses
        ("count", "<i8"),  # elements of the iteration space
        ("after", "<u8", MAX_AFTER),  # positions that must have completed, valid where AFTER_ flags say so
        ("layouts", "<u2", MAX_INPUTS + MAX_OUTPUTS),  # layout-table slots, valid where STRIDED is set
        ("dtypes", "<u4"),  # DType codes, four bits an operand, in the order of `layouts`
        # Scalar parameters, packed as the operator's table entry says. The address of a fifth input travels
        # in the last 8 bytes, its layout and dtype in the places of output 1, which such an operator has not.
        ("scalars", "u1", SCALAR_BYTES),
    ]
)
"""The wire format, 128 bytes, little endian: every GPU and CPU that this runs on is."""

TASK_BYTES: Final = TASK.itemsize
TASK_WORDS: Final = TASK_BYTES // 8

LAYOUT: Final = np.dtype(
    [
        ("dtype", "<u4"),  # DType code
        ("ndim", "<u4"),
        ("count", "<i8"),
        ("shape", "<i8", MAX_DIMS),
        ("strides", "<i8", MAX_DIMS),  # in elements; 0 broadcasts, negative walks backwards
    ]
)
"""One operand's view of the iteration space, 144 bytes. Equal layouts are interned under one slot."""

LAYOUT_BYTES: Final = LAYOUT.itemsize
MAX_TILES: Final = (1 << 16) - 1


class Flag(IntFlag):
    """Bits of `TASK["flags"]`."""

    LINK = 1
    """The next position belongs to the same run: one block runs both, in order."""
    AFTER_0 = 2
    """`after[0]` holds a position that must complete first."""
    AFTER_1 = 4
    """`after[1]` holds a position that must complete first."""
    STRIDED = 8
    """Some operand is not contiguous: `layouts` says how to walk each."""
    MERGE = 16
    """After its last tile the task is called once more with `tile == tiles`, to join partial results."""
    PROGRAM = 32
    """A call of a resident program, whose tiles are its runs; see `protocol.PROGRAM_RUN`."""
    FOLLOW = 64
    """AFTER_0 names the position before, and neither task is tiled: where both come in one window, the pump
    makes them a run, which needs no wait."""


class Status(IntEnum):
    """How a task ended: the low byte of its done word. Errors are data on the device."""

    OK = 0
    UNKNOWN_OPERATOR = 1
    BAD_DESCRIPTOR = 2
    INDEX_OUT_OF_RANGE = 3
    DIVISION_BY_ZERO = 4
    FORGOTTEN = 255
    """Host side only: the task failed or not so long ago that the failure log no longer says which."""


class DType(IntEnum):
    """Element types by the code that layouts carry."""

    BOOL = 0
    I8 = 1
    U8 = 2
    I32 = 3
    I64 = 4
    F16 = 5
    BF16 = 6
    F32 = 7
    F64 = 8


DTYPE_NAMES: Final = {
    DType.BOOL: "bool",
    DType.I8: "int8",
    DType.U8: "uint8",
    DType.I32: "int32",
    DType.I64: "int64",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F32: "float32",
    DType.F64: "float64",
}
"""As NumPy, ml_dtypes, torch and CuPy all call them."""

ITEMSIZE: Final = (1, 1, 1, 4, 8, 2, 2, 4, 8)
"""Bytes of an element, by DType code."""

NOP_OP: Final = 0
JOIN_OP: Final = 254
"""The task that waits and does nothing else: for `count` positions that lie where inputs and outputs do, and
for those from the first word of `scalars` on, as many as the second says."""
MAX_JOINED: Final = MAX_INPUTS + MAX_OUTPUTS

IMMEDIATE: Final = 15
"""In `TASK["dtypes"]`: the operand's address word is not an address but the value itself, a Python number."""


def offset(field: str) -> int:
    """Byte offset of a `TASK` field, for the code that reads tasks by address."""
    return int(TASK.fields[field][1])  # type: ignore[index]


def layout_offset(field: str) -> int:
    """Byte offset of a `LAYOUT` field."""
    return int(LAYOUT.fields[field][1])  # type: ignore[index]


# Done words: (position + 1) << 8 | status. Positions are compared modulo 2^56, so a word is right for
# any 64-bit position: the top byte of a position never decides, because words that are compared are at
# most a few laps of the ring apart.
STATUS_BITS: Final = 8
STATUS_MASK: Final = (1 << STATUS_BITS) - 1
MASK_64: Final = (1 << 64) - 1


def done_word(position: int, status: int = 0) -> int:
    """The word that says "the task at `position` ended with `status`"."""
    return (((position + 1) << STATUS_BITS) & MASK_64) | status


assert TASK_BYTES == 128 and LAYOUT_BYTES == 144
