"""Facts about a data set that matter to a cache: distinct ids, skew, reuse between batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from embroute.data.batch import PADDING, Batch, Source
from embroute.data.schema import Schema
from embroute.data.stream import rebatch
from embroute.kernels.array_types import I64

TOP_SHARES = (0.001, 0.01, 0.1)  # of the distinct ids, in order of look-ups
RECENT_BATCHES = 10


@dataclass(frozen=True)
class FieldDescription:
    """One field, or all fields together."""

    name: str
    lookups: int
    distinct: int
    top_shares: tuple[float, ...]  # share of look-ups for each of TOP_SHARES


@dataclass(frozen=True)
class Reuse:
    """How batches share rows. Shares count distinct rows of batches that follow another batch."""

    batch_size: int
    num_batches: int
    distinct_rows: float  # of a batch, on average
    lookups_per_row: float  # within a batch
    in_previous: float | None  # None if there is only one batch
    in_recent: float | None  # in any of the previous RECENT_BATCHES


@dataclass(frozen=True)
class Description:
    """The facts that `embroute data describe` shows."""

    num_samples: int
    num_rows: int  # rows of the tables, including ids that never occur
    num_dense: int
    positive_share: float | None  # None if the data has no labels
    total: FieldDescription
    fields: tuple[FieldDescription, ...]
    reuse: Reuse


def describe(
    source: Source, batch_size: int = 1024, progress: Callable[[int], None] | None = None
) -> Description:
    """Describe a source in one pass; memory grows with rows only.

    `progress` receives the number of samples done.
    """
    if batch_size < 1:
        raise ValueError(f"--batch must be at least 1, got {batch_size}")
    schema = source.schema
    counts = AccessCounts(schema)
    reuse = ReuseCounts(schema.num_rows)
    for batch in rebatch(source.chunks(), batch_size):
        counts.add(batch)
        # A short last batch has fewer distinct rows and would distort the averages.
        if len(batch) == batch_size or reuse.num_batches == 0:
            reuse.add(batch.rows)
        if progress is not None:
            progress(counts.num_samples)
    if not counts.num_samples:
        raise ValueError("there are no samples to describe")
    return counts.description(reuse.result(batch_size))


def top_share(counts: I64, share: float) -> float:
    """Share of look-ups that go to the top `share` of the distinct ids, at least one id."""
    used = np.sort(counts[counts > 0])
    if not len(used):
        return 0.0
    top = max(1, round(share * len(used)))
    return float(used[-top:].sum() / used.sum())


class AccessCounts:
    """Counts of the look-ups of every row, by field."""

    def __init__(self, schema: Schema) -> None:
        self.num_samples = 0
        self._schema = schema
        self._positives = 0
        self._lookups = [
            np.zeros(schema.tables[field.table].num_rows, np.int64) for field in schema.fields
        ]

    def add(self, batch: Batch) -> None:
        """Count the look-ups of a batch."""
        self.num_samples += len(batch)
        self._positives += int((batch.label == 1).sum())
        num_fields = self._schema.num_fields
        fields = np.repeat(np.tile(np.arange(num_fields), len(batch)), np.diff(batch.offsets))
        for position, field in enumerate(self._schema.fields):
            rows = batch.rows[(fields == position) & (batch.rows != PADDING)]
            ids, times = np.unique(rows - self._schema.first_rows[field.table], return_counts=True)
            self._lookups[position][ids] += times

    def description(self, reuse: Reuse) -> Description:
        """The description of all batches added so far."""
        schema = self._schema
        tables = [np.zeros(table.num_rows, np.int64) for table in schema.tables]
        for field, lookups in zip(schema.fields, self._lookups, strict=True):
            tables[field.table] += lookups
        return Description(
            self.num_samples,
            schema.num_rows,
            len(schema.dense),
            self._positives / self.num_samples if schema.labelled else None,
            _field("all fields", np.concatenate(tables)),
            tuple(_field(f.name, n) for f, n in zip(schema.fields, self._lookups, strict=True)),
            reuse,
        )


def _field(name: str, counts: I64) -> FieldDescription:
    shares = tuple(top_share(counts, share) for share in TOP_SHARES)
    return FieldDescription(name, int(counts.sum()), int((counts > 0).sum()), shares)


class ReuseCounts:
    """Counts of rows that batches share with earlier batches."""

    def __init__(self, num_rows: int) -> None:
        self.num_batches = 0
        # So far back that an unused row never counts as recent.
        self._last_batch = np.full(num_rows, -RECENT_BATCHES - 1, np.int32)
        self._lookups = self._distinct = 0
        self._followers = self._in_previous = self._in_recent = 0

    def add(self, rows: I64) -> None:
        """Count the rows of the next batch."""
        rows = rows[rows != PADDING]
        distinct = np.unique(rows)
        age = self.num_batches - self._last_batch[distinct]
        self._lookups += len(rows)
        self._distinct += len(distinct)
        if self.num_batches:
            self._followers += len(distinct)
            self._in_previous += int((age == 1).sum())
            self._in_recent += int((age <= RECENT_BATCHES).sum())
        self._last_batch[distinct] = self.num_batches
        self.num_batches += 1

    def result(self, batch_size: int) -> Reuse:
        """Averages over all batches, weighted by distinct rows."""
        followers = self._followers
        return Reuse(
            batch_size,
            self.num_batches,
            self._distinct / max(self.num_batches, 1),
            self._lookups / max(self._distinct, 1),
            self._in_previous / followers if followers else None,
            self._in_recent / followers if followers else None,
        )
