"""Text files cut into blocks of whole records, every record with its line number.

Polars parses the cells. But polars does not report the line of a bad value, accepts a short line,
and expects quotation marks to follow RFC 4180. So a scan over the bytes first finds the records and
counts their columns; polars gets only records that it reads without guessing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embroute.data.readers.bad_rows import BadRows, quoted
from embroute.data.readers.files import ByteStream
from embroute.kernels.array_types import I64, U8
from embroute.kernels.jit import kernel

READ_BLOCK_BYTES = 2**23
MAX_RECORD_BYTES = 2**20  # in a longer record, a quotation mark is probably never closed

# Columns of the array of records: first byte, end, line number, columns, state of the quotes.
_START, _END, _LINE, _COLUMNS, _QUOTES = range(5)
# Quotation marks: as in RFC 4180; inside an unquoted value; with text after a closing mark.
_CLEAN, _LOOSE, _BROKEN = range(3)
# State of the scan within a value: at its start, in plain text, in quotes, after closing quotes.
_AT_START, _IN_TEXT, _IN_QUOTES, _AFTER_QUOTES = range(4)
_NEWLINE, _RETURN, _NO_QUOTES = 10, 13, -1


@dataclass(frozen=True)
class Syntax:
    """How a text file separates values, and whether quotation marks enclose them."""

    separator: str = ","
    quoted: bool = True

    @property
    def mark(self) -> str:
        """The single character between values of a block."""
        return "\t" if self.separator == "::" else self.separator


@dataclass(frozen=True)
class RecordBlock:
    """Whole records: their text and line numbers, and the bad ones that were left out."""

    data: bytes
    lines: I64
    bad: BadRows


@kernel
def scan(data: U8, marks: tuple[int, int], columns: int, line: int, records: I64) -> int:
    """Number of whole records in `data`; `records` gets a row for each record.

    `marks` are the separator and the quotation mark. A bad record of several lines probably has a
    stray quotation mark: only its first line counts as the bad record, and the scan continues
    after that line.
    """
    separator, quote = marks
    # The record in progress: its first byte, its first line, its first newline or -1.
    num, start, first_line, first_newline = 0, 0, line, -1
    state, found_columns, quotes = _AT_START, 1, _CLEAN
    # Most bytes are plain text above every mark; the first test in the loop skips them.
    highest = max(separator, quote, _RETURN)
    i = -1
    while i + 1 < len(data):
        i += 1
        byte = data[i]
        if byte > highest and state in (_IN_TEXT, _IN_QUOTES):
            continue
        if byte == _NEWLINE:
            line += 1
            if first_newline < 0:
                first_newline = i
        if state == _IN_QUOTES:
            # A doubled quotation mark leaves and enters the quotes again.
            if byte == quote:
                state = _AFTER_QUOTES
        elif byte == _NEWLINE:
            # A bad record ends at its first newline: the scan goes back to that byte.
            if (found_columns != columns or quotes == _BROKEN) and first_newline < i:
                i, line = first_newline, first_line + 1
            records[num, _START], records[num, _END] = start, i
            records[num, _LINE], records[num, _COLUMNS] = first_line, found_columns
            records[num, _QUOTES] = quotes
            num += 1
            start, first_line, first_newline = i + 1, line, -1
            state, found_columns, quotes = _AT_START, 1, _CLEAN
        elif byte == separator:
            found_columns += 1
            state = _AT_START
        elif byte == quote:
            if state == _IN_TEXT:
                quotes = max(quotes, _LOOSE)
            else:
                state = _IN_QUOTES
        elif state == _AT_START:
            state = _IN_TEXT
        elif state == _AFTER_QUOTES and byte != _RETURN:
            quotes = _BROKEN
            state = _IN_TEXT
    return num


def read_header(stream: ByteStream, separator: str) -> tuple[list[str], bytes]:
    """The column names of the first line, and the text that was read after the first line."""
    text = b""
    while b"\n" not in text:
        more = stream.read(2**16)
        text += more
        if not more or len(text) > MAX_RECORD_BYTES:
            break
    line, _, rest = text.removeprefix(b"\xef\xbb\xbf").partition(b"\n")
    check_line(stream.path, line)
    if not line.strip():
        raise ValueError(f"{stream.path}: the file {'is empty' if not text else 'has no header'}")
    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(f"{stream.path}, line 1 is longer than {MAX_RECORD_BYTES} bytes")
    try:
        decoded = line.decode().rstrip("\r")
        names = next(csv.reader([decoded], delimiter=separator, strict=True))
    except UnicodeDecodeError:
        raise ValueError(f"{stream.path}, line 1: {quoted(line)} is not UTF-8 text") from None
    except csv.Error as error:
        raise ValueError(f"{stream.path}, line 1: {quoted(decoded)}: {error}") from None
    return [name.strip() for name in names], rest


def check_line(path: Path, line: bytes) -> None:
    """Refuse a file whose first line shows other line ends or another encoding."""
    if b"\r" in line.rstrip(b"\r"):
        raise ValueError(
            f"{path}, line 1: a carriage return within {quoted(line.decode(errors='replace'))}; "
            f"lines must end in LF or CR LF (of an old Mac file: tr '\\r' '\\n')"
        )
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line:
        raise ValueError(f"{path}, line 1: {quoted(line)} is not UTF-8 text (UTF-16, perhaps)")


def blocks(
    stream: ByteStream, syntax: Syntax, columns: int, start: tuple[bytes, int], block_bytes: int
) -> Iterator[RecordBlock]:
    """The records of a file; `start` is the text already read, and its line number."""
    pending, line = start
    ended = False
    while not ended or pending:
        if not ended and len(pending) <= MAX_RECORD_BYTES:
            more = stream.read(block_bytes)
            ended = not more
            pending += more
        if ended and pending and not pending.endswith(b"\n"):
            pending += b"\n"
        text = pending.replace(b"::", b"\t") if syntax.separator == "::" else pending
        records = _scan(text, syntax, columns, line)
        if len(records):
            yield _block(text, records, syntax, columns)
            line, text = _after(text, records[-1])
        pending = text
        if pending and (ended or len(pending) > MAX_RECORD_BYTES):
            yield _unclosed(stream, pending, line)
            pending, line = pending.partition(b"\n")[2], line + 1


def _after(text: bytes, record: I64) -> tuple[int, bytes]:
    """The number of the line after a record, and the text from that line on."""
    end = int(record[_END]) + 1
    return int(record[_LINE]) + text.count(b"\n", int(record[_START]), end), text[end:]


def _scan(text: bytes, syntax: Syntax, columns: int, line: int) -> I64:
    """The records of a text as an array, a row per record."""
    marks = ord(syntax.mark), ord('"') if syntax.quoted else _NO_QUOTES
    # Every record takes at least one newline, also a bad record that ends early.
    records = np.empty((text.count(b"\n"), 5), np.int64)
    num = scan(np.frombuffer(text, np.uint8), marks, columns, line, records)
    return records[:num]


def _unclosed(stream: ByteStream, pending: bytes, line: int) -> RecordBlock:
    """A block with one bad record, whose end is not within MAX_RECORD_BYTES or the file."""
    if b"\n" not in pending:
        raise ValueError(f"{stream.path}, line {line} is longer than {MAX_RECORD_BYTES} bytes")
    bad = BadRows()
    bad.add(line, "quotation marks that do not match", ": a quotation mark is not closed")
    return RecordBlock(b"", np.zeros(0, np.int64), bad)


def _block(text: bytes, records: I64, syntax: Syntax, columns: int) -> RecordBlock:
    """The good records of a text, which is copied only if a record needs a change."""
    bad = BadRows()
    clean = (records[:, _COLUMNS] == columns) & (records[:, _QUOTES] == _CLEAN)
    if columns == 1:
        # A blank line has one column as well: the slow path checks every short record.
        clean &= records[:, _END] - records[:, _START] > 1
    if clean.all() and _is_utf8(text):
        return RecordBlock(text[: int(records[-1, _END]) + 1], records[:, _LINE], bad)
    good, lines = [], []
    for record in records:
        data = _repaired(text, record, syntax, columns, bad)
        if data is not None:
            good.append(data)
            lines.append(int(record[_LINE]))
    return RecordBlock(b"".join(good), np.array(lines, np.int64), bad)


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _repaired(text: bytes, record: I64, syntax: Syntax, columns: int, bad: BadRows) -> bytes | None:
    """A record as polars reads it, or None if the record is empty or bad."""
    line, found_columns = int(record[_LINE]), int(record[_COLUMNS])
    data = text[int(record[_START]) : int(record[_END])].removesuffix(b"\r")
    if not data:
        return None
    if found_columns != columns:
        shown = quoted(data.decode(errors="replace"))
        message = f": {found_columns} columns instead of {columns} in {shown}"
        bad.add(line, "wrong number of columns", message)
    elif not _is_utf8(data):
        bad.add(line, "not UTF-8 text", f": {quoted(data)} is not UTF-8 text")
    elif record[_QUOTES] == _BROKEN:
        message = f": the quotation marks do not match in {quoted(data.decode())}"
        bad.add(line, "quotation marks that do not match", message)
    elif record[_QUOTES] == _LOOSE and b"\r" in data:
        message = f": a carriage return within {quoted(data.decode())}"
        bad.add(line, "a carriage return within a line", message)
    elif record[_QUOTES] == _LOOSE:
        return _quoted(data.decode(), syntax.separator)
    else:
        return data + b"\n"
    return None


def _quoted(record: str, separator: str) -> bytes:
    """A record with quotation marks in unquoted values, rewritten as in RFC 4180."""
    values = next(csv.reader(io.StringIO(record, newline=""), delimiter=separator))
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=separator, lineterminator="\n").writerow(values)
    return out.getvalue().encode()
