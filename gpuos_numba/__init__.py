"""gpuos_numba: micro-operations on a GPU without launches.

The way of the data, and the order in which to read the code:

    arrays -> task (descriptor) -> host ring (host.ring) -> pump (device.pump) -> queue
           -> worker (device.worker) -> switch (device.switch) -> operator (device.operators)
           -> done words -> Ticket (host.completion)

    import numpy as np
    import gpuos_numba as gpuos

    a, b = np.ones(1024, np.float32), np.ones(1024, np.float32)
    with gpuos.Runtime(machine="cpu") as rt:
        c = rt.add(a, b).result()
"""

from __future__ import annotations

from collections.abc import Mapping

from .info import numpy_problem, running_as_program, version_of

_problem = numpy_problem(version_of("numpy")) if version_of("numpy") else None
if _problem is not None and not running_as_program():
    raise ImportError(_problem)
if _problem is None:  # otherwise __main__ says what is wrong
    from . import testing
    from .batch import Batch
    from .config import Config
    from .descriptor import DType, Status
    from .device.operators import TABLE, Operator
    from .errors import (
        ArgumentError,
        ClosedError,
        DeviceError,
        DTypeError,
        ExpressionError,
        GpuosError,
        HangError,
        IntegrityError,
        MachineError,
        QueueFull,
        TaskError,
        UnknownOperatorError,
        WaitTimeout,
    )
    from .host.completion import Ticket
    from .inject.device_operator import device_operator
    from .inject.trial import Outcome, Trial
    from .runtime import Runtime, Stats

__version__ = "0.1.0"


def operators() -> Mapping[str, Operator]:
    """The operator table by name."""
    return TABLE


__all__ = [
    "ArgumentError",
    "Batch",
    "ClosedError",
    "Config",
    "DType",
    "DTypeError",
    "DeviceError",
    "ExpressionError",
    "GpuosError",
    "HangError",
    "IntegrityError",
    "MachineError",
    "Operator",
    "Outcome",
    "QueueFull",
    "Runtime",
    "Stats",
    "Status",
    "TaskError",
    "Ticket",
    "Trial",
    "UnknownOperatorError",
    "WaitTimeout",
    "device_operator",
    "operators",
    "testing",
]
