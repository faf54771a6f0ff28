"""Wide & Deep: a weight for every id beside an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.models.embeddings import FieldEmbeddings
from embroute.models.layers import last_width, mlp
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
