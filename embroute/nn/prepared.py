"""What `prepare` gives back: the job as a user's loop sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from embroute.engine.observe.gather import gather_from_workers
from embroute.engine.observe.metrics import Meter
from embroute.engine.observe.row_versions import RowVersions
from embroute.engine.shard import Shard
from embroute.launch.exit import OWN_ERROR, exit_with_reason
from embroute.nn.session import WorkerSession


class Loader:
    """A worker's samples, epoch by epoch; empty on ranks that do not train."""

    def __init__(self, run: WorkerSession | None, epochs: int = 1) -> None:
        self._run, self._epochs, self._ended = run, epochs, 0

    def __iter__(self) -> Iterator[object]:
        if self._run is None:
            return
        if self._ended == self._epochs:
            raise ValueError(
                f"epoch {self._ended + 1} was begun, and prepare was told epochs={self._epochs}: "
                f"the coordinator has to know how often it reads the loader"
            )
        yield from self._run.samples()
        self._ended += 1


@dataclass(frozen=True)
class Prepared:
    """What `prepare` gives back: `run` on workers, `shard` on shards, and what the rank moved."""

    model: nn.Module
    optimizer: Optimizer | Sequence[Optimizer]
    loader: Loader
    meter: Meter
    session: WorkerSession | None = None
    shard: Shard | None = None

    def backward(self, loss: torch.Tensor) -> float:
        """Backward pass of the mean loss of this worker's samples; see `Run.backward`."""
        return self._worker.backward(loss)

    def held_out(self) -> Iterator[object]:
        """This worker's held-out samples; see `Run.held_out`."""
        return iter(()) if self.session is None else self.session.held_out()

    def stop(self) -> None:
        """Ask for an early end, on any worker: the loop ends within a few steps, on all of them.

        Those that are planned already must still be trained. A checkpoint and an evaluation follow
        as they do after the last step.
        """
        self._worker.stop()

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """All workers' tensors one after the other, at the first worker; elsewhere None.

        Every worker must call it, at the same point of its loop.
        """
        parts = gather_from_workers(self._worker.rank, own.detach().cpu().numpy())
        return torch.from_numpy(np.concatenate(parts)) if parts else None

    @property
    def evaluation_due(self) -> bool:
        """Whether the held-out data follows this step."""
        return self.session is not None and self.session.evaluation_due

    @property
    def loss(self) -> float:
        """Mean loss of the last step over all workers' samples."""
        return self._worker.loss

    @property
    def stamps(self) -> RowVersions | None:
        """With `debug="versions"`: what this rank read, updated or took in; see `audit`."""
        store = (
            self.session.rows.store if self.session else self.shard.store if self.shard else None
        )
        return None if store is None else store.stamps

    @property
    def is_first_worker(self) -> bool:
        """Whether this is the rank that should print and write."""
        return self.session is not None and self.session.rank.index == 0

    @property
    def _worker(self) -> WorkerSession:
        if self.session is None:
            raise RuntimeError("only workers train; on this rank the loader is empty")
        return self.session


def check_loop_finished(run: WorkerSession) -> None:
    """At the end of a script: to leave the loop alone, while all others go on, is a mistake.

    Not to look at the last evaluation is none.
    """
    if run.final_evaluation:
        for _ in run.held_out():
            pass
    if not run.finished:
        step = 0 if run.work is None else run.work.step + 1
        way_out = "to end early, give prepare max_steps=, or call ready.stop() and go on"
        exit_with_reason(
            run.rank.name,
            f"the loop was left after {step} steps, with more to come; {way_out}",
            OWN_ERROR,
        )
