"""Caches of all workers as flat arrays: copies, slots, and finding a slot for a missing row.

Axes: R rows, W workers, C slots of a worker, A arenas (rows of one width), B buckets of an
eviction order, N numbers of rows, U distinct rows of a step, T touches. Slots are counted over all
arenas of a worker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import I32, I64, U8, U32
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
from embroute.kernels.memory import AHEAD, index, nonzero, prefetch
from embroute.kernels.touches import Touches
from embroute.planner.kernels.eviction import BUCKET, NEXT, SLOT, EvictionLists


class Cells(NamedTuple):
    """Every worker's copy of every row.

    Rows get a number when they are first touched. So rows in use lie side by side, popular rows
    first, and untouched rows take no memory.
    """

    number_R: I32  # 0 for rows never touched
    cell_NW: I32  # by number: slot + 1, FRESH, DIRTY; no copies under number 0
    numbered: I64  # the last number given


class Caches(NamedTuple):
    """Copies and slots of all workers. Zeros mean empty, so untouched pages cost nothing."""

    cells: Cells
    slot_WCF: I32  # fields F of a slot: ROW, USED, MARK, TICKET
    first_WA: I64  # first slot of each arena
    capacity_WA: I64
    used_WA: I64  # slots handed out so far
    eviction: EvictionLists
    planning: I64  # scratch: one number, counting calls of plan_step


class CachedCopies(NamedTuple):
    """Copies of a step's rows before the step changes any."""

    number_U: I32
    copies_UW: I32  # cells
    only_U: I32  # holder of a FRESH or DIRTY copy: a worker, NO_HOLDER or SEVERAL


@inlined
def cell_of(cells: Cells, row: int, w: int) -> int:
    """One worker's copy of one row."""
    return int(cells.cell_NW[index(cells.number_R[index(row)]), index(w)])


@inlined
def _sole_holder(copies_UW: I32, u: int) -> int:
    # Two sums, which the compiler turns into vectors: holders, and the sum of their numbers, which
    # is the holder's number if there is only one.
    holders, numbers = np.int32(0), np.int32(0)
    for w in range(copies_UW.shape[1]):
        holds = np.int32(copies_UW[u, index(w)] & (FRESH | DIRTY) != 0)
        holders += holds
        numbers += holds * np.int32(w)
    only = numbers if holders == 1 else np.int32(SEVERAL)
    return int(only if holders > 0 else np.int32(NO_HOLDER))


@kernel
def sole_holders(copies_UW: I32) -> I32:
    """The only worker whose copy is FRESH or DIRTY, or NO_HOLDER, or SEVERAL.

    Most rows have at most one holder, and then later loops need not read all W cells.
    """
    out_U = np.empty(len(copies_UW), np.int32)
    for u in range(len(copies_UW)):
        out_U[u] = _sole_holder(copies_UW, u)
    return out_U


CELLS_A_LINE = 16  # int32 cells of a cache line


@kernel
def row_numbers(cells: Cells, rows_U: I64) -> I32:
    """Numbers of the given rows."""
    out_U = np.empty(len(rows_U), np.int32)
    for u in range(len(rows_U)):
        prefetch(cells.number_R, (rows_U[min(u + AHEAD, len(rows_U) - 1)],))
        out_U[u] = cells.number_R[index(rows_U[u])]
    return out_U


@kernel
def find_copies(cells: Cells, rows_U: I64) -> CachedCopies:
    """Numbers, cells and sole holders of the given rows."""
    cell_NW, number_U = cells.cell_NW, row_numbers(cells, rows_U)
    num_rows, num_workers = len(rows_U), cell_NW.shape[1]
    only_U = np.empty(num_rows, np.int32)
    copies_UW = np.empty((num_rows, num_workers), np.int32)
    for u in range(num_rows):
        soon, number = number_U[min(u + AHEAD, num_rows - 1)], index(number_U[u])
        for w in range(0, num_workers, CELLS_A_LINE):
            prefetch(cell_NW, (soon, w))
        for w in range(num_workers):
            copies_UW[index(u), index(w)] = cell_NW[number, index(w)]
        only_U[index(u)] = _sole_holder(copies_UW, index(u))
    return CachedCopies(number_U, copies_UW, only_U)


