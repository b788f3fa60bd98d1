"""The model machine: the protocol's own bodies, run one shared-memory operation at a time.

Each block and each producer thread is an *actor*. A body runs until it reaches an operation on shared memory,
where it hands the operation out instead of doing it; given the operation's result it runs to the next
one. So a body becomes a finite automaton, `Local`: its nodes are the places between operations, found by
re-running the real Python function from its beginning with the results that led there, and told apart by
the call stack (code, instruction, live locals) and the block's scratch. The global state is then one flat
tuple of integers (memory, knowledge, the node of each actor, the ghost state that the properties need),
which can be copied, hashed and explored.

Two kinds of shared words:
- *atomic* words (stamps, claimed, retired, done words, queue, tickets, parked, ...): each operation on one
  that another actor also uses is a scheduling point;
- *data* (descriptors, results, the pump's words between launches): no scheduling points. Instead every
  access must be ordered after the accesses it conflicts with by release and acquire alone ("knowledge"
  below), so that a missing release, acquire or fence is a violation even in an interleaving in which
  nothing went wrong, and the interleaving of data accesses cannot matter.

With `store_buffers`, a store to an atomic word may also stay unseen by others until later: past later
loads, and past later stores to other words unless a release or fence forbids it. Only fence_sc and
read-modify-writes wait for the actor's earlier stores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from gpuos_numba.descriptor import MASK_64, TASK_BYTES, TASK_WORDS, Flag, Status, offset
from gpuos_numba.protocol import (
    CONTEXT,
    DEVICE_STATE,
    HELD,
    HOST_CONTEXT,
    HOST_CONTROL,
    HOST_LAUNCH,
    HOST_STATE,
    HOST_WORDS,
    LAP_SHIFT,
    SCRATCH_META,
    SCRATCH_TASKS,
    SCRATCH_TURNS,
    TILE_SHIFT,
    TURN,
    WINDOW,
    field,
)

from . import bodies

LOAD, STORE, ADD, MAX, CAS, FENCE, FENCE_SC, DISPATCH, OBSERVE, LAUNCH, GATE, NOW, POSITION = range(13)
NAMES = [
    "load",
    "store",
    "add",
    "max",
    "cas",
    "fence",
    "fence_sc",
    "dispatch",
    "observe",
    "launch",
    "gate",
    "now",
    "position",
]
LAUNCH_AT = 0x5000000
RELAXED, ORDERED, PLAIN = 0, 1, 2  # ORDERED: an acquire load, a release store, an acquire-release update
ORDERS = ("relaxed", "ordered", "plain")

SCRATCH_BASE = 1 << 40
PRIVATE_BASE = 1 << 41
TURNS = SCRATCH_BASE + SCRATCH_TURNS
IDLE_NS, JUMP_NS = 5, 6
TIMES = frozenset({"now", "started", "active", "alive"})
UNCOUNTED = frozenset(
    {"spins", "turn"}
)  # only decides how politely to poll, and time-outs, which the model never lets expire
FAILING_OP = 7
FAILING_STATUS = int(Status.INDEX_OUT_OF_RANGE)


class Violation(Exception):
    """A property of the protocol does not hold in a reachable state."""


class Blunder(Exception):
    """A body does what no body may: touches memory that nobody owns, mixes u64 with something else, ..."""


class Restart(Exception):
    """An actor touches a word that it was not known to touch: explore again, knowing it."""


class U64(int):
    """An unsigned 64-bit integer that wraps. Mixed with a plain integer, Numba would promote it: an error."""

    __slots__ = ()


def _operator(name: str) -> Callable[[U64, U64], U64]:
    plain = getattr(int, name)
    new = int.__new__

    def apply(self: U64, other: U64) -> U64:
        if type(other) is not U64:
            raise Blunder(f"u64 {name} {type(other).__name__}: wrap constants in m.u64")
        return new(U64, plain(self, other) & MASK_64)

    return apply


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift", "floordiv", "mod"):
    setattr(U64, f"__{_name}__", _operator(f"__{_name}__"))


class Pending(BaseException):
    """The body reached an operation whose result is not known yet."""

    def __init__(self, op: tuple[Any, ...], key: Any) -> None:
        self.op, self.key = op, key


@dataclass(slots=True)
class Local:
    """A place in a body between two operations. `op` is None where the body has returned."""

    number: int
    op: tuple[Any, ...] | None
    entry: int
    history: tuple[Any, ...]
    edges: dict[Any, Local] = dataclass_field(default_factory=dict)


@dataclass(frozen=True)
class TaskSpec:
    """What a producer submits: `after` names tasks by number, which must have been submitted before."""

    fails: bool = False
    after: tuple[int, ...] = ()
    tiles: int = 1
    held: bool = False  # withheld until a stream opens it; number 0, and what it does is nothing


@dataclass(frozen=True)
class Scenario:
    """Who runs, and what they do. `producers[i]` is the list of batches, each a list of task numbers."""

    tasks: tuple[TaskSpec, ...]
    producers: tuple[tuple[tuple[int, ...], ...], ...]
    capacity: int = 2
    workers: int = 2
    start: int = 0
    first_item: int = 0
    idle: bool = True  # the pump's clock always jumps past the idle limit: it parks whenever it may
    lease: bool = False  # the lease may end at any turn
    leases: int = 1  # of so many launches
    waits: bool = True  # producers wait for their tasks and look at the result; else they submit and leave
    polls: bool = False  # as `waits`, but what the first look finds counts
    keeper: bool = False
    looker: bool = False
    stream: bool = False  # opens the withheld task at any moment after it was claimed
    watch: bool = True  # somebody watches meanwhile
    spare: bool = False  # one more host thread queues a launch at any moment
    counts_late: bool = False  # a mutation of the model's host: it launches, then counts the launch
    park_request: bool = False  # one more host thread asks the first launch to park
    served: bool = False  # two abstract servers instead of launches: the host's half of the ring alone
    launched: bool = True  # one launch is already running
    store_buffers: bool = False
    late_start: bool = True  # a worker's first look at the cursor may come at any later time
    most_launches: int = 8
    producer: str = "producer"


class Machine:
    """A scenario, the bodies it runs, and the meaning of every operation on the flat state."""

    def __init__(self, scenario: Scenario, *mutations: bodies.Mutation, all_steps: bool = False) -> None:
        self.scenario = scenario
        self.mutations = mutations
        self.n = len(scenario.tasks)
        self._address_map()
        # Which actors load and store each atomic cell, as far as known. A step that no living actor's later
        # steps conflict with need not be interleaved with anything.
        self.loaders, self.storers = [0] * self.cells, [0] * self.cells
        self.grown = False
        self.forced: set[int] = set()
        self._primitives()
        self._actors()
        self._layout_state()
        if all_steps:
            self.forced = {cell for cell in range(self.cells) if not self.is_data[cell]}

    # ------------------------------------------------------------------ memory

    def _address_map(self) -> None:
        capacity, start = self.scenario.capacity, self.scenario.start
        self.names: list[str] = []
        self.initial: list[int] = []
        self.is_data: list[bool] = []
        self.cell_at: dict[int, tuple[int, int]] = {}  # address -> (cell, word of a descriptor or -1)
        self.constant: dict[int, U64] = {}
        self.sinks: set[int] = set()
        self.loose: set[int] = set()  # atomic cells that bodies also touch with plain accesses
        self.monitors: dict[int, Callable[..., None]] = {}
        self.slots: list[tuple[int, ...]] = [(0,) * TASK_WORDS]  # descriptors by content
        self.slot_number: dict[tuple[int, ...], int] = {self.slots[0]: 0}
        self.slot_writes: dict[tuple[int, int, int], int] = {}

        def cell(name: str, address: int, initial: int = 0, data: bool = False) -> int:
            self.names.append(name)
            self.initial.append(initial & MASK_64)
            self.is_data.append(data)
            self.cell_at[address] = (len(self.names) - 1, -1)
            return len(self.names) - 1

        def descriptor_slot(name: str, address: int) -> int:
            number = cell(name, address, data=True)
            for word in range(TASK_WORDS):
                self.cell_at[address + 8 * word] = (number, word)
            return number

        regions = iter(range(0x10000, 0x1000000, 0x10000))
        at = {name: next(regions) for name in CONTEXT.names or ()}  # type: ignore[call-overload]
        words, failures, context, host, launch_lock = (next(regions) for _ in range(5))
        self.context, self.host, self.launch_lock = U64(context), U64(host), U64(launch_lock)
        self.stamps_at, self.host_done_at = U64(at["stamps"]), U64(at["host_done"])
        self.host_ring_at = U64(at["host_ring"])
        before = [
            start - capacity + ((slot - start) % capacity) for slot in range(capacity)
        ]  # one lap earlier
        self.host_slot = [
            descriptor_slot(f"host_ring[{i}]", at["host_ring"] + i * TASK_BYTES) for i in range(capacity)
        ]
        self.device_slot = [
            descriptor_slot(f"device_ring[{i}]", at["device_ring"] + i * TASK_BYTES) for i in range(capacity)
        ]
        for i in range(capacity):
            stamp = cell(f"stamps[{i}]", at["stamps"] + 8 * i, before[i] + 1)
            self.monitors[stamp] = self._on_stamp
            done = cell(f"host_done[{i}]", at["host_done"] + 8 * i, (before[i] + 1) << 8)
            self.monitors[done] = self._on_done
            done = cell(f"device_done[{i}]", at["device_done"] + 8 * i, (before[i] + 1) << 8)
            self.monitors[done] = self._on_done
            cell(f"item_ends[{i}]", at["item_ends"] + 8 * i, data=True)
            cell(f"tile_counts[{i}]", at["tile_counts"] + 8 * i)
            cell(f"tile_status[{i}]", at["tile_status"] + 8 * i)
        self.queue: list[int] = []
        for i in range(2 * capacity):
            self.queue.append(cell(f"queue[{i}]", at["queue"] + 8 * i))
            self.monitors[self.queue[i]] = self._on_entry
        for name in DEVICE_STATE.names or ():
            initial = {
                "tickets": self.scenario.first_item,
                "items": self.scenario.first_item,
                "cursor": start,
            }
            number = cell(
                f"device.{name}",
                at["device_state"] + field(DEVICE_STATE, name),
                initial.get(name, 0),
                data=name in ("items", "launches", "layouts"),
            )
            if name == "cursor":
                self.cursor = number
                self.loose.add(number)
        for name in HOST_STATE.names or ():
            address = at["host_state"] + field(HOST_STATE, name)
            if name == "parked":
                self.parked = cell("parked", address)
            elif name == "ingested" and self.scenario.stream:
                cell("ingested", address, start)
            else:
                self.sinks.add(address)
        for word in range(HOST_CONTROL.itemsize // 8):
            self.constant[at["host_control"] + 8 * word] = U64(0)
        for name in HOST_CONTROL.names or ():
            address = at["host_control"] + field(HOST_CONTROL, name)
            if name == "park_request":
                del self.constant[address]
                cell("park_request", address)
                self.park_request = U64(address)
            else:
                values = {
                    "idle_ns": IDLE_NS if self.scenario.idle else 0,
                    "lease_ns": IDLE_NS if self.scenario.lease else 0,
                    "hold_ns": IDLE_NS,
                }
                self.constant[address] = U64(values.get(name, 0))
        for name in HOST_WORDS.names or ():
            initial = {
                "claimed": start,
                "retired": start,
                "watched": start,
                "enqueued": int(self.scenario.launched or self.scenario.served),
            }
            number = cell(name, words + field(HOST_WORDS, name), initial.get(name, 0))
            if name == "failures":
                self.loose.add(number)
            if name == "retired":
                self.retired, self.monitors[number] = number, self._on_retired
            if name == "claimed":
                self.claimed, self.monitors[number] = number, self._on_claimed
            if name in ("claimed", "retired", "enqueued", "watched"):
                setattr(self, f"{name}_at", U64(words + field(HOST_WORDS, name)))
            if name == "enqueued":
                self.enqueued = U64(words + field(HOST_WORDS, name))
        cell("launch_lock", launch_lock)
        for i in range(4):
            cell(f"log[{i}].position", failures + 16 * i, data=True)
            cell(f"log[{i}].status", failures + 16 * i + 8, data=True)
        self.results = [cell(f"result of task {i}", 0x2000000 + 8 * i, data=True) for i in range(self.n)]
        for i in range(16):
            self.sinks.update((at["worker_states"] + 16 * i, at["worker_states"] + 16 * i + 8))

        for name in CONTEXT.names or ():
            value = {"mask": capacity - 1, "table": 0, "table_length": 0, "trace": 0, "trace_mask": 0}.get(
                name, at[name]
            )
            self.constant[context + field(CONTEXT, name)] = U64(value)
        for name in HOST_CONTEXT.names or ():
            value = {
                "ring": at["host_ring"],
                "stamps": at["stamps"],
                "done": at["host_done"],
                "state": at["host_state"],
                "words": words,
                "failures": failures,
                "control": at["host_control"],
                "launch": LAUNCH_AT,
                "mask": capacity - 1,
                "max_run": 256,
            }[name]
            self.constant[host + field(HOST_CONTEXT, name)] = U64(value)
        # Nothing but Python launches here.
        self.constant[U64(LAUNCH_AT + field(HOST_LAUNCH, "call"))] = U64(0)
        # The tasks as their producer prepares them: constant, private to the producer.
        self.task_at = U64(0x3000000)
        for number, task in enumerate(self.scenario.tasks):
            for word, value in enumerate(self.task_words(number, task)):
                self.constant[self.task_at + U64(number * TASK_BYTES + 8 * word)] = U64(value)
        self.cells = len(self.names)
        for number, name in enumerate(self.names):
            setattr(self, f"cell_{name.replace('.', '_')}", number) if "[" not in name else None

    @staticmethod
    def task_words(number: int, task: TaskSpec) -> list[int]:
        """A descriptor of which every word tells the task, so that a torn one shows."""
        if task.held:
            assert number == 0
            return [0, 1 << 32, *[0] * (TASK_WORDS - 2)]
        words = [0xAA00_0000 + 0x100 * word + number for word in range(TASK_WORDS)]
        words[0] = FAILING_OP if task.fails else 1
        words[1] = task.tiles << 32
        words[offset("after") // 8] = words[offset("after") // 8 + 1] = 0
        return words

    # ------------------------------------------------------------------ running bodies

    def _primitives(self) -> None:
        """The `Primitives`. They answer from `self._history` and stop the body where it ends."""
        machine = self
        self._history: tuple[Any, ...] = ()
        self._used = 0
        self._clock = 0
        self._scratch: dict[int, int] = {}
        self._private: dict[int, int] = {}
        u64, zero = U64, U64(0)

        def op(*operation: Any) -> Any:
            used = machine._used
            if used < len(machine._history):
                machine._used = used + 1
                return machine._history[used]
            raise Pending(operation, machine._local_key(sys._getframe(2)))

        def load(address: U64, order: int) -> U64:
            found = machine.constant.get(address)
            if found is not None:
                return found
            try:
                cell, word = machine.cell_at[address]
            except KeyError:
                raise Blunder(f"load from {int(address):#x}") from None
            return op(LOAD, cell, word, order)

        def store(address: U64, value: U64, order: int) -> None:
            if type(value) is not U64:
                raise Blunder(f"store of {type(value).__name__}")
            if address in machine.sinks:
                return
            try:
                cell, word = machine.cell_at[address]
            except KeyError:
                raise Blunder(f"store to {int(address):#x}") from None
            op(STORE, cell, word, order, value)

        def own(address: U64) -> dict[int, int] | None:
            if address >= PRIVATE_BASE:
                return machine._private
            return machine._scratch if address >= SCRATCH_BASE else None

        def load_u64(address: U64) -> U64:
            memory = own(address)
            if memory is None:
                return load(address, PLAIN)
            return u64(memory[address])

        def store_u64(address: U64, value: U64) -> None:
            memory = own(address)
            if memory is None:
                store(address, value, PLAIN)
            elif type(value) is not U64:
                raise Blunder(f"store of {type(value).__name__}")
            else:
                memory[address] = int(value)

        def load_u32(address: U64) -> U64:
            return u64(machine._scratch[int(address) & ~7] >> (32 if int(address) & 4 else 0) & 0xFFFFFFFF)

        def put_u32(address: U64, value: U64) -> None:
            old = machine._scratch.get(int(address) & ~7, 0)
            shift = 32 if int(address) & 4 else 0
            machine._scratch[int(address) & ~7] = (
                old & ~(0xFFFFFFFF << shift) | (int(value) & 0xFFFFFFFF) << shift
            )

        def store_u32(address: U64, value: U64) -> None:
            put_u32(address, value)
            if 0 <= int(address) - TURNS < 3 * TURN.itemsize and value == WINDOW:
                # The pump resets a record at the end of its turn: the window has been handed out.
                for stale in [
                    a for a in machine._scratch if 0 <= int(a) - SCRATCH_BASE - SCRATCH_META < 8 * WINDOW
                ]:
                    del machine._scratch[stale]

        def shared_min_u32(address: U64, value: U64) -> U64:
            old = load_u32(address)
            put_u32(address, u64(min(old, value)))
            return old

        def shared_max_u32(address: U64, value: U64) -> U64:
            old = load_u32(address)
            put_u32(address, u64(max(old, value)))
            return old

        def load_pair(address: U64, order: int = RELAXED) -> tuple[U64, U64]:
            low = load(address, order)
            machine._held = low  # part of the place between the two loads
            high = load(address + u64(8), order)
            machine._held = zero
            return low, high

        def copy_async(target: U64, source: U64) -> None:
            low, high = load_pair(source, PLAIN)
            machine._scratch[target] = int(low)
            machine._scratch[target + u64(8)] = int(high)

        def store_pair(address: U64, low: U64, high: U64) -> None:
            store(address, low, PLAIN)
            store(address + u64(8), high, PLAIN)

        def atomic_add_gpu(address: U64, value: U64) -> U64:
            if machine.cell_at[address][0] == machine.cell_device_tickets:  # type: ignore[attr-defined]
                # A worker between items: what it staged for the last one must not be read again.
                for stale in [
                    a for a in machine._scratch if 0 <= int(a) - SCRATCH_BASE - SCRATCH_TASKS < 2 * TASK_BYTES
                ]:
                    del machine._scratch[stale]
            return op(ADD, machine.cell_at[address][0], -1, ORDERED, value)

        def now_ns() -> U64:
            if machine.scenario.lease:
                machine._clock += int(op(NOW))
            elif machine.scenario.idle:
                machine._clock += JUMP_NS
            return u64(machine._clock)

        def dispatch(context: U64, op_id: U64, task: U64, tile: U64, arena: U64) -> Any:
            words = tuple(machine._scratch[task + u64(8 * i)] for i in range(TASK_WORDS))
            return op(DISPATCH, -1, -1, 0, words, int(tile))

        class Model:
            """The `Primitives` of the model machine."""

        m: Any = Model()
        m.u64, m.device = u64, lambda body: body
        m.thread_index, m.block_width = (lambda: zero), (lambda: u64(1))
        m.barrier = m.copy_wait = lambda: None
        m.fence_acq_rel_gpu = m.fence_acq_rel_sys = lambda: op(FENCE, -1, -1, ORDERED)
        m.fence_sc_sys = lambda: op(FENCE_SC, -1, -1, ORDERED)
        for scope in ("gpu", "sys"):
            setattr(m, f"load_relaxed_{scope}", lambda address: load(address, RELAXED))
            setattr(m, f"load_acquire_{scope}", lambda address: load(address, ORDERED))
            setattr(m, f"store_relaxed_{scope}", lambda address, value: store(address, value, RELAXED))
            setattr(m, f"store_release_{scope}", lambda address, value: store(address, value, ORDERED))
        m.load_pair_relaxed_sys, m.store_pair = load_pair, store_pair
        m.atomic_add_gpu = atomic_add_gpu
        m.atomic_max_gpu = lambda address, value: op(MAX, machine.cell_at[address][0], -1, RELAXED, value)
        m.compare_and_swap = lambda address, expected, desired: op(
            CAS, machine.cell_at[address][0], -1, ORDERED, expected, desired
        )
        m.load_u64, m.store_u64, m.load_u32, m.store_u32 = load_u64, store_u64, load_u32, store_u32
        m.load_task_u64 = load_u64
        m.load_task_pair = lambda address: (load_u64(address), load_u64(address + u64(8)))
        m.shared_min_u32, m.shared_max_u32 = shared_min_u32, shared_max_u32
        m.copy_async, m.now_ns, m.dispatch = copy_async, now_ns, dispatch
        m.is_plain, m.run_plain = (lambda op_id: False), (lambda scratch, position: position)
        m.divide = lambda a, b: a // b
        m.call_launch = m.sleep_us = None
        m.pause = lambda spins: None
        # For the host threads of the model only:
        m.observe = lambda position, status: op(OBSERVE, -1, -1, 0, int(position), int(status))
        m.launch = lambda: op(LAUNCH, -1, -1, 0)
        m.gate = lambda name: op(GATE, -1, -1, 0, name)
        m.position_of = lambda task: op(POSITION, -1, -1, 0, task)
        m.forget = lambda: machine._private.clear()
        m.private, m.scratch = u64(PRIVATE_BASE), u64(SCRATCH_BASE + SCRATCH_TASKS)
        self.m = m

    def _local_key(self, frame: Any) -> Any:
        """What tells this place in a body from others."""
        frames = []
        scratch = self._scratch
        turn = 0  # the pump's records, used in turn: places that differ in which is next are the same place
        pump = frame
        while pump is not None and pump.f_code is not _run_code:
            if pump.f_code.co_name == "pump":
                turn = int(pump.f_locals.get("turn", 0))
            pump = pump.f_back

        def rotated(address: int) -> int:
            place = int(address) - TURNS
            if not 0 <= place < 3 * TURN.itemsize:
                return int(address)
            return TURNS + (place - turn * TURN.itemsize) % (3 * TURN.itemsize)

        if turn:
            scratch = {rotated(address): word for address, word in scratch.items()}
        while frame is not None:
            code = frame.f_code
            if bodies.is_body(code.co_filename):
                values = frame.f_locals
                kept = []
                for name in bodies.live_locals(code, frame.f_lasti):
                    if name in TIMES and name in values:
                        kept.append(min(self._clock - int(values[name]), JUMP_NS))
                    elif name in ("record", "fresh"):
                        kept.append(rotated(values[name]))
                    elif name not in UNCOUNTED and name in values:
                        kept.append(values[name])
                frames.append((code.co_name, frame.f_lasti, tuple(kept)))
            elif code is _run_code:
                break
            frame = frame.f_back
        return (
            tuple(frames),
            self._held,
            tuple(sorted(scratch.items())),
            tuple(sorted(self._private.items())),
        )

    def _run(self, entry: int, history: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, Any]:
        """Run a body from its beginning through `history`: its next operation, and the key of the place."""
        self._history, self._used, self._clock = history, 0, 0
        self._scratch, self._private, self._held = {}, {}, U64(0)
        body, arguments = self.entries[entry]
        try:
            body(*arguments)
        except Pending as pending:
            return pending.op, pending.key
        return None, "returned"

    def _node(self, entry: int, history: tuple[Any, ...]) -> Local:
        op, key = self._run(entry, history)
        node = self.node_of.get((entry, op, key))
        if node is None:
            node = Local(len(self.nodes), op, entry, history)
            self.nodes.append(node)
            self.node_of[(entry, op, key)] = node
        return node

    def follow(self, node: Local, result: Any) -> Local:
        try:
            return node.edges[result]
        except KeyError:
            found = node.edges[result] = self._node(node.entry, (*node.history, result))
            return found

    # ------------------------------------------------------------------ actors

    def _actors(self) -> None:
        scenario, m = self.scenario, self.m
        self.modules = bodies.load(*self.mutations)
        pump = self.modules["device.pump"].make_pump(m)
        worker = self.modules["device.worker"].make_worker(m)
        from . import threads

        workers, scratch = U64(scenario.workers), U64(SCRATCH_BASE)
        self.entries: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (pump, (self.context, workers, scratch))
        ]
        self.actor_names = ["pump"]
        for block in range(1, scenario.workers + 1):
            self.entries.append((worker, (self.context, U64(block), workers, scratch)))
            self.actor_names.append(f"worker {block}")
        self.first_host = len(self.entries)
        host = self.modules["host.ring"]
        for i, batches in enumerate(scenario.producers):
            body = getattr(threads, f"make_{scenario.producer}")(m, host, self)
            self.entries.append((body, (self.host, batches)))
            self.actor_names.append(f"producer {i + 1}")
        for first in range(2 if scenario.served else 0):
            self.entries.append((threads.make_server(m, host, self), (self.host, U64(first))))
            self.actor_names.append(f"server {first + 1}")
        if scenario.park_request:
            self.entries.append((threads.make_parker(m, host, self), (self.host,)))
            self.actor_names.append("parker")
        if scenario.stream:
            self.entries.append((threads.make_stream(m, host, self), (self.host,)))
            self.actor_names.append("stream")
            if scenario.watch:
                self.entries.append((threads.make_watcher(m, host, self), (self.host,)))
                self.actor_names.append("watcher")
        if scenario.spare:
            self.entries.append((threads.make_spare(m, host, self), (self.host,)))
            self.actor_names.append("spare")
        if scenario.looker:
            self.entries.append((threads.make_looker(m, host, self), (self.host,)))
            self.actor_names.append("looker")
        if scenario.keeper:
            self.entries.append((threads.make_keeper(m, host, self), (self.host,)))
            self.actor_names.append("keeper")
        self.actors = len(self.entries)
        # What one of a kind touches, its like will touch too.
        kinds = [name.split()[0] for name in self.actor_names]
        self.kin = [sum(1 << i for i, other in enumerate(kinds) if other == kind) for kind in kinds]
        self.nodes: list[Local] = []
        self.node_of: dict[Any, Local] = {}
        self.first_node = [self._node(self.entry_of(actor), ()) for actor in range(self.actors)]

    def entry_of(self, actor: int) -> int:
        """Workers are alike: one automaton serves them all."""
        return 1 if 1 <= actor < self.first_host else actor

    # ------------------------------------------------------------------ the state

    def _layout_state(self) -> None:
        cells, actors = self.cells, self.actors
        data = [cell for cell in range(cells) if self.is_data[cell]]
        # Knowledge: a bit for "the latest write of this data cell", one an actor for "its latest read of it".
        self.bit = {cell: number * (actors + 1) for number, cell in enumerate(data)}
        self.bits = {cell: ((1 << (actors + 1)) - 1) << self.bit[cell] for cell in data}
        self.worker_bits = (
            sum(1 << (self.bit[cell] + 2) for cell in data),
            sum(1 << (self.bit[cell] + 3) for cell in data),
        )
        at = cells
        self.message = [-1] * cells  # where the state keeps what an acquire of an atomic cell teaches
        self.MESSAGES = at
        for cell in range(cells):
            if not self.is_data[cell]:
                self.message[cell] = at
                at += 1
        self.KNOWN, at = at, at + actors
        self.FENCED, at = at, at + actors  # known at the last fence: what a relaxed store passes on
        self.HEARD, at = at, at + actors  # heard by relaxed loads: known after the next fence
        self.HAPPENED, at = at, at + 1  # accesses since which nothing has overwritten the cell
        self.STREAM, at = at, at + 1  # what the next launch knows
        self.MASKS = range(self.MESSAGES, at)
        self.NODE, at = at, at + actors
        self.QUEUED, at = at, at + 1  # launches that wait in the stream
        self.RUNNING, at = at, at + 1  # blocks of the launch in the stream's front that have not left
        self.LAUNCHES, at = at, at + 1
        self.ORDER, at = at, at + self.n  # number of the task at start + i, -1 while it has none
        self.PUBLISHED, at = at, at + self.n  # the descriptor published there
        self.RAN, at = at, at + self.n  # bit mask of tiles run
        self.HANDED, at = at, at + 1  # last hand-out: (position - start) << 16 | tile, -1 before the first
        self.BUFFER, at = at, at + actors  # store buffers
        self.size = at

    def start_state(self) -> tuple[Any, ...]:
        s: list[Any] = [0] * self.size
        s[: self.cells] = self.initial
        s[self.NODE : self.NODE + self.actors] = [-1] * self.actors
        s[self.ORDER : self.ORDER + self.n] = [-1] * self.n
        s[self.HANDED] = -1
        s[self.BUFFER : self.BUFFER + self.actors] = [()] * self.actors
        for actor in range(self.first_host, self.actors):
            s[self.NODE + actor] = self.first_node[actor].number
        if self.scenario.launched and not self.scenario.served:
            s[self.QUEUED] = 1
        for actor in range(self.first_host, self.actors):
            self._settle(s, actor)
        if self.scenario.launched and not self.scenario.served:
            self._begin(s)
        return tuple(s)

    def _begin(self, s: list[Any]) -> None:
        """The stream starts its next launch, if its front is free."""
        if s[self.RUNNING] or not s[self.QUEUED]:
            return
        s[self.QUEUED] -= 1
        s[self.LAUNCHES] += 1
        s[self.RUNNING] = self.first_host
        for actor in range(self.first_host):
            s[self.KNOWN + actor] = s[self.FENCED + actor] = s[self.STREAM]
            s[self.HEARD + actor] = 0
            s[self.NODE + actor] = self.first_node[actor].number
        for actor in range(self.first_host):
            self._settle(s, actor)

    def _settle(self, s: list[Any], actor: int) -> None:
        """Let an actor run up to its next scheduling point."""
        node = self.nodes[s[self.NODE + actor]]
        self._last_data = NO_CELL
        taken, others = 0, -1
        while node.op is not None:
            if others < 0:
                others = self._alive(s, actor)
            if self.is_step(node.op, others):
                s[self.NODE + actor] = node.number
                return
            taken += 1
            if taken > 3000 and node.op[1] >= 0 and not self.is_data[node.op[1]]:
                self.forced.add(node.op[1])  # it polls a word, and nobody is known yet to store it
                raise Restart
            if taken > 10_000:
                raise Blunder(f"{self.actor_names[actor]} goes on for ever by itself")
            if node.op[0] == LAUNCH:
                others = -1  # look again who lives
            node = self.follow(node, self.execute(s, actor, node.op))
        s[self.NODE + actor] = -1
        if actor < self.first_host:
            while s[self.BUFFER + actor]:  # a launch's end is visible to all that follows
                self._drain(s, actor, 0)
            s[self.STREAM] |= s[self.KNOWN + actor]
            s[self.RUNNING] -= 1
            self._begin(s)

    def is_step(self, op: tuple[Any, ...], others: int) -> bool:
        """Whether the others that still live may act before this operation, because it makes a difference."""
        kind = op[0]
        if kind in (LOAD, STORE, ADD, MAX, CAS):
            cell = op[1]
            if self.is_data[cell] or (cell == self.cursor and not self.scenario.late_start):
                return False
            if cell in self.forced:
                return True
            if kind == LOAD:
                return self.storers[cell] & others != 0
            return (self.loaders[cell] & others) != 0 or (
                self.loaders[cell] != 0 and self.storers[cell] & others != 0
            )
        return kind in (GATE, NOW) or (kind in (FENCE_SC, LAUNCH) and self.scenario.store_buffers)

    def canonical(self, s: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same for two states that differ only in which of the (first two) workers is which."""
        if self.first_host < 3 or s[self.NODE + 1] <= s[self.NODE + 2]:
            return s
        swapped = list(s)
        first, second = self.worker_bits
        both = first | second
        for i in self.MASKS:
            mask = s[i]
            if mask & both:
                swapped[i] = mask & ~both | (mask & first) << 1 | (mask & second) >> 1
        for at in (self.NODE, self.KNOWN, self.FENCED, self.HEARD, self.BUFFER):
            swapped[at + 1], swapped[at + 2] = swapped[at + 2], swapped[at + 1]
        return tuple(swapped)

    def begin(self) -> None:
        """Before each exploration: what it learns about who touches what makes the last one incomplete."""
        if self.grown:
            self.forced.clear()
        self.grown = False

    def _alive(self, s: Any, actor: int) -> int:
        """The other actors that may still act before this one is through, as bits."""
        alive = 0
        for other in range(self.first_host, self.actors):
            if s[self.NODE + other] != -1 or s[self.BUFFER + other]:
                alive |= 1 << other
        if actor >= self.first_host:
            # Launches to come count, if there may be any.
            if s[self.RUNNING] or s[self.QUEUED] or alive:
                alive |= (1 << self.first_host) - 1
        else:
            for other in range(self.first_host):
                if s[self.NODE + other] != -1:
                    alive |= 1 << other
        return alive & ~(1 << actor)

    def enabled(self, s: tuple[Any, ...]) -> Iterator[tuple[int, Any]]:
        """The moves possible in a state: (actor, choice)."""
        for actor in range(self.actors):
            number = s[self.NODE + actor]
            if self.scenario.store_buffers:
                yield from ((actor, ("drain", i)) for i in self._drainable(s[self.BUFFER + actor]))
            if number < 0:
                continue
            kind = self.nodes[number].op[0]  # type: ignore[index]
            if kind == NOW:
                yield actor, U64(0)
                if s[self.LAUNCHES] <= self.scenario.leases:
                    yield actor, U64(JUMP_NS)
            elif kind in (FENCE_SC, LAUNCH, ADD, MAX, CAS) and s[self.BUFFER + actor]:
                continue
            elif kind != GATE or self.nodes[number].op[4] == 0:  # type: ignore[index]
                yield actor, None

    def move(self, state: tuple[Any, ...], actor: int, choice: Any = None) -> tuple[Any, ...]:
        """The state after one step of an actor."""
        s = list(state)
        if type(choice) is tuple:
            self._drain(s, actor, choice[1])
        else:
            node = self.nodes[s[self.NODE + actor]]
            result = choice if node.op[0] in (NOW, GATE) else self.execute(s, actor, node.op)  # type: ignore[index]
            s[self.NODE + actor] = self.follow(node, result).number
            self._settle(s, actor)
        return tuple(s)

    # ------------------------------------------------------------------ what operations do

    def execute(self, s: list[Any], actor: int, op: tuple[Any, ...]) -> Any:
        kind, cell, word, order = op[0], op[1], op[2], op[3] if len(op) > 3 else 0
        if cell >= 0:
            if self.is_data[cell]:
                return self._data(s, actor, kind, cell, word, op)
            self._last_data = NO_CELL
            if order == PLAIN and cell not in self.loose:
                raise Violation(f"plain access to the shared word {self.names[cell]}")
            self._touch(actor, kind, cell)
            if kind == LOAD:
                buffered = s[self.BUFFER + actor]
                if buffered:
                    for entry in reversed(buffered):
                        if entry[0] == cell:
                            return U64(entry[1])
                s[self.HEARD + actor] |= s[self.message[cell]]
                if order == ORDERED:
                    s[self.KNOWN + actor] |= s[self.message[cell]]
                return U64(s[cell])
            if kind == STORE:
                message = s[self.KNOWN + actor] if order == ORDERED else s[self.FENCED + actor]
                if self.scenario.store_buffers and self.loaders[cell]:
                    if cell in self.queue:
                        self._on_entry(s, actor, cell, int(op[4]))
                    # (cell, value, message, does it wait for the older ones)
                    s[self.BUFFER + actor] += ((cell, int(op[4]), message, order == ORDERED),)
                    return None
                self._write(s, actor, cell, op[4], message)
                return None
            old = s[cell]
            if kind == CAS:
                if old != op[4]:
                    s[self.KNOWN + actor] |= s[self.message[cell]]
                    return U64(0)
                value, answer = op[5], U64(1)
            elif kind == ADD:
                value, answer = op[4] + U64(old), U64(old)
            else:
                value, answer = U64(max(op[4], old)), U64(old)
            s[self.HEARD + actor] |= s[self.message[cell]]
            if order == ORDERED:
                s[self.KNOWN + actor] |= s[self.message[cell]]
                s[self.message[cell]] |= s[self.KNOWN + actor]
            else:
                s[self.message[cell]] |= s[self.FENCED + actor]
            self._write(s, actor, cell, value, s[self.message[cell]])
            return answer
        self._last_data = NO_CELL
        if kind in (FENCE, FENCE_SC):
            s[self.KNOWN + actor] |= s[self.HEARD + actor]
            s[self.FENCED + actor] = s[self.KNOWN + actor]
            buffered = s[self.BUFFER + actor]
            if buffered and buffered[-1] != FENCE_MARK:
                s[self.BUFFER + actor] = (*buffered, FENCE_MARK)
            return None
        if kind == DISPATCH:
            return self._on_dispatch(s, actor, op[4], op[5])
        if kind == OBSERVE:
            return self._on_observe(s, actor, op[4], op[5])
        if kind == POSITION:
            return U64(self.scenario.start + self.order(s).index(op[4]))
        if kind == LAUNCH:
            if s[self.LAUNCHES] + s[self.QUEUED] >= self.scenario.most_launches:
                raise Violation("launches without end")
            s[self.QUEUED] += 1
            s[self.STREAM] |= s[self.KNOWN + actor]
            self._begin(s)
            return None
        raise AssertionError(NAMES[kind])

    def _write(self, s: list[Any], actor: int, cell: int, value: int, message: int) -> None:
        monitor = self.monitors.get(cell)
        if monitor is not None and not (
            cell in self.queue and self.scenario.store_buffers and self.loaders[cell]
        ):
            monitor(s, actor, cell, int(value))
        s[cell] = int(value)
        s[self.message[cell]] = message

    def _touch(self, actor: int, kind: int, cell: int) -> None:
        one = self.kin[actor]
        if kind != STORE and self.loaders[cell] & one != one:
            self.loaders[cell] |= one
            self.grown = True
        if kind != LOAD and self.storers[cell] & one != one:
            self.storers[cell] |= one
            self.grown = True

    def _data(self, s: list[Any], actor: int, kind: int, cell: int, word: int, op: tuple[Any, ...]) -> Any:
        """A data access: it must know of every access that it conflicts with."""
        if kind == LOAD:
            if self._last_data != cell:
                self._last_data = cell
                self._read_data(s, actor, cell)
            return U64(s[cell] if word < 0 else self.slots[s[cell]][word])
        if kind != STORE:
            raise Violation(f"{NAMES[kind]} of {self.names[cell]}")
        if self._last_data != ~cell:
            self._last_data = ~cell
            self._write_data(s, actor, cell)
        s[cell] = int(op[4]) if word < 0 else self.slot_with(s[cell], word, int(op[4]))
        return None

    def _read_data(self, s: list[Any], actor: int, cell: int) -> None:
        latest = 1 << self.bit[cell]
        if s[self.HAPPENED] & latest & ~s[self.KNOWN + actor]:
            raise Violation(
                f"{self.actor_names[actor]} reads {self.names[cell]} without knowing its latest write"
            )
        mine = 1 << (self.bit[cell] + 1 + actor)
        if s[self.HAPPENED] & mine:
            self._forget(s, mine)
        s[self.HAPPENED] |= mine
        s[self.KNOWN + actor] |= mine

    def _write_data(self, s: list[Any], actor: int, cell: int) -> None:
        bits = self.bits[cell]
        if s[self.HAPPENED] & bits & ~s[self.KNOWN + actor]:
            raise Violation(
                f"{self.actor_names[actor]} overwrites {self.names[cell]} while others may use it"
            )
        self._forget(s, bits)
        s[self.HAPPENED] |= 1 << self.bit[cell]
        s[self.KNOWN + actor] |= 1 << self.bit[cell]

    def _forget(self, s: list[Any], bits: int) -> None:
        """These facts are about to mean something newer, which nobody knows yet."""
        keep = ~bits
        for i in self.MASKS:
            s[i] &= keep
        if self.scenario.store_buffers:
            for actor in range(self.actors):
                s[self.BUFFER + actor] = tuple(
                    (cell, value, message & keep, ordered)
                    for cell, value, message, ordered in s[self.BUFFER + actor]
                )

    def slot_with(self, content: int, word: int, value: int) -> int:
        key = (content, word, value)
        found = self.slot_writes.get(key)
        if found is None:
            words = list(self.slots[content])
            words[word] = value
            found = self.slot_writes[key] = self.intern(tuple(words))
        return found

    def intern(self, words: tuple[int, ...]) -> int:
        found = self.slot_number.get(words)
        if found is None:
            found = self.slot_number[words] = len(self.slots)
            self.slots.append(words)
        return found

    # ------------------------------------------------------------------ store buffers

    def _drainable(self, buffered: tuple[Any, ...]) -> Iterator[int]:
        seen: set[int] = set()
        for i, entry in enumerate(buffered):
            if entry == FENCE_MARK:
                return
            if entry[0] not in seen and (not entry[3] or not seen):
                yield i
            seen.add(entry[0])

    def _drain(self, s: list[Any], actor: int, which: int) -> None:
        buffered = s[self.BUFFER + actor]
        cell, value, message, _ = buffered[which]
        left = buffered[:which] + buffered[which + 1 :]
        while left and left[0] == FENCE_MARK:
            left = left[1:]
        s[self.BUFFER + actor] = left
        self._write(s, actor, cell, value, message)

    # ------------------------------------------------------------------ what must hold

    def _index(self, position: int) -> int:
        """position - start, of a position that tasks may have."""
        index = (position - self.scenario.start) & MASK_64
        if index >= self.n:
            raise Violation(f"position start+{index} is not a task's")
        return index

    def _on_stamp(self, s: list[Any], actor: int, cell: int, value: int) -> None:
        withheld = (value - 1 - self.scenario.start) & MASK_64 >= self.n and bool(self.scenario.stream)
        if withheld:
            value ^= HELD
        index = self._index(value - 1)
        slot = (value - 1) % self.scenario.capacity
        if self.names[cell] != f"stamps[{slot}]":
            raise Violation("a stamp in the wrong slot")
        content = s[self.host_slot[slot]]
        task = self.slots[content][TASK_WORDS - 1] & 0xFF
        if s[self.ORDER + index] != -1:
            raise Violation(f"position start+{index} is published twice")
        if self.slots[content] != tuple(self._expected(s, index, task)):
            raise Violation(f"position start+{index} is published with a wrong descriptor")
        if withheld:
            return
        s[self.ORDER + index] = task
        s[self.PUBLISHED + index] = content

    def _expected(self, s: list[Any], index: int, task: int) -> list[int]:
        """The descriptor of a task at a position, written down independently of `fill`."""
        spec = self.scenario.tasks[task]
        words = self.task_words(task, spec)
        flags = 0
        afters = [(self.scenario.start + self.order(s).index(a)) & MASK_64 for a in spec.after]
        for i, position in enumerate(afters):
            flags |= (Flag.AFTER_0, Flag.AFTER_1)[i]
            words[offset("after") // 8 + i] = position
        words[0] |= flags << 32
        words[1] |= 1
        return words

    def order(self, s: Any) -> list[int]:
        return list(s[self.ORDER : self.ORDER + self.n])

    def _all_ran(self, s: Any, index: int) -> bool:
        return bool(s[self.RAN + index] == (1 << self.tiles(s[self.ORDER + index])) - 1)

    def tiles(self, task: int) -> int:
        return max(1, self.scenario.tasks[task].tiles)

    def _on_entry(self, s: list[Any], actor: int, cell: int, value: int) -> None:
        low = (self.scenario.start & ~0xFFFFFFFF) | (value & 0xFFFFFFFF)
        index = (low - self.scenario.start) & 0xFFFFFFFF
        tile = value >> TILE_SHIFT & 0xFFFF
        if index >= self.n or s[self.ORDER + index] < 0:
            raise Violation(f"start+{index} is handed out and was never published")
        if s[self.PUBLISHED + index] != s[self.device_slot[low % self.scenario.capacity]]:
            raise Violation(f"start+{index} is handed out before its descriptor is in the device ring")
        last = s[self.HANDED]
        want = 0
        if last >= 0:
            want = (
                last + 1
                if (last & 0xFFFF) + 1 < self.tiles(s[self.ORDER + (last >> 16)])
                else ((last >> 16) + 1) << 16
            )
        if index << 16 | tile != want:
            raise Violation(
                f"hand-out is not first in, first out: {index}.{tile} instead of {want >> 16}.{want & 0xFFFF}"
            )
        old = s[cell]
        if old >> LAP_SHIFT:
            old_index = ((old & 0xFFFFFFFF) - self.scenario.start) & 0xFFFFFFFF
            if not s[self.RAN + old_index] >> (old >> TILE_SHIFT & 0xFFFF) & 1:
                raise Violation(
                    f"the queue entry of start+{old_index} is overwritten before a worker took it"
                )
        s[self.HANDED] = want

    def _on_dispatch(self, s: list[Any], actor: int, words: tuple[int, ...], tile: int) -> U64:
        task = words[TASK_WORDS - 1] & 0xFF
        order = self.order(s)
        if task not in order:
            raise Violation(f"{self.actor_names[actor]} runs a descriptor that was never published")
        index = order.index(task)
        if self.slots[s[self.PUBLISHED + index]] != words:
            raise Violation(f"{self.actor_names[actor]} runs a torn descriptor of task {task}")
        if s[self.RAN + index] >> tile & 1 or tile >= self.tiles(task):
            raise Violation(f"task {task} tile {tile} runs twice")
        for before in self.scenario.tasks[task].after:
            if not self._all_ran(s, order.index(before)):
                raise Violation(f"task {task} runs before task {before}")
            self._read_data(s, actor, self.results[before])
        s[self.RAN + index] |= 1 << tile
        if self.tiles(task) == 1:
            self._write_data(s, actor, self.results[task])
        return U64(FAILING_STATUS if self.scenario.tasks[task].fails else 0)

    def _expected_status(self, s: Any, index: int) -> int:
        return FAILING_STATUS if self.scenario.tasks[s[self.ORDER + index]].fails else 0

    def _on_done(self, s: list[Any], actor: int, cell: int, value: int) -> None:
        start = self.scenario.start
        index = self._index((start + (((value >> 8) - 1 - start) & ((1 << 56) - 1))) & MASK_64)
        if not self.names[cell].endswith(f"[{(start + index) % self.scenario.capacity}]"):
            raise Violation("a done word in the wrong slot")
        if s[self.ORDER + index] < 0 or not self._all_ran(s, index):
            raise Violation(f"start+{index} is reported done before it ran")
        if value & 0xFF != self._expected_status(s, index):
            raise Violation(f"start+{index} ends with status {value & 0xFF}")

    def _on_claimed(self, s: list[Any], actor: int, cell: int, value: int) -> None:
        if (value - s[self.retired]) & MASK_64 > self.scenario.capacity:
            raise Violation("more positions are claimed than the ring has slots")

    def _on_retired(self, s: list[Any], actor: int, cell: int, value: int) -> None:
        grown = (value - s[self.retired]) & MASK_64
        if grown >> 63:
            raise Violation("the retired watermark moves back")
        for index in range((value - self.scenario.start) & MASK_64):
            if s[self.ORDER + index] < 0 or not self._all_ran(s, index):
                raise Violation(f"start+{index} is retired before it ran")

    def _on_observe(self, s: list[Any], actor: int, position: int, status: int) -> None:
        index = self._index(position)
        if s[self.ORDER + index] < 0 or not self._all_ran(s, index):
            raise Violation(f"a ticket says that start+{index} is done before it ran")
        if status != self._expected_status(s, index):
            raise Violation(f"a ticket says that start+{index} ended with status {status}")
        self._read_data(s, actor, self.results[s[self.ORDER + index]])

    def is_good(self, s: Any) -> bool:
        """Every accepted task has completed, and every producer has come back."""
        if not all(
            s[self.NODE + a] < 0
            for a in range(self.first_host, self.first_host + len(self.scenario.producers))
        ):
            return False
        for index in range(self.n):
            if s[self.ORDER + index] < 0 or not self._all_ran(s, index):
                return False
            done = s[
                self.cell_at_name(f"host_done[{(self.scenario.start + index) % self.scenario.capacity}]")
            ]
            word = ((self.scenario.start + index + 1) << 8) & MASK_64
            if (done - word) & MASK_64 >= 1 << 63:
                return False
        return True

    def cell_at_name(self, name: str) -> int:
        if not hasattr(self, "_by_name"):
            self._by_name = {n: i for i, n in enumerate(self.names)}
        return self._by_name[name]

    def describe(self, op: tuple[Any, ...] | None) -> str:
        if op is None:
            return "return"
        where = self.names[op[1]] if len(op) > 1 and op[1] >= 0 else ""
        order = ORDERS[op[3]] if where else ""
        return " ".join(
            x for x in (NAMES[op[0]], order, where, *(str(int(v)) for v in op[4:] if isinstance(v, int))) if x
        )


NO_CELL = 1 << 30
FENCE_MARK = (-1, 0, 0, True)
_run_code = Machine._run.__code__
