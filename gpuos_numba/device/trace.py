"""The trace: what a block did arrives, 32-byte records leave for a ring of its own in device memory.

Only the first thread of a block writes, and the host reads when the executor has parked. Where no trace is
taken, each place costs a branch on a word in shared memory: the context is copied there at the launch, and it
is only changed between launches.
"""

from __future__ import annotations

from typing import Any

from ..machines.base import Body, Primitives
from ..protocol import CONTEXT, LINE, SCRATCH_BEGAN, SCRATCH_TRACED, TRACE, field

# A record's last word: kind (8 bits) | tasks (8) | tile (16) | op_id, or another number (32).
TRACE_TASKS = 8
TRACE_TILE = 16
TRACE_NUMBER = 32


def make_open(m: Primitives) -> Body:
    """`open_trace(context, block, scratch)`: one thread, at the launch: go on where the last launch ended.

    `context` is the copy in scratch; its `trace` becomes the address of this block's own ring.
    """
    u64, load_u64, store_u64 = m.u64, m.load_u64, m.store_u64
    BUFFERS, MASK = u64(field(CONTEXT, "trace")), u64(field(CONTEXT, "trace_mask"))
    ZERO, ONE, HEADER, SIZE, RECORDS = u64(0), u64(1), u64(LINE), u64(TRACE.itemsize), u64(SCRATCH_TRACED)

    def open_trace(context: Any, block: Any, scratch: Any) -> None:
        trace = load_u64(context + BUFFERS)
        if trace != ZERO:
            trace += block * (HEADER + (load_u64(context + MASK) + ONE) * SIZE)
            store_u64(context + BUFFERS, trace)
            store_u64(scratch + RECORDS, load_u64(trace))

    return m.device(open_trace)


def make_record(m: Primitives) -> Body:
    """`record(context, scratch, begin, end, position, what)`: one thread writes one record.

    The oldest is overwritten where the ring is full; the count tells how many were.
    """
    u64, load_u64, store_u64, store_pair = m.u64, m.load_u64, m.store_u64, m.store_pair
    BUFFER, MASK = u64(field(CONTEXT, "trace")), u64(field(CONTEXT, "trace_mask"))
    ONE, SIXTEEN, HEADER, RECORDS = u64(1), u64(16), u64(LINE), u64(SCRATCH_TRACED)
    SIZE = u64(TRACE.itemsize)

    def record(context: Any, scratch: Any, begin: Any, end: Any, position: Any, what: Any) -> None:
        trace = load_u64(context + BUFFER)
        count = load_u64(scratch + RECORDS)
        at = trace + HEADER + (count & load_u64(context + MASK)) * SIZE
        store_pair(at, begin, end)
        store_pair(at + SIXTEEN, position, what)
        count += ONE
        store_u64(scratch + RECORDS, count)
        store_u64(trace, count)

    return m.device(record)


def make_begin_task(m: Primitives) -> Body:
    """`begin_task(scratch)`: the clock starts for a task; in a run, it goes on from the one before."""
    u64, store_u64, now_ns = m.u64, m.store_u64, m.now_ns
    BEGAN = u64(SCRATCH_BEGAN)

    def begin_task(scratch: Any) -> None:
        store_u64(scratch + BEGAN, now_ns())

    return m.device(begin_task)


def make_end_tasks(m: Primitives) -> Body:
    """`end_tasks(context, scratch, first, last, op_id, tile)`: tasks have ended that ran in a row."""
    u64, load_u64, store_u64, now_ns = m.u64, m.load_u64, m.store_u64, m.now_ns
    record = make_record(m)
    BEGAN, ONE = u64(SCRATCH_BEGAN), u64(1)
    TASKS, TILE, NUMBER = u64(TRACE_TASKS), u64(TRACE_TILE), u64(TRACE_NUMBER)

    def end_tasks(context: Any, scratch: Any, first: Any, last: Any, op_id: Any, tile: Any) -> None:
        now = now_ns()
        what = ((last - first + ONE) << TASKS) | (tile << TILE) | (op_id << NUMBER)
        record(context, scratch, load_u64(scratch + BEGAN), now, first, what)
        store_u64(scratch + BEGAN, now)

    return m.device(end_tasks)
