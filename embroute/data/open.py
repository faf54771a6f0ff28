"""A source of samples from one line of text: the name of built-in data, or a path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from embroute.config.spec import LIMITS, parse_call, shown
from embroute.data.batch import Batch, Source
from embroute.data.online_retail import open_retail
from embroute.data.readers.columns import ColumnSpec
from embroute.data.readers.detect import FORMATS, FileHead, detect, read_head, unknown_format
from embroute.data.readers.file_source import Numbering, open_files
from embroute.data.readers.files import Progress, find_files
from embroute.data.readers.formats import ColumnUses, avazu, criteo, movielens, table_columns
from embroute.data.readers.parsing import ReadOptions, column_names
from embroute.data.schema import Schema
from embroute.data.synthetic.generator import LOG_PRESETS, open_preset

RETAIL = "online-retail"


@dataclass(frozen=True)
class DataOptions:
    """How files are read; the defaults are those of the command line."""

    format: str | None = None  # one of FORMATS; None detects it
    label: str | None = None
    categorical: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    bag: tuple[str, ...] = ()
    bag_separator: str = "|"
    time: str | None = None
    ids: str = "vocab"  # or "hash"
    hash_rows: int | None = None
    missing: str = "id"  # or "padding"
    positive_rating: float = 4.0
    skip_bad_rows: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            _check(entry.name, getattr(self, entry.name))
        if (self.ids == "hash") != (self.hash_rows is not None):
            given = f"--ids {self.ids} and --hash-rows {self.hash_rows}"
            raise ValueError(
                f"--ids hash and --hash-rows N are given together or not at all, got {given}"
            )

    def changed(self) -> dict[str, object]:
        """What differs from the defaults, by name, as a run file keeps it."""
        given = {entry.name: (getattr(self, entry.name), entry.default) for entry in fields(self)}
        return {name: value for name, (value, default) in given.items() if value != default}

    @property
    def uses(self) -> ColumnUses:
        """The columns named for a table file."""
        return ColumnUses(self.label, self.categorical, self.dense, self.bag, self.time)


def built_in_names() -> tuple[str, ...]:
    """Names of data that needs no file."""
    return (RETAIL, *LOG_PRESETS)


def open_source(
    text: str, options: DataOptions | None = None, progress: Progress | None = None
) -> Source:
    """The built-in data or the files that `text` names."""
    options = options or DataOptions()
    found = _look_up(text, options)
    if not isinstance(found, ReadOptions):
        return found
    return open_files(found, _numbering(options), progress)


def check_data(option: str, text: str, options: DataOptions) -> None:
    """Refuse what `open_source` refuses before it reads samples; names the option."""
    with naming(option, text):
        _look_up(text, options)


@contextmanager
def naming(option: str, text: str) -> Iterator[None]:
    """Let errors about data name the option that asked for it, and the data."""
    try:
        yield
    except ValueError as error:
        fault = str(error)
        if text.strip() and fault.startswith(text):
            fault = f"{option} {fault}"
        elif text.partition("(")[0].strip() in built_in_names() and not fault.startswith("--"):
            fault = f"{option} {text}: {fault}"
        raise ValueError(fault) from None


def _look_up(text: str, options: DataOptions) -> Source | ReadOptions:
    """Built-in data, or files and what their columns are."""
    name = text.partition("(")[0].strip()
    if not name:
        raise ValueError(f"--data must be a name or a path, got {shown(text)}")
    if name in built_in_names():
        return _open_built_in(text, options)
    try:
        files = find_files(text)
    except ValueError as error:
        known = ", ".join(built_in_names())
        raise ValueError(f"{error}, and no built-in data has this name ({known})") from None
    return _reading(files, options)


_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "format": (None, *FORMATS),
    "ids": ("vocab", "hash"),
    "missing": ("id", "padding"),
}
_LISTS = ("categorical", "dense", "bag")
_TEXTS = ("label", "time", "bag_separator")


def _check(name: str, value: object) -> None:
    """Refuse a value that a data option does not take."""
    option, missing = option_name(name), value is None and name != "bag_separator"
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            known = ", ".join(choice for choice in _CHOICES[name] if choice)
            raise ValueError(f"{option} must be one of {known}, got {shown(value)}")
    elif name in _LISTS:
        if not isinstance(value, tuple) or not all(isinstance(v, str) and v for v in value):
            raise ValueError(f"{option} must be names of columns, got {shown(value)}")
    elif name in _TEXTS:
        if not missing and not (isinstance(value, str) and value):
            raise ValueError(f"{option} must be a text that is not empty, got {shown(value)}")
    elif name in LIMITS:
        if not missing or name == "positive_rating":
            LIMITS[name].check(option, value)
    elif not isinstance(value, bool):
        raise ValueError(f"{option} must be true or false, got {shown(value)}")


def option_name(name: str) -> str:
    """The command line's name of a key."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class _FirstSamples:
    """The first samples of another source."""

    source: Source
    limit: int

    @property
    def schema(self) -> Schema:
        """Tables, fields and dense columns of the whole source."""
        return self.source.schema

    @property
    def num_samples(self) -> int | None:
        """Samples in one pass."""
        whole = self.source.num_samples
        return None if whole is None else min(whole, self.limit)

    def chunks(self) -> Iterator[Batch]:
        """One pass in order."""
        left = self.limit
        for chunk in self.source.chunks():
            yield chunk.slice(0, left)
            left -= len(chunk)
            if left <= 0:
                return


def _open_built_in(text: str, options: DataOptions) -> Source:
    """Built-in data; options that describe files are refused."""
    others = replace(options, limit=None).changed()
    if others:
        given = ", ".join(option_name(name) for name in others)
        raise ValueError(
            f"{given}: {text} is built-in data: of the data options it takes only --limit"
        )
    call = parse_call(text)
    source = open_retail(call) if call.name == RETAIL else open_preset(call)
    return source if options.limit is None else _FirstSamples(source, options.limit)


def _numbering(options: DataOptions) -> Numbering:
    return Numbering(options.hash_rows, options.limit)


def _reading(files: tuple[Path, ...], options: DataOptions) -> ReadOptions:
    """The files with the layout of their format."""
    layout = replace(
        _layout(read_head(files[0]), options),
        bag_separator=options.bag_separator,
        padding=options.missing == "padding",
    )
    return ReadOptions(files, layout, options.skip_bad_rows)


def _layout(look: FileHead, options: DataOptions) -> ColumnSpec:
    """The layout of the format that is asked for, or else detected."""
    uses = options.uses
    named = bool(uses.label or uses.categorical or uses.dense or uses.bag)
    kind = options.format or ("table" if named else detect(look))
    if kind is None:
        raise unknown_format(look)
    if kind == "table":
        names = column_names(look.path, look.separator)
        return table_columns(look.path, names, look.separator, uses)
    if named:
        raise ValueError(
            f"--label, --categorical, --dense and --bag describe a table; {kind} files have "
            "fixed columns"
        )
    if kind == "movielens":
        layout = movielens("::" not in look.first_line, options.positive_rating)
    else:
        layout = criteo() if kind == "criteo" else avazu()
    return replace(layout, time=options.time)
