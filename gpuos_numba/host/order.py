"""The order of tasks: what a task reads and writes arrives, the positions that it must wait for leave.

Memory is told apart by *segments*: disjoint byte ranges, each with the task that wrote it last and the tasks
that have read it since. A task that reads waits for the writers of what it overlaps; one that writes waits
for the readers too. Two ways lead to a segment: a table by first byte, which finds the same buffers again at
once, and an ordered list in chunks, for everything that overlaps in part. What a task covers becomes one
segment, so reading and writing keep the list short; segments whose tasks have all retired go when room is
needed.

Positions are those of the ring. Each belongs to a *chain*: a task continues the chain of the last task it
waits for, if nobody did yet. Of two tasks in one chain the later one waits for the earlier, so of each chain
only the latest has to be waited for.

One thread at a time, under the lock in `ORDER`, which is held for the filling of at most a chunk of slots and
never over a call of the driver: claims made under it are in the order of what was tracked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ..descriptor import ITEMSIZE, JOIN_OP, MASK_64, MAX_JOINED, TASK_BYTES, Flag, offset
from ..machines.base import Body, HostPrimitives
from ..protocol import HOST_CONTEXT, HOST_WORDS, field
from .arrays import ArrayView, byte_range
from .query import make_query
from .ring import (
    CHUNK,
    DECLINED,
    PENDING_STATUS,
    PLAIN_DTYPES,
    SENT,
    make_nobody_serves,
    make_publish,
    make_relaunch,
    make_retire,
    make_status_of,
    make_try_claim,
)

MOST_RANGES: Final = 7
ACCESS: Final = np.dtype(
    [
        ("writes", "<u8"),  # how many of the ranges are written; they come first
        ("count", "<u8"),  # ranges in all, none of them empty
        ("ranges", "<u8", (MOST_RANGES, 2)),  # first byte, and the byte after the last
    ]
)
"""What a task touches, beside its descriptor: 128 bytes. A range that is written may be read as well."""

SEGMENT: Final = np.dtype(
    [(name, "<u8") for name in ("begin", "end", "writer", "readers", "r0", "r1", "r2", "r3")]
)
"""One range of memory. readers: how many of r0 ... have read it since `writer` wrote it, or FOLDED: every
position from r0 to r1 may have. A free segment has no bytes, and `writer` is the address of the next free
one."""

FOLDED: Final = 5
MOST_READERS: Final = 4

NODE: Final = np.dtype([(name, "<u8") for name in ("position", "chain", "run", "continued")])
"""What is known of the task in a slot of the ring. run: its place in a run, 0 where it is tiled; continued: 1
where a later task took its chain. Of no meaning where `position` is another lap's."""

DEPS: Final = 8
SCRATCH_WORDS: Final = 32
ARGUMENTS: Final = (
    "fill",
    "host",
    "tasks",
    "accesses",
    "wanted",
    "lane",
    "extra",
    "extras",
    "done",
    "position",
    "slots",
)
ORDER: Final = np.dtype(
    [
        (name, "<u8")
        for name in (
            "lock",  # 1 while somebody tracks
            "nodes",  # NODE of each slot
            "mask",  # slots - 1
            "chains",  # chains begun so far
            "floor",  # the task at this position came after all whose segments were forgotten
            "segments",  # SEGMENT[limit]
            "limit",
            "free",  # address of the first free one, 0 for none
            "unused",  # how many are free
            "cache",  # segment addresses by hash of the first byte; may be stale
            "cache_shift",
            "tops",  # TOP of each chunk, in order
            "top_count",
            "chunks",  # spare chunks, a stack of addresses
            "spare",  # how many
            "gather",  # room for `limit` addresses
            "count",  # of deps
            "folded",  # 1 where the positions from low to high are waited for as well
            "low",
            "high",
        )
    ]
    + [(name, "<u8") for name in ARGUMENTS]
    + [("deps", "<u8", DEPS), ("sum", SEGMENT), ("task", "<u8", 16), ("access", ACCESS)]
)
"""All of the tracker. fill: address of the compiled `make_fill_ordered`; host to extras: its arguments; done
to slots: its answer. deps: positions that the task at hand waits for; sum, task, access: room to work in."""

CHUNK_ENTRIES: Final = 32
ENTRY: Final = np.dtype([("begin", "<u8"), ("segment", "<u8")])
TOP: Final = np.dtype([(name, "<u8") for name in ("begin", "chunk", "count", "unused")])
PER_TASK: Final = 3 * MOST_RANGES + 3
"""Segments that one task may need: itself, and what is left on both sides, for each range."""
NONE: Final = MASK_64
"""For `record`: there is no join."""


_RECORD: Final = struct.Struct("<16Q")
assert _RECORD.size == ACCESS.itemsize


def pack_ranges(reads: Iterable[tuple[int, int]], writes: Iterable[tuple[int, int]]) -> bytes:
    """An ACCESS of byte ranges [first, end). Empty ones are left out, and reads of what is written too.

    Raises:
        ValueError: more than seven ranges.
    """
    written = [each for each in dict.fromkeys(writes) if each[0] < each[1]]
    ranges = written + [each for each in dict.fromkeys(reads) if each[0] < each[1] and each not in written]
    if len(ranges) > MOST_RANGES:
        raise ValueError(f"{len(ranges)} ranges: a task touches at most {MOST_RANGES}")
    flat = [number for each in ranges for number in each]
    return _RECORD.pack(len(written), len(ranges), *flat, *[0] * (2 * MOST_RANGES - len(flat)))


def pack_access(views: Sequence[ArrayView], written: int) -> bytes:
    """An ACCESS of what a call touches: the last `written` views are written, the others read. A view's
    range is its extent, gaps included."""
    ranges = []
    for view in views:
        if view.contiguous:
            ranges.append((view.address, view.address + view.count * ITEMSIZE[view.dtype]))
        else:
            ranges.append(byte_range(view))
    reads = len(ranges) - written
    return pack_ranges(ranges[:reads], ranges[reads:])


