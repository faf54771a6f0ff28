"""Versions that travel with rows in a debug run: what every read saw, and what it missed.

A record then ends in a stamp: its row, its clock, and how many updates are in it. Stamps are sent
in the blocks of the rows they belong to, so they go wrong where rows would. The clock is HET's:
pulled with the row, one more at each update of the copy, and at the shard the larger of both.
Axes: A arenas, N rows of a store or slots of a cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from embroute.engine.schedule import TransferBlock
from embroute.engine.sharding import RowSharding
from embroute.kernels.array_types import I32, I64
from embroute.kernels.codes import DELTA, VALUE_STATE
from embroute.kernels.rows import Floats

VERSION_ROW, VERSION_CLOCK, COUNT = range(3)
NUM_STAMPS = 3


class VersionEvent(NamedTuple):
    """Something that happened to some rows at a step."""

    step: int
    stamps: I64  # rows x ROW, CLOCK, COUNT
    start: I64  # of a read: the clock of each copy when it was pulled


@dataclass
class RowVersions:
    """The stamps of one store, and what happened to it."""

    now_AN: list[I64]
    start_AN: list[I64] = field(init=False)  # clock at the pull
    sent_AN: list[I64] = field(init=False)  # updates that the shard had, or was sent since
    reads: list[VersionEvent] = field(default_factory=list)
    updates: list[VersionEvent] = field(default_factory=list)
    landings: list[VersionEvent] = field(default_factory=list)
    step: int = 0  # whose phases are being carried out

    def __post_init__(self) -> None:
        self.start_AN = [np.zeros(len(now), np.int64) for now in self.now_AN]
        self.sent_AN = [np.zeros(len(now), np.int64) for now in self.now_AN]

    def attach(self, block: TransferBlock, rows: Floats) -> Floats:
        """Rows that leave, each with its stamp; a delta counts the updates in it."""
        stamps, where = self.now_AN[block.arena][block.indices], block.indices
        if block.record == DELTA:
            sent = self.sent_AN[block.arena]
            stamps[:, COUNT] -= sent[where]
            sent[where] += stamps[:, COUNT]
        return np.concatenate([rows, stamps.astype(rows.dtype)], axis=1)

    def arrive(self, block: TransferBlock, rows: Floats) -> Floats:
        """At a worker: the rows of a pull, without their stamps."""
        stamps, arena = rows[:, -NUM_STAMPS:].astype(np.int64), block.arena
        self.now_AN[arena][block.indices] = stamps
        self.start_AN[arena][block.indices] = stamps[:, VERSION_CLOCK]
        self.sent_AN[arena][block.indices] = stamps[:, COUNT]
        return np.ascontiguousarray(rows[:, :-NUM_STAMPS])

    def begin(self, arena: int, slots: I32, rows: I64) -> None:
        """At a worker: rows without any update so far."""
        self.now_AN[arena][slots] = 0
        self.now_AN[arena][slots, VERSION_ROW] = rows
        self.start_AN[arena][slots] = self.sent_AN[arena][slots] = 0

    def land(self, block: TransferBlock, rows: Floats) -> Floats:
        """At a shard: the rows of a push, without their stamps."""
        stamps, now = rows[:, -NUM_STAMPS:].astype(np.int64), self.now_AN[block.arena]
        mine = now[block.indices]
        if not np.array_equal(mine[:, VERSION_ROW], stamps[:, VERSION_ROW]):
            raise RuntimeError(f"step {self.step}: rows came home to places of other rows")
        if block.record == VALUE_STATE and (stamps[:, COUNT] < mine[:, COUNT]).any():
            raise RuntimeError(f"step {self.step}: a row that came home lacks updates")
        mine[:, VERSION_CLOCK] = np.maximum(mine[:, VERSION_CLOCK], stamps[:, VERSION_CLOCK])
        mine[:, COUNT] = stamps[:, COUNT] + (mine[:, COUNT] if block.record == DELTA else 0)
        now[block.indices] = mine
        self.landings.append(VersionEvent(self.step, mine, mine[:, VERSION_CLOCK]))
        return np.ascontiguousarray(rows[:, :-NUM_STAMPS])

    def update(self, arena: int, where: I32 | I64, step: int) -> None:
        """One more update in each of these rows."""
        now = self.now_AN[arena]
        now[where, VERSION_CLOCK] += 1
        now[where, COUNT] += 1
        self.updates.append(VersionEvent(step, now[where], now[where, VERSION_CLOCK]))

    def read(self, step: int, slot_AT: Sequence[I32]) -> None:
        """The worker is about to compute with these copies."""
        for now, start, slots in zip(self.now_AN, self.start_AN, slot_AT, strict=True):
            self.reads.append(VersionEvent(step, now[slots], start[slots]))


def shard_versions(shard: int, sharding: RowSharding) -> RowVersions:
    """Stamps of a shard's rows before the first update."""
    setup = sharding.setup
    now_AN = [np.zeros((count, NUM_STAMPS), np.int64) for count in sharding.counts_KA[shard]]
    for table, width in enumerate(setup.widths):
        rows = sharding.rows_of(shard, table)
        now_AN[setup.arenas.index(width)][sharding.local(rows), VERSION_ROW] = rows
    return RowVersions(now_AN)


def cache_versions(sizes: Sequence[int]) -> RowVersions:
    """Stamps of empty slots."""
    return RowVersions([np.zeros((size, NUM_STAMPS), np.int64) for size in sizes])


class Audit(NamedTuple):
    """The most that any read of a run was behind."""

    reads: int
    unsent: int  # updates of its own that a copy held back when it was read
    behind: int  # clocks of the row at the shard after that of the copy
    missed: int  # updates of earlier steps, whoever made them, that were not in it


@dataclass
class _Book:
    """What is known of every row while events are replayed in order."""

    clock: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    made: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    found: list[tuple[int, int, int]] = field(default_factory=list)

    def land(self, event: VersionEvent) -> None:
        for row, clock, _ in event.stamps.tolist():
            self.clock[row] = clock

    def read(self, event: VersionEvent) -> None:
        for (row, clock, count), start in zip(
            event.stamps.tolist(), event.start.tolist(), strict=True
        ):
            self.found.append((clock - start, self.clock[row] - clock, self.made[row] - count))


def audit(stamps: Sequence[RowVersions], exact: bool) -> Audit:
    """Hold all reads of a job against all updates of it, given the stamps of all its ranks.

    An exact policy's row is updated once a step, wherever that happens. With deltas every worker
    updates its own copy, and each of these is an update.
    """
    landings, reads, updates = (
        _by_step(event for one in stamps for event in getattr(one, name))
        for name in ("landings", "reads", "updates")
    )
    book = _Book()
    for step in range(max(reads, default=-1) + 1):
        for event in landings[step]:
            book.land(event)
        for event in reads[step]:
            book.read(event)
        rows = [row for event in updates[step] for row in event.stamps[:, VERSION_ROW].tolist()]
        for row in set(rows) if exact else rows:
            book.made[row] += 1
    unsent, behind, missed = (max(column, default=0) for column in zip(*book.found, strict=True))
    return Audit(len(book.found), unsent, behind, missed)


def _by_step(events: Iterable[VersionEvent]) -> defaultdict[int, list[VersionEvent]]:
    found: defaultdict[int, list[VersionEvent]] = defaultdict(list)
    for event in events:
        found[event.step].append(event)
    return found
