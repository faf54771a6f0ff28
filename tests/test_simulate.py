"""Prices of plans: spans that add up, drains, warm-ups, step times, and the choice of workers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest

from embroute.config.cluster import Cluster, Host, Worker
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size
from embroute.cost.step_time import Traffic
from embroute.data.batch import one_hot
from embroute.data.schema import Field, Schema, Table
from embroute.kernels.codes import EARLY, LATE, LAZY, URGENT
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.simulator.simulation import (
    Outcome,
    StepReport,
    Workload,
    choose_workers,
    measure,
    measure_named,
    measured_steps,
    simulate_steps,
    with_workers,
)
from tests.workloads import Samples, draw_batches

SCHEMA = Schema(
    (Table("a", 150), Table("b", 30)), (Field("a", 0), Field("b", 1), Field("a2", 0)), ("number",)
)


def uneven_cluster() -> Cluster:
    """Different rates per direction, latencies, two workers on one host, a shard beside a
    worker."""
    hosts = (
        Host("store", 4e6, 3e6, 1e-4),
        Host("one", 1e6, 2e6, 2e-4),
        Host("two", 5e5, 8e5),
    )
    workers = (Worker(1), Worker(1, 1.5), Worker(2, 2.0), Worker(0))
    return Cluster(hosts, workers, (0, 2), 0, compute_s_per_sample=2e-4, dense_bytes=500)


@cache
def samples_of(count: int) -> Samples:
    return Samples(SCHEMA, draw_batches(SCHEMA, [count], 3))


def job_of(samples: int = 480, steps: int = 40, warmup: int = 10, **changes: object) -> Workload:
    setup = Setup(SCHEMA, uneven_cluster(), (4, 8), 12, "adagrad", Size(0.5, "share"))
    setup = replace(setup, **changes)  # type: ignore[arg-type]
    return Workload(samples_of(samples), setup, steps, warmup)


def equal_traffic(left: Traffic, right: Traffic) -> bool:
    names = [field.name for field in fields(Traffic)]
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def total(outcome: Outcome) -> tuple[int, int, float]:
    """Rows and bytes of a span with its drain difference, and its cost."""
    rows = int(outcome.traffic.rows_WKIP.sum() + outcome.drain_rows_W.sum())
    size = int(outcome.traffic.bytes_WKIP.sum() + outcome.drain_bytes_WK.sum())
    return rows, size, outcome.transmission_cost_s


POLICIES = ("nocache", "vanilla", "het(3)", "herald", "esd(1)", "esd(0.5)")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("split", [1, 13])
def test_two_spans_with_drains_sum_to_the_whole_run(name: str, split: int) -> None:
    whole = measure_named(name, job_of(warmup=0))
    first = measure_named(name, job_of(steps=split, warmup=0))
    second = measure_named(name, job_of(warmup=split))
    for of_whole, *parts in zip(total(whole), total(first), total(second), strict=True):
        assert of_whole == pytest.approx(sum(parts))


def test_postponed_pushes_are_charged_in_the_drain() -> None:
    # No row comes twice: on demand, nothing is pushed until the drain; write-through pushes all.
    rows_SF = np.arange(150).reshape(-1, 1)
    schema = Schema((Table("a", 150),), (Field("a", 0),))
    setup = Setup(schema, uneven_cluster(), 4, 10, cache=Size(1.0, "share"))
    job = Workload(Samples(schema, (one_hot(rows_SF),)), setup, 15, 5)
    eager = measure_named("dispatch=block sync=write-through", job)
    late = measure_named("dispatch=block sync=on-demand", job)
    assert eager.drain_rows_W.sum() == 0
    assert late.traffic.rows_WKIP[:, :, 2:].sum() == 0
    assert late.drain_rows_W.sum() == eager.traffic.rows_WKIP[:, :, 2:].sum() == 100
    assert total(late) == pytest.approx(total(eager))


def test_drain_due_at_the_start_is_subtracted() -> None:
    # Step 0 makes 4 rows dirty on each worker; step 1 sends them all elsewhere or keeps them.
    schema = Schema((Table("a", 8),), (Field("a", 0),))
    setup = Setup(schema, open_cluster("dc-2"), 4, 8, cache=Size(1.0, "share"))
    same = np.arange(8)
    swapped = np.roll(same, 4)

    def moved(second: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Outcome:
        rows = np.concatenate([same, second]).reshape(-1, 1)
        job = Workload(Samples(schema, (one_hot(rows),)), setup, 2, 1)
        return measure_named("dispatch=block sync=on-demand", job)

    kept, crossed = moved(same), moved(swapped)
    # 8 dirty rows at the start, the same 8 at the end.
    assert kept.drain_rows_W.tolist() == [0, 0]
    assert kept.traffic.rows_WKIP.sum() == 0
    # All 8 come home and are pulled by the other worker: dirty again at the end.
    assert crossed.drain_rows_W.tolist() == [0, 0]
    assert crossed.traffic.rows_WKIP.sum((0, 1, 3)).tolist() == [8, 0, 8, 0]


@pytest.mark.parametrize("name", [*POLICIES, "bagpipe(4)", "fae", "scars"])
def test_outcome_sums_the_steps_after_the_warmup(name: str) -> None:
    job = job_of(warmup=7)
    outcome = measure_named(name, job)
    reports = measured_steps(list(simulate_steps(make_policy(name), job)), 7)
    assert outcome.steps == len(reports)
    summed = reports[0].traffic
    for step in reports[1:]:
        summed = summed + step.traffic
    assert equal_traffic(outcome.traffic, summed)
    assert outcome.step_time_s == pytest.approx(np.mean([step.time.total_s for step in reports]))
    hits, touches = (sum(getattr(s, name) for s in reports) for name in ("hits", "touches"))
    assert outcome.hit_rate == hits / touches


def test_outcome_covers_the_steps_before_the_data_ends() -> None:
    outcome = measure_named("vanilla", job_of(samples=12 * 15 + 5, steps=100))
    assert outcome.steps == 16 - 10
    assert outcome.traffic.samples_W.sum() == 12 * 5 + 5


def test_each_epoch_reads_the_data_again() -> None:
    job = replace(job_of(samples=30, steps=100, warmup=1), epochs=3)
    # 12, 12 and 6 samples an epoch.
    assert [
        int(s.traffic.samples_W.sum()) for s in simulate_steps(make_policy("vanilla"), job)
    ] == [
        12,
        12,
        6,
    ] * 3


def test_data_shorter_than_the_warmup_is_refused() -> None:
    with pytest.raises(ValueError, match="--warmup 10: the data ends before the first measured"):
        measure_named("vanilla", job_of(samples=12 * 10))


class Links:
    """Bytes that leave and enter each host."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.up, self.down = [0.0] * len(cluster.hosts), [0.0] * len(cluster.hosts)

    def send(self, source: int, target: int, size: float) -> None:
        """Bytes within a host use no link."""
        if source != target:
            self.up[source] += size
            self.down[target] += size

    def rows(self, moved: Traffic, phases: tuple[int, ...]) -> Links:
        for w, worker in enumerate(self.cluster.workers):
            for k, shard in enumerate(self.cluster.shards):
                sizes_I = moved.bytes_WKIP[w, k][:, list(phases)].sum(1)
                self.send(shard, worker.host, float(sizes_I[:2].sum()))
                checks = moved.check_bytes_WK[w, k] if URGENT in phases else 0
                self.send(worker.host, shard, float(sizes_I[2:].sum() + checks))
        return self

    def control(self, moved: Traffic) -> Links:
        home = self.cluster.coordinator
        for w, worker in enumerate(self.cluster.workers):
            self.send(home, worker.host, float(moved.sample_bytes_W[w] + moved.plan_bytes_W[w]))
        for k, shard in enumerate(self.cluster.shards):
            self.send(home, shard, float(moved.plan_bytes_K[k]))
        return self

    def seconds(self, number: int) -> float:
        host = self.cluster.hosts[number]
        busy = max(self.up[number] / host.up_bytes_s, self.down[number] / host.down_bytes_s)
        return busy + host.latency_s if busy else 0.0


