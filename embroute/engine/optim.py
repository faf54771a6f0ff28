"""The row optimizers that exist, and their settings. Their arithmetic is in `kernels/rows.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from embroute.cost.step_time import OPTIMIZERS
from embroute.kernels.rows import Floats, Hyper, Index, adagrad, adam, rowwise_adagrad, sgd

Update = Callable[[Floats, Index, Floats, Hyper], None]

_UPDATES: Mapping[str, Update] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise-adagrad": rowwise_adagrad,
    "adam": adam,
}


@dataclass(frozen=True)
class RowOptimizer:
    """One of the four optimizers with its settings; `decay` is the weight decay of touched rows."""

    name: str
    lr: float
    eps: float = 1e-10
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.0
    initial_state: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in _UPDATES:
            raise ValueError(f"optimizer must be one of {', '.join(_UPDATES)}, got {self.name!r}")

    def state_width(self, width: int) -> int:
        """Floats of state beside a row of this width."""
        return OPTIMIZERS[self.name](width)

    def with_lr(self, lr: float) -> RowOptimizer:
        """The same optimizer with another learning rate."""
        return replace(self, lr=lr)

    def update(self, records_NX: Floats, index_I: Index, grad_IX: Floats, step: int) -> None:
        """Apply one update to each of the named rows; `step` counts from 1."""
        hyper = Hyper(self.lr, self.eps, self.betas[0], self.betas[1], self.decay, step)
        _UPDATES[self.name](records_NX, index_I, grad_IX, hyper)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row: the sum of mean squared gradients.

    torch has none. Rows whose gradient is zero everywhere do not change.
    """

    def __init__(
        self, params: torch.optim.optimizer.ParamsT, lr: float = 1e-2, eps: float = 1e-10
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                state = self.state[param]
                if not state:
                    state["sum"] = torch.zeros(len(param), 1, dtype=param.dtype)
                state["sum"] += grad.pow(2).mean(1, keepdim=True)
                param -= group["lr"] * grad / (state["sum"].sqrt() + group["eps"])


# Looked up by exact type: a derived class may compute other updates.
_ROW_FORMS = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    RowWiseAdagrad: "rowwise-adagrad",
    torch.optim.SparseAdam: "adam",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
}


def row_optimizer(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> RowOptimizer:
    """The row optimizer with the same updates as the user's torch optimizer for a group."""
    name = _ROW_FORMS.get(type(optimizer))
    if name is None:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} has no row form; use SGD, Adagrad, "
            f"RowWiseAdagrad, SparseAdam or Adam"
        )
    for option in ("weight_decay", "momentum", "lr_decay"):
        if group.get(option):
            raise ValueError(
                f"{type(optimizer).__name__}({option}={group[option]}): embedding rows are updated "
                f"only when touched, so {option} must be 0; prepare(decay=...) decays touched rows"
            )
    for option in ("nesterov", "amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(f"{type(optimizer).__name__}({option}=True) has no row form")
    if not 0 <= float(group["lr"]) < math.inf:
        raise ValueError(
            f"{type(optimizer).__name__}(lr={group['lr']}): lr must be at least 0 and finite"
        )
    return RowOptimizer(
        name,
        float(group["lr"]),
        group.get("eps", RowOptimizer.eps),
        tuple(group.get("betas", RowOptimizer.betas)),
        initial_state=float(group.get("initial_accumulator_value", 0)),
    )


@dataclass(frozen=True)
class Rate:
    """The rows' learning rate, read from the parameter groups of the user's tables."""

    rows: RowOptimizer  # the tables' optimizer at the beginning
    groups: Sequence[tuple[torch.optim.Optimizer, int]]

    @property
    def lr(self) -> float:
        """The rate that a scheduler has set; no other option may change."""
        optimizers = {row_optimizer(own, own.param_groups[number]) for own, number in self.groups}
        if len(optimizers) > 1:
            rates = ", ".join(f"{rate:g}" for rate in sorted(rows.lr for rows in optimizers))
            raise ValueError(
                f"a schedule gives tables different learning rates ({rates}): rows have one"
            )
        (now,) = optimizers
        if now.with_lr(self.rows.lr) != self.rows:
            raise ValueError(
                f"the tables' optimizer was {self.rows} and is {now}: of it only lr may change, by "
                f"a schedule (OneCycleLR: cycle_momentum=False) or by a checkpoint"
            )
        return now.lr
