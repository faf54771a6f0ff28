"""MovieLens ratings: `ratings.dat` (`::` between values, no header) and `ratings.csv`."""

from __future__ import annotations

from embroute.data.readers.layout import Layout, at_least
from embroute.data.readers.records import Syntax

MOVIELENS_COLUMNS = ("user", "item", "rating", "timestamp")
MOVIELENS_HEADER = ("userId", "movieId", "rating", "timestamp")


def movielens(header: bool, positive_rating: float = 4.0) -> Layout:
    """Fields user and item; the label is 1 for a rating of at least `positive_rating`."""
    return Layout(
        "movielens",
        categorical=("user", "item"),
        label="rating",
        columns=MOVIELENS_COLUMNS,
        header=header,
        syntax=Syntax(",") if header else Syntax("::", quoted=False),
        read_label=at_least(positive_rating),
    )
