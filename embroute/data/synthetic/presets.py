"""Field sizes and popularity laws of four published click logs, with default knobs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from math import log

from embroute.data.synthetic.sampling import CONTEXT, ITEM, TIME_SIDE, USER


@dataclass(frozen=True)
class FieldLaw:
    """A field's table size, its side (user, item, context, clock) and its popularity law.

    `top` is the share of the most popular id, often a missing value. `tail` is the share of
    look-ups that are spread evenly. Among the others, rank r has a share of about
    (r + offset)^-exponent (Zipf and Mandelbrot). Without a top, all ranks follow the power law.
    An offset between -1 and 0 raises the share of the first rank.
    """

    name: str
    num_rows: int
    side: int
    exponent: float
    tail: float = 0.0
    offset: float = 0.0
    top: float = 0.0


@dataclass(frozen=True)
class Knobs:
    """Options of a preset. 0 switches correlation, sessions, drift, skew or signal off.

    skew: factor on every field's exponent. groups: number of latent user groups, and of item
    groups. correlation: share of look-ups that the user or the item determines; the default makes
    two fields about as dependent as the fields of AdKDD'21. sessions: share of samples of a recent
    user. gap: average number of samples between two samples of a session. drift: turnovers of the
    items' popularity order per million samples. signal: standard deviation of the true logit.
    click_rate: share of label 1.
    """

    samples: int
    skew: float = 1.0
    groups: int = 64
    correlation: float = 0.85
    sessions: float = 0.0
    gap: float = 256.0
    drift: float = 0.0
    signal: float = 1.6
    click_rate: float = 0.25
    seed: int = 0


@dataclass(frozen=True)
class Preset:
    """Fields and dense columns of a published data set, and default knobs."""

    name: str
    fields: tuple[FieldLaw, ...]
    dense: tuple[str, ...]
    knobs: Knobs


SIDE_CODES = {"u": USER, "i": ITEM, "c": CONTEXT, "t": TIME_SIDE}


def _read_laws() -> Mapping[str, tuple[FieldLaw, ...]]:
    """The laws of field_laws.csv.

    A field without numbers has those of the Kaggle field nearest in size, but no top id.
    """
    laws: dict[str, list[FieldLaw]] = {}
    lines = (files("embroute.data.synthetic") / "field_laws.csv").read_text().splitlines()
    for line in csv.DictReader(lines):
        rows, side = int(line["rows"]), SIDE_CODES[line["side"]]
        if line["exponent"]:
            numbers = {name: float(line[name]) for name in ("exponent", "tail", "offset", "top")}
            law = FieldLaw(line["field"], rows, side, **numbers)
        else:
            law = min(laws["criteo-kaggle"], key=lambda law: abs(log(law.num_rows) - log(rows)))
            law = replace(law, name=line["field"], num_rows=rows, side=side, top=0.0)
        laws.setdefault(line["preset"], []).append(law)
    return {preset: tuple(fields) for preset, fields in laws.items()}


_LAWS = _read_laws()

# The numbers of the next two presets come from `python -m benchmarks.calibrate --fit`.

# Criteo's Kaggle display advertising challenge: the 26 table sizes of DLRM's preprocessing
# (Naumov et al. 2019), 33,762,577 rows. The columns' meanings were never published, so sides are a
# guess, from 82 public example rows: there C3, C12, C16 and C21 nearly name each other, C2, C4,
# C15, C18 and C24 mostly go with them, and C19, C20, C25 and C26 miss together: the item. C7, C10,
# C11 and C13 come again together: the user.
CRITEO_KAGGLE = Preset(
    "criteo-kaggle",
    _LAWS["criteo-kaggle"],
    tuple(f"I{column}" for column in range(1, 14)),
    Knobs(samples=45_840_617, sessions=0.05, drift=0.02),
)

# Avazu's Kaggle challenge: distinct values of the training file's columns, 9,449,445 in all, with
# the 240 values of `hour`, which come one after the other, as one of the 22 fields. After the
# first eight days new ads appear (C14, C17), but no new sites, apps and models: those go with the
# user here. The drift is the share of new ads a day, a quarter, over the samples of a day.
AVAZU = Preset(
    "avazu",
    _LAWS["avazu"],
    (),
    Knobs(samples=40_428_967, sessions=0.3, drift=0.065, signal=1.5, click_rate=0.17),
)

# MovieLens 25M (Harper and Konstan 2015): 25,000,095 ratings. Its README counts 62,423 movies,
# of which 59,047 have a rating. People rate many movies in one sitting.
MOVIELENS_25M = Preset(
    "movielens-25m",
    _LAWS["movielens-25m"],
    (),
    Knobs(samples=25_000_095, sessions=0.95, gap=20.0, drift=0.05, click_rate=0.5),
)

# Criteo Sponsored Search Conversion Log (Tallis and Yadav 2018): 15,995,634 clicks, 17 categorical
# columns with the distinct values that OptDist (CIKM 2024) lists. We found nothing on how skewed
# they are, but that nearly every click has a user of its own: the other laws are borrowed.
CRITEO_SEARCH = Preset(
    "criteo-search",
    _LAWS["criteo-search"],
    ("nb_clicks_1week", "product_price"),
    Knobs(samples=15_995_634, sessions=0.1, drift=0.05, signal=1.5, click_rate=0.1),
)

LOG_PRESETS: Mapping[str, Preset] = {
    preset.name: preset for preset in (CRITEO_KAGGLE, AVAZU, MOVIELENS_25M, CRITEO_SEARCH)
}
