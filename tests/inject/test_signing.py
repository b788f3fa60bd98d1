"""Only this user's key signs, and a key that others can read or write is none."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuos_numba.errors import IntegrityError
from gpuos_numba.inject.signing import SECRET_BYTES, SIGNATURE_BYTES, key_file, load_secret, sign, verify


def test_a_key_is_made_once_and_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "signing.key"
    secret = load_secret(path)
    assert len(secret) == SECRET_BYTES and load_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["signing.key"]


def test_many_who_make_a_key_at_once_get_one(tmp_path: Path) -> None:
    for round_number in range(20):
        path = tmp_path / str(round_number) / "signing.key"
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(load_secret, [path] * 8))) == 1
        assert os.listdir(path.parent) == ["signing.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o666, 0o644, 0o777, 0o610])
def test_a_key_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "signing.key"
    load_secret(path)
    path.chmod(mode)
    with pytest.raises(IntegrityError, match="open to others"):
        load_secret(path)


def test_links_folders_pipes_and_damaged_keys_are_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "signing.key", tmp_path / "other"
    load_secret(other)
    path.symlink_to(other)
    with pytest.raises(IntegrityError, match="link"):
        load_secret(path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(IntegrityError, match="link"):
        load_secret(path)
    path.unlink()
    for data in (b"", b"short", b"x" * (SECRET_BYTES + 1)):
        path.touch(0o600)
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="damaged"):
            load_secret(path)
        assert path.read_bytes() == data  # left for its owner to look at
    path.unlink()
    path.mkdir()
    with pytest.raises((IntegrityError, IsADirectoryError)):
        load_secret(path)


def test_the_place_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUOS_KEY_FILE", str(tmp_path / "k"))
    assert key_file() == tmp_path / "k"
    monkeypatch.delenv("GPUOS_KEY_FILE")
    assert key_file().name == "signing.key" and key_file().is_absolute()


parts = st.tuples(st.text(max_size=8), st.text(max_size=8), st.binary(max_size=16))


@settings(max_examples=200, deadline=None, database=None)
@given(parts, parts, st.binary(min_size=4, max_size=8))
def test_a_signature_is_of_one_thing_alone(
    one: tuple[str, str, bytes], other: tuple[str, str, bytes], secret: bytes
) -> None:
    signature = sign(secret, *one)
    assert len(signature) == SIGNATURE_BYTES and verify(secret, *one, signature)
    assert verify(secret, *other, signature) == (one == other)
    assert not verify(secret + b"x", *one, signature)
    assert not verify(secret, *one, signature[:-1]) and not verify(secret, *one, b"")


def test_parts_cannot_lend_to_each_other() -> None:
    assert sign(b"k", "ab", "c", b"") != sign(b"k", "a", "bc", b"") != sign(b"k", "a", "b", b"c")
