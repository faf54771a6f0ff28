"""A plan: everything the ranks need to carry out one step, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.cost.step_time import FLOAT_BYTES, INDEX_BYTES, Traffic, pipelined
from embroute.data.window import Indexed
from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import FILL, GRADIENT, HIT, NEW, REPLICA, UNHELD, UPDATE_PUSH
from embroute.kernels.touches import Touches
from embroute.planner.kernels.cache import CachedCopies, Placement
from embroute.planner.kernels.eviction import EvictionMoves
from embroute.planner.kernels.transfers import Decision, StepRows, Transfers, empty_counts, tally
from embroute.planner.setup import Setup
from embroute.planner.state import Memory, State, dirty_rows


class CacheMoves(NamedTuple):
    """Changes of the caches before a step computes."""

    placement: Placement
    returns: Transfers
    evictions: Transfers
    pulls: Transfers
    moves: EvictionMoves


@dataclass(frozen=True)
class Plan:
    """One step, down to slots. Axes: S samples, T touches, U distinct rows.

    Order: `returns` and `evictions` leave, `pulls` arrive, the step computes, `updates` leave.
    """

    step: int
    now: Indexed
    worker_S: I32
    rows: StepRows
    touches: Touches
    copies: CachedCopies
    decision: Decision
    placement: Placement
    returns: Transfers
    evictions: Transfers
    pulls: Transfers
    updates: Transfers
    moves: EvictionMoves
    replica_UW: I32  # slots at all workers of the rows in replicated_U
    lesson: Memory | None  # `Assignment.lesson` of the dispatch, for its `learn`
    counted: Traffic | None = None  # of a pipelined plan: the traffic that says how many chunks
    shared_memory: bool = False  # rows have no slots: they are read and trained at the shards
    check_bytes: int = 0  # of each copy that the step touches, accounted but not sent

    @property
    def samples_W(self) -> I64:
        """Samples of each worker."""
        return np.bincount(self.worker_S, minlength=len(self.touches.first_W) - 1)

    @property
    def chunks(self) -> int:
        """Chunks of the urgent pushes and of the late pulls."""
        return self.counted.chunks if self.counted is not None else 1

    @property
    def replicated_U(self) -> I64:
        """Distinct rows whose gradients are all-reduced, as indices into the step's rows."""
        return replicated(self.touches, self.decision)

    @property
    def hits(self) -> tuple[int, int]:
        """Touches that needed no pull, and all touches."""
        looked_up = self.decision.mode_T != FILL
        no_pull = (self.decision.need_T == HIT) | (self.decision.need_T == NEW)
        return int((looked_up & no_pull).sum()), int(looked_up.sum())

    @property
    def initialised_T(self) -> npt.NDArray[np.intp]:
        """Touches whose rows the workers initialise: no step has trained them."""
        return np.flatnonzero(self.decision.need_T == NEW)


def replicated(touches: Touches, decision: Decision) -> I64:
    """Distinct rows, as indices, whose gradients are all-reduced."""
    return np.unique(touches.unique_T[decision.mode_T == REPLICA]).astype(np.int64)


def touched_rows(touched: Touches, arena_U: U8, shape: tuple[int, ...]) -> I64:
    """Distinct rows of a step at each worker, by arena."""
    cache_T = touched.worker_T * shape[1] + arena_U[touched.unique_T]
    return np.bincount(cache_T, minlength=shape[0] * shape[1]).reshape(shape)


def _sample_bytes(plan: Plan, setup: Setup) -> I64:
    """Labels, dense features, look-ups and bag lengths sent to each worker."""
    batch, workers = plan.now.batch, setup.num_workers
    per_sample = FLOAT_BYTES * (batch.dense.shape[1] + (1 if len(batch.label) else 0))
    if setup.schema.has_bags:
        per_sample += INDEX_BYTES * batch.num_fields
    lookups_S = np.diff(batch.sample_offsets)
    lookups_W = np.bincount(plan.worker_S, weights=lookups_S, minlength=workers)
    sizes: I64 = per_sample * plan.samples_W
    return sizes + INDEX_BYTES * lookups_W.astype(np.int64)


def _check_bytes(plan: Plan, num_shards: int) -> I64:
    """Bytes by worker and shard that ask whether the copies a step touches are valid."""
    worker_T, need_T = plan.touches.worker_T, plan.decision.need_T
    link_T = worker_T * num_shards + plan.rows.rows_U[plan.touches.unique_T] % num_shards
    num_workers = len(plan.touches.first_W) - 1
    checks = np.bincount(link_T[(need_T & UNHELD) == 0], minlength=num_workers * num_shards)
    return plan.check_bytes * checks.reshape(num_workers, num_shards)


def with_chunks(plan: Plan, setup: Setup) -> Plan:
    """The plan with its traffic, and with the number of chunks that suits it."""
    return replace(plan, counted=pipelined(traffic(plan, setup), setup.cluster))


def traffic(plan: Plan, setup: Setup) -> Traffic:
    """Rows and bytes a plan moves, by worker, shard, kind and phase."""
    if plan.counted is not None:
        return plan.counted
    workers, shards = setup.num_workers, setup.cluster.num_shards
    rows_WKIP, bytes_WKIP = empty_counts(workers, shards), empty_counts(workers, shards)
    for transfers in (plan.returns, plan.evictions, plan.pulls, plan.updates):
        tally(transfers, setup.record_bytes_XA, rows_WKIP, bytes_WKIP)
    reduced_U = plan.replicated_U
    init_W = np.bincount(plan.touches.worker_T[plan.initialised_T], minlength=workers)
    # A worker's plan has an entry per transfer, the slot of each touch, slot and touch of each
    # replicated row, slot and number of each row to initialise.
    entries_W = rows_WKIP.sum((1, 2, 3)) + np.diff(plan.touches.first_W)
    entries_W += 2 * len(reduced_U) + 2 * init_W
    return Traffic(
        rows_WKIP=rows_WKIP,
        bytes_WKIP=bytes_WKIP,
        samples_W=plan.samples_W,
        sample_bytes_W=_sample_bytes(plan, setup),
        plan_bytes_W=INDEX_BYTES * entries_W,
        plan_bytes_K=INDEX_BYTES * rows_WKIP.sum((0, 2, 3)),
        hot_rows=len(reduced_U),
        hot_bytes=int(setup.record_bytes_XA[GRADIENT][plan.rows.arena_U[reduced_U]].sum()),
        check_bytes_WK=_check_bytes(plan, shards),
    )


def drain_transfers(state: State, record: int) -> Transfers:
    """Pushes of every unpushed update, worker by worker in slot order."""
    dirty = [dirty_rows(state, worker) for worker in range(state.setup.num_workers)]
    counts = [len(rows) for rows, _ in dirty]
    rows = np.concatenate([rows for rows, _ in dirty])
    return Transfers(
        worker=np.repeat(np.arange(len(dirty), dtype=np.int32), counts),
        row=rows,
        slot=np.concatenate([slots for _, slots in dirty]),
        arena=state.setup.arena_of(rows),
        kind=np.full(len(rows), UPDATE_PUSH, np.uint8),
        record=np.full(len(rows), record, np.uint8),
        phase=np.zeros(len(rows), np.uint8),
    )


def row_bytes_W(transfers: Transfers, setup: Setup) -> I64:
    """Bytes of some transfers by worker."""
    size = setup.record_bytes_XA[transfers.record, transfers.arena]
    return np.bincount(transfers.worker, size, setup.num_workers).astype(np.int64)
