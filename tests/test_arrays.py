"""Arrays as they come: what is taken is walked right, what is refused says why and what to do."""

from __future__ import annotations

import ctypes
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuos_numba.descriptor import DType
from gpuos_numba.errors import ArgumentError, DeviceError, DTypeError
from gpuos_numba.host import arrays
from gpuos_numba.host.arrays import (
    ArrayView,
    byte_range,
    empty_like_on,
    overlap,
    self_overlapping,
    validate_output,
    view_cpu,
    view_cuda,
)
from gpuos_numba.shapes import broadcast_shape

F32 = np.float32


class OnGpu:
    """A CUDA array as another library would export it; its memory does not exist."""

    def __init__(self, **interface: Any) -> None:
        base = {"version": 3, "data": (4096, False), "typestr": "<f4", "shape": (2, 3), "strides": None}
        self.__cuda_array_interface__ = base | interface


class OnDLPack:
    """An exporter that says where its memory is; a NumPy array's memory stands in for a GPU's."""

    def __init__(self, kind: int, index: int, array: Any = None) -> None:
        self.where = (kind, index)
        self.array = array

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> Any:
        assert stream == -1, "no synchronisation is asked for"
        if self.array is None:
            raise BufferError("not to be exported")
        return self.array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where


def elements(view: ArrayView) -> set[int]:
    """Addresses of the elements: the oracle, by walking all of them."""
    return {
        view.address + view.itemsize * sum(i * s for i, s in zip(index, view.strides, strict=True))
        for index in itertools.product(*map(range, view.shape))
    }


def bytes_of(view: ArrayView) -> set[int]:
    return {at + byte for at in elements(view) for byte in range(view.itemsize)}


# ---- what is taken ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"])
def test_numpy_and_torch_views_agree_on_every_dtype(name: str) -> None:
    torch = pytest.importorskip("torch")
    array = np.zeros((3, 4), name)[:, ::2]
    left, right = view_cpu(array), view_cpu(torch.from_numpy(array))
    assert left[:5] == right[:5] and left[6:] == right[6:]
    assert left.dtype.name.lower()[0] == ("b" if name == "bool" else name[0])
    assert left.itemsize == array.itemsize and left.nbytes == 6 * array.itemsize


def test_bfloat16_is_taken_from_ml_dtypes_and_torch() -> None:
    ml_dtypes, torch = pytest.importorskip("ml_dtypes"), pytest.importorskip("torch")
    assert view_cpu(np.zeros(4, ml_dtypes.bfloat16)).dtype is DType.BF16
    assert view_cpu(torch.zeros(4, dtype=torch.bfloat16)).dtype is DType.BF16


@pytest.mark.parametrize(
    "walk",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[::-1, ::-1],
        lambda x: x[1:2],
        lambda x: x[:0],
        lambda x: np.broadcast_to(x[:, :1], x.shape),
        lambda x: x[0, 0, ...],
        lambda x: x.reshape(2, 1, 3, 1, 2, 1, 2, 1),
    ],
)
def test_a_view_reaches_exactly_the_array_elements(walk: Any) -> None:
    array = walk(np.arange(24, dtype=F32).reshape(4, 6))
    view = view_cpu(array)
    start, end = view.address, view.address
    if array.size:
        ends = np.lib.array_utils.byte_bounds(array)
        start, end = ends
    assert byte_range(view) == (start, end)
    assert view.count == array.size and view.shape == array.shape
    assert view.contiguous == array.flags.c_contiguous
    assert view.readonly == (not array.flags.writeable)
    for index in np.ndindex(array.shape):
        at = view.address + 4 * sum(i * s for i, s in zip(index, view.strides, strict=True))
        assert ctypes.c_float.from_address(at).value == array[index]


def test_zero_size_and_size_one_dims_may_have_any_strides() -> None:
    raw = np.zeros(64, np.uint8)
    one = np.ndarray((1, 2), F32, raw, strides=(3, 4))
    none = np.ndarray((0, 2), F32, raw, offset=0, strides=(7, 5))
    assert view_cpu(one).count == 2
    assert view_cpu(none).count == 0


def test_a_view_keeps_its_memory_alive() -> None:
    view = view_cpu(np.full(1000, 7, F32)[::2])
    junk = [np.zeros(1000, F32) for _ in range(20)]
    assert isinstance(view.owner, np.ndarray) and (view.owner == 7).all() and junk


