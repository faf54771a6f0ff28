"""Scores of samples by the model of a run's checkpoint, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from embroute.checkpoint.folders import find_checkpoint
from embroute.checkpoint.manifest import read_manifest
from embroute.checkpoint.rank_files import check_identity, identity_of, load_model, load_shard
from embroute.config.cluster import uniform_cluster
from embroute.config.run_file import CHECKPOINTS, RUN_FILE, read_run_file
from embroute.config.run_options import RunConfig
from embroute.data.batch import Batch, Source
from embroute.data.open import built_in_names, open_source
from embroute.data.stream import batches, split
from embroute.engine.batches import MicroBatch, SampleAdapter
from embroute.engine.optim import RowOptimizer
from embroute.engine.sharding import RowSharding
from embroute.engine.store import RecordWidths, ShardStore
from embroute.kernels.array_types import F32
from embroute.models.registry import make_model, table_widths
from embroute.nn.embedding import LookupContext, StepLookups
from embroute.nn.module_surgery import field_embeddings, replace_fields
from embroute.planner.setup import Setup, parse_dim
from embroute.train.run_ranks import model_options

DATA_PARTS = ("held-out", "all")


class ScoreRequest(NamedTuple):
    """The samples to score."""

    data: str = ""  # empty for the data of the run
    part: str = DATA_PARTS[0]  # of the data of the run
    unlabelled: bool = False  # whether `data` has no label


def samples_to_score(run: RunConfig, request: ScoreRequest) -> Source:
    """The run's held-out samples, all of its samples, or other data with the same ids."""
    data, options = request.data, run.data_options
    if request.unlabelled and not data:
        raise ValueError("--unlabelled is about --data; the run's own data has a label")
    if data and (data != run.data or request.unlabelled):
        in_files = run.data.partition("(")[0] not in built_in_names()
        if in_files and options.ids != "hash":
            raise ValueError(
                f"--data {data}: this run numbered ids as they appear in {run.data}, other files "
                f"would number them otherwise; train with --ids hash to score them"
            )
        return open_source(data, options.replace(label=None) if request.unlabelled else options)
    source = open_source(run.data, options)
    held_out = split(source, run.held_out)[1]
    return held_out if request.part == "held-out" and held_out is not None else source


@dataclass(frozen=True)
class Scorer:
    """A trained model with all its rows in memory."""

    model: nn.Module
    adapter: SampleAdapter
    lookup_context: LookupContext
    store: ShardStore
    sharding: RowSharding

    def score(self, batch: Batch) -> F32:
        """Probabilities of the samples of a batch."""
        rows = np.maximum(batch.rows, 0)
        local = self.sharding.local(rows).astype(np.int32)
        # The one shard holds all rows: every look-up is a touch of its own, read in place.
        touch = np.where(batch.rows < 0, -1, np.arange(len(rows))).astype(np.int32)
        lookups = StepLookups(
            records_A=self.store.records,
            slot_AT=[local] * len(self.store.records),
            touch_L=touch,
            offsets=batch.offsets,
            num_fields=batch.num_fields,
            num_samples=len(batch),
            ids=[],
        )
        self.lookup_context.begin(lookups)
        no_ids = np.empty(0, np.int64)
        samples = MicroBatch(len(batch), batch.dense, batch.label, batch.offsets, no_ids)
        with torch.no_grad():
            logits = self.model(self.adapter.to_user_batch(samples))
            scores: F32 = torch.sigmoid(logits).float().numpy()
        return scores


def load_scorer(run: RunConfig, folder: Path, source: Source) -> Scorer:
    """The model of a run's newest checkpoint."""
    path = find_checkpoint(folder / CHECKPOINTS)
    manifest = read_manifest(path)
    schema, dtype = source.schema, getattr(torch, run.dtype)
    dim = parse_dim(str(run.dim), schema)
    model = make_model(run.model, schema, dim, model_options(run)).to(dtype)
    plain = field_embeddings(model)
    assert plain is not None
    saved = manifest.identity
    betas = (saved.settings.get("beta1", 0.9), saved.settings.get("beta2", 0.999))
    options = {name: saved.settings[name] for name in ("eps", "decay") if name in saved.settings}
    optimizer = RowOptimizer(saved.optimizer, 0.0, betas=betas, **options)
    widths = table_widths(run.model, schema, dim)
    sharding = RowSharding(Setup(schema, uniform_cluster(1, 1), widths, optimizer=saved.optimizer))
    arenas = sharding.setup.arenas
    lookup_context = LookupContext(arenas, tuple(arenas.index(width) for width in widths))
    replace_fields(model, plain, lookup_context)
    check_identity(saved, identity_of(sharding, optimizer, run.dtype, model.state_dict()), path)
    store = ShardStore(0, sharding, RecordWidths(sharding, optimizer, run.dtype), optimizer)
    load_shard(path, store, sharding, 0)
    load_model(path, model.state_dict())
    return Scorer(model.eval(), SampleAdapter(schema, dtype), lookup_context, store, sharding)


def predictions(folder: Path, request: ScoreRequest, size: int) -> Iterator[tuple[F32, F32]]:
    """Scores and labels by batch, in the order of the data; data without labels has empty ones."""
    if request.part not in DATA_PARTS:
        raise ValueError(f"--part must be one of {', '.join(DATA_PARTS)}, got {request.part!r}")
    if not (folder / RUN_FILE).is_file():
        raise ValueError(f"{folder}: no {RUN_FILE} here; give the folder of a run")
    run = read_run_file(folder / RUN_FILE).replace(out=str(folder))
    source = samples_to_score(run, request)
    scorer = load_scorer(run, folder, source)
    for batch in batches(source, size):
        yield scorer.score(batch), batch.label
