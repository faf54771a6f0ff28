"""Layers that several models share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.models.embeddings import FieldEmbeddings
from embroute.models.samples import Samples


def mlp(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Linear layers, each with a ReLU; nothing if `hidden` is empty."""
    layers = nn.Sequential()
    for width_in, width_out in zip((inputs, *hidden), hidden, strict=False):
        layers.extend([nn.Linear(width_in, width_out), nn.ReLU()])
    return layers


def last_width(inputs: int, hidden: Sequence[int]) -> int:
    """Width of what `mlp(inputs, hidden)` returns."""
    return (inputs, *hidden)[-1]


def projections(widths: Sequence[int]) -> nn.ModuleList:
    """For each width a bias-free map to the largest, where it differs."""
    widest = max(widths)
    return nn.ModuleList(
        nn.Identity() if width == widest else nn.Linear(width, widest, bias=False)
        for width in widths
    )


class EqualVectors(nn.Module):
    """Vectors of all fields at the largest width, and what a record holds beside its vector.

    The last `extra` columns of a record are not part of the vector.
    """

    def __init__(self, field_widths: Sequence[int], extra: int = 0) -> None:
        super().__init__()
        vector_widths = [width - extra for width in field_widths]
        self.width, self.extra = max(vector_widths), extra
        self.equal = len(set(vector_widths)) == 1
        self.projections = projections(vector_widths)

    def forward(self, embeddings: FieldEmbeddings, samples: Samples) -> tuple[Tensor, Tensor]:
        """Vectors (N, F, width) and the rest of the records (N, F, extra)."""
        if self.equal:
            return self._split(embeddings.stacked(samples))
        pairs = [self._split(record) for record in embeddings(samples)]
        vectors = [
            project(vector) for project, (vector, _) in zip(self.projections, pairs, strict=True)
        ]
        return torch.stack(vectors, 1), torch.stack([rest for _, rest in pairs], 1)

    def _split(self, record: Tensor) -> tuple[Tensor, Tensor]:
        at = record.shape[-1] - self.extra
        return record[..., :at], record[..., at:]