# Marks of a slot: the number of a planning above two bits. A later planning has a higher number,
# so marks of earlier plannings need not be cleared.
TOUCHED, RETURNED = 1, 2
_SHIFT = 2


@inlined
def set_mark(slot_WCF: I32, w: int, slot: int, bit: int, planning: int) -> None:
    """Mark one slot."""
    # An older planning's value is smaller than this planning without bits: max drops it.
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
        soon = min(i + AHEAD, len(slot) - 1)
        prefetch(slot_WCF, (worker[soon], slot[soon], MARK))
        set_mark(slot_WCF, index(worker[i]), index(slot[i]), bit, planning)


class Request(NamedTuple):
    """The touches that need slots, and the order in which copies lose theirs."""

    touches: Touches
    cell_T: I32  # copies of the touched rows
    arena_T: U8
    order_B: I32  # buckets in the order in which they lose copies


class Placement(NamedTuple):
    """A slot for every touch; the row that leaves it, or -1; where a cache was too small."""

    slot_T: I32
    victim_T: I64
    short: I64  # worker and arena of a cache that is too small; -1 if none


class CacheId(NamedTuple):
    """The slots of one worker for rows of one width."""

    worker: int
    arena: int


@inlined
def _next_link(tickets: I32, slot_WCF: I32, w: int, link: int) -> int:
    """The link after this one; 0 stays 0. Prefetches the slot of the link's ticket."""
    ticket = index(max(link - 1, 0))
    prefetch(slot_WCF, (w, tickets[w, ticket, SLOT], TICKET))
    return int(tickets[w, ticket, NEXT]) if link else 0


@kernel
def _victims(caches: Caches, order_B: I32, cache: CacheId, out: I32) -> int:
    """Fill `out` with the next slots of a cache that lose their copy; returns their number."""
    w, a = cache
    slot_WCF, planning = caches.slot_WCF, caches.planning[0]
    head_WAB, tickets = caches.eviction.head_WAB, caches.eviction.ticket_WQ4
    count = 0
    for bucket in order_B:
        link = head_WAB[w, a, bucket] if count < len(out) else 0
        # The scout runs AHEAD links before the link that is read, to hide the latency of memory.
        scout = link
        for _ in range(AHEAD if link else 0):
            scout = _next_link(tickets, slot_WCF, w, scout)
        while link and count < len(out):
            scout = _next_link(tickets, slot_WCF, w, scout)
            slot = index(tickets[w, index(link - 1), SLOT])
            # For void tickets and for slots that the step touches `count` stays, so that the next
            # slot overwrites this one.
            valid = slot_WCF[w, slot, TICKET] == link
            out[count] = slot
            count += valid and not marked(slot_WCF, w, slot, TOUCHED, planning)
            link = tickets[w, index(link - 1), NEXT]
    return count


@kernel
def _keep_touched(slot_WCF: I32, held_T: I32, w: int, planning: int) -> None:
    """Mark the slots of a worker's touched copies: they are no victims."""
    for t in range(len(held_T)):
        if held_T[t] >= 0:
            prefetch(slot_WCF, (w, held_T[t], MARK))
    for t in range(len(held_T)):
        if held_T[t] >= 0:
            set_mark(slot_WCF, w, index(held_T[t]), TOUCHED, planning)


@kernel
def _vacant_slots(
    caches: Caches, request: Request, held_T: I32, cache: CacheId, needed: int
) -> I32:
    """Slots for missing rows: unused slots, then victims; fewer than `needed` if there are none.

    `held_T`: slots of the worker's touches, -1 where missing.
    """
    w, a = cache
    first = caches.first_WA[w, a] + caches.used_WA[w, a]
    unused = min(needed, caches.capacity_WA[w, a] - caches.used_WA[w, a])
    out = np.empty(needed, np.int32)
    for i in range(unused):
        out[i] = first + i
    if unused == needed:
        return out
    _keep_touched(caches.slot_WCF, held_T, w, int(caches.planning[0]))
    return out[: unused + _victims(caches, request.order_B, cache, out[unused:])]


