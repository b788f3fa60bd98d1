"""Every reachable state of a scenario, or the shortest way to one in which a property does not hold."""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import bodies
from .model import Blunder, Machine, Restart, Scenario, Violation


@dataclass
class Explored:
    states: int
    steps: int
    nodes: int
    good: int


class Found(AssertionError):
    """A violation, with the shortest trace that leads to it."""

    def __init__(self, message: str, trace: list[str]) -> None:
        super().__init__("\n".join([message, *trace]))
        self.message, self.trace = message, trace


class TooMany(Exception):
    """The limit of states was reached before the exploration was complete."""


def explore(
    scenario: Scenario, *mutations: bodies.Mutation, limit: int = 3_000_000, liveness: bool = True
) -> Explored:
    """Breadth first through all interleavings. Raises `Found` where a property does not hold.

    `liveness`: from every state, a state in which every task has completed must be reachable. Under a fair
    scheduler that is "no task is ever stranded, nothing deadlocks", whatever polls in circles meanwhile.
    """
    machine = Machine(scenario, *mutations)
    for seed in range(10):
        _look_around(machine, seed)
    while True:
        machine.begin()
        try:
            return _explore(machine, limit, liveness)
        except Restart:
            pass


def _look_around(machine: Machine, seed: int) -> None:
    """A short random walk, to learn most of who touches what before the exploration depends on it."""
    chance = random.Random(seed)
    machine.begin()
    try:
        state = machine.start_state()
        for _ in range(200):
            moves = list(machine.enabled(state))
            if not moves:
                break
            state = machine.move(state, *chance.choice(moves))
    except (Restart, Violation, Blunder, AssertionError, KeyError):
        pass  # the exploration will find it again, by the shortest way


def _explore(machine: Machine, limit: int, liveness: bool) -> Explored:
    try:
        start = machine.start_state()
    except (Violation, Blunder) as problem:
        if machine.grown:
            raise Restart from problem
        raise Found(f"{type(problem).__name__}: {problem}", []) from problem
    number = {hash(machine.canonical(start)): 0}
    parents, movers = array("l", [-1]), [(-1, None)]
    good = bytearray([machine.is_good(start)])
    sources, targets = array("l"), array("l")
    queue = deque([(0, start)])
    check = 1000
    move, enabled, canonical = machine.move, machine.enabled, machine.canonical
    while queue:
        at, state = queue.popleft()
        if machine.grown and (at > check or not queue):
            raise Restart
        for mover in enabled(state):
            try:
                reached = move(state, *mover)
            except Restart:
                raise
            except (Violation, Blunder, AssertionError, KeyError) as problem:
                if machine.grown:
                    raise Restart from problem  # it is real, but the steps of its trace would be others
                trace = [*_trace(machine, start, parents, movers, at), _label(machine, state, mover)]
                raise Found(f"{type(problem).__name__}: {problem}", trace) from problem
            key = hash(canonical(reached))
            to = number.get(key)
            if to is None:
                to = number[key] = len(parents)
                if to >= limit:
                    raise TooMany(f"{limit} states")
                parents.append(at)
                movers.append(mover)
                good.append(machine.is_good(reached))
                queue.append((to, reached))
            sources.append(at)
            targets.append(to)
    if machine.grown:
        raise Restart
    if liveness:
        reaches = np.frombuffer(good, dtype=np.uint8).astype(bool)
        source, target = np.frombuffer(sources, dtype=np.int64), np.frombuffer(targets, dtype=np.int64)
        while True:
            more = source[reaches[target] & ~reaches[source]]
            if not len(more):
                break
            reaches[more] = True
        if not reaches.all():
            stuck = int(np.argmin(reaches))
            trace = _trace(machine, start, parents, movers, stuck)
            raise Found("stranded: from here not every task can complete any more", trace)
    return Explored(len(parents), len(sources), len(machine.nodes), sum(good))


def _label(machine: Machine, state: Any, mover: Any) -> str:
    actor, choice = mover
    name = machine.actor_names[actor]
    if type(choice) is tuple:
        cell, value, _, _ = state[machine.BUFFER + actor][choice[1]]
        return f"  {name}: its store of {value} to {machine.names[cell]} becomes visible"
    node = machine.nodes[state[machine.NODE + actor]]
    text = machine.describe(node.op)
    if node.op is not None and node.op[0] == 0:
        text += f" = {state[node.op[1]]}"
    return f"  {name}: {text}" + (f" -> {int(choice)}" if choice is not None else "")


def _trace(machine: Machine, start: Any, parents: Any, movers: Any, at: int) -> list[str]:
    way = []
    while at > 0:
        way.append(movers[at])
        at = parents[at]
    trace, state = [], start
    for mover in reversed(way):
        trace.append(_label(machine, state, mover))
        state = machine.move(state, *mover)
    return trace


def walk(scenario: Scenario, *mutations: bodies.Mutation, seed: int = 0, most: int = 100_000) -> int:
    """One random schedule until every task has completed; returns its length."""
    machine = Machine(scenario, *mutations)
    while True:
        machine.begin()
        chance = random.Random(seed)
        try:
            state = machine.start_state()
            length = 0
            while not machine.is_good(state):
                if length == most:
                    raise Violation(f"not every task has completed after {most} steps")
                state = machine.move(state, *chance.choice(list(machine.enabled(state))))
                length += 1
            if not machine.grown:
                return length
        except Restart:
            pass
