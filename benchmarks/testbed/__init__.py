"""An emulated cluster on this machine: network namespaces behind shaped links, made by netns.sh."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).parent / "netns.sh"
SHARD_ADDRESS, WORKER_ADDRESS = "10.77.0.1", "10.77.0.10"  # of the shard and of the first worker
SHARD_GBIT = 10.0  # more than the links of all workers together
PREFIX = f"eb{os.getpid() % 1000}-"  # several benchmarks may share the machine


def testbed(*arguments: str) -> None:
    """Run the script, as root."""
    settings = {"PREFIX": PREFIX, "SHARD_RATE": f"{SHARD_GBIT:g}gbit"}
    subprocess.run(["bash", str(SCRIPT), *arguments], env=os.environ | settings, check=True)


@contextmanager
def shaped_links(rates: Sequence[str]) -> Iterator[None]:
    """A shard's host and a worker's host for each rate, such as 0.1gbit, until the block ends."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    testbed("up", *rates)
    try:
        yield
    finally:
        testbed("down")


def inside(node: str) -> list[str]:
    """What starts a command on a node: shard, w0, w1 and so on."""
    return ["ip", "netns", "exec", PREFIX + node]
