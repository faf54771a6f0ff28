"""Pricing plans without training: step by step, or summed over the measured steps of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from embroute.config.spec import Size
from embroute.cost.step_time import StepTime, Traffic, step_time, transfer_cost_W, transmission_cost
from embroute.data.access_counts import Calibration, count_source
from embroute.data.batch import Batch, Source
from embroute.data.stream import batches
from embroute.kernels.array_types import I64
from embroute.kernels.codes import UPDATE_PUSH
from embroute.kernels.jit import is_compiled
from embroute.planner.bounds import Bound, lower_bound
from embroute.planner.interfaces import Policy
from embroute.planner.kernels.cache import place
from embroute.planner.kernels.transfers import (
    NO_TRANSFERS,
    Transfers,
    empty_counts,
    select,
    tally,
)
from embroute.planner.plan import Plan, drain_transfers, row_bytes_W, traffic
from embroute.planner.plan_stream import Step, plans, start
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.policies.catalog import make_policy

TRIAL_STEPS, TRIAL_WARMUP = 40, 10  # of each trial of workers=fast


@dataclass(frozen=True)
class Workload:
    """What to simulate: data, setup, and the steps to measure."""

    source: Source
    setup: Setup
    steps: int = 90  # with the warm-up
    warmup: int = 10
    epochs: int | None = 1
    shuffle: bool = False
    # Look-ups by row: jobs on the same source share them.
    lookups: dict[Calibration, I64] = field(default_factory=dict, compare=False, repr=False)

    def access_counts(self, calibration: Calibration) -> I64:
        """Look-ups of each row in a sample of the whole source, from which hot sets are chosen."""
        if calibration not in self.lookups:
            self.lookups[calibration] = count_source(self.source, calibration)
        return self.lookups[calibration]

    def batches(self) -> Iterator[Batch]:
        """The run's batches, from the start."""
        stream = batches(
            self.source,
            self.setup.batch_size,
            epochs=self.epochs,
            shuffle=self.shuffle,
            seed=self.setup.seed,
        )
        return islice(stream, self.steps)


class FirstFill(NamedTuple):
    """Pulls that fill replicas before the first step: a run has them once. Axis W: workers."""

    rows_W: I64
    bytes_W: I64


@dataclass(frozen=True)
class StepReport:
    """One step, priced."""

    step: int
    traffic: Traffic
    time: StepTime
    transmission_cost_s: float
    hits: int
    touches: int
    decision_s: float
    hot: bool
    fill: FirstFill  # in no other figure


@dataclass(frozen=True)
class Outcome:
    """The measured steps of one policy, summed; times per step are means."""

    policy: Policy
    workers: tuple[int, ...]  # of the cluster, in the order of the policy's workers
    setup: Setup
    steps: int
    traffic: Traffic
    drain_rows_W: I64  # of a drain at the end, less a drain after the warm-up
    drain_bytes_WK: I64
    transmission_cost_s: float
    step_time_s: float
    hit_rate: float
    decision_ms: float
    hot_steps: int  # of batches all of whose rows are hot
    replicated_rows: int  # on every worker for the whole run
    fill: FirstFill  # in no other figure


def kernels_are_compiled() -> bool:
    """Whether an earlier run compiled the planner's kernels; the first run takes longer."""
    return is_compiled(place)


def _without_fill(policy: Policy, step: Step) -> tuple[Plan, Transfers]:
    """The plan without pulls that fill replicas before the first step, and these pulls."""
    plan = step.plan
    replicated_R = policy.sync.pinned(step.state) if plan.step == 0 else None
    if replicated_R is None:
        return plan, NO_TRANSFERS
    fills = replicated_R[plan.pulls.row]
    return replace(plan, pulls=select(plan.pulls, ~fills)), select(plan.pulls, fills)


