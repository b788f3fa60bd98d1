"""What does attention cost a decoded token? `python -m experiments.attention_decode [--quick]`

One query a head attends to the keys and values of a cache, f16; tokens follow each other, so each call waits
for the one before. `<heads>x<head_dim>x<keys>`:

- `attention_decode/<shape>`: so many keys, always the same (1x64x128 is the paper's);
- `attention_growing/<shape>`: a token is appended to the cache, then attended to with all before it: one key
  more a token, from the shape's number on;
- `attention_paged/<shape>`: the keys lie in pages of 16 tokens in scattered order.

By gpuos (a linked batch prepared before; `/prepare` prepares it within the time), by eager PyTorch as
matmul-softmax-matmul (`eager/naive`) and as scaled_dot_product_attention (`eager`; pages are gathered first),
and by CUDA Graphs of the latter: for a growing context one graph a length, captured before (`graph`) or
captured and replayed once a token (`graph/recapture`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import typer

import gpuos_numba as gpuos

from .baselines import cuda_torch
from .harness import Case, Results, System
from .lab import TIMEOUT_S, Lab, Question, command
from .present import bars, sweep

F16 = np.float16
PAGE = 16
RELATIVE, ABSOLUTE = 5e-3, 2e-3  # f16 outputs of about 0.1, keys summed in another order
Shape = tuple[int, int, int]
"""(heads, head_dim, keys)"""


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v in f64, of each query over so many keys.

    [steps, heads, d], [heads, keys, d], [heads, keys, d] -> [steps, heads, d].
    """
    q, k, v = (each.astype(np.float64) for each in (queries.swapaxes(0, 1), keys, values))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores[:, np.arange(k.shape[1])[None] >= np.asarray(lengths)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray((weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1))


class Decode:
    """`steps` tokens of one sequence: caches, the new keys and values, queries, outputs."""

    def __init__(self, lab: Lab, shape: Shape, steps: int, growing: bool) -> None:
        heads, dim, keys = shape
        self.lab, self.steps, self.growing = lab, steps, growing
        self.lengths = [keys + 1 + i if growing else keys for i in range(steps)]
        random = np.random.default_rng(keys)
        draw = lambda *size: random.standard_normal(size).astype(F16)  # noqa: E731
        total = max(self.lengths)
        self.all_keys, self.all_values = draw(heads, total, dim), draw(heads, total, dim)
        queries = draw(steps, heads, dim)
        visible = keys if growing else total
        self.first = [each.copy() for each in (self.all_keys, self.all_values)]
        for each in self.first:
            each[:, visible:] = np.nan  # what is not appended shows
        self.keys, self.values = (lab.device(each[None]) for each in self.first)
        self.queries = lab.device(queries[:, None, :, None])  # [steps, 1, heads, 1, dim]
        self.new_keys = lab.device(np.ascontiguousarray(self.all_keys[None, :, visible:]))
        self.new_values = lab.device(np.ascontiguousarray(self.all_values[None, :, visible:]))
        self.places = lab.device(np.arange(visible, total)[:, None])
        self.empty = np.full((steps, 1, heads, 1, dim), np.nan, F16)
        self.outs = lab.device(self.empty)
        self.results: list[Any] = [None] * steps  # of PyTorch, whose attention takes no out=
        self.expected = attend(queries, self.all_keys, self.all_values, self.lengths)

    def case(self, name: str, systems: list[System]) -> Case:
        return Case(name, systems, self.poison, self.read, self.expected, RELATIVE, ABSOLUTE,
                    metric="time_per_token")  # fmt: skip

    def poison(self) -> None:
        for array, first in zip((self.keys, self.values), self.first, strict=True):
            self.lab.fill(array, first[None])
        self.lab.fill(self.outs, self.empty)

    def read(self) -> np.ndarray:
        return self.lab.host(self.outs)[:, 0, :, 0].astype(np.float64)

    def read_results(self) -> np.ndarray:
        results, self.results = self.results, [None] * self.steps
        return np.stack([self.lab.host(each) for each in results])[:, 0, :, 0].astype(np.float64)

    def step(self, i: int) -> tuple[Any, Any, Any, Any]:
        """(query, keys, values, out) of a token."""
        length = self.lengths[i]
        return self.queries[i], self.keys[:, :, :length], self.values[:, :, :length], self.outs[i]

    def appended(self, i: int) -> tuple[Any, Any]:
        """(new key, new value) of a token."""
        return self.new_keys[:, :, i : i + 1], self.new_values[:, :, i : i + 1]

    def systems(self) -> list[System]:
        lab = self.lab
        count: dict[str, Any] = {"count": self.steps}
        found = [lab.ours(self.ours(False), **count), lab.ours(self.ours(True), "/prepare", **count)]
        if not lab.cuda:
            return [*found, lab.other("numpy", self.numpy, **count)]
        count["read"] = self.read_results
        found += [
            lab.other("eager/naive", lambda: self.eager(self.naive), **count),
            lab.other("eager", lambda: self.eager(self.sdpa), **count),
        ]
        graph_outs: list[Any] = []
        replayed = {**count, "read": lambda: self.read_graph(graph_outs)}
        found.append(lab.other("graph", lambda: self.graph(graph_outs), **replayed))
        if self.growing:
            found.append(lab.other("graph/recapture", self.recapture, every=5, **count))
        return found

    def read_graph(self, outs: list[Any]) -> np.ndarray:
        """What a graph left in its own memory, which is then overwritten."""
        self.results = list(outs)
        found = self.read_results()
        for each in outs:
            self.lab.fill(each, np.nan)
        return found

    def batch(self) -> gpuos.Batch:
        rt = self.lab.rt
        calls = [self.step(i) for i in range(self.steps)]
        attention = rt.batch("sdpa", [((q, k, v), out) for q, k, v, out in calls])
        if not self.growing:
            return attention
        caches = self.keys, self.values
        appends = rt.batch(
            "kv_append", [((*self.appended(i), self.places[i]), caches) for i in range(self.steps)]
        )
        turns = [batch[i : i + 1] for i in range(self.steps) for batch in (appends, attention)]
        return gpuos.Batch.concatenate(turns)

    def ours(self, prepare: bool) -> Callable[[], None]:
        rt, ready = self.lab.rt, self.batch()

        def run() -> None:
            batch = self.batch() if prepare else ready
            rt.submit_batch(batch, linked=True).wait(TIMEOUT_S)

        return run

    # The competitors

    def numpy(self) -> Callable[[], None]:
        def run() -> None:
            for i in range(self.steps):
                if self.growing:
                    for cache, new in zip((self.keys, self.values), self.appended(i), strict=True):
                        cache[:, :, self.lengths[i] - 1 : self.lengths[i]] = new
                q, k, v, _ = (each.astype(np.float32) for each in self.step(i))
                scores = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                self.outs[i] = weights / weights.sum(-1, keepdims=True) @ v

        return run

    def naive(self, i: int) -> None:
        query, keys, values, _ = self.step(i)
        weights = (query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
        self.results[i] = weights @ values

    def sdpa(self, i: int) -> None:
        query, keys, values, _ = self.step(i)
        attention = cuda_torch().nn.functional.scaled_dot_product_attention
        self.results[i] = attention(query, keys, values)

    def append(self, i: int) -> None:
        if self.growing:
            at = self.lengths[i] - 1
            for cache, new in zip((self.keys, self.values), self.appended(i), strict=True):
                cache[:, :, at : at + 1].copy_(new)

    def eager(self, attention: Callable[[int], None]) -> Callable[[], None]:
        synchronize = cuda_torch().cuda.current_stream().synchronize

        def run() -> None:
            for i in range(self.steps):
                self.append(i)
                attention(i)
            synchronize()

        return run

    def graph(self, outs: list[Any]) -> Callable[[], None]:
        torch = cuda_torch()
        self.eager(self.sdpa)()
        # One graph of all tokens would be one capture for one context: a user has one a length.
        chunks = [[i] for i in range(self.steps)] if self.growing else [list(range(self.steps))]
        graphs, pool = [], None
        for chunk in chunks:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                for i in chunk:
                    self.append(i)
                    self.sdpa(i)
            pool = pool or graph.pool()
            graphs.append(graph)
        outs += self.results

        def run() -> None:
            for graph in graphs:
                graph.replay()
            torch.cuda.current_stream().synchronize()

        return run

    def recapture(self) -> Callable[[], None]:
        torch = cuda_torch()
        self.eager(self.sdpa)()
        stream = torch.cuda.Stream()

        def run() -> None:
            for i in range(self.steps):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(stream):
                    graph.capture_begin(capture_error_mode="thread_local")
                    self.append(i)
                    self.sdpa(i)
                    graph.capture_end()
                    graph.replay()
                stream.synchronize()

        return run


class Paged(Decode):
    """The same, with the cache in pages."""

    def __init__(self, lab: Lab, shape: Shape, steps: int) -> None:
        super().__init__(lab, shape, steps, growing=False)
        heads, dim, keys = shape
        pages = keys // PAGE
        order = np.random.default_rng(pages).permutation(pages)
        caches = []
        for each in (self.all_keys, self.all_values):
            cache = np.empty((pages, PAGE, heads, dim), F16)
            cache[order] = each.transpose(1, 0, 2).reshape(pages, PAGE, heads, dim)
            caches.append(lab.device(cache))
        self.key_pages, self.value_pages = caches
        self.table = lab.device(order[None].astype(np.int32))
        self.used = lab.device(np.array([keys], np.int32))
        self.order = order

    def poison(self) -> None:
        self.lab.fill(self.outs, self.empty)

    def batch(self) -> gpuos.Batch:
        inputs = (self.key_pages, self.value_pages, self.table, self.used)
        calls = [((self.queries[i][:, :, 0], *inputs), self.outs[i][:, :, 0]) for i in range(self.steps)]
        return self.lab.rt.batch("paged_attention", calls)

    def step(self, i: int) -> tuple[Any, Any, Any, Any]:
        """Eager users gather the pages first."""
        gathered = []
        for pages in (self.key_pages, self.value_pages):
            tokens = pages[self.table[0]].reshape(1, -1, *pages.shape[2:])
            gathered.append(tokens.swapaxes(1, 2))
        return self.queries[i], gathered[0], gathered[1], self.outs[i]


def questions(lab: Lab) -> list[Question]:
    """On the CPU fewer keys and tokens: a token takes milliseconds there."""
    big = lab.cuda and not lab.quick
    lengths: Sequence[int] = (128, 512, 2048, 8192) if big else (128,) if lab.quick else (128, 512)
    heads, steps = (32, 50) if lab.cuda else (8, 10)

    def fixed(shape: Shape) -> list[Case]:
        decode = Decode(lab, shape, steps, growing=False)
        return [decode.case(f"attention_decode/{'x'.join(map(str, shape))}/f16", decode.systems())]

    def growing(shape: Shape) -> list[Case]:
        decode = Decode(lab, shape, steps, growing=True)
        return [decode.case(f"attention_growing/{'x'.join(map(str, shape))}/f16", decode.systems())]

    def paged(shape: Shape) -> list[Case]:
        decode = Paged(lab, shape, steps)
        return [decode.case(f"attention_paged/{'x'.join(map(str, shape))}/f16", decode.systems())]

    shapes = [(heads, 128, length) for length in lengths]
    asked: list[Question] = [("fixed 1x64x128", lambda: fixed((1, 64, 128)))]
    for kind, ask in (("fixed", fixed), ("growing", growing), ("paged", paged)):
        asked += [(f"{kind} {s[2]}", lambda s=s, ask=ask: ask(s)) for s in shapes]  # type: ignore[misc]
    return asked


def draw(results: Results, figure: Any) -> None:
    figure.set_size_inches(18, 5)
    kinds = ("attention_decode", "attention_growing", "attention_paged")
    panels = figure.subplots(1, 4)
    for panel, kind in zip(panels, kinds, strict=False):
        rows = [row for row in results.rows if row.case.startswith(f"{kind}/") and "1x64x128" not in row.case]
        sweep(panel, rows, lambda row: int(row.case.split("/")[1].split("x")[2]), kind, "keys")
    rows = [row for row in results.rows if "/1x64x128/" in row.case]
    bars(panels[3], rows, "1 head of 64, 128 keys: a token")


main = command("attention_decode", questions, draw, rounds=(15, 3))

if __name__ == "__main__":
    typer.run(main)
