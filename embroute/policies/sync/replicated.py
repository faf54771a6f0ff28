"""Hot rows replicated on every worker and kept equal by all-reducing their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from embroute.data.window import Window
from embroute.kernels.array_types import I32, I64, Bools
from embroute.kernels.codes import DIRTY, FILL, FRESH, GRADIENT, NOTHING, REPLICA, SHARED
from embroute.kernels.jit import kernel
from embroute.planner.interfaces import ExtraRows, PartMemory, RunStart, Sync, SyncContext, no_extra
from embroute.planner.kernels.cache import Cells, cell_of, classify_needs
from embroute.planner.kernels.transfers import Decision
from embroute.planner.plan import Plan
from embroute.planner.state import State
from embroute.policies.regroup import HotRows
from embroute.policies.sync.decision import make_decision
from embroute.policies.sync.write_through import decide_write_through


class Replicas(NamedTuple):
    """Where the swaps between hot and cold batches stand: one flag each."""

    was_hot: Bools  # whether the last batch was a hot one
    filled: Bools  # whether the replicas were filled once


def _no_replicas(start: RunStart) -> Replicas:
    return Replicas(np.zeros(1, np.bool_), np.zeros(1, np.bool_))


def _learn_swaps(state: State, plan: Plan) -> None:
    memory = state.memory(Replicas)
    memory.was_hot[0] = plan.now.batch.hot
    memory.filled[0] = True


REPLICAS = PartMemory(Replicas, _no_replicas, _learn_swaps)


@kernel
def _not_everywhere(cells: Cells, rows: I64, bit: int) -> Bools:
    """Rows of which some worker's copy lacks the bit, or does not exist."""
    out = np.zeros(len(rows), np.bool_)
    for i in range(len(rows)):
        for w in range(cells.cell_NW.shape[1]):
            if not cell_of(cells, rows[i], w) & bit:
                out[i] = True
    return out


@kernel
def _somewhere(cells: Cells, rows: I64, bit: int) -> Bools:
    """Rows of which some worker's copy has the bit."""
    out = np.zeros(len(rows), np.bool_)
    for i in range(len(rows)):
        for w in range(cells.cell_NW.shape[1]):
            if cell_of(cells, rows[i], w) & bit:
                out[i] = True
    return out


def _hot(state: State) -> Bools:
    return state.memory(HotRows).hot_R


def _fill(window: Window, state: State, with_batch: bool = True) -> ExtraRows:
    """Pull the hot rows that some worker lacks or has stale; `with_batch`: also the batch's."""
    cells, now = state.caches.cells, window.now
    hot = state.memory(HotRows).rows
    lacking = hot[_not_everywhere(cells, hot, FRESH)]
    lacking_R = np.zeros(state.setup.schema.num_rows, np.bool_)
    lacking_R[lacking] = True
    looked_up = np.flatnonzero(lacking_R[now.rows_U])
    lacking_R[now.rows_U] = False
    added = lacking[lacking_R[lacking]]
    # Added rows follow the batch's distinct rows.
    positions = np.arange(len(now.rows_U), len(now.rows_U) + len(added))
    everywhere = np.concatenate([looked_up, positions]) if with_batch else positions
    return ExtraRows(added, everywhere.astype(np.int32))


def _unpushed(window: Window, state: State) -> ExtraRows:
    """Hot rows whose newest value only the replicas have and the batch does not touch."""
    hot = state.memory(HotRows).rows
    dirty = hot[_somewhere(state.caches.cells, hot, DIRTY)]
    return ExtraRows(np.setdiff1d(dirty, window.now.rows_U), np.empty(0, np.int32))


def _dirty_copies(context: SyncContext) -> tuple[I32, I32]:
    """Workers and rows of dirty copies: of each replicated row one worker pushes."""
    unique, worker = np.nonzero(context.copies_UW & DIRTY)
    return worker.astype(np.int32), unique.astype(np.int32)


def _decide_hot(context: SyncContext) -> Decision:
    """Gradients of the batch's rows are all-reduced; added rows are only pulled."""
    touches = context.touches
    need_T = classify_needs(context.cell_T, FRESH)
    added_T = touches.unique_T >= len(context.window.now.rows_U)
    return make_decision(need_T, np.where(added_T, FILL, REPLICA).astype(np.uint8))


def swapped() -> Sync:
    """FAE (VLDB 2022, arXiv 2103.00686): hot batches on replicas, cold batches through the shard.

    The replicas are filled before the first step. Cold to hot: every worker pulls the hot rows
    that have changed. Hot to cold: each changed row is pushed once. Cold batches run
    write-through in the rest of the cache.
    """

    def swap(window: Window, state: State) -> ExtraRows:
        hot, memory = window.now.batch.hot, state.memory(Replicas)
        if hot and not memory.was_hot:
            return _fill(window, state)
        if not memory.filled:
            return _fill(window, state, with_batch=False)
        if memory.was_hot and not hot:
            return _unpushed(window, state)
        return no_extra(window, state)

    def extra(window: Window, state: State) -> ExtraRows:
        hot_next = bool(window.ahead) and window.ahead[0].batch.hot
        # The other workers pull at the swap; a single worker has the newest copies itself.
        added = swap(window, state)
        if not hot_next or window.now.batch.hot or state.setup.num_workers == 1:
            return added
        hot_U = state.memory(HotRows).hot_R[window.now.rows_U]
        return replace(added, needed_next=np.flatnonzero(hot_U).astype(np.int32))

    def decide(context: SyncContext) -> Decision:
        if context.window.now.batch.hot:
            return _decide_hot(context)
        decision = decide_write_through(context)
        added_T = context.touches.unique_T >= len(context.window.now.rows_U)
        worker, unique = _dirty_copies(context)
        return decision._replace(
            mode_T=np.where(added_T, FILL, decision.mode_T).astype(np.uint8),
            push_T=np.where(added_T, NOTHING, decision.push_T).astype(np.uint8),
            return_worker=worker,
            return_unique=unique,
        )

    return Sync("swapped", decide, extra=extra, memory=REPLICAS, pinned=_hot)


def always_replicated() -> Sync:
    """SCARS (arXiv 2411.01611): hot rows all-reduced in every step, cold rows never cached.

    Reconstruction: the paper's abstract gives the theory that picks the hot set; that replicas are
    kept equal step by step, which makes the policy exact, is ours.
    """

    def extra(window: Window, state: State) -> ExtraRows:
        return no_extra(window, state) if state.memory(Replicas).filled else _fill(window, state)

    def decide(context: SyncContext) -> Decision:
        touches, looked_up = context.touches, len(context.window.now.rows_U)
        need_T = classify_needs(context.cell_T, FRESH)
        cold_T = ~_hot(context.state)[context.rows.rows_U[touches.unique_T]]
        mode_T = np.where(touches.unique_T >= looked_up, FILL, REPLICA)
        mode_T = np.where(cold_T, SHARED, mode_T).astype(np.uint8)
        push_T = np.where(cold_T, GRADIENT, NOTHING).astype(np.uint8)
        return make_decision(need_T, mode_T, push_T)._replace(drop_T=cold_T.astype(np.uint8))

    return Sync("replicated", decide, extra=extra, memory=REPLICAS, pinned=_hot)
