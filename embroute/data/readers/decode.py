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
from embroute.data.readers import layout as rules
from embroute.data.readers.faults import Rows, Sieve, sieve
from embroute.data.readers.keys import keys_of
from embroute.data.readers.layout import Layout

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


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


def decode(rows: Rows, layout: Layout, skip_bad_rows: bool, counts: Counter[str]) -> Keyed:
    """Read every column in use; a bad row is an error, or counted and left out."""
    checked = sieve(rows)
    label = _label(rows.frame, layout, checked)
    dense = _dense(rows.frame, layout, checked)
    time = _time(rows.frame, layout, checked)
    batch = _fields(rows.frame, layout, checked, (dense, label))
    checked.settle(skip_bad_rows, counts)
    keyed = Keyed(batch, time)
    return keyed if checked.good.all() else keyed.take(np.flatnonzero(checked.good))


def _label(frame: pl.DataFrame, layout: Layout, checked: Sieve) -> F32:
    if layout.label is None:
        return np.zeros(0, np.float32)
    label = layout.read_label(frame[layout.label])
    checked.reject(label.bad, layout.label, label.reason)
    return label.numbers.astype(np.float32)


def _dense(frame: pl.DataFrame, layout: Layout, checked: Sieve) -> F32:
    dense = np.zeros((frame.height, len(layout.dense)), np.float32)
    for position, name in enumerate(layout.dense):
        values, not_finite = rules.dense(frame[name], layout.scale)
        checked.reject(values.bad, name, values.reason)
        checked.reject(not_finite, name, "is not a finite number")
        dense[:, position] = values.numbers
    return dense


def _time(frame: pl.DataFrame, layout: Layout, checked: Sieve) -> F64:
    if layout.time is None:
        return np.zeros(0)
    time = rules.times(frame[layout.time])
    checked.reject(time.bad, layout.time, time.reason)
    return time.numbers


def _fields(frame: pl.DataFrame, layout: Layout, checked: Sieve, values: tuple[F32, F32]) -> Batch:
    """The batch of all fields; `values` are the dense columns and the labels."""
    keys_SF = np.empty((frame.height, len(layout.categorical)), np.int64)
    for position, name in enumerate(layout.categorical):
        words = frame[name]
        if name in layout.derived:
            derived = layout.derived[name](words)
            checked.reject(derived.bad, name, derived.reason)
            words = derived.words
        keys_SF[:, position] = keys_of(_text(words), layout.padding)
    if not layout.bags:
        return one_hot(keys_SF, *values)
    bags = [_bag(frame[name], layout.bag_separator) for name in layout.bags]
    return _with_bags(keys_SF, bags, values)


def _text(values: pl.Series) -> pl.Series:
    """A column as text, missing values empty."""
    return values.cast(pl.String).fill_null("")


def _bag(values: pl.Series, separator: str) -> tuple[I64, I64]:
    """Keys of all items of a column one behind the other, and how many each sample has."""
    if not isinstance(values.dtype, pl.List):
        values = _text(values).str.split(separator)
    items = values.cast(pl.List(pl.String)).list.drop_nulls()
    items = items.list.eval(pl.element().filter(pl.element() != ""))
    lengths = items.list.len().fill_null(0).to_numpy().astype(np.int64)
    flat = items.filter(pl.Series(lengths > 0)).explode()
    return keys_of(flat.cast(pl.String)), lengths


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
