"""Field sizes of four published click logs, and the knobs that make a synthetic trace like them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embroute.kernels.sampling import CLOCK, CONTEXT, ITEM, USER


@dataclass(frozen=True)
class FieldLaw:
    """A field's table size, its side (user, item, context, clock) and its popularity law.

    `top` is the share of the most popular id, often a missing value, and `tail` the share of
    look-ups spread evenly; of the others rank r has a share of about (r + offset)^-exponent (Zipf
    and Mandelbrot). Without a top all ranks follow the power law; an offset below 0, above -1,
    raises the first of them.
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
    """What a user can turn. 0 switches correlation, sessions, drift, skew or signal off.

    skew: factor on every field's exponent. groups: latent user groups, and as many of items.
    correlation: share of look-ups that follow from the user or the item; the default makes two
    fields depend on each other about as much as those of AdKDD'21 do. sessions: share of samples
    from a user seen shortly before. gap: samples between two of a session, on average.
    drift: turnovers of the items' popularity order per million samples. signal: standard
    deviation of the true logit. click_rate: share of label 1.
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
    """Fields and dense columns of a published data set, and knobs that suit it."""

    name: str
    fields: tuple[FieldLaw, ...]
    dense: tuple[str, ...]
    knobs: Knobs


SIDES = {"u": USER, "i": ITEM, "c": CONTEXT, "t": CLOCK}
SMALL, LARGE = 1000, 10_000


def law(name: str, num_rows: int, side: str) -> FieldLaw:
    """A field with a popularity law for its size, chosen on the fields of AdKDD'21 (Criteo)."""
    if num_rows < SMALL:
        return FieldLaw(name, num_rows, SIDES[side], exponent=1.7)
    if num_rows < LARGE:
        return FieldLaw(name, num_rows, SIDES[side], exponent=1.1)
    # Most ids of a large field appear once or twice.
    return FieldLaw(name, num_rows, SIDES[side], exponent=1.05, tail=0.15)


def _laws(text: str) -> tuple[FieldLaw, ...]:
    """Read `name rows side` triples separated by commas."""
    fields = (field.split() for field in text.split(","))
    return tuple(law(name, int(rows), side) for name, rows, side in fields)


# Criteo's Kaggle display advertising challenge: the 26 table sizes of DLRM's preprocessing
# (Naumov et al. 2019), 33,762,577 rows. The columns' meanings were never published, so which
# describe user, item and context is a guess.
CRITEO_KAGGLE = Preset(
    "criteo-kaggle",
    _laws(
        "C1 1460 u, C2 583 i, C3 10131227 u, C4 2202608 i, C5 305 c, C6 24 c, C7 12517 u,"
        "C8 633 i, C9 3 c, C10 93145 i, C11 5683 u, C12 8351593 i, C13 3194 i, C14 27 c,"
        "C15 14992 u, C16 5461306 u, C17 10 c, C18 5652 i, C19 2173 i, C20 4 c, C21 7046547 i,"
        "C22 18 c, C23 15 c, C24 286181 u, C25 105 i, C26 142572 i"
    ),
    tuple(f"I{column}" for column in range(1, 14)),
    Knobs(samples=45_840_617, sessions=0.05, drift=0.02),
)

# Avazu's Kaggle challenge: distinct values of the training file's columns, 9,449,445 in all, with
# the 240 values of `hour` as one of the 22 fields.
AVAZU = Preset(
    "avazu",
    _laws(
        "hour 240 c, C1 7 c, banner_pos 7 c, site_id 4737 i, site_domain 7745 i,"
        "site_category 26 i, app_id 8552 i, app_domain 559 i, app_category 36 i,"
        "device_id 2686408 u, device_ip 6729486 u, device_model 8251 u, device_type 5 u,"
        "device_conn_type 4 u, C14 2626 i, C15 8 c, C16 9 c, C17 435 i, C18 4 i, C19 68 i,"
        "C20 172 i, C21 60 i"
    ),
    (),
    Knobs(samples=40_428_967, sessions=0.3, drift=0.05, signal=1.5, click_rate=0.17),
)

# MovieLens 25M (Harper and Konstan 2015): 25,000,095 ratings. Its README counts 62,423 movies,
# of which 59,047 have a rating. People rate many movies in one sitting.
MOVIELENS_25M = Preset(
    "movielens-25m",
    (FieldLaw("user", 162_541, USER, 0.6), FieldLaw("item", 59_047, ITEM, 0.9)),
    (),
    Knobs(samples=25_000_095, sessions=0.95, gap=20.0, drift=0.05, click_rate=0.5),
)

# Criteo Sponsored Search Conversion Log (Tallis and Yadav 2018): 15,995,634 clicks, 17 categorical
# columns, about 14.86 million values, 312 partners. We found no other sizes of single columns:
# this division into round numbers is ours, with user_id taking what the rest leaves.
CRITEO_SEARCH = Preset(
    "criteo-search",
    _laws(
        "product_age_group 11 i, device_type 4 u, audience_id 20000 u, product_gender 10 i,"
        "product_brand 55000 i, product_category1 21 i, product_category2 180 i,"
        "product_category3 1250 i, product_category4 1700 i, product_category5 900 i,"
        "product_category6 250 i, product_category7 50 i, product_country 20 u,"
        "product_id 2500000 i, product_title 1500000 i, partner_id 312 i, user_id 10780292 u"
    ),
    ("nb_clicks_1week", "product_price"),
    Knobs(samples=15_995_634, sessions=0.2, drift=0.05, signal=1.5, click_rate=0.1),
)

PRESETS: Mapping[str, Preset] = {
    preset.name: preset for preset in (CRITEO_KAGGLE, AVAZU, MOVIELENS_25M, CRITEO_SEARCH)
}
