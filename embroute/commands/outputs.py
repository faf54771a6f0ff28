"""What a comparison writes beside its table: JSON, and a report as HTML."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click
from rich.console import Console

from embroute.commands.job_options import output_file, writing
from embroute.commands.sweeps import sweep, tradeoffs
from embroute.comparison import to_json
from embroute.config import parse_size
from embroute.views.detail import Compared

_P = ParamSpec("_P")
_R = TypeVar("_R")

CACHES = "2%,4%,6%,10%,20%,30%"


@dataclass(frozen=True)
class Outputs:
    """Files to write, as given on the command line."""

    json_path: Path | None
    report: Path | None
    report_caches: str
    tradeoffs: bool

    @property
    def caches(self) -> list[str]:
        """Caches of the report, as given."""
        given = [part.strip() for part in self.report_caches.split(",") if part.strip()]
        return [] if given == ["none"] else given

    def check(self) -> None:
        """Refuse now what could not be written later."""
        for option, path in (("--json", self.json_path), ("--report", self.report)):
            if path is not None:
                output_file(option, path)
        if self.tradeoffs and self.report is None:
            raise ValueError("--tradeoffs: these are panels of a report; name one with --report")
        for cache in self.caches:
            parse_size("--report-caches", cache)

    def write(self, found: Compared) -> None:
        """Write what was asked for."""
        if self.json_path is not None:
            values = to_json(list(found.lines), found.job, found.data)
            _written("--json", self.json_path, json.dumps(values, indent=2) + "\n")
        if self.report is not None:
            from embroute.views.comparison import comparison_page  # bokeh is slow to import

            names = [entry.name for entry in found.lines if not entry.reference]
            console = Console(stderr=True)
            found = replace(found, sweep=sweep(names, found.job, self.caches, console))
            if self.tradeoffs:
                found = replace(found, tradeoffs=tradeoffs(found.job, console))
            _written("--report", self.report, comparison_page(found))


def _written(option: str, path: Path, text: str) -> None:
    with writing(option, path):
        path.write_text(text, "utf-8")
    click.echo(f"written: {path}", err=True)


_OPTIONS = (
    click.option(
        "--json", "json_path", type=click.Path(path_type=Path), help="Write results here."
    ),
    click.option("--report", type=click.Path(path_type=Path), help="Write an HTML report here."),
    click.option(
        "--report-caches",
        default=CACHES,
        show_default=True,
        help="Caches of the report's sweep, or none.",
    ),
    click.option(
        "--tradeoffs",
        is_flag=True,
        help="Add the trade-offs that papers report to --report: cache, staleness, links.",
    ),
)


def output_options(command: Callable[Concatenate[Outputs, _P], _R]) -> Callable[_P, _R]:
    """Add the options of files to a command; it gets them as its first argument."""

    @wraps(command)
    def with_options(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        values = {name: kwargs.pop(name) for name in Outputs.__dataclass_fields__}
        return command(Outputs(**values), *args, **kwargs)  # type: ignore[arg-type]

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options
