"""The pump: published descriptors in host memory arrive, work items in device memory leave.

One block, the only reader of host memory. It owns a position from the moment its stamp is seen until its
item is in the queue. Each turn of its loop is one flight over the bus: the descriptors that the last
flight found published, together with the stamps of the window after them and the host's control words. A
flight costs about a microsecond whatever it carries.

A launch ends here: when the lease is over, when nothing has come for a while, or when the host asks, the
pump parks. It stops at a position, which the next launch takes up; nothing in the ring is touched.
"""

from __future__ import annotations

from typing import Any

from ..descriptor import LAYOUT_BYTES, MASK_64, STATUS_BITS, TASK_BYTES, Flag, offset
from ..machines.base import Body, Primitives
from ..protocol import (
    CONTEXT,
    DEVICE_STATE,
    HEARTBEAT_LIMIT_NS,
    HELD,
    HOST_CONTROL,
    HOST_STATE,
    LAYOUT_SLOTS,
    SCRATCH_CONTROL,
    SCRATCH_FLOOR,
    SCRATCH_META,
    SCRATCH_TURNS,
    TURN,
    WINDOW,
    ParkReason,
    TraceKind,
    field,
)
from .program import make_copy_table
from .ring import make_leave, make_log2, make_queue_entry, make_share_context
from .trace import TRACE_NUMBER, TRACE_TILE, make_open, make_record

# A task's meta word, kept in scratch while the window is handed out: run | tiles << 32 | follows << 61 |
# program << 62 | linked << 63. `run` and `tiles` are the descriptor's second word as it stands.
META_LINKED = 63
META_PROGRAM = 62
META_FOLLOWS = 61
META_TILES = 32

SPECIAL_SHAPED, SPECIAL_FOLLOWED = 1, 2
"""What TURN.special says of a window: some task is tiled or linked; some task follows the one before it."""

QUIET_WINDOW = 4
"""Stamps watched while nothing comes: one 32-byte sector, the least that a read over the bus brings."""

FIRST_WINDOW = 32
"""Stamps that a launch reads first: it is made because something was published, and that may be a batch."""


