"""Which policy, batch, cache and workers to use: predicted for many, simulated for the best.

Prediction: the theory of independent draws prices `vanilla` on every choice of workers and batch,
from access counts of the data's head, scaled by the distinct rows that its batches really have.
What another policy saves over it is measured on a short trial with the same workers at the
smallest batch, and taken to hold at the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from embroute.config.cluster import Cluster
from embroute.config.spec import Size
from embroute.cost import expected
from embroute.cost.step_time import Traffic, step_time
from embroute.data.batch import ArraySource, Batch, Source, concat
from embroute.kernels.array_types import I64
from embroute.kernels.codes import (
    EARLY,
    GRADIENT,
    LATE,
    LAZY,
    MISS_PULL,
    NUM_KINDS,
    NUM_PHASES,
    UPDATE_PUSH,
    URGENT,
    VALUE_STATE,
)
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.simulate.simulation import Outcome, Workload, measure, start_simulation, with_workers

REFERENCE_POLICY = "vanilla"
TOGETHER = ("in-place",)  # where all workers and shards are on one host: without caches
# From plain ones, which decide in no time, to those that search.
EXACT = ("nocache", REFERENCE_POLICY, "bagpipe", "herald", "esd(1)", "embroute")
STALE_POLICIES = ("het(10)", "het(100)")
REORDERED = ("fae", "scars")
TRIAL = (24, 8)  # steps of a trial, and how many of them are warm-up
BRIEF = (32, 8)  # of a trial of a cache
BRIEFLY = {"embroute": "embroute(effort=400)"}  # what stands for a policy in such a trial
FULL_SPAN = (60, 10)
VERIFIED = 3  # choices that are simulated in full
EQUAL = 0.01  # choices no further apart are as good: the one with the plainest policy comes first
ROUNDED = 0.02  # a smaller cache that lengthens the step by no more than this is preferred
MORE_BYTES = 0.1  # nor moves so many more bytes of rows, be they hidden behind compute
BLOCKS = 20  # of samples whose distinct rows are counted
DENSE_COPIES = 4  # parameters, gradients, and two of the optimizer's


@dataclass(frozen=True)
class Constraints:
    """What is given: data, machines, memory, and which policies may be used."""

    setup: Setup  # with every worker; cache and batch are what is looked for
    source: ArraySource  # the head of the data
    memory_bytes: float  # of a worker
    batches: tuple[int, ...]  # samples a worker, with all workers at work
    worker_counts: tuple[int, ...]
    policies: tuple[str, ...]

    @cached_property
    def counts_R(self) -> I64:
        """Look-ups of every row in the head."""
        rows = self.source.batch.rows
        return np.bincount(rows[rows >= 0], minlength=self.setup.schema.num_rows)

    @cached_property
    def most_cached(self) -> int:
        """Rows of a cache that the head never fills; a larger one would do the same."""
        one_width = len(self.setup.arenas) == 1  # otherwise room is shared out by width
        used = np.count_nonzero(self.counts_R) if one_width else self.setup.schema.num_rows
        return int(used)

    def subsets(self) -> list[tuple[int, ...]]:
        """The fastest workers, of every number asked for."""
        speed = self.setup.cluster.fastest_first.tolist()
        return [tuple(sorted(speed[:count])) for count in self.worker_counts]


@dataclass(frozen=True)
class Configuration:
    """One configuration. `batch`: samples of a step, all workers together."""

    policy: str
    workers: tuple[int, ...]
    batch: int
    cache_rows: int


@dataclass(frozen=True)
class Recommendation:
    """A configuration with what it is expected to take, and what the simulation found."""

    choice: Configuration
    predicted_s: float
    found: Outcome | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step: simulated if it was, predicted otherwise."""
        return self.found.step_time_s if self.found else self.predicted_s

    @property
    def samples_s(self) -> float:
        """Samples a second."""
        return self.choice.batch / self.step_s


