# %% [markdown]
# # 04: Ordering
#
# Two tasks that touch the same memory need an order. Say it with `after=`, or link a batch: then each
# task runs after the one before, and neighbours run in one block, without a hop between multiprocessors.
# %%
import time

import numpy as np
from matplotlib import pyplot as plt

import gpuos_numba as gpuos
from gpuos_numba import testing

rt = gpuos.Runtime()


def device(*shape, value=0.0):
    return testing.to_device(rt, np.full(shape, value, np.float32))


# %% [markdown]
# ## `after=`
#
# A diamond: two independent tasks, and one that needs both. At most two tickets a task.
# %%
x, left, right, joined = device(1024, value=3), device(1024), device(1024), device(1024)
doubled = rt.add(x, x, out=left)
squared = rt.mul(x, x, out=right)
rt.sub(right, left, out=joined, after=[doubled, squared]).result()
assert (testing.to_host(joined) == 3 * 3 - 6).all()

# %% [markdown]
# ## Linked batches
#
# `x = x + 1`, 1,000 times. As a linked batch that is one submission; the sum is exact, for no task was
# lost and none overtook another.
# %%
x, one = device(256), device(256, value=1)
chain = rt.batch("add", [((x, one), x)] * 1000)
rt.submit_batch(chain, linked=True).result()
print(testing.to_host(x)[:4])
assert (testing.to_host(x) % 1000 == 0).all()

# %% [markdown]
# ## What order costs
#
# The same tasks, linked and not, on arrays of their own.
# %%
arrays = [device(256) for _ in range(64)]
batch = rt.batch("add", [((y, one), y) for y in arrays] * 32)


def nanoseconds(linked, repeats=7):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        rt.submit_batch(batch, linked=linked).wait()
        times.append((time.perf_counter_ns() - begin) / len(batch))
    return float(np.median(times))


found = {"one batch, linked": nanoseconds(True), "one batch, unlinked": nanoseconds(False)}
figure, axes = plt.subplots(figsize=(6, 1.8))
axes.barh(list(found), list(found.values()))
axes.set(xlabel="ns a task", title=rt.device_name)
plt.show()
found

# %% [markdown]
# (Unlinked, the 32 adds to one array have no order: good for a measurement, wrong for a program.)
#
# ## Chains side by side
#
# A linked batch each: every chain is in order, and different chains run in parallel.
# %%
ys = [device(256) for _ in range(16)]
chains = [rt.batch("add", [((y, one), y)] * 50) for y in ys]
tickets = [rt.submit_batch(each, linked=True) for each in chains]
for ticket in tickets:
    ticket.result()
assert all((testing.to_host(y) == 50).all() for y in ys)

# %% [markdown]
# ## Programs and traces
#
# To come with the versions that have them: a recorded sequence submitted again with new arrays in one
# call, and its trace in Perfetto.
