"""`embroute train` and `embroute run`: all ranks of a built-in model, or of a script, here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from embroute.cli.options import GroupedCommand, given
from embroute.cli.outputs import tell, tell_next
from embroute.cli.report import write_report
from embroute.config.data_options import DataOptions
from embroute.config.option_model import OPTION, as_keys
from embroute.config.progress import progress_bar
from embroute.config.run_file import read_run_file
from embroute.config.run_options import RunConfig

if TYPE_CHECKING:
    from embroute.launch.supervisor import RunFailedError

_C = TypeVar("_C", bound=Callable[..., Any])


@click.command("train", cls=GroupedCommand)
@click.argument(
    "run_file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@given(RunConfig)
@given(DataOptions)
def train_command(
    data_values: dict[str, object], values: dict[str, object], /, run_file: Path | None
) -> None:
    """Train a model on this machine: a coordinator, shards and workers, each a process.

    RUN_FILE is a YAML file with the same names; an option overrides its key in the file.
    """
    run = read_run_file(run_file) if run_file else RunConfig()
    run = run.replace(**values, data_options=run.data_options.replace(**data_values))
    from embroute.launch.supervisor import RunFailedError  # loads torch
    from embroute.train.launcher import launch

    try:
        launch(run)
    except RunFailedError as error:
        _exit_failed(error)
    except ValueError as error:
        raise ValueError(_named(str(error), run_file, {*values, *data_values})) from None
    try:
        with progress_bar("writing the report", None, counted=True):
            write_report(Path(run.out) / "report.html", [Path(run.out)])
    except ValueError as error:  # a report that fails must not fail the finished run
        tell(f"no report: {error}")
    tell_next("embroute", "predict", run.out, "--out", "scores.csv")


def _named(message: str, run_file: Path | None, given_names: set[str]) -> str:
    """A message that names an option as the user wrote it: on the command line or in the file."""
    option = OPTION.search(message)
    if run_file is None or option is None or option[1].replace("-", "_") in given_names:
        return message
    return f"{run_file}: {as_keys(message)}"


@click.command("schema")
def schema_command() -> None:
    """Print the JSON schema of run files, for editors.

    For example, `embroute schema > run.schema.json`.
    """
    import json

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    click.echo(json.dumps(schema | RunConfig.model_json_schema(), indent=2))


def _exit_failed(error: RunFailedError) -> NoReturn:
    """Print why a job failed, and end with the code of the rank that failed first."""
    click.echo(f"embroute: {error}", err=True)
    sys.exit(error.exit_code)


def _count(name: str, least: int, default: int, text: str) -> Callable[[_C], _C]:
    """An option for a number of something."""
    kind = click.IntRange(least)
    return click.option(name, type=kind, default=default, show_default=True, help=text)


# Options behind SCRIPT are the script's own, also those that this command has too.
@click.command("run", context_settings={"allow_interspersed_args": False})
@_count("--workers", 1, 2, "Number of workers.")
@_count("--shards", 1, 1, "Number of parameter shards.")
@_count("--restarts", 0, 0, "Restarts after a failure, at most; the script needs resume=True.")
@click.option("--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    workers: int, shards: int, restarts: int, module: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT as a coordinator, shards and workers, each a process of this machine.

    Options of this command stand before SCRIPT; all behind it belong to the script. The script
    calls embroute.prepare. Unlike torchrun, no process listens on a network.
    """
    from embroute.launch.supervisor import Program, RunFailedError, script_ranks, supervise

    if not module and not Path(script).is_file():
        raise ValueError(f"SCRIPT {script}: no such file")
    words = [*(["-m"] if module else []), script, *arguments]
    ranks, environment = script_ranks(workers, shards)
    try:
        supervise(Program([sys.executable, *words], ranks, restarts, environment=environment))
    except RunFailedError as error:
        _exit_failed(error)
    # The same ranks; with --nnodes on several machines.
    tell_next("torchrun", "--nproc-per-node", str(len(ranks)), *words)
