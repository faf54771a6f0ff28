"""Every built-in model by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from embroute.data.schema import Schema
from embroute.models.bag_models import DIN, GraphSage
from embroute.models.click_models import DLRM, NCF, DeepCross, DeepFM, WideDeep, WideDeepHet
from embroute.models.initial_rows import fill
from embroute.models.layers import FieldEmbeddings


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model beside its name and widths.

    `mode` pools bags: "sum" or "mean". Tables on the device "meta" hold no rows; on any other
    device they start with their initial values.
    """

    hidden: tuple[int, ...] = (256, 128)
    mode: str = "sum"
    seed: int = 0
    table_device: str | None = None

    def __post_init__(self) -> None:
        if min(self.hidden, default=1) < 1:
            raise ValueError(f"hidden widths must be at least 1, got {self.hidden}")


@dataclass(frozen=True)
class ModelEntry:
    """A model: how many embeddings and single weights a record holds, and how to build it."""

    embeddings: int
    weights: int
    build: Callable[[FieldEmbeddings, Sequence[int]], nn.Module]


MODELS: Mapping[str, ModelEntry] = {
    "wide-deep": ModelEntry(1, 1, WideDeep),
    "deepfm": ModelEntry(1, 1, DeepFM),
    "dcn": ModelEntry(1, 0, DeepCross),
    "dlrm": ModelEntry(1, 0, DLRM),
    "ncf": ModelEntry(2, 0, NCF),
    "wide-deep-het": ModelEntry(1, 0, WideDeepHet),
    "din": ModelEntry(1, 0, DIN),
    "graphsage": ModelEntry(1, 0, GraphSage),
}


def table_widths(name: str, schema: Schema, dim: int | tuple[int, ...]) -> tuple[int, ...]:
    """Floats of a record in each table; `dim` is one width of embeddings, or one per table."""
    if name not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {name!r}")
    dims = (dim,) * len(schema.tables) if isinstance(dim, int) else dim
    if len(dims) != len(schema.tables):
        raise ValueError(
            f"--dim names {len(dims)} widths, the data has {len(schema.tables)} tables"
        )
    if min(dims, default=1) < 1:
        raise ValueError(f"--dim must be at least 1, got {min(dims)}")
    entry = MODELS[name]
    return tuple(entry.embeddings * width + entry.weights for width in dims)


def make_model(
    name: str, schema: Schema, dim: int | tuple[int, ...], options: ModelOptions
) -> nn.Module:
    """The model with initial values; its dense layers depend on name, shapes and seed alone."""
    widths = table_widths(name, schema, dim)
    embeddings = FieldEmbeddings(schema, widths, options.mode, options.table_device)
    if options.table_device != "meta":
        fill(embeddings, options.seed)
    with torch.random.fork_rng(devices=[]):
        # Unlike torch.manual_seed this leaves the generators of other devices alone.
        torch.default_generator.manual_seed(options.seed)
        return MODELS[name].build(embeddings, options.hidden)
