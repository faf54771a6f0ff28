"""A worker's side of a job: the loader that gives its samples, and the backward pass."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

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
    ControlMessage,
    ErrorQueue,
    listen,
    start_thread,
)
from embroute.engine.optim import Rate
from embroute.engine.schedule import RankTransfers
from embroute.engine.step_message import (
    EPOCH_ENDS,
    EVAL_FOLLOWS,
    FINAL_EVAL,
    WorkerStep,
    read_worker_step,
)
from embroute.engine.worker import WorkerTransfers
from embroute.kernels.array_types import I32, I64
from embroute.kernels.rows import Floats, gather
from embroute.launch.rank import RankContext
from embroute.nn.dense import Dense
from embroute.nn.embedding import LookupContext, RoutedLayer, StepLookups
from embroute.nn.tensor_batches import TensorAdapter


class EvalBatch(NamedTuple):
    """Samples to evaluate, with their rows by arena."""

    work: WorkerStep
    values: list[Floats]


class EvalEnd(NamedTuple):
    """The end of an evaluation."""


class SaveRequest(NamedTuple):
    """A checkpoint of what all steps so far have made."""

    step: int


class StopRequest(NamedTuple):
    """The end of the job, and what moved after its last step, where somebody may watch."""

    figures: I64 | None


Ready = WorkerStep | EvalBatch | EvalEnd | SaveRequest | StopRequest


@dataclass
class PrefetchThread:
    """The thread between coordinator, shards and the user's loop."""

    rank: RankContext
    rows: WorkerTransfers
    adapter: BatchAdapter
    layers: Sequence[RoutedLayer]

    def __post_init__(self) -> None:
        self.ready: ErrorQueue[Ready] = ErrorQueue()
        self.done: ErrorQueue[int] = ErrorQueue()
        self.enough = threading.Event()  # asks for an early end
        self._computing = False

    def start(self) -> None:
        """Begin to listen."""
        start_thread("rows", self._work, self.ready)

    def _work(self) -> None:
        messages = listen(self.rank.control, self.enough)
        while True:
            message = messages.get()
            self._carry_out(message)
            if message.verb == STOP:
                self.ready.put(
                    StopRequest(message.arrays[0].astype(np.int64) if message.arrays else None)
                )
                return

    def _carry_out(self, message: ControlMessage) -> None:
        if message.verb == HELLO:
            self._learn(message)
        elif message.verb == STEP:
            self._step(message)
        elif message.verb == DRAIN:
            self._wait_for_compute()
            about, heads, index = message.arrays
            orders = RankTransfers.read(heads, index)
            self.rows.drain(int(about.tolist()[0]), orders)
        elif message.verb == EVAL_BATCH:
            self._look(message)
        elif message.verb == EVAL_END:
            self.ready.put(EvalEnd())
        elif message.verb == SAVE:
            # The user's optimizer has not stepped yet: the loop itself saves, before its next step.
            self.ready.put(SaveRequest(int(message.arrays[0].tolist()[0])))
        elif message.verb == REFILL:
            _, heads, where = message.arrays
            self.rows.refill(RankTransfers.read(heads, where))

    def _learn(self, message: ControlMessage) -> None:
        self.adapter.load_spec(message.arrays[0].tobytes().decode())
        if isinstance(self.adapter, TensorAdapter):
            for layer in self.layers:
                layer.learn(self.adapter.calls)

    def _step(self, message: ControlMessage) -> None:
        work = read_worker_step(message.arrays, len(self.rows.widths.values), self.adapter)
        self.rows.meter.message(work.step, message.nbytes)
        self.rows.early(work.step, work.transfers)
        self._wait_for_compute()
        self.rows.urgent(work.step, work.transfers, work.header.parts)
        self.rows.init_rows(work.to_init)
        self._computing = True
        self.ready.put(work)

    def _look(self, message: ControlMessage) -> None:
        work = read_worker_step(message.arrays, len(self.rows.widths.values), self.adapter)
        values = [
            np.zeros((len(slots), width), self.rows.widths.dtype)
            for slots, width in zip(work.slot_AT, self.rows.widths.values, strict=True)
        ]
        blocks = work.transfers.blocks
        for block, rows in zip(blocks, self.rows.fetch(blocks), strict=True):
            values[block.arena][block.indices] = rows
        self.ready.put(EvalBatch(work, values))

    def _wait_for_compute(self) -> None:
        """What follows needs the updates of the step that is being computed."""
        if self._computing:
            self.done.get()
        self._computing = False


