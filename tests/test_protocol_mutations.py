"""Each store, check and ordering of the protocol, taken away: the exploration must notice.

A mutation changes the text of one body. `CAUGHT` lists those after which a property fails, with the
scenarios that show it; `HARMLESS` those after which none does, each with the reason why the line is there
all the same.
"""

from __future__ import annotations

import pytest

from tests.protocol.bodies import Mutation
from tests.protocol.explore import Found, explore
from tests.protocol.model import Scenario, TaskSpec
from tests.protocol.scenarios import FAILS, LARGE, SMALL, TASK

TILED = TaskSpec(tiles=2)
SCENARIOS = {
    **SMALL,
    **LARGE,
    "lease, ring full": Scenario((TASK,) * 3, (((0, 1, 2),),), workers=1, idle=False, lease=True),
    "lease, one worker": Scenario((TASK,), (((0,),),), workers=1, idle=False, lease=True),
    "one worker, two in turn": Scenario((TASK, TASK), (((0,), (1,)),), workers=1, waits=False),
    "five in turn": Scenario((TASK,) * 5, (((0, 1), (2, 3), (4,)),), workers=1, waits=False, idle=False),
    "two workers, five in turn": Scenario((TASK,) * 5, (((0, 1), (2, 3), (4,)),), waits=False, idle=False),
    "a failure, then none": Scenario((FAILS, TASK), (((0, 1),),), workers=1, idle=False),
    "tiles a lap later": Scenario((TILED, TASK, TILED), (((0, 1, 2),),), workers=1, waits=False, idle=False),
    "more tiles than the queue holds": Scenario(
        (TaskSpec(tiles=4),) * 3, (((0, 1, 2),),), capacity=4, workers=1, waits=False, idle=False
    ),
    "tiles, then one more item than the queue holds": Scenario(
        (TaskSpec(tiles=4), TaskSpec(tiles=4), TASK),
        (((0, 1), (2,)),),
        capacity=4,
        workers=1,
        waits=False,
        idle=False,
    ),
    "ring: a failure, polled": Scenario(
        (FAILS, TASK, TASK, TASK), (((0, 1),), ((2, 3),)), served=True, polls=True
    ),
    "ring: two failures, polled": Scenario(
        (TASK, FAILS, FAILS, TASK), (((0,),), ((1,), (2,), (3,))), served=True, polls=True
    ),
    "ring: other failures a lap later": Scenario(
        (FAILS, TASK, TASK, FAILS), (((0, 1), (2, 3)),), served=True
    ),
    "ring: stores late": Scenario(
        (TASK,) * 4, (((0,), (1,)), ((2,), (3,))), served=True, waits=False, store_buffers=True
    ),
    "after, waiting": Scenario((TASK, TaskSpec(after=(0,))), (((0,), (1,)),), idle=False),
}
ONE, ALONE, TURN = "one task", "one task, one worker", "one worker, two in turn"
PAIR, FULL, LAP = "two producers, no idling", "ring: two and two", "ring: failures a lap later"
LATE = "stores late: one task"

RING, PUMP, WORKER, LEAVE = "host.ring", "device.pump", "device.worker", "device.ring"


def drop(name: str, module: str, line: str, scenario: str, times: int = 1) -> tuple[str, list[Mutation], str]:
    """`line`, a statement of its own, is taken away."""
    return name, [Mutation(name, module, line, "pass\n" if line.endswith("\n") else "pass", times)], scenario


def change(name: str, module: str, old: str, new: str, scenario: str) -> tuple[str, list[Mutation], str]:
    return name, [Mutation(name, module, old, new)], scenario


