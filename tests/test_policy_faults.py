"""Faults of a user's policy: refused before they do harm, with the policy, part and step."""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import embroute
from embroute import Assignment, Decision, Dispatch, PartMemory, Policy, SyncContext
from embroute.checkpoint.planner_state import load_planner, save_planner
from embroute.checkpoint.tensor_header import TENSOR_DTYPES
from embroute.cli.main import main
from embroute.planner.plan_stream import MEMORY_DTYPES
from embroute.planner.state import PlanError
from embroute.policies.catalog import make_policy
from examples.own_policy import LastWorker, sticky
from tests.processes import begin, finish
from tests.test_laws import play
from tests.workloads import long_workload


def answering(answer: object) -> Policy:
    """A policy whose dispatch gives this answer for every batch."""
    esd = make_policy("esd(1)")
    return replace(esd, dispatch=Dispatch("faulty", lambda context: answer))  # type: ignore


FAULTY = {
    "a worker that does not exist": (
        np.full(12, 99, np.int32),
        "worker 99 does not exist",
    ),
    "a negative worker": (np.full(12, -1, np.int32), r"worker -1 does not exist \(0 to 3\)"),
    "too few samples": (np.zeros(3, np.int32), "12 samples, 3 of them assigned"),
    "numbers that are not whole": (np.zeros(12), "flat array of int32, got float64"),
    "a list": ([0] * 12, "flat array of int32, got list"),
    "a matrix": (np.zeros((12, 1), np.int32), r"got int32 of shape \(12, 1\)"),
    "more than its quota": (
        np.zeros(12, np.int32),
        "their quotas are \\[",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_assignment_is_refused_before_kernels_read_it(fault: str) -> None:
    worker_S, complaint = FAULTY[fault]
    with pytest.raises(PlanError, match=complaint):
        play(answering(Assignment(worker_S)), long_workload("sgd"))  # type: ignore


def test_a_dispatch_that_returns_an_array_is_told_what_to_return() -> None:
    with pytest.raises(PlanError, match=r"must return an Assignment, got array\(\[0.*\)$"):
        play(answering(np.zeros(12, np.int32)), long_workload("sgd"))


@pytest.mark.parametrize("name", ["need_T", "mode_T", "push_T", "drop_T"])
def test_a_faulty_decision_is_refused_before_kernels_read_it(name: str) -> None:
    esd = make_policy("esd(1)")

    def decide(context: SyncContext) -> Decision:
        return esd.sync.decide(context)._replace(**{name: np.zeros(1, np.uint8)})  # type: ignore

    with pytest.raises(PlanError, match=f"{name} must have [0-9]+ values of uint8, got 1 of uint8"):
        play(replace(esd, sync=replace(esd.sync, decide=decide)), long_workload("sgd"))


def test_a_returned_copy_of_no_worker_is_refused() -> None:
    esd, four = make_policy("esd(1)"), np.full(1, 4, np.int32)

    def decide(context: SyncContext) -> Decision:
        return esd.sync.decide(context)._replace(return_worker=four, return_unique=four * 0)

    with pytest.raises(PlanError, match="must name 4 workers"):
        play(replace(esd, sync=replace(esd.sync, decide=decide)), long_workload("sgd"))


def test_a_broken_law_ends_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise PlanError("esd(1), step 3: law 1 broken")

    monkeypatch.setattr("embroute.planner.decide.check", broken)
    monkeypatch.setattr("sys.argv", ["embroute", "compare", "--policies", "esd(1)"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 70
    assert capsys.readouterr().err.splitlines()[-1] == "embroute: esd(1), step 3: law 1 broken"


FAILS = """
from embroute import Dispatch
def choose(context):
    return context.no_such_thing
def failing() -> Dispatch:
    return Dispatch("failing", choose)
"""


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--policies", "own:failing", "--steps", "40"],
        pytest.param(
            ["train", "--policy", "own:failing", "--workers", "1", "--steps", "40"],
            marks=[pytest.mark.full, pytest.mark.xdist_group("processes")],
        ),
    ],
    ids=["compare", "train"],
)
def test_an_error_in_a_part_ends_a_command_with_its_frames_only(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(FAILS)
    monkeypatch.chdir(tmp_path)
    code, output = finish(begin([sys.executable, "-m", "embroute", *command]))
    assert code == 70, output
    fault = "AttributeError: 'DispatchContext' object has no attribute 'no_such_thing'"
    place = "own:failing, step 0, choose of dispatch failing: "
    last = output.splitlines()[-1]
    assert last.startswith("embroute: ")
    assert last.endswith(f"{place}{fault} (own.py, line 4)")
    assert f"\n{fault}\n" in output
    assert re.findall(r'File ".*/(.*)", line', output) == ["own.py"]


class Bad(NamedTuple):
    values: Any


BAD_MEMORIES = {
    "a dict": ({"values": 1}, "the memory Bad must be a NamedTuple of arrays"),
    "a list in a field": (Bad([1]), r"Bad\.values must be an array of numbers"),
    "objects in an array": (Bad(np.array([object()])), r"Bad\.values must be an array of numbers"),
    "a type that no file has": (Bad(np.zeros(1, np.uint64)), r"Bad\.values .*, got uint64"),
    "another kind": (LastWorker(np.zeros(1, np.int32)), "the memory Bad must be"),
}


@pytest.mark.parametrize("fault", BAD_MEMORIES)
def test_a_memory_that_no_checkpoint_can_save_is_refused_at_the_start(fault: str) -> None:
    value, complaint = BAD_MEMORIES[fault]
    memory = PartMemory(Bad, lambda start: value)  # type: ignore
    dispatch = Dispatch("bad", sticky().choose, memory)
    with pytest.raises(PlanError, match=complaint):
        long_workload("sgd").start(make_policy(dispatch))


def test_a_memory_may_have_every_type_that_files_have_and_any_shape(tmp_path: Path) -> None:
    assert {*MEMORY_DTYPES, "bfloat16"} == set(TENSOR_DTYPES)
    policy, workload = make_policy("esd(1)"), long_workload("sgd")
    for kind in MEMORY_DTYPES:
        for shape in ((), (0,), (2, 3, 4)):
            first = Bad(np.ones(shape, kind))
            memory = PartMemory(Bad, lambda start, first=first: first._replace())  # type: ignore
            changed = replace(policy, dispatch=replace(policy.dispatch, memory=memory))
            state = workload.start(changed)
            save_planner(tmp_path, state, {})
            resumed = workload.start(changed)
            resumed.memory(Bad).values[...] = 0
            load_planner(tmp_path, resumed)
            values = resumed.memory(Bad).values
            assert (values.dtype.name, values.shape, values.all()) == (kind, shape, True)


def test_an_undeclared_memory_is_named_with_the_declared_ones() -> None:
    policy, workload = make_policy(replace(sticky(), memory=None)), long_workload("sgd")
    fault = r"^sticky, step 0, choose of dispatch sticky: .* memory of LastWorker \(declared: none"
    with pytest.raises(PlanError, match=fault):
        play(policy, workload)


def failing(*_: object) -> int:
    """A part's function with an error in it."""
    return dict[int, int]()[0]


def writing(context: embroute.DispatchContext) -> Assignment:
    """A dispatch that forgets who decides and who learns."""
    context.state.memory(LastWorker).worker_R[0] = 1
    return sticky().choose(context)


def writing_to_a_copy(context: embroute.DispatchContext) -> Assignment:
    """A dispatch that may: its array is its own."""
    context.state.memory(LastWorker).worker_R.copy()[0] = 1
    return sticky().choose(context)


def faulty_parts() -> dict[str, tuple[Policy, str]]:
    """Policies with an error in a part's function, and how it is named."""
    policy = make_policy(sticky)
    dispatch, memory = policy.dispatch, policy.dispatch.memory
    assert memory is not None

    def remembering(name: str) -> Policy:
        changed = replace(memory, **{name: failing})  # type: ignore[arg-type]
        return replace(policy, dispatch=replace(dispatch, memory=changed))

    return {
        "choose": (
            replace(policy, dispatch=replace(dispatch, choose=failing)),  # type: ignore[arg-type]
            "step 0, choose of dispatch sticky",
        ),
        "learn": (remembering("learn"), "step 0, learn of LastWorker"),
        "init": (remembering("init"), "init of LastWorker"),
        "decide": (
            replace(policy, sync=replace(policy.sync, decide=failing)),  # type: ignore[arg-type]
            "step 0, decide of sync on-demand",
        ),
        "moves": (
            replace(policy, evict=replace(policy.evict, moves=failing)),  # type: ignore[arg-type]
            "step 0, moves of evict lru",
        ),
    }


@pytest.mark.parametrize("part", ["choose", "learn", "init", "decide", "moves"])
def test_an_error_in_a_part_names_policy_part_and_step_and_keeps_its_frames(part: str) -> None:
    policy, place = faulty_parts()[part]
    line = failing.__code__.co_firstlineno + 2
    expected = f"sticky, {place}: KeyError: 0 (test_policy_faults.py, line {line})"
    with pytest.raises(PlanError, match=f"^{re.escape(expected)}$") as error:
        play(policy, long_workload("sgd"))
    cause = error.value.__cause__
    assert cause is not None
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["failing"]


def test_a_decision_cannot_write_into_the_memory() -> None:
    policy = make_policy(sticky)
    with pytest.raises(PlanError, match=r"choose of dispatch sticky: ValueError: .*read-only"):
        play(
            replace(policy, dispatch=replace(policy.dispatch, choose=writing)),
            long_workload("sgd"),
        )
    allowed = replace(policy, dispatch=replace(policy.dispatch, choose=writing_to_a_copy))
    play(allowed, long_workload("sgd"))


def test_a_users_mistake_that_a_part_of_ours_finds_stays_a_value_error() -> None:
    job = {"network": "edge-4", "batch": 32, "steps": 4, "warmup": 0}
    with pytest.raises(ValueError, match=r"^embroute: floor names 2 workers, the cluster has 4"):
        embroute.compare(policies="embroute(quotas=free, floor=0.1+0.1)", **job)
