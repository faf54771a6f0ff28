"""Bad rows of a file: the first one as an error, or all of them counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from embroute.kernels.array_types import I64, Bools


def quoted(value: object) -> str:
    """A value as errors quote it, cut where it is long."""
    text = repr("" if value is None else str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(names: Sequence[str]) -> str:
    """Names of columns as errors list them, the first ones of many."""
    more = f" and {len(names) - 50} more" if len(names) > 50 else ""
    return ", ".join(name if len(name) <= 60 else quoted(name) for name in names[:50]) + more


@dataclass
class BadRows:
    """The bad rows of one piece of a file: how many by reason, and which comes first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: tuple[int, str] | None = None  # number of the line or row, and what is wrong there

    def add(self, number: int, reason: str, message: str, count: int = 1) -> None:
        """Count bad rows that share a reason; `number` and `message` tell of the first of them."""
        self.counts[reason] += count
        if self.first is None or number < self.first[0]:
            self.first = number, message


@dataclass(frozen=True)
class ParsedRows:
    """A piece of a file, parsed into columns but not yet read as labels, ids and numbers."""

    place: str  # the file, as errors name it
    unit: str  # what the numbers count in it: "line" or "row"
    numbers: I64
    frame: pl.DataFrame
    bad: BadRows  # rows that could not be parsed at all
    keys: Mapping[str, I64] = field(default_factory=dict)
    """Keys of the categorical columns that were hashed while parsing and are not in the frame."""


@dataclass
class Sieve:
    """Sorts the rows of a piece into good and bad while its columns are read one by one."""

    rows: ParsedRows
    good: Bools

    def reject(self, bad: Bools, column: str, reason: str) -> None:
        """Mark rows as bad for a value of one column; a row is counted for one reason only."""
        new = np.flatnonzero(bad & self.good)
        if not len(new):
            return
        self.good[new] = False
        value = quoted(self.rows.frame[column][int(new[0])])
        message = f", column {column}: {value} {reason}"
        self.rows.bad.add(int(self.rows.numbers[new[0]]), f"{column} {reason}", message, len(new))

    def settle(self, skip: bool, counts: Counter[str]) -> None:
        """Add the bad rows to `counts`; without `skip` the first one is an error."""
        rows, bad = self.rows, self.rows.bad
        if bad.first is not None and not skip:
            number, message = bad.first
            raise ValueError(f"{rows.place}, {rows.unit} {number}{message}")
        counts.update(bad.counts)


def sieve(rows: ParsedRows) -> Sieve:
    """A sieve that no row has gone through yet."""
    return Sieve(rows, np.ones(len(rows.numbers), np.bool_))
