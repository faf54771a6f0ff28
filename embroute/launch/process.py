"""The process of a rank: its priority and memory, and its early end with a reason and an exit code.

An early end is at once: it does not wait for threads that wait for lost peers. A user's script
allows all of it with `own_process=True`; the processes of `embroute train` belong to embroute.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from embroute.config.spec import one_line
from embroute.launch.rank import COORDINATOR
from embroute.transport.interface import LostPeerError, MessageError
from embroute.transport.job_store import FOLDER, attempt

TRY_AGAIN = 75  # EX_TEMPFAIL: another rank was lost, and a checkpoint is kept
OWN_ERROR = 1  # of a script
FAULT = 70  # EX_SOFTWARE: of embroute or of a policy
BAD_INPUT, NO_FILE, IO_ERROR = 2, 73, 74  # EX_CANTCREAT, EX_IOERR
PERMANENT = (BAD_INPUT, NO_FILE)  # a restart would fail in the same way
_LASTING_ERRORS = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR")
}
NOTICE_S = 1.0  # for a rank to notice a lost peer
STDERR = 2
COORDINATOR_NICENESS = 10  # plans are made ahead, so training ranks on the same cores come first
# Parameters of glibc's mallopt, and values in bytes: the size from which freed memory returns to
# the system at once (glibc accepts no larger one), and how much free memory the heap keeps.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES = 1 << 25, 1 << 28
_ending = threading.RLock()  # never released: the first thread reports, then the process ends
_reported = threading.Event()


def exit_with_reason(name: str, reason: str, code: int) -> NoReturn:
    """Report why a rank ends, once, and end the process."""
    _ending.acquire()
    # The lock is re-entrant: a signal handler may run in the thread that is already ending.
    if not _reported.is_set():
        for stream in (sys.stdout, sys.stderr):
            # A stream may be closed, or the signal may have interrupted a write to it.
            with suppress(OSError, RuntimeError, ValueError):
                stream.flush()
        with suppress(OSError):
            report_end(f"{name}: {reason}")
        _reported.set()
    os._exit(code)


def report_end(text: str) -> None:
    """Write the reason for the launcher, which prints only the first one; else print it."""
    if FOLDER in os.environ:
        folder, rank = Path(os.environ[FOLDER]), int(os.environ["RANK"])
        with suppress(OSError):
            reason_file(folder, attempt(), rank).write_text(text)
            return
    os.write(STDERR, f"embroute: {text}\n".encode())


def reason_file(folder: Path, attempt: int, rank: int) -> Path:
    """The file into which a rank writes why it ended."""
    return folder / f"ending-{attempt}-{rank}"


def exit_code_of(error: OSError) -> int:
    """The exit code of a failed read or write; it tells the launcher if a restart could help."""
    return NO_FILE if error.errno in _LASTING_ERRORS else IO_ERROR


def install_exit_hooks(name: str) -> None:
    """In an own process: let lost peers and signals end it with one line, not a traceback.

    A rank that has lost a peer is not at fault, and its traceback would hide the rank that is.
    Errors of the script keep their traceback. A handler that the script has set stays.
    """
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, LostPeerError | MessageError):
            exit_with_reason(name, f"{error}; ending", TRY_AGAIN)
        if isinstance(error, KeyboardInterrupt):
            exit_with_reason(name, "interrupted", 128 + signal.SIGINT)
        previous_hook(kind, error, trace)
        exit_with_reason(name, error_line(error), OWN_ERROR)

    sys.excepthook = hook
    main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: _exit_soon(name, number))


def error_line(error: BaseException) -> str:
    """The last line of an error's traceback, in one line."""
    return one_line("".join(traceback.format_exception_only(error)).strip())


def _exit_soon(name: str, number: int) -> None:
    """Wait a moment, then end.

    A launcher sends SIGTERM to all ranks when one has died; a rank that loses it may then name it.
    """
    reason = f"stopped by {signal.Signals(number).name}"
    timer = threading.Timer(NOTICE_S, exit_with_reason, (name, reason, 128 + number))
    timer.daemon = True
    timer.start()


def tune_process(name: str) -> None:
    """Set the priority and the allocator of a rank's process."""
    if name == COORDINATOR:
        os.nice(COORDINATOR_NICENESS)
    keep_memory()


def keep_memory() -> bool:
    """Keep the memory that a step frees for the next step; False if the allocator is not glibc's.

    Every step needs the same memory. By default the heap returns free memory at its end once it is
    twice as large as the largest piece freed so far. Then the next step would wait for new pages, a
    thousand of them for a few megabytes of activations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    return bool(kept and mallopt(TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
