"""Field sizes and popularity laws of four published click logs, with default knobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


def _laws(text: str) -> tuple[FieldLaw, ...]:
    """Read lines of name, rows, side, exponent, offset, tail and top."""
    fields = []
    for line in text.strip().splitlines():
        name, rows, side, exponent, offset, tail, top = line.split()
        shape = (float(exponent), float(tail), float(offset), float(top))
        fields.append(FieldLaw(name, int(rows), SIDE_CODES[side], *shape))
    return tuple(fields)


# The numbers of the next two tables come from `python -m benchmarks.calibrate --fit`.

# Criteo's Kaggle display advertising challenge: the 26 table sizes of DLRM's preprocessing
# (Naumov et al. 2019), 33,762,577 rows. The columns' meanings were never published, so sides are a
# guess, from 82 public example rows: there C3, C12, C16 and C21 nearly name each other, C2, C4,
# C15, C18 and C24 mostly go with them, and C19, C20, C25 and C26 miss together: the item. C7, C10,
# C11 and C13 come again together: the user.
CRITEO_KAGGLE = Preset(
    "criteo-kaggle",
    _laws(
        """
    C1      1460 c 1.961  -0.1645 0.0006674        0
    C2       583 i 6.262    203.2         0        0
    C3  10131227 i 1.068  -0.3439    0.2042  0.05971
    C4   2202608 i 1.221   0.7243    0.1085        0
    C5       305 c 2.193  -0.7212         0        0
    C6        24 c 6.879    1.013         0        0
    C7     12517 u 2.782     1227         0        0
    C8       633 c 2.071  -0.5701         0        0
    C9         3 c   1.2        0         0        0
    C10    93145 u 2.188    934.2         0     0.27
    C11     5683 u   4.9     1629         0        0
    C12  8351593 i 1.083  -0.3401    0.1813  0.03506
    C13     3194 u 3.993    896.9         0        0
    C14       27 c 2.662  -0.5156         0        0
    C15    14992 i 2.539      379         0        0
    C16  5461306 i 1.127   0.1255    0.1331 0.005321
    C17       10 c  3.17  -0.7422         0        0
    C18     5652 i 3.035    233.3         0        0
    C19     2173 i 2.351    43.58         0   0.4494
    C20        4 i 1.394  -0.1225         0        0
    C21  7046547 i 1.106 -0.09908      0.16 0.004931
    C22       18 c 6.866   0.8775         0        0
    C23       15 c 3.545  -0.4703         0        0
    C24   286181 i  2.12    452.3   0.01921    0.085
    C25      105 i     8    17.71         0     0.45
    C26   142572 i 2.141    605.2  0.003985     0.45
    """
    ),
    tuple(f"I{column}" for column in range(1, 14)),
    Knobs(samples=45_840_617, sessions=0.05, drift=0.02),
)

# Avazu's Kaggle challenge: distinct values of the training file's columns, 9,449,445 in all, with
# the 240 values of `hour`, which come one after the other, as one of the 22 fields. After the
# first eight days new ads appear (C14, C17), but no new sites, apps and models: those go with the
# user here. The drift is the share of new ads a day, a quarter, over the samples of a day.
AVAZU = Preset(
    "avazu",
    _laws(
        """
    hour                 240 t     0        0         0       0
    C1                     7 c   1.2        0         0   0.919
    banner_pos             7 c   1.2        0         0    0.72
    site_id             4737 u 1.985    6.744         0   0.361
    site_domain         7745 u 1.997     5.68         0   0.374
    site_category         26 u     8    3.658         0   0.409
    app_id              8552 u 1.987    11.44         0   0.639
    app_domain           559 u  2.59   -0.145         0   0.674
    app_category          36 u 3.262  -0.6901         0   0.647
    device_id        2686408 u  2.09     8102    0.1018   0.825
    device_ip        6729486 u 0.926    13.24   0.07359 0.00516
    device_model        8251 u 2.137    42.15         0  0.0607
    device_type            5 u   1.2        0         0   0.923
    device_conn_type       4 u   1.2        0         0   0.863
    C14                 2626 i 3.194    34.53 0.0003723 0.01527
    C15                    8 c   1.2        0         0   0.933
    C16                    9 c   1.2        0         0   0.943
    C17                  435 i 0.833 -0.99864         0       0
    C18                    4 i   1.2        0         0       0
    C19                   68 i 1.721  -0.2089         0   0.301
    C20                  172 i 6.056    11.56         0  0.4666
    C21                   60 i 1.631  -0.6261         0 0.01551
    """
    ),
    (),
    Knobs(samples=40_428_967, sessions=0.3, drift=0.065, signal=1.5, click_rate=0.17),
)

# MovieLens 25M (Harper and Konstan 2015): 25,000,095 ratings. Its README counts 62,423 movies,
# of which 59,047 have a rating. People rate many movies in one sitting.
MOVIELENS_25M = Preset(
    "movielens-25m",
    (
        FieldLaw("user", 162_541, USER, 0.353),
        FieldLaw("item", 59_047, ITEM, 1.988, offset=237.6, top=0.003223),
    ),
    (),
    Knobs(samples=25_000_095, sessions=0.95, gap=20.0, drift=0.05, click_rate=0.5),
)


def _borrowed(text: str) -> tuple[FieldLaw, ...]:
    """Read `name rows side` triples: fields with the law of the Kaggle field nearest in size."""
    fields = []
    for name, rows, side in (field.split() for field in text.split(",")):
        size = log(int(rows))
        nearest = min(CRITEO_KAGGLE.fields, key=lambda law: abs(log(law.num_rows) - size))
        fields.append(
            replace(nearest, name=name, num_rows=int(rows), side=SIDE_CODES[side], top=0.0)
        )
    return tuple(fields)


# Criteo Sponsored Search Conversion Log (Tallis and Yadav 2018): 15,995,634 clicks, 17 categorical
# columns with the distinct values that OptDist (CIKM 2024) lists. We found nothing on how skewed
# they are, but that nearly every click has a user of its own: the other laws are borrowed.
CRITEO_SEARCH = Preset(
    "criteo-search",
    (
        *_borrowed(
            "product_age_group 12 i, device_type 9 u, audience_id 18229 u, product_gender 18 i,"
            "product_brand 55984 i, product_category1 22 i, product_category2 174 i,"
            "product_category3 1038 i, product_category4 1553 i, product_category5 842 i,"
            "product_category6 214 i, product_category7 6 i, product_country 24 u,"
            "product_id 1628065 i, product_title 790523 i, partner_id 312 i"
        ),
        FieldLaw("user_id", 13_708_489, USER, exponent=0.0),
    ),
    ("nb_clicks_1week", "product_price"),
    Knobs(samples=15_995_634, sessions=0.1, drift=0.05, signal=1.5, click_rate=0.1),
)

LOG_PRESETS: Mapping[str, Preset] = {
    preset.name: preset for preset in (CRITEO_KAGGLE, AVAZU, MOVIELENS_25M, CRITEO_SEARCH)
}
