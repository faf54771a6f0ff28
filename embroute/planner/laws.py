"""Refuse a plan that breaks a law: law 1 here, others in `law_checks.py` and in syncs."""

from __future__ import annotations

import numpy as np

from embroute.planner.interfaces import Policy
from embroute.planner.plan import Plan, PlanError
from embroute.planner.row_store import row_store_of
from embroute.planner.state import State


def check(plan: Plan, state: State, policy: Policy) -> None:
    """Raise PlanError if the plan breaks a law."""
    _every_sample_once(plan, state, policy)
    for law, touch in row_store_of(policy).laws(plan, state, policy):
        if touch >= 0:
            row = plan.rows.rows_U[plan.touches.unique_T[touch]]
            raise PlanError(
                f"{policy.name}, step {plan.step}: law {law} broken by worker "
                f"{plan.touches.worker_T[touch]}, row {row}"
            )


def _every_sample_once(plan: Plan, state: State, policy: Policy) -> None:
    """Law 1."""
    samples, workers, worker_S = len(plan.now.batch), state.setup.num_workers, plan.worker_S
    in_range = not samples or (worker_S.min(initial=0) >= 0 and worker_S.max(initial=0) < workers)
    if len(worker_S) != samples or not in_range:
        raise PlanError(
            f"{policy.name}, step {plan.step}: law 1 (every sample once): {samples} samples, "
            f"{len(worker_S)} of them assigned, to workers {np.unique(worker_S).tolist()} of "
            f"{workers}"
        )
