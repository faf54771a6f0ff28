"""`embroute compare`: traffic and cost of each policy on your data and network."""

from __future__ import annotations

import click
from rich.console import Console

from embroute.cli.data import reading_progress, tell_bad_rows
from embroute.cli.options import (
    JobOptions,
    data_options,
    job_options,
    tell_compiling,
    workload_from,
)
from embroute.cli.outputs import Outputs, comparison_table, output_options, subsets
from embroute.config.progress import progress_bar
from embroute.config.signature import first_line, options_of
from embroute.config.spec import shown, split_outside
from embroute.data.open import DataOptions, naming, open_source
from embroute.policies.catalog import LOWER_BOUND, SYSTEMS, make_policy, policy_of
from embroute.simulate.comparison import PolicyResult, bound_result, policy_result
from embroute.simulate.recorder import Detail, Recorder, ReportData
from embroute.simulate.simulation import (
    Workload,
    choose_workers,
    measure,
    start_simulation,
    workload_bound,
)

YARDSTICK = "vanilla"
DEFAULT = "nocache,vanilla,het(100),herald,esd(1),embroute,fae,scars,bagpipe,unbounded,lower-bound"


def _names(text: str) -> list[str]:
    """The policies to run, the yardstick included."""
    try:
        names = [name for name in split_outside(text, ",") if name]
    except ValueError as error:
        raise ValueError(f"--policies: {error}") from None
    if not names:
        raise ValueError(f"--policies must name at least one policy, got {shown(text)}")
    for name in names:
        if name != LOWER_BOUND:
            policy_of("--policies", name)
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"--policies: {shown(sorted(repeated)[0])} is given twice")
    return names if YARDSTICK in names else [YARDSTICK, *names]


def _check(names: list[str], job: Workload) -> None:
    """Refuse a policy that cannot run this job before any policy is measured."""
    for policy in (make_policy(name) for name in names if name != LOWER_BOUND):
        if policy.workers != "fast":
            choose_workers(policy, job)
        if job.setup.optimizer in policy.sync.refused_optimizers:
            start_simulation(policy, job)  # raises, and says why


def _defaults(optimizer: str) -> str:
    """The default policies that can train with the optimizer."""
    names = split_outside(DEFAULT, ",")
    refused = [
        name
        for name in names
        if name != LOWER_BOUND and optimizer in make_policy(name).sync.refused_optimizers
    ]
    for name in refused:
        click.echo(f"left out: {name}, which cannot train with {optimizer}", err=True)
    return ",".join(name for name in names if name not in refused)


def measure_all(names: list[str], job: Workload) -> tuple[list[PolicyResult], dict[str, Detail]]:
    """Measure every policy, with a progress bar."""
    results, details = [], {}
    with progress_bar("", len(names) * job.steps, counted=True) as update:
        for position, name in enumerate(names):
            update(description=name, completed=position * job.steps)
            if name == LOWER_BOUND:
                results.append(bound_result(workload_bound(job)))
                continue
            recorder = Recorder(job.warmup, lambda: update(advance=1))
            outcome = measure(make_policy(name), job, recorder.watch)
            results.append(policy_result(name, outcome))
            details[name] = recorder.detail(outcome)
    return results, details


_EPILOG = (
    "Policies: "
    + "; ".join(
        f"{name}({', '.join(options_of(factory))}): {first_line(factory)}".replace("()", "")
        for name, factory in SYSTEMS.items()
    )
    + "; lower-bound: a limit that no exact policy can beat. Or a mix of parts: "
)
_EPILOG += '"dispatch=esd sync=het(10) evict=clairvoyant". workers=fast restricts any of them.'


@click.command("compare", epilog=_EPILOG)
@click.option(
    "--data", default="online-retail", show_default=True, help="A built-in name or a path."
)
@click.option("--policies", help=f"Policies, separated by commas.  [default: {DEFAULT}]")
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
    names = _names(_defaults(options.optimizer) if policies is None else policies)
    outputs.check()
    with reading_progress() as progress, naming("--data", data):
        source = open_source(data, data_options, progress)
    job = workload_from(options, source)
    _check(names, job)
    tell_compiling()
    results, details = measure_all(names, job)
    console = Console()
    console.print(comparison_table(results, job, data))
    if len(job.setup.cluster.used_hosts) == 1:
        console.print("all workers and shards are on one host: no link carries rows, at no cost")
    for sentence in subsets(results, job):
        console.print(sentence, highlight=False, markup=False)
    tell_bad_rows(source)
    trained = job.warmup + min(entry.steps for entry in results if entry.steps is not None)
    if trained < job.steps:
        click.echo(f"the data ended after {trained} of {job.steps} steps", err=True)
    outputs.write(ReportData(data, options.network, job, results, details))
