"""Random programs: calls on a few overlapping buffers arrive, and whether they came out right leaves.

The calls are run by a Runtime, which finds their order itself, and one after another by NumPy. Views are
strided, reversed, misaligned and overlapping; some calls are large enough to be tiled, some update their
input in place, and some programs are submitted as batches, through lanes, or as batches between single
calls. Half of the programs work on integers, the others on f32, mostly on contiguous pieces that begin at few
places: what the worker runs itself, without a barrier where it sees that none is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import gpuos_numba as gpuos

BUFFERS, LENGTH, LARGE = 4, 192, 40_000
PIECES, PLACES = (4, 256, 1000, 1024, 1026, 2048), (0, 0, 0, 0, 1, 4, 8, 512, 2048)
BINARY = ("add", "sub", "mul")
UNARY = ("relu", "neg", "abs")
Move = Callable[[np.ndarray], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One call: operator, and (buffer, slice) of each input and of the output."""

    op: str
    inputs: tuple[tuple[int, slice], ...]
    out: tuple[int, slice]


def draw(random: np.random.Generator, steps: int, large: bool, floats: bool) -> list[Step]:
    """A program. Every operator gives the same bits everywhere."""
    length = LARGE if large else LENGTH
    counts = [length // each for each in (1, 2, 8)] if large else [1, 4, 16, 31, 64]
    pieces = random.choice(PIECES, 2)  # many tasks on as many elements: results stay where they are
    program = []
    for _ in range(steps):
        op = str(random.choice(BINARY + UNARY))
        whole = floats and not large and random.random() < 0.95
        count = int(random.choice(pieces if whole else counts))

        def part(whole: bool = whole, count: int = count) -> tuple[int, slice]:
            return _piece(random, count) if whole else _part(random, length, count)

        inputs = tuple(part() for _ in range(2 if op in BINARY else 1))
        out = inputs[0] if random.random() < 0.3 else part()
        program.append(Step(op, inputs, out))
    return program


def _piece(random: np.random.Generator, count: int) -> tuple[int, slice]:
    first = int(random.choice(PLACES))
    return int(random.integers(BUFFERS)), slice(first, first + count)


def _part(random: np.random.Generator, length: int, count: int) -> tuple[int, slice]:
    buffer = int(random.integers(BUFFERS))
    most = max(1, (length - 1) // max(1, count - 1)) if count > 1 else 1
    step = int(random.integers(1, min(most, 3) + 1)) if random.random() < 0.4 else 1
    span = (count - 1) * step + 1
    if span > length:
        step, span = 1, count
    first = int(random.integers(0, length - span + 1))
    if random.random() < 0.15:
        last = first - 1
        return buffer, slice(first + span - 1, last if last >= 0 else None, -step)
    return buffer, slice(first, first + span, step)


def sequential(buffers: list[np.ndarray], program: list[Step]) -> None:
    """The truth: integers wrap, and each f32 operation is rounded by itself."""
    for step in program:
        x, *rest = (buffers[b][part].copy() for b, part in step.inputs)
        buffer, part = step.out
        if step.op in BINARY:
            buffers[buffer][part] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[step.op](
                x, rest[0]
            )
        else:
            buffers[buffer][part] = {"relu": lambda v: np.maximum(v, 0), "neg": np.negative, "abs": np.abs}[
                step.op
            ](x)


def allowed(rt: gpuos.Runtime, program: list[Step]) -> list[Step]:
    """The steps that a Runtime takes: it refuses outputs that overlap an input in part."""
    scratch = [np.zeros(LARGE, np.int32) for _ in range(BUFFERS)]
    kept = []
    for step in program:
        out = scratch[step.out[0]][step.out[1]]
        views = [scratch[b][part] for b, part in step.inputs]
        same = [_same(view, out) for view in views]
        if all(s or not np.shares_memory(view, out) for s, view in zip(same, views, strict=True)):
            kept.append(step)
    return kept


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.__array_interface__["data"] == b.__array_interface__["data"] and a.strides == b.strides


def run_one(rt: gpuos.Runtime, seed: int, to_device: Move, to_host: Move) -> str:
    """Run the program of a seed; "" where it came out right, else what differs."""
    random = np.random.default_rng(seed)
    large = random.random() < 0.05
    floats = random.random() < 0.5
    program = allowed(rt, draw(random, int(random.integers(2, 40)), large, floats))
    if rt.machine == "cuda":  # torch has no negative strides
        program = [s for s in program if all(p.step is None or p.step > 0 for _, p in (*s.inputs, s.out))]
    length = LARGE if large else max(PLACES) + max(PIECES) if floats else LENGTH
    start = [
        random.integers(-4, 5, length).astype(np.float32 if floats else np.int32) for _ in range(BUFFERS)
    ]
    want = [each.copy() for each in start]
    with np.errstate(over="ignore", invalid="ignore"):
        sequential(want, program)
    buffers = [to_device(each) for each in start]

    def call(step: Step) -> tuple[list[Any], Any]:
        return [buffers[b][part] for b, part in step.inputs], buffers[step.out[0]][step.out[1]]

    way = int(random.integers(4))
    if way == 0 and program:  # as one batch
        parts = [rt.batch(step.op, [call(step)]) for step in program]
        rt.submit_batch(gpuos.Batch.concatenate(parts))
    elif way == 1:  # through lanes
        lanes = [rt.lane() for _ in range(3)]
        for number, step in enumerate(program):
            inputs, out = call(step)
            lanes[number % 3].submit(step.op, inputs, out)
    elif way == 2 and program:  # batches between single calls
        for number, step in enumerate(program):
            inputs, out = call(step)
            if number % 3:
                rt.submit(step.op, inputs, out)
            else:
                rt.submit_batch(rt.batch(step.op, [(inputs, out)]))
    else:
        for step in program:
            inputs, out = call(step)
            rt.submit(step.op, inputs, out)
    rt.synchronize(60)
    for number, (buffer, right) in enumerate(zip(buffers, want, strict=True)):
        got = to_host(buffer)
        if not np.array_equal(got, right, equal_nan=floats):
            at = int(np.argmax((got != right) & ~((got != got) & (right != right))))
            return f"seed {seed}, way {way}: buffer {number} has {got[at]} instead of {right[at]} at {at}"
    return ""


def check(rt: gpuos.Runtime, seeds: range, tick: Callable[[], Any] = lambda: None) -> list[str]:
    """What differs, of all seeds."""
    if rt.machine == "cuda":
        import torch

        def to_device(array: np.ndarray) -> Any:
            return torch.from_numpy(array.copy()).cuda()

        def to_host(array: Any) -> np.ndarray:
            return array.cpu().numpy()  # type: ignore[no-any-return]

    else:

        def to_device(array: np.ndarray) -> Any:
            return array.copy()

        to_host = np.asarray
    wrong = []
    for seed in seeds:
        found = run_one(rt, seed, to_device, to_host)
        if found:
            wrong.append(found)
        tick()
    return wrong
