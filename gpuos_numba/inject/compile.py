"""A request arrives, machine code of its bodies leaves: from the signed cache, or from the compiling process.

A body's symbol is made of its content key, so equal code has one name, whoever asked for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import MachineError
from ..machines.base import Code
from . import render
from .keys import content_key
from .render import Rendered
from .store import Store, cache_folder

SYMBOL_DIGITS: Final = 32


@dataclass(slots=True)
class Compiled:
    """Bodies of one request.

    Attributes:
        codes: by variant.
        key, signature: of the first body, for the audit log.
        timings_s: seconds by stage.
        cached: whether all came from the cache.
    """

    codes: dict[str, Code] = field(default_factory=dict)
    key: str = ""
    signature: str = ""
    timings_s: dict[str, float] = field(default_factory=dict)
    cached: bool = True


def body_key(rendered: Rendered, variant: str, target: str, threads: int) -> str:
    """The content key of one variant of a rendered source."""
    return content_key(f"{rendered.source}\n# body {variant}, {threads} threads", target)


class Compiler:
    """Compiles for one target. Safe to call from any thread; one request is compiled at a time.

    Args:
        target: see `keys`.
        threads: a block's.
        store: the cache; default the user's.
    """

    def __init__(self, target: str, threads: int, store: Store | None = None) -> None:
        self.target, self.threads = target, threads
        self._store = Store() if store is None else store

    def missing(self, rendered: Rendered) -> list[str]:
        """The variants that are not in the cache."""
        return [each for each in self.variants(rendered) if self._get(rendered, each)[1] is None]

    def variants(self, rendered: Rendered) -> tuple[str, ...]:
        """Those that are worth compiling: on the CPU the body for all dtypes serves halves as well."""
        unneeded = "half" if self.target.startswith("cpu") else ""
        return tuple(each for each in rendered.variants if each != unneeded)

    def symbols(self, rendered: Rendered, variants: Sequence[str]) -> list[str]:
        """What the variants' bodies are called, compiled or not."""
        return [_symbol(body_key(rendered, each, self.target, self.threads)) for each in variants]

    def _get(self, rendered: Rendered, variant: str) -> tuple[str, bytes | None]:
        key = body_key(rendered, variant, self.target, self.threads)
        return key, self._store.get("object", key)

    def compile(self, rendered: Rendered, arity: int, variants: Sequence[str] | None = None) -> Compiled:
        """Bodies of the variants, default all.

        Raises:
            MachineError: a compiler refused, naming the place in the source, or there is none.
        """
        begin = time.perf_counter()
        made = Compiled()
        keys, wanted = {}, []
        for variant in variants or self.variants(rendered):
            key, data = self._get(rendered, variant)
            keys[variant] = key
            if data is None:
                wanted.append(variant)
            else:
                made.codes[variant] = Code(_symbol(key), data)
        made.timings_s["cache"] = time.perf_counter() - begin
        if wanted:
            made.cached = False
            begin = time.perf_counter()
            for variant, data in self._ask(rendered, arity, {each: keys[each] for each in wanted}).items():
                made.codes[variant] = Code(_symbol(keys[variant]), data)
                self._store.put("object", keys[variant], data)
            made.timings_s["compile"] = time.perf_counter() - begin
        first = next(iter(keys))
        made.key = keys[first]
        made.signature = self._store.signature("object", made.key, made.codes[first].data)
        made.codes = {variant: made.codes[variant] for variant in keys}
        return made

    def compile_worker(self, inlined: Sequence[tuple[int, Rendered, int]]) -> Code:
        """A worker with functions, (id, source, arity), inlined. Some seconds. Raises MachineError."""
        sources = [
            {"op_id": op_id, "name": each.name, "source": each.source, "arity": arity}
            for op_id, each, arity in inlined
        ]
        text = f"{json.dumps(sources)}\n# worker, {self.threads} threads"
        key = content_key(text, self.target)
        data = self._store.get("object", key)
        if data is None:
            request = {"name": "worker", "target": self.target, "threads": self.threads}
            ((head, data),) = server().ask({**request, "inlined": sources, "bodies": [["worker", ""]]})
            if "error" in head:
                raise MachineError(f"compiling the worker failed: {head['error']}")
            self._store.put("object", key, data)
        return Code("gpuos_worker", data)

    def _ask(self, rendered: Rendered, arity: int, keys: Mapping[str, str]) -> dict[str, bytes]:
        file = f"<{rendered.file_name}>"
        with contextlib.suppress(OSError):  # errors then show no line of a file
            file = str(render.write(rendered, cache_folder() / "sources"))
        request = {
            "name": rendered.name,
            "source": rendered.source,
            "file": file,
            "arity": arity,
            "target": self.target,
            "threads": self.threads,
            "bodies": [[variant, _symbol(key)] for variant, key in keys.items()],
        }
        answers = server().ask(request)
        for variant, (head, _) in zip(keys, answers, strict=True):
            if "error" in head:
                raise MachineError(f"{rendered.name}: compiling its body {variant!r} failed: {head['error']}")
        return {variant: data for variant, (_, data) in zip(keys, answers, strict=True)}


def _symbol(key: str) -> str:
    return f"gpuos_injected_{key[:SYMBOL_DIGITS]}"


class Server:
    """The compiling process: started at its first use, again where it died, ended with this process.

    One request at a time; whoever is interrupted while it waits for an answer ends the process with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def start(self) -> None:
        """Have it import the compilers now. Returns at once."""
        with self._lock:
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process
        # After a fork, the parent's is none of ours.
        if process is not None and self._pid == os.getpid() and process.poll() is None:
            return process
        package = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
        }
        environment["CUDA_VISIBLE_DEVICES"] = ""  # compiling needs no GPU, and must not hold memory of one
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.compile_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C in a terminal is not meant for it
        )
        self._process, self._pid = process, os.getpid()
        return process

    def ask(self, request: Mapping[str, Any]) -> list[tuple[dict[str, Any], bytes]]:
        """Heads and bodies. Raises MachineError where the process cannot run."""
        with self._lock:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                heads = json.loads(process.stdout.readline())
                answers = [(head, process.stdout.read(head.get("size", 0))) for head in heads]
                if any(len(data) != head.get("size", 0) for head, data in answers):
                    raise ValueError("in the middle of its answer")
            except (OSError, ValueError) as error:
                self._end()
                raise MachineError(
                    f"the compiling process ended ({error}): is there memory for one more process?"
                ) from error
            except BaseException:  # Ctrl-C: the answer that is to come is nobody's
                self._end()
                raise
            return answers

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._pid == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was buffered has nobody to read it
                        pipe.close()

    def close(self) -> None:
        """End the process, also in the middle of a compilation."""
        self._end()


@functools.cache
def server() -> Server:
    """This process's."""
    made = Server()
    atexit.register(made.close)
    return made


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=server.cache_clear)  # a lock that a thread held stays locked there
