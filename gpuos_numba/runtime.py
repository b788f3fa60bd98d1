"""The Runtime: arrays and an operator's name arrive, a Ticket leaves.

Everything is checked here, before anything is enqueued: what reaches the ring can run.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self, cast

import numpy as np

from .batch import Batch
from .checking import Checker, call_key, infer, planned, written
from .config import Config
from .descriptor import (
    JOIN_OP,
    LAYOUT,
    MASK_64,
    MAX_INPUTS,
    MAX_OUTPUTS,
    NOP_OP,
    TASK,
    TASK_BYTES,
)
from .device.operators import JOIN, KERNELS, PLAIN_LIMIT, TABLE, Operator
from .device.operators.table import Result, Walk, describe
from .errors import (
    ArgumentError,
    ClosedError,
    HangError,
    MachineError,
    QueueFull,
    TaskError,
    UnknownOperatorError,
    WaitTimeout,
)
from .host import calls, ring
from .host import order as ordered
from .host.arrays import ArrayView
from .host.board import Board, Figures
from .host.calls import Calls
from .host.completion import Ticket, explain
from .host.holds import Holds
from .host.lanes import Lane, Lanes
from .host.layouts import LayoutTable
from .host.lease import EXECUTORS, Keeper
from .host.order import ACCESS, LANE, Tracker, pack_access
from .host.streams import Streams
from .host.trace import RECORDS, Trace, ring_bytes
from .host.watch import Watch
from .inject import asking
from .inject.live import Injected
from .inject.operators import FAMILY as INJECTED
from .inject.publish import Publisher
from .inject.trial import Trial
from .machines.base import Machine
from .program import Program, TableSpace
from .protocol import FAILURE_SLOTS, ParkReason, WorkerState
from .recording import Recorder, Recording, record_function

_TASK = struct.Struct("<IIIIQQQQQQqQQ6HI24s")
assert _TASK.size == TASK_BYTES
_SLICE_NS: Final = 10_000_000
"""Compiled waits come back to Python this often, so that Ctrl-C is seen."""
_RANGES: Final = 256
_LOAD_S: Final = 10.0
"""For other executors to park, which loading would wait for."""
_HELD: Final = 1024
"""Notes of arrays in use, before it is looked which of them may go."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a Runtime.

    Attributes:
        submitted, completed, failed: tasks since the start.
        queue_depth: tasks claimed and not yet completed.
        ingested: tasks that the pump has taken.
        parked: nobody serves and no launch is on its way.
        park_reason: why the last launch that parked did.
        launches, relaunches: all launches; those after the first.
        workers: worker blocks of the launch that runs or ran last.
        generation: number of the operator set.
    """

    submitted: int
    completed: int
    failed: int
    queue_depth: int
    ingested: int
    parked: bool
    park_reason: str
    launches: int
    relaunches: int
    workers: int
    generation: int


class _PerThread(threading.local):
    """Memory that compiled calls read tasks from and write ranges to."""

    def __init__(self) -> None:
        self.task = np.zeros(1, TASK)
        self.access = np.zeros(1, ACCESS)
        self.lane = np.zeros(1, LANE)
        self.lane_address = int(self.lane.ctypes.data)
        self.access_address = int(self.access.ctypes.data)
        self.access_buffer = self.access.view(np.uint8).data
        self.ranges = np.zeros((_RANGES, 2), np.uint64)
        self.task_address = int(self.task.ctypes.data)
        self.ranges_address = int(self.ranges.ctypes.data)
        self.buffer = self.task.view(np.uint8).data


_OPEN: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _close_all() -> None:
    for runtime in list(_OPEN):
        runtime.close()


def _after_fork() -> None:
    for runtime in list(_OPEN):
        runtime._plain = runtime._has_plain = False  # the short ways do not ask whose process it is
        runtime._calls = runtime._put_aside = None


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _make_machine(machine: str, device: int, config: Config) -> Machine:
    if machine not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f'machine={machine!r}: choose "auto", "cpu" or "cuda"')
    if machine != "cpu":
        from .machines import cuda

        if machine == "cuda" or cuda.available():
            made = cuda.CudaMachine(config, device)
            holds = Holds(EXECUTORS.of(device))
            try:
                holds.take()
                holds.wait(_LOAD_S)  # where a task takes longer, the driver waits for the rest
                made.move_in(config)
            finally:
                holds.give_back()
            holds.serve()
            return made
    from .machines.cpu import CpuMachine

    return CpuMachine(config)


def _kernel_name(op_id: int) -> str:
    kernel = KERNELS.get(op_id)
    return f"op {op_id}" if kernel is None else kernel.name


class Runtime:
    """An executor and the ring that feeds it.

    Args:
        machine: "cuda", "cpu" (threads), or "auto": cuda where there is a GPU.
        device: which GPU.
        config: settings; single fields may be given as keywords instead.

    A sequence of calls gives what one after the other would, see `Config.order`; several threads, what the
    calls would in the order in which they were taken.

    Raises:
        ArgumentError: a setting makes no sense.
        MachineError: the machine cannot run here.
    """

    def __init__(
        self, machine: str = "auto", device: int = 0, config: Config | None = None, **settings: Any
    ) -> None:
        known = {field.name for field in dataclasses.fields(Config)}
        for name in settings:
            if name not in known:
                raise ArgumentError(f"{name}={settings[name]!r}: no such setting; known are {sorted(known)}")
        self.config = dataclasses.replace(config or Config(), **settings)
        self._pid = os.getpid()
        self._closed = False
        self._host = ring.compiled()
        self._machine = _make_machine(machine, device, self.config)
        self.machine, self.device = self._machine.name, device
        self.device_name = self._machine.device_name
        arrays = self._machine.arrays
        self._address = arrays.address
        self._words, self._state = arrays.words, arrays.state
        self._control, self._failures = arrays.control, arrays.failures
        self._start = self.config.start_position
        layouts = arrays.layouts.view(LAYOUT)
        self._layouts = LayoutTable(layouts, _weakly(self._publish_layouts), _weakly(self._drain))
        self._local = _PerThread()
        self._ordered = ordered.compiled()
        self._tracker = Tracker(self.config.capacity)
        self._tracker.serve()
        self._order = self._tracker.address
        self._tracks = self.config.order == "auto"
        self._lanes = Lanes(self.config.order == "lane", self.config.low_priority_depth)
        self._lanes.begin(self)
        self._held: deque[list[Any]] = deque()
        """What tasks under way use: [position after the last of them, arrays ...]. Appended before they are
        enqueued, so that no interrupt comes between; until they are, the position is None. Emptied where they
        were not."""
        self._tidying, self._tidy_at = threading.Lock(), _HELD
        self._reported = 0  # failures that synchronize has raised for
        self._injected = Injected()
        self._plain = self._has_plain = isinstance(getattr(self._machine, "stream_driver", None), int)
        self._overridden = False  # an operator of the table is replaced, or on trial
        self._plain_limit = PLAIN_LIMIT
        self._calls: Calls | None = None  # made when torch is there
        self._tensors: tuple[()] | tuple[type, type] = ()
        self._trace: Trace | None = None
        self._put_aside: Calls | None = None  # while a trace is taken
        self._checker = Checker(self._machine, self.config.capacity)
        self._recorders: dict[int, Recorder] = {}  # by thread: who takes its calls instead of the ring
        self._tables = TableSpace(arrays.tables, self._machine.tables_address)
        for op_id in (NOP_OP, JOIN_OP):  # what ordering puts between tasks
            self._checker.prepare(op_id)
        self._ordinal = device
        self._torch: Any = None
        self._driver = 0
        self._current_stream: Any = lambda device: 0
        self._settle = self.machine == "cuda" and self.config.input_order == "stream"
        board = Board.create()
        self._figures = Figures(board, self._machine, _weak_stats(self), _kernel_name)
        self._keeper = Keeper(self._machine, self.config, self._host, self._attend)
        watch = self._watch = Watch(self._machine, self._keeper, self._host)
        self._streams = Streams(
            self._machine,
            self._keeper,
            watch,
            self._host,
            _weakly(self._join),
            device,
            self.config.submit_timeout_s,
        )
        self._publisher = Publisher(self, self._machine, self._keeper, self._injected)
        # A forgotten Runtime: its executor must leave before its memory goes.
        parts = self._machine, self._keeper, self._publisher, watch, board, self._held
        self._finalizer = weakref.finalize(self, _shut_down, *parts, self._pid)
        self._finalizer.atexit = False
        self._keeper.start()
        _OPEN.add(self)

    # --- what a user calls ---

    def submit(
        self,
        op: str | Operator,
        inputs: Sequence[Any] = (),
        out: Any = None,
        *,
        after: Ticket | Sequence[Ticket] | None = None,
        timeout_s: float | None = None,
        **scalars: Any,
    ) -> Ticket:
        """Enqueue one task.

        Args:
            op: name of an operator, see `gpuos_numba.operators()`; or what `inject` returned.
            inputs: arrays, broadcast against each other by NumPy's rules.
            out: array of the broadcast shape to write; None allocates one like the first input.
            after: tickets of this Runtime that must complete before, besides what `Config.order` asks for.
            timeout_s: how long to wait for room in a full ring; None takes `Config.submit_timeout_s`.
            scalars: the operator's parameters.

        Raises:
            UnknownOperatorError, ArgumentError, DTypeError, DeviceError: before anything is enqueued.
            QueueFull: the ring stayed full.
            ClosedError: the Runtime is closed or belongs to another process.
        """
        if self._recorders and (recorder := self._recorders.get(threading.get_ident())) is not None:
            return cast("Ticket", recorder.submit(op, inputs, out, after, scalars))
        if after is None:
            op = self._operator(op)  # once: a trial draws who runs the task
            ticket = self._short(op, inputs, out, scalars)
            if ticket is not None:
                return ticket
        ticket = self._submit_one(op, inputs, out, after, timeout_s, scalars)
        assert ticket is not None
        return ticket

    def try_submit(
        self,
        op: str | Operator,
        inputs: Sequence[Any] = (),
        out: Any = None,
        *,
        after: Ticket | Sequence[Ticket] | None = None,
        **scalars: Any,
    ) -> Ticket | None:
        """Like `submit`, but None at once where the ring is full."""
        if self._recorders and (recorder := self._recorders.get(threading.get_ident())) is not None:
            return cast("Ticket", recorder.submit(op, inputs, out, after, scalars))
        try:
            return self._submit_one(op, inputs, out, after, 0.0, scalars)
        except QueueFull:
            return None

    def infer(self, op: str | Operator, inputs: Sequence[Any] = (), **parameters: Any) -> tuple[Result, ...]:
        """What the outputs of a call would be: (shape, dtype) each. Enqueues nothing.

        Raises:
            UnknownOperatorError, ArgumentError, DTypeError, DeviceError: as `submit` would.
        """
        operator = self._operator(op)
        sources = self._checker.sources(operator, inputs)
        items = tuple(operator.read_parameters(parameters).items())
        return infer(operator, tuple(planned(source) for source in sources), items)

    def batch(self, op: str | Operator, calls: Iterable[tuple[Sequence[Any], Any]], **scalars: Any) -> Batch:
        """Check many calls of one operator once: `calls` are (inputs, out) pairs. Enqueues nothing.

        The operator is the one of now: a batch of what was injected a moment ago keeps its interpreter, which
        is some ten times slower than the compiled body. Inject with `wait="compiled"` first.
        """
        self._check_open()
        operator = self._operator(op)
        records, outputs, owners, walks, accesses = [], [], [], [], []
        streams: set[int] = set()
        sources: dict[type, Any] = {}
        for inputs, out in calls:
            views, output, head, walk = self._checker.check(operator, inputs, out, scalars)
            records.append(_TASK.pack(*head))
            accesses.append(pack_access(views, written(operator, head)))
            outputs.append(output)
            owners.append(tuple(view.owner for view in views))
            walks.append(walk)
            sources.update({type(view.owner): view.owner for view in views})
            streams.update(view.stream for view in views if view.stream is not None)
        tasks = np.frombuffer(b"".join(records), TASK).copy()
        touched = np.frombuffer(b"".join(accesses), ACCESS).copy()
        # The operator, too: its bodies stay in every generation while somebody holds it.
        held = [(*group, operator) for group in owners]
        batch = Batch(tasks, operator.name, outputs, held, walks, touched)
        batch._streams, batch._sources = streams, sources
        return batch

    def submit_batch(
        self,
        batch: Batch,
        *,
        linked: bool = False,
        ordered: bool = True,
        after: Ticket | Sequence[Ticket] | None = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Enqueue all tasks of a batch, as calls one after another would; what each touches was found out
        when the batch was made. linked=True makes them a chain whatever they touch: each runs after the one
        before. Small tasks that depend on their neighbour run in one block.

        ordered=False saves the tenth of a microsecond a task that finding its place in the order takes: the
        caller knows that these tasks share no written memory with each other, but as linked, nor with any
        that is unfinished when they are submitted or submitted before they end.

        Raises:
            QueueFull: the ring stayed full; the message says how many tasks were enqueued before.
        """
        return self._submit_batch(batch, linked, after, timeout_s, None, ordered)

    def lane(self, name: str | None = None, priority: int = 0) -> Lane:
        """A queue whose tasks run in order, beside other lanes.

        Args:
            name: for people.
            priority: work of a lower one is held back while lanes of a higher one exist: at most
                `Config.low_priority_depth` tasks of it, and as many for each thread that submits such work,
                lie ahead of a task of this lane. Who submits more waits in the call. What is submitted
                outside any lane has priority 0.
        """
        self._check_open()
        return self._lanes.make(self, name, priority)

    def _submit_batch(
        self,
        batch: Batch,
        linked: bool,
        after: Ticket | Sequence[Ticket] | None,
        timeout_s: float | None,
        lane: Lane | None,
        ordered: bool = True,
    ) -> Ticket:
        self._check_open()
        accesses = batch.accesses if ordered else None
        if len(batch) == 0:
            raise ArgumentError("an empty batch: give it at least one call")
        if threading.get_ident() in self._recorders:
            raise ArgumentError("a batch inside a recording: call the operators themselves")
        if self._settle:
            self._streams.settle(list(batch._sources.values()), list(batch._streams), timeout_s)
        out = batch.outputs
        if not batch._distinct:
            return self._send(
                batch.tasks,
                batch.operator,
                out,
                batch._owners,
                linked,
                after,
                timeout_s,
                accesses,
                lane,
            )
        with self._layouts.using(len(batch._distinct)):
            if batch._epoch != self._layouts.epoch:
                for task, walks in zip(batch.tasks, batch._walks, strict=True):
                    if walks is not None:
                        self._intern(task["layouts"], walks)
                batch._epoch = self._layouts.epoch
            return self._send(
                batch.tasks,
                batch.operator,
                out,
                batch._owners,
                linked,
                after,
                timeout_s,
                accesses,
                lane,
            )

    def after_stream(self, stream: Any = None, timeout_s: float | None = None) -> Ticket:
        """Tasks submitted from now on, by any thread, wait until a CUDA stream has done its work so far.

        Nobody waits on the host, and no worker on the GPU: the executor takes no task from there on, parks
        where it runs out of others, and is launched when the stream gets there.

        Args:
            stream: of torch, CuPy, numba or cuda.core, or the handle of a CUstream; None takes torch's
                current stream, or the default stream.
            timeout_s: how long to wait for room in a full ring; None takes `Config.submit_timeout_s`.

        Returns:
            A ticket that is done once the stream has got there.

        Raises:
            MachineError: this is the CPU machine.
            ArgumentError, DeviceError: not a stream, another GPU's, or being captured into a graph.
            QueueFull: the ring stayed full; nothing was enqueued.
        """
        self._check_open()
        return Ticket(self, "after_stream", [(self._streams.after(stream, timeout_s), 1)], None)

    def before_stream(self, stream: Any = None) -> None:
        """What a CUDA stream is given from now on waits for every task submitted so far.

        The stream itself waits; the host does not. See also `Ticket.block_stream`. Arguments and errors as
        `after_stream`.
        """
        self._check_open()
        self._streams.block_all(stream)

    def _join(self, first: int, count: int) -> int:
        """Submit a task that ends after `count` others from position `first`; returns its position."""
        self._checker.prepare(JOIN.op_id)
        head = [JOIN.op_id, 0, 1, 1, *[0] * (MAX_INPUTS + MAX_OUTPUTS), 0, 0, 0, *[0] * 6, 0]
        task = np.frombuffer(_TASK.pack(*head, struct.pack("<QQ", first, count)), TASK)
        return self._send(task, "join", None, (), False, None, None).position

    def round_trip_ns(self, batch: Batch, repeats: int) -> np.ndarray[Any, Any]:
        """Nanoseconds from submit to completion seen by the host, of a batch of one task, `repeats` times.

        Measured in compiled code. The executor is launched first and kept busy.
        """
        self._check_open()
        if len(batch) != 1:
            raise ArgumentError(f"a batch of {len(batch)}: round trips are measured with one task")
        times = np.zeros(repeats, np.uint64)
        taken, tries = 0, 0
        while taken < repeats:
            self.submit_batch(batch).wait()
            taken += int(
                self._host.round_trips(
                    self._address,
                    int(batch.tasks.ctypes.data),
                    repeats - taken,
                    int(times.ctypes.data) + 8 * taken,
                    self._local.ranges_address,
                    time.monotonic_ns() + 1_000_000_000,
                )
            )
            tries += 1
            if tries > 100 + repeats:
                raise HangError(self._dump("round trips are interrupted again and again"))
        return times

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for every task submitted so far.

        Raises:
            TaskError: the first task that failed since the last call.
            WaitTimeout, HangError: as in `Ticket.wait`.
        """
        self._check_open()
        claimed, retired = int(self._words["claimed"][0]), int(self._words["retired"][0])
        count = (claimed - retired) & MASK_64
        if count:
            self._wait([(retired, count)], timeout_s)
        self._tidy()
        logged = int(self._words["failures"][0])
        if logged > self._reported:
            number = max(self._reported, logged - FAILURE_SLOTS)
            self._reported = logged
            failure = self._failures[number % FAILURE_SLOTS]
            raise explain("a task", int(failure["position"]), int(failure["status"]))

    def park(self, timeout_s: float | None = 10.0) -> None:
        """Ask the executor to leave and wait until it did. The next submit launches it again."""
        self._check_open()
        self._while_parked(lambda: None, timeout_s)

    def _while_parked(self, do: Callable[[], None], timeout_s: float | None = 10.0) -> None:
        """Call `do` while no launch runs and none can begin."""
        holds = self._keeper.holds()
        try:
            holds.take()
            if not holds.wait(1e9 if timeout_s is None else timeout_s):
                raise HangError(self._dump(f"the executor did not leave within {timeout_s} s"))
            self._check_open()
            do()
        finally:
            holds.give_back()
        holds.serve()

    def trace(self, path: str | os.PathLike[str], *, records: int = RECORDS) -> Trace:
        """Write what happens within a `with` block to a file that Perfetto and Chrome show.

            with rt.trace("t.json") as trace:
                ...
            trace.dropped

        Submissions by thread, the pump, each worker's tasks, launches and why they parked, and new operators;
        NVTX ranges of the submissions where nvtx is installed. The executor parks at both ends, and the short
        way of `rt.add` and its like is not taken meanwhile.

        Args:
            path: a JSON file; its folder must exist.
            records: how many records each block keeps, a power of two; where it writes more, the oldest are
                lost, and `Trace.dropped` counts them. 32 bytes each.

        Raises:
            ArgumentError: a trace is being taken already, or an argument makes no sense.
        """
        self._check_open()
        if self._trace is not None:
            raise ArgumentError(f"a trace is being taken already, to {self._trace.path}: end it first")
        return Trace(
            os.fspath(path),
            records,
            start=self._start_trace,
            stop=self._stop_trace,
            ping=lambda: self.submit("nop").wait().position,
            names=_kernel_name,
        )

    def _start_trace(self, trace: Trace) -> None:
        self._check_open()
        if self._trace is not None:
            raise ArgumentError(f"a trace is being taken already, to {self._trace.path}: end it first")
        records = trace.capacity
        self._while_parked(lambda: self._machine.trace_start(ring_bytes(records), records))
        # The short ways leave no note.
        self._trace, self._plain = trace, False
        self._put_aside, self._calls = self._calls, None

    def _stop_trace(self) -> np.ndarray[Any, Any]:
        self._trace, self._plain = None, self._has_plain
        self._calls, self._put_aside = self._put_aside, None
        if self._calls is not None:
            self._calls.move_on()  # layouts may have been overwritten meanwhile
        blocks: list[np.ndarray[Any, Any]] = []
        self._while_parked(lambda: blocks.append(self._machine.trace_stop()))
        return blocks[0]

    def stats(self) -> Stats:
        """A snapshot; its numbers were read one after another."""
        self._host.retire(self._address)
        words, state = self._words, self._state
        claimed, retired = int(words["claimed"][0]), int(words["retired"][0])
        failed = int(words["failures"][0])
        done = (retired - self._start) & MASK_64
        launches = int(words["enqueued"][0])
        return Stats(
            submitted=(claimed - self._start) & MASK_64,
            completed=done,
            failed=failed,
            queue_depth=(claimed - retired) & MASK_64,
            ingested=(int(state["ingested"][0]) - self._start) & MASK_64,
            parked=self._keeper.parked,
            park_reason=ParkReason(int(state["reason"][0])).name.lower(),
            launches=launches,
            relaunches=max(0, launches - 1),
            workers=int(state["workers"][0]),
            generation=self._injected.generation,
        )

    def close(self, force: bool = False) -> None:
        """Finish what was published, end the executor and free its memory. Closing twice is harmless.

        force=True does not wait for queued tasks; memory that a stuck executor may still touch is kept until
        the process ends.
        """
        found: Any = self._finalizer.peek()
        if found is None:
            return
        _, shut_down, parts, _ = found
        if os.getpid() != self._pid:
            self._closed = True  # the parent's executor is none of ours
            self._finalizer.detach()
            return
        try:
            if not force and not self._closed and self._words["claimed"][0] != self._words["retired"][0]:
                deadline = self.config.deadline_s
                self.synchronize(deadline)
        except (HangError, WaitTimeout, MachineError):
            force = True  # it will not finish: leave without waiting
        except (TaskError, ClosedError):
            pass  # the ticket says so to whoever asks; another thread closes, too
        finally:
            self._closed = True
            self._calls = None
            shut_down(*parts, 1.0 if force else 10.0)
            # Not before: where an interrupt came, the next `close` goes on, or the collector.
            _OPEN.discard(self)
            self._finalizer.detach()
            self._held = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(force=error is not None and not isinstance(error, Exception))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "parked" if self._keeper.parked else "serving"
        return f"<Runtime {self.machine} ({self.device_name}), {state}>"

    # --- checks ---

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this Runtime is closed: make a new one")
        if os.getpid() != self._pid:
            raise ClosedError(
                "this Runtime belongs to the parent process: make a new one in the child, and start children "
                'with the "spawn" method if they use CUDA'
            )

    # --- programs ---

    def program(
        self, function: Callable[..., Any], example_arguments: Sequence[Any], *, copies: int = 1
    ) -> Program:
        """Record a function of arrays and numbers that calls operators of this Runtime.

            step = rt.program(lambda x, w: rt.relu(rt.mul(x, w).result()), (x, w))
            y = step(x2, w2).result()

        The function is called once, with `Symbolic` arrays of the examples' shapes and dtypes; nothing runs.
        Other arrays that it uses are captured: every call of the program uses the same ones.

        Args:
            function: its arguments are as the examples; it returns recorded tickets, their results, or None.
            example_arguments: arrays and Python numbers.
            copies: calls that may run at the same time; each copy has memory for intermediate results.

        Raises:
            What submitting the calls would raise; ArgumentError where nothing was recorded.
        """
        self._check_open()
        views = [
            each.item()
            if isinstance(each, np.generic)
            else each
            if isinstance(each, bool | int | float)
            else self._machine.view(each, f"example_arguments[{place}]")
            for place, each in enumerate(example_arguments)
        ]
        program = Program(self, copies, function)
        program._begin(record_function(self, function, views))
        return program

    def record(self, *arrays: Any, copies: int = 1) -> Recording:
        """Record the calls that this thread makes in a `with` block; nothing runs.

            with rt.record() as program:
                t = rt.mul(a, b).result()
                rt.add(t, c, out=d)
            program(a2, b2, c2, d2)

        The program's arguments are the arrays that were used, in the order in which they came, `arrays`
        first; views of one of them are no arguments of their own. It gives results that no recorded call
        reads.
        """
        self._check_open()
        return Recording(self, arrays, copies, Program)

    # --- injection ---

    def inject(
        self,
        name: Any,
        expression: Any = None,
        *,
        template: str | None = None,
        arguments: Sequence[str] | None = None,
        dtypes: Sequence[Any] | None = None,
        steps: Sequence[Sequence[Any]] | None = None,
        replace: bool = False,
        wait: str = "runnable",
        **roles: Any,
    ) -> Operator:
        """Add an operator while the executor serves.

            rt.inject("swish", "x / (1 + exp(-x))")
            rt.inject("mean_square", template="reduce", map="x * x", finalise="a / n")
            rt.inject("my_softmax", template="rowwise", combine="max(a, b)", identity="-inf",
                      map2="exp(x - r)", value="exp(x - r) / s")
            rt.inject("fused", steps=[("mul", "x", "y"), ("relu", 0)])
            rt.swish(a)

        It computes in f32 on f32, f16 and bf16. An element-wise one, of one to three arrays, runs at once, by
        the interpreter that every executor has, and nobody pauses; its compiled body takes over by itself.
        Others are compiled first, and run along `dim=`.

        Args:
            name: how it is called; or a small Python function, which names itself: it is read, never called;
                or what `gpuos.device_operator` made.
            expression: over x, y, z or `arguments`; see `gpuos_numba.inject.check` for the language.
            template: "elementwise", "chain", "reduce" or "rowwise"; default by what else is given.
            arguments: the expression's variables, in the order of the inputs.
            dtypes: names of the float types that it takes, default all three.
            steps: of a chain of existing operators, see `gpuos_numba.inject.request.chain`.
            replace: whether an operator injected under that name before may be replaced. Tasks submitted
                before keep the one they were submitted with.
            wait: "runnable", or "compiled": return when machine code runs it.
            roles: expressions of the other templates, see `gpuos_numba.inject.request`.

        Raises:
            ExpressionError: an expression is outside the language; names the column. Nothing is changed.
            ArgumentError: the name is taken or none, or what is given makes no operator.
            MachineError: it did not compile, link, load or pass its self-test. What ran before runs on.
        """
        operator = asking.inject(self, name, expression, replace=replace, wait=wait, template=template,
                             arguments=arguments, dtypes=dtypes, steps=steps, roles=roles)  # fmt: skip
        if self._trace is not None:
            self._trace.mark(f"generation {self._injected.generation}", operator=operator.name)
        return operator

    def replace(
        self,
        name: Any,
        expression: Any = None,
        *,
        template: str | None = None,
        arguments: Sequence[str] | None = None,
        dtypes: Sequence[Any] | None = None,
        steps: Sequence[Sequence[Any]] | None = None,
        wait: str = "runnable",
        **roles: Any,
    ) -> Operator:
        """Fix an operator that exists: one injected before, or one of the table that takes no parameters.

        While one of the table is replaced, calls of all operators take the longer way through the checks.
        Arguments and errors as of `inject`; ArgumentError, too, where there is no such operator.
        """
        return asking.replace(self, name, expression, wait, template=template, arguments=arguments,
                              dtypes=dtypes, steps=steps, roles=roles)  # fmt: skip

    def operator(self, function: Any) -> Any:
        """Decorator: inject a small Python function, replacing what it injected before.

            @rt.operator
            def swish(x):
                return x / (1 + exp(-x))

        Returns the injected Operator, which `submit` takes. Raises as `inject` does.
        """
        return self.inject(function, replace=True)

    def rollback(self) -> str:
        """Undo the last `inject` or `replace`; returns the name of the operator that it was about.

        Raises:
            ArgumentError: there is nothing to undo; at most 64 changes are remembered.
        """
        self._check_open()
        name = self._injected.rollback()
        if self._trace is not None:
            self._trace.mark(f"generation {self._injected.generation}", rollback=name)
        self._look_for_overrides()
        return name

    def ab(self, name: str, fraction: float = 0.5, candidate: Operator | str | None = None) -> Trial:
        """Send a part of the tasks of an operator to another one, and compare the two.

            with rt.ab("swish", 0.1) as trial:   # against what it replaced
                ...
                print(trial.measure(x))

        Args:
            name: of the operator on trial.
            fraction: share of its tasks that the candidate gets.
            candidate: an operator or the name of one; default what the current one replaced.

        Raises:
            ArgumentError: there is no such operator or candidate, or they are called differently.
        """
        return asking.ab(self, name, fraction, candidate)

    def optimize(self, *names: str) -> dict[str, Any]:
        """Inline injected operators into the worker, in the background of nothing: it takes some seconds.

        Args:
            names: default all that are current and compiled.

        Returns:
            `kept`, whether the new generation serves; `why`; `before_ns` and `after_ns` by name, the median
            round trip of one task of 1,024 elements.

        Raises:
            ArgumentError: a name is not of a compiled element-wise operator.
            MachineError: it did not compile, link or load; what ran before runs on.
        """
        from .inject.optimize import optimize

        self._check_open()
        return optimize(self, self._publisher, names)

    def _look_for_overrides(self) -> None:
        """Have calls take the long way while an injected operator has the name of one of the table."""
        others = (*self._injected.names(), *self._injected.on_trial())
        self._overridden = any(each in TABLE for each in others)

    def __getattr__(self, name: str) -> Any:
        injected = self.__dict__.get("_injected")
        if injected is None or injected.version(name) is None:
            raise AttributeError(f"{type(self).__name__} has no attribute or operator {name!r}")

        def call(*inputs: Any, out: Any = None, after: Any = None, **scalars: Any) -> Ticket:
            return self.submit(name, inputs, out, after=after, **scalars)

        return call

    def _operator(self, name: str | Operator) -> Operator:
        if not isinstance(name, str):
            return self._injected.latest(name) if name.family == INJECTED else name
        operator = self._injected.get(name) or TABLE.get(name)
        if operator is None:
            known = ", ".join((*TABLE, *self._injected.names()))
            raise UnknownOperatorError(f"operator {name!r} is not in the table: {known}")
        return operator

    def _afters(self, after: Ticket | Sequence[Ticket] | None) -> list[tuple[int, int]]:
        """First and last positions to wait for."""
        if after is None:
            return []
        pairs: list[tuple[int, int]] = []
        for ticket in tuple(after) if isinstance(after, Iterable) else (after,):
            if not isinstance(ticket, Ticket) or ticket._runtime is not self:
                raise ArgumentError(f"after={ticket!r}: give tickets of this Runtime")
            pairs += ticket._last
        return pairs

    # --- the short way ---

    def _make_calls(self) -> bool:
        """Whether there is a short way, which needs torch's tensors."""
        torch = sys.modules.get("torch")
        if self._tensors or not hasattr(torch, "Tensor") or self._closed or os.getpid() != self._pid:
            return False
        assert torch is not None
        self._tensors = (torch.Tensor, torch.nn.Parameter)
        api = calls.exchange_api(torch.Tensor)
        if api is None:
            return False
        device = (2, self._ordinal) if self.machine == "cuda" else (1, 0)
        driver = self._machine.stream_driver if self._settle else 0  # type: ignore[attr-defined]
        order = self._order if self._tracks else 0
        self._calls = Calls(self._address, api, self._tensors, device, driver, order)
        return True

    def _short(
        self, operator: Operator, inputs: Sequence[Any], out: Any, given: dict[str, Any]
    ) -> Ticket | None:
        """A ticket where the same call was checked before; None where anything is out of the ordinary."""
        if not self._lanes.simple:
            return None
        known = self._calls
        if known is None:
            if self._tensors or self._trace is not None or not self._make_calls():
                return None
            known = self._calls
            assert known is not None
        try:
            key = operator if out is not None and not given else call_key(operator, out, given)
            way = known.ways[key]
        except (KeyError, TypeError):
            return None
        if out is None:
            objects = inputs
        elif type(out) is tuple:
            # The key does not see where inputs end and outputs begin: it must be where it was.
            if operator.outputs == 1 or len(out) != operator.outputs:
                return None
            objects = (*inputs, *out)
        elif operator.outputs != 1:
            return None
        else:
            objects = (*inputs, out)
        note: list[Any] = [None, objects, operator]
        held = self._held
        try:
            held.append(note)
            position = way(*objects)
            if position < 0:
                if not position & 1:
                    position, out = self._complete(known, way, (calls.WANTS - position) >> 1, note, out)
                if position == calls.DECLINED:
                    note.clear()
                    return None
            if position >= 0:
                note[0] = position + 1
            else:
                position = (calls.UNSERVED - position) >> 1
                note[0] = position + 1
                if self._host.relaunch(self._address):
                    self._keeper.ensure_served()
        except BaseException:
            self._leave(note)
            raise
        if len(held) > self._tidy_at:
            self._tidy()
        return Ticket(self, operator.name, position, out)

    def _complete(
        self, known: Calls, way: Callable[..., int], entry: int, note: list[Any], out: Any
    ) -> tuple[int, Any]:
        """Do what a known call wants and send it: the answer, and what its ticket hands out."""
        _, objects, operator = note
        try:
            wanted = known.wants[entry]
        except IndexError:
            return calls.DECLINED, out
        if wanted.way is not way:  # all was forgotten, and another call learned, since it answered
            return calls.DECLINED, out
        if wanted.looks and any(each.is_neg() for each in objects):
            return calls.DECLINED, out
        if wanted.allocates:
            empty, device = sys.modules["torch"].empty, objects[0].device
            fresh = tuple(empty(shape, dtype=dtype, device=device) for shape, dtype in wanted.allocates)
            note[1] = objects = (*objects, *fresh)
            if out is None and operator.outputs:
                out = fresh[0] if operator.outputs == 1 else fresh[: operator.outputs]
        answer = wanted.send(*objects)
        return (calls.DECLINED if answer < 0 and not answer & 1 else answer), out

    def _learn(
        self,
        known: Calls,
        operator: Operator,
        inputs: Sequence[Any],
        out: Any,
        given: dict[str, Any],
        views: list[ArrayView],
        task: np.ndarray[Any, Any],
        epoch: int,
    ) -> None:
        """Have the short way take this call from now on, if it has come before and is one for it."""
        if out is not None and type(out) is not tuple:
            out = (out,)
        led = len(operator.leading)
        operands = views[led:]
        outputs = operator.outputs
        given_out = len(out) if out is not None else 0
        keyed = len(inputs) + given_out
        if len(operands) > calls.OPERANDS or len(operands) < len(inputs) + outputs:
            return
        if any(type(view.owner) not in self._tensors for view in operands):
            return
        try:
            key = call_key(operator, out, given)
            token = known.token(key)
        except TypeError:
            return
        kinds = tuple((view.shape, view.strides, view.dtype) for view in operands[:keyed])
        if not known.seen((token, epoch, kinds)):
            return
        allocates = [(view.shape, view.owner.dtype) for view in operands[keyed:]]  # type: ignore[attr-defined]
        writes = range(len(inputs), len(inputs) + outputs)
        same_ok = tuple(place - led for place in operator.same_ok if led <= place < led + len(inputs))
        known.learn(key, keyed, operands, led, writes, same_ok, task, epoch, allocates)

    # --- the way to the ring ---

    def _intern(self, layouts: Any, walks: Sequence[Walk | None]) -> None:
        """Write the layout slots of a task's operands: inputs from 0, outputs from 4."""
        for place, walk in enumerate(walks):
            if walk is not None:
                layouts[place] = self._layouts.intern(*walk)

    def _submit_one(
        self,
        op: str | Operator,
        inputs: Sequence[Any],
        out: Any,
        after: Any,
        timeout_s: float | None,
        scalars: dict[str, Any],
        lane: Lane | None = None,
    ) -> Ticket | None:
        if self._closed or os.getpid() != self._pid:
            self._check_open()
        operator = self._operator(op)
        views, output, head, walks = self._checker.check(operator, inputs, out, scalars)
        owners = [view.owner for view in views]
        if self._settle:
            streams = [view.stream for view in views if view.stream is not None]
            self._streams.settle(owners, streams, timeout_s)
        owners.append(operator)  # its bodies stay in every generation while a task of it is under way
        local = self._local
        accesses = None
        if self._tracks:
            accesses = local.access
            local.access_buffer[:] = pack_access(views, written(operator, head))
        known = self._calls
        if walks is None:
            _TASK.pack_into(local.buffer, 0, *head)
            if known is not None and operator.family != INJECTED:
                self._learn(known, operator, inputs, out, scalars, views, local.task, calls.ALWAYS)
            return self._send(
                local.task, operator.name, output, owners, False, after, timeout_s, accesses, lane
            )
        with self._layouts.using():
            _TASK.pack_into(local.buffer, 0, *head)
            self._intern(local.task["layouts"][0], walks)
            if known is not None and operator.family != INJECTED:
                self._learn(known, operator, inputs, out, scalars, views, local.task, known.epoch)
            return self._send(
                local.task, operator.name, output, owners, False, after, timeout_s, accesses, lane
            )

    def _send(
        self,
        tasks: np.ndarray[Any, Any],
        operator: str,
        out: Any,
        owners: Any,
        linked: bool,
        after: Any,
        timeout_s: float | None,
        accesses: np.ndarray[Any, Any] | None = None,
        lane: Lane | None = None,
    ) -> Ticket:
        """Put tasks into the ring, in the order that `accesses` (None: they touch nothing), `lane` (None: the
        Runtime's own, if it has one) and `after` ask for."""
        if timeout_s is None:
            timeout_s = self.config.submit_timeout_s
        trace = self._trace
        began = trace.begin(f"submit {operator}") if trace is not None else (0, None)
        local, submit = self._local, self._ordered.submit
        pairs = self._afters(after)
        lane = lane or self._lanes.own
        if lane is not None:
            pairs += lane._take_waits()
            in_order = lane.address
        elif linked:
            local.lane["begun"] = 0
            in_order = local.lane_address
        else:
            in_order = 0
        extras = np.array(pairs, np.uint64) if pairs else None
        extra = 0 if extras is None else int(extras.ctypes.data)
        count, sent = len(tasks), 0
        ranges: list[tuple[int, int]] = []
        address = int(tasks.ctypes.data) if tasks is not local.task else local.task_address
        touched = 0
        if accesses is not None and self._tracks:
            touched = int(accesses.ctypes.data) if accesses is not local.access else local.access_address
        held_back = self._lanes.limit(lane)
        step = held_back or count
        deadline = 0
        note: list[Any] | None = None
        try:
            while sent < count:
                now = time.monotonic_ns()
                deadline = deadline or now + int(timeout_s * 1e9)
                if held_back:
                    if note is not None and ranges:
                        # An open note keeps all that others hold: not while this one waits.
                        note[0], note = (ranges[-1][0] + ranges[-1][1]) & MASK_64, None
                    if note is None:
                        self._hold_back(held_back, deadline)
                if note is None:
                    note = [None, owners]
                    self._held.append(note)
                done, written, nobody_serves = submit(
                    self._address,
                    self._order,
                    address + sent * TASK_BYTES,
                    touched and touched + sent * TASK_BYTES,
                    min(count - sent, step),
                    in_order,
                    extra,
                    len(pairs) if sent == 0 or not in_order else 0,
                    min(deadline, now + _SLICE_NS),
                    local.ranges_address,
                    _RANGES,
                )
                for first, length in local.ranges[:written].tolist():
                    if ranges and (ranges[-1][0] + ranges[-1][1]) & MASK_64 == first:
                        ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
                    else:
                        ranges.append((first, length))
                sent += done
                if nobody_serves:
                    self._keeper.ensure_served()
                if not done and self._closed:
                    raise ClosedError(f"the Runtime was closed; {sent} of {count} tasks are enqueued")
                # Still parked after that: launches are held back, and the deadline holds all the same.
                if (
                    not done
                    and time.monotonic_ns() >= deadline
                    and (not nobody_serves or self._keeper.parked)
                ):
                    raise QueueFull(
                        f"the ring of {self.config.capacity} slots stayed full for {timeout_s} s; "
                        f"{sent} of {count} tasks are enqueued: wait for tickets, or raise capacity or "
                        "timeout_s"
                    )
                if done:
                    deadline = 0
            if trace is not None:
                trace.submitted(began, operator, ranges)
            assert note is not None
            return self._sent(note, operator, ranges, out, count, bool(in_order))
        except BaseException as error:
            if note is not None and sent == 0 and isinstance(error, QueueFull | ClosedError):
                note.clear()
                if self._tidying.acquire(blocking=False):  # else `_tidy` removes it, in its turn
                    try:
                        with contextlib.suppress(ValueError):
                            self._held.remove(note)  # or another one that is empty
                    finally:
                        self._tidying.release()
            elif note is not None:
                self._leave(note)
            raise

    def _send_known(
        self, operator: str, task: int, touched: int, waits: int, owners: Any, out: Any
    ) -> Ticket | None:
        """As `_send`, for one task that lies at an address, as does what it touches and, unless 0, the first
        and last position that it waits for. Never waits. None where it was not enqueued: `_send` it."""
        if self._trace is not None or not self._lanes.simple:
            return None
        local = self._local
        note: list[Any] = [None, owners]
        try:
            self._held.append(note)
            done, written, nobody_serves = self._ordered.submit(
                self._address,
                self._order,
                task,
                touched if self._tracks else 0,
                1,
                0,
                waits,
                1 if waits else 0,
                0,
                local.ranges_address,
                _RANGES,
            )
            if not done:
                note.clear()
                return None  # the ring is full; joins that went in ahead of the task do no harm
            ranges = [(first, length) for first, length in local.ranges[:written].tolist()]
            if nobody_serves:
                self._keeper.ensure_served()
            return self._sent(note, operator, ranges, out, 1)
        except BaseException:
            self._leave(note)
            raise

    def _sent(
        self,
        note: list[Any],
        operator: str,
        ranges: list[tuple[int, int]],
        out: Any,
        count: int,
        linked: bool = False,
    ) -> Ticket:
        """The ticket of `count` tasks that are enqueued; their arrays are held until the last has retired."""
        first, length = ranges[-1]
        note[0] = (first + length) & MASK_64
        if len(self._held) > self._tidy_at:
            self._tidy()
        ticket = Ticket(self, operator, ranges, out)
        ticket._linked, ticket._count = linked, count
        return ticket

    def _leave(self, note: list[Any]) -> None:
        """An interrupt came while tasks were enqueued. Those that were lie before what is claimed by now."""
        note[:1] = [int(self._words["claimed"][0])]

    def _hold_back(self, depth: int, deadline_ns: int) -> None:
        """Wait until no more than `depth` tasks are unfinished, or until the deadline."""
        while True:
            self._host.retire(self._address)
            retired = int(self._words["retired"][0])
            over = ((int(self._words["claimed"][0]) - retired) & MASK_64) - depth
            left_s = (deadline_ns - time.monotonic_ns()) * 1e-9
            if over <= 0 or left_s <= 0:
                return
            try:
                self._wait([(retired, over)], left_s)
            except WaitTimeout:
                return

    # --- the way back ---

    def _wait(self, ranges: list[tuple[int, int]], timeout_s: float | None) -> None:
        """Wait for ranges of positions; relaunches when nobody serves."""
        until = None if timeout_s is None else time.monotonic_ns() + int(timeout_s * 1e9)
        limit = self.config.deadline_s
        progress, since = (-1, -1), time.monotonic()
        for first, count in ranges:
            position, end = first, (first + count) & MASK_64
            while True:
                now = time.monotonic_ns()
                slice_end = now + _SLICE_NS if until is None else min(until, now + _SLICE_NS)
                answer, position = self._host.wait_range(self._address, position, end, slice_end)
                if answer == ring.DONE:
                    break
                if self._closed:
                    raise ClosedError(f"the Runtime was closed before the task at position {position} ran")
                if answer == ring.PARKED:
                    self._keeper.ensure_served()
                if until is not None and time.monotonic_ns() >= until:
                    raise WaitTimeout(
                        f"the task at position {position} had not completed after {timeout_s} s; "
                        "it stays queued"
                    )
                if limit is not None and self._keeper.withheld:
                    since = time.monotonic()  # it is the stream that takes so long
                elif limit is not None:
                    self._host.retire(self._address)
                    seen = (int(self._words["retired"][0]), position)
                    if seen != progress:
                        progress, since = seen, time.monotonic()
                    elif time.monotonic() - since > limit:
                        raise HangError(self._dump(f"no task completed for {limit} s"))

    def _attend(self) -> None:
        """At each tick of the keeper."""
        self._tidy()
        self._figures.attend()

    def _tidy(self) -> None:
        """Retire completed tasks and let go of their arrays."""
        self._host.retire(self._address)
        if self._tidying.locked():
            return  # another thread does, or this one: an array that was let go of called back
        with self._tidying:
            retired, held = int(self._words["retired"][0]), self._held
            while held:
                end = held[0][:1]
                if end and (end[0] is None or (retired - end[0]) & MASK_64 >= 1 << 63):
                    break
                held.popleft()
            self._tidy_at = len(held) + _HELD

    def _publish_layouts(self, count: int) -> None:
        self._control["layouts"] = count

    def _drain(self) -> None:
        """Every claimed task has retired: layouts may be overwritten."""
        if self._calls is not None:
            self._calls.move_on()  # first: what is sent from here on knows none of them
        claimed, retired = int(self._words["claimed"][0]), int(self._words["retired"][0])
        if claimed != retired:
            self._wait([(retired, (claimed - retired) & MASK_64)], None)

    def _dump(self, why: str) -> str:
        """What a hang looks like, for the message."""
        words, state = self._words, self._state
        claimed, retired = int(words["claimed"][0]), int(words["retired"][0])
        ingested = int(state["ingested"][0])
        slot = ingested % self.config.capacity
        stamp = int(self._machine.arrays.stamps[slot])
        lines = [
            f"{why}. State of the {self.machine} machine:",
            f"  ring: claimed {claimed}, ingested {ingested}, retired {retired}, "
            f"capacity {self.config.capacity}",
            f"  launches: asked for {int(words['enqueued'][0])}, begun {int(state['begun'][0])}, "
            f"parked {int(state['parked'][0])} ({ParkReason(int(state['reason'][0])).name.lower()}); "
            f"generation {self._injected.generation}",
        ]
        if ingested != claimed and stamp != (ingested + 1) & MASK_64:
            lines.append(f"  position {ingested} is claimed and not published: a producer stalls before it")
        if self._keeper.error is not None:
            lines.append(f"  the last launch failed: {self._keeper.error}")
        try:
            words_of = self._machine.read("worker_states").view(np.uint64).reshape(-1, 2)
        except MachineError as error:
            lines.append(f"  worker states could not be read: {error}")
        else:
            for number, (word, position) in enumerate(words_of.tolist(), 1):
                kind, op = WorkerState(word & 0xFF), _kernel_name(word >> 8)
                if kind is WorkerState.RUNNING:
                    lines.append(f"  worker {number}: running {op} at position {position}")
                elif kind is WorkerState.WAITING:
                    lines.append(f"  worker {number}: waiting, before {op} at position {position}")
            busy = sum(1 for word, _ in words_of.tolist() if word & 0xFF > WorkerState.IDLE)
            lines.append(f"  {len(words_of) - busy} workers are idle or absent")
        return "\n".join(lines)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a Runtime's, without a circle that only the collector would end."""
    seen = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = seen()
        assert found is not None
        return found(*arguments)

    return call


