"""The built-in click models: each reads embedding records and dense columns, and returns logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.models.layers import (
    EqualVectors,
    FieldEmbeddings,
    Samples,
    last_width,
    mlp,
    projections,
)

CROSS_LAYERS = 3


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al., DLRS 2016).

    A record is an embedding and, last, the id's weight in the wide part. The deep part reads the
    embeddings and the dense columns.
    """

    def __init__(self, embeddings: FieldEmbeddings, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = embeddings
        inputs = sum(width - 1 for width in embeddings.field_widths) + len(embeddings.schema.dense)
        self.deep = mlp(inputs, hidden)
        self.last = nn.Linear(last_width(inputs, hidden), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        records = self.embeddings(samples)
        wide = torch.stack([record[:, -1] for record in records]).sum(0)
        vectors = [record[:, :-1] for record in records]
        deep: Tensor = self.last(self.deep(torch.cat([*vectors, samples.dense], 1)))
        return wide + deep.squeeze(1)


class WideDeepHet(nn.Module):
    """The Wide & Deep of HET (Miao et al., VLDB 2022).

    The MLP reads the dense columns; the last layer reads its output and the embeddings. Without
    dense columns only the last layer remains.
    """

    def __init__(self, embeddings: FieldEmbeddings, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = embeddings
        num_dense = len(embeddings.schema.dense)
        deep_widths = tuple(hidden) if num_dense else ()
        # As published, the MLP's last layer is linear.
        self.deep = mlp(num_dense, deep_widths)[:-1]
        inputs = sum(embeddings.field_widths) + last_width(num_dense, deep_widths)
        self.last = nn.Linear(inputs, 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        inputs = [*self.embeddings(samples), self.deep(samples.dense)]
        logit: Tensor = self.last(torch.cat(inputs, 1))
        return logit.squeeze(1)


class DeepFM(nn.Module):
    """DeepFM (Guo et al., IJCAI 2017): a factorization machine and an MLP on the same embeddings.

    A record is an embedding and, last, the id's first-order weight. Dense columns have
    first-order weights, and the MLP reads them too.
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
        # The dot products of all pairs of fields, summed in time linear in the fields:
        # (sum of v)^2 counts every pair twice and every square once.
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        logit: Tensor = weights.sum((1, 2)) + pairs + deep.squeeze(1)
        if self.dense_weight is not None:
            logit = logit + self.dense_weight(samples.dense).squeeze(1)
        return logit


class DeepCross(nn.Module):
    """DCN-V2 (Wang et al., WWW 2021) with full-rank cross layers and a parallel deep part.

    A cross layer maps x to x0 * (W x + b) + x, where x0 are the embeddings and dense columns.
    """

    def __init__(self, embeddings: FieldEmbeddings, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = embeddings
        inputs = sum(embeddings.field_widths) + len(embeddings.schema.dense)
        self.cross = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(CROSS_LAYERS))
        self.deep = mlp(inputs, hidden)
        self.last = nn.Linear(inputs + last_width(inputs, hidden), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        x0 = torch.cat([*self.embeddings(samples), samples.dense], 1)
        x = x0
        for layer in self.cross:
            x = x0 * layer(x) + x
        logit: Tensor = self.last(torch.cat([x, self.deep(x0)], 1))
        return logit.squeeze(1)


class DLRM(nn.Module):
    """DLRM (Naumov et al., 2019): dot products of all pairs of embeddings.

    A bottom MLP turns the dense columns into one more vector; a top MLP reads that vector and the
    dot products of all pairs. Both MLPs have the same hidden layers.
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
            inputs += num_vectors + width  # a pair with each vector, and the vector itself
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
        count = vectors.shape[1]
        i, j = torch.tril_indices(count, count, -1, device=vectors.device)
        inputs.append((vectors @ vectors.mT)[:, i, j])
        logit: Tensor = self.last(self.top(torch.cat(inputs, 1)))
        return logit.squeeze(1)


class NCF(nn.Module):
    """NeuMF (He et al., WWW 2017): generalized matrix factorization and an MLP.

    The first two fields are user and item; other fields are ignored. The first half of a record is
    the factor, the second half the MLP's input. Dense columns, which the paper's data does not
    have, join the MLP's input.
    """

    def __init__(self, embeddings: FieldEmbeddings, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = embeddings
        num_fields = embeddings.schema.num_fields
        if num_fields < 2:
            raise ValueError(f"ncf needs two fields, user and item; the data has {num_fields}")
        widths = [width // 2 for width in embeddings.field_widths[:2]]
        self.factors = projections(widths)
        inputs = sum(widths) + len(embeddings.schema.dense)
        self.deep = mlp(inputs, hidden)
        self.last = nn.Linear(max(widths) + last_width(inputs, hidden), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        user, item = (record.chunk(2, 1) for record in self.embeddings(samples)[:2])
        product = self.factors[0](user[0]) * self.factors[1](item[0])
        deep = self.deep(torch.cat([user[1], item[1], samples.dense], 1))
        logit: Tensor = self.last(torch.cat([product, deep], 1))
        return logit.squeeze(1)
