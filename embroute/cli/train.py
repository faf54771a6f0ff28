"""`embroute train`: train a built-in model on this machine, from options or a run file."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from embroute.cli.options import GroupedCommand, given
from embroute.cli.outputs import tell, tell_next
from embroute.cli.report import write_report
from embroute.config.data_options import DataOptions
from embroute.config.option_model import OPTION, as_keys
from embroute.config.progress import progress_bar
from embroute.config.run_file import read_run_file
from embroute.config.run_options import RunConfig


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
        click.echo(f"embroute: {error}", err=True)
        sys.exit(error.exit_code)
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
