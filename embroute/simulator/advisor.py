"""Which policy, batch, cache and workers to use: predicted for many, simulated for the best.

The theory of independent draws predicts `vanilla` for every choice of workers and batch. It takes
access counts from the head of the data, scaled by the distinct rows that real batches have. The
saving of another policy is measured in a short trial with the same workers at the smallest batch,
and assumed for the other batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from embroute.config.spec import Size
from embroute.cost import expected
from embroute.cost.step_time import Traffic, step_time
from embroute.data.access_counts import Calibration
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
from embroute.planner.setup import STEP_ROOM, Setup
from embroute.policies.catalog import make_policy
from embroute.policies.regroup import HotRows
from embroute.simulator.simulation import Outcome, Workload, measure, start_simulation, with_workers

REFERENCE_POLICY = "vanilla"
ONE_HOST_POLICIES = ("in-place",)  # for all workers and shards on one host; without caches
# From the plainest, which decides in no time, to the one that searches.
EXACT_POLICIES = ("nocache", REFERENCE_POLICY, "bagpipe", "herald", "esd(1)", "embroute")
STALE_POLICIES = ("het(10)", "het(100)")
REORDERING_POLICIES = ("fae", "scars")


class StepSpan(NamedTuple):
    """Steps of a simulation, and how many of them are warm-up."""

    steps: int
    warmup: int


TRIAL_SPAN = StepSpan(24, 8)  # of a policy
CACHE_TRIAL_SPAN = StepSpan(32, 8)
CACHE_TRIAL_POLICIES = {"embroute": "embroute(effort=400)"}  # stand-ins that decide faster
FULL_SPAN = StepSpan(60, 10)
NUM_SIMULATED = 3  # choices that are simulated in full
EQUAL = 0.01  # choices no further apart count as equal; the plainest policy comes first
SLOWER = 0.02  # how much longer the step may get with a smaller cache
MORE_BYTES = 0.1  # how many more row bytes may move, even if compute hides them
BLOCKS = 20  # of samples whose distinct rows are counted
DENSE_COPIES = 4  # parameters, gradients, and two of the optimizer's


@dataclass(frozen=True)
class Constraints:
    """Data, machines, memory, and the policies that may be used."""

    setup: Setup  # with every worker; cache and batch are to be chosen
    source: ArraySource  # the head of the data
    memory_bytes: float  # of a worker
    batches: tuple[int, ...]  # samples a worker, with all workers at work
    worker_counts: tuple[int, ...]
    policies: tuple[str, ...]

    @cached_property
    def lookups(self) -> dict[Calibration, I64]:
        """Look-ups by row in samples of the head, which all its simulations share."""
        return {}

    @cached_property
    def counts_R(self) -> I64:
        """Look-ups of every row in the head."""
        rows = self.source.batch.rows
        return np.bincount(rows[rows >= 0], minlength=self.setup.schema.num_rows)

    @cached_property
    def max_cache_rows(self) -> int:
        """Rows of a cache that the head never fills; a larger one would act the same."""
        one_width = len(self.setup.arenas) == 1  # otherwise slots are divided among widths
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
    """A configuration with its predicted step time and, if simulated, its outcome."""

    choice: Configuration
    predicted_s: float
    outcome: Outcome | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step: simulated if it was, predicted otherwise."""
        return self.outcome.step_time_s if self.outcome else self.predicted_s

    @property
    def samples_s(self) -> float:
        """Samples a second."""
        return self.choice.batch / self.step_s


def first_samples(source: Source, samples: int) -> ArraySource:
    """The first samples of a source, in memory."""
    chunks: list[Batch] = []
    for chunk in source.chunks():
        chunks.append(chunk)
        if sum(map(len, chunks)) >= samples:
            break
    if not chunks:
        raise ValueError("--data: no samples")
    return ArraySource(source.schema, concat(chunks).slice(0, samples))


