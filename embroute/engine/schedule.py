"""A plan as orders: for every worker and shard, which rows it sends and receives, when and where.

Both ends derive the same messages from the same plan, so that no message needs a request. Axes:
T touches of all workers, N transfers, A arenas, W workers, K shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from embroute.engine.kernels.touch_order import name_gradients, number_touches
from embroute.engine.kernels.transfer_blocks import (
    HEAD,
    NUM_TIMES,
    Entries,
    append_entries,
    blank_entries,
    sort_into_blocks,
)
from embroute.engine.kernels.transfer_blocks import BlockList as Blocks
from embroute.engine.sharding import RowSharding
from embroute.kernels.array_types import I32, I64, U8, Array
from embroute.kernels.codes import EARLY, FRESH, LATE, LAZY, MAX_CHUNKS, MISS_PULL, ROW, VALUE_STATE
from embroute.kernels.memory import GOLDEN
from embroute.planner.kernels.transfers import Transfers
from embroute.planner.plan import Plan
from embroute.planner.state import State, held

# When a block moves. The early phase of step t runs beside the compute of step t - 1, the urgent
# one between their computes. Lazy blocks join the early phase of a later step.
EARLY_PUSH = 0
EARLY_LEAVE = 1  # an eviction that is staged in the early phase, before its slot is taken over
URGENT_PUSH = 2
URGENT_LEAVE = 3  # the same for a slot that the step before still trains
EARLY_PULL = 4
LATE_PULL = 5
URGENT_UPDATE = 6
LAZY_UPDATE = 7
IN_PARTS = (URGENT_PUSH, LATE_PULL, URGENT_UPDATE)


class TransferBlock(NamedTuple):
    """Rows of one arena that travel together between a worker and a shard."""

    time: int
    chunk: int  # of MOST_PARTS, the first that it holds
    peer: int  # the shard, in a worker's orders; the worker, in a shard's
    arena: int
    record: int
    kinds: tuple[int, ...]  # rows of each kind of transfer
    indices: I32  # at a worker: slots of the arena, or touches for gradients; at a shard: rows


@dataclass(frozen=True)
class RankTransfers:
    """One rank's blocks of a step."""

    blocks: tuple[TransferBlock, ...]

    def at(self, *times: int) -> list[TransferBlock]:
        """The blocks of some times, in order."""
        return [block for block in self.blocks if block.time in times]

    @staticmethod
    def read(heads: Array, where: Array) -> RankTransfers:
        """The orders that a `Listing` holds."""
        blocks, at = [], 0
        sharding = np.asarray(where, np.int32)
        for head in heads.reshape(-1, HEAD).tolist():
            time, peer, arena, record, *kinds, count = head
            part, time = divmod(time, NUM_TIMES)
            rows = sharding[at : at + count]
            blocks.append(TransferBlock(time, part, peer, arena, record, tuple(kinds), rows))
            at += count
        return RankTransfers(tuple(blocks))


class PackedTransfers(NamedTuple):
    """Orders as they are sent."""

    heads: I32
    indices: I32


# When the transfers of a list move, by their phase: early, urgent, late, lazy.
_PUSHES = np.array([EARLY_PUSH, URGENT_PUSH, URGENT_PUSH, URGENT_PUSH], np.uint8)
_PULLS = np.array([EARLY_PULL, EARLY_PULL, LATE_PULL, EARLY_PULL], np.uint8)
_UPDATES = np.array([LAZY_UPDATE, URGENT_UPDATE, LAZY_UPDATE, LAZY_UPDATE], np.uint8)


def _times(plan: Plan) -> list[U8]:
    """Time of each transfer: returns, evictions, pulls, updates."""
    evictions = np.take(_PUSHES, plan.evictions.phase)
    leaving = plan.evictions.phase == LAZY
    if leaving.any():
        late = plan.pulls.phase == LATE
        shift = np.int64(1) << 32
        busy = plan.pulls.worker[late] * shift + plan.pulls.slot[late]
        mine = plan.evictions.worker * shift + plan.evictions.slot
        times = np.where(np.isin(mine, busy), np.uint8(URGENT_LEAVE), np.uint8(EARLY_LEAVE))
        evictions = np.where(leaving, times, evictions)
    return [
        np.take(_PUSHES, plan.returns.phase),
        evictions,
        np.take(_PULLS, plan.pulls.phase),
        np.take(_UPDATES, plan.updates.phase),
    ]


def _parted(rows: I64, time_N: U8, parts: int) -> U8:
    """Times of transfers with the part in which each moves, the same wherever its row is named.

    Halves of few parts are those of twice as many: plans may differ in how many they have.
    """
    fine = (rows.astype(np.uint64) * GOLDEN) >> np.uint64(64 - MAX_CHUNKS.bit_length() + 1)
    part_N = fine.astype(np.int64) // (MAX_CHUNKS // parts) * (MAX_CHUNKS // parts)
    moves = np.isin(time_N, IN_PARTS)
    return np.where(moves, time_N + NUM_TIMES * part_N, time_N).astype(np.uint8)


