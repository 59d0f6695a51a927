"""Several modules as one: their imports together, then their definitions, one module after the other."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence


class SameName(Exception):
    """Two of the modules define the same name."""


def fold(texts: Mapping[str, str]) -> str:
    """One module's text from several, by their dotted names. Their docstrings become one, in the same order.

    A module that another of them imports comes before it. Imports among them go. Raises SameName.
    """
    trees = {name: ast.parse(text) for name, text in texts.items()}
    owner: dict[str, str] = {}
    for name, tree in trees.items():
        for defined in _definitions(tree):
            if owner.setdefault(defined, name) != name:
                raise SameName(f"{defined}: of {owner[defined]} and of {name}")
    imports: list[str] = []
    for_types: list[str] = []
    bodies: dict[str, str] = {}
    wants: dict[str, set[str]] = {}
    first = next(iter(texts))
    for name, tree in trees.items():
        lines = texts[name].splitlines()
        rest: list[tuple[int, int]] = []
        wants[name] = set()
        for place, node in enumerate(tree.body):
            if place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                if isinstance(node, ast.ImportFrom) and node.module is not None and node.module in texts:
                    wants[name].add(node.module)
                    _require_plain(node, name)
                elif modules := _modules_among(node, texts):
                    raise SameName(f"{name} imports {modules[0]} as a module")
                elif not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                    imports.append(_source(lines, node))
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                for_types += [
                    _source(lines, one)
                    for one in node.body
                    if not (isinstance(one, ast.ImportFrom) and one.module in texts)
                ]
                continue
            start = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            rest.append((start, node.end_lineno or node.lineno))
        if rest:
            begin, end = rest[0][0], len(lines)
            while begin > 1 and lines[begin - 2].startswith("#"):
                begin -= 1
            bodies[name] = "\n".join(lines[begin - 1 : end]).rstrip()
    order = _ordered(list(texts), wants)
    parts = [_docstring(texts[first], *texts.values()), "", "from __future__ import annotations", "", *imports]
    if for_types:
        parts += ["", "if TYPE_CHECKING:", *(f"    {line}" for one in for_types for line in one.splitlines())]
    text = "\n".join(parts) + "\n\n\n" + "\n\n\n".join(bodies[name] for name in order if name in bodies) + "\n"
    ast.parse(text)
    return text


def _modules_among(node: ast.Import | ast.ImportFrom, texts: Mapping[str, str]) -> list[str]:
    before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [alias.name for alias in node.names if f"{before}{alias.name}" in texts]


def _docstring(*texts: str) -> str:
    found = dict.fromkeys(_text_of(text) for text in texts)
    whole = "\n\n".join(one for one in found if one)
    return f'"""{whole}{chr(10) if chr(10) in whole else ""}"""'


def _text_of(text: str) -> str:
    """A module's docstring as it is written."""
    node = ast.parse(text).body[0]
    source = _source(text.splitlines(), node) if isinstance(node, ast.Expr) else ""
    return source.strip('"').rstrip()


def _definitions(tree: ast.Module) -> set[str]:
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _require_plain(node: ast.ImportFrom, name: str) -> None:
    renamed = [alias.name for alias in node.names if alias.asname]
    if renamed:
        raise SameName(f"{name} imports {renamed[0]} of {node.module} under another name")


def _source(lines: Sequence[str], node: ast.stmt) -> str:
    found = list(lines[node.lineno - 1 : node.end_lineno])
    return "\n".join(line[node.col_offset :] if place == 0 else line for place, line in enumerate(found))


def _ordered(names: list[str], wants: Mapping[str, set[str]]) -> list[str]:
    """Each after those that it imports; otherwise as given."""
    found: list[str] = []

    def add(name: str) -> None:
        if name not in found:
            for other in names:
                if other in wants[name]:
                    add(other)
            found.append(name)

    for name in names:
        add(name)
    return found
