"""A worker: its transfers of rows, and the thread that obeys the coordinator.

They fill the cache before each step, and push updates after it. The user's loop computes; beside it
the early phase of the next step runs in the thread.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from embroute.engine import control, packing
from embroute.engine.batches import BatchAdapter
from embroute.engine.control import ErrorQueue, Received
from embroute.engine.observe.metrics import ASIDE, DRAIN_PHASE, EARLY_PHASE, URGENT_PHASE, Meter
from embroute.engine.packing import InFlight, StagedBlock
from embroute.engine.protocol.messages import (
    Drain,
    EvalBatch,
    EvalEnd,
    Hello,
    Refill,
    RowsToInit,
    Save,
    Stop,
    TrainBatch,
    refusal,
)
from embroute.engine.schedule import OUTSIDE, BlocksByTime, TransferBlock, TransferTime
from embroute.engine.step_message import WorkerStep, read_worker_step
from embroute.engine.store import CacheStore
from embroute.kernels.codes import MAX_CHUNKS
from embroute.kernels.rows import Floats
from embroute.launch.rank import COORDINATOR, RankContext
from embroute.models.initial_rows import initial_rows
from embroute.planner.setup import Setup
from embroute.transport.interface import Channel, Message


class WorkerTransfers:
    """Carries out the phases of each step on the worker's side.

    `finish` may run beside `early` of the next step: they share no slot, and no list.
    """

    def __init__(
        self,
        store: CacheStore,
        transport: Channel,
        shards: Sequence[str],
        meter: Meter,
        setup: Setup,
    ) -> None:
        self.store, self.widths, self.setup = store, store.widths, setup
        self.transport, self.shards, self.meter = transport, shards, meter
        # Rows that wait for the early phase of a later step, in the order of leaving.
        self._lazy: defaultdict[int, list[StagedBlock]] = defaultdict(list)
        self._leaving: defaultdict[int, list[StagedBlock]] = defaultdict(list)
        # Updates that the last finished step has for the next urgent phase, in as many chunks.
        self._urgent: list[StagedBlock] = []
        self._chunks = MAX_CHUNKS
        self._rates: dict[int, float] = {}  # learning rates of the last steps

    def early(self, step: int, transfers: BlocksByTime) -> None:
        """Beside the compute of the step before: move rows that this compute does not use."""
        began = time.perf_counter()
        with self.meter.during(EARLY_PHASE, step, self.transport):
            # Rows to evict are copied out first: pulls of this phase overwrite their slots.
            leaving = self._stage(transfers[TransferTime.EARLY_LEAVE])
            pushes = self._lazy.pop(step, []) + self._leaving.pop(step, [])
            pushes += map(StagedBlock, transfers[TransferTime.EARLY_PUSH])
            self._move(pushes, transfers[TransferTime.EARLY_PULL])
            self._leaving[step + 1] += leaving
        self.meter.span(EARLY_PHASE, step, began)

    def urgent(self, step: int, transfers: BlocksByTime, chunks: int) -> None:
        """Between two computes: push updates that others wait for, pull rows that waited for them.

        A chunk of pulls may arrive while the next chunks of pushes leave.
        """
        began = time.perf_counter()
        with self.meter.during(URGENT_PHASE, step, self.transport):
            leaving = self._stage(transfers[TransferTime.URGENT_LEAVE])
            pushes = [*self._urgent, *map(StagedBlock, transfers[TransferTime.URGENT_PUSH])]
            pulls = transfers[TransferTime.LATE_PULL]
            # Chunks nest, so the smaller number of both plans cuts the blocks of both.
            common = min(chunks, self._chunks)
            pairs = zip(
                packing.in_chunks(pushes, common), packing.in_chunks(pulls, common), strict=True
            )
            for in_flight in [self._submit(*pair) for pair in pairs]:
                self._take(in_flight)
            self.store.meet(self.transport, self.shards)
        self._urgent, self._chunks = [], chunks
        self._leaving[step + 1] += leaving
        self.meter.span(URGENT_PHASE, step, began)
        self.meter.steps += 1

    def init_rows(self, to_init: RowsToInit) -> None:
        """Compute the initial values of rows that no step has trained yet."""
        if not len(to_init.rows):
            return
        rows = to_init.rows.astype(np.int64)
        table, arena = self.setup.table_of(rows), self.setup.arena_of(rows)
        ids = rows - self.setup.schema.first_rows[table]
        for number, width in enumerate(self.setup.arenas):
            inside = arena == number
            values = initial_rows(self.setup.seed, table[inside], ids[inside], width)
            self.store.begin(number, to_init.slots[inside], rows[inside], values)

    def finish(self, work: WorkerStep, grads: Sequence[Floats], lr: float) -> None:
        """After the backward pass: update rows of this worker alone, copy out all other updates."""
        began = time.perf_counter()
        self.store.set_lr(lr)
        # Gradients leave at most two steps after they were made.
        recent = {step: rate for step, rate in self._rates.items() if step > work.step - 3}
        self._rates = {**recent, work.step: lr}
        for arena, count in enumerate(work.local_A):
            slots = work.slot_AT[arena][:count]
            self.store.apply(arena, slots, grads[arena][:count], work.step)
        urgent, lazy = (
            self._stage(work.transfers[update], grads)
            for update in (TransferTime.URGENT_UPDATE, TransferTime.LAZY_UPDATE)
        )
        self._urgent = urgent
        self._lazy[work.step + 2] += lazy
        self.meter.seconds["update"] += time.perf_counter() - began

    def drain(self, step: int, transfers: BlocksByTime) -> None:
        """Push every update to its shard."""
        with self.meter.during(DRAIN_PHASE, step, self.transport):
            pushes = packing.take_all(self._lazy) + packing.take_all(self._leaving) + self._urgent
            self._move([*pushes, *map(StagedBlock, transfers[TransferTime.URGENT_PUSH])], [])
            self.store.meet(self.transport, self.shards)
        self._urgent, self._chunks = [], MAX_CHUNKS

    def fetch(self, blocks: Sequence[TransferBlock]) -> list[Floats]:
        """Rows as they are at the shards, pulled past the cache."""
        with self.meter.during(ASIDE, OUTSIDE, self.transport):
            in_flight = self._submit([], blocks)
            arrived, _ = packing.wait_for_rows(in_flight, self.widths, self.meter)
        copies = [rows[:, : self.widths.own_columns(block)].copy() for block, rows in arrived]
        in_flight.messages.release()
        return copies

    def refill(self, transfers: BlocksByTime) -> None:
        """Put copies back into their slots, after a resume."""
        with self.meter.during(ASIDE, OUTSIDE, self.transport):
            self._move([], transfers[TransferTime.EARLY_PULL])

    def _stage(
        self, blocks: Sequence[TransferBlock], grads: Sequence[Floats] = ()
    ) -> list[StagedBlock]:
        """Copy the rows of blocks out of the cache."""
        return [StagedBlock(block, self.store.read(block, grads)) for block in blocks]

    def _move(self, pushes: Sequence[StagedBlock], pulls: Sequence[TransferBlock]) -> None:
        self._take(self._submit(pushes, pulls))

    def _submit(self, pushes: Sequence[StagedBlock], pulls: Sequence[TransferBlock]) -> InFlight:
        """Begin to push and to pull, with one message per shard and direction."""
        buffers = [self._pack(*group) for group in packing.by_peer(pushes, self.shards)]
        expected = packing.by_peer(pulls, self.shards)
        sizes = [(name, packing.message_bytes(blocks, self.widths)) for name, blocks in expected]
        messages = self.transport.submit(buffers, sizes)
        return InFlight(messages, [blocks for _, blocks in expected])

    def _pack(self, shard: str, staged: Sequence[StagedBlock]) -> Message:
        """Write a message: blocks one after the other, then the learning rates."""
        blocks = [block for block, _ in staged]
        buffer = self.transport.acquire(shard, packing.message_bytes(blocks, self.widths))
        views = packing.rows_in(blocks, buffer, self.widths)
        for (block, rows), (_, view) in zip(staged, views, strict=True):
            self.meter.block(block, view.nbytes)
            if rows is None:
                self.store.read_into(block, view)
            else:
                view[:] = rows
        packing.pack_rates(blocks, self._rates, buffer)
        return shard, buffer

    def _take(self, in_flight: InFlight) -> None:
        """Wait for rows, and put them into their slots."""
        for block, rows in packing.wait_for_rows(in_flight, self.widths, self.meter)[0]:
            self.store.write(block, rows)
        in_flight.messages.release()


class HeldOutStep(NamedTuple):
    """Held-out samples of this worker, and their rows by arena."""

    step: WorkerStep
    rows_A: list[Floats]


LoopEvent = WorkerStep | HeldOutStep | EvalEnd | Save | Stop


@dataclass
class PrefetchThread:
    """The thread that obeys the coordinator and moves rows, ahead of the user's loop."""

    rank: RankContext
    transfers: WorkerTransfers
    adapter: BatchAdapter
    learn_spec: Callable[[str], None]  # takes the shape of batches

    def __post_init__(self) -> None:
        self.events: ErrorQueue[LoopEvent] = ErrorQueue()  # from this thread to the loop
        self.computed: ErrorQueue[int] = ErrorQueue()  # from the loop: steps that are updated
        self.stop_requested = threading.Event()
        self._computing = False

    def start(self) -> None:
        """Begin to receive messages."""
        control.start_thread("rows", self._run, self.events)

    def _run(self) -> None:
        messages = control.listen(self.rank.control, self.stop_requested)
        while not isinstance((received := messages.get()).message, Stop):
            self._obey(received)
        self.events.put(received.message)

    def _obey(self, received: Received) -> None:
        message = received.message
        if isinstance(message, TrainBatch):
            self.transfers.meter.message(message.step, received.nbytes)
            self._prefetch(message)
        elif isinstance(message, Drain):
            self._wait_for_compute()
            self.transfers.drain(message.step, self._blocks(message))
        elif isinstance(message, EvalBatch):
            self._prefetch_evaluation(message)
        elif isinstance(message, EvalEnd | Save):
            # The user's optimizer has not stepped yet: the loop itself saves, before its next step.
            self.events.put(message)
        elif isinstance(message, Refill):
            self.transfers.refill(self._blocks(message))
        elif isinstance(message, Hello):
            self.learn_spec(message.text)
        else:
            raise refusal(message, COORDINATOR, "a worker does not expect it")

    def _blocks(self, message: Drain | Refill) -> BlocksByTime:
        """The blocks of a message. Refuses slots that the cache does not have."""
        num_slots_A = [len(slots) for slots in self.transfers.store.records]
        no_touches = [0] * len(num_slots_A)
        fault = message.transfers.fault(len(self.rank.shards), num_slots_A, no_touches)
        if fault:
            raise refusal(message, COORDINATOR, fault)
        return message.transfers.by_time(OUTSIDE if isinstance(message, Refill) else message.step)

    def _read_step(self, message: TrainBatch | EvalBatch) -> WorkerStep:
        num_slots_A = [len(slots) for slots in self.transfers.store.records]
        return read_worker_step(message, num_slots_A, len(self.rank.shards), self.adapter)

    def _prefetch(self, message: TrainBatch) -> None:
        step = self._read_step(message)
        # Early transfers move rows that the step in progress does not use, so they run beside it.
        # Urgent transfers push its updates, or pull rows that wait for these updates.
        self.transfers.early(step.step, step.transfers)
        self._wait_for_compute()
        self.transfers.urgent(step.step, step.transfers, step.header.chunks)
        self.transfers.init_rows(step.to_init)
        self._computing = True
        self.events.put(step)

    def _prefetch_evaluation(self, message: EvalBatch) -> None:
        step = self._read_step(message)
        # Held-out rows bypass the cache, so an evaluation does not change it.
        rows_A = [
            np.zeros((len(slots), width), self.transfers.widths.dtype)
            for slots, width in zip(step.slot_AT, self.transfers.widths.values, strict=True)
        ]
        blocks = step.transfers[TransferTime.EARLY_PULL]
        for block, rows in zip(blocks, self.transfers.fetch(blocks), strict=True):
            rows_A[block.arena][block.indices] = rows
        self.events.put(HeldOutStep(step, rows_A))

    def _wait_for_compute(self) -> None:
        """Wait until the loop has applied the updates of the step that it computes."""
        if self._computing:
            self.computed.get()
        self._computing = False
