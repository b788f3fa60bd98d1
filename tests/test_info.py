"""`python -m gpuos_numba info`: whatever is missing or unsuitable is a sentence that says how to mend it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpuos_numba import info
from gpuos_numba.__main__ import app
from gpuos_numba.info import Facts, Gpu, judge

ROOT = Path(__file__).resolve().parent.parent
SOUND = Facts(
    "3.12.3",
    "0.1.0",
    "/somewhere",
    {"numpy": "2.4.6", "numba": "0.68.1", "numba-cuda": "0.30.4", "cuda-bindings": "13.3.1"},
    [Gpu("NVIDIA H200", (9, 0), 132, 139.8)],
    (13, 0),
    ptxas="/cuda/bin/ptxas",
    linker=True,
    cache="/home/cache",
)


def said(facts: Facts) -> dict[str, str]:
    """Remedies by what they are about."""
    return {each.about: f"{each.state} -> {each.remedy}" for each in judge(facts) if each.remedy}


def test_a_sound_machine_has_nothing_to_mend() -> None:
    assert said(SOUND) == {}
    assert judge(SOUND)[-1].state == "takes the GPU (NVIDIA H200)"


def test_no_driver_is_a_sentence_and_the_cpu_serves() -> None:
    without = replace(SOUND, gpus=[], driver_cuda=None, driver_error="no NVIDIA driver is installed")
    assert "install NVIDIA's driver" in said(without)["driver"]
    assert judge(without)[-1].state.startswith("takes the CPU")


def test_a_driver_that_is_too_old_is_to_be_updated() -> None:
    old = replace(SOUND, driver_cuda=(11, 4))
    assert "serves CUDA 11.4 only -> update" in said(old)["driver"]
    assert judge(old)[-1].state.startswith("takes the CPU")


def test_packages_for_a_newer_cuda_than_the_drivers_name_the_other_extra() -> None:
    assert said(replace(SOUND, driver_cuda=(12, 4)))["driver"].endswith("pip install 'gpuos_numba[cu12]'")


def test_a_gpu_before_ampere_is_sent_to_the_cpu() -> None:
    old = replace(SOUND, gpus=[Gpu("Tesla T4", (7, 5), 40, 15.0)])
    assert 'Runtime(machine="cpu")' in said(old)["GPU 0"]
    assert judge(old)[-1].state.startswith("takes the CPU")


def test_a_missing_tool_names_the_pip_line_that_brings_it() -> None:
    line = "pip install 'gpuos_numba[cu13]'"
    assert line in said(replace(SOUND, ptxas=None))["assembler"]
    assert line in said(replace(SOUND, linker=False))["linker"]
    assert line in said(replace(SOUND, numba_error="ImportError: libnvvm"))["compiler"]
    bare = {name: version for name, version in SOUND.versions.items() if name == "numpy" or name == "numba"}
    assert line in said(replace(SOUND, versions=bare))["compiler"]


def test_a_cache_that_cannot_be_used_says_which_variable_moves_it() -> None:
    assert "GPUOS_CACHE_DIR" in said(replace(SOUND, cache_error="/home/cache cannot be written"))["cache"]


@pytest.mark.parametrize("version", ["2.5.0", "2.5.0rc1", "2.10.1", "3.0.0", "1.26.4"])
def test_a_numpy_outside_the_range_names_the_range(version: str) -> None:
    facts = replace(SOUND, versions={**SOUND.versions, "numpy": version})
    assert "pip install 'numpy>=2.0,<2.5'" in said(facts)["NumPy"]
    assert judge(facts)[-1].state.startswith("cannot run")


def test_the_range_is_that_of_the_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["dependencies"]
    assert info.numpy_problem("1.0") is not None
    assert next(line for line in wanted if line.startswith("numpy")) in str(info.numpy_problem("1.0"))


@pytest.fixture
def newer_numpy(tmp_path: Path) -> dict[str, str]:
    """An environment whose first NumPy is 2.5."""
    folder = tmp_path / "numpy-2.5.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.5.0\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def test_importing_beside_a_newer_numpy_says_so_in_one_sentence(newer_numpy: dict[str, str]) -> None:
    code = "try:\n import gpuos_numba\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], env=newer_numpy, capture_output=True, text=True)
    assert done.stdout.strip() == str(info.numpy_problem("2.5.0")), done.stderr


@pytest.mark.parametrize("command", ["info", "ops"])
def test_every_command_beside_a_newer_numpy_shows_what_is_wrong(
    newer_numpy: dict[str, str], command: str
) -> None:
    line = [sys.executable, "-m", "gpuos_numba", command]
    done = subprocess.run(line, env=newer_numpy, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "numpy>=2.0,<2.5" in done.stdout and "cannot run" in done.stdout


def test_info_of_this_machine_is_complete_and_succeeds() -> None:
    table = CliRunner().invoke(app, ["info"], env={"COLUMNS": "200"})
    assert table.exit_code == 0 and "Runtime()" in table.output, table.output
    found = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert found["versions"]["numpy"] and found["cache"]
    assert found["findings"][-1]["about"] == "Runtime()"
