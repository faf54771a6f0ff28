"""Step time of our own policy beside every exact one that keeps the order, over many settings.

`python -m benchmarks.sweep --data FOLDER --out sweep.jsonl`: cases in a fixed random order, one
line each; started again with the same file it goes on where it stopped. `--most N` ends after N.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.record import markdown, record
from benchmarks.sanity import traces
from embroute.cluster import open_cluster
from embroute.config import parse_size
from embroute.data.batch import Source
from embroute.data.open import open_source
from embroute.policy.setup import Setup
from embroute.simulate import Job, measure_named

OWN = "embroute"
EVERYONE = ("nocache", "vanilla", "bagpipe", "herald", "esd(1)")
ON_SOME = ("herald", "esd(1)")  # also on 1, 2, 4, ... of the fastest workers
NETWORKS = ("edge", "dc", "uneven", "colo")
CACHES = ("2%", "10%", "30%")
WORKERS = (2, 4, 8, 16)
DIMS = (16, 64, 512)
COMPUTE_MS = (0.0, 0.05, 0.2, 2.0)
TARGET = 1.02


class Case(NamedTuple):
    """One setting."""

    trace: str
    network: str
    cache: str
    workers: int
    dim: int
    compute_ms: float


def cases(names: list[str]) -> list[Case]:
    """All settings, in an order that is random and always the same."""
    grid = [
        Case(*values)
        for values in itertools.product(names, NETWORKS, CACHES, WORKERS, DIMS, COMPUTE_MS)
    ]
    random.Random(0).shuffle(grid)
    return grid


def job(case: Case, source: Source, steps: int) -> Job:
    """128 samples a worker; a tenth of the steps is warm-up, but at least ten."""
    cluster = open_cluster(f"{case.network}-{case.workers}")
    cluster = replace(cluster, compute_s_per_sample=1e-3 * case.compute_ms)
    cache = parse_size("cache", case.cache)
    setup = Setup(source.schema, cluster, case.dim, 128 * case.workers, cache=cache)
    return Job(source, setup, steps, max(10, steps // 10))


def rivals(workers: int) -> list[str]:
    """Exact policies that keep the order, on all workers and on some."""
    names = list(EVERYONE)
    for name, count in itertools.product(ON_SOME, (1, 2, 4, 8)):
        if count < workers:
            listed = "+".join(map(str, range(count)))
            inside = f"workers={listed}" if "(" not in name else f"1, workers={listed}"
            names.append(f"{name.split('(')[0]}({inside})")
    return names


def run(case: Case, source: Source, steps: int) -> dict[str, float]:
    """Milliseconds of a step by policy; a policy whose caches do not hold a step is left out."""
    task, found = job(case, source, steps), {}
    for name in (OWN, *rivals(case.workers)):
        try:
            found[name] = 1e3 * measure_named(name, task).step_time_s
        except ValueError:
            continue
    return found


class Result(NamedTuple):
    """A setting and what its policies took."""

    case: Case
    ms: dict[str, float]

    @property
    def best(self) -> str:
        """The best of the others."""
        return min((name for name in self.ms if name != OWN), key=self.ms.__getitem__)

    @property
    def ratio(self) -> float:
        """Our step time over the best of the others."""
        if not self.ms:
            return 1.0  # no policy has room for a step
        return self.ms.get(OWN, float("inf")) / max(self.ms[self.best], 1e-9)


def read(path: Path) -> list[Result]:
    """What was run so far; a line that a crash cut short is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [Result(Case(*line["case"]), line["ms"]) for line in found]


def proceed(args: argparse.Namespace, sources: Mapping[str, Source]) -> None:
    """Run the cases that the file does not hold yet."""
    done = {result.case for result in read(args.out)}
    todo = [case for case in cases(list(sources)) if case not in done]
    for case in todo[: args.most]:
        begun = time.perf_counter()
        result = Result(case, run(case, sources[case.trace], args.steps))
        with args.out.open("a") as file:
            file.write(json.dumps(result._asdict()) + "\n")
        taken = time.perf_counter() - begun
        print(f"{result.ratio:.3f} {taken:5.1f} s  {', '.join(map(str, case))}", flush=True)


def page(results: list[Result], total: int) -> str:
    """The worst cases, and how many keep the target."""
    results = sorted(results, key=lambda result: result.ratio, reverse=True)
    kept = sum(result.ratio <= TARGET for result in results)
    rows = [
        [", ".join(map(str, r.case)), r.best, f"{r.ms[r.best]:.2f}", f"{r.ratio:.3f}"]
        for r in results[:20]
        if r.ms
    ]
    middle = results[len(results) // 2].ratio
    note = (
        f"{len(results)} of {total} settings; {kept} at most {TARGET}; median {middle:.3f}. "
        "A setting: trace, network, cache, workers, dim, ms of compute per sample. 128 samples a "
        f"worker. Others: {', '.join(EVERYONE)}; {' and '.join(ON_SOME)} on 1, 2, 4, 8 workers too."
    )
    headings = ["worst settings", "best other", "its ms per step", f"{OWN} over it"]
    return f"{note}\n\n{markdown(headings, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="results, one case a line")
    parser.add_argument("--most", type=int, default=None, help="cases to run; default all")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sources = traces(args.data, Path(scratch))
        sources["synthetic criteo-kaggle"] = open_source("criteo-kaggle")
        proceed(args, sources)
        total = len(cases(list(sources)))
    record("sweep", "Our own policy in many settings", page(read(args.out), total))


if __name__ == "__main__":
    main()
