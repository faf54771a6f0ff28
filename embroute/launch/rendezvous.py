"""Join a job: find out who this rank is, and open its channels to the others."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from embroute.launch.heartbeat import Heartbeat, patience
from embroute.launch.rank import RankContext, RankTopology, rank_names
from embroute.transport.allreduce import allreduce_links, is_same_host, open_allreduce
from embroute.transport.bootstrap import INTERFACE, Links, open_channels
from embroute.transport.buffers import CopyingTransport, MessageTransport
from embroute.transport.gloo import GlooChannel
from embroute.transport.interface import AllReduce, Channel, LostPeerError
from embroute.transport.job_store import (
    FOLDER,
    JobStore,
    attempt,
    hosts_store,
    names_by_rank,
    on_one_machine,
    open_store,
    torch_store,
)
from embroute.transport.shm import accept_memory, offer_memory
from embroute.transport.sockets import SocketChannel

EXCHANGE, SOCKETS, GLOO = "EMBROUTE_EXCHANGE", "sockets", "gloo"
CHANNELS = ("plans", "rows", "answers", "star")  # beside the sums
CONNECT_S = 60.0
YIELDING = 10  # niceness: plans are made ahead, so those who train on the same cores come first
TRANSFER_TIMEOUT = timedelta(hours=2)  # liveness is the heartbeat's business
# Of glibc's mallopt: from which size on memory goes back at once, and how much the heap keeps.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
LARGEST_KEPT, HEAP_KEPT = 1 << 25, 1 << 28  # bytes; glibc takes no larger threshold than the first


def _links(layout: RankTopology) -> Links:
    """Who listens to whom; nobody calls a rank that comes after it."""
    coordinator, *others = rank_names(layout.num_workers, layout.num_shards)
    shards, workers = others[: layout.num_shards], others[layout.num_shards :]
    stars = [(coordinator, other) for other in others]
    return {
        "plans": stars,
        "rows": list(itertools.product(shards, workers)),
        "answers": stars,
        "star": [(shards[0], worker) for worker in workers],
        "sums": allreduce_links(workers, len(layout.nodes) == 1),
    }


def _uses_sockets() -> bool:
    """Whether ranks exchange over connections of our own, or torch's where those cannot be used."""
    means = os.environ.get(EXCHANGE) or SOCKETS
    if means not in (SOCKETS, GLOO):
        raise ValueError(f"{EXCHANGE} must be {SOCKETS} or {GLOO}, got {means!r}")
    return means == SOCKETS and sys.platform == "linux"


def _gloo_channels(rank_of: dict[str, int], layout: RankTopology) -> dict[str, Channel]:
    """Torch's process groups; nobody who connects to Gloo has to prove who it is."""
    if on_one_machine():
        os.environ.setdefault(INTERFACE, _loopback())
    timeout = timedelta(seconds=CONNECT_S)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=_gloo_store(), rank=rank, world_size=size, timeout=timeout
    )
    workers = [rank_of[f"worker{i}"] for i in range(layout.num_workers)]
    members = {kind: sorted(rank_of.values()) for kind in _links(layout)} | {"sums": workers}
    return {
        kind: GlooChannel(dist.new_group(ranks, TRANSFER_TIMEOUT, "gloo"), rank_of)
        for kind, ranks in members.items()
    }


def _gloo_store() -> Store:
    """What Gloo finds its peers by: torch's own kinds only."""
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER]) / f"gloo{attempt()}"
        return FileStore(str(path), int(os.environ["WORLD_SIZE"]))
    return torch_store(CONNECT_S)


def _loopback() -> str:
    """The interface that leads nowhere else."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _channels(
    store: JobStore, name: str, rank_of: dict[str, int], layout: RankTopology
) -> Mapping[str, Channel]:
    """This rank's channels."""
    if _uses_sockets():
        return open_channels(store, name, _links(layout), CONNECT_S)
    return _gloo_channels(rank_of, layout)