class WorkerSession:
    """A worker's hold on the job. `loss` is the mean over all samples of the last step."""

    def __init__(
        self,
        prefetch: PrefetchThread,
        lookup_context: LookupContext,
        dense: Dense,
        rate: Rate,
        save: Callable[[int], None],
    ) -> None:
        self.rank, self.rows, self.meter = prefetch.rank, prefetch.rows, prefetch.rows.meter
        self.loss = math.nan
        self.work: WorkerStep | None = None
        self.finished = False
        self.last_figures: I64 | None = None  # of what moved after the last step
        self._first_look: EvalBatch | None = None
        self._courier, self._desk, self._dense, self._rate = prefetch, lookup_context, dense, rate
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
        return self.work is not None and bool(self.work.header.flags & EVAL_FOLLOWS)

    @property
    def final_evaluation(self) -> bool:
        """Whether the held-out data of the end waits for `held_out()`."""
        return self._first_look is not None

    def samples(self) -> Iterator[object]:
        """This worker's samples of each step of an epoch."""
        while not self.finished:
            self._lap("compute")
            item = self._courier.ready.get()
            if isinstance(item, StopRequest):
                self._leave(item)
            if isinstance(item, SaveRequest):
                self._save(item.step)
                self._mark = None
            if isinstance(item, EvalBatch) and item.work.header.flags & FINAL_EVAL:
                self.finished, self._first_look = True, item
            if not isinstance(item, WorkerStep):
                continue
            self.work = item
            self._lap("wait")
            if self.rows.store.stamps is not None:
                self.rows.store.stamps.read(item.step, item.slot_AT)
            self._desk.begin(self._reading(item, self.rows.store.records, item.slot_AT))
            yield self._courier.adapter.to_user_batch(item.micro_batch)
            if self._desk.reading is not None:
                raise RuntimeError(f"step {item.step}: ready.backward(loss) was not called")
            if item.header.flags & EPOCH_ENDS:
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
        while not isinstance(item, EvalEnd):
            if isinstance(item, SaveRequest):
                self._save(item.step)
            elif isinstance(item, EvalBatch):
                self._desk.begin(self._reading(item.work, item.values, item.work.slot_AT))
                if item.work.header.num_samples:
                    yield self._courier.adapter.to_user_batch(item.work.micro_batch)
            else:
                raise RuntimeError("held_out() was called where no evaluation was due")
            item = self._courier.ready.get()
        self._desk.reading = None
        self._mark = None
        if self.finished:
            # The thread beside the loop has one more note to take before the process may end.
            item = self._courier.ready.get()
            assert isinstance(item, StopRequest)
            self._leave(item)

    def _leave(self, item: StopRequest) -> None:
        """Nothing follows any more."""
        self.finished = True
        self.last_figures = item.figures
        self._dense.leave()

    def _reading(
        self,
        work: WorkerStep,
        records: Sequence[Floats],
        slots: Sequence[I32],
    ) -> StepLookups:
        adapter, dealt = self._courier.adapter, work.micro_batch
        ids: list[torch.Tensor | None] = []
        if isinstance(adapter, TensorAdapter):
            ids = [adapter.ids_of(call, dealt) for call in adapter.calls]
        fields = adapter.schema.num_fields
        return StepLookups(
            records, slots, work.touch_L, dealt.offsets, fields, dealt.num_samples, ids
        )

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
        work, about = self.work, self.work.header
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

    def _finish(self, work: WorkerStep, grads: list[Floats]) -> None:
        self.rows.finish(work, grads, self._rate.lr)
        self._courier.done.put(work.step)
        self._lap("update")

    def _replica_gradients(self, work: WorkerStep, grads: list[Floats]) -> list[torch.Tensor]:
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

    def _update_replicas(self, work: WorkerStep, sums: Sequence[torch.Tensor]) -> None:
        for arena, (slots, total) in enumerate(zip(work.replica_slot_AU, sums, strict=True)):
            width = self.rows.widths.values[arena]
            grad = total.numpy().reshape(-1, width).astype(self.rows.widths.dtype)
            self.rows.store.optimizer = self.rows.store.optimizer.with_lr(self._rate.lr)
            self.rows.store.apply(arena, slots, grad, work.step)
