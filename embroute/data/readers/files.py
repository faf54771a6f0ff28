"""The files of a path, and their bytes: plain or gzip, with errors that name the file."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

Progress = Callable[[str, float], None]  # the activity, and the share of it that is done

_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_WILDCARDS = set("*?[")


def find_files(text: str) -> tuple[Path, ...]:
    """The files of a path, a directory or a glob pattern, in name order.

    Names in a directory that begin with a dot or an underscore are left out.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, an unknown user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{text}: {reason}") from None
    if path.is_dir():
        files = [p for p in path.iterdir() if p.is_file() and p.name[0] not in "._"]
        if not files:
            raise ValueError(f"{text}: the directory holds no data files")
    elif path.is_fifo() or path.is_socket():
        raise ValueError(f"{text}: a pipe can be read only once; give a file")
    elif path.exists():
        files = [path]
    elif _WILDCARDS & set(text):
        files = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if not files:
            raise ValueError(f"{text}: no file matches this pattern")
    else:
        raise ValueError(f"{text}: no such file or directory")
    return tuple(sorted(files))


def is_parquet(path: Path) -> bool:
    """Whether a file begins like a parquet file."""
    return _magic(path).startswith(_PARQUET)


def _magic(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class ByteStream:
    """The text of one file from its beginning; `position` counts bytes on disk."""

    path: Path
    text: IO[bytes] | gzip.GzipFile
    disk: IO[bytes]

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes` of text; empty only at the end of the file."""
        try:
            return self.text.read(num_bytes)
        except EOFError:
            raise ValueError(f"{self.path}: the gzip file is truncated") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.path}: the gzip file is damaged: {error}") from None
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read: {error.strerror}") from None

    @property
    def position(self) -> int:
        """Bytes of the file on disk that have been read."""
        return self.disk.tell()


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """The text of a plain or gzip file; the first bytes decide which."""
    magic = _magic(path)
    if magic.startswith(_ZSTD):
        raise ValueError(f"{path}: zstd compression is not supported; use gzip, parquet or text")
    with path.open("rb") as disk:
        if not magic.startswith(_GZIP):
            yield ByteStream(path, disk, disk)
            return
        with gzip.GzipFile(fileobj=disk) as text:
            yield ByteStream(path, text, disk)
