"""Proposed uses of a file's columns, from their names and the values of the first rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from embroute.data.readers.columns import ColumnSpec, binary, is_missing, numbers_of, times
from embroute.data.readers.files import is_parquet
from embroute.data.readers.parsing import ReadOptions, read_rows
from embroute.data.readers.records import Syntax

HEAD_ROWS, HEAD_BYTES = 20_000, 2**20
LABELS = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "converted")
TIMES = ("time", "timestamp", "ts", "date", "datetime", "event_time", "created_at")
QUANTITIES = ("price", "amount", "cost", "revenue", "age", "duration")
SEPARATORS = ("|", ";", ",")
JOINED_SHARE = 0.1  # of the values of a bag, at least, hold the separator
LEAST_ROWS = 100  # from which values that never repeat are no ids
Use = Literal["label", "time", "dense", "bag", "categorical", ""]


@dataclass(frozen=True)
class ColumnProposal:
    """A column, its proposed use (empty: none), and why."""

    name: str
    use: Use
    reason: str
    separator: str = ""  # of a bag in text


def first_rows(path: Path, names: Sequence[str], separator: str) -> pl.DataFrame:
    """Columns of the first rows of a file: text as text, parquet with its types."""
    if is_parquet(path):
        return pl.scan_parquet(path, glob=False).select(names).head(HEAD_ROWS).collect()
    # As bags, columns stay as they are: the text is not hashed.
    layout = ColumnSpec("table", (), bags=tuple(names), syntax=Syntax(separator))
    rows = next(read_rows(ReadOptions((path,), layout, block_bytes=HEAD_BYTES)), None)
    return pl.DataFrame(schema=list(names)) if rows is None else rows.frame


def propose(head: pl.DataFrame) -> list[ColumnProposal]:
    """A use for every column; at most one label, one time, and one separator of bags."""
    columns = [_propose(head[name]) for name in head.columns]
    columns = _keep_one(columns, "label", lambda column: not has_label_name(column))
    columns = _keep_one(columns, "time", lambda column: column.name.lower() not in TIMES)
    separators = Counter(c.separator for c in columns if c.separator).most_common(1)
    return [
        replace(c, use="", reason=f"{c.reason}, but another bag has another separator")
        if c.separator and c.separator != separators[0][0]
        else c
        for c in columns
    ]


def has_label_name(column: ColumnProposal) -> bool:
    """Whether labels often have this name."""
    return column.name.lower() in LABELS


def _keep_one(
    columns: Sequence[ColumnProposal], use: Use, unlikely: Callable[[ColumnProposal], bool]
) -> list[ColumnProposal]:
    """One column of a use: the first whose name tells it, else the only one."""
    users = sorted((c for c in columns if c.use == use), key=unlikely)
    if use == "label" and len(users) > 1 and unlikely(users[0]):
        users = []  # several columns of 0 and 1, and no name says which is the label
    spare: Use = "categorical" if use == "label" else ""
    why = "2 distinct" if use == "label" else "another time"
    return [
        replace(c, use=spare, reason=why) if c.use == use and c not in users[:1] else c
        for c in columns
    ]


def _propose(values: pl.Series) -> ColumnProposal:
    name = values.name
    if name != name.strip() or "," in name or not name:
        return ColumnProposal(name, "", "its name cannot stand in an option")
    if isinstance(values.dtype, pl.List):
        return ColumnProposal(name, "bag", "lists")
    if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Object):
        return ColumnProposal(name, "", f"holds {values.dtype}, which cannot be read")
    if values.dtype in (pl.Categorical, pl.Enum):
        values = values.cast(pl.String)
    present = values.filter(~pl.Series(is_missing(values)))
    if not len(present):
        return ColumnProposal(name, "", "no values")
    distinct = present.n_unique()
    if not binary(values).bad.any() and distinct == 2:
        return ColumnProposal(name, "label", "0 or 1")
    if _is_time(present):
        return ColumnProposal(name, "time", "times")
    numbers = numbers_of(present.to_frame()).to_series()
    if not numbers.null_count() and (name.lower() in QUANTITIES or (numbers % 1 != 0).any()):
        least, most = np.quantile(numbers, (0, 1))
        return ColumnProposal(name, "dense", f"numbers from {least:g} to {most:g}")
    separator = _separator(present)
    if separator:
        return ColumnProposal(name, "bag", f"several by {separator!r}", separator)
    if distinct == 1 or (distinct == len(values) >= LEAST_ROWS):
        why = "one value only" if distinct == 1 else "a value of its own in every row"
        return ColumnProposal(name, "", why)
    return ColumnProposal(name, "categorical", f"{distinct:,} distinct")


def _is_time(present: pl.Series) -> bool:
    """Dates, or numbers under the name of a time."""
    if present.dtype.is_temporal():
        return True
    is_number = not numbers_of(present.to_frame()).to_series().null_count()
    if is_number and present.name.lower() not in TIMES:
        return False
    return not times(present).bad.any()


def _separator(present: pl.Series) -> str:
    """The text between the ids of a bag; empty if values are single."""
    if present.dtype != pl.String:
        return ""
    for separator in SEPARATORS:
        joined = present.str.contains(separator, literal=True).sum()
        if joined >= JOINED_SHARE * len(present):
            return separator
    return ""


def named(columns: Sequence[ColumnProposal], use: str) -> list[str]:
    """The columns of a use."""
    return [column.name for column in columns if column.use == use]


def as_options(columns: Sequence[ColumnProposal]) -> dict[str, object]:
    """The proposal as data options, which differ from their defaults."""
    uses: dict[str, object] = {}
    for use in ("label", "time"):
        uses[use] = "".join(named(columns, use))  # one at most
    for use in ("categorical", "dense", "bag"):
        uses[use] = tuple(named(columns, use))
    uses["bag_separator"] = next((column.separator for column in columns if column.separator), "")
    return {name: value for name, value in uses.items() if value}


def words_for_bags(columns: Sequence[ColumnProposal]) -> str:
    """What to do about text that joins several ids; empty if there is none."""
    joined = [c for c in columns if c.separator]
    return "; ".join(
        f"column {c.name} holds {c.reason}, each text is one id; --bag {c.name} reads the ids"
        for c in joined
    )


def words_for_all(columns: Sequence[ColumnProposal], ids: Sequence[str]) -> str:
    """What `--categorical all` takes as ids, the columns it leaves out, and how to use them."""
    taken = f"--categorical all: ids are {', '.join(ids) or 'none'}"
    looks = {"label": "looks like the label", "time": "looks like the time"}
    others = [
        f"{column.name} {looks.get(column.use, f'holds {column.reason}')} (--{column.use} "
        f"{column.name})"
        for column in columns
    ]
    return taken + (f"; not ids: {', '.join(others)}" if others else "")
