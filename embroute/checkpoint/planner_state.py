"""The coordinator's file of a checkpoint: the planner's state, and the position in the data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, TypeAdapter

from embroute.checkpoint.manifest import PLANNER_FILE
from embroute.checkpoint.strict_json import Json, list_of, object_of, validated
from embroute.checkpoint.tensor_file import FileInfo, TensorFile, as_tensor, write_tensors
from embroute.engine.coordinator import RunCounts
from embroute.kernels.array_types import Array
from embroute.models.initial_rows import initial_rows
from embroute.planner.state import Memory, State

Position = Mapping[str, Json]
_COUNT = TypeAdapter(NonNegativeInt)
_BYTES = TypeAdapter(list[Annotated[int, Field(ge=0, le=255)]])


def _arrays(state: State) -> dict[str, Array]:
    """Every array of the state, by its name in the file."""
    caches = state.caches
    arrays = caches._asdict() | caches.cells._asdict() | caches.eviction._asdict()
    del arrays["cells"], arrays["eviction"]
    for memory in state.memories.values():
        arrays |= _arrays_of(memory)
    return arrays


def _arrays_of(memory: Memory) -> dict[str, Array]:
    kind = type(memory).__name__
    return {f"{kind}.{name}": array for name, array in memory._asdict().items()}


def save_planner(path: Path, state: State, position: Position) -> FileInfo:
    """Write the planner's state and the position in the data."""
    setup = state.setup
    about = {
        "state": json.dumps({"step": state.step}),
        "position": json.dumps(dict(position)),
        "origin": json.dumps(_origin(setup.seed) if setup.seeded else None),
    }
    tensors = [as_tensor(name, array) for name, array in _arrays(state).items()]
    return write_tensors(path / PLANNER_FILE, tensors, about)


def load_planner(path: Path, state: State) -> dict[str, Json]:
    """Fill a fresh state of the same policy and setup; returns the position in the data."""
    file, arrays = TensorFile(path / PLANNER_FILE), _arrays(state)
    saved, declared = ({name for name in names if "." in name} for names in (file.names, arrays))
    if saved != declared:
        raise ValueError(
            f"{path.name}: the policy's memory has changed since the checkpoint: it has "
            f"{_listed(declared - saved)} now, and had {_listed(saved - declared)}; give back the "
            f"names, or train anew"
        )
    for name, array in arrays.items():
        file.expect(name, array.shape, array.dtype.name)
    for name in ("first_WA", "capacity_WA"):  # fixed by the setup, not part of the state
        if not np.array_equal(file.rows(name), arrays.pop(name)):
            raise ValueError(f"{path.name}: the caches have other capacities in the checkpoint")
    for name, array in arrays.items():
        file.read(name, array)
    scalars = file.json("state")
    with file.parsing("state"):
        state.step = validated(_COUNT, object_of(scalars, "it")["step"], "step")
    return read_position(path)


def _listed(names: set[str]) -> str:
    """Names in a sentence."""
    return " and ".join(sorted(names)) or "none of them"


def load_trained(path: Path, state: State, kept: type[Memory] | None = None) -> None:
    """Read which rows have ever been trained, and one memory: they do not depend on the workers."""
    file, cells = TensorFile(path / PLANNER_FILE), state.caches.cells
    arrays: dict[str, Array] = {"number_R": cells.number_R, "numbered": cells.numbered}
    if kept is not None:
        arrays |= _arrays_of(state.memory(kept))
    for name, array in arrays.items():
        file.expect(name, array.shape, array.dtype.name)
        file.read(name, array)


def _origin(seed: int) -> list[float]:
    """A seed and a row drawn from it: another version of the program may draw other rows."""
    first = np.zeros(1, np.int64)
    return [seed, *initial_rows(seed, first, first, 2)[0].tolist()]


def from_seed(path: Path, seed: int) -> bool:
    """Whether the untrained rows of a checkpoint are the initial rows of a seed."""
    return bool(TensorFile(path / PLANNER_FILE).json("origin") == _origin(seed))


def read_position(path: Path) -> dict[str, Json]:
    """The position in the data at a checkpoint; a job of any shape may continue there."""
    file = TensorFile(path / PLANNER_FILE)
    position = file.json("position")
    with file.parsing("position"):
        return object_of(position, "it")


def counts_before(path: Path) -> RunCounts:
    """What the run had done when it saved a checkpoint."""
    position = read_position(path)
    with TensorFile(path / PLANNER_FILE).parsing("position"):
        counts = (validated(_COUNT, position[one.name], one.name) for one in fields(RunCounts))
        return RunCounts(*counts)


def first_random_state(path: Path) -> torch.Tensor:
    """The random state at which the loader of a checkpoint's run began."""
    position, length = read_position(path), len(torch.get_rng_state())
    with TensorFile(path / PLANNER_FILE).parsing("position"):
        numbers = list_of(position["random"], "random", length)
        return torch.frombuffer(bytearray(validated(_BYTES, numbers, "random")), dtype=torch.uint8)
