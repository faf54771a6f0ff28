"""Drawing row ids of samples from power laws.

Axes: S samples, F fields, C constants of a field's law, 2: user and item.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import F64, I64, U64
from embroute.kernels.jit import kernel
from embroute.kernels.memory import splitmix64

USER, ITEM, CONTEXT, TIME_SIDE = 0, 1, 2, 3  # the side of a sample that a field describes

# Columns of a field's constants: of its law (float), and of its sizes and permutations (int).
LAW_START, REACH, POWER, SHIFT, TOP, LAW_TAIL = 0, 1, 2, 3, 4, 5
NUM_ROWS, SIDE, FIRST_ROW, MULTIPLIER, JUMP, SHUFFLE, TURN_PERIOD = 0, 1, 2, 3, 4, 5, 6


@kernel
def power_law_rank(uniform: float, even: bool, num_rows: int, law: F64) -> int:
    """The rank in [0, num_rows) of a uniform number: even, the top, or bounded Pareto."""
    if even:
        return int(uniform * num_rows)
    if uniform < law[TOP]:
        return 0
    # The top rank takes [0, TOP); the rest of [0, 1) is stretched over the other ranks.
    place = (uniform - law[TOP]) / (1.0 - law[TOP])
    rank = int((law[LAW_START] + place * law[REACH]) ** law[POWER] - law[SHIFT])
    return min(rank, num_rows - 1)


@kernel
def shuffled(place: float, num_groups: int, multiplier: int) -> float:
    """Permute equal groups of [0, 1); the places within a group stay together."""
    scaled = place * num_groups
    group = min(int(scaled), num_groups - 1)
    return (group * multiplier % num_groups + (scaled - group)) / num_groups


@kernel
def drifted_rank(rank: int, num_rows: int, turns: float, jump: int) -> int:
    """The rank whose id has replaced this rank's id after `turns` turnovers of all ranks.

    Ranks turn over one by one, each at a fixed phase of a turnover.
    """
    # The upper 53 bits of a hash fill the mantissa of a float in [0, 1).
    phase = float(splitmix64(np.uint64(rank)) >> np.uint64(11)) / 2.0**53
    return (rank + int(turns + phase) * jump) % num_rows


class FieldLaws(NamedTuple):
    """The constants of every field, by the columns above."""

    law_FC: F64
    size_FC: I64


class Mixing(NamedTuple):
    """How a chunk of samples mixes rows."""

    num_groups: int
    correlation: float
    start: int  # number of the chunk's first sample
    turns_per_sample: float


@kernel
def sample_rows(
    bits_SF: U64,
    place_S2: F64,
    parent_S: I64,
    laws: FieldLaws,
    mixing: Mixing,
    rows_SF: I64,
) -> None:
    """Write the row ids of samples into `rows_SF`; users and items are places in [0, 1).

    A field of the user or the item has the row at the shuffled place of its law, or with
    probability 1 - correlation any row. A clock moves from row to row as samples pass. A sample
    with a parent (an earlier sample, or -1) has the user of its parent: the same place and rows.
    """
    law_FC, size_FC = laws.law_FC, laws.size_FC
    for s in range(bits_SF.shape[0]):
        parent = parent_S[s]
        if parent >= 0:
            place_S2[s, USER] = place_S2[parent, USER]
        turns = mixing.turns_per_sample * (mixing.start + s)
        for f in range(bits_SF.shape[1]):
            side = size_FC[f, SIDE]
            if parent >= 0 and side == USER:
                rows_SF[s, f] = rows_SF[parent, f]
                continue
            # The upper half of the bits draws a place; pieces 0 and 1 of the lower half make
            # the two choices.
            bits, num_rows = bits_SF[s, f], size_FC[f, NUM_ROWS]
            place = float(bits >> np.uint64(32)) / 2.0**32
            if side < CONTEXT and piece(bits, 0) + 0.5 < mixing.correlation:
                place = shuffled(place_S2[s, side], mixing.num_groups, size_FC[f, SHUFFLE])
            even = piece(bits, 1) + 0.5 < law_FC[f, LAW_TAIL]
            rank = power_law_rank(place, even, num_rows, law_FC[f])
            if side == TIME_SIDE:
                rank = (mixing.start + s) // size_FC[f, TURN_PERIOD] % num_rows
            # A top is usually the missing value, whose popularity does not drift.
            if side == ITEM and (rank > 0 or law_FC[f, TOP] == 0.0):
                rank = drifted_rank(rank, num_rows, turns, size_FC[f, JUMP])
            # A bijection of [0, num_rows), because the multiplier is coprime to num_rows.
            # Otherwise popular ids would be 0, 1, 2.
            scrambled = (rank * size_FC[f, MULTIPLIER] + size_FC[f, JUMP]) % num_rows
            rows_SF[s, f] = size_FC[f, FIRST_ROW] + scrambled


@kernel
def piece(bits: np.uint64, number: int) -> float:
    """One of four 16-bit pieces of a hash, as a number between -1/2 and 1/2."""
    return (float((bits >> np.uint64(16 * number)) & np.uint64(0xFFFF)) - 32767.5) / 65536.0
