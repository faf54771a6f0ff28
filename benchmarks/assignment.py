"""Time of the exact assignment, beside scipy's at the size where scipy is still quick.

Run `python -m benchmarks.assignment`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks.record import markdown, record
from embroute.kernels.array_types import F64
from embroute.planner.assignment import assign

Costs = Callable[[np.random.Generator, int, int], F64]

SIZES = [(1024, 8), (8192, 8), (65536, 8), (1024, 64), (8192, 64)]
SCIPY_SIZE = SIZES[0]
REPEATS = 15
SCIPY_REPEATS = 3
# Largest time on one core: three times the time of a C++ version; for 64 workers our own target.
LIMIT_MS = {(1024, 8): 2.1, (8192, 8): 12.0, (65536, 8): 117.0, (8192, 64): 60.0}


def uniform(rng: np.random.Generator, samples: int, workers: int) -> F64:
    return rng.random((samples, workers))


def realistic(rng: np.random.Generator, samples: int, workers: int) -> F64:
    """Pull times of 26 rows, each cached or not; half the links ten times slower. Many ties."""
    pull_s_W = np.where(np.arange(workers) < workers // 2, 0.1, 1.0) * 2e-6
    present_SW = rng.binomial(26, 0.6, (samples, workers))
    return np.asarray((26 - present_SW) * pull_s_W, np.float64)


def one_favourite(rng: np.random.Generator, samples: int, workers: int) -> F64:
    """Every sample prefers the same worker."""
    cost_SW = rng.random((samples, workers))
    cost_SW[:, 0] -= 1
    return cost_SW


def one_order(rng: np.random.Generator, samples: int, workers: int) -> F64:
    """Every sample prefers the workers in the same order: paths through many workers."""
    weight_S = rng.random((samples, 1))
    return weight_S * np.arange(1, workers + 1) + 0.01 * rng.random((samples, workers))


HEADINGS = ["size", "costs", "ms", "limit ms", "scipy ms", "scipy / ours"]
KINDS: list[Costs] = [uniform, realistic, one_favourite, one_order]


def median_ms(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def scipy_total(cost_SW: F64, quotas: NDArray[np.int64]) -> float:
    place_SP = np.repeat(cost_SW, quotas, axis=1)
    return float(place_SP[linear_sum_assignment(place_SP)].sum())


def row(costs: Costs, samples: int, workers: int) -> list[str]:
    """One line of the table; at scipy's size also scipy's time and a check that totals agree."""
    cost_SW = costs(np.random.default_rng([0, samples, workers]), samples, workers)
    quotas = np.full(workers, samples // workers)
    worker_S = assign(cost_SW, quotas)
    ours_ms = median_ms(lambda: assign(cost_SW, quotas), REPEATS)
    limit = LIMIT_MS.get((samples, workers), "")
    scipy_cells = ["", ""]
    if (samples, workers) == SCIPY_SIZE:
        scipy_ms = median_ms(lambda: scipy_total(cost_SW, quotas), SCIPY_REPEATS)
        value = cost_SW[np.arange(samples), worker_S].sum()
        np.testing.assert_allclose(value, scipy_total(cost_SW, quotas), rtol=1e-12)
        scipy_cells = [f"{scipy_ms:.0f}", f"{scipy_ms / ours_ms:.0f}x"]
    name = costs.__name__.replace("_", " ")
    return [f"{samples} x {workers}", name, f"{ours_ms:.2f}", str(limit), *scipy_cells]


def main() -> None:
    rows = []
    for samples, workers in SIZES:
        for costs in KINDS:
            rows.append(row(costs, samples, workers))
            print(rows[-1], flush=True)
    message = (
        f"Medians of {REPEATS} runs (scipy: {SCIPY_REPEATS}; its time includes repeating columns)."
    )
    table = markdown(HEADINGS, rows)
    record(
        "assignment", "Exact assignment: samples x workers, equal quotas", f"{message}\n\n{table}"
    )


if __name__ == "__main__":
    main()
