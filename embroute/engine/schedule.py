"""A plan as transfer schedules: which rows each worker and shard sends and receives, and when.

Both ends derive the same messages from the same plan, so no message needs a request. Axes:
T touches of all workers, N transfers, A arenas, W workers, K shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from embroute.engine import transfer_kernels as kernels
from embroute.engine.sharding import RowSharding
from embroute.engine.transfer_kernels import NUM_TIMES, BlockShape, Entries
from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import (
    EARLY,
    FRESH,
    GRADIENT,
    LATE,
    LAZY,
    MAX_CHUNKS,
    MISS_PULL,
    NUM_RECORDS,
    ROW,
    VALUE_STATE,
)
from embroute.kernels.memory import GOLDEN
from embroute.planner.kernels.transfers import Transfers
from embroute.planner.plan import Plan
from embroute.planner.state import State, held_slots


class TransferTime(IntEnum):
    """When a block moves.

    The early phase of step t runs beside the compute of step t - 1, the urgent phase between their
    computes. Lazy blocks join the early phase of a later step.
    """

    EARLY_PUSH = 0
    EARLY_LEAVE = 1  # an eviction, copied out in the early phase, before a pull takes its slot
    URGENT_PUSH = 2
    URGENT_LEAVE = 3  # an eviction, copied out after the step before has trained the row
    EARLY_PULL = 4
    LATE_PULL = 5
    URGENT_UPDATE = 6
    LAZY_UPDATE = 7


CHUNK_COUNTS = tuple(1 << k for k in range(MAX_CHUNKS.bit_length()))
CHUNKED = (TransferTime.URGENT_PUSH, TransferTime.LATE_PULL, TransferTime.URGENT_UPDATE)


OUTSIDE = -1  # the step of blocks that no plan orders: evaluations, refills


class TransferBlock(NamedTuple):
    """Rows of one arena that travel together between a worker and a shard."""

    step: int  # whose plan orders them, and which makes their gradients; or OUTSIDE
    time: int
    chunk: int  # of MAX_CHUNKS, the first that it holds
    peer: int  # in a worker's schedule the shard, in a shard's schedule the worker
    arena: int
    record: int
    kinds: tuple[int, ...]  # rows of each kind of transfer
    indices: I32  # at a worker: slots of the arena, or touches for gradients; at a shard: rows


BlocksByTime = list[list[TransferBlock]]  # a list for each `TransferTime`


class RankTransfers(NamedTuple):
    """One rank's blocks of a step as they are sent: their heads, and the indices of all blocks."""

    heads: I32
    indices: I32

    def by_time(self, step: int) -> BlocksByTime:
        """The blocks of each time, in order; `step` orders them."""
        blocks: BlocksByTime = [[] for _ in TransferTime]
        first = 0
        for head in self.heads.reshape(-1, kernels.HEAD).tolist():
            time_and_chunk, peer, arena, record, *kinds, count = head
            chunk, time = divmod(time_and_chunk, NUM_TIMES)
            rows = self.indices[first : first + count]
            block = TransferBlock(step, time, chunk, peer, arena, record, tuple(kinds), rows)
            blocks[time].append(block)
            first += count
        return blocks

    def fault(self, num_peers: int, num_rows_A: Sequence[int], touches_A: Sequence[int]) -> str:
        """What is wrong with the transfers at a rank with so many rows and touches; empty: nothing.

        `num_rows_A` are the slots or the rows of each arena; only gradients lie at touches.
        """
        limit_2A, times = np.array([num_rows_A, touches_A], np.int64), NUM_TIMES * MAX_CHUNKS
        if kernels.blocks_fit(self.heads, self.indices, times, num_peers, limit_2A):
            return ""
        heads = self.heads.astype(np.int64)
        if len(heads) % kernels.HEAD or (heads < 0).any():
            return f"{len(heads)} numbers are no heads of blocks"
        time, peer, arena, record, *kinds, count = heads.reshape(-1, kernels.HEAD).T
        bounds = ((time, times), (peer, num_peers), (arena, len(num_rows_A)))
        for digits, bound in (*bounds, (record, NUM_RECORDS)):
            if (digits >= bound).any():
                return f"a block has a time, peer, arena or record of {digits.max()}"
        if (np.sum(kinds, 0) != count).any() or count.sum() != len(self.indices):
            return f"blocks of {count.sum()} rows have {len(self.indices)} indices"
        limits = limit_2A[(record == GRADIENT).astype(int), arena]
        outside = self.indices.view(np.uint32) >= np.repeat(limits, count)  # or below 0
        return f"it names row {self.indices[outside][0]} of an arena"


