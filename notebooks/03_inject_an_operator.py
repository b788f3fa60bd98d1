# %% [markdown]
# # 03: Inject an operator, mend it, roll back
#
# New element-wise operators enter a running executor: nobody pauses, and every change moves a version
# counter. Text is parsed against an allow-list and never evaluated as Python.
# %%
import numpy as np

import gpuos_numba as gpuos
from gpuos_numba import testing

rt = gpuos.Runtime()
x = testing.to_device(rt, np.linspace(-3, 3, 7, dtype=np.float32))
history = [("start", rt.stats().generation)]


def run(name):
    """The operator's result on the host."""
    return testing.to_host(rt.submit(name, [x]).result()).round(3)


# %% [markdown]
# ## Inject
#
# An expression, or a small Python function, which is read and never called. This one has a mistake: it
# should be `x * sigmoid(x)`.
# %%
rt.inject("swish", "x + sigmoid(x)", replace=True)
history.append(("inject with a mistake", rt.stats().generation))
run("swish")

# %% [markdown]
# ## Hot-fix
#
# Tasks that were submitted before keep the operator they were submitted with.
# %%
before = rt.submit("swish", [x])


@rt.operator
def swish(x):
    return x * sigmoid(x)  # noqa: F821  a name of the expression language


history.append(("hot-fix", rt.stats().generation))
after = rt.submit("swish", [x])
print(testing.to_host(before.result()).round(3))
print(testing.to_host(after.result()).round(3))
host = testing.to_host(x)
np.testing.assert_allclose(testing.to_host(after.result()), host / (1 + np.exp(-host)), rtol=1e-4)

# %% [markdown]
# ## Roll back, and watch the counter
#
# A rollback is a change like any other: the counter goes on.
# %%
print("rolled back:", rt.rollback())
history.append(("roll back", rt.stats().generation))
print(run("swish"))
rt.inject("swish", "x * sigmoid(x)", replace=True)
history.append(("inject again", rt.stats().generation))

# %%
from matplotlib import pyplot as plt

names, generations = zip(*history)
figure, axes = plt.subplots(figsize=(7, 2.5))
axes.step(range(len(names)), generations, where="post", marker="o")
axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize="small")
axes.set(ylabel="generation")
plt.show()

# %% [markdown]
# ## What is refused
#
# Whatever is outside of the language, with the place and the remedy, and before anything changes.
# %%
generation = rt.stats().generation
for text in ("__import__('os').system('true')", "x.__class__", "[x for x in y]", "x ** ", "undefined(x)"):
    try:
        rt.inject("bad", text)
    except gpuos.ExpressionError as error:
        print(f"{text!r}: {error}")
assert rt.stats().generation == generation

# %% [markdown]
# Every change and refusal is in a hash-chained log: `python -m gpuos_numba audit show`.
