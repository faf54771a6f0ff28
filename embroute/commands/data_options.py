"""The options that say how data files are read, shared by every command that takes data."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import click

from embroute.data.open import DataOptions
from embroute.data.readers.detect import FORMATS

_P = ParamSpec("_P")
_R = TypeVar("_R")
_DATA_NAMES = tuple(DataOptions.__dataclass_fields__)


def _columns(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    """A comma-separated list of columns."""
    names = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    if not all(names):
        raise click.BadParameter(f"{text!r} has an empty name; give columns such as a,b")
    return names


_DATA_OPTIONS = (
    click.option("--format", type=click.Choice(FORMATS), help="Format of the files [detected]."),
    click.option("--label", metavar="COLUMN", help="Column of 0 and 1; may be left out."),
    click.option(
        "--categorical",
        metavar="COLUMNS",
        callback=_columns,
        help="Columns of ids, separated by commas; `all`: every column without another use.",
    ),
    click.option(
        "--dense",
        metavar="COLUMNS",
        callback=_columns,
        help="Columns of numbers; a missing one is 0.",
    ),
    click.option(
        "--bag", metavar="COLUMNS", callback=_columns, help="Columns with any number of ids each."
    ),
    click.option(
        "--bag-separator", metavar="TEXT", default="|", show_default=True, help="Between bag ids."
    ),
    click.option(
        "--time", metavar="COLUMN", help="Sort samples by this column of numbers or ISO dates."
    ),
    click.option(
        "--ids",
        type=click.Choice(["vocab", "hash"]),
        default="vocab",
        show_default=True,
        help="Number the values of a field as they appear, or hash them.",
    ),
    click.option("--hash-rows", type=int, metavar="N", help="Rows of a field with --ids hash."),
    click.option(
        "--missing",
        type=click.Choice(["id", "padding"]),
        default="id",
        show_default=True,
        help="A missing value is an id of its own, or touches no row.",
    ),
    click.option(
        "--positive-rating",
        type=float,
        default=4.0,
        show_default=True,
        help="MovieLens: the label is 1 from this rating on.",
    ),
    click.option("--skip-bad-rows", is_flag=True, help="Count and report bad rows, do not stop."),
    click.option("--limit", type=int, metavar="N", help="Use only the first N samples."),
)


def data_options(command: Callable[Concatenate[DataOptions, _P], _R]) -> Callable[_P, _R]:
    """Add the data options to a command; it gets them as its first argument, a DataOptions."""

    @wraps(command)
    def with_options(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        values = {name: kwargs.pop(name) for name in _DATA_NAMES}
        return command(DataOptions(**values), *args, **kwargs)  # type: ignore[arg-type]

    for option in reversed(_DATA_OPTIONS):
        with_options = option(with_options)
    return with_options
