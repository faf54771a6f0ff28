"""Exact counts of every policy on a small committed trace.

A refactor moves no number here; a moved number is explained in its commit. To write them anew:
`python -m tests.test_golden --write`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size
from embroute.cost.step_time import KIND_NAMES, Traffic, transmission_cost
from embroute.data.batch import one_hot
from embroute.data.schema import Field, Schema, Table
from embroute.planner.plan import drain_transfers, traffic
from embroute.planner.setup import Setup
from embroute.policies.catalog import SYSTEMS, make_policy
from tests.workloads import SETTINGS, Workload

FOLDER = Path(__file__).parent / "golden"
TRACE, COUNTS = FOLDER / "trace.csv", FOLDER / "counts.json"
SIZES = (300, 120, 12, 4)  # rows of the four tables
WIDTH = 4096  # so that two tables are beyond what FAE counts as small
SAMPLES, BATCH = 392, 16
POLICIES = [
    *(f"unbounded(of={name})" if name == "allreduce" else name for name in SYSTEMS),
    *SETTINGS,
    "het(3, clocks=release)",
    "ssp(2)",
    "fae(hot=0.08, rate=25)",
    "scars(hot=0.06)",
    "bagpipe(2)",
    "embroute(quotas=equal)",
    "unbounded(of=esd)",
    "dispatch=esd sync=het(10) evict=clairvoyant",
    "dispatch=herald sync=write-through evict=light-lfu",
    "dispatch=robin sync=on-demand evict=clairvoyant(3)",
    "dispatch=robin sync=on-demand evict=lfu",
]


def draw_trace() -> str:
    """The committed trace: four fields with Zipf-like ids. Tests read the file, not this
    function."""
    rng = np.random.default_rng(20)
    columns = []
    for size in SIZES:
        weights = 1 / np.arange(1, size + 1)
        columns.append(rng.choice(size, SAMPLES, p=weights / weights.sum()))
    lines = [",".join(map(str, sample)) for sample in np.stack(columns, 1).tolist()]
    return "\n".join(["a,b,c,d", *lines]) + "\n"


def workload() -> Workload:
    """The trace in batches of 16 on edge-4, caches for 12 % of the rows, row-wise Adagrad."""
    ids_SF = np.loadtxt(TRACE, np.int64, delimiter=",", skiprows=1)
    names = "abcd"
    tables = tuple(Table(name, size) for name, size in zip(names, SIZES, strict=True))
    fields = tuple(Field(name, table) for table, name in enumerate(names))
    schema = Schema(tables, fields)
    rows_SF = ids_SF + schema.first_rows[:-1]
    batches = tuple(one_hot(rows_SF[i : i + BATCH]) for i in range(0, SAMPLES, BATCH))
    cache = Size(0.12, "share")
    setup = Setup(schema, open_cluster("edge-4"), WIDTH, BATCH, "rowwise-adagrad", cache)
    return Workload(setup, batches)


def count(name: str) -> dict[str, int | float]:
    """Rows by kind, rows left to drain, all-reduced rows and transmission cost of a whole run."""
    policy, work = make_policy(name), workload()
    state = work.start(policy)
    total: Traffic | None = None
    for step in work.plans(policy, state):
        moved = traffic(step.plan, state.setup)
        total = total + moved if total else moved
    assert total is not None
    rows = total.rows_WKIP.sum((0, 1, 3)).tolist()
    return {
        **dict(zip(KIND_NAMES, rows, strict=True)),
        "drain": len(drain_transfers(state, policy.sync.record).row),
        "all_reduced": total.hot_rows,
        # Nanoseconds, so that equal means equal.
        "transmission_cost_ns": round(1e9 * transmission_cost(total, state.setup.cluster)),
    }


def expected() -> dict[str, dict[str, int]]:
    """The committed counts by policy."""
    found: dict[str, dict[str, int]] = json.loads(COUNTS.read_text())
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_policy_counts_equal_the_committed_counts(name: str) -> None:
    assert name in expected(), f"no golden counts of {name}: python -m tests.test_golden --write"
    assert count(name) == expected()[name]


def test_committed_trace_equals_the_drawn_trace() -> None:
    assert TRACE.read_text() == draw_trace()


def test_committed_trace_exercises_eviction_and_sharing() -> None:
    counts = expected()
    assert counts.pop("asp") == counts["nocache"]  # the same rows, at other times
    assert counts.pop("herald(tables=auto)") == counts["herald"]  # steps with time for all tables
    assert counts["herald"]["evict_push"] > 100
    assert counts["vanilla"]["stale_pull"] > 100
    assert counts["fae"]["all_reduced"] > 50
    assert counts["vanilla"]["miss_pull"] > counts["unbounded"]["miss_pull"]
    assert len({tuple(values.values()) for values in counts.values()}) == len(counts)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.test_golden --write")
    FOLDER.mkdir(exist_ok=True)
    TRACE.write_text(draw_trace())
    COUNTS.write_text(json.dumps({name: count(name) for name in POLICIES}, indent=1) + "\n")
