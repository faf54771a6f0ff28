"""The outputs of `compare`: a table, JSON, and an HTML report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click
import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from embroute.cli.options import add_options, naming_output, output_file, report_file
from embroute.config.spec import parse_size
from embroute.simulate.comparison import PolicyResult, to_json
from embroute.simulate.recorder import ReportData
from embroute.simulate.simulation import Workload
from embroute.simulate.sweeps import measure_tradeoffs, sweep_caches

PULL_KINDS, PUSH_KINDS = ("miss_pull", "stale_pull"), ("update_push", "evict_push", "drain")


def _short(value: float) -> str:
    """Three digits or more, never an exponent: 0.0182, 1.74, 35.8, 1402."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def rough(value: float) -> str:
    """Two digits, never an exponent: 0.044, 4.4, 44, 440, 44k."""
    digits = float(f"{value:.2g}")
    return scaled(digits if digits >= 1000 or value < 100 else value)


def scaled(value: float) -> str:
    """A count in five characters: 950, 12.3k, 1.2M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return _short(value / size) + unit
    return _short(value)


def _milliseconds(seconds: float) -> str:
    """At most five digits; the times of very slow links get a unit such as k or M."""
    return _short(1e3 * seconds) if seconds < 99.9995 else scaled(1e3 * seconds)


def _ratio(value: float, yardstick: float) -> str:
    return f"{value / yardstick:.2f}" if yardstick else "-"


def _cells(entry: PolicyResult, yardstick: PolicyResult) -> list[str]:
    flags = ("" if entry.exact else "*") + ("~" if entry.order_changed else "")
    return [
        entry.name + flags,
        scaled(sum(entry.rows[kind] for kind in PULL_KINDS)),
        scaled(sum(entry.rows[kind] for kind in PUSH_KINDS)),
        scaled(entry.moved_bytes),
        _milliseconds(entry.transmission_cost_s),
        _ratio(entry.transmission_cost_s, yardstick.transmission_cost_s),
        _milliseconds(entry.step_time_s),
        _ratio(entry.step_time_s, yardstick.step_time_s),
        "-" if entry.hit_rate is None else f"{100 * entry.hit_rate:.0f}%",
        "-" if entry.decision_ms is None else rough(entry.decision_ms),
    ]


_COUNTS = ("pulls", "pushes", "bytes")
_NUMBERS = (*_COUNTS, "cost\nms", "ratio", "step\nms", "ratio", "hits", "decide\nms")


def subsets(results: list[PolicyResult], job: Workload) -> list[str]:
    """A sentence for each policy that uses only some of the workers."""
    count = job.setup.num_workers
    return [
        f"{entry.name} uses workers {', '.join(str(w.worker) for w in entry.per_worker)} of {count}"
        for entry in results
        if 0 < len(entry.per_worker) < count
    ]


def comparison_table(results: list[PolicyResult], job: Workload, data: str) -> Table:
    """The comparison as a table of at most 80 columns; the best of a column is bold."""
    yardstick = next(entry for entry in results if entry.name == "vanilla")
    real = [entry for entry in results if not entry.reference]
    setup = job.setup
    title = (
        f"{escape(data)}: {setup.num_workers} workers x {setup.batch_size // setup.num_workers} "
        f"samples, caches of {int(setup.capacity_WA[0].sum()):,} of {setup.schema.num_rows:,} rows"
    )
    caption = "cost: busy time of all links; ratio: to vanilla; * inexact; ~ order changed"
    out = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    out.add_column("policy", overflow="fold", max_width=24)
    for heading in _NUMBERS:
        out.add_column(heading, justify="right", no_wrap=True)
    best_cost = min(entry.transmission_cost_s for entry in real)
    best_time = min(entry.step_time_s for entry in real)
    for entry in sorted(results, key=lambda entry: entry.reference):
        cells = [Text(cell) for cell in _cells(entry, yardstick)]
        best = {4: entry.transmission_cost_s == best_cost, 6: entry.step_time_s == best_time}
        for column, is_best in best.items():
            if is_best and not entry.reference:
                cells[column].stylize("bold")
                cells[column + 1].stylize("bold")
        out.add_row(*cells, style="dim" if entry.reference else None)
    return out


_P = ParamSpec("_P")
_R = TypeVar("_R")

REPORT_CACHES = "2%,4%,6%,10%,20%,30%"


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

    def write(self, report: ReportData) -> None:
        """Write the requested files."""
        if self.json_path is not None:
            values = to_json(report.results, report.job, report.data)
            _written("--json", self.json_path, json.dumps(values, indent=2) + "\n")
        if self.report is not None:
            from embroute.report.comparison_page import comparison_page

            job = report.job
            names = [entry.name for entry in report.results if not entry.reference]
            report = replace(report, sweep=sweep_caches(names, job, self.caches))
            if self.tradeoffs:
                report = replace(report, tradeoffs=measure_tradeoffs(job))
            _written("--report", self.report, comparison_page(report))


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
        default=REPORT_CACHES,
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
