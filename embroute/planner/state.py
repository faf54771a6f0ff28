"""The planner's state: every worker's cache and eviction order, and the memories of policies.

Only `advance` and `drain_state` change it. A checkpoint stores the arrays under their field names.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from embroute.config.spec import one_line
from embroute.kernels.array_types import I32, I64, Array
from embroute.kernels.codes import DIRTY, NUM_SLOT_FIELDS, ROW, SLOT_MASK
from embroute.planner.kernels.cache import Caches, Cells
from embroute.planner.kernels.eviction import empty_lists
from embroute.planner.setup import Setup

_PACKAGE = Path(__file__).parent.parent
MAPPED_BYTES = 1 << 29  # of each large array, mapped before the first step


class PlanError(RuntimeError):
    """A plan that breaks a law, or an error in a part: a fault of a policy, never of its user."""


@contextmanager
def naming_part(policy: str, place: str) -> Iterator[None]:
    """Name the policy and the place in an error of a part's function; keep its own frames.

    A ValueError of the package itself is about what a user has typed: it stays as it is.
    """
    try:
        yield
    except Exception as error:
        of_part = error.__traceback__
        for _ in range(2):  # frames: this function and its caller
            of_part = of_part and of_part.tb_next
        frames = traceback.extract_tb(of_part)
        packaged = frames and Path(frames[-1].filename).is_relative_to(_PACKAGE)
        if isinstance(error, ValueError) and packaged:
            raise
        if isinstance(error, PlanError):
            raise PlanError(f"{policy}, {place}: {error}") from error.with_traceback(of_part)
        last = [frame for frame in frames if frame.filename == frames[0].filename][-1:]
        at = "".join(f" ({Path(one.filename).name}, line {one.lineno})" for one in last)
        fault = one_line("".join(traceback.format_exception_only(error)).strip())
        raise PlanError(f"{policy}, {place}: {fault}{at}") from error.with_traceback(of_part)


class Memory(Protocol):
    """What a policy keeps from step to step: a NamedTuple of arrays, which are changed in place."""

    def _asdict(self) -> dict[str, Array]: ...


M = TypeVar("M", bound=Memory)


@dataclass
class State:
    """Every copy of every row, as the coordinator knows it. Arrays of zeros are empty caches."""

    setup: Setup
    caches: Caches
    memories: Mapping[type[Memory], Memory] = field(default_factory=dict)
    step: int = 0

    def memory(self, kind: type[M]) -> M:
        """The memory of this kind, which a part of the policy declares."""
        memory = self.memories.get(kind)
        if not isinstance(memory, kind):
            known = ", ".join(declared.__name__ for declared in self.memories) or "none"
            raise PlanError(
                f"no part of the policy declares a memory of {kind.__name__} (declared: {known}); "
                f"give its Dispatch, Sync or Evict memory=PartMemory({kind.__name__}, ...)"
            )
        return memory


def for_decision(state: State) -> State:
    """The state as a decision sees it: memories of users' parts cannot be written.

    Those of the package stay writable, because its kernels are compiled for such arrays.
    """
    memories = dict(state.memories)
    for kind, memory in state.memories.items():
        if not kind.__module__.startswith("embroute."):
            views = {name: array.view() for name, array in memory._asdict().items()}
            for view in views.values():
                view.flags.writeable = False
            memories[kind] = kind(**views)
    return replace(state, memories=memories)


def empty_state(setup: Setup, num_buckets: int, memories: Sequence[Memory] = ()) -> State:
    """All caches empty. The system commits a page of zeros at its first write."""
    num_rows, capacity_WA = setup.schema.num_rows, setup.capacity_WA
    workers = len(capacity_WA)
    slots = int(capacity_WA.sum(1).max())
    first_WA = np.cumsum(capacity_WA, 1) - capacity_WA

    number_R = np.zeros(num_rows, np.int32)
    # Number 0 is for untouched rows. Without slots there are no copies: one row of cells is enough.
    cell_NW = _aligned_zeros(num_rows + 1 if slots else 1, workers)
    slot_WCF = np.zeros((workers, slots, NUM_SLOT_FIELDS), np.int32)
    caches = Caches(
        cells=Cells(number_R, cell_NW, numbered=np.zeros(1, np.int64)),
        slot_WCF=slot_WCF,
        first_WA=first_WA,
        capacity_WA=capacity_WA,
        used_WA=np.zeros_like(capacity_WA),
        eviction=empty_lists(capacity_WA, num_buckets),
        planning=np.zeros(1, np.int64),
    )
    return State(setup, caches, {type(memory): memory for memory in memories})


def _aligned_zeros(num_rows: int, width: int) -> I32:
    """Zeros from the start of a cache line on, so that few short rows lie across two lines."""
    # One line more than needed; then skip to the next multiple of a line's 16 entries.
    line = 64 // np.dtype(np.int32).itemsize
    zeros = np.zeros(num_rows * width + line, np.int32)
    skipped = -(zeros.ctypes.data // zeros.itemsize) % line
    return zeros[skipped : skipped + num_rows * width].reshape(num_rows, width)


def prefault(empty: State) -> None:
    """Let the system map the pages that a run reaches first now, not during its steps."""
    caches = empty.caches
    caches.cells.number_R.fill(0)
    for zeros_XYZ in (
        caches.cells.cell_NW[np.newaxis],
        caches.slot_WCF,
        caches.eviction.ticket_WQ4,
    ):
        width = zeros_XYZ.shape[0] * zeros_XYZ.shape[2] * zeros_XYZ.itemsize
        zeros_XYZ[:, : MAPPED_BYTES // max(1, width)].fill(0)


def held_slots(state: State, worker: int) -> tuple[I32, I32]:
    """Slots of a worker that hold a copy, and their cells, in slot order."""
    caches = state.caches
    spans = zip(caches.first_WA[worker], caches.used_WA[worker], strict=True)
    slots = np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in spans])
    # The row that a slot held last may have left it: its cell then names another slot or none.
    number = caches.cells.number_R[caches.slot_WCF[worker, slots, ROW]]
    cells = caches.cells.cell_NW[number, worker]
    kept = (cells & SLOT_MASK) == slots + 1
    return slots[kept], cells[kept]


def dirty_rows(state: State, worker: int) -> tuple[I64, I32]:
    """Rows and slots of a worker whose update the shard does not have."""
    slots, cells = held_slots(state, worker)
    slots = slots[(cells & DIRTY) != 0]
    return state.caches.slot_WCF[worker, slots, ROW].astype(np.int64), slots
