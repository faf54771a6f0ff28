"""Start all ranks of a run on this machine, through torch's own elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from embroute.runtime.heartbeat import EXIT_CODE
from embroute.train.run_file import RunFile

RUN_FILE = "run.yaml"
SAVING_S = 3600  # for the checkpoint after a SIGTERM
_FOLLOWERS = (EXIT_CODE, -signal.SIGTERM)


def launch(run: RunFile, restarts: int) -> None:
    """Run it to the end; what a failed rank said is on the terminal already."""
    layout = run.layout()
    if len(layout.nodes) > 1:
        raise ValueError(
            "the run file names several nodes: start it on each with torchrun --nnodes "
            f"{len(layout.nodes)} --nproc-per-node RANKS ... -m embroute.train FILE"
        )
    folder = Path(run.out)
    folder.mkdir(parents=True, exist_ok=True)
    run.write(folder / RUN_FILE)
    (ranks,) = layout.nodes.values()
    # One thread per rank: several ranks share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # After a SIGTERM torch kills ranks that have not ended in time; a checkpoint may take longer
    # than its 30 seconds. By a variable, because older versions have no such option.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
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
        elastic_launch(config, sys.executable)("-m", "embroute.train", str(folder / RUN_FILE))
    except SignalException as error:
        raise RunFailedError(
            f"stopped by {error.sigval.name}; go on from its checkpoint with --resume",
            128 + error.sigval,
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


class RunFailedError(RuntimeError):
    """A run that did not come to its end; no rank is left."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
