"""What HET (VLDB 2022) is compared with: asynchronous and stale-synchronous servers, all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, NamedTuple

import numpy as np

from embroute.config.signature import Between
from embroute.data.window import Window
from embroute.kernels.array_types import I32, U8, Bools
from embroute.kernels.codes import DELTA, FRESH, HIT, LOCAL, MISS, NEW, REPLICA, SLOT_MASK, STALE
from embroute.planner.interfaces import ExtraRows, PartMemory, RunStart, Sync, SyncContext
from embroute.planner.kernels.cache import CachedCopies, classify_needs, sole_holders
from embroute.planner.kernels.transfers import Decision, StepRows
from embroute.planner.plan import Plan
from embroute.planner.state import State
from embroute.policies.sync.decision import make_decision
from embroute.policies.sync.write_through import uncached


def asynchronous() -> Sync:
    """An asynchronous parameter server (ASP): no cache, and no read waits for a push.

    Reconstruction: workers keep in step here, because dense gradients are all-reduced. Pulls and
    pushes overlap with compute as far as they can, so a read misses all updates of the step before,
    the worker's own included, and no others. A real asynchronous server has no such limit.
    """
    return replace(uncached(), name="asp", bound=1, waits=False)


StepBound = Annotated[int, Between(0)]


class PullSteps(NamedTuple):
    """Steps in which copies were pulled, by slot."""

    slot_WC: I32


def _no_pulls(start: RunStart) -> PullSteps:
    capacity_WA = start.setup.capacity_WA
    # One slot more than needed: number -1, no slot, is the last.
    return PullSteps(np.zeros((len(capacity_WA), int(capacity_WA.sum(1).max()) + 1), np.int32))


def _learn_pulls(state: State, plan: Plan) -> None:
    pulls = plan.pulls
    state.memory(PullSteps).slot_WC[pulls.worker, pulls.slot] = plan.step


def stale_synchronous(bound: StepBound = 10) -> Sync:
    """A stale-synchronous server (SSP, NIPS 2013): a read misses updates of `bound` steps at most.

    Every update is pushed after its step and applied to the worker's own copy. A copy is read for
    `bound` steps after the step of its pull. Reconstruction: all workers are in the same step here,
    so the clock of the slowest worker is the step. 0 is synchronous: a server without a cache.
    """
    if bound == 0:
        return uncached()

    def age(state: State, copies_UW: I32, step: int) -> I32:
        slot_UW = (copies_UW & SLOT_MASK) - 1
        pulled_UW = state.memory(PullSteps).slot_WC[np.arange(copies_UW.shape[1]), slot_UW]
        age_UW: I32 = step - pulled_UW
        return age_UW

    def readable(state: State, rows: StepRows, copies: CachedCopies) -> CachedCopies:
        young_UW = age(state, copies.copies_UW, rows.step) <= bound
        held_UW = copies.copies_UW & SLOT_MASK
        cells_UW = np.where(young_UW & (held_UW > 0), held_UW | FRESH, 0).astype(np.int32)
        return copies._replace(copies_UW=cells_UW, only_U=sole_holders(cells_UW))

    def decide(context: SyncContext) -> Decision:
        touches, old_UW = context.touches, age(context.state, context.copies_UW, context.rows.step)
        old_T = old_UW[touches.unique_T, touches.worker_T] > bound
        need_T = np.where(context.cell_T == 0, MISS, np.where(old_T, STALE, HIT)).astype(np.uint8)
        return make_decision(need_T, np.full_like(need_T, LOCAL), np.full_like(need_T, DELTA))

    def laws(plan: Plan, state: State) -> Iterator[tuple[str, int]]:
        slot_WC = state.memory(PullSteps).slot_WC
        pulled_T = slot_WC[plan.touches.worker_T, plan.placement.slot_T]
        late_T = (plan.decision.need_T == HIT) & (plan.step - pulled_T > bound)
        yield "4 (bounded staleness)", int(np.argmax(late_T)) if late_T.any() else -1

    return Sync(
        f"ssp({bound})",
        decide,
        memory=PartMemory(PullSteps, _no_pulls, _learn_pulls),
        readable=readable,
        laws=laws,
        bound=bound,
        refused_optimizers=("adam",),
    )


def _check_room(state: State, step: int) -> None:
    """Refuse caches that do not hold all rows, before the first step."""
    setup = state.setup
    for arena, rows in enumerate(setup.rows_A.tolist()):
        worker = int(setup.capacity_WA[:, arena].argmin())
        room = int(setup.capacity_WA[worker, arena])
        if room < rows:
            raise ValueError(
                f"--cache {setup.cache_W[worker]}: worker {worker} needs {rows} rows of width "
                f"{setup.arenas[arena]} (all of them replicated) in step {step}, its cache holds "
                f"{room}; use --cache 100%"
            )


def all_reduced() -> Sync:
    """Every table on every worker; gradients of the rows that a step uses are all-reduced. Exact.

    Reconstruction: plans name the rows of a step, so a ring sums their gradients. Plain frameworks
    gather every worker's rows and gradients at every worker, which moves more. An automatic cache
    holds all rows.
    """

    def extra(window: Window, state: State) -> ExtraRows:
        _check_room(state, window.step)
        everywhere = np.arange(len(window.now.rows_U), dtype=np.int32)
        return ExtraRows(np.empty(0, np.int64), everywhere)

    def decide(context: SyncContext) -> Decision:
        need_T: U8 = classify_needs(context.cell_T, FRESH)
        if context.state.setup.seeded:  # every worker computes the first value of a row
            new_T: Bools = context.copies.number_U[context.touches.unique_T] == 0
            need_T = np.where(new_T, NEW, need_T).astype(np.uint8)
        return make_decision(need_T, np.full_like(need_T, REPLICA))

    return Sync("allreduce", decide, extra, whole_tables=True)
