"""Attention: scaled dot product attention over whole keys and values, and over a paged cache.

Plans, specs and the table; `attend` is the body. Query head h uses kv head h // (query heads / kv heads).
A query with no key to attend to, whatever hides them all, gets exactly 0. What hides a key hides its NaN and
infinities too, of key and value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...descriptor import DTYPE_NAMES, ITEMSIZE, DType
from ...errors import ArgumentError, DTypeError
from ...shapes import Shape, Strides
from .attend import make_attention, make_attention_many, make_attention_single
from .attend_parts import (
    BUNDLE,
    CHUNK_BITS,
    GROUP_BITS,
    LARGEST_DIM,
    LOWER_RIGHT,
    MANY,
    NOT_CAUSAL,
    PAGED,
    SDPA,
    UPPER_LEFT,
    pack_small,
    record_bytes,
)
from .table import (
    ATTENTION_IDS,
    FLOATS,
    INDICES,
    Draw,
    Example,
    Kernel,
    Operand,
    Operator,
    Parameter,
    Plan,
    Result,
    Shared,
    Tolerance,
    Walk,
    pack,
    refuse_dtype,
)

Array = Any
CAUSAL: Final = {"none": NOT_CAUSAL, "upper_left": UPPER_LEFT, "lower_right": LOWER_RIGHT}
LARGEST: Final = (1 << 31) - 1
"""Of keys, queries, and all rows together: the body divides in 32 bits."""

# --- plans ---

SPLIT: Final = 256 * 1024
"""Bytes of keys and values of one head above which blocks share them: less is read in the time of a merge."""

PIECE: Final = 128 * 1024
"""Bytes of keys and values that a chunk has at least."""

ALONE: Final = 64 * 1024
"""Bytes up to which few units stay in one block: a task of one tile can be part of a run."""


def _divided(pairs: int, rows: int, keys: int, key_bytes: int, blocks: int) -> tuple[int, int]:
    """(chunks of the keys, tiles)"""
    bundles = pairs * -(-rows // BUNDLE)
    size = keys * key_bytes
    chunks = 1
    if size > SPLIT and bundles:
        chunks = max(1, min(blocks // bundles, -(-size // PIECE), 1 << CHUNK_BITS))
    units = bundles * chunks
    if units <= BUNDLE and units * size <= ALONE:
        return chunks, 1
    return chunks, max(1, min(units, 4 * blocks))


def _steps(operand: Operand, shape: Shape) -> Strides:
    """The strides over a shape that the operand has but for leading dims; 0 along dims of one element."""
    strides = (0,) * (len(shape) - len(operand.strides)) + operand.strides
    return tuple(
        stride if extent > 1 else 0
        for stride, extent in zip(
            strides, (1,) * (len(shape) - len(operand.shape)) + operand.shape, strict=True
        )
    )


def _walk(operand: Operand, shape: Shape) -> Walk:
    return Walk(operand.dtype, shape, _steps(operand, shape))


def _refuse(name: str, what: str) -> ArgumentError:
    return ArgumentError(f"{name}: {what}")


def _check_heads(name: str, heads: int, kv_heads: int) -> None:
    if kv_heads == 0 and heads:
        raise _refuse(name, f"{heads} query heads and no kv head: give k and v at least one head")
    if kv_heads and heads % kv_heads:
        raise _refuse(
            name,
            f"{heads} query heads are not a multiple of {kv_heads} kv heads: each kv head serves as many",
        )
    if kv_heads and heads // kv_heads > 1 << GROUP_BITS:
        raise _refuse(name, f"{heads // kv_heads} query heads share a kv head: at most {1 << GROUP_BITS} may")


def _check_dim(name: str, dim: int) -> None:
    if dim > LARGEST_DIM:
        raise _refuse(name, f"heads of {dim} elements: at most {LARGEST_DIM}, split larger ones")


def _check_rows(name: str, rows: int) -> None:
    if rows > LARGEST:
        raise _refuse(name, f"{rows} queries of all heads: at most {LARGEST} at once")


def _check_dtypes(name: str, operands: Sequence[Operand], names: Sequence[str]) -> None:
    dtype = operands[0].dtype
    if dtype not in FLOATS:
        raise refuse_dtype(name, names[0], dtype, FLOATS)
    for operand, each in zip(operands, names, strict=True):
        if operand.dtype != dtype:
            raise DTypeError(
                f"{name}: {each} has dtype {DTYPE_NAMES[operand.dtype]}, {names[0]} {DTYPE_NAMES[dtype]}: "
                f"convert one of them"
            )


def _scale(scale: float | None, dim: int) -> float:
    return scale if scale is not None else 1 / math.sqrt(max(dim, 1))


class _Sizes:
    """What the shapes of a call of sdpa say."""

    def __init__(self, inputs: Sequence[Operand | None], causal: str, window: int) -> None:
        q, k, v = inputs[:3]
        assert q is not None and k is not None and v is not None
        mask = inputs[3] if len(inputs) > 3 else None
        dims = len(q.shape)
        if dims not in (3, 4) or len(k.shape) != dims or len(v.shape) != dims:
            raise _refuse(
                "sdpa",
                f"q, k, v have shapes {q.shape}, {k.shape}, {v.shape}: give all as [B, H, T, D], "
                "or all as [H, T, D]",
            )
        if k.shape != v.shape:
            raise _refuse("sdpa", f"k has shape {k.shape}, v {v.shape}: they must be equal")
        if q.shape[-1] != k.shape[-1]:
            raise _refuse("sdpa", f"q has heads of {q.shape[-1]} elements, k of {k.shape[-1]}")
        if dims == 4 and q.shape[0] != k.shape[0]:
            raise _refuse("sdpa", f"q has a batch of {q.shape[0]}, k of {k.shape[0]}: expand one of them")
        self.batch = q.shape[0] if dims == 4 else 1
        self.heads, self.queries, self.dim = q.shape[-3:]
        self.kv_heads, self.keys = k.shape[-3:-1]
        _check_heads("sdpa", self.heads, self.kv_heads)
        _check_dim("sdpa", self.dim)
        _check_dtypes("sdpa", (q, k, v), ("q", "k", "v"))
        if max(self.queries, self.keys, self.kv_heads) > LARGEST:
            raise _refuse("sdpa", f"q {q.shape}, k {k.shape}: no dim may exceed {LARGEST}")
        if window < 0:
            raise _refuse("sdpa", f"window={window}: give the number of keys seen, or 0 for all")
        if window and causal == "none":
            raise _refuse(
                "sdpa", 'window= needs causal="upper_left" or "lower_right", which say where it ends'
            )
        _check_rows("sdpa", self.batch * self.heads * self.queries)
        self.window = min(window, LARGEST)
        if mask is not None:
            if mask.dtype not in (DType.BOOL, q.dtype, DType.F32):
                raise refuse_dtype("sdpa", "mask", mask.dtype, list({DType.BOOL, q.dtype, DType.F32}))
            wanted = (*q.shape[:-1], self.keys)
            aligned = zip(reversed(mask.shape), reversed(wanted), strict=False)
            if len(mask.shape) > len(wanted) or any(own not in (1, extent) for own, extent in aligned):
                raise _refuse("sdpa", f"mask has shape {mask.shape}, which does not broadcast to {wanted}")


def _infer_sdpa(
    inputs: Sequence[Operand | None], /, scale: float | None, causal: str, window: int
) -> tuple[Result, ...]:
    _Sizes(inputs, causal, window)
    assert inputs[0] is not None
    return (Result(inputs[0].shape, inputs[0].dtype),)


def _plan_sdpa(
    inputs: Sequence[Operand | None],
    outputs: Sequence[Operand],
    blocks: int,
    /,
    scale: float | None,
    causal: str,
    window: int,
) -> Plan:
    s = _Sizes(inputs, causal, window)
    q, k, v = inputs[:3]
    assert q is not None and k is not None and v is not None
    mask, out = inputs[3] if len(inputs) > 3 else None, outputs[0]
    if out.elements == 0:
        return Plan(ATTENTION_IDS + SDPA, 0)
    group = s.heads // s.kv_heads
    rows, pairs = s.queries * group, s.batch * s.kv_heads
    keys = s.keys
    if causal == "upper_left":
        keys = min(keys, s.queries)
    if s.window:
        keys = min(keys, s.window + s.queries - 1)
    chunks, tiles = _divided(pairs, rows, keys, 2 * s.dim * ITEMSIZE[q.dtype], blocks)
    walks = None
    if mask is not None or not (q.contiguous and k.contiguous and v.contiguous and out.contiguous):
        of_queries = (s.batch, s.heads, s.queries, s.dim)
        of_keys = (s.batch, s.kv_heads, s.keys, s.dim)
        walks = (
            _walk(q, of_queries),
            _walk(k, of_keys),
            _walk(v, of_keys),
            None if mask is None else _walk(mask, (s.batch, s.heads, s.queries, s.keys)),
            _walk(out, of_queries),
        )
    return Plan(
        ATTENTION_IDS + SDPA + (MANY if rows > 1 else 0),
        pairs,
        tiles,
        walks,
        pack(
            "fIIIII",
            _scale(scale, s.dim),
            pack_small(s.dim, CAUSAL[causal], chunks, group),
            s.keys,
            s.queries,
            s.kv_heads,
            s.window,
        ),
        merge=chunks > 1,
        workspace=pairs * rows * chunks * record_bytes(s.dim) if chunks > 1 else 0,
    )


def _infer_paged(inputs: Sequence[Operand], /, scale: float | None) -> tuple[Result, ...]:
    name = "paged_attention"
    q, k, v, tables, lengths = inputs
    if len(q.shape) != 3 or len(k.shape) != 4 or k.shape != v.shape:
        raise _refuse(
            name,
            f"q, k_cache, v_cache have shapes {q.shape}, {k.shape}, {v.shape}: give [sequences, heads, D] "
            "and two caches [blocks, block_size, kv heads, D]",
        )
    sequences, heads, dim = q.shape
    if k.shape[3] != dim:
        raise _refuse(name, f"q has heads of {dim} elements, the caches of {k.shape[3]}")
    _check_heads(name, heads, k.shape[2])
    _check_dim(name, dim)
    _check_dtypes(name, (q, k, v), ("q", "k_cache", "v_cache"))
    for operand, each in ((tables, "block_tables"), (lengths, "context_lens")):
        if operand.dtype not in INDICES:
            raise refuse_dtype(name, each, operand.dtype, INDICES)
    if len(tables.shape) != 2 or tables.shape[0] != sequences:
        raise _refuse(
            name,
            f"block_tables has shape {tables.shape}: give [sequences, max_blocks], {sequences} sequences",
        )
    if lengths.shape != (sequences,):
        raise _refuse(name, f"context_lens has shape {lengths.shape}: give one for each of {sequences}")
    _check_rows(name, sequences * heads)
    if k.shape[1] * tables.shape[1] > LARGEST:
        raise _refuse(
            name, f"{tables.shape[1]} blocks of {k.shape[1]} keys a sequence: at most {LARGEST} keys in all"
        )
    return (Result(q.shape, q.dtype),)


def _plan_paged(
    inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /, scale: float | None
) -> Plan:
    q, k, v, tables, lengths = inputs
    out = outputs[0]
    if out.elements == 0:
        return Plan(ATTENTION_IDS + PAGED, 0)
    (sequences, heads, dim), (page, kv_heads) = q.shape, k.shape[1:3]
    group, pairs = heads // kv_heads, sequences * kv_heads
    keys = page * tables.shape[1]  # at most: how many there are is known on the device alone
    chunks, tiles = _divided(pairs, group, keys, 2 * dim * ITEMSIZE[q.dtype], blocks)

    def queries(operand: Operand) -> Walk:
        steps = _steps(operand, operand.shape)
        return Walk(operand.dtype, (sequences, heads, 1, dim), (*steps[:2], 0, steps[2]))

    walks = (
        queries(q),
        _walk(k, k.shape),
        _walk(v, v.shape),
        _walk(tables, tables.shape),
        queries(out),
        _walk(lengths, lengths.shape),
    )
    return Plan(
        ATTENTION_IDS + PAGED + (MANY if group > 1 else 0),
        pairs,
        tiles,
        walks,
        pack("fIII", _scale(scale, dim), pack_small(dim, NOT_CAUSAL, chunks, group), page, tables.shape[1]),
        merge=chunks > 1,
        workspace=pairs * group * chunks * record_bytes(dim) if chunks > 1 else 0,
    )


# --- the truth ---


def _attend(q: Array, k: Array, v: Array, seen: Array, bias: Array, scale: float) -> Array:
    """[..., Q, D] x [..., T, D]; `seen` and `bias` are [..., Q, T]."""
    scores = np.einsum("...qd,...td->...qt", q * scale, k) + bias
    scores = np.where(seen & (bias != -np.inf), scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    weights = np.where(total == 0, 0, weights / np.where(total == 0, 1, total))
    # A weight of 0 takes nothing, also from NaN and infinity; there a plain product would not do.
    out = np.einsum("...qt,...td->...qd", weights, np.where(np.isfinite(v), v, 0))
    strange = np.where(np.isfinite(v), 0, v)
    if strange.any():
        taken = weights[..., None] * strange[..., None, :, :]
        out = out + np.where(weights[..., None] == 0, 0, taken).sum(axis=-2)
    return out


def spec_sdpa(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    scale: float | None = None,
    causal: str = "none",
    window: int = 0,
) -> Array:
    q, k, v = (each.astype(np.float64) for each in (q, k, v))
    heads, queries, dim = q.shape[-3:]
    kv_heads, keys = k.shape[-3:-1]
    if q.size == 0:
        return np.zeros(q.shape)
    k, v = (np.repeat(each, heads // kv_heads, axis=-3) for each in (k, v))
    key = np.arange(keys)
    last = np.arange(queries)[:, None] + (keys - queries if causal == "lower_right" else 0)
    seen = np.ones((queries, keys), bool)
    if causal != "none":
        seen = key <= last
        if window:
            seen = seen & (key > last - window)
    shape = (*q.shape[:-1], keys)
    bias = np.zeros(shape)
    if mask is not None and mask.dtype == bool:
        seen = seen & mask
    elif mask is not None:
        bias = bias + mask.astype(np.float64)
    return _attend(q, k, v, np.broadcast_to(seen, shape), bias, _scale(scale, dim))


def spec_paged(
    q: Array, k: Array, v: Array, tables: Array, lengths: Array, scale: float | None = None
) -> Array:
    """A loop over sequences: their keys are gathered page by page."""
    out = np.zeros(q.shape)
    page = k.shape[1]
    for s, length in enumerate(lengths.tolist()):
        used = tables[s, : -(-length // page) if page else 0]
        keys, values = (
            c[used].reshape(-1, *c.shape[2:])[:length].swapaxes(0, 1) for c in (k, v)
        )  # [kv heads, length, D]
        out[s] = spec_sdpa(q[s][:, None], keys, values, scale=scale)[:, 0]
    return out


# --- the table ---


def _example_sdpa(draw: Draw) -> Example:
    group, kv_heads = draw.choice([1, 1, 2, 3, 4, 5]), draw.integer(1, 3)
    queries, keys = (
        draw.choice([1, 1, 2, draw.integer(0, 9)]),
        draw.choice([0, 1, draw.integer(2, 90), 8, 64]),
    )
    dim = draw.choice([1, 8, 16, 64, 80, 96, 128, 256, draw.integer(1, 70)])
    batch = () if draw.integer(0, 2) == 0 else (draw.integer(0, 3),)
    dtype = draw.choice(FLOATS)
    q = draw.array((*batch, kv_heads * group, queries, dim), dtype, "finite")
    k = draw.array((*batch, kv_heads, keys, dim), dtype, "finite")
    v = draw.array((*batch, kv_heads, keys, dim), dtype, "finite")
    causal = draw.choice(list(CAUSAL))
    window = draw.choice([0, 1, 3, 40]) if causal != "none" else 0
    inputs = [q, k, v]
    kind = draw.choice([None, DType.BOOL, dtype, DType.F32])
    if kind is not None:
        shape = draw.broadcastable((*batch, kv_heads * group, queries, keys))
        inputs.append(draw.array(shape, kind, "finite"))
        if kind is not DType.BOOL and draw.integer(0, 1):
            inputs[-1] = np.where(inputs[-1] > 0.5, inputs[-1].dtype.type(-np.inf), inputs[-1])
    scale = draw.choice([None, 0.25, 0.0])
    return inputs, {"scale": scale, "causal": causal, "window": window}


def _example_paged(draw: Draw) -> Example:
    sequences, group, kv_heads = draw.integer(0, 4), draw.choice([1, 2, 4, 7]), draw.integer(1, 3)
    pages, page, most = draw.integer(1, 12), draw.choice([1, 5, 8, 16]), draw.integer(1, 6)
    dim, dtype = draw.choice([8, 64, 80, 128, 256, draw.integer(1, 70)]), draw.choice(FLOATS)
    q = draw.array((sequences, kv_heads * group, dim), dtype, "finite")
    k = draw.array((pages, page, kv_heads, dim), dtype, "finite")
    v = draw.array((pages, page, kv_heads, dim), dtype, "finite")

    def indices(shape: Shape, limit: int) -> Array:
        """Any layout, values from 0 to the limit."""
        drawn = draw.array(shape, draw.choice(INDICES), "small")
        return (drawn.astype(np.int64) * 7919 % (limit + 1)).astype(drawn.dtype)

    tables, lengths = indices((sequences, most), pages - 1), indices((sequences,), most * page)
    return [q, k, v, tables, lengths], {"scale": draw.choice([None, 0.5])}


def _kernels(op: int, name: str) -> tuple[Kernel, Kernel]:
    """For units of one query, and of several."""
    one, many = Shared("gpuos_attention", make_attention), Shared("gpuos_attention_many", make_attention_many)
    return (
        Kernel(ATTENTION_IDS + op, name, make_attention_single, one),
        Kernel(ATTENTION_IDS + op + MANY, f"{name}.many", make_attention_single, many),
    )


# A score is a sum of D products in up to 40 roundings, each 2^-24 of their magnitudes' sum, which for
# ordinary values is some 10 after scaling: 2^-15 of absolute error at the very most, and so much relative to
# a weight. The values are of ordinary size, so a mean of them is off by as much.
_TOLERANCE: Final = Tolerance(f32=2.0**-16, atol=2.0**-15)

OPERATORS: Final = (
    Operator(
        "sdpa",
        "attention",
        (3, 4),
        1,
        FLOATS,
        "softmax(scale * q k^T + mask) v for every head, over the keys that mask, causal and window leave",
        _infer_sdpa,
        _plan_sdpa,
        _kernels(SDPA, "sdpa"),
        spec_sdpa,
        parameters=(
            Parameter("scale", "float", None),
            Parameter("causal", tuple(CAUSAL), "none"),
            Parameter("window", "int", 0),
        ),
        tolerance=_TOLERANCE,
        tiling=f"over kv heads, {BUNDLE} queries at a time, and over keys above {SPLIT} bytes a head",
        cost=f"Reads k and v once for {BUNDLE} queries that share them.",
        source="torch.nn.functional.scaled_dot_product_attention; chunks as in Flash-Decoding.",
        example=_example_sdpa,
    ),
    Operator(
        "paged_attention",
        "attention",
        (5, 5),
        1,
        (*FLOATS, *INDICES),
        "softmax(scale * q k^T) v for one query a sequence, over the pages of its block table",
        _infer_paged,
        _plan_paged,
        _kernels(PAGED, "paged_attention"),
        spec_paged,
        parameters=(Parameter("scale", "float", None),),
        tolerance=_TOLERANCE,
        tiling=f"over kv heads, {BUNDLE} queries at a time, and over keys above {SPLIT} bytes a head",
        cost=f"Reads the pages once for {BUNDLE} query heads that share them.",
        source="vLLM's PagedAttention (arXiv 2309.06180).",
        example=_example_paged,
    ),
)
