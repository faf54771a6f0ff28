"""Which layers of a model are routed, and what takes their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from embroute.models.embeddings import FieldEmbeddings
from embroute.runtime.routed import Desk, RoutedFields, RoutedLayer
from embroute.runtime.tensor_feed import Layer

Plain = nn.Embedding | nn.EmbeddingBag
_MARK = "embroute_route"


def route(layer: Plain, routed: bool = True) -> Plain:
    """Mark a layer as routed, or as part of the dense model, whatever its size."""
    setattr(layer, _MARK, routed)
    return layer


@dataclass(frozen=True)
class Found:
    """A routed layer, and where its module sits in the model."""

    layer: Layer
    module: Plain

    @property
    def weight(self) -> torch.Tensor:
        """The table."""
        weight: torch.Tensor = self.module.weight
        return weight


def find_layers(model: nn.Module, min_rows: int) -> list[Found]:
    """Layers that were marked, or have at least `min_rows` rows."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if getattr(module, _MARK, module.num_embeddings >= min_rows):
            found.append(Found(_layer(name, module), module))
    if not found:
        raise ValueError(
            f"the model has no nn.Embedding or nn.EmbeddingBag of at least {min_rows} rows; "
            f"mark smaller ones with embroute.route(layer), or lower min_rows"
        )
    return found


def _layer(name: str, module: Plain) -> Layer:
    """What is known of a layer; refuses what rows that travel cannot do."""
    bag = isinstance(module, nn.EmbeddingBag)
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise ValueError(f"{name}: {option}={getattr(module, option)} has no routed form")
    mode = module.mode if isinstance(module, nn.EmbeddingBag) else "sum"
    if mode not in ("sum", "mean"):
        raise ValueError(f"{name}: mode must be sum or mean, got {mode!r}")
    padding = module.padding_idx
    if padding is not None and not module.weight.is_meta and bool(module.weight[padding].any()):
        raise ValueError(f"{name}: the row of padding_idx={padding} must be zeros")
    rows, width = module.num_embeddings, module.embedding_dim
    return Layer(name, rows, width, bag, mode == "mean", padding)


def replace_layers(model: nn.Module, found: Sequence[Found], desk: Desk) -> list[RoutedLayer]:
    """Put routed layers in the place of plain ones, wherever the model names them."""
    routed = {
        entry.module: RoutedLayer(entry.layer.name, table, entry.layer.mean, desk)
        for table, entry in enumerate(found)
    }
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child in routed:
                setattr(parent, name, routed[child])
    return list(routed.values())


def field_embeddings(model: nn.Module) -> FieldEmbeddings | None:
    """The tables of one of embroute's own models."""
    for module in model.modules():
        if isinstance(module, FieldEmbeddings):
            return module
    return None


def replace_fields(model: nn.Module, plain: FieldEmbeddings, desk: Desk) -> None:
    """Put `RoutedFields` in the place of `FieldEmbeddings`."""
    routed = RoutedFields(plain.schema, plain.widths, plain.mode, desk)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is plain:
                setattr(parent, name, routed)
