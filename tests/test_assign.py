"""The assignment has the cost of scipy's, keeps quotas, and proves its optimum on large cases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from embroute.kernels.array_types import F64, I64
from embroute.planner import assignment as assign_module
from embroute.planner.assignment import assign
from embroute.planner.kernels.shortest_paths import (
    PathSearch,
    assign_cheapest,
    assign_dummies,
    cheapest,
    has_fault,
    move_overflow,
)
from tests.sizes import sized

Costs = Callable[[np.random.Generator, int, int], F64]


def uniform(rng: np.random.Generator, samples: int, workers: int) -> F64:
    return rng.random((samples, workers))


def negative(rng: np.random.Generator, samples: int, workers: int) -> F64:
    return rng.normal(scale=1e3, size=(samples, workers))


def few_integers(rng: np.random.Generator, samples: int, workers: int) -> F64:
    return rng.integers(-2, 3, (samples, workers)).astype(np.float64)


def equal(rng: np.random.Generator, samples: int, workers: int) -> F64:
    return np.full((samples, workers), rng.normal())


def rows_missing(rng: np.random.Generator, samples: int, workers: int) -> F64:
    """Pull times of 26 rows, each present or missing, over links with speeds 1:10."""
    pull_s_W = np.where(np.arange(workers) % 2, 0.1, 1.0) * 2e-6
    missing_SW = np.count_nonzero(rng.random((samples, workers, 26)) < 0.4, axis=2)
    return np.asarray(missing_SW * pull_s_W, np.float64)


def one_favourite(rng: np.random.Generator, samples: int, workers: int) -> F64:
    cost_SW = rng.random((samples, workers))
    cost_SW[:, -1] -= 2
    return cost_SW


def chained(rng: np.random.Generator, samples: int, workers: int) -> F64:
    """Costs whose shortest paths pass through many workers."""
    return rng.random((samples, 1)) * np.arange(workers) + 0.01 * rng.random((samples, workers))


def forbidden(rng: np.random.Generator, samples: int, workers: int) -> F64:
    cost_SW = rng.integers(0, 9, (samples, workers)).astype(np.float64)
    cost_SW[rng.random((samples, workers)) < rng.choice([0.1, 0.5, 0.9])] = np.inf
    return cost_SW


FINITE: list[Costs] = [
    uniform,
    negative,
    few_integers,
    equal,
    rows_missing,
    one_favourite,
    chained,
]


def even(samples: int, workers: int) -> I64:
    return np.diff(np.arange(workers + 1) * samples // workers)


def uneven(rng: np.random.Generator, places: int, workers: int) -> I64:
    """Quotas that sum to `places`, some of them zero."""
    weight = rng.random(workers) * (rng.random(workers) < 0.7) + 1e-9
    return rng.multinomial(places, weight / weight.sum())


def total(cost_SW: F64, worker_S: NDArray[np.int32]) -> float:
    return float(cost_SW[np.arange(worker_S.size), worker_S].sum())


def optimum(cost_SW: F64, quotas: I64) -> float:
    """The least cost according to scipy, with one column for each place."""
    place_SP = np.repeat(cost_SW, quotas, axis=1)
    return float(place_SP[linear_sum_assignment(place_SP)].sum())


def misfits(cost_SW: F64, quotas: I64) -> int:
    """The number of samples that no assignment can place, by maximum matching."""
    finite_SP = np.repeat(np.isfinite(cost_SW), quotas, axis=1)
    if not finite_SP.any():
        return len(cost_SW)
    matched = maximum_bipartite_matching(csr_matrix(finite_SP), perm_type="column")
    return int((matched < 0).sum())


def check(cost_SW: F64, quotas: I64) -> None:
    """Assert one worker per sample, within quotas, at scipy's cost."""
    worker_S = assign(cost_SW, quotas)
    assert worker_S.shape == cost_SW.shape[:1]
    assert worker_S.dtype == np.int32
    assert (np.bincount(worker_S, minlength=quotas.size) <= quotas).all()
    scale = float(np.abs(cost_SW[np.isfinite(cost_SW)]).max()) if cost_SW.size else 1.0
    assert total(cost_SW, worker_S) == pytest.approx(
        optimum(cost_SW, quotas), rel=1e-12, abs=1e-12 * scale
    )


def check_or_refuse(cost_SW: F64, quotas: I64) -> bool:
    """Check the optimum, or the count in the refusal; whether all samples were placed."""
    count = misfits(cost_SW, quotas)
    if count == 0:
        check(cost_SW, quotas)
        return True
    with pytest.raises(ValueError, match=f"^{count} of {len(cost_SW)} samples cannot be placed"):
        assign(cost_SW, quotas)
    return False


