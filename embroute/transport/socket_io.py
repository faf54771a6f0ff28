"""Bytes through connected sockets: many messages at once, the messages of one peer in order.

The kernels call the C library directly (Linux, 64 bits), so a phase needs one call from Python.
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

# ssize_t sendmsg(int, struct msghdr *, int), int setsockopt(int, int, int, void *, socklen_t), ...
_message_signature = types.int64(types.int32, types.uintp, types.int32)
_sendmsg: Any = types.ExternalFunction("sendmsg", _message_signature)
_recvmsg: Any = types.ExternalFunction("recvmsg", _message_signature)
_option_signature = types.int32(types.int32, types.int32, types.int32, types.uintp, types.uint32)
_setsockopt: Any = types.ExternalFunction("setsockopt", _option_signature)
_poll: Any = types.ExternalFunction("poll", types.int32(types.uintp, types.uintp, types.int32))
_pointer: Any = types.CPointer
_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_errno: Any = types.ExternalFunction("__errno_location", _pointer(types.int32)())
_carray: Any = numba.carray  # type: ignore[attr-defined]

FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0))
READABLE, WRITABLE = 1, 4  # POLLIN and POLLOUT
INTERRUPTED, FULL = errno.EINTR, errno.EAGAIN
CLOSED = 0  # in place of an error number: the other end has closed the connection

LEVEL, LOW_WATER_MARK = int(socket.SOL_SOCKET), int(socket.SO_RCVLOWAT)
# A wait for fewer bytes ends at the first byte; a wait for more ends at every LARGEST_WAKE_BYTES.
SMALLEST_WAKE_BYTES, LARGEST_WAKE_BYTES = 4096, 1 << 20

IN, OUT = 0, 1
PEER, DIRECTION, ADDRESS, LEFT = range(4)  # columns of a message; LEFT: bytes still to move
# Columns of a peer: its file descriptor, its low-water mark, the nanoseconds spent waiting for it.
FILE, WAKE_BYTES, WAITED = range(3)
DONE, LATER = -1, -2
MONOTONIC = int(getattr(time, "CLOCK_MONOTONIC", 0))
IOVECS = 64  # pieces of memory that one system call moves
# A struct msghdr has seven words of 64 bits; word 2 points to the pieces, word 3 is their number.
WORDS, IOVEC, IOVLEN = 7, 2, 3


@kernel
def _gather(message_M4: I64, piece_K2: I64) -> tuple[int, int]:
    """List the rest of the first message and of later ones on its way; returns number, bytes."""
    count, wanted = 0, 0
    for m in range(len(message_M4)):
        p, direction, address, left = message_M4[m]
        if p == message_M4[0, PEER] and direction == message_M4[0, DIRECTION] and left > 0:
            piece_K2[count] = address, left
            count += 1
            wanted += left
            if count == len(piece_K2):
                break
    return count, wanted


@kernel
def _consume(message_M4: I64, num_bytes: int) -> None:
    """Take bytes that have moved off the first message and off later ones on its way."""
    for m in range(len(message_M4)):
        p, direction, _, left = message_M4[m]
        if p == message_M4[0, PEER] and direction == message_M4[0, DIRECTION]:
            moved = min(num_bytes, left)
            message_M4[m, ADDRESS] += moved
            message_M4[m, LEFT] -= moved
            num_bytes -= moved
            if num_bytes == 0:
                break


@kernel
def _move(message_M4: I64, fd: int) -> int:
    """Move the first message, and later ones on its way; an error number, DONE or LATER."""
    piece_K2, header_7 = np.empty((IOVECS, 2), np.int64), np.zeros(WORDS, np.int64)
    header_7[IOVEC] = piece_K2.ctypes.data
    while True:
        header_7[IOVLEN], wanted = _gather(message_M4, piece_K2)
        if wanted == 0:
            return DONE
        if message_M4[0, DIRECTION] == OUT:
            moved = _sendmsg(fd, header_7.ctypes.data, FLAGS)
        else:
            moved = _recvmsg(fd, header_7.ctypes.data, FLAGS)
        if moved > 0:
            _consume(message_M4, moved)
            if moved < wanted:
                return LATER  # the socket is empty, or full: another call would return EAGAIN
        elif moved == 0:
            return CLOSED
        else:
            number = _carray(_errno(), 1)[0]
            if number == FULL:
                return LATER
            if number != INTERRUPTED:
                return int(number)


@kernel
def _move_all(message_M4: I64, peer_P3: I64, blocked_DP: Bools) -> tuple[int, int]:
    """Move what can move without waiting; returns a lost peer and the reason, or DONE.

    `blocked_DP` marks peers whose next message must wait. Later messages must not overtake it, so a
    marked peer is not tried.
    """
    for m in range(len(message_M4)):
        p, direction = message_M4[m, PEER], message_M4[m, DIRECTION]
        if message_M4[m, LEFT] > 0 and not blocked_DP[direction, p]:
            outcome = _move(message_M4[m:], peer_P3[p, FILE])
            if outcome >= 0:
                return p, outcome
            blocked_DP[direction, p] = outcome == LATER
    return DONE, 0


@kernel
def _set_wake_bytes(message_M4: I64, peer_P3: I64) -> I64:
    """Set low-water marks, so that poll returns when all awaited bytes are there, not per packet.

    Returns how many bytes of each peer are awaited.
    """
    wanted_P = np.zeros(len(peer_P3), np.int64)
    for m in range(len(message_M4)):
        if message_M4[m, DIRECTION] == IN:
            wanted_P[message_M4[m, PEER]] += message_M4[m, LEFT]
    value = np.empty(1, np.int32)
    for p in range(len(peer_P3)):
        value[0] = min(wanted_P[p], LARGEST_WAKE_BYTES) if wanted_P[p] > SMALLEST_WAKE_BYTES else 1
        if wanted_P[p] > 0 and value[0] != peer_P3[p, WAKE_BYTES]:
            peer_P3[p, WAKE_BYTES] = value[0]
            _setsockopt(peer_P3[p, FILE], LEVEL, LOW_WATER_MARK, value.ctypes.data, np.uint32(4))
    return wanted_P


@kernel
def _now(reading_2: I64) -> int:
    """Nanoseconds of a clock that never goes back."""
    _clock(MONOTONIC, reading_2.ctypes.data)
    return int(reading_2[0] * 1_000_000_000 + reading_2[1])


@kernel
def _wait(wanted_P: I64, peer_P3: I64, blocked_DP: Bools, timeout_ms: int) -> bool:
    """Wait until a blocked peer can go on, and unmark it; False after the time-out or a signal.

    While some message cannot leave, every message that comes is taken in, awaited or not:
    otherwise two ranks that both send first would wait for each other for ever.
    """
    # A row is a struct pollfd: a file descriptor; events in the lower half of a word, and above
    # them what happened.
    pollfd_P2, stuck = np.zeros((len(peer_P3), 2), np.int32), blocked_DP[OUT].any()
    for p in range(len(peer_P3)):
        reads = wanted_P[p] > 0 or (stuck and blocked_DP[IN, p])
        events = READABLE * reads + WRITABLE * blocked_DP[OUT, p]
        pollfd_P2[p, 0] = peer_P3[p, FILE] if events else -1  # poll skips negative descriptors
        pollfd_P2[p, 1] = events
    reading_2 = np.empty(2, np.int64)
    began = _now(reading_2)
    ready = _poll(pollfd_P2.ctypes.data, np.uint64(len(peer_P3)), timeout_ms)
    spent = _now(reading_2) - began
    for p in range(len(peer_P3)):
        if wanted_P[p] > 0 or blocked_DP[OUT, p]:
            peer_P3[p, WAITED] += spent
    if ready <= 0:
        return False
    for p in range(len(peer_P3)):
        returned = pollfd_P2[p, 1] >> 16
        # POLLERR and POLLHUP unmark both directions: the next call then meets the error itself.
        if returned & ~WRITABLE:
            blocked_DP[IN, p] = False
        if returned & ~READABLE:
            blocked_DP[OUT, p] = False
    return True


@kernel
def try_send(message_M4: I64, start: int, count: int, peer_P3: I64) -> tuple[int, int]:
    """Send what leaves without waiting; returns a lost peer and the reason, or DONE."""
    blocked_DP = np.zeros((2, len(peer_P3)), np.bool_)
    blocked_DP[IN] = True  # receives begin in `progress`
    return _move_all(message_M4[start : start + count], peer_P3, blocked_DP)


@kernel
def progress(
    message_M4: I64, start: int, required: int, count: int, peer_P3: I64, timeout_ms: int
) -> tuple[int, int]:
    """Move messages until the first `required` are done; later ones move if they can.

    Returns a lost peer and the reason, DONE, or LATER after a time-out or a signal.
    """
    message_M4 = message_M4[start : start + count]
    blocked_DP = np.zeros((2, len(peer_P3)), np.bool_)
    while message_M4[:required, LEFT].any():
        lost, reason = _move_all(message_M4, peer_P3, blocked_DP)
        if lost >= 0:
            return lost, reason
        if not message_M4[:required, LEFT].any():
            break
        wanted_P = _set_wake_bytes(message_M4[:required], peer_P3)
        if not _wait(wanted_P, peer_P3, blocked_DP, timeout_ms):
            return LATER, 0  # Python must run its signal handlers
    return DONE, 0
