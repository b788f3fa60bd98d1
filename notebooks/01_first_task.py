# %% [markdown]
# # 01: A first task, and the ring seen from inside
#
# One kernel stays resident on the GPU (or a few threads on the CPU). The host writes a 128-byte
# descriptor into a ring, a worker takes it, runs it, and writes a done word. No launch.

# %%
import numpy as np

import gpuos_numba as gpuos
from gpuos_numba import testing

rt = gpuos.Runtime()  # the GPU where there is one, else CPU threads
rt

# %%
a = testing.to_device(rt, np.arange(8, dtype=np.float32))
b = testing.to_device(rt, np.full(8, 10, np.float32))
ticket = rt.add(a, b)
print(ticket)
print(testing.to_host(ticket.result()))  # waits
print(ticket, "at position", ticket.position)

# %% [markdown]
# A descriptor is a NumPy record. This is all that travels:

# %%
batch = rt.batch("add", [((a, b), a)])
{name: batch.tasks[0][name].tolist() for name in batch.tasks.dtype.names}

# %% [markdown]
# ## The ring at work
#
# A small ring, a producer that submits far more tasks than it has slots, and meanwhile snapshots of the
# words that host, pump and workers share (`gpuos_numba/protocol.py`). These are the real words, read
# while it runs.

# %%
import threading
import time

CAPACITY, TASKS = 64, 20_000


def watch(rt, batch, frames=400, every_s=20e-6):
    """Snapshots of (claimed, ingested, retired, stamps, done words) while a batch runs."""
    words, state, arrays = rt._words, rt._state, rt._machine.arrays
    producer = threading.Thread(target=lambda: rt.submit_batch(batch).wait(60))
    producer.start()
    seen = []
    while producer.is_alive() or not seen:
        counters = tuple(int(word[0]) for word in (words["claimed"], state["ingested"], words["retired"]))
        seen.append((*counters, arrays.stamps.copy(), arrays.done.copy()))
        time.sleep(every_s)
    producer.join()
    step = max(1, len(seen) // frames)
    return seen[::step][:frames]


with gpuos.Runtime(capacity=CAPACITY, workers=2) as small:
    x = testing.to_device(small, np.ones((3, 4096), np.float32))
    many = small.batch("add", [((x[0], x[1]), x[2])] * TASKS)
    snapshots = watch(small, many)
    print(small.stats())
len(snapshots)

# %% [markdown]
# Every slot is in one of five hands. Its stamp and done word say in whose:

# %%
import matplotlib

HANDS = ["free", "claimed", "published", "taken", "complete"]
COLORS = ["#eeeeee", "#fdd49e", "#fc8d59", "#67a9cf", "#5aae61"]


def hands(claimed, ingested, retired, stamps, done):
    """The state of each slot, 0 to 4."""
    found = np.zeros(CAPACITY, int)
    for position in range(retired, claimed):
        slot = position % CAPACITY
        if int(done[slot]) >> 8 == position + 1:
            found[slot] = 4
        elif position < ingested:
            found[slot] = 3
        elif int(stamps[slot]) == position + 1:
            found[slot] = 2
        else:
            found[slot] = 1
    return found


states = np.array([hands(*each) for each in snapshots])
{name: f"{share:.0%}" for name, share in zip(HANDS, (np.bincount(states.ravel(), minlength=5) / states.size))}

# %%
from matplotlib import pyplot as plt
from matplotlib.animation import FuncAnimation

try:
    from IPython.display import HTML
except ImportError:  # run as a script
    HTML = str

moving = [i for i in range(1, len(states)) if (states[i] != states[i - 1]).any()][:25] or [0]
figure, axes = plt.subplots(figsize=(4.5, 4.5), dpi=60)
axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
axes.axis("off")
angles = np.linspace(0, 2 * np.pi, CAPACITY, endpoint=False)
dots = axes.scatter(np.sin(angles), np.cos(angles), s=60, edgecolors="#888888", linewidths=0.5)
label = axes.text(0, 0, "", ha="center", va="center")
axes.legend(
    handles=[
        matplotlib.lines.Line2D([], [], marker="o", ls="", color=color, label=name)
        for name, color in zip(HANDS, COLORS)
    ],
    loc="upper right",
    fontsize="x-small",
)


def show(frame):
    claimed, ingested, retired = snapshots[frame][:3]
    dots.set_facecolor([COLORS[state] for state in states[frame]])
    label.set_text(f"claimed {claimed:,}\ningested {ingested:,}\nretired {retired:,}")
    return dots, label


movie = HTML(FuncAnimation(figure, show, frames=moving, interval=150).to_jshtml())
plt.close(figure)
movie

# %% [markdown]
# What to see: positions only grow, slots are reused, nothing is overwritten before it is retired. The
# same over time, a line a slot:

# %%
figure, axes = plt.subplots(figsize=(9, 3))
axes.imshow(states.T, aspect="auto", cmap=matplotlib.colors.ListedColormap(COLORS), vmin=0, vmax=4)
axes.set(xlabel="snapshot", ylabel="slot", title="who holds which slot")
plt.show()

# %% [markdown]
# ## The lease
#
# The executor does not hold the GPU for ever: it parks when it is idle, when its lease ends, or when
# asked; the next submission launches it again. That is why `torch.cuda.synchronize()` beside it returns.

# %%
rt.park()
print(rt.stats().parked, rt)
rt.add(a, b).result()
print(rt.stats().relaunches, "relaunches so far")
