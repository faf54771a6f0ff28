"""A graph with communities and a power law of degrees: `graph(nodes=100000, degree=10)`."""

from __future__ import annotations

import numpy as np

from embroute.config.spec import LARGEST_SEED, CallSpec, bind, parse_int, parse_number
from embroute.data.graph import EdgeSampling, Graph, GraphSource, distinct_edges
from embroute.kernels.array_types import I64

GRAPH = "graph"
EXPONENT = 2.5  # of the power law of degrees; most published graphs have 2 to 3


def community_graph(
    num_nodes: int, degree: float, communities: int, mixing: float, seed: int
) -> Graph:
    """A graph with about `degree` edges a node: a degree-corrected block model.

    Both ends of an edge are drawn by weight. The second end is of the first end's community, or
    for a share `mixing` of the edges of any community. (Chung and Lu 2002: weights rank^(-1/(x -
    1)) give degrees with a power law of exponent x; Karrer and Newman 2011.)
    """
    random = np.random.default_rng(seed)
    # Nodes by community; ids are shuffled at the end, so an id tells neither weight nor community.
    sizes = np.bincount(random.integers(0, communities, num_nodes), minlength=communities)
    ends_C = np.cumsum(sizes)
    rank_N = 1.0 + random.permutation(num_nodes)
    upto_N = np.concatenate([[0.0], np.cumsum(rank_N ** (-1 / (EXPONENT - 1)))])

    def drawn(low: I64, high: I64) -> I64:
        """A node in [low, high) for each pair, by weight."""
        weight = upto_N[low] + random.random(len(low)) * (upto_N[high] - upto_N[low])
        node: I64 = np.searchsorted(upto_N, weight, side="right") - 1
        return np.minimum(np.maximum(node, low), high - 1)

    num_edges = max(1, round(num_nodes * degree / 2))
    zero, every = np.zeros(num_edges, np.int64), np.full(num_edges, num_nodes)
    source = drawn(zero, every)
    community = np.searchsorted(ends_C, source, side="right")
    anywhere = random.random(num_edges) < mixing
    low = np.where(anywhere, 0, (ends_C - sizes)[community])
    target = drawn(low, np.where(anywhere, num_nodes, ends_C[community]))
    edge_E2 = random.permutation(num_nodes)[np.stack([source, target], 1)]
    return Graph(num_nodes, distinct_edges(edge_E2, num_nodes))


def open_graph(call: CallSpec) -> GraphSource:
    """The source of `graph(nodes=..., degree=...)`."""
    names = ("nodes", "degree", "communities", "mixing", "fanout", "negatives", "seed")
    text = bind(call, names)
    seed = parse_int("seed", text.get("seed", "0"), 0, LARGEST_SEED)
    graph = community_graph(
        parse_int("nodes", text.get("nodes", "100000"), 2, 10**7),
        parse_number("degree", text.get("degree", "10"), 0.1, 1000),
        parse_int("communities", text.get("communities", "50"), 1, 10**6),
        parse_number("mixing", text.get("mixing", "0.1"), 0, 1),
        seed,
    )
    if not len(graph.edge_E2):
        raise ValueError(f"{call.name}: no edges; give more nodes or a larger degree")
    fanout = parse_int("fanout", text.get("fanout", "10"), 1, 1000)
    negatives = parse_int("negatives", text.get("negatives", "1"), 0, 1000)
    return GraphSource(graph, EdgeSampling(fanout, negatives, seed))
