"""The settings of a job, as `prepare` takes them, and their errors."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TypedDict

from embroute.cluster import Cluster
from embroute.config import Size, parse_size
from embroute.runtime.checkpoint import Stateful
from embroute.runtime.tensor_feed import Lookups


class Settings(TypedDict, total=False):
    """What a job may be told beside its model, optimizer and loader."""

    policy: str
    cache: Size | float | str
    network: Cluster | str
    shards: int  # of a job on one node; `nodes` says who sits where in any other
    nodes: Mapping[str, Sequence[str]]
    node: str  # this machine's name among them, unless it is its host name
    peer_timeout: float
    lookups: Lookups
    min_rows: int
    epochs: int
    max_steps: int
    quotas: tuple[float, ...]
    compute_ms_per_sample: float  # of the reference worker; 0: not known
    held_out: Iterable[object]
    evaluate_every: int
    decay: float
    seed: int
    device: str
    compare_with: str
    checkpoint: Path | str  # folder of checkpoints
    checkpoint_every: int
    keep: int
    resume: bool  # from the newest checkpoint in the folder, if there is one
    fall_back: bool  # with resume: pass over a damaged checkpoint for the newest that is whole
    tables: Path | str  # initial values
    extras: Mapping[str, Stateful]  # learning-rate schedules and the like, saved with the model
    stop: threading.Event  # asks for a checkpoint and an early end
    debug: str  # steps: count what moves step by step; versions: let versions travel with rows


DEBUG = ("steps", "versions")


_WHOLE = {
    "epochs": 1,
    "max_steps": 0,
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "keep": 1,
    "min_rows": 1,
    "shards": 1,
}
_LEAST = _WHOLE | {"peer_timeout": 1, "decay": 0, "compute_ms_per_sample": 0}
_NEEDED = {"checkpoint_every": "checkpoint", "resume": "checkpoint", "evaluate_every": "held_out"}


def check_settings(settings: Settings) -> None:
    """Refuse a setting that nobody reads, or that has no meaning."""
    unknown = sorted(set(settings) - set(Settings.__annotations__))
    if unknown:
        known = ", ".join(Settings.__annotations__)
        raise ValueError(f"prepare: unknown setting {unknown[0]!r} (known: {known})")
    if settings.get("debug", DEBUG[0]) not in DEBUG:
        raise ValueError(f"debug= must be one of {', '.join(DEBUG)}, got {settings['debug']!r}")
    if settings.get("debug") == "versions" and settings.get("resume"):
        raise ValueError("debug='versions': a checkpoint holds no versions, so it must not resume")
    given: Mapping[str, object] = {**settings}
    if not isinstance(given.get("fall_back", False), bool):
        raise ValueError(f"fall_back= must be True or False, got {given['fall_back']!r}")
    for name, least in _LEAST.items():
        number, kind = given.get(name, least), Integral if name in _WHOLE else Real
        if not (isinstance(number, kind) and least <= float(number) < math.inf):
            what = "a whole number" if name in _WHOLE else "a number"
            raise ValueError(f"{name}= must be {what} of at least {least}, got {number!r}")
    for name, needed in _NEEDED.items():
        if given.get(name) and given.get(needed) is None:
            raise ValueError(f"{name}={given[name]!r} has no meaning without {needed}=")


def cache_size(settings: Settings) -> Size:
    """The cache of a worker that a user asked for, however it was written."""
    size = settings.get("cache", 0.1)
    return size if isinstance(size, Size) else parse_size("cache", str(size))
