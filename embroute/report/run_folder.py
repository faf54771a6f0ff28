"""Read a run's folder: its summary, reports, evaluations, and the time of each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

SUMMARY, METRICS_NAME, RANKS = "summary.json", "metrics.jsonl", "ranks"


@dataclass(frozen=True)
class Summary:
    """The results of a run: `summary.json` in its folder."""

    policy: str
    steps: int
    samples: int
    samples_per_s: float
    loss: float  # mean of the last report
    metrics: dict[str, float]  # of the last evaluation
    row_bytes: int  # since the run began, also before a resume
    vanilla_row_bytes: int  # that vanilla would have moved; its caches are empty after a resume
    seconds: dict[str, float]
    resumed_at: int = 0  # the step; `samples`, `samples_per_s` and `seconds` count from it

    def text(self) -> str:
        """Two lines of text."""
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        since = f" since the resume at step {self.resumed_at}" if self.resumed_at else ""
        speed = f"{self.steps} steps, {self.samples_per_s:,.0f} samples/s{since}  {metrics}"
        moved = f"rows moved: {self.row_bytes / 1e6:.1f} MB with {self.policy}"
        if self.vanilla_row_bytes:
            share = 100 * self.row_bytes / self.vanilla_row_bytes
            about = "about " if self.resumed_at else ""
            moved += (
                f", {about}{share:.0f} % of the {self.vanilla_row_bytes / 1e6:.1f} MB that "
                f"vanilla would"
            )
        return f"{speed}\n{moved}"


def read_summary(folder: Path) -> Summary:
    """The summary of a run's folder."""
    path = folder / SUMMARY
    if not path.is_file():
        raise ValueError(f"{folder}: no {SUMMARY} here; a run writes it when it ends")
    try:
        return Summary(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError):
        raise ValueError(f"{path}: not a summary as this version writes it") from None


@dataclass(frozen=True)
class MetricsLine:
    """One line of metrics: the steps since the line before."""

    step: int
    seconds: float
    loss: float
    samples_per_s: float
    hit_rate: float
    link_mb_per_s: list[float]
    row_bytes: int
    vanilla_row_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """The held-out samples after some steps."""

    step: int
    seconds: float
    row_bytes: int
    log_loss: float
    auc: float


@dataclass(frozen=True)
class RunHistory:
    """All data of a run's report."""

    name: str
    summary: Summary
    reports: list[MetricsLine]
    evaluations: list[Evaluation]
    seconds: dict[str, dict[str, float]]  # by rank and phase
    spans: dict[str, list[tuple[str, int, float, float]]]  # by rank: phase, step, began, seconds

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def read_history(folder: Path, name: str) -> RunHistory:
    """Read a run's folder."""
    reports: list[MetricsLine] = []
    evaluations: list[Evaluation] = []
    path = folder / METRICS_NAME
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    for number, text in enumerate(lines, 1):
        try:
            entry = json.loads(text)
            if "loss" in entry:
                reports.append(MetricsLine(**entry))
            else:
                evaluations.append(Evaluation(**entry))
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path}, line {number}: not metrics as this version writes them"
            ) from None
    ranks = _ranks(folder)
    seconds = {rank: dict(record["seconds"]) for rank, record in ranks.items()}
    spans = {
        rank: [tuple(span) for span in record.get("spans", [])] for rank, record in ranks.items()
    }
    return RunHistory(name, read_summary(folder), reports, evaluations, seconds, spans)


def _ranks(folder: Path) -> dict[str, dict[str, Any]]:
    """The record that each rank wrote about itself."""
    records = {}
    for path in sorted((folder / RANKS).glob("*.json")):
        try:
            records[path.stem] = json.loads(path.read_text("utf-8"))
            dict(records[path.stem]["seconds"])  # a record without them is damaged
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}: not what this version writes of a rank") from None
    return records


SUMMARY_COLUMNS = ("policy", "steps", "samples\n/s", "log-\nloss", "AUC", "rows\nMB", "of\nvanilla")


def runs_table(runs: Mapping[str, Summary]) -> Table:
    """Runs side by side: speed, quality, rows moved."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in SUMMARY_COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", overflow="fold")
    for name, run in runs.items():
        quality = (run.metrics.get(key) for key in ("log_loss", "auc"))
        share = f"{run.row_bytes / run.vanilla_row_bytes:.2f}" if run.vanilla_row_bytes else ""
        table.add_row(
            escape(name),
            escape(run.policy),
            str(run.steps),
            f"{run.samples_per_s:,.0f}",
            *("" if value is None else f"{value:.4f}" for value in quality),
            f"{run.row_bytes / 1e6:.1f}",
            share,
        )
    return table
