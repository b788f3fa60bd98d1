"""Arrays without elements: what a recorded function handles in place of its arguments and results.

A `Symbolic` is a view of a *root* (an argument, or what a recorded task writes), made by indexing and
reshaping as NumPy would. The way from the root to the view is its *recipe*; integers and bounded slices in it
are kept apart as *indices*, so that views that differ in them alone have equal recipes, and a new shape of
the root is followed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import numpy as np

from ..descriptor import ITEMSIZE, DType
from ..errors import ArgumentError
from ..shapes import Shape, Strides
from .arrays import ArrayView, _contiguous_strides, _same_walk

Recipe = tuple[Any, ...]
"""Steps: ("index", keys), ("reshape", shape), ("permute", axes), ("expand", shape) or ("fixed", ...).

Keys of "index": "i" for an index from 0 up, ("s", length) for a slice from an index on, ("n", index) for one
counted from the end, ("l", start, stop, step) for any other slice, "new" and "...".
"""

WHOLE: Final[Recipe] = ()
_BASE: Final = 1 << 40


class Watcher(Protocol):
    """Whom a Symbolic tells that its shape was looked at: what follows may depend on it."""

    looked: bool


@dataclass(eq=False)
class Root:
    """Memory that views are taken of.

    Attributes:
        number: its place among the roots.
        kind: "argument", "constant" or "result".
        dtype, shape, strides: as recorded; strides in elements.
        address: of its first element; of a result one that nothing else has, for checks of overlap.
        array: the array of an argument or a constant.
        readonly: whether it may not be written.
        stream: the producer's, where the array names one.
    """

    number: int
    kind: str
    dtype: DType
    shape: Shape
    strides: Strides
    address: int
    array: Any = None
    readonly: bool = False
    stream: int | None = None


class Followed(NamedTuple):
    """Where a recipe leads from a shape. Offset and steps in elements; limits are of indices, exclusive."""

    shape: Shape
    strides: Strides
    offset: int
    steps: tuple[int, ...]
    limits: tuple[int, ...]


class _Interface:
    def __init__(self, shape: Shape, strides: Strides) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (_BASE, True),
            "typestr": "|V1",
            "shape": shape,
            "strides": strides,
        }


@lru_cache(maxsize=16384)
def follow(recipe: Recipe, shape: Shape, strides: Strides) -> Followed:
    """What a recipe makes of a root. Raises ArgumentError where the shape does not allow it.

    NumPy takes the steps, on an array whose memory does not exist: no step reads an element.
    """
    if not recipe:
        return Followed(shape, strides, 0, (), ())
    array = np.asarray(_Interface(shape, strides))
    steps: list[int] = []
    limits: list[int] = []
    for step in recipe:
        try:
            if step[0] == "index":
                array = _index(array, step[1], steps, limits)
            elif step[0] == "reshape":
                array = array.view()
                array.shape = step[1]  # where a copy would be needed this raises
            elif step[0] == "permute":
                array = array.transpose(step[1])
            elif step[0] == "expand":
                array = np.broadcast_to(array, _kept(array.shape, step[1]))
            else:
                _, view_shape, view_strides, root_shape, root_strides = step
                if (root_shape, root_strides) != (shape, strides):
                    raise ValueError("a view that was recorded as an array of its own keeps its shape")
                steps.append(1)
                limits.append(1 << 62)
                array = np.asarray(_Interface(view_shape, view_strides))
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise ArgumentError(
                f"an array of shape {shape} does not allow the recorded {step[0]} {step[1]}: {error}"
            ) from error
    address = int(array.__array_interface__["data"][0])
    return Followed(
        array.shape,
        tuple(array.strides),
        address - _BASE if array.size else 0,
        tuple(steps),
        tuple(limits),
    )


def _kept(shape: Shape, wanted: Shape) -> Shape:
    """`wanted` with -1 replaced by the extent that is there, as torch's expand has it."""
    lead = len(wanted) - len(shape)
    return tuple(shape[i - lead] if n == -1 and i >= lead else n for i, n in enumerate(wanted))


