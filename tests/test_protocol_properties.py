"""The protocol under schedules that Hypothesis invents: more tasks, laps and workers than can be explored
whole.

The bodies are the real ones, run one memory operation at a time by tests/protocol/model.py, which checks at
every operation that nothing is torn, overwritten, run twice, handed out of order or reported early. Here
producers claim and publish when a rule says so, in any order, blocks run as far as a rule lets them, and
tickets are looked at at any time, laps later too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gpuos_numba.descriptor import MASK_64
from tests.protocol.bodies import Mutation
from tests.protocol.model import GATE, Machine, Scenario, TaskSpec, Violation

CLAIM, PUBLISH, LOOK = 1, 2, 3
SHAPES = (  # start position, capacity, workers
    (0, 2, 2),
    ((1 << 31) - 3, 4, 2),
    ((1 << 32) - 3, 2, 3),
    ((1 << 56) - 3, 4, 1),
    ((1 << 63) - 1, 8, 3),
    ((1 << 64) - 3, 2, 2),
    ((1 << 64) - 3, 8, 2),
)


@cache
def machine_for(start: int, capacity: int, workers: int, *mutations: Mutation) -> Machine:
    count = 2 * capacity + 3
    tasks = tuple(TaskSpec(fails=i % 4 == 3, tiles=2 if i % 5 == 4 else 1) for i in range(count))
    batches: tuple[list[tuple[int, ...]], ...] = ([], [], [])
    first = 0
    for turn, size in enumerate([1, 2, 3, 1, 1, 2, 1, 3, 4, 1, 2, 4, 3]):
        if first < count:
            batches[turn % 3].append(tuple(range(first, min(first + size, count))))
            first += size
    scenario = Scenario(
        tasks,
        tuple(tuple(batch) for batch in batches),
        capacity=capacity,
        workers=workers,
        start=start,
        producer="stepper",
        looker=True,
        park_request=True,
        most_launches=64,
    )
    return Machine(scenario, *mutations, all_steps=True)


class Protocol(RuleBasedStateMachine):
    """Who acts next is drawn; what acting means is the machine's business."""

    mutations: tuple[Mutation, ...] = ()

    @initialize(shape=st.sampled_from(SHAPES))
    def launch(self, shape: tuple[int, int, int]) -> None:
        self.machine = machine_for(*shape, *self.mutations)
        self.state = self.machine.start_state()
        names = self.machine.actor_names
        self.producers = [i for i, name in enumerate(names) if name.startswith("producer")]
        self.looker = names.index("looker")
        self.parker = names.index("parker")

    def gate_of(self, actor: int) -> int:
        number = self.state[self.machine.NODE + actor]
        op = self.machine.nodes[number].op if number >= 0 else None
        return op[4] if op is not None and op[0] == GATE else 0

    def go(self, actor: int, steps: int) -> None:
        """Let an actor run, until it needs to be told."""
        for _ in range(steps):
            if self.state[self.machine.NODE + actor] < 0 or self.gate_of(actor):
                return
            self.state = self.machine.move(self.state, actor)

    def tell(self, actor: int, answer: Any = None) -> None:
        self.state = self.machine.move(self.state, actor, answer)

    @rule(which=st.integers(0, 2), steps=st.integers(0, 20))
    def claim(self, which: int, steps: int) -> None:
        actor = self.producers[which]
        if self.gate_of(actor) == CLAIM:
            self.tell(actor)
            self.go(actor, steps)

    @rule(which=st.integers(0, 2), steps=st.integers(0, 20))
    def publish(self, which: int, steps: int) -> None:
        actor = self.producers[which]
        self.go(actor, 20)
        if self.gate_of(actor) == PUBLISH:
            self.tell(actor)
            self.go(actor, steps)

    @rule(steps=st.integers(1, 60))
    def pump(self, steps: int) -> None:
        self.go(0, steps)

    @rule(which=st.integers(0, 2), steps=st.integers(1, 30))
    def work(self, which: int, steps: int) -> None:
        """Take, run or complete: whatever this worker is at."""
        self.go(1 + which % self.machine.scenario.workers, steps)

    @rule(which=st.integers(0, 2), steps=st.integers(1, 30))
    def produce(self, which: int, steps: int) -> None:
        self.go(self.producers[which], steps)

    @rule(index=st.integers(0, 18), steps=st.integers(0, 12))
    def look(self, index: int, steps: int) -> None:
        machine = self.machine
        self.go(self.looker, 100)
        claimed = (self.state[machine.claimed] - machine.scenario.start) & MASK_64
        if index < claimed and self.gate_of(self.looker):
            self.tell(self.looker, type(machine.task_at)((machine.scenario.start + index) & MASK_64))
            self.go(self.looker, steps)

    @rule()
    def park(self) -> None:
        self.go(self.parker, 1)

    @invariant()
    def order_of_each_producer_is_kept(self) -> None:
        if not hasattr(self, "machine"):
            return
        order = [task for task in self.machine.order(self.state) if task >= 0]
        assert len(set(order)) == len(order)
        for batches in self.machine.scenario.producers:
            mine = {task for batch in batches for task in batch}
            assert [task for task in order if task in mine] == sorted(task for task in order if task in mine)

    def teardown(self) -> None:
        """Told to go on, everybody comes to an end, and every task has completed."""
        if not hasattr(self, "machine"):
            return
        for turn in range(3000):
            if self.machine.is_good(self.state):
                break
            self.look(turn % self.machine.n, 100)
            for actor in range(self.machine.actors):
                if self.gate_of(actor) in (CLAIM, PUBLISH):
                    self.tell(actor)
                self.go(actor, 7)
        assert self.machine.is_good(self.state), "a task is stranded"
        for index in range(self.machine.n):
            self.look(index, 100)
        self.order_of_each_producer_is_kept()


QUICK = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestProtocol = Protocol.TestCase
TestProtocol.settings = QUICK


@pytest.mark.parametrize(
    "mutation",
    [
        Mutation("claim without looking at room", "host.ring", "if room < granted:", "if room < ZERO:"),
        Mutation("entry without the lap", "device.worker", "if found >> TO_LAP == lap:", "if found != ZERO:"),
        Mutation("failures are not logged", "host.ring", "if word != expected:", "if ONE == ZERO:"),
        Mutation(
            "no stamp", "host.ring", "store_release_sys(stamps + (at & mask) * EIGHT, at + ONE)", "pass"
        ),
    ],
    ids=lambda mutation: mutation.name,
)
def test_a_broken_protocol_is_found(mutation: Mutation) -> None:
    broken = type("Broken", (Protocol,), {"mutations": (mutation,)})
    with pytest.raises((Violation, AssertionError, ExceptionGroup)):
        run_state_machine_as_test(
            broken, settings=settings(QUICK, max_examples=300, phases=[Phase.generate], database=None)
        )
