"""The memory of one executor: what crosses the bus, what stays on the device, what stays on the host.

A machine allocates three areas and this module says what lies where and how it begins. Every array starts on
a line of its own, so no two writers share one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..descriptor import LAYOUT_BYTES, MASK_64, TASK_BYTES, done_word
from ..protocol import (
    CONTEXT,
    DEVICE_STATE,
    FAILURE,
    FAILURE_SLOTS,
    HOST_CONTEXT,
    HOST_CONTROL,
    HOST_LAUNCH,
    HOST_STATE,
    HOST_WORDS,
    LAYOUT_SLOTS,
    LINE,
    TABLE_SPACE,
    WORKER_STATE_BYTES,
)

Sizes = dict[str, int]
TABLE_LENGTH: Final = 1 << 16
"""Operator ids below this have a place in the CPU machine's table."""


def bus_sizes(capacity: int) -> Sizes:
    """Arrays that host and device both reach."""
    return {
        "host_ring": capacity * TASK_BYTES,
        "stamps": capacity * 8,
        "host_done": capacity * 8,
        "host_control": HOST_CONTROL.itemsize,
        "host_state": HOST_STATE.itemsize,
        "host_layouts": LAYOUT_SLOTS * LAYOUT_BYTES,
        "tables": TABLE_SPACE,
    }


def device_sizes(capacity: int, workers: int) -> Sizes:
    """Arrays that only blocks touch."""
    return {
        "context": CONTEXT.itemsize,
        "device_state": DEVICE_STATE.itemsize,
        "worker_states": workers * WORKER_STATE_BYTES,
        "device_ring": capacity * TASK_BYTES,
        "device_done": capacity * 8,
        "queue": 2 * capacity * 8,
        "item_ends": capacity * 8,
        "tile_counts": capacity * 8,
        "tile_status": capacity * 8,
        "layouts": LAYOUT_SLOTS * LAYOUT_BYTES,
    }


def host_sizes() -> Sizes:
    """Arrays that only the host touches, and the CPU machine's operator table."""
    return {
        "words": HOST_WORDS.itemsize,
        "failures": FAILURE_SLOTS * FAILURE.itemsize,
        "host_context": HOST_CONTEXT.itemsize,
        "launch": HOST_LAUNCH.itemsize,
        "table": TABLE_LENGTH * 8,
    }


def carve(sizes: Sizes) -> tuple[Sizes, int]:
    """Offsets of the arrays, and the bytes that all of them take."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // LINE) * LINE
    return offsets, end


def aligned_bytes(size: int) -> np.ndarray[Any, Any]:
    """Zeroed host memory that starts on a line."""
    raw = np.zeros(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size]


class HostArrays:
    """The host's views of the bus and host areas.

    Args:
        bus: memory of the bus area, as the host sees it.
        capacity: slots of the ring.
        start: the first position.
        max_run: longest run of linked tasks.
    """

    def __init__(self, bus: np.ndarray[Any, Any], capacity: int, start: int, max_run: int) -> None:
        self._bus = bus
        offsets, _ = carve(bus_sizes(capacity))
        sizes = bus_sizes(capacity)
        host_offsets, host_size = carve(host_sizes())
        self._host = aligned_bytes(host_size)

        def on_bus(name: str, dtype: Any) -> np.ndarray[Any, Any]:
            return bus[offsets[name] : offsets[name] + sizes[name]].view(dtype)

        def on_host(name: str, dtype: Any) -> np.ndarray[Any, Any]:
            at = host_offsets[name]
            return self._host[at : at + host_sizes()[name]].view(dtype)

        self.ring = on_bus("host_ring", np.uint64)
        self.stamps = on_bus("stamps", np.uint64)
        self.done = on_bus("host_done", np.uint64)
        self.control = on_bus("host_control", HOST_CONTROL)
        self.state = on_bus("host_state", HOST_STATE)
        self.layouts = on_bus("host_layouts", np.uint8)
        self.tables = on_bus("tables", np.uint64)
        self.words = on_host("words", HOST_WORDS)
        self.failures = on_host("failures", FAILURE)
        self.context = on_host("host_context", HOST_CONTEXT)
        self.launch = on_host("launch", HOST_LAUNCH)
        self.table = on_host("table", np.uint64)

        self.stamps[:] = first_words(capacity, start, stamp=True)
        self.done[:] = first_words(capacity, start, stamp=False)
        self.words["claimed"] = self.words["retired"] = self.words["watched"] = start
        self.state["ingested"] = start
        context = self.context[0]
        context["ring"], context["stamps"] = self.ring.ctypes.data, self.stamps.ctypes.data
        context["done"], context["state"] = self.done.ctypes.data, self.state.ctypes.data
        context["words"], context["failures"] = self.words.ctypes.data, self.failures.ctypes.data
        context["control"], context["launch"] = self.control.ctypes.data, self.launch.ctypes.data
        context["mask"], context["max_run"] = capacity - 1, min(max_run, capacity)
        self.address = int(self.context.ctypes.data)
        """What the compiled host functions take."""


def first_words(capacity: int, start: int, *, stamp: bool) -> np.ndarray[Any, Any]:
    """Stamps or done words of a new ring: each slot says that the position one lap before is long done.

    Zeroed memory would not do: 0 is the stamp of position 2^64 - 1.
    """
    words = np.zeros(capacity, np.uint64)
    for position in range(start - capacity, start):
        before = position & MASK_64
        words[before % capacity] = (before + 1) & MASK_64 if stamp else done_word(before)
    return words


def device_context(addresses: Sizes, capacity: int) -> np.ndarray[Any, Any]:
    """The executor's argument record, from addresses as the device sees them."""
    context = np.zeros(1, CONTEXT)
    for name in CONTEXT.names or ():
        if name in addresses:
            context[name] = addresses[name]
    context["mask"], context["table_length"] = capacity - 1, TABLE_LENGTH
    return context


def device_state(start: int) -> np.ndarray[Any, Any]:
    """The executor's state before its first launch."""
    state = np.zeros(1, DEVICE_STATE)
    state["cursor"] = start
    return state
