"""What the CUDA machine is compiled to holds the instructions that the protocol rests on. Needs no GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import pytest

from gpuos_numba.device.operators import KERNELS, TABLE

pytest.importorskip("numba.cuda", reason="no numba-cuda here: what the GPU would run stays unproved")
pytest.importorskip("cuda.core", reason="no CUDA toolchain here: what the GPU would run stays unproved")

from gpuos_numba.errors import MachineError
from gpuos_numba.machines import cuda_compile
from gpuos_numba.machines.base import Code
from gpuos_numba.machines.cuda_compile import PUMP, WORKER

THREADS = 256
TARGETS = [(8, 0), (9, 0), (10, 0)]
"""A thread's most. 256 threads of them fit a multiprocessor's file, and what matters is that none spills."""

ACQUIRE_STAMP = r"ld\.acquire\.sys\.global\.u64"
ACQUIRE = r"ld\.acquire\.gpu\.global\.u64"
STORE_HOST = r"st\.relaxed\.sys\.global\.u64"
BARRIER = r"bar\.sync"


class Flow:
    """Instructions of one PTX function, and which may come after which."""

    def __init__(self, ptx: str) -> None:
        self.code: list[str] = []
        labels: dict[str, int] = {}
        for line in ptx[ptx.index("{") :].splitlines():
            text = line.strip()
            label = re.fullmatch(r"(\$\w+):.*", text)
            if label:
                labels[label[1]] = len(self.code)
            elif text and not text.startswith(("//", ".")) and text not in "{}":
                self.code.append(text)
        self.after: list[set[int]] = [set() for _ in self.code]
        self.before: list[set[int]] = [set() for _ in self.code]
        for at, text in enumerate(self.code):
            jump = re.match(r"(@!?%p\d+ )?bra(\.uni)?\s+(\$\w+)", text)
            goes_on = not text.startswith(("ret", "trap", "exit")) and not (jump and not jump[1])
            targets = {labels[jump[3]]} if jump else set()
            for to in targets | ({at + 1} if goes_on else set()):
                if to < len(self.code):
                    self.after[at].add(to)
                    self.before[to].add(at)

    def find(self, pattern: str) -> list[int]:
        return [at for at, text in enumerate(self.code) if re.search(pattern, text)]

    def walk(self, start: int, steps: list[set[int]], stop: str) -> Iterator[int]:
        """What is met from `start` on, itself only where a loop leads back; `stop` is met, not passed."""
        seen: set[int] = set()
        waiting = list(steps[start])
        while waiting:
            at = waiting.pop()
            if at not in seen:
                seen.add(at)
                yield at
                if not re.search(stop, self.code[at]):
                    waiting.extend(steps[at])

    def loops(self, at: int, without: str = "(?!)") -> bool:
        """Whether `at` may run again, with nothing between that matches `without`."""
        return at in self.walk(at, self.after, without)

    def always_after(self, at: int, pattern: str, since: str) -> bool:
        """Whether every way to `at` passes `pattern`, later than the last `since`."""
        for met in self.walk(at, self.before, f"{pattern}|{since}"):
            if not re.search(pattern, self.code[met]) and (
                not self.before[met] or re.search(since, self.code[met])
            ):
                return False
        return True

    def meets(self, at: int, pattern: str, steps: list[set[int]]) -> bool:
        """Whether some way from `at` reaches `pattern` before a barrier."""
        return any(re.search(pattern, self.code[met]) for met in self.walk(at, steps, BARRIER))


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    parts: dict[str, str] = cuda_compile.compile_parts(THREADS)
    return parts


@pytest.fixture(scope="module")
def flow(ptx: dict[str, str]) -> Callable[[str], Flow]:
    def of(symbol: str) -> Flow:
        text = ptx[symbol]
        return Flow(text[text.index(f") {symbol}(") :])

    return functools.cache(of)


# --- the tool: a loop is told from a load hoisted out of it ---

POLLING = """
.visible .func f() {
	mov.u64 %rd1, 0;
$L1:
	ld.acquire.gpu.global.u64 %rd1, [%rd2];
	setp.eq.u64 %p1, %rd1, 0;
	@%p1 bra $L1;
	fence.acq_rel.sys;
	st.relaxed.sys.global.u64 [%rd3], %rd1;
	ret;
}
"""


def test_a_loop_is_seen_and_a_hoisted_load_is_not_taken_for_one() -> None:
    polling = Flow(POLLING)
    hoisted = Flow(re.sub(r"(\$L1:\n)(.*\n)", r"\2\1", POLLING))
    assert all(polling.loops(at, BARRIER) for at in polling.find(ACQUIRE))
    assert not any(hoisted.loops(at) for at in hoisted.find(ACQUIRE))


def test_a_store_ahead_of_its_fence_is_seen() -> None:
    for text, right in [(POLLING, True), (POLLING.replace("	fence.acq_rel.sys;\n", ""), False)]:
        flow = Flow(text)
        (store,) = flow.find(STORE_HOST)
        assert flow.always_after(store, "fence.acq_rel.sys", BARRIER) is right


# --- linking ---


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{target[0]}{target[1]}")
def test_what_is_called_all_the_time_saves_no_registers(target: tuple[int, int]) -> None:
    generation = cuda_compile.build(target, THREADS)
    assert generation.cubin.startswith(b"\x7fELF")
    sizes = r"Function properties for (\S+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores"
    frames = {symbol: int(frame) for symbol, frame, _ in re.findall(sizes, generation.log)}
    assert {kernel.symbol for kernel in KERNELS.values()} <= set(frames)
    # A body that needs more registers than it may use freely saves those of the worker, which costs a task a
    # microsecond or two: bearable only where it runs for many. The worker itself does so once a launch.
    light = {"gpuos_plain", "gpuos_half", "gpuos_typed_f32", "gpuos_typed_i64", "gpuos_op_0_nop"}
    assert {symbol: frames[symbol] for symbol in light} == dict.fromkeys(light, 0)
    assert max(frames.values()) <= 1024, frames


def test_a_generation_with_an_injected_body_is_linked() -> None:
    target = (9, 0)
    ptxas = cuda_compile.find_ptxas()
    if ptxas is None:
        pytest.skip("no ptxas here: that injected bodies are linked stays unproved")
    body = re.sub(
        r"gpuos_op_0_nop", "gpuos_injected_nop", cuda_compile.compile_part("gpuos_op_0_nop", THREADS)
    )
    cubin, _ = cuda_compile.assemble(body, target, THREADS, ptxas)
    code = Code("gpuos_injected_nop", cubin)
    linked = cuda_compile.link(target, THREADS, {512: code, 513: code})
    assert b"gpuos_injected_nop" in linked.cubin and b"gpuos_executor" in linked.cubin
    with pytest.raises(MachineError, match="another_name"):
        cuda_compile.link(target, THREADS, {512: Code("another_name", cubin)})


def test_no_part_declares_what_nothing_reads(ptx: dict[str, str]) -> None:
    assert [symbol for symbol, text in ptx.items() if "NumbaEnv" in text] == []


def test_nothing_lives_in_local_memory(ptx: dict[str, str]) -> None:
    assert [symbol for symbol, text in ptx.items() if re.search(r"\b(ld|st)\.local|\.local ", text)] == []


def test_the_worker_calls_every_body(ptx: dict[str, str]) -> None:
    for kernel in KERNELS.values():
        called = re.search(rf"call\.uni \(retval0\),\s+{kernel.symbol},", ptx[WORKER])
        assert called, kernel.symbol


# --- the protocol ---


def test_the_pump_acquires_stamps_again_and_again(flow: Callable[[str], Flow]) -> None:
    pump = flow(PUMP)
    stamps = pump.find(ACQUIRE_STAMP)
    assert stamps
    assert any(pump.loops(at, BARRIER) for at in stamps)  # the window
    assert all(pump.loops(at) for at in stamps)  # the turns


def test_the_pump_moves_16_bytes_at_a_time(flow: Callable[[str], Flow]) -> None:
    pump = flow(PUMP)
    assert pump.find(r"ld\.relaxed\.sys\.global\.v2\.u64")
    assert pump.find(r"st\.global\.v2\.u64")


def test_the_pump_fences_before_it_hands_out(flow: Callable[[str], Flow]) -> None:
    """Once a window, and once more where the table of a program's call comes with it."""
    assert len(flow(PUMP).find(r"fence\.acq_rel\.gpu")) == 2


