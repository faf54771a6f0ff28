"""Caches of all workers as flat arrays: copies, slots, and finding a slot for a missing row.

Axes: R rows, W workers, C slots of a worker, A arenas (rows of one width), B buckets of an
eviction order, U distinct rows of a step, T touches. Slot numbers run over all arenas of a worker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import (
    BUCKET,
    FREE,
    HIT,
    MARK,
    MISS,
    NEXT,
    PREV,
    ROW,
    SLOT_MASK,
    STALE,
)
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class Caches(NamedTuple):
    """Everything known of copies and slots. Zeros mean empty, so untouched pages cost nothing."""

    cell_RW: I32  # slot + 1, FRESH, DIRTY
    slot_WCF: I32  # fields F of a slot: ROW, USED, MARK, PREV, NEXT, BUCKET, START, CLOCK
    first_WA: I64  # first slot of each arena
    capacity_WA: I64
    used_WA: I64  # slots handed out so far
    head_WAB: I32  # oldest slot + 1 of each bucket
    tail_WAB: I32  # youngest
    clock_R: I32  # bounded staleness: the shard's clock; empty where a policy is exact


class Moves(NamedTuple):
    """Copies that go to the young end of a bucket, in this order."""

    worker: I32
    slot: I32
    arena: U8
    bucket: I32


@kernel
def copies(cell_RW: I32, rows_U: I64) -> I32:
    """Cells of the given rows: copies_UW."""
    out = np.empty((len(rows_U), cell_RW.shape[1]), np.int32)
    # A loop this short keeps many cache misses in flight; the next one then finds its lines.
    for u in range(len(rows_U)):
        out[u, 0] = cell_RW[rows_U[u], 0]
    for u in range(len(rows_U)):
        row = rows_U[u]
        for w in range(cell_RW.shape[1]):
            out[u, w] = cell_RW[row, w]
    return out


@kernel
def any_bit(cell_RW: I32, row: int, bits: int) -> bool:
    """Whether any copy of a row carries one of the bits."""
    seen = 0
    for w in range(cell_RW.shape[1]):
        seen |= cell_RW[row, w]
    return seen & bits != 0


@kernel
def _unlink(caches: Caches, w: int, a: int, slot: int) -> None:
    slots = caches.slot_WCF
    before, after = slots[w, slot, PREV], slots[w, slot, NEXT]
    bucket = slots[w, slot, BUCKET] - 1
    if before:
        slots[w, before - 1, NEXT] = after
    else:
        caches.head_WAB[w, a, bucket] = after
    if after:
        slots[w, after - 1, PREV] = before
    else:
        caches.tail_WAB[w, a, bucket] = before


@kernel
def _warm_neighbours(slots: I32, moves: Moves) -> int:
    """Read the neighbours of the moved slots, many cache misses at a time; the sum is of no use."""
    seen = 0
    for i in range(len(moves.slot)):
        w = moves.worker[i]
        before, after = slots[w, moves.slot[i], PREV], slots[w, moves.slot[i], NEXT]
        seen += slots[w, max(before - 1, 0), NEXT] + slots[w, max(after - 1, 0), PREV]
    return seen


@kernel
def move(caches: Caches, moves: Moves) -> int:
    """Place or re-place slots at the young end of their buckets; the result is of no use."""
    slots = caches.slot_WCF
    warmed = _warm_neighbours(slots, moves)
    for i in range(len(moves.slot)):
        w, a, slot, bucket = moves.worker[i], moves.arena[i], moves.slot[i], moves.bucket[i]
        if slots[w, slot, BUCKET]:
            _unlink(caches, w, a, slot)
        tail = caches.tail_WAB[w, a, bucket]
        slots[w, slot, PREV] = tail
        slots[w, slot, NEXT] = 0
        slots[w, slot, BUCKET] = bucket + 1
        if tail:
            slots[w, tail - 1, NEXT] = slot + 1
        else:
            caches.head_WAB[w, a, bucket] = slot + 1
        caches.tail_WAB[w, a, bucket] = slot + 1
    return warmed


# Marks of a slot in the step being planned; those of earlier steps fade by themselves.
TOUCHED, RETURNED, CHECKED = 1, 2, 4
_STEP_SHIFT = 3


@kernel
def set_mark(caches: Caches, w: int, slot: int, bit: int, step: int) -> None:
    """Mark one slot."""
    now = (step + 1) << _STEP_SHIFT
    old = caches.slot_WCF[w, slot, MARK]
    caches.slot_WCF[w, slot, MARK] = (old if old >= now else now) | bit


@kernel
def marked(caches: Caches, w: int, slot: int, bit: int, step: int) -> bool:
    """Whether a slot carries the mark in this step."""
    value = caches.slot_WCF[w, slot, MARK]
    return bool(value >> _STEP_SHIFT == step + 1 and value & bit != 0)


@kernel
def mark(caches: Caches, worker: I32, slot: I32, bit: int, step: int) -> None:
    """Mark slots."""
    for i in range(len(slot)):
        set_mark(caches, worker[i], slot[i], bit, step)


class Request(NamedTuple):
    """What placing needs to know of a step."""

    touches: Touches
    need_T: U8
    copies_UW: I32
    arena_U: U8
    order_B: I32  # buckets in the order in which they lose copies
    step: int


class Placement(NamedTuple):
    """A slot for every touch; the row that leaves it, or -1; where a cache was too small."""

    slot_T: I32
    victim_T: I64
    short: I64  # worker, arena of a cache that is too small; -1 if none


@kernel
def _next_slot(caches: Caches, request: Request, at: I64, cursor: I64) -> int:
    """Next slot to take from worker at[0], arena at[1]: never used, free, or the next victim.

    `cursor` holds: slots taken of those never used, position in order_B, next slot + 1.
    """
    w, a = at[0], at[1]
    unused = caches.used_WA[w, a] + cursor[0]
    if unused < caches.capacity_WA[w, a]:
        cursor[0] += 1
        return int(caches.first_WA[w, a] + unused)
    while True:
        while cursor[2] == 0:
            cursor[1] += 1
            if cursor[1] >= len(request.order_B):
                return -1
            cursor[2] = caches.head_WAB[w, a, request.order_B[cursor[1]]]
        slot = int(cursor[2] - 1)
        cursor[2] = caches.slot_WCF[w, slot, NEXT]
        if not marked(caches, w, slot, TOUCHED, request.step):
            return slot


@kernel
def place(caches: Caches, request: Request) -> Placement:
    """Slots of all touches of a step. Reads the caches and writes nothing but marks."""
    touches, step = request.touches, request.step
    num_workers, num_arenas = caches.used_WA.shape
    slot_T = np.empty(len(touches.unique_T), np.int32)
    victim_T = np.empty(len(touches.unique_T), np.int64)
    short = np.full(2, -1, np.int64)
    for t in range(len(slot_T)):
        slot_T[t] = (request.copies_UW[touches.unique_T[t], touches.worker_T[t]] & SLOT_MASK) - 1
    # Touch the slots' cache lines in a loop short enough to keep many misses in flight.
    for t in range(len(slot_T)):
        victim_T[t] = caches.slot_WCF[touches.worker_T[t], max(slot_T[t], 0), MARK]
    for t in range(len(slot_T)):
        victim_T[t] = -1
        if slot_T[t] >= 0:
            set_mark(caches, touches.worker_T[t], slot_T[t], TOUCHED, step)
    at = np.zeros(2, np.int64)
    for w in range(num_workers):
        cursor_A3 = np.zeros((num_arenas, 3), np.int64)
        cursor_A3[:, 1] = -1
        for t in range(touches.first_W[w], touches.first_W[w + 1]):
            if slot_T[t] >= 0:
                continue
            at[0], at[1] = w, request.arena_U[touches.unique_T[t]]
            slot_T[t] = _next_slot(caches, request, at, cursor_A3[at[1]])
            if slot_T[t] < 0:
                short[:] = at
                return Placement(slot_T, victim_T, short)
            bucket = caches.slot_WCF[w, slot_T[t], BUCKET] - 1
            if bucket > FREE:
                victim_T[t] = caches.slot_WCF[w, slot_T[t], ROW]
    return Placement(slot_T, victim_T, short)


@kernel
def hits(touches: Touches, copies_UW: I32, useful: int) -> U8:
    """HIT where the copy carries the bit `useful`, STALE where it is held without, else MISS."""
    need_T = np.empty(len(touches.unique_T), np.uint8)
    for t in range(len(need_T)):
        cell = copies_UW[touches.unique_T[t], touches.worker_T[t]]
        need_T[t] = HIT if cell & useful else (MISS if cell == 0 else STALE)
    return need_T
