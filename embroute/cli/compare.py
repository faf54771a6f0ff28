"""`embroute compare`: traffic and cost of each policy on your data and network."""

from __future__ import annotations

import click

from embroute.api.comparisons import measure_comparison
from embroute.api.frames import Dataset
from embroute.cli.data import open_data_option, tell_bad_rows
from embroute.cli.options import (
    GroupedCommand,
    data_options,
    field_option,
    in_group,
    job_options,
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
)
from embroute.config.data_options import DataOptions
from embroute.config.option_model import Group
from embroute.config.run_options import JobOptions, RunConfig
from embroute.config.signature import first_line, options_of
from embroute.policies.catalog import SYSTEMS, installed_policies
from embroute.report.comparison_table import comparison_table, remarks
from embroute.simulator.measurements import (
    DEFAULT_POLICIES,
    named_policies,
    policies_of,
    trainable_defaults,
)

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
    if policies is None:
        names, refused = trainable_defaults(options.optimizer)
        for name in refused:
            tell(f"left out: {name}, which cannot train with {options.optimizer}")
    else:
        names = policies_of(policies)
    chosen = named_policies(names)
    outputs.check()
    source = open_data_option(data, data_options)
    tell_compiling()
    comparison = measure_comparison(chosen, Dataset(data, source), options)
    results, job, tables = comparison.report.results, comparison.job, console()
    tables.print(comparison_table(results, job, data))
    if job.setup.cluster.moves_for_free:
        tables.print("all workers and shards are on one host: no link carries rows, at no cost")
    for sentence in remarks(results, job):
        tables.print(sentence, highlight=False, markup=False)
    tell_bad_rows(source)
    trained = job.warmup + min(entry.steps for entry in results if entry.steps is not None)
    if trained < job.steps:
        tell(f"the data ended after {trained} of {job.steps} steps")
    outputs.write(comparison)
    changed = ("network", "dim", "optimizer", "compute_ms_per_sample")
    words = [*data_words(data, data_options), *changed_words(options, changed)]
    tell_next("embroute", "advise", *words)
