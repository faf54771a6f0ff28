"""The exchange alone: workers and a shard swap messages over shaped links, beside iperf3 and Gloo.

`python -m benchmarks.exchange TESTBED` as root, with the path of the script that makes the links
(`netns.sh`). Both directions at once, as a phase of a step does; iperf3 --bidir on the same links.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from benchmarks.ranks import run_ranks
from benchmarks.record import markdown, record
from embroute.runtime.exchange import Bytes, Channel, GlooChannel, Posted
from embroute.runtime.links import open_channels

PREFIX, ADDRESS = "xb-", "10.77.0.1"
TARGET = 0.8
IPERF_S = 3
REPEATS = 2
SECONDS = 0.5  # that a volume takes at the rate of the link
LINKS = ((8, "0.1gbit"), (8, "0.25gbit"), (8, "0.5gbit"), (8, "1gbit"), (4, "1gbit"))


@dataclass(frozen=True)
class Case:
    """Messages of some sizes between every worker and the shard: of each size `volume` bytes."""

    workers: int
    sizes: Sequence[int]
    volume: int = 4_000_000
    warmup: int = 5
    streams: bool = True  # or Gloo
    ahead: int = 2  # phases posted and not yet waited for


def rank(case: Case) -> dict[str, object]:
    """Rank 0 is the shard: it swaps with everyone at once, the others with it."""
    names = ["shard", *(f"worker{i}" for i in range(case.workers))]
    own = names[int(os.environ["RANK"])]
    peers = names[1:] if own == "shard" else names[:1]
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    channel: Channel = GlooChannel(group, {name: i for i, name in enumerate(names)})
    if case.streams:
        store = PrefixStore("exchange", dist.distributed_c10d._get_default_store())
        links = {"rows": [("shard", name) for name in names[1:]]}
        channel = open_channels(store, own, links, 60.0)["rows"]
    _swap_mbit(channel, peers, 1000, replace(case, volume=20_000))  # kernels are loaded by now
    dist.barrier()
    rates = [_swap_mbit(channel, peers, size, case) for size in case.sizes]
    dist.barrier()
    dist.destroy_process_group()
    return {"mbit": rates}


def _swap_mbit(channel: Channel, peers: Sequence[str], size: int, case: Case) -> float:
    """Mbit/s with each peer in each direction."""

    def messages() -> list[tuple[str, Bytes]]:
        return [(peer, np.zeros(size, np.uint8)) for peer in peers]

    buffers = [(messages(), messages()) for _ in range(case.ahead)]
    posted: deque[Posted] = deque()
    phases, began = case.volume // size, 0.0
    for phase in range(phases + case.warmup):
        if phase == case.warmup:
            began = time.perf_counter()
        if len(posted) == case.ahead:
            posted.popleft().wait()
        posted.append(channel.post(*buffers[phase % case.ahead]))
    while posted:
        posted.popleft().wait()
    return 8e-6 * size * phases / (time.perf_counter() - began)


def testbed(script: str, *arguments: str) -> None:
    subprocess.run(["bash", script, *arguments], env=_environment(), check=True)


def _environment() -> dict[str, str]:
    return os.environ | {"PREFIX": PREFIX, "GLOO_SOCKET_IFNAME": "eth0", "SHARD_RATE": "10gbit"}


def inside(node: str) -> list[str]:
    return ["ip", "netns", "exec", PREFIX + node]


def swap_mbit(case: Case) -> list[float]:
    """Mbit/s of one link in each direction at each size, by the shard's clock."""
    prefixes = [inside("shard"), *(inside(f"w{i}") for i in range(case.workers))]
    found = run_ranks("benchmarks.exchange", asdict(case), len(prefixes), prefixes, ADDRESS)
    rates = found[0]["mbit"]
    assert isinstance(rates, list)
    return rates


def iperf_mbit(workers: int) -> float:
    """Mbit/s of one link in each direction: the mean of all links at once."""
    servers: list[subprocess.Popen[bytes]] = []
    clients: list[subprocess.Popen[str]] = []
    try:
        for i in range(workers):
            command = [*inside("shard"), "iperf3", "-s", "-1", "-p", str(5201 + i)]
            servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        time.sleep(1)
        for i in range(workers):
            command = ["iperf3", "-c", ADDRESS, "-p", str(5201 + i), "--bidir", "-J", "-O", "1"]
            command = [*inside(f"w{i}"), *command, "-t", str(IPERF_S)]
            clients.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        ends = [json.loads(client.communicate(timeout=60)[0])["end"] for client in clients]
    finally:
        for server in servers:
            server.kill()
        for client in clients:
            client.kill()
    sums = ("sum_received", "sum_received_bidir_reverse")
    rates = [end[name]["bits_per_second"] for end in ends for name in sums]
    return 1e-6 * float(np.mean(rates))


def measure(script: str, rate: str, workers: int, sizes: Sequence[int]) -> list[list[str]]:
    """A line for each size; iperf3, sockets and Gloo take turns."""
    testbed(script, "up", *[rate] * workers)
    volume = int(SECONDS * 1e9 / 8 * float(rate.removesuffix("gbit")))
    case = Case(workers, sizes, volume)
    reference, found, gloo = [], [], []
    try:
        for _ in range(REPEATS):
            reference.append(iperf_mbit(workers))
            found.append(swap_mbit(case))
            gloo.append(swap_mbit(replace(case, streams=False)))
            print(rate, workers, reference[-1], found[-1], gloo[-1], flush=True)
    finally:
        testbed(script, "down")
    base = float(np.median(reference))
    rates, theirs = np.median(found, 0).tolist(), np.median(gloo, 0).tolist()
    links = f"{workers} x {rate}"
    return [
        [links, *(f"{value:.0f}" for value in (size / 1000, own, base, other)), f"{own / base:.2f}"]
        for size, own, other in zip(sizes, rates, theirs, strict=True)
    ]


def main() -> None:
    if sys.argv[1].startswith("{"):
        print(json.dumps(rank(Case(**json.loads(sys.argv[1])))))
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    rows = [
        line
        for workers, rate in LINKS
        for line in measure(sys.argv[1], rate, workers, (20_000, 60_000, 200_000))
    ]
    headings = ["links", "KB", "Mbit/s", "iperf3", "Gloo", f"of iperf3 (target {TARGET:g})"]
    note = (
        "Every worker and the shard swap one message each way, again and again; Mbit/s of one "
        "worker's link in one direction, both directions at once, the mean of all links. iperf3 "
        f"--bidir over all links at once, {IPERF_S} s. Gloo: the same messages through torch's "
        f"process group. Medians of {REPEATS} turns. The shard's own link has 10 Gbit/s, so that "
        "the workers' links are what is measured, as far as the cores can serve them."
    )
    table = markdown(headings, rows)
    record("exchange", "The exchange of rows on shaped links", f"{note}\n\n{table}")


if __name__ == "__main__":
    main()
