"""Drawing row ids from power laws, and the planted score of samples.

Axes: S samples, F fields, D dense columns.
"""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import F64, I64, U64
from embroute.kernels.jit import kernel
from embroute.kernels.memory import splitmix64

USER, ITEM, CONTEXT, TIME_SIDE = 0, 1, 2, 3  # what of a sample a field describes
NUM_FACTORS = 4

# Columns of the constants of a field.
LAW_START, REACH, POWER, SHIFT, TOP, LAW_TAIL = 0, 1, 2, 3, 4, 5
NUM_ROWS, SIDE, FIRST_ROW, MULTIPLIER, JUMP, SHUFFLE, TURN_PERIOD = 0, 1, 2, 3, 4, 5, 6


@kernel
def power_law_rank(uniform: float, even: bool, num_rows: int, law: F64) -> int:
    """A rank in [0, num_rows) at a place of the field's law: even, the top, or bounded Pareto."""
    if even:
        return int(uniform * num_rows)
    if uniform < law[TOP]:
        return 0
    place = (uniform - law[TOP]) / (1.0 - law[TOP])
    rank = int((law[LAW_START] + place * law[REACH]) ** law[POWER] - law[SHIFT])
    return min(rank, num_rows - 1)


@kernel
def shuffled(place: float, num_groups: int, multiplier: int) -> float:
    """Let the groups, equal parts of [0, 1), change places; what lies within one stays together."""
    scaled = place * num_groups
    group = min(int(scaled), num_groups - 1)
    return (group * multiplier % num_groups + (scaled - group)) / num_groups


@kernel
def drifted_rank(rank: int, num_rows: int, turns: float, jump: int) -> int:
    """The rank whose id has taken this rank's place after `turns` turnovers of all ranks.

    Ranks turn over one by one, each at its own moment of a turnover.
    """
    phase = float(splitmix64(np.uint64(rank)) >> np.uint64(11)) / 2.0**53
    return (rank + int(turns + phase) * jump) % num_rows


@kernel
def sample_rows(
    bits_SF: U64,
    place_S2: F64,
    parent_S: I64,
    laws_F: tuple[F64, I64],
    mixing: tuple[int, float, int, float],
    rows_SF: I64,
) -> None:
    """Row ids of samples whose users and items are given as places in [0, 1), into `rows_SF`.

    A field of the user or the item has the row at this place of its law, its groups shuffled, or
    with probability 1 - correlation any row. A clock goes from row to row as samples pass. A
    sample with a parent (an earlier sample, else -1) has its user: place and rows. `mixing` is
    (groups, correlation, number of the first sample, turns a sample).
    """
    law_FC, size_FC = laws_F
    num_groups, correlation, start, turns_a_sample = mixing
    for s in range(bits_SF.shape[0]):
        parent = parent_S[s]
        if parent >= 0:
            place_S2[s, USER] = place_S2[parent, USER]
        turns = turns_a_sample * (start + s)
        for f in range(bits_SF.shape[1]):
            side = size_FC[f, SIDE]
            if parent >= 0 and side == USER:
                rows_SF[s, f] = rows_SF[parent, f]
                continue
            bits, num_rows = bits_SF[s, f], size_FC[f, NUM_ROWS]
            place = float(bits >> np.uint64(32)) / 2.0**32
            if side < CONTEXT and piece(bits, 0) + 0.5 < correlation:
                place = shuffled(place_S2[s, side], num_groups, size_FC[f, SHUFFLE])
            even = piece(bits, 1) + 0.5 < law_FC[f, LAW_TAIL]
            rank = power_law_rank(place, even, num_rows, law_FC[f])
            if side == TIME_SIDE:
                rank = (start + s) // size_FC[f, TURN_PERIOD] % num_rows
            # A top is most often the missing value, which does not go out of fashion.
            if side == ITEM and (rank > 0 or law_FC[f, TOP] == 0.0):
                rank = drifted_rank(rank, num_rows, turns, size_FC[f, JUMP])
            # A bijection of [0, num_rows), so that popular ids are not simply 0, 1, 2.
            scrambled = (rank * size_FC[f, MULTIPLIER] + size_FC[f, JUMP]) % num_rows
            rows_SF[s, f] = size_FC[f, FIRST_ROW] + scrambled


@kernel
def piece(bits: np.uint64, number: int) -> float:
    """One of four 16-bit pieces of a hash, as a number between -1/2 and 1/2."""
    return (float((bits >> np.uint64(16 * number)) & np.uint64(0xFFFF)) - 32767.5) / 65536.0


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
    # One row a side: what a field of the context adds is never read.
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
