"""The process that compiles: a rendered source arrives, machine code of its bodies leaves.

python -m gpuos_numba.inject.compile_server

Numba holds the GIL while it compiles, so this is no thread of the user's process. It imports the compilers
once and stays; each body is compiled in a fork of it, so that bodies of one source compile at the same time
and a compiler that crashes takes one body with it. What somebody waits for most, one body for the GPU of an
expression, is compiled here: the fork and its page faults would be a third of the time. It ends when its
standard input does.

    request    one line of JSON: name, source, file, arity, target, threads, bodies = [[variant, symbol], ..];
               or name, target, threads, inlined = [{"op_id", "name", "source", "arity"}, ...] and
               bodies = [["worker", ""]], for a worker that has these functions inlined
    answer     one line of JSON: [{"size", "log", "took_s"} or {"error"}, ...], then the bodies' bytes
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
import warnings
from typing import Any, BinaryIO

Answer = tuple[dict[str, Any], bytes]


def compile_one(request: dict[str, Any], variant: str, symbol: str) -> Answer:
    """One body, or what went wrong, with file and line of the rendered source where it has them."""
    begin = time.perf_counter()
    namespace: dict[str, Any] = {"__name__": f"gpuos_injected_{request['name']}"}
    name, target = request["name"], request["target"]
    try:
        if variant == "worker":
            from ..machines import cuda_inject

            functions = [_inlined(each) for each in request["inlined"]]
            data, log = cuda_inject.compile_inlined(functions, target, request["threads"])
            return {"size": len(data), "log": log, "took_s": time.perf_counter() - begin}, data
        exec(compile(request["source"], request["file"], "exec"), namespace)
        if target.startswith("cpu"):
            from ..machines import cpu, cpu_memory

            data = cpu.compile_object(namespace[f"make_{name}_{variant}"](cpu_memory), symbol)
            log = ""
        else:
            from ..machines import cuda_inject

            data, log = cuda_inject.compile_injected(
                namespace, name, variant, request["arity"], symbol, target, request["threads"]
            )
    except Exception as error:  # a compiler raises what it likes; the user reads it
        where = [
            each for each in traceback.extract_tb(error.__traceback__) if each.filename == request["file"]
        ]
        place = f" (line {where[-1].lineno} of {request['file']})" if where else ""
        text = str(error).strip()
        return {"error": f"{type(error).__name__}: {text[-1500:]}{place}"}, b""
    return {"size": len(data), "log": log, "took_s": time.perf_counter() - begin}, data


def _inlined(source: dict[str, Any]) -> Any:
    """A function that the worker is to have inlined."""
    from ..device import elementwise, runs

    namespace: dict[str, Any] = {"__name__": f"gpuos_injected_{source['name']}"}
    exec(compile(source["source"], f"<{source['name']}>", "exec"), namespace)
    one, four = f"make_{source['name']}", f"make_{source['name']}_four"
    entry = elementwise.Entry(source["op_id"], namespace[one], make4=namespace.get(four))
    return runs.Inlined(entry, source["arity"])


def _identity(m: Any) -> Any:
    def value(x: Any, y: Any, z: Any, p: Any, q: Any) -> Any:
        return x

    return value


@functools.cache
def _warm_cpu(variant: str) -> None:
    """Compile a body of a kind once, so that forks find the helpers that all of the kind share."""
    from ..device import elementwise
    from ..machines import cpu, cpu_memory

    m: Any = cpu_memory
    if variant == "any":
        entry = elementwise.Entry(0, _identity)
        cpu.compile_object(elementwise.make_typed(m, elementwise.compute_f32(m), entry), "gpuos_warm_any")
    elif variant == "plain":
        cpu.compile_object(elementwise.make_plain(m, 1, _identity), "gpuos_warm_plain")


def _prepare(request: dict[str, Any]) -> None:
    """What all forks need, here, so that they inherit it."""
    if request["target"].startswith("cpu"):
        for variant, _ in request["bodies"]:
            _warm_cpu(variant)
    else:
        from ..machines import cuda_inject

        for variant, _ in request["bodies"]:
            if variant in cuda_inject.WALKS:
                cuda_inject.lower_walk(variant, 3 if variant == "any" else request["arity"])


def _fork(request: dict[str, Any], variant: str, symbol: str) -> int:
    """Compile in a fork; the descriptor that its answer can be read from."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    if os.fork():
        os.close(writer)
        return reader
    try:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            head, data = compile_one(request, variant, symbol)
            pipe.write(json.dumps(head).encode() + b"\n" + data)
    finally:
        os._exit(0)


def _is_quick(request: dict[str, Any]) -> bool:
    """One body, of this library's own walk and an expression that was checked: it leaves nothing behind."""
    if request["target"].startswith("cpu") or len(request["bodies"]) > 1:
        return False
    from ..machines import cuda_inject

    return request["bodies"][0][0] in cuda_inject.WALKS


def _answer(request: dict[str, Any]) -> list[Answer]:
    try:
        _prepare(request)
    except Exception as error:  # as in compile_one
        return [({"error": f"{type(error).__name__}: {error}"}, b"")] * len(request["bodies"])
    if _is_quick(request):
        return [compile_one(request, *request["bodies"][0])]
    readers = [_fork(request, variant, symbol) for variant, symbol in request["bodies"]]
    answers: list[Answer] = []
    for reader in readers:
        with os.fdopen(reader, "rb") as pipe:
            head, _, data = pipe.read().partition(b"\n")
        if head:
            answers.append((json.loads(head), data))
        else:
            answers.append(({"error": "the compiler crashed; what it printed is on standard error"}, b""))
        os.wait()
    return answers


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more."""
    for line in requests:
        made = _answer(json.loads(line))
        answers.write(json.dumps([head for head, _ in made]).encode() + b"\n")
        for _, data in made:
            answers.write(data)
        answers.flush()


if __name__ == "__main__":
    # Only answers go to the pipe, whatever the tools print.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    serve(sys.stdin.buffer, pipe)