def _index(array: Any, keys: tuple[Any, ...], steps: list[int], limits: list[int]) -> Any:
    used = sum(1 for key in keys if key not in ("new", "..."))
    if used > array.ndim:
        raise IndexError(f"{used} indices for {array.ndim} dims")
    native: list[Any] = []
    dim = 0
    for key in keys:
        if key == "new":
            native.append(None)
            continue
        if key == "...":
            native.append(Ellipsis)
            dim += array.ndim - used
            continue
        if key == "i":
            steps.append(array.strides[dim])
            limits.append(array.shape[dim])
            native.append(0)
        elif key[0] == "n":
            native.append(key[1])
        elif key[0] == "s":
            if key[1] > array.shape[dim]:
                raise IndexError(f"a slice of {key[1]} elements of {array.shape[dim]}")
            steps.append(array.strides[dim])
            limits.append(array.shape[dim] - key[1] + 1)
            native.append(slice(0, key[1]))
        else:
            native.append(slice(*key[1:]))
        dim += 1
    if Ellipsis not in native:
        native.append(Ellipsis)  # a view also where every dim is indexed
    return array[tuple(native)]


def apply(array: Any, recipe: Recipe, indices: tuple[int, ...]) -> Any:
    """The same view of a NumPy, CuPy or torch array."""
    left = list(indices)
    for step in recipe:
        if step[0] == "index":
            native: list[Any] = []
            for key in step[1]:
                if key == "new":
                    native.append(None)
                elif key == "...":
                    native.append(Ellipsis)
                elif key == "i":
                    native.append(left.pop(0))
                elif key[0] == "n":
                    native.append(key[1])
                elif key[0] == "s":
                    start = left.pop(0)
                    native.append(slice(start, start + key[1]))
                else:
                    native.append(slice(*key[1:]))
            if Ellipsis not in native:
                native.append(Ellipsis)
            array = array[tuple(native)]
        elif step[0] == "reshape":
            array = array.reshape(step[1])
        elif step[0] == "permute":
            array = array.permute(step[1]) if hasattr(array, "permute") else array.transpose(step[1])
        elif step[0] == "expand":
            shape = _kept(tuple(array.shape), step[1])
            array = array.expand(shape) if hasattr(array, "expand") else np.broadcast_to(array, shape)
    return array