def moves(cost_SW: F64, worker_S: NDArray[np.int32]) -> F64:
    """The cheapest move of any sample from worker to worker."""
    workers = cost_SW.shape[1]
    edge_WW = np.full((workers, workers), np.inf)
    for j in np.unique(worker_S):
        here = worker_S == j
        edge_WW[j] = (cost_SW[here] - cost_SW[here, j : j + 1]).min(axis=0)
    np.fill_diagonal(edge_WW, np.inf)
    return edge_WW


def proves_optimal(cost_SW: F64, worker_S: NDArray[np.int32], quotas: I64) -> bool:
    """Whether workers have prices at which no move is a gain (a free place moves at no cost)."""
    edge_WW = moves(cost_SW, worker_S)
    spare_W = quotas > np.bincount(worker_S, minlength=quotas.size)
    edge_WW[spare_W] = np.minimum(edge_WW[spare_W], 0.0)
    price_W = np.zeros(quotas.size)
    for _ in range(quotas.size):
        price_W = np.maximum(price_W, (price_W[:, None] - edge_WW).max(axis=0))
    scale = float(np.abs(cost_SW[np.isfinite(cost_SW)]).max())
    return bool((edge_WW + price_W - price_W[:, None]).min() >= -1e-13 * scale)


@pytest.mark.parametrize("costs", FINITE)
def test_assignment_equals_scipy_on_random_cases(costs: Costs) -> None:
    for case in range(400):
        rng = np.random.default_rng([1, case])
        samples, workers = int(rng.integers(1, 60)), int(rng.integers(1, 8))
        slack = int(rng.choice([0, 0, 1, 20]))
        check(costs(rng, samples, workers), uneven(rng, samples + slack, workers))


def test_assignment_with_forbidden_pairs_equals_scipy_or_counts_misfits() -> None:
    placed = 0
    for case in range(800):
        rng = np.random.default_rng([2, case])
        samples, workers = int(rng.integers(1, 40)), int(rng.integers(1, 8))
        slack = int(rng.choice([-3, 0, 5, 60]))
        quotas = uneven(rng, max(0, samples + slack), workers)
        placed += check_or_refuse(forbidden(rng, samples, workers), quotas)
    assert 100 < placed < 700


@pytest.mark.parametrize("costs", FINITE)
@pytest.mark.parametrize(("samples", "workers"), [(300, 3), (256, 32), (40, 40)])
def test_assignment_equals_scipy_on_larger_cases(costs: Costs, samples: int, workers: int) -> None:
    rng = np.random.default_rng([3, samples])
    check(costs(rng, samples, workers), even(samples, workers))


@settings(max_examples=sized(100, 400))
@given(st.data())
def test_assignment_equals_scipy_on_generated_cases(data: st.DataObject) -> None:
    samples, workers = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 4))
    cost = st.one_of(st.integers(-2, 2), st.just(np.inf), st.floats(-1e6, 1e6))
    size = samples * workers
    flat = data.draw(st.lists(cost, min_size=size, max_size=size))
    quotas = data.draw(st.lists(st.integers(0, 8), min_size=workers, max_size=workers))
    cost_SW = np.array(flat, dtype=np.float64).reshape(samples, workers)
    if samples:
        check_or_refuse(cost_SW, np.array(quotas))
    else:
        assert assign(cost_SW, np.array(quotas)).size == 0


@pytest.mark.parametrize("costs", [*FINITE, forbidden])
@pytest.mark.parametrize(("samples", "workers"), [(8192, 8), (1024, 64)])
@pytest.mark.parametrize("slack", [0, 5])
def test_large_assignments_prove_their_optimum(
    costs: Costs, samples: int, workers: int, slack: int
) -> None:
    cost_SW = costs(np.random.default_rng(0), samples, workers)
    cost_SW = cost_SW[np.isfinite(cost_SW).any(axis=1)]
    quotas = even(cost_SW.shape[0], workers) + slack
    worker_S = assign(cost_SW, quotas)
    load_W = np.bincount(worker_S, minlength=workers)
    assert (load_W <= quotas).all()
    assert np.isfinite(total(cost_SW, worker_S))
    assert proves_optimal(cost_SW, worker_S, quotas)


def test_float32_costs_assign_like_float64() -> None:
    rng = np.random.default_rng(4)
    cost_SW = rng.random((200, 6), dtype=np.float32)
    quotas = even(200, 6).astype(np.int32)
    wide = assign(cost_SW.astype(np.float64), quotas)
    np.testing.assert_array_equal(assign(cost_SW, quotas), wide)


