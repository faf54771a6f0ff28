"""Batches of a user's own loader: nests of tensors, and the ids in them that layers look up."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from embroute.config.spec import shown
from embroute.data.batch import PADDING, Batch
from embroute.data.schema import Field, Schema, Table
from embroute.engine.batches import LookupCall, MicroBatch
from embroute.kernels.array_types import F32, I64

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


class _Asked(NamedTuple):
    """One look-up in a batch: ids, and offsets where bags differ in length."""

    table: int
    ids: torch.Tensor
    offsets: torch.Tensor | None
    size: int  # samples


def _asked(table: int, layer: LayerSpec, entry: object) -> _Asked:
    """One look-up as a user gives it."""
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
    return _Asked(table, ids, rest[0] if rest else None, size)


def _holds_ids(part: object) -> bool:
    """Whether it is a tensor of whole numbers with a sample, or a bag, in each row."""
    if not isinstance(part, torch.Tensor) or part.ndim < 1 or not _is_plain(part):
        return False
    return not (part.is_floating_point() or part.is_complex())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie in memory one after the other."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta)


def flatten(tree: object, leaves: list[torch.Tensor]) -> object:
    """A nest of dicts, lists and tuples as JSON, its tensors as numbers into `leaves`."""
    if isinstance(tree, torch.Tensor):
        if not _is_plain(tree):
            raise ValueError(
                f"a batch of loader or held_out has a tensor of shape {tuple(tree.shape)} that is "
                f"sparse, quantized or on the meta device; dense ones travel"
            )
        leaves.append(tree)
        return len(leaves) - 1
    if isinstance(tree, Mapping):
        if others := [key for key in tree if not isinstance(key, str)]:
            raise ValueError(
                f"a batch of loader or held_out has a dict with key {shown(others[0])}; names of "
                f"tensors must be text"
            )
        return {"dict": [[str(key), flatten(value, leaves)] for key, value in tree.items()]}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        named = zip(tree._fields, tree, strict=True)
        fields = [[name, flatten(value, leaves)] for name, value in named]
        return {type(tree).__name__: fields}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [flatten(value, leaves) for value in tree]}
    raise ValueError(
        f"a batch of loader or held_out may hold tensors in dicts, lists, tuples and "
        f"namedtuples, got {type(tree).__name__}"
    )


def _nest(item: object) -> tuple[object, list[torch.Tensor]]:
    """A batch's nest and its tensors."""
    leaves: list[torch.Tensor] = []
    try:
        return flatten(item, leaves), leaves
    except RecursionError:
        raise ValueError("a batch of loader or held_out is nested too deep, or in itself") from None


def unflatten(tree: object, leaves: Sequence[torch.Tensor]) -> object:
    """The nest that `flatten` took apart."""
    if isinstance(tree, int):
        return leaves[tree]
    assert isinstance(tree, dict)
    ((kind, items),) = tree.items()
    if kind == "dict":
        return {key: unflatten(value, leaves) for key, value in items}
    if kind not in ("list", "tuple"):
        names = tuple(name for name, _ in items)
        return _named(kind, names)(*(unflatten(value, leaves) for _, value in items))
    values = [unflatten(value, leaves) for value in items]
    return values if kind == "list" else tuple(values)


@cache
def _named(kind: str, fields: tuple[str, ...]) -> Callable[..., object]:
    """A namedtuple's class, like the one that the batch had."""
    return namedtuple(kind, fields)


