"""Headers of tensor files: which tensor lies where, and the checksums of it all.

A file in the safetensors format is the length of a header in 8 little-endian bytes, the header, and
the tensors' bytes. The header is JSON with type, shape and place of every tensor; `__metadata__`
holds texts by name. Three of them are ours:

- `header_sum`: XXH3 of length and header, with zeros in the place of this sum;
- `block_bytes`: the tensors' bytes are summed in blocks of this size, the last one is shorter;
- `block_sums`: XXH3 of each block, one after the other.

A sum is 64 bits, written as 16 hexadecimal digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from embroute.checkpoint.strict_json import (
    brief,
    list_of,
    object_of,
    parse_json,
    text_of,
    whole_number,
)

CHECKSUM_BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 1 << 20  # of a file; above that blocks are larger
MAX_BLOCK_BYTES = 1 << 30  # a reader keeps a block in memory
MAX_HEADER_BYTES = 100_000_000  # what safetensors reads
LENGTH_BYTES = 8
SUM_DIGITS = 16

TENSOR_DTYPES = {"bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "int16": ("I16", 2)}
TENSOR_DTYPES |= {"float16": ("F16", 2), "bfloat16": ("BF16", 2), "float32": ("F32", 4)}
TENSOR_DTYPES |= {"int32": ("I32", 4), "int64": ("I64", 8), "float64": ("F64", 8)}
_NAMES = {code: name for name, (code, _) in TENSOR_DTYPES.items()}

_METADATA, _HEADER_SUM, _BLOCK_BYTES, _BLOCK_SUMS = (
    "__metadata__",
    "header_sum",
    "block_bytes",
    "block_sums",
)
_START = b'{"%s": {"%s": "' % (_METADATA.encode(), _HEADER_SUM.encode())
_SUM_AT = LENGTH_BYTES + len(_START)  # in the file
_DIGITS, _SUMS = re.compile(r"[0-9]{1,12}"), re.compile(r"[0-9a-f]*")


class TensorEntry(NamedTuple):
    """A tensor in a file; its bytes are counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Header:
    """What a tensor file says of itself."""

    entries: Mapping[str, TensorEntry]
    about: Mapping[str, str]
    block_bytes: int
    sums: str | None  # of all blocks; None in a file of another program


def checksum(data: bytes | memoryview) -> str:
    """The checksum of some bytes."""
    return xxhash.xxh3_64_hexdigest(data)


def block_size(data_bytes: int) -> int:
    """Bytes of a block in a file with so many."""
    size = CHECKSUM_BLOCK_BYTES
    while size * MAX_BLOCKS < data_bytes:
        size *= 2
    return size


def header_bytes(entries: Mapping[str, TensorEntry], about: Mapping[str, str], sums: str) -> bytes:
    """The start of a file, up to the tensors' bytes; as long for any sums of the same number."""
    size = max((entry.last for entry in entries.values()), default=0)
    ours = {_BLOCK_BYTES: str(block_size(size)), _BLOCK_SUMS: sums}
    fields: dict[str, object] = {_METADATA: {_HEADER_SUM: "0" * SUM_DIGITS, **about, **ours}}
    for name, (dtype, shape, first, last) in entries.items():
        fields[name] = {
            "dtype": TENSOR_DTYPES[dtype][0],
            "shape": shape,
            "data_offsets": (first, last),
        }
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return _sealed(len(text).to_bytes(LENGTH_BYTES, "little") + text)


def _sealed(raw: bytes) -> bytes:
    """A header with its own checksum in place."""
    start, end = raw[:_SUM_AT], raw[_SUM_AT + SUM_DIGITS :]
    return start + checksum(start + b"0" * SUM_DIGITS + end).encode() + end


def parse_header(raw: bytes, data_bytes: int) -> Header:
    """The header of a file, from its first byte on; `data_bytes` follow it."""
    sealed = raw[LENGTH_BYTES:].startswith(_START)
    if sealed and raw != _sealed(raw):
        raise ValueError("its header does not have its checksum")
    fields = object_of(parse_json(raw[LENGTH_BYTES:]), "its header")
    texts = object_of(fields.pop(_METADATA, {}), _METADATA)
    about = {name: text_of(text, f"{_METADATA}: {name}") for name, text in texts.items()}
    entries = {name: _entry(name, field) for name, field in fields.items()}
    _check_places(entries, data_bytes)
    if not sealed:
        if not about.keys().isdisjoint((_HEADER_SUM, _BLOCK_BYTES, _BLOCK_SUMS)):
            raise ValueError("its header is not as it was written")
        return Header(entries, about, block_size(data_bytes), None)
    return Header(entries, about, *_blocks(about, data_bytes))


def _entry(name: str, field: object) -> TensorEntry:
    """A tensor's type, shape and place."""
    told = object_of(field, f"tensor {brief(name)}", ("dtype", "shape", "data_offsets"))
    code = text_of(told["dtype"], f"the dtype of {brief(name)}")
    if code not in _NAMES:
        raise ValueError(f"tensor {brief(name)} has the unknown dtype {brief(code)}")
    sizes = list_of(told["shape"], f"the shape of {brief(name)}")
    shape = tuple(whole_number(size, f"the shape of {brief(name)}") for size in sizes)
    sharding = list_of(told["data_offsets"], f"data_offsets of {brief(name)}", 2)
    first, last = (whole_number(place, f"data_offsets of {brief(name)}") for place in sharding)
    return TensorEntry(_NAMES[code], shape, first, last)


def _check_places(entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """Tensors lie side by side, without gap or overlap, up to the end of the file."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        num_bytes = tensor_bytes(entry.dtype, entry.shape)
        if entry.first != at or entry.last - entry.first != num_bytes:
            raise ValueError(
                f"tensor {brief(name)} lies at bytes {entry.first} to {entry.last}, "
                f"expected {at} to {at + num_bytes}"
            )
        at = entry.last
    if at != data_bytes:
        raise ValueError(f"it has {data_bytes} bytes of tensors, its header says {at}")


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    num_bytes = TENSOR_DTYPES[dtype][1]
    for size in shape:
        num_bytes *= size
    return num_bytes


def _blocks(about: Mapping[str, str], data_bytes: int) -> tuple[int, str]:
    """Size and sums of the blocks."""
    text, sums = about.get(_BLOCK_BYTES, ""), about.get(_BLOCK_SUMS, "")
    size = int(text) if _DIGITS.fullmatch(text) else 0
    if not 0 < size <= MAX_BLOCK_BYTES:
        raise ValueError(f"{_BLOCK_BYTES} must be 1 to {MAX_BLOCK_BYTES}, got {brief(text)}")
    count = -(-data_bytes // size)
    if len(sums) != count * SUM_DIGITS or not _SUMS.fullmatch(sums):
        raise ValueError(f"{_BLOCK_SUMS} must be {count} sums of {SUM_DIGITS} digits")
    return size, sums
