"""The coordinator's message to each rank about a step: written at one end, read at the other.

Axes: W workers, A arenas, S samples, T touches, L look-ups, U replicated rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from embroute.data.batch import Batch
from embroute.data.schema import Schema
from embroute.engine.batches import BatchAdapter, MicroBatch
from embroute.engine.protocol.messages import (
    NO_FIGURES,
    EvalBatch,
    RowsToInit,
    Serve,
    ShardStep,
    StepHeader,
    TrainBatch,
    WorkerMessage,
    refusal,
)
from embroute.engine.schedule import (
    CHUNK_COUNTS,
    OUTSIDE,
    BlocksByTime,
    RankTransfers,
    TouchOrder,
    TransferTime,
    order_touches,
    schedule_at,
    step_schedule,
)
from embroute.engine.sharding import RowSharding
from embroute.engine.transfer_kernels import in_ranges, renumber
from embroute.kernels.array_types import F32, I32, I64
from embroute.kernels.codes import EARLY, MISS_PULL, VALUE
from embroute.kernels.distinct import distinct
from embroute.kernels.touches import Lookups, touches
from embroute.launch.rank import COORDINATOR
from embroute.planner.kernels.transfers import Transfers
from embroute.planner.plan import Plan

# Flags of a step, for the user's loop.
EPOCH_ENDS, EVAL_FOLLOWS, FINAL_EVAL = 1, 2, 4
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class WorkerStep:
    """A step as a worker computes it."""

    header: StepHeader
    transfers: BlocksByTime
    local_A: list[int]  # touches that this worker updates itself: the first ones of each arena
    slot_AT: list[I32]
    replica_slot_AU: list[I32]
    replica_touch_AU: list[I32]  # -1 if this worker did not touch the row
    to_init: RowsToInit
    touch_L: I32
    micro_batch: MicroBatch
    figures: I64  # for a display; empty without one, and at all workers but the first

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.header.step


@dataclass(frozen=True)
class SampleSlice:
    """A worker's share of a batch."""

    num_samples: int
    lookups: slice
    bag_lengths: I32  # sample by sample; empty if every field holds one id
    dense: F32
    label: F32
    rows: I64  # empty unless the adapter sends ids


def split_batch(
    batch: Batch, order_S: I32, samples_W: I64, adapter: BatchAdapter
) -> list[SampleSlice]:
    """Cut a batch into the workers' shares; `order_S` lists its samples worker by worker."""
    samples = order_S.astype(np.intp)
    bounds = np.concatenate([[0], np.cumsum(samples_W)])
    lengths_SF, ends = np.empty((0, batch.num_fields), np.int32), bounds * batch.num_fields
    if adapter.schema.has_bags:
        lengths_SF = np.diff(batch.offsets).reshape(-1, batch.num_fields)[samples].astype(np.int32)
        ends = np.concatenate([[0], np.cumsum(lengths_SF.sum(1, dtype=np.int64))])[bounds]
    dense = np.ascontiguousarray(np.take(batch.dense, samples, 0), np.float32)
    label = np.take(batch.label, samples) if len(batch.label) else batch.label
    rows = batch.take(samples).rows if adapter.sends_ids else np.empty(0, np.int64)
    slices = []
    for worker, (first, last) in enumerate(pairwise(bounds.tolist())):
        lookups = slice(int(ends[worker]), int(ends[worker + 1]))
        slices.append(
            SampleSlice(
                num_samples=last - first,
                lookups=lookups,
                bag_lengths=lengths_SF[first:last].ravel(),
                dense=dense[first:last],
                label=label[first:last],
                rows=rows[lookups],
            )
        )
    return slices


class _TouchLists(NamedTuple):
    """A worker's lists about touches and rows of a step, arena by arena."""

    local_A: list[int]
    slot_A: list[I32]
    replica_slot_A: list[I32]
    replica_touch_A: list[I32]
    to_init: RowsToInit
    touch_L: I32
    figures: I64 = NO_FIGURES


