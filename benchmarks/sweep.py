"""Step time of `embroute` beside every exact policy that keeps the order, over many settings.

Run `python -m benchmarks.sweep --data FOLDER --out sweep.jsonl`. Cases have a fixed order, one line
each. A second run with the same file continues the first; `--most N` ends after N cases.
benchmarks/results/sweep.jsonl can be continued as well, as long as policies plan alike: its lines
name the commits that made it.

A *place* is a trace, a network, a cache and a number of workers. Every place comes before any place
comes again with other rows or compute. The plans of the other policies do not depend on rows and
compute, so these policies run once for each place.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import NamedTuple

import numpy as np

from benchmarks.record import commit, markdown, record
from benchmarks.sanity import traces
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import parse_size
from embroute.cost.step_time import step_time
from embroute.data.batch import Source
from embroute.data.open import open_source
from embroute.planner.plan import traffic
from embroute.planner.plan_stream import plans
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.simulator.simulation import (
    Workload,
    choose_workers,
    measure_named,
    start_simulation,
    with_workers,
)

OWN = "embroute"
EVERYONE = ("nocache", "vanilla", "bagpipe", "herald", "esd(1)")
ON_SOME = ("herald", "esd(1)")  # also on 1, 2, 4, ... of the fastest workers
NETWORKS = ("edge", "dc", "uneven", "colo")
CACHES = ("2%", "10%", "30%")
WORKERS = (2, 4, 8, 16)
DIMS = (16, 64, 512)
COMPUTE_MS = (0.0, 0.05, 0.2, 2.0)
TARGET = 1.02
TRACES = [
    "Criteo AdKDD'21",
    "Online Retail by time",
    "Globo, 600,000 by time",
    "synthetic criteo-kaggle",
]


class Case(NamedTuple):
    """One setting."""

    trace: str
    network: str
    cache: str
    workers: int
    dim: int
    compute_ms: float

    @property
    def place(self) -> str:
        """Everything but rows and compute: the other policies plan alike in a place."""
        return ", ".join(map(str, self[:4]))

    @property
    def load(self) -> str:
        """Rows and compute."""
        return f"{self.dim}, {self.compute_ms}"


def cases(names: list[str]) -> list[Case]:
    """All settings, in an order that is random and always the same: every place, then again."""
    places = list(itertools.product(names, NETWORKS, CACHES, WORKERS))
    chance = random.Random(0)
    chance.shuffle(places)
    loads = list(itertools.product(DIMS, COMPUTE_MS))
    drawn = [chance.sample(loads, len(loads)) for _ in places]
    turns = zip(*drawn, strict=True)
    return [Case(*place, *load) for turn in turns for place, load in zip(places, turn, strict=True)]


def job(case: Case, source: Source, steps: int) -> Workload:
    """128 samples a worker; a tenth of the steps is warm-up, but at least ten."""
    cluster = open_cluster(f"{case.network}-{case.workers}")
    cluster = replace(cluster, compute_s_per_sample=1e-3 * case.compute_ms)
    cache = parse_size("cache", case.cache)
    setup = Setup(source.schema, cluster, case.dim, 128 * case.workers, cache=cache)
    return Workload(source, setup, steps, max(10, steps // 10))


def rivals(workers: int) -> list[str]:
    """Exact policies that keep the order, on all workers and on some."""
    names = list(EVERYONE)
    for name, count in itertools.product(ON_SOME, (1, 2, 4, 8)):
        if count < workers:
            listed = "+".join(map(str, range(count)))
            inside = f"workers={listed}" if "(" not in name else f"1, workers={listed}"
            names.append(f"{name.split('(')[0]}({inside})")
    return names


def priced(name: str, tasks: Mapping[str, Workload]) -> dict[str, float]:
    """Milliseconds of a step by load, of a policy that depends on neither rows nor compute."""
    policy = make_policy(name)
    first = next(iter(tasks.values()))
    workers = choose_workers(policy, first)
    setups = {load: with_workers(task, workers).setup for load, task in tasks.items()}
    first = with_workers(first, workers)
    taken: dict[str, list[float]] = {load: [] for load in tasks}
    for step in plans(policy, first.batches(), start_simulation(policy, first)):
        moved = {s.dim: traffic(step.plan, s) for s in setups.values()}
        for load, setup in setups.items() if step.plan.step >= first.warmup else ():
            taken[load].append(step_time(moved[setup.dim], setup.cluster).total_s)
    return {load: 1e3 * float(np.mean(times)) for load, times in taken.items()}


Loads = dict[str, dict[str, float]]  # milliseconds by load and policy


def others(case: Case, source: Source, steps: int) -> Loads:
    """Milliseconds of the best other policy in a place, by load.

    A policy whose caches do not hold a step does not count.
    """
    loads = [case._replace(dim=d, compute_ms=c) for d, c in itertools.product(DIMS, COMPUTE_MS)]
    tasks = {other.load: job(other, source, steps) for other in loads}
    found: Loads = {load: {} for load in tasks}
    for name in rivals(case.workers):
        try:
            taken = priced(name, tasks)
        except ValueError:
            continue
        for load, ms in taken.items():
            found[load] = min(found[load], {name: ms}, key=_least)
    return found


def _least(ms: Mapping[str, float]) -> float:
    return min(ms.values(), default=float("inf"))


class Answer(NamedTuple):
    """Results of one setting: `own` if the cache holds a step, `others` if they were run."""

    case: Case
    own: float | None
    others: Loads | None
    seconds: float


_sources: dict[str, Source] = {}  # of a process that runs settings


def run(case: Case, steps: int, with_others: bool) -> Answer:
    """Run one setting on the traces of this process."""
    began, source = time.perf_counter(), _sources[case.trace]
    found = others(case, source, steps) if with_others else None
    try:
        own = 1e3 * measure_named(OWN, job(case, source, steps)).step_time_s
    except ValueError:
        own = None
    return Answer(case, own, found, time.perf_counter() - began)


class Result(NamedTuple):
    """A setting and the step times of its policies."""

    case: Case
    ms: dict[str, float]

    @property
    def best(self) -> str:
        """The best other policy."""
        return min((name for name in self.ms if name != OWN), key=self.ms.__getitem__)

    @property
    def ratio(self) -> float:
        """Our step time over that of the best other policy."""
        if not self.ms:
            return 1.0  # no policy has room for a step
        return self.ms.get(OWN, float("inf")) / max(self.ms[self.best], 1e-9)


class Log:
    """The file of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]  # not cut by a crash
        self.places: dict[str, Loads] = {f["place"]: f["ms"] for f in found if "place" in f}
        answers = [(Case(*f["case"]), f["own"]) for f in found if "case" in f]
        self.results = {case: self._result(case, own) for case, own in answers}

    def _result(self, case: Case, own: float | None) -> Result:
        ms = dict(self.places[case.place][case.load])
        return Result(case, ms if own is None else {OWN: own, **ms})

    def add(self, answer: Answer) -> Result:
        """Append an answer to the file."""
        case, lines = answer.case, list[Mapping[str, object]]()
        if answer.others is not None:
            self.places[case.place] = answer.others
            lines.append({"place": case.place, "ms": answer.others})
        lines.append({"case": list(case), "own": answer.own})
        self.append(*lines)
        self.results[case] = self._result(case, answer.own)
        return self.results[case]

    def append(self, *lines: Mapping[str, object]) -> None:
        """Append lines to the file as they are."""
        with self.path.open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)


