"""Whatever text comes, it is refused with a clear error or computes what NumPy does; nothing crashes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gpuos_numba as gpuos
from gpuos_numba import testing
from gpuos_numba.device.functions import FUNCTIONS

F32 = np.float32
PUBLIC = [each for each in FUNCTIONS.values() if each.public]
WORDS = """__import__('os')|x.__class__|lambda: x|10**10**10|x[0]|f'{x}'|(x := 1)|import os|{{7*7}}
if|else|not|1e999|0x10|1_0|\u0445""".replace("\n", "|")
JUNK = [*"'\"[]{}:;#@%&|~^\\`$?\0\n\t_.,()", *WORDS.split("|")]


class Writer:
    """Expressions from a seed: most are of the language, the others nearly."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self) -> str:
        made = self.number(self.random.randint(0, 4))
        if self.random.random() < 0.3:
            at = self.random.randint(0, len(made))
            cut = at + self.random.choice([0, 0, 1, 3])
            made = made[:at] + self.random.choice([*JUNK, ""]) + made[cut:]
        return made

    def number(self, depth: int) -> str:
        pick = self.random.choice
        if depth == 0:
            return pick(["x", "y", "z", "0", "1", "2.5", "-3", "1e-3", "pi", "inf", "nan", "1e38"])
        kind = self.random.randint(0, 5)
        a, b = self.number(depth - 1), self.number(self.random.randint(0, depth - 1))
        if kind == 0:
            function = pick(PUBLIC)
            operands = [self.number(depth - 1) for _ in function.takes]
            return f"{function.name}({', '.join(operands)})"
        if kind == 1:
            return f"({a} if {self.truth(depth - 1)} else {b})"
        if kind == 2:
            return f"-({a})"
        return f"({a} {pick(['+', '-', '*', '/'])} {b})"

    def truth(self, depth: int) -> str:
        pick = self.random.choice
        a, b = self.number(depth), self.number(0)
        compared = f"{a} {pick(['<', '<=', '>', '>=', '==', '!='])} {b}"
        return pick([compared, f"not {compared}", f"{compared} and x < y", f"{compared} or z == 0"])


VALUES = np.array([0, -0.0, 1, -1, 0.5, 3, -7, 1e-3, 1e30, -1e30, np.inf, -np.inf, np.nan, 2, 10, -0.25], F32)


@pytest.fixture
def rt(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gpuos.Runtime]:
    for variable, name in (("KEY_FILE", "key"), ("CACHE_DIR", "cache"), ("AUDIT_FILE", "audit")):
        monkeypatch.setenv(f"GPUOS_{variable}", str(tmp_path / name))
    with gpuos.Runtime(machine) as runtime:
        yield runtime


def fuzz(rt: gpuos.Runtime, count: int) -> None:
    writer = Writer(count)
    x, y = (each.ravel() for each in np.meshgrid(VALUES, VALUES))
    operands = [x, y, np.roll(x, 5)]
    placed = [testing.to_device(rt, each) for each in operands]
    taken = refused = agreed = 0
    for _ in range(count):
        text = writer.text()
        try:
            operator = rt.inject("f", text, replace=True)
        except gpuos.ArgumentError as error:  # ExpressionError too
            assert str(error)
            refused += 1
            continue
        arity = operator.inputs[0]
        result = testing.to_host(rt.submit(operator, placed[:arity]).result(timeout_s=30))
        with np.errstate(all="ignore"):
            wanted = np.asarray(operator.spec(*operands[:arity]))  # type: ignore[misc]
            # A last bit may decide a comparison, and what comes after then is another number.
            same = np.isclose(result, wanted, rtol=1e-4, atol=1e-30, equal_nan=True)
        taken += 1
        agreed += bool(same.all())
        assert same.mean() > 0.7, text
    assert taken > count / 4 and refused > count / 20
    assert agreed > 0.95 * taken
    assert rt.stats().failed == 0
    assert testing.to_host(rt.add(placed[0], placed[0]).result())[2] == 2


def test_texts_are_refused_or_computed_as_numpy_does(rt: gpuos.Runtime) -> None:
    fuzz(rt, 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_texts_are_refused_or_computed_as_numpy_does(rt: gpuos.Runtime) -> None:
    fuzz(rt, 100_000)
