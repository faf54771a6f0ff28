"""Evaluation on real ranks: the first worker gathers the scores of all workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_real_run_writes_the_scores_of_its_evaluation(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "embroute", "train", "--workers", "2", "--steps", "8"]
    command += ["--batch", "32", "--held-out", "0.02", "--hidden", "8", "--dim", "4"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    scores = [line["auc"] for line in lines if "auc" in line]
    assert scores
    assert all(0 < score < 1 for score in scores)
