"""Start all ranks of a run on this machine, through torch's own elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from embroute.data.open import check_data
from embroute.runtime.checkpoint_files import check_start, latest, step_of
from embroute.runtime.ending import TRY_AGAIN
from embroute.runtime.job import check_device
from embroute.train.run_file import CHECKPOINTS, RUN_FILE, RunFile

SAVING_S = 3600  # for the checkpoint after a SIGTERM
_FOLLOWERS = (TRY_AGAIN, -signal.SIGTERM)


def launch(run: RunFile, restarts: int) -> None:
    """Run it to the end; what a failed rank said is on the terminal already."""
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
    # One thread per rank: several ranks share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # After a SIGTERM torch kills ranks that have not ended in time; a checkpoint may take longer
    # than its 30 seconds. By a variable, because older versions have no such option.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    for name in ("torch.distributed", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # ranks speak for themselves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(ranks),
        run_id="embroute",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.2,
    )
    try:
        with TemporaryDirectory() as scratch:  # the folder's own may be that of a run before
            path = Path(scratch) / RUN_FILE
            run.write(path)
            elastic_launch(config, sys.executable)("-m", "embroute.train", str(path))
    except SignalException as error:
        kept = latest(Path(run.out) / CHECKPOINTS)
        way_on = f"; --resume goes on from {kept.name}" if kept else ", before any checkpoint"
        raise RunFailedError(
            f"stopped by {error.sigval.name}{way_on}", 128 + error.sigval
        ) from None
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        # Who lost a peer, or was stopped by the launcher, ended because of another.
        first = next((f for f in failures if f.exitcode not in _FOLLOWERS), failures[0])
        how = f"exit code {first.exitcode}" if first.exitcode >= 0 else f"signal {-first.exitcode}"
        raise RunFailedError(
            f"the run failed: {ranks[first.local_rank]} ended first ({how})",
            first.exitcode if first.exitcode > 0 else 128 - first.exitcode,
        ) from None


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


class RunFailedError(RuntimeError):
    """A run that did not come to its end; no rank is left."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
