"""Values from readers equal a plain parse: ids, chunks and order of time."""

from __future__ import annotations

import csv
import gzip
import math
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from embroute.config.data_options import DataOptions
from embroute.data.batch import PADDING, Batch, Source, concat
from embroute.data.open import open_source
from embroute.data.readers.columns import ColumnSpec
from embroute.data.readers.file_source import Numbering, open_files
from embroute.data.readers.formats import CRITEO_COLUMNS, criteo
from embroute.data.readers.keys import Vocabulary, hashed_ids, keys_of, vocabulary
from embroute.data.readers.parsing import ReadOptions
from tests.sizes import sized

WORDS = ["red", "", "blue", "red", "green", "blue"]


def whole(source: Source) -> Batch:
    return concat(list(source.chunks()))


def same(one: Batch, other: Batch) -> None:
    for name in ("rows", "offsets", "dense", "label"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def numbered(words: Sequence[str]) -> list[int]:
    """Ids in order of first appearance."""
    ids: dict[str, int] = {}
    return [ids.setdefault(word, len(ids)) for word in words]


def criteo_lines(num: int, seed: int = 0) -> list[list[str]]:
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(num):
        numbers = [str(random.integers(-2, 3000)) for _ in range(13)]
        words = [f"{random.integers(0, 40):08x}" for _ in range(26)]
        cells = [str(random.integers(0, 2)), *numbers, *words]
        lines.append([c if not i or random.random() > 0.1 else "" for i, c in enumerate(cells)])
    return lines


def write_criteo(path: Path, lines: list[list[str]]) -> Path:
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    return path


def test_criteo_reader_equals_a_plain_parse(tmp_path: Path) -> None:
    lines = criteo_lines(200)
    source = open_source(str(write_criteo(tmp_path / "day_0", lines)))
    batch = whole(source)
    assert source.num_samples == 200
    assert source.schema.labelled
    assert source.schema.dense == CRITEO_COLUMNS[1:14]
    assert [field.name for field in source.schema.fields] == list(CRITEO_COLUMNS[14:])
    assert batch.label.tolist() == [float(line[0]) for line in lines]
    dense = [[math.log1p(max(float(cell or 0), 0.0)) for cell in line[1:14]] for line in lines]
    np.testing.assert_allclose(batch.dense, dense, rtol=1e-6)
    rows_SF = batch.rows.reshape(200, 26) - source.schema.first_rows[:-1]
    for field in range(26):
        assert rows_SF[:, field].tolist() == numbered([line[14 + field] for line in lines])
        assert source.schema.tables[field].num_rows == len({line[14 + field] for line in lines})


def test_gzip_file_reads_like_the_plain_file(tmp_path: Path) -> None:
    plain = write_criteo(tmp_path / "day", criteo_lines(50))
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    same(whole(open_source(str(plain))), whole(open_source(str(packed))))


@pytest.mark.parametrize("block_bytes", [1, 100, 700, 5000])
def test_block_size_does_not_change_samples(tmp_path: Path, block_bytes: int) -> None:
    path = write_criteo(tmp_path / "day", criteo_lines(40))
    expected = whole(open_source(str(path)))
    source = open_files(ReadOptions((path,), criteo(), block_bytes=block_bytes), Numbering())
    chunks = list(source.chunks())
    assert len(chunks) > 1
    same(concat(chunks), expected)
    same(concat(list(source.chunks())), expected)


def test_parquet_slice_size_does_not_change_samples(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    frame = pl.DataFrame({"a": [1, 2, 1, None, 3, 2, 5], "x": [0.5, 1, 2, None, 4, 5, 6]})
    frame.write_parquet(path, row_group_size=4)
    layout = ColumnSpec("table", categorical=("a",), dense=("x",))
    source = open_files(ReadOptions((path,), layout, slice_rows=3), Numbering())
    assert [len(chunk) for chunk in source.chunks()] == [3, 3, 1]
    assert whole(source).rows.tolist() == [0, 1, 0, 2, 3, 1, 4]
    assert whole(source).dense.ravel().tolist() == [0.5, 1, 2, 0, 4, 5, 6]


def test_parquet_file_reads_like_the_csv_file(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"label": [0, 1, 1], "user": [7, 8, 7], "word": ["a", None, "b"], "x": [1.5, 2.0, -3.0]}
    )
    frame.write_csv(tmp_path / "data.csv")
    frame.write_parquet(tmp_path / "data.parquet")
    options = DataOptions(
        label="label", categorical=("all",), dense=("x",), ids="hash", hash_rows=1000
    )
    one, other = (
        open_source(str(tmp_path / f"data.{kind}"), options) for kind in ("csv", "parquet")
    )
    assert one.schema == other.schema
    same(whole(one), whole(other))


def test_parquet_reads_boolean_labels_dates_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    frame = pl.DataFrame(
        {
            "click": [True, False, True],
            "when": pl.Series(["2024-01-03", "2024-01-01", "2024-01-02"]).str.to_date(),
            "tags": [[1, 2], [], [2, None]],
        }
    )
    frame.write_parquet(path)
    source = open_source(str(path), DataOptions(label="click", bag=("tags",), time="when"))
    batch = whole(source)
    assert batch.label.tolist() == [0, 1, 1]
    assert batch.offsets.tolist() == [0, 0, 1, 3]
    assert batch.rows.tolist() == [0, 1, 0]


def test_table_reads_bags_missing_values_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        'label,"a, b",tags,x\n'
        '1,"one, two",r|g,0.5\r\n'
        "\n"
        '0,"say ""hi""",,\n'
        '0,5" pipe,g||b|g, 2 \n'
        '1,"two\nlines",r,1e3\n'
        "1,,b,-1"
    )
    options = DataOptions(label="label", categorical=("a, b",), bag=("tags",), dense=("x",))
    source = open_source(str(path), options)
    batch = whole(source)
    assert batch.label.tolist() == [1, 0, 0, 1, 1]
    assert batch.dense.ravel().tolist() == [0.5, 0, 2, 1000, -1]
    assert [(t.name, t.num_rows) for t in source.schema.tables] == [("a, b", 5), ("tags", 3)]
    assert [field.bag for field in source.schema.fields] == [False, True]
    bags = [
        batch.rows[s:e].tolist() for s, e in zip(batch.offsets, batch.offsets[1:], strict=False)
    ]
    assert bags == [[0], [5, 6], [1], [], [2], [6, 7, 6], [3], [5], [4], [7]]
    hashed = open_source(str(path), DataOptions(categorical=("a, b",), ids="hash", hash_rows=10**6))
    texts = ["one, two", 'say "hi"', '5" pipe', "two\nlines", ""]
    assert (
        whole(hashed).rows.tolist()
        == hashed_ids(keys_of(words_frame(texts)).ravel(), 10**6).tolist()
    )


