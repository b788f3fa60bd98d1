"""The audit log: what happened to the operators of this user's executors, one line of JSON each.

Each line holds the hash of the one before and is signed with the user's secret; a signed head beside the log
says how many lines there are and what the last one is. So an edited, reordered, forged or removed line shows,
at the end of the log too. What does not show is that log and head were both put back to an earlier state.

Lines are appended under a file lock, the line before the head: after a crash between the two the head is one
line behind, which `verify` knows from a cut log. Both are on the disk within moments, which nobody waits for;
a power cut in between may lose the last lines, and `verify` says that they are missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import platformdirs

from ..errors import IntegrityError
from .signing import load_secret, sign, verify

AUDIT_VARIABLE: Final = "GPUOS_AUDIT_FILE"
BEGINNING: Final = "0" * 64
"""What the first line holds as the hash of the one before."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened.

    Attributes:
        what: "inject", "replace", "swap", "rollback", "refuse", ...
        name, template: of the operator.
        key: content key of its code.
        signature: of its cache entry, hexadecimal.
        outcome: "ok", or why not.
        generation: number of the operator set that it led to, or None.
        timings_s: seconds by stage.
        detail: anything else, for people.
    """

    what: str
    name: str = ""
    template: str = ""
    key: str = ""
    signature: str = ""
    outcome: str = "ok"
    generation: int | None = None
    timings_s: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


def audit_file() -> Path:
    """GPUOS_AUDIT_FILE, or in the platform's folder for the user's logs."""
    given = os.environ.get(AUDIT_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_state_dir("gpuos_numba")) / "audit.jsonl"


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


class _Disk:
    """A thread that brings files to the disk. What is asked for meanwhile is done in its next turn."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[Path, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="gpuos-audit", daemon=True).start()

    def ask(self, *paths: Path) -> None:
        self._wanted.put(paths)

    def _serve(self) -> None:
        while True:
            paths = {*self._wanted.get()}
            with contextlib.suppress(queue.Empty):
                while True:
                    paths |= {*self._wanted.get_nowait()}
            for path in sorted(paths):
                with contextlib.suppress(OSError):  # it is written; the system brings it to the disk later
                    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        os.fsync(handle)
                    finally:
                        os.close(handle)


@functools.cache
def _disk() -> _Disk:
    return _Disk()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disk.cache_clear)  # a child has none of the threads


def _to_disk(*paths: Path) -> None:
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and begins no thread
        _disk().ask(*paths)


