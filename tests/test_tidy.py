"""The shape of the code: sizes, depth, names, rooms, and the direction of imports."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE_ROOT = ROOT / "embroute"
SOURCES = sorted(
    path for folder in ("embroute", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
PACKAGE = [path for path in SOURCES if path.is_relative_to(PACKAGE_ROOT)]
MODULES = [path for path in PACKAGE if path.name not in ("__init__.py", "__main__.py")]
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_DEPTH, MAX_COLUMNS = 400, 50, 6, 3, 100
MAX_MODULES = 12  # of a room
FORBIDDEN = {"utils", "common", "helpers", "types", "base", "manager"}

# Imports point from a later room to an earlier one, never back.
ROOMS = [
    "kernels",
    "config",
    "data",
    "cost",
    "planner",
    "policies",
    "models",
    "transport",
    "launch",
    "engine",
    "checkpoint",
    "nn",
    "simulator",
    "report",
    "api",
    "train",
    "cli",
]
LEVEL = {room: level for level, room in enumerate(ROOMS)}
# The product's claim: what is simulated is what is trained. So neither knows the other.
STRANGERS = {"simulator": {"transport", "launch", "engine", "checkpoint", "nn", "train"}}
WITHOUT_TORCH = {"kernels", "config", "data", "cost", "planner", "policies", "simulator", "api"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module(path: Path) -> str:
    """A module's name within the package."""
    return ".".join(path.relative_to(PACKAGE_ROOT).with_suffix("").parts)


def room(module_name: str) -> str:
    return module_name.split(".")[0]


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


def shape_faults(path: Path) -> Iterator[str]:
    lines = path.read_text().splitlines()
    if len(lines) > MAX_FILE:
        yield f"{len(lines)} lines, at most {MAX_FILE}"
    yield from (f"line {i} is too wide" for i, s in enumerate(lines, 1) if len(s) > MAX_COLUMNS)
    for function in ast.walk(TREES[path]):
        if not isinstance(function, Function):
            continue
        arguments = function.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        count -= any(a.arg in ("self", "cls") for a in arguments.args[:1])
        # The parameters of a system's factory are its options, one by one.
        if count > MAX_PARAMETERS and not function.name.endswith("_policy"):
            yield f"{function.name} has {count} parameters, at most {MAX_PARAMETERS}"
        if length(function) > MAX_FUNCTION:
            yield f"{function.name} is {length(function)} lines, at most {MAX_FUNCTION}"
        if depth(function) > MAX_DEPTH:
            yield f"{function.name} is {depth(function)} deep, at most {MAX_DEPTH}"


def test_files_and_functions_keep_their_shape() -> None:
    faults = [f"{name(path)}: {fault}" for path in SOURCES for fault in shape_faults(path)]
    assert not faults, "\n".join(faults)


def test_module_names_say_what_is_inside() -> None:
    faults = [module(path) for path in PACKAGE if FORBIDDEN & set(module(path).split("."))]
    assert not faults


def test_no_room_has_more_modules_than_a_reader_can_hold() -> None:
    rooms = Counter(path.parent for path in MODULES)
    assert not {name(folder): count for folder, count in rooms.items() if count > MAX_MODULES}


def test_no_two_modules_have_the_same_name() -> None:
    stems = Counter(path.stem for path in MODULES)
    assert not [stem for stem, count in stems.items() if count > 1]


def public_names(path: Path) -> Iterator[str]:
    for node in TREES[path].body:
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        elif isinstance(node, ast.Assign):
            targets = [n for target in node.targets for n in ast.walk(target)]
            yield from (n.id for n in targets if isinstance(n, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_no_public_name_is_defined_twice() -> None:
    where: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        for public in public_names(path):
            where[public].add(module(path))
    twice = {n: sorted(modules) for n, modules in where.items() if len(modules) > 1 and n[0] != "_"}
    assert not twice


def imports(path: Path) -> set[str]:
    """Modules of embroute that a module imports."""
    names = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    known = {f"embroute.{module(other)}" for other in MODULES}
    return {full.removeprefix("embroute.") for full in names & known}


IMPORTS = {module(path): imports(path) for path in MODULES}


def test_imports_between_rooms_point_one_way() -> None:
    backward = {
        (importer, imported)
        for importer, modules in IMPORTS.items()
        for imported in modules
        if LEVEL[room(imported)] > LEVEL[room(importer)]
    }
    assert not backward


def test_imports_inside_a_room_have_no_cycle() -> None:
    assert list(TopologicalSorter(IMPORTS).static_order())


def test_simulator_and_engine_never_import_each_other() -> None:
    faults = [
        (importer, imported)
        for importer, modules in IMPORTS.items()
        for imported in modules
        if room(imported) in STRANGERS.get(room(importer), set())
        or room(importer) in STRANGERS.get(room(imported), set()) - {"train"}
    ]
    assert not faults


def test_planner_and_simulator_do_not_import_torch() -> None:
    faults = [
        name(path)
        for path in MODULES
        if room(module(path)) in WITHOUT_TORCH
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Import | ast.ImportFrom) and "torch" in ast.unparse(node)
    ]
    assert not faults


def test_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().replace("\n", " ")
    assert not [name(path) for path in MODULES if f"{path.name} " not in text]


def members(path: Path) -> set[str]:
    """Functions, classes and methods of a module, dotted."""
    names = set()
    for node in TREES[path].body:
        if isinstance(node, ast.ClassDef | Function):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, Function)}
    return names


def test_every_function_on_the_way_of_a_sample_exists_and_is_named_once() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    way = text.split("## The way of one sample")[1].split("\n## ")[0]
    named = Counter(re.findall(r"`([a-z_]+\.[A-Za-z_][A-Za-z_.]*)`", way))
    known = {f"{path.stem}.{member}" for path in MODULES for member in members(path)}
    assert len(named) > 30
    assert not {name for name, count in named.items() if name not in known or count > 1}
