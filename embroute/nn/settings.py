"""The settings that `prepare` takes. Those that runs have too are the fields of `RunConfig`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_origin, get_type_hints

import torch
from pydantic import PlainValidator, create_model

from embroute.checkpoint.rank_files import Stateful
from embroute.config.cluster import Cluster
from embroute.config.option_model import Group, Options, as_python, check_names, option
from embroute.config.option_types import check_path
from embroute.config.run_options import DEFAULT_POLICY, RunConfig
from embroute.config.spec import LARGEST_COUNT, Cache, parse_cache, shown
from embroute.nn.tensor_batches import UserLookups
from embroute.planner.interfaces import Dispatch, Evict, Policy, Sync
from embroute.policies.catalog import PolicyLike, policy_of


def _is(kinds: type | tuple[type, ...], wanted: str) -> PlainValidator:
    """A check of a value's type."""

    def check(value: object) -> object:
        if not isinstance(value, kinds):
            raise ValueError(f"must be {wanted}, got {shown(value)}")
        return value

    return PlainValidator(check)


def _has(methods: Sequence[str], wanted: str) -> PlainValidator:
    """A check of a value's methods."""

    def check(value: object) -> object:
        if isinstance(value, type) or not all(callable(getattr(value, m, None)) for m in methods):
            raise ValueError(f"must be {wanted}, got {shown(value)}")
        return value

    return PlainValidator(check)


def _folder(value: object) -> object:
    """Refuse a folder that does not exist and cannot be made."""
    path = Path(check_path(value)).absolute()
    try:
        nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    except OSError as error:  # too long, say
        raise ValueError(f"{shown(str(value))}: {error.strerror}") from None
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        fault = "cannot be written to" if nearest.is_dir() else "is no folder"
        raise ValueError(f"{shown(str(value))}: {nearest} {fault}")
    return value


def _policy(value: object) -> object:
    if not isinstance(value, str | Policy | Dispatch | Sync | Evict) and not callable(value):
        raise ValueError(f"must be a policy, its name or its function, got {shown(value)}")
    policy_of("", value)
    return value


def _extras(value: object) -> object:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"must be a mapping of names to objects with state_dict(), got {shown(value)}"
        )
    for key, entry in value.items():
        if not isinstance(key, str):
            raise ValueError(f"must have texts as names, got {shown(key)}")
        methods = (getattr(entry, name, None) for name in ("state_dict", "load_state_dict"))
        if not all(map(callable, methods)):
            raise ValueError(
                f"{shown(key)} must be an object with state_dict(), got {shown(entry)}"
            )
    return value


_STOP = "Asks for a checkpoint and an early end when it is set on the coordinator."
_Policy = PlainValidator(_policy)


class Settings(TypedDict, total=False):
    """The settings of a job beside its model, optimizer and loader."""

    policy: Annotated[
        PolicyLike, _Policy, option(DEFAULT_POLICY, Group.POLICY, "As on the command line.")
    ]
    cache: Cache | float | str
    network: Cluster | str
    shards: int
    nodes: Mapping[str, Sequence[str]]
    node: Annotated[str, option("", Group.RANKS, "This machine in `nodes`, if not its host name.")]
    peer_timeout: float
    transport: str
    own_process: Annotated[
        bool,
        option(
            None,
            Group.RANKS,
            "Let the job set priority, allocator, hooks and exit code. `embroute run` does.",
        ),
    ]
    lookups: Annotated[
        UserLookups,
        _has(("__call__",), "a function of a batch"),
        option(None, Group.DATA, "The ids of a batch that each layer looks up."),
    ]
    min_rows: Annotated[
        int, option(1000, Group.MODEL, "Smaller tables stay dense.", ge=1, le=LARGEST_COUNT)
    ]
    epochs: int
    steps: int
    quotas: tuple[float, ...]
    compute_ms_per_sample: float
    held_out: Annotated[
        Iterable[object],
        _has(("__iter__",), "batches to iterate over"),
        option(None, Group.DATA, "Batches to evaluate on."),
    ]
    evaluate_every: int
    decay: float
    seed: int
    device: Annotated[
        str,
        _is((str, torch.device), "a device of torch"),
        option("cpu", Group.MODEL, "Device of the dense model."),
    ]
    compare_with: Annotated[
        PolicyLike, _Policy, option(None, Group.POLICY, "A policy whose traffic is counted beside.")
    ]
    checkpoint: Annotated[
        Path | str,
        PlainValidator(_folder),
        option(None, Group.CHECKPOINTS, "Folder of checkpoints."),
    ]
    checkpoint_every: int
    keep: int
    resume: bool
    fall_back: Annotated[
        bool, option(False, Group.CHECKPOINTS, "Skip damaged checkpoints at a resume.")
    ]
    tables: Path | str
    extras: Annotated[
        Mapping[str, Stateful],
        PlainValidator(_extras),
        option(
            {}, Group.CHECKPOINTS, "Objects to save with the model, such as schedules, by name."
        ),
    ]
    stop: Annotated[
        threading.Event, _has(("is_set",), "a threading.Event"), option(None, Group.STEPS, _STOP)
    ]
    debug: Annotated[
        Literal["steps", "versions"] | None,
        option(
            None, Group.RANKS, "steps: log the transfers of each step; versions: send versions."
        ),
    ]


_HINTS: Mapping[str, Any] = get_type_hints(Settings, include_extras=True)
_SHARED = RunConfig.model_fields
_FIELDS: dict[str, Any] = {
    name: hint if get_origin(hint) is Annotated else (_SHARED[name].annotation, _SHARED[name])
    for name, hint in _HINTS.items()
}
PrepareOptions: type[Options] = create_model("PrepareOptions", __base__=Options, **_FIELDS)
_NEEDED = {"checkpoint_every": "checkpoint", "resume": "checkpoint", "evaluate_every": "held_out"}


def check_settings(settings: Settings) -> Settings:
    """The settings with all defaults; unknown, malformed or contradictory ones are refused."""
    values: dict[str, Any] = {**settings}
    if values.get("held_out", ...) is None:
        del values["held_out"]
    try:
        check_names(PrepareOptions, values, "setting of prepare")
        checked = PrepareOptions(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(as_python(str(error))) from None
    if values.get("debug") == "versions" and values.get("resume"):
        raise ValueError("debug='versions': a checkpoint holds no versions, so it must not resume")
    for name, needed in _NEEDED.items():
        if values.get(name) and values.get(needed) is None:
            raise ValueError(f"{name}={values[name]!r} has no meaning without {needed}=")
    complete = {name: value for name, value in checked if value is not None}
    if isinstance(values.get("network"), Cluster) and "compute_ms_per_sample" not in values:
        del complete["compute_ms_per_sample"]  # the cluster has its own
    return complete  # type: ignore[return-value]


def check_loader(loader: object) -> None:
    """Refuse a loader that is no iterable of batches."""
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | Mapping | type):
        raise TypeError(
            f"loader must give batches when iterated over, such as a DataLoader or a list, got "
            f"{shown(loader)}"
        )


def cache_size(settings: Settings) -> Cache:
    """The setting cache= as one size, or one for each worker."""
    return parse_cache("cache=", settings["cache"])
