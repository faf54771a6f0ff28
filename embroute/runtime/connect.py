"""Join a torchrun job: find out who this rank is, and open its channels to the others."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from embroute.runtime.exchange import GlooChannel
from embroute.runtime.heartbeat import Heartbeat
from embroute.runtime.job import Settings
from embroute.runtime.layout import Layout, on_one_node
from embroute.runtime.seat import Seat

TRANSFER_TIMEOUT = timedelta(hours=2)  # liveness is the heartbeat's business


def _groups(rank_of: dict[str, int], workers: list[str]) -> list[GlooChannel]:
    """One process group for each kind of message; every rank makes all of them, in this order."""
    kinds = (None, None, [rank_of[name] for name in workers], None)
    channels = []
    for ranks in kinds:
        group = dist.new_group(ranks, timeout=TRANSFER_TIMEOUT, backend="gloo")
        channels.append(GlooChannel(group, rank_of))
    return channels


def _job_store(timeout_s: float, host_it: bool = False) -> PrefixStore:
    """A connection to the store that every rank of this attempt can reach.

    The launcher keeps its store over restarts: each attempt has names of its own in it, or ranks
    would find the addresses of dead ones.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=host_it, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(f"embroute/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _hosts_store() -> bool:
    """Whether this rank keeps the store; torchrun keeps it itself."""
    launcher_does = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return os.environ["RANK"] == "0" and not launcher_does


def _join_group(timeout_s: float) -> None:
    """Make torch's default group of all ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _job_store(timeout_s, host_it=_hosts_store())
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _ranks_by_name(store: PrefixStore, name: str, layout: Layout) -> dict[str, int]:
    """Every rank writes its name down and reads the others'."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size != layout.num_ranks:
        raise ValueError(
            f"the launcher started {size} ranks, the job has {layout.num_ranks}: a coordinator, "
            f"{layout.num_shards} shards and {layout.num_workers} workers"
        )
    store.set(f"rank/{rank}", name)
    found: dict[str, int] = {}
    for other in range(size):
        its = store.get(f"rank/{other}").decode()
        if its in found:
            raise ValueError(f"ranks {found[its]} and {other} are both {its}")
        found[its] = other
    return found


@contextmanager
def connect(layout: Layout, node: str = "", peer_timeout_s: float = 30.0) -> Iterator[Seat]:
    """This rank's seat in a job that torchrun, or `embroute train`, has started."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if variable not in os.environ:
            raise ValueError(
                f"{variable} is not set: start the program with torchrun, or use embroute train"
            )
    name = layout.name(node or socket.gethostname(), int(os.environ["LOCAL_RANK"]))
    _join_group(max(60.0, peer_timeout_s))
    # Connections of our own: torch's may block while the heartbeat must not.
    rank_of = _ranks_by_name(_job_store(peer_timeout_s), name, layout)
    workers = [f"worker{i}" for i in range(layout.num_workers)]
    plans, rows, dense, answers = _groups(rank_of, workers)
    seat = Seat(name, layout.num_workers, layout.num_shards, plans, rows, dense, answers)
    beat = Heartbeat(_job_store(peer_timeout_s), name, sorted(rank_of), peer_timeout_s)
    beat.hosts_store = _hosts_store()
    with beat:
        yield seat
    # Not after an error: taking the groups down would wait for the lost.
    dist.destroy_process_group()


def take_seat(settings: Settings) -> Seat:
    """This rank's seat until the process ends: by `nodes`, or all ranks on one node."""
    if "nodes" in settings:
        layout = Layout(settings["nodes"])
    else:
        shards = settings.get("shards", 1)
        workers = int(os.environ.get("WORLD_SIZE", 0)) - 1 - shards
        if workers < 1:
            raise ValueError(
                f"a job needs a coordinator, {shards} shards and at least one worker: start it "
                f"with torchrun --nproc-per-node {2 + shards} or more"
            )
        layout = on_one_node(workers, shards)
    stack = ExitStack()
    timeout_s = settings.get("peer_timeout", 30.0)
    seat = stack.enter_context(connect(layout, settings.get("node", ""), timeout_s))
    atexit.register(_leave, stack)
    return seat


def _leave(stack: ExitStack) -> None:
    """Say good-bye at the end of the process; after an error, just end it."""
    if hasattr(sys, "last_value"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    stack.close()