def words_frame(words: Sequence[str]) -> pl.DataFrame:
    return pl.DataFrame({"word": pl.Series(words, dtype=pl.String)})


@pytest.mark.parametrize("separator", ["\t", ";", "|"])
def test_table_separator_is_detected(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a,b c d\n1 2 4\n3 2 4\n".replace(" ", separator))
    source = open_source(str(path), DataOptions(categorical=("a,b", "c")))
    assert whole(source).rows.tolist() == [0, 2, 1, 2]


def avazu_file(path: Path, hours: Sequence[str]) -> Path:
    names = ["id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category"]
    names += ["app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model"]
    names += ["device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))]
    lines = [[str(i), str(i % 2), hour, *[f"v{i % 3}"] * 21] for i, hour in enumerate(hours)]
    path.write_text("\n".join(",".join(line) for line in [names, *lines]) + "\n")
    return path


def test_avazu_reads_22_fields_and_the_hour_of_the_day(tmp_path: Path) -> None:
    path = avazu_file(tmp_path / "train", ["14102100", "14102201", "14102300", "14102323"])
    source = open_source(str(path), DataOptions(time="hour"))
    assert source.schema.num_fields == 22
    batch = whole(source)
    assert batch.label.tolist() == [0, 1, 0, 1]
    rows_SF = batch.rows.reshape(4, 22) - source.schema.first_rows[:-1]
    assert rows_SF[:, 0].tolist() == [0, 1, 0, 2]
    assert rows_SF[:, 21].tolist() == [0, 1, 2, 0]


def test_movielens_dat_reads_like_csv(tmp_path: Path) -> None:
    ratings = [(1, 10, 5, 300), (2, 10, 3.5, 100), (1, 20, 4, 200)]
    dat, table = tmp_path / "ratings.dat", tmp_path / "ratings.csv"
    dat.write_text("".join("::".join(map(str, line)) + "\n" for line in ratings))
    table.write_text(
        "userId,movieId,rating,timestamp\n"
        + "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in ratings)
    )
    batch = whole(open_source(str(dat)))
    same(batch, whole(open_source(str(table))))
    assert batch.rows.tolist() == [0, 2, 1, 2, 0, 3]
    assert batch.label.tolist() == [1, 0, 1]
    options = DataOptions(positive_rating=5, time="timestamp")
    assert whole(open_source(str(dat), options)).label.tolist() == [0, 0, 1]


def test_missing_values_become_an_id_or_padding(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{word},z\n" for word in WORDS))
    categorical = ("a", "b")
    as_id = whole(open_source(str(path), DataOptions(categorical=categorical)))
    assert as_id.rows.reshape(-1, 2)[:, 0].tolist() == [0, 1, 2, 0, 3, 2]
    padded = open_source(str(path), DataOptions(categorical=categorical, missing="padding"))
    assert whole(padded).rows.reshape(-1, 2)[:, 0].tolist() == [0, PADDING, 1, 0, 2, 1]
    assert [table.num_rows for table in padded.schema.tables] == [3, 1]
    hashing = DataOptions(categorical=("a",), missing="padding", ids="hash", hash_rows=50)
    assert (whole(open_source(str(path), hashing)).rows == PADDING).tolist() == [
        word == "" for word in WORDS
    ]


def fnv_1a(text: str) -> int:
    """The key of a text by the published algorithm."""
    key = 0xCBF29CE484222325
    for byte in text.encode():
        key = (key ^ byte) * 0x100000001B3 % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        key = (key ^ key >> 33) * factor % 2**64
    return key ^ key >> 33


def test_hashed_ids_never_change(tmp_path: Path) -> None:
    words = ["", "a", "68fd1e64", "größe"]
    keys = keys_of(words_frame(words)).ravel().view(np.uint64)
    assert keys.tolist() == [fnv_1a(word) for word in words]
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{word},x\n" for word in words))
    options = DataOptions(categorical=("a",), ids="hash", hash_rows=1000)
    assert whole(open_source(str(path), options)).rows.tolist() == [342, 315, 675, 713]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


@pytest.mark.parametrize("quoted", [False, True])
@settings(max_examples=sized(20, 60))
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=12), st.sampled_from(["\n", "\r\n"]))
def test_any_text_is_hashed_by_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, quoted: bool, cells: list[tuple[str, str]], end: str
) -> None:
    # Without quotes, a line that ends in "\\r" cannot be told from one that ends in "\\r\\n".
    assume(quoted or end == "\r\n" or not any(b.endswith("\r") for _, b in cells))
    path = tmp_path_factory.getbasetemp() / f"any-{quoted}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        minimal = csv.writer(file, lineterminator=end)
        full = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator=end)
        (full if quoted else minimal).writerows([("a", "b"), *cells])
    options = DataOptions(categorical=("b", "a"), ids="hash", hash_rows=2**31 - 1)
    source = open_source(str(path), options)
    expected = [[fnv_1a(b) % (2**31 - 1), fnv_1a(a) % (2**31 - 1)] for a, b in cells]
    rows_SF = whole(source).rows.reshape(-1, 2) - source.schema.first_rows[:-1]
    assert rows_SF.tolist() == expected


