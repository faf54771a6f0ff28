"""The rows of files piece by piece, in bounded memory: text by blocks, parquet by slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from embroute.data.readers.bad_rows import BadRows, ParsedRows, listed, quoted
from embroute.data.readers.columns import ColumnSpec
from embroute.data.readers.files import Progress, is_parquet, open_bytes
from embroute.data.readers.keys import keys_of_cells
from embroute.data.readers.records import READ_BLOCK_BYTES, RecordBlock, Syntax, blocks, read_header
from embroute.kernels.array_types import I64

SLICE_ROWS = 65536
FRAME = Path("the frame")  # the name of a frame in errors


@dataclass(frozen=True)
class ReadOptions:
    """Files of one layout, and the sizes of the pieces that are read at once."""

    files: tuple[Path, ...]
    layout: ColumnSpec
    skip_bad_rows: bool = False
    block_bytes: int = READ_BLOCK_BYTES
    slice_rows: int = SLICE_ROWS
    frame: pl.DataFrame | None = None  # in place of files

    @property
    def first(self) -> Path:
        """The first file, for errors."""
        return FRAME if self.frame is not None else self.files[0]


def column_names(path: Path, separator: str) -> list[str]:
    """The columns of a parquet file or of a text file with a header."""
    if is_parquet(path):
        return _parquet_schema(path).names()
    with open_bytes(path) as stream:
        names = read_header(stream, separator)[0]
    _check_names(path, names)
    return names


def read_rows(reading: ReadOptions, progress: Progress | None = None) -> Iterator[ParsedRows]:
    """All rows of all files, in order."""
    if reading.frame is not None:
        for rows, share in _table_rows(FRAME, reading.frame.lazy(), reading):
            yield rows
            if progress is not None:
                progress("reading", share)
    total = sum(path.stat().st_size for path in reading.files) or 1
    before = 0
    for path in reading.files:
        pieces = _parquet_rows if is_parquet(path) else _text_rows
        for rows, position in pieces(path, reading):
            yield rows
            if progress is not None:
                progress("reading", min(1.0, (before + position) / total))
        before += path.stat().st_size


def _text_rows(path: Path, reading: ReadOptions) -> Iterator[tuple[ParsedRows, int]]:
    """Pieces of a text file, each with the number of bytes read so far."""
    layout = reading.layout
    with open_bytes(path) as stream:
        names, start = list(layout.columns), (b"", 1)
        if layout.header:
            header, rest = read_header(stream, layout.syntax.separator)
            names, start = names or header, (rest, 2)
        _check_columns(path, names, layout)
        empty = not layout.header
        text = blocks(stream, layout.syntax, len(names), start, reading.block_bytes)
        for block in text:
            empty = False
            yield _parse(path, block, names, layout), stream.position
        if empty:
            raise ValueError(f"{path}: the file is empty")


def _parse(path: Path, block: RecordBlock, names: list[str], layout: ColumnSpec) -> ParsedRows:
    """The columns in use as text; without quotation marks, categories are hashed at once."""
    keys = {}
    if layout.keyable and not (layout.syntax.quoted and b'"' in block.data):
        keys = _keys(block, names, layout)
    parsed = [name for name in layout.used if name not in keys or name == layout.time]
    frame = pl.DataFrame(schema=dict.fromkeys(parsed, pl.String))
    if block.data and parsed:
        lines = f"lines {block.lines[0]} to {block.lines[-1]}"  # for error messages
        try:
            frame = _frame(block, names, parsed, layout.syntax)
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"{path}, {lines}: cannot be parsed: {error}") from None
        if frame.height != len(block.lines):
            raise ValueError(f"{path}, {lines}: {frame.height} rows in {len(block.lines)} records")
    return ParsedRows(str(path), "line", block.lines, frame, block.bad, keys)


def _frame(block: RecordBlock, names: list[str], parsed: list[str], syntax: Syntax) -> pl.DataFrame:
    """The named columns as text."""
    return pl.read_csv(
        block.data,
        has_header=False,
        schema=dict.fromkeys(names, pl.String),
        columns=sorted(names.index(name) for name in parsed),
        separator=syntax.mark,
        quote_char='"' if syntax.quoted else None,
    )


def _keys(block: RecordBlock, names: list[str], layout: ColumnSpec) -> dict[str, I64]:
    """Keys of the categorical columns, hashed directly from the text."""
    fields = {name: field for field, name in enumerate(layout.keyable)}
    field_of_column = np.array([fields.get(name, -1) for name in names])
    cells = block.data, layout.syntax.mark
    keys_SF = keys_of_cells(*cells, field_of_column, layout.padding, len(block.lines))
    return {name: keys_SF[:, field] for name, field in fields.items()}


def _parquet_rows(path: Path, reading: ReadOptions) -> Iterator[tuple[ParsedRows, int]]:
    """Slices of a parquet file, each with the number of bytes read so far."""
    _parquet_schema(path)
    try:
        for rows, share in _table_rows(path, pl.scan_parquet(path, glob=False), reading):
            yield rows, int(path.stat().st_size * share)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from None


def _table_rows(
    path: Path, table: pl.LazyFrame, reading: ReadOptions
) -> Iterator[tuple[ParsedRows, float]]:
    """Slices of a table, each with the share of it read so far."""
    schema = table.collect_schema()
    _check_columns(path, schema.names(), reading.layout)
    _check_types(path, schema, reading.layout)
    used = table.select(reading.layout.used)
    total = int(used.select(pl.len()).collect().item())
    for start in range(0, total, reading.slice_rows):
        frame = used.slice(start, reading.slice_rows).collect()
        stop = start + frame.height
        numbers = np.arange(start + 1, stop + 1)
        yield ParsedRows(str(path), "row", numbers, frame, BadRows()), stop / total


def _parquet_schema(path: Path) -> pl.Schema:
    try:
        return pl.scan_parquet(path, glob=False).collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from None


def _check_columns(path: Path, names: list[str], layout: ColumnSpec) -> None:
    """Refuse missing columns and repeated names."""
    for name in layout.used:
        if name not in names:
            raise ValueError(f"{path}: no column {quoted(name)}; the columns are {listed(names)}")
    _check_names(path, names)


def _check_names(path: Path, names: list[str]) -> None:
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path}: the header names column {quoted(repeated)} twice")


def _check_types(path: Path, schema: pl.Schema, layout: ColumnSpec) -> None:
    """Refuse parquet columns of a type other than text, numbers, booleans, times, or bags."""
    for name in layout.used:
        kind = schema[name]
        is_bag = isinstance(kind, pl.List) and name in layout.bags
        if isinstance(kind, pl.List) and not is_bag:
            raise ValueError(
                f"{path}: column {name} holds lists: give it with --bag {name}, not as a single id"
            )
        if (kind.is_nested() and not is_bag) or kind in (pl.Binary, pl.Object):
            raise ValueError(f"{path}: column {name} holds {kind}, which cannot be read")