def _weak_stats(runtime: Runtime) -> Callable[[], dict[str, Any]]:
    """Its counters as plain data, without keeping it alive."""
    seen = weakref.ref(runtime)

    def stats() -> dict[str, Any]:
        found = seen()
        if found is None or found._closed:
            return {}
        about = {"machine": found.machine, "device": found.device_name, "capacity": found.config.capacity}
        return about | dataclasses.asdict(found.stats())

    return stats


_STUCK: Final[list[Any]] = []
"""What tasks use that an executor may still run which did not leave."""


def _shut_down(
    machine: Machine,
    keeper: Keeper,
    publisher: Publisher,
    watch: Watch,
    board: Board | None,
    held: deque[list[Any]],
    pid: int,
    timeout_s: float = 10.0,
) -> None:
    """End the executor, then free its memory; a stuck one keeps it until the process ends, and its tasks'.

    Harmless a second time, and while another thread does the same.
    """
    if os.getpid() != pid:
        return
    publisher.stop()
    ended = keeper.stop()
    watch.stop()
    if board is not None and ended:
        board.close(remove=True)
    if machine.wait_exited(timeout_s):
        machine.close()
    else:
        _STUCK.append(held)


def _plain_torch(self: Runtime, op_id: int, x: Any, y: Any, out: Any) -> Ticket | None:
    """The short way for contiguous f32 torch tensors of one shape, about a microsecond of checks.

    None where anything is out of the ordinary: the long way then takes the call, or says what is wrong.
    """
    torch = self._torch
    if torch is None:
        torch = self._torch = sys.modules.get("torch")
        if torch is None:
            return None
        if self._settle:
            self._driver = self._machine.stream_driver  # type: ignore[attr-defined]
            self._current_stream = torch._C._cuda_getCurrentRawStream
    tensor, f32, device = torch.Tensor, torch.float32, self._ordinal
    if type(x) is not tensor or type(y) is not tensor or type(out) is not tensor:
        return None
    shape = out.shape
    if x.dtype is not f32 or y.dtype is not f32 or out.dtype is not f32:
        return None
    if x.shape != shape or y.shape != shape:
        return None
    if x.get_device() != device or y.get_device() != device or out.get_device() != device:
        return None
    if not (x.is_contiguous() and y.is_contiguous() and out.is_contiguous()):
        return None
    count = out.numel()
    # One element may be a lazily negated view; several of those are never contiguous.
    if not 1 < count <= self._plain_limit:
        return None
    at_x, at_y, at_out = x.data_ptr(), y.data_ptr(), out.data_ptr()
    size = 4 * count
    if (at_out != at_x and -size < at_out - at_x < size) or (at_out != at_y and -size < at_out - at_y < size):
        return None
    stream = self._current_stream(device)
    note: list[Any] = [None, x, y, out]
    held = self._held
    try:
        held.append(note)
        if self._tracks:
            position, answer = self._ordered.submit_plain(
                self._address, self._order, op_id, at_x, at_y, at_out, count, self._driver, stream
            )
        else:
            position, answer = self._host.submit_plain(
                self._address, op_id, at_x, at_y, at_out, count, self._driver, stream
            )
        if answer == ring.DECLINED:
            note.clear()
            return None
        note[0] = (position + 1) & MASK_64
        if answer == ring.SENT_UNSERVED:
            self._keeper.ensure_served()
    except BaseException:
        self._leave(note)
        raise
    if len(held) > self._tidy_at:
        self._tidy()
    return Ticket(self, "", position, out)


