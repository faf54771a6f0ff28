"""Models of users' own: what their layers may be, equal to plain torch, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import embroute
from embroute.commands.checkpoint import export_tables
from embroute.runtime.checkpoint_files import latest
from embroute.runtime.local import run_local
from embroute.runtime.prepare import prepare
from embroute.runtime.seat import Seat
from embroute.runtime.settings import Settings

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
    """The same on two workers and a shard; the model of a worker."""

    def main(seat: Seat) -> nn.Module:
        own = copy.deepcopy(model)
        used = optimizers(own)
        plans = schedules(used)
        ready = prepare(own, used, stream, seat, **settings)
        train(own, used, ready.loader, lambda loss: ready.backward(loss), plans)
        return own

    return run_local(2, 1, main)["worker0"]


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
    """Routed training ends where plain training does; returns the exported tables."""
    model = model.double()
    plain = copy.deepcopy(model)
    train(plain, optimizers(plain), stream, torch.autograd.backward, [])
    settings = settings_of(folder, asked)
    dense = routed(model, optimizers, settings, stream=stream).state_dict()
    saved = latest(folder)
    assert saved is not None
    export_tables(saved, folder / "tables.safetensors")
    tables = load_file(folder / "tables.safetensors")
    whole = dense | {f"{name}.weight": rows for name, rows in tables.items()}
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(whole[name], expected.detach(), rtol=1e-9, atol=1e-11)
    return tables


def test_offsets_may_end_with_the_number_of_ids(tmp_path: Path) -> None:
    assert sorted(assert_plain(Model(), adagrad, tmp_path)) == ["tags", "user"]


def test_small_layers_with_sparse_gradients_are_routed(tmp_path: Path) -> None:
    model = Model(sparse=True)
    model.tags.sparse = model.day.sparse = True
    assert sorted(assert_plain(model, sgd, tmp_path, with_days)) == ["day", "tags", "user"]


class Friends(Model):
    """One layer under two names, and called three times."""

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


def test_a_layer_may_have_two_names_and_several_calls(tmp_path: Path) -> None:
    def asked(batch: Batch) -> dict[str, object]:
        friends = [batch["friend"][:, 0], batch["friend"][:, 1], batch["user"]]
        return lookups(batch) | {"user": friends}

    assert sorted(assert_plain(Friends(), adagrad, tmp_path, asked)) == ["tags", "user"]


class Scaled(nn.Embedding):
    """Does more than to look up."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(input)


class Tied(Model):
    """Its output is tied to a table."""

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
        (clipped_days, r"day: max_norm=1.0 depends on who computes a sample"),
        (lambda: mode("max"), r"tags: mode must be sum or mean, got 'max'"),
        (lambda: Model(Scaled(USERS, 4)), r"user: a forward\(\) of its own has no routed form; "),
        (Tied, r"user: its weight is out.weight too; rows travel for one layer only"),
        (hooked, r"user: its hooks would not be called any more; embroute.route\(user, False\)"),
        (frozen, r"tags: its weight is frozen, and rows that travel are trained; "),
        (kept_dense, r"day: sparse=True, and not routed; the dense part has no sparse form"),
        (mixed, r"same type of number, got user torch.float32, tags torch.float64"),
        (lambda: Model().bfloat16(), r"user: rows must be float32 or float64, got torch.bfloat16"),
    ],
)
def test_layers_that_are_refused(made: Callable[[], Model], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=fault):
        routed(made(), adagrad, settings_of(tmp_path, lookups))


def test_layers_that_are_left_alone_may_be_anything(tmp_path: Path) -> None:
    model = Model(Scaled(USERS, 4))
    embroute.route(model.user, False)

    def asked(batch: Batch) -> dict[str, object]:
        return {"tags": (batch["tags"], batch["offsets"])}

    assert list(assert_plain(model, adagrad, tmp_path, asked)) == ["tags"]


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
def test_look_ups_that_are_refused(
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
def test_offsets_that_are_refused(
    offsets: Callable[[Batch], torch.Tensor], fault: str, tmp_path: Path
) -> None:
    stream = [{**batch, "offsets": offsets(batch)} for batch in STREAM]
    with pytest.raises(ValueError, match=fault):
        routed(Model().double(), adagrad, settings_of(tmp_path, lookups), stream=stream)


def test_weights_of_samples_and_tables_are_refused(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="Adagrad has taken 1 steps already"):
        routed(Model().double(), begun, settings)
    with pytest.raises(ValueError, match="optimizer Own has no row form"):
        routed(Model().double(), lambda model: [Own(model.parameters(), lr=0.1)], settings)
