"""Programs: a trace arrives once, arguments arrive with each call, and each call leaves as one task.

What a trace needs on the device is uploaded when it is first needed: `_Layout`, its runs and records, which
no
call changes. What depends on shapes is planned once for each new set of shapes, group by group: `_Resolved`.
What depends on addresses is the base of each array. The last two are a call's table.
"""

from __future__ import annotations

import math
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .checking import check_output, immediate, infer, plan_call
from .descriptor import (
    DTYPE_NAMES,
    FIFTH_INPUT,
    ITEMSIZE,
    MAX_INPUTS,
    MAX_OUTPUTS,
    SCALAR_BYTES,
    TASK,
    TASK_BYTES,
    DType,
    Flag,
    offset,
)
from .device.operators.table import Operand as Planned
from .device.operators.table import Plan
from .errors import ArgumentError, DTypeError, QueueFull
from .host.arrays import ArrayView, _contiguous_strides, _same_walk, byte_range, overlap, validate_output
from .host.completion import Ticket
from .host.order import ACCESS, MOST_RANGES, pack_ranges
from .host.program import Schedule, place, schedule
from .host.symbolic import WHOLE, Followed, SymbolicNumber, apply, follow
from .protocol import (
    CALL_BYTES,
    CALL_EPOCH,
    GROUP,
    POINTERS,
    PROGRAM_GROUP,
    PROGRAM_RECORD,
    PROGRAM_RUN,
    RECORD_FIRST_BITS,
    RECORD_ROOT_BITS,
    RECORD_SECOND_BITS,
)
from .recording import Operand, Trace, record_function
from .shapes import Shape

if TYPE_CHECKING:
    from .runtime import Runtime


Layout = tuple[Shape, tuple[int, ...]]  # shape and strides of a root

WORKSPACE: Final = MAX_INPUTS + MAX_OUTPUTS - 1
"""The place among a task's pointers where a workspace arrives."""
FIFTH: Final = POINTERS - 1
LINE: Final = 128
REMEMBERED: Final = 256
"""Sets of shapes whose plans a program keeps, and ..."""
REMEMBERED_BYTES: Final = 64 << 20
"""... the most that they may take."""
RECENT: Final = 8
"""Sets of arrays that a copy knows again at once."""
# Words of a call's task.
FLAGS_WORD, TILES_WORD, POINTERS_WORD = 0, offset("run") // 8, offset("inputs") // 8
EPOCH_WORD, BYTES_WORD = CALL_EPOCH // 8, CALL_BYTES // 8
_HEAD = struct.Struct("<IIIIQQQQQQqQQ6HI24s")
_STEPS = struct.Struct(f"<{2 * POINTERS}Q16x")
assert _HEAD.size == TASK_BYTES and _HEAD.size + _STEPS.size == PROGRAM_GROUP.itemsize
WORD: Final = (1 << 64) - 1
SLOTS: Final = 4
"""Tables of different contents that calls of one copy may use at the same time."""


class _Inconsistent(Exception):
    """Roots that were taken to have one shape always turn out not to."""


@dataclass
class _Place:
    """One operand of all calls of a group.

    Attributes:
        roots: of each call, its root.
        indices: of each call, a row.
        most: largest of each column.
    """

    roots: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]
    most: tuple[int, ...]


@dataclass
class _Group:
    """Calls of one operator on operands of equal classes, by equal recipes.

    Attributes:
        calls: their numbers; the first stands for all.
        places: of the operands, by pointer of the task.
        entangled: some output lies in a root that an input of the call lies in too, elsewhere.
    """

    calls: list[int]
    places: dict[int, _Place] = field(default_factory=dict)
    entangled: bool = False


class _Grouping:
    """A trace's calls in groups. `examples`: shapes and strides of all roots, as known for some sets of
    shapes: roots that are alike in all of them are one class."""

    def __init__(self, trace: Trace, examples: Sequence[Sequence[Layout]]) -> None:
        classes: dict[Any, int] = {}
        self.class_of = [
            classes.setdefault((root.dtype, *(example[root.number] for example in examples)), len(classes))
            for root in trace.roots
        ]
        self.examples = list(examples)
        self.dtypes = {c: root.dtype for c, root in zip(self.class_of, trace.roots, strict=True)}
        found: dict[Any, _Group] = {}
        for number, call in enumerate(trace.calls):
            key = (
                call.operator,
                tuple(self._key(each) for each in call.inputs),
                tuple(self._key(each) for each in call.outputs),
                call.made,
                tuple((name, type(v), str(v)) for name, v in sorted(call.parameters.items())),
            )
            found.setdefault(key, _Group([])).calls.append(number)
        self.groups = list(found.values())
        self.group_of = [0] * len(trace.calls)
        for index, group in enumerate(self.groups):
            for number in group.calls:
                self.group_of[number] = index
            self._gather(trace, group)
        self.layouts: dict[Any, _Layout] = {}

    def _key(self, each: Any) -> Any:
        if isinstance(each, Operand):
            return self.class_of[each.ref.root], each.ref.recipe, each.dtype
        if isinstance(each, SymbolicNumber):
            return "number", each.number
        return "value", type(each), str(each)

    def _gather(self, trace: Trace, group: _Group) -> None:
        calls = [trace.calls[number] for number in group.calls]
        first = calls[0]
        for at, each in [*enumerate(first.inputs), *enumerate(first.outputs, MAX_INPUTS)]:
            if not isinstance(each, Operand):
                continue
            is_input = at < len(first.inputs) and first.inputs[at] is each
            column = at if is_input else at - MAX_INPUTS
            refs = [(call.inputs if is_input else call.outputs)[column].ref for call in calls]
            indices = np.array([ref.indices for ref in refs], np.int64).reshape(len(refs), -1)
            most = tuple(int(n) for n in indices.max(0)) if indices.shape[1] else ()
            pointer = FIFTH if is_input and column == MAX_INPUTS else at
            group.places[pointer] = _Place(np.array([ref.root for ref in refs]), indices, most)
        group.entangled = any(
            out.ref.root == each.ref.root and out.ref != each.ref
            for call in calls
            for out in call.outputs
            for each in call.inputs
            if isinstance(each, Operand)
        )


