"""Published facts about the data sets that the synthetic presets are named after.

A fact is a published number with its source; no row of those data sets is here.
`Ids(samples, times)` counts the ids that occur at least `times` times among so many samples.
`Top(ids)` is the share of the look-ups that go to the most popular ids. `Gini()` is the Gini
coefficient of the counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KAGGLE_SAMPLES = 45_840_617
AVAZU_SAMPLES = 40_428_967
MOVIELENS_RATINGS = 25_000_095
SEARCH_SAMPLES = 15_995_634

SOURCES: Mapping[str, str] = {
    "dlrm": "table sizes of DLRM's preprocessing (Naumov et al. 2019)",
    "fm": "field sizes with the preprocessing of github.com/rixwew/pytorch-fm: ids that come at "
    "least 10 times in Criteo, 4 times in Avazu, and one more for all others; listed by "
    "utils/FDO_dim_criteo.py of github.com/anonctr/GDCN and by programs of AutoField (WWW 2022)",
    "dac": "the 100,000-row sample of the challenge (dac_sample.txt): ids per column as a public "
    "data set builder lists them (c_features_status). That they are of these 100,000 rows is from "
    "memory; 233,286 ids of 39 columns, 13 of them whole numbers, in about 80,000 of its rows "
    "(tests of the course CS190.1x, lab 4) do not contradict it",
    "autoint": "ids per column in the example file of AutoInt's code (about 10,000 rows): "
    "data/feature_sizes.txt of github.com/chae-jpg/AutoInt_pytorch",
    "cutoff": "117,581 features with a cutoff of 200, of them 13 numbers and 26 for the rest: "
    "deep_ctr of github.com/lambdaji/tf_repos",
    "page": "82 rows of that file: how often the most frequent id comes, counted by hand, so "
    "within a few hundredths",
    "counts": "value counts of Avazu's training file in a public report on its features",
    "spread": "docs/EDA_REPORT.md of github.com/MykolaPinchuk/paper_time_aggregations: ids in "
    "403,698 rows of Avazu spread over its ten days, and shares of the first and the first ten",
    "seljuk": "seljuk.me/movielens-25m-dataset-published.html: ratings of the most rated movie "
    "(81,491) and of the busiest user (32,202)",
    "lenskit": "codex.lenskit.org/movielens/ML25M/description.html: Gini of items 0.942; ratings "
    "a user as 18.6 and a log-normal number (median 39.9, sigma 1.589)",
    "cltv": "vocabulary_size in model/config.py of github.com/sysuwyp/CLTV (OptDist, CIKM 2024)",
}


@dataclass(frozen=True)
class Ids:
    """Distinct ids that occur at least `times` times among samples.

    The samples are the first ones of the log, or spread evenly over all of it.
    """

    samples: int
    times: int = 1
    spread: bool = False


@dataclass(frozen=True)
class Top:
    """Share of all look-ups that the most popular ids take."""

    ids: int


@dataclass(frozen=True)
class Gini:
    """Gini coefficient of the counts of ids in all samples."""


@dataclass(frozen=True)
class Fact:
    """A quantity, its value, its source, and its weight in a fit."""

    of: Ids | Top | Gini
    value: float
    source: str
    weight: float = 1.0


Facts = Mapping[str, tuple[Fact, ...]]

# Column: rows of the table, ids that come 10 times, ids in 100,000 rows, ids in 10,000 rows.
_KAGGLE = """
C1 1460 1457 541 175, C2 583 554 497 386, C3 10131227 193948 43870 5521,
C4 2202608 138800 25184 4033, C5 305 305 145 56, C6 24 18 12 8, C7 12517 11969 7623 3184,
C8 633 633 257 93, C9 3 3 3 3, C10 93145 42645 10997 2986, C11 5683 5177 3799 2084,
C12 8351593 192772 41312 5284, C13 3194 3174 2796 1725, C14 27 26 26 24,
C15 14992 11421 5238 2035, C16 5461306 181074 34617 4724, C17 10 10 10 9,
C18 5652 4653 2548 1149, C19 2173 2031 1303 547, C20 4 4 4 4, C21 7046547 189656 38618 5037,
C22 18 17 11 8, C23 15 15 14 12, C24 286181 59696 12335 2525, C25 105 85 51 40,
C26 142572 45570 9527 1939
"""

# Most frequent ids. In C19, C20, C25 and C26 this is the missing value, missing in all four.
_KAGGLE_TOP = """
C3 0.06, C4 0.07, C10 0.27, C12 0.06, C16 0.06, C19 0.45, C20 0.45, C21 0.06, C24 0.085, C25 0.45,
C26 0.45
"""

# Column: rows of the table, ids that come 4 times, ids in 403,698 rows, share of the first and of
# the first ten ids in per mille. Where all ids are among ten, the last says nothing.
_AVAZU = """
C1 7 7 7 919 0, banner_pos 7 7 7 720 0, site_id 4737 3696 2148 361 701,
site_domain 7745 4613 2152 374 741, site_category 26 24 20 409 998, app_id 8552 5480 2264 639 801,
app_domain 559 328 146 674 968, app_category 36 30 26 647 998,
device_id 2686408 381762 65087 825 826, device_ip 6729486 1611747 262291 5.16 26,
device_model 8251 6792 4378 60.7 243, device_type 5 5 5 923 0, device_conn_type 4 4 4 863 0,
C14 2626 2508 2062 23 177, C15 8 8 8 933 0, C16 9 9 9 943 0, C17 435 431 413 112 341,
C19 68 67 66 301 786, C20 172 168 160 468 795, C21 60 60 60 220 772
"""


def _table(text: str) -> dict[str, tuple[float, ...]]:
    """Name and numbers of every line."""
    lines = (line.split() for line in text.replace("\n", " ").split(","))
    return {name: tuple(float(number) for number in numbers) for name, *numbers in lines}


def _seldom(rows: float) -> float:
    """Weight of the number of frequent ids: in small tables it concerns few look-ups."""
    return 1.0 if rows > 20_000 else 0.1


def _kaggle(rows: float, often: float, sample: float, example: float) -> tuple[Fact, ...]:
    return (
        Fact(Ids(KAGGLE_SAMPLES), rows, "dlrm", 0.3),
        Fact(Ids(KAGGLE_SAMPLES, 10), often, "fm", _seldom(rows)),
        Fact(Ids(100_000), sample, "dac"),
        Fact(Ids(10_000), example, "autoint", 0.3),
    )


def _avazu(rows: float, often: float, sample: float, first: float, ten: float) -> tuple[Fact, ...]:
    facts = (
        Fact(Ids(AVAZU_SAMPLES), rows, "counts", 0.3),
        Fact(Ids(AVAZU_SAMPLES, 4), often, "fm", _seldom(rows)),
        Fact(Ids(403_698, spread=True), sample, "spread"),
        Fact(Top(1), first / 1000, "counts"),
    )
    return (*facts, Fact(Top(10), ten / 1000, "spread")) if ten else facts


def _kaggle_facts() -> Facts:
    tops = {name: Fact(Top(1), top[0], "page", 0.3) for name, top in _table(_KAGGLE_TOP).items()}
    table = _table(_KAGGLE).items()
    return {name: (*_kaggle(*row), *([tops[name]] if name in tops else [])) for name, row in table}


FACTS: Mapping[str, Facts] = {
    "criteo-kaggle": _kaggle_facts(),
    "avazu": {name: _avazu(*numbers) for name, numbers in _table(_AVAZU).items()},
    "movielens-25m": {
        "user": (
            Fact(Ids(MOVIELENS_RATINGS), 162_541, "seljuk", 0.3),
            Fact(Gini(), 0.652, "lenskit"),
        ),
        "item": (
            Fact(Ids(MOVIELENS_RATINGS), 59_047, "seljuk", 0.3),
            Fact(Top(1), 81_491 / MOVIELENS_RATINGS, "seljuk"),
            Fact(Gini(), 0.942, "lenskit"),
        ),
    },
    "criteo-search": {"user_id": (Fact(Ids(SEARCH_SAMPLES), 13_708_489, "cltv"),)},
}
