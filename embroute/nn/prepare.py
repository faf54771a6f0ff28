"""`prepare`: make a user's model, optimizer and loader part of a distributed job."""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, Protocol, Unpack, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from embroute.checkpoint.job_checkpoints import (
    Saver,
    WorkerCheckpoint,
    agree_on_start,
    load_state,
    same_caches,
)
from embroute.checkpoint.locks import FolderLock
from embroute.checkpoint.manifest import Manifest, read_manifest
from embroute.checkpoint.planner_state import counts_before, first_random_state, from_seed
from embroute.checkpoint.rank_files import check_identity, load_shard, load_tables, save_shard
from embroute.checkpoint.strict_json import Json
from embroute.config.spec import AUTO_CACHE
from embroute.data.access_counts import Calibration, count_lookups
from embroute.engine import control
from embroute.engine.control import broadcast_text, send_reply
from embroute.engine.coordinator import Coordinator, EventSchedule, RunCounts
from embroute.engine.observe.baseline import BaselineTraffic
from embroute.engine.observe.metrics import Meter
from embroute.engine.shard import Shard
from embroute.engine.store import CacheStore, ShardStore, rows_of_shard, shared_tables
from embroute.engine.worker import PrefetchThread, WorkerTransfers
from embroute.kernels.array_types import I64
from embroute.kernels.codes import DELTA
from embroute.kernels.rows import Floats, scatter
from embroute.launch.rank import RankContext
from embroute.models.initial_rows import initial_rows
from embroute.nn.dense import Dense
from embroute.nn.job import TrainingJob, describe_job, join_job, owns
from embroute.nn.prepared import Loader, Prepared, check_loop_finished
from embroute.nn.session import WorkerSession
from embroute.nn.settings import Settings, cache_size, check_loader, check_settings
from embroute.nn.tensor_batches import TensorAdapter
from embroute.planner.plan_stream import start
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.policies.catalog import make_policy
from embroute.transport.allreduce import serve_allreduce
from embroute.transport.job_store import new_run_id

INITIAL_ROWS = 1 << 16  # filled at a time
LEAVE_S = 10.0
COUNTED_BATCHES = 256  # of a loader without a length, from which a hot set is chosen


class ResumePoint(NamedTuple):
    """A checkpoint to resume from, and whether a job of the same shape made it."""

    path: Path
    same_shape: bool


class Batches(NamedTuple):
    """The user's loader, opened: the first batch is read to learn the shape of all."""

    first: object
    epoch: Iterator[object]  # all batches of the first epoch
    counted: Iterable[object]  # the batches from which a hot set is chosen
    only_first: bool = False  # only the first COUNTED_BATCHES are counted, but all their samples


@runtime_checkable
class CountedLoader(Protocol):
    """A loader that counts its own look-ups, without a pass over its batches."""

    def access_counts(self, calibration: Calibration) -> I64:
        """Look-ups of each row in a sample of the samples."""
        ...


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Iterable[object],
    rank: RankContext | None = None,
    **settings: Unpack[Settings],
) -> Prepared:
    """Make a model, its optimizer (or several) and its loader part of a distributed job.

    On workers the call returns, and the loop stays the user's. On shards and the coordinator the
    call serves until training ends, and the returned loader is empty. Only the coordinator reads
    `loader`. Without a `rank`, the process takes its rank in the job that torchrun has started.
    """
    settings = check_settings(settings)
    in_script = rank is None
    rank = rank or join_job(settings)
    job = describe_job(model, optimizer, rank, settings)
    if rank.role == "coordinator":
        check_loader(loader)
        job = replace(job, run_id=new_run_id())
        with _locked(job) as lock:
            job, path = _agree_on_start(job)
            meter = _run_coordinator(job, loader, path, lock)
        return Prepared(model, optimizer, Loader(None), meter)
    job, path = _agree_on_start(job)
    job = _agree_on_caches(job)
    resume = _resume_point(job, path)
    if rank.role == "shard":
        shard = _run_shard(job, resume)
        return Prepared(model, optimizer, Loader(None), shard.meter, shard=shard)
    session = _start_worker(job, resume)
    if in_script:
        atexit.register(check_loop_finished, session, owns(settings))
    return Prepared(model, optimizer, Loader(session, job.epochs), session.meter, session)


