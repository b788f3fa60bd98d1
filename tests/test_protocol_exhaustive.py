"""The real bodies of ring, pump and worker under every interleaving of their memory operations.

Capacity 2, up to 2 producers, pump, 2 workers, park and relaunch included. What is explored whole, and what
not:

- `LARGE["two producers, two workers"]` is the full cast with one task each that nobody waits for, the park
  and relaunch race included (several hundred thousand states; slow). Two tasks each for the full cast is
  too big; it is taken apart into the host's half (two producers with two tasks each: full ring, retire,
  failures, laps, wrapping positions) before two abstract servers, and launches that serve up to three tasks
  of one or two producers.
- Not explored: linked runs, parking to widen, `submit_plain`, blocks of more than one thread.
- Polite waiting (`pause`) and time-outs never expire here. Idle limits expire as soon as they may, leases
  at any turn of the first launch.
- "stores late" scenarios let every store to a shared word stay unseen past later operations, as far as
  releases and fences allow; the other scenarios interleave operations one after another. In all of them
  descriptors, results and the pump's own words are checked for races: an access must be ordered after the
  ones it conflicts with by release and acquire alone. Loads are never reordered.

In every state: nothing torn, overwritten, run twice, handed out of order, reported early or with a wrong
status. From every state: all tasks can still complete.
"""

from __future__ import annotations

import pytest

from gpuos_numba.host import ring
from tests.protocol import bodies, threads
from tests.protocol.explore import Found, explore, walk
from tests.protocol.model import MASK_64, U64, Blunder, Scenario, TaskSpec
from tests.protocol.scenarios import LARGE, ONE_EACH, SMALL, TASK


@pytest.mark.parametrize("name", SMALL)
def test_every_interleaving(name: str) -> None:
    print(explore(SMALL[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_interleaving_of_many(name: str) -> None:
    print(explore(LARGE[name], limit=8_000_000))


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_of_what_is_too_big_to_explore(seed: int) -> None:
    tasks = tuple(TaskSpec(fails=i % 5 == 4, tiles=1 + i % 3 % 2) for i in range(9))
    walk(Scenario(tasks, (((0, 1, 2, 3), (4,)), ((5,), (6, 7, 8))), start=MASK_64 - 4), seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_around_a_withheld_task(seed: int) -> None:
    tasks = (TaskSpec(held=True), *(TaskSpec(fails=i == 3) for i in range(1, 6)))
    batches = (((1,), (0,), (2, 3)), ((4,), (5,)))
    walk(Scenario(tasks, batches, start=MASK_64 - 3, stream=True, waits=seed > 0), seed=seed)


def test_a_withheld_task_without_a_watch_is_left_behind() -> None:
    """Why host/watch.py is there: a stream opens a task and looks at nothing."""
    with pytest.raises(Found, match="stranded"):
        explore(
            Scenario((TaskSpec(held=True),), (((0,),),), workers=1, waits=False, stream=True, watch=False)
        )


def test_a_launch_without_a_watch_leaves_a_task_behind_when_its_lease_ends() -> None:
    """Why the host keeps a spare launch or a watch: only idle parking looks at the ring again."""
    with pytest.raises(Found, match="stranded"):
        explore(Scenario((TASK,), (((0,),),), workers=1, waits=False, idle=False, lease=True))


@pytest.mark.slow
def test_a_launch_must_be_counted_before_it_runs() -> None:
    """Why host/lease.py adds to `enqueued` first: else the launch could park before producers expect it."""
    with pytest.raises(Found, match="stranded"):
        explore(Scenario((TASK, TASK), ONE_EACH, workers=1, waits=False, late_start=False, counts_late=True))


def test_a_place_in_a_body_holds_no_result_that_the_model_does_not_see() -> None:
    """No statement makes an access while the result of an earlier one waits on the evaluation stack."""
    for name in bodies.MODULES:
        assert list(bodies.held_results(bodies.source_of(name))) == []
    with open(threads.__file__, encoding="utf-8") as file:
        assert list(bodies.held_results(file.read())) == []
    assert list(bodies.held_results("if load_relaxed_a(x) == load_relaxed_a(y): pass"))


def test_the_model_is_as_strict_as_numba() -> None:
    with pytest.raises(Blunder):
        U64(1) + 1
    assert U64(0) - U64(1) == MASK_64
    assert ring.PENDING_STATUS > 0xFF
