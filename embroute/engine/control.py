"""Sends and receives control messages, some ahead of their use; and small collectives."""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from embroute.engine.protocol import codec
from embroute.engine.protocol.messages import (
    ControlMessage,
    Gathered,
    Hello,
    Reply,
    Stop,
    refusal,
    step_of_message,
)
from embroute.kernels.array_types import Array
from embroute.launch.rank import COORDINATOR, RankContext
from embroute.transport.interface import Channel, MessageError

RECEIVED, STOP_REQUESTED = np.array([[1], [2]], np.uint8)  # a rank's answers
DEPTH = 2  # plans that wait at a rank while a step runs


class Received(NamedTuple):
    """A message, and its size on the wire."""

    message: ControlMessage
    nbytes: int


class Delivery(NamedTuple):
    """The outcome of a message to all ranks."""

    nbytes: int
    stop_requested: bool  # whether a rank asks for an early end


def send_all(channel: Channel, messages: Sequence[tuple[str, ControlMessage]]) -> Delivery:
    """Send every rank its message, and wait until all have received it.

    Without the wait, messages would pile up in the network's buffers, where none can be revoked.
    """
    frames = [(peer, codec.encode(message)) for peer, message in messages]
    heads, bodies = ([(peer, frame[part]) for peer, frame in frames] for part in (0, 1))
    answers = np.zeros((len(frames), 1), np.uint8)
    receives = [(peer, answer) for (peer, _), answer in zip(messages, answers, strict=True)]
    channel.exchange([*heads, *bodies], receives)
    for (peer, message), (answer,) in zip(messages, answers.tolist(), strict=True):
        if answer not in (*RECEIVED, *STOP_REQUESTED):
            kind, step = type(message).__name__, step_of_message(message)
            raise MessageError(f"{peer} answered {kind} of step {step} with {answer}")
    nbytes = sum(len(head) + len(body) for _, (head, body) in frames)
    return Delivery(nbytes, stop_requested=bool((answers == STOP_REQUESTED).any()))


def send_message(channel: Channel, peer: str, message: ControlMessage) -> None:
    """Send a message to a rank that waits for it."""
    channel.exchange([(peer, part) for part in codec.encode(message)], [])


def receive_messages(channel: Channel, peers: Sequence[str]) -> list[Received]:
    """Wait for the next message of each peer."""
    parts = [(peer, np.empty(codec.FRAME_HEAD_BYTES, np.uint8)) for peer in peers]
    channel.exchange([], parts)
    heads = [codec.decode_head(data, peer) for peer, data in parts]
    bodies = [(head.peer, np.empty(head.body_bytes, np.uint8)) for head in heads]
    channel.exchange([], bodies)
    return [
        Received(codec.decode_body(head, body), codec.FRAME_HEAD_BYTES + len(body))
        for head, (_, body) in zip(heads, bodies, strict=True)
    ]


def send_reply(channel: Channel, items: Sequence[object]) -> None:
    """Send the coordinator a list: files that this rank wrote, or a held-out loss."""
    send_message(channel, COORDINATOR, Reply(json.dumps(items)))


def receive_replies(channel: Channel, peers: Sequence[str]) -> list[object]:
    """The lists of all ranks, joined in their order; waits for the last."""
    items: list[object] = []
    for peer, (message, _) in zip(peers, receive_messages(channel, peers), strict=True):
        if not isinstance(message, Reply):
            raise refusal(message, peer, "the coordinator expects Reply")
        items += json.loads(message.text)
    return items


def receive_order(channel: Channel, stop: threading.Event | None = None) -> Received:
    """Wait for the coordinator's next message; `stop`, if set, asks it to end soon."""
    (received,) = receive_messages(channel, [COORDINATOR])
    stops = stop is not None and stop.is_set()
    channel.exchange([(COORDINATOR, STOP_REQUESTED if stops else RECEIVED)], [])
    return received


_T = TypeVar("_T")


class ErrorQueue(Generic[_T]):
    """A bounded queue between two threads in which an exception travels like a value."""

    def __init__(self, depth: int = 0) -> None:
        self._queue: queue.Queue[_T | BaseException] = queue.Queue(depth)
        self.failed = False

    def put(self, value: _T) -> None:
        """Add a value; waits while the queue is full."""
        self._queue.put(value)

    def fail(self, error: BaseException) -> None:
        """Let the reader raise an error, once it has taken earlier values."""
        self.failed = True
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


def listen(channel: Channel, stop: threading.Event | None = None) -> ErrorQueue[Received]:
    """Receive messages in a thread, a few ahead, until Stop; `stop` asks for an early end."""
    messages: ErrorQueue[Received] = ErrorQueue(DEPTH)

    def work() -> None:
        while True:
            received = receive_order(channel, stop)
            messages.put(received)
            if isinstance(received.message, Stop):
                return

    start_thread("plans", work, messages)
    return messages


def broadcast_text(rank_name: str, peers: Sequence[str], channel: Channel, text: str) -> str:
    """Send the coordinator's text to every rank; returns it everywhere."""
    if rank_name != COORDINATOR:
        hello = receive_order(channel).message
        if not isinstance(hello, Hello):
            raise refusal(hello, COORDINATOR, "this rank expects Hello")
        return hello.text
    send_all(channel, [(peer, Hello(text)) for peer in peers])
    return text


def gather_from_workers(rank: RankContext, array: Array) -> list[Array]:
    """All workers' arrays, in order, at the first worker; nothing elsewhere.

    The arrays may differ in their first axis only.
    """
    first, *others = rank.workers
    array, channel = np.ascontiguousarray(array), rank.allreduce.channel
    if rank.index:
        send_message(channel, first, Gathered(len(array), array.reshape(-1)))
        return []
    arrays = [array]
    for peer, (message, _) in zip(others, receive_messages(channel, others), strict=True):
        arrays.append(_rows_of(message, peer, array))
    return arrays


def _rows_of(message: ControlMessage, peer: str, like: Array) -> Array:
    """The array of another worker; it must be like this worker's but for the number of rows."""
    if not isinstance(message, Gathered):
        raise refusal(message, peer, "this rank expects Gathered")
    shape = (message.rows, *like.shape[1:])
    if message.values.dtype != like.dtype or message.values.size != math.prod(shape):
        raise refusal(message, peer, f"this rank gathers {like.dtype} of shape {like.shape}")
    return message.values.reshape(shape)
