"""Conversion between checkpoints and the flat keys of torch.distributed.checkpoint, each with its path in the state.

torch's rules (`flatten_state_dict`): dicts are flattened, and so are lists that contain dicts or tensors. A tuple, or
any other list, is one value. A key is the path joined by ".". A trainer's checkpoint has no tree. It appears as
{"model": {name: ...}, "optimizer": {"state": {name: {...}}}}, as torch's own `get_state_dict` returns it. Constants
that a constructor drew are beside these, in "constant".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.interop.names import is_trainers
from raysharded.checkpoint.state_dict.tree import Path, Tree, flatten, name_of, unflatten
from raysharded.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A key that stands for a tensor of the checkpoint."""

    key: str
    path: Path
    name: str
    """Name of the tensor in the checkpoint."""
    as_number: bool = False
    """Whether the state holds the tensor as a Python number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueEntry:
    """A key that stands for a value other than a tensor."""

    key: str
    path: Path
    value: Any


Entry = TensorEntry | ValueEntry


def entries_of(manifest: Manifest, *, is_flat: bool = False) -> list[Entry]:
    """All keys in the order of the state. With `is_flat`, only those of its first level, each a tensor or a value.

    Raises CheckpointError for duplicate keys and for a tree that names a missing tensor, CorruptCheckpoint for an
    invalid tree.
    """
    if manifest.tree is not None and is_flat:
        found = _of_flat(unflatten(manifest.tree, _Ref))
    elif manifest.tree is not None:
        found = _of_state(unflatten(manifest.tree, _Ref), ())
    elif is_trainers(manifest.tensors):
        found = [_of_trainers(name) for name in manifest.tensors]
    else:
        found = [TensorEntry(key=name, path=(name,), name=name) for name in manifest.tensors]
    seen: set[str] = set()
    for entry in found:
        if entry.key in seen:
            raise CheckpointError(f"two parts of the state would both have the key {entry.key!r}. Rename one of them.")
        if isinstance(entry, TensorEntry) and entry.name not in manifest.tensors:
            raise CheckpointError(
                f"the state's tree names a tensor {entry.name!r}, which the checkpoint does not have."
            )
        seen.add(entry.key)
    return found


def tree_of(leaves: Iterable[tuple[Path, Tree]]) -> Tree:
    """The tree of a state with these tensors (`tensor_leaf`) and values (`encode_value`) at their paths.

    A list that lacks some of its places gets None there, as in torch. Raises CheckpointError if a path leads through a
    tensor or a value.
    """
    root = _Node()
    for path, leaf in leaves:
        root.put(path, leaf)
    return root.tree()


def tensor_leaf(name: str) -> Tree:
    """The tree of one tensor."""
    return {"tensor": name}


def encode_value(key: str, value: Any) -> Tree:
    """A value as JSON. Raises CheckpointError with the key for a value that JSON cannot hold, such as a tensor."""
    try:
        flat = flatten({key: value})
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None
    if flat.tensors:
        raise CheckpointError(
            f"{key}: a tuple or another object with tensors in it cannot be stored. Put them into a dict or a list."
        )
    return flat.tree["dict"][0][1]


def decode_value(tree: Tree) -> Any:
    """The value that `encode_value` encoded. Raises CorruptCheckpoint for an invalid tree."""
    return unflatten(tree, _Ref)


@dataclass(frozen=True, slots=True)
class _Ref:
    """A placeholder for a tensor in a state."""

    name: str


def _of_state(node: Any, path: Path) -> list[Entry]:
    if isinstance(node, _Ref):
        return [TensorEntry(key=name_of(path), path=path, name=node.name)]
    if isinstance(node, dict):
        return [entry for key, value in node.items() for entry in _of_state(value, (*path, str(key)))]
    if isinstance(node, (list, tuple)) and _is_opened(node):
        return [entry for at, value in enumerate(node) for entry in _of_state(value, (*path, at))]
    return [ValueEntry(key=name_of(path), path=path, value=node)]


def _of_flat(state: Any) -> list[Entry]:
    """Entries of a dict whose values torch did not flatten.

    Any other state is flattened, such as a dict with tensors inside its values.
    """
    if not isinstance(state, dict) or any(_has_tensor(v) and not isinstance(v, _Ref) for v in state.values()):
        return _of_state(state, ())
    return [
        TensorEntry(key=str(key), path=(str(key),), name=value.name)
        if isinstance(value, _Ref)
        else ValueEntry(key=str(key), path=(str(key),), value=value)
        for key, value in state.items()
    ]


def _is_opened(node: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list is flattened. A tuple is flattened only if it contains a tensor, which a value cannot hold."""
    if isinstance(node, tuple):
        return _has_tensor(node)
    return any(isinstance(n, (_Ref, dict)) or (isinstance(n, (list, tuple)) and _is_opened(n)) for n in node)


def _has_tensor(node: Any) -> bool:
    if isinstance(node, dict):
        return any(map(_has_tensor, node.values()))
    return isinstance(node, _Ref) or (isinstance(node, (list, tuple)) and any(map(_has_tensor, node)))


def _of_trainers(name: str) -> TensorEntry:
    kind, _, rest = name.partition(".")
    if kind in ("model", "buffer"):
        path: Path = ("model", rest)
    elif kind == "constant":  # torch's state dict of a model has none
        path = (kind, rest)
    else:
        parameter, _, what = rest.rpartition(".")
        path = ("optimizer", "state", parameter, what)
    return TensorEntry(key=name_of(path), path=path, name=name, as_number=kind == "number")


class _Node:
    """A dict or a list of a tree under construction."""

    def __init__(self) -> None:
        self._children: dict[str | int, _Node | Tree] = {}

    def put(self, path: Path, leaf: Tree) -> None:
        node = self
        for part in path[:-1]:
            below = node._children.setdefault(part, _Node())
            if not isinstance(below, _Node):
                raise CheckpointError(f"the state has values both at {name_of(path)!r} and at a path above it.")
            node = below
        if path[-1] in node._children:
            raise CheckpointError(f"the state has two values at {name_of(path)!r}.")
        node._children[path[-1]] = leaf

    def tree(self) -> Tree:
        made = {part: child.tree() if isinstance(child, _Node) else child for part, child in self._children.items()}
        if made and all(type(part) is int for part in made):
            top = max(part for part in made if type(part) is int)
            if top <= 2 * len(made) + _SPARE_PLACES:
                return {"list": [made.get(at, {"value": None}) for at in range(top + 1)]}
        return {"dict": [[part, child] for part, child in made.items()]}


_SPARE_PLACES = 1000
"""A list may lack as many places as it has, and this many more.

A hostile path would require far more.
"""
