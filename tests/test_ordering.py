"""A sequence of calls gives what one after another would: random programs, lanes, priorities, lifetime."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest

from experiments.equivalence import check
from gpuos_numba import ArgumentError, Runtime, Status

F32 = np.float32


@pytest.mark.parametrize(
    "settings",
    [{}, {"capacity": 8, "max_run": 3}, {"capacity": 2}, {"workers": 3, "start_position": (1 << 64) - 50}],
    ids=["ordinary", "small ring", "two slots", "positions wrap"],
)
def test_random_programs_equal_sequential_execution(machine: str, settings: dict[str, Any]) -> None:
    with Runtime(machine, **settings) as rt:
        assert check(rt, range(80 if not settings else 40)) == []


def test_a_value_that_many_read_is_overwritten_after_all_of_them(machine: str, arrays: Any) -> None:
    with Runtime(machine) as rt:
        x = arrays.to_device(np.zeros(64))
        outs = [arrays.to_device(np.zeros(64)) for _ in range(300)]
        for turn in range(5):
            rt.fill(out=x, value=float(turn + 1))
            for out in outs:
                rt.add(x, out, out=out)
        rt.synchronize(20)
        for out in outs:
            np.testing.assert_array_equal(arrays.to_host(out), np.full(64, 15, F32))


def test_what_many_wrote_is_read_after_all_of_them(machine: str, arrays: Any) -> None:
    with Runtime(machine) as rt:
        whole, total = arrays.to_device(np.zeros(64 * 50)), arrays.to_device(np.zeros(64 * 50))
        for turn in range(5):
            for part in range(50):
                rt.fill(out=whole[64 * part : 64 * part + 64], value=float(turn + part))
            rt.add(whole, total, out=total)
        rt.synchronize(20)
        expected = np.repeat([10.0 + 5 * part for part in range(50)], 64)
        np.testing.assert_array_equal(arrays.to_host(total), expected)


def test_after_takes_any_number_of_tickets(machine: str, arrays: Any) -> None:
    with Runtime(machine, order="none") as rt:
        for _ in range(20):
            parts = [arrays.to_device(np.zeros(2048)) for _ in range(20)]
            total = arrays.to_device(np.zeros(2048))
            tickets = [rt.fill(out=part, value=1.0) for part in parts]
            for part in parts:
                tickets.append(rt.add(part, total, out=total, after=tickets))
            assert tickets[-1].wait(20).status == Status.OK
            np.testing.assert_array_equal(arrays.to_host(total), np.full(2048, 20, F32))


def test_without_order_only_after_and_lanes_order(machine: str, arrays: Any) -> None:
    with Runtime(machine, order="none") as rt:
        x = arrays.to_device(np.zeros(256))
        lane = rt.lane("one")
        for _ in range(300):
            lane.add(x, 1.0, out=x)
        lane.synchronize(20)
        np.testing.assert_array_equal(arrays.to_host(x), np.full(256, 300, F32))


def test_the_default_lane_is_in_order(machine: str, arrays: Any) -> None:
    with Runtime(machine, order="lane") as rt:
        x = arrays.to_device(np.zeros(256))
        batch = rt.batch("add", [((x, 1.0), x)] * 50)
        for _ in range(6):
            rt.add(x, 1.0, out=x)
            rt.submit_batch(batch)
        rt.synchronize(20)
        np.testing.assert_array_equal(arrays.to_host(x), np.full(256, 306, F32))


def test_lanes_wait_for_each_other(machine: str, arrays: Any) -> None:
    with Runtime(machine, order="lane") as rt:
        x, y = arrays.to_device(np.zeros(4096)), arrays.to_device(np.zeros(4096))
        one, two = rt.lane("one"), rt.lane("two")
        two.wait(one)  # which holds nothing yet
        turns = 100
        for _ in range(turns):
            one.add(x, 1.0, out=x)
            two.wait(one.event())
            two.copy(x, out=y)
            one.wait(two)
        two.synchronize(20)
        np.testing.assert_array_equal(arrays.to_host(y), np.full(4096, turns, F32))
        with Runtime("cpu") as other, pytest.raises(ArgumentError, match="this Runtime"):
            one.wait(other.nop())
        with pytest.raises(AttributeError, match="no_such_operator"):
            one.no_such_operator()
        with pytest.raises(ArgumentError, match="priority='high'"):
            rt.lane(priority="high")


def test_a_lane_of_high_priority_overtakes_queued_work(machine: str) -> None:
    """At most `low_priority_depth` tasks of others lie ahead, and as many that one thread is adding."""
    with Runtime(machine, low_priority_depth=16) as rt:
        urgent = rt.lane("urgent", priority=1)
        batch = rt.batch("nop", [((), None)] * 1000)
        rt.nop().wait(20)
        holds = rt._keeper.holds()
        holds.take()
        assert rt._machine.wait_exited(10)
        start = rt.stats().submitted
        thread = threading.Thread(target=lambda: rt.submit_batch(batch))
        thread.start()
        while rt.stats().submitted < start + 16:
            pass
        ticket = urgent.nop()
        assert (ticket.position - (rt._start + start)) % (1 << 64) <= 2 * 16
        holds.give_back()
        holds.serve()
        thread.join(30)
        ticket.result(20)
        rt.synchronize(20)
        assert rt.stats().submitted == start + 1001
        del urgent
        assert rt._lanes.limit(None) == 0, "nothing is held back once the lane is gone"


def test_who_is_held_back_keeps_no_array_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime("cpu", low_priority_depth=1) as rt:
        urgent = rt.lane("urgent", priority=1)
        waits, go = threading.Event(), threading.Event()
        monkeypatch.setattr(rt, "_hold_back", lambda *_: (waits.set(), go.wait(30)))
        low = np.zeros(8, np.float32)
        thread = threading.Thread(target=lambda: rt.submit("fill", (), out=low, value=3.0))
        thread.start()
        assert waits.wait(30)
        out = np.zeros(8, np.float32)
        gone = weakref.ref(out)
        urgent.submit("fill", (), out=out, value=1.0).wait(20)
        del out
        rt._tidy()
        assert gone() is None
        go.set()
        thread.join(30)
        rt.synchronize(20)
        assert low[0] == 3


def test_threads_that_share_buffers_lose_nothing(machine: str, arrays: Any) -> None:
    with Runtime(machine, capacity=64) as rt:
        x = arrays.to_device(np.zeros(512))

        def work() -> None:
            for _ in range(200):
                rt.add(x, 1.0, out=x)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        rt.synchronize(30)
        np.testing.assert_array_equal(arrays.to_host(x), np.full(512, 800, F32))


def test_a_thousand_chains_of_five_are_a_thousand_runs(arrays: Any) -> None:
    """Instance by instance: the tasks of one chain lie side by side and are linked, and none waits."""
    from gpuos_numba.descriptor import TASK, Flag

    with Runtime("cpu", capacity=8192) as rt:
        holds = rt._keeper.holds()
        holds.take()
        slots = [np.zeros(64, F32) for _ in range(1000)]
        rt.submit_batch(rt.batch("add", [((x, 1.0), x) for x in slots for _ in range(5)]))
        ring = rt._machine.arrays.ring.view(TASK)[:5000]
        linked = (ring["flags"] & Flag.LINK) != 0
        waiting = (ring["flags"] & (Flag.AFTER_0 | Flag.AFTER_1)) != 0
        inner = [i for i in range(4999) if i % 5 != 4 and (i + 1) % 256]
        assert linked[inner].all() and not linked[4::5].any()
        assert [i for i in range(5000) if waiting[i]] == [i for i in range(256, 5000, 256) if i % 5]
        holds.give_back()
        holds.serve()
        rt.synchronize(30)
        assert all((x == 5).all() for x in slots)


def test_calls_that_follow_each_other_become_runs_where_they_come_together() -> None:
    """One call at a time: the pump links what it finds in one window, to at most `max_run`."""
    from gpuos_numba.descriptor import TASK, Flag

    for max_run, count in ((256, 100), (7, 100), (1, 20)):
        with Runtime("cpu", max_run=max_run, capacity=256) as rt:
            rt.nop().wait(20)
            holds = rt._keeper.holds()
            holds.take()
            assert rt._machine.wait_exited(10)
            x, y = np.zeros(64, F32), np.zeros(64, F32)
            first = rt.add(x, 1.0, out=x).position
            for _ in range(count - 1):
                rt.add(x, 1.0, out=x)
            for _ in range(3):
                rt.add(y, x, out=y)
            holds.give_back()
            holds.serve()
            rt.synchronize(20)
            assert (x == count).all() and (y == 3 * count).all()
            ring = rt._machine.read("device_ring").view(TASK)
            flags = ring["flags"][first : first + count]
            linked = (flags & Flag.LINK) != 0
            waits = (flags & Flag.AFTER_0) != 0
            assert not (waits[1:] & linked[:-1]).any(), "who is linked to need not wait"
            assert (waits[1:] | linked[:-1]).all(), "everybody else does"
            ends = np.flatnonzero(~np.append(linked[:-1], False))
            assert np.diff(np.insert(ends, 0, -1)).max() <= max_run
            if max_run == 256:
                assert linked[:-1].sum() >= count - 4, "and all came together"
