"""Private temporary folders, removed when their owners end, also after a kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RUNTIME = "XDG_RUNTIME_DIR"  # a user's private folder, in memory, if the system has one
OWNER_LOCK = "lock"
_MAX_LENGTH = 70  # characters; the path of a socket may have 107 in all


def user_folder(large: bool = False) -> Path:
    """The user's folder of temporary folders, of mode 0700; refused if others may write to it.

    `large` asks for a folder on disk, for files that may not fit into memory.
    """
    parent = Path(tempfile.gettempdir()) if large else _temporary_folder()
    path = parent / f"embroute-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not private or status.st_uid != os.getuid():
        raise ValueError(
            f"{path}: must be a folder of mode 0700 that belongs to user {os.getuid()}; remove it, "
            f"or set TMPDIR to a folder of your own"
        )
    return path


def _temporary_folder() -> Path:
    """A writable folder with a path short enough for a socket in it."""
    for name in (os.environ.get(RUNTIME, ""), tempfile.gettempdir()):
        if name and len(name) <= _MAX_LENGTH and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path("/tmp")


@contextmanager
def scratch_folder(kind: str, large: bool = False) -> Iterator[Path]:
    """A new private folder, removed at the end; folders of dead owners are removed first.

    The operating system releases the lock in a folder when its owner dies.
    """
    parent = user_folder(large)
    with (parent / OWNER_LOCK).open("w") as parent_lock:
        # Otherwise another process could remove the new folder before its lock is taken.
        fcntl.flock(parent_lock, fcntl.LOCK_EX)
        _remove_abandoned(parent)
        path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=parent))
        lock = (path / OWNER_LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    with lock:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.iterdir():
        if not path.is_dir():
            continue
        with suppress(OSError), (path / OWNER_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
