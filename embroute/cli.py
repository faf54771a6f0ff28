"""The command line: `embroute COMMAND`. Users' mistakes end in one line and exit code 2."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

import embroute
from embroute.commands.advise import advise_command
from embroute.commands.checkpoint import checkpoint
from embroute.commands.compare import compare
from embroute.commands.data import data
from embroute.commands.predict import predict
from embroute.commands.report import report
from embroute.commands.run import run_command
from embroute.commands.simulate import simulate_command
from embroute.commands.train import train_command
from embroute.config import one_line


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(embroute.__version__, prog_name="embroute")
def cli() -> None:
    """Route samples to embeddings, not embeddings to samples."""


cli.add_command(advise_command)
cli.add_command(checkpoint)
cli.add_command(compare)
cli.add_command(data)
cli.add_command(predict)
cli.add_command(report)
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
