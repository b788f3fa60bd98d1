"""What a call asks for arrives; what its task needs leaves: views, outputs, the descriptor's fields.

Everything is refused here that cannot run. Nothing is enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from .descriptor import (
    DTYPE_NAMES,
    FIFTH_INPUT,
    MASK_64,
    MAX_INPUTS,
    MAX_OUTPUTS,
    SCALAR_BYTES,
    DType,
    Flag,
)
from .device.operators import Operator
from .device.operators.table import Operand, Plan, Result, castable, pack_dtypes
from .errors import ArgumentError, DTypeError
from .host.arrays import ArrayView, empty_like_on, validate_output
from .machines.base import Machine
from .shapes import Shape

_LAST_OUTPUT: Final = 3 + MAX_INPUTS + MAX_OUTPUTS
"""Where a descriptor's fields have the address of the second output."""
_PLAIN_VALUES: Final = frozenset((int, bool, str, type(None)))


def _items(given: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Keywords as a key sees them: 0, 0.0, -0.0 and False are not the same. Raises TypeError for others."""
    for name, value in given.items():
        if type(value) in _PLAIN_VALUES:
            yield name, value, type(value)
        elif type(value) is float or type(value) is tuple:
            yield name, repr(value), type(value)
        else:
            yield name, str(value), type(value), hash(value)


def call_key(operator: Operator, out: Any, given: dict[str, Any]) -> Any:
    """What `Calls.ways` knows a call by. Raises TypeError where a keyword is of a kind that makes no key."""
    return (operator, out is None, *_items(given)) if given or out is None else operator


def planned(view: Any) -> Operand | None:
    """What planning sees of an input or output."""
    if isinstance(view, ArrayView):
        return Operand(view.dtype, view.shape, view.strides, view.contiguous)
    if view is None:
        return None
    dtype = DType.BOOL if isinstance(view, bool) else DType.I64 if isinstance(view, int) else DType.F32
    return Operand(dtype, (), (), True, True)


def written(operator: Operator, head: list[Any]) -> int:
    """How many of a call's views are written, at the end of them: outputs, and the workspace."""
    workspace = operator.outputs < MAX_OUTPUTS and head[_LAST_OUTPUT] != 0
    return operator.outputs + workspace


def immediate(value: float, number: DType, operator: str) -> int:
    """A Python number as the word that travels in place of an address."""
    if number is DType.F32:
        try:
            return int(np.float32(value).view(np.uint32))
        except OverflowError as error:
            raise ArgumentError(f"{operator}: {value!r} does not fit a float") from error
    if not -(1 << 63) <= value < 1 << 63:
        raise ArgumentError(f"{operator}: {value!r} does not fit 64 bits")
    return int(value) & MASK_64


@lru_cache(maxsize=8192)
def infer(operator: Operator, operands: tuple[Any, ...], items: tuple[Any, ...]) -> tuple[Result, ...]:
    """(shape, dtype) of each output."""
    return operator.infer(operands, **dict(items))


@lru_cache(maxsize=8192)
def _plan(
    operator: Operator,
    operands: tuple[Any, ...],
    results: tuple[Any, ...],
    blocks: int,
    items: tuple[Any, ...],
) -> tuple[Plan | None, int]:
    """What `plan_call` says, remembered: addresses do not matter."""
    return operator.plan(operands, results, blocks, **dict(items)), pack_dtypes(operands, results)


def plan_call(
    operator: Operator,
    operands: tuple[Any, ...],
    results: tuple[Any, ...],
    blocks: int,
    items: tuple[Any, ...],
) -> tuple[Plan | None, int]:
    """A call's plan for at most `blocks` blocks, None where the fallback must take it; its packed dtypes."""
    # Equal keys must mean equal plans, and 0.0 == -0.0.
    negative_zero = any(value == 0 and str(value) == "-0.0" for _, value in items)
    plan_of = _plan.__wrapped__ if negative_zero else _plan
    return plan_of(operator, operands, results, blocks, items)


def check_output(
    operator: Operator, given: ArrayView | Operand, shape: Shape, dtype: DType, name: str, remedy: str
) -> None:
    """Refuse an output of another shape or dtype than `infer` says. `remedy` has {} for which of them."""
    if given.dtype != dtype and not (operator.casts and castable(dtype, given.dtype)):
        raise DTypeError(
            f"{name} has dtype {DTYPE_NAMES[given.dtype]}, {operator.name} of these inputs gives "
            f"{DTYPE_NAMES[dtype]}: {remedy.format('dtype')}"
        )
    if given.shape != shape:
        raise ArgumentError(
            f"{name} has shape {given.shape}, {operator.name} of these inputs has shape {shape}: "
            f"{remedy.format('shape')}"
        )


def forget_plans() -> None:
    """Let go of operators that nobody else holds."""
    infer.cache_clear()
    _plan.cache_clear()


class Checker:
    """The checks of one Runtime.

    Args:
        machine: where the tasks are to run.
        capacity: the ring's, and so the most tiles of a task.
        view: what makes an `ArrayView` of (array, name for messages); by default the machine's own.
    """

    def __init__(
        self, machine: Machine, capacity: int, view: Callable[[Any, str], ArrayView] | None = None
    ) -> None:
        self._machine, self._capacity = machine, capacity
        self._view = view or machine.view
        self._prepared: set[int] = set()  # kernels that were used

    def check(
        self, operator: Operator, inputs: Sequence[Any], out: Any, given: dict[str, Any]
    ) -> tuple[list[ArrayView], Any, list[Any], Any]:
        """Views of all memory, the output, the descriptor's fields, and the walks where there are any."""
        sources = self.sources(operator, inputs)
        operands = tuple(planned(source) for source in sources)
        items = tuple(operator.read_parameters(given).items()) if operator.parameters or given else ()
        targets, out = self.targets(operator, inputs, sources, operands, items, out)
        results = tuple(planned(target) for target in targets)
        plan, dtypes = plan_call(operator, operands, results, self._machine.max_workers, items)
        if plan is None:
            assert operator.fallback is not None
            return self.check(operator.fallback, inputs, out, given)
        self.prepare(plan.op_id)

        views = [*(source for source in sources if isinstance(source, ArrayView)), *targets]
        addresses = [0] * (MAX_INPUTS + MAX_OUTPUTS)
        scalars = plan.scalars.ljust(SCALAR_BYTES, b"\0")
        for place, source in enumerate(sources):
            if place == MAX_INPUTS:
                scalars = scalars[:FIFTH_INPUT] + source.address.to_bytes(8, "little")
            elif isinstance(source, ArrayView):
                addresses[place] = source.address
            elif source is not None:
                addresses[place] = immediate(source, plan.number, operator.name)
        for place, target in enumerate(targets):
            addresses[MAX_INPUTS + place] = target.address
        if plan.workspace:
            workspace = empty_like_on(self._machine.name, views[0].owner, (plan.workspace,), DType.U8)
            views.append(self._view(workspace, "workspace"))
            addresses[-1] = views[-1].address
        flags = (Flag.STRIDED if plan.walks else 0) | (Flag.MERGE if plan.merge else 0)
        tiles = min(plan.tiles, self._capacity)
        head = [plan.op_id, int(flags), 1, tiles, *addresses, plan.count, 0, 0, *[0] * 6, dtypes, scalars]
        return views, out, head, plan.walks

    def sources(self, operator: Operator, inputs: Sequence[Any]) -> list[Any]:
        """Views of the inputs, those that lead first. ArgumentError where their count is wrong."""
        fewest, most = operator.inputs
        if not fewest <= len(inputs) <= most:
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            raise ArgumentError(
                f"{operator.name} takes {wanted} input(s), {len(inputs)} given: {operator.formula}"
            )
        led = [self._view(each, "its program") for each in operator.leading]
        return led + [self._source(operator, each, f"inputs[{i}]", i) for i, each in enumerate(inputs)]

    def _source(self, operator: Operator, array: Any, name: str, place: int) -> Any:
        """An input as a view, a Python number, or None where it was left out."""
        if array is None and place >= operator.inputs[0]:
            return None
        if isinstance(array, bool | int | float | np.generic) and operator.numbers:
            return array.item() if isinstance(array, np.generic) else array
        return self._view(array, name)

    def targets(
        self,
        operator: Operator,
        inputs: Sequence[Any],
        sources: list[Any],
        operands: tuple[Any, ...],
        items: tuple[Any, ...],
        out: Any,
    ) -> tuple[list[ArrayView], Any]:
        """Views of the outputs, allocated where none was given, and what the ticket hands out."""
        view = self._view
        if operator.outputs == 0:
            if out is not None:
                raise ArgumentError(f"{operator.name} writes nothing, but out={type(out).__name__} was given")
            return [], None
        if operator.like_out:
            if out is None:
                raise ArgumentError(f"{operator.name} has no input to take a shape from: pass out=")
            target = view(out, "out")
            validate_output(target, [], False, "out")
            return [target], out
        if operator.outputs == 1:
            outs, names = [out], ["out"]
        else:
            names = [f"out[{index}]" for index in range(operator.outputs)]
            if out is not None and not isinstance(out, list | tuple):
                raise ArgumentError(
                    f"{operator.name} writes {operator.outputs} arrays, out is a {type(out).__name__}: "
                    "pass a tuple of arrays"
                )
            outs = list(out) if out is not None else [None] * operator.outputs
            if len(outs) != operator.outputs:
                raise ArgumentError(f"{operator.name} writes {operator.outputs} arrays, out has {len(outs)}")
        targets: list[ArrayView] = []
        if operator.updates:
            for each, name in zip(outs, names, strict=True):
                if each is None:
                    raise ArgumentError(f"{operator.name} updates {name} where it lies: pass {name}=")
                target = view(each, name)
                self._validate(operator, target, name, sources, targets, names)
                targets.append(target)
            return targets, outs[0] if operator.outputs == 1 else tuple(outs)
        wanted = infer(operator, operands, items)
        for index, ((shape, dtype), name) in enumerate(zip(wanted, names, strict=True)):
            if outs[index] is None:
                like = next((array for array in inputs if hasattr(array, "shape")), None)
                if like is None:
                    raise ArgumentError(f"{operator.name} has no array to allocate like: pass {name}=")
                outs[index] = empty_like_on(self._machine.name, like, shape, dtype)
                targets.append(view(outs[index], name))
                continue
            target = view(outs[index], name)
            check_output(operator, target, shape, dtype, name, "pass an out of that {}, or none")
            self._validate(operator, target, name, sources, targets, names)
            targets.append(target)
        return targets, outs[0] if operator.outputs == 1 else tuple(outs)

    @staticmethod
    def _validate(
        operator: Operator,
        target: ArrayView,
        name: str,
        sources: Sequence[Any],
        earlier: Sequence[ArrayView],
        names: Sequence[str],
    ) -> None:
        """Refuse an output that cannot be written, or that shares memory with an input or another output."""
        validate_output(target, [], False, name)
        for place, source in enumerate(sources):
            if isinstance(source, ArrayView):
                same_ok, number = place in operator.same_ok, place - len(operator.leading)
                validate_output(target, [source], same_ok, name, [f"inputs[{number}]"])
        for other, other_name in zip(earlier, names, strict=False):
            validate_output(target, [other], False, name, [other_name])

    def prepare(self, op_id: int) -> None:
        """Have the kernel compiled, where the machine compiles what is used."""
        if op_id not in self._prepared:
            self._machine.prepare(op_id)
            self._prepared.add(op_id)
