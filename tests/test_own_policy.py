"""A user's own policy, from one file outside the package: compared, trained with, resumed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import embroute
from embroute import PartMemory
from embroute.checkpoint.planner_state import load_planner, save_planner
from embroute.cli.main import cli
from embroute.policies import catalog
from embroute.policies.catalog import make_policy, policy_of, register_policy
from examples.own_policy import LastWorker, sticky
from tests.jobs import batches, gathered, plain_cached, settings_of
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


class Renamed(NamedTuple):
    """The memory of a policy after its field was renamed."""

    last_R: npt.NDArray[np.int32]


def test_a_renamed_field_of_the_memory_is_named_at_the_resume(tmp_path: Path) -> None:
    policy, workload = make_policy(sticky), long_workload("sgd")
    save_planner(tmp_path, workload.start(policy), {})
    memory = PartMemory(Renamed, lambda start: Renamed(np.zeros(3, np.int32)))
    changed = replace(policy, dispatch=replace(policy.dispatch, memory=memory))
    fault = "memory has changed since the checkpoint: it has Renamed.last_R now, and had "
    with pytest.raises(ValueError, match=f"{fault}LastWorker.worker_R"):
        load_planner(tmp_path, workload.start(changed))


def test_registered_policy_is_chosen_by_name(registry: dict[str, catalog.Factory]) -> None:
    register_policy("sticky", sticky)
    assert make_policy("sticky(1)").dispatch.name == "sticky"
    assert make_policy("dispatch=sticky sync=het(3)").sync.bound == 3
    with pytest.raises(ValueError, match=re.escape("sticky: field must be a number")):
        make_policy("sticky(x)")


@pytest.mark.parametrize("name", ["esd", "on-demand", "lower-bound", "a:b", "a b", "a(1)", ""])
def test_registered_name_must_be_new(name: str, registry: dict[str, catalog.Factory]) -> None:
    with pytest.raises(ValueError, match=r"is taken|a name has letters, digits and _ \. -"):
        register_policy(name, sticky)
    assert not registry


def test_register_policy_refuses_what_is_no_function(
    registry: dict[str, catalog.Factory],
) -> None:
    with pytest.raises(ValueError, match="'x' needs a function that makes a policy or a part, got"):
        register_policy("x", 3)  # type: ignore[arg-type]
    assert not registry


def test_a_registered_policy_is_not_replaced_by_another(
    registry: dict[str, catalog.Factory],
) -> None:
    register_policy("x", sticky)
    register_policy("x", sticky)  # as a cell that runs twice does
    for other in (lambda: sticky(1), partial(sticky, 1), make_policy):
        with pytest.raises(ValueError, match="'x' is taken; choose another name"):
            register_policy("x", other)
    assert registry == {"x": sticky}


def test_partial_functions_have_their_options_in_their_names() -> None:
    job = {"network": "edge-2", "batch": 32, "steps": 12, "warmup": 2}
    both = [partial(sticky, 1), partial(sticky, field=0)]
    compared = embroute.compare("online-retail", policies=both, **job)
    assert list(compared.results) == ["vanilla", "sticky(1)", "sticky(field=0)"]
    with pytest.raises(ValueError, match=r"'<lambda>' is given twice; dataclasses\.replace"):
        embroute.compare(policies=[lambda: sticky(0), lambda: sticky(1)])


def test_the_name_of_a_file_alone_is_answered_with_its_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "freq.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"lower-bound\); did you mean freq:freq, the function"):
        make_policy("freq")


def test_an_error_says_the_text_of_a_policy_once() -> None:
    with pytest.raises(ValueError, match=r"^--policies 'no_file:x': there is no module"):
        policy_of("--policies", "no_file:x")


def test_installed_package_brings_its_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        def load(self) -> Callable[..., embroute.Dispatch]:
            return sticky

    monkeypatch.setattr(catalog, "installed_policies", lambda: {"shipped": Installed()})
    assert make_policy("shipped(2)").dispatch.name == "sticky"
    with pytest.raises(ValueError, match=r"no policy 'shiped' .*, shipped, lower-bound\)"):
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


def test_a_part_is_a_policy_with_the_usual_other_parts() -> None:
    job = {"network": "edge-2", "batch": 32, "steps": 12, "warmup": 2}
    result = embroute.compare("online-retail", policies=[sticky(field=1), "vanilla"], **job)
    assert list(result.results) == ["sticky", "vanilla"]
    assert list(embroute.compare(policies=sticky(), **job).results) == ["vanilla", "sticky"]


def test_help_lists_the_policies_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "installed_policies", lambda: {"shipped": None})
    monkeypatch.delitem(sys.modules, "embroute.cli.compare", raising=False)
    command = import_module("embroute.cli.compare").compare_command
    assert "; shipped: of an installed package;" in command.epilog


def test_a_package_whose_policy_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("broken", "no_such_module:policy", catalog.ENTRY_POINTS)
    monkeypatch.setattr(catalog, "installed_policies", lambda: {"broken": entry})
    with pytest.raises(ValueError, match=r"no_such_module:policy of the installed package"):
        make_policy("broken")


def test_a_package_cannot_take_the_name_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("esd", "examples.own_policy:sticky", catalog.ENTRY_POINTS)
    monkeypatch.setattr(catalog, "entry_points", lambda group: [entry])
    with pytest.warns(UserWarning, match="has a policy 'esd', which is a policy of embroute"):
        assert catalog.installed_policies.__wrapped__() == {}