class AuditLog:
    """The log of one user.

    Args:
        path: default `audit_file()`.
        secret: default the user's, see `signing`.
    """

    def __init__(self, path: Path | None = None, secret: bytes | None = None) -> None:
        self.path = audit_file() if path is None else Path(path)
        self.head_path = self.path.with_name(self.path.name + ".head")
        self._secret = load_secret() if secret is None else secret

    def append(self, event: Event) -> dict[str, Any]:
        """Write an event down, with who and when. Returns the line as data.

        Raises:
            OSError: it cannot be written.
        """
        with self._locked(), self._open() as log:
            number, previous, lost = self._end(log)
            if lost:  # what is gone stays visible: the chain goes on from a line that says so
                number, previous = self._write(log, number, previous, Event("audit", outcome=lost))[:2]
            number, previous, record = self._write(log, number, previous, event)
            self._write_head(number, previous, os.fstat(log).st_size)
        _to_disk(self.path, self.head_path)
        return record

    def lines(self) -> list[dict[str, Any]]:
        """The lines as they are, verified or not; those that are no JSON as {"unreadable": text}."""
        found: list[dict[str, Any]] = []
        for text in self._texts():
            try:
                record = json.loads(text)
                found.append(record if isinstance(record, dict) else {"unreadable": text})
            except ValueError:
                found.append({"unreadable": text})
        return found

    def verify(self) -> list[str]:
        """What is wrong with the log, in words. Empty: every line is as it was written, and all are there."""
        problems: list[str] = []
        with self._locked(create=False):
            texts = self._texts()
            head = self._read_head()
        previous = BEGINNING
        hashes: list[str] = []
        for place, text in enumerate(texts, 1):
            problem = self._check_line(text, place, previous)
            if problem:
                problems.append(f"line {place}: {problem}")
            previous = _hash(text)
            hashes.append(previous)
        if isinstance(head, str):
            if texts or head != "missing":
                problems.append(f"head: {head}, so lines may be missing at the end")
        else:
            lines, last = int(head["lines"]), str(head["last"])
            if lines > len(hashes):
                problems.append(f"head: {lines} lines were written, {len(hashes)} are here")
            elif lines and hashes[lines - 1] != last:
                problems.append(f"head: line {lines} is not the one that was written")
            elif len(hashes) > lines + 2:  # two: a crash behind a line and the line that says what was lost
                problems.append(f"head: says {lines} lines, {len(hashes)} are here")
        return problems

    # --- inside ---

    def _texts(self) -> list[str]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return data.decode("utf-8", "replace").removesuffix("\n").split("\n") if data else []

    def _check_line(self, text: str, place: int, previous: str) -> str | None:
        try:
            record = json.loads(text)
            signature = bytes.fromhex(record.pop("mac"))
            if _canonical({**record, "mac": signature.hex()}) != text:
                return "is not as it was written"
        except (ValueError, KeyError, TypeError, AttributeError):
            return "is no line of an audit log"
        if not verify(self._secret, "audit", str(record.get("line")), _canonical(record).encode(), signature):
            return "was edited: its signature is not right"
        if record["line"] != place:
            return f"is line {record['line']} of the log: lines were removed or reordered"
        if not hmac.compare_digest(str(record["previous"]), previous):
            return "does not follow the line before it: lines were removed or reordered"
        if record["what"] == "audit":
            return f"the log was damaged when this was written: {record['outcome']}"
        return None

    def _end(self, log: int) -> tuple[int, str, str]:
        """(lines, hash of the last one, what was lost) to go on from."""
        head = self._read_head()
        size = os.fstat(log).st_size
        if not isinstance(head, str) and head["bytes"] == size:
            return int(head["lines"]), str(head["last"]), ""
        texts = self._texts()
        if isinstance(head, str):
            if not texts:
                return 0, BEGINNING, "" if head == "missing" else f"head {head}"
            return len(texts), _hash(texts[-1]), f"head {head}"
        lines, last = int(head["lines"]), str(head["last"])
        hashes = [_hash(text) for text in texts]
        if len(hashes) >= lines and (not lines or hashes[lines - 1] == last):
            # A crash came between line and head, or somebody wrote lines, which their signatures will show.
            if size and os.pread(log, 1, size - 1) != b"\n":
                os.write(log, b"\n")
                return len(texts), hashes[-1], "a line was cut off"
            return len(hashes), hashes[-1] if hashes else last, ""
        return lines, last, f"{lines} lines were written, what is here is not those"

    def _write(self, log: int, number: int, previous: str, event: Event) -> tuple[int, str, dict[str, Any]]:
        record: dict[str, Any] = {
            "line": number + 1,
            "previous": previous,
            "when": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": _who(),
            **asdict(event),
        }
        record["timings_s"] = {stage: round(float(took), 6) for stage, took in event.timings_s.items()}
        record["mac"] = sign(self._secret, "audit", str(number + 1), _canonical(record).encode()).hex()
        text = _canonical(record)
        data = (text + "\n").encode()
        if os.write(log, data) != len(data):
            raise OSError(f"audit log {self.path}: a line was cut off; is the disk full?")
        return number + 1, _hash(text), record

    def _read_head(self) -> dict[str, Any] | str:
        """The head, or why there is none."""
        try:
            text = self.head_path.read_text("ascii")
        except FileNotFoundError:
            return "missing"
        except (OSError, ValueError):
            return "unreadable"
        try:
            head = json.loads(text)
            mac = bytes.fromhex(head.pop("mac"))
            whole = {"bytes": int(head["bytes"]), "last": str(head["last"]), "lines": int(head["lines"])}
        except (ValueError, KeyError, TypeError, AttributeError):
            return "unreadable"
        if not verify(self._secret, "audit-head", "", _canonical(whole).encode(), mac):
            return "not signed by this user's key"
        return whole

    def _write_head(self, lines: int, last: str, size: int) -> None:
        head: dict[str, Any] = {"bytes": size, "last": last, "lines": lines}
        head["mac"] = sign(self._secret, "audit-head", "", _canonical(head).encode()).hex()
        part = self.head_path.with_name(f".{self.head_path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(_canonical(head))
            os.replace(part, self.head_path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path, flags, 0o600)
        try:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
                raise IntegrityError(f"audit log {self.path} is not this user's alone to write: move it away")
            yield handle
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _locked(self, create: bool = True) -> Iterator[None]:
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            if create:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            if create:
                raise
            yield  # nothing to lock: reading alone
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()} pid {os.getpid()}"
