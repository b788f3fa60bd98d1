"""Bodies arrive, one cubin leaves: the CUDA machine's compiler. Needs no GPU and no driver.

Pump, worker and each operator are compiled alone: by Numba to PTX, in as many processes as there are cores,
and by ptxas to relocatable cubins, which are linked in milliseconds. The result is kept in the cache.

The switch is part of the worker, and so are the plain f32 operators. Other bodies are called, which on an
H200 costs a task 0.3 us; a body that needs more registers than it may use freely saves the worker's, which
costs up to 2 us. Linking with LTO instead inlines everything, takes 20 s, and spills.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from numba import cuda
from numba.cuda import dispatcher as numba_dispatcher
from numba.cuda import types

from ..device import switch
from ..device.operators import KERNELS, elementwise
from ..device.operators.table import Kernel
from ..device.pump import make_pump
from ..device.runs import Inlined
from ..device.worker import make_worker
from ..errors import MachineError
from ..inject.keys import content_key, cuda_target
from ..inject.store import Store
from ..protocol import SCRATCH_BYTES
from . import cuda_memory, cuda_switch
from .base import Code

# mypy: disable-error-code="no-untyped-call"

m: Any = cuda_memory
ELF = b"\x7fELF"
KERNEL, PUMP, WORKER = "gpuos_executor", "gpuos_pump", "gpuos_worker"
PUMP_SIGNATURE = types.int32(*[types.uint64] * 3)
WORKER_SIGNATURE = types.int32(*[types.uint64] * 4)
INJECTED_SIGNATURE = types.int32(*[types.uint64] * 5)
OLDEST = (8, 0)
"""sm_80: cp.async, and nanosleep and scoped memory operations before it."""

_target = threading.local()
_native_current_device = numba_dispatcher.get_current_device


def _current_device() -> Any:
    capability = getattr(_target, "capability", None)
    return _native_current_device() if capability is None else SimpleNamespace(compute_capability=capability)


@contextmanager
def _compiling_for(capability: tuple[int, int]) -> Iterator[None]:
    """Helpers nested in a body ask Numba for the current device; answer with the target instead.

    Per thread, so that a user's own kernels compiling elsewhere are not affected.
    """
    numba_dispatcher.get_current_device = _current_device
    _target.capability = capability
    try:
        yield
    finally:
        _target.capability = None


@dataclass(frozen=True)
class Generation:
    """An executor with a set of operators, ready to load.

    Attributes:
        cubin: machine code for one target, with one kernel.
        capability: the target, (major, minor).
        log: what the linker said, with registers and spills.
    """

    cubin: bytes
    capability: tuple[int, int]
    log: str


def _compile(body: Callable[..., Any], signature: Any, symbol: str, capability: tuple[int, int]) -> str:
    with _compiling_for(capability):
        code, _ = cuda.compile(
            body,
            signature,
            device=True,
            abi="c",
            abi_info={"abi_name": symbol},
            cc=capability,
            output="ptx",
        )
    return without_environments(str(code))


def without_environments(ptx: str) -> str:
    """PTX without the word that Numba declares for each function and nothing here reads.

    An executor had 1,200 of them, with names of 250 characters: each link and each load takes them in.
    """
    return re.sub(r"^\.common \.global [^\n]*_ZN08NumbaEnv\w*;\n", "", ptx, flags=re.MULTILINE)


def _returning_status(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give a procedure an int32 result: a void C-ABI function still returns a .b64 in PTX."""
    inner = m.device(body)
    if body.__name__ == "pump":

        def pump(context: Any, workers: Any, scratch: Any) -> Any:
            inner(context, workers, scratch)
            return types.int32(0)

        return pump

    def worker(context: Any, number: Any, workers: Any, scratch: Any) -> Any:
        inner(context, number, workers, scratch)
        return types.int32(0)

    return worker


def compile_kernel(kernel: Kernel, capability: tuple[int, int], alone: bool = False) -> str:
    """PTX of a kernel's body: of the shared one where it has one, unless it is asked for alone."""
    make = kernel.shared.make if kernel.shared and not alone else kernel.make
    return _compile(make(m), m.OPERATOR_SIGNATURE, kernel.symbol, capability)


def compile_pump(capability: tuple[int, int]) -> str:
    return _compile(_returning_status(make_pump(m)), PUMP_SIGNATURE, PUMP, capability)


