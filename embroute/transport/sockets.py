"""Messages over the job's own connections: non-blocking sockets driven by a compiled kernel.

Gloo takes 0.15 ms and two changes of thread for every message, and a step has several.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import Array, addressof, c_char
from dataclasses import dataclass
from struct import Struct
from typing import cast

import numpy as np

from embroute.kernels.array_types import U8
from embroute.transport.interface import LostPeerError, Message
from embroute.transport.socket_io import CLOSED, IN, LATER, OUT, WAITED, progress, try_send

SLICE_MS = 200  # the kernel waits this long at most, then Python handles signals
MESSAGES_AT_FIRST = 64  # capacity of a new message table; it grows as needed
# Numpy's own way to give an address takes four times as long.
_memory = cast(Callable[[U8], Array[c_char]], (c_char * 0).from_buffer)
_entry = Struct("4q")  # PEER, DIRECTION, ADDRESS, LEFT of a message in the kernel's table


@dataclass(slots=True)
class SocketWork:
    """Submitted messages."""

    channel: SocketChannel
    end: int  # how many messages the channel had ever been given, these included

    def wait(self) -> None:
        """Return when these and all earlier messages have left or arrived."""
        self.channel.progress(self.end)


class SocketChannel:
    """Sockets to some other ranks. One thread only.

    Ranks that share cores find cold processor caches at every phase, so Python does little here.
    """

    def __init__(self, sockets: dict[str, socket.socket]) -> None:
        self.names = list(sockets)
        self.sockets = list(sockets.values())
        self._index = {name: i for i, name in enumerate(self.names)}
        peers = [(sock.fileno(), 1, 0) for sock in self.sockets]
        self._peer_P3 = np.array(peers, np.int64).reshape(-1, 3)
        self._message_M4 = np.zeros((MESSAGES_AT_FIRST, 4), np.int64)
        self._table = self._message_M4.data.cast("B")
        # The table's entries from `_start` on are messages that nobody has waited for yet, one for
        # each array of `_kept`, which keeps the memory alive that the kernel sees as an address.
        self._start = 0
        self._kept: list[U8] = []
        self._completed = 0  # messages that ever left the table
        self._fault = ""  # why the channel was aborted

    def socket_of(self, peer: str) -> socket.socket:
        """The socket to a peer."""
        return self.sockets[self._index[peer]]

    def submit(self, sends: Sequence[Message], receives: Sequence[Message]) -> SocketWork:
        """Begin to send and receive; what fits the sockets' buffers leaves at once."""
        end = self._add(sends, receives)
        if sends:
            count = len(self._kept)
            lost, reason = try_send(self._message_M4, self._start, count, self._peer_P3)
            if lost >= 0:
                self._raise_lost(lost, reason)
        return SocketWork(self, end)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages."""
        self.progress(self._add(sends, receives))

    @property
    def waited_s(self) -> dict[str, float]:
        """Seconds spent waiting for each peer, while others may have been awaited too."""
        return dict(zip(self.names, (1e-9 * self._peer_P3[:, WAITED]).tolist(), strict=True))

    def close(self) -> None:
        """Close every socket."""
        for sock in self.sockets:
            sock.close()

    def abort(self, reason: str) -> None:
        """From any thread: let the owner, which may wait for ever, meet a LostPeerError."""
        self._fault = reason
        for sock in self.sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def progress(self, end: int) -> None:
        """Move messages until the first `end` of all have left or arrived."""
        required = end - self._completed
        if required <= 0:
            return
        lost, start, count = LATER, self._start, len(self._kept)
        while lost == LATER:
            lost, reason = progress(
                self._message_M4, start, required, count, self._peer_P3, SLICE_MS
            )
        if lost >= 0:
            self._raise_lost(lost, reason)
        del self._kept[:required]
        self._completed = end
        self._start = start + required if required < count else 0

    def _add(self, sends: Sequence[Message], receives: Sequence[Message]) -> int:
        """Put messages at the end of the table; returns how many it has ever had."""
        kept, index, size = self._kept, self._index, _entry.size
        used = self._start + len(kept)
        if used + len(sends) + len(receives) > len(self._message_M4):
            used = self._make_room(len(sends) + len(receives))
        table, at = self._table, size * used
        for messages, direction in ((sends, OUT), (receives, IN)):
            for peer, data in messages:
                try:
                    address = addressof(_memory(data))
                except TypeError as error:
                    raise ValueError(f"a message for {peer}: {error}") from None
                _entry.pack_into(table, at, index[peer], direction, address, data.nbytes)
                at += size
                kept.append(data)
        return self._completed + len(kept)

    def _make_room(self, more: int) -> int:
        """Move unfinished messages to the beginning of a larger table; returns their number."""
        count = len(self._kept)
        unfinished_M4 = self._message_M4[self._start : self._start + count]
        self._message_M4 = np.zeros((max(MESSAGES_AT_FIRST, 2 * (count + more)), 4), np.int64)
        self._message_M4[:count] = unfinished_M4
        self._table, self._start = self._message_M4.data.cast("B"), 0
        return count

    def _raise_lost(self, peer: int, reason: int) -> None:
        if self._fault:
            raise LostPeerError(self._fault)
        closed = reason == CLOSED
        text = "connection closed by the other end" if closed else os.strerror(reason)
        raise LostPeerError(f"lost {self.names[peer]}: {text}")
