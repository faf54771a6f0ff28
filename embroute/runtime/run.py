"""A worker's side of a job: the loader that gives its samples, and the backward pass."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from embroute.kernels.rows import Floats, gather
from embroute.runtime.dense import Dense
from embroute.runtime.feed import Feed
from embroute.runtime.inbox import (
    DRAIN,
    HELLO,
    LOOK,
    LOOKED,
    REFILL,
    SAVE,
    STEP,
    STOP,
    Handover,
    Note,
    background,
    listen,
)
from embroute.runtime.notes import EPOCH_ENDS, LAST_LOOK, LOOKS_AFTER, Work, read_work
from embroute.runtime.optim import Rate
from embroute.runtime.routed import Desk, Reading, RoutedLayer
from embroute.runtime.script import Orders
from embroute.runtime.seat import Seat
from embroute.runtime.tensor_feed import TensorFeed
from embroute.runtime.worker import Rows

I64 = npt.NDArray[np.int64]


class Look(NamedTuple):
    """Samples to evaluate, with their rows by arena."""

    work: Work
    values: list[Floats]


class Looked(NamedTuple):
    """The end of an evaluation."""


class Save(NamedTuple):
    """A checkpoint of what all steps so far have made."""

    step: int


class Stop(NamedTuple):
    """The end of the job, and what moved after its last step, where somebody may watch."""

    figures: I64 | None


Ready = Work | Look | Looked | Save | Stop


@dataclass
class Courier:
    """The thread between coordinator, shards and the user's loop."""

    seat: Seat
    rows: Rows
    feed: Feed
    layers: Sequence[RoutedLayer]

    def __post_init__(self) -> None:
        self.ready: Handover[Ready] = Handover()
        self.done: Handover[int] = Handover()
        self.enough = threading.Event()  # asks for an early end
        self._computing = False

    def start(self) -> None:
        """Begin to listen."""
        background("rows", self._work, self.ready)

    def _work(self) -> None:
        notes = listen(self.seat.plans, self.enough)
        while True:
            note = notes.get()
            self._carry_out(note)
            if note.verb == STOP:
                self.ready.put(Stop(note.arrays[0].astype(np.int64) if note.arrays else None))
                return

    def _carry_out(self, note: Note) -> None:
        if note.verb == HELLO:
            self._learn(note)
        elif note.verb == STEP:
            self._step(note)
        elif note.verb == DRAIN:
            self._wait_for_compute()
            about, heads, index = note.arrays
            orders = Orders.read(heads, index)
            self.rows.drain(int(about.tolist()[0]), orders)
        elif note.verb == LOOK:
            self._look(note)
        elif note.verb == LOOKED:
            self.ready.put(Looked())
        elif note.verb == SAVE:
            # The user's optimizer has not stepped yet: the loop itself saves, before its next step.
            self.ready.put(Save(int(note.arrays[0].tolist()[0])))
        elif note.verb == REFILL:
            _, heads, where = note.arrays
            self.rows.refill(Orders.read(heads, where))

    def _learn(self, note: Note) -> None:
        self.feed.recall(note.arrays[0].tobytes().decode())
        if isinstance(self.feed, TensorFeed):
            for layer in self.layers:
                layer.learn(self.feed.calls)

    def _step(self, note: Note) -> None:
        work = read_work(note.arrays, len(self.rows.widths.values), self.feed)
        self.rows.meter.note(work.step, note.nbytes)
        self.rows.early(work.step, work.orders)
        self._wait_for_compute()
        self.rows.urgent(work.step, work.orders, work.about.parts)
        self.rows.make(work.made)
        self._computing = True
        self.ready.put(work)

    def _look(self, note: Note) -> None:
        work = read_work(note.arrays, len(self.rows.widths.values), self.feed)
        values = [
            np.zeros((len(slots), width), self.rows.widths.dtype)
            for slots, width in zip(work.slot_AT, self.rows.widths.values, strict=True)
        ]
        blocks = work.orders.blocks
        for block, rows in zip(blocks, self.rows.fetch(blocks), strict=True):
            values[block.arena][block.where] = rows
        self.ready.put(Look(work, values))

    def _wait_for_compute(self) -> None:
        """What follows needs the updates of the step that is being computed."""
        if self._computing:
            self.done.get()
        self._computing = False


