"""What injected bodies are compiled to for the GPU. Needs no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from gpuos_numba.device import switch
from gpuos_numba.inject import compile_server, request
from gpuos_numba.inject.compile import Compiler
from gpuos_numba.inject.render import load, render
from gpuos_numba.inject.store import Store, file_name

pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")

from gpuos_numba.machines import cuda_compile, cuda_inject, cuda_switch

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


def test_what_is_compiled_without_a_fork_is_the_same_and_leaves_nothing_behind() -> None:
    if cuda_compile.find_ptxas() is None:
        pytest.skip("no ptxas here: that the compiling process stays as it was stays unproved")

    def ask(text: str, variants: list[str]) -> bytes:
        rendered = render(request.elementwise("f", text))
        bodies = [[each, f"gpuos_injected_{each}"] for each in variants]
        asked = {"name": "f", "source": rendered.source, "file": "<f>", "arity": 1, "target": "sm_90"}
        (head, data), *_ = compile_server._answer({**asked, "threads": 256, "bodies": bodies})
        assert "error" not in head, head
        return data

    alone = ask("x / (1 + exp(-x))", ["plain"])
    assert ask("sin(x) * 3", ["plain"]) != alone
    assert ask("x / (1 + exp(-x))", ["plain"]) == alone
    assert ask("x / (1 + exp(-x))", ["plain", "half"]) == alone  # in a fork


# --- the switch, from the cache ---

NINE: Final = (9, 0)
CASES: Final = [(513, "body_b"), (512, "body_a")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if cuda_compile.find_ptxas() is None:
        pytest.skip("no ptxas here: that a switch is assembled and kept stays unproved")
    monkeypatch.setenv("GPUOS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUOS_KEY_FILE", str(tmp_path / "key"))
    return Store()


def key_of(cases: list[tuple[int, str]], threads: int = 256) -> str:
    return cuda_switch.switch_key(switch.render_injected(cases), NINE, threads)


def begun(cases: list[tuple[int, str]]) -> bytes:
    cuda_switch.begin(NINE, 256, cases)
    return cuda_switch.get(NINE, 256, cases)


def test_a_switch_that_was_begun_is_assembled_and_kept(cache: Store) -> None:
    made = begun(CASES)
    assert made.startswith(cuda_compile.ELF) and cache.get("object", key_of(CASES)) == made
    assert cuda_switch.get(NINE, 256, CASES[::-1]) == made and not cuda_switch._begun


def test_a_switch_that_was_not_begun_is_linked_as_text_and_made_for_the_next_time(cache: Store) -> None:
    assert cuda_switch.get(NINE, 256, CASES) == switch.render_injected(CASES).encode()
    assert cuda_switch.get(NINE, 256, CASES).startswith(cuda_compile.ELF)
    assert cache.get("object", key_of(CASES)) is not None


def test_a_switch_is_found_for_its_ids_and_bodies_alone(cache: Store) -> None:
    begun(CASES)
    others = [CASES[:1], [(513, "body_b"), (514, "body_a")], [(513, "body_a"), (512, "body_b")]]
    for other in [*others, [*CASES, (514, "body_a")]]:
        assert cuda_switch.get(NINE, 256, other) == switch.render_injected(other).encode()
    keys = {key_of(CASES), *map(key_of, others), key_of(CASES, 128)}
    keys.add(cuda_switch.switch_key(switch.render_injected(CASES), (10, 0), 256))
    assert len(keys) == 6


@pytest.mark.parametrize("harm", ["flip", "truncate", "another's", "another switch"])
def test_a_harmed_switch_is_refused_and_linked_as_text(cache: Store, harm: str) -> None:
    begun(CASES)
    (entry,) = [each for each in cache.entries() if each.key == key_of(CASES)]
    data = entry.path.read_bytes()
    if harm == "another's":
        Store(cache.folder, b"o" * 32).put("object", entry.key, b"\x7fELF evil")
    elif harm == "another switch":
        begun(CASES[:1])
        entry.path.write_bytes((cache.folder / file_name("object", key_of(CASES[:1]))).read_bytes())
    else:
        entry.path.write_bytes(data[:-100] if harm == "truncate" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.warns(RuntimeWarning, match="refused"):
        assert cuda_switch.get(NINE, 256, CASES) == switch.render_injected(CASES).encode()
    assert cuda_switch.get(NINE, 256, CASES).startswith(cuda_compile.ELF)


def test_a_switch_that_ptxas_refuses_is_left_to_the_linker(
    cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_compile, "find_ptxas", lambda: "/bin/false")
    assert begun(CASES) == switch.render_injected(CASES).encode()
    assert cache.get("object", key_of(CASES)) is None


def test_a_switch_is_assembled_where_there_is_no_cache(
    cache: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUOS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="the cache is not used"):
        assert begun(CASES).startswith(cuda_compile.ELF)


def test_a_cold_body_is_relocatable_and_saves_nothing(tmp_path: Path) -> None:
    if cuda_compile.find_ptxas() is None:
        pytest.skip("no ptxas here: that the body is assembled stays unproved")
    compiler = Compiler("sm_90", 256, Store(tmp_path, secret=b"k" * 32))
    made = compiler.compile(render(SILU), 1, ["plain"])
    assert not made.cached and made.codes["plain"].data.startswith(cuda_compile.ELF)
    again = compiler.compile(render(SILU), 1, ["plain"])
    assert again.cached and again.codes == made.codes and again.signature == made.signature
    rendered = render(SILU)
    namespace: dict[str, object] = {}
    exec(rendered.source, namespace)
    _, log = cuda_inject.compile_injected(namespace, "swish", "plain", 1, "body", "sm_90", 256)
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores", log)
