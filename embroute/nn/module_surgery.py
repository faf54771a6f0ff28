"""Which layers of a model are routed, and what takes their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from embroute.models.layers import FieldEmbeddings
from embroute.nn.embedding import LookupContext, RoutedFields, RoutedLayer
from embroute.nn.tensor_batches import LayerSpec

Plain = nn.Embedding | nn.EmbeddingBag
_MARK = "embroute_route"
_PER_BATCH = ("max_norm", "scale_grad_by_freq")  # what a layer makes of all samples of a batch


def route(layer: Plain, routed: bool = True) -> Plain:
    """Mark a layer as routed, or as part of the dense model, whatever its size."""
    setattr(layer, _MARK, routed)
    return layer


@dataclass(frozen=True)
class RoutedModule:
    """A routed layer, and where its module sits in the model."""

    layer: LayerSpec
    module: Plain

    @property
    def weight(self) -> torch.Tensor:
        """The table."""
        weight: torch.Tensor = self.module.weight
        return weight


def find_layers(model: nn.Module, min_rows: int) -> list[RoutedModule]:
    """Layers that were marked, have at least `min_rows` rows, or have sparse gradients."""
    found = []
    if isinstance(model, nn.Embedding | nn.EmbeddingBag):
        raise ValueError("the model is an embedding layer itself: put it into a module of its own")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if getattr(module, _MARK, module.num_embeddings >= min_rows or module.sparse):
            found.append(RoutedModule(_layer(name, module), module))
            continue
        if module.sparse:
            raise ValueError(
                f"{name}: sparse=True, and not routed; the dense part has no sparse form"
            )
        for option in _PER_BATCH:
            if value := getattr(module, option):
                raise ValueError(f"{name}: {option}={value} depends on who computes a sample")
    if not found:
        raise ValueError(
            f"the model has no nn.Embedding or nn.EmbeddingBag of at least {min_rows} rows; "
            f"mark smaller ones with embroute.route(layer), or lower min_rows"
        )
    _check_alone(model, found)
    return found


def _check_alone(model: nn.Module, found: Sequence[RoutedModule]) -> None:
    """A table that something else uses too would be trained apart from it."""
    own = {id(entry.weight): entry for entry in found}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            entry = own.get(id(parameter))
            if entry is not None and entry.module is not module:
                raise ValueError(
                    f"{entry.layer.name}: its weight is {path}.{name} too; rows travel for one "
                    f"layer only (which may be called several times)"
                )
    if len({entry.weight.dtype for entry in found}) > 1:
        types = ", ".join(f"{entry.layer.name} {entry.weight.dtype}" for entry in found)
        raise ValueError(f"routed layers must have the same type of number, got {types}")


def _layer(name: str, module: Plain) -> LayerSpec:
    """What is known of a layer; refuses what rows that travel cannot do."""
    bag = isinstance(module, nn.EmbeddingBag)
    _check_plain(name, module)
    for option in _PER_BATCH:
        if value := getattr(module, option):
            raise ValueError(f"{name}: {option}={value} has no routed form")
    mode = module.mode if isinstance(module, nn.EmbeddingBag) else "sum"
    if mode not in ("sum", "mean"):
        raise ValueError(f"{name}: mode must be sum or mean, got {mode!r}")
    padding = module.padding_idx
    if padding is not None and not module.weight.is_meta and bool(module.weight[padding].any()):
        raise ValueError(f"{name}: the row of padding_idx={padding} must be zeros")
    rows, width = module.num_embeddings, module.embedding_dim
    last = isinstance(module, nn.EmbeddingBag) and module.include_last_offset
    return LayerSpec(name, rows, width, bag, mode == "mean", padding, last)


def _check_plain(name: str, module: Plain) -> None:
    """Refuse a layer that does more than to look rows up: what takes its place would not."""
    kind = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
    keep = f"embroute.route({name}, False) leaves the layer as it is"
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise ValueError(f"{name}: a forward() of its own has no routed form; {keep}")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, each) for each in hooks):
        raise ValueError(f"{name}: its hooks would not be called any more; {keep}")
    if is_parametrized(module):
        raise ValueError(f"{name}: a parametrized weight has no routed form; {keep}")
    if not module.weight.requires_grad:
        raise ValueError(f"{name}: its weight is frozen, and rows that travel are trained; {keep}")
    if module.weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: rows must be float32 or float64, got {module.weight.dtype}")


def replace_layers(
    model: nn.Module, found: Sequence[RoutedModule], lookup_context: LookupContext
) -> list[RoutedLayer]:
    """Put routed layers in the place of plain ones, wherever the model names them."""
    routed = {
        entry.module: RoutedLayer(entry.layer.name, table, entry.layer.mean, lookup_context)
        for table, entry in enumerate(found)
    }
    # Every name of a layer, also where it has several.
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child in routed:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, routed[child])
    return list(routed.values())


def field_embeddings(model: nn.Module) -> FieldEmbeddings | None:
    """The tables of one of embroute's own models."""
    for module in model.modules():
        if isinstance(module, FieldEmbeddings):
            return module
    return None


def replace_fields(model: nn.Module, plain: FieldEmbeddings, lookup_context: LookupContext) -> None:
    """Put `RoutedFields` in the place of `FieldEmbeddings`."""
    routed = RoutedFields(plain.schema, plain.widths, plain.mode, lookup_context)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is plain:
                setattr(parent, name, routed)
