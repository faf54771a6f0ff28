"""What a checkpoint holds: each rank's part of a job, and how it is read into another job.

In a checkpoint's folder are `shard0.safetensors` and so on (records of rows), `dense.safetensors`
(model, optimizers, schedules, random state), `brain.safetensors` (the coordinator's, brain.py), and
`worker0.safetensors` and so on, what each worker has of its own
(unsent deltas, random state). What is not a tensor is JSON in the header of its file.
All of it is checked as it is read (`tensor_files.py`).
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from embroute.checkpoint.folders import DamagedError
from embroute.checkpoint.manifest import (
    DENSE_FILE,
    Identity,
    TableShape,
    TensorShape,
    open_shards,
    shard_file,
    worker_file,
)
from embroute.checkpoint.strict_json import Json, list_of, object_of
from embroute.checkpoint.tensor_file import FileInfo, Tensor, TensorFile, as_tensor, write_tensors
from embroute.engine.optim import RowOptimizer
from embroute.engine.sharding import RowSharding
from embroute.engine.store import CacheStore, ShardStore
from embroute.kernels.array_types import Array
from embroute.kernels.rows import Floats

COPIED_BYTES = 1 << 24  # of rows that are read beside their place, at a time

_SETTINGS = {
    "sgd": ("decay",),
    "adagrad": ("eps", "decay"),
    "rowwise-adagrad": ("eps", "decay"),
    "adam": ("eps", "beta1", "beta2", "decay"),
}


def identity_of(
    sharding: RowSharding,
    optimizer: RowOptimizer,
    dtype: npt.DTypeLike,
    model: Mapping[str, torch.Tensor],
) -> Identity:
    """What a job must share with a checkpoint; `model` is the dense part's `state_dict`."""
    setup, (beta1, beta2) = sharding.setup, optimizer.betas
    every = {"eps": optimizer.eps, "beta1": beta1, "beta2": beta2, "decay": optimizer.decay}
    return Identity(
        tuple(
            TableShape(table.name, table.num_rows, width)
            for table, width in zip(setup.schema.tables, setup.widths, strict=True)
        ),
        optimizer.name,
        {name: every[name] for name in _SETTINGS[optimizer.name]},
        np.dtype(dtype).name,
        tuple(TensorShape(name, _dtype(t), tuple(t.shape)) for name, t in model.items()),
    )


def check_identity(saved: Identity, mine: Identity, path: Path) -> None:
    """Refuse the checkpoint of another model, and say what differs."""
    found = [*_table_differences(saved, mine), *_other_differences(saved, mine)]
    if found:
        more = f"; and {len(found) - 3} more differences" if len(found) > 3 else ""
        raise ValueError(f"{path.name}: {'; '.join(found[:3])}{more}")


def _table_differences(saved: Identity, mine: Identity) -> Iterator[str]:
    its, own = ({table.name: table for table in side.tables} for side in (saved, mine))
    yield from (f"the model has no table {name!r}" for name in its if name not in own)
    yield from (f"the checkpoint has no table {name!r}" for name in own if name not in its)
    for name, (_, rows, width) in its.items():
        _, own_rows, own_width = own.get(name, its[name])
        if rows != own_rows:
            yield f"table {name!r} has {rows} rows in the checkpoint, {own_rows} in the model"
        if width != own_width:
            yield f"table {name!r} is {width} wide in the checkpoint, {own_width} in the model"
    if its.keys() == own.keys() and list(its) != list(own):
        yield f"the tables are {', '.join(its)} in the checkpoint, {', '.join(own)} in the model"


