"""The interpreter: an expression arrives as a program in device memory, and runs without being compiled.

A program is a checked expression in postfix. Every thread runs it for its own elements on a stack of
registers that shift, so nothing lives in local memory. It costs a branch an operation and element: it is for
the time until the compiled operator takes over.

    u64              code words in the low half, constants in the high half
    u8 [8 a word]    opcodes: those of device/functions.py, PUSH_X and on, CONSTANT + its number; END fills up
    f32 [...]        constants, to a multiple of 8 bytes
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...descriptor import IMMEDIATE, DType, Status, offset
from ...errors import ArgumentError
from ...machines.base import Body, Primitives
from ...shapes import broadcast_shape
from ..elements import make_load_f32, make_store_f32, make_tile_range
from ..functions import BINARY, FUNCTIONS, NUMBER, TERNARY, TRUTH, make_functions
from ..operands import OUTPUT, make_address_of, make_element_of, make_kind_of
from .planning import TILE, tile_count, walks_of
from .table import (
    FLOATS,
    INJECTED_IDS,
    Draw,
    Example,
    Kernel,
    Operand,
    Operator,
    Plan,
    Result,
    Tolerance,
    pack,
    refuse_dtype,
)

Array = Any
INTERPRETER_ID: Final = INJECTED_IDS - 1
DEPTH: Final = 8
"""Values that the stack holds."""
LOCALS: Final = 4
MAX_CODE: Final = 256
"""Opcodes of a program, and bytes."""
MAX_CONSTANTS: Final = 64
MAX_PROGRAM: Final = 8 + MAX_CODE + 4 * MAX_CONSTANTS

END: Final = 0
PUSH_X, PUSH_Y, PUSH_Z = 64, 65, 66
PUSH_LOCAL: Final = 72
STORE_LOCAL: Final = 80
"""Pops into a local."""
CONSTANT: Final = 128


def make_interpreter(m: Primitives) -> Body:
    """The body: inputs are the program and up to three operands of any layout; scalar 0 is its length."""
    u64, f32 = m.u64, m.f32
    thread_index, block_width, barrier = m.thread_index, m.block_width, m.barrier
    load_task_u64, load_task_u32 = m.load_task_u64, m.load_task_u32
    load_u64, load_u8, store_u32, load_scratch_f32 = m.load_u64, m.load_u8, m.store_u32, m.load_scratch_f32
    bits_f32 = m.bits_f32
    tile_range, load_element, store_element = make_tile_range(m), make_load_f32(m), make_store_f32(m)
    address_of, kind_of, element_of = make_address_of(m), make_kind_of(m), make_element_of(m)
    functions = make_functions(m)
    exp, log, log1p, expm1 = (functions[name] for name in ("exp", "log", "log1p", "expm1"))
    sqrt, rsqrt, sin, cos = (functions[name] for name in ("sqrt", "rsqrt", "sin", "cos"))
    tanh, sigmoid, erf, absolute = (functions[name] for name in ("tanh", "sigmoid", "erf", "abs"))
    floor, ceil, round_even, sign = (functions[name] for name in ("floor", "ceil", "round", "sign"))
    relu, square, cube = functions["relu"], functions["square"], functions["cube"]
    smaller, larger, power = functions["smaller"], functions["larger"], functions["power"]
    fma = functions["fma"]

    COUNT, TILES, SCALARS = u64(offset("count")), u64(offset("tiles")), u64(offset("scalars"))
    PROGRAM, X, Y, Z, OUT = (u64(place) for place in (0, 1, 2, 3, OUTPUT))
    IS_NUMBER, MOST, CODE = u64(IMMEDIATE), u64(MAX_PROGRAM), u64(8)
    ZERO, ONE, TWO, THREE, FOUR, SEVEN, EIGHT = (u64(n) for n in (0, 1, 2, 3, 4, 7, 8))
    SIXTEEN, TWENTY_FOUR, HALF, LOW_HALF = u64(16), u64(24), u64(32), u64(0xFFFFFFFF)
    BYTE, CONSTANT_MASK = u64(0xFF), u64(MAX_CONSTANTS - 1)
    CODE_WORDS, CONSTANTS = u64(MAX_CODE // 8), u64(MAX_CONSTANTS)
    NOTHING, UNIT = f32(0), f32(1)
    OK, BAD = np.int32(Status.OK), np.int32(Status.BAD_DESCRIPTOR)
    FIRST_BINARY, FIRST_TERNARY, AFTER = u64(BINARY.start), u64(TERNARY.start), u64(TERNARY.stop)
    AT_LOCAL, AT_STORE, AT_CONSTANT = u64(PUSH_LOCAL), u64(STORE_LOCAL), u64(CONSTANT)
    PUSHES_X, PUSHES_Y, PUSHES_Z = u64(PUSH_X), u64(PUSH_Y), u64(PUSH_Z)
    code = {name: u64(function.opcode) for name, function in FUNCTIONS.items()}
    EXP, LOG, LOG1P, EXPM1 = code["exp"], code["log"], code["log1p"], code["expm1"]
    SQRT, RSQRT, SIN, COS = code["sqrt"], code["rsqrt"], code["sin"], code["cos"]
    TANH, SIGMOID, ERF, ABS = code["tanh"], code["sigmoid"], code["erf"], code["abs"]
    FLOOR, CEIL, ROUND, SIGN = code["floor"], code["ceil"], code["round"], code["sign"]
    RELU, NEG, SQUARE, CUBE = code["relu"], code["neg"], code["square"], code["cube"]
    NOT, AS_TRUTH = code["not"], code["truth"]
    MIN, MAX, POW = code["min"], code["max"], code["pow"]
    ADD, SUB, MUL, DIV = code["add"], code["sub"], code["mul"], code["div"]
    LESS, LESS_EQUAL, EQUAL = code["less"], code["less_equal"], code["equal"]
    AND, OR, WHERE, FMA = code["and"], code["or"], code["where"], code["fma"]

    def held(truth: Any) -> Any:
        return UNIT if truth else NOTHING

    held = m.device(held)

    def unary(op: Any, a: Any) -> Any:
        if op == EXP:
            return exp(a)
        if op == LOG:
            return log(a)
        if op == LOG1P:
            return log1p(a)
        if op == EXPM1:
            return expm1(a)
        if op == SQRT:
            return sqrt(a)
        if op == RSQRT:
            return rsqrt(a)
        if op == SIN:
            return sin(a)
        if op == COS:
            return cos(a)
        if op == TANH:
            return tanh(a)
        if op == SIGMOID:
            return sigmoid(a)
        if op == ERF:
            return erf(a)
        if op == ABS:
            return absolute(a)
        if op == FLOOR:
            return floor(a)
        if op == CEIL:
            return ceil(a)
        if op == ROUND:
            return round_even(a)
        if op == SIGN:
            return sign(a)
        if op == RELU:
            return relu(a)
        if op == NEG:
            return -a
        if op == SQUARE:
            return square(a)
        if op == CUBE:
            return cube(a)
        if op == NOT:
            return held(a == NOTHING)
        if op == AS_TRUTH:
            return held(a != NOTHING)
        return a  # a truth is a number already

    unary = m.device(unary)

    def binary(op: Any, a: Any, b: Any) -> Any:
        if op == ADD:
            return a + b
        if op == SUB:
            return a - b
        if op == MUL:
            return a * b
        if op == DIV:
            return a / b
        if op == LESS:
            return held(a < b)
        if op == LESS_EQUAL:
            return held(a <= b)
        if op == EQUAL:
            return held(a == b)
        if op == MIN:
            return smaller(a, b)
        if op == MAX:
            return larger(a, b)
        if op == POW:
            return power(a, b)
        if op == AND:
            return a * b
        return larger(a, b)  # or

    binary = m.device(binary)

    def known(op: Any) -> Any:
        if op < FIRST_BINARY:
            return op <= AS_TRUTH
        if op < FIRST_TERNARY:
            return op <= OR
        return op == WHERE or op == FMA

    known = m.device(known)

    def operand(context: Any, task: Any, place: Any, index: Any) -> Any:
        kind = kind_of(task, place)
        if kind == IS_NUMBER:
            return bits_f32(address_of(task, place))
        return load_element(kind, element_of(context, task, place, index))

    operand = m.device(operand)

    def interpret(context: Any, task: Any, tile: Any, arena: Any) -> Any:
        size = load_task_u64(task + SCALARS)
        if size > MOST:
            size = MOST
        # The program may begin at any byte.
        program = address_of(task, PROGRAM)
        at = thread_index() * FOUR
        while at < size:
            word = load_u8(program + at) | (load_u8(program + at + ONE) << EIGHT)
            word |= (load_u8(program + at + TWO) << SIXTEEN) | (load_u8(program + at + THREE) << TWENTY_FOUR)
            store_u32(arena + at, word)
            at += block_width() * FOUR
        barrier()
        head = load_u64(arena)
        words = head & LOW_HALF
        count = head >> HALF
        if words > CODE_WORDS or count > CONSTANTS or CODE + words * EIGHT + count * FOUR > size:
            return BAD
        constants = arena + CODE + words * EIGHT
        end_of_code = words * EIGHT
        status = OK
        begin, end = tile_range(load_task_u64(task + COUNT), load_task_u32(task + TILES), tile)
        index = begin + thread_index()
        while index < end:
            x = operand(context, task, X, index)
            y = operand(context, task, Y, index)
            z = operand(context, task, Z, index)
            s0 = NOTHING
            s1 = NOTHING
            s2 = NOTHING
            s3 = NOTHING
            s4 = NOTHING
            s5 = NOTHING
            s6 = NOTHING
            s7 = NOTHING
            t0 = NOTHING
            t1 = NOTHING
            t2 = NOTHING
            t3 = NOTHING
            counter = ZERO
            eight = ZERO  # opcodes that come next
            while counter < end_of_code:
                if counter & SEVEN == ZERO:
                    eight = load_u64(arena + CODE + counter)
                op = eight & BYTE
                eight >>= EIGHT
                counter += ONE
                if op == ZERO:
                    counter = end_of_code
                elif op < FIRST_BINARY:
                    s0 = unary(op, s0)
                elif op < FIRST_TERNARY:
                    s0 = binary(op, s1, s0)
                    s1 = s2
                    s2 = s3
                    s3 = s4
                    s4 = s5
                    s5 = s6
                    s6 = s7
                elif op < AFTER:
                    if op == WHERE:
                        if s2 == NOTHING:
                            s1 = s0
                    else:
                        s1 = fma(s2, s1, s0)
                    s0 = s1
                    s1 = s3
                    s2 = s4
                    s3 = s5
                    s4 = s6
                    s5 = s7
                elif op >= AT_STORE and op < AT_CONSTANT:
                    place = op & THREE
                    if place == ZERO:
                        t0 = s0
                    elif place == ONE:
                        t1 = s0
                    elif place == TWO:
                        t2 = s0
                    else:
                        t3 = s0
                    s0 = s1
                    s1 = s2
                    s2 = s3
                    s3 = s4
                    s4 = s5
                    s5 = s6
                    s6 = s7
                else:
                    s7 = s6
                    s6 = s5
                    s5 = s4
                    s4 = s3
                    s3 = s2
                    s2 = s1
                    s1 = s0
                    if op >= AT_CONSTANT:
                        which = op & CONSTANT_MASK
                        if which >= count:
                            status = BAD
                        s0 = load_scratch_f32(constants + which * FOUR)
                    elif op >= AT_LOCAL:
                        place = op & THREE
                        s0 = t3
                        if place == ZERO:
                            s0 = t0
                        elif place == ONE:
                            s0 = t1
                        elif place == TWO:
                            s0 = t2
                    elif op == PUSHES_X:
                        s0 = x
                    elif op == PUSHES_Y:
                        s0 = y
                    elif op == PUSHES_Z:
                        s0 = z
                    else:
                        status = BAD
                if op < AFTER:
                    if not known(op):
                        status = BAD
            store_element(kind_of(task, OUT), element_of(context, task, OUT, index), s0)
            index += block_width()
        return status

    return interpret


# --- the truth ---


def unpack_program(program: bytes) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Opcodes and constants of a program. Raises ArgumentError where it is none."""
    if len(program) < 8 or len(program) % 8 or len(program) > MAX_PROGRAM:
        raise ArgumentError(f"a program of {len(program)} bytes: make it with inject.postfix.compile_postfix")
    words, count = struct.unpack_from("<II", program)
    if 8 + 8 * words + 4 * count + (4 if count % 2 else 0) != len(program):
        raise ArgumentError("a program whose header is not true: make it with inject.postfix.compile_postfix")
    if words > MAX_CODE // 8 or count > MAX_CONSTANTS:
        raise ArgumentError("a program too long: make it with inject.postfix.compile_postfix")
    code = program[8 : 8 + 8 * words]
    return code, np.frombuffer(program, np.float32, count, 8 + 8 * words)


