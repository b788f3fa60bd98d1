"""The tracker: what a sequence of reads and writes must wait for, against the plain definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuos_numba.host.order import ACCESS, Tracker, pack_ranges

Ranges = list[tuple[int, int]]
Call = tuple[Ranges, Ranges]


def records(calls: list[Call]) -> np.ndarray:
    return np.frombuffer(b"".join(pack_ranges(reads, writes) for reads, writes in calls), ACCESS)


def conflicts(one: Call, other: Call) -> bool:
    """Whether two tasks must run in order: they overlap, and one of them writes there."""

    def meet(first: Ranges, second: Ranges) -> bool:
        return any(a < d and c < b for a, b in first for c, d in second)

    return meet(one[1], other[1]) or meet(one[0], other[1]) or meet(one[1], other[0])


def ancestors(deps: list[list[int]]) -> list[set[int]]:
    """All tasks that each waits for, through others too."""
    result: list[set[int]] = []
    for each in deps:
        result.append(set(each).union(*(result[other] for other in each)))
    return result


def check(calls: list[Call], segments: int | None = None) -> list[list[int]]:
    slots = 1 << max(1, (len(calls) - 1).bit_length())
    tracker = Tracker(slots, segments)
    deps = tracker.dependencies(records(calls))
    waited = ancestors(deps)
    for number, call in enumerate(calls):
        for other in range(number):
            if conflicts(calls[other], call):
                assert other in waited[number], (other, number)
    found = tracker.segments
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
    return deps


BYTES = st.tuples(st.integers(1, 40), st.integers(1, 12)).map(lambda r: (r[0], r[0] + r[1]))
SAME = st.sampled_from([(16 * i, 16 * i + 16) for i in range(6)])
RANGES = st.one_of(BYTES, SAME)
CALLS = st.lists(
    st.tuples(st.lists(RANGES, max_size=4), st.lists(RANGES, max_size=2)), min_size=1, max_size=60
)


@settings(max_examples=300, deadline=None)
@given(CALLS)
def test_whatever_conflicts_is_waited_for(calls: list[Call]) -> None:
    check(calls)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32))
def test_many_ranges_in_any_order_are_told_apart(seed: int) -> None:
    random = np.random.default_rng(seed)
    calls: list[Call] = []
    for _ in range(400):
        starts, sizes = random.integers(1, 1 << 14, 3).tolist(), random.choice([1, 8, 64, 3000], 3).tolist()
        a, b, c = ((start, start + size) for start, size in zip(starts, sizes, strict=True))
        calls.append(([a, b], [c]))
    check(calls)


@pytest.mark.parametrize("seed", range(5))
def test_a_table_that_is_full_forgets_and_stays_right(seed: int) -> None:
    random = np.random.default_rng(seed)
    calls: list[Call] = []
    for start in random.integers(1, 1 << 20, (400, 2)).tolist():
        calls.append(([(start[0], start[0] + 8)], [(start[1], start[1] + 8)]))
    check(calls, segments=1)


def test_what_is_independent_stays_independent() -> None:
    chains = 50
    calls = [
        ([(64 * c + 1, 64 * c + 33)], [(64 * c + 1, 64 * c + 33)]) for _ in range(4) for c in range(chains)
    ]
    deps = check(calls)
    assert all(each == ([number - chains] if number >= chains else []) for number, each in enumerate(deps))


def test_readers_do_not_wait_for_each_other_and_a_writer_waits_for_all() -> None:
    shared = (1, 100)
    calls: list[Call] = [
        ([], [shared]),
        *[([shared], [(200 + 8 * i, 208 + 8 * i)]) for i in range(20)],
        ([], [shared]),
    ]
    deps = check(calls)
    assert deps[1:21] == [[0]] * 20
    assert set(range(1, 21)) <= ancestors(deps)[21]


def test_of_a_chain_only_the_latest_is_waited_for() -> None:
    x, w = (1, 9), (11, 19)
    calls: list[Call] = [([w], [x])] * 10 + [([x], [w])]
    deps = check(calls)
    assert deps == [[]] + [[i] for i in range(10)]


def test_parts_of_a_range_are_waited_for_apart() -> None:
    whole, left, right = (0, 64), (0, 32), (32, 64)
    deps = check([([], [whole]), ([], [left]), ([], [right]), ([left], []), ([right], []), ([whole], [])])
    assert deps[1:] == [[0], [0], [1], [2], [1, 2]]


def test_a_growing_range_does_not_grow_the_table() -> None:
    """A cache that is written row by row and read whole, as in decoding."""
    rows: list[Call] = []
    for row in range(200):
        rows += [([], [(8 * row, 8 * row + 8)]), ([(0, 8 * row + 8)], [(1 << 20, (1 << 20) + 8)])]
    tracker = Tracker(512)
    deps = tracker.dependencies(records(rows))
    assert all(len(each) <= 2 for each in deps)
    assert len(tracker.segments) < 10


def test_too_many_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="8 ranges"):
        pack_ranges([(i, i + 1) for i in range(8)], [])
