"""Time and memory of the planner's decisions, and how they grow.

Run `python -m benchmarks.decisions`. Every case is a process of its own, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.record import markdown, record
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import parse_size
from embroute.data.batch import Batch
from embroute.data.open import open_source
from embroute.data.stream import batches
from embroute.planner.plan_stream import plans, start
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy

LIMITS_MS = {("vanilla", 8): 2.0, ("herald", 8): 4.0, ("esd(1)", 8): 8.0, ("herald", 64): 60.0}
LIMIT_GB = 6.0
REPEATS = 3  # processes per case at the sizes with a limit; the middle one counts


@dataclass(frozen=True)
class Case:
    """One configuration to time."""

    policy: str
    workers: int = 8
    batch: int = 128
    data: str = "criteo-kaggle"
    cache: str = "0.1"
    steps: int = 120
    warmup: int = 30


@dataclass(frozen=True)
class Result:
    """Median and fastest tenth of the decision, the window, distinct rows, peak memory."""

    median_ms: float
    p10_ms: float
    window_ms: float
    rows: int
    evictions: int
    peak_gb: float


def measure(case: Case) -> Result:
    """Time the decisions of a case in this process."""
    source = open_source(case.data)
    size = case.workers * case.batch
    cluster = open_cluster(f"edge-{case.workers}")
    setup = Setup(source.schema, cluster, batch_size=size, cache=parse_size("--cache", case.cache))
    policy = make_policy(case.policy)
    state = start(policy, setup)
    stream: Iterable[Batch] = batches(source, size)
    times, windows, rows, evictions = [], [], 0, 0
    for step in plans(policy, _first(stream, case.steps), state):
        if step.plan.step >= case.warmup:
            times.append(1e3 * step.decision_s)
            windows.append(1e3 * step.window_s)
            rows = len(step.plan.rows.rows_U)
            evictions = int((step.plan.placement.victim_T >= 0).sum())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return Result(
        float(np.median(times)),
        float(np.percentile(times, 10)),
        float(np.median(windows)),
        rows,
        evictions,
        peak,
    )


def _first(stream: Iterable[Batch], steps: int) -> Iterator[Batch]:
    return (batch for batch, _ in zip(stream, range(steps), strict=False))


def apart(case: Case) -> Result:
    """Time a case in fresh processes, on one core."""
    command = [sys.executable, "-m", "benchmarks.decisions", "--case", json.dumps(asdict(case))]
    results = []
    repeats = REPEATS if (case.policy, case.workers) in LIMITS_MS and case.batch == 128 else 1
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append(Result(**json.loads(done.stdout.splitlines()[-1])))
    result = sorted(results, key=lambda result: result.median_ms)[repeats // 2]
    print(f"{case}: {result.median_ms:.2f} ms, {result.peak_gb:.2f} GB", file=sys.stderr)
    return result


def row(case: Case, result: Result) -> list[str]:
    size = case.workers * case.batch
    limit = LIMITS_MS.get((case.policy, case.workers)) if case.data == "criteo-kaggle" else None
    return [
        f"{case.policy}, {case.data}, {case.workers} x {case.batch}, cache {case.cache}",
        f"{result.median_ms:.2f}",
        f"{result.p10_ms:.2f}",
        f"{limit:g}" if limit and case.batch == 128 else "",
        f"{result.window_ms:.2f}",
        f"{1e3 * size / (result.median_ms + result.window_ms):,.0f}",
        f"{result.rows:,}",
        f"{result.evictions:,}",
        f"{result.peak_gb:.2f}",
    ]


HEADINGS = [
    "case",
    "median ms",
    "p10 ms",
    "limit ms",
    "window ms",
    "samples/s",
    "distinct rows",
    "evictions",
    "peak GB",
]


def sections() -> dict[str, list[Case]]:
    """Cases by section: sizes with a limit, then growth along each axis."""
    three = ("vanilla", "herald", "esd(1)")
    base = Case("vanilla")
    others = ("nocache", "het(100)", "bagpipe(20)", "dispatch=esd evict=clairvoyant(20)")
    full = replace(base, cache="0.002", steps=300, warmup=200)
    return {
        "Every policy at 8 workers x 128": [
            *(replace(base, policy=name) for name in (*three, *others))
        ],
        "With full caches (each step evicts)": [replace(full, policy=name) for name in three],
        "Growth with workers": [
            replace(base, policy=name, workers=workers, steps=60, warmup=20)
            for workers in (16, 32, 64)
            for name in three
        ],
        "Growth with the batch": [
            replace(base, policy=name, batch=batch) for batch in (64, 256, 512) for name in three
        ],
        "Growth with the tables": [
            replace(base, policy=name, data=data)
            for data in ("movielens-25m", "avazu", "criteo-search")
            for name in three
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="one case as JSON, timed in this process")
    given = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if given.case:
        print(json.dumps(asdict(measure(Case(**json.loads(given.case))))))
        return
    measure(Case("esd(1)", data="movielens-25m", steps=5, warmup=0))  # compile outside the cases
    parts = [
        "Decision: dispatch, plan, law checks, state. Window: the distinct rows of a batch and "
        "their uses before and after. One core; neither includes reading or generating samples. "
        "samples/s: the rate that one coordinator could feed. p10: the fastest tenth of the steps, "
        f"least disturbed by other users. Cases with a limit: the middle of {REPEATS} processes. "
        f"Limit of memory: {LIMIT_GB:g} GB at 8 workers.",
    ]
    for title, cases in sections().items():
        rows = [row(case, apart(case)) for case in cases]
        parts.append(f"## {title}\n\n{markdown(HEADINGS, rows)}")
    record("decisions", "Decision time and memory", "\n\n".join(parts))


if __name__ == "__main__":
    main()
