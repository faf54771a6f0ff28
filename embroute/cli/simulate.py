"""`embroute simulate`: one policy, step by step, as CSV."""

from __future__ import annotations

import csv
from pathlib import Path

import click

from embroute.cli.data import reading_progress, tell_bad_rows
from embroute.cli.options import (
    data_options,
    job_options,
    naming_output,
    output_file,
    tell_compiling,
)
from embroute.config.progress import progress_bar
from embroute.data.open import DataOptions, naming, open_source
from embroute.policies.catalog import policy_of
from embroute.simulator.job_options import JobOptions, workload_from
from embroute.simulator.simulation import choose_workers, simulate_steps, with_workers
from embroute.simulator.step_table import STEP_COLUMNS, csv_cells, step_row


@click.command("simulate")
@click.option(
    "--data", default="online-retail", show_default=True, help="A built-in name or a path."
)
@click.option("--policy", default="embroute", show_default=True, help="Policy, as for compare.")
@click.option(
    "--csv", "csv_path", required=True, type=click.Path(path_type=Path), help="Write steps here."
)
@job_options
@data_options
def simulate_command(
    data_options: DataOptions, options: JobOptions, data: str, policy: str, csv_path: Path
) -> None:
    """Simulate one policy and write a line per step, warm-up included."""
    system = policy_of("--policy", policy)
    output_file("--csv", csv_path)
    with reading_progress() as progress, naming("--data", data):
        source = open_source(data, data_options, progress)
    job = workload_from(options, source)
    job = with_workers(job, choose_workers(system, job))
    tell_compiling()
    steps = 0
    with (
        naming_output("--csv", csv_path),
        csv_path.open("w", newline="") as file,
        progress_bar(policy, job.steps, counted=True) as update,
    ):
        writer = csv.writer(file)
        writer.writerow(STEP_COLUMNS)
        for report in simulate_steps(system, job):
            writer.writerow(csv_cells(step_row(report)))
            steps += 1
            update(advance=1)
    tell_bad_rows(source)
    if steps < job.steps:
        click.echo(f"the data ended after {steps} of {job.steps} steps", err=True)
    click.echo(f"written: {csv_path} ({steps} steps)", err=True)
