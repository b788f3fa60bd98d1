"""Recording: calls arrive as they would at a Runtime, a `Trace` of what they compute leaves; nothing runs.

Every call is checked and planned as if it were submitted. Results are `Symbolic` arrays. When the recording
ends, arrays that were used as they are become roots too, views of one memory views of one root.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .checking import Checker, immediate, infer, plan_call, planned
from .descriptor import DType
from .device.operators.table import Operator
from .errors import ArgumentError
from .host.arrays import ArrayView, _contiguous_strides, byte_range
from .host.program import Ref, Step, dependencies
from .host.symbolic import WHOLE, Recipe, Root, Symbolic, SymbolicNumber, follow
from .shapes import Shape

if TYPE_CHECKING:
    from .program import Program
    from .runtime import Runtime


RESULTS_AT = 1 << 60
"""Where results are said to lie while nothing has memory yet: no array does."""


class Operand(NamedTuple):
    """A view that a call reads or writes. dtype may differ from its root's where arrays share memory."""

    ref: Ref
    dtype: DType


@dataclass
class Call:
    """One recorded task. Of inputs: Operand, a Python number, SymbolicNumber, or None where it was left out.

    Attributes:
        made: for each output, whether it is a new result.
        parameters: keywords as they were given.
    """

    operator: Operator
    inputs: tuple[Any, ...]
    outputs: tuple[Operand, ...]
    made: tuple[bool, ...]
    parameters: dict[str, Any]


class Output(NamedTuple):
    """What a program gives: a view of a root, or (root -1) an array that was there before."""

    root: int
    recipe: Recipe
    indices: tuple[int, ...]
    array: Any = None


@dataclass
class Trace:
    """What was recorded.

    Attributes:
        roots: arguments first, then what was captured and what is computed.
        arguments: for each argument the number of its root, -1 - n for the n-th number.
        calls: in order.
        waits: for each call the earlier ones that it waits for.
        outputs: what a call of the program gives; `single`: alone, not in a tuple.
        numbers: what those were when it was recorded.
        looked: a shape was looked at, so that the recording holds for these shapes alone.
    """

    roots: list[Root]
    arguments: tuple[int, ...]
    calls: list[Call]
    waits: list[list[int]]
    outputs: list[Output]
    single: bool
    numbers: tuple[float, ...]
    looked: bool


class RecordedTicket:
    """What a call gives while it is recorded."""

    def __init__(self, recorder: Recorder, number: int, operator: str, out: Any) -> None:
        self._recorder, self.number, self.operator, self._out = recorder, number, operator, out

    def result(self, timeout_s: float | None = None) -> Any:
        """The output: the array given as `out`, or a `Symbolic`. Waits for nothing."""
        return self._out

    def wait(self, timeout_s: float | None = None) -> RecordedTicket:
        """Nothing runs: the ticket."""
        return self

    def __repr__(self) -> str:
        return f"<recorded call {self.number}: {self.operator}>"


