"""The executor: one launch. Block 0 is the pump, every other block a worker."""

from __future__ import annotations

from typing import Any

from ..machines.base import Body


def make_block(pump: Body, worker: Body, u64: Any, device: Any) -> Body:
    """`block(context, number, workers, scratch)`: what one block of the launch does."""
    ZERO = u64(0)

    def block(context: Any, number: Any, workers: Any, scratch: Any) -> None:
        if number == ZERO:
            pump(context, workers, scratch)
        else:
            worker(context, number, workers, scratch)

    compiled: Body = device(block)
    return compiled
