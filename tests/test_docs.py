"""The manual: links that lead somewhere, figures as their source pages have them, lists in full.

`python -m tests.test_docs` writes the list of policies anew.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import embroute
from embroute.planner.interfaces import Policy
from embroute.policies.catalog import DISPATCHES, EVICTS, SYNCS, SYSTEMS, Factory

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RESULT_NAME = re.compile(r"(.+)-(\d{4}-\d\d-\d\d)\.md")
RESULT_LINK = re.compile(r"benchmarks/results/([\w-]+-\d{4}-\d\d-\d\d\.md)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
PRIVATE_FOLDER = re.compile(r"(?<![\w.])/(?:home|work|root|Users|tmp)/\S+")
ROOMS_OF_FILES = (ROOT, ROOT / "embroute")
SVG = "{http://www.w3.org/2000/svg}"

# A phrase of README, the results page that it is taken from, and what stands there.
CLAIMS = [
    ("0.387 to 0.699", "own", "| Globo, 600,000 by time | over the published | 0.387 |"),
    ("0.387 to 0.699", "own", "| synthetic criteo-kaggle | over the published | 0.699 |"),
    ("0.665 to 0.837", "own", "over the published | 0.387 | 0.459 | 0.665 |"),
    ("0.665 to 0.837", "own", "over the published | 0.478 | 0.530 | 0.837 |"),
    ("0.5255", "bytes", "| 0.5255 | 0.5255 |"),
    ("0.7364", "bytes", "| 0.7364 | 0.7364 |"),
    ("0.5602", "bytes", "| 0.5602 | 0.5602 |"),
    ("0.52 of", "training-shaped", "| 1gbit | embroute esd(1), cache 100 % | 72.4 | 0.52 |"),
    ("0.41 at", "training-shaped", "| 0.1gbit | embroute esd(1), cache 100 % | 278.0 | 0.41 |"),
    ("within 0.3 %", "advice", "synthetic criteo-kaggle, dc-8, default | 48 | nocache"),
    ("within 0.3 %", "advice", "| 6.41 | 6.40 | 1.003 |"),
    ("90.9 %", "headlines", "| criteo-kaggle | -88 %, as time on 1 GbE | -90.9% | agrees |"),
    ("13.6 to 33.4 %", "headlines", "| avazu | -48 to -89 % | -13.6% | agrees |"),
    ("13.6 to 33.4 %", "headlines", "| movielens-25m | -48 to -89 % | -33.4% | agrees |"),
    ("6.4 to 56.4 %", "headlines", "| criteo-kaggle | up to -36.76 % | -6.4% | agrees |"),
    ("6.4 to 56.4 %", "headlines", "| movielens-25m | up to -36.76 % | -56.4% | agrees |"),
    ("1.13 to 1.79", "headlines", "1.52x (XDL, CPU and GPU) | 1.13x | agrees |"),
    ("1.13 to 1.79", "headlines", "1.52x (XDL, CPU and GPU) | 1.79x | agrees |"),
    ("2.50 to 4.44", "headlines", "up to 6x throughput (Criteo Terabyte) | 2.50x | agrees |"),
    ("2.50 to 4.44", "headlines", "up to 6x throughput (Criteo Terabyte) | 4.44x | agrees |"),
    ("within 3 %", "sanity", "| 0.730 | 0.75 | -2.6 % |"),
]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def newest_results() -> Mapping[str, str]:
    """The newest results page of each benchmark, by the benchmark's name."""
    dated = (RESULT_NAME.fullmatch(path.name) for path in sorted(RESULTS.glob("*.md")))
    return {match[1]: match[0] for match in dated if match}