def fixed_bytes(setup: Setup, batch: int) -> float:
    """Memory of a worker beside its cache: the dense part, and a step's rows and activations."""
    per_sample = 4 * sum(setup.widths[field.table] for field in setup.schema.fields)
    dense = DENSE_COPIES * setup.cluster.dense_bytes
    return float(dense + 4 * per_sample * batch)  # rows, their gradients, and as much again


def rows_that_fit(constraints: Constraints, workers: int, batch: int) -> int:
    """Rows of a cache that fit a worker's memory besides everything else."""
    setup = constraints.setup
    row_bytes = float(setup.record_bytes_XA[VALUE_STATE].max())
    micro_batch = -(-batch // workers)
    rows = int((constraints.memory_bytes - fixed_bytes(setup, micro_batch)) // row_bytes)
    return min(rows, setup.schema.num_rows)


def least_memory(constraints: Constraints, workers: int, batch: int) -> float:
    """Bytes of a worker below which one step does not fit."""
    setup, micro_batch = constraints.setup, -(-batch // workers)
    rows = min(micro_batch * setup.schema.num_fields, setup.schema.num_rows)
    row_bytes = setup.record_bytes_XA[VALUE_STATE].max()
    return float(fixed_bytes(setup, micro_batch) + rows * row_bytes)


def configurations(constraints: Constraints) -> list[Configuration]:
    """Everything that fits the memory."""
    num_workers, choices, needed = constraints.setup.num_workers, [], []
    for workers in constraints.subsets():
        for samples in constraints.batches:
            batch = samples * num_workers
            needed.append(least_memory(constraints, len(workers), batch))
            if needed[-1] > constraints.memory_bytes:
                continue
            rows = rows_that_fit(constraints, len(workers), batch)
            for policy in constraints.policies:
                cache_rows = 0 if policy in ONE_HOST_POLICIES else rows
                choices.append(Configuration(policy, workers, batch, cache_rows))
    if not choices:
        raise ValueError(
            f"--memory-per-worker {constraints.memory_bytes / 1e6:.4g}MB: one step needs at least "
            f"{min(needed) / 1e6:.4g}MB, with batches of {min(constraints.batches)} on "
            f"{max(constraints.worker_counts)} workers"
        )
    return choices


def workload_of(constraints: Constraints, choice: Configuration, span: StepSpan) -> Workload:
    """The simulation of a choice."""
    rows = min(choice.cache_rows, constraints.max_cache_rows)
    setup = replace(constraints.setup, batch_size=choice.batch, cache=Size(float(rows), "rows"))
    job = Workload(
        constraints.source,
        setup,
        span.steps,
        span.warmup,
        epochs=None,
        lookups=constraints.lookups,
    )
    return with_workers(job, choice.workers)


def predict_vanilla(constraints: Constraints, choice: Configuration) -> float:
    """Expected step time of `vanilla`."""
    job = workload_of(constraints, choice, FULL_SPAN)
    setup, cluster = job.setup, job.setup.cluster
    workers = cluster.num_workers
    counts_by_table = np.split(constraints.counts_R, setup.schema.first_rows[1:-1])
    lookups = np.array([float(counts.sum()) for counts in counts_by_table])
    lookups /= len(constraints.source.batch)
    demand = expected.Demand(
        tuple(expected.empirical(counts) for counts in counts_by_table),
        tuple(lookups.tolist()),
        choice.batch / workers,
        workers,
    )
    rows = expected.vanilla(demand, choice.cache_rows, age=sum(FULL_SPAN) / 2)
    waited = expected.waited_rows(demand)
    # Consecutive samples share more rows than independent draws: count the rows of real blocks.
    share = distinct_rows(constraints.source.batch, -(-choice.batch // workers)) / rows.update
    return step_time(_traffic(setup, rows, waited, share), cluster).total_s


def distinct_rows(batch: Batch, samples: int) -> float:
    """Mean number of distinct rows in blocks of so many consecutive samples."""
    starts = np.linspace(0, max(0, len(batch) - samples), BLOCKS).astype(int)
    blocks = (batch.slice(start, start + samples).rows for start in starts.tolist())
    return float(np.mean([len(np.unique(rows[rows >= 0])) for rows in blocks]))


def _traffic(
    setup: Setup, rows: expected.Expected, waited: tuple[float, float], share: float
) -> Traffic:
    """A share of one worker's expected rows as the traffic of all, spread over the shards."""
    cluster, samples = setup.cluster, setup.batch_size / setup.num_workers
    workers, shards = cluster.num_workers, cluster.num_shards
    rows_WKIP = np.zeros((workers, shards, NUM_KINDS, NUM_PHASES))
    pulls, (urgent, late) = rows.miss + rows.stale, waited
    rows_WKIP[:, :, MISS_PULL, EARLY] = max(0.0, pulls - late) / shards
    rows_WKIP[:, :, MISS_PULL, LATE] = min(pulls, late) / shards
    rows_WKIP[:, :, UPDATE_PUSH, URGENT] = urgent / shards
    rows_WKIP[:, :, UPDATE_PUSH, LAZY] = max(0.0, rows.update - urgent) / shards
    rows_WKIP *= share
    row_bytes = float(setup.record_bytes_XA[GRADIENT].mean())
    fields, dense = setup.schema.num_fields, len(setup.schema.dense)
    return Traffic(
        rows_WKIP=np.round(rows_WKIP).astype(np.int64),
        bytes_WKIP=np.round(rows_WKIP * row_bytes).astype(np.int64),
        samples_W=np.full(workers, round(samples)),
        sample_bytes_W=np.full(workers, round(4 * samples * (1 + dense + fields))),
        plan_bytes_W=np.zeros(workers, np.int64),
        plan_bytes_K=np.zeros(shards, np.int64),
    )


Tick = Callable[[str], None]


def predict_all(
    constraints: Constraints, choices: list[Configuration], tick: Tick
) -> Iterator[Recommendation]:
    """Predict every choice; trials run once for each policy and set of workers."""
    smallest = min(choice.batch for choice in choices)
    trial_s: dict[tuple[str, tuple[int, ...]], float] = {}
    vanilla_s: dict[tuple[tuple[int, ...], int], float] = {}
    for choice in choices:
        key = (choice.workers, choice.batch)
        if key not in vanilla_s:
            rows = rows_that_fit(constraints, len(choice.workers), choice.batch)
            vanilla_s[key] = predict_vanilla(constraints, replace(choice, cache_rows=rows))
        for policy in (REFERENCE_POLICY, choice.policy):
            if (policy, choice.workers) not in trial_s:
                tick(f"trial of {policy} on {len(choice.workers)} workers")
                rows = rows_that_fit(constraints, len(choice.workers), smallest)
                trial = replace(choice, policy=policy, batch=smallest, cache_rows=rows)
                outcome = _simulate(constraints, trial, TRIAL_SPAN)
                trial_s[policy, choice.workers] = outcome.step_time_s
        ratio = trial_s[choice.policy, choice.workers] / trial_s[REFERENCE_POLICY, choice.workers]
        yield Recommendation(choice, ratio * vanilla_s[key])


def stages(constraints: Constraints) -> int:
    """How often `recommendations` ticks, about: trials, simulations, caches."""
    return len(constraints.policies) * len(constraints.worker_counts) + NUM_SIMULATED + 5


def _by_speed(advice: Recommendation) -> float:
    return -advice.samples_s


def recommendations(constraints: Constraints, tick: Tick) -> list[Recommendation]:
    """All choices, best first; the first few are simulated, the very first with a trimmed cache."""
    predicted = sorted(predict_all(constraints, configurations(constraints), tick), key=_by_speed)
    simulated = []
    for advice in predicted[:NUM_SIMULATED]:
        tick(f"simulating {advice.choice.policy} on {len(advice.choice.workers)} workers")
        outcome = _simulate(constraints, advice.choice, FULL_SPAN)
        simulated.append(replace(advice, outcome=outcome))
    simulated.sort(key=_by_speed)
    least = (1 - EQUAL) * simulated[0].samples_s
    equals = [advice for advice in simulated if advice.samples_s >= least]
    first = min(equals, key=lambda advice: constraints.policies.index(advice.choice.policy))
    rest = [advice for advice in simulated if advice is not first]
    return [trim_cache(constraints, first, tick), *rest, *predicted[NUM_SIMULATED:]]


def _simulate(constraints: Constraints, choice: Configuration, span: StepSpan) -> Outcome:
    return measure(make_policy(choice.policy), workload_of(constraints, choice, span))


def trim_cache(constraints: Constraints, advice: Recommendation, tick: Tick) -> Recommendation:
    """The smallest cache, by halving, with which the step is hardly longer."""
    most = min(advice.choice.cache_rows, constraints.max_cache_rows)
    setup = workload_of(constraints, advice.choice, FULL_SPAN).setup
    # A cache must hold every step of the training too, and each arena has its share of it.
    share = np.max(STEP_ROOM * setup.step_rows_A / np.maximum(1, setup.rows_A))
    least = min(1.0, float(share)) * setup.schema.num_rows
    sizes = [rows for rows in (most >> i for i in range(most.bit_length())) if rows >= least]
    if not sizes:
        return advice
    stand_in = CACHE_TRIAL_POLICIES.get(advice.choice.policy, advice.choice.policy)
    brief = replace(advice.choice, policy=stand_in)
    tick(f"a cache of {most:,} rows")
    whole = _simulate(constraints, brief, CACHE_TRIAL_SPAN)
    # Bisection over falling sizes: sizes[enough] is large enough, sizes[too_small] is not.
    enough, too_small = 0, len(sizes)
    while too_small - enough > 1:
        middle = (enough + too_small) // 2
        choice = replace(brief, cache_rows=sizes[middle])
        tick(f"a cache of {sizes[middle]:,} rows")
        if _outcome_if_as_good(constraints, choice, CACHE_TRIAL_SPAN, whole) is None:
            too_small = middle
        else:
            enough = middle
    # Brief trials are less exact: confirm in full simulations, from the smallest size on.
    for rows in reversed(sizes[: enough + 1]):
        choice = replace(advice.choice, cache_rows=rows)
        tick(f"simulating a cache of {rows:,} rows")
        outcome = _outcome_if_as_good(constraints, choice, FULL_SPAN, advice.outcome or whole)
        if outcome is not None:
            return replace(advice, choice=choice, outcome=outcome)
    return advice


def _outcome_if_as_good(
    constraints: Constraints, choice: Configuration, span: StepSpan, reference: Outcome
) -> Outcome | None:
    """The outcome of a choice if it is hardly worse than another in step time and in bytes."""
    try:
        outcome = _simulate(constraints, choice, span)
    except ValueError:
        return None  # the cache does not hold one step
    moved, limit = (o.traffic.bytes_WKIP.sum() for o in (outcome, reference))
    is_fast = outcome.step_time_s <= (1 + SLOWER) * reference.step_time_s
    return outcome if is_fast and moved <= (1 + MORE_BYTES) * limit else None


def hot_rows(constraints: Constraints, choice: Configuration) -> int:
    """Rows that the policy keeps on every worker; 0 if it has no hot set."""
    policy = make_policy(choice.policy)
    if not policy.regroup:
        return 0
    state = start_simulation(policy, workload_of(constraints, choice, FULL_SPAN))
    return len(state.memory(HotRows).rows)


def only_fast(constraints: Constraints, advices: Sequence[Recommendation]) -> str | None:
    """What leaving workers out gains, if the first recommendation does so."""
    first, num_workers = advices[0], constraints.setup.num_workers
    left_out = num_workers - len(first.choice.workers)
    rivals = [advice for advice in advices if len(advice.choice.workers) == num_workers]
    if not left_out or not rivals:
        return None
    best = min(rivals, key=_by_speed)
    return (
        f"{left_out} of {num_workers} workers are left out: with all of them "
        f"{best.choice.policy} is predicted to reach {best.samples_s:,.0f} samples/s instead of "
        f"{first.samples_s:,.0f}"
    )
