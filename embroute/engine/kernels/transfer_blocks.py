"""Transfers as orders: every rank's rows of a step in blocks, by time, peer, arena and record.

Axes: N transfers, B blocks, O owners of orders, T tables, K shards, W workers, A arenas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import NUM_KINDS, NUM_RECORDS
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index
from embroute.planner.kernels.transfers import Transfers

NUM_TIMES = 8  # times more for every part but the first
HEAD = 4 + NUM_KINDS + 1  # time, peer, arena, record, rows of each kind, rows in all


class RowLocator(NamedTuple):
    """Where rows and slots lie."""

    first_row_T: I64  # ends with the number of all rows
    before_KT: I64  # rows of earlier tables of the same arena, by shard
    guess_G: I32  # the table of every 2**shift-th row
    shift: int
    first_slot_WA: I64


class Entries(NamedTuple):
    """All transfers of a step."""

    time_N: U8
    worker_N: I32
    shard_N: I32
    arena_N: U8
    record_N: U8
    kind_N: U8
    at_worker_N: I32
    at_shard_N: I32


def blank_entries(count: int) -> Entries:
    """Entries to be written."""
    time_N, arena_N, record_N, kind_N = (np.empty(count, np.uint8) for _ in range(4))
    worker_N, shard_N, at_worker_N, at_shard_N = (np.empty(count, np.int32) for _ in range(4))
    return Entries(time_N, worker_N, shard_N, arena_N, record_N, kind_N, at_worker_N, at_shard_N)


class BlockList(NamedTuple):
    """Blocks of all owners, one owner's after the other's."""

    head_BH: I32
    where_N: I32
    first_block_O: I64
    first_where_O: I64


@inlined
def _at_shard(spots: RowLocator, row: int) -> int:
    """Number of a row in its shard's arena; row r is kept by shard r mod K."""
    first_T, shards = spots.first_row_T, len(spots.before_KT)
    table = spots.guess_G[row >> spots.shift]
    while first_T[table + 1] <= row:
        table += 1
    if shards == 1:
        return int(spots.before_KT[0, table] + row - first_T[table])
    # Rows of the table before this one in the same shard: one every K rows.
    return int(spots.before_KT[row % shards, table] + (row - first_T[table]) // shards)


@kernel
def locate(row_N: I64, spots: RowLocator) -> I64:
    """Number of each row in its shard's arena."""
    out = np.empty(len(row_N), np.int64)
    for i in range(len(row_N)):
        out[i] = _at_shard(spots, row_N[i])
    return out


@kernel
def arena_index(row_N: I64, arena_N: U8, spots: RowLocator, first_KA: I64) -> I32:
    """Number of each row in its arena, all shards' rows one after the other."""
    shards = len(spots.before_KT)
    out = np.empty(len(row_N), np.int32)
    for i in range(len(row_N)):
        shard = row_N[i] % shards if shards > 1 else 0
        out[i] = first_KA[shard, index(arena_N[i])] + _at_shard(spots, row_N[i])
    return out


@kernel
def append_entries(
    part: Transfers, time_N: U8, spots: RowLocator, out: Entries, start: int
) -> None:
    """Write a list of transfers into the entries from `start` on."""
    shards = len(spots.before_KT)
    for i in range(len(part.row)):
        at, row = index(start + i), part.row[i]
        out.time_N[at] = time_N[i]
        out.worker_N[at] = part.worker[i]
        out.shard_N[at] = row % shards if shards > 1 else 0
        out.arena_N[at] = part.arena[i]
        out.record_N[at] = part.record[i]
        out.kind_N[at] = part.kind[i]
        first = spots.first_slot_WA[index(part.worker[i]), index(part.arena[i])]
        out.at_worker_N[at] = part.slot[i] - first
        out.at_shard_N[at] = _at_shard(spots, row)


@kernel
def sort_into_blocks(
    owner_N: I32, peer_N: I32, where_N: I32, entries: Entries, shape: tuple[int, int, int]
) -> BlockList:
    """A counting sort into blocks. `shape`: owners, peers, arenas."""
    owners, peers, arenas = shape
    times = entries.time_N.max() + 1 if len(entries.time_N) else 1
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
    blocks = 0
    for box in range(len(kinds)):
        blocks += first[box + 1] > 0
        first[box + 1] += first[box]
    head_BH = np.empty((blocks, HEAD), np.int32)
    first_block_O = np.zeros(owners + 1, np.int64)
    count = 0
    for box in range(len(kinds)):
        if first[box + 1] > first[box]:
            rest = box % per_owner
            head_BH[count, 3] = rest % NUM_RECORDS
            head_BH[count, 2] = rest // NUM_RECORDS % arenas
            head_BH[count, 1] = rest // (NUM_RECORDS * arenas) % peers
            head_BH[count, 0] = rest // (NUM_RECORDS * arenas * peers)
            head_BH[count, 4 : 4 + NUM_KINDS] = kinds[box]
            head_BH[count, HEAD - 1] = first[box + 1] - first[box]
            count += 1
        first_block_O[box // per_owner + 1] = count
    first_where_O = first[::per_owner].copy()
    out = np.empty(len(owner_N), np.int32)
    for i in range(len(owner_N)):
        box = index(box_N[i])
        out[index(first[box])] = where_N[i]
        first[box] += 1
    return BlockList(head_BH, out, first_block_O, first_where_O)
