"""Source text after modules have got other names: imports, uses of modules by their names, strings and comments.

Nothing is run, and nothing but the names of modules changes.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ROOT_PACKAGE = "raysharded"


class NameTaken(Exception):
    """A module's new name means something else already in a file that uses it."""


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    stop: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewriter:
    """Old dotted module names -> new ones. `modules`: all modules there are, by their old names; `loggers`: names in
    strings and prose that are those of loggers."""

    moves: Mapping[str, str]
    modules: frozenset[str]
    loggers: frozenset[str] = frozenset()

    def python(self, text: str, where: str) -> str:
        """The text of a Python file. Raises NameTaken."""
        tree = ast.parse(text)
        offsets = _Offsets(text)
        edits: list[_Edit] = []
        renamed: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                edits += self._import(node, offsets)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                edits += self._import_from(node, offsets, renamed)
        if renamed:
            bound = _bound(tree) | self._imported_otherwise(tree, renamed)
            for old, new in renamed.items():
                if new in bound:
                    raise NameTaken(f"{where}: module {old} becomes {new}, which is bound there already")
            edits += _uses(tree, renamed, offsets)
        edits += self._dotted_uses(tree, offsets)
        edits += self._strings(text, offsets, tree)
        return _applied(text, edits)

    def prose(self, text: str) -> str:
        """Any other text: dotted names and paths."""
        return self._paths(self._dotted(text))

    def new_name(self, module: str) -> str:
        """The module's new name, or its old one."""
        return self.moves.get(module, module)

    # -- imports --

    def _import(self, node: ast.Import, offsets: _Offsets) -> Iterator[_Edit]:
        names = [(alias.name, self.new_name(alias.name), alias.asname) for alias in node.names]
        if any(old != new for old, new, _ in names):
            shown = ", ".join(f"{new} as {local}" if local else new for _, new, local in names)
            yield _Edit(*offsets.of(node), f"import {shown}")

    def _import_from(self, node: ast.ImportFrom, offsets: _Offsets, renamed: dict[str, str]) -> Iterator[_Edit]:
        if node.module is None or node.module.split(".")[0] != ROOT_PACKAGE:
            return
        found: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            module, name = node.module, alias.name
            if inner in self.modules:
                new = self.new_name(inner)
                module, _, name = new.rpartition(".")
                if alias.asname is None and name != alias.name:
                    renamed[alias.name] = name
                changed |= new != inner
            else:
                module = self.new_name(node.module)
                changed |= module != node.module
            shown = f"{name} as {alias.asname}" if alias.asname else name
            if shown not in found.setdefault(module, []):
                found[module].append(shown)
        if changed:
            indent = " " * node.col_offset
            lines = [f"from {module} import {_listed(names, indent)}" for module, names in found.items()]
            yield _Edit(*offsets.of(node), f"\n{indent}".join(lines))

    def _imported_otherwise(self, tree: ast.Module, renamed: Mapping[str, str]) -> set[str]:
        """Names that imports bind, but for the modules that have, or get, the names in `renamed`."""
        found: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name.split(".")[0], set()).add(alias.name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    inner = self.new_name(f"{node.module}.{alias.name}")
                    local = alias.asname or renamed.get(alias.name, alias.name)
                    found.setdefault(local, set()).add(inner)
        return {name for name, modules in found.items() if len(modules) > 1}

    def _dotted_uses(self, tree: ast.Module, offsets: _Offsets) -> Iterator[_Edit]:
        """`raysharded.a.b.c` in code, after `import raysharded.a.b`."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                dotted = _dotted_name(node)
                if dotted in self.moves and dotted != self.moves[dotted]:
                    yield _Edit(*offsets.of(node), self.moves[dotted])

    # -- text --

    def _strings(self, text: str, offsets: _Offsets, tree: ast.Module) -> Iterator[_Edit]:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                new = self._paths(self._dotted(token.string))
                if new != token.string:
                    start = offsets.at(*token.start)
                    yield _Edit(start, start + len(token.string), new)

    def _dotted(self, text: str) -> str:
        def new(match: re.Match[str]) -> str:
            if match[0] in self.loggers:
                return match[0]
            parts = match[0].split(".")
            for size in range(len(parts), 1, -1):
                module = ".".join(parts[:size])
                if module in self.moves:
                    return ".".join([self.moves[module], *parts[size:]])
                if module in self.modules:
                    return match[0]
            return match[0]

        return re.sub(rf"\b{ROOT_PACKAGE}(?:\.\w+)+", new, text)

    def _paths(self, text: str) -> str:
        def new(match: re.Match[str]) -> str:
            prefix, path = match[1] or "", match[2] or match[3]
            module = f"{ROOT_PACKAGE}.{path.replace('/', '.')}"
            if module not in self.moves:
                return match[0]
            return prefix + self.moves[module].removeprefix(f"{ROOT_PACKAGE}.").replace(".", "/") + ".py"

        below, alone = r"((?:\w+/)*\w+)", r"((?:\w+/)+\w+)"
        return re.sub(rf"(?<![\w/.])(?:({ROOT_PACKAGE}/){below}|{alone})\.py\b", new, text)


class _Offsets:
    """Places in a text by line and column."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """`column` in characters, as tokenize counts."""
        return self._starts[line - 1] + column

    def of(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """Where a node begins and ends; its columns are in UTF-8 bytes."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._byte(node.lineno, node.col_offset), self._byte(node.end_lineno, node.end_col_offset)

    def _byte(self, line: int, column: int) -> int:
        return self.at(line, len(self._lines[line - 1].encode()[:column].decode()))


def _listed(names: list[str], indent: str) -> str:
    one = ", ".join(names)
    return one if len(names) < 3 else "(\n" + "".join(f"{indent}    {name},\n" for name in names) + f"{indent})"


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        before = _dotted_name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _bound(tree: ast.Module) -> set[str]:
    """Names that the file binds otherwise than by imports."""
    found: set[str | None] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=name):
                found.add(name)
            case ast.MatchAs(name=name) | ast.MatchStar(name=name):
                found.add(name)
    return {name for name in found if name}