class Run:
    """A worker's hold on the job. `loss` is the mean over all samples of the last step."""

    def __init__(
        self,
        courier: Courier,
        desk: Desk,
        dense: Dense,
        rate: Rate,
        save: Callable[[int], None],
    ) -> None:
        self.seat, self.rows, self.meter = courier.seat, courier.rows, courier.rows.meter
        self.loss = math.nan
        self.work: Work | None = None
        self.finished = False
        self.last_figures: I64 | None = None  # of what moved after the last step
        self._first_look: Look | None = None
        self._courier, self._desk, self._dense, self._rate = courier, desk, dense, rate
        self._save = save
        self._mark: float | None = None  # where the loop's last span of a step ended

    def _lap(self, phase: str) -> None:
        """Note what the loop did since its last span; what is no part of a step is left out."""
        if self.work is not None and self._mark is not None:
            self.meter.span(phase, self.work.step, self._mark)
        self._mark = time.perf_counter()

    @property
    def evaluation_due(self) -> bool:
        """Whether `held_out()` follows this step."""
        return self.work is not None and bool(self.work.about.flags & LOOKS_AFTER)

    @property
    def last_look(self) -> bool:
        """Whether the held-out data of the end waits for `held_out()`."""
        return self._first_look is not None

    def samples(self) -> Iterator[object]:
        """This worker's samples of each step of an epoch."""
        while not self.finished:
            self._lap("compute")
            item = self._courier.ready.get()
            if isinstance(item, Stop):
                self._leave(item)
            if isinstance(item, Save):
                self._save(item.step)
                self._mark = None
            if isinstance(item, Look) and item.work.about.flags & LAST_LOOK:
                self.finished, self._first_look = True, item
            if not isinstance(item, Work):
                continue
            self.work = item
            self._lap("wait")
            if self.rows.store.stamps is not None:
                self.rows.store.stamps.read(item.step, item.slot_AT)
            self._desk.begin(self._reading(item, self.rows.store.records, item.slot_AT))
            yield self._courier.feed.part(item.dealt)
            if self._desk.reading is not None:
                raise RuntimeError(f"step {item.step}: ready.backward(loss) was not called")
            if item.about.flags & EPOCH_ENDS:
                return

    def stop(self) -> None:
        """Ask for an early end; the steps that are planned already still come."""
        self._courier.enough.set()

    def held_out(self) -> Iterator[object]:
        """This worker's held-out samples; where `evaluation_due`, and once after the last step."""
        if self.finished and self._first_look is None:
            raise RuntimeError("held_out() was called where no evaluation was due")
        item: Ready = self._first_look or self._courier.ready.get()
        self._first_look = None
        while not isinstance(item, Looked):
            if isinstance(item, Save):
                self._save(item.step)
            elif isinstance(item, Look):
                self._desk.begin(self._reading(item.work, item.values, item.work.slot_AT))
                if item.work.about.num_samples:
                    yield self._courier.feed.part(item.work.dealt)
            else:
                raise RuntimeError("held_out() was called where no evaluation was due")
            item = self._courier.ready.get()
        self._desk.reading = None
        self._mark = None
        if self.finished:
            # The thread beside the loop has one more note to take before the process may end.
            item = self._courier.ready.get()
            assert isinstance(item, Stop)
            self._leave(item)

    def _leave(self, item: Stop) -> None:
        """Nothing follows any more."""
        self.finished = True
        self.last_figures = item.figures
        self._dense.leave()

    def _reading(
        self,
        work: Work,
        records: Sequence[Floats],
        slots: Sequence[npt.NDArray[np.int32]],
    ) -> Reading:
        feed, dealt = self._courier.feed, work.dealt
        ids: list[torch.Tensor | None] = []
        if isinstance(feed, TensorFeed):
            ids = [feed.ids_of(call, dealt) for call in feed.calls]
        fields = feed.schema.num_fields
        return Reading(records, slots, work.touch_L, dealt.offsets, fields, dealt.num_samples, ids)

    def backward(self, loss: torch.Tensor) -> float:
        """Backward pass of the mean loss of this worker's samples, and every update of rows.

        Returns the mean loss over all workers' samples.

        Afterwards the parameters' gradients are those of the whole batch's mean loss, alike on
        all workers: clip them, and step the optimizer.
        """
        if self.work is None or self._desk.reading is None:
            raise RuntimeError(
                "ready.backward(loss) was called outside of the prepared loader's loop"
            )
        work, about = self.work, self.work.about
        share = about.num_samples / about.global_samples
        old = self._dense.set_aside(about.step)
        if about.num_samples:  # of a blank sample the loss may be anything
            (loss * share).backward()  # type: ignore[no-untyped-call]
        grads = self._desk.gradients()
        self._desk.reading = None
        replicas = self._replica_gradients(work, grads)
        own = float(loss.detach()) * share if about.num_samples else 0.0
        self._lap("compute")
        if not replicas:
            self._finish(work, grads)
        sums, self.loss = self._dense.sum(replicas, own, bool(about.num_samples))
        self._dense.bring_back(old)
        self._lap("allreduce")
        self.meter.other_bytes["dense"] = self._dense.sent_bytes
        if replicas:
            # Replicas may leave with the urgent pushes: they are updated before those.
            self._update_replicas(work, sums)
            self._finish(work, grads)
        if not (self._dense.finite and math.isfinite(self.loss)):
            finite = math.isfinite(self.loss)
            what = "the gradients are not finite" if finite else f"the loss is {self.loss}"
            raise ValueError(
                f"step {about.step}: {what}; lower the learning rate, or look for inf and nan in "
                f"the data"
            )
        return self.loss

    def _finish(self, work: Work, grads: list[Floats]) -> None:
        self.rows.finish(work, grads, self._rate.lr)
        self._courier.done.put(work.step)
        self._lap("update")

    def _replica_gradients(self, work: Work, grads: list[Floats]) -> list[torch.Tensor]:
        """Gradients of replicated rows; zeros where this worker did not touch a row."""
        if not any(len(slots) for slots in work.replica_slot_AU):
            return []
        found = []
        for touch, grad in zip(work.replica_touch_AU, grads, strict=True):
            out = np.zeros((len(touch), grad.shape[1]), grad.dtype)
            mine = np.flatnonzero(touch >= 0)
            block = np.empty((len(mine), grad.shape[1]), grad.dtype)
            gather(grad, touch[mine], block)
            out[mine] = block
            found.append(torch.from_numpy(out))
        return found

    def _update_replicas(self, work: Work, sums: Sequence[torch.Tensor]) -> None:
        for arena, (slots, total) in enumerate(zip(work.replica_slot_AU, sums, strict=True)):
            width = self.rows.widths.values[arena]
            grad = total.numpy().reshape(-1, width).astype(self.rows.widths.dtype)
            self.rows.store.optimizer = self.rows.store.optimizer.with_lr(self._rate.lr)
            self.rows.store.apply(arena, slots, grad, work.step)
