"""Buckets of slots, oldest first: what every eviction order of `policies/evict.py` stands on.

A touch gives a slot a new ticket at the end of its bucket and makes the old ticket void: a ticket
is valid while the slot's TICKET field names it. Void tickets are passed over and cleared later. No
ticket is unlinked from the middle, so a touch need not visit neighbours anywhere in memory.
Axes: W workers, A arenas, B buckets, Q tickets of a worker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import TICKET, USED
from embroute.kernels.jit import kernel
from embroute.kernels.memory import AHEAD, index, prefetch

MAX_MOVED = 1 << 20  # slots of a worker that one step moves
SLOT, NEXT, BUCKET = 0, 1, 2  # of a ticket: its slot, the ticket after it plus one, its bucket


class EvictionLists(NamedTuple):
    """Tickets in buckets; links hold ticket + 1, 0 is none."""

    ticket_WQ4: I32
    head_WAB: I32
    tail_WAB: I32
    given_W: I64  # tickets ever used; tickets from there on are blank
    spare_W: I32  # chain of void tickets, to be used again
    spares_W: I64  # length of that chain


class EvictionMoves(NamedTuple):
    """Copies that go to the young end of a bucket, in this order; touched copies come last."""

    worker: I32
    slot: I32
    arena: U8
    bucket: I32
    untouched: int  # moves before those of touched copies


@kernel
def _reclaim(order: EvictionLists, w: int, ticket: int) -> None:
    """Put a void ticket in front of the chain of spare tickets."""
    order.ticket_WQ4[w, ticket, NEXT] = order.spare_W[w]
    order.spare_W[w] = ticket + 1
    order.spares_W[w] += 1


@kernel
def _append(order: EvictionLists, w: int, a: int, bucket: int, ticket: int) -> None:
    order.ticket_WQ4[w, ticket, NEXT] = 0
    tail = order.tail_WAB[w, a, bucket]
    if tail:
        order.ticket_WQ4[w, tail - 1, NEXT] = ticket + 1
    else:
        order.head_WAB[w, a, bucket] = ticket + 1
    order.tail_WAB[w, a, bucket] = ticket + 1


@kernel
def _sift(order: EvictionLists, slot_WCF: I32, w: int, a: int, bucket: int) -> None:
    """Build a bucket again from its valid tickets, in the same order."""
    ticket = order.head_WAB[w, a, bucket] - 1
    order.head_WAB[w, a, bucket] = 0
    order.tail_WAB[w, a, bucket] = 0
    while ticket >= 0:
        after = order.ticket_WQ4[w, ticket, NEXT] - 1
        if slot_WCF[w, order.ticket_WQ4[w, ticket, SLOT], TICKET] == ticket + 1:
            _append(order, w, a, bucket, ticket)
        else:
            _reclaim(order, w, ticket)
        ticket = after


@kernel
def _make_room(order: EvictionLists, slot_WCF: I32, moves: EvictionMoves) -> bool:
    """Clear void tickets of workers that may run out in these moves; False if too few are left."""
    num_workers, num_arenas, num_buckets = order.head_WAB.shape
    wanted_W = np.zeros(num_workers, np.int64)
    for i in range(len(moves.worker)):
        wanted_W[index(moves.worker[i])] += 1
    for w in range(num_workers):
        left = order.ticket_WQ4.shape[1] - order.given_W[w] + order.spares_W[w]
        if left >= wanted_W[w]:
            continue
        for bucket in range(num_arenas * num_buckets):
            _sift(order, slot_WCF, w, bucket // num_buckets, bucket % num_buckets)
        left = order.ticket_WQ4.shape[1] - order.given_W[w] + order.spares_W[w]
        if left < wanted_W[w]:
            return False
    return True


@kernel
def _clear_heads(order: EvictionLists, slot_WCF: I32, w: int, a: int, bucket: int) -> None:
    """Clear void tickets at the old end of a bucket, where the search for victims starts."""
    while order.head_WAB[w, a, bucket]:
        ticket = order.head_WAB[w, a, bucket] - 1
        if slot_WCF[w, order.ticket_WQ4[w, ticket, SLOT], TICKET] == ticket + 1:
            return
        order.head_WAB[w, a, bucket] = order.ticket_WQ4[w, ticket, NEXT]
        _reclaim(order, w, ticket)
    order.tail_WAB[w, a, bucket] = 0


@kernel
def requeue(order: EvictionLists, slot_WCF: I32, moves: EvictionMoves, step: int) -> bool:
    """Place or re-place slots at the young end of their buckets; False if there are too many."""
    if not _make_room(order, slot_WCF, moves):
        return False
    tickets, tail_WAB, head_WAB = order.ticket_WQ4, order.tail_WAB, order.head_WAB
    for i in range(len(moves.slot)):
        soon = min(i + AHEAD, len(moves.slot) - 1)
        prefetch(slot_WCF, (moves.worker[soon], moves.slot[soon], TICKET))
        w, slot = index(moves.worker[i]), index(moves.slot[i])
        a, bucket = index(moves.arena[i]), index(moves.bucket[i])
        # Written out, not called: this is the innermost loop of every step. A spare ticket first;
        # `_make_room` has checked that blank ones suffice otherwise.
        if order.spare_W[w]:
            ticket = index(order.spare_W[w] - 1)
            order.spare_W[w] = tickets[w, ticket, NEXT]
            order.spares_W[w] -= 1
        else:
            ticket = index(order.given_W[w])
            order.given_W[w] += 1
        tickets[w, ticket, SLOT] = slot
        tickets[w, ticket, NEXT] = 0
        tickets[w, ticket, BUCKET] = bucket
        tail = tail_WAB[w, a, bucket]
        if tail:
            tickets[w, index(tail - 1), NEXT] = ticket + 1
        else:
            head_WAB[w, a, bucket] = ticket + 1
        tail_WAB[w, a, bucket] = ticket + 1
        slot_WCF[w, slot, TICKET] = ticket + 1
        if i >= moves.untouched:
            slot_WCF[w, slot, USED] = step + 1
    num_workers, num_arenas, num_buckets = head_WAB.shape
    for w in range(num_workers):
        for bucket in range(num_arenas * num_buckets):
            _clear_heads(order, slot_WCF, w, bucket // num_buckets, bucket % num_buckets)
    return True


def empty_lists(capacity_WA: I64, num_buckets: int) -> EvictionLists:
    """Lists without tickets.

    A slot holds one valid ticket and a step moves it a few times at most. So twice the slots and
    the moves of one step are always enough; with more tickets, lists are sifted less often.
    """
    workers, arenas = capacity_WA.shape
    slots = int(capacity_WA.sum(1).max())
    tickets = 2 * slots + 4 * min(slots, MAX_MOVED)
    return EvictionLists(
        ticket_WQ4=np.zeros((workers, tickets, 4), np.int32),
        head_WAB=np.zeros((workers, arenas, num_buckets), np.int32),
        tail_WAB=np.zeros((workers, arenas, num_buckets), np.int32),
        given_W=np.zeros(workers, np.int64),
        spare_W=np.zeros(workers, np.int32),
        spares_W=np.zeros(workers, np.int64),
    )
