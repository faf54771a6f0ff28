"""Rows whose gradients ride the all-reduce, where that relieves the slowest link.

A row that k workers share crosses the shards' link k times each way in every step, and each of
these workers' links twice. All-reduced, it does not cross the shards' link at all, but 2(n-1)/n
times the link of every worker, the slowest too. Rows are taken from the most used on as long as the
longer of the two, shards and all others, gets shorter (docs/policy.md).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from embroute.config.cluster import Cluster
from embroute.cost.step_time import (
    LEAST_PART_S,
    StepTime,
    allreduce_share_W,
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
from embroute.planner.state import SearchState, State
from embroute.policies.sync.on_demand import decide_on_demand

WORTHWHILE = 0.97  # of a step's time, at most, for rows to be all-reduced
CROWD = 2  # samples for each worker, at least, of a row that all workers are taken to share
REDUCED_SHARE = 0.25  # of the smallest cache that all-reduced rows may take
PACE_SMOOTHING = 0.3  # weight of the last step among those before it
SHARD, REST = 0, 1


class Reduction(NamedTuple):
    """All-reduced rows of a batch, as indices into its distinct ones, and what they change."""

    rows: I32
    saved_s: float  # at the shards' link
    added_s: float  # in the time of everything else; relief of workers' links is negative


class _Prices(NamedTuple):
    """Seconds of a byte at the shards' link for each sharer, of a reduced one, and its relief.

    `parted_s`: the relief where pulls run beside pushes; `slowest_s`: of a byte on that link.
    """

    shard_s: float
    ring_s: float
    relief_s: float
    parted_s: float
    slowest_s: float


NO_REDUCTION = Reduction(np.empty(0, np.int32), 0.0, 0.0)


@lru_cache(maxsize=64)
def _prices(cluster: Cluster) -> _Prices:
    crossing = float(cluster.crosses_WK.mean())
    up, down = link_rates(cluster)
    slowest_s = 1 / float(cluster.bytes_s_W.min())
    # What links without waiting workers spare is no relief: the fastest link is taken for all.
    relief_s = crossing * float((1 / up + 1 / down).min())
    parted_s = crossing * float(np.maximum(1 / up, 1 / down).min())
    ring_s = float(allreduce_share_W(cluster, with_rows=True).max()) * slowest_s
    return _Prices(crossing / shard_rate(cluster), ring_s, relief_s, parted_s, slowest_s)


def _everyone(memory: SearchState) -> bool:
    """Whether step time is minimised, is known, and no worker sits out."""
    return len(memory.pace_2) > 0 and memory.pace_2[SHARD] > 0 and bool(memory.range_2W[1].all())


def choose_reduced_rows(batch: Indexed, setup: Setup, memory: SearchState) -> Reduction:
    """The rows of a batch whose gradients are best all-reduced.

    None where shares are given and nobody knows what a sample takes, as in training by default.
    """
    unknown = setup.shares and not setup.cluster.compute_s_per_sample
    if unknown or setup.num_workers == 1 or not _everyone(memory):
        return NO_REDUCTION
    shard_s, rest_s = memory.pace_2.astype(np.float64)
    price = _prices(setup.cluster)
    if shard_s <= rest_s and price.ring_s >= price.relief_s:
        return NO_REDUCTION  # nobody waits for the shards, and workers would wait longer
    found = batch.unique_of_lookup[batch.unique_of_lookup >= 0]
    count_U = np.bincount(found, minlength=len(batch.rows_U))
    again_U = batch.before_U == batch.step - 1
    hot = np.flatnonzero((count_U >= CROWD * setup.num_workers) & again_U)
    hot = hot[np.argsort(-count_U[hot], kind="stable")]
    hot = hot[: int(REDUCED_SHARE * setup.capacity_WA.min())]
    size = setup.record_bytes_XA[GRADIENT][setup.arena_of(batch.rows_U[hot])].astype(np.float64)
    workers = setup.num_workers
    sharers = workers * (1 - (1 - 1 / workers) ** count_U[hot])
    saved = np.concatenate([[0.0], np.cumsum(size * sharers * price.shard_s)])
    part = sharers / workers
    # So many rows would come while others go, were they not all-reduced (`cost.streamed`).
    parted = float((size * part).sum()) * price.slowest_s >= 2 * LEAST_PART_S
    relief = part * (price.parted_s if parted else price.relief_s)
    added = np.concatenate([[0.0], np.cumsum(size * (price.ring_s - relief))])
    time = np.maximum(shard_s - saved, rest_s + added)
    best = int(np.argmin(time))
    if time[best] > WORTHWHILE * time[0]:
        return NO_REDUCTION
    return Reduction(hot[:best].astype(np.int32), float(saved[best]), float(added[best]))


def learn_pace(memory: SearchState, time: StepTime, done: Reduction) -> None:
    """What a step would have taken at the shards' link and elsewhere, were nothing all-reduced."""
    if not len(memory.pace_2):
        return
    rest_s = time.rest_s - done.added_s
    now_2 = np.array([time.shard_s + done.saved_s, max(0.0, rest_s)], np.float32)
    known = memory.pace_2[SHARD] > 0
    memory.pace_2[:] += (PACE_SMOOTHING if known else 1) * (now_2 - memory.pace_2)


@kernel
def _complete(touches: Touches, need_T: U8, chosen: I32, num_rows: int) -> Bools:
    """Which rows of a step are all-reduced and up to date at every worker: nothing comes home."""
    out_U = np.zeros(num_rows, np.bool_)
    for u in chosen:
        out_U[u] = True
        for i in range(touches.first_U[u], touches.first_U[u + 1]):
            out_U[u] &= need_T[touches.of_row_T[i]] == HIT
    return out_U


def _decide(context: SyncContext, makes: bool) -> Decision:
    """As on demand; the gradients of rows that all workers touch are all-reduced."""
    decision, chosen = decide_on_demand(context, makes), context.everywhere
    if not len(chosen):
        return decision
    reduced_U = np.zeros(len(context.rows.rows_U), np.bool_)
    reduced_U[chosen] = True
    reduced_T = reduced_U[context.touches.unique_T]
    complete_U = _complete(context.touches, decision.need_T, chosen, len(reduced_U))
    home = ~complete_U[decision.return_unique]
    return decision._replace(
        mode_T=np.where(reduced_T, REPLICA, decision.mode_T).astype(np.uint8),
        push_T=np.where(reduced_T, NOTHING, decision.push_T).astype(np.uint8),
        return_worker=decision.return_worker[home],
        return_unique=decision.return_unique[home],
    )


def on_demand_with_allreduce(makes: bool = True) -> Sync:
    """Push on demand, in parts; all-reduce what relieves links that everybody waits for."""

    def extra(window: Window, state: State) -> ExtraRows:
        chosen = choose_reduced_rows(window.now, state.setup, state.memory).rows
        return ExtraRows(np.empty(0, np.int64), chosen)

    decide = partial(_decide, makes=makes)
    return Sync("reduced", decide, extra, replicates=True, pipelined=True, local_init=makes)
