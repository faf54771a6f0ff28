"""What commands print and write: tables, notes, files, and the results of `compare`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import click
from rich.console import Console

from embroute.cli.options import (
    STDOUT,
    STDOUT_KEY,
    in_group,
    naming_output,
    output_file,
    replacing,
    report_file,
)
from embroute.config.data_options import DataOptions
from embroute.config.option_model import Group, Options, option_name
from embroute.config.progress import is_quiet
from embroute.config.run_options import REPORT_CACHES
from embroute.config.spec import parse_size

if TYPE_CHECKING:
    from embroute.api.comparisons import Comparison

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Outputs:
    """Files to write, as given on the command line."""

    json_path: Path | None
    report: Path | None
    report_caches: str
    tradeoffs: bool

    @property
    def caches(self) -> list[str]:
        """The cache sizes of the report."""
        sizes = [part.strip() for part in self.report_caches.split(",") if part.strip()]
        return [] if sizes == ["none"] else sizes

    def check(self) -> None:
        """Refuse paths and values that would fail after the measurement."""
        if self.json_path is not None:
            output_file("--json", self.json_path)
        if self.report is not None:
            report_file("--report", self.report)
        if self.tradeoffs and self.report is None:
            raise ValueError("--tradeoffs adds panels to a report: name its file with --report")
        for cache in self.caches:
            parse_size("--report-caches", cache)

    def write(self, comparison: Comparison) -> None:
        """Write the requested files."""
        if self.json_path is not None:
            text = json.dumps(comparison.to_json(), indent=2)
            write_output("--json", self.json_path, text + "\n")
        if self.report is not None:
            text = comparison.to_html(caches=self.caches, tradeoffs=self.tradeoffs)
            write_output("--report", self.report, text)


def console() -> Console:
    """Where tables go: to stdout, to stderr if a result goes to stdout, nowhere if --quiet."""
    return Console(stderr=_stdout_is_taken(), quiet=is_quiet())


def _stdout_is_taken() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and STDOUT_KEY in context.meta


def tell(note: str) -> None:
    """Print a line on stderr, unless --quiet."""
    if not is_quiet():
        click.echo(note, err=True)


def tell_next(*words: str) -> None:
    """End with the command that a user may type next."""
    if not _stdout_is_taken():
        tell(f"next: {shlex.join(words)}")


def data_words(data: str, options: DataOptions) -> list[str]:
    """The options that name data and the uses of its columns, as a user types them."""
    words = ["--data", data]
    for name, value in options.changed().items():
        words.append(option_name(name))
        if value is not True:
            words.append(",".join(value) if isinstance(value, tuple) else str(value))
    return words


def changed_words(options: Options, names: Iterable[str] = ()) -> list[str]:
    """The options that differ from their defaults, as a user types them."""
    words = []
    for name, value in options.changed().items():
        if not names or name in names:
            words += [option_name(name)] if value is True else [option_name(name), str(value)]
    return words


def tell_compiling() -> None:
    """Say why the first run on a machine takes longer."""
    from embroute.simulator.simulation import kernels_are_compiled  # loads numba

    if not kernels_are_compiled():
        tell("compiling for this machine, once: about a minute")


def write_output(option: str, path: Path, text: str) -> None:
    """Write a result into the file that an option names, or to stdout."""
    with naming_output(option, path), replacing(path) as file:
        file.write(text)
    tell_written(path)


def tell_written(path: Path, details: str = "") -> None:
    """Say that a file is complete."""
    if path != STDOUT:
        tell(f"written: {path}{details}")


_OUTPUT = in_group(Group.OUTPUT)
_OUTPUT_OPTIONS = (
    click.option(
        "--json",
        "json_path",
        cls=_OUTPUT,
        type=click.Path(path_type=Path),
        help="Write results here.",
    ),
    click.option(
        "--report", cls=_OUTPUT, type=click.Path(path_type=Path), help="Write an HTML report here."
    ),
    click.option(
        "--report-caches",
        cls=_OUTPUT,
        default=",".join(REPORT_CACHES),
        show_default=True,
        help="Cache sizes to sweep in the report, or none.",
    ),
    click.option(
        "--tradeoffs",
        cls=_OUTPUT,
        is_flag=True,
        help="Add the trade-offs that papers report to --report: cache, staleness, links.",
    ),
)


def output_options(command: Callable[Concatenate[Outputs, _P], _R]) -> Callable[_P, _R]:
    """Add the options of output files to a command; it gets them as its first argument."""
    names = [entry.name for entry in fields(Outputs)]

    @wraps(command)
    def with_options(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        values = {name: kwargs.pop(name) for name in names}
        return command(Outputs(**values), *args, **kwargs)  # type: ignore[arg-type]

    for option in reversed(_OUTPUT_OPTIONS):
        with_options = option(with_options)
    return with_options