def _worker_message(
    header: StepHeader, transfers: RankTransfers, lists: _TouchLists, samples: SampleSlice
) -> WorkerMessage:
    counts = [
        lists.local_A,
        [len(slots) for slots in lists.slot_A],
        [len(slots) for slots in lists.replica_slot_A],
    ]
    return WorkerMessage(
        header=header._replace(num_samples=samples.num_samples),
        transfers=transfers,
        counts=np.array(counts, np.int32).ravel(),
        slots_T=np.concatenate(lists.slot_A),
        replica_slots_U=np.concatenate(lists.replica_slot_A),
        replica_touches_U=np.concatenate(lists.replica_touch_A),
        to_init=lists.to_init,
        touch_L=lists.touch_L,
        bag_lengths=samples.bag_lengths,
        dense=samples.dense.ravel(),
        label=np.asarray(samples.label, np.float32),
        row_ids=samples.rows.astype(np.int32),
        figures=lists.figures,
    )


def _replicas(plan: Plan, order: TouchOrder, sharding: RowSharding) -> list[tuple[I32, I32]]:
    """By arena, for the rows whose gradients are all-reduced: slots and touches, rows x workers."""
    if not len(plan.replica_UW):
        return [(plan.replica_UW, plan.replica_UW) for _ in range(sharding.num_arenas)]
    chosen = plan.replicated_U
    arena_U, first_WA = plan.rows.arena_U[chosen], sharding.first_slot_WA
    number_UW = np.full((len(plan.rows.rows_U), sharding.num_workers), -1, np.int32)
    number_UW[plan.touches.unique_T, plan.touches.worker_T] = order.number_T
    replicas = []
    for arena in range(sharding.num_arenas):
        inside = arena_U == arena
        slots = plan.replica_UW[inside] - first_WA[:, arena].astype(np.int32)
        replicas.append((slots, number_UW[chosen[inside]]))
    return replicas


def _rows_to_init(plan: Plan, sharding: RowSharding) -> list[RowsToInit]:
    """The rows that each worker initialises."""
    touched = plan.initialised_T
    unique, worker = plan.touches.unique_T[touched], plan.touches.worker_T[touched]
    first = sharding.first_slot_WA[worker, plan.rows.arena_U[unique]]
    slots = (plan.placement.slot_T[touched] - first).astype(np.int32)
    rows = plan.rows.rows_U[unique].astype(np.int32)
    bounds = np.searchsorted(touched, plan.touches.first_W).tolist()
    return [RowsToInit(slots[a:b], rows[a:b]) for a, b in pairwise(bounds)]


def step_messages(
    plan: Plan, sharding: RowSharding, adapter: BatchAdapter, flags: int, figures: I64 = NO_FIGURES
) -> tuple[list[ShardStep], list[TrainBatch]]:
    """Messages of a step for all shards and all workers; the first worker gets the figures."""
    order = order_touches(plan, sharding)
    to_shards, to_workers = step_schedule(plan, order.number_T, sharding)
    number_L = renumber(order.number_T, plan.touches.touch_of_lookup)
    replicas, to_init = _replicas(plan, order, sharding), _rows_to_init(plan, sharding)
    slices = split_batch(plan.now.batch, plan.touches.sample_order_S, plan.samples_W, adapter)
    hits, touched = plan.hits
    header = StepHeader(plan.step, len(plan.now.batch), 0, flags, hits, touched, plan.chunks)
    workers = []
    for worker, samples in enumerate(slices):
        lists = _TouchLists(
            local_A=order.local_WA[worker].tolist(),
            slot_A=order.slot_WA[worker],
            replica_slot_A=[slot_UW[:, worker] for slot_UW, _ in replicas],
            replica_touch_A=[touch_UW[:, worker] for _, touch_UW in replicas],
            to_init=to_init[worker],
            touch_L=number_L[samples.lookups],
            figures=NO_FIGURES if worker else figures,
        )
        workers.append(TrainBatch(_worker_message(header, to_workers[worker], lists, samples)))
    return [ShardStep(plan.step, plan.chunks, transfers) for transfers in to_shards], workers


