"""Batches of a user's own loader: nested tensors, and the ids in them that layers look up.

At the coordinator a `TensorAdapter` flattens a batch: looked-up tensors become rows, all others
opaque columns of bytes. At a worker it rebuilds the same nest from the worker's samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from embroute.config.spec import shown
from embroute.data.batch import PADDING, Batch
from embroute.data.schema import Field, Schema, Table
from embroute.engine.batches import LookupCall, MicroBatch, lookups_of
from embroute.kernels.array_types import F32, I64
from embroute.nn.tensor_nest import flatten_batch, is_plain, unflatten

Lookup = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # ids, or flat ids and bag offsets
UserLookups = Callable[..., Mapping[str, Lookup | Sequence[Lookup]]]


@dataclass(frozen=True)
class LayerSpec:
    """A routed layer of the user's model."""

    name: str
    num_rows: int
    width: int
    bag: bool
    mean: bool = False
    padding: int | None = None
    last_offset: bool = False  # whether offsets end with the number of all ids


class BatchLookup(NamedTuple):
    """One look-up in a batch: ids, and offsets where bags differ in length."""

    table: int
    ids: torch.Tensor
    offsets: torch.Tensor | None
    size: int  # samples


class TensorSpec(NamedTuple):
    """A tensor of every batch. `source`: twice the look-up, plus 1 for its offsets, or -1."""

    dtype: str  # by its name in torch
    tail: tuple[int, ...]  # shape without the samples
    source: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.tail) * int(getattr(torch, self.dtype).itemsize)

    @property
    def num_columns(self) -> int:
        """Columns of four bytes that hold one sample."""
        return -(-self.num_bytes // 4)


def _batch_lookup(table: int, layer: LayerSpec, entry: object) -> BatchLookup:
    """Check one entry of the user's look-ups."""
    parts = entry if isinstance(entry, tuple) else (entry,)
    if not 1 <= len(parts) <= 1 + layer.bag or not all(map(_holds_ids, parts)):
        form = "a tensor of whole numbers, samples first"
        pair = " (or a pair of such tensors: flat ids and offsets)" if layer.bag else ""
        kinds = ", ".join(
            f"{p.dtype} of shape {tuple(p.shape)}"
            if isinstance(p, torch.Tensor)
            else type(p).__name__
            for p in parts
        )
        raise ValueError(f"lookups: {layer.name}: expected {form}{pair}, got {kinds}")
    ids, *rest = parts
    size = len(rest[0]) - layer.last_offset if rest else len(ids)
    return BatchLookup(table, ids, rest[0] if rest else None, size)


def _holds_ids(value: object) -> bool:
    """Whether it is a tensor of whole numbers with at least one dimension."""
    if not isinstance(value, torch.Tensor) or value.ndim < 1 or not is_plain(value):
        return False
    return not (value.is_floating_point() or value.is_complex())


@dataclass
class TensorAdapter:
    """Translates a user's batches. Look-ups travel as rows, other tensors as columns."""

    layers: Sequence[LayerSpec]
    lookups: UserLookups
    device: str = "cpu"
    sends_ids: bool = True
    calls: tuple[LookupCall, ...] = ()
    _nest: object = None
    _tensors: tuple[TensorSpec, ...] = ()

    @property
    def schema(self) -> Schema:
        """A table per layer, a field per id of a sample or per bag."""
        tables = tuple(Table(layer.name, layer.num_rows) for layer in self.layers)
        # Ids of two dimensions are bags of one length, which never changes.
        longest = {spec.source // 2: math.prod(spec.tail) for spec in self._tensors if spec.tail}
        fields = tuple(
            Field(f"{self.layers[call.table].name}.{i}", call.table, call.bag, longest.get(number))
            for number, call in enumerate(self.calls)
            for i in range(call.last - call.first)
        )
        return Schema(tables, fields)

    @property
    def num_columns(self) -> int:
        """Columns of four bytes per sample, for the tensors that are not looked up."""
        return sum(spec.num_columns for spec in self._tensors if spec.source < 0)

    def infer_spec(self, item: object) -> str:
        """The nest of a batch, the types and shapes of its tensors, and its look-ups, as JSON."""
        tree, leaves = flatten_batch(item)
        lookups = self._lookups_of(item)
        calls, first = [], 0
        for lookup in lookups:
            bag = self.layers[lookup.table].bag
            tail = () if bag else tuple(lookup.ids.shape[1:])
            last = first + math.prod(tail)
            calls.append([lookup.table, first, last, list(tail), bag])
            first = last
        columns = [
            [str(leaf.dtype)[6:], list(leaf.shape[1:]), _source(leaf, lookups)] for leaf in leaves
        ]
        spec = json.dumps({"tree": tree, "calls": calls, "columns": columns})
        self.load_spec(spec)
        return spec

    def load_spec(self, shape: str) -> None:
        """Take over what `infer_spec` found on another rank."""
        spec = json.loads(shape)
        self._nest = spec["tree"]
        self.calls = tuple(
            LookupCall(table, first, last, tuple(tail), bag)
            for table, first, last, tail, bag in spec["calls"]
        )
        self._tensors = tuple(
            TensorSpec(dtype, tuple(tail), source) for dtype, tail, source in spec["columns"]
        )

    def _lookups_of(self, item: object) -> list[BatchLookup]:
        """The look-ups that the user's function names in a batch, checked."""
        named = self.lookups(item)
        names = [layer.name for layer in self.layers]
        if not isinstance(named, Mapping) or set(named) != set(names):
            got = shown(list(named)) if isinstance(named, Mapping) else type(named).__name__
            raise ValueError(
                f"lookups= must return a dict with the routed layers {', '.join(names)}, got {got}"
            )
        lookups = []
        for table, name in enumerate(names):
            value = named[name]
            # A pair is ids and offsets for a bag, but two look-ups for an nn.Embedding.
            pair = isinstance(value, tuple) and len(value) == 2 and self.layers[table].bag
            several = not pair and isinstance(value, list | tuple)
            if several and not value:
                raise ValueError(f"lookups: {name}: expected a tensor or several, got {value!r}")
            for entry in value if several else [value]:
                lookups.append(_batch_lookup(table, self.layers[table], entry))
        return lookups

    def batch(self, item: object) -> Batch:
        """Rows of all look-ups, sample by sample; other tensors as opaque columns."""
        tree, leaves = flatten_batch(item)
        if tree != self._nest:
            raise ValueError(
                f"a batch of loader or held_out has another nest of tensors than the first one "
                f"had: {shown(tree)}, not {shown(self._nest)}"
            )
        lookups = self._lookups_of(item)
        size = lookups[0].size
        if not size:
            raise ValueError("a batch of loader or held_out has no samples")
        columns = [np.zeros((size, 0), np.float32)]
        for leaf, spec in zip(leaves, self._tensors, strict=True):
            if spec.source < 0:
                columns.append(_columns(leaf, size, spec))
            elif tuple(leaf.shape[1:]) != spec.tail:
                raise ValueError(
                    f"lookups: ids have shape {tuple(leaf.shape)}, expected {(size, *spec.tail)}: "
                    f"samples come first, the rest never changes; bags of any size are flat, with "
                    f"offsets"
                )
        self._check_calls(lookups)
        rows, offsets = self._rows(lookups, size)
        no_label = np.empty(0, np.float32)
        return Batch(rows, offsets, np.concatenate(columns, 1), no_label, self.calls[-1].last)

    def _check_calls(self, lookups: Sequence[BatchLookup]) -> None:
        """Refuse look-ups that change from batch to batch."""
        first = [(self.layers[call.table].name, call.tail) for call in self.calls]
        now = []
        for lookup in lookups:
            layer = self.layers[lookup.table]
            now.append((layer.name, () if layer.bag else tuple(lookup.ids.shape[1:])))
        if now != first:
            raise ValueError(
                f"lookups= must return the same look-ups for every batch, got {shown(now)} after "
                f"{shown(first)} (layers, and the shapes of a sample's ids)"
            )

    def _rows(self, lookups: Sequence[BatchLookup], size: int) -> tuple[I64, I64]:
        """Global rows sample by sample, and the offsets of bags."""
        first_rows, fields = self.schema.first_rows, self.calls[-1].last
        length_SF = np.ones((size, fields), np.int64)
        rows_by_call = []
        for lookup, call in zip(lookups, self.calls, strict=True):
            rows, counts = self._global_rows(lookup, int(first_rows[lookup.table]), size)
            length_SF[:, call.first : call.last] = counts
            rows_by_call.append(rows)
        offsets = np.zeros(size * fields + 1, np.int64)
        np.cumsum(length_SF.ravel(), out=offsets[1:])
        out = np.empty(offsets[-1], np.int64)
        for rows, call in zip(rows_by_call, self.calls, strict=True):
            out[lookups_of(call, offsets, fields)[0]] = rows
        return out, offsets

    def _global_rows(self, lookup: BatchLookup, first_row: int, size: int) -> tuple[I64, I64]:
        """Global rows of a look-up, and how many each sample has per field."""
        layer, ids = self.layers[lookup.table], lookup.ids.detach().cpu().numpy().astype(np.int64)
        if lookup.size != size:
            raise ValueError(
                f"lookups: {layer.name} has {lookup.size} samples, others have {size}"
                + (" (with include_last_offset offsets have one more)" * layer.last_offset)
            )
        if layer.bag and lookup.offsets is None and ids.ndim != 2:
            raise ValueError(
                f"lookups: {layer.name} is an EmbeddingBag: give ids of shape (samples, ids) or a "
                f"pair of flat ids and offsets, got shape {tuple(ids.shape)}"
            )
        flat = ids.ravel()
        wrong = (flat < 0) | (flat >= layer.num_rows)
        if wrong.any():
            raise ValueError(
                f"lookups: {layer.name}: id {int(flat[wrong][0])} is not between 0 and "
                f"{layer.num_rows - 1}"
            )
        rows = np.where(flat == layer.padding, PADDING, flat + first_row)
        if lookup.offsets is None:
            return rows, np.array(ids.shape[1] if layer.bag else 1)
        # With include_last_offset the user's offsets end with the number of ids already.
        bounds = np.append(lookup.offsets.cpu().numpy().astype(np.int64), len(flat))[: size + 1]
        counts = np.diff(bounds)
        if bounds[0] != 0 or bounds[-1] != len(flat) or (counts < 0).any():
            raise ValueError(
                f"lookups: {layer.name}: offsets must begin with 0 and never fall or exceed the "
                f"{len(flat)} ids, got {bounds.tolist()[:8]}"
            )
        return rows, counts[:, None]

    def to_user_batch(self, dealt: MicroBatch) -> object:
        """The same nest as the user's batch, with a worker's samples."""
        lookups = [self._call_tensors(call, dealt) for call in self.calls]
        leaves, at = [], 0
        for spec in self._tensors:
            dtype = getattr(torch, spec.dtype)
            if spec.source >= 0:
                number, is_offsets = divmod(spec.source, 2)
                leaf = lookups[number][is_offsets].to(self.device, dtype)
                flat = is_offsets or (self.calls[number].bag and not spec.tail)
                leaves.append(leaf if flat else leaf.reshape(dealt.num_samples, *spec.tail))
                continue
            raw = np.ascontiguousarray(dealt.dense[:, at : at + spec.num_columns]).view(np.uint8)
            leaf = torch.from_numpy(raw[:, : spec.num_bytes].copy()).view(dtype)
            leaves.append(leaf.reshape(dealt.num_samples, *spec.tail).to(self.device))
            at += spec.num_columns
        return unflatten(self._nest, leaves)

    def empty_sample(self) -> I64:
        """Ids per field of a sample that touches no row."""
        lengths = np.ones(self.calls[-1].last, np.int64)
        for spec in self._tensors:
            is_ids = spec.source >= 0 and spec.source % 2 == 0
            if is_ids and self.calls[spec.source // 2].bag:
                bag = math.prod(spec.tail) if spec.tail else 0
                lengths[self.calls[spec.source // 2].first] = bag
        return lengths

    def ids_of(self, call: LookupCall, dealt: MicroBatch) -> torch.Tensor:
        """The ids that the layer of a look-up must receive."""
        return self._call_tensors(call, dealt)[0]

    def _call_tensors(
        self, call: LookupCall, dealt: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, and offsets, of a worker's samples."""
        layer = self.layers[call.table]
        positions, lengths = lookups_of(call, dealt.offsets, self.calls[-1].last)
        ids = dealt.ids[positions]
        # Padding travels as -1: the user's layer expects the padding id again.
        tensor = torch.from_numpy(np.where(ids < 0, layer.padding or 0, ids))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        return tensor, torch.from_numpy(ends if layer.last_offset else ends[:-1])


def _source(leaf: torch.Tensor, lookups: Sequence[BatchLookup]) -> int:
    """Twice the number of the look-up that a tensor belongs to, plus 1 for its offsets; or -1."""
    for number, lookup in enumerate(lookups):
        if leaf is lookup.ids:
            return 2 * number
        if leaf is lookup.offsets:
            return 2 * number + 1
    return -1


def _columns(leaf: torch.Tensor, size: int, spec: TensorSpec) -> F32:
    """A tensor's bytes, sample by sample, in whole columns of four bytes."""
    if tuple(leaf.shape) != (size, *spec.tail) or str(leaf.dtype)[6:] != spec.dtype:
        raise ValueError(
            f"a tensor of a batch of loader or held_out has shape {tuple(leaf.shape)} and type "
            f"{leaf.dtype}, expected {(size, *spec.tail)} and {spec.dtype}: samples come first, as "
            f"many as in the look-ups, the rest never changes (flat ids need a routed bag: "
            f"embroute.route(layer) routes one)"
        )
    raw = leaf.detach().cpu().contiguous().view(torch.uint8).reshape(size, -1).numpy()
    out = np.zeros((size, 4 * spec.num_columns), np.uint8)
    out[:, : raw.shape[1]] = raw
    return out.view(np.float32)
