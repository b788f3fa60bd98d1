"""Resident programs: a run number arrives, its tasks lie in scratch as if they had come over the ring.

A program's records were uploaded when it was recorded and never change. What does change from call to call,
the addresses of its arrays and what depends on their shapes, is the call's *table*, which the pump brings
over the bus before it hands the call out. A worker joins the two, a group of tasks at a time.
"""

from __future__ import annotations

from typing import Any

from ..descriptor import MAX_INPUTS, MAX_OUTPUTS, TASK_BYTES, Flag, offset
from ..machines.base import Body, Primitives
from ..protocol import (
    CALL_BYTES,
    CALL_DONE,
    CALL_EPOCH,
    CALL_GROUPS,
    CALL_RECORDS,
    CALL_RUNS,
    CALL_SOURCE,
    CALL_TABLE,
    CALL_WAITS,
    CONTEXT,
    GROUP,
    POINTERS,
    PROGRAM_GROUP,
    PROGRAM_RECORD,
    PROGRAM_RUN,
    RECORD_FIRST_BITS,
    RECORD_ROOT_BITS,
    SCRATCH_RECORDS,
    SCRATCH_RUN,
    SCRATCH_TASKS,
    STAGED_RUN,
    field,
)

FIFTH_WORD = TASK_BYTES // 8 - 1
"""The word of a task where the address of a fifth input lies."""
FIRST_POINTER = offset("inputs") // 8
ADDRESSES = MAX_INPUTS + MAX_OUTPUTS
assert offset("outputs") == offset("inputs") + 32


def make_copy_table(m: Primitives) -> Body:
    """`copy_table(context, mask, position)`: bring the table of a call to the device. All threads of the
    pump.

    The table is whole: the host wrote it before it published the task. Whoever hands out the call's items
    fences after the barrier that this ends with. A call whose table is there already says 0 bytes.
    """
    u64, barrier = m.u64, m.barrier
    thread_index, block_width, load_u64 = m.thread_index, m.block_width, m.load_u64
    load_pair_relaxed_sys, store_pair = m.load_pair_relaxed_sys, m.store_pair
    DEVICE_RING, TASK_SIZE = u64(field(CONTEXT, "device_ring")), u64(TASK_BYTES)
    BYTES, SOURCE, TABLE = u64(CALL_BYTES), u64(CALL_SOURCE), u64(CALL_TABLE)
    SIXTEEN, ZERO = u64(16), u64(0)

    def copy_table(context: Any, mask: Any, position: Any) -> None:
        task = load_u64(context + DEVICE_RING) + (position & mask) * TASK_SIZE
        size = load_u64(task + BYTES)
        source = load_u64(task + SOURCE)
        target = load_u64(task + TABLE)
        step = block_width() * SIXTEEN
        a = thread_index() * SIXTEEN
        # Four loads a thread in flight at a time: each takes a microsecond, whatever the others do.
        while a < size:
            b = a + step
            c = b + step
            d = c + step
            a_low = a_high = b_low = b_high = c_low = c_high = d_low = d_high = ZERO
            a_low, a_high = load_pair_relaxed_sys(source + a)
            if b < size:
                b_low, b_high = load_pair_relaxed_sys(source + b)
            if c < size:
                c_low, c_high = load_pair_relaxed_sys(source + c)
            if d < size:
                d_low, d_high = load_pair_relaxed_sys(source + d)
            store_pair(target + a, a_low, a_high)
            if b < size:
                store_pair(target + b, b_low, b_high)
            if c < size:
                store_pair(target + c, c_low, c_high)
            if d < size:
                store_pair(target + d, d_low, d_high)
            a = d + step
        barrier()

    return m.device(copy_table)


