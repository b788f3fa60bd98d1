"""The board: a Runtime's live figures leave, whoever runs `python -m gpuos_numba top` reads them.

A file that both map into memory, in the user's runtime folder: no socket, no thread, no port, and nothing to
do while nobody looks. The reader stores until when it looks; the keeper's thread finds that at its next tick
and only then samples and writes. The file is the user's alone, locked while its process lives, and removed at
close; one that is not locked is a dead process's, and the next reader removes it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import platformdirs

from ..descriptor import MASK_64, TASK, TASK_BYTES
from ..errors import MachineError
from ..machines.base import Machine
from ..protocol import WorkerState

if sys.platform != "win32":
    import fcntl

FOLDER_VARIABLE: Final = "GPUOS_RUNTIME_DIR"
"""Where boards are, instead of the user's runtime folder."""
SUFFIX: Final = ".board"
SIZE: Final = 1 << 16
MAGIC: Final = b"GPUOSb1\n"
PERIOD_NS: Final = 200_000_000
"""A watched board is written this often."""

# Magic | until when somebody looks (monotonic ns; readers) | version, odd while it is written | length | text
_ASKED, _VERSION, _LENGTH, _TEXT = 8, 16, 24, 32
_WORD = struct.Struct("<Q")
_numbers = count(1)


def folder() -> Path:
    """Where boards are."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that XDG_RUNTIME_DIR is not set; `_is_ours` looks at what is taken
        return Path(platformdirs.user_runtime_dir("gpuos_numba"))


def _is_ours(path: Path) -> bool:
    """A folder that only this user can write."""
    if not hasattr(os, "getuid"):
        return path.is_dir()
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


class Board:
    """One file, mapped. The process that made it writes, others ask and read."""

    def __init__(self, path: Path, file: int) -> None:
        self.path, self._file = path, file
        self._map = mmap.mmap(file, SIZE)

    @classmethod
    def create(cls) -> Board | None:
        """A new board for this process; None where there is no folder to put it in."""
        try:
            place = folder()
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(place):
                return None
            path = place / f"{os.getpid()}-{next(_numbers)}{SUFFIX}"
            part = path.with_suffix(".part")
            with contextlib.suppress(FileNotFoundError):
                part.unlink()  # of a dead process that had this number
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError:
            return None
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.ftruncate(file, SIZE)
            board = cls(path, file)
            board._map[: len(MAGIC)] = MAGIC
            part.replace(path)  # whole and locked before anybody finds it
        except (OSError, ValueError):
            os.close(file)
            return None
        return board

    @classmethod
    def attach(cls, path: Path) -> Board | None:
        """Another process's board; None where it is none, or its process is dead: then it is removed."""
        try:
            file = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            return None
        try:
            if _is_stale(path, file):
                path.unlink(missing_ok=True)
            elif os.fstat(file).st_size == SIZE:
                board = cls(path, file)
                if board._map[: len(MAGIC)] == MAGIC:
                    return board
                board._map.close()
        except (OSError, ValueError):
            pass
        os.close(file)
        return None

    @property
    def pid(self) -> int:
        return int(self.path.name.partition("-")[0])

    def ask(self, seconds: float) -> None:
        """The reader will look for so long."""
        _WORD.pack_into(self._map, _ASKED, time.monotonic_ns() + int(seconds * 1e9))

    @property
    def asked(self) -> bool:
        """Whether somebody looks."""
        return bool(_WORD.unpack_from(self._map, _ASKED)[0] > time.monotonic_ns())

    def write(self, figures: dict[str, Any]) -> None:
        text = json.dumps(figures).encode()
        if len(text) > SIZE - _TEXT:
            return
        version = _WORD.unpack_from(self._map, _VERSION)[0]
        _WORD.pack_into(self._map, _VERSION, version + 1)
        _WORD.pack_into(self._map, _LENGTH, len(text))
        self._map[_TEXT : _TEXT + len(text)] = text
        _WORD.pack_into(self._map, _VERSION, version + 2)

    def read(self) -> dict[str, Any] | None:
        """The figures last written; None before the first time, or where they are being written."""
        version = _WORD.unpack_from(self._map, _VERSION)[0]
        length = min(_WORD.unpack_from(self._map, _LENGTH)[0], SIZE - _TEXT)
        text = bytes(self._map[_TEXT : _TEXT + length])
        if version == 0 or version & 1 or _WORD.unpack_from(self._map, _VERSION)[0] != version:
            return None
        try:
            figures = json.loads(text)
        except ValueError:  # torn: stores may have been seen in another order
            return None
        return figures if isinstance(figures, dict) else None

    def close(self, remove: bool = False) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        self._map.close()
        file, self._file = self._file, -1  # another thread may close it, too
        if file >= 0:
            os.close(file)


