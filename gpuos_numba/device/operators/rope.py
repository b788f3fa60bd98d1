"""Rotary position embedding: x [..., heads, head_dim] and a position for each token arrive, pairs of elements
leave rotated by the angle position * base^(-2 i / rotary_dim).

Angles are counted in turns, as 64-bit fixed point: the turns of position 1 times the position, modulo 2^64,
is exact at any position, where an f32 angle has lost the turn's fraction at 2^20. A block computes the
cosines and sines of some tokens into its scratch, then rotates all heads of them.

Each thread reads both elements of a pair before it writes either, so the output may be exactly x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...descriptor import MAX_INPUTS, DType, Status, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ...protocol import ARENA_BYTES
from ...shapes import aligned_strides, collapse
from ..angles import make_turn
from ..chunks import make_load_raw8, make_unpack8
from ..elements import make_itemsize, make_load_f32, make_load_i64, make_store_f32, make_store_f32x8
from ..moves import make_load_bits, make_store_bits
from ..operands import OUTPUT, make_access, make_address_of, make_kind_of
from .planning import STRIDED_IDS, both_ways, fits_vectors
from .table import (
    ATTENTION_IDS,
    FLOATS,
    INDICES,
    Draw,
    Example,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    Tolerance,
    Walk,
    pack,
    refuse_dtype,
)

Array = Any
ROPE_ID: Final = ATTENTION_IDS + 16
INTERLEAVED, TABLES, VECTORS = 1, 2, 4
PAIRS: Final = ARENA_BYTES // 8
"""Cosines and sines that a block keeps."""
SINES: Final = ARENA_BYTES // 2
"""Where in the arena the sines begin."""


def make_rope(m: Primitives, strided: bool) -> Body:
    u64, f32, f64 = m.u64, m.f32, np.float64
    thread_index, block_width, barrier, divide = m.thread_index, m.block_width, m.barrier, m.divide
    load_task_u64, load_task_u32, load_task_pair = m.load_task_u64, m.load_task_u32, m.load_task_pair
    load_scratch_f32, store_scratch_f32 = m.load_scratch_f32, m.store_scratch_f32
    store_pair, bits_f32 = m.store_pair, m.bits_f32
    address_of, kind_of, itemsize = make_address_of(m), make_kind_of(m), make_itemsize(m)
    element_of, step_of = make_access(m, strided)
    load_i64, load_element_f32, store_element_f32 = make_load_i64(m), make_load_f32(m), make_store_f32(m)
    load_raw8, unpack8, store_vector = make_load_raw8(m), make_unpack8(m), make_store_f32x8(m)
    load_bits, store_bits, turn = make_load_bits(m), make_store_bits(m), make_turn(m)

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    ZERO, ONE, THREE, FOUR, SEVEN, EIGHT = (u64(n) for n in (0, 1, 3, 4, 7, 8))
    TWELVE, SIXTEEN, TWENTY, FIFTEEN = (u64(n) for n in (12, 16, 20, 15))
    LOW, S32, TO_GROUP = u64(0xFFFF), u64(32), u64(8)
    IS_INTERLEAVED, HAS_TABLES, FITS = u64(INTERLEAVED), u64(TABLES), u64(VECTORS)
    X, POSITIONS, COS, SIN, OUT = u64(0), u64(1), u64(2), u64(3), u64(OUTPUT)
    F32, SINES_AT = u64(DType.F32), u64(SINES)
    FROM_FIXED, TURN, TO_TURNS = f64(2.0**-62), f64(1 / (2 * math.pi)), f64(2.0**64)
    NAN = f32(np.nan)
    OK, OUT_OF_RANGE = np.int32(Status.OK), np.int32(Status.INDEX_OUT_OF_RANGE)

    def load_angles8(address: Any) -> Any:
        a, b = load_task_pair(address)
        c, d = load_task_pair(address + SIXTEEN)
        return (
            bits_f32(a),
            bits_f32(a >> S32),
            bits_f32(b),
            bits_f32(b >> S32),
            bits_f32(c),
            bits_f32(c >> S32),
            bits_f32(d),
            bits_f32(d >> S32),
        )

    load_angles8 = m.device(load_angles8)

    def rotate8(a: Any, b: Any, c: Any, s: Any) -> Any:
        return (
            a[0] * c[0] - b[0] * s[0],
            a[1] * c[1] - b[1] * s[1],
            a[2] * c[2] - b[2] * s[2],
            a[3] * c[3] - b[3] * s[3],
            a[4] * c[4] - b[4] * s[4],
            a[5] * c[5] - b[5] * s[5],
            a[6] * c[6] - b[6] * s[6],
            a[7] * c[7] - b[7] * s[7],
        )

    rotate8 = m.device(rotate8)

    def negate8(s: Any) -> Any:
        return -s[0], -s[1], -s[2], -s[3], -s[4], -s[5], -s[6], -s[7]

    negate8 = m.device(negate8)

    def frequency(fixed: Any, index: Any) -> Any:
        """Turns of position 1 for a pair, in 2^-64: fixed is the ratio of neighbours."""
        ratio = f64(np.int64(fixed)) * FROM_FIXED
        turns = TURN
        while index > ZERO:
            if index & ONE != ZERO:
                turns *= ratio
            ratio *= ratio
            index >>= ONE
        return u64(np.int64(turns * TO_TURNS))

    frequency = m.device(frequency)

    def places(chunk: Any, pair_chunks: Any, half: Any, interleaved: Any) -> Any:
        """Elements at which the two vectors of a chunk begin; those behind the pairs have one."""
        if chunk < pair_chunks:
            at = chunk << THREE
            if interleaved:
                return at + at, at + at + EIGHT
            return at, half + at
        at = half + half + ((chunk - pair_chunks) << THREE)
        return at, at

    places = m.device(places)

    def compute_angles(context: Any, task: Any, arena: Any, token: Any, group: Any, half: Any) -> Any:
        """Cosines and sines of `group` tokens from `token` on, to scratch; the status."""
        first = load_task_u64(task + SCALARS)  # ratio of neighbouring frequencies, or rows of the tables
        how = load_task_u32(task + SCALARS + TWENTY)
        status = OK
        pair = thread_index()
        while pair < group * half:
            place = token
            index = pair
            if group > ONE:
                place = divide(pair, half)
                index = pair - place * half
                place += token
            position = u64(load_i64(kind_of(task, POSITIONS), element_of(context, task, POSITIONS, place)))
            if how & HAS_TABLES != ZERO:
                cosine = NAN
                sine = NAN
                if position < first:
                    at = position * half + index
                    cosine = load_element_f32(kind_of(task, COS), element_of(context, task, COS, at))
                    sine = load_element_f32(kind_of(task, SIN), element_of(context, task, SIN, at))
                else:
                    status = OUT_OF_RANGE
            else:
                cosine, sine = turn(frequency(first, index) * position)
            store_scratch_f32(arena + pair * FOUR, cosine)
            store_scratch_f32(arena + SINES_AT + pair * FOUR, sine)
            pair += block_width()
        return status

    compute_angles = m.device(compute_angles)

    def rotate_vectors(
        context: Any, task: Any, arena: Any, token: Any, group: Any, half: Any, pair_chunks: Any, chunks: Any
    ) -> Any:
        """All heads of some tokens, 16 bytes at a time; the status of their angles."""
        width = load_task_u32(task + SCALARS + EIGHT)
        heads = load_task_u32(task + SCALARS + TWELVE)
        shift = load_task_u32(task + SCALARS + SIXTEEN) >> SIXTEEN
        interleaved = load_task_u32(task + SCALARS + TWENTY) & IS_INTERLEAVED != ZERO
        kind = kind_of(task, X)
        size = itemsize(kind)
        columns = (ONE << shift) - ONE
        items = (group * heads) << shift
        item = thread_index()
        # The first loads fly while the angles are computed.
        chunk = item & columns
        a, b = places(chunk, pair_chunks, half, interleaved)
        raw_a = ZERO, ZERO, ZERO, ZERO
        raw_b = ZERO, ZERO, ZERO, ZERO
        if item < items and chunk < chunks:
            source = element_of(context, task, X, (token * heads + (item >> shift)) * width)
            raw_a = load_raw8(kind, source + a * size)
            raw_b = load_raw8(kind, source + b * size)
        status = compute_angles(context, task, arena, token, group, half)
        barrier()

        fetched = True
        while item < items:
            line = item >> shift
            chunk = item & columns
            if chunk < chunks:
                row = (token * heads + line) * width
                if not fetched:
                    a, b = places(chunk, pair_chunks, half, interleaved)
                    source = element_of(context, task, X, row)
                    raw_a = load_raw8(kind, source + a * size)
                    raw_b = load_raw8(kind, source + b * size)
                target = element_of(context, task, OUT, row)
                if chunk < pair_chunks:
                    at = chunk << THREE
                    if group > ONE:
                        at += divide(line, heads) * half
                    p = unpack8(kind, raw_a)
                    q = unpack8(kind, raw_b)
                    if interleaved:
                        p, q = (
                            (p[0], p[2], p[4], p[6], q[0], q[2], q[4], q[6]),
                            (p[1], p[3], p[5], p[7], q[1], q[3], q[5], q[7]),
                        )
                    cosines = load_angles8(arena + at * FOUR)
                    sines = load_angles8(arena + SINES_AT + at * FOUR)
                    v = rotate8(p, q, cosines, sines)
                    w = rotate8(q, p, cosines, negate8(sines))
                    if interleaved:
                        v, w = (
                            (v[0], w[0], v[1], w[1], v[2], w[2], v[3], w[3]),
                            (v[4], w[4], v[5], w[5], v[6], w[6], v[7], w[7]),
                        )
                    store_vector(kind, target + a * size, v)
                    store_vector(kind, target + b * size, w)
                else:
                    store_pair(target + a * size, raw_a[0], raw_a[1])
                    if kind == F32:
                        store_pair(target + a * size + SIXTEEN, raw_a[2], raw_a[3])
            fetched = False
            item += block_width()
        return status

    rotate_vectors = m.device(rotate_vectors)

    def rotate_elements(context: Any, task: Any, arena: Any, token: Any, group: Any, half: Any) -> Any:
        """The same, a pair at a time."""
        width = load_task_u32(task + SCALARS + EIGHT)
        heads = load_task_u32(task + SCALARS + TWELVE)
        interleaved = load_task_u32(task + SCALARS + TWENTY) & IS_INTERLEAVED != ZERO
        kind = kind_of(task, X)
        size = itemsize(kind)
        step = step_of(context, task, X, width)
        step_out = step_of(context, task, OUT, width)
        status = compute_angles(context, task, arena, token, group, half)
        barrier()
        columns = width - half  # pairs, then what is left as it is
        item = thread_index()
        while item < group * heads * columns:
            line = divide(item, columns)
            column = item - line * columns
            row = (token * heads + line) * width
            source = element_of(context, task, X, row)
            target = element_of(context, task, OUT, row)
            if column < half:
                a = column
                b = half + column
                if interleaved:
                    a = column + column
                    b = a + ONE
                at = (divide(line, heads) * half + column) * FOUR
                cosine = load_scratch_f32(arena + at)
                sine = load_scratch_f32(arena + SINES_AT + at)
                p = load_element_f32(kind, source + a * step)
                q = load_element_f32(kind, source + b * step)
                store_element_f32(kind, target + a * step_out, p * cosine - q * sine)
                store_element_f32(kind, target + b * step_out, q * cosine + p * sine)
            else:
                a = half + column
                store_bits(size, target + a * step_out, load_bits(size, source + a * step))
            item += block_width()
        return status

    rotate_elements = m.device(rotate_elements)

    def rope(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        tokens = load_task_u64(task + COUNT)
        tiles = load_task_u32(task + TILES)
        width = load_task_u32(task + SCALARS + EIGHT)
        half = load_task_u32(task + SCALARS + SIXTEEN) & LOW
        how = load_task_u32(task + SCALARS + TWENTY)
        group = how >> TO_GROUP
        vector = how & FITS != ZERO and (address_of(task, X) | address_of(task, OUT)) & FIFTEEN == ZERO
        pair_chunks = half >> THREE
        chunks = pair_chunks + ((width - half - half + SEVEN) >> THREE)
        token = ZERO
        end = tokens
        if tiles > ONE:
            mine = divide(tokens + tiles - ONE, tiles)
            token = tile * mine
            end = token + mine
            if end > tokens:
                end = tokens
        status = OK
        while token < end:
            if group > end - token:
                group = end - token
            if vector:
                found = rotate_vectors(context, task, arena, token, group, half, pair_chunks, chunks)
            else:
                found = rotate_elements(context, task, arena, token, group, half)
            if found != OK:
                status = found
            token += group
            if token < end:
                barrier()
        return status

    return rope


# --- plans ---

ALONE: Final = 16 * 1024
"""Elements up to which one block does it all: a task of one tile can be part of a run."""

TILE: Final = 4 * 1024
"""Elements of a tile otherwise."""


def infer_rope(
    inputs: Sequence[Operand | None],
    /,
    base: float,
    rotary_dim: int | None,
    interleaved: bool,
) -> tuple[Result, ...]:
    x, positions, cos, sin = (*inputs, None, None)[:4]
    assert x is not None and positions is not None
    if x.dtype not in FLOATS:
        raise refuse_dtype("rope", "inputs[0]", x.dtype, FLOATS)
    if positions.dtype not in INDICES:
        raise refuse_dtype("rope", "inputs[1]", positions.dtype, INDICES)
    if len(x.shape) < 2:
        raise ArgumentError(f"rope: x has shape {x.shape}: it needs [..., heads, head_dim], reshape it")
    if len(positions.shape) > len(x.shape) - 2:
        raise ArgumentError(
            f"rope: positions of shape {positions.shape} for x of shape {x.shape}: give one for each token, "
            f"shape {x.shape[:-2]}, or what broadcasts to it"
        )
    aligned_strides(positions, x.shape[:-2])
    if (cos is None) != (sin is None):
        raise ArgumentError("rope: cos and sin come together: give both tables or none")
    rotary = _rotary(x, cos, rotary_dim)
    if rotary % 2 or not 0 <= rotary <= x.shape[-1]:
        raise ArgumentError(
            f"rope: rotary_dim is {rotary} of a head_dim of {x.shape[-1]}: it must be even and fit into it"
        )
    if rotary > 2 * PAIRS:
        raise ArgumentError(f"rope: rotary_dim is {rotary}: at most {2 * PAIRS}")
    if cos is None or sin is None:
        if not 1 <= base < math.inf:
            raise ArgumentError(f"rope: base={base}: it must be at least 1, and finite")
    else:
        for place, table in ((2, cos), (3, sin)):
            if table.dtype not in FLOATS:
                raise refuse_dtype("rope", f"inputs[{place}]", table.dtype, FLOATS)
        if len(cos.shape) != 2 or cos.shape != sin.shape or 2 * cos.shape[1] != rotary:
            raise ArgumentError(
                f"rope: tables of shapes {cos.shape} and {sin.shape}: both must be "
                f"[positions, {rotary // 2}], half of rotary_dim"
            )
    return (Result(x.shape, x.dtype),)


def _rotary(x: Operand, cos: Operand | None, rotary_dim: int | None) -> int:
    if rotary_dim is not None:
        return rotary_dim
    if cos is not None and len(cos.shape) == 2:
        return 2 * cos.shape[1]
    return x.shape[-1]


def plan_rope(
    inputs: Sequence[Operand | None],
    outputs: Sequence[Operand],
    blocks: int,
    /,
    base: float,
    rotary_dim: int | None,
    interleaved: bool,
) -> Plan:
    x, positions, cos, sin = (*inputs, None, None)[:4]
    assert x is not None and positions is not None
    out = outputs[0]
    *lead, heads, width = x.shape
    half = _rotary(x, cos, rotary_dim) // 2
    tokens = math.prod(lead)
    if not x.elements:
        return Plan(ROPE_ID, 0)
    everyone = [each for each in (x, positions, cos, sin, out) if each is not None]
    whole = positions.shape == tuple(lead)
    walks = None
    if not (whole and all(each.contiguous for each in everyone)):
        shape, steps = collapse(
            tuple(lead),
            [x.strides[:-2], aligned_strides(positions, tuple(lead)), out.strides[:-2]],
        )
        tables = [None if t is None else Walk(t.dtype, t.shape, t.strides) for t in (cos, sin)]
        walks = (
            Walk(x.dtype, (*shape, heads, width), (*steps[0], *x.strides[-2:])),
            Walk(positions.dtype, shape, steps[1]),
            *tables,
            Walk(out.dtype, (*shape, heads, width), (*steps[2], *out.strides[-2:])),
        )
        assert len(walks) == MAX_INPUTS + 1
    chunks = -(-half // 8) + -(-(width - 2 * half) // 8)
    flags = INTERLEAVED if interleaved else 0
    if half % 8 == 0 and width % 8 == 0 and fits_vectors(x) and fits_vectors(out):
        flags |= VECTORS
    if cos is None:
        first = round(base ** (-1 / half) * 2**62) if half else 0
    else:
        first = cos.shape[0]
        flags |= TABLES
    group = PAIRS // half if half else tokens
    return Plan(
        ROPE_ID + (STRIDED_IDS if walks else 0),
        tokens,
        1 if x.elements <= ALONE else max(1, min(tokens, 4 * blocks, x.elements // TILE)),
        walks,
        pack(
            "qIIHHI",
            first,
            width,
            heads,
            half,
            (chunks - 1).bit_length(),
            flags | min(group, tokens, PAIRS) << 8,
        ),
    )


# --- the truth ---


def spec_rope(
    x: Array,
    positions: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Array:
    if cos is not None and sin is not None:
        rotary = 2 * cos.shape[1]
        c, s = cos.astype(np.float64)[positions], sin.astype(np.float64)[positions]
    else:
        rotary = x.shape[-1] if rotary_dim is None else rotary_dim
        angle = positions[..., None].astype(np.float64) * float(base) ** (
            -np.arange(0, rotary, 2) / max(rotary, 1)
        )
        c, s = np.cos(angle), np.sin(angle)
    c, s = c[..., None, :], s[..., None, :]
    result = x.astype(np.float64)
    first, second = (
        (slice(0, rotary, 2), slice(1, rotary, 2))
        if interleaved
        else (slice(0, rotary // 2), slice(rotary // 2, rotary))
    )
    a, b = result[..., first].copy(), result[..., second].copy()
    result[..., first] = a * c - b * s
    result[..., second] = b * c + a * s
    return result


def _example(draw: Draw) -> Example:
    lead = draw.shape(0, 2, 5)
    heads = draw.choice([1, 2, 3])
    width = draw.choice([2, 5, 8, 10, 16, 32, 80, 96, 128])
    x = draw.array((*lead, heads, width), draw.choice(FLOATS), "finite")
    positions = np.asarray(draw.array(lead, draw.choice(INDICES), "small"))
    if draw.integer(0, 1):
        positions = np.asarray(positions * np.asarray(draw.choice([1000, 99991, 1 << 20]), positions.dtype))
    rotary = draw.choice([width // 2 * 2, width // 4 * 2, min(width, 16)]) & ~1
    interleaved = bool(draw.integer(0, 1))
    if draw.integer(0, 3) == 0:
        dtype = draw.choice(FLOATS)
        tables = [draw.array((20, rotary // 2), dtype, "finite") for _ in range(2)]
        return [x, np.asarray(np.abs(draw.array(lead, DType.I64, "small"))), *tables], {
            "interleaved": interleaved
        }
    return [x, positions], {
        "base": draw.choice([10000.0, 500000.0, 1.0]),
        "rotary_dim": rotary,
        "interleaved": interleaved,
    }


# --- the table ---

OPERATORS: Final = (
    Operator(
        "rope",
        "rotary embedding",
        (2, 4),
        1,
        FLOATS,
        "pairs (a, b) of a head become (a cos - b sin, b cos + a sin) of position * base^(-2i / rotary_dim)",
        infer_rope,
        plan_rope,
        both_ways(ROPE_ID, "rope", make_rope),
        spec_rope,
        parameters=(
            Parameter("base", "float", 10000.0),
            Parameter("rotary_dim", "int", None),
            Parameter("interleaved", "bool", False),
        ),
        # Cosine and sine are right to 2^-23, the two products and their difference add a rounding each, of
        # elements and tables up to 6: 36 * 6 * 2^-24.
        tolerance=Tolerance(f32=2.0**-22, atol=2.0**-16),
        same_ok=(0,),
        tiling=f"above {ALONE} elements, over tokens",
        cost="Reads and writes x once.",
        source=(
            "Inputs: x [..., heads, head_dim], positions [...], and in place of base tables cos and sin "
            "[positions, rotary_dim / 2]; a position outside of them fails the task, its token is NaN. "
            "Pairs are (i, i + rotary_dim / 2) as in Llama and GPT-NeoX; interleaved: (2i, 2i + 1), GPT-J."
        ),
        example=_example,
    ),
)
