"""How a measurement is taken: cases arrive, rows leave, and nothing is timed before it was proved right.

Cases measured together take turns: every round runs every system once, beginning one further each round,
so that drift of clocks, caches and neighbours falls on all alike. Ratios are formed within one file only.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "experiments" / "results"
LOCAL = STORED / "local"
DISTRIBUTIONS = ("gpuos-numba", "numpy", "numba", "llvmlite", "numba-cuda", "cuda-bindings", "torch",
                 "cupy-cuda12x", "cupy-cuda13x")  # fmt: skip
SCALE = {"ns": 1.0, "us": 1e3, "ms": 1e6}


class WrongResult(AssertionError):
    """A system computed something else than the NumPy spec. Its times would mean nothing."""


@dataclass(slots=True)
class System:
    """One competitor in a case. What is not required may fail, and is then a row that says why.

    Attributes:
        name: as in the results format: `gpuos`, `eager`, `graph/recapture`, ...
        run: the work, and waiting for it.
        count: operations in one `run`.
        before: not timed, ahead of each sample: brings the machine into the state that is measured.
        warm: untimed runs between `before` and the timed one.
        sample: for a system that times itself: ns per operation, as many as it likes.
        every: takes part in each `every`-th round only; for dear ones.
        required: let its exceptions through.
        why: it cannot run here, and this is the reason.
        read: where this system leaves its results elsewhere than `Case.read` looks.
    """

    name: str
    run: Callable[[], Any] | None
    count: int = 1
    before: Callable[[], Any] = lambda: None
    warm: int = 1
    sample: Callable[[], Iterable[float]] | None = None
    every: int = 1
    required: bool = False
    why: str = ""
    read: Callable[[], np.ndarray] | None = None


@dataclass(slots=True)
class Case:
    """One question, its competitors, and what each of them must have computed.

    Attributes:
        name: `<workload>/<size or shape>/<dtype>[/<variant>]`.
        poison: resets the inputs and fills the outputs with NaN, on the machine.
        read: copies the outputs to the host.
        expected: what `read` must give, from the NumPy spec; None where there is no output.
        tolerance: relative; 0 means bit for bit, NaN equal to NaN.
        absolute: allowed besides, where `tolerance` is not 0.
    """

    name: str
    systems: list[System]
    poison: Callable[[], Any] = lambda: None
    read: Callable[[], np.ndarray] | None = None
    expected: np.ndarray | None = None
    tolerance: float = 0.0
    absolute: float = 0.0
    metric: str = "time_per_op"
    unit: str = "ns"


@dataclass(slots=True)
class Row:
    """One line of a results file. Where a system could not run, `median` is None and `why` has the reason."""

    case: str
    system: str
    metric: str
    unit: str
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    repeats: int = 0
    why: str = ""

    @staticmethod
    def of(case: Case, system: System, samples_ns: Sequence[float]) -> Row:
        row = Row(case.name, system.name, case.metric, case.unit, why=system.why)
        if not system.why:
            row.summarize(np.asarray(samples_ns) / SCALE[case.unit])
        return row

    def summarize(self, samples: Any) -> Row:
        """Set median and spread from samples in the row's unit; none leave it as it is."""
        if len(samples):
            p10, median, p90 = np.percentile(samples, (10, 50, 90))
            self.median, self.p10, self.p90 = (float(f"{value:.5g}") for value in (median, p10, p90))
            self.repeats = len(samples)
        return self


def baseline(name: str, build: Callable[[], Callable[[], Any]], **settings: Any) -> System:
    """A competitor that may be missing here: whatever stops `build` becomes its reason."""
    try:
        return System(name, build(), **settings)
    except WrongResult:
        raise
    except Exception as error:  # any failure of somebody else's code is a row, not an end
        return System(name, None, why=reason(error))


