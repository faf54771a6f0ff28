"""Stores of rows: a shard's part of the tables, and a worker's cache.

Both hold records: a row's value followed by its optimizer state. Rows of one width share an arena.
If all ranks are on one machine, workers may train rows in the shards' own memory, without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from embroute.engine.observe.row_versions import NUM_STAMPS, cache_versions, shard_versions
from embroute.engine.optim import RowOptimizer
from embroute.engine.schedule import TransferBlock
from embroute.engine.sharding import RowSharding
from embroute.kernels.array_types import F64, I32, I64
from embroute.kernels.codes import DELTA, GRADIENT, VALUE, VALUE_STATE
from embroute.kernels.rows import Floats, gather, merge, scatter, scatter_add
from embroute.transport.interface import Channel

_ALIGN = 64  # bytes of a cache line


class RecordWidths:
    """Columns of each kind of record in each arena."""

    def __init__(
        self,
        sharding: RowSharding,
        optimizer: RowOptimizer,
        dtype: npt.DTypeLike,
        stamped: bool = False,  # in a debug run, records travel with their versions
    ) -> None:
        self.values = sharding.setup.arenas
        self.whole = tuple(width + optimizer.state_width(width) for width in self.values)
        self.dtype, self.stamped = np.dtype(dtype), stamped

    def own_columns(self, block: TransferBlock) -> int:
        """Columns of a block in the store it comes from."""
        return (self.values if block.record in (VALUE, GRADIENT) else self.whole)[block.arena]

    def columns(self, block: TransferBlock) -> int:
        """Columns of a block in a message."""
        stamped = self.stamped and block.record != GRADIENT
        return self.own_columns(block) + (NUM_STAMPS if stamped else 0)

    def nbytes(self, block: TransferBlock) -> int:
        """Bytes of a block."""
        return len(block.indices) * self.columns(block) * self.dtype.itemsize


def shared_tables(transport: Channel, sharding: RowSharding, widths: RecordWidths) -> list[Floats]:
    """All rows of each arena, in memory that all shards and workers share.

    The rows of the first shard come first, then those of the second. Every shard and every worker
    must call this.
    """
    counts = sharding.counts_KA.sum(0).tolist()
    shapes = list(zip(counts, widths.whole, strict=True))
    sizes = [count * width * widths.dtype.itemsize for count, width in shapes]
    aligned = [-(-size // _ALIGN) * _ALIGN for size in sizes]
    memory = transport.common_memory(max(_ALIGN, sum(aligned)))
    if memory is None:
        raise ValueError(
            "policy in-place: shards and workers share no memory; they must be on one Linux "
            "machine, without transport=sockets"
        )
    firsts = accumulate(aligned[:-1], initial=0)
    return [
        memory[first : first + size].view(widths.dtype).reshape(shape)
        for first, size, shape in zip(firsts, sizes, shapes, strict=True)
    ]


def rows_of_shard(tables: Sequence[Floats], sharding: RowSharding, shard: int) -> list[Floats]:
    """A shard's rows of shared tables."""
    firsts, counts = sharding.first_KA[shard].tolist(), sharding.counts_KA[shard].tolist()
    bounds = zip(tables, firsts, counts, strict=True)
    return [rows[first : first + count] for rows, first, count in bounds]


def _signal(transport: Channel, peers: Sequence[str]) -> None:
    """Tell peers that this rank has finished its part of the step."""
    transport.exchange([(peer, transport.acquire(peer, 1)) for peer in peers], [])


def _await_signals(transport: Channel, peers: Sequence[str]) -> None:
    """Wait for the signals of all peers."""
    signals = transport.submit([], [(peer, 1) for peer in peers])
    signals.wait()
    signals.release()


