"""Shapes and strides: broadcasting operands against each other, and walking them as flat as they allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from .errors import ArgumentError

Shape = tuple[int, ...]
Strides = tuple[int, ...]


class Shaped(Protocol):
    """Anything with a shape."""

    @property
    def shape(self) -> Shape: ...


class Walked(Shaped, Protocol):
    """And strides, in elements."""

    @property
    def strides(self) -> Strides: ...


def broadcast_shape(views: Sequence[Shaped], names: Sequence[str]) -> tuple[int, ...]:
    """The shape that NumPy's rules give the operands together. Raises ArgumentError."""
    first = views[0].shape if views else ()
    if all(view.shape == first for view in views):
        return first
    shape = [1] * max(len(view.shape) for view in views)
    for view in views:
        for dim in range(-len(view.shape), 0):
            extent = view.shape[dim]
            if shape[dim] == 1:
                shape[dim] = extent
            elif extent not in (1, shape[dim]):
                shapes = ", ".join(f"{n} {v.shape}" for n, v in zip(names, views, strict=True))
                raise ArgumentError(
                    f"shapes do not broadcast: {shapes} (dimension {dim}: {shape[dim]} against {extent}); "
                    "reshape the operands so that aligned from the right each extent is equal or 1"
                )
    return tuple(shape)


def aligned_strides(view: Walked, shape: Shape) -> Strides:
    """The view's strides over `shape`, 0 where it is broadcast."""
    if view.shape == shape:
        return view.strides
    lead = len(shape) - len(view.shape)
    if lead < 0:
        raise ArgumentError(
            f"an operand of shape {view.shape} does not broadcast to {shape}: it has more dims"
        )
    strides = [0] * lead
    for extent, stride, target in zip(view.shape, view.strides, shape[lead:], strict=True):
        if extent == target:
            strides.append(stride)
        elif extent == 1:
            strides.append(0)
        else:
            raise ArgumentError(
                f"an operand of shape {view.shape} does not broadcast to {shape}: {extent} against {target}"
            )
    return tuple(strides)


def collapse(shape: Shape, strides: Sequence[Strides]) -> tuple[Shape, list[Strides]]:
    """The flattest shape that walks every operand in the same row-major order.

    Dims of extent 1 go, and neighbours merge where all operands step evenly across them. All contiguous gives
    one dim of stride 1, one element gives (), no elements gives (0,).
    """
    flat, walks = _collapse(tuple(shape), tuple(strides))
    return flat, list(walks)


@lru_cache(maxsize=4096)
def _collapse(shape: Shape, strides: tuple[Strides, ...]) -> tuple[Shape, tuple[Strides, ...]]:
    if 0 in shape:
        return (0,), ((1,),) * len(strides)
    flat: list[int] = []
    walks: list[list[int]] = [[] for _ in strides]
    for dim, extent in enumerate(shape):
        if extent == 1:
            continue
        if flat and all(walk[-1] == step[dim] * extent for walk, step in zip(walks, strides, strict=True)):
            flat[-1] *= extent
            for walk, step in zip(walks, strides, strict=True):
                walk[-1] = step[dim]
        else:
            flat.append(extent)
            for walk, step in zip(walks, strides, strict=True):
                walk.append(step[dim])
    return tuple(flat), tuple(map(tuple, walks))
