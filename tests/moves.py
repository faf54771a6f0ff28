"""The transfers of plans one by one, the memory of a replay, and its error."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from embroute.cost.step_time import FLOAT_BYTES, OPTIMIZERS
from embroute.kernels import codes
from embroute.planner.kernels.transfers import Transfers
from embroute.planner.plan import Plan
from embroute.planner.setup import Setup

Key = tuple[int, int]  # (worker, row)


class LawBrokenError(AssertionError):
    """A plan breaks a law."""


def demand(truth: bool, *message: object) -> None:
    """Raise unless the condition holds."""
    if not truth:
        raise LawBrokenError(" ".join(map(str, message)))


class Transfer(NamedTuple):
    """One transfer, unpacked."""

    worker: int
    row: int
    slot: int
    arena: int
    kind: int
    record: int
    phase: int


def unpack(transfers: Transfers) -> list[Transfer]:
    """Transfers one by one."""
    return [Transfer(*values) for values in zip(*(c.tolist() for c in transfers), strict=True)]


def lookups(plan: Plan, num_workers: int) -> Counter[Key]:
    """Law 1; returns the look-ups of each worker. A worker's samples are contiguous."""
    batch, order = plan.now.batch, plan.touches.sample_order_S.tolist()
    demand(sorted(order) == list(range(len(batch))), "law 1: samples of the step", order)
    workers = [int(plan.worker_S[s]) for s in order]
    demand(workers == sorted(workers), "samples not grouped by worker")
    demand(all(0 <= w < num_workers for w in workers), "no such worker")
    bounds = batch.sample_offsets
    return Counter(
        (worker, row)
        for s, worker in zip(order, workers, strict=True)
        for row in batch.rows[bounds[s] : bounds[s + 1]].tolist()
        if row >= 0
    )


class Counts:
    """Rows and bytes that a step moves, with sizes of its own."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        tables = zip(setup.schema.tables, setup.widths, strict=True)
        self.width_R = [width for table, width in tables for _ in range(table.num_rows)]
        self._count()

    def _count(self) -> None:
        axes = (self.setup.num_workers, self.setup.cluster.num_shards)
        shape = (*axes, codes.NUM_KINDS, codes.NUM_PHASES)
        self.rows_WKIP, self.bytes_WKIP = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def _add(self, move: Transfer, kind: int) -> None:
        """Count a transfer."""
        width = self.width_R[move.row]
        state = OPTIMIZERS[self.setup.optimizer](width)
        floats = width + (state if move.record in (codes.VALUE_STATE, codes.DELTA) else 0)
        at = (move.worker, move.row % self.setup.cluster.num_shards, kind, move.phase)
        self.rows_WKIP[at] += 1
        self.bytes_WKIP[at] += FLOAT_BYTES * floats


@dataclass
class Copy:
    """A worker's copy of a row: its updates, and the updates that no other copy has yet (HET)."""

    row: int
    value: int
    has_state: bool
    clock: int
    start: int
    unsent: int = 0

    def keep(self, old: Copy) -> None:
        """Add the unsent updates and ticks of the copy before the pull."""
        self.value |= old.unsent
        self.unsent, self.clock = old.unsent, self.start + old.clock - old.start

    def send(self, adds_clocks: bool) -> tuple[int, int, int, int]:
        """Its row, update, clock and ticks, which leave it. Clocks that add up count anew."""
        sent = (self.row, self.unsent, self.clock, self.clock - self.start)
        self.unsent = 0
        self.start = self.clock if adds_clocks else self.start
        return sent


@dataclass
class Memory:
    """The step before: trained rows and their copies, and the rows that left lazily or urgently."""

    rows: set[int] = field(default_factory=set)
    copies: set[Key] = field(default_factory=set)  # (worker, row)
    slots: set[tuple[int, int]] = field(default_factory=set)  # (worker, slot)
    urgent: set[int] = field(default_factory=set)
    lazy: set[int] = field(default_factory=set)
