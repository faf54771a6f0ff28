"""Watching a run: a live line, a line of JSON per report, TensorBoard scalars, a summary."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from embroute.kernels.array_types import I64
from embroute.report.run_folder import SUMMARY, Summary

REPORT_S, LIVE_S = 10.0, 0.2
METRICS = "metrics.jsonl"
CARRIED = ("seconds", "row_bytes", "vanilla_row_bytes")  # sums of a run, over its restarts
REPORTS = 200  # of a run whose length is known, though seldom more than one in REPORT_S


@dataclass
class ReportSpan:
    """What happened since the last report."""

    steps: int = 0
    samples: int = 0
    hits: int = 0
    touches: int = 0
    loss: float = 0.0
    link_bytes: I64 = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, samples: int, hits: tuple[int, int], loss: float, link_bytes: I64) -> None:
        """Count a step."""
        self.steps += 1
        self.samples += samples
        self.hits += hits[0]
        self.touches += hits[1]
        self.loss += loss
        if not len(self.link_bytes):
            self.link_bytes = np.zeros(len(link_bytes), np.int64)
        self.link_bytes = self.link_bytes + link_bytes


class RunMonitor:
    """The first worker's eyes on a run. Reports go to `folder/metrics.jsonl` and TensorBoard."""

    def __init__(self, folder: Path, total_steps: int, terminal: TextIO = sys.stderr) -> None:
        self.total_steps, self.terminal = total_steps, terminal
        self.moved_bytes = self.other_bytes = 0
        self.samples = self.steps = 0
        self.began = self._reported = self._shown = self._told = time.monotonic()
        self._last: float | None = None  # when the step before ended, if this one followed at once
        self._timed_s, self._timed_samples = 0.0, 0
        self._span, self._live = ReportSpan(), ReportSpan()
        self.folder, self.metrics = folder, dict[str, float]()
        self._loss = 0.0
        self._before = dict.fromkeys(CARRIED, 0.0)  # what the lines that are kept came to
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None

    def _begin(self, step: int) -> None:
        """Go on with the metrics of a run before its step; those of later steps are void."""
        path = self.folder / METRICS
        kept = [line for line in _entries(path) if _number(line, "step") <= step]
        for name in CARRIED:
            self._before[name] = max((_number(line, name) for line in kept), default=0.0)
        part = path.with_name(f"{path.name}.partial")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
        part.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)

    def step(
        self, step: int, samples: int, hits: tuple[int, int], loss: float, figures: I64
    ) -> None:
        """Take a step in; show or report it when it is time."""
        if self._file is None:
            self._begin(step)
        *link_bytes, moved, other = figures.tolist()
        for span in (self._span, self._live):
            span.add(samples, hits, loss, np.array(link_bytes, np.int64))
        self.moved_bytes += moved
        self.other_bytes += other
        self.samples += samples
        self.steps += 1
        now = time.monotonic()
        if self._last is not None:
            self._timed_s += now - self._last
            self._timed_samples += samples
        self._last = now
        if now - self._shown >= LIVE_S and self.terminal.isatty():
            self.terminal.write("\r" + self._line(step, self._live, now - self._shown) + "\x1b[K")
            self.terminal.flush()
            self._live, self._shown = ReportSpan(), now
        due = step + 1 == self.total_steps or now - self._reported >= REPORT_S
        if due or (self.total_steps and self._span.steps * REPORTS >= self.total_steps):
            self._report(step, now)

    def drained(self, figures: I64) -> None:
        """Take in what moved after the last step."""
        *_, moved, other = figures.tolist()
        self.moved_bytes += moved
        self.other_bytes += other

    def _line(self, step: int, span: ReportSpan, seconds: float) -> str:
        """The live line; 80 columns hold it with a few links, more are cut."""
        total = f"/{self.total_steps}" if self.total_steps else ""
        links = " ".join(f"{n / seconds / 1e6:.1f}" for n in span.link_bytes)
        text = (
            f"step {step + 1}{total}  {span.samples / seconds:,.0f} samples/s  "
            f"loss {span.loss / span.steps:.4f}  hits {_share(span.hits, span.touches)}  "
            f"MB/s {links}"
        )
        return text[:100]

    def _report(self, step: int, now: float) -> None:
        span, seconds = self._span, max(1e-9, now - self._reported)
        if not span.steps:
            return
        report = {
            "step": step + 1,
            "seconds": self._seconds(now),
            "loss": span.loss / span.steps,
            "samples_per_s": span.samples / seconds,
            "hit_rate": span.hits / max(1, span.touches),
            "link_mb_per_s": [round(n / seconds / 1e6, 3) for n in span.link_bytes.tolist()],
            "row_bytes": self._row_bytes,
            "vanilla_row_bytes": int(self._before["vanilla_row_bytes"]) + self.other_bytes,
        }
        self._write(report)
        self._scalars({name: report[name] for name in ("loss", "samples_per_s", "hit_rate")}, step)
        last = step + 1 == self.total_steps
        if not self.terminal.isatty() and (last or now - self._told >= REPORT_S):
            self.terminal.write(self._line(step, self._live, max(1e-9, now - self._told)) + "\n")
            self.terminal.flush()
            self._live, self._told = ReportSpan(), now
        self._span, self._reported, self._loss = ReportSpan(), now, span.loss / span.steps

    def _seconds(self, now: float) -> float:
        """Since the run began, without the time between its parts."""
        return round(self._before["seconds"] + now - self.began, 3)

    @property
    def _row_bytes(self) -> int:
        return int(self._before["row_bytes"]) + self.moved_bytes

    def _write(self, entry: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()

    def _scalars(self, values: Mapping[str, object], step: int) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step + 1)

    def _close(self) -> None:
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation."""
        self.metrics, self._last = metrics, None
        spent = self._seconds(time.monotonic())
        self._write({"step": step, "seconds": spent, "row_bytes": self._row_bytes, **metrics})
        self._scalars(metrics, step - 1)
        text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        clear = "\r\x1b[K" if self.terminal.isatty() else ""
        self.terminal.write(f"{clear}step {step}  {text}\n")
        self.terminal.flush()

    def _speed(self) -> float:
        """Samples a second, without the first step, which compiles, and without evaluations."""
        if self._timed_samples:
            return self._timed_samples / max(1e-9, self._timed_s)
        return self.samples / max(1e-9, time.monotonic() - self.began)

    def idle(self) -> None:
        """Say that there was nothing to train."""
        self.terminal.write("nothing to train: the checkpoint is at the end of the run\n")
        self.terminal.flush()
        self._close()

    def close(self, step: int, policy: str, seconds: dict[str, float]) -> None:
        """Write what is left, and the summary. `seconds`: where this worker's time went."""
        self._report(step, time.monotonic())
        summary = Summary(
            policy,
            step + 1,
            self.samples,
            self._speed(),
            self._loss,
            self.metrics,
            self.moved_bytes,
            self.other_bytes,
            {name: round(value, 3) for name, value in seconds.items()},
        )
        (self.folder / SUMMARY).write_text(json.dumps(asdict(summary), indent=2) + "\n")
        clear = "\r\x1b[K" if self.terminal.isatty() else ""
        self.terminal.write(clear + summary.text() + "\n")
        self.terminal.flush()
        self._close()


def _entries(path: Path) -> list[dict[str, object]]:
    """Lines of metrics; a line that a crash cut off is none."""
    entries = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def _number(entry: Mapping[str, object], name: str) -> float:
    value = entry.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.0f} %"
