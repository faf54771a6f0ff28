"""Files as a source of samples: read twice for a vocabulary, once with hashed ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embroute.data.batch import PADDING, Batch
from embroute.data.readers.columns import ColumnSpec
from embroute.data.readers.decode import Keyed, decode
from embroute.data.readers.files import Progress
from embroute.data.readers.keys import Vocabulary, hashed_ids, vocabulary
from embroute.data.readers.parsing import ReadOptions, read_rows
from embroute.data.readers.sorting import SortedSamples, is_in_order
from embroute.data.schema import Field, Schema, Table
from embroute.kernels.array_types import I64

Pieces = Callable[[Counter[str]], Iterator[Keyed]]  # one pass that counts its bad rows
Ids = Callable[[I64, int], I64]  # (keys, field) to ids in the table of the field


@dataclass(frozen=True)
class Numbering:
    """How values become ids: by vocabulary, or hashed into `hash_rows` rows per field."""

    hash_rows: int | None = None
    limit: int | None = None  # only the first samples, in the order they are read


class FileSource:
    """Samples read from files. `bad_rows` counts the rows that the latest pass left out."""

    def __init__(self, schema: Schema, pieces: Pieces, ids: Ids, num_samples: int | None) -> None:
        self.schema = schema
        self.num_samples = num_samples
        self.bad_rows: Mapping[str, int] = {}
        self.note = ""  # for the user: columns that are probably used otherwise
        self._pieces = pieces
        self._ids = ids

    @property
    def skipped(self) -> str:
        """A sentence with the rows that the latest pass left out, by reason."""
        counts = sorted(self.bad_rows.items(), key=lambda item: -item[1])
        reasons = "; ".join(f"{count} x {reason}" for reason, count in counts)
        return f"skipped {sum(self.bad_rows.values())} bad rows: {reasons}"

    def chunks(self) -> Iterator[Batch]:
        """One pass in order, in pieces of about ten thousand samples."""
        counts: Counter[str] = Counter()
        self.bad_rows = counts
        for piece in self._pieces(counts):
            yield _numbered(piece.batch, self.schema, self._ids)


def open_files(
    reading: ReadOptions, numbering: Numbering, progress: Progress | None = None
) -> FileSource:
    """The files as a source, in order of time if the layout names a time column.

    With a time column, a first pass checks the order, and a second pass sorts if necessary. Then
    a vocabulary needs a pass over all samples; hashed ids need only the first piece.
    """
    layout, limit = reading.layout, numbering.limit
    opening, later = _from_files(reading, progress), _from_files(reading, None)
    if layout.time is not None and not is_in_order(opening(Counter())):
        bad_rows: Counter[str] = Counter()
        opening = later = SortedSamples(opening(bad_rows), bad_rows).pieces
    pieces = _first(opening(Counter()), limit)
    longest: Sequence[int | None] = [None] * len(layout.fields)
    if numbering.hash_rows is None:
        vocabularies, longest, num_samples = _vocabularies(pieces, layout)
        sizes = [words.num_ids for words in vocabularies]
        ids: Ids = _find_in(vocabularies)
    else:
        num_samples = len(next(pieces).batch)
        sizes = [numbering.hash_rows] * len(layout.fields)
        ids = _hash_into(numbering.hash_rows)
    known = num_samples if numbering.hash_rows is None else None
    schema = _schema(layout, sizes, longest)
    source = FileSource(schema, lambda counts: _first(later(counts), limit), ids, known)
    source.note = layout.note
    return source


def _from_files(reading: ReadOptions, progress: Progress | None) -> Pieces:
    """Every good sample of the files, in file order."""

    def pieces(counts: Counter[str]) -> Iterator[Keyed]:
        samples = 0
        for rows in read_rows(reading, progress):
            piece = decode(rows, reading.layout, reading.skip_bad_rows, counts)
            samples += len(piece.batch)
            yield piece
        if not samples:
            skipped = sum(counts.values())
            why = f"all {skipped} rows are bad" if skipped else "the files hold no rows"
            raise ValueError(f"{reading.first}: no samples; {why}")

    return pieces


def _first(pieces: Iterator[Keyed], limit: int | None) -> Iterator[Keyed]:
    """The pieces that are not empty, up to `limit` samples."""
    left = limit
    for piece in pieces:
        if left is not None:
            piece = piece.slice(0, left)
            left -= len(piece.batch)
        if len(piece.batch):
            yield piece
        if left == 0:
            return


def _vocabularies(
    pieces: Iterator[Keyed], layout: ColumnSpec
) -> tuple[list[Vocabulary], list[int], int]:
    """A vocabulary for every field, the longest bag of each, and the number of samples."""
    vocabularies = [vocabulary() for _ in layout.fields]
    num_samples, longest_F = 0, np.ones(len(layout.fields), np.int64)
    for piece in pieces:
        num_samples += len(piece.batch)
        if layout.bags:
            lengths_SF = np.diff(piece.batch.offsets).reshape(len(piece.batch), -1)
            longest_F = np.maximum(longest_F, lengths_SF.max(0))
        for field, words in enumerate(vocabularies):
            words.add(piece.batch.rows[_lookups(piece.batch, field, bool(layout.bags))])
    return vocabularies, longest_F.tolist(), num_samples


def _find_in(vocabularies: list[Vocabulary]) -> Ids:
    return lambda keys, field: vocabularies[field].find(keys)


def _hash_into(num_rows: int) -> Ids:
    return lambda keys, field: hashed_ids(keys, num_rows)


def _schema(layout: ColumnSpec, sizes: list[int], longest: Sequence[int | None]) -> Schema:
    """A schema with one table per field."""
    tables = [Table(name, size) for name, size in zip(layout.fields, sizes, strict=True)]
    fields = [
        Field(name, i, name in layout.bags, longest[i]) for i, name in enumerate(layout.fields)
    ]
    return Schema(tuple(tables), tuple(fields), layout.dense, layout.label is not None)


def _lookups(batch: Batch, field: int, bags: bool) -> slice | npt.NDArray[np.intp]:
    """The positions in `rows` of the look-ups of a field."""
    if not bags:
        return slice(field, None, batch.num_fields)
    fields = np.tile(np.arange(batch.num_fields), len(batch))
    return np.flatnonzero(np.repeat(fields, np.diff(batch.offsets)) == field)


def _numbered(keys: Batch, schema: Schema, ids: Ids) -> Batch:
    """The batch with global row ids instead of keys."""
    rows = np.empty_like(keys.rows)
    for field in range(schema.num_fields):
        lookups = _lookups(keys, field, schema.has_bags)
        field_ids = ids(keys.rows[lookups], field)
        rows[lookups] = np.where(field_ids < 0, PADDING, field_ids + schema.first_rows[field])
    return Batch(rows, keys.offsets, keys.dense, keys.label, keys.num_fields)
