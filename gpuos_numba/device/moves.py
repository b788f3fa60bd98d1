"""Elements moved as they are: a size and two addresses arrive, bytes are copied; no bit of a NaN changes."""

from __future__ import annotations

import functools
from typing import Any

from ..machines.base import Body, Primitives


@functools.cache
def make_load_bits(m: Primitives) -> Body:
    """`load_bits(size, address)`: an element of 1, 2, 4 or 8 bytes, zero-extended."""
    u64 = m.u64
    load_u8, load_u16, load_word, load_long = m.load_u8, m.load_u16, m.load_word, m.load_long
    TWO, FOUR, EIGHT = u64(2), u64(4), u64(8)

    def load_bits(size: Any, address: Any) -> Any:
        if size == TWO:
            return load_u16(address)
        if size == FOUR:
            return load_word(address)
        if size == EIGHT:
            return load_long(address)
        return load_u8(address)

    return m.device(load_bits)


@functools.cache
def make_store_bits(m: Primitives) -> Body:
    """`store_bits(size, address, bits)`: the low `size` bytes."""
    u64 = m.u64
    store_u8, store_u16, store_word, store_long = m.store_u8, m.store_u16, m.store_word, m.store_long
    TWO, FOUR, EIGHT = u64(2), u64(4), u64(8)

    def store_bits(size: Any, address: Any, bits: Any) -> None:
        if size == TWO:
            store_u16(address, bits)
        elif size == FOUR:
            store_word(address, bits)
        elif size == EIGHT:
            store_long(address, bits)
        else:
            store_u8(address, bits)

    return m.device(store_bits)


@functools.cache
def make_load_unit(m: Primitives) -> Body:
    """`load_unit(vector, size, address)`: 16 bytes where `vector`, else an element; as two words."""
    load_pair, load_bits, ZERO = m.load_pair, make_load_bits(m), m.u64(0)

    def load_unit(vector: Any, size: Any, address: Any) -> Any:
        if vector:
            return load_pair(address)
        return load_bits(size, address), ZERO

    return m.device(load_unit)


@functools.cache
def make_store_unit(m: Primitives) -> Body:
    """`store_unit(vector, size, address, unit)`: what `load_unit` loaded."""
    store_pair, store_bits = m.store_pair, make_store_bits(m)

    def store_unit(vector: Any, size: Any, address: Any, unit: Any) -> None:
        if vector:
            store_pair(address, unit[0], unit[1])
        else:
            store_bits(size, address, unit[0])

    return m.device(store_unit)


@functools.cache
def make_move4(m: Primitives) -> Body:
    """`move4(vector, size, from 4, to 4)`: up to four units, all loads in flight before the first store.

    A source of 0 moves nothing.
    """
    u64 = m.u64
    load_unit, store_unit = make_load_unit(m), make_store_unit(m)
    ZERO = u64(0)

    def move4(
        vector: Any, size: Any, a: Any, b: Any, c: Any, d: Any, at_a: Any, at_b: Any, at_c: Any, at_d: Any
    ) -> None:
        p = ZERO, ZERO
        q = ZERO, ZERO
        r = ZERO, ZERO
        s = ZERO, ZERO
        if a != ZERO:
            p = load_unit(vector, size, a)
        if b != ZERO:
            q = load_unit(vector, size, b)
        if c != ZERO:
            r = load_unit(vector, size, c)
        if d != ZERO:
            s = load_unit(vector, size, d)
        if a != ZERO:
            store_unit(vector, size, at_a, p)
        if b != ZERO:
            store_unit(vector, size, at_b, q)
        if c != ZERO:
            store_unit(vector, size, at_c, r)
        if d != ZERO:
            store_unit(vector, size, at_d, s)

    return m.device(move4)
