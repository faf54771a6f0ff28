"""`prepare`: a user's model, optimizer and loader come back ready for a distributed job."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from embroute.checkpoint.locks import FolderLock
from embroute.checkpoint.manifest import read_manifest
from embroute.checkpoint.planner_state import first_random_state, from_seed, samples_before
from embroute.checkpoint.rank_files import check_identity, load_shard, load_tables, save_shard
from embroute.checkpoint.resume import agree_on_start
from embroute.checkpoint.saver import Saver, WorkerCheckpoint, load_state, same_caches, send_reply
from embroute.checkpoint.strict_json import Json
from embroute.engine.control import (
    DRAIN,
    EVAL_BATCH,
    REFILL,
    SAVE,
    STEP,
    STOP,
    listen,
    start_thread,
)
from embroute.engine.coordinator import Coordinator, EventSchedule
from embroute.engine.observe.baseline import BaselineTraffic
from embroute.engine.observe.metrics import Meter
from embroute.engine.schedule import EARLY_PULL, RankTransfers
from embroute.engine.shard import Shard
from embroute.engine.shared_tables import part_of, shared_tables
from embroute.engine.store import CacheStore, ShardStore
from embroute.engine.worker import WorkerTransfers
from embroute.kernels.codes import DELTA
from embroute.kernels.rows import Floats, scatter
from embroute.launch.rank import RankContext
from embroute.models.initial_rows import initial_rows
from embroute.nn.dense import Dense
from embroute.nn.job import TrainingJob, describe_job, join_job
from embroute.nn.prepared import Loader, Prepared, check_loop_finished
from embroute.nn.session import PrefetchThread, WorkerSession
from embroute.nn.settings import Settings, cache_size, check_loader, check_settings
from embroute.planner.plan_stream import start
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.transport.allreduce import serve_allreduce
from embroute.transport.job_store import new_run_id

INITIAL_ROWS = 1 << 16  # filled at a time
LEAVE_S = 10.0
COUNTED_BATCHES = 256  # looked through for the access counts that hot sets are chosen by


class Resume(NamedTuple):
    """A checkpoint to go on from, and whether it was made by a job of the same shape."""

    path: Path
    same_shape: bool


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Iterable[object],
    rank: RankContext | None = None,
    **settings: Unpack[Settings],
) -> Prepared:
    """Make a model, its optimizer (or several) and its loader part of a distributed job.

    On workers the loop stays the user's; on shards and the coordinator this call serves until
    training ends, and the loader that comes back is empty. Only the coordinator reads `loader`.
    Without a `rank`, the process takes its rank in the job that torchrun has started.
    """
    check_settings(settings)
    in_script = rank is None
    rank = rank or join_job(settings)
    job = describe_job(model, optimizer, rank, settings)
    if rank.role == "coordinator":
        check_loader(loader)
        job = replace(job, run_id=new_run_id())
        with _locked(job) as lock:
            job, start_from = _agree(job)
            meter = _coordinate(job, loader, start_from, lock)
        return Prepared(model, optimizer, Loader(None), meter)
    job, start_from = _agree(job)
    if rank.role == "shard":
        shard = _serve(job, start_from)
        return Prepared(model, optimizer, Loader(None), shard.meter, shard=shard)
    run = _join(job, start_from)
    if in_script:
        atexit.register(check_loop_finished, run)
    return Prepared(model, optimizer, Loader(run, job.epochs), run.meter, run)


@contextmanager
def _locked(job: TrainingJob) -> Iterator[FolderLock | None]:
    """The checkpoints' folder for this job alone."""
    if job.saving is None:
        yield None
        return
    job.saving.folder.mkdir(parents=True, exist_ok=True)
    with FolderLock("checkpoint folder", job.saving.folder, job.run_id) as lock:
        yield lock


