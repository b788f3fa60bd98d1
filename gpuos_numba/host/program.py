"""What a program computes arrives, when and where it runs leaves: dependencies, runs, places in the arena.

Nothing here is in the way of a call. A recording is a list of steps that read and write views of roots; from
it come, in this order, which earlier steps each must wait for (`dependencies`), the sequences of small steps
that one block executes (`schedule`), and which temporaries may share memory without making anybody wait
(`place`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple

from ..errors import ArgumentError
from .symbolic import WHOLE, Recipe

RUNS_PER_WORKER: Final = 4
"""Runs that a level of independent steps is cut into, for each worker: enough to even out, few enough that
taking them costs little."""
LEAST_CHUNK: Final = 4
"""Steps that a run has at least where there are so many: handing over a shorter one costs more than it
saves."""
HOP: Final = 6
"""Steps that run in the time in which one block hears of another's: what a chain this much longer would take
is not worth a hop."""


class Ref(NamedTuple):
    """A view of a root: what a step reads or writes. `low` and `high` are bytes from the root's first
    element that bound it where the recipe is "fixed"."""

    root: int
    recipe: Recipe = WHOLE
    indices: tuple[int, ...] = ()
    low: int = 0
    high: int = 0


@dataclass(frozen=True)
class Step:
    """One recorded task: what it touches, and earlier steps that the user named."""

    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    after: tuple[int, ...] = ()


# --- dependencies ---


class _Part:
    """Accesses to one part of a root: the last writer, and who has read since."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer = -1
        self.readers: list[int] = []

    def conflicts(self, write: bool) -> Iterator[int]:
        if self.writer >= 0:
            yield self.writer
        if write:
            yield from self.readers


