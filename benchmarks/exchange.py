"""Messages between workers and a shard over shaped links, beside iperf3.

Run `python -m benchmarks.exchange` as root, where iperf3 is installed. Both directions at once, as
in a phase of a step; iperf3 --bidir on the same links. Axes: W workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import numpy as np
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from benchmarks.ranks import run_ranks
from benchmarks.record import markdown, record
from benchmarks.testbed import SHARD_ADDRESS, SHARD_GBIT, inside, shaped_links, testbed
from embroute.kernels.array_types import U8
from embroute.kernels.codes import MAX_CHUNKS
from embroute.transport.bootstrap import open_channels
from embroute.transport.interface import Channel, PendingMessages

TARGET = 0.8
IPERF_S = 3
REPEATS = 2
AHEAD = 2  # phases posted and not yet waited for
WARMUP = 5  # phases
SECONDS = 0.5  # that the messages of a load take at the rate of the links
FEWEST = 6  # phases


@dataclass(frozen=True)
class Load:
    """Messages that each worker and the shard swap in a phase: their number and size, each way."""

    kb_W: Sequence[int]
    count_W: Sequence[int]
    phases: int

    def bytes_W(self) -> list[int]:
        """Each way in a phase."""
        return [1000 * kb * count for kb, count in zip(self.kb_W, self.count_W, strict=True)]


@dataclass(frozen=True)
class Links:
    """Shaped links of some workers and the shard, and the messages that are swapped over them."""

    gbit_W: tuple[float, ...]
    swaps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # KB and number for each worker
    shard_gbit: float = SHARD_GBIT

    def load(self, kb_W: Sequence[int], count_W: Sequence[int]) -> Load:
        """A load with as many phases as keep the slowest link busy for the same time."""
        phase_s = max(8e-6 * np.multiply(kb_W, count_W) / np.array(self.gbit_W))
        return Load(kb_W, count_W, max(FEWEST, int(SECONDS / phase_s)))

    def loads(self) -> list[Load]:
        """Every swap."""
        return [self.load(*swap) for swap in self.swaps]

    def classes(self) -> list[tuple[str, list[int]]]:
        """Workers with the same link, and all workers if there are several kinds."""
        everyone = list(range(len(self.gbit_W)))
        own = [list(each) for _, each in groupby(everyone, self.gbit_W.__getitem__)]
        named = [(f"{len(each)} x {self.gbit_W[each[0]]:g}", each) for each in own]
        if len(own) == 1:
            return named
        parts = [(f"of them {name}", each) for name, each in named]
        return [(" + ".join(name for name, _ in named), everyone), *parts]


def alike(workers: int, gbit: float) -> Links:
    """Equal links and messages: one at a time, and as many as a phase has chunks at most."""
    swaps = [((kb,) * workers, (at,) * workers) for at in (1, MAX_CHUNKS) for kb in (20, 60, 200)]
    return Links((gbit,) * workers, tuple(swaps))


def mixed(shard_gbit: float, times: int) -> Links:
    """The default links of the testbed. A fast link moves `times` as much as a slow link.

    A fast link carries one message that is ten times as long, or several messages.
    """
    long = [((200,) * 4 + (20,) * 4, (at,) * 8) for at in (1, MAX_CHUNKS)]
    many = [((kb,) * 8, (times,) * 4 + (1,) * 4) for kb in (20, 60, 200)]
    return Links((1.0,) * 4 + (0.1,) * 4, (*long, *many), shard_gbit)


CASES = (
    alike(8, 0.1),
    alike(8, 0.25),
    alike(8, 0.5),
    alike(8, 1),
    alike(4, 1),
    mixed(SHARD_GBIT, 10),
    mixed(2, 4),  # what the slow ones leave of 2 Gbit/s, in four
)


def rank(loads: Sequence[Load]) -> dict[str, object]:
    """Rank 0 is the shard: it swaps with all workers at once, and each worker with the shard."""
    names = ["shard", *(f"worker{i}" for i in range(len(loads[0].kb_W)))]
    own = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    store = PrefixStore("exchange", dist.distributed_c10d._get_default_store())
    links = {"rows": [("shard", name) for name in names[1:]]}
    channel = open_channels(store, names[own], links, 60.0)["rows"]
    rates = []
    for load in loads:
        messages = list(zip(names[1:], load.kb_W, load.count_W, strict=True))
        if own:
            messages = [("shard", *messages[own - 1][1:])]
        dist.barrier()
        rates.append(_phases_per_s(channel, messages, load.phases))
    dist.barrier()
    dist.destroy_process_group()
    return {"rates": rates}


def _phases_per_s(channel: Channel, swaps: Sequence[tuple[str, int, int]], phases: int) -> float:
    """Rate of phases from the end of the warm-up, with further phases posted behind."""

    def messages() -> list[tuple[str, U8]]:
        return [
            (peer, np.zeros(1000 * kb, np.uint8)) for peer, kb, count in swaps for _ in range(count)
        ]

    buffers = [(messages(), messages()) for _ in range(AHEAD)]
    posted: deque[PendingMessages] = deque()
    ended = []
    for phase in range(WARMUP + phases + AHEAD):
        if len(posted) == AHEAD:
            posted.popleft().wait()
            ended.append(time.perf_counter())
        posted.append(channel.submit(*buffers[phase % AHEAD]))
    while posted:
        posted.popleft().wait()
    return (len(ended) - WARMUP) / (ended[-1] - ended[WARMUP - 1])


def swap_mbit(loads: Sequence[Load]) -> list[list[float]]:
    """Mbit/s of each worker's link in each direction with each load, by the shard's clock."""
    workers = len(loads[0].kb_W)
    prefixes = [inside("shard"), *(inside(f"w{i}") for i in range(workers))]
    given = [asdict(load) for load in loads]
    found = run_ranks("benchmarks.exchange", given, len(prefixes), prefixes, SHARD_ADDRESS)
    rates = found[0]["rates"]
    assert isinstance(rates, list)
    return [
        [8e-6 * size * rate for size in load.bytes_W()]
        for load, rate in zip(loads, rates, strict=True)
    ]


def iperf_mbit(workers: int) -> list[float]:
    """Mbit/s of each worker's link in each direction, all links at once."""
    servers: list[subprocess.Popen[bytes]] = []
    clients: list[subprocess.Popen[str]] = []
    try:
        for i in range(workers):
            command = [*inside("shard"), "iperf3", "-s", "-1", "-p", str(5201 + i)]
            servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        time.sleep(1)
        for i in range(workers):
            command = [*inside(f"w{i}"), "iperf3", "-c", SHARD_ADDRESS, "-p", str(5201 + i)]
            command += ["--bidir", "-J", "-O", "1", "-t", str(IPERF_S)]
            clients.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        ends = [json.loads(client.communicate(timeout=60)[0])["end"] for client in clients]
    finally:
        for server in servers:
            server.kill()
        for client in clients:
            client.kill()
    sums = ("sum_received", "sum_received_bidir_reverse")
    return [1e-6 * float(np.mean([end[name]["bits_per_second"] for name in sums])) for end in ends]