def _uses(tree: ast.Module, renamed: Mapping[str, str], offsets: _Offsets) -> Iterator[_Edit]:
    """Each use of a renamed module, except for local names of a function."""

    def walk(node: ast.AST, own: frozenset[str]) -> Iterator[_Edit]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            outer = [*getattr(node, "decorator_list", []), *node.args.defaults, *filter(None, node.args.kw_defaults)]
            for child in outer:
                yield from walk(child, own)
            own = own | _own_names(node)
            body = node.body if isinstance(node.body, list) else [node.body]
            annotations = [arg.annotation for arg in _arguments(node) if arg.annotation]
            returns = getattr(node, "returns", None)
            for child in [*body, *annotations, *([returns] if returns else [])]:
                yield from walk(child, own)
            return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            own = own | {n.id for c in node.generators for n in ast.walk(c.target) if isinstance(n, ast.Name)}
        if isinstance(node, ast.Name) and node.id in renamed and node.id not in own:
            yield _Edit(*offsets.of(node), renamed[node.id])
        for child in ast.iter_child_nodes(node):
            yield from walk(child, own)

    yield from walk(tree, frozenset())


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    given = node.args
    return [
        *given.posonlyargs,
        *given.args,
        *given.kwonlyargs,
        *([given.vararg] if given.vararg else []),
        *([given.kwarg] if given.kwarg else []),
    ]


def _own_names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> frozenset[str]:
    found = {arg.arg for arg in _arguments(node)}
    body = node.body if isinstance(node.body, list) else [node.body]
    stack: list[ast.AST] = [*body]
    while stack:
        one = stack.pop()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(one.name)
            continue
        if isinstance(one, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        stack.extend(ast.iter_child_nodes(one))
    return frozenset(found)


def _applied(text: str, edits: list[_Edit]) -> str:
    for edit in sorted(set(edits), key=lambda edit: (edit.start, edit.stop), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.stop :]
    return text
