"""A user's own policy, from one file outside the package: compared, trained with, resumed."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner

import embroute
from embroute import Assignment, Decision, Dispatch, PartMemory, Policy, SyncContext
from embroute.cli.main import cli, main
from embroute.planner.state import PlanError
from embroute.policies import catalog
from embroute.policies.catalog import make_policy, register_policy
from examples.own_policy import LastWorker, sticky
from tests.jobs import batches, gathered, plain_cached, settings_of
from tests.processes import begin, finish
from tests.test_laws import play
from tests.test_resume import Failing, PowerCutError, run, same
from tests.workloads import long_workload

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, catalog.Factory]:
    registered: dict[str, catalog.Factory] = {}
    monkeypatch.setattr(catalog, "_REGISTERED", registered)
    return registered


@pytest.mark.usefixtures("in_examples")
def test_compare_prices_a_policy_of_a_module_in_the_working_folder(tmp_path: Path) -> None:
    names = ["vanilla", "own_policy:sticky(field=1)", "dispatch=own_policy:sticky sync=het(10)"]
    out = tmp_path / "out.json"
    arguments = ["--policies", ",".join(names), "--steps", "20", "--json", str(out)]
    result = CliRunner().invoke(cli, ["compare", *arguments])
    assert result.exit_code == 0, result.output
    policies = json.loads(out.read_text())["policies"]
    assert list(policies) == names
    assert policies[names[1]]["rows"]["miss_pull"] < policies["vanilla"]["rows"]["miss_pull"]


def test_own_policy_keeps_the_laws() -> None:
    referee = play(make_policy(sticky), long_workload("rowwise-adagrad"), compare_every=25)
    assert sum(referee.made.values()) > 2000


def test_own_policy_learns_who_trained_a_row() -> None:
    policy, workload = make_policy(sticky), long_workload("sgd")
    state = workload.start(policy)
    for step in workload.plans(policy, state):
        batch = step.plan.now.batch
        rows = batch.rows[batch.offsets[:: batch.num_fields][: len(batch)]]
        learnt = state.memory(LastWorker).worker_R[rows]
        last = dict(zip(rows, step.plan.worker_S, strict=True))
        assert learnt.tolist() == [last[row] for row in rows]


def test_training_with_an_own_policy_equals_plain_torch_and_resumes_bit_identically(
    tmp_path: Path,
) -> None:
    topology, stream = (3, 2), batches(3, 60)
    settings = settings_of("vanilla", 3) | {"policy": sticky}
    settings |= {"checkpoint": tmp_path / "whole", "checkpoint_every": 20, "resume": True}
    whole = run(settings, topology, stream)
    for mine, plain in zip(
        gathered(whole, *topology).tables, plain_cached("adagrad", 3, 60).tables, strict=True
    ):
        np.testing.assert_allclose(mine, plain, rtol=0, atol=1e-10)
    settings["checkpoint"] = tmp_path / "cut"
    with pytest.raises(PowerCutError):
        run(settings, topology, Failing(stream, 52))
    resumed = run(settings, topology, stream)
    assert len(resumed["worker0"].losses) < 60
    same(gathered(resumed, *topology), gathered(whole, *topology))


def test_registered_policy_is_chosen_by_name(registry: dict[str, catalog.Factory]) -> None:
    register_policy("sticky", sticky)
    assert make_policy("sticky(1)").dispatch.name == "sticky"
    assert make_policy("dispatch=sticky sync=het(3)").sync.bound == 3
    with pytest.raises(ValueError, match=re.escape("sticky: field must be a number")):
        make_policy("sticky(x)")


@pytest.mark.parametrize("name", ["esd", "on-demand", "lower-bound", "a:b", "a b", "a(1)"])
def test_registered_name_must_be_new(name: str, registry: dict[str, catalog.Factory]) -> None:
    with pytest.raises(ValueError, match=r"is taken or is no name|expected"):
        register_policy(name, sticky)
    assert not registry


def test_installed_package_brings_its_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        def load(self) -> Callable[..., embroute.Dispatch]:
            return sticky

    monkeypatch.setattr(catalog, "_installed", lambda: {"shipped": Installed()})
    assert make_policy("shipped(2)").dispatch.name == "sticky"
    with pytest.raises(ValueError, match=r"no policy 'shiped' .*, shipped\)"):
        make_policy("shiped")


BROKEN = "raise RuntimeError('not today')"
ODD = """
from embroute import Sync
def odd(weights: dict[str, int]) -> Sync: ...
def three() -> Sync: return 3
def bare(): ...
number = 3
"""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nowhere:sticky", "'nowhere:sticky': there is no module nowhere in "),
        ("broken:sticky", "'broken:sticky': importing broken failed: RuntimeError: not today"),
        ("odd:missing", "odd.py has no function 'missing'"),
        ("odd:number", "odd.py has no function 'number'"),
        ("odd:odd", "odd:odd needs weights, as in odd:odd(weights=...)"),
        ("odd:odd(3)", "odd:odd: weights is of type dict[str, int], which no text can give"),
        ("odd:three", "odd:three must make a Policy, Dispatch, Sync or Evict, got 3"),
        ("sync=odd:three", "sync=odd:three makes no Sync"),
        ("odd:bare", "'odd:bare': the function must be annotated with what it makes: -> Policy"),
        ("os:system(touch called)", "'os:system': the function must be annotated"),
        ("os:mkdir(called)", "'os:mkdir': the function must be annotated"),
    ],
)
def test_faults_of_own_policies_name_the_cause(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(fault)):
        make_policy(text)
    assert not (tmp_path / "called").exists()


def test_public_names_are_exactly_these() -> None:
    assert dir(embroute) == sorted(embroute.__all__)
    assert all(getattr(embroute, name) is not None for name in embroute.__all__)


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


@pytest.mark.usefixtures("in_examples")
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
    values: object


BAD_MEMORIES = {
    "a dict": ({"values": 1}, "the memory Bad must be a NamedTuple of arrays"),
    "a list in a field": (Bad([1]), r"Bad\.values must be an array of numbers"),
    "objects in an array": (Bad(np.array([object()])), r"Bad\.values must be an array of numbers"),
    "another kind": (LastWorker(np.zeros(1, np.int32)), "the memory Bad must be"),
}


@pytest.mark.parametrize("fault", BAD_MEMORIES)
def test_a_memory_that_no_checkpoint_can_save_is_refused_at_the_start(fault: str) -> None:
    value, complaint = BAD_MEMORIES[fault]
    memory = PartMemory(Bad, lambda start: value)  # type: ignore
    dispatch = Dispatch("bad", sticky().choose, memory)
    with pytest.raises(PlanError, match=complaint):
        long_workload("sgd").start(make_policy(dispatch))


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
    expected = f"sticky, {place}: KeyError: 0 (test_own_policy.py, line {line})"
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


def test_a_part_is_a_policy_with_the_usual_other_parts() -> None:
    job = {"network": "edge-2", "batch": 32, "steps": 12, "warmup": 2}
    result = embroute.compare("online-retail", policies=[sticky(field=1), "vanilla"], **job)
    assert list(result.results) == ["sticky", "vanilla"]
    assert list(embroute.compare(policies=sticky(), **job).results) == ["vanilla", "sticky"]
    assert make_policy(partial(sticky, field=1)).name == "sticky"


def test_a_package_whose_policy_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("broken", "no_such_module:policy", catalog.ENTRY_POINTS)
    monkeypatch.setattr(catalog, "_installed", lambda: {"broken": entry})
    with pytest.raises(ValueError, match=r"no_such_module:policy of the installed package"):
        make_policy("broken")


def test_a_package_cannot_take_the_name_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("esd", "examples.own_policy:sticky", catalog.ENTRY_POINTS)
    monkeypatch.setattr(catalog, "entry_points", lambda group: [entry])
    with pytest.warns(UserWarning, match="has a policy 'esd', which is a policy of embroute"):
        assert catalog._installed.__wrapped__() == {}
