"""The shape of the code: sizes, depth, names, and the direction of imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for folder in ("embroute", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "embroute")]
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_DEPTH, MAX_COLUMNS = 400, 50, 6, 3, 100
FORBIDDEN = {"utils", "common", "helpers", "types", "base", "manager"}

# Imports point from a later room to an earlier one, never back.
ROOMS = [
    ["kernels"],
    ["config", "cluster"],
    ["data"],
    ["cost"],
    ["theory"],
    ["policy"],
    ["models"],
    ["runtime"],
    ["simulate", "train", "advise", "report"],
    ["comparison"],
    ["views"],
    ["commands"],
    ["cli"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> list[Function]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def length(function: Function) -> int:
    """Lines of a function without decorators and docstring."""
    body = function.body
    documented = ast.get_docstring(function) is not None
    docstring = (body[0].end_lineno or 0) - body[0].lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def depth(node: ast.AST) -> int:
    """Deepest nesting of blocks below a node; an elif is not deeper than its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        here = 1 if isinstance(child, BLOCKS) and not is_elif else 0
        deepest = max(deepest, here + depth(child))
    return deepest


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_shape(path: Path) -> None:
    lines = path.read_text().splitlines()
    faults = []
    if len(lines) > MAX_FILE:
        faults.append(f"{len(lines)} lines, at most {MAX_FILE}")
    faults += [
        f"line {i} is too wide" for i, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS
    ]
    for function in functions(path):
        arguments = function.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        count -= any(a.arg in ("self", "cls") for a in arguments.args[:1])
        if count > MAX_PARAMETERS:
            faults.append(f"{function.name} has {count} parameters, at most {MAX_PARAMETERS}")
        if length(function) > MAX_FUNCTION:
            faults.append(f"{function.name} is {length(function)} lines, at most {MAX_FUNCTION}")
        if depth(function) > MAX_DEPTH:
            faults.append(f"{function.name} is {depth(function)} deep, at most {MAX_DEPTH}")
    assert not faults, f"{name(path)}: " + "; ".join(faults)


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_module_names_say_what_is_inside(path: Path) -> None:
    assert not FORBIDDEN & set(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: Path) -> list[str]:
    """Rooms of embroute that a module imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [
        parts[1] for parts in (n.split(".") for n in found) if parts[0] == "embroute" and parts[1:]
    ]


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT / "embroute").with_suffix("").parts[0]
    if room in ("__init__", "__main__"):
        return
    backward = [other for other in imported(path) if LEVEL[other] > LEVEL[room]]
    assert not backward, f"{name(path)} imports {backward}"


def test_every_room_has_a_level() -> None:
    rooms = {path.relative_to(ROOT / "embroute").with_suffix("").parts[0] for path in PACKAGE}
    assert rooms - {"__init__", "__main__"} <= set(LEVEL)


def test_brain_does_not_import_torch() -> None:
    pattern = re.compile(r"^\s*(import|from) torch", re.MULTILINE)
    free = {"kernels", "config", "cluster", "data", "cost", "policy", "theory", "simulate"}
    for path in PACKAGE:
        if path.relative_to(ROOT / "embroute").with_suffix("").parts[0] in free:
            assert not pattern.search(path.read_text()), name(path)


def test_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [
        name(path)
        for path in PACKAGE
        if path.name != "__init__.py" and f"{path.name} " not in text.replace("\n", " ")
    ]
    assert not missing, f"ARCHITECTURE.md does not list {missing}"