@dataclass
class TensorAdapter:
    """A user's batches. Tensors that are looked up travel as rows, all others column by column."""

    layers: Sequence[LayerSpec]
    lookups: UserLookups
    device: str = "cpu"
    sends_ids: bool = True
    calls: tuple[LookupCall, ...] = ()
    _tree: object = None
    _columns: tuple[tuple[str, tuple[int, ...], int], ...] = ()  # type, shape, look-up or -1

    @property
    def schema(self) -> Schema:
        """A table per layer, a field per id of a sample or per bag."""
        tables = tuple(Table(layer.name, layer.num_rows) for layer in self.layers)
        fields = tuple(
            Field(f"{self.layers[call.table].name}.{i}", call.table, call.bag)
            for call in self.calls
            for i in range(call.last - call.first)
        )
        return Schema(tables, fields)

    @property
    def num_columns(self) -> int:
        """Columns of four bytes that hold what is not looked up."""
        sizes = [
            int(np.prod(tail, dtype=int)) * getattr(torch, name).itemsize
            for name, tail, call in self._columns
            if call < 0
        ]
        return sum(-(-size // 4) for size in sizes)

    def infer_spec(self, item: object) -> str:
        """The nest of the batch, the type and shape of its tensors, the look-ups in it."""
        tree, leaves = _nest(item)
        asked = self._asked(item)
        calls, first = [], 0
        for entry in asked:
            bag = self.layers[entry.table].bag
            tail = () if bag else tuple(entry.ids.shape[1:])
            last = first + int(np.prod(tail, dtype=int))
            calls.append([entry.table, first, last, list(tail), bag])
            first = last
        columns = [
            [str(leaf.dtype)[6:], list(leaf.shape[1:]), self._looked_up(leaf, asked)]
            for leaf in leaves
        ]
        shape = json.dumps({"tree": tree, "calls": calls, "columns": columns})
        self.load_spec(shape)
        return shape

    def load_spec(self, shape: str) -> None:
        """Know the shape of batches without having seen one."""
        known = json.loads(shape)
        self._tree = known["tree"]
        self.calls = tuple(
            LookupCall(table, first, last, tuple(tail), bag)
            for table, first, last, tail, bag in known["calls"]
        )
        self._columns = tuple((name, tuple(tail), call) for name, tail, call in known["columns"])

    @staticmethod
    def _looked_up(leaf: torch.Tensor, asked: Sequence[_Asked]) -> int:
        """Twice the number of the look-up a tensor is, plus one for its offsets; or -1."""
        for number, entry in enumerate(asked):
            if leaf is entry.ids:
                return 2 * number
            if leaf is entry.offsets:
                return 2 * number + 1
        return -1

    def _asked(self, item: object) -> list[_Asked]:
        named = self.lookups(item)
        names = [layer.name for layer in self.layers]
        if not isinstance(named, Mapping) or set(named) != set(names):
            got = shown(list(named)) if isinstance(named, Mapping) else type(named).__name__
            raise ValueError(
                f"lookups= must return a dict with the routed layers {', '.join(names)}, got {got}"
            )
        asked = []
        for table, name in enumerate(names):
            value = named[name]
            pair = isinstance(value, tuple) and len(value) == 2 and self.layers[table].bag
            several = not pair and isinstance(value, list | tuple)
            if several and not value:
                raise ValueError(f"lookups: {name}: expected a tensor or several, got {value!r}")
            for entry in value if several else [value]:
                asked.append(_asked(table, self.layers[table], entry))
        return asked

    def batch(self, item: object) -> Batch:
        """Rows of all look-ups, sample by sample; other tensors as opaque columns."""
        tree, leaves = _nest(item)
        if tree != self._tree:
            raise ValueError(
                f"a batch of loader or held_out has another nest of tensors than the first one "
                f"had: {shown(tree)}, not {shown(self._tree)}"
            )
        asked = self._asked(item)
        size = asked[0].size
        if not size:
            raise ValueError("a batch of loader or held_out has no samples")
        parts = []
        for leaf, column in zip(leaves, self._columns, strict=True):
            if column[2] < 0:
                parts.append(_columns(leaf, size, column))
            elif tuple(leaf.shape[1:]) != column[1]:
                raise ValueError(
                    f"lookups: ids have shape {tuple(leaf.shape)}, expected {(size, *column[1])}: "
                    f"samples come first, the rest never changes; bags of any size are flat, with "
                    f"offsets"
                )
        self._check_calls(asked)
        dense = np.concatenate([np.zeros((size, 0), np.float32), *parts], 1)
        rows, offsets = self._rows(asked, size)
        fields = self.calls[-1].last
        return Batch(rows, offsets, dense, np.empty(0, np.float32), fields)

    def _check_calls(self, asked: Sequence[_Asked]) -> None:
        """Refuse look-ups that change from batch to batch."""
        known = [(self.layers[call.table].name, call.tail) for call in self.calls]
        now = []
        for entry in asked:
            layer = self.layers[entry.table]
            now.append((layer.name, () if layer.bag else tuple(entry.ids.shape[1:])))
        if now != known:
            raise ValueError(
                f"lookups= must return the same look-ups for every batch, got {shown(now)} after "
                f"{shown(known)} (layers, and the shapes of a sample's ids)"
            )

    def _rows(self, asked: Sequence[_Asked], size: int) -> tuple[I64, I64]:
        """Global rows sample by sample, and the offsets of bags."""
        first_rows, fields = self.schema.first_rows, self.calls[-1].last
        lengths = np.ones((size, fields), np.int64)
        found = []
        for entry, call in zip(asked, self.calls, strict=True):
            rows, counts = self._global(entry, int(first_rows[entry.table]), size)
            lengths[:, call.first : call.last] = counts
            found.append(rows)
        offsets = np.zeros(size * fields + 1, np.int64)
        np.cumsum(lengths.ravel(), out=offsets[1:])
        out = np.empty(offsets[-1], np.int64)
        for rows, call in zip(found, self.calls, strict=True):
            starts = offsets[:-1].reshape(size, fields)[:, call.first : call.last].ravel()
            counts = lengths[:, call.first : call.last].ravel()
            within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            out[np.repeat(starts, counts) + within] = rows
        return out, offsets

    def _global(self, entry: _Asked, first_row: int, size: int) -> tuple[I64, I64]:
        """Global rows of a look-up, and how many each sample has per field."""
        layer, ids = self.layers[entry.table], entry.ids.detach().cpu().numpy().astype(np.int64)
        if entry.size != size:
            raise ValueError(
                f"lookups: {layer.name} has {entry.size} samples, others have {size}"
                + (" (with include_last_offset offsets have one more)" * layer.last_offset)
            )
        if layer.bag and entry.offsets is None and ids.ndim != 2:
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
        if entry.offsets is None:
            return rows, np.array(ids.shape[1] if layer.bag else 1)
        bounds = np.append(entry.offsets.cpu().numpy().astype(np.int64), len(flat))[: size + 1]
        counts = np.diff(bounds)
        if bounds[0] != 0 or bounds[-1] != len(flat) or (counts < 0).any():
            raise ValueError(
                f"lookups: {layer.name}: offsets must begin with 0 and never fall or exceed the "
                f"{len(flat)} ids, got {bounds.tolist()[:8]}"
            )
        return rows, counts[:, None]

    def to_user_batch(self, dealt: MicroBatch) -> object:
        """The same nest, with a worker's samples."""
        lookups = [self._looked(call, dealt) for call in self.calls]
        leaves, at = [], 0
        for name, tail, call in self._columns:
            dtype = getattr(torch, name)
            if call >= 0:
                leaf = lookups[call // 2][call % 2].to(self.device, dtype)
                flat = call % 2 or (self.calls[call // 2].bag and not tail)
                leaves.append(leaf if flat else leaf.reshape(dealt.num_samples, *tail))
                continue
            size = int(np.prod(tail, dtype=int)) * dtype.itemsize
            width = -(-size // 4)
            raw = np.ascontiguousarray(dealt.dense[:, at : at + width]).view(np.uint8)[:, :size]
            leaf = torch.from_numpy(raw.copy()).view(dtype)
            leaves.append(leaf.reshape(dealt.num_samples, *tail).to(self.device))
            at += width
        return unflatten(self._tree, leaves)

    def empty_sample(self) -> I64:
        """Ids per field of a sample that touches no row."""
        lengths = np.ones(self.calls[-1].last, np.int64)
        for _, tail, call in self._columns:
            if call >= 0 and call % 2 == 0 and self.calls[call // 2].bag:
                lengths[self.calls[call // 2].first] = int(np.prod(tail)) if tail else 0
        return lengths

    def ids_of(self, call: LookupCall, dealt: MicroBatch) -> torch.Tensor:
        """What the layer of a look-up will be asked for."""
        return self._looked(call, dealt)[0]

    def _looked(self, call: LookupCall, dealt: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, and offsets, of a worker's samples."""
        fields = self.calls[-1].last
        lengths = np.diff(dealt.offsets).reshape(-1, fields)[:, call.first : call.last].ravel()
        starts = dealt.offsets[:-1].reshape(-1, fields)[:, call.first : call.last].ravel()
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        ids = dealt.ids[np.repeat(starts, lengths) + within]
        layer, ends = self.layers[call.table], np.concatenate([[0], np.cumsum(lengths)])
        found = torch.from_numpy(np.where(ids < 0, layer.padding or 0, ids))
        offsets = torch.from_numpy(ends if layer.last_offset else ends[:-1])
        return found, offsets


def _columns(leaf: torch.Tensor, size: int, column: tuple[str, tuple[int, ...], int]) -> F32:
    """A tensor's bytes, sample by sample, in whole columns of four bytes."""
    name, tail, _ = column
    if tuple(leaf.shape) != (size, *tail) or str(leaf.dtype)[6:] != name:
        raise ValueError(
            f"a tensor of a batch of loader or held_out has shape {tuple(leaf.shape)} and type "
            f"{leaf.dtype}, expected {(size, *tail)} and {name}: samples come first, as many as in "
            f"the look-ups, the rest never changes (flat ids travel for routed bags only: "
            f"embroute.route(layer) routes one)"
        )
    raw = leaf.detach().cpu().contiguous().view(torch.uint8).reshape(size, -1).numpy()
    width = -(-raw.shape[1] // 4) * 4
    out = np.zeros((size, width), np.uint8)
    out[:, : raw.shape[1]] = raw
    return out.view(np.float32)
