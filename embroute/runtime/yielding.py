"""Work that is done ahead of its need, so that everyone else on the same cores may come first.

A thread of the system's idle class is put aside at once when another has something to do; one that
is merely nice is let finish its slice, while a message waits. But where other programs keep all
cores busy, the idle class hardly runs at all.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from embroute.runtime.inbox import Handover, background

T = TypeVar("T")
LONG_S = 0.2  # a piece of work that took less is in nobody's way
STARVED = 16  # times the processor time that a piece of work took


class Starving:
    """Whether a thread still gets to run: compares the time that work takes with the processor's.

    Once it does not, it stays so.
    """

    def __init__(self) -> None:
        self.found = False
        self._before_s = time.thread_time()

    def took(self, seconds: float) -> None:
        """A piece of work took so long; since the last one this thread did that work, or more."""
        now_s = time.thread_time()
        worked_s, self._before_s = now_s - self._before_s, now_s
        self.found = self.found or seconds > max(LONG_S, STARVED * worked_s)


class Ask(Protocol):
    """Lets the thread that waits for the work do a piece of it, in its own class."""

    def __call__(self, task: Callable[[], T], /) -> T:
        """What the task returns, or raises."""
        ...


def run_yielding(work: Callable[[Ask], None]) -> None:
    """Do work on a thread of the idle class and wait for its end; raises what it raises.

    Threads and processes are of the class of the thread that starts them.
    """
    asked: Handover[Callable[[], None] | None] = Handover()

    def ask(task: Callable[[], T], /) -> T:
        answer: Handover[T] = Handover()

        def do() -> None:
            try:
                answer.put(task())
            except BaseException as error:
                answer.fail(error)

        asked.put(do)
        return answer.get()

    def yielding() -> None:
        _yield()
        work(ask)
        asked.put(None)

    background("yielding", yielding, asked)
    while (task := asked.get()) is not None:
        task()


def _yield() -> None:
    """Put this thread into the idle class where the system has one."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
