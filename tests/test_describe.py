"""`embroute data describe`: its numbers by hand, against a plain count, and its output."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.cli.data import data_group
from embroute.data.batch import PADDING, ArraySource, Batch, one_hot
from embroute.data.describe import RECENT_BATCHES, describe, top_share
from embroute.data.schema import Field, Schema, Table
from tests.sizes import sized


def source_of(ids_SF: list[list[int]], sizes: tuple[int, ...], chunk: int = 3) -> ArraySource:
    tables = tuple(Table(f"t{i}", size) for i, size in enumerate(sizes))
    fields = tuple(Field(f"f{i}", i) for i in range(len(sizes)))
    schema = Schema(tables, fields)
    rows_SF = np.array(ids_SF, np.int64).reshape(-1, len(sizes))
    rows_SF = np.where(rows_SF < 0, PADDING, rows_SF + schema.first_rows[:-1])
    return ArraySource(schema, one_hot(rows_SF), chunk)


def test_description_by_hand() -> None:
    found = describe(source_of([[0, 5], [0, 6], [1, 5], [0, -1], [2, 7]], (4, 9)), batch_size=2)
    assert (found.num_samples, found.num_rows, found.positive_share) == (5, 13, None)
    assert [(f.name, f.lookups, f.distinct) for f in found.fields] == [("f0", 5, 3), ("f1", 4, 3)]
    assert (found.total.lookups, found.total.distinct) == (9, 6)
    assert found.fields[0].top_shares == (0.6, 0.6, 0.6)
    # Batches {a0 b5 b6}, {a1 a0 b5}; the short third one is left out of the reuse.
    assert (found.reuse.num_batches, found.reuse.distinct_rows) == (2, 3.0)
    assert found.reuse.lookups_per_row == pytest.approx(7 / 6)
    assert found.reuse.in_previous == found.reuse.in_recent == pytest.approx(2 / 3)


@settings(max_examples=sized(15, 40))
@given(
    st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 29)), min_size=1, max_size=120),
    st.integers(1, 5),
)
def test_description_equals_a_plain_count(samples: list[tuple[int, int]], size: int) -> None:
    found = describe(source_of([list(s) for s in samples], (10, 30)), batch_size=size)
    used = [(f, i) for sample in samples for f, i in enumerate(sample) if i >= 0]
    counts = Counter(used).most_common()
    top = max(1, round(0.1 * len(counts)))
    assert found.total.distinct == len(counts)
    assert found.total.top_shares[2] == pytest.approx(sum(n for _, n in counts[:top]) / len(used))
    batches = [
        {(f, i) for sample in samples[start : start + size] for f, i in enumerate(sample) if i >= 0}
        for start in range(0, max(len(samples) - size + 1, 1), size)
    ]
    recent = [
        len(batch & set().union(*batches[max(0, b - RECENT_BATCHES) : b]))
        for b, batch in enumerate(batches)
    ]
    previous = [len(one & other) for one, other in pairwise(batches)]
    distinct = sum(map(len, batches[1:]))
    assert found.reuse.num_batches == len(batches)
    if len(batches) > 1:
        assert found.reuse.in_recent == pytest.approx(sum(recent) / distinct)
        assert found.reuse.in_previous == pytest.approx(sum(previous) / distinct)
    else:
        assert found.reuse.in_previous is None


def test_description_of_shared_tables_and_bags_by_hand() -> None:
    schema = Schema((Table("t", 5),), (Field("a", 0), Field("b", 0, bag=True)), labelled=True)
    rows, offsets = np.array([1, 1, 2, 3]), np.array([0, 1, 3, 4, 4])
    label = np.array([1, 0], np.float32)
    batch = Batch(rows, offsets, np.zeros((2, 0), np.float32), label, 2)
    found = describe(ArraySource(schema, batch))
    assert [(f.lookups, f.distinct) for f in found.fields] == [(2, 2), (2, 2)]
    assert (found.total.lookups, found.total.distinct) == (4, 3)
    assert found.positive_share == 0.5


def test_top_share_takes_at_least_one_id() -> None:
    assert top_share(np.array([0, 3, 1]), 0.001) == 0.75
    assert top_share(np.zeros(4, np.int64), 0.1) == 0.0
    assert top_share(np.arange(1000), 0.01) == pytest.approx(sum(range(990, 1000)) / 499500)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(data_group, ["describe", *arguments], env={"COLUMNS": "80"})


def clicks(folder: Path) -> str:
    path = folder / "clicks.csv"
    lines = [f"{i % 2},user{i % 5},{i % 3},{'x' if i == 7 else i}\n" for i in range(50)]
    path.write_text("click,user,[item],price\n" + "".join(lines))
    return str(path)


def test_describe_command_prints_tables_of_80_columns(tmp_path: Path) -> None:
    json_file = tmp_path / "d.json"
    columns = ("--label", "click", "--categorical", "user, [item]")
    result = run(clicks(tmp_path), *columns, "--batch", "10", "--json", str(json_file))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == str(tmp_path / "clicks.csv")
    assert max(map(len, lines[1:])) <= 80
    assert "\x1b" not in result.stdout
    cells = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines]
    assert ["samples", "50"] in cells
    assert ["distinct ids", "8"] in cells
    assert ["positive labels", "50.00%"] in cells
    assert ["[item]", "50", "3", "34.0%", "34.0%", "34.0%"] in cells
    assert ["rows also in the previous batch", "100.0%"] in cells
    assert result.stderr.startswith(f"written: {json_file}\n")
    written = json.loads(json_file.read_text())
    assert written["total"]["distinct"] == 8
    assert written["reuse"]["num_batches"] == 5


def test_describe_command_reports_skipped_rows(tmp_path: Path) -> None:
    options = ("--categorical", "user", "--dense", "price")
    stopped = run(clicks(tmp_path), *options)
    assert isinstance(stopped.exception, ValueError)
    assert "line 9, column price: 'x' is not a number" in str(stopped.exception)
    result = run(clicks(tmp_path), *options, "--skip-bad-rows")
    assert result.exit_code == 0
    assert result.stderr.startswith("skipped 1 bad rows: 1 x price is not a number\n")


def test_every_data_option_reaches_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t,a,tags\n2,u,p;q\n1,,\n3,w,p\n")
    options = "--format table --categorical a --bag tags --bag-separator ; --time t --ids hash"
    more = "--hash-rows 100 --missing padding --limit 2"
    json_file = tmp_path / "d.json"
    result = run(str(path), *options.split(), *more.split(), "--json", str(json_file))
    assert result.exit_code == 0, result.output
    written = json.loads(json_file.read_text())
    assert (written["num_samples"], written["num_rows"]) == (2, 200)
    assert [field["lookups"] for field in written["fields"]] == [1, 2]


def test_describe_command_accepts_built_in_data() -> None:
    result = run("online-retail", "--limit", "2000")
    assert result.exit_code == 0, result.output
    assert "StockCode" in result.stdout
