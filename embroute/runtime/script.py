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
import numpy.typing as npt

from embroute.kernels.codes import LATE, LAZY, MOST_PARTS
from embroute.kernels.memory import GOLDEN
from embroute.kernels.orders import HEAD, NUM_TIMES, Entries, blank_entries, enter, list_orders
from embroute.kernels.orders import Orders as Blocks
from embroute.kernels.places import name_gradients, number_touches
from embroute.kernels.transfers import Transfers
from embroute.policy.plan import Plan
from embroute.runtime.places import Places
from embroute.runtime.wire import Array

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

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


class Block(NamedTuple):
    """Rows of one arena that travel together between a worker and a shard."""

    time: int
    part: int  # of MOST_PARTS, the first that it holds
    peer: int  # the shard, in a worker's orders; the worker, in a shard's
    arena: int
    record: int
    kinds: tuple[int, ...]  # rows of each kind of transfer
    where: I32  # at a worker: slots of the arena, or touches for gradients; at a shard: rows


@dataclass(frozen=True)
class Orders:
    """One rank's blocks of a step."""

    blocks: tuple[Block, ...]

    def at(self, *times: int) -> list[Block]:
        """The blocks of some times, in order."""
        return [block for block in self.blocks if block.time in times]

    @staticmethod
    def read(heads: Array, where: Array) -> Orders:
        """The orders that a `Listing` holds."""
        blocks, at = [], 0
        places = np.asarray(where, np.int32)
        for head in heads.reshape(-1, HEAD).tolist():
            time, peer, arena, record, *kinds, count = head
            part, time = divmod(time, NUM_TIMES)
            rows = places[at : at + count]
            blocks.append(Block(time, part, peer, arena, record, tuple(kinds), rows))
            at += count
        return Orders(tuple(blocks))


class Listing(NamedTuple):
    """Orders as they are sent."""

    heads: I32
    where: I32


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
    fine = (rows.astype(np.uint64) * GOLDEN) >> np.uint64(64 - MOST_PARTS.bit_length() + 1)
    part_N = fine.astype(np.int64) // (MOST_PARTS // parts) * (MOST_PARTS // parts)
    moves = np.isin(time_N, IN_PARTS)
    return np.where(moves, time_N + NUM_TIMES * part_N, time_N).astype(np.uint8)


def entries_of(lists: Sequence[Transfers], times: Sequence[U8], places: Places) -> Entries:
    """Lists of transfers as entries."""
    entries, start = blank_entries(sum(len(part.row) for part in lists)), 0
    for part, time_N in zip(lists, times, strict=True):
        enter(part, time_N, places.spots, entries, start)
        start += len(part.row)
    return entries


def _listings(blocks: Blocks) -> list[Listing]:
    """Each owner's orders."""
    heads, rows = blocks.first_block_O.tolist(), blocks.first_where_O.tolist()
    return [
        Listing(blocks.head_BH[heads[i] : heads[i + 1]].ravel(), blocks.where_N[first:last])
        for i, (first, last) in enumerate(pairwise(rows))
    ]


@dataclass(frozen=True)
class Script:
    """The orders of one step, or of a drain, for every rank."""

    workers: list[Listing]
    shards: list[Listing]


def write(entries: Entries, places: Places) -> Script:
    """Orders for all ranks."""
    workers, shards, arenas = places.num_workers, places.num_shards, places.num_arenas
    worker_N, shard_N = entries.worker_N, entries.shard_N
    at_workers = list_orders(
        worker_N, shard_N, entries.at_worker_N, entries, (workers, shards, arenas)
    )
    at_shards = list_orders(
        shard_N, worker_N, entries.at_shard_N, entries, (shards, workers, arenas)
    )
    return Script(_listings(at_workers), _listings(at_shards))


def pull_script(transfers: Transfers, places: Places) -> Script:
    """Orders that bring rows to workers outside of a step."""
    times = np.full(len(transfers.row), EARLY_PULL, np.uint8)
    return write(entries_of((transfers,), (times,), places), places)


@dataclass(frozen=True)
class TouchOrder:
    """Touches renumbered within their worker and arena; those updated on the spot come first."""

    number_T: I32
    slot_WA: list[list[I32]]  # slots of the arena, in the new order
    local_WA: I64  # how many of them the worker updates itself


def order_touches(plan: Plan, places: Places) -> TouchOrder:
    """Number the touches as the workers will hold their gradients."""
    touches, arenas = plan.touches, places.num_arenas
    slot_T, first_WA = plan.placement.slot_T, places.first_slot_WA
    if plan.in_place:
        slot_T = np.take(places.homes(plan.rows.rows_U, plan.rows.arena_U), touches.unique_T)
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
        for w in range(places.num_workers)
    ]
    local = (first[1::2] - first[:-1:2]).reshape(places.num_workers, arenas)
    return TouchOrder(number_T, slot_WA, local)


def step_script(plan: Plan, number_T: I32, places: Places) -> Script:
    """Orders of a step. Gradients are named by touch, everything else by slot and row."""
    lists = (plan.returns, plan.evictions, plan.pulls, plan.updates)
    times = _times(plan)
    if plan.parts > 1:
        moved = zip(lists, times, strict=True)
        times = [_parted(part.row, time_N, plan.parts) for part, time_N in moved]
    entries = entries_of(lists, times, places)
    name_gradients(plan.decision.push_T, number_T, entries.at_worker_N)
    return write(entries, places)


def drain_script(transfers: Transfers, places: Places) -> Script:
    """Orders that bring every update home."""
    times = np.full(len(transfers.row), URGENT_PUSH, np.uint8)
    return write(entries_of((transfers,), (times,), places), places)
