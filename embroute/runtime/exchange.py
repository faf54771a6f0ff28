"""How bytes get from rank to rank: one interface, over Gloo, sockets or within one process.

A channel belongs to one thread of each rank. Ranks are addressed by name.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Bytes = npt.NDArray[np.uint8]
Message = tuple[str, Bytes]  # the other rank, and the bytes to send or to fill


class LostPeerError(RuntimeError):
    """Another rank is gone, or cannot be reached."""


class Posted(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Return when every one has left or arrived."""
        ...


class Channel(Protocol):
    """Point-to-point messages whose sizes both ends know."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Begin to send and receive; messages between two ranks arrive in the order posted.

        Their bytes must be left alone until `wait` returns. Posting a phase before the one ahead
        of it is done keeps links busy.
        """
        ...

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages; returns when every one has left or arrived."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer, while others may have been awaited too."""
        ...

    def close(self) -> None:
        """Nothing is sent any more."""
        ...


class Sums(Channel, Protocol):
    """A channel whose ranks can also add up what each of them has."""

    @property
    def in_memory(self) -> bool:
        """Whether sums use no link."""
        ...

    def sum(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the channel's ranks."""
        ...


@dataclass(frozen=True)
class GlooPosted:
    """Handles of Gloo's, each with its peer; none may be dropped before it was waited for."""

    waiting: list[tuple[str, dist.Work | None]]
    waited_s: defaultdict[str, float]

    def wait(self) -> None:
        """Wait for each."""
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

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Receives are posted first: a send is complete only once its receive was posted.

        Through torch's functions, which know a rank's number within a group of some ranks.
        """
        waiting: list[tuple[str, dist.Work | None]] = []
        peer = ""
        try:
            for peer, data in receives:
                source = self.rank_of[peer]
                waiting.append((peer, dist.irecv(torch.from_numpy(data), source, self.group)))
            for peer, data in sends:
                goal = self.rank_of[peer]
                waiting.append((peer, dist.isend(torch.from_numpy(data), goal, self.group)))
        except RuntimeError as error:
            raise LostPeerError(f"lost {peer}: {_reason(error)}") from None
        return GlooPosted(waiting, self.waited_s)

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post everything, and wait for it."""
        self.post(sends, receives).wait()

    def close(self) -> None:
        """All process groups end together, with torch's own."""

    in_memory = False

    def sum(self, flat: torch.Tensor) -> None:
        """One all-reduce of a flat tensor."""
        try:
            dist.all_reduce(flat, group=self.group)
        except RuntimeError as error:
            raise LostPeerError(f"lost a worker: {_reason(error)}") from None


def _reason(error: RuntimeError) -> str:
    """The telling part of one of Gloo's messages, without its source file and advice."""
    text = re.sub(r"^\[[^]]*\]\s*", "", str(error).splitlines()[0])
    return text.partition(". ")[0]


@dataclass
class Hub:
    """What the ranks of one process share: a mailbox for each pair, and sums in progress."""

    boxes: dict[tuple[str, str, str], queue.SimpleQueue[Bytes | None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    broken: threading.Event = field(default_factory=threading.Event)
    common: dict[int, Bytes] = field(default_factory=dict)

    def box(self, channel: str, source: str, goal: str) -> queue.SimpleQueue[Bytes | None]:
        """Messages on their way from one rank to another."""
        with self.lock:
            return self.boxes.setdefault((channel, source, goal), queue.SimpleQueue())

    def memory(self, number: int, size: int) -> Bytes:
        """Zeros that every rank gets who asks for this number."""
        with self.lock:
            return self.common.setdefault(number, np.zeros(size, np.uint8))

    def abort(self) -> None:
        """Wake every rank that waits: one of them failed."""
        self.broken.set()
        with self.lock:
            for box in self.boxes.values():
                box.put(None)


@dataclass(frozen=True)
class LocalChannel:
    """The same between threads of one process; sums are taken in the order of `members`."""

    hub: Hub
    name: str
    me: str
    members: tuple[str, ...] = ()
    waited_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Messages are copied into the other rank's mailbox at once; `wait` takes them out."""
        for peer, data in sends:
            self.hub.box(self.name, self.me, peer).put(data.copy())
        return LocalPosted(self, receives)

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post everything, and wait for it."""
        self.post(sends, receives).wait()

    def close(self) -> None:
        """Mailboxes go with their hub."""

    def take(self, peer: str, data: Bytes) -> None:
        """Wait for the next message of a peer."""
        began = time.perf_counter()
        data[:] = self._take(peer, len(data))
        self.waited_s[peer] += time.perf_counter() - began

    def _take(self, peer: str, size: int) -> Bytes:
        box = self.hub.box(self.name, peer, self.me)
        if self.hub.broken.is_set():
            raise LostPeerError(f"lost {peer}: another rank failed")
        message = box.get()
        if message is None:
            raise LostPeerError(f"lost {peer}: another rank failed")
        if len(message) != size:
            raise RuntimeError(
                f"{peer} sent {self.me} {len(message)} bytes on {self.name}, expected {size}"
            )
        return message

    in_memory = False

    def sum(self, flat: torch.Tensor) -> None:
        """The first member adds up what the others send, and sends back the sum."""
        data, first = flat.numpy().view(np.uint8), self.members[0]
        if self.me != first:
            self.swap([(first, data)], [(first, data)])
            return
        other = torch.empty_like(flat)
        for peer in self.members[1:]:
            self.swap([], [(peer, other.numpy().view(np.uint8))])
            flat += other
        self.swap([(peer, data) for peer in self.members[1:]], [])


@dataclass(frozen=True)
class LocalPosted:
    """Messages that a rank of the same process waits for."""

    channel: LocalChannel
    receives: Sequence[Message]

    def wait(self) -> None:
        """Take each out of its mailbox."""
        for peer, data in self.receives:
            self.channel.take(peer, data)
