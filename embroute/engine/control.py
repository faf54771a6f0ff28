"""Messages from the coordinator: sent by name of what they are, received ahead of their use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from embroute.kernels.array_types import Array
from embroute.launch.rank import COORDINATOR
from embroute.transport.codec import pack, unpack
from embroute.transport.interface import Channel

RECEIVED, STOP_REQUESTED = np.array([[1], [2]], np.uint8)  # answers to a note
DEPTH = 2  # plans that wait at a rank while a step runs

# What the coordinator tells the ranks to do next.
STEP, DRAIN, SAVE, REFILL, EVAL_BATCH, EVAL_END, STOP, HELLO = range(8)


@dataclass(frozen=True)
class ControlMessage:
    """One message: what to do, and the arrays it takes."""

    verb: int
    arrays: list[Array]
    nbytes: int = 0  # on the wire


class Delivery(NamedTuple):
    """What telling all ranks came to."""

    nbytes: int
    stop_requested: bool  # whether one of them asks for an early end


def send_all(
    channel: Channel, verb: int, bodies: Sequence[tuple[str, Sequence[Array]]]
) -> Delivery:
    """Send every rank its note and wait until all have it.

    What is only on its way would pile up in the network's buffers, and could not be called back.
    """
    packed = [(peer, pack(arrays)) for peer, arrays in bodies]
    heads = [(peer, np.array([verb, len(body)], np.int64).view(np.uint8)) for peer, body in packed]
    answers = np.empty((len(packed), 1), np.uint8)
    receives = [(peer, own) for (peer, _), own in zip(packed, answers, strict=True)]
    channel.exchange([*heads, *packed], receives)
    return Delivery(
        sum(len(body) + 16 for _, body in packed), bool((answers == STOP_REQUESTED).any())
    )


def receive_message(channel: Channel, enough: threading.Event | None = None) -> ControlMessage:
    """Wait for the next note; `enough`, if set, asks the coordinator to end soon."""
    head = np.zeros(2, np.int64)
    channel.exchange([], [(COORDINATOR, head.view(np.uint8))])
    body = np.empty(int(head[1]), np.uint8)
    channel.exchange([], [(COORDINATOR, body)])
    asks = enough is not None and enough.is_set()
    channel.exchange([(COORDINATOR, STOP_REQUESTED if asks else RECEIVED)], [])
    return ControlMessage(int(head[0]), unpack(body), head.nbytes + body.nbytes)


_T = TypeVar("_T")


class ErrorQueue(Generic[_T]):
    """A bounded queue between two threads in which an exception travels like a value."""

    def __init__(self, depth: int = 0) -> None:
        self._queue: queue.Queue[_T | BaseException] = queue.Queue(depth)

    def put(self, value: _T) -> None:
        """Hand a value over; waits while the queue is full."""
        self._queue.put(value)

    def fail(self, error: BaseException) -> None:
        """Let the other thread raise an error, once it has taken what came before."""
        # A full queue must not keep an error back: make room at the cost of a value nobody needs.
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
            self._queue.put(value)  # whoever asks again meets it again
            raise value
        return value


def start_thread(name: str, work: Callable[[], None], tell: ErrorQueue[_T]) -> threading.Thread:
    """Run work on a thread of its own; what it raises reaches the reader of `tell`."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            tell.fail(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def listen(channel: Channel, enough: threading.Event | None = None) -> ErrorQueue[ControlMessage]:
    """Notes as they come, a few ahead; the last one is STOP, soon if `enough` gets set."""
    messages: ErrorQueue[ControlMessage] = ErrorQueue(DEPTH)

    def work() -> None:
        while True:
            message = receive_message(channel, enough)
            messages.put(message)
            if message.verb == STOP:
                return

    start_thread("plans", work, messages)
    return messages


def broadcast_text(rank_name: str, peers: Sequence[str], channel: Channel, text: str) -> str:
    """Let every rank know what the coordinator knows; returns the coordinator's text."""
    if rank_name != COORDINATOR:
        return receive_message(channel).arrays[0].tobytes().decode()
    body = np.frombuffer(text.encode(), np.uint8)
    send_all(channel, HELLO, [(peer, [body]) for peer in peers])
    return text
