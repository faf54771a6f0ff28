"""Batches and lookups of users: supported forms, and forms that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.nn.prepare import prepare
from tests.user_models import (
    STREAM,
    USERS,
    Batch,
    Model,
    Optimizers,
    adagrad,
    assert_plain,
    lookups,
    routed,
    settings_of,
    sgd,
)


@pytest.mark.parametrize(
    ("user", "fault"),
    [
        (lambda b: b["user"].numpy(), "user: expected a tensor of whole numbers.*, got ndarray"),
        (lambda b: b["user"].double(), "user: expected a tensor of .*, got torch.float64"),
        (lambda b: b["user"][0], "user: expected a tensor of whole numbers, samples first, got"),
        (lambda b: None, "user: expected a tensor of whole numbers, samples first, got NoneType"),
        (lambda b: b["user"] + USERS, f"user: id [0-9]+ is not between 0 and {USERS - 1}"),
    ],
)
def test_bad_lookups_are_refused(
    user: Callable[[Batch], object], fault: str, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, lambda batch: lookups(batch) | {"user": user(batch)})
    with pytest.raises(ValueError, match=fault):
        routed(Model().double(), adagrad, settings)


@pytest.mark.parametrize(
    ("offsets", "fault"),
    [
        (lambda b: b["offsets"][:-1], "tags has 15 samples, others have 16 .with include_last"),
        (lambda b: b["offsets"] + 1, "tags: offsets must begin with 0 and never fall or exceed"),
        (lambda b: b["offsets"].flip(0), "tags: offsets must begin with 0"),
    ],
)
def test_bad_offsets_are_refused(
    offsets: Callable[[Batch], torch.Tensor], fault: str, tmp_path: Path
) -> None:
    stream = [{**batch, "offsets": offsets(batch)} for batch in STREAM]
    with pytest.raises(ValueError, match=fault):
        routed(Model().double(), adagrad, settings_of(tmp_path, lookups), stream=stream)


class Named(NamedTuple):
    """A batch as a namedtuple."""

    user: torch.Tensor
    tags: torch.Tensor
    offsets: torch.Tensor
    day: torch.Tensor
    label: torch.Tensor


class Unnamed(Model):
    """A model that takes batches as namedtuples."""

    def forward(self, batch: Batch | Named) -> torch.Tensor:
        return super().forward(batch._asdict() if isinstance(batch, tuple) else batch)


def of_named(batch: object) -> dict[str, object]:
    assert isinstance(batch, tuple)
    return lookups(batch._asdict())  # type: ignore[attr-defined]


def test_batches_may_be_namedtuples(tmp_path: Path) -> None:
    named = [Named(*(batch[name] for name in Named._fields)) for batch in STREAM]
    seen = []

    def main(rank: RankContext) -> None:
        model = Unnamed().double()
        settings = settings_of(tmp_path, of_named)
        optimizers = sgd(model)
        ready = prepare(model, optimizers, named, rank, **settings)
        for batch in ready.loader:
            assert type(batch).__name__ == "Named"
            seen.append(batch.label)  # type: ignore[attr-defined]
            ready.backward(model(batch).sum())
            optimizers[0].zero_grad()

    run_in_process(2, 1, main)
    assert sum(len(label) for label in seen) == sum(len(batch.label) for batch in named)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda b: {name: value[:0] for name, value in b.items()},
            "a batch of loader or held_out has no samples",
        ),
        (lambda b: {**b, "user": b["user"][:, None]}, r"ids have shape \(16, 1\), expected \(16,"),
        (lambda b: {**b, "day": b["day"].int()}, "type torch.int32, expected .* int64"),
        (lambda b: {**b, "more": b["day"]}, "another nest of tensors"),
    ],
)
def test_batches_unlike_the_first_are_refused(
    change: Callable[[Batch], Batch], fault: str, tmp_path: Path
) -> None:
    stream = [*STREAM[:3], change(STREAM[3]), *STREAM[4:]]
    with pytest.raises(ValueError, match=fault):
        routed(Model().double(), adagrad, settings_of(tmp_path, lookups), stream=stream)


def test_gradients_that_were_not_set_to_zero_are_refused(tmp_path: Path) -> None:
    class Forgets(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    def forgetful(model: nn.Module) -> Optimizers:
        assert isinstance(model, Model)
        rows = [model.user.weight, model.tags.weight]
        rest = [*model.day.parameters(), *model.top.parameters()]
        return [torch.optim.SGD(rows, lr=0.1), Forgets(rest, lr=0.1)]

    with pytest.raises(RuntimeError, match=r"step 1: parameters have gradients before ready"):
        routed(Model().double(), forgetful, settings_of(tmp_path, lookups))


def test_nan_loss_of_a_blank_sample_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sample in a batch, one of two workers trains a blank sample, and all gradients are
    added up."""
    monkeypatch.setattr("embroute.nn.dense.reduces_at_shard", lambda *_: False)

    class Weighted(Model):
        def forward(self, batch: Batch) -> torch.Tensor:
            weights = batch["label"] * 0 + (batch["offsets"][-1] > 0)  # 0 of a blank sample
            return super().forward(batch) * weights / weights.sum() * len(weights)

    one = {name: value[:1] for name, value in STREAM[0].items()} | {
        "offsets": torch.tensor([0, 2]),
        "tags": torch.tensor([3, 4]),
    }
    assert_plain(Weighted(), adagrad, tmp_path, stream=[STREAM[1], one, STREAM[2]])
