"""The layers that replace a model's tables: they read rows from the worker's cache.

A look-up is not part of the autograd graph: its result is a leaf. After the backward pass, the
gradients of all leaves are added to the gradients of their rows. So each direction passes over the
rows once.

Axes: A arenas, T touches of the worker in an arena, L look-ups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from embroute.data.schema import Schema
from embroute.engine.batches import LookupCall, lookups_of
from embroute.kernels.array_types import I32, I64
from embroute.kernels.rows import Bags, Floats, pool, pool_backward
from embroute.models.layers import Samples


@dataclass(frozen=True)
class StepLookups:
    """The rows of a step by arena, and the position of each look-up in them."""

    records_A: Sequence[Floats]
    slot_AT: Sequence[I32]
    touch_L: I32
    offsets: I64
    num_fields: int
    num_samples: int
    ids: Sequence[torch.Tensor | None]  # by call: the ids that its layer must receive, if known


class LookupLeaf(NamedTuple):
    """The result of a look-up, whose gradient belongs to rows of an arena."""

    tensor: torch.Tensor
    bags: Bags
    arena: int


@dataclass
class LookupContext:
    """The look-ups of the current step, shared by all routed layers of a model."""

    arenas: tuple[int, ...]  # widths
    arena_of_table: tuple[int, ...]
    device: str = "cpu"
    lookups: StepLookups | None = None  # None between a backward pass and the next step
    _leaves: list[LookupLeaf] = field(default_factory=list)
    _buffers: dict[int, Floats] = field(default_factory=dict)  # for gradients, by arena

    def begin(self, lookups: StepLookups) -> None:
        """Start a step, and forget the look-ups of the last one."""
        self.lookups = lookups
        self._leaves = []

    def look_up(self, call: LookupCall, mean: bool) -> torch.Tensor:
        """Pooled rows of a call, of shape (samples, *call.tail, width)."""
        lookups = self.current()
        bags = Bags(
            lookups.touch_L, lookups.offsets, lookups.num_fields, call.first, call.last, mean
        )
        return self._pooled(call.table, bags, (lookups.num_samples, *call.tail))

    def look_up_bags(self, call: LookupCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Every row of a call's bags without padding, and the number of rows in each bag."""
        lookups = self.current()
        positions, lengths = lookups_of(call, lookups.offsets, lookups.num_fields)
        touch_I = lookups.touch_L[positions]
        bag_I = np.repeat(np.arange(len(lengths)), lengths)[touch_I >= 0]
        touch_I = touch_I[touch_I >= 0]
        # To the kernel every row is a bag of its own.
        bags = Bags(touch_I, np.arange(len(touch_I) + 1), 1, 0, 1, False)
        counts = torch.from_numpy(np.bincount(bag_I, minlength=len(lengths)))
        return self._pooled(call.table, bags, (len(touch_I),)), counts.to(self.device)

    def _pooled(self, table: int, bags: Bags, shape: tuple[int, ...]) -> torch.Tensor:
        """The pooled rows of bags, as a leaf whose gradient is kept for the rows."""
        lookups, arena = self.current(), self.arena_of_table[table]
        records, width = lookups.records_A[arena], self.arenas[arena]
        out = np.empty((math.prod(shape), width), records.dtype)
        pool(records, lookups.slot_AT[arena], bags, out)
        leaf = torch.from_numpy(out).reshape(*shape, width).to(self.device)
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            self._leaves.append(LookupLeaf(leaf, bags, arena))
        return leaf

    def current(self) -> StepLookups:
        """The look-ups of the current step."""
        if self.lookups is None:
            raise RuntimeError("a routed layer was called outside of the prepared loader's loop")
        return self.lookups

    def gradients(self) -> list[Floats]:
        """Gradients of the step's touches, by arena. The next step reuses their memory."""
        lookups = self.current()
        grads = [
            self._zeros(arena, len(slots), records.dtype)
            for arena, (slots, records) in enumerate(
                zip(lookups.slot_AT, lookups.records_A, strict=True)
            )
        ]
        for leaf in self._leaves:
            if leaf.tensor.grad is not None:
                grad = leaf.tensor.grad.reshape(-1, self.arenas[leaf.arena])
                pool_backward(grad.contiguous().cpu().numpy(), leaf.bags, grads[leaf.arena])
        self._leaves = []
        return grads

    def _zeros(self, arena: int, count: int, dtype: np.dtype[np.float32 | np.float64]) -> Floats:
        """Zeros in memory that earlier steps used: page faults of new memory cost more."""
        buffer = self._buffers.get(arena)
        if buffer is None or len(buffer) < count or buffer.dtype != dtype:
            # A quarter to spare: steps touch similar, but not equal, numbers of rows.
            buffer = np.empty((count + count // 4, self.arenas[arena]), dtype)
            self._buffers[arena] = buffer
        buffer[:count] = 0
        return buffer[:count]


class RoutedLayer(nn.Module):
    """The replacement of one `nn.Embedding` or `nn.EmbeddingBag`."""

    def __init__(self, name: str, table: int, mean: bool, lookup_context: LookupContext) -> None:
        super().__init__()
        self.name, self.table, self.mean, self.lookup_context = name, table, mean, lookup_context
        self.calls: list[tuple[int, LookupCall]] = []
        self._lookups: StepLookups | None = None  # of the step to which `_num_calls` belongs
        self._num_calls = 0

    def set_calls(self, calls: Sequence[LookupCall]) -> None:
        """Set the look-ups of all layers, as inferred from the first batch."""
        self.calls = [(i, call) for i, call in enumerate(calls) if call.table == self.table]

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name == "weight":
            raise AttributeError(
                f"{self.name} is routed: its rows are at the shards, and it has no weight here; "
                f"prepare(decay=...) is a weight decay of rows, embroute checkpoint export has all "
                f"of them"
            )
        return super().__getattr__(name)

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The pooled rows of the layer's next look-up; the ids must equal those of `lookups`."""
        if per_sample_weights is not None:
            raise ValueError(f"{self.name}: per_sample_weights has no routed form")
        lookups, ids = self.lookup_context.current(), input.detach().cpu().reshape(-1)
        if lookups is not self._lookups:
            self._lookups, self._num_calls = lookups, 0
        # A second forward pass in the same step repeats the calls in the same order.
        number, call = self.calls[self._num_calls % len(self.calls)]
        self._num_calls += 1
        expected = lookups.ids[number]
        if expected is not None and not torch.equal(ids.to(expected.dtype), expected):
            raise ValueError(
                f"{self.name} was asked for other ids than lookups() gave for it: "
                f"{_difference(ids, expected)}"
            )
        return self.lookup_context.look_up(call, self.mean)


def _difference(ids: torch.Tensor, expected: torch.Tensor) -> str:
    if len(ids) != len(expected):
        return f"{len(ids)} ids, {len(expected)} expected"
    first = int((ids != expected).nonzero()[0])
    return f"id {int(ids[first])} at place {first}, {int(expected[first])} expected"


class RoutedFields(nn.Module):
    """The replacement of a model's `FieldEmbeddings`."""

    def __init__(
        self, schema: Schema, widths: Sequence[int], mode: str, lookup_context: LookupContext
    ) -> None:
        super().__init__()
        self.schema, self.widths = schema, tuple(widths)
        self.mode, self.lookup_context = mode, lookup_context
        self.field_widths = tuple(self.widths[field.table] for field in schema.fields)

    def forward(self, samples: Samples) -> list[torch.Tensor]:
        """Pooled rows of each field, (N, width of its table)."""
        calls = [LookupCall(f.table, i, i + 1, (), True) for i, f in enumerate(self.schema.fields)]
        return [self.lookup_context.look_up(call, self.mode == "mean") for call in calls]

    def unpooled(self, samples: Samples, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every row of a field's bags, sample by sample, and the number of rows in each bag."""
        table = self.schema.fields[field].table
        return self.lookup_context.look_up_bags(LookupCall(table, field, field + 1, (), True))

    def stacked(self, samples: Samples) -> torch.Tensor:
        """Pooled rows of all fields, (N, F, width); the widths must be equal."""
        fields = self.schema.num_fields
        call = LookupCall(self.schema.fields[0].table, 0, fields, (fields,), True)
        return self.lookup_context.look_up(call, self.mode == "mean")