class Tracker:
    """Memory of a tracker.

    Args:
        slots: positions that may be unfinished at a time, a power of two.
        segments: ranges told apart at a time; None takes four a slot. With more, all are forgotten and the
            next task waits for all before it.

    Attributes:
        address: of the ORDER record, for compiled functions.
    """

    def __init__(self, slots: int, segments: int | None = None) -> None:
        limit = max(4 * slots if segments is None else segments, 4 * PER_TASK)
        bits = max(8, (4 * limit - 1).bit_length())
        chunks = limit // 8 + 16
        parts: dict[str, np.ndarray[Any, Any]] = {
            "nodes": np.zeros(slots, NODE),
            "segments": np.zeros(limit, SEGMENT),
            "cache": np.zeros(1 << bits, np.uint64),
            "tops": np.zeros(chunks + 2, TOP),
            "chunks": np.zeros(chunks, np.uint64),
            "gather": np.zeros(limit, np.uint64),
        }
        entries = np.zeros((chunks, CHUNK_ENTRIES), ENTRY)
        parts["chunks"][:] = entries.ctypes.data + np.arange(chunks, dtype=np.uint64) * entries.strides[0]
        self._parts = (*parts.values(), entries)
        raw = np.zeros(ORDER.itemsize + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.state = raw[start : start + ORDER.itemsize].view(ORDER)
        state = self.state[0]
        for name, part in parts.items():
            state[name] = part.ctypes.data
        state["mask"], state["limit"], state["cache_shift"], state["spare"] = (
            slots - 1,
            limit,
            64 - bits,
            chunks,
        )
        state["floor"] = NONE
        # No slot holds a position that would be taken for its own.
        parts["nodes"]["position"] = (np.arange(slots, dtype=np.uint64) + np.uint64(1)) & np.uint64(slots - 1)
        if slots == 1:
            parts["nodes"]["position"] = MASK_64
        at, size = parts["segments"].ctypes.data, SEGMENT.itemsize
        parts["segments"]["writer"] = [at + size * (number + 1) for number in range(limit - 1)] + [0]
        state["free"], state["unused"] = at, limit
        self.address = int(self.state.ctypes.data)

    def serve(self) -> None:
        """Let the compiled functions use this tracker for submission."""
        self.state["fill"] = compiled().fill.address

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The ranges told apart now, in order."""
        segments: np.ndarray[Any, Any] = self._parts[1]
        return sorted(
            (int(each["begin"]), int(each["end"])) for each in segments if each["begin"] < each["end"]
        )

    def dependencies(self, accesses: np.ndarray[Any, Any]) -> list[list[int]]:
        """Which earlier tasks of a sequence each task must wait for, those implied by others left out.

        Args:
            accesses: ACCESS of each task; at most as many as the tracker has slots, and no other call before.

        Returns:
            For each task the numbers of others, ascending. Waiting for all of them is enough for the sequence
            to give what one task after another would.
        """
        count = len(accesses)
        if count > int(self.state["mask"][0]) + 1:
            raise ValueError(f"{count} tasks: the tracker has {int(self.state['mask'][0]) + 1} slots")
        accesses = np.ascontiguousarray(accesses)
        found = np.zeros((count, DEPS + 4), np.uint64)
        compiled_trace()(self.address, accesses.ctypes.data, count, found.ctypes.data, found.strides[0])
        result = []
        for row in found.tolist():
            names = set(row[4 : 4 + row[0]])
            if row[1]:
                names.update(range(row[2], row[3] + 1))
            result.append(sorted(names))
        return result


@cache
def make_tracker(m: HostPrimitives) -> SimpleNamespace:
    """The bodies that ordered submission is made of."""
    u64 = m.u64
    load, store = m.load_u64, m.store_u64
    device = m.device

    def at(name: str) -> Any:
        return u64(field(ORDER, name))

    ZERO, ONE, TWO, EIGHT, SIXTEEN, THIRTY_TWO = u64(0), u64(1), u64(2), u64(8), u64(16), u64(32)
    TOP_BIT, GOLDEN, NO_JOIN = u64(1 << 63), u64(0x9E3779B97F4A7C15), u64(NONE)
    NODES, MASK, CHAINS, FLOOR = at("nodes"), at("mask"), at("chains"), at("floor")
    FREE, UNUSED = at("free"), at("unused")
    CACHE, SHIFT, TOPS, TOP_COUNT = at("cache"), at("cache_shift"), at("tops"), at("top_count")
    CHUNKS, SPARE, GATHER = at("chunks"), at("spare"), at("gather")
    COUNT, FOLD, LOW, HIGH, DEPS_AT, SUM = (
        at("count"),
        at("folded"),
        at("low"),
        at("high"),
        at("deps"),
        at("sum"),
    )
    END, WRITER, READERS, R0, R1 = (
        u64(field(SEGMENT, name)) for name in ("end", "writer", "readers", "r0", "r1")
    )
    assert field(SEGMENT, "begin") == 0 and field(NODE, "position") == 0 and NODE.itemsize == 32
    CHAIN, RUN, CONTINUED = (u64(field(NODE, name)) for name in ("chain", "run", "continued"))
    SEGMENT_SIZE, MOST_DEPS, MOST, ALL = u64(SEGMENT.itemsize), u64(DEPS), u64(MOST_READERS), u64(FOLDED)
    ENTRIES, HALF_ENTRIES, PACKED = u64(CHUNK_ENTRIES), u64(CHUNK_ENTRIES // 2), u64(CHUNK_ENTRIES * 3 // 4)
    RANGES, ROOM, FEW_CHUNKS = u64(field(ACCESS, "ranges")), u64(PER_TASK), u64(8)
    ACCESS_COUNT, ACCESS_SIZE = u64(field(ACCESS, "count")), u64(ACCESS.itemsize)
    assert ENTRY.itemsize == 16 and TOP.itemsize == 32 and SEGMENT.itemsize == 64

    # --- chains ---

    def node(order: Any, position: Any) -> Any:
        """Address of what is known of the task at a position."""
        return load(order + NODES) + (position & load(order + MASK)) * THIRTY_TWO

    node = device(node)

    def chain_of(order: Any, position: Any) -> Any:
        """Its chain, or 0 where nothing is known."""
        found = node(order, position)
        if load(found) != position:
            return ZERO
        return load(found + CHAIN)

    chain_of = device(chain_of)

    def follows(order: Any, one: Any, other: Any) -> Any:
        """1 where two positions are the same or in one chain: the later waits for the earlier."""
        if one == other:
            return ONE
        chain = chain_of(order, one)
        if chain != ZERO and chain == chain_of(order, other):
            return ONE
        return ZERO

    follows = device(follows)

    # --- what the task at hand waits for ---

    def begin(order: Any, retired: Any) -> None:
        """A new task: it waits for nothing yet but the last time that all was forgotten."""
        store(order + COUNT, ZERO)
        store(order + FOLD, ZERO)
        floor = load(order + FLOOR)
        if floor - retired < TOP_BIT and floor != NO_JOIN:
            store(order + DEPS_AT, floor)
            store(order + COUNT, ONE)

    begin = device(begin)

    def add_range(order: Any, low: Any, high: Any, retired: Any) -> None:
        """Wait for the positions from low to high."""
        if high - retired >= TOP_BIT:
            return
        if low - retired >= TOP_BIT:
            low = retired
        if load(order + FOLD) != ZERO:
            if load(order + LOW) - low >= TOP_BIT:
                low = load(order + LOW)
            if load(order + HIGH) - high < TOP_BIT:
                high = load(order + HIGH)
        store(order + FOLD, ONE)
        store(order + LOW, low)
        store(order + HIGH, high)

    add_range = device(add_range)

    def add(order: Any, position: Any, retired: Any) -> None:
        """Wait for a position, unless it has retired or another wait implies it."""
        if position - retired >= TOP_BIT:
            return
        count = load(order + COUNT)
        index = ZERO
        while index < count:
            place = order + DEPS_AT + index * EIGHT
            other = load(place)
            if follows(order, other, position) != ZERO:
                if position - other < TOP_BIT:
                    store(place, position)
                return
            index += ONE
        if count == MOST_DEPS:
            add_range(order, position, position, retired)
        else:
            store(order + DEPS_AT + count * EIGHT, position)
            store(order + COUNT, count + ONE)

    add = device(add)

    def add_readers(order: Any, segment: Any, retired: Any) -> Any:
        """Wait for the readers of a segment; 1 where it has any, which have waited for its writer."""
        readers = load(segment + READERS)
        if readers == ALL:
            add_range(order, load(segment + R0), load(segment + R1), retired)
        else:
            index = ZERO
            while index < readers:
                add(order, load(segment + R0 + index * EIGHT), retired)
                index += ONE
        return readers

    add_readers = device(add_readers)

    def read_by(order: Any, segment: Any, position: Any, retired: Any) -> None:
        """One more reader of a segment."""
        readers = load(segment + READERS)
        if readers == ALL and load(segment + R1) - retired >= TOP_BIT:
            readers = ZERO  # all of them have retired
        if readers == ALL:
            if load(segment + R0) - position < TOP_BIT:
                store(segment + R0, position)
            if position - load(segment + R1) < TOP_BIT:
                store(segment + R1, position)
            return
        # Readers that have retired, and those that this one waits for, need not be remembered.
        kept = ZERO
        index = ZERO
        low = position
        high = position
        while index < readers:
            other = load(segment + R0 + index * EIGHT)
            if other - retired < TOP_BIT:
                if follows(order, other, position) != ZERO:
                    if other - position < TOP_BIT:
                        position = other
                else:
                    store(segment + R0 + kept * EIGHT, other)
                    kept += ONE
                    if low - other < TOP_BIT:
                        low = other
                    if other - high < TOP_BIT:
                        high = other
            index += ONE
        if kept == MOST:
            store(segment + READERS, ALL)
            store(segment + R0, low)
            store(segment + R1, high)
        else:
            store(segment + R0 + kept * EIGHT, position)
            store(segment + READERS, kept + ONE)

    read_by = device(read_by)

    # --- segments by their first byte ---

    def in_use(segment: Any, retired: Any) -> Any:
        """1 where a task that touched a segment may not have retired."""
        if load(segment + WRITER) - retired < TOP_BIT:
            return ONE
        readers = load(segment + READERS)
        if readers == ALL:
            readers = TWO
        index = ZERO
        while index < readers:
            if load(segment + R0 + index * EIGHT) - retired < TOP_BIT:
                return ONE
            index += ONE
        return ZERO

    in_use = device(in_use)

    def cache_place(order: Any, first: Any) -> Any:
        return load(order + CACHE) + ((first * GOLDEN) >> load(order + SHIFT)) * EIGHT

    cache_place = device(cache_place)

    def find(order: Any, first: Any, end: Any, retired: Any) -> Any:
        """The segment of exactly these bytes, or 0. What the table names is a segment, but maybe another."""
        segment = load(cache_place(order, first))
        if segment != ZERO:
            if load(segment) != first:
                return ZERO
            stop = load(segment + END)
            if stop != end:
                # A buffer that is used again, for less: what nobody waits for any more can be cut off.
                if stop < end or in_use(segment, retired) != ZERO:
                    return ZERO
                store(segment + END, end)
        return segment

    find = device(find)

    # --- segments in order ---

    def locate(order: Any, first: Any) -> Any:
        """(chunk number, entry) of the first segment that ends after a byte; (chunks, 0) where none does."""
        tops = load(order + TOPS)
        low = ZERO
        high = load(order + TOP_COUNT)
        if high == ZERO:
            return ZERO, ZERO
        while low + ONE < high:
            middle = (low + high) >> ONE
            if load(tops + middle * THIRTY_TWO) <= first:
                low = middle
            else:
                high = middle
        top = tops + low * THIRTY_TWO
        chunk = load(top + EIGHT)
        count = load(top + SIXTEEN)
        entry = ZERO
        high = count
        while entry + ONE < high:
            middle = (entry + high) >> ONE
            if load(chunk + middle * SIXTEEN) <= first:
                entry = middle
            else:
                high = middle
        if load(load(chunk + entry * SIXTEEN + EIGHT) + END) <= first:
            entry += ONE
            if entry == count:
                low += ONE
                entry = ZERO
        return low, entry

    locate = device(locate)

    def move_up(start: Any, stop: Any, size: Any) -> None:
        """Move the words of [start, stop) up by `size` bytes."""
        while stop != start:
            stop -= EIGHT
            store(stop + size, load(stop))

    move_up = device(move_up)

    def move_down(start: Any, stop: Any, size: Any) -> None:
        """Move the words of [start, stop) down by `size` bytes."""
        while start != stop:
            store(start - size, load(start))
            start += EIGHT

    move_down = device(move_down)

    def insert(order: Any, segment: Any) -> None:
        """Put a segment that overlaps no other into list and table."""
        first = load(segment)
        tops = load(order + TOPS)
        count = load(order + TOP_COUNT)
        store(cache_place(order, first), segment)
        if count == ZERO:
            spare = load(order + SPARE) - ONE
            store(order + SPARE, spare)
            chunk = load(load(order + CHUNKS) + spare * EIGHT)
            store(tops, first)
            store(tops + EIGHT, chunk)
            store(tops + SIXTEEN, ONE)
            store(chunk, first)
            store(chunk + EIGHT, segment)
            store(order + TOP_COUNT, ONE)
            return
        low = ZERO
        high = count
        while low + ONE < high:
            middle = (low + high) >> ONE
            if load(tops + middle * THIRTY_TWO) <= first:
                low = middle
            else:
                high = middle
        top = tops + low * THIRTY_TWO
        chunk = load(top + EIGHT)
        length = load(top + SIXTEEN)
        if length == ENTRIES:  # the upper half becomes a chunk of its own
            spare = load(order + SPARE) - ONE
            store(order + SPARE, spare)
            upper = load(load(order + CHUNKS) + spare * EIGHT)
            move_down(
                chunk + HALF_ENTRIES * SIXTEEN,
                chunk + ENTRIES * SIXTEEN,
                chunk + HALF_ENTRIES * SIXTEEN - upper,
            )
            move_up(top + THIRTY_TWO, tops + count * THIRTY_TWO, THIRTY_TWO)
            store(order + TOP_COUNT, count + ONE)
            store(top + SIXTEEN, HALF_ENTRIES)
            store(top + THIRTY_TWO, load(upper))
            store(top + THIRTY_TWO + EIGHT, upper)
            store(top + THIRTY_TWO + SIXTEEN, HALF_ENTRIES)
            length = HALF_ENTRIES
            if load(upper) <= first:
                top += THIRTY_TWO
                chunk = upper
        entry = chunk + length * SIXTEEN
        while entry != chunk and load(entry - SIXTEEN) > first:
            store(entry, load(entry - SIXTEEN))
            store(entry + EIGHT, load(entry - EIGHT))
            entry -= SIXTEEN
        store(entry, first)
        store(entry + EIGHT, segment)
        store(top + SIXTEEN, length + ONE)
        if entry == chunk:
            store(top, first)

    insert = device(insert)

    def remove(order: Any, number: Any, entry: Any) -> Any:
        """Take an entry out; 1 where the next one has its number now, 0 where that begins a chunk."""
        tops = load(order + TOPS)
        top = tops + number * THIRTY_TWO
        chunk = load(top + EIGHT)
        length = load(top + SIXTEEN) - ONE
        if length == ZERO:
            count = load(order + TOP_COUNT)
            move_down(top + THIRTY_TWO, tops + count * THIRTY_TWO, THIRTY_TWO)
            store(order + TOP_COUNT, count - ONE)
            spare = load(order + SPARE)
            store(load(order + CHUNKS) + spare * EIGHT, chunk)
            store(order + SPARE, spare + ONE)
            return ONE
        place = chunk + entry * SIXTEEN
        move_down(place + SIXTEEN, chunk + (length + ONE) * SIXTEEN, SIXTEEN)
        store(top + SIXTEEN, length)
        if entry == ZERO:
            store(top, load(chunk))
        if entry == length:
            return ZERO
        return ONE

    remove = device(remove)

    def release(order: Any, segment: Any) -> None:
        """A segment is free: it has no bytes, so the table cannot find it."""
        store(segment, ZERO)
        store(segment + END, ZERO)
        store(segment + WRITER, load(order + FREE))
        store(order + FREE, segment)
        store(order + UNUSED, load(order + UNUSED) + ONE)

    release = device(release)

    def new_segment(order: Any, first: Any, end: Any) -> Any:
        segment = load(order + FREE)
        store(order + FREE, load(segment + WRITER))
        store(order + UNUSED, load(order + UNUSED) - ONE)
        store(segment, first)
        store(segment + END, end)
        return segment

    new_segment = device(new_segment)

    def copy_state(target: Any, source: Any) -> None:
        """Writer and readers of one segment are another's too."""
        word = WRITER
        while word < SEGMENT_SIZE:
            store(target + word, load(source + word))
            word += EIGHT

    copy_state = device(copy_state)

    # --- a range of a task ---

    def collect_range(order: Any, first: Any, end: Any, written: Any, retired: Any) -> Any:
        """Add what a task waits for because of one range; 1 where two chains have written what it only reads.

        Then a join must come before the task: the one segment that the range becomes has room for one writer.
        """
        segment = find(order, first, end, retired)
        if segment != ZERO:
            if written == ZERO or add_readers(order, segment, retired) == ZERO:
                add(order, load(segment + WRITER), retired)
            return ZERO
        several = ZERO
        number, entry = locate(order, first)
        count = load(order + TOP_COUNT)
        latest = ZERO
        any_writer = ZERO
        while number < count:
            top = load(order + TOPS) + number * THIRTY_TWO
            segment = load(load(top + EIGHT) + entry * SIXTEEN + EIGHT)
            if load(segment) >= end:
                break
            if written == ZERO or add_readers(order, segment, retired) == ZERO:
                writer = load(segment + WRITER)
                if writer - retired < TOP_BIT:
                    add(order, writer, retired)
                    if any_writer == ZERO:
                        any_writer = ONE
                        latest = writer
                    elif follows(order, latest, writer) == ZERO:
                        several = ONE
                    elif writer - latest < TOP_BIT:
                        latest = writer
            entry += ONE
            if entry == load(top + SIXTEEN):
                entry = ZERO
                number += ONE
        if written != ZERO:
            several = ZERO
        return several

    collect_range = device(collect_range)

    def record_range(
        order: Any, first: Any, end: Any, written: Any, position: Any, join: Any, retired: Any
    ) -> None:
        """A range of the task at a position has been read or written; join: what came before it, or NONE."""
        segment = find(order, first, end, retired)
        if segment != ZERO:
            if written != ZERO:
                store(segment + WRITER, position)
                store(segment + READERS, ZERO)
            else:
                read_by(order, segment, position, retired)
            return
        total = order + SUM
        writer = retired - ONE
        store(total + READERS, ZERO)
        number, entry = locate(order, first)
        while number < load(order + TOP_COUNT):
            top = load(order + TOPS) + number * THIRTY_TWO
            place = load(top + EIGHT) + entry * SIXTEEN
            segment = load(place + EIGHT)
            begins = load(segment)
            ends = load(segment + END)
            if begins >= end:
                break
            if written == ZERO:
                wrote = load(segment + WRITER)
                if wrote - retired < TOP_BIT:
                    if writer - retired >= TOP_BIT or wrote - writer < TOP_BIT:
                        writer = wrote
                readers = load(segment + READERS)
                if readers == ALL:
                    if load(segment + R1) - retired < TOP_BIT:
                        low = load(segment + R0)
                        if low - retired >= TOP_BIT:
                            low = retired
                        read_by(order, total, low, retired)
                        kept = load(total + READERS)
                        if kept != ALL:  # whoever is in between may have read as well
                            index = ZERO
                            high = low
                            while index < kept:
                                other = load(total + R0 + index * EIGHT)
                                if low - other < TOP_BIT:
                                    low = other
                                if other - high < TOP_BIT:
                                    high = other
                                index += ONE
                            store(total + READERS, ALL)
                            store(total + R0, low)
                            store(total + R1, high)
                        read_by(order, total, load(segment + R1), retired)
                else:
                    index = ZERO
                    while index < readers:
                        other = load(segment + R0 + index * EIGHT)
                        if other - retired < TOP_BIT:
                            read_by(order, total, other, retired)
                        index += ONE
            if begins < first:
                store(segment + END, first)
                if ends > end:
                    rest = new_segment(order, end, ends)
                    copy_state(rest, segment)
                    insert(order, rest)
                    break
                entry += ONE
                if entry == load(top + SIXTEEN):
                    entry = ZERO
                    number += ONE
            elif ends > end:
                store(segment, end)
                store(place, end)
                if entry == ZERO:
                    store(top, end)
                store(cache_place(order, end), segment)
                break
            else:
                if remove(order, number, entry) == ZERO:
                    entry = ZERO
                    number += ONE
                release(order, segment)
        segment = new_segment(order, first, end)
        if written != ZERO:
            store(segment + WRITER, position)
            store(segment + READERS, ZERO)
        else:
            if join != NO_JOIN and writer - retired < TOP_BIT:
                writer = join
            store(total + WRITER, writer)
            read_by(order, total, position, retired)
            copy_state(segment, total)
        insert(order, segment)

    record_range = device(record_range)

    # --- a task ---

    def collect(order: Any, access: Any, retired: Any) -> Any:
        """Add what a task waits for; 1 where a join must come before it."""
        writes = load(access)
        count = load(access + ACCESS_COUNT)
        several = ZERO
        index = ZERO
        while index < count:
            at = access + RANGES + index * SIXTEEN
            written = ZERO
            if index < writes:
                written = ONE
            several |= collect_range(order, load(at), load(at + EIGHT), written, retired)
            index += ONE
        return several

    collect = device(collect)

    def record(order: Any, access: Any, position: Any, join: Any, retired: Any) -> None:
        """The task stands at a position: later ones will wait for it. What it reads first, so that what it
        also writes is known as written."""
        writes = load(access)
        index = load(access + ACCESS_COUNT)
        while index > ZERO:
            index -= ONE
            at = access + RANGES + index * SIXTEEN
            written = ZERO
            if index < writes:
                written = ONE
            record_range(order, load(at), load(at + EIGHT), written, position, join, retired)

    record = device(record)

    def place(order: Any, position: Any, run: Any) -> None:
        """The task at hand gets a position: it continues a chain that it waits for, or begins one."""
        count = load(order + COUNT)
        chain = ZERO
        best = ZERO
        index = ZERO
        while index < count:
            other = load(order + DEPS_AT + index * EIGHT)
            found = node(order, other)
            if load(found) == other and load(found + CONTINUED) == ZERO:
                if chain == ZERO or other - best < TOP_BIT:
                    best = other
                    chain = load(found + CHAIN)
            index += ONE
        if chain == ZERO:
            chain = load(order + CHAINS) + ONE
            store(order + CHAINS, chain)
        else:
            store(node(order, best) + CONTINUED, ONE)
        mine = node(order, position)
        store(mine, position)
        store(mine + CHAIN, chain)
        store(mine + RUN, run)
        store(mine + CONTINUED, ZERO)

    place = device(place)

    # --- room ---

    def forget(order: Any, retired: Any, everything: Any) -> None:
        """Drop the segments whose tasks have retired, or all of them, and pack the chunks."""
        gather = load(order + GATHER)
        kept = ZERO
        number = ZERO
        while number < load(order + TOP_COUNT):
            top = load(order + TOPS) + number * THIRTY_TWO
            chunk = load(top + EIGHT)
            entry = ZERO
            while entry < load(top + SIXTEEN):
                segment = load(chunk + entry * SIXTEEN + EIGHT)
                if everything == ZERO and in_use(segment, retired) != ZERO:
                    store(gather + kept * EIGHT, segment)
                    kept += ONE
                else:
                    release(order, segment)
                entry += ONE
            spare = load(order + SPARE)
            store(load(order + CHUNKS) + spare * EIGHT, chunk)
            store(order + SPARE, spare + ONE)
            number += ONE
        number = ZERO
        index = ZERO
        while index < kept:
            spare = load(order + SPARE) - ONE
            store(order + SPARE, spare)
            chunk = load(load(order + CHUNKS) + spare * EIGHT)
            top = load(order + TOPS) + number * THIRTY_TWO
            length = ZERO
            while length < PACKED and index < kept:
                segment = load(gather + index * EIGHT)
                store(chunk + length * SIXTEEN, load(segment))
                store(chunk + length * SIXTEEN + EIGHT, segment)
                length += ONE
                index += ONE
            store(top, load(chunk))
            store(top + EIGHT, chunk)
            store(top + SIXTEEN, length)
            number += ONE
        store(order + TOP_COUNT, number)

    forget = device(forget)

    def ensure_room(order: Any, retired: Any) -> Any:
        """1 where the segments of one more task may not fit: all must be forgotten and waited for."""
        if load(order + UNUSED) >= ROOM and load(order + SPARE) >= FEW_CHUNKS:
            return ZERO
        forget(order, retired, ZERO)
        if load(order + UNUSED) >= ROOM and load(order + SPARE) >= FEW_CHUNKS:
            return ZERO
        return ONE

    ensure_room = device(ensure_room)

    def trace(order: Any, accesses: Any, count: Any, found: Any, stride: Any) -> None:
        """Dependencies of a sequence at positions 0 ... count - 1 of which none ever retires.

        Writes for each task `count`, `folded`, `low`, `high` and `deps`. There are no joins here: where there
        would be one, the task itself is taken for the writer of what it reads.
        """
        position = ZERO
        while position < count:
            access = accesses + position * ACCESS_SIZE
            begin(order, ZERO)
            full = ensure_room(order, ZERO)
            if full != ZERO and position != ZERO:
                add_range(order, ZERO, position - ONE, ZERO)
            several = collect(order, access, ZERO)
            target = found + position * stride
            store(target, load(order + COUNT))
            store(target + EIGHT, load(order + FOLD))
            store(target + SIXTEEN, load(order + LOW))
            store(target + SIXTEEN + EIGHT, load(order + HIGH))
            index = ZERO
            while index < load(order + COUNT):
                store(target + THIRTY_TWO + index * EIGHT, load(order + DEPS_AT + index * EIGHT))
                index += ONE
            place(order, position, ONE)
            if full != ZERO:
                forget(order, ZERO, ONE)
                store(order + FLOOR, position)
            join = NO_JOIN
            if several != ZERO:
                join = position
            record(order, access, position, join, ZERO)
            position += ONE

    trace = device(trace)

    return SimpleNamespace(
        node=node,
        begin=begin,
        add=add,
        add_range=add_range,
        collect=collect,
        record=record,
        place=place,
        ensure_room=ensure_room,
        forget=forget,
        trace=trace,
    )


LANE: Final = np.dtype([("tail", "<u8"), ("begun", "<u8")])
"""An in-order queue: position of its last task, where it has one."""


@cache
def make_fill_ordered(m: HostPrimitives) -> Body:
    """`fill_ordered(order) -> 0`: put tasks into the ring, but for their stamps.

    Its arguments and answers are words of ORDER, so that it is compiled once for all who call it. Claims and
    fills slots for up to `count` tasks, under the lock, and publishes nothing. `accesses`, `lane` and
    `extra` are addresses, or 0: an ACCESS a task; a LANE whose tasks run in order; `extras` pairs of first
    and last position to wait for, which are the first task's alone where there is a lane. Answers how many
    tasks were taken and the slots to publish, a few more where joins or a nop came between.

    A task that waits for the one before it, in the same call, joins its run; one that does so alone in a
    call says FOLLOW. Up to two more waits fit into the task, and a join before it takes all others.
    """
    u64 = m.u64
    load, store, load_acquire_sys = m.load_u64, m.store_u64, m.load_acquire_sys
    t = make_tracker(m)
    node, begin, add, add_range = t.node, t.begin, t.add, t.add_range
    collect, record, place, ensure_room, forget = t.collect, t.record, t.place, t.ensure_room, t.forget
    try_claim, status_of = make_try_claim(m), make_status_of(m)
    publish = make_publish(m)
    (
        HOST_AT,
        TASKS_AT,
        ACCESSES_AT,
        WANTED_AT,
        LANE_AT,
        EXTRA_AT,
        EXTRAS_AT,
        DONE_AT,
        POSITION_AT,
        SLOTS_AT,
    ) = (u64(field(ORDER, name)) for name in ARGUMENTS[1:])
    OK = np.int32(0)

    WORDS, RETIRED = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_WORDS, "retired"))
    RING, MASK = u64(field(HOST_CONTEXT, "ring")), u64(field(HOST_CONTEXT, "mask"))
    MAX_RUN_AT = u64(field(HOST_CONTEXT, "max_run"))
    COUNT, FOLD, LOW, HIGH, DEPS_AT, FLOOR = (
        u64(field(ORDER, name)) for name in ("count", "folded", "low", "high", "deps", "floor")
    )
    RUN = u64(field(NODE, "run"))
    BEGUN = u64(field(LANE, "begun"))
    ZERO, ONE, TWO, EIGHT, SIXTEEN, HALF = u64(0), u64(1), u64(2), u64(8), u64(16), u64(32)
    TASK_SIZE, HIGH_HALF = u64(TASK_BYTES), u64(0xFFFFFFFF00000000)
    LINK, AFTER_0, AFTER_1, FOLLOW, PROGRAM = (
        u64(flag << 32) for flag in (Flag.LINK, Flag.AFTER_0, Flag.AFTER_1, Flag.FOLLOW, Flag.PROGRAM)
    )
    KEEP = u64(MASK_64 & ~((Flag.LINK | Flag.AFTER_0 | Flag.AFTER_1 | Flag.FOLLOW) << 32))
    AFTER_AT, LISTED, COUNT_AT, RANGE = (
        u64(offset(name)) for name in ("after", "inputs", "count", "scalars")
    )
    MOST, MOST_JOINED, TOP_BIT, NO_JOIN = u64(CHUNK), u64(MAX_JOINED), u64(1 << 63), u64(NONE)
    JOIN, ONE_TILE, PENDING, ACCESS_SIZE = (
        u64(JOIN_OP),
        u64(1 << 32),
        u64(PENDING_STATUS),
        u64(ACCESS.itemsize),
    )

    def drop(order: Any, index: Any) -> None:
        """Take one of the waits away."""
        count = load(order + COUNT) - ONE
        store(order + DEPS_AT + index * EIGHT, load(order + DEPS_AT + count * EIGHT))
        store(order + COUNT, count)

    drop = m.device(drop)

    def drop_done(host: Any, order: Any) -> None:
        """Take away waits for what has ended and is not yet retired."""
        index = ZERO
        while index < load(order + COUNT):
            if status_of(host, load(order + DEPS_AT + index * EIGHT)) != PENDING:
                drop(order, index)
            else:
                index += ONE

    drop_done = m.device(drop_done)

    def waits_for(order: Any, position: Any) -> Any:
        """1 where the task at hand waits for a position by name."""
        index = ZERO
        while index < load(order + COUNT):
            if load(order + DEPS_AT + index * EIGHT) == position:
                return ONE
            index += ONE
        return ZERO

    waits_for = m.device(waits_for)

    def leave_run(order: Any, first: Any) -> None:
        """Take away waits for positions from `first` on: members of the run that the task is part of."""
        index = ZERO
        while index < load(order + COUNT):
            if load(order + DEPS_AT + index * EIGHT) - first < TOP_BIT:
                drop(order, index)
            else:
                index += ONE
        if load(order + FOLD) != ZERO and load(order + HIGH) - first < TOP_BIT:
            if load(order + LOW) - first < TOP_BIT:
                store(order + FOLD, ZERO)
            else:
                store(order + HIGH, first - ONE)

    leave_run = m.device(leave_run)

    def write_head(target: Any, head: Any, shape: Any, order: Any) -> None:
        """The first words of a slot, and the waits that are left, two at most."""
        count = load(order + COUNT)
        if count > ZERO:
            head |= AFTER_0
            store(target + AFTER_AT, load(order + DEPS_AT))
        if count > ONE:
            head |= AFTER_1
            store(target + AFTER_AT + EIGHT, load(order + DEPS_AT + EIGHT))
        store(target, head)
        store(target + EIGHT, shape)

    write_head = m.device(write_head)

    def copy_rest(target: Any, source: Any) -> None:
        word = SIXTEEN
        while word < TASK_SIZE:
            store(target + word, load(source + word))
            word += EIGHT

    copy_rest = m.device(copy_rest)

    def clear_rest(target: Any) -> None:
        word = SIXTEEN
        while word < TASK_SIZE:
            store(target + word, ZERO)
            word += EIGHT

    clear_rest = m.device(clear_rest)

    def write_nop(target: Any) -> None:
        store(target, ZERO)
        store(target + EIGHT, ONE_TILE | ONE)
        clear_rest(target)

    write_nop = m.device(write_nop)

    def run_to_join(order: Any, position: Any, fresh: Any, max_run: Any) -> Any:
        """Place that a task takes in the run of the one before, or 0 where it stands alone."""
        if fresh != ZERO:
            return ZERO
        before = node(order, position - ONE)
        run = load(before + RUN)
        if load(before) != position - ONE or run == ZERO or run >= max_run:
            return ZERO
        return run + ONE

    run_to_join = m.device(run_to_join)

    def fill_ordered(order: Any) -> Any:
        host = load(order + HOST_AT)
        tasks = load(order + TASKS_AT)
        accesses = load(order + ACCESSES_AT)
        count = load(order + WANTED_AT)
        lane = load(order + LANE_AT)
        extra = load(order + EXTRA_AT)
        extras = load(order + EXTRAS_AT)
        ring = load(host + RING)
        mask = load(host + MASK)
        max_run = load(host + MAX_RUN_AT)
        wanted = count
        if wanted > MOST:
            wanted = MOST
        position, granted = try_claim(host, wanted)
        store(order + DONE_AT, ZERO)
        store(order + POSITION_AT, position)
        store(order + SLOTS_AT, ZERO)
        if granted == ZERO:
            return OK
        retired = load_acquire_sys(load(host + WORDS) + RETIRED)
        at = position
        end = position + granted
        index = ZERO
        while at != end:
            source = tasks + index * TASK_SIZE
            access = accesses + index * ACCESS_SIZE
            shape = load(source + EIGHT)
            alone = ZERO  # 1 where no run can hold it
            if shape >> HALF > ONE or load(source) & PROGRAM != ZERO:
                alone = ONE
            begin(order, retired)
            several = ZERO
            full = ZERO
            if lane != ZERO and load(lane + BEGUN) != ZERO:
                add(order, load(lane), retired)
            if accesses != ZERO:
                full = ensure_room(order, retired)
                if full != ZERO and at != retired:
                    add_range(order, retired, at - ONE, retired)
                several = collect(order, access, retired)
            number = ZERO
            while number < extras:
                low = load(extra + number * SIXTEEN)
                high = load(extra + number * SIXTEEN + EIGHT)
                if low == high:
                    add(order, low, retired)
                else:
                    add_range(order, low, high, retired)
                number += ONE

            fresh = ZERO  # 1 where the task before is not this call's to change
            if at == position:
                fresh = ONE
            run = ZERO  # its place in the run of the task before
            if load(order + COUNT) > TWO:
                drop_done(host, order)
            follows = waits_for(order, at - ONE)
            if follows != ZERO:
                run = run_to_join(order, at, fresh, max_run)
            waits = load(order + COUNT)
            if run != ZERO and alone == ZERO:
                waits -= ONE
            join = NO_JOIN
            if waits > TWO or load(order + FOLD) != ZERO or several != ZERO or full != ZERO:
                # A join first; it needs a slot of its own.
                if at + ONE == end:
                    another, granted = try_claim(host, ONE)
                    if granted != ZERO and another == end:
                        end += ONE
                    else:
                        # No room, so the task has to come again; what was claimed must be used all the same.
                        write_nop(ring + (at & mask) * TASK_SIZE)
                        at += ONE
                        if granted != ZERO:
                            write_nop(ring + (another & mask) * TASK_SIZE)
                            publish(host, another, ONE)
                        break
                target = ring + (at & mask) * TASK_SIZE
                place_run = run
                if place_run == ZERO:
                    place_run = ONE
                place(order, at, place_run)
                if run != ZERO:
                    before = ring + ((at - ONE) & mask) * TASK_SIZE
                    store(before, load(before) | LINK)
                    leave_run(order, at - (run - ONE))
                clear_rest(target)
                while load(order + COUNT) > MOST_JOINED:
                    last = load(order + DEPS_AT + (load(order + COUNT) - ONE) * EIGHT)
                    drop(order, load(order + COUNT) - ONE)
                    add_range(order, last, last, retired)
                listed = load(order + COUNT)
                number = ZERO
                while number < listed:
                    store(target + LISTED + number * EIGHT, load(order + DEPS_AT + number * EIGHT))
                    number += ONE
                store(target + COUNT_AT, listed)
                if load(order + FOLD) != ZERO:
                    store(target + RANGE, load(order + LOW))
                    store(target + RANGE + EIGHT, load(order + HIGH) - load(order + LOW) + ONE)
                store(target, JOIN)
                store(target + EIGHT, ONE_TILE | place_run)
                if full != ZERO:
                    forget(order, retired, ONE)
                    store(order + FLOOR, at)
                join = at
                at += ONE
                store(order + COUNT, ONE)
                store(order + FOLD, ZERO)
                store(order + DEPS_AT, join)
                follows = ONE
                fresh = ZERO
                run = run_to_join(order, at, fresh, max_run)

            target = ring + (at & mask) * TASK_SIZE
            head = load(source) & KEEP
            copy_rest(target, source)
            if alone != ZERO:
                run = ZERO
            if run == ZERO:
                place_run = ONE
                if alone != ZERO:
                    place_run = ZERO
                elif follows != ZERO and count == ONE:
                    # The task before has been published; the pump may still find both in one window.
                    may_run = run_to_join(order, at, ZERO, max_run)
                    if may_run != ZERO:
                        head |= FOLLOW
                        place_run = may_run
                place(order, at, place_run)
                if head & FOLLOW != ZERO and load(order + DEPS_AT) != at - ONE:
                    store(order + DEPS_AT + EIGHT, load(order + DEPS_AT))
                    store(order + DEPS_AT, at - ONE)
                write_head(target, head, (shape & HIGH_HALF) | ONE, order)
            else:
                place(order, at, run)
                before = ring + ((at - ONE) & mask) * TASK_SIZE
                store(before, load(before) | LINK)
                leave_run(order, at - (run - ONE))
                write_head(target, head, (shape & HIGH_HALF) | run, order)
            if accesses != ZERO:
                record(order, access, at, join, retired)
            if lane != ZERO:
                store(lane, at)
                store(lane + BEGUN, ONE)
                extras = ZERO
            at += ONE
            index += ONE
        store(order + DONE_AT, index)
        store(order + SLOTS_AT, at - position)
        return OK

    return m.device(fill_ordered)


