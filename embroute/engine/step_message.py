"""What the coordinator tells a worker of a step: written at one end, read at the other.

Axes: W workers, A arenas, T touches, L look-ups, U replicated rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from embroute.data.batch import Batch
from embroute.engine.batches import BatchAdapter, MicroBatch
from embroute.engine.kernels.touch_order import renumber
from embroute.engine.schedule import (
    RankTransfers,
    TouchOrder,
    TransferSchedule,
    order_touches,
    pull_schedule,
    step_schedule,
)
from embroute.engine.sharding import RowSharding
from embroute.kernels.array_types import F32, I32, I64, Array
from embroute.kernels.codes import EARLY, MISS_PULL, VALUE
from embroute.kernels.distinct import distinct
from embroute.kernels.touches import Lookups, touches
from embroute.planner.kernels.transfers import Transfers
from embroute.planner.plan import Plan

# Flags of a step, for the user's loop.
EPOCH_ENDS, EVAL_FOLLOWS, FINAL_EVAL = 1, 2, 4


@dataclass(frozen=True)
class StepHeader:
    """Figures of a step that every worker is told."""

    step: int
    global_samples: int
    num_samples: int  # of this worker
    flags: int = 0
    hits: int = 0
    touches: int = 0
    parts: int = 1  # in which what is urgent and what is late moves before it

    def array(self) -> I64:
        """As it is sent."""
        return np.array(list(self.__dict__.values()), np.int64)


class RowsToInit(NamedTuple):
    """Rows of a step that a worker makes, because nobody has trained them yet, and their slots."""

    slots: I32  # of their arenas
    rows: I32


@dataclass(frozen=True)
class WorkerStep:
    """A step as a worker computes it."""

    header: StepHeader
    transfers: RankTransfers
    local_A: list[int]  # touches that this worker updates itself: the first of each arena
    slot_AT: list[I32]
    replica_slot_AU: list[I32]
    replica_touch_AU: list[I32]  # -1 where this worker did not touch the row
    to_init: RowsToInit
    touch_L: I32
    micro_batch: MicroBatch
    figures: I64  # for whoever watches; empty if nobody does, and at other workers than the first

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.header.step


@dataclass(frozen=True)
class SampleSlice:
    """A worker's share of a batch."""

    num_samples: int
    lookups: slice
    lengths: I32  # of bags, sample by sample; empty where every field holds one id
    dense: F32
    label: F32
    rows: I64  # empty unless the feed sends ids


def split_batch(
    batch: Batch, order_S: I32, samples_W: I64, adapter: BatchAdapter
) -> list[SampleSlice]:
    """Cut a batch whose samples are ordered by worker."""
    samples = order_S.astype(np.intp)
    bounds = np.concatenate([[0], np.cumsum(samples_W)])
    lengths_SF, ends = np.empty((0, batch.num_fields), np.int32), bounds * batch.num_fields
    if adapter.schema.has_bags:
        lengths_SF = np.diff(batch.offsets).reshape(-1, batch.num_fields)[samples].astype(np.int32)
        ends = np.concatenate([[0], np.cumsum(lengths_SF.sum(1, dtype=np.int64))])[bounds]
    dense = np.ascontiguousarray(np.take(batch.dense, samples, 0), np.float32)
    label = np.take(batch.label, samples) if len(batch.label) else batch.label
    rows = batch.take(samples).rows if adapter.sends_ids else np.empty(0, np.int64)
    parts = []
    for worker, (first, last) in enumerate(pairwise(bounds.tolist())):
        lookups = slice(int(ends[worker]), int(ends[worker + 1]))
        own = label[first:last] if len(label) else label
        lengths = lengths_SF[first:last].ravel()
        part = SampleSlice(last - first, lookups, lengths, dense[first:last], own, rows[lookups])
        parts.append(part)
    return parts


