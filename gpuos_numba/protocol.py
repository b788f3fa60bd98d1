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

from .descriptor import MAX_INPUTS, MAX_OUTPUTS, SCALAR_BYTES, TASK_BYTES, TASK_WORDS, offset

LINE: Final = 128
"""Bytes that two writers keep apart so that they do not share a cache line (128 on the GPU's L2)."""

HOST_CONTROL: Final = np.dtype(
    {
        # Written by the host under its launch lock, read by the pump in the flight of every iteration.
        # Read in pairs of words, so the order matters.
        "names": ["park_request", "heartbeat", "lease_ns", "idle_ns", "layouts", "widen_at", "hold_ns"],
        "formats": ["<u8"] * 7,
        "offsets": [0, 8, 16, 24, 32, 40, 48],
        "itemsize": LINE,
    }
)
"""park_request: park once `launch index <= park_request`; heartbeat: changes while the host lives;
layouts: interned layouts, monotonic (its release publishes the entries below it); widen_at: a narrow launch
parks early when more items than this wait, 0 never; hold_ns: as idle_ns, where the next task is withheld."""

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
            "trace",  # a ring of records for each block, or 0; changed only while parked
            "trace_mask",  # records of each ring - 1
        )
    ]
)
"""The executor's single argument is the address of one of these."""

HOST_WORDS: Final = np.dtype(
    {
        # Never crosses the bus: producers may compare-and-swap here.
        "names": ["claimed", "retired", "retire_lock", "failures", "enqueued", "gated", "watched"],
        "formats": ["<u8"] * 7,
        "offsets": [0, LINE, 2 * LINE, 2 * LINE + 8, 3 * LINE, 3 * LINE + 8, 3 * LINE + 16],
        "itemsize": 4 * LINE,
    }
)
"""claimed: next position to claim; retired: every task below has completed and its failure, if any, is
logged; failures: failures logged so far; enqueued: launches asked for (written under the launch lock); gated:
1 from the first `hold` on, so that who never holds a task never looks for one; watched: the thread of
host/watch.py looks after launches until the pump has got here."""

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
"""How a launch is made. lock: who decides about launches, 1 in compiled code, 0 nobody; holds: parks in
force, nothing is launched; closing: nothing ever will be; call: address of cuLaunchKernel, 0 where only
Python can launch; kernel, stream, arguments, threads: what it takes; quiet, most: workers of a narrow and of
a wide launch."""

LAYOUT_SLOTS: Final = 1 << 16
WINDOW: Final = 256
"""Most tasks that the pump takes in one flight over the bus."""

MAX_RUN: Final = 256
GROUP: Final = 16
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
    HELD = 6


# --- resident programs: see device/program.py ---

PROGRAM_RUN: Final = np.dtype([("first", "<u8"), ("count", "<u8"), ("tile", "<u8"), ("waits", "<u8")])
"""Tasks that one block executes in order: `count` records from `first`. Runs of one record, one for each
tile, share a tiled task; `tile` is what their body is told. waits: `first | count << 32` of the waits."""

PROGRAM_WAIT: Final = np.dtype("<u8")
"""Lower runs of the same call that must have ended: `first | count << 32`."""

POINTERS: Final = MAX_INPUTS + MAX_OUTPUTS + 1
"""Words of a task that may be addresses: inputs, outputs, and a fifth input."""

PROGRAM_RECORD: Final = np.dtype([("group", "<u4"), ("flags", "<u4"), ("operands", "<u8", POINTERS)])
"""A task of a program, which calls do not change. flags: LINK or 0. An operand is 0 where its address word
stands in the group's template; else the place of its array's base in the table, and two indices whose steps
the group holds: `root | first << 24 | second << 48`. Place 0 of the table is never used."""

RECORD_ROOT_BITS: Final = 24
RECORD_FIRST_BITS: Final = 24
RECORD_SECOND_BITS: Final = 16

PROGRAM_GROUP: Final = np.dtype(
    [("words", "<u8", TASK_WORDS), ("steps", "<u8", (POINTERS, 2)), ("spare", "<u8", 2)]
)
"""What the tasks of a group have in common in one call: the descriptor, with byte offsets or Python numbers
where addresses go, and bytes from one index of an operand to the next."""

# A call's table: u64 bases by place, then PROGRAM_GROUPs. It says what is new in a call.
TABLE_SPACE: Final = 4 << 20
"""Bytes on the bus for the tables of all programs: allocating pinned memory may wait for the executor."""

# A call travels as a task with Flag.PROGRAM and as many tiles as runs. Byte offsets of what it says:
CALL_RUNS: Final = offset("inputs")  # device address of PROGRAM_RUNs
CALL_WAITS: Final = offset("inputs") + 8  # of PROGRAM_WAITs
CALL_RECORDS: Final = offset("inputs") + 16  # of PROGRAM_RECORDs
CALL_TABLE: Final = offset("inputs") + 24  # of the table, which the pump writes
CALL_DONE: Final = offset("outputs")  # of a word for each run: the epoch of the last call in which it ended
CALL_SOURCE: Final = offset("outputs") + 8  # address on the bus of the table
CALL_EPOCH: Final = offset("count")
CALL_BYTES: Final = offset("scalars")  # how much of the table the pump must copy, a multiple of 16
CALL_GROUPS: Final = offset("scalars") + 8  # where in the table the groups begin
assert SCALAR_BYTES >= 16

