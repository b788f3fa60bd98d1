"""Which driver calls loading, swapping and unloading are made of. The driver is a stand-in: needs no GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from gpuos_numba.errors import MachineError
from gpuos_numba.machines.cuda import CudaMachine, _Generation

LOAD, KERNELS, FUNCTION, UNLOAD = (
    "cuLibraryLoadData",
    "cuLibraryEnumerateKernels",
    "cuKernelGetFunction",
    "cuLibraryUnload",
)


class StandIn:
    """A driver that notes what it is asked for; each answer is a number of its own."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.unloaded: list[int] = []
        self.refuses = ""
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if not name.startswith("cuCtx"):
                self.calls.append(name)
            if name == UNLOAD:
                self.unloaded.append(arguments[0])
                return (0,)
            if name == self.refuses:
                return 999, None
            number = next(self._numbers)
            return 0, [number] if name == KERNELS else number

        return call

    def took(self) -> list[str]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


def make_machine(lazy: bool = True) -> Any:
    machine: Any = CudaMachine.__new__(CudaMachine)
    machine._driver, machine._context_handle, machine._lazy = StandIn(), 0, lazy
    machine._unused = []
    machine._gpu = SimpleNamespace(retired=[], open={machine})
    machine.arrays = SimpleNamespace(launch={})
    machine._activate(machine._ready(_Generation(b"the first")), None)
    machine._driver.took()
    return machine


def test_all_but_the_function_is_asked_for_before_the_park() -> None:
    machine = make_machine()
    opened = machine.open(b"next")
    assert machine._driver.took() == [LOAD] and machine._active.cubin == b"the first"
    machine.load(opened)
    assert machine._driver.took() == [KERNELS, FUNCTION]
    assert machine._active is opened and machine._standby.cubin == b"the first" and machine.unused == 0
    assert machine.arrays.launch["kernel"] == opened.function.value


def test_where_modules_are_loaded_eagerly_nothing_is_before_the_park() -> None:
    machine = make_machine(lazy=False)
    opened = machine.open(b"next")
    assert machine._driver.took() == []
    machine.load(opened)
    assert machine._driver.took() == [LOAD, KERNELS, FUNCTION] and machine._active is opened


def test_a_swap_asks_the_driver_for_nothing() -> None:
    machine = make_machine()
    with pytest.raises(MachineError, match="no standby"):
        machine.swap()
    machine.load(machine.open(b"next"))
    machine._driver.took()
    for cubin in (b"the first", b"next"):
        machine.swap()
        assert machine._active.cubin == cubin
        assert machine.arrays.launch["kernel"] == machine._active.function.value
    assert machine._driver.took() == []


def test_what_was_replaced_is_unloaded_the_oldest_first_when_it_is_asked_for() -> None:
    machine = make_machine()
    libraries = [machine._active.library]
    for number in range(4):
        machine.load(machine.open(b"%d" % number))
        libraries.append(machine._active.library)
    assert machine.unused == 3 and UNLOAD not in machine._driver.took()
    while machine.unused:
        machine.discard()
    assert machine._driver.unloaded == libraries[:3]
    assert [machine._standby.library, machine._active.library] == libraries[3:]


@pytest.mark.parametrize("refused", [KERNELS, FUNCTION])
@pytest.mark.parametrize("lazy", [True, False])
def test_what_cannot_be_loaded_changes_nothing_and_is_unloaded_later(refused: str, lazy: bool) -> None:
    machine = make_machine(lazy)
    machine.load(machine.open(b"next"))
    before = machine._active, machine._standby, machine.arrays.launch["kernel"]
    opened = machine.open(b"bad")
    machine._driver.refuses = refused
    with pytest.raises(MachineError):
        machine.load(opened)
    assert (machine._active, machine._standby, machine.arrays.launch["kernel"]) == before
    machine._driver.refuses = ""
    assert machine.unused == 1
    machine.discard()
    assert machine._driver.unloaded == [opened.library] and machine.unused == 0
    machine.load(machine.open(b"good"))
    assert machine._active.cubin == b"good"


def test_what_the_driver_does_not_take_is_never_opened() -> None:
    machine = make_machine()
    machine._driver.refuses = LOAD
    with pytest.raises(MachineError):
        machine.open(b"bad")
    assert machine.unused == 0 and machine._active.cubin == b"the first"
