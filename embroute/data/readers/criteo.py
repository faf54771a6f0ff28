"""Criteo display advertising logs: a label, 13 integers and 26 categories a line, by tabs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.data.readers.layout import Layout
from embroute.data.readers.records import Syntax

DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *DENSE, *CATEGORICAL)


def log_count(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """log(1 + x), the usual scaling of Criteo's counts; the few negative ones become 0."""
    return np.log1p(np.maximum(numbers, 0.0))


def criteo() -> Layout:
    """Criteo Kaggle and Terabyte files, plain or gzip.

    A missing integer is 0; a missing category is a category of its own.
    """
    return Layout(
        "criteo",
        categorical=CATEGORICAL,
        label="label",
        dense=DENSE,
        columns=COLUMNS,
        header=False,
        syntax=Syntax("\t", quoted=False),
        scale=log_count,
    )