def _other_differences(saved: Identity, mine: Identity) -> Iterator[str]:
    def facts(side: Identity) -> dict[str, str]:
        dense = {f"tensor {t.name!r}": f"{t.dtype} {list(t.shape)}" for t in side.dense}
        settings = {f"the rows' {name}": str(value) for name, value in side.settings.items()}
        rows = {"the rows' optimizer": side.optimizer, "the rows' type": side.dtype}
        return rows | (settings if saved.optimizer == mine.optimizer else {}) | dense

    its, own = facts(saved), facts(mine)
    for subject in its | own:
        a, b = its.get(subject, "missing"), own.get(subject, "missing")
        if a != b:
            yield f"{subject} is {a} in the checkpoint, {b} in the model"


def rows_at(first: int, last: int, shard: int, num_shards: int) -> range:
    """Rows of a table, from first to before last, that one of so many shards holds."""
    return range(first + (shard - first) % num_shards, last, num_shards)


def _shared(mine: range, theirs: range) -> range:
    """Rows that are in both."""
    first = next((row for row in mine[: theirs.step] if row in theirs), None)
    stop = min(mine.stop, theirs.stop)
    return range(0) if first is None else range(first, stop, math.lcm(mine.step, theirs.step))


def copy_rows(file: TensorFile, name: str, theirs: range, mine: range, out: Floats) -> None:
    """Copy rows of a file's tensor, which are `theirs`, into an array whose rows are `mine`.

    Only the columns that the array has. What is read at a time is bounded.
    """
    rows = _shared(mine, theirs)
    if not rows:
        return
    stride, out_stride = rows.step // theirs.step, rows.step // mine.step
    dtype, (_, columns), *_ = file.entry(name)
    if stride == out_stride == 1 and (dtype, columns) == (out.dtype.name, out.shape[1]):
        at = mine.index(rows[0])
        file.read(name, out[at : at + len(rows)], theirs.index(rows[0]))
        return
    count = max(1, COPIED_BYTES // (stride * columns * out.itemsize))
    scratch = np.empty((min(count, len(rows)) * stride, columns), dtype)
    for at in range(0, len(rows), count):
        block = rows[at : at + count]
        first, last = theirs.index(block[0]), theirs.index(block[-1]) + 1
        out_first, out_last = mine.index(block[0]), mine.index(block[-1]) + 1
        file.read(name, scratch[: last - first], first)
        out[out_first:out_last:out_stride] = scratch[: last - first : stride, : out.shape[1]]


def _part(store: ShardStore, sharding: RowSharding, shard: int, table: int) -> tuple[range, Floats]:
    """Rows of a table at a shard, and their records: one stretch of an arena."""
    setup = sharding.setup
    first, last = setup.schema.first_rows[table : table + 2].tolist()
    rows = rows_at(first, last, shard, sharding.num_shards)
    records = store.records[setup.arenas.index(setup.widths[table])]
    at = int(sharding.local(np.array(rows[:1]))[0]) if rows else 0
    return rows, records[at : at + len(rows)]


def save_shard(path: Path, store: ShardStore, sharding: RowSharding, shard: int) -> FileInfo:
    """Write a shard's records, one tensor a table, without copying them."""
    tables = range(len(sharding.setup.widths))
    tensors = [as_tensor(f"table{t}", _part(store, sharding, shard, t)[1]) for t in tables]
    about = {"shard": str(shard), "shards": str(sharding.num_shards)}
    return write_tensors(path / shard_file(shard), tensors, about)


def load_shard(path: Path, store: ShardStore, sharding: RowSharding, shard: int) -> None:
    """Read a shard's records from a checkpoint of any number of shards."""
    first = TensorFile(path / shard_file(0))
    with first.parsing("shards"):
        files = open_shards(path, int(first.told("shards")))
    first_rows = sharding.setup.schema.first_rows.tolist()
    for other, file in enumerate(files):
        for table in range(len(sharding.setup.widths)):
            mine, out = _part(store, sharding, shard, table)
            theirs = rows_at(first_rows[table], first_rows[table + 1], other, len(files))
            file.expect(f"table{table}", (len(theirs), out.shape[1]), out.dtype.name)
            copy_rows(file, f"table{table}", theirs, mine, out)


def load_tables(path: Path, store: ShardStore, sharding: RowSharding, shard: int) -> list[str]:
    """Read initial values from a file with one tensor a table, as the command `export` writes it.

    Optimizer state stays initial, and so do tables that the file does not have. Returns the
    tables that it has; a tensor that is no table is refused. A file of another program has no
    checksums: the first shard says so.
    """
    file, setup = TensorFile(path, needs_sums=False), sharding.setup
    tables = {table.name: t for t, table in enumerate(setup.schema.tables)}
    for name in file.names:
        if name not in tables:
            raise ValueError(f"{path}: {name!r} is no table of the model: {', '.join(tables)}")
        shape = setup.schema.tables[tables[name]].num_rows, setup.widths[tables[name]]
        file.expect(name, shape, "float16", "float32", "float64")
    if not file.names:
        raise ValueError(f"{path}: there is no table in this file")
    if not file.has_sums and shard == 0:
        print(f"embroute: {path} carries no checksums: it is read unchecked", file=sys.stderr)
    for name in file.names:
        mine, out = _part(store, sharding, shard, tables[name])
        theirs = range(*setup.schema.first_rows[tables[name] : tables[name] + 2].tolist())
        copy_rows(file, name, theirs, mine, out[:, : setup.widths[tables[name]]])
    return sorted(file.names, key=lambda name: tables[name])


class Stateful(Protocol):
    """A learning-rate schedule, or anything else with a state of numbers."""

    def state_dict(self) -> dict[str, object]:
        """What to save."""

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take it back."""


@dataclass(frozen=True)
class Training:
    """What every worker has whole: the dense model's `state_dict`, optimizers, schedules."""

    model: Mapping[str, torch.Tensor]
    optimizers: Sequence[torch.optim.Optimizer]
    extras: Mapping[str, Stateful]

    @property
    def classes(self) -> list[Json]:
        """Names of the optimizers' classes."""
        return [type(optimizer).__name__ for optimizer in self.optimizers]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _from_torch(name: str, tensor: torch.Tensor) -> Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise ValueError(f"{name}: a checkpoint holds dense tensors, this is {type(tensor)}")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return Tensor(name, _dtype(tensor), tuple(tensor.shape), [flat.data])


def _encode(value: object, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    """A value as JSON; its tensors are put aside, each under a name of its own."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # JSON has no such number
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[f"{name}#{len(tensors)}"] = value
        return {"tensor": f"{name}#{len(tensors) - 1}"}
    if isinstance(value, list | tuple):
        items: list[Json] = [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        pairs: list[Json] = [
            [_encode(key, name, tensors), _encode(item, f"{name}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise ValueError(
        f"{name} is a {type(value).__name__}: a checkpoint holds numbers, text, lists and tensors"
    )


def _decode(value: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `_encode` was given: torch does not say more of a `state_dict` than Any either."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tensor":
        return tensors[str(inside)]
    if kind == "float":
        return float(str(inside))
    items = _decode(inside, tensors)
    if kind == "tuple":
        return tuple(items)
    return Counter(dict(items)) if kind == "counter" else dict(items)


def save_dense(path: Path, training: Training, random: torch.Tensor) -> FileInfo:
    """Write the part that every worker has whole, and the random state of one of them."""
    tensors: dict[str, torch.Tensor] = {}
    optimizers = [optimizer.state_dict() for optimizer in training.optimizers]
    extras = {name: extra.state_dict() for name, extra in training.extras.items()}
    about = {
        "classes": training.classes,
        "optimizers": _encode(optimizers, "optimizer", tensors),
        "extras": _encode(extras, "extra", tensors),
    }
    tensors |= {f"model.{name}": tensor for name, tensor in training.model.items()}
    written = [_from_torch(name, tensor) for name, tensor in (tensors | {"random": random}).items()]
    texts = {name: json.dumps(value) for name, value in about.items()}
    return write_tensors(path / DENSE_FILE, written, texts)


def _to_torch(file: TensorFile, name: str) -> torch.Tensor:
    """A whole tensor, in memory of its own."""
    dtype, shape, *_ = file.entry(name)
    if 0 in shape:  # no bytes, which cannot be viewed as another type
        return torch.empty(shape, dtype=getattr(torch, dtype))
    flat = torch.from_numpy(file.data(name))
    return flat.view(getattr(torch, dtype)).reshape(shape)


def load_model(path: Path, model: Mapping[str, torch.Tensor]) -> None:
    """Read the dense model of a checkpoint into a `state_dict`."""
    file = TensorFile(path / DENSE_FILE)
    _expect_model(file, model)
    with torch.no_grad():
        for name, tensor in model.items():
            tensor.copy_(_to_torch(file, f"model.{name}"))


def _expect_model(file: TensorFile, model: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in model.items():
        file.expect(f"model.{name}", tensor.shape, _dtype(tensor))


def load_dense(path: Path, training: Training) -> torch.Tensor:
    """Read it back into model, optimizers and schedules; returns the random state."""
    file = TensorFile(path / DENSE_FILE)
    classes = file.told_json("classes")
    if classes != training.classes:
        raise ValueError(
            f"{path.name}: the optimizers are {classes} in the checkpoint, {training.classes} here"
        )
    _expect_model(file, training.model)
    others = [name for name in file.names if not name.startswith("model.")]
    tensors = {name: _to_torch(file, name) for name in others}
    with file.parsing("optimizers"):
        optimizers = list_of(_decode(file.told_json("optimizers"), tensors), "it", len(classes))
    with file.parsing("extras"):
        extras = object_of(_decode(file.told_json("extras"), tensors), "it")
    if extras.keys() != training.extras.keys():
        raise ValueError(
            f"{path.name}: the checkpoint holds {sorted(extras)} beside the optimizers, the job "
            f"has {sorted(training.extras)}"
        )
    for optimizer, state in zip(training.optimizers, optimizers, strict=True):
        _load_state(file, "optimizers", optimizer, state)
    for name, extra in training.extras.items():
        _load_state(file, "extras", extra, extras[name])
    load_model(path, training.model)
    file.entry("random")
    return tensors["random"]


def _load_state(file: TensorFile, name: str, owner: Stateful, state: Any) -> None:
    """Give a state back; a ValueError means another optimizer, anything else a malformed state."""
    with file.parsing(name):
        object_of(state, "it")
    try:
        owner.load_state_dict(state)
    except ValueError as error:
        folder = file.path.parent.name
        raise ValueError(f"{folder}: {type(owner).__name__}: {error}") from None
    except (TypeError, LookupError, AttributeError) as error:
        raise DamagedError(file.path, f"{name!r} in its header is malformed: {error!r}") from None


def save_cache(path: Path, worker: int, store: CacheStore | None, random: torch.Tensor) -> FileInfo:
    """Write what one worker alone has: its cache where updates wait in it, its random state."""
    arrays: list[tuple[str, Array]] = [("random", random.numpy())]
    if store is not None:
        arrays += [(f"records{a}", records) for a, records in enumerate(store.records)]
        arrays += [(f"bases{a}", bases) for a, bases in enumerate(store.bases)]
    return write_tensors(path / worker_file(worker), [as_tensor(*pair) for pair in arrays], {})


def load_cache(path: Path, worker: int, store: CacheStore | None) -> torch.Tensor:
    """Read what `save_cache` wrote into a cache of the same size; returns the random state."""
    file = TensorFile(path / worker_file(worker))
    arrays: dict[str, Floats] = {}
    if store is not None:
        arrays = {f"records{a}": records for a, records in enumerate(store.records)}
        arrays |= {f"bases{a}": bases for a, bases in enumerate(store.bases)}
    for name, array in arrays.items():
        file.expect(name, array.shape, array.dtype.name)
    for name, array in arrays.items():
        file.read(name, array)
    return _to_torch(file, "random")
