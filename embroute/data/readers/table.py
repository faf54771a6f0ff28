"""Any CSV or parquet file: the user says which column is what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embroute.data.readers.faults import listed, shown
from embroute.data.readers.layout import Layout, check_uses
from embroute.data.readers.records import Syntax

ALL = "all"  # as a list of columns: every column that has no other use


@dataclass(frozen=True)
class ColumnUses:
    """The columns a user names, by use."""

    label: str | None = None
    categorical: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    bag: tuple[str, ...] = ()
    time: str | None = None


def table(path: Path, names: Sequence[str], separator: str, uses: ColumnUses) -> Layout:
    """The layout of a file whose columns are `names`."""
    single = [(use, name) for use, name in (("label", uses.label), ("time", uses.time)) if name]
    lists = [("categorical", uses.categorical), ("dense", uses.dense), ("bag", uses.bag)]
    named = single + [(use, name) for use, columns in lists for name in columns if name != ALL]
    for use, name in named:
        if name not in names:
            known = listed(names)
            raise ValueError(
                f"--{use}: {path} has no column {shown(name)}; the columns are {known}"
            )
    taken = {name for _, name in named}
    spare = tuple(name for name in names if name not in taken)
    layout = Layout(
        "table",
        categorical=_filled(uses.categorical, spare),
        bags=uses.bag,
        label=uses.label,
        dense=_filled(uses.dense, spare),
        time=uses.time,
        syntax=Syntax(separator),
    )
    check_uses(layout)
    return layout


def _filled(columns: tuple[str, ...], spare: tuple[str, ...]) -> tuple[str, ...]:
    """A list of columns with `all` written out."""
    return tuple(name for column in columns for name in (spare if column == ALL else (column,)))
