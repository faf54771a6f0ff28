"""The checks of the laws themselves, as loops over a finished plan and the state it starts from.

Each returns the index of the first touch that breaks a law, or -1.
"""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import I32, U8
from embroute.kernels.codes import (
    DIRTY,
    EXCLUSIVE,
    FRESH,
    GRADIENT,
    HIT,
    LOCAL,
    MARK,
    NEW,
    NO_HOLDER,
    NOTHING,
    REPLICA,
    SEVERAL,
    SHARED,
    SLOT_MASK,
    UNHELD,
)
from embroute.kernels.jit import kernel
from embroute.kernels.memory import AHEAD, GOLDEN, index, nonzero, prefetch
from embroute.kernels.touches import Touches
from embroute.planner.kernels.cache import (
    RETURNED,
    CachedCopies,
    Caches,
    Placement,
    cell_of,
    marked,
)
from embroute.planner.kernels.transfers import Decision


@kernel
def slots_apart(caches: Caches, arena_U: U8, touches: Touches, slot_T: I32) -> int:
    """Law 5: every touched row has a slot of its own, inside its arena."""
    first_WA, end_WA = caches.first_WA, caches.first_WA + caches.capacity_WA
    first_W, unique_T = touches.first_W, touches.unique_T
    bits = 1
    # At least twice as many places as touches of a worker: probing stays short.
    while (1 << bits) < 2 * np.diff(first_W).max():
        bits += 1
    # Slots + 1 of one worker in a hash table (0 is empty), small enough for the nearest cache.
    taken = np.empty(1 << bits, np.int32)
    mask, shift = index((1 << bits) - 1), np.uint64(64 - bits)
    for w in range(len(first_W) - 1):
        taken[:] = 0
        for t in range(first_W[w], first_W[w + 1]):
            slot, a = slot_T[t], index(arena_U[index(unique_T[t])])
            if not first_WA[w, a] <= slot < end_WA[w, a]:
                return t
            # Multiplicative hashing: the top `bits` bits of the product, then linear probing.
            place = index(int((np.uint64(slot) * GOLDEN) >> shift))
            while taken[place] != 0 and taken[place] != slot + 1:
                place = (place + index(1)) & mask
            if taken[place] != 0:
                return t
            taken[place] = slot + 1
    return -1


@kernel
def updates_apart(touches: Touches, decision: Decision) -> int:
    """Laws 2 and 3 in place: a row's only toucher updates it, gradients of several are pushed."""
    first_U, of_row_T = touches.first_U, touches.of_row_T
    mode_T, push_T = decision.mode_T, decision.push_T
    for u in range(len(first_U) - 1):
        alone = first_U[u + 1] - first_U[u] == 1
        for i in range(first_U[u], first_U[u + 1]):
            t = index(of_row_T[i])
            by_worker = (mode_T[t] == EXCLUSIVE) & (push_T[t] == NOTHING)
            by_shard = (mode_T[t] == SHARED) & (push_T[t] == GRADIENT)
            if not (by_worker if alone else by_shard) or decision.need_T[t] != HIT:
                return int(t)
    return -1


SLOTS, LOST, STALE_READ = 1, 2, 3  # laws that touches_lawful checks


@kernel
def touches_lawful(
    caches: Caches,
    touches: Touches,
    copies: CachedCopies,
    decision: Decision,
    placement: Placement,
    exact: bool,
) -> tuple[int, int]:
    """The first touch that breaks a law, and the law; or (-1, 0).

    Law 5: a cached row stays in its slot. Law 2: a copy with an unpushed update does not lose its
    slot before the update is pushed, nor is it dropped after the step. Law 3, if `exact`: a copy
    used without a pull is up to date. A row that a worker initialises has never been touched.
    """
    cells, slots, planning = caches.cells, caches.slot_WCF, caches.planning[0]
    mode_T, push_T, drop_T = decision.mode_T, decision.push_T, decision.drop_T
    worker_T, unique_T, need_T = touches.worker_T, touches.unique_T, decision.need_T
    slot_T, victim_T, copies_UW = placement.slot_T, placement.victim_T, copies.copies_UW
    for t in nonzero(victim_T >= 0):
        w, slot = index(worker_T[t]), index(slot_T[t])
        dirty = cell_of(cells, victim_T[t], w) & DIRTY
        if dirty and not marked(slots, w, slot, RETURNED, planning):
            return int(t), LOST
    for t in range(len(slot_T)):
        soon = min(t + AHEAD, len(slot_T) - 1)
        prefetch(copies_UW, (unique_T[soon], worker_T[soon]))
        cell, need = copies_UW[index(unique_T[t]), index(worker_T[t])], need_T[t]
        if (need & UNHELD == 0) & (cell & SLOT_MASK != slot_T[t] + 1):
            return t, SLOTS
        if drop_T[t] and push_T[t] == NOTHING and mode_T[t] in (EXCLUSIVE, LOCAL):
            return t, LOST
        if exact & (need == HIT) & (cell & FRESH == 0):
            return t, STALE_READ
        if (need == NEW) & (copies.number_U[index(unique_T[t])] != 0):
            return t, STALE_READ
    return -1, 0


@kernel
def _all_replicas(touches: Touches, decision: Decision, u: int) -> bool:
    """Whether all touches of a row are up-to-date replicas: then its update may stay unpushed."""
    for i in range(touches.first_U[u], touches.first_U[u + 1]):
        t = index(touches.of_row_T[i])
        if decision.mode_T[t] < REPLICA or decision.need_T[t] != HIT:
            return False
    return True


@kernel
def updates_returned(
    caches: Caches, touches: Touches, copies: CachedCopies, decision: Decision
) -> int:
    """Laws 2 and 3: a row's newest value is at its shard before others pull or update it."""
    slots, planning = caches.slot_WCF, caches.planning[0]
    copies_UW, only_U, num_workers = copies.copies_UW, copies.only_U, copies.copies_UW.shape[1]
    first_U, of_row_T, worker_T = touches.first_U, touches.of_row_T, touches.worker_T
    for u in range(len(only_U)):
        soon = min(u + AHEAD, len(only_U) - 1)
        who = max(only_U[soon], 0)
        prefetch(slots, (who, max((copies_UW[soon, who] & SLOT_MASK) - 1, 0), MARK))
        only, first, last = only_U[u], index(first_U[u]), index(first_U[u + 1])
        if first == last or only == NO_HOLDER:
            continue
        # A sole toucher may keep its own unpushed update.
        alone = worker_T[index(of_row_T[first])] if last - first == 1 else -1
        start = max(only, 0)
        for k in range(start, start + 1 if only != SEVERAL else num_workers):
            cell = copies_UW[u, index(k)]
            if (cell & DIRTY == 0) | (k == alone):
                continue
            pushed = marked(slots, index(k), index((cell & SLOT_MASK) - 1), RETURNED, planning)
            if not pushed and not _all_replicas(touches, decision, u):
                return int(of_row_T[first])
    return -1
