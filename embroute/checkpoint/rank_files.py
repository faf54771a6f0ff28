"""The files that shards and workers write into a checkpoint, and how another job reads them.

- `shard0.safetensors` and so on: records of rows, optimizer state included;
- `dense.safetensors`: model, optimizers, schedules, random state;
- `worker0.safetensors` and so on: a worker's unsent deltas and random state;
- `planner.safetensors`: the planner's state (`planner_state.py`).

Values other than tensors are JSON in the header of their file.
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

COPIED_BYTES = 1 << 24  # of scratch memory for rows that cannot be read in place

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
    """The identity of a job; `model` is the dense part's `state_dict`."""
    setup, (beta1, beta2) = sharding.setup, optimizer.betas
    settings = {"eps": optimizer.eps, "beta1": beta1, "beta2": beta2, "decay": optimizer.decay}
    return Identity(
        tables=tuple(
            TableShape(table.name, table.num_rows, width)
            for table, width in zip(setup.schema.tables, setup.widths, strict=True)
        ),
        optimizer=optimizer.name,
        settings={name: settings[name] for name in _SETTINGS[optimizer.name]},
        dtype=np.dtype(dtype).name,
        dense=tuple(TensorShape(name, _dtype(t), tuple(t.shape)) for name, t in model.items()),
    )


def check_identity(saved: Identity, job: Identity, path: Path) -> None:
    """Refuse the checkpoint of another model, and name up to three differences."""
    differences = [*_table_differences(saved, job), *_other_differences(saved, job)]
    if differences:
        more = f"; and {len(differences) - 3} more differences" if len(differences) > 3 else ""
        raise ValueError(f"{path.name}: {'; '.join(differences[:3])}{more}")


def _table_differences(saved: Identity, job: Identity) -> Iterator[str]:
    old, new = ({table.name: table for table in side.tables} for side in (saved, job))
    yield from (f"the model has no table {name!r}" for name in old if name not in new)
    yield from (f"the checkpoint has no table {name!r}" for name in new if name not in old)
    for name, a in old.items():
        b = new.get(name, a)
        if a.num_rows != b.num_rows:
            counts = f"{a.num_rows} rows in the checkpoint, {b.num_rows} in the model"
            yield f"table {name!r} has {counts}"
        if a.width != b.width:
            yield f"table {name!r} is {a.width} wide in the checkpoint, {b.width} in the model"
    if old.keys() == new.keys() and list(old) != list(new):
        yield f"the tables are {', '.join(old)} in the checkpoint, {', '.join(new)} in the model"


def _other_differences(saved: Identity, job: Identity) -> Iterator[str]:
    def facts(side: Identity) -> dict[str, str]:
        dense = {f"tensor {t.name!r}": f"{t.dtype} {list(t.shape)}" for t in side.dense}
        settings = {f"the rows' {name}": str(value) for name, value in side.settings.items()}
        rows = {"the rows' optimizer": side.optimizer, "the rows' type": side.dtype}
        # Settings of two different optimizers are not comparable.
        return rows | (settings if saved.optimizer == job.optimizer else {}) | dense

    old, new = facts(saved), facts(job)
    for subject in old | new:
        a, b = old.get(subject, "missing"), new.get(subject, "missing")
        if a != b:
            yield f"{subject} is {a} in the checkpoint, {b} in the model"


def rows_at(first: int, last: int, shard: int, num_shards: int) -> range:
    """Rows of a shard, of a table whose rows are first to before last."""
    # Row r lies at shard r % num_shards: the first row here is the first with that remainder.
    return range(first + (shard - first) % num_shards, last, num_shards)


def _intersection(a: range, b: range) -> range:
    """Rows in both ranges. Equal remainders recur every lcm(a.step, b.step) rows."""
    first = next((row for row in a[: b.step] if row in b), None)
    stop = min(a.stop, b.stop)
    return range(0) if first is None else range(first, stop, math.lcm(a.step, b.step))