def _replicas(plan: Plan, order: TouchOrder, sharding: RowSharding) -> list[tuple[I32, I32]]:
    """By arena, for the rows whose gradients are all-reduced: slots and touches, rows x workers."""
    if not len(plan.replica_UW):
        return [(plan.replica_UW, plan.replica_UW) for _ in range(sharding.num_arenas)]
    chosen = plan.replicated_U
    arena_U, first_WA = plan.rows.arena_U[chosen], sharding.first_slot_WA
    number_UW = np.full((len(plan.rows.rows_U), sharding.num_workers), -1, np.int32)
    number_UW[plan.touches.unique_T, plan.touches.worker_T] = order.number_T
    found = []
    for arena in range(sharding.num_arenas):
        inside = arena_U == arena
        slots = plan.replica_UW[inside] - first_WA[:, arena].astype(np.int32)
        found.append((slots, number_UW[chosen[inside]]))
    return found


def _made(plan: Plan, sharding: RowSharding) -> list[RowsToInit]:
    """What each worker makes."""
    made, touches = plan.initialised_T, plan.touches
    unique, worker = touches.unique_T[made], touches.worker_T[made]
    first = sharding.first_slot_WA[worker, plan.rows.arena_U[unique]]
    slots = (plan.placement.slot_T[made] - first).astype(np.int32)
    rows = plan.rows.rows_U[unique].astype(np.int32)
    bounds = np.searchsorted(made, touches.first_W).tolist()
    return [RowsToInit(slots[a:b], rows[a:b]) for a, b in pairwise(bounds)]


def _worker_note(
    about: StepHeader,
    listing: Sequence[Array],
    sizes: list[list[int]],
    lists: Sequence[Array],
    part: SampleSlice,
) -> list[Array]:
    return [
        about.array(),
        *listing,
        np.array(sizes, np.int32).ravel(),
        *lists,
        part.lengths,
        part.dense.ravel(),
        part.label,
        part.rows.astype(np.int32),
        np.empty(0, np.int64),
    ]


