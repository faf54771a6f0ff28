"""The benchmark of headlines: every system has its lines, and cells are the simulator's figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.headlines import (
    Lab,
    Lengths,
    Scene,
    auc,
    body,
    cluster_of,
    cut,
    kinds,
    newest,
    sources_of,
    verdict,
)
from benchmarks.own import rows_moved
from embroute.config.cluster_file import open_cluster
from embroute.report import papers


def test_verdicts_have_the_sign_of_the_difference() -> None:
    assert [verdict(gain) for gain in (0.2, -0.2, 0.004)] == ["agrees", "opposite", "no difference"]
    assert cut(40, 100) == ("-60.0%", "agrees")
    assert cut(150, 100) == ("+50.0%", "opposite")


def test_networks_are_presets_or_equal_links() -> None:
    assert cluster_of("box-4") == open_cluster("box-4")
    assert {host.up_bytes_s for host in cluster_of("10 Gbit/s").hosts} == {1.25e9}


def test_auc_is_read_from_a_page_and_left_out_without_one(tmp_path: Path) -> None:
    page = tmp_path / "staleness-2026-01-01.md"
    page.write_text(
        "| 10 | het(0) | 0.9 |\n| 10 | het(100) | 0.5 |\n"
        "| 99 | het(0) | 0.8000 |\n| 99 | het(100) | 0.7500 |\n"
    )
    [line] = auc(page)
    assert (line.paper, line.ours, line.direction) == ("-0.0002 (Wide & Deep)", "-0.0500", "agrees")
    assert line.beside.startswith("99 steps")
    assert not list(auc(None))
    assert len(list(auc(newest("staleness")))) == 2


@pytest.mark.full
def test_caches_are_shares_of_the_rows_that_occur_and_kinds_add_up() -> None:
    lab = Lab(sources_of(("movielens-25m",), None, quick=True), Lengths(12, 12))
    scene = Scene("movielens-25m", "dc-8", 8, 256, 12, occurring=50)
    job = lab.job(scene)
    rows = {row for batch in job.batches() for row in batch.rows.tolist()}
    assert job.setup.capacity_WA[0].sum() == len(rows) // 2
    outcome = lab.measure(scene, "herald")
    assert lab.measure(scene, "herald") is outcome
    pulls, pushes, moved = kinds(outcome)
    assert pulls + pushes == moved == rows_moved(outcome)


@pytest.mark.full
def test_every_published_system_has_lines_with_a_direction() -> None:
    sources = sources_of(("criteo-kaggle",), None, quick=True)
    text = body(Lab(sources, Lengths(12, 12)), None)
    tables = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    systems = {papers.HET, papers.HERALD, papers.ESD, papers.FAE, papers.SCARS}
    assert tables.keys() == systems | {"BagPipe, SOSP 2023"}
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in tables.values()
        for line in table.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| headline"))
    ]
    assert len(lines) >= 20
    assert {line[4] for line in lines} <= {"", "agrees", "opposite", "no difference"}
    assert "nan" not in text
