"""Where a job starts: all ranks agree on a checkpoint, and pass over damaged ones if they may."""

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
    set_aside,
    step_of,
)
from embroute.checkpoint.manifest import read_manifest, verify
from embroute.checkpoint.saver import receive_replies, send_reply
from embroute.engine.control import broadcast_text
from embroute.launch.rank import COORDINATOR, RankContext


class Start(NamedTuple):
    """What all ranks begin with."""

    path: Path | None  # checkpoint to go on from
    run_id: str
    check: bool = False  # whether it is only a candidate, whose files are to be read first


class Damage(NamedTuple):
    """A checkpoint that is not whole, and why."""

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
    """The checkpoint that every rank starts from, and the name of the job, the coordinator's.

    The coordinator looks for it. With `fall_back` all ranks share in reading the newest one, and if
    it is damaged the one before it.
    """
    if rank.name != COORDINATOR:
        return _follow(rank)
    path = None
    if folder is not None:
        if resume:
            path = _newest_whole(rank, folder, run_id) if fall_back else latest_checkpoint(folder)
        claim_folder(folder, 0 if path is None else step_of(path) or 0)
    return _tell(rank, Start(path, run_id))


def _follow(rank: RankContext) -> Start:
    """Check what the coordinator asks to be checked, until it says where to start."""
    while (start := _tell(rank)).check:
        assert start.path is not None
        send_reply(rank.replies, _verdict(rank, start.path))
    return start


def _tell(rank: RankContext, start: Start | None = None) -> Start:
    """Let every rank know what the coordinator knows."""
    text = json.dumps(start and (str(start.path or ""), start.run_id, start.check))
    path, run_id, check = json.loads(broadcast_text(rank.name, rank.peers, rank.control, text))
    return Start(Path(path) if path else None, run_id, check)


def _newest_whole(rank: RankContext, folder: Path, run_id: str) -> Path | None:
    """The newest checkpoint that is whole; the later ones are set aside once it is found."""
    damaged: list[Damage] = []
    for path in candidates(folder):
        _tell(rank, Start(path, run_id, check=True))
        own = _verdict(rank, path)
        reasons = [*own, *map(str, receive_replies(rank.replies, rank.peers))]
        if not reasons:
            _pass_over(damaged, path)
            return path
        damaged.append(Damage(path, reasons[0]))
    if damaged:
        reasons = [damage.reason for damage in damaged]
        raise ValueError(f"{folder}: no checkpoint is whole: {'; '.join(reasons)}")
    return None


def _verdict(rank: RankContext, path: Path) -> list[str]:
    """Why a checkpoint is damaged, if it is. Every rank reads its share of the files whole."""
    everyone = [COORDINATOR, *rank.peers]
    try:
        files = read_manifest(path).files
        verify(path, files[everyone.index(rank.name) :: len(everyone)])
    except DamagedError as error:
        return [error.reason]
    return []


def _pass_over(damaged: Sequence[Damage], taken: Path) -> None:
    """Rename damaged checkpoints and say so, in one line."""
    if not damaged:
        return
    lost = (step_of(damaged[0].path) or 0) - (step_of(taken) or 0)
    kept = [f"{reason}, kept as {set_aside(path).name}" for path, reason in damaged]
    print(
        f"embroute: WARNING: {'; '.join(kept)}; going on from {taken.name} instead, "
        f"{lost} steps are lost and trained again",
        file=sys.stderr,
        flush=True,
    )
