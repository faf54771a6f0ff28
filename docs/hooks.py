"""Hooks of mkdocs: notebooks as pages, and links to files of the repository outside docs/."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import bokeh
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/embroute/embroute/blob/main"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LINK = re.compile(r"\]\((\.\./[^()\s]+|\w+\.ipynb)\)")
BOKEH = "bokeh.min.js"


def execute(path: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs of its cells; an error in a cell is raised."""
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": path.parent}}).execute()
    return notebook


def shown_output(output: dict[str, Any]) -> str:
    """An output of a cell as markdown: a frame or a figure as HTML, otherwise its text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if output.get("name") == "stderr" or "application/vnd.bokehjs_load.v0+json" in data:
        return ""  # progress, and bokeh itself, which the page loads from a file
    if "application/javascript" in data:
        return f"<script>{data['application/javascript']}</script>"
    if "text/html" in data:
        return '<div class="output">\n' + re.sub(r"\n\s*\n", "\n", data["text/html"]) + "\n</div>"
    return f"```text\n{data['text/plain'].rstrip()}\n```"


def page_of(path: Path) -> str:
    """An executed notebook as markdown."""
    parts = [f"<script src='../assets/{BOKEH}'></script>"]  # in the folder notebooks/
    for cell in execute(path).cells:
        code = cell.cell_type == "code"
        parts.append(f"```python\n{cell.source}\n```" if code else cell.source)
        parts += [shown_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(filter(None, parts))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook."""
    for path in NOTEBOOKS:
        name = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, name, content=page_of(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to notebooks lead to their pages, links to other files outside docs/ to GitHub."""
    of_notebook = page.file.src_uri.startswith("notebooks/")  # made from a file in examples/

    def target(match: re.Match[str]) -> str:
        path, hash_sign, anchor = match[1].partition("#")
        if path.endswith(".ipynb"):
            return f"]({'' if of_notebook else 'notebooks/'}{Path(path).stem}.md)"
        if of_notebook and path.startswith("../docs/"):
            return f"](../{path.removeprefix('../docs/')}{hash_sign}{anchor})"
        return f"]({REPOSITORY}/{path.removeprefix('../')}{hash_sign}{anchor})"

    return LINK.sub(target, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Figures of notebooks need bokeh's script, from the installed package."""
    script = Path(bokeh.__file__).parent / "server" / "static" / "js" / BOKEH
    shutil.copy(script, Path(config.site_dir) / "assets" / BOKEH)
