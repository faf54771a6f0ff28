"""The command line: `embroute COMMAND`. Users' mistakes end in one line and exit code 2."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

import embroute
from embroute.cli.advise import advise_command
from embroute.cli.checkpoint import checkpoint_group
from embroute.cli.compare import compare_command
from embroute.cli.data import data_group
from embroute.cli.predict import predict_command
from embroute.cli.report import report_command
from embroute.cli.run import run_command
from embroute.cli.simulate import simulate_command
from embroute.cli.train import train_command
from embroute.config.spec import one_line


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(embroute.__version__, prog_name="embroute")
def cli() -> None:
    """Route samples to embeddings, not embeddings to samples."""


cli.add_command(advise_command)
cli.add_command(checkpoint_group)
cli.add_command(compare_command)
cli.add_command(data_group)
cli.add_command(predict_command)
cli.add_command(report_command)
cli.add_command(run_command)
cli.add_command(simulate_command)
cli.add_command(train_command)


def main() -> None:
    """Run the command line; errors a user can mend are told without a traceback."""
    try:
        cli(prog_name="embroute")
    except ValueError as error:
        _fail(str(error), 2)
    except MemoryError as error:
        _fail(f"not enough memory ({error}); a smaller --batch, --dim or --hash-rows needs less", 2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 1)


def _fail(message: str, code: int) -> NoReturn:
    """Say what is wrong, in one line."""
    click.echo(f"embroute: {one_line(message)}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
