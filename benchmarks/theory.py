"""Expected traffic beside the simulator's on real traces, and the causes of the gap.

Run `python -m benchmarks.theory --data FOLDER`. FOLDER holds criteo_adkdd21 and globo.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import expected_systems as systems
from benchmarks.expected_systems import HotSet
from benchmarks.record import markdown, record
from benchmarks.sanity import opened_traces
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size
from embroute.cost import expected
from embroute.cost.expected import Demand, Expected, Law
from embroute.data.batch import ArraySource, Source
from embroute.kernels.array_types import I64
from embroute.planner.interfaces import Policy
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.policies.regroup import HotRows
from embroute.simulator.advisor import distinct_rows, first_samples
from embroute.simulator.simulation import Workload, measure, start_simulation

WORKERS, SAMPLES, STEPS, WARMUP, SPARE = 4, 64, 352, 160, 40
CACHE, HOT = 0.1, 0.04  # of all rows that occur
TURN = 16  # batches that FAE sorts into cold and hot ones at a time
POLICIES = ("nocache", "vanilla", "het(10)", "fae", "scars")
VARIANTS = ("drawn", "columns", "samples", "ordered")


def variant(source: ArraySource, name: str) -> ArraySource:
    """The same look-ups of every field, in another order or drawn anew."""
    batch, rng = source.batch, np.random.default_rng(3)
    rows_SF = batch.rows.reshape(len(batch), -1)
    count, fields = rows_SF.shape
    if name == "drawn":
        rows_SF = np.stack([rows_SF[rng.integers(count, size=count), f] for f in range(fields)], 1)
    elif name == "columns":
        rows_SF = rng.permuted(rows_SF, axis=0)
    elif name == "samples":
        rows_SF = rng.permutation(rows_SF)
    return ArraySource(source.schema, replace(batch, rows=rows_SF.reshape(-1)))


@dataclass(frozen=True)
class Trace:
    """Samples as recorded, and the count of each row in them."""

    ordered: ArraySource
    counts_R: I64

    def rows(self, share: float) -> int:
        """A share of the rows that occur."""
        return int(share * np.count_nonzero(self.counts_R))

    def job(self, source: ArraySource) -> Workload:
        """A run on these samples in some order."""
        # Wide rows: FAE keeps every table below 1 MB on all workers.
        cache = Size(float(self.rows(CACHE)), "rows")
        setup = Setup(source.schema, open_cluster("dc-4"), 1024, WORKERS * SAMPLES, cache=cache)
        return Workload(source, setup, STEPS, WARMUP)

    def demand(self) -> Demand:
        """The look-ups of a step, by counts alone."""
        tables = np.split(self.counts_R, self.ordered.schema.first_rows[1:-1])
        laws = tuple(Law(counts / max(1, counts.sum()), np.ones(len(counts))) for counts in tables)
        lookups = tuple(float(counts.sum()) / len(self.ordered.batch) for counts in tables)
        return Demand(laws, lookups, SAMPLES, WORKERS)

    def policy(self, name: str) -> Policy:
        """The policy, with a hot set of a fixed size if it has a hot set."""
        hot = f"(hot={self.rows(HOT)}rows)" if name in ("fae", "scars") else ""
        return make_policy(name + hot)


def trace_of(source: Source) -> Trace:
    """The first samples of a source."""
    ordered = first_samples(source, WORKERS * SAMPLES * (STEPS + SPARE))
    return Trace(ordered, np.bincount(ordered.batch.rows, minlength=source.schema.num_rows))


def predicted(policy: str, trace: Trace, source: ArraySource) -> Expected:
    """Expected traffic from access counts and the hot set that the policy chose."""
    demand, cache = trace.demand(), trace.rows(CACHE)
    if policy == "nocache":
        return systems.nocache(demand)
    if policy == "vanilla":
        return expected.vanilla(demand, cache)
    if policy.startswith("het"):
        return systems.het(demand, cache, 10)
    hot_R = start_simulation(trace.policy(policy), trace.job(source)).memory(HotRows).hot_R
    hot = HotSet(tuple(np.split(hot_R, source.schema.first_rows[1:-1])))
    if policy == "scars":
        return systems.scars(demand, hot)
    share = systems.free_share(demand, hot)
    return systems.fae(
        demand, hot, cache - hot_R.sum(), systems.Turn(TURN * (1 - share), TURN * share)
    )


def simulated(policy: str, trace: Trace, source: ArraySource) -> Expected:
    """Rows of one worker and step, counted."""
    outcome = measure(trace.policy(policy), trace.job(source))
    rows = outcome.traffic.rows_WKIP.sum((0, 1, 3)) / (outcome.steps * WORKERS)
    miss, stale, update, evict = rows.tolist()
    return Expected(miss, stale, update, evict, outcome.traffic.hot_rows / outcome.steps)


def rows_of(name: str, trace: Trace) -> list[list[str]]:
    """Expected and simulated rows in order, and the difference on each variant."""
    variants = [variant(trace.ordered, v) for v in VARIANTS]
    scale = distinct_rows(trace.ordered.batch, SAMPLES) / expected.expected_touches(trace.demand())
    table = []
    for policy in POLICIES:
        pairs = [(predicted(policy, trace, v), simulated(policy, trace, v)) for v in variants]
        for kind in ("moved", "reduced") if pairs[-1][0].reduced else ("moved",):
            values = [(getattr(a, kind), getattr(b, kind)) for a, b in pairs]
            last = values[-1]
            values.append((scale * last[0], last[1]))
            gaps = [f"{100 * (a / b - 1):+.1f} %" if b else "-" for a, b in values]
            label = f"{name}: {policy}" + (", all-reduced" if kind == "reduced" else "")
            table.append([label, *(f"{value:.1f}" for value in last), *gaps])
    return table


def main() -> None:
    with opened_traces(argparse.ArgumentParser(description=__doc__)) as (_, sources):
        rows = [row for name, source in sources.items() for row in rows_of(name, trace_of(source))]
    message = (
        f"Rows of a worker and step (all-reduced: of a step). {WORKERS} workers x {SAMPLES} "
        f"samples, caches of {CACHE:.0%} and hot sets of {HOT:.0%} of the rows that occur, {STEPS} "
        f"steps of which {WARMUP} warm-up; access counts of the same samples. In per cent: "
        "expected over simulated. *drawn*: every look-up drawn anew from the counts of its field, "
        "as the theory assumes; *columns*: each field shuffled by itself, so that counts stay; "
        "*samples*: whole samples shuffled; *ordered*: as recorded; *scaled*: as recorded, with "
        "expected rows scaled by the distinct rows of neighbouring samples, as the adviser does."
    )
    headings = ["trace: policy", "expected, ordered", "simulated, ordered", *VARIANTS, "scaled"]
    record("theory", "Theory on real traces", f"{message}\n\n{markdown(headings, rows)}")


if __name__ == "__main__":
    main()
