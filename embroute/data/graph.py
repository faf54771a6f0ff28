"""Edges of a graph as samples: the two ends, and a bag of sampled neighbours of each.

Axes: E edges, N nodes, 2: the ends of an edge, P places. A place is one end of an edge, seen from
the other: edge e has the places 2e and 2e + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from embroute.data.batch import Batch, one_hot, positions_of, with_bags
from embroute.data.schema import Field, Schema, Table
from embroute.kernels.array_types import I64

CHUNK_EDGES = 16_384


@dataclass(frozen=True)
class EdgeSampling:
    """Neighbours of an end at most, drawn edges for each edge, and the seed of the draws."""

    fanout: int = 10
    negatives: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Graph:
    """Distinct undirected edges in order, without loops."""

    num_nodes: int
    edge_E2: I64

    @cached_property
    def by_owner(self) -> tuple[I64, I64]:
        """Places sorted by owner, then edge: a sort key of each, and the node at the other end."""
        owner_P, other_P = self.edge_E2.ravel(), self.edge_E2[:, ::-1].ravel()
        order = np.argsort(owner_P, kind="stable")
        return owner_P[order] * len(order) + order, other_P[order]

    def before(self, node_S: I64, edge_S: I64) -> tuple[I64, I64]:
        """The first place of each node, and the number of its edges before an edge."""
        key_P, _ = self.by_owner
        first_S = np.searchsorted(key_P, node_S * len(key_P))
        return first_S, np.searchsorted(key_P, node_S * len(key_P) + 2 * edge_S) - first_S


def distinct_edges(edge_E2: I64, num_nodes: int) -> I64:
    """The edges in their order, without loops and without repetition in any direction."""
    low, high = edge_E2.min(1), edge_E2.max(1)
    _, first = np.unique(low * num_nodes + high, return_index=True)
    first = np.sort(first)
    distinct: I64 = edge_E2[first[low[first] != high[first]]]
    return distinct


class GraphSource:
    """Every edge in order (label 1), among `negatives` drawn edges (label 0).

    A drawn edge has the first end of the real edge, and an end of any edge, by degree, as its
    second end; it may be an edge of the graph. The neighbours of an end come from earlier edges
    only: at most `fanout`, all of them if there are few, otherwise drawn with repetition, as in
    GraphSAGE. So no sample, and no held-out edge, is known from the neighbours of its own ends.
    """

    def __init__(self, graph: Graph, sampling: EdgeSampling) -> None:
        self.graph, self.sampling = graph, sampling

    @property
    def schema(self) -> Schema:
        """One table, of nodes, for all four fields."""
        fanout, ends = self.sampling.fanout, ("source", "target")
        bags = (Field(f"{end}_neighbours", 0, True, fanout) for end in ends)
        fields = (*(Field(end, 0) for end in ends), *bags)
        tables = (Table("node", self.graph.num_nodes),)
        return Schema(tables, fields, labelled=self.sampling.negatives > 0)

    @property
    def num_samples(self) -> int:
        """Edges and drawn edges."""
        return len(self.graph.edge_E2) * (1 + self.sampling.negatives)

    def chunks(self) -> Iterator[Batch]:
        """One pass in order."""
        for number, start in enumerate(range(0, len(self.graph.edge_E2), CHUNK_EDGES)):
            edges = np.arange(start, min(start + CHUNK_EDGES, len(self.graph.edge_E2)))
            yield self._chunk(edges, np.random.default_rng([self.sampling.seed, number]))

    def _chunk(self, edges: I64, random: np.random.Generator) -> Batch:
        edge_E2, copies = self.graph.edge_E2, 1 + self.sampling.negatives
        edge_S = np.repeat(edges, copies)
        # The real edge comes at a random place: the number of a sample must not tell its label.
        real = np.arange(copies) == random.integers(0, copies, (len(edges), 1))
        label = real.ravel().astype(np.float32)
        ends = edge_E2[edge_S].copy()
        drawn = edge_E2.ravel()[random.integers(0, edge_E2.size, len(ends))]
        ends[:, 1] = np.where(label > 0, ends[:, 1], drawn)
        bags = [self._neighbours(ends[:, end], edge_S, random) for end in (0, 1)]
        return with_bags(one_hot(ends, label=label if copies > 1 else None), bags)

    def _neighbours(self, node_S: I64, edge_S: I64, random: np.random.Generator) -> tuple[I64, I64]:
        """Sampled neighbours of nodes from the edges before an edge, and their numbers."""
        first_S, degree_S = self.graph.before(node_S, edge_S)
        lengths = np.minimum(degree_S, self.sampling.fanout)
        within = positions_of(np.zeros_like(lengths), lengths)
        degree = np.repeat(degree_S, lengths)
        drawn = random.integers(0, np.maximum(degree, 1))
        place = np.where(degree > self.sampling.fanout, drawn, within)
        return self.graph.by_owner[1][np.repeat(first_S, lengths) + place], lengths
