"""The coordinator: reads the loader, plans step after step, and sends every rank its message."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from embroute.cost.step_time import allreduce_share_W
from embroute.data.batch import Batch
from embroute.engine import step_message
from embroute.engine.batches import BatchAdapter
from embroute.engine.control import receive_replies, send_all
from embroute.engine.observe.baseline import BaselineTraffic
from embroute.engine.observe.metrics import Meter
from embroute.engine.protocol.messages import (
    NO_FIGURES,
    ControlMessage,
    Drain,
    EvalEnd,
    Hello,
    Refill,
    Save,
    Serve,
    StepHeader,
    Stop,
)
from embroute.engine.schedule import TransferTime, refill_schedules, schedule_at
from embroute.engine.sharding import RowSharding
from embroute.kernels.array_types import I64
from embroute.launch.rank import RankContext
from embroute.planner.decide import drain_state
from embroute.planner.interfaces import Policy
from embroute.planner.plan import Plan, row_bytes_W, traffic
from embroute.planner.plan_stream import plans
from embroute.planner.state import State


@dataclass
class RunCounts:
    """What a run has done since it began, also before a resume. Checkpoints save it."""

    samples: int = 0
    row_bytes: int = 0  # drains included; counted if there are figures to display


class CheckpointWriter(Protocol):
    """The coordinator's side of a checkpoint."""

    def save_planner_state(self, state: State, counts: RunCounts) -> None:
        """Write the planner's state before a drain changes it."""

    def finish(self, state: State, counts: RunCounts) -> object:
        """Make the files of all ranks one checkpoint."""


@dataclass(frozen=True)
class EventSchedule:
    """When evaluations, checkpoints and the end follow a step; 0 means never."""

    epochs: int = 1
    steps: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 0


