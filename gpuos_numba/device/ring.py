"""What pump and workers share: queue entries, and how a block leaves a launch."""

from __future__ import annotations

from typing import Any

from ..machines.base import Body, Primitives
from ..protocol import CONTEXT, DEVICE_STATE, LAP_SHIFT, SCRATCH_CONTEXT, TILE_SHIFT, field

LAP_LIMIT = 0x7FFF  # laps are told apart modulo this + 1; a stale entry is exactly one lap old


def make_queue_entry(m: Primitives) -> Body:
    """`queue_entry(item, queue_bits, tile, position)`: the word that hands `(position, tile)` to a worker.

    The lap is part of the word, so a worker's single load tells whether the entry is its own, and zeroed
    memory holds no entry.
    """
    u64 = m.u64
    ONE, LIMIT, LOW_HALF = u64(1), u64(LAP_LIMIT), u64(0xFFFFFFFF)
    TO_LAP, TO_TILE = u64(LAP_SHIFT), u64(TILE_SHIFT)

    def queue_entry(item: Any, queue_bits: Any, tile: Any, position: Any) -> Any:
        lap = ((item >> queue_bits) & LIMIT) + ONE
        return (lap << TO_LAP) | (tile << TO_TILE) | (position & LOW_HALF)

    return m.device(queue_entry)


def make_log2(m: Primitives) -> Body:
    """`log2(n)` of a power of two."""
    u64 = m.u64
    ZERO, ONE = u64(0), u64(1)

    def log2(n: Any) -> Any:
        bits = ZERO
        while (ONE << bits) < n:
            bits += ONE
        return bits

    return m.device(log2)


def make_leave(m: Primitives) -> Body:
    """`leave(state, workers)`: one thread of each block calls it last; the last block resets the launch.

    The next launch begins after this one's last block is gone, in stream order, so the resets need no
    ordering of their own; the atomic's acquire makes the pump's `items` visible to whoever is last.
    """
    u64 = m.u64
    atomic_add_gpu, load_relaxed_gpu, store_relaxed_gpu = (
        m.atomic_add_gpu,
        m.load_relaxed_gpu,
        m.store_relaxed_gpu,
    )
    ZERO, ONE = u64(0), u64(1)
    TICKETS, CLOSED = u64(field(DEVICE_STATE, "tickets")), u64(field(DEVICE_STATE, "closed"))
    EXITS, ITEMS = u64(field(DEVICE_STATE, "exits")), u64(field(DEVICE_STATE, "items"))

    def leave(state: Any, workers: Any) -> None:
        if atomic_add_gpu(state + EXITS, ONE) == workers:  # the pump is a block too
            store_relaxed_gpu(state + TICKETS, load_relaxed_gpu(state + ITEMS))
            store_relaxed_gpu(state + CLOSED, ZERO)
            store_relaxed_gpu(state + EXITS, ZERO)

    return m.device(leave)


def make_share_context(m: Primitives) -> Body:
    """`share_context(context, scratch)` -> address of a copy of the context in this block's scratch."""
    u64, barrier, load_u64, store_u64 = m.u64, m.barrier, m.load_u64, m.store_u64
    thread_index, block_width = m.thread_index, m.block_width
    WORDS, EIGHT, COPY = u64(CONTEXT.itemsize // 8), u64(8), u64(SCRATCH_CONTEXT)

    def share_context(context: Any, scratch: Any) -> Any:
        word = thread_index()
        while word < WORDS:
            store_u64(scratch + COPY + word * EIGHT, load_u64(context + word * EIGHT))
            word += block_width()
        barrier()
        return scratch + COPY

    return m.device(share_context)
