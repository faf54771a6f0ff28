"""Reports of a running job: live line, JSON lines, TensorBoard, and summary."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embroute.config.progress import StatusLines
from embroute.engine.protocol.messages import StepHeader
from embroute.report.run_folder import SUMMARY
from embroute.train.metrics_log import RunMonitor

BATCH = 100


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that a test moves by hand, and the lines that go by it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def lines(self, terminal: io.StringIO) -> StatusLines:
        return StatusLines(terminal, lambda: self.now)


def train(eyes: RunMonitor, clock: Clock, first: int, seconds: list[float]) -> None:
    """Record steps of the given seconds; each moves 5 MB and 1 MB over two links, vanilla twice
    as much."""
    for step, spent in enumerate(seconds, first):
        clock.now += spent
        figures = np.array([5_000_000, 1_000_000, 6_000_000, 12_000_000])
        eyes.step(StepHeader(step, BATCH, BATCH, hits=3, touches=4), 0.5, figures)


def test_reported_speed_excludes_compilation_and_evaluations(tmp_path: Path) -> None:
    clock, terminal = Clock(), Terminal()
    eyes = RunMonitor(tmp_path, 6, clock.lines(terminal))
    train(eyes, clock, 0, [30.0, 0.5, 0.5])
    clock.now += 7.0
    eyes.evaluated(3, {"auc": 0.75})
    train(eyes, clock, 3, [4.0, 0.5, 0.5])
    eyes.close(5, "vanilla", {})
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert summary["samples_per_s"] == pytest.approx(4 * BATCH / 2.0)
    assert summary["samples"] == 6 * BATCH
    assert "6 steps, 200 samples/s" in terminal.getvalue()


def test_run_of_one_step_reports_a_speed(tmp_path: Path) -> None:
    clock = Clock()
    eyes = RunMonitor(tmp_path, 1, clock.lines(Terminal()))
    train(eyes, clock, 0, [2.0])
    eyes.close(0, "vanilla", {})
    assert json.loads((tmp_path / SUMMARY).read_text())["samples_per_s"] == BATCH / 2.0


def test_live_line_shows_speed_loss_hits_and_links(tmp_path: Path) -> None:
    clock, terminal = Clock(), Terminal()
    eyes = RunMonitor(tmp_path, 10, clock.lines(terminal))
    train(eyes, clock, 0, [2.0])
    line = "step 1/10  50 samples/s  loss 0.5000  hits 75 %  left 0:00:18  MB/s 2.5 0.5"
    assert line in terminal.getvalue()
    eyes.close(0, "vanilla", {})


def test_piped_run_prints_a_line_at_least_every_five_seconds(tmp_path: Path) -> None:
    """Slow and fast steps, by a clock: a thread polls twice a second."""
    clock, pipe = Clock(), io.StringIO()
    lines = clock.lines(pipe)
    lines.begin("reading data")
    written = []
    eyes = RunMonitor(tmp_path, 100, lines)
    for seconds in [29.0, *[0.5] * 40, 17.0, *[1.5] * 20]:
        for _ in range(int(2 * seconds)):
            clock.now += 0.5
            lines.poll()
            written.append((clock.now, pipe.tell()))
        train(eyes, clock, eyes.steps, [0.0])
        written.append((clock.now, pipe.tell()))
    times = [
        now for (now, size), (_, before) in zip(written[1:], written, strict=False) if size > before
    ]
    gaps = [b - a for a, b in zip([1000.0, *times], times, strict=False)]
    assert 2 < max(gaps) <= 5
    text = pipe.getvalue().splitlines()
    assert text[0] == "reading data (3 s)"
    assert any(line.startswith("step 41 of 100; waiting for the next (") for line in text)
    assert any(
        re.match(r"step \d+/100  .* samples/s  loss 0.5000 .* left 0:0\d:\d\d", t) for t in text
    )
    eyes.close(61, "vanilla", {})


def test_metrics_are_written_to_tensorboard_and_json_lines(tmp_path: Path) -> None:
    clock = Clock()
    eyes = RunMonitor(tmp_path, 2, clock.lines(Terminal()))
    train(eyes, clock, 0, [1.0, 1.0])
    eyes.evaluated(2, {"auc": 0.75, "log_loss": 0.25})
    eyes.close(1, "vanilla", {})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = {"loss": 0.5, "hit_rate": 0.75, "samples_per_s": 100.0, "auc": 0.75}
    for name, value in expected.items():
        found = events.Scalars(name)
        assert found[-1].value == pytest.approx(value), name
        assert found[-1].step == 2
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert lines[1]["row_bytes"] * 2 == lines[1]["vanilla_row_bytes"] == 24_000_000
    assert lines[2]["auc"] == 0.75


def test_run_without_steps_says_nothing_to_train(tmp_path: Path) -> None:
    terminal = Terminal()
    RunMonitor(tmp_path, 5, Clock().lines(terminal)).idle()
    assert "nothing to train" in terminal.getvalue()
    assert not (tmp_path / SUMMARY).exists()


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def _wait_for_the_next_second() -> None:
    """TensorBoard reads its files in the order of their names, which begin with a second."""
    time.sleep(1.01 - time.time() % 1)


def test_resumed_run_continues_steps_clock_and_bytes(tmp_path: Path) -> None:
    clock = Clock()
    eyes = RunMonitor(tmp_path, 10, clock.lines(Terminal()))
    train(eyes, clock, 0, [1.0] * 6)
    eyes._close()  # killed: steps after the checkpoint at step 4 are to come again
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "sec')
    clock.now += 1000
    _wait_for_the_next_second()
    terminal = Terminal()
    again = RunMonitor(tmp_path, 10, clock.lines(terminal))
    again.drained(np.array([0, 0, 4 * 6_000_000, 0]))  # the row bytes that the checkpoint holds
    train(again, clock, 4, [1.0] * 6)
    again.close(9, "vanilla", {})
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["seconds"] for line in lines] == [float(step) for step in range(1, 11)]
    assert [line["row_bytes"] for line in lines] == [6_000_000 * step for step in range(1, 11)]
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert summary["resumed_at"] == 4
    assert 2 * summary["row_bytes"] == summary["vanilla_row_bytes"] == 120_000_000
    *_, speed, moved = terminal.getvalue().splitlines()
    assert "10 steps, 100 samples/s since the resume at step 4" in speed
    assert moved.endswith("60.0 MB with vanilla, about 50 % of the 120.0 MB that vanilla would")
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [scalar.step for scalar in board.Scalars("loss")] == list(range(1, 11))


def test_new_run_in_a_folder_replaces_its_metrics(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(2):
        eyes = RunMonitor(tmp_path, 3, clock.lines(Terminal()))
        train(eyes, clock, 0, [1.0] * 3)
        eyes.close(2, "vanilla", {})
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["seconds"] for line in lines] == [1.0, 2.0, 3.0]
