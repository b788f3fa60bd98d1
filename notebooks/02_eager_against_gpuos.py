# %% [markdown]
# # 02: Eager against gpuos
#
# Choose an operator, a size, and whether each call waits for the one before. On a GPU the rival is eager
# PyTorch and a CUDA Graph; without one it is NumPy, and there is no launch to save: expect no gain there.

# %%
import time

import numpy as np
from matplotlib import pyplot as plt

import gpuos_numba as gpuos
from gpuos_numba import testing

rt = gpuos.Runtime()
CALLS = 1000
NUMPY = {"add": np.add, "mul": np.multiply, "maximum": np.maximum, "div": np.divide}


def best_of(run, repeats=5):
    """Nanoseconds a call, the median of some runs."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - begin) / CALLS)
    return float(np.median(times))


# %%
def measure(op, size, dependent):
    """Time per call of everybody, in ns. The result of gpuos is checked first."""
    host = np.random.default_rng(0).uniform(1, 2, (2, size)).astype(np.float32)
    x, y = testing.to_device(rt, host[0]), testing.to_device(rt, host[1])
    out = testing.to_device(rt, np.zeros(size, np.float32))
    calls = [((out if dependent and i else x, y), out) for i in range(CALLS)]
    batch = rt.batch(op, calls)
    rt.submit_batch(batch[:1]).result()
    np.testing.assert_allclose(testing.to_host(out), NUMPY[op](*host), rtol=1e-6)
    found = {"gpuos": best_of(lambda: rt.submit_batch(batch, linked=dependent).wait())}
    rt.park()
    if rt.machine == "cuda":
        import torch

        function = getattr(torch, op)

        def eager():
            for (left, right), target in calls:
                function(left, right, out=target)

        def run(work):
            work()
            torch.cuda.synchronize()

        found["eager"] = best_of(lambda: run(eager))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            eager()
        found["graph"] = best_of(lambda: run(graph.replay))
    else:
        function = NUMPY[op]

        def loop():
            for (left, right), target in calls:
                function(left, right, out=target)

        found["numpy"] = best_of(loop)
    return found


def show(op="add", size=1024, dependent=False):
    found = measure(op, size, dependent)
    _, axes = plt.subplots(figsize=(7, 0.6 * len(found) + 0.8))
    axes.barh(list(found), list(found.values()), color=[f"C{i}" for i in range(len(found))])
    for place, value in enumerate(found.values()):
        axes.text(value, place, f" {value:,.0f} ns", va="center")
    axes.margins(x=0.2)
    chained = "dependent" if dependent else "independent"
    axes.set(xlabel="ns a call", title=f"{op}, {size:,} f32, {chained}, {rt.device_name}")
    plt.show()
    return found


# %% [markdown]
# With ipywidgets the plot follows the controls; without them call `show(...)` yourself.

# %%
try:
    import ipywidgets

    sizes = ipywidgets.SelectionSlider(
        options=[64, 256, 1024, 4096, 16384], value=1024, continuous_update=False
    )
    ipywidgets.interact(lambda op, size, dependent: show(op, size, dependent) and None,
                        op=list(NUMPY), size=sizes, dependent=False)  # fmt: skip
except ImportError:
    show("add", 1024, False)

# %% [markdown]
# ## Over sizes

# %%
sizes = [64, 512, 4096]
lines = {}
for size in sizes:
    for system, value in measure("add", size, True).items():
        lines.setdefault(system, []).append(value)
figure, axes = plt.subplots(figsize=(6, 3.5))
for system, values in lines.items():
    axes.plot(sizes, values, marker="o", label=system)
axes.set(xscale="log", yscale="log", xlabel="f32 elements", ylabel="ns an add", title="a chain of adds")
axes.legend()
plt.show()
