"""Deep & Cross: layers that multiply features, beside an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.models.layers import FieldEmbeddings, last_width, mlp
from embroute.models.samples import Samples


class DeepCross(nn.Module):
    """DCN-V2 (Wang et al., WWW 2021) with full-rank cross layers and a parallel deep part.

    A cross layer maps x to x0 * (W x + b) + x, where x0 are the embeddings and dense columns.
    """

    def __init__(
        self, embeddings: FieldEmbeddings, hidden: Sequence[int], cross_layers: int
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        inputs = sum(embeddings.field_widths) + len(embeddings.schema.dense)
        self.cross = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(cross_layers))
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