def test_parking_announces_then_fences_then_looks_again(flow: Callable[[str], Flow]) -> None:
    """And where it parks for more workers, it announces as well, and has nothing to look at again."""
    pump = flow(PUMP)
    fences = pump.find(r"fence\.sc\.sys")
    assert len(fences) == 2
    assert all(pump.always_after(fence, STORE_HOST, BARRIER) for fence in fences)
    assert any(pump.meets(fence, ACQUIRE_STAMP, pump.after) for fence in fences)


def test_tickets_are_drawn_with_acquire_and_release(flow: Callable[[str], Flow]) -> None:
    worker = flow(WORKER)
    tickets = worker.find(r"atom\.add\.acq_rel\.gpu\.global\.u64")
    assert any(worker.loops(at) for at in tickets)
    assert worker.find(r"atom\.(add|max)\S*u64") == sorted(
        tickets + worker.find(r"atom\.max\.relaxed\.gpu\.global\.u64")
    )


@pytest.mark.parametrize(
    ("symbol", "waits"),
    # Room in the queue, in both kinds of window. An item, and two tasks before it; of a program's call the
    # same two, and each lower run, of which the first look lies in the loop over them too.
    [(PUMP, 2), (WORKER, 7)],
    ids=["pump", "worker"],
)
def test_whatever_waits_reads_anew_in_a_loop_of_its_own(
    symbol: str, waits: int, flow: Callable[[str], Flow]
) -> None:
    code = flow(symbol)
    loads = code.find(ACQUIRE)
    polls = [at for at in loads if code.loops(at, BARRIER)]
    assert len(polls) == waits
    for first in set(loads) - set(polls):  # the compiler looks once before it enters the loop
        assert not set(polls).isdisjoint(code.walk(first, code.after, BARRIER))


