"""The fixed properties of a run: widths, record sizes, cache capacities and quotas."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.config.cluster import Cluster
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size, parse_cache
from embroute.cost.step_time import OPTIMIZERS, record_bytes
from embroute.data.schema import Field, Schema, Table
from embroute.kernels.codes import DELTA, GRADIENT, VALUE, VALUE_STATE
from embroute.planner.setup import Setup, parse_dim


def schema_of(*rows: int) -> Schema:
    tables = tuple(Table(f"t{i}", count) for i, count in enumerate(rows))
    return Schema(tables, tuple(Field(table.name, i) for i, table in enumerate(tables)))


def edge(workers: int = 4) -> Cluster:
    return open_cluster(f"edge-{workers}")


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    rows = draw(st.lists(st.integers(1, 500), min_size=1, max_size=4))
    widths = draw(st.lists(st.integers(1, 70), min_size=len(rows), max_size=len(rows)))
    unit = draw(st.sampled_from(["share", "rows", "bytes"]))
    amount = draw(
        {
            "share": st.floats(0, 1),
            "rows": st.integers(0, 2000).map(float),
            "bytes": st.integers(0, 400_000).map(float),
        }[unit]
    )
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    return Setup(schema_of(*rows), edge(), tuple(widths), 8, optimizer, Size(amount, unit))


@given(setups())
def test_cache_capacity_keeps_every_limit(setup: Setup) -> None:
    capacity_A = setup.capacity_WA[0]
    assert (setup.capacity_WA == capacity_A).all()
    assert setup.capacity_WA.shape == (4, len(set(setup.widths)))
    assert (capacity_A <= setup.rows_A).all()
    assert (capacity_A >= 0).all()
    slot_bytes_A = setup.record_bytes_XA[VALUE_STATE]
    size, all_rows = setup.cache_W[0], setup.schema.num_rows
    amount = size.amount
    if size.unit == "share":
        limit = amount * all_rows
        used = float(capacity_A.sum())
    elif size.unit == "rows":
        limit, used = amount, float(capacity_A.sum())
    else:
        limit, used = amount, float((capacity_A * slot_bytes_A).sum())
    assert used <= limit + 1e-6
    # What is left is less than one slot of every arena, unless everything fits.
    whole = (capacity_A == setup.rows_A).all()
    spare = len(capacity_A) if size.unit != "bytes" else float(slot_bytes_A.sum())
    assert whole or used > limit - spare - 1e-6


def test_cache_share_of_a_decimal_fraction_is_exact() -> None:
    setup = Setup(schema_of(30, 70), edge(), (8, 4), cache=Size(0.1, "share"))
    assert setup.arenas == (4, 8)
    assert setup.rows_A.tolist() == [70, 30]
    assert setup.capacity_WA.tolist() == [[7, 3]] * 4


def test_workers_may_have_caches_of_their_own() -> None:
    cache = parse_cache("--cache", "10%+20rows+1e+1rows+1280B")
    setup = Setup(schema_of(30, 70), edge(), (8, 4), cache=cache)
    assert setup.capacity_WA.tolist() == [[7, 3], [14, 6], [7, 3], [43, 18]]
    assert setup.cache_rows_W.tolist() == [10, 20, 10, 61]
    with pytest.raises(ValueError, match="--cache names 4 sizes for 2 workers"):
        Setup(schema_of(30, 70), edge(2), (8, 4), cache=cache)
    with pytest.raises(ValueError, match=r"--cache 1: at most \d+ slots per worker"):
        Setup(schema_of(2**30), edge(2), cache=parse_cache("--cache", "1%+100%"))


def test_tables_of_one_width_share_an_arena() -> None:
    setup = Setup(schema_of(30, 70, 100), edge(2), (8, 4, 8), cache=Size(20, "rows"))
    assert setup.rows_A.tolist() == [70, 130]
    assert setup.capacity_WA.tolist() == [[7, 13]] * 2
    assert setup.arena_of(np.array([0, 29, 30, 99, 100, 199])).tolist() == [1, 1, 0, 0, 1, 1]
    assert setup.table_of(np.array([0, 29, 30, 99, 100, 199])).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("optimizer", "slot_floats"),
    [("sgd", 16), ("rowwise-adagrad", 17), ("adagrad", 32), ("adam", 48)],
)
def test_cache_slot_holds_value_and_optimizer_state(optimizer: str, slot_floats: int) -> None:
    budget = 100 * 4 * slot_floats
    exact = Setup(schema_of(1000), edge(), 16, optimizer=optimizer, cache=Size(budget, "bytes"))
    assert exact.capacity_WA.tolist() == [[100]] * 4
    short = Setup(schema_of(1000), edge(), 16, optimizer=optimizer, cache=Size(budget - 1, "bytes"))
    assert short.capacity_WA.tolist() == [[99]] * 4


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [("sgd", [0, 0]), ("rowwise-adagrad", [1, 1]), ("adagrad", [4, 10]), ("adam", [8, 20])],
)
def test_record_sizes_follow_the_optimizer(optimizer: str, state: list[int]) -> None:
    sizes = record_bytes((4, 10), optimizer)
    assert sizes[VALUE].tolist() == [16, 40]
    assert sizes[GRADIENT].tolist() == [16, 40]
    assert sizes[VALUE_STATE].tolist() == [4 * (4 + state[0]), 4 * (10 + state[1])]
    assert sizes[DELTA].tolist() == sizes[VALUE_STATE].tolist()


def test_row_seconds_are_the_whole_record_over_the_link() -> None:
    setup = Setup(schema_of(10, 10), open_cluster("edge-2"), (4, 10), optimizer="adagrad")
    assert setup.row_seconds_AW == pytest.approx(
        np.array([[32 / 625e6, 32 / 62.5e6], [80 / 625e6, 80 / 62.5e6]])
    )


def test_rows_on_the_host_of_a_worker_take_no_link_time() -> None:
    # A quarter of the rows sits beside the worker.
    seconds = Setup(schema_of(10), open_cluster("colo-4"), 16).row_seconds_AW
    assert seconds == pytest.approx(np.full((1, 4), 0.75 * 64 / 1.25e9))


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=8).filter(sum),
    st.integers(0, 3000),
)
def test_quotas_are_proportional_and_complete(shares: list[float], samples: int) -> None:
    setup = Setup(schema_of(10), edge(len(shares)), shares=tuple(shares))
    quotas = setup.quotas(samples)
    assert quotas.sum() == samples
    exact = samples * np.array(shares) / sum(shares)
    assert (np.abs(quotas - exact) < 1).all()
    assert all(quota == 0 for quota, share in zip(quotas, shares, strict=True) if share == 0)


def test_equal_quotas_give_the_remainder_to_the_first_workers() -> None:
    setup = Setup(schema_of(10), edge(4))
    assert setup.quotas(8).tolist() == [2, 2, 2, 2]
    assert setup.quotas(10).tolist() == [3, 3, 2, 2]
    assert setup.quotas(3).tolist() == [1, 1, 1, 0]
    assert setup.quotas(0).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64", 64),
        (" 64 ", 64),
        ("64,t1=16", (64, 16, 64)),
        ("8, t2=4 ,t0=2", (2, 8, 4)),
        ("8,t0=8", (8, 8, 8)),
    ],
)
def test_dim_option_sets_the_width_of_each_table(
    text: str, expected: int | tuple[int, ...]
) -> None:
    assert parse_dim(text, schema_of(5, 5, 5)) == expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "--dim must look like 64 or 64,C1=16, got ''"),
        ("wide", "--dim must look like 64 or 64,C1=16, got 'wide'"),
        ("t0=16", "--dim must look like 64 or 64,C1=16, got 't0=16'"),
        ("-4", "--dim must look like 64 or 64,C1=16, got '-4'"),
        ("64,C1=16", "--dim 'C1=16': expected table=width with a table of t0, t1"),
        ("64,t1", "--dim 't1': expected table=width with a table of t0, t1"),
        ("64,t1=x", "--dim 't1=x': expected table=width"),
    ],
)
def test_dim_option_refuses_bad_widths(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_dim(text, schema_of(5, 5))


def test_zero_width_is_refused() -> None:
    with pytest.raises(ValueError, match="--dim must be between 1 and 1000000, got 0"):
        Setup(schema_of(5), edge(), 0)
    with pytest.raises(ValueError, match="--dim must be between 1 and 1000000, got 0"):
        Setup(schema_of(5, 5), edge(), (4, 0))


def test_width_count_must_match_the_table_count() -> None:
    with pytest.raises(ValueError, match="--dim names 1 widths, the data has 2 tables"):
        Setup(schema_of(5, 5), edge(), (4,))


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0, 1.0, -1.0), (0.0, 0.0, 0.0, 0.0)])
def test_bad_quotas_are_refused(shares: tuple[float, ...]) -> None:
    fault = f"--quotas needs 4 numbers of at least 0, got {shares}"
    with pytest.raises(ValueError, match=re.escape(fault)):
        Setup(schema_of(5), edge(), shares=shares)


def test_unknown_optimizer_is_refused() -> None:
    fault = "--optimizer must be one of sgd, adagrad, rowwise-adagrad, adam, got 'lion'"
    with pytest.raises(ValueError, match=fault):
        Setup(schema_of(5), edge(), optimizer="lion")


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 2147483647 rows in all, the data has 2147483648"):
        Setup(schema_of(2**31), edge())


def test_too_many_cache_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--cache 0\.5: at most \d+ slots per worker"):
        Setup(schema_of(2**30), edge(), cache=Size(0.5, "share"))
