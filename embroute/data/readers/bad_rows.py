"""Bad rows of a file: an error for the first bad row, or counts of bad rows by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from embroute.kernels.array_types import I64, Bools


def quoted(value: object) -> str:
    """A value as error messages quote it, shortened if long."""
    text = repr("" if value is None else str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(names: Sequence[str]) -> str:
    """Names of columns as error messages list them, at most the first 50."""
    more = f" and {len(names) - 50} more" if len(names) > 50 else ""
    return ", ".join(name if len(name) <= 60 else quoted(name) for name in names[:50]) + more


@dataclass
class BadRows:
    """The bad rows of one piece of a file: counts by reason, and the first bad row."""

    counts: Counter[str] = field(default_factory=Counter)
    first: tuple[int, str] | None = None  # number of the line or row, and the error message

    def add(self, number: int, reason: str, message: str, count: int = 1) -> None:
        """Count bad rows that share a reason; `number` and `message` describe the first row."""
        self.counts[reason] += count
        if self.first is None or number < self.first[0]:
            self.first = number, message


@dataclass(frozen=True)
class ParsedRows:
    """A piece of a file, parsed into columns but not yet read as labels, ids and numbers."""

    place: str  # the file, as error messages name it
    unit: str  # of `numbers`: "line" or "row"
    numbers: I64
    frame: pl.DataFrame
    bad: BadRows  # rows that the parser refused
    # Keys of categorical columns that were hashed while parsing; the frame leaves them out.
    keys: Mapping[str, I64] = field(default_factory=dict)


class RowChecker:
    """Separates the good rows of a piece from the bad rows, column by column."""

    def __init__(self, rows: ParsedRows) -> None:
        self.rows = rows
        self.good: Bools = np.ones(len(rows.numbers), np.bool_)

    def reject(self, bad: Bools, column: str, reason: str) -> None:
        """Mark rows as bad for their value in a column; a row counts for its first reason only."""
        new = np.flatnonzero(bad & self.good)
        if not len(new):
            return
        self.good[new] = False
        value = quoted(self.rows.frame[column][int(new[0])])
        message = f", column {column}: {value} {reason}"
        self.rows.bad.add(int(self.rows.numbers[new[0]]), f"{column} {reason}", message, len(new))

    def finish(self, skip: bool, counts: Counter[str]) -> None:
        """Add the bad rows to `counts`; without `skip` the first bad row is an error."""
        rows, bad = self.rows, self.rows.bad
        if bad.first is not None and not skip:
            number, message = bad.first
            raise ValueError(f"{rows.place}, {rows.unit} {number}{message}")
        counts.update(bad.counts)
