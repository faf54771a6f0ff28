"""The place of a row: its shard, its arena, and its number among the shard's rows of that arena."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from embroute.engine.transfer_kernels import RowLocator, arena_index, locate
from embroute.kernels.array_types import I32, I64, U8
from embroute.planner.setup import Setup


@dataclass(frozen=True)
class RowSharding:
    """Shard r mod K holds row r. Axes: K shards, T tables, A arenas, W workers."""

    setup: Setup

    @property
    def num_shards(self) -> int:
        """Shards of the job."""
        return self.setup.cluster.num_shards

    @property
    def num_workers(self) -> int:
        """Workers of the job."""
        return self.setup.num_workers

    @property
    def num_arenas(self) -> int:
        """Distinct widths."""
        return len(self.setup.arenas)

    @cached_property
    def first_slot_WA(self) -> I64:
        """First slot of each worker's arenas."""
        capacity = self.setup.capacity_WA
        return np.cumsum(capacity, 1) - capacity

    def local(self, rows: I64) -> I64:
        """Number of each row in its shard's arena."""
        return locate(np.asarray(rows, np.int64), self.locator)

    @cached_property
    def locator(self) -> RowLocator:
        """Tables from which kernels compute the places of rows."""
        first_T = np.asarray(self.setup.schema.first_rows, np.int64)
        shift = max(0, int(first_T[-1]).bit_length() - 12)  # at most 4,096 guesses: 16 KiB
        starts = np.arange(0, first_T[-1] + 1, 1 << shift)
        guess_G = (np.searchsorted(first_T, starts, side="right") - 1).astype(np.int32)
        return RowLocator(first_T, self._before_KT, guess_G, shift, self.first_slot_WA)

    def arena_indices(self, rows: I64, arenas: U8) -> I32:
        """Number of each row in its arena, if all shards' rows lie one after the other."""
        return arena_index(rows, arenas, self.locator, self.first_KA)

    def rows_of(self, shard: int, table: int) -> I64:
        """Rows of a table that a shard holds, in the order of their numbers."""
        first, last = self.setup.schema.first_rows[table : table + 2]
        return np.arange(first + (shard - first) % self.num_shards, last, self.num_shards)

    @cached_property
    def _before_KT(self) -> I64:
        """Rows of earlier tables of the same arena, by shard and table."""
        counts_KT, before_KT = self.counts_KT, np.zeros_like(self.counts_KT)
        for width in self.setup.arenas:
            tables = np.equal(self.setup.widths, width)
            before_KT[:, tables] = np.cumsum(counts_KT[:, tables], 1) - counts_KT[:, tables]
        return before_KT

    @cached_property
    def counts_KT(self) -> I64:
        """Rows of each table that each shard holds."""
        shards, first = self.num_shards, self.setup.schema.first_rows
        k = np.arange(shards)[:, None]
        # Rows r in [a, b) with r % K == k: those below b less those below a.
        return (first[1:] - k + shards - 1) // shards - (first[:-1] - k + shards - 1) // shards

    @cached_property
    def counts_KA(self) -> I64:
        """Rows of each arena that each shard holds."""
        tables_A = [np.equal(self.setup.widths, width) for width in self.setup.arenas]
        return np.stack([self.counts_KT[:, tables].sum(1) for tables in tables_A], 1)

    @cached_property
    def first_KA(self) -> I64:
        """Rows of each arena that earlier shards hold."""
        return np.cumsum(self.counts_KA, 0) - self.counts_KA