@contextmanager
def _locked(job: TrainingJob) -> Iterator[FolderLock | None]:
    """Reserve the folder of checkpoints, if there is one, for this job alone."""
    if job.checkpoints is None:
        yield None
        return
    folder = job.checkpoints.folder
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock("checkpoint folder", folder, job.run_id) as lock:
        yield lock


def _agree_on_start(job: TrainingJob) -> tuple[TrainingJob, Path | None]:
    """The job with its run id, and the checkpoint that every rank starts from."""
    folder = None if job.checkpoints is None else job.checkpoints.folder
    flags = {name: bool(job.settings[name]) for name in ("resume", "fall_back")}
    path, run_id, _ = agree_on_start(job.rank, folder, job.run_id, **flags)
    return replace(job, run_id=run_id), path


def _agree_on_caches(job: TrainingJob) -> TrainingJob:
    """The job with the rows of a step, which only the coordinator knows, if caches need them."""
    if job.setup.cache != AUTO_CACHE:
        return job
    rank, rows_A = job.rank, job.setup.step_rows_A.tolist()
    text = broadcast_text(rank.name, rank.peers, rank.control, json.dumps(rows_A))
    return replace(job, setup=replace(job.setup, step_rows=tuple(json.loads(text))))


def _resume_point(job: TrainingJob, path: Path | None) -> ResumePoint | None:
    """The checkpoint at a path, checked; None without a path."""
    if path is None:
        return None
    manifest = read_manifest(path)
    check_identity(manifest.identity, job.identity, path)
    if job.policy.name != manifest.policy and (job.policy.order_changed or _reorders(manifest)):
        raise ValueError(
            f"{path}: {manifest.policy} has trained the samples up to here in its own order, from "
            f"which {job.policy.name} cannot go on: resume with {manifest.policy}"
        )
    shape = (job.rank.num_workers, job.rank.num_shards, job.policy.name)
    same_shape = shape == (manifest.num_workers, manifest.num_shards, manifest.policy)
    return ResumePoint(path, same_shape and same_caches(path, job.setup))


def _reorders(manifest: Manifest) -> bool:
    """Whether the policy of a checkpoint changed the order of samples, as far as is known."""
    try:
        return make_policy(manifest.policy).order_changed
    except ValueError:  # a policy of the user that cannot be imported here
        return False


def _run_coordinator(
    job: TrainingJob, loader: Iterable[object], path: Path | None, lock: FolderLock | None
) -> Meter:
    """Serve as the coordinator until training ends."""
    random = torch.get_rng_state()
    if path is not None:
        # The loader must shuffle as it did in the run that saved: it starts from the same state.
        random = first_random_state(path)
        torch.set_rng_state(random)
    batches = _open_loader(job, loader)
    spec = job.adapter.infer_spec(batches.first)
    batch_size = len(job.adapter.batch(batches.first))
    length = len(loader) if isinstance(loader, Sized) else 0
    setup = replace(
        job.setup,
        schema=job.adapter.schema,
        batch_size=batch_size,
        epoch_batches=length,
    )
    job = _agree_on_caches(replace(job, setup=setup))
    setup, resume = job.setup, _resume_point(job, path)
    if resume is not None and not from_seed(resume.path, setup.seed):
        setup = replace(setup, seeded=False)
    same_shape = resume is not None and resume.same_shape
    state = _first_state(job, setup, batches, resume is not None)
    if resume is not None:
        regroup = job.policy.regroup
        kept = regroup.memory.kind if regroup and regroup.memory else None
        load_state(resume.path, state, same_shape, kept)
    coordinator = Coordinator(
        job.rank,
        job.policy,
        state,
        job.adapter,
        _event_schedule(job),
        job.settings.get("held_out"),
        _baseline(job, setup),
        _saver(job, random, lock),
        RunCounts() if resume is None else counts_before(resume.path),
        job.settings.get("stop") or threading.Event(),
    )
    coordinator.greet(spec)
    if same_shape and job.policy.exact:
        # Copies equal the shards' rows, so no file holds them: workers pull the cached rows again.
        coordinator.refill()
    coordinator.run(loader, batches.epoch)
    return coordinator.meter


