"""Makes the reports of tests once, and reads them back."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from embroute.cli.main import cli
from embroute.cli.report import write_report
from embroute.config.data_options import DataOptions
from embroute.config.run_options import RunConfig
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.train.loop import train_rank, write_record

MOST_BYTES = 5_000_000


def compared(folder: Path, *options: str) -> tuple[Path, dict[str, Any]]:
    """A comparison's report and its JSON."""
    page, values = folder / "compare.html", folder / "compare.json"
    command = ["compare", "--report", str(page), "--json", str(values), *options]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return page, json.loads(values.read_text())


def trained(folder: Path, policy: str, steps: int = 40, limit: int = 4000) -> Path:
    """The folder of a run with two workers in this process, with its report."""
    run = RunConfig(
        data_options=DataOptions(limit=limit),
        policy=policy,
        dim="4",
        hidden="8",
        batch=32,
        steps=steps,
        held_out=0.2,
        evaluate_every=steps // 4,
        workers=2,
        out=str(folder),
    )
    folder.mkdir()

    def run_rank(rank: RankContext) -> None:
        write_record(folder, rank.name, train_rank(run, rank, folder, threading.Event()))

    run_in_process(2, 1, run_rank)
    write_report(folder / "report.html", [folder])
    return folder


def block(page: Path, name: str) -> Any:
    """A block of JSON inside a page."""
    pattern = rf'<script type="application/json" id="{name}">(.*?)</script>'
    found = re.search(pattern, page.read_text("utf-8"), re.DOTALL)
    assert found, f"{page} has no block {name}"
    return json.loads(found.group(1))
