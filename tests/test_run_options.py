"""One description of a run: the same names, defaults and ranges for commands, files and Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import yaml
from click.testing import CliRunner

import embroute
from embroute.cli.main import cli, main
from embroute.config.data_options import DataOptions
from embroute.config.option_model import Options, extra_of, limits_of, option_name, words_of
from embroute.config.run_file import keep_run_file, read_run_file, write_run_file
from embroute.config.run_options import (
    AdviceOptions,
    JobOptions,
    ModelName,
    RowOptimizerName,
    RunConfig,
)
from embroute.config.spec import Size
from embroute.cost.step_time import OPTIMIZERS
from embroute.models.registry import MODELS
from embroute.nn.settings import PrepareOptions, check_settings
from embroute.train.run_ranks import open_run, topology_of
from embroute.transport.interface import TRANSPORTS
from tests.pages import trained

VIEWS: list[type[Options]] = [JobOptions, AdviceOptions, PrepareOptions]
# The same word for another thing: lists to try, and objects of Python.
OTHER_KINDS = {"batch", "workers", "policy", "device", "held_out"}
CHANGED = RunConfig(
    data="clicks.csv",
    data_options=DataOptions(label="click", categorical=("a", "b"), limit=9),
    dim="8,C1=4",
    hidden=(16, 8),
    quotas=(1, 2),
    cache=Size(5e8, "bytes"),
    network="edge-2",
    steps=7,
    lr=0.5,
    tables="t.safetensors",
    nodes={"a": ["coordinator", "shard0", "worker0"]},
)


@pytest.mark.parametrize("view", VIEWS)
def test_an_option_has_one_default_and_one_range(view: type[Options]) -> None:
    shared = (set(view.model_fields) & set(RunConfig.model_fields)) - OTHER_KINDS
    assert len(shared) >= 5
    for name in shared:
        one, other = view.model_fields[name], RunConfig.model_fields[name]
        assert (one.default, limits_of(one)) == (other.default, limits_of(other)), name


@pytest.mark.parametrize("kind", [RunConfig, JobOptions, AdviceOptions, DataOptions])
def test_every_option_has_a_group_and_a_help_text(kind: type[Options]) -> None:
    for name, field in kind.model_fields.items():
        assert (field.description or "").endswith((".", "...")), name
        assert extra_of(field, "group") is not None, name


def test_names_of_choices_are_those_of_the_catalogs() -> None:
    assert get_args(RowOptimizerName) == tuple(OPTIMIZERS)
    assert get_args(ModelName) == tuple(MODELS)
    assert words_of(RunConfig.model_fields["transport"].annotation) == TRANSPORTS


def test_run_file_keeps_every_option(tmp_path: Path) -> None:
    write_run_file(CHANGED, tmp_path / "run.yaml")
    again = read_run_file(tmp_path / "run.yaml")
    assert again.changed().keys() == CHANGED.changed().keys()
    write_run_file(again, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == (tmp_path / "run.yaml").read_text()
    assert (again.hidden, again.shares, again.cache) == ("16,8", (1, 2), "500000000B")


def test_a_copy_of_an_equal_run_is_left_alone(tmp_path: Path) -> None:
    again = RunConfig(steps=3)
    keep_run_file(again, tmp_path)
    (tmp_path / "run.yaml").write_text("# mine\nsteps: 3\n")
    keep_run_file(again.replace(resume=True), tmp_path)
    assert (tmp_path / "run.yaml").read_text().startswith("# mine")


def mistakes(tmp_path: Path) -> dict[str, Callable[[], object]]:
    """The same mistake in Python, in a run file and in `prepare`."""
    path = tmp_path / "run.yaml"
    path.write_text("optimizer: adagard\n")
    return {
        "optimizer= must be": lambda: embroute.compare(optimizer="adagard"),
        "run.yaml: optimizer must be": lambda: read_run_file(path),
        "--optimizer must be": lambda: RunConfig(optimizer="adagard"),  # type: ignore[arg-type]
    }


def test_a_mistake_names_the_option_as_the_user_wrote_it(tmp_path: Path) -> None:
    for label, call in mistakes(tmp_path).items():
        with pytest.raises(ValueError, match=f"{label} one of .*; did you mean adagrad"):
            call()


def test_an_unknown_name_gets_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("epoch: 3\n")
    with pytest.raises(ValueError, match=r"run.yaml: no key 'epoch'; did you mean epochs\?"):
        read_run_file(tmp_path / "run.yaml")
    with pytest.raises(ValueError, match="no setting of prepare 'epoch'; did you mean epochs"):
        check_settings({"epoch": 3})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="no option 'epoch'; did you mean epochs"):
        RunConfig(epoch=3)  # type: ignore[call-arg]


def said(words: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    patch.setattr(sys, "argv", ["embroute", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("compare --polices esd", "embroute: No such option '--polices'"),
        ("simulate --csv", "embroute: Option '--csv' requires an argument."),
        ("compare --batch 0", "embroute: --batch must be a whole number of at least 1, got 0"),
        (
            "train --batch many",
            "embroute: --batch must be a whole number of at least 1, got 'many'",
        ),
        ("train --lr 0", "embroute: --lr must be a number above 0, got 0"),
        ("advise --memory-per-worker lots", "embroute: --memory-per-worker must look like 0.1"),
    ],
)
def test_a_wrong_command_line_gets_one_line(
    words: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(words.split(), monkeypatch, capsys)
    assert text.startswith(line)
    assert text.count("\n") == 1


def test_train_names_the_key_of_the_file_or_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("quotas: 1,1\n")
    text = said(["train", str(path)], monkeypatch, capsys)
    assert text == f"embroute: {path}: quotas needs 4 shares, one a worker, got '1,1'\n"
    text = said(["train", str(path), "--quotas", "1,2"], monkeypatch, capsys)
    assert text == "embroute: --quotas needs 4 shares, one a worker, got '1,2'\n"


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (RunConfig(), (4, 1)),
        (RunConfig(network="edge-8"), (8, 1)),
        (RunConfig(network="colo-3"), (3, 3)),
        (RunConfig(network="dc", workers=5), (5, 1)),
        (RunConfig(workers=2, shards=2), (2, 2)),
        (RunConfig(nodes={"a": ["coordinator", "shard0"], "b": ["worker0"]}), (1, 1)),
    ],
)
def test_ranks_follow_the_network_unless_they_are_given(
    run: RunConfig, ranks: tuple[int, int]
) -> None:
    topology = topology_of(run)
    assert (topology.num_workers, topology.num_shards) == ranks


def test_shards_must_be_those_of_the_network(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("network: colo-4\nshards: 2\n")
    with pytest.raises(ValueError, match=r"run.yaml: shards 2: network colo-4 has 4 shards"):
        open_run(tmp_path / "run.yaml")


def test_no_steps_are_90_for_the_simulator_and_no_end_for_training() -> None:
    assert JobOptions().num_steps == 90
    assert JobOptions(steps=30).num_steps == 30
    assert "steps" not in check_settings({})
    with pytest.raises(ValueError, match="steps= must be a whole number of at least 1, got 0"):
        check_settings({"steps": 0})


def test_prepare_fills_in_the_defaults_of_a_run() -> None:
    settings, run = check_settings({"keep": 5}), RunConfig()
    assert settings["keep"] == 5
    for name in ("cache", "epochs", "seed", "peer_timeout", "compute_ms_per_sample"):
        assert dict(settings)[name] == getattr(run, name)


def test_a_cluster_keeps_its_own_compute_time_in_prepare() -> None:
    cluster = embroute.open_cluster("edge-2")
    assert "compute_ms_per_sample" not in check_settings({"network": cluster})
    both = check_settings({"network": cluster, "compute_ms_per_sample": 2.0})
    assert both["compute_ms_per_sample"] == 2.0


def test_schema_describes_every_key_of_a_run_file() -> None:
    schema = json.loads(CliRunner().invoke(cli, ["schema"]).stdout)
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["properties"]["batch"]["minimum"] == 1
    assert schema["properties"]["optimizer"]["enum"] == list(OPTIMIZERS)
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]["data_options"]["properties"]) == set(DataOptions.model_fields)


def test_help_of_train_groups_typed_options_and_needs_no_torch() -> None:
    program = "import sys; from embroute.cli.main import cli\n"
    program += "try: cli(['train', '--help'], prog_name='embroute')\n"
    program += "except SystemExit: print(sorted({'torch', 'numba', 'polars'} & set(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "[]"
    for heading in ("Data:", "Model:", "Policy:", "Optimizer:", "Steps:", "Checkpoints:", "Ranks:"):
        assert f"\n{heading}\n" in out
    assert "--batch INTEGER RANGE" in out
    assert "TEXT" not in out.replace("--bag-separator TEXT", "")


def test_load_run_reads_configuration_summary_and_reports(tmp_path: Path) -> None:
    folder = trained(tmp_path / "first", "esd(1)")
    write_run_file(RunConfig(policy="esd(1)", out=str(folder)), folder / "run.yaml")
    run = embroute.load_run(folder)
    assert run.config.policy == run.summary.policy == "esd(1)"
    frame = run.to_dataframe()
    assert frame["step"].to_list()[-1] == run.summary.steps
    assert len(run.evaluations()) == len(run.history.evaluations) > 0
    assert "esd(1)" in str(run)
    assert "esd(1)" in run._repr_html_()
    assert run.plot().renderers
    with pytest.raises(ValueError, match=r"quantity must be one of .*hit_rate"):
        run.plot("link_mb_per_s")
    with pytest.raises(ValueError, match=r"no run.yaml here; give the folder of a run"):
        embroute.load_run(tmp_path)


def test_written_run_files_are_plain_yaml(tmp_path: Path) -> None:
    write_run_file(CHANGED, tmp_path / "run.yaml")
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert values["data_options"] == {"label": "click", "categorical": ["a", "b"], "limit": 9}
    assert all(option_name(name).startswith("--") for name in values)