def _agree(job: TrainingJob) -> tuple[TrainingJob, Resume | None]:
    """The job with its name, and the checkpoint that every rank starts from.

    What it holds is checked as it is loaded, before the first step.
    """
    folder = None if job.saving is None else job.saving.folder
    wishes = {name: bool(job.settings.get(name)) for name in ("resume", "fall_back")}
    path, run_id, _ = agree_on_start(job.rank, folder, job.run_id, **wishes)
    job = replace(job, run_id=run_id)
    if path is None:
        return job, None
    manifest = read_manifest(path)
    check_identity(manifest.identity, job.identity, path)
    shape = (job.rank.num_workers, job.rank.num_shards, job.policy.name)
    same = shape == (manifest.num_workers, manifest.num_shards, manifest.policy)
    return job, Resume(path, same and same_caches(path, job.setup))


def _coordinate(
    job: TrainingJob, loader: Iterable[object], resume: Resume | None, lock: FolderLock | None
) -> Meter:
    random = torch.get_rng_state()
    if resume is not None:
        random = first_random_state(resume.path)
        torch.set_rng_state(random)
    items, once = iter(loader), isinstance(loader, Iterator)
    _check_readable(job, once)
    first = next(items, None)
    if first is None:
        raise ValueError("the loader is empty: it gave no batch at all")
    items = chain([first], items)
    shape = job.adapter.infer_spec(first)
    batch = job.adapter.batch(first)
    setup = replace(job.setup, schema=job.adapter.schema, batch_size=len(batch))
    if resume is not None and not from_seed(resume.path, setup.seed):
        setup = replace(setup, seeded=False)
    schedule = EventSchedule(
        job.epochs,
        job.settings.get("max_steps", 0),
        job.settings.get("evaluate_every", 0),
        job.settings.get("checkpoint_every", 0),
    )
    counted, items = _beginning(job, loader, items, once)
    state = _first_state(job, setup, counted)
    same = resume is not None and resume.same_shape
    if resume is not None:
        load_state(resume.path, state, same)
    coordinator = Coordinator(
        job.rank,
        job.policy,
        state,
        job.adapter,
        schedule,
        job.settings.get("held_out"),
        _shadow(job, setup),
        _saver(job, random, lock),
        0 if resume is None else samples_before(resume.path),
        job.settings.get("stop") or threading.Event(),
    )
    coordinator.greet(shape)
    if same and job.policy.exact:
        coordinator.refill()
    coordinator.run(loader, items)
    return coordinator.meter


def _shadow(job: TrainingJob, setup: Setup) -> BaselineTraffic | None:
    """The policy to compare with, in caches as large as a user asked for."""
    if "compare_with" not in job.settings:
        return None
    if job.policy.sync.shared_memory:
        setup = replace(setup, cache=cache_size(job.settings))
    return BaselineTraffic(job.settings["compare_with"], setup)


def _saver(job: TrainingJob, random: torch.Tensor, lock: FolderLock | None) -> Saver | None:
    """How the coordinator completes a checkpoint, as long as the folder is its own."""
    if job.saving is None or lock is None:
        return None
    numbers: Json = [int(byte) for byte in random]
    return Saver(job.saving, job.rank, job.policy.name, job.identity, numbers, lock)


def _check_readable(job: TrainingJob, once: bool) -> None:
    """A generator cannot be read twice."""
    if once and job.epochs > 1:
        raise ValueError(
            f"epochs={job.epochs}: the loader can be read only once, being an iterator; give "
            f"something that can be iterated again, such as a DataLoader or a list"
        )
    if job.settings.get("evaluate_every") and isinstance(job.settings.get("held_out"), Iterator):
        raise ValueError(
            "held_out can be read only once, being an iterator, and evaluate_every reads it again "
            "and again; give something that can be iterated again, such as a DataLoader or a list"
        )


def _beginning(
    job: TrainingJob, loader: Iterable[object], items: Iterator[object], once: bool
) -> tuple[Iterable[object], Iterator[object]]:
    """The batches by whose counts a hot set is chosen, and what the first epoch reads."""
    if job.policy.regroup is None:
        return (), items
    if not once:
        return islice(loader, COUNTED_BATCHES), items
    counted = list(islice(items, COUNTED_BATCHES))
    return counted, chain(counted, items)