class _Memory:
    """Who has touched a root. Views of one recipe are told apart by their indices, whatever the shape; views
    of different recipes are taken to overlap."""

    def __init__(self) -> None:
        self.cells: dict[Recipe, dict[tuple[int, ...], _Part]] = {}
        self.intervals: list[tuple[int, int]] = []  # of "fixed" views, sorted
        self.longest = 0

    def touch(self, step: int, ref: Ref, write: bool, waits: set[int]) -> None:
        kind = ref.recipe[0][0] if ref.recipe else ""
        # Fixed views are bytes of the root, whatever their own shapes: one family.
        family: Recipe = ("fixed",) if kind == "fixed" else ref.recipe
        for other, cells in self.cells.items():
            if other != family:
                for part in cells.values():
                    waits.update(part.conflicts(write))
        mine = self.cells.setdefault(family, {})
        keys: list[tuple[int, ...]]
        own: list[tuple[int, ...]]
        if kind == "fixed":
            keys = list(self._overlapping(ref.low, ref.high))
            own = [(ref.low, ref.high)]
            if own[0] not in mine:
                insort(self.intervals, (ref.low, ref.high))
                self.longest = max(self.longest, ref.high - ref.low)
        else:
            keys = own = list(_cells(ref))
        for key in keys:
            if key in mine:
                waits.update(mine[key].conflicts(write))
        if write and ref.recipe == WHOLE:
            self.cells = {family: mine}  # whoever comes later waits for this one, and it for all others
            self.intervals, self.longest = [], 0
        for key in own:
            part = mine.setdefault(key, _Part())
            if write:
                part.writer, part.readers = step, []
            else:
                part.readers.append(step)

    def _overlapping(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        at = bisect_left(self.intervals, (low - self.longest, 0))
        while at < len(self.intervals) and self.intervals[at][0] < high:
            if self.intervals[at][1] > low:
                yield self.intervals[at]
            at += 1


def _cells(ref: Ref) -> Iterable[tuple[int, ...]]:
    """Cells that a view touches: two views of one recipe overlap in no shape unless they share one."""
    spans: list[range] = []
    keys = [
        key
        for step in ref.recipe
        if step[0] == "index"
        for key in step[1]
        if key == "i" or (key[0] == "s" and isinstance(key, tuple))
    ]
    for key, index in zip(keys, ref.indices, strict=True):
        if key == "i":
            spans.append(range(index, index + 1))
        else:
            length = max(1, key[1])
            spans.append(range(index // length, (index + length - 1) // length + 1))
    return product(*spans)


def dependencies(steps: Sequence[Step]) -> list[list[int]]:
    """For each step the earlier ones that it waits for: read after write, write after read and write."""
    written = {ref.root for step in steps for ref in step.writes}
    memories: dict[int, _Memory] = {}
    found = []
    for number, step in enumerate(steps):
        waits: set[int] = set(step.after)
        for write, refs in ((False, step.reads), (True, step.writes)):
            for ref in refs:
                if ref.root in written:
                    memories.setdefault(ref.root, _Memory()).touch(number, ref, write, waits)
        waits.discard(number)
        found.append(sorted(waits))
    return found


# --- runs ---


@dataclass
class Run:
    """What one block executes: `steps` in order, or one tile of one.

    Attributes:
        steps: numbers of steps.
        tile: what the body is told.
        waits: lower runs that must have ended, as ranges (first, count).
        unit: whose part it is; runs of one unit have the same ancestors.
    """

    steps: list[int]
    tile: int = 0
    waits: tuple[tuple[int, int], ...] = ()
    unit: int = 0


@dataclass
class Schedule:
    """Runs in the order in which they are handed out, each waiting for lower ones only.

    Attributes:
        ancestors: for each unit, the units that have ended when it begins, as bits.
        units: for each step, its unit.
        levels: for each unit, how many hops lie before it.
    """

    runs: list[Run]
    ancestors: list[int]
    units: list[int]
    levels: list[int]


@dataclass
class _Unit:
    steps: list[int]
    tiles: int = 1
    merge: bool = False
    before: set[int] = field(default_factory=set)
    level: int = 0


def schedule(
    waits: Sequence[Sequence[int]], tiles: Sequence[int], merge: Sequence[bool], workers: int, capacity: int
) -> Schedule:
    """Cut steps into runs.

    Args:
        waits: of each step, the earlier ones that it waits for.
        tiles: of each step, blocks that share it; 1 means that it is small and may stand in a run.
        merge: whether the step is called once more when its tiles have ended.
        workers: blocks there are.
        capacity: most runs.

    Raises:
        ArgumentError: there are more tiles than `capacity` allows.
    """
    clusters = _clusters(waits, tiles)
    pieces = RUNS_PER_WORKER * workers
    while True:
        units = _levelled(clusters, waits, tiles, merge, pieces)
        count = sum(unit.tiles + unit.merge for unit in units)
        if count <= capacity:
            break
        if pieces == 1:
            units = _in_series(units, waits)
            count = sum(unit.tiles + unit.merge for unit in units)
            if count > capacity:
                raise ArgumentError(
                    f"the program needs {count} runs, and the ring has {capacity} slots: raise capacity, or "
                    "record it in parts"
                )
            break
        pieces = max(1, pieces // 2)
    return _numbered(units, len(waits))


def _clusters(waits: Sequence[Sequence[int]], tiles: Sequence[int]) -> list[list[int]]:
    """Sets of small steps that belong into one run, and tiled steps alone.

    A step's phase is how many tiled ones lie before it, one after another. Connected small steps of one phase
    run in one block, if that takes no longer than their longest chain does with a hop at every step; else
    chains do. No cluster waits for itself through others: phases never fall along a way, and within a phase
    a chain is entered at its head only.
    """
    count = len(waits)
    phase, depth, parent = [0] * count, [1] * count, list(range(count))

    def find(step: int) -> int:
        while parent[step] != step:
            parent[step] = parent[parent[step]]
            step = parent[step]
        return step

    for step in range(count):
        for other in waits[step]:
            phase[step] = max(phase[step], phase[other] + (tiles[other] > 1))
    for step in range(count):
        if tiles[step] > 1:
            continue
        for other in waits[step]:
            if tiles[other] <= 1 and phase[other] == phase[step]:
                depth[step] = max(depth[step], depth[other] + 1)
                low, high = sorted((find(step), find(other)))
                parent[high] = low
    members: dict[int, list[int]] = {}
    for step in range(count):
        members.setdefault(find(step), []).append(step)
    clusters: list[list[int]] = []
    for component in members.values():
        longest = max(depth[step] for step in component)
        if len(component) <= max(8, HOP * longest):
            clusters.append(component)
            continue
        tails: dict[int, int] = {}  # last step of a chain -> its place in `clusters`
        for step in component:
            inside = [o for o in waits[step] if tiles[o] <= 1 and phase[o] == phase[step]]
            at = tails.pop(inside[0], None) if len(inside) == 1 else None
            if at is None:
                at = len(clusters)
                clusters.append([])
            clusters[at].append(step)
            tails[step] = at
    return sorted(clusters)


def _levelled(
    clusters: Sequence[list[int]],
    waits: Sequence[Sequence[int]],
    tiles: Sequence[int],
    merge: Sequence[bool],
    pieces: int,
) -> list[_Unit]:
    """Units, level by level; the small ones of a level joined to about `pieces` runs."""
    units = [_Unit(steps, max(1, tiles[steps[0]]), merge[steps[0]]) for steps in clusters]
    _connect(units, waits)
    order = _topological(units)
    levels: dict[int, list[_Unit]] = {}
    for number in order:
        unit = units[number]
        unit.level = max((units[other].level + 1 for other in unit.before), default=0)
        levels.setdefault(unit.level, []).append(unit)
    joined: list[_Unit] = []
    for level in sorted(levels):
        here = sorted(levels[level], key=lambda unit: unit.steps[0])
        small = [unit for unit in here if unit.tiles == 1]
        weight = sum(len(unit.steps) for unit in small)
        target = max(LEAST_CHUNK, -(-weight // pieces))
        open_unit: _Unit | None = None
        for unit in here:
            if unit.tiles > 1:
                joined.append(unit)
            elif open_unit is not None and len(open_unit.steps) + len(unit.steps) <= target:
                open_unit.steps += unit.steps
            else:
                open_unit = _Unit(list(unit.steps), 1, False, set(), level)
                joined.append(open_unit)
    _connect(joined, waits)
    return joined


def _in_series(units: Sequence[_Unit], waits: Sequence[Sequence[int]]) -> list[_Unit]:
    """The last resort of a long program: neighbouring levels without tiled steps become one run."""
    series: list[_Unit] = []
    tiled = {unit.level for unit in units if unit.tiles > 1}
    last: _Unit | None = None
    for unit in units:  # in order of level
        if unit.level in tiled:
            series.append(unit)
            last = None
        elif last is None:
            last = _Unit(list(unit.steps), 1, False, set(), unit.level)
            series.append(last)
        else:
            last.steps += unit.steps
    _connect(series, waits)
    return series


def _connect(units: Sequence[_Unit], waits: Sequence[Sequence[int]]) -> None:
    place = {step: number for number, unit in enumerate(units) for step in unit.steps}
    for number, unit in enumerate(units):
        unit.before = {place[other] for step in unit.steps for other in waits[step]} - {number}


def _topological(units: Sequence[_Unit]) -> list[int]:
    missing = [len(unit.before) for unit in units]
    following: list[list[int]] = [[] for _ in units]
    for number, unit in enumerate(units):
        for other in unit.before:
            following[other].append(number)
    ready = [number for number, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        number = ready.pop()
        order.append(number)
        for other in following[number]:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    assert len(order) == len(units), "clusters wait for each other"
    return order


def _numbered(units: Sequence[_Unit], steps: int) -> Schedule:
    """Runs of units that come in order of level, with no more waits than needed."""
    runs: list[Run] = []
    ended: list[tuple[int, int]] = []  # of each unit, the runs whose end is its end: first, count
    merges: list[tuple[int, Run]] = []
    ancestors: list[int] = []
    unit_of = [0] * steps
    level = -1

    def flush() -> None:
        """Merging runs come after all others of their level: a worker that waits in one has no better."""
        for number, run in merges:
            first, count = ended[number]
            run.waits = ((first, count),)
            ended[number] = (len(runs), 1)
            runs.append(run)
        merges.clear()

    for number, unit in enumerate(units):
        if unit.level != level:
            flush()
            level = unit.level
        above = 0
        for other in unit.before:
            above |= ancestors[other]
        direct = [other for other in unit.before if not above >> other & 1]
        for other in direct:
            above |= 1 << other
        ancestors.append(above)
        waits = _ranges(ended[other] for other in direct)
        ended.append((len(runs), unit.tiles))
        if unit.tiles > 1:
            runs += [Run(unit.steps, tile, waits, number) for tile in range(unit.tiles)]
            if unit.merge:
                merges.append((number, Run(unit.steps, unit.tiles, (), number)))
        else:
            unit.steps.sort()
            runs.append(Run(unit.steps, 0, waits, number))
        for step in unit.steps:
            unit_of[step] = number
    flush()
    return Schedule(runs, ancestors, unit_of, [unit.level for unit in units])


def _ranges(parts: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring ranges joined."""
    joined: list[tuple[int, int]] = []
    for first, count in sorted(parts):
        if joined and joined[-1][0] + joined[-1][1] == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return tuple(joined)


# --- temporaries ---


def place(
    made: Schedule, touches: Sequence[Sequence[int]], pools: dict[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Slots for temporaries: {temporary: slot in its pool}, {pool: slots}.

    A slot is used again only by who comes after all its users anyway, so nobody waits for memory.

    Args:
        made: the schedule.
        touches: of each step, the temporaries that it reads or writes.
        pools: of each temporary, its pool; those of a pool have one size.
    """
    left: dict[int, int] = {}
    for each in touches:
        for temporary in each:
            left[temporary] = left.get(temporary, 0) + 1
    slots: dict[int, int] = {}
    used: dict[int, int] = {}
    users: dict[int, int] = {}
    free: dict[int, list[tuple[int, int]]] = {}  # pool -> (slot, units that used it, as bits)
    for run in made.runs:
        if run.tile != 0:
            continue  # the step was seen with its first tile
        over = made.ancestors[run.unit] | 1 << run.unit  # a run's own steps are in order too
        for step in run.steps:
            for temporary in touches[step]:
                if temporary not in slots:
                    pool = pools[temporary]
                    available = free.setdefault(pool, [])
                    for at in range(len(available) - 1, max(-1, len(available) - 33), -1):
                        if available[at][1] & ~over == 0:
                            slots[temporary] = available.pop(at)[0]
                            break
                    else:
                        slots[temporary] = used.get(pool, 0)
                        used[pool] = slots[temporary] + 1
                users[temporary] = users.get(temporary, 0) | 1 << run.unit
            for temporary in touches[step]:
                left[temporary] -= 1
                if left[temporary] == 0:
                    free[pools[temporary]].append((slots[temporary], users[temporary]))
    return slots, used
