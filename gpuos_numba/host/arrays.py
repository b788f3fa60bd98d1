"""An array-like arrives, an `ArrayView` leaves: an address and how to walk it from there.

What can be refused is refused here, before anything is enqueued, and every refusal names the argument, the
offending value and what to do about it. The view keeps its `owner` alive; whoever holds the view until the
task completes (a Ticket, a Batch) is what makes `del a` right after a submit safe.

No library is imported to look at an array of it: an object can only be a torch tensor if torch was imported.
There is no autograd here: a tensor that requires grad is taken for its memory and its grad is left alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ..descriptor import DTYPE_NAMES, ITEMSIZE, MAX_DIMS, DType
from ..errors import ArgumentError, DeviceError, DTypeError

OVERLAP_MAX_WORK: Final = 10_000
"""Candidate solutions that the exact overlap check looks at before it answers "partial"."""

Overlap = Literal["none", "same", "partial"]

_FROM_NUMPY: Final[dict[Any, DType]] = {
    np.dtype(name): code for code, name in DTYPE_NAMES.items() if code is not DType.BF16
}
_FROM_TORCH: Final[dict[Any, DType]] = {}  # filled when the first tensor is seen
_DLPACK_HOST: Final = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged


class ArrayView(NamedTuple):
    """One operand as the host sees it. Compare fields, not views: `owner` may be an array."""

    address: int  # of the element at index 0, ..., 0; not the lowest one where a stride is negative
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; of no meaning for dims of extent 1 and views without elements
    dtype: DType
    readonly: bool
    owner: object  # keeps the memory alive
    count: int  # type: ignore[assignment]  # elements, the product of shape; shadows tuple.count
    contiguous: bool  # row-major without gaps: element i lies at address + i * itemsize
    stream: int | None = None  # the producer's stream, where `__cuda_array_interface__` names one

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps not counted."""
        return self.count * ITEMSIZE[self.dtype]


PAGE_ZERO: Final = 4096
"""Nothing lies below: where an array's address does, its storage was freed, and what is left is an offset."""


def view_cpu(array: Any, name: str = "array") -> ArrayView:
    """View a NumPy array or a torch CPU tensor."""
    if isinstance(array, np.ndarray):
        return _view_numpy(array, name)
    if _is_torch(array):
        if not array.is_cpu:
            raise DeviceError(
                f"{name} is a torch tensor on {array.device}, but this Runtime's machine is cpu: "
                "move it with .cpu(), or use Runtime(machine='cuda')"
            )
        return _view_torch(array, name)
    if hasattr(array, "__cuda_array_interface__"):
        raise DeviceError(
            f"{name} is a {_kind(array)} in GPU memory, but this Runtime's machine is cpu: "
            "copy it to a NumPy array, or use Runtime(machine='cuda')"
        )
    raise ArgumentError(
        f"{name} is a {_kind(array)}, not an array: pass a NumPy array or a torch CPU tensor, "
        "for example np.asarray(x, dtype=np.float32)"
    )


def view_cuda(
    array: Any, device: int, name: str = "array", device_of: Callable[[int], int | None] | None = None
) -> ArrayView:
    """View an array on GPU `device`: torch first, then `__cuda_array_interface__`, then DLPack.

    `device_of(address)` says which GPU owns an address, None for none: the array interface does not tell.
    Nothing here synchronises: work that a stream still does on the array is the caller's to order.
    """
    if _is_torch(array):
        if not array.is_cuda:
            raise DeviceError(
                f"{name} is a torch tensor on {array.device}, but this Runtime's machine is cuda: "
                f"move it with .to('cuda:{device}'), or use Runtime(machine='cpu')"
            )
        _check_device(array.get_device(), device, name)
        return _view_torch(array, name)
    if isinstance(array, np.ndarray | np.generic):
        raise DeviceError(
            f"{name} is a {_kind(array)} in host memory, but this Runtime's machine is cuda: "
            f"copy it with torch.as_tensor(x, device='cuda:{device}'), cupy.asarray(x) or "
            "numba.cuda.to_device(x), or use Runtime(machine='cpu')"
        )
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _view_interface(array, interface, device, name, device_of)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _view_dlpack(array, device, name)
    raise ArgumentError(
        f"{name} is a {_kind(array)}, not a CUDA array: pass a torch, CuPy or Numba array, or anything with "
        f"__cuda_array_interface__ or __dlpack__, for example torch.tensor(x, device='cuda:{device}')"
    )


