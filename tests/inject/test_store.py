"""The cache returns what this user put there, or nothing: whatever is done to it, never anything else."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuos_numba.errors import ArgumentError
from gpuos_numba.inject import store
from gpuos_numba.inject.store import MAGIC, Problem, Store, cache_folder, file_name

A, B = "a" * 64, "b" * 64
SECRET, OTHER = b"s" * 32, b"o" * 32
PAYLOAD = bytes(range(256)) * 4
ROOT = os.geteuid() == 0


class Kept(Store):
    """A store that keeps what it reports."""

    def __init__(self, folder: Path, secret: bytes = SECRET) -> None:
        self.problems: list[Problem] = []
        super().__init__(folder, secret, self.problems.append)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    made = Kept(tmp_path / "cache")
    assert made.put("cubin", A, PAYLOAD) and made.put("cubin", B, PAYLOAD[::-1])
    assert made.get("cubin", A) == PAYLOAD
    return made


def path_of(kept: Store, key: str = A) -> Path:
    return kept.folder / file_name("cubin", key)


def test_what_was_put_is_got(kept: Kept) -> None:
    assert kept.get("cubin", B) == PAYLOAD[::-1]
    assert kept.get("ltoir", A) is None and kept.get("cubin", "c" * 64) is None
    assert kept.put("cubin", A, b"") and kept.get("cubin", A) == b""
    assert [(each.kind, each.key) for each in kept.entries()] == [("cubin", A), ("cubin", B)]
    assert kept.verify() == [] and kept.problems == []
    assert path_of(kept).stat().st_mode & 0o777 == 0o600 and kept.folder.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_was_never_used_is_empty(tmp_path: Path) -> None:
    empty = Kept(tmp_path / "none")
    assert empty.get("cubin", A) is None and empty.entries() == [] and empty.verify() == []
    assert empty.clear() == 0 and empty.problems == [] and not empty.folder.exists()


@pytest.mark.parametrize(
    "name", [("cubin", "../" + "a" * 61), ("cubin", "A" * 64), ("x", A), ("cubin", ""), ("cubin", A + "\n")]
)
def test_only_keys_are_keys(kept: Kept, name: tuple[str, str]) -> None:
    with pytest.raises(ArgumentError):
        kept.get(*name)
    with pytest.raises(ArgumentError):
        kept.put(*name, b"")


def refused(kept: Kept) -> None:
    """The entry A is refused, reported, moved aside, and can be put anew."""
    assert kept.get("cubin", A) is None
    assert len(kept.problems) == 1 and "refused" in str(kept.problems[0])
    assert not path_of(kept).exists()
    assert kept.get("cubin", A) is None and len(kept.problems) == 1
    assert kept.get("cubin", B) == PAYLOAD[::-1]
    assert kept.put("cubin", A, PAYLOAD) and kept.get("cubin", A) == PAYLOAD


def test_a_flip_of_any_byte_is_refused(kept: Kept) -> None:
    data = path_of(kept).read_bytes()
    assert len(data) == len(MAGIC) + 32 + 96 + len(PAYLOAD)
    for at in [*range(len(MAGIC) + 32 + 96 + 8), *range(200, len(data), 97), len(data) - 1]:
        path_of(kept).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert kept.get("cubin", A) is None, at
        path_of(kept).write_bytes(data)
        assert kept.get("cubin", A) == PAYLOAD
    refusals = len(kept.problems)
    assert refusals > 140


@pytest.mark.parametrize("length", [0, 1, 7, 8, 39, 40, 135, 136, 137, 1000, -1])
def test_a_truncated_entry_is_refused(kept: Kept, length: int) -> None:
    data = path_of(kept).read_bytes()
    path_of(kept).write_bytes(data[:length])
    refused(kept)


def test_more_bytes_than_were_written_are_refused(kept: Kept) -> None:
    with path_of(kept).open("ab") as file:
        file.write(b"\0")
    refused(kept)


def test_two_entries_in_each_others_place_are_refused(kept: Kept) -> None:
    spare = kept.folder / "spare"
    path_of(kept).rename(spare)
    path_of(kept, B).rename(path_of(kept))
    spare.rename(path_of(kept, B))
    assert kept.get("cubin", A) is None and kept.get("cubin", B) is None
    assert len(kept.problems) == 2 and "another key" in str(kept.problems[0])


def test_an_entry_of_another_kind_is_refused(kept: Kept) -> None:
    path_of(kept).rename(kept.folder / file_name("ltoir", A))
    assert kept.get("ltoir", A) is None and kept.get("cubin", A) is None and len(kept.problems) == 1


def test_an_entry_that_another_key_signed_is_refused(kept: Kept) -> None:
    Kept(kept.folder, OTHER).put("cubin", A, b"evil")
    refused(kept)


def test_links_folders_and_pipes_are_no_entries(kept: Kept, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    path_of(kept).rename(elsewhere)
    path_of(kept).symlink_to(elsewhere)
    refused(kept)
    path_of(kept).unlink()
    os.mkfifo(path_of(kept))
    kept.problems.clear()
    assert kept.get("cubin", A) is None and "plain file" in str(kept.problems[0])
    path_of(kept).mkdir()
    kept.problems.clear()
    assert kept.get("cubin", A) is None and len(kept.problems) == 1


def test_a_linked_folder_is_refused(kept: Kept, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(kept.folder)
    linked = Kept(link)
    assert linked.get("cubin", A) is None and not linked.put("cubin", A, b"x")
    assert "link" in str(linked.problems[0]) and "link" in str(linked.verify()[0])
    assert kept.get("cubin", A) == PAYLOAD


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(kept: Kept, mode: int) -> None:
    kept.folder.chmod(mode)
    assert kept.get("cubin", A) is None and not kept.put("cubin", A, b"x")
    assert "others may write" in str(kept.problems[0]) and "chmod" in str(kept.verify()[0])


def test_a_file_in_the_folders_place_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Kept(tmp_path / "file")
    assert not kept.put("cubin", A, b"x") and kept.get("cubin", A) is None
    below = Kept(tmp_path / "file" / "cache")
    assert not below.put("cubin", A, b"x") and below.problems


@pytest.mark.parametrize("error", [28, 30, 13])  # no space, read-only, not permitted
@pytest.mark.parametrize("call", ["replace", "open"])
def test_a_full_or_read_only_disk_costs_the_cache_alone(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, error: int, call: str
) -> None:
    real_open = os.open

    def fail(*arguments: object, **keywords: object) -> int:
        if call == "open" and not int(arguments[1]) & os.O_CREAT:  # type: ignore[call-overload]
            return real_open(*arguments, **keywords)  # type: ignore[arg-type]
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert not kept.put("cubin", "c" * 64, PAYLOAD)
    assert [os.strerror(error) in str(each) for each in kept.problems] == [True]
    assert kept.get("cubin", A) == PAYLOAD
    assert kept.get("cubin", "c" * 64) in (None, PAYLOAD)
    assert not [name for name in os.listdir(kept.folder) if name.startswith(".part")]


def test_a_disk_that_is_full_within_an_entry_costs_the_cache_alone(kept: Kept) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert not kept.put("cubin", "c" * 64, bytes(300_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [os.strerror(27) in str(each) for each in kept.problems] == [True]  # file too large
    assert kept.get("cubin", A) == PAYLOAD and kept.get("cubin", "c" * 64) is None
    assert not [name for name in os.listdir(kept.folder) if name.startswith(".part")]


@pytest.mark.skipif(ROOT, reason="root writes to read-only folders")
def test_a_read_only_folder_is_read(kept: Kept) -> None:
    kept.folder.chmod(0o500)
    assert kept.get("cubin", A) == PAYLOAD and not kept.put("cubin", A, b"x") and kept.problems
    kept.folder.chmod(0o700)


def test_a_problem_warns_once(kept: Kept) -> None:
    kept.folder.chmod(0o777)
    loud = Store(kept.folder, SECRET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert loud.get("cubin", A) is None and not loud.put("cubin", A, b"x")
    assert len(caught) == 1 and "others may write" in str(caught[0].message)


def test_without_a_usable_key_there_is_no_cache(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = tmp_path / "signing.key"
    key.write_bytes(SECRET)
    key.chmod(0o666)
    monkeypatch.setenv("GPUOS_KEY_FILE", str(key))
    problems: list[Problem] = []
    keyless = Store(kept.folder, report=problems.append)
    assert not keyless.usable and "open to others" in str(problems[0])
    assert keyless.get("cubin", A) is None and not keyless.put("cubin", A, b"x") and keyless.verify()
    key.chmod(0o600)
    assert Store(kept.folder).get("cubin", A) == PAYLOAD


def test_verify_names_what_is_wrong_and_moves_nothing(kept: Kept) -> None:
    path_of(kept).write_bytes(b"")
    (kept.folder / "stranger").write_text("")
    before = sorted(os.listdir(kept.folder))
    assert [each.path.name for each in kept.verify()] == [path_of(kept).name, "stranger"]
    assert sorted(os.listdir(kept.folder)) == before and kept.problems == []
    assert kept.get("cubin", A) is None
    assert [each.path.name for each in kept.verify()] == [path_of(kept).name + ".refused", "stranger"]


def test_clear_removes_its_own_files_alone(kept: Kept) -> None:
    (kept.folder / "stranger").write_text("")
    (kept.folder / ".part-1-x").write_text("")
    assert kept.clear() == 3 and os.listdir(kept.folder) == ["stranger"]
    assert kept.get("cubin", A) is None and kept.entries() == []


def test_what_a_killed_process_left_is_swept(kept: Kept) -> None:
    old, new = kept.folder / ".part-1-old", kept.folder / ".part-1-new"
    old.write_text("")
    new.write_text("")
    os.utime(old, (0, time.time() - 2 * store.STALE_S))
    kept.put("cubin", A, PAYLOAD)
    assert new.exists() and not old.exists()


def test_the_place_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUOS_CACHE_DIR", str(tmp_path / "c"))
    assert cache_folder() == tmp_path / "c"
    monkeypatch.delenv("GPUOS_CACHE_DIR")
    assert cache_folder().name == "gpuos_numba"


def _write_and_read(folder: Path, number: int) -> None:
    kept = Kept(folder)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        kept.put("cubin", A, bytes([number]) * 5000)
        got = kept.get("cubin", A)
        assert got is not None and len(got) == 5000 and len(set(got)) == 1
    assert kept.problems == [], kept.problems


def _write_for_ever(folder: Path) -> None:
    kept = Kept(folder)
    number = 0
    while True:
        number += 1
        kept.put("cubin", A, bytes([number & 255]) * 50_000)


@pytest.fixture
def processes() -> Iterator[multiprocessing.context.BaseContext]:
    yield multiprocessing.get_context("spawn")


def test_processes_share_a_cache(tmp_path: Path, processes: multiprocessing.context.BaseContext) -> None:
    workers = [processes.Process(target=_write_and_read, args=(tmp_path / "c", n)) for n in (1, 2, 3)]  # type: ignore[attr-defined]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]


def test_a_killed_process_leaves_no_entry_that_is_half(
    tmp_path: Path, processes: multiprocessing.context.BaseContext
) -> None:
    for delay in (0.0, 0.003, 0.011):
        worker = processes.Process(target=_write_for_ever, args=(tmp_path / "c",))  # type: ignore[attr-defined]
        worker.start()
        kept = Kept(tmp_path / "c")
        until = time.monotonic() + 30
        while not kept.entries() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(30)
        got = kept.get("cubin", A)
        assert got is not None and len(got) == 50_000 and len(set(got)) == 1 and kept.problems == []
