"""`embroute report`: runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from embroute.cli.options import report_file, require_bokeh
from embroute.cli.outputs import console, tell_next, write_output
from embroute.report.run_folder import read_history, read_summary, runs_table


def _names(runs: Sequence[Path]) -> list[str]:
    """Short names of folders if they differ, otherwise their paths."""
    short = [run.absolute().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]


def write_report(page: Path, runs: Sequence[Path]) -> None:
    """Write the report of finished runs as one HTML file."""
    require_bokeh(page.name)
    from embroute.report.runs_page import runs_page

    histories = [read_history(run, name) for run, name in zip(runs, _names(runs), strict=True)]
    write_output("--html", page, runs_page(histories))


@click.command("report")
@click.argument(
    "runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--html", "page", type=click.Path(path_type=Path), help="Write an HTML report here.")
def report_command(runs: tuple[Path, ...], page: Path | None) -> None:
    """Compare finished runs: their folders, as `embroute train --out` made them."""
    if page is not None:
        report_file("--html", page)
    summaries = [read_summary(run) for run in runs]
    console().print(runs_table(dict(zip(_names(runs), summaries, strict=True))))
    if page is not None:
        write_report(page, runs)
    export = ["embroute", "checkpoint", "export", str(runs[0]), "--out", "tables.safetensors"]
    tell_next(*export)
