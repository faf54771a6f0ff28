"""Refuse a plan that breaks a law: law 1 here, others in `law_checks.py` and in syncs."""

from __future__ import annotations

import numpy as np

from embroute.config.spec import shown
from embroute.kernels.array_types import I64
from embroute.planner.interfaces import Assignment, Policy, SyncContext
from embroute.planner.kernels.transfers import Decision
from embroute.planner.plan import Plan
from embroute.planner.row_store import row_store_of
from embroute.planner.state import PlanError, State

_LISTS = {"need_T": np.uint8, "mode_T": np.uint8, "push_T": np.uint8, "drop_T": np.uint8}


def check(plan: Plan, state: State, policy: Policy) -> None:
    """Raise PlanError if the plan breaks a law."""
    quotas_W = state.setup.quotas(len(plan.now.batch))
    check_assignment(policy, plan.step, Assignment(plan.worker_S), quotas_W)
    for law, touch in row_store_of(policy).laws(plan, state, policy):
        if touch >= 0:
            row = plan.rows.rows_U[plan.touches.unique_T[touch]]
            raise PlanError(
                f"{policy.name}, step {plan.step}: law {law} broken by worker "
                f"{plan.touches.worker_T[touch]}, row {row}"
            )


def check_assignment(policy: Policy, step: int, assignment: object, quotas_W: I64) -> None:
    """Law 1, and the quotas of a dispatch that must keep them. Kernels trust the result."""
    where = f"{policy.name}, step {step}: law 1 (every sample once)"
    if not isinstance(assignment, Assignment):
        raise PlanError(f"{where}: the dispatch must return an Assignment, got {shown(assignment)}")
    worker_S, samples, workers = assignment.worker_S, int(quotas_W.sum()), len(quotas_W)
    if not isinstance(worker_S, np.ndarray) or worker_S.dtype != np.int32 or worker_S.ndim != 1:
        kind = getattr(worker_S, "dtype", type(worker_S).__name__)
        if isinstance(worker_S, np.ndarray) and worker_S.ndim != 1:
            kind = f"{kind} of shape {worker_S.shape}"
        raise PlanError(f"{where}: worker_S must be a flat array of int32, got {kind}")
    if len(worker_S) != samples:
        raise PlanError(f"{where}: {samples} samples, {len(worker_S)} of them assigned")
    wrong_S = (worker_S < 0) | (worker_S >= workers)
    if wrong_S.any():
        wrong = worker_S[wrong_S][0]
        raise PlanError(f"{where}: worker {wrong} does not exist (0 to {workers - 1})")
    given_W = np.bincount(worker_S, minlength=workers)
    if not policy.dispatch.free_quotas and (given_W != quotas_W).any():
        raise PlanError(
            f"{policy.name}, step {step}: workers get {given_W.tolist()} samples, their quotas are "
            f"{quotas_W.tolist()}; a dispatch that chooses quotas itself has free_quotas=True"
        )


def check_decision(policy: Policy, context: SyncContext, decision: object) -> None:
    """The shape of a sync's decision. Kernels trust it."""
    where = f"{policy.name}, step {context.rows.step}"
    if not isinstance(decision, Decision):
        raise PlanError(f"{where}: the sync must return a Decision, got {shown(decision)}")
    touches = len(context.touches.unique_T)
    for name, kind in _LISTS.items():
        values = getattr(decision, name)
        if not isinstance(values, np.ndarray) or values.dtype != kind or len(values) != touches:
            got = f"{len(values)} of {getattr(values, 'dtype', type(values).__name__)}"
            raise PlanError(f"{where}: {name} must have {touches} values of uint8, got {got}")
    worker, unique = decision.return_worker, decision.return_unique
    limits = zip((worker, unique), context.copies_UW.shape[::-1], strict=True)
    if len(worker) != len(unique) or any(
        len(values) and not 0 <= values.min() <= values.max() < limit for values, limit in limits
    ):
        raise PlanError(
            f"{where}: return_worker and return_unique must name {context.copies_UW.shape[1]} "
            f"workers and {context.copies_UW.shape[0]} rows, one of each a copy"
        )
