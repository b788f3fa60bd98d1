"""Runs of plain tasks: staged descriptors arrive, what one thread can keep to itself stays in its registers.

Between two tasks of a run lies a barrier, because the second may read what any thread of the first wrote.
Mostly it does not: element-wise tasks on whole arrays hand each element from a thread to the same thread.
`digest` looks at a group of tasks at once, each pair by a thread of its own, and says of every task whether
it needs the barrier, which of its operands is the output of the task before, and so lies in registers, and
whether the others may be loaded while the task before still computes.

A plain task moves 16-byte vectors: vector v belongs to thread v modulo the width, whatever the dtype.
Elements behind the last whole vector, and all of an operand that is not aligned, are dealt out one by one. So
two tasks share their split exactly if they have as many elements and both or neither are aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..descriptor import TASK_BYTES, DType, Flag, offset
from ..machines.base import Body, Primitives
from ..protocol import DIGEST_BYTES, GROUP, SCRATCH_DIGESTS, SCRATCH_TASKS
from .elementwise import Entry, Lanes, lanes_f32, lanes_half, make_tree

# A digest: address of x, of y, of the output, and a word: flags | op_id << 8 | dtype << 24 | vectors << 32.
FAST = 1
"""At most one or two whole vectors a thread and nothing behind them."""
WIDE = 2
"""Two; only where FAST is set."""
FOLLOWS = 4
"""The task before is linked to this one, which is plain, of its family, and waits for nothing."""
APART = 8
"""A thread of it touches what another thread of an earlier task of the group touches: a barrier before it."""
HELD_X, HELD_Y = 16, 32
"""The operand is the output of the task before, vector by vector. HELD_Y is also set where there is no y."""
CHAINED = 64
"""FOLLOWS and not APART, both tasks are FAST, and both or neither WIDE."""
OP_BITS = 16
"""Of an op_id in a digest."""


@dataclass(frozen=True, slots=True)
class Family:
    """Functions that one run may mix: of f32, or of f16 and bf16."""

    lanes: Lanes
    entries: Sequence[Entry]  # by rising op_id
    unary: frozenset[int]
    """Ids of those that take one operand."""
    half: bool


@dataclass(frozen=True, slots=True)
class Inlined:
    """An injected function of f32 that the worker runs like its own."""

    entry: Entry
    arity: int  # 1 or 2


def make_run_plain(
    m: Primitives,
    entries: Sequence[Entry],
    half_entries: Sequence[Entry],
    unary: int,
    inlined: Sequence[Inlined] = (),
) -> tuple[Body, Body]:
    """(`is_plain(op_id)`, `run_plain(scratch, position) -> position`): plain tasks one after another.

    `entries` are the functions of f32, `half_entries` those of f16 and bf16; the first `unary` of each take
    one operand. run_plain runs the staged task at a position, whole, and those linked to it, to the last of
    its group or until one is of another family, tiled, or waits for something; it answers with the position
    of the last it ran. All threads call it after a barrier.
    """
    u64, load_task_u64 = m.u64, m.load_task_u64
    extra = sorted(inlined, key=lambda each: each.entry.op_id)
    one_operand = [*entries[:unary], *(each.entry for each in extra if each.arity == 1)]
    full = Family(
        lanes_f32(m),
        [*entries, *(each.entry for each in extra)],
        frozenset(each.op_id for each in one_operand),
        False,
    )
    half = Family(lanes_half(m), half_entries, frozenset(each.op_id for each in half_entries[:unary]), True)
    run_f32, run_half = _make_run(m, full), _make_run(m, half)
    ids = [each.op_id for family in (full, half) for each in family.entries]
    assert max(ids) < 1 << OP_BITS
    is_plain = make_one_of(m, ids)
    is_half = make_one_of(m, [each.op_id for each in half_entries])
    TASKS, SLOT, TASK_SIZE, LOW_HALF = (
        u64(SCRATCH_TASKS),
        u64(2 * GROUP - 1),
        u64(TASK_BYTES),
        u64(0xFFFFFFFF),
    )

    def run_plain(scratch: Any, position: Any) -> Any:
        if is_half(load_task_u64(scratch + TASKS + (position & SLOT) * TASK_SIZE) & LOW_HALF):
            return run_half(scratch, position)
        return run_f32(scratch, position)

    return is_plain, m.device(run_plain)


def make_one_of(m: Primitives, ids: Iterable[int]) -> Body:
    """`one_of(op_id)`: is it one of these? A comparison for each of their ranges, and no branch."""
    u64 = m.u64
    every = sorted(ids)
    begins = [at for i, at in enumerate(every) if i == 0 or every[i - 1] != at - 1]
    first = begins[-1]
    FIRST, LENGTH = u64(first), u64(every[-1] - first + 1)

    def in_range(op_id: Any) -> Any:
        return op_id - FIRST < LENGTH

    in_range = m.device(in_range)
    if len(begins) == 1:
        return in_range
    others = make_one_of(m, [at for at in every if at < first])

    def one_of(op_id: Any) -> Any:
        return in_range(op_id) | others(op_id)

    return m.device(one_of)


def make_crosses(m: Primitives) -> Body:
    """`crosses(p, p_bytes, q, q_bytes, alike)`: may different threads touch a byte of both ranges?

    alike: the tasks that the two belong to split equal ranges equally. All without a branch: the threads of a
    warp look at different pairs.
    """

    def crosses(p: Any, p_bytes: Any, q: Any, q_bytes: Any, alike: Any) -> Any:
        return (p < q + q_bytes) & (q < p + p_bytes) & ((p != q) | (not alike))

    return m.device(crosses)


def _make_digest(m: Primitives, family: Family, widest: int) -> Body:
    """`digest(scratch, position)`: digests of the group of a staged task, from it on. All threads.

    What stands behind the run's end is digested as well and never looked at. A barrier must follow.
    """
    u64, lanes = m.u64, family.lanes
    thread_index, block_width, ballot = m.thread_index, m.block_width, m.ballot
    load_task_u32, load_task_u64, load_task_pair = m.load_task_u32, m.load_task_u64, m.load_task_pair
    store_u64, crosses = m.store_u64, make_crosses(m)
    in_family, is_unary = (
        make_one_of(m, [each.op_id for each in family.entries]),
        make_one_of(m, family.unary),
    )

    INPUTS, OUTPUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
    DTYPES, LOW_HALF, HALF, TASK_SIZE = u64(offset("dtypes")), u64(0xFFFFFFFF), u64(32), u64(TASK_BYTES)
    TASKS, DIGESTS, DIGEST_SIZE = u64(SCRATCH_TASKS), u64(SCRATCH_DIGESTS), u64(DIGEST_BYTES)
    ZERO, ONE, EIGHT, FIFTEEN, SIXTEEN = u64(0), u64(1), u64(8), u64(15), u64(16)
    REST, TO_BYTES, TO_VECTOR = (
        u64(lanes.count - 1),
        u64(lanes.bytes.bit_length() - 1),
        u64(lanes.count.bit_length() - 1),
    )
    LINK, AFTER_ANY = u64(Flag.LINK << 32), u64((Flag.AFTER_0 | Flag.AFTER_1) << 32)
    CODE, END, EXTRA = u64(24), u64(GROUP * DIGEST_BYTES), u64(2)
    LENGTH_MASK, PAIRS, TO_ROW = u64(GROUP - 1), u64(GROUP * GROUP), u64(GROUP.bit_length() - 1)
    WHICH_GROUP, ROW_MASK, ROW_IN_WARP = u64(GROUP), u64((1 << GROUP) - 1), u64(31 & ~(GROUP - 1))
    IS_FAST, IS_WIDE, IS_NEXT, IS_APART = u64(FAST), u64(WIDE), u64(FOLLOWS), u64(APART)
    IS_CHAINED, X_HELD, Y_HELD, TO_OP, TO_KIND = (
        u64(CHAINED),
        u64(HELD_X),
        u64(HELD_Y),
        u64(8),
        u64(8 + OP_BITS),
    )
    WIDEST = u64(widest)

    def fetch(task: Any) -> Any:
        head, shape = load_task_pair(task)
        x, y = load_task_pair(task + INPUTS)
        if is_unary(head & LOW_HALF):
            y = x
        out = load_task_u64(task + OUTPUT)
        return head, shape, x, y, out, load_task_u64(task + COUNT)

    def is_fast(x: Any, y: Any, out: Any, count: Any) -> Any:
        vectors = count >> TO_VECTOR
        whole = ((x | y | out) & FIFTEEN == ZERO) & (count & REST == ZERO)
        return whole & (vectors <= block_width() * WIDEST)

    fetch, is_fast = m.device(fetch), m.device(is_fast)

    def digest(scratch: Any, position: Any) -> None:
        start = position & LENGTH_MASK
        group = scratch + TASKS + (position & WHICH_GROUP) * TASK_SIZE
        pair = thread_index()
        while pair < PAIRS:
            later = pair >> TO_ROW
            earlier = pair & LENGTH_MASK
            task = group + later * TASK_SIZE
            head, shape, x, y, out, count = fetch(task)
            head_2, _, x_2, y_2, out_2, count_2 = fetch(group + earlier * TASK_SIZE)
            fast, wide = is_fast(x, y, out, count), count >> TO_VECTOR > block_width()
            fast_2, wide_2 = is_fast(x_2, y_2, out_2, count_2), count_2 >> TO_VECTOR > block_width()
            size = count << TO_BYTES
            size_2 = count_2 << TO_BYTES
            even = (x | y | out) & FIFTEEN == ZERO
            even_2 = (x_2 | y_2 | out_2) & FIFTEEN == ZERO
            alike = (count == count_2) & (even == even_2)
            both = (earlier >= start) & (earlier < later)
            apart = both & (
                crosses(x, size, out_2, size_2, alike)
                | crosses(y, size, out_2, size_2, alike)
                | crosses(out, size, out_2, size_2, alike)
                | crosses(out, size, x_2, size_2, alike)
                | crosses(out, size, y_2, size_2, alike)
            )
            before = both & (earlier + ONE == later)
            follows = (
                before
                & (head_2 & LINK != ZERO)
                & (head & AFTER_ANY == ZERO)
                & (shape >> HALF <= ONE)
                & in_family(head & LOW_HALF)
            )
            chained = follows & fast & fast_2 & (wide == wide_2)
            held = before & alike & fast
            row = pair & ROW_IN_WARP
            aparts = (ballot(u64(apart)) >> row) & ROW_MASK
            any_follows = (ballot(u64(follows)) >> row) & ROW_MASK
            any_chained = (ballot(u64(chained)) >> row) & ROW_MASK
            any_x = (ballot(u64(held & (x == out_2))) >> row) & ROW_MASK
            any_y = (ballot(u64(held & (y == out_2))) >> row) & ROW_MASK
            if earlier == ZERO:
                op = head & LOW_HALF
                code = (op << TO_OP) | ((load_task_u32(task + DTYPES) & FIFTEEN) << TO_KIND)
                if fast:
                    code |= IS_FAST | (count >> TO_VECTOR << HALF)
                    if wide:
                        code |= IS_WIDE
                if any_follows != ZERO:
                    code |= IS_NEXT
                if aparts != ZERO:
                    code |= IS_APART
                elif any_chained != ZERO:
                    code |= IS_CHAINED
                if any_x != ZERO:
                    code |= X_HELD
                if any_y != ZERO or is_unary(op):
                    code |= Y_HELD
                at = scratch + DIGESTS + later * DIGEST_SIZE
                store_u64(at, x)
                store_u64(at + EIGHT, y)
                store_u64(at + SIXTEEN, out)
                store_u64(at + CODE, code)
                if later < EXTRA:  # behind the last there is none
                    store_u64(scratch + DIGESTS + END + later * DIGEST_SIZE + CODE, ZERO)
            pair += block_width()

    return m.device(digest)


def _make_prefetch(m: Primitives) -> Body:
    """`prefetch(digests, index)`: bring the operands of the tasks that follow one to L2, all at once.

    Of the run alone: what stands behind its end may be long gone. All threads.
    """
    u64, thread_index, block_width = m.u64, m.thread_index, m.block_width
    load_task_u64, load_task_pair = m.load_task_u64, m.load_task_pair
    ballot, prefetch_line = m.ballot, m.prefetch
    CODE, DIGEST_SIZE, SIXTEEN, HALF = u64(24), u64(DIGEST_BYTES), u64(16), u64(32)
    ZERO, ONE, IS_FAST, IS_NEXT = u64(0), u64(1), u64(FAST), u64(FOLLOWS)
    X_HELD, Y_HELD, PLACES, LENGTH_MASK = u64(HELD_X), u64(HELD_Y), u64(GROUP * GROUP), u64(GROUP - 1)
    TO_ROW, TO_LINE, LINE, SHARE = u64(GROUP.bit_length() - 1), u64(7 - 4), u64(128), u64(GROUP)

    def prefetch(digests: Any, index: Any) -> None:
        place = thread_index()
        while place < PLACES:
            column = place & LENGTH_MASK
            follow = ballot(u64(load_task_u64(digests + column * DIGEST_SIZE + CODE) & IS_NEXT != ZERO))
            task = place >> TO_ROW
            between = (ONE << (task + ONE)) - (ONE << (index + ONE))
            if task > index and follow & between == between:
                x, y = load_task_pair(digests + task * DIGEST_SIZE)
                _, code = load_task_pair(digests + task * DIGEST_SIZE + SIXTEEN)
                line = column
                lines = ZERO
                if code & IS_FAST != ZERO:
                    lines = code >> HALF >> TO_LINE
                while line < lines:
                    if code & X_HELD == ZERO:
                        prefetch_line(x + line * LINE)
                    if code & Y_HELD == ZERO:
                        prefetch_line(y + line * LINE)
                    line += SHARE
            place += block_width()

    return m.device(prefetch)


def _make_chain(m: Primitives, family: Family, wide: bool) -> Body:
    """`chain(digests, index) -> index`: a FAST task of one or two vectors a thread, and those CHAINED to it.

    The digest of the task after next and the operands of the next one are on their way while one is computed.
    Flags and vectors are 32 bits wide, half the instructions of 64: this loop is nothing but instructions.
    """
    u64, u32, lanes = m.u64, np.uint32, family.lanes
    thread_index, block_width, uniform = m.thread_index, m.block_width, m.uniform
    load_task_pair, load_pair, store_pair = m.load_task_pair, m.load_pair, m.store_pair
    unpack, pack, half = lanes.unpack, lanes.pack, family.half
    pick = make_tree(m, family.entries, 2 * lanes.count if wide else lanes.count)
    FIFTEEN, SIXTEEN, HALF, LOW_HALF = u64(15), u64(16), u64(32), u64(0xFFFFFFFF)
    TO_OP, TO_KIND, OP_MASK = u32(8), u32(8 + OP_BITS), u32((1 << OP_BITS) - 1)
    IS_CHAINED, X_HELD, Y_HELD, F32 = u32(CHAINED), u32(HELD_X), u32(HELD_Y), u64(DType.F32)
    SIZE, TO_INDEX = u64(DIGEST_BYTES), u64(DIGEST_BYTES.bit_length() - 1)
    NEXT, ONE = u64(DIGEST_BYTES + 16), u64(1)
    NOTHING, NO_PAIR = m.f32(0), (u64(0), u64(0))
    NOTHINGS = (NOTHING,) * (2 * lanes.count if wide else lanes.count)
    assert not (wide and half)

    def apply(flags: Any, a: Any, b: Any, a_2: Any, b_2: Any) -> Any:
        op = u32((flags >> TO_OP) & OP_MASK)
        kind = F32
        if half:
            kind = u64(flags >> TO_KIND) & FIFTEEN
        if wide:
            x, y = unpack(kind, a) + unpack(kind, a_2), unpack(kind, b) + unpack(kind, b_2)
            v = pick(op, x, y, NOTHINGS, NOTHING, NOTHING)
            return pack(kind, (v[0], v[1], v[2], v[3])), pack(kind, (v[4], v[5], v[6], v[7]))
        r = pack(kind, pick(op, unpack(kind, a), unpack(kind, b), NOTHINGS, NOTHING, NOTHING))
        return r, r

    apply = m.device(apply)

    def chain(digests: Any, index: Any) -> Any:
        thread = u32(thread_index())
        thread_2 = u32(thread_index() + block_width())
        mine = thread_index() * SIXTEEN
        mine_2 = mine + block_width() * SIXTEEN
        at = digests + index * SIZE
        x, y = load_task_pair(at)
        out, code = load_task_pair(at + SIXTEEN)
        flags, vectors = uniform(u32(code & LOW_HALF)), u32(code >> HALF)
        next_x, next_y = load_task_pair(at + SIZE)
        next_out, next_code = load_task_pair(at + NEXT)
        a = a_2 = b = b_2 = r = r_2 = NO_PAIR
        if thread < vectors:
            a, b = load_pair(x + mine), load_pair(y + mine)
        if wide and thread_2 < vectors:
            a_2, b_2 = load_pair(x + mine_2), load_pair(y + mine_2)
        while True:
            at += SIZE
            next_flags, next_vectors = uniform(u32(next_code & LOW_HALF)), u32(next_code >> HALF)
            next_a = next_a_2 = next_b = next_b_2 = NO_PAIR
            if next_flags & IS_CHAINED:
                if not next_flags & X_HELD:
                    if thread < next_vectors:
                        next_a = load_pair(next_x + mine)
                    if wide and thread_2 < next_vectors:
                        next_a_2 = load_pair(next_x + mine_2)
                if not next_flags & Y_HELD:
                    if thread < next_vectors:
                        next_b = load_pair(next_y + mine)
                    if wide and thread_2 < next_vectors:
                        next_b_2 = load_pair(next_y + mine_2)
            far_x, far_y = load_task_pair(at + SIZE)
            far_out, far_code = load_task_pair(at + NEXT)
            r, r_2 = apply(flags, a, b, a_2, b_2)
            if thread < vectors:
                store_pair(out + mine, r[0], r[1])
            if wide and thread_2 < vectors:
                store_pair(out + mine_2, r_2[0], r_2[1])
            if not next_flags & IS_CHAINED:
                return ((at - digests) >> TO_INDEX) - ONE
            a, a_2, b, b_2 = next_a, next_a_2, next_b, next_b_2
            if next_flags & X_HELD:
                a, a_2 = r, r_2
            if next_flags & Y_HELD:
                b, b_2 = r, r_2
            out, flags, vectors = next_out, next_flags, next_vectors
            next_x, next_y, next_out, next_code = far_x, far_y, far_out, far_code

    return m.device(chain)


def _make_run(m: Primitives, family: Family) -> Body:
    """`run(scratch, position) -> position` of one family. See `make_run_plain`."""
    u64, barrier, load_task_u64 = m.u64, m.barrier, m.load_task_u64
    wide = not family.half  # two vectors a thread, side by side: of f32, four lanes each
    digest, prefetch = _make_digest(m, family, 2 if wide else 1), _make_prefetch(m)
    run_one, chain = _make_run_one(m, family), _make_chain(m, family, False)
    wide_chain = _make_chain(m, family, True) if wide else chain
    TASKS, DIGESTS, DIGEST_SIZE = u64(SCRATCH_TASKS), u64(SCRATCH_DIGESTS), u64(DIGEST_BYTES)
    SLOT, GROUP_MASK, TASK_SIZE = u64(2 * GROUP - 1), u64(GROUP - 1), u64(TASK_BYTES)
    ZERO, ONE, LINK, CODE = u64(0), u64(1), u64(Flag.LINK << 32), u64(24)
    IS_FAST, IS_WIDE, IS_NEXT, IS_APART = u64(FAST), u64(WIDE), u64(FOLLOWS), u64(APART)

    def run(scratch: Any, position: Any) -> Any:
        digests = scratch + DIGESTS
        index = position & GROUP_MASK
        first = position - index
        flags = ZERO
        linked = load_task_u64(scratch + TASKS + (position & SLOT) * TASK_SIZE) & LINK != ZERO
        linked = linked and index != GROUP_MASK
        if linked:
            digest(scratch, position)
            barrier()
            prefetch(digests, index)
            flags = load_task_u64(digests + index * DIGEST_SIZE + CODE)
        while True:
            if flags & IS_FAST == ZERO:
                run_one(scratch + TASKS + ((first + index) & SLOT) * TASK_SIZE)
            elif not wide or flags & IS_WIDE == ZERO:  # there is no second copy for halves
                index = chain(digests, index)
            else:
                index = wide_chain(digests, index)
            flags = ZERO
            if linked:
                flags = load_task_u64(digests + (index + ONE) * DIGEST_SIZE + CODE)
            if flags & IS_NEXT == ZERO:
                return first + index
            if flags & IS_APART != ZERO:
                barrier()
            index += ONE

    return m.device(run)


def _make_run_one(m: Primitives, family: Family) -> Body:
    """`run_one(task)`: any whole task of a family, by itself."""
    u64, u32, lanes, half = m.u64, np.uint32, family.lanes, family.half
    thread_index, block_width = m.thread_index, m.block_width
    load_task_u64, load_task_u32, load_task_pair = m.load_task_u64, m.load_task_u32, m.load_task_pair
    load, store, load1, store1 = lanes.load, lanes.store, lanes.load1, lanes.store1
    pick, pick1 = make_tree(m, family.entries, lanes.count), make_tree(m, family.entries, 1)
    is_unary = make_one_of(m, family.unary)

    INPUTS, OUTPUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
    DTYPES, LOW_HALF = u64(offset("dtypes")), u64(0xFFFFFFFF)
    ZERO, FIFTEEN, SIXTEEN, F32 = u64(0), u64(15), u64(16), u64(DType.F32)
    REST, SIZE = u64(lanes.count - 1), u64(lanes.bytes)
    NOTHING = m.f32(0)
    NOTHINGS = (NOTHING,) * lanes.count

    def run_one(task: Any) -> None:
        width = block_width()
        op_id = load_task_u64(task) & LOW_HALF
        op = u32(op_id)
        x, y = load_task_pair(task + INPUTS)
        out = load_task_u64(task + OUTPUT)
        count = load_task_u64(task + COUNT)
        kind = F32
        if half:
            kind = load_task_u32(task + DTYPES) & FIFTEEN
        if is_unary(op_id):
            y = x  # loaded and not used: a branch around the load would make it wait for the first
        index = thread_index()
        if (x | y | out) & FIFTEEN == ZERO:
            i = index * SIXTEEN
            last = (count - (count & REST)) * SIZE
            while i < last:
                a, b = load(kind, x + i), load(kind, y + i)
                store(kind, out + i, pick(op, a, b, NOTHINGS, NOTHING, NOTHING))
                i += width * SIXTEEN
            index += count - (count & REST)
        while index < count:
            i = index * SIZE
            a1, b1 = load1(kind, x + i), load1(kind, y + i)
            store1(kind, out + i, pick1(op, a1, b1, NOTHING, NOTHING, NOTHING))
            index += width

    return m.device(run_one)
