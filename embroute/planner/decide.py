"""The planner's two verbs: `plan_step` decides a step without a change, `advance` changes state."""

from __future__ import annotations

import numpy as np

from embroute.data.window import Window
from embroute.kernels.array_types import I32
from embroute.kernels.codes import NEVER, REPLICA, SLOT_MASK
from embroute.kernels.touches import Lookups, touches
from embroute.planner.interfaces import Assignment, DispatchContext, ExtraRows, Policy, SyncContext
from embroute.planner.kernels.apply import mark_clean
from embroute.planner.kernels.cache import Placement, touch_cells
from embroute.planner.kernels.transfers import Decision, StepRows, Transfers, updates
from embroute.planner.laws import check, check_assignment, check_decision
from embroute.planner.plan import Plan, drain_transfers, replicated, with_chunks
from embroute.planner.row_store import row_store_of
from embroute.planner.state import State, for_decision, naming_part


def _step_rows(window: Window, extra: ExtraRows, state: State, waits: bool) -> StepRows:
    """The batch's distinct rows, then the rows that a sync adds.

    Without `waits`, no transfer waits for an update: as if no step near used the rows.
    """
    now, arena_of = window.now, state.setup.arena_of
    rows_U, before_U, later_U = now.rows_U, now.before_U, now.later_U
    if not waits:
        before_U, later_U = np.full_like(before_U, -1), np.full_like(later_U, NEVER)
    if len(extra.needed_next):
        later_U = later_U.copy()
        later_U[extra.needed_next] = window.step + 1
    if len(extra.rows):
        rows_U = np.concatenate([rows_U, extra.rows])
        # Added rows move when replicas are filled or pushed, which waits for the step before.
        added = np.full(len(extra.rows), window.step - 1, np.int32)
        before_U = np.concatenate([before_U, added])
        later_U = np.concatenate([later_U, np.full_like(added, -1)])
    return StepRows(rows_U, before_U, later_U, arena_of(rows_U), window.step)


def _replica_slots(context: SyncContext, decision: Decision, placement: Placement) -> I32:
    """Where every worker keeps the rows whose gradients the step all-reduces."""
    reduced_T = np.flatnonzero(decision.mode_T == REPLICA)
    if not len(reduced_T):
        return np.empty((0, context.copies_UW.shape[1]), np.int32)
    touches_of_step = context.touches
    chosen = replicated(touches_of_step, decision)
    slots_UW = (context.copies_UW[chosen] & SLOT_MASK) - 1
    # Touches of this step may have other slots than the copies that were there before it.
    position = np.searchsorted(chosen, touches_of_step.unique_T[reduced_T])
    slots_UW[position, touches_of_step.worker_T[reduced_T]] = placement.slot_T[reduced_T]
    return slots_UW


def _assign(policy: Policy, window: Window, state: State) -> tuple[SyncContext, Assignment]:
    """Assign the samples to workers and list the touches."""
    sync, dispatch = policy.sync, policy.dispatch
    with naming_part(policy.name, f"step {window.step}, sync {sync.name}"):
        extra = sync.extra(window, state)
    rows = _step_rows(window, extra, state, sync.waits)
    copies = row_store_of(policy).find_copies(state.caches.cells, rows.rows_U)
    now, readable = window.now, copies
    if dispatch.looks_at_caches:
        readable = sync.readable(state, rows, copies)
    quotas_W = state.setup.quotas(len(now.batch))
    seen = DispatchContext(window, state, rows, readable, quotas_W, extra.everywhere)
    with naming_part(policy.name, f"step {window.step}, choose of dispatch {dispatch.name}"):
        assignment = dispatch.choose(seen)
    # A dispatch may have changed its own array of quotas.
    check_assignment(policy, window.step, assignment, state.setup.quotas(len(now.batch)))
    lookups = Lookups(now.unique_of_lookup, np.ascontiguousarray(now.batch.sample_offsets))
    touched = touches(
        lookups, assignment.worker_S, state.setup.num_workers, len(rows.rows_U), extra.everywhere
    )
    cell_T, arena_T = touch_cells(touched, copies.copies_UW, rows.arena_U)
    context = SyncContext(window, state, rows, copies, touched, cell_T, arena_T, extra.everywhere)
    return context, assignment


def plan_step(policy: Policy, window: Window, state: State) -> Plan:
    """Decide one step: dispatch, sync, slots, transfers. Changes nothing but scratch marks."""
    state = for_decision(state)
    context, assignment = _assign(policy, window, state)
    with naming_part(policy.name, f"step {window.step}, decide of sync {policy.sync.name}"):
        decision = policy.sync.decide(context)
    check_decision(policy, context, decision)
    decision = decision._replace(record=policy.sync.record)
    cache_moves = row_store_of(policy).move_rows(policy, context, decision)
    placement = cache_moves.placement
    plan = Plan(
        step=window.step,
        now=window.now,
        worker_S=assignment.worker_S,
        rows=context.rows,
        touches=context.touches,
        copies=context.copies,
        decision=decision,
        placement=placement,
        returns=cache_moves.returns,
        evictions=cache_moves.evictions,
        pulls=cache_moves.pulls,
        updates=updates(context.rows, context.touches, decision, placement),
        moves=cache_moves.moves,
        replica_UW=_replica_slots(context, decision, placement),
        lesson=assignment.lesson,
        shared_memory=policy.sync.shared_memory,
        check_bytes=policy.sync.check_bytes,
    )
    check(plan, state, policy)
    return with_chunks(plan, state.setup) if policy.sync.pipelined else plan


def advance(policy: Policy, state: State, plan: Plan) -> None:
    """Carry a plan out on the state. Only `advance` and `drain_state` change the state."""
    row_store_of(policy).advance(state, plan)
    for memory in policy.memories:
        with naming_part(policy.name, f"step {plan.step}, learn of {memory.kind.__name__}"):
            memory.learn(state, plan)
    state.step = plan.step + 1


def drain_state(policy: Policy, state: State) -> Transfers:
    """The pushes of a drain, carried out on the state: copies stay, clean."""
    transfers = drain_transfers(state, policy.sync.record)
    caches = state.caches
    for memory in policy.memories:
        with naming_part(policy.name, f"step {state.step}, learn_drain of {memory.kind.__name__}"):
            memory.learn_drain(state, transfers)
    mark_clean(caches.cells.cell_NW, caches.cells.number_R[transfers.row], transfers.worker)
    return transfers
