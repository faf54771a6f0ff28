"""Wide & Deep, and the variant that HET trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.models.layers import FieldEmbeddings, last_width, mlp
from embroute.models.samples import Samples


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
        used = tuple(hidden) if num_dense else ()
        # As published, the MLP's last layer is linear.
        self.deep = mlp(num_dense, used)[:-1]
        self.last = nn.Linear(sum(embeddings.field_widths) + last_width(num_dense, used), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        inputs = [*self.embeddings(samples), self.deep(samples.dense)]
        logit: Tensor = self.last(torch.cat(inputs, 1))
        return logit.squeeze(1)
