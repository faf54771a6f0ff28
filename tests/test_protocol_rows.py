"""Readers refuse messages that name rows, slots or touches which do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.engine.batches import BatchAdapter
from embroute.engine.control import (
    ErrorQueue,
    Received,
)
from embroute.engine.observe.metrics import Meter
from embroute.engine.protocol import codec
from embroute.engine.protocol.messages import (
    ControlMessage,
    Drain,
    Refill,
    Serve,
    ShardStep,
    TrainBatch,
)
from embroute.engine.schedule import RankTransfers
from embroute.engine.shard import Shard
from embroute.engine.sharding import RowSharding
from embroute.engine.step_message import read_worker_step, step_messages
from embroute.engine.worker import PrefetchThread
from embroute.kernels.array_types import Array
from embroute.launch.in_process import InProcessNetwork, in_process_rank
from embroute.launch.rank import COORDINATOR
from embroute.transport.interface import MessageError
from tests.jobs import batches, settings_of
from tests.promises import adapter, promise
from tests.test_protocol import TOPOLOGY, demand_clear, ints

FAR = RankTransfers(ints(0, 0, 0, 1, 1, 0, 0, 0, 1), ints(4))  # the fifth row of four
STORE = SimpleNamespace(records=[np.zeros((4, 2))], stamps=None)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (Refill(3, FAR), "coordinator sent Refill of step 3: a shard does not expect it"),
        (Drain(3, FAR), "coordinator sent Drain of step 3: it names row 4 of an arena"),
        (Serve(3, FAR), "coordinator sent Serve of step 3: it names row 4 of an arena"),
        (ShardStep(3, 1, FAR), "coordinator sent ShardStep of step 3: it names row 4 of an arena"),
        (ShardStep(3, 3, RankTransfers(ints(), ints())), "of step 3: it has 3 chunks"),
    ],
)
def test_shard_refuses_what_it_cannot_obey(message: ControlMessage, fault: str) -> None:
    shard = Shard(STORE, None, None, ["worker0"], Meter())  # type: ignore[arg-type]
    messages: ErrorQueue[Received] = ErrorQueue()
    messages.put(Received(message, 100))
    with pytest.raises(MessageError, match=fault):
        shard.run(messages, lambda step: None)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (Serve(3, FAR), "coordinator sent Serve of step 3: a worker does not expect it"),
        (Drain(3, FAR), "coordinator sent Drain of step 3: it names row 4 of an arena"),
        (Refill(3, FAR), "coordinator sent Refill of step 3: it names row 4 of an arena"),
    ],
)
def test_worker_refuses_what_it_cannot_obey(message: ControlMessage, fault: str) -> None:
    rank = in_process_rank(InProcessNetwork(), "worker0", 1, 1)
    transfers = SimpleNamespace(store=STORE, drain=print, refill=print)
    thread = PrefetchThread(rank, transfers, adapter(), print)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match=fault):
        thread._obey(Received(message, 100))


@cache
def real_messages(policy: str) -> tuple[RowSharding, BatchAdapter, list[ControlMessage]]:
    """All messages of a small job."""
    promised = promise(batches(TOPOLOGY[0], 6), "sgd", TOPOLOGY, settings_of(policy, TOPOLOGY[0]))
    sharding, own = RowSharding(promised.setup), adapter()
    own.infer_spec(batches(TOPOLOGY[0], 6)[0])
    messages: list[ControlMessage] = []
    for plan in promised.plans:
        shards, workers = step_messages(plan, sharding, own, 0)
        messages += [*shards, *workers]
    return sharding, own, messages


def arrays_of(message: object) -> Iterator[Array]:
    """The arrays of a message, which may be changed in place."""
    if isinstance(message, tuple):
        for field in message:
            yield from arrays_of(field)
    elif isinstance(message, np.ndarray) and message.dtype == np.int32 and message.size:
        yield message


def copied(message: ControlMessage) -> ControlMessage:
    """The message after its way over the wire, with arrays of its own."""
    head, body = codec.encode(message)
    return codec.decode_body(codec.decode_head(head, COORDINATOR), body)


@pytest.mark.parametrize("policy", ["esd(1)", "fae(hot=0.4, rate=25, buffer=8)"])
@given(data=st.data())
def test_rows_out_of_range_are_never_used(policy: str, data: st.DataObject) -> None:
    """Any number of a message is replaced by another one: no row outside of a store is named."""
    sharding, own, messages = real_messages(policy)
    message = copied(data.draw(st.sampled_from(messages)))
    array = data.draw(st.sampled_from(list(arrays_of(message))))
    value = data.draw(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-2, 400))
    array[data.draw(st.integers(0, len(array) - 1))] = value
    if isinstance(message, ShardStep):
        shard = data.draw(st.integers(0, 1))
        num_rows_A = sharding.counts_KA[shard].tolist()
        if not message.transfers.fault(TOPOLOGY[0], num_rows_A, num_rows_A):
            for block in chain.from_iterable(message.transfers.by_time(message.step)):
                assert block.peer < TOPOLOGY[0]
                assert 0 <= block.indices.min() <= block.indices.max() < num_rows_A[block.arena]
        return
    assert isinstance(message, TrainBatch)
    slots_A = sharding.setup.capacity_WA.max(0).tolist()
    try:
        step = read_worker_step(message, slots_A, TOPOLOGY[1], own)
    except MessageError as error:
        demand_clear(error)
        return
    for arena, slots in enumerate(slots_A):
        touched, replicas = step.slot_AT[arena], step.replica_slot_AU[arena]
        assert step.local_A[arena] <= len(touched)
        assert not len(touched) or (touched.min() >= 0 and touched.max() < slots)
        assert not len(replicas) or (replicas.min() >= 0 and replicas.max() < slots)
    assert step.touch_L.min(initial=0) >= -1
    assert int(step.micro_batch.offsets[-1]) == len(step.micro_batch.ids)


@pytest.mark.parametrize("policy", ["esd(1)", "fae(hot=0.4, rate=25, buffer=8)"])
def test_real_messages_pass_the_checks_of_their_readers(policy: str) -> None:
    sharding, own, messages = real_messages(policy)
    for number, message in enumerate(messages):
        rank = number % sum(TOPOLOGY)
        if isinstance(message, ShardStep):
            num_rows_A = sharding.counts_KA[rank].tolist()
            assert message.transfers.fault(TOPOLOGY[0], num_rows_A, num_rows_A) == ""
        elif isinstance(message, TrainBatch):
            slots_A = sharding.setup.capacity_WA[rank - TOPOLOGY[1]].tolist()
            assert read_worker_step(message, slots_A, TOPOLOGY[1], own).step == message.step
