"""Proposed uses of columns: `data describe FILE` alone, `--categorical all`, hints at `--bag`."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result

from embroute.cli.main import cli
from embroute.config.data_options import DataOptions
from embroute.data.open import open_frame, open_source
from embroute.data.proposal import as_options, propose

ROWS = 400


def clicks() -> pl.DataFrame:
    random = np.random.default_rng(3)
    tags = [[f"t{t}" for t in random.integers(0, 9, k)] for k in random.integers(0, 4, ROWS)]
    return pl.DataFrame(
        {
            "row_id": np.arange(ROWS),
            "click": random.integers(0, 2, ROWS),
            "user": [f"u{u}" for u in random.integers(0, 50, ROWS)],
            "item": random.integers(0, 70, ROWS),
            "new": random.integers(0, 2, ROWS),
            "price": np.round(random.gamma(2, 9, ROWS), 2),
            "tags": tags,
            "ts": np.sort(random.integers(1_600_000_000, 1_700_000_000, ROWS)),
            "shop": ["one"] * ROWS,
        }
    )


def as_text() -> pl.DataFrame:
    return clicks().with_columns(pl.col("tags").list.join(";"))


def write(folder: Path, kind: str) -> Path:
    path = folder / f"clicks of mine.{kind}"
    if kind == "csv":
        as_text().write_csv(path)
    else:
        dates = clicks().with_columns(pl.from_epoch("ts").cast(pl.Datetime("us")))
        dates.write_parquet(path)
    return path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


USES = {
    "row_id": "",
    "click": "label",
    "user": "categorical",
    "item": "categorical",
    "new": "categorical",
    "price": "dense",
    "tags": "bag",
    "ts": "time",
    "shop": "",
}


def test_each_column_is_proposed_for_its_use() -> None:
    assert {column.name: column.use for column in propose(as_text())} == USES
    assert {column.name: column.use for column in propose(clicks())} == USES
    reasons = {column.name: column.reason for column in propose(as_text())}
    assert reasons["user"] == "50 distinct"
    assert reasons["tags"] == "several by ';'"


def test_proposal_becomes_data_options() -> None:
    assert as_options(propose(as_text())) == {
        "label": "click",
        "time": "ts",
        "categorical": ("user", "item", "new"),
        "dense": ("price",),
        "bag": ("tags",),
        "bag_separator": ";",
    }


def test_no_label_is_proposed_among_equals() -> None:
    days = ["2024-05-31", "2024-06-01"] * 9
    flags = pl.DataFrame({"a": [0, 1] * 9, "b": [1, 0] * 9, "when": days})
    assert [column.use for column in propose(flags)] == ["categorical", "categorical", "time"]
    assert [column.use for column in propose(flags.drop("b"))] == ["label", "time"]


def test_columns_that_no_option_can_name_are_not_used() -> None:
    odd = pl.DataFrame({"a,b": ["x", "y"] * 9, " c": ["x", "y"] * 9, "d": [None] * 18})
    assert [column.use for column in propose(odd)] == ["", "", ""]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_describe_of_a_file_alone_proposes_a_command_that_runs(kind: str, tmp_path: Path) -> None:
    result = run("data", "describe", str(write(tmp_path, kind)))
    for text in ("--label", "--dense", "50 distinct", "not used", f"{ROWS}"):
        assert text in result.stdout
    last = result.stderr.splitlines()[-1]
    assert last.startswith("next: embroute compare --data ")
    words = shlex.split(last.removeprefix("next: embroute "))
    for option, value in (("--label", "click"), ("--bag", "tags"), ("--time", "ts")):
        assert words[words.index(option) + 1] == value
    assert ("--bag-separator" in words) == (kind == "csv")
    assert "vanilla" in run(*words, "--policies", "vanilla").stdout


def test_describe_of_a_tiny_file_proposes_a_command_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "tiny.csv"
    path.write_text("click,user\n" + "0,a\n1,b\n1,a\n" * 4)
    last = run("data", "describe", str(path)).stderr.splitlines()[-1]
    words = shlex.split(last.removeprefix("next: embroute "))
    assert "vanilla" in run(*words, "--policies", "vanilla").stdout


def test_describe_refuses_a_file_without_ids(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("x,z\n" + "0.5,1.25\n1.5,7.5\n" * 9)
    result = CliRunner().invoke(cli, ["data", "describe", str(path)])
    assert "no column looks like ids; name some with --categorical" in str(result.exception)


def test_all_leaves_label_time_numbers_and_bags_out_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "csv")
    result = run("data", "describe", str(path), "--categorical", "all", "--limit", "300")
    (line,) = (line for line in result.stderr.splitlines() if "ids are" in line)
    ids, others = line.split("; not ids: ")
    assert ids == "--categorical all: ids are row_id, user, item, new, shop"
    assert "click looks like the label (--label click)" in others
    assert "ts looks like the time (--time ts)" in others
    assert "price holds numbers from" in others
    assert "(--dense price)" in others
    assert "tags holds several by ';' (--bag tags)" in others
    fields = open_source(str(path), DataOptions(categorical=("all",), label="click")).schema.fields
    assert [field.name for field in fields] == ["row_id", "user", "item", "new", "shop"]


def test_all_keeps_a_column_that_is_named_beside_it() -> None:
    source = open_frame(as_text(), DataOptions(categorical=("all", "price")))
    assert [field.name for field in source.schema.fields][-1] == "price"


@pytest.mark.parametrize("use", ["categorical", "dense", "label"])
def test_list_column_as_another_use_hints_at_bag(use: str, tmp_path: Path) -> None:
    options = {"categorical": "user", use: "tags"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    path = write(tmp_path, "parquet")
    result = CliRunner().invoke(cli, ["data", "describe", str(path), *words])
    assert "column tags holds lists: give it with --bag tags" in str(result.exception)


def test_joined_ids_as_one_id_hint_at_bag(tmp_path: Path) -> None:
    result = run("data", "describe", str(write(tmp_path, "csv")), "--categorical", "user,tags")
    hint = "column tags holds several by ';', each text is one id; --bag tags reads the ids"
    assert hint in result.stderr