def evaluation_messages(
    batch: Batch, header: StepHeader, sharding: RowSharding, adapter: BatchAdapter
) -> tuple[list[Serve], list[EvalBatch]]:
    """Messages of an evaluation batch: samples in even blocks, rows pulled past the caches."""
    workers, arenas = sharding.num_workers, sharding.num_arenas
    worker_S = (np.arange(len(batch)) * workers // max(1, len(batch))).astype(np.int32)
    rows_U = np.empty(len(batch.rows), np.int64)
    unique_L = np.empty(len(batch.rows), np.int32)
    table = np.zeros(1 << max(4, (5 * len(batch.rows) // 4).bit_length()), np.int32)
    count = distinct(batch.rows, table, rows_U, unique_L)
    lookups = Lookups(unique_L, np.ascontiguousarray(batch.sample_offsets))
    touched = touches(lookups, worker_S, workers, count, _NONE)
    rows_T = rows_U[touched.unique_T]
    arena_T = sharding.setup.arena_of(rows_T).astype(np.int64)
    box_T = touched.worker_T * arenas + arena_T
    number_T = _number_in_box(box_T, workers * arenas)
    # Rows do not go into the cache: a slot is the number of a touch in the message itself.
    first_slot_T = sharding.first_slot_WA[touched.worker_T, arena_T]
    transfers = Transfers(
        worker=touched.worker_T,
        row=rows_T,
        slot=(first_slot_T + number_T).astype(np.int32),
        arena=arena_T.astype(np.uint8),
        kind=np.full(len(rows_T), MISS_PULL, np.uint8),
        record=np.full(len(rows_T), VALUE, np.uint8),
        phase=np.full(len(rows_T), EARLY, np.uint8),
    )
    to_shards, to_workers = schedule_at(TransferTime.EARLY_PULL, transfers, sharding)
    header = header._replace(global_samples=len(batch))
    number_L = np.where(touched.touch_of_lookup >= 0, number_T[touched.touch_of_lookup], -1)
    counts_WA = np.bincount(box_T, minlength=workers * arenas).reshape(workers, arenas)
    samples_W = np.bincount(worker_S, minlength=workers)
    messages = []
    for worker, part in enumerate(split_batch(batch, touched.sample_order_S, samples_W, adapter)):
        lists = _TouchLists(
            local_A=[0] * arenas,
            slot_A=[np.arange(n, dtype=np.int32) for n in counts_WA[worker].tolist()],
            replica_slot_A=[_NONE] * arenas,
            replica_touch_A=[_NONE] * arenas,
            to_init=RowsToInit(_NONE, _NONE),
            touch_L=number_L[part.lookups].astype(np.int32),
        )
        messages.append(EvalBatch(_worker_message(header, to_workers[worker], lists, part)))
    return [Serve(header.step, transfers) for transfers in to_shards], messages


def _number_in_box(box: I64, num_boxes: int) -> I32:
    """Number of each entry within its box, in order."""
    order = np.argsort(box, kind="stable")
    counts = np.bincount(box, minlength=num_boxes)
    numbers = np.empty(len(box), np.int32)
    numbers[order] = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    return numbers


def read_worker_step(
    message: TrainBatch | EvalBatch, rows_A: Sequence[int], num_shards: int, adapter: BatchAdapter
) -> WorkerStep:
    """A worker's step. Refuses a message with a row beyond the cache's `rows_A` of each arena."""
    work = message.work
    fault = _fault(message, rows_A, num_shards, adapter)
    if fault:
        raise refusal(message, COORDINATOR, fault)
    in_plan = isinstance(message, TrainBatch)
    local, touched, replicas = work.counts.reshape(3, -1).tolist()
    micro_batch = _micro_batch(work, adapter)
    touch_L = work.touch_L
    if not work.header.num_samples:
        touch_L = np.full(len(micro_batch.ids), -1, np.int32)
    return WorkerStep(
        header=work.header,
        transfers=work.transfers.by_time(message.step if in_plan else OUTSIDE),
        local_A=local,
        slot_AT=_cut(work.slots_T, touched),
        replica_slot_AU=_cut(work.replica_slots_U, replicas),
        replica_touch_AU=_cut(work.replica_touches_U, replicas),
        to_init=work.to_init,
        touch_L=touch_L,
        micro_batch=micro_batch,
        figures=work.figures,
    )


def _below(numbers: I32, limit: int, least: int = 0) -> bool:
    """Whether all numbers are at least `least` and below a limit."""
    return in_ranges(numbers, np.array([len(numbers)]), np.array([limit]), least)


def _fault(
    message: TrainBatch | EvalBatch, rows_A: Sequence[int], num_shards: int, adapter: BatchAdapter
) -> str:
    """What is wrong with a worker's message; empty: nothing."""
    work, schema = message.work, adapter.schema
    if len(work.counts) != 3 * len(rows_A) or (work.counts < 0).any():
        return f"{len(work.counts)} counts for {len(rows_A)} arenas"
    local_A, touched_A, replicas_A = work.counts.reshape(3, -1).astype(np.int64)
    in_cache = isinstance(message, TrainBatch)  # held-out rows lie in the message's own order
    limit_A = np.array(rows_A, np.int64) if in_cache else touched_A
    facts = {
        "chunks": work.header.chunks in CHUNK_COUNTS,
        "touches": (local_A <= touched_A).all() and len(work.slots_T) == touched_A.sum(),
        "replicas": len(work.replica_slots_U) == len(work.replica_touches_U) == replicas_A.sum(),
        "rows to initialise": len(work.to_init.slots) == len(work.to_init.rows),
        **_sample_facts(work, adapter, schema),
    }
    wrong = [name for name, holds in facts.items() if not holds]
    if wrong:
        return f"its numbers of {wrong[0]} contradict each other"
    ranges = {
        "slots": in_ranges(work.slots_T, touched_A, limit_A, 0),
        "slots of replicas": in_ranges(work.replica_slots_U, replicas_A, limit_A, 0),
        "replicas": in_ranges(work.replica_touches_U, replicas_A, touched_A, -1),
        "slots to initialise": _below(work.to_init.slots, int(limit_A.max())),
        "rows to initialise": _below(work.to_init.rows, schema.num_rows),
        "look-ups": _below(work.touch_L, int(touched_A.max()), -1),
        "row ids": _below(work.row_ids, schema.num_rows, -1),
    }
    wrong = [name for name, holds in ranges.items() if not holds]
    if wrong:
        return f"its {wrong[0]} are out of range"
    return work.transfers.fault(num_shards, limit_A.tolist(), touched_A.tolist())


def _sample_facts(work: WorkerMessage, adapter: BatchAdapter, schema: Schema) -> dict[str, bool]:
    """Whether the sizes of a worker's samples fit each other, by what they count."""
    samples = work.header.num_samples
    bags = samples * schema.num_fields
    lookups = int(work.bag_lengths.sum(dtype=np.int64)) if schema.has_bags else bags
    return {
        "samples": 0 <= samples <= work.header.global_samples,
        "bags": len(work.bag_lengths) == (bags if schema.has_bags else 0)
        and _below(work.bag_lengths, lookups + 1),
        "look-ups": len(work.touch_L) == lookups,
        "dense columns": len(work.dense) == samples * adapter.num_columns,
        "labels": len(work.label) in (0, samples),
        "row ids": len(work.row_ids) == (lookups if adapter.sends_ids else 0),
    }


def _cut(numbers: I32, counts: Sequence[int]) -> list[I32]:
    """Cut an array into lists of these lengths."""
    bounds = pairwise(accumulate(counts, initial=0))
    return [numbers[first:last] for first, last in bounds]


def _micro_batch(message: WorkerMessage, adapter: BatchAdapter) -> MicroBatch:
    """A worker's samples. Without any, one blank sample: the user's loop runs at every step."""
    schema, num_samples = adapter.schema, message.header.num_samples
    if not num_samples:
        offsets = np.concatenate([[0], np.cumsum(adapter.empty_sample())]).astype(np.int64)
        return MicroBatch(
            num_samples=1,
            dense=np.zeros((1, adapter.num_columns), np.float32),
            label=np.zeros(int(schema.labelled), np.float32),
            offsets=offsets,
            ids=np.full(int(offsets[-1]), -1, np.int64),
        )
    offsets = np.arange(num_samples * schema.num_fields + 1, dtype=np.int64)
    if len(message.bag_lengths):
        np.cumsum(message.bag_lengths, out=offsets[1:])
    ids = np.empty(0, np.int64)
    if adapter.sends_ids:
        rows = message.row_ids.astype(np.int64)
        table = np.searchsorted(schema.first_rows, rows, side="right") - 1
        ids = np.where(rows < 0, -1, rows - schema.first_rows[table])
    return MicroBatch(
        num_samples=num_samples,
        dense=message.dense.reshape(num_samples, -1),
        label=message.label,
        offsets=offsets,
        ids=ids,
    )
