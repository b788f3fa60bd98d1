"""Holds: while they are taken, executors leave and nobody launches them.

For what the driver does only while nothing runs on the GPU, such as to load a module: another Runtime of the
process would keep it waiting for as long as its lease, or for ever. A hold is taken and given back by one
compiled call each, which notes that it was taken: a Ctrl-C comes before or after, and who has not taken a
hold gives none back.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..machines.base import Body, HostPrimitives
from ..protocol import HOST_CONTEXT, HOST_CONTROL, HOST_LAUNCH, HOST_WORDS, field
from .ring import make_lock_launches, make_unlock_launches

if TYPE_CHECKING:
    from .lease import Keeper

HELD_EXECUTOR: Final = np.dtype([("host", "<u8"), ("taken", "<u8")])
"""host: address of the executor's HOST_CONTEXT; taken: 1 while its launches are held back for this holder."""


@cache
def make_change_holds(m: HostPrimitives) -> Body:
    """`change_holds(executors, count, me, take)`: take the hold of each HELD_EXECUTOR, or give it back."""
    u64, load_u64, store_u64 = m.u64, m.load_u64, m.store_u64
    load_relaxed_sys, load_acquire_sys = m.load_relaxed_sys, m.load_acquire_sys
    store_relaxed_sys, store_release_sys = m.store_relaxed_sys, m.store_release_sys
    lock, unlock = make_lock_launches(m), make_unlock_launches(m)
    LAUNCH, HOLDS = u64(field(HOST_CONTEXT, "launch")), u64(field(HOST_LAUNCH, "holds"))
    WORDS, ENQUEUED = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_WORDS, "enqueued"))
    CONTROL, REQUEST = u64(field(HOST_CONTEXT, "control")), u64(field(HOST_CONTROL, "park_request"))
    TAKEN, SIZE = u64(field(HELD_EXECUTOR, "taken")), u64(HELD_EXECUTOR.itemsize)
    ZERO, ONE = u64(0), u64(1)

    def change_holds(executors: Any, count: Any, me: Any, take: Any) -> None:
        index = ZERO
        while index < count:
            at = executors + index * SIZE
            index += ONE
            if load_u64(at + TAKEN) != take:
                host = load_u64(at)
                launch = load_u64(host + LAUNCH)
                # This thread has it where the garbage collector ends a Runtime while another's is decided.
                mine = load_relaxed_sys(launch) == me
                if not mine:
                    lock(host, me)
                if take != ZERO:
                    store_release_sys(launch + HOLDS, load_u64(launch + HOLDS) + ONE)
                    enqueued = load_acquire_sys(load_u64(host + WORDS) + ENQUEUED)
                    store_relaxed_sys(load_u64(host + CONTROL) + REQUEST, enqueued)
                else:
                    store_release_sys(launch + HOLDS, load_u64(launch + HOLDS) - ONE)
                store_u64(at + TAKEN, take)
                if not mine:
                    unlock(host, me)

    return m.device(change_holds)


@cache
def compiled() -> SimpleNamespace:
    """`change_holds`, compiled to run without the GIL."""
    from numba import njit, types

    from ..machines import cpu_memory as m

    change = njit(types.void(*[types.uint64] * 4), nogil=True)(make_change_holds(m).py_func)  # type: ignore[attr-defined]
    return SimpleNamespace(change_holds=change)


class Holds:
    """Of some executors, by one thread:

        holds = keeper.holds()
        try:
            holds.take()
            if holds.wait(10.0): ...
        finally:
            holds.give_back()
        holds.serve()

    Attributes:
        take: ask every launch to leave, and hold back others. Returns at once.
        give_back: what was taken. Neither is a function of Python, where a Ctrl-C might come first.
    """

    def __init__(self, keepers: Iterable[Keeper]) -> None:
        self._keepers = tuple(keepers)
        executors = self._executors = np.zeros(max(1, len(self._keepers)), HELD_EXECUTOR)
        executors["host"][: len(self._keepers)] = [keeper.address for keeper in self._keepers]
        address, count, me = executors.ctypes.data, len(self._keepers), threading.get_ident()
        change = compiled().change_holds
        self.take: Callable[[], None] = partial(change, address, count, me, 1)
        self.give_back: Callable[[], None] = partial(change, address, count, me, 0)

    def wait(self, timeout_s: float) -> bool:
        """Whether every launch has left within so long, or is about to because its Runtime closes."""
        until = time.monotonic() + timeout_s
        return all(
            keeper.wait_left(max(0.0, until - time.monotonic())) or keeper.closing for keeper in self._keepers
        )

    def serve(self) -> None:
        """Launch where work has come meanwhile. Without it the keepers do, within their period."""
        for keeper in self._keepers:
            keeper.serve_again()


class Registry:
    """The executors of this process whose machine loads only while nothing runs, weakly."""

    def __init__(self) -> None:
        self._keepers: dict[int, weakref.ref[Keeper]] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._keepers.clear)

    def add(self, keeper: Keeper) -> None:
        key, keepers = id(keeper), self._keepers
        keepers[key] = weakref.ref(keeper, lambda _: keepers.pop(key, None))

    def of(self, device: int) -> list[Keeper]:
        """Those on a GPU that are not closing."""
        found = [reference() for reference in list(self._keepers.values())]
        return [keeper for keeper in found if keeper and keeper.device == device and not keeper.closing]
