"""What injected bodies are compiled to for the GPU. Needs no GPU."""

from __future__ import annotations

import re

import pytest

from gpuos_numba.device import switch
from gpuos_numba.inject import request
from gpuos_numba.inject.compile import Compiler
from gpuos_numba.inject.render import load, render
from gpuos_numba.inject.store import Store

pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")

from gpuos_numba.machines import cuda_compile, cuda_inject

SILU = request.elementwise("swish", "x / (1 + exp(-x))")


def plain(ptx: str) -> list[str]:
    """The instructions, without names that Numba counts up."""
    return [re.sub(r"%\w+|\$\w+", "_", line.strip()) for line in ptx.splitlines() if line.startswith("\t")]


def test_a_body_of_two_parts_is_that_of_one() -> None:
    rendered = render(SILU)
    namespace: dict[str, object] = {}
    exec(rendered.source, namespace)
    fused = cuda_inject.fuse(namespace["make_swish"](cuda_inject.m), "plain", 1, "the_body")  # type: ignore[operator]
    whole = cuda_inject.compile_body(load(rendered)["plain"], "the_body")
    assert "the_body" in fused and "gpuos_value" not in fused and "call" not in fused
    assert sorted(plain(fused)) == sorted(plain(whole))


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_switch_of_injected_ids_is_assembled(count: int) -> None:
    ptxas = cuda_compile.find_ptxas()
    if ptxas is None:
        pytest.skip("no ptxas here: that the switch is assembled stays unproved")
    ptx = switch.render_injected([(512 + 3 * each, f"body_{each % 2}") for each in range(count)])
    cubin, _ = cuda_compile.assemble(ptx, (9, 0), 256, ptxas)
    assert cubin.startswith(cuda_compile.ELF)
    assert ptx.count("call.uni") == count


def test_a_cold_body_is_relocatable_and_saves_nothing(tmp_path: object) -> None:
    if cuda_compile.find_ptxas() is None:
        pytest.skip("no ptxas here: that the body is assembled stays unproved")
    compiler = Compiler("sm_90", 256, Store(tmp_path, secret=b"k" * 32))  # type: ignore[arg-type]
    made = compiler.compile(render(SILU), 1, ["plain"])
    assert not made.cached and made.codes["plain"].data.startswith(cuda_compile.ELF)
    again = compiler.compile(render(SILU), 1, ["plain"])
    assert again.cached and again.codes == made.codes and again.signature == made.signature
    rendered = render(SILU)
    namespace: dict[str, object] = {}
    exec(rendered.source, namespace)
    _, log = cuda_inject.compile_injected(namespace, "swish", "plain", 1, "body", "sm_90", 256)
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores", log)
