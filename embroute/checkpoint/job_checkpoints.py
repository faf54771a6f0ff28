"""Checkpoints of a job: the ranks agree on a start and write files; the coordinator publishes them.

Ranks answer the coordinator over the channel `replies`: damage at the start, files while it runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from embroute.checkpoint import rank_files
from embroute.checkpoint.folders import (
    DamagedError,
    candidates,
    claim_folder,
    latest_checkpoint,
    partial_folder,
    rename_damaged,
    step_of,
)
from embroute.checkpoint.locks import FolderLock
from embroute.checkpoint.manifest import (
    PLANNER_FILE,
    Identity,
    Manifest,
    commit,
    read_manifest,
    verify,
)
from embroute.checkpoint.planner_state import Position, load_planner, load_trained, save_planner
from embroute.checkpoint.rank_files import Stateful, Training
from embroute.checkpoint.strict_json import Json
from embroute.checkpoint.tensor_file import FileInfo, TensorFile
from embroute.engine.control import broadcast_text, receive_replies, send_reply
from embroute.engine.coordinator import RunCounts
from embroute.engine.store import CacheStore
from embroute.launch.rank import COORDINATOR, RankContext
from embroute.planner.setup import Setup
from embroute.planner.state import Memory, State


@dataclass(frozen=True)
class CheckpointSettings:
    """Where checkpoints go, and how many are kept."""

    folder: Path
    keep: int = 2
    run_id: str = ""  # of the job; the same at all ranks

    def partial(self, step: int) -> Path:
        """The folder into which all ranks write a step's checkpoint."""
        return partial_folder(self.folder, step, self.run_id)


class Start(NamedTuple):
    """The start that the coordinator proposes or announces to all ranks."""

    path: Path | None  # of the checkpoint to resume from
    run_id: str
    check: bool = False  # a candidate: verify the files and reply, do not start yet


def agree_on_start(
    rank: RankContext,
    folder: Path | None,
    run_id: str,
    *,
    resume: bool = False,
    fall_back: bool = False,
) -> Start:
    """The checkpoint that every rank starts from, and the job's run id; the coordinator decides.

    With `fall_back` all ranks together verify the newest checkpoint, and if it is damaged the one
    before it, and so on.
    """
    if rank.name != COORDINATOR:
        return _follow_coordinator(rank)
    path = None
    if folder is not None:
        if resume:
            path = _newest_whole(rank, folder, run_id) if fall_back else latest_checkpoint(folder)
        claim_folder(folder, 0 if path is None else step_of(path) or 0)
    return _share(rank, Start(path, run_id))


def _follow_coordinator(rank: RankContext) -> Start:
    """Verify each candidate of the coordinator, until it announces the start."""
    while (start := _share(rank)).check:
        assert start.path is not None
        send_reply(rank.replies, _find_damage(rank, start.path))
    return start


def _share(rank: RankContext, start: Start | None = None) -> Start:
    """Send the coordinator's start to every rank; returns it on each."""
    text = json.dumps(start and (str(start.path or ""), start.run_id, start.check))
    path, run_id, check = json.loads(broadcast_text(rank.name, rank.peers, rank.control, text))
    return Start(Path(path) if path else None, run_id, check)


def _newest_whole(rank: RankContext, folder: Path, run_id: str) -> Path | None:
    """The newest undamaged checkpoint; later ones are renamed once it is known."""
    damaged: dict[Path, str] = {}  # reasons by checkpoint, newest first
    for path in candidates(folder):
        _share(rank, Start(path, run_id, check=True))
        reasons = _find_damage(rank, path)
        reasons += map(str, receive_replies(rank.replies, rank.peers))
        if not reasons:
            _report_skipped(damaged, path)
            return path
        damaged[path] = reasons[0]
    if damaged:
        raise ValueError(f"{folder}: no checkpoint is whole: {'; '.join(damaged.values())}")
    return None


