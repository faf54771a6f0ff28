"""Flatten nests of dicts, lists and tuples to a list of tensors, and build them again."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from embroute.config.spec import shown


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds all of its numbers in one dense memory."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta)


def _flatten(tree: object, leaves: list[torch.Tensor]) -> object:
    """The nest as JSON, in which a tensor is its number in `leaves`; appends to `leaves`."""
    if isinstance(tree, torch.Tensor):
        if not is_plain(tree):
            raise ValueError(
                f"a batch of loader or held_out has a tensor of shape {tuple(tree.shape)} that is "
                f"sparse, quantized or on the meta device; give dense tensors"
            )
        leaves.append(tree)
        return len(leaves) - 1
    if isinstance(tree, Mapping):
        if others := [key for key in tree if not isinstance(key, str)]:
            raise ValueError(
                f"a batch of loader or held_out has a dict with key {shown(others[0])}; names of "
                f"tensors must be text"
            )
        return {"dict": [[str(key), _flatten(value, leaves)] for key, value in tree.items()]}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        named = zip(tree._fields, tree, strict=True)
        fields = [[name, _flatten(value, leaves)] for name, value in named]
        return {type(tree).__name__: fields}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_flatten(value, leaves) for value in tree]}
    raise ValueError(
        f"a batch of loader or held_out may hold tensors in dicts, lists, tuples and "
        f"namedtuples, got {type(tree).__name__}"
    )


def flatten_batch(item: object) -> tuple[object, list[torch.Tensor]]:
    """The nest of a batch as JSON, and its tensors."""
    leaves: list[torch.Tensor] = []
    try:
        return _flatten(item, leaves), leaves
    except RecursionError:
        raise ValueError("a batch of loader or held_out is nested too deep, or in itself") from None


def unflatten(tree: object, leaves: Sequence[torch.Tensor]) -> object:
    """The inverse of `flatten_batch`."""
    if isinstance(tree, int):
        return leaves[tree]
    assert isinstance(tree, dict)
    ((kind, items),) = tree.items()
    if kind == "dict":
        return {key: unflatten(value, leaves) for key, value in items}
    if kind not in ("list", "tuple"):
        names = tuple(name for name, _ in items)
        return _named(kind, names)(*(unflatten(value, leaves) for _, value in items))
    values = [unflatten(value, leaves) for value in items]
    return values if kind == "list" else tuple(values)


@cache
def _named(kind: str, fields: tuple[str, ...]) -> Callable[..., object]:
    """A namedtuple's class with the same name and fields as the user's."""
    return namedtuple(kind, fields)