def transfer_entries(
    lists: Sequence[Transfers], times: Sequence[U8], sharding: RowSharding
) -> Entries:
    """Lists of transfers as entries."""
    entries, start = blank_entries(sum(len(part.row) for part in lists)), 0
    for part, time_N in zip(lists, times, strict=True):
        append_entries(part, time_N, sharding.locator, entries, start)
        start += len(part.row)
    return entries


def _listings(blocks: Blocks) -> list[PackedTransfers]:
    """Each owner's orders."""
    heads, rows = blocks.first_block_O.tolist(), blocks.first_where_O.tolist()
    return [
        PackedTransfers(blocks.head_BH[heads[i] : heads[i + 1]].ravel(), blocks.where_N[first:last])
        for i, (first, last) in enumerate(pairwise(rows))
    ]


@dataclass(frozen=True)
class TransferSchedule:
    """The orders of one step, or of a drain, for every rank."""

    workers: list[PackedTransfers]
    shards: list[PackedTransfers]


def build_schedule(entries: Entries, sharding: RowSharding) -> TransferSchedule:
    """Orders for all ranks."""
    workers, shards, arenas = sharding.num_workers, sharding.num_shards, sharding.num_arenas
    worker_N, shard_N = entries.worker_N, entries.shard_N
    at_workers = sort_into_blocks(
        worker_N, shard_N, entries.at_worker_N, entries, (workers, shards, arenas)
    )
    at_shards = sort_into_blocks(
        shard_N, worker_N, entries.at_shard_N, entries, (shards, workers, arenas)
    )
    return TransferSchedule(_listings(at_workers), _listings(at_shards))


def pull_schedule(transfers: Transfers, sharding: RowSharding) -> TransferSchedule:
    """Orders that bring rows to workers outside of a step."""
    times = np.full(len(transfers.row), EARLY_PULL, np.uint8)
    return build_schedule(transfer_entries((transfers,), (times,), sharding), sharding)


@dataclass(frozen=True)
class TouchOrder:
    """Touches renumbered within their worker and arena; those updated on the spot come first."""

    number_T: I32
    slot_WA: list[list[I32]]  # slots of the arena, in the new order
    local_WA: I64  # how many of them the worker updates itself


def order_touches(plan: Plan, sharding: RowSharding) -> TouchOrder:
    """Number the touches as the workers will hold their gradients."""
    touches, arenas = plan.touches, sharding.num_arenas
    slot_T, first_WA = plan.placement.slot_T, sharding.first_slot_WA
    if plan.shared_memory:
        slot_T = np.take(
            sharding.arena_indices(plan.rows.rows_U, plan.rows.arena_U), touches.unique_T
        )
        first_WA = np.zeros_like(first_WA)
    first, number_T, slots = number_touches(
        touches.worker_T,
        plan.rows.arena_U[touches.unique_T],
        plan.decision.mode_T,
        slot_T,
        first_WA,
    )
    bounds = first[::2]
    slot_WA = [
        [slots[bounds[w * arenas + a] : bounds[w * arenas + a + 1]] for a in range(arenas)]
        for w in range(sharding.num_workers)
    ]
    local = (first[1::2] - first[:-1:2]).reshape(sharding.num_workers, arenas)
    return TouchOrder(number_T, slot_WA, local)


def step_schedule(plan: Plan, number_T: I32, sharding: RowSharding) -> TransferSchedule:
    """Orders of a step. Gradients are named by touch, everything else by slot and row."""
    lists = (plan.returns, plan.evictions, plan.pulls, plan.updates)
    times = _times(plan)
    if plan.chunks > 1:
        moved = zip(lists, times, strict=True)
        times = [_parted(part.row, time_N, plan.chunks) for part, time_N in moved]
    entries = transfer_entries(lists, times, sharding)
    name_gradients(plan.decision.push_T, number_T, entries.at_worker_N)
    return build_schedule(entries, sharding)


def drain_schedule(transfers: Transfers, sharding: RowSharding) -> TransferSchedule:
    """Orders that bring every update home."""
    times = np.full(len(transfers.row), URGENT_PUSH, np.uint8)
    return build_schedule(transfer_entries((transfers,), (times,), sharding), sharding)


REFILL_ROWS = 1 << 15  # of a worker at a time


def refill_schedules(state: State, sharding: RowSharding) -> list[TransferSchedule]:
    """Pulls that put every up-to-date copy back into its slot, some rows at a time."""
    scripts = []
    for worker in range(state.setup.num_workers):
        slots, cells = held(state, worker)
        fresh = slots[(cells & FRESH) != 0]
        for part in np.array_split(fresh, -(-len(fresh) // REFILL_ROWS) or 1):
            if len(part):
                scripts.append(_refill(state, sharding, worker, part.astype(np.int64)))
    return scripts


def _refill(state: State, sharding: RowSharding, worker: int, slots: I64) -> TransferSchedule:
    rows = state.caches.slot_WCF[worker, slots, ROW].astype(np.int64)
    count = len(rows)
    transfers = Transfers(
        np.full(count, worker, np.int32),
        rows,
        slots.astype(np.int32),
        state.setup.arena_of(rows),
        np.full(count, MISS_PULL, np.uint8),
        np.full(count, VALUE_STATE, np.uint8),
        np.full(count, EARLY, np.uint8),
    )
    return pull_schedule(transfers, sharding)
