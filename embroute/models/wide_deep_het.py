"""Wide & Deep as HET trains it: embeddings meet the MLP only in the last layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.models.embeddings import FieldEmbeddings
from embroute.models.layers import last_width, mlp
from embroute.models.samples import Samples


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
