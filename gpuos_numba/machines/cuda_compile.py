"""Bodies arrive, one cubin leaves: the CUDA machine's compiler. Needs no GPU and no driver.

Pump, worker, switch and each operator are compiled alone and linked. Two ways:
  "lto"    all as LTO-IR; nvJitLink inlines the switch and the operators into the worker (about 1 s)
  "objects" all as PTX through ptxas to relocatable cubins, which can be kept and linked anew in
            milliseconds; calls stay calls (about 100 ns a task)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from numba import cuda
from numba.cuda import dispatcher as numba_dispatcher
from numba.cuda import types

from ..device import switch
from ..device.elements import make_element_address
from ..device.operators import KERNELS
from ..device.operators.elementwise import CALLED
from ..device.operators.table import Kernel
from ..device.pump import make_pump
from ..device.worker import make_worker
from ..errors import MachineError
from ..protocol import SCRATCH_BYTES
from . import cuda_memory

# mypy: disable-error-code="no-untyped-call"

m: Any = cuda_memory
KERNEL, PUMP, WORKER = "gpuos_executor", "gpuos_pump", "gpuos_worker"
PUMP_SIGNATURE = types.int32(*[types.uint64] * 3)
WORKER_SIGNATURE = types.int32(*[types.uint64] * 4)
EXTERNALS: dict[str, tuple[Callable[..., Any], int]] = {
    "gpuos_element_address": (make_element_address, 3),
    **{symbol: (make, 6) for symbol, make in CALLED.items()},
}
"""Helpers that are called, never inlined: factory and how many u64 they take."""
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


def _compile(
    body: Callable[..., Any], signature: Any, symbol: str, capability: tuple[int, int], output: str
) -> Any:
    with _compiling_for(capability):
        code, _ = cuda.compile(
            body,
            signature,
            device=True,
            abi="c",
            abi_info={"abi_name": symbol},
            cc=capability,
            output=output,
        )
    return code


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


def compile_kernel(kernel: Kernel, capability: tuple[int, int], output: str = "ptx") -> Any:
    """A kernel's body, the shared one where it has one, as "ptx" (str) or "ltoir" (bytes)."""
    make = kernel.shared.make if kernel.shared else kernel.make
    return _compile(make(m), m.OPERATOR_SIGNATURE, kernel.symbol, capability, output)


def compile_switch(kernels: Sequence[Kernel], capability: tuple[int, int], output: str = "ptx") -> Any:
    externals = {
        kernel.symbol: cuda.declare_device(kernel.symbol, m.OPERATOR_SIGNATURE, abi="c") for kernel in kernels
    }
    body = switch.build(kernels, externals)
    return _compile(body, m.DISPATCH_SIGNATURE, m.DISPATCH_SYMBOL, capability, output)


def compile_pump(capability: tuple[int, int], output: str = "ptx") -> Any:
    return _compile(_returning_status(make_pump(m)), PUMP_SIGNATURE, PUMP, capability, output)


def compile_worker(capability: tuple[int, int], output: str = "ptx") -> Any:
    return _compile(_returning_status(make_worker(m)), WORKER_SIGNATURE, WORKER, capability, output)


def compile_entry(capability: tuple[int, int], threads: int, output: str = "ptx") -> Any:
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
        output=output,
        # One block a multiprocessor: held to the 128 registers of two, ptxas spills (sm_90 and sm_100,
        # 8 to 160 bytes), and a spill costs every task a trip. The price: while a worker is on a
        # multiprocessor little of its register file is left for others. A quiet launch takes 16 of them.
        launch_bounds=(threads, 1),
    )
    return code


@functools.cache
def compile_parts(threads: int, output: str) -> dict[str, Any]:
    """All that is linked, by symbol, for the oldest target: the linker takes it for newer ones too."""
    kernels = {kernel.symbol: kernel for kernel in KERNELS.values()}
    return {
        KERNEL: compile_entry(OLDEST, threads, output),
        PUMP: compile_pump(OLDEST, output),
        WORKER: compile_worker(OLDEST, output),
        m.DISPATCH_SYMBOL: compile_switch(tuple(KERNELS.values()), OLDEST, output),
        **{
            symbol: _compile(make(m), m.external_signature(arity), symbol, OLDEST, output)
            for symbol, (make, arity) in EXTERNALS.items()
        },
        **{symbol: compile_kernel(kernel, OLDEST, output) for symbol, kernel in kernels.items()},
    }


@functools.cache
def build(capability: tuple[int, int], threads: int = 256, link: str = "lto") -> Generation:
    """Compile and link the executor with the operators of the table, once a process.

    Raises:
        MachineError: the target is older than sm_80, or a tool of the toolchain failed.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    if capability < OLDEST:
        raise MachineError(
            f"compute capability {capability[0]}.{capability[1]}: gpuos needs sm_80 (Ampere) or newer; "
            'use Runtime(machine="cpu") here'
        )
    parts = compile_parts(threads, "ltoir" if link == "lto" else "ptx").values()
    wrap = ObjectCode.from_ltoir if link == "lto" else (lambda ptx: ObjectCode.from_ptx(ptx.encode()))
    options = LinkerOptions(
        arch=f"sm_{capability[0]}{capability[1]}",
        link_time_optimization=link == "lto",
        ptxas_options=["-v"],
    )
    linker = Linker(*[wrap(part) for part in parts], options=options)
    cubin = linker.link("cubin")
    return Generation(bytes(cubin.code), capability, linker.get_info_log())
