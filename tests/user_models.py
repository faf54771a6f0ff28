"""A user's model, data and loop, plain and routed, for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from embroute.checkpoint.folders import latest_checkpoint
from embroute.cli.checkpoint import export_tables
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.nn.prepare import prepare
from embroute.nn.settings import Settings

STEPS, SIZE, LAST = 12, 16, 5
USERS, TAGS, DAYS = 200, 150, 10
Batch = dict[str, torch.Tensor]
Optimizers = list[torch.optim.Optimizer]
Schedules = list[torch.optim.lr_scheduler.LRScheduler]


def ids(rows: int, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return (torch.rand(shape, generator=random) ** 3 * rows).long()


def make_batch(step: int) -> Batch:
    random = torch.Generator().manual_seed(step)
    size = SIZE if step < STEPS - 1 else LAST
    lengths = torch.randint(0, 4, (size,), generator=random)
    ends = lengths.cumsum(0)
    return {
        "user": ids(USERS, (size,), random),
        "friend": ids(USERS, (size, 2), random),
        "tags": ids(TAGS, (int(ends[-1]),), random),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.long), ends]),
        "day": ids(DAYS, (size,), random),
        "label": (torch.rand(size, generator=random) < 0.4).double(),
    }


STREAM = [make_batch(step) for step in range(STEPS)]


class Model(nn.Module):
    """Users looked up alone, tags in bags, days few."""

    def __init__(self, user: nn.Embedding | None = None, **options: object) -> None:
        super().__init__()
        self.user = user or nn.Embedding(USERS, 4, **options)  # type: ignore[arg-type]
        self.tags = nn.EmbeddingBag(TAGS, 5, mode="mean", include_last_offset=True)
        self.day = nn.Embedding(DAYS, 3)
        self.top = nn.Linear(12, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        tags = self.tags(batch["tags"], batch["offsets"])
        parts = [self.user(input=batch["user"]), tags, self.day(batch["day"])]
        score: torch.Tensor = self.top(torch.cat(parts, 1))
        return score.squeeze(1)


def lookups(batch: Batch) -> dict[str, object]:
    return {"user": batch["user"], "tags": (batch["tags"], batch["offsets"])}


def with_days(batch: Batch) -> dict[str, object]:
    return lookups(batch) | {"day": batch["day"]}


def adagrad(model: nn.Module) -> Optimizers:
    return [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def sgd(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.3)]


def train(
    model: nn.Module,
    optimizers: Optimizers,
    stream: object,
    backward: Callable[[torch.Tensor], object],
    schedules: Schedules,
) -> None:
    """A user's loop."""
    assert hasattr(stream, "__iter__")
    for batch in stream:
        for one in optimizers:
            one.zero_grad()
        backward(nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"]))
        for one in optimizers:
            one.step()
        for schedule in schedules:
            schedule.step()


def routed(
    model: nn.Module,
    optimizers: Callable[[nn.Module], Optimizers],
    settings: Settings,
    schedules: Callable[[Optimizers], Schedules] = lambda _: [],
    stream: Sequence[Batch] = STREAM,
) -> nn.Module:
    """Train the same loop on two workers and a shard; returns the model of a worker."""

    def main(rank: RankContext) -> nn.Module:
        own = copy.deepcopy(model)
        used = optimizers(own)
        plans = schedules(used)
        ready = prepare(own, used, stream, rank, **settings)
        train(own, used, ready.loader, lambda loss: ready.backward(loss), plans)
        return own

    return run_in_process(2, 1, main)["worker0"]


def settings_of(folder: Path, asked: Callable[[Batch], Mapping[str, object]]) -> Settings:
    return Settings(
        policy="esd(1)",
        cache=1.0,
        min_rows=100,
        lookups=asked,  # type: ignore[typeddict-item]
        checkpoint=folder,
    )


def assert_plain(
    model: nn.Module,
    optimizers: Callable[[nn.Module], Optimizers],
    folder: Path,
    asked: Callable[[Batch], Mapping[str, object]] = lookups,
    stream: Sequence[Batch] = STREAM,
) -> dict[str, torch.Tensor]:
    """Assert that routed training equals plain training; returns the exported tables."""
    model = model.double()
    plain = copy.deepcopy(model)
    train(plain, optimizers(plain), stream, torch.autograd.backward, [])
    settings = settings_of(folder, asked)
    dense = routed(model, optimizers, settings, stream=stream).state_dict()
    saved = latest_checkpoint(folder)
    assert saved is not None
    export_tables(saved, folder / "tables.safetensors")
    tables = load_file(folder / "tables.safetensors")
    whole = dense | {f"{name}.weight": rows for name, rows in tables.items()}
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(whole[name], expected.detach(), rtol=1e-9, atol=1e-11)
    return tables