def open_traces(folder: Path, scratch: Path) -> None:
    """Open the traces in this process."""
    _sources.update(traces(folder, Path(mkdtemp(dir=scratch))))
    _sources["synthetic criteo-kaggle"] = open_source("criteo-kaggle")


def left(log: Log, names: list[str], most: int | None = None) -> list[tuple[Case, bool]]:
    """Cases that the file does not hold yet, and whether to run the other policies there too."""
    known, todo = set(log.places), []
    for case in [case for case in cases(names) if case not in log.results][:most]:
        todo.append((case, case.place not in known))
        known.add(case.place)
    return todo


def proceed(args: argparse.Namespace, log: Log) -> None:
    """Run the remaining cases."""
    todo = left(log, TRACES, args.most)
    with TemporaryDirectory() as scratch:
        pool = ProcessPoolExecutor(
            args.processes, get_context("spawn"), open_traces, (args.data, Path(scratch))
        )
        with pool:
            found, asked = zip(*todo, strict=True) if todo else ((), ())
            for answer in pool.map(run, found, itertools.repeat(args.steps), asked):
                ratio, case = log.add(answer).ratio, ", ".join(map(str, answer.case))
                print(f"{ratio:.3f} {answer.seconds:5.1f} s  {case}", flush=True)


def page(results: list[Result], total: int) -> str:
    """The worst cases, and the number of cases that keep the target."""
    results = sorted(results, key=lambda result: result.ratio, reverse=True)
    kept = sum(result.ratio <= TARGET for result in results)
    rows = [
        [", ".join(map(str, r.case)), r.best, f"{r.ms[r.best]:.2f}", f"{r.ratio:.3f}"]
        for r in results[:20]
        if r.ms
    ]
    middle = results[len(results) // 2].ratio
    message = (
        f"{len(results)} of {total} settings; {kept} at most {TARGET}; median {middle:.3f}. "
        "A setting: trace, network, cache, workers, dim, ms of compute per sample. 128 samples a "
        f"worker. Others: {', '.join(EVERYONE)}; {' and '.join(ON_SOME)} on 1, 2, 4, 8 workers too."
    )
    headings = ["worst settings", "best other", "its ms per step", f"{OWN} over it"]
    return f"{message}\n\n{markdown(headings, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="results, one case a line")
    parser.add_argument("--most", type=int, default=None, help="cases to run; default all")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    log = Log(args.out)
    log.append({"commit": commit(), "settings": len(log.results)})
    proceed(args, log)
    total = len(cases(TRACES))
    record("sweep", "Our own policy in many settings", page(list(log.results.values()), total))


if __name__ == "__main__":
    main()
