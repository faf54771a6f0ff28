"""A run's folder, read: its summary, its reports, its evaluations, where ranks' time went."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embroute.report.run_summary import Summary, read_summary

METRICS_NAME, RANKS = "metrics.jsonl", "ranks"


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
    """All that a report shows of a run."""

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
    known = path.read_text("utf-8").splitlines() if path.is_file() else []
    for number, text in enumerate(known, 1):
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
    """What each rank wrote of itself."""
    found = {}
    for path in sorted((folder / RANKS).glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text("utf-8"))
            dict(found[path.stem]["seconds"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}: not what this version writes of a rank") from None
    return found
