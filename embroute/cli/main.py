"""The command line: `embroute COMMAND`. Users' mistakes end in one line and exit code 2."""

from __future__ import annotations

import sys
import traceback
from functools import cache
from importlib import import_module
from typing import NoReturn

import click

import embroute
from embroute.config.progress import progress_mode
from embroute.config.spec import one_line

# Each command: its name, its object in the module `embroute.cli.NAME`, its short help.
COMMANDS = (
    ("advise", "advise_command", "Recommend a policy, a batch, a cache and which workers to use."),
    ("checkpoint", "checkpoint_group", "Look into checkpoints, and take tables out of them."),
    ("compare", "compare_command", "Price policies on your data and network, without training."),
    ("data", "data_group", "Look at data sets."),
    (
        "predict",
        "predict_command",
        "Score samples with the newest checkpoint of RUN, a folder that `embroute train` made.",
    ),
    (
        "report",
        "report_command",
        "Compare finished runs: their folders, as `embroute train --out` made them.",
    ),
    (
        "run",
        "run_command",
        "Run SCRIPT as a coordinator, shards and workers, each a process of this machine.",
    ),
    ("schema", "schema_command", "Print the JSON schema of run files, for editors."),
    (
        "simulate",
        "simulate_command",
        "Simulate one policy: its sums, and how its steps differ.",
    ),
    (
        "train",
        "train_command",
        "Train a model on this machine: a coordinator, shards and workers, each a process.",
    ),
)
# Commands that stand in the module of another one.
_MODULES = {"schema": "train", "run": "train", "simulate": "compare", "predict": "report"}
_ATTRIBUTES = {name: attribute for name, attribute, _ in COMMANDS}


@cache
def load_command(name: str) -> click.Command:
    """The command of this name, imported now."""
    module = import_module(f"embroute.cli.{_MODULES.get(name, name)}")
    command: click.Command = getattr(module, _ATTRIBUTES[name])
    leaves = command.commands.values() if isinstance(command, click.Group) else [command]
    for leaf in leaves:
        leaf.params.append(_quiet_option())
    return command


def _quiet_option() -> click.Option:
    return click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_hush,
        help="Print only errors, and results that go to `-`.",
    )


def _hush(context: click.Context, _: click.Parameter, quiet: bool) -> None:
    if quiet:
        context.with_resource(progress_mode("none"))


class _LazyGroup(click.Group):
    """A group that imports a command when it runs: numba and polars take seconds to load.

    The group lists commands with names and help only, so help and completion import nothing.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The real command in place of the listed one."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if command is None else load_command(str(command.name)), rest


@click.group(
    cls=_LazyGroup,
    commands=[click.Command(name, help=text) for name, _, text in COMMANDS],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(embroute.__version__, prog_name="embroute")
@click.pass_context
def cli(context: click.Context) -> None:
    """Route samples to embeddings, not embeddings to samples."""
    context.with_resource(progress_mode("lines"))


def main() -> None:
    """Run the command line; an error that the user can correct is shown without a traceback."""
    try:
        sys.exit(cli(prog_name="embroute", standalone_mode=False))
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except click.Abort:
        _fail("aborted", 1)
    except ValueError as error:
        _fail(str(error), 2)
    except MemoryError as error:
        _fail(f"not enough memory ({error}); a smaller --batch, --dim or --hash-rows needs less", 2)
    except RuntimeError as error:
        from embroute.launch.process import FAULT
        from embroute.planner.state import PlanError  # imports numba

        if not isinstance(error, PlanError):
            raise
        if error.__cause__ is not None:  # with the frames of the user's part
            traceback.print_exception(error.__cause__, chain=False)
        _fail(str(error), FAULT)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 1)


def _fail(message: str, code: int) -> NoReturn:
    """Print the error in one line and exit."""
    click.echo(f"embroute: {one_line(message)}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
