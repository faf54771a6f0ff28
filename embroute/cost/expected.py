"""Expected traffic of a policy from access probabilities alone, for independent draws.

A worker draws b = samples x look-ups of a table in a step, so it touches row i with probability
a_i = 1 - (1 - p_i)^b, and others touch it with o_i = 1 - (1 - a_i)^(n - 1). Rows are independent of
each other but for the room in a cache. A cache of C rows that drops the least recently used one
holds what was touched in the last T steps, where T solves sum(1 - (1 - a_i)^T) = C (Che, Tung and
Wang, 2002). All sums run over classes of rows that are touched equally often.

Axes: C classes of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from embroute.cost.staleness_chain import StalenessChain, run_chain
from embroute.kernels.array_types import F64, I64, Bools

CHAIN_CLASSES, CHAIN_USES = 96, 4000  # classes of rows, and uses of a row that are simulated


class Law(NamedTuple):
    """How often rows of a table are looked up: probabilities, and how many rows have each."""

    p_C: F64
    rows_C: F64


def empirical(counts: I64) -> Law:
    """The law of access counts; rows that were never accessed have probability 0."""
    values, rows = np.unique(counts, return_counts=True)
    total = max(1, int(counts.sum()))
    return Law(values / total, rows.astype(np.float64))


@dataclass(frozen=True)
class Demand:
    """The look-ups of one step: a law and expected look-ups of a sample for every table."""

    laws: tuple[Law, ...]
    lookups: tuple[float, ...]
    samples: float  # of one worker
    workers: int

    def touched(self, samples: float | None = None) -> Law:
        """Classes of all tables together: probability that some samples touch a row."""
        drawn = self.samples if samples is None else samples
        tables = zip(self.laws, self.lookups, strict=True)
        return Law(
            p_C=np.concatenate([drawn_probability(law.p_C, drawn * n) for law, n in tables]),
            rows_C=np.concatenate([law.rows_C for law in self.laws]),
        )


def drawn_probability(p_C: F64, draws: float) -> F64:
    """Probability to be among some draws, 1 - (1 - p)^draws."""
    # log1p and expm1 keep it exact for the tiny p of long tails.
    with np.errstate(divide="ignore"):
        drawn: F64 = -np.expm1(draws * np.log1p(-np.minimum(p_C, 1.0)))
    return drawn


@dataclass(frozen=True)
class Expected:
    """Rows of one worker and step, by kind; all-reduced rows are of a step."""

    miss: float
    stale: float
    update: float
    evict: float = 0.0
    reduced: float = 0.0

    @property
    def moved(self) -> float:
        """Rows between a worker and the shards."""
        return self.miss + self.stale + self.update + self.evict


def expected_touches(demand: Demand) -> float:
    """Distinct rows that a worker touches in a step."""
    a_C, rows_C = demand.touched()
    return float((rows_C * a_C).sum())


def nocache(demand: Demand) -> Expected:
    """Every distinct row is pulled, and its gradient pushed."""
    rows = expected_touches(demand)
    return Expected(rows, 0.0, rows)


def residence(a_C: F64, rows_C: F64, cache_rows: float) -> float:
    """Steps that a copy stays after its last touch; infinite where the cache never fills."""
    if cache_rows >= rows_C[a_C > 0].sum():
        return math.inf
    low, high = 0.0, 1.0
    while (rows_C * drawn_probability(a_C, high)).sum() < cache_rows:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if (rows_C * drawn_probability(a_C, middle)).sum() < cache_rows:
            low = middle
        else:
            high = middle
    return high


def _alone(a_C: F64, workers: int) -> F64:
    """Probability that no other worker touches a row in a step."""
    alone: F64 = (1 - a_C) ** (workers - 1)
    return alone


def _write_through(touched: Law, workers: int, stay: float) -> Expected:
    """A copy is fresh if no other worker touched its row in the g steps since its own last touch:
    sum over g <= T of a (1 - a)^(g-1) (1 - o)^g, a geometric sum."""
    a_C, rows_C = touched
    alone_C = _alone(a_C, workers)
    idle_C = (1 - a_C) * alone_C  # no worker touches the row in a step
    gone_C = np.exp(stay * np.log1p(-np.minimum(a_C, 1 - 1e-16))) if stay < math.inf else 0 * a_C
    tail_C = idle_C**stay if stay < math.inf else 0.0  # terms of the sum beyond T
    fresh_C = a_C * alone_C * (1 - tail_C) / np.maximum(1 - idle_C, 1e-300)
    touches_C = rows_C * a_C
    miss, fresh = float((touches_C * gone_C).sum()), float((touches_C * fresh_C).sum())
    update = float(touches_C.sum())
    return Expected(miss, update - miss - fresh, update)


def vanilla(demand: Demand, cache_rows: float, age: float = math.inf) -> Expected:
    """Every update is pushed; a copy is stale once another worker has touched its row.

    `age`: steps since the caches were empty; they hold nothing older.
    """
    a_C, rows_C = demand.touched()
    stay = min(residence(a_C, rows_C, cache_rows), age)
    return _write_through(Law(a_C, rows_C), demand.workers, stay)


def het(demand: Demand, cache_rows: float, bound: int) -> Expected:
    """Bounded staleness, by simulation of single rows: their clocks have no closed form.

    Rows of similar touch probability form a class. For each class the clocks of n workers and of
    the shard are simulated through some thousand uses.
    """
    if bound == 0:
        return vanilla(demand, cache_rows)
    a_C, rows_C = _coarse(*demand.touched())
    chain = StalenessChain(demand.workers, bound, residence(a_C, rows_C, cache_rows), CHAIN_USES)
    totals = np.zeros(4)
    rng = np.random.default_rng(0)
    for a, rows in zip(a_C.tolist(), rows_C.tolist(), strict=True):
        totals += rows * run_chain(chain, a, rng)
    miss, stale, update, evict = totals.tolist()
    return Expected(miss, stale, update, evict)


def _coarse(a_C: F64, rows_C: F64) -> Law:
    """Few classes: rows of similar probability together, the expected touches kept."""
    touched = (a_C > 0) & (rows_C > 0)
    a_C, rows_C = a_C[touched], rows_C[touched]
    if len(a_C) <= CHAIN_CLASSES:
        return Law(a_C, rows_C)
    low, high = math.log(float(a_C.min())), math.log(float(a_C.max())) + 1e-12
    box_C = ((np.log(a_C) - low) / (high - low) * CHAIN_CLASSES).astype(np.int64)
    rows: F64 = np.bincount(box_C, rows_C, CHAIN_CLASSES + 1).astype(np.float64)
    touches: F64 = np.bincount(box_C, rows_C * a_C, CHAIN_CLASSES + 1).astype(np.float64)
    full = rows > 0
    return Law(touches[full] / rows[full], rows[full])


@dataclass(frozen=True)
class HotSet:
    """A hot set: which classes of each table's law."""

    classes: tuple[Bools, ...]

    def mass(self, table: int, law: Law) -> float:
        """Share of a table's look-ups that find a hot row."""
        return float((law.p_C * law.rows_C)[self.classes[table]].sum())


