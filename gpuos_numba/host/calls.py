"""The short way: a call that has been made before, with tensors of the same kind, costs about a microsecond.

Checking a call in Python takes tens of microseconds, and says the same each time the dtypes, shapes, strides
and parameters are the same. So a checked call leaves its descriptor here as a template, under a key of all
that the checks depended on but the addresses. The next such call reads its tensors through DLPack's C
exchange API, finds the template, compares the addresses for overlap, and writes the descriptor into the ring:
one compiled function, which declines whatever is out of the ordinary. The long way then takes the call, or
says what is wrong.

Owned by one Runtime. Everything here runs with the GIL held, so calls and changes exclude each other.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np

from ..descriptor import FIFTH_INPUT, MAX_INPUTS, TASK, TASK_BYTES, TASK_WORDS, offset
from ..machines.base import Body, HostPrimitives
from ..protocol import HOST_CONTEXT, HOST_WORDS, field
from .arrays import PAGE_ZERO, ArrayView, byte_range
from .order import ACCESS, ORDER, make_fill, make_lock
from .query import make_query
from .ring import make_publish, make_retire, make_try_claim

DECLINED, WANTS, UNSERVED = -1, -2, -3
"""Answers of a call that are no position. WANTS, less twice the entry's number: the call is known and wants
what its entry says, outputs to be allocated or a look at its tensors' negative bits. UNSERVED, less twice the
position: enqueued, and somebody must launch."""

OPERANDS: Final = 7
KEY_WORDS: Final = 64
ENTRIES: Final = 2048
TABLE: Final = 4 * ENTRIES
TENSOR_BYTES: Final = 64  # of which DLPack's DLTensor takes 48
ALWAYS: Final = (1 << 64) - 1
_POSITION_BITS: Final = 61
"""Positions beyond are for the long way, so that an answer can hold twice one, and its sign."""

ENTRY: Final = np.dtype(
    [
        ("hash", "<u8"),
        ("token", "<u8"),
        ("words", "<u8"),  # of the key
        ("operands", "<u8"),  # all: those of the key, then outputs and workspace that the call allocates
        ("checked", "<u8"),  # 1: some operand could be lazily negated, look before sending
        ("epoch", "<u8"),  # of the layout table that the template's slots belong to, or ALWAYS
        ("key", "<u8", KEY_WORDS),
        ("low", "<i8", OPERANDS),  # bytes that an operand reaches, from its address: [low, high)
        ("high", "<i8", OPERANDS),
        ("writes", "<u8", OPERANDS),  # 1 where it is an output
        ("same", "<u8", OPERANDS),  # of an output: bits of the operands that it may be exactly
        ("place", "<u8", OPERANDS),  # where in the task its address goes
        ("align", "<u8", OPERANDS),  # itemsize - 1
        ("task", "<u8", TASK_WORDS),
    ]
)

CACHE: Final = np.dtype(
    [
        ("host", "<u8"),  # HOST_CONTEXT
        ("order", "<u8"),  # host.order.ORDER, 0 where tasks are not ordered by what they touch
        ("read", "<u8"),  # DLPack's dltensor_from_py_object_no_sync
        ("stream", "<u8"),  # DLPack's current_work_stream, 0 where streams do not matter
        ("clear", "<u8"),  # PyErr_Clear
        ("driver", "<u8"),  # query.DRIVER
        ("number", "<u8"),  # PyLong_FromLongLong
        ("kinds", "<u8", 2),  # the types that tensors may have: torch.Tensor, torch.nn.Parameter
        ("device", "<u8"),  # DLPack's device, type | ordinal << 32
        ("epoch", "<u8"),
        ("table", "<u8"),
        ("entries", "<u8"),
        ("current", "<u8"),  # where `stream` puts its answer
        ("sent", "<u8"),  # calls that were
        ("tensors", "u1", OPERANDS * TENSOR_BYTES),
        ("key", "<u8", KEY_WORDS),
    ]
)

# DLTensor of DLPack 1.x: data, device (type, ordinal), ndim, dtype (code, bits, lanes), shape, strides,
# byte_offset. github.com/dmlc/dlpack, include/dlpack/dlpack.h.
_DEVICE, _NDIM_DTYPE, _SHAPE, _STRIDES, _BYTE_OFFSET = 8, 16, 24, 32, 40
_API: Final = b"dlpack_exchange_api"
_READ_AT, _STREAM_AT = 40, 48  # in DLPackExchangeAPI
_KIND_AT, _BYTES_AT = object.__basicsize__ - 8, bytes.__basicsize__ - 1  # in a PyObject, a PyBytesObject
BOUND: Final = np.dtype([("cache", "<u8"), ("token", "<u8"), ("keyed", "<u8")])
"""What a call's function is bound to. keyed: how many of the tensors belong to the key, where it is known
that none is lazily negated; 0 for all, and unknown."""


@cache
def make_call(m: HostPrimitives) -> Body:
    """`call(bound, objects, count) -> number`, as a PyCFunction with METH_FASTCALL.

    bound: `bytes` of a BOUND; objects: array of PyObject*, those of the key first; number: a Python int, the
    position or one of the answers above.
    """
    u64 = m.u64
    load_u64, store_u64 = m.load_u64, m.store_u64
    call_read, call_stream, call_nothing, call_number = (
        m.call_read,
        m.call_stream,
        m.call_nothing,
        m.call_number,
    )
    query = make_query(m)
    try_claim, publish, retire = make_try_claim(m), make_publish(m), make_retire(m)
    fill, lock = make_fill(m), make_lock(m)

    def of(name: str) -> Any:
        return u64(field(CACHE, name))

    def at(name: str) -> Any:
        return u64(field(ENTRY, name))

    ORDER_AT, SCRATCH_TASK, SCRATCH_ACCESS = (
        of("order"),
        u64(field(ORDER, "task")),
        u64(field(ORDER, "access")),
    )
    ACCESS_COUNT, ACCESS_RANGES = u64(field(ACCESS, "count")), u64(field(ACCESS, "ranges"))
    HOST, READ, STREAM, CLEAR, DRIVER_AT = of("host"), of("read"), of("stream"), of("clear"), of("driver")
    NUMBER, KINDS = of("number"), of("kinds")
    DEVICE, EPOCH, TABLE_AT, ENTRIES_AT = of("device"), of("epoch"), of("table"), of("entries")
    CURRENT, TENSORS, KEY, SENT_AT = of("current"), of("tensors"), of("key"), of("sent")
    E_HASH, E_TOKEN, E_WORDS, E_OPERANDS = at("hash"), at("token"), at("words"), at("operands")
    E_CHECKED, E_EPOCH, E_KEY, E_LOW, E_HIGH = at("checked"), at("epoch"), at("key"), at("low"), at("high")
    E_WRITES, E_SAME, E_PLACE, E_ALIGN, E_TASK = (
        at("writes"),
        at("same"),
        at("place"),
        at("align"),
        at("task"),
    )
    ENTRY_SIZE, TENSOR_SIZE, TASK_SIZE = u64(ENTRY.itemsize), u64(TENSOR_BYTES), u64(TASK_BYTES)
    RING, MASK = u64(field(HOST_CONTEXT, "ring")), u64(field(HOST_CONTEXT, "mask"))
    WORDS = u64(field(HOST_CONTEXT, "words"))
    CLAIMED, RETIRED = u64(field(HOST_WORDS, "claimed")), u64(field(HOST_WORDS, "retired"))
    load_acquire_sys = m.load_acquire_sys
    TABLE_MASK, MOST_WORDS, ALWAYS_VALID = u64(TABLE - 1), u64(KEY_WORDS), u64(ALWAYS)
    DEVICE_AT, NDIM_AT, SHAPE_AT, STRIDES_AT, BYTES_AT = (
        u64(each) for each in (_DEVICE, _NDIM_DTYPE, _SHAPE, _STRIDES, _BYTE_OFFSET)
    )
    ZERO, ONE, EIGHT, SIXTEEN, HALF = u64(0), u64(1), u64(8), u64(16), u64(32)
    NOWHERE = u64(PAGE_ZERO)
    LOW_HALF, TOP_BIT, MOST, POSITION_BITS = u64(0xFFFFFFFF), u64(1 << 63), u64(OPERANDS), u64(_POSITION_BITS)
    KIND_AT, BOUND_AT = u64(_KIND_AT), u64(_BYTES_AT)
    TOKEN, KEYED = u64(_BYTES_AT + field(BOUND, "token")), u64(_BYTES_AT + field(BOUND, "keyed"))
    # Multiply and rotate, from FxHash (rustc); the key is compared in full.
    FACTOR, LEFT, RIGHT = u64(0x517CC1B727220A95), u64(5), u64(59)
    ANSWER_DECLINED, ANSWER_WANTS, ANSWER_UNSERVED = (
        u64(answer & ALWAYS) for answer in (DECLINED, WANTS, UNSERVED)
    )

    def mixed(hash: Any, word: Any) -> Any:
        return (((hash << LEFT) | (hash >> RIGHT)) ^ word) * FACTOR

    mixed = m.device(mixed)

    def read(cache: Any, object: Any, tensor: Any) -> Any:
        """1 where an object is a tensor on our device; its DLTensor is then in scratch."""
        kind = load_u64(object + KIND_AT)
        if kind != load_u64(cache + KINDS) and kind != load_u64(cache + KINDS + EIGHT):
            return ZERO
        if call_read(load_u64(cache + READ), object, tensor) != ZERO:
            call_nothing(load_u64(cache + CLEAR))
            return ZERO
        if load_u64(tensor + DEVICE_AT) != load_u64(cache + DEVICE):
            return ZERO
        return ONE

    read = m.device(read)

    def add_key(cache: Any, tensor: Any, words: Any, hash: Any) -> Any:
        """Append dtype, ndim, shape and strides to the key; 0 words where it grows too long."""
        kind = load_u64(tensor + NDIM_AT)
        ndim = kind & LOW_HALF
        if words + ONE + ndim + ndim > MOST_WORDS:
            return ZERO, hash
        key = cache + KEY
        store_u64(key + words * EIGHT, kind)
        hash = mixed(hash, kind)
        words += ONE
        shape, strides = load_u64(tensor + SHAPE_AT), load_u64(tensor + STRIDES_AT)
        dim = ZERO
        while dim < ndim:
            extent = load_u64(shape + dim * EIGHT)
            stride = load_u64(strides + dim * EIGHT)
            store_u64(key + words * EIGHT, extent)
            store_u64(key + (words + ONE) * EIGHT, stride)
            hash = mixed(mixed(hash, extent), stride)
            words += ONE + ONE
            dim += ONE
        return words, hash

    add_key = m.device(add_key)

    def find(cache: Any, token: Any, words: Any, hash: Any) -> Any:
        """Address of the entry with this key, or 0."""
        table, key = load_u64(cache + TABLE_AT), cache + KEY
        slot = hash >> HALF
        while True:
            number = load_u64(table + (slot & TABLE_MASK) * EIGHT)
            if number == ZERO:
                return ZERO
            entry = load_u64(cache + ENTRIES_AT) + (number - ONE) * ENTRY_SIZE
            if (
                load_u64(entry + E_HASH) == hash
                and load_u64(entry + E_TOKEN) == token
                and load_u64(entry + E_WORDS) == words
            ):
                word = ZERO
                while word < words and load_u64(entry + E_KEY + word * EIGHT) == load_u64(key + word * EIGHT):
                    word += ONE
                if word == words:
                    return entry
            slot += ONE

    find = m.device(find)

    def free_of_overlap(entry: Any, tensors: Any, count: Any) -> Any:
        """1 where no output shares memory with another operand, unless it may be exactly that one."""
        a = ZERO
        while a < count:
            if load_u64(entry + E_WRITES + a * EIGHT) != ZERO:
                base_a = load_u64(tensors + a * TENSOR_SIZE)
                low_a = base_a + load_u64(entry + E_LOW + a * EIGHT)
                size_a = load_u64(entry + E_HIGH + a * EIGHT) - load_u64(entry + E_LOW + a * EIGHT)
                same = load_u64(entry + E_SAME + a * EIGHT)
                b = ZERO
                while b < count:
                    base_b = load_u64(tensors + b * TENSOR_SIZE)
                    if a != b and not (base_a == base_b and (same >> b) & ONE != ZERO):
                        low_b = base_b + load_u64(entry + E_LOW + b * EIGHT)
                        size_b = load_u64(entry + E_HIGH + b * EIGHT) - load_u64(entry + E_LOW + b * EIGHT)
                        apart = low_b - low_a
                        if size_a != ZERO and size_b != ZERO:
                            if apart < size_a or (apart >= TOP_BIT and ZERO - apart < size_b):
                                return ZERO
                    b += ONE
            a += ONE
        return ONE

    free_of_overlap = m.device(free_of_overlap)

    def write(entry: Any, tensors: Any, count: Any, task: Any) -> None:
        """A descriptor: the template with these addresses."""
        index = ZERO
        while index < TASK_SIZE:
            store_u64(task + index, load_u64(entry + E_TASK + index))
            index += EIGHT
        index = ZERO
        while index < count:
            place = load_u64(entry + E_PLACE + index * EIGHT)
            store_u64(task + place, load_u64(tensors + index * TENSOR_SIZE))
            index += ONE

    write = m.device(write)

    def add_ranges(entry: Any, tensors: Any, count: Any, access: Any, written: Any, ranges: Any) -> Any:
        """Append what the operands reach that are written (1) or not (0); how many ranges there are then."""
        index = ZERO
        while index < count:
            base = load_u64(tensors + index * TENSOR_SIZE)
            low = base + load_u64(entry + E_LOW + index * EIGHT)
            high = base + load_u64(entry + E_HIGH + index * EIGHT)
            if load_u64(entry + E_WRITES + index * EIGHT) == written and low != high:
                place = access + ACCESS_RANGES
                known = ZERO
                while known < ranges and (load_u64(place) != low or load_u64(place + EIGHT) != high):
                    place += SIXTEEN
                    known += ONE
                if known == ranges:
                    store_u64(place, low)
                    store_u64(place + EIGHT, high)
                    ranges += ONE
            index += ONE
        return ranges

    add_ranges = m.device(add_ranges)

    def send_ordered(host: Any, order: Any, entry: Any, tensors: Any, count: Any) -> Any:
        """(position, slots published, 1 where somebody must launch); no position where there are no slots."""
        lock(order)
        write(entry, tensors, count, order + SCRATCH_TASK)
        access = order + SCRATCH_ACCESS
        ranges = add_ranges(entry, tensors, count, access, ONE, ZERO)
        store_u64(access, ranges)
        store_u64(access + ACCESS_COUNT, add_ranges(entry, tensors, count, access, ZERO, ranges))
        done, position, slots = fill(
            host, order, order + SCRATCH_TASK, order + SCRATCH_ACCESS, ONE, ZERO, ZERO, ZERO
        )
        unserved = ZERO
        if slots != ZERO:
            unserved = publish(host, position, slots)
        return position + slots - ONE, done, unserved

    send_ordered = m.device(send_ordered)

    def send(cache: Any, token: Any, keyed: Any, looked: Any, count: Any) -> Any:
        """The tensors are in scratch."""
        tensors = cache + TENSORS
        words = ZERO
        hash = token * FACTOR
        index = ZERO
        while index < keyed:
            words, hash = add_key(cache, tensors + index * TENSOR_SIZE, words, hash)
            if words == ZERO:
                return ANSWER_DECLINED
            index += ONE
        entry = find(cache, token, words, hash)
        if entry == ZERO:
            return ANSWER_DECLINED
        epoch = load_u64(entry + E_EPOCH)
        if epoch != ALWAYS_VALID and epoch != load_u64(cache + EPOCH):
            return ANSWER_DECLINED
        if load_u64(entry + E_OPERANDS) != count or (load_u64(entry + E_CHECKED) != ZERO and looked == ZERO):
            number = (entry - load_u64(cache + ENTRIES_AT)) // ENTRY_SIZE
            return ANSWER_WANTS - number - number
        index = ZERO
        while index < count:
            address = load_u64(tensors + index * TENSOR_SIZE) + load_u64(
                tensors + index * TENSOR_SIZE + BYTES_AT
            )
            store_u64(tensors + index * TENSOR_SIZE, address)
            if address < NOWHERE and load_u64(entry + E_LOW + index * EIGHT) != load_u64(
                entry + E_HIGH + index * EIGHT
            ):
                return ANSWER_DECLINED  # its storage was freed: the long way refuses it
            if address & load_u64(entry + E_ALIGN + index * EIGHT) != ZERO:
                return ANSWER_DECLINED
            index += ONE
        if free_of_overlap(entry, tensors, count) == ZERO:
            return ANSWER_DECLINED
        if load_u64(cache + STREAM) != ZERO:
            # Inputs that a stream still works on are the long way's to order.
            if call_stream(load_u64(cache + STREAM), load_u64(cache + DEVICE), cache + CURRENT) != ZERO:
                call_nothing(load_u64(cache + CLEAR))
                return ANSWER_DECLINED
            if query(load_u64(cache + DRIVER_AT), load_u64(cache + CURRENT)) != ZERO:
                return ANSWER_DECLINED
        host = load_u64(cache + HOST)
        order = load_u64(cache + ORDER_AT)
        claimed = load_acquire_sys(load_u64(host + WORDS) + CLAIMED)
        if claimed >> POSITION_BITS != ZERO:
            return ANSWER_DECLINED
        if order != ZERO:
            used = claimed - load_acquire_sys(load_u64(host + WORDS) + RETIRED)
            if used + used > load_u64(host + MASK):
                retire(host)  # what has retired need not be tracked
            position, done, unserved = send_ordered(host, order, entry, tensors, count)
            if done == ZERO:
                return ANSWER_DECLINED
        else:
            position, granted = try_claim(host, ONE)
            if granted == ZERO:
                retire(host)
                position, granted = try_claim(host, ONE)
                if granted == ZERO:
                    return ANSWER_DECLINED
            write(
                entry, tensors, count, load_u64(host + RING) + (position & load_u64(host + MASK)) * TASK_SIZE
            )
            unserved = publish(host, position, ONE)
        store_u64(cache + SENT_AT, load_u64(cache + SENT_AT) + ONE)
        if unserved != ZERO:
            return ANSWER_UNSERVED - position - position
        return position

    send = m.device(send)

    def take(cache: Any, token: Any, keyed: Any, objects: Any, count: Any) -> Any:
        if count > MOST:
            return ANSWER_DECLINED
        tensors = cache + TENSORS
        index = ZERO
        while index < count:
            if read(cache, load_u64(objects + index * EIGHT), tensors + index * TENSOR_SIZE) == ZERO:
                return ANSWER_DECLINED
            index += ONE
        if keyed == ZERO:
            return send(cache, token, count, ZERO, count)
        return send(cache, token, keyed, ONE, count)

    take = m.device(take)

    def call(bound: Any, objects: Any, count: Any) -> Any:
        cache = load_u64(bound + BOUND_AT)
        answer = take(cache, load_u64(bound + TOKEN), load_u64(bound + KEYED), objects, count)
        return call_number(load_u64(cache + NUMBER), answer)

    return m.device(call)


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    ]


_FASTCALL: Final = 0x80  # METH_FASTCALL


@cache
def compiled() -> SimpleNamespace:
    """`call` as machine code that holds the GIL, for which DLPack asks; its PyMethodDef; and what makes a
    Python function of that and the bytes of a BOUND. The first two must outlive the functions."""
    from numba import cfunc, types

    from ..machines import cpu_memory as m

    u64 = types.uint64
    code = cfunc(u64(u64, u64, u64), error_model="numpy")(make_call(m).py_func)  # type: ignore[attr-defined]
    method = _Method(b"call", code.address, _FASTCALL, None)
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )
    return SimpleNamespace(code=code, method=method, new=new)


def exchange_api(kind: type) -> tuple[int, int] | None:
    """Addresses of DLPack's read and stream functions of an array type, None where it has none."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        address = pointer(capsule, _API)
    except (ValueError, ctypes.ArgumentError):
        return None
    major = ctypes.c_uint32.from_address(address).value
    read = ctypes.c_uint64.from_address(address + _READ_AT).value
    stream = ctypes.c_uint64.from_address(address + _STREAM_AT).value
    return (read, stream) if major == 1 and read and stream else None


