"""The watch: positions that wait for a stream, or that a stream waits for, arrive; launches leave at once.

A stream opens a withheld task and does not look whether anybody serves (host/streams.py). So while there are
such tasks a thread of its own looks, in compiled code and without the GIL, and launches within microseconds.
The ways not taken: a host function in the stream stops the stream for its length, may not launch, and needs
the GIL; a launch queued behind an event of the stream holds up the launches that must finish the tasks before
it.

The thread begins with the first such task. It ends its watch when the pump has passed the last one, lingers
for about a millisecond, and sleeps.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from ..descriptor import MASK_64
from ..errors import MachineError
from ..machines.base import Machine
from . import ring
from .lease import Keeper

SLICE_NS: Final = 100_000_000
RETRY_S: Final = 0.005


class Watch:
    """Watches one executor. It knows the parts of a Runtime and not the Runtime, which may be forgotten."""

    def __init__(self, machine: Machine, keeper: Keeper, host: Any) -> None:
        self._machine, self._keeper, self._host = machine, keeper, host
        arrays = machine.arrays
        self._address = arrays.address
        self._watched, self._ingested = arrays.words["watched"], arrays.state["ingested"]
        self._closing = arrays.launch["closing"]
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def until_passed(self, position: int) -> None:
        """Watch until the pump has passed `position`. One caller at a time."""
        after = (position + 1) & MASK_64
        if (after - int(self._watched[0])) & MASK_64 < 1 << 63:
            self._watched[0] = after
        if not self._wanted.is_set():
            self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpuos-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; after `Keeper.stop`."""
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _passed(self) -> bool:
        return (int(self._ingested[0]) - int(self._watched[0])) & MASK_64 < 1 << 63

    def _run(self) -> None:
        self._machine.adopt_thread()
        while True:
            self._wanted.wait()
            if self._closing[0]:
                return
            answer = self._host.stand_watch(self._address, time.monotonic_ns() + SLICE_NS)
            if answer == ring.DONE:
                self._wanted.clear()
                if not self._passed() or self._closing[0]:  # asked for meanwhile
                    self._wanted.set()
            elif answer == ring.PARKED:
                try:
                    self._keeper.ensure_served()
                except MachineError as error:
                    self._keeper.error = str(error)
                if self._keeper.parked:
                    time.sleep(RETRY_S)  # it failed, or launches are held back
