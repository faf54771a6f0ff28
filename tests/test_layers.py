"""Layers of users' models: supported forms equal plain torch, other forms are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import embroute
from tests.user_models import (
    USERS,
    Batch,
    Model,
    adagrad,
    assert_plain,
    lookups,
    routed,
    settings_of,
    sgd,
    with_days,
)


def test_bags_with_a_last_offset_equal_plain_torch(tmp_path: Path) -> None:
    assert sorted(assert_plain(Model(), adagrad, tmp_path)) == ["tags", "user"]


def test_small_layers_with_sparse_gradients_are_routed(tmp_path: Path) -> None:
    model = Model(sparse=True)
    model.tags.sparse = model.day.sparse = True
    assert sorted(assert_plain(model, sgd, tmp_path, with_days)) == ["day", "tags", "user"]


class Friends(Model):
    """A layer with two names and three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.friend = self.user
        self.top = nn.Linear(12 + 8, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        friends = [self.friend(batch["friend"][:, i].int()) for i in range(2)]
        tags = self.tags(batch["tags"], batch["offsets"])
        parts = [self.user(batch["user"]), tags, self.day(batch["day"]), *friends]
        score: torch.Tensor = self.top(torch.cat(parts, 1))
        return score.squeeze(1)


def test_layer_with_two_names_and_three_calls_equals_plain_torch(tmp_path: Path) -> None:
    def asked(batch: Batch) -> dict[str, object]:
        friends = [batch["friend"][:, 0], batch["friend"][:, 1], batch["user"]]
        return lookups(batch) | {"user": friends}

    assert sorted(assert_plain(Friends(), adagrad, tmp_path, asked)) == ["tags", "user"]


class Scaled(nn.Embedding):
    """An embedding that also scales its rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(input)


class Tied(Model):
    """An output layer that shares the weight of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, USERS, bias=False)
        self.out.weight = self.user.weight


def hooked() -> Model:
    model = Model()
    model.user.register_forward_hook(lambda module, given, found: 3 * found)
    return model


def frozen() -> Model:
    model = Model()
    model.tags.weight.requires_grad_(False)
    return model


def kept_dense() -> Model:
    model = Model()
    embroute.route(model.day, False)
    model.day.sparse = True
    return model


def clipped_days() -> Model:
    model = Model()
    model.day.max_norm = 1.0
    return model


def mixed() -> Model:
    model = Model()
    model.tags.double()
    return model


def mode(name: str) -> Model:
    model = Model()
    model.tags.mode = name
    return model


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (lambda: Model(max_norm=1.0), r"user: max_norm=1.0 has no routed form"),
        (lambda: Model(scale_grad_by_freq=True), r"user: scale_grad_by_freq=True has no routed"),
        (clipped_days, r"day: max_norm=1.0 depends on all samples of a batch"),
        (lambda: mode("max"), r"tags: mode must be sum or mean, got 'max'"),
        (lambda: Model(Scaled(USERS, 4)), r"user: a forward\(\) of its own has no routed form; "),
        (Tied, r"user: its weight is out.weight too; a routed table belongs to one layer only"),
        (hooked, r"user: its hooks would not be called any more; embroute.route\(user, False\)"),
        (frozen, r"tags: its weight is frozen, but routed rows are trained; "),
        (kept_dense, r"day: sparse=True, and not routed; the dense part has no sparse form"),
        (mixed, r"same type of number, got user torch.float32, tags torch.float64"),
        (lambda: Model().bfloat16(), r"user: rows must be float32 or float64, got torch.bfloat16"),
    ],
)
def test_layers_without_a_routed_form_are_refused(
    made: Callable[[], Model], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=fault):
        routed(made(), adagrad, settings_of(tmp_path, lookups))


def test_unrouted_layer_may_have_any_form(tmp_path: Path) -> None:
    model = Model(Scaled(USERS, 4))
    embroute.route(model.user, False)

    def asked(batch: Batch) -> dict[str, object]:
        return {"tags": (batch["tags"], batch["offsets"])}

    assert list(assert_plain(model, adagrad, tmp_path, asked)) == ["tags"]


def test_bare_embedding_layer_as_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model is an embedding layer itself"):
        routed(nn.Embedding(USERS, 4), adagrad, settings_of(tmp_path, lookups))


def test_use_of_sample_weights_and_table_weights_is_refused(tmp_path: Path) -> None:
    class Weighted(Model):
        def forward(self, batch: Batch) -> torch.Tensor:
            weights = torch.ones(len(batch["tags"]), dtype=torch.double)
            score: torch.Tensor = self.tags(batch["tags"], batch["offsets"], weights)
            return score.sum(1)

    class Small(Model):
        def forward(self, batch: Batch) -> torch.Tensor:
            norm: torch.Tensor = self.user.weight.norm()
            return super().forward(batch) + 1e-3 * norm

    with pytest.raises(ValueError, match="tags: per_sample_weights has no routed form"):
        routed(Weighted().double(), adagrad, settings_of(tmp_path / "a", lookups))
    with pytest.raises(AttributeError, match="user is routed: its rows are at the shards"):
        routed(Small().double(), adagrad, settings_of(tmp_path / "b", lookups))
