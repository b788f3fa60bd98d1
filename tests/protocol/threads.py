"""The host's threads in the model: a producer that submits and waits, and who launches.

They call the real bodies of host/ring.py; what is written here is only what runtime.py does between them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import bodies

bodies.register(__file__)

TASK_BYTES = 128


def make_launch(m: Any, ring: ModuleType, machine: Any) -> Any:
    """Launch unless somebody else just did: under the launch lock, look again, count, enqueue."""
    u64, compare_and_swap, store_release_sys, load_acquire_sys = (
        m.u64,
        m.compare_and_swap,
        m.store_release_sys,
        m.load_acquire_sys,
    )
    nobody_serves, lock, enqueued_at = ring.make_nobody_serves(m), machine.launch_lock, machine.enqueued
    counts_late = machine.scenario.counts_late
    ZERO, ONE = u64(0), u64(1)

    def launch(host: Any) -> None:
        while compare_and_swap(lock, ZERO, ONE) == ZERO:
            pass
        if nobody_serves(host) != ZERO:
            # Counted first: a launch that runs before it is counted could park unnoticed.
            enqueued = load_acquire_sys(enqueued_at)
            if counts_late:
                m.launch()
            store_release_sys(enqueued_at, enqueued + ONE)
            if not counts_late:
                m.launch()
        store_release_sys(lock, ZERO)

    return launch


def make_producer(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`producer(host, batches)`: submit each batch whole, then wait for every task and look at its result."""
    u64, load_u64 = m.u64, m.load_u64
    submit, wait_range, status_of = ring.make_submit(m), ring.make_wait_range(m), ring.make_status_of(m)
    launch = make_launch(m, ring, machine)
    ZERO, ONE, RANGES, SLOTS = u64(0), u64(1), m.private, u64(8)
    NEVER = u64((1 << 64) - 1)
    PARKED = u64(ring.PARKED)
    hold, store_release, DONE = ring.make_hold(m), m.store_release_sys, u64(ring.DONE)
    polls, PENDING = machine.scenario.polls, u64(ring.PENDING_STATUS)
    tasks, waits = machine.scenario.tasks, machine.scenario.waits

    def producer(host: Any, batches: Any) -> None:
        ranges: tuple[tuple[Any, Any], ...] = ()
        for batch in batches:
            if tasks[batch[0]].held:
                answer = PARKED
                while answer != DONE:
                    position, answer = hold(host, NEVER)
                    if answer == PARKED:
                        launch(host)
                store_release(machine.watched_at, position + ONE)
                ranges = (*ranges, (position, ONE))
                continue
            source = machine.task_at + u64(batch[0] * TASK_BYTES)
            left = u64(len(batch))
            after = tasks[batch[0]].after  # earlier tasks of this producer
            afters = u64(len(after))
            after_0, after_1 = ZERO, ZERO
            if len(after) > 0:
                after_0 = m.position_of(after[0])
            if len(after) > 1:
                after_1 = m.position_of(after[1])
            while left != ZERO:
                sent, written, parked = submit(
                    host, source, left, ZERO, afters, after_0, after_1, NEVER, RANGES, SLOTS
                )
                if parked != ZERO:
                    launch(host)
                left = left - sent
                source = source + sent * u64(TASK_BYTES)
                for i in range(written):
                    ranges = (*ranges, (load_u64(RANGES + u64(16 * i)), load_u64(RANGES + u64(16 * i + 8))))
                m.forget()
        if waits:
            for position, count in ranges:
                end = position + count
                at = position
                while polls and at != end:
                    status = status_of(host, at)
                    if status != PENDING:
                        m.observe(at, status)
                        at = at + ONE
                while at != end:
                    answer, at = wait_range(host, at, end, NEVER)
                    if answer == PARKED:
                        launch(host)
                at = position
                while at != end:
                    m.observe(at, status_of(host, at))
                    at = at + ONE

    return producer


