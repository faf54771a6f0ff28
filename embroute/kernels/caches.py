"""Caches of all workers as flat arrays: copies, slots, and finding a slot for a missing row.

Axes: R rows, W workers, C slots of a worker, A arenas (rows of one width), B buckets of an
eviction order, U distinct rows of a step, T touches. Slot numbers run over all arenas of a worker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import (
    DIRTY,
    FREE,
    FRESH,
    HIT,
    MARK,
    MISS,
    NO_HOLDER,
    ROW,
    SEVERAL,
    SLOT_MASK,
    STALE,
    TICKET,
)
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.order import BUCKET, NEXT, SLOT, Order
from embroute.kernels.touches import Touches

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class Caches(NamedTuple):
    """Everything known of copies and slots. Zeros mean empty, so untouched pages cost nothing."""

    cell_RW: I32  # slot + 1, FRESH, DIRTY
    slot_WCF: I32  # fields F of a slot: ROW, USED, MARK, TICKET
    first_WA: I64  # first slot of each arena
    capacity_WA: I64
    used_WA: I64  # slots handed out so far
    order: Order
    planning: I64  # scratch: one number, counting calls of plan_step
    clock_WC2: I32  # bounded staleness: START and CLOCK of a slot; empty where a policy is exact
    clock_R: I32  # and the shard's clock


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
def sole_holders(copies_UW: I32) -> I32:
    """The only worker whose copy is FRESH or DIRTY, or NO_HOLDER, or SEVERAL.

    For most rows it is nobody or one worker, and then nothing after this looks at all W cells.
    """
    out_U = np.full(len(copies_UW), NO_HOLDER, np.int32)
    for u in range(len(copies_UW)):
        seen = np.int32(0)
        for w in range(copies_UW.shape[1]):
            seen |= copies_UW[u, w]
        if seen & (FRESH | DIRTY) == 0:
            continue
        for w in range(copies_UW.shape[1]):
            if copies_UW[u, w] & (FRESH | DIRTY):
                out_U[u] = w if out_U[u] == NO_HOLDER else SEVERAL
    return out_U


# Marks of a slot, scratch of one planning; those of earlier plannings fade by themselves.
TOUCHED, RETURNED, CHECKED = 1, 2, 4
_SHIFT = 3


@inlined
def set_mark(slot_WCF: I32, w: int, slot: int, bit: int, planning: int) -> None:
    """Mark one slot."""
    slot_WCF[w, slot, MARK] = max(slot_WCF[w, slot, MARK], planning << _SHIFT) | bit


@inlined
def marked(slot_WCF: I32, w: int, slot: int, bit: int, planning: int) -> bool:
    """Whether a slot carries the mark in this planning."""
    value = slot_WCF[w, slot, MARK]
    return bool(value >> _SHIFT == planning and value & bit != 0)


@kernel
def mark(slot_WCF: I32, worker: I32, slot: I32, bit: int, planning: int) -> None:
    """Mark slots."""
    for i in range(len(slot)):
        set_mark(slot_WCF, worker[i], slot[i], bit, planning)


class Request(NamedTuple):
    """What placing needs to know of a step."""

    touches: Touches
    copies_UW: I32
    arena_U: U8
    order_B: I32  # buckets in the order in which they lose copies


class Placement(NamedTuple):
    """A slot for every touch; the row that leaves it, or -1; where a cache was too small."""

    slot_T: I32
    victim_T: I64
    short: I64  # worker, arena of a cache that is too small; -1 if none


@kernel
def _victims(order: Order, slot_WCF: I32, order_B: I32, at: tuple[int, int, int], out: I32) -> int:
    """Fill `out` with the next slots of a worker and arena that lose their copy; how many."""
    w, a, planning = at
    head_WAB, tickets = order.head_WAB, order.ticket_WQ4
    count = 0
    for bucket in order_B:
        ticket = np.int64(head_WAB[w, a, bucket]) - 1
        while ticket >= 0 and count < len(out):
            slot = tickets[w, ticket, SLOT]
            # A void ticket or a slot that the step itself uses is passed over.
            valid = slot_WCF[w, slot, TICKET] == ticket + 1
            if valid and not marked(slot_WCF, w, slot, TOUCHED, planning):
                out[count] = slot
                count += 1
            ticket = np.int64(tickets[w, ticket, NEXT]) - 1
    return count


@kernel
def _vacancies(caches: Caches, request: Request, w: int, a: int, needed: int) -> I32:
    """Slots for `needed` missing rows: those never used, then victims; fewer if there are none."""
    first = caches.first_WA[w, a] + caches.used_WA[w, a]
    unused = min(needed, caches.capacity_WA[w, a] - caches.used_WA[w, a])
    out = np.empty(needed, np.int32)
    for i in range(unused):
        out[i] = first + i
    at = (w, a, int(caches.planning[0]))
    found = _victims(caches.order, caches.slot_WCF, request.order_B, at, out[unused:])
    return out[: unused + found]


@kernel
def _place_misses(caches: Caches, request: Request, out: Placement, w: int, a: int) -> bool:
    """Slots for the rows of one arena that one worker misses; False if there are too few."""
    slot_T, victim_T, arena_U = out.slot_T, out.victim_T, request.arena_U
    unique_T, slots, tickets = request.touches.unique_T, caches.slot_WCF, caches.order.ticket_WQ4
    first, last = request.touches.first_W[w], request.touches.first_W[w + 1]
    needed = 0
    for t in range(first, last):
        needed += 1 if slot_T[t] < 0 and arena_U[unique_T[t]] == a else 0
    vacant = _vacancies(caches, request, w, a, needed)
    if len(vacant) < needed:
        out.short[0], out.short[1] = w, a
        return False
    taken = 0
    for t in range(first, last):
        if slot_T[t] >= 0 or arena_U[unique_T[t]] != a:
            continue
        slot = vacant[taken]
        taken += 1
        slot_T[t] = slot
        ticket = slots[w, slot, TICKET] - 1
        if ticket >= 0 and tickets[w, ticket, BUCKET] != FREE:
            victim_T[t] = slots[w, slot, ROW]
    return True


@kernel
def place(caches: Caches, request: Request) -> Placement:
    """Slots of all touches of a step. Reads the caches and writes nothing but marks."""
    worker_T, unique_T = request.touches.worker_T, request.touches.unique_T
    copies_UW, slots, planning = request.copies_UW, caches.slot_WCF, caches.planning[0]
    slot_T = np.empty(len(unique_T), np.int32)
    victim_T = np.empty(len(unique_T), np.int64)
    out = Placement(slot_T, victim_T, np.full(2, -1, np.int64))
    for t in range(len(slot_T)):
        slot_T[t] = (copies_UW[unique_T[t], worker_T[t]] & SLOT_MASK) - 1
    # Touch the slots' cache lines in a loop short enough to keep many misses in flight.
    for t in range(len(slot_T)):
        victim_T[t] = slots[worker_T[t], max(slot_T[t], 0), MARK]
    for t in range(len(slot_T)):
        victim_T[t] = -1
        if slot_T[t] >= 0:
            set_mark(slots, worker_T[t], slot_T[t], TOUCHED, planning)
    num_workers, num_arenas = caches.used_WA.shape
    for cache in range(num_workers * num_arenas):
        if not _place_misses(caches, request, out, cache // num_arenas, cache % num_arenas):
            break
    return out


@kernel
def hits(touches: Touches, copies_UW: I32, useful: int) -> U8:
    """HIT where the copy carries the bit `useful`, STALE where it is held without, else MISS."""
    unique_T, worker_T = touches.unique_T, touches.worker_T
    need_T = np.empty(len(unique_T), np.uint8)
    for t in range(len(need_T)):
        cell = copies_UW[unique_T[t], worker_T[t]]
        need_T[t] = HIT if cell & useful else (MISS if cell == 0 else STALE)
    return need_T