def test_a_done_word_follows_a_fence(flow: Callable[[str], Flow]) -> None:
    worker = flow(WORKER)
    words = worker.find(STORE_HOST)
    assert words
    assert all(worker.always_after(at, r"fence\.acq_rel\.sys", BARRIER) for at in words)


def test_the_worker_copies_descriptors_past_l1(flow: Callable[[str], Flow]) -> None:
    worker = flow(WORKER)
    assert worker.find(r"cp\.async\.cg\.shared\.global")
    assert worker.find(r"cp\.async\.wait_all")
    assert not worker.find(r"cp\.async\.ca")


# --- the operators ---


def test_add_moves_16_bytes_at_a_time(ptx: dict[str, str]) -> None:
    add = ptx[TABLE["add"].kernels[0].symbol]
    assert add.count("ld.global.v4.f32") >= 6  # one vector, or two in flight
    assert add.count("st.global.v4.f32") >= 3


def alone(name: str) -> str:
    return cuda_compile.compile_kernel(TABLE[name].kernels[0], cuda_compile.OLDEST, alone=True)


def test_relu_compares_because_max_drops_nan() -> None:
    relu = alone("relu")
    assert "max.f32" not in relu
    assert "setp." in relu


def test_div_rounds_as_numpy_does() -> None:
    divisions = set(re.findall(r"\bdiv\.\S*f32", alone("div")))
    assert divisions == {"div.rn.f32"}


def test_quotients_of_four_lanes_are_tested_once(ptx: dict[str, str]) -> None:
    for symbol in (WORKER, "gpuos_plain"):
        assert "rcp.approx.ftz.f32" in ptx[symbol] and "div.rn.f32" in ptx[symbol], symbol
    sigmoid = alone("sigmoid")
    assert "rcp.approx.ftz.f32" in sigmoid and not re.search(r"\bdiv\.\S*f32", sigmoid)


def test_a_chain_tells_the_assembler_what_is_one_value(ptx: dict[str, str]) -> None:
    # The flags of the first task and of the next: in chains of f32, of two vectors a thread, and of halves.
    assert ptx[WORKER].count("shfl.sync.idx.b32") == 2 * 3


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "relu"])
def test_no_operator_fuses_or_flushes(name: str) -> None:
    assert not re.search(r"\bfma\.|\.ftz\b|\.approx\b", alone(name))
