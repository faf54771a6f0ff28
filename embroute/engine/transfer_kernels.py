"""Compiled loops that turn plans into transfer schedules: rows in blocks, touches in order.

Axes: N transfers, B blocks, O owners of schedules, T touches (of a locator: tables), L look-ups,
K shards, W workers, A arenas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import EXCLUSIVE, GRADIENT, LOCAL, NOTHING, NUM_KINDS, NUM_RECORDS
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index
from embroute.planner.kernels.transfers import Transfers

NUM_TIMES = 8  # of the first chunk; each further chunk adds as many
HEAD = 4 + NUM_KINDS + 1  # time, peer, arena, record, rows of each kind, rows in all


class RowLocator(NamedTuple):
    """Tables from which kernels compute where rows and slots lie."""

    first_row_T: I64  # one entry more than tables: the last is the number of all rows
    before_KT: I64  # rows of earlier tables of the same arena, by shard
    guess_G: I32  # the table of every 2**shift-th row
    shift: int
    first_slot_WA: I64


class Entries(NamedTuple):
    """All transfers of a step, one entry for each row that moves."""

    time_N: U8
    worker_N: I32
    shard_N: I32
    arena_N: U8
    record_N: U8
    kind_N: U8
    at_worker_N: I32  # slot within the worker's arena, or the number of a touch
    at_shard_N: I32  # number of the row within the shard's arena


def blank_entries(count: int) -> Entries:
    """Entries to be written."""
    time_N, arena_N, record_N, kind_N = (np.empty(count, np.uint8) for _ in range(4))
    worker_N, shard_N, at_worker_N, at_shard_N = (np.empty(count, np.int32) for _ in range(4))
    return Entries(time_N, worker_N, shard_N, arena_N, record_N, kind_N, at_worker_N, at_shard_N)


class BlockShape(NamedTuple):
    """How many owners of schedules, peers of an owner, and arenas there are."""

    owners: int
    peers: int
    arenas: int


@inlined
def _at_shard(locator: RowLocator, row: int) -> int:
    """Number of a row in its shard's arena; shard r mod K holds row r."""
    first_T, shards = locator.first_row_T, len(locator.before_KT)
    # The guess is the table of a row at or before this one, so it is never too high.
    table = locator.guess_G[row >> locator.shift]
    while first_T[table + 1] <= row:
        table += 1
    if shards == 1:
        return int(locator.before_KT[0, table] + row - first_T[table])
    # Earlier rows of the table in the same shard: every K-th row, counted back from this one.
    return int(locator.before_KT[row % shards, table] + (row - first_T[table]) // shards)


@kernel
def locate(row_N: I64, locator: RowLocator) -> I64:
    """Number of each row in its shard's arena."""
    out = np.empty(len(row_N), np.int64)
    for i in range(len(row_N)):
        out[i] = _at_shard(locator, row_N[i])
    return out


@kernel
def arena_index(row_N: I64, arena_N: U8, locator: RowLocator, first_KA: I64) -> I32:
    """Number of each row in its arena, if all shards' rows lie one after the other."""
    shards = len(locator.before_KT)
    out = np.empty(len(row_N), np.int32)
    for i in range(len(row_N)):
        shard = row_N[i] % shards if shards > 1 else 0
        out[i] = first_KA[shard, index(arena_N[i])] + _at_shard(locator, row_N[i])
    return out


@kernel
def append_entries(
    transfers: Transfers, time_N: U8, locator: RowLocator, out: Entries, start: int
) -> None:
    """Write a list of transfers into the entries from `start` on."""
    shards = len(locator.before_KT)
    for i in range(len(transfers.row)):
        at, row = index(start + i), transfers.row[i]
        out.time_N[at] = time_N[i]
        out.worker_N[at] = transfers.worker[i]
        out.shard_N[at] = row % shards if shards > 1 else 0
        out.arena_N[at] = transfers.arena[i]
        out.record_N[at] = transfers.record[i]
        out.kind_N[at] = transfers.kind[i]
        # The planner numbers all slots of a worker, the worker's store the slots of each arena.
        first = locator.first_slot_WA[index(transfers.worker[i]), index(transfers.arena[i])]
        out.at_worker_N[at] = transfers.slot[i] - first
        out.at_shard_N[at] = _at_shard(locator, row)


@kernel
def sort_into_blocks(
    owner_N: I32, peer_N: I32, index_N: I32, entries: Entries, shape: BlockShape
) -> tuple[I32, I32, I64, I64]:
    """A counting sort of entries into blocks by owner, time, peer, arena and record.

    Returns the head of each block, the slots or rows block by block, and the first block and the
    first row of each owner. The sort is stable, so both ends of a block list its rows in the same
    order.
    """
    owners, peers, arenas = shape.owners, shape.peers, shape.arenas
    times = entries.time_N.max() + 1 if len(entries.time_N) else 1
    # A box is a possible block. Its number is a mixed-radix number with the digits owner, time,
    # peer, arena, record, so that blocks in order of boxes are sorted by all five.
    per_owner = times * peers * arenas * NUM_RECORDS
    first = np.zeros(owners * per_owner + 1, np.int64)
    kinds = np.zeros((owners * per_owner, NUM_KINDS), np.int32)
    box_N = np.empty(len(owner_N), np.int32)
    for i in range(len(owner_N)):
        box = (owner_N[i] * times + entries.time_N[i]) * peers + peer_N[i]
        box = (box * arenas + entries.arena_N[i]) * NUM_RECORDS + entries.record_N[i]
        box_N[i] = box
        first[index(box + 1)] += 1
        kinds[index(box), index(entries.kind_N[i])] += 1
    # Counts become the places where boxes begin; boxes without entries are no blocks.
    blocks = 0
    for box in range(len(kinds)):
        blocks += first[box + 1] > 0
        first[box + 1] += first[box]
    head_BH = np.empty((blocks, HEAD), np.int32)
    first_block_O = np.zeros(owners + 1, np.int64)
    count = 0
    for box in range(len(kinds)):
        if first[box + 1] > first[box]:
            digits = box % per_owner  # without the owner
            head_BH[count, 3] = digits % NUM_RECORDS
            head_BH[count, 2] = digits // NUM_RECORDS % arenas
            head_BH[count, 1] = digits // (NUM_RECORDS * arenas) % peers
            head_BH[count, 0] = digits // (NUM_RECORDS * arenas * peers)
            head_BH[count, 4 : 4 + NUM_KINDS] = kinds[box]
            head_BH[count, HEAD - 1] = first[box + 1] - first[box]
            count += 1
        first_block_O[box // per_owner + 1] = count
    first_index_O = first[::per_owner].copy()
    out = np.empty(len(owner_N), np.int32)
    for i in range(len(owner_N)):
        box = index(box_N[i])
        out[index(first[box])] = index_N[i]
        first[box] += 1  # now where the next entry of the box goes
    return head_BH, out, first_block_O, first_index_O


@kernel
def number_touches(
    worker_T: I32, arena_T: U8, mode_T: npt.NDArray[np.integer], slot_T: I32, first_slot_WA: I64
) -> tuple[I64, I32, I32]:
    """Touches by worker and arena, first those that the worker itself updates: a counting sort.

    Returns where each box (worker, arena, updated elsewhere) begins, every touch's number within
    its worker and arena, and in the new order the slots of the arena.
    """
    workers, arenas = first_slot_WA.shape
    first = np.zeros(workers * arenas * 2 + 1, np.int64)
    box_T = np.empty(len(worker_T), np.int32)
    for t in range(len(worker_T)):
        elsewhere = mode_T[t] != EXCLUSIVE and mode_T[t] != LOCAL
        box_T[t] = (worker_T[t] * arenas + arena_T[t]) * 2 + elsewhere
        first[index(box_T[t] + 1)] += 1
    for box in range(len(first) - 1):
        first[box + 1] += first[box]
    filled, number_T = first.copy(), np.empty(len(worker_T), np.int32)
    slots = np.empty(len(worker_T), np.int32)
    for t in range(len(worker_T)):
        box = index(box_T[t])
        place = index(filled[box])
        filled[box] += 1
        # The even box of a pair is where its worker and arena begin.
        number_T[t] = place - first[box & ~1]
        slots[place] = slot_T[t] - first_slot_WA[worker_T[t], arena_T[t]]
    return first, number_T, slots


@kernel
def renumber(number_T: I32, touch_L: I32) -> I32:
    """Numbers of touches for look-ups; padding stays -1."""
    out = np.empty(len(touch_L), np.int32)
    for i in range(len(touch_L)):
        out[index(i)] = number_T[index(touch_L[index(i)])] if touch_L[index(i)] >= 0 else -1
    return out


@kernel
def name_gradients(push_T: U8, number_T: I32, out_N: I32) -> None:
    """Write numbers of touches in place of slots: a gradient lies where its touch does.

    Pushes of touches are the last entries, in the order of touches. So both lists are read
    backwards.
    """
    i = len(out_N)
    for t in range(len(push_T) - 1, -1, -1):
        if push_T[index(t)] != NOTHING:
            i -= 1
            if push_T[index(t)] == GRADIENT:
                out_N[index(i)] = number_T[index(t)]


@kernel
def in_ranges(numbers: I32, counts: I64, limits: I64, least: int) -> bool:
    """Whether numbers, in runs of these lengths, are `least` or more and below the run's limit."""
    first = 0
    for run in range(len(counts)):
        low, high = np.int32(least), np.int32(least)
        for number in numbers[first : first + counts[run]]:  # no branch: it takes vectors
            low, high = min(low, number), max(high, number)
        if counts[run] > 0 and (low < least or high >= limits[run]):
            return False
        first += counts[run]
    return True


@kernel
def blocks_fit(heads: I32, indices: I32, num_times: int, num_peers: int, limit_2A: I64) -> bool:
    """Whether blocks of rows name nothing that their reader does not have.

    `limit_2A` are the rows of each arena, and its touches, at which gradients lie.
    """
    if len(heads) % HEAD:
        return False
    first = 0
    for b in range(0, len(heads), HEAD):
        time, peer, arena, record = heads[b], heads[b + 1], heads[b + 2], heads[b + 3]
        if min(time, peer, arena, record) < 0 or time >= num_times or peer >= num_peers:
            return False
        if arena >= limit_2A.shape[1] or record >= NUM_RECORDS:
            return False
        count, total = int(heads[b + HEAD - 1]), 0
        for kind in range(b + 4, b + HEAD - 1):
            if heads[kind] < 0:
                return False
            total += heads[kind]
        if total != count or first + count > len(indices):
            return False
        low, high = np.int32(0), np.int32(-1)
        for number in indices[first : first + count]:
            low, high = min(low, number), max(high, number)
        if low < 0 or high >= limit_2A[1 if record == GRADIENT else 0, arena]:
            return False
        first += count
    return first == len(indices)
