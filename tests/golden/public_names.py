"""Every public name, as `public-names.txt` keeps it: `python -m tests.golden.public_names` adds those that are new.

A line is one of

    raysharded.driver.replay.load                a name: imported, then asked for part by part
    raysharded.pin(0 storage)                    a parameter, with its position
    raysharded.ElasticTrainer.fit(* beside=)     one that is given by name alone, and may be left out
    raysharded.Result.report().summary           a member of what a method returns, or of a field's type
    $ raysharded run --chaos                     an option of a command

The names are what `__all__` of each package has, what docs/api/ describes, and what README.md, docs/ and examples/
import, use or mention; with the public members of each class and the parameters of each function.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from tests.docs.blocks import PAGES, blocks
from tests.paths import ROOT

PACKAGE = "raysharded"
LIST = Path(__file__).parent / "public-names.txt"
_API = re.compile(r"^\.\. auto(\w+):: (raysharded[\w.]*)(\(\))?", re.MULTILINE)
_DOTTED = re.compile(r"\braysharded(?:\.[A-Za-z_]\w*)+")
_INLINE = re.compile(r"`([^`\n]+)`")
_PACKAGES_WITH_ALL = ("", ".checkpoint", ".data", ".layout", ".metrics", ".testing")
_LINE = re.compile(r"(?P<path>[^(]*(?:\(\)[^(]*)*)(?:\((?P<place>\d+|\*|\*\*) (?P<name>\*{0,2}\w+)(?P<optional>=?)\))?")


# -- finding what a name means --


def resolve(name: str) -> Any:
    """What a dotted name means today. Raises LookupError, saying which part there is not.

    After `()`, or after a member that is no class or module, comes a member of its type.
    """
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    path = parts[0]
    for part in parts[1:]:
        bare = part.removesuffix("()")
        found = _member(found, bare, path)
        path += f".{bare}"
        if part.endswith("()"):
            found = _returned(found, path)
    return found


def _member(of: Any, name: str, path: str) -> Any:
    if isinstance(of, _Typed):
        of = of.type
    if isinstance(of, types.ModuleType):
        with contextlib.suppress(AttributeError):
            return getattr(of, name)
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{of.__name__}.{name}")
        raise LookupError(f"{path} has no {name}")
    for kind in _classes(of):
        hint = _hints(kind).get(name)
        if hasattr(kind, name):
            member = inspect.getattr_static(kind, name)
            if isinstance(member, property) and member.fget is not None:
                return _Typed(_return_hint(member.fget))
            if inspect.isroutine(member) or isinstance(member, (classmethod, staticmethod, type)):
                return getattr(kind, name)
            return _Typed(hint)
        if hint is not None or name in _set_in_constructor(kind):
            return _Typed(hint)
    raise LookupError(f"{path} has no {name}")


@dataclasses.dataclass(frozen=True)
class _Typed:
    """A member that is neither a function nor a class: of its type, None if that is not known."""

    type: Any


def _returned(found: Any, path: str) -> Any:
    if isinstance(found, type):
        return found
    if not callable(found):
        raise LookupError(f"{path} cannot be called")
    return _Typed(_return_hint(found))


def _classes(of: Any) -> list[type]:
    """The classes that a type names: of a union those that are ours."""
    if isinstance(of, type) and not typing.get_args(of):
        return [of]
    return [kind for arg in typing.get_args(of) for kind in _classes(arg) if _is_ours(kind)]


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == PACKAGE


def _return_hint(function: Any) -> Any:
    function = inspect.unwrap(getattr(function, "__func__", function))
    return _hints(function).get("return")


@cache
def _hints(of: Any) -> dict[str, Any]:
    """The annotations of a function, or of a class and those it derives from; without those that cannot be known."""
    found: dict[str, Any] = {}
    for one in reversed(of.__mro__) if isinstance(of, type) else (of,):
        if (one.__module__ or "").split(".")[0] != PACKAGE:
            continue
        space = {**vars(builtins), **_typing_imports(one.__module__), **vars(sys.modules[one.__module__])}
        for name, hint in inspect.get_annotations(one).items():
            found[name] = object
            with contextlib.suppress(Exception):
                found[name] = eval(hint, space) if isinstance(hint, str) else hint  # noqa: S307 - our own source
    return found


@cache
def _typing_imports(module: str) -> dict[str, Any]:
    """What a module imports for its annotations alone."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            for alias in node.names:
                with contextlib.suppress(Exception):
                    found[alias.asname or alias.name] = getattr(importlib.import_module(node.module), alias.name)
    return found


