"""What a CUDA stream is doing: asked of the driver, by address, from compiled code.

Every call whose operands a stream may still work on asks, so it must cost little; and it must be asked in
this order. The default stream is the current context's, so that must be ours; and to query a stream that is
being captured, or the default stream next to one, ends the capture in an error.
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ..machines.base import Body, HostPrimitives
from ..protocol import field

READY, NOT_READY = 0, 600  # CUDA_SUCCESS, CUDA_ERROR_NOT_READY
CAPTURING: Final = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
CAPTURE_IMPLICIT: Final = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the default stream, beside a capture
INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT
"""Answers of `query`; others are the driver's errors."""

DRIVER: Final = np.dtype(
    [
        ("context", "<u8"),  # CUcontext of the GPU
        ("current", "<u8"),  # cuCtxGetCurrent
        ("capturing", "<u8"),  # cuStreamIsCapturing
        ("query", "<u8"),  # cuStreamQuery
    ]
)


@cache
def make_query(m: HostPrimitives) -> Body:
    """`query(driver, stream) -> CUresult`: as cuStreamQuery, which is not asked where another context is
    current (INVALID_CONTEXT) or a capture would end (CAPTURING, CAPTURE_IMPLICIT)."""
    u64, load_u64 = m.u64, m.load_u64
    call_current, call_capturing, call_query = m.call_current, m.call_capturing, m.call_query
    CONTEXT, CURRENT = u64(field(DRIVER, "context")), u64(field(DRIVER, "current"))
    CAPTURING_AT, QUERY = u64(field(DRIVER, "capturing")), u64(field(DRIVER, "query"))
    ZERO, HALF = u64(0), u64(32)
    ANSWER_CAPTURING, ANSWER_ELSEWHERE = u64(CAPTURING), u64(INVALID_CONTEXT)

    def query(driver: Any, stream: Any) -> Any:
        if call_current(load_u64(driver + CURRENT)) != load_u64(driver + CONTEXT):
            return ANSWER_ELSEWHERE
        answer = call_capturing(load_u64(driver + CAPTURING_AT), stream)
        if answer >> HALF != ZERO:
            return answer >> HALF
        if answer != ZERO:
            return ANSWER_CAPTURING
        return call_query(load_u64(driver + QUERY), stream)

    return m.device(query)


def driver_record(library: Any, context: int) -> np.ndarray[Any, Any]:
    """A DRIVER of libcuda's functions. It must outlive whoever asks."""
    record = np.zeros(1, DRIVER)
    record["context"] = context
    for name, function in (
        ("current", library.cuCtxGetCurrent),
        ("capturing", library.cuStreamIsCapturing),
        ("query", library.cuStreamQuery),
    ):
        record[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return record


@cache
def compiled() -> SimpleNamespace:
    """`query`, compiled to run without the GIL."""
    from numba import njit, types

    from ..machines import cpu_memory as m

    u64 = types.uint64
    return SimpleNamespace(query=njit(u64(u64, u64), nogil=True)(make_query(m).py_func))  # type: ignore[attr-defined]