def test_tensors_that_require_grad_are_taken() -> None:
    torch = pytest.importorskip("torch")
    assert view_cpu(torch.zeros(3, requires_grad=True)).count == 3


def test_array_interface_strides_become_elements() -> None:
    view = view_cuda(OnGpu(strides=(24, -8), data=(4096, True), stream=5), 0, device_of=lambda _: 0)
    assert view[:5] == (4096, (2, 3), (6, -2), DType.F32, True)
    assert view.stream == 5 and not view.contiguous and view.count == 6
    assert view_cuda(OnGpu(), 0).contiguous
    assert view_cuda(OnGpu(strides=(12, 4)), 0).contiguous
    assert view_cuda(OnGpu(shape=(), strides=()), 0).count == 1
    assert view_cuda(OnGpu(shape=(0,), data=(0, False)), 0, device_of=lambda _: None).count == 0


def test_dlpack_is_read_without_synchronising() -> None:
    """Without a GPU: proves the reading of the capsule, not that a CUDA library fills it so."""
    pytest.importorskip("cuda.core.utils")
    array = np.zeros((4, 6), F32)[::-1, ::2]
    array.flags.writeable = False
    for kind in (2, 13):
        view = view_cuda(OnDLPack(kind, 0, array), 0)
        assert view[:5] == (array.ctypes.data, (4, 3), (-6, 2), DType.F32, True) and not view.contiguous
    assert view_cuda(OnDLPack(2, 0, np.zeros((2, 3))), 0).contiguous
    with pytest.raises(DTypeError, match="complex64"):
        view_cuda(OnDLPack(2, 0, np.zeros(3, np.complex64)), 0)
    with pytest.raises(ArgumentError, match=r"out is a .*OnDLPack .*\(not to be exported\): pass a plain"):
        view_cuda(OnDLPack(2, 0), 0, "out")


def test_array_interface_takes_bfloat16_by_its_dtype() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = OnGpu(typestr="<V2")
    with pytest.raises(DTypeError, match="convert it"):
        view_cuda(array, 0)
    array.dtype = np.dtype(ml_dtypes.bfloat16)  # type: ignore[attr-defined]
    assert view_cuda(array, 0).dtype is DType.BF16


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "error", "says"),
    [
        ([1.0, 2.0], ArgumentError, r"list, not an array.*np\.asarray"),
        (1.5, ArgumentError, "float, not an array"),
        (F32(1), ArgumentError, "float32, not an array"),
        (np.zeros(2, ">f4"), DTypeError, "byte-swapped dtype >f4.*newbyteorder"),
        (np.zeros(2, "f4,i4"), DTypeError, r"structured dtype.*inputs\[0\]\['f0'\]"),
        (np.array([None]), DTypeError, "dtype object.*convert it"),
        (np.zeros(2, np.complex64), DTypeError, "dtype complex64.*convert it"),
        (np.zeros(2, np.longdouble), DTypeError, r"convert it.*astype\(np\.float32\)"),
        (np.zeros(2, np.uint16), DTypeError, "dtype uint16"),
        (np.zeros(2, "U3"), DTypeError, "convert it"),
        (np.zeros(2, "M8[s]"), DTypeError, "convert it"),
        (np.zeros(9, np.uint8)[1:].view(F32), ArgumentError, r"not aligned to its 4-byte.*copy\(\)"),
        (np.zeros(4, [("a", "f4"), ("b", "u1")])["a"], ArgumentError, r"strides \(5,\) bytes.*copy"),
        (np.zeros((1,) * 9, F32), ArgumentError, "9 dimensions.*at most 8"),
        (np.ma.masked_array(np.zeros(2, F32)), ArgumentError, "masked.*filled"),
        (OnGpu(), DeviceError, r"GPU memory.*machine='cuda'"),
    ],
)
def test_cpu_refusals_name_argument_value_and_remedy(array: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        view_cpu(array, "inputs[0]")
    assert str(caught.value).startswith("inputs[0] ")


@pytest.mark.parametrize(
    ("array", "error", "says"),
    [
        (np.zeros(2, F32), DeviceError, r"numpy\.ndarray in host memory.*device='cuda:1'"),
        (F32(1), DeviceError, "host memory"),
        ([1.0], ArgumentError, "list, not a CUDA array"),
        (OnGpu(typestr=">f4"), DTypeError, "byte-swapped"),
        (OnGpu(typestr="<c8"), DTypeError, "complex64"),
        (OnGpu(data=(4097, False)), ArgumentError, "0x1001.*not aligned"),
        (OnGpu(strides=(13, 4)), ArgumentError, "multiples"),
        (OnGpu(shape=(1,) * 9), ArgumentError, "at most 8"),
        (OnGpu(mask=OnGpu()), ArgumentError, "mask"),
        (OnDLPack(1, 0), DeviceError, "host memory"),
        (OnDLPack(10, 0), DeviceError, "device type 10"),
        (OnDLPack(2, 0), DeviceError, "on GPU 0, but this Runtime runs on GPU 1"),
    ],
)
def test_cuda_refusals_name_argument_value_and_remedy(array: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        view_cuda(array, 1, "out", device_of=lambda _: 1)
    assert str(caught.value).startswith("out ")


def test_an_array_on_another_gpu_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"on GPU 0, .* GPU 1: move it to GPU 1, or .*device=0"):
        view_cuda(OnGpu(), 1, "out", device_of=lambda _: 0)
    with pytest.raises(DeviceError, match="not in the memory of a GPU"):
        view_cuda(OnGpu(), 1, "out", device_of=lambda _: None)


def test_torch_tensors_without_plain_cpu_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DeviceError, match=r"torch tensor on cpu.*\.to\('cuda:0'\)"):
        view_cuda(torch.zeros(2), 0)
    with pytest.raises(DeviceError, match=r"on meta.*\.cpu\(\)"):
        view_cpu(torch.zeros(2, device="meta"))
    with pytest.raises(ArgumentError, match="to_dense"):
        view_cpu(torch.eye(2).to_sparse())
    with pytest.raises(DTypeError, match="dtype complex64"):
        view_cpu(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ArgumentError, match="resolve_neg"):
        view_cpu(torch.ones(2, dtype=torch.complex64).conj().imag)