@cache
def _set_in_constructor(kind: type) -> frozenset[str]:
    """The public attributes that a class of ours sets in its constructor."""
    found: set[str] = set()
    for base in kind.__mro__:
        if not _is_ours(base) or "__init__" not in vars(base) or dataclasses.is_dataclass(base):
            continue
        with contextlib.suppress(OSError, TypeError):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base.__init__)))):  # type: ignore[misc]
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                    found.add(node.attr)
    return frozenset(name for name in found if not name.startswith("_"))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


# -- what is wrong with a line --


def fault(line: str) -> str:
    """Why a line of the list does not hold today; empty if it does."""
    if line.startswith("$ "):
        return "" if line in commands() else f"there is no `{line[2:]}` any more"
    match = _LINE.fullmatch(line)
    assert match is not None, line
    try:
        found = resolve(match["path"])
    except (LookupError, ImportError) as error:
        return f"{line}: {error}"
    return _fault_of_parameter(found, match) if match["place"] else ""


def _fault_of_parameter(found: Any, match: re.Match[str]) -> str:
    line, place, name = match[0], match["place"], match["name"]
    signature = _signature(found)
    if signature is None:
        return f"{line}: {match['path']} cannot be called"
    positional = [one for one in signature.parameters.values() if one.kind in _POSITIONAL]
    if name.startswith("*"):
        return (
            "" if any(_shown(one) == name for one in signature.parameters.values()) else f"{line}: it takes no {name}"
        )
    parameter = signature.parameters.get(name)
    if parameter is None:
        return f"{line}: {match['path']} takes no {name}: it takes {', '.join(signature.parameters)}"
    if match["optional"] and parameter.default is parameter.empty:
        return f"{line}: {name} could be left out, and must be given now"
    if place.isdigit() and (len(positional) <= int(place) or positional[int(place)].name != name):
        return f"{line}: {name} was parameter {place}, and is not now"
    return ""


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _signature(found: Any) -> inspect.Signature | None:
    """Without `self`."""
    if not callable(found):
        return None
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return None
    given = list(signature.parameters.values())
    own = given[1:] if given and given[0].name in ("self", "cls") else given
    return signature.replace(parameters=own)


def _shown(parameter: inspect.Parameter) -> str:
    """As it is written in a signature."""
    return str(parameter.replace(annotation=parameter.empty)).partition("=")[0]


def new_demands(lines: Iterable[str]) -> list[str]:
    """Parameters that must be given today and are not on the list, of functions that are, and of classes that docs/api/
    says how to make (`autoclass:: X`; of one that is only received it says `X()`)."""
    made = {name for _, name, received in _described() if not received}
    known: dict[str, set[str]] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is not None and match["place"]:
            known.setdefault(match["path"], set()).add(match["name"])
    found = []
    for path, names in known.items():
        try:
            of = resolve(path)
        except (LookupError, ImportError):
            continue
        signature = None if isinstance(of, type) and path not in made else _signature(of)
        for name, parameter in signature.parameters.items() if signature else ():
            if parameter.default is parameter.empty and _shown(parameter) == name and name not in names:
                found.append(f"{path}: {name} must be given now, and was unknown")
    return found


# -- what there is --


def extract() -> set[str]:
    """All lines that the sources give today."""
    lines: set[str] = set(commands())
    used = _attributes_used()
    for root in sorted(_roots()):
        lines |= set(_lines_of(root, resolve(root)))
        found = resolve(root)
        if isinstance(found, type):
            lines |= set(_reached(root, found, used, (found,)))
    return lines


def _roots() -> set[str]:
    """The names that somebody is told of."""
    roots: set[str] = set()
    for suffix in _PACKAGES_WITH_ALL:
        package = importlib.import_module(PACKAGE + suffix)
        roots |= {f"{package.__name__}.{name}" for name in package.__all__}
    for directive, name, _ in _described():
        roots |= set(_public_of_module(name)) if directive == "module" else {name}
    for code in _code():
        roots |= _imported(code)
    for text in _prose():
        roots |= {name for name in _DOTTED.findall(text) if _is_a_name(name)}
    return {prefix for name in roots for prefix in _prefixes(name)}


def _described() -> Iterator[tuple[str, str, str]]:
    """What docs/api/ has: the kind of thing, its name, and `()` if it is not for people to make."""
    for page in (ROOT / "docs" / "api").glob("*.md"):
        yield from _API.findall(page.read_text(encoding="utf-8"))


def _public_of_module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    for each, value in vars(module).items():
        if not each.startswith("_") and getattr(value, "__module__", None) == name:
            yield f"{name}.{each}"


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _is_a_name(name: str) -> bool:
    try:
        resolve(name)
    except (LookupError, ImportError):
        return False  # a logger's name, or a file's
    return True


