"""Messages over torch's Gloo process groups."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from embroute.transport.interface import LostPeerError, Message, Work


@dataclass(frozen=True)
class GlooWork:
    """Gloo's handles, each with its peer; all must be kept until they have been waited for."""

    waiting: list[tuple[str, dist.Work | None]]
    waited_s: defaultdict[str, float]

    def wait(self) -> None:
        """Return when all messages have left or arrived."""
        for peer, work in self.waiting:
            began = time.perf_counter()
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise LostPeerError(f"lost {peer}: {_reason(error)}") from None
            self.waited_s[peer] += time.perf_counter() - began


@dataclass(frozen=True)
class GlooChannel:
    """A process group of torch.distributed."""

    group: dist.ProcessGroup
    rank_of: dict[str, int]
    waited_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def submit(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Submit the receives first: Gloo completes a send only once its receive is submitted."""
        waiting: list[tuple[str, dist.Work | None]] = []
        peer = ""
        try:
            for peer, data in receives:
                source = self.rank_of[peer]
                waiting.append((peer, dist.irecv(torch.from_numpy(data), source, self.group)))
            for peer, data in sends:
                target = self.rank_of[peer]
                waiting.append((peer, dist.isend(torch.from_numpy(data), target, self.group)))
        except RuntimeError as error:
            raise LostPeerError(f"lost {peer}: {_reason(error)}") from None
        return GlooWork(waiting, self.waited_s)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages."""
        self.submit(sends, receives).wait()

    def close(self) -> None:
        """Nothing: torch ends all process groups together."""

    in_memory = False

    def sum(self, flat: torch.Tensor) -> None:
        """All-reduce a flat tensor."""
        try:
            dist.all_reduce(flat, group=self.group)
        except RuntimeError as error:
            raise LostPeerError(f"lost a worker: {_reason(error)}") from None


def _reason(error: RuntimeError) -> str:
    """The first sentence of a Gloo error, without its source file and advice."""
    text = re.sub(r"^\[[^]]*\]\s*", "", str(error).splitlines()[0])
    return text.partition(". ")[0]
