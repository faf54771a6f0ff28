"""The result of `prepare`: the job as a user's loop sees it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from embroute.engine.control import gather_from_workers
from embroute.engine.observe.metrics import Meter
from embroute.engine.observe.row_versions import RowVersions
from embroute.engine.shard import Shard
from embroute.launch.process import OWN_ERROR, exit_with_reason, report_end
from embroute.nn.session import WorkerSession


class Loader:
    """A worker's samples, epoch by epoch; empty on ranks that do not train."""

    def __init__(self, session: WorkerSession | None, epochs: int = 1) -> None:
        self._session, self._epochs, self._ended = session, epochs, 0

    def __iter__(self) -> Iterator[object]:
        if self._session is None:
            return
        if self._ended == self._epochs:
            raise ValueError(
                f"epoch {self._ended + 1} was started, but prepare was called with "
                f"epochs={self._epochs}: the coordinator must know how often to read the loader"
            )
        yield from self._session.samples()
        self._ended += 1


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`: `session` on workers, `shard` on shards, and the rank's traffic."""

    model: nn.Module
    optimizer: Optimizer | Sequence[Optimizer]
    loader: Loader
    meter: Meter
    session: WorkerSession | None = None
    shard: Shard | None = None

    def backward(self, loss: torch.Tensor) -> float:
        """Backward pass of the mean loss of this worker's samples; see `WorkerSession.backward`."""
        return self._worker.backward(loss)

    def held_out(self) -> Iterator[object]:
        """This worker's held-out samples; see `WorkerSession.held_out`."""
        return iter(()) if self.session is None else self.session.held_out()

    def stop(self) -> None:
        """Ask for an early end, on any worker: the loop of every worker ends within a few steps.

        Steps that are planned already must still be trained. A checkpoint and an evaluation follow,
        as after the last step.
        """
        self._worker.stop()

    def report_held_out(self, loss: float) -> None:
        """Tell a policy that follows it (`fae`) the mean loss over the held-out samples.

        Call it on the first worker after `held_out()`; other ranks and policies ignore it.
        """
        if self.session is not None:
            self.session.report_held_out(loss)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensors of all workers concatenated, at the first worker; elsewhere None.

        Every worker must call it, at the same point of its loop.
        """
        arrays = gather_from_workers(self._worker.rank, tensor.detach().cpu().numpy())
        return torch.from_numpy(np.concatenate(arrays)) if arrays else None

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation follows this step; see `held_out`."""
        return self.session is not None and self.session.evaluation_due

    @property
    def loss(self) -> float:
        """Mean loss of the last step over all workers' samples."""
        return self._worker.loss

    @property
    def step(self) -> int:
        """Number of this step of the run, from 1; a resumed run goes on counting."""
        current = self._worker.current
        return 0 if current is None else current.step + 1

    @property
    def stamps(self) -> RowVersions | None:
        """With `debug="versions"`: the row versions this rank read and wrote; see `audit`."""
        if self.session is not None:
            return self.session.transfers.store.stamps
        return None if self.shard is None else self.shard.store.stamps

    @property
    def is_first_worker(self) -> bool:
        """Whether this is the rank that should print and write."""
        return self.session is not None and self.session.rank.index == 0

    @property
    def _worker(self) -> WorkerSession:
        if self.session is None:
            raise RuntimeError("only workers train; on this rank the loader is empty")
        return self.session


def check_loop_finished(session: WorkerSession, owns_process: bool) -> None:
    """At the end of a script: report a loop that ended before the job did.

    Other ranks wait for this one, so in an own process it is an error. In a user's process only
    they fail, since the exit code is the user's.
    """
    if hasattr(sys, "last_value") or session.failed:  # an error ended the loop
        return
    if session.final_evaluation:  # the script may ignore it, but other ranks wait for its end
        for _ in session.held_out():
            pass
    if session.finished:
        return
    steps = 0 if session.current is None else session.current.step + 1
    reason = (
        f"the loop was left after {steps} steps, with more to come; to end early, give prepare "
        f"steps=, or call ready.stop() and go on"
    )
    if owns_process:
        exit_with_reason(session.rank.name, reason, OWN_ERROR)
    report_end(f"{session.rank.name}: {reason}")
