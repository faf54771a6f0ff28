"""`torchrun ... -m embroute.train run.yaml`: one rank of a run."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import click

from embroute.runtime.connect import connect
from embroute.runtime.ending import TRY_AGAIN, end
from embroute.runtime.exchange import LostPeerError
from embroute.train.rank import train_rank, write_record
from embroute.train.run_file import read_run_file


def _heed_sigterm(name: str) -> threading.Event:
    """The coordinator ends the run for everyone, after a checkpoint; the others wait for it."""
    stop = threading.Event()
    heed = (lambda *_: stop.set()) if name == "coordinator" else signal.SIG_IGN
    signal.signal(signal.SIGTERM, heed)
    return stop


@click.command()
@click.argument("run_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--node-name", "node", default="", help="This machine in the run file [its host].")
def main(run_file: Path, node: str) -> None:
    """Take part in the run that a file describes; started by torchrun or embroute train."""
    name = "a rank"
    try:
        run = read_run_file(run_file)
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            run = replace(run, resume=True)
        folder = Path(run.out)
        folder.mkdir(parents=True, exist_ok=True)
        with connect(run.layout(), node, run.peer_timeout) as seat:
            name = seat.name
            ready = train_rank(run, seat, folder, _heed_sigterm(name))
            write_record(folder, name, ready)
    except ValueError as error:
        end(name, str(error), 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        end(name, f"{where}{error.strerror or error}", 1)
    except LostPeerError as error:
        end(name, str(error), TRY_AGAIN)
    except Exception:
        traceback.print_exc()
        end(name, "ended by an error of its own, above", 70)


if __name__ == "__main__":
    main()
