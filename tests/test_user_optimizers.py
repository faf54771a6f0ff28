"""Optimizers and schedules of users' own that rows cannot follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.user_models import (
    STEPS,
    Model,
    Optimizers,
    Schedules,
    adagrad,
    lookups,
    routed,
    settings_of,
)


def groups(model: nn.Module) -> Optimizers:
    """Tables in groups of their own."""
    assert isinstance(model, Model)
    rest = [*model.day.parameters(), *model.top.parameters()]
    each = [[model.user.weight], [model.tags.weight], rest]
    return [torch.optim.Adam([{"params": own} for own in each], lr=0.05)]


def apart(optimizers: Optimizers) -> Schedules:
    """Rates that were the same and do not stay so."""
    falls = [lambda step: 1.0, lambda step: 0.5**step, lambda step: 1.0]
    return [torch.optim.lr_scheduler.LambdaLR(optimizers[0], falls)]


def cycle(optimizers: Optimizers) -> Schedules:
    """A rate that rises and falls, and Adam's first coefficient with it."""
    return [torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.1, total_steps=STEPS + 1)]


def test_schedules_that_rows_cannot_follow(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, lookups)
    with pytest.raises(ValueError, match=r"tables different learning rates \(0.025, 0.05\)"):
        routed(Model().double(), groups, settings, apart)
    with pytest.raises(ValueError, match=r"of it only lr may change.*cycle_momentum=False"):
        routed(Model().double(), groups, settings, cycle)


def test_an_optimizer_that_has_begun_is_refused(tmp_path: Path) -> None:
    def begun(model: nn.Module) -> Optimizers:
        optimizers = adagrad(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers[0].step()
        return optimizers

    class Own(torch.optim.SGD):
        """May do anything."""

    settings = settings_of(tmp_path, lookups)
    with pytest.raises(ValueError, match="Adagrad has taken steps already"):
        routed(Model().double(), begun, settings)
    with pytest.raises(ValueError, match="optimizer Own has no row form"):
        routed(Model().double(), lambda model: [Own(model.parameters(), lr=0.1)], settings)
