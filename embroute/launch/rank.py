"""Identities of ranks: their names, roles and nodes, and a rank's channels to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embroute.transport.allreduce import AllReduce
from embroute.transport.interface import Channel

COORDINATOR = "coordinator"


def worker_names(count: int) -> list[str]:
    """Names of the workers, in order."""
    return [f"worker{i}" for i in range(count)]


def shard_names(count: int) -> list[str]:
    """Names of the shards, in order."""
    return [f"shard{i}" for i in range(count)]


def rank_names(num_workers: int, num_shards: int) -> list[str]:
    """All ranks of a job."""
    return [COORDINATOR, *shard_names(num_shards), *worker_names(num_workers)]


def role_and_index(name: str) -> tuple[str, int]:
    """The role of a rank, and its number among the ranks of that role."""
    role = name.rstrip("0123456789")
    return role, int(name[len(role) :] or 0)


@dataclass(frozen=True)
class RankContext:
    """A rank's identity and channels. Only one thread uses each channel."""

    name: str
    num_workers: int
    num_shards: int
    control: Channel  # from the coordinator to all other ranks
    rows: Channel  # between shards and workers
    allreduce: AllReduce  # sums over the workers
    replies: Channel  # from all other ranks to the coordinator
    central: Channel  # between the first shard and the workers: sums at the first shard

    @property
    def workers(self) -> list[str]:
        """Names of the workers, in order."""
        return worker_names(self.num_workers)

    @property
    def shards(self) -> list[str]:
        """Names of the shards, in order."""
        return shard_names(self.num_shards)

    @property
    def role(self) -> str:
        """coordinator, shard or worker."""
        return role_and_index(self.name)[0]

    @property
    def index(self) -> int:
        """Number among the ranks of the same role."""
        return role_and_index(self.name)[1]

    @property
    def peers(self) -> list[str]:
        """All ranks but the coordinator."""
        return [*self.shards, *self.workers]


@dataclass(frozen=True)
class RankTopology:
    """The ranks on every node, in the order of their local numbers."""

    nodes: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        names = [name for ranks in self.nodes.values() for name in ranks]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"nodes: {sorted(repeated)[0]} is given twice")
        expected = rank_names(self.num_workers, self.num_shards)
        if sorted(names) != sorted(expected):
            wrong = sorted(set(names) ^ set(expected))
            raise ValueError(
                f"nodes: expected coordinator, shard0, shard1 ... and worker0, worker1 ... without "
                f"gaps; see {', '.join(wrong)}"
            )

    def _count(self, role: str) -> int:
        return sum(
            name.startswith(role) and name[len(role) :].isdigit()
            for ranks in self.nodes.values()
            for name in ranks
        )

    @property
    def num_workers(self) -> int:
        """Workers of the job."""
        return self._count("worker")

    @property
    def num_shards(self) -> int:
        """Shards of the job."""
        return self._count("shard")

    @property
    def num_row_nodes(self) -> int:
        """Nodes with a shard or a worker, which hold rows."""
        return self._num_nodes("shard", "worker")

    @property
    def num_worker_nodes(self) -> int:
        """Nodes with a worker."""
        return self._num_nodes("worker")

    def _num_nodes(self, *roles: str) -> int:
        return sum(any(name.startswith(roles) for name in ranks) for ranks in self.nodes.values())

    @property
    def num_ranks(self) -> int:
        """All ranks of the job."""
        return sum(len(ranks) for ranks in self.nodes.values())

    def name(self, node: str, local_rank: int) -> str:
        """The name of the rank with this local number on a node."""
        if len(self.nodes) == 1:
            (ranks,) = self.nodes.values()
        elif node in self.nodes:
            ranks = self.nodes[node]
        else:
            raise ValueError(
                f"this machine is {node!r}, the run file has nodes {', '.join(self.nodes)}; say "
                f"which one it is with --node-name"
            )
        if not 0 <= local_rank < len(ranks):
            raise ValueError(
                f"node {node!r} has {len(ranks)} ranks in the run file, the launcher started a "
                f"rank number {local_rank} on it: use --nproc-per-node {len(ranks)}"
            )
        return ranks[local_rank]


def on_one_node(num_workers: int, num_shards: int) -> RankTopology:
    """All ranks on one machine."""
    for option, count in (("workers", num_workers), ("shards", num_shards)):
        if count < 1:
            raise ValueError(f"--{option} must be at least 1, got {count}")
    return RankTopology({"localhost": rank_names(num_workers, num_shards)})
