"""Tasks that were checked together and are submitted together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import ArgumentError


class Batch:
    """Tasks that were checked once and can be submitted again and again.

    Attributes:
        tasks: the descriptors, `descriptor.TASK` records.
        accesses: the memory that each reads and writes, `host.order.ACCESS` records.
        operator: name for messages.
        outputs: the output of each task.
    """

    def __init__(
        self,
        tasks: np.ndarray[Any, Any],
        operator: str,
        outputs: list[Any],
        owners: list[Any],
        walks: list[Any],
        accesses: np.ndarray[Any, Any],
    ) -> None:
        self.tasks = tasks
        self.accesses = accesses
        self.operator = operator
        self.outputs = outputs
        self._owners = owners  # the arrays of each task
        self._walks = walks  # of each task: None, or a Walk or None for each place
        self._distinct = {walk for each in walks if each is not None for walk in each if walk is not None}
        self._epoch = -1
        self._sources: dict[type, Any] = {}  # one array of each library, and below the streams they name
        self._streams: set[int] = set()

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, which: slice) -> Batch:
        if not isinstance(which, slice):
            raise ArgumentError(f"batch[{which!r}]: take a slice, such as batch[{which!r}:{which!r}+1]")
        part = Batch(
            self.tasks[which].copy(),
            self.operator,
            self.outputs[which],
            self._owners[which],
            self._walks[which],
            self.accesses[which].copy(),
        )
        part._sources, part._streams = self._sources, self._streams
        return part

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """One batch of all tasks, in order."""
        if not batches:
            raise ArgumentError("Batch.concatenate([]): give at least one batch")
        names = {batch.operator for batch in batches}
        whole = Batch(
            np.concatenate([batch.tasks for batch in batches]),
            names.pop() if len(names) == 1 else "batch",
            [output for batch in batches for output in batch.outputs],
            [owner for batch in batches for owner in batch._owners],
            [walk for batch in batches for walk in batch._walks],
            np.concatenate([batch.accesses for batch in batches]),
        )
        for batch in batches:
            whole._sources |= batch._sources
            whole._streams |= batch._streams
        return whole