def measure(links: Links) -> list[list[str]]:
    """A line for each swap and class of links; iperf3 and the ranks take turns."""
    workers, loads = len(links.gbit_W), links.loads()
    reference, found = [], []
    with shaped_links([f"{gbit}gbit" for gbit in links.gbit_W]):
        testbed("rate", "shard", f"{links.shard_gbit}gbit")
        for _ in range(REPEATS):
            reference.append(iperf_mbit(workers))
            found.append(swap_mbit(loads))
    base_W, rate_LW = np.median(reference, 0), np.median(found, 0)
    lines = []
    for i, load in enumerate(loads):
        for name, own in links.classes():
            figures = [rate_LW[i, own].mean(), base_W[own].mean()]
            cells = [name, f"{links.shard_gbit:g}", *_swapped(load, own)]
            cells += [*(f"{value:.0f}" for value in figures), f"{figures[0] / figures[1]:.2f}"]
            print(*cells, sep="  ", flush=True)
            lines.append(cells)
    return lines


def _swapped(load: Load, own: Sequence[int]) -> list[str]:
    """Sizes and numbers of messages of some workers."""
    columns = ([values[w] for w in own] for values in (load.kb_W, load.count_W))
    return [", ".join(map(str, dict.fromkeys(column))) for column in columns]


def main() -> None:
    if len(sys.argv) == 2:  # a rank that this benchmark started
        print(json.dumps(rank([Load(**load) for load in json.loads(sys.argv[1])])))
        return
    rows = [line for links in CASES for line in measure(links)]
    headings = ["links, Gbit/s", "shard's", "KB", "at once", "Mbit/s", "iperf3"]
    headings.append(f"of iperf3 (target {TARGET:g})")
    message = (
        "Every worker and the shard swap messages in both directions, phase after phase: one "
        "message with each worker, or several posted together, like the chunks of a phase. A phase "
        f"ends with the last message of all workers; {AHEAD} phases are posted at a time. Mbit/s "
        "of one worker's link in one direction, both directions at once, the mean over links. "
        f"iperf3 --bidir over all links at once, {IPERF_S} s. Medians of {REPEATS} turns. The "
        "shard's link is wide, so the workers' links are the limit, as far as the cores can serve "
        "them. In the last case the "
        "shard's link is narrower than all workers' links together. Compare the sum over links "
        "there: the load fixes the shares of fast and slow links."
    )
    table = markdown(headings, rows)
    record("exchange", "The exchange of rows on shaped links", f"{message}\n\n{table}")


if __name__ == "__main__":
    main()