def first_samples(source: Source, samples: int) -> ArraySource:
    """The first samples of a source, in memory."""
    parts: list[Batch] = []
    for chunk in source.chunks():
        parts.append(chunk)
        if sum(map(len, parts)) >= samples:
            break
    if not parts:
        raise ValueError("--data: no samples")
    return ArraySource(source.schema, concat(parts).slice(0, samples))


def fixed_bytes(setup: Setup, batch: int) -> float:
    """Memory of a worker beside its cache: the dense part, and a step's rows and activations."""
    per_sample = 4 * sum(setup.widths[field.table] for field in setup.schema.fields)
    dense = DENSE_COPIES * setup.cluster.dense_bytes
    return float(dense + 4 * per_sample * batch)  # rows, their gradients, and as much again


def rows_that_fit(wish: Constraints, workers: int, batch: int) -> int:
    """Rows that fit beside the rest; a cache must hold what one worker looks up in a step."""
    setup = wish.setup
    row = float(setup.record_bytes_XA[VALUE_STATE].max())
    own = -(-batch // workers)
    rows = int((wish.memory_bytes - fixed_bytes(setup, own)) // row)
    return min(rows, setup.schema.num_rows)


def least_memory(wish: Constraints, workers: int, batch: int) -> float:
    """Bytes of a worker below which one step does not fit."""
    own = -(-batch // workers)
    rows = min(own * wish.setup.schema.num_fields, wish.setup.schema.num_rows)
    return float(
        fixed_bytes(wish.setup, own) + rows * wish.setup.record_bytes_XA[VALUE_STATE].max()
    )


def configurations(wish: Constraints) -> list[Configuration]:
    """Everything that fits the memory."""
    everyone, found = wish.setup.num_workers, []
    for workers in wish.subsets():
        for samples in wish.batches:
            batch = samples * everyone
            if least_memory(wish, len(workers), batch) > wish.memory_bytes:
                continue
            rows = rows_that_fit(wish, len(workers), batch)
            cached = {policy: 0 if policy in TOGETHER else rows for policy in wish.policies}
            found += [Configuration(policy, workers, batch, own) for policy, own in cached.items()]
    if not found:
        subsets = wish.subsets()
        needed = min(
            least_memory(wish, len(workers), samples * everyone)
            for workers in subsets
            for samples in wish.batches
        )
        raise ValueError(
            f"--memory-per-worker {wish.memory_bytes / 1e6:.4g}MB: one step needs at least "
            f"{needed / 1e6:.4g}MB, with batches of {min(wish.batches)} on "
            f"{max(map(len, subsets))} workers"
        )
    return found


def workload_of(wish: Constraints, choice: Configuration, span: tuple[int, int]) -> Workload:
    """The simulation of a choice."""
    rows = min(choice.cache_rows, wish.most_cached)
    setup = replace(wish.setup, batch_size=choice.batch, cache=Size(float(rows), "rows"))
    steps, warmup = span
    return with_workers(Workload(wish.source, setup, steps, warmup, epochs=None), choice.workers)


def predict_vanilla(wish: Constraints, choice: Configuration) -> float:
    """Expected step time of `vanilla`."""
    job = workload_of(wish, choice, FULL_SPAN)
    setup, cluster = job.setup, job.setup.cluster
    workers = cluster.num_workers
    tables = np.split(wish.counts_R, setup.schema.first_rows[1:-1])
    lookups = np.array([float(counts.sum()) for counts in tables]) / len(wish.source.batch)
    demand = expected.Demand(
        tuple(expected.empirical(counts) for counts in tables),
        tuple(lookups.tolist()),
        choice.batch / workers,
        workers,
    )
    rows = expected.vanilla(demand, choice.cache_rows, age=sum(FULL_SPAN) / 2)
    hurried = expected.hurried(demand)
    # Neighbours in time share more rows than independent draws: count what a worker touches.
    share = distinct_rows(wish.source.batch, -(-choice.batch // workers)) / rows.update
    return step_time(_traffic(setup, rows, hurried, share), cluster).total_s


def distinct_rows(batch: Batch, samples: int) -> float:
    """Mean number of distinct rows of so many samples in a row."""
    starts = np.linspace(0, max(0, len(batch) - samples), BLOCKS).astype(int)
    blocks = (batch.slice(start, start + samples).rows for start in starts.tolist())
    return float(np.mean([len(np.unique(rows[rows >= 0])) for rows in blocks]))


def _traffic(
    setup: Setup, rows: expected.Expected, hurried: tuple[float, float], share: float
) -> Traffic:
    """A share of the expected rows of one worker as everyone's traffic, spread over the shards."""
    cluster, samples = setup.cluster, setup.batch_size / setup.num_workers
    workers, shards = cluster.num_workers, cluster.num_shards
    rows_WKIP = np.zeros((workers, shards, NUM_KINDS, NUM_PHASES))
    pulls, (urgent, late) = rows.miss + rows.stale, hurried
    rows_WKIP[:, :, MISS_PULL, EARLY] = max(0.0, pulls - late) / shards
    rows_WKIP[:, :, MISS_PULL, LATE] = min(pulls, late) / shards
    rows_WKIP[:, :, UPDATE_PUSH, URGENT] = urgent / shards
    rows_WKIP[:, :, UPDATE_PUSH, LAZY] = max(0.0, rows.update - urgent) / shards
    rows_WKIP *= share
    row_bytes = float(setup.record_bytes_XA[GRADIENT].mean())
    fields, dense = setup.schema.num_fields, len(setup.schema.dense)
    sample_bytes_W = np.full(workers, round(4 * samples * (1 + dense + fields)))
    none_W, none_K = np.zeros(workers, np.int64), np.zeros(shards, np.int64)
    counted = np.round(rows_WKIP).astype(np.int64)
    sizes = np.round(rows_WKIP * row_bytes).astype(np.int64)
    samples_W = np.full(workers, round(samples))
    return Traffic(counted, sizes, samples_W, sample_bytes_W, none_W, none_K)


Tick = Callable[[str], None]


def predict_all(
    wish: Constraints, found: list[Configuration], tick: Tick
) -> Iterator[Recommendation]:
    """Predict every choice; trials run once for each policy and set of workers."""
    smallest = min(choice.batch for choice in found)
    trials: dict[tuple[str, tuple[int, ...]], float] = {}
    theory: dict[tuple[tuple[int, ...], int], float] = {}
    for choice in found:
        key = (choice.workers, choice.batch)
        if key not in theory:
            rows = rows_that_fit(wish, len(choice.workers), choice.batch)
            theory[key] = predict_vanilla(wish, replace(choice, cache_rows=rows))
        for policy in (REFERENCE_POLICY, choice.policy):
            if (policy, choice.workers) not in trials:
                tick(f"trial of {policy} on {len(choice.workers)} workers")
                rows = rows_that_fit(wish, len(choice.workers), smallest)
                trial = replace(choice, policy=policy, batch=smallest, cache_rows=rows)
                outcome = measure(make_policy(policy), workload_of(wish, trial, TRIAL))
                trials[policy, choice.workers] = outcome.step_time_s
        saving = trials[choice.policy, choice.workers] / trials[REFERENCE_POLICY, choice.workers]
        yield Recommendation(choice, saving * theory[key])


def stages(wish: Constraints) -> int:
    """How often `advise` will tick, about: trials, simulations, caches."""
    return len(wish.policies) * len(wish.worker_counts) + VERIFIED + 5


def advise(wish: Constraints, tick: Tick) -> list[Recommendation]:
    """All choices, best first; the first few are simulated, the very first with a trimmed cache."""
    found = sorted(predict_all(wish, configurations(wish), tick), key=lambda one: -one.samples_s)
    best = []
    for advice in found[:VERIFIED]:
        tick(f"simulating {advice.choice.policy} on {len(advice.choice.workers)} workers")
        best.append(replace(advice, found=_simulate(wish, advice.choice, FULL_SPAN)))
    best.sort(key=lambda one: -one.samples_s)
    alike = [one for one in best if one.samples_s >= (1 - EQUAL) * best[0].samples_s]
    first = min(alike, key=lambda one: wish.policies.index(one.choice.policy))
    rest = [one for one in best if one is not first]
    return [trim_cache(wish, first, tick), *rest, *found[VERIFIED:]]


def _simulate(wish: Constraints, choice: Configuration, span: tuple[int, int]) -> Outcome:
    return measure(make_policy(choice.policy), workload_of(wish, choice, span))


def trim_cache(wish: Constraints, advice: Recommendation, tick: Tick) -> Recommendation:
    """The smallest cache, halving, whose step is hardly longer; found by bisection."""
    most = min(advice.choice.cache_rows, wish.most_cached)
    batch, workers = advice.choice.batch, len(advice.choice.workers)
    held = distinct_rows(wish.source.batch, batch) / workers  # in a step, by the fullest cache
    sizes = [rows for rows in (most >> i for i in range(most.bit_length())) if rows >= held]
    if not sizes:
        return advice
    policy = BRIEFLY.get(advice.choice.policy, advice.choice.policy)
    brief = replace(advice.choice, policy=policy)
    tick(f"a cache of {most:,} rows")
    whole = _simulate(wish, brief, BRIEF)
    enough, too_small = 0, len(sizes)
    while too_small - enough > 1:
        middle = (enough + too_small) // 2
        choice = replace(brief, cache_rows=sizes[middle])
        tick(f"a cache of {sizes[middle]:,} rows")
        fits = _as_good(wish, choice, BRIEF, whole) is not None
        enough, too_small = (middle, too_small) if fits else (enough, middle)
    for rows in reversed(sizes[: enough + 1]):
        choice = replace(advice.choice, cache_rows=rows)
        tick(f"simulating a cache of {rows:,} rows")
        outcome = _as_good(wish, choice, FULL_SPAN, advice.found or whole)
        if outcome is not None:
            return replace(advice, choice=choice, found=outcome)
    return advice


def _as_good(
    wish: Constraints, choice: Configuration, span: tuple[int, int], whole: Outcome
) -> Outcome | None:
    """What a choice comes to, if it is hardly worse than another in step time and in bytes."""
    try:
        found = _simulate(wish, choice, span)
    except ValueError:
        return None  # the cache does not hold one step
    moved, before = found.traffic.bytes_WKIP.sum(), whole.traffic.bytes_WKIP.sum()
    good = found.step_time_s <= (1 + ROUNDED) * whole.step_time_s
    return found if good and moved <= (1 + MORE_BYTES) * before else None


def hot_rows(wish: Constraints, choice: Configuration) -> int:
    """Rows that the policy keeps on every worker; none where it has no hot set."""
    policy = make_policy(choice.policy)
    return (
        len(start_simulation(policy, workload_of(wish, choice, FULL_SPAN)).hot_rows)
        if policy.regroup
        else 0
    )


def only_fast(wish: Constraints, advices: list[Recommendation]) -> str | None:
    """What leaving workers out gives, where the first advice does so."""
    first = advices[0]
    left_out = wish.setup.num_workers - len(first.choice.workers)
    rivals = [one for one in advices if len(one.choice.workers) == wish.setup.num_workers]
    if not left_out or not rivals:
        return None
    best = max(rivals, key=lambda one: one.samples_s)
    return (
        f"{left_out} of {wish.setup.num_workers} workers are left out: with all of them "
        f"{best.choice.policy} is predicted to reach {best.samples_s:,.0f} samples/s instead of "
        f"{first.samples_s:,.0f}"
    )


def cluster_with(cluster: Cluster, dense_bytes: float, compute_s: float) -> Cluster:
    """The cluster with what the model adds."""
    return replace(cluster, dense_bytes=dense_bytes, compute_s_per_sample=compute_s)
