"""`embroute predict`: scores of samples from a trained run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import click

from embroute.cli.options import limited, naming_output, output_file, replacing
from embroute.cli.outputs import tell_next, tell_written
from embroute.config.progress import progress_bar
from embroute.kernels.array_types import F32


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
