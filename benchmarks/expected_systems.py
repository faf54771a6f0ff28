"""Expected traffic of published systems from access counts alone, for `benchmarks.theory`.

The formulas stand on those of `embroute.cost.expected`, which the adviser uses. Axes: C classes of
rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.staleness_chain import StalenessChain, run_chain
from embroute.cost.expected import (
    Demand,
    Expected,
    Law,
    alone_share,
    drawn_probability,
    expected_touches,
    pushed_at_once,
    residence,
    vanilla,
)
from embroute.kernels.array_types import F64, Bools

CHAIN_CLASSES, CHAIN_USES = 96, 4000  # classes of rows, and uses of a row that are simulated


def nocache(demand: Demand) -> Expected:
    """Every distinct row is pulled, and its gradient pushed."""
    rows = expected_touches(demand)
    return Expected(rows, 0.0, rows)


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
        kept = pushed_at_once(Law(a_C, rows_C), demand.workers, stay)
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
    alone_C = alone_share(a_C, workers)
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
