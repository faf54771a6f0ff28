"""The files that `compare` writes: JSON and an HTML report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click

from embroute.api.comparisons import REPORT_CACHES, Comparison
from embroute.cli.options import add_options, naming_output, output_file, report_file
from embroute.config.spec import parse_size

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
            _written("--json", self.json_path, text + "\n")
        if self.report is not None:
            text = comparison.to_html(caches=self.caches, tradeoffs=self.tradeoffs)
            _written("--report", self.report, text)


def _written(option: str, path: Path, text: str) -> None:
    with naming_output(option, path):
        path.write_text(text, "utf-8")
    click.echo(f"written: {path}", err=True)


_OUTPUT_OPTIONS = (
    click.option(
        "--json", "json_path", type=click.Path(path_type=Path), help="Write results here."
    ),
    click.option("--report", type=click.Path(path_type=Path), help="Write an HTML report here."),
    click.option(
        "--report-caches",
        default=",".join(REPORT_CACHES),
        show_default=True,
        help="Cache sizes to sweep in the report, or none.",
    ),
    click.option(
        "--tradeoffs",
        is_flag=True,
        help="Add the trade-offs that papers report to --report: cache, staleness, links.",
    ),
)


def output_options(command: Callable[Concatenate[Outputs, _P], _R]) -> Callable[_P, _R]:
    """Add the options of output files to a command; it gets them as its first argument."""

    return add_options(command, Outputs, _OUTPUT_OPTIONS)
