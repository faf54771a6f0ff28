"""Step times of real ranks behind unequal links, beside the predictions of the cost model.

Run `python -m benchmarks.rhythm --data FOLDER` as root. FOLDER holds criteo_adkdd21
and globo. Workers sleep in place of computing, so two cores suffice for eight workers. The result
shows how transfers and compute follow each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.own import RIVALS
from benchmarks.ranks import run_ranks
from benchmarks.record import markdown, record
from benchmarks.sanity import opened_traces
from benchmarks.testbed import SHARD_ADDRESS, SHARD_GBIT, inside, shaped_links
from benchmarks.workload import Clock, loss_of
from embroute.config.cluster import Cluster, star_cluster
from embroute.data.batch import ArraySource, Batch, Source
from embroute.data.schema import Field, Schema, Table
from embroute.data.stream import batches
from embroute.models.layers import FieldEmbeddings, Samples
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.simulator.simulation import Workload, choose_workers, measure

FAST, SLOW, DIM, COMPUTE_S = 5.0, 0.5, 512, 0.05e-3  # of edge-8, as in the table of docs/policy.md
OWN = "embroute(effort=500)"
NOTE = (
    "Eight workers x 128, each a process of its own in a network of its own, a shard and a "
    "coordinator, all on two cores. The table's setting (edge-8, dim 512, 0.05 ms per sample), but "
    "everything {0} times slower: four links at {1:.4g} Mbit/s, four at {2:.4g}, {3:.3g} ms of "
    "sleep per sample in place of compute. So two things weigh little: the processor time of the "
    "ranks, some milliseconds a step, and the 16 KB that a shaped link lets pass at once. "
    "Caches of 10 %, mean over the steps after the warm-up. Policies also with `workers=fast`, "
    "if that changes the number of workers. Foretold: by the cost model."
)


@dataclass(frozen=True)
class Case:
    """A policy on a trace in a file; `gbit` is the rate of every worker's link."""

    trace: str
    policy: str
    gbit: Sequence[float]
    slower: int
    steps: int = 40
    warmup: int = 15

    @property
    def compute_s(self) -> float:
        """Compute time of a sample."""
        return self.slower * COMPUTE_S


def cluster_of(case: Case) -> Cluster:
    return replace(star_cluster(case.gbit, SHARD_GBIT), compute_s_per_sample=case.compute_s)


def save(source: Source, path: Path, samples: int) -> None:
    """Keep the first samples of a trace in a file that every rank can read at once."""
    found = next(batches(source, samples))
    sizes = [table.num_rows for table in source.schema.tables]
    tables = [field.table for field in source.schema.fields]
    np.savez(path, rows=found.rows, offsets=found.offsets, sizes=sizes, tables=tables)


def load(path: str) -> ArraySource:
    """The saved trace as a source, with random labels."""
    kept = np.load(path)
    tables = tuple(Table(f"t{i}", int(size)) for i, size in enumerate(kept["sizes"]))
    fields = tuple(Field(f"f{i}", int(table)) for i, table in enumerate(kept["tables"]))
    count = (len(kept["offsets"]) - 1) // len(fields)
    label = np.random.default_rng(0).integers(0, 2, count).astype(np.float32)
    nothing = np.zeros((count, 0), np.float32)
    batch = Batch(kept["rows"], kept["offsets"], nothing, label, len(fields))
    return ArraySource(Schema(tables, fields, (), True), batch)


def job_of(case: Case) -> Workload:
    source = load(case.trace)
    return Workload(source, Setup(source.schema, cluster_of(case), DIM), case.steps, case.warmup)


class Asleep(nn.Module):
    """The sum of a sample's rows; the training loop sleeps in place of further compute."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.embeddings = FieldEmbeddings(schema, [DIM] * len(schema.tables), device="meta")
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, samples: Samples) -> torch.Tensor:
        """Logits (N,)."""
        return self.embeddings.stacked(samples).sum((1, 2)) + self.bias


class Read:
    """The coordinator's batches."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __iter__(self) -> Iterator[Batch]:
        size = 128 * 8
        return islice(batches(load(self._case.trace), size), self._case.steps)


