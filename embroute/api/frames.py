"""Data for the simulator: a name, a path, a data frame, or columns of arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from embroute.config.data_options import DataOptions
from embroute.config.option_model import as_python
from embroute.config.progress import progress_bar
from embroute.config.run_options import DEFAULT_DATA
from embroute.config.spec import shown
from embroute.data.batch import Source
from embroute.data.open import open_frame, open_source


@dataclass(frozen=True)
class Dataset:
    """Samples that policies can be priced on, and how their data is named."""

    name: str
    source: Source
    options: DataOptions = field(default_factory=DataOptions)  # how it was read

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return self.source.schema.num_rows

    @property
    def num_samples(self) -> int | None:
        """Samples of a pass; None if unknown."""
        return self.source.num_samples

    def __repr__(self) -> str:
        tables = len(self.source.schema.tables)
        return f"Dataset({self.name!r}: {tables} tables, {self.num_rows:,} rows)"


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Errors name arguments as Python has them: `batch=`, not `--batch`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(as_python(str(error))) from None


def open_data(data: object = DEFAULT_DATA, **options: Any) -> Dataset:
    """Open built-in data by name, files by path, or a frame of polars, pandas or pyarrow.

    `options` are those of the command line: `label="click"`, `categorical=["user", "item"]`,
    `time="ts"`, `limit=100_000`. A mapping of column names to arrays is a frame, too.
    """
    if isinstance(data, Dataset):
        return data
    with naming_arguments(), progress_bar("opening", 1.0, counted=False) as update:

        def report(activity: str, share: float) -> None:
            update(description=activity, completed=share)

        read_as = DataOptions(**options)
        if isinstance(data, str | os.PathLike):
            name = os.fspath(data)
            return Dataset(name, open_source(name, read_as, report), read_as)
        return Dataset("frame", open_frame(frame_of(data), read_as, report), read_as)


def frame_of(data: object) -> pl.DataFrame:
    """A polars frame of whatever holds columns."""
    if isinstance(data, pl.DataFrame):
        return data
    if isinstance(data, pl.LazyFrame):
        return data.collect()
    if isinstance(data, Mapping):
        return pl.DataFrame({str(name): _values(data[name]) for name in data})
    if type(data).__module__.partition(".")[0] == "pandas":
        columns: Sequence[str] = data.columns  # type: ignore[attr-defined]
        cells = {str(name): data[name].to_list() for name in columns}  # type: ignore[index]
        return pl.DataFrame(cells)
    if hasattr(data, "__arrow_c_stream__"):
        return pl.DataFrame(data)
    raise TypeError(
        f"data must be a name, a path, a frame of polars, pandas or pyarrow, or a mapping of "
        f"columns, got {shown(data)}"
    )


def _values(column: object) -> object:
    """A column as polars takes it; tensors become arrays."""
    return column.numpy() if hasattr(column, "numpy") else column
