"""What the built-in models are made of: samples, embedding tables by field, MLPs, projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embroute.data.schema import Schema

MODES = ("sum", "mean")


@dataclass(frozen=True)
class Samples:
    """Samples of a (micro-)batch as tensors; N samples, F fields, D dense columns, L look-ups.

    `label` is empty where the data has no label. `ids` are ids within their tables, or PADDING;
    on routed models `ids` is empty, because the routed layers read the rows.
    """

    dense: Tensor  # (N, D)
    label: Tensor  # (N,)
    ids: Tensor  # (L,) int64, sample-major, then field
    offsets: Tensor  # (N*F+1,) int64; sample s, field f: ids[offsets[s*F+f] : offsets[s*F+f+1]]
    num_fields: int

    def __len__(self) -> int:
        return len(self.dense)


class FieldEmbeddings(nn.Module):
    """One `nn.EmbeddingBag` a table; fields may share a table. Rows are zero until filled.

    `widths` are per table, `field_widths` per field. On the device "meta" tables take no memory.
    """

    def __init__(
        self,
        schema: Schema,
        widths: Sequence[int],
        mode: str = "sum",
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if len(widths) != len(schema.tables):
            raise ValueError(f"{len(widths)} widths for {len(schema.tables)} tables")
        self.schema, self.widths, self.mode = schema, tuple(widths), mode
        self.field_widths = tuple(self.widths[field.table] for field in schema.fields)
        # from_pretrained draws nothing from torch's generator. So the dense layers, built later,
        # get the same initial values for any size and device of the tables.
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                torch.zeros(table.num_rows, width, device=device),
                freeze=False,
                mode=mode,
                include_last_offset=True,
            )
            for table, width in zip(schema.tables, self.widths, strict=True)
        )

    @property
    def weights(self) -> list[Tensor]:
        """The tables' values."""
        return [table.get_parameter("weight") for table in self.tables]

    def forward(self, samples: Samples) -> list[Tensor]:
        """Pooled rows of each field, (N, width of its table); zeros where a bag is empty."""
        fields = zip(self.schema.fields, bags_by_field(samples), strict=True)
        return [self.tables[field.table](ids, offsets) for field, (ids, offsets) in fields]

    def unpooled(self, samples: Samples, field: int) -> tuple[Tensor, Tensor]:
        """Every row of a field's bags, sample by sample, and the number of rows in each bag."""
        ids, offsets = bags_by_field(samples)[field]
        weight = self.weights[self.schema.fields[field].table]
        return nn.functional.embedding(ids, weight), offsets.diff()

    def stacked(self, samples: Samples) -> Tensor:
        """Pooled rows of all fields, (N, F, width); the widths must be equal."""
        return torch.stack(self(samples), 1)


def bags_by_field(samples: Samples) -> list[tuple[Tensor, Tensor]]:
    """For each field: its ids without padding, and the N+1 offsets of its samples' bags."""
    # Look-ups are sample-major. A stable sort by field makes them field-major and keeps the order
    # of samples within a field.
    real = samples.ids >= 0
    num_before = torch.cat([real.new_zeros(1, dtype=torch.int64), real.cumsum(0)])
    lengths = num_before[samples.offsets].diff()
    bag = torch.repeat_interleave(lengths)
    order = torch.argsort(bag % samples.num_fields, stable=True)
    lengths_FN = lengths.view(len(samples), samples.num_fields).T
    ids = torch.split(samples.ids[real][order], lengths_FN.sum(1).tolist())
    ends_FN = lengths_FN.cumsum(1)
    offsets = torch.cat([ends_FN.new_zeros(samples.num_fields, 1), ends_FN], 1)
    return list(zip(ids, offsets, strict=True))


def mlp(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Linear layers, each with a ReLU; no layer if `hidden` is empty."""
    layers = nn.Sequential()
    for width_in, width_out in zip((inputs, *hidden), hidden, strict=False):
        layers.extend([nn.Linear(width_in, width_out), nn.ReLU()])
    return layers


def last_width(inputs: int, hidden: Sequence[int]) -> int:
    """Width of the output of `mlp(inputs, hidden)`."""
    return (inputs, *hidden)[-1]


def projections(widths: Sequence[int]) -> nn.ModuleList:
    """For each width a bias-free map to the largest width; the identity where they are equal."""
    widest = max(widths)
    return nn.ModuleList(
        nn.Identity() if width == widest else nn.Linear(width, widest, bias=False)
        for width in widths
    )


class EqualVectors(nn.Module):
    """Vectors of all fields at the largest width, and the extra columns of their records.

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
