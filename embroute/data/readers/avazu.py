"""Avazu click-through logs: CSV with a header, 24 columns, 22 of them fields."""

from __future__ import annotations

import polars as pl

from embroute.data.readers.layout import Layout, Words

AVAZU_CATEGORICAL = (
    "hour",
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    *(f"C{i}" for i in range(14, 22)),
)


def hour_of_day(values: pl.Series) -> Words:
    """The hour, 00 to 23, of an Avazu time YYMMDDHH."""
    text = values.cast(pl.String).fill_null("")
    bad = ~text.str.contains(r"^\d{6}([01]\d|2[0-3])$").to_numpy()
    return Words(text.str.slice(6, 2), bad, "is not an hour written YYMMDDHH")


def avazu() -> Layout:
    """The Kaggle training file.

    Its fields are every column but `id` (unique a row) and the label `click`; of the time only
    the hour of the day is kept, since the date of a test row never occurs in training.
    """
    return Layout("avazu", categorical=AVAZU_CATEGORICAL, label="click", derived={"hour": hour_of_day})
