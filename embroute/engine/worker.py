"""A worker's rows: its cache, and the thread that fills it before each step and empties it after.

The user's loop computes; beside it the early phase of the next step runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from embroute.engine.observe.metrics import ASIDE, DRAIN_PHASE, EARLY_PHASE, URGENT_PHASE, Meter
from embroute.engine.packing import (
    OUTSIDE,
    ArrivedBlock,
    DeferredSends,
    PendingBlock,
    StagedBlock,
    blocks_of_step,
    in_chunks,
    message_bytes,
    pack_rates,
    views_in,
)
from embroute.engine.schedule import (
    EARLY_LEAVE,
    EARLY_PULL,
    EARLY_PUSH,
    LATE_PULL,
    LAZY_UPDATE,
    URGENT_LEAVE,
    URGENT_PUSH,
    URGENT_UPDATE,
    RankTransfers,
    TransferBlock,
)
from embroute.engine.shared_tables import hear, tell
from embroute.engine.step_message import RowsToInit, WorkerStep
from embroute.engine.store import CacheStore
from embroute.kernels.array_types import U8
from embroute.kernels.codes import MAX_CHUNKS
from embroute.kernels.rows import Floats
from embroute.models.initial_rows import initial_rows
from embroute.planner.setup import Setup
from embroute.transport.buffers import MessageTransport, RecvHandle


class InFlight(NamedTuple):
    """Messages on their way: what leaves, and the blocks that come from each shard."""

    posted: RecvHandle
    pushes: Sequence[StagedBlock]
    expected: list[list[PendingBlock]]


class WorkerTransfers:
    """Carries out the phases of each step on the worker's side.

    `finish` may run beside `early` of the next step: they share no slot, and no list.
    """

    def __init__(
        self,
        store: CacheStore,
        transport: MessageTransport,
        shards: Sequence[str],
        meter: Meter,
        setup: Setup,
        in_place: bool = False,
    ) -> None:
        self.setup, self.in_place = setup, in_place
        self.store, self.widths, self.transport, self.shards = (
            store,
            store.widths,
            transport,
            shards,
        )
        self.meter = meter
        self._lazy: DeferredSends[StagedBlock] = DeferredSends()
        self._leaving: DeferredSends[StagedBlock] = DeferredSends()
        self._urgent: list[StagedBlock] = []
        self._parts = MAX_CHUNKS  # of the plan that ordered them
        self._rates: dict[int, float] = {}

    def early(self, step: int, orders: RankTransfers) -> None:
        """Beside the compute of the step before: what neither end needs for it."""
        began = time.perf_counter()
        with self.meter.during(EARLY_PHASE, self.transport):
            leaving = self._stage(step, orders.at(EARLY_LEAVE))
            pushes = self._lazy.take(step) + self._leaving.take(step)
            pushes += _unstaged(step, orders.at(EARLY_PUSH))
            self._swap(pushes, blocks_of_step(step, orders.at(EARLY_PULL)))
            self._leaving.add(step + 1, leaving)
        self.meter.span(EARLY_PHASE, step, began)

    def urgent(self, step: int, orders: RankTransfers, parts: int) -> None:
        """Between two computes: updates that others wait for, rows that had to wait for them.

        In parts, each of which may come while the next ones go.
        """
        began = time.perf_counter()
        with self.meter.during(URGENT_PHASE, self.transport):
            leaving = self._stage(step, orders.at(URGENT_LEAVE))
            pushes = self._urgent + _unstaged(step, orders.at(URGENT_PUSH))
            pulls, both = blocks_of_step(step, orders.at(LATE_PULL)), min(parts, self._parts)
            own = zip(in_chunks(pushes, both), in_chunks(pulls, both), strict=True)
            moving = [self._post(*part) for part in own]
            for part in moving:
                self._take(part)
            self._meet()
        self._urgent, self._parts = [], parts
        self._leaving.add(step + 1, leaving)
        self.meter.span(URGENT_PHASE, step, began)
        self.meter.steps += 1

    def init_rows(self, made: RowsToInit) -> None:
        """The initial values of rows that nobody has trained yet, before the step computes."""
        if not len(made.rows):
            return
        rows = made.rows.astype(np.int64)
        table, arena = self.setup.table_of(rows), self.setup.arena_of(rows)
        ids = rows - self.setup.schema.first_rows[table]
        for number, width in enumerate(self.setup.arenas):
            own = arena == number
            values = initial_rows(self.setup.seed, table[own], ids[own], width)
            self.store.begin(number, made.slots[own], rows[own], values)

    def finish(self, work: WorkerStep, grads: Sequence[Floats], lr: float) -> None:
        """After the backward pass: update own rows, copy out what leaves."""
        began = time.perf_counter()
        self.store.optimizer = self.store.optimizer.with_lr(lr)
        recent = {step: rate for step, rate in self._rates.items() if step > work.step - 3}
        self._rates = {**recent, work.step: lr}
        for arena, count in enumerate(work.local_A):
            slots = work.slot_AT[arena][:count]
            self.store.apply(arena, slots, grads[arena][:count], work.step)
        self._urgent = self._stage(work.step, work.transfers.at(URGENT_UPDATE), grads)
        lazy = self._stage(work.step, work.transfers.at(LAZY_UPDATE), grads)
        self._lazy.add(work.step + 2, lazy)
        self.meter.seconds["update"] += time.perf_counter() - began

    def drain(self, step: int, orders: RankTransfers) -> None:
        """Bring every update home."""
        with self.meter.during(DRAIN_PHASE, self.transport):
            pushes = self._lazy.take_all() + self._leaving.take_all() + self._urgent
            self._swap(pushes + _unstaged(step, orders.at(URGENT_PUSH)), [])
            self._meet()
        self._urgent, self._parts = [], MAX_CHUNKS

    def _meet(self) -> None:
        """Where rows are trained in place: go on when everybody's updates are there."""
        if self.in_place:
            tell(self.transport, self.shards)
            hear(self.transport, self.shards)

    def fetch(self, blocks: Sequence[TransferBlock]) -> list[Floats]:
        """Rows as they are at the shards, outside of the cache."""
        with self.meter.during(ASIDE, self.transport):
            moving = self._post([], blocks_of_step(OUTSIDE, blocks))
            arrived = self._arrived(moving)
        found = [rows[:, : self.widths.own_columns(item.block)].copy() for item, rows in arrived]
        moving.posted.release()
        return found

    def refill(self, orders: RankTransfers) -> None:
        """Put copies back into their slots."""
        with self.meter.during(ASIDE, self.transport):
            self._swap([], blocks_of_step(OUTSIDE, orders.blocks))

    def _stage(
        self, step: int, blocks: Sequence[TransferBlock], grads: Sequence[Floats] = ()
    ) -> list[StagedBlock]:
        return [
            StagedBlock(item, self.store.read(item.block, grads))
            for item in blocks_of_step(step, blocks)
        ]

    def _swap(self, pushes: Sequence[StagedBlock], pulls: Sequence[PendingBlock]) -> None:
        self._take(self._post(pushes, pulls))

    def _post(self, pushes: Sequence[StagedBlock], pulls: Sequence[PendingBlock]) -> InFlight:
        """Begin to send pushes and to receive pulls, one message per shard and direction."""
        buffers, sizes, expected = [], [], []
        for shard, name in enumerate(self.shards):
            own = [entry for entry in pushes if entry.block.peer == shard]
            if own:
                buffer = self.transport.acquire(
                    name, message_bytes([one.item for one in own], self.widths)
                )
                self._write(own, buffer.data)
                buffers.append(buffer)
            mine = [item for item in pulls if item.block.peer == shard]
            if mine:
                sizes.append((name, message_bytes(mine, self.widths)))
                expected.append(mine)
        return InFlight(self.transport.submit(buffers, sizes), pushes, expected)

    def _write(self, own: Sequence[StagedBlock], message: U8) -> None:
        """A message: blocks one after the other, then the learning rates."""
        moved = [entry.item for entry in own]
        for (item, staged), (_, rows) in zip(
            own, views_in(moved, message, self.widths), strict=True
        ):
            if staged is None:
                self.store.read_into(item.block, rows)
            else:
                rows[:] = staged
        pack_rates(moved, self._rates, message)

    def _take(self, moving: InFlight) -> None:
        """Put what arrives into its slots."""
        for item, rows in self._arrived(moving):
            self.store.write(item.block, rows)
        moving.posted.release()

    def _arrived(self, moving: InFlight) -> list[ArrivedBlock]:
        messages = zip(moving.expected, moving.posted.wait(), strict=True)
        arrived = [entry for mine, data in messages for entry in views_in(mine, data, self.widths)]
        for item in (*(push.item for push in moving.pushes), *(entry.item for entry in arrived)):
            self.meter.block(item, self.widths.nbytes(item.block))
        return arrived


def _unstaged(step: int, blocks: Sequence[TransferBlock]) -> list[StagedBlock]:
    """Blocks whose rows are read when they leave."""
    return [StagedBlock(item) for item in blocks_of_step(step, blocks)]
