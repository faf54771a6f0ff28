"""`embroute report`: runs side by side."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from embroute.report import read_summary, runs_table


@click.command("report")
@click.argument(
    "runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
def report(runs: tuple[Path, ...]) -> None:
    """Compare finished runs: their folders, as `embroute train --out` made them."""
    Console().print(runs_table({str(run): read_summary(run) for run in runs}))
