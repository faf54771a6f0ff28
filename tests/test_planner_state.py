"""The planner state of a checkpoint: resume on the same job, and on another job."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embroute.checkpoint import planner_state
from embroute.checkpoint.planner_state import from_seed, load_planner, load_trained, save_planner
from embroute.config.cluster import uniform_cluster
from embroute.data.schema import Schema, Table
from embroute.models.initial_rows import initial_rows
from embroute.planner.decide import advance, plan_step
from embroute.planner.plan_stream import start
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.policies.catalog import make_policy
from tests.workloads import long_workload


def contents(state: State) -> dict[str, Any]:
    """Whatever a state holds, found by its declaration."""
    found: dict[str, Any] = {one.name: getattr(state, one.name) for one in fields(state)}
    [found.update(found.pop(part)._asdict()) for part in ("caches", "cells", "eviction")]
    for kind, memory in found.pop("memories").items():
        found.update({f"{kind.__name__}.{name}": a for name, a in memory._asdict().items()})
    return found


@pytest.mark.parametrize("name", ["esd(1)", "het(4)", "fae", "bagpipe(3)", "herald(2)", "embroute"])
def test_loaded_planner_state_plans_the_same_steps(name: str, tmp_path: Path) -> None:
    policy, workload = make_policy(name), long_workload("sgd")
    state, loaded = workload.start(policy), workload.start(policy)
    for memory in loaded.memories.values():
        for array in memory._asdict().values():
            array[:] = array[::-1].copy()
    for step, window in zip(range(40), workload.windows(policy, state), strict=False):
        plan = plan_step(policy, window, state)
        if step >= 20:
            again = plan_step(policy, window, loaded)
            np.testing.assert_array_equal(plan.worker_S, again.worker_S)
            np.testing.assert_array_equal(plan.placement.slot_T, again.placement.slot_T)
            advance(policy, loaded, again)
        advance(policy, state, plan)
        if step == 19:
            save_planner(tmp_path, state, {"epoch": 3, "of": None})
            assert load_planner(tmp_path, loaded) == {"epoch": 3, "of": None}
        for key, value in contents(state).items() if step >= 19 else ():
            np.testing.assert_array_equal(value, contents(loaded)[key], key, strict=True)


def test_planner_state_of_another_job_is_refused(tmp_path: Path) -> None:
    def state(rows: tuple[int, int], workers: int) -> State:
        schema = Schema((Table("a", rows[0]), Table("b", rows[1])), ())
        return start(make_policy("esd(1)"), Setup(schema, uniform_cluster(workers, 1), (4, 8)))

    save_planner(tmp_path, state((20, 40), 2), {})
    with pytest.raises(ValueError, match=r"'slot_WCF' has the shape \[2, 6, 4\], expected"):
        load_planner(tmp_path, state((20, 40), 3))
    with pytest.raises(ValueError, match="the caches have other capacities in the checkpoint"):
        load_planner(tmp_path, state((40, 20), 2))


def test_loaded_planner_of_another_policy_knows_the_trained_rows(tmp_path: Path) -> None:
    policy, workload = make_policy("embroute(objective=cost)"), long_workload("sgd")
    state, elsewhere = workload.start(policy), workload.start(make_policy("esd(1)"))
    trained = set[int]()
    for _, window in zip(range(5), workload.windows(policy, state), strict=False):
        plan = plan_step(policy, window, state)
        trained.update(plan.rows.rows_U.tolist())
        advance(policy, state, plan)
    save_planner(tmp_path, state, {})
    load_trained(tmp_path, elsewhere)
    assert set(np.flatnonzero(elsewhere.caches.cells.number_R).tolist()) == trained
    assert elsewhere.caches.cells.numbered[0] == len(trained)
    assert not elsewhere.caches.cells.cell_NW.any()


@pytest.mark.parametrize(("seeded", "right"), [(True, True), (False, False)])
def test_planner_state_records_whether_rows_come_from_the_seed(
    seeded: bool, right: bool, tmp_path: Path
) -> None:
    schema = Schema((Table("a", 20),), ())
    setup = replace(Setup(schema, uniform_cluster(2, 1), 4), seed=7, seeded=seeded)
    save_planner(tmp_path, start(make_policy("esd(1)"), setup), {})
    assert from_seed(tmp_path, 7) == right
    assert not from_seed(tmp_path, 8)


def test_rows_drawn_by_another_program_do_not_count_as_seeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(Schema((Table("a", 20),), ()), uniform_cluster(2, 1), 4)
    save_planner(tmp_path, start(make_policy("esd(1)"), setup), {})
    assert from_seed(tmp_path, setup.seed)
    monkeypatch.setattr(planner_state, "initial_rows", lambda *args: 2 * initial_rows(*args))
    assert not from_seed(tmp_path, setup.seed)
