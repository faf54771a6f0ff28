"""Join a torchrun job: find out who this rank is, and open its channels to the others."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from embroute.runtime.ending import end_clearly
from embroute.runtime.exchange import Channel, GlooChannel, LostPeerError, Sums
from embroute.runtime.heartbeat import Heartbeat
from embroute.runtime.layout import Layout, on_one_node
from embroute.runtime.links import Links, open_channels
from embroute.runtime.mail import CopiedMail, Mail
from embroute.runtime.seat import Seat, names
from embroute.runtime.settings import Settings
from embroute.runtime.slabs import offer, take_offer
from embroute.runtime.streams import StreamChannel
from embroute.runtime.sums import FEW, is_near, shared_sums

EXCHANGE, SOCKETS, GLOO = "EMBROUTE_EXCHANGE", "sockets", "gloo"
CONNECT_S = 60.0
YIELDING = 10  # niceness: plans are made ahead, so those who train on the same cores come first
TRANSFER_TIMEOUT = timedelta(hours=2)  # liveness is the heartbeat's business
# Of glibc's mallopt: from which size on memory goes back at once, and how much the heap keeps.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
LARGEST_KEPT, HEAP_KEPT = 1 << 25, 1 << 28  # bytes; glibc takes no larger threshold than the first


def _group(rank_of: dict[str, int], members: list[str]) -> GlooChannel:
    """A process group of some ranks; all others have to take part in making it."""
    ranks = [rank_of[name] for name in members]
    group = dist.new_group(ranks, timeout=TRANSFER_TIMEOUT, backend="gloo")
    return GlooChannel(group, rank_of)


def _links(layout: Layout) -> Links:
    """Who listens to whom; nobody calls a rank that comes after it."""
    coordinator, *others = names(layout.num_workers, layout.num_shards)
    shards, workers = others[: layout.num_shards], others[layout.num_shards :]
    stars = [(coordinator, other) for other in others]
    links = {
        "plans": stars,
        "rows": list(itertools.product(shards, workers)),
        "answers": stars,
        "star": [(shards[0], worker) for worker in workers],
    }
    if 1 < len(workers) <= FEW:
        links["sums"] = list(itertools.combinations(workers, 2))
    return links


def _channels(name: str, rank_of: dict[str, int], layout: Layout) -> Mapping[str, Channel]:
    """This rank's channels: sockets of our own, or torch's groups where those cannot be used."""
    links, means = _links(layout), os.environ.get(EXCHANGE) or SOCKETS
    if means not in (SOCKETS, GLOO):
        raise ValueError(f"{EXCHANGE} must be {SOCKETS} or {GLOO}, got {means!r}")
    if means == SOCKETS and sys.platform == "linux":
        return open_channels(_job_store(CONNECT_S), name, links, CONNECT_S)
    return {kind: _group(rank_of, sorted(rank_of)) for kind in links if kind != "sums"}


def _sums(name: str, dense: GlooChannel, found: Mapping[str, Channel]) -> Sums:
    """What adds up over workers: memory of one host, or torch's group."""
    near = found.get("sums")
    if not (name.startswith("worker") and isinstance(near, StreamChannel)):
        return dense
    return shared_sums(dense, near, int(name.removeprefix("worker")), CONNECT_S)


def _mail(name: str, layout: Layout, rows: Channel) -> Mail:
    """What carries rows: memory if all who hold rows are on one host, else the connections.

    Both ends of a connection must know, so everyone writes down what its connections are.
    """
    _, *others = names(layout.num_workers, layout.num_shards)
    if name not in others or not isinstance(rows, StreamChannel):
        return CopiedMail(rows)
    store = _job_store(CONNECT_S)
    store.set(f"near/{name}", str(is_near(rows)))
    if not all(store.get(f"near/{other}") == str(True).encode() for other in others):
        return CopiedMail(rows)
    if name.startswith("shard"):
        return offer(name, rows)
    return take_offer(name, rows, CONNECT_S)


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
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    except dist.DistStoreError:
        raise LostPeerError(
            f"not all of the {size} ranks have come within {timeout_s:.0f} s; what the others say "
            f"tells why"
        ) from None


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
def connect(layout: Layout, node: str = "", peer_timeout_s: float = 30.0) -> Iterator[Seat]:
    """This rank's seat in a job that torchrun, or `embroute train`, has started."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if variable not in os.environ:
            raise ValueError(
                f"{variable} is not set: start the program with torchrun, or use embroute train"
            )
    name = layout.name(node or socket.gethostname(), int(os.environ["LOCAL_RANK"]))
    if name == names(layout.num_workers, layout.num_shards)[0]:
        os.nice(YIELDING)
    keep_memory()
    _join_group(max(60.0, peer_timeout_s))
    # Connections of our own: torch's may block while the heartbeat must not.
    rank_of = _ranks_by_name(_job_store(peer_timeout_s), name, layout)
    beat = Heartbeat(_job_store(peer_timeout_s), name, sorted(rank_of), peer_timeout_s)
    beat.hosts_store = _hosts_store()
    with beat:
        dense = _group(rank_of, [f"worker{i}" for i in range(layout.num_workers)])
        found = _channels(name, rank_of, layout)
        plans, rows, answers, star = (found[kind] for kind in ("plans", "rows", "answers", "star"))
        sums = _sums(name, dense, found)
        mail = _mail(name, layout, rows)
        yield Seat(name, layout.num_workers, layout.num_shards, plans, mail, sums, answers, star)
    # Not after an error: taking the groups down would wait for the lost.
    for channel in found.values():
        channel.close()
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
    end_clearly(seat.name)
    return seat


def _leave(stack: ExitStack) -> None:
    """Say good-bye at the end of the process; after an error, just end it."""
    if hasattr(sys, "last_value"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    stack.close()
