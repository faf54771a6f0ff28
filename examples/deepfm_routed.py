"""DeepFM on generated clicks: in plain torch, and routed over workers by embroute.

    python examples/deepfm_plain.py
    embroute run --workers 2 examples/deepfm_routed.py

The two files differ in six lines and print the same losses. The routed file uses the defaults:
the policy embroute, and caches of a tenth of all rows.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import embroute

FIELDS = torch.tensor([20_000, 10_000, 2_000, 200])  # user, item, shop, hour and place
FIRST_ROWS = FIELDS.cumsum(0) - FIELDS
BATCH, WIDTH, REPORT = 256, 16, 50


class DeepFM(nn.Module):
    """All fields share one table; a row is a linear weight and the factors of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(int(FIELDS.sum()), 1 + WIDTH)
        nn.init.normal_(self.table.weight, std=0.1)
        wide = len(FIELDS) * WIDTH
        self.deep = nn.Sequential(nn.Linear(wide, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of samples."""
        linear, factors = self.table(ids).split([1, WIDTH], 2)
        pairs = (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(1) / 2
        return linear.sum((1, 2)) + pairs + self.deep(factors.flatten(1)).squeeze(1)


def clicks(num_samples: int) -> TensorDataset:
    """Skewed ids, and clicks that a factorization machine draws."""
    random = torch.Generator().manual_seed(1)
    drawn = torch.rand(num_samples, len(FIELDS), generator=random) ** 3
    ids = (drawn * FIELDS).long() + FIRST_ROWS
    tastes = torch.randn(int(FIELDS.sum()), 3, generator=random)[ids]
    score = tastes[:, :, 0].sum(1) + (tastes.sum(1) ** 2 - (tastes**2).sum(1)).sum(1) / 6
    chance = torch.rand(num_samples, generator=random)
    return TensorDataset(ids, (chance < torch.sigmoid(score)).double())


def auc(scored: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Chance that a click scores higher than a sample without a click."""
    score, clicked = (torch.cat(parts) for parts in zip(*scored, strict=True))
    clicked = clicked > 0
    rank = score.argsort().argsort().double() + 1
    ones, zeros = int(clicked.sum()), int((~clicked).sum())
    return float(rank[clicked].sum() - ones * (ones + 1) / 2) / max(1, ones * zeros)


def main(steps: int) -> None:
    """Train one epoch of `steps` steps. Each sample is scored before the model learns from it."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # both files then agree in every digit they print
    order = torch.Generator().manual_seed(2)
    loader = DataLoader(clicks(steps * BATCH), BATCH, shuffle=True, generator=order)
    model = DeepFM()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    ready = embroute.prepare(model, optimizer, loader, lookups=lambda batch: {"table": batch[0]})
    scored: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step, (ids, label) in enumerate(ready.loader, 1):
        score = model(ids)
        loss = nn.functional.binary_cross_entropy_with_logits(score, label)
        optimizer.zero_grad()
        ready.backward(loss)
        optimizer.step()
        scored = [*scored[1 - REPORT :], (score.detach(), label)]
        if step % REPORT == 0 and ready.is_first_worker:
            print(f"step {step}  log-loss {ready.loss:.8f}  AUC {auc(scored):.3f} of own samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    main(parser.parse_args().steps)
