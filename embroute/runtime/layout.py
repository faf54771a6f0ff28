"""Which rank is what: roles by name, from a run file or from counts, never from RANK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embroute.runtime.inbox import COORDINATOR
from embroute.runtime.seat import names


@dataclass(frozen=True)
class Layout:
    """The ranks on every node, in the order of their local numbers."""

    nodes: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        every = [name for ranks in self.nodes.values() for name in ranks]
        doubled = {name for name in every if every.count(name) > 1}
        if doubled:
            raise ValueError(f"nodes: {sorted(doubled)[0]} is given twice")
        expected = names(self.num_workers, self.num_shards)
        if sorted(every) != sorted(expected):
            wrong = sorted(set(every) ^ set(expected))
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
    def num_homes(self) -> int:
        """Nodes with a shard or a worker."""
        return sum(any(name != COORDINATOR for name in ranks) for ranks in self.nodes.values())

    @property
    def num_ranks(self) -> int:
        """All ranks of the job."""
        return sum(len(ranks) for ranks in self.nodes.values())

    def name(self, node: str, local_rank: int) -> str:
        """Who the rank with this local number on a node is."""
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


def on_one_node(num_workers: int, num_shards: int) -> Layout:
    """All ranks on one machine."""
    for option, count in (("workers", num_workers), ("shards", num_shards)):
        if count < 1:
            raise ValueError(f"--{option} must be at least 1, got {count}")
    return Layout({"localhost": names(num_workers, num_shards)})
