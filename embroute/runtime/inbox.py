"""Messages from the coordinator: sent by name of what they are, received ahead of their use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from embroute.runtime.exchange import Channel
from embroute.runtime.wire import Array, pack, unpack

Bytes = npt.NDArray[np.uint8]
COORDINATOR = "coordinator"
RECEIVED, ENOUGH = np.array([[1], [2]], np.uint8)  # answers to a note
DEPTH = 2  # plans that wait at a rank while a step runs

# What the coordinator tells the ranks to do next.
STEP, DRAIN, SAVE, REFILL, LOOK, LOOKED, STOP, HELLO = range(8)


@dataclass(frozen=True)
class Note:
    """One message: what to do, and the arrays it takes."""

    verb: int
    arrays: list[Array]
    nbytes: int = 0  # on the wire


class Told(NamedTuple):
    """What telling all ranks came to."""

    nbytes: int
    enough: bool  # whether one of them asks for an early end


def post(channel: Channel, verb: int, bodies: Sequence[tuple[str, Sequence[Array]]]) -> Told:
    """Send every rank its note and wait until all have it.

    What is only on its way would pile up in the network's buffers, and could not be called back.
    """
    packed = [(peer, pack(arrays)) for peer, arrays in bodies]
    heads = [(peer, np.array([verb, len(body)], np.int64).view(np.uint8)) for peer, body in packed]
    answers = np.empty((len(packed), 1), np.uint8)
    receives = [(peer, own) for (peer, _), own in zip(packed, answers, strict=True)]
    channel.swap([*heads, *packed], receives)
    return Told(sum(len(body) + 16 for _, body in packed), bool((answers == ENOUGH).any()))


def receive(channel: Channel, enough: threading.Event | None = None) -> Note:
    """Wait for the next note; `enough`, if set, asks the coordinator to end soon."""
    head = np.zeros(2, np.int64)
    channel.swap([], [(COORDINATOR, head.view(np.uint8))])
    body = np.empty(int(head[1]), np.uint8)
    channel.swap([], [(COORDINATOR, body)])
    asks = enough is not None and enough.is_set()
    channel.swap([(COORDINATOR, ENOUGH if asks else RECEIVED)], [])
    return Note(int(head[0]), unpack(body), head.nbytes + body.nbytes)


_T = TypeVar("_T")


class Handover(Generic[_T]):
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


def background(name: str, work: Callable[[], None], tell: Handover[_T]) -> threading.Thread:
    """Run work on a thread of its own; what it raises reaches the reader of `tell`."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            tell.fail(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def listen(channel: Channel, enough: threading.Event | None = None) -> Handover[Note]:
    """Notes as they come, a few ahead; the last one is STOP, soon if `enough` gets set."""
    notes: Handover[Note] = Handover(DEPTH)

    def work() -> None:
        while True:
            note = receive(channel, enough)
            notes.put(note)
            if note.verb == STOP:
                return

    background("plans", work, notes)
    return notes


def announce(seat_name: str, peers: Sequence[str], channel: Channel, text: str) -> str:
    """Let every rank know what the coordinator knows; returns the coordinator's text."""
    if seat_name != COORDINATOR:
        return receive(channel).arrays[0].tobytes().decode()
    body = np.frombuffer(text.encode(), np.uint8)
    post(channel, HELLO, [(peer, [body]) for peer in peers])
    return text
