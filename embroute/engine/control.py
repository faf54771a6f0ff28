"""Control messages from the coordinator, received ahead of their use, and small collectives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from embroute.kernels.array_types import U8, Array
from embroute.launch.rank import COORDINATOR, RankContext
from embroute.transport.interface import Channel

RECEIVED, STOP_REQUESTED = np.array([[1], [2]], np.uint8)  # a rank's answers
DEPTH = 2  # plans that wait at a rank while a step runs

_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
_DTYPES = tuple(np.dtype(name) for name in _NAMES)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ALIGN = 8  # bytes: arrays begin at multiples, so that a reader needs no copy


class Verb(IntEnum):
    """What a message tells a rank to do."""

    STEP = 0
    DRAIN = 1
    SAVE = 2
    REFILL = 3
    EVAL_BATCH = 4
    EVAL_END = 5
    STOP = 6
    HELLO = 7


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def packed_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a message that packs arrays of these sizes in bytes."""
    return 8 * (1 + 2 * len(sizes)) + sum(_aligned(size) for size in sizes)


def pack(arrays: Sequence[Array]) -> U8:
    """Pack flat arrays into one message: their number, each type and length, their bytes."""
    message = np.empty(packed_bytes([array.nbytes for array in arrays]), np.uint8)
    header, first = [len(arrays)], 8 * (1 + 2 * len(arrays))
    for array in arrays:
        header += _CODES[array.dtype], array.size
        last, next_first = first + array.nbytes, first + _aligned(array.nbytes)
        message[first:last] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        message[last:next_first] = 0
        first = next_first
    message[: 8 * len(header)].view(np.int64)[:] = header
    return message


def unpack(message: U8) -> list[Array]:
    """The arrays of a message, as views of it."""
    count = int(message[:8].view(np.int64)[0])
    first = 8 * (1 + 2 * count)
    header = message[8:first].view(np.int64).tolist()
    arrays = []
    for code, length in zip(header[::2], header[1::2], strict=True):
        size = length * _DTYPES[code].itemsize
        arrays.append(message[first : first + size].view(_DTYPES[code]))
        first += _aligned(size)
    return arrays


@dataclass(frozen=True)
class ControlMessage:
    """One message: what to do, and the arrays it needs."""

    verb: Verb
    arrays: list[Array]
    nbytes: int = 0  # on the wire


class Delivery(NamedTuple):
    """The outcome of a message to all ranks."""

    nbytes: int
    stop_requested: bool  # whether a rank asks for an early end


def send_all(
    channel: Channel, verb: Verb, bodies: Sequence[tuple[str, Sequence[Array]]]
) -> Delivery:
    """Send every rank its message, and wait until all have received it.

    Without the wait, messages would pile up in the network's buffers, where none can be revoked.
    """
    packed = [(peer, pack(arrays)) for peer, arrays in bodies]
    heads = [(peer, np.array([verb, len(body)], np.int64).view(np.uint8)) for peer, body in packed]
    answers = np.empty((len(packed), 1), np.uint8)
    receives = [(peer, answer) for (peer, _), answer in zip(packed, answers, strict=True)]
    channel.exchange([*heads, *packed], receives)
    nbytes = sum(len(body) + 16 for _, body in packed)
    return Delivery(nbytes, stop_requested=bool((answers == STOP_REQUESTED).any()))


def receive_message(channel: Channel, stop: threading.Event | None = None) -> ControlMessage:
    """Wait for the next message; `stop`, if set, asks the coordinator to end soon."""
    head = np.zeros(2, np.int64)
    channel.exchange([], [(COORDINATOR, head.view(np.uint8))])
    body = np.empty(int(head[1]), np.uint8)
    channel.exchange([], [(COORDINATOR, body)])
    stops = stop is not None and stop.is_set()
    channel.exchange([(COORDINATOR, STOP_REQUESTED if stops else RECEIVED)], [])
    return ControlMessage(Verb(int(head[0])), unpack(body), head.nbytes + body.nbytes)


_T = TypeVar("_T")


class ErrorQueue(Generic[_T]):
    """A bounded queue between two threads in which an exception travels like a value."""

    def __init__(self, depth: int = 0) -> None:
        self._queue: queue.Queue[_T | BaseException] = queue.Queue(depth)

    def put(self, value: _T) -> None:
        """Add a value; waits while the queue is full."""
        self._queue.put(value)

    def fail(self, error: BaseException) -> None:
        """Let the reader raise an error, once it has taken earlier values."""
        # The reader of a full queue may be gone, so this must not wait: drop a value instead.
        while True:
            try:
                return self._queue.put_nowait(error)
            except queue.Full:
                self._drop()

    def _drop(self) -> None:
        try:
            self._queue.get_nowait()
        except queue.Empty:
            return

    def get(self) -> _T:
        """The next value; raises what the other thread raised."""
        value = self._queue.get()
        if isinstance(value, BaseException):
            self._queue.put(value)  # the next reader must meet the error too
            raise value
        return value


def start_thread(name: str, work: Callable[[], None], errors: ErrorQueue[_T]) -> threading.Thread:
    """Run work in a thread; an exception of the work reaches the reader of `errors`."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.fail(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def listen(channel: Channel, stop: threading.Event | None = None) -> ErrorQueue[ControlMessage]:
    """Receive messages in a thread, a few ahead, until STOP; `stop` asks for an early end."""
    messages: ErrorQueue[ControlMessage] = ErrorQueue(DEPTH)

    def work() -> None:
        while True:
            message = receive_message(channel, stop)
            messages.put(message)
            if message.verb == Verb.STOP:
                return

    start_thread("plans", work, messages)
    return messages


def broadcast_text(rank_name: str, peers: Sequence[str], channel: Channel, text: str) -> str:
    """Send the coordinator's text to every rank; returns it everywhere."""
    if rank_name != COORDINATOR:
        return receive_message(channel).arrays[0].tobytes().decode()
    body = np.frombuffer(text.encode(), np.uint8)
    send_all(channel, Verb.HELLO, [(peer, [body]) for peer in peers])
    return text


def gather_from_workers(rank: RankContext, array: Array) -> list[Array]:
    """All workers' arrays, in order, at the first worker; nothing elsewhere.

    The arrays may differ in their first axis only.
    """
    first, *others = rank.workers
    array, channel = np.ascontiguousarray(array), rank.allreduce.channel
    if rank.index:
        size = np.array([len(array)], np.int64)
        channel.exchange([(first, size.view(np.uint8))], [])
        channel.exchange([(first, array.reshape(-1).view(np.uint8))] if array.size else [], [])
        return []
    sizes = np.zeros((len(others), 1), np.int64)
    channel.exchange([], list(zip(others, sizes.view(np.uint8), strict=True)))
    arrived = [np.empty((int(size), *array.shape[1:]), array.dtype) for (size,) in sizes]
    pairs = [(peer, part) for peer, part in zip(others, arrived, strict=True) if part.size]
    channel.exchange([], [(peer, part.reshape(-1).view(np.uint8)) for peer, part in pairs])
    return [array, *arrived]
