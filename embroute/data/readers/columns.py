"""The use of each column of a file, and the rules that read labels, numbers and times.

A rule returns values, a mask of the rows that it cannot read, and the reason for the error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from embroute.data.readers.records import Syntax
from embroute.kernels.array_types import F64, Bools

_DATE_TIMES = (
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%dT%H:%M:%S%.f",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%dT%H:%M",
    "%Y-%m-%d",
)


class Values(NamedTuple):
    """Numbers of a column, the rows without a number, and the reason for the error."""

    numbers: F64
    bad: Bools
    reason: str


class Words(NamedTuple):
    """Categorical values derived from a column, the bad rows, and the reason for the error."""

    words: pl.Series
    bad: Bools
    reason: str


def as_given(numbers: F64) -> F64:
    """Dense values unchanged."""
    return numbers


def binary(values: pl.Series) -> Values:
    """A label that must be 0 or 1."""
    numbers = parsed(values)
    return Values(numbers, ~((numbers == 0) | (numbers == 1)), "is not 0 or 1")


def label_at_least(threshold: float) -> Callable[[pl.Series], Values]:
    """A label that is 1 if a number reaches the threshold, for example a rating of 4 stars."""

    def rule(values: pl.Series) -> Values:
        numbers = parsed(values)
        return Values(
            (numbers >= threshold).astype(np.float64), ~np.isfinite(numbers), "is not a number"
        )

    return rule


@dataclass(frozen=True)
class ColumnSpec:
    """The columns of a file by use; `columns` names them if the file has no header."""

    name: str
    categorical: tuple[str, ...]
    bags: tuple[str, ...] = ()
    label: str | None = None
    dense: tuple[str, ...] = ()
    time: str | None = None
    columns: tuple[str, ...] = ()
    header: bool = True
    syntax: Syntax = field(default_factory=Syntax)
    read_label: Callable[[pl.Series], Values] = binary
    scale: Callable[[F64], F64] = as_given
    derived: Mapping[str, Callable[[pl.Series], Words]] = field(default_factory=dict)
    bag_separator: str = "|"
    padding: bool = False  # a missing value touches no row; otherwise it is a separate id
    note: str = ""  # for the user: columns that are probably used otherwise

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that become fields of a sample, in order."""
        return self.categorical + self.bags

    @property
    def keyable(self) -> tuple[str, ...]:
        """Categorical columns whose text is the value, without a rule that derives it."""
        return tuple(name for name in self.categorical if name not in self.derived)

    @property
    def used(self) -> tuple[str, ...]:
        """Every column that is read, without repetition."""
        single = [name for name in (self.label, self.time) if name is not None]
        return tuple(dict.fromkeys([*single, *self.dense, *self.fields]))


def check_uses(layout: ColumnSpec) -> None:
    """Refuse a layout without fields, or a column with two uses; a time may also be a field."""
    if not layout.fields:
        raise ValueError("no categorical column is given; use --categorical or --bag")
    label = () if layout.label is None else (layout.label,)
    uses = Counter([*label, *layout.dense, *layout.fields])
    repeated = [name for name, count in uses.items() if count > 1]
    if repeated:
        raise ValueError(
            f"column {repeated[0]!r} is given twice among label, dense, categorical, bag"
        )


def parsed(values: pl.Series) -> F64:
    """A column as numbers, NaN where a value is missing or is no number."""
    return numbers_of(values.to_frame()).to_series().fill_null(np.nan).to_numpy()


def numbers_of(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns as numbers, null where a value is missing or is no number."""
    # One expression for all columns: a call per column costs more than the conversion.
    numbers = frame.select(pl.all().cast(pl.Float64, strict=False))
    if numbers.null_count().equals(frame.null_count()):
        return numbers
    stripped = frame.with_columns(pl.col(pl.String).str.strip_chars())
    return stripped.select(pl.all().cast(pl.Float64, strict=False))


def is_missing(values: pl.Series) -> Bools:
    """Where a column is null or blank."""
    if values.dtype == pl.String:
        values = values.str.strip_chars().replace("", None)
    return values.is_null().to_numpy()


def times(values: pl.Series) -> Values:
    """Times to sort by: numbers unchanged, ISO dates in microseconds.

    A float64 holds microseconds exactly until the year 2255.
    """
    if values.dtype.is_temporal():
        numbers = parsed(values.cast(pl.Datetime("us"), strict=False).cast(pl.Int64))
    else:
        numbers = parsed(values)
    bad = ~np.isfinite(numbers)
    if bad.any() and values.dtype == pl.String:
        text = values.str.strip_chars().str.strip_suffix("Z")
        for pattern in _DATE_TIMES:
            if not np.isnan(numbers).any():
                break
            dates = text.str.to_datetime(pattern, strict=False, time_unit="us").cast(pl.Int64)
            numbers = np.where(np.isnan(numbers), parsed(dates), numbers)
        bad = ~np.isfinite(numbers)
    return Values(numbers, bad, "is neither a number nor a date like 2024-05-31 12:30:00")
