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
