"""The presets' popularity laws beside published facts, and the fit that chose them.

Run `python -m benchmarks.calibrate` for the facts beside the presets' values. With `--fit` it
prints the laws nearest to the facts, as embroute/data/synthetic/presets.py writes them.

Everything is in closed form: no sample is drawn. Axes: B bins of ids of equal popularity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import click
import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, gammaln, logit

from benchmarks.facts import FACTS, SOURCES, Fact, Gini, Ids, Top
from benchmarks.record import markdown, record
from embroute.data.synthetic.generator import LOG_PRESETS, Knobs, coprime
from embroute.data.synthetic.presets import FieldLaw
from embroute.data.synthetic.sampling import ITEM, USER
from embroute.kernels.array_types import F64

EXACT, BINS = 200, 300  # ranks with a bin each, and bins of the other ranks
MANY = 2000  # counts that the Gini coefficient of users distinguishes
PHASES = (np.arange(4) + 0.5) / 4
LARGE = 1000  # smaller tables have no even tail: all their ids are popular enough


@dataclass(frozen=True)
class Popularity:
    """Ids in bins: the number of ids in each bin, and their mean share of the look-ups."""

    ids_B: F64
    share_B: F64


def below(law: FieldLaw, rank: F64) -> F64:
    """Share of the look-ups that go to ranks below `rank`."""
    first = 1.0 if law.top else 0.0
    flat = 1.0 - law.exponent if abs(law.exponent - 1.0) > 1e-6 else 1e-6
    place = np.maximum(rank - first, 0.0) + 1.0 + law.offset
    low, high = 1.0 + law.offset, law.num_rows - first + 1.0 + law.offset
    power = (place**flat - low**flat) / (high**flat - low**flat)
    top = law.top * np.minimum(rank, 1.0)
    share: F64 = top + (1.0 - law.top - law.tail) * power + law.tail * rank / law.num_rows
    return share


def edges(num_rows: int) -> F64:
    """Bounds of bins of ranks: single ones first, then wider and wider."""
    single = np.arange(min(EXACT, num_rows) + 1.0)
    if num_rows <= EXACT:
        return single
    return np.unique(np.round(np.concatenate([single, np.geomspace(EXACT, num_rows, BINS)])))


def now(law: FieldLaw) -> Popularity:
    """Popularity at one moment."""
    bounds = edges(law.num_rows)
    return Popularity(np.diff(bounds), np.diff(below(law, bounds)) / np.diff(bounds))


def over_time(law: FieldLaw, turns: float) -> Popularity:
    """Mean popularity over `turns` turnovers, in which an id goes from rank to rank.

    Ids that share a rank at every time share a bin. All ids turn at one of a few phases.
    The top id keeps its rank.
    """
    rows, jump = law.num_rows, coprime(law.num_rows, 0.382)
    epochs = np.arange(int(turns) + 2)
    moved = [(edges(rows) + epoch * jump) % rows for epoch in epochs]
    bounds = np.unique(np.concatenate([*moved, [0.0, rows]]))
    middle = np.floor((bounds[:-1] + bounds[1:]) / 2)
    rank_EB = (middle - epochs[:, None] * jump) % rows
    share_EB = below(law, rank_EB + 1) - below(law, rank_EB) - law.top * (rank_EB == 0)
    shares = []
    for phase in PHASES:
        start = np.clip(epochs - phase, 0, turns)
        stay = np.clip(epochs + 1 - phase, 0, turns) - start
        shares.append(stay / turns @ share_EB)
    ids = np.tile(np.diff(bounds), len(PHASES)) / len(PHASES) * (1 - bool(law.top) / rows)
    return Popularity(np.append(ids, 1.0), np.append(np.concatenate(shares), law.top))


def chances(times: int, mean: F64, sessions: float) -> F64:
    """Probabilities of 0, 1 ... times - 1 look-ups, if each has on average `sessions` followers.

    Followers have followers. So the count follows a generalised Poisson distribution (Consul and
    Jain 1973).
    """
    theta = np.maximum(mean * (1 - sessions), 1e-300)[:, None]
    count = np.arange(times)
    log = np.log(theta) + (count - 1) * np.log(theta + count * sessions) - gammaln(count + 1)
    probability: F64 = np.exp(log - theta - count * sessions)
    return probability


def gini(popularity: Popularity, samples: int, sessions: float) -> float:
    """Gini coefficient of the counts."""
    ids, mean = popularity.ids_B / popularity.ids_B.sum(), popularity.share_B * samples
    if sessions:
        more_BK = 1 - np.cumsum(chances(MANY, mean, sessions), axis=1)
        return float(1 - ((ids @ more_BK) ** 2).sum() / (ids @ mean))
    order = np.argsort(mean)
    taken = np.cumsum(ids[order] * mean[order]) / (ids @ mean)
    return float(1 - (ids[order] * (taken + np.append(0.0, taken[:-1]))).sum())


def given(law: FieldLaw, knobs: Knobs, of: Ids | Top | Gini) -> float:
    """The value of a law for the quantity that a fact counts."""
    turns = knobs.drift / 1e6 * knobs.samples
    whole = not isinstance(of, Ids) or of.spread or of.samples == knobs.samples
    drifts = whole and law.side == ITEM and turns > 0
    popularity = over_time(law, turns) if drifts else now(law)
    # Samples spread over the log are too far from each other for sessions.
    apart = isinstance(of, Ids) and of.spread
    sessions = knobs.sessions if law.side == USER and not apart else 0.0
    if isinstance(of, Gini):
        return gini(popularity, knobs.samples, sessions)
    if isinstance(of, Top):
        order = np.argsort(-popularity.share_B)
        ids, share = popularity.ids_B[order], popularity.share_B[order]
        return float((share * np.clip(of.ids - np.cumsum(ids) + ids, 0, ids)).sum())
    seldom = chances(of.times, popularity.share_B * of.samples, sessions).sum(axis=1)
    return float((popularity.ids_B * (1 - seldom)).sum())


def loss(law: FieldLaw, knobs: Knobs, facts: tuple[Fact, ...]) -> float:
    """Squared errors of logarithms, plus a small penalty for more than a power law."""
    errors = (f.weight * np.log(given(law, knobs, f.of) / f.value) ** 2 for f in facts)
    plain = np.log1p(law.offset) ** 2 + law.tail + law.top + (law.exponent - 1.2) ** 2
    return float(sum(errors)) + 1e-4 * float(plain)


def fit(law: FieldLaw, knobs: Knobs, facts: tuple[Fact, ...]) -> FieldLaw:
    """The nearest law: exponent and offset, a tail for large tables, a top for a known share."""
    known = next((f.value for f in facts if f.of == Top(1)), 0.0)
    large = law.num_rows >= LARGE

    def of(x: F64) -> FieldLaw:
        # For items, any part of the first id's share may belong to a top that keeps its rank.
        top = known * float(expit(x[3])) if law.side == ITEM else known
        tail = float(expit(x[2])) * (1 - top) if large else 0.0
        offset = float(np.expm1(x[1]))
        return replace(law, exponent=float(x[0]), offset=offset, tail=tail, top=top)

    def cost(x: F64) -> float:
        bounded = 0 <= x[0] < 8 and -7 < x[1] < 9
        return loss(of(x), knobs, facts) if bounded else 1e3

    shapes = ((1.0, -0.7), (1.8, 3.0), (3.0, 1.0), (6.0, 0.5))
    tails = (0.15, 0.002) if large else (0.5,)
    starts = [(a, q, logit(t), logit(0.1)) for a, q in shapes for t in tails]
    options = {"maxiter": 600, "xatol": 1e-3, "fatol": 1e-7}
    found = [minimize(cost, start, method="Nelder-Mead", options=options) for start in starts]
    return rounded(of(min(found, key=lambda result: float(result.fun)).x))


def rounded(law: FieldLaw) -> FieldLaw:
    """As the presets write it."""
    offset, tail, top = (float(f"{value:.4g}") for value in (law.offset, law.tail, law.top))
    return replace(
        law,
        exponent=round(law.exponent, 3),
        offset=round(law.offset, 5) if law.offset < -0.9 else offset * (abs(offset) > 1e-3),
        tail=tail * (tail > 1e-4),
        top=top * (top > 1e-3),
    )


def name_of(of: Ids | Top | Gini) -> str:
    """A fact's name in the table."""
    if isinstance(of, Gini):
        return "Gini"
    if isinstance(of, Top):
        return f"share of the first {of.ids}" if of.ids > 1 else "share of the first"
    where = "spread samples" if of.spread else "samples"
    return f"ids in {of.samples:,} {where}" + (f", {of.times} times" if of.times > 1 else "")


