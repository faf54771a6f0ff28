"""How a rank ends before its time: one line that says why, and an honest exit code.

Threads that wait for lost peers must not hold the process back, so it ends at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from embroute.transport.interface import LostPeerError
from embroute.transport.job_store import FOLDER, attempt

TRY_AGAIN = 75  # EX_TEMPFAIL: another rank was lost, and a checkpoint is kept
OWN_ERROR = 1
BAD_INPUT, NO_FILE, IO_ERROR = 2, 73, 74  # EX_CANTCREAT, EX_IOERR
PERMANENT = (BAD_INPUT, NO_FILE)  # a restart would meet the same
_LASTING = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR")
}
NOTICE_S = 1.0  # for a lost peer to be noticed
STDERR = 2
_ending = threading.RLock()  # never released: one thread speaks, and the process ends
_said = threading.Event()


def exit_with_reason(name: str, reason: str, code: int) -> NoReturn:
    """Say why a rank ends, once, and end it."""
    _ending.acquire()
    if not _said.is_set():  # a signal may have come while this thread was ending already
        for stream in (sys.stdout, sys.stderr):
            # It may be closed, or the signal may have come while something was written to it.
            with suppress(OSError, RuntimeError, ValueError):
                stream.flush()
        with suppress(OSError):
            _say(f"{name}: {reason}")
        _said.set()
    os._exit(code)


def _say(text: str) -> None:
    """Leave the reason with the launcher, which tells the first one only, or tell it here."""
    if FOLDER in os.environ:
        folder, rank = Path(os.environ[FOLDER]), int(os.environ["RANK"])
        with suppress(OSError):
            reason_file(folder, attempt(), rank).write_text(text)
            return
    os.write(STDERR, f"embroute: {text}\n".encode())


def reason_file(folder: Path, attempt: int, rank: int) -> Path:
    """Where a rank leaves the reason of its end."""
    return folder / f"ending-{attempt}-{rank}"


def exit_code_of(error: OSError) -> int:
    """The exit code of a failure to read or write: whether a restart could help."""
    return NO_FILE if error.errno in _LASTING else IO_ERROR


def install_exit_hooks(name: str) -> None:
    """In a script: let what nobody catches, and a launcher's SIGTERM, end in one line of ours.

    A rank that loses another is not at fault: a traceback would only hide who is. Errors of the
    script itself keep theirs. A handler that the script has set stays.
    """
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, LostPeerError):
            exit_with_reason(name, f"{error}; ending", TRY_AGAIN)
        if isinstance(error, KeyboardInterrupt):
            exit_with_reason(name, "interrupted", 128 + signal.SIGINT)
        usual(kind, error, trace)
        exit_with_reason(name, "ended by the error above", OWN_ERROR)

    sys.excepthook = hook
    main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: _stopped(name, number))


def _stopped(name: str, number: int) -> None:
    """Launchers stop everyone when one rank has ended: whoever is about to miss it may say so."""
    reason = f"stopped by {signal.Signals(number).name}"
    timer = threading.Timer(NOTICE_S, exit_with_reason, (name, reason, 128 + number))
    timer.daemon = True
    timer.start()
