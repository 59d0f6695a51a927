"""What the source says that it writes: journal entries with their fields, and other strings. Read by `ast`, not run."""

from __future__ import annotations

import ast
import gc
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path

from tests.paths import PACKAGE

_WRITES = ("Record", "_record", "record", "append", "remark")
"""Calls that make a journal entry: of a kind and its fields."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Written:
    """A kind of journal entry."""

    where: set[str] = field(default_factory=set)
    """Files with the line."""
    fields: set[str] = field(default_factory=set)
    """Those that the source names; others come from values."""


class _Module:
    """A module of the package. Only those whose text shows that something may be found in them are parsed."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        collects = gc.isenabled()
        gc.disable()  # none of the trees is garbage, and searching them would take twice the time of making them
        try:
            return tuple(ast.walk(self.tree))
        finally:
            if collects:
                gc.enable()

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """String constants, without docstrings."""
        documented = {id(text) for text in _docstrings(self.nodes)}
        return tuple(
            node.value
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented
        )

    @property
    def name(self) -> str:
        return self.path.relative_to(PACKAGE.parent).as_posix()

    def functions(self) -> Iterator[Function]:
        """Also those within others and within classes."""
        return (node for node in self.nodes if isinstance(node, Function))


@cache
def _modules() -> tuple[_Module, ...]:
    return tuple(_Module(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def entries() -> dict[str, Written]:
    """By kind, all entries that somewhere are given to a journal."""
    found: dict[str, Written] = {}
    calls = re.compile(rf"\b(?:{'|'.join(_WRITES)})\s*\(")
    for module in _modules():
        if not calls.search(module.source) or not any(
            _called(node) in _WRITES and len(_given(node)) > 1 for node in module.nodes
        ):
            continue
        for function in module.functions():
            for call in _own(function, ast.Call):
                kinds, fields = _kinds_and_fields(module, function, call)
                for kind in kinds:
                    written = found.setdefault(kind, Written())
                    written.where.add(f"{module.name}:{call.lineno}")
                    written.fields |= fields
    return found


def _called(node: ast.AST) -> str:
    """The last part of the name of what is called; empty if it has none, or nothing is."""
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else str(getattr(called, "id", ""))


def _given(node: ast.AST) -> Sequence[ast.AST]:
    return [*node.args, *node.keywords] if isinstance(node, ast.Call) else []


def _kinds_and_fields(module: _Module, function: Function, call: ast.Call) -> tuple[set[str], set[str]]:
    if _called(call) not in _WRITES:
        return set(), set()
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    kind = given.get("kind") or next(iter(call.args), None)
    fields = given.get("fields") or next(iter(call.args[1:]), None)
    if kind is None or fields is None or (function.name in _WRITES and isinstance(kind, ast.Name)):
        return set(), set()  # no entry, or one that is passed on
    return _texts(module, function, kind), _keys(function, fields)


def _texts(module: _Module, function: Function, node: ast.expr) -> set[str]:
    """The texts that an expression may be; none if it is only passed on."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=one, orelse=other):
            return _texts(module, function, one) | _texts(module, function, other)
        case ast.JoinedStr(values=values):
            return {"".join(parts) for parts in product(*(_texts(module, function, value) for value in values))}
        case ast.FormattedValue(value=value):
            return _texts(module, function, value)
        case ast.Name(id=name):
            values = [value for value, _ in _assigned(function, name)] or [
                value for value, _ in _assigned(module.tree, name)
            ]
            values += _arguments(module, function, name)
            return {text for value in values for text in _texts(module, function, value)}
    return set()


def _keys(function: Function, node: ast.expr) -> set[str]:
    """The keys of a dict that an expression makes, as far as the function says."""
    match node:
        case ast.Dict(keys=keys, values=values):
            found = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
            unpacked = (value for key, value in zip(keys, values, strict=True) if key is None)
            return found.union(*(_keys(function, value) for value in unpacked))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _keys(function, left) | _keys(function, right)
        case ast.Call(func=ast.Name(id="dict"), args=[one]):
            return _keys(function, one)
        case ast.Name(id=name):
            found = set()
            for value, key in _assigned(function, name):
                found |= {key} if key is not None else _keys(function, value)
            return found
    return set()


def _assigned(of: ast.AST, name: str) -> list[tuple[ast.expr, str | None]]:
    """What a name, or a key of it, is given in a function or at the top of a module."""
    found: list[tuple[ast.expr, str | None]] = []
    nodes = of.body if isinstance(of, ast.Module) else ast.walk(of)
    for node in nodes:
        targets: list[ast.expr]
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=place, value=ast.expr() as value):
                targets = [place]
            case ast.AugAssign(target=place, value=value):
                targets = [place]
            case _:
                continue
        for target in targets:
            match target:
                case ast.Name(id=found_name) if found_name == name:
                    found.append((value, None))
                case ast.Subscript(value=ast.Name(id=found_name), slice=ast.Constant(value=str(key))):
                    if found_name == name:
                        found.append((value, key))
    return found


def _arguments(module: _Module, function: Function, name: str) -> list[ast.expr]:
    """What callers in the same module give a function for a parameter."""
    parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    if name not in parameters:
        return []
    found = []
    for call in (node for node in module.nodes if isinstance(node, ast.Call)):
        if _called(call) == function.name:
            skipped = parameters[0] == "self"
            place = parameters.index(name) - skipped
            found += [keyword.value for keyword in call.keywords if keyword.arg == name] + call.args[place : place + 1]
    return [value for value in found if isinstance(value, ast.Constant)]


def _own(function: Function, kind: type[ast.Call]) -> Iterator[ast.Call]:
    """Nodes of a function, without those of functions within it."""
    waiting: list[ast.AST] = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function):
            continue
        if isinstance(node, kind):
            yield node
        waiting += ast.iter_child_nodes(node)


# -- other strings --


def texts(pattern: str, *, ignore: Callable[[str], bool] = lambda _: False) -> dict[str, str]:
    """Every piece of a string constant that matches, with the files that it is in. Docstrings do not count."""
    wanted = re.compile(pattern)
    begins = re.sub(r"^\^", """["'}]""", pattern).removesuffix("$")  # a constant begins behind one of these
    found: dict[str, set[str]] = {}
    for module in _modules():
        if not re.search(begins, module.source):
            continue
        for constant in module.texts:
            for text in wanted.findall(constant):
                if not ignore(text):
                    found.setdefault(text, set()).add(module.name)
    return {text: ", ".join(sorted(files)) for text, files in sorted(found.items())}


def _docstrings(nodes: Sequence[ast.AST]) -> Iterator[ast.Constant]:
    """Also of fields: strings that stand alone."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


@cache
def loggers() -> dict[str, str]:
    """The names of all loggers, with the files that ask for them."""
    found: dict[str, set[str]] = {}
    for module in _modules():
        if "getLogger" not in module.source:
            continue
        for node in module.nodes:
            match node:
                case ast.Call(func=ast.Attribute(attr="getLogger"), args=[ast.Constant(value=str(name))]):
                    found.setdefault(name, set()).add(module.name)
                case ast.Call(func=ast.Attribute(attr="getLogger"), args=[ast.Name(id=name)]):
                    for value, _ in _assigned(module.tree, name):
                        if isinstance(value, ast.Constant):
                            found.setdefault(str(value.value), set()).add(module.name)
    return {name: ", ".join(sorted(files)) for name, files in sorted(found.items())}


def actor_classes() -> dict[str, str]:
    """The names of the classes that are made Ray actors, as Ray makes titles of processes of them."""
    found = {}
    for module in _modules():
        if "ray.remote" not in module.source:
            continue
        for function in module.functions():
            makers = {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_remote(node.value)
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(target, ast.Name)
            }
            for call in _own(function, ast.Call):
                match call:
                    case ast.Call(func=ast.Name(id=maker), args=[ast.Name(id=name)]) if maker in makers:
                        found[_imported(module, name).__name__] = module.name
    return found


def _is_remote(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.remote"


def _imported(module: _Module, name: str) -> type:
    """A class by the name that it has in a module."""
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _class(node.module, alias.name)
    return _class(module.name.removesuffix(".py").replace("/", "."), name)


def _class(module: str, name: str) -> type:
    found: type = getattr(importlib.import_module(module), name)
    return found
