"""A run of plain tasks by many threads that are as far apart as the barriers let them be.

The bodies run as Python, each thread of the block in a greenlet of its own: one runs until it must wait for
the others, then the next, first or last thread first. What needs a barrier and has none comes out wrong.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from greenlet import greenlet
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpuos_numba.descriptor import TASK, TASK_BYTES, DType, Flag
from gpuos_numba.device import runs
from gpuos_numba.device.elementwise import Entry
from gpuos_numba.protocol import DIGEST_BYTES, GROUP, SCRATCH_ARENA, SCRATCH_DIGESTS, SCRATCH_TASKS

Tasks = list[dict[str, Any]]

HEAP = 1 << 20
POSITION = 5 * GROUP  # of the first task of a group

NEG, HALVE, ADD, SUB = range(1, 5)
NEG_HALF, HALVE_HALF, ADD_HALF, SUB_HALF = range(5, 9)
SPECS: dict[int, Any] = {
    NEG: lambda x, y: -x,
    HALVE: lambda x, y: x * x.dtype.type(0.5),
    ADD: lambda x, y: x + y,
    SUB: lambda x, y: x - y,
}


def _function(op: int) -> Any:
    def make(m: Any) -> Any:
        return lambda x, y, z, p, q: SPECS[op](x, y)

    return make


ENTRIES = [Entry(op, _function(op)) for op in SPECS]
HALF_ENTRIES = [Entry(op + 4, _function(op)) for op in SPECS]


class Thread:
    """The primitives that a run calls, as attributes."""

    def __init__(self, **primitives: Any) -> None:
        vars(self).update(primitives)


class Block:
    """`width` threads, in step only where they wait for each other."""

    def __init__(self, width: int, heap: np.ndarray, last_first: bool) -> None:
        self.width, self.last_first = width, last_first
        self.heap, self.scratch = heap, np.zeros(SCRATCH_ARENA, np.uint8)
        self.barriers = 0
        self.thread = 0
        self.m = self._primitives()

    def words(self, address: Any, dtype: Any, count: int = 1) -> np.ndarray:
        heap = address >= HEAP
        memory, place = (self.heap, int(address) - HEAP) if heap else (self.scratch, int(address))
        assert place % np.dtype(dtype).itemsize == 0 and place >= 0
        return memory[place : place + count * np.dtype(dtype).itemsize].view(dtype)

    def run(self, body: Any) -> list[Any]:
        """What `body()` answers in every thread."""
        order = range(self.width)[:: -1 if self.last_first else 1]
        threads = {number: greenlet(body) for number in order}
        asked: dict[int, Any] = dict.fromkeys(order, ())
        answers: dict[int, Any] = {}
        while threads:
            for number, thread in threads.items():
                self.thread = number
                asked[number] = thread.switch(*asked[number])
                if thread.dead:
                    answers[number] = asked[number]
            threads = {number: thread for number, thread in threads.items() if not thread.dead}
            kinds = {asked[number][0] for number in threads}
            assert len(kinds) <= 1 and (not threads or not answers), "some wait for what others never reach"
            if kinds == {"barrier"}:
                self.barriers += 1
                asked = dict.fromkeys(threads, (None,))
            elif kinds:
                votes = {number: asked[number][1] for number in threads}
                asked = {n: (self._votes(votes, n),) for n in threads}
        return [answers[number] for number in range(self.width)]

    @staticmethod
    def _votes(votes: dict[int, Any], thread: int) -> np.uint64:
        warp = thread & ~31
        return np.uint64(sum(int(votes.get(warp + lane, 0)) << lane for lane in range(32)))

    def _primitives(self) -> Any:
        u64, f32, words = np.uint64, np.float32, self.words

        def wait(*what: Any) -> Any:
            return greenlet.getcurrent().parent.switch(what)

        def load(dtype: Any) -> Any:
            return lambda address: u64(words(address, dtype)[0])

        def store(dtype: Any) -> Any:
            def put(address: Any, value: Any) -> None:
                words(address, dtype)[0] = int(value) & (2 ** (8 * np.dtype(dtype).itemsize) - 1)

            return put

        def pair(address: Any) -> tuple[Any, Any]:
            assert address % u64(16) == 0
            return u64(words(address, u64)[0]), u64(words(address + u64(8), u64)[0])

        def store_pair(address: Any, low: Any, high: Any) -> None:
            assert address % u64(16) == 0
            words(address, u64, 2)[:] = low, high

        def store_f32x4(address: Any, *values: Any) -> None:
            words(address, f32, 4)[:] = values

        def store_f32(address: Any, value: Any) -> None:
            words(address, f32)[0] = value

        def to_f32(bits: Any) -> Any:
            return np.array(int(bits) & 0xFFFFFFFF, np.uint32).view(f32)[()]

        def half_to_f32(bits: Any) -> Any:
            return f32(np.array(int(bits) & 0xFFFF, np.uint16).view(np.float16)[()])

        return Thread(
            u64=u64,
            f32=f32,
            device=lambda body: body,
            thread_index=lambda: u64(self.thread),
            block_width=lambda: u64(self.width),
            barrier=lambda: wait("barrier"),
            uniform=lambda value: value,  # no wait: it holds back nobody but its warp
            ballot=lambda vote: wait("ballot", vote),
            load_task_u64=load(u64),
            load_task_u32=load(np.uint32),
            load_task_pair=pair,
            load_pair=pair,
            prefetch=lambda address: words(address, np.uint8, 128),
            store_u64=store(u64),
            store_pair=store_pair,
            load_f32=lambda address: words(address, f32)[0],
            load_f32x4=lambda address: tuple(words(address, f32, 4)),
            store_f32=store_f32,
            store_f32x4=store_f32x4,
            load_u8=load(np.uint8),
            load_u16=load(np.uint16),
            load_word=load(np.uint32),
            load_long=load(u64),
            store_u8=store(np.uint8),
            store_u16=store(np.uint16),
            bits_f32=to_f32,
            f32_bits=lambda value: u64(np.array(value, f32).view(np.uint32)[()]),
            f16_to_f32=half_to_f32,
            f32_to_f16=lambda value: u64(np.array(value, np.float16).view(np.uint16)[()]),
            bf16_to_f32=half_to_f32,
            f32_to_bf16=lambda value: u64(np.array(value, np.float16).view(np.uint16)[()]),
        )


def _stage(tasks: Tasks, heap: np.ndarray, width: int, last_first: bool, first: int) -> tuple[Block, Any]:
    """A block with the tasks in scratch, linked; and its run_plain."""
    block = Block(width, heap, last_first)
    staged = block.scratch[SCRATCH_TASKS : SCRATCH_TASKS + 2 * GROUP * TASK_BYTES].view(TASK)
    for number, task in enumerate(tasks):
        record = staged[(POSITION + first + number) % (2 * GROUP)]
        record["op_id"], record["count"], record["dtypes"] = task["op"], task["count"], task["dtype"]
        record["inputs"][:2], record["outputs"][0] = task["inputs"], task["out"]
        record["flags"] = task.get("flags", 0) | (Flag.LINK if number + 1 < len(tasks) else 0)
        record["tiles"] = task.get("tiles", 0)
    return block, runs.make_run_plain(block.m, ENTRIES, HALF_ENTRIES, 2)[1]


def _run(block: Block, run_plain: Any, position: int) -> int:
    """The position that all threads answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # u64 wraps
        (last,) = set(block.run(lambda: run_plain(np.uint64(0), np.uint64(position))))
    return int(last)


