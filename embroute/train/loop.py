"""A rank of `embroute train`: data, model, training loop and evaluation."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from embroute.config.progress import StatusLines, is_quiet
from embroute.config.run_file import CHECKPOINTS, keep_run_file
from embroute.config.run_options import RunConfig
from embroute.data.access_counts import Calibration, count_source
from embroute.data.batch import Batch, Source
from embroute.data.open import open_source
from embroute.data.readers.file_source import FileSource
from embroute.data.schema import Field, Schema, Table
from embroute.data.stream import batches, split
from embroute.engine.control import broadcast_text, gather_from_workers
from embroute.engine.optim import RowWiseAdagrad
from embroute.kernels.array_types import F32, I64
from embroute.launch.rank import COORDINATOR, RankContext, worker_names
from embroute.launch.supervisor import begin_to_tell
from embroute.models.layers import Samples
from embroute.models.registry import make_model
from embroute.nn.module_surgery import field_embeddings
from embroute.nn.prepare import prepare
from embroute.nn.prepared import Prepared
from embroute.nn.session import WorkerSession
from embroute.nn.settings import Settings
from embroute.planner.setup import parse_dim
from embroute.simulator.simulation import kernels_are_compiled
from embroute.train.run_ranks import model_options, network_of
from embroute.transport.job_store import attempt

if TYPE_CHECKING:
    from embroute.train.metrics_log import RunMonitor


@dataclass(frozen=True)
class BatchLoader:
    """Batches of a source; every pass starts from the first."""

    source: Source
    run: RunConfig
    size: int
    train: bool
    whole: Source  # with the held-out samples

    def access_counts(self, calibration: Calibration) -> I64:
        """Look-ups of each row in a sample of the whole data set, as the simulator counts them."""
        return count_source(self.whole, calibration)

    def __len__(self) -> int:
        """Batches of an epoch; 0 if only a full pass can tell."""
        return -(-(self.source.num_samples or 0) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        run = self.run
        if not self.train:
            return batches(self.source, self.size)
        stream = batches(
            self.source, self.size, epochs=run.epochs, shuffle=run.shuffle, seed=run.seed
        )
        return islice(stream, run.steps)


def schema_from(fields: dict[str, Any]) -> Schema:
    """The inverse of `asdict`, after a way through JSON."""
    return Schema(
        tuple(Table(**table) for table in fields["tables"]),
        tuple(Field(**field) for field in fields["fields"]),
        tuple(fields["dense"]),
        fields["labelled"],
    )


@dataclass(frozen=True)
class RunData:
    """The data as a rank knows it: only the coordinator reads samples."""

    schema: Schema
    steps: int  # of the whole run; 0 if unknown
    train: BatchLoader | None = None
    held_out: BatchLoader | None = None
    source: Source | None = None


def open_run_data(run: RunConfig, rank: RankContext) -> RunData:
    """Open the data at the coordinator, and send its schema to the other ranks."""
    if rank.name != COORDINATOR:
        facts = json.loads(broadcast_text(rank.name, rank.peers, rank.control, ""))
        return RunData(schema_from(facts["schema"]), facts["steps"])
    source = open_source(run.data, run.data_options)
    if not source.schema.labelled:
        raise ValueError(
            f"--data {run.data}: training needs a label: name its column with --label, or use "
            f"online-retail(negatives=1) or a synthetic preset"
        )
    train, held_out = split(source, run.held_out)
    size = run.batch * rank.num_workers
    steps = _num_steps(train, run, size)
    facts = json.dumps({"schema": asdict(source.schema), "steps": steps})
    broadcast_text(rank.name, rank.peers, rank.control, facts)
    return RunData(
        source.schema,
        steps,
        train=BatchLoader(train, run, size, train=True, whole=source),
        held_out=None if held_out is None else BatchLoader(held_out, run, size, False, source),
        source=source,
    )


def _num_steps(source: Source, run: RunConfig, size: int) -> int:
    """Steps of the run; 0 if the number of samples is unknown before the end of the data."""
    if source.num_samples is None:
        return run.steps or 0
    steps = run.epochs * -(-source.num_samples // size)
    return min(run.steps, steps) if run.steps else steps


def _table_weights(model: nn.Module) -> list[torch.Tensor]:
    embeddings = field_embeddings(model)
    return [] if embeddings is None else embeddings.weights


def row_optimizer_of(run: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer of the tables; `prepare` replaces it by its row form."""
    weights = _table_weights(model)
    if run.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=run.lr)
    if run.optimizer == "adagrad":
        return torch.optim.Adagrad(weights, lr=run.lr)
    if run.optimizer == "rowwise-adagrad":
        return RowWiseAdagrad(weights, lr=run.lr)
    # Not Adam: its update also moves the rows that a step does not touch.
    return torch.optim.SparseAdam(weights, lr=run.lr)