def make_pump(m: Primitives) -> Body:
    """Build the pump for a machine: `pump(context, workers, scratch)`, one block."""
    u64, barrier = m.u64, m.barrier
    thread_index, block_width = m.thread_index, m.block_width
    store_release_gpu, store_relaxed_sys = m.store_release_gpu, m.store_relaxed_sys
    store_relaxed_gpu = m.store_relaxed_gpu
    load_u64, store_u64 = m.load_u64, m.store_u64
    load_u32, store_u32 = m.load_u32, m.store_u32
    fence_acq_rel_gpu, now_ns, pause = m.fence_acq_rel_gpu, m.now_ns, m.pause
    load_pair_relaxed_sys = m.load_pair_relaxed_sys

    log2, leave, share_context = make_log2(m), make_leave(m), make_share_context(m)
    open_trace, record_trace = make_open(m), make_record(m)
    TRACE, TO_NUMBER, TO_TILE = u64(field(CONTEXT, "trace")), u64(TRACE_NUMBER), u64(TRACE_TILE)
    INGEST, LAUNCH = u64(TraceKind.INGEST), u64(TraceKind.LAUNCH)
    fly, link, copy_layouts = _make_fly(m), _make_link(m), _make_copy_layouts(m)
    hand_out, decide, announce = _make_hand_out(m), _make_decide(m), _make_announce(m)

    DEVICE_STATE_AT, MASK = u64(field(CONTEXT, "device_state")), u64(field(CONTEXT, "mask"))
    HOST_STATE_AT, HOST_CONTROL_AT = u64(field(CONTEXT, "host_state")), u64(field(CONTEXT, "host_control"))
    BEGUN, WORKERS = u64(field(HOST_STATE, "begun")), u64(field(HOST_STATE, "workers"))
    INGESTED = u64(field(HOST_STATE, "ingested"))
    CLOSED = u64(field(DEVICE_STATE, "closed"))
    CURSOR, ITEMS = u64(field(DEVICE_STATE, "cursor")), u64(field(DEVICE_STATE, "items"))
    LAUNCHES = u64(field(DEVICE_STATE, "launches"))
    KNOWN_LAYOUTS = u64(field(DEVICE_STATE, "layouts"))
    ZERO, ONE, EIGHT = u64(0), u64(1), u64(8)
    SIXTEEN, THIRTY_TWO, CONTROL = u64(16), u64(32), u64(SCRATCH_CONTROL)
    FOLLOWED = u64(SPECIAL_FOLLOWED)
    QUIET_LIMIT, FIRST_LIMIT, FULL_LIMIT = u64(QUIET_WINDOW), u64(FIRST_WINDOW), u64(WINDOW)
    TURNS, LAST_TURN, TURN_SIZE = u64(SCRATCH_TURNS), u64(2), u64(TURN.itemsize)
    GAP, SPECIAL, REASON = u64(field(TURN, "gap")), u64(field(TURN, "special")), u64(field(TURN, "reason"))
    HELD_AT, TILES_AT, FORTY_EIGHT = u64(field(TURN, "held")), u64(field(TURN, "tiles")), u64(48)
    WIDEN_AT, WIDEN = u64(SCRATCH_CONTROL + field(HOST_CONTROL, "widen_at")), u64(ParkReason.WIDEN)
    HEARTBEAT = u64(SCRATCH_CONTROL + field(HOST_CONTROL, "heartbeat"))
    NEW_LAYOUTS = u64(SCRATCH_CONTROL + field(HOST_CONTROL, "layouts"))

    def pump(context: Any, workers: Any, scratch: Any) -> None:
        context = share_context(context, scratch)
        thread = thread_index()
        report = load_u64(context + HOST_STATE_AT)
        state = load_u64(context + DEVICE_STATE_AT)
        control = load_u64(context + HOST_CONTROL_AT)
        mask = load_u64(context + MASK)
        queue_bits = log2(mask + ONE) + ONE
        # Each of three warps has its part in a flight, so that none waits for another's loads.
        keeper = ZERO
        mover = ZERO
        if block_width() > THIRTY_TWO:
            keeper = THIRTY_TWO
            mover = block_width() - THIRTY_TWO

        # Plain loads: the launch before this one, earlier in stream order, was the last to write these.
        cursor = load_u64(state + CURSOR)  # next position to take
        items = load_u64(state + ITEMS)  # next queue item to hand out
        launch = load_u64(state + LAUNCHES) + ONE
        layouts = load_u64(state + KNOWN_LAYOUTS)
        known = cursor  # every position below is published
        retired = cursor  # every position below has completed (advanced only when the queue is nearly full)
        floor = items  # every item below has completed; the launch before finished all it handed out
        started = now_ns()
        active = started
        alive = started
        heartbeat = ZERO
        held = ZERO  # 1 while the next task is withheld, as the last flight saw it
        limit = FIRST_LIMIT
        opening = True
        turn = ZERO
        spins = ZERO
        lease = idle = widen_at = hold = ZERO
        if thread == keeper:
            # What the host sets before a launch and leaves alone while it lasts; read once, on the way while
            # the first stamps are read.
            lease, idle = load_pair_relaxed_sys(control + SIXTEEN)
            _, widen_at = load_pair_relaxed_sys(control + THIRTY_TWO)
            hold, _ = load_pair_relaxed_sys(control + FORTY_EIGHT)
        if thread == ZERO:
            open_trace(context, ZERO, scratch)
            store_relaxed_sys(report + WORKERS, workers)
            store_relaxed_sys(report + BEGUN, launch)
            store_u32(scratch + TURNS + GAP, FULL_LIMIT)
            store_u32(scratch + TURNS + SPECIAL, ZERO)
            store_u64(scratch + TURNS + HELD_AT, ZERO)
            store_u32(scratch + TURNS + TILES_AT, ZERO)
            store_u32(scratch + TURNS + TURN_SIZE + GAP, FULL_LIMIT)
            store_u32(scratch + TURNS + TURN_SIZE + SPECIAL, ZERO)
            store_u64(scratch + TURNS + TURN_SIZE + HELD_AT, ZERO)
            store_u32(scratch + TURNS + TURN_SIZE + TILES_AT, ZERO)
        barrier()

        while True:
            # Three records are used in turn: while this flight fills one, a slow thread may still read the
            # last, and the next is reset below, before a barrier that its users wait at.
            record = scratch + TURNS + turn * TURN_SIZE
            turn += ONE
            if turn > LAST_TURN:
                turn = ZERO
            ready = known - cursor
            park_request = beat = interned = ZERO
            if thread == keeper:
                # Relaxed: a count of layouts read here is at least what the tasks below `known` need,
                # because their stamps were acquired in an earlier flight.
                park_request, beat = load_pair_relaxed_sys(control)
                if ready != ZERO:
                    interned, _ = load_pair_relaxed_sys(control + THIRTY_TWO)
            fly(context, scratch, record, mover, cursor, ready, known, limit)
            if opening:
                opening = False
                if thread == keeper:
                    store_u64(scratch + CONTROL, ZERO)
                    store_u64(scratch + CONTROL + EIGHT, ZERO)
                    store_u64(scratch + CONTROL + SIXTEEN, lease)
                    store_u64(scratch + CONTROL + SIXTEEN + EIGHT, idle)
                    store_u64(scratch + CONTROL + THIRTY_TWO + EIGHT, widen_at)
                    store_u64(scratch + CONTROL + FORTY_EIGHT, hold)
            if thread == keeper:
                # While those loads fly, on what the last flight brought:
                now = now_ns()
                if ready != ZERO:
                    active = now
                seen = load_u64(scratch + HEARTBEAT)
                if seen != heartbeat:
                    heartbeat = seen
                    alive = now
                reason = decide(
                    context, scratch, launch, workers, items, known, ready, held, now, started, active, alive
                )
                store_u64(record + REASON, reason)
                if ready != ZERO:
                    store_u64(scratch + NEW_LAYOUTS, interned)
                store_u64(scratch + CONTROL, park_request)
                store_u64(scratch + HEARTBEAT, beat)
            barrier()  # the window is in scratch and in the device ring
            gap = load_u32(record + GAP)
            special = load_u32(record + SPECIAL)
            reason = load_u64(record + REASON)
            held = load_u64(record + HELD_AT)
            if ready != ZERO and reason == ZERO:
                widen_at = load_u64(scratch + WIDEN_AT)
                if widen_at != ZERO and load_u32(record + TILES_AT) > widen_at:
                    # A narrow launch would have this window's widest task for long. It is left to the next
                    # launch, which its tiles make a wide one: the host counts them (host/ring.py, backlog).
                    reason = WIDEN
                    if thread == keeper:
                        announce(context, launch, reason)
                    break
            if ready != ZERO:
                interned = load_u64(scratch + NEW_LAYOUTS)
                if special == FOLLOWED:
                    link(context, scratch, cursor, ready)
                    barrier()
                if interned != layouts:
                    copy_layouts(context, layouts, interned)
                    layouts = interned
                    barrier()
                # Release, together with the relaxed stores of entries after it: descriptors and layouts are
                # visible before their items. Pairs with the acquire in device/worker.py, take.
                fence_acq_rel_gpu()
                items, floor, retired = hand_out(
                    context, scratch, queue_bits, special, cursor, ready, items, floor, retired
                )
            cursor = known
            limit = QUIET_LIMIT
            if gap >= QUIET_LIMIT:
                limit = FULL_LIMIT  # more came than was watched for
            if thread == ZERO:
                # The record after the next one's: nobody reads it any more, and its users are a barrier away.
                fresh = scratch + TURNS
                if turn < LAST_TURN:
                    fresh += (turn + ONE) * TURN_SIZE
                store_u32(fresh + GAP, FULL_LIMIT)
                store_u32(fresh + SPECIAL, ZERO)
                store_u64(fresh + HELD_AT, ZERO)
                store_u32(fresh + TILES_AT, ZERO)
                if ready != ZERO:
                    store_relaxed_sys(report + INGESTED, cursor)
                    if load_u64(context + TRACE) != ZERO:
                        now = now_ns()
                        record_trace(
                            context, scratch, now, now, cursor - ready, (ready << TO_NUMBER) | INGEST
                        )
            if reason != ZERO:
                break  # what this flight found published is the next launch's
            known = known + gap
            if ready != ZERO:
                barrier()  # the window may be overwritten
                spins = ZERO
            elif gap == ZERO and thread == ZERO:
                pause(spins)
                spins += ONE

        if thread == ZERO:
            if load_u64(context + TRACE) != ZERO:
                what = (reason << TO_NUMBER) | (workers << TO_TILE) | LAUNCH
                record_trace(context, scratch, started, now_ns(), launch, what)
            store_relaxed_gpu(state + CURSOR, cursor)
            store_u64(state + ITEMS, items)
            store_u64(state + LAUNCHES, launch)
            store_u64(state + KNOWN_LAYOUTS, layouts)
            # Release: no item at or after `items` belongs to this launch. Workers need no more than the
            # number; the state above is for the block that leaves last, through the atomic in leave.
            store_release_gpu(state + CLOSED, items + ONE)
            leave(state, workers)

    return pump


