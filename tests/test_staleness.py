"""Row versions show how many updates each read missed, under every kind of policy."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.staleness import Case
from benchmarks.staleness import train as train_case
from embroute.engine.observe.row_versions import Audit, audit
from embroute.launch.in_process import run_in_process
from embroute.policies.catalog import make_policy
from tests.jobs import Trained, batches, gathered, settings_of, train
from tests.sizes import marked_full, sized

STEPS = sized(60, 120)
EXACT = [
    "het(0)",
    "vanilla",
    "nocache",
    "esd(1)",
    "herald",
    "bagpipe(3)",
    "dispatch=esd sync=on-demand evict=clairvoyant(3)",
    "fae(hot=0.4, buffer=8)",
    "scars(hot=0.3, buffer=8)",
]


def audited(policy: str, topology: tuple[int, int], share: float) -> Audit:
    """A run with row versions, and the largest number of updates that a read missed."""
    workers, shards = topology
    settings = settings_of(policy, workers, share)
    settings["debug"] = "versions"
    stream = batches(workers, STEPS)
    results = run_in_process(workers, shards, lambda rank: train(rank, stream, "adagrad", settings))
    stamps = [result.stamps for result in results.values() if result.stamps is not None]
    assert len(stamps) == workers + shards
    return audit(stamps, make_policy(policy).exact)


@pytest.mark.parametrize(
    "policy", marked_full(EXACT, ["het(0)", "esd(1)", "bagpipe(3)", "fae(hot=0.4, buffer=8)"])
)
def test_exact_policies_read_no_stale_row(policy: str) -> None:
    found = audited(policy, (3, 2), 1.0 if "hot" in policy else 0.75)
    assert found.reads > 50 * STEPS
    assert found.missed == 0


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("bound", [1, 3, pytest.param(10, marks=pytest.mark.full)])
def test_het_reads_stay_within_their_staleness_bound(bound: int, share: float) -> None:
    workers = 4
    found = audited(f"het({bound})", (workers, 2), share)
    assert found.reads > 50 * STEPS
    assert found.unsent <= bound
    assert found.behind <= bound
    # The bound is on clocks, which take the larger of two; updates of others may be more.
    assert bound < found.missed <= (workers - 1) * (4 * bound + 2)
    # It is used: what must not be exceeded is reached.
    assert max(found.unsent, found.behind) == bound


def test_row_versions_change_no_result() -> None:
    stream, settings = batches(3, STEPS), settings_of("het(3)", 3)

    def run() -> Trained:
        return gathered(
            run_in_process(3, 2, lambda rank: train(rank, stream, "sgd", settings)), 3, 2
        )

    first = run()
    settings["debug"] = "versions"
    second = run()
    for mine, its in zip(first.tables + first.dense, second.tables + second.dense, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.full
def test_bounded_staleness_keeps_the_auc() -> None:
    """One short pass over labels of a known model: the AUC is near the exact AUC."""
    case = Case(32_000, 8_000, rows=100, workers=2, dim=4, cache=0.6)
    exact, tight, loose = (train_case(case, bound) for bound in (0, 10, 100))
    assert exact.best_auc == pytest.approx(0.83, abs=0.01)
    for found in (exact, tight, loose):
        assert 0.72 < found.auc < found.best_auc
        assert abs(found.auc - exact.auc) < 0.02
    assert exact.hits < tight.hits < loose.hits
