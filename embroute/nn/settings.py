"""The settings that `prepare` takes, and their checks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch

from embroute.checkpoint.rank_files import Stateful
from embroute.config.cluster import Cluster
from embroute.config.spec import LIMITS, Limit, Size, parse_cache, parse_path, shown
from embroute.nn.tensor_batches import UserLookups
from embroute.planner.interfaces import Dispatch, Evict, Policy, Sync
from embroute.policies.catalog import PolicyLike, policy_of
from embroute.transport.interface import TRANSPORTS


class Settings(TypedDict, total=False):
    """The settings of a job beside its model, optimizer and loader."""

    policy: PolicyLike
    cache: Size | float | str
    network: Cluster | str
    shards: int  # of a job on one node; a job on several nodes gives `nodes`
    nodes: Mapping[str, Sequence[str]]
    node: str  # this machine's name in `nodes`, if it differs from the host name
    peer_timeout: float
    transport: str  # auto, sockets or shared-memory
    own_process: bool  # let the job set priority, allocator, hooks and exit code of this process
    lookups: UserLookups
    min_rows: int
    epochs: int
    max_steps: int
    quotas: tuple[float, ...]
    compute_ms_per_sample: float  # of the reference worker; 0: unknown
    held_out: Iterable[object]
    evaluate_every: int
    decay: float
    seed: int
    device: str
    compare_with: PolicyLike
    checkpoint: Path | str  # folder of checkpoints
    checkpoint_every: int
    keep: int
    resume: bool  # from the newest checkpoint in the folder, if any
    fall_back: bool  # with resume: skip damaged checkpoints, and resume from the newest whole one
    tables: Path | str  # initial values
    extras: Mapping[str, Stateful]  # such as learning-rate schedules, saved with the model
    stop: threading.Event  # asks for a checkpoint and an early end
    debug: str  # steps: log the transfers of each step; versions: send versions with rows


DEBUG = ("steps", "versions")
_NEEDED = {"checkpoint_every": "checkpoint", "resume": "checkpoint", "evaluate_every": "held_out"}
_SHARE = Limit(0, 10**9, whole=False)
Check = Callable[[str, object], None]  # takes the setting's name, as in errors, and its value


def _is(kinds: type | tuple[type, ...], wanted: str) -> Check:
    """A check of a value's type."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, kinds):
            raise ValueError(f"{name} must be {wanted}, got {shown(value)}")

    return check


def _has(methods: Sequence[str], wanted: str) -> Check:
    """A check of a value's methods."""

    def check(name: str, value: object) -> None:
        if isinstance(value, type) or not all(callable(getattr(value, m, None)) for m in methods):
            raise ValueError(f"{name} must be {wanted}, got {shown(value)}")

    return check


_text = _is(str, "a text")
_stateful = _has(("state_dict", "load_state_dict"), "an object with state_dict()")


def _path(name: str, value: object) -> None:
    _is((str, os.PathLike), "a path")(name, value)
    parse_path(name, os.fspath(value))  # type: ignore[call-overload]


def _folder(name: str, value: object) -> None:
    """Refuse a folder that does not exist and cannot be made."""
    _path(name, value)
    path = Path(str(value)).absolute()
    try:
        nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    except OSError as error:  # too long, say
        raise ValueError(f"{name}{shown(str(value))}: {error.strerror}") from None
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        fault = "cannot be written to" if nearest.is_dir() else "is no folder"
        raise ValueError(f"{name}{shown(str(value))}: {nearest} {fault}")


def _policy(name: str, value: object) -> None:
    if not isinstance(value, str | Policy | Dispatch | Sync | Evict) and not callable(value):
        raise ValueError(f"{name} must be a policy, its name or its function, got {shown(value)}")
    policy_of(name, value)


def _cache(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Size | str | int | float):
        raise ValueError(f"{name} must look like 'auto', 0.1, '10%' or '256MB', got {shown(value)}")
    if isinstance(value, int):
        Limit(0, 10**15, whole=True).check(name, value)
    parse_cache(name, value)


def _quotas(name: str, value: object) -> None:
    if value is None:
        return
    _is((list, tuple), "a list of numbers, one a worker")(name, value)
    assert isinstance(value, list | tuple)
    for share in value:
        _SHARE.check(f"{name}{shown(value)}: a share", share)
    if value and not sum(value):
        raise ValueError(f"{name} must have a share above 0, got {shown(value)}")


def _nodes(name: str, value: object) -> None:
    _is(Mapping, "a mapping of nodes to lists of ranks")(name, value)
    assert isinstance(value, Mapping)
    for node, ranks in value.items():
        listed = isinstance(ranks, list | tuple) and all(isinstance(rank, str) for rank in ranks)
        if not isinstance(node, str) or not listed:
            raise ValueError(f"{name}{shown(node)} must be a list of ranks, got {shown(ranks)}")


def _extras(name: str, value: object) -> None:
    _is(Mapping, "a mapping of names to objects with state_dict()")(name, value)
    assert isinstance(value, Mapping)
    for key, entry in value.items():
        _text(f"{name} a name", key)
        _stateful(f"{name}{shown(key)}", entry)


def _one_of(known: Sequence[str]) -> Check:
    """A check for one of a few words."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {shown(value)}")

    return check


def _held_out(name: str, value: object) -> None:
    if value is not None:
        _has(("__iter__",), "batches to iterate over")(name, value)


# Checks by setting; LIMITS has the ranges of numbers.
_CHECKS: Mapping[str, Check] = {
    "policy": _policy,
    "cache": _cache,
    "network": _is((Cluster, str), "a Cluster, a preset or a YAML file"),
    "nodes": _nodes,
    "node": _text,
    "own_process": _is(bool, "True or False"),
    "lookups": _has(("__call__",), "a function of a batch"),
    "quotas": _quotas,
    "held_out": _held_out,
    "device": _is((str, torch.device), "a device of torch"),
    "compare_with": _policy,
    "checkpoint": _folder,
    "resume": _is(bool, "True or False"),
    "fall_back": _is(bool, "True or False"),
    "tables": _path,
    "extras": _extras,
    "stop": _has(("is_set",), "a threading.Event"),
    "debug": _one_of(DEBUG),
    "transport": _one_of(TRANSPORTS),
}


def check_settings(settings: Settings) -> None:
    """Refuse settings that are unknown, malformed or contradictory."""
    unknown = sorted(set(settings) - set(Settings.__annotations__))
    if unknown:
        known = ", ".join(Settings.__annotations__)
        raise ValueError(f"prepare: unknown setting {shown(unknown[0])} (known: {known})")
    values: Mapping[str, object] = {**settings}
    for name, value in values.items():
        if name in LIMITS:
            LIMITS[name].check(f"{name}=", value)
        elif name in _CHECKS:
            _CHECKS[name](f"{name}=", value)
    if settings.get("debug") == "versions" and settings.get("resume"):
        raise ValueError("debug='versions': a checkpoint holds no versions, so it must not resume")
    for name, needed in _NEEDED.items():
        if values.get(name) and values.get(needed) is None:
            raise ValueError(f"{name}={values[name]!r} has no meaning without {needed}=")


def check_loader(loader: object) -> None:
    """Refuse a loader that is no iterable of batches."""
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | Mapping | type):
        raise TypeError(
            f"loader must give batches when iterated over, such as a DataLoader or a list, got "
            f"{shown(loader)}"
        )


def cache_size(settings: Settings) -> Size:
    """The setting cache= as a size."""
    return parse_cache("cache=", settings.get("cache", "auto"))
