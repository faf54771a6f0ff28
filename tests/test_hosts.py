"""Several hosts, as network namespaces with shaped links: torchrun on each, bytes as counted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from embroute.checkpoint.folders import latest_checkpoint

ROOT = Path(__file__).parent.parent
TESTBED = ROOT / "benchmarks" / "testbed" / "netns.sh"
PREFIX = f"eh{os.getpid() % 1000}-"  # several test runs may share the machine
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

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
        reason="network namespaces need root, ip and tc",
    ),
]


def emulated(*arguments: str) -> str:
    environment = {**os.environ, "PREFIX": PREFIX, "SHARD_RATE": "2gbit"}
    command = ["bash", str(TESTBED), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[None]:
    emulated("down")
    emulated("up", "1gbit", "1gbit")
    yield
    emulated("down")


def ranks_alive(run_file: Path) -> set[int]:
    """Processes that train, not those that started them."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (NotADirectoryError, FileNotFoundError, ProcessLookupError):
            continue
        if str(run_file).encode() in words and b"torch.distributed.run" not in words:
            found.add(int(folder.name))
    return found


def launch(node: str, run_file: Path) -> subprocess.Popen[str]:
    command = ["bash", str(TESTBED), "exec", node, sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "3", "--node-rank", str(list(NODES).index(node))]
    command += ["--nproc-per-node", str(len(NODES[node]))]
    command += ["--master-addr", "10.77.0.1", "--master-port", "29400"]
    command += ["-m", "embroute.train", str(run_file), "--node-name", node]
    environment = {**os.environ, "PREFIX": PREFIX, "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"OMP_NUM_THREADS": "1", "EMBROUTE_SECRET": "a secret of three hosts"}
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(jobs: Mapping[str, subprocess.Popen[str]], run_file: Path) -> None:
    """Leave no process behind, whatever a test found."""
    for pid in ranks_alive(run_file):
        os.kill(pid, signal.SIGKILL)
    for job in jobs.values():
        if job.returncode is None:
            job.kill()
            job.communicate()


def test_a_job_over_three_hosts_moves_what_it_counts(hosts: None, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN.format(out=tmp_path / "out"))
    before = [sum(int(n) for n in emulated("bytes", node).split()) for node in ("w0", "w1")]
    jobs = {node: launch(node, run_file) for node in NODES}
    try:
        for node, job in jobs.items():
            output, _ = job.communicate(timeout=400)  # kernels may have to be compiled first
            assert job.returncode == 0, f"{node}: {output[-3000:]}"
    finally:
        end(jobs, run_file)
    for index, node in enumerate(("w0", "w1")):
        link = sum(int(n) for n in emulated("bytes", node).split()) - before[index]
        meter = json.loads((tmp_path / "out" / "ranks" / f"worker{index}.json").read_text())
        rows, other = sum(meter["row_bytes"].values()), meter["other_bytes"]
        counted = rows + other["notes"] + 2 * other["dense"]  # a ring sends and receives
        assert counted > 100e6
        assert link == pytest.approx(counted, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("node", ["w1", "shard"])
def test_everyone_ends_when_a_cable_is_pulled(node: str, hosts: None, tmp_path: Path) -> None:
    """Ranks that a link cut off never hear that a connection was closed: only silence tells."""
    run_file, peer_timeout = tmp_path / "run.yaml", 10
    more = f"checkpoint_every: 50\npeer_timeout: {peer_timeout}\n"
    text = RUN.format(out=tmp_path / "out").replace("steps: 250", "epochs: 1000") + more
    run_file.write_text(text)
    jobs = {name: launch(name, run_file) for name in NODES}
    try:
        wait_for(lambda: latest_checkpoint(tmp_path / "out" / "checkpoints") is not None, 120)
        assert len(ranks_alive(run_file)) == 4
        emulated("link", node, "down")
        wait_for(lambda: not ranks_alive(run_file), peer_timeout)
        outputs = {name: job.communicate(timeout=60)[0] for name, job in jobs.items()}
    finally:
        end(jobs, run_file)
    for name, output in outputs.items():
        assert jobs[name].returncode != 0, name
        for rank in NODES[name]:
            said = [line for line in output.splitlines() if line.startswith(f"embroute: {rank}:")]
            assert len(said) == 1, output
            assert re.search("no sign of life from|no answer from|lost", said[0]), said
        codes = re.findall(r"exitcode *: (-?\d+)", output)
        assert set(codes) == {"75"}, output
    assert latest_checkpoint(tmp_path / "out" / "checkpoints") is not None


def wait_for(event: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not event():
        assert time.monotonic() < limit, f"not within {seconds} s"
        time.sleep(0.05)
