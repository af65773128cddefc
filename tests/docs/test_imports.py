"""Modules of the product import each other without cycles, imports for types included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("backends", "cli", "daemon", "gateways", "ipc", "scheduler", "sessions", "wire")


def modules() -> dict[str, Path]:
    """Return the modules of the product by their dotted names, packages without `__init__`."""
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}


def imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules that a module imports, at run time or for types."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            source = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                target = f"{source}.{alias.name}"
                found.add(target if target in known else source)
    return found & known.keys() - {name}


@pytest.mark.process
def test_no_modules_import_each_other_in_a_cycle() -> None:
    known = modules()
    graph = {name: imports_of(name, path, known) for name, path in known.items()}
    assert sum(map(len, graph.values())) > 1000, "the imports are found"
    TopologicalSorter(graph).prepare()
