# %% [markdown]
# # 05: One decode step of attention
#
# A token through one attention layer of a small Llama-like model: norm, projections, rotary embedding,
# cache, attention, output projection, residual. Nine tasks from gpuos operators, against the same in
# PyTorch if it is installed, else in NumPy.

# %%
import time

import numpy as np
from matplotlib import pyplot as plt

import gpuos_numba as gpuos
from gpuos_numba import testing

rt = gpuos.Runtime()
HEADS, DIM, LENGTH = 8, 64, 128
WIDTH = HEADS * DIM
random = np.random.default_rng(0)


def weights(*shape):
    return (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


host = {
    "norm": np.ones(WIDTH, np.float32),
    **{name: weights(WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")},
}
W = {name: testing.to_device(rt, each) for name, each in host.items()}

# %% [markdown]
# ## The step
#
# `after=` says what needs what: the three projections are independent of each other, and so are the two
# rotations.


# %%
def empty(*shape):
    return testing.to_device(rt, np.zeros(shape, np.float32))


BUFFERS = {name: empty(1, WIDTH) for name in ("normed", "q", "k", "v", "attended", "projected", "out")}
ROTATED = {name: empty(1, HEADS, DIM) for name in ("q", "k")}
POSITIONS = [testing.to_device(rt, np.array([i])) for i in range(LENGTH)]


def decode(x, position, keys, values):
    """The ticket of a step; its output is BUFFERS["out"]."""
    t, at = BUFFERS, POSITIONS[position]
    normed = rt.rms_norm(x, W["norm"], out=t["normed"])
    q, k, v = (rt.matmul(t["normed"], W[f"w{name}"], out=t[name], after=normed) for name in ("q", "k", "v"))
    q = rt.rope(t["q"].reshape(1, HEADS, DIM), at, out=ROTATED["q"], after=q)
    k = rt.rope(t["k"].reshape(1, HEADS, DIM), at, out=ROTATED["k"], after=k)
    new = [each.reshape(1, HEADS, 1, DIM) for each in (ROTATED["k"], t["v"])]
    cached = rt.kv_append(*new, at, out=(keys, values), after=[k, v])
    attended = rt.sdpa(
        ROTATED["q"].reshape(1, HEADS, 1, DIM),
        keys[:, :, : position + 1],
        values[:, :, : position + 1],
        out=t["attended"].reshape(1, HEADS, 1, DIM),
        after=[q, cached],
    )
    projected = rt.matmul(t["attended"], W["wo"], out=t["projected"], after=attended)
    return rt.add(x, t["projected"], out=t["out"], after=projected)


# %% [markdown]
# ## The rival


# %%
def numpy_decode(x, position, keys, values):
    normed = x / np.sqrt((x * x).mean() + 1e-6) * host["norm"]
    q, k, v = (normed @ host[f"w{name}"] for name in ("q", "k", "v"))
    angles = position * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rotate(each):
        low, high = np.split(each.reshape(HEADS, DIM), 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    keys[0, :, position], values[0, :, position] = rotate(k), v.reshape(HEADS, DIM)
    scores = np.einsum("hd,hkd->hk", rotate(q), keys[0, :, : position + 1]) / np.sqrt(DIM)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    attended = np.einsum("hk,hkd->hd", weight, values[0, :, : position + 1]).reshape(1, WIDTH)
    return x + attended @ host["wo"]


try:
    import torch
except ImportError:
    torch = None


def torch_decode(x, position, keys, values):
    """Eager PyTorch, on the machine of the Runtime."""
    normed = torch.nn.functional.rms_norm(x, (WIDTH,), T["norm"], 1e-6)
    q, k, v = (normed @ T[f"w{name}"] for name in ("q", "k", "v"))
    angles = position * 10000.0 ** (-torch.arange(DIM // 2, device=x.device) / (DIM // 2))
    cos, sin = angles.cos(), angles.sin()

    def rotate(each):
        low, high = each.view(HEADS, DIM).chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    keys[0, :, position], values[0, :, position] = rotate(k), v.view(HEADS, DIM)
    attended = torch.nn.functional.scaled_dot_product_attention(
        rotate(q).view(1, HEADS, 1, DIM), keys[:, :, : position + 1], values[:, :, : position + 1]
    )
    return x + attended.reshape(1, WIDTH) @ T["wo"]


if torch is not None:
    place = "cuda" if rt.machine == "cuda" else "cpu"
    T = {name: torch.from_numpy(each).to(place) for name, each in host.items()}
    rival, name = torch_decode, "torch"
else:
    rival, name = numpy_decode, "numpy"

# %% [markdown]
# ## The same tokens, the same outputs

# %%
STEPS = 24
tokens = random.standard_normal((STEPS, 1, WIDTH)).astype(np.float32)


def make_caches(kind):
    made = [np.zeros((1, HEADS, LENGTH, DIM), np.float32) for _ in range(2)]
    if kind == "torch":
        return [torch.from_numpy(each).to(place) for each in made]
    return [testing.to_device(rt, each) for each in made] if kind == "gpuos" else made


ours, theirs, truth = make_caches("gpuos"), make_caches(name), make_caches("numpy")
inputs = [testing.to_device(rt, token) for token in tokens]
rival_inputs = [torch.from_numpy(token).to(place) for token in tokens] if name == "torch" else tokens
worst = 0.0
for step in range(STEPS):
    decode(inputs[step], step, *ours).result()
    got, want = testing.to_host(BUFFERS["out"]), numpy_decode(tokens[step], step, *truth)
    other = testing.to_host(rival(rival_inputs[step], step, *theirs))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(other, want, rtol=1e-3, atol=1e-4)
    worst = max(worst, float(np.abs(got - want).max()))
print(f"{STEPS} tokens, largest difference {worst:.1e}")

# %% [markdown]
# ## Time per token
#
# From Python, one task after another: here a call costs its checks. Prepared batches and programs avoid
# them (`experiments/attention_decode.py`).


# %%
def per_token(step):
    begin = time.perf_counter_ns()
    for position in range(STEPS):
        step(position)
    if rt.machine == "cuda":
        rt.synchronize()
        if torch is not None:
            torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / STEPS / 1e3


found = {
    "gpuos": per_token(lambda i: decode(inputs[i], i, *ours).wait()),
    name: per_token(lambda i: rival(rival_inputs[i], i, *theirs)),
}
figure, axes = plt.subplots(figsize=(6, 1.8))
axes.barh(list(found), list(found.values()))
axes.set(xlabel="µs a token", title=f"one attention layer, {rt.device_name}")
plt.show()
found
