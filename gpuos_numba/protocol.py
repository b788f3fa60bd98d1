"""The words that host, pump and workers share, each with its one writer.

Everything is 64-bit and little endian. The structured dtypes below are laid over memory that the machine
allocates (`machines.*_memory`); bodies reach the fields by address through `field()`.

    array            slots      who writes                 who reads
    host ring        capacity   the producer that claimed  pump
    stamps           capacity   the producer that claimed  pump
    host done        capacity   workers                    host
    device ring      capacity   pump                       workers
    device done      capacity   workers                    workers
    queue            capacity*2 pump                       workers
    item ends        capacity   pump                       pump
    tile counts      capacity   workers (atomics)          workers
    worker states    workers    that worker                nobody but the hang dump

A word that crosses the bus is only ever loaded and stored, never read-modify-written.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from .descriptor import TASK_BYTES

LINE: Final = 128
"""Bytes that two writers keep apart so that they do not share a cache line (128 on the GPU's L2)."""

HOST_CONTROL: Final = np.dtype(
    {
        # Written by the host under its launch lock, read by the pump in the flight of every iteration.
        # Read in pairs of words, so the order matters.
        "names": ["park_request", "heartbeat", "lease_ns", "idle_ns", "layouts", "widen_at"],
        "formats": ["<u8"] * 6,
        "offsets": [0, 8, 16, 24, 32, 40],
        "itemsize": LINE,
    }
)
"""park_request: park once `launch index <= park_request`; heartbeat: changes while the host lives;
layouts: interned layouts, monotonic (its release publishes the entries below it); widen_at: a narrow launch
parks early when more items than this wait, 0 never."""

HOST_STATE: Final = np.dtype(
    {
        # Written by the pump, read by the host.
        "names": ["begun", "parked", "ingested", "reason", "workers"],
        "formats": ["<u8"] * 5,
        "offsets": [0, 8, 16, 24, 32],
        "itemsize": LINE,
    }
)
"""begun: index (1, 2, ...) of the launch that runs or ran last; parked: index of the last launch that has
announced its end; ingested: the pump's cursor."""

DEVICE_STATE: Final = np.dtype(
    {
        "names": ["tickets", "closed", "exits", "cursor", "items", "launches", "layouts"],
        "formats": ["<u8"] * 7,
        # tickets, closed and exits are hammered by every worker: a line each.
        "offsets": [0, LINE, 2 * LINE, 3 * LINE, 3 * LINE + 8, 3 * LINE + 16, 3 * LINE + 24],
        "itemsize": 4 * LINE,
    }
)
"""tickets: next queue item to hand out (atomic add by workers); closed: 0, or 1 + the first item that no
worker of this launch may wait for; exits: blocks that have left; cursor, items, launches, layouts: the
pump's, kept across launches. The last block to leave resets tickets, closed and exits."""

CONTEXT: Final = np.dtype(
    [
        (name, "<u8")
        for name in (
            "host_ring",
            "stamps",
            "host_done",
            "host_control",
            "host_state",
            "host_layouts",
            "device_ring",
            "device_done",
            "queue",
            "item_ends",
            "tile_counts",
            "tile_status",
            "layouts",
            "worker_states",
            "device_state",
            "mask",  # capacity - 1
            "table",  # CPU machine: addresses of the operators; CUDA: unused, the switch is linked in
            "table_length",
        )
    ]
)
"""The executor's single argument is the address of one of these."""

HOST_WORDS: Final = np.dtype(
    {
        # Never crosses the bus: producers may compare-and-swap here.
        "names": ["claimed", "retired", "retire_lock", "failures", "enqueued"],
        "formats": ["<u8"] * 5,
        "offsets": [0, LINE, 2 * LINE, 2 * LINE + 8, 3 * LINE],
        "itemsize": 4 * LINE,
    }
)
"""claimed: next position to claim; retired: every task below has completed and its failure, if any, is
logged; failures: failures logged so far; enqueued: launches asked for (written under the launch lock)."""

FAILURE: Final = np.dtype([("position", "<u8"), ("status", "<u8")])
FAILURE_SLOTS: Final = 1 << 16
"""So many failures are remembered; the position of an older one answers FORGOTTEN, never OK."""

HOST_CONTEXT: Final = np.dtype(
    [
        (name, "<u8")
        for name in (
            "ring",
            "stamps",
            "done",
            "state",  # HOST_STATE
            "words",  # HOST_WORDS
            "failures",  # FAILURE[FAILURE_SLOTS]
            "control",  # HOST_CONTROL
            "launch",  # HOST_LAUNCH
            "mask",
            "max_run",
        )
    ]
)
"""What the compiled host functions take: the addresses as the host sees them."""

HOST_LAUNCH: Final = np.dtype(
    {
        # Never crosses the bus. All but `lock` and `closing` are written under the lock.
        "names": [
            "lock",
            "holds",
            "closing",
            "call",
            "kernel",
            "stream",
            "arguments",
            "threads",
            "quiet",
            "most",
        ],
        "formats": ["<u8"] * 10,
        "offsets": [0, LINE, *range(LINE + 8, LINE + 72, 8), LINE + 72],
        "itemsize": 2 * LINE,
    }
)
"""How a launch is made. lock: 1 while somebody decides about launches; holds: parks in force, nothing is
launched; closing: nothing ever will be; call: address of cuLaunchKernel, 0 where only Python can launch;
kernel, stream, arguments, threads: what it takes; quiet, most: workers of a narrow and of a wide launch."""

LAYOUT_SLOTS: Final = 1 << 16
WINDOW: Final = 256
"""Most tasks that the pump takes in one flight over the bus."""

MAX_RUN: Final = 256
GROUP: Final = 8
"""Descriptors of a run that are staged together; the next group flies while this one runs."""

# A queue entry packs what a worker needs into one word, so that one load hands it over whole:
# lap of the queue (16 bits, never 0) | tile (16) | low half of the position (32).
TILE_SHIFT: Final = 32
LAP_SHIFT: Final = 48


class WorkerState(IntEnum):
    """Low byte of a worker's first state word."""

    ABSENT = 0
    IDLE = 1
    WAITING = 2
    RUNNING = 3


WORKER_STATE_BYTES: Final = 16
"""Two words a worker: op_id << 8 | WorkerState, and the position concerned."""


class ParkReason(IntEnum):
    """Why a launch ended."""

    NONE = 0
    IDLE = 1
    LEASE = 2
    REQUEST = 3
    WIDEN = 4
    ORPHANED = 5


# Scratch: one block's shared memory, by byte offset. The worker and the pump use the same bytes differently.
SCRATCH_ENTRY: Final = 0  # worker: the queue entry taken, 0 to leave
SCRATCH_MERGE: Final = 8  # worker: 1 where this block finished the last tile
SCRATCH_FLOOR: Final = 32  # pump: two words, items and positions known to be complete
SCRATCH_CONTROL: Final = 64  # pump: the host's control words as the last flight brought them
SCRATCH_TASKS: Final = 128  # worker: staged descriptors, two groups used in turn
SCRATCH_META: Final = SCRATCH_TASKS  # pump: run, tiles and link of each task of the window
SCRATCH_STATUS: Final = SCRATCH_TASKS + 2 * GROUP * TASK_BYTES  # worker: status of each task of a run, 32-bit
SCRATCH_TURNS: Final = SCRATCH_STATUS  # pump: a record a turn, three used in turn; see TURN
SCRATCH_CONTEXT: Final = SCRATCH_STATUS + 4 * MAX_RUN  # a copy: an acquire empties L1, re-reading goes to L2
SCRATCH_ARENA: Final = 3456  # operators' own scratch begins here
ARENA_BYTES: Final = 16 * 1024
SCRATCH_BYTES: Final = SCRATCH_ARENA + ARENA_BYTES

TURN: Final = np.dtype([("gap", "<u4"), ("special", "<u4"), ("reason", "<u8")])
"""What the threads of the pump learn in one flight. gap: index of the first stamp that is not published;
special: what shape the window has, see device/pump.py; reason: ParkReason, 0 to go on."""

assert SCRATCH_META + 8 * WINDOW <= SCRATCH_TURNS
assert SCRATCH_TURNS + 3 * TURN.itemsize <= SCRATCH_CONTEXT
assert SCRATCH_CONTEXT + CONTEXT.itemsize <= SCRATCH_ARENA

HEARTBEAT_LIMIT_NS: Final = 2_000_000_000
"""A never-exit executor leaves after this long without a heartbeat: its host has died."""


def field(record: np.dtype[np.void], name: str) -> int:
    """Byte offset of `name` in one of the records above."""
    assert record.fields is not None
    return int(record.fields[name][1])