def rank(case: Case) -> dict[str, object]:
    """One rank of a real run."""
    import embroute

    model = Asleep(load(case.trace).schema)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cluster, clock = cluster_of(case), Clock(case.warmup)
    ready = embroute.prepare(
        model, optimizer, Read(case), policy=case.policy, cache=0.1, network=cluster
    )
    for samples in ready.loader:
        assert isinstance(samples, Samples)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, samples)
        assert ready.session is not None
        assert ready.session.current is not None
        count = ready.session.current.header.num_samples
        time.sleep(max(0.0, began + count * case.compute_s - time.perf_counter()))
        ready.backward(loss)
        optimizer.step()
        clock.tick()
    return clock.result()


def real_ms(case: Case) -> float:
    """Mean milliseconds of a step on real ranks, measured by the first worker."""
    workers = [inside(f"w{i}") for i in range(len(case.gbit))]
    prefixes = [inside("shard"), inside("shard"), *workers]
    with shaped_links([f"{gbit:g}gbit" for gbit in case.gbit]):
        found = run_ranks("benchmarks.rhythm", asdict(case), len(prefixes), prefixes, SHARD_ADDRESS)
    return float(np.mean(np.array(found[2]["step_ms"])))


def on_its_workers(case: Case) -> Case:
    """The same policy on the workers it chooses, and no others there."""
    workers = choose_workers(make_policy(case.policy), job_of(case))
    name = case.policy.replace(", workers=fast", "").replace("(workers=fast)", "")
    return replace(case, policy=name, gbit=[case.gbit[w] for w in workers])


def foretold_ms(case: Case) -> float:
    """Milliseconds of a step by the cost model."""
    job = job_of(case)
    batch = 128 * 8  # however many workers
    job = replace(job, setup=replace(job.setup, batch_size=batch))
    return 1e3 * measure(make_policy(case.policy), job).step_time_s


def rows_of(name: str, path: Path, given: argparse.Namespace) -> list[list[str]]:
    """A trace's policies, and ours over the best of the others."""
    gbit, rows = [rate / given.slower for rate in [FAST] * 4 + [SLOW] * 4], []
    own, others = [np.inf, np.inf], [np.inf, np.inf]
    found_cases = (Case(str(path), policy, gbit, given.slower) for policy in given.policies)
    cases = [on_its_workers(case) for case in found_cases]
    for case in {(case.policy, len(case.gbit)): case for case in cases}.values():
        foretold, real = found = foretold_ms(case), real_ms(case)
        shown = f"{case.policy}, {len(case.gbit)} workers"
        print(name, shown, f"{foretold:.1f} {real:.1f}", flush=True)
        rows.append([name, shown, f"{foretold:.1f}", f"{real:.1f}", f"{real / foretold:.2f}"])
        best = own if case.policy == OWN else others
        best[:] = np.minimum(best, found).tolist()
    ratios = [f"{ours / theirs:.3f}" for ours, theirs in zip(own, others, strict=True)]
    return [*rows, [name, "embroute over the best other", *ratios, ""]]


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(rank(Case(**json.loads(sys.argv[1])))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slower", type=int, default=60, help="how many times")
    parser.add_argument("--traces", default="", help="part of a trace's name: only those")
    parser.add_argument("--policies", nargs="*", default=[*RIVALS, OWN])
    rows = []
    with opened_traces(parser) as (given, sources), tempfile.TemporaryDirectory() as scratch:
        chosen = {name: s for name, s in sources.items() if given.traces in name}
        for i, (name, source) in enumerate(chosen.items()):
            path = Path(scratch) / f"{i}.npz"
            save(source, path, 128 * 8 * 70)
            rows += rows_of(name, path, given)
    headings = ["trace", "policy", "foretold ms", "took ms", "took over foretold"]
    slower, mbit = given.slower, 1e3 / given.slower
    message = NOTE.format(slower, FAST * mbit, SLOW * mbit, 1e3 * COMPUTE_S * slower)
    body = f"{message}\n\n{markdown(headings, rows)}"
    record("rhythm", "Steps on real ranks beside the cost model", body)


if __name__ == "__main__":
    main()
