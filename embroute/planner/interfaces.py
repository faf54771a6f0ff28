"""The interfaces of a policy's parts: what each part sees and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from embroute.data.access_counts import Calibration
from embroute.data.batch import Batch
from embroute.data.window import Window
from embroute.kernels.array_types import I32, I64, U8, Bools
from embroute.kernels.codes import DELTA, VALUE_STATE
from embroute.kernels.touches import Touches
from embroute.planner.kernels.cache import CachedCopies, Placement
from embroute.planner.kernels.eviction import EvictionMoves
from embroute.planner.kernels.transfers import Decision, StepRows, Transfers
from embroute.planner.plan import Plan
from embroute.planner.setup import Setup
from embroute.planner.state import Memory, State


def no_indices() -> I32:
    """An empty list of indices."""
    return np.empty(0, np.int32)


@dataclass(frozen=True)
class DispatchContext:
    """What a dispatch sees before it chooses a worker for each sample of `window.now.batch`."""

    window: Window  # the batch of this step, its distinct rows, and the batches after it
    state: State  # read it, and change none of it: `state.setup`, `state.memory(kind)`
    rows: StepRows  # the batch's distinct rows, and when they are used before and after
    copies: CachedCopies  # cells of these rows at each worker, FRESH where a read needs no pull
    quotas_W: I64  # samples of each worker; their sum is the batch
    everywhere: I32  # rows that every worker touches, wherever samples go


@dataclass(frozen=True)
class SyncContext:
    """What a sync sees when every sample has a worker."""

    window: Window  # as a dispatch sees it
    state: State  # read it, and change none of it
    rows: StepRows  # the distinct rows, with those that the sync has added
    copies: CachedCopies  # cells of these rows at each worker
    touches: Touches  # distinct pairs of worker and row, in the order of workers
    cell_T: I32  # the copy of each touch
    arena_T: U8  # the arena of each touch: the number of its row's width
    everywhere: I32  # rows that every worker touches

    @property
    def copies_UW(self) -> I32:
        """Cells of the step's rows."""
        return self.copies.copies_UW


@dataclass(frozen=True)
class ExtraRows:
    """Rows that a sync adds to the batch's rows, and the rows that all workers touch."""

    rows: I64
    everywhere: I32  # indices into the batch's distinct rows followed by `rows`
    # Distinct rows of the batch that the sync will add in the next step.
    needed_next: I32 = field(default_factory=no_indices)


@dataclass(frozen=True)
class Assignment:
    """What a dispatch returns."""

    worker_S: I32  # a worker for each sample
    lesson: Memory | None = None  # results of `choose` for `learn`, which finds it in `plan.lesson`


DispatchFunction = Callable[[DispatchContext], Assignment]
Readable = Callable[[State, StepRows, CachedCopies], CachedCopies]


def as_stored(state: State, rows: StepRows, copies: CachedCopies) -> CachedCopies:
    """A copy is readable where its cell says FRESH."""
    return copies


def no_extra(window: Window, state: State) -> ExtraRows:
    """Only the batch's own rows take part in the step."""
    return ExtraRows(np.empty(0, np.int64), no_indices())


def learn_nothing(state: State, plan: Plan) -> None:
    """The next step is decided without a memory of this one."""


def ignore_drain(state: State, transfers: Transfers) -> None:
    """A drain leaves the memory as it is."""


def pin_nothing(state: State) -> Bools | None:
    """Every copy may be evicted."""
    return None


def no_laws(plan: Plan, state: State) -> Iterator[tuple[str, int]]:
    """No laws but those of every policy."""
    yield from ()


class RunStart(NamedTuple):
    """What is known before the first step. `counts_R`: look-ups of each row in a sample."""

    setup: Setup  # workers, tables, record sizes, capacities
    counts_R: I64 | None  # only for policies that regroup samples


@dataclass(frozen=True)
class PartMemory:
    """What a part of a policy keeps from step to step. Checkpoints save it.

    Only `learn` and `learn_drain` may change it, in place: a decision may be made twice. Parts that
    declare the same kind share one memory.
    """

    kind: type[Memory]  # a NamedTuple of arrays, of any shape, of numbers or bool
    init: Callable[[RunStart], Memory]  # at the start; a resume of the same shape loads arrays then
    learn: Callable[[State, Plan], None] = learn_nothing  # after each step
    # For memories that follow the copies: before a checkpoint or evaluation all updates go home.
    learn_drain: Callable[[State, Transfers], None] = ignore_drain  # before a drain cleans copies