def outdated_results(text: str) -> list[str]:
    """Names of results pages that are not the newest page of their benchmark, or do not exist."""
    newest = newest_results().values()
    return [name for name in RESULT_LINK.findall(text) if name not in newest]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and GitLab derive them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that name no file of the repository, or no heading of the file."""
    broken = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if (
            not path.is_relative_to(ROOT)
            or not path.exists()
            or (anchor and anchor not in anchors(path))
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_result_links_name_the_newest_page_of_their_benchmark(page: Path) -> None:
    assert not outdated_results(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_and_anchors_exist(page: Path) -> None:
    assert not broken_links(page, page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_page_names_a_private_folder(page: Path) -> None:
    assert not PRIVATE_FOLDER.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`([a-z_]+/[\w/]+\.(?:py|sh))`", page.read_text())
    assert not [name for name in named if not any((at / name).exists() for at in ROOMS_OF_FILES)]


@pytest.mark.parametrize(("phrase", "benchmark", "source"), CLAIMS)
def test_key_claims_of_the_readme_stand_in_the_page_that_they_cite(
    phrase: str, benchmark: str, source: str
) -> None:
    readme, page = (ROOT / "README.md").read_text(), newest_results()[benchmark]
    paragraph = next((part for part in re.split(r"\n\n|\n- ", readme) if phrase in part), "")
    assert f"benchmarks/results/{page}" in paragraph
    assert source in (RESULTS / page).read_text()


def test_diff_of_the_readme_is_that_of_the_examples() -> None:
    readme = (ROOT / "README.md").read_text()
    diff = readme.partition("```diff\n")[2].partition("```")[0].splitlines()
    plain, routed = (
        (ROOT / "examples" / f"deepfm_{kind}.py").read_text().splitlines()
        for kind in ("plain", "routed")
    )
    changes = [line for line in unified_diff(plain, routed, n=0) if line[:1] in "+-"][2:]
    assert sorted(line for line in changes if line[1:].strip()) == sorted(
        line for line in diff if line[:1] in ("+", "-")
    )


def test_demo_assumes_the_compute_time_that_the_readme_names() -> None:
    option = "--compute-ms-per-sample 0.05"
    assert option in (ROOT / "README.md").read_text()
    assert re.search(rf"compare .*{option}", (ROOT / "Makefile").read_text())


def bars(panel: str) -> list[tuple[str, str, float]]:
    """Label, printed value and width of each bar of a panel of the README's picture."""
    root = ElementTree.parse(ROOT / "docs" / "pictures" / "savings.svg").getroot()
    group = next(group for group in root.iter(f"{SVG}g") if group.get("id") == panel)
    return [
        (str(label.text), str(value.text), float(bar.get("width", "0")))
        for (label, bar), value in zip(pairwise(group), list(group)[2:], strict=False)
        if bar.tag == f"{SVG}rect"
    ]


@pytest.mark.parametrize(("panel", "count"), [("simulated", 5), ("measured", 3)])
def test_bars_of_the_picture_are_as_long_as_their_values(panel: str, count: int) -> None:
    found = bars(panel)
    assert len(found) == count
    scale = found[0][2] / float(found[0][1])
    assert [width for _, _, width in found] == pytest.approx(
        [scale * float(value) for _, value, _ in found], abs=0.1
    )


def test_simulated_bars_of_the_picture_stand_in_the_table_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for label, value, _ in bars("simulated"):
        name = re.escape(label.split(",")[0])
        assert re.search(rf"^ {name}\*? +\S+ +\S+ +{re.escape(value)}M ", readme, re.MULTILINE)


def test_measured_bars_of_the_picture_stand_in_the_newest_page() -> None:
    page = newest_results()["training-shaped"]
    lines = [line for line in (RESULTS / page).read_text().splitlines() if "| 1gbit |" in line]
    for label, value, _ in bars("measured"):
        contender = label.replace(" trainer,", "")
        assert any(contender in line and f"| {value} |" in line for line in lines), label
    assert page in (ROOT / "docs" / "pictures" / "savings.svg").read_text()


