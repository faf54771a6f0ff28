"""The lower bound: below every exact policy, optimal for one worker, and reached."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embroute.config.cluster import Cluster, Host, Worker
from embroute.config.spec import Size
from embroute.data.schema import Field, Schema, Table
from embroute.planner.bounds import Bound, kept_uses
from embroute.planner.setup import Setup
from embroute.simulator.simulation import Outcome, Workload, measure_named, workload_bound
from tests.sizes import sized
from tests.workloads import Samples, draw_batches, setups

Uses = list[set[int]]

MAKING = "pipelined(init=local)"  # what the bound allows: on demand, and new rows are not pulled
EXACT = (
    "nocache",
    "vanilla",
    "het(0)",
    "herald",
    "herald(tables=1, ties=first)",
    "esd(1)",
    "esd(0.3, ties=any)",
    "bagpipe(5)",
    "bagpipe(1)",
    "vanilla(workers=0)",
    "dispatch=esd sync=on-demand evict=clairvoyant(4)",
    "dispatch=block sync=on-demand evict=clairvoyant(40)",
    f"dispatch=block sync={MAKING} evict=clairvoyant(40)",
    "dispatch=robin sync=until-last-use(3) evict=lfu",
    "dispatch=herald sync=write-through evict=light-lfu",
)


@st.composite
def clusters(draw: st.DrawFn, workers: int) -> Cluster:
    """Links of all speeds, each direction its own, workers that share hosts, one or two shards."""
    rate = st.sampled_from([1e6, 3e6, 1e7])
    latency = st.sampled_from([0.0, 1e-4])
    hosts = tuple(Host(f"h{i}", draw(rate), draw(rate), draw(latency)) for i in range(3))
    slowness = st.sampled_from([1.0, 1.0, 2.5])
    ranks = tuple(Worker(draw(st.integers(0, 1)), draw(slowness)) for _ in range(workers))
    shards = draw(st.sampled_from([(2,), (2, 2), (2, 0), (1, 2)]))
    compute = draw(st.sampled_from([0.0, 1e-5, 1e-3]))
    return Cluster(hosts, ranks, shards, 2, compute, draw(st.sampled_from([0.0, 1e3])))


@st.composite
def jobs(draw: st.DrawFn, whole_batches: bool = True) -> Workload:
    """Any small job; the data may end before the steps do."""
    setup = draw(setups())
    setup = replace(setup, cluster=draw(clusters(setup.num_workers)))
    warmup, steps = draw(st.integers(0, 6)), draw(st.integers(1, 12))
    count = setup.batch_size * draw(st.integers(warmup + 1, warmup + 12))
    count += 0 if whole_batches else draw(st.integers(1, setup.batch_size))
    batches = draw_batches(setup.schema, [count], draw(st.integers(0, 2**16)))
    return Workload(Samples(setup.schema, batches), setup, warmup + steps, warmup)


def measured(name: str, job: Workload) -> Outcome | None:
    """The traffic of a policy; None if a cache is too small for a step, or the workers have
    quota 0."""
    try:
        return measure_named(name, job)
    except ValueError as error:
        if re.search("its cache holds|have no share", str(error)):
            return None
        raise


def pulls_and_pushes(outcome: Outcome) -> tuple[int, int]:
    rows_I = outcome.traffic.rows_WKIP.sum((0, 1, 3))
    return int(rows_I[:2].sum()), int(rows_I[2:].sum() + outcome.drain_rows_W.sum())


def assert_not_above(least: Bound, outcome: Outcome) -> None:
    pulls, pushes = pulls_and_pushes(outcome)
    bytes_I = outcome.traffic.bytes_WKIP.sum((0, 1, 3))
    assert least.pulls_A.sum() <= pulls
    assert least.pushes_A.sum() <= pushes
    assert least.pull_bytes <= bytes_I[:2].sum()
    assert least.push_bytes <= bytes_I[2:].sum() + outcome.drain_bytes_WK.sum()
    assert least.transmission_cost_s <= outcome.transmission_cost_s * (1 + 1e-12)
    assert least.step_time_s <= outcome.step_time_s * (1 + 1e-12)


steady = settings(suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", EXACT)
@settings(steady, max_examples=sized(8, 25))
@given(job=jobs())
def test_exact_policies_stay_above_the_lower_bound(name: str, job: Workload) -> None:
    outcome = measured(name, job)
    if outcome is not None:
        assert_not_above(workload_bound(job), outcome)


@settings(steady, max_examples=sized(8, 25))
@given(job=jobs())
def test_in_place_stays_above_the_lower_bound(job: Workload) -> None:
    job = replace(job, setup=replace(job.setup, cluster=job.setup.cluster.together()))
    for name in ("in-place", "vanilla"):
        outcome = measured(name, job)
        if outcome is not None:
            assert_not_above(workload_bound(job), outcome)


def test_short_last_batch_does_not_raise_the_lower_bound() -> None:
    hosts = (Host("shard", 1e9, 1e9), Host("worker", 1e9, 1e9))
    cluster = Cluster(hosts, (Worker(1),), (0,), compute_s_per_sample=1e-3)
    schema = Schema((Table("t", 5),), (Field("f", 0),))
    setup = Setup(schema, cluster, 4, batch_size=4, cache=Size(1.0, "share"))
    # Steps of 4 samples and of 1: 2.5 ms of compute on average.
    job = Workload(Samples(schema, draw_batches(schema, [5], 0)), setup, steps=2, warmup=0)
    assert_not_above(workload_bound(job), measure_named("vanilla", job))


def intervals(uses: Uses) -> list[tuple[int, int]]:
    """The steps of each two successive uses of a row."""
    found = []
    for row in set().union(*uses):
        steps = [step for step, rows in enumerate(uses) if row in rows]
        found += list(pairwise(steps))
    return found


def brute_force(uses: Uses, capacity: int) -> int:
    """The largest number of intervals that fit, over all choices."""
    every = intervals(uses)
    room = [max(0, capacity - len(rows)) for rows in uses]
    for count in range(len(every), 0, -1):
        for chosen in combinations(every, count):
            held = [sum(a < step < b for a, b in chosen) for step in range(len(uses))]
            if all(h <= r for h, r in zip(held, room, strict=True)):
                return count
    return 0


@settings(steady, max_examples=sized(40, 150))
@given(st.lists(st.sets(st.integers(0, 4), max_size=4), min_size=1, max_size=6), st.integers(0, 5))
def test_kept_uses_equal_brute_force(uses: Uses, capacity: int) -> None:
    steps = len(uses)
    next_uses = [np.zeros(steps + 1, np.int64) for _ in uses]
    for start, stop in intervals(uses):
        next_uses[start][stop] += 1
    uses_T = np.array([len(rows) for rows in uses])
    assert kept_uses(uses_T, next_uses, capacity) == brute_force(uses, capacity)


def alone(job: Workload, cache: float) -> Workload:
    """The job on one worker with its shard on another host, with SGD: one record size."""
    hosts = (Host("shard", 1e9, 1e9), Host("worker", 1e6, 3e6))
    cluster = Cluster(hosts, (Worker(1),), (0,))
    setup = replace(
        job.setup, cluster=cluster, shares=(), optimizer="sgd", cache=Size(cache, "share")
    )
    return replace(job, setup=setup)


@settings(steady, max_examples=sized(8, 25))
@given(job=jobs(whole_batches=False))
def test_one_worker_with_a_full_cache_reaches_the_lower_bound(job: Workload) -> None:
    # Nobody else needs a row and nothing is evicted, so each row is made or pulled at its first
    # use and comes home in the drain: at most one pull and one push, which no policy can avoid.
    job = alone(job, 1.0)
    outcome, least = measure_named(f"dispatch=block sync={MAKING}", job), workload_bound(job)
    assert pulls_and_pushes(outcome) == (least.pulls_A.sum(), least.pushes_A.sum())
    assert outcome.transmission_cost_s == pytest.approx(least.transmission_cost_s)


@settings(steady, max_examples=sized(15, 50))
@given(job=jobs(whole_batches=False), cache=st.sampled_from([0.3, 0.5, 0.7]))
def test_one_clairvoyant_worker_reaches_the_lower_bound(job: Workload, cache: float) -> None:
    # From empty caches: a warm-up may leave other rows than the best ones for what follows.
    job = replace(alone(job, cache), warmup=0)
    outcome = measured(f"dispatch=block sync={MAKING} evict=clairvoyant(40)", job)
    if outcome is not None:
        least = workload_bound(job)
        assert pulls_and_pushes(outcome) == (least.pulls_A.sum(), least.pushes_A.sum())


def setup_of(setup: Setup, cache: float) -> Setup:
    return replace(setup, cache=Size(cache, "share"))


@settings(steady, max_examples=sized(8, 25))
@given(job=jobs())
def test_larger_cache_never_raises_the_lower_bound(job: Workload) -> None:
    shares = (0.0, 0.2, 0.5, 1.0)
    moved = [
        int(workload_bound(replace(job, setup=setup_of(job.setup, share))).pulls_A.sum())
        for share in shares
    ]
    assert moved == sorted(moved, reverse=True)
