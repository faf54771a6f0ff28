"""The papers' trade-offs: curves hold the measured points, beside the papers' own figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from embroute.cli.main import cli
from embroute.config.cluster import star_cluster
from embroute.config.cluster_file import open_cluster
from embroute.data.open import open_source
from embroute.planner.setup import Setup
from embroute.report import papers
from embroute.report.tradeoffs import CLAIMS, PANELS, PointRatio, curves, tradeoff_sections
from embroute.simulator.recorder import TradeoffPoint
from embroute.simulator.simulation import Workload
from embroute.simulator.sweeps import (
    BOX_POLICIES,
    EQUAL_GBIT,
    LINK_RATIOS,
    PAPER_CACHES,
    STALENESS_BOUNDS,
    TRADEOFF_POLICIES,
    tradeoff_cases,
)
from tests.pages import MOST_BYTES, block, compared

pytestmark = pytest.mark.xdist_group("tradeoffs")

SHORT: tuple[str, ...] = ("--policies", "vanilla", "--steps", "60", "--batch", "16")
SHORT += ("--report-caches", "none", "--tradeoffs")
Points = list[dict[str, Any]]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("tradeoffs"), *SHORT)[0]


@pytest.fixture(scope="module")
def points(page: Path) -> Points:
    found: Points = json.loads(block(page, "files")["comparison.json"])["report"]["tradeoffs"]
    return found


@pytest.mark.full
def test_tradeoff_panels_measure_every_point(points: Points) -> None:
    measured = {
        panel: {(p["policy"], p["x"]) for p in points if p["panel"] == panel} for panel in PANELS
    }
    varied = {"cache": PAPER_CACHES, "bandwidth": EQUAL_GBIT, "ratio": LINK_RATIOS}
    for panel, values in varied.items():
        assert measured[panel] == {(name, x) for name in TRADEOFF_POLICIES for x in values}
    assert measured["box"] == {(name, x) for name in BOX_POLICIES for x in EQUAL_GBIT}
    assert measured["staleness"] == {(f"het({bound})", bound) for bound in STALENESS_BOUNDS}


@pytest.mark.full
def test_tradeoffs_have_the_direction_of_the_papers(points: Points) -> None:
    found = {(p["panel"], p["policy"], p["x"]): p for p in points}
    assert found["cache", "herald", 10]["rows"] < found["cache", "vanilla", 10]["rows"]
    rows = [found["staleness", f"het({bound})", bound]["rows"] for bound in STALENESS_BOUNDS]
    assert rows == sorted(rows, reverse=True)
    costs = [found["ratio", name, 10]["transmission_cost_s"] for name in ("esd(1)", "herald")]
    assert costs[0] < costs[1]
    fast = found["bandwidth", "vanilla", 100.0]["step_time_s"]
    assert fast < found["bandwidth", "vanilla", 1.0]["step_time_s"]


@pytest.mark.full
def test_tradeoff_page_shows_the_figures_of_papers(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(text.encode()) < MOST_BYTES
    body = text.split("<main>")[1].split("</main>")[0]
    for panel, claims in CLAIMS.items():
        assert PANELS[panel].title in body
        for claim in claims:
            assert claim.figure.replace("&", "&amp;") in body
            assert claim.setting in body
    assert "not measured" not in body


def test_tradeoff_curves_are_shares_of_their_base() -> None:
    points = [
        TradeoffPoint("cache", "vanilla", 4, 200, 1.0, 1.0),
        TradeoffPoint("cache", "herald", 4, 50, 1.0, 1.0),
        TradeoffPoint("cache", "herald", 10, 50, 1.0, 1.0),  # its base does not fit
    ]
    drawn = {
        curve.name: (list(curve.x), list(curve.y)) for curve in curves(PANELS["cache"], points)
    }
    assert drawn == {"vanilla": ([4], [100]), "herald": ([4], [25])}
    [section] = tradeoff_sections(points)
    assert section.sheet is not None
    assert next(row[3] for row in section.sheet.rows) == (
        "rows, cache 10 %: not measured; rows, cache 4 %: herald 75 % less than vanilla"
    )


def test_every_published_system_has_a_claim_beside_its_own_baseline() -> None:
    sources = {claim.source for claims in CLAIMS.values() for claim in claims}
    assert sources == {papers.HET, papers.HERALD, papers.ESD, papers.FAE, papers.SCARS}
    # Herald's paper ran HET in BSP: without staleness, which is vanilla.
    [over_het] = [claim for claim in CLAIMS["bandwidth"] if claim.source == papers.HERALD]
    points = [
        TradeoffPoint("bandwidth", name, 100, 1, 1.0, time_s)
        for name, time_s in (("herald", 1.0), ("vanilla", 2.0), ("het(100)", 0.5))
    ]
    section = tradeoff_sections(points)[0]
    assert section.sheet is not None
    row = next(row for row in section.sheet.rows if row[1] == over_het.figure)
    assert row[3] == "100 Gbit/s: herald 2.00x as fast as vanilla"


def test_a_policy_that_moves_more_is_not_said_to_move_less() -> None:
    more = PointRatio("rows", "rows", ("fae", 1), ("vanilla", 1))
    points = [
        TradeoffPoint("box", name, 1, rows, 1, 1) for name, rows in (("fae", 3), ("vanilla", 2))
    ]
    by_setting = {(point.policy, point.x): point for point in points}
    assert more.sentence(by_setting) == "rows: fae 50 % more than vanilla"


def test_replicas_are_priced_on_one_host_with_the_network_varied() -> None:
    source = open_source("online-retail")
    job = Workload(source, Setup(source.schema, open_cluster("edge-4")))
    boxes = [case for case in tradeoff_cases(job) if case.panel == "box"]
    assert {case.policy.name for case in boxes} == set(BOX_POLICIES)
    hosts = {case.x: case.job.setup.cluster.hosts for case in boxes}
    assert hosts[100.0] == open_cluster("box-4").hosts
    assert hosts[10.0][0].up_bytes_s == hosts[10.0][1].down_bytes_s == 1.25e9
    assert hosts[10.0][1].inside_bytes_s == hosts[100.0][1].inside_bytes_s


def test_tradeoff_cases_vary_only_their_axis() -> None:
    source = open_source("online-retail")
    job = Workload(source, Setup(source.schema, open_cluster("edge-8"), optimizer="adam"))
    cases = tradeoff_cases(job)
    assert {case.policy.name for case in cases if case.policy.name[:3] == "het"} == {"het(0)"}
    widest = next(case for case in cases if case.panel == "ratio" and case.x == 10)
    assert widest.job.setup.cluster.hosts == open_cluster("edge-8").hosts
    equal = next(case for case in cases if case.panel == "bandwidth" and case.x == 100)
    assert equal.job.setup.cluster.hosts == star_cluster([100.0] * 8, 100.0).hosts
    assert equal.job.setup.optimizer == "adam"
    occurring = len(np.unique(np.concatenate([batch.rows for batch in job.batches()])))
    assert equal.job.setup.capacity_WA[0].sum() == occurring // 10


def test_tradeoffs_option_requires_a_report() -> None:
    result = CliRunner().invoke(cli, ["compare", "--tradeoffs"])
    assert isinstance(result.exception, ValueError)
    assert "--tradeoffs" in str(result.exception)