class ShardStore:
    """One shard's records."""

    def __init__(
        self,
        shard: int,
        sharding: RowSharding,
        widths: RecordWidths,
        optimizer: RowOptimizer,
        records: Sequence[Floats] = (),  # zeros in memory that workers share; empty: own memory
    ) -> None:
        self.widths, self.optimizer, self._shared = widths, optimizer, bool(records)
        counts = sharding.counts_KA[shard]
        self.records: list[Floats] = list(records) or [
            np.zeros(shape, widths.dtype) for shape in zip(counts, widths.whole, strict=True)
        ]
        for table, width in zip(self.records, widths.values, strict=True):
            table[:, width:] = optimizer.initial_state
        self._place = [np.full(count, -1, np.int32) for count in counts]  # scratch of `update`
        self.stamps = shard_versions(shard, sharding) if widths.stamped else None

    def meet(self, transport: Channel, workers: Sequence[str]) -> None:
        """With shared tables: when all workers have finished the step, let all of them go on."""
        if self._shared:
            _await_signals(transport, workers)
            _signal(transport, workers)

    def read(self, block: TransferBlock, out: Floats) -> None:
        """The rows of a pull."""
        if self.stamps is None:
            gather(self.records[block.arena], block.indices, out)
            return
        rows = np.empty((len(block.indices), self.widths.own_columns(block)), self.widths.dtype)
        gather(self.records[block.arena], block.indices, rows)
        out[:] = self.stamps.attach(block, rows)

    def write(self, block: TransferBlock, rows: Floats) -> None:
        """Replace records by pushed ones, or add deltas to them."""
        if self.stamps is not None:
            rows = self.stamps.land(block, rows)
        put = scatter_add if block.record == DELTA else scatter
        put(self.records[block.arena], block.indices, rows)

    def update(self, pushed: Sequence[tuple[TransferBlock, Floats]], lr: float, step: int) -> None:
        """Sum the gradients of each row in the order given and apply the optimizer once a row."""
        optimizer = self.optimizer.with_lr(lr)
        for arena, records in enumerate(self.records):
            gradients = [(block, rows) for block, rows in pushed if block.arena == arena]
            if not gradients:
                continue
            # `place` maps a row to its sum, and is -1 everywhere again after the loop.
            most, place, count = sum(len(rows) for _, rows in gradients), self._place[arena], 0
            distinct = np.empty(most, np.int64)
            sums = np.empty((most, gradients[0][1].shape[1]), records.dtype)
            for block, rows in gradients:
                count = merge(block.indices, rows, place, distinct, sums, count)
            distinct = distinct[:count]
            place[distinct] = -1
            optimizer.update(records, distinct, sums[:count], step + 1)
            if self.stamps is not None:
                self.stamps.update(arena, distinct, step)


class CacheStore:
    """One worker's slots. If the policy sends deltas, also the values that deltas count from."""

    def __init__(
        self,
        worker: int,
        sharding: RowSharding,
        widths: RecordWidths,
        optimizer: RowOptimizer,
        deltas: bool,
        tables: Sequence[Floats] = (),  # shared tables, which then take the place of slots
    ) -> None:
        self.widths, self.optimizer, self._shared = widths, optimizer, bool(tables)
        shapes = list(zip(sharding.setup.capacity_WA[worker], widths.whole, strict=True))
        self.records: list[Floats] = list(tables) or [
            np.zeros(shape, widths.dtype) for shape in shapes
        ]
        self.bases = [np.zeros(shape, widths.dtype) for shape in shapes] if deltas else []
        self.stamps = cache_versions([slots for slots, _ in shapes]) if widths.stamped else None

    def set_lr(self, lr: float) -> None:
        """Use this learning rate from now on."""
        self.optimizer = self.optimizer.with_lr(lr)

    def meet(self, transport: Channel, shards: Sequence[str]) -> None:
        """With shared tables: wait until all workers have finished the step."""
        if self._shared:
            _signal(transport, shards)
            _await_signals(transport, shards)

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
        """Write the rows of a push without gradients into a message."""
        if block.record == DELTA or self.stamps is not None:
            out[:] = self.read(block, ())
        else:
            gather(self.records[block.arena], block.indices, out)

    def write(self, block: TransferBlock, rows: Floats) -> None:
        """Put pulled rows into their slots; deltas count from these values.

        Updates that a copy has not pushed yet are added to the pulled row, and stay unpushed.
        """
        if self.stamps is not None:
            rows = self.stamps.arrive(block, rows, keeps_updates=bool(self.bases))
        if self.bases and block.record == VALUE_STATE:
            pending, base = np.empty_like(rows), np.empty_like(rows)
            gather(self.records[block.arena], block.indices, pending)
            gather(self.bases[block.arena], block.indices, base)
            scatter(self.bases[block.arena], block.indices, rows)
            rows = rows + (pending - base)
        scatter(self.records[block.arena], block.indices, rows)

    def begin(self, arena: int, slots: I32, rows: I64, values: F64) -> None:
        """Put rows with their initial values and optimizer state into slots."""
        records, width = self.records[arena], values.shape[1]
        records[slots, :width] = values
        records[slots, width:] = self.optimizer.initial_state
        if self.stamps is not None:
            self.stamps.begin(arena, slots, rows)

    def apply(self, arena: int, slots: I32, grads: Floats, step: int) -> None:
        """Update rows of this worker."""
        self.optimizer.update(self.records[arena], slots, grads, step + 1)
        if self.stamps is not None:
            self.stamps.update(arena, slots, step)