def _view_numpy(array: np.ndarray[Any, Any], name: str) -> ArrayView:
    dtype = _FROM_NUMPY.get(array.dtype)
    if dtype is None:
        dtype = _dtype_from_numpy(array.dtype, name)
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            f"{name} is a masked array, and operators do not know masks: pass x.filled(value)"
        )
    flags, shape = array.flags, array.shape
    contiguous = flags.c_contiguous
    if contiguous:
        strides = _contiguous_strides(shape)
    else:
        strides = _strides_from_bytes(shape, array.strides, ITEMSIZE[dtype], name)
    # `ctypes.data` and not the array interface: half the time, and the same for a read-only array.
    return _checked(
        array.ctypes.data, shape, strides, dtype, not flags.writeable, array, contiguous, None, name
    )


def _view_torch(tensor: Any, name: str) -> ArrayView:
    dtype = _FROM_TORCH.get(tensor.dtype)
    if dtype is None:
        raise _no_such_dtype(str(tensor.dtype).removeprefix("torch."), name, f"{name}.to(torch.float32)")
    try:
        address = tensor.data_ptr()
        strides = tensor.stride()
        contiguous = tensor.is_contiguous()
        negated = tensor.is_neg()
    except RuntimeError as reason:  # sparse, functional and wrapper tensors have no plain memory
        raise ArgumentError(
            f"{name} is a {_kind(tensor)} of layout {tensor.layout} without strided memory of its own: "
            f"pass a dense tensor, for example {name}.to_dense() ({reason})"
        ) from reason
    if negated:
        raise ArgumentError(f"{name} is a lazily negated tensor: pass {name}.resolve_neg()")
    return _checked(address, tuple(tensor.shape), strides, dtype, False, tensor, contiguous, None, name)


def _view_interface(
    array: Any,
    interface: dict[str, Any],
    device: int,
    name: str,
    device_of: Callable[[int], int | None] | None,
) -> ArrayView:
    address, readonly = interface["data"]
    if interface.get("mask") is not None:
        raise ArgumentError(f"{name} has a mask, and operators do not know masks: pass a plain array")
    shape = tuple(map(int, interface["shape"]))
    dtype = _dtype_from_numpy(_interface_dtype(array, interface["typestr"]), name)
    in_bytes = interface.get("strides")
    contiguous_strides = _contiguous_strides(shape)
    if in_bytes is None:
        strides = contiguous_strides
    else:
        strides = _strides_from_bytes(shape, tuple(map(int, in_bytes)), ITEMSIZE[dtype], name)
    view = _checked(
        int(address or 0),
        shape,
        strides,
        dtype,
        bool(readonly),
        array,
        _same_walk(shape, strides, contiguous_strides),
        interface.get("stream"),
        name,
    )
    if device_of is not None and view.count:
        _check_device(device_of(view.address), device, name)
    return view


def _view_dlpack(array: Any, device: int, name: str) -> ArrayView:
    kind, index = array.__dlpack_device__()
    kind, index = int(kind), int(index)
    if kind in _DLPACK_HOST:
        raise DeviceError(
            f"{name} is a {_kind(array)} in host memory, but this Runtime's machine is cuda: "
            f"copy it to GPU {device}, or use Runtime(machine='cpu')"
        )
    if kind not in _DLPACK_CUDA:
        raise DeviceError(
            f"{name} is a {_kind(array)} on DLPack device type {kind}, not on a CUDA GPU: "
            f"copy it to GPU {device}"
        )
    if kind == _DLPACK_CUDA[0]:
        _check_device(index, device, name)
    try:
        memory_view = import_module("cuda.core.utils").StridedMemoryView
    except ImportError as reason:
        raise ArgumentError(
            f"{name} is a {_kind(array)}, and reading DLPack needs the cuda-core package: "
            "install gpuos_numba[cu13] or [cu12], or pass a torch, CuPy or Numba array"
        ) from reason
    try:
        # -1: no synchronisation, as for the other two ways in.
        held = memory_view.from_dlpack(array, stream_ptr=-1)
        exported = held.dtype
    except (BufferError, NotImplementedError, TypeError) as reason:
        raise ArgumentError(
            f"{name} is a {_kind(array)} that cannot be read through DLPack ({reason}): "
            "pass a plain dense array of a supported dtype"
        ) from reason
    dtype = _dtype_from_numpy(exported, name)
    shape = tuple(map(int, held.shape))
    contiguous_strides = _contiguous_strides(shape)
    strides = contiguous_strides if held.strides is None else tuple(map(int, held.strides))
    contiguous = _same_walk(shape, strides, contiguous_strides)
    return _checked(int(held.ptr), shape, strides, dtype, bool(held.readonly), held, contiguous, None, name)


