"""Sharing-aware dispatch: the cost of sets of rows per worker, over a window of batches.

ESD and Herald price each sample by itself. Here a transfer is paid once per worker and row, a row
that several workers touch in one step is paid by all of them, and the uses of a row in the next
batches count. Batches are dealt when they enter the window and improved in every step until their
own; so the effort of several steps goes into each (docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from embroute.cost.step_time import step_time
from embroute.kernels.array_types import I32, I64
from embroute.kernels.touches import Lookups, touches
from embroute.planner.interfaces import Assignment, Candidate, Dispatch, DispatchContext, WarmStart
from embroute.planner.kernels.apply import learn_affinity
from embroute.planner.plan import Plan, touched_rows, traffic
from embroute.planner.setup import Setup, divide
from embroute.planner.state import SearchState, State
from embroute.policies.dispatch.block import block
from embroute.policies.dispatch.esd import esd
from embroute.policies.embroute.active_workers import (
    REHEARSED,
    check_ranges,
    choose_first_workers,
    choose_workers_again,
    is_comparison_due,
    is_possible,
    least_step_s,
    share_ranges,
    worker_subsets,
)
from embroute.policies.embroute.quotas import balance_shares, clip_shares, samples_that_fit
from embroute.policies.embroute.row_allreduce import choose_reduced_rows, learn_pace
from embroute.policies.embroute.search import (
    SearchOptions,
    WindowProblem,
    build_problem,
    enforce_quotas,
    improve,
    next_state,
    paced,
    prices,
    weights,
)

TRIED = 300  # effort with which crews are tried before the first step


def _excess(context: DispatchContext, worker_S: I32) -> int:
    """Rows by which a dispatch exceeds the caches, at the worker and arena where it is most."""
    now, state = context.window.now, context.state
    offsets = np.ascontiguousarray(now.batch.sample_offsets)
    lookups = Lookups(now.unique_of_lookup, offsets)
    num_rows, capacity_WA = len(context.rows.rows_U), state.caches.capacity_WA
    touched = touches(lookups, worker_S, state.setup.num_workers, num_rows, context.everywhere)
    rows_WA = touched_rows(touched, context.rows.arena_U, capacity_WA.shape)
    return int((rows_WA - capacity_WA).max())


def _plain(context: DispatchContext, search: SearchOptions, quotas_W: I64) -> Iterator[I32]:
    """Dealings that spread rows more: with the same quotas, then with all workers' alike.

    Shares, floors and ceilings that a user names are kept; a crew is not.
    """
    quotas = [quotas_W]
    if search.free and not context.state.setup.shares:
        workers = len(quotas_W)
        range_2W = share_ranges(search, np.arange(workers), workers)
        share_W = clip_shares(np.full(workers, 1 / workers, np.float32), range_2W)
        quotas.append(divide(share_W, len(context.window.now.batch)))
    for quotas_W in quotas:
        same = replace(context, quotas_W=quotas_W)
        yield esd().choose(same).worker_S
        yield block().choose(same).worker_S


def _fits(context: DispatchContext, search: SearchOptions, dealt: WindowProblem) -> I32:
    """The current batch as it is dealt, unless a cache cannot hold the rows of the step."""
    worker_S = dealt.uses.worker_S[: dealt.loads.first_T[1]].copy()
    if _excess(context, worker_S) <= 0:
        return worker_S
    others = _plain(context, search, dealt.loads.quota_TW[0].astype(np.int64))
    return min(others, key=lambda dealt_S: max(0, _excess(context, dealt_S)))


def learn_from_step(state: State, plan: Plan) -> None:
    """Keep the search's state for the next step, and learn from how long this step took."""
    if plan.memory is None:
        return
    # Chosen again as the sync chose: before the memory changes.
    reduction = choose_reduced_rows(plan.now, state.setup, state.memory)
    for name in SearchState._fields:
        if name != "affinity_NW":  # as the step leaves it, below
            getattr(state.memory, name)[:] = getattr(plan.memory, name)
    if len(state.memory.share_W):
        capacity_WA = state.caches.capacity_WA
        time = step_time(traffic(plan, state.setup), state.setup.cluster)
        rows_WA = touched_rows(plan.touches, plan.rows.arena_U, capacity_WA.shape)
        room_W = samples_that_fit(rows_WA, capacity_WA, plan.samples_W)
        balance_shares(time, plan.samples_W, state.memory, room_W)
        learn_pace(state.memory, time, reduction)
    number_R = state.caches.cells.number_R
    learn_affinity(state.memory.affinity_NW, number_R, plan.touches, plan.rows.rows_U)


def search_dispatch(given: SearchOptions) -> Dispatch:
    """Minimise the transfers of all batches of the window, what workers share counted once."""

    def choose(context: DispatchContext) -> Assignment:
        memory, setup = context.state.memory, context.state.setup
        samples = len(context.window.now.batch)
        if setup.num_workers == 1 or not samples:
            return block().choose(context)
        search = paced(given, memory, samples)
        if not context.window.step and search.free:
            check_ranges(search, setup.num_workers)
        if not context.window.step and search.crew:
            memory = choose_first_workers(context, search)
        elif is_comparison_due(context, search):
            memory = choose_workers_again(context, search)
        price_PAV = prices(setup, weights(memory, search, setup.num_workers))
        if not price_PAV.any():
            return block().choose(context)
        dealt = build_problem(context, memory, search, price_PAV)
        improve(dealt, search, context.window.step)
        enforce_quotas(dealt)
        return Assignment(_fits(context, search, dealt), next_state(dealt, memory))

    ahead, rehearsal = max(1, given.ahead), None
    if given.free and given.changes and not given.crew:
        rehearsal = WarmStart(REHEARSED, partial(_crews, given))
    return Dispatch(
        "sharing",
        choose,
        learn_from_step,
        ahead=ahead,
        timed=given.timed,
        free=given.free,
        warm_start=rehearsal,
    )


def _crews(given: SearchOptions, setup: Setup, samples: int) -> list[Candidate]:
    """A run with each crew, none where a user says who gets how many samples."""
    if setup.shares or setup.num_workers == 1:
        return []
    check_ranges(given, setup.num_workers)
    ways = []
    for crew in worker_subsets(setup):
        if is_possible(crew, given, setup):
            own = replace(given, crew=tuple(crew.tolist()))
            trial = replace(own, effort=min(TRIED, given.effort), paced=False, changes=False)
            ways.append(
                Candidate(
                    search_dispatch(trial), search_dispatch(own), least_step_s(crew, samples, setup)
                )
            )
    return ways
