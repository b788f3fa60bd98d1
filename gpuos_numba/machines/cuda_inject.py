"""Bodies of injected operators become relocatable cubins, in the process that compiles.

Numba types and lowers an element-wise body for most of a second, and most of it is the same for every
expression: the walk over the operands. So each kind of walk is brought to LLVM IR once, around a call of a
function that it lacks; an expression then is that function alone, some 20 ms of Numba's time, and NVVM
inlines it where the walk calls it. The code is the same to the byte as that of a body compiled whole.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from numba import cuda
from numba.cuda import compiler, types
from numba.cuda.cudadrv import nvvm

from ..device import elementwise as bodies
from ..device.runs import Inlined
from ..errors import MachineError
from .cuda_compile import (
    OLDEST,
    _compile,
    _compiling_for,
    assemble,
    compile_worker,
    find_ptxas,
    m,
    without_environments,
)

# mypy: disable-error-code="no-untyped-call"

_VALUE: Final = "gpuos_value"
_BODY: Final = "gpuos_body"
_VALUE_SIGNATURE: Final = types.float32(*[types.float32] * 5)
WALKS: Final = ("plain", "half", "any")
"""Variants of `inject.render` that are made of a walk and a function of one element."""


def compile_body(make: Callable[..., Any], symbol: str) -> str:
    """PTX of a whole body. Some seconds."""
    return _compile(make(m), m.OPERATOR_SIGNATURE, symbol, OLDEST)


def _lower(function: Callable[..., Any], signature: Any, symbol: str) -> list[str]:
    """LLVM IR of a function and what it calls."""
    with _compiling_for(OLDEST):
        library, _ = compiler._compile_pyfunc_with_fixup(
            function,
            signature,
            debug=False,
            lineinfo=False,
            device=True,
            fastmath=False,
            cc=OLDEST,
            opt=True,
            abi="c",
            abi_info={"abi_name": symbol},
            forceinline=False,
            launch_bounds=None,
            lto=False,
        )
    return list(library.llvm_strs)


@functools.cache
def lower_walk(variant: str, arity: int) -> tuple[str, ...]:
    """LLVM IR of a walk that calls a function it lacks. Once a process, for its names hold in this one."""
    external = cuda.declare_device(_VALUE, _VALUE_SIGNATURE, abi="c")

    def make(m: Any) -> Any:
        def value(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
            return external(x, y, z, p, q)

        return value

    if variant == "any":
        body = bodies.make_typed(m, bodies.compute_f32(m), bodies.Entry(0, make))
    else:
        body = bodies.make_plain(m, arity, make, half=variant == "half")
    return tuple(_lower(body, m.OPERATOR_SIGNATURE, _BODY))


def fuse(value: Callable[..., Any], variant: str, arity: int, symbol: str) -> str:
    """PTX of a walk around a function of one element. Raises MachineError where NVVM refuses."""
    walk = lower_walk(variant, 3 if variant == "any" else arity)
    define = re.compile(rf'define float @"?{_VALUE}"?\(([^)]*)\)')
    inlined = rf"define linkonce_odr float @{_VALUE}(\1) alwaysinline"
    function = [define.sub(inlined, text) for text in _lower(value, _VALUE_SIGNATURE, _VALUE)]
    options = {"fastmath": False, "opt": 3, "arch": f"compute_{OLDEST[0]}{OLDEST[1]}"}
    try:
        ptx = nvvm.compile_ir([*walk, *function], **options).decode().strip("\0").strip()
    except nvvm.NvvmError as error:
        raise MachineError(f"NVVM failed: {error}") from error
    return without_environments(str(ptx)).replace(_BODY, symbol)


def compile_injected(
    namespace: dict[str, Any], name: str, variant: str, arity: int, symbol: str, target: str, threads: int
) -> tuple[bytes, str]:
    """A relocatable cubin of one variant of a rendered source, and what ptxas said. Raises MachineError."""
    ptxas = find_ptxas()
    if ptxas is None:
        raise MachineError("no ptxas here: pip install nvidia-cuda-nvcc, or set CUDA_HOME")
    ptx = None
    if variant in WALKS:
        # The fast way goes through the compiler's private functions: another release may have others.
        with contextlib.suppress(AttributeError, TypeError, ImportError):
            ptx = fuse(namespace[f"make_{name}"](m), variant, arity, symbol)
    if ptx is None:
        ptx = compile_body(namespace[f"make_{name}_{variant}"], symbol)
    digits = target.removeprefix("sm_")
    return assemble(ptx, (int(digits[:-1]), int(digits[-1])), threads, ptxas)


def compile_inlined(functions: Sequence[Inlined], target: str, threads: int) -> tuple[bytes, str]:
    """A worker's relocatable cubin with injected functions inlined. Some seconds. Raises MachineError."""
    ptxas = find_ptxas()
    if ptxas is None:
        raise MachineError("no ptxas here: pip install nvidia-cuda-nvcc, or set CUDA_HOME")
    digits = target.removeprefix("sm_")
    ptx = compile_worker(OLDEST, functions)
    return assemble(ptx, (int(digits[:-1]), int(digits[-1])), threads, ptxas)
