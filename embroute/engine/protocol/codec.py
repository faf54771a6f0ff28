"""Messages as bytes. A head of fixed size comes first: a reader learns from it what follows.

A body has a table with the type and length of each array, then the arrays. The whole numbers of a
message are its first array. Two checksums, of the head and of the body, find every damaged bit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast, get_args, get_type_hints

import numpy as np
import xxhash

from embroute.engine.protocol.messages import ControlMessage, step_of_message
from embroute.kernels.array_types import U8, Array
from embroute.transport.interface import MessageError

PROTOCOL_VERSION = 1
MAX_BODY_BYTES = 1 << 31  # a reader allocates no more
_MAGIC = b"embr"
_HEAD = struct.Struct("<4sHHqqQ")  # magic, version, kind, step, bytes and checksum of the body
FRAME_HEAD_BYTES = _HEAD.size + 8  # and the checksum of the head itself
_ALIGN = 8  # bytes: arrays begin at multiples, so that a reader needs no copy

_KINDS = get_args(ControlMessage)  # a kind's number is its place here
_DTYPES = tuple(np.dtype(code) for code in "?bBhHiIqQefdFD")
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NUMBERS, _TEXT = np.dtype(np.int64), np.dtype(np.uint8)


class Head(NamedTuple):
    """What a reader knows of a message before its body."""

    peer: str  # who sent it
    kind: int
    step: int
    body_bytes: int
    checksum: int

    def error(self, fault: str) -> MessageError:
        """The error of a message with a fault."""
        kind = _KINDS[self.kind].__name__ if self.kind < len(_KINDS) else f"kind {self.kind}"
        return MessageError(f"{self.peer} sent {kind} of step {self.step}: {fault}")


@dataclass(frozen=True)
class _Field:
    """A field of a message: a number, a text, an array, or a nested tuple of fields."""

    form: type
    dtype: np.dtype[np.generic] | None = None  # of an array; None: of any type
    fields: tuple[_Field, ...] = ()

    def dtypes(self) -> Iterator[np.dtype[np.generic] | None]:
        """Types of all arrays in the order of the wire."""
        if self.form not in (int, str, np.ndarray):
            for field in self.fields:
                yield from field.dtypes()
        elif self.form is not int:
            yield self.dtype

    def count_numbers(self) -> int:
        """How many whole numbers there are."""
        return (self.form is int) + sum(field.count_numbers() for field in self.fields)

    def build(self, numbers: Iterator[int], arrays: Iterator[Array]) -> object:
        """The value of the field, out of the numbers and arrays that come next."""
        if self.form is int:
            return next(numbers)
        if self.form is str:
            return next(arrays).tobytes().decode()
        if self.form is np.ndarray:
            return next(arrays)
        return self.form(*(field.build(numbers, arrays) for field in self.fields))


def _field_of(hint: object) -> _Field:
    """The form of a field from its annotation: I32, for example, is an array of int32."""
    if hint is int:
        return _Field(int)
    if hint is str:
        return _Field(str, _TEXT)
    if isinstance(hint, type):
        return _Field(hint, fields=tuple(map(_field_of, get_type_hints(hint).values())))
    (scalar,) = get_args(get_args(hint)[1])
    return _Field(np.ndarray, None if scalar is np.generic else np.dtype(scalar))


_FIELDS = tuple(map(_field_of, _KINDS))
_TYPES = tuple((_NUMBERS, *field.dtypes()) for field in _FIELDS)  # of the arrays of each kind


def _flatten(value: tuple[object, ...], numbers: list[int], arrays: list[Array]) -> None:
    """Add the numbers and arrays of a message to the lists."""
    for field in value:
        if isinstance(field, tuple):
            _flatten(field, numbers, arrays)
        elif isinstance(field, np.ndarray):
            arrays.append(field)
        elif isinstance(field, str):
            arrays.append(np.frombuffer(field.encode(), _TEXT))
        else:
            numbers.append(cast(int, field))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def encode(message: ControlMessage) -> tuple[U8, U8]:
    """Head and body of a message."""
    kind, numbers, arrays = _KINDS.index(type(message)), list[int](), list[Array]()
    _flatten(message, numbers, arrays)
    arrays.insert(0, np.array(numbers, _NUMBERS))
    first = 16 * len(arrays)
    size = first + sum(_aligned(array.nbytes) for array in arrays)
    step = step_of_message(message)
    if size > MAX_BODY_BYTES:
        name = type(message).__name__
        raise ValueError(
            f"a {name} of step {step} has {size} bytes, at most {MAX_BODY_BYTES} can be sent"
        )
    body, table = np.empty(size, np.uint8), list[int]()
    for number, array in enumerate(arrays):
        # The place of a field stands beside its type, so that fields cannot change places.
        table += (number << 8) + _CODES[array.dtype], array.size
        last, next_first = first + array.nbytes, first + _aligned(array.nbytes)
        body[first:last] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        body[last:next_first] = 0
        first = next_first
    body[: 8 * len(table)].view(np.int64)[:] = table
    head = _HEAD.pack(
        _MAGIC, PROTOCOL_VERSION, kind, step, size, xxhash.xxh3_64_intdigest(body.data)
    )
    head += xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")
    return np.frombuffer(bytearray(head), np.uint8), body


def decode_head(data: U8, peer: str) -> Head:
    """Read and check a head; what it announces may be allocated."""
    if len(data) != FRAME_HEAD_BYTES:
        raise MessageError(f"{peer} sent a head of {len(data)} bytes, expected {FRAME_HEAD_BYTES}")
    magic, version, *rest = _HEAD.unpack_from(data.data)
    head = Head(peer, *rest)
    if magic != _MAGIC:
        raise head.error(f"it begins with {magic!r}, not with {_MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise head.error(
            f"it has version {version} of the protocol, this rank has {PROTOCOL_VERSION}"
        )
    checksum = int.from_bytes(data[_HEAD.size :].tobytes(), "little")
    if checksum != xxhash.xxh3_64_intdigest(data[: _HEAD.size].data):
        raise head.error("the checksum of its head is wrong")
    if head.kind >= len(_KINDS):
        raise head.error(f"kinds are below {len(_KINDS)}")
    if not 0 <= head.body_bytes <= MAX_BODY_BYTES:
        raise head.error(f"it announces {head.body_bytes} bytes, at most {MAX_BODY_BYTES} may come")
    return head


def decode_body(head: Head, body: U8) -> ControlMessage:
    """The message; its arrays are views of the body."""
    if len(body) != head.body_bytes:
        raise head.error(f"{len(body)} bytes came, its head announces {head.body_bytes}")
    if xxhash.xxh3_64_intdigest(body.data) != head.checksum:
        raise head.error("the checksum of its body is wrong")
    form = _FIELDS[head.kind]
    numbers, *arrays = _arrays(head, body, _TYPES[head.kind])
    if len(numbers) != form.count_numbers():
        raise head.error(f"it has {len(numbers)} numbers, expected {form.count_numbers()}")
    try:
        message = cast(ControlMessage, form.build(iter(numbers.tolist()), iter(arrays)))
    except UnicodeDecodeError:
        raise head.error("its text is no UTF-8") from None
    if step_of_message(message) != head.step:
        raise head.error(f"its body is about step {step_of_message(message)}")
    return message


def _arrays(head: Head, body: U8, dtypes: Sequence[np.dtype[np.generic] | None]) -> list[Array]:
    """The arrays of a body as its table lists them, all checked against the bytes that came."""
    first = 16 * len(dtypes)
    if len(body) < first or len(body) % _ALIGN:
        raise head.error(f"{len(body)} bytes hold no table of {len(dtypes)} fields")
    table = body[:first].view(np.int64).tolist()
    arrays = []
    for number, (wanted, entry, length) in enumerate(
        zip(dtypes, table[::2], table[1::2], strict=True)
    ):
        place, code = divmod(entry, 1 << 8)
        if place != number or code >= len(_DTYPES) or wanted not in (None, _DTYPES[code]):
            raise head.error(f"field {number} is not of type {wanted}")
        size = length * _DTYPES[code].itemsize
        if not 0 <= size <= len(body) - first:
            raise head.error(f"field {number} has {length} elements, beyond the end")
        arrays.append(body[first : first + size].view(_DTYPES[code]))
        first += _aligned(size)
    if first != len(body):
        raise head.error(f"{len(body) - first} bytes are left after its last field")
    return arrays
