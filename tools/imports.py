"""The imports between the library's modules, by their source: also within functions and under TYPE_CHECKING.

A name that a package's `__init__` exports counts as an import of the module that defines it.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = "raysharded"


def sources(root: Path) -> dict[str, tuple[ast.Module, bool]]:
    """The parsed modules below `root` by their dotted names, and whether each is a package's `__init__`."""
    found, was_enabled = {}, gc.isenabled()
    gc.disable()  # none of the trees is garbage, and searching them would take twice the time of making them
    try:
        for path in sorted((root / PACKAGE).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found[name] = (ast.parse(path.read_text(encoding="utf-8")), is_package)
    finally:
        if was_enabled:
            gc.enable()
    return found


def imports(modules: Mapping[str, tuple[ast.Module, bool]]) -> dict[str, set[str]]:
    """Module -> the modules that it imports. Packages import nothing here: what they export is their modules'."""
    exports = {name: dict(_exports(tree, modules)) for name, (tree, is_package) in modules.items() if is_package}
    found = {}
    for name, (tree, is_package) in modules.items():
        wanted = set() if is_package else {_resolved(one, exports) for one in _imported(tree, modules)}
        found[name] = wanted - {name}
    return found


@cache
def imports_below(root: Path) -> dict[str, set[str]]:
    """`imports` of the modules below `root`, which are read once in a process."""
    return imports(sources(root))


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules that reach each other, each sorted (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(sorted(members))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def _imported(tree: ast.Module, modules: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(module, name in it), the name empty for the module itself."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in modules else (node.module, alias.name)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, also within others. Expressions, which are most of a tree and import nothing, are not visited."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            pending += getattr(node, name, ())


def _exports(tree: ast.Module, modules: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names that a package's `__init__` has from elsewhere: imported, or in a table of names that are loaded when
    used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield alias.asname or alias.name, (inner, "") if inner in modules else (node.module, alias.name)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and value.value in modules:
                    yield str(key.value), (str(value.value), str(key.value))


def _resolved(wanted: tuple[str, str], exports: Mapping[str, Mapping[str, tuple[str, str]]]) -> str:
    module, name = wanted
    while name and name in exports.get(module, {}):
        module, name = exports[module][name]
    return module