def pack_program(code: Sequence[int], constants: Sequence[float]) -> bytes:
    """The bytes of a program."""
    words = -(-len(code) // 8)
    padded = bytes(code).ljust(8 * words, bytes([END]))
    data = struct.pack("<II", words, len(constants)) + padded + np.asarray(constants, np.float32).tobytes()
    return data.ljust(-(-len(data) // 8) * 8, b"\0")


_BY_OPCODE: Final = {function.opcode: function for function in FUNCTIONS.values()}


def run_program(program: bytes, *operands: Array) -> Array:
    """What a program makes of up to three operands, in NumPy. Raises ArgumentError where it is none."""
    code, constants = unpack_program(program)
    given: list[Array] = [np.asarray(each).astype(np.float32) for each in operands]
    shape = np.broadcast_shapes(*(each.shape for each in given))
    given += [np.float32(0)] * (3 - len(given))
    stack: list[Array] = []
    kept: dict[int, Array] = {}
    try:
        for op in code:
            if op == END:
                break
            if op >= CONSTANT:
                stack.append(constants[op - CONSTANT])
            elif STORE_LOCAL <= op < STORE_LOCAL + LOCALS:
                kept[op - STORE_LOCAL] = stack.pop()
            elif PUSH_LOCAL <= op < PUSH_LOCAL + LOCALS:
                stack.append(kept[op - PUSH_LOCAL])
            elif PUSH_X <= op <= PUSH_Z:
                stack.append(given[op - PUSH_X])
            else:
                function = _BY_OPCODE[op]
                arguments = [stack.pop() for _ in function.takes][::-1]
                taken = [
                    a != 0 if kind == TRUTH else a for a, kind in zip(arguments, function.takes, strict=True)
                ]
                stack.append(np.asarray(function.truth(*taken)).astype(np.float32))
            if len(stack) > DEPTH:
                raise IndexError
        (result,) = stack
    except (IndexError, KeyError, ValueError):
        raise ArgumentError("a program that does not leave one value: make it with compile_postfix") from None
    return np.broadcast_to(result, shape)


# --- the table ---

_KERNEL: Final = Kernel(INTERPRETER_ID, "interpret", make_interpreter)


def infer(
    inputs: Sequence[Operand | None], /, operator: str = "interpret", first: int = 1
) -> tuple[Result, ...]:
    """Of a program and its operands, which messages call `inputs[first]` and on."""
    program, *operands = inputs
    assert program is not None
    if program.dtype is not DType.U8 or program.immediate:
        raise refuse_dtype("interpret", "inputs[0]", program.dtype, (DType.U8,))
    if len(program.shape) != 1 or not program.contiguous:
        raise ArgumentError(f"inputs[0], a program of shape {program.shape}: give its bytes as they are")
    if program.elements % 8 or not 8 <= program.elements <= MAX_PROGRAM:
        raise ArgumentError(
            f"inputs[0], a program of {program.elements} bytes: give a multiple of 8 up to {MAX_PROGRAM}"
        )
    given, names = [], []
    for place, each in enumerate(operands, first):
        if each is None:
            raise ArgumentError(f"inputs[{place}] is None: leave it out, and those after it")
        if not each.immediate and each.dtype not in FLOATS:
            raise refuse_dtype(operator, f"inputs[{place}]", each.dtype, FLOATS)
        given.append(each)
        names.append(f"inputs[{place}]")
    arrays = {each.dtype for each in given if not each.immediate}
    if not arrays:
        raise ArgumentError(f"{operator} of numbers alone: give it at least one array")
    dtype = arrays.pop() if len(arrays) == 1 else DType.F32
    return (Result(broadcast_shape(given, names), dtype),)


def _plan(inputs: Sequence[Operand], outputs: Sequence[Operand], blocks: int, /) -> Plan:
    out = outputs[0]
    if out.dtype not in FLOATS:
        raise refuse_dtype("interpret", "out", out.dtype, FLOATS)
    walks = walks_of([None, *inputs[1:]], out)
    return Plan(
        INTERPRETER_ID, out.elements, tile_count(out.elements, blocks), walks, pack("Q", inputs[0].elements)
    )


def _spec(program: Array, *operands: Array) -> Array:
    return run_program(np.ascontiguousarray(program).tobytes(), *operands)


# What NumPy and the device compute alike, to the bit; one function that is only close may come last.
_ALIKE: Final = ("abs", "floor", "ceil", "round", "relu", "neg", "square", "not", "sqrt")
_ALIKE2: Final = ("add", "sub", "mul", "div", "min", "max", "less", "less_equal", "equal", "and", "or")
_CLOSE: Final = ("exp", "log", "log1p", "expm1", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf")
_CONSTANTS: Final = (0.0, -0.0, 1.0, -2.5, 0.5, float("inf"), float("nan"))


def _example(draw: Draw) -> Example:
    arity = draw.integer(1, 3)
    code: list[int] = []
    constants: list[float] = []
    kept: list[int] = []

    def emit(levels: int, room: int, wanted: str) -> None:
        choice = draw.integer(0, 5) if levels and room > 2 else 0
        if choice <= 1:
            gives = NUMBER
            where = draw.integer(0, 5)
            if where == 0 and len(constants) < MAX_CONSTANTS:
                code.append(CONSTANT + len(constants))
                constants.append(draw.choice(_CONSTANTS))
            elif where == 1 and kept:
                code.append(draw.choice(kept))
            else:
                code.append(PUSH_X + draw.integer(0, arity - 1))
        else:
            names = {2: _ALIKE, 3: _ALIKE2, 4: _ALIKE2, 5: ("where",)}[choice]
            function = FUNCTIONS[draw.choice(names)]
            for place, kind in enumerate(function.takes):
                emit(levels - 1, room - place, kind)
            code.append(function.opcode)
            gives = function.gives
        if gives != wanted:
            code.append(FUNCTIONS[wanted].opcode)

    for local in range(draw.integer(0, LOCALS)):
        emit(2, DEPTH, NUMBER)
        code.append(STORE_LOCAL + local)
        kept.append(PUSH_LOCAL + local)
    emit(4, DEPTH, NUMBER)
    if draw.integer(0, 1):
        code.append(FUNCTIONS[draw.choice(_CLOSE)].opcode)
    if len(code) > MAX_CODE:
        code, constants = [PUSH_X], []
    program = np.frombuffer(pack_program(code, constants), np.uint8).copy()
    shape = draw.shape()
    dtype = draw.choice(FLOATS)
    operands: list[Any] = [draw.array(draw.broadcastable(shape), dtype) for _ in range(arity)]
    if arity > 1 and draw.integer(0, 3) == 0:
        operands[-1] = draw.choice([2.0, -0.5, 1])
    return [program, *operands], {}


OPERATORS: Final = (
    Operator(
        "interpret",
        "injected",
        (2, 4),
        1,
        FLOATS,
        "what the program inputs[0] makes of the elements of inputs[1], inputs[2] and inputs[3]",
        infer,
        _plan,
        (_KERNEL,),
        _spec,
        # exp is good to 2 ulp and sigmoid adds a sum and a quotient; where exp(-a) is infinite sigmoid is 0.
        tolerance=Tolerance(f32=8 * 2.0**-24, atol=2.0**-126),
        same_ok=(1, 2, 3),
        tiling=f"above {TILE} elements",
        cost="Moves each element once, for some 30 instructions an operation.",
        source="gpuos_numba/inject/postfix.py makes programs.",
        example=_example,
        numbers=True,
    ),
)