def step_messages(
    plan: Plan, sharding: RowSharding, adapter: BatchAdapter, flags: int
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Notes of a step for all shards and all workers."""
    order = order_touches(plan, sharding)
    script = step_schedule(plan, order.number_T, sharding)
    number_L = renumber(order.number_T, plan.touches.touch_of_lookup)
    replicas, made = _replicas(plan, order, sharding), _made(plan, sharding)
    parts = split_batch(plan.now.batch, plan.touches.sample_order_S, plan.samples_W, adapter)
    hits, touched = plan.hits
    workers = []
    for worker, part in enumerate(parts):
        about = StepHeader(
            plan.step, len(plan.now.batch), part.num_samples, flags, hits, touched, plan.chunks
        )
        slots = order.slot_WA[worker]
        sizes = [
            order.local_WA[worker].tolist(),
            [len(own) for own in slots],
            [len(slots_UW) for slots_UW, _ in replicas],
        ]
        lists = [
            np.concatenate(slots),
            np.concatenate([slots_UW[:, worker] for slots_UW, _ in replicas]),
            np.concatenate([touch_UW[:, worker] for _, touch_UW in replicas]),
            *made[worker],
            number_L[part.lookups],
        ]
        workers.append(_worker_note(about, script.workers[worker], sizes, lists, part))
    return _shard_notes(plan.step, script, plan.chunks), workers


def _shard_notes(step: int, script: TransferSchedule, parts: int = 1) -> list[list[Array]]:
    about = np.array([step, parts], np.int64)
    return [[about, *listing] for listing in script.shards]


def evaluation_messages(
    batch: Batch, about: StepHeader, sharding: RowSharding, adapter: BatchAdapter
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Notes of an evaluation batch: samples in even blocks, rows pulled past the caches."""
    workers, arenas = sharding.num_workers, sharding.num_arenas
    worker_S = (np.arange(len(batch)) * workers // max(1, len(batch))).astype(np.int32)
    rows_U = np.empty(len(batch.rows), np.int64)
    unique_L = np.empty(len(batch.rows), np.int32)
    table = np.zeros(1 << max(4, (5 * len(batch.rows) // 4).bit_length()), np.int32)
    count = distinct(batch.rows, table, rows_U, unique_L)
    lookups = Lookups(unique_L, np.ascontiguousarray(batch.sample_offsets))
    touched = touches(lookups, worker_S, workers, count, np.empty(0, np.int32))
    rows_T = rows_U[touched.unique_T]
    arena_T = sharding.setup.arena_of(rows_T).astype(np.int64)
    number_T = _numbers(touched.worker_T * arenas + arena_T, workers * arenas)
    first_slot_T = sharding.first_slot_WA[touched.worker_T, arena_T]
    fixed = np.zeros(len(rows_T), np.uint8)
    transfers = Transfers(
        touched.worker_T,
        rows_T,
        (first_slot_T + number_T).astype(np.int32),
        arena_T.astype(np.uint8),
        fixed + np.uint8(MISS_PULL),
        fixed + np.uint8(VALUE),
        fixed + np.uint8(EARLY),
    )
    script = pull_schedule(transfers, sharding)
    number_L = np.where(touched.touch_of_lookup >= 0, number_T[touched.touch_of_lookup], -1)
    counts_WA = np.bincount(touched.worker_T * arenas + arena_T, minlength=workers * arenas)
    samples_W = np.bincount(worker_S, minlength=workers)
    messages = []
    for worker, part in enumerate(split_batch(batch, touched.sample_order_S, samples_W, adapter)):
        counts = counts_WA[worker * arenas : (worker + 1) * arenas].tolist()
        sizes = [[0] * arenas, counts, [0] * arenas]
        slots = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
        none = np.empty(0, np.int32)
        lists = [slots, none, none, none, none, number_L[part.lookups].astype(np.int32)]
        own = replace(about, global_samples=len(batch), num_samples=part.num_samples)
        messages.append(_worker_note(own, script.workers[worker], sizes, lists, part))
    return _shard_notes(about.step, script), messages


def _numbers(box: I64, num_boxes: int) -> I32:
    """Number of each entry within its box, in order."""
    order = np.argsort(box, kind="stable")
    counts = np.bincount(box, minlength=num_boxes)
    numbers = np.empty(len(box), np.int32)
    numbers[order] = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    return numbers


def read_worker_step(arrays: Sequence[Array], num_arenas: int, adapter: BatchAdapter) -> WorkerStep:
    """A worker's step out of the coordinator's note."""
    about_, heads, index, sizes, slots, hot_slots, hot_touches, *made, touch_L = arrays[:10]
    dealt = arrays[10:]
    about = StepHeader(*about_.tolist())
    local, total, hot = sizes.reshape(3, num_arenas).tolist()
    touch = np.asarray(touch_L, np.int32)
    samples = _dealt(about.num_samples, dealt, adapter)
    if not about.num_samples:
        touch = np.full(len(samples.ids), -1, np.int32)
    return WorkerStep(
        about,
        RankTransfers.read(heads, index),
        local,
        _cut(slots, total),
        _cut(hot_slots, hot),
        _cut(hot_touches, hot),
        RowsToInit(*(np.asarray(array, np.int32) for array in made)),
        touch,
        samples,
        np.asarray(dealt[-1], np.int64),
    )


def _cut(numbers: Array, counts: Sequence[int]) -> list[I32]:
    """Lists one after the other, apart."""
    ends = list(accumulate(counts, initial=0))
    return [np.asarray(numbers[first:last], np.int32) for first, last in pairwise(ends)]


def _dealt(num_samples: int, arrays: Sequence[Array], adapter: BatchAdapter) -> MicroBatch:
    """A worker's samples. Without any, one blank sample: the user's loop runs at every step."""
    lengths, dense, label, rows, _ = arrays
    schema = adapter.schema
    fields = schema.num_fields
    if not num_samples:
        blank = adapter.empty_sample()
        offsets = np.concatenate([[0], np.cumsum(blank)]).astype(np.int64)
        return MicroBatch(
            1,
            np.zeros((1, adapter.num_columns), np.float32),
            np.zeros(int(schema.labelled), np.float32),
            offsets,
            np.full(int(offsets[-1]), -1, np.int64),
        )
    offsets = np.arange(num_samples * fields + 1, dtype=np.int64)
    if len(lengths):
        np.cumsum(lengths, out=offsets[1:])
    ids = np.empty(0, np.int64)
    if adapter.sends_ids:
        found = rows.astype(np.int64)
        table = np.searchsorted(schema.first_rows, found, side="right") - 1
        ids = np.where(found < 0, -1, found - schema.first_rows[table])
    return MicroBatch(
        num_samples,
        np.asarray(dense, np.float32).reshape(num_samples, -1),
        np.asarray(label, np.float32),
        offsets,
        ids,
    )