class _WithSwitch:
    """The CUDA primitives, with the switch, and what the worker runs without it."""

    def __init__(self, inlined: Sequence[Inlined]) -> None:
        kernels = tuple(KERNELS.values())
        bodies = {kernel.symbol: _declare(kernel.symbol) for kernel in kernels}
        self.is_plain, self.run_plain = elementwise.make_run_plain(m, inlined)
        bodies[switch.INJECTED] = cuda.declare_device(switch.INJECTED, INJECTED_SIGNATURE, abi="c")
        called = m.device(switch.build(kernels, bodies))

        def dispatch(context: Any, op_id: Any, task: Any, tile: Any, arena: Any) -> Any:
            return called(context, op_id, task, tile, arena)

        self.dispatch = m.device(dispatch)

    def __getattr__(self, name: str) -> Any:
        return getattr(m, name)


def _declare(symbol: str) -> Any:
    return cuda.declare_device(symbol, m.OPERATOR_SIGNATURE, abi="c")


def compile_worker(capability: tuple[int, int], inlined: Sequence[Inlined] = ()) -> str:
    """inlined: injected functions that the worker runs like its own."""
    body = _returning_status(make_worker(cast("Any", _WithSwitch(inlined))))
    return _compile(body, WORKER_SIGNATURE, WORKER, capability)


def compile_entry(capability: tuple[int, int], threads: int) -> str:
    """The entry point: block 0 is the pump, every other block a worker."""
    pump = cuda.declare_device(PUMP, PUMP_SIGNATURE, abi="c")
    worker = cuda.declare_device(WORKER, WORKER_SIGNATURE, abi="c")
    block_index, grid_width, address_of = m.block_index, m.grid_width, m.address_of
    words = SCRATCH_BYTES // 8

    def gpuos_executor(context: Any) -> None:
        scratch = address_of(cuda.shared.array(words, types.uint64, alignment=16))
        workers = grid_width() - types.uint64(1)
        if block_index() == types.uint64(0):
            pump(context, workers, scratch)
        else:
            worker(context, block_index(), workers, scratch)

    code, _ = cuda.compile(
        gpuos_executor,
        types.void(types.uint64),
        device=False,
        abi="numba",
        cc=capability,
        output="ptx",
        # One block a multiprocessor: held to the 128 registers of two, ptxas spills (sm_90 and sm_100,
        # 8 to 160 bytes), and a spill costs every task a trip. The price: while a worker is on a
        # multiprocessor little of its register file is left for others. A quiet launch takes 16 of them.
        launch_bounds=(threads, 1),
    )
    return without_environments(str(code))


def part_symbols() -> tuple[str, ...]:
    """All that is linked."""
    kernels = dict.fromkeys(kernel.symbol for kernel in KERNELS.values())
    return (KERNEL, PUMP, WORKER, *kernels)


def compile_part(symbol: str, threads: int) -> str:
    """One of them for the oldest target: ptxas and the linker take it for newer ones too."""
    if symbol == KERNEL:
        return compile_entry(OLDEST, threads)
    if symbol == PUMP:
        return compile_pump(OLDEST)
    if symbol == WORKER:
        return compile_worker(OLDEST)
    kernel = next(kernel for kernel in KERNELS.values() if kernel.symbol == symbol)
    return compile_kernel(kernel, OLDEST)


@functools.cache
def compile_parts(threads: int) -> dict[str, str]:
    """Every part, compiled by as many processes as there are cores: Numba holds the GIL.

    Modules rather than multiprocessing, which would run the user's script again.
    """
    from concurrent.futures import ThreadPoolExecutor

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    symbols = part_symbols()
    processes = min(cores, len(symbols))
    shares = [symbols[i::processes] for i in range(processes)]
    package = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}

    def compile_share(share: tuple[str, ...]) -> dict[str, str]:
        command = [sys.executable, "-m", f"{__package__}.cuda_parts", str(threads), *share]
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace")[-2000:]
            raise MachineError(f"compiling {', '.join(share)} failed:\n{said}")
        return dict(pickle.loads(done.stdout))

    with ThreadPoolExecutor(len(shares)) as pool:
        parts: dict[str, str] = {}
        for share in pool.map(compile_share, shares):
            parts |= share
    return parts


def find_ptxas() -> str | None:
    """Path of ptxas: that of the installed package first, for the one on PATH may be of another CUDA."""
    for folder in sys.path:
        for name in ("nvidia/cu13/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas"):
            found = Path(folder, name)
            if found.is_file() and os.access(found, os.X_OK):
                return str(found)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        found = Path(os.environ.get(variable, "/nowhere"), "bin", "ptxas")
        if found.is_file():
            return str(found)
    return shutil.which("ptxas") or (
        "/usr/local/cuda/bin/ptxas" if Path("/usr/local/cuda/bin/ptxas").is_file() else None
    )


