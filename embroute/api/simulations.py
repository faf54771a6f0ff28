"""One policy step by step, from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from embroute.api.frames import naming_arguments, open_data
from embroute.config.progress import progress_bar
from embroute.config.run_options import DEFAULT_DATA, JobOptions
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

        if quantity not in STEP_COLUMNS:
            raise ValueError(f"quantity must be one of {', '.join(STEP_COLUMNS)}, got {quantity!r}")
        frame = self.to_dataframe()
        return step_curve(frame["step"].to_list(), frame[quantity].to_list(), quantity)

    def __repr__(self) -> str:
        return f"Simulation({self.policy!r}, {len(self.steps)} steps)"

    def _repr_html_(self) -> str:
        return self.to_dataframe()._repr_html_()


def simulate(
    data: object = DEFAULT_DATA, policy: PolicyLike = "embroute", **options: Any
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