def copy_rows(file: TensorFile, name: str, file_rows: range, out_rows: range, out: Floats) -> None:
    """Copy rows of a tensor in a file into an array; the two ranges say which rows each holds.

    Copies only the columns of the array. The scratch memory is bounded.
    """
    rows = _intersection(out_rows, file_rows)
    if not rows:
        return
    stride, out_stride = rows.step // file_rows.step, rows.step // out_rows.step
    dtype, (_, columns), *_ = file.entry(name)
    if stride == out_stride == 1 and (dtype, columns) == (out.dtype.name, out.shape[1]):
        at = out_rows.index(rows[0])
        file.read(name, out[at : at + len(rows)], file_rows.index(rows[0]))
        return
    # In the file, a wanted row stands every `stride` rows: read all between, copy every stride-th.
    count = max(1, COPIED_BYTES // (stride * columns * out.itemsize))
    scratch = np.empty((min(count, len(rows)) * stride, columns), dtype)
    for at in range(0, len(rows), count):
        block = rows[at : at + count]
        first, last = file_rows.index(block[0]), file_rows.index(block[-1]) + 1
        out_first, out_last = out_rows.index(block[0]), out_rows.index(block[-1]) + 1
        file.read(name, scratch[: last - first], first)
        out[out_first:out_last:out_stride] = scratch[: last - first : stride, : out.shape[1]]


def _table_records(
    store: ShardStore, sharding: RowSharding, shard: int, table: int
) -> tuple[range, Floats]:
    """Rows of a table at a shard, and their records, which are contiguous in an arena."""
    setup = sharding.setup
    first, last = setup.schema.first_rows[table : table + 2].tolist()
    rows = rows_at(first, last, shard, sharding.num_shards)
    records = store.records[setup.arenas.index(setup.widths[table])]
    at = int(sharding.local(np.array(rows[:1]))[0]) if rows else 0
    return rows, records[at : at + len(rows)]


def save_shard(path: Path, store: ShardStore, sharding: RowSharding, shard: int) -> FileInfo:
    """Write a shard's records without a copy, one tensor per table."""
    tables = range(len(sharding.setup.widths))
    records = [_table_records(store, sharding, shard, table)[1] for table in tables]
    tensors = [as_tensor(f"table{table}", array) for table, array in enumerate(records)]
    about = {"shard": str(shard), "shards": str(sharding.num_shards)}
    return write_tensors(path / shard_file(shard), tensors, about)


def load_shard(path: Path, store: ShardStore, sharding: RowSharding, shard: int) -> None:
    """Read a shard's records from a checkpoint of any number of shards."""
    first = TensorFile(path / shard_file(0))
    with first.parsing("shards"):
        files = open_shards(path, int(first.text("shards")))
    first_rows = sharding.setup.schema.first_rows.tolist()
    for other, file in enumerate(files):
        for table in range(len(sharding.setup.widths)):
            rows, out = _table_records(store, sharding, shard, table)
            file_rows = rows_at(first_rows[table], first_rows[table + 1], other, len(files))
            file.expect(f"table{table}", (len(file_rows), out.shape[1]), out.dtype.name)
            copy_rows(file, f"table{table}", file_rows, rows, out)


def load_tables(path: Path, store: ShardStore, sharding: RowSharding, shard: int) -> list[str]:
    """Read initial values from a file with one tensor per table, as `checkpoint export` writes it.

    Optimizer state and tables that are not in the file keep their initial values. Returns the
    tables in the file; other tensors are refused. A file of another program has no checksums: then
    the first shard prints a line.
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
        rows, out = _table_records(store, sharding, shard, tables[name])
        file_rows = range(*setup.schema.first_rows[tables[name] : tables[name] + 2].tolist())
        # A record holds the row first and the optimizer state behind it.
        copy_rows(file, name, file_rows, rows, out[:, : setup.widths[tables[name]]])
    return sorted(file.names, key=lambda name: tables[name])


class Stateful(Protocol):
    """A learning-rate schedule, or another object with a state of numbers, text and tensors."""

    def state_dict(self) -> dict[str, object]:
        """The state to save."""

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Restore a saved state."""


@dataclass(frozen=True)
class Training:
    """The replicated part of a job: the dense model's `state_dict`, optimizers, schedules."""

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
    """A value as JSON. Its tensors go into `tensors`; the JSON refers to them by name."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # strict JSON has neither NaN nor infinity
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
    """The inverse of `_encode`. The result is Any, as in torch's own `state_dict`."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "float":
        return float(str(content))
    items = _decode(content, tensors)
    if kind == "tuple":
        return tuple(items)
    return Counter(dict(items)) if kind == "counter" else dict(items)


def save_dense(path: Path, training: Training, random: torch.Tensor) -> FileInfo:
    """Write the replicated part, and the random state of the worker that writes."""
    tensors: dict[str, torch.Tensor] = {}
    optimizers = [optimizer.state_dict() for optimizer in training.optimizers]
    extras = {name: extra.state_dict() for name, extra in training.extras.items()}
    about = {
        "classes": training.classes,
        "optimizers": _encode(optimizers, "optimizer", tensors),
        "extras": _encode(extras, "extra", tensors),
    }
    tensors |= {f"model.{name}": tensor for name, tensor in training.model.items()}
    tensors["random"] = random
    contents = [_from_torch(name, tensor) for name, tensor in tensors.items()]
    texts = {name: json.dumps(value) for name, value in about.items()}
    return write_tensors(path / DENSE_FILE, contents, texts)


def _to_torch(file: TensorFile, name: str) -> torch.Tensor:
    """A whole tensor, in newly allocated memory."""
    dtype, shape, *_ = file.entry(name)
    if 0 in shape:  # an array of no bytes cannot be viewed as another type
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
    """Restore model, optimizers and schedules; returns the random state."""
    file = TensorFile(path / DENSE_FILE)
    classes = file.json("classes")
    if classes != training.classes:
        raise ValueError(
            f"{path.name}: the optimizers are {classes} in the checkpoint, {training.classes} here"
        )
    _expect_model(file, training.model)
    names = [name for name in file.names if not name.startswith("model.")]
    tensors = {name: _to_torch(file, name) for name in names}
    with file.parsing("optimizers"):
        optimizers = list_of(_decode(file.json("optimizers"), tensors), "it", len(classes))
    with file.parsing("extras"):
        extras = object_of(_decode(file.json("extras"), tensors), "it")
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
    """Restore a state. A ValueError means another optimizer, other errors a malformed state."""
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
    """Write a worker's random state and, where a cache holds unsent updates, the cache."""
    arrays: dict[str, Array] = {"random": random.numpy(), **_cache_arrays(store)}
    tensors = [as_tensor(name, array) for name, array in arrays.items()]
    return write_tensors(path / worker_file(worker), tensors, {})


def _cache_arrays(store: CacheStore | None) -> dict[str, Floats]:
    """Records and bases of every arena, by name in the file."""
    if store is None:
        return {}
    records = {f"records{arena}": array for arena, array in enumerate(store.records)}
    return records | {f"bases{arena}": array for arena, array in enumerate(store.bases)}


def load_cache(path: Path, worker: int, store: CacheStore | None) -> torch.Tensor:
    """Fill a cache of the same size; returns the random state."""
    file = TensorFile(path / worker_file(worker))
    arrays = _cache_arrays(store)
    # All are checked before the first is read: an error leaves the cache as it was.
    for name, array in arrays.items():
        file.expect(name, array.shape, array.dtype.name)
    for name, array in arrays.items():
        file.read(name, array)
    return _to_torch(file, "random")
