"""Our own policy beside the published ones: transmission cost, rows moved, step time.

`python -m benchmarks.own --data FOLDER`, which holds online_retail, criteo_adkdd21 and globo.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.record import markdown, record
from benchmarks.sanity import traces
from embroute.cluster import open_cluster
from embroute.data.batch import Source
from embroute.data.open import open_source
from embroute.policy.setup import Setup
from embroute.simulate import Job, Outcome, measure_named

RIVALS = ("esd(1)", "herald", "esd(1, workers=fast)", "herald(workers=fast)")
EFFORTS = (100, 300, 600, 1000, 1500, 3000)
COMPUTE_S = 0.05e-3


def job(source: Source, network: str, dim: int = 64, compute_s: float = 0.0) -> Job:
    """90 steps of 8 x 128 samples, 10 of them warm-up, caches of 10 %."""
    cluster = replace(open_cluster(network), compute_s_per_sample=compute_s)
    return Job(source, Setup(source.schema, cluster, dim))


def rows_moved(outcome: Outcome) -> int:
    """Rows of all transfers, the difference of drains included."""
    return int(outcome.traffic.rows_WKIP.sum() + outcome.drain_rows_W.sum())


def ratios(source: Source) -> list[str]:
    """Cost, rows and step time, each over the same run's yardstick."""
    edge, even = job(source, "edge-8"), job(source, "dc-8")
    own, esd = (measure_named(n, edge) for n in ("embroute(objective=cost)", "esd(1)"))
    own_even, esd_even = (measure_named(n, even) for n in ("embroute(objective=cost)", "esd(1)"))
    timed = job(source, "edge-8", 512, COMPUTE_S)
    best = min(measure_named(name, timed).step_time_s for name in RIVALS)
    return [
        f"{own.transmission_cost_s / esd.transmission_cost_s:.3f}",
        f"{rows_moved(own_even) / rows_moved(esd_even):.3f}",
        f"{measure_named('embroute', timed).step_time_s / best:.3f}",
    ]


def curve(name: str, source: Source) -> list[list[str]]:
    """Transmission cost over that of esd(1) and milliseconds per step, by effort."""
    edge = job(source, "edge-8")
    esd = measure_named("esd(1)", edge).transmission_cost_s
    rows = []
    for effort in EFFORTS:
        own = measure_named(f"embroute(objective=cost, effort={effort})", edge)
        ratio, spent = own.transmission_cost_s / esd, own.decision_ms
        rows.append([name, str(effort), f"{ratio:.3f}", f"{spent:.0f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    folder = parser.parse_args().data
    with tempfile.TemporaryDirectory() as scratch:
        sources = traces(folder, Path(scratch))
        sources["synthetic criteo-kaggle"] = open_source("criteo-kaggle")
        table = [[name, *ratios(source)] for name, source in sources.items()]
        curves = [row for name, source in sources.items() for row in curve(name, source)]
    note = (
        "8 workers x 128 samples, caches of 10 %, 90 steps of which 10 warm-up. Cost (edge-8, dim "
        "64, equal quotas) and rows (dc-8) over `esd(1)`; step time (edge-8, dim 512, 0.05 ms per "
        "sample, free quotas) over the best of `esd(1)`, `herald` and their `workers=fast`."
    )
    headings = ["trace", "transmission cost", "rows moved", "step time"]
    by_effort = markdown(["trace", "effort", "cost over esd(1)", "ms per step"], curves)
    body = f"{note}\n\n{markdown(headings, table)}\n\n{by_effort}"
    record("own", "Our own policy", body)


if __name__ == "__main__":
    main()
