"""Which format a file has, from its first bytes and its first line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embroute.data.readers import formats
from embroute.data.readers.bad_rows import quoted
from embroute.data.readers.files import is_parquet, open_bytes
from embroute.data.readers.records import check_line

FORMATS = ("criteo", "avazu", "movielens", "table")
_SEPARATORS = (",", "\t", ";", "|")


@dataclass(frozen=True)
class FileHead:
    """What a first look at a file shows."""

    path: Path
    first_line: str  # empty for parquet
    parquet: bool

    @property
    def separator(self) -> str:
        """The most frequent separator of the first line."""
        return max(_SEPARATORS, key=self.first_line.count)

    @property
    def words(self) -> list[str]:
        """The values of the first line, without quotation marks."""
        return [word.strip(' "') for word in self.first_line.split(self.separator)]


def read_head(path: Path) -> FileHead:
    """Read the first line of a file."""
    if is_parquet(path):
        return FileHead(path, "", True)
    with open_bytes(path) as stream:
        text = stream.read(2**16)
    line = text.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    check_line(path, line)
    return FileHead(path, line.decode(errors="replace").rstrip("\r"), False)


def detect(look: FileHead) -> str | None:
    """The format of a file that is not to be read as a table, None where it looks like none."""
    if look.first_line.count("\t") == len(formats.CRITEO_COLUMNS) - 1:
        return "criteo"
    if set(formats.AVAZU_CATEGORICAL) <= set(look.words):
        return "avazu"
    if look.words == list(formats.MOVIELENS_HEADER) or look.first_line.count("::") == 3:
        return "movielens"
    return None


def unknown_format(look: FileHead) -> ValueError:
    """The error for a file whose format was not recognised."""
    if look.parquet:
        seen = "is parquet"
    else:
        seen = f"begins with {quoted(look.first_line)}"
    return ValueError(
        f"{look.path} {seen}, which is neither Criteo (40 columns by tabs), Avazu nor MovieLens; "
        "give --categorical COLUMNS (or `all`), and --label, --dense, --bag, --time where they "
        f"apply, or --format {'|'.join(FORMATS)}"
    )
