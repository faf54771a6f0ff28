"""Rows whose gradients join the dense all-reduce, where that relieves the slowest link.

A row that k workers share crosses the shards' link k times each way in every step. It crosses the
link of each of these workers twice. If its gradient is all-reduced, the row does not cross the
shards' link at all. But it crosses the link of every worker 2(n-1)/n times, the slowest included.
The most used rows are chosen, as many as make the longer of two times shortest: the time of the
shards' link, and the time of all the rest (docs/policy.md).

Axes: U distinct rows of a batch, T touches, H hot rows by falling use.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from embroute.config.cluster import Cluster
from embroute.cost.step_time import (
    MIN_CHUNK_S,
    StepTime,
    allreduce_seconds,
    link_rates,
    shard_rate,
)
from embroute.data.window import Indexed, Window
from embroute.kernels.array_types import I32, U8, Bools
from embroute.kernels.codes import GRADIENT, HIT, NOTHING, REPLICA
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches
from embroute.planner.interfaces import ExtraRows, Sync, SyncContext
from embroute.planner.kernels.transfers import Decision
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.policies.embroute.search_state import SearchState
from embroute.policies.sync.on_demand import decide_on_demand

WORTHWHILE = 0.97  # of a step's time, at most, for rows to be all-reduced
LEAST_SAMPLES = 2  # of a row, per worker; then all workers are assumed to share the row
REDUCED_SHARE = 0.25  # of the smallest cache that all-reduced rows may take
PACE_SMOOTHING = 0.3  # weight of the last step among those before it
SHARD, REST = 0, 1


class Reduction(NamedTuple):
    """All-reduced rows of a batch, as indices into its distinct ones, and what they change."""

    rows: I32
    saved_s: float  # at the shards' link
    added_s: float  # in the time of everything else; relief of workers' links is negative


class _BytePrices(NamedTuple):
    """Seconds per byte."""

    shard_s: float  # at the shards' link, for each sharer
    ring_s: float  # of an all-reduced byte
    relief_s: float  # that an all-reduced byte saves at a worker's link
    pipelined_relief_s: float  # likewise, where pulls run beside pushes
    slowest_s: float  # on the slowest worker's link


NO_REDUCTION = Reduction(np.empty(0, np.int32), 0.0, 0.0)


@lru_cache(maxsize=64)
def _byte_prices(cluster: Cluster) -> _BytePrices:
    crossing = float(cluster.crosses_WK.mean())
    up, down = link_rates(cluster)
    slowest_s = 1 / float(cluster.bytes_s_W.min())
    # A saving at a link that no worker waits for is no relief: take the fastest link for all.
    return _BytePrices(
        shard_s=crossing / shard_rate(cluster),
        ring_s=allreduce_seconds(1.0, cluster, with_rows=True),
        relief_s=crossing * float((1 / up + 1 / down).min()),
        pipelined_relief_s=crossing * float(np.maximum(1 / up, 1 / down).min()),
        slowest_s=slowest_s,
    )


def _is_known_for_all(memory: SearchState) -> bool:
    """Whether step time is minimised and known, and all workers are active."""
    return len(memory.pace_2) > 0 and memory.pace_2[SHARD] > 0 and bool(memory.range_2W[1].all())


def choose_reduced_rows(batch: Indexed, setup: Setup, memory: SearchState) -> Reduction:
    """The rows of a batch whose gradients are best all-reduced.

    None if shares are fixed and the compute time of a sample is unknown, as in training by default.
    Then the time of a step is unknown too.
    """
    is_unpriced = setup.shares and not setup.cluster.compute_s_per_sample
    if is_unpriced or setup.num_workers == 1 or not _is_known_for_all(memory):
        return NO_REDUCTION
    shard_s, rest_s = memory.pace_2.astype(np.float64)
    price = _byte_prices(setup.cluster)
    if shard_s <= rest_s and price.ring_s >= price.relief_s:
        return NO_REDUCTION  # no worker waits for the shards, and all would wait longer
    looked_up = batch.unique_of_lookup[batch.unique_of_lookup >= 0]
    count_U = np.bincount(looked_up, minlength=len(batch.rows_U))
    again_U = batch.before_U == batch.step - 1
    hot_H = np.flatnonzero((count_U >= LEAST_SAMPLES * setup.num_workers) & again_U)
    hot_H = hot_H[np.argsort(-count_U[hot_H], kind="stable")]
    hot_H = hot_H[: int(REDUCED_SHARE * setup.capacity_WA.min())]
    arena_H = setup.arena_of(batch.rows_U[hot_H])
    size_H = setup.record_bytes_XA[GRADIENT][arena_H].astype(np.float64)
    # Expected workers that touch a row, if each look-up goes to a random worker.
    workers = setup.num_workers
    sharers_H = workers * (1 - (1 - 1 / workers) ** count_U[hot_H])
    # Element i of the sums: the first i rows are all-reduced.
    saved = np.concatenate([[0.0], np.cumsum(size_H * sharers_H * price.shard_s)])
    part_H = sharers_H / workers
    # Without the all-reduce, so many bytes would be enough to pipeline pulls and pushes
    # (`cost.step_time.pipelined`).
    pipelined = float((size_H * part_H).sum()) * price.slowest_s >= 2 * MIN_CHUNK_S
    relief_H = part_H * (price.pipelined_relief_s if pipelined else price.relief_s)
    added = np.concatenate([[0.0], np.cumsum(size_H * (price.ring_s - relief_H))])
    step_s = np.maximum(shard_s - saved, rest_s + added)
    best = int(np.argmin(step_s))
    if step_s[best] > WORTHWHILE * step_s[0]:
        return NO_REDUCTION
    return Reduction(hot_H[:best].astype(np.int32), float(saved[best]), float(added[best]))


def learn_pace(memory: SearchState, time: StepTime, reduction: Reduction) -> None:
    """Learn the time of a step without all-reduced rows, at the shards' link and elsewhere."""
    if not len(memory.pace_2):
        return
    rest_s = time.rest_s - reduction.added_s
    now_2 = np.array([time.shard_s + reduction.saved_s, max(0.0, rest_s)], np.float32)
    known = memory.pace_2[SHARD] > 0
    memory.pace_2[:] += (PACE_SMOOTHING if known else 1) * (now_2 - memory.pace_2)