def reason(error: Exception) -> str:
    """One line for a row."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def attempt(system: System, step: Callable[[], Any]) -> Any:
    """`step()`, unless the system is out; it is out from its first failure on, if it may fail at all."""
    if system.why:
        return None
    if system.required:
        return step()
    try:
        return step()
    except WrongResult:
        raise
    except Exception as error:  # as in baseline()
        system.why = reason(error)
        return None


def verify(case: Case, system: System) -> None:
    """Run once on poisoned outputs and compare: a task that was skipped leaves a NaN behind.

    Raises:
        WrongResult: naming case, system and the first element that differs.
    """
    case.poison()
    system.before()
    system.run()
    read = system.read or case.read
    if read is None or case.expected is None:
        return
    got, want = read(), case.expected
    right = (got == want) | (np.isnan(got) & np.isnan(want))
    if case.tolerance:
        right |= np.isclose(got, want, rtol=case.tolerance, atol=case.absolute)
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise WrongResult(
            f"{case.name}: {system.name} has {got[at]!r} instead of {want[at]!r} at {at}, "
            f"{np.count_nonzero(~right)} of {right.size} elements are wrong"
        )


def take_sample(system: System) -> list[float]:
    """Times of one repetition, in ns per operation."""
    system.before()
    for _ in range(system.warm):
        system.run()
    if system.sample is not None:
        return list(system.sample())
    begin = time.perf_counter_ns()
    system.run()
    return [(time.perf_counter_ns() - begin) / system.count]


def measure(cases: Sequence[Case], rounds: int, tick: Callable[[], Any] = lambda: None) -> list[Row]:
    """Verify all, take `rounds` interleaved samples of each, verify all again.

    The collector is off meanwhile, as in timeit: it would stop whoever happens to run.
    """
    entries: list[tuple[Case, System, list[float]]] = [(c, s, []) for c in cases for s in c.systems]
    for case, system, _ in entries:
        attempt(system, lambda: verify(case, system))
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            first = number % len(entries)
            for _, system, samples in entries[first:] + entries[:first]:
                if number % system.every == 0:
                    samples += attempt(system, lambda: take_sample(system)) or []
            tick()
    finally:
        gc.enable()
    for case, system, _ in entries:
        attempt(system, lambda: verify(case, system))
    return [Row.of(case, system, samples) for case, system, samples in entries]


def git_commit() -> str:
    """The measured source, `+dirty` if it was changed; GPUOS_COMMIT overrides git."""
    if os.environ.get("GPUOS_COMMIT"):
        return os.environ["GPUOS_COMMIT"]
    sha = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--", "gpuos_numba", "templates", "experiments/*.py")
    return f"{sha}{'+dirty' if changed else ''}" if sha else "unknown"


def driver_version() -> str | None:
    """Of the NVIDIA driver; None without one."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None


def installed_versions() -> dict[str, str]:
    """Of what the figures depend on, those installed."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(*command: str) -> str:
    """What a command prints, empty where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@dataclass(slots=True)
class Results:
    """One results file: where and when it was measured, and its rows."""

    experiment: str
    device: str
    machine: str
    driver: str | None = field(default_factory=driver_version)
    commit: str = field(default_factory=git_commit)
    when: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
    versions: dict[str, str] = field(default_factory=installed_versions)
    rows: list[Row] = field(default_factory=list)

    def row(self, case: str, system: str) -> Row:
        """The one row of a case and a system; KeyError where it was not measured."""
        for row in self.rows:
            if (row.case, row.system) == (case, system):
                return row
        raise KeyError(f"{self.experiment} has no row {case!r} of {system!r}")

    def ratio(self, case: str, system_a: str, system_b: str, case_b: str | None = None) -> float | None:
        """How many times `system_a` takes what `system_b` takes; None where one of them could not run.

        `case_b` is for a counterpart that was measured in the same rounds, like `.../stable`.
        """
        a, b = self.row(case, system_a), self.row(case_b or case, system_b)
        if (a.metric, a.unit) != (b.metric, b.unit):
            raise ValueError(f"{case}: {a.metric} in {a.unit} and {b.metric} in {b.unit} do not compare")
        return a.median / b.median if a.median and b.median else None

    @property
    def file_name(self) -> str:
        """`<experiment>.<device>.json`."""
        plain = re.sub(r"\((r|tm)\)|\bcpu\b", "", self.device.lower())
        device = re.sub(r"[^a-z0-9.]+", "-", plain).strip("-")
        return f"{self.experiment}.{device}.json"

    @property
    def default_path(self) -> Path:
        """Where they go unless told: a folder that Git ignores, so that to measure changes no stored result.
        `python -m experiments.report --store` stores them."""
        return LOCAL / self.file_name

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Where Ctrl-C or SIGTERM, which `timeout` sends, ends what is measured within, the rows so far are
        written as `<experiment>-unfinished`, which is never stored."""

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        except KeyboardInterrupt:
            self.experiment += "-unfinished"
            self.write(self.default_path)
            print(f"interrupted: {len(self.rows)} rows in {self.default_path}", flush=True)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    def write(self, path: Path) -> None:
        """One row a line, so that a changed figure is a changed line."""
        head = {key: value for key, value in asdict(self).items() if key != "rows"}
        rows = [{k: v for k, v in asdict(row).items() if k != "why" or v} for row in self.rows]
        lines = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'
        path.write_text(text, encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Results:
        """A stored file, to make tables and plots from."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Results(**stored | {"rows": [Row(**row) for row in stored["rows"]]})
