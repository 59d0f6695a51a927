"""Trees: a nested state as named tensors, and a tree in the manifest that restores the nesting.

A tensor's name is its path joined by "." : {"model": {"w": tensor}} has the tensor `model.w`. The tree is JSON:

    {"tensor": NAME}                      a tensor
    {"value": V}                          None, a bool, a number, text
    {"float": "inf" | "-inf" | "nan"}     a float that JSON cannot express
    {"bytes": TEXT}                       bytes, in base64 (RFC 4648)
    {"list": [TREE, ...]}, {"tuple": [TREE, ...]}
    {"dict": [[KEY, TREE], ...]}          in order; a key is text or a whole number
"""

from __future__ import annotations

import base64
import binascii
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raysharded.checkpoint.format.limits import MAX_DIGITS, MAX_TEXT
from raysharded.checkpoint.format.manifest import is_text, shown
from raysharded.errors import CheckpointError, CorruptCheckpoint

Tree = Any
"""A tree in the JSON form described above."""
Key = str | int
Path = tuple[Key, ...]

_MAX_DEPTH = 64
_TOO_LONG = 10**MAX_DIGITS


@dataclass(frozen=True, slots=True)
class Flat:
    """A state taken apart."""

    tensors: dict[str, torch.Tensor]
    """Tensors by name, in the order of the state."""
    tree: Tree


def name_of(path: Path) -> str:
    """The path as text: the tensor's name."""
    return ".".join(map(str, path))


