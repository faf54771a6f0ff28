"""Categorical values as ids: a stable 64-bit key of the text, then a vocabulary or a remainder.

The key is FNV-1a (64 bits) of the UTF-8 bytes, mixed by the finalizer of MurmurHash3. So the key
depends on the text alone: not on the process, the machine or a library's version. Values with equal
keys get the same id. Among n distinct values of a field, two share a key with probability n^2 /
2^65: three in a million for ten million values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.jit import inlined, kernel

NO_KEY = 0  # the key of a value that touches no row; no text has it
_FIRST_SLOTS = 1024
_FNV_BASIS, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_NEWLINE, _RETURN = 10, 13


@kernel
def murmur_finalizer(key: np.uint64) -> np.int64:
    """MurmurHash3's finalizer; NO_KEY is kept for values that touch no row."""
    key = (key ^ (key >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    key = (key ^ (key >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    key = key ^ (key >> np.uint64(33))
    return np.int64(key) if key else np.int64(1)  # 0 is NO_KEY


@kernel
def hash_texts(data: U8, lengths: I64, out: I64) -> None:
    """The keys of texts that are concatenated in `data`."""
    position = 0
    for text in range(len(lengths)):
        key = _FNV_BASIS
        for i in range(position, position + lengths[text]):
            key = (key ^ np.uint64(data[i])) * _FNV_PRIME
        position += lengths[text]
        out[text] = murmur_finalizer(key)


@kernel
def hash_cells(data: U8, separator: int, field_of_column: I64, padding: bool, keys_SF: I64) -> None:
    """The keys of values in whole lines without quotation marks, samples x fields.

    A column of field -1 is skipped; with `padding`, an empty value has NO_KEY.
    """
    sample, column, start, key = 0, 0, 0, _FNV_BASIS
    field = field_of_column[0]
    for i in range(len(data)):
        byte = data[i]
        if byte in (separator, _NEWLINE):
            # CR LF ends a line, too: the CR before a newline belongs to no value.
            end = i - 1 if byte == _NEWLINE and i > start and data[i - 1] == _RETURN else i
            if field >= 0:
                keys_SF[sample, field] = (
                    NO_KEY if padding and start == end else murmur_finalizer(key)
                )
            sample, column = (sample + 1, 0) if byte == _NEWLINE else (sample, column + 1)
            field = field_of_column[column]
            start, key = i + 1, _FNV_BASIS
        elif field >= 0 and (byte != _RETURN or data[i + 1] != _NEWLINE):
            key = (key ^ np.uint64(byte)) * _FNV_PRIME


def keys_of_cells(
    data: bytes, separator: str, field_of_column: I64, padding: bool, num_samples: int
) -> I64:
    """The keys of the columns that have a field, of lines without quotation marks."""
    keys = np.empty((num_samples, int(field_of_column.max()) + 1), np.int64)
    hash_cells(np.frombuffer(data, np.uint8), ord(separator), field_of_column, padding, keys)
    return keys


def keys_of(texts: pl.DataFrame, padding: bool = False) -> I64:
    """The keys of columns of text, samples x columns; with `padding`, an empty one has NO_KEY."""
    keys = np.empty(texts.shape, np.int64)
    lengths = texts.select(pl.all().str.len_bytes().cast(pl.Int64)).to_numpy()
    joined = texts.select(pl.all().str.join("")).row(0)
    for column, text in enumerate(joined):
        data = np.frombuffer(text.encode(), np.uint8)
        hash_texts(data, lengths[:, column], keys[:, column])
    if padding:
        keys[lengths == 0] = NO_KEY
    return keys


def hashed_ids(keys: I64, num_rows: int) -> I64:
    """Ids by the remainder of the keys; -1 for NO_KEY."""
    ids = (keys.view(np.uint64) % np.uint64(num_rows)).astype(np.int64)
    ids[keys == NO_KEY] = -1
    return ids


@inlined
def _probe(slot_keys: I64, slot_ids: I32, key: int) -> int:
    """The slot of a key, or the free slot where it belongs. A slot is free while its id is -1."""
    mask = len(slot_ids) - 1  # the number of slots is a power of 2
    slot = key & mask
    # Linear probing: the key is in the first slot that holds it, or in the first free slot.
    while slot_ids[slot] >= 0 and slot_keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@kernel
def number_keys(
    keys: I64, slot_keys: I64, slot_ids: I32, num_ids: int, max_ids: int, ids: I64
) -> int:
    """Give every key its known id or the next free id, until there are `max_ids`.

    Returns the number of keys done. `num_ids` is the number of ids before the call; the caller
    finds the new number from `ids`.
    """
    for k in range(len(keys)):
        key = keys[k]
        if key == NO_KEY:
            ids[k] = -1
            continue
        slot = _probe(slot_keys, slot_ids, key)
        if slot_ids[slot] < 0:
            if num_ids >= max_ids:
                return k
            slot_keys[slot] = key
            slot_ids[slot] = num_ids
            num_ids += 1
        ids[k] = slot_ids[slot]
    return len(keys)


@dataclass
class Vocabulary:
    """The ids of a field, numbered in order of first appearance; 18 to 36 bytes per id."""

    num_ids: int
    slot_keys: I64
    slot_ids: I32

    def add(self, keys: I64) -> None:
        """Number the keys that are new."""
        ids = np.empty(len(keys), np.int64)
        start = 0
        while True:
            done = self._number(keys[start:], 2 * len(self.slot_ids) // 3, ids[start:])
            self.num_ids = max(self.num_ids, int(ids[start : start + done].max(initial=-1)) + 1)
            start += done
            if start == len(keys):
                return
            self._grow()

    def _number(self, keys: I64, max_ids: int, ids: I64) -> int:
        return number_keys(keys, self.slot_keys, self.slot_ids, self.num_ids, max_ids, ids)

    def _grow(self) -> None:
        """Double the slots; the ids stay."""
        known = self.slot_ids >= 0
        in_order = np.empty(self.num_ids, np.int64)
        in_order[self.slot_ids[known]] = self.slot_keys[known]
        bigger = _slots(2 * len(self.slot_ids))
        bigger._number(in_order, len(in_order), np.empty_like(in_order))
        self.slot_keys, self.slot_ids = bigger.slot_keys, bigger.slot_ids

    def find(self, keys: I64) -> I64:
        """The id of every key; -1 for NO_KEY. An unknown key means that the file has changed."""
        ids = np.empty(len(keys), np.int64)
        if self._number(keys, self.num_ids, ids) < len(keys):
            raise ValueError("the data holds a value it did not hold when it was opened")
        return ids


def _slots(num_slots: int) -> Vocabulary:
    return Vocabulary(0, np.zeros(num_slots, np.int64), np.full(num_slots, -1, np.int32))


def vocabulary() -> Vocabulary:
    """A vocabulary without ids."""
    return _slots(_FIRST_SLOTS)
