"""Join a job: find out this rank's name, and open its channels to the others."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from embroute.launch.heartbeat import Heartbeat, patience
from embroute.launch.process import TRY_AGAIN, exit_with_reason
from embroute.launch.rank import (
    COORDINATOR,
    RankContext,
    RankTopology,
    role_and_index,
    shard_names,
    worker_names,
)
from embroute.transport.allreduce import AllReduce, allreduce_links, new_allreduce, share_addends
from embroute.transport.bootstrap import Links, open_channels
from embroute.transport.interface import (
    AUTO,
    SHARED_MEMORY,
    SOCKETS,
    TRANSPORTS,
    Channel,
    LostPeerError,
)
from embroute.transport.job_store import FOLDER, JobStore, hosts_store, names_by_rank, open_store
from embroute.transport.shm import share_rows
from embroute.transport.sockets import SocketChannel

CONNECT_S = 60.0


def _links(topology: RankTopology, sums_in_memory: bool) -> Links:
    """Pairs of listener and caller; listeners precede callers in the order of `rank_names`."""
    shards, workers = shard_names(topology.num_shards), worker_names(topology.num_workers)
    to_all = [(COORDINATOR, peer) for peer in (*shards, *workers)]
    return {
        "plans": to_all,
        "rows": list(itertools.product(shards, workers)),
        "answers": to_all,
        "star": [(shards[0], worker) for worker in workers],
        "sums": allreduce_links(workers, sums_in_memory),
    }


def shares_memory(transport: str, topology: RankTopology) -> tuple[bool, bool]:
    """Whether rows, and sums over workers, pass through shared memory. The choice of every rank."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    able, nodes = hasattr(os, "memfd_create"), topology.num_row_nodes
    if transport == SHARED_MEMORY and (nodes > 1 or not able):
        where = f"on {nodes} nodes" if able else "on a system without memory files (memfd_create)"
        raise ValueError(
            f"transport={SHARED_MEMORY}: shards and workers must be on one Linux machine, they are "
            f"{where}"
        )
    if transport == SOCKETS or not able:
        return False, False
    return nodes == 1, topology.num_worker_nodes == 1


def _allreduce(
    name: str, topology: RankTopology, channel: SocketChannel, in_memory: bool
) -> AllReduce:
    """Sums over workers; ranks of other roles get one that is never used."""
    (role, index), workers, memory = role_and_index(name), topology.num_workers, None
    if role == "worker" and workers > 1 and in_memory:
        memory = share_addends(channel, index, workers, CONNECT_S)
    return new_allreduce(channel, index, workers, memory)


def _rows(name: str, channel: SocketChannel, in_memory: bool) -> Channel:
    """The channel of rows; the coordinator has none to use."""
    shares = in_memory and name != COORDINATOR
    return share_rows(name, channel, CONNECT_S) if shares else channel


def _give_up(
    name: str, channels: Mapping[str, SocketChannel], owns_process: bool
) -> Callable[[str], None]:
    """What a rank does that cannot go on, whatever its threads wait for."""

    def lose(reason: str) -> None:
        if owns_process:
            exit_with_reason(name, f"{reason}; ending", TRY_AGAIN)
        for channel in channels.values():
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
    transport: str = AUTO,
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
    channels: dict[str, SocketChannel] = {}
    lose = _give_up(name, channels, owns_process)
    heartbeat = Heartbeat(heartbeat_store, name, sorted(rank_of), peer_timeout_s, lose)
    heartbeat.hosts_store = hosts_store()
    with heartbeat:
        rows_in_memory, sums_in_memory = shares_memory(transport, topology)
        channels |= open_channels(store, name, _links(topology, sums_in_memory), CONNECT_S)
        yield RankContext(
            name,
            topology.num_workers,
            topology.num_shards,
            control=channels["plans"],
            # All ranks open these two in this order, since each may wait for a peer.
            allreduce=_allreduce(name, topology, channels["sums"], sums_in_memory),
            rows=_rows(name, channels["rows"], rows_in_memory),
            replies=channels["answers"],
            central=channels["star"],
        )
    for channel in channels.values():
        channel.close()