def free_share(demand: Demand, hot: HotSet) -> float:
    """Share of samples all of whose rows are hot."""
    share = 1.0
    for table, (law, lookups) in enumerate(zip(demand.laws, demand.lookups, strict=True)):
        share *= hot.mass(table, law) ** lookups
    return share


def _split_demand(demand: Demand, hot: HotSet, cold_samples: bool) -> tuple[Demand, Demand]:
    """The demand of hot, or of cold, samples on hot rows and on cold rows."""
    free = free_share(demand, hot)
    hot_laws: list[Law] = []
    cold_laws: list[Law] = []
    for table, law in enumerate(demand.laws):
        chosen, mass = hot.classes[table], max(hot.mass(table, law), 1e-300)
        on_hot, on_cold = 1 / mass, 0.0
        if cold_samples:
            # Bayes: look-ups of all samples less look-ups of hot samples.
            on_cold = 1 / max(1 - free, 1e-300)
            on_hot = max(0.0, 1 - free / mass) * on_cold
        hot_laws.append(Law(np.where(chosen, law.p_C * on_hot, 0.0), law.rows_C))
        cold_laws.append(Law(np.where(chosen, 0.0, law.p_C * on_cold), law.rows_C))
    return replace(demand, laws=tuple(hot_laws)), replace(demand, laws=tuple(cold_laws))