@kernel
def _complete_rows(touches: Touches, need_T: U8, reduced: I32, num_rows: int) -> Bools:
    """All-reduced rows of a step that every worker has up to date: no copy is returned."""
    out_U = np.zeros(num_rows, np.bool_)
    for u in reduced:
        out_U[u] = True
        for i in range(touches.first_U[u], touches.first_U[u + 1]):
            out_U[u] &= need_T[touches.of_row_T[i]] == HIT
    return out_U


def _decide(context: SyncContext, local_init: bool) -> Decision:
    """As on demand, but gradients of rows that all workers touch are all-reduced."""
    decision, reduced = decide_on_demand(context, local_init), context.everywhere
    if not len(reduced):
        return decision
    reduced_U = np.zeros(len(context.rows.rows_U), np.bool_)
    reduced_U[reduced] = True
    reduced_T = reduced_U[context.touches.unique_T]
    complete_U = _complete_rows(context.touches, decision.need_T, reduced, len(reduced_U))
    returned = ~complete_U[decision.return_unique]
    return decision._replace(
        mode_T=np.where(reduced_T, REPLICA, decision.mode_T).astype(np.uint8),
        push_T=np.where(reduced_T, NOTHING, decision.push_T).astype(np.uint8),
        return_worker=decision.return_worker[returned],
        return_unique=decision.return_unique[returned],
    )


def on_demand_with_allreduce(local_init: bool = True) -> Sync:
    """Push on demand, pipelined; all-reduce rows where that relieves the slowest link."""

    def extra(window: Window, state: State) -> ExtraRows:
        reduced = choose_reduced_rows(window.now, state.setup, state.memory(SearchState)).rows
        return ExtraRows(np.empty(0, np.int64), reduced)

    decide = partial(_decide, local_init=local_init)
    return Sync("reduced", decide, extra, pipelined=True)
