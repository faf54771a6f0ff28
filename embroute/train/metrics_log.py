"""The log of a run: a live line, a line of JSON per report, TensorBoard scalars, a summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from embroute.config.progress import StatusLines
from embroute.engine.protocol.messages import StepHeader
from embroute.kernels.array_types import I64
from embroute.report.run_folder import SUMMARY, Summary

REPORT_S, LINE_S, LIVE_S = 10.0, 3.0, 0.2
METRICS = "metrics.jsonl"
RUN_TOTALS = ("seconds", "vanilla_row_bytes")  # a restart continues these sums
REPORTS = 200  # at least so many for a run of known length, if it has so many steps


@dataclass
class ReportSpan:
    """Sums over the steps since a report."""

    steps: int = 0
    samples: int = 0
    hits: int = 0
    touches: int = 0
    loss: float = 0.0
    link_bytes: I64 = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, header: StepHeader, loss: float, link_bytes: I64) -> None:
        """Count a step."""
        self.steps += 1
        self.samples += header.global_samples
        self.hits += header.hits
        self.touches += header.touches
        self.loss += loss
        if not len(self.link_bytes):
            self.link_bytes = np.zeros(len(link_bytes), np.int64)
        self.link_bytes = self.link_bytes + link_bytes


class RunMonitor:
    """Reports of a run, by its first worker, to `folder/metrics.jsonl` and TensorBoard."""

    def __init__(self, folder: Path, total_steps: int, lines: StatusLines) -> None:
        self.total_steps, self.lines = total_steps, lines
        self.moved_bytes = self.other_bytes = 0
        self.samples = self.steps = 0
        self.began = self._reported = self._shown = self.lines.clock()
        self._last_end: float | None = None  # of the last step; None after an evaluation
        self._timed_s, self._timed_samples = 0.0, 0
        self._span, self._live = ReportSpan(), ReportSpan()
        self.folder, self.metrics = folder, dict[str, float]()
        self._loss, self._first_step = 0.0, 0
        self._before = dict.fromkeys(RUN_TOTALS, 0.0)  # totals before a restart
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None

    def _begin(self, step: int) -> None:
        """Continue the metrics of earlier steps; drop those of steps that are trained again."""
        self._first_step = step
        path = self.folder / METRICS
        kept = [line for line in _entries(path) if _number(line, "step") <= step]
        for name in RUN_TOTALS:
            self._before[name] = max((_number(line, name) for line in kept), default=0.0)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
        partial.replace(path)  # a crash leaves the old file or the new one, never half of one
        self._file = path.open("a", encoding="utf-8")
        # TensorBoard hides the events of later steps, which are trained again.
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)

    def step(self, header: StepHeader, loss: float, figures: I64) -> None:
        """Count a step; update the live line or write a report when it is time."""
        step, samples = header.step, header.global_samples
        if self._file is None:
            self._begin(step)
        for span in (self._span, self._live):
            span.add(header, loss, figures[:-2])
        self.drained(figures)
        self.samples += samples
        self.steps += 1
        now = self.lines.clock()
        if self._last_end is not None:
            self._timed_s += now - self._last_end
            self._timed_samples += samples
        self._last_end = now
        last = step + 1 == self.total_steps and not self.lines.live
        if last or now - self._shown >= (LIVE_S if self.lines.live else LINE_S):
            self.lines.show(self._line(step, self._live, max(1e-9, now - self._shown)))
            self._live, self._shown = ReportSpan(), now
        total = f" of {self.total_steps}" if self.total_steps else ""
        done = f"step {step + 1}{total}; waiting for the next"
        self.lines.begin(done)
        due = step + 1 == self.total_steps or now - self._reported >= REPORT_S
        if due or (self.total_steps and self._span.steps * REPORTS >= self.total_steps):
            self._report(step, now)

    def drained(self, figures: I64) -> None:
        """Count the row bytes of this policy and of vanilla, which follow those of the links.

        The first figures after a resume include all row bytes of this policy before it.
        """
        moved_bytes, other_bytes = figures[-2:].tolist()
        self.moved_bytes += moved_bytes
        self.other_bytes += other_bytes

    def _line(self, step: int, span: ReportSpan, seconds: float) -> str:
        """The live line, cut where many links make it too long for a terminal."""
        total = f"/{self.total_steps}" if self.total_steps else ""
        links = " ".join(f"{n / seconds / 1e6:.1f}" for n in span.link_bytes)
        text = (
            f"step {step + 1}{total}  {span.samples / seconds:,.0f} samples/s  "
            f"loss {span.loss / span.steps:.4f}  hits {_percent(span.hits, span.touches)}  "
            f"{self._left(step, span.steps / seconds)}MB/s {links}"
        )
        return text[:100]

    def _left(self, step: int, steps_s: float) -> str:
        """The time until the last step, if it is known."""
        if step + 1 >= self.total_steps:
            return ""
        return f"left {timedelta(seconds=round((self.total_steps - step - 1) / steps_s))}  "

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
            "row_bytes": self.moved_bytes,
            "vanilla_row_bytes": self._vanilla_bytes,
        }
        self._write(report)
        self._scalars({name: report[name] for name in ("loss", "samples_per_s", "hit_rate")}, step)
        self._span, self._reported, self._loss = ReportSpan(), now, span.loss / span.steps

    def _seconds(self, now: float) -> float:
        """Seconds of training, without the time between a crash and the restart."""
        return round(self._before["seconds"] + now - self.began, 3)

    @property
    def _vanilla_bytes(self) -> int:
        return int(self._before["vanilla_row_bytes"]) + self.other_bytes

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
        self.metrics, self._last_end = metrics, None
        seconds = self._seconds(self.lines.clock())
        self._write({"step": step, "seconds": seconds, "row_bytes": self.moved_bytes, **metrics})
        self._scalars(metrics, step - 1)
        text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.lines.print(f"step {step}  {text}")

    def _speed(self) -> float:
        """Samples per second, without the first step, which compiles, and without evaluations."""
        if self._timed_samples:
            return self._timed_samples / max(1e-9, self._timed_s)
        return self.samples / max(1e-9, self.lines.clock() - self.began)

    def idle(self) -> None:
        """Report a run without steps."""
        self.lines.print("nothing to train: the checkpoint is at the end of the run")
        self._close()

    def close(self, step: int, policy: str, seconds: dict[str, float]) -> None:
        """Write the last report and the summary. `seconds`: this worker's time by phase."""
        self._report(step, self.lines.clock())
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        summary = Summary(
            policy,
            step + 1,
            self.samples,
            self._speed(),
            self._loss,
            self.metrics,
            self.moved_bytes,
            self._vanilla_bytes,
            rounded,
            self._first_step,
        )
        (self.folder / SUMMARY).write_text(json.dumps(asdict(summary), indent=2) + "\n")
        self.lines.print(summary.text())
        self._close()


def _entries(path: Path) -> list[dict[str, object]]:
    """The lines of a metrics file, without a line that a crash cut off."""
    entries = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def _number(entry: Mapping[str, object], name: str) -> float:
    value = entry.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _percent(count: int, total: int) -> str:
    return f"{100 * count / max(1, total):.0f} %"
