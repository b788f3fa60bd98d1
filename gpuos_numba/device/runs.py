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
"""At most one or two whole vectors a thread and nothing behind them: what else the digest says holds."""
WIDE = 2
"""Two."""
MORE = 4
"""The next task of the group is linked to this one, plain, of its kind and waits for nothing."""
APART = 8
"""A thread of it touches what another thread of an earlier task of the group touches: a barrier before it."""
HELD_X, HELD_Y = 16, 32
"""The operand is the output of the task before, vector by vector. HELD_Y is also set where there is no y."""
EARLY = FAST | APART
"""Where of these two only FAST is set, operands may be loaded before the task before has ended."""


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
    LENGTH_MASK, PAIRS, TO_ROW = u64(GROUP - 1), u64(GROUP * GROUP), u64(GROUP.bit_length() - 1)
    WHICH_GROUP, ROW_MASK, ROW_IN_WARP = u64(GROUP), u64((1 << GROUP) - 1), u64(31 & ~(GROUP - 1))
    IS_FAST, IS_WIDE, HAS_MORE, IS_APART = u64(FAST), u64(WIDE), u64(MORE), u64(APART)
    X_HELD, Y_HELD, TO_OP, TO_KIND = u64(HELD_X), u64(HELD_Y), u64(8), u64(8 + OP_BITS)
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
            head, _, x, y, out, count = fetch(task)
            head_2, shape_2, x_2, y_2, out_2, count_2 = fetch(group + earlier * TASK_SIZE)
            fast = is_fast(x, y, out, count)
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
            before = both & (earlier + ONE == later) & alike & fast
            row = pair & ROW_IN_WARP
            aparts = (ballot(u64(apart)) >> row) & ROW_MASK
            held_x = (ballot(u64(before & (x == out_2))) >> row) & ROW_MASK
            held_y = (ballot(u64(before & (y == out_2))) >> row) & ROW_MASK
            follows = (
                (earlier == later + ONE)
                & (head & LINK != ZERO)
                & (head_2 & AFTER_ANY == ZERO)
                & (shape_2 >> HALF <= ONE)
                & in_family(head_2 & LOW_HALF)
            )
            more = (ballot(u64(follows)) >> row) & ROW_MASK
            if earlier == ZERO:
                op = head & LOW_HALF
                vectors = count >> TO_VECTOR
                code = (op << TO_OP) | ((load_task_u32(task + DTYPES) & FIFTEEN) << TO_KIND)
                if fast:
                    code |= IS_FAST | (vectors << HALF)
                    if vectors > block_width():
                        code |= IS_WIDE
                if more != ZERO:
                    code |= HAS_MORE
                if aparts != ZERO:
                    code |= IS_APART
                if held_x != ZERO:
                    code |= X_HELD
                if held_y != ZERO or is_unary(op):
                    code |= Y_HELD
                at = scratch + DIGESTS + later * DIGEST_SIZE
                store_u64(at, x)
                store_u64(at + EIGHT, y)
                store_u64(at + SIXTEEN, out)
                store_u64(at + SIXTEEN + EIGHT, code)
            pair += block_width()

    return m.device(digest)


