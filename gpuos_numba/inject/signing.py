"""Signatures: a payload with its type and content key arrives, 32 bytes leave that only this user can make.

The secret is a file of the user's that nobody else can read. Whoever can write to the cache but not read the
secret can make the cache miss, and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import Final

import platformdirs

from ..errors import IntegrityError

SECRET_BYTES: Final = 32
SIGNATURE_BYTES: Final = 32
KEY_FILE_VARIABLE: Final = "GPUOS_KEY_FILE"
_DOMAIN: Final = b"gpuos_numba signature 1"


def key_file() -> Path:
    """Where the secret is: GPUOS_KEY_FILE, or in the user's configuration folder."""
    given = os.environ.get(KEY_FILE_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_config_dir("gpuos_numba")) / "signing.key"


def load_secret(path: Path | None = None) -> bytes:
    """The secret, made where there is none.

    Raises:
        IntegrityError: the file is a link, another user's, readable by others, or damaged. It stays as it is.
        OSError: it can be neither read nor made.
    """
    path = key_file() if path is None else path
    for _ in range(2):
        try:
            return _read_secret(path)
        except FileNotFoundError:
            _make_secret(path)
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise IntegrityError(f"key file {path} is a link: replace it by a file, or remove it") from error
        raise
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise IntegrityError(f"key file {path} is not a plain file: remove it")
        if about.st_uid != os.geteuid():
            raise IntegrityError(f"key file {path} belongs to user {about.st_uid}: set {KEY_FILE_VARIABLE}")
        if about.st_mode & 0o077:
            raise IntegrityError(
                f"key file {path} is open to others (mode {stat.S_IMODE(about.st_mode):04o}): remove it, "
                "and what it signed is compiled anew"
            )
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise IntegrityError(f"key file {path} is damaged: remove it, and what it signed is compiled anew")
    return secret


def _make_secret(path: Path) -> None:
    """Whole or not at all, and never over another process's."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first: its secret is as good
            os.link(part, path, follow_symlinks=False)
    finally:
        os.unlink(part)


def sign(secret: bytes, kind: str, key: str, payload: bytes) -> bytes:
    """HMAC-SHA256 over type, content key and payload, with lengths, so that none can lend to another."""
    mac = hmac.new(secret, _DOMAIN, hashlib.sha256)
    for part in (kind.encode(), key.encode(), payload):
        mac.update(struct.pack("<Q", len(part)))
        mac.update(part)
    return mac.digest()


def verify(secret: bytes, kind: str, key: str, payload: bytes, signature: bytes) -> bool:
    """Whether the signature is that of type, key and payload. Takes the same time wherever they differ."""
    return hmac.compare_digest(sign(secret, kind, key, payload), signature)