class _Layout:
    """A grouping for given numbers of tiles: its schedule, and what of it lies on the device.

    Places in the table: 0 unused; the roots that have an array; pools of temporaries; and an address each for
    what two small indices do not reach.
    """

    def __init__(
        self,
        trace: Trace,
        grouping: _Grouping,
        plans: Sequence[Plan],
        workers: int,
        capacity: int,
    ) -> None:
        groups, group_of = grouping.groups, grouping.group_of
        tiles = [max(1, plans[g].tiles) for g in group_of]
        merge = [plans[g].merge and plans[g].tiles > 1 for g in group_of]
        self.schedule: Schedule = schedule(trace.waits, tiles, merge, workers, capacity)
        given = {output.root for output in trace.outputs}
        self.based = [r.number for r in trace.roots if r.kind != "result" or r.number in given]
        """Roots with an address of their own."""
        place_of = {root: 1 + at for at, root in enumerate(self.based)}
        # Temporaries of a class have one size whatever the shapes, and so have workspaces of a group.
        pool_ids: dict[Any, int] = {}
        pools: dict[int, int] = {}
        touches: list[list[int]] = []
        workspace_at = len(trace.roots)
        for number, call in enumerate(trace.calls):
            touched = {
                each.ref.root
                for each in (*call.inputs, *call.outputs)
                if isinstance(each, Operand) and each.ref.root not in place_of
            }
            for root in touched:
                pools[root] = pool_ids.setdefault(("class", grouping.class_of[root]), len(pool_ids))
            if plans[group_of[number]].workspace:
                touched.add(workspace_at + number)
                pools[workspace_at + number] = pool_ids.setdefault(
                    ("workspace", group_of[number]), len(pool_ids)
                )
            touches.append(sorted(touched))
        self.slots, used = place(self.schedule, touches, pools)
        self.pools = list(pool_ids)
        """For each pool, whose it is: ("class", class) or ("workspace", group)."""
        self.pool_slots = [used.get(number, 0) for number in range(len(pool_ids))]
        self.first_pool = 1 + len(self.based)
        for root, pool in pools.items():
            place_of[root] = self.first_pool + pool
        self.places = self.first_pool + len(pool_ids)
        self.columns: dict[tuple[int, int], list[int]] = {}
        """By group and pointer: which steps go with a record's indices; -1 is the slot."""
        self.extras: list[
            tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], int, int]
        ] = []
        """Places with an address each: (places, places of their bases, indices, group, pointer)."""
        self.pool_of: dict[tuple[int, int], int] = {}
        """By group and pointer: the pool of temporaries, -1 where the operand is none."""
        operands = self._operands(trace, groups, place_of, workspace_at, plans, pools)
        self.groups_at = -(-self.places // 32) * 32
        self.table_words = self.groups_at + 32 * len(groups)
        self._records(group_of, operands)
        self.runs_count = len(self.schedule.runs)

    def _operands(
        self,
        trace: Trace,
        groups: Sequence[_Group],
        place_of: dict[int, int],
        workspace_at: int,
        plans: Sequence[Plan],
        pools: dict[int, int],
    ) -> np.ndarray[Any, Any]:
        words = np.zeros((len(trace.calls), POINTERS), np.uint64)
        for number, group in enumerate(groups):
            places = dict(group.places)
            if plans[number].workspace:
                roots = np.array([workspace_at + call for call in group.calls])
                places[WORKSPACE] = _Place(roots, np.zeros((len(roots), 0), np.int64), ())
            calls = np.array(group.calls)
            for pointer, each in places.items():
                base = np.array([place_of[int(root)] for root in each.roots], np.int64)
                slot = np.array([self.slots.get(int(root), 0) for root in each.roots], np.int64)
                columns = [-1] if slot.any() else []
                columns += list(range(each.indices.shape[1]))
                values = {-1: slot, **{k: each.indices[:, k] for k in range(each.indices.shape[1])}}
                columns = [k for k in columns if values[k].any()]
                columns.sort(key=lambda k: -int(values[k].max()))
                fits = len(columns) <= 2 and all(int(values[k].min()) >= 0 for k in columns)
                for k, bits in zip(columns, (RECORD_FIRST_BITS, RECORD_SECOND_BITS), strict=False):
                    fits = fits and int(values[k].max()) < 1 << bits
                if not fits:
                    extra = self.places + np.arange(len(calls))
                    self.places += len(calls)
                    self.extras.append((extra, base, np.column_stack([slot, each.indices]), number, pointer))
                    base, columns = extra, []
                if self.places >= 1 << RECORD_ROOT_BITS:
                    raise ArgumentError(
                        f"a program of more than {1 << RECORD_ROOT_BITS} addresses: record it in parts"
                    )
                word = base.astype(np.uint64)
                for k, shift in zip(
                    columns, (RECORD_ROOT_BITS, RECORD_ROOT_BITS + RECORD_FIRST_BITS), strict=False
                ):
                    word |= values[k].astype(np.uint64) << np.uint64(shift)
                words[calls, pointer] = word
                self.columns[number, pointer] = columns
                self.pool_of[number, pointer] = next(
                    (pools[root] for root in map(int, each.roots) if root in pools), -1
                )
        return words

    def _records(self, group_of: Sequence[int], operands: np.ndarray[Any, Any]) -> None:
        order: list[int] = []
        at: dict[int, int] = {}
        linked: list[bool] = []
        runs = np.zeros(len(self.schedule.runs), PROGRAM_RUN)
        waits: list[int] = []
        known: dict[Any, int] = {}
        for number, run in enumerate(self.schedule.runs):
            if run.steps[0] not in at:
                for step in run.steps:
                    at[step] = len(order)
                    order.append(step)
                    linked.append(step != run.steps[-1])
            if run.waits not in known:
                known[run.waits] = len(waits)
                waits += [first | count << 32 for first, count in run.waits]
            runs[number] = (
                at[run.steps[0]],
                len(run.steps),
                run.tile,
                known[run.waits] | len(run.waits) << 32,
            )
        records = np.zeros(len(order) + 2 * GROUP, PROGRAM_RECORD)
        records["group"][: len(order)] = np.array(group_of)[order]
        records["flags"][: len(order)] = np.array(linked) * int(Flag.LINK)
        records["operands"][: len(order)] = operands[order]
        self.runs, self.records = runs, records
        self.waits = np.array(waits or [0], np.uint64)

    def upload(self, machine: Any) -> None:
        """Bring runs, waits and records to the device, once."""
        if not hasattr(self, "memory"):
            parts = [self.runs, self.waits, self.records]
            sizes = [-(-part.nbytes // LINE) * LINE for part in parts]
            data = np.zeros(sum(sizes), np.uint8)
            offsets = [0, sizes[0], sizes[0] + sizes[1]]
            for part, offset in zip(parts, offsets, strict=True):
                data[offset : offset + part.nbytes] = part.view(np.uint8)
            self.memory = machine.upload(data.tobytes())
            base = machine.view(self.memory, "a program's records").address
            self.addresses = tuple(base + offset for offset in offsets)


@dataclass
class _Resolved:
    """A layout for one set of shapes.

    Attributes:
        groups: their PROGRAM_GROUPs.
        walks: (group, walks of its operands) where layouts are needed.
        pool_at, pool_bytes: of each pool, where in the arena it begins and the bytes of a slot.
        arena: bytes of all.
        outputs: shape and dtype of each output root.
        steps: by group and pointer, bytes from one slot and one index to the next.
        version: changes when layout ids do.
    """

    body: _Body
    layout: _Layout
    groups: np.ndarray[Any, Any]
    walks: list[tuple[int, Any]]
    pool_at: np.ndarray[Any, Any]
    pool_bytes: list[int]
    arena: int
    outputs: dict[int, tuple[Shape, DType]]
    steps: dict[tuple[int, int], list[int]]
    epoch: int = -1
    version: int = 0


class _Body:
    """A trace and what has been made of it."""

    def __init__(self, trace: Trace, key: Any) -> None:
        self.trace, self.key = trace, key
        recorded = [(root.shape, root.strides) for root in trace.roots]
        self.grouping = _Grouping(trace, [recorded])
        given = {output.root for output in trace.outputs}
        self.results = [r.number for r in trace.roots if r.kind == "result" and r.number in given]
        """Results that calls give."""
        self.written = {each.ref.root for call in trace.calls for each in call.outputs}


@dataclass
class _Recent:
    """A call that may come again with the same arrays.

    Attributes:
        content: what its table held.
        known: of each array, a weak reference, address, shape and strides.
        owners: what the call needs besides the arrays.
    """

    table: _Table
    content: Any
    known: list[tuple[Any, int, Any, Any]]
    owners: list[Any]
    single: bool


class _Table:
    """A place for a table on the bus, and one on the device."""

    def __init__(self, words: np.ndarray[Any, Any], source: int, memory: Any, address: int) -> None:
        self.words, self.source, self.memory, self.address = words, source, memory, address
        self.content: Any = None
        self.accesses: Any = None  # what a call with this content touches
        self.groups: Any = None
        self.ticket: Ticket | None = None
        self.task = np.zeros(1, TASK)
        """The call as it goes into the ring; its words by number."""
        self.task_words = self.task.view(np.uint64)
        self.task_address = int(self.task.ctypes.data)
        self.touched = 0  # address of `accesses`


class _Copy:
    """What one call at a time uses: an arena, done words, tables."""

    def __init__(self) -> None:
        self.arena: Any = None
        self.arena_bytes = 0
        self.arena_address = 0
        self.done: dict[_Layout, tuple[Any, int]] = {}
        self.tables: dict[_Layout, list[_Table]] = {}
        self.last_table: _Table | None = None
        self.recent: OrderedDict[tuple[int, ...], _Recent] = OrderedDict()
        self.ticket: Ticket | None = None
        self.waits = np.zeros(2, np.uint64)
        """First and last position of the call before, for the next one to wait for."""
        self.waits_address = int(self.waits.ctypes.data)


class TableSpace:
    """The bus memory that tables lie in, handed out first fit."""

    def __init__(self, words: np.ndarray[Any, Any], address: int) -> None:
        self._words, self._address = words, address
        self._lock = threading.Lock()
        self._free = [(0, len(words))]

    def take(self, count: int) -> tuple[np.ndarray[Any, Any], int, tuple[int, int]] | None:
        """(words, their address on the device, what to give back), or None where there is no room."""
        count = -(-count // 16) * 16
        with self._lock:
            for at, (first, length) in enumerate(self._free):
                if length >= count:
                    self._free[at : at + 1] = [(first + count, length - count)] if length > count else []
                    return self._words[first : first + count], self._address + 8 * first, (first, count)
        return None

    def give(self, parts: list[tuple[int, int]]) -> None:
        """Take parts back. No call may be using them."""
        with self._lock:
            merged: list[tuple[int, int]] = []
            for first, length in sorted(self._free + parts):
                if merged and merged[-1][0] + merged[-1][1] == first:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((first, length))
            self._free = merged
            parts.clear()


class Program:
    """Calls that were recorded once and run again with new arrays, sizes and numbers, as one task.

    Made by `Runtime.program` and `Runtime.record`. Calls of one program run one after another, for they share
    the memory of intermediate results; with `copies` so many run side by side.
    """

    def __init__(self, runtime: Runtime, copies: int, function: Callable[..., Any] | None = None) -> None:
        if copies < 1:
            raise ArgumentError(f"copies={copies}: a program needs at least one")
        self._runtime = runtime
        self._function = function
        self._lock = threading.Lock()
        self._bodies: list[_Body] = []
        self._known: OrderedDict[Any, _Resolved] = OrderedDict()
        self._known_bytes = 0
        self._copies = [_Copy() for _ in range(copies)]
        self._turn = 0
        self._interrupted = False  # a call was, and may be under way
        self._epoch = 0
        self._parts: list[tuple[int, int]] = []
        weakref.finalize(self, runtime._tables.give, self._parts).atexit = False

    # --- recording ---

    def _begin(self, trace: Trace) -> None:
        """The recording is over: plan it for the shapes that it was made with."""
        views = [self._example(trace, argument) for argument in trace.arguments]
        key = _key(views)
        self._bodies.append(_Body(trace, key))
        self._resolve(key, views)

    @staticmethod
    def _example(trace: Trace, argument: int) -> Any:
        if argument < 0:
            return trace.numbers[-1 - argument]
        root = trace.roots[argument]
        count = int(np.prod(root.shape, dtype=np.int64))
        walk = _same_walk(root.shape, root.strides, _contiguous_strides(root.shape))
        return ArrayView(
            root.address,
            root.shape,
            root.strides,
            root.dtype,
            root.readonly,
            root.array,
            count,
            walk,
            root.stream,
        )

    @property
    def _body(self) -> _Body:
        if not self._bodies:
            raise ArgumentError("the program is still being recorded: call it after the `with` block")
        return self._bodies[0]

    # --- a call ---

    def __call__(
        self, *arguments: Any, out: Any = None, after: Any = None, timeout_s: float | None = None
    ) -> Ticket:
        """Enqueue everything as one task.

        Args:
            arguments: arrays and numbers in place of those that were recorded, of the same dtypes; shapes may
                be others. None at all where the recording was made with `record`: the same arrays again.
            out: for what the recorded function returned, arrays to write: C-contiguous, one or a tuple; None
                allocates them.
            after, timeout_s: as in `Runtime.submit`. A call of the same copy comes before.

        Returns:
            A Ticket whose result is what the recorded function returned: an array, a tuple, or None.

        Raises:
            ArgumentError, DTypeError, DeviceError: before anything is enqueued.
            QueueFull, ClosedError: as in `Runtime.submit`.
        """
        runtime, trace = self._runtime, self._body.trace
        runtime._check_open()
        if runtime._recorders and threading.get_ident() in runtime._recorders:
            raise ArgumentError("a program inside a recording: call its function instead")
        if self._interrupted:
            # A call was interrupted that may be under way, and nobody has its ticket: its memory is in use.
            runtime._drain()
            self._interrupted = False
        if after is None and timeout_s is None:
            with self._lock:
                ticket = self._again(arguments, out)
            if ticket is not None:
                return ticket
        views = self._views(trace, arguments)
        key = _key(views)
        resolved = self._known.get(key)
        if resolved is None:
            with self._lock:
                resolved = self._resolve(key, views)
        trace = resolved.body.trace
        results, handed = self._results(resolved, views, out)
        arrays = {
            number: view for number, view in zip(trace.arguments, views, strict=True) if number >= 0
        } | results
        owners = [view.owner for view in arrays.values()]
        if runtime._settle:
            streams = [view.stream for view in arrays.values() if view.stream is not None]
            runtime._streams.settle(owners, streams, timeout_s)
        with self._lock:
            copy = self._copies[self._turn]
            ticket = self._send(resolved, arrays, handed, owners, after, timeout_s)
            self._remember(copy, resolved, arguments, out)
        return ticket

    def _views(self, trace: Trace, arguments: Sequence[Any]) -> list[Any]:
        """Arguments as views and numbers, checked against those that were recorded."""
        if not arguments and self._function is None:
            return [self._example(trace, argument) for argument in trace.arguments]
        if len(arguments) != len(trace.arguments):
            raise ArgumentError(
                f"the program takes {len(trace.arguments)} argument(s), {len(arguments)} given: pass one for "
                "each that was recorded"
            )
        view = self._runtime._machine.view
        views: list[Any] = []
        seen: dict[int, tuple[int, ArrayView]] = {}
        for at, (root, argument) in enumerate(zip(trace.arguments, arguments, strict=True)):
            if root < 0:
                number = argument.item() if isinstance(argument, np.generic) else argument
                if not isinstance(number, bool | int | float):
                    raise ArgumentError(
                        f"arguments[{at}] is a {type(argument).__name__}, recorded was a number: pass a "
                        "number"
                    )
                views.append(number)
                continue
            each = view(argument, f"arguments[{at}]")
            recorded = trace.roots[root]
            if each.dtype != recorded.dtype:
                raise DTypeError(
                    f"arguments[{at}] has dtype {DTYPE_NAMES[each.dtype]}, the program was recorded with "
                    f"{DTYPE_NAMES[recorded.dtype]}: convert it, or record another program"
                )
            if each.readonly and root in self._body.written:
                raise ArgumentError(f"arguments[{at}] is read-only, and the program writes it: pass a copy")
            before = seen.setdefault(root, (at, each))
            if before[1][:3] != each[:3]:
                raise ArgumentError(
                    f"arguments[{at}] and arguments[{before[0]}] were one array when the program was "
                    "recorded: "
                    "pass the same array twice, or record it with two"
                )
            views.append(each)
        return views

    def _results(
        self, resolved: _Resolved, views: Sequence[Any], out: Any
    ) -> tuple[dict[int, ArrayView], Any]:
        """Arrays for what the program gives, and what the ticket hands out."""
        trace, machine = resolved.body.trace, self._runtime._machine
        roots = list(resolved.outputs)
        views_of: dict[int, ArrayView] = {}
        arrays: dict[int, Any] = {}
        if out is not None:
            wanted = [output for output in trace.outputs if output.root in resolved.outputs]
            outs = list(out) if isinstance(out, list | tuple) else [out]
            if len(outs) != len(wanted) or any(output.recipe != WHOLE for output in wanted):
                raise ArgumentError(
                    f"out has {len(outs)} array(s): the program makes {len(wanted)} result(s), and those "
                    "that "
                    "are views of a result cannot be given; pass one array for each, or none"
                )
            for at, (output, array) in enumerate(zip(wanted, outs, strict=True)):
                name = "out" if len(outs) == 1 else f"out[{at}]"
                target = machine.view(array, name)
                shape, dtype = resolved.outputs[output.root]
                if target.dtype != dtype:
                    raise DTypeError(
                        f"{name} has dtype {DTYPE_NAMES[target.dtype]}, the program gives "
                        f"{DTYPE_NAMES[dtype]}: "
                        "pass an array of that dtype, or none"
                    )
                if target.shape != shape or not target.contiguous:
                    raise ArgumentError(
                        f"{name} has shape {target.shape}, the program gives {shape}, C-contiguous: pass "
                        "such an "
                        "array, or none"
                    )
                validate_output(target, [], False, name)
                views_of[output.root], arrays[output.root] = target, array
        elif roots:
            like = self._like(trace, views)
            from .host.arrays import empty_like_on

            for root in roots:
                shape, dtype = resolved.outputs[root]
                arrays[root] = empty_like_on(self._runtime.machine, like, shape, dtype)
                views_of[root] = machine.view(arrays[root], "a result")
        handed: list[Any] = []
        for output in trace.outputs:
            if output.root < 0:
                handed.append(output.array)
            elif output.root in arrays:
                handed.append(apply(arrays[output.root], output.recipe, output.indices))
            else:
                at = trace.arguments.index(output.root)
                handed.append(apply(views[at].owner, output.recipe, output.indices))
        if resolved.body.trace.single:
            return views_of, handed[0]
        return views_of, (tuple(handed) if handed else None)

    @staticmethod
    def _like(trace: Trace, views: Sequence[Any]) -> Any:
        for view in views:
            if isinstance(view, ArrayView):
                return view.owner
        for root in trace.roots:
            if root.array is not None:
                return root.array
        raise ArgumentError("the program has no array to allocate results like: pass out=")

    def _send(
        self,
        resolved: _Resolved,
        arrays: dict[int, ArrayView],
        handed: Any,
        owners: list[Any],
        after: Any,
        timeout_s: float | None,
    ) -> Ticket:
        runtime, layout = self._runtime, resolved.layout
        copy = self._copies[self._turn]
        self._prepare_arena(copy, resolved)
        if layout not in copy.done:
            done = runtime._machine.upload(bytes(8 * layout.runs_count))
            copy.done[layout] = done, runtime._machine.view(done, "done words").address
        if resolved.walks:
            with runtime._layouts.using(len(resolved.walks)):
                if resolved.epoch != runtime._layouts.epoch:
                    for group, walks in resolved.walks:
                        runtime._intern(resolved.groups[group]["words"].view(np.uint16)[44:50], walks)
                    resolved.epoch = runtime._layouts.epoch
                    resolved.version += 1
                return self._enqueue(copy, resolved, arrays, handed, owners, after, timeout_s)
        return self._enqueue(copy, resolved, arrays, handed, owners, after, timeout_s)

    def _accesses(self, resolved: _Resolved, arrays: dict[int, ArrayView]) -> np.ndarray[Any, Any]:
        """What a call touches, for the order of tasks: where that is too much to tell one by one, all that
        lies between what it reads, and if need be between what it writes."""
        body = resolved.body
        parts: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for number in resolved.layout.based:
            view = arrays[number] if number in arrays else self._example(body.trace, number)
            if view.count:
                parts[number in body.written].append(byte_range(view))
        reads, writes = parts
        if len(reads) + len(writes) > MOST_RANGES and reads:
            reads = [(min(low for low, _ in reads), max(high for _, high in reads))]
        if len(reads) + len(writes) > MOST_RANGES:
            writes = [(min(low for low, _ in writes), max(high for _, high in writes))]
        return np.frombuffer(pack_ranges(reads, writes), ACCESS).copy()

    def _enqueue(
        self,
        copy: _Copy,
        resolved: _Resolved,
        arrays: dict[int, ArrayView],
        handed: Any,
        owners: list[Any],
        after: Any,
        timeout_s: float | None,
    ) -> Ticket:
        layout = resolved.layout
        addresses = tuple(view.address for view in arrays.values())
        content = (id(resolved), resolved.version, copy.arena_address, addresses)
        table, size = self._table(copy, resolved, content, arrays)
        words = table.task_words
        words[FLAGS_WORD] = int(Flag.PROGRAM) << 32
        words[TILES_WORD] = 1 | layout.runs_count << 32
        words[POINTERS_WORD : POINTERS_WORD + MAX_INPUTS] = (*layout.addresses, table.address)
        words[POINTERS_WORD + MAX_INPUTS : POINTERS_WORD + FIFTH] = copy.done[layout][1], table.source
        words[BYTES_WORD : BYTES_WORD + 2] = size, 8 * layout.groups_at
        owners = [*owners, self, resolved, table, copy.arena, copy.done[layout]]
        ticket = self._put(copy, table, handed, owners, after, timeout_s)
        # Only now: a call that was refused has changed nothing that the next one relies on.
        table.content = content
        table.groups = id(resolved), resolved.version
        words[BYTES_WORD] = 0  # the table is there for the calls that follow
        return ticket

    def _put(
        self, copy: _Copy, table: _Table, handed: Any, owners: list[Any], after: Any, timeout_s: float | None
    ) -> Ticket:
        """Enqueue the call that a table's task says."""
        try:
            return self._put_now(copy, table, handed, owners, after, timeout_s)
        except (QueueFull, ArgumentError):  # nothing was enqueued
            raise
        except BaseException:
            self._interrupted = True
            raise

    def _put_now(
        self, copy: _Copy, table: _Table, handed: Any, owners: list[Any], after: Any, timeout_s: float | None
    ) -> Ticket:
        table.task_words[EPOCH_WORD] = self._epoch = self._epoch + 1
        ticket = None
        if after is None and timeout_s is None:
            waits = 0
            if copy.ticket is not None:  # done or not: the device finds out faster
                copy.waits.fill(copy.ticket.position)
                waits = copy.waits_address
            ticket = self._runtime._send_known(
                "program", table.task_address, table.touched, waits, owners, handed
            )
        if ticket is None:
            tickets = [] if after is None else [after] if isinstance(after, Ticket) else list(after)
            if copy.ticket is not None:
                tickets.append(copy.ticket)
            ticket = self._runtime._send(
                table.task, "program", handed, owners, False, tickets, timeout_s, table.accesses
            )
        table.ticket = copy.ticket = ticket
        copy.last_table = table
        self._turn = (self._turn + 1) % len(self._copies)
        return ticket

    # --- the same arrays again ---

    def _again(self, arguments: tuple[Any, ...], out: Any) -> Ticket | None:
        """The short way of a call with the very arrays of one before. None where anything is new."""
        copy = self._copies[self._turn]
        outs = () if out is None else tuple(out) if isinstance(out, list | tuple) else (out,)
        given = (*arguments, *outs)
        recent = copy.recent.get(tuple(map(id, given)))
        if recent is None or recent.table.content != recent.content:
            return None
        for each, known in zip(given, recent.known, strict=True):
            reference, address, shape, strides = known
            if reference() is not each or each.shape != shape:
                return None
            if hasattr(each, "data_ptr"):
                if each.data_ptr() != address or each.stride() != strides:
                    return None
            elif each.ctypes.data != address or each.strides != strides:
                return None
        if self._runtime._settle:
            self._runtime._streams.settle(list(given), [], None)
        handed = None if out is None else out if recent.single else outs
        return self._put(copy, recent.table, handed, [given, *recent.owners], None, None)

    def _remember(self, copy: _Copy, resolved: _Resolved, arguments: tuple[Any, ...], out: Any) -> None:
        """Let the next call with these arrays take the short way, if there is one for them."""
        trace, table = resolved.body.trace, copy.last_table
        outs = () if out is None else tuple(out) if isinstance(out, list | tuple) else (out,)
        given = (*arguments, *outs)
        if table is None or resolved.walks or len(trace.outputs) != len(outs):
            return
        if min(trace.arguments, default=0) < 0:
            return
        known = []
        for each in given:
            if type(each) is np.ndarray:
                known.append((weakref.ref(each), each.ctypes.data, each.shape, each.strides))
            elif hasattr(each, "data_ptr"):
                known.append((weakref.ref(each), each.data_ptr(), each.shape, each.stride()))
            else:
                return
        owners = [self, resolved, table, copy.arena, copy.done[resolved.layout]]
        entry = _Recent(table, table.content, known, owners, trace.single)
        copy.recent[tuple(map(id, given))] = entry
        while len(copy.recent) > RECENT:
            copy.recent.popitem(last=False)

    def _prepare_arena(self, copy: _Copy, resolved: _Resolved) -> None:
        if copy.arena_bytes < resolved.arena:
            size = max(resolved.arena, 2 * copy.arena_bytes)
            arena = self._runtime._machine.allocate(size)
            copy.arena, copy.arena_bytes = arena, size
            copy.arena_address = self._runtime._machine.view(arena, "the arena").address

    def _table(
        self, copy: _Copy, resolved: _Resolved, content: Any, arrays: dict[int, ArrayView]
    ) -> tuple[_Table, int]:
        """A table that says what this call needs, and how much of it the pump must bring."""
        layout = resolved.layout
        tables = copy.tables.setdefault(layout, [])
        for table in tables:
            if table.content == content:
                return table, 0
        self._check_overlap(resolved, arrays)
        bases = self._bases(copy, resolved, arrays)
        chosen = next((t for t in tables if t.ticket is None or t.ticket.done), None)
        if chosen is None and len(tables) < SLOTS:
            chosen = self._new_table(layout)
            if chosen is not None:
                tables.append(chosen)
        if chosen is None:
            if not tables:
                self._forget(layout)
                chosen = self._new_table(layout)
                if chosen is None:
                    raise ArgumentError(
                        f"the table of this program takes {8 * layout.table_words} bytes, for which there "
                        "is no "
                        "room: drop programs that are not needed, or record it in parts"
                    )
                tables.append(chosen)
            else:
                chosen = tables[0]
                assert chosen.ticket is not None
                chosen.ticket.wait()
        tables.remove(chosen)
        tables.append(chosen)  # the one used longest ago comes first
        chosen.content = None
        chosen.words[: layout.places] = bases
        chosen.accesses = self._accesses(resolved, arrays)
        chosen.touched = int(chosen.accesses.ctypes.data)
        if chosen.groups == (id(resolved), resolved.version):
            return chosen, -(-8 * layout.places // 16) * 16
        chosen.groups = None
        chosen.words[layout.groups_at : layout.table_words] = resolved.groups.view(np.uint64)
        return chosen, 8 * layout.table_words

    def _new_table(self, layout: _Layout) -> _Table | None:
        runtime = self._runtime
        taken = runtime._tables.take(layout.table_words)
        if taken is None:
            return None
        words, source, part = taken
        self._parts.append(part)
        memory = runtime._machine.allocate(8 * layout.table_words)
        return _Table(words, source, memory, runtime._machine.view(memory, "a table").address)

    def _forget(self, kept: _Layout) -> None:
        """Let go of the tables of all other layouts."""
        for copy in self._copies:
            if copy.ticket is not None:
                copy.ticket.wait()
            for layout in list(copy.tables):
                if layout is not kept:
                    del copy.tables[layout]
        if not any(copy.tables.get(kept) for copy in self._copies):
            self._runtime._tables.give(self._parts)

    def _bases(self, copy: _Copy, resolved: _Resolved, arrays: dict[int, ArrayView]) -> np.ndarray[Any, Any]:
        layout, roots = resolved.layout, resolved.body.trace.roots
        bases = np.zeros(layout.places, np.uint64)
        for at, root in enumerate(layout.based, 1):
            view = arrays.get(root)
            bases[at] = roots[root].address if view is None else view.address
        first = layout.first_pool
        bases[first : first + len(resolved.pool_at)] = resolved.pool_at + np.uint64(copy.arena_address)
        for extra, base, indices, group, pointer in layout.extras:
            steps = np.array(resolved.steps[group, pointer], np.int64)
            bases[extra] = bases[base] + (indices @ steps).astype(np.uint64)
        return bases

    def _check_overlap(self, resolved: _Resolved, arrays: dict[int, ArrayView]) -> None:
        """Arrays that were separate when the program was recorded are separate still, where one is
        written."""
        body = resolved.body
        spans: list[tuple[int, int, int, ArrayView]] = []
        for number in resolved.layout.based:
            view = arrays[number] if number in arrays else self._example(body.trace, number)
            if view.count:
                spans.append((*byte_range(view), number, view))
        spans.sort(key=lambda span: span[:3])
        for at, (_, high, number, view) in enumerate(spans):
            for low, _, other, another in spans[at + 1 :]:
                if low >= high:
                    break
                if (number in body.written or other in body.written) and overlap(view, another) != "none":
                    names = [self._name(body.trace, each) for each in sorted((number, other))]
                    raise ArgumentError(
                        f"{names[0]} and {names[1]} overlap, and the program writes one of them: it was "
                        "recorded "
                        "with separate arrays; pass a copy, or record it with arrays that overlap"
                    )

    @staticmethod
    def _name(trace: Trace, root: int) -> str:
        if root in trace.arguments:
            return f"arguments[{trace.arguments.index(root)}]"
        return "a result" if trace.roots[root].kind == "result" else "an array that was captured"

    # --- shapes ---

    def _resolve(self, key: Any, views: Sequence[Any]) -> _Resolved:
        """Plan the program for shapes that have not come before, or not lately."""
        found = self._known.get(key)
        if found is not None:
            return found
        body = next((each for each in self._bodies if each.key == key), None)
        again = self._function is not None
        if body is None and not (again and self._bodies[0].trace.looked):
            body = self._bodies[0]
            again = again and bool(self._known)
        if body is None:
            resolved = self._record_again(key, views)
        else:
            try:
                resolved = self._plan(body, views)
            except ArgumentError:
                if body.key == key or not again:
                    raise
                resolved = self._record_again(key, views)
        self._known[key] = resolved
        self._known_bytes += resolved.groups.nbytes
        while len(self._known) > 1 and (
            len(self._known) > REMEMBERED or self._known_bytes > REMEMBERED_BYTES
        ):
            self._known_bytes -= self._known.popitem(last=False)[1].groups.nbytes
        return resolved

    def _record_again(self, key: Any, views: Sequence[Any]) -> _Resolved:
        assert self._function is not None
        body = _Body(record_function(self._runtime, self._function, views), key)
        resolved = self._plan(body, views)
        self._bodies[1:] = [*self._bodies[1:][-15:], body]
        return resolved

    def _plan(self, body: _Body, views: Sequence[Any]) -> _Resolved:
        """Raises what submitting the calls one by one would."""
        while True:
            blocks = self._runtime._machine.max_workers
            try:
                while True:
                    shapes, plans = _Planner(self._runtime, body, views, blocks).run()
                    tiled = sum(
                        (plan.tiles + plan.merge) * len(group.calls)
                        for (plan, *_), group in zip(plans, body.grouping.groups, strict=True)
                        if plan.tiles > 1
                    )
                    if blocks == 1 or tiled <= self._runtime.config.capacity * 3 // 4:
                        return self._resolved(body, shapes, plans)
                    blocks //= 2
            except _Inconsistent:
                example = _propagate(self._runtime, body, views)
                body.grouping = _Grouping(body.trace, [*body.grouping.examples, example])

    def _resolved(self, body: _Body, shapes: dict[int, Layout], plans: list[Any]) -> _Resolved:
        runtime, grouping, trace = self._runtime, body.grouping, body.trace
        chosen = [plan for plan, *_ in plans]
        key = tuple((plan.tiles, plan.merge, plan.workspace > 0) for plan in chosen)
        layout = grouping.layouts.get(key)
        if layout is None:
            layout = _Layout(
                trace, grouping, chosen, runtime._machine.max_workers,
                min(runtime.config.capacity, (1 << 16) - 1),
            )  # fmt: skip
            layout.upload(runtime._machine)
            grouping.layouts[key] = layout
        at, pool_at, pool_bytes = 0, [], []
        for (kind, whose), slots in zip(layout.pools, layout.pool_slots, strict=True):
            if kind == "class":
                size = math.prod(shapes[whose][0]) * ITEMSIZE[grouping.dtypes[whose]]
            else:
                size = chosen[whose].workspace
            size = -(-max(1, size) // LINE) * LINE
            pool_at.append(at)
            pool_bytes.append(size)
            at += size * slots
        packed: list[bytes] = []
        steps: dict[tuple[int, int], list[int]] = {}
        walks = []
        for number, (plan, dtypes, followed, numbers) in enumerate(plans):
            pointers = dict(followed)
            if plan.workspace:
                pointers[WORKSPACE] = (Followed((), (), 0, (), ()), DType.U8)
            addresses = [0] * POINTERS
            for pointer, word in numbers.items():
                addresses[pointer] = word
            strides = [0] * (2 * POINTERS)
            for pointer, (found, dtype) in pointers.items():
                size = ITEMSIZE[dtype]
                addresses[pointer] = (found.offset * size) & WORD
                pool = layout.pool_of[number, pointer]
                every = [0 if pool < 0 else pool_bytes[pool], *(step * size for step in found.steps)]
                steps[number, pointer] = every
                for column, which in enumerate(layout.columns[number, pointer]):
                    strides[2 * pointer + column] = every[which + 1] & WORD
            flags = (Flag.STRIDED if plan.walks else 0) | (Flag.MERGE if plan.merge else 0)
            scalars = plan.scalars.ljust(SCALAR_BYTES, b"\0")
            if FIFTH in pointers:
                scalars = scalars[:FIFTH_INPUT] + addresses[FIFTH].to_bytes(8, "little")
            head = (plan.op_id, int(flags), 1, plan.tiles, *addresses[:FIFTH], plan.count)
            packed.append(_HEAD.pack(*head, 0, 0, *[0] * 6, dtypes, scalars))
            packed.append(_STEPS.pack(*strides))
            if plan.walks:
                walks.append((number, plan.walks))
        groups = np.frombuffer(b"".join(packed), PROGRAM_GROUP).copy()
        outputs = {
            root: (shapes[grouping.class_of[root]][0], trace.roots[root].dtype) for root in body.results
        }
        return _Resolved(
            body, layout, groups, walks, np.array(pool_at, np.uint64), pool_bytes, at, outputs, steps
        )

    # --- for people ---

    def describe(self) -> str:
        """Its arguments, groups, runs with what they wait for, and the arena, as text."""
        resolved = next(reversed(self._known.values()))
        body, layout = resolved.body, resolved.layout
        trace, made = body.trace, layout.schedule
        lines = [
            f"program of {len(trace.calls)} tasks in {len(body.grouping.groups)} groups and "
            f"{len(made.runs)} runs; "
            f"{len(trace.arguments)} arguments, {len(trace.outputs)} results, "
            f"{sum(root.kind == 'constant' for root in trace.roots)} captured arrays",
            f"arena: {resolved.arena} bytes in {sum(layout.pool_slots)} places for "
            f"{len(layout.slots)} temporaries; table: {8 * layout.table_words} bytes",
        ]
        for number, run in enumerate(made.runs):
            if number >= 200:
                lines.append(f"  ... and {len(made.runs) - 200} more runs")
                break
            names = [trace.calls[step].operator.name for step in run.steps]
            shown = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
            tile = f", tile {run.tile}" if layout.schedule.runs and len(run.steps) == 1 and run.tile else ""
            waits = ", ".join(
                f"{first}" if count == 1 else f"{first} to {first + count - 1}" for first, count in run.waits
            )
            lines.append(
                f"  run {number}, level {made.levels[run.unit]}: {shown}{tile}"
                + (f"; after {waits}" if waits else "")
            )
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """Draw runs as boxes, a column a level, and what they wait for as lines. Returns matplotlib's
        axes."""
        from matplotlib import pyplot as plt

        resolved = next(reversed(self._known.values()))
        made, trace = resolved.layout.schedule, resolved.body.trace
        if axes is None:
            axes = plt.subplots(figsize=(9, 5), layout="constrained")[1]
        rows: dict[int, int] = {}
        where = []
        for run in made.runs:
            level = made.levels[run.unit]
            rows[level] = rows.get(level, 0) + 1
            where.append((level, -rows[level]))
        for number, run in enumerate(made.runs):
            for first, count in run.waits:
                for lower in range(first, first + count):
                    xs, ys = zip(where[lower], where[number], strict=True)
                    axes.plot(xs, ys, color="0.7", linewidth=0.6, zorder=1)
        sizes = [20 + 8 * len(run.steps) for run in made.runs]
        axes.scatter(*zip(*where, strict=True), s=sizes, zorder=2)
        if len(made.runs) <= 40:
            for (x, y), run in zip(where, made.runs, strict=True):
                names = [trace.calls[step].operator.name for step in run.steps]
                label = " ".join(names[:3]) + (f" +{len(names) - 3}" if len(names) > 3 else "")
                axes.annotate(label, (x, y), xytext=(6, 4), textcoords="offset points", fontsize="x-small")
        axes.set(xlabel="level", yticks=[], title=f"{len(trace.calls)} tasks in {len(made.runs)} runs")
        return axes

    def __repr__(self) -> str:
        if not self._bodies:
            return "<Program, being recorded>"
        return f"<Program of {len(self._bodies[0].trace.calls)} tasks>"


class _Planner:
    """Plans of all groups for given arguments: one call stands for its group."""

    def __init__(self, runtime: Runtime, body: _Body, views: Sequence[Any], blocks: int) -> None:
        self._runtime, self._body, self._views, self._blocks = runtime, body, views, blocks
        trace, class_of = body.trace, body.grouping.class_of
        self.shapes: dict[int, Layout] = {}
        self.numbers = [view for view in views if not isinstance(view, ArrayView)]
        for number, layout in _given(trace, views).items():
            if self.shapes.setdefault(class_of[number], layout) != layout:
                raise _Inconsistent

    def run(self) -> tuple[dict[int, Layout], list[Any]]:
        """(shape and strides of each class, (plan, dtypes, followed operands, numbers) of each group)."""
        return self.shapes, [self._group(group) for group in self._body.grouping.groups]

    def _group(self, group: _Group) -> Any:
        trace, class_of = self._body.trace, self._body.grouping.class_of
        call = trace.calls[group.calls[0]]
        followed: dict[int, tuple[Followed, DType]] = {}

        def view(each: Operand, pointer: int, name: str) -> Planned:
            found = follow(each.ref.recipe, *self.shapes[class_of[each.ref.root]])
            for index, limit in zip(group.places[pointer].most, found.limits, strict=True):
                if index >= limit:
                    raise ArgumentError(
                        f"{call.operator.name}: {name} was recorded at index {index}, of which the new "
                        "shape has "
                        f"{limit}"
                    )
            followed[pointer] = found, each.dtype
            return _planned(found, each.dtype)

        def read(at: int, each: Any) -> Planned | None:
            return _operand(each, self.numbers, lambda one: view(one, _pointer(at), f"inputs[{at}]"))

        operands = tuple(read(at, each) for at, each in enumerate(call.inputs))
        items = _items(call, self.numbers)
        outs: dict[int, Planned] = {}

        def target(at: int) -> Planned:
            return view(call.outputs[at], MAX_INPUTS + at, f"out[{at}]")

        results = _results(call, operands, items, lambda at: outs.setdefault(at, target(at)), self._set)
        if group.entangled:
            self._check_entangled(group)
        plan, dtypes = plan_call(call.operator, operands, results, self._blocks, items)
        assert plan is not None  # what was recorded is whole
        plan = plan._replace(tiles=min(max(1, plan.tiles), self._runtime.config.capacity))
        self._runtime._checker.prepare(plan.op_id)
        numbers = {}
        for at, each in enumerate(call.inputs):
            value = self.numbers[each.number] if isinstance(each, SymbolicNumber) else each
            if isinstance(value, bool | int | float):
                numbers[_pointer(at)] = immediate(value, plan.number, call.operator.name)
        for at, each in enumerate(call.outputs):
            followed.setdefault(
                MAX_INPUTS + at,
                (follow(each.ref.recipe, *self.shapes[class_of[each.ref.root]]), each.dtype),
            )
        return plan, dtypes, followed, numbers

    def _set(self, operand: Operand, shape: Shape) -> None:
        layout = (shape, _contiguous_strides(shape))
        number = self._body.grouping.class_of[operand.ref.root]
        if self.shapes.setdefault(number, layout) != layout:
            raise _Inconsistent

    def _check_entangled(self, group: _Group) -> None:
        """An output and an input in one root, elsewhere: under these shapes too they must not overlap."""
        trace, class_of = self._body.trace, self._body.grouping.class_of

        def seen(each: Operand) -> ArrayView:
            found = follow(each.ref.recipe, *self.shapes[class_of[each.ref.root]])
            offset = found.offset + sum(i * s for i, s in zip(each.ref.indices, found.steps, strict=True))
            count = int(np.prod(found.shape, dtype=np.int64))
            walk = _same_walk(found.shape, found.strides, _contiguous_strides(found.shape))
            address = (1 << 40) + offset * ITEMSIZE[each.dtype]
            return ArrayView(address, found.shape, found.strides, each.dtype, False, None, count, walk)

        for number in group.calls:
            call = trace.calls[number]
            for out in call.outputs:
                for at, each in enumerate(call.inputs):
                    if isinstance(each, Operand) and each.ref.root == out.ref.root:
                        name = f"inputs[{at - len(call.operator.leading)}]"
                        validate_output(seen(out), [seen(each)], at in call.operator.same_ok, "out", [name])


def _pointer(place: int) -> int:
    return FIFTH if place == MAX_INPUTS else place


def _planned(found: Followed, dtype: DType) -> Planned:
    contiguous = _same_walk(found.shape, found.strides, _contiguous_strides(found.shape))
    return Planned(dtype, found.shape, found.strides, contiguous)


def _operand(each: Any, numbers: Sequence[Any], view: Callable[[Operand], Planned]) -> Planned | None:
    if isinstance(each, Operand):
        return view(each)
    value = numbers[each.number] if isinstance(each, SymbolicNumber) else each
    if value is None:
        return None
    dtype = DType.BOOL if isinstance(value, bool) else DType.I64 if isinstance(value, int) else DType.F32
    return Planned(dtype, (), (), True, True)


def _items(call: Any, numbers: Sequence[Any]) -> tuple[Any, ...]:
    given = {
        name: numbers[value.number] if isinstance(value, SymbolicNumber) else value
        for name, value in call.parameters.items()
    }
    return tuple(call.operator.read_parameters(given).items())


def _results(
    call: Any,
    operands: tuple[Any, ...],
    items: tuple[Any, ...],
    target: Callable[[int], Planned],
    make: Callable[[Operand, Shape], None],
) -> tuple[Planned, ...]:
    """The outputs as planning sees them: new ones are made, given ones are checked."""
    operator = call.operator
    if operator.like_out or operator.updates or not call.outputs:
        return tuple(target(at) for at in range(len(call.outputs)))
    wanted = infer(operator, operands, items)
    results = []
    for at, ((shape, dtype), new) in enumerate(zip(wanted, call.made, strict=True)):
        if new:
            if dtype != call.outputs[at].dtype:
                raise DTypeError(
                    f"{operator.name} gives {DTYPE_NAMES[dtype]} for these arguments, not as recorded"
                )
            make(call.outputs[at], shape)
            results.append(Planned(dtype, shape, _contiguous_strides(shape), True))
            continue
        out = target(at)
        check_output(operator, out, shape, dtype, "out", "pass an argument of that {}")
        results.append(out)
    return tuple(results)


def _given(trace: Trace, views: Sequence[Any]) -> dict[int, Layout]:
    """Shape and strides of each root that is there before a call."""
    layouts = {root.number: (root.shape, root.strides) for root in trace.roots if root.kind == "constant"}
    for number, view in zip(trace.arguments, views, strict=True):
        if number >= 0:
            strides = _contiguous_strides(view.shape) if view.contiguous else view.strides
            layouts[number] = view.shape, strides
    return layouts


def _seen_output(call: Any, view: Callable[[Operand], Planned], at: int) -> Planned:
    return view(call.outputs[at])


def _propagate(runtime: Runtime, body: _Body, views: Sequence[Any]) -> list[Layout]:
    """Shapes of all roots, call by call: where groups were found not to hold."""
    trace = body.trace
    layouts = _given(trace, views)
    numbers = [view for view in views if not isinstance(view, ArrayView)]

    def view(each: Operand) -> Planned:
        return _planned(follow(each.ref.recipe, *layouts[each.ref.root]), each.dtype)

    def make(each: Operand, shape: Shape) -> None:
        layouts[each.ref.root] = shape, _contiguous_strides(shape)

    for call in trace.calls:
        operands = tuple(_operand(each, numbers, view) for each in call.inputs)
        seen = partial(_seen_output, call, view)
        _results(call, operands, _items(call, numbers), seen, make)
    return [layouts[root.number] for root in trace.roots]


def _key(views: Sequence[Any]) -> Any:
    """What plans depend on."""
    return tuple(
        (view.shape, view.strides, view.contiguous)
        if isinstance(view, ArrayView)
        else (type(view), repr(view))
        for view in views
    )


__all__ = ["Program", "TableSpace"]
