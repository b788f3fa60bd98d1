"""Operands of a task by place, read from the task when they are needed: a register that is not held is free.

Places are those of the task's layouts: inputs 0 to 3, outputs 4 and 5. A row is `length` elements of an
operand, the first of which is element `index` in the order of its layout.
"""

from __future__ import annotations

import functools
from typing import Any

from ..descriptor import LAYOUT_BYTES, MAX_INPUTS, MAX_OUTPUTS, Flag, layout_offset, offset
from ..machines.base import Body, Primitives
from ..protocol import CONTEXT, field
from .elements import make_element_address, make_itemsize

OUTPUT = MAX_INPUTS
PLACES = MAX_INPUTS + MAX_OUTPUTS
assert offset("outputs") == offset("inputs") + 8 * MAX_INPUTS


@functools.cache
def make_address_of(m: Primitives) -> Body:
    """`address_of(task, place)`: where the operand begins, 0 where it was left out."""
    u64, load_u64 = m.u64, m.load_u64
    INPUTS, THREE = u64(offset("inputs")), u64(3)

    def address_of(task: Any, place: Any) -> Any:
        return load_u64(task + INPUTS + (place << THREE))

    return m.device(address_of)


@functools.cache
def make_kind_of(m: Primitives) -> Body:
    """`kind_of(task, place)`: DType code of the operand."""
    u64, load_u32 = m.u64, m.load_u32
    DTYPES, TWO, FIFTEEN = u64(offset("dtypes")), u64(2), u64(15)

    def kind_of(task: Any, place: Any) -> Any:
        return (load_u32(task + DTYPES) >> (place << TWO)) & FIFTEEN

    return m.device(kind_of)


@functools.cache
def make_layout_of(m: Primitives) -> Body:
    """`layout_of(context, task, place)`: address of the operand's layout. Of a strided task only."""
    u64, load_u64, load_u32 = m.u64, m.load_u64, m.load_u32
    SLOTS, LAYOUTS, SIZE = u64(offset("layouts")), u64(field(CONTEXT, "layouts")), u64(LAYOUT_BYTES)
    ONE, TWO, FOUR, SLOT_MASK = u64(1), u64(2), u64(4), u64(0xFFFF)

    def layout_of(context: Any, task: Any, place: Any) -> Any:
        pair = load_u32(task + SLOTS + ((place >> ONE) << TWO))
        slot = (pair >> ((place & ONE) << FOUR)) & SLOT_MASK
        return load_u64(context + LAYOUTS) + slot * SIZE

    return m.device(layout_of)


@functools.cache
def make_is_strided(m: Primitives) -> Body:
    """`is_strided(task)`: whether operands are walked by layouts."""
    u64, load_u64 = m.u64, m.load_u64
    STRIDED, HALF, ZERO = u64(Flag.STRIDED), u64(32), u64(0)

    def is_strided(task: Any) -> Any:
        return (load_u64(task) >> HALF) & STRIDED != ZERO

    return m.device(is_strided)


@functools.cache
def make_element_of(m: Primitives) -> Body:
    """`element_of(context, task, place, index)`: address of an element."""
    address_of, kind_of, layout_of = make_address_of(m), make_kind_of(m), make_layout_of(m)
    is_strided, itemsize = make_is_strided(m), make_itemsize(m)
    element_address = make_element_address(m)

    def element_of(context: Any, task: Any, place: Any, index: Any) -> Any:
        if is_strided(task):
            return element_address(layout_of(context, task, place), address_of(task, place), index)
        return address_of(task, place) + index * itemsize(kind_of(task, place))

    return m.device(element_of)


@functools.cache
def make_step_of(m: Primitives) -> Body:
    """`step_of(context, task, place, length)`: bytes from one element of a row to the next, where even."""
    u64, load_u64, load_u32 = m.u64, m.load_u64, m.load_u32
    kind_of, layout_of, is_strided = make_kind_of(m), make_layout_of(m), make_is_strided(m)
    itemsize = make_itemsize(m)
    NDIM, STRIDES, ONE, EIGHT = u64(layout_offset("ndim")), u64(layout_offset("strides")), u64(1), u64(8)

    def step_of(context: Any, task: Any, place: Any, length: Any) -> Any:
        step = itemsize(kind_of(task, place))
        if length > ONE and is_strided(task):
            layout = layout_of(context, task, place)
            step *= load_u64(layout + STRIDES + (load_u32(layout + NDIM) - ONE) * EIGHT)
        return step

    return m.device(step_of)


@functools.cache
def make_rows_fit(m: Primitives) -> Body:
    """`rows_fit(context, task, index, length, even)`: whether 16-byte accesses serve all operands' row."""
    u64 = m.u64
    address_of, kind_of, itemsize = make_address_of(m), make_kind_of(m), make_itemsize(m)
    element_of, step_of = make_element_of(m), make_step_of(m)
    ZERO, ONE, SEVEN, FIFTEEN, ALL = u64(0), u64(1), u64(7), u64(15), u64(PLACES)

    def rows_fit(context: Any, task: Any, index: Any, length: Any, even: Any) -> Any:
        ragged = length & SEVEN
        place = ZERO
        while even and place < ALL:
            if address_of(task, place) != ZERO:
                ragged |= element_of(context, task, place, index) & FIFTEEN
                ragged |= step_of(context, task, place, length) ^ itemsize(kind_of(task, place))
            place += ONE
        return even and ragged == ZERO

    return m.device(rows_fit)


@functools.cache
def make_place(m: Primitives) -> Body:
    """`place_of(context, task, place, even, row, step, index, j)`: address of element j of a row."""
    element_of = make_element_of(m)

    def place_of(
        context: Any, task: Any, place: Any, even: Any, row: Any, step: Any, index: Any, j: Any
    ) -> Any:
        if even:
            return row + j * step
        return element_of(context, task, place, index + j)

    return m.device(place_of)


@functools.cache
def make_access(m: Primitives, strided: bool) -> tuple[Body, Body]:
    """`element_of` and `step_of` of a body that is compiled for strided tasks alone, or for others alone.

    A body that never calls saves no registers when it is called itself: a small task can be much faster.
    """
    if strided:
        return make_element_of(m), make_step_of(m)
    address_of, kind_of, itemsize = make_address_of(m), make_kind_of(m), make_itemsize(m)

    def element_of(context: Any, task: Any, place: Any, index: Any) -> Any:
        return address_of(task, place) + index * itemsize(kind_of(task, place))

    def step_of(context: Any, task: Any, place: Any, length: Any) -> Any:
        return itemsize(kind_of(task, place))

    return m.device(element_of), m.device(step_of)
