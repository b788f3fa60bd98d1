"""The lease: who launches the executor, when, and how wide.

A launch parks by itself (device/pump.py, decide). A producer or a waiter that finds nobody serving launches
(host/ring.py, relaunch; `ensure_served` where only Python can); the keeper thread does the same for tasks
that nobody waits for, queues a spare launch before the running lease ends, and keeps the heartbeat. It
sleeps, in compiled code, while the executor is parked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from ..config import Config
from ..descriptor import MASK_64
from ..errors import MachineError
from ..machines.base import Machine
from .holds import Holds, Registry

EXECUTORS: Final = Registry()
"""Those of this process on GPUs."""

TICK_S = 0.005
"""The keeper's period where no lease asks for a shorter one. The pump gives a silent host 2 s."""


ASLEEP_TICKS = 50
"""While the executor is parked the keeper comes back after so many ticks, for who looks at the board."""


class Keeper:
    """Launches of one executor."""

    def __init__(self, machine: Machine, config: Config, host: Any, tidy: Callable[[], None]) -> None:
        self._machine, self._host = machine, host
        self._control, self._state = machine.arrays.control, machine.arrays.state
        self._words, self._address = machine.arrays.words, machine.arrays.address
        self.address, self.device = self._address, machine.device
        # Views of single words: looking a field up by name takes longer than reading it.
        self._enqueued, self._claimed = self._words["enqueued"], self._words["claimed"]
        self._parked, self._ingested = self._state["parked"], self._state["ingested"]
        launch = machine.arrays.launch
        self._holds, self._closing = launch["holds"], launch["closing"]
        launch["quiet"], launch["most"] = machine.quiet_workers, machine.max_workers
        self._leased = config.lease_s is not None
        tick_s = min(TICK_S, config.lease_s / 4) if config.lease_s is not None else TICK_S
        self._tick_us = max(1, int(tick_s * 1e6))
        self._control["lease_ns"] = int((config.lease_s or 0) * 1e9)
        idle_s = 0.0 if config.idle_s is None else max(config.idle_s, machine.idle_floor_s)
        self._control["idle_ns"] = int(idle_s * 1e9)
        self._control["hold_ns"] = int(max(config.hold_s, machine.idle_floor_s) * 1e9)
        self.error: str | None = None
        """Why the last launch failed, if it did. No exception: its frames would keep the Runtime alive."""
        # The thread must not keep a forgotten Runtime alive: it holds the keeper and a weak `tidy`.
        self._tidy = weakref.WeakMethod(tidy) if hasattr(tidy, "__self__") else (lambda: tidy)
        self._thread = threading.Thread(target=self._keep, name="gpuos-keeper", daemon=True)
        self._begun = threading.Event()
        if machine.loads_parked:
            EXECUTORS.add(self)

    def start(self) -> None:
        """Begin the threads, once somebody is there who will `stop`. Raises MachineError."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise MachineError(f"the keeper: {error}") from error
        self._begun.wait()
        if self.error is not None:
            raise MachineError(self.error)

    @property
    def closing(self) -> bool:
        return bool(self._closing[0])

    @property
    def launches(self) -> int:
        return int(self._enqueued[0])

    @property
    def parked(self) -> bool:
        """Nobody serves, and no launch is on its way."""
        return int(self._parked[0]) == int(self._enqueued[0])

    @property
    def withheld(self) -> bool:
        """Parked before a task that waits for a stream: a launch could do nothing."""
        return self.parked and not self._host.nobody_serves(self._address)

    def _unserved(self) -> bool:
        return int(self._claimed[0]) != int(self._ingested[0])

    def _is_watched(self) -> bool:
        """host/watch.py sees to launches."""
        return (int(self._ingested[0]) - int(self._words["watched"][0])) & MASK_64 >= 1 << 63

    def _allowed(self) -> bool:
        return not self._holds[0] and not self._closing[0]

    # Who decides of launches holds the lock on them, and waits for no task. To take it and to give it back is
    # one compiled call each, the latter the first in a `finally`: no Ctrl-C comes between.

    def ensure_served(self) -> None:
        """Launch if nobody serves. Raises MachineError where the launch fails."""
        if not self.parked:
            return
        me = threading.get_ident()
        try:
            self._host.lock_launches(self._address, me)
            if self._allowed() and self.parked and not self.withheld:
                self._launch()
        finally:
            self._host.unlock_launches(self._address, me)

    def _launch(self) -> None:
        """What `host.ring.make_relaunch` does, for machines and threads where only Python can launch."""
        quiet, most = self._machine.quiet_workers, self._machine.max_workers
        narrow = quiet < most and self._host.backlog(self._address, 2 * quiet) <= 2 * quiet
        # A narrow launch parks early when work piles up; whoever notices launches again, wide.
        self._control["widen_at"] = 4 * quiet if narrow else 0
        try:
            self._machine.launch(quiet if narrow else most)
        except Exception as error:
            self.error = str(error)
            raise

    def holds(self, everyone: bool = False) -> Holds:
        """Holds of this executor; of every one of this process on its GPU."""
        return Holds({self, *EXECUTORS.of(self.device)} if everyone else (self,))

    def wait_left(self, timeout_s: float) -> bool:
        """Whether every launch has left."""
        return self._machine.wait_exited(timeout_s)

    def serve_again(self) -> None:
        """Launch if there is work and nobody serves."""
        if self._unserved():
            self.ensure_served()

    def hand_over(self, swap: bool = False) -> None:
        """Have every launch leave that was queued before; swap: for the standby generation.

        One that is queued here follows on the device, so that nobody waits for the host.
        """
        me = threading.get_ident()
        try:
            self._host.lock_launches(self._address, me)
            if swap:
                self._machine.swap()
            if not swap or self._machine.loads_parked:
                before = self.launches
                try:
                    if self._allowed() and not self.parked and not self._is_watched():
                        self._launch()
                finally:
                    self._control["park_request"] = before
        finally:
            self._host.unlock_launches(self._address, me)

    def stop(self) -> bool:
        """End the keeper thread and launch no more. Returns whether it has ended."""
        me = threading.get_ident()
        try:
            self._host.lock_launches(self._address, me)
            self._closing[0] = 1
            self._control["park_request"] = self.launches
        finally:
            self._host.unlock_launches(self._address, me)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def _keep(self) -> None:
        claimed = -1
        try:
            self._machine.start()
        except RuntimeError as error:
            self.error = f"the machine's threads: {error}"
            return
        finally:
            self._begun.set()
        while True:
            self._host.doze(self._address, self._tick_us, ASLEEP_TICKS)
            if self._closing[0]:
                return
            self._control["heartbeat"] += 1
            before, claimed = claimed, int(self._words["claimed"][0])
            # Held through the turn: the collector, which comes anywhere, ends no Runtime in the middle of it.
            tidy = self._tidy()
            try:
                if tidy is not None:
                    tidy()
                    self._turn(claimed != before)
            except Exception as error:
                self.error = str(error)
            finally:
                del tidy

    def _turn(self, busy: bool) -> None:
        """See that somebody serves, and goes on to; busy: tasks have come since the last time."""
        if self.parked:
            self.serve_again()
            return
        self._machine.nudge()
        if (
            self._leased
            and busy
            and self._state["begun"][0] == self.launches
            and not self._is_watched()  # a spare would begin where the next task is withheld
        ):
            me = threading.get_ident()
            try:
                self._host.lock_launches(self._address, me)
                if self._allowed():
                    self._launch()  # the spare: begins when the lease that runs is over
            finally:
                self._host.unlock_launches(self._address, me)
