"""Damaged messages: always one clear error, never a wrong row, never an unchecked allocation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from embroute.engine import control
from embroute.engine.control import (
    receive_messages,
    send_all,
    send_message,
)
from embroute.engine.protocol import codec
from embroute.engine.protocol.messages import (
    ControlMessage,
    Drain,
    EvalBatch,
    EvalEnd,
    Gathered,
    Hello,
    Refill,
    Reply,
    RowsToInit,
    Save,
    Serve,
    ShardStep,
    StepHeader,
    Stop,
    TrainBatch,
    WorkerMessage,
    step_of_message,
)
from embroute.engine.schedule import RankTransfers
from embroute.engine.transfer_kernels import HEAD
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import COORDINATOR, RankContext
from embroute.transport import interface
from embroute.transport.interface import LostPeerError, MessageError

CLEAR = re.compile(rf"{COORDINATOR} sent (\w+|kind \d+) of step -?\d+: \w.*")
TOPOLOGY = (3, 2)


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


TRANSFERS = RankTransfers(ints(*range(HEAD), *range(HEAD)), ints(5, 6, 7))
WORK = WorkerMessage(
    header=StepHeader(7, 12, 4, 1, 2, 3, 2),
    transfers=TRANSFERS,
    counts=ints(1, 2, 0),
    slots_T=ints(4, 9),
    replica_slots_U=ints(),
    replica_touches_U=ints(),
    to_init=RowsToInit(ints(3), ints(11)),
    touch_L=ints(0, 1, 0, 1),
    bag_lengths=ints(),
    dense=np.array([0.5, -1, 2], np.float32),
    label=np.array([1, 0, 0, 1], np.float32),
    row_ids=ints(),
    figures=np.array([100, 200], np.int64),
)
MESSAGES: list[ControlMessage] = [
    Hello("a shape: größe"),
    ShardStep(7, 4, TRANSFERS),
    TrainBatch(WORK),
    EvalBatch(WORK),
    EvalEnd(8),
    Drain(8, TRANSFERS),
    Serve(0, TRANSFERS),
    Refill(3, TRANSFERS),
    Save(9),
    Stop(10, np.array([1, 2, 3], np.int64)),
    Reply('[["file", 12]]'),
    Gathered(2, np.array([True, False])),
]
any_message = st.sampled_from(MESSAGES)


class Stream:
    """A channel that plays recorded bytes, and notes the largest array that a reader allocated."""

    def __init__(self, data: bytes) -> None:
        self.data, self.largest = data, 0

    def exchange(
        self, sends: Sequence[interface.Message], receives: Sequence[interface.Message]
    ) -> None:
        for _, out in receives:
            self.largest = max(self.largest, len(out))
            if len(out) > len(self.data):
                raise LostPeerError("connection closed by the other end")
            out[:] = np.frombuffer(self.data[: len(out)], np.uint8)
            self.data = self.data[len(out) :]


def flat(message: object) -> list[object]:
    """A message's values one by one, for comparison."""
    if isinstance(message, tuple):
        return [type(message), *(part for field in message for part in flat(field))]
    return [(message.dtype, message.tolist())] if isinstance(message, np.ndarray) else [message]


def joined(message: ControlMessage) -> bytes:
    return b"".join(part.tobytes() for part in codec.encode(message))


def demand_clear(error: MessageError) -> None:
    assert CLEAR.fullmatch(str(error)), error


def receive(data: bytes) -> ControlMessage | None:
    """The message in some bytes; None after the error that every damage must end in."""
    stream = Stream(bytes(data))
    try:
        return receive_messages(stream, [COORDINATOR])[0].message  # type: ignore[arg-type]
    except MessageError as error:
        demand_clear(error)
    except LostPeerError:
        pass  # the stream ended before the message did
    finally:
        assert stream.largest <= max(codec.FRAME_HEAD_BYTES, len(data) + codec.MAX_BODY_BYTES)
    return None


def sealed(kind: int, step: int, body: bytes, announced: int | None = None) -> bytes:
    """A message with right checksums, whatever is in it."""
    size = len(body) if announced is None else announced
    head = codec._HEAD.pack(
        codec._MAGIC, codec.PROTOCOL_VERSION, kind, step, size, xxhash.xxh3_64_intdigest(body)
    )
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little") + body


def test_every_kind_of_message_has_an_example() -> None:
    assert [type(message) for message in MESSAGES] == list(get_args(ControlMessage))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_its_way_over_the_wire(message: ControlMessage) -> None:
    read = receive(joined(message))
    assert flat(read) == flat(message)


def test_arrays_of_a_message_are_read_without_a_copy() -> None:
    head, body = codec.encode(MESSAGES[2])
    message = codec.decode_body(codec.decode_head(head, COORDINATOR), body)
    assert isinstance(message, TrainBatch)
    arrays = [
        part for part in (*message.work, *message.work.transfers) if isinstance(part, np.ndarray)
    ]
    assert len(arrays) > 10
    assert all(np.shares_memory(array, body) for array in arrays if array.size)


