"""Bytes through connected sockets: many messages at once, those of one peer in order.

Axes: M messages, P peers, D directions (in, out), K pieces of memory.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

import numba
import numpy as np
from numba import types

from embroute.kernels.array_types import I64, Bools
from embroute.kernels.jit import kernel

_call = types.int64(types.int32, types.uintp, types.int32)
_sendmsg: Any = types.ExternalFunction("sendmsg", _call)
_recvmsg: Any = types.ExternalFunction("recvmsg", _call)
_option = types.int32(types.int32, types.int32, types.int32, types.uintp, types.uint32)
_setsockopt: Any = types.ExternalFunction("setsockopt", _option)
_poll: Any = types.ExternalFunction("poll", types.int32(types.uintp, types.uintp, types.int32))
_pointer: Any = types.CPointer
_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_errno: Any = types.ExternalFunction("__errno_location", _pointer(types.int32)())
_carray: Any = numba.carray  # type: ignore[attr-defined]

FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0))
READABLE, WRITABLE = 1, 4  # of poll
INTERRUPTED, FULL = errno.EINTR, errno.EAGAIN
CLOSED = 0  # instead of an error's number: the other end has closed the connection

LEVEL, LEAST = int(socket.SOL_SOCKET), int(socket.SO_RCVLOWAT)
SMALLEST_WAKE_BYTES, LARGEST_WAKE_BYTES = (
    4096,
    1 << 20,
)  # bytes: of fewer any one wakes us, and more are not waited for together

IN, OUT = 0, 1
PEER, DIRECTION, ADDRESS, LEFT = range(4)  # of a message: the bytes that have not moved yet
# Of a peer: its socket, how many bytes of it wake us, and the nanoseconds we have waited for it.
FILE, WOKEN, WAITED = range(3)
DONE, LATER = -1, -2
STEADY = int(getattr(time, "CLOCK_MONOTONIC", 0))
IOVECS = 64  # of memory that one call to the system moves
# What sendmsg and recvmsg take, as words: pieces are at IOVEC, IOVLEN of them.
WORDS, IOVEC, IOVLEN = 7, 2, 3


@kernel
def _gather(message_M4: I64, m: int, piece_K2: I64) -> tuple[int, int]:
    """List what is left of a message and of those behind it that go the same way; number, bytes."""
    count, wanted = 0, 0
    for other in range(m, len(message_M4)):
        p, direction, address, left = message_M4[other]
        if p == message_M4[m, PEER] and direction == message_M4[m, DIRECTION] and left > 0:
            piece_K2[count] = address, left
            count += 1
            wanted += left
            if count == len(piece_K2):
                break
    return count, wanted


@kernel
def _moved(message_M4: I64, m: int, moved: int) -> None:
    """Take bytes off a message and those behind it that go the same way."""
    for other in range(m, len(message_M4)):
        p, direction, _, left = message_M4[other]
        if p == message_M4[m, PEER] and direction == message_M4[m, DIRECTION]:
            own = min(moved, left)
            message_M4[other, ADDRESS] += own
            message_M4[other, LEFT] -= own
            moved -= own
            if moved == 0:
                break


@kernel
def _move(message_M4: I64, m: int, fd: int) -> int:
    """Move as much of a message, and those behind it, as goes; an error's number, DONE or LATER."""
    piece_K2, header_7 = np.empty((IOVECS, 2), np.int64), np.zeros(WORDS, np.int64)
    header_7[IOVEC] = piece_K2.ctypes.data
    while True:
        header_7[IOVLEN], wanted = _gather(message_M4, m, piece_K2)
        if wanted == 0:
            return DONE
        if message_M4[m, DIRECTION] == OUT:
            moved = _sendmsg(fd, header_7.ctypes.data, FLAGS)
        else:
            moved = _recvmsg(fd, header_7.ctypes.data, FLAGS)
        if moved > 0:
            _moved(message_M4, m, moved)
            if moved < wanted:
                return LATER  # the system had no more, or no more room: asking again is in vain
        elif moved == 0:
            return CLOSED
        else:
            number = _carray(_errno(), 1)[0]
            if number == FULL:
                return LATER
            if number != INTERRUPTED:
                return int(number)


