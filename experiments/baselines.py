"""The competitors: calls of `out = a + b` on one slab of memory arrive, a function that performs them leaves.

Every system, gpuos too, works on views of the same slab, made beforehand. Each baseline is called the way
its documentation calls fast: with `out=`, no allocation, launch configurations made once, one
synchronization of its own stream at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

Place = tuple[int, int]
Call = tuple[Place, Place, Place, int]
"""`(a, b, out, size)`: the first `size` elements of rows `(plane, row)` of a slab."""

Run = Callable[[], None]
OUTPUTS = 2
"""The plane of a slab that results are written to; planes 0 and 1 hold inputs."""


def views(array: Any, calls: Sequence[Call]) -> list[tuple[Any, Any, Any]]:
    """The calls' arrays, in whatever type `array` is."""
    made: dict[tuple[Place, int], Any] = {}

    def view(place: Place, size: int) -> Any:
        if (place, size) not in made:
            made[place, size] = array[place[0], place[1], :size]
        return made[place, size]

    return [(view(a, size), view(b, size), view(out, size)) for a, b, out, size in calls]


def expected(host: np.ndarray, calls: Sequence[Call], spec: Callable[..., np.ndarray]) -> np.ndarray:
    """What the output plane must hold, NaN where no call writes."""
    slab = host.copy()
    for a, b, out in views(slab, calls):
        out[...] = spec(a, b)
    return slab[OUTPUTS]


class HostSlab:
    """Memory of the CPU machine."""

    def __init__(self, host: np.ndarray) -> None:
        self.array = host.copy()

    def write(self, host: np.ndarray) -> None:
        self.array[...] = host

    def read(self) -> np.ndarray:
        return self.array[OUTPUTS].copy()


class DeviceSlab:
    """Memory of the GPU, owned by PyTorch, else CuPy, else Numba: `array` is the type a user would have."""

    def __init__(self, host: np.ndarray) -> None:
        from numba import cuda

        self.array = device_empty(host.shape)
        # sync=False: array-interface conversions would make numba synchronize, here and at each launch.
        self.numba = cuda.as_cuda_array(self.array, sync=False)
        self.write(host)

    def write(self, host: np.ndarray) -> None:
        self.numba.copy_to_device(host)

    def read(self) -> np.ndarray:
        return self.numba[OUTPUTS].copy_to_host()


def device_empty(shape: tuple[int, ...]) -> Any:
    """Uninitialized f32 device memory."""
    try:
        import torch

        if torch.cuda.is_available():
            return torch.empty(shape, dtype=torch.float32, device="cuda")
    except ImportError:
        pass
    try:
        import cupy

        return cupy.empty(shape, dtype=np.float32)
    except ImportError:
        from numba import cuda

        return cuda.device_array(shape, dtype=np.float32)


def loop(add: Callable[..., Any], arrays: Sequence[tuple[Any, Any, Any]], finish: Run | None = None) -> Run:
    """One Python call an operation, and one wait at the end."""

    def run() -> None:
        for a, b, out in arrays:
            add(a, b, out=out)
        if finish is not None:
            finish()

    return run


def numpy_add(slab: HostSlab, calls: Sequence[Call]) -> Run:
    return loop(np.add, views(slab.array, calls))


def torch_add(slab: DeviceSlab, calls: Sequence[Call]) -> Run:
    torch = cuda_torch()
    return loop(torch.add, views(torch_view(slab), calls), torch.cuda.current_stream().synchronize)


def cupy_add(slab: DeviceSlab, calls: Sequence[Call]) -> Run:
    import cupy

    return loop(cupy.add, views(cupy.asarray(slab.array), calls), cupy.cuda.get_current_stream().synchronize)


def numba_add(slab: DeviceSlab, calls: Sequence[Call]) -> Run:
    from numba import cuda

    add, width, stream = numba_kernel(), 256, cuda.default_stream()
    launchers = {size: add[-(-size // width), width, stream] for *_, size in calls}
    launches = [(launchers[out.size], a, b, out) for a, b, out in views(slab.numba, calls)]

    def run() -> None:
        for launch, a, b, out in launches:
            launch(a, b, out)
        stream.synchronize()

    return run


@cache
def numba_kernel() -> Any:
    from numba import cuda

    @cuda.jit("void(float32[::1], float32[::1], float32[::1])")
    def add(a, b, out):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < out.size:
            out[i] = a[i] + b[i]

    return add


def graph_replay(slab: DeviceSlab, calls: Sequence[Call], branches: int = 1) -> Run:
    """A CUDA Graph, captured once; with `branches` > 1 independent calls are so many parallel chains."""
    torch_add(slab, calls)()  # loads the kernels, which a capture must not
    graph = capture(views(torch_view(slab), calls), side_streams(branches))
    synchronize = cuda_torch().cuda.current_stream().synchronize

    def run() -> None:
        graph.replay()
        synchronize()

    return run


def graph_recapture(slab: DeviceSlab, calls: Sequence[Call]) -> Run:
    """What a changed shape costs the user of a CUDA Graph: capture, instantiate, replay."""
    torch_add(slab, calls)()  # loads the kernels, which a capture must not
    arrays, streams = views(torch_view(slab), calls), side_streams(1)
    synchronize = cuda_torch().cuda.current_stream().synchronize

    def run() -> None:
        capture(arrays, streams).replay()
        synchronize()

    return run


def capture(arrays: Sequence[tuple[Any, Any, Any]], streams: Sequence[Any]) -> Any:
    """Capture the adds dealt out over `streams`, the first of which forks and joins the others.

    Without `torch.cuda.graph()`, whose garbage collection and `empty_cache()` take longer than the capture.
    """
    torch = cuda_torch()
    graph, (first, *others) = torch.cuda.CUDAGraph(), streams
    with torch.cuda.stream(first):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number, stream in enumerate(streams):
                if stream is not first:
                    stream.wait_stream(first)
                with torch.cuda.stream(stream):
                    for a, b, out in arrays[number :: len(streams)]:
                        torch.add(a, b, out=out)
            for stream in others:
                first.wait_stream(stream)
        finally:
            graph.capture_end()
    return graph


def side_streams(count: int) -> list[Any]:
    torch = cuda_torch()
    return [torch.cuda.Stream() for _ in range(count)]


def torch_view(slab: DeviceSlab) -> Any:
    return cuda_torch().as_tensor(slab.array, device="cuda")


def cuda_torch() -> Any:
    """PyTorch, if it is there and drives this GPU; else an exception that says so."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} does not see a CUDA device")
    return torch


COMPETITORS: dict[str, dict[str, Callable[..., Run]]] = {
    "cpu": {"numpy": numpy_add},
    "cuda": {
        "eager": torch_add,
        "cupy": cupy_add,
        "numba": numba_add,
        "graph": graph_replay,
        "graph/branches": partial(graph_replay, branches=8),
        "graph/recapture": graph_recapture,
    },
}
"""By machine and by the `system` of the results format."""
