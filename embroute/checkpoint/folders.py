"""Folders of checkpoints: a checkpoint appears whole, by one rename, or not at all.

All ranks write their files into DIR/step-00001200.RUN.partial, where RUN names the job from its
start to its end. When every file is on the disk, the coordinator adds manifest.json and renames the
folder to DIR/step-00001200. A damaged checkpoint is renamed to DIR/step-00001200.damaged.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

MANIFEST = "manifest.json"

_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFTOVER = re.compile(r"step-\d{8,}\.(\w+\.partial|replaced|removed)")


class DamagedError(ValueError):
    """A checkpoint or a file in it differs from what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        self.reason = f"{path} is damaged: {reason}"
        super().__init__(f"{self.reason}; {_remedy(path)}")


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Step of a checkpoint's folder; None if the folder has another kind of name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def candidates(folder: Path) -> list[Path]:
    """All possible checkpoints, newest first; a replaced one follows its successor."""
    steps = [(step_of(path), path) for path in folder.glob("step-*") if path.is_dir()]
    keys = [(-step, path.name, path) for step, path in steps if step is not None]
    return [path for *_, path in sorted(keys)]


def saved_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    newest = dict[int | None, Path]()
    for path in candidates(folder):
        # After a crash in the middle of a replacement, only the ".replaced" folder is left.
        newest.setdefault(step_of(path), path)
    return list(reversed(newest.values()))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a folder."""
    return next(reversed(saved_checkpoints(folder)), None)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint in a step's folder, or the newest in a folder of several or of a run."""
    if not path.is_dir():
        raise ValueError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
    if _LEFTOVER.fullmatch(path.name) and step_of(path) is None:
        raise ValueError(f"{path}: this checkpoint was never finished")
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return path
    newest = latest_checkpoint(path)
    if newest is None:
        inside = [each for each in sorted(path.iterdir()) if latest_checkpoint(each)]
        if len(inside) == 1:
            return find_checkpoint(inside[0])
        names = f" (but in {', '.join(map(str, inside))})" if inside else ""
        raise ValueError(f"{path}: there is no checkpoint in this folder{names}")
    return newest


def claim_folder(folder: Path, step: int) -> None:
    """Make a folder ready for a run that starts at `step`: remove the leftovers of crashes."""
    folder.mkdir(parents=True, exist_ok=True)
    check_start(folder, step)
    remove_leftovers(folder)


def check_start(folder: Path, step: int) -> None:
    """Refuse a folder with later checkpoints: a resume would take them for this run's newest."""
    newest = latest_checkpoint(folder)
    if newest is not None and (step_of(newest) or 0) > step:
        raise ValueError(
            f"{folder} holds {newest.name}, later than step {step} where this run starts: resume "
            f"from it, remove it, or save into another folder"
        )


def partial_folder(folder: Path, step: int, run_id: str) -> Path:
    """The folder into which the ranks of a job write a checkpoint; made if missing."""
    path = folder / f"{step_name(step)}.{run_id}.partial"
    path.mkdir(parents=True, exist_ok=True)
    return path


def publish(partial: Path, step: int, keep: int) -> Path:
    """Give a whole checkpoint its final name; then remove all but the newest `keep`."""
    folder, path = partial.parent, partial.with_name(step_name(step))
    if path.exists():
        _move(path, ".replaced")
    partial.rename(path)
    # The rename must be on the disk before anything older is deleted.
    sync_folder(folder)
    remove_leftovers(folder)
    saved = saved_checkpoints(folder)
    earlier = saved[: saved.index(path)]
    for old in earlier[: max(0, len(earlier) - keep + 1)]:
        _move(old, ".removed")  # one rename first, so that nobody sees half a checkpoint
    remove_leftovers(folder)
    return path


def rename_damaged(path: Path) -> Path:
    """Keep a damaged checkpoint under a name that no resume considers; returns the new path."""
    stem, number = path.name.partition(".")[0], 1
    target = path.with_name(f"{stem}.damaged")
    while target.exists():
        number += 1
        target = path.with_name(f"{stem}.damaged-{number}")
    path.rename(target)
    sync_folder(path.parent)
    return target


def _remedy(path: Path) -> str:
    """What a user can do about a damaged checkpoint or file."""
    folder = path if step_of(path) is not None else path.parent
    step = step_of(folder)
    if step is not None:
        earlier = [
            other for other in saved_checkpoints(folder.parent) if (step_of(other) or 0) < step
        ]
        if earlier:
            return f"move {folder.name} away to go on from {earlier[-1].name}"
    return "put a whole copy in its place"


def lost_checkpoint(folder: Path) -> str:
    """The end of an error message about a failed write: which checkpoint is still intact."""
    if folder.suffix != ".partial":
        return ""
    previous, lost = latest_checkpoint(folder.parent), folder.name.partition(".")[0]
    kept = "there is no earlier one" if previous is None else f"{previous.name} before it is intact"
    return f"; {lost} was not saved, {kept}"


def _move(path: Path, suffix: str) -> None:
    target = path.with_name(path.name.partition(".")[0] + suffix)
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def remove_leftovers(folder: Path) -> None:
    """Delete partial folders of crashed runs, and removed or replaced checkpoints."""
    kept = set(saved_checkpoints(folder))
    for path in folder.glob("step-*"):
        if _LEFTOVER.fullmatch(path.name) and path not in kept:
            # A rank of a crashed run may still write there: a later call removes the folder then.
            shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
