"""FAE in training: rounds that follow the reported held-out loss, also after a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from embroute import compare
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.nn.prepare import prepare
from embroute.nn.settings import Settings
from tests.jobs import Batch, batches, loss_of, new_model, optimizers_of, settings_of

STEPS, EVERY = 60, 10
POLICY = "fae(hot=0.6, buffer=100, sample=1)"


class Seen(NamedTuple):
    """What a worker trained: the ages in the batch of each step, and its losses."""

    ages: list[list[float]]
    losses: list[float]


def job(folder: Path, workers: int = 2, **changes: Any) -> Settings:
    settings = settings_of(POLICY, workers, 1.0)
    settings.update({"checkpoint": folder, "checkpoint_every": EVERY, "resume": True})
    settings.update({"held_out": batches(9, 3), "evaluate_every": EVERY})
    settings.update(changes)  # type: ignore[typeddict-item]
    return settings


def trained(
    stream: Sequence[Batch],
    settings: Settings,
    topology: tuple[int, int] = (2, 1),
    loss_after: Callable[[int], float] | None = None,
) -> list[Seen]:
    """Train, and report `loss_after(step)` after every evaluation; None: report nothing."""

    def main(rank: RankContext) -> Seen:
        model = new_model()
        optimizers = optimizers_of("adagrad", model)
        ready = prepare(model, optimizers, stream, rank, **settings)
        seen = Seen([], [])
        for batch in ready.loader:
            model.zero_grad()
            seen.ages.append(sorted(batch["age"].tolist()))  # type: ignore[index]
            seen.losses.append(ready.backward(loss_of(model, batch)))  # type: ignore[arg-type]
            for optimizer in optimizers:
                optimizer.step()
            if ready.evaluation_due:
                for _ in ready.held_out():
                    pass
                if loss_after is not None:
                    ready.report_held_out(loss_after(ready.step))
        return seen

    results = run_in_process(*topology, main)
    return [results[f"worker{worker}"] for worker in range(topology[0])]


def test_order_of_samples_follows_the_reported_loss(tmp_path: Path) -> None:
    stream = batches(2, STEPS)
    settled, rising = (
        trained(stream, job(tmp_path / name), loss_after=loss)[0]
        for name, loss in (("settled", lambda step: 1.0), ("rising", float))
    )
    half = STEPS // 2  # the first round is half of the epoch
    assert settled.ages[:half] == rising.ages[:half]
    assert settled.ages != rising.ages


def test_loop_without_a_report_keeps_the_rate(tmp_path: Path) -> None:
    stream = batches(2, STEPS)
    silent = trained(stream, job(tmp_path / "silent"))
    settled = trained(stream, job(tmp_path / "settled"), loss_after=lambda step: 1.0)
    assert silent == settled


def test_resume_is_bit_identical_with_a_rate_that_moves(tmp_path: Path) -> None:
    stream = batches(2, STEPS)
    whole = trained(stream, job(tmp_path / "whole"), loss_after=float)
    first = trained(stream, job(tmp_path / "cut", steps=33), loss_after=float)
    second = trained(stream, job(tmp_path / "cut"), loss_after=float)
    for worker, parts in enumerate(zip(first, second, strict=True)):
        assert parts[0].losses + parts[1].losses == whole[worker].losses
        assert parts[0].ages + parts[1].ages == whole[worker].ages


def test_resume_with_other_workers_trains_every_sample_once(tmp_path: Path) -> None:
    stream = batches(2, STEPS)
    first = trained(stream, job(tmp_path, 3, steps=33), (3, 2), loss_after=float)
    second = trained(stream, job(tmp_path, 2), (2, 1), loss_after=float)
    ages = [age for seen in (*first, *second) for batch in seen.ages for age in batch]
    known = np.concatenate([batch["age"].numpy() for batch in stream])
    assert sorted(ages) == sorted(known.tolist())


@pytest.mark.parametrize(("first", "second"), [("vanilla", POLICY), (POLICY, "vanilla")])
def test_resume_refuses_a_policy_of_another_order(first: str, second: str, tmp_path: Path) -> None:
    stream = batches(2, STEPS)
    trained(stream, job(tmp_path, policy=first, steps=20))
    with pytest.raises(ValueError, match="has trained the samples up to here in its own order"):
        trained(stream, job(tmp_path, policy=second))


@pytest.mark.full
@pytest.mark.parametrize("policy", ["fae", "scars", "fae(rate=25, hot=4000rows)"])
def test_comparison_predicts_the_rows_of_a_real_run(policy: str, tmp_path: Path) -> None:
    """Calibration, rounds, first fill and drain: the simulator and real ranks agree on each row."""
    job: dict[str, Any] = {"data": "avazu(samples=20000)", "network": "dc-2", "cache": "0.02"}
    job |= {"dim": 8, "batch": 64, "steps": 60}
    options = [word for key, value in job.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "embroute", "train", *options, "--policy", policy]
    command += ["--held-out", "0", "--checkpoint-every", "0", "--hidden", "4"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("miss_pull", "stale_pull", "update_push", "evict_push")
    counted = dict.fromkeys(names, 0)
    for record in (tmp_path / "ranks").glob("worker*.json"):
        for name, rows in json.loads(record.read_text())["rows"].items():
            counted[name] += rows
    priced = compare(policies=policy, warmup=0, **job).results[policy].rows
    assert counted == {
        "miss_pull": priced["miss_pull"] + priced["first_fill"],
        "stale_pull": priced["stale_pull"],
        "update_push": priced["update_push"] + priced["drain"],
        "evict_push": priced["evict_push"],
    }
    assert priced["allreduce"] > 0