def number(value: float) -> str:
    """A count without decimals, a share with three digits."""
    return f"{value:,.0f}" if value >= 1.5 else f"{value:.3g}"


def line(preset: str, field: str, of: Ids | Top | Gini, values: tuple[float, float]) -> list[str]:
    """A line of the table; `values` are the published number and ours."""
    published, ours = values
    return [preset, field, name_of(of), *map(number, values), f"{ours / published:.2f}"]


def lines(preset: str) -> Iterator[list[str]]:
    """Every fact beside the preset's value; for counts also their sums."""
    sums: dict[Ids, tuple[float, float]] = {}
    facts = [
        (law, fact)
        for law in LOG_PRESETS[preset].fields
        for fact in FACTS[preset].get(law.name, ())
    ]
    for law, fact in facts:
        values = fact.value, given(law, LOG_PRESETS[preset].knobs, fact.of)
        yield [*line(preset, law.name, fact.of, values), fact.source]
        if isinstance(fact.of, Ids):
            before = sums.get(fact.of, (0.0, 0.0))
            sums[fact.of] = before[0] + values[0], before[1] + values[1]
    yield from ([*line(preset, "all", of, values), ""] for of, values in sums.items())


def kept() -> list[str]:
    """A fact held out of the fit: ids of all Kaggle columns that occur 200 times."""
    preset = LOG_PRESETS["criteo-kaggle"]
    often = Ids(preset.knobs.samples, 200)
    ours = sum(given(law, preset.knobs, often) for law in preset.fields)
    return [*line(preset.name, "all", often, (117_581 - 13 - 26, ours)), "cutoff"]


def fitted_laws() -> None:
    """Print every field that has facts as field_laws.csv has it."""
    sides = "uict"
    for preset, facts in FACTS.items():
        for law in LOG_PRESETS[preset].fields:
            if law.name in facts:
                found = fit(law, LOG_PRESETS[preset].knobs, facts[law.name])
                names = (preset, found.name, found.num_rows, sides[found.side])
                shape = (found.exponent, found.offset, found.tail, found.top)
                print(*names, *shape, sep=",", flush=True)


HEADINGS = ("preset", "field", "fact", "published", "ours", "ratio", "source")
NOTES = """\
In closed form: no sample was drawn. A ratio is ours over the published number. Sources:

"""


@click.command()
@click.option("--fit", "fits", is_flag=True, help="Fit the laws again and print them.")
def main(fits: bool) -> None:
    if fits:
        fitted_laws()
        return
    found = [cells for preset in FACTS for cells in lines(preset)]
    table = markdown(HEADINGS, [*found, kept()])
    sources = "\n".join(f"- {name}: {text}." for name, text in SOURCES.items())
    record("calibrate", "The presets beside published facts", f"{table}\n\n{NOTES}{sources}")


if __name__ == "__main__":
    main()
