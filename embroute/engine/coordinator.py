"""The coordinator: reads the loader, decides step after step, and tells every rank its part."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from embroute.cost.step_time import allreduce_share_W
from embroute.data.batch import Batch
from embroute.engine.batches import BatchAdapter
from embroute.engine.control import (
    DRAIN,
    EVAL_BATCH,
    EVAL_END,
    HELLO,
    REFILL,
    SAVE,
    STEP,
    STOP,
    send_all,
)
from embroute.engine.observe.baseline import BaselineTraffic
from embroute.engine.observe.metrics import Meter
from embroute.engine.schedule import drain_schedule, refill_schedules
from embroute.engine.sharding import RowSharding
from embroute.engine.step_message import (
    EPOCH_ENDS,
    EVAL_FOLLOWS,
    FINAL_EVAL,
    StepHeader,
    evaluation_messages,
    step_messages,
)
from embroute.kernels.array_types import I64, Array
from embroute.launch.rank import RankContext
from embroute.planner.decide import drain_state
from embroute.planner.interfaces import Policy
from embroute.planner.plan import Plan, row_bytes_W, traffic
from embroute.planner.plan_stream import plans
from embroute.planner.state import State


class CheckpointWriter(Protocol):
    """The coordinator's side of a checkpoint."""

    def save_planner_state(self, state: State, samples: int) -> None:
        """Write the planner's state before a drain changes it."""

    def finish(self, state: State, samples: int) -> object:
        """Make the files of all ranks one checkpoint."""


@dataclass(frozen=True)
class EventSchedule:
    """When something else than a step happens; 0 is never."""

    epochs: int = 1
    max_steps: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 0


