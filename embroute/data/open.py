"""Open a source of samples by one line of text: the name of built-in data, or a path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import polars as pl

from embroute.config.data_options import DataOptions
from embroute.config.option_model import option_name
from embroute.config.spec import CallSpec, did_you_mean, parse_call, shown
from embroute.data.batch import Source
from embroute.data.online_retail import open_retail
from embroute.data.proposal import (
    HEAD_ROWS,
    ColumnProposal,
    first_rows,
    has_label_name,
    propose,
    words_for_all,
    words_for_bags,
)
from embroute.data.readers import formats
from embroute.data.readers.columns import ColumnSpec
from embroute.data.readers.file_source import Numbering, open_files
from embroute.data.readers.files import Progress, find_files
from embroute.data.readers.formats import ALL, ColumnUses, FileHead
from embroute.data.readers.parsing import FRAME, ReadOptions, column_names
from embroute.data.stream import SourceSpan
from embroute.data.synthetic.communities import GRAPH, open_graph
from embroute.data.synthetic.generator import LOG_PRESETS, open_preset

RETAIL = "online-retail"


def uses_of(options: DataOptions) -> ColumnUses:
    """The columns named for a table file."""
    return ColumnUses(options.label, options.categorical, options.dense, options.bag, options.time)


def built_in_names() -> tuple[str, ...]:
    """Names of the data that needs no file."""
    return (RETAIL, GRAPH, *LOG_PRESETS)


def open_source(
    text: str, options: DataOptions | None = None, progress: Progress | None = None
) -> Source:
    """The built-in data or the files that `text` names."""
    options = options or DataOptions()
    data = _look_up(text, options)
    if not isinstance(data, ReadOptions):
        return data
    return open_files(data, Numbering(options.hash_rows, options.limit), progress)


def open_frame(
    frame: pl.DataFrame, options: DataOptions | None = None, progress: Progress | None = None
) -> Source:
    """The rows of a data frame as samples."""
    options = options or DataOptions()
    if options.format not in (None, "table"):
        raise ValueError(f"--format {options.format}: a frame has columns of its own")
    layout = _table(FRAME, frame.columns, ",", options, lambda names: frame[names].head(HEAD_ROWS))
    reading = ReadOptions((), _completed(layout, options), options.skip_bad_rows, frame=frame)
    return open_files(reading, Numbering(options.hash_rows, options.limit), progress)


def proposed_uses(text: str, options: DataOptions) -> list[ColumnProposal]:
    """Proposed uses of the columns of a file that no option describes; empty for other data."""
    if (
        options.format
        or uses_of(options) != ColumnUses()
        or text.partition("(")[0] in built_in_names()
    ):
        return []
    try:
        head = formats.read_head(find_files(text)[0])
    except ValueError:
        return []  # opening the data says why
    if formats.detect(head) is not None:
        return []
    names = column_names(head.path, head.separator)
    return propose(first_rows(head.path, names, head.separator))


def check_data(option: str, text: str, options: DataOptions) -> str:
    """Refuse data that `open_source` would refuse before reading; returns a note for the user."""
    with naming(option, text):
        data = _look_up(text, options)
    return data.layout.note if isinstance(data, ReadOptions) else ""


@contextmanager
def naming(option: str, text: str) -> Iterator[None]:
    """Let errors name the data, and the option that named it."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        if text.strip() and message.startswith(text):
            message = f"{option} {message}"
        elif text.partition("(")[0].strip() in built_in_names() and not message.startswith("--"):
            message = f"{option} {text}: {message}"
        raise ValueError(message) from None


def _look_up(text: str, options: DataOptions) -> Source | ReadOptions:
    """Built-in data, or files and their columns."""
    name = text.partition("(")[0].strip()
    if not name:
        raise ValueError(f"--data must be a name or a path, got {shown(text)}")
    if name in built_in_names():
        return _open_built_in(text, options)
    try:
        files = find_files(text)
    except ValueError as error:
        known, hint = ", ".join(built_in_names()), did_you_mean(name, built_in_names())
        raise ValueError(f"{error}, and no built-in data has this name ({known}){hint}") from None
    return _reading(files, options)


def _open_built_in(text: str, options: DataOptions) -> Source:
    """Built-in data; options that describe files are refused."""
    others = options.replace(limit=None).changed()
    if others:
        names = ", ".join(option_name(name) for name in others)
        raise ValueError(
            f"{names}: {text} is built-in data: of the data options it takes only --limit"
        )
    call = parse_call(text)
    known: dict[str, Callable[[CallSpec], Source]] = {RETAIL: open_retail, GRAPH: open_graph}
    source = known.get(call.name, open_preset)(call)
    total = source.num_samples
    if options.limit is None or total is None:
        return source
    return SourceSpan(source, 0, min(options.limit, total))


def _reading(files: tuple[Path, ...], options: DataOptions) -> ReadOptions:
    """The files with the layout of their format."""
    layout = _completed(_layout(formats.read_head(files[0]), options), options)
    return ReadOptions(files, layout, options.skip_bad_rows)


def _completed(layout: ColumnSpec, options: DataOptions) -> ColumnSpec:
    """A layout with the options that hold for every format."""
    padding = options.missing == "padding"
    return replace(layout, bag_separator=options.bag_separator, padding=padding)


def _table(
    path: Path,
    names: Sequence[str],
    separator: str,
    options: DataOptions,
    first: Callable[[list[str]], pl.DataFrame],
) -> ColumnSpec:
    """The layout of a table; a look at its first rows finds columns that are no single ids."""
    uses = uses_of(options)
    layout = formats.table_columns(path, names, separator, uses)
    columns = propose(first(list(layout.categorical)))
    if ALL not in uses.categorical:
        return replace(layout, note=words_for_bags(columns))
    known = set(uses.categorical)  # and 0 or 1 is a label only by its name
    known |= {c.name for c in columns if c.use == "label" and (uses.label or not has_label_name(c))}
    columns = [c for c in columns if c.use not in ("categorical", "") and c.name not in known]
    others = frozenset(column.name for column in columns)
    layout = formats.table_columns(path, names, separator, replace(uses, no_ids=others))
    return replace(layout, note=words_for_all(columns, layout.categorical))


def _layout(head: FileHead, options: DataOptions) -> ColumnSpec:
    """The layout of the format that --format names, or of the detected format."""
    uses = uses_of(options)
    named = bool(uses.label or uses.categorical or uses.dense or uses.bag)
    kind = options.format or ("table" if named else formats.detect(head))
    if kind is None:
        raise formats.unknown_format(head)
    if kind == "table":
        path, separator = head.path, head.separator
        names = column_names(path, separator)
        return _table(
            path, names, separator, options, lambda names: first_rows(path, names, separator)
        )
    if named:
        raise ValueError(
            f"--label, --categorical, --dense and --bag describe a table; {kind} files have "
            "fixed columns"
        )
    if kind == "movielens":
        layout = formats.movielens("::" not in head.first_line, options.positive_rating)
    else:
        layout = formats.criteo() if kind == "criteo" else formats.avazu()
    return replace(layout, time=options.time)
