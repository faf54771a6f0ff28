"""Headers of tensor files: type, shape and position of each tensor, and all checksums.

A safetensors file has three sections: the length of the header in 8 little-endian bytes, the
header, and the tensors' bytes. The header is JSON with type, shape and position of every tensor;
`__metadata__` holds texts by name. embroute adds three texts:

- `header_sum`: XXH3 of length and header, computed with zeros in the place of this sum;
- `block_bytes`: the size of the blocks of tensor bytes that have a checksum; the last is shorter;
- `block_sums`: XXH3 of each block, in order.

A sum is 64 bits, written as 16 hexadecimal digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter

from embroute.checkpoint.strict_json import Json, brief, object_of, parse_json, validated

CHECKSUM_BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 1 << 20  # of a file; larger files have larger blocks
MAX_BLOCK_BYTES = 1 << 30  # a reader keeps a block in memory
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
LENGTH_BYTES = 8
SUM_DIGITS = 16

TENSOR_DTYPES = {"bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "int16": ("I16", 2)}
TENSOR_DTYPES |= {"float16": ("F16", 2), "bfloat16": ("BF16", 2), "float32": ("F32", 4)}
TENSOR_DTYPES |= {"int32": ("I32", 4), "int64": ("I64", 8), "float64": ("F64", 8)}
_NAMES = {code: name for name, (code, _) in TENSOR_DTYPES.items()}

_METADATA, _HEADER_SUM = "__metadata__", "header_sum"
_BLOCK_BYTES, _BLOCK_SUMS = "block_bytes", "block_sums"
# The header sum is the first text of every header, so its position in the file is fixed.
_START = b'{"%s": {"%s": "' % (_METADATA.encode(), _HEADER_SUM.encode())
_SUM_AT = LENGTH_BYTES + len(_START)
_DIGITS, _SUMS = re.compile(r"[0-9]{1,12}"), re.compile(r"[0-9a-f]*")


class TensorEntry(NamedTuple):
    """A tensor in a file; its bytes are counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class _EntryForm:
    """A tensor as the JSON of a header has it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


_FORM, _TEXTS = TypeAdapter(_EntryForm), TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class Header:
    """The parsed header of a tensor file."""

    entries: Mapping[str, TensorEntry]
    about: Mapping[str, str]
    block_bytes: int
    sums: str | None  # of all blocks, joined; None if another program wrote the file


def checksum(data: bytes | memoryview) -> str:
    """XXH3 in 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def block_size(data_bytes: int) -> int:
    """Bytes of a checksum block, in a file with so many bytes of tensors."""
    size = CHECKSUM_BLOCK_BYTES
    while size * MAX_BLOCKS < data_bytes:
        size *= 2
    return size


def header_bytes(entries: Mapping[str, TensorEntry], about: Mapping[str, str], sums: str) -> bytes:
    """The bytes before the tensors. Their number does not depend on the digits of `sums`."""
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
    text += b" " * (-len(text) % 8)  # so that the tensors start at a multiple of 8
    return _with_checksum(len(text).to_bytes(LENGTH_BYTES, "little") + text)


def _with_checksum(raw: bytes) -> bytes:
    """A header with its own checksum filled in."""
    start, end = raw[:_SUM_AT], raw[_SUM_AT + SUM_DIGITS :]
    return start + checksum(start + b"0" * SUM_DIGITS + end).encode() + end


def parse_header(raw: bytes, data_bytes: int) -> Header:
    """Parse and check length and header of a file in which `data_bytes` follow."""
    has_sum = raw[LENGTH_BYTES:].startswith(_START)
    if has_sum and raw != _with_checksum(raw):
        raise ValueError("its header does not have its checksum")
    fields = object_of(parse_json(raw[LENGTH_BYTES:]), "its header")
    about = validated(_TEXTS, fields.pop(_METADATA, {}), _METADATA)
    entries = {name: _entry(name, field) for name, field in fields.items()}
    _check_positions(entries, data_bytes)
    if not has_sum:
        # Our names without a header sum: a damaged header of ours, not another program's file.
        if not about.keys().isdisjoint((_HEADER_SUM, _BLOCK_BYTES, _BLOCK_SUMS)):
            raise ValueError("its header is not as it was written")
        return Header(entries, about, block_size(data_bytes), None)
    return Header(entries, about, *_blocks(about, data_bytes))


def _entry(name: str, field: Json) -> TensorEntry:
    form = validated(_FORM, field, f"tensor {brief(name)}")
    if form.dtype not in _NAMES:
        raise ValueError(f"tensor {brief(name)} has the unknown dtype {brief(form.dtype)}")
    return TensorEntry(_NAMES[form.dtype], form.shape, *form.data_offsets)


def _check_positions(entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """Tensors must fill the file without gap or overlap."""
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
    """Size and checksums of the blocks."""
    text, sums = about.get(_BLOCK_BYTES, ""), about.get(_BLOCK_SUMS, "")
    size = int(text) if _DIGITS.fullmatch(text) else 0
    if not 0 < size <= MAX_BLOCK_BYTES:
        raise ValueError(f"{_BLOCK_BYTES} must be 1 to {MAX_BLOCK_BYTES}, got {brief(text)}")
    count = -(-data_bytes // size)
    if len(sums) != count * SUM_DIGITS or not _SUMS.fullmatch(sums):
        raise ValueError(f"{_BLOCK_SUMS} must be {count} sums of {SUM_DIGITS} digits")
    return size, sums
