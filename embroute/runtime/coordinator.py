"""The coordinator: reads the loader, decides step after step, and tells every rank its part."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from embroute.cost import sum_share_W
from embroute.data.batch import Batch
from embroute.policy.decide import bring_home
from embroute.policy.parts import Policy
from embroute.policy.plan import Plan, row_bytes_W, traffic
from embroute.policy.plans import plans
from embroute.policy.state import State
from embroute.runtime.feed import Feed
from embroute.runtime.inbox import DRAIN, HELLO, LOOK, LOOKED, REFILL, SAVE, STEP, STOP, post
from embroute.runtime.meter import Meter
from embroute.runtime.notes import EPOCH_ENDS, LAST_LOOK, LOOKS_AFTER, About, look_notes, step_notes
from embroute.runtime.places import Places
from embroute.runtime.saving import Saver, refills
from embroute.runtime.script import drain_script
from embroute.runtime.seat import Seat
from embroute.runtime.shadow import Shadow
from embroute.runtime.wire import Array

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """When something else than a step happens; 0 is never."""

    epochs: int = 1
    max_steps: int = 0
    look_every: int = 0
    save_every: int = 0


@dataclass
class Coordinator:
    """One job's brain at work."""

    seat: Seat
    policy: Policy
    state: State
    feed: Feed
    schedule: Schedule
    held_out: Iterable[object] | None = None
    shadow: Shadow | None = None  # of another policy; with it figures are sent to who watches
    saver: Saver | None = None
    samples_trained: int = 0  # in all, those before a resume included
    stop: threading.Event = field(default_factory=threading.Event)  # asks for an early end
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.places = Places(self.state.setup)
        self._epoch_ends: list[int] = []  # samples read when each epoch ended
        self._samples_read = 0
        self._saved = self._looked = -1  # the last step after which it was done
        self._enough = False  # whether a worker asks for an early end
        # What drains have moved since the last step that was told, as `_figures` gives it.
        self._drained = np.zeros(self.seat.num_workers + 2, np.int64)

    def run(self, loader: Iterable[object], first_epoch: Iterable[object]) -> None:
        """Tell the ranks everything, from the first batch to the stop."""
        began = time.perf_counter()
        for step in plans(self.policy, self._batches(loader, first_epoch), self.state):
            written = time.perf_counter()
            shards, workers = step_notes(step.plan, self.places, self.feed, self._flags(step.plan))
            if self.shadow is not None:
                workers[0][-1] = self._figures(step.plan, self.shadow) + self._drained
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
            self._look(LAST_LOOK)
        farewell: list[list[Array]] = [[] for _ in self.seat.peers]
        farewell[self.seat.num_shards] = [self._drained]  # the first worker's
        self._tell(STOP, farewell)

    def _end(self) -> None:
        """The last drain and checkpoint.

        A run that goes on later must find the plans as they would be without this drain, which no
        schedule asked for. A copy that is home and still counts as dirty is right with an exact
        policy: whatever is pushed later is at least as new.
        """
        unscheduled = self._saved != self.state.step
        if unscheduled and self.saver is not None and self.policy.exact:
            self.saver.keep_plans(self.state, self.samples_trained)
        self._drain()
        if unscheduled:
            self._save()

    def greet(self, shape: str) -> None:
        """Tell the ranks what batches look like."""
        self._tell(HELLO, [[np.frombuffer(shape.encode(), np.uint8)] for _ in self.seat.peers])

    def _batches(self, loader: Iterable[object], first_epoch: Iterable[object]) -> Iterator[Batch]:
        for epoch in range(self.schedule.epochs):
            for item in first_epoch if epoch == 0 else loader:
                batch = self.feed.batch(item)
                self._samples_read += len(batch)
                yield batch
            self._epoch_ends.append(self._samples_read)

    def _tell(self, verb: int, notes: Sequence[Sequence[Array]]) -> None:
        began = time.perf_counter()
        peers = list(zip(self.seat.peers, notes, strict=True))
        told = post(self.seat.plans, verb, peers)
        self._enough = self._enough or told.enough
        self.meter.other_bytes["notes"] += told.nbytes
        self.meter.seconds["tell"] += time.perf_counter() - began

    def _flags(self, plan: Plan) -> int:
        """What the user's loop should know of a step."""
        before = self.samples_trained
        self.samples_trained += len(plan.now.batch)
        flags = LOOKS_AFTER if self._looks_after(plan.step + 1) else 0
        # After the last epoch more may follow: a checkpoint, an evaluation.
        ends = self._epoch_ends[: self.schedule.epochs - 1]
        ended = any(before < end <= self.samples_trained for end in ends)
        return flags | (EPOCH_ENDS if ended else 0)

    def _figures(self, plan: Plan, shadow: Shadow) -> I64:
        """Bytes over every worker's link, and row bytes in all: of this policy, and of another."""
        moved, cluster = traffic(plan, self.state.setup), self.state.setup.cluster
        reduced_W = moved.hot_bytes * sum_share_W(cluster, with_rows=True)
        link_W = moved.bytes_WKIP.sum((1, 2, 3)) + moved.sample_bytes_W + moved.plan_bytes_W
        link_W += np.rint(reduced_W).astype(np.int64)
        rows = moved.bytes_WKIP.sum() + round(float(reduced_W.sum()))
        return np.array([*link_W, rows, shadow.step(plan.now)], np.int64)

    def _ends_after(self, done: int) -> bool:
        return self.stop.is_set() or self._enough or done == self.schedule.max_steps

    def _looks_after(self, done: int) -> bool:
        every = self.schedule.look_every
        return self.held_out is not None and every > 0 and done % every == 0

    def _events(self, done: int) -> None:
        """What the schedule puts after a step."""
        saves = self.schedule.save_every > 0 and done % self.schedule.save_every == 0
        if saves or self._looks_after(done):
            self._drain()
        if saves:
            self._save()
        if self._looks_after(done):
            self._look(0)

    def _drain(self) -> None:
        """Bring every update home; copies stay where they are, clean."""
        transfers = bring_home(self.state, self.policy.sync.record)
        if self.shadow is not None:
            link_W = row_bytes_W(transfers, self.state.setup)
            self._drained += [*link_W, link_W.sum(), self.shadow.drain()]
        script = drain_script(transfers, self.places)
        about = np.array([self.state.step], np.int64)
        listings = chain(script.shards, script.workers)
        self._tell(DRAIN, [[about, *listing] for listing in listings])

    def _save(self) -> None:
        """A checkpoint: every rank writes its part, then it is made one."""
        if self.saver is None:
            return
        self._saved = self.state.step
        about = np.array([self.state.step], np.int64)
        self._tell(SAVE, [[about] for _ in self.seat.peers])
        began = time.perf_counter()
        self.saver.finish(self.state, self.samples_trained)
        self.meter.seconds["save"] += time.perf_counter() - began

    def refill(self) -> None:
        """Put the copies of a loaded state back into the workers' caches."""
        about = np.array([self.state.step], np.int64)
        for script in refills(self.state, self.places):
            listings = chain(script.shards, script.workers)
            self._tell(REFILL, [[about, *listing] for listing in listings])

    def _look(self, flags: int) -> None:
        """Deal the held-out batches to all workers."""
        if self.held_out is None:
            return
        self._looked = self.state.step
        about = About(self.state.step, 0, 0, flags)
        for item in self.held_out:
            shards, workers = look_notes(self.feed.batch(item), about, self.places, self.feed)
            self._tell(LOOK, [*shards, *workers])
        self._tell(LOOKED, [[] for _ in self.seat.peers])