def test_torch_cuda_tensors_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: a stand-in for torch proves which attributes are read, not that CUDA fills them."""

    class Tensor:
        is_cuda, dtype, shape, layout = True, "f32", (2, 3), "strided"
        device = SimpleNamespace(index=1)

        def get_device(self) -> int:
            return 1

        def data_ptr(self) -> int:
            return 4096

        def stride(self) -> tuple[int, ...]:
            return (3, 1)

        def is_contiguous(self) -> bool:
            return True

        def is_neg(self) -> bool:
            return False

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    monkeypatch.setattr(arrays, "_FROM_TORCH", {"f32": DType.F32})
    assert view_cuda(Tensor(), 1)[:4] == (4096, (2, 3), (3, 1), DType.F32)
    with pytest.raises(DeviceError, match="on GPU 1"):
        view_cuda(Tensor(), 0)


# ---- shapes and overlap -----------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 3), max_size=4).map(tuple), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_shapes_broadcast_as_in_numpy(shapes: list[tuple[int, ...]]) -> None:
    views = [view_cpu(np.zeros(shape, F32)) for shape in shapes]
    names = [f"inputs[{i}]" for i in range(len(views))]
    try:
        expected = np.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(ArgumentError, match="do not broadcast") as caught:
            broadcast_shape(views, names)
        assert all(f"{n} {s}" in str(caught.value) for n, s in zip(names, shapes, strict=True))
    else:
        assert broadcast_shape(views, names) == expected


@st.composite
def small_views(draw: st.DrawFn, base: np.ndarray[Any, Any]) -> Any:
    """An as_strided walk that stays inside `base`."""
    dims = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 4)) for _ in range(dims))
    strides = tuple(draw(st.integers(-4, 4)) for _ in range(dims))
    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n and s < 0)
    high = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n and s > 0)
    start = draw(st.integers(-low, len(base) - 1 - high))
    return np.lib.stride_tricks.as_strided(base[start:], shape, [4 * s for s in strides])


BASE = np.zeros(60, F32)


@given(small_views(BASE), small_views(BASE))
@settings(max_examples=500, deadline=None)
def test_overlap_agrees_with_numpy_and_with_walking_all_elements(left: Any, right: Any) -> None:
    a, b = view_cpu(left), view_cpu(right)
    answer = overlap(a, b)
    assert (answer != "none") == np.shares_memory(left, right) == bool(bytes_of(a) & bytes_of(b))
    if answer == "same":
        assert [elements(a), a.count] == [elements(b), b.count]
    assert overlap(a, a) == ("same" if a.count else "none")


@given(small_views(BASE))
@settings(max_examples=500, deadline=None)
def test_an_output_that_overlaps_itself_is_never_missed(array: Any) -> None:
    view = view_cpu(array)
    if len(elements(view)) < view.count:
        assert self_overlapping(view)


def test_ordinary_walks_do_not_overlap_themselves() -> None:
    x = np.zeros((4, 6, 5), F32)
    for array in (x, x.T, x[::-1, ::2], x.transpose(1, 0, 2)[:, :, ::-2], x[:, :1], x[:0], x[0, 0, 0, ...]):
        assert not self_overlapping(view_cpu(array))
    assert self_overlapping(view_cpu(np.broadcast_to(x[:1], x.shape)))
    assert not self_overlapping(view_cpu(np.broadcast_to(x[:1, :1, :1], (1, 1, 1))))


def test_overlap_tells_same_interleaved_and_partial_apart() -> None:
    x = np.zeros(16, F32)
    view = view_cpu(x)
    assert overlap(view, view_cpu(x.reshape(4, 4))) == "same"
    assert overlap(view, view_cpu(x.view(np.int32))) == "same"
    assert overlap(view, view_cpu(x.view(np.float64))) == "partial"
    assert overlap(view, view_cpu(x[::-1])) == "partial"
    assert overlap(view_cpu(x[::2]), view_cpu(x[1::2])) == "none"
    assert overlap(view_cpu(x[1:]), view_cpu(x[:-1])) == "partial"
    assert overlap(view_cpu(x[:0]), view) == "none"
    assert overlap(view_cpu(x.reshape(4, 4).T), view_cpu(x.reshape(4, 4))) == "partial"


def test_overlap_that_is_too_hard_to_disprove_is_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_hard(*_: Any) -> bool:
        raise np.exceptions.TooHardError

    x = np.zeros(16, F32)
    monkeypatch.setattr(np, "shares_memory", too_hard)
    assert overlap(view_cpu(x[::2]), view_cpu(x[1::2])) == "partial"


def test_overlap_never_reads_the_memory() -> None:
    odd = view_cuda(OnGpu(shape=(1 << 33,), strides=(8,), data=(1 << 46, False)), 0)
    even = view_cuda(OnGpu(shape=(1 << 33,), strides=(8,), data=((1 << 46) + 4, False)), 0)
    assert overlap(odd, even) == "none"
    assert overlap(odd, odd._replace(strides=(1,))) == "partial"


def test_outputs_that_cannot_be_written_safely_are_refused() -> None:
    x = np.zeros((4, 4), F32)
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="out is read-only"):
        validate_output(view_cpu(frozen), [], True)
    wide = np.lib.stride_tricks.as_strided(x, (4, 4), (0, 4))
    with pytest.raises(ArgumentError, match=r"out overlaps itself \(shape \(4, 4\), strides \(0, 1\)"):
        validate_output(view_cpu(wide), [], True)
    with pytest.raises(ArgumentError, match=r"out overlaps inputs\[1\] in part"):
        validate_output(view_cpu(x[1:]), [view_cpu(frozen), view_cpu(x[:-1])], True)
    with pytest.raises(ArgumentError, match="out is the same memory as x, but"):
        validate_output(view_cpu(x), [view_cpu(x)], False, input_names=["x"])
    validate_output(view_cpu(x), [view_cpu(x), view_cpu(frozen)], True)
    validate_output(view_cpu(x[::2]), [view_cpu(x[1::2])], False)


# ---- outputs ----------------------------------------------------------------------------------------------


def test_outputs_come_from_the_library_of_the_example() -> None:
    torch = pytest.importorskip("torch")
    made = empty_like_on("cpu", np.zeros(1), (2, 3), DType.F16)
    assert isinstance(made, np.ndarray) and made.shape == (2, 3) and made.dtype == np.float16
    tensor = empty_like_on("cpu", torch.zeros(1), (2, 3), DType.BF16)
    assert tensor.shape == (2, 3) and tensor.dtype is torch.bfloat16
    with pytest.raises(ArgumentError, match=r"OnGpu on machine cuda: pass out= of shape \(2,\)"):
        empty_like_on("cuda", OnGpu(), (2,), DType.F32)


def test_bfloat16_numpy_output_needs_ml_dtypes() -> None:
    pytest.importorskip("ml_dtypes")
    assert view_cpu(empty_like_on("cpu", np.zeros(1), (2,), DType.BF16)).dtype is DType.BF16