RankSchedules = tuple[list[RankTransfers], list[RankTransfers]]  # of all shards, of all workers


def _by_phase(*times: TransferTime) -> U8:
    """Times to look up by the phase of a transfer: early, urgent, late, lazy."""
    return np.array(times, np.uint8)


_AT = TransferTime
_PUSHES = _by_phase(_AT.EARLY_PUSH, _AT.URGENT_PUSH, _AT.URGENT_PUSH, _AT.URGENT_PUSH)
_PULLS = _by_phase(_AT.EARLY_PULL, _AT.EARLY_PULL, _AT.LATE_PULL, _AT.EARLY_PULL)
_UPDATES = _by_phase(_AT.LAZY_UPDATE, _AT.URGENT_UPDATE, _AT.LAZY_UPDATE, _AT.LAZY_UPDATE)


def _times(plan: Plan) -> list[U8]:
    """Time of each transfer: returns, evictions, pulls, updates."""
    evictions = np.take(_PUSHES, plan.evictions.phase)
    lazy = plan.evictions.phase == LAZY
    if lazy.any():
        # A lazy eviction is copied out before a pull overwrites its slot: in the urgent phase if
        # that pull is late, else in the early phase. Worker and slot make one 64-bit key.
        late = plan.pulls.phase == LATE
        shift = np.int64(1) << 32
        late_keys = plan.pulls.worker[late] * shift + plan.pulls.slot[late]
        keys = plan.evictions.worker * shift + plan.evictions.slot
        leave = np.where(np.isin(keys, late_keys), _AT.URGENT_LEAVE, _AT.EARLY_LEAVE)
        evictions = np.where(lazy, leave.astype(np.uint8), evictions)
    return [
        np.take(_PUSHES, plan.returns.phase),
        evictions,
        np.take(_PULLS, plan.pulls.phase),
        np.take(_UPDATES, plan.updates.phase),
    ]


def _with_chunks(rows: I64, time_N: U8, chunks: int) -> U8:
    """Times of transfers, each with the chunk in which its row moves.

    A hash gives every row a number below MAX_CHUNKS. With half as many chunks, each chunk holds the
    rows of two numbers. So the chunks of two plans nest, even if the plans have unlike many.
    """
    # The hash's top log2(MAX_CHUNKS) bits; MAX_CHUNKS is a power of two.
    number_N = (rows.astype(np.uint64) * GOLDEN) >> np.uint64(64 - MAX_CHUNKS.bit_length() + 1)
    size = MAX_CHUNKS // chunks
    chunk_N = number_N.astype(np.int64) // size * size  # the first number of the chunk
    return np.where(np.isin(time_N, CHUNKED), time_N + NUM_TIMES * chunk_N, time_N).astype(np.uint8)


def _transfer_entries(
    lists: Sequence[Transfers], times: Sequence[U8], sharding: RowSharding
) -> Entries:
    """Lists of transfers as entries."""
    entries, start = kernels.blank_entries(sum(len(transfers.row) for transfers in lists)), 0
    for transfers, time_N in zip(lists, times, strict=True):
        kernels.append_entries(transfers, time_N, sharding.locator, entries, start)
        start += len(transfers.row)
    return entries


def _of_each(
    heads_BH: I32, index_N: I32, first_block_O: I64, first_index_O: I64
) -> list[RankTransfers]:
    """Each owner's transfers."""
    bounds = zip(pairwise(first_block_O.tolist()), pairwise(first_index_O.tolist()), strict=True)
    return [RankTransfers(heads_BH[a:b].ravel(), index_N[c:d]) for (a, b), (c, d) in bounds]


