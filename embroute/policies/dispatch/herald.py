"""Herald's location-aware allocation (NSDI 2024; the allocator is called LAIA)."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.config.signature import Between
from embroute.cost.step_time import step_time
from embroute.kernels.array_types import F64, I32, I64, Bools
from embroute.kernels.codes import FRESH, NO_HOLDER, ROW
from embroute.kernels.jit import kernel
from embroute.planner.interfaces import Assignment, Dispatch, DispatchContext, PartMemory, RunStart
from embroute.planner.plan import Plan, traffic
from embroute.planner.state import State, held_slots


@kernel
def _greedy(score_SW: I32, quotas_W: I64, first: int) -> I32:
    """Each sample in order to the highest score with room; among equals, in turn from `first`."""
    num_samples, num_workers = score_SW.shape
    left_W = quotas_W.copy()
    worker_S = np.empty(num_samples, np.int32)
    for s in range(num_samples):
        best = -1
        for turn in range(num_workers):
            w = first + turn
            w -= num_workers if w >= num_workers else 0
            if left_W[w] > 0 and (best < 0 or score_SW[s, w] > score_SW[s, best]):
                best = w
        worker_S[s] = best
        left_W[best] -= 1
    return worker_S


@kernel
def _add_fresh(copies_UW: I32, u: int, score_SW: I32, s: int) -> None:
    for w in range(copies_UW.shape[1]):
        score_SW[s, w] += (copies_UW[u, w] // FRESH) & 1  # the FRESH bit as 0 or 1


@kernel
def _score(copies_UW: I32, only_U: I32, unique_of_lookup: I32, sample_offsets: I64) -> I32:
    """Number of a sample's rows that each worker has FRESH."""
    num_workers = copies_UW.shape[1]
    score_SW = np.zeros((len(sample_offsets) - 1, num_workers), np.int32)
    counted_U = np.full(len(only_U), -1, np.int32)  # a row that a bag holds twice counts once
    for s in range(len(score_SW)):
        for i in range(sample_offsets[s], sample_offsets[s + 1]):
            u = unique_of_lookup[i]
            if u < 0 or only_U[u] == NO_HOLDER or counted_U[u] == s:
                continue
            counted_U[u] = s
            if only_U[u] >= 0:
                score_SW[s, only_U[u]] += (copies_UW[u, only_U[u]] // FRESH) & 1
            else:
                _add_fresh(copies_UW, u, score_SW, s)
    return score_SW


ScoredTables = Annotated[int, Between(1)] | Literal["all", "auto"]
ScoreTies = Literal["rotate", "first"]


def herald(tables: ScoredTables = "all", ties: ScoreTies = "rotate") -> Dispatch:
    """Each sample to the worker that has most of its rows up to date.

    `tables`: score only that many tables, those with the highest degree of infrequency. `auto`
    scores as many as a core has time for in a step. The times are those of the cost model, not of
    a clock, so that plans are the same in every run: that is a choice of ours.
    `ties`: `rotate` starts at another worker each step (the paper's rule); `first` always prefers
    the lowest worker number, so that samples of uncached rows keep meeting on the same workers.
    """

    def choose(context: DispatchContext) -> Assignment:
        now, only_U = context.window.now, context.copies.only_U
        if tables != "all":
            left_out = ~_is_scored(context, tables)
            only_U = np.where(left_out, NO_HOLDER, only_U).astype(np.int32)
        offsets = now.batch.sample_offsets
        score_SW = _score(context.copies.copies_UW, only_U, now.unique_of_lookup, offsets)
        first = context.window.step % len(context.quotas_W) if ties == "rotate" else 0
        return Assignment(_greedy(score_SW, context.quotas_W, first))

    learn = learn_step_time if tables == "auto" else learn_infrequency
    memory = PartMemory(Infrequency, _nothing_counted, learn)
    return Dispatch("herald", choose, None if tables == "all" else memory)


def _is_scored(context: DispatchContext, tables: int | Literal["auto"]) -> Bools:
    """Whether the table of each row is scored. Axis K: tables by rank."""
    memory, setup = context.state.memory(Infrequency), context.state.setup
    table_U = setup.table_of(context.rows.rows_U)
    if tables == "auto":
        looked_up = context.window.now.unique_of_lookup
        of_lookup = table_U[looked_up[looked_up >= 0]]
        lookups_K = np.bincount(of_lookup, minlength=len(memory.ranking))[memory.ranking]
        tables = tables_in_time(lookups_K, float(memory.step_s_1[0]))
    return np.isin(table_U, memory.ranking[:tables])


def tables_in_time(lookups_K: I64, step_s: float) -> int:
    """The most tables with which a plan takes no longer than a step, but at least one."""
    spare_s = step_s - lookups_K.sum() / LOOKUPS_PLANNED_PER_S
    scores_s = np.cumsum(lookups_K) / LOOKUPS_SCORED_PER_S
    return max(1, int(np.searchsorted(scores_s, spare_s, side="right")))


RANKING_PERIOD = 64  # steps between two rankings; a ranking reads every cached row
# Of one core, about (benchmarks/results/decisions-2026-11-16.md: `herald` less `vanilla`).
LOOKUPS_SCORED_PER_S = 90e6
LOOKUPS_PLANNED_PER_S = 10e6  # without scores, the window included
STEP_SMOOTHING = 0.2  # weight of the last step in the mean


class Infrequency(NamedTuple):
    """Look-ups of each row so far, and the tables in the order of their infrequency."""

    access_R: I32
    ranking: npt.NDArray[np.intp]
    step_s_1: F64  # mean seconds of recent steps; 0 before the first


def _nothing_counted(start: RunStart) -> Infrequency:
    schema = start.setup.schema
    access_R, ranking = np.zeros(schema.num_rows, np.int32), np.arange(len(schema.tables))
    return Infrequency(access_R, ranking, np.zeros(1))


@kernel
def _count_lookups(access_R: I32, rows: I64) -> None:
    for i in range(len(rows)):
        if rows[i] >= 0:
            access_R[rows[i]] += 1


def learn_infrequency(state: State, plan: Plan) -> None:
    """Count the step's look-ups by row; rank the tables now and then."""
    memory = state.memory(Infrequency)
    _count_lookups(memory.access_R, plan.now.batch.rows)
    if plan.step % RANKING_PERIOD == 0:
        memory.ranking[:] = ranked_tables(state, int(plan.samples_W.max()))


def learn_step_time(state: State, plan: Plan) -> None:
    """Learn infrequency, and how long steps take."""
    learn_infrequency(state, plan)
    cluster, mean_1 = state.setup.cluster, state.memory(Infrequency).step_s_1
    took_s = step_time(traffic(plan, state.setup), cluster).total_s
    mean_1 += (STEP_SMOOTHING if mean_1[0] else 1) * (took_s - mean_1)


def degrees(state: State, samples_per_worker: int) -> F64:
    """Per table, the share of cached rows looked up less often than one worker has samples.

    The paper counts look-ups per epoch; counts of the run so far stand in for them.
    """
    num_tables = len(state.setup.schema.tables)
    cached, rare = np.zeros(num_tables), np.zeros(num_tables)
    access_R = state.memory(Infrequency).access_R
    for worker in range(state.setup.num_workers):
        slots, _ = held_slots(state, worker)
        rows = state.caches.slot_WCF[worker, slots, ROW].astype(np.int64)
        tables = state.setup.table_of(rows)
        cached += np.bincount(tables, minlength=num_tables)
        seldom = access_R[rows] < samples_per_worker
        rare += np.bincount(tables[seldom], minlength=num_tables)
    return np.where(cached > 0, rare / np.maximum(cached, 1), 1.0)


def ranked_tables(state: State, samples_per_worker: int) -> npt.NDArray[np.intp]:
    """Tables, the highest degree of infrequency first."""
    return np.argsort(-degrees(state, samples_per_worker), kind="stable")