@kernel
def _place_misses(caches: Caches, request: Request, out: Placement, w: int, a: int) -> bool:
    """Slots for the missing rows of one cache; False if there are too few."""
    slot_T, victim_T, slots = out.slot_T, out.victim_T, caches.slot_WCF
    first, last = request.touches.first_W[w], request.touches.first_W[w + 1]
    missing = nonzero((slot_T[first:last] < 0) & (request.arena_T[first:last] == a))
    vacant = _vacant_slots(caches, request, slot_T[first:last], CacheId(w, a), len(missing))
    if len(vacant) < len(missing):
        out.short[0], out.short[1] = w, a
        return False
    for i in range(len(missing)):
        slot_T[index(first + missing[i])] = vacant[i]
    # The first vacant slots were never used, so only the slots after them have a copy to lose.
    for i in range(caches.capacity_WA[w, a] - caches.used_WA[w, a], len(missing)):
        slot = index(vacant[i])
        ticket = slots[w, slot, TICKET]
        if ticket > 0 and caches.eviction.ticket_WQ4[w, index(ticket - 1), BUCKET] != FREE:
            victim_T[index(first + missing[i])] = slots[w, slot, ROW]
    return True


@kernel
def victim_cells(cells: Cells, touches: Touches, placement: Placement, chosen: U32) -> I32:
    """Cells of the victims of the chosen touches."""
    number_R, cell_NW = cells.number_R, cells.cell_NW
    worker_T, victim_T = touches.worker_T, placement.victim_T
    # Two loops over `out`, first numbers, then cells: each loop prefetches from one array.
    out = np.empty(len(chosen), np.int32)
    for i in range(len(out)):
        prefetch(number_R, (victim_T[chosen[min(i + AHEAD, len(out) - 1)]],))
        out[i] = number_R[index(victim_T[chosen[i]])]
    for i in range(len(out)):
        soon = min(i + AHEAD, len(out) - 1)
        prefetch(cell_NW, (out[soon], worker_T[chosen[soon]]))
        out[i] = cell_NW[index(out[i]), index(worker_T[chosen[i]])]
    return out


@kernel
def place(caches: Caches, request: Request) -> Placement:
    """Slots of all touches of a step. Reads the caches and writes nothing but marks."""
    # A cell holds slot + 1 below its bits, so touches without a copy get -1 here.
    slot_T = (request.cell_T & np.int32(SLOT_MASK)) - np.int32(1)
    victim_T = np.full(len(slot_T), -1, np.int64)
    out = Placement(slot_T, victim_T, np.full(2, -1, np.int64))
    num_workers, num_arenas = caches.used_WA.shape
    for cache in range(num_workers * num_arenas):
        if not _place_misses(caches, request, out, cache // num_arenas, cache % num_arenas):
            break
    return out


@kernel
def touch_cells(touches: Touches, copies_UW: I32, arena_U: U8) -> tuple[I32, U8]:
    """The copy and the arena of each touch."""
    unique_T, worker_T = touches.unique_T, touches.worker_T
    cell_T, arena_T = np.empty(len(unique_T), np.int32), np.empty(len(unique_T), np.uint8)
    for t in range(len(cell_T)):
        soon = min(t + AHEAD, len(cell_T) - 1)
        prefetch(copies_UW, (unique_T[soon], worker_T[soon]))
        cell_T[t] = copies_UW[index(unique_T[t]), index(worker_T[t])]
        arena_T[t] = arena_U[index(unique_T[t])]
    return cell_T, arena_T


@kernel
def classify_needs(cell_T: I32, useful: int) -> U8:
    """HIT where the copy carries the bit `useful`, STALE where it is held without, else MISS."""
    need_T = np.empty(len(cell_T), np.uint8)
    for t in range(len(need_T)):
        held = STALE if cell_T[t] != 0 else MISS
        need_T[t] = HIT if cell_T[t] & useful else held
    return need_T
