"""Every policy of the catalog on the built-in trace: rows, transmission cost and step time.

Run `python -m benchmarks.catalog`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.own import rows_moved
from benchmarks.record import markdown, record
from embroute.config.cluster import Cluster, Host, Worker, box
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import AUTO_CACHE
from embroute.data.open import open_source
from embroute.planner.setup import Setup
from embroute.policies.catalog import SYSTEMS
from embroute.simulator.simulation import Workload, measure_named

CLUSTERS = {
    "edge-8": open_cluster("edge-8"),
    "box-8": open_cluster("box-8"),
    "one host": replace(box(8), hosts=(Host("box", 1.0, 1.0),), workers=(Worker(0),) * 8),
}
HEADINGS = ("policy", "rows", "transmission cost", "step time", "not priced because")


def ratios(cluster: Cluster, names: Sequence[str]) -> Iterator[list[str]]:
    """Rows, cost and step time of each policy over those of vanilla; a reason if it is refused."""
    source = open_source("online-retail")
    job = Workload(source, Setup(source.schema, cluster, cache=AUTO_CACHE))
    base = measure_named("vanilla", job)
    for name in names:
        try:
            ours = measure_named(name, job)
        except ValueError as error:
            yield [f"`{name}`", *["-"] * 3, str(error)]
            continue
        pairs = (
            (rows_moved(ours), rows_moved(base)),
            (ours.transmission_cost_s, base.transmission_cost_s),
            (ours.step_time_s, base.step_time_s),
        )
        yield [f"`{name}`", *(f"{mine / other:.3f}" if other else "-" for mine, other in pairs), ""]


def body(names: Sequence[str]) -> str:
    """A table for each cluster."""
    parts = [
        "Over `vanilla`: rows moved (with the difference of drains), transmission cost, step time. "
        "Online Retail by time, 8 workers x 128 samples, width 64, SGD, automatic caches, no "
        "compute, 90 steps of which 10 warm-up. Replicas are filled before these steps. In so few "
        "steps `fae` swaps more often than in long runs. `one host` has no links to price."
    ]
    for title, cluster in CLUSTERS.items():
        parts.append(f"## {title}\n\n{markdown(HEADINGS, [*ratios(cluster, names)])}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    record("catalog", "Every policy of the catalog", body(list(SYSTEMS)))
