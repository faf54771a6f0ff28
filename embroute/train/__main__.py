"""`torchrun ... -m embroute.train run.yaml`: one rank of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from embroute.runtime.connect import connect
from embroute.runtime.exchange import LostPeerError
from embroute.runtime.heartbeat import EXIT_CODE
from embroute.train.rank import train_rank
from embroute.train.run_file import read_run_file


@click.command()
@click.argument("run_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--node", default="", help="This machine's name in the run file [its host name].")
def main(run_file: Path, node: str) -> None:
    """Take part in the run that a file describes; started by torchrun or embroute train."""
    name = "a rank"
    try:
        run = read_run_file(run_file)
        folder = Path(run.out)
        folder.mkdir(parents=True, exist_ok=True)
        with connect(run.layout(), node, run.peer_timeout) as seat:
            name = seat.name
            train_rank(run, seat, folder)
    except ValueError as error:
        click.echo(f"embroute: {name}: {error}", err=True)
        sys.exit(2)
    except LostPeerError as error:
        click.echo(f"embroute: {name}: {error}", err=True)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