def make_stepper(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`stepper(host, batches)`: a producer that waits to be told before it claims and before it publishes."""
    u64 = m.u64
    try_claim, fill, publish = ring.make_try_claim(m), ring.make_fill(m), ring.make_publish(m)
    retire, nobody_serves = ring.make_retire(m), ring.make_nobody_serves(m)
    launch = make_launch(m, ring, machine)
    ZERO, CLAIM, PUBLISH = u64(0), 1, 2

    def stepper(host: Any, batches: Any) -> None:
        for batch in batches:
            source = machine.task_at + u64(batch[0] * TASK_BYTES)
            left = u64(len(batch))
            while left != ZERO:
                m.gate(CLAIM)
                position, granted = try_claim(host, left)
                if granted == ZERO:
                    retire(host)
                    if nobody_serves(host) != ZERO:
                        launch(host)
                    continue
                fill(host, source, granted, position, ZERO, ZERO, ZERO, ZERO)
                m.gate(PUBLISH)
                if publish(host, position, granted) != ZERO:
                    launch(host)
                left = left - granted
                source = source + granted * u64(TASK_BYTES)

    return stepper


def make_stream(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`stream(host)`: is given the withheld position, and stores its stamp when it gets there."""
    u64, load_acquire, store_release = m.u64, m.load_acquire_sys, m.store_release_sys
    ONE, EIGHT, mask = u64(1), u64(8), u64(machine.scenario.capacity - 1)
    start = u64(machine.scenario.start)

    def stream(host: Any) -> None:
        stamp = start
        while stamp == start:
            stamp = load_acquire(machine.watched_at)
        store_release(machine.stamps_at + ((stamp - ONE) & mask) * EIGHT, stamp)

    return stream


def make_watcher(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`watcher(host)`: the thread that watches, from being told of a position until the pump passed it."""
    u64, load_acquire = m.u64, m.load_acquire_sys
    watch, launch = ring.make_watch(m), make_launch(m, ring, machine)
    NEVER, PARKED, DONE = u64((1 << 64) - 1), u64(ring.PARKED), u64(ring.DONE)
    start = u64(machine.scenario.start)

    def watcher(host: Any) -> None:
        told = start
        while told == start:
            told = load_acquire(machine.watched_at)
        answer = PARKED
        while answer != DONE:
            answer = watch(host, NEVER)
            if answer == PARKED:
                launch(host)

    return watcher


def make_spare(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`spare(host)`: queues a launch behind the one that runs, at any moment, needed or not."""
    u64, compare_and_swap, store_release_sys, load_acquire_sys = (
        m.u64,
        m.compare_and_swap,
        m.store_release_sys,
        m.load_acquire_sys,
    )
    lock, enqueued_at = machine.launch_lock, machine.enqueued
    ZERO, ONE = u64(0), u64(1)

    def spare(host: Any) -> None:
        while compare_and_swap(lock, ZERO, ONE) == ZERO:
            pass
        enqueued = load_acquire_sys(enqueued_at)
        store_release_sys(enqueued_at, enqueued + ONE)
        m.launch()
        store_release_sys(lock, ZERO)

    return spare


def make_looker(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`looker(host)`: looks at the tickets that it is told to look at, whenever it is told."""
    status_of, PENDING, LOOK = ring.make_status_of(m), m.u64(ring.PENDING_STATUS), 3
    nobody_serves, launch, ZERO = ring.make_nobody_serves(m), make_launch(m, ring, machine), m.u64(0)

    def looker(host: Any) -> None:
        while True:
            position = m.gate(LOOK)
            status = status_of(host, position)
            if status != PENDING:
                m.observe(position, status)
            elif nobody_serves(host) != ZERO:
                launch(host)  # as whoever waits for a ticket does

    return looker


def make_server(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`server(host, first)`: stands for pump and workers. Two of them take turns and end out of order."""
    u64, load_acquire, store_release = m.u64, m.load_acquire_sys, m.store_release_sys
    ZERO, TWO, EIGHT, SIXTEEN, SHIFT = u64(0), u64(2), u64(8), u64(16), u64(8)
    ONE, TASK_SIZE, STAGED = u64(1), u64(TASK_BYTES), m.scratch
    capacity, count = machine.scenario.capacity, machine.n
    stamps, done, slots = machine.stamps_at, machine.host_done_at, machine.host_ring_at
    start, mask = u64(machine.scenario.start), u64(capacity - 1)

    def server(host: Any, first: Any) -> None:
        turns = u64((count + 1 - int(first)) // 2)
        turn_of = ZERO
        while turn_of < turns:
            position = start + first + turn_of * TWO
            while load_acquire(stamps + (position & mask) * EIGHT) != position + ONE:
                pass
            byte = ZERO
            while byte < TASK_SIZE:
                m.copy_async(STAGED + byte, slots + (position & mask) * TASK_SIZE + byte)
                byte = byte + SIXTEEN
            status = m.dispatch(ZERO, ZERO, STAGED, ZERO, ZERO)
            store_release(done + (position & mask) * EIGHT, ((position + ONE) << SHIFT) | status)
            turn_of = turn_of + ONE

    return server


def make_parker(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`parker(host)`: asks the first launch to park, at any moment."""
    u64, store_release, request = m.u64, m.store_release_sys, machine.park_request

    def parker(host: Any) -> None:
        store_release(request, u64(1))

    return parker


def make_keeper(m: Any, ring: ModuleType, machine: Any) -> Any:
    """`keeper(host)`: the host's watch, which looks from time to time whether a launch is needed."""
    launch, nobody_serves = make_launch(m, ring, machine), ring.make_nobody_serves(m)
    load_acquire, claimed_at, retired_at = m.load_acquire_sys, machine.claimed_at, machine.retired_at
    retire, ZERO = ring.make_retire(m), m.u64(0)

    def keeper(host: Any) -> None:
        while True:
            m.gate(0)
            retire(host)
            retired = load_acquire(retired_at)
            if load_acquire(claimed_at) != retired:
                if nobody_serves(host) != ZERO:
                    launch(host)

    return keeper
