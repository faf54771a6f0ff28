"""Ranks as threads of one process: messages through mailboxes, sums in rank order."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from embroute.kernels.array_types import U8
from embroute.transport.interface import LostPeerError, Message, Work


@dataclass
class InProcessNetwork:
    """What the ranks of one process share: a mailbox for each pair, and sums in progress."""

    boxes: dict[tuple[str, str, str], queue.SimpleQueue[U8 | None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    broken: threading.Event = field(default_factory=threading.Event)
    common: dict[int, U8] = field(default_factory=dict)

    def box(self, channel: str, source: str, goal: str) -> queue.SimpleQueue[U8 | None]:
        """Messages on their way from one rank to another."""
        with self.lock:
            return self.boxes.setdefault((channel, source, goal), queue.SimpleQueue())

    def memory(self, number: int, size: int) -> U8:
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
class InProcessChannel:
    """The same between threads of one process; sums are taken in the order of `members`."""

    hub: InProcessNetwork
    name: str
    me: str
    members: tuple[str, ...] = ()
    waited_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def submit(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Messages are copied into the other rank's mailbox at once; `wait` takes them out."""
        for peer, data in sends:
            self.hub.box(self.name, self.me, peer).put(data.copy())
        return InProcessWork(self, receives)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post everything, and wait for it."""
        self.submit(sends, receives).wait()

    def close(self) -> None:
        """Mailboxes go with their hub."""

    def take(self, peer: str, data: U8) -> None:
        """Wait for the next message of a peer."""
        began = time.perf_counter()
        data[:] = self._take(peer, len(data))
        self.waited_s[peer] += time.perf_counter() - began

    def _take(self, peer: str, size: int) -> U8:
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
            self.exchange([(first, data)], [(first, data)])
            return
        other = torch.empty_like(flat)
        for peer in self.members[1:]:
            self.exchange([], [(peer, other.numpy().view(np.uint8))])
            flat += other
        self.exchange([(peer, data) for peer in self.members[1:]], [])


@dataclass(frozen=True)
class InProcessWork:
    """Messages that a rank of the same process waits for."""

    channel: InProcessChannel
    receives: Sequence[Message]

    def wait(self) -> None:
        """Take each out of its mailbox."""
        for peer, data in self.receives:
            self.channel.take(peer, data)
