"""One policy step by step, from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from embroute.api.frames import naming_arguments, open_data
from embroute.config.progress import progress_bar
from embroute.config.run_options import DEFAULT_DATA, DEFAULT_POLICY, JobOptions
from embroute.policies.catalog import PolicyLike, policy_of
from embroute.simulator.simulation import (
    StepReport,
    Workload,
    choose_workers,
    simulate_steps,
    with_workers,
)
from embroute.simulator.step_table import STEP_COLUMNS, csv_cells, step_row
from embroute.simulator.workload import workload_from

PAGE_QUANTITIES = ("step_time_s", "transmission_cost_s", "miss_pull_rows", "update_push_rows")

if TYPE_CHECKING:
    from bokeh.plotting import figure


@dataclass(frozen=True)
class Simulation:
    """The priced steps of one policy, warm-up included."""

    policy: str
    job: Workload
    steps: tuple[StepReport, ...]

    def to_dataframe(self) -> pl.DataFrame:
        """One line a step (columns: docs/compare-json.md)."""
        rows = [step_row(report) for report in self.steps]
        return pl.DataFrame(rows, schema=list(STEP_COLUMNS), orient="row", infer_schema_length=None)

    def to_csv(self, path: str | Path) -> None:
        """The file that `embroute simulate --csv` writes."""
        lines = [",".join(STEP_COLUMNS), *(",".join(csv_cells(step_row(s))) for s in self.steps)]
        Path(path).write_text("\r\n".join(lines) + "\r\n", "utf-8")

    def plot(self, quantity: str = "step_time_s") -> figure:
        """A curve of a column of the data frame over the steps, as a bokeh figure."""
        from embroute.report.figures import step_curve

        return step_curve(self.to_dataframe(), quantity)

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page with curves over the steps, and all figures to download."""
        from embroute.report.figures import step_curve
        from embroute.report.page import Page, Section, Sheet, csv_text, render

        frame = self.to_dataframe()
        figures = [step_curve(frame, quantity) for quantity in PAGE_QUANTITIES]
        means = [f"{np.mean(frame[quantity].to_numpy()):.4g}" for quantity in PAGE_QUANTITIES]
        text = render(
            Page(
                title=f"{self.policy}, step by step",
                facts=f"{len(self.steps)} steps, the first {self.job.warmup} of them warm-up",
                sheet=Sheet(["mean of a step", *PAGE_QUANTITIES], [[self.policy, *means]]),
                sections=[Section("Steps", "The warm-up is included.", figures)],
                files={"steps.csv": csv_text([STEP_COLUMNS, *map(step_row, self.steps)])},
            )
        )
        if path is not None:
            Path(path).write_text(text, "utf-8")
        return text

    def __repr__(self) -> str:
        return f"Simulation({self.policy!r}, {len(self.steps)} steps)"

    def _repr_html_(self) -> str:
        return self.to_dataframe()._repr_html_()


def simulate(
    data: object = DEFAULT_DATA, policy: PolicyLike = DEFAULT_POLICY, **options: Any
) -> Simulation:
    """Price one policy step by step; `data` and `options` as for `compare`."""
    with naming_arguments():
        job_options, system = JobOptions(**options), policy_of("--policy", policy)
    dataset = open_data(data)
    with naming_arguments():
        job = workload_from(job_options, dataset.source)
        job = with_workers(job, choose_workers(system, job))
        steps = []
        with progress_bar(system.name, job.steps, counted=True) as update:
            for report in simulate_steps(system, job):
                steps.append(report)
                update(advance=1)
    return Simulation(system.name, job, tuple(steps))
