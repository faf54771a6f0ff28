"""A plan: everything the ranks need to carry out one step, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.cost.step_time import FLOAT_BYTES, INDEX_BYTES, Traffic, pipelined
from embroute.data.window import Indexed
from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import FILL, GRADIENT, HIT, NEW, REPLICA, UPDATE_PUSH
from embroute.kernels.touches import Touches
from embroute.planner.kernels.cache import CachedCopies, Placement
from embroute.planner.kernels.eviction import EvictionMoves
from embroute.planner.kernels.transfers import Decision, StepRows, Transfers, empty_counts, tally
from embroute.planner.setup import Setup
from embroute.planner.state import SearchState, State, dirty_rows


class PlanError(RuntimeError):
    """A plan that breaks a law: a fault of a policy, never of its user."""


class CacheMoves(NamedTuple):
    """What a step does to caches before it computes."""

    placement: Placement
    returns: Transfers
    evictions: Transfers
    pulls: Transfers
    moves: EvictionMoves


@dataclass(frozen=True)
class Plan:
    """One step, down to slots. Axes: S samples, T touches, U distinct rows.

    Order: `returns` come home, `pulls` arrive, the step computes, `updates` leave.
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
    memory: SearchState | None  # what the dispatch will want to know in the next step
    counted: Traffic | None = None  # what it moves, where that says in how many parts
    shared_memory: bool = False  # rows have no slots: they are read and trained at the shards

    @property
    def slot_of_lookup(self) -> I32:
        """Slot of every look-up, samples ordered by worker; -1 for padding."""
        touch = self.touches.touch_of_lookup
        if not len(self.placement.slot_T):
            return np.full(len(touch), -1, np.int32)
        return np.where(touch >= 0, self.placement.slot_T[touch], -1).astype(np.int32)

    @property
    def samples_W(self) -> I64:
        """Samples of each worker."""
        return np.bincount(self.worker_S, minlength=len(self.touches.first_W) - 1)

    @property
    def chunks(self) -> int:
        """Parts in which urgent pushes and late pulls move."""
        return self.counted.chunks if self.counted is not None else 1

    @property
    def replicated_U(self) -> I64:
        """Distinct rows whose gradients are all-reduced, as indices into the step's rows."""
        return replicated(self.touches, self.decision)

    @property
    def hits(self) -> tuple[int, int]:
        """Touches that needed no pull, and all touches."""
        real = self.decision.mode_T != FILL
        at_hand = (self.decision.need_T == HIT) | (self.decision.need_T == NEW)
        return int((real & at_hand).sum()), int(real.sum())

    @property
    def initialised_T(self) -> npt.NDArray[np.intp]:
        """Touches whose rows the workers make: nobody has trained them before."""
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


def with_chunks(plan: Plan, setup: Setup) -> Plan:
    """The plan with what it moves counted, and the parts in which that is best moved."""
    return replace(plan, counted=pipelined(traffic(plan, setup), setup.cluster))


def traffic(plan: Plan, setup: Setup) -> Traffic:
    """Rows and bytes a plan moves, by worker, shard, kind and phase."""
    if plan.counted is not None:
        return plan.counted
    workers, shards = setup.num_workers, setup.cluster.num_shards
    rows, sizes = empty_counts(workers, shards), empty_counts(workers, shards)
    entries_W, entries_K = np.zeros(workers, np.int64), np.zeros(shards, np.int64)
    for transfers in (plan.returns, plan.evictions, plan.pulls, plan.updates):
        tally(transfers, setup.record_bytes_XA, rows, sizes)
    entries_W += rows.sum((1, 2, 3))
    entries_K += rows.sum((0, 2, 3))
    hot = plan.replicated_U if len(plan.decision.mode_T) else np.empty(0, np.int64)
    made_W = np.bincount(plan.touches.worker_T[plan.initialised_T], minlength=workers)
    # A worker is told the slots of its touches, slot and touch of every replicated row, and slot
    # and number of every row that it makes.
    told_W = entries_W + np.diff(plan.touches.first_W) + 2 * len(hot) + 2 * made_W
    hot_bytes = int(setup.record_bytes_XA[GRADIENT][plan.rows.arena_U[hot]].sum())
    return Traffic(
        rows,
        sizes,
        plan.samples_W,
        _sample_bytes(plan, setup),
        INDEX_BYTES * told_W,
        INDEX_BYTES * entries_K,
        len(hot),
        hot_bytes,
    )


def drain_transfers(state: State, record: int) -> Transfers:
    """Pushes that bring every update home, worker by worker in slot order."""
    parts = []
    for worker in range(state.setup.num_workers):
        rows, slots = dirty_rows(state, worker)
        count = len(rows)
        parts.append(
            Transfers(
                np.full(count, worker, np.int32),
                rows,
                slots,
                state.setup.arena_of(rows),
                np.full(count, UPDATE_PUSH, np.uint8),
                np.full(count, record, np.uint8),
                np.zeros(count, np.uint8),
            )
        )
    return Transfers(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def row_bytes_W(transfers: Transfers, setup: Setup) -> I64:
    """Bytes of some transfers by worker."""
    size = setup.record_bytes_XA[transfers.record, transfers.arena]
    return np.bincount(transfers.worker, size, setup.num_workers).astype(np.int64)
