"""`embroute train` on one machine: start all ranks of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from embroute.checkpoint.folders import check_start, latest_checkpoint, remove_leftovers, step_of
from embroute.checkpoint.locks import FolderLock
from embroute.config.progress import is_quiet
from embroute.config.run_file import CHECKPOINTS, RUN_FILE, write_run_file
from embroute.config.run_options import RunConfig
from embroute.config.scratch import scratch_folder
from embroute.data.open import check_data
from embroute.launch.supervisor import Program, RunFailedError, StoppedError, supervise
from embroute.nn.job import check_device
from embroute.train.run_ranks import check_run, topology_of


def launch(run: RunConfig) -> None:
    """Run to the end; RunFailedError has the reason of a failed rank."""
    check_run(run)
    topology = topology_of(run)
    if len(topology.nodes) > 1:
        raise ValueError(
            "the run file names several nodes: start it on each with torchrun --nnodes "
            f"{len(topology.nodes)} --nproc-per-node RANKS ... -m embroute.train FILE"
        )
    check_device(run.device)
    note = check_data("--data", run.data, run.data_options)
    if note and not is_quiet():
        print(note, file=sys.stderr)
    out = _make_folder(run)
    (ranks,) = topology.nodes.values()
    # The ranks read a scratch copy: the folder may hold the run file of an earlier run.
    with scratch_folder("run") as scratch:
        path = scratch / RUN_FILE
        write_run_file(run, path)
        command = (sys.executable, "-m", "embroute.train", str(path))
        starting = "" if is_quiet() else f"starting {', '.join(ranks)}"
        quiet = ("--quiet",) if is_quiet() else ()
        program = Program((*command, *quiet), ranks, run.restarts, starting=starting)
        with FolderLock("--out", out, program.run_id):
            _check_start(run)
            _supervise(program, out / CHECKPOINTS)


def _supervise(program: Program, checkpoints: Path) -> None:
    """Run all ranks; at the end, remove unfinished checkpoints."""
    try:
        supervise(program, lambda: _newest(checkpoints, ", from "))
    except StoppedError as error:
        hint = _newest(checkpoints, "; --resume goes on from ") or ", before any checkpoint"
        raise RunFailedError(f"{error}{hint}", error.exit_code) from None
    finally:
        remove_leftovers(checkpoints)


def _newest(folder: Path, phrase: str) -> str:
    """The end of a sentence, with the newest checkpoint; empty if there is none."""
    newest = latest_checkpoint(folder)
    return f"{phrase}{newest.name}" if newest else ""


def _make_folder(run: RunConfig) -> Path:
    out = Path(run.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out}: it cannot be written to")
    return out


def _check_start(run: RunConfig) -> None:
    """Refuse a folder with checkpoints later than the start of the run."""
    saved = Path(run.out) / CHECKPOINTS
    newest = latest_checkpoint(saved) if run.resume else None
    try:
        check_start(saved, 0 if newest is None else step_of(newest) or 0)
    except ValueError as error:
        raise ValueError(f"--out {run.out}: {error} (--resume goes on from it)") from None
