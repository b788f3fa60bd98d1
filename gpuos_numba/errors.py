"""Everything that can go wrong, as exceptions that name the value and the remedy.

The device only ever reports a status byte; `host.completion` turns it into one of these at the boundary.
"""

from __future__ import annotations


class GpuosError(Exception):
    """Base of all errors that gpuos_numba raises on purpose."""


class ArgumentError(GpuosError, ValueError):
    """An argument cannot be used: wrong shape, layout, overlap or scalar. Nothing was enqueued."""


class DTypeError(ArgumentError, TypeError):
    """An array's element type is not one that the operator takes. Nothing was enqueued."""


class DeviceError(ArgumentError):
    """An array lives where this machine cannot reach it. Nothing was enqueued."""


class ExpressionError(ArgumentError):
    """Text given for injection is not an expression of the language. It was not evaluated.

    Attributes:
        line, column: where, both from 1.
        remedy: what to write instead.
    """

    def __init__(self, message: str, *, line: int, column: int, remedy: str) -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.remedy = remedy


class IntegrityError(GpuosError, PermissionError):
    """A key file, a cache folder or an audit log is not as its owner left it, or others may change it."""


class UnknownOperatorError(GpuosError, LookupError):
    """No operator of that name is in the table. Nothing was enqueued."""


class ClosedError(GpuosError, RuntimeError):
    """The Runtime was closed, or belongs to another process (after `os.fork`)."""


class QueueFull(GpuosError, TimeoutError):
    """The ring stayed full until the deadline. Nothing of the refused part was enqueued."""


class WaitTimeout(GpuosError, TimeoutError):
    """A task had not completed at the deadline; it is still queued and may complete later."""


class HangError(GpuosError, RuntimeError):
    """No task completed within `Config.deadline_s`; the message carries a dump of the machine's state."""


class TaskError(GpuosError, RuntimeError):
    """A task ended with a status other than OK.

    Attributes:
        operator: its name.
        position: its 64-bit position in the ring.
        status: the `descriptor.Status` it ended with.
    """

    def __init__(self, message: str, *, operator: str, position: int, status: int) -> None:
        super().__init__(message)
        self.operator = operator
        self.position = position
        self.status = status


class MachineError(GpuosError, RuntimeError):
    """The machine cannot run here: no GPU, no driver, a missing compiler, or a failed driver call."""
