"""One job per folder: an exclusive lock that names its holder and ends with a crash.

The kernel releases a file lock when its process ends, also on most network file systems. Some file
systems keep such locks within one machine. For them the lock is also a lease: the holder renews it
every few seconds, and another machine takes it over only after the renewals stop.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

LOCK_FILE = "embroute.lock"
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # a link, a folder, a socket or a pipe
RECORD_BYTES = 512  # a fixed size: one pwrite replaces the record, and readers see a whole one
RENEWAL_S = 2.0
LEASE_S = 10.0  # after so long without a renewal, a holder on another machine counts as dead


@dataclass(frozen=True)
class Holder:
    """The job that holds a folder."""

    host: str
    machine: str  # where a process number means the same process; see `_machine`
    pid: int
    run_id: str
    beat: int = 0  # renewals so far; the name is part of the file format

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.pid} on {self.host})"


def _machine() -> str:
    """One boot of one machine, and one namespace of process numbers in it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


class FolderLock:
    """Holds a folder for one job while the context is open; refused if another job has it."""

    def __init__(self, option: str, folder: Path, run_id: str) -> None:
        self._option, self.folder, self._path = option, folder, folder / LOCK_FILE
        self.holder = Holder(socket.gethostname(), _machine(), os.getpid(), run_id)
        self._kernel_locks = True  # whether the file system supports flock
        self._write_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)

    def __enter__(self) -> Self:
        self._file = self._open()
        try:
            self._wait_out_lease()
            self._write(self.holder)
        except BaseException:
            os.close(self._file)
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._read() == self.holder:
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def check(self) -> None:
        """Refuse to write if another job has taken the folder over."""
        with self._write_lock:
            other = self._read()
        if other is None or other.run_id != self.holder.run_id:
            raise ValueError(
                f"{self.folder}: {other or 'nobody'} holds this folder now; this job was paused "
                f"for more than {LEASE_S:.0f} s and must not write to it any more"
            )

    def _open(self) -> int:
        """The lock's file, locked."""
        while True:
            file = self._open_file()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise self._refusal(self._read()) from None
            except OSError:
                self._kernel_locks = False
            # The last holder may have deleted the file between our open and our lock. A lock on a
            # deleted file protects nothing: try again with the file that now has the name.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(self._path)):
                    return file
            os.close(file)

    def _open_file(self) -> int:
        """The lock's file. A link or a pipe in its place is refused, not followed or waited for."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(self._path, flags, 0o644)
        except OSError as error:
            if isinstance(error, PermissionError) or error.errno not in _NO_FILE:
                raise
            raise self._not_a_file() from None
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise self._not_a_file()

    def _not_a_file(self) -> ValueError:
        return ValueError(
            f"{self._option} {self.folder}: {LOCK_FILE} in it must be a regular file; remove it"
        )

    def _refusal(self, other: Holder | None) -> ValueError:
        return ValueError(
            f"{self._option} {self.folder}: {other or 'another job'} uses this folder; wait for "
            f"its end, or choose another folder"
        )

    def _wait_out_lease(self) -> None:
        """Refuse a lock whose holder still renews its lease."""
        other = self._read()
        if other is None:
            return
        if other.machine == self.holder.machine:
            # Here the process itself can be asked: no need to wait for the lease to end.
            if not self._kernel_locks and _alive(other.pid):
                raise self._refusal(other)
            return
        deadline = time.monotonic() + LEASE_S
        while time.monotonic() < deadline:
            time.sleep(RENEWAL_S / 4)
            current = self._read()
            if current is not None and current != other:
                raise self._refusal(current)

    def _read(self) -> Holder | None:
        try:
            return Holder(**json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _write(self, holder: Holder) -> None:
        text = json.dumps(asdict(holder)).ljust(RECORD_BYTES).encode()
        with self._write_lock:
            os.pwrite(self._file, text, 0)
            self.holder = holder

    def _renew(self) -> None:
        while not self._stop.wait(RENEWAL_S):
            current = self._read()
            if current is not None and current.run_id != self.holder.run_id:
                return  # another job took the folder over: `check` reports it
            with suppress(OSError):
                self._write(replace(self.holder, beat=self.holder.beat + 1))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
