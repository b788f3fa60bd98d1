"""Device bodies that a user writes in full: a factory arrives, an operator that is audited as such leaves.

A template bounds what an expression can do; a body can do anything that the device can, so a Runtime takes
one only with `allow_device_operators=True`. The factory is written like those in `gpuos_numba/device`:

    @gpuos.device_operator(inputs=1, spec=lambda x: x[::-1])
    def backwards(m):
        from gpuos_numba.descriptor import offset

        u64, thread_index, block_width = m.u64, m.thread_index, m.block_width
        load_task_u64, load_f32, store_f32 = m.load_task_u64, m.load_f32, m.store_f32
        X, OUT, COUNT = u64(offset("inputs")), u64(offset("outputs")), u64(offset("count"))
        ONE, FOUR, OK = u64(1), u64(4), np.int32(0)

        def body(context, task, tile, arena):
            x, out, n = load_task_u64(task + X), load_task_u64(task + OUT), load_task_u64(task + COUNT)
            i = thread_index()
            while i < n:
                store_f32(out + i * FOUR, load_f32(x + (n - ONE - i) * FOUR))
                i += block_width()
            return OK

        return body

    rt.inject(backwards)

Its source is compiled in another process, so it may use nothing from around it but `np`; it imports what it
needs. The primitives are those of `gpuos_numba.machines.base.Primitives`. All f32, contiguous operands; the
block's scratch is `arena`, `protocol.ARENA_BYTES` of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..descriptor import DType
from ..device.operators.table import Kernel, Operand, Operator, Plan, Result, refuse_dtype
from ..errors import ArgumentError
from .check import check_name
from .live import Version
from .operators import FAMILY, TOLERANCE
from .render import Rendered

if TYPE_CHECKING:
    from ..runtime import Runtime

MOST_INPUTS: Final = 4
MAX_BYTES: Final = 65536
_HEADER: Final = "# A device operator, written by a user and taken as it is.\nimport numpy as np\n\n\n"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeviceOperator:
    """A body by its source.

    Attributes:
        name: of the operator.
        source: Python text that defines `make_<name>_body(m)`.
        inputs: how many arrays it takes.
        shape: of the output, from those of the inputs; default that of the first.
        count: what the task's count is, from the output's shape; default its elements.
        spec: the truth in NumPy, which the self-test holds it to; None: it must only end.
    """

    name: str
    source: str
    inputs: int
    shape: Callable[..., Sequence[int]] | None
    count: Callable[[Sequence[int]], int] | None
    spec: Callable[..., Any] | None

    def make_operator(self, op_id: int, make: Callable[..., Any]) -> Operator:
        """The operator whose body has an id."""
        name, kernel = self.name, Kernel(op_id, f"{self.name}.body", make)

        def infer(inputs: Sequence[Operand], /) -> tuple[Result, ...]:
            for place, each in enumerate(inputs):
                if each.dtype is not DType.F32:
                    raise refuse_dtype(name, f"inputs[{place}]", each.dtype, (DType.F32,))
                if not each.contiguous:
                    raise ArgumentError(f"{name}: inputs[{place}] is not contiguous: copy it first")
            shapes = [each.shape for each in inputs]
            return (Result(tuple(self.shape(*shapes)) if self.shape else shapes[0], DType.F32),)

        def plan(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /) -> Plan:
            if not outputs[0].contiguous:
                raise ArgumentError(f"{name}: out is not contiguous: pass another, or none")
            return Plan(op_id, self.count(outputs[0].shape) if self.count else outputs[0].elements)

        return Operator(
            name,
            FAMILY,
            (self.inputs, self.inputs),
            1,
            (DType.F32,),
            f"{name}: a device operator",
            infer,
            plan,
            (kernel,),
            self.spec,
            tolerance=TOLERANCE,
            source="A user's body.",
        )

    def inject(self, rt: Runtime, replace: bool) -> Operator:
        """See `Runtime.inject`.

        Raises:
            ArgumentError: the Runtime does not allow these, or the name is taken.
            MachineError: it did not compile, link, load or pass its self-test.
        """
        from ..device.operators import TABLE
        from ..runtime import Runtime

        if not rt.config.allow_device_operators:
            raise ArgumentError(
                f"{self.name} is a device operator, which can do all that the device can: allow them with "
                "Runtime(allow_device_operators=True)"
            )
        check_name(self.name, reserved={*TABLE, *dir(Runtime)})
        rt._injected.check_free(self.name, replace)
        begin = time.perf_counter()
        version = Version(self.name, None, None, "new")
        rt._publisher.build_device(version, self)
        rt._injected.publish(version, replace, {"build": time.perf_counter() - begin})
        assert version.operator is not None
        return version.operator

    def rendered(self) -> Rendered:
        """As the compiler takes it."""
        return Rendered(self.name, self.source, ("body",), f"{self.name}.py")


def device_operator(
    *,
    inputs: int = 1,
    shape: Callable[..., Sequence[int]] | None = None,
    count: Callable[[Sequence[int]], int] | None = None,
    spec: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of a factory of a device body; `Runtime.inject` takes what it makes. See the module.

    Args:
        inputs: how many contiguous f32 arrays it takes, at most 4.
        shape, count, spec: see `DeviceOperator`.

    Raises:
        ArgumentError: the factory uses names from around it, or has no source to be read.
    """
    if not 1 <= inputs <= MOST_INPUTS:
        raise ArgumentError(f"inputs={inputs!r}: a device operator takes 1 to {MOST_INPUTS} arrays")

    def take(factory: Callable[..., Any]) -> Any:
        name = check_name(factory.__name__)
        try:
            text = textwrap.dedent(inspect.getsource(factory))
        except (OSError, TypeError) as error:
            raise ArgumentError(
                f"{name}: its source cannot be read: define it in a file or a cell"
            ) from error
        if len(text) > MAX_BYTES:
            raise ArgumentError(f"{name}: {len(text)} bytes of source: use at most {MAX_BYTES}")
        used = inspect.getclosurevars(factory)
        around = [*used.nonlocals, *(each for each in used.globals if used.globals[each] is not np)]
        if around:
            raise ArgumentError(
                f"{name} uses {around[0]!r} from around it, which the compiling process does not have: "
                "import or define it inside"
            )
        start = text.index("def " + name)
        source = _HEADER + text[start:].replace(f"def {name}(", f"def make_{name}_body(", 1)
        factory.gpuos_device_operator = DeviceOperator(  # type: ignore[attr-defined]
            name, source, inputs, shape, count, spec
        )
        return factory

    return take
