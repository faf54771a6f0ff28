"""Several hosts, as network namespaces with shaped links: torchrun on each, bytes as counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTBED = ROOT.parent / "shared" / "testbed" / "netns.sh"
NODES = {"shard": ["coordinator", "shard0"], "w0": ["worker0"], "w1": ["worker1"]}
RUN = """
data: online-retail(negatives=1)
policy: vanilla
dim: 64
batch: 256
steps: 250
held_out: 0
out: {out}
nodes:
  shard: [coordinator, shard0]
  w0: [worker0]
  w1: [worker1]
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not TESTBED.exists() or shutil.which("tc") is None,
    reason="needs root, tc and the emulated cluster",
)


def emulated(*arguments: str) -> str:
    environment = {**os.environ, "PREFIX": "eh-", "SHARD_RATE": "2gbit"}
    command = ["bash", str(TESTBED), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[None]:
    emulated("down")
    emulated("up", "1gbit", "1gbit")
    yield
    emulated("down")


def launch(node: str, run_file: Path) -> subprocess.Popen[str]:
    command = ["bash", str(TESTBED), "exec", node, sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "3", "--node-rank", str(list(NODES).index(node))]
    command += ["--nproc-per-node", str(len(NODES[node]))]
    command += ["--master-addr", "10.77.0.1", "--master-port", "29400"]
    command += ["-m", "embroute.train", str(run_file), "--node-name", node]
    environment = {**os.environ, "PREFIX": "eh-", "GLOO_SOCKET_IFNAME": "eth0"}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_job_over_three_hosts_moves_what_it_counts(hosts: None, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN.format(out=tmp_path / "out"))
    before = [sum(int(n) for n in emulated("bytes", node).split()) for node in ("w0", "w1")]
    jobs = {node: launch(node, run_file) for node in NODES}
    for node, job in jobs.items():
        output, _ = job.communicate(timeout=150)
        assert job.returncode == 0, f"{node}: {output[-3000:]}"
    for index, node in enumerate(("w0", "w1")):
        link = sum(int(n) for n in emulated("bytes", node).split()) - before[index]
        meter = json.loads((tmp_path / "out" / "ranks" / f"worker{index}.json").read_text())
        rows, other = sum(meter["row_bytes"].values()), meter["other_bytes"]
        counted = rows + other["notes"] + 2 * other["dense"]  # a ring sends and receives
        assert counted > 100e6
        assert link == pytest.approx(counted, rel=0.03)