STAGED_RUN: Final = np.dtype(
    [(name, "<u8") for name in ("table", "groups", "records", "end", "done", "epoch", "runs")]
)
"""What a worker keeps of the run in hand. end: after its last record; done: address of its done word."""

# Scratch: one block's shared memory, by byte offset. The worker and the pump use the same bytes differently.
SCRATCH_ENTRY: Final = 0  # worker: the queue entry taken, 0 to leave
SCRATCH_MERGE: Final = 8  # worker: 1 where this block finished the last tile
SCRATCH_RUN: Final = 16  # worker: the run of a program that it executes, a STAGED_RUN
SCRATCH_BEGAN: Final = 80  # worker: when the task that runs began
SCRATCH_TRACED: Final = 120  # both: records of the trace that this block has written
SCRATCH_FLOOR: Final = 32  # pump: two words, items and positions known to be complete
SCRATCH_CONTROL: Final = 64  # pump: the host's control words as the last flight brought them
SCRATCH_TASKS: Final = 128  # worker: staged descriptors, two groups used in turn
SCRATCH_META: Final = SCRATCH_TASKS  # pump: run, tiles and link of each task of the window
SCRATCH_STATUS: Final = SCRATCH_TASKS + 2 * GROUP * TASK_BYTES  # worker: status of each task of a run, 32-bit
SCRATCH_TURNS: Final = SCRATCH_STATUS  # pump: a record a turn, three used in turn; see TURN
SCRATCH_CONTEXT: Final = SCRATCH_STATUS + 4 * MAX_RUN  # a copy: an acquire empties L1, re-reading goes to L2
SCRATCH_RECORDS: Final = 5504  # worker: staged records of a program, two groups used in turn
SCRATCH_DIGESTS: Final = 7552  # worker: of the group in hand and two that say nothing, see device/runs.py
DIGEST_BYTES: Final = 32
SCRATCH_ARENA: Final = 8192  # operators' own scratch begins here
ARENA_BYTES: Final = 16 * 1024
SCRATCH_BYTES: Final = SCRATCH_ARENA + ARENA_BYTES

TURN: Final = np.dtype(
    [
        ("gap", "<u4"),
        ("special", "<u4"),
        ("reason", "<u8"),
        ("held", "<u8"),
        ("tiles", "<u4"),
        ("spare", "<u4"),
    ]
)
"""What the threads of the pump learn in one flight. gap: index of the first stamp that is not published;
special: what shape the window has, see device/pump.py; reason: ParkReason, 0 to go on; held: 1 where the
first stamp says that its task is withheld; tiles: of the task that has most of them, 0 where none has two."""

HELD: Final = 1 << 63
"""A stamp of `(position + 1) ^ HELD` says: claimed, filled, and withheld until somebody outside, a CUDA
stream, stores the stamp itself. Its producer has given the word away: the next to write it is the stream."""

assert SCRATCH_META + 8 * WINDOW <= SCRATCH_TURNS
assert SCRATCH_TURNS + 3 * TURN.itemsize <= SCRATCH_CONTEXT
assert SCRATCH_CONTEXT + CONTEXT.itemsize <= SCRATCH_RECORDS
assert SCRATCH_RECORDS + 2 * GROUP * PROGRAM_RECORD.itemsize <= SCRATCH_DIGESTS
assert SCRATCH_DIGESTS + (GROUP + 2) * DIGEST_BYTES <= SCRATCH_ARENA
assert SCRATCH_RUN + STAGED_RUN.itemsize <= SCRATCH_BEGAN < SCRATCH_TRACED <= SCRATCH_TASKS - 8
assert SCRATCH_CONTROL + 8 * len(HOST_CONTROL.names or ()) <= SCRATCH_TRACED


class TraceKind(IntEnum):
    """Low byte of a record's last word: see device/trace.py."""

    TASKS = 0
    """A worker ran them: `position` is the first, the number the op_id of that."""
    INGEST = 1
    """The pump handed out as many tasks as the number says, from `position` on."""
    LAUNCH = 2
    """A launch has parked: `position` is its index, the number the ParkReason, the tile its workers."""


TRACE: Final = np.dtype([("begin", "<u8"), ("end", "<u8"), ("position", "<u8"), ("what", "<u8")])
"""A record of the trace. A block's ring is a line with the count of all records written, then the records."""

HEARTBEAT_LIMIT_NS: Final = 2_000_000_000
"""A never-exit executor leaves after this long without a heartbeat: its host has died."""


def field(record: np.dtype[np.void], name: str) -> int:
    """Byte offset of `name` in one of the records above."""
    assert record.fields is not None
    return int(record.fields[name][1])
