"""Errors of readers name the file, the line, the column and the value."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import polars as pl
import pytest

from embroute.config.data_options import DataOptions
from embroute.data.batch import Source, concat
from embroute.data.open import open_source
from embroute.data.readers import records
from embroute.data.readers.columns import ColumnSpec
from embroute.data.readers.file_source import FileSource, Numbering, open_files
from embroute.data.readers.parsing import ReadOptions
from tests.test_readers_values import avazu_file, criteo_lines, write_criteo

OPTIONS = DataOptions(label="y", categorical=("a",), dense=("x",))
HEADER = "y,a,x\n"

# What is in the file (below the header), the message, and how --skip-bad-rows counts it.
BAD_LINES = {
    "text for a number": ("1,u,2\n0,v,abc\n", "line 3, column x: 'abc' is not a number"),
    "not a number": ("1,u,2\n0,v,nan\n", "line 3, column x: 'nan' is not a finite number"),
    "infinite": ("1,u,2\n0,v,-inf\n", "line 3, column x: '-inf' is not a finite number"),
    "too large": ("1,u,2\n0,v,1e39\n", "line 3, column x: '1e39' is not a finite number"),
    "label 2": ("1,u,2\n2,v,1\n", "line 3, column y: '2' is not 0 or 1"),
    "no label": ("1,u,2\n,v,1\n", "line 3, column y: '' is not 0 or 1"),
    "label text": ("1,u,2\nyes,v,1\n", "line 3, column y: 'yes' is not 0 or 1"),
    "short line": ("1,u,2\n0,v\n", "line 3: 2 columns instead of 3 in '0,v'"),
    "long line": ("1,u,2\n0,v,1,9\n", "line 3: 4 columns instead of 3 in '0,v,1,9'"),
    "behind a blank line": ("1,u,2\n\n\n0,v\n", "line 5: 2 columns instead of 3"),
    "behind a quoted line": ('1,"u\nw",2\n0,v\n', "line 4: 2 columns instead of 3"),
    "open quote": ('1,u,2\n0,"v,1\n', "line 3: a quotation mark is not closed"),
    "stray quote": (
        '1,u,2\n0,"v,1\n1,w,2\n1,"z",2\n',
        "line 3: the quotation marks do not match in",
    ),
    "text behind a quote": ('1,u,2\n0,"v"w,1\n', "line 3: the quotation marks do not match in"),
}


def table_file(folder: Path, text: str | bytes, name: str = "clicks.csv") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def skipped(source: Source) -> Mapping[str, int]:
    assert isinstance(source, FileSource)
    return source.bad_rows


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_is_refused_with_line_and_column(tmp_path: Path, case: str) -> None:
    text, message = BAD_LINES[case]
    path = table_file(tmp_path, HEADER + text)
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        open_source(path, OPTIONS)


@pytest.mark.parametrize("block_bytes", [5, 2**20])
@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_is_skipped_and_counted(tmp_path: Path, case: str, block_bytes: int) -> None:
    path = Path(table_file(tmp_path, HEADER + BAD_LINES[case][0]))
    layout = ColumnSpec("table", categorical=("a",), label="y", dense=("x",))
    source = open_files(ReadOptions((path,), layout, True, block_bytes=block_bytes), Numbering())
    batch = concat(list(source.chunks()))
    expected = 3 if case == "stray quote" else 1
    assert len(batch) == source.num_samples == expected
    assert batch.label[0] == 1
    assert sum(source.bad_rows.values()) == 1


def test_skipped_rows_are_counted_by_reason_in_each_pass(tmp_path: Path) -> None:
    text = HEADER + "1,u,2\n2,v,abc\n0,w,abc\n0,w\n7,z,1\n0,u,0\n"
    options = DataOptions(label="y", categorical=("a",), dense=("x",), skip_bad_rows=True)
    source = open_source(table_file(tmp_path, text), options)
    for _ in range(2):
        assert sum(len(chunk) for chunk in source.chunks()) == 2
        assert skipped(source) == {
            "y is not 0 or 1": 2,
            "x is not a number": 1,
            "wrong number of columns": 1,
        }
    assert source.schema.num_rows == 1


def test_error_names_the_first_bad_line_of_all_columns(tmp_path: Path) -> None:
    path = table_file(tmp_path, HEADER + "1,u,abc\n2,u,1\n1\n")
    with pytest.raises(ValueError, match="line 2, column x"):
        open_source(path, OPTIONS)


def test_bytes_outside_utf8_are_refused(tmp_path: Path) -> None:
    path = table_file(tmp_path, HEADER.encode() + "1,grün,2\n".encode() + b"0,gr\xfcn,1\n")
    with pytest.raises(ValueError, match=r"clicks.csv, line 3: .*xfcn.* is not UTF-8 text"):
        open_source(path, OPTIONS)
    options = DataOptions(categorical=("a",), skip_bad_rows=True)
    source = open_source(path, options)
    assert source.num_samples == 1
    assert sum(len(chunk) for chunk in source.chunks()) == 1
    assert skipped(source) == {"not UTF-8 text": 1}
    with pytest.raises(ValueError, match=r"line 1: .* is not UTF-8 text"):
        open_source(table_file(tmp_path, b"\xff,a\n1,2\n", "head.csv"), options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "clicks.csv: the file is empty"),
        ("\n\n", "clicks.csv: the file is empty"),
        ("\ny,a,x\n1,2,3\n", "clicks.csv: the file has no header"),
        (HEADER, "clicks.csv: no samples; the files hold no rows"),
        ("y,a,z\n1,u,2\n", "--dense: .*clicks.csv has no column 'x'; the columns are y, a, z"),
        ("y,a,x,a\n1,u,2,3\n", "the header names column 'a' twice"),
    ],
)
def test_files_without_header_rows_or_columns_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(table_file(tmp_path, text), OPTIONS)


def test_file_with_only_bad_rows_is_refused(tmp_path: Path) -> None:
    options = DataOptions(label="y", categorical=("a",), skip_bad_rows=True)
    with pytest.raises(ValueError, match="no samples; all 2 rows are bad"):
        open_source(table_file(tmp_path, HEADER + "7,u,1\n1,u\n"), options)


@pytest.mark.parametrize("ids", ["vocab", "hash"])
def test_empty_file_in_a_directory_is_refused(
    tmp_path: Path, ids: Literal["vocab", "hash"]
) -> None:
    table_file(tmp_path, HEADER + "1,u,2\n", "a.csv")
    table_file(tmp_path, "", "b.csv")
    options = DataOptions(categorical=("a",), ids=ids, hash_rows=9 if ids == "hash" else None)
    with pytest.raises(ValueError, match=r"b.csv: the file is empty"):
        list(open_source(str(tmp_path), options).chunks())


def test_column_missing_in_a_later_file_is_refused(tmp_path: Path) -> None:
    table_file(tmp_path, HEADER + "1,u,2\n", "a.csv")
    table_file(tmp_path, "y,x\n1,2\n", "b.csv")
    with pytest.raises(ValueError, match=r"b.csv: no column 'a'; the columns are y, x"):
        open_source(str(tmp_path), OPTIONS)


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no such file or directory, and no built-in data .*online-retail"
    ):
        open_source(str(tmp_path / "no.csv"))
    with pytest.raises(ValueError, match="no file matches"):
        open_source(str(tmp_path / "*.csv"))
    with pytest.raises(ValueError, match="the directory holds no data files"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        DataOptions(label="a", categorical=("a",)),
        DataOptions(label="x", categorical=("a",), dense=("x",)),
        DataOptions(categorical=("a", "a")),
        DataOptions(categorical=("a",), bag=("a",)),
    ],
)
def test_column_given_twice_is_refused(tmp_path: Path, options: DataOptions) -> None:
    with pytest.raises(ValueError, match=r"column '[ax]' is given twice"):
        open_source(table_file(tmp_path, HEADER + "1,u,2\n"), options)


def test_truncated_and_damaged_gzip_files_are_refused(tmp_path: Path) -> None:
    packed = gzip.compress((HEADER + "1,u,2\n" * 20000).encode())
    with pytest.raises(ValueError, match=r"cut.gz: the gzip file is truncated"):
        open_source(table_file(tmp_path, packed[:-20], "cut.gz"), OPTIONS)
    damaged = packed[:-8] + b"\0\0\0\0" + packed[-4:]
    with pytest.raises(ValueError, match=r"bad.gz: the gzip file is damaged"):
        open_source(table_file(tmp_path, damaged, "bad.gz"), OPTIONS)
    with pytest.raises(ValueError, match="zstd compression is not supported"):
        open_source(table_file(tmp_path, b"\x28\xb5\x2f\xfd123", "t.zst"), OPTIONS)


def test_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t.parquet: cannot be read as parquet"):
        open_source(table_file(tmp_path, b"PAR1 and no more", "t.parquet"), OPTIONS)


def test_parquet_error_names_row_column_and_value(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pl.DataFrame({"y": [0, 1, 3], "a": ["u", "v", "w"], "x": ["1", "2", "3"]}).write_parquet(path)
    with pytest.raises(ValueError, match=r"t.parquet, row 3, column y: '3' is not 0 or 1"):
        open_source(str(path), OPTIONS)
    with pytest.raises(ValueError, match=r"t.parquet is parquet, .* give --categorical"):
        open_source(str(path))


def test_unsupported_parquet_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pl.DataFrame({"y": [0], "a": ["u"], "x": [[1.0, 2.0]]}).write_parquet(path)
    with pytest.raises(ValueError, match="column x holds lists: give it with --bag x"):
        open_source(str(path), OPTIONS)


def test_bad_criteo_line_is_refused(tmp_path: Path) -> None:
    lines = criteo_lines(5)
    lines[3][7] = "x1"
    path = write_criteo(tmp_path / "day", lines)
    with pytest.raises(ValueError, match="day, line 4, column I7: 'x1' is not a number"):
        open_source(str(path))
    lines[3] = lines[3][:39]
    with pytest.raises(ValueError, match="line 4: 39 columns instead of 40"):
        open_source(str(write_criteo(tmp_path / "day", lines)))


def test_bad_avazu_hour_and_movielens_rating_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 3, column hour: '14102124' is not an hour"):
        open_source(str(avazu_file(tmp_path / "train", ["14102100", "14102124"])))
    ratings = table_file(tmp_path, "1::2::good::5\n", "ratings.dat")
    with pytest.raises(ValueError, match="line 1, column rating: 'good' is not a number"):
        open_source(ratings)


def test_unknown_time_format_is_refused(tmp_path: Path) -> None:
    path = table_file(tmp_path, "a,t\nu,2024-01-02\nv,12/1/2010 8:26\n")
    with pytest.raises(ValueError, match="line 3, column t: '12/1/2010 8:26' is neither a number"):
        open_source(path, DataOptions(categorical=("a",), time="t"))


def test_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 50)
    path = Path(table_file(tmp_path, HEADER + "1,u,2\n1," + "u" * 200_000 + ",2\n"))
    layout = ColumnSpec("table", categorical=("a",))
    with pytest.raises(ValueError, match="line 3 is longer than 50 bytes"):
        open_files(ReadOptions((path,), layout, block_bytes=60), Numbering())


def test_unknown_format_error_shows_the_data_and_the_options(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"clicks.csv begins with 'y,a,x', .*--categorical.*--format"
    ):
        open_source(table_file(tmp_path, HEADER + "1,u,2\n"))
    with pytest.raises(ValueError, match="no categorical column is given"):
        open_source(table_file(tmp_path, HEADER + "1,u,2\n"), DataOptions(label="y"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "xml"}, "--format must be one of criteo, avazu, movielens, table"),
        ({"ids": "word"}, "--ids must be one of vocab, hash, got 'word'"),
        ({"missing": "drop"}, "--missing must be one of id, padding"),
        ({"ids": "hash"}, "--ids hash and --hash-rows N are given together"),
        ({"hash_rows": 5}, "--ids hash and --hash-rows N are given together"),
        ({"ids": "hash", "hash_rows": 0}, "--hash-rows must be a whole number of at least 1"),
        ({"limit": 0}, "--limit must be a whole number of at least 1, got 0"),
        ({"bag_separator": ""}, "--bag-separator must be a text that is not empty, got ''"),
        ({"format": "criteo", "label": "y"}, "criteo files have fixed columns"),
        ({"format": "criteo"}, "line 1: 1 columns instead of 40"),
    ],
)
def test_contradicting_data_options_are_refused(
    tmp_path: Path, options: Mapping[str, object], message: str
) -> None:
    path = table_file(tmp_path, HEADER + "1,u,2\n")
    with pytest.raises(ValueError, match=message):
        open_source(path, DataOptions(**options))  # type: ignore[arg-type]


def test_built_in_data_refuses_file_options() -> None:
    with pytest.raises(
        ValueError, match="built-in data: of the data options it takes only --limit"
    ):
        open_source("online-retail", DataOptions(label="y"))
    assert sum(len(c) for c in open_source("online-retail", DataOptions(limit=70)).chunks()) == 70


def test_file_that_changes_between_passes_is_refused(tmp_path: Path) -> None:
    path = table_file(tmp_path, HEADER + "1,u,2\n")
    source = open_source(path, OPTIONS)
    table_file(tmp_path, HEADER + "1,w,2\n")
    with pytest.raises(ValueError, match="a value it did not hold when it was opened"):
        list(source.chunks())
