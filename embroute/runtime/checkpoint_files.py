"""Checkpoints on disk: folders that are there whole or not at all, and the tensor files in them.

All ranks write their files into DIR/step-00001200.partial. When every file is on the disk, the
coordinator adds manifest.json and renames the folder to DIR/step-00001200.

Tensor files are in the safetensors format: the length of a header in 8 little-endian bytes, the
header, which is JSON with type, shape and place of every tensor, and then the tensors' bytes. They
are written here, because the bytes then go by in blocks and are summed up as they go.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

Array = npt.NDArray[np.generic]
VERSION = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 24  # read or written at a time

_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFTOVER = re.compile(r"step-\d{8,}\.(partial|replaced|removed)")


class FileInfo(NamedTuple):
    """A file as its writer knew it."""

    name: str
    num_bytes: int
    crc32: int


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
    saved_s: float = field(default_factory=time.time)  # since 1970

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(info.num_bytes for info in self.files)


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Step of a checkpoint's folder; None if the name is no such folder's."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("step-*")):
        step = step_of(path)
        if step is not None and path.is_dir():
            # One that was being replaced counts only if its successor never came.
            found.setdefault(step, path)
    return [found[step] for step in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a folder."""
    return next(reversed(saved(folder)), None)


def find(path: Path) -> Path:
    """The checkpoint that a user means by a step's folder, or by a folder of several."""
    if not path.is_dir():
        raise ValueError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
    if _LEFTOVER.fullmatch(path.name) and step_of(path) is None:
        raise ValueError(f"{path}: this checkpoint was never finished")
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return path
    newest = latest(path)
    if newest is None:
        inside = next((f" (but in {each})" for each in path.iterdir() if latest(each)), "")
        raise ValueError(f"{path}: there is no checkpoint in this folder{inside}")
    return newest


def claim(folder: Path, step: int) -> None:
    """Make a folder ready for the checkpoints of a run that starts at `step`.

    Leftovers of a crash are removed. Later checkpoints would be taken for this run's newest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_start(folder, step)
    clear(folder)


def check_start(folder: Path, step: int) -> None:
    """Refuse to start at a step where a folder holds later checkpoints."""
    newest = latest(folder)
    if newest is not None and (step_of(newest) or 0) > step:
        raise ValueError(
            f"{folder} holds {newest.name}, later than step {step} where this run starts: resume "
            f"from it, remove it, or save into another folder"
        )


def partial(folder: Path, step: int) -> Path:
    """Where the ranks write a checkpoint."""
    path = folder / f"{step_name(step)}.partial"
    path.mkdir(parents=True, exist_ok=True)
    return path


def commit(folder: Path, manifest: Manifest, keep: int = 2) -> Path:
    """Finish a checkpoint whose files are all written; then remove all but the newest `keep`."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    part, path = partial(folder, manifest.step), folder / step_name(manifest.step)
    _check_files(part, manifest)
    listed = {info.name for info in manifest.files}
    for stray in (entry for entry in part.iterdir() if entry.name not in listed):
        stray.unlink()  # of a crashed run with more ranks
    text = json.dumps({"version": VERSION, **asdict(manifest)}, indent=1)
    write_file(part / MANIFEST, [text.encode()])
    sync_folder(part)
    if path.exists():
        _move(path, ".replaced")
    part.rename(path)
    sync_folder(folder)
    clear(folder)
    earlier = saved(folder)
    earlier = earlier[: earlier.index(path)]
    for old in earlier[: max(0, len(earlier) - keep + 1)]:
        _move(old, ".removed")  # first out of sight, so that no half of it is ever seen
    clear(folder)
    return path


