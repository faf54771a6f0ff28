"""Users' optimizers and schedules without a row form are refused; unused gradients stay."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.user_models import (
    STEPS,
    STREAM,
    Model,
    Optimizers,
    Schedules,
    adagrad,
    lookups,
    routed,
    settings_of,
    train,
)


def groups(model: nn.Module) -> Optimizers:
    """An optimizer with a group for each table."""
    assert isinstance(model, Model)
    rest = [*model.day.parameters(), *model.top.parameters()]
    each = [[model.user.weight], [model.tags.weight], rest]
    return [torch.optim.Adam([{"params": own} for own in each], lr=0.05)]


def apart(optimizers: Optimizers) -> Schedules:
    """Schedules that make the learning rates of the tables differ."""
    falls = [lambda step: 1.0, lambda step: 0.5**step, lambda step: 1.0]
    return [torch.optim.lr_scheduler.LambdaLR(optimizers[0], falls)]


def cycle(optimizers: Optimizers) -> Schedules:
    """A schedule that changes the learning rate and Adam's first coefficient."""
    return [torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.1, total_steps=STEPS + 1)]


def test_schedules_without_a_row_form_are_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, lookups)
    with pytest.raises(ValueError, match=r"tables different learning rates \(0.025, 0.05\)"):
        routed(Model().double(), groups, settings, apart)
    with pytest.raises(ValueError, match=r"of it only lr may change.*cycle_momentum=False"):
        routed(Model().double(), groups, settings, cycle)


def test_used_and_unknown_optimizers_are_refused(tmp_path: Path) -> None:
    def begun(model: nn.Module) -> Optimizers:
        optimizers = adagrad(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers[0].step()
        return optimizers

    class Own(torch.optim.SGD):
        """A subclass with unknown behaviour."""

    settings = settings_of(tmp_path, lookups)
    with pytest.raises(ValueError, match="Adagrad has taken steps already"):
        routed(Model().double(), begun, settings)
    with pytest.raises(ValueError, match="optimizer Own has no row form"):
        routed(Model().double(), lambda model: [Own(model.parameters(), lr=0.1)], settings)


def test_gradients_without_an_optimizer_accumulate_like_plain_torch(tmp_path: Path) -> None:
    def without_days(model: nn.Module) -> Optimizers:
        assert isinstance(model, Model)
        used = [model.user.weight, model.tags.weight, *model.top.parameters()]
        return [torch.optim.SGD(used, lr=0.3)]

    model = Model().double()
    plain = copy.deepcopy(model)
    train(plain, without_days(plain), STREAM, torch.autograd.backward, [])
    own = routed(model, without_days, settings_of(tmp_path, lookups))
    assert isinstance(own, Model)
    assert plain.day.weight.grad is not None
    torch.testing.assert_close(own.day.weight.grad, plain.day.weight.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(own.top.weight, plain.top.weight, rtol=1e-9, atol=1e-11)
