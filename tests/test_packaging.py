"""The wheel carries what the package needs when there is no checkout around it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built offline by the installed hatchling."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(CHECKOUT)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def test_wheel_has_every_module_and_the_typing_marker(wheel: zipfile.ZipFile) -> None:
    modules = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "gpuos_numba").rglob("*.py")}
    assert {*modules, "gpuos_numba/py.typed"} <= set(wheel.namelist())


def test_wheel_has_every_template_unchanged(wheel: zipfile.ZipFile) -> None:
    templates = sorted((CHECKOUT / "templates").rglob("*.jinja"))
    assert templates
    for path in templates:
        name = f"gpuos_numba/_templates/{path.relative_to(CHECKOUT / 'templates')}"
        assert wheel.read(name) == path.read_bytes()


def test_wheel_installs_nothing_beside_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gpuos_numba"}


def test_installed_wheel_reads_its_own_templates(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel.extractall(site)
    code = "from gpuos_numba.templates import templates_folder; print(templates_folder())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()) == (site / "gpuos_numba" / "_templates").resolve()


def test_metadata_names_licence_python_and_extras(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {"cu12", "cu13", "torch", "notebooks"}


@pytest.mark.parametrize("extra", ["cu12", "cu13"])
def test_cuda_extra_brings_compiler_assembler_and_arrays(metadata: Message, extra: str) -> None:
    wanted = [line for line in metadata.get_all("Requires-Dist", []) if f"extra == '{extra}'" in line]
    major = extra.removeprefix("cu")
    nvcc = "nvidia-cuda-nvcc-cu12" if extra == "cu12" else "nvidia-cuda-nvcc"
    for name in (f"numba-cuda[{extra}]", f"cupy-cuda{major}x", nvcc, "nvidia-ml-py"):
        assert any(line.startswith(f"{name}<") or line.startswith(f"{name}>") for line in wanted), name
