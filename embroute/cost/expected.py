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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from embroute.cost.staleness_chain import StalenessChain, run_chain
from embroute.kernels.array_types import F64, I64, Bools

MOST_CLASSES = 4096  # of one law; beyond, neighbours in rank are taken together
CHAIN_CLASSES, CHAIN_USES = 96, 4000


class Law(NamedTuple):
    """How often rows of a table are looked up: probabilities, and how many rows have each."""

    p_C: F64
    rows_C: F64


def uniform_law(num_rows: int) -> Law:
    """All rows alike."""
    return Law(np.array([1.0 / num_rows]), np.array([float(num_rows)]))


def power_law(num_rows: int, exponent: float) -> Law:
    """Row of rank r with probability in proportion to r**-exponent."""
    ranks = np.arange(1, min(num_rows, MOST_CLASSES // 2) + 1, dtype=np.float64)
    edges = np.unique(np.geomspace(len(ranks), num_rows, MOST_CLASSES // 2).astype(np.int64))
    first, last = edges[:-1].astype(np.float64), edges[1:].astype(np.float64)
    # The sum over a range of ranks, by the midpoint rule: exact to 1 in 10^7 from rank 2048 on.
    weights = np.concatenate([ranks**-exponent, _power_sum(first + 0.5, last + 0.5, exponent)])
    rows = np.concatenate([np.ones(len(ranks)), last - first])
    return Law(weights / rows / weights.sum(), rows)


def _power_sum(first: F64, last: F64, exponent: float) -> F64:
    if math.isclose(exponent, 1.0):
        logs: F64 = np.log(last / first)
        return logs
    power = 1 - exponent
    sums: F64 = (last**power - first**power) / power
    return sums


def empirical(counts: I64) -> Law:
    """As counted; rows that never came have probability 0."""
    values, rows = np.unique(counts, return_counts=True)
    total = max(1, int(counts.sum()))
    return Law(values / total, rows.astype(np.float64))


@dataclass(frozen=True)
class Demand:
    """What one step asks for: a law and expected look-ups of a sample for every table."""

    laws: tuple[Law, ...]
    lookups: tuple[float, ...]
    samples: float  # of one worker
    workers: int

    def touched(self, samples: float | None = None) -> Law:
        """Classes of all tables together: probability that some samples touch a row."""
        drawn = self.samples if samples is None else samples
        parts = [
            Law(_present(law.p_C, drawn * lookups), law.rows_C)
            for law, lookups in zip(self.laws, self.lookups, strict=True)
        ]
        return Law(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _present(p_C: F64, draws: float) -> F64:
    """Probability to be among some draws; log1p and expm1 keep it exact for tiny p."""
    with np.errstate(divide="ignore"):
        present: F64 = -np.expm1(draws * np.log1p(-np.minimum(p_C, 1.0)))
    return present


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
    while (rows_C * _present(a_C, high)).sum() < cache_rows:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if (rows_C * _present(a_C, middle)).sum() < cache_rows:
            low = middle
        else:
            high = middle
    return high


def _quiet(a_C: F64, workers: int) -> F64:
    """Probability that no other worker touches a row in a step."""
    quiet: F64 = (1 - a_C) ** (workers - 1)
    return quiet


def _write_through(touched: Law, workers: int, stay: float) -> Expected:
    """A copy is fresh if no other worker touched its row in the g steps since its own last touch:
    sum over g <= T of a (1 - a)^(g-1) (1 - o)^g, a geometric sum."""
    a_C, rows_C = touched
    quiet_C = _quiet(a_C, workers)
    both_C = (1 - a_C) * quiet_C  # nobody touches it
    gone_C = np.exp(stay * np.log1p(-np.minimum(a_C, 1 - 1e-16))) if stay < math.inf else 0 * a_C
    kept_C = both_C**stay if stay < math.inf else 0.0
    fresh_C = a_C * quiet_C * (1 - kept_C) / np.maximum(1 - both_C, 1e-300)
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
    """Bounded staleness, by following single rows: their clocks have no closed form.

    Rows are gathered into classes of like touch probability, and for each class the clocks of n
    workers and of the shard are drawn through some thousand uses.
    """
    if bound == 0:
        return vanilla(demand, cache_rows)
    a_C, rows_C = _coarse(*demand.touched())
    chain = StalenessChain(demand.workers, bound, residence(a_C, rows_C, cache_rows), CHAIN_USES)
    totals = np.zeros(4)
    rng = np.random.default_rng(0)
    for a, rows in zip(a_C.tolist(), rows_C.tolist(), strict=True):
        totals += rows * run_chain(chain, a, rng)
    return Expected(*totals.tolist())


def _coarse(a_C: F64, rows_C: F64) -> Law:
    """Few classes: rows of like probability together, the expected touches kept."""
    real = (a_C > 0) & (rows_C > 0)
    a_C, rows_C = a_C[real], rows_C[real]
    if len(a_C) <= CHAIN_CLASSES:
        return Law(a_C, rows_C)
    low, high = math.log(float(a_C.min())), math.log(float(a_C.max())) + 1e-12
    box_C = ((np.log(a_C) - low) / (high - low) * CHAIN_CLASSES).astype(np.int64)
    rows: F64 = np.bincount(box_C, rows_C, CHAIN_CLASSES + 1).astype(np.float64)
    touches: F64 = np.bincount(box_C, rows_C * a_C, CHAIN_CLASSES + 1).astype(np.float64)
    full = rows > 0
    return Law(touches[full] / rows[full], rows[full])


@dataclass(frozen=True)
class Hot:
    """A hot set: which classes of each table's law."""

    classes: tuple[Bools, ...]

    @staticmethod
    def above(laws: tuple[Law, ...], threshold: float) -> Hot:
        """Rows of at least a probability."""
        return Hot(tuple(law.p_C >= threshold for law in laws))

    def mass(self, table: int, law: Law) -> float:
        """Share of a table's look-ups that find a hot row."""
        return float((law.p_C * law.rows_C)[self.classes[table]].sum())


def free_share(demand: Demand, hot: Hot) -> float:
    """Share of samples all of whose rows are hot."""
    share = 1.0
    for table, (law, lookups) in enumerate(zip(demand.laws, demand.lookups, strict=True)):
        share *= hot.mass(table, law) ** lookups
    return share


def _given(demand: Demand, hot: Hot, cold_samples: bool) -> tuple[Demand, Demand]:
    """The demand of hot, or of cold, samples on hot rows and on cold rows."""
    free = free_share(demand, hot)
    parts: tuple[list[Law], list[Law]] = ([], [])
    for table, law in enumerate(demand.laws):
        chosen, mass = hot.classes[table], max(hot.mass(table, law), 1e-300)
        on_hot, on_cold = 1 / mass, 0.0
        if cold_samples:
            # A look-up of any sample, less those of hot samples.
            on_cold = 1 / max(1 - free, 1e-300)
            on_hot = max(0.0, 1 - free / mass) * on_cold
        parts[0].append(Law(np.where(chosen, law.p_C * on_hot, 0.0), law.rows_C))
        parts[1].append(Law(np.where(chosen, 0.0, law.p_C * on_cold), law.rows_C))
    made = [Demand(tuple(p), demand.lookups, demand.samples, demand.workers) for p in parts]
    return made[0], made[1]


def scars(demand: Demand, hot: Hot) -> Expected:
    """Hot rows all-reduced in every step, cold rows pulled and pushed; samples sorted.

    Means over hot and cold steps.
    """
    free, everyone = free_share(demand, hot), demand.samples * demand.workers
    rows = reduced = 0.0
    for share, cold in ((free, False), (1 - free, True)):
        if share <= 0:
            continue
        on_hot, on_cold = _given(demand, hot, cold)
        a_C, rows_C = on_hot.touched(everyone)
        reduced += share * float((a_C * rows_C).sum())
        rows += share * expected_touches(on_cold)
    return Expected(rows, 0.0, rows, 0.0, reduced)


def fae(demand: Demand, hot: Hot, cache_rows: float, run: tuple[float, float]) -> Expected:
    """Hot batches on replicas, cold ones through the shard, in turns. Means over all steps.

    `cache_rows`: what the hot set leaves of the cache; `run`: cold and hot steps of a turn.
    """
    cold_steps, hot_steps = run
    steps = max(cold_steps + hot_steps, 1e-12)
    rows = np.zeros(5)
    hot_demand, _ = _given(demand, hot, False)
    everyone = demand.samples * demand.workers
    if hot_steps > 0:
        a_C, rows_C = hot_demand.touched(everyone)
        rows[4] += hot_steps * float((a_C * rows_C).sum())
        # Each row that a hot run changed comes home once, from one worker.
        changed = float((rows_C * _present(a_C, hot_steps)).sum())
        rows[2] += changed / demand.workers
    if cold_steps > 0:
        on_hot, on_cold = _given(demand, hot, True)
        a_C, rows_C = on_cold.touched()
        stay = residence(a_C, rows_C, cache_rows)
        kept = _write_through(Law(a_C, rows_C), demand.workers, stay)
        rows[:3] += cold_steps * np.array([kept.miss, kept.stale, kept.update])
        stale, update, refilled = _hot_in_cold(on_hot, cold_steps)
        rows[1:3] += (stale + (refilled if hot_steps > 0 else 0.0), update)
    return Expected(*(rows / steps).tolist())


def _hot_in_cold(on_hot: Demand, steps: float) -> tuple[float, float, float]:
    """Replicas during a run of cold steps: stale pulls, pushes, and pulls at its end.

    At step s a replica is fresh if nobody has touched its row yet, or no other worker since its
    own last touch.
    """
    a_C, rows_C = on_hot.touched()
    workers = on_hot.workers
    quiet_C = _quiet(a_C, workers)
    both_C = (1 - a_C) * quiet_C
    idle_C = np.maximum(1 - both_C, 1e-300)
    # Sum over s = 1 ... of both^(s-1), and of the geometric sum of own last touches.
    untouched_C = np.where(a_C > 0, (1 - both_C**steps) / idle_C, steps)
    fresh_C = untouched_C + a_C * quiet_C / idle_C * (steps - untouched_C)
    touches_C = rows_C * a_C
    stale = float((touches_C * (steps - fresh_C)).sum())
    touched_C = _present(1 - both_C, steps)
    sole_C = a_C * quiet_C / idle_C
    refilled = float((rows_C * touched_C * (1 - sole_C)).sum())
    return stale, float(touches_C.sum()) * steps, refilled


def hurried(demand: Demand) -> tuple[float, float]:
    """Rows of a worker and step that cannot travel beside compute where every update is pushed.

    Pushes of rows that anyone uses in the next step, and pulls of rows that another worker trained
    in the step before.
    """
    a_C, rows_C = demand.touched()
    quiet_C = _quiet(a_C, demand.workers)
    urgent = float((rows_C * a_C * (1 - (1 - a_C) * quiet_C)).sum())
    return urgent, float((rows_C * a_C * (1 - quiet_C)).sum())
