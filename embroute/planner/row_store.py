"""Where a step's rows are read and trained: in the workers' caches, or in memory that ranks share.

Axes: T touches, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from embroute.config.cluster import Cluster
from embroute.config.spec import AUTO_CACHE, Cache, Size
from embroute.kernels.array_types import I64, Bools
from embroute.kernels.codes import FREE, NO_HOLDER, PINNED
from embroute.planner.interfaces import Policy, SyncContext
from embroute.planner.kernels import apply, cache, law_checks, transfers
from embroute.planner.kernels.cache import CachedCopies, Cells, Placement
from embroute.planner.kernels.eviction import EvictionMoves, requeue
from embroute.planner.kernels.transfers import NO_TRANSFERS, Decision
from embroute.planner.plan import CacheMoves, Plan
from embroute.planner.state import PlanError, State, naming_part


class RowStore(Protocol):
    """What the two kinds do differently."""

    def cache_size(self, policy: Policy, requested: Cache) -> Cache:
        """The caches of a run."""

    def check_hosts(self, policy: Policy, cluster: Cluster) -> None:
        """Refuse a cluster on which workers cannot reach the rows."""

    def find_copies(self, cells: Cells, rows_U: I64) -> CachedCopies:
        """Copies of a step's rows before the step changes any."""

    def move_rows(self, policy: Policy, context: SyncContext, decision: Decision) -> CacheMoves:
        """Slots for all touches, and the transfers before the step."""

    def laws(self, plan: Plan, state: State, policy: Policy) -> Iterator[tuple[str, int]]:
        """Each law with the first touch that breaks it, or -1."""

    def advance(self, state: State, plan: Plan) -> None:
        """Leave copies and slots as the plan does."""


class CachedRows:
    """Workers pull rows into slots of their caches. Shards keep the rows themselves."""

    def cache_size(self, policy: Policy, requested: Cache) -> Cache:
        """The requested caches; a reference line without bounds caches all rows."""
        automatic = policy.sync.whole_tables and requested == AUTO_CACHE
        return Size(1.0, "share") if policy.unbounded or automatic else requested

    def check_hosts(self, policy: Policy, cluster: Cluster) -> None:
        """Every cluster will do."""

    def find_copies(self, cells: Cells, rows_U: I64) -> CachedCopies:
        """Numbers, cells and holders of the rows."""
        return cache.find_copies(cells, rows_U)

    def move_rows(self, policy: Policy, context: SyncContext, decision: Decision) -> CacheMoves:
        """Updates that return to the shards, slots for all touches, evictions and pulls."""
        caches, rows, touches = context.state.caches, context.rows, context.touches
        caches.planning[0] += 1
        returned = NO_TRANSFERS
        if len(decision.return_worker):
            returned = transfers.returns(caches, rows, decision, context.copies_UW)
        # A returned update is at its shard before the step, so that its slot may be taken over.
        planning = int(caches.planning[0])
        cache.mark(caches.slot_WCF, returned.worker, returned.slot, cache.RETURNED, planning)
        placement = _place_touches(policy, context)
        evicted = NO_TRANSFERS
        if (placement.victim_T >= 0).any():
            lazy = not policy.exact
            evicted = transfers.evictions(caches, rows, touches, placement, decision.record, lazy)
        return CacheMoves(
            placement=placement,
            returns=returned,
            evictions=evicted,
            pulls=transfers.pulls(caches, rows, touches, decision, placement),
            moves=_eviction_moves(policy, context, decision, placement),
        )

    def laws(self, plan: Plan, state: State, policy: Policy) -> Iterator[tuple[str, int]]:
        """Bounded staleness, capacity, exact reads; no update is lost."""
        caches, rows, touches = state.caches, plan.rows, plan.touches
        copies, decision, slot_T = plan.copies, plan.decision, plan.placement.slot_T
        # Marks of the planning are not trusted: the plan itself counts, not how it was made.
        caches.planning[0] += 1
        planning = int(caches.planning[0])
        slots, returned = caches.slot_WCF, cache.RETURNED
        cache.mark(slots, plan.returns.worker, plan.returns.slot, returned, planning)
        yield from policy.sync.laws(plan, state)
        cache.mark(slots, plan.evictions.worker, plan.evictions.slot, returned, planning)
        yield "5 (capacity)", law_checks.slots_apart(caches, rows.arena_U, touches, slot_T)
        touch, law = law_checks.touches_lawful(
            caches, touches, copies, decision, plan.placement, policy.exact
        )
        yield ("", "5 (capacity)", "2 (no update lost)", "3 (exact reads)")[law], touch
        if policy.exact:
            touch = law_checks.updates_returned(caches, touches, copies, decision)
            yield "3 (updates home)", touch

    def advance(self, state: State, plan: Plan) -> None:
        """Copies come and go, touched slots move in the eviction order."""
        caches, rows, touches, decision = state.caches, plan.rows, plan.touches, plan.decision
        returned = np.take(plan.copies.number_U, decision.return_unique)
        apply.mark_clean(caches.cells.cell_NW, returned, decision.return_worker)
        apply.apply_step(caches, rows, touches, decision, plan.placement, plan.copies)
        if decision.drop_T.any():
            apply.drop_copies(caches, rows, touches, decision.drop_T)
        if not requeue(caches.eviction, caches.slot_WCF, plan.moves, plan.step):
            raise PlanError(f"step {plan.step}: {len(plan.moves.slot)} moves in the eviction order")


