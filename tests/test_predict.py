"""Scores from a checkpoint equal the scores of the run's own evaluation."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from embroute.cli.main import cli
from embroute.cli.options import replacing
from embroute.config.data_options import DataOptions
from embroute.config.run_file import RUN_FILE, write_run_file
from embroute.config.run_options import ModelName, RunConfig
from embroute.launch.in_process import run_in_process
from embroute.train.loop import metrics_of, train_rank
from embroute.train.scorer import ScoreRequest, samples_to_score


@pytest.mark.parametrize("model", ["deepfm", "dcn"])
def test_predict_scores_equal_the_last_evaluation(model: ModelName, tmp_path: Path) -> None:
    run = RunConfig(
        data_options=DataOptions(limit=3000),
        model=model,
        dim="4",
        hidden="8",
        batch=32,
        steps=20,
        held_out=0.2,
        workers=2,
        shards=2,
    )
    write_run_file(run, tmp_path / RUN_FILE)
    run_in_process(2, 2, lambda rank: train_rank(run, rank, tmp_path, threading.Event()))
    out = tmp_path / "scores.csv"
    result = CliRunner().invoke(cli, ["predict", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    score, label = np.loadtxt(out, delimiter=",", skiprows=1, dtype=np.float32).T
    expected = json.loads((tmp_path / "summary.json").read_text())["metrics"]
    found = metrics_of(score, label)
    assert found["auc"] == pytest.approx(expected["auc"], abs=1e-6)
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-6)


def test_predict_on_other_files_requires_hashed_ids() -> None:
    run = RunConfig(data="clicks.csv")
    with pytest.raises(ValueError, match="train with --ids hash"):
        samples_to_score(run, ScoreRequest("others.csv", "all"))


def test_predict_accepts_files_without_labels(tmp_path: Path) -> None:
    lines = [f"{i % 2},u{i % 7},i{i % 11}" for i in range(256)]
    known, new = tmp_path / "clicks.csv", tmp_path / "new.csv"
    known.write_text("\n".join(["click,user,item", *lines]) + "\n")
    new.write_text("\n".join(["user,item", *(line[2:] for line in lines)]) + "\n")
    options = DataOptions(label="click", categorical=("user", "item"), ids="hash", hash_rows=50)
    run = RunConfig(data=str(known), data_options=options, dim="4", hidden="8", cache="1")
    run = run.replace(batch=32, workers=1)
    run_in_process(1, 1, lambda rank: train_rank(run, rank, tmp_path, threading.Event()))
    for name, given in (("a", [str(known), "--part", "all"]), ("b", [str(new), "--unlabelled"])):
        words = ["predict", str(tmp_path), "--out", str(tmp_path / name), "--data", *given]
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, result.output
    scores = [line.split(",")[0] for line in (tmp_path / "a").read_text().splitlines()]
    assert (tmp_path / "b").read_text().splitlines() == scores
    assert len(scores) == 257


def test_predict_refuses_a_folder_without_a_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["predict", str(tmp_path), "--out", str(tmp_path / "x.csv")])
    assert isinstance(result.exception, ValueError)
    assert "no run.yaml here" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_predict_keeps_links_and_writes_into_pipes(tmp_path: Path) -> None:
    """A file renamed over a device, a pipe or a link would remove it."""
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as file:
        assert target.read_text() == "old"
        file.write("score\n")
    assert link.is_symlink()
    assert target.read_text() == "score\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(pipe.read_text)
        with replacing(pipe) as file:
            file.write("score\n")
        assert said.result(10) == "score\n"
    assert pipe.is_fifo()
    with suppress(RuntimeError), replacing(target) as file:
        file.write("half")
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "pipe", "target.csv"]
    assert target.read_text() == "score\n"