def by_hand(step: StepReport, cluster: Cluster) -> float:
    """The step time by the manual's formula, worker by worker and byte by byte."""
    moved, n = step.traffic, cluster.num_workers
    early = Links(cluster).rows(moved, (EARLY, LAZY)).control(moved)
    urgent, late = (Links(cluster).rows(moved, (phase,)) for phase in (URGENT, LATE))
    everything = Links(cluster).rows(moved, (EARLY, URGENT, LATE, LAZY)).control(moved)
    star = (
        n * min(h.up_bytes_s for h in cluster.hosts) <= cluster.hosts[cluster.shards[0]].up_bytes_s
    )
    star = star and not moved.hot_bytes
    turn, slowest = 0.0, np.inf
    for w, worker in enumerate(cluster.workers):
        host = cluster.hosts[worker.host]
        compute = int(moved.samples_W[w]) * cluster.compute_s_per_sample * worker.slowness
        busy = max(compute, early.seconds(worker.host)) + urgent.seconds(worker.host)
        if star:
            pushes = 1 / host.up_bytes_s if moved.samples_W[w] else 0.0
            busy += cluster.dense_bytes * (pushes + 1 / host.down_bytes_s)
            everything.send(worker.host, cluster.shards[0], cluster.dense_bytes)
            everything.send(cluster.shards[0], worker.host, cluster.dense_bytes)
        turn = max(turn, busy + late.seconds(worker.host))
        slowest = min(slowest, host.up_bytes_s, host.down_bytes_s)
    ring = 2 * (n - 1) / n * (cluster.dense_bytes + moved.hot_bytes) / slowest
    allreduce = 0.0 if star else ring
    return max(turn + allreduce, *(everything.seconds(k) for k in cluster.shards))


