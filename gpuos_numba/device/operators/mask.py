"""Masks: elements that a mask marks become a value, and the causal mask itself. Bytes are moved, no bit of
what stays changes.

A word of 8 bytes holds one to eight elements, its lanes; patterns repeat a value in all lanes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...descriptor import DTYPE_NAMES, ITEMSIZE, MASK_64, DType, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ...shapes import broadcast_shape
from ..elements import make_itemsize, make_tile_range
from ..moves import make_load_bits, make_store_bits
from ..operands import OUTPUT, make_access, make_address_of, make_kind_of
from .planning import STRIDED_IDS, TILE, both_ways, tile_count, walk, walks_of
from .table import (
    ATTENTION_IDS,
    FLOATS,
    INTS,
    Draw,
    Example,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    infer_nothing,
    pack,
    refuse_dtype,
)

Array = Any
MASKED_FILL_ID: Final = ATTENTION_IDS + 17
CAUSAL_MASK_ID: Final = ATTENTION_IDS + 18
ANY: Final = (*FLOATS, *INTS)


def make_masked_fill(m: Primitives, strided: bool) -> Body:
    u64 = m.u64
    thread_index, block_width = m.thread_index, m.block_width
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    load_u8, load_u16, load_word, load_long = m.load_u8, m.load_u16, m.load_word, m.load_long
    load_pair, store_pair = m.load_pair, m.store_pair
    address_of, kind_of, (element_of, _) = make_address_of(m), make_kind_of(m), make_access(m, strided)
    itemsize, tile_range = make_itemsize(m), make_tile_range(m)
    load_bits, store_bits = make_load_bits(m), make_store_bits(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    X, MASK, OUT = u64(0), u64(1), u64(OUTPUT)
    ZERO, ONE, TWO, FOUR, EIGHT, FIFTEEN = (u64(n) for n in (0, 1, 2, 4, 8, 15))
    SIXTEEN, HALF, B24 = u64(16), u64(32), u64(24)
    LOW, SECOND, THIRD, FOURTH = u64(1), u64(1 << 8), u64(1 << 16), u64(1 << 24)
    BYTES, BYTE, SHORT, WORD = u64(0x0101010101010101), u64(0xFF), u64(0xFFFF), u64(0xFFFFFFFF)
    OK = np.int32(0)

    def lanes(size: Any, marks: Any) -> Any:
        """Ones in the lanes of a word whose mark, a byte of 0 or 1, is set."""
        if size == TWO:
            wide = (marks & LOW) | ((marks & SECOND) << EIGHT) | ((marks & THIRD) << SIXTEEN)
            return (wide | ((marks & FOURTH) << B24)) * SHORT
        if size == FOUR:
            return ((marks & LOW) | ((marks & SECOND) << B24)) * WORD
        if size == EIGHT:
            return ZERO - (marks & LOW)
        return (marks & BYTES) * BYTE

    lanes = m.device(lanes)

    def load_marks(size: Any, address: Any) -> Any:
        """The marks of the elements in 16 bytes: those of the first word, those of the second."""
        if size == TWO:
            marks = load_long(address)
            return marks, marks >> HALF
        if size == FOUR:
            marks = load_word(address)
            return marks, marks >> SIXTEEN
        if size == EIGHT:
            marks = load_u16(address)
            return marks, marks >> EIGHT
        return load_pair(address)

    load_marks = m.device(load_marks)

    def masked_fill(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        x = address_of(task, X)
        mask = address_of(task, MASK)
        out = address_of(task, OUT)
        value = load_task_u64(task + SCALARS)
        size = itemsize(kind_of(task, X))
        count = load_task_u64(task + COUNT)
        # Tiles begin where every operand has a multiple of 16 bytes before it.
        begin, end = tile_range((count + FIFTEEN) >> FOUR, load_task_u32(task + TILES), tile)
        begin <<= FOUR
        end <<= FOUR
        if end > count:
            end = count
        index = begin + thread_index()
        width = block_width()
        if strided:
            while index < end:
                bits = value
                if load_u8(element_of(context, task, MASK, index)) == ZERO:
                    bits = load_bits(size, element_of(context, task, X, index))
                store_bits(size, element_of(context, task, OUT, index), bits)
                index += width
        else:
            at = begin * size
            done = at  # bytes before it belong to the 16-byte path
            shift = ZERO
            while ONE << shift < size:
                shift += ONE
            if (x | mask | out) & FIFTEEN == ZERO:
                done = (end * size) & ~FIFTEEN
                at += thread_index() * SIXTEEN
                while at < done:
                    marks, more = load_marks(size, mask + (at >> shift))
                    low, high = load_pair(x + at)
                    marks = lanes(size, marks)
                    more = lanes(size, more)
                    low = (low & ~marks) | (value & marks)
                    high = (high & ~more) | (value & more)
                    store_pair(out + at, low, high)
                    at += width * SIXTEEN
            index = (done >> shift) + thread_index()
            while index < end:
                bits = value
                if load_u8(mask + index) == ZERO:
                    bits = load_bits(size, x + index * size)
                store_bits(size, out + index * size, bits)
                index += width
        return OK

    return masked_fill


def make_causal_mask(m: Primitives, strided: bool) -> Body:
    u64 = m.u64
    thread_index, block_width, divide = m.thread_index, m.block_width, m.divide
    load_task_u64, load_task_u32, store_pair = m.load_task_u64, m.load_task_u32, m.store_pair
    address_of, kind_of, (element_of, _) = make_address_of(m), make_kind_of(m), make_access(m, strided)
    itemsize, tile_range = make_itemsize(m), make_tile_range(m)
    store_bits = make_store_bits(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    OUT, BOOL, TRUES = u64(OUTPUT), u64(DType.BOOL), u64(0x0101010101010101)
    ZERO, ONE, THREE, EIGHT, TWELVE, FIFTEEN, SIXTEEN = (u64(n) for n in (0, 1, 3, 8, 12, 15, 16))
    SIXTY_FOUR, SIGN, EXTEND, ONES = u64(64), u64(0x80000000), u64(0xFFFFFFFF00000000), u64(MASK_64)
    OK = np.int32(0)
    NONE = np.int64(0)

    def word(inside: Any, outside: Any, seen: Any, size: Any) -> Any:
        """A word whose first `seen` lanes are inside, as many as it has where there are more."""
        if seen <= NONE:
            return outside
        bits = u64(seen) * size << THREE
        if bits >= SIXTY_FOUR:
            return inside
        return (outside << bits) | (inside & ~(ONES << bits))

    word = m.device(word)

    def causal_mask(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        out = address_of(task, OUT)
        kind = kind_of(task, OUT)
        size = itemsize(kind)
        outside = load_task_u64(task + SCALARS)
        diagonal = load_task_u32(task + SCALARS + EIGHT)
        if diagonal & SIGN != ZERO:
            diagonal |= EXTEND
        queries = load_task_u32(task + SCALARS + TWELVE)
        length = load_task_u32(task + SCALARS + SIXTEEN)
        inside = ZERO
        if kind == BOOL:
            inside = TRUES
        vector = not strided and (out | (length * size)) & FIFTEEN == ZERO
        unit = ONE
        lanes = ONE
        if vector:
            unit = divide(SIXTEEN, size)
            lanes = unit >> ONE
        units = divide(length, unit)
        begin, end = tile_range(load_task_u64(task + COUNT) * units, load_task_u32(task + TILES), tile)
        index = begin + thread_index()
        while index < end:
            row = divide(index, units)
            key = (index - row * units) * unit
            query = row - divide(row, queries) * queries
            seen = np.int64(query + diagonal + ONE - key)
            if vector:
                low = word(inside, outside, seen, size)
                high = word(inside, outside, seen - np.int64(lanes), size)
                store_pair(out + index * SIXTEEN, low, high)
            else:
                bits = outside
                if seen > NONE:
                    bits = inside
                store_bits(size, element_of(context, task, OUT, index), bits)
            index += block_width()
        return OK

    return causal_mask


# --- plans ---


def encode(operator: str, name: str, value: float, dtype: DType) -> int:
    """A number as an element of a dtype, repeated to fill 8 bytes. Raises ArgumentError."""
    kind = DTYPE_NAMES[dtype]
    with np.errstate(over="ignore"):
        single = np.float32(value)
    fits = math.isinf(value) or not np.isinf(single)
    if dtype in INTS:
        info = None if dtype is DType.BOOL else np.iinfo(kind)
        low, high = (0, 1) if info is None else (int(info.min), int(info.max))
        fits = math.isfinite(value) and value == int(value) and low <= int(value) <= high
        bits = int(value) if fits else 0
    elif dtype is DType.F32:
        bits = int(single.view(np.uint32))
    elif dtype is DType.BF16:
        word = int(single.view(np.uint32))
        bits = word >> 16 | 0x40 if math.isnan(value) else word + 0x7FFF + (word >> 16 & 1) >> 16
        fits = fits and (math.isinf(value) or bits & 0x7FFF != 0x7F80)
    else:
        with np.errstate(over="ignore"):
            half = np.float16(value)
        bits = int(half.view(np.uint16))
        fits = fits and (math.isinf(value) or not np.isinf(half))
    if not fits:
        raise ArgumentError(f"{operator}: {name}={value!r} does not fit {kind}: give one that does")
    size = ITEMSIZE[dtype]
    (pattern,) = struct.unpack("<Q", (bits & MASK_64).to_bytes(8, "little")[:size] * (8 // size))
    return int(pattern)


def infer_masked_fill(inputs: Sequence[Operand], /, value: float) -> tuple[Result, ...]:
    x, mask = inputs
    if x.dtype not in ANY:
        raise refuse_dtype("masked_fill", "inputs[0]", x.dtype, ANY)
    if mask.dtype is not DType.BOOL:
        raise refuse_dtype("masked_fill", "inputs[1]", mask.dtype, (DType.BOOL,))
    encode("masked_fill", "value", value, x.dtype)
    return (Result(broadcast_shape(inputs, ["inputs[0]", "inputs[1]"]), x.dtype),)


def plan_masked_fill(
    inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, value: float
) -> Plan:
    count = outputs[0].elements
    walks = walks_of(inputs, outputs[0])
    return Plan(
        MASKED_FILL_ID + (STRIDED_IDS if walks else 0),
        count,
        tile_count(count, blocks),
        walks,
        pack("Q", encode("masked_fill", "value", value, inputs[0].dtype)),
    )


def plan_causal_mask(
    inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, diagonal: int, value: float
) -> Plan:
    out = outputs[0]
    wanted = (*FLOATS, DType.BOOL)
    if out.dtype not in wanted:
        raise refuse_dtype("causal_mask", "out", out.dtype, wanted)
    if len(out.shape) < 2:
        raise ArgumentError(
            f"causal_mask: out has shape {out.shape}: it needs [..., queries, keys], reshape it"
        )
    outside = 0 if out.dtype is DType.BOOL else encode("causal_mask", "value", value, out.dtype)
    *lead, queries, keys = out.shape
    if max(queries, keys) >= 1 << 31:
        raise ArgumentError(
            f"causal_mask: out has shape {out.shape}: at most {(1 << 31) - 1} queries and keys"
        )
    return Plan(
        CAUSAL_MASK_ID + (0 if out.contiguous else STRIDED_IDS),
        math.prod(lead) * queries if keys else 0,
        tile_count(out.elements, blocks),
        None if out.contiguous else (None, None, None, None, walk(out)),
        # Beyond the edges all diagonals are alike.
        pack("QiII", outside, max(-queries, min(diagonal, keys)), queries, keys),
    )


# --- the truth ---


def spec_masked_fill(x: Array, mask: Array, *, value: float) -> Array:
    return np.where(mask, np.asarray(value, x.dtype), x)


def spec_causal_mask(*, out: Array, diagonal: int = 0, value: float = -math.inf) -> Array:
    queries, keys = out.shape[-2:]
    inside = np.arange(keys) <= np.arange(queries)[:, None] + diagonal
    chosen = inside if out.dtype == np.bool_ else np.where(inside, 0.0, value)
    return np.broadcast_to(chosen, out.shape)


def _example_masked_fill(draw: Draw) -> Example:
    shape = draw.shape()
    dtype = draw.choice(ANY)
    x, mask = draw.array(draw.broadcastable(shape), dtype), draw.array(draw.broadcastable(shape), DType.BOOL)
    return [x, mask], {
        "value": draw.choice([0.0, 1.0, *([math.nan, -math.inf, -0.0, 0.1] if dtype in FLOATS else [])])
    }


def _example_causal_mask(draw: Draw) -> Example:
    shape = (*draw.shape(0, 2, 3), draw.integer(0, 20), draw.choice([0, 1, 7, 16, 33, 64]))
    out = draw.array(shape, draw.choice([*FLOATS, DType.BOOL]))
    out = out if out.flags.writeable else out.copy()
    return [], {"out": out, "diagonal": draw.integer(-25, 70), "value": draw.choice([-math.inf, -1e4])}


# --- the table ---

OPERATORS: Final = (
    Operator(
        "masked_fill",
        "mask",
        (2, 2),
        1,
        ANY,
        "value where mask else a",
        infer_masked_fill,
        plan_masked_fill,
        both_ways(MASKED_FILL_ID, "masked_fill", make_masked_fill),
        spec_masked_fill,
        parameters=(Parameter("value", "number"),),
        same_ok=(0, 1),
        tiling=f"above {TILE} elements",
        source="torch.masked_fill; the mask is bool.",
        example=_example_masked_fill,
    ),
    Operator(
        "causal_mask",
        "mask",
        (0, 0),
        1,
        (*FLOATS, DType.BOOL),
        "0 (bool: True) where key <= query + diagonal, else value (bool: False)",
        infer_nothing,
        plan_causal_mask,
        both_ways(CAUSAL_MASK_ID, "causal_mask", make_causal_mask),
        spec_causal_mask,
        parameters=(Parameter("diagonal", "int", 0), Parameter("value", "float", -math.inf)),
        updates=True,
        tiling=f"above {TILE} elements",
        source="out is [..., queries, keys]; diagonal=keys - queries lets the last query see every key.",
        example=_example_causal_mask,
    ),
)