class SharedRows:
    """Workers read and train rows where the shards keep them: no copies, no slots."""

    def cache_size(self, policy: Policy, requested: Cache) -> Cache:
        """No slots."""
        return Size(0.0, "share")

    def check_hosts(self, policy: Policy, cluster: Cluster) -> None:
        """All workers and shards must be on one host."""
        if len(cluster.used_hosts) > 1:
            raise ValueError(
                f"policy {policy.name}: rows are trained where the shards keep them, so all "
                f"workers and shards must be on one host, here and in --network (docs/cluster.md)"
            )

    def find_copies(self, cells: Cells, rows_U: I64) -> CachedCopies:
        """Numbers of the rows; no worker has a copy."""
        count, num_workers = len(rows_U), cells.cell_NW.shape[1]
        return CachedCopies(
            number_U=cache.row_numbers(cells, rows_U),
            copies_UW=np.zeros((count, num_workers), np.int32),
            only_U=np.full(count, NO_HOLDER, np.int32),
        )

    def move_rows(self, policy: Policy, context: SyncContext, decision: Decision) -> CacheMoves:
        """No slots and no transfers."""
        no_slot_T, empty = np.full(len(context.cell_T), -1, np.int32), np.empty(0, np.int32)
        return CacheMoves(
            placement=Placement(no_slot_T, no_slot_T.astype(np.int64), np.full(2, -1, np.int64)),
            returns=NO_TRANSFERS,
            evictions=NO_TRANSFERS,
            pulls=NO_TRANSFERS,
            moves=EvictionMoves(empty, empty, empty.astype(np.uint8), empty, untouched=0),
        )

    def laws(self, plan: Plan, state: State, policy: Policy) -> Iterator[tuple[str, int]]:
        """No two ranks update a row."""
        yield "3 (updates in place)", law_checks.updates_apart(plan.touches, plan.decision)

    def advance(self, state: State, plan: Plan) -> None:
        """Rows that were touched for the first time get a number."""
        cells, touches = state.caches.cells, plan.touches
        apply.number_rows(cells, plan.rows.rows_U, touches, plan.copies.number_U)


def row_store_of(policy: Policy) -> RowStore:
    """The row store that a policy's sync works on."""
    return SharedRows() if policy.sync.shared_memory else CachedRows()


def _place_touches(policy: Policy, context: SyncContext) -> Placement:
    """Slots for all touches, or an error that asks for larger caches."""
    caches, order = context.state.caches, policy.evict.order(context.rows.step)
    request = cache.Request(context.touches, context.cell_T, context.arena_T, order)
    placement = cache.place(caches, request)
    if placement.short[0] >= 0:
        raise ValueError(_small_cache(policy, context, *placement.short.tolist()))
    return placement


def _small_cache(policy: Policy, context: SyncContext, worker: int, arena: int) -> str:
    """Which cache cannot hold the rows of a step, and how many those are."""
    caches, rows, setup = context.state.caches, context.rows, context.state.setup
    first, last = context.touches.first_W[worker : worker + 2]
    touched = context.touches.unique_T[first:last]
    in_arena = rows.arena_U[touched] == arena
    needed, pinned = int(in_arena.sum()), ""
    pinned_R = policy.sync.pinned(context.state)
    if pinned_R is not None:
        hot = int((setup.arena_of(np.flatnonzero(pinned_R)) == arena).sum())
        cold = in_arena & ~pinned_R[rows.rows_U[touched]]
        needed, pinned = int(cold.sum()) + hot, f" ({hot} of them replicated)"
    return (
        f"--cache {setup.cache_W[worker]}: worker {worker} needs {needed} rows of width "
        f"{setup.arenas[arena]}{pinned} in step {rows.step}, its cache holds "
        f"{caches.capacity_WA[worker, arena]}; use a larger cache or a smaller batch"
    )


def _eviction_moves(
    policy: Policy, context: SyncContext, decision: Decision, placement: Placement
) -> EvictionMoves:
    """Buckets of touched copies: dropped copies are free, some are pinned."""
    with naming_part(policy.name, f"step {context.rows.step}, moves of evict {policy.evict.name}"):
        moves = policy.evict.moves(context, decision, placement)
    pinned_R = policy.sync.pinned(context.state)
    if pinned_R is not None:
        pinned_T = pinned_R[context.rows.rows_U[context.touches.unique_T]]
        moves = _append(moves, context, placement, pinned_T, PINNED)
    if decision.drop_T.any():
        moves = _append(moves, context, placement, decision.drop_T.astype(np.bool_), FREE)
    return moves


def _append(
    moves: EvictionMoves, context: SyncContext, placement: Placement, chosen_T: Bools, bucket: int
) -> EvictionMoves:
    """Let the chosen touches end in a bucket: a later move of a slot overrules earlier ones."""
    touches = context.touches
    buckets = np.full(int(chosen_T.sum()), bucket, np.int32)
    return EvictionMoves(
        worker=np.concatenate([moves.worker, touches.worker_T[chosen_T]]),
        slot=np.concatenate([moves.slot, placement.slot_T[chosen_T]]),
        arena=np.concatenate([moves.arena, context.arena_T[chosen_T]]),
        bucket=np.concatenate([moves.bucket, buckets]),
        untouched=moves.untouched,
    )
