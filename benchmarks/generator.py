"""Skew and reuse of the synthetic traces beside those of real ones.

Run `python -m benchmarks.generator --data FOLDER`. FOLDER holds criteo_adkdd21 and globo.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import click
import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table as Printed

from benchmarks.record import markdown, record
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size, parse_call
from embroute.data.batch import ArraySource, Source, one_hot
from embroute.data.online_retail import open_retail
from embroute.data.schema import Field, Schema, Table
from embroute.data.stream import batches
from embroute.data.synthetic.generator import (
    LOG_PRESETS,
    Knobs,
    Preset,
    SyntheticSource,
    open_preset,
)
from embroute.data.synthetic.presets import SIDE_CODES, FieldLaw
from embroute.kernels.array_types import I64
from embroute.kernels.jit import kernel
from embroute.planner.setup import Setup
from embroute.simulator.simulation import Workload, measure_named

BATCH = 1024
PAIRED = 20 * BATCH  # samples among which pairs of ids are counted

# For twins: sides (user, item, context) of the real traces' fields, and knobs of their regime.
# AdKDD'21 does not say what its fields are: those that depend on each other share a side. In Globo
# device, system, country, region and referrer stay the same from click to click of a user.
TWINS = {
    "criteo adkdd'21": ("uuucucuucuiiiiiiiii", Knobs(0)),
    "online retail": (
        "uiuui",
        Knobs(0, groups=16, correlation=1.0, sessions=0.97, gap=64.0, drift=0.5),
    ),
    "globo": ("uuiuuuuuu", Knobs(0, correlation=0.7, sessions=0.65, gap=64.0, drift=3.0)),
}


@dataclass(frozen=True)
class Trace:
    """Row ids of samples in order, numbered 0, 1, ... over all fields."""

    name: str
    rows_SF: I64


def compact(name: str, columns: list[I64]) -> Trace:
    """A trace of the given columns; every field has ids of its own."""
    rows, first = [], 0
    for column in columns:
        distinct, ids = np.unique(column, return_inverse=True)
        rows.append(ids + first)
        first += len(distinct)
    return Trace(name, np.stack(rows, axis=1))


def from_source(name: str, source: Source, samples: int) -> Trace:
    """The first samples of a source whose fields are all one-hot."""
    first = next(batches(source, samples))
    return compact(name, list(first.rows.reshape(-1, first.num_fields).T))


def from_table(name: str, table: pl.DataFrame) -> Trace:
    """All samples of a table of whole numbers."""
    return compact(name, [table[column].to_numpy() for column in table.columns])


def read_adkdd(data: Path, samples: int) -> Trace:
    table = pl.read_csv(data / "criteo_adkdd21" / "X_train.csv.gz")
    return from_table("criteo adkdd'21", table.head(samples))


def read_globo(data: Path, samples: int) -> Trace:
    """Clicks in time order. The hours come in order, so the first files hold the first clicks."""
    hours: list[pl.DataFrame] = []
    archive = next((data / "globo").glob("*.tar.xz"))
    with tarfile.open(archive) as tar:
        for member in sorted((m for m in tar if m.name.endswith(".csv")), key=lambda m: m.name):
            hours.append(pl.read_csv(tar.extractfile(member) or b""))
    clicks = pl.concat([hour for hour in hours if len(hour)], how="vertical_relaxed")
    clicks = clicks.sort("click_timestamp", maintain_order=True).head(samples)
    unused = ("session_start", "session_size", "click_timestamp")
    return from_table("globo", clicks.drop(unused))


def fitted_exponent(column: I64) -> float:
    """Exponent of the power law whose most popular tenth of the ids has the column's share."""
    counts = np.sort(np.bincount(column - column.min()))[::-1]
    head = max(1, len(counts) // 10)
    share = counts[:head].sum() / len(column)
    low, high = 0.0, 6.0
    for _ in range(40):
        flat = 1.0 - (low + high) / 2 + 1e-9
        reached = ((head + 1.0) ** flat - 1) / ((len(counts) + 1.0) ** flat - 1)
        low, high = ((low + high) / 2, high) if reached < share else (low, (low + high) / 2)
    return low


def twin(trace: Trace) -> Trace:
    """A synthetic trace with the field sizes and the fitted exponents of a real one."""
    sides, knobs = TWINS[trace.name]
    samples = len(trace.rows_SF)
    laws = tuple(
        FieldLaw(f"f{number}", len(np.unique(column)), SIDE_CODES[side], fitted_exponent(column))
        for number, (side, column) in enumerate(zip(sides, trace.rows_SF.T, strict=True))
    )
    source = SyntheticSource(Preset("twin", laws, (), knobs), replace(knobs, samples=samples))
    return from_source("  its twin", source, samples)


def traces(data: Path, samples: int) -> Iterator[Trace]:
    """Real traces with their twins, then the presets."""
    retail = from_source("online retail", open_retail(parse_call("online-retail")), samples)
    for real in (read_adkdd(data, samples), read_globo(data, samples), retail):
        yield real
        yield twin(real)
    for name in LOG_PRESETS:
        yield from_source(name, open_preset(parse_call(f"{name}(samples={samples})")), samples)


def top_shares(rows: I64, shares: tuple[float, ...]) -> list[float]:
    """Share of the look-ups that the most popular share of the ids takes."""
    counts = np.sort(np.bincount(rows))[::-1]
    return [counts[: max(1, round(share * len(counts)))].sum() / len(rows) for share in shares]


def batch_reuse(rows_SF: I64) -> tuple[float, float]:
    """Share of a batch's distinct rows that the batch before had; distinct rows a look-up."""
    whole = range(0, len(rows_SF) - BATCH + 1, BATCH)
    distinct = [np.unique(rows_SF[start : start + BATCH]) for start in whole]
    again = np.mean([np.isin(now, before).mean() for before, now in pairwise(distinct)])
    return float(again), float(np.mean([len(rows) for rows in distinct])) / (
        BATCH * rows_SF.shape[1]
    )


@kernel
def lru_hits(rows: I64, num_rows: int, capacity: int) -> int:
    """Hits of an LRU cache of `capacity` rows, as a doubly linked list with a sentinel."""
    before = np.full(num_rows + 1, -1)
    after = np.full(num_rows + 1, -1)
    before[num_rows] = after[num_rows] = num_rows
    hits = held = 0
    for row in rows:
        if after[row] >= 0:
            hits += 1
            after[before[row]], before[after[row]] = after[row], before[row]
        elif held < capacity:
            held += 1
        else:
            victim = before[num_rows]
            before[num_rows] = before[victim]
            after[before[victim]] = num_rows
            after[victim] = before[victim] = -1
        newest = after[num_rows]
        before[row], after[row] = num_rows, newest
        after[num_rows] = before[newest] = row
    return hits


def lru_rates(rows_SF: I64) -> list[float]:
    """LRU hit rates: a cache of 1 % of the ids in order and shuffled, then 10 % likewise."""
    num_rows = int(rows_SF.max()) + 1
    shuffled = np.random.default_rng(0).permutation(rows_SF)
    return [
        lru_hits(order.ravel(), num_rows, max(1, int(share * num_rows))) / rows_SF.size
        for share in (0.01, 0.1)
        for order in (rows_SF, shuffled)
    ]


def pairs(rows_SF: I64) -> float:
    """Distinct pairs of ids of two fields over those of unrelated fields, mean of all pairs."""
    random, num_rows = np.random.default_rng(0), int(rows_SF.max()) + 1
    columns, found = rows_SF[:PAIRED].T, []
    for left, right in combinations(columns, 2):
        together = np.unique(left * num_rows + right)
        unrelated = np.unique(left * num_rows + random.permutation(right))
        found.append(len(together) / len(unrelated))
    return float(np.mean(found))


def hot_shares(rows_SF: I64) -> list[float]:
    """Share of the samples all of whose ids are among the most popular 1, 5, 10 and 25 %."""
    counts = np.bincount(rows_SF.ravel())
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    worst_S = rank[rows_SF].max(1)
    return [float((worst_S < share * len(counts)).mean()) for share in (0.01, 0.05, 0.1, 0.25)]


def gains(trace: Trace) -> list[float]:
    """Rows that policies move less than vanilla: 8 workers, caches of 10 % of the ids."""
    first, columns = 0, trace.rows_SF.T
    tables = []
    for number, column in enumerate(columns):
        tables.append(Table(f"f{number}", int(column.max()) + 1 - first))
        first = int(column.max()) + 1
    schema = Schema(tuple(tables), tuple(Field(t.name, i) for i, t in enumerate(tables)))
    cluster, cache = open_cluster("dc-8"), Size(0.1, "share")
    setup = Setup(schema, cluster, 64, BATCH, "sgd", cache)
    job = Workload(ArraySource(schema, one_hot(trace.rows_SF)), setup)
    outcomes = [measure_named(name, job) for name in ("vanilla", *GAINING)]
    moved = [o.traffic.rows_WKIP.sum() + o.drain_rows_W.sum() for o in outcomes]
    return [float(1 - rows / moved[0]) for rows in moved[1:]]


GAINING = ("herald", "esd(1)", "fae")
HEADINGS = (
    *("trace", "samples", "fields", "ids", "top .1%", "top 1%", "top 10%", "reuse", "distinct"),
    *("LRU 1%", "1% shuf.", "LRU 10%", "10% shuf.", "pairs"),
    *("hot 1%", "hot 5%", "hot 10%", "hot 25%", *GAINING),
)


def line(trace: Trace) -> tuple[str, ...]:
    """One line of the table."""
    samples, fields = trace.rows_SF.shape
    ids = int(trace.rows_SF.max()) + 1
    shares = top_shares(trace.rows_SF.ravel(), (0.001, 0.01, 0.1))
    rows = trace.rows_SF
    rates = [*shares, *batch_reuse(rows), *lru_rates(rows), pairs(rows)]
    rates += [*hot_shares(rows), *gains(trace)]
    counts = (f"{samples:,}", str(fields), f"{ids:,}")
    return (trace.name, *counts, *(f"{rate:.3f}" for rate in rates))


NOTES = """\
ids: distinct ids among these samples; shares and caches are relative to them. reuse: share of a
batch's distinct rows that the batch before had too; distinct: distinct rows per look-up, both in
batches of 1024. LRU: hit rate of one cache over the look-ups in order, and with the samples
shuffled. pairs: distinct pairs of ids of two fields over those with one of the fields shuffled,
mean over all pairs of fields, 20,480 samples: 1 is unrelated. hot: samples all of whose ids are
among so many of the most popular ones. herald, esd(1), fae: rows moved less than by vanilla, 8
workers x 128 samples, caches of 10 % of the ids, 80 steps after 10. A twin is synthetic: it has the
field sizes of the real trace above it and exponents fitted to each field's top tenth, so its
top 10% is near by construction. The knobs of AdKDD'21's twin are the presets'; those of the other
twins were searched (60 random draws each) for the gains of herald and esd(1). No knob makes rare
ids of several fields come together, so that twins have too few or too many hot samples for fae.
The presets' laws were fitted to published facts (benchmarks/calibrate.py), their
correlation was chosen on AdKDD'21.
"""


@click.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--samples", default=100 * BATCH, show_default=True, help="Samples of every trace.")
def main(data: Path, samples: int) -> None:
    lines = [line(trace) for trace in traces(data, samples)]
    table = Printed(*HEADINGS, title="Skew and reuse")
    for cells in lines:
        table.add_row(*cells)
    Console(width=150).print(table)
    record(
        "generator", "Synthetic traces beside real ones", f"{markdown(HEADINGS, lines)}\n\n{NOTES}"
    )


if __name__ == "__main__":
    main()
