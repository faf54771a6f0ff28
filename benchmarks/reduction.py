"""Rows on the all-reduce: step time of `embroute` with and without, where links are the limit.

Run `python -m benchmarks.reduction --data FOLDER`. FOLDER holds criteo_adkdd21 and globo.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.record import markdown, record
from benchmarks.sanity import opened_traces
from embroute.config.cluster import Cluster, star_cluster
from embroute.config.cluster_file import open_cluster
from embroute.data.batch import Source
from embroute.data.open import open_source
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.policies.embroute import row_allreduce
from embroute.simulator.simulation import Workload, simulate_steps

CASES = (
    ("dc-8, 0.002 ms", open_cluster("dc-8"), 2e-6),
    ("dc-16, 0.005 ms", open_cluster("dc-16"), 5e-6),
    ("2 x 1 Gbit/s, shards 10, 0.05 ms", star_cluster([1.0] * 2, 10.0), 5e-5),
    ("4 x 1 Gbit/s, shards 10, 0.05 ms", star_cluster([1.0] * 4, 10.0), 5e-5),
    ("8 x 1 Gbit/s, shards 10, 0.05 ms", star_cluster([1.0] * 8, 10.0), 5e-5),
)


def measured(source: Source, cluster: Cluster, policy: str) -> tuple[float, float]:
    """Seconds of a step and all-reduced rows: 128 samples a worker, rows of 512 floats."""
    setup = Setup(source.schema, cluster, 512, batch_size=128 * cluster.num_workers)
    given = Workload(source, setup, 50, 10)
    steps = [
        step for step in simulate_steps(make_policy(policy), given) if step.step >= given.warmup
    ]
    time_s = float(np.mean([step.time.total_s for step in steps]))
    return time_s, float(np.mean([step.traffic.hot_rows for step in steps]))


def row(name: str, source: Source, case: tuple[str, Cluster, float]) -> list[str]:
    """One network: with and without all-reduced rows, and ESD."""
    about, cluster, compute_s = case
    cluster = replace(cluster, compute_s_per_sample=compute_s)
    with_s, rows = measured(source, cluster, "embroute")
    worthwhile, row_allreduce.WORTHWHILE = row_allreduce.WORTHWHILE, 0.0
    without_s, _ = measured(source, cluster, "embroute")
    row_allreduce.WORTHWHILE = worthwhile
    esd_s, _ = measured(source, cluster, "esd(1)")
    ratio = f"{with_s / without_s:.3f}"
    return [name, about, f"{rows:.0f}", f"{1e3 * with_s:.3f}", ratio, f"{with_s / esd_s:.3f}"]


def main() -> None:
    with opened_traces(argparse.ArgumentParser(description=__doc__)) as (_, sources):
        sources |= {name: open_source(name) for name in ("criteo-kaggle", "avazu")}
        rows = [row(name, source, case) for name, source in sources.items() for case in CASES]
    message = (
        "128 samples a worker, dim 512, caches of 10 %, 50 steps of which 10 warm-up, simulated. "
        "Milliseconds of a step of `embroute`, over itself with nothing all-reduced, and over "
        "`esd(1)`."
    )
    headings = ["trace", "network, compute per sample", "rows", "ms", "over itself", "over esd(1)"]
    record("reduction", "Rows on the all-reduce", f"{message}\n\n{markdown(headings, rows)}")


if __name__ == "__main__":
    main()