def _sugar(operator: Operator) -> Any:
    """`rt.<name>(*inputs, out=None, ...)`."""
    plain = operator.plain
    op_id, limit = operator.kernels[0].op_id if operator.kernels else 0, operator.inputs[1]

    def call(self: Runtime, *inputs: Any, out: Any = None, after: Any = None, **scalars: Any) -> Ticket:
        if self._overridden or self._recorders:
            return self.submit(operator.name, inputs, out, after=after, **scalars)
        if after is None and (self._calls is not None or not self._tensors):
            ticket = self._short(operator, inputs, out, scalars)
            if ticket is not None:
                return ticket
        if (
            plain
            and after is None
            and self._plain
            and self._lanes.simple
            and len(inputs) == limit
            and not scalars
            and not self._closed
            # A call that comes again is worth learning: that takes the long way.
            and (self._calls is None or not self._calls.seen((operator, getattr(out, "shape", None))))
        ):
            ticket = _plain_torch(self, op_id, inputs[0], inputs[-1], out)
            if ticket is not None:
                ticket.operator = operator.name
                return ticket
        timeout_s = scalars.pop("timeout_s", None)
        return cast("Ticket", self._submit_one(operator, inputs, out, after, timeout_s, scalars))

    call.__name__ = operator.name
    call.__qualname__ = f"Runtime.{operator.name}"
    call.__doc__ = describe(operator)
    return call


for _operator in TABLE.values():
    setattr(Runtime, _operator.name, _sugar(_operator))
