"""`embroute report` and `embroute predict`: what follows a finished run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import click

from embroute.cli.options import (
    limited,
    naming_output,
    output_file,
    replacing,
    report_file,
    require_bokeh,
)
from embroute.cli.outputs import console, tell_next, tell_written, write_output
from embroute.config.progress import progress_bar
from embroute.kernels.array_types import F32
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


@click.command("predict")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Write a CSV here.")
@click.option("--data", default="", help="Other data with the same fields [the data of the run].")
@click.option(
    "--part",
    default="held-out",
    show_default=True,
    help="Samples of the run's data to score: held-out or all.",
)
@click.option(
    "--batch", type=limited("batch"), default=4096, show_default=True, help="Samples per batch."
)
@click.option("--unlabelled", is_flag=True, help="--data has no label column.")
def predict_command(
    run: Path, out: Path, data: str, part: str, batch: int, unlabelled: bool
) -> None:
    """Score samples with the newest checkpoint of RUN, a folder that `embroute train` made.

    The CSV has a line per sample: the score, and the label if the data has labels. Lines follow
    the order of the data, or of the time column that the run names.
    """
    output_file("--out", out)
    with progress_bar("loading the model", None, counted=True) as update:
        from embroute.train.scorer import ScoreRequest, predictions

        def scored() -> Iterator[tuple[F32, F32]]:
            for scores, labels in predictions(run, ScoreRequest(data, part, unlabelled), batch):
                update(description="samples scored:", advance=len(scores))
                yield scores, labels

        with naming_output("--out", out), replacing(out) as file:
            count = _write(file, scored())
    tell_written(out, f" ({count} samples)")
    tell_next("embroute", "report", str(run), "--html", "report.html")


def _write(file: TextIO, batches: Iterable[tuple[F32, F32]]) -> int:
    """Write scores, and labels if the data has labels; returns the number of samples."""
    count = 0
    for scores, labels in batches:
        if not count:
            file.write("score,label\n" if len(labels) else "score\n")
        columns = [scores, labels] if len(labels) else [scores]
        for line in zip(*columns, strict=True):
            file.write(",".join(f"{value:.9g}" for value in line) + "\n")
        count += len(scores)
    return count
