"""Writes docs/options.md from the fields of all options: `python -m tests.options_page`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from embroute.config.data_options import DataOptions
from embroute.config.option_model import Group, Options, extra_of, words_of
from embroute.config.run_options import AdviceOptions, JobOptions, RunConfig
from embroute.nn.settings import PrepareOptions

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
VIEWS: Mapping[str, type[Options]] = {
    "train": RunConfig,
    "compare, simulate": JobOptions,
    "advise": AdviceOptions,
    "`prepare`": PrepareOptions,
    "files": DataOptions,
}
HEAD = """# All options

One description of a run stands behind `embroute train`, `compare`, `simulate`, `advise`, run files,
the Python API and `embroute.prepare`. An option has the same name, default and range wherever it
occurs. On the command line it is `--name-with-dashes`; in run files and in Python it is
`name_with_underscores`. `embroute schema` prints the same as a JSON schema, with which editors
check and complete run files. Options of *files* go with any command that reads data; in a run file
they stand under `data_options`.

`python -m tests.options_page` writes this page from the code; a test compares both.
"""


def _cell(value: object) -> str:
    """A default as the table shows it."""
    none = value is None or (not isinstance(value, bool | int | float) and not value)
    text = str(value).replace("|", "\\|")
    return "" if none or isinstance(value, Options) else f"`{text}`"


def _rows_of(group: Group) -> Iterator[str]:
    """Lines of a group's table; views that describe an option alike share a line."""
    names = dict.fromkeys(name for view in VIEWS.values() for name in view.model_fields)
    for name in names:
        alike: dict[tuple[str, str], list[str]] = {}
        for title, view in VIEWS.items():
            field = view.model_fields.get(name)
            if field is not None and (extra_of(field, "group") or "") == group:
                alike.setdefault((_cell(field.default), _meaning(field)), []).append(title)
        for (default, text), titles in alike.items():
            yield f"| `{name}` | {', '.join(titles)} | {default} | {text} |"


def _meaning(field: FieldInfo) -> str:
    """The help text, and the words to choose from if the text does not name them all."""
    text, words = (field.description or "").replace("|", "\\|"), words_of(field.annotation)
    missing = [word for word in words if str(word) not in text]
    return f"{text} One of {', '.join(f'`{word}`' for word in words)}." if missing else text


def page() -> str:
    """The text of the page."""
    sections = [HEAD]
    for group in Group:
        rows = list(_rows_of(group))
        if rows:
            title = group.value or "Not on the command line"
            head = "| option | of | default | meaning |\n| --- | --- | --- | --- |"
            sections.append("\n".join([f"## {title}\n", head, *rows]) + "\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