def _move(path: Path, suffix: str) -> None:
    target = path.with_name(path.name.partition(".")[0] + suffix)
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def clear(folder: Path) -> None:
    """Remove what crashes left behind, and what was removed or replaced."""
    kept = set(saved(folder))
    for path in folder.glob("step-*"):
        if _LEFTOVER.fullmatch(path.name) and path not in kept:
            shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, all of whose files are there with all their bytes."""
    try:
        told = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{path}: {MANIFEST} is missing: no checkpoint, or one that was not copied whole"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path / MANIFEST} is damaged: {error}") from None
    version = told.pop("version", None) if isinstance(told, dict) else None
    if version != VERSION:
        raise ValueError(f"{path / MANIFEST} has version {version}, this program reads {VERSION}")
    try:
        identity = told.pop("identity")
        identity["tables"] = tuple(TableShape(*table) for table in identity["tables"])
        identity["dense"] = tuple(
            TensorShape(name, dtype, tuple(shape)) for name, dtype, shape in identity["dense"]
        )
        told["files"] = tuple(FileInfo(*info) for info in told["files"])
        manifest = Manifest(identity=Identity(**identity), **told)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged: {error!r}") from None
    _check_files(path, manifest)
    return manifest


def _check_files(path: Path, manifest: Manifest) -> None:
    for info in manifest.files:
        try:
            size = (path / info.name).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{path}: {info.name} is missing") from None
        if size != info.num_bytes:
            raise ValueError(
                f"{path}: {info.name} has {size} bytes, {info.num_bytes} were written to it"
            )


def verify(path: Path, files: Iterable[FileInfo]) -> None:
    """Read files of a checkpoint whole, and refuse any that is not what was written."""
    for info in files:
        crc32 = 0
        with (path / info.name).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                crc32 = zlib.crc32(block, crc32)
        if crc32 != info.crc32:
            raise ValueError(f"{path}: {info.name} is damaged: its checksum is not the one written")


def write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> FileInfo:
    """Write a file and have it on the disk; if that fails, the error says what is intact."""
    num_bytes = crc32 = 0
    try:
        with path.open("wb") as file:
            for block in blocks:
                file.write(block)
                crc32 = zlib.crc32(block, crc32)
                num_bytes += len(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise OSError(error.errno, f"{error.strerror}{_intact(path.parent)}", str(path)) from error
    return FileInfo(path.name, num_bytes, crc32)


def _intact(folder: Path) -> str:
    """What a failure in a folder leaves whole."""
    if folder.suffix != ".partial":
        return ""
    before = latest(folder.parent)
    kept = "there is no earlier one" if before is None else f"{before.name} before it is intact"
    return f"; {folder.stem} was not saved, {kept}"


_CODES = {"bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "int16": ("I16", 2)}
_CODES |= {"float16": ("F16", 2), "bfloat16": ("BF16", 2), "float32": ("F32", 4)}
_CODES |= {"int32": ("I32", 4), "int64": ("I64", 8), "float64": ("F64", 8)}


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written; its bytes come in blocks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Iterable[memoryview]

    def __post_init__(self) -> None:
        if self.dtype not in _CODES:
            raise ValueError(f"{self.name} is {self.dtype}: use one of {', '.join(_CODES)}")

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return _CODES[self.dtype][1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.item_bytes


def as_tensor(name: str, array: Array) -> Tensor:
    """An array to be written; it must not change meanwhile."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    blocks = (flat[at : at + BLOCK_BYTES] for at in range(0, len(flat), BLOCK_BYTES))
    return Tensor(name, array.dtype.name, array.shape, blocks)


def write_tensors(path: Path, tensors: Sequence[Tensor], about: Mapping[str, str]) -> FileInfo:
    """Write a tensor file; `about` is text for its header."""
    # The widest elements come first: each tensor then starts at a multiple of its element.
    tensors = sorted(tensors, key=lambda tensor: -tensor.item_bytes)
    header: dict[str, object] = {"__metadata__": dict(about)}
    at = 0
    for tensor in tensors:
        code, end = _CODES[tensor.dtype][0], at + tensor.num_bytes
        header[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = [len(text).to_bytes(8, "little"), text]
    return write_file(path, chain(start, *(tensor.blocks for tensor in tensors)))


class _Slices(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, part: slice) -> Array: ...


class _Reader(Protocol):
    def keys(self) -> list[str]: ...

    def metadata(self) -> dict[str, str] | None: ...

    def get_slice(self, name: str) -> _Slices: ...


def _open(path: Path) -> _Reader:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from None


class TensorFile:
    """A tensor file that is read in parts."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, _open(path)
        self.names = self._file.keys()
        self.about = self._file.metadata() or {}

    def told(self, name: str) -> str:
        """A text of the header."""
        if name not in self.about:
            raise ValueError(f"{self.path} is no part of a checkpoint: it does not say {name!r}")
        return self.about[name]

    def expect(self, name: str, shape: Sequence[int], *dtypes: str) -> None:
        """Refuse a tensor that is missing, or of another shape or type."""
        if name not in self.names:
            raise ValueError(f"{self.path}: there is no tensor {name!r}")
        view = self._file.get_slice(name)
        if view.get_shape() != list(shape):
            raise ValueError(
                f"{self.path}: {name!r} has the shape {view.get_shape()}, expected {list(shape)}"
            )
        if view.get_dtype() not in [_CODES[dtype][0] for dtype in dtypes]:
            raise ValueError(
                f"{self.path}: {name!r} is {view.get_dtype()}, expected {' or '.join(dtypes)}"
            )

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Array:
        """Some rows of a tensor that has rows."""
        return self._file.get_slice(name)[first:last]

    def read(self, name: str, out: Array) -> None:
        """Read a whole tensor into an array of its shape."""
        count = max(1, BLOCK_BYTES * len(out) // max(1, out.nbytes))
        for at in range(0, len(out) if out.size else 0, count):
            out[at : at + count] = self.rows(name, at, min(at + count, len(out)))
