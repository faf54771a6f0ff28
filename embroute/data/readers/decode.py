"""From parsed columns to samples whose rows are still keys of values, not ids.

Axes: S samples, F fields.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from embroute.data.batch import Batch, one_hot
from embroute.data.readers import columns as rules
from embroute.data.readers.bad_rows import ParsedRows, Sieve, sieve
from embroute.data.readers.columns import ColumnSpec
from embroute.data.readers.keys import keys_of
from embroute.kernels.array_types import F32, F64, I64

_TEXT = pl.all().cast(pl.String).fill_null("")  # columns as text, missing values empty


@dataclass(frozen=True)
class Keyed:
    """Samples that hold the key of a value where a batch holds a row, and their times."""

    batch: Batch
    time: F64  # empty where the samples are not ordered by time

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
    checked = sieve(rows)
    label = _label(rows.frame, layout, checked)
    dense = _dense(rows.frame, layout, checked)
    time = _time(rows.frame, layout, checked)
    batch = _fields(rows, layout, checked, (dense, label))
    checked.settle(skip_bad_rows, counts)
    keyed = Keyed(batch, time)
    return keyed if checked.good.all() else keyed.take(np.flatnonzero(checked.good))


def _label(frame: pl.DataFrame, layout: ColumnSpec, checked: Sieve) -> F32:
    if layout.label is None:
        return np.zeros(0, np.float32)
    label = layout.read_label(frame[layout.label])
    checked.reject(label.bad, layout.label, label.reason)
    return label.numbers.astype(np.float32)


def _dense(frame: pl.DataFrame, layout: ColumnSpec, checked: Sieve) -> F32:
    """Dense columns, 0 where a value is missing."""
    if not layout.dense:
        return np.zeros((len(checked.good), 0), np.float32)
    numbers = rules.numbers_of(frame.select(layout.dense))
    for name, nulls in zip(layout.dense, numbers.null_count().row(0), strict=True):
        if nulls > frame[name].null_count():
            unread = numbers[name].is_null().to_numpy() & ~rules.is_missing(frame[name])
            checked.reject(unread, name, "is not a number")
    dense = numbers.fill_null(0.0).to_numpy()
    finite = np.abs(dense) <= np.finfo(np.float32).max
    if not finite.all():
        for position, name in enumerate(layout.dense):
            checked.reject(~finite[:, position], name, "is not a finite number")
        dense = np.where(finite, dense, 0.0)
    return layout.scale(dense).astype(np.float32, order="C")


def _time(frame: pl.DataFrame, layout: ColumnSpec, checked: Sieve) -> F64:
    if layout.time is None:
        return np.zeros(0)
    time = rules.times(frame[layout.time])
    checked.reject(time.bad, layout.time, time.reason)
    return time.numbers


def _fields(rows: ParsedRows, layout: ColumnSpec, checked: Sieve, values: tuple[F32, F32]) -> Batch:
    """The batch of all fields; `values` are the dense columns and the labels."""
    words = rows.frame.select(name for name in layout.categorical if name not in rows.keys)
    for name, rule in layout.derived.items():
        derived = rule(words[name])
        checked.reject(derived.bad, name, derived.reason)
        words = words.with_columns(derived.words)
    keys = dict(rows.keys)
    if words.width:
        keys.update(zip(words.columns, keys_of(words.select(_TEXT), layout.padding).T, strict=True))
    keys_SF = np.empty((len(rows.numbers), len(layout.categorical)), np.int64)
    for position, name in enumerate(layout.categorical):
        keys_SF[:, position] = keys[name]
    if not layout.bags:
        return one_hot(keys_SF, *values)
    bags = [_bag(rows.frame[name], layout.bag_separator) for name in layout.bags]
    return _with_bags(keys_SF, bags, values)


def _bag(values: pl.Series, separator: str) -> tuple[I64, I64]:
    """Keys of all items of a column one behind the other, and how many each sample has."""
    if not isinstance(values.dtype, pl.List):
        values = values.cast(pl.String).fill_null("").str.split(separator)
    items = values.cast(pl.List(pl.String)).list.drop_nulls()
    items = items.list.eval(pl.element().filter(pl.element() != ""))
    lengths = items.list.len().fill_null(0).to_numpy().astype(np.int64)
    flat = items.filter(pl.Series(lengths > 0)).explode()
    return keys_of(flat.to_frame()).ravel(), lengths


def _with_bags(keys_SF: I64, bags: list[tuple[I64, I64]], values: tuple[F32, F32]) -> Batch:
    """A batch of fields with one id each, followed by fields with a bag each."""
    samples, single = keys_SF.shape
    num_fields = single + len(bags)
    lengths_SF = np.ones((samples, num_fields), np.int64)
    for position, (_, lengths) in enumerate(bags, single):
        lengths_SF[:, position] = lengths
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_SF.ravel())])
    rows = np.empty(offsets[-1], np.int64)
    starts_SF = offsets[:-1].reshape(samples, num_fields)
    rows[starts_SF[:, :single]] = keys_SF
    for position, (keys, lengths) in enumerate(bags, single):
        before = np.cumsum(lengths) - lengths
        rows[np.arange(len(keys)) + np.repeat(starts_SF[:, position] - before, lengths)] = keys
    return Batch(rows, offsets, *values, num_fields)
