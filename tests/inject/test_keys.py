"""A content key changes with everything that machine code depends on, and with nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpuos_numba.inject import keys
from gpuos_numba.inject.keys import content_key, cpu_target, cuda_target, library_digest, toolchain_versions

TOOLS = {"numba": "1", "python": "3.11.7"}


def test_equal_things_have_equal_keys() -> None:
    key = content_key("source", "sm_90", TOOLS, "library")
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert key == content_key("source", "sm_90", dict(reversed(TOOLS.items())), "library")
    assert content_key("s", "sm_90") == content_key("s", "sm_90")


@pytest.mark.parametrize(
    "other",
    [
        ("source ", "sm_90", TOOLS, "library"),
        ("source", "sm_80", TOOLS, "library"),
        ("source", "sm_90", {**TOOLS, "numba": "2"}, "library"),
        ("source", "sm_90", {**TOOLS, "ptxas": "1"}, "library"),
        ("source", "sm_90", TOOLS, "library2"),
    ],
)
def test_whatever_differs_changes_the_key(other: Any) -> None:
    assert content_key(*other) != content_key("source", "sm_90", TOOLS, "library")


def test_abi_and_schema_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = content_key("source", "sm_90", TOOLS, "library")
    for name in ("ABI_VERSION", "SCHEMA"):
        with monkeypatch.context() as patch:
            patch.setattr(keys, name, 999)
            assert content_key("source", "sm_90", TOOLS, "library") != key


def test_the_toolchain_is_told_by_its_versions() -> None:
    versions = toolchain_versions()
    assert {"numba", "numba-cuda", "llvmlite", "ptxas", "python"} <= set(versions)
    assert re.match(r"\d+\.\d+", versions["numba"]) and re.match(r"\d+\.\d+\.", versions["python"])
    assert re.fullmatch(r"none|unknown|\d+(\.\d+)+", versions["ptxas"])


def test_targets() -> None:
    assert cuda_target((9, 0)) == "sm_90" and cuda_target((10, 0)) == "sm_100"
    assert re.fullmatch(r"cpu-\S+-[0-9a-f]{12}", cpu_target())


def test_the_library_is_part_of_the_key() -> None:
    assert re.fullmatch("[0-9a-f]{64}", library_digest())
