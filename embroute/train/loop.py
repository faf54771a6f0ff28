"""What every rank of `embroute train` does: the model, the loop, the evaluation."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from embroute.config.spec import parse_size
from embroute.data.batch import Batch, Source
from embroute.data.open import open_source
from embroute.data.readers.file_source import FileSource
from embroute.data.schema import Field, Schema, Table
from embroute.data.stream import batches, split
from embroute.engine.control import broadcast_text
from embroute.engine.observe.gather import gather_from_workers
from embroute.engine.optim import RowWiseAdagrad
from embroute.kernels.array_types import F32
from embroute.launch.rank import RankContext
from embroute.models.layers import Samples
from embroute.models.registry import ModelOptions, make_model
from embroute.nn.module_surgery import field_embeddings
from embroute.nn.prepare import prepare
from embroute.nn.prepared import Prepared
from embroute.nn.session import WorkerSession
from embroute.nn.settings import Settings
from embroute.planner.setup import dims
from embroute.train.run_file import CHECKPOINTS, RunFile
from embroute.transport.job_store import attempt

if TYPE_CHECKING:
    from embroute.train.metrics_log import RunMonitor


@dataclass(frozen=True)
class BatchLoader:
    """Batches of a source, from the start at every pass."""

    source: Source
    run: RunFile
    size: int
    train: bool

    def __iter__(self) -> Iterator[Batch]:
        run = self.run
        if not self.train:
            return batches(self.source, self.size)
        stream = batches(
            self.source, self.size, epochs=run.epochs, shuffle=run.shuffle, seed=run.seed
        )
        return islice(stream, run.steps or None)


def schema_text(schema: Schema) -> str:
    """A schema as JSON: ranks without the data must know the tables."""
    return json.dumps(asdict(schema))


def schema_from(text: str) -> Schema:
    """The schema that `schema_text` wrote."""
    given = json.loads(text)
    return Schema(
        tuple(Table(**table) for table in given["tables"]),
        tuple(Field(**field) for field in given["fields"]),
        tuple(given["dense"]),
        given["labelled"],
    )


@dataclass(frozen=True)
class RunData:
    """The data as a rank knows it: only the coordinator reads samples."""

    schema: Schema
    train: BatchLoader | None = None
    held_out: BatchLoader | None = None
    steps: int = 0  # of the whole run, where it is known
    whole: Source | None = None


def open_run_data(run: RunFile, rank: RankContext) -> RunData:
    """Open the data at the coordinator and tell the other ranks its schema."""
    if rank.name != "coordinator":
        told = json.loads(broadcast_text(rank.name, rank.peers, rank.control, ""))
        return RunData(schema_from(told["schema"]), steps=told["steps"])
    source = open_source(run.data, run.reading())
    if not source.schema.labelled:
        raise ValueError(
            f"--data {run.data}: training needs a label: name its column with --label, or use "
            f"online-retail(negatives=1) or a synthetic preset"
        )
    train, held_out = split(source, run.held_out)
    size = run.batch * rank.num_workers
    steps = _steps(train, run, size)
    told = json.dumps({"schema": schema_text(source.schema), "steps": steps})
    broadcast_text(rank.name, rank.peers, rank.control, told)
    looked = None if held_out is None else BatchLoader(held_out, run, size, train=False)
    return RunData(source.schema, BatchLoader(train, run, size, train=True), looked, steps, source)


def _steps(source: Source, run: RunFile, size: int) -> int:
    """Steps of the run, or 0 where only reading everything would tell."""
    if source.num_samples is None:
        return run.steps
    whole = run.epochs * -(-source.num_samples // size)
    return min(run.steps, whole) if run.steps else whole


def _tables(model: nn.Module) -> list[torch.Tensor]:
    found = field_embeddings(model)
    return [] if found is None else found.weights


def row_optimizer_of(run: RunFile, model: nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer whose row form updates the tables."""
    weights = _tables(model)
    if run.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=run.lr)
    if run.optimizer == "adagrad":
        return torch.optim.Adagrad(weights, lr=run.lr)
    if run.optimizer == "rowwise-adagrad":
        return RowWiseAdagrad(weights, lr=run.lr)
    return torch.optim.SparseAdam(weights, lr=run.lr)


def dense_optimizer_of(run: RunFile, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of everything else."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
    }
    tables = {id(weight) for weight in _tables(model)}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    return kinds[run.dense_optimizer](dense, lr=run.dense_lr)


def settings_of(run: RunFile, data: RunData, folder: Path) -> Settings:
    """What `prepare` is told."""
    settings = Settings(
        policy=run.policy,
        cache=parse_size("--cache", run.cache),
        network=run.cluster(),
        quotas=run.shares(),
        compute_ms_per_sample=run.compute_ms_per_sample,
        decay=run.decay,
        seed=run.seed,
        device=run.device,
        compare_with="vanilla",
        max_steps=run.steps,
        checkpoint=folder / CHECKPOINTS,
        checkpoint_every=run.checkpoint_every,
        keep=run.keep,
        resume=run.resume,
        fall_back=run.restarts > 0 or attempt() > 0,  # nobody may be there to move it away
    )
    if run.tables:
        settings["tables"] = Path(run.tables)
    if data.held_out is not None:
        settings["held_out"], settings["evaluate_every"] = data.held_out, run.evaluate_every
    return settings


