"""Layouts: flattened without changing the walk, interned once, and never changed under a task in progress."""

from __future__ import annotations

import itertools
import math
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuos_numba.descriptor import LAYOUT, DType
from gpuos_numba.errors import ArgumentError, HangError
from gpuos_numba.host import layouts
from gpuos_numba.host.arrays import view_cpu
from gpuos_numba.host.layouts import TASK_LAYOUTS, LayoutTable
from gpuos_numba.shapes import aligned_strides, collapse

F32 = DType.F32


def walk(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Offsets in row-major order: the oracle."""
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


class Table(LayoutTable):
    """A table that writes down what it asks of its owner."""

    def __init__(self, slots: int) -> None:
        self.memory = np.zeros(slots, LAYOUT)
        self.published: list[int] = []
        self.drains = 0
        super().__init__(self.memory, self.on_publish, self.on_drain)

    def on_publish(self, count: int) -> None:
        self.published.append(count)

    def on_drain(self) -> None:
        self.drains += 1

    def fill(self, start: int = 1000) -> None:
        for extent in range(start, start + len(self.memory)):
            with self.using():
                self.intern(F32, (extent,), (2,))


# ---- walks ------------------------------------------------------------------------------------------------


@st.composite
def spaces(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A shape and operands over it, often mergeable: slices and broadcasts of contiguous arrays."""
    shape = tuple(draw(st.lists(st.integers(0 if draw(st.booleans()) else 1, 4), max_size=5)))
    operands = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            strides = tuple(draw(st.integers(-6, 6)) for _ in shape)
        else:
            step = draw(st.sampled_from([1, 2, -1, 0]))
            strides = tuple(step * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        operands.append(strides)
    return shape, operands


@given(spaces())
@settings(max_examples=500, deadline=None)
def test_collapse_keeps_every_operand_walk(space: tuple[tuple[int, ...], list[tuple[int, ...]]]) -> None:
    shape, operands = space
    flat, collapsed = collapse(shape, operands)
    assert len(collapsed) == len(operands) and len(flat) <= max(1, len(shape))
    for before, after in zip(operands, collapsed, strict=True):
        assert walk(flat, after) == walk(shape, before)
    if math.prod(shape):
        assert 1 not in flat
        assert collapse(flat, collapsed) == (flat, collapsed)


def test_collapse_of_contiguous_single_and_empty_spaces() -> None:
    assert collapse((2, 3, 4), [(12, 4, 1)] * 3) == ((24,), [(1,)] * 3)
    assert collapse((), [()]) == ((), [()])
    assert collapse((1, 1), [(5, 7)]) == ((), [()])
    assert collapse((3, 0), [(9, 9), (1, 1)]) == ((0,), [(1,), (1,)])
    assert collapse((2, 3, 4), [(12, 4, 1), (0, 0, 1)]) == ((6, 4), [(4, 1), (0, 1)])


@given(st.lists(st.integers(1, 3), max_size=4), st.integers(0, 15), st.integers(0, 2))
def test_aligned_strides_broadcast_as_in_numpy(target: list[int], ones: int, drop: int) -> None:
    full = tuple(target)
    shape = tuple(1 if ones >> dim & 1 else extent for dim, extent in enumerate(full))[drop:]
    array = np.zeros(shape, np.float32)
    expected = np.broadcast_to(array, full)
    aligned = aligned_strides(view_cpu(array), full)
    assert walk(full, aligned) == walk(full, tuple(s // 4 for s in expected.strides))


def test_aligned_strides_refuses_what_does_not_broadcast() -> None:
    view = view_cpu(np.zeros((2, 3), np.float32))
    for shape in [(3,), (3, 3), (2, 4)]:
        with pytest.raises(ArgumentError, match=r"\(2, 3\) does not broadcast"):
            aligned_strides(view, shape)


# ---- the table --------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(list(DType)), st.lists(st.integers(1, 3), max_size=8).map(tuple)),
        max_size=60,
    )
)
@settings(max_examples=100, deadline=None)
def test_equal_layouts_share_a_slot_that_holds_them(
    wanted: list[tuple[DType, tuple[int, ...]]],
) -> None:
    table = Table(16)
    for dtype, shape in wanted:
        strides = tuple(-2 * extent for extent in shape)
        with table.using():
            slot = table.intern(dtype, shape, strides)
            assert table.intern(dtype, shape, strides) == slot
            entry, ndim = table.memory[slot], len(shape)
            assert (entry["dtype"], entry["ndim"], entry["count"]) == (dtype, ndim, math.prod(shape))
            assert tuple(entry["shape"][:ndim]) == shape and tuple(entry["strides"][:ndim]) == strides
    assert table.published == list(range(1, table.count + 1))


def test_an_entry_is_written_before_its_count_is_published() -> None:
    seen: list[tuple[int, int]] = []
    memory = np.zeros(8, LAYOUT)
    table = LayoutTable(memory, lambda n: seen.append((n, int(memory[(n - 1) % 8]["count"]))), lambda: None)
    for extent in range(100, 120):
        with table.using():
            table.intern(F32, (extent,), (2,))
    assert seen == [(i + 1, 100 + i) for i in range(20)]


def test_a_full_table_drains_and_counts_on() -> None:
    table = Table(8)
    table.fill()
    assert table.drains >= 1 and table.epoch == table.drains
    before = table.count
    with table.using():
        slot = table.intern(F32, (7, 7), (14, 2))
        assert slot == before % 8
    assert table.count == before + 1 == table.published[-1]


def test_a_failed_drain_changes_nothing_and_is_tried_again() -> None:
    table = Table(TASK_LAYOUTS)
    with table.using():
        slot = table.intern(F32, (3,), (2,))

    def fail() -> None:
        raise HangError("stuck")

    table._drain = fail
    with pytest.raises(HangError):
        table.enter()
    assert table.epoch == 0 and table.intern(F32, (3,), (2,)) == slot
    table._drain = table.on_drain
    with table.using():
        assert table.epoch == 1 and table.intern(F32, (4,), (2,)) == 1


def test_slots_of_a_section_outlive_a_recycling_that_another_thread_asks_for() -> None:
    table = Table(2 * TASK_LAYOUTS)
    for extent in range(TASK_LAYOUTS):
        with table.using():
            table.intern(F32, (100 + extent,), (2,))
    interned, submitted, recycled = threading.Event(), threading.Event(), threading.Event()
    found: list[int] = []

    def slow_submitter() -> None:
        with table.using():
            slot = table.intern(F32, (5,), (2,))
            interned.set()
            submitted.wait(10)
            found.append(int(table.memory[slot]["count"]))
            assert not recycled.is_set() and table.drains == 0

    def recycler() -> None:
        interned.wait(10)
        with table.using():
            recycled.set()
            for extent in range(TASK_LAYOUTS):
                table.intern(F32, (200 + extent,), (2,))

    threads = [threading.Thread(target=slow_submitter), threading.Thread(target=recycler)]
    for thread in threads:
        thread.start()
    interned.wait(10)
    time.sleep(0.05)  # the recycler is waiting now
    assert not recycled.is_set()
    submitted.set()
    for thread in threads:
        thread.join(10)
    assert found == [5] and recycled.is_set() and table.drains == 1


def test_many_threads_in_a_tiny_table_never_see_another_layout_under_their_slot() -> None:
    """Forbidden: an entry that is not the layout interned, from its section to the drain after it."""
    table = Table(8)
    queued: list[tuple[int, int]] = []
    wrong: list[Any] = []
    lock = threading.Lock()

    def drain() -> None:
        with lock:
            wrong.extend(q for q in queued if table.memory[q[0]]["count"] != q[1])
            queued.clear()
        table.on_drain()

    table._drain = drain

    def submitter(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(300):
            extents = [int(e) for e in random.integers(1, 40, 3)]
            with table.using():
                slots = [table.intern(F32, (extent,), (2,)) for extent in extents]
                time.sleep(0)
                with lock:
                    queued.extend(zip(slots, extents, strict=True))

    threads = [threading.Thread(target=submitter, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    drain()
    assert wrong == [] and table.drains > 10 and table.published == list(range(1, table.count + 1))


def test_a_section_larger_than_the_table_is_refused() -> None:
    table = Table(8)
    with pytest.raises(ArgumentError, match="submit it in parts"), table.using(100):
        raise AssertionError("not reached")
    with pytest.raises(ArgumentError, match="submit it in parts"), table.using(1):
        for extent in range(9):
            table.intern(F32, (100 + extent,), (2,))
    with table.using():  # the failed ones left nothing behind
        assert table.epoch == 1


def test_a_submission_that_never_ends_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SECTION_LIMIT_S", 0.05)
    table = Table(TASK_LAYOUTS)
    table.enter()
    table.intern(F32, (5,), (2,))
    with pytest.raises(HangError, match="between interning and submitting"):
        table.enter()
    table.leave()
    with table.using():
        assert table.epoch == 1


def test_wrong_memory_and_wrong_layouts_are_refused() -> None:
    with pytest.raises(ArgumentError, match="layout memory"):
        LayoutTable(np.zeros(64, "u1"), lambda _: None, lambda: None)
    with pytest.raises(ArgumentError, match="layout memory"):
        Table(TASK_LAYOUTS - 1)
    with Table(8).using() as table, pytest.raises(ArgumentError, match="at most 8"):
        table.intern(F32, (2,) * 9, (1,) * 9)
