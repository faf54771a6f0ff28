"""Where rows live: a shard's part of the tables, and a worker's cache. Both hold records.

A record is a row's value followed by its optimizer state; rows of one width share an arena.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import DELTA, GRADIENT, VALUE, VALUE_STATE
from embroute.kernels.rows import Floats, gather, scatter, scatter_add
from embroute.policy.setup import Setup
from embroute.runtime.optim import RowOptimizer
from embroute.runtime.script import Group

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """Where a row lies: its arena, and its number among the rows of its shard in that arena."""

    setup: Setup

    def local(self, rows: I64) -> I64:
        """Number of each row in its shard's arena."""
        shards = self.setup.cluster.num_shards
        table = self.setup.table_of(rows)
        first = self.setup.schema.first_rows[table]
        lowest = first + (rows - first) % shards  # first row of the table in the same shard
        return self._before(table, rows % shards) + (rows - lowest) // shards

    def _before(self, table: npt.NDArray[np.intp], shard: I64) -> I64:
        return self.counts_before_KT()[shard, table]

    def counts_before_KT(self) -> I64:
        """Rows of earlier tables of the same arena, by shard and table."""
        counts_KT, setup = self.counts_KT(), self.setup
        before = np.zeros_like(counts_KT)
        for width in setup.arenas:
            tables = [t for t, own in enumerate(setup.widths) if own == width]
            before[:, tables] = np.cumsum(counts_KT[:, tables], 1) - counts_KT[:, tables]
        return before

    def counts_KT(self) -> I64:
        """Rows of each table that each shard holds."""
        shards, first = self.setup.cluster.num_shards, self.setup.schema.first_rows
        k = np.arange(shards)[:, None]
        # Rows r in [a, b) with r % K == k: those below b less those below a.
        return (first[1:] - k + shards - 1) // shards - (first[:-1] - k + shards - 1) // shards

    def counts_KA(self) -> I64:
        """Rows of each arena that each shard holds."""
        counts_KT = self.counts_KT()
        sums = [
            counts_KT[:, [t for t, own in enumerate(self.setup.widths) if own == width]].sum(1)
            for width in self.setup.arenas
        ]
        return np.stack(sums, 1)


class ShardStore:
    """One shard's records, and the gradients that wait for their sum."""

    def __init__(
        self, shard: int, places: Places, optimizer: RowOptimizer, dtype: npt.DTypeLike
    ) -> None:
        setup = places.setup
        self.places, self.optimizer = places, optimizer
        counts = places.counts_KA()[shard]
        self.widths = setup.arenas
        self.records = []
        for count, width in zip(counts, self.widths, strict=True):
            records = np.zeros((count, width + optimizer.state_width(width)), dtype)
            records[:, width:] = optimizer.initial_state
            self.records.append(records)

    def set_values(self, arena: int, rows: I64, values: Floats) -> None:
        """Initial values of rows."""
        scatter(self.records[arena], self.places.local(rows), values)

    def values(self, arena: int, rows: I64) -> Floats:
        """Current values of rows."""
        return self.read(Group(0, 0, arena, VALUE, rows, np.empty(0, np.int32)))

    def read(self, group: Group) -> Floats:
        """The block of a pull."""
        records = self.records[group.arena]
        columns = self.widths[group.arena] if group.record == VALUE else records.shape[1]
        block = np.empty((len(group.rows), columns), records.dtype)
        gather(records, self.places.local(group.rows), block)
        return block

    def write(self, group: Group, block: Floats) -> None:
        """A value that comes home, or a delta that is added."""
        put = scatter_add if group.record == DELTA else scatter
        put(self.records[group.arena], self.places.local(group.rows), block)

    def update(self, pushed: list[tuple[Group, Floats]], step: int) -> None:
        """Sum the gradients of each row in worker order and apply the optimizer once a row."""
        for arena in sorted({group.arena for group, _ in pushed}):
            mine = [(group, block) for group, block in pushed if group.arena == arena]
            mine.sort(key=lambda pair: pair[0].worker)
            rows = np.concatenate([group.rows for group, _ in mine])
            unique, inverse = np.unique(rows, return_inverse=True)
            summed = np.zeros((len(unique), self.widths[arena]), self.records[arena].dtype)
            scatter_add(summed, inverse.astype(np.int64), np.concatenate([b for _, b in mine]))
            self.optimizer.update(self.records[arena], self.places.local(unique), summed, step)


class CacheStore:
    """One worker's slots, the gradients of its step, and the bases of its unsent deltas."""

    def __init__(
        self, worker: int, setup: Setup, optimizer: RowOptimizer, dtype: npt.DTypeLike
    ) -> None:
        capacity = setup.capacity_WA[worker]
        self.first = np.cumsum(capacity) - capacity
        self.optimizer, self.widths = optimizer, setup.arenas
        shapes = [
            (count, width + optimizer.state_width(width))
            for count, width in zip(capacity, self.widths, strict=True)
        ]
        self.records = [np.zeros(shape, dtype) for shape in shapes]
        self.bases = [np.zeros(shape, dtype) for shape in shapes]
        self.grads = [
            np.zeros((len(records), width), dtype)
            for records, width in zip(self.records, self.widths, strict=True)
        ]

    def inside(self, arena: int, slots: I32) -> I64:
        """Slots as rows of their arena's array."""
        index: I64 = slots.astype(np.int64) - self.first[arena]
        return index

    def read(self, group: Group) -> Floats:
        """The block of a push."""
        index, arena = self.inside(group.arena, group.slots), group.arena
        source = self.grads[arena] if group.record == GRADIENT else self.records[arena]
        block = np.empty((len(index), source.shape[1]), source.dtype)
        gather(source, index, block)
        if group.record == DELTA:
            base = np.empty_like(block)
            gather(self.bases[arena], index, base)
            scatter(self.bases[arena], index, block)
            block -= base
        return block

    def write(self, group: Group, block: Floats) -> None:
        """Rows that arrive; their deltas count from here."""
        index = self.inside(group.arena, group.slots)
        scatter(self.records[group.arena], index, block)
        if group.record == VALUE_STATE:
            scatter(self.bases[group.arena], index, block)

    def values(self, arena: int, slots: I32) -> Floats:
        """Values at slots: what the forward pass reads."""
        block = np.empty((len(slots), self.widths[arena]), self.records[arena].dtype)
        gather(self.records[arena], self.inside(arena, slots), block)
        return block

    def keep_gradients(self, arena: int, slots: I32, grad: Floats) -> None:
        """Gradients of touched rows, until they are applied or pushed."""
        scatter(self.grads[arena], self.inside(arena, slots), grad)

    def apply(self, arena: int, slots: I32, step: int) -> None:
        """Let the optimizer update rows here, from their gradients."""
        index = self.inside(arena, slots)
        grad = np.empty((len(index), self.widths[arena]), self.grads[arena].dtype)
        gather(self.grads[arena], index, grad)
        self.optimizer.update(self.records[arena], index, grad, step)
