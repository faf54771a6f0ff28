"""Start all ranks of a run on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from embroute.data.open import check_data
from embroute.runtime.checkpoint_files import check_start, latest, step_of
from embroute.runtime.job import check_device
from embroute.runtime.scratch import scratch_folder
from embroute.runtime.supervisor import Program, RunFailedError, StoppedError, supervise
from embroute.train.run_file import CHECKPOINTS, RUN_FILE, RunFile


def launch(run: RunFile, restarts: int) -> None:
    """Run it to the end; a failed rank's reason is in the RunFailedError."""
    layout = run.layout()
    if len(layout.nodes) > 1:
        raise ValueError(
            "the run file names several nodes: start it on each with torchrun --nnodes "
            f"{len(layout.nodes)} --nproc-per-node RANKS ... -m embroute.train FILE"
        )
    check_device(run.device)
    check_data("--data", run.data, run.reading())
    _make_folder(run)
    (ranks,) = layout.nodes.values()
    checkpoints = Path(run.out) / CHECKPOINTS
    with scratch_folder("run") as folder:  # the run's own may be that of a run before
        path = folder / RUN_FILE
        run.write(path)
        command = (sys.executable, "-m", "embroute.train", str(path))
        try:
            supervise(Program(command, ranks, restarts), lambda: _way_on(checkpoints))
        except StoppedError as error:
            way_on = _way_on(checkpoints, "; --resume goes on from ") or ", before any checkpoint"
            raise RunFailedError(f"{error}{way_on}", error.exit_code) from None


def _way_on(folder: Path, phrase: str = ", from ") -> str:
    """Where a run could go on from, as the end of a sentence."""
    newest = latest(folder)
    return f"{phrase}{newest.name}" if newest else ""


def _make_folder(run: RunFile) -> None:
    """The folder of a run; one with later checkpoints than the run begins with is refused."""
    try:
        Path(run.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {run.out}: {error.strerror}") from None
    if not os.access(run.out, os.W_OK | os.X_OK):
        raise ValueError(f"--out {run.out}: it cannot be written to")
    saved = Path(run.out) / CHECKPOINTS
    newest = latest(saved) if run.resume else None
    try:
        check_start(saved, 0 if newest is None else step_of(newest) or 0)
    except ValueError as error:
        raise ValueError(f"--out {run.out}: {error} (--resume goes on from it)") from None
