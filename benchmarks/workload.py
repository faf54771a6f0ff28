"""The job of the training benchmarks: DLRM over 26 tables, one id stream, one dense part."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from embroute.data.batch import Batch
from embroute.data.stream import batches
from embroute.data.synthetic.generator import LOG_PRESETS, SyntheticSource
from embroute.data.synthetic.presets import FieldLaw
from embroute.data.synthetic.sampling import ITEM, USER
from embroute.models.layers import Samples
from embroute.models.registry import ModelOptions, make_model

NUM_ROWS, NUM_TABLES, DIM, LR = 1_000_000, 26, 32, 0.05
HIDDEN = (256, 128)


@dataclass(frozen=True)
class Case:
    """One contender at one size. `distinct_batches`: the stream repeats after so many; 0: never."""

    contender: str
    policy: str = "esd(1)"
    cache: float = 1.0
    workers: int = 2
    batch: int = 1024  # of each worker
    steps: int = 120
    warmup: int = 50
    distinct_batches: int = 0
    mbit: float = 0.0  # of every worker's link, as embroute is told; 0: embroute is not told
    hidden: Sequence[int] = HIDDEN


def source() -> SyntheticSource:
    """Criteo's 26 fields with tables of equal size: skewed, correlated ids in a fixed order."""
    preset = LOG_PRESETS["criteo-kaggle"]
    sides = (USER, ITEM)
    rows = [len(part) for part in np.array_split(np.arange(NUM_ROWS), NUM_TABLES)]
    laws = [
        FieldLaw(one.name, count, sides[i % 2], exponent=1.05, tail=0.15)
        for i, (one, count) in enumerate(zip(preset.fields, rows, strict=True))
    ]
    return SyntheticSource(replace(preset, fields=tuple(laws)), preset.knobs)


def stream(case: Case) -> Iterator[Batch]:
    """Global batches of all workers, already in memory."""
    count = case.distinct_batches or case.steps
    found = list(islice(batches(source(), case.workers * case.batch), count))
    return islice((found[i % count] for i in range(case.steps)), case.steps)


class Given(nn.Module):
    """Vectors from another source, in place of a model's tables."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = torch.empty(0)

    def stacked(self, samples: Samples) -> torch.Tensor:
        """Vectors of all fields, samples x fields x width."""
        return self.vectors


def new_model(hidden: Sequence[int] = HIDDEN) -> nn.Module:
    """The model; its tables hold no rows."""
    options = ModelOptions(hidden=tuple(hidden), table_device="meta")
    return make_model("dlrm", source().schema, DIM, options)


def dense_model() -> tuple[nn.Module, Given]:
    """The same model without tables."""
    model, given = new_model(), Given()
    model.embeddings = given
    return model, given


def dense_samples(batch: Batch) -> Samples:
    """The inputs of the dense part."""
    return Samples(
        torch.from_numpy(batch.dense),
        torch.from_numpy(batch.label),
        torch.empty(0, dtype=torch.int64),
        torch.from_numpy(batch.offsets),
        batch.num_fields,
    )


def loss_of(model: nn.Module, samples: Samples) -> torch.Tensor:
    """Mean log-loss."""
    return nn.functional.binary_cross_entropy_with_logits(model(samples), samples.label)


def sum_gradients(model: nn.Module) -> None:
    """All-reduce the dense gradients to their mean over ranks, in one message."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
        grad.copy_(part.reshape(grad.shape))


@dataclass
class Clock:
    """Milliseconds of each step after the warm-up, and of processor time in all of them."""

    warmup: int
    step_ms: list[float] = field(default_factory=list)
    steps: int = 0
    _last: float = 0.0
    _cpu: float = 0.0
    _cpu_ms: float = 0.0

    def tick(self) -> None:
        """A step is done."""
        now = time.perf_counter()
        self.steps += 1
        if self.steps > self.warmup:
            self.step_ms.append(1e3 * (now - self._last))
            self._cpu_ms = 1e3 * (cpu_s() - self._cpu) / len(self.step_ms)
        else:
            self._cpu = cpu_s()
        self._last = now

    def result(self) -> dict[str, object]:
        """The dict that a rank prints."""
        return {"step_ms": self.step_ms, "cpu_ms": self._cpu_ms}


def cpu_s() -> float:
    """Processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
