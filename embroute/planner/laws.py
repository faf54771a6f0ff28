"""The laws that every plan keeps, whatever policy made it. Checked at every step."""

from __future__ import annotations

import numpy as np

from embroute.planner.interfaces import Policy
from embroute.planner.kernels.cache import RETURNED, mark
from embroute.planner.kernels.law_checks import (
    SLOTS,
    reads_bounded,
    shard_clocks,
    slots_apart,
    touches_lawful,
    updates_apart,
    updates_home,
)
from embroute.planner.plan import Plan, PlanError
from embroute.planner.state import State


def check(plan: Plan, state: State, policy: Policy) -> None:
    """Raise PlanError if the plan breaks a law."""
    _every_sample_once(plan, state, policy)
    if plan.shared_memory:
        bad = updates_apart(plan.touches, plan.decision)
        _demand(policy, plan, "3 (updates in place)", bad)
        return
    caches, rows, touches = state.caches, plan.rows, plan.touches
    caches.planning[0] += 1  # marks of its own: what the plan says counts, not how it was made
    planning, slot_T = int(caches.planning[0]), plan.placement.slot_T
    mark(caches.slot_WCF, plan.returns.worker, plan.returns.slot, RETURNED, planning)
    if not policy.exact:
        shard_U = shard_clocks(caches, rows.rows_U, plan.copies.copies_UW)
        need_T, bound = plan.decision.need_T, policy.sync.bound
        bad = reads_bounded(caches.clock_WC2, touches, need_T, slot_T, shard_U, bound)
        _demand(policy, plan, "4 (bounded staleness)", bad)
    mark(caches.slot_WCF, plan.evictions.worker, plan.evictions.slot, RETURNED, planning)
    _demand(policy, plan, LAWS[SLOTS], slots_apart(caches, rows.arena_U, touches, slot_T))
    found, decision = plan.copies, plan.decision
    bad, law = touches_lawful(caches, touches, found, decision, plan.placement, policy.exact)
    _demand(policy, plan, LAWS[law], bad)
    if policy.exact:
        bad = updates_home(caches, touches, found, decision)
        _demand(policy, plan, "3 (updates home)", bad)


LAWS = ("", "5 (capacity)", "2 (no update lost)", "3 (exact reads)")


def _every_sample_once(plan: Plan, state: State, policy: Policy) -> None:
    """Law 1."""
    samples, workers = len(plan.now.batch), state.setup.num_workers
    worker_S = plan.worker_S
    inside = len(worker_S) == samples and (
        not samples or (int(worker_S.min()) >= 0 and int(worker_S.max()) < workers)
    )
    if not inside:
        raise PlanError(
            f"{policy.name}, step {plan.step}: law 1 (every sample once): {samples} samples, "
            f"{len(worker_S)} of them dealt, to workers {np.unique(worker_S).tolist()} of {workers}"
        )


def _demand(policy: Policy, plan: Plan, law: str, bad: int) -> None:
    if bad >= 0:
        row = plan.rows.rows_U[plan.touches.unique_T[bad]]
        raise PlanError(
            f"{policy.name}, step {plan.step}: law {law} broken by worker "
            f"{plan.touches.worker_T[bad]}, row {row}"
        )
