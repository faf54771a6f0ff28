"""Criteo display advertising logs: a label, 13 integers and 26 categories a line, by tabs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.data.readers.layout import Layout
from embroute.data.readers.records import Syntax

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
CRITEO_COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)


def log_count(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """log(1 + x), the usual scaling of Criteo's counts; the few negative ones become 0."""
    return np.log1p(np.maximum(numbers, 0.0))


def criteo() -> Layout:
    """Criteo Kaggle and Terabyte files, plain or gzip.

    A missing integer is 0; a missing category is a category of its own.
    """
    return Layout(
        "criteo",
        categorical=CRITEO_CATEGORICAL,
        label="label",
        dense=CRITEO_DENSE,
        columns=CRITEO_COLUMNS,
        header=False,
        syntax=Syntax("\t", quoted=False),
        scale=log_count,
    )
