"""A run's folder, read: its summary, its reports, its evaluations, where ranks' time went."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embroute.report import Summary, read_summary

METRICS, RANKS = "metrics.jsonl", "ranks"


@dataclass(frozen=True)
class Report:
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
class History:
    """All that a report shows of a run."""

    name: str
    summary: Summary
    reports: list[Report]
    evaluations: list[Evaluation]
    seconds: dict[str, dict[str, float]]  # by rank and phase
    spans: dict[str, list[tuple[str, int, float, float]]]  # by rank: phase, step, began, seconds

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def read_history(folder: Path, name: str) -> History:
    """Read a run's folder; a resumed run goes on where its checkpoint was made."""
    reports: list[Report] = []
    evaluations: list[Evaluation] = []
    path = folder / METRICS
    known = path.read_text("utf-8").splitlines() if path.is_file() else []
    before = _Before()
    for number, text in enumerate(known, 1):
        try:
            entry = json.loads(text)
            if before.begins_again(entry):
                reports = [r for r in reports if r.step < entry["step"]]
                evaluations = [e for e in evaluations if e.step < entry["step"]]
                before = before if reports else _Before()  # another run in the same folder
            entry |= before.sums(entry)
            if "loss" in entry:
                reports.append(Report(**entry))
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
    return History(name, read_summary(folder), reports, evaluations, seconds, spans)


class _Before:
    """What went before the last start of a run: clocks and counters begin at 0 again."""

    def __init__(self) -> None:
        self.offset = {"seconds": 0.0, "row_bytes": 0, "vanilla_row_bytes": 0}
        self.last = dict(self.offset)
        self.seconds, self.step = 0.0, 0.0

    def begins_again(self, entry: dict[str, float]) -> bool:
        """Whether the entry is the first one after a start; then all before it counts."""
        again = entry["seconds"] < self.seconds or entry["step"] < self.step
        if again:
            self.offset = dict(self.last)
        self.seconds, self.step = entry["seconds"], entry["step"]
        return again

    def sums(self, entry: dict[str, float]) -> dict[str, float]:
        """The entry's clock and counters, with what went before added."""
        sums = {name: entry[name] + self.offset[name] for name in self.offset if name in entry}
        self.last |= sums
        return sums


def _ranks(folder: Path) -> dict[str, dict[str, Any]]:
    """What each rank wrote of itself."""
    paths = sorted((folder / RANKS).glob("*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in paths}
