"""From parsed columns to samples with keys in place of row ids; lists become bags.

Axes: S samples, F fields.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from embroute.data.batch import Batch, one_hot, with_bags
from embroute.data.readers import columns as rules
from embroute.data.readers.bad_rows import ParsedRows, RowChecker
from embroute.data.readers.columns import ColumnSpec
from embroute.data.readers.keys import keys_of
from embroute.kernels.array_types import F32, F64, I64

_TEXT = pl.all().cast(pl.String).fill_null("")  # columns as text, missing values empty


@dataclass(frozen=True)
class Keyed:
    """Samples with keys of values in place of row ids, and the times of the samples."""

    batch: Batch
    time: F64  # empty if the samples are not ordered by time

    def take(self, samples: npt.NDArray[np.intp]) -> Keyed:
        """The given samples, in the given order."""
        time = self.time[samples] if len(self.time) else self.time
        return Keyed(self.batch.take(samples), time)

    def slice(self, start: int, stop: int) -> Keyed:
        """Samples start..stop."""
        return Keyed(self.batch.slice(start, stop), self.time[start:stop])


def decode(
    rows: ParsedRows, layout: ColumnSpec, skip_bad_rows: bool, counts: Counter[str]
) -> Keyed:
    """Read every column in use; a bad row is an error, or counted and left out."""
    checker = RowChecker(rows)
    label = _label(rows.frame, layout, checker)
    dense = _dense(rows.frame, layout, checker)
    time = _time(rows.frame, layout, checker)
    batch = _batch(rows, layout, checker, dense, label)
    checker.finish(skip_bad_rows, counts)
    keyed = Keyed(batch, time)
    return keyed if checker.good.all() else keyed.take(np.flatnonzero(checker.good))


def _label(frame: pl.DataFrame, layout: ColumnSpec, checker: RowChecker) -> F32:
    if layout.label is None:
        return np.zeros(0, np.float32)
    label = layout.read_label(frame[layout.label])
    checker.reject(label.bad, layout.label, label.reason)
    return label.numbers.astype(np.float32)


def _dense(frame: pl.DataFrame, layout: ColumnSpec, checker: RowChecker) -> F32:
    """Dense columns; a missing value becomes 0."""
    if not layout.dense:
        return np.zeros((len(checker.good), 0), np.float32)
    numbers = rules.numbers_of(frame.select(layout.dense))
    for name, nulls in zip(layout.dense, numbers.null_count().row(0), strict=True):
        if nulls > frame[name].null_count():
            not_numbers = numbers[name].is_null().to_numpy() & ~rules.is_missing(frame[name])
            checker.reject(not_numbers, name, "is not a number")
    dense = numbers.fill_null(0.0).to_numpy()
    finite = np.abs(dense) <= np.finfo(np.float32).max
    if not finite.all():
        for position, name in enumerate(layout.dense):
            checker.reject(~finite[:, position], name, "is not a finite number")
        dense = np.where(finite, dense, 0.0)
    return layout.scale(dense).astype(np.float32, order="C")


def _time(frame: pl.DataFrame, layout: ColumnSpec, checker: RowChecker) -> F64:
    if layout.time is None:
        return np.zeros(0)
    time = rules.times(frame[layout.time])
    checker.reject(time.bad, layout.time, time.reason)
    return time.numbers


def _batch(
    rows: ParsedRows, layout: ColumnSpec, checker: RowChecker, dense: F32, label: F32
) -> Batch:
    """The batch of all fields, with dense columns and labels that are already read."""
    words = rows.frame.select(name for name in layout.categorical if name not in rows.keys)
    for name, rule in layout.derived.items():
        derived = rule(words[name])
        checker.reject(derived.bad, name, derived.reason)
        words = words.with_columns(derived.words)
    keys = dict(rows.keys)
    if words.width:
        keys.update(zip(words.columns, keys_of(words.select(_TEXT), layout.padding).T, strict=True))
    keys_SF = np.empty((len(rows.numbers), len(layout.categorical)), np.int64)
    for position, name in enumerate(layout.categorical):
        keys_SF[:, position] = keys[name]
    bags = [_bag(rows.frame[name], layout.bag_separator) for name in layout.bags]
    single = one_hot(keys_SF, dense, label)
    return with_bags(single, bags) if bags else single


def _bag(values: pl.Series, separator: str) -> tuple[I64, I64]:
    """The keys of all items of a column in a flat array, and the number of items per sample."""
    if not isinstance(values.dtype, pl.List):
        values = values.cast(pl.String).fill_null("").str.split(separator)
    items = values.cast(pl.List(pl.String)).list.drop_nulls()
    items = items.list.eval(pl.element().filter(pl.element() != ""))
    lengths = items.list.len().fill_null(0).to_numpy().astype(np.int64)
    flat = items.filter(pl.Series(lengths > 0)).explode()
    return keys_of(flat.to_frame()).ravel(), lengths
