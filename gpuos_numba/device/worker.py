"""The worker: an item arrives from the queue, its tasks run, their done words leave.

One block. It owns what it took, a whole task, one tile of a task or a run of linked tasks, until it has
published the completion. It waits on nothing but lower positions, so the lowest unfinished task can always
run and every launch can always end.
"""

from __future__ import annotations

from typing import Any

from ..descriptor import STATUS_BITS, TASK_BYTES, Flag, Status, offset
from ..machines.base import Body, Primitives
from ..protocol import (
    CONTEXT,
    DEVICE_STATE,
    GROUP,
    LAP_SHIFT,
    MAX_RUN,
    SCRATCH_ARENA,
    SCRATCH_ENTRY,
    SCRATCH_MERGE,
    SCRATCH_STATUS,
    SCRATCH_TASKS,
    TILE_SHIFT,
    WORKER_STATE_BYTES,
    WorkerState,
    field,
)
from .program import make_begin_run, make_end_run, make_next_group
from .ring import make_leave, make_log2, make_queue_entry, make_share_context
from .trace import make_begin_task, make_end_tasks, make_open

STATUS_SHIFT = STATUS_BITS
STATE_SHIFT = 8  # op_id << 8 | WorkerState


def make_worker(m: Primitives) -> Body:
    """Build the worker for a machine: `worker(context, block, workers, scratch)`, block = 1 ... workers."""
    u64, barrier = m.u64, m.barrier
    thread_index, block_width = m.thread_index, m.block_width
    load_u64, store_u64 = m.load_u64, m.store_u64
    store_u32, shared_max_u32 = m.store_u32, m.shared_max_u32
    copy_wait, dispatch = m.copy_wait, m.dispatch
    is_plain, run_plain = m.is_plain, m.run_plain
    load_task_u64, load_task_pair = m.load_task_u64, m.load_task_pair
    load_relaxed_gpu, store_relaxed_gpu = m.load_relaxed_gpu, m.store_relaxed_gpu

    take, await_position, stage = _make_take(m), _make_await(m), _make_stage(m)
    count_tile, finish_tiles, publish = _make_count_tile(m), _make_finish_tiles(m), _make_publish(m)
    leave, log2, share_context = make_leave(m), make_log2(m), make_share_context(m)
    open_trace, begin_task, end_tasks = make_open(m), make_begin_task(m), make_end_tasks(m)
    TRACE = u64(field(CONTEXT, "trace"))
    begin_run, next_group, end_run = make_begin_run(m, await_position), make_next_group(m), make_end_run(m)

    DEVICE_STATE_AT, MASK = u64(field(CONTEXT, "device_state")), u64(field(CONTEXT, "mask"))
    WORKER_STATES = u64(field(CONTEXT, "worker_states"))
    CURSOR = u64(field(DEVICE_STATE, "cursor"))
    ZERO, ONE, FOUR, EIGHT, THIRTY_TWO = u64(0), u64(1), u64(4), u64(8), u64(32)
    STATE_BYTES, TASK_SIZE = u64(WORKER_STATE_BYTES), u64(TASK_BYTES)
    LOW_HALF, TILE_MASK = u64(0xFFFFFFFF), u64(0xFFFF)
    SIGN, HIGH_HALF = u64(0x80000000), u64(0xFFFFFFFF00000000)
    TO_TILE, HALF, TO_STATE = u64(TILE_SHIFT), u64(32), u64(STATE_SHIFT)
    ENTRY, TASKS, STATUSES = u64(SCRATCH_ENTRY), u64(SCRATCH_TASKS), u64(SCRATCH_STATUS)
    ARENA, RUN_MASK, RUN_LIMIT = u64(SCRATCH_ARENA), u64(MAX_RUN - 1), u64(MAX_RUN)
    GROUP_LENGTH, GROUP_MASK, SLOT = u64(GROUP), u64(GROUP - 1), u64(2 * GROUP - 1)
    LINK, MERGE, PROGRAM = u64(Flag.LINK), u64(Flag.MERGE), u64(Flag.PROGRAM)
    AFTER_0, AFTER_1 = u64(Flag.AFTER_0), u64(Flag.AFTER_1)
    AFTER_ANY = u64(Flag.AFTER_0 | Flag.AFTER_1)
    AFTER_AT = u64(offset("after"))
    assert (offset("op_id"), offset("flags"), offset("run"), offset("tiles")) == (0, 4, 8, 12)
    BAD_DESCRIPTOR = u64(Status.BAD_DESCRIPTOR)
    IDLE, WAITING, RUNNING = u64(WorkerState.IDLE), u64(WorkerState.WAITING), u64(WorkerState.RUNNING)

    def worker(context: Any, block: Any, workers: Any, scratch: Any) -> None:
        context = share_context(context, scratch)
        thread = thread_index()
        width = block_width()
        state = load_u64(context + DEVICE_STATE_AT)
        mask = load_u64(context + MASK)
        queue_bits = log2(mask + ONE) + ONE
        mine = load_u64(context + WORKER_STATES) + (block - ONE) * STATE_BYTES
        position = load_relaxed_gpu(state + CURSOR)  # any position near those to come
        # Two warps share the pause between items: one publishes the last, one takes the next.
        taker = ZERO
        if width > THIRTY_TWO:
            taker = THIRTY_TWO
        traced = False
        if thread == ZERO:
            open_trace(context, block, scratch)
            traced = load_task_u64(context + TRACE) != ZERO  # thread 0's alone, for this launch
        index = thread
        while index < RUN_LIMIT:
            store_u32(scratch + STATUSES + index * FOUR, ZERO)
            index += width

        while True:
            if thread == taker:
                store_u64(scratch + ENTRY, take(context, state, mask, queue_bits))
            barrier()
            entry = load_u64(scratch + ENTRY)
            if entry == ZERO:
                break
            tile = (entry >> TO_TILE) & TILE_MASK
            # The entry holds the low half of the position; the last position seen is within a lap of it.
            step = (entry - position) & LOW_HALF
            if step & SIGN != ZERO:
                step |= HIGH_HALF
            position += step
            first = position
            stage(context, scratch, mask, position, ONE)
            copy_wait()
            barrier()
            flags = load_task_u64(scratch + TASKS + (position & SLOT) * TASK_SIZE) >> HALF
            program = flags & PROGRAM
            if program != ZERO:
                # One run of a program. `position` counts its records until the run has ended.
                call = scratch + TASKS + (position & SLOT) * TASK_SIZE
                position, tile = begin_run(context, scratch, mask, call, tile)
            elif flags & LINK != ZERO:
                # A run: the rest of its first group and the whole next one fly now. What lies behind the
                # run's end is copied as well and never looked at.
                stage(
                    context,
                    scratch,
                    mask,
                    position + ONE,
                    GROUP_LENGTH + GROUP_MASK - (position & GROUP_MASK),
                )
                copy_wait()
                barrier()

            # Once, and once more where a task wants its tiles joined: a second call of dispatch would be a
            # second copy of the switch and of its hottest body.
            while True:
                while True:  # the tasks of a run; one turn where the task stands alone
                    task = scratch + TASKS + (position & SLOT) * TASK_SIZE
                    head, shape = load_task_pair(task)
                    op_id = head & LOW_HALF
                    flags = head >> HALF
                    tiles = shape >> HALF
                    if flags & AFTER_ANY != ZERO:
                        if thread == ZERO:
                            store_relaxed_gpu(mine + EIGHT, position)
                            store_relaxed_gpu(mine, (op_id << TO_STATE) | WAITING)
                            if flags & AFTER_0 != ZERO:
                                await_position(context, mask, load_u64(task + AFTER_AT))
                            if flags & AFTER_1 != ZERO:
                                await_position(context, mask, load_u64(task + AFTER_AT + EIGHT))
                        barrier()
                    if thread == ZERO:
                        store_relaxed_gpu(mine + EIGHT, position)
                        store_relaxed_gpu(mine, (op_id << TO_STATE) | RUNNING)
                        if traced:
                            if position == first or program != ZERO or flags & AFTER_ANY != ZERO:
                                begin_task(scratch)
                    begun = position
                    if tiles > mask + ONE:
                        status = BAD_DESCRIPTOR
                    elif tiles <= ONE and is_plain(op_id):
                        # This task, and what is linked to it as far as its group goes.
                        position = run_plain(scratch, position)
                        flags = load_task_u64(scratch + TASKS + (position & SLOT) * TASK_SIZE) >> HALF
                        status = ZERO
                    else:
                        status = u64(dispatch(context, op_id, task, tile, scratch + ARENA))
                    if traced:
                        if program != ZERO:  # all of its tasks have the position of the call
                            end_tasks(context, scratch, first, first, op_id, tile)
                        else:
                            end_tasks(context, scratch, begun, position, op_id, tile)
                    if status != ZERO:
                        number = (position - first) & RUN_MASK
                        if program != ZERO:
                            number = ZERO  # a call has one status
                        shared_max_u32(scratch + STATUSES + number * FOUR, status)
                    if flags & LINK == ZERO:
                        break
                    position += ONE
                    if position & GROUP_MASK == ZERO:
                        # The group that begins here flew while the last one ran; the one after it flies now.
                        copy_wait()
                        barrier()
                        if program != ZERO:
                            next_group(scratch, position)
                            barrier()
                        else:
                            stage(context, scratch, mask, position + GROUP_LENGTH, GROUP_LENGTH)
                    else:
                        barrier()
                barrier()  # outputs and statuses are the whole block's
                if program != ZERO:
                    tiles = end_run(scratch)
                    flags = tile = ZERO
                    position = first
                if tiles <= ONE or tiles > mask + ONE:
                    publish(context, scratch, mask, first, position)
                    break
                if tile != tiles:
                    if count_tile(context, scratch, mask, position, tiles) == ZERO:
                        break
                    if flags & MERGE != ZERO:
                        tile = tiles
                        continue
                finish_tiles(context, scratch, mask, position)
                break
            if thread == ZERO:
                store_relaxed_gpu(mine, IDLE)

        if thread == ZERO:
            leave(state, workers)

    return worker


