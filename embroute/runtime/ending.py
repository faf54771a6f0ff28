"""How a rank ends before its time: one line that says why, and an honest exit code.

Threads that wait for lost peers must not hold the process back, so it ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from embroute.runtime.exchange import LostPeerError

TRY_AGAIN = 75  # EX_TEMPFAIL: another rank was lost, and a checkpoint is kept
OWN_ERROR = 1
NOTICE_S = 1.0  # for a lost peer to be noticed
STDERR = 2
_ending = threading.RLock()  # never released: one thread speaks, and the process ends
_said = threading.Event()


def end(name: str, reason: str, code: int) -> NoReturn:
    """Say why a rank ends, once, and end it."""
    _ending.acquire()
    if not _said.is_set():  # a signal may have come while this thread was ending already
        for stream in (sys.stdout, sys.stderr):
            # It may be closed, or the signal may have come while something was written to it.
            with suppress(OSError, RuntimeError, ValueError):
                stream.flush()
        with suppress(OSError):
            os.write(STDERR, f"embroute: {name}: {reason}\n".encode())
        _said.set()
    os._exit(code)


def end_clearly(name: str) -> None:
    """In a script: let what nobody catches, and a launcher's SIGTERM, end in one line of ours.

    A rank that loses another is not at fault: a traceback would only hide who is. Errors of the
    script itself keep theirs. A handler that the script has set stays.
    """
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, LostPeerError):
            end(name, f"{error}; ending", TRY_AGAIN)
        if isinstance(error, KeyboardInterrupt):
            end(name, "interrupted", 128 + signal.SIGINT)
        usual(kind, error, trace)
        end(name, "ended by the error above", OWN_ERROR)

    sys.excepthook = hook
    main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: _stopped(name, number))


def _stopped(name: str, number: int) -> None:
    """Launchers stop everyone when one rank has ended: whoever is about to miss it may say so."""
    reason = f"stopped by {signal.Signals(number).name}"
    timer = threading.Timer(NOTICE_S, end, (name, reason, 128 + number))
    timer.daemon = True
    timer.start()
