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

from embroute.kernels.array_types import F64, I64


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


def alone_share(a_C: F64, workers: int) -> F64:
    """Probability that no other worker touches a row in a step."""
    alone: F64 = (1 - a_C) ** (workers - 1)
    return alone


def pushed_at_once(touched: Law, workers: int, stay: float) -> Expected:
    """Rows of a cache whose copies stay for some steps; every update is pushed.

    A copy is fresh if no other worker touched its row in the g steps since its own last touch:
    sum over g <= T of a (1 - a)^(g-1) (1 - o)^g, a geometric sum.
    """
    a_C, rows_C = touched
    alone_C = alone_share(a_C, workers)
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
    return pushed_at_once(Law(a_C, rows_C), demand.workers, stay)


def waited_rows(demand: Demand) -> tuple[float, float]:
    """Rows of a worker and step that cannot travel beside compute where every update is pushed.

    Urgent pushes: of rows that any worker uses in the next step. Late pulls: of rows that another
    worker trained in the step before.
    """
    a_C, rows_C = demand.touched()
    alone_C = alone_share(a_C, demand.workers)
    urgent = float((rows_C * a_C * (1 - (1 - a_C) * alone_C)).sum())
    return urgent, float((rows_C * a_C * (1 - alone_C)).sum())