def test_assignment_ignores_memory_layout_and_keeps_its_inputs() -> None:
    rng = np.random.default_rng(5)
    cost_SW, quotas = few_integers(rng, 300, 5), uneven(rng, 310, 5)
    cost_before, quotas_before = cost_SW.copy(), quotas.copy()
    first = assign(cost_SW, quotas)
    np.testing.assert_array_equal(cost_SW, cost_before)
    np.testing.assert_array_equal(quotas, quotas_before)
    cost_SW.flags.writeable = quotas.flags.writeable = False
    np.testing.assert_array_equal(assign(cost_SW, quotas), first)
    np.testing.assert_array_equal(assign(np.asfortranarray(cost_SW), quotas), first)


def test_assignment_ties_go_to_the_most_room_then_the_first() -> None:
    cost_SW = np.zeros((4, 3))
    np.testing.assert_array_equal(assign(cost_SW, np.array([1, 2, 1])), [1, 0, 1, 2])


def test_assignment_accepts_no_samples_and_refuses_no_workers() -> None:
    assert assign(np.empty((0, 3)), np.array([0, 0, 0])).size == 0
    assert assign(np.empty((0, 0)), np.empty(0, np.int64)).size == 0
    with pytest.raises(ValueError, match="2 of 2 samples cannot be placed"):
        assign(np.empty((2, 0)), np.empty(0, np.int64))


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1e301, -1e301])
@pytest.mark.parametrize("quotas", [[2, 2], [4, 0]])
def test_assignment_refuses_nan_and_huge_costs(bad: float, quotas: list[int]) -> None:
    cost_SW = np.ones((4, 2))
    cost_SW[2, 1] = bad
    with pytest.raises(ValueError, match="cost_SW has"):
        assign(cost_SW, np.array(quotas))


@pytest.mark.parametrize(
    ("cost_SW", "quotas", "words"),
    [
        (np.ones((4, 2)), np.array([2, 2, 2]), "not"),
        (np.ones(4), np.array([4]), "not"),
        (np.ones((4, 2)), np.array([5, -1]), "-1"),
        (np.ones((4, 2)), np.array([2.0, 2.0]), "float64"),
        (np.ones((4, 2), np.int64), np.array([2, 2]), "int64"),
        (np.ones((4, 2)), np.array([1, 2]), "1 of 4"),
        (np.ones((4, 2)), np.array([0, 0]), "4 of 4"),
        (np.array([[np.inf, np.inf], [1.0, 1.0]]), np.array([2, 2]), "1 of 2"),
    ],
)
def test_assignment_errors_name_the_wrong_argument(cost_SW: F64, quotas: I64, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        assign(cost_SW, quotas)


def test_assignment_accepts_huge_quotas_and_costs() -> None:
    cost_SW = np.array([[1e300, -1e300], [-1e300, 1e300], [0.0, 1e300]])
    quotas = np.array([2**62, 2**62])
    np.testing.assert_array_equal(assign(cost_SW, quotas), [1, 0, 0])
    np.testing.assert_array_equal(assign(cost_SW, np.array([1, 2])), [1, 0, 1])


def test_cheapest_and_has_fault_equal_their_numpy_twins() -> None:
    for case in range(100):
        rng = np.random.default_rng([6, case])
        cost_SW = forbidden(rng, 1, 6)
        price_W, room_W = few_integers(rng, 1, 6)[0], rng.integers(-3, 4, 6)
        order = np.lexsort((np.arange(6), -room_W, cost_SW[0] + price_W))
        expected = order[0] if np.isfinite(cost_SW).any() else -1
        assert cheapest(cost_SW[0], price_W, room_W) == expected
        finite = cost_SW[cost_SW < np.inf]
        assert has_fault(cost_SW, 5.0) == bool((np.abs(finite) > 5).any())


@pytest.mark.parametrize("costs", [*FINITE, forbidden])
def test_edges_between_workers_equal_the_cheapest_moves(costs: Costs) -> None:
    cost_SW = costs(np.random.default_rng(7), 400, 6)
    quotas = even(400, 6)
    state = assign_module._unassigned(cost_SW, quotas)
    search = PathSearch(np.zeros(6), np.empty(6), np.empty(6, np.int32), np.empty(6, np.bool_))
    unassigned = assign_cheapest(state, search.price_W)
    assign_dummies(state, search.price_W, 0)
    for moved in (False, True):
        if moved:
            move_overflow(state, search)
        here = state.worker_S >= 0
        np.testing.assert_array_equal(state.edge_WW, moves(cost_SW[here], state.worker_S[here]))
    assert unassigned == (~here).sum()
