"""Bodies of element-wise kernels: operands arrive as addresses in the task, results leave in its output.

`plain` bodies serve contiguous f32 operands and nothing else, in as few dependent instructions as that takes.
`typed` ones serve every dtype, layout and Python numbers: eight neighbours of an operand become eight lanes
of one compute type, f32 or i64, whatever they are in memory; what is not contiguous goes one by one.

An operator is a function of one element, `function(x, y, z, p, q)`: up to three operands, two scalars. On the
CPU machine each has a body of its own. On the CUDA machine the functions of a compute type share one, and are
found by op_id through a tree of uniform branches; long ones are called instead of inlined eight times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..descriptor import IMMEDIATE, LAYOUT_BYTES, DType, Flag, Status, offset
from ..machines.base import Body, Primitives
from ..protocol import CONTEXT, field
from .elements import (
    VECTOR,
    make_element_address,
    make_itemsize,
    make_load_f32,
    make_load_f32x8,
    make_load_i64,
    make_load_i64x8,
    make_store_f32,
    make_store_f32x8,
    make_store_i64,
    make_store_i64x8,
    make_tile_range,
)

Factory = Callable[[Primitives], Body]


@dataclass(frozen=True, slots=True)
class Entry:
    """A function under its op_id."""

    op_id: int
    make: Factory
    inline: bool = True  # on the CUDA machine: eight times in the shared body, or called
    divides: bool = False  # y == 0 is an error


# --- contiguous f32 ---


def make_plain(m: Primitives, arity: int, make: Factory) -> Body:
    """The plain body of one function of 0, 1 or 2 operands; `p` is the first scalar."""
    f32, device = m.f32, m.device
    function = device(make(m))
    NOTHING = f32(0)
    load_f32x4, load_f32 = m.load_f32x4, m.load_f32

    if arity == 2:

        def four(op: Any, x: Any, y: Any, p: Any) -> Any:
            a = load_f32x4(x)
            b = load_f32x4(y)
            return (
                function(a[0], b[0], NOTHING, p, NOTHING),
                function(a[1], b[1], NOTHING, p, NOTHING),
                function(a[2], b[2], NOTHING, p, NOTHING),
                function(a[3], b[3], NOTHING, p, NOTHING),
            )

        def one(op: Any, x: Any, y: Any, p: Any) -> Any:
            return function(load_f32(x), load_f32(y), NOTHING, p, NOTHING)
    elif arity == 1:

        def four(op: Any, x: Any, y: Any, p: Any) -> Any:
            a = load_f32x4(x)
            return (
                function(a[0], NOTHING, NOTHING, p, NOTHING),
                function(a[1], NOTHING, NOTHING, p, NOTHING),
                function(a[2], NOTHING, NOTHING, p, NOTHING),
                function(a[3], NOTHING, NOTHING, p, NOTHING),
            )

        def one(op: Any, x: Any, y: Any, p: Any) -> Any:
            return function(load_f32(x), NOTHING, NOTHING, p, NOTHING)
    else:

        def four(op: Any, x: Any, y: Any, p: Any) -> Any:
            result = function(NOTHING, NOTHING, NOTHING, p, NOTHING)
            return result, result, result, result

        def one(op: Any, x: Any, y: Any, p: Any) -> Any:
            return function(NOTHING, NOTHING, NOTHING, p, NOTHING)

    return _make_plain(m, device(four), device(one))


def make_plain_shared(m: Primitives, entries: Sequence[Entry], first_binary: int) -> Body:
    """The plain body of many functions; those from `first_binary` on take two operands."""
    u64, f32, device = m.u64, m.f32, m.device
    load_f32x4, load_f32 = m.load_f32x4, m.load_f32
    pick4, pick1 = _make_tree(m, entries, 4, None), _make_tree(m, entries, 1, None)
    BINARY, NOTHING = u64(first_binary), f32(0)
    NOTHINGS = (NOTHING,) * 4

    def four(op: Any, x: Any, y: Any, p: Any) -> Any:
        a = load_f32x4(x)
        b = a
        if op >= BINARY:
            b = load_f32x4(y)
        return pick4(op, a, b, NOTHINGS, p, NOTHING)

    def one(op: Any, x: Any, y: Any, p: Any) -> Any:
        a = load_f32(x)
        b = a
        if op >= BINARY:
            b = load_f32(y)
        return pick1(op, a, b, NOTHING, p, NOTHING)

    return _make_plain(m, device(four), device(one))


def _make_plain(m: Primitives, four: Body, one: Body) -> Body:
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    store_f32, store_f32x4, bits_f32 = m.store_f32, m.store_f32x4, m.bits_f32
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    tile_range = make_tile_range(m)

    INPUTS, OUTPUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
    TILES, SCALARS = u64(offset("tiles")), u64(offset("scalars"))
    ZERO, TWO, FOUR, EIGHT, FIFTEEN = (u64(n) for n in (0, 2, 4, 8, 15))
    OK = np.int32(0)

    def plain(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        op = load_task_u32(task)
        x = load_task_u64(task + INPUTS)
        y = load_task_u64(task + INPUTS + EIGHT)
        out = load_task_u64(task + OUTPUT)
        p = bits_f32(load_task_u32(task + SCALARS))
        begin, end = tile_range(load_task_u64(task + COUNT), load_task_u32(task + TILES), tile)
        width = block_width()
        done = begin  # elements before it belong to the 16-byte path
        if (x | y | out) & FIFTEEN == ZERO:
            done = begin + (((end - begin) >> TWO) << TWO)
            vector = begin + thread_index() * FOUR
            step = width * FOUR
            while vector + step + step + step < done:
                i = vector * FOUR
                j = (vector + step) * FOUR
                k = (vector + step + step) * FOUR
                l = (vector + step + step + step) * FOUR
                a = four(op, x + i, y + i, p)
                b = four(op, x + j, y + j, p)
                c = four(op, x + k, y + k, p)
                d = four(op, x + l, y + l, p)
                store_f32x4(out + i, a[0], a[1], a[2], a[3])
                store_f32x4(out + j, b[0], b[1], b[2], b[3])
                store_f32x4(out + k, c[0], c[1], c[2], c[3])
                store_f32x4(out + l, d[0], d[1], d[2], d[3])
                vector += step * FOUR
            while vector < done:
                i = vector * FOUR
                a = four(op, x + i, y + i, p)
                store_f32x4(out + i, a[0], a[1], a[2], a[3])
                vector += step
        index = done + thread_index()
        while index < end:
            i = index * FOUR
            store_f32(out + i, one(op, x + i, y + i, p))
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
    return _make_typed(m, compute, _make_lanes(m, function, VECTOR), function, entry.divides, entry.op_id)


def make_typed_shared(m: Primitives, compute: Compute, entries: Sequence[Entry], call: Body) -> Body:
    """The typed body of many functions, by rising op_id; those that are not inlined come last.

    `call(op, x, y, z, p, q)` is any of them. Ids of functions that divide are neighbours.
    """
    dividing = [entry.op_id for entry in entries if entry.divides]
    assert dividing == list(range(dividing[0], dividing[0] + len(dividing))) if dividing else True
    return _make_typed(
        m,
        compute,
        _make_tree(m, entries, VECTOR, call),
        call,
        bool(dividing),
        dividing[0] if dividing else 0,
        dividing[-1] if dividing else 0,
    )


def make_any(m: Primitives, entries: Sequence[Entry]) -> Body:
    """`pick(op, x, y, z, p, q)` among all functions."""
    return _make_tree(m, entries, 1, None)


def _make_typed(
    m: Primitives,
    compute: Compute,
    pick8: Body,
    pick1: Body,
    divides: bool,
    first_dividing: int,
    last_dividing: int | None = None,
) -> Body:
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_u64, load_task_u64, load_task_u32 = m.load_u64, m.load_task_u64, m.load_task_u32
    tile_range, itemsize = make_tile_range(m), make_itemsize(m)
    element_address = m.external("gpuos_element_address", make_element_address)
    load, load8, store, store8 = compute.load, compute.load8, compute.store, compute.store8
    scalar, NOTHING = compute.scalar, compute.zero

    INPUTS, OUTPUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
    TILES, DTYPES, LAYOUTS_AT = u64(offset("tiles")), u64(offset("dtypes")), u64(offset("layouts"))
    LAYOUTS, LAYOUT_SIZE = u64(field(CONTEXT, "layouts")), u64(LAYOUT_BYTES)
    STRIDED, NUMBER, SLOT_MASK = u64(Flag.STRIDED), u64(IMMEDIATE), u64(0xFFFF)
    ZERO, ONE, THREE, FOUR, EIGHT = (u64(n) for n in (0, 1, 3, 4, 8))
    FIFTEEN, SIXTEEN, HALF = u64(15), u64(16), u64(32)
    LOW_HALF, FIRST = u64(0xFFFFFFFF), u64(first_dividing)
    LAST = u64(first_dividing if last_dividing is None else last_dividing)
    OK, DIVISION_BY_ZERO = np.int32(Status.OK), np.int32(Status.DIVISION_BY_ZERO)

    def typed(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        head = load_task_u64(task)
        op = head & LOW_HALF
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
        broken = False
        done = begin  # elements before it belong to the vector path
        layout_x = ZERO
        layout_y = ZERO
        layout_z = ZERO
        layout_out = ZERO
        if strided:
            slots = load_task_u64(task + LAYOUTS_AT)
            table = load_u64(context + LAYOUTS)
            layout_x = table + (slots & SLOT_MASK) * LAYOUT_SIZE
            layout_y = table + ((slots >> SIXTEEN) & SLOT_MASK) * LAYOUT_SIZE
            layout_z = table + ((slots >> HALF) & SLOT_MASK) * LAYOUT_SIZE
            layout_out = table + (load_task_u32(task + LAYOUTS_AT + EIGHT) & SLOT_MASK) * LAYOUT_SIZE
        else:
            probe = out
            if kind_x != NUMBER:
                probe |= x
            if kind_y != NUMBER:
                probe |= y
            if kind_z != NUMBER:
                probe |= z
            if probe & FIFTEEN == ZERO:
                done = begin + (((end - begin) >> THREE) << THREE)
            j = begin + thread * EIGHT
            while j < done:
                a = load8(kind_x, x + j * size_x)
                b = load8(kind_y, y + j * size_y)
                c = load8(kind_z, z + j * size_z)
                if divides:
                    if op >= FIRST and op <= LAST:
                        zero = b[0] == NOTHING or b[1] == NOTHING or b[2] == NOTHING or b[3] == NOTHING
                        zero = zero or b[4] == NOTHING or b[5] == NOTHING or b[6] == NOTHING
                        broken = broken or zero or b[7] == NOTHING
                store8(kind_out, out + j * size_out, pick8(op, a, b, c, p, q))
                j += width * EIGHT
        index = done + thread
        while index < end:
            at_x = x + index * size_x
            at_y = y + index * size_y
            at_z = z + index * size_z
            at_out = out + index * size_out
            if strided:
                if kind_x != NUMBER:
                    at_x = element_address(layout_x, x, index)
                if kind_y != NUMBER:
                    at_y = element_address(layout_y, y, index)
                if kind_z != NUMBER:
                    at_z = element_address(layout_z, z, index)
                at_out = element_address(layout_out, out, index)
            d = load(kind_x, at_x)
            e = load(kind_y, at_y)
            f = load(kind_z, at_z)
            if divides:
                if op >= FIRST and op <= LAST:
                    broken = broken or e == NOTHING
            store(kind_out, at_out, pick1(op, d, e, f, p, q))
            index += width
        if broken:
            return DIVISION_BY_ZERO
        return OK

    return typed


# --- choosing a function ---


def _make_tree(m: Primitives, entries: Sequence[Entry], lanes: int, call: Body | None) -> Body:
    """`pick(op, x, y, z, p, q)`: the function of `op` over 1, 4 or 8 lanes."""
    if call is not None and not any(entry.inline for entry in entries):
        return _make_lanes(m, call, lanes)
    if len(entries) == 1:
        return _make_lanes(m, _make_leaf(m, entries[0].make), lanes)
    middle = len(entries) // 2
    lower = _make_tree(m, entries[:middle], lanes, call)
    upper = _make_tree(m, entries[middle:], lanes, call)
    MIDDLE = m.u64(entries[middle].op_id)

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


def _make_lanes(m: Primitives, function: Body, lanes: int) -> Body:
    """`function(op, x, y, z, p, q)` over tuples of lanes."""
    if lanes == 1:
        return function
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