def dense_optimizer_of(run: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all parameters outside of the tables."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
    }
    tables = {id(weight) for weight in _table_weights(model)}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    return kinds[run.dense_optimizer](dense, lr=run.dense_lr)


def settings_of(run: RunConfig, data: RunData, folder: Path) -> Settings:
    """The settings of a run for `prepare`."""
    settings = Settings(
        policy=run.policy,
        cache=run.cache,
        network=network_of(run),
        quotas=run.shares,
        compute_ms_per_sample=run.compute_ms_per_sample,
        decay=run.decay,
        seed=run.seed,
        device=run.device,
        compare_with="vanilla",  # reports show its row bytes beside those of the run
        checkpoint=folder / CHECKPOINTS,
        checkpoint_every=run.checkpoint_every,
        keep=run.keep,
        resume=run.resume,
        fall_back=run.restarts > 0
        or attempt() > 0,  # after a restart nobody is there to move a damaged checkpoint away
    )
    if run.steps is not None:
        settings["steps"] = run.steps
    if run.tables:
        settings["tables"] = Path(run.tables)
    if data.held_out is not None:
        settings["held_out"], settings["evaluate_every"] = data.held_out, run.evaluate_every
    return settings


def _scores(model: nn.Module, session: WorkerSession) -> tuple[F32, F32]:
    """Scores and labels of this worker's held-out samples."""
    scores, labels = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    model.eval()
    with torch.no_grad():
        for samples in session.held_out():
            assert isinstance(samples, Samples)
            scores.append(torch.sigmoid(model(samples)).float().cpu().numpy())
            labels.append(samples.label.float().cpu().numpy())
    model.train()
    return np.concatenate(scores), np.concatenate(labels)


def metrics_of(scores: F32, labels: F32) -> dict[str, float]:
    """Log-loss and AUC."""
    from torchmetrics.functional.classification import binary_auroc  # slow to import

    score, label = torch.from_numpy(scores).double(), torch.from_numpy(labels)
    # A score in float32 may be exactly 0 or 1, where the logarithm is infinite.
    loss = nn.functional.binary_cross_entropy(score.clamp(1e-7, 1 - 1e-7), label.double())
    area = binary_auroc(score, label.long())
    return {"log_loss": float(loss), "auc": float(area)}


def evaluate(model: nn.Module, session: WorkerSession) -> dict[str, float]:
    """Metrics of all workers' held-out samples, at the first worker; elsewhere empty."""
    scores, labels = (gather_from_workers(session.rank, part) for part in _scores(model, session))
    return metrics_of(np.concatenate(scores), np.concatenate(labels)) if scores else {}


