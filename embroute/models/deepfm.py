"""DeepFM: a factorization machine and an MLP over the same embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.models.layers import EqualVectors, FieldEmbeddings, last_width, mlp
from embroute.models.samples import Samples


class DeepFM(nn.Module):
    """DeepFM (Guo et al., IJCAI 2017).

    A record is an embedding and, last, the id's first-order weight. Dense columns have
    first-order weights and are read by the MLP.
    """

    def __init__(self, embeddings: FieldEmbeddings, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = embeddings
        num_dense = len(embeddings.schema.dense)
        self.vectors = EqualVectors(embeddings.field_widths, extra=1)
        self.dense_weight = nn.Linear(num_dense, 1, bias=False) if num_dense else None
        inputs = len(embeddings.field_widths) * self.vectors.width + num_dense
        self.deep = mlp(inputs, hidden)
        self.last = nn.Linear(last_width(inputs, hidden), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        vectors, weights = self.vectors(self.embeddings, samples)
        deep: Tensor = self.last(self.deep(torch.cat([vectors.flatten(1), samples.dense], 1)))
        logit: Tensor = weights.sum((1, 2)) + pair_products(vectors) + deep.squeeze(1)
        if self.dense_weight is not None:
            logit = logit + self.dense_weight(samples.dense).squeeze(1)
        return logit


def pair_products(vectors: Tensor) -> Tensor:
    """Sum of the dot products of all pairs of fields, in time linear in the fields."""
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
