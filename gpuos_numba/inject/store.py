"""The cache of compiled operators: a content key arrives, bytes that this user signed leave, or None.

One file an entry, written beside its place and moved there whole: readers see all of it or nothing, and
processes need no lock. An entry is verified each time it is read. Whatever does not verify is moved aside and
reported, and the caller compiles; so is what a power cut left half written, and nobody waits for the disk.
A cache that cannot be used is none: that never fails an injection.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from ..errors import ArgumentError, IntegrityError
from .keys import KEY_LENGTH
from .signing import SIGNATURE_BYTES, load_secret, sign, verify

CACHE_VARIABLE: Final = "GPUOS_CACHE_DIR"
KINDS: Final = ("cubin", "ltoir", "object", "source")
"""Types of payload."""

MAGIC: Final = b"GPUOS\x001\n"
MAX_BYTES: Final = 256 << 20
STALE_S: Final = 3600.0
"""A part that a killed process left is swept after this long."""

_ENTRY: Final = re.compile(rf"({'|'.join(KINDS)})-([0-9a-f]{{{KEY_LENGTH}}})\.gpuos", re.ASCII)
_PART: Final = ".part-"
_REFUSED: Final = ".refused"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something in the cache is not used.

    Attributes:
        path: what.
        why: in words, with the remedy where there is one.
    """

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache.

    Attributes:
        kind, key: as its name says.
        size: bytes of the file.
        written_at: seconds since the epoch.
        path: where it is.
    """

    kind: str
    key: str
    size: int
    written_at: float
    path: Path


Report = Callable[[Problem], None]


def cache_folder() -> Path:
    """GPUOS_CACHE_DIR, or the platform's cache folder of the user."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_cache_dir("gpuos_numba"))


def file_name(kind: str, key: str) -> str:
    """Raises ArgumentError where these are no type and content key."""
    name = f"{kind}-{key}.gpuos"
    if not _ENTRY.fullmatch(name):
        raise ArgumentError(f"kind={kind!r}, key={key!r}: give one of {', '.join(KINDS)} and a content key")
    return name


def pack(secret: bytes, kind: str, key: str, payload: bytes) -> bytes:
    """An entry's file: magic, signature, name, payload. The signature covers all that follows it."""
    name = file_name(kind, key).encode()
    return MAGIC + sign(secret, kind, key, payload) + name.ljust(96, b"\0") + payload


def unpack(secret: bytes, kind: str, key: str, data: bytes) -> bytes:
    """The payload. Raises ValueError, which says what is wrong, unless this user wrote it under this name."""
    start = len(MAGIC) + SIGNATURE_BYTES + 96
    if len(data) < start or not data.startswith(MAGIC):
        raise ValueError("truncated or no cache entry")
    signature, name = data[len(MAGIC) : len(MAGIC) + SIGNATURE_BYTES], data[start - 96 : start]
    if name != file_name(kind, key).encode().ljust(96, b"\0"):
        raise ValueError("the entry of another key")
    payload = data[start:]
    if not verify(secret, kind, key, payload, signature):
        raise ValueError("the signature is not that of this user's key")
    return payload