def _make_stage_records(m: Primitives) -> Body:
    """`stage_records(scratch, records, at, count)`: start copying records to scratch."""
    u64 = m.u64
    thread_index, block_width, copy_async = m.thread_index, m.block_width, m.copy_async
    RECORDS, SIZE = u64(SCRATCH_RECORDS), u64(PROGRAM_RECORD.itemsize)
    TO_RECORD, CHUNK_MASK = u64(2), u64(PROGRAM_RECORD.itemsize // 16 - 1)
    SIXTEEN, SLOT = u64(16), u64(2 * GROUP - 1)
    assert PROGRAM_RECORD.itemsize // 16 == 1 << 2

    def stage_records(scratch: Any, records: Any, at: Any, count: Any) -> None:
        chunk = thread_index()
        while chunk < count << TO_RECORD:
            number = at + (chunk >> TO_RECORD)
            inside = (chunk & CHUNK_MASK) * SIXTEEN
            copy_async(scratch + RECORDS + (number & SLOT) * SIZE + inside, records + number * SIZE + inside)
            chunk += block_width()

    return m.device(stage_records)


def _make_relocate(m: Primitives) -> Body:
    """`relocate(scratch, at, end)`: make tasks of the staged records from `at` to the end of their group.

    Or to `end`, if that comes first. Each thread makes a word at a time: the group's template, and where the
    word is an address, the base of its array and how far into it the operand begins.
    """
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_u64, store_u64, load_relaxed_gpu = m.load_u64, m.store_u64, m.load_relaxed_gpu
    RECORDS, RECORD_SIZE = u64(SCRATCH_RECORDS), u64(PROGRAM_RECORD.itemsize)
    TASKS, TASK_SIZE = u64(SCRATCH_TASKS), u64(TASK_BYTES)
    TABLE, GROUPS = (
        u64(SCRATCH_RUN + field(STAGED_RUN, "table")),
        u64(SCRATCH_RUN + field(STAGED_RUN, "groups")),
    )
    GROUP_SIZE, STEPS = u64(PROGRAM_GROUP.itemsize), u64(field(PROGRAM_GROUP, "steps"))
    OPERANDS = u64(field(PROGRAM_RECORD, "operands"))
    GROUP_MASK, SLOT = u64(GROUP - 1), u64(2 * GROUP - 1)
    ZERO, ONE, EIGHT, SIXTEEN = u64(0), u64(1), u64(8), u64(16)
    TO_TASK, WORD = u64(4), u64(TASK_BYTES // 8 - 1)
    LOW_HALF, HIGH_HALF = u64(0xFFFFFFFF), u64(0xFFFFFFFF00000000)
    FIRST, COUNT, FIFTH, LAST = u64(FIRST_POINTER), u64(ADDRESSES), u64(FIFTH_WORD), u64(POINTERS - 1)
    ROOT, FIRST_INDEX = u64((1 << RECORD_ROOT_BITS) - 1), u64((1 << RECORD_FIRST_BITS) - 1)
    TO_FIRST, TO_SECOND = u64(RECORD_ROOT_BITS), u64(RECORD_ROOT_BITS + RECORD_FIRST_BITS)
    assert TASK_BYTES // 8 == 1 << 4

    def relocate(scratch: Any, at: Any, end: Any) -> None:
        table = load_u64(scratch + TABLE)
        groups = load_u64(scratch + GROUPS)
        last = (at | GROUP_MASK) + ONE
        if end < last:
            last = end
        words = (last - at) << TO_TASK
        index = thread_index()
        while index < words:
            number = at + (index >> TO_TASK)
            word = index & WORD
            record = scratch + RECORDS + (number & SLOT) * RECORD_SIZE
            head = load_u64(record)
            group = groups + (head & LOW_HALF) * GROUP_SIZE
            # Relaxed, which reads past L1: the line may be there from a call before.
            value = load_relaxed_gpu(group + word * EIGHT)
            place = word - FIRST
            if word == FIFTH:
                place = LAST
            if place < COUNT or word == FIFTH:
                operand = load_u64(record + OPERANDS + place * EIGHT)
                if operand != ZERO:
                    steps = group + STEPS + place * SIXTEEN
                    base = load_relaxed_gpu(table + (operand & ROOT) * EIGHT)
                    first = load_relaxed_gpu(steps)
                    second = load_relaxed_gpu(steps + EIGHT)
                    value += base + ((operand >> TO_FIRST) & FIRST_INDEX) * first
                    value += (operand >> TO_SECOND) * second
            if word == ZERO:
                value |= head & HIGH_HALF
            store_u64(scratch + TASKS + (number & SLOT) * TASK_SIZE + word * EIGHT, value)
            index += block_width()

    return m.device(relocate)


def make_begin_run(m: Primitives, await_position: Body) -> Body:
    """`begin_run(context, scratch, mask, task, run) -> (number of its first record, tile)`. All threads.

    `task` is the call as it came from the ring, staged in scratch; its place is used again. Waits for what
    the call waits for and for the lower runs that this one needs.
    """
    u64, barrier, thread_index, block_width = m.u64, m.barrier, m.thread_index, m.block_width
    load_u64, store_u64, copy_wait = m.load_u64, m.store_u64, m.copy_wait
    load_relaxed_gpu, load_acquire_gpu, pause = m.load_relaxed_gpu, m.load_acquire_gpu, m.pause
    stage_records, relocate = _make_stage_records(m), _make_relocate(m)
    RUNS, WAITS, RECORDS_AT = u64(CALL_RUNS), u64(CALL_WAITS), u64(CALL_RECORDS)
    TABLE_AT, GROUPS_AT, DONE_AT, EPOCH_AT = (
        u64(CALL_TABLE),
        u64(CALL_GROUPS),
        u64(CALL_DONE),
        u64(CALL_EPOCH),
    )
    TILES, AFTER_AT, HALF, LOW_HALF = u64(offset("tiles") - 4), u64(offset("after")), u64(32), u64(0xFFFFFFFF)
    AFTER_0, AFTER_1 = u64(Flag.AFTER_0), u64(Flag.AFTER_1)
    RUN_SIZE = u64(PROGRAM_RUN.itemsize)
    FIRST, COUNT = u64(field(PROGRAM_RUN, "first")), u64(field(PROGRAM_RUN, "count"))
    TILE, WAIT = u64(field(PROGRAM_RUN, "tile")), u64(field(PROGRAM_RUN, "waits"))
    STAGED = u64(SCRATCH_RUN)
    TABLE, GROUPS = u64(field(STAGED_RUN, "table")), u64(field(STAGED_RUN, "groups"))
    RECORDS, END = u64(field(STAGED_RUN, "records")), u64(field(STAGED_RUN, "end"))
    DONE, EPOCH, ALL = (
        u64(field(STAGED_RUN, "done")),
        u64(field(STAGED_RUN, "epoch")),
        u64(field(STAGED_RUN, "runs")),
    )
    ZERO, ONE, EIGHT, TOP_BIT = u64(0), u64(1), u64(8), u64(1 << 63)
    GROUP_LENGTH, GROUP_MASK = u64(GROUP), u64(GROUP - 1)

    def begin_run(context: Any, scratch: Any, mask: Any, task: Any, run: Any) -> Any:
        thread = thread_index()
        records = load_u64(task + RECORDS_AT)
        done = load_u64(task + DONE_AT)
        epoch = load_u64(task + EPOCH_AT)
        entry = load_u64(task + RUNS) + run * RUN_SIZE
        waits = load_u64(task + WAITS)
        first = load_relaxed_gpu(entry + FIRST)
        count = load_relaxed_gpu(entry + COUNT)
        tile = load_relaxed_gpu(entry + TILE)
        wait = load_relaxed_gpu(entry + WAIT)
        ahead = GROUP_LENGTH + GROUP_LENGTH - (first & GROUP_MASK)
        if count < ahead:
            ahead = count
        stage_records(scratch, records, first, ahead)
        if thread == ZERO:
            staged = scratch + STAGED
            table = load_u64(task + TABLE_AT)
            store_u64(staged + TABLE, table)
            store_u64(staged + GROUPS, table + load_u64(task + GROUPS_AT))
            store_u64(staged + RECORDS, records)
            store_u64(staged + END, first + count)
            store_u64(staged + DONE, done + run * EIGHT)
            store_u64(staged + EPOCH, epoch)
            store_u64(staged + ALL, load_u64(task + TILES) >> HALF)
            flags = load_u64(task) >> HALF
            if flags & AFTER_0 != ZERO:
                await_position(context, mask, load_u64(task + AFTER_AT))
            if flags & AFTER_1 != ZERO:
                await_position(context, mask, load_u64(task + AFTER_AT + EIGHT))
        # Ranges of lower runs; threads share each. An epoch is behind as long as its run has not ended.
        number = wait & LOW_HALF
        stop = number + (wait >> HALF)
        while number < stop:
            lower = load_relaxed_gpu(waits + number * EIGHT)
            index = thread
            while index < lower >> HALF:
                word = done + ((lower & LOW_HALF) + index) * EIGHT
                spins = ZERO
                # Acquire: what that run wrote is visible; the barrier below carries it to the block. Pairs
                # with the release in end_run.
                while load_acquire_gpu(word) - epoch >= TOP_BIT:
                    pause(spins)
                    spins += ONE
                index += block_width()
            number += ONE
        copy_wait()
        barrier()  # also: everybody has read the call, whose place relocate writes to
        relocate(scratch, first, first + count)
        barrier()
        return first, tile

    return m.device(begin_run)


def make_next_group(m: Primitives) -> Body:
    """`next_group(scratch, at)`: the group that begins at record `at` was staged: make its tasks.

    The one after it flies meanwhile. All threads, between two barriers.
    """
    u64, load_u64 = m.u64, m.load_u64
    stage_records, relocate = _make_stage_records(m), _make_relocate(m)
    RECORDS, END = (
        u64(SCRATCH_RUN + field(STAGED_RUN, "records")),
        u64(SCRATCH_RUN + field(STAGED_RUN, "end")),
    )
    GROUP_LENGTH = u64(GROUP)

    def next_group(scratch: Any, at: Any) -> None:
        end = load_u64(scratch + END)
        following = at + GROUP_LENGTH
        if following < end:
            ahead = end - following
            if GROUP_LENGTH < ahead:
                ahead = GROUP_LENGTH
            stage_records(scratch, load_u64(scratch + RECORDS), following, ahead)
        relocate(scratch, at, end)

    return m.device(next_group)


def make_end_run(m: Primitives) -> Body:
    """`end_run(scratch) -> runs of the call`: after the block's barrier, let higher runs begin."""
    u64, thread_index = m.u64, m.thread_index
    load_u64, store_release_gpu = m.load_u64, m.store_release_gpu
    DONE = u64(SCRATCH_RUN + field(STAGED_RUN, "done"))
    EPOCH = u64(SCRATCH_RUN + field(STAGED_RUN, "epoch"))
    ALL, ZERO = u64(SCRATCH_RUN + field(STAGED_RUN, "runs")), u64(0)

    def end_run(scratch: Any) -> Any:
        if thread_index() == ZERO:
            word = load_u64(scratch + DONE)
            epoch = load_u64(scratch + EPOCH)
            # Release: what the block wrote is visible. Pairs with the acquire in begin_run.
            store_release_gpu(word, epoch)
        return load_u64(scratch + ALL)

    return m.device(end_run)