CAUGHT = [
    # ---- host/ring.py: claim
    change("claim without looking at room", RING, "if room < granted:", "if room < ZERO:", FULL),
    change("claim with an old watermark", RING, "if used > capacity:", "if used > used:", FULL),
    change(
        "claim without compare",
        RING,
        "if compare_and_swap(words + CLAIMED, claimed, claimed + granted)",
        "if compare_and_swap(words + CLAIMED, load_acquire_sys(words + CLAIMED), claimed + granted)",
        PAIR,
    ),
    change(
        "claim: the watermark without acquire",
        RING,
        "retired = load_acquire_sys(words + RETIRED)\n            claimed",
        "retired = m.load_relaxed_sys(words + RETIRED)\n            claimed",
        FULL,
    ),
    # ---- fill and publish
    change(
        "publish before the slot is filled",
        RING,
        "            fill(host, tasks + submitted * TASK_SIZE, granted,",
        "            publish(host, position, granted)\n"
        "            fill(host, tasks + submitted * TASK_SIZE, granted,",
        ONE,
    ),
    change(
        "stamp without release",
        RING,
        "store_release_sys(stamps + (at & mask) * EIGHT, at + ONE)",
        "m.store_relaxed_sys(stamps + (at & mask) * EIGHT, at + ONE)",
        ONE,
    ),
    drop("no stamp", RING, "store_release_sys(stamps + (at & mask) * EIGHT, at + ONE)", ONE),
    change(
        "stamp without the lap",
        RING,
        "store_release_sys(stamps + (at & mask) * EIGHT, at + ONE)",
        "store_release_sys(stamps + (at & mask) * EIGHT, (at & mask) + ONE)",
        "five in turn",
    ),
    drop("no fence before the look at parked", RING, "fence_sc_sys()\n", LATE),
    change(
        "no look at parked after publishing",
        RING,
        "        return nobody_serves(host)\n",
        "        return ZERO\n",
        "one task, unwatched",
    ),
    (
        "look at parked before publishing",
        [
            Mutation(
                "early",
                RING,
                "        index = ZERO\n        while index < count:\n            at = position + index",
                "        early = nobody_serves(host)\n"
                "        index = ZERO\n        while index < count:\n            at = position + index",
            ),
            Mutation("late", RING, "        return nobody_serves(host)\n", "        return early\n"),
        ],
        "one task, unwatched",
    ),
    change(
        "full and parked, and nobody launches",
        RING,
        "if nobody_serves(host) != ZERO and relaunch(host) != ZERO:\n                    parked = ONE",
        "if ONE == ZERO:\n                    parked = ONE",
        "lease, ring full",
    ),
    change(
        "a full ring is not retired",
        RING,
        "                retire(host)  # the ring is filling up: make room for the next round",
        "                pass",
        FULL,
    ),
    change(
        "waiting does not look at parked",
        RING,
        "if nobody_serves(host) != ZERO and status_of(host, position) == PENDING_AT:",
        "if ONE == ZERO:",
        "lease, one worker",
    ),
    # ---- what is withheld
    change(
        "withheld: passed all the same",
        PUMP,
        "            if stamp != position + ONE:",
        "            if stamp != position + ONE and stamp != (position + ONE) ^ HELD_BIT:",
        "withheld",
    ),
    change(
        "withheld: nobody is wanted, whatever comes next",
        RING,
        "            if stamp == (cursor + ONE) ^ HELD_BIT:\n                return ZERO",
        "            return ZERO",
        "withheld",
    ),
    change(
        "watch: does not ask for a launch",
        RING,
        "            if load_acquire_sys(stamps + (cursor & mask) * EIGHT) == cursor + ONE:",
        "            if ONE == ZERO:",
        "withheld",
    ),
    change(
        "watch: ends before the withheld task",
        RING,
        "            if cursor - last < TOP_BIT:",
        "            if cursor + ONE - last < TOP_BIT:",
        "withheld",
    ),
    change(
        "hold: the slot is not filled",
        RING,
        "        store_u64(task + RUN_AT, RUN_AND_TILES)\n        # Release: the task is",
        "        # Release: the task is",
        "withheld",
    ),
    # ---- retire
    change(
        "retire without the lock",
        RING,
        "        if compare_and_swap(words + LOCK, ZERO, ONE) == ZERO:\n            return",
        "        if ONE == ZERO:\n            return",
        FULL,
    ),
    change("retire without looking at done", RING, "if word - expected > STATUS:", "if ONE == ZERO:", FULL),
    change(
        "retire: done without acquire",
        RING,
        "word = load_acquire_sys(done + (position & mask) * EIGHT)",
        "word = m.load_relaxed_sys(done + (position & mask) * EIGHT)",
        FULL,
    ),
    change(
        "failures are not logged",
        RING,
        "            if word != expected:",
        "            if ONE == ZERO:",
        LAP,
    ),
    change(
        "watermark without release",
        RING,
        "store_release_sys(words + RETIRED, position)",
        "m.store_relaxed_sys(words + RETIRED, position)",
        FULL,
    ),
    change(
        "watermark before the log",
        RING,
        "            if word != expected:\n",
        "            store_release_sys(words + RETIRED, position + ONE)\n            if word != expected:\n",
        "ring: a failure, polled",
    ),
    change(
        "unlock before the watermark",
        RING,
        "        store_release_sys(words + RETIRED, position)\n        store_release_sys(words + LOCK, ZERO)",
        "        store_release_sys(words + LOCK, ZERO)\n        store_release_sys(words + RETIRED, position)",
        FULL,
    ),
    change(
        "unlock without release",
        RING,
        "        store_release_sys(words + RETIRED, position)\n        store_release_sys(words + LOCK, ZERO)",
        "        store_release_sys(words + RETIRED, position)\n"
        "        m.store_relaxed_sys(words + LOCK, ZERO)",
        "ring: stores late",
    ),
    # ---- tickets
    change(
        "ticket: done without acquire",
        RING,
        "word = load_acquire_sys(load_u64(host + DONE_AT) + slot)",
        "word = m.load_relaxed_sys(load_u64(host + DONE_AT) + slot)",
        ONE,
    ),
    change(
        "ticket: any later lap's word is mine",
        RING,
        "        if word - expected <= STATUS:\n            return word & STATUS",
        "        if word - expected < TOP_BIT:\n            return word & STATUS",
        "ring: other failures a lap later",
    ),
    change(
        "ticket: every word is mine",
        RING,
        "        if word - expected <= STATUS:\n            return word & STATUS",
        "        if word == word:\n            return word & STATUS",
        ONE,
    ),
    change(
        "ticket: no look at the watermark",
        RING,
        "if position - load_acquire_sys(words + RETIRED) < TOP_BIT:",
        "if ONE == ZERO:",
        ONE,
    ),
    change(
        "ticket: the watermark without acquire",
        RING,
        "if position - load_acquire_sys(words + RETIRED) < TOP_BIT:",
        "if position - m.load_relaxed_sys(words + RETIRED) < TOP_BIT:",
        "ring: a failure, polled",
    ),
    change(
        "ticket: the log without the lock",
        RING,
        "        while compare_and_swap(words + LOCK, ZERO, ONE) == ZERO:\n            pause(spins)",
        "        while ONE == ZERO:\n            pause(spins)",
        "ring: two failures, polled",
    ),
    # ---- device/pump.py: take and hand out
    change(
        "pump: stamp without acquire",
        PUMP,
        "stamp = load_acquire_sys(stamps + (position & mask) * EIGHT)",
        "stamp = m.load_relaxed_sys(stamps + (position & mask) * EIGHT)",
        ONE,
    ),
    change(
        "pump: stamp without the lap",
        PUMP,
        "if stamp != position + ONE:",
        "if stamp == ZERO:",
        ONE,
    ),
    drop("pump: descriptors are not copied", PUMP, "store_pair(ring, low, high)", ONE),
    drop("pump: no fence between descriptors and entries", PUMP, "fence_acq_rel_gpu()\n", ONE),
    change(
        "pump: entries before descriptors",
        PUMP,
        "special, cursor, ready, items, floor, retired\n",
        "special, known, gap, items, floor, retired\n",
        ONE,
    ),
    change(
        "pump: no look at the queue's room",
        PUMP,
        "if items + ready - floor > queue_length:",
        "if ONE == ZERO:",
        "tiles, then one more item than the queue holds",
    ),
    change(
        "pump: no look at the queue's room for tiles",
        PUMP,
        "if items + tiles - floor > queue_length:",
        "if ONE == ZERO:",
        "more tiles than the queue holds",
    ),
    drop(
        "pump: item ends are not noted",
        PUMP,
        "store_u64(ends + (position & mask) * EIGHT, items)",
        "more tiles than the queue holds",
    ),
    # ---- park
    change(
        "park without looking again",
        PUMP,
        "            if reason == IDLE or reason == HELD_BACK:\n",
        "            if ONE == ZERO:\n",
        "one task, unwatched",
    ),
    drop("park: no fence between announcing and looking again", PUMP, "fence_sc_sys()\n", LATE),
    (
        "park: look again, then announce",
        [
            Mutation(
                "announce",
                PUMP,
                "            announce(context, launch, reason)\n            if reason",
                "            if reason",
            ),
            Mutation(
                "late",
                PUMP,
                "                    reason = NONE\n        return reason",
                "                    reason = NONE\n            if reason != NONE:\n"
                "                store_relaxed_sys(report + PARKED, launch)\n        return reason",
            ),
        ],
        "one task, unwatched",
    ),
    drop("park: not announced", PUMP, "store_relaxed_sys(report + PARKED, launch)\n", "one task, unwatched"),
    change(
        "park: look again at the wrong lap",
        PUMP,
        "if load_acquire_sys(stamp) == known + ONE:",
        "if load_acquire_sys(stamp) == known:",
        "one task, unwatched",
    ),
    drop("closed is not stored", PUMP, "store_release_gpu(state + CLOSED, items + ONE)", ONE),
    change(
        "closed too far",
        PUMP,
        "store_release_gpu(state + CLOSED, items + ONE)",
        "store_release_gpu(state + CLOSED, items + ONE + ONE)",
        ONE,
    ),
    drop("the cursor is not kept", PUMP, "store_relaxed_gpu(state + CURSOR, cursor)", TURN),
    drop("the item number is not kept", PUMP, "store_u64(state + ITEMS, items)", TURN),
    drop("the launch number is not kept", PUMP, "store_u64(state + LAUNCHES, launch)", TURN),
    change(
        "the cursor is kept too far",
        PUMP,
        "(state + CURSOR, cursor)",
        "(state + CURSOR, cursor + gap)",
        "lease, one worker",
    ),
    # ---- device/ring.py: leave
    change("leave: reset one too early", LEAVE, "ONE) == workers:", "ONE) == workers - ONE:", ONE),
    change("leave: never reset", LEAVE, "ONE) == workers:", "ONE) == workers + ONE:", ONE),
    drop(
        "leave: tickets are not reset",
        LEAVE,
        "store_relaxed_gpu(state + TICKETS, load_relaxed_gpu(state + ITEMS))",
        ONE,
    ),
    drop("leave: closed is not reset", LEAVE, "store_relaxed_gpu(state + CLOSED, ZERO)", TURN),
    drop("leave: exits are not reset", LEAVE, "store_relaxed_gpu(state + EXITS, ZERO)", TURN),
    # ---- device/worker.py
    change(
        "take: entry without acquire",
        WORKER,
        "found = load_acquire_gpu(slot)",
        "found = m.load_relaxed_gpu(slot)",
        ONE,
    ),
    change(
        "take: entry without the lap",
        WORKER,
        "if found >> TO_LAP == lap:",
        "if found != ZERO:",
        "five in turn",
    ),
    change(
        "take: the same number twice",
        WORKER,
        "ticket = atomic_add_gpu(state + TICKETS, ONE)",
        "ticket = atomic_add_gpu(state + TICKETS, ZERO)",
        ONE,
    ),
    change(
        "take: closed is ignored",
        WORKER,
        "if closed != ZERO and ticket >= closed - ONE:",
        "if ONE == ZERO:",
        ONE,
    ),
    change(
        "after is not waited for",
        WORKER,
        "while load_acquire_gpu(word) - target >= TOP_BIT:",
        "while ONE == ZERO:",
        "after",
    ),
    change(
        "after without acquire",
        WORKER,
        "while load_acquire_gpu(word) - target >= TOP_BIT:",
        "while m.load_relaxed_gpu(word) - target >= TOP_BIT:",
        "after",
    ),
    drop("done words without a fence", WORKER, "fence_acq_rel_sys()\n", ONE),
    change(
        "done word of the next lap's position",
        WORKER,
        "word = ((position + ONE) << SHIFT) | status",
        "word = ((position + ONE + ONE) << SHIFT) | status",
        ONE,
    ),
    drop(
        "no done word for the host",
        WORKER,
        "store_relaxed_sys(host_done + (position & mask) * EIGHT, word)",
        ONE,
    ),
    drop(
        "no done word for other tasks",
        WORKER,
        "store_relaxed_gpu(device_done + (position & mask) * EIGHT, word)",
        "after",
    ),
    drop(
        "the status is not cleared",
        WORKER,
        "store_u32(scratch + STATUSES + index * FOUR, ZERO)\n                index += block_width()",
        "a failure, then none",
    ),
    change(
        "done after the last tile but one",
        WORKER,
        "u64(before == tiles - ONE)",
        "u64(before == tiles - ONE - ONE)",
        "tiles",
    ),
    drop(
        "tiles are not counted from zero again",
        WORKER,
        "store_relaxed_gpu(load_u64(context + TILE_COUNTS) + (position & mask) * EIGHT, ZERO)",
        "tiles a lap later",
    ),
]
HARMLESS = [
    (
        change(
            "claim: claimed without acquire",
            RING,
            "claimed = load_acquire_sys(words + CLAIMED)\n            used",
            "claimed = m.load_relaxed_sys(words + CLAIMED)\n            used",
            "ring: one and three",
        ),
        "a slot is handed over through the watermark; what was claimed brings no data along",
    ),
    (
        change(
            "parked, then enqueued",
            RING,
            "        enqueued = load_acquire_sys(load_u64(host + WORDS) + ENQUEUED)\n"
            "        if load_acquire_sys(load_u64(host + STATE) + PARKED_AT) != enqueued:",
            "        parked = load_acquire_sys(load_u64(host + STATE) + PARKED_AT)\n"
            "        if load_acquire_sys(load_u64(host + WORDS) + ENQUEUED) != parked:",
            "one task, unwatched",
        ),
        "either order is right while a launch looks at the ring before it idles out",
    ),
    (
        drop(
            "park: the announcement is not taken back",
            PUMP,
            "store_relaxed_sys(report + PARKED, launch - ONE)  # not parked after all",
            "one task, unwatched",
        ),
        "costs a needless launch, which finds the ring empty and parks",
    ),
    (
        change(
            "idle while tasks run",
            PUMP,
            "now - active > idle and load_relaxed_gpu(tickets) >= items + workers",
            "now - active > idle",
            "one task, unwatched",
        ),
        "the launch ends only after what it handed out, so nothing is lost; but a long task would park its "
        "launch again and again",
    ),
    (
        change(
            "withheld: a launch is asked for all the same",
            RING,
            "            if stamp == (cursor + ONE) ^ HELD_BIT:\n                return ZERO",
            "            if ONE == ZERO:\n                return ZERO",
            "withheld",
        ),
        "the launch finds nothing that it may take and parks, in the way of what the task waits for",
    ),
    (
        change(
            "withheld: parked without another look",
            PUMP,
            "if reason == IDLE or reason == HELD_BACK:",
            "if reason == IDLE:",
            "withheld",
        ),
        "the watch asks for another launch",
    ),
    (
        change(
            "hold: marked without release",
            RING,
            "store_release_sys(load_u64(host + STAMPS) + (position & mask) * EIGHT, (position + ONE) ^",
            "m.store_relaxed_sys(load_u64(host + STAMPS) + (position & mask) * EIGHT, (position + ONE) ^",
            "stores late: withheld",
        ),
        "whoever opens the task is told of it after this, by means that order as much",
    ),
    (
        change(
            "take: leaves at any closed",
            WORKER,
            "if closed != ZERO and ticket >= closed - ONE:",
            "if closed != ZERO:",
            ONE,
        ),
        "entries are stored before `closed`, so they are seen after it where loads stay in order, as in this "
        "model; `closed` is a relaxed load, and on a GPU the load of the entry may overtake it",
    ),
]