class Recorder:
    """Collects the calls that one thread makes on a Runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.looked = False
        self._runtime = runtime
        # The Runtime's own checks, for recorded arrays too.
        self._checker = Checker(runtime._machine, runtime.config.capacity, self._view)
        self._roots: list[Root] = []
        self._calls: list[tuple[Operator, list[Any], list[Any], tuple[bool, ...], dict[str, Any]]] = []
        self._after: list[tuple[int, ...]] = []
        self._made: list[tuple[int, Any]] = []  # results of calls without `out`, by call

    def begin(self) -> None:
        """Take this thread's calls from now on."""
        recorders = self._runtime._recorders
        if recorders.setdefault(threading.get_ident(), self) is not self:
            raise ArgumentError("this thread is recording already: end that recording first")

    def end(self) -> None:
        """Leave the thread's calls to the Runtime again."""
        self._runtime._recorders.pop(threading.get_ident(), None)

    def argument(self, view: ArrayView) -> Symbolic:
        """A root for an argument of the function."""
        return Symbolic(self, self._root("argument", view))

    def _root(self, kind: str, view: ArrayView) -> Root:
        strides = _contiguous_strides(view.shape) if view.contiguous else view.strides
        root = Root(
            len(self._roots),
            kind,
            view.dtype,
            view.shape,
            strides,
            view.address,
            view.owner,
            view.readonly,
            view.stream,
        )
        self._roots.append(root)
        return root

    def _result(self, shape: Shape, dtype: DType) -> Symbolic:
        number = len(self._roots)
        root = Root(number, "result", dtype, shape, _contiguous_strides(shape), RESULTS_AT + (number << 36))
        self._roots.append(root)
        return Symbolic(self, root)

    def _view(self, array: Any, name: str) -> ArrayView:
        if isinstance(array, Symbolic):
            if array._watcher is not self:
                raise ArgumentError(f"{name} belongs to another recording: it has no elements here")
            return array.seen()
        if isinstance(array, RecordedTicket):
            raise ArgumentError(f"{name} is a recorded ticket: pass its .result()")
        view: ArrayView = self._runtime._machine.view(array, name)
        return view

    def submit(self, op: Any, inputs: Sequence[Any], out: Any, after: Any, given: dict[str, Any]) -> Any:
        """Check one call as `Runtime.submit` would, and keep it: a RecordedTicket. Raises what that would."""
        runtime, checker = self._runtime, self._checker
        runtime._check_open()
        operator = runtime._operator(op)
        if operator.fallback is not None:
            operator = self._whole(operator)
        concrete = [each.value if isinstance(each, SymbolicNumber) else each for each in inputs]
        values = {k: v.value if isinstance(v, SymbolicNumber) else v for k, v in given.items()}
        sources = checker.sources(operator, concrete)
        operands = tuple(planned(source) for source in sources)
        items = tuple(operator.read_parameters(values).items())
        out, made = self._outputs(operator, operands, items, out)
        targets, handed = checker.targets(operator, concrete, sources, operands, items, out)
        results = tuple(planned(target) for target in targets)
        plan, _ = plan_call(operator, operands, results, runtime._machine.max_workers, items)
        assert plan is not None  # the operator is whole
        runtime._checker.prepare(plan.op_id)
        led = len(operator.leading)
        kept: list[Any] = []
        for place, source in enumerate(sources):
            original = inputs[place - led] if place >= led else None
            if isinstance(original, SymbolicNumber):
                kept.append(original)
            elif isinstance(source, ArrayView) and isinstance(source.owner, Symbolic):
                kept.append(source.owner)
            else:
                if isinstance(source, bool | int | float):
                    immediate(source, plan.number, operator.name)
                kept.append(source)
        written = [view.owner if isinstance(view.owner, Symbolic) else view for view in targets]
        number = len(self._calls)
        self._after.append(self._numbers(after))
        self._calls.append((operator, kept, written, made, dict(given)))
        if any(made):
            self._made.append((number, handed))
        return RecordedTicket(self, number, operator.name, handed)

    def _whole(self, operator: Operator) -> Operator:
        """The operator for operands of every layout. What tests it on this thread is not recorded."""
        recorders, thread = self._runtime._recorders, threading.get_ident()
        del recorders[thread]
        try:
            return self._runtime._publisher.whole(operator)
        finally:
            recorders[thread] = self

    def _outputs(
        self, operator: Operator, operands: tuple[Any, ...], items: tuple[Any, ...], out: Any
    ) -> tuple[Any, tuple[bool, ...]]:
        """`out` with new results where none was given, and which those are."""
        count = operator.outputs
        if count == 0 or operator.like_out or operator.updates:
            return out, (False,) * count
        if count > 1 and out is not None and (not isinstance(out, list | tuple) or len(out) != count):
            return out, (False,) * count  # the Runtime's checks say what is wrong
        given = [out] if count == 1 else list(out) if out is not None else [None] * count
        wanted = infer(operator, operands, items)
        made = tuple(each is None for each in given)
        whole = [
            self._result(*result) if each is None else each
            for each, result in zip(given, wanted, strict=True)
        ]
        return (whole[0] if count == 1 else tuple(whole)), made

    def _numbers(self, after: Any) -> tuple[int, ...]:
        tickets = () if after is None else tuple(after) if isinstance(after, Iterable) else (after,)
        for ticket in tickets:
            if not isinstance(ticket, RecordedTicket) or ticket._recorder is not self:
                raise ArgumentError(f"after={ticket!r}: give tickets of this recording")
        return tuple(ticket.number for ticket in tickets)

    # --- the end of the recording ---

    def finish(
        self,
        arguments: Sequence[Symbolic | SymbolicNumber] | None,
        declared: Sequence[ArrayView] = (),
        returned: Any = None,
    ) -> Trace:
        """The trace. Without `arguments`, arrays are arguments in the order in which they came, `declared`
        first.

        Raises:
            ArgumentError: nothing was recorded, or arrays overlap and none of them holds the others.
        """
        if not self._calls:
            raise ArgumentError("nothing was recorded: call operators of the Runtime inside the recording")
        views = list(declared)
        for _, inputs, outputs, _, _ in self._calls:
            views += [each for each in (*inputs, *outputs) if isinstance(each, ArrayView)]
        refs = self._memory(views, "constant" if arguments is not None else "argument")

        def operand(each: Any) -> Any:
            if isinstance(each, Symbolic):
                return Operand(Ref(each.root.number, each.recipe, each.indices), each.root.dtype)
            if isinstance(each, ArrayView):
                return Operand(refs[_key(each)], each.dtype)
            return each

        calls, steps = [], []
        for (operator, inputs, outputs, made, given), after in zip(self._calls, self._after, strict=True):
            read = tuple(operand(each) for each in inputs)
            wrote = tuple(operand(each) for each in outputs)
            calls.append(Call(operator, read, wrote, made, given))
            reads = [each.ref for each in read if isinstance(each, Operand)]
            writes = [each.ref for each in wrote]
            steps.append(Step(tuple(reads + writes if operator.updates else reads), tuple(writes), after))
        self._refuse_overlap(steps)
        if arguments is None:
            places = tuple(root.number for root in self._roots if root.kind == "argument")
            outputs, single = self._unread(calls), False
        else:
            places = tuple(
                -1 - each.number if isinstance(each, SymbolicNumber) else each.root.number
                for each in arguments
            )
            outputs, single = self._returned(returned)
        numbers = tuple(each.value for each in arguments or () if isinstance(each, SymbolicNumber))
        waits = dependencies(steps)
        return Trace(self._roots, places, calls, waits, outputs, single, numbers, self.looked)

    def _memory(self, views: Sequence[ArrayView], kind: str) -> dict[Any, Ref]:
        """Roots for arrays that were used as they are; overlapping ones are views of the one that holds
        all."""
        distinct: dict[Any, ArrayView] = {}
        for view in views:
            distinct.setdefault(_key(view), view)
        order = list(distinct)
        spans = sorted(
            (*byte_range(distinct[key]), place) for place, key in enumerate(order) if distinct[key].count
        )
        cluster_of: dict[int, int] = {}
        clusters: list[tuple[int, int, list[int]]] = []
        for low, high, place in spans:
            if clusters and low < clusters[-1][1]:
                first, end, members = clusters[-1]
                members.append(place)
                clusters[-1] = (first, max(end, high), members)
            else:
                clusters.append((low, high, [place]))
            cluster_of[place] = len(clusters) - 1
        refs: dict[Any, Ref] = {}
        done: set[int] = set()
        for place, key in enumerate(order):  # roots in the order in which arrays came
            if place not in cluster_of:
                refs[key] = Ref(self._root(kind, distinct[key]).number)
                continue
            if cluster_of[place] in done:
                continue
            done.add(cluster_of[place])
            low, high, members = clusters[cluster_of[place]]
            holders = [p for p in sorted(members) if byte_range(distinct[order[p]]) == (low, high)]
            if not holders:
                shapes = ", ".join(str(distinct[order[p]].shape) for p in members[:4])
                raise ArgumentError(
                    f"recorded arrays of shapes {shapes} share memory, and none of them holds the others: "
                    "declare the whole array in rt.record(array)"
                )
            holder = distinct[order[holders[0]]]
            root = self._root(kind, holder)
            for member in members:
                refs[order[member]] = _within(root, holder, distinct[order[member]], low)
        return refs

    def _refuse_overlap(self, steps: Sequence[Step]) -> None:
        """Roots are separate memory, or the order that was found would be wrong."""
        written = {ref.root for step in steps for ref in step.writes}
        spans = []
        for root in self._roots:
            if root.kind != "result":
                found = byte_range(_as_view(root))
                spans.append((*found, root.number))
        reach, last = -1, -1
        for low, high, number in sorted(spans):
            if low < reach and (number in written or last in written):
                raise ArgumentError(
                    f"arrays {last} and {number} of the recording overlap, and one is written: pass "
                    "arrays of "
                    "their own, or use the function's argument instead of the array that it was called with"
                )
            if high > reach:
                reach, last = high, number

    def _returned(self, returned: Any) -> tuple[list[Output], bool]:
        if returned is None:
            return [], False
        single = not isinstance(returned, list | tuple)
        outputs = []
        for each in (returned,) if single else returned:
            array = each.result() if isinstance(each, RecordedTicket) else each
            if isinstance(array, Symbolic):
                outputs.append(Output(array.root.number, array.recipe, array.indices))
            elif isinstance(array, tuple):
                raise ArgumentError(
                    "a recorded function returned a ticket of several outputs: return them one by one"
                )
            else:
                outputs.append(Output(-1, WHOLE, (), array))
        return outputs, single

    def _unread(self, calls: Sequence[Call]) -> list[Output]:
        """Results that no call reads, in order."""
        read = {each.ref.root for call in calls for each in call.inputs if isinstance(each, Operand)}
        made = [
            each.ref.root
            for call in calls
            for each, new in zip(call.outputs, call.made, strict=True)
            if new and each.ref.root not in read
        ]
        return [Output(root, WHOLE, ()) for root in made]