def _make_take(m: Primitives) -> Body:
    """`take(context, state, mask, queue_bits)` -> the next item's entry, or 0 if this launch has no more.

    The number drawn is the only thing that workers contend for; then each polls a word of its own.
    """
    u64 = m.u64
    atomic_add_gpu, load_relaxed_gpu, load_acquire_gpu = (
        m.atomic_add_gpu,
        m.load_relaxed_gpu,
        m.load_acquire_gpu,
    )
    load_u64, pause = m.load_u64, m.pause
    queue_entry = make_queue_entry(m)
    QUEUE = u64(field(CONTEXT, "queue"))
    TICKETS, CLOSED = u64(field(DEVICE_STATE, "tickets")), u64(field(DEVICE_STATE, "closed"))
    ZERO, ONE, EIGHT, TO_LAP = u64(0), u64(1), u64(8), u64(LAP_SHIFT)

    def take(context: Any, state: Any, mask: Any, queue_bits: Any) -> Any:
        ticket = atomic_add_gpu(state + TICKETS, ONE)
        queue_mask = mask + mask + ONE
        slot = load_u64(context + QUEUE) + (ticket & queue_mask) * EIGHT
        lap = queue_entry(ticket, queue_bits, ZERO, ZERO) >> TO_LAP
        spins = ZERO
        entry = ZERO
        while True:
            # Relaxed: `closed` only says that the entry will never come, and brings no data along.
            closed = load_relaxed_gpu(state + CLOSED)
            # Acquire: descriptor and layouts are visible. Pairs with the fence in device/pump.py before
            # hand_out; the barrier after take carries it to the block.
            found = load_acquire_gpu(slot)
            if found >> TO_LAP == lap:
                entry = found
                break
            if closed != ZERO and ticket >= closed - ONE:
                break
            pause(spins)
            spins += ONE
        return entry

    return m.device(take)


