"""Start all ranks of a run on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from embroute.checkpoint.folders import check_start, latest_checkpoint, remove_leftovers, step_of
from embroute.checkpoint.locks import FolderLock
from embroute.data.open import check_data
from embroute.launch.supervisor import Program, RunFailedError, StoppedError, supervise
from embroute.nn.job import check_device
from embroute.train.run_file import CHECKPOINTS, RUN_FILE, RunFile
from embroute.transport.job_store import scratch_folder


def launch(run: RunFile) -> None:
    """Run it to the end; a failed rank's reason is in the RunFailedError."""
    layout = run.layout()
    if len(layout.nodes) > 1:
        raise ValueError(
            "the run file names several nodes: start it on each with torchrun --nnodes "
            f"{len(layout.nodes)} --nproc-per-node RANKS ... -m embroute.train FILE"
        )
    check_device(run.device)
    check_data("--data", run.data, run.reading())
    out = _make_folder(run)
    (ranks,) = layout.nodes.values()
    # The run file lies elsewhere: the one in the run's folder may be that of a run before.
    with scratch_folder("run") as scratch:
        path = scratch / RUN_FILE
        run.write(path)
        command = (sys.executable, "-m", "embroute.train", str(path))
        program = Program(command, ranks, run.restarts)
        with FolderLock("--out", out, program.run_id):
            _check_start(run)
            _supervise(program, out / CHECKPOINTS)


def _supervise(program: Program, checkpoints: Path) -> None:
    """Run all ranks; what they leave unfinished does not stay."""
    try:
        supervise(program, lambda: _way_on(checkpoints))
    except StoppedError as error:
        way_on = _way_on(checkpoints, "; --resume goes on from ") or ", before any checkpoint"
        raise RunFailedError(f"{error}{way_on}", error.exit_code) from None
    finally:
        remove_leftovers(checkpoints)


def _way_on(folder: Path, phrase: str = ", from ") -> str:
    """Where a run could go on from, as the end of a sentence."""
    newest = latest_checkpoint(folder)
    return f"{phrase}{newest.name}" if newest else ""


def _make_folder(run: RunFile) -> Path:
    """The folder of a run."""
    out = Path(run.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out}: it cannot be written to")
    return out


def _check_start(run: RunFile) -> None:
    """Refuse a folder with later checkpoints than the run begins with."""
    saved = Path(run.out) / CHECKPOINTS
    newest = latest_checkpoint(saved) if run.resume else None
    try:
        check_start(saved, 0 if newest is None else step_of(newest) or 0)
    except ValueError as error:
        raise ValueError(f"--out {run.out}: {error} (--resume goes on from it)") from None