def _prose() -> Iterator[str]:
    for page in [*PAGES, *(ROOT / "docs" / "api").glob("*.md")]:
        yield page.read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        yield path.read_text(encoding="utf-8")


@cache
def _code() -> tuple[ast.Module, ...]:
    """All Python that the documentation and the examples have: also pieces of it in the text."""
    sources: list[str] = []
    for page in PAGES:
        sources += blocks(page, "python")
        sources += _INLINE.findall(page.read_text(encoding="utf-8"))
    sources += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        sources += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = []
    for source in sources:
        with contextlib.suppress(SyntaxError):
            found.append(ast.parse(textwrap.dedent(source)))
    return tuple(found)


def _imported(code: ast.Module) -> set[str]:
    """The names of ours that some code imports, and what it takes from them by dots."""
    names: dict[str, str] = {"rs": PACKAGE, PACKAGE: PACKAGE}
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    names[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE
    found = set(names.values())
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            head, _, rest = dotted.partition(".")
            if head in names and re.fullmatch(r"[\w.]+", rest) and _is_a_name(f"{names[head]}.{rest}"):
                found.add(f"{names[head]}.{rest}")
    return found


@cache
def _attributes_used() -> frozenset[str]:
    return frozenset(node.attr for code in _code() for node in ast.walk(code) if isinstance(node, ast.Attribute))


def _lines_of(name: str, found: Any) -> Iterator[str]:
    """A name, its parameters and, of a class, its members."""
    yield name
    if isinstance(found, types.ModuleType | _Typed):
        return
    yield from _parameters_of(name, found)
    if not isinstance(found, type):
        return
    for member in sorted(_members(found)):
        yield f"{name}.{member}"
        value = _member(found, member, name)
        if not isinstance(value, _Typed | type):
            yield from _parameters_of(f"{name}.{member}", value)


def _parameters_of(name: str, found: Any) -> Iterator[str]:
    if isinstance(found, type) and (issubclass(found, BaseException) or not _is_ours(found)):
        return  # made by us alone
    signature = _signature(found)
    for number, parameter in enumerate(signature.parameters.values() if signature else ()):
        if parameter.name.startswith("_"):
            continue
        place = str(number) if parameter.kind in _POSITIONAL else "*"
        optional = "" if parameter.default is parameter.empty else "="
        yield f"{name}({place} {_shown(parameter)}{optional})"


def _members(kind: type) -> set[str]:
    found = {name for base in kind.__mro__ if _is_ours(base) for name in vars(base)}
    found |= set(getattr(kind, "__dataclass_fields__", ())) | _set_in_constructor(kind)
    return {name for name in found if not name.startswith("_")}


def _reached(name: str, kind: type, used: frozenset[str], seen: tuple[type, ...]) -> Iterator[str]:
    """Members of what a class's members give, where the documentation asks for attributes of these names."""
    for member in sorted(_members(kind) & used):
        value = _member(kind, member, name)
        called = not isinstance(value, _Typed)
        given = _return_hint(value) if called and not isinstance(value, type) else getattr(value, "type", None)
        for one in _classes(given):
            if one in seen or not _is_ours(one):
                continue
            path = f"{name}.{member}{'()' if called else ''}"
            for each in sorted(_members(one) & used):
                yield f"{path}.{each}"
                found = _member(one, each, path)
                if not isinstance(found, _Typed | type):
                    yield from _parameters_of(f"{path}.{each}", found)
            yield from _reached(path, one, used, (*seen, one))


@cache
def commands() -> frozenset[str]:
    """Every command with each of its options and arguments, as `$ raysharded run --chaos`."""
    from raysharded.cli import app

    return frozenset(_commands_of(PACKAGE, typer.main.get_command(app)))


def _commands_of(path: str, command: Any) -> Iterator[str]:
    """`command`: of click, or of typer's own copy of it."""
    yield f"$ {path}"
    for parameter in command.params:
        options = [*parameter.opts, *parameter.secondary_opts]
        yield from (f"$ {path} {one if one.startswith('-') else one.upper()}" for one in options)
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from _commands_of(f"{path} {name}", subcommand)


def kept() -> list[str]:
    """The list."""
    return LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []


def main() -> None:
    before = set(kept())
    LIST.write_text("".join(f"{line}\n" for line in sorted(before | extract())), encoding="utf-8")
    sys.stdout.write(f"{LIST.name}: {len(kept()) - len(before)} lines more\n")


if __name__ == "__main__":
    main()
