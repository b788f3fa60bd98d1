"""What an operator is: how it is called, planned, run, and held to account.

A call passes through an `Operator` on the host: `infer` says what its outputs are, `plan` says which kernel
runs, over how many elements, rows or heads, in how many tiles, and how each operand is walked. Both see
everything of an operand but its address, so their answers are remembered. A `Kernel` is one case of the
switch: the body that workers run. `spec` is the truth in NumPy that results are held to.

Nothing here knows a machine or the host.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from ...descriptor import DTYPE_NAMES, IMMEDIATE, MAX_INPUTS, MAX_OUTPUTS, SCALAR_BYTES, DType
from ...errors import ArgumentError, DTypeError
from ...machines.base import Body, Primitives
from ...shapes import Shape, Strides

# Where each family's kernels begin in the switch. Ids are stable within an ABI version.
CONTROL_IDS: Final = 0
ELEMENTWISE_IDS: Final = 1
MOVEMENT_IDS: Final = 256
REDUCE_IDS: Final = 288
MATRIX_IDS: Final = 352
ATTENTION_IDS: Final = 384
CACHE_IDS: Final = 416
INJECTED_IDS: Final = 512

FLOATS: Final = (DType.F32, DType.F16, DType.BF16)
INTS: Final = (DType.BOOL, DType.U8, DType.I8, DType.I32, DType.I64)
INDICES: Final = (DType.I32, DType.I64)


class Operand(NamedTuple):
    """An operand as planning sees it: all but its address. Hashable, so plans are remembered by it."""

    dtype: DType
    shape: Shape
    strides: Strides  # in elements
    contiguous: bool  # row-major without gaps
    immediate: bool = False  # a Python number; its dtype is BOOL, I64 or F32

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)


class Result(NamedTuple):
    """What one output is."""

    shape: Shape
    dtype: DType


class Walk(NamedTuple):
    """How one operand is walked: what the layout table holds. See `descriptor.LAYOUT`."""

    dtype: DType
    shape: Shape
    strides: Strides


class Plan(NamedTuple):
    """How a call runs. What a body reads of it, it finds in its task.

    Attributes:
        op_id: the kernel.
        count: size of the iteration space, in whatever the kernel iterates over.
        tiles: blocks that share the task.
        walks: layouts by place (4 inputs, then 2 outputs, the last of them a fifth input's), None where the
            kernel needs none of that operand; None altogether where it needs none at all. Sets
            `Flag.STRIDED`.
        scalars: packed, at most 24 bytes, 16 where there are five inputs.
        number: how a Python number among the inputs travels in its address word: F32 (bits in the low half)
            or I64.
        merge: call the kernel once more after the last tile, with tile == tiles.
        workspace: bytes of device memory, uninitialised, whose address arrives as output 1.
    """

    op_id: int
    count: int  # type: ignore[assignment]  # shadows tuple.count
    tiles: int = 1
    walks: tuple[Walk | None, ...] | None = None
    scalars: bytes = b""
    number: DType = DType.F32
    merge: bool = False
    workspace: int = 0


Infer = Callable[..., tuple[Result, ...]]
"""`infer(inputs, **parameters)`: what the outputs are. Raises ArgumentError or DTypeError.

An input that was left out is None.
"""

Planner = Callable[..., Plan | None]
"""`plan(inputs, outputs, blocks, **parameters)`: how the call runs on up to `blocks` blocks, or None where
the operator's fallback must take it.

The outputs are Operands of the shapes that `infer` gave, and of its dtypes unless the operator casts.
"""


@dataclass(frozen=True, slots=True)
class Shared:
    """A body that serves several kernels, which find out which one they are from the task's op_id."""

    symbol: str
    make: Callable[[Primitives], Body]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One case of the switch.

    Attributes:
        op_id: its number.
        name: for people.
        make: factory of its body `(context, task, tile, arena) -> status`, for this kernel alone.
        shared: where many kernels differ little, one body for all of them, which the CUDA machine links
            instead: a fraction of the code, for one more branch. The CPU machine compiles what is used.
    """

    op_id: int
    name: str
    make: Callable[[Primitives], Body]
    shared: Shared | None = None

    @property
    def symbol(self) -> str:
        """Name of the compiled body on the CUDA machine."""
        return self.shared.symbol if self.shared else f"gpuos_op_{self.op_id}_{self.name.replace('.', '_')}"


REQUIRED: Final = object()
"""Default of a parameter that has none."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A keyword of a call.

    Attributes:
        name: as the user writes it.
        kind: "float", "int", "bool", "number" (stays the int or float that it is), "axes" (None, an int, or
            ints; arrives as None or a tuple), "dtype" (a name, a NumPy dtype or a torch dtype; arrives as
            DType or None), or a tuple of strings, of which it is one.
        default: taken where it is left out; REQUIRED: it may not be.
    """

    name: str
    kind: str | tuple[str, ...] = "float"
    default: Any = REQUIRED

    def read(self, value: Any, operator: str) -> Any:
        """The value as `infer` and `plan` take it. Raises ArgumentError."""
        kind = self.kind
        try:
            if isinstance(kind, tuple):
                if value in kind:
                    return value
                raise ValueError
            if value is None and self.default is None:
                return None
            if kind == "float":
                return float(value)
            if kind == "number":
                value = value.item() if isinstance(value, np.generic) else value
                if isinstance(value, bool | int | float):
                    return value
                raise TypeError
            if kind == "bool":
                if value in (0, 1):
                    return bool(value)
                raise ValueError
            if kind == "int":
                return value.__index__()
            if kind == "axes":
                return (
                    (value.__index__(),)
                    if hasattr(value, "__index__")
                    else tuple(axis.__index__() for axis in value)
                )
            if kind == "dtype":
                return read_dtype(value)
        except (TypeError, ValueError, AttributeError, OverflowError):
            pass
        wanted = f"one of {list(kind)}" if isinstance(kind, tuple) else f"of kind {kind}"
        raise ArgumentError(f"{operator}: {self.name}={value!r} is not {wanted}")


def read_dtype(value: Any) -> DType:
    """A DType from its name or from anything that NumPy, torch or ml_dtypes call a dtype."""
    if isinstance(value, DType):
        return value
    name = str(value).removeprefix("torch.") if not isinstance(value, str | type) else value
    if isinstance(name, type):
        name = np.dtype(name).name
    for code, known in DTYPE_NAMES.items():
        if name == known:
            return code
    raise ValueError(f"dtype {value!r}")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may be from its spec: `abs(result - spec) <= atol + rtol * abs(spec)`.

    By output dtype; integers and bools are exact. f16 and bf16 add one rounding to their format.
    """

    f32: float = 0.0
    f16: float = 2.0**-10
    bf16: float = 2.0**-7
    atol: float = 0.0

    def of(self, dtype: DType) -> tuple[float, float]:
        """(rtol, atol) for an output dtype."""
        rtol = {DType.F32: self.f32, DType.F16: self.f16, DType.BF16: self.bf16}.get(dtype, 0.0)
        if dtype not in FLOATS:
            return 0.0, 0.0
        # The smallest of a format: what one rounding is where it has no relative precision.
        least = {DType.F16: 2.0**-24, DType.BF16: 2.0**-133}.get(dtype, 0.0)
        return rtol, self.atol + (least if rtol else 0.0)


EXACT: Final = Tolerance()


class Draw(Protocol):
    """Where examples come from: a hypothesis strategy in tests, a NumPy generator elsewhere."""

    def integer(self, low: int, high: int) -> int:
        """low <= result <= high."""

    def choice(self, options: Sequence[Any]) -> Any: ...

    def shape(self, min_dims: int = 0, max_dims: int = 4, max_side: int = 9) -> Shape:
        """Any shape, zero-size ones too."""

    def broadcastable(self, shape: Shape) -> Shape:
        """A shape that broadcasts to `shape`."""

    def array(self, shape: Shape, dtype: DType, values: str = "any") -> np.ndarray[Any, Any]:
        """An array, sometimes a strided, reversed or broadcast view.

        values: "any" (nan, inf, -0.0, denormals and extremes among ordinary ones), "finite" (ordinary ones
        about 1), "positive", "small" (small integers), or for integer dtypes "any" or "small".
        """


Example = tuple[list[Any], dict[str, Any]]
"""Inputs and parameters of a valid call; of an operator that updates, `out` is among the parameters."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Operator:
    """One operator.

    Attributes:
        name: as in `rt.submit(name, ...)` and `rt.<name>`.
        family: for people.
        inputs: fewest and most arrays it reads, at most five; those after the fewest may also be None. A
            fifth excludes a second output, see `descriptor.TASK`.
        outputs: how many arrays it writes.
        dtypes: element types it takes, for people; `infer` decides.
        formula: what one element, row or matrix becomes.
        infer, plan: see there.
        kernels: its cases of the switch.
        spec: the same in NumPy: `spec(*inputs, **parameters)`, in f64 or exact; one array or a tuple.
        parameters: its keywords.
        tolerance: against `spec`.
        same_ok: which inputs an output may be exactly: each of its elements depends on that element alone.
        tiling: when and how it is shared by blocks, for people.
        cost: rough work of a call, for people and for routing: bytes moved and operations.
        source: where the formula is from.
        example: a valid call, for tests.
        numbers: whether Python numbers may stand for inputs.
        like_out: `out` is needed and says what the output is; `infer` is not asked.
        updates: `out` is needed, and is read as well as written: what is not written stays. `infer` is not
            asked, `plan` checks shapes and dtypes, and `spec` takes the old contents as `out=` and returns
            the new ones.
        casts: `out` may have another dtype that the result may be cast to, as PyTorch has it: not from
            float to integer, nor from either to bool.
        plain: contiguous f32 operands of one shape need no more than the first kernel and their addresses.
        leading: arrays that the Runtime puts ahead of the caller's inputs; `infer` and `plan` see them too.
        fallback: takes the calls for which `plan` answers None.
    """

    name: str
    family: str
    inputs: tuple[int, int]
    outputs: int
    dtypes: tuple[DType, ...]
    formula: str
    infer: Infer
    plan: Planner
    kernels: tuple[Kernel, ...]
    spec: Callable[..., Any] | None
    parameters: tuple[Parameter, ...] = ()
    tolerance: Tolerance = EXACT
    same_ok: tuple[int, ...] = ()
    tiling: str = "one block"
    cost: str = ""
    source: str = ""
    example: Callable[[Draw], Example] | None = None
    numbers: bool = False
    like_out: bool = False
    updates: bool = False
    casts: bool = False
    plain: bool = False
    leading: tuple[Any, ...] = ()
    fallback: Operator | None = None
    _by_name: Mapping[str, Parameter] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {each.name: each for each in self.parameters})

    def read_parameters(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters by name, defaults filled in. Raises ArgumentError."""
        for name in given:
            if name not in self._by_name:
                raise ArgumentError(
                    f"{self.name} has no parameter {name!r}: it takes {[p.name for p in self.parameters]}"
                )
        values = {}
        for parameter in self.parameters:
            if parameter.name in given:
                values[parameter.name] = parameter.read(given[parameter.name], self.name)
            elif parameter.default is REQUIRED:
                raise ArgumentError(f"{self.name} needs the parameter {parameter.name!r}")
            else:
                values[parameter.name] = parameter.default
        return values


def pack(format: str, *values: Any) -> bytes:
    """Scalars as a task carries them, little endian; at most 24 bytes."""
    packed = struct.pack("<" + format, *values)
    assert len(packed) <= SCALAR_BYTES
    return packed


def pack_dtypes(inputs: Sequence[Operand | None], outputs: Sequence[Operand]) -> int:
    """`TASK["dtypes"]`: a nibble for each of 4 inputs and 2 outputs; a fifth input has that of output 1.

    An absent input is the number 0.
    """
    word = 0
    for place, operand in enumerate([*inputs, *[None] * (MAX_INPUTS - len(inputs))]):
        place = place if place < MAX_INPUTS else MAX_INPUTS + MAX_OUTPUTS - 1
        word |= (IMMEDIATE if operand is None or operand.immediate else int(operand.dtype)) << 4 * place
    for place, operand in enumerate(outputs):
        word |= int(operand.dtype) << 4 * (MAX_INPUTS + place)
    return word


def refuse_dtype(operator: str, name: str, dtype: DType, wanted: Sequence[DType]) -> DTypeError:
    """The error that says what an operator takes instead."""
    takes = " or ".join(DTYPE_NAMES[each] for each in wanted)
    return DTypeError(f"{name} has dtype {DTYPE_NAMES[dtype]}, {operator} takes {takes}: convert it first")


def castable(source: DType, target: DType) -> bool:
    """Whether PyTorch lets a result of `source` be written to an output of `target`."""

    def rank(dtype: DType) -> int:
        return 0 if dtype is DType.BOOL else 1 if dtype in INTS else 2

    return rank(source) <= rank(target)


def infer_nothing(inputs: Sequence[Operand | None], /, **parameters: Any) -> tuple[Result, ...]:
    """`infer` of operators that are not asked."""
    return ()


def describe(operator: Operator) -> str:
    """A docstring for `rt.<name>`."""
    fewest, most = operator.inputs
    count = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    lines = [
        f"{operator.formula}",
        "",
        f"Takes {count} input(s) of {', '.join(DTYPE_NAMES[d] for d in operator.dtypes)}.",
    ]
    for parameter in operator.parameters:
        kind = parameter.kind if isinstance(parameter.kind, str) else f"one of {list(parameter.kind)}"
        default = "" if parameter.default is REQUIRED else f", default {parameter.default!r}"
        lines.append(f"{parameter.name}: {kind}{default}.")
    if operator.updates:
        lines.append("out is needed, and updated where it lies.")
    lines += [f"Tiling: {operator.tiling}. {operator.cost}", operator.source, "See `Runtime.submit`."]
    return "\n".join(line for line in lines if line or line == "")