@dataclass
class Coordinator:
    """One job's brain at work."""

    rank: RankContext
    policy: Policy
    state: State
    adapter: BatchAdapter
    schedule: EventSchedule
    held_out: Iterable[object] | None = None
    baseline: BaselineTraffic | None = (
        None  # of another policy; with it figures are sent to who watches
    )
    saver: CheckpointWriter | None = None
    samples_trained: int = 0  # in all, those before a resume included
    stop: threading.Event = field(default_factory=threading.Event)  # asks for an early end
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.sharding = RowSharding(self.state.setup)
        self._epoch_ends: list[int] = []  # samples read when each epoch ended
        self._samples_read = 0
        self._saved = self._looked = -1  # the last step after which it was done
        self._enough = False  # whether a worker asks for an early end
        # What drains have moved since the last step that was told, as `_figures` gives it.
        self._drained = np.zeros(self.rank.num_workers + 2, np.int64)

    def run(self, loader: Iterable[object], first_epoch: Iterable[object]) -> None:
        """Tell the ranks everything, from the first batch to the stop."""
        began = time.perf_counter()
        for step in plans(self.policy, self._batches(loader, first_epoch), self.state):
            written = time.perf_counter()
            shards, workers = step_messages(
                step.plan, self.sharding, self.adapter, self._flags(step.plan)
            )
            if self.baseline is not None:
                workers[0][-1] = self._figures(step.plan, self.baseline) + self._drained
                self._drained = np.zeros_like(self._drained)
            self.meter.seconds["decide"] += step.decision_s + step.window_s
            self.meter.seconds["write"] += time.perf_counter() - written
            self._tell(STEP, [*shards, *workers])
            self.meter.steps += 1
            self._events(step.plan.step + 1)
            if self._ends_after(step.plan.step + 1):
                break
        self.meter.seconds["run"] += time.perf_counter() - began
        self._end()
        if self._looked != self.state.step and not self.stop.is_set():
            self._look(FINAL_EVAL)
        farewell: list[list[Array]] = [[] for _ in self.rank.peers]
        farewell[self.rank.num_shards] = [self._drained]  # the first worker's
        self._tell(STOP, farewell)

    def _end(self) -> None:
        """The last drain and checkpoint.

        A run that goes on later must find the plans as they would be without this drain, which no
        schedule asked for. A copy that is home and still counts as dirty is right with an exact
        policy: whatever is pushed later is at least as new.
        """
        unscheduled = self._saved != self.state.step
        if unscheduled and self.saver is not None and self.policy.exact:
            self.saver.save_planner_state(self.state, self.samples_trained)
        self._drain()
        if unscheduled:
            self._save()

    def greet(self, shape: str) -> None:
        """Tell the ranks what batches look like."""
        self._tell(HELLO, [[np.frombuffer(shape.encode(), np.uint8)] for _ in self.rank.peers])

    def _batches(self, loader: Iterable[object], first_epoch: Iterable[object]) -> Iterator[Batch]:
        for epoch in range(self.schedule.epochs):
            for item in first_epoch if epoch == 0 else loader:
                batch = self.adapter.batch(item)
                self._samples_read += len(batch)
                yield batch
            self._epoch_ends.append(self._samples_read)

    def _tell(self, verb: int, messages: Sequence[Sequence[Array]]) -> None:
        began = time.perf_counter()
        peers = list(zip(self.rank.peers, messages, strict=True))
        told = send_all(self.rank.control, verb, peers)
        self._enough = self._enough or told.stop_requested
        self.meter.other_bytes["notes"] += told.nbytes
        self.meter.seconds["tell"] += time.perf_counter() - began

    def _flags(self, plan: Plan) -> int:
        """What the user's loop should know of a step."""
        before = self.samples_trained
        self.samples_trained += len(plan.now.batch)
        flags = EVAL_FOLLOWS if self._looks_after(plan.step + 1) else 0
        # After the last epoch more may follow: a checkpoint, an evaluation.
        ends = self._epoch_ends[: self.schedule.epochs - 1]
        ended = any(before < end <= self.samples_trained for end in ends)
        return flags | (EPOCH_ENDS if ended else 0)

    def _figures(self, plan: Plan, baseline: BaselineTraffic) -> I64:
        """Bytes over every worker's link, and row bytes in all: of this policy, and of another."""
        moved, cluster = traffic(plan, self.state.setup), self.state.setup.cluster
        reduced_W = moved.hot_bytes * allreduce_share_W(cluster, with_rows=True)
        link_W = moved.bytes_WKIP.sum((1, 2, 3)) + moved.sample_bytes_W + moved.plan_bytes_W
        link_W += np.rint(reduced_W).astype(np.int64)
        rows = moved.bytes_WKIP.sum() + round(float(reduced_W.sum()))
        return np.array([*link_W, rows, baseline.step(plan.now)], np.int64)

    def _ends_after(self, done: int) -> bool:
        return self.stop.is_set() or self._enough or done == self.schedule.max_steps

    def _looks_after(self, done: int) -> bool:
        every = self.schedule.evaluate_every
        return self.held_out is not None and every > 0 and done % every == 0

    def _events(self, done: int) -> None:
        """What the schedule puts after a step."""
        saves = self.schedule.checkpoint_every > 0 and done % self.schedule.checkpoint_every == 0
        if saves or self._looks_after(done):
            self._drain()
        if saves:
            self._save()
        if self._looks_after(done):
            self._look(0)

    def _drain(self) -> None:
        """Bring every update home; copies stay where they are, clean."""
        transfers = drain_state(self.state, self.policy.sync.record)
        if self.baseline is not None:
            link_W = row_bytes_W(transfers, self.state.setup)
            self._drained += [*link_W, link_W.sum(), self.baseline.drain()]
        script = drain_schedule(transfers, self.sharding)
        about = np.array([self.state.step], np.int64)
        listings = chain(script.shards, script.workers)
        self._tell(DRAIN, [[about, *listing] for listing in listings])

    def _save(self) -> None:
        """A checkpoint: every rank writes its part, then it is made one."""
        if self.saver is None:
            return
        self._saved = self.state.step
        about = np.array([self.state.step], np.int64)
        self._tell(SAVE, [[about] for _ in self.rank.peers])
        began = time.perf_counter()
        self.saver.finish(self.state, self.samples_trained)
        self.meter.seconds["save"] += time.perf_counter() - began

    def refill(self) -> None:
        """Put the copies of a loaded state back into the workers' caches."""
        about = np.array([self.state.step], np.int64)
        for script in refill_schedules(self.state, self.sharding):
            listings = chain(script.shards, script.workers)
            self._tell(REFILL, [[about, *listing] for listing in listings])

    def _look(self, flags: int) -> None:
        """Deal the held-out batches to all workers."""
        if self.held_out is None:
            return
        self._looked = self.state.step
        about = StepHeader(self.state.step, 0, 0, flags)
        for item in self.held_out:
            shards, workers = evaluation_messages(
                self.adapter.batch(item), about, self.sharding, self.adapter
            )
            self._tell(EVAL_BATCH, [*shards, *workers])
        self._tell(EVAL_END, [[] for _ in self.rank.peers])