def _event_schedule(job: TrainingJob) -> EventSchedule:
    settings = job.settings
    return EventSchedule(
        job.epochs,
        settings.get("steps", 0),
        settings["evaluate_every"],
        settings["checkpoint_every"],
    )


def _baseline(job: TrainingJob, setup: Setup) -> BaselineTraffic | None:
    """The policy to compare with, in caches of the size that the user asked for."""
    if "compare_with" not in job.settings:
        return None
    if job.policy.sync.shared_memory:  # its own setup has no caches
        setup = replace(setup, cache=cache_size(job.settings))
    return BaselineTraffic(job.settings["compare_with"], setup)


def _saver(job: TrainingJob, random: torch.Tensor, lock: FolderLock | None) -> Saver | None:
    if job.checkpoints is None or lock is None:
        return None
    numbers: Json = [int(byte) for byte in random]
    return Saver(job.checkpoints, job.rank, job.policy.name, job.identity, numbers, lock)


def _open_loader(job: TrainingJob, loader: Iterable[object]) -> Batches:
    """Read the first batch; refuse loaders that are empty or cannot be read often enough."""
    epoch, once = iter(loader), isinstance(loader, Iterator)
    _check_rereadable(job, once)
    first = next(epoch, None)
    if first is None:
        raise ValueError("the loader is empty: it gave no batch at all")
    epoch = chain([first], epoch)
    if job.policy.regroup is None:
        return Batches(first, epoch, ())
    if not once and isinstance(loader, Sized | CountedLoader):
        return Batches(first, epoch, loader)
    if not once:  # without a length, it may never end
        return Batches(first, epoch, islice(loader, COUNTED_BATCHES), only_first=True)
    counted = list(islice(epoch, COUNTED_BATCHES))
    return Batches(first, chain(counted, epoch), counted, only_first=True)


def _check_rereadable(job: TrainingJob, once: bool) -> None:
    """Refuse an iterator where batches are read again and again."""
    if once and job.epochs > 1:
        raise ValueError(
            f"epochs={job.epochs}: the loader can be read only once, being an iterator; give "
            f"something that can be iterated again, such as a DataLoader or a list"
        )
    if job.settings["evaluate_every"] and isinstance(job.settings.get("held_out"), Iterator):
        raise ValueError(
            "held_out can be read only once, being an iterator, and evaluate_every reads it again "
            "and again; give something that can be iterated again, such as a DataLoader or a list"
        )


def _first_state(job: TrainingJob, setup: Setup, batches: Batches, resumed: bool) -> State:
    """Empty caches. A policy with a hot set chooses it from a sample of the loader's samples."""
    regroup, num_rows = job.policy.regroup, setup.schema.num_rows
    if regroup is None:
        return start(job.policy, setup)
    if resumed:  # the checkpoint knows the hot set
        return start(job.policy, setup, np.zeros(num_rows, np.int64))
    counted, calibration = batches.counted, regroup.calibration
    if isinstance(counted, CountedLoader):
        return start(job.policy, setup, counted.access_counts(calibration))
    if batches.only_first:
        calibration = Calibration(share=1)
    random = torch.get_rng_state()
    samples = (job.adapter.batch(item) for item in counted)
    counts_R = count_lookups(samples, num_rows, calibration)
    torch.set_rng_state(random)  # as if the loader had not been read
    return start(job.policy, setup, counts_R)