@given(any_message, st.data())
def test_flipped_bits_are_always_an_error(message: ControlMessage, data: st.DataObject) -> None:
    raw = bytearray(joined(message))
    places = st.integers(0, 8 * len(raw) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=3, unique=True)):
        raw[place // 8] ^= 1 << place % 8
    assert receive(bytes(raw)) is None


@given(any_message, st.data())
def test_cut_messages_are_always_an_error(message: ControlMessage, data: st.DataObject) -> None:
    raw = joined(message)
    assert receive(raw[: data.draw(st.integers(0, len(raw) - 1))]) is None
    head, body = codec.encode(message)
    short = body[: data.draw(st.integers(0, len(body) - 1))]
    with pytest.raises(MessageError, match="bytes came, its head announces"):
        codec.decode_body(codec.decode_head(head, COORDINATOR), short)
    # A whole message with fewer bytes than its table lists, and right checksums.
    kind = MESSAGES.index(message)
    assert receive(sealed(kind, step_of_message(message), short.tobytes())) is None


@given(any_message, st.binary(min_size=1, max_size=64))
def test_longer_messages_are_an_error(message: ControlMessage, more: bytes) -> None:
    head, body = codec.encode(message)
    longer = body.tobytes() + more
    with pytest.raises(MessageError, match="bytes came, its head announces"):
        codec.decode_body(codec.decode_head(head, COORDINATOR), np.frombuffer(longer, np.uint8))
    kind = MESSAGES.index(message)
    assert receive(sealed(kind, step_of_message(message), longer)) is None


@given(any_message, st.data())
def test_fields_in_another_order_are_an_error(message: ControlMessage, data: st.DataObject) -> None:
    """Fields change places in the table, with right checksums."""
    _, body = codec.encode(message)
    fields = 1 + len(list(codec._FIELDS[MESSAGES.index(message)].dtypes()))
    order = data.draw(st.permutations(range(fields)))
    table = body[: 16 * fields].reshape(fields, 16)
    mixed = table[order].tobytes() + body[16 * fields :].tobytes()
    read = receive(sealed(MESSAGES.index(message), step_of_message(message), mixed))
    assert (read is None) == (list(order) != sorted(order))


@given(any_message, any_message)
def test_body_of_another_kind_is_an_error(message: ControlMessage, other: ControlMessage) -> None:
    """Kinds with equal fields differ in nothing but the kind, which has a checksum."""
    kind, step = MESSAGES.index(other), step_of_message(message)
    read = receive(sealed(kind, step, codec.encode(message)[1].tobytes()))
    same = list(codec._FIELDS[kind].dtypes()) == list(
        codec._FIELDS[MESSAGES.index(message)].dtypes()
    )
    assert read is None or (same and flat(read)[1:] == flat(message)[1:])


@given(st.integers(0, 1 << 15), st.integers(-(1 << 63), (1 << 63) - 1), st.binary(max_size=400))
def test_sealed_nonsense_is_an_error_or_a_message(kind: int, step: int, body: bytes) -> None:
    read = receive(sealed(kind, step, body))
    assert read is None or step_of_message(read) == step


@given(any_message, st.data())
def test_wrong_numbers_in_the_table_are_an_error(
    message: ControlMessage, data: st.DataObject
) -> None:
    _, body = codec.encode(message)
    numbers = body.view(np.int64)
    fields = 1 + len(list(codec._FIELDS[MESSAGES.index(message)].dtypes()))
    place = data.draw(st.integers(0, 2 * fields - 1))
    before = int(numbers[place])
    numbers[place] = data.draw(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-9, 99))
    read = receive(sealed(MESSAGES.index(message), step_of_message(message), body.tobytes()))
    anything = isinstance(message, Gathered)  # whose values may be of any type
    assert read is None or anything or numbers[place] == before or place % 2


def test_huge_length_is_refused_before_memory_is_taken() -> None:
    stream = Stream(sealed(2, 7, b"", announced=codec.MAX_BODY_BYTES + 1))
    with pytest.raises(MessageError, match="TrainBatch of step 7: it announces 2147483649 bytes"):
        receive_messages(stream, [COORDINATOR])  # type: ignore[arg-type]
    assert stream.largest == codec.FRAME_HEAD_BYTES


def test_other_version_of_the_protocol_is_named() -> None:
    head = bytearray(codec.encode(Save(3))[0].tobytes())
    head[4] = codec.PROTOCOL_VERSION + 1
    with pytest.raises(MessageError, match="Save of step 3: it has version 2 of the protocol"):
        codec.decode_head(np.frombuffer(head, np.uint8), "worker1")


def test_message_that_is_too_large_is_refused_by_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 100)
    with pytest.raises(ValueError, match="a TrainBatch of step 7 has"):
        codec.encode(MESSAGES[2])


def test_wrong_answer_of_a_rank_names_it() -> None:
    with pytest.raises(MessageError, match="worker0 answered Save of step 4 with 9"):
        send_all(Stream(b"\x09"), [("worker0", Save(4))])  # type: ignore[arg-type]


def test_unexpected_kinds_are_refused() -> None:
    def main(rank: RankContext) -> None:
        if rank.name == COORDINATOR:
            send_message(rank.control, "worker0", Save(4))
        elif rank.name == "worker0":
            control.broadcast_text(rank.name, rank.peers, rank.control, "")

    with pytest.raises(MessageError, match="coordinator sent Save of step 4: this rank expects"):
        run_in_process(1, 1, main)