@cache
def make_lock(m: HostPrimitives) -> Body:
    """`lock(order)`: until `unlock`, nobody else tracks or claims."""
    u64, compare_and_swap, pause = m.u64, m.compare_and_swap, m.pause
    ZERO, ONE = u64(0), u64(1)
    assert field(ORDER, "lock") == 0

    def lock(order: Any) -> None:
        spins = ZERO
        while compare_and_swap(order, ZERO, ONE) == ZERO:
            pause(spins)
            spins += ONE

    return m.device(lock)


@cache
def make_fill(m: HostPrimitives) -> Body:
    """`fill(host, order, tasks, accesses, count, lane, extra, extras) -> (tasks, position, slots)`.

    Calls the compiled `make_fill_ordered`, under the lock, which the caller has taken, and gives it back.
    """
    u64, load, store, store_release_sys, call = (
        m.u64,
        m.load_u64,
        m.store_u64,
        m.store_release_sys,
        m.call_query,
    )
    (
        FILL,
        HOST_AT,
        TASKS_AT,
        ACCESSES_AT,
        WANTED_AT,
        LANE_AT,
        EXTRA_AT,
        EXTRAS_AT,
        DONE_AT,
        POSITION_AT,
        SLOTS_AT,
    ) = (u64(field(ORDER, name)) for name in ARGUMENTS)
    UNLOCKED = u64(0)

    def fill(
        host: Any, order: Any, tasks: Any, accesses: Any, count: Any, lane: Any, extra: Any, extras: Any
    ) -> Any:
        store(order + HOST_AT, host)
        store(order + TASKS_AT, tasks)
        store(order + ACCESSES_AT, accesses)
        store(order + WANTED_AT, count)
        store(order + LANE_AT, lane)
        store(order + EXTRA_AT, extra)
        store(order + EXTRAS_AT, extras)
        call(load(order + FILL), order)
        done = load(order + DONE_AT)
        position = load(order + POSITION_AT)
        slots = load(order + SLOTS_AT)
        # Release: who takes the lock next sees what was tracked. Pairs with the swap in lock.
        store_release_sys(order, UNLOCKED)
        return done, position, slots

    return m.device(fill)