class Wanted(NamedTuple):
    """What a known call wants before it can be sent."""

    way: Callable[..., int]  # that answered so
    looks: bool  # whether to look at negative bits
    allocates: list[Any]  # (shape, dtype) of what is to be allocated
    send: Callable[..., int]  # what then takes all tensors


class Calls:
    """Templates of one Runtime's calls.

    Args:
        host: address of the HOST_CONTEXT.
        api: what `exchange_api` gave.
        kinds: the two types of tensors.
        device: DLPack's (type, ordinal) of the tensors that are ours.
        driver: address of a `query.DRIVER`, 0 where streams do not matter.
        order: address of the ORDER, 0 where tasks are not ordered by what they touch.
    """

    def __init__(
        self,
        host: int,
        api: tuple[int, int],
        kinds: tuple[type, type],
        device: tuple[int, int],
        driver: int,
        order: int = 0,
    ) -> None:
        self._code = compiled()
        self._kinds = kinds  # they live as long as their addresses are compared with
        self._record = np.zeros(1, CACHE)
        self._table = np.zeros(TABLE, np.uint64)
        self._entries = np.zeros(ENTRIES, ENTRY)
        record = self._record[0]
        record["host"], record["read"], record["driver"] = host, api[0], driver
        record["order"], record["kinds"] = order, [id(kind) for kind in kinds]
        record["stream"] = api[1] if driver else 0
        for name, function in ("clear", "PyErr_Clear"), ("number", "PyLong_FromLongLong"):
            record[name] = ctypes.cast(getattr(ctypes.pythonapi, function), ctypes.c_void_p).value or 0
        record["device"] = device[0] | device[1] << 32
        record["table"], record["entries"] = self._table.ctypes.data, self._entries.ctypes.data
        self._address = int(self._record.ctypes.data)
        self.ways: dict[Any, Callable[..., int]] = {}
        """The functions that send calls, by what an entry's key does not see: the operator and its
        parameters."""
        self._tokens: dict[Any, int] = {}  # their numbers
        self.wants: list[Wanted] = []
        """By entry."""
        self._next_token = 1
        self._seen: set[Any] = set()
        self._learning = threading.RLock()

    def seen(self, signature: Any) -> bool:
        """Whether a signature comes for the second time: what comes once is not worth keeping."""
        if signature in self._seen:
            return True
        if len(self._seen) >= ENTRIES:
            self._seen.clear()
        self._seen.add(signature)
        return False

    def token(self, call: Any) -> int:
        """The number of an operator and its parameters. Forgets everything when there are many."""
        with self._learning:
            number = self._tokens.get(call)
            if number is None:
                if len(self._tokens) >= ENTRIES:
                    self.clear()
                number = self._tokens[call] = self._next_token
                self._next_token += 1
                self.ways[call] = self._way(number)
            return number

    def _way(self, token: int, keyed: int = 0) -> Callable[..., int]:
        """A Python function that sends a call of this token, given its tensors."""
        bound = struct.pack("<QQQ", self._address, token, keyed)
        way: Callable[..., int] = self._code.new(ctypes.addressof(self._code.method), bound, None)
        return way

    def clear(self) -> None:
        """Forget everything."""
        with self._learning:
            self._table[:] = 0
            self.wants.clear()
            self.ways.clear()
            self._tokens.clear()

    def move_on(self) -> None:
        """Layouts learned before may be overwritten from now on."""
        self._record["epoch"] += 1

    @property
    def epoch(self) -> int:
        """Of the layout table."""
        return int(self._record["epoch"][0])

    @property
    def sent(self) -> int:
        """Tasks that went the short way."""
        return int(self._record["sent"][0])

    def learn(
        self,
        call: Any,
        keyed: int,
        views: list[ArrayView],
        first_input: int,
        writes: range,
        same_ok: tuple[int, ...],
        task: np.ndarray[Any, Any],
        epoch: int,
        allocates: list[Any],
    ) -> None:
        """Keep a checked call.

        Args:
            call: the operator and its parameters, as in `ways`.
            keyed: how many of the operands belong to the key; the rest is allocated anew by each call.
            views: the operands: inputs, outputs, workspace.
            first_input: place of the first of them among the task's inputs.
            writes: which of them are outputs.
            same_ok: as in `Operator`, counting from `first_input`.
            task: the descriptor, a TASK record.
            epoch: of the layouts in it, or ALWAYS.
            allocates: what is allocated, for `wants`.
        """
        # A call finds an entry by the table alone, which is written last.
        with self._learning:
            token, number = self.token(call), len(self.wants)
            if number == ENTRIES:
                self.clear()
                return
            words, digest = [], token * _FACTOR & ALWAYS
            for view in views[:keyed]:
                kind = _DLPACK_KINDS[view.dtype] << 32 | len(view.shape)
                words.append(kind)
                for extent, stride in zip(view.shape, view.strides, strict=True):
                    words += [extent, stride & ALWAYS]
            if len(words) > KEY_WORDS:
                return
            for word in words:
                digest = ((digest << 5 | digest >> 59) & ALWAYS ^ word) * _FACTOR & ALWAYS
            entry = self._entries[number]
            entry["hash"], entry["token"], entry["words"] = digest, token, len(words)
            entry["operands"], entry["epoch"] = len(views), epoch
            # Only strided or single elements can be lazily negated in practice: `imag` of a conjugate.
            looks = any(not view.contiguous or view.count == 1 for view in views[:keyed])
            entry["checked"] = looks
            entry["key"][: len(words)] = words
            inputs_at, outputs_at = offset("inputs"), offset("outputs")
            for index, view in enumerate(views):
                low, high = byte_range(view)
                entry["low"][index], entry["high"][index] = low - view.address, high - view.address
                entry["align"][index] = view.itemsize - 1
                entry["writes"][index] = entry["same"][index] = 0
                if index < writes.start:
                    place = first_input + index
                    at = offset("scalars") + FIFTH_INPUT if place == MAX_INPUTS else inputs_at + 8 * place
                else:
                    at = outputs_at + 8 * (index - writes.start) if index in writes else outputs_at + 8
                    entry["writes"][index] = 1
                    for place in same_ok:
                        other = views[place]
                        if (other.shape, other.strides, other.dtype) == (
                            view.shape,
                            view.strides,
                            view.dtype,
                        ):
                            entry["same"][index] |= 1 << place
                entry["place"][index] = at
            entry["task"] = task.view(np.uint64).reshape(TASK_WORDS)
            slot = digest >> 32
            while taken := int(self._table[slot % TABLE]):
                stale = self._entries[taken - 1]
                if stale["hash"] == digest and stale["token"] == token:
                    break  # what it was before its layouts were overwritten
                slot += 1
            self.wants.append(Wanted(self.ways[call], looks, allocates, self._way(token, keyed)))
            self._table[slot % TABLE] = number + 1


_FACTOR: Final = 0x517CC1B727220A95
# DLPack's dtypes by ours: code | bits << 8 | lanes << 16.
_DLPACK_KINDS: Final = (
    0x10806,  # bool
    0x10800,  # int8
    0x10801,  # uint8
    0x12000,  # int32
    0x14000,  # int64
    0x11002,  # float16
    0x11004,  # bfloat16
    0x12002,  # float32
    0x14002,  # float64
)
assert TASK.itemsize == TASK_BYTES