def _make_await(m: Primitives) -> Body:
    """`await_position(context, mask, position)`: wait until the task at a lower position has completed."""
    u64 = m.u64
    load_acquire_gpu, load_u64, pause = m.load_acquire_gpu, m.load_u64, m.pause
    DEVICE_DONE = u64(field(CONTEXT, "device_done"))
    ZERO, ONE, EIGHT, SHIFT, TOP_BIT = u64(0), u64(1), u64(8), u64(STATUS_SHIFT), u64(1 << 63)

    def await_position(context: Any, mask: Any, position: Any) -> None:
        word = load_u64(context + DEVICE_DONE) + (position & mask) * EIGHT
        target = (position + ONE) << SHIFT
        spins = ZERO
        # Acquire: what the task wrote is visible. Pairs with publish. A later lap's word counts as done.
        while load_acquire_gpu(word) - target >= TOP_BIT:
            pause(spins)
            spins += ONE

    return m.device(await_position)


def _make_stage(m: Primitives) -> Body:
    """`stage(context, scratch, mask, position, count)`: start copying descriptors to scratch."""
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_u64, copy_async = m.load_u64, m.copy_async
    DEVICE_RING = u64(field(CONTEXT, "device_ring"))
    TASKS, TASK_SIZE, CHUNK_MASK = u64(SCRATCH_TASKS), u64(TASK_BYTES), u64(TASK_BYTES // 16 - 1)
    TO_TASK, SIXTEEN, SLOT = u64(3), u64(16), u64(2 * GROUP - 1)
    assert TASK_BYTES // 16 == 1 << 3

    def stage(context: Any, scratch: Any, mask: Any, position: Any, count: Any) -> None:
        chunk = thread_index()
        while chunk < count << TO_TASK:
            at = position + (chunk >> TO_TASK)
            inside = (chunk & CHUNK_MASK) * SIXTEEN
            source = load_u64(context + DEVICE_RING) + (at & mask) * TASK_SIZE + inside
            copy_async(scratch + TASKS + (at & SLOT) * TASK_SIZE + inside, source)
            chunk += block_width()

    return m.device(stage)


def _make_publish(m: Primitives) -> Body:
    """`publish(context, scratch, mask, first, last)`: all positions of the item have ended."""
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_u64, load_u32, store_u32 = m.load_u64, m.load_u32, m.store_u32
    fence_acq_rel_sys, store_relaxed_gpu, store_relaxed_sys = (
        m.fence_acq_rel_sys,
        m.store_relaxed_gpu,
        m.store_relaxed_sys,
    )
    DEVICE_DONE, HOST_DONE = u64(field(CONTEXT, "device_done")), u64(field(CONTEXT, "host_done"))
    ZERO, ONE, FOUR, EIGHT = u64(0), u64(1), u64(4), u64(8)
    SHIFT, STATUSES = u64(STATUS_SHIFT), u64(SCRATCH_STATUS)

    def publish(context: Any, scratch: Any, mask: Any, first: Any, last: Any) -> None:
        index = thread_index()
        if index <= last - first:
            device_done = load_u64(context + DEVICE_DONE)
            host_done = load_u64(context + HOST_DONE)
            # Release, together with the relaxed stores after it: the outputs, which the block's last
            # barrier made this thread's too, are visible before the done words. Pairs with the acquires in
            # await_position and in host/completion.py.
            fence_acq_rel_sys()
            while index <= last - first:
                position = first + index
                status = load_u32(scratch + STATUSES + index * FOUR)
                word = ((position + ONE) << SHIFT) | status
                store_relaxed_gpu(device_done + (position & mask) * EIGHT, word)
                store_relaxed_sys(host_done + (position & mask) * EIGHT, word)
                store_u32(scratch + STATUSES + index * FOUR, ZERO)
                index += block_width()

    return m.device(publish)


def _make_count_tile(m: Primitives) -> Body:
    """`count_tile(context, scratch, mask, position, tiles)` -> 1 in the block that finished the last tile."""
    u64, barrier, thread_index = m.u64, m.barrier, m.thread_index
    load_u64, store_u64, load_u32, store_u32 = m.load_u64, m.store_u64, m.load_u32, m.store_u32
    atomic_add_gpu, atomic_max_gpu = m.atomic_add_gpu, m.atomic_max_gpu
    TILE_COUNTS, TILE_STATUS = u64(field(CONTEXT, "tile_counts")), u64(field(CONTEXT, "tile_status"))
    ZERO, ONE, EIGHT = u64(0), u64(1), u64(8)
    LAST, STATUSES = u64(SCRATCH_MERGE), u64(SCRATCH_STATUS)

    def count_tile(context: Any, scratch: Any, mask: Any, position: Any, tiles: Any) -> Any:
        if thread_index() == ZERO:
            status = load_u32(scratch + STATUSES)
            if status != ZERO:
                atomic_max_gpu(load_u64(context + TILE_STATUS) + (position & mask) * EIGHT, status)
                store_u32(scratch + STATUSES, ZERO)
            count = load_u64(context + TILE_COUNTS) + (position & mask) * EIGHT
            # Acquire and release: the last tile sees the results and statuses of all others.
            before = atomic_add_gpu(count, ONE)
            store_u64(scratch + LAST, u64(before == tiles - ONE))
        barrier()
        return load_u64(scratch + LAST)

    return m.device(count_tile)


def _make_finish_tiles(m: Primitives) -> Body:
    """`finish_tiles(context, scratch, mask, position)`: all tiles have ended: publish their worst status."""
    u64, thread_index = m.u64, m.thread_index
    load_u64, shared_max_u32 = m.load_u64, m.shared_max_u32
    load_relaxed_gpu, store_relaxed_gpu = m.load_relaxed_gpu, m.store_relaxed_gpu
    store_release_gpu = m.store_release_gpu
    publish = _make_publish(m)
    DEVICE_DONE, ONE, SHIFT = u64(field(CONTEXT, "device_done")), u64(1), u64(STATUS_SHIFT)
    TILE_COUNTS, TILE_STATUS = u64(field(CONTEXT, "tile_counts")), u64(field(CONTEXT, "tile_status"))
    ZERO, EIGHT, STATUSES = u64(0), u64(8), u64(SCRATCH_STATUS)

    def finish_tiles(context: Any, scratch: Any, mask: Any, position: Any) -> None:
        if thread_index() == ZERO:
            worst = load_u64(context + TILE_STATUS) + (position & mask) * EIGHT
            status = load_relaxed_gpu(worst)
            shared_max_u32(scratch + STATUSES, status)
            store_relaxed_gpu(load_u64(context + TILE_COUNTS) + (position & mask) * EIGHT, ZERO)
            store_relaxed_gpu(worst, ZERO)
            # Release: all tiles' outputs, which count_tile's atomics brought here. What waits for this task
            # goes on now; publish says it again, after the fence that the host needs and that takes longer.
            done = load_u64(context + DEVICE_DONE) + (position & mask) * EIGHT
            store_release_gpu(done, ((position + ONE) << SHIFT) | status)
            publish(context, scratch, mask, position, position)

    return m.device(finish_tiles)
