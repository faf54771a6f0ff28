"""A self-contained HTML file: figures, controls, a table, the data to download."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bokeh.embed import json_item
from bokeh.plotting import figure
from bokeh.resources import Resources

HERE = Path(__file__).parent
ControlSettings = Mapping[str, Mapping[str, object]]  # name of a model -> its properties


@dataclass(frozen=True)
class Control:
    """A choice on the page: each option sets properties of named models."""

    name: str
    label: str
    options: Mapping[str, ControlSettings]


@dataclass(frozen=True)
class Sheet:
    """A table: headings, rows of cells, the first cell a name."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, figures, the controls above them, a table below."""

    title: str
    text: str
    figures: Sequence[figure] = ()
    controls: Sequence[Control] = ()
    wide: bool = False  # one figure a row
    sheet: Sheet | None = None  # below the figures


@dataclass(frozen=True)
class Page:
    """All of a report."""

    title: str
    facts: str
    sheet: Sheet
    sections: Sequence[Section]
    files: Mapping[str, str] = field(default_factory=dict)  # to download: name -> text


def _block(name: str, value: object) -> str:
    """A script element with JSON; no text inside can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _table(sheet: Sheet, kind: str) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in sheet.headings)
    rows = (
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        for cells in sheet.rows
    )
    return (
        f'<div class="scroll"><table {kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _control(control: Control) -> str:
    options = "".join(f"<option>{html.escape(name)}</option>" for name in control.options)
    return (
        f'<label class="control">{html.escape(control.label)} '
        f'<select id="{control.name}">{options}</select></label>'
    )


def _section(section: Section, first: int) -> str:
    targets = "".join(
        f'<div class="figure" id="figure-{first + i}" style="min-height:{fig.height}px"></div>'
        for i, fig in enumerate(section.figures)
    )
    controls = "".join(_control(control) for control in section.controls)
    sheet = _table(section.sheet, 'class="prose"') if section.sheet else ""
    kind = "figures wide" if section.wide or len(section.figures) == 1 else "figures"
    return (
        f"<section><h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>"
        f'{controls}<div class="{kind}">{targets}</div>{sheet}</section>'
    )


def render(page: Page) -> str:
    """The file's text."""
    items: list[object] = []
    sections = []
    for section in page.sections:
        sections.append(_section(section, len(items)))
        items += [
            json_item(fig, target=f"figure-{len(items) + i}")
            for i, fig in enumerate(section.figures)
        ]
    controls = {c.name: c.options for section in page.sections for c in section.controls}
    texts = {
        "NAME": html.escape(page.title),
        "TITLE": html.escape(page.title),
        "FACTS": html.escape(page.facts),
        "SHEET": _table(page.sheet, 'id="sheet"'),
        "SECTIONS": "\n".join(sections),
        "STYLE": (HERE / "page.css").read_text("utf-8"),
        "DATA": "\n".join(
            _block(name, value)
            for name, value in (("items", items), ("controls", controls), ("files", page.files))
        ),
        "BOKEH": Resources(mode="inline", components=["bokeh"]).render_js(),
        "SCRIPT": (HERE / "page.js").read_text("utf-8"),
    }
    text = (HERE / "page.html").read_text("utf-8")
    # One pass: the name of a data set may look like a placeholder too.
    return re.sub(r"{{([A-Z]+)}}", lambda placeholder: texts[placeholder.group(1)], text)


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows as the text of a CSV file."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
