"""Tensor files in the safetensors format, written and read with a checksum of every block.

The header stands first and holds the checksums of the bytes behind it (`tensor_header.py`). So the
writer writes it twice, with the same length: before the tensors with zeros, then with the sums.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import xxhash

from embroute.checkpoint.folders import DamagedError, lost_checkpoint
from embroute.checkpoint.strict_json import Json, parse_json
from embroute.checkpoint.tensor_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SUM_DIGITS,
    TENSOR_DTYPES,
    TensorEntry,
    block_size,
    checksum,
    header_bytes,
    parse_header,
    tensor_bytes,
)
from embroute.kernels.array_types import U8, Array

PIECE_BYTES = 1 << 24  # of a tensor, read or written at a time


class FileInfo(NamedTuple):
    """A tensor file as written: the header's checksum covers the checksums of all blocks."""

    name: str
    num_bytes: int
    header_sum: str


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, flushed to the disk at the end; an error says which checkpoint is intact."""
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        lost = lost_checkpoint(path.parent)
        raise OSError(error.errno, f"{error.strerror}{lost}", str(path)) from error
    except Exception:
        with suppress(OSError):
            path.unlink()
        raise


@dataclass(frozen=True)
class Tensor:
    """A tensor to write; its bytes come in pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[memoryview]

    def __post_init__(self) -> None:
        if self.dtype not in TENSOR_DTYPES:
            raise ValueError(f"{self.name} is {self.dtype}: use one of {', '.join(TENSOR_DTYPES)}")


