"""Content keys: everything that machine code depends on arrives, one hash leaves.

Equal keys mean interchangeable code. So a key covers the rendered source, the sources of this library that it
calls, the versions of all tools between them and the machine, and the target.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from ..descriptor import ABI_VERSION
from ..templates import templates_folder
from .request import SCHEMA

KEY_LENGTH: Final = 64
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_TOOLS: Final = (
    "numba",
    "numba-cuda",
    "llvmlite",
    "numpy",
    "cuda-core",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc",
)
_TOOLS_CU12: Final = ("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12")


@functools.cache
def toolchain_versions() -> Mapping[str, str]:
    """Versions of the tools by name; one that is not here is "none"."""
    versions = {"python": platform.python_version(), "implementation": sys.implementation.name}
    for name in (*_TOOLS, *_TOOLS_CU12):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    versions["ptxas"] = ptxas_version()
    return versions


@functools.cache
def ptxas_version() -> str:
    """What `ptxas --version` says of itself, "none" where there is none on the path."""
    path = shutil.which("ptxas")
    if path is None:
        return "none"
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "none"
    found = re.search(r"\bV(\d+(?:\.\d+)+)\b", said)
    return found[1] if found else "unknown"


@functools.cache
def library_digest() -> str:
    """Hash of the sources that injected code is compiled together with."""
    digest = hashlib.sha256()
    files = [_PACKAGE / "descriptor.py", _PACKAGE / "protocol.py"]
    for folder in ("device", "machines"):
        files += sorted((_PACKAGE / folder).rglob("*.py"))
    named = [(file.relative_to(_PACKAGE).as_posix(), file) for file in files]
    named += [(file.name, file) for file in sorted(templates_folder().glob("*.jinja"))]
    for name, file in named:
        text = file.read_bytes()
        digest.update(f"{name}:{len(text)}:".encode() + text)
    return digest.hexdigest()


def cuda_target(capability: tuple[int, int]) -> str:
    """ "sm_90" for (9, 0)."""
    return f"sm_{capability[0]}{capability[1]}"


@functools.cache
def cpu_target() -> str:
    """ "cpu-" and the host's name as LLVM knows it, with a hash of its features: a hypervisor hides some."""
    from llvmlite import binding

    features = hashlib.sha256(binding.get_host_cpu_features().flatten().encode()).hexdigest()[:12]
    return f"cpu-{binding.get_host_cpu_name()}-{features}"


def content_key(
    source: str, target: str, toolchain: Mapping[str, str] | None = None, library: str | None = None
) -> str:
    """The key of what `source` compiles to on `target`, 64 hexadecimal digits.

    Args:
        source: as rendered.
        target: see `cuda_target` and `cpu_target`.
        toolchain, library: default this process's.
    """
    material = {
        "schema": SCHEMA,
        "abi": ABI_VERSION,
        "library": library_digest() if library is None else library,
        "source": source,
        "toolchain": dict(toolchain_versions() if toolchain is None else toolchain),
        "target": target,
        "system": [sys.platform, platform.machine()],
    }
    text = json.dumps(material, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
