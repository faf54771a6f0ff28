"""A lower bound on the traffic of any exact policy, for every dispatch and eviction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from embroute.data.batch import Batch
from embroute.data.window import Horizon
from embroute.kernels.array_types import I64
from embroute.kernels.codes import GRADIENT, VALUE
from embroute.planner.setup import Setup


@dataclass(frozen=True)
class Bound:
    """Least rows and bytes of a span, and the least cost and step time that they imply."""

    pulls_A: I64
    pushes_A: I64
    pull_bytes: float
    push_bytes: float
    transmission_cost_s: float
    step_time_s: float


def kept_uses(uses_T: I64, next_uses: list[I64], capacity: int) -> int:
    """Most uses that find their row still cached, in one pool of `capacity` rows (see lower_bound).

    `uses_T[t]`: rows used in step t. `next_uses[t]`: of the rows used last in step t, the number
    used next in each step; entry 0 of `next_uses` also counts rows used before the span.
    """
    steps = len(uses_T)
    open_until = np.zeros(steps + 1, np.int64)  # rows kept for a use at step t
    kept = 0
    for step in range(steps):
        kept += int(open_until[step])
        open_until[step] = 0
        # Too many rows: drop those with the farthest next use first (Belady).
        excess = int(uses_T[step] + open_until.sum()) - capacity
        farthest = steps
        while excess > 0 and farthest > step:
            dropped = min(excess, int(open_until[farthest]))
            open_until[farthest] -= dropped
            excess -= dropped
            farthest -= 1
        open_until[: len(next_uses[step])] += next_uses[step]
    return kept


@dataclass(frozen=True)
class _Uses:
    """Uses of the measured steps by arena."""

    per_step_TA: I64  # distinct rows
    next_TAT: I64  # step, arena, step of the next use
    before_AT: I64  # rows of the warm-up, by step of their first measured use
    new_A: I64  # rows that neither the warm-up nor an earlier step has used
    samples: float  # mean of a step


def _collect(batches: Iterator[Batch], setup: Setup, warmup: int) -> _Uses:
    """Count the uses of a run."""
    horizon = Horizon(setup.schema.num_rows, 1)
    rows_T, samples_T = [], []
    for batch in batches:
        horizon.push(batch)
        rows_T.append(horizon.pop().now.rows_U)
        samples_T.append(len(batch))
    steps, arenas = max(0, len(rows_T) - warmup), len(setup.arenas)
    per_step_TA = np.zeros((steps, arenas), np.int64)
    next_TAT = np.zeros((steps, arenas, steps + 1), np.int64)
    before_AT, new_A = np.zeros((arenas, steps + 1), np.int64), np.zeros(arenas, np.int64)
    never = np.iinfo(np.int64).min
    last_R = np.full(setup.schema.num_rows, never, np.int64)
    for number, rows_U in enumerate(rows_T):
        step = number - warmup
        arena = setup.arena_of(rows_U)
        last = last_R[rows_U]
        last_R[rows_U] = step
        if step < 0:
            continue
        per_step_TA[step] = np.bincount(arena, minlength=arenas)
        measured = last >= 0
        np.add.at(next_TAT[:, :, step], (last[measured], arena[measured]), 1)
        earlier = (last < 0) & (last >= -warmup)
        before_AT[:, step] += np.bincount(arena[earlier], minlength=arenas)
        new_A += np.bincount(arena[last == never], minlength=arenas)
    samples = float(np.mean(samples_T[warmup:])) if steps else 0.0
    return _Uses(per_step_TA, next_TAT, before_AT, new_A, samples)


def lower_bound(batches: Iterator[Batch], setup: Setup, warmup: int) -> Bound:
    """Least traffic of an exact, order-preserving policy with the same caches.

    Take all n caches as one of n * C rows per arena: no policy caches more. Every use trains its
    row, and an exact read needs the newest value at some worker. So between two uses of a row that
    follow each other, either a worker keeps the row, or its update is pushed and the row is pulled
    again: one pull and one push. In step t the rows used take |U_t| places, so at most
    n * C - |U_t| rows can be kept across it. The choice of rows is a packing of intervals into a
    capacity that varies over time. To drop the intervals that end last, whenever there are too
    many, keeps the most. With k kept among N uses, at least N - k pulls and N - k pushes move.
    Where initial rows follow from the seed, the first use of a row needs no pull. On one host no
    worker needs a copy: rows can be trained where they lie, and nothing has to move.

    The measured span starts from the best state any warm-up could leave: every row used in the
    warm-up may be cached, as far as the capacity of the steps that follow allows. The drain
    difference is counted for policies and here: a row dirty at the start saves its push, a row
    dirty at the end still owes it. Cost: least bytes over the fastest link. Step time: the
    pulls through all links at once or the compute of all workers at once, whichever is longer.
    """
    uses = _collect(batches, setup, warmup)
    steps, arenas = uses.per_step_TA.shape
    if len(setup.cluster.used_hosts) == 1:
        nothing = np.zeros(arenas, np.int64)
        return _price(nothing, nothing, setup, max(1, steps), uses.samples)
    capacity_A = setup.capacity_WA.sum(0)
    moved_A = np.zeros(arenas, np.int64)
    for arena in range(arenas):
        per_step = uses.per_step_TA[:, arena]
        # A step without uses in front of the span holds the rows that the warm-up left.
        shifted = [uses.before_AT[arena], *uses.next_TAT[:, arena]]
        following = [np.concatenate([np.zeros(1, np.int64), counts]) for counts in shifted]
        with_start = np.concatenate([np.zeros(1, np.int64), per_step])
        kept = kept_uses(with_start, following, int(capacity_A[arena]))
        moved_A[arena] = per_step.sum() - kept
    pulls_A = moved_A - uses.new_A if setup.seeded else moved_A
    return _price(pulls_A, moved_A, setup, max(1, steps), uses.samples)


def _price(pulls_A: I64, pushes_A: I64, setup: Setup, steps: int, samples: float) -> Bound:
    """The least cost and time at which the network could carry the moved rows."""
    cluster, sizes = setup.cluster, setup.record_bytes_XA
    pull_bytes = float((pulls_A * sizes[VALUE]).sum())
    push_bytes = float((pushes_A * sizes[GRADIENT]).sum())
    up = np.array([host.up_bytes_s for host in cluster.hosts])
    down = np.array([host.down_bytes_s for host in cluster.hosts])
    local = not cluster.crosses_WK.all()
    cost = pull_bytes / down[cluster.host_W].max() + push_bytes / up[cluster.host_W].max()
    through_workers = pull_bytes / down[np.unique(cluster.host_W)].sum()
    through_shards = pull_bytes / up[np.unique(cluster.shards)].sum()
    transfer_s = 0.0 if local else max(through_workers, through_shards) / steps
    compute_s = 0.0
    if cluster.compute_s_per_sample > 0:
        compute_s = samples / float((1 / cluster.compute_s_W).sum())
    return Bound(
        pulls_A=pulls_A,
        pushes_A=pushes_A,
        pull_bytes=pull_bytes,
        push_bytes=push_bytes,
        transmission_cost_s=0.0 if local else cost,
        step_time_s=max(transfer_s, compute_s),
    )
