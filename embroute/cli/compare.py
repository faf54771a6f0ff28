"""`embroute compare` and `embroute simulate`: prices of policies on your data and network."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from rich.table import Table

from embroute.api.comparisons import choose_policies, measure_comparison
from embroute.api.frames import Dataset
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
    Outputs,
    changed_words,
    console,
    data_words,
    output_options,
    tell,
    tell_compiling,
    tell_next,
    tell_written,
)
from embroute.config.data_options import DataOptions
from embroute.config.option_model import Group
from embroute.config.progress import progress_bar
from embroute.config.run_options import DEFAULT_POLICY, JobOptions, RunConfig
from embroute.config.signature import first_line, options_of
from embroute.data.batch import Source
from embroute.policies.catalog import SYSTEMS, installed_policies, policy_of
from embroute.report.comparison_table import comparison_table, remarks, step_quantiles
from embroute.simulator.comparison import policy_result
from embroute.simulator.measurements import DEFAULT_POLICIES, policies_of
from embroute.simulator.simulation import StepReport, Workload, measure
from embroute.simulator.step_table import STEP_COLUMNS, csv_cells, step_row
from embroute.simulator.workload import workload_from

_DEFAULTS = ",".join(DEFAULT_POLICIES)
_EPILOG = (
    "Policies: "
    + "; ".join(
        f"{name}({', '.join(options_of(factory))}): {first_line(factory)}".replace("()", "")
        for name, factory in SYSTEMS.items()
    )
    + "".join(f"; {name}: of an installed package" for name in installed_policies())
    + "; lower-bound: a limit that no exact policy can beat. Or a mix of parts: "
)
_EPILOG += '"dispatch=esd sync=het(10) evict=clairvoyant". workers=fast restricts any of them.'


@click.command("compare", cls=GroupedCommand, epilog=_EPILOG)
@field_option(RunConfig, "data")
@click.option(
    "--policies",
    cls=in_group(Group.POLICY),
    metavar="POLICY,...",
    help=f"Policies, separated by commas.  [default: {_DEFAULTS}]",
)
@output_options
@job_options
@data_options
def compare_command(
    data_options: DataOptions,
    options: JobOptions,
    outputs: Outputs,
    data: str,
    policies: str | None,
) -> None:
    """Price policies on your data and network, without training.

    Rows, bytes and cost are sums over the measured steps; step time is their mean.
    """
    names = None if policies is None else policies_of(policies)
    chosen, left_out = choose_policies(names, options.optimizer)
    for name in left_out:
        tell(f"left out: {name}, which cannot train with {options.optimizer}")
    outputs.check()
    source = open_data_option(data, data_options)
    tell_compiling()
    comparison = measure_comparison(chosen, Dataset(data, source, data_options), options)
    table = comparison_table(comparison.report.results, comparison.job, data)
    _show([table], comparison.notes)
    _tell_missing(source, comparison.num_steps, comparison.job)
    outputs.write(comparison)
    changed = ("network", "dim", "optimizer", "compute_ms_per_sample")
    words = [*data_words(data, data_options), *changed_words(options, changed)]
    tell_next("embroute", "advise", *words)


def _show(tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Print tables, then sentences."""
    printer = console()
    for table in tables:
        printer.print(table)
    for note in notes:
        printer.print(note, highlight=False, markup=False)


def _tell_missing(source: Source, num_steps: int, job: Workload) -> None:
    """Say which rows were left out, and whether the data ended early."""
    tell_bad_rows(source)
    if num_steps < job.steps:
        tell(f"the data ended after {num_steps} of {job.steps} steps")


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
    result = policy_result(policy, outcome)
    table = comparison_table([result], job, data)
    _show([table, step_quantiles(reports[job.warmup :])], remarks([result], job))
    _tell_missing(source, len(reports), job)
    if csv_path is not None:
        tell_written(csv_path, f" ({len(reports)} steps)")
    rivals = f"vanilla,{policy}" if policy != "vanilla" else f"vanilla,{DEFAULT_POLICY}"
    words = [*data_words(data, data_options), "--policies", rivals, *changed_words(options)]
    tell_next("embroute", "compare", *words)