def _make_fly(m: Primitives) -> Body:
    """`fly(context, scratch, record, mover, cursor, ready, known, limit)`: one flight over the bus.

    Moves the `ready` descriptors from `cursor`, all published before this flight, to the device ring; what
    hand_out needs to know of each stays in scratch. Sets record.gap, which says WINDOW, to the index of the
    first of the `limit` stamps from `known` that is not published, or to `limit`, and record.held to 1 where
    the first of all says that its task is withheld. Loads that do not depend on
    each other are issued together. The thread `mover` moves the first chunk: a small window keeps clear of
    the warps that watch stamps and control words.
    """
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_acquire_sys, load_pair_relaxed_sys = m.load_acquire_sys, m.load_pair_relaxed_sys
    load_u64, store_u64, store_pair = m.load_u64, m.store_u64, m.store_pair
    shared_min_u32, shared_max_u32 = m.shared_min_u32, m.shared_max_u32

    HOST_RING, STAMPS = u64(field(CONTEXT, "host_ring")), u64(field(CONTEXT, "stamps"))
    DEVICE_RING, MASK = u64(field(CONTEXT, "device_ring")), u64(field(CONTEXT, "mask"))
    ZERO, ONE, SEVEN = u64(0), u64(1), u64(7)
    EIGHT, SIXTEEN = u64(8), u64(16)
    HALF, LOW_HALF, LINK = u64(32), u64(0xFFFFFFFF), u64(Flag.LINK)
    PROGRAM, TO_PROGRAM = u64(Flag.PROGRAM), u64(META_PROGRAM)
    TASK_SIZE, CHUNKS = u64(TASK_BYTES), u64(TASK_BYTES // 16)
    TO_LINKED, TO_FOLLOWS, TILES_AND_RUN = u64(META_LINKED), u64(META_FOLLOWS), u64(0xFFFFFFFFFFFF)
    FOLLOW, SHAPED, FOLLOWED = u64(Flag.FOLLOW), u64(SPECIAL_SHAPED), u64(SPECIAL_FOLLOWED)
    GAP, SPECIAL, META = u64(field(TURN, "gap")), u64(field(TURN, "special")), u64(SCRATCH_META)
    HELD_AT, HELD_BIT, TILES_AT = u64(field(TURN, "held")), u64(HELD), u64(field(TURN, "tiles"))
    assert offset("op_id") == 0 and offset("flags") == 4 and offset("run") == 8 and offset("tiles") == 12

    def place(scratch: Any, record: Any, ring: Any, chunk: Any, low: Any, high: Any) -> None:
        """Store 16 bytes of the window; a descriptor's first chunk also says how it is handed out."""
        store_pair(ring, low, high)
        if chunk & SEVEN == ZERO:
            flags = low >> HALF
            meta = (high & TILES_AND_RUN) | ((flags & LINK) << TO_LINKED)
            if flags & PROGRAM != ZERO:
                meta |= ONE << TO_PROGRAM
            if flags & FOLLOW != ZERO:
                meta |= ONE << TO_FOLLOWS
                shared_max_u32(record + SPECIAL, FOLLOWED)
            elif flags & (LINK | PROGRAM) != ZERO or (high & LOW_HALF) > ONE or (high >> HALF) > ONE:
                shared_max_u32(record + SPECIAL, SHAPED)
                if high >> HALF > ONE:
                    shared_max_u32(record + TILES_AT, high >> HALF)
            store_u64(scratch + META + chunk, meta)

    place = m.device(place)

    def fly(
        context: Any,
        scratch: Any,
        record: Any,
        mover: Any,
        cursor: Any,
        ready: Any,
        known: Any,
        limit: Any,
    ) -> None:
        thread = thread_index()
        width = block_width()
        mask = load_u64(context + MASK)
        source = load_u64(context + HOST_RING)
        target = load_u64(context + DEVICE_RING)
        stamps = load_u64(context + STAMPS)
        ring_bytes = mask * TASK_SIZE + (TASK_SIZE - ONE)  # masks a byte offset into the ring
        start = cursor * TASK_SIZE
        chunks = ready * CHUNKS
        chunk_a = thread + width - mover
        if chunk_a >= width:
            chunk_a -= width

        # Four loads a thread in flight at a time; the last ones fly together with the stamps.
        while True:
            chunk_b = chunk_a + width
            chunk_c = chunk_b + width
            chunk_d = chunk_c + width
            a = (start + chunk_a * SIXTEEN) & ring_bytes
            b = (start + chunk_b * SIXTEEN) & ring_bytes
            c = (start + chunk_c * SIXTEEN) & ring_bytes
            d = (start + chunk_d * SIXTEEN) & ring_bytes
            a_low = a_high = b_low = b_high = c_low = c_high = d_low = d_high = ZERO
            if chunk_a < chunks:
                a_low, a_high = load_pair_relaxed_sys(source + a)
            if chunk_b < chunks:
                b_low, b_high = load_pair_relaxed_sys(source + b)
            if chunk_c < chunks:
                c_low, c_high = load_pair_relaxed_sys(source + c)
            if chunk_d < chunks:
                d_low, d_high = load_pair_relaxed_sys(source + d)
            if chunk_d + width >= chunks:
                break
            place(scratch, record, target + a, chunk_a, a_low, a_high)
            place(scratch, record, target + b, chunk_b, b_low, b_high)
            place(scratch, record, target + c, chunk_c, c_low, c_high)
            place(scratch, record, target + d, chunk_d, d_low, d_high)
            chunk_a = chunk_d + width
        if thread == ZERO:
            shared_min_u32(record + GAP, limit)
        index = thread
        while index < limit:
            position = known + index
            # Acquire: the descriptor's words are visible if its stamp is; the barrier after this flight
            # carries that to the thread that moves them. Pairs with the release in host/ring.py, publish, or
            # with a stream's cuStreamWriteValue64, which comes after a fence of system scope.
            stamp = load_acquire_sys(stamps + (position & mask) * EIGHT)
            if stamp != position + ONE:
                shared_min_u32(record + GAP, index)
                if index == ZERO and stamp == (position + ONE) ^ HELD_BIT:
                    store_u64(record + HELD_AT, ONE)
                break
            index += width
        if chunk_a < chunks:
            place(scratch, record, target + a, chunk_a, a_low, a_high)
        if chunk_b < chunks:
            place(scratch, record, target + b, chunk_b, b_low, b_high)
        if chunk_c < chunks:
            place(scratch, record, target + c, chunk_c, c_low, c_high)
        if chunk_d < chunks:
            place(scratch, record, target + d, chunk_d, d_low, d_high)

    return m.device(fly)


def _make_link(m: Primitives) -> Body:
    """`link(context, scratch, cursor, ready)`: make runs of tasks that follow the one before them.

    None of the window has been handed out, so nobody else looks at these descriptors: a task that follows is
    linked to the one before, and need not wait for it. The first of a window has nothing to be linked to: it
    waits, as its descriptor says.
    """
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_u64, store_u64 = m.load_u64, m.store_u64
    DEVICE_RING, MASK = u64(field(CONTEXT, "device_ring")), u64(field(CONTEXT, "mask"))
    ZERO, ONE, EIGHT, TASK_SIZE = u64(0), u64(1), u64(8), u64(TASK_BYTES)
    META, TO_FOLLOWS = u64(SCRATCH_META), u64(META_FOLLOWS)
    LINK, WAITS_NOT = u64(Flag.LINK << 32), u64(MASK_64 & ~(Flag.AFTER_0 << 32))

    def link(context: Any, scratch: Any, cursor: Any, ready: Any) -> None:
        mask = load_u64(context + MASK)
        ring = load_u64(context + DEVICE_RING)
        index = thread_index()
        while index < ready:
            follows = ZERO
            if index > ZERO:
                follows = (load_u64(scratch + META + index * EIGHT) >> TO_FOLLOWS) & ONE
            followed = ZERO
            if index + ONE < ready:
                followed = (load_u64(scratch + META + (index + ONE) * EIGHT) >> TO_FOLLOWS) & ONE
            if follows | followed != ZERO:
                place = ring + ((cursor + index) & mask) * TASK_SIZE
                # Plain: this block stored it, and a barrier lies in between.
                head = load_u64(place)
                if follows != ZERO:
                    head &= WAITS_NOT
                if followed != ZERO:
                    head |= LINK
                store_u64(place, head)
            index += block_width()

    return m.device(link)


def _make_copy_layouts(m: Primitives) -> Body:
    """`copy_layouts(context, have, interned)`: bring layouts [have, interned) to the device table.

    A layout is never changed while a task may use it, so a plain copy after its count was read is whole.
    """
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_pair_relaxed_sys, store_pair, load_u64 = m.load_pair_relaxed_sys, m.store_pair, m.load_u64
    divide = m.divide
    HOST_LAYOUTS, LAYOUTS = u64(field(CONTEXT, "host_layouts")), u64(field(CONTEXT, "layouts"))
    SIXTEEN, CHUNKS, SLOT_MASK = u64(16), u64(LAYOUT_BYTES // 16), u64(LAYOUT_SLOTS - 1)

    def copy_layouts(context: Any, have: Any, interned: Any) -> None:
        source = load_u64(context + HOST_LAYOUTS)
        target = load_u64(context + LAYOUTS)
        chunk = thread_index()
        while chunk < (interned - have) * CHUNKS:
            number = divide(chunk, CHUNKS)
            place = (((have + number) & SLOT_MASK) * CHUNKS + (chunk - number * CHUNKS)) * SIXTEEN
            low, high = load_pair_relaxed_sys(source + place)
            store_pair(target + place, low, high)
            chunk += block_width()

    return m.device(copy_layouts)


def _make_hand_out(m: Primitives) -> Body:
    """`hand_out(context, scratch, queue_bits, special, cursor, ready, items, floor, retired)`.

    Puts the window's items into the queue and returns the new (items, floor, retired). A task that stands
    alone is one item, a tiled one `tiles` items, and a run one item, handed out with its last member: the
    pump needs no memory of runs it has seen only in part, not even across a park. Runs that link has made end
    with the window.
    """
    u64, barrier = m.u64, m.barrier
    thread_index, block_width = m.thread_index, m.block_width
    load_acquire_gpu, store_relaxed_gpu = m.load_acquire_gpu, m.store_relaxed_gpu
    load_u64, store_u64, pause = m.load_u64, m.store_u64, m.pause
    fence_acq_rel_gpu = m.fence_acq_rel_gpu
    queue_entry, copy_table = make_queue_entry(m), make_copy_table(m)

    QUEUE, ITEM_ENDS = u64(field(CONTEXT, "queue")), u64(field(CONTEXT, "item_ends"))
    DEVICE_DONE, MASK = u64(field(CONTEXT, "device_done")), u64(field(CONTEXT, "mask"))
    ZERO, ONE, EIGHT = u64(0), u64(1), u64(8)
    LOW_HALF, TILES_MASK = u64(0xFFFFFFFF), u64(0xFFFF)
    TO_LINKED, TO_TILES, TOP_BIT = u64(META_LINKED), u64(META_TILES), u64(1 << 63)
    PROGRAM = u64(1 << META_PROGRAM)
    TO_FOLLOWS = u64(META_FOLLOWS)
    STATUS_SHIFT = u64(STATUS_BITS)
    META, FLOOR = u64(SCRATCH_META), u64(SCRATCH_FLOOR)

    def make_room(
        context: Any,
        scratch: Any,
        mask: Any,
        position: Any,
        items: Any,
        wanted: Any,
        floor: Any,
        retired: Any,
    ) -> Any:
        """Wait until `wanted` more items fit, by following completions; they need nothing from the pump."""
        if thread_index() == ZERO:
            done = load_u64(context + DEVICE_DONE)
            ends = load_u64(context + ITEM_ENDS)
            spins = ZERO
            # Its slot was claimed again, so the position a lap before the one handed out now has completed,
            # and all before it. Their item ends are overwritten; its own is the oldest that still stands.
            if position - retired > mask + ONE:
                retired = position - (mask + ONE)
            while items + wanted - floor > (mask + ONE) + (mask + ONE):
                slot = (retired & mask) * EIGHT
                target = (retired + ONE) << STATUS_SHIFT
                if load_acquire_gpu(done + slot) - target < TOP_BIT:
                    floor = load_u64(ends + slot)
                    retired += ONE
                    spins = ZERO
                else:
                    pause(spins)
                    spins += ONE
            store_u64(scratch + FLOOR, floor)
            store_u64(scratch + FLOOR + EIGHT, retired)
        barrier()
        floor = load_u64(scratch + FLOOR)
        retired = load_u64(scratch + FLOOR + EIGHT)
        barrier()
        return floor, retired

    make_room = m.device(make_room)

    def hand_out(
        context: Any,
        scratch: Any,
        queue_bits: Any,
        special: Any,
        cursor: Any,
        ready: Any,
        items: Any,
        floor: Any,
        retired: Any,
    ) -> Any:
        thread = thread_index()
        width = block_width()
        mask = load_u64(context + MASK)
        queue = load_u64(context + QUEUE)
        ends = load_u64(context + ITEM_ENDS)
        queue_length = (mask + ONE) + (mask + ONE)
        queue_mask = queue_length - ONE

        if special == ZERO:  # one item a task
            if items + ready - floor > queue_length:
                floor, retired = make_room(context, scratch, mask, cursor, items, ready, floor, retired)
            index = thread
            while index < ready:
                item = items + index
                position = cursor + index
                store_u64(ends + (position & mask) * EIGHT, item + ONE)
                entry = queue_entry(item, queue_bits, ZERO, position)
                store_relaxed_gpu(queue + (item & queue_mask) * EIGHT, entry)
                index += width
            items += ready
        else:
            number = ZERO
            run = ZERO  # members of the run so far
            following = load_u64(scratch + META)
            while number < ready:
                meta = following
                position = cursor + number
                if number != ZERO and (meta >> TO_FOLLOWS) & ONE != ZERO:
                    run += ONE
                else:
                    run = meta & LOW_HALF
                open = meta >> TO_LINKED
                if number + ONE < ready:
                    following = load_u64(scratch + META + (number + ONE) * EIGHT)
                    open |= (following >> TO_FOLLOWS) & ONE
                if open == ZERO:
                    tiles = (meta >> TO_TILES) & TILES_MASK
                    first = position
                    if run > ONE:
                        first = position - (run - ONE)
                    if tiles == ZERO or tiles > mask + ONE:
                        tiles = ONE  # too many for the queue: the worker answers BAD_DESCRIPTOR
                    if items + tiles - floor > queue_length:
                        floor, retired = make_room(
                            context, scratch, mask, position, items, tiles, floor, retired
                        )
                    if meta & PROGRAM != ZERO:
                        copy_table(context, mask, position)
                        fence_acq_rel_gpu()  # as the pump's: the table is visible before the call's items
                    tile = thread
                    while tile < tiles:
                        item = items + tile
                        entry = queue_entry(item, queue_bits, tile, first)
                        store_relaxed_gpu(queue + (item & queue_mask) * EIGHT, entry)
                        tile += width
                    items += tiles
                if thread == ZERO:
                    store_u64(ends + (position & mask) * EIGHT, items)
                number += ONE
        return items, floor, retired

    return m.device(hand_out)


def _make_announce(m: Primitives) -> Body:
    """`announce(context, launch, reason)`: tell the host that this launch takes nothing more. One thread."""
    u64, load_u64 = m.u64, m.load_u64
    store_relaxed_sys, fence_sc_sys = m.store_relaxed_sys, m.fence_sc_sys
    HOST_STATE_AT = u64(field(CONTEXT, "host_state"))
    PARKED, REASON = u64(field(HOST_STATE, "parked")), u64(field(HOST_STATE, "reason"))

    def announce(context: Any, launch: Any, reason: Any) -> None:
        report = load_u64(context + HOST_STATE_AT)
        store_relaxed_sys(report + REASON, reason)
        store_relaxed_sys(report + PARKED, launch)
        fence_sc_sys()

    return m.device(announce)


def _make_decide(m: Primitives) -> Body:
    """`decide(...)` -> ParkReason: one thread asks whether this launch should end, and announces it.

    Parking for want of work races with a producer that publishes at the same moment. Each side stores,
    fences, then looks at the other's word: the pump announces and re-reads the next stamp, the producer
    publishes and re-reads the announcement (host/ring.py, publish). One of the two sees the other.
    """
    u64 = m.u64
    load_relaxed_gpu, load_acquire_sys = m.load_relaxed_gpu, m.load_acquire_sys
    store_relaxed_sys, load_u64, announce = m.store_relaxed_sys, m.load_u64, _make_announce(m)
    STAMPS, MASK = u64(field(CONTEXT, "stamps")), u64(field(CONTEXT, "mask"))
    HOST_STATE_AT = u64(field(CONTEXT, "host_state"))
    DEVICE_STATE_AT = u64(field(CONTEXT, "device_state"))
    PARKED = u64(field(HOST_STATE, "parked"))
    TICKETS = u64(field(DEVICE_STATE, "tickets"))
    PARK_REQUEST = u64(SCRATCH_CONTROL + field(HOST_CONTROL, "park_request"))
    LEASE_NS = u64(SCRATCH_CONTROL + field(HOST_CONTROL, "lease_ns"))
    IDLE_NS = u64(SCRATCH_CONTROL + field(HOST_CONTROL, "idle_ns"))
    WIDEN_AT = u64(SCRATCH_CONTROL + field(HOST_CONTROL, "widen_at"))
    HOLD_NS = u64(SCRATCH_CONTROL + field(HOST_CONTROL, "hold_ns"))
    ZERO, ONE, EIGHT = u64(0), u64(1), u64(8)
    NONE, IDLE, LEASE = u64(ParkReason.NONE), u64(ParkReason.IDLE), u64(ParkReason.LEASE)
    REQUEST, WIDEN, HELD_BACK = u64(ParkReason.REQUEST), u64(ParkReason.WIDEN), u64(ParkReason.HELD)
    ORPHANED, HEARTBEAT_LIMIT = u64(ParkReason.ORPHANED), u64(HEARTBEAT_LIMIT_NS)

    def decide(
        context: Any,
        scratch: Any,
        launch: Any,
        workers: Any,
        items: Any,
        known: Any,
        ready: Any,
        held: Any,
        now: Any,
        started: Any,
        active: Any,
        alive: Any,
    ) -> Any:
        lease = load_u64(scratch + LEASE_NS)
        idle = load_u64(scratch + IDLE_NS)
        widen_at = load_u64(scratch + WIDEN_AT)
        tickets = load_u64(context + DEVICE_STATE_AT) + TICKETS
        reason = NONE
        if load_u64(scratch + PARK_REQUEST) >= launch:
            reason = REQUEST
        elif lease != ZERO and now - started > lease:
            reason = LEASE
        elif now - alive > HEARTBEAT_LIMIT:
            reason = ORPHANED
        elif ready == ZERO:
            # Every worker waits for an item that does not exist: nothing runs either. Where the next task is
            # withheld, what it waits for wants the GPU, and a watch on the host launches when it may run.
            because = IDLE
            if held != ZERO:
                idle = load_u64(scratch + HOLD_NS)
                because = HELD_BACK
            if idle != ZERO and now - active > idle and load_relaxed_gpu(tickets) >= items + workers:
                reason = because
        elif widen_at != ZERO:
            taken = load_relaxed_gpu(tickets)
            if taken < items and items - taken > widen_at:
                reason = WIDEN
        if reason != NONE:
            report = load_u64(context + HOST_STATE_AT)
            announce(context, launch, reason)
            if reason == IDLE or reason == HELD_BACK:
                stamp = load_u64(context + STAMPS) + (known & load_u64(context + MASK)) * EIGHT
                if load_acquire_sys(stamp) == known + ONE:
                    store_relaxed_sys(report + PARKED, launch - ONE)  # not parked after all
                    reason = NONE
        return reason

    return m.device(decide)
