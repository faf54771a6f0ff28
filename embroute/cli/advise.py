"""`embroute advise`: which policy, batch, cache and workers to use, before a machine is rented."""

from __future__ import annotations

from pathlib import Path

import click

from embroute.api.advice import Advice, AdviceOptions, advice_on
from embroute.api.frames import Dataset
from embroute.cli.data import open_data_option
from embroute.cli.options import STDOUT, data_options, limited, output_file
from embroute.cli.outputs import (
    changed_words,
    console,
    data_words,
    tell_compiling,
    tell_next,
    write_output,
)
from embroute.config.scratch import scratch_folder
from embroute.cost.step_time import OPTIMIZERS
from embroute.data.open import DataOptions, option_name
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
    source = open_data_option(data, data_options)
    tell_compiling()
    advice = advice_on(Dataset(data, source, data_options), options)
    tables = console()
    tables.print(advice_table(advice.recommendations, advice.constraints.setup))
    for reason in advice.reasons:
        tables.print(reason, highlight=False, markup=False)
    if out is not None:
        _write(advice, out)
    best = advice.recommendations[0].samples_s
    if target_samples_per_s and best < target_samples_per_s:
        raise ValueError(
            f"--target-samples-per-s {target_samples_per_s:,.0f}: the best found is {best:,.0f}; "
            f"more memory, faster links or more workers would be needed"
        )
    _tell_next(advice, out)


def _write(advice: Advice, out: Path) -> None:
    """The recommended run as a run file, perhaps on stdout."""
    from embroute.train.run_file import RunFile

    named = Path("run.yaml") if out == STDOUT else out
    run = RunFile(**advice.run_at(named))  # type: ignore[arg-type]
    with scratch_folder("advice") as folder:
        run.write(folder / "run.yaml")
        write_output("--out", out, (folder / "run.yaml").read_text())


def _tell_next(advice: Advice, out: Path | None) -> None:
    """The training of the recommended run, if the data has labels."""
    data = advice.dataset
    if not data.source.schema.labelled:
        tell_next("embroute", "data", "describe", data.name)
    elif out is not None:
        tell_next("embroute", "train", str(out))
    elif isinstance(advice.run["network"], str):
        run = {**advice.run, "data": None, "data_options": None}
        words = [word for name, v in run.items() if v for word in (option_name(name), str(v))]
        tell_next("embroute", "train", *data_words(data.name, data.options), *words)
    else:  # a network of some of the workers needs a file
        words = changed_words(advice.options)
        command = [*data_words(data.name, data.options), *words, "--out", "run.yaml"]
        tell_next("embroute", "advise", *command)
