"""Neural collaborative filtering: a user and an item, multiplied and through an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embroute.data.schema import Schema
from embroute.models.layers import FieldEmbeddings, last_width, mlp, projections
from embroute.models.samples import Samples


class NCF(nn.Module):
    """NeuMF (He et al., WWW 2017): generalized matrix factorization and an MLP.

    The first half of a record is the factor, the second half the MLP's input; dense columns,
    which the paper's data has not, join the MLP's input. Fields other than the two are ignored.
    """

    def __init__(
        self, embeddings: FieldEmbeddings, hidden: Sequence[int], fields: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.fields = two_fields(embeddings.schema, fields)
        widths = [embeddings.field_widths[field] // 2 for field in self.fields]
        self.factors = projections(widths)
        inputs = sum(widths) + len(embeddings.schema.dense)
        self.deep = mlp(inputs, hidden)
        self.last = nn.Linear(max(widths) + last_width(inputs, hidden), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        records = self.embeddings(samples)
        user, item = (records[field].chunk(2, 1) for field in self.fields)
        product = self.factors[0](user[0]) * self.factors[1](item[0])
        deep = self.deep(torch.cat([user[1], item[1], samples.dense], 1))
        logit: Tensor = self.last(torch.cat([product, deep], 1))
        return logit.squeeze(1)


def two_fields(schema: Schema, names: Sequence[str]) -> tuple[int, int]:
    """Positions of the user field and the item field; the first two unless named."""
    known = [field.name for field in schema.fields]
    if len(known) < 2:
        raise ValueError(f"ncf needs two fields, user and item; the data has {len(known)}")
    chosen = tuple(names) or tuple(known[:2])
    if len(set(chosen)) != 2 or not set(chosen) <= set(known):
        raise ValueError(f"ncf needs two fields of {', '.join(known)}; got {', '.join(chosen)}")
    return known.index(chosen[0]), known.index(chosen[1])
