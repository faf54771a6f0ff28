"""`embroute advise`: which policy, batch, cache and workers to use, before a machine is rented."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from embroute.api.advice import AdviceOptions, advice_on
from embroute.api.frames import Dataset
from embroute.cli.data import reading_progress
from embroute.cli.options import data_options, limited, output_file
from embroute.cli.outputs import tell_compiling
from embroute.cost.step_time import OPTIMIZERS
from embroute.data.open import DataOptions, naming, open_source
from embroute.report.advice_table import advice_table


@click.command("advise")
@click.option(
    "--data",
    default="online-retail(negatives=1)",
    show_default=True,
    help="A built-in name or a path.",
)
@click.option("--network", default="edge-8", show_default=True, help="A preset or a YAML file.")
@click.option("--memory-per-worker", default="8GB", show_default=True, help="E.g. 500MB.")
@click.option("--dim", default="64", show_default=True, help="Width of an embedding.")
@click.option("--model", default="deepfm", show_default=True, help="Model to train.")
@click.option("--workers", help="Numbers to try, e.g. 2..8 or 4,8 [all, and the divisors of all].")
@click.option("--batch", default="128,256", show_default=True, help="Samples per worker to try.")
@click.option(
    "--optimizer",
    type=click.Choice(list(OPTIMIZERS)),
    default="adagrad",
    show_default=True,
    help="Optimizer of the rows.",
)
@click.option(
    "--compute-ms-per-sample",
    type=limited("compute_ms_per_sample"),
    default=0.05,
    show_default=True,
    help="Compute time of the reference worker, in milliseconds.",
)
@click.option(
    "--target-samples-per-s", type=click.FloatRange(0, 1e15), help="Fail if the best is slower."
)
@click.option("--allow-stale", is_flag=True, help="Also policies that read old rows (HET).")
@click.option("--allow-reorder", is_flag=True, help="Also policies that change the order (FAE).")
@click.option("--out", type=click.Path(path_type=Path), help="Write a run file for `train`.")
@data_options
def advise_command(
    data_options: DataOptions,
    /,
    data: str,
    target_samples_per_s: float | None,
    out: Path | None,
    **values: object,
) -> None:
    """Recommend a policy, a batch, a cache and which workers to use.

    Everything is predicted from the head of the data; the best three are simulated.
    """
    options = AdviceOptions(**values)  # type: ignore[arg-type]
    if out is not None:
        output_file("--out", out)
    with reading_progress() as progress, naming("--data", data):
        source = open_source(data, data_options, progress)
    tell_compiling()
    advice = advice_on(Dataset(data, source, data_options), options)
    console = Console()
    console.print(advice_table(advice.recommendations, advice.constraints.setup))
    for reason in advice.reasons:
        console.print(reason, highlight=False, markup=False)
    if out is not None:
        from embroute.train.run_file import RunFile

        RunFile(**advice.run_at(out)).write(out)  # type: ignore[arg-type]
        click.echo(f"written: {out}", err=True)
    best = advice.recommendations[0].samples_s
    if target_samples_per_s and best < target_samples_per_s:
        raise ValueError(
            f"--target-samples-per-s {target_samples_per_s:,.0f}: the best found is {best:,.0f}; "
            f"more memory, faster links or more workers would be needed"
        )