def _execute(tasks: Tasks, heap: np.ndarray, width: int, last_first: bool, first: int) -> Block:
    """All tasks, as a worker would: run_plain again from where it stopped, a barrier before each time."""
    block, run_plain = _stage(tasks, heap, width, last_first, first)
    at, end = POSITION + first, POSITION + first + len(tasks)
    while at < end:
        at = _run(block, run_plain, at) + 1
    return block


def _expect(tasks: Tasks, heap: np.ndarray) -> None:
    """The same one after another, in NumPy."""
    for task in tasks:
        dtype: Any = np.float32 if task["dtype"] == DType.F32 else np.float16
        size = task["count"] * np.dtype(dtype).itemsize

        def view(address: int, size: int = size, dtype: Any = dtype) -> np.ndarray:
            return heap[address - HEAP : address - HEAP + size].view(dtype)

        spec = SPECS[(task["op"] - 1) % 4 + 1]
        x, y = (view(each).astype(np.float32) for each in task["inputs"])
        view(task["out"])[:] = spec(x, y).astype(dtype)


def _task(op: int, x: int, y: int, out: int, count: int, **more: Any) -> dict[str, Any]:
    dtype = DType.F32 if op < NEG_HALF else DType.F16
    return {
        "op": op,
        "inputs": (HEAP + x, HEAP + y),
        "out": HEAP + out,
        "count": count,
        "dtype": dtype,
    } | more


