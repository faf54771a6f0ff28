"""Expected communication agrees with sampling and plain sums, and hot sets are the best ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.config.cluster_file import open_cluster
from embroute.cost.hot_rows import Draws, best_hot, expected_distinct, hot_threshold, predict_hot
from embroute.kernels.array_types import I64

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=40).map(lambda c: np.array(c, np.int64))


def zipf_counts(rows: int, exponent: float = 1.1, lookups: float = 1e6) -> I64:
    weights = np.arange(1, rows + 1, dtype=float) ** -exponent
    counts: I64 = np.round(lookups * weights / weights.sum()).astype(np.int64)
    return counts


@pytest.mark.parametrize("lookups", [10, 300, 5000])
def test_expected_distinct_rows_match_random_draws(lookups: int) -> None:
    counts = zipf_counts(2000)
    random = np.random.default_rng(lookups)
    drawn = [
        len(np.unique(random.choice(len(counts), lookups, p=counts / counts.sum())))
        for _ in range(200)
    ]
    error = np.std(drawn) / np.sqrt(len(drawn))
    assert expected_distinct(counts, lookups) == pytest.approx(np.mean(drawn), abs=4 * error)


@given(COUNTS.filter(lambda counts: counts.sum() > 0), st.integers(1, 500))
def test_expected_distinct_rows_equal_the_plain_sum(counts: I64, lookups: int) -> None:
    total = int(counts.sum())
    plain = sum(1 - (1 - int(count) / total) ** lookups for count in counts)
    assert expected_distinct(counts, lookups) == pytest.approx(plain, rel=1e-9, abs=1e-9)
    # A part of the rows, drawn with the same probabilities.
    part = counts[: len(counts) // 2]
    plain = sum(1 - (1 - int(count) / total) ** lookups for count in part)
    assert expected_distinct(part, lookups, total) == pytest.approx(plain, rel=1e-9, abs=1e-9)


def test_expected_distinct_rows_of_tiny_probabilities_are_not_zero() -> None:
    # One look-up in 10^17 each: 1 - (1 - p) is 0 in floating point.
    counts = np.ones(1000, np.int64)
    assert expected_distinct(counts, 10, total=1e20) == pytest.approx(1000 * 10 / 1e20)


def test_expected_distinct_rows_at_the_limits() -> None:
    assert expected_distinct(np.zeros(5, np.int64), 10) == 0
    assert expected_distinct(np.array([7]), 3) == 1
    assert expected_distinct(zipf_counts(50), 1) == pytest.approx(1)
    assert expected_distinct(np.full(50, 3), 1e9) == pytest.approx(50)


def test_hot_threshold_is_the_last_count_inside() -> None:
    counts = np.array([9, 5, 5, 2, 1])
    assert [hot_threshold(counts, hot) for hot in range(6)] == [10, 9, 5, 5, 2, 1]


def draws_of(tables: tuple[I64, ...], samples: float = 128) -> Draws:
    return Draws(tables, np.ones(len(tables)), samples)


@given(st.lists(COUNTS, min_size=1, max_size=3), st.integers(0, 70), st.integers(1, 8))
def test_hot_row_predictions_stay_in_range(tables: list[I64], threshold: int, workers: int) -> None:
    draws, cluster = draws_of(tuple(tables)), open_cluster(f"edge-{workers}")
    step = predict_hot(draws, threshold, cluster, 256)
    rows = sum(int((counts > 0).sum()) for counts in tables)
    assert 0 <= step.free_share <= 1
    assert 0 <= step.reduced_rows <= rows + 1e-9
    assert 0 <= step.cold_rows <= rows + 1e-9
    assert step.time_s >= 0


def test_hot_row_prediction_with_all_rows_hot_or_none() -> None:
    counts = zipf_counts(500)
    draws, cluster = draws_of((counts,)), open_cluster("dc-8")
    everything = predict_hot(draws, int(counts.min()), cluster, 256)
    assert everything.free_share == 1
    assert everything.hot == 500
    assert everything.cold_rows == 0
    assert everything.reduced_rows == pytest.approx(expected_distinct(counts, 8 * 128))
    nothing = predict_hot(draws, int(counts.max()) + 1, cluster, 256)
    assert nothing.free_share == nothing.reduced_rows == nothing.hot == 0
    assert nothing.cold_rows == pytest.approx(expected_distinct(counts, 128))


def test_free_samples_need_all_their_rows_hot() -> None:
    tables = (np.array([8, 1, 1]), np.array([5, 4, 1]))
    draws = Draws(tables, np.array([2.0, 1.0]), 16)
    step = predict_hot(draws, 4, open_cluster("dc-2"), 256)
    assert step.hot == 3
    assert step.free_share == pytest.approx(0.8**2 * 0.9)


FEW = st.lists(st.integers(0, 30), min_size=1, max_size=5).map(lambda c: np.array(c, np.int64))
NETWORKS = st.sampled_from(["edge-4", "dc-8", "colo-3", "edge-1"])


@given(st.lists(FEW, min_size=1, max_size=2), st.integers(1, 12), NETWORKS)
def test_best_hot_set_equals_an_exhaustive_search(
    tables: list[I64], limit: int, network: str
) -> None:
    draws, cluster = draws_of(tuple(tables), 4), open_cluster(network)
    best = best_hot(draws, limit, cluster, 256)
    assert best.hot <= limit
    pooled = -np.sort(-np.concatenate(tables))
    pooled = pooled[pooled > 0]
    # Ten rows are few enough that every size is tried.
    thresholds = (
        [hot_threshold(pooled, hot) for hot in range(len(pooled) + 1)] if len(pooled) else []
    )
    steps = [predict_hot(draws, threshold, cluster, 256) for threshold in thresholds]
    allowed = [step.time_s for step in steps if step.hot <= limit]
    assert best.time_s == pytest.approx(min(allowed, default=0.0))


@pytest.mark.parametrize("network", ["edge-8", "dc-8"])
@pytest.mark.parametrize("limit", [30, 300, 3000])
def test_best_hot_set_of_many_rows_is_near_the_best(network: str, limit: int) -> None:
    counts = np.unique(zipf_counts(3000, 1.3, 1e9))[::-1].copy()  # no ties: any size is possible
    draws, cluster = draws_of((counts,)), open_cluster(network)
    best = best_hot(draws, limit, cluster, 256)
    sizes = range(min(limit, len(counts)) + 1)
    times = [
        predict_hot(draws, hot_threshold(counts, hot), cluster, 256).time_s for hot in sizes[::3]
    ]
    assert best.hot <= limit
    assert best.time_s <= 1.02 * min(times)


def test_best_hot_set_without_room_is_empty() -> None:
    assert best_hot(draws_of((np.array([3, 1]),)), 0, open_cluster("edge-4"), 256).hot == 0


def test_best_hot_set_relieves_a_shard_bottleneck() -> None:
    # Nearly all look-ups go to a few rows, and all of them would cross one shard link.
    counts = np.concatenate([np.full(20, 100_000), np.ones(1000)]).astype(np.int64)
    best = best_hot(draws_of((counts,), 64), 500, open_cluster("dc-8"), 256)
    assert best.hot >= 20
    assert best.free_share > 0.99


def test_best_hot_set_of_even_access_is_empty() -> None:
    best = best_hot(draws_of((np.full(100_000, 3),)), 1000, open_cluster("edge-8"), 256)
    assert best.hot == 0
