"""Progress on stderr: a bar on a terminal or in a notebook; elsewhere lines, from commands."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

COUNTED = (MofNCompleteColumn(), TimeElapsedColumn())
PERCENT = (TaskProgressColumn(),)
REDRAW_S = 0.1
SILENCE_S = 3.0  # between two lines, at most; on a terminal a line changes every second
LINE_POLL_S = 0.5
Mode = Literal["bars", "lines", "none"]
_mode: ContextVar[Mode] = ContextVar("progress", default="bars")


@contextmanager
def progress_mode(mode: Mode) -> Iterator[None]:
    """Bars on terminals only, lines elsewhere too, or no progress at all."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def is_quiet() -> bool:
    """Whether progress and tables are not wanted."""
    return _mode.get() == "none"


class StatusLines:
    """Says what goes on, on a stream where nothing else has been written for a while."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock, self.live = stream, clock, stream.isatty()
        self._describe: Callable[[float], str] = lambda seconds: ""
        self._began = self._written = clock()

    def begin(self, activity: str) -> None:
        """What goes on from now on."""
        self.begin_measured(lambda seconds: f"{activity} ({seconds:.0f} s)")

    def begin_measured(self, describe: Callable[[float], str]) -> None:
        """What goes on from now on, as a function of the seconds since now."""
        self._describe, self._began = describe, self.clock()

    def print(self, line: str) -> None:
        """Write a line in place of what a terminal shows."""
        self._write(f"\r\x1b[K{line}\n" if self.live else f"{line}\n")

    def show(self, line: str) -> None:
        """Write a line that the next one replaces on a terminal."""
        self._write(f"\r{line}\x1b[K" if self.live else f"{line}\n")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
        self._written = self.clock()

    def clear(self) -> None:
        """Remove what a terminal shows, for the lines of others."""
        if self.live:
            self._write("\r\x1b[K")

    def poll(self) -> None:
        """Write a line if it is time."""
        now = self.clock()
        if now - self._written >= (1.0 if self.live else SILENCE_S):
            line = self._describe(now - self._began)
            if line:
                self.show(line)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Poll in a thread."""
        over = threading.Event()

        def work() -> None:
            while not over.wait(LINE_POLL_S):
                self.poll()

        thread = threading.Thread(target=work, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def progress_bar(
    activity: str, total: float | None, counted: bool
) -> Iterator[Callable[..., None]]:
    """A bar of counts, or of a share from 0 to 1. Its updates are those of `rich.Progress`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:.40}"),
        BarColumn(),
        *(COUNTED if counted else PERCENT),
    )
    # Not console.is_terminal: a notebook sets FORCE_COLOR for the commands that it runs.
    hidden = not (sys.stderr.isatty() or console.is_jupyter) or is_quiet()
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        progress.add_task(activity, total=total)
        (task,) = progress.tasks
        with _cell_output(progress) if console.is_jupyter else nullcontext(_nothing) as redraw:

            def update(**changes: object) -> None:
                progress.update(task.id, **changes)  # type: ignore[arg-type]
                redraw()

            with _status_of(task, counted) if hidden else nullcontext():
                yield update


@contextmanager
def _status_of(task: Task, counted: bool) -> Iterator[None]:
    """Lines about a task where a command has no terminal for a bar."""
    if _mode.get() != "lines":
        yield
        return
    lines = StatusLines(sys.stderr)
    lines.begin_measured(
        lambda seconds: status_line(task.description, task.completed, task.total, seconds, counted)
    )
    with lines.running():
        yield


def _nothing() -> None:
    """A terminal is redrawn by rich."""


@contextmanager
def _cell_output(progress: Progress) -> Iterator[Callable[[], None]]:
    """The bar as output of a notebook's cell. rich itself would need ipywidgets for it."""
    from IPython.display import HTML, display

    handle, drawn_s = display(progress, display_id=True), time.monotonic()

    def redraw() -> None:
        nonlocal drawn_s
        if time.monotonic() - drawn_s >= REDRAW_S:
            handle.update(progress)
            drawn_s = time.monotonic()

    try:
        yield redraw
    finally:
        handle.update(HTML(""))


def status_line(
    activity: str, done: float, total: float | None, seconds: float, counted: bool
) -> str:
    """An activity, how much of it is done, for how long it has run, and for how long it will."""
    if counted:
        share = f" {done:,.0f}" + (f" of {total:,.0f}" if total else "") if done else ""
    else:
        share = f" {done:.0%}" if done else ""
    left = f", {seconds * (total - done) / done:.0f} s left" if total and done else ""
    return f"{activity}{share} ({seconds:.0f} s{left})"
