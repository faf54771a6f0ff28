"""Reports in a real browser: no errors, the JSON's numbers, controls that work.

`EMBROUTE_SCREENSHOTS=1 pytest -m "" tests/test_browser.py` makes the screenshots in docs/images.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.pages import compared, trained

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
IMAGES = Path(__file__).parent.parent / "docs" / "images"
FULL = "EMBROUTE_SCREENSHOTS" in os.environ  # the whole of the demo, for the pictures
SHORT: tuple[str, ...] = (
    "--policies",
    "vanilla,esd(1),lower-bound",
    "--steps",
    "14",
    "--warmup",
    "4",
)
SHORT += ("--report-caches", "10%,20%")
pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver"
    ),
]
Made = tuple[Path, dict[str, Any]]
Browser = webdriver.Chrome


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(option)
    options.add_argument("--hide-scrollbars")
    options.binary_location = CHROMIUM or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_window_size(1280, 1000)
    # What a viewer without a network sees.
    driver.execute_cdp_cmd("Network.enable", {})
    blocked = {"urls": ["http://*", "https://*"]}
    driver.execute_cdp_cmd("Network.setBlockedURLs", blocked)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("compare")
    return compared(folder, *(("--compute-ms-per-sample", "0.002") if FULL else SHORT))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "esd"
    return trained(folder, "esd(1)", 1200, 200_000) if FULL else trained(folder, "esd(1)", 20)


@pytest.fixture(scope="module")
def traded(tmp_path_factory: pytest.TempPathFactory) -> Made:
    whole = ("--data", "criteo-kaggle", "--dim", "512")
    options = ("--policies", "vanilla", "--report-caches", "none", "--tradeoffs")
    few = whole if FULL else ("--steps", "60", "--batch", "16")
    return compared(tmp_path_factory.mktemp("tradeoffs"), *options, *few)


def scheme(browser: Browser, preferred: str) -> None:
    wanted = {"features": [{"name": "prefers-color-scheme", "value": preferred}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)


def load(browser: Browser, page: Path, preferred: str = "light") -> None:
    scheme(browser, preferred)
    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(lambda b: root(b, "ready") == "yes")


def root(browser: Browser, name: str) -> str:
    return str(browser.execute_script(f"return document.documentElement.dataset.{name}"))


def faults(browser: Browser) -> list[str]:
    """Warnings and errors on the console since the last call."""
    entries = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries if entry["level"] != "INFO"]


def column(browser: Browser, source: str, name: str) -> list[float]:
    """The data that a figure draws now."""
    script = """
        const model = Bokeh.documents.map((d) => d.get_model_by_name(arguments[0])).find((m) => m);
        return Array.from(model.data[arguments[1]]);
    """
    return [float(value) for value in browser.execute_script(script, source, name)]


def inked(browser: Browser) -> int:
    """Pixels of all canvases that are not blank."""
    script = """
        const found = [];
        const walk = (node) => {
            if (node.shadowRoot) walk(node.shadowRoot);
            for (const child of node.children || []) walk(child);
            if (node.tagName === "CANVAS" && node.width && node.height) found.push(node);
        };
        walk(document.body);
        return found.map((c) => c.getContext("2d").getImageData(0, 0, c.width, c.height).data)
            .reduce((sum, data) => sum + data.filter((v, i) => i % 4 === 3 && v > 0).length, 0);
    """
    return int(browser.execute_script(script))


def picture(browser: Browser, name: str, selector: str) -> None:
    if FULL:
        time.sleep(1)  # figures draw a frame after they are told to
        IMAGES.mkdir(exist_ok=True)
        height = browser.execute_script("return document.body.scrollHeight")
        browser.set_window_size(1280, height + 200)
        time.sleep(1)
        browser.find_element(By.CSS_SELECTOR, selector).screenshot(str(IMAGES / name))
        browser.set_window_size(1280, 1000)


def test_comparison_page_loads_without_errors(browser: Browser, made: Made) -> None:
    load(browser, made[0])
    assert faults(browser) == []
    assert inked(browser) > 10_000
    picture(browser, "compare-traffic.png", "section:nth-of-type(2)")
    picture(browser, "compare-cost.png", "section:nth-of-type(3)")
    picture(browser, "compare-cache.png", "section:nth-of-type(4)")


def test_comparison_table_shows_the_json_values(browser: Browser, made: Made) -> None:
    load(browser, made[0])
    rows = browser.find_elements(By.CSS_SELECTOR, "#sheet tbody tr")
    shown = [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]
    assert [cells[0].split(" ")[0] for cells in shown] == list(made[1]["policies"])
    for cells, entry in zip(shown, made[1]["policies"].values(), strict=True):
        assert cells[1] == f"{sum(entry['rows'].values()):,}"
        assert cells[3] == f"{1e3 * entry['transmission_cost_s']:,.2f}"
        assert cells[5] == f"{1e3 * entry['step_time_s']:,.4f}"


def test_unit_control_switches_rows_and_bytes(browser: Browser, made: Made) -> None:
    load(browser, made[0])
    entries = made[1]["policies"].values()
    pulled = column(browser, "traffic", "miss_pull")
    assert pulled == pytest.approx([e["bytes"]["miss_pull"] / 1e6 for e in entries])
    Select(browser.find_element(By.ID, "unit")).select_by_visible_text("rows")
    assert column(browser, "traffic", "miss_pull") == [e["rows"]["miss_pull"] for e in entries]
    assert faults(browser) == []


def test_policy_control_changes_the_breakdown(browser: Browser, made: Made) -> None:
    load(browser, made[0])
    control = Select(browser.find_element(By.ID, "policy"))
    assert {option.text for option in control.options} <= set(made[1]["policies"])
    for name in ("vanilla", "esd(1)"):
        control.select_by_visible_text(name)
        step_ms = 1e3 * made[1]["policies"][name]["step_time_s"]
        assert column(browser, "breakdown", "total") == pytest.approx([step_ms] * 8)
    assert faults(browser) == []
    picture(browser, "compare-policy.png", "section:last-of-type")


def canvas_ink(browser: Browser) -> str:
    script = """
        const model = Bokeh.documents[0]._all_models;
        return [...model.values()].find((m) => m.type === "Title").text_color;
    """
    return str(browser.execute_script(script))


def test_dark_theme_follows_the_system_and_the_button(browser: Browser, made: Made) -> None:
    load(browser, made[0], "dark")
    assert root(browser, "theme") == "dark"
    dark = canvas_ink(browser)
    picture(browser, "compare-dark.png", "section:last-of-type")
    browser.find_element(By.ID, "theme").click()
    assert root(browser, "theme") == "light"
    assert canvas_ink(browser) != dark
    scheme(browser, "light")
    browser.find_element(By.ID, "theme").click()
    assert (root(browser, "theme"), canvas_ink(browser)) == ("dark", dark)
    assert faults(browser) == []


def test_page_offers_its_json_for_download(browser: Browser, made: Made) -> None:
    load(browser, made[0])
    script = """
        const done = arguments[arguments.length - 1];
        const link = document.querySelector("#downloads a");
        fetch(link.href).then((answer) => answer.json()).then(done);
    """
    fetched = browser.execute_async_script(script)
    fetched.pop("report")
    assert fetched == made[1]


def test_tradeoff_tables_show_the_figures_of_papers(browser: Browser, traded: Made) -> None:
    load(browser, traded[0])
    assert faults(browser) == []
    tables = browser.find_elements(By.CSS_SELECTOR, "table.prose")
    assert len(tables) == 5
    text = "\n".join(table.text for table in tables)
    for figure in ("59 % fewer", "79.62 (100)", "20.68x", "36.76 % lower", "2.3x less", "up to 6x"):
        assert figure in text
    widths = [table.size["width"] for table in tables]
    page = browser.execute_script("return document.documentElement.clientWidth")
    assert max(widths) < page
    for i, name in enumerate(("cache", "staleness", "bandwidth", "ratio", "box")):
        picture(browser, f"tradeoff-{name}.png", f"section:nth-of-type({4 + i})")


def against(browser: Browser, name: str) -> list[float]:
    Select(browser.find_element(By.ID, "against")).select_by_visible_text(name)
    return column(browser, "loss-0", "x")


def test_run_page_draws_loss_against_steps_time_and_bytes(browser: Browser, run: Path) -> None:
    load(browser, run / "report.html")
    steps = column(browser, "loss-0", "x")
    assert steps == sorted(set(steps))
    assert steps[-1] == (1200 if FULL else 20)
    moved = against(browser, "bytes moved")
    assert moved == sorted(moved)
    assert moved != against(browser, "time")
    against(browser, "steps")
    assert faults(browser) == []
    picture(browser, "train-quality.png", "section:nth-of-type(2)")
    picture(browser, "train-traffic.png", "section:nth-of-type(3)")


TIP = """
    const found = [];
    const walk = (node) => {
        if (node.classList && node.classList.contains("bk-Tooltip")) found.push(node);
        if (node.shadowRoot) walk(node.shadowRoot);
        for (const child of node.children || []) walk(child);
    };
    walk(document.body);
    const tip = found.find((node) => node.getBoundingClientRect().width > 0);
    if (!tip) return null;
    const parts = [...tip.shadowRoot.querySelectorAll(".tip > span")];
    const ground = getComputedStyle(tip).backgroundColor;
    return {text: parts.map((part) => part.textContent.trim()).join(" "), ground,
            inks: parts.map((part) => getComputedStyle(part).color)};
