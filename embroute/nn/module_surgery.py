"""Find the layers of a model to route, and replace them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from embroute.models.layers import FieldEmbeddings
from embroute.nn.embedding import LookupContext, RoutedFields, RoutedLayer
from embroute.nn.tensor_batches import LayerSpec

EmbeddingLayer = nn.Embedding | nn.EmbeddingBag
_MARK = "embroute_route"
_PER_BATCH = ("max_norm", "scale_grad_by_freq")  # options that depend on all samples of a batch


def route(layer: EmbeddingLayer, routed: bool = True) -> EmbeddingLayer:
    """Mark a layer of any size as routed, or as part of the dense model."""
    setattr(layer, _MARK, routed)
    return layer


@dataclass(frozen=True)
class RoutedModule:
    """A layer to route, and its module in the model."""

    spec: LayerSpec
    module: EmbeddingLayer

    @property
    def weight(self) -> torch.Tensor:
        """The rows of the table."""
        weight: torch.Tensor = self.module.weight
        return weight


def find_layers(model: nn.Module, min_rows: int) -> list[RoutedModule]:
    """The layers that are marked, have at least `min_rows` rows, or have sparse gradients."""
    modules = []
    if isinstance(model, nn.Embedding | nn.EmbeddingBag):
        raise ValueError("the model is an embedding layer itself: put it into a module of its own")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if getattr(module, _MARK, module.num_embeddings >= min_rows or module.sparse):
            modules.append(RoutedModule(_spec_of(name, module), module))
            continue
        if module.sparse:
            raise ValueError(
                f"{name}: sparse=True, and not routed; the dense part has no sparse form"
            )
        for option in _PER_BATCH:
            if value := getattr(module, option):
                reason = "depends on all samples of a batch, and no worker has all of them"
                raise ValueError(f"{name}: {option}={value} {reason}")
    if not modules:
        raise ValueError(
            f"the model has no nn.Embedding or nn.EmbeddingBag of at least {min_rows} rows; "
            f"mark smaller ones with embroute.route(layer), or lower min_rows"
        )
    _check_unshared(model, modules)
    return modules


def _check_unshared(model: nn.Module, modules: Sequence[RoutedModule]) -> None:
    """Refuse a table that another module uses too: the two copies would diverge."""
    by_weight = {id(entry.weight): entry for entry in modules}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            entry = by_weight.get(id(parameter))
            if entry is not None and entry.module is not module:
                raise ValueError(
                    f"{entry.spec.name}: its weight is {path}.{name} too; a routed table belongs "
                    f"to one layer only, which may be called several times"
                )
    if len({entry.weight.dtype for entry in modules}) > 1:
        types = ", ".join(f"{entry.spec.name} {entry.weight.dtype}" for entry in modules)
        raise ValueError(f"routed layers must have the same type of number, got {types}")


def _spec_of(name: str, module: EmbeddingLayer) -> LayerSpec:
    """The description of a layer; refuses layers without a routed form."""
    bag = isinstance(module, nn.EmbeddingBag)
    _check_lookup_only(name, module)
    for option in _PER_BATCH:
        if value := getattr(module, option):
            raise ValueError(f"{name}: {option}={value} has no routed form")
    mode = module.mode if isinstance(module, nn.EmbeddingBag) else "sum"
    if mode not in ("sum", "mean"):
        raise ValueError(f"{name}: mode must be sum or mean, got {mode!r}")
    padding = module.padding_idx
    if padding is not None and not module.weight.is_meta and bool(module.weight[padding].any()):
        raise ValueError(f"{name}: the row of padding_idx={padding} must be zeros")
    return LayerSpec(
        name=name,
        num_rows=module.num_embeddings,
        width=module.embedding_dim,
        bag=bag,
        mean=mode == "mean",
        padding=padding,
        last_offset=isinstance(module, nn.EmbeddingBag) and module.include_last_offset,
    )


def _check_lookup_only(name: str, module: EmbeddingLayer) -> None:
    """Refuse a layer that does more than look up rows: its replacement would not do it."""
    kind = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
    keep = f"embroute.route({name}, False) leaves the layer as it is"
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise ValueError(f"{name}: a forward() of its own has no routed form; {keep}")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, hook) for hook in hooks):
        raise ValueError(f"{name}: its hooks would not be called any more; {keep}")
    if is_parametrized(module):
        raise ValueError(f"{name}: a parametrized weight has no routed form; {keep}")
    if not module.weight.requires_grad:
        raise ValueError(f"{name}: its weight is frozen, but routed rows are trained; {keep}")
    if module.weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: rows must be float32 or float64, got {module.weight.dtype}")


def replace_layers(
    model: nn.Module, modules: Sequence[RoutedModule], lookup_context: LookupContext
) -> list[RoutedLayer]:
    """Replace layers by routed ones, under every name that the model has for them."""
    routed = {
        entry.module: RoutedLayer(entry.spec.name, table, entry.spec.mean, lookup_context)
        for table, entry in enumerate(modules)
    }
    # A layer may have several names: replace all of them.
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child in routed:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, routed[child])
    return list(routed.values())


def field_embeddings(model: nn.Module) -> FieldEmbeddings | None:
    """The tables of a built-in model; None for other models."""
    for module in model.modules():
        if isinstance(module, FieldEmbeddings):
            return module
    return None


def replace_fields(model: nn.Module, plain: FieldEmbeddings, lookup_context: LookupContext) -> None:
    """Replace `FieldEmbeddings` by `RoutedFields`."""
    routed = RoutedFields(plain.schema, plain.widths, plain.mode, lookup_context)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is plain:
                setattr(parent, name, routed)