def where(path: Path) -> str:
    """The path as errors spell it: state['model'][0]."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def flatten(state: Any) -> Flat:
    """The state's tensors by name, and its tree. Nothing is copied.

    Raises CheckpointError with the path for leaves that are neither tensors nor JSON values, and for keys that are
    neither text nor whole numbers. Names and numbers that are too long, and two paths with the same name, raise it too.
    """
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, Path] = {}

    def take(path: Path, tensor: torch.Tensor) -> Tree:
        name = name_of(path)
        if not name:
            raise CheckpointError(f"{where(path)}: a tensor needs a name. Put it into a dict, as {{'weight': tensor}}.")
        if not is_text(name):
            raise CheckpointError(
                f"a tensor's name cannot be stored: {shown(name)} ({len(name)} characters) is not Unicode text of at "
                f"most {MAX_TEXT} characters. Rename its keys."
            )
        if name in tensors:
            raise CheckpointError(
                f"two tensors of the state would be named {name!r}: the ones at {where(paths[name])} and "
                f"{where(path)}. Rename one of the keys."
            )
        tensors[name], paths[name] = tensor, path
        return {"tensor": name}

    tree = _encode(state, (), take)
    return Flat(tensors, tree)


def unflatten(tree: Tree, tensor: Callable[[str], Any]) -> Any:
    """The nested state of a tree. `tensor` returns the object to use for a tensor's name.

    Law: unflatten(flatten(s).tree, flatten(s).tensors.get) == s, with any Mapping as dict. Raises CorruptCheckpoint if
    the tree is invalid.
    """
    return _decode(tree, (), lambda _, name: tensor(name), lambda _, value: value)


def leaves(tree: Tree) -> Iterator[tuple[Path, str | None, Any]]:
    """Every leaf: (path, the tensor's name or None, the value if it is not a tensor)."""
    found: list[tuple[Path, str | None, Any]] = []
    _decode(
        tree, (), lambda path, name: found.append((path, name, None)), lambda path, v: found.append((path, None, v))
    )
    yield from found


def part_at(tree: Tree, path: Path) -> Tree | None:
    """The subtree at the path; None if there is none. The tree must be valid (`unflatten` checks that)."""
    for key in path:
        part = _children(tree)[1].get(key)
        if part is None:
            return None
        tree = part
    return tree


def value_parts(
    wanted: Tree, stored: Tree, may_be_whole: Callable[[Path], bool] = bool
) -> Iterator[tuple[Path, Tree | None]]:
    """The largest parts of `wanted` in which neither tree has a tensor, as pairs (path, `stored`'s subtree).

    Below them nothing is compared: a dict of settings is taken as it was stored. `may_be_whole` is True for paths at
    which a part may be; the root may not. A single value of `wanted` where `stored` has nothing, or tensors, is (path,
    None).
    Raises CorruptCheckpoint if `stored` is invalid.
    """
    unflatten(stored, lambda _: None)
    yield from _value_parts(wanted, stored, (), may_be_whole)


def values_without_place(
    wanted: Tree | None, stored: Tree, may_be_whole: Callable[[Path], bool] = bool, path: Path = ()
) -> Iterator[Path]:
    """Paths of the values of `stored` that are in no part that `value_parts` returns for the same arguments.

    `stored` must be valid.
    """
    if wanted is not None and _is_whole(wanted, stored, path, may_be_whole):
        return
    kind, children = _children(stored)
    there = _children(wanted)[1] if wanted is not None else {}
    for key, child in children.items():
        yield from values_without_place(there.get(key), child, may_be_whole, (*path, key))
    if not kind and "tensor" not in stored:
        yield path


def replaced(tree: Tree, parts: Mapping[Path, Tree], path: Path = ()) -> Tree:
    """The tree with `parts` in place of the subtrees at their paths."""
    if path in parts:
        return parts[path]
    kind, children = _children(tree)
    if kind == "dict":
        return {kind: [[key, replaced(child, parts, (*path, key))] for key, child in children.items()]}
    return {kind: [replaced(child, parts, (*path, key)) for key, child in children.items()]} if kind else tree


def _encode(node: Any, path: Path, take: Callable[[Path, torch.Tensor], Tree]) -> Tree:
    if len(path) > _MAX_DEPTH:
        raise CheckpointError(f"{where(path)}: the state is nested more than {_MAX_DEPTH} deep; does it hold itself?")
    match node:
        case torch.Tensor():
            return take(path, node)
        case None | bool() | str():
            return {"value": node}
        case int() if type(node) is int:
            _check_length(node, path)
            return {"value": node}
        case float() if type(node) is float:
            return {"value": node} if math.isfinite(node) else {"float": repr(node)}
        case bytes():
            return {"bytes": base64.b64encode(node).decode("ascii")}
        case Mapping():
            return {"dict": [[_key(key, path), _encode(value, (*path, key), take)] for key, value in node.items()]}
        case list() | tuple() if type(node) in (list, tuple):
            kind = "list" if type(node) is list else "tuple"
            return {kind: [_encode(value, (*path, at), take) for at, value in enumerate(node)]}
    raise CheckpointError(
        f"{where(path)}: a {type(node).__module__}.{type(node).__qualname__} cannot be stored. A state is made of "
        "dicts, lists, tensors, numbers, text, bytes, bools and None; nothing is pickled."
    )


def _key(key: Any, path: Path) -> Key:
    if type(key) not in (str, int):
        raise CheckpointError(f"{where(path)}: key {key!r} is neither text nor a whole number.")
    if type(key) is int:
        _check_length(key, path)
    return key  # type: ignore[no-any-return] # just checked


def _check_length(number: int, path: Path) -> None:
    if abs(number) >= _TOO_LONG:
        raise CheckpointError(
            f"{where(path)}: a whole number of more than {MAX_DIGITS} digits cannot be stored. Give it as text."
        )


def _decode(
    tree: Tree,
    path: Path,
    tensor: Callable[[Path, str], Any],
    value: Callable[[Path, Any], Any],
) -> Any:
    if type(tree) is not dict or len(tree) != 1 or len(path) > _MAX_DEPTH:
        raise _bad(path, tree)
    ((kind, content),) = tree.items()
    match kind, content:
        case "tensor", str():
            return tensor(path, content)
        case "value", None | bool() | int() | float() | str():
            return value(path, content)
        case "float", "inf" | "-inf" | "nan":
            return value(path, float(content))
        case "bytes", str():
            return value(path, _unbase64(path, content))
        case (("list" | "tuple"), list()):
            items = [_decode(item, (*path, at), tensor, value) for at, item in enumerate(content)]
            return items if kind == "list" else tuple(items)
        case "dict", list():
            return {key: _decode(item, (*path, key), tensor, value) for key, item in _entries(path, content)}
    raise _bad(path, tree)


def _unbase64(path: Path, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad(path, text) from None


def _is_whole(wanted: Tree, stored: Tree, path: Path, may_be_whole: Callable[[Path], bool]) -> bool:
    return bool(path) and may_be_whole(path) and not _has_tensor(wanted) and not _has_tensor(stored)


def _value_parts(
    wanted: Tree, stored: Tree | None, path: Path, may_be_whole: Callable[[Path], bool]
) -> Iterator[tuple[Path, Tree | None]]:
    if stored is not None and _is_whole(wanted, stored, path, may_be_whole):
        yield path, stored
        return
    kind, children = _children(wanted)
    if kind:
        there = _children(stored)[1] if stored is not None else {}
        for key, child in children.items():
            yield from _value_parts(child, there.get(key), (*path, key), may_be_whole)
    elif "tensor" not in wanted:
        yield path, None


def _children(tree: Tree) -> tuple[str, dict[Key, Tree]]:
    """The pair (kind, children by key or index); ("", {}) for a leaf."""
    ((kind, content),) = tree.items()
    if kind == "dict":
        return kind, dict(content)
    return (kind, dict(enumerate(content))) if kind in ("list", "tuple") else ("", {})


def _has_tensor(tree: Tree) -> bool:
    kind, children = _children(tree)
    return any(map(_has_tensor, children.values())) if kind else "tensor" in tree


def _entries(path: Path, content: list[Any]) -> Iterator[tuple[Key, Tree]]:
    for entry in content:
        if type(entry) is not list or len(entry) != 2 or type(entry[0]) not in (str, int):
            raise _bad(path, entry)
        yield entry[0], entry[1]


def _bad(path: Path, tree: Tree) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"the checkpoint's tree is malformed at {where(path)}: {reprlib.repr(tree)}. Its writer does not follow "
        "the format; read its tensors by name."
    )
