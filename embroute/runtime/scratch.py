"""Folders that only this user can read: a job's rendezvous, its sockets, its secret.

A folder belongs to the process that holds the lock in it. The kernel frees the lock however that
process ends, so the next job removes the folders of dead ones.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RUNTIME = "XDG_RUNTIME_DIR"  # a user's private folder, where the system makes one
LOCK = "lock"
_LONGEST = 70  # characters; a socket's path may have 107 in all


def user_folder() -> Path:
    """The folder of this user's jobs, mode 0700; refused if anybody else could write there."""
    path = _place() / f"embroute-{os.getuid()}"
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


def _place() -> Path:
    """A short folder for temporary files."""
    for name in (os.environ.get(RUNTIME, ""), tempfile.gettempdir()):
        if name and len(name) <= _LONGEST and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path("/tmp")


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """A new private folder that ends with its owner; those of dead owners are removed."""
    parent = user_folder()
    with (parent / LOCK).open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # nobody removes a folder that is not locked yet
        _sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=parent))
        held = (path / LOCK).open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
    with held:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the folders whose owners are dead."""
    for path in parent.iterdir():
        if not path.is_dir():
            continue
        with suppress(OSError), (path / LOCK).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