def scars(demand: Demand, hot: HotSet) -> Expected:
    """Hot rows all-reduced in every step, cold rows pulled and pushed; samples sorted.

    Means over hot and cold steps.
    """
    free, all_samples = free_share(demand, hot), demand.samples * demand.workers
    rows = reduced = 0.0
    for share, cold in ((free, False), (1 - free, True)):
        if share <= 0:
            continue
        on_hot, on_cold = _split_demand(demand, hot, cold)
        a_C, rows_C = on_hot.touched(all_samples)
        reduced += share * float((a_C * rows_C).sum())
        rows += share * expected_touches(on_cold)
    return Expected(rows, 0.0, rows, 0.0, reduced)


class Turn(NamedTuple):
    """Steps with cold batches, then steps with hot ones."""

    cold_steps: float
    hot_steps: float


def fae(demand: Demand, hot: HotSet, cache_rows: float, turn: Turn) -> Expected:
    """Hot batches on replicas, cold batches through the shard, in turns. Means over all steps.

    `cache_rows`: rows of the cache beside the hot set.
    """
    cold_steps, hot_steps = turn
    steps = max(cold_steps + hot_steps, 1e-12)
    rows = np.zeros(5)
    hot_demand, _ = _split_demand(demand, hot, False)
    all_samples = demand.samples * demand.workers
    if hot_steps > 0:
        a_C, rows_C = hot_demand.touched(all_samples)
        rows[4] += hot_steps * float((a_C * rows_C).sum())
        # Each row that hot steps changed is pushed once, by one worker.
        changed = float((rows_C * drawn_probability(a_C, hot_steps)).sum())
        rows[2] += changed / demand.workers
    if cold_steps > 0:
        on_hot, on_cold = _split_demand(demand, hot, True)
        a_C, rows_C = on_cold.touched()
        stay = residence(a_C, rows_C, cache_rows)
        kept = _write_through(Law(a_C, rows_C), demand.workers, stay)
        rows[:3] += cold_steps * np.array([kept.miss, kept.stale, kept.update])
        stale, update, refilled = _hot_in_cold(on_hot, cold_steps)
        rows[1:3] += (stale + (refilled if hot_steps > 0 else 0.0), update)
    return Expected(*(rows / steps).tolist())


def _hot_in_cold(on_hot: Demand, steps: float) -> tuple[float, float, float]:
    """Replicas during a run of cold steps: stale pulls, pushes, and pulls at the end of the run.

    At step s a replica is fresh if no worker has touched its row in the run, or no other worker
    since the holder's last touch.
    """
    a_C, rows_C = on_hot.touched()
    workers = on_hot.workers
    alone_C = _alone(a_C, workers)
    idle_C = (1 - a_C) * alone_C
    busy_C = np.maximum(1 - idle_C, 1e-300)
    # Sums over s = 1 ...: of idle^(s-1), and of the geometric sum over the holder's last touch.
    untouched_C = np.where(a_C > 0, (1 - idle_C**steps) / busy_C, steps)
    fresh_C = untouched_C + a_C * alone_C / busy_C * (steps - untouched_C)
    touches_C = rows_C * a_C
    stale = float((touches_C * (steps - fresh_C)).sum())
    touched_C = drawn_probability(1 - idle_C, steps)
    sole_C = a_C * alone_C / busy_C
    refilled = float((rows_C * touched_C * (1 - sole_C)).sum())
    return stale, float(touches_C.sum()) * steps, refilled


def waited_rows(demand: Demand) -> tuple[float, float]:
    """Rows of a worker and step that cannot travel beside compute where every update is pushed.

    Urgent pushes: of rows that any worker uses in the next step. Late pulls: of rows that another
    worker trained in the step before.
    """
    a_C, rows_C = demand.touched()
    alone_C = _alone(a_C, demand.workers)
    urgent = float((rows_C * a_C * (1 - (1 - a_C) * alone_C)).sum())
    return urgent, float((rows_C * a_C * (1 - alone_C)).sum())
