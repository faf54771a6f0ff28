"""The manifest of a checkpoint: what was saved, which files belong to it, and whether they do.

It is the first link of a chain. It has a checksum of its own and one of each file's header; the
header has those of the file's blocks (`tensor_header.py`).
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from embroute.checkpoint.folders import (
    MANIFEST,
    DamagedError,
    partial_folder,
    put_in_place,
    step_of,
    sync_folder,
)
from embroute.checkpoint.strict_json import (
    Json,
    brief,
    finite_number,
    list_of,
    object_of,
    parse_json,
    text_of,
    whole_number,
    word,
)
from embroute.checkpoint.tensor_file import FileInfo, TensorFile, new_file
from embroute.checkpoint.tensor_header import SUM_DIGITS, TENSOR_DTYPES, checksum
from embroute.cost.step_time import OPTIMIZERS

VERSION = 2
MAX_BYTES = 1 << 26  # of a manifest
ROW_TYPES = ("float16", "float32", "float64")
PLANNER_FILE, DENSE_FILE = "brain.safetensors", "dense.safetensors"

_FIELDS = ("step", "policy", "num_workers", "num_shards", "identity", "files", "run_id", "saved_s")
_START = b'{\n "checksum": "'


class VersionError(ValueError):
    """A manifest that another version of the program wrote: no damage, and not passed over."""


def shard_file(shard: int) -> str:
    """Name of a shard's file."""
    return f"shard{shard}.safetensors"


def worker_file(worker: int) -> str:
    """Name of a worker's file."""
    return f"worker{worker}.safetensors"


class TableShape(NamedTuple):
    """A table of a model."""

    name: str
    num_rows: int
    width: int


class TensorShape(NamedTuple):
    """A parameter or buffer of the dense model."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Identity:
    """What a model must share with a checkpoint to be continued from it."""

    tables: tuple[TableShape, ...]
    optimizer: str  # of rows
    settings: Mapping[str, float]  # of that optimizer; the learning rate may change
    dtype: str  # of rows
    dense: tuple[TensorShape, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    policy: str
    num_workers: int
    num_shards: int
    identity: Identity
    files: tuple[FileInfo, ...]
    run_id: str  # of the job that saved it, from its start to its end
    saved_s: float = field(default_factory=time.time)  # since 1970

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(info.num_bytes for info in self.files)

    @property
    def names(self) -> list[str]:
        """The files that belong to a checkpoint of so many workers and shards, in their order."""
        shards = [shard_file(shard) for shard in range(self.num_shards)]
        return [PLANNER_FILE, DENSE_FILE, *shards, *map(worker_file, range(self.num_workers))]


def commit(folder: Path, manifest: Manifest, keep: int = 2) -> Path:
    """Finish a checkpoint whose files are all written; then remove all but the newest `keep`."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    part = partial_folder(folder, manifest.step, manifest.run_id)
    _check_names(part, manifest)
    for info in manifest.files:
        _check_size(part, info)
    written = asdict(manifest)
    written["files"] = sorted(manifest.files, key=lambda info: manifest.names.index(info.name))
    with new_file(part / MANIFEST) as file:
        file.write(sealed({"version": VERSION, **written}))
    sync_folder(part)
    return put_in_place(part, manifest.step, keep)


def sealed(fields: Mapping[str, object]) -> bytes:
    """A manifest's text: its checksum comes first, and covers every byte behind it."""
    rest = b'",\n' + json.dumps(fields, indent=1).encode().removeprefix(b"{\n") + b"\n"
    return _START + checksum(rest).encode() + rest


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; every file is there, with its size and its header."""
    try:
        manifest = _parsed(_fields(path))
    except (DamagedError, VersionError):
        raise
    except ValueError as error:
        raise DamagedError(path / MANIFEST, str(error)) from None
    step = step_of(path)
    if step not in (None, manifest.step):
        raise DamagedError(path / MANIFEST, f"it says step {manifest.step}, the folder {step}")
    _check_names(path, manifest)
    for info in manifest.files:
        _check_size(path, info)
        if TensorFile(path / info.name).header_sum != info.header_sum:
            raise DamagedError(path / info.name, "it is not the file that was saved here")
    open_shards(path, manifest.num_shards)
    _check_brain(path, manifest)
    return manifest


def open_shards(path: Path, num_shards: int) -> list[TensorFile]:
    """The files of all shards, each of which says which shard it is of how many."""
    files = [TensorFile(path / shard_file(shard)) for shard in range(num_shards)]
    for shard, file in enumerate(files):
        told = f"shard {file.told('shard')} of {file.told('shards')}"
        if told != f"shard {shard} of {num_shards}":
            raise DamagedError(file.path, f"it is {told}, expected {shard} of {num_shards}")
    return files


def verify(path: Path, files: Iterable[FileInfo]) -> None:
    """Read files of a checkpoint whole, and refuse any that is not as it was written."""
    for info in files:
        TensorFile(path / info.name).verify()


def _fields(path: Path) -> dict[str, Json]:
    """A manifest's fields, its version and checksum checked."""
    file = path / MANIFEST
    try:
        about = os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        reason = "no checkpoint, or one that was not copied whole"
        raise DamagedError(path, f"{MANIFEST} is missing: {reason}") from None
    if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
        raise ValueError(f"it is no plain file of at most {MAX_BYTES} bytes")
    raw = file.read_bytes()
    fields = object_of(parse_json(raw), "it")
    rest = raw[len(_START) + SUM_DIGITS :]
    right = raw == _START + checksum(rest).encode() + rest
    version, stated = fields.pop("version", None), fields.pop("checksum", None)
    if version != VERSION and (right or stated is None):
        raise VersionError(f"{file} has version {brief(version)}, this program reads {VERSION}")
    if not right:
        raise ValueError("it does not have its checksum")
    return fields


