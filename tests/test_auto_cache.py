"""The cache `auto`: a tenth of the rows, or as much as every step of every policy needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.cli.main import cli
from embroute.config.data_options import DataOptions
from embroute.config.spec import AUTO_CACHE, Size, parse_cache
from embroute.data.open import open_source
from embroute.data.schema import Field, Schema, Table
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from tests.sizes import sized
from tests.test_laws import POLICIES, refusal
from tests.workloads import Workload, draw_batches, star

ROWS = (60, 9, 300)


def schema_of(longest_bag: int | None) -> Schema:
    tables = tuple(Table(f"t{i}", rows) for i, rows in enumerate(ROWS))
    bag = Field("tags", 2, bag=True, longest_bag=longest_bag)
    return Schema(tables, (Field("a", 0), Field("b", 1), bag, Field("c", 0)), ("sample",), True)


def setup_of(batch: int, longest_bag: int | None = 3, cache: Size = AUTO_CACHE) -> Setup:
    return Setup(schema_of(longest_bag), star(3, 2), (4, 2, 4), batch, "adagrad", cache)


@st.composite
def tight_workloads(draw: st.DrawFn) -> Workload:
    """Steps that touch more rows than a tenth; the largest batch is that of the setup."""
    batch, shares = draw(st.integers(2, 24)), draw(st.sampled_from([(), (3.0, 1.0, 0.0)]))
    sizes = [batch] * draw(st.integers(4, 25)) + [1 + batch // 2]
    setup = replace(setup_of(batch), shares=shares)
    return Workload(setup, draw_batches(setup.schema, sizes, draw(st.integers(0, 999))))


@pytest.mark.parametrize("name", [n for n in POLICIES if "hot=" not in n and "share" not in n])
@given(workload=tight_workloads())
@settings(max_examples=sized(2, 20))
def test_automatic_cache_refuses_no_step_of_any_policy(name: str, workload: Workload) -> None:
    policy = make_policy(name)
    if workload.setup.optimizer in policy.sync.refused_optimizers:
        return
    assert refusal(policy, workload) == ""


def test_automatic_cache_is_a_tenth_where_that_suffices() -> None:
    wide = Schema((Table("t", 5000), Table("u", 90_000)), (Field("t", 0), Field("u", 1)))
    for batch in (3, 600):
        setup = Setup(wide, star(3), (4, 8), batch, cache=AUTO_CACHE)
        assert (
            setup.capacity_WA.tolist()
            == replace(setup, cache=Size(0.1, "share")).capacity_WA.tolist()
        )


def test_automatic_cache_holds_two_steps_or_all_rows() -> None:
    # A worker has 4 of 12 samples: 8 look-ups of table 0, 12 of table 2, and 4 of table 1.
    setup = setup_of(12)
    assert setup.arenas == (2, 4)
    assert setup.step_rows_A.tolist() == [4, 20]
    assert setup.capacity_WA.tolist() == [[8, 40]] * 3
    assert setup_of(120).capacity_WA.tolist() == [[9, 360]] * 3
    assert replace(setup, shares=(1.0, 0.0, 0.0)).step_rows_A.tolist() == [9, 24 + 36]


def test_bags_of_unknown_length_count_as_whole_tables() -> None:
    assert setup_of(12, longest_bag=None).step_rows_A.tolist() == [4, 8 + 300]


def test_rows_of_a_step_may_come_from_the_coordinator() -> None:
    told = replace(setup_of(3), step_rows=tuple(setup_of(12).step_rows_A.tolist()))
    assert told.capacity_WA.tolist() == setup_of(12).capacity_WA.tolist()


def test_cache_option_reads_auto_and_sizes() -> None:
    assert parse_cache("--cache", "auto") == AUTO_CACHE
    assert str(AUTO_CACHE) == "auto"
    assert parse_cache("--cache", 0.25) == Size(0.25, "share")


def write_clicks(path: Path, samples: int = 4000) -> None:
    """Two fields of 500 values: a tenth of the rows is fewer than a step's rows."""
    random = np.random.default_rng(5)
    columns = random.integers(0, 2, samples), *random.integers(0, 500, (2, samples))
    lines = [",".join(map(str, line)) for line in zip(*columns, strict=True)]
    path.write_text("\n".join(["click,user,item", *lines]) + "\n")


def test_longest_bag_of_a_file_is_known_after_reading(tmp_path: Path) -> None:
    path = tmp_path / "bags.csv"
    path.write_text("user,tags\n1,a|b|c\n2,\n3,a|d\n")
    options = DataOptions(categorical=("user",), bag=("tags",))
    assert [field.longest_bag for field in open_source(str(path), options).schema.fields] == [1, 3]


@pytest.mark.parametrize("command", [("compare", "--policies", "vanilla,fae"), ("simulate",)])
def test_default_cache_never_refuses_a_small_file(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    write_clicks(path)
    columns = ("--data", str(path), "--label", "click", "--categorical", "user,item")
    job = (*command, *columns, "--steps", "3", "--warmup", "1", "--network", "edge-3")
    if command[0] == "simulate":
        job += ("--policy", "vanilla", "--csv", str(tmp_path / "steps.csv"))
    result = CliRunner().invoke(cli, job)
    assert result.exit_code == 0, result.exception
    small = CliRunner().invoke(cli, [*job, "--cache", "0.1"])
    assert "needs 2" in str(small.exception)
    assert "its cache holds 100" in str(small.exception)
