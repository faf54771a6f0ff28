"""Finished runs from Python: their configuration, results and reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
from rich.table import Table

from embroute.config.run_file import RUN_FILE, read_run_file
from embroute.config.run_options import RunConfig
from embroute.report.comparison_table import cell_html, recorded
from embroute.report.run_folder import RunHistory, Summary, read_history, runs_table

if TYPE_CHECKING:
    from bokeh.plotting import figure


@dataclass(frozen=True)
class TrainedRun:
    """A run that `embroute train` finished."""

    folder: Path
    config: RunConfig
    history: RunHistory

    @property
    def summary(self) -> Summary:
        """Steps, samples a second, the last loss and metrics, and bytes of rows."""
        return self.history.summary

    def to_dataframe(self) -> pl.DataFrame:
        """One line a report: loss, speed, hit rate and bytes since the report before."""
        return pl.DataFrame([asdict(line) for line in self.history.reports])

    def evaluations(self) -> pl.DataFrame:
        """One line an evaluation of the held-out samples."""
        return pl.DataFrame([asdict(line) for line in self.history.evaluations])

    def plot(self, quantity: str = "loss") -> figure:
        """A curve of a column of the data frame over the steps, as a bokeh figure."""
        from embroute.report.figures import step_curve

        return step_curve(self.to_dataframe(), quantity)

    def to_html(self, path: str | Path | None = None) -> str:
        """The run in figures, as a self-contained page."""
        from embroute.report.runs_page import runs_page

        text = runs_page([self.history])
        if path is not None:
            Path(path).write_text(text, "utf-8")
        return text

    def _table(self) -> Table:
        return runs_table({self.history.name: self.summary})

    def __str__(self) -> str:
        return recorded(self._table()).export_text()

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return cell_html(self._table())


def load_run(folder: str | Path) -> TrainedRun:
    """Read the folder that `embroute train --out` wrote: its run file, summary and reports."""
    folder = Path(folder)
    if not (folder / RUN_FILE).is_file():
        raise ValueError(f"{folder}: no {RUN_FILE} here; give the folder of a run")
    history = read_history(folder, folder.absolute().name)
    return TrainedRun(folder, read_run_file(folder / RUN_FILE), history)