def _parsed(fields: dict[str, Json]) -> Manifest:
    object_of(fields, "it", _FIELDS)
    return Manifest(
        whole_number(fields["step"], "step"),
        text_of(fields["policy"], "policy"),
        whole_number(fields["num_workers"], "num_workers", 1),
        whole_number(fields["num_shards"], "num_shards", 1),
        _identity(fields["identity"]),
        tuple(_file(entry) for entry in list_of(fields["files"], "files")),
        word(fields["run_id"], "run_id"),
        finite_number(fields["saved_s"], "saved_s"),
    )


def _identity(value: Json) -> Identity:
    names = ("tables", "optimizer", "settings", "dtype", "dense")
    fields = object_of(value, "identity", names)
    optimizer, dtype = (text_of(fields[name], name) for name in ("optimizer", "dtype"))
    for name, known, all_known in (
        ("optimizer", optimizer, tuple(OPTIMIZERS)),
        ("dtype", dtype, ROW_TYPES),
    ):
        if known not in all_known:
            raise ValueError(f"{name} must be one of {', '.join(all_known)}, got {brief(known)}")
    settings = object_of(fields["settings"], "settings")
    return Identity(
        tuple(_table(table) for table in list_of(fields["tables"], "tables")),
        optimizer,
        {name: finite_number(setting, name) for name, setting in settings.items()},
        dtype,
        tuple(_tensor(tensor) for tensor in list_of(fields["dense"], "dense")),
    )


def _table(value: Json) -> TableShape:
    name, rows, width = list_of(value, "a table", 3)
    return TableShape(
        text_of(name, "a table's name"),
        whole_number(rows, "a table's rows"),
        whole_number(width, "a table's width", 1),
    )


def _tensor(value: Json) -> TensorShape:
    name, dtype, shape = list_of(value, "a tensor", 3)
    if dtype not in TENSOR_DTYPES:
        raise ValueError(
            f"a tensor's type must be one of {', '.join(TENSOR_DTYPES)}, got {brief(dtype)}"
        )
    sizes = tuple(
        whole_number(size, "a tensor's shape") for size in list_of(shape, "a tensor's shape")
    )
    return TensorShape(text_of(name, "a tensor's name"), str(dtype), sizes)


def _file(value: Json) -> FileInfo:
    name, num_bytes, header_sum = list_of(value, "a file", 3)
    return FileInfo(
        text_of(name, "a file's name"),
        whole_number(num_bytes, "a file's bytes"),
        text_of(header_sum, "a file's checksum"),
    )


def _check_names(path: Path, manifest: Manifest) -> None:
    """The files are those of so many workers and shards, each once, and no others."""
    listed = sorted(info.name for info in manifest.files)
    right = len(listed) == 2 + manifest.num_shards + manifest.num_workers
    if not right or listed != sorted(manifest.names):
        who = f"{manifest.num_workers} workers and {manifest.num_shards} shards"
        raise DamagedError(path / MANIFEST, f"its list of files is not that of {who}")
    strays = {entry.name for entry in path.glob("*.safetensors")} - set(listed)
    if strays:
        raise DamagedError(path, f"{min(strays)} does not belong to it")


def _check_size(path: Path, info: FileInfo) -> None:
    try:
        about = os.lstat(path / info.name)
    except FileNotFoundError:
        raise DamagedError(path, f"{info.name} is missing") from None
    if not stat.S_ISREG(about.st_mode):
        raise DamagedError(path / info.name, "it is no plain file")
    if about.st_size != info.num_bytes:
        counts = f"it has {about.st_size} bytes, {info.num_bytes} were written to it"
        raise DamagedError(path / info.name, counts)


def _check_brain(path: Path, manifest: Manifest) -> None:
    """Step and number of workers are those of the brain's state."""
    file = TensorFile(path / PLANNER_FILE)
    state = file.told_json("state")
    with file.parsing("state"):
        step = whole_number(object_of(state, "it")["step"], "step")
    if step != manifest.step:
        reason = f"it says step {manifest.step}, {PLANNER_FILE} says {step}"
        raise DamagedError(path / MANIFEST, reason)
    workers = file.entry("capacity_WA").shape[:1]
    if workers != (manifest.num_workers,):
        reason = f"it says {manifest.num_workers} workers, {PLANNER_FILE} has the shape {workers}"
        raise DamagedError(path / MANIFEST, reason)
