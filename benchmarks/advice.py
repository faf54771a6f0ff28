"""The adviser's first choice beside the best of its search space, simulated one by one.

Run `python -m benchmarks.advice --data FOLDER --log advice.jsonl`. FOLDER holds
criteo_adkdd21 and globo. Every answer is a line of the log, so an interrupted run continues there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.record import commit, markdown, record
from benchmarks.sanity import opened_traces
from embroute.api.advice import constraints_of
from embroute.config.run_options import AdviceOptions
from embroute.data.batch import Source
from embroute.data.open import open_source
from embroute.data.synthetic.presets import LOG_PRESETS
from embroute.kernels.codes import VALUE_STATE
from embroute.simulator.advisor import (
    FULL_SPAN,
    Configuration,
    Constraints,
    StepSpan,
    configurations,
    least_memory,
    recommendations,
    workload_of,
)
from embroute.simulator.simulation import measure_named

NETWORKS = ("edge-8", "dc-8")
SPAN = StepSpan(30, 10)
CACHE = 0.1  # of all rows, where memory is scarce
BATCHES = (128, 256)
Line = dict[str, object]


@dataclass(frozen=True)
class Ask:
    """A question: the defaults of the command, or wide rows with little compute and memory."""

    name: str
    dim: str
    compute_ms: float
    scarce: bool


ASKS = (Ask("default", "64", 0.05, False), Ask("rows", "256", 0.005, True))


def wish_of(ask: Ask, network: str, source: Source) -> Constraints:
    """The constraints that the command line makes of a question."""
    asked = AdviceOptions(
        network=network, dim=ask.dim, batch=BATCHES, compute_ms_per_sample=ask.compute_ms
    )
    wish = constraints_of(asked, source)
    if not ask.scarce:
        return wish
    row_bytes = float(wish.setup.record_bytes_XA[VALUE_STATE].max())
    everyone = wish.setup.num_workers
    least = least_memory(wish, everyone, max(BATCHES) * everyone)
    tenth = CACHE * source.schema.num_rows * row_bytes
    return replace(wish, memory_bytes=max(least, tenth + 4 * wish.setup.cluster.dense_bytes))


class Log:
    """Lines of JSON by key. A known answer is not computed again."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict[str, Line]()
        for text in path.read_text().splitlines() if path.exists() else []:
            line = json.loads(text)
            self.known[line["key"]] = line

    def add(self, key: str, line: Line) -> Line:
        """Append a line to the file."""
        self.known[key] = {"key": key, "commit": commit(), **line}
        with self.path.open("a") as file:
            file.write(json.dumps(self.known[key]) + "\n")
        return self.known[key]

    def commits(self) -> str:
        """The commits that were measured."""
        return ", ".join(sorted({str(line["commit"]) for line in self.known.values()}))


def first_choice(wish: Constraints, key: str, log: Log) -> Configuration:
    """The choice that the adviser puts first."""
    line = log.known.get(key)
    if line is None:
        told: list[str] = []
        line = log.add(key, asdict(recommendations(wish, told.append)[0].choice))
    values = {name: line[name] for name in Configuration.__dataclass_fields__}
    values["workers"] = tuple(line["workers"])  # type: ignore[arg-type]
    return Configuration(**values)  # type: ignore[arg-type]


def per_sample_us(wish: Constraints, choice: Configuration, key: str, log: Log) -> float:
    """Simulated step time over samples, in microseconds."""
    key = f"{key}: {choice}"
    line = log.known.get(key)
    if line is None:
        step_s = measure_named(choice.policy, workload_of(wish, choice, SPAN)).step_time_s
        line = log.add(key, {"step_s": step_s})
        print(f"{1e3 * step_s:9.3f} ms  {key}", flush=True)
    return 1e6 * float(str(line["step_s"])) / choice.batch


def told(choice: Configuration) -> str:
    """A choice in a few words."""
    workers = len(choice.workers)
    return f"{choice.policy}, {workers} x {choice.batch // workers}"


def row_of(case: tuple[str, str, Ask], source: Source, log: Log) -> list[str]:
    """The first choice, the best of all, and how far apart they are."""
    trace, network, ask = case
    key, wish = f"{trace}, {network}, {ask.name}", wish_of(ask, network, source)
    space = configurations(wish)
    found = {choice: per_sample_us(wish, choice, key, log) for choice in space}
    first = first_choice(wish, f"{key}: first", log)
    spent = per_sample_us(wish, first, key, log)
    best = min([*space, first], key=lambda choice: found.get(choice, spent))
    least = found.get(best, spent)
    return [
        key,
        str(len(space)),
        f"{told(first)}, {first.cache_rows:,} rows",
        told(best),
        f"{spent:.2f}",
        f"{least:.2f}",
        f"{spent / least:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, default=Path("advice.jsonl"))
    parser.add_argument("--only", default="", help="Traces whose name contains this.")
    with opened_traces(parser) as (args, sources):
        log = Log(args.log)
        sources |= {f"synthetic {name}": open_source(name) for name in LOG_PRESETS}
        cases = [
            (trace, network, ask)
            for ask in ASKS
            for trace in sources
            if args.only in trace
            for network in NETWORKS
        ]
        rows = [row_of(case, sources[case[0]], log) for case in cases]
    batches = " or ".join(map(str, BATCHES))
    message = (
        "The adviser's first choice, with its trimmed cache, beside the best of its search space: "
        "exact policies that keep the order, 1, 2, 4 or 8 workers, as many samples a step as "
        f"{batches} on each of eight workers. Each choice is simulated for {SPAN.steps} steps, of "
        f"which {SPAN.warmup} are warm-up. Batches differ, so the table compares step time over "
        f"samples, which the adviser minimises. The adviser simulates {FULL_SPAN.steps} steps of "
        "three choices. `default`: the command's defaults (deepfm, dim 64, 0.05 ms a sample, "
        "8 GB). `rows`: dim 256, 0.005 ms a sample, memory for caches of a tenth of the rows. "
        f"Simulated at commit {log.commits()}."
    )
    headings = ["trace, network, asked", "choices", "first choice", "best of all"]
    headings += ["first, us a sample", "best, us a sample", "first / best"]
    record(
        "advice",
        "The adviser beside all it could choose",
        f"{message}\n\n{markdown(headings, rows)}",
    )


if __name__ == "__main__":
    main()
