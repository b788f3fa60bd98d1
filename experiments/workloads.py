"""One operator at any size, as gpuos, NumPy and PyTorch say it: for experiments that sweep operators.

A size is the number of elements of the largest array that a call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gpuos_numba as gpuos

from .baselines import cuda_torch
from .harness import Case, System
from .lab import TIMEOUT_S, Lab

F32, F16 = np.float32, np.float16


@dataclass(slots=True)
class Workload:
    """An operator and how its size grows.

    Attributes:
        operator: by name; also the workload's name.
        make: size -> inputs.
        eager: what a user of PyTorch writes, over (inputs, out); returns the result.
        numpy: what a user of NumPy writes, likewise.
        parameters: of the operator.
        dtype: of what is computed, for names.
        tolerance: relative, and absolute of values of about 1.
    """

    operator: str
    make: Callable[[int], list[np.ndarray]]
    eager: Callable[[Sequence[Any], Any], Any]
    numpy: Callable[[Sequence[Any], Any], Any]
    parameters: dict[str, Any] = field(default_factory=dict)
    dtype: str = "f32"
    tolerance: float = 1e-4


def normal(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def _out(name: str) -> Callable[[Sequence[Any], Any], Any]:
    return lambda inputs, out: getattr(cuda_torch(), name)(*inputs, out=out)


def _functional(name: str, *arguments: Any) -> Callable[[Sequence[Any], Any], Any]:
    return lambda inputs, out: getattr(cuda_torch().nn.functional, name)(*inputs, *arguments)


def _square(size: int) -> int:
    return max(1, int(size**0.5))


def _standardized(x: Any, eps: float = 1e-5) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + F32(eps))


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _numpy_sdpa(inputs: Sequence[Any], out: Any) -> Any:
    q, k, v = (each.astype(F32) for each in inputs)
    return (_softmax(q @ k.swapaxes(-1, -2) * F32(q.shape[-1] ** -0.5)) @ v).astype(F16)


def _numpy_gelu(inputs: Sequence[Any], out: Any) -> Any:
    raise NotImplementedError("NumPy has no erf")


WORKLOADS = [
    Workload(
        "add",
        lambda n: [normal(n), normal(n) + 3],
        _out("add"),
        lambda i, out: np.add(*i, out=out),
    ),
    Workload(
        "sigmoid",
        lambda n: [normal(n)],
        _out("sigmoid"),
        lambda i, out: np.reciprocal(1 + np.exp(-i[0]), out=out),
    ),
    Workload("gelu", lambda n: [normal(n)], _functional("gelu"), _numpy_gelu),
    Workload(
        "softmax",
        lambda n: [normal(1, n)],
        _functional("softmax", -1),
        lambda i, out: _softmax(i[0]),
        {"dim": -1},
    ),
    Workload(
        "layer_norm",
        lambda n: [normal(1, n)],
        lambda i, out: cuda_torch().nn.functional.layer_norm(i[0], i[0].shape[-1:]),
        lambda i, out: _standardized(i[0]),
    ),
    Workload(
        "rms_norm",
        lambda n: [normal(1, n)],
        lambda i, out: cuda_torch().nn.functional.rms_norm(i[0], i[0].shape[-1:], None, 1e-6),
        lambda i, out: i[0] / np.sqrt((i[0] * i[0]).mean(-1, keepdims=True) + F32(1e-6)),
    ),
    Workload(
        "sum",
        lambda n: [normal(1, n) + 3],
        lambda i, out: i[0].sum(-1),
        lambda i, out: i[0].sum(-1),
        {"dim": -1},
    ),
    Workload(
        "matvec",
        lambda n: [normal(_square(n), _square(n), dtype=F16) / F16(16), normal(_square(n), dtype=F16)],
        _out("mv"),
        lambda i, out: (i[0].astype(F32) @ i[1].astype(F32)).astype(F16),
        {},
        "f16",
        2e-2,
    ),
    Workload(
        "sdpa",  # 32 heads of 128: n / 4096 keys
        lambda n: [normal(1, 32, side, 128, dtype=F16) for side in (1, n // 4096, n // 4096)],
        _functional("scaled_dot_product_attention"),
        _numpy_sdpa,
        {},
        "f16",
        1e-2,
    ),
]


class Calls:
    """Many calls of a workload on arrays of their own: one case.

    Args:
        sizes: of the calls, in order; they repeat until there are `count`.
        linked: each call waits for the one before.
    """

    def __init__(
        self, lab: Lab, workload: Workload, sizes: Sequence[int], count: int, linked: bool = False
    ) -> None:
        self.lab, self.workload, self.linked = lab, workload, linked
        spec = gpuos.operators()[workload.operator].spec
        assert spec is not None
        # Equal sizes have equal values, in memory of their own.
        drawn = {size: workload.make(size) for size in dict.fromkeys(sizes)}
        computed = {size: np.asarray(spec(*inputs, **workload.parameters)) for size, inputs in drawn.items()}
        made, truths = [drawn[size] for size in sizes], [computed[size] for size in sizes]
        kind = F16 if workload.dtype == "f16" else F32
        self.expected = np.concatenate([truth.astype(np.float64).ravel() for truth in truths])
        self.inputs = [[lab.device(each) for each in inputs] for inputs in made]
        self.outs = [lab.device(np.full(truth.shape, np.nan, kind)) for truth in truths]
        self.results: list[Any] = [None] * len(sizes)
        self.order = [i % len(sizes) for i in range(count)]

    def case(self, name: str, systems: list[System], **settings: Any) -> Case:
        tolerance = self.workload.tolerance
        settings = {"metric": "time_per_op", **settings}
        return Case(name, systems, self.poison, self.read, self.expected, tolerance, tolerance, **settings)

    def poison(self) -> None:
        for out in self.outs:
            self.lab.fill(out, np.nan)

    def read(self) -> np.ndarray:
        return self._flat(self.outs)

    def read_results(self) -> np.ndarray:
        results, self.results = self.results, [None] * len(self.results)
        return self._flat(results)

    def _flat(self, arrays: Sequence[Any]) -> np.ndarray:
        return np.concatenate([self.lab.host(each).astype(np.float64).ravel() for each in arrays])

    def batch(self) -> gpuos.Batch:
        calls = [(self.inputs[i], self.outs[i]) for i in self.order]
        return self.lab.rt.batch(self.workload.operator, calls, **self.workload.parameters)

    def ours(self, prepare: bool = False) -> System:
        """A batch prepared before, or within the time."""
        rt, ready = self.lab.rt, self.batch()

        def run() -> None:
            batch = self.batch() if prepare else ready
            rt.submit_batch(batch, linked=self.linked).wait(TIMEOUT_S)

        return self.lab.ours(run, "/prepare" if prepare else "", count=len(self.order))

    def perform(self) -> None:
        """All calls by eager PyTorch."""
        eager = self.workload.eager
        for i in self.order:
            self.results[i] = eager(self.inputs[i], self.outs[i])

    def eager(self) -> Callable[[], None]:
        synchronize = cuda_torch().cuda.current_stream().synchronize

        def run() -> None:
            self.perform()
            synchronize()

        return run

    def numpy(self) -> Callable[[], None]:
        numpy = self.workload.numpy
        numpy(self.inputs[0], self.outs[0])  # not everything can be said

        def run() -> None:
            for i in self.order:
                self.results[i] = numpy(self.inputs[i], self.outs[i])

        return run

    def graph(self, recapture: bool = False) -> Callable[[], None]:
        """A graph of all calls, captured before or within the time."""
        torch = cuda_torch()
        self.eager()()
        stream, synchronize = torch.cuda.Stream(), torch.cuda.current_stream().synchronize

        def capture() -> Any:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.perform()
                finally:
                    graph.capture_end()
            return graph

        ready = None if recapture else capture()
        self.graph_outs = list(self.results)

        def run() -> None:
            graph = ready or capture()
            graph.replay()
            synchronize()
            if ready is not None:
                self.results = list(self.graph_outs)

        return run

    def others(self, names: Sequence[str]) -> list[System]:
        """Competitors by name, those of this machine."""
        build: dict[str, Callable[[], Callable[[], None]]] = {
            "numpy": self.numpy,
            "eager": self.eager,
            "graph": self.graph,
            "graph/recapture": lambda: self.graph(recapture=True),
        }
        here = [name for name in names if (name == "numpy") != self.lab.cuda]
        return [
            self.lab.other(
                name,
                build[name],
                count=len(self.order),
                read=self.read_results,
                every=3 if name == "graph/recapture" else 1,
            )
            for name in here
        ]
