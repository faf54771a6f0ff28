"""A plan as orders: for every worker and shard, which rows it sends and receives, when and where.

Both ends derive the same messages from the same plan, so that no message needs a request. Axes:
T touches of all workers, N transfers, A arenas, W workers, K shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import (
    EARLY,
    GRADIENT,
    LATE,
    LAZY,
    NOTHING,
    NUM_KINDS,
    NUM_RECORDS,
    URGENT,
)
from embroute.kernels.places import number_touches
from embroute.kernels.touches import group
from embroute.kernels.transfers import Transfers
from embroute.policy.plan import Plan
from embroute.runtime.places import Places
from embroute.runtime.wire import Array

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Whole = npt.NDArray[np.integer]

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
NUM_TIMES = 8


class Block(NamedTuple):
    """Rows of one arena that travel together between a worker and a shard."""

    time: int
    peer: int  # the shard, in a worker's orders; the worker, in a shard's
    arena: int
    record: int
    kinds: tuple[int, ...]  # rows of each kind of transfer
    where: I32  # at a worker: slots of the arena, or touches for gradients; at a shard: rows


_HEAD = 4 + NUM_KINDS + 1


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
        for head in heads.reshape(-1, _HEAD).tolist():
            time, peer, arena, record, *kinds, count = head
            rows = places[at : at + count]
            blocks.append(Block(time, peer, arena, record, tuple(kinds), rows))
            at += count
        return Orders(tuple(blocks))


class Listing(NamedTuple):
    """Orders as they are sent."""

    heads: I32
    where: I32


class Entries(NamedTuple):
    """All transfers of a step, one entry each."""

    time: Whole
    worker: Whole
    shard: Whole
    arena: Whole
    record: Whole
    kind: Whole
    at_worker: I32
    at_shard: I32


def _times(plan: Plan) -> list[I64]:
    """Time of each transfer: returns, evictions, pulls, updates."""
    home = [
        np.where(part.phase == EARLY, EARLY_PUSH, URGENT_PUSH).astype(np.int64)
        for part in (plan.returns, plan.evictions)
    ]
    leaving = plan.evictions.phase == LAZY
    if leaving.any():
        late = plan.pulls.phase == LATE
        shift = np.int64(1) << 32
        busy = plan.pulls.worker[late] * shift + plan.pulls.slot[late]
        mine = plan.evictions.worker * shift + plan.evictions.slot
        times = np.where(np.isin(mine, busy), URGENT_LEAVE, EARLY_LEAVE)
        home[1] = np.where(leaving, times, home[1])
    pulls = np.where(plan.pulls.phase == LATE, LATE_PULL, EARLY_PULL).astype(np.int64)
    updates = np.where(plan.updates.phase == URGENT, URGENT_UPDATE, LAZY_UPDATE).astype(np.int64)
    return [*home, pulls, updates]


def entries_of(lists: Sequence[Transfers], times: Sequence[I64], places: Places) -> Entries:
    """Lists of transfers as entries."""
    worker, row, slot, arena, kind, record = (
        np.concatenate([getattr(part, name) for part in lists])
        for name in ("worker", "row", "slot", "arena", "kind", "record")
    )
    at_worker = slot - places.first_slot_WA[worker, arena]
    return Entries(
        np.concatenate(times),
        worker,
        (row % places.num_shards).astype(np.int32),
        arena,
        record,
        kind,
        at_worker.astype(np.int32),
        places.local(row).astype(np.int32),
    )


def _listings(
    entries: Entries, owner: Whole, peer: Whole, index: I32, num_owners: int
) -> list[Listing]:
    """Each owner's orders: blocks by time, peer, arena and record."""
    peers, arenas = (int(column.max(initial=0)) + 1 for column in (peer, entries.arena))
    shape = (num_owners, NUM_TIMES, peers, arenas, NUM_RECORDS)
    box = owner.astype(np.int32)
    for size, column in zip(
        shape[1:], (entries.time, peer, entries.arena, entries.record), strict=True
    ):
        box = box * size + column.astype(np.int32, copy=False)
    num_boxes = prod(shape)
    first, order = group(box, num_boxes)
    full = np.flatnonzero(np.diff(first))
    kinds = np.bincount(box * NUM_KINDS + entries.kind, minlength=num_boxes * NUM_KINDS)
    heads = np.empty((len(full), _HEAD), np.int32)
    heads[:, :4] = np.stack(np.unravel_index(full, shape)[1:], 1)
    heads[:, 4:-1] = kinds.reshape(-1, NUM_KINDS)[full]
    heads[:, -1] = heads[:, 4:-1].sum(1)
    index = index[order]
    owners = np.arange(num_owners + 1) * (num_boxes // num_owners)
    blocks, bounds = np.searchsorted(full, owners), first[owners]
    return [
        Listing(heads[blocks[i] : blocks[i + 1]].ravel(), index[bounds[i] : bounds[i + 1]])
        for i in range(num_owners)
    ]


@dataclass(frozen=True)
class Script:
    """The orders of one step, or of a drain, for every rank."""

    workers: list[Listing]
    shards: list[Listing]


def write(entries: Entries, places: Places) -> Script:
    """Orders for all ranks."""
    workers = _listings(
        entries, entries.worker, entries.shard, entries.at_worker, places.num_workers
    )
    shards = _listings(entries, entries.shard, entries.worker, entries.at_shard, places.num_shards)
    return Script(workers, shards)


@dataclass(frozen=True)
class TouchOrder:
    """Touches renumbered within their worker and arena; those updated on the spot come first."""

    number_T: I32
    slot_WA: list[list[I32]]  # slots of the arena, in the new order
    local_WA: I64  # how many of them the worker updates itself


def order_touches(plan: Plan, places: Places) -> TouchOrder:
    """Number the touches as the workers will hold their gradients."""
    touches, arenas = plan.touches, places.num_arenas
    first, number_T, slots = number_touches(
        touches.worker_T,
        plan.rows.arena_U[touches.unique_T],
        plan.decision.mode_T,
        plan.placement.slot_T,
        places.first_slot_WA,
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
    entries = entries_of(lists, _times(plan), places)
    pushed = np.flatnonzero(plan.decision.push_T != NOTHING)
    gradient = plan.updates.record == GRADIENT
    tail = entries.at_worker[len(entries.time) - len(pushed) :]
    tail[gradient] = number_T[pushed[gradient]]
    return write(entries, places)


def drain_script(transfers: Transfers, places: Places) -> Script:
    """Orders that bring every update home."""
    times = [np.full(len(transfers.row), URGENT_PUSH, np.int64)]
    return write(entries_of((transfers,), times, places), places)