def _sums(name: str, layout: RankTopology, channel: Channel) -> AllReduce:
    """What adds up over workers; other ranks never do."""
    if isinstance(channel, SocketChannel):
        if name.startswith("worker"):
            index = int(name.removeprefix("worker"))
            return open_allreduce(channel, index, layout.num_workers, CONNECT_S)
        return open_allreduce(channel, 0, 1, CONNECT_S)
    assert isinstance(channel, GlooChannel)
    return channel


def _mail(store: JobStore, name: str, layout: RankTopology, rows: Channel) -> MessageTransport:
    """What carries rows: memory if all who hold rows are on one host, else the connections.

    Both ends of a connection must know, so everyone writes down what its connections are.
    """
    _, *others = rank_names(layout.num_workers, layout.num_shards)
    if name not in others or not isinstance(rows, SocketChannel):
        return CopyingTransport(rows)
    store.set(f"near/{name}", str(is_same_host(rows)))
    if not all(store.get(f"near/{other}") == str(True).encode() for other in others):
        return CopyingTransport(rows)
    if name.startswith("shard"):
        return offer_memory(name, rows)
    return accept_memory(name, rows, CONNECT_S)


def _ranks_by_name(
    store: JobStore, name: str, layout: RankTopology, timeout_s: float
) -> dict[str, int]:
    """Every rank publishes its name and waits for the others'."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != layout.num_ranks:
        raise ValueError(
            f"the launcher started {size} ranks, the job has {layout.num_ranks}: a coordinator, "
            f"{layout.num_shards} shards and {layout.num_workers} workers"
        )
    store.set(f"rank/{rank}", name)
    try:
        published = names_by_rank(store, size)
    except RuntimeError:
        raise LostPeerError(
            f"not all of the {size} ranks have come within {timeout_s:.0f} s; what the others say "
            f"tells why"
        ) from None
    rank_of: dict[str, int] = {}
    for other, other_name in enumerate(published):
        if other_name in rank_of:
            raise ValueError(f"ranks {rank_of[other_name]} and {other} are both {other_name}")
        rank_of[other_name] = other
    return rank_of


def keep_memory() -> bool:
    """Keep what a step frees for the next one; whether the system's allocator has such a setting.

    Every step needs the same memory. The heap would give it back to the system as soon as there is
    more of it at its end than twice the largest piece that was freed before, and the next step
    would wait for new pages, a thousand of them for a few megabytes of activations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc only
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(TRIM_THRESHOLD, HEAP_KEPT))


@contextmanager
def connect(
    layout: RankTopology, node: str = "", peer_timeout_s: float = 30.0
) -> Iterator[RankContext]:
    """This process's rank in a job that torchrun or `embroute train` has started."""
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    for variable in (*needed, *(() if FOLDER in os.environ else ("MASTER_ADDR", "MASTER_PORT"))):
        if variable not in os.environ:
            raise ValueError(
                f"{variable} is not set: start the program with embroute run or torchrun, or use "
                f"embroute train"
            )
    name = layout.name(node or socket.gethostname(), int(os.environ["LOCAL_RANK"]))
    if name == rank_names(layout.num_workers, layout.num_shards)[0]:
        os.nice(YIELDING)
    keep_memory()
    begin_s = max(CONNECT_S, peer_timeout_s)
    store = open_store(begin_s, host_it=hosts_store())
    rank_of = _ranks_by_name(store, name, layout, begin_s)
    # A connection of its own: others may block while the heartbeat must not.
    beats = open_store(patience(peer_timeout_s))
    beat = Heartbeat(beats, name, sorted(rank_of), peer_timeout_s)
    beat.hosts_store = hosts_store()
    with beat:
        channels = _channels(store, name, rank_of, layout)
        plans, rows, answers, star = (channels[kind] for kind in CHANNELS)
        sums = _sums(name, layout, channels["sums"])
        transport = _mail(store, name, layout, rows)
        yield RankContext(
            name, layout.num_workers, layout.num_shards, plans, transport, sums, answers, star
        )
    # Not after an error: taking groups down would wait for the lost.
    for channel in channels.values():
        channel.close()
    if dist.is_initialized() and not _uses_sockets():
        dist.destroy_process_group()