def _is_stale(path: Path, file: int) -> bool:
    """Whether the process that made it is gone. A number may have been given again: the lock tells."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
    else:
        try:
            os.kill(int(path.name.partition("-")[0]), 0)
        except (OSError, ValueError):
            return True
        return False


def boards() -> Iterator[Board]:
    """Those of all living processes of this user."""
    try:
        place = folder()
        if not _is_ours(place):
            return
        paths = sorted(place.glob(f"*{SUFFIX}"))
    except OSError:
        return
    for path in paths:
        board = Board.attach(path)
        if board is not None:
            yield board


class Figures:
    """What a Runtime's keeper puts on its board.

    Operators are counted in the ring: nothing is added to the way of a task. Where a lap passes between two
    ticks, what is left of it stands for all. Times are samples of what the workers do.

    Args:
        board: where they go; None where there is none.
        machine: whose.
        stats: the Runtime's counters, as plain data.
        names: operator names of op_ids.
    """

    def __init__(
        self,
        board: Board | None,
        machine: Machine,
        stats: Callable[[], dict[str, Any]],
        names: Callable[[int], str],
    ) -> None:
        self.board, self._machine, self._stats, self._names = board, machine, stats, names
        arrays = machine.arrays
        self._ops = arrays.ring.view(np.uint32)[:: TASK_BYTES // 4]
        assert TASK.fields is not None and TASK.fields["op_id"][1] == 0
        self._claimed, self._ingested = arrays.words["claimed"], arrays.state["ingested"]
        self._watched = False
        self._forget()

    def _forget(self) -> None:
        self._counted = int(self._ingested[0])
        self._tasks: dict[int, float] = {}
        self._busy_s: dict[int, float] = {}
        self._exact = True
        self._since = self._sampled = self._written = time.monotonic_ns()
        self._running = self._samples = 0

    def attend(self) -> None:
        """At each tick of the keeper: a look, and the work where somebody looks as well."""
        board = self.board
        if board is None or not board.asked:
            self._watched = False
            return
        if not self._watched:
            self._watched = True
            self._forget()
            self._written = 0  # at once
        self._count()
        self._sample()
        now = time.monotonic_ns()
        if now - self._written >= PERIOD_NS:
            self._written = now
            board.write(self._figures(now))

    def _count(self) -> None:
        ingested, capacity = int(self._ingested[0]), len(self._ops)
        new = (ingested - self._counted) & MASK_64
        if new == 0 or new >> 63:
            return
        look = min(new, capacity, 4096)
        seen = self._ops[(ingested % capacity - look + np.arange(look)) % capacity]
        # A producer may have claimed a slot for its next lap meanwhile: what is older does not count.
        claimed = int(self._claimed[0])
        overtaken = look + ((claimed - ingested) & MASK_64) - capacity
        seen = seen[max(0, overtaken) :]
        if len(seen):
            self._exact &= len(seen) == new
            ops, counts = np.unique(seen, return_counts=True)
            for op, number in zip(ops.tolist(), counts.tolist(), strict=True):
                self._tasks[op] = self._tasks.get(op, 0.0) + number * new / len(seen)
            self._counted = ingested

    def _sample(self) -> None:
        now = time.monotonic_ns()
        passed, self._sampled = (now - self._sampled) / 1e9, now
        try:
            words = self._machine.read("worker_states").view(np.uint64)[::2]
        except MachineError:
            return
        busy = words[words & 0xFF == WorkerState.RUNNING] >> 8
        self._running += len(busy)
        self._samples += 1
        for op in busy.tolist():
            self._busy_s[op] = self._busy_s.get(op, 0.0) + passed

    def _figures(self, now: int) -> dict[str, Any]:
        operators: dict[str, dict[str, float]] = {}
        for op in self._tasks.keys() | self._busy_s.keys():
            entry = operators.setdefault(self._names(op), {"tasks": 0.0, "busy_s": 0.0})
            entry["tasks"] += self._tasks.get(op, 0.0)
            entry["busy_s"] += self._busy_s.get(op, 0.0)
        running = self._running / self._samples if self._samples else 0.0
        self._running = self._samples = 0
        return {
            "pid": os.getpid(),
            "program": os.path.basename(sys.argv[0]) if sys.argv else "",
            "at_ns": now,
            "watched_s": (now - self._since) / 1e9,
            "busy_workers": running,
            "max_workers": self._machine.max_workers,
            "operators": operators,
            "exact": self._exact,
            **self._stats(),
        }
