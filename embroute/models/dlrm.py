"""DLRM: dot products of all pairs of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.models.layers import EqualVectors, FieldEmbeddings, last_width, mlp
from embroute.models.samples import Samples


class DLRM(nn.Module):
    """DLRM (Naumov et al., 2019).

    A bottom MLP makes the dense columns one more vector; a top MLP reads that vector and the dot
    products of all pairs. Both MLPs have the same hidden layers.
    """

    def __init__(self, embeddings: FieldEmbeddings, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = embeddings
        num_dense, num_vectors = len(embeddings.schema.dense), len(embeddings.field_widths)
        if num_vectors < 2 and not num_dense:
            raise ValueError(
                f"dlrm needs two fields, or dense columns, to make pairs of; the data has "
                f"{num_vectors} field and no dense columns"
            )
        self.vectors = EqualVectors(embeddings.field_widths)
        width = self.vectors.width
        self.bottom = mlp(num_dense, (*hidden, width)) if num_dense else None
        inputs = num_vectors * (num_vectors - 1) // 2
        if num_dense:
            inputs += num_vectors + width
        self.top = mlp(inputs, hidden)
        self.last = nn.Linear(last_width(inputs, hidden), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        vectors, _ = self.vectors(self.embeddings, samples)
        inputs = []
        if self.bottom is not None:
            bottom = self.bottom(samples.dense)
            vectors = torch.cat([bottom[:, None], vectors], 1)
            inputs.append(bottom)
        inputs.append(pairs(vectors))
        logit: Tensor = self.last(self.top(torch.cat(inputs, 1)))
        return logit.squeeze(1)


def pairs(vectors: Tensor) -> Tensor:
    """Dot products of vectors i > j, ordered by i, then j."""
    count = vectors.shape[1]
    i, j = torch.tril_indices(count, count, -1, device=vectors.device)
    return (vectors @ vectors.mT)[:, i, j]
