"""All ranks in one process: plans carried out on real rows, phase by phase, without a network.

The distributed runtime runs the same phases over torch.distributed; tests hold both to the same
results. What moves is counted here as it moves, not as it was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import (
    EARLY,
    EXCLUSIVE,
    GRADIENT,
    LATE,
    LAZY,
    LOCAL,
    URGENT,
)
from embroute.kernels.rows import Floats
from embroute.kernels.transfers import Transfers
from embroute.policy.parts import Policy
from embroute.policy.plan import Plan, drain
from embroute.policy.setup import Setup
from embroute.policy.state import State
from embroute.runtime.optim import RowOptimizer
from embroute.runtime.script import Group, groups
from embroute.runtime.store import CacheStore, Places, ShardStore

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """A worker's part of a step: its samples, and where their look-ups lie among its touches."""

    worker: int
    samples: I32  # indices into the batch
    touch_of_lookup: I64  # counted from the worker's first touch; -1 for padding
    arena_T: npt.NDArray[np.uint8]
    slot_T: I32
    values: tuple[Floats, ...]  # by arena, rows in the order of the arena's touches


# Gives the gradients of `values`, summed over the samples' share of the loss.
Compute = Callable[[Plan, MicroBatch], tuple[Floats, ...]]


@dataclass
class Twin:
    """Coordinator, shards and workers of one job, stepping together."""

    setup: Setup
    policy: Policy
    optimizer: RowOptimizer
    dtype: npt.DTypeLike = np.float64
    shards: list[ShardStore] = field(init=False)
    workers: list[CacheStore] = field(init=False)
    moved_bytes: int = 0  # rows, all-reduced ones apart
    drained_bytes: int = 0
    _staged: list[tuple[Group, Floats]] = field(default_factory=list)
    _urgent: list[tuple[Group, Floats]] = field(default_factory=list)

    def __post_init__(self) -> None:
        places = Places(self.setup)
        self.places = places
        self.shards = [
            ShardStore(k, places, self.optimizer, self.dtype)
            for k in range(self.setup.cluster.num_shards)
        ]
        self.workers = [
            CacheStore(w, self.setup, self.optimizer, self.dtype)
            for w in range(self.setup.num_workers)
        ]

    def step(self, plan: Plan, compute: Compute) -> None:
        """Carry out one plan: what arrives before it, its compute, what leaves after it."""
        self._before(plan)
        grads = [compute(plan, self._micro_batch(plan, w)) for w in range(len(self.workers))]
        self._after(plan, grads)

    def _groups(self, lists: Sequence[Transfers], phase: int) -> list[Group]:
        return groups(lists, phase, len(self.shards))

    def _stage(self, pushes: list[Group]) -> list[tuple[Group, Floats]]:
        """Copy what is pushed out of the caches, whose slots may soon be taken over."""
        staged = [(group, self.workers[group.worker].read(group)) for group in pushes]
        self.moved_bytes += sum(block.nbytes for _, block in staged)
        return staged

    def _land(self, pushed: list[tuple[Group, Floats]], step: int) -> None:
        """Pushes arrive at their shards; gradients of one row are summed before they count."""
        for k, shard in enumerate(self.shards):
            mine = [(group, block) for group, block in pushed if group.shard == k]
            for group, block in mine:
                if group.record != GRADIENT:
                    shard.write(group, block)
            shard.update([pair for pair in mine if pair[0].record == GRADIENT], step)

    def _pull(self, pulls: list[Group]) -> None:
        for group in pulls:
            block = self.shards[group.shard].read(group)
            self.moved_bytes += block.nbytes
            self.workers[group.worker].write(group, block)

    def _before(self, plan: Plan) -> None:
        """Early pushes and pulls, urgent pushes, late pulls, in the order in which they may run.

        Updates of step t-1 that are urgent land with the urgent pushes, lazy ones with the early.
        """
        home = (plan.returns, plan.evictions)
        late_evictions = self._stage(self._groups((plan.evictions,), LAZY))
        early = self._stage(self._groups(home, EARLY))
        self._land(self._staged, plan.step)
        self._land(early, plan.step)
        urgent = self._stage(self._groups(home, URGENT))
        self._land(self._urgent, plan.step)
        self._land(urgent, plan.step)
        self._staged, self._urgent = late_evictions, []
        self._pull(self._groups((plan.pulls,), EARLY))
        self._pull(self._groups((plan.pulls,), LATE))

    def _micro_batch(self, plan: Plan, worker: int) -> MicroBatch:
        touches = plan.touches
        first, last = touches.first_W[worker : worker + 2]
        arena_T = plan.rows.arena_U[touches.unique_T[first:last]]
        slot_T = plan.placement.slot_T[first:last]
        samples = touches.sample_order_S[plan.worker_S[touches.sample_order_S] == worker]
        lookups = np.diff(plan.now.batch.sample_offsets)[touches.sample_order_S]
        owner = np.repeat(plan.worker_S[touches.sample_order_S], lookups)
        touch = touches.touch_of_lookup[owner == worker].astype(np.int64)
        store = self.workers[worker]
        values = tuple(
            store.values(arena, slot_T[arena_T == arena]) for arena in range(len(store.widths))
        )
        return MicroBatch(
            worker, samples, np.where(touch >= 0, touch - first, -1), arena_T, slot_T, values
        )

    def _after(self, plan: Plan, grads: list[tuple[Floats, ...]]) -> None:
        """Gradients are applied where the plan says; updates leave, urgent or lazy."""
        for worker, store in enumerate(self.workers):
            arena_T, slot_T = self._touched(plan, worker)
            for arena, grad in enumerate(grads[worker]):
                store.keep_gradients(arena, slot_T[arena_T == arena], grad)
        self._reduce_replicas(plan)
        urgent = self._stage(self._groups((plan.updates,), URGENT))
        lazy_gradients = self._groups((plan.updates,), LAZY)
        lazy = self._stage([group for group in lazy_gradients if group.record == GRADIENT])
        self._apply_local(plan)
        # A value that leaves for good carries this step's update.
        lazy += self._stage([group for group in lazy_gradients if group.record != GRADIENT])
        self._urgent, self._staged = urgent, self._staged + lazy

    def _touched(self, plan: Plan, worker: int) -> tuple[npt.NDArray[np.uint8], I32]:
        first, last = plan.touches.first_W[worker : worker + 2]
        unique = plan.touches.unique_T[first:last]
        return plan.rows.arena_U[unique], plan.placement.slot_T[first:last]

    def _apply_local(self, plan: Plan) -> None:
        """Sole touchers, and everyone under bounded staleness, update their own copies."""
        mode_T = plan.decision.mode_T
        for worker, store in enumerate(self.workers):
            first, last = plan.touches.first_W[worker : worker + 2]
            arena_T, slot_T = self._touched(plan, worker)
            own = np.isin(mode_T[first:last], (EXCLUSIVE, LOCAL))
            for arena in range(len(store.widths)):
                store.apply(arena, slot_T[own & (arena_T == arena)], plan.step + 1)

    def _reduce_replicas(self, plan: Plan) -> None:
        """Sum replicas' gradients over workers, in worker order, and update every replica alike."""
        chosen = plan.replicated_U
        arena_U = plan.rows.arena_U[chosen]
        for arena in range(len(self.setup.arenas)):
            picked = arena_U == arena
            rows, slots_UW = chosen[picked], plan.replica_UW[picked]
            total = np.zeros((len(rows), self.setup.arenas[arena]), self.dtype)
            for worker in range(len(self.workers)):
                total += self._replica_gradients(plan, worker, rows, slots_UW[:, worker], arena)
            for worker, store in enumerate(self.workers):
                store.keep_gradients(arena, slots_UW[:, worker], total)
                store.apply(arena, slots_UW[:, worker], plan.step + 1)

    def _replica_gradients(
        self, plan: Plan, worker: int, rows: I64, slots: I32, arena: int
    ) -> Floats:
        """One worker's gradients of replicated rows; zeros where it did not touch a row."""
        first, last = plan.touches.first_W[worker : worker + 2]
        touched = np.isin(rows, plan.touches.unique_T[first:last])
        group = Group(worker, 0, arena, GRADIENT, rows, slots)
        return self.workers[worker].read(group) * touched[:, None]

    def drain(self, state: State) -> None:
        """Bring every update home."""
        self._land(self._staged, state.step)
        self._land(self._urgent, state.step)
        self._staged, self._urgent = [], []
        transfers = drain(state, self.policy.sync.record)
        before = self.moved_bytes
        self._land(self._stage(self._groups((transfers,), EARLY)), state.step)
        self.drained_bytes += self.moved_bytes - before
