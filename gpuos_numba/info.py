"""What is here and what is missing: `python -m gpuos_numba info`.

Facts are gathered, findings leave: each says what is so and, where it stops something, what to do. The module
speaks where the rest of the package cannot be imported, so it imports what it asks about only then.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

NUMPY: Final = ((2, 0), (2, 5))
"""Releases of NumPy from the first on, up to but not with the second: numba-cuda works with no newer one."""
OLDEST_GPU: Final = (8, 0)
OLDEST_DRIVER: Final = 12
"""CUDA that a driver must serve, by its major number."""
DISTRIBUTIONS: Final = (
    "numpy", "numba", "llvmlite", "ml_dtypes", "numba-cuda", "cuda-bindings", "cuda-core", "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-ml-py", "torch",
    "cupy-cuda12x", "cupy-cuda13x",
)  # fmt: skip


def version_of(distribution: str) -> str | None:
    """Of an installed distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Major and minor number: (2, 5) of "2.5.0rc1"."""
    major, minor, *_ = [*version.split("."), "0"]
    digits = [int("".join(c for c in part if c.isdigit()) or 0) for part in (major, minor)]
    return digits[0], digits[1]


def numpy_problem(version: str | None) -> str | None:
    """One sentence where this NumPy cannot carry the package, else None."""
    first, beyond = NUMPY
    wanted = f"numpy>={first[0]}.{first[1]},<{beyond[0]}.{beyond[1]}"
    if version is None:
        return f"numpy is not installed: pip install '{wanted}'"
    if not first <= release(version) < beyond:
        return f"numpy {version} is not one that numba-cuda works with: pip install '{wanted}'"
    return None


@dataclass(slots=True)
class Gpu:
    """One GPU, as the driver describes it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_gib: float


@dataclass(slots=True)
class Facts:
    """What was found. Strings are shown as they are.

    Attributes:
        versions: of `DISTRIBUTIONS`, those installed.
        driver_cuda: CUDA that the driver serves, None where there is no driver.
        driver_error: why the driver cannot be used.
        numba_error: why numba.cuda cannot be imported; None where it can, or is not installed.
        linker: whether nvJitLink loads.
        cache_error: why compiled operators cannot be kept.
    """

    python: str = ""
    package: str = ""
    folder: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[Gpu] = field(default_factory=list)
    driver_cuda: tuple[int, int] | None = None
    driver_error: str | None = None
    numba_error: str | None = None
    ptxas: str | None = None
    linker: bool = False
    cache: str = ""
    cache_error: str | None = None


@dataclass(slots=True)
class Finding:
    """One line: what it is about, what is so, and what to do about it, if anything."""

    about: str
    state: str
    remedy: str = ""


def running_as_program() -> bool:
    """Whether this is `python -m gpuos_numba`, seen while the package itself is being imported."""
    words = sys.orig_argv
    return sys.argv[:1] == ["-m"] and words[words.index("-m") + 1 :][:1] == ["gpuos_numba"]


# --- gathering ---


