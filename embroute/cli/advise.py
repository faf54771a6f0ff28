"""`embroute advise`: which policy, batch, cache and workers to use, before a machine is rented."""

from __future__ import annotations

from pathlib import Path

import click

from embroute.api.advice import Advice, advice_on
from embroute.api.frames import Dataset
from embroute.cli.data import open_data_option
from embroute.cli.options import (
    STDOUT,
    GroupedCommand,
    built,
    data_options,
    field_option,
    in_group,
    output_file,
)
from embroute.cli.outputs import (
    changed_words,
    console,
    data_words,
    tell_compiling,
    tell_next,
    tell_written,
    write_output,
)
from embroute.config.data_options import DataOptions
from embroute.config.option_model import Group
from embroute.config.run_options import AdviceOptions, RunConfig
from embroute.config.scratch import scratch_folder
from embroute.report.advice_table import advice_table


@click.command("advise", cls=GroupedCommand)
@field_option(RunConfig, "data")
@click.option(
    "--target-samples-per-s",
    cls=in_group(Group.RANKS),
    type=click.FloatRange(0, 1e15),
    help="Fail if the best is slower.",
)
@click.option(
    "--out",
    cls=in_group(Group.OUTPUT),
    type=click.Path(path_type=Path),
    help="Write a run file for `train`.",
)
@built(AdviceOptions)
@data_options
def advise_command(
    data_options: DataOptions,
    options: AdviceOptions,
    /,
    data: str,
    target_samples_per_s: float | None,
    out: Path | None,
) -> None:
    """Recommend a policy, a batch, a cache and which workers to use.

    Everything is predicted from the head of the data; the best three are simulated.
    """
    if out is not None:
        output_file("--out", out)
    source = open_data_option(data, data_options)
    tell_compiling()
    advice = advice_on(Dataset(data, source, data_options), options)
    tables = console()
    tables.print(advice_table(advice.recommendations, advice.constraints.setup))
    for reason in advice.reasons:
        tables.print(reason, highlight=False, markup=False)
    if out is not None:
        _write(advice, out)
    if target_samples_per_s:
        advice.require(target_samples_per_s)
    _tell_next(advice, out)


def _write(advice: Advice, out: Path) -> None:
    """The recommended run as a run file, perhaps on stdout."""
    if out != STDOUT:
        advice.write(out)
        tell_written(out)
        return
    with scratch_folder("advice") as folder:
        advice.write(folder / "run.yaml")
        write_output("--out", out, (folder / "run.yaml").read_text())


def _tell_next(advice: Advice, out: Path | None) -> None:
    """The training of the recommended run, if the data has labels."""
    data = advice.dataset
    if not data.source.schema.labelled:
        tell_next("embroute", "data", "describe", data.name)
    elif out is not None:
        tell_next("embroute", "train", str(out))
    elif isinstance(advice.run.network, str):
        names = [name for name in advice.run.changed() if name not in ("data", "data_options")]
        words = changed_words(advice.run, names)
        tell_next("embroute", "train", *data_words(data.name, data.options), *words)
    else:  # a network of some of the workers needs a file
        words = changed_words(advice.options)
        command = [*data_words(data.name, data.options), *words, "--out", "run.yaml"]
        tell_next("embroute", "advise", *command)
