"""The brain's two verbs: `plan_step` decides a step without changing anything, `advance` does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from embroute.cost.step_time import step_time
from embroute.data.window import Window
from embroute.kernels.array_types import I32
from embroute.kernels.codes import CLOCK, FREE, PINNED, REPLICA, SLOT_MASK
from embroute.kernels.touches import Lookups, touches
from embroute.planner.in_place import nothing_moves, unheld
from embroute.planner.interfaces import Assignment, DispatchContext, ExtraRows, Policy, SyncContext
from embroute.planner.kernels.apply import (
    advance_clocks,
    apply_step,
    count_lookups,
    drop_copies,
    learn_affinity,
    mark_clean,
    number_rows,
)
from embroute.planner.kernels.cache import (
    RETURNED,
    Placement,
    Request,
    find_copies,
    mark,
    place,
    touch_cells,
)
from embroute.planner.kernels.eviction import EvictionMoves, requeue
from embroute.planner.kernels.transfers import (
    NO_TRANSFERS,
    Decision,
    StepRows,
    Transfers,
    evictions,
    pulls,
    returns,
    updates,
)
from embroute.planner.laws import check
from embroute.planner.plan import (
    CacheMoves,
    Plan,
    PlanError,
    drain_transfers,
    replicated,
    touched_rows,
    traffic,
    with_chunks,
)
from embroute.planner.state import SearchState, State
from embroute.policies.dispatch.herald import RANKING_PERIOD, ranked_tables
from embroute.policies.embroute.quotas import balance_shares, samples_that_fit
from embroute.policies.embroute.row_allreduce import choose_reduced_rows, learn_pace


def _step_rows(window: Window, extra: ExtraRows, state: State) -> StepRows:
    """The batch's distinct rows, then the rows that a sync adds."""
    now, setup = window.now, state.setup
    if extra.hot_next:
        now = replace(now, later_U=now.later_U.copy())
        now.later_U[state.hot_R[now.rows_U]] = window.step + 1
    if not len(extra.rows):
        return StepRows(
            now.rows_U, now.before_U, now.later_U, setup.arena_of(now.rows_U), window.step
        )
    rows_U = np.concatenate([now.rows_U, extra.rows])
    # Added rows move at a swap, which waits for the step before.
    before_U = np.full(len(rows_U), window.step - 1, np.int32)
    before_U[: len(now.before_U)] = now.before_U
    later_U = np.full(len(rows_U), -1, np.int32)
    later_U[: len(now.later_U)] = now.later_U
    return StepRows(rows_U, before_U, later_U, setup.arena_of(rows_U), window.step)


def _place(policy: Policy, context: SyncContext) -> Placement:
    """Slots for all touches; a cache that cannot hold one step's rows is the user's to enlarge."""
    caches, rows = context.state.caches, context.rows
    order = policy.evict.order(rows.step)
    request = Request(context.touches, context.cell_T, context.arena_T, order)
    placement = place(caches, request)
    worker, arena = placement.short
    if worker < 0:
        return placement
    first, last = context.touches.first_W[worker : worker + 2]
    touched = context.touches.unique_T[first:last]
    inside = rows.arena_U[touched] == arena
    needed, pinned = int(inside.sum()), ""
    if len(context.state.hot_R):
        hot = int((context.state.setup.arena_of(context.state.hot_rows) == arena).sum())
        cold = inside & ~context.state.hot_R[rows.rows_U[touched]]
        needed, pinned = int(cold.sum()) + hot, f" ({hot} of them replicated)"
    setup = context.state.setup
    raise ValueError(
        f"--cache {setup.cache}: worker {worker} needs {needed} rows of width "
        f"{setup.arenas[arena]}{pinned} in step {rows.step}, its cache holds "
        f"{caches.capacity_WA[worker, arena]}; use a larger cache or a smaller batch"
    )