def train_rank(run: RunConfig, rank: RankContext, folder: Path, stop: threading.Event) -> Prepared:
    """This rank's part of a run; `stop` asks for a checkpoint and an early end."""
    torch.manual_seed(rank_seed(run.seed, rank.name))
    with status_lines(rank) as lines:
        lines.begin("reading data")
        data = open_run_data(run, rank)
        lines.begin("building the model")
        torch.set_default_dtype(getattr(torch, run.dtype))
        dim = parse_dim(str(run.dim), data.schema)
        model = make_model(run.model, data.schema, dim, model_options(run))
        optimizers = [row_optimizer_of(run, model), dense_optimizer_of(run, model)]
        schedules = [_warmup(optimizer, run.warmup_steps) for optimizer in optimizers]
        settings = settings_of(run, data, folder)
        settings["extras"] = {f"schedule{i}": schedule for i, schedule in enumerate(schedules)}
        settings["stop"] = stop
        lines.begin("filling tables and caches")
        ready = prepare(
            model, optimizers, () if data.train is None else data.train, rank, **settings
        )
        compiling = "" if kernels_are_compiled() else "; kernels compile, once on a machine"
        lines.begin(f"waiting for the first step{compiling}")
        if ready.session is not None:
            loop = Loop(run, ready, ready.session, optimizers, schedules)
            loop.run_all(monitor_of(rank, folder, data.steps, lines))
    if isinstance(data.source, FileSource) and data.source.bad_rows and not is_quiet():
        print(data.source.skipped, file=sys.stderr)
    return ready


@contextmanager
def status_lines(rank: RankContext) -> Iterator[StatusLines]:
    """Lines on what goes on: of the first worker, which speaks for all ranks."""
    if rank.name != worker_names(1)[0] or is_quiet():
        with Path(os.devnull).open("w") as nowhere:
            yield StatusLines(nowhere)
        return
    lines = StatusLines(sys.stderr)
    begin_to_tell()
    lines.show("ranks have started")
    with lines.running():
        yield lines


def rank_seed(seed: int, name: str) -> int:
    """The seed of a rank's torch generator; ranks differ, so that their dropout masks do."""
    return int(np.random.default_rng([seed, *name.encode()]).integers(2**63))


def monitor_of(
    rank: RankContext, folder: Path, steps: int, lines: StatusLines
) -> RunMonitor | None:
    """The run's monitor, at the first worker."""
    if rank.index:
        return None
    from embroute.train.metrics_log import RunMonitor

    return RunMonitor(folder, steps, lines)


def _warmup(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that grows linearly over the first steps, then stays."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / steps) if steps else 1.0
    )


@dataclass(frozen=True)
class Loop:
    """The training loop of a worker."""

    run: RunConfig
    ready: Prepared
    session: WorkerSession
    optimizers: list[torch.optim.Optimizer]
    schedules: list[torch.optim.lr_scheduler.LambdaLR]

    def run_all(self, monitor: RunMonitor | None) -> None:
        """Train every step, and evaluate where it is due."""
        session = self.session
        for samples in self.ready.loader:
            assert isinstance(samples, Samples)
            self._step(samples)
            if monitor is not None:
                self._report_step(monitor)
            if session.evaluation_due:
                self._evaluate(monitor)
        if monitor is not None:
            monitor.lines.begin("ending: the last checkpoint, evaluation and reports")
        if session.final_evaluation:
            self._evaluate(monitor)
        if monitor is None:
            return
        if session.drain_figures is not None:
            monitor.drained(session.drain_figures)
        if session.current is None:
            monitor.idle()
        else:
            monitor.close(session.current.step, self.run.policy, dict(session.meter.seconds))

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

    def _report_step(self, monitor: RunMonitor) -> None:
        step = self.session.current
        assert step is not None
        if not monitor.steps:
            # After a first step, no check can refuse this run and leave its file behind.
            keep_run_file(self.run, monitor.folder)
        monitor.step(step.header, self.session.loss, step.figures)

    def _evaluate(self, monitor: RunMonitor | None) -> None:
        if monitor is not None:
            monitor.lines.begin("evaluating")
        metrics = evaluate(self.ready.model, self.session)
        self.session.report_held_out(metrics.get("log_loss"))
        if monitor is not None and self.session.current is not None:
            monitor.evaluated(self.session.current.step + 1, metrics)


def write_record(folder: Path, name: str, ready: Prepared) -> None:
    """Write a rank's traffic and times, for the run's report."""
    (folder / "ranks").mkdir(exist_ok=True)
    text = json.dumps(ready.meter.record())
    (folder / "ranks" / f"{name}.json").write_text(text + "\n")