def test_reference_has_exactly_the_public_names() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    names = re.findall(r"^::: embroute\.(\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted({*embroute.__all__} - {"__version__"})


POLICIES = ROOT / "docs" / "policies.md"
GENERATED = "<!-- generated by `python -m tests.test_docs` -->\n"


def entry(name: str, factory: Factory) -> str:
    """A heading as users type the policy, its docstring, and the parts of a whole policy."""
    parameters = inspect.signature(factory).parameters.values()
    options = [one.name + ("" if one.default is None else f"={one.default}") for one in parameters]
    call = f"{name}({', '.join(options)})" if options else name
    text = inspect.getdoc(factory) or ""
    made = factory()
    if isinstance(made, Policy):
        text = f"{text.rstrip('.')}. Parts: {parts_of(made)}"
    return f"### `{call}`\n\n{text[0].upper()}{text[1:].removesuffix('.')}.\n"


def parts_of(policy: Policy) -> str:
    """The parts of a policy by name, the regrouping first."""
    regroup = [f"a regrouping `{policy.regroup.name}`"] if policy.regroup else []
    parts = [f"`{getattr(policy, kind).name}`" for kind in ("dispatch", "sync", "evict")]
    return ", ".join([*regroup, *parts])


def list_of_policies() -> str:
    kinds = {"Whole policies": SYSTEMS, "dispatch=": DISPATCHES, "sync=": SYNCS, "evict=": EVICTS}
    sections = []
    for title, factories in kinds.items():
        sections.append(f"## {title.removesuffix('=').capitalize()}\n")
        sections += [entry(name, factory) for name, factory in factories.items()]
    return "\n".join(sections)


def test_list_of_policies_has_their_docstrings() -> None:
    assert POLICIES.read_text().partition(GENERATED)[2] == "\n" + list_of_policies()


SYSTEM_SECTIONS = dict(
    section.split("\n", 1)
    for section in (ROOT / "docs" / "systems.md").read_text().split("\n## ")[1:]
)
LABELS = ["Paper", "Here", "Reconstruction", "Use it", "Figure"]


def test_every_policy_of_the_catalog_has_its_section() -> None:
    assert SYSTEM_SECTIONS.keys() == SYSTEMS.keys()
    assert "systems.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("name", SYSTEMS)
def test_section_of_a_policy_is_whole_and_fits_a_screen(name: str) -> None:
    section = SYSTEM_SECTIONS[name]
    assert re.findall(r"^- \*\*([\w ]+)\*\*", section, re.MULTILINE) == LABELS
    assert len(section.splitlines()) <= 25


@pytest.mark.parametrize("name", SYSTEMS)
def test_figures_of_a_policy_stand_in_a_page_of_results(name: str) -> None:
    figures = SYSTEM_SECTIONS[name].partition("- **Figure**")[2]
    linked = [*RESULT_LINK.findall(figures), newest_results()["catalog"]]
    pages = [(RESULTS / page).read_text() for page in linked]
    quoted = re.findall(r"\b\d+\.\d{3}\b|\b\d+\.\d %|\b\d+\.\d\dx", figures)
    assert quoted
    own_lines = [line for line in pages[-1].splitlines() if line.startswith(f"| `{name}` ")]
    text = "\n".join([*own_lines, *pages[:-1]])
    assert not [number for number in quoted if number.replace(" ", "") not in text]


@pytest.mark.full
def test_site_builds_without_warnings_and_loads_nothing_from_the_web(tmp_path: Path) -> None:
    # Not --quiet: mkdocs counts only the warnings that it shows.
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(mkdocs, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    pages = {path.name: path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "reference.html", "policies.html"} <= pages.keys()
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*src=.?https?:|<link[^>]*href=.?https?:")
    assert not [name for name, page in pages.items() if loaded.search(page)]


def test_the_checks_find_faults() -> None:
    text = (
        "[a](docs/nowhere.md) [b](docs/cluster.md#nothing) `benchmarks/results/own-2026-01-01.md`"
    )
    assert outdated_results(text) == ["own-2026-01-01.md"]
    assert broken_links(ROOT / "README.md", text) == ["docs/nowhere.md", "docs/cluster.md#nothing"]
    assert PRIVATE_FOLDER.findall("see /home/ann/data") == ["/home/ann/data"]


if __name__ == "__main__":
    before = POLICIES.read_text().partition(GENERATED)[0]
    POLICIES.write_text(f"{before}{GENERATED}\n{list_of_policies()}")