def _build_schedule(entries: Entries, sharding: RowSharding) -> RankSchedules:
    """The transfers of all shards and of all workers: entries sorted by each."""
    workers, shards, arenas = sharding.num_workers, sharding.num_shards, sharding.num_arenas
    worker_N, shard_N = entries.worker_N, entries.shard_N
    at_workers = kernels.sort_into_blocks(
        worker_N, shard_N, entries.at_worker_N, entries, BlockShape(workers, shards, arenas)
    )
    at_shards = kernels.sort_into_blocks(
        shard_N, worker_N, entries.at_shard_N, entries, BlockShape(shards, workers, arenas)
    )
    return _of_each(*at_shards), _of_each(*at_workers)


def schedule_at(time: TransferTime, transfers: Transfers, sharding: RowSharding) -> RankSchedules:
    """Transfers that all move at one time: a drain, or pulls outside of a step."""
    times = np.full(len(transfers.row), time, np.uint8)
    return _build_schedule(_transfer_entries([transfers], [times], sharding), sharding)


@dataclass(frozen=True)
class TouchOrder:
    """Touches renumbered within their worker and arena; those the worker updates come first."""

    number_T: I32
    slot_WA: list[list[I32]]  # slots of the arena, in the new order
    local_WA: I64  # how many touches the worker updates itself


def order_touches(plan: Plan, sharding: RowSharding) -> TouchOrder:
    """Number the touches as the workers will hold their gradients."""
    touches, arenas = plan.touches, sharding.num_arenas
    slot_T, first_WA = plan.placement.slot_T, sharding.first_slot_WA
    if plan.shared_memory:
        # Rows are trained where they lie: a slot is the row's place in the tables of all shards.
        slot_U = sharding.arena_indices(plan.rows.rows_U, plan.rows.arena_U)
        slot_T, first_WA = np.take(slot_U, touches.unique_T), np.zeros_like(first_WA)
    first, number_T, slots = kernels.number_touches(
        touches.worker_T,
        plan.rows.arena_U[touches.unique_T],
        plan.decision.mode_T,
        slot_T,
        first_WA,
    )
    # Boxes alternate: local touches of a worker and arena at even, the others at odd places.
    bounds = first[::2]
    slot_WA = [
        [slots[bounds[w * arenas + a] : bounds[w * arenas + a + 1]] for a in range(arenas)]
        for w in range(sharding.num_workers)
    ]
    local = (first[1::2] - first[:-1:2]).reshape(sharding.num_workers, arenas)
    return TouchOrder(number_T, slot_WA, local)


def step_schedule(plan: Plan, number_T: I32, sharding: RowSharding) -> RankSchedules:
    """The schedule of a step. Gradients are named by touch, all other records by slot and row."""
    lists = (plan.returns, plan.evictions, plan.pulls, plan.updates)
    times = _times(plan)
    if plan.chunks > 1:
        pairs = zip(lists, times, strict=True)
        times = [_with_chunks(moved.row, time_N, plan.chunks) for moved, time_N in pairs]
    entries = _transfer_entries(lists, times, sharding)
    kernels.name_gradients(plan.decision.push_T, number_T, entries.at_worker_N)
    return _build_schedule(entries, sharding)


REFILL_ROWS = 1 << 15  # of a worker in one message


def refill_schedules(state: State, sharding: RowSharding) -> list[RankSchedules]:
    """Pulls that put every fresh copy back into its slot, some rows at a time."""
    schedules = []
    for worker in range(state.setup.num_workers):
        slots, cells = held_slots(state, worker)
        fresh = slots[(cells & FRESH) != 0]
        for some in np.array_split(fresh, -(-len(fresh) // REFILL_ROWS) or 1):
            if len(some):
                schedules.append(_refill(state, sharding, worker, some.astype(np.int64)))
    return schedules


def _refill(state: State, sharding: RowSharding, worker: int, slots: I64) -> RankSchedules:
    rows = state.caches.slot_WCF[worker, slots, ROW].astype(np.int64)
    count = len(rows)
    transfers = Transfers(
        worker=np.full(count, worker, np.int32),
        row=rows,
        slot=slots.astype(np.int32),
        arena=state.setup.arena_of(rows),
        kind=np.full(count, MISS_PULL, np.uint8),
        record=np.full(count, VALUE_STATE, np.uint8),
        phase=np.full(count, EARLY, np.uint8),
    )
    return schedule_at(TransferTime.EARLY_PULL, transfers, sharding)
