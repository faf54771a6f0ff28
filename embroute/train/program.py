"""The process of a rank: signals, errors and exit codes."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click

from embroute.checkpoint.locks import FolderLock
from embroute.config.progress import progress_mode
from embroute.launch.process import (
    BAD_INPUT,
    FAULT,
    TRY_AGAIN,
    error_line,
    exit_code_of,
    exit_with_reason,
    tune_process,
)
from embroute.launch.rank import COORDINATOR, RankContext
from embroute.launch.rendezvous import connect
from embroute.planner.state import PlanError
from embroute.train.loop import train_rank, write_record
from embroute.train.run_ranks import open_run, topology_of
from embroute.transport.interface import LostPeerError, MessageError
from embroute.transport.job_store import FOLDER, attempt, new_run_id

AGAIN_S = 1.0  # within it, a second SIGINT is the launcher's copy of the terminal's Ctrl-C


class SignalHandler:
    """SIGTERM and Ctrl-C ask for a checkpoint and an early end, which the coordinator decides.

    A second Ctrl-C, or one before the run has begun, ends the rank at once.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._begun, self._interrupted = False, 0.0
        signal.signal(signal.SIGINT, self._interrupt)

    def begin(self) -> threading.Event:
        """Handle signals gently from now on; returns the event that asks for the end."""
        self._begun = True
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        return self.stop

    def _interrupt(self, *_: object) -> None:
        now = time.monotonic()
        self._interrupted = self._interrupted or now
        if not self._begun or now - self._interrupted > AGAIN_S:
            os._exit(128 + signal.SIGINT)
        self.stop.set()


def _locked(folder: Path, rank: RankContext) -> AbstractContextManager[object]:
    """Lock the run's folder at the coordinator, unless `embroute train` has locked it already."""
    if FOLDER in os.environ or rank.name != COORDINATOR:
        return nullcontext()
    return FolderLock("--out", folder, new_run_id())


@click.command()
@click.argument("run_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--node-name", "node", default="", help="This machine in the run file [its host].")
@click.option("--quiet", is_flag=True, help="Print no progress.")
@click.pass_context
def rank_main(context: click.Context, run_file: Path, node: str, quiet: bool) -> None:
    """Take part in the run that a file describes; started by torchrun or embroute train."""
    if quiet:
        context.with_resource(progress_mode("none"))
    name, signals = "a rank", SignalHandler()
    try:
        run = open_run(run_file)
        if attempt():
            run = run.replace(resume=True)
        folder = Path(run.out)
        folder.mkdir(parents=True, exist_ok=True)
        ranks, timeout_s = topology_of(run), run.peer_timeout
        joined = connect(ranks, node, timeout_s, run.transport, owns_process=True)
        with joined as rank, _locked(folder, rank):
            name = rank.name
            tune_process(name)
            ready = train_rank(run, rank, folder, signals.begin())
            write_record(folder, name, ready)
    except ValueError as error:
        exit_with_reason(name, str(error), BAD_INPUT)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        exit_with_reason(name, f"{where}{error.strerror or error}", exit_code_of(error))
    except (LostPeerError, MessageError) as error:
        exit_with_reason(name, str(error), TRY_AGAIN)
    except PlanError as error:
        # The cause has the frames of the user's part; those of the package say nothing more.
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__, chain=False)
        exit_with_reason(name, str(error), FAULT)
    except Exception as error:
        traceback.print_exc()
        exit_with_reason(name, error_line(error), FAULT)
