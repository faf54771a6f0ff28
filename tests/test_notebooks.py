"""Notebooks: what a cell shows, and the notebooks of the examples run from start to end."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
WRITES = "%%writefile "  # the first line of a cell that becomes a file
OPTIONS = "network='dc-2', steps=15, policies='esd(1)'"


def notebook_of(*cells: str) -> nbformat.NotebookNode:
    code = [nbformat.v4.new_code_cell(cell) for cell in cells]  # type: ignore[no-untyped-call]
    notebook: nbformat.NotebookNode = nbformat.v4.new_notebook(cells=code)  # type: ignore
    return notebook


def outputs_of(notebook: nbformat.NotebookNode) -> Sequence[Sequence[nbformat.NotebookNode]]:
    """Run a notebook; the outputs of each cell. An error in a cell is raised."""
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": EXAMPLES}}).execute()
    return [cell.get("outputs", []) for cell in notebook.cells]


@pytest.mark.full
def test_a_cell_shows_progress_that_goes_and_a_table_once() -> None:
    compare = f"import embroute; compared = embroute.compare({OPTIONS})"
    progress, table, text = outputs_of(notebook_of(compare, "compared", "print(compared)"))
    assert [output.data["text/html"] for output in progress] == ["", ""]
    assert len(table) == 1
    assert "esd(1)" in table[0].data["text/html"]
    assert table[0].data["text/plain"] == "Comparison('online-retail(negatives=1)', 2 policies)"
    assert [output.output_type for output in text] == ["stream"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs_and_its_imports_work(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    written = [cell.source.split()[1] for cell in notebook.cells if WRITES in cell.source]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            for module in imports(code_of(cell.source)):
                assert f"{module}.py" in written or find_spec(module)


def code_of(source: str) -> str:
    """A cell without the line of its magic."""
    return source.partition("\n")[2] if source.startswith(WRITES) else source


def imports(code: str) -> Iterator[str]:
    """Modules that some code imports; it must parse."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    outputs_of(notebook)


def test_there_are_two_notebooks() -> None:
    assert len(NOTEBOOKS) == 2
