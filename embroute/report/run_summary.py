"""What runs came to, and several of them side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Summary:
    """What a run came to: `summary.json` in its folder."""

    policy: str
    steps: int
    samples: int
    samples_per_s: float
    loss: float  # mean of the last report
    metrics: dict[str, float]  # of the last evaluation
    row_bytes: int
    vanilla_row_bytes: int  # what vanilla would have moved in the same steps
    seconds: dict[str, float]

    def text(self) -> str:
        """A line or two for people."""
        found = "  ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        lines = [f"{self.steps} steps, {self.samples_per_s:,.0f} samples/s  {found}"]
        moved = f"rows moved: {self.row_bytes / 1e6:.1f} MB with {self.policy}"
        if self.vanilla_row_bytes:
            share = 100 * self.row_bytes / self.vanilla_row_bytes
            moved += (
                f", {share:.0f} % of the {self.vanilla_row_bytes / 1e6:.1f} MB that vanilla would"
            )
        return "\n".join([*lines, moved])


def read_summary(folder: Path) -> Summary:
    """The summary of a run's folder."""
    path = folder / SUMMARY
    if not path.is_file():
        raise ValueError(f"{folder}: no {SUMMARY} here; a run writes it when it ends")
    try:
        return Summary(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError):
        raise ValueError(f"{path}: not a summary as this version writes it") from None


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