def _moves(
    policy: Policy, context: SyncContext, decision: Decision, placement: Placement
) -> EvictionMoves:
    """Where touched copies go in the eviction order; dropped ones are free, hot ones stay."""
    moves = policy.evict.moves(context, decision, placement)
    hot_R, worker_T = context.state.hot_R, context.touches.worker_T
    if len(hot_R):
        hot_T = hot_R[context.rows.rows_U[context.touches.unique_T]]
        moves = _append(moves, context, placement, np.flatnonzero(hot_T), PINNED)
    if decision.drop_T.any() and len(worker_T):
        moves = _append(moves, context, placement, np.flatnonzero(decision.drop_T), FREE)
    return moves


def _replica_slots(context: SyncContext, decision: Decision, placement: Placement) -> I32:
    """Where every worker keeps the rows whose gradients the step all-reduces."""
    if not (decision.mode_T == REPLICA).any():
        return np.empty((0, context.copies_UW.shape[1]), np.int32)
    chosen = replicated(context.touches, decision)
    slots_UW = (context.copies_UW[chosen] & SLOT_MASK) - 1
    mine = np.flatnonzero(decision.mode_T == REPLICA)
    place = np.searchsorted(chosen, context.touches.unique_T[mine])
    slots_UW[place, context.touches.worker_T[mine]] = placement.slot_T[mine]
    return slots_UW


def _append(
    moves: EvictionMoves,
    context: SyncContext,
    placement: Placement,
    chosen: npt.NDArray[np.intp],
    bucket: int,
) -> EvictionMoves:
    """Let the chosen touches end in a bucket, whatever the order said before."""
    touched = context.touches
    return EvictionMoves(
        np.concatenate([moves.worker, touched.worker_T[chosen]]),
        np.concatenate([moves.slot, placement.slot_T[chosen]]),
        np.concatenate([moves.arena, context.arena_T[chosen]]),
        np.concatenate([moves.bucket, np.full(len(chosen), bucket, np.int32)]),
        moves.untouched,
    )


def _assign(policy: Policy, window: Window, state: State) -> tuple[SyncContext, Assignment]:
    """Assign the samples to workers and list the touches."""
    extra = policy.sync.extra(window, state)
    rows = _step_rows(window, extra, state)
    find = unheld if policy.sync.shared_memory else find_copies
    copies = find(state.caches.cells, rows.rows_U)
    now = window.now
    quotas_W = state.setup.quotas(len(now.batch))
    readable = copies
    if policy.dispatch.looks_at_caches:
        readable = policy.sync.readable(state, rows, copies)
    assignment = policy.dispatch.choose(
        DispatchContext(window, state, rows, readable, quotas_W, extra.everywhere)
    )
    lookups = Lookups(now.unique_of_lookup, np.ascontiguousarray(now.batch.sample_offsets))
    touched = touches(
        lookups, assignment.worker_S, state.setup.num_workers, len(rows.rows_U), extra.everywhere
    )
    cell_T, arena_T = touch_cells(touched, copies.copies_UW, rows.arena_U)
    context = SyncContext(window, state, rows, copies, touched, cell_T, arena_T, extra.everywhere)
    return context, assignment


def _rows_move(policy: Policy, context: SyncContext, decision: Decision) -> CacheMoves:
    """Copies that come home, slots for all touches, and what leaves and enters them."""
    caches, rows, touched = context.state.caches, context.rows, context.touches
    caches.planning[0] += 1
    home = NO_TRANSFERS
    if len(decision.return_worker):
        home = returns(caches, rows, decision, context.copies_UW)
    mark(caches.slot_WCF, home.worker, home.slot, RETURNED, int(caches.planning[0]))
    placement = _place(policy, context)
    evicted = NO_TRANSFERS
    if (placement.victim_T >= 0).any():
        lazy = not policy.exact
        evicted = evictions(caches, rows, touched, placement, decision.record, lazy)
    pulled = pulls(caches, rows, touched, decision, placement)
    return CacheMoves(
        placement, home, evicted, pulled, _moves(policy, context, decision, placement)
    )


