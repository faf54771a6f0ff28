"""`embroute run`: start all ranks of a training script on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("run", context_settings={"ignore_unknown_options": True})
@click.option(
    "--workers", type=click.IntRange(1), default=2, show_default=True, help="Number of workers."
)
@click.option(
    "--shards",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of parameter shards.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Restarts after a failure, at most; the script continues only with resume=True.",
)
@click.option("--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    workers: int, shards: int, restarts: int, module: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT as a coordinator, shards and workers, each a process of this machine.

    The script calls embroute.prepare. Unlike torchrun, no process listens on a network.
    """
    from embroute.launch.supervisor import Program, RunFailedError, script_ranks, supervise

    if not module and not Path(script).is_file():
        raise ValueError(f"SCRIPT {script}: no such file")
    command = [sys.executable, *(["-m"] if module else []), script, *arguments]
    ranks, environment = script_ranks(workers, shards)
    try:
        supervise(Program(command, ranks, restarts, environment=environment))
    except RunFailedError as error:
        click.echo(f"embroute: {error}", err=True)
        sys.exit(error.exit_code)
