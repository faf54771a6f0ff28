"""Arithmetic on rows of floats: initial values, optimizers, pooling, merging of gradients.

Axes: N rows of a table or cache, I rows of a list, T touches, B bags, D distinct rows, X columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.array_types import F64, I32, I64
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index, prefetch, prefetch_row, splitmix64

# The sum of four even draws from 0 to 2**16 - 1 is nearly normal. One hash has bits for all four.
# Sums of integers and one multiplication give the same bits on every machine; log and cos may not.
HASH_PIECES, BITS, MASK = 4, np.uint64(16), np.uint64(2**16 - 1)
MEAN, DEVIATION = HASH_PIECES * (2**16 - 1) / 2, float(np.sqrt(HASH_PIECES * (2**32 - 1) / 12))


@kernel
def init_rows(seed: int, table_N: I64, id_N: I64, scale: float, out: F64) -> None:
    """Fill `out` with rows, each entry of standard deviation `scale`."""
    factor = scale / DEVIATION
    for n in range(len(id_N)):
        key = splitmix64(splitmix64(np.uint64(seed)) + np.uint64(table_N[n]))
        key = splitmix64(key + np.uint64(id_N[n]))
        for column in range(out.shape[1]):
            bits, total = splitmix64(key + np.uint64(column)), np.uint64(0)
            for _ in range(HASH_PIECES):
                total += bits & MASK
                bits >>= BITS
            out[index(n), index(column)] = (np.float64(total) - MEAN) * factor


Floats = npt.NDArray[np.float32 | np.float64]
Index = I32 | I64


ROWS_AHEAD = 16  # rows between the prefetch of a row and its use: rows lie all over memory


class Hyper(NamedTuple):
    """Numbers of an optimizer that are the same for all rows of a step."""

    lr: float
    eps: float
    beta1: float
    beta2: float
    decay: float  # weight decay, of touched rows only
    step: int  # of this update, from 1


@inlined
def _row_at(records_NX: Floats, index_I: Index, i: int, columns: int) -> int:
    """Number of the i-th row. Prefetches a later row; the last ones prefetch the last row again."""
    later = min(i + ROWS_AHEAD, len(index_I) - 1)
    prefetch_row(records_NX, index_I[index(later)], columns)
    return index(index_I[index(i)])


@kernel
def gather(records_NX: Floats, index_I: Index, out_IX: Floats) -> None:
    """Copy the first columns of the named rows."""
    columns = out_IX.shape[1]
    for i in range(len(index_I)):
        row = _row_at(records_NX, index_I, i, columns)
        for x in range(columns):
            out_IX[index(i), index(x)] = records_NX[row, index(x)]


@kernel
def scatter(records_NX: Floats, index_I: Index, block_IX: Floats) -> None:
    """Overwrite the first columns of the named rows."""
    columns = block_IX.shape[1]
    for i in range(len(index_I)):
        row = _row_at(records_NX, index_I, i, columns)
        for x in range(columns):
            records_NX[row, index(x)] = block_IX[index(i), index(x)]


@kernel
def scatter_add(records_NX: Floats, index_I: Index, block_IX: Floats) -> None:
    """Add to the first columns of the named rows, in the order given."""
    columns = block_IX.shape[1]
    for i in range(len(index_I)):
        row = _row_at(records_NX, index_I, i, columns)
        for x in range(columns):
            records_NX[row, index(x)] += block_IX[index(i), index(x)]


@kernel
def sgd(records_NX: Floats, index_I: Index, grad_IX: Floats, hyper: Hyper) -> None:
    """value -= lr * gradient."""
    width = grad_IX.shape[1]
    # In the rows' own precision: a float64 rate would compute every element in float64.
    lr, decay = records_NX.dtype.type(hyper.lr), records_NX.dtype.type(hyper.decay)
    for i in range(len(index_I)):
        row = _row_at(records_NX, index_I, i, width)
        for x in range(width):
            value = records_NX[row, index(x)]
            records_NX[row, index(x)] = value - lr * (grad_IX[index(i), index(x)] + decay * value)


@kernel
def adagrad(records_NX: Floats, index_I: Index, grad_IX: Floats, hyper: Hyper) -> None:
    """State: the sum of squared gradients, element by element, behind the value in its record."""
    width = grad_IX.shape[1]
    for i in range(len(index_I)):
        row = records_NX[_row_at(records_NX, index_I, i, 2 * width)]
        for x in range(width):
            grad = grad_IX[i, x] + hyper.decay * row[x]
            row[width + x] += grad * grad
            row[x] -= hyper.lr * grad / (np.sqrt(row[width + x]) + hyper.eps)


@kernel
def rowwise_adagrad(records_NX: Floats, index_I: Index, grad_IX: Floats, hyper: Hyper) -> None:
    """State: one number per row, the sum of mean squared gradients."""
    width = grad_IX.shape[1]
    for i in range(len(index_I)):
        row = records_NX[_row_at(records_NX, index_I, i, width + 1)]
        squares = 0.0
        for x in range(width):
            grad = grad_IX[i, x] + hyper.decay * row[x]
            squares += grad * grad
        row[width] += squares / width
        scale = hyper.lr / (np.sqrt(row[width]) + hyper.eps)
        for x in range(width):
            row[x] -= scale * (grad_IX[i, x] + hyper.decay * row[x])


@kernel
def adam(records_NX: Floats, index_I: Index, grad_IX: Floats, hyper: Hyper) -> None:
    """SparseAdam: moments of touched rows only, bias corrected by the steps of the table.

    A record is the value, the first moments and the second moments, each `width` columns.
    """
    width = grad_IX.shape[1]
    correction1 = 1 - hyper.beta1**hyper.step
    correction2 = 1 - hyper.beta2**hyper.step
    rate = hyper.lr * np.sqrt(correction2) / correction1
    for i in range(len(index_I)):
        row = records_NX[_row_at(records_NX, index_I, i, 3 * width)]
        for x in range(width):
            grad = grad_IX[i, x] + hyper.decay * row[x]
            first, second = row[width + x], row[2 * width + x]
            first += (1 - hyper.beta1) * (grad - first)
            second += (1 - hyper.beta2) * (grad * grad - second)
            row[width + x], row[2 * width + x] = first, second
            row[x] -= rate * first / (np.sqrt(second) + hyper.eps)


class Bags(NamedTuple):
    """Some fields' bags of every sample: look-ups of bag b are offsets_B[b] to offsets_B[b + 1]."""

    touch_L: I32  # look-ups as touches of an arena; -1 for padding
    offsets_B: I64  # sample-major, all fields of a sample side by side
    num_fields: int
    first: int  # the fields first to last, without last
    last: int
    mean: bool


