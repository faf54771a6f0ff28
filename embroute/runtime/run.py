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
from torch import nn

from embroute.cluster import Cluster
from embroute.cost import sums_by_shard
from embroute.kernels.rows import Floats, gather
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
from embroute.runtime.star import StarSums, can_add_up
from embroute.runtime.sums import SharedSums
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


class Dense:
    """The part of the model that every worker has whole: its gradients are summed."""

    def __init__(self, model: nn.Module, seat: Seat, cluster: Cluster) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.seat, self.cluster, self.sent_bytes = seat, cluster, 0
        self._star = StarSums(seat.star, seat.shards[0])
        self.finite = True  # whether all sums of the last step were
        state = [p.data for p in model.parameters()] + list(model.buffers())
        self._share(state)

    def _share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let every worker start from the first worker's values."""
        for tensor in tensors:
            flat = tensor.detach().reshape(-1).to(torch.float64, copy=True)
            if self.seat.index:
                flat.zero_()
            self.seat.dense.sum(flat)
            tensor.copy_(flat.reshape(tensor.shape))

    def leave(self) -> None:
        """There are no more sums."""
        self._star.leave()

    def sum(
        self, extra: Sequence[torch.Tensor], loss: float, adds: bool
    ) -> tuple[list[torch.Tensor], float]:
        """Sum gradients over workers in one message; returns the sums of `extra` and `loss`.

        `adds`: whether this worker has anything but zeros.
        """
        if self.seat.num_workers == 1:
            found = [*(p.grad for p in self.parameters if p.grad is not None), *extra]
            self.finite = all(bool(part.sum().isfinite()) for part in found)
            return [part.reshape(-1) for part in extra], loss
        own = [p.grad is not None for p in self.parameters]
        grads = [
            torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1)
            for p in self.parameters
        ]
        dtype = grads[0].dtype if grads else torch.float64
        tail = torch.tensor([loss, *own], dtype=dtype)
        parts = [*grads, *(part.reshape(-1) for part in extra), tail]
        flat = torch.cat([part.to(dtype) for part in parts])
        self._sum(flat, adds, bool(extra))
        self.finite = bool(flat.sum().isfinite())  # one that is not spoils the sum
        sums = list(torch.split(flat, [len(part) for part in parts]))
        used = sums[-1][1:]
        for parameter, grad, count in zip(self.parameters, sums, used.tolist(), strict=False):
            parameter.grad = grad.reshape(parameter.shape).to(parameter.dtype) if count else None
        return sums[len(grads) : -1], float(sums[-1][0])

    def _sum(self, flat: torch.Tensor, adds: bool, with_rows: bool) -> None:
        """Through memory of one host, by way of a shard, or round a ring.

        A ring sends every byte but those of its own share twice.
        """
        workers = self.seat.num_workers
        near = isinstance(self.seat.dense, SharedSums)
        if sums_by_shard(self.cluster, with_rows) and can_add_up(flat) and not near:
            self._star.sum(flat, adds)
            self.sent_bytes += flat.nbytes if adds else 0
        else:
            self.seat.dense.sum(flat)
            self.sent_bytes += 2 * (workers - 1) * flat.nbytes // workers


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
        (loss * share).backward()  # type: ignore[no-untyped-call]
        grads = self._desk.gradients()
        self._desk.reading = None
        replicas = self._replica_gradients(work, grads)
        own = float(loss.detach()) * share if about.num_samples else 0.0
        self._lap("compute")
        if not replicas:
            self._finish(work, grads)
        sums, self.loss = self._dense.sum(replicas, own, bool(about.num_samples))
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
