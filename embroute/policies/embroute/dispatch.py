"""Sharing-aware dispatch: costs of sets of workers per row, over a window of batches.

ESD and Herald price each sample by itself. Here a transfer is paid once per worker and row, a row
that several workers touch in one step is paid by all of them, and later uses count. A batch is
dispatched when it enters the window, and improved in every step until its own. So each batch gets
the effort of several steps (docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from embroute.cost.step_time import step_time
from embroute.kernels.array_types import I32, I64
from embroute.kernels.touches import Lookups, touches
from embroute.planner.interfaces import (
    Assignment,
    Candidate,
    Dispatch,
    DispatchContext,
    PartMemory,
    WarmStart,
)
from embroute.planner.plan import Plan, touched_rows, traffic
from embroute.planner.setup import Setup, split_quotas
from embroute.planner.state import State
from embroute.policies.dispatch.block import block
from embroute.policies.dispatch.esd import esd
from embroute.policies.embroute.active_workers import (
    WARM_START_STEPS,
    check_ranges,
    choose_first_workers,
    choose_workers_again,
    is_comparison_due,
    is_possible,
    least_step_s,
    share_ranges,
    worker_subsets,
)
from embroute.policies.embroute.problem import (
    WindowProblem,
    build_problem,
    pace_effort,
    prices,
    second_weights,
)
from embroute.policies.embroute.quotas import balance_shares, clip_shares, samples_that_fit
from embroute.policies.embroute.row_allreduce import choose_reduced_rows, learn_pace
from embroute.policies.embroute.search import anneal_window, enforce_quotas, next_state
from embroute.policies.embroute.search_state import (
    SearchOptions,
    SearchState,
    first_search,
    learn_affinity,
)

WARM_START_EFFORT = 300  # with which subsets of workers are simulated before the first step


def _overflow(context: DispatchContext, worker_S: I32) -> int:
    """Rows by which a dispatch exceeds the fullest cache; negative if all caches have room."""
    now, state = context.window.now, context.state
    offsets = np.ascontiguousarray(now.batch.sample_offsets)
    lookups = Lookups(now.unique_of_lookup, offsets)
    num_rows, capacity_WA = len(context.rows.rows_U), state.caches.capacity_WA
    touched = touches(lookups, worker_S, state.setup.num_workers, num_rows, context.everywhere)
    rows_WA = touched_rows(touched, context.rows.arena_U, capacity_WA.shape)
    return int((rows_WA - capacity_WA).max())


def _fallbacks(context: DispatchContext, options: SearchOptions, quotas_W: I64) -> Iterator[I32]:
    """Dispatches that spread rows more: with the same quotas, then in proportion to the caches.

    Shares, floors and ceilings of the user are kept; the choice of active workers is not.
    """
    quotas = [quotas_W]
    if options.free_quotas and not context.state.setup.shares:
        workers = len(quotas_W)
        range_2W = share_ranges(options, np.arange(workers), workers)
        rows_W = np.maximum(1, context.state.setup.cache_rows_W)
        share_W = clip_shares((rows_W / rows_W.sum()).astype(np.float32), range_2W)
        quotas.append(split_quotas(share_W, len(context.window.now.batch)))
    for quotas_W in quotas:
        quota_context = replace(context, quotas_W=quotas_W)
        yield esd().choose(quota_context).worker_S
        yield block().choose(quota_context).worker_S


def _dispatch_that_fits(
    context: DispatchContext, options: SearchOptions, problem: WindowProblem
) -> I32:
    """The dispatch of the current batch; a fallback if a cache cannot hold the rows of the step."""
    worker_S = problem.uses.worker_S[: problem.loads.first_T[1]].copy()
    if _overflow(context, worker_S) <= 0:
        return worker_S
    fallbacks = _fallbacks(context, options, problem.loads.quota_TW[0].astype(np.int64))
    return min(fallbacks, key=lambda fallback_S: max(0, _overflow(context, fallback_S)))


def learn_from_step(state: State, plan: Plan) -> None:
    """Keep the search's state for the next step, and learn from how long this step took."""
    lesson, memory = plan.lesson, state.memory(SearchState)
    if lesson is None:
        return
    # Chosen again as the sync chose: before the memory changes.
    reduction = choose_reduced_rows(plan.now, state.setup, memory)
    for name, array in lesson._asdict().items():
        if name != "affinity_NW":  # as the step leaves it, below
            getattr(memory, name)[:] = array
    if len(memory.share_W):
        capacity_WA = state.caches.capacity_WA
        time = step_time(traffic(plan, state.setup), state.setup.cluster)
        rows_WA = touched_rows(plan.touches, plan.rows.arena_U, capacity_WA.shape)
        room_W = samples_that_fit(rows_WA, capacity_WA, plan.samples_W)
        balance_shares(time, plan.samples_W, memory, room_W)
        learn_pace(memory, time, reduction)
    number_R = state.caches.cells.number_R
    learn_affinity(memory.affinity_NW, number_R, plan.touches, plan.rows.rows_U)


def search_dispatch(options: SearchOptions) -> Dispatch:
    """Minimise the transfers of all batches of the window, counting shared rows once."""

    def choose(context: DispatchContext) -> Assignment:
        memory, setup = context.state.memory(SearchState), context.state.setup
        step = context.window.step
        samples = len(context.window.now.batch)
        if setup.num_workers == 1 or not samples:
            return block().choose(context)
        step_options = pace_effort(options, memory, samples)
        if not step and options.free_quotas:
            check_ranges(options, setup.num_workers)
        if not step and options.initial_workers:
            memory = choose_first_workers(context, step_options)
        elif is_comparison_due(context, step_options):
            memory = choose_workers_again(context, step_options)
        price_PCV = prices(setup, second_weights(memory, setup.num_workers))
        if not price_PCV.any():
            return block().choose(context)
        problem = build_problem(context, memory, step_options, price_PCV)
        anneal_window(problem, step_options, step)
        enforce_quotas(problem)
        worker_S = _dispatch_that_fits(context, step_options, problem)
        return Assignment(worker_S, next_state(problem, memory))

    warm_start = None
    if options.free_quotas and options.change_workers and not options.initial_workers:
        warm_start = WarmStart(WARM_START_STEPS, partial(_candidates, options))
    return Dispatch(
        "sharing",
        choose,
        PartMemory(SearchState, lambda start: first_search(start.setup, options), learn_from_step),
        lookahead=max(1, options.ahead),
        free_quotas=options.free_quotas,
        warm_start=warm_start,
    )


def _candidates(options: SearchOptions, setup: Setup, samples: int) -> list[Candidate]:
    """One start for each subset of workers; none where a user fixes the shares."""
    if setup.shares or setup.num_workers == 1:
        return []
    check_ranges(options, setup.num_workers)
    candidates = []
    for active in worker_subsets(setup):
        if is_possible(active, options, setup):
            chosen = replace(options, initial_workers=tuple(active.tolist()))
            effort = min(WARM_START_EFFORT, options.effort)
            trial = replace(chosen, effort=effort, paced=False, change_workers=False)
            candidates.append(
                Candidate(
                    trial=search_dispatch(trial),
                    dispatch=search_dispatch(chosen),
                    least_s=least_step_s(active, samples, setup),
                )
            )
    return candidates
