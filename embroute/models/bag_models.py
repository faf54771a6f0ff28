"""Models of bags: attention over a user's history, and sampled neighbours of a graph's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from embroute.models.layers import FieldEmbeddings, Samples, last_width, mlp, projections

ATTENTION = (36,)  # hidden widths of DIN's attention unit, as published


class DIN(nn.Module):
    """Deep Interest Network (Zhou et al., KDD 2018): each bag is a history of the user.

    A history's target is the first field of one id in the table of the history; without such a
    field, the first field of one id. An attention unit weighs every id of the history by its
    vector, the target's vector, their difference and their product. As published, the weights are
    not normalized, so a long history of interest weighs more. An MLP reads the weighted sums, the
    other embeddings and the dense columns.
    """

    def __init__(self, embeddings: FieldEmbeddings, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = embeddings
        fields = list(enumerate(embeddings.schema.fields))
        self.single = [i for i, field in fields if not field.bag]
        if len(self.single) in (0, len(fields)):
            raise ValueError(
                "din needs a bag of ids, the history, and a field of one id, the target: name the "
                "bag with --bag, or use online-retail(negatives=1, history=20)"
            )
        # min keeps the first of equals: False, of an equal table, sorts before True.
        self.targets = {
            i: min(self.single, key=lambda one: fields[one][1].table != bag.table)
            for i, bag in fields
            if bag.bag
        }
        widths = embeddings.field_widths
        self.maps, width = projections(widths), max(widths)
        self.attention = nn.ModuleList(
            nn.Sequential(*mlp(4 * width, ATTENTION), nn.Linear(ATTENTION[-1], 1))
            for _ in self.targets
        )
        inputs = sum(widths[i] for i in self.single) + len(self.targets) * width
        inputs += len(embeddings.schema.dense)
        self.deep = mlp(inputs, hidden)
        self.last = nn.Linear(last_width(inputs, hidden), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        records = self.embeddings(samples)
        inputs = [records[i] for i in self.single]
        for (history, target), unit in zip(self.targets.items(), self.attention, strict=True):
            query = self.maps[target](records[target])
            rows, lengths = self.embeddings.unpooled(samples, history)
            rows = self.maps[history](rows)
            sample = torch.repeat_interleave(lengths)
            pair = query[sample]
            weights = unit(torch.cat([rows, pair, rows - pair, rows * pair], 1))
            inputs.append(torch.zeros_like(query).index_add(0, sample, weights * rows))
        logit: Tensor = self.last(self.deep(torch.cat([*inputs, samples.dense], 1)))
        return logit.squeeze(1)


class GraphSage(nn.Module):
    """GraphSAGE (Hamilton et al., NeurIPS 2017) with one layer and the mean aggregator, for links.

    The first two fields of one id are the ends of an edge. The first bag holds sampled neighbours
    of the first end, the second bag those of the second; other fields are ignored. An end is the
    ReLU of a linear map of its vector and its neighbours' mean, at length 1; ends of one table
    share the map. An MLP reads the product of both ends, and the dense columns.
    """

    def __init__(self, embeddings: FieldEmbeddings, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = embeddings
        fields = embeddings.schema.fields
        self.ends = [i for i, field in enumerate(fields) if not field.bag][:2]
        self.bags = [i for i, field in enumerate(fields) if field.bag][:2]
        if len(self.ends) < 2 or not self.bags:
            raise ValueError(
                "graphsage needs two fields of one id, the ends of an edge, and bags of their "
                "neighbours: use graph(nodes=100000), or --format edges for a file"
            )
        widths = embeddings.field_widths
        self.maps, width = projections(widths), max(widths)
        tables = [fields[end].table for end in self.ends]
        layer = partial(nn.Linear, 2 * width, width, bias=False)
        self.combine = nn.ModuleList(layer() for _ in dict.fromkeys(tables))
        self.map_of_end = [0, len(self.combine) - 1]
        inputs = width + len(embeddings.schema.dense)
        self.deep = mlp(inputs, hidden)
        self.last = nn.Linear(last_width(inputs, hidden), 1)

    def forward(self, samples: Samples) -> Tensor:
        """Logits (N,)."""
        records, product = self.embeddings(samples), None
        for number, end in enumerate(self.ends):
            vector = self.maps[end](records[end])
            mean = self._mean(samples, number, vector)
            combined = self.combine[self.map_of_end[number]](torch.cat([vector, mean], 1))
            out = nn.functional.normalize(combined.relu(), dim=1)
            product = out if product is None else product * out
        assert product is not None
        logit: Tensor = self.last(self.deep(torch.cat([product, samples.dense], 1)))
        return logit.squeeze(1)

    def _mean(self, samples: Samples, number: int, vector: Tensor) -> Tensor:
        """The mean of an end's neighbours; zeros where it has none."""
        if number >= len(self.bags):
            return torch.zeros_like(vector)
        rows, lengths = self.embeddings.unpooled(samples, self.bags[number])
        rows = self.maps[self.bags[number]](rows)
        total = torch.zeros_like(vector).index_add(0, torch.repeat_interleave(lengths), rows)
        return total / lengths.clamp(min=1)[:, None]