def _make_run(m: Primitives, family: Family) -> Body:
    """`run(scratch, position) -> position` of one family. See `make_run_plain`."""
    u64, u32, lanes, half = m.u64, np.uint32, family.lanes, family.half
    thread_index, block_width, barrier = m.thread_index, m.block_width, m.barrier
    load_task_u64, load_task_pair = m.load_task_u64, m.load_task_pair
    load_pair, store_pair = m.load_pair, m.store_pair
    unpack, pack = lanes.unpack, lanes.pack
    pick = make_tree(m, family.entries, lanes.count)
    wide = not half  # two vectors a thread, side by side: of f32, four lanes each
    pick_two = make_tree(m, family.entries, 2 * lanes.count) if wide else pick
    digest, run_one = _make_digest(m, family, 2 if wide else 1), _make_run_one(m, family)

    TASKS, DIGESTS, DIGEST_SIZE = u64(SCRATCH_TASKS), u64(SCRATCH_DIGESTS), u64(DIGEST_BYTES)
    SLOT, GROUP_MASK, TASK_SIZE = u64(2 * GROUP - 1), u64(GROUP - 1), u64(TASK_BYTES)
    ZERO, ONE, FIFTEEN, SIXTEEN, HALF = u64(0), u64(1), u64(15), u64(16), u64(32)
    LINK, LOW_HALF, F32 = u64(Flag.LINK << 32), u64(0xFFFFFFFF), u64(DType.F32)
    NONE, TO_OP, TO_KIND, OP_MASK = u32(0), u32(8), u32(8 + OP_BITS), u32((1 << OP_BITS) - 1)
    IS_FAST, IS_WIDE, HAS_MORE, IS_APART = u32(FAST), u32(WIDE), u32(MORE), u32(APART)
    X_HELD, Y_HELD, EARLY_MASK = u32(HELD_X), u32(HELD_Y), u32(EARLY)
    NOTHING = m.f32(0)
    NOTHINGS, TWICE = (NOTHING,) * lanes.count, (NOTHING,) * (2 * lanes.count)
    NO_PAIR = (u64(0), u64(0))

    def one(op: Any, kind: Any, a: Any, b: Any) -> Any:
        return pack(kind, pick(op, unpack(kind, a), unpack(kind, b), NOTHINGS, NOTHING, NOTHING))

    def two(op: Any, kind: Any, a: Any, b: Any, a_2: Any, b_2: Any) -> Any:
        x = unpack(kind, a) + unpack(kind, a_2)
        y = unpack(kind, b) + unpack(kind, b_2)
        r = pick_two(op, x, y, TWICE, NOTHING, NOTHING)
        return pack(kind, (r[0], r[1], r[2], r[3])), pack(kind, (r[4], r[5], r[6], r[7]))

    one, two = m.device(one), m.device(two)

    def run(scratch: Any, position: Any) -> Any:
        # Flags and vectors are 32 bits wide: half the instructions of 64, and this loop is all instructions.
        thread = u32(thread_index())
        width = u32(block_width())
        mine = thread_index() * SIXTEEN
        step = block_width() * SIXTEEN
        x = y = out = ZERO
        flags = vectors = NONE
        if load_task_u64(scratch + TASKS + (position & SLOT) * TASK_SIZE) & LINK != ZERO:
            if position & GROUP_MASK != GROUP_MASK:
                digest(scratch, position)
                barrier()
                at = scratch + DIGESTS + (position & GROUP_MASK) * DIGEST_SIZE
                x, y = load_task_pair(at)
                out, code = load_task_pair(at + SIXTEEN)
                flags, vectors = u32(code & LOW_HALF), u32(code >> HALF)
        loaded = False  # a and b are this task's
        a = a_2 = b = b_2 = r = r_2 = NO_PAIR
        while True:
            next_x = next_y = next_out = ZERO
            next_flags = next_vectors = NONE
            if flags & HAS_MORE:
                at = scratch + DIGESTS + ((position + ONE) & GROUP_MASK) * DIGEST_SIZE
                next_x, next_y = load_task_pair(at)
                next_out, code = load_task_pair(at + SIXTEEN)
                next_flags, next_vectors = u32(code & LOW_HALF), u32(code >> HALF)
            next_a = next_a_2 = next_b = next_b_2 = NO_PAIR
            early = False
            if flags & IS_FAST:
                second = mine  # of a thread that has one vector, the first once more
                if u32(thread + width) < vectors:
                    second = mine + step
                if thread < vectors:
                    if not loaded:
                        if not flags & X_HELD:
                            a = load_pair(x + mine)
                        if not flags & Y_HELD:
                            b = load_pair(y + mine)
                        if wide and flags & IS_WIDE:
                            if not flags & X_HELD:
                                a_2 = load_pair(x + second)
                            if not flags & Y_HELD:
                                b_2 = load_pair(y + second)
                early = u32(next_flags & EARLY_MASK) == IS_FAST
                if early and thread < next_vectors:
                    if not next_flags & X_HELD:
                        next_a = load_pair(next_x + mine)
                    if not next_flags & Y_HELD:
                        next_b = load_pair(next_y + mine)
                    if wide and next_flags & IS_WIDE:
                        next_second = mine
                        if u32(thread + width) < next_vectors:
                            next_second = mine + step
                        if not next_flags & X_HELD:
                            next_a_2 = load_pair(next_x + next_second)
                        if not next_flags & Y_HELD:
                            next_b_2 = load_pair(next_y + next_second)
                if thread < vectors:
                    if flags & X_HELD:
                        a = r
                        a_2 = r_2
                    if flags & Y_HELD:
                        b = r
                        b_2 = r_2
                    op = u32((flags >> TO_OP) & OP_MASK)
                    kind = F32
                    if half:
                        kind = u64(flags >> TO_KIND) & FIFTEEN
                    if wide and flags & IS_WIDE:
                        r, r_2 = two(op, kind, a, b, a_2, b_2)
                        store_pair(out + mine, r[0], r[1])
                        if second != mine:
                            store_pair(out + second, r_2[0], r_2[1])
                    else:
                        r = one(op, kind, a, b)
                        store_pair(out + mine, r[0], r[1])
            else:
                run_one(scratch + TASKS + (position & SLOT) * TASK_SIZE)
            if not flags & HAS_MORE:
                return position
            if next_flags & IS_APART:
                barrier()
            position += ONE
            x, y, out, flags, vectors = next_x, next_y, next_out, next_flags, next_vectors
            a, a_2, b, b_2, loaded = next_a, next_a_2, next_b, next_b_2, early

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
