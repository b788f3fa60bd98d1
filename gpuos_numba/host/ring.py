"""The host's half of the ring: tasks arrive from any thread, stamps leave for the pump, slots come back.

A position goes through four hands: a producer *claims* it, fills its slot and *publishes* it by storing its
stamp; pump and workers own it until its done word; the host *retires* it and the slot may be claimed again.
Positions are 64-bit and compared by their difference, so they may wrap; `slot = position % capacity`.

The functions are bodies like those in device/: compiled here for the CPU by `compiled()`, and run one
memory operation at a time by the protocol tests.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from ..descriptor import IMMEDIATE, STATUS_BITS, TASK_BYTES, DType, Flag, Status, offset
from ..machines.base import Body, HostPrimitives
from ..protocol import (
    FAILURE,
    FAILURE_SLOTS,
    HELD,
    HOST_CONTEXT,
    HOST_CONTROL,
    HOST_LAUNCH,
    HOST_STATE,
    HOST_WORDS,
    field,
)
from .query import make_query

CHUNK = 256
"""Tasks published at a time by a batch, so that the pump can begin before the batch is filled."""

DECLINED, SENT, SENT_UNSERVED = 0, 1, 2
"""What `submit_plain` answers."""

PENDING, DONE, PARKED = 0, 1, 2
"""What waiting answers: not yet, all done, or nothing will happen until Python launches."""


@cache
def make_try_claim(m: HostPrimitives) -> Body:
    """`try_claim(host, wanted) -> (position, granted)`: take up to `wanted` consecutive positions.

    granted = 0 where the ring is full. Never blocks.
    """
    u64 = m.u64
    load_u64, load_acquire_sys, compare_and_swap = m.load_u64, m.load_acquire_sys, m.compare_and_swap
    WORDS, MASK = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_CONTEXT, "mask"))
    CLAIMED, RETIRED = u64(field(HOST_WORDS, "claimed")), u64(field(HOST_WORDS, "retired"))
    ZERO, ONE = u64(0), u64(1)

    def try_claim(host: Any, wanted: Any) -> Any:
        words = load_u64(host + WORDS)
        capacity = load_u64(host + MASK) + ONE
        while True:
            # `retired` first: it only grows, so the room computed is never more than there is.
            # Acquire: the slot's last reader is done with it. Pairs with the release in retire.
            retired = load_acquire_sys(words + RETIRED)
            claimed = load_acquire_sys(words + CLAIMED)
            used = claimed - retired
            if used > capacity:
                continue  # others claimed and retired between the two loads: `retired` is too old to judge by
            room = capacity - used
            granted = wanted
            if room < granted:
                granted = room
            if granted == ZERO:
                return claimed, ZERO
            if compare_and_swap(words + CLAIMED, claimed, claimed + granted) != ZERO:
                return claimed, granted

    return m.device(try_claim)


@cache
def make_publish(m: HostPrimitives) -> Body:
    """`publish(host, position, count) -> 1 if nobody serves`: hand filled slots to the pump.

    A 1 obliges the caller to launch (the pump announced that it parked, and no launch is on its way).
    """
    u64 = m.u64
    load_u64, store_release_sys = m.load_u64, m.store_release_sys
    fence_sc_sys = m.fence_sc_sys
    nobody_serves = make_nobody_serves(m)
    STAMPS, MASK = u64(field(HOST_CONTEXT, "stamps")), u64(field(HOST_CONTEXT, "mask"))
    ZERO, ONE, EIGHT = u64(0), u64(1), u64(8)

    def publish(host: Any, position: Any, count: Any) -> Any:
        stamps = load_u64(host + STAMPS)
        mask = load_u64(host + MASK)
        index = ZERO
        while index < count:
            at = position + index
            # Release: the task's words are visible before the stamp. Pairs with the acquire in
            # device/pump.py, fly.
            store_release_sys(stamps + (at & mask) * EIGHT, at + ONE)
            index += ONE
        # The stamp before the look at `parked`. Pairs with the fence in device/pump.py, decide.
        fence_sc_sys()
        return nobody_serves(host)

    return m.device(publish)


@cache
def make_nobody_serves(m: HostPrimitives) -> Body:
    """`nobody_serves(host) -> 1` where the last launch asked for has announced its end and one is wanted.

    None is wanted while the next task is withheld (`hold`): it could do nothing. Who withholds keeps a watch.
    """
    u64 = m.u64
    load_u64, load_acquire_sys = m.load_u64, m.load_acquire_sys
    load_relaxed_sys = m.load_relaxed_sys
    STATE, WORDS = u64(field(HOST_CONTEXT, "state")), u64(field(HOST_CONTEXT, "words"))
    STAMPS, MASK = u64(field(HOST_CONTEXT, "stamps")), u64(field(HOST_CONTEXT, "mask"))
    PARKED_AT, ENQUEUED = u64(field(HOST_STATE, "parked")), u64(field(HOST_WORDS, "enqueued"))
    INGESTED, GATED = u64(field(HOST_STATE, "ingested")), u64(field(HOST_WORDS, "gated"))
    ZERO, ONE, EIGHT, HELD_BIT = u64(0), u64(1), u64(8), u64(HELD)

    def nobody_serves(host: Any) -> Any:
        # A launch asked for between the two reads makes the answer a needless yes; who acts on it looks
        # again under the launch lock.
        enqueued = load_acquire_sys(load_u64(host + WORDS) + ENQUEUED)
        if load_acquire_sys(load_u64(host + STATE) + PARKED_AT) != enqueued:
            return ZERO
        if load_relaxed_sys(load_u64(host + WORDS) + GATED) != ZERO:
            # The pump's cursor may be seen too low, for it is stored relaxed: then its stamp is another's,
            # and the answer a needless yes.
            cursor = load_relaxed_sys(load_u64(host + STATE) + INGESTED)
            stamp = load_acquire_sys(load_u64(host + STAMPS) + (cursor & load_u64(host + MASK)) * EIGHT)
            if stamp == (cursor + ONE) ^ HELD_BIT:
                return ZERO
        return ONE

    return m.device(nobody_serves)


@cache
def make_lock_launches(m: HostPrimitives) -> Body:
    """`lock_launches(host, me)`: until `unlock_launches`, nobody else decides about launches.

    The holder may call the driver, which may wait for the executor to park, so nobody waits for the lock whom
    the executor needs: a producer that finds it taken goes its way (`relaunch`).
    """
    u64 = m.u64
    load_u64, compare_and_swap, pause = m.load_u64, m.compare_and_swap, m.pause
    load_relaxed_sys = m.load_relaxed_sys
    LOCK = u64(field(HOST_CONTEXT, "launch"))
    ZERO, ONE = u64(0), u64(1)
    assert field(HOST_LAUNCH, "lock") == 0

    def lock_launches(host: Any, me: Any) -> None:
        spins = ZERO
        while compare_and_swap(load_u64(host + LOCK), ZERO, me) == ZERO:
            if load_relaxed_sys(load_u64(host + LOCK)) == me:
                break  # an interrupt came before this thread could unlock
            pause(spins)
            spins += ONE

    return m.device(lock_launches)


@cache
def make_unlock_launches(m: HostPrimitives) -> Body:
    """`unlock_launches(host, me)`: nothing where another holds the lock, so that who was interrupted on the
    way to it need not know whether it got there.
    """
    u64, load_u64, store_release_sys = m.u64, m.load_u64, m.store_release_sys
    load_relaxed_sys = m.load_relaxed_sys
    LOCK, ZERO = u64(field(HOST_CONTEXT, "launch")), u64(0)

    def unlock_launches(host: Any, me: Any) -> None:
        lock = load_u64(host + LOCK)
        if load_relaxed_sys(lock) == me:
            store_release_sys(lock, ZERO)

    return m.device(unlock_launches)


@cache
def make_backlog(m: HostPrimitives) -> Body:
    """`backlog(host, enough)` -> items that wait for a launch: a tiled task is as many as it has tiles, a
    call of a program as many as it has runs. More than `enough` is not told apart.

    Where tasks are withheld, those before them: what stands behind must not widen a launch, it would only be
    in the way of what the withheld task waits for.
    """
    u64 = m.u64
    load_u64, load_relaxed_sys, load_acquire_sys = m.load_u64, m.load_relaxed_sys, m.load_acquire_sys
    STATE, WORDS = u64(field(HOST_CONTEXT, "state")), u64(field(HOST_CONTEXT, "words"))
    STAMPS, MASK = u64(field(HOST_CONTEXT, "stamps")), u64(field(HOST_CONTEXT, "mask"))
    CLAIMED, GATED = u64(field(HOST_WORDS, "claimed")), u64(field(HOST_WORDS, "gated"))
    INGESTED, RING = u64(field(HOST_STATE, "ingested")), u64(field(HOST_CONTEXT, "ring"))
    ZERO, ONE, EIGHT, HALF, TASK_SIZE = u64(0), u64(1), u64(8), u64(32), u64(TASK_BYTES)
    assert offset("tiles") == 12

    def backlog(host: Any, enough: Any) -> Any:
        words = load_u64(host + WORDS)
        claimed = load_acquire_sys(words + CLAIMED)
        ingested = load_acquire_sys(load_u64(host + STATE) + INGESTED)
        gated = load_relaxed_sys(words + GATED)
        count = claimed - ingested
        if count > enough and gated == ZERO:
            return count
        stamps, ring, mask = load_u64(host + STAMPS), load_u64(host + RING), load_u64(host + MASK)
        items = ZERO
        index = ZERO
        while index < count and items <= enough:
            slot = (ingested + index) & mask
            # Acquire: the descriptor is whole. Pairs with the release in publish.
            stamp = load_acquire_sys(stamps + slot * EIGHT)
            if stamp == ingested + index + ONE:
                tiles = load_u64(ring + slot * TASK_SIZE + EIGHT) >> HALF
                if tiles > ONE:
                    items += tiles - ONE
            elif gated != ZERO:
                break
            items += ONE
            index += ONE
        return items

    return m.device(backlog)


@cache
def make_launch(m: HostPrimitives) -> Body:
    """`launch(host, workers) -> CUresult`: count a launch and make it. Under the launch lock.

    One call, so that no Ctrl-C comes between the two. Nothing where the executor's end was decided in the
    middle of deciding on a launch: by the garbage collector, on the thread that has the lock.
    """
    u64 = m.u64
    load_u64, store_release_sys, call_launch = m.load_u64, m.store_release_sys, m.call_launch
    WORDS, LAUNCH = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_CONTEXT, "launch"))
    ENQUEUED = u64(field(HOST_WORDS, "enqueued"))
    CALL, KERNEL = u64(field(HOST_LAUNCH, "call")), u64(field(HOST_LAUNCH, "kernel"))
    STREAM, ARGUMENTS = u64(field(HOST_LAUNCH, "stream")), u64(field(HOST_LAUNCH, "arguments"))
    THREADS, CLOSING = u64(field(HOST_LAUNCH, "threads")), u64(field(HOST_LAUNCH, "closing"))
    ZERO, ONE = u64(0), u64(1)

    def launch(host: Any, workers: Any) -> Any:
        words, how = load_u64(host + WORDS), load_u64(host + LAUNCH)
        if load_u64(how + CLOSING) != ZERO:
            return ZERO
        # Counted before it runs: a launch that parks before it is counted would look like one to come.
        enqueued = load_u64(words + ENQUEUED)
        store_release_sys(words + ENQUEUED, enqueued + ONE)
        error = call_launch(
            load_u64(how + CALL),
            load_u64(how + KERNEL),
            workers + ONE,
            load_u64(how + THREADS),
            load_u64(how + STREAM),
            load_u64(how + ARGUMENTS),
        )
        if error != ZERO:
            store_release_sys(words + ENQUEUED, enqueued)
        return error

    return m.device(launch)


@cache
def make_relaunch(m: HostPrimitives) -> Body:
    """`relaunch(host) -> 0`, or 1 where Python must launch: see that somebody serves, if that is allowed.

    One compiled call away from the driver, because a launch lies in the way of the first task after each
    pause. Whoever finds the lock taken leaves: its holder launches, or launches are being held back.
    """
    u64 = m.u64
    nobody_serves, unlock_launches = make_nobody_serves(m), make_unlock_launches(m)
    backlog = make_backlog(m)
    make_it, load_u64, load_acquire_sys = make_launch(m), m.load_u64, m.load_acquire_sys
    store_relaxed_sys, compare_and_swap = m.store_relaxed_sys, m.compare_and_swap
    LAUNCH, CONTROL = u64(field(HOST_CONTEXT, "launch")), u64(field(HOST_CONTEXT, "control"))
    WIDEN_AT, CALL = u64(field(HOST_CONTROL, "widen_at")), u64(field(HOST_LAUNCH, "call"))
    HOLDS, CLOSING = u64(field(HOST_LAUNCH, "holds")), u64(field(HOST_LAUNCH, "closing"))
    QUIET, MOST = u64(field(HOST_LAUNCH, "quiet")), u64(field(HOST_LAUNCH, "most"))
    ZERO, ONE, TWO, FOUR = u64(0), u64(1), u64(2), u64(4)

    def relaunch(host: Any) -> Any:
        launch = load_u64(host + LAUNCH)
        if load_u64(launch + CALL) == ZERO:
            return ONE
        if load_acquire_sys(launch + HOLDS) != ZERO:
            return ZERO
        if load_acquire_sys(launch + CLOSING) != ZERO:
            return ZERO
        if compare_and_swap(launch, ZERO, ONE) == ZERO:
            return ZERO
        answer = ZERO
        # The lock's acquire brings these two along.
        held = load_u64(launch + HOLDS)
        closing = load_u64(launch + CLOSING)
        if held == ZERO and closing == ZERO and nobody_serves(host) != ZERO:
            quiet = load_u64(launch + QUIET)
            workers = load_u64(launch + MOST)
            widen_at = ZERO
            if quiet < workers and backlog(host, quiet * TWO) <= quiet * TWO:
                workers = quiet
                widen_at = quiet * FOUR
            # A narrow launch parks early when work piles up; whoever notices launches again, wide.
            store_relaxed_sys(load_u64(host + CONTROL) + WIDEN_AT, widen_at)
            if make_it(host, workers) != ZERO:  # this thread has not used CUDA yet, or what Python will say
                answer = ONE
        unlock_launches(host, ONE)
        return answer

    return m.device(relaunch)


@cache
def make_doze(m: HostPrimitives) -> Body:
    """`doze(host, period_us, most)`: sleep for a period, and go on while the executor is parked and nothing
    waits, at most so many periods.

    For the keeper thread, whose waking in Python would take the GIL from whoever waits for the first task.
    """
    u64 = m.u64
    nobody_serves, sleep_us = make_nobody_serves(m), m.sleep_us
    load_u64, load_acquire_sys = m.load_u64, m.load_acquire_sys
    STATE, WORDS = u64(field(HOST_CONTEXT, "state")), u64(field(HOST_CONTEXT, "words"))
    LAUNCH, CLOSING = u64(field(HOST_CONTEXT, "launch")), u64(field(HOST_LAUNCH, "closing"))
    CLAIMED, INGESTED = u64(field(HOST_WORDS, "claimed")), u64(field(HOST_STATE, "ingested"))
    ZERO, ONE = u64(0), u64(1)

    def doze(host: Any, period_us: Any, most: Any) -> None:
        periods = ZERO
        words, state = load_u64(host + WORDS), load_u64(host + STATE)
        closing = load_u64(host + LAUNCH) + CLOSING
        while load_acquire_sys(closing) == ZERO and periods < most:
            periods += ONE
            sleep_us(period_us)
            if nobody_serves(host) == ZERO:
                break
            claimed = load_acquire_sys(words + CLAIMED)
            if claimed != load_acquire_sys(state + INGESTED):
                break

    return m.device(doze)


@cache
def make_retire(m: HostPrimitives) -> Body:
    """`retire(host)`: move the retired watermark past completed tasks and log their failures.

    One thread at a time; whoever finds the lock taken leaves, because the other is doing the same work.
    """
    u64 = m.u64
    load_u64, store_u64 = m.load_u64, m.store_u64
    load_acquire_sys, store_release_sys = m.load_acquire_sys, m.store_release_sys
    store_relaxed_sys, compare_and_swap = m.store_relaxed_sys, m.compare_and_swap
    WORDS, MASK = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_CONTEXT, "mask"))
    DONE_AT, LOG = u64(field(HOST_CONTEXT, "done")), u64(field(HOST_CONTEXT, "failures"))
    CLAIMED, RETIRED = u64(field(HOST_WORDS, "claimed")), u64(field(HOST_WORDS, "retired"))
    LOCK, FAILURES = u64(field(HOST_WORDS, "retire_lock")), u64(field(HOST_WORDS, "failures"))
    ZERO, ONE, EIGHT, SIXTEEN = u64(0), u64(1), u64(8), u64(FAILURE.itemsize)
    SHIFT, STATUS, LOG_MASK = u64(STATUS_BITS), u64(0xFF), u64(FAILURE_SLOTS - 1)

    def retire(host: Any) -> None:
        words = load_u64(host + WORDS)
        if compare_and_swap(words + LOCK, ZERO, ONE) == ZERO:
            return
        mask = load_u64(host + MASK)
        done = load_u64(host + DONE_AT)
        position = load_acquire_sys(words + RETIRED)
        claimed = load_acquire_sys(words + CLAIMED)
        while position != claimed:
            # Acquire: the outputs are visible. Pairs with the fence in device/worker.py, publish.
            word = load_acquire_sys(done + (position & mask) * EIGHT)
            expected = (position + ONE) << SHIFT
            if word - expected > STATUS:
                break
            if word != expected:
                number = load_u64(words + FAILURES)
                entry = load_u64(host + LOG) + (number & LOG_MASK) * SIXTEEN
                store_u64(entry, position)
                store_u64(entry + EIGHT, word & STATUS)
                store_relaxed_sys(words + FAILURES, number + ONE)
            position += ONE
        # Release: the log is visible before the watermark; who claims these slots may overwrite them.
        store_release_sys(words + RETIRED, position)
        store_release_sys(words + LOCK, ZERO)

    return m.device(retire)


@cache
def make_status_of(m: HostPrimitives) -> Body:
    """`status_of(host, position) -> PENDING_STATUS or the status` that the task at a position ended with.

    Right at any later time: the done word answers until the slot is claimed again, then the failure log.
    """
    u64 = m.u64
    load_u64, load_acquire_sys, store_release_sys = m.load_u64, m.load_acquire_sys, m.store_release_sys
    load_relaxed_sys, compare_and_swap, pause = m.load_relaxed_sys, m.compare_and_swap, m.pause
    WORDS, MASK = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_CONTEXT, "mask"))
    DONE_AT, LOG = u64(field(HOST_CONTEXT, "done")), u64(field(HOST_CONTEXT, "failures"))
    RETIRED, LOCK = u64(field(HOST_WORDS, "retired")), u64(field(HOST_WORDS, "retire_lock"))
    FAILURES = u64(field(HOST_WORDS, "failures"))
    ZERO, ONE, EIGHT, SIXTEEN = u64(0), u64(1), u64(8), u64(FAILURE.itemsize)
    SHIFT, STATUS, LOG_SLOTS, LOG_MASK = (
        u64(STATUS_BITS),
        u64(0xFF),
        u64(FAILURE_SLOTS),
        u64(FAILURE_SLOTS - 1),
    )
    TOP_BIT, OK, FORGOTTEN, PENDING_AT = (
        u64(1 << 63),
        u64(Status.OK),
        u64(Status.FORGOTTEN),
        u64(PENDING_STATUS),
    )

    def status_of(host: Any, position: Any) -> Any:
        words = load_u64(host + WORDS)
        slot = (position & load_u64(host + MASK)) * EIGHT
        # Acquire: the outputs are visible. Pairs with the fence in device/worker.py, publish.
        word = load_acquire_sys(load_u64(host + DONE_AT) + slot)
        expected = (position + ONE) << SHIFT
        if word - expected <= STATUS:
            return word & STATUS
        if position - load_acquire_sys(words + RETIRED) < TOP_BIT:
            return PENDING_AT
        if load_relaxed_sys(words + FAILURES) == ZERO:
            return OK
        # Rare: the slot has been used again and something has failed. The log is in order of position.
        spins = ZERO
        while compare_and_swap(words + LOCK, ZERO, ONE) == ZERO:
            pause(spins)
            spins += ONE
        log = load_u64(host + LOG)
        count = load_u64(words + FAILURES)
        status = OK
        oldest = ZERO
        if count > LOG_SLOTS:
            oldest = count - LOG_SLOTS
            if position - load_u64(log + (oldest & LOG_MASK) * SIXTEEN) >= TOP_BIT:
                status = FORGOTTEN
        while status == OK and oldest != count:
            entry = log + (oldest & LOG_MASK) * SIXTEEN
            if load_u64(entry) == position:
                status = load_u64(entry + EIGHT)
            oldest += ONE
        store_release_sys(words + LOCK, ZERO)
        return status

    return m.device(status_of)


PENDING_STATUS = 1 << 8
"""What `status_of` answers while the task has not ended; no status byte has this value."""


@cache
def make_wait_range(m: HostPrimitives) -> Body:
    """`wait_range(host, position, end, until_ns) -> (PENDING | DONE | PARKED, position reached)`."""
    u64 = m.u64
    nobody_serves, status_of, retire = make_nobody_serves(m), make_status_of(m), make_retire(m)
    relaunch = make_relaunch(m)
    now_ns, pause, load_u64, load_acquire_sys = m.now_ns, m.pause, m.load_u64, m.load_acquire_sys
    WORDS, RETIRED = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_WORDS, "retired"))
    ZERO, ONE, PENDING_AT, EVERY = u64(0), u64(1), u64(PENDING_STATUS), u64(63)
    ANSWER_PENDING, ANSWER_DONE, ANSWER_PARKED = u64(PENDING), u64(DONE), u64(PARKED)
    MANY, TOP_BIT = u64(16), u64(1 << 63)

    def wait_range(host: Any, position: Any, end: Any, until_ns: Any) -> Any:
        spins = ZERO
        if end - position > MANY:
            retire(host)
            # Acquire: the outputs of all tasks below are visible. Pairs with the release in retire.
            retired = load_acquire_sys(load_u64(host + WORDS) + RETIRED)
            passed = retired - position
            if passed < TOP_BIT:
                if passed > end - position:
                    passed = end - position
                position += passed
        while position != end:
            if status_of(host, position) != PENDING_AT:
                position += ONE
                spins = ZERO
                continue
            # Nobody serves, and the second look still finds no done word. The task may yet be finishing in
            # the launch that has just parked: then one launch more than needed is asked for, no harm.
            if nobody_serves(host) != ZERO and status_of(host, position) == PENDING_AT:
                if relaunch(host) != ZERO:
                    return ANSWER_PARKED, position
            if spins & EVERY == EVERY and now_ns() > until_ns:
                return ANSWER_PENDING, position
            pause(spins)
            spins += ONE
        return ANSWER_DONE, position

    return m.device(wait_range)


@cache
def make_fill(m: HostPrimitives) -> Body:
    """`fill(host, tasks, count, position, linked, afters, after_0, after_1)`: write claimed slots.

    Sets the flags that depend on positions. linked = 1 chains the tasks: consecutive ones form runs of at
    most max_run, and the head of each later run waits for the task before it. `afters` says how many of
    after_0 and after_1 hold; a chain's first task waits for them, unlinked tasks all do.
    """
    u64 = m.u64
    load_u64, store_u64 = m.load_u64, m.store_u64
    RING, MASK = u64(field(HOST_CONTEXT, "ring")), u64(field(HOST_CONTEXT, "mask"))
    MAX_RUN_AT = u64(field(HOST_CONTEXT, "max_run"))
    ZERO, ONE, EIGHT, HALF = u64(0), u64(1), u64(8), u64(32)
    TASK_SIZE, LOW_HALF, HIGH_HALF = u64(TASK_BYTES), u64(0xFFFFFFFF), u64(0xFFFFFFFF00000000)
    LINK, AFTER_0, AFTER_1 = u64(Flag.LINK), u64(Flag.AFTER_0), u64(Flag.AFTER_1)
    KEEP = u64(0xFFFFFFFF & ~(Flag.LINK | Flag.AFTER_0 | Flag.AFTER_1))
    AFTER_AT = u64(offset("after"))

    def fill(
        host: Any, tasks: Any, count: Any, position: Any, linked: Any, afters: Any, after_0: Any, after_1: Any
    ) -> None:
        ring = load_u64(host + RING)
        mask = load_u64(host + MASK)
        max_run = load_u64(host + MAX_RUN_AT)
        run = ZERO  # length so far of the run that the next task may join; 0: it heads a new one
        index = ZERO
        while index < count:
            source = tasks + index * TASK_SIZE
            target = ring + ((position + index) & mask) * TASK_SIZE
            word = EIGHT + EIGHT
            while word < TASK_SIZE:
                store_u64(target + word, load_u64(source + word))
                word += EIGHT
            head = load_u64(source)
            flags = (head >> HALF) & KEEP
            shape = load_u64(source + EIGHT)
            tiled = shape >> HALF > ONE
            if linked == ZERO:
                if afters > ZERO:
                    flags |= AFTER_0
                    store_u64(target + AFTER_AT, after_0)
                if afters > ONE:
                    flags |= AFTER_1
                    store_u64(target + AFTER_AT + EIGHT, after_1)
                run = ONE
            else:
                if tiled:
                    run = ZERO
                if run == ZERO:
                    if index > ZERO:
                        flags |= AFTER_0
                        store_u64(target + AFTER_AT, position + index - ONE)
                    else:
                        if afters > ZERO:
                            flags |= AFTER_0
                            store_u64(target + AFTER_AT, after_0)
                        if afters > ONE:
                            flags |= AFTER_1
                            store_u64(target + AFTER_AT + EIGHT, after_1)
                run += ONE
                if not tiled and run < max_run and index + ONE < count:
                    next_tiles = load_u64(source + TASK_SIZE + EIGHT) >> HALF
                    if next_tiles <= ONE:
                        flags |= LINK
            store_u64(target, (head & LOW_HALF) | (flags << HALF))
            store_u64(target + EIGHT, (shape & HIGH_HALF) | run)
            if linked != ZERO and flags & LINK == ZERO:
                run = ZERO
            index += ONE

    return m.device(fill)


@cache
def make_submit(m: HostPrimitives) -> Body:
    """`submit(host, tasks, count, linked, afters, after_0, after_1, until_ns, ranges, range_slots)`.

    Submits as much as it can and answers (submitted, ranges written, 1 where Python must launch). Returns
    early in that case, when `until_ns` has passed without room, or when `ranges` (pairs of first
    position and count, consecutive ones merged) is full; the caller goes on with the rest.
    """
    u64 = m.u64
    load_u64, store_u64 = m.load_u64, m.store_u64
    try_claim, fill, publish, retire = make_try_claim(m), make_fill(m), make_publish(m), make_retire(m)
    nobody_serves, relaunch = make_nobody_serves(m), make_relaunch(m)
    now_ns, pause = m.now_ns, m.pause
    ZERO, ONE, EIGHT, SIXTEEN = u64(0), u64(1), u64(8), u64(16)
    MOST, TASK_SIZE, EVERY = u64(CHUNK), u64(TASK_BYTES), u64(63)

    def submit(
        host: Any,
        tasks: Any,
        count: Any,
        linked: Any,
        afters: Any,
        after_0: Any,
        after_1: Any,
        until_ns: Any,
        ranges: Any,
        range_slots: Any,
    ) -> Any:
        submitted = ZERO
        written = ZERO
        parked = ZERO
        spins = ZERO
        end = ZERO
        while submitted < count:
            wanted = count - submitted
            if wanted > MOST:
                wanted = MOST
            position, granted = try_claim(host, wanted)
            if granted < wanted:
                retire(host)  # the ring is filling up: make room for the next round
            if granted == ZERO:
                if nobody_serves(host) != ZERO and relaunch(host) != ZERO:
                    parked = ONE
                    break
                if spins & EVERY == EVERY and now_ns() > until_ns:
                    break
                pause(spins)
                spins += ONE
                continue
            spins = ZERO
            fill(host, tasks + submitted * TASK_SIZE, granted, position, linked, afters, after_0, after_1)
            parked = publish(host, position, granted)
            if parked != ZERO:
                parked = relaunch(host)
            submitted += granted
            if written != ZERO and position == end:
                last = ranges + (written - ONE) * SIXTEEN + EIGHT
                store_u64(last, load_u64(last) + granted)
            else:
                store_u64(ranges + written * SIXTEEN, position)
                store_u64(ranges + written * SIXTEEN + EIGHT, granted)
                written += ONE
            end = position + granted
            if linked != ZERO:  # the next part of the chain waits for this one
                afters = ONE
                after_0 = end - ONE
            if parked != ZERO or written == range_slots:
                break
        return submitted, written, parked

    return m.device(submit)


@cache
def make_hold(m: HostPrimitives) -> Body:
    """`hold(host, until_ns) -> (position, answer)`: claim a position that the pump must not pass yet.

    It holds a task that does nothing, and its stamp says that it is withheld; whoever stores the stamp
    itself, `position + 1`, opens it, once, with all that it orders visible: a stream, or `publish`. answer:
    DONE, PARKED (the ring is full and Python must launch), or PENDING (it stayed full until until_ns).
    """
    u64 = m.u64
    load_u64, store_u64, store_release_sys = m.load_u64, m.store_u64, m.store_release_sys
    store_relaxed_sys = m.store_relaxed_sys
    try_claim, retire, nobody_serves = make_try_claim(m), make_retire(m), make_nobody_serves(m)
    relaunch, now_ns, pause = make_relaunch(m), m.now_ns, m.pause
    RING, MASK, STAMPS = (
        u64(field(HOST_CONTEXT, "ring")),
        u64(field(HOST_CONTEXT, "mask")),
        u64(field(HOST_CONTEXT, "stamps")),
    )
    WORDS, GATED = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_WORDS, "gated"))
    ZERO, ONE, EIGHT, EVERY = u64(0), u64(1), u64(8), u64(63)
    TASK_SIZE, RUN_AT, RUN_AND_TILES = u64(TASK_BYTES), u64(offset("run")), u64(1 | 1 << 32)
    HELD_BIT = u64(HELD)
    ANSWER_PENDING, ANSWER_DONE, ANSWER_PARKED = u64(PENDING), u64(DONE), u64(PARKED)

    def hold(host: Any, until_ns: Any) -> Any:
        mask = load_u64(host + MASK)
        store_relaxed_sys(load_u64(host + WORDS) + GATED, ONE)  # all who store it store the same
        spins = ZERO
        while True:
            position, granted = try_claim(host, ONE)
            if granted != ZERO:
                break
            retire(host)
            if nobody_serves(host) != ZERO and relaunch(host) != ZERO:
                return position, ANSWER_PARKED
            if spins & EVERY == EVERY and now_ns() > until_ns:
                return position, ANSWER_PENDING
            pause(spins)
            spins += ONE
        task = load_u64(host + RING) + (position & mask) * TASK_SIZE
        word = ZERO
        while word < TASK_SIZE:
            store_u64(task + word, ZERO)
            word += EIGHT
        store_u64(task + RUN_AT, RUN_AND_TILES)
        # Release: the task is visible to whoever opens it, and through its stamp to the pump.
        store_release_sys(load_u64(host + STAMPS) + (position & mask) * EIGHT, (position + ONE) ^ HELD_BIT)
        return position, ANSWER_DONE

    return m.device(hold)


@cache
def make_watch(m: HostPrimitives) -> Body:
    """`watch(host, until_ns) -> DONE | PARKED | PENDING`: see to launches while tasks are withheld.

    A stream opens a task and does not look whether anybody serves, so somebody else must. DONE once the pump
    has reached `watched`; PARKED where Python must launch.
    """
    u64 = m.u64
    load_u64, load_relaxed_sys, load_acquire_sys = m.load_u64, m.load_relaxed_sys, m.load_acquire_sys
    nobody_serves, relaunch, now_ns, pause = make_nobody_serves(m), make_relaunch(m), m.now_ns, m.pause
    STATE, INGESTED = u64(field(HOST_CONTEXT, "state")), u64(field(HOST_STATE, "ingested"))
    WORDS, WATCHED = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_WORDS, "watched"))
    STAMPS, MASK = u64(field(HOST_CONTEXT, "stamps")), u64(field(HOST_CONTEXT, "mask"))
    ZERO, ONE, EIGHT, EVERY, TOP_BIT = u64(0), u64(1), u64(8), u64(63), u64(1 << 63)
    ANSWER_PENDING, ANSWER_DONE, ANSWER_PARKED = u64(PENDING), u64(DONE), u64(PARKED)

    def watch(host: Any, until_ns: Any) -> Any:
        stamps = load_u64(host + STAMPS)
        mask = load_u64(host + MASK)
        ingested = load_u64(host + STATE) + INGESTED
        watched = load_u64(host + WORDS) + WATCHED
        spins = ZERO
        before = load_relaxed_sys(ingested)
        while True:
            cursor = load_relaxed_sys(ingested)
            if cursor != before:
                before = cursor
                spins = ZERO  # the next wait is another's: closely watched at first
            last = load_acquire_sys(watched)
            if cursor - last < TOP_BIT:
                return ANSWER_DONE
            if load_acquire_sys(stamps + (cursor & mask) * EIGHT) == cursor + ONE:
                if nobody_serves(host) != ZERO and relaunch(host) != ZERO:
                    return ANSWER_PARKED
            if spins & EVERY == EVERY and now_ns() > until_ns:
                return ANSWER_PENDING
            pause(spins)
            spins += ONE

    return m.device(watch)


@cache
def make_stand_watch(m: HostPrimitives) -> Body:
    """`stand_watch(host, until_ns)`: `watch`, and again if more is to be watched within about a millisecond.

    Coming back from Python would take the GIL, and from sleep a wake.
    """
    u64 = m.u64
    watch, now_ns, pause = make_watch(m), m.now_ns, m.pause
    load_u64, load_relaxed_sys = m.load_u64, m.load_relaxed_sys
    STATE, INGESTED = u64(field(HOST_CONTEXT, "state")), u64(field(HOST_STATE, "ingested"))
    WORDS, WATCHED = u64(field(HOST_CONTEXT, "words")), u64(field(HOST_WORDS, "watched"))
    ZERO, ONE, TOP_BIT, LINGER, ANSWER_DONE = u64(0), u64(1), u64(1 << 63), u64(1_000_000), u64(DONE)

    def stand_watch(host: Any, until_ns: Any) -> Any:
        ingested = load_u64(host + STATE) + INGESTED
        watched = load_u64(host + WORDS) + WATCHED
        while True:
            answer = watch(host, until_ns)
            if answer != ANSWER_DONE:
                return answer
            spins = ZERO
            end = now_ns() + LINGER
            while True:
                cursor = load_relaxed_sys(ingested)
                last = load_relaxed_sys(watched)
                if cursor - last >= TOP_BIT:
                    break
                if now_ns() > end:
                    return answer
                pause(spins)
                spins += ONE

    return m.device(stand_watch)


PLAIN_DTYPES = int(DType.F32) * 0x010011 | IMMEDIATE * 0x101100
"""`TASK["dtypes"]` of two f32 inputs and one f32 output; absent operands are numbers."""


@cache
def make_submit_plain(m: HostPrimitives) -> Body:
    """`submit_plain(host, op_id, x, y, out, count, driver, stream) -> (position, answer)`.

    The short way for one contiguous element-wise task without scalars or dependencies: the descriptor is
    written straight into its slot. `driver` is the address of a `query.DRIVER` or 0; inputs that a stream
    may still work on are not submitted. answer: SENT, SENT_UNSERVED (Python must launch), or DECLINED (full,
    or the stream is busy), where nothing was enqueued.
    """
    u64 = m.u64
    load_u64, store_u64, query = m.load_u64, m.store_u64, make_query(m)
    try_claim, publish, retire = make_try_claim(m), make_publish(m), make_retire(m)
    relaunch = make_relaunch(m)
    RING, MASK = u64(field(HOST_CONTEXT, "ring")), u64(field(HOST_CONTEXT, "mask"))
    ZERO, ONE, EIGHT, TASK_SIZE = u64(0), u64(1), u64(8), u64(TASK_BYTES)
    RUN_AND_TILES = u64(1 | 1 << 32)
    ANSWER_SENT, ANSWER_DECLINED = u64(SENT), u64(DECLINED)
    RUN_AT, INPUTS, OUTPUT = u64(offset("run")), u64(offset("inputs")), u64(offset("outputs"))
    COUNT, REST = u64(offset("count")), u64(offset("after"))
    # The word that ends with `dtypes`; its first half belongs to layouts, of which the task has none.
    DTYPES_AT, ALL_F32 = u64(offset("dtypes") - 4), u64(PLAIN_DTYPES << 32)

    def submit_plain(
        host: Any, op_id: Any, x: Any, y: Any, out: Any, count: Any, driver: Any, stream: Any
    ) -> Any:
        if driver != ZERO and query(driver, stream) != ZERO:
            return ZERO, ANSWER_DECLINED
        position, granted = try_claim(host, ONE)
        if granted == ZERO:
            retire(host)
            position, granted = try_claim(host, ONE)
            if granted == ZERO:
                return ZERO, ANSWER_DECLINED
        task = load_u64(host + RING) + (position & load_u64(host + MASK)) * TASK_SIZE
        store_u64(task, op_id)
        store_u64(task + RUN_AT, RUN_AND_TILES)
        store_u64(task + INPUTS, x)
        store_u64(task + INPUTS + EIGHT, y)
        store_u64(task + OUTPUT, out)
        store_u64(task + COUNT, count)
        word = REST
        while word < TASK_SIZE:
            store_u64(task + word, ZERO)
            word += EIGHT
        store_u64(task + DTYPES_AT, ALL_F32)
        unserved = publish(host, position, ONE)
        if unserved != ZERO:
            unserved = relaunch(host)
        return position, unserved + ANSWER_SENT

    return m.device(submit_plain)


@cache
def make_round_trips(m: HostPrimitives) -> Body:
    """`round_trips(host, task, count, times, ranges, until_ns) -> samples`: submit one, await it, repeat.

    For measurements: nanoseconds from before the claim to after the done word, without Python in between.
    Stops early when somebody must launch.
    """
    u64 = m.u64
    submit, wait_range = make_submit(m), make_wait_range(m)
    now_ns, load_u64, store_u64 = m.now_ns, m.load_u64, m.store_u64
    ZERO, ONE, EIGHT, ANSWER_DONE = u64(0), u64(1), u64(8), u64(DONE)

    def round_trips(host: Any, task: Any, count: Any, times: Any, ranges: Any, until_ns: Any) -> Any:
        taken = ZERO
        while taken < count:
            begin = now_ns()
            sent, _, parked = submit(host, task, ONE, ZERO, ZERO, ZERO, ZERO, until_ns, ranges, ONE)
            if parked != ZERO or sent == ZERO:
                break
            position = load_u64(ranges)
            answer, _ = wait_range(host, position, position + ONE, until_ns)
            if answer != ANSWER_DONE:
                break
            store_u64(times + taken * EIGHT, now_ns() - begin)
            taken += ONE
        return taken

    return m.device(round_trips)


@cache
def compiled() -> SimpleNamespace:
    """The host functions, compiled to machine code that runs without the GIL (about 2 s, once a process)."""
    from numba import njit, types

    from ..machines import cpu_memory as m

    u64 = types.uint64
    pair, triple = types.UniTuple(u64, 2), types.UniTuple(u64, 3)
    signatures: dict[str, tuple[Any, Any]] = {
        "try_claim": (make_try_claim, pair(u64, u64)),
        "publish": (make_publish, u64(u64, u64, u64)),
        "nobody_serves": (make_nobody_serves, u64(u64)),
        "lock_launches": (make_lock_launches, types.void(u64, u64)),
        "unlock_launches": (make_unlock_launches, types.void(u64, u64)),
        "backlog": (make_backlog, u64(u64, u64)),
        "doze": (make_doze, types.void(u64, u64, u64)),
        "launch": (make_launch, u64(u64, u64)),
        "relaunch": (make_relaunch, u64(u64)),
        "retire": (make_retire, types.void(u64)),
        "status_of": (make_status_of, u64(u64, u64)),
        "wait_range": (make_wait_range, pair(u64, u64, u64, u64)),
        "fill": (make_fill, types.void(*[u64] * 8)),
        "submit": (make_submit, triple(*[u64] * 10)),
        "submit_plain": (make_submit_plain, pair(*[u64] * 8)),
        "hold": (make_hold, pair(u64, u64)),
        "stand_watch": (make_stand_watch, u64(u64, u64)),
        "round_trips": (make_round_trips, u64(*[u64] * 6)),
    }
    return SimpleNamespace(
        **{
            name: njit(signature, nogil=True)(make(m).py_func)
            for name, (make, signature) in signatures.items()
        }
    )
