"""From a version that is asked for to one that runs compiled: compile, link, load, test, take over.

    compile    in another process, or from the cache (compile.py)
    link       a generation: every body that anybody may still run, and the new ones
    open       hand it to the driver, while the executor runs
    load       while the executor is parked; what ran before stays loaded as the standby generation
    test       the new operator, before its name means it (selftest.py)
    take over  the next task of the name runs it (live.py)

Each step may fail, and then the running generation is as it was. Ids are given out once and never to another
body, so a task means the same in every generation that has its id, and an id is left out only when nobody
holds its operator any more: not a name, a user, a batch, the history, nor a task under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..device.operators.table import INJECTED_IDS, Operator
from ..errors import ClosedError, GpuosError, MachineError
from ..host.lease import Keeper
from ..machines.base import Code, Machine
from .audit import Event
from .compile import Compiled, Compiler, server
from .live import Injected, Version
from .operators import make_operator
from .render import load, render
from .request import Request
from .selftest import self_test

if TYPE_CHECKING:
    from ..runtime import Runtime
    from .device_operator import DeviceOperator

QUIET_S: Final = 0.05
"""A version that is replaced sooner than this is never compiled."""
NATURAL_S: Final = 0.1
"""So long a takeover in the background waits for the executor to park by itself."""
PARK_S: Final = 10.0
UNUSED: Final = 16
"""So many replaced generations, of some megabytes, stay until one is loaded while nothing runs: to unload is
a pause too."""


class Publisher:
    """What a Runtime compiles. Its thread starts with the first version that nobody waits for."""

    def __init__(self, runtime: Runtime, machine: Machine, keeper: Keeper, injected: Injected) -> None:
        self._runtime = weakref.ref(runtime)
        self._machine, self._keeper, self._injected = machine, keeper, injected
        self._made_compiler: Compiler | None = None
        self._building = threading.Lock()  # one version at a time, compiling included
        self._installing = threading.Lock()  # loading; never held while compiling
        self._wake = threading.Condition()
        self._waiting: deque[tuple[float, Version]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._next_id = INJECTED_IDS
        self._bodies: dict[int, tuple[tuple[weakref.ref[Operator], ...], Code]] = {}
        self._known: weakref.WeakValueDictionary[str, Operator] = weakref.WeakValueDictionary()
        self._worker: Code | None = None  # with bodies inlined, where there is one
        self.loads = 0
        """Generations that were loaded."""

    @property
    def _compiler(self) -> Compiler:
        if self._made_compiler is None:
            self._made_compiler = Compiler(self._machine.target, self._machine.threads)
        return self._made_compiler

    # --- asking ---

    def later(self, version: Version) -> None:
        """Compile a version in the background, if it is still current in a while."""
        server().start()
        with self._wake:
            if self._closed:
                return
            self._waiting.append((time.monotonic() + QUIET_S, version))
            if self._thread is None:
                self._thread = threading.Thread(target=_keep_publishing, args=(weakref.ref(self),),
                                                name="gpuos-publisher", daemon=True)  # fmt: skip
                self._thread.start()
            self._wake.notify()

    def stop(self) -> None:
        """Load nothing from now on. What is being compiled is given up."""
        with self._wake:
            self._closed = True
            for _, version in self._waiting:
                version.done.set()
            self._waiting.clear()
            self._wake.notify_all()
        with self._installing:
            pass

    def _next(self, wait_s: float) -> Version | None:
        """A version whose time has come."""
        with self._wake:
            if not self._waiting and not self._closed:
                self._wake.wait(wait_s)
            if not self._waiting:
                return None
            left = self._waiting[0][0] - time.monotonic()
            if left > 0:
                self._wake.wait(left)
            if self._waiting and self._waiting[0][0] <= time.monotonic():
                return self._waiting.popleft()[1]
        return None

    def turn(self) -> bool:
        """One turn of the thread; False where it is to end."""
        version = self._next(1.0)
        if version is not None:
            try:
                if self._injected.is_current(version):
                    self.build(version, now=False)
            except ClosedError:
                pass
            except (GpuosError, OSError) as error:
                version.error = error
                self._injected.note(Event("compile", version.name, outcome=str(error)[:300]))
                warnings.warn(f"{version.name} stays interpreted: {error}", RuntimeWarning, stacklevel=2)
            finally:
                version.done.set()
        return not self._closed

    # --- building ---

    def build(self, version: Version, now: bool) -> None:
        """Compile a version and let it take over; now: do not wait for a park that comes by itself, and leave
        the rarer bodies of an element-wise operator to the background.

        Raises:
            MachineError: a step failed; what ran before runs on.
            ClosedError: the Runtime was closed meanwhile.
        """
        with self._building:
            if version.stage in ("compiled", "inlined"):
                return
            request = version.request
            assert request is not None
            text = request.to_json()
            known = self._known.get(text)
            if known is not None:
                self._injected.upgrade(version, known, "compiled")
                version.done.set()
                return
            begin = time.perf_counter()
            rendered = render(request)
            rendering_s = time.perf_counter() - begin
            interpreted = version.operator
            missing = self._compiler.missing(rendered) if interpreted is not None else []
            variants = self._compiler.variants(rendered)
            stages = [variants]
            if "plain" in variants and missing not in ([], ["plain"]) and version.stage != "partly":
                stages.insert(0, ("plain",))
            # The same ids whether or not there are two stages: what was linked before is linked again.
            version.first_id = version.first_id or self._take_ids(len(variants))
            for stage in stages:
                self._expect(version.first_id, self._compiler.symbols(rendered, stage))
                compiled = self._compiler.compile(rendered, request.arity, stage)
                compiled.timings_s["render"] = rendering_s
                factories = {name: make for name, make in load(rendered).items() if name in stage}
                whole = stage == variants
                operator = make_operator(request, factories, version.first_id)
                if interpreted is not None:
                    fallback = None if whole else interpreted
                    operator = dataclasses.replace(operator, formula=interpreted.formula, fallback=fallback)
                self.go_live(version, operator, compiled, now, "compiled" if whole else "partly")
                if whole:
                    self._known[text] = operator
                    version.done.set()
                elif now:
                    self.later(version)
                    return

    def whole(self, operator: Operator) -> Operator:
        """An operator that takes every call by itself, for what is planned anew with operands of later.

        One that is compiled for the commonest operands only is compiled for the others now, which takes a
        compiler's time; where that fails, its interpreter takes all.
        """
        if operator.fallback is None:
            return operator
        version = self._injected.version_of(operator)
        if version is not None:
            try:
                self.build(version, now=True)
            except ClosedError:
                raise
            except (GpuosError, OSError) as error:
                warnings.warn(f"{version.name} stays interpreted here: {error}", RuntimeWarning, stacklevel=2)
            assert version.operator is not None
            operator = version.operator
        return operator.fallback or operator

    def build_device(self, version: Version, device: DeviceOperator) -> None:
        """The same of a body that a user wrote. Raises as `build` does."""
        with self._building:
            rendered = device.rendered()
            version.first_id = self._take_ids(1)
            variants = self._compiler.variants(rendered)
            self._expect(version.first_id, self._compiler.symbols(rendered, variants))
            compiled = self._compiler.compile(rendered, device.inputs)

            def make(m: Any) -> Any:
                return load(rendered)["body"](m)

            operator = device.make_operator(version.first_id, make)
            self.go_live(version, operator, compiled, True, "compiled")
            version.done.set()

    def _take_ids(self, count: int) -> int:
        first = self._next_id
        self._next_id += count
        return first

    def _alive(self) -> dict[int, Code]:
        """Bodies that somebody can still run."""
        return {
            at: code for at, (refs, code) in self._bodies.items() if any(ref() is not None for ref in refs)
        }

    def _expect(self, first_id: int, symbols: Sequence[str]) -> None:
        """Let the machine begin what linking will need, while new bodies are compiled."""
        alive = {at: code.symbol for at, code in self._alive().items()}
        self._machine.expect({**alive, **dict(enumerate(symbols, first_id))})

    def go_live(
        self, version: Version, operator: Operator, compiled: Compiled, now: bool, stage: str
    ) -> None:
        """Load, test and publish an operator whose kernels have the compiled bodies, in order."""
        codes = {
            kernel.op_id: code for kernel, code in zip(operator.kernels, compiled.codes.values(), strict=True)
        }
        self._install(operator, codes, now, compiled.timings_s)
        begin = time.perf_counter()
        runtime = self._runtime()
        if runtime is None:
            raise ClosedError("the Runtime is gone")
        try:
            self_test(runtime, self._machine, operator)
        except GpuosError:
            self._withdraw(codes)
            raise
        finally:
            del runtime
        compiled.timings_s["test"] = time.perf_counter() - begin
        template = version.request.template if version.request else "device"
        event = Event("compile", version.name, template, compiled.key, compiled.signature,
                      timings_s=compiled.timings_s, detail=stage)  # fmt: skip
        self._injected.upgrade(version, operator, stage, event)

    def _install(
        self, operator: Operator, codes: Mapping[int, Code], now: bool, timings_s: dict[str, float]
    ) -> None:
        from ..checking import forget_plans

        def install() -> None:
            begin = time.perf_counter()
            forget_plans()
            held = [[ref() for ref in refs] for refs, _ in self._bodies.values()]  # until they are loaded
            alive = self._alive()
            generation = self._machine.link({**alive, **codes}, self._worker)
            timings_s["link"] = time.perf_counter() - begin
            self._load(generation, now, timings_s)
            self._bodies = {at: self._bodies[at] for at in alive}
            for op_id, code in codes.items():
                others, _ = self._bodies.get(op_id, ((), code))
                self._bodies[op_id] = ((*others, weakref.ref(operator)), code)
            del held

        self._alone(install)

    def _alone(self, do: Callable[[], object]) -> None:
        """Call `do` while nobody else loads, and keep the Runtime alive as long.

        The garbage collector may come on this thread, or on one whose launch lock this one waits for: if it
        ended the Runtime there, `stop` would wait for ever.
        """
        runtime = self._runtime()
        if runtime is None:
            raise ClosedError("the Runtime is gone")
        try:
            with self._installing:
                do()
        finally:
            del runtime

    def _load(self, generation: Any, now: bool, timings_s: dict[str, float]) -> None:
        if self._closed:
            raise ClosedError("the Runtime was closed before the operator was loaded")
        begin = time.perf_counter()
        opened = self._machine.open(generation)
        timings_s["open"] = time.perf_counter() - begin
        if not self._machine.loads_parked:
            self._machine.load(opened)
        else:
            until = time.monotonic() + (0 if now else NATURAL_S)
            while not self._keeper.parked and time.monotonic() < until:
                time.sleep(0.001)
            begin = time.perf_counter()
            idle = self._keeper.parked
            holds = self._keeper.holds(everyone=True)
            try:
                holds.take()
                if not holds.wait(PARK_S):
                    raise MachineError(
                        f"the executors of this process did not park within {PARK_S} s: a task runs too long"
                    )
                timings_s["park"] = time.perf_counter() - begin
                self._machine.load(opened)
                while self._machine.unused > (0 if idle else UNUSED):
                    self._machine.discard()
            finally:
                holds.give_back()
            holds.serve()
        self.loads += 1
        timings_s["load"] = time.perf_counter() - begin

    # --- inlining ---

    def inline(self, chosen: Sequence[tuple[int, Request]], better: Callable[[], bool]) -> bool:
        """Load a worker with functions, (id, request), inlined, and keep it if `better` says so.

        Raises MachineError, ClosedError: as `build` does.
        """
        with self._building:
            worker = self._compiler.compile_worker(
                [(op_id, render(request), request.arity) for op_id, request in chosen]
            )
            self._alone(lambda: self._load(self._machine.link(self._alive(), worker), True, {}))
            try:
                kept = better()
            except BaseException:
                self._swap_back()  # it is unproven
                raise
            if kept:
                self._worker = worker
            else:
                self._swap_back()
            return kept

    def _withdraw(self, codes: Mapping[int, Code]) -> None:
        """Back to the generation before, which is still loaded."""
        for op_id in codes:
            refs, code = self._bodies.pop(op_id)
            if len(refs) > 1:  # another operator has the body too
                self._bodies[op_id] = (refs[:-1], code)
        self._swap_back()

    def _swap_back(self) -> None:
        def swap() -> None:
            if not self._closed:
                self._keeper.hand_over(swap=True)

        with contextlib.suppress(ClosedError):
            self._alone(swap)


def _keep_publishing(publisher: weakref.ref[Publisher]) -> None:
    """The thread: it keeps no forgotten Runtime alive."""
    while True:
        current = publisher()
        if current is None or not current.turn():
            return
        del current