def _driver(facts: Facts) -> None:
    """Ask libcuda itself: it answers whatever Python packages there are, and makes no context."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        facts.driver_error = "no NVIDIA driver is installed"
        return
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        facts.driver_cuda = number.value // 1000, number.value % 1000 // 10
    error = cuda.cuInit(0)
    if error:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(error, ctypes.byref(text))
        said = text.value.decode(errors="replace") if text.value else "unknown"
        facts.driver_error = f"the NVIDIA driver answers error {error} ({said})"
        return
    cuda.cuDeviceGetCount(ctypes.byref(number))
    for ordinal in range(number.value):
        device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, 128, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        attributes = []
        for attribute in (75, 76, 16):  # capability's two numbers, and multiprocessors
            cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            attributes.append(number.value)
        major, minor, multiprocessors = attributes
        described = name.value.decode(errors="replace")
        facts.gpus.append(Gpu(described, (major, minor), multiprocessors, round(memory.value / 2**30, 1)))
    if not facts.gpus:
        facts.driver_error = "the NVIDIA driver sees no GPU"


def _toolchain(facts: Facts) -> None:
    """Whether device code can be compiled, assembled and linked here."""
    if "numba-cuda" not in facts.versions:
        return
    try:
        from .machines.cuda_compile import find_ptxas
    except Exception as error:  # whatever a mismatched package raises is the finding
        facts.numba_error = f"{type(error).__name__}: {error}".splitlines()[0]
        return
    facts.ptxas = find_ptxas()
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
        facts.linker = True
    except Exception:  # not there, or a library that does not load
        facts.linker = False


def _cache(facts: Facts) -> None:
    """Where compiled operators are kept, and whether they can be."""
    try:
        from .inject.store import Store

        problems: list[Any] = []
        store = Store(report=problems.append)
        facts.cache = str(store.folder)
        folder = store.folder
        while not folder.exists():
            folder = folder.parent
        if problems:
            facts.cache_error = str(problems[0])
        elif not os.access(folder, os.W_OK):
            facts.cache_error = f"{folder} cannot be written"
    except Exception as error:  # a key that others may read, a home that does not exist
        facts.cache_error = f"{type(error).__name__}: {error}".splitlines()[0]


def gather() -> Facts:
    """Everything that `judge` wants to know. Raises nothing, and leaves no context on a GPU."""
    facts = Facts(platform.python_version(), version_of("gpuos_numba") or "not installed")
    facts.folder = str(Path(__file__).resolve().parent)
    facts.versions = {name: found for name in DISTRIBUTIONS if (found := version_of(name))}
    _driver(facts)
    if numpy_problem(facts.versions.get("numpy")) is None:
        _toolchain(facts)
        _cache(facts)
    return facts


# --- judging ---


def extra_for(facts: Facts) -> str:
    """`cu12` or `cu13`: what the driver can run."""
    return "cu12" if facts.driver_cuda is not None and facts.driver_cuda[0] < 13 else "cu13"


def judge(facts: Facts) -> list[Finding]:
    """The findings, in the order in which one would mend them."""
    extra = extra_for(facts)
    install = f"pip install 'gpuos_numba[{extra}]'"
    found = [
        Finding("gpuos_numba", f"{facts.package}, {facts.folder}"),
        Finding("Python", facts.python),
        Finding("packages", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
    ]
    problem = numpy_problem(facts.versions.get("numpy"))
    if problem is not None:
        state, _, remedy = problem.partition(": ")
        found.append(Finding("NumPy", state, remedy))
    if "numba" not in facts.versions:
        found.append(Finding("Numba", "numba is not installed", "pip install numba"))
    found += _judge_driver(facts)
    for number, gpu in enumerate(facts.gpus):
        about, capability = f"GPU {number}", f"{gpu.capability[0]}.{gpu.capability[1]}"
        state = f"{gpu.name}, capability {capability}, {gpu.multiprocessors} SMs, {gpu.memory_gib} GiB"
        old = 'older than sm_80 (A100): use Runtime(machine="cpu") here'
        found.append(Finding(about, state, old if gpu.capability < OLDEST_GPU else ""))
    # Without a GPU the toolchain is only needed by the tests.
    needed = bool(facts.gpus)
    if "numba-cuda" not in facts.versions:
        found.append(Finding("compiler", "numba-cuda is not installed", install if needed else ""))
    elif facts.numba_error is not None:
        found.append(Finding("compiler", f"numba-cuda does not load ({facts.numba_error})", install))
    elif problem is None:
        found.append(Finding("compiler", f"numba-cuda {facts.versions['numba-cuda']}"))
        slow = f"{install} (without ptxas the first Runtime takes minutes)" if needed else ""
        found.append(Finding("assembler", facts.ptxas or "no ptxas", "" if facts.ptxas else slow))
        said = "nvJitLink" if facts.linker else "nvJitLink does not load"
        found.append(Finding("linker", said, install if needed and not facts.linker else ""))
    if facts.cache or facts.cache_error:
        state = facts.cache_error or facts.cache
        remedy = "set GPUOS_CACHE_DIR to a folder of your own; without one each process compiles anew"
        found.append(Finding("cache", state, remedy if facts.cache_error else ""))
    found.append(Finding("Runtime()", _verdict(facts)))
    return found


def _judge_driver(facts: Facts) -> list[Finding]:
    found = []
    if facts.driver_error is not None:
        found.append(
            Finding(
                "driver",
                facts.driver_error,
                "with a GPU: install NVIDIA's driver, 525 for CUDA 12 or 580 for CUDA 13",
            )
        )
    elif facts.driver_cuda is not None:
        serves = f"CUDA {facts.driver_cuda[0]}.{facts.driver_cuda[1]}"
        if facts.driver_cuda[0] < OLDEST_DRIVER:
            remedy = f"update NVIDIA's driver to 525 or newer, which serve CUDA {OLDEST_DRIVER}"
            return [Finding("driver", f"serves {serves} only", remedy)]
        found.append(Finding("driver", f"serves {serves}"))
        bindings = facts.versions.get("cuda-bindings")
        if bindings is not None and release(bindings)[0] > facts.driver_cuda[0]:
            state = f"cuda-bindings {bindings} is for a newer CUDA than the driver's {serves}"
            found.append(Finding("driver", state, f"pip install 'gpuos_numba[{extra_for(facts)}]'"))
    return found


def _verdict(facts: Facts) -> str:
    """Which machine a Runtime would take."""
    if numpy_problem(facts.versions.get("numpy")) or "numba" not in facts.versions:
        return "cannot run before that is mended"
    usable = [gpu for gpu in facts.gpus if gpu.capability >= OLDEST_GPU]
    driver = facts.driver_cuda is not None and facts.driver_cuda[0] >= OLDEST_DRIVER
    if usable and driver and facts.numba_error is None and "numba-cuda" in facts.versions:
        return f"takes the GPU ({usable[0].name})"
    return f"takes the CPU ({os.cpu_count()} cores)"


def as_data(facts: Facts) -> dict[str, Any]:
    """For `--json`."""
    return {**asdict(facts), "findings": [asdict(each) for each in judge(facts)]}


def show(facts: Facts) -> bool:
    """Print the findings. Whether a Runtime can run on any machine."""
    findings = judge(facts)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for each in findings:
            print(f"{each.about}: {each.state}{f' -> {each.remedy}' if each.remedy else ''}")
    else:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for each in findings:
            table.add_row(each.about, each.state)
            if each.remedy:
                table.add_row("", f"-> {each.remedy}", style="yellow")
        Console().print(table, markup=False)
    return not findings[-1].state.startswith("cannot")
