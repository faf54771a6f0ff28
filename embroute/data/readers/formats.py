"""The formats of files: columns of known logs (Criteo, Avazu, MovieLens), tables, detection."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl

from embroute.config.data_options import Format
from embroute.config.spec import did_you_mean
from embroute.data.readers.bad_rows import listed, quoted
from embroute.data.readers.columns import ColumnSpec, Words, check_uses, label_at_least
from embroute.data.readers.files import is_parquet, open_bytes
from embroute.data.readers.records import Syntax, check_line
from embroute.kernels.array_types import F64

FORMATS: tuple[str, ...] = get_args(Format)
_SEPARATORS = (",", "\t", ";", "|")

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
CRITEO_COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)


def log_count(numbers: F64) -> F64:
    """log(1 + x), the usual scaling of Criteo's counts; the few negative counts become 0."""
    return np.log1p(np.maximum(numbers, 0.0))


def criteo() -> ColumnSpec:
    """Criteo Kaggle and Terabyte files, plain or gzip.

    A missing integer becomes 0, and a missing category becomes a separate category.
    """
    return ColumnSpec(
        "criteo",
        categorical=CRITEO_CATEGORICAL,
        label="label",
        dense=CRITEO_DENSE,
        columns=CRITEO_COLUMNS,
        header=False,
        syntax=Syntax("\t", quoted=False),
        scale=log_count,
    )


AVAZU_CATEGORICAL = (
    "hour",
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    *(f"C{i}" for i in range(14, 22)),
)


def hour_of_day(values: pl.Series) -> Words:
    """The hour, 00 to 23, of an Avazu time YYMMDDHH."""
    text = values.cast(pl.String).fill_null("")
    bad = ~text.str.contains(r"^\d{6}([01]\d|2[0-3])$").to_numpy()
    return Words(text.str.slice(6, 2), bad, "is not an hour written YYMMDDHH")


def avazu() -> ColumnSpec:
    """The Kaggle training file.

    Every column is a field, except `id` (unique per row) and the label `click`. The field `hour`
    keeps only the hour of the day, since the date of a test row never occurs in training.
    """
    return ColumnSpec(
        "avazu", categorical=AVAZU_CATEGORICAL, label="click", derived={"hour": hour_of_day}
    )


MOVIELENS_COLUMNS = ("user", "item", "rating", "timestamp")
MOVIELENS_HEADER = ("userId", "movieId", "rating", "timestamp")


def movielens(header: bool, positive_rating: float = 4.0) -> ColumnSpec:
    """Fields user and item; the label is 1 for a rating of at least `positive_rating`."""
    return ColumnSpec(
        "movielens",
        categorical=("user", "item"),
        label="rating",
        columns=MOVIELENS_COLUMNS,
        header=header,
        syntax=Syntax(",") if header else Syntax("::", quoted=False),
        read_label=label_at_least(positive_rating),
    )


ALL = "all"  # in a list of columns: every column without another use


@dataclass(frozen=True)
class ColumnUses:
    """The columns that a user names, by use."""

    label: str | None = None
    categorical: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    bag: tuple[str, ...] = ()
    time: str | None = None
    no_ids: frozenset[str] = frozenset()


def table_columns(path: Path, names: Sequence[str], separator: str, uses: ColumnUses) -> ColumnSpec:
    """The layout of a file whose columns are `names`; `all` takes no column in `uses.no_ids`."""
    single = [(use, name) for use, name in (("label", uses.label), ("time", uses.time)) if name]
    lists = [("categorical", uses.categorical), ("dense", uses.dense), ("bag", uses.bag)]
    named = single + [(use, name) for use, columns in lists for name in columns if name != ALL]
    for use, name in named:
        if name not in names:
            known = listed(names) + did_you_mean(name, names)
            raise ValueError(
                f"--{use}: {path} has no column {quoted(name)}; the columns are {known}"
            )
    taken = {name for _, name in named}
    spare = tuple(name for name in names if name not in taken)
    layout = ColumnSpec(
        "table",
        categorical=_filled(uses.categorical, [name for name in spare if name not in uses.no_ids]),
        bags=uses.bag,
        label=uses.label,
        dense=_filled(uses.dense, spare),
        time=uses.time,
        syntax=Syntax(separator),
    )
    check_uses(layout)
    return layout


def _filled(columns: Sequence[str], spare: Sequence[str]) -> tuple[str, ...]:
    """A list of columns, with the spare columns in place of `all`."""
    return tuple(name for column in columns for name in (spare if column == ALL else (column,)))


@dataclass(frozen=True)
class FileHead:
    """The first line of a file, and whether the file is parquet."""

    path: Path
    first_line: str  # empty for parquet
    parquet: bool

    @property
    def separator(self) -> str:
        """The most frequent separator of the first line."""
        return max(_SEPARATORS, key=self.first_line.count)

    @property
    def words(self) -> list[str]:
        """The values of the first line, without quotation marks."""
        return [word.strip(' "') for word in self.first_line.split(self.separator)]


def read_head(path: Path) -> FileHead:
    """Read the first line of a file."""
    if is_parquet(path):
        return FileHead(path, "", True)
    with open_bytes(path) as stream:
        text = stream.read(2**16)
    line = text.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    check_line(path, line)
    return FileHead(path, line.decode(errors="replace").rstrip("\r"), False)


def detect(head: FileHead) -> str | None:
    """The format of a known log, or None if the file looks like no known log."""
    if head.first_line.count("\t") == len(CRITEO_COLUMNS) - 1:
        return "criteo"
    if set(AVAZU_CATEGORICAL) <= set(head.words):
        return "avazu"
    if head.words == list(MOVIELENS_HEADER) or head.first_line.count("::") == 3:
        return "movielens"
    return None


def unknown_format(head: FileHead) -> ValueError:
    """The error for a file of an unknown format."""
    content = "is parquet" if head.parquet else f"begins with {quoted(head.first_line)}"
    return ValueError(
        f"{head.path} {content}, which is neither Criteo (40 columns by tabs), Avazu nor "
        "MovieLens; give --categorical COLUMNS (or `all`), and --label, --dense, --bag, --time "
        f"where they apply, or --format {'|'.join(FORMATS)}; embroute data describe "
        f"{shlex.quote(str(head.path))} proposes them"
    )