@pytest.mark.parametrize("name", ["vanilla", "het(2)", "esd(1)", "bagpipe(3)", "fae"])
def test_step_time_equals_the_formula_of_the_manual(name: str) -> None:
    job = job_of()
    for step in simulate_steps(make_policy(name), job):
        assert step.time.total_s == pytest.approx(by_hand(step, job.setup.cluster))
        # Each touch of a held copy is checked: hits and stale copies.
        held = step.touches - step.traffic.rows_WKIP[:, :, 0].sum()
        assert step.traffic.check_bytes_WK.sum() == (16 * held if name == "het(2)" else 0)


def test_job_on_one_host_has_no_transmission_cost() -> None:
    cluster = Cluster((Host("only", 1e6, 1e6, 1.0),), (Worker(0), Worker(0)), (0,), 0, 1e-3, 1e6)
    outcome = measure_named("vanilla", job_of(cluster=cluster))
    assert outcome.transmission_cost_s == 0
    assert outcome.step_time_s == pytest.approx(6e-3)
    assert outcome.traffic.rows_WKIP.sum() > 0


@pytest.mark.parametrize("name", ["het(3)", "esd(1)", "bagpipe(4)", "fae(shuffle=yes)", "scars"])
def test_simulation_is_deterministic(name: str) -> None:
    first, second = measure_named(name, job_of()), measure_named(name, job_of())
    assert equal_traffic(first.traffic, second.traffic)
    for field in ("workers", "steps", "transmission_cost_s", "step_time_s", "hit_rate"):
        assert getattr(first, field) == getattr(second, field)
    assert np.array_equal(first.drain_bytes_WK, second.drain_bytes_WK)


def test_shuffled_simulation_follows_its_seed() -> None:
    job = replace(job_of(), shuffle=True)
    other = replace(job, setup=replace(job.setup, seed=1))
    costs = [measure_named("vanilla", j).transmission_cost_s for j in (job, job, other)]
    assert costs[0] == costs[1] != costs[2]


def test_worker_subset_trains_the_same_batches() -> None:
    job = job_of(shares=(1.0, 2.0, 3.0, 4.0))
    before = deepcopy(job.setup.cluster)
    outcome = measure_named("esd(1, workers=3+1)", job)
    assert outcome.workers == (3, 1)
    assert outcome.traffic.samples_W.tolist() == [30 * 8, 30 * 4]
    assert outcome.setup.cluster.workers == (before.workers[3], before.workers[1])
    assert job.setup.cluster == before
    assert job.setup.num_workers == 4
    assert job.setup.capacity_WA.shape[0] == 4


def test_subset_of_workers_keeps_the_caches_of_its_workers() -> None:
    sizes = tuple(Size(rows, "rows") for rows in (30, 36, 48, 60))
    job = job_of(cache=sizes)
    assert job.setup.cache_rows_W.tolist() == [30, 36, 48, 60]
    assert with_workers(job, (3, 1)).setup.cache_rows_W.tolist() == [60, 36]