SLOW = {
    "unlock without release",
    "ticket: the log without the lock",
    "ring: a failure, polled",
    "leave: closed is not reset",
    "full and parked, and nobody launches",
    "ring: stores late",
    "ring: two failures, polled",
    "lease, ring full",
}


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name in SLOW else []


@pytest.mark.parametrize(
    ("mutations", "scenario"), [pytest.param(m, s, id=n, marks=marks(n)) for n, m, s in CAUGHT]
)
def test_a_protocol_without_it_fails(mutations: list[Mutation], scenario: str) -> None:
    with pytest.raises(Found) as found:
        explore(SCENARIOS[scenario], *mutations)
    print(found.value)


@pytest.mark.parametrize(
    ("mutations", "scenario", "reason"), [pytest.param(m, s, r, id=n) for (n, m, s), r in HARMLESS]
)
def test_a_protocol_without_it_still_holds(mutations: list[Mutation], scenario: str, reason: str) -> None:
    assert reason
    explore(SCENARIOS[scenario], *mutations)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(where, marks=marks(where))
        for where in sorted({where for _, _, where in CAUGHT} - set(SMALL) - set(LARGE))
    ],
)
def test_the_whole_protocol_holds_where_mutations_fail(scenario: str) -> None:
    explore(SCENARIOS[scenario])