class Store:
    """A cache folder.

    Args:
        folder: default `cache_folder()`.
        secret: what entries are signed with; default the user's, see `signing`.
        report: called with each Problem; default warns, once for each.
    """

    def __init__(
        self, folder: Path | None = None, secret: bytes | None = None, report: Report | None = None
    ) -> None:
        self.folder = cache_folder() if folder is None else Path(folder)
        self._report = report
        self._reported: set[str] = set()
        self._secret = secret
        if secret is None:
            try:
                self._secret = load_secret()
            except OSError as error:  # IntegrityError too
                self._tell(Problem(self.folder, f"the cache is not used: {error}"))

    @property
    def usable(self) -> bool:
        """Whether there is a secret; without one nothing is read or written."""
        return self._secret is not None

    def get(self, kind: str, key: str) -> bytes | None:
        """A payload, None where there is none or none that verifies."""
        name = file_name(kind, key)
        if self._secret is None:
            return None
        with self._open(create=False) as folder:
            if folder is None:
                return None
            try:
                data = _read(folder, name)
                return unpack(self._secret, kind, key, data)
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:
                self._refuse(folder, name, str(error))
                return None

    def put(self, kind: str, key: str, payload: bytes) -> bool:
        """Keep a payload. False, with a report, where that cannot be."""
        name = file_name(kind, key)
        if self._secret is None:
            return False
        if len(payload) > MAX_BYTES:
            raise ArgumentError(f"a payload of {len(payload)} bytes: at most {MAX_BYTES}")
        data = pack(self._secret, kind, key, payload)
        with self._open(create=True) as folder:
            if folder is None:
                return False
            part = f"{_PART}{os.getpid()}-{secrets.token_hex(8)}"
            try:
                _write(folder, part, data)
                os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                self._tell(Problem(self.folder, f"nothing is kept in the cache: {error.strerror or error}"))
                return False
            self._sweep(folder)
        return True

    def signature(self, kind: str, key: str, payload: bytes) -> str:
        """What the entry of a payload is signed with, hexadecimal; empty where there is no secret."""
        return "" if self._secret is None else sign(self._secret, kind, key, payload).hex()

    def entries(self) -> list[Entry]:
        """All entries by their names, whether they verify or not."""
        found = []
        with self._open(create=False) as folder:
            for name in sorted(os.listdir(folder)) if folder is not None else []:
                match = _ENTRY.fullmatch(name)
                if match:
                    about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    path = self.folder / name
                    found.append(Entry(match[1], match[2], about.st_size, about.st_mtime, path))
        return found

    def verify(self) -> list[Problem]:
        """What is wrong with the folder and each entry. Moves nothing."""
        problems: list[Problem] = []
        if self._secret is None:
            return [Problem(self.folder, "there is no usable key file: nothing can be verified")]
        with self._open(create=False, tell=problems.append) as folder:
            for entry in self.entries() if folder is not None else []:
                assert folder is not None
                try:
                    unpack(self._secret, entry.kind, entry.key, _read(folder, entry.path.name))
                except (OSError, ValueError) as error:
                    problems.append(Problem(entry.path, str(error)))
            for name in sorted(os.listdir(folder)) if folder is not None else []:
                if name.endswith(_REFUSED):
                    problems.append(Problem(self.folder / name, "was refused before and moved aside"))
                elif not _ENTRY.fullmatch(name) and not name.startswith(_PART):
                    problems.append(Problem(self.folder / name, "is no cache entry"))
        return problems

    def clear(self) -> int:
        """Remove every entry, and what was refused or left over. Returns how many files went."""
        gone = 0
        with self._open(create=False) as folder:
            for name in os.listdir(folder) if folder is not None else []:
                if _ENTRY.fullmatch(name) or name.startswith(_PART) or name.endswith(_REFUSED):
                    os.unlink(name, dir_fd=folder)
                    gone += 1
        return gone

    # --- inside ---

    @contextlib.contextmanager
    def _open(self, create: bool, tell: Report | None = None) -> Iterator[int | None]:
        """The folder as a descriptor, so that what is used is what was checked; None if it is no good."""
        tell = tell or self._tell
        handle = None
        try:
            if create:
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)
            handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            _check_folder(self.folder, handle)
        except FileNotFoundError:
            pass
        except OSError as error:
            link = self.folder.is_symlink()
            why = "it is a link: name the folder itself" if link else str(error.strerror or error)
            tell(Problem(self.folder, f"the cache is not used: {why}"))
            if handle is not None:
                os.close(handle)
                handle = None
        try:
            yield handle
        finally:
            if handle is not None:
                os.close(handle)

    def _refuse(self, folder: int, name: str, why: str) -> None:
        moved = "it was moved aside"
        try:
            os.replace(name, name + _REFUSED, src_dir_fd=folder, dst_dir_fd=folder)
        except FileNotFoundError:
            pass  # another process was first
        except OSError as error:
            moved = f"it stays, for it cannot be moved ({error.strerror})"
        self._tell(Problem(self.folder / name, f"refused: {why}; {moved} and is compiled anew"))

    def _tell(self, problem: Problem) -> None:
        if self._report is not None:
            self._report(problem)
        elif str(problem) not in self._reported:
            self._reported.add(str(problem))
            warnings.warn(f"gpuos_numba cache: {problem}", RuntimeWarning, stacklevel=4)

    def _sweep(self, folder: int) -> None:
        """Remove parts that killed processes left."""
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith(_PART):
                    if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > STALE_S:
                        os.unlink(name, dir_fd=folder)


def _check_folder(path: Path, handle: int) -> None:
    about = os.fstat(handle)
    if about.st_uid != os.geteuid():
        raise IntegrityError(f"it belongs to user {about.st_uid}: set {CACHE_VARIABLE}")
    if about.st_mode & 0o022:
        raise IntegrityError(
            f"others may write to it (mode {stat.S_IMODE(about.st_mode):04o}): chmod go-w {path}"
        )


def _read(folder: int, name: str) -> bytes:
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("not a plain file")
        if about.st_size > MAX_BYTES + 4096:
            raise ValueError("too large for a cache entry")
        return file.read()


def _write(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags, 0o600, dir_fd=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
