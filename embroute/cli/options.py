"""Options that several commands share: those of a run, of data files and of output files."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar

import click

from embroute.config.cluster import CLUSTER_PRESETS
from embroute.config.spec import LIMITS, parse_path, shown
from embroute.cost.step_time import OPTIMIZERS
from embroute.data.open import DataOptions
from embroute.data.readers.formats import FORMATS
from embroute.simulator.job_options import JobOptions

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
STDOUT, STDOUT_KEY = Path("-"), "embroute.stdout"  # the option whose file is `-`


class _Number(click.FloatRange):
    """A click range that also refuses nan."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number of a text."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


def limited(name: str, least: int | None = None) -> click.IntRange | click.FloatRange:
    """The type of an option: the range in LIMITS, perhaps with another smallest value."""
    limit = LIMITS[name]
    low = limit.least if least is None else least
    if limit.whole:
        return click.IntRange(int(low), int(limit.most))
    return _Number(low, limit.most)


_JOB_OPTIONS = (
    click.option(
        "--network",
        default=JobOptions.network,
        show_default=True,
        help=f"A preset ({', '.join(name + '-N' for name in CLUSTER_PRESETS)}) or a YAML file.",
    ),
    click.option("--workers", type=limited("workers"), help="Number of workers [from --network]."),
    click.option(
        "--batch",
        type=limited("batch"),
        default=JobOptions.batch,
        show_default=True,
        help="Samples per worker.",
    ),
    click.option(
        "--cache",
        default=JobOptions.cache,
        show_default=True,
        help="Cache of a worker: auto, 0.1 or 10% of all rows, 5000rows, or 256MB.",
    ),
    click.option(
        "--dim",
        default=JobOptions.dim,
        show_default=True,
        help="Width of a row, e.g. 64 or 64,C1=16.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(list(OPTIMIZERS)),
        default=JobOptions.optimizer,
        show_default=True,
        help="Optimizer of the rows; its state travels with them.",
    ),
    click.option("--quotas", help="Relative shares of the samples, e.g. 2,2,1,1 [equal]."),
    click.option(
        "--compute-ms-per-sample",
        type=limited("compute_ms_per_sample"),
        default=JobOptions.compute_ms_per_sample,
        show_default=True,
        help="Compute time of the reference worker, in milliseconds.",
    ),
    click.option(
        "--dense-bytes",
        default=JobOptions.dense_bytes,
        show_default=True,
        help="Dense gradients per step, e.g. 4MB.",
    ),
    click.option(
        "--steps",
        type=limited("steps", 1),
        default=JobOptions.steps,
        show_default=True,
        help="Steps, warm-up included.",
    ),
    click.option(
        "--warmup",
        type=limited("warmup"),
        default=JobOptions.warmup,
        show_default=True,
        help="Steps to leave out.",
    ),
    click.option(
        "--epochs",
        type=limited("epochs"),
        default=JobOptions.epochs,
        show_default=True,
        help="Largest number of passes.",
    ),
    click.option("--shuffle", is_flag=True, help="Shuffle every epoch."),
    click.option(
        "--seed",
        type=limited("seed"),
        default=JobOptions.seed,
        show_default=True,
        help="Seed of --shuffle.",
    ),
)


def add_options(
    command: Callable[Concatenate[_T, _P], _R],
    kind: Callable[..., _T],
    options: Sequence[Callable[[Any], Any]],
) -> Callable[_P, _R]:
    """The command with these options; their values reach it as one `kind`, a dataclass."""
    names = tuple(entry.name for entry in fields(kind))  # type: ignore[arg-type]

    @wraps(command)
    def with_options(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        values = {name: kwargs.pop(name) for name in names}
        return command(kind(**values), *args, **kwargs)

    for option in reversed(options):
        with_options = option(with_options)
    return with_options


def job_options(command: Callable[Concatenate[JobOptions, _P], _R]) -> Callable[_P, _R]:
    """Add the options of a run to a command; it gets them as its first argument."""
    return add_options(command, JobOptions, _JOB_OPTIONS)


def output_file(option: str, path: Path) -> Path:
    """A file that results can be written to later, checked before the work starts; `-`: stdout."""
    parse_path(option, str(path))
    if path == STDOUT:
        taken = click.get_current_context().meta.setdefault(STDOUT_KEY, option)
        if taken != option:
            raise ValueError(f"{taken} - and {option} -: only one result fits standard output")
        return path
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:  # such as a name that is too long, or a parent that is a file
        raise ValueError(f"{option} {shown(str(path))}: {error.strerror}") from None
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{option} {path}: this is a folder, give a file in it")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"{option} {path}: it cannot be written to")
    return path


def report_file(option: str, path: Path) -> Path:
    """A file that a report can be written to later, checked before the work starts."""
    require_bokeh(option)
    return output_file(option, path)


def require_bokeh(wanted_by: str) -> None:
    """Refuse a report if bokeh, an optional dependency, is missing."""
    if find_spec("bokeh") is None:
        raise ValueError(
            f"{wanted_by} needs bokeh, which is not installed: pip install embroute[report]"
        )


@contextmanager
def naming_output(option: str, path: Path) -> Iterator[None]:
    """Let an error name the option: errors of an open file do not name the file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or f"{option} {path}") from None


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that replaces an older file after the last write.

    A link stays: its target is replaced. A device or a pipe is written directly, because renaming
    a file over it would remove it.
    """
    if path == STDOUT:
        yield sys.stdout
        return
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _columns(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    """A comma-separated list of columns."""
    names = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    if not all(names):
        raise click.BadParameter(f"{text!r} has an empty name; give columns such as a,b")
    return names


_DATA_OPTIONS = (
    click.option("--format", type=click.Choice(FORMATS), help="Format of the files [detected]."),
    click.option("--label", metavar="COLUMN", help="Column of labels, 0 or 1; may be left out."),
    click.option(
        "--categorical",
        metavar="COLUMNS",
        callback=_columns,
        help="Columns of ids, separated by commas, or `all`: every column without another use.",
    ),
    click.option(
        "--dense",
        metavar="COLUMNS",
        callback=_columns,
        help="Columns of numbers; a missing number becomes 0.",
    ),
    click.option(
        "--bag", metavar="COLUMNS", callback=_columns, help="Columns with any number of ids each."
    ),
    click.option(
        "--bag-separator",
        metavar="TEXT",
        default="|",
        show_default=True,
        help="Text between two ids.",
    ),
    click.option(
        "--time", metavar="COLUMN", help="Sort samples by this column of numbers or ISO dates."
    ),
    click.option(
        "--ids",
        type=click.Choice(["vocab", "hash"]),
        default="vocab",
        show_default=True,
        help="Number the values of a field in order of first appearance, or hash them.",
    ),
    click.option("--hash-rows", type=int, metavar="N", help="Rows of a field with --ids hash."),
    click.option(
        "--missing",
        type=click.Choice(["id", "padding"]),
        default="id",
        show_default=True,
        help="A missing value becomes a separate id, or touches no row.",
    ),
    click.option(
        "--positive-rating",
        type=float,
        default=4.0,
        show_default=True,
        help="MovieLens: the smallest rating with label 1.",
    ),
    click.option("--skip-bad-rows", is_flag=True, help="Leave bad rows out and count them."),
    click.option("--limit", type=int, metavar="N", help="Use only the first N samples."),
)


def data_options(command: Callable[Concatenate[DataOptions, _P], _R]) -> Callable[_P, _R]:
    """Add the data options to a command; it gets them as its first argument, a DataOptions."""

    return add_options(command, DataOptions, _DATA_OPTIONS)