def scores_of(model: nn.Module, run: WorkerSession) -> tuple[F32, F32]:
    """Scores and labels of this worker's held-out samples."""
    scores, labels = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    model.eval()
    with torch.no_grad():
        for samples in run.held_out():
            assert isinstance(samples, Samples)
            scores.append(torch.sigmoid(model(samples)).float().cpu().numpy())
            labels.append(samples.label.float().cpu().numpy())
    model.train()
    return np.concatenate(scores), np.concatenate(labels)


def metrics_of(scores: F32, labels: F32) -> dict[str, float]:
    """Log-loss and AUC."""
    from torchmetrics.functional.classification import binary_auroc  # slow to import

    score, label = torch.from_numpy(scores).double(), torch.from_numpy(labels)
    loss = nn.functional.binary_cross_entropy(score.clamp(1e-7, 1 - 1e-7), label.double())
    area = binary_auroc(score, label.long())
    return {"log_loss": float(loss), "auc": float(area)}


def evaluate(model: nn.Module, run: WorkerSession) -> dict[str, float]:
    """Metrics of the held-out samples of all workers; empty but at the first worker."""
    scores, labels = scores_of(model, run)
    every, known = gather_from_workers(run.rank, scores), gather_from_workers(run.rank, labels)
    return metrics_of(np.concatenate(every), np.concatenate(known)) if every else {}


def train_rank(run: RunFile, rank: RankContext, folder: Path, stop: threading.Event) -> Prepared:
    """This rank's part of a run; `stop` asks for a checkpoint and an early end."""
    torch.manual_seed(rank_seed(run.seed, rank.name))
    data = open_run_data(run, rank)
    hidden = tuple(int(part) for part in run.hidden.split(",") if part)
    options = ModelOptions(hidden, mode=run.pooling, seed=run.seed, table_device="meta")
    torch.set_default_dtype(getattr(torch, run.dtype))
    model = make_model(run.model, data.schema, dims(run.dim, data.schema), options)
    optimizers = [row_optimizer_of(run, model), dense_optimizer_of(run, model)]
    schedules = [_warmup(optimizer, run.warmup_steps) for optimizer in optimizers]
    settings = settings_of(run, data, folder)
    settings["extras"] = {f"schedule{i}": schedule for i, schedule in enumerate(schedules)}
    settings["stop"] = stop
    ready = prepare(model, optimizers, data.train or (), rank, **settings)
    if ready.session is not None:
        loop = Loop(run, ready, optimizers, schedules)
        loop.run_all(monitor_of(rank, folder, data.steps))
    if isinstance(data.whole, FileSource) and data.whole.bad_rows:
        print(data.whole.skipped, file=sys.stderr)
    return ready


def rank_seed(seed: int, name: str) -> int:
    """The seed of a rank's own generator, for dropout say: another one on each rank."""
    return int(np.random.default_rng([seed, *name.encode()]).integers(2**63))


def monitor_of(rank: RankContext, folder: Path, steps: int) -> RunMonitor | None:
    """The first worker watches."""
    if rank.index:
        return None
    from embroute.train.metrics_log import RunMonitor

    return RunMonitor(folder, steps)


@dataclass(frozen=True)
class Loop:
    """The training loop of a worker."""

    run: RunFile
    ready: Prepared
    optimizers: list[torch.optim.Optimizer]
    schedules: list[torch.optim.lr_scheduler.LambdaLR]

    def run_all(self, watch: RunMonitor | None) -> None:
        """Every step, and the evaluations that are due."""
        hold = self.ready.session
        assert hold is not None
        for samples in self.ready.loader:
            assert isinstance(samples, Samples)
            self._step(samples)
            if watch is not None and not watch.steps:
                self.run.write_copy(watch.folder)  # nothing stands in the way of the run any more
            _watch_step(hold, watch)
            if hold.evaluation_due:
                _evaluate(self.ready.model, hold, watch)
        if hold.final_evaluation:
            _evaluate(self.ready.model, hold, watch)
        if watch is not None and hold.drain_figures is not None:
            watch.drained(hold.drain_figures)
        if watch is not None and hold.current is not None:
            watch.close(hold.current.step, self.run.policy, dict(hold.meter.seconds))
        elif watch is not None:
            watch.idle()

    def _step(self, samples: Samples) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        model = self.ready.model
        loss = nn.functional.binary_cross_entropy_with_logits(model(samples), samples.label)
        self.ready.backward(loss)
        if self.run.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.run.clip)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()


def _warmup(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A rate that grows over the first steps, then stays."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / steps) if steps else 1.0
    )


def _watch_step(hold: WorkerSession, watch: RunMonitor | None) -> None:
    work = hold.current
    if watch is not None and work is not None:
        about = work.header
        hits = (about.hits, about.touches)
        watch.step(about.step, about.global_samples, hits, hold.loss, work.figures)


def _evaluate(model: nn.Module, hold: WorkerSession, watch: RunMonitor | None) -> None:
    metrics = evaluate(model, hold)
    if watch is not None and hold.current is not None:
        watch.evaluated(hold.current.step + 1, metrics)


def write_record(folder: Path, name: str, ready: Prepared) -> None:
    """What a rank moved and where its time went, for the run's report."""
    (folder / "ranks").mkdir(exist_ok=True)
    text = json.dumps(ready.meter.record())
    (folder / "ranks" / f"{name}.json").write_text(text + "\n")
