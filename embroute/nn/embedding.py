"""The layers that take the place of a model's tables: they read rows from the worker's cache.

A look-up is not part of the autograd graph. Its result is a leaf, and the leaf's gradient is
spread over the rows after the backward pass: one pass over the rows each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from embroute.data.schema import Schema
from embroute.engine.batches import LookupCall
from embroute.kernels.array_types import I32, I64
from embroute.kernels.rows import Bags, Floats, pool, spread_gradients
from embroute.models.layers import Samples


@dataclass(frozen=True)
class StepLookups:
    """What look-ups of a step read: rows by arena, and where each look-up finds its own."""

    records_A: Sequence[Floats]
    slot_AT: Sequence[I32]
    touch_L: I32
    offsets: I64
    num_fields: int
    num_samples: int
    ids: Sequence[torch.Tensor | None]  # what each call will be asked for, where it is known


@dataclass
class LookupContext:
    """Where routed layers look up rows in the step that is being computed."""

    arenas: tuple[int, ...]  # widths
    arena_of_table: tuple[int, ...]
    device: str = "cpu"
    reading: StepLookups | None = None
    _leaves: list[tuple[torch.Tensor, Bags, int]] = field(default_factory=list)
    _kept: dict[int, Floats] = field(default_factory=dict)  # memory for gradients, by arena

    def begin(self, reading: StepLookups) -> None:
        """A new step: what the last one looked up is forgotten."""
        self.reading = reading
        self._leaves = []

    def look_up(self, call: LookupCall, mean: bool) -> torch.Tensor:
        """Pooled rows of a call: samples x its shape x width."""
        reading = self.open()
        arena = self.arena_of_table[call.table]
        bags = Bags(
            reading.touch_L, reading.offsets, reading.num_fields, call.first, call.last, mean
        )
        records = reading.records_A[arena]
        count = reading.num_samples * (call.last - call.first)
        out = np.empty((count, self.arenas[arena]), records.dtype)
        pool(records, reading.slot_AT[arena], bags, out)
        shape = (reading.num_samples, *call.tail, self.arenas[arena])
        leaf = torch.from_numpy(out).reshape(shape).to(self.device)
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            self._leaves.append((leaf, bags, arena))
        return leaf

    def open(self) -> StepLookups:
        """What the step reads."""
        if self.reading is None:
            raise RuntimeError("a routed layer was called outside of the prepared loader's loop")
        return self.reading

    def gradients(self) -> list[Floats]:
        """Gradients of the step's touches, by arena; until the next step's."""
        reading = self.open()
        grads = [
            self._zeros(arena, len(slots), records.dtype)
            for arena, (slots, records) in enumerate(
                zip(reading.slot_AT, reading.records_A, strict=True)
            )
        ]
        for leaf, bags, arena in self._leaves:
            if leaf.grad is not None:
                grad = leaf.grad.reshape(-1, self.arenas[arena]).contiguous().cpu().numpy()
                spread_gradients(grad, bags, grads[arena])
        self._leaves = []
        return grads

    def _zeros(self, arena: int, count: int, dtype: np.dtype[np.float32 | np.float64]) -> Floats:
        """Zeros in memory that was used before: the system would have to map new pages."""
        kept = self._kept.get(arena)
        if kept is None or len(kept) < count or kept.dtype != dtype:
            kept = self._kept[arena] = np.empty((count + count // 4, self.arenas[arena]), dtype)
        kept[:count] = 0
        return kept[:count]


class RoutedLayer(nn.Module):
    """In place of one `nn.Embedding` or `nn.EmbeddingBag`."""

    def __init__(self, name: str, table: int, mean: bool, lookup_context: LookupContext) -> None:
        super().__init__()
        self.name, self.table, self.mean, self.lookup_context = name, table, mean, lookup_context
        self.calls: list[tuple[int, LookupCall]] = []
        self._reading: StepLookups | None = None
        self._asked = 0

    def learn(self, calls: Sequence[LookupCall]) -> None:
        """Know the look-ups of the layer, once the shape of batches is known."""
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
        """The rows of the step's next look-up; the ids must be those that `lookups` named."""
        if per_sample_weights is not None:
            raise ValueError(f"{self.name}: per_sample_weights has no routed form")
        reading, ids = self.lookup_context.open(), input.detach().cpu().reshape(-1)
        if reading is not self._reading:
            self._reading, self._asked = reading, 0
        number, call = self.calls[self._asked % len(self.calls)]
        self._asked += 1
        expected = reading.ids[number]
        if expected is not None and not torch.equal(ids.to(expected.dtype), expected):
            raise ValueError(
                f"{self.name} was asked for other ids than lookups() gave for it: "
                f"{_difference(ids, expected)}"
            )
        return self.lookup_context.look_up(call, self.mean)


def _difference(asked: torch.Tensor, expected: torch.Tensor) -> str:
    """How ids differ that ought to be the same."""
    if len(asked) != len(expected):
        return f"{len(asked)} ids, {len(expected)} expected"
    first = int((asked != expected).nonzero()[0])
    return f"id {int(asked[first])} at place {first}, {int(expected[first])} expected"


class RoutedFields(nn.Module):
    """In place of a model's `FieldEmbeddings`."""

    def __init__(
        self, schema: Schema, widths: Sequence[int], mode: str, lookup_context: LookupContext
    ) -> None:
        super().__init__()
        self.schema, self.widths, self.mode, self.lookup_context = (
            schema,
            tuple(widths),
            mode,
            lookup_context,
        )
        self.field_widths = tuple(self.widths[field.table] for field in schema.fields)

    def forward(self, samples: Samples) -> list[torch.Tensor]:
        """One tensor per field."""
        calls = [LookupCall(f.table, i, i + 1, (), True) for i, f in enumerate(self.schema.fields)]
        return [self.lookup_context.look_up(call, self.mode == "mean") for call in calls]

    def stacked(self, samples: Samples) -> torch.Tensor:
        """All fields at once, where their widths are equal: samples x fields x width."""
        fields = self.schema.num_fields
        call = LookupCall(self.schema.fields[0].table, 0, fields, (fields,), True)
        return self.lookup_context.look_up(call, self.mode == "mean")