def _first_state(job: TrainingJob, setup: Setup, counted: Iterable[object]) -> State:
    """Empty caches; a hot set is chosen by the counts of the first batches."""
    if job.policy.regroup is None:
        return start(job.policy, setup)
    counts = np.zeros(setup.schema.num_rows, np.int64)
    for item in counted:
        rows = job.adapter.batch(item).rows
        counts += np.bincount(rows[rows >= 0], minlength=len(counts))
    return start(job.policy, setup, counts)


def _serve(job: TrainingJob, resume: Resume | None) -> Shard:
    """A shard's life."""
    rank, sharding, widths = job.rank, job.sharding, job.widths
    records: list[Floats] = []
    if job.policy.sync.shared_memory:
        records = part_of(shared_tables(rank.rows, sharding, widths), sharding, rank.index)
    store = ShardStore(rank.index, sharding, widths, job.optimizer, records)
    if resume is not None:
        load_shard(resume.path, store, sharding, rank.index)
    else:
        _initialise(store, job)
    shard = Shard(store, widths, rank.rows, rank.workers, job.meter, bool(records))
    messages = listen(rank.control)
    adding = start_thread("star", lambda: _add_up(rank), messages)
    while (message := messages.get()).verb != STOP:
        if message.verb == STEP:
            shard.step(message)
        elif message.verb == DRAIN:
            shard.drain(message)
        elif message.verb in (EVAL_BATCH, REFILL):
            _, heads, where = message.arrays
            shard.serve(RankTransfers.read(heads, where).at(EARLY_PULL))
        elif message.verb == SAVE:
            assert job.saving is not None
            folder = job.saving.partial(int(message.arrays[0].tolist()[0]))
            send_reply(rank.replies, [save_shard(folder, store, sharding, rank.index)])
    adding.join(LEAVE_S)  # workers leave when they have taken the same note
    return shard


def _add_up(rank: RankContext) -> None:
    """The first shard is where sums meet that do not go round a ring."""
    if rank.index == 0:
        serve_allreduce(rank.central, rank.workers)


def _initialise(store: ShardStore, job: TrainingJob) -> None:
    """Values that the user gave in a file, or those of the model."""
    for table, weight in enumerate(job.weights):
        _fill(store, job, table, weight)
    if "tables" in job.settings:
        load_tables(Path(job.settings["tables"]), store, job.sharding, job.rank.index)


def _fill(store: ShardStore, job: TrainingJob, table: int, weight: torch.Tensor) -> None:
    """Initial values of a table's rows at this shard."""
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


def _join(job: TrainingJob, resume: Resume | None) -> WorkerSession:
    """A worker's part: from here the loop is the user's."""
    rank = job.rank
    deltas = job.policy.sync.record == DELTA
    sharding, widths, in_place = job.sharding, job.widths, job.policy.sync.shared_memory
    tables = shared_tables(rank.rows, sharding, widths) if in_place else []
    store = CacheStore(rank.index, sharding, widths, job.optimizer, deltas, tables)
    rows = WorkerTransfers(store, rank.rows, rank.shards, job.meter, job.setup, in_place)
    dense = Dense(job.model, job.optimizers, rank, job.setup.cluster)
    extras = job.settings.get("extras", {})
    own = None if job.policy.exact else store
    part = WorkerCheckpoint(rank.index, job.model, job.optimizers, extras, own)
    if resume is not None:
        part.load(resume.path, resume.same_shape)

    def save(step: int) -> None:
        assert job.saving is not None
        send_reply(rank.replies, part.save(job.saving.partial(step)))

    prefetch = PrefetchThread(rank, rows, job.adapter, job.layers)
    run = WorkerSession(prefetch, job.lookup_context, dense, job.rate, save)
    prefetch.start()
    return run