def assemble(ptx: str, capability: tuple[int, int], threads: int, ptxas: str) -> tuple[bytes, str]:
    """A part's relocatable cubin, and what ptxas said of its registers and spills. Raises MachineError."""
    registers = min(255, (1 << 16) // threads // 8 * 8)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "part.ptx"), Path(folder, "part.cubin")
        source.write_text(ptx)
        arch = f"-arch=sm_{capability[0]}{capability[1]}"
        command = [ptxas, "-c", arch, "-v", f"-maxrregcount={registers}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(f"ptxas failed: {(done.stderr or done.stdout)[-2000:]}")
        return target.read_bytes(), done.stderr


@functools.cache
def build(capability: tuple[int, int], threads: int = 256) -> Generation:
    """The executor with the operators of the table, once a process; from the cache where it was built before.

    Raises:
        MachineError: the target is older than sm_80, or a tool of the toolchain failed.
    """
    if capability < OLDEST:
        raise MachineError(
            f"compute capability {capability[0]}.{capability[1]}: gpuos needs sm_80 (Ampere) or newer; "
            'use Runtime(machine="cpu") here'
        )
    store = Store()
    key = content_key(f"executor of {threads} threads", cuda_target(capability))
    found = store.get("cubin", key)
    if found is not None:
        size = int.from_bytes(found[:8], "little")
        return Generation(found[8 : 8 + size], capability, found[8 + size :].decode())
    generation = link(capability, threads, {})
    header = len(generation.cubin).to_bytes(8, "little")
    store.put("cubin", key, header + generation.cubin + generation.log.encode())
    return generation


@dataclass(frozen=True)
class Objects:
    """The parts that every generation has, each alone: relocatable cubins, or PTX where there is no ptxas.

    Attributes:
        codes: by symbol.
        log: what ptxas said, with registers and spills.
    """

    codes: dict[str, bytes]
    log: str


@functools.cache
def build_objects(capability: tuple[int, int], threads: int) -> Objects:
    """Compiled once a process; from the cache where they were before. Raises MachineError."""
    from concurrent.futures import ThreadPoolExecutor

    store = Store()
    key = content_key(f"parts of {threads} threads", cuda_target(capability))
    found = store.get("object", key)
    if found is not None:
        return _unpack_objects(found)
    ptxas, parts = find_ptxas(), compile_parts(threads)
    if ptxas is None:  # the linker knows PTX too, and takes longer
        return Objects({symbol: part.encode() for symbol, part in parts.items()}, "")
    with ThreadPoolExecutor() as pool:
        assembled = list(pool.map(lambda part: assemble(part, capability, threads, ptxas), parts.values()))
    codes = {symbol: cubin for symbol, (cubin, _) in zip(parts, assembled, strict=True)}
    objects = Objects(codes, "\n".join(said for _, said in assembled))
    store.put("object", key, _pack_objects(objects))
    return objects


def _pack_objects(objects: Objects) -> bytes:
    names = {symbol: len(code) for symbol, code in objects.codes.items()}
    head = json.dumps({"codes": names, "log": objects.log}).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *objects.codes.values()])


def _unpack_objects(data: bytes) -> Objects:
    end = 8 + int.from_bytes(data[:8], "little")
    head, codes = json.loads(data[8:end]), {}
    for symbol, size in head["codes"].items():
        codes[symbol] = data[end : end + size]
        end += size
    return Objects(codes, head["log"])


def link(
    capability: tuple[int, int], threads: int, injected: Mapping[int, Code], worker: Code | None = None
) -> Generation:
    """An executor with these operators besides those of the table; milliseconds once the parts are built.

    worker: its object, where it is not the usual one.

    Raises:
        MachineError: a tool of the toolchain failed; the message is its own.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    objects = build_objects(capability, threads)
    usual = objects.codes if worker is None else {**objects.codes, WORKER: worker.data}
    bodies = {code.symbol: code.data for code in injected.values()}
    cases = [(op_id, code.symbol) for op_id, code in injected.items()]
    parts = [*usual.values(), *bodies.values(), cuda_switch.get(capability, threads, cases)]
    codes = [
        ObjectCode.from_cubin(part) if part.startswith(ELF) else ObjectCode.from_ptx(part) for part in parts
    ]
    options = LinkerOptions(arch=f"sm_{capability[0]}{capability[1]}", ptxas_options=["-v"])
    try:
        linker = Linker(*codes, options=options)
        cubin = linker.link("cubin")
    except Exception as error:  # whatever the linker's wrapper raises, which differs by its backend
        raise MachineError(f"linking failed: {str(error)[:2000]}") from error
    return Generation(bytes(cubin.code), capability, objects.log + linker.get_info_log())
