"""Versions that travel with rows in a debug run: the updates that every read saw or missed.

A record then ends in a stamp: its row, its clock, and the number of updates in it. Stamps travel in
the blocks of their rows, so an error that misplaces rows misplaces stamps too. The clock is HET's:
a pull copies it, each update of the copy adds one, and a shard keeps the larger of both at a push.
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
    """A read, an update or a landing of some rows at a step."""

    step: int
    stamps: I64  # rows x (VERSION_ROW, VERSION_CLOCK, COUNT)
    start: I64  # of a read: the clock of each copy when it was pulled


@dataclass
class RowVersions:
    """The stamps of one store, and its events."""

    now_AN: list[I64]
    start_AN: list[I64] = field(init=False)  # clock at the pull
    sent_AN: list[I64] = field(init=False)  # updates in the pulled row, or pushed since
    reads: list[VersionEvent] = field(default_factory=list)
    updates: list[VersionEvent] = field(default_factory=list)
    landings: list[VersionEvent] = field(default_factory=list)
    step: int = 0  # the step whose phases run now

    def __post_init__(self) -> None:
        self.start_AN = [np.zeros(len(now), np.int64) for now in self.now_AN]
        self.sent_AN = [np.zeros(len(now), np.int64) for now in self.now_AN]

    def attach(self, block: TransferBlock, rows: Floats) -> Floats:
        """Rows to send, each with its stamp; the stamp of a delta counts the updates in it."""
        stamps = self.now_AN[block.arena][block.indices]
        if block.record == DELTA:
            sent = self.sent_AN[block.arena]
            stamps[:, COUNT] -= sent[block.indices]
            sent[block.indices] += stamps[:, COUNT]
        return np.concatenate([rows, stamps.astype(rows.dtype)], axis=1)

    def arrive(self, block: TransferBlock, rows: Floats, keeps_updates: bool = False) -> Floats:
        """At a worker: keep the stamps of pulled rows; returns the rows without stamps.

        `keeps_updates`: updates that the copy has not pushed are added to the pulled row.
        """
        stamps, arena = rows[:, -NUM_STAMPS:].astype(np.int64), block.arena
        pending = self.now_AN[arena][block.indices, COUNT] - self.sent_AN[arena][block.indices]
        self.now_AN[arena][block.indices] = stamps
        self.now_AN[arena][block.indices, COUNT] += pending if keeps_updates else 0
        self.start_AN[arena][block.indices] = stamps[:, VERSION_CLOCK]
        self.sent_AN[arena][block.indices] = stamps[:, COUNT]
        return np.ascontiguousarray(rows[:, :-NUM_STAMPS])

    def begin(self, arena: int, slots: I32, rows: I64) -> None:
        """At a worker: stamp rows without any update so far."""
        self.now_AN[arena][slots] = 0
        self.now_AN[arena][slots, VERSION_ROW] = rows
        self.start_AN[arena][slots] = self.sent_AN[arena][slots] = 0

    def land(self, block: TransferBlock, rows: Floats) -> Floats:
        """At a shard: check and keep the stamps of pushed rows; returns the rows without stamps."""
        pushed, now = rows[:, -NUM_STAMPS:].astype(np.int64), self.now_AN[block.arena]
        stamps = now[block.indices]
        if not np.array_equal(stamps[:, VERSION_ROW], pushed[:, VERSION_ROW]):
            raise RuntimeError(f"step {self.step}: pushed rows arrived at places of other rows")
        if block.record == VALUE_STATE and (pushed[:, COUNT] < stamps[:, COUNT]).any():
            raise RuntimeError(f"step {self.step}: a pushed row lacks updates that its shard has")
        stamps[:, VERSION_CLOCK] = np.maximum(stamps[:, VERSION_CLOCK], pushed[:, VERSION_CLOCK])
        stamps[:, COUNT] = pushed[:, COUNT] + (stamps[:, COUNT] if block.record == DELTA else 0)
        now[block.indices] = stamps
        self.landings.append(VersionEvent(self.step, stamps, stamps[:, VERSION_CLOCK]))
        return np.ascontiguousarray(rows[:, :-NUM_STAMPS])

    def update(self, arena: int, where: I32 | I64, step: int) -> None:
        """Count one more update of each of these rows."""
        now = self.now_AN[arena]
        now[where, VERSION_CLOCK] += 1
        now[where, COUNT] += 1
        self.updates.append(VersionEvent(step, now[where], now[where, VERSION_CLOCK]))

    def read(self, step: int, slot_AT: Sequence[I32]) -> None:
        """Record that the worker is about to compute with these copies."""
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
    """How far the reads of a run were behind: the largest value over all reads."""

    reads: int
    unsent: int  # updates of the worker that its copy had not pushed when it was read
    behind: int  # by how much the row's clock at the shard exceeded the clock of the copy
    missed: int  # updates of earlier steps, by any worker, that were not in the copy


def audit(stamps: Sequence[RowVersions], exact: bool) -> Audit:
    """Compare all reads of a job with all its updates, given the stamps of all its ranks.

    An exact policy updates a row once a step, at one rank or at all holders. With deltas, every
    worker's update of its own copy counts.
    """
    landings, reads, updates = (
        _by_step(event for versions in stamps for event in getattr(versions, name))
        for name in ("landings", "reads", "updates")
    )
    clock_of: defaultdict[int, int] = defaultdict(int)  # of each row at its shard
    updates_of: defaultdict[int, int] = defaultdict(int)  # of each row, in all steps so far
    lags: list[tuple[int, int, int]] = []  # unsent, behind, missed
    for step in range(max(reads, default=-1) + 1):
        # Landings come before the reads of their step, and its updates after them.
        for event in landings[step]:
            clock_of.update(event.stamps[:, (VERSION_ROW, VERSION_CLOCK)].tolist())
        for event in reads[step]:
            copies = zip(event.stamps.tolist(), event.start.tolist(), strict=True)
            for (row, clock, count), start in copies:
                lags.append((clock - start, clock_of[row] - clock, updates_of[row] - count))
        rows = [row for event in updates[step] for row in event.stamps[:, VERSION_ROW].tolist()]
        for row in set(rows) if exact else rows:
            updates_of[row] += 1
    unsent, behind, missed = (max(column, default=0) for column in zip(*lags, strict=True))
    return Audit(len(lags), unsent=unsent, behind=behind, missed=missed)


def _by_step(events: Iterable[VersionEvent]) -> defaultdict[int, list[VersionEvent]]:
    by_step: defaultdict[int, list[VersionEvent]] = defaultdict(list)
    for event in events:
        by_step[event.step].append(event)
    return by_step
