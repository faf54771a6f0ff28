"""`embroute simulate`: one policy, summed up and step by step."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from pathlib import Path

import click

from embroute.cli.data import open_data_option, tell_bad_rows
from embroute.cli.options import (
    GroupedCommand,
    data_options,
    field_option,
    in_group,
    job_options,
    naming_output,
    output_file,
    replacing,
)
from embroute.cli.outputs import (
    changed_words,
    console,
    data_words,
    tell,
    tell_compiling,
    tell_next,
    tell_written,
)
from embroute.config.data_options import DataOptions
from embroute.config.option_model import Group
from embroute.config.progress import progress_bar
from embroute.config.run_options import JobOptions, RunConfig
from embroute.policies.catalog import policy_of
from embroute.report.comparison_table import comparison_table, remarks, step_quantiles
from embroute.simulator.comparison import policy_result
from embroute.simulator.simulation import StepReport, measure
from embroute.simulator.step_table import STEP_COLUMNS, csv_cells, step_row
from embroute.simulator.workload import workload_from


@click.command("simulate", cls=GroupedCommand)
@field_option(RunConfig, "data")
@field_option(RunConfig, "policy")
@click.option(
    "--csv",
    "csv_path",
    cls=in_group(Group.OUTPUT),
    type=click.Path(path_type=Path),
    help="Write steps here.",
)
@job_options
@data_options
def simulate_command(
    data_options: DataOptions, options: JobOptions, data: str, policy: str, csv_path: Path | None
) -> None:
    """Simulate one policy: its sums, and how its steps differ.

    The CSV has a line per step, warm-up included.
    """
    system = policy_of("--policy", policy)
    if csv_path is not None:
        output_file("--csv", csv_path)
    source = open_data_option(data, data_options)
    job, reports = workload_from(options, source), list[StepReport]()
    tell_compiling()
    with ExitStack() as stack:
        update = stack.enter_context(progress_bar(policy, job.steps, counted=True))
        lines = None
        if csv_path is not None:
            stack.enter_context(naming_output("--csv", csv_path))
            lines = csv.writer(stack.enter_context(replacing(csv_path)))
            lines.writerow(STEP_COLUMNS)

        def watch(report: StepReport) -> None:
            reports.append(report)
            update(advance=1)
            if lines is not None:
                lines.writerow(csv_cells(step_row(report)))

        outcome = measure(system, job, watch)
    result, tables = policy_result(policy, outcome), console()
    tables.print(comparison_table([result], job, data))
    tables.print(step_quantiles(reports[job.warmup :]))
    for sentence in remarks([result], job):
        tables.print(sentence, highlight=False, markup=False)
    tell_bad_rows(source)
    if len(reports) < job.steps:
        tell(f"the data ended after {len(reports)} of {job.steps} steps")
    if csv_path is not None:
        tell_written(csv_path, f" ({len(reports)} steps)")
    rivals = f"vanilla,{policy}" if policy != "vanilla" else "vanilla,embroute"
    words = [*data_words(data, data_options), "--policies", rivals, *changed_words(options)]
    tell_next("embroute", "compare", *words)
