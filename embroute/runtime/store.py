"""Where rows live: a shard's part of the tables, and a worker's cache. Both hold records.

A record is a row's value followed by its optimizer state; rows of one width share an arena.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import DELTA, GRADIENT, VALUE, VALUE_STATE
from embroute.kernels.rows import Floats, gather, merge, scatter, scatter_add
from embroute.runtime.optim import RowOptimizer
from embroute.runtime.places import Places
from embroute.runtime.script import Block
from embroute.runtime.stamps import NUM_STAMPS, cache_stamps, shard_stamps

I64 = npt.NDArray[np.int64]


class Widths:
    """Columns of each kind of record in each arena."""

    def __init__(
        self,
        places: Places,
        optimizer: RowOptimizer,
        dtype: npt.DTypeLike,
        stamped: bool = False,  # records travel with their versions
    ) -> None:
        self.values = places.setup.arenas
        self.whole = tuple(width + optimizer.state_width(width) for width in self.values)
        self.dtype, self.stamped = np.dtype(dtype), stamped

    def own_columns(self, block: Block) -> int:
        """Columns of a block in the store it comes from."""
        return (self.values if block.record in (VALUE, GRADIENT) else self.whole)[block.arena]

    def columns(self, block: Block) -> int:
        """Columns of a block on its way."""
        stamped = self.stamped and block.record != GRADIENT
        return self.own_columns(block) + (NUM_STAMPS if stamped else 0)

    def nbytes(self, block: Block) -> int:
        """Bytes of a block."""
        return len(block.where) * self.columns(block) * self.dtype.itemsize


class ShardStore:
    """One shard's records."""

    def __init__(
        self,
        shard: int,
        places: Places,
        widths: Widths,
        optimizer: RowOptimizer,
        records: Sequence[Floats] = (),  # zeros that others share; none: memory of its own
    ) -> None:
        self.widths, self.optimizer = widths, optimizer
        counts = places.counts_KA[shard]
        self.records: list[Floats] = list(records) or [
            np.zeros(shape, widths.dtype) for shape in zip(counts, widths.whole, strict=True)
        ]
        for own, width in zip(self.records, widths.values, strict=True):
            own[:, width:] = optimizer.initial_state
        self._place = [np.full(count, -1, np.int32) for count in counts]
        self.stamps = shard_stamps(shard, places) if widths.stamped else None

    def read(self, block: Block, out: Floats) -> None:
        """The rows of a pull."""
        if self.stamps is None:
            gather(self.records[block.arena], block.where, out)
            return
        rows = np.empty((len(block.where), self.widths.own_columns(block)), self.widths.dtype)
        gather(self.records[block.arena], block.where, rows)
        out[:] = self.stamps.attach(block, rows)

    def write(self, block: Block, rows: Floats) -> None:
        """Records that come home, or deltas that are added."""
        if self.stamps is not None:
            rows = self.stamps.land(block, rows)
        put = scatter_add if block.record == DELTA else scatter
        put(self.records[block.arena], block.where, rows)

    def update(self, pushed: Sequence[tuple[Block, Floats]], lr: float, step: int) -> None:
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
                count = merge(block.where, rows, place, distinct, sums, count)
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
        places: Places,
        widths: Widths,
        optimizer: RowOptimizer,
        deltas: bool,
        tables: Sequence[Floats] = (),  # rows that are read and trained where they lie
    ) -> None:
        self.widths, self.optimizer = widths, optimizer
        shapes = list(zip(places.setup.capacity_WA[worker], widths.whole, strict=True))
        self.records: list[Floats] = list(tables) or [
            np.zeros(shape, widths.dtype) for shape in shapes
        ]
        self.bases = [np.zeros(shape, widths.dtype) for shape in shapes] if deltas else []
        sizes = [slots for slots, _ in shapes]
        self.stamps = cache_stamps(sizes) if widths.stamped else None

    def read(self, block: Block, grads: Sequence[Floats]) -> Floats:
        """The rows of a push; gradients come from `grads`, one array an arena."""
        source = grads[block.arena] if block.record == GRADIENT else self.records[block.arena]
        out = np.empty((len(block.where), self.widths.own_columns(block)), self.widths.dtype)
        gather(source, block.where, out)
        if block.record == DELTA:
            base = np.empty_like(out)
            gather(self.bases[block.arena], block.where, base)
            scatter(self.bases[block.arena], block.where, out)
            out -= base
        if self.stamps is not None and block.record != GRADIENT:
            return self.stamps.attach(block, out)
        return out

    def read_into(self, block: Block, out: Floats) -> None:
        """The rows of a push that holds no gradients, where they are to leave from."""
        if block.record == DELTA or self.stamps is not None:
            out[:] = self.read(block, ())
        else:
            gather(self.records[block.arena], block.where, out)

    def write(self, block: Block, rows: Floats) -> None:
        """Rows that arrive; their deltas count from here."""
        if self.stamps is not None:
            rows = self.stamps.arrive(block, rows)
        scatter(self.records[block.arena], block.where, rows)
        if self.bases and block.record == VALUE_STATE:
            scatter(self.bases[block.arena], block.where, rows)

    def begin(
        self, arena: int, slots: npt.NDArray[np.int32], rows: I64, values: npt.NDArray[np.float64]
    ) -> None:
        """Rows that begin here, with initial values and optimizer state."""
        records, width = self.records[arena], values.shape[1]
        records[slots, :width] = values
        records[slots, width:] = self.optimizer.initial_state
        if self.stamps is not None:
            self.stamps.begin(arena, slots, rows)

    def apply(self, arena: int, slots: npt.NDArray[np.int32], grads: Floats, step: int) -> None:
        """Let the optimizer update rows here."""
        self.optimizer.update(self.records[arena], slots, grads, step + 1)
        if self.stamps is not None:
            self.stamps.update(arena, slots, step)
