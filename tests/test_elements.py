"""Elements of every dtype are read and written as NumPy has them, one by one and eight at a time."""

import functools

import numpy as np
import pytest
from numba import njit, types

from gpuos_numba.descriptor import ITEMSIZE, DType
from gpuos_numba.device import elements
from gpuos_numba.machines import cpu_memory as m
from gpuos_numba.testing import numpy_dtype

FLOATS = [DType.F32, DType.F16, DType.BF16]
INTS = [DType.BOOL, DType.I8, DType.U8, DType.I32, DType.I64]
f32, u64, i64 = types.float32, types.uint64, types.int64


@functools.cache
def copier(load, store, vector):
    """copy(kind in, source, kind out, target, count), through f32 or i64."""
    load, store = load(m), store(m)
    step = u64(8 if vector else 1)

    def copy(kind_in, size_in, source, kind_out, size_out, target, count):
        i = u64(0)
        while i < count:
            store(kind_out, target + i * size_out, load(kind_in, source + i * size_in))
            i += step

    return njit(types.void(*[u64] * 7))(copy)


def copied(values, kind_in, kind_out, load, store, vector=False):
    source = np.ascontiguousarray(values)
    target = np.zeros(len(values), numpy_dtype(kind_out))
    copy = copier(load, store, vector)
    copy(
        int(kind_in),
        ITEMSIZE[kind_in],
        source.ctypes.data,
        int(kind_out),
        ITEMSIZE[kind_out],
        target.ctypes.data,
        len(values),
    )
    return target


def same(a, b):
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True)


LOADERS = [
    (elements.make_load_f32, elements.make_store_f32, False),
    (elements.make_load_f32x8, elements.make_store_f32x8, True),
]
INT_LOADERS = [
    (elements.make_load_i64, elements.make_store_i64, False),
    (elements.make_load_i64x8, elements.make_store_i64x8, True),
]


@pytest.mark.parametrize("kind", [DType.F16, DType.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("load, store, vector", LOADERS, ids=["one", "eight"])
def test_every_half_survives_the_way_through_f32(kind, load, store, vector):
    values = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(kind))
    assert same(copied(values, kind, DType.F32, load, store, vector), values)
    assert same(copied(values, kind, kind, load, store, vector), values)


@pytest.mark.parametrize("kind", [DType.F16, DType.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("load, store, vector", LOADERS, ids=["one", "eight"])
def test_f32_is_rounded_to_nearest_even(kind, load, store, vector):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    edges = np.array(
        [65519, 65520, -65520, 2049, 2051, 6e-8, 3e-8, 2.9802322e-08, np.nan, np.inf], np.float32
    )
    halves = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000  # ties of bf16
    values = np.concatenate([bits.view(np.float32), edges.repeat(8), halves.view(np.float32)])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(numpy_dtype(kind))
    assert same(copied(values, DType.F32, kind, load, store, vector), expected)


@pytest.mark.parametrize("kind_in", INTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("kind_out", INTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("load, store, vector", INT_LOADERS, ids=["one", "eight"])
def test_integers_stay_integers_and_wrap(kind_in, kind_out, load, store, vector):
    raw = np.random.default_rng(1).integers(-(1 << 63), 1 << 63, 800, dtype=np.int64)
    values = (raw & 1).astype(bool) if kind_in is DType.BOOL else raw.astype(numpy_dtype(kind_in))
    result = copied(values, kind_in, kind_out, load, store, vector)
    assert np.array_equal(result, values.astype(numpy_dtype(kind_out)))


@pytest.mark.parametrize("kind", INTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("vector", [False, True], ids=["one", "eight"])
def test_integers_become_the_nearest_f32(kind, vector):
    raw = np.random.default_rng(2).integers(-(1 << 63), 1 << 63, 800, dtype=np.int64)
    values = (raw & 1).astype(bool) if kind is DType.BOOL else raw.astype(numpy_dtype(kind))
    load, store, _ = LOADERS[vector]
    assert same(copied(values, kind, DType.F32, load, store, vector), values.astype(np.float32))