def test_larger_cache_of_one_worker_saves_pulls_of_that_worker() -> None:
    small, large = Size(60, "rows"), Size(1.0, "share")
    equal, unequal = (
        measure_named("vanilla", job_of(cache=cache)).traffic.rows_WKIP.sum((1, 3))[:, 0]
        for cache in (small, (small, large, small, small))
    )
    assert unequal[1] < equal[1]
    assert unequal[[0, 2, 3]].tolist() == equal[[0, 2, 3]].tolist()


def test_subset_of_all_workers_is_the_same_job() -> None:
    job = job_of()
    assert with_workers(job, (0, 1, 2, 3)) is job


@pytest.mark.parametrize("name", ["vanilla", "esd(1)"])
@pytest.mark.parametrize("compute_s", [0.0, 2e-4, 3e-3])
def test_workers_fast_chooses_the_best_prefix(name: str, compute_s: float) -> None:
    cluster = replace(open_cluster("edge-5"), compute_s_per_sample=compute_s)
    job = job_of(steps=15, warmup=5, cluster=cluster)  # no longer than a trial
    policy = make_policy(name)
    times = {
        count: measure(policy, with_workers(job, tuple(range(count)))).step_time_s
        for count in range(1, 6)
    }
    best = min(times, key=lambda count: times[count])
    chosen = choose_workers(replace(policy, workers="fast"), job)
    assert chosen == tuple(range(best))
    outcome = measure(replace(policy, workers="fast"), job)
    assert outcome.step_time_s == times[best]


def test_workers_fast_orders_by_link_then_compute() -> None:
    hosts = (Host("s", 1e9, 1e9), Host("slow", 1e3, 1e3), Host("fast", 1e8, 1e8))
    workers = (Worker(1), Worker(2, 3.0), Worker(2), Worker(1))
    cluster = Cluster(hosts, workers, (0,), 0, 1e-3)
    chosen = choose_workers(make_policy("vanilla(workers=fast)"), job_of(cluster=cluster))
    # The slow links would take seconds; of the fast ones, the slow computer still helps or waits.
    assert chosen in ((2,), (1, 2))


def test_workers_fast_skips_subsets_with_too_small_caches() -> None:
    # One worker would need all of a step's rows, two half of them.
    job = job_of(cluster=open_cluster("edge-4"), cache=Size(24, "rows"))
    with pytest.raises(ValueError, match="its cache holds"):
        measure_named("vanilla(workers=0)", job)
    assert len(choose_workers(make_policy("vanilla(workers=fast)"), job)) > 1


@pytest.mark.parametrize("workers", ["4", "0+0", "-1", "0+", "quick", "1,2"])
def test_bad_worker_lists_are_refused(workers: str) -> None:
    policy = replace(make_policy("vanilla"), workers=workers)
    with pytest.raises(ValueError, match=r"numbers below 4 such as 0\+1\+2, got"):
        choose_workers(policy, job_of())


def test_worker_subset_without_quota_is_refused() -> None:
    with pytest.raises(ValueError, match="--quotas: workers 0, 2, the only ones of the policy"):
        measure_named("vanilla(workers=0+2)", job_of(shares=(0.0, 1.0, 0.0, 1.0)))


def test_progress_callback_runs_once_per_step() -> None:
    ticks = []
    measure(make_policy("vanilla"), job_of(steps=9, warmup=4), lambda _: ticks.append(1))
    assert len(ticks) == 9


@pytest.mark.parametrize(
    ("order", "warmup", "expected"),
    [
        ("ccccHHHH", 0, "ccccHHHH"),
        ("ccccHHHH", 2, "ccHH"),
        ("ccccccHH", 3, "cccH"),
        ("ccHHccHH", 4, "ccHH"),  # the warm-up has both kinds
        ("cccccc", 2, "cccc"),
        ("HHHHHH", 2, "HHHH"),
        ("cHHHHH", 1, "HHHHH"),  # no cold batch is left to compare with
    ],
)
def test_warmup_keeps_the_share_of_hot_batches(order: str, warmup: int, expected: str) -> None:
    first = next(iter(simulate_steps(make_policy("vanilla"), job_of())))
    reports = [replace(first, step=i, hot=kind == "H") for i, kind in enumerate(order)]
    kept = measured_steps(reports, warmup)
    assert "".join("H" if report.hot else "c" for report in kept) == expected
    assert all(report.step >= warmup for report in kept)