def _key(view: ArrayView) -> Any:
    return view.address, view.shape, view.strides, view.dtype


def _as_view(root: Root) -> ArrayView:
    count = int(np.prod(root.shape, dtype=np.int64))
    contiguous = root.strides == _contiguous_strides(root.shape)
    return ArrayView(
        root.address, root.shape, root.strides, root.dtype, root.readonly, root.array, count, contiguous
    )


def _within(root: Root, holder: ArrayView, view: ArrayView, low: int) -> Ref:
    """A view as a part of the array that holds it."""
    if _key(view) == _key(holder):
        return Ref(root.number)
    from .descriptor import ITEMSIZE

    begin = view.address - holder.address
    if begin % ITEMSIZE[view.dtype]:
        raise ArgumentError(
            f"an array of shape {view.shape} begins {begin} bytes into the one that holds it, which is no "
            "multiple of its elements: copy it"
        )
    recipe = (("fixed", view.shape, view.strides, root.shape, root.strides),)
    first, last = byte_range(view)
    return Ref(root.number, recipe, (begin // ITEMSIZE[view.dtype],), first - low, last - low)


class Recording:
    """What `with rt.record() as program:` enters. The program can be called when the block has ended."""

    def __init__(
        self, runtime: Runtime, arrays: Sequence[Any], copies: int, make: Callable[..., Program]
    ) -> None:
        self._runtime, self._arrays, self._copies, self._make = runtime, arrays, copies, make
        self._recorder = Recorder(runtime)
        self._program: Program | None = None

    def __enter__(self) -> Program:
        view = self._runtime._machine.view
        self._declared = [view(array, f"arrays[{i}]") for i, array in enumerate(self._arrays)]
        self._recorder.begin()
        self._program = self._make(self._runtime, self._copies)
        return self._program

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.end()
        if error is None:
            assert self._program is not None
            self._program._begin(self._recorder.finish(None, self._declared))


def record_function(runtime: Runtime, function: Callable[..., Any], views: Sequence[Any]) -> Trace:
    """Call a function once on recorded arguments. `views`: an ArrayView for an array, the number itself else.

    Raises whatever the function raises.
    """
    recorder = Recorder(runtime)
    arguments: list[Any] = []
    known: dict[Any, Symbolic] = {}
    numbers = 0
    for view in views:
        if isinstance(view, ArrayView):
            key = _key(view) if view.count else (len(arguments),)
            if key not in known:
                known[key] = recorder.argument(view)
            arguments.append(known[key])
        else:
            arguments.append(SymbolicNumber(numbers, view))
            numbers += 1
    recorder.begin()
    try:
        returned = function(*arguments)
    finally:
        recorder.end()
    return recorder.finish(arguments, (), returned)


__all__ = ["Call", "Operand", "Output", "Recorder", "Recording", "Trace", "follow", "record_function"]