class Candidate(NamedTuple):
    """A start of a run: the dispatch to simulate, the dispatch to use, a bound on a step's time."""

    trial: Dispatch
    dispatch: Dispatch
    least_s: float


class WarmStart(NamedTuple):
    """Candidates for the start of a run; each is simulated on the first batches."""

    steps: int
    candidates: Callable[[Setup, int], list[Candidate]]  # of a setup and the samples of a step


@dataclass(frozen=True)
class Dispatch:
    """Which worker trains which sample."""

    name: str
    choose: DispatchFunction
    memory: PartMemory | None = None
    looks_at_caches: bool = True  # whether `choose` reads `context.copies`
    lookahead: int = 0  # batches that are assigned before their step
    free_quotas: bool = False  # whether it chooses how many samples each worker gets
    warm_start: WarmStart | None = None  # other dispatches to try in simulation before step 0


# Copies of rows outlive their step, leave after it, or are never made.
Copies = Literal["kept", "dropped", "none"]


@dataclass(frozen=True)
class Sync:
    """Which rows move before and after a step, and who applies updates."""

    name: str
    decide: Callable[[SyncContext], Decision]
    extra: Callable[[Window, State], ExtraRows] = no_extra
    memory: PartMemory | None = None
    readable: Readable = as_stored
    pinned: Callable[[State], Bools | None] = pin_nothing  # rows whose copies never leave
    laws: Callable[[Plan, State], Iterator[tuple[str, int]]] = no_laws  # as `RowStore.laws`
    bound: int = 0  # how far a read may be behind, in clocks of the sync; 0 is exact
    waits: bool = True  # reads wait for the updates of the step before
    copies: Copies = "kept"
    pipelined: bool = False  # chunks of late pulls move beside chunks of urgent pushes
    refused_optimizers: tuple[str, ...] = ()
    lookahead: int = 1
    whole_tables: bool = False  # every worker keeps all rows; automatic caches hold them
    check_bytes: int = 0  # that the published system sends to ask whether a copy is valid

    @property
    def exact(self) -> bool:
        """Whether every read sees every earlier update."""
        return self.bound == 0

    @property
    def record(self) -> int:
        """The kind of record that a copy with unpushed updates returns.

        Several copies may have updates of their own if reads may miss some: their sums travel.
        """
        return DELTA if self.bound else VALUE_STATE

    @property
    def shared_memory(self) -> bool:
        """Whether rows are read and trained where the shards keep them."""
        return self.copies == "none"


@dataclass(frozen=True)
class Evict:
    """Which copy leaves a full cache: copies lie in buckets, which lose copies in an order."""

    name: str
    num_buckets: int
    order: Callable[[int], I32]  # step -> buckets in the order in which they lose copies
    moves: Callable[[SyncContext, Decision, Placement], EvictionMoves]
    memory: PartMemory | None = None
    lookahead: int = 1


@dataclass(frozen=True)
class Regroup:
    """A stage before the window that changes the order of samples."""

    name: str
    stream: Callable[[Iterator[Batch], State], Iterator[Batch]]
    memory: PartMemory | None = None
    calibration: Calibration = field(default_factory=Calibration)  # of `RunStart.counts_R`
    learn_loss: Callable[[State, float], None] | None = None  # after each evaluation


@dataclass(frozen=True)
class Policy:
    """A policy: its parts, and what follows from them."""

    name: str
    dispatch: Dispatch
    sync: Sync
    evict: Evict
    regroup: Regroup | None = None
    workers: str = "all"  # all, fast, or a list such as 0+1+2
    unbounded: bool = False  # a reference line whose caches never fill

    @property
    def lookahead(self) -> int:
        """Batches after the current one that its decisions read."""
        return max(1, self.dispatch.lookahead, self.sync.lookahead, self.evict.lookahead)

    @property
    def exact(self) -> bool:
        """Whether training with it equals single-process training on the same batches."""
        return self.sync.exact

    @property
    def order_changed(self) -> bool:
        """Whether samples are trained in another order than the data's."""
        return self.regroup is not None

    @property
    def memories(self) -> list[PartMemory]:
        """The memories that its parts declare."""
        parts = (self.dispatch, self.sync, self.evict, self.regroup)
        return [part.memory for part in parts if part is not None and part.memory is not None]