def as_tensor(name: str, array: Array) -> Tensor:
    """An array to write; it must not change until then."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    pieces = (flat[at : at + PIECE_BYTES] for at in range(0, len(flat), PIECE_BYTES))
    return Tensor(name, array.dtype.name, array.shape, pieces)


def write_tensors(path: Path, tensors: Sequence[Tensor], about: Mapping[str, str]) -> FileInfo:
    """Write a tensor file; `about` holds texts for its header."""
    # Widest elements first: then every tensor starts at a multiple of its element size.
    tensors = sorted(tensors, key=lambda tensor: -TENSOR_DTYPES[tensor.dtype][1])
    entries, at = dict[str, TensorEntry](), 0
    for tensor in tensors:
        last = at + tensor_bytes(tensor.dtype, tensor.shape)
        entries[tensor.name] = TensorEntry(tensor.dtype, tensor.shape, at, last)
        at = last
    size = block_size(at)
    header = header_bytes(entries, about, "0" * SUM_DIGITS * -(-at // size))
    with new_file(path) as file:
        file.write(header)
        sums = "".join(_write_blocks(file, tensors, size))
        header = header_bytes(entries, about, sums)
        file.seek(0)
        file.write(header)
    return FileInfo(path.name, len(header) + at, checksum(header))


def _write_blocks(file: BinaryIO, tensors: Iterable[Tensor], size: int) -> Iterator[str]:
    """Write the tensors' bytes and yield the checksum of each block.

    Pieces and blocks need not align: `space` is what is left of the current block.
    """
    block, space = xxhash.xxh3_64(), size
    for piece in (piece for tensor in tensors for piece in tensor.pieces):
        at = 0
        while at < len(piece):
            # Sum and write at once, while the bytes are in the processor's cache.
            span = piece[at : at + space]
            block.update(span)
            file.write(span)
            at, space = at + len(span), space - len(span)
            if not space:
                yield block.hexdigest()
                block, space = xxhash.xxh3_64(), size
    if space < size:
        yield block.hexdigest()


def _open(path: Path) -> int:
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer. It is refused below.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ELOOP, errno.ENOTDIR):
            raise
        raise DamagedError(path, f"it cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedError(path, "it is not a regular file")
    return handle


class TensorFile:
    """Random access to a tensor file; a read checks every block that it touches.

    Files of other programs have no checksums: `needs_sums` refuses them.
    """

    def __init__(self, path: Path, needs_sums: bool = True) -> None:
        self.path, self._handle = path, _open(path)
        weakref.finalize(self, os.close, self._handle)
        raw = self._head()
        self.header_sum, self._first = checksum(raw), len(raw)
        self._data_bytes = os.fstat(self._handle).st_size - len(raw)
        try:
            self._header = parse_header(raw, self._data_bytes)
        except ValueError as error:
            raise DamagedError(path, str(error)) from None
        if needs_sums and not self.has_sums:
            raise DamagedError(path, "it has no checksums")
        # The last block of which only a part was read: the next read often continues in it.
        self._cache, self._cached_block = bytearray(), -1

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._header.entries)

    @property
    def about(self) -> Mapping[str, str]:
        """Texts in the header, by name."""
        return self._header.about

    @property
    def has_sums(self) -> bool:
        """Whether the file has checksums of its blocks."""
        return self._header.sums is not None

    def text(self, name: str) -> str:
        """A text in the header."""
        if name not in self.about:
            raise DamagedError(self.path, f"its header lacks the text {name!r}")
        return self.about[name]

    def json(self, name: str) -> Json:
        """A JSON value in the header."""
        with self.parsing(name):
            return parse_json(self.text(name))

    @contextmanager
    def parsing(self, name: str) -> Iterator[None]:
        """Errors that a malformed text of the header causes become damage of this file."""
        try:
            yield
        except DamagedError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = str(error) if type(error) is ValueError else repr(error)
            raise DamagedError(
                self.path, f"{name!r} in its header is malformed: {reason}"
            ) from None

    def entry(self, name: str) -> TensorEntry:
        """Type, shape and position of a tensor."""
        if name not in self._header.entries:
            raise DamagedError(self.path, f"there is no tensor {name!r} in it")
        return self._header.entries[name]

    def expect(self, name: str, shape: Sequence[int], *dtypes: str) -> None:
        """Refuse a tensor that is missing or has another shape or type."""
        if name not in self._header.entries:
            raise ValueError(f"{self.path}: there is no tensor {name!r}")
        entry = self.entry(name)
        if entry.shape != tuple(shape):
            raise ValueError(
                f"{self.path}: {name!r} has the shape {list(entry.shape)}, expected {list(shape)}"
            )
        if entry.dtype not in dtypes:
            known = " or ".join(dtypes)
            raise ValueError(f"{self.path}: {name!r} is {entry.dtype}, expected {known}")

    def data(self, name: str) -> U8:
        """The bytes of a whole tensor."""
        entry = self.entry(name)
        out = np.empty(entry.last - entry.first, np.uint8)
        self._fill(entry.first, out.data)
        return out

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Array:
        """Rows `first` to before `last` of a tensor of one dimension or more."""
        dtype, shape, at, _ = self.entry(name)
        if not shape or dtype == "bfloat16":
            raise ValueError(f"{self.path}: {name!r} is {dtype} {list(shape)}, no rows of numpy's")
        row_bytes = tensor_bytes(dtype, shape[1:])
        first, last, _ = slice(first, last).indices(shape[0])
        count = max(0, last - first)
        out = np.empty(count * row_bytes, np.uint8)
        self._fill(at + first * row_bytes, out.data)
        return out.view(dtype).reshape(count, *shape[1:])

    def read(self, name: str, out: Array, first: int = 0) -> None:
        """Fill an array of the tensor's type and width with the rows from `first` on."""
        entry = self.entry(name)
        row_bytes = tensor_bytes(entry.dtype, entry.shape[1:])
        if out.flags.c_contiguous:
            target = out.reshape(-1).view(np.uint8)
            self._fill(entry.first + first * row_bytes, target.data)
            return
        count = max(1, PIECE_BYTES // max(1, row_bytes))
        for at in range(0, len(out) if out.size else 0, count):
            last = min(at + count, len(out))
            out[at:last] = self.rows(name, first + at, first + last)

    def verify(self) -> None:
        """Check every block."""
        size = self._header.block_bytes
        block = memoryview(bytearray(min(size, self._data_bytes)))
        for at in range(0, self._data_bytes, size):
            self._fill(at, block[: self._data_bytes - at])

    def _fill(self, first: int, out: memoryview) -> None:
        """Fill `out` with the tensors' bytes from `first` on. Whole blocks are read in place."""
        size, at, end = self._header.block_bytes, first, first + len(out)
        while at < end:
            block = at // size
            start, stop = block * size, min((block + 1) * size, self._data_bytes)
            if at == start and stop <= end and block != self._cached_block:
                self._read_block(block, out[at - first : stop - first])
            else:
                stop = min(stop, end)
                out[at - first : stop - first] = self._cached(block)[at - start : stop - start]
            at = stop

    def _cached(self, block: int) -> memoryview:
        """A block of which only a part is needed."""
        if block != self._cached_block:
            size = self._header.block_bytes
            self._cached_block = -1  # a failed read must not leave half a block behind
            self._cache = self._cache or bytearray(min(size, self._data_bytes))
            self._read_block(block, memoryview(self._cache)[: self._data_bytes - block * size])
            self._cached_block = block
        return memoryview(self._cache)

    def _read_block(self, block: int, out: memoryview) -> None:
        first = self._first + block * self._header.block_bytes
        self._read(first, out)
        sums, at = self._header.sums, SUM_DIGITS * block
        if sums is not None and checksum(out) != sums[at : at + SUM_DIGITS]:
            where = f"bytes {first} to {first + len(out)}"
            raise DamagedError(self.path, f"{where} do not have their checksum")

    def _head(self) -> bytes:
        """The bytes of length and header."""
        size = os.fstat(self._handle).st_size
        if size < LENGTH_BYTES:
            raise DamagedError(self.path, f"{size} bytes are too few for a tensor file")
        start = bytearray(LENGTH_BYTES)
        self._read(0, memoryview(start))
        length = int.from_bytes(start, "little")
        if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise DamagedError(self.path, f"a header of {length} bytes does not fit in {size}")
        raw = bytearray(LENGTH_BYTES + length)
        self._read(0, memoryview(raw))
        return bytes(raw)

    def _read(self, first: int, out: memoryview) -> None:
        at = 0
        while at < len(out):
            try:
                count = os.preadv(self._handle, [out[at:]], first + at)
            except OSError as error:
                # An unreadable sector damages this file; other errors are the system's.
                if error.errno != errno.EIO:
                    raise OSError(error.errno, error.strerror, str(self.path)) from None
                count = 0
            if not count:
                where = f"bytes {first + at} to {first + len(out)}"
                raise DamagedError(self.path, f"{where} cannot be read")
            at += count
