"""Transmission cost of herald and esd(1) beside an independent simulator's, on three real traces.

Run `python -m benchmarks.sanity --data FOLDER`. FOLDER holds criteo_adkdd21 and globo.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.record import markdown, record
from embroute.config.cluster_file import open_cluster
from embroute.config.data_options import DataOptions
from embroute.data.batch import Source
from embroute.data.open import open_source
from embroute.planner.setup import Setup
from embroute.simulator.simulation import Workload, measure_named

BASE = "dispatch=block sync=on-demand evict=lru"
POLICIES = ("herald", "herald(ties=first)", "esd(1)", "esd(1, ties=any)", "esd(0)", "vanilla")
# An independent simulator's figures: 8 workers x 128, caches of 10 %, four links ten times slower.
EXPECTED = {
    ("Criteo AdKDD'21", "herald"): 0.84,
    ("Criteo AdKDD'21", "esd(1)"): 0.75,
    ("Online Retail by time", "herald"): 0.54,
    ("Online Retail by time", "esd(1)"): 0.32,
    ("Globo, 600,000 by time", "herald"): 0.90,
    ("Globo, 600,000 by time", "esd(1)"): 0.85,
}
GLOBO_FIELDS = (
    "user_id",
    "click_article_id",
    "click_environment",
    "click_deviceGroup",
    "click_os",
    "click_country",
    "click_region",
    "click_referrer_type",
)


def traces(folder: Path, scratch: Path) -> dict[str, Source]:
    """The three traces, Globo unpacked into a scratch folder."""
    with tarfile.open(next((folder / "globo").glob("*.tar.xz"))) as packed:
        packed.extractall(scratch, filter="data")
    globo = DataOptions(time="click_timestamp", limit=600_000, categorical=GLOBO_FIELDS)
    ads = DataOptions(categorical=("all",))
    return {
        "Criteo AdKDD'21": open_source(str(folder / "criteo_adkdd21" / "X_train.csv.gz"), ads),
        "Online Retail by time": open_source("online-retail"),
        "Globo, 600,000 by time": open_source(str(scratch / "clicks" / "*.csv"), globo),
    }


@contextmanager
def opened_traces(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[argparse.Namespace, dict[str, Source]]]:
    """A benchmark's arguments, --data among them, and the three traces while it runs."""
    parser.add_argument("--data", type=Path, required=True, help="Folder of the three traces.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        yield args, traces(args.data, Path(scratch))


def rows_of(name: str, source: Source) -> list[list[str]]:
    job = Workload(source, Setup(source.schema, open_cluster("edge-8")))
    base = measure_named(BASE, job).transmission_cost_s
    rows = []
    for policy in POLICIES:
        ratio = measure_named(policy, job).transmission_cost_s / base
        expected = EXPECTED.get((name, policy))
        off = f"{100 * (ratio / expected - 1):+.1f} %" if expected else ""
        rows.append([f"{name}: {policy}", f"{ratio:.3f}", f"{expected or ''}", off])
    return rows


def main() -> None:
    with opened_traces(argparse.ArgumentParser(description=__doc__)) as (_, sources):
        rows = [row for name, source in sources.items() for row in rows_of(name, source)]
    message = (
        f"Transmission cost over that of `{BASE}`: edge-8, 8 workers x 128 samples, caches of 10 % "
        "of the rows, 90 steps of which 10 warm-up, drain difference counted. Where the optimum is "
        "not unique (`esd`) or scores are equal (`herald`), the choice matters: it decides which "
        "samples share a worker, and so transfers."
    )
    table = markdown(["trace: policy", "ratio", "independent simulator", "difference"], rows)
    record("sanity", "Published systems beside an independent simulator", f"{message}\n\n{table}")


if __name__ == "__main__":
    main()