@kernel
def _push(message_M4: I64, peer_P3: I64, blocked_DP: Bools) -> tuple[int, int]:
    """Move what can be moved without waiting; a peer that is lost and why, or DONE.

    `blocked_DP`: peers whose next message waits; those that are marked are not tried.
    """
    for m in range(len(message_M4)):
        p, direction = message_M4[m, PEER], message_M4[m, DIRECTION]
        if message_M4[m, LEFT] > 0 and not blocked_DP[direction, p]:
            outcome = _move(message_M4[m:], 0, peer_P3[p, FILE])
            if outcome >= 0:
                return p, outcome
            blocked_DP[direction, p] = outcome == LATER
    return DONE, 0


@kernel
def _expect(message_M4: I64, peer_P3: I64) -> I64:
    """Let the system wake us when all that is awaited of a peer is there, not at every packet.

    Returns how many bytes that is.
    """
    wanted_P = np.zeros(len(peer_P3), np.int64)
    for m in range(len(message_M4)):
        if message_M4[m, DIRECTION] == IN:
            wanted_P[message_M4[m, PEER]] += message_M4[m, LEFT]
    value = np.empty(1, np.int32)
    for p in range(len(peer_P3)):
        value[0] = min(wanted_P[p], LARGEST_WAKE_BYTES) if wanted_P[p] > SMALLEST_WAKE_BYTES else 1
        if wanted_P[p] > 0 and value[0] != peer_P3[p, WOKEN]:
            peer_P3[p, WOKEN] = value[0]
            _setsockopt(peer_P3[p, FILE], LEVEL, LEAST, value.ctypes.data, np.uint32(4))
    return wanted_P


@kernel
def _now(reading_2: I64) -> int:
    """Nanoseconds of a clock that never goes back."""
    _clock(STEADY, reading_2.ctypes.data)
    return int(reading_2[0] * 1_000_000_000 + reading_2[1])


@kernel
def _wait(wanted_P: I64, peer_P3: I64, blocked_DP: Bools, timeout_ms: int) -> bool:
    """Wait until a blocked peer can go on, and unmark it; not if the time is over or a signal came.

    While something cannot leave, whatever comes is taken in, awaited or not: the other end may not
    read before it has sent. `asked_P2` is an array of struct pollfd: a file, what is asked, and
    above it what happened.
    """
    asked_P2, stuck = np.zeros((len(peer_P3), 2), np.int32), blocked_DP[OUT].any()
    for p in range(len(peer_P3)):
        comes = wanted_P[p] > 0 or (stuck and blocked_DP[IN, p])
        events = READABLE * comes + WRITABLE * blocked_DP[OUT, p]
        asked_P2[p, 0] = peer_P3[p, FILE] if events else -1  # which poll skips
        asked_P2[p, 1] = events
    reading_2 = np.empty(2, np.int64)
    began = _now(reading_2)
    ready = _poll(asked_P2.ctypes.data, np.uint64(len(peer_P3)), timeout_ms)
    spent = _now(reading_2) - began
    for p in range(len(peer_P3)):
        if wanted_P[p] > 0 or blocked_DP[OUT, p]:
            peer_P3[p, WAITED] += spent
    if ready <= 0:
        return False
    for p in range(len(peer_P3)):
        happened = asked_P2[p, 1] >> 16
        if happened & ~WRITABLE:  # an error too is met by trying
            blocked_DP[IN, p] = False
        if happened & ~READABLE:
            blocked_DP[OUT, p] = False
    return True


@kernel
def try_send(message_M4: I64, start: int, count: int, peer_P3: I64) -> tuple[int, int]:
    """Send what leaves without waiting; a peer that is lost and why, or DONE."""
    blocked_DP = np.zeros((2, len(peer_P3)), np.bool_)
    blocked_DP[IN] = True
    return _push(message_M4[start : start + count], peer_P3, blocked_DP)


@kernel
def progress(
    message_M4: I64, start: int, first: int, count: int, peer_P3: I64, timeout_ms: int
) -> tuple[int, int]:
    """Move messages until the first few are done; a peer that is lost and why, DONE, or LATER.

    Of the others what can be moved meanwhile.
    """
    message_M4 = message_M4[start : start + count]
    blocked_DP = np.zeros((2, len(peer_P3)), np.bool_)
    while message_M4[:first, LEFT].any():
        lost, why = _push(message_M4, peer_P3, blocked_DP)
        if lost >= 0:
            return lost, why
        if not message_M4[:first, LEFT].any():
            break
        wanted_P = _expect(message_M4[:first], peer_P3)
        if not _wait(wanted_P, peer_P3, blocked_DP, timeout_ms):
            return LATER, 0  # signals are Python's business
    return DONE, 0
