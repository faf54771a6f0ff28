"""The manifest of a checkpoint: the saved job, the list of files, and the checks of both.

Checksums form a chain: the manifest holds its own and one of each file's header; the header holds
those of the file's blocks (`tensor_header.py`).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
)

from embroute.checkpoint.folders import (
    MANIFEST,
    DamagedError,
    partial_folder,
    publish,
    step_of,
    sync_folder,
)
from embroute.checkpoint.strict_json import Json, brief, object_of, parse_json, validated
from embroute.checkpoint.tensor_file import FileInfo, TensorFile, new_file
from embroute.checkpoint.tensor_header import SUM_DIGITS, TENSOR_DTYPES, checksum
from embroute.cost.step_time import OPTIMIZERS

VERSION = 4
MAX_BYTES = 1 << 26  # of a manifest
ROW_TYPES = ("float16", "float32", "float64")
PLANNER_FILE, DENSE_FILE = "planner.safetensors", "dense.safetensors"

_START = b'{\n "checksum": "'


class VersionError(ValueError):
    """A manifest of another version of the program: no damage, so fall_back does not skip it."""


def shard_file(shard: int) -> str:
    """Name of a shard's file."""
    return f"shard{shard}.safetensors"


def worker_file(worker: int) -> str:
    """Name of a worker's file."""
    return f"worker{worker}.safetensors"


def _one_of(choices: Iterable[str]) -> AfterValidator:
    """A check for one of some words."""

    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(f"it must be one of {', '.join(choices)}")
        return value

    return AfterValidator(check)


_KNOWN_FIELDS = ConfigDict(extra="forbid")


class TableShape(NamedTuple):
    """A table of a model."""

    name: str
    num_rows: NonNegativeInt
    width: PositiveInt


class TensorShape(NamedTuple):
    """A parameter or buffer of the dense model."""

    name: str
    dtype: Annotated[str, _one_of(TENSOR_DTYPES)]
    shape: tuple[NonNegativeInt, ...]


