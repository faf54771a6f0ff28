"""The start of a job: all ranks agree on one checkpoint; with fall_back they skip damaged ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from embroute.checkpoint.folders import (
    DamagedError,
    candidates,
    claim_folder,
    latest_checkpoint,
    rename_damaged,
    step_of,
)
from embroute.checkpoint.manifest import read_manifest, verify
from embroute.checkpoint.saver import receive_replies, send_reply
from embroute.engine.control import broadcast_text
from embroute.launch.rank import COORDINATOR, RankContext


class Start(NamedTuple):
    """The start that the coordinator proposes or announces to all ranks."""

    path: Path | None  # of the checkpoint to resume from
    run_id: str
    check: bool = False  # a candidate: verify the files and reply, do not start yet


class Damage(NamedTuple):
    """A damaged checkpoint, and the reason."""

    path: Path
    reason: str


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
    damaged: list[Damage] = []
    for path in candidates(folder):
        _share(rank, Start(path, run_id, check=True))
        reasons = _find_damage(rank, path)
        reasons += map(str, receive_replies(rank.replies, rank.peers))
        if not reasons:
            _report_skipped(damaged, path)
            return path
        damaged.append(Damage(path, reasons[0]))
    if damaged:
        reasons = [damage.reason for damage in damaged]
        raise ValueError(f"{folder}: no checkpoint is whole: {'; '.join(reasons)}")
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


def _report_skipped(damaged: Sequence[Damage], chosen: Path) -> None:
    """Rename damaged checkpoints and print one line about them."""
    if not damaged:
        return
    lost = (step_of(damaged[0].path) or 0) - (step_of(chosen) or 0)
    kept = [f"{reason}, kept as {rename_damaged(path).name}" for path, reason in damaged]
    print(
        f"embroute: WARNING: {'; '.join(kept)}; going on from {chosen.name} instead, "
        f"{lost} steps are lost and trained again",
        file=sys.stderr,
        flush=True,
    )
