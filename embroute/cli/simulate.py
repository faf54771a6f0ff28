"""`embroute simulate`: one policy, step by step, as CSV."""

from __future__ import annotations

import csv
from pathlib import Path

import click

from embroute.cli.data import reading_progress, tell_bad_rows
from embroute.cli.options import (
    JobOptions,
    data_options,
    job_options,
    naming_output,
    output_file,
    tell_compiling,
    workload_from,
)
from embroute.config.progress import progress_bar
from embroute.cost.step_time import KIND_NAMES
from embroute.data.open import DataOptions, naming, open_source
from embroute.policies.catalog import policy_of
from embroute.simulate.simulation import StepReport, choose_workers, simulate, with_workers

CSV_COLUMNS = (
    "step",
    "samples",
    "hot",
    *(f"{kind}_rows" for kind in KIND_NAMES),
    *(f"{kind}_bytes" for kind in KIND_NAMES),
    "allreduce_rows",
    "allreduce_bytes",
    "sample_bytes",
    "plan_bytes",
    "hit_rate",
    "transmission_cost_s",
    "step_time_s",
    "compute_s",
    "early_s",
    "urgent_s",
    "late_s",
    "allreduce_s",
    "shard_s",
    "decision_ms",
)


def csv_row(report: StepReport) -> list[object]:
    """A step as one line of the CSV; a time of workers is the time of the slowest worker."""
    traffic, time = report.traffic, report.time
    return [
        report.step,
        int(traffic.samples_W.sum()),
        int(report.hot),
        *traffic.rows_WKIP.sum((0, 1, 3)).tolist(),
        *traffic.bytes_WKIP.sum((0, 1, 3)).tolist(),
        traffic.hot_rows,
        traffic.hot_bytes,
        int(traffic.sample_bytes_W.sum()),
        int(traffic.plan_bytes_W.sum() + traffic.plan_bytes_K.sum()),
        f"{report.hits / max(1, report.touches):.6f}",
        f"{report.transmission_cost_s:.9g}",
        f"{time.total_s:.9g}",
        *(f"{times.max():.9g}" for times in (time.compute_W, time.early_W, time.urgent_W)),
        f"{time.late_W.max():.9g}",
        f"{time.allreduce_s:.9g}",
        f"{time.shard_s:.9g}",
        f"{1e3 * report.decision_s:.4f}",
    ]


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
        writer.writerow(CSV_COLUMNS)
        for report in simulate(system, job):
            writer.writerow(csv_row(report))
            steps += 1
            update(advance=1)
    tell_bad_rows(source)
    if steps < job.steps:
        click.echo(f"the data ended after {steps} of {job.steps} steps", err=True)
    click.echo(f"written: {csv_path} ({steps} steps)", err=True)
