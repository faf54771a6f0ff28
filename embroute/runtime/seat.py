"""A rank's place in the job: its name, and its channels to the others."""

from __future__ import annotations

from dataclasses import dataclass

from embroute.runtime.exchange import Channel, Sums
from embroute.runtime.inbox import COORDINATOR
from embroute.runtime.mail import Mail


@dataclass(frozen=True)
class Seat:
    """Who a rank is. Each channel is used by one thread only."""

    name: str
    num_workers: int
    num_shards: int
    plans: Channel  # from the coordinator to everyone
    rows: Mail  # between shards and workers
    dense: Sums  # sums over the workers
    answers: Channel  # from everyone to the coordinator
    star: Channel  # between the first shard and the workers: sums that go by way of it

    @property
    def workers(self) -> list[str]:
        """Names of the workers, in order."""
        return [f"worker{i}" for i in range(self.num_workers)]

    @property
    def shards(self) -> list[str]:
        """Names of the shards, in order."""
        return [f"shard{i}" for i in range(self.num_shards)]

    @property
    def role(self) -> str:
        """coordinator, shard or worker."""
        return self.name.rstrip("0123456789")

    @property
    def index(self) -> int:
        """Number among the ranks of the same role."""
        digits = self.name[len(self.role) :]
        return int(digits) if digits else 0

    @property
    def peers(self) -> list[str]:
        """Everyone but the coordinator."""
        return [*self.shards, *self.workers]


def names(num_workers: int, num_shards: int) -> list[str]:
    """All ranks of a job."""
    workers = [f"worker{i}" for i in range(num_workers)]
    return [COORDINATOR, *(f"shard{i}" for i in range(num_shards)), *workers]
