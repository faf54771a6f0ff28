"""Repeat a comparison with other caches, staleness bounds and links, for its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import click
import numpy as np

from embroute.config.cluster import Cluster, box, star_cluster
from embroute.config.progress import progress_bar
from embroute.config.spec import parse_size
from embroute.planner.interfaces import Policy
from embroute.policies.catalog import make_policy
from embroute.simulator.recorder import Recorder, SweepPoint, TradeoffPoint
from embroute.simulator.simulation import Outcome, Workload, measure

TRADEOFF_POLICIES = ("nocache", "vanilla", "het(100)", "herald", "esd(1)")
BOX_POLICIES = ("nocache", "vanilla", "fae", "scars")
PAPER_CACHES = (4, 6, 8, 10)  # per cent of the rows that occur
STALENESS_BOUNDS = (0, 1, 3, 10, 30, 100)
EQUAL_GBIT = (1.0, 10.0, 100.0)
LINK_RATIOS = (1.0, 2.0, 5.0, 10.0)  # of fast links to slow ones
FAST_GBIT, SERVER_GBIT = 5.0, 10.0  # beside slow links
COMPUTE_S = 0.05e-3  # of a sample, if the job has none; otherwise only links would count


@dataclass(frozen=True)
class Case:
    """A policy on a job that differs in one quantity."""

    policy: Policy
    varied: str  # the quantity and its value, for messages
    x: float
    job: Workload
    panel: str = ""


def _measure_cases(cases: list[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Measure cases with a progress bar; a case whose cache cannot hold a step is left out."""
    done = 0
    with progress_bar("", sum(case.job.steps for case in cases), counted=True) as update:
        for case in cases:
            update(description=f"{case.policy.name}, {case.varied}", completed=done)
            recorder = Recorder(0, lambda: update(advance=1))
            done += case.job.steps
            try:
                outcome = measure(case.policy, case.job, recorder.watch)
            except ValueError as error:
                reason = f"{case.policy.name}, {case.varied}: {error}"
                click.echo(f"left out of the report: {reason}", err=True)
                continue
            yield case, outcome


def _with_cache(job: Workload, cache: str) -> Workload:
    return replace(job, setup=replace(job.setup, cache=parse_size("--report-caches", cache)))


def _with_cluster(job: Workload, cluster: Cluster) -> Workload:
    """The job on other links, with the same compute and dense gradients."""
    old = job.setup.cluster
    compute_s = old.compute_s_per_sample or COMPUTE_S
    new = replace(cluster, compute_s_per_sample=compute_s, dense_bytes=old.dense_bytes)
    return replace(job, setup=replace(job.setup, cluster=new))


def sweep_caches(
    policies: Iterable[Policy], job: Workload, caches: Sequence[str]
) -> list[SweepPoint]:
    """Measure policies with other caches."""
    cases = [
        Case(policy, f"cache {cache}", i, _with_cache(job, cache))
        for policy in policies
        for i, cache in enumerate(caches)
    ]
    points = []
    for case, outcome in _measure_cases(cases):
        rows = int(outcome.setup.cache_rows_W.max())
        points.append(
            SweepPoint(
                policy=case.policy.name,
                cache=caches[int(case.x)],
                cache_rows=rows,
                cache_share=rows / outcome.setup.schema.num_rows,
                transmission_cost_s=outcome.transmission_cost_s,
                step_time_s=outcome.step_time_s,
                hit_rate=outcome.hit_rate,
            )
        )
    return points


def tradeoff_cases(job: Workload) -> list[Case]:
    """The papers' variations, one quantity at a time, with policies that support the optimizer.

    Papers train whole data sets, so their caches are full. Caches of a few steps are full if they
    are shares of the rows that occur in these steps. Panels that do not vary the cache use the
    papers' 10 %.
    """
    workers, optimizer = job.setup.num_workers, job.setup.optimizer
    occurring = len(np.unique(np.concatenate([batch.rows for batch in job.batches()])))

    def cached(share: int) -> Workload:
        return _with_cache(job, f"{max(1, occurring * share // 100)}rows")

    compared = [make_policy(name) for name in TRADEOFF_POLICIES]
    cases = [
        Case(policy, f"cache {share} %", share, cached(share), "cache")
        for share in PAPER_CACHES
        for policy in compared
    ]
    job, slow = cached(PAPER_CACHES[-1]), workers // 2
    cases += [
        Case(make_policy(f"het({s})"), f"bound {s}", s, job, "staleness") for s in STALENESS_BOUNDS
    ]
    replicated = [make_policy(name) for name in BOX_POLICIES]
    for gbit in EQUAL_GBIT:
        equal = _with_cluster(job, star_cluster([gbit] * workers, gbit))
        cases += [Case(policy, f"{gbit:g} Gbit/s", gbit, equal, "bandwidth") for policy in compared]
        host = _with_cluster(job, box(workers, gbit))
        cases += [Case(policy, f"box, {gbit:g} Gbit/s", gbit, host, "box") for policy in replicated]
    for ratio in LINK_RATIOS:
        links = [FAST_GBIT] * (workers - slow) + [FAST_GBIT / ratio] * slow
        uneven = _with_cluster(job, star_cluster(links, SERVER_GBIT))
        cases += [Case(policy, f"links 1:{ratio:g}", ratio, uneven, "ratio") for policy in compared]
    return [case for case in cases if optimizer not in case.policy.sync.refused_optimizers]


def measure_tradeoffs(job: Workload) -> list[TradeoffPoint]:
    """Measure the papers' trade-offs."""
    return [
        TradeoffPoint(
            panel=case.panel,
            policy=case.policy.name,
            x=case.x,
            rows=int(outcome.traffic.rows_WKIP.sum()),
            transmission_cost_s=outcome.transmission_cost_s,
            step_time_s=outcome.step_time_s,
        )
        for case, outcome in _measure_cases(tradeoff_cases(job))
    ]
