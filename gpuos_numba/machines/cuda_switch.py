"""The switch over injected ids: ids and symbols arrive, what the linker takes leaves.

The linker takes PTX, but compiles it: 10 ms and 1 ms a body, most of what a link then takes. So ptxas
assembles the switch of a generation that is to come while its new bodies are compiled, and the cache keeps
it. The key covers the text, which holds every id and every symbol, and a symbol holds its body's content key:
what is not exactly this switch is not found, and then the PTX is linked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..device import switch
from ..errors import MachineError
from ..inject.keys import content_key, cuda_target
from ..inject.store import Store

Cases = Sequence[tuple[int, str]]

_lock = threading.Lock()
_begun: dict[str, Future[bytes]] = {}
"""By key: what is being assembled, or was and is not linked yet."""


def _after_fork() -> None:
    """A child has none of the threads: what they were at is begun anew where it is asked for."""
    global _lock
    _lock = threading.Lock()
    _begun.clear()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def switch_key(text: str, capability: tuple[int, int], threads: int) -> str:
    """The content key of a switch's cubin."""
    return content_key(f"{text}\n// switch, {threads} threads", cuda_target(capability))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "gpuos-switch")


def begin(capability: tuple[int, int], threads: int, cases: Cases) -> None:
    """Have the switch of (id, symbol) assembled, unless the cache has it. Returns at once."""
    text = switch.render_injected(cases)
    key = switch_key(text, capability, threads)
    if Store().get("object", key) is not None:
        return
    with _lock:
        if key in _begun:
            return
        for known in [each for each, made in _begun.items() if made.done()]:
            del _begun[known]  # that generation never came; it is in the cache
        _begun[key] = _pool().submit(_assemble, text, key, capability, threads)


def _assemble(text: str, key: str, capability: tuple[int, int], threads: int) -> bytes:
    from .cuda_compile import assemble, find_ptxas

    ptxas = find_ptxas()
    if ptxas is None:
        raise MachineError("there is no ptxas")
    cubin, _ = assemble(text, capability, threads, ptxas)
    Store().put("object", key, cubin)
    return cubin


def get(capability: tuple[int, int], threads: int, cases: Cases) -> bytes:
    """The switch of (id, symbol): its cubin where it was begun or is in the cache, otherwise PTX."""
    text = switch.render_injected(cases)
    key = switch_key(text, capability, threads)
    with _lock:
        begun = _begun.pop(key, None)
    if begun is not None:
        with contextlib.suppress(MachineError, OSError):  # the linker says what is wrong with it
            return begun.result()
        return text.encode()
    found = Store().get("object", key)
    if found is not None:
        return found
    begin(capability, threads, cases)  # for the next time
    return text.encode()
