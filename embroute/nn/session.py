"""A worker's session: the loop over its samples, and the backward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from embroute.engine.control import send_reply
from embroute.engine.optim import Rate
from embroute.engine.protocol.messages import EvalEnd, Save, Stop
from embroute.engine.step_message import EPOCH_ENDS, EVAL_FOLLOWS, FINAL_EVAL, WorkerStep
from embroute.engine.worker import HeldOutStep, LoopEvent, PrefetchThread
from embroute.kernels.array_types import I32, I64
from embroute.kernels.rows import Floats, gather
from embroute.nn.dense import Dense
from embroute.nn.embedding import LookupContext, StepLookups
from embroute.nn.tensor_batches import TensorAdapter


class WorkerSession:
    """A worker's view of the job. `loss` is the mean over all samples of the last step."""

    def __init__(
        self,
        prefetch: PrefetchThread,
        lookup_context: LookupContext,
        dense: Dense,
        rate: Rate,
        save: Callable[[int], None],
        reports_loss: bool = False,
    ) -> None:
        self.rank, self.transfers = prefetch.rank, prefetch.transfers
        self.meter = prefetch.transfers.meter
        self.loss = math.nan
        self.current: WorkerStep | None = None
        self.finished = False
        self.drain_figures: I64 | None = None  # traffic after the last step, at the first worker
        self._final_batch: HeldOutStep | None = None  # first batch of the final evaluation
        self._prefetch, self._lookup_context = prefetch, lookup_context
        self._dense, self._rate, self._save = dense, rate, save
        self._span_start: float | None = None
        self._reports_loss = reports_loss  # whether the coordinator waits for held-out losses
        self._loss_due = False

    def _end_span(self, phase: str) -> None:
        """Record the time since the last span ended, unless that time is no part of a step."""
        if self.current is not None and self._span_start is not None:
            self.meter.span(phase, self.current.step, self._span_start)
        self._span_start = time.perf_counter()

    @property
    def failed(self) -> bool:
        """Whether the prefetch thread has ended with an error, such as a lost peer."""
        return self._prefetch.events.failed

    @property
    def evaluation_due(self) -> bool:
        """Whether `held_out()` follows this step."""
        return self.current is not None and bool(self.current.header.flags & EVAL_FOLLOWS)

    @property
    def final_evaluation(self) -> bool:
        """Whether the final evaluation waits for `held_out()`."""
        return self._final_batch is not None

    def samples(self) -> Iterator[object]:
        """This worker's samples of each step of an epoch."""
        while not self.finished:
            self._end_span("compute")
            self.report_held_out(None)
            event = self._prefetch.events.get()
            if not isinstance(event, WorkerStep):
                self._between_steps(event)
                continue
            self.current = event
            self._end_span("wait")
            if self.transfers.store.stamps is not None:
                self.transfers.store.stamps.read(event.step, event.slot_AT)
            records = self.transfers.store.records
            self._lookup_context.begin(self._lookups(event, records, event.slot_AT))
            yield self._prefetch.adapter.to_user_batch(event.micro_batch)
            if self._lookup_context.lookups is not None:
                raise RuntimeError(f"step {event.step}: ready.backward(loss) was not called")
            if event.header.flags & EPOCH_ENDS:
                return

    def _between_steps(self, event: LoopEvent) -> None:
        if isinstance(event, Stop):
            self._leave(event)
        elif isinstance(event, Save):
            self._save(event.step)
            self._span_start = None
        elif isinstance(event, EvalEnd):
            self._loss_due = self._reports_loss
        elif isinstance(event, HeldOutStep) and event.step.header.flags & FINAL_EVAL:
            self.finished, self._final_batch = True, event

    def stop(self) -> None:
        """Ask for an early end, after the steps that are planned already."""
        self._prefetch.stop_requested.set()

    def held_out(self) -> Iterator[object]:
        """This worker's held-out samples; where `evaluation_due`, and once after the last step."""
        if self.finished and self._final_batch is None:
            raise RuntimeError("held_out() was called where no evaluation was due")
        event: LoopEvent = self._final_batch or self._prefetch.events.get()
        self._final_batch = None
        while not isinstance(event, EvalEnd):
            if isinstance(event, Save):
                self._save(event.step)
            elif isinstance(event, HeldOutStep):
                step = event.step
                self._lookup_context.begin(self._lookups(step, event.rows_A, step.slot_AT))
                if step.header.num_samples:
                    yield self._prefetch.adapter.to_user_batch(step.micro_batch)
            else:
                raise RuntimeError("held_out() was called where no evaluation was due")
            event = self._prefetch.events.get()
        self._lookup_context.lookups = None
        self._span_start = None
        self._loss_due = self._reports_loss and not self.finished
        if self.finished:
            # The prefetch thread must receive STOP before the process may end.
            event = self._prefetch.events.get()
            assert isinstance(event, Stop)
            self._leave(event)

    def report_held_out(self, loss: float | None) -> None:
        """Answer the coordinator that waits for the loss of an evaluation; None: not known."""
        if self._loss_due:
            self._loss_due = False
            known = None if loss is None or not math.isfinite(loss) else float(loss)
            send_reply(self.rank.replies, [known])

    def _leave(self, event: Stop) -> None:
        self.finished = True
        self.drain_figures = event.figures if len(event.figures) else None
        self._dense.close()

    def _lookups(
        self, step: WorkerStep, records_A: Sequence[Floats], slot_AT: Sequence[I32]
    ) -> StepLookups:
        adapter, micro_batch = self._prefetch.adapter, step.micro_batch
        ids: list[torch.Tensor | None] = []
        if isinstance(adapter, TensorAdapter):
            ids = [adapter.ids_of(call, micro_batch) for call in adapter.calls]
        return StepLookups(
            records_A=records_A,
            slot_AT=slot_AT,
            touch_L=step.touch_L,
            offsets=micro_batch.offsets,
            num_fields=adapter.schema.num_fields,
            num_samples=micro_batch.num_samples,
            ids=ids,
        )

    def backward(self, loss: torch.Tensor) -> float:
        """Backward pass of the mean loss of this worker's samples, and every update of rows.

        Returns the mean loss over all workers' samples. Afterwards the parameters' gradients are
        those of the whole batch's mean loss, equal on all workers: clip them, and step the
        optimizer.
        """
        step = self.current
        if step is None or self._lookup_context.lookups is None:
            raise RuntimeError(
                "ready.backward(loss) was called outside of the prepared loader's loop"
            )
        header, old = step.header, self._dense.take_gradients(step.step)
        # The sum over workers of (mean loss x share of the batch) is the batch's mean loss.
        share = header.num_samples / header.global_samples
        if header.num_samples:  # a worker without samples ran the model on an empty sample
            (loss * share).backward()  # type: ignore[no-untyped-call]
        grads = self._lookup_context.gradients()
        self._lookup_context.lookups = None
        replicas = self._replica_gradients(step, grads)
        loss_share = float(loss.detach()) * share if header.num_samples else 0.0
        self._end_span("compute")
        # Pushes leave during the all-reduce, unless they may include replicated rows, whose
        # updates need the sums.
        if not replicas:
            self._push_updates(step, grads)
        sums, self.loss = self._dense.sum(replicas, loss_share, bool(header.num_samples))
        self._dense.restore_gradients(old)
        self._end_span("allreduce")
        self.meter.other_bytes["dense"] = self._dense.sent_bytes
        if replicas:
            self._update_replicas(step, sums)
            self._push_updates(step, grads)
        self._check_finite(step.step)
        return self.loss

    def _check_finite(self, step: int) -> None:
        if self._dense.finite and math.isfinite(self.loss):
            return
        fault = f"the loss is {self.loss}"
        if math.isfinite(self.loss):
            fault = "the gradients are not finite"
        raise ValueError(
            f"step {step}: {fault}; lower the learning rate, or look for inf and nan in the data"
        )

    def _push_updates(self, step: WorkerStep, grads: list[Floats]) -> None:
        self.transfers.finish(step, grads, self._rate.lr)
        self._prefetch.computed.put(step.step)
        self._end_span("update")

    def _replica_gradients(self, step: WorkerStep, grads: list[Floats]) -> list[torch.Tensor]:
        """Gradients of replicated rows by arena; zeros for rows that this worker did not touch."""
        if not any(len(slots) for slots in step.replica_slot_AU):
            return []
        replicas = []
        for touch_U, grad in zip(step.replica_touch_AU, grads, strict=True):
            out = np.zeros((len(touch_U), grad.shape[1]), grad.dtype)
            touched = np.flatnonzero(touch_U >= 0)
            block = np.empty((len(touched), grad.shape[1]), grad.dtype)
            gather(grad, touch_U[touched], block)
            out[touched] = block
            replicas.append(torch.from_numpy(out))
        return replicas

    def _update_replicas(self, step: WorkerStep, sums: Sequence[torch.Tensor]) -> None:
        store, widths = self.transfers.store, self.transfers.widths
        for arena, (slots, total) in enumerate(zip(step.replica_slot_AU, sums, strict=True)):
            grad = total.numpy().reshape(-1, widths.values[arena]).astype(widths.dtype)
            store.set_lr(self._rate.lr)
            store.apply(arena, slots, grad, step.step)
