"""Measuring several policies on one job, with a progress bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from embroute.config.progress import progress_bar
from embroute.config.run_options import DEFAULT_POLICY
from embroute.config.spec import shown, split_outside
from embroute.planner.interfaces import Policy
from embroute.policies.catalog import LOWER_BOUND, PolicyLike, make_policy, policy_of
from embroute.simulator.comparison import PolicyResult, bound_result, policy_result
from embroute.simulator.recorder import Detail, Recorder
from embroute.simulator.simulation import (
    Workload,
    choose_workers,
    measure,
    start_simulation,
    workload_bound,
)

YARDSTICK = "vanilla"
DEFAULT_POLICIES = (
    "nocache",
    "vanilla",
    "het(100)",
    "herald",
    "esd(1)",
    DEFAULT_POLICY,
    "fae",
    "scars",
    "bagpipe",
    "unbounded",
    LOWER_BOUND,
)


class Measured(NamedTuple):
    """The results of all policies in order, and details of those that are no bounds."""

    results: list[PolicyResult]
    details: Mapping[str, Detail]


def policies_of(text: str) -> list[str]:
    """The policies of a text that separates them by commas."""
    try:
        names = [name for name in split_outside(text, ",") if name]
    except ValueError as error:
        raise ValueError(f"--policies: {error}") from None
    if not names:
        raise ValueError(f"--policies must name at least one policy, got {shown(text)}")
    return names


def named_policies(wanted: Sequence[PolicyLike]) -> dict[str, Policy | None]:
    """Policies by name, the yardstick included; the lower bound is no policy."""
    policies: dict[str, Policy | None] = {}
    for one in wanted:
        policy = None if one == LOWER_BOUND else policy_of("--policies", one)
        name = LOWER_BOUND if policy is None else policy.name
        if name in policies:
            how = "" if isinstance(one, str) else "; dataclasses.replace(policy, name=...) renames"
            raise ValueError(f"--policies: {shown(name)} is given twice{how}")
        policies[name] = policy
    if YARDSTICK not in policies:
        policies = {YARDSTICK: make_policy(YARDSTICK), **policies}
    return policies


def trainable_defaults(optimizer: str) -> tuple[list[str], list[str]]:
    """The default policies that can train with the optimizer, and those that cannot."""
    refused = [
        name
        for name in DEFAULT_POLICIES
        if name != LOWER_BOUND and optimizer in make_policy(name).sync.refused_optimizers
    ]
    return [name for name in DEFAULT_POLICIES if name not in refused], refused


def check_policies(policies: Mapping[str, Policy | None], job: Workload) -> None:
    """Refuse a policy that cannot run this job before any policy is measured."""
    for policy in policies.values():
        if policy is None:
            continue
        if policy.workers != "fast":
            choose_workers(policy, job)
        if job.setup.optimizer in policy.sync.refused_optimizers:
            start_simulation(policy, job)  # raises, and says why


def measure_all(policies: Mapping[str, Policy | None], job: Workload) -> Measured:
    """Measure every policy, with a progress bar."""
    results, details = [], {}
    with progress_bar("", len(policies) * job.steps, counted=True) as update:
        for position, (name, policy) in enumerate(policies.items()):
            update(description=name, completed=position * job.steps)
            if policy is None:
                results.append(bound_result(workload_bound(job)))
                continue
            recorder = Recorder(job.warmup, lambda: update(advance=1))
            outcome = measure(policy, job, recorder.watch)
            results.append(policy_result(name, outcome))
            details[name] = recorder.detail(outcome)
    return Measured(results, details)