@cache
def make_submit_ordered(m: HostPrimitives) -> Body:
    """`submit(host, order, tasks, accesses, count, lane, extra, extras, until_ns, ranges, range_slots)`.

    As `ring.make_submit`, for tasks in order: see `make_fill_ordered`. Ranges hold joins too.
    """
    u64 = m.u64
    load, store, load_acquire_sys = m.load_u64, m.store_u64, m.load_acquire_sys
    fill, lock = make_fill(m), make_lock(m)
    publish, retire = make_publish(m), make_retire(m)
    nobody_serves, relaunch = make_nobody_serves(m), make_relaunch(m)
    now_ns, pause = m.now_ns, m.pause
    WORDS, MASK = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_CONTEXT, "mask"))
    CLAIMED, RETIRED = u64(field(HOST_WORDS, "claimed")), u64(field(HOST_WORDS, "retired"))
    ZERO, ONE, EIGHT, SIXTEEN = u64(0), u64(1), u64(8), u64(16)
    TASK_SIZE, ACCESS_SIZE, EVERY = u64(TASK_BYTES), u64(ACCESS.itemsize), u64(63)

    def submit(
        host: Any,
        order: Any,
        tasks: Any,
        accesses: Any,
        count: Any,
        lane: Any,
        extra: Any,
        extras: Any,
        until_ns: Any,
        ranges: Any,
        range_slots: Any,
    ) -> Any:
        submitted = ZERO
        written = ZERO
        parked = ZERO
        spins = ZERO
        end = ZERO
        words = load(host + WORDS)
        capacity = load(host + MASK) + ONE
        while submitted < count:
            # What has retired need not be tracked; and there must be room for the next round.
            used = load_acquire_sys(words + CLAIMED) - load_acquire_sys(words + RETIRED)
            if used + used > capacity:
                retire(host)
            lock(order)
            done, position, slots = fill(host, order, tasks, accesses, count - submitted, lane, extra, extras)
            if slots == ZERO:
                retire(host)
                if nobody_serves(host) != ZERO and relaunch(host) != ZERO:
                    parked = ONE
                    break
                if spins & EVERY == EVERY and now_ns() > until_ns:
                    break
                pause(spins)
                spins += ONE
                continue
            spins = ZERO
            parked = publish(host, position, slots)
            if parked != ZERO:
                parked = relaunch(host)
            submitted += done
            tasks += done * TASK_SIZE
            if accesses != ZERO:
                accesses += done * ACCESS_SIZE
            if done != ZERO:
                if lane != ZERO:
                    extras = ZERO
                if written != ZERO and position == end:
                    last = ranges + (written - ONE) * SIXTEEN + EIGHT
                    store(last, load(last) + slots)
                else:
                    store(ranges + written * SIXTEEN, position)
                    store(ranges + written * SIXTEEN + EIGHT, slots)
                    written += ONE
                end = position + slots
            if parked != ZERO or written == range_slots:
                break
        return submitted, written, parked

    return m.device(submit)