def test_progress_of_opening_reaches_100_percent(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "day", criteo_lines(30))
    shares: list[float] = []
    reading = ReadOptions((path, path), criteo(), block_bytes=1000)
    source = open_files(reading, Numbering(), lambda what, share: shares.append(share))
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    told = len(shares)
    assert sum(len(chunk) for chunk in source.chunks()) == 60
    assert len(shares) == told


@settings(max_examples=sized(10, 30))
@given(st.lists(st.lists(st.integers(-3000, 3000), max_size=2500), max_size=5))
def test_vocabulary_numbers_keys_by_first_appearance(chunks: list[list[int]]) -> None:
    words: Vocabulary = vocabulary()
    flat = [key for chunk in chunks for key in chunk]
    for chunk in chunks:
        words.add(np.array(chunk, np.int64))
    expected = numbered([str(key) for key in flat if key])
    found = words.find(np.array(flat, np.int64))
    assert found[np.array(flat, np.int64) != 0].tolist() == expected
    assert (found[np.array(flat, np.int64) == 0] == -1).all()
    assert words.num_ids == len({key for key in flat if key})


def test_limit_applies_to_samples_and_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t,a\n" + "".join(f"{9 - i},w{i}\n" for i in range(9)))
    source = open_source(str(path), DataOptions(categorical=("a",), limit=4))
    assert (source.num_samples, source.schema.num_rows) == (4, 4)
    timed = DataOptions(categorical=("a",), time="t", limit=2, ids="hash", hash_rows=10**6)
    keys = keys_of(words_frame(["w8", "w7"])).ravel()
    assert whole(open_source(str(path), timed)).rows.tolist() == hashed_ids(keys, 10**6).tolist()


def test_files_of_a_directory_or_pattern_are_read_in_name_order(tmp_path: Path) -> None:
    for name, text in (("b.csv", "x,a\n1,2\n"), ("a.csv", "a,x\n9,1\n"), ("c.csv", "a,x\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "_SUCCESS").write_text("")
    options = DataOptions(categorical=("a",), dense=("x",))
    for path in (tmp_path, tmp_path / "*.csv"):
        source = open_source(str(path), options)
        hashed = open_source(str(path), DataOptions(categorical=("a",), ids="hash", hash_rows=99))
        keys = keys_of(words_frame(["9", "2"])).ravel()
        assert whole(source).rows.tolist() == [0, 1]
        assert whole(hashed).rows.tolist() == hashed_ids(keys, 99).tolist()


def generated(path: Path, num_bytes: int) -> Iterator[int]:
    """Write a file of about `num_bytes` bytes, and yield the samples of each block."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "x"])
        block = [(f"user{i % 977}", "w" * 60, i) for i in range(1000)]
        while file.tell() < num_bytes:
            writer.writerows(block)
            yield len(block)


def test_reader_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "big.csv"
    samples = sum(generated(path, 30_000_000))
    layout = ColumnSpec("table", categorical=("a", "b"), dense=("x",))
    reading = ReadOptions((path,), layout, block_bytes=2**18)
    source = open_files(reading, Numbering())
    largest = total = 0
    tracemalloc.start()
    for chunk in source.chunks():
        largest, total = max(largest, len(chunk)), total + len(chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == samples == source.num_samples
    assert largest < 2**19 / 60
    assert peak < 5_000_000
