"""Labels of a known model: the logit of a sample is a function of its rows and dense columns.

A model with a perfect estimate of the logit reaches `best_auc`; no model does better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embroute.data.batch import Batch
from embroute.data.synthetic.sampling import ITEM, USER, piece
from embroute.kernels.array_types import F32, F64, I64
from embroute.kernels.jit import kernel
from embroute.kernels.memory import splitmix64

# Shares of the logit's variance: single rows, pairs of user and item rows, dense columns.
EFFECT_SHARES = (0.55, 0.30, 0.15)
NUM_FACTORS = 4  # of a row


@dataclass(frozen=True)
class Planted:
    """Effects of rows, user-item interactions and dense weights, scaled to a logit.

    `side` and `weight` are per field; `scale` and `bias` come from `fitted`.
    """

    side: I64
    weight: F64
    dense_weight: F32
    key: int
    scale: F64
    bias: float = 0.0

    def logit(self, batch: Batch) -> F64:
        """The true logit of every sample."""
        return self._parts(batch) @ self.scale + self.bias

    def probability(self, batch: Batch) -> F64:
        """The true probability that a sample's label is 1."""
        return sigmoid(self.logit(batch))

    def _parts(self, batch: Batch) -> F64:
        """Linear score, interaction and dense score of every sample."""
        parts = np.empty((len(batch), 3))
        rows_SF = batch.rows.reshape(len(batch), -1)
        planted_scores(rows_SF, self.side, self.weight, np.uint64(self.key), parts[:, :2])
        parts[:, 2] = batch.dense @ self.dense_weight
        return parts


def fitted(raw: Planted, pilot: Batch, signal: float, click_rate: float) -> Planted:
    """The model with a logit of standard deviation `signal` and a mean probability `click_rate`.

    Both hold on the pilot samples, and approximately on other samples.
    """
    parts = raw._parts(pilot)
    spread = parts.std(axis=0)
    share = np.where(spread > 0, EFFECT_SHARES, 0.0)
    scale = signal * np.sqrt(share / share.sum()) / np.where(spread > 0, spread, 1.0)
    scores = parts @ scale
    low, high = -40.0 - scores.max(), 40.0 - scores.min()
    # Bisection for the bias: the mean probability grows with the bias.
    for _ in range(60):
        middle = (low + high) / 2
        if sigmoid(scores + middle).mean() < click_rate:
            low = middle
        else:
            high = middle
    return Planted(raw.side, raw.weight, raw.dense_weight, raw.key, scale, (low + high) / 2)


def sigmoid(logit: F64) -> F64:
    """The logistic function."""
    return 0.5 * (1.0 + np.tanh(0.5 * logit))


def expected_auc(probability: F64) -> float:
    """Expected AUC of a ranking by the true probabilities, over random labels."""
    ranked = np.sort(probability)
    lost = 1.0 - ranked
    # Of each sample: pairs with lower samples, and half of the pair with itself, as for a tie.
    below = np.cumsum(lost) - lost
    return float((ranked * (below + 0.5 * lost)).sum() / (ranked.sum() * lost.sum()))


@kernel
def planted_scores(
    rows_SF: I64,
    side_F: I64,
    weight_F: F64,
    key: np.uint64,
    out_S2: F64,
) -> None:
    """Linear score and user-item interaction of samples, from effects hashed from row ids.

    The interaction is the inner product of the summed factors of user rows and of item rows.
    """
    # One row per side; the row of the context is written but never read.
    factors = np.empty((3, NUM_FACTORS))
    for s in range(rows_SF.shape[0]):
        linear = 0.0
        factors[:] = 0.0
        for f in range(rows_SF.shape[1]):
            first = splitmix64(np.uint64(rows_SF[s, f]) ^ key)
            second = splitmix64(first)
            for k in range(NUM_FACTORS):
                linear += weight_F[f] * piece(first, k)
                factors[side_F[f], k] += weight_F[f] * piece(second, k)
        out_S2[s, 0] = linear
        out_S2[s, 1] = (factors[USER] * factors[ITEM]).sum()