def _checked(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    readonly: bool,
    owner: object,
    contiguous: bool,
    stream: int | None,
    name: str,
) -> ArrayView:
    """The checks that every way in shares."""
    if len(shape) > MAX_DIMS:
        raise ArgumentError(
            f"{name} has {len(shape)} dimensions {shape}, but operators take at most {MAX_DIMS}: "
            "reshape it to fewer"
        )
    count = math.prod(shape)
    if address < PAGE_ZERO and count:
        raise ArgumentError(
            f"{name} has {count} elements and no memory for them (its address is {address:#x}): its storage "
            "was freed or never was; pass an array that owns memory"
        )
    if address % ITEMSIZE[dtype] and count:
        raise ArgumentError(
            f"{name} begins at address {address:#x}, which is not aligned to its {ITEMSIZE[dtype]}-byte "
            f"elements: pass a copy, for example {name}.copy() or {name}.clone()"
        )
    return ArrayView(address, shape, strides, dtype, readonly, owner, count, contiguous, stream)


def _is_torch(array: object) -> bool:
    torch = sys.modules.get("torch")
    # getattr: another thread may be in the middle of importing it.
    tensor = getattr(torch, "Tensor", None)
    if tensor is None or not isinstance(array, tensor):
        return False
    if not _FROM_TORCH:
        _FROM_TORCH.update({getattr(torch, name): code for code, name in DTYPE_NAMES.items()})
    return True


def _dtype_from_numpy(dtype: Any, name: str) -> DType:
    """The slow way: knows ml_dtypes' bfloat16 once it has seen it, and says why anything else is refused."""
    known = _FROM_NUMPY.get(dtype)
    if known is not None:
        return known
    if dtype.name == "bfloat16" and dtype.itemsize == 2 and dtype.isnative:
        _FROM_NUMPY[dtype] = DType.BF16
        return DType.BF16
    if dtype.names is not None:
        raise DTypeError(
            f"{name} has the structured dtype {dtype}: pass one of its fields, for example "
            f"{name}[{dtype.names[0]!r}]"
        )
    if not dtype.isnative:
        raise DTypeError(
            f"{name} has the byte-swapped dtype {dtype.str}: "
            f"pass {name}.astype({name}.dtype.newbyteorder('='))"
        )
    raise _no_such_dtype(str(dtype), name, f"{name}.astype(np.float32)")


def _no_such_dtype(dtype: str, name: str, remedy: str) -> DTypeError:
    return DTypeError(
        f"{name} has dtype {dtype}, which no operator takes: convert it to one of "
        f"{', '.join(DTYPE_NAMES.values())}, for example {remedy}"
    )


