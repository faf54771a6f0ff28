"""The example: six lines make a plain torch script distributed, with the same losses."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PLAIN, ROUTED = EXAMPLES / "deepfm_plain.py", EXAMPLES / "deepfm_routed.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def losses(*command: str | Path) -> list[float]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "--steps", "100"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"^step \d+  log-loss (\S+)", done.stdout, re.M)]


def test_routed_example_differs_from_plain_in_six_lines() -> None:
    plain, routed = (path.read_text().splitlines() for path in (PLAIN, ROUTED))
    changes = [line for line in difflib.ndiff(plain, routed) if line[2:].strip()]
    assert sum(line.startswith("+ ") for line in changes) <= 6
    assert sum(line.startswith("- ") for line in changes) <= 6
    assert "embroute" not in "\n".join(plain).partition("import argparse")[2]


@pytest.mark.full
def test_routed_example_prints_the_losses_of_plain_torch() -> None:
    expected = losses(PLAIN)
    assert len(expected) == 2
    assert losses(*TORCHRUN, ROUTED) == pytest.approx(expected, rel=1e-7)
