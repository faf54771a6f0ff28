"""Progress of long work: a line at least every five seconds, and none with --quiet."""

from __future__ import annotations

import io
import threading

import pytest

from embroute.config import progress
from embroute.config.progress import StatusLines, is_quiet, progress_bar, progress_mode, status_line


class Stream(io.StringIO):
    def __init__(self, live: bool = False) -> None:
        super().__init__()
        self.live = live

    def isatty(self) -> bool:
        return self.live


def watched(lines: StatusLines, now: list[float], seconds: int) -> None:
    for _ in range(2 * seconds):
        now[0] += 0.5
        lines.poll()


def test_a_line_comes_at_least_every_five_seconds() -> None:
    now, stream = [0.0], Stream()
    lines = StatusLines(stream, lambda: now[0])
    lines.begin("reading data")
    watched(lines, now, 29)
    assert stream.getvalue().splitlines() == [f"reading data ({s} s)" for s in range(3, 30, 3)]


def test_a_written_line_postpones_the_next_one() -> None:
    now, stream = [0.0], Stream()
    lines = StatusLines(stream, lambda: now[0])
    lines.begin("waiting")
    for _ in range(5):
        watched(lines, now, 2)
        lines.print("step")
    assert stream.getvalue() == "step\n" * 5


def test_a_terminal_shows_one_line_that_changes() -> None:
    now, stream = [0.0], Stream(live=True)
    lines = StatusLines(stream, lambda: now[0])
    lines.begin("reading data")
    watched(lines, now, 2)
    lines.print("done")
    first, second, last = stream.getvalue().split("\r")[1:]
    assert (first, second) == ("reading data (1 s)\x1b[K", "reading data (2 s)\x1b[K")
    assert last == "\x1b[Kdone\n"


def test_status_line_has_share_and_time_left() -> None:
    assert status_line("reading", 0.25, 1.0, 3, counted=False) == "reading 25% (3 s, 9 s left)"
    assert status_line("esd(1)", 30, 90, 5, counted=True) == "esd(1) 30 of 90 (5 s, 10 s left)"
    assert status_line("scoring", 0, None, 5, counted=True) == "scoring (5 s)"


@pytest.mark.parametrize(("mode", "lines"), [("lines", True), ("none", False), ("bars", False)])
def test_bars_become_lines_in_commands_only(
    mode: progress.Mode,
    lines: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_POLL_S", 0.001)
    written = threading.Event()

    def describe(*_: object) -> str:
        written.set()
        return "esd(1)"

    monkeypatch.setattr(progress, "status_line", describe)
    with progress_mode(mode), progress_bar("esd(1)", 9, counted=True) as update:
        assert is_quiet() == (mode == "none")
        update(advance=3)
        assert written.wait(20 if lines else 0.05) == lines
    assert capsys.readouterr().err.startswith("esd(1)\n") == lines


def test_no_bar_where_colours_are_forced_but_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook sets FORCE_COLOR for the commands that it runs."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("reading", 2, counted=True) as update:
        update(advance=1)
    assert capsys.readouterr().err == ""