def _check(tasks: Tasks, width: int = 32, last_first: bool = False, first: int = 0) -> Block:
    heap = np.zeros(1 << 14, np.uint8)
    heap.view(np.float16)[:] = np.random.default_rng(1).integers(-8, 8, heap.size // 2)
    if tasks[0]["dtype"] == DType.F32:
        heap.view(np.float32)[:] = np.random.default_rng(1).standard_normal(heap.size // 4)
    want = heap.copy()
    _expect(tasks, want)
    block = _execute(tasks, heap, width, last_first, first)
    assert np.array_equal(heap, want)
    return block


def _flags(block: Block, number: int) -> int:
    at = SCRATCH_DIGESTS + DIGEST_BYTES * number + 24
    return int(block.scratch[at : at + 8].view(np.uint64)[0]) & 0xFF


@pytest.mark.parametrize("count", [32, 128, 130, 256], ids=["short", "a vector each", "a rest", "two each"])
def test_a_chain_on_whole_arrays_needs_one_barrier_a_group(count: int) -> None:
    block = _check([_task(ADD, 0, 4096, 0, count)] * GROUP, last_first=True)
    assert block.barriers == 1
    held = _flags(block, 1) & (runs.FAST | runs.HELD_X | runs.HELD_Y | runs.APART)
    assert held == (0 if count == 130 else runs.FAST | runs.HELD_X)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("count", [32, 128, 130, 256, 300])
@pytest.mark.parametrize("shift", [4, 16, 512])
def test_what_one_thread_writes_and_another_reads_waits(shift: int, count: int, last_first: bool) -> None:
    there = _task(ADD, 4096, 8192, 0, count)
    for back in (
        _task(ADD, shift, 8192, 12288, count),
        _task(NEG, 12288, 0, shift, count),
        _task(SUB, 8192, shift, 8192, count),
        _task(NEG, 12288, 0, 4096 + shift, count),
    ):
        block = _check([there, back, there], last_first=last_first)
        assert block.barriers >= (2 if shift < 4 * count else 1)


def test_an_unaligned_operand_splits_otherwise() -> None:
    tasks = [_task(NEG, 4096, 0, 0, 64), _task(ADD, 0, 8196, 0, 64), _task(NEG, 0, 0, 4096, 64)]
    assert _check(tasks).barriers == 3
    _check(tasks, last_first=True)


def test_fewer_elements_of_the_same_array_wait() -> None:
    tasks = [_task(NEG, 0, 0, 4096, 130), _task(NEG, 4096, 0, 8192, 128), _task(NEG, 8192, 0, 0, 129)]
    for last_first in (False, True):
        assert _check(tasks, last_first=last_first).barriers == 3


def test_a_held_result_is_rounded_as_memory_rounds_it() -> None:
    tasks = [_task(HALVE_HALF, 0, 0, 4096, 64), _task(ADD_HALF, 4096, 4096, 8192, 64)] * 3
    for op, x, y, out in ((SUB_HALF, 4096, 8192, 4096), (NEG_HALF, 4096, 0, 0)):
        tasks.append(_task(op, x, y, out, 64))
    _check(tasks)


@pytest.mark.parametrize(
    "stop",
    [{"flags": Flag.AFTER_0}, {"flags": Flag.AFTER_1}, {"tiles": 2}, {"op": ADD_HALF}, {"op": 99}],
    ids=["waits", "waits too", "tiled", "of another kind", "not plain"],
)
def test_what_another_must_do_ends_the_call(stop: dict[str, Any]) -> None:
    plain = _task(ADD, 0, 4096, 0, 128)
    block, run_plain = _stage([plain, plain, plain | stop, plain], np.zeros(1 << 14, np.uint8), 32, False, 0)
    assert _run(block, run_plain, POSITION) == POSITION + 1


@st.composite
def _any_run(draw: Any) -> tuple[Tasks, int, bool, int]:
    half = 4 * draw(st.booleans())
    size = 2 if half else 4
    starts = [0, 4096, 8192, *draw(st.lists(st.integers(0, 2048).map(lambda n: n * size), max_size=3))]
    sizes = st.sampled_from([0, 1, 3, 8, 64, 128, 130, 256, 264, 300, 520])
    count = st.sampled_from(draw(st.lists(sizes, min_size=1, max_size=2)))
    place, first = st.sampled_from(starts), draw(st.integers(0, GROUP - 1))
    tasks = []
    for _ in range(draw(st.integers(1, GROUP - first))):
        x, y, out, n = draw(place), draw(place), draw(place), draw(count)
        if all(out == each or abs(out - each) >= n * size for each in (x, y)):  # others are refused
            tasks.append(_task(draw(st.integers(1, 4)) + half, x, y, out, n))
    assume(tasks)
    return tasks, draw(st.sampled_from([32, 64])), draw(st.booleans()), first


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(_any_run())
def test_any_run_equals_one_task_after_another(run: tuple[Tasks, int, bool, int]) -> None:
    tasks, width, last_first, first = run
    _check(tasks, width, last_first, first)
