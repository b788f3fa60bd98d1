"""The compiling process: what is asked is what is answered, also after what went wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from gpuos_numba.errors import MachineError
from gpuos_numba.inject import request
from gpuos_numba.inject.compile import Server, server
from gpuos_numba.inject.render import render
from gpuos_numba.machines import cuda_switch


@pytest.fixture
def compiling() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def asked(text: str, symbol: str) -> dict[str, Any]:
    source = render(request.elementwise("f", text)).source
    bodies = [["plain", symbol]]
    return {"name": "f", "source": source, "file": "<f>", "arity": 1, "target": "cpu",
            "threads": 256, "bodies": bodies}  # fmt: skip


def test_ctrl_c_while_it_compiles_leaves_no_answer_for_the_next(compiling: Server) -> None:
    """Forbidden: the next request gets the machine code that the interrupted one had asked for."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    compiling.ask(asked("x + 1", "gpuos_warm"))
    before = signal.signal(signal.SIGALRM, interrupt)
    came = 0
    try:
        for delay in (0.001, 0.01, 0.05):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                try:
                    compiling.ask(asked("x / (1 + exp(-x))", "gpuos_first"))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                came += 1
            ((head, data),) = compiling.ask(asked("x * 3", "gpuos_second"))
            assert "error" not in head and b"gpuos_second" in data and b"gpuos_first" not in data
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came > 0


def test_half_an_answer_is_none(compiling: Server) -> None:
    half = "import sys; sys.stdin.readline(); print('[{\"size\": 100}]'); print('half')"
    compiling._process = subprocess.Popen(
        [sys.executable, "-c", half], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    compiling._pid = os.getpid()
    with pytest.raises(MachineError, match="in the middle"):
        compiling.ask(asked("x * 3", "gpuos_third"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    """Forbidden: a lock that another thread held, or a thread that is not there, stops the child."""
    server()
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with server()._lock, cuda_switch._lock:
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        free = server()._lock.acquire(timeout=5) and cuda_switch._lock.acquire(timeout=5)
        os._exit(0 if free and not cuda_switch._begun else 1)
    _, status = os.waitpid(child, 0)
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
