"""Rows of floats: gathering, scattering, and the optimizers that update them in place.

A record is a row's value (the first `width` columns) followed by its optimizer state.
Axes: N rows of a store, X columns of a record, I rows named by an index.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.jit import kernel

Floats = npt.NDArray[np.float32 | np.float64]
I64 = npt.NDArray[np.int64]


class Hyper(NamedTuple):
    """What an update depends on beside the row and its gradient."""

    lr: float
    eps: float
    beta1: float
    beta2: float
    decay: float  # of touched rows
    step: int  # of this update, from 1


@kernel
def gather(records_NX: Floats, index_I: I64, out_IX: Floats) -> None:
    """Copy the first columns of the named rows."""
    for i in range(len(index_I)):
        for x in range(out_IX.shape[1]):
            out_IX[i, x] = records_NX[index_I[i], x]


@kernel
def scatter(records_NX: Floats, index_I: I64, block_IX: Floats) -> None:
    """Overwrite the first columns of the named rows."""
    for i in range(len(index_I)):
        for x in range(block_IX.shape[1]):
            records_NX[index_I[i], x] = block_IX[i, x]


@kernel
def scatter_add(records_NX: Floats, index_I: I64, block_IX: Floats) -> None:
    """Add to the first columns of the named rows, in the order given."""
    for i in range(len(index_I)):
        for x in range(block_IX.shape[1]):
            records_NX[index_I[i], x] += block_IX[i, x]


@kernel
def sgd(records_NX: Floats, index_I: I64, grad_IX: Floats, hyper: Hyper) -> None:
    """value -= lr * gradient."""
    for i in range(len(index_I)):
        row = records_NX[index_I[i]]
        for x in range(grad_IX.shape[1]):
            row[x] -= hyper.lr * (grad_IX[i, x] + hyper.decay * row[x])


@kernel
def adagrad(records_NX: Floats, index_I: I64, grad_IX: Floats, hyper: Hyper) -> None:
    """State: the sum of squared gradients, element by element."""
    width = grad_IX.shape[1]
    for i in range(len(index_I)):
        row = records_NX[index_I[i]]
        for x in range(width):
            grad = grad_IX[i, x] + hyper.decay * row[x]
            row[width + x] += grad * grad
            row[x] -= hyper.lr * grad / (np.sqrt(row[width + x]) + hyper.eps)


@kernel
def rowwise_adagrad(records_NX: Floats, index_I: I64, grad_IX: Floats, hyper: Hyper) -> None:
    """State: one number a row, the sum of mean squared gradients."""
    width = grad_IX.shape[1]
    for i in range(len(index_I)):
        row = records_NX[index_I[i]]
        squares = 0.0
        for x in range(width):
            grad = grad_IX[i, x] + hyper.decay * row[x]
            squares += grad * grad
        row[width] += squares / width
        scale = hyper.lr / (np.sqrt(row[width]) + hyper.eps)
        for x in range(width):
            row[x] -= scale * (grad_IX[i, x] + hyper.decay * row[x])


@kernel
def adam(records_NX: Floats, index_I: I64, grad_IX: Floats, hyper: Hyper) -> None:
    """SparseAdam: moments of touched rows only, bias corrected by the steps of the table."""
    width = grad_IX.shape[1]
    correction1 = 1 - hyper.beta1**hyper.step
    correction2 = 1 - hyper.beta2**hyper.step
    rate = hyper.lr * np.sqrt(correction2) / correction1
    for i in range(len(index_I)):
        row = records_NX[index_I[i]]
        for x in range(width):
            grad = grad_IX[i, x] + hyper.decay * row[x]
            first, second = row[width + x], row[2 * width + x]
            first += (1 - hyper.beta1) * (grad - first)
            second += (1 - hyper.beta2) * (grad * grad - second)
            row[width + x], row[2 * width + x] = first, second
            row[x] -= rate * first / (np.sqrt(second) + hyper.eps)