@dataclass(frozen=True)
class Identity:
    """What a job and a checkpoint must have in common to resume from it."""

    __pydantic_config__ = _KNOWN_FIELDS

    tables: tuple[TableShape, ...]
    optimizer: Annotated[str, _one_of(OPTIMIZERS)]  # of rows
    settings: Mapping[str, FiniteFloat]  # of that optimizer, without the learning rate
    dtype: Annotated[str, _one_of(ROW_TYPES)]  # of rows
    dense: tuple[TensorShape, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    __pydantic_config__ = _KNOWN_FIELDS

    step: NonNegativeInt
    policy: str
    num_workers: PositiveInt
    num_shards: PositiveInt
    identity: Identity
    files: tuple[FileInfo, ...]
    # Of the job that saved it, from its start to its end; fit for a file name.
    run_id: Annotated[str, Field(pattern="^[A-Za-z0-9_]{1,64}$")]
    saved_s: FiniteFloat  # since 1970

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(info.num_bytes for info in self.files)

    @property
    def names(self) -> list[str]:
        """The files that a checkpoint of these workers and shards must have, in order."""
        shards = [shard_file(shard) for shard in range(self.num_shards)]
        return [PLANNER_FILE, DENSE_FILE, *shards, *map(worker_file, range(self.num_workers))]


_MANIFEST_TYPE, _STEP = TypeAdapter(Manifest), TypeAdapter(NonNegativeInt)


def commit(folder: Path, manifest: Manifest, keep: int = 2) -> Path:
    """Publish a checkpoint after all ranks wrote their files; keep only the newest `keep`."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    partial = partial_folder(folder, manifest.step, manifest.run_id)
    _check_files(partial, manifest)
    fields = asdict(manifest)
    fields["files"] = sorted(manifest.files, key=lambda info: manifest.names.index(info.name))
    with new_file(partial / MANIFEST) as file:
        file.write(manifest_bytes({"version": VERSION, **fields}))
    sync_folder(partial)
    return publish(partial, manifest.step, keep)


def manifest_bytes(fields: Mapping[str, object]) -> bytes:
    """A manifest as JSON. Its checksum stands first and covers every byte behind it."""
    rest = b'",\n' + json.dumps(fields, indent=1).encode().removeprefix(b"{\n") + b"\n"
    return _START + checksum(rest).encode() + rest


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, checked against the size and header of every file."""
    try:
        manifest = validated(_MANIFEST_TYPE, _fields(path))
    except (DamagedError, VersionError):
        raise
    except ValueError as error:
        raise DamagedError(path / MANIFEST, str(error)) from None
    step = step_of(path)
    if step not in (None, manifest.step):
        raise DamagedError(path / MANIFEST, f"it says step {manifest.step}, the folder {step}")
    _check_files(path, manifest)
    for info in manifest.files:
        if TensorFile(path / info.name).header_sum != info.header_sum:
            raise DamagedError(path / info.name, "it is not the file that was saved here")
    open_shards(path, manifest.num_shards)
    _check_planner(path, manifest)
    return manifest


def open_shards(path: Path, num_shards: int) -> list[TensorFile]:
    """The files of all shards; each must state its shard and the number of shards."""
    files = [TensorFile(path / shard_file(shard)) for shard in range(num_shards)]
    for shard, file in enumerate(files):
        stated = f"shard {file.text('shard')} of {file.text('shards')}"
        if stated != f"shard {shard} of {num_shards}":
            raise DamagedError(file.path, f"it is {stated}, expected {shard} of {num_shards}")
    return files


def verify(path: Path, files: Iterable[FileInfo]) -> None:
    """Check every block of some files of a checkpoint."""
    for info in files:
        TensorFile(path / info.name).verify()


def _fields(path: Path) -> dict[str, Json]:
    """A manifest's fields, after the check of version and checksum."""
    file = path / MANIFEST
    try:
        status = os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        reason = "no checkpoint, or one that was not copied whole"
        raise DamagedError(path, f"{MANIFEST} is missing: {reason}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise ValueError(f"it is not a regular file of at most {MAX_BYTES} bytes")
    raw = file.read_bytes()
    fields = object_of(parse_json(raw), "it")
    rest = raw[len(_START) + SUM_DIGITS :]
    has_checksum = raw == _START + checksum(rest).encode() + rest
    version, stated = fields.pop("version", None), fields.pop("checksum", None)
    # A wrong checksum means damage, also of the version. Version 1 had no checksum.
    other_version = isinstance(version, int) and version != VERSION
    if other_version and (has_checksum or stated is None):
        raise VersionError(f"{file} has version {brief(version)}, this program reads {VERSION}")
    if not has_checksum:
        raise ValueError("it does not have its checksum")
    return fields


def _check_files(path: Path, manifest: Manifest) -> None:
    """Refuse missing files, other files, and files of another size."""
    listed = sorted(info.name for info in manifest.files)
    # Counts first: a damaged number of shards must not make `names` a list of billions.
    complete = len(listed) == 2 + manifest.num_shards + manifest.num_workers
    if not complete or listed != sorted(manifest.names):
        ranks = f"{manifest.num_workers} workers and {manifest.num_shards} shards"
        raise DamagedError(path / MANIFEST, f"its list of files is not that of {ranks}")
    strays = {entry.name for entry in path.glob("*.safetensors")} - set(listed)
    if strays:
        raise DamagedError(path, f"{min(strays)} does not belong to it")
    for info in manifest.files:
        _check_size(path, info)


def _check_size(path: Path, info: FileInfo) -> None:
    try:
        status = os.lstat(path / info.name)
    except FileNotFoundError:
        raise DamagedError(path, f"{info.name} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(path / info.name, "it is not a regular file")
    if status.st_size != info.num_bytes:
        counts = f"it has {status.st_size} bytes, {info.num_bytes} were written to it"
        raise DamagedError(path / info.name, counts)


def _check_planner(path: Path, manifest: Manifest) -> None:
    """Refuse a planner state of another step or another number of workers."""
    file = TensorFile(path / PLANNER_FILE)
    state = file.json("state")
    with file.parsing("state"):
        step = validated(_STEP, object_of(state, "it")["step"], "step")
    if step != manifest.step:
        reason = f"it says step {manifest.step}, {PLANNER_FILE} says {step}"
        raise DamagedError(path / MANIFEST, reason)
    workers = file.entry("capacity_WA").shape[:1]
    if workers != (manifest.num_workers,):
        reason = f"it says {manifest.num_workers} workers, {PLANNER_FILE} has the shape {workers}"
        raise DamagedError(path / MANIFEST, reason)