def _interface_dtype(array: Any, typestr: str) -> Any:
    """The interface has no code for bfloat16 (it says V2): there the array's own dtype decides."""
    dtype = np.dtype(typestr)
    own = getattr(array, "dtype", None)
    if dtype.kind == "V" and getattr(own, "name", None) == "bfloat16":
        return own
    return dtype


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 1:
        return (1,)
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _strides_from_bytes(
    shape: tuple[int, ...], in_bytes: tuple[int, ...], itemsize: int, name: str
) -> tuple[int, ...]:
    strides = []
    for extent, stride in zip(shape, in_bytes, strict=True):
        if stride % itemsize and extent > 1:
            if 0 in shape:
                return _contiguous_strides(shape)
            raise ArgumentError(
                f"{name} has strides {in_bytes} bytes, not multiples of its {itemsize}-byte elements "
                f"(a field of a structured array?): pass a copy, for example {name}.copy()"
            )
        strides.append(stride // itemsize)
    return tuple(strides)


def _same_walk(shape: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether two stride tuples reach the same elements: extents of 1 are never stepped over."""
    return (
        left == right
        or 0 in shape
        or all(a == b or extent == 1 for extent, a, b in zip(shape, left, right, strict=True))
    )


def _check_device(found: int | None, device: int, name: str) -> None:
    if found is None:
        raise DeviceError(
            f"{name} is not in the memory of a GPU: copy it to GPU {device}, or use Runtime(machine='cpu')"
        )
    if found != device:
        raise DeviceError(
            f"{name} is on GPU {found}, but this Runtime runs on GPU {device}: "
            f"move it to GPU {device}, or use Runtime(device={found})"
        )


def _kind(array: object) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")


# ---- shapes and overlap -----------------------------------------------------------------------------------


def byte_range(view: ArrayView) -> tuple[int, int]:
    """The bytes [low, high) that the view's elements lie in, gaps included; empty if it has no elements."""
    if view.count == 0:
        return view.address, view.address
    low = high = 0
    for extent, stride in zip(view.shape, view.strides, strict=True):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    itemsize = ITEMSIZE[view.dtype]
    return view.address + low * itemsize, view.address + (high + 1) * itemsize


def overlap(a: ArrayView, b: ArrayView) -> Overlap:
    """Whether two views share bytes.

    "same": both walk the same elements in the same order. "partial": they share a byte in any other way, or
    proving that they do not is too much work (`OVERLAP_MAX_WORK`). Memory that is mapped twice at different
    addresses is not seen.
    """
    if a.count == 0 or b.count == 0:
        return "none"
    if a.contiguous and b.contiguous:
        end_a, end_b = a.address + a.nbytes, b.address + b.nbytes
        if end_a <= b.address or end_b <= a.address:
            return "none"
        same = a.address == b.address and a.count == b.count and a.itemsize == b.itemsize
        return "same" if same else "partial"
    low_a, high_a = byte_range(a)
    low_b, high_b = byte_range(b)
    if high_a <= low_b or high_b <= low_a:
        return "none"
    if (
        a.address == b.address
        and a.itemsize == b.itemsize
        and a.shape == b.shape
        and _same_walk(a.shape, a.strides, b.strides)
    ):
        return "same"
    try:
        shared = np.shares_memory(_stand_in(a), _stand_in(b), OVERLAP_MAX_WORK)  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return "partial"
    return "partial" if shared else "none"


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _stand_in(view: ArrayView) -> Any:
    """A NumPy array with the view's addresses, never read: they may be a GPU's."""
    itemsize = ITEMSIZE[view.dtype]
    return np.asarray(
        _Interface(
            {
                "version": 3,
                "data": (view.address, True),
                "typestr": f"|V{itemsize}",
                "shape": view.shape,
                "strides": tuple(stride * itemsize for stride in view.strides),
            }
        )
    )


def self_overlapping(view: ArrayView) -> bool:
    """Whether two indices may reach the same element.

    From the smallest stride up, each must step over everything that the smaller ones reach. That is exact
    for slices, transpositions and broadcasts of ordinary arrays; a few interleaved `as_strided` walks that
    happen not to collide (shape (2, 3), strides (3, 2)) are called overlapping too: a copy, never a race.
    """
    if view.contiguous or view.count <= 1:
        return False
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def validate_output(
    out: ArrayView,
    inputs: Sequence[ArrayView],
    same_ok: bool,
    name: str = "out",
    input_names: Sequence[str] | None = None,
) -> None:
    """Refuse an output that cannot be written, or whose writes some read could see.

    `same_ok` says that element i of the output depends on element i of its inputs alone, so that an output
    that is exactly an input is fine.
    """
    if out.readonly:
        raise ArgumentError(f"{name} is read-only: pass a writable array, for example {name}.copy()")
    if self_overlapping(out):
        raise ArgumentError(
            f"{name} overlaps itself (shape {out.shape}, strides {out.strides} elements): its elements share "
            "memory, so the result would depend on the order of writes; pass an array of its own"
        )
    for index, view in enumerate(inputs):
        relation = overlap(out, view)
        if relation == "none" or (relation == "same" and same_ok):
            continue
        other = input_names[index] if input_names is not None else f"inputs[{index}]"
        if relation == "same":
            raise ArgumentError(
                f"{name} is the same memory as {other}, but this operator reads elements other than "
                f"the one it writes: pass another {name}, or a copy of {other}"
            )
        low_out, high_out = byte_range(out)
        low, high = byte_range(view)
        raise ArgumentError(
            f"{name} overlaps {other} in part (bytes [{low_out:#x}, {high_out:#x}) and "
            f"[{low:#x}, {high:#x})): pass another {name}, or a copy of {other}"
        )


# ---- outputs ----------------------------------------------------------------------------------------------


def empty_like_on(machine_name: str, example_array: Any, shape: tuple[int, ...], dtype: DType) -> Any:
    """A new row-major output from the library, and on the device, of `example_array`."""
    dtype_name = DTYPE_NAMES[dtype]
    if _is_torch(example_array):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype_name), device=example_array.device)
    if machine_name == "cpu":
        if isinstance(example_array, np.ndarray):
            return np.empty(shape, _numpy_dtype(dtype))
    else:
        library = type(example_array).__module__
        if library.split(".")[0] == "cupy":
            with example_array.device:
                return sys.modules["cupy"].empty(shape, _numpy_dtype(dtype))
        if library.startswith(("numba.cuda.", "numba_cuda.")):
            return sys.modules["numba.cuda"].device_array(shape, _numpy_dtype(dtype))
    raise ArgumentError(
        f"cannot allocate an output like a {_kind(example_array)} on machine {machine_name}: "
        f"pass out= of shape {shape} and dtype {dtype_name}"
    )


def _numpy_dtype(dtype: DType) -> Any:
    if dtype is not DType.BF16:
        return np.dtype(DTYPE_NAMES[dtype])
    try:
        import ml_dtypes
    except ImportError as reason:
        raise ArgumentError(
            "cannot allocate a bfloat16 output without the ml_dtypes package: install it, or pass out="
        ) from reason
    return np.dtype(ml_dtypes.bfloat16)
