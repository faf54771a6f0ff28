"""The messages of the step protocol, one class a kind.

The coordinator sends each rank a message, and waits until all ranks have received theirs. Axes:
T touches, L look-ups, U replicated rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.engine.schedule import RankTransfers
from embroute.kernels.array_types import F32, I32, I64, Array
from embroute.transport.interface import MessageError

NO_FIGURES: I64 = np.empty(0, np.int64)


class Hello(NamedTuple):
    """A text that a rank needs before the first step, such as the shape of batches."""

    text: str


class StepHeader(NamedTuple):
    """Numbers of a step that every worker receives."""

    step: int
    global_samples: int
    num_samples: int  # of this worker
    flags: int = 0
    hits: int = 0
    touches: int = 0
    chunks: int = 1  # of the urgent pushes and late pulls before the step


class RowsToInit(NamedTuple):
    """Rows that no step has trained yet, which a worker computes from the seed."""

    slots: I32  # of their arenas
    rows: I32


class WorkerMessage(NamedTuple):
    """A worker's part of a batch, and the rows that move for it."""

    header: StepHeader
    transfers: RankTransfers
    counts: I32  # by arena: touches to update locally; then all touches; then replicas
    slots_T: I32  # arena by arena
    replica_slots_U: I32
    replica_touches_U: I32
    to_init: RowsToInit
    touch_L: I32
    bag_lengths: I32
    dense: F32
    label: F32
    row_ids: I32  # empty unless the adapter sends ids
    figures: I64  # bytes moved, for a display; empty without one


class ShardStep(NamedTuple):
    """To a shard: the transfers of a step."""

    step: int
    chunks: int
    transfers: RankTransfers


class TrainBatch(NamedTuple):
    """To a worker: a step."""

    work: WorkerMessage

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.work.header.step


class EvalBatch(NamedTuple):
    """To a worker: held-out samples, whose rows bypass the cache."""

    work: WorkerMessage

    @property
    def step(self) -> int:
        """Steps trained before the evaluation."""
        return self.work.header.step


class EvalEnd(NamedTuple):
    """The end of an evaluation."""

    step: int


class Drain(NamedTuple):
    """Every update goes home to its shard."""

    step: int
    transfers: RankTransfers


class Serve(NamedTuple):
    """To a shard: rows that workers pull outside of a step, for an evaluation or a refill."""

    step: int
    transfers: RankTransfers


class Refill(NamedTuple):
    """To a worker: copies that return into their slots after a resume."""

    step: int
    transfers: RankTransfers


class Save(NamedTuple):
    """Write this rank's part of a checkpoint of the state after this number of steps."""

    step: int


class Stop(NamedTuple):
    """The end of the job; at the first worker with the figures of the final drain."""

    step: int
    figures: I64


class Reply(NamedTuple):
    """To the coordinator: a list as JSON, such as the files that a rank wrote."""

    text: str


class Gathered(NamedTuple):
    """To the first worker: an array that it gathers, flat."""

    rows: int
    values: Array


ControlMessage = (
    Hello
    | ShardStep
    | TrainBatch
    | EvalBatch
    | EvalEnd
    | Drain
    | Serve
    | Refill
    | Save
    | Stop
    | Reply
    | Gathered
)


def step_of_message(message: ControlMessage) -> int:
    """The step that a message is about; 0 if it is about none."""
    return getattr(message, "step", 0)


def refusal(message: ControlMessage, peer: str, fault: str) -> MessageError:
    """The error of a message from a peer that this rank cannot obey."""
    name = type(message).__name__
    return MessageError(f"{peer} sent {name} of step {step_of_message(message)}: {fault}")
