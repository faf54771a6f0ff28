"""`embroute train`: train a built-in model on this machine, from options or a run file."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import click

from embroute.cli.options import data_options
from embroute.cli.outputs import tell, tell_next
from embroute.cli.report import write_report
from embroute.config.cluster_file import is_file
from embroute.config.progress import progress_bar
from embroute.config.spec import shown
from embroute.data.open import DataOptions, option_name

OPTIONS = (
    ("data", "A built-in name or a path."),
    ("model", "wide-deep, deepfm, dcn, dlrm, ncf or wide-deep-het."),
    ("dim", "Width of an embedding, e.g. 16 or 16,C1=8."),
    ("hidden", "Widths of the dense layers."),
    ("pooling", "Pooling of bags: sum or mean."),
    ("policy", "Policy that assigns samples to workers and schedules transfers of rows."),
    ("cache", "Cache of a worker: auto, 0.1 or 10% of all rows, 5000rows, or 256MB."),
    ("batch", "Samples per worker and step."),
    ("quotas", "Relative shares of the samples, e.g. 2,2,1,1 [equal, or set by the policy]."),
    (
        "compute-ms-per-sample",
        "Compute time of the reference worker; `embroute` sets quotas by it.",
    ),
    ("optimizer", "Optimizer of the rows: sgd, adagrad, rowwise-adagrad or adam."),
    ("lr", "Learning rate of the rows."),
    ("dense-optimizer", "Optimizer of the dense parameters: adam, adamw, sgd or adagrad."),
    ("dense-lr", "Learning rate of the dense parameters."),
    ("decay", "Weight decay of a row at every touch."),
    ("clip", "Largest norm of the dense gradients; 0: no limit."),
    ("warmup-steps", "Steps during which the learning rates grow."),
    ("epochs", "Passes over the data."),
    ("steps", "Largest number of steps; 0: no limit but the epochs."),
    ("seed", "Seed of initial values and shuffling."),
    ("held-out", "Share of the samples to evaluate on, from the end of the data."),
    ("evaluate-every", "Steps between evaluations; 0: at the end only."),
    ("workers", "Workers on this machine."),
    ("shards", "Parameter shards on this machine."),
    ("network", "Network that the policy assumes: a preset or a YAML file."),
    ("tables", "Initial tables: a file from `checkpoint export`."),
    ("checkpoint-every", "Steps between checkpoints; 0: at the end and on SIGTERM only."),
    ("keep", "Checkpoints to keep."),
    ("restarts", "Restarts of all ranks from the last complete checkpoint, at most."),
    ("peer-timeout", "Seconds without a heartbeat after which a rank counts as lost."),
    ("transport", "Way of rows and sums: auto, sockets or shared-memory."),
    ("out", "Folder of the run: run file, metrics, checkpoints."),
    ("device", "Device of the dense model: cpu or cuda."),
    ("dtype", "Number type: float32 or float64."),
)


class _Option(click.Option):
    """An option with the default of the run file. Only the help reads it, since it loads torch."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The help text, followed by the default."""
        from embroute.train.run_file import RunFile

        record, default = super().get_help_record(ctx), getattr(RunFile, str(self.name))
        if record is None or default in ("", None):
            return record
        return record[0], f"{record[1]}  [default: {default}]"


@click.command("train")
@click.argument(
    "run_file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--shuffle", is_flag=True, default=None, help="Shuffle every epoch.")
@click.option(
    "--resume", is_flag=True, default=None, help="Continue from the newest checkpoint in --out."
)
@data_options
def train_command(
    data_options: DataOptions,
    /,
    run_file: Path | None,
    shuffle: bool | None,
    resume: bool | None,
    **texts: str | None,
) -> None:
    """Train a model on this machine: a coordinator, shards and workers, each a process.

    RUN_FILE is a YAML file with the same names; an option overrides its key in the file.
    """
    from embroute.launch.supervisor import RunFailedError
    from embroute.train.launcher import launch
    from embroute.train.run_file import RunFile, read_run_file

    run = read_run_file(run_file) if run_file else RunFile()
    kinds = {entry.name: str(entry.type) for entry in fields(RunFile)}
    values: dict[str, object] = {
        name: _value(name, kinds[name], text) for name, text in texts.items() if text is not None
    }
    flags = {"shuffle": shuffle, "resume": resume}
    values |= {name: flag for name, flag in flags.items() if flag is not None}
    changed = data_options.changed()
    if changed:
        values["data_options"] = {**run.data_options, **changed}
    try:
        run = replace(run, **values)  # type: ignore[arg-type]
        if run.tables and not is_file(run.tables):
            raise ValueError(f"--tables must be a file, got {shown(run.tables)}")
        launch(run)
    except RunFailedError as error:
        click.echo(f"embroute: {error}", err=True)
        sys.exit(error.exit_code)
    try:
        with progress_bar("writing the report", None, counted=True):
            write_report(Path(run.out) / "report.html", [Path(run.out)])
    except ValueError as error:  # a report that fails must not fail the finished run
        tell(f"no report: {error}")
    tell_next("embroute", "predict", run.out, "--out", "scores.csv")


def _value(name: str, kind: str, text: str) -> object:
    """The text of an option, converted to the type of its key in the run file."""
    if kind == "str":
        return text
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        expected = "a whole number" if kind == "int" else "a number"
        raise ValueError(f"{option_name(name)} must be {expected}, got {shown(text)}") from None


train_command.params[:0] = [_Option([f"--{name}"], help=text) for name, text in OPTIONS]
