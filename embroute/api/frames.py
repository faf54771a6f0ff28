"""Data for the simulator: a name, a path, a data frame, or columns of arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TypeVar

import polars as pl

from embroute.config.progress import progress_bar
from embroute.config.spec import did_you_mean, shown
from embroute.data.batch import Source
from embroute.data.open import DataOptions, open_frame, open_source

# An option in a message, and the blank between it and its value.
OPTION = re.compile(r"--([a-z][a-z-]*)(?: (?!(?:must|is|are|has|needs|and|or|takes|N)\b))?")
Options = TypeVar("Options")


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
        message = OPTION.sub(lambda match: match[1].replace("-", "_") + "=", str(error))
        raise ValueError(message) from None


def checked_options(kind: Callable[..., Options], values: Mapping[str, object]) -> Options:
    """A dataclass of options; an unknown name is refused with the nearest known one."""
    known = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            hint = did_you_mean(name, known)
            raise TypeError(f"no option {name!r}{hint} (there are {', '.join(known)})")
    lists = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return kind(**lists)


def open_data(data: object = "online-retail", **options: object) -> Dataset:
    """Open built-in data by name, files by path, or a frame of polars, pandas or pyarrow.

    `options` are those of the command line: `label="click"`, `categorical=["user", "item"]`,
    `time="ts"`, `limit=100_000`. A mapping of column names to arrays is a frame, too.
    """
    if isinstance(data, Dataset):
        return data
    with naming_arguments(), progress_bar("opening", 1.0, counted=False) as update:

        def report(activity: str, share: float) -> None:
            update(description=activity, completed=share)

        read_as = checked_options(DataOptions, options)
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
        return pl.DataFrame({str(name): list_of_values(data[name]) for name in data})
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


def list_of_values(column: object) -> object:
    """A column as polars takes it; tensors become arrays."""
    return column.numpy() if hasattr(column, "numpy") else column