def _find_damage(rank: RankContext, path: Path) -> list[str]:
    """The reason why a checkpoint is damaged, if it is. Each rank verifies a share of the files."""
    ranks = [COORDINATOR, *rank.peers]
    try:
        files = read_manifest(path).files
        verify(path, files[ranks.index(rank.name) :: len(ranks)])
    except DamagedError as error:
        return [error.reason]
    return []


def _report_skipped(damaged: Mapping[Path, str], chosen: Path) -> None:
    """Rename damaged checkpoints and print one line about them."""
    if not damaged:
        return
    lost = (step_of(next(iter(damaged))) or 0) - (step_of(chosen) or 0)
    kept = [f"{reason}, kept as {rename_damaged(path).name}" for path, reason in damaged.items()]
    print(
        f"embroute: WARNING: {'; '.join(kept)}; going on from {chosen.name} instead, "
        f"{lost} steps are lost and trained again",
        file=sys.stderr,
        flush=True,
    )


@dataclass
class Saver:
    """Writes the coordinator's files: the planner's state, then the manifest."""

    settings: CheckpointSettings
    rank: RankContext
    policy: str
    identity: Identity
    random: Json  # state of torch's generator at which the loader began
    lock: FolderLock

    def __post_init__(self) -> None:
        self._planner_file: FileInfo | None = None

    def save_planner_state(self, state: State, counts: RunCounts) -> None:
        """Write the planner's state as it is now, and the position in the data."""
        self.lock.check()
        position: Position = {"batches": state.step, **asdict(counts), "random": self.random}
        self._planner_file = save_planner(self.settings.partial(state.step), state, position)

    def finish(self, state: State, counts: RunCounts) -> Path:
        """Collect the files of all ranks and publish the checkpoint."""
        if self._planner_file is None:
            self.save_planner_state(state, counts)
        assert self._planner_file is not None
        # A reply is a file's FileInfo as a JSON list. It comes after the file is on the disk.
        replies = receive_replies(self.rank.replies, self.rank.peers)
        files = [FileInfo(*info) for info in replies]  # type: ignore[misc]
        manifest = Manifest(
            step=state.step,
            policy=self.policy,
            num_workers=self.rank.num_workers,
            num_shards=self.rank.num_shards,
            identity=self.identity,
            files=(self._planner_file, *files),
            run_id=self.settings.run_id,
            saved_s=time.time(),
        )
        self.lock.check()
        self._planner_file = None
        return commit(self.settings.folder, manifest, self.settings.keep)


@dataclass(frozen=True)
class WorkerCheckpoint:
    """A worker's files: its cache and random state; at the first worker also the dense part."""

    worker: int
    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    extras: Mapping[str, Stateful]
    cache: CacheStore | None  # None where a drain makes all copies equal to the shards' rows

    def _training(self) -> Training:
        return Training(self.model.state_dict(), self.optimizers, self.extras)

    def save(self, folder: Path) -> list[FileInfo]:
        """Write this worker's files."""
        random = torch.get_rng_state()
        files = [rank_files.save_cache(folder, self.worker, self.cache, random)]
        if self.worker == 0:
            files.append(rank_files.save_dense(folder, self._training(), random))
        return files

    def load(self, path: Path, same_shape: bool) -> None:
        """Restore the dense part; cache and random state only in a job of the same shape."""
        rank_files.load_dense(path, self._training())
        if same_shape:
            torch.set_rng_state(rank_files.load_cache(path, self.worker, self.cache))


def same_caches(path: Path, setup: Setup) -> bool:
    """Whether the job's caches have the same capacities as in a checkpoint."""
    return np.array_equal(TensorFile(path / PLANNER_FILE).rows("capacity_WA"), setup.capacity_WA)


def load_state(
    path: Path, state: State, same_shape: bool, kept: type[Memory] | None = None
) -> None:
    """Restore the planner's state; a job of another shape starts with empty caches.

    `kept`: a memory that such a job restores too, because the order of samples follows from it.
    """
    if same_shape:
        load_planner(path, state)
    else:
        load_trained(path, state, kept)
    state.step = read_manifest(path).step
