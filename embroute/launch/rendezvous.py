"""Join a job: find out this rank's name, and open its channels to the others."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from embroute.launch.exit import TRY_AGAIN, exit_with_reason
from embroute.launch.heartbeat import Heartbeat, patience
from embroute.launch.rank import (
    COORDINATOR,
    RankContext,
    RankTopology,
    rank_names,
    role_and_index,
    shard_names,
    worker_names,
)
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
CONNECT_S = 60.0
TRANSFER_TIMEOUT = timedelta(hours=2)  # of Gloo: the heartbeat notices dead ranks


def _links(topology: RankTopology) -> Links:
    """Pairs of listener and caller; listeners precede callers in the order of `rank_names`."""
    shards, workers = shard_names(topology.num_shards), worker_names(topology.num_workers)
    to_all = [(COORDINATOR, peer) for peer in (*shards, *workers)]
    return {
        "plans": to_all,
        "rows": list(itertools.product(shards, workers)),
        "answers": to_all,
        "star": [(shards[0], worker) for worker in workers],
        "sums": allreduce_links(workers, len(topology.nodes) == 1),
    }


def _uses_sockets() -> bool:
    """Whether ranks exchange over sockets of our own; if not, over Gloo."""
    exchange = os.environ.get(EXCHANGE) or SOCKETS
    if exchange not in (SOCKETS, GLOO):
        raise ValueError(f"{EXCHANGE} must be {SOCKETS} or {GLOO}, got {exchange!r}")
    return exchange == SOCKETS and sys.platform == "linux"


def _gloo_channels(rank_of: dict[str, int], topology: RankTopology) -> dict[str, Channel]:
    """Torch's process groups. Gloo does not authenticate callers."""
    if on_one_machine():
        os.environ.setdefault(INTERFACE, _loopback())
    timeout = timedelta(seconds=CONNECT_S)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=_gloo_store(), rank=rank, world_size=size, timeout=timeout
    )
    workers = [rank_of[name] for name in worker_names(topology.num_workers)]
    members = {kind: sorted(rank_of.values()) for kind in _links(topology)} | {"sums": workers}
    return {
        kind: GlooChannel(dist.new_group(ranks, TRANSFER_TIMEOUT, "gloo"), rank_of)
        for kind, ranks in members.items()
    }


def _gloo_store() -> Store:
    """The store by which Gloo finds its peers; Gloo takes only torch's own kinds."""
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER]) / f"gloo{attempt()}"
        return FileStore(str(path), int(os.environ["WORLD_SIZE"]))
    return torch_store(CONNECT_S)


def _loopback() -> str:
    """The interface of connections within this host."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _channels(
    store: JobStore, name: str, rank_of: dict[str, int], topology: RankTopology
) -> Mapping[str, Channel]:
    """This rank's channels, by kind."""
    if _uses_sockets():
        return open_channels(store, name, _links(topology), CONNECT_S)
    return _gloo_channels(rank_of, topology)


def _allreduce(name: str, topology: RankTopology, channel: Channel) -> AllReduce:
    """Sums over workers; ranks of other roles get one that is never used."""
    if isinstance(channel, SocketChannel):
        role, index = role_and_index(name)
        if role == "worker":
            return open_allreduce(channel, index, topology.num_workers, CONNECT_S)
        return open_allreduce(channel, 0, 1, CONNECT_S)
    assert isinstance(channel, GlooChannel)
    return channel


def _row_transport(
    store: JobStore, name: str, topology: RankTopology, channel: Channel
) -> MessageTransport:
    """Shared memory if all shards and workers are on one host, else messages that copy.

    Both ends of a connection must choose the same. So each rank publishes whether all its peers are
    on its host, and reads what all the others have published.
    """
    _, *others = rank_names(topology.num_workers, topology.num_shards)
    if name not in others or not isinstance(channel, SocketChannel):
        return CopyingTransport(channel)
    store.set(f"near/{name}", str(is_same_host(channel)))
    if not all(store.get(f"near/{other}") == str(True).encode() for other in others):
        return CopyingTransport(channel)
    if name.startswith("shard"):
        return offer_memory(name, channel)
    return accept_memory(name, channel, CONNECT_S)


def _give_up(
    name: str, channels: Mapping[str, Channel], owns_process: bool
) -> Callable[[str], None]:
    """What a rank does that cannot go on, whatever its threads wait for."""

    def lose(reason: str) -> None:
        sockets = [c for c in channels.values() if isinstance(c, SocketChannel)]
        if owns_process or len(sockets) < len(channels):  # who waits for Gloo cannot be woken
            exit_with_reason(name, f"{reason}; ending", TRY_AGAIN)
        for channel in sockets:
            channel.abort(reason)

    return lose


def _ranks_by_name(
    store: JobStore, name: str, topology: RankTopology, timeout_s: float
) -> dict[str, int]:
    """Publish this rank's name, and wait for the names of all others."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != topology.num_ranks:
        raise ValueError(
            f"the launcher started {size} ranks, the job has {topology.num_ranks}: a coordinator, "
            f"{topology.num_shards} shards and {topology.num_workers} workers"
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


@contextmanager
def connect(
    topology: RankTopology,
    node: str = "",
    peer_timeout_s: float = 30.0,
    owns_process: bool = False,
) -> Iterator[RankContext]:
    """This process's rank in a job that torchrun or `embroute train` has started.

    A rank that owns its process ends it when it misses a peer's signs of life. In another process,
    every thread that uses a channel then meets a LostPeerError.
    """
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    for variable in (*needed, *(() if FOLDER in os.environ else ("MASTER_ADDR", "MASTER_PORT"))):
        if variable not in os.environ:
            raise ValueError(
                f"{variable} is not set: start the program with embroute run or torchrun, or use "
                f"embroute train"
            )
    name = topology.name(node or socket.gethostname(), int(os.environ["LOCAL_RANK"]))
    timeout_s = max(CONNECT_S, peer_timeout_s)
    store = open_store(timeout_s, host_it=hosts_store())
    rank_of = _ranks_by_name(store, name, topology, timeout_s)
    # The heartbeat has a connection of its own: a call on the first one may block.
    heartbeat_store = open_store(patience(peer_timeout_s))
    channels: dict[str, Channel] = {}
    lose = _give_up(name, channels, owns_process)
    heartbeat = Heartbeat(heartbeat_store, name, sorted(rank_of), peer_timeout_s, lose)
    heartbeat.hosts_store = hosts_store()
    with heartbeat:
        channels |= _channels(store, name, rank_of, topology)
        yield RankContext(
            name,
            topology.num_workers,
            topology.num_shards,
            control=channels["plans"],
            # All ranks open these two in this order, since each may wait for a peer.
            allreduce=_allreduce(name, topology, channels["sums"]),
            rows=_row_transport(store, name, topology, channels["rows"]),
            replies=channels["answers"],
            central=channels["star"],
        )
    # Not after an error: closing Gloo's groups would wait for the lost rank.
    for channel in channels.values():
        channel.close()
    if dist.is_initialized() and not _uses_sockets():
        dist.destroy_process_group()
