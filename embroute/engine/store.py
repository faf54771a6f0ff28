"""Where rows live: a shard's part of the tables, and a worker's cache. Both hold records.

A record is a row's value followed by its optimizer state; rows of one width share an arena.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embroute.engine.observe.row_versions import NUM_STAMPS, cache_versions, shard_versions
from embroute.engine.optim import RowOptimizer
from embroute.engine.schedule import TransferBlock
from embroute.engine.sharding import RowSharding
from embroute.kernels.array_types import F64, I32, I64
from embroute.kernels.codes import DELTA, GRADIENT, VALUE, VALUE_STATE
from embroute.kernels.rows import Floats, gather, merge, scatter, scatter_add


class RecordWidths:
    """Columns of each kind of record in each arena."""

    def __init__(
        self,
        sharding: RowSharding,
        optimizer: RowOptimizer,
        dtype: npt.DTypeLike,
        stamped: bool = False,  # records travel with their versions
    ) -> None:
        self.values = sharding.setup.arenas
        self.whole = tuple(width + optimizer.state_width(width) for width in self.values)
        self.dtype, self.stamped = np.dtype(dtype), stamped

    def own_columns(self, block: TransferBlock) -> int:
        """Columns of a block in the store it comes from."""
        return (self.values if block.record in (VALUE, GRADIENT) else self.whole)[block.arena]

    def columns(self, block: TransferBlock) -> int:
        """Columns of a block on its way."""
        stamped = self.stamped and block.record != GRADIENT
        return self.own_columns(block) + (NUM_STAMPS if stamped else 0)

    def nbytes(self, block: TransferBlock) -> int:
        """Bytes of a block."""
        return len(block.indices) * self.columns(block) * self.dtype.itemsize


class ShardStore:
    """One shard's records."""

    def __init__(
        self,
        shard: int,
        sharding: RowSharding,
        widths: RecordWidths,
        optimizer: RowOptimizer,
        records: Sequence[Floats] = (),  # zeros that others share; none: memory of its own
    ) -> None:
        self.widths, self.optimizer = widths, optimizer
        counts = sharding.counts_KA[shard]
        self.records: list[Floats] = list(records) or [
            np.zeros(shape, widths.dtype) for shape in zip(counts, widths.whole, strict=True)
        ]
        for own, width in zip(self.records, widths.values, strict=True):
            own[:, width:] = optimizer.initial_state
        self._place = [np.full(count, -1, np.int32) for count in counts]
        self.stamps = shard_versions(shard, sharding) if widths.stamped else None

    def read(self, block: TransferBlock, out: Floats) -> None:
        """The rows of a pull."""
        if self.stamps is None:
            gather(self.records[block.arena], block.indices, out)
            return
        rows = np.empty((len(block.indices), self.widths.own_columns(block)), self.widths.dtype)
        gather(self.records[block.arena], block.indices, rows)
        out[:] = self.stamps.attach(block, rows)

    def write(self, block: TransferBlock, rows: Floats) -> None:
        """Records that come home, or deltas that are added."""
        if self.stamps is not None:
            rows = self.stamps.land(block, rows)
        put = scatter_add if block.record == DELTA else scatter
        put(self.records[block.arena], block.indices, rows)

    def update(self, pushed: Sequence[tuple[TransferBlock, Floats]], lr: float, step: int) -> None:
        """Sum the gradients of each row in the order given and apply the optimizer once a row."""
        optimizer = self.optimizer.with_lr(lr)
        for arena, records in enumerate(self.records):
            mine = [(block, rows) for block, rows in pushed if block.arena == arena]
            if not mine:
                continue
            most, place, count = sum(len(rows) for _, rows in mine), self._place[arena], 0
            distinct = np.empty(most, np.int64)
            sums = np.empty((most, mine[0][1].shape[1]), records.dtype)
            for block, rows in mine:
                count = merge(block.indices, rows, place, distinct, sums, count)
            distinct = distinct[:count]
            place[distinct] = -1
            optimizer.update(records, distinct, sums[:count], step + 1)
            if self.stamps is not None:
                self.stamps.update(arena, distinct, step)


class CacheStore:
    """One worker's slots, and the bases of its unsent deltas where the policy sends deltas."""

    def __init__(
        self,
        worker: int,
        sharding: RowSharding,
        widths: RecordWidths,
        optimizer: RowOptimizer,
        deltas: bool,
        tables: Sequence[Floats] = (),  # rows that are read and trained where they lie
    ) -> None:
        self.widths, self.optimizer = widths, optimizer
        shapes = list(zip(sharding.setup.capacity_WA[worker], widths.whole, strict=True))
        self.records: list[Floats] = list(tables) or [
            np.zeros(shape, widths.dtype) for shape in shapes
        ]
        self.bases = [np.zeros(shape, widths.dtype) for shape in shapes] if deltas else []
        sizes = [slots for slots, _ in shapes]
        self.stamps = cache_versions(sizes) if widths.stamped else None

    def read(self, block: TransferBlock, grads: Sequence[Floats]) -> Floats:
        """The rows of a push; gradients come from `grads`, one array an arena."""
        source = grads[block.arena] if block.record == GRADIENT else self.records[block.arena]
        out = np.empty((len(block.indices), self.widths.own_columns(block)), self.widths.dtype)
        gather(source, block.indices, out)
        if block.record == DELTA:
            base = np.empty_like(out)
            gather(self.bases[block.arena], block.indices, base)
            scatter(self.bases[block.arena], block.indices, out)
            out -= base
        if self.stamps is not None and block.record != GRADIENT:
            return self.stamps.attach(block, out)
        return out

    def read_into(self, block: TransferBlock, out: Floats) -> None:
        """The rows of a push that holds no gradients, where they are to leave from."""
        if block.record == DELTA or self.stamps is not None:
            out[:] = self.read(block, ())
        else:
            gather(self.records[block.arena], block.indices, out)

    def write(self, block: TransferBlock, rows: Floats) -> None:
        """Rows that arrive; their deltas count from here."""
        if self.stamps is not None:
            rows = self.stamps.arrive(block, rows)
        scatter(self.records[block.arena], block.indices, rows)
        if self.bases and block.record == VALUE_STATE:
            scatter(self.bases[block.arena], block.indices, rows)

    def begin(self, arena: int, slots: I32, rows: I64, values: F64) -> None:
        """Rows that begin here, with initial values and optimizer state."""
        records, width = self.records[arena], values.shape[1]
        records[slots, :width] = values
        records[slots, width:] = self.optimizer.initial_state
        if self.stamps is not None:
            self.stamps.begin(arena, slots, rows)

    def apply(self, arena: int, slots: I32, grads: Floats, step: int) -> None:
        """Let the optimizer update rows here."""
        self.optimizer.update(self.records[arena], slots, grads, step + 1)
        if self.stamps is not None:
            self.stamps.update(arena, slots, step)
