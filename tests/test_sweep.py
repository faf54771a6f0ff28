"""The benchmark sweep over settings continues where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sweep import (
    OWN,
    Case,
    Log,
    Result,
    _sources,
    cases,
    job,
    left,
    page,
    priced,
    rivals,
    run,
)
from embroute.data.open import open_source
from embroute.simulator.simulation import measure_named

pytestmark = pytest.mark.full

NAMES = ["online-retail"]


def test_sweep_cases_come_once_in_a_fixed_order() -> None:
    grid = cases(NAMES)
    assert grid == cases(NAMES)
    assert len(set(grid)) == len(grid) == 4 * 3 * 4 * 3 * 4


def test_sweep_rivals_include_worker_subsets() -> None:
    assert "esd(1, workers=0+1)" in rivals(4)
    assert "herald(workers=0)" in rivals(2)
    assert not any("workers" in name for name in rivals(1))


def test_sweep_ratio_compares_with_the_best_rival(tmp_path: Path) -> None:
    case = cases(NAMES)[0]
    result = Result(case, {OWN: 3.0, "esd(1)": 2.0, "herald": 4.0})
    assert result.best == "esd(1)"
    assert result.ratio == 1.5
    assert "1.500" in page([result], 1)
    assert Result(case, {"esd(1)": 2.0}).ratio == float("inf")


def test_sweep_prices_equal_single_simulations() -> None:
    source = open_source("online-retail")
    case = Case("online-retail", "edge", "10%", 4, 16, 0.0)
    loads = [case, case._replace(dim=64, compute_ms=0.05), case._replace(compute_ms=2.0)]
    tasks = {load.load: job(load, source, 14) for load in loads}
    for name in ("vanilla", "esd(1, workers=0+1)"):
        found = priced(name, tasks)
        for load, task in tasks.items():
            expected = 1e3 * measure_named(name, task).step_time_s
            assert found[load] == pytest.approx(expected, rel=1e-9)


def test_sweep_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_sources, "online-retail", open_source("online-retail"))
    out = tmp_path / "sweep.jsonl"
    grid = cases(NAMES)
    small = next(case for case in grid if case.workers == 2)
    asked = left(Log(out), NAMES)
    assert [case for case, _ in asked] == grid
    assert sum(new for _, new in asked) == len({case.place for case in grid}) == 4 * 3 * 4
    Log(out).add(run(small, 12, True))
    out.write_text(out.read_text() + '{"case": ["online-re\n')
    again = Log(out)
    (result,) = again.results.values()
    assert set(result.ms) == {OWN, result.best}
    task = job(small, open_source("online-retail"), 12)
    each = {name: 1e3 * measure_named(name, task).step_time_s for name in rivals(small.workers)}
    assert result.ms[result.best] == pytest.approx(min(each.values()), rel=1e-9)
    todo = dict(left(again, NAMES))
    assert set(todo) == set(grid) - {small}
    assert not any(new for case, new in todo.items() if case.place == small.place)
    assert len(left(again, NAMES, most=3)) == 3
