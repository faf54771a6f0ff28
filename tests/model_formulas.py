"""The logit of every built-in model for one sample, by its published formula."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import cast

import numpy as np
from torch import Tensor, nn

from embroute.kernels.array_types import F64
from embroute.models.registry import MODELS

Reference = Callable[[nn.Module, list[F64], F64], float]


def array(value: Tensor | nn.Module) -> F64:
    assert isinstance(value, Tensor)
    return value.detach().numpy()


def through(module: nn.Module | Tensor | None, x: F64) -> F64:
    """Linear maps and ReLUs by their definitions."""
    assert isinstance(module, nn.Module)
    if isinstance(module, nn.Sequential):
        for layer in module:
            x = through(layer, x)
    elif isinstance(module, nn.Linear):
        x = array(module.weight) @ x + (0 if module.bias is None else array(module.bias))
    elif not isinstance(module, nn.Identity):
        assert isinstance(module, nn.ReLU)
        x = np.where(x > 0, x, 0)
    return x


def widened(maps: nn.Module | Tensor, vectors: list[F64]) -> list[F64]:
    """Vectors mapped to the largest width by their matrix."""
    widest = max(map(len, vectors))
    pairs = zip(cast(nn.ModuleList, maps), vectors, strict=True)
    return [x if len(x) == widest else array(one.weight) @ x for one, x in pairs]


def wide_deep(model: nn.Module, records: list[F64], dense: F64) -> float:
    x = np.concatenate([record[:-1] for record in records] + [dense])
    wide = sum(record[-1] for record in records)
    return float(wide + through(model.last, through(model.deep, x))[0])


def deepfm(model: nn.Module, records: list[F64], dense: F64) -> float:
    vectors = widened(cast(nn.Module, model.vectors).projections, [r[:-1] for r in records])
    logit = sum(record[-1] for record in records)
    logit += sum(float(a @ b) for a, b in combinations(vectors, 2))
    if len(dense):
        logit += through(model.dense_weight, dense)[0]
    x = np.concatenate([*vectors, dense])
    return float(logit + through(model.last, through(model.deep, x))[0])


def dcn(model: nn.Module, records: list[F64], dense: F64) -> float:
    x0 = np.concatenate([*records, dense])
    x = x0
    for layer in cast(nn.ModuleList, model.cross):
        x = np.array([x0[k] * through(layer, x)[k] + x[k] for k in range(len(x0))])
    return float(through(model.last, np.concatenate([x, through(model.deep, x0)]))[0])


def dlrm(model: nn.Module, records: list[F64], dense: F64) -> float:
    vectors = widened(cast(nn.Module, model.vectors).projections, records)
    top = np.zeros(0)
    if len(dense):
        top = through(model.bottom, dense)
        vectors = [top, *vectors]
    dots = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
    return float(through(model.last, through(model.top, np.concatenate([top, dots])))[0])


def ncf(model: nn.Module, records: list[F64], dense: F64) -> float:
    user, item = records[:2]
    m, n = len(user) // 2, len(item) // 2
    product = np.prod(widened(model.factors, [user[:m], item[:n]]), 0)
    deep = through(model.deep, np.concatenate([user[m:], item[n:], dense]))
    return float(through(model.last, np.concatenate([product, deep]))[0])


def wide_deep_het(model: nn.Module, records: list[F64], dense: F64) -> float:
    deep = dense
    if len(dense):
        first, second = (
            layer for layer in cast(nn.Sequential, model.deep) if hasattr(layer, "bias")
        )
        deep = through(second, np.maximum(through(first, dense), 0))
    return float(through(model.last, np.concatenate([*records, deep]))[0])


def din(model: nn.Module, rows: list[F64], dense: F64) -> float:
    """`seen` is the history of `i`, whose table it shares."""
    (u,), (i,), history, (p,) = (bag if len(bag) else np.zeros((1, bag.shape[1])) for bag in rows)
    maps, unit = cast(nn.ModuleList, model.maps), cast(nn.ModuleList, model.attention)[0]
    query = through(maps[1], i)
    interest = np.zeros_like(query)
    for row in history:
        h = through(maps[2], row)
        interest += through(unit, np.concatenate([h, query, h - query, h * query])) * h
    x = np.concatenate([u, i, p, interest, dense])
    return float(through(model.last, through(model.deep, x))[0])


def graphsage(model: nn.Module, rows: list[F64], dense: F64) -> float:
    """`u` and `i` are the ends, `seen` the neighbours of `u`; `i` has none."""
    (u,), (i,) = (bag if len(bag) else np.zeros((1, bag.shape[1])) for bag in rows[:2])
    maps, combine = cast(nn.ModuleList, model.maps), cast(nn.ModuleList, model.combine)
    ends, seen = [through(maps[0], u), through(maps[1], i)], [through(maps[2], n) for n in rows[2]]
    means = [sum(seen, np.zeros_like(ends[0])) / max(1, len(seen)), np.zeros_like(ends[1])]
    product = np.ones_like(ends[0])
    for number in (0, 1):
        out = np.maximum(through(combine[number], np.append(ends[number], means[number])), 0)
        product *= out / max(1e-12, float(np.sqrt(out @ out)))
    return float(through(model.last, through(model.deep, np.append(product, dense)))[0])


FORMULAS: tuple[Reference, ...] = (wide_deep, deepfm, dcn, dlrm, ncf, wide_deep_het, din, graphsage)
REFERENCES = dict(zip(MODELS, FORMULAS, strict=True))
UNPOOLED = {"din", "graphsage"}  # read the rows of bags one by one
