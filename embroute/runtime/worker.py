"""A worker's rows: its cache, and the thread that fills it before each step and empties it after.

The user's loop computes; beside it the early phase of the next step runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from embroute.kernels.codes import MOST_PARTS
from embroute.kernels.rows import Floats
from embroute.models.initial import initial_rows
from embroute.policy.setup import Setup
from embroute.runtime.exchange import Bytes
from embroute.runtime.in_place import hear, tell
from embroute.runtime.mail import Arriving, Mail
from embroute.runtime.meter import ASIDE, DRAIN, EARLY, URGENT, Meter
from embroute.runtime.notes import Made, Work
from embroute.runtime.parcels import (
    OUTSIDE,
    Arrived,
    Item,
    Pending,
    Staged,
    in_parts,
    items,
    parcel_bytes,
    room_in,
    wrap_rates,
)
from embroute.runtime.script import (
    EARLY_LEAVE,
    EARLY_PULL,
    EARLY_PUSH,
    LATE_PULL,
    LAZY_UPDATE,
    URGENT_LEAVE,
    URGENT_PUSH,
    URGENT_UPDATE,
    Block,
    Orders,
)
from embroute.runtime.store import CacheStore


class Moving(NamedTuple):
    """Messages on their way: what leaves, and the blocks that come from each shard."""

    posted: Arriving
    pushes: Sequence[Staged]
    expected: list[list[Item]]


class Rows:
    """Carries out the phases of each step on the worker's side.

    `finish` may run beside `early` of the next step: they share no slot, and no list.
    """

    def __init__(
        self,
        store: CacheStore,
        mail: Mail,
        shards: Sequence[str],
        meter: Meter,
        setup: Setup,
        in_place: bool = False,
    ) -> None:
        self.setup, self.in_place = setup, in_place
        self.store, self.widths, self.mail, self.shards = store, store.widths, mail, shards
        self.meter = meter
        self._lazy: Pending[Staged] = Pending()
        self._leaving: Pending[Staged] = Pending()
        self._urgent: list[Staged] = []
        self._parts = MOST_PARTS  # of the plan that ordered them
        self._rates: dict[int, float] = {}

    def early(self, step: int, orders: Orders) -> None:
        """Beside the compute of the step before: what neither end needs for it."""
        began = time.perf_counter()
        with self.meter.during(EARLY, self.mail):
            leaving = self._stage(step, orders.at(EARLY_LEAVE))
            pushes = self._lazy.take(step) + self._leaving.take(step)
            pushes += _unstaged(step, orders.at(EARLY_PUSH))
            self._swap(pushes, items(step, orders.at(EARLY_PULL)))
            self._leaving.add(step + 1, leaving)
        self.meter.span(EARLY, step, began)

    def urgent(self, step: int, orders: Orders, parts: int) -> None:
        """Between two computes: updates that others wait for, rows that had to wait for them.

        In parts, each of which may come while the next ones go.
        """
        began = time.perf_counter()
        with self.meter.during(URGENT, self.mail):
            leaving = self._stage(step, orders.at(URGENT_LEAVE))
            pushes = self._urgent + _unstaged(step, orders.at(URGENT_PUSH))
            pulls, both = items(step, orders.at(LATE_PULL)), min(parts, self._parts)
            own = zip(in_parts(pushes, both), in_parts(pulls, both), strict=True)
            moving = [self._post(*part) for part in own]
            for part in moving:
                self._take(part)
            self._meet()
        self._urgent, self._parts = [], parts
        self._leaving.add(step + 1, leaving)
        self.meter.span(URGENT, step, began)
        self.meter.steps += 1

    def make(self, made: Made) -> None:
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

    def finish(self, work: Work, grads: Sequence[Floats], lr: float) -> None:
        """After the backward pass: update own rows, copy out what leaves."""
        began = time.perf_counter()
        self.store.optimizer = self.store.optimizer.with_lr(lr)
        recent = {step: rate for step, rate in self._rates.items() if step > work.step - 3}
        self._rates = {**recent, work.step: lr}
        for arena, count in enumerate(work.local_A):
            slots = work.slot_AT[arena][:count]
            self.store.apply(arena, slots, grads[arena][:count], work.step)
        self._urgent = self._stage(work.step, work.orders.at(URGENT_UPDATE), grads)
        lazy = self._stage(work.step, work.orders.at(LAZY_UPDATE), grads)
        self._lazy.add(work.step + 2, lazy)
        self.meter.seconds["update"] += time.perf_counter() - began

    def drain(self, step: int, orders: Orders) -> None:
        """Bring every update home."""
        with self.meter.during(DRAIN, self.mail):
            pushes = self._lazy.take_all() + self._leaving.take_all() + self._urgent
            self._swap(pushes + _unstaged(step, orders.at(URGENT_PUSH)), [])
            self._meet()
        self._urgent, self._parts = [], MOST_PARTS

    def _meet(self) -> None:
        """Where rows are trained in place: go on when everybody's updates are there."""
        if self.in_place:
            tell(self.mail, self.shards)
            hear(self.mail, self.shards)

    def fetch(self, blocks: Sequence[Block]) -> list[Floats]:
        """Rows as they are at the shards, outside of the cache."""
        with self.meter.during(ASIDE, self.mail):
            moving = self._post([], items(OUTSIDE, blocks))
            arrived = self._arrived(moving)
        found = [rows[:, : self.widths.own_columns(item.block)].copy() for item, rows in arrived]
        moving.posted.release()
        return found

    def refill(self, orders: Orders) -> None:
        """Put copies back into their slots."""
        with self.meter.during(ASIDE, self.mail):
            self._swap([], items(OUTSIDE, orders.blocks))

    def _stage(
        self, step: int, blocks: Sequence[Block], grads: Sequence[Floats] = ()
    ) -> list[Staged]:
        return [Staged(item, self.store.read(item.block, grads)) for item in items(step, blocks)]

    def _swap(self, pushes: Sequence[Staged], pulls: Sequence[Item]) -> None:
        self._take(self._post(pushes, pulls))

    def _post(self, pushes: Sequence[Staged], pulls: Sequence[Item]) -> Moving:
        """Begin to send pushes and to receive pulls, one message per shard and direction."""
        letters, sizes, expected = [], [], []
        for shard, name in enumerate(self.shards):
            own = [entry for entry in pushes if entry.block.peer == shard]
            if own:
                letter = self.mail.room(name, parcel_bytes([one.item for one in own], self.widths))
                self._write(own, letter.data)
                letters.append(letter)
            mine = [item for item in pulls if item.block.peer == shard]
            if mine:
                sizes.append((name, parcel_bytes(mine, self.widths)))
                expected.append(mine)
        return Moving(self.mail.post(letters, sizes), pushes, expected)

    def _write(self, own: Sequence[Staged], message: Bytes) -> None:
        """A message: blocks one after the other, then the learning rates."""
        moved = [entry.item for entry in own]
        for (item, staged), (_, rows) in zip(
            own, room_in(moved, message, self.widths), strict=True
        ):
            if staged is None:
                self.store.read_into(item.block, rows)
            else:
                rows[:] = staged
        wrap_rates(moved, self._rates, message)

    def _take(self, moving: Moving) -> None:
        """Put what arrives into its slots."""
        for item, rows in self._arrived(moving):
            self.store.write(item.block, rows)
        moving.posted.release()

    def _arrived(self, moving: Moving) -> list[Arrived]:
        messages = zip(moving.expected, moving.posted.wait(), strict=True)
        arrived = [entry for mine, data in messages for entry in room_in(mine, data, self.widths)]
        for item in (*(push.item for push in moving.pushes), *(entry.item for entry in arrived)):
            self.meter.block(item, self.widths.nbytes(item.block))
        return arrived


def _unstaged(step: int, blocks: Sequence[Block]) -> list[Staged]:
    """Blocks whose rows are read when they leave."""
    return [Staged(item) for item in items(step, blocks)]
