"""Jobs as users start them: processes of a launcher, found by rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from embroute.launch.rank import rank_names

# For a coordinator, a shard and two workers.
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def begin(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(run: subprocess.Popen[str], seconds: float = 600) -> tuple[int, str]:
    try:
        output, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    return run.returncode, output


def pid_of(run: subprocess.Popen[str], name: str) -> int:
    """The process of a rank among the launcher's children."""
    local_rank = f"LOCAL_RANK={rank_names(2, 1).index(name)}".encode()
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    for task in Path(f"/proc/{run.pid}/task").iterdir():
        children += (task / "children").read_text().split()
    for child in children:
        if local_rank in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise ProcessLookupError(name)