def _run_shard(job: TrainingJob, resume: ResumePoint | None) -> Shard:
    """Serve as a shard until training ends."""
    rank, sharding, widths = job.rank, job.sharding, job.widths
    records: list[Floats] = []
    if job.policy.sync.shared_memory:
        records = rows_of_shard(shared_tables(rank.rows, sharding, widths), sharding, rank.index)
    store = ShardStore(rank.index, sharding, widths, job.optimizer, records)
    if resume is not None:
        load_shard(resume.path, store, sharding, rank.index)
    else:
        _initialise(store, job)
    shard = Shard(store, widths, rank.rows, rank.workers, job.new_meter())
    messages = control.listen(rank.control)
    summing = control.start_thread("allreduce", lambda: _serve_sums(rank), messages)

    def save(step: int) -> None:
        assert job.checkpoints is not None
        folder = job.checkpoints.partial(step)
        send_reply(rank.replies, [save_shard(folder, store, sharding, rank.index)])

    shard.run(messages, save)
    # Workers end the sums only after they have received the same STOP.
    summing.join(LEAVE_S)
    return shard


def _serve_sums(rank: RankContext) -> None:
    """The first shard adds up what the workers sum centrally."""
    if rank.index == 0:
        serve_allreduce(rank.central, rank.workers)


def _initialise(store: ShardStore, job: TrainingJob) -> None:
    """Fill a shard with the model's values, or those of the file that the user gave."""
    for table, weight in enumerate(job.weights):
        _fill_table(store, job, table, weight)
    if "tables" in job.settings:
        load_tables(Path(job.settings["tables"]), store, job.sharding, job.rank.index)


def _fill_table(store: ShardStore, job: TrainingJob, table: int, weight: torch.Tensor) -> None:
    sharding, first_rows = job.sharding, job.setup.schema.first_rows
    rows = sharding.rows_of(job.rank.index, table)
    ids = rows - first_rows[table]
    if not len(ids):
        return
    records = store.records[job.lookup_context.arena_of_table[table]]
    for span in np.array_split(ids, -(-len(ids) // INITIAL_ROWS)):
        if weight.is_meta:
            tables = np.full(len(span), table)
            values = initial_rows(job.setup.seed, tables, span, weight.shape[1])
            values[span == job.padding(table)] = 0
        else:
            values = weight.detach().cpu().numpy()[span]
        local = sharding.local(span + first_rows[table])
        scatter(records, local, values.astype(records.dtype))


def _start_worker(job: TrainingJob, resume: ResumePoint | None) -> WorkerSession:
    """Start a worker's prefetch thread; the loop is the user's."""
    rank, setup, sharding, widths = job.rank, job.setup, job.sharding, job.widths
    deltas, in_place = job.policy.sync.record == DELTA, job.policy.sync.shared_memory
    tables = shared_tables(rank.rows, sharding, widths) if in_place else []
    store = CacheStore(rank.index, sharding, widths, job.optimizer, deltas, tables)
    transfers = WorkerTransfers(store, rank.rows, rank.shards, job.new_meter(), setup)
    dense = Dense(job.model, job.optimizers, rank, setup.cluster)
    extras = job.settings["extras"]
    cache = None if job.policy.exact else store
    checkpoint = WorkerCheckpoint(rank.index, job.model, job.optimizers, extras, cache)
    if resume is not None:
        checkpoint.load(resume.path, resume.same_shape)

    def save(step: int) -> None:
        assert job.checkpoints is not None
        send_reply(rank.replies, checkpoint.save(job.checkpoints.partial(step)))

    def learn_spec(spec: str) -> None:
        job.adapter.load_spec(spec)
        if isinstance(job.adapter, TensorAdapter):
            for layer in job.layers:
                layer.set_calls(job.adapter.calls)

    prefetch = PrefetchThread(rank, transfers, job.adapter, learn_spec)
    regroup = job.policy.regroup
    follows_loss = regroup is not None and regroup.learn_loss is not None
    session = WorkerSession(
        prefetch, job.lookup_context, dense, job.rate, save, follows_loss and not rank.index
    )
    prefetch.start()
    return session