@inlined
def _count_lookups(touch_L: I32, start: int, stop: int) -> int:
    """Look-ups that are not padding."""
    count = 0
    for i in range(start, stop):
        count += touch_L[i] >= 0
    return count


@inlined
def _touch_after(touch_L: I32, i: int) -> int:
    """A touch that will be looked up soon, for a prefetch; padding counts as touch 0."""
    return int(max(touch_L[index(min(i + ROWS_AHEAD, len(touch_L) - 1))], 0))


@kernel
def _pool_bag(records_NX: Floats, slot_T: I32, touch_I: I32, out_X: Floats) -> None:
    """Sum of the rows of one bag, in the order of its look-ups."""
    out_X[:] = 0
    for touch in touch_I:
        if touch >= 0:
            row = index(slot_T[index(touch)])
            for x in range(len(out_X)):
                out_X[x] += records_NX[row, index(x)]


@inlined
def _bag_index(bags: Bags, b: int) -> int:
    """Index among all bags of the b-th bag of the chosen fields."""
    # Both counts are sample-major: bag b belongs to sample b // chosen.
    chosen = bags.last - bags.first
    if chosen == bags.num_fields:
        return b
    return (b // chosen) * bags.num_fields + bags.first + b % chosen


@kernel
def pool(records_NX: Floats, slot_T: I32, bags: Bags, out_BX: Floats) -> None:
    """Sum, or mean, of the rows of each bag; nothing but padding gives zeros.

    Rows are read where they lie: to gather them first would be one more pass over them.
    """
    touch_L, offsets_B, columns = bags.touch_L, bags.offsets_B, out_BX.shape[1]
    for b in range(len(out_BX)):
        bag = _bag_index(bags, b)
        start, stop = index(offsets_B[index(bag)]), index(offsets_B[index(bag + 1)])
        if start < stop and len(slot_T):
            prefetch_row(records_NX, slot_T[index(_touch_after(touch_L, start))], columns)
        # One-hot fields are the common case: a plain copy.
        if stop - start == 1 and touch_L[start] >= 0:
            row = index(slot_T[index(touch_L[start])])
            for x in range(columns):
                out_BX[index(b), index(x)] = records_NX[row, index(x)]
            continue
        _pool_bag(records_NX, slot_T, touch_L[start:stop], out_BX[b])
        if bags.mean:
            out_BX[b] /= max(1, _count_lookups(touch_L, start, stop))


@inlined
def _add_share(sum_TX: Floats, t: int, grad_BX: Floats, b: int, share: float) -> None:
    """Add a share of a row to another; a whole row in the rows' own precision."""
    if share == 1.0:
        for x in range(grad_BX.shape[1]):
            sum_TX[t, index(x)] += grad_BX[b, index(x)]
    else:
        for x in range(grad_BX.shape[1]):
            sum_TX[t, index(x)] += grad_BX[b, index(x)] * share


@kernel
def pool_backward(grad_BX: Floats, bags: Bags, grad_TX: Floats) -> None:
    """Add the gradient of each bag to the gradients of its rows: the backward pass of `pool`."""
    touch_L, offsets_B, columns = bags.touch_L, bags.offsets_B, grad_BX.shape[1]
    for b in range(len(grad_BX)):
        bag = _bag_index(bags, b)
        start, stop = index(offsets_B[index(bag)]), index(offsets_B[index(bag + 1)])
        if start < stop:
            prefetch_row(grad_TX, index(_touch_after(touch_L, start)), columns)
        share = 1.0 / max(1, _count_lookups(touch_L, start, stop)) if bags.mean else 1.0
        for i in range(start, stop):
            if touch_L[i] >= 0:
                _add_share(grad_TX, index(touch_L[i]), grad_BX, index(b), share)


@kernel
def merge(
    index_I: Index,
    block_IX: Floats,
    place_N: I32,
    distinct_D: I64,
    sum_DX: Floats,
    count: int,
) -> int:
    """Add the rows of a block to the sums by row; returns the number of distinct rows so far.

    `count`: distinct rows of earlier blocks. `place_N`: index of each row's sum, or -1.
    """
    for i in range(len(index_I)):
        prefetch(place_N, (index(index_I[index(min(i + ROWS_AHEAD, len(index_I) - 1))]),))
        row = index(index_I[index(i)])
        if place_N[row] < 0:
            place_N[row] = count
            distinct_D[count] = row
            for x in range(block_IX.shape[1]):
                sum_DX[index(count), index(x)] = block_IX[index(i), index(x)]
            count += 1
        else:
            place = index(place_N[row])
            for x in range(block_IX.shape[1]):
                sum_DX[place, index(x)] += block_IX[index(i), index(x)]
    return count