def price_step(policy: Policy, step: Step) -> StepReport:
    """Price one step. The first fill of replicas is counted apart: a run has it once."""
    setup = step.state.setup
    plan, fill = _without_fill(policy, step)
    moved = traffic(plan, setup)
    hits, touches = plan.hits
    return StepReport(
        step=plan.step,
        traffic=moved,
        time=step_time(moved, setup.cluster),
        transmission_cost_s=transmission_cost(moved, setup.cluster),
        hits=hits,
        touches=touches,
        decision_s=step.decision_s + step.window_s,
        hot=plan.now.batch.hot,
        fill=FirstFill(
            np.bincount(fill.worker, minlength=setup.num_workers), row_bytes_W(fill, setup)
        ),
    )


def start_simulation(policy: Policy, job: Workload) -> State:
    """The state before the first step."""
    if policy.regroup is None:
        return start(policy, job.setup)
    counts_R = job.access_counts(policy.regroup.calibration)
    epoch_batches = -(-(job.source.num_samples or 0) // job.setup.batch_size)
    return start(policy, replace(job.setup, epoch_batches=epoch_batches), counts_R)


def simulate_steps(policy: Policy, job: Workload) -> Iterator[StepReport]:
    """Per-step reports of a policy on a job."""
    state = start_simulation(policy, job)
    # Regrouping may end an epoch with two short batches: a run ends after its steps all the same.
    for step in islice(plans(policy, job.batches(), state), job.steps):
        yield price_step(policy, step)


class _Drain(NamedTuple):
    """What a drain moves."""

    rows_W: I64
    bytes_WK: I64


def _drain_now(state: State, policy: Policy) -> _Drain:
    """What a drain would move in this state."""
    workers, shards = state.setup.num_workers, state.setup.cluster.num_shards
    rows, sizes = empty_counts(workers, shards), empty_counts(workers, shards)
    tally(drain_transfers(state, policy.sync.record), state.setup.record_bytes_XA, rows, sizes)
    return _Drain(rows_W=rows.sum((1, 2, 3)), bytes_WK=sizes.sum((2, 3)))


def measure(
    policy: Policy, job: Workload, watch: Callable[[StepReport], None] = lambda report: None
) -> Outcome:
    """Simulate a policy and sum its measured steps; `watch` sees every step and the warm-up."""
    workers = choose_workers(policy, job)
    job = with_workers(job, workers)
    state = start_simulation(policy, job)
    before = _drain_now(state, policy)
    reports = []
    for step in islice(plans(policy, job.batches(), state), job.steps):
        report = price_step(policy, step)
        reports.append(report)
        if report.step == job.warmup - 1:
            before = _drain_now(state, policy)
        watch(report)
    measured = measured_steps(reports, job.warmup)
    if not measured:
        raise ValueError(
            f"--warmup {job.warmup}: the data ends before the first measured step "
            f"(batches of {job.setup.batch_size} samples); use a smaller batch or more epochs"
        )
    # The measured steps answer for the updates that they leave in the caches, not the warm-up's.
    after = _drain_now(state, policy)
    drain = _Drain(after.rows_W - before.rows_W, after.bytes_WK - before.bytes_WK)
    replicated_R = policy.sync.pinned(state)
    outcome = _outcome(policy, workers, state.setup, measured, drain)
    num_replicated = 0 if replicated_R is None else int(replicated_R.sum())
    return replace(outcome, replicated_rows=num_replicated, fill=reports[0].fill)


def measured_steps(reports: Sequence[StepReport], warmup: int) -> list[StepReport]:
    """The steps after the warm-up, with the share of hot batches that all steps have.

    A round trains its cold batches first, so that the warm-up takes cold batches only. As many
    hot ones in proportion are left out, but none that begins after a swap: swaps count in full.
    """
    after = [report for report in reports if report.step >= warmup]
    cold = sum(not report.hot for report in after)
    num_hot = sum(report.hot for report in reports)
    # Hot batches beyond the share of all steps; without cold batches nothing is out of proportion.
    surplus = len(after) - cold - round(cold * num_hot / (len(reports) - num_hot)) if cold else 0
    kept = []
    for before, report in zip([None, *after], after, strict=False):
        left_out = surplus > 0 and report.hot and before is not None and before.hot
        surplus -= left_out
        if not left_out:
            kept.append(report)
    return kept


def _outcome(
    policy: Policy,
    workers: tuple[int, ...],
    setup: Setup,
    reports: list[StepReport],
    drain: _Drain,
) -> Outcome:
    """Sums and means over the measured steps."""
    total = reports[0].traffic
    for later in reports[1:]:
        total = total + later.traffic
    pushes_WKI = np.zeros((*drain.bytes_WK.shape, total.rows_WKIP.shape[2]), np.int64)
    pushes_WKI[:, :, UPDATE_PUSH] = drain.bytes_WK
    drain_cost_s = float(transfer_cost_W(pushes_WKI, setup.cluster).sum())
    touches = sum(report.touches for report in reports)
    return Outcome(
        policy=policy,
        workers=workers,
        setup=setup,
        steps=len(reports),
        traffic=total,
        drain_rows_W=drain.rows_W,
        drain_bytes_WK=drain.bytes_WK,
        transmission_cost_s=sum(report.transmission_cost_s for report in reports) + drain_cost_s,
        step_time_s=float(np.mean([report.time.total_s for report in reports])),
        hit_rate=sum(report.hits for report in reports) / max(1, touches),
        decision_ms=1e3 * float(np.median([report.decision_s for report in reports])),
        hot_steps=sum(report.hot for report in reports),
        replicated_rows=0,
        fill=reports[0].fill,
    )


def workload_bound(job: Workload) -> Bound:
    """The lower bound on a job."""
    return lower_bound(job.batches(), job.setup, job.warmup)


def with_workers(job: Workload, workers: tuple[int, ...]) -> Workload:
    """The same job and global batch on some of the workers."""
    if len(workers) == job.setup.num_workers:
        return job
    shares = tuple(job.setup.shares[w] for w in workers) if job.setup.shares else ()
    if shares and not sum(shares):
        numbers = ", ".join(map(str, workers))
        raise ValueError(f"--quotas: workers {numbers}, the only ones of the policy, have no share")
    cache = job.setup.cache
    if not isinstance(cache, Size):
        cache = tuple(cache[w] for w in workers)
    cluster = job.setup.cluster.only(workers)
    return replace(job, setup=replace(job.setup, cluster=cluster, cache=cache, shares=shares))


def choose_workers(policy: Policy, job: Workload) -> tuple[int, ...]:
    """Workers of a policy: all, a list such as 0+2, or the fastest for it (workers=fast)."""
    count = job.setup.num_workers
    if policy.workers == "all":
        return tuple(range(count))
    if policy.workers != "fast":
        return _worker_list(policy, count)
    order = job.setup.cluster.fastest_first
    trial = replace(job, steps=min(job.steps, TRIAL_STEPS), warmup=min(job.warmup, TRIAL_WARMUP))
    trial_policy = replace(policy, workers="all")
    best: tuple[float, tuple[int, ...]] = (np.inf, tuple(range(count)))
    for size in range(count, 0, -1):
        subset = tuple(sorted(int(w) for w in order[:size]))
        try:
            # The trial's policy has workers=all, so `measure` starts no further trials.
            time_s = measure(trial_policy, with_workers(trial, subset)).step_time_s
        except ValueError:
            continue  # the caches of so few workers do not hold a step
        best = min(best, (time_s, subset))
    return best[1]


def _worker_list(policy: Policy, count: int) -> tuple[int, ...]:
    terms = policy.workers.split("+")
    numbers = [int(term) for term in terms if re.fullmatch("[0-9]{1,9}", term)]
    if len(set(numbers)) < len(terms) or max(numbers) >= count:
        raise ValueError(
            f"policy {policy.name}: workers must be all, fast, or numbers below {count} such as "
            f"0+1+2, got {policy.workers!r}"
        )
    return tuple(numbers)


def measure_named(name: str, job: Workload) -> Outcome:
    """Measure the policy of a name."""
    return measure(make_policy(name), job)