def plan_step(policy: Policy, window: Window, state: State) -> Plan:
    """Decide one step: dispatch, sync, slots, transfers. Changes nothing but scratch marks."""
    context, assignment = _assign(policy, window, state)
    decision = policy.sync.decide(context)
    in_place = policy.sync.shared_memory
    moving = nothing_moves(context) if in_place else _rows_move(policy, context, decision)
    plan = Plan(
        step=window.step,
        now=window.now,
        worker_S=assignment.worker_S,
        rows=context.rows,
        touches=context.touches,
        copies=context.copies,
        decision=decision,
        placement=moving.placement,
        returns=moving.returns,
        evictions=moving.evictions,
        pulls=moving.pulls,
        updates=updates(context.rows, context.touches, decision, moving.placement),
        moves=moving.moves,
        replica_UW=_replica_slots(context, decision, moving.placement),
        memory=assignment.memory,
        shared_memory=in_place,
    )
    check(plan, state, policy)
    return with_chunks(plan, state.setup) if policy.sync.pipelined else plan


def advance(state: State, plan: Plan) -> None:
    """Carry a plan out on the state. Only this and `bring_home` change it."""
    caches, rows, touched = state.caches, plan.rows, plan.touches
    if plan.shared_memory:
        number_rows(caches.cells, rows.rows_U, touched, plan.copies.number_U)
        state.step = plan.step + 1
        return
    if len(caches.clock_R):
        pushed = (plan.returns, plan.evictions)
        advance_clocks(caches, rows, touched, plan.decision, plan.placement, pushed)
    returned = np.take(plan.copies.number_U, plan.decision.return_unique)
    mark_clean(caches.cells.cell_NW, returned, plan.decision.return_worker)
    apply_step(caches, rows, touched, plan.decision, plan.placement, plan.copies)
    if plan.decision.drop_T.any():
        drop_copies(caches, rows, touched, plan.decision.drop_T)
    if not requeue(caches.eviction, caches.slot_WCF, plan.moves, plan.step):
        raise PlanError(f"step {plan.step}: {len(plan.moves.slot)} moves in the eviction order")
    if len(state.access_R):
        count_lookups(state.access_R, plan.now.batch.rows)
        if plan.step % RANKING_PERIOD == 0:
            state.ranking = ranked_tables(state, int(plan.samples_W.max()))
    if plan.memory is not None:
        _learn(state, plan, plan.memory)
        learn_affinity(state.memory.affinity_NW, caches.cells.number_R, touched, plan.rows.rows_U)
    state.was_hot = plan.now.batch.hot
    state.filled = state.filled or len(state.hot_R) > 0
    state.step = plan.step + 1


def _learn(state: State, plan: Plan, memory: SearchState) -> None:
    """Keep what a dispatch means to do, and learn from what its step took."""
    done = choose_reduced_rows(plan.now, state.setup, state.memory)
    for name in SearchState._fields:
        if name != "affinity_NW":  # as the step leaves it, below
            getattr(state.memory, name)[:] = getattr(memory, name)
    if len(memory.share_W):
        time = step_time(traffic(plan, state.setup), state.setup.cluster)
        rows_WA = touched_rows(plan.touches, plan.rows.arena_U, state.caches.capacity_WA.shape)
        room_W = samples_that_fit(rows_WA, state.caches.capacity_WA, plan.samples_W)
        balance_shares(time, plan.samples_W, state.memory, room_W)
        learn_pace(state.memory, time, done)


def drain_state(state: State, record: int) -> Transfers:
    """The pushes of a drain, carried out on the state: copies stay, clean."""
    transfers = drain_transfers(state, record)
    caches = state.caches
    if len(caches.clock_R):
        clock = caches.clock_WC2[transfers.worker, transfers.slot, CLOCK]
        np.maximum.at(caches.clock_R, transfers.row, clock)
    mark_clean(caches.cells.cell_NW, caches.cells.number_R[transfers.row], transfers.worker)
    return transfers
