"""HET's headline: bytes of embeddings that `het(100)` moves, against a server without caches.

Run `python -m benchmarks.het_headline --data FOLDER`. FOLDER holds criteo_adkdd21 and globo. The
paper: 88 % less, with 8 workers of 128 samples, 1 server, caches for 10 % of the rows, width 128
and SGD.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from benchmarks.record import markdown, record
from benchmarks.sanity import opened_traces
from embroute.config.cluster import uniform_cluster
from embroute.config.spec import Size, parse_call
from embroute.data.batch import Source
from embroute.data.stream import batches
from embroute.data.synthetic.generator import open_preset
from embroute.planner.plan import drain_transfers, row_bytes_W, traffic
from embroute.planner.plan_stream import plans, start
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy

PAPER = 0.88
WORKERS, BATCH, WIDTH, CACHE, FIRST = 8, 1024, 128, 0.1, 100
REAL_STEPS = 3_200  # of real traces: some epochs
POLICIES = ("het(100)", "het(100, order=lfu)", "het(100, clocks=release)")


@dataclass(frozen=True)
class Span:
    """Bytes of some steps. `plain`: without caches, a pull and a push for each touch."""

    steps: range
    plain: int
    moved: int
    checks: int
    unsent: int  # of updates that stay in caches, less those before the span
    full: float  # share of the fullest cache that is in use

    def cells(self) -> list[str]:
        """The span as a line of a table: reductions without and with what is not rows on links."""
        sums = (self.moved, self.moved + self.checks, self.moved + self.checks + self.unsent)
        shares = [f"-{1 - total / self.plain:.1%}" for total in sums]
        return [f"{self.steps.start:,} to {self.steps.stop:,}", f"{self.full:.0%}", *shares]


def spans(name: str, source: Source, steps: int) -> Iterator[Span]:
    """Spans of a run, each as long as all spans before it."""
    setup = Setup(
        source.schema, uniform_cluster(WORKERS, 1), WIDTH, BATCH, "sgd", Size(CACHE, "share")
    )
    policy = make_policy(name)
    state = start(policy, setup)
    stream = islice(batches(source, BATCH, epochs=None), steps)
    first, stop, unsent_before, sums = 0, FIRST, 0, np.zeros(3, np.int64)
    row_bytes = int(setup.record_bytes_XA[0, 0])
    for step in plans(policy, stream, state):
        moved = traffic(step.plan, setup)
        touches = len(step.plan.touches.unique_T)
        sums += [2 * row_bytes * touches, moved.bytes_WKIP.sum(), moved.check_bytes_WK.sum()]
        if step.plan.step + 1 in (stop, steps):
            drain = drain_transfers(state, policy.sync.record)
            unsent = int(row_bytes_W(drain, setup).sum())
            used = float((state.caches.used_WA / setup.capacity_WA).max())
            plain, rows, checks = sums.tolist()
            passed = range(first, step.plan.step + 1)
            yield Span(passed, plain, rows, checks, unsent - unsent_before, used)
            first, stop, unsent_before = stop, 2 * stop, unsent
            sums[:] = 0


def body(sources: Mapping[str, tuple[Source, int]]) -> str:
    """A table for each log and policy."""
    headings = ["steps", "cache in use", "rows", "and checks", "and unsent updates"]
    parts = [
        f"Bytes against `nocache`, whose every touch is a pull and a push; the paper measured "
        f"-{PAPER:.0%} as time on 1 Gbit/s Ethernet. *Rows*: what moves in the steps. *And "
        f"checks*: with 16 bytes for each copy whose clock the published system checks. *And "
        f"unsent updates*: with a drain at the end of the steps, less a drain at their start, as "
        f"`compare` counts. {WORKERS} workers, {BATCH // WORKERS} samples each, width {WIDTH}, "
        f"caches for {CACHE:.0%} of the rows, SGD."
    ]
    for title, (source, steps) in sources.items():
        for name in POLICIES:
            lines = [span.cells() for span in spans(name, source, steps)]
            parts.append(f"## {title}, `{name}`\n\n{markdown(headings, lines)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=44_766, help="of the synthetic log: an epoch")
    with opened_traces(parser) as (options, traces):
        kaggle = open_preset(parse_call("criteo-kaggle"))
        sources = {name: (source, REAL_STEPS) for name, source in traces.items()}
        sources["Synthetic Criteo Kaggle"] = (kaggle, options.steps)
        record("het_headline", "HET's headline", body(sources))


if __name__ == "__main__":
    main()