@cache
def make_submit_plain_ordered(m: HostPrimitives) -> Body:
    """`submit_plain(host, order, op_id, x, y, out, count, driver, stream) -> (position, answer)`.

    As `ring.make_submit_plain`, in the order of what x, y and out overlap.
    """
    u64 = m.u64
    load, store, query, load_acquire_sys = m.load_u64, m.store_u64, make_query(m), m.load_acquire_sys
    fill, lock = make_fill(m), make_lock(m)
    publish, retire, relaunch = make_publish(m), make_retire(m), make_relaunch(m)
    WORDS, MASK = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_CONTEXT, "mask"))
    CLAIMED, RETIRED = u64(field(HOST_WORDS, "claimed")), u64(field(HOST_WORDS, "retired"))
    TASK, ACCESSED = u64(field(ORDER, "task")), u64(field(ORDER, "access"))
    RANGES, ACCESS_COUNT = u64(field(ACCESS, "ranges")), u64(field(ACCESS, "count"))
    ZERO, ONE, TWO, EIGHT, SIXTEEN, TASK_SIZE = u64(0), u64(1), u64(2), u64(8), u64(16), u64(TASK_BYTES)
    RUN_AND_TILES = u64(1 | 1 << 32)
    ANSWER_SENT, ANSWER_DECLINED = u64(SENT), u64(DECLINED)
    RUN_AT, INPUTS, OUTPUT = u64(offset("run")), u64(offset("inputs")), u64(offset("outputs"))
    COUNT, REST = u64(offset("count")), u64(offset("after"))
    DTYPES_AT, ALL_F32 = u64(offset("dtypes") - 4), u64(PLAIN_DTYPES << 32)

    def submit_plain(
        host: Any, order: Any, op_id: Any, x: Any, y: Any, out: Any, count: Any, driver: Any, stream: Any
    ) -> Any:
        if driver != ZERO and query(driver, stream) != ZERO:
            return ZERO, ANSWER_DECLINED
        words = load(host + WORDS)
        used = load_acquire_sys(words + CLAIMED) - load_acquire_sys(words + RETIRED)
        if used + used > load(host + MASK):
            retire(host)
        lock(order)
        task = order + TASK
        store(task, op_id)
        store(task + RUN_AT, RUN_AND_TILES)
        store(task + INPUTS, x)
        store(task + INPUTS + EIGHT, y)
        store(task + OUTPUT, out)
        store(task + COUNT, count)
        word = REST
        while word < TASK_SIZE:
            store(task + word, ZERO)
            word += EIGHT
        store(task + INPUTS + SIXTEEN, ZERO)
        store(task + INPUTS + SIXTEEN + EIGHT, ZERO)
        store(task + OUTPUT + EIGHT, ZERO)
        store(task + DTYPES_AT, ALL_F32)
        access = order + ACCESSED
        size = count << TWO
        store(access, ONE)
        place = access + RANGES
        store(place, out)
        store(place + EIGHT, out + size)
        place += SIXTEEN
        ranges = ONE
        if x != out:
            store(place, x)
            store(place + EIGHT, x + size)
            place += SIXTEEN
            ranges += ONE
        if y != out and y != x:
            store(place, y)
            store(place + EIGHT, y + size)
            ranges += ONE
        store(access + ACCESS_COUNT, ranges)
        done, position, slots = fill(host, order, task, access, ONE, ZERO, ZERO, ZERO)
        if slots == ZERO:
            return ZERO, ANSWER_DECLINED
        unserved = publish(host, position, slots)
        if unserved != ZERO:
            unserved = relaunch(host)
        if done == ZERO:
            return ZERO, ANSWER_DECLINED
        return position + slots - ONE, unserved + ANSWER_SENT

    return m.device(submit_plain)


def _plain(body: Any) -> Body:
    """The Python function of a body that `m.device` has wrapped."""
    function: Body = body.py_func
    return function


@cache
def compiled() -> SimpleNamespace:
    """The functions for ordered submission, compiled to run without the GIL (seconds, once a process)."""
    from numba import cfunc, njit, types

    from ..machines import cpu_memory as m

    u64 = types.uint64
    pair, triple = types.UniTuple(u64, 2), types.UniTuple(u64, 3)
    signatures: dict[str, tuple[Any, Any]] = {
        "submit": (make_submit_ordered, triple(*[u64] * 11)),
        "submit_plain": (make_submit_plain_ordered, pair(*[u64] * 9)),
    }
    fill = cfunc(types.int32(u64), error_model="numpy")(_plain(make_fill_ordered(m)))
    functions = {
        name: njit(signature, nogil=True)(_plain(make(m))) for name, (make, signature) in signatures.items()
    }
    return SimpleNamespace(fill=fill, **functions)


@cache
def compiled_trace() -> Any:
    """`trace` of the tracker, compiled."""
    from numba import njit, types

    from ..machines import cpu_memory as m

    return njit(types.void(*[types.uint64] * 5), nogil=True)(_plain(make_tracker(m).trace))
