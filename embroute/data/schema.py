"""The schema of a data set: its embedding tables, its categorical fields, its dense columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from embroute.kernels.array_types import I64


@dataclass(frozen=True)
class Table:
    """One embedding table; its rows are numbered from 0."""

    name: str
    num_rows: int


@dataclass(frozen=True)
class Field:
    """A categorical column: its table, and whether a sample holds a bag of ids."""

    name: str
    table: int
    bag: bool = False
    longest_bag: int | None = None  # ids of a sample at most; None: unknown


@dataclass(frozen=True)
class Schema:
    """Tables, fields and dense columns. Row ids are global: table offset plus id in the table."""

    tables: tuple[Table, ...]
    fields: tuple[Field, ...]
    dense: tuple[str, ...] = ()
    labelled: bool = False

    @cached_property
    def first_rows(self) -> I64:
        """First global row id of each table, and the number of rows of all tables at the end."""
        sizes = np.array([0, *(table.num_rows for table in self.tables)], np.int64)
        return np.cumsum(sizes)

    @property
    def num_rows(self) -> int:
        """Rows of all tables together."""
        return int(self.first_rows[-1])

    @property
    def num_fields(self) -> int:
        """Categorical fields of a sample."""
        return len(self.fields)

    @property
    def has_bags(self) -> bool:
        """Whether a field may hold another number of ids than one."""
        return any(field.bag for field in self.fields)
