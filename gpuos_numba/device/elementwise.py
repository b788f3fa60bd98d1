"""Bodies of element-wise kernels: operands arrive as addresses in the task, results leave in its output.

`plain` bodies serve contiguous operands of one float dtype, in as few dependent instructions as that takes.
`typed` ones serve every dtype, layout and Python numbers: eight elements of an operand become eight lanes of
one compute type, f32 or i64, whatever they are in memory. They are neighbours where memory allows it.

An operator is a function of one element, `function(x, y, z, p, q)`: up to three operands, two scalars. On the
CPU machine each has a body of its own. On the CUDA machine the functions of a compute type share one, and are
found by op_id through a tree of uniform branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..descriptor import IMMEDIATE, LAYOUT_BYTES, DType, Flag, Status, layout_offset, offset
from ..machines.base import Body, Primitives
from ..protocol import CONTEXT, field
from .elements import (
    VECTOR,
    make_itemsize,
    make_load_f32,
    make_load_f32x8,
    make_load_i64,
    make_load_i64x8,
    make_pack_half,
    make_store_f32,
    make_store_f32x8,
    make_store_i64,
    make_store_i64x8,
    make_tile_range,
    make_unpack_half,
)

Factory = Callable[[Primitives], Body]


@dataclass(frozen=True, slots=True)
class Entry:
    """A function under its op_id."""

    op_id: int
    make: Factory
    long: bool = False  # much code
    divides: bool = False  # y == 0 is an error
    make4: Factory | None = None  # of `function(x, y)` on four lanes, where that beats four times one


# --- contiguous operands of one float dtype ---


@dataclass(frozen=True)
class Lanes:
    """How many elements a thread moves at once, and how they come and go."""

    count: int
    bytes: int  # of one element
    load: Body  # (kind, address) -> lanes
    store: Body  # (kind, address, lanes)
    load1: Body
    store1: Body
    unpack: Body  # (kind, two words) -> lanes: what load does, of words that are here already
    pack: Body  # (kind, lanes) -> two words


def lanes_f32(m: Primitives) -> Lanes:
    load_f32x4, store_f32x4, load_f32, store_f32 = m.load_f32x4, m.store_f32x4, m.load_f32, m.store_f32
    bits_f32, f32_bits, HALF = m.bits_f32, m.f32_bits, m.u64(32)

    def load(kind: Any, address: Any) -> Any:
        return load_f32x4(address)

    def store(kind: Any, address: Any, v: Any) -> None:
        store_f32x4(address, v[0], v[1], v[2], v[3])

    def load1(kind: Any, address: Any) -> Any:
        return load_f32(address)

    def store1(kind: Any, address: Any, v: Any) -> None:
        store_f32(address, v)

    def unpack(kind: Any, pair: Any) -> Any:
        low, high = pair
        return bits_f32(low), bits_f32(low >> HALF), bits_f32(high), bits_f32(high >> HALF)

    def pack(kind: Any, v: Any) -> Any:
        return f32_bits(v[0]) | (f32_bits(v[1]) << HALF), f32_bits(v[2]) | (f32_bits(v[3]) << HALF)

    bodies = (m.device(body) for body in (load, store, load1, store1, unpack, pack))
    return Lanes(4, 4, *bodies)


def lanes_half(m: Primitives) -> Lanes:
    """f16 and bf16."""
    load, store, load1, store1 = make_load_f32x8(m), make_store_f32x8(m), make_load_f32(m), make_store_f32(m)
    return Lanes(8, 2, load, store, load1, store1, make_unpack_half(m), make_pack_half(m))


def make_plain(m: Primitives, arity: int, make: Factory, half: bool = False) -> Body:
    """The plain body of one function of one or two operands."""
    lanes = lanes_half(m) if half else lanes_f32(m)
    function = _make_leaf(m, make)
    first_binary = 0 if arity == 2 else (1 << 32) - 1
    return _make_plain(m, lanes, _make_lanes(m, function, lanes.count), function, first_binary)


def make_plain_shared(m: Primitives, entries: Sequence[Entry], first_binary: int, half: bool = False) -> Body:
    """The plain body of many functions; those from op_id `first_binary` on take two operands."""
    lanes = lanes_half(m) if half else lanes_f32(m)
    pick = make_tree(m, entries, lanes.count)
    return _make_plain(m, lanes, pick, make_tree(m, entries, 1), first_binary)


def _make_plain(m: Primitives, lanes: Lanes, pick: Body, pick1: Body, first_binary: int) -> Body:
    u64, u32 = m.u64, np.uint32  # op_ids are compared in one instruction instead of two
    thread_index, block_width = m.thread_index, m.block_width
    load_task_u64, load_task_u32, load_task_pair = m.load_task_u64, m.load_task_u32, m.load_task_pair
    load, store, load1, store1 = lanes.load, lanes.store, lanes.load1, lanes.store1
    tile_range = make_tile_range(m)

    INPUTS, OUTPUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
    DTYPES, LOW_HALF, HALF = u64(offset("dtypes")), u64(0xFFFFFFFF), u64(32)
    assert offset("op_id") == 0 and offset("tiles") == 12
    ZERO, ONE, FIFTEEN, SIXTEEN = u64(0), u64(1), u64(15), u64(16)
    LANES, REST, SIZE = u64(lanes.count), u64(lanes.count - 1), u64(lanes.bytes)
    TO_VECTOR, BINARY = u64(lanes.count.bit_length() - 1), u32(first_binary)
    NOTHING = m.f32(0)
    NOTHINGS = (NOTHING,) * lanes.count
    OK = np.int32(Status.OK)

    def vector(op: Any, kind: Any, x: Any, y: Any) -> Any:
        a = load(kind, x)
        b = load(kind, y)
        return pick(op, a, b, NOTHINGS, NOTHING, NOTHING)

    def single(op: Any, kind: Any, x: Any, y: Any) -> Any:
        return pick1(op, load1(kind, x), load1(kind, y), NOTHING, NOTHING, NOTHING)

    vector, single = m.device(vector), m.device(single)

    def plain(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        head, shape = load_task_pair(task)
        x, y = load_task_pair(task + INPUTS)
        out = load_task_u64(task + OUTPUT)
        count = load_task_u64(task + COUNT)
        kind = load_task_u32(task + DTYPES) & FIFTEEN
        op = u32(head & LOW_HALF)
        if op < BINARY:
            y = x  # loaded and not used: a branch around the load would make it wait for the first
        tiles = shape >> HALF
        thread = thread_index()
        width = block_width()
        aligned = (x | y | out) & FIFTEEN == ZERO
        if aligned and tiles <= ONE and count <= width * LANES:
            # At most one vector a thread, the common case: straight ahead.
            if thread < count >> TO_VECTOR:
                i = thread * SIXTEEN
                store(kind, out + i, vector(op, kind, x + i, y + i))
            index = count - (count & REST) + thread
        else:
            begin, end = tile_range(count, tiles, tile)
            count = end
            index = begin + thread
            if aligned:
                i = (begin + thread * LANES) * SIZE
                last = (end - ((end - begin) & REST)) * SIZE
                step = width * SIXTEEN
                while i + step < last:
                    a = vector(op, kind, x + i, y + i)
                    b = vector(op, kind, x + i + step, y + i + step)
                    store(kind, out + i, a)
                    store(kind, out + i + step, b)
                    i += step + step
                if i < last:
                    store(kind, out + i, vector(op, kind, x + i, y + i))
                index = end - ((end - begin) & REST) + thread
        while index < count:
            i = index * SIZE
            store1(kind, out + i, single(op, kind, x + i, y + i))
            index += width
        return OK

    return plain


# --- every dtype ---


@dataclass(frozen=True)
class Compute:
    """What lanes are while they are computed with, and how they come from memory and return."""

    zero: Any
    load: Body  # (kind, address or value) -> lane
    load8: Body
    store: Body  # (kind, address, lane)
    store8: Body
    scalar: Body  # (task, 0 or 1) -> one of the two scalars


@functools.cache
def compute_f32(m: Primitives) -> Compute:
    """Floats of any width, integers rounded to f32, and results that are bools."""
    u64, f32, device = m.u64, m.f32, m.device
    bits_f32, store_u8, store_long, load_task_u32 = m.bits_f32, m.store_u8, m.store_long, m.load_task_u32
    load_one, load_eight = make_load_f32(m), make_load_f32x8(m)
    store_one, store_eight = make_store_f32(m), make_store_f32x8(m)
    NUMBER, BOOL, SCALARS, FOUR = u64(IMMEDIATE), u64(DType.BOOL), u64(offset("scalars")), u64(4)
    NOTHING = f32(0)
    B1, B2, B3, B4, B5, B6, B7 = (u64(8 * byte) for byte in range(1, 8))

    def load(kind: Any, address: Any) -> Any:
        if kind == NUMBER:
            return bits_f32(address)
        return load_one(kind, address)

    def load8(kind: Any, address: Any) -> Any:
        if kind == NUMBER:
            v = bits_f32(address)
            return v, v, v, v, v, v, v, v
        return load_eight(kind, address)

    def truth(v: Any) -> Any:
        return u64(v != NOTHING)

    truth = device(truth)

    def store(kind: Any, address: Any, v: Any) -> None:
        if kind == BOOL:
            store_u8(address, truth(v))
        else:
            store_one(kind, address, v)

    def store8(kind: Any, address: Any, v: Any) -> None:
        if kind == BOOL:
            w = truth(v[0]) | (truth(v[1]) << B1) | (truth(v[2]) << B2) | (truth(v[3]) << B3)
            w |= (truth(v[4]) << B4) | (truth(v[5]) << B5) | (truth(v[6]) << B6) | (truth(v[7]) << B7)
            store_long(address, w)
        else:
            store_eight(kind, address, v)

    def scalar(task: Any, which: Any) -> Any:
        return bits_f32(load_task_u32(task + SCALARS + which * FOUR))

    return Compute(f32(0), device(load), device(load8), device(store), device(store8), device(scalar))


@functools.cache
def compute_i64(m: Primitives) -> Compute:
    """Integers and bools; results may also be stored as floats."""
    u64, f32, device = m.u64, m.f32, m.device
    load_task_u64 = m.load_task_u64
    load_one, load_eight = make_load_i64(m), make_load_i64x8(m)
    store_one, store_eight = make_store_i64(m), make_store_i64x8(m)
    store_float, store_float8 = make_store_f32(m), make_store_f32x8(m)
    NUMBER, FLOATS, SCALARS, EIGHT = u64(IMMEDIATE), u64(DType.F16), u64(offset("scalars")), u64(8)
    assert DType.F16 < DType.BF16 < DType.F32, "floats have the highest codes"

    def load(kind: Any, address: Any) -> Any:
        if kind == NUMBER:
            return np.int64(address)
        return load_one(kind, address)

    def load8(kind: Any, address: Any) -> Any:
        if kind == NUMBER:
            v = np.int64(address)
            return v, v, v, v, v, v, v, v
        return load_eight(kind, address)

    def store(kind: Any, address: Any, v: Any) -> None:
        if kind >= FLOATS:
            store_float(kind, address, f32(v))
        else:
            store_one(kind, address, v)

    def store8(kind: Any, address: Any, v: Any) -> None:
        if kind >= FLOATS:
            floats = f32(v[0]), f32(v[1]), f32(v[2]), f32(v[3]), f32(v[4]), f32(v[5]), f32(v[6]), f32(v[7])
            store_float8(kind, address, floats)
        else:
            store_eight(kind, address, v)

    def scalar(task: Any, which: Any) -> Any:
        return np.int64(load_task_u64(task + SCALARS + which * EIGHT))

    return Compute(np.int64(0), device(load), device(load8), device(store), device(store8), device(scalar))


@functools.cache
def compute_truncated(m: Primitives) -> Compute:
    """Floats that become integers: f32 lanes arrive, i64 lanes leave."""
    floats, integers = compute_f32(m), compute_i64(m)
    return Compute(floats.zero, floats.load, floats.load8, integers.store, integers.store8, integers.scalar)


def make_typed(m: Primitives, compute: Compute, entry: Entry) -> Body:
    """The typed body of one function."""
    function = _make_leaf(m, entry.make)
    return _make_typed(m, compute, _make_lanes(m, function, VECTOR), entry.divides, entry.op_id)


def make_typed_shared(m: Primitives, compute: Compute, entries: Sequence[Entry]) -> Body:
    """The typed body of many functions, by rising op_id. Ids of functions that divide are neighbours."""
    dividing = [entry.op_id for entry in entries if entry.divides]
    assert dividing == list(range(dividing[0], dividing[0] + len(dividing))) if dividing else True
    ends = (dividing[0], dividing[-1]) if dividing else (0, 0)
    return _make_typed(m, compute, make_tree(m, entries, VECTOR), bool(dividing), *ends)


def _make_offsets(m: Primitives) -> tuple[Body, Body]:
    """`offsets(layouts, narrow, index)`: where element `index` lies in x, y, z and the output, in elements.

    And the same of four indices at once, whose divisions overlap. The four layouts lie one behind another in
    scratch and walk one shape. narrow: no index needs more than 32 bits, which divide in a fifth of the time.
    """
    u64, load_task_u64, load_task_u32 = m.u64, m.load_task_u64, m.load_task_u32
    divide, divide_u32 = m.divide, m.divide_u32
    NDIM, SHAPE = u64(layout_offset("ndim")), u64(layout_offset("shape"))
    STRIDES, ZERO, ONE, EIGHT = u64(layout_offset("strides")), u64(0), u64(1), u64(8)
    Y, Z, OUT = u64(LAYOUT_BYTES), u64(2 * LAYOUT_BYTES), u64(3 * LAYOUT_BYTES)

    def step(at: Any, offset: Any, digit: Any) -> Any:
        x, y, z, out = offset
        x += digit * load_task_u64(at + STRIDES)
        y += digit * load_task_u64(at + Y + STRIDES)
        z += digit * load_task_u64(at + Z + STRIDES)
        out += digit * load_task_u64(at + OUT + STRIDES)
        return x, y, z, out

    step = m.device(step)

    def offsets(layouts: Any, narrow: Any, index: Any) -> Any:
        dim = load_task_u32(layouts + OUT + NDIM)
        offset = ZERO, ZERO, ZERO, ZERO
        while dim > ZERO:
            dim -= ONE
            at = layouts + dim * EIGHT
            extent = load_task_u64(at + OUT + SHAPE)
            rest = divide_u32(index, extent) if narrow else divide(index, extent)
            offset = step(at, offset, index - rest * extent)
            index = rest
        return offset

    def offsets4(layouts: Any, narrow: Any, i: Any, j: Any, k: Any, l: Any) -> Any:
        dim = load_task_u32(layouts + OUT + NDIM)
        at_i = ZERO, ZERO, ZERO, ZERO
        at_j = at_i
        at_k = at_i
        at_l = at_i
        while dim > ZERO:
            dim -= ONE
            at = layouts + dim * EIGHT
            extent = load_task_u64(at + OUT + SHAPE)
            if narrow:
                p = divide_u32(i, extent)
                q = divide_u32(j, extent)
                r = divide_u32(k, extent)
                s = divide_u32(l, extent)
            else:
                p = divide(i, extent)
                q = divide(j, extent)
                r = divide(k, extent)
                s = divide(l, extent)
            at_i = step(at, at_i, i - p * extent)
            at_j = step(at, at_j, j - q * extent)
            at_k = step(at, at_k, k - r * extent)
            at_l = step(at, at_l, l - s * extent)
            i = p
            j = q
            k = r
            l = s
        return at_i, at_j, at_k, at_l

    return m.device(offsets), m.device(offsets4)


def _make_typed(
    m: Primitives,
    compute: Compute,
    pick8: Body,
    divides: bool,
    first_dividing: int,
    last_dividing: int | None = None,
) -> Body:
    u64, u32 = m.u64, np.uint32
    thread_index, block_width, barrier = m.thread_index, m.block_width, m.barrier
    load_u64, load_task_u64, load_task_u32 = m.load_u64, m.load_task_u64, m.load_task_u32
    store_u64, load_long = m.store_u64, m.load_long
    tile_range, itemsize = make_tile_range(m), make_itemsize(m)
    offsets, offsets4 = _make_offsets(m)
    load, load8, store, store8 = compute.load, compute.load8, compute.store, compute.store8
    scalar, NOTHING = compute.scalar, compute.zero

    INPUTS, OUTPUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
    TILES, DTYPES, LAYOUTS_AT = u64(offset("tiles")), u64(offset("dtypes")), u64(offset("layouts"))
    LAYOUTS, LAYOUT_SIZE = u64(field(CONTEXT, "layouts")), u64(LAYOUT_BYTES)
    SHAPE, STRIDES = u64(layout_offset("shape")), u64(layout_offset("strides"))
    LAYOUT_WORDS, TWO_LAYOUTS = u64(LAYOUT_BYTES // 8), u64(2 * LAYOUT_BYTES // 8)
    THREE_LAYOUTS, FOUR_LAYOUTS = u64(3 * LAYOUT_BYTES // 8), u64(4 * LAYOUT_BYTES // 8)
    NDIM = u64(layout_offset("ndim"))
    STRIDED, NUMBER, SLOT_MASK = u64(Flag.STRIDED), u64(IMMEDIATE), u64(0xFFFF)
    ZERO, ONE, TWO, THREE, FOUR = (u64(n) for n in (0, 1, 2, 3, 4))
    SEVEN, EIGHT, FIFTEEN, SIXTEEN = (u64(n) for n in (7, 8, 15, 16))
    LOW_HALF, HALF, FIRST = u64(0xFFFFFFFF), u64(32), u32(first_dividing)
    HUGE = u64(1 << 32)
    LAST = u32(first_dividing if last_dividing is None else last_dividing)
    OK, DIVISION_BY_ZERO = np.int32(Status.OK), np.int32(Status.DIVISION_BY_ZERO)

    def lane(kind: Any, base: Any, size: Any, at: Any) -> Any:
        if kind == NUMBER:
            return load(kind, base)
        return load(kind, base + at * size)

    lane = m.device(lane)

    def four(kind: Any, base: Any, size: Any, i: Any, j: Any, k: Any, l: Any) -> Any:
        a = lane(kind, base, size, i)
        b = lane(kind, base, size, j)
        c = lane(kind, base, size, k)
        d = lane(kind, base, size, l)
        return a, b, c, d, a, b, c, d  # the other half of the lanes idles

    four = m.device(four)

    def inside(index: Any, end: Any) -> Any:
        return index if index < end else end - ONE

    inside = m.device(inside)

    def keep(kind: Any, base: Any, size: Any, at: Any, v: Any, index: Any, end: Any) -> None:
        if index < end:
            store(kind, base + at * size, v)

    keep = m.device(keep)

    def vector(kind: Any, base: Any, size: Any, at: Any, step: Any) -> Any:
        if step == ZERO:  # one element for the whole row, or a number
            v = load(kind, base + at * size)
            return v, v, v, v, v, v, v, v
        return load8(kind, base + at * size)

    vector = m.device(vector)

    def typed(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        head = load_task_u64(task)
        op = u32(head & LOW_HALF)
        x = load_task_u64(task + INPUTS)
        y = load_task_u64(task + INPUTS + EIGHT)
        z = load_task_u64(task + INPUTS + SIXTEEN)
        out = load_task_u64(task + OUTPUT)
        kinds = load_task_u32(task + DTYPES)
        kind_x = kinds & FIFTEEN
        kind_y = (kinds >> FOUR) & FIFTEEN
        kind_z = (kinds >> EIGHT) & FIFTEEN
        kind_out = (kinds >> SIXTEEN) & FIFTEEN
        p = scalar(task, ZERO)
        q = scalar(task, ONE)
        # A number has size 0: its "address" stays what it is.
        size_x = itemsize(kind_x)
        size_y = itemsize(kind_y)
        size_z = itemsize(kind_z)
        size_out = itemsize(kind_out)
        begin, end = tile_range(load_task_u64(task + COUNT), load_task_u32(task + TILES), tile)
        thread = thread_index()
        width = block_width()
        strided = (head >> HALF) & STRIDED != ZERO
        narrow = end <= HUGE
        broken = False
        # Bits that must be 0 for eight neighbours to be moved at once.
        probe = out
        step_x = size_x
        step_y = size_y
        step_z = size_z
        if strided:
            # The layouts come to the arena: every element looks at them.
            slots = load_task_u64(task + LAYOUTS_AT)
            last = load_task_u32(task + LAYOUTS_AT + EIGHT) & SLOT_MASK
            table = load_u64(context + LAYOUTS)
            word = thread
            while word < FOUR_LAYOUTS:
                source = table + (slots & SLOT_MASK) * LAYOUT_SIZE
                if word >= LAYOUT_WORDS:
                    source = table + ((slots >> SIXTEEN) & SLOT_MASK) * LAYOUT_SIZE - LAYOUT_SIZE
                if word >= TWO_LAYOUTS:
                    source = table + ((slots >> HALF) & SLOT_MASK) * LAYOUT_SIZE - LAYOUT_SIZE - LAYOUT_SIZE
                if word >= THREE_LAYOUTS:
                    source = table + last * LAYOUT_SIZE - LAYOUT_SIZE - LAYOUT_SIZE - LAYOUT_SIZE
                store_u64(arena + word * EIGHT, load_long(source + word * EIGHT))
                word += width
            barrier()
            layout_y = arena + LAYOUT_SIZE
            layout_z = layout_y + LAYOUT_SIZE
            layout_out = layout_z + LAYOUT_SIZE
            dims = load_task_u32(layout_out + NDIM)
            inner = layout_out
            if dims > ZERO:
                # Whole rows of neighbours: multiples of eight, each operand stands still or steps by one.
                inner = dims - ONE
                probe |= (load_task_u64(layout_out + SHAPE + inner * EIGHT) & SEVEN) << ONE
                if load_task_u64(layout_out + STRIDES + inner * EIGHT) != ONE:
                    probe |= ONE
                if kind_x != NUMBER:
                    step_x = load_task_u64(arena + STRIDES + inner * EIGHT)
                if kind_y != NUMBER:
                    step_y = load_task_u64(layout_y + STRIDES + inner * EIGHT)
                if kind_z != NUMBER:
                    step_z = load_task_u64(layout_z + STRIDES + inner * EIGHT)
                if step_x > ONE or step_y > ONE or step_z > ONE:
                    probe |= ONE
                dim = ZERO
                while dim < inner:
                    stride = STRIDES + dim * EIGHT
                    probe |= load_task_u64(layout_out + stride) * size_out
                    if step_x != ZERO:
                        probe |= load_task_u64(arena + stride) * size_x
                    if step_y != ZERO:
                        probe |= load_task_u64(layout_y + stride) * size_y
                    if step_z != ZERO:
                        probe |= load_task_u64(layout_z + stride) * size_z
                    dim += ONE
        if step_x != ZERO:
            probe |= x
        if step_y != ZERO:
            probe |= y
        if step_z != ZERO:
            probe |= z
        done = begin  # elements before it are moved eight at a time
        if probe & FIFTEEN == ZERO:
            done = begin + (((end - begin) >> THREE) << THREE)
        # A thread's elements: eight neighbours up to `done`, then four, one every width.
        j = begin + thread * EIGHT
        if j >= done:
            j = done + thread
        at = begin, begin, begin, begin
        at_0 = at_1 = at_2 = at_3 = at
        while j < end:
            if j < done:
                at = j, j, j, j
                if strided:
                    at = offsets(arena, narrow, j)
                a = vector(kind_x, x, size_x, at[0], step_x)
                b = vector(kind_y, y, size_y, at[1], step_y)
                c = vector(kind_z, z, size_z, at[2], step_z)
            else:
                # Where each of four elements lies; those behind the end are the last one, and are not kept.
                i_0 = j
                i_1 = inside(j + width, end)
                i_2 = inside(j + width * TWO, end)
                i_3 = inside(j + width * THREE, end)
                if strided:
                    at_0, at_1, at_2, at_3 = offsets4(arena, narrow, i_0, i_1, i_2, i_3)
                else:
                    at_0 = i_0, i_0, i_0, i_0
                    at_1 = i_1, i_1, i_1, i_1
                    at_2 = i_2, i_2, i_2, i_2
                    at_3 = i_3, i_3, i_3, i_3
                a = four(kind_x, x, size_x, at_0[0], at_1[0], at_2[0], at_3[0])
                b = four(kind_y, y, size_y, at_0[1], at_1[1], at_2[1], at_3[1])
                c = four(kind_z, z, size_z, at_0[2], at_1[2], at_2[2], at_3[2])
            if divides:
                if op >= FIRST and op <= LAST:
                    zero = b[0] == NOTHING or b[1] == NOTHING or b[2] == NOTHING or b[3] == NOTHING
                    zero = zero or b[4] == NOTHING or b[5] == NOTHING or b[6] == NOTHING
                    broken = broken or zero or b[7] == NOTHING
            r = pick8(op, a, b, c, p, q)
            if j < done:
                store8(kind_out, out + at[3] * size_out, r)
                j += width * EIGHT
                if j >= done:
                    j = done + thread
            else:
                keep(kind_out, out, size_out, at_0[3], r[0], j, end)
                keep(kind_out, out, size_out, at_1[3], r[1], j + width, end)
                keep(kind_out, out, size_out, at_2[3], r[2], j + width * TWO, end)
                keep(kind_out, out, size_out, at_3[3], r[3], j + width * THREE, end)
                j += width * FOUR
        if broken:
            return DIVISION_BY_ZERO
        return OK

    return typed


# --- choosing a function ---


def make_tree(m: Primitives, entries: Sequence[Entry], lanes: int) -> Body:
    """`pick(op, x, y, z, p, q)`: the function of `op` over 1, 4 or 8 lanes."""
    if len(entries) == 1:
        return _make_lanes(m, _make_leaf(m, entries[0].make), lanes, entries[0].make4)
    middle = len(entries) // 2
    lower, upper = make_tree(m, entries[:middle], lanes), make_tree(m, entries[middle:], lanes)
    MIDDLE = np.uint32(entries[middle].op_id)

    def pick(op: Any, x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        if op < MIDDLE:
            return lower(op, x, y, z, p, q)
        return upper(op, x, y, z, p, q)

    return m.device(pick)


def _make_leaf(m: Primitives, make: Factory) -> Body:
    function = m.device(make(m))

    def leaf(op: Any, x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return function(x, y, z, p, q)

    return m.device(leaf)


def _make_lanes(m: Primitives, function: Body, lanes: int, make4: Factory | None = None) -> Body:
    """`function(op, x, y, z, p, q)` over tuples of lanes."""
    if lanes == 1:
        return function
    if make4 is not None:
        return _make_fours(m, m.device(make4(m)), lanes)
    if lanes == 4:

        def each4(op: Any, x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
            return (
                function(op, x[0], y[0], z[0], p, q),
                function(op, x[1], y[1], z[1], p, q),
                function(op, x[2], y[2], z[2], p, q),
                function(op, x[3], y[3], z[3], p, q),
            )

        return m.device(each4)

    def each8(op: Any, x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return (
            function(op, x[0], y[0], z[0], p, q),
            function(op, x[1], y[1], z[1], p, q),
            function(op, x[2], y[2], z[2], p, q),
            function(op, x[3], y[3], z[3], p, q),
            function(op, x[4], y[4], z[4], p, q),
            function(op, x[5], y[5], z[5], p, q),
            function(op, x[6], y[6], z[6], p, q),
            function(op, x[7], y[7], z[7], p, q),
        )

    return m.device(each8)


def _make_fours(m: Primitives, four: Body, lanes: int) -> Body:
    """The same of a function of four lanes of two operands."""

    def each4(op: Any, x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return four(x, y)

    def each8(op: Any, x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        low = four((x[0], x[1], x[2], x[3]), (y[0], y[1], y[2], y[3]))
        high = four((x[4], x[5], x[6], x[7]), (y[4], y[5], y[6], y[7]))
        return low + high

    return m.device(each4 if lanes == 4 else each8)