class Symbolic:
    """A recorded array: an argument, a result, or a view of one. It has a shape and no elements.

    Index it with integers, slices, None and `...`; `reshape`/`view`, `transpose`/`permute`/`T`, `flatten`,
    `squeeze`, `unsqueeze` and `broadcast_to`/`expand` as in NumPy and torch. No step copies.
    """

    __array_ufunc__ = None  # NumPy leaves operators alone
    __slots__ = ("_offset", "_shape", "_strides", "_watcher", "indices", "recipe", "root")

    def __init__(
        self, watcher: Watcher, root: Root, recipe: Recipe = WHOLE, indices: tuple[int, ...] = ()
    ) -> None:
        self._watcher, self.root, self.recipe, self.indices = watcher, root, recipe, indices
        found = follow(recipe, root.shape, root.strides)
        for index, limit in zip(indices, found.limits, strict=True):
            if index >= limit:
                raise IndexError(f"index {index} is out of bounds: {limit} at most, exclusive")
        self._shape, self._strides = found.shape, found.strides
        self._offset = found.offset + sum(i * s for i, s in zip(indices, found.steps, strict=True))

    @property
    def shape(self) -> Shape:
        """Its extents. A program whose function looked at one is recorded anew for other shapes."""
        self._watcher.looked = True
        return self._shape

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self._shape)

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return self.root.dtype

    def seen(self) -> ArrayView:
        """What checks see of it."""
        count = 1
        for extent in self._shape:
            count *= extent
        return ArrayView(
            self.root.address + self._offset * ITEMSIZE[self.root.dtype],
            self._shape,
            self._strides,
            self.root.dtype,
            self.root.readonly,
            self,
            count,
            _same_walk(self._shape, self._strides, _contiguous_strides(self._shape)),
            self.root.stream,
        )

    def _step(self, step: tuple[Any, ...], indices: tuple[int, ...] = ()) -> Symbolic:
        return Symbolic(self._watcher, self.root, (*self.recipe, step), self.indices + indices)

    def __getitem__(self, key: Any) -> Symbolic:
        keys: list[Any] = []
        indices: list[int] = []
        parts = key if isinstance(key, tuple) else (key,)
        used = sum(1 for part in parts if part is not None and part is not Ellipsis)
        dim = 0
        for part in parts:
            if part is None:
                keys.append("new")
                continue
            if part is Ellipsis:
                keys.append("...")
                dim += self.ndim - used
                continue
            extent = self._shape[dim] if dim < self.ndim else 0
            if isinstance(part, slice):
                start, stop, step = part.start, part.stop, part.step
                bounded = all(bound is None or hasattr(bound, "__index__") for bound in (start, stop, step))
                if not bounded:
                    raise ArgumentError(f"{part!r}: slices of a recorded array take integers")
                if step in (None, 1) and stop is not None and 0 <= (start or 0) <= stop <= extent:
                    keys.append(("s", int(stop) - int(start or 0)))
                    indices.append(int(start or 0))
                else:
                    keys.append(("l", start, stop, step))
            elif isinstance(part, bool) or not hasattr(part, "__index__"):
                raise ArgumentError(
                    f"a recorded array is indexed by integers, slices, None and ..., not by {part!r}: "
                    "use an operator such as index_select"
                )
            elif (index := part.__index__()) >= 0:
                if index >= extent:
                    raise IndexError(f"index {index} is out of bounds for dim {dim} of shape {self._shape}")
                keys.append("i")
                indices.append(index)
            else:
                keys.append(("n", index))
            dim += 1
        return self._step(("index", tuple(keys)), tuple(indices))

    def __iter__(self) -> Iterator[Symbolic]:
        for index in range(len(self)):
            yield self[index]

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of a recorded array without dims")
        return self.shape[0]

    def reshape(self, *shape: Any) -> Symbolic:
        """Another shape for the same elements in order; one extent may be -1. Never a copy."""
        return self._step(("reshape", _extents(shape)))

    view = reshape

    def flatten(self) -> Symbolic:
        """All elements in one dim."""
        return self.reshape(-1)

    def permute(self, *axes: Any) -> Symbolic:
        """The dims in another order; reversed where none is given."""
        given = _extents(axes) or tuple(range(self.ndim))[::-1]
        return self._step(("permute", given))

    def transpose(self, *axes: Any) -> Symbolic:
        """NumPy's; of two dims among more it is torch's, those two change places."""
        given = _extents(axes)
        if given == (0, 1) and self.ndim == 2:
            raise ArgumentError("transpose(0, 1) of two dims: NumPy and torch differ; use .T or permute")
        if len(given) == 2 and self.ndim != 2:
            order = list(range(self.ndim))
            a, b = given
            order[a], order[b] = order[b], order[a]
            return self.permute(*order)
        return self.permute(*given)

    @property
    def T(self) -> Symbolic:
        """The dims in reverse order."""
        return self.permute()

    def unsqueeze(self, dim: int) -> Symbolic:
        """A new dim of extent 1 before `dim`."""
        at = dim if dim >= 0 else dim + self.ndim + 1
        return self._step(("index", (*[("l", None, None, None)] * at, "new", "...")))

    def squeeze(self, dim: int) -> Symbolic:
        """Without `dim`, whose extent must be 1."""
        at = dim if dim >= 0 else dim + self.ndim
        self._watcher.looked = True
        if self._shape[at] != 1:
            raise ArgumentError(f"squeeze({dim}) of shape {self._shape}: the extent is not 1")
        return self._step(("index", (*[("l", None, None, None)] * at, ("n", -1), "...")))

    def broadcast_to(self, *shape: Any) -> Symbolic:
        """Repeated to a shape, by steps of 0; -1 keeps an extent."""
        return self._step(("expand", _extents(shape)))

    expand = broadcast_to

    def _no_elements(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            "a recorded array has no elements yet: compute with the Runtime's operators, and read results "
            "from the ticket of a call of the program"
        )

    __array__ = __bool__ = __float__ = __int__ = __add__ = __radd__ = __sub__ = __rsub__ = _no_elements
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __neg__ = __setitem__ = _no_elements

    def __repr__(self) -> str:
        return f"<recorded {self.root.kind} {self.root.number}, shape {self._shape}>"


def _extents(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    return tuple(int(extent.__index__()) for extent in shape)


class SymbolicNumber:
    """A number among a program's arguments. It may be an operand or a parameter, and nothing else."""

    __slots__ = ("number", "value")

    def __init__(self, number: int, value: float) -> None:
        self.number, self.value = number, value

    def _no_value(self, *_: Any) -> NoReturn:
        raise ArgumentError(
            "a number among a program's arguments changes with every call: compute with it before the call, "
            "and pass the result"
        )

    __float__ = __int__ = __index__ = __bool__ = __add__ = __radd__ = __sub__ = __rsub__ = _no_value
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __lt__ = __gt__ = _no_value

    def __repr__(self) -> str:
        return f"<recorded number {self.number}, now {self.value!r}>"