@dataclass
class Coordinator:
    """Plans one job and directs its ranks."""

    rank: RankContext
    policy: Policy
    state: State
    adapter: BatchAdapter
    schedule: EventSchedule
    held_out: Iterable[object] | None = None
    baseline: BaselineTraffic | None = None  # with it, the first worker gets figures to display
    saver: CheckpointWriter | None = None
    counts: RunCounts = field(default_factory=RunCounts)
    stop: threading.Event = field(default_factory=threading.Event)  # asks for an early end
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.sharding = RowSharding(self.state.setup)
        self._epoch_ends: list[int] = []  # samples read when each epoch ended
        self._samples_read = 0
        self._last_saved = self._last_evaluated = -1  # steps
        self._stop_requested = False  # by a worker
        # Bytes of drains since the last step message, in the form of `_figures`. The first message
        # of a resumed run brings all row bytes before it.
        self._drained = np.zeros(self.rank.num_workers + 2, np.int64)
        self._drained[-2] = self.counts.row_bytes

    def run(self, loader: Iterable[object], first_epoch: Iterable[object]) -> None:
        """Direct the ranks from the first batch to the stop."""
        began = time.perf_counter()
        for step in plans(self.policy, self._batches(loader, first_epoch), self.state):
            write_began = time.perf_counter()
            shards, workers = step_message.step_messages(
                step.plan,
                self.sharding,
                self.adapter,
                self._flags(step.plan),
                self._figures(step.plan),
            )
            self.meter.seconds["decide"] += step.decision_s + step.window_s
            self.meter.seconds["write"] += time.perf_counter() - write_began
            self._send([*shards, *workers])
            self.meter.steps += 1
            self._after_step(step.plan.step + 1)
            if self._ends_after(step.plan.step + 1):
                break
        self.meter.seconds["run"] += time.perf_counter() - began
        self._end()
        if self._last_evaluated != self.state.step and not self.stop.is_set():
            self._evaluate(step_message.FINAL_EVAL)
        first = self.rank.workers[0]
        figures = [self._drained if peer == first else NO_FIGURES for peer in self.rank.peers]
        self._send([Stop(self.state.step, numbers) for numbers in figures])

    def _end(self) -> None:
        """The last drain and checkpoint.

        A run that continues later must find the plans as they were before this drain, which no
        schedule asked for. With an exact policy, a copy that counts as dirty may be clean already:
        any later push of it is at least as new as the shard's row.
        """
        unscheduled = self._last_saved != self.state.step
        if unscheduled and self.saver is not None and self.policy.exact:
            self.saver.save_planner_state(self.state, self.counts)
        self._drain()
        if unscheduled:
            self._save()

    def greet(self, spec: str) -> None:
        """Send all ranks the shape of batches."""
        self._send([Hello(spec) for _ in self.rank.peers])

    def _batches(self, loader: Iterable[object], first_epoch: Iterable[object]) -> Iterator[Batch]:
        for epoch in range(self.schedule.epochs):
            for item in first_epoch if epoch == 0 else loader:
                batch = self.adapter.batch(item)
                self._samples_read += len(batch)
                yield batch
            self._epoch_ends.append(self._samples_read)

    def _send(self, messages: Sequence[ControlMessage]) -> None:
        """Send each peer its message, and note a worker's request to stop."""
        began = time.perf_counter()
        delivery = send_all(self.rank.control, list(zip(self.rank.peers, messages, strict=True)))
        self._stop_requested = self._stop_requested or delivery.stop_requested
        self.meter.other_bytes["notes"] += delivery.nbytes
        self.meter.seconds["tell"] += time.perf_counter() - began

    def _flags(self, plan: Plan) -> int:
        """Flags of a step for the user's loop."""
        before = self.counts.samples
        self.counts.samples += len(plan.now.batch)
        flags = step_message.EVAL_FOLLOWS if self._evaluates_after(plan.step + 1) else 0
        # The end of the last epoch has no flag: a checkpoint or an evaluation may follow it.
        ends = self._epoch_ends[: self.schedule.epochs - 1]
        ended = any(before < end <= self.counts.samples for end in ends)
        return flags | (step_message.EPOCH_ENDS if ended else 0)

    def _figures(self, plan: Plan) -> I64:
        """Bytes over each worker's link, all row bytes, and the baseline policy's row bytes.

        Drains since the last step count too. Without a baseline there are no figures.
        """
        if self.baseline is None:
            return NO_FIGURES
        moved, cluster = traffic(plan, self.state.setup), self.state.setup.cluster
        reduced_W = moved.hot_bytes * allreduce_share_W(cluster, with_rows=True)
        link_W = moved.bytes_WKIP.sum((1, 2, 3)) + moved.sample_bytes_W + moved.plan_bytes_W
        link_W += np.rint(reduced_W).astype(np.int64)
        rows = int(moved.bytes_WKIP.sum()) + round(float(reduced_W.sum()))
        self.counts.row_bytes += rows
        drained, self._drained = self._drained, np.zeros_like(self._drained)
        return np.array([*link_W, rows, self.baseline.step(plan.now)], np.int64) + drained

    def _ends_after(self, done: int) -> bool:
        stops = self.stop.is_set() or self._stop_requested
        return stops or done == self.schedule.steps

    def _evaluates_after(self, done: int) -> bool:
        every = self.schedule.evaluate_every
        return self.held_out is not None and every > 0 and done % every == 0

    def _after_step(self, done: int) -> None:
        """Checkpoint and evaluation, if the schedule puts them after this step."""
        saves = self.schedule.checkpoint_every > 0 and done % self.schedule.checkpoint_every == 0
        if saves or self._evaluates_after(done):
            self._drain()
        if self._evaluates_after(done):
            self._evaluate(0)
            self._learn_loss()
        if saves:  # with what has been learned from the evaluation
            self._save()

    def _drain(self) -> None:
        """Push every update to its shard; copies stay in the caches, clean."""
        transfers = drain_state(self.policy, self.state)
        if self.baseline is not None:
            link_W = row_bytes_W(transfers, self.state.setup)
            self.counts.row_bytes += int(link_W.sum())
            self._drained += [*link_W, link_W.sum(), self.baseline.drain()]
        shards, workers = schedule_at(TransferTime.URGENT_PUSH, transfers, self.sharding)
        self._send([Drain(self.state.step, pushes) for pushes in (*shards, *workers)])

    def _save(self) -> None:
        """Let every rank write its part of a checkpoint, then complete the checkpoint."""
        if self.saver is None:
            return
        self._last_saved = self.state.step
        self._send([Save(self.state.step) for _ in self.rank.peers])
        began = time.perf_counter()
        self.saver.finish(self.state, self.counts)
        self.meter.seconds["save"] += time.perf_counter() - began

    def refill(self) -> None:
        """Put the copies of a loaded state back into the workers' caches."""
        step = self.state.step
        for shards, workers in refill_schedules(self.state, self.sharding):
            served = [Serve(step, pulls) for pulls in shards]
            self._send([*served, *(Refill(step, pulls) for pulls in workers)])

    def _learn_loss(self) -> None:
        """Let a policy that follows the held-out loss learn it, if the user's loop reports one."""
        regroup = self.policy.regroup
        if regroup is None or regroup.learn_loss is None:
            return
        (loss,) = receive_replies(self.rank.replies, self.rank.workers[:1])
        if isinstance(loss, float):
            regroup.learn_loss(self.state, loss)

    def _evaluate(self, flags: int) -> None:
        """Send the held-out batches to all workers."""
        if self.held_out is None:
            return
        self._last_evaluated = self.state.step
        header = StepHeader(self.state.step, 0, 0, flags)
        for item in self.held_out:
            shards, workers = step_message.evaluation_messages(
                self.adapter.batch(item), header, self.sharding, self.adapter
            )
            self._send([*shards, *workers])
        self._send([EvalEnd(self.state.step) for _ in self.rank.peers])
