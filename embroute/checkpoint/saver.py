"""Checkpoints of a running job: every rank writes its part, the coordinator makes it one whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from embroute.checkpoint.folders import partial_folder
from embroute.checkpoint.locks import FolderLock
from embroute.checkpoint.manifest import PLANNER_FILE, Identity, Manifest, commit, read_manifest
from embroute.checkpoint.planner_state import Position, load_planner, load_trained, save_planner
from embroute.checkpoint.rank_files import (
    Stateful,
    Training,
    load_cache,
    load_dense,
    save_cache,
    save_dense,
)
from embroute.checkpoint.strict_json import Json
from embroute.checkpoint.tensor_file import FileInfo, TensorFile
from embroute.engine.store import CacheStore
from embroute.launch.rank import COORDINATOR, RankContext
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.transport.interface import Channel


@dataclass(frozen=True)
class CheckpointSettings:
    """Where checkpoints go, and how many are kept."""

    folder: Path
    keep: int = 2
    run_id: str = ""  # of the job; all ranks agree on it

    def part(self, step: int) -> Path:
        """Where all ranks write a step's checkpoint."""
        return partial_folder(self.folder, step, self.run_id)


def send_reply(channel: Channel, items: Sequence[object]) -> None:
    """Tell the coordinator something, such as the files that this rank has written."""
    text = np.frombuffer(json.dumps(items).encode(), np.uint8)
    size = np.array([len(text)], np.int64).view(np.uint8)
    channel.exchange([(COORDINATOR, size)], [])
    channel.exchange([(COORDINATOR, text.copy())], [])


def receive_replies(channel: Channel, peers: Sequence[str]) -> list[Json]:
    """What all ranks tell the coordinator, in their order; waits for the last of them."""
    sizes = [np.zeros(1, np.int64) for _ in peers]
    channel.exchange([], [(p, size.view(np.uint8)) for p, size in zip(peers, sizes, strict=True)])
    texts = [np.empty(int(size[0]), np.uint8) for size in sizes]
    channel.exchange([], list(zip(peers, texts, strict=True)))
    return [item for text in texts for item in json.loads(text.tobytes())]


@dataclass
class Saver:
    """The coordinator's part of a checkpoint: its own file, then the manifest of the whole."""

    saving: CheckpointSettings
    rank: RankContext
    policy: str
    identity: Identity
    random: Json  # state of the generator with which the loader began
    lock: FolderLock

    def __post_init__(self) -> None:
        self._plans: FileInfo | None = None

    def keep_plans(self, state: State, samples: int) -> None:
        """Write the planner's state as it is now, and where in the data the job is."""
        self.lock.check()
        position: Position = {"batches": state.step, "samples": samples, "random": self.random}
        self._plans = save_planner(self.saving.part(state.step), state, position)

    def finish(self, state: State, samples: int) -> Path:
        """Make the files of all ranks one checkpoint; `keep_plans` may have come before."""
        if self._plans is None:
            self.keep_plans(state, samples)
        assert self._plans is not None
        files = [self._plans]
        for info in receive_replies(self.rank.replies, self.rank.peers):
            files.append(FileInfo(*info))  # type: ignore[misc]
        shape = (self.rank.num_workers, self.rank.num_shards)
        run_id, keep = self.saving.run_id, self.saving.keep
        manifest = Manifest(state.step, self.policy, *shape, self.identity, tuple(files), run_id)
        self.lock.check()
        self._plans = None
        return commit(self.saving.folder, manifest, keep)


@dataclass(frozen=True)
class WorkerCheckpoint:
    """What a worker saves and loads: the first one the dense part, each its own random state."""

    worker: int
    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    extras: Mapping[str, Stateful]
    cache: CacheStore | None  # where copies differ from the shards' rows even after a drain

    def _training(self) -> Training:
        return Training(self.model.state_dict(), self.optimizers, self.extras)

    def save(self, folder: Path) -> list[FileInfo]:
        """Write this worker's files."""
        random = torch.get_rng_state()
        files = [save_cache(folder, self.worker, self.cache, random)]
        if self.worker == 0:
            files.append(save_dense(folder, self._training(), random))
        return files

    def load(self, path: Path, same_place: bool) -> None:
        """Read them; the worker's own only where the job has the same shape."""
        load_dense(path, self._training())
        if same_place:
            torch.set_rng_state(load_cache(path, self.worker, self.cache))


def same_caches(path: Path, setup: Setup) -> bool:
    """Whether the job's caches have the sizes that they had in a checkpoint."""
    return np.array_equal(TensorFile(path / PLANNER_FILE).rows("capacity_WA"), setup.capacity_WA)


def load_state(path: Path, state: State, same_place: bool) -> None:
    """Continue the brain where it was; a job of another shape starts with empty caches."""
    if same_place:
        load_planner(path, state)
    else:
        load_trained(path, state)
    state.step = read_manifest(path).step