"""


def hover(browser: Browser, figure: str) -> dict[str, Any]:
    """Move the mouse over a figure until values appear."""
    element = browser.find_element(By.ID, figure)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    width, height = element.size["width"], element.size["height"]
    for down in range(-height // 2 + 60, height // 2 - 60, 9):
        ActionChains(browser, 1).move_to_element_with_offset(
            element, -width // 2 + 120, down
        ).move_by_offset(15, 1).perform()
        tip = browser.execute_script(TIP)
        if tip is not None:
            return dict(tip)
    pytest.fail(f"no values over {figure}")


def brightness(color: str) -> float:
    """Relative luminance (WCAG 2) of a colour as the browser reports it."""
    channels = [float(part) / 255 for part in re.findall(r"[\d.]+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("preferred", ["light", "dark"])
def test_tooltips_are_legible_in_both_themes(browser: Browser, made: Made, preferred: str) -> None:
    load(browser, made[0], preferred)
    tip = hover(browser, "figure-0")
    policy = next(name for name in made[1]["policies"] if f"{name}:" in tip["text"])
    whole = sum(made[1]["policies"][policy]["bytes"].values()) / 1e6
    told = re.search(r"in all:? *([\d,.]+)", tip["text"])
    assert told is not None
    assert float(told.group(1).replace(",", "")) == pytest.approx(whole, abs=1e-3)
    ground = brightness(tip["ground"])
    assert (ground < 0.2) == (preferred == "dark")
    for ink in tip["inks"]:
        dark, light = sorted((ground, brightness(ink)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, tip["ground"])
    assert faults(browser) == []


def test_run_page_draws_the_timeline_of_workers(browser: Browser, run: Path) -> None:
    load(browser, run / "report.html")
    spent = column(browser, "measured-0-compute", "ms")
    starts = column(browser, "measured-0-compute", "from")
    ends = column(browser, "measured-0-compute", "to")
    assert [end - start for start, end in zip(starts, ends, strict=True)] == pytest.approx(spent)
    last = browser.find_elements(By.CSS_SELECTOR, ".figure")[-1].get_attribute("id")
    tip = hover(browser, last or "")
    assert re.search(r"ms:? *[\d.]+ from", tip["text"]), tip["text"]
    assert faults(browser) == []
    picture(browser, "train-timeline.png", "section:last-of-type")
