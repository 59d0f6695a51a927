"""Plain attributes of a task and of its model's modules: how they were when built, and what has changed since.

A worker that joins, or a run that resumes, has them as they were built. Plain are numbers, texts, small tensors and
arrays, and small containers of these. An object that has got another attribute of another kind is left as it is: one
may belong to the other, as a table and its length.

So are those of objects that these hold: modules that are no part of the model, such as a loss with a running mean, with
their buffers, and objects of the user's classes. Variables of modules and closures that the task's code uses are such
values, too, each by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from raysharded.actors.task_calls.object_contents import is_in_use_elsewhere
from raysharded.actors.task_calls.used_variables import Variable, is_a_users, variables_of

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_MOST_ELEMENTS = 4096
_MOST_ITEMS = 256
_MOST_LEVELS = 4
_MOST_OBJECTS = 10_000


_OF_MODULES = frozenset(vars(nn.Module()))


class _NotPlain(Exception):
    """A value is not plain, or too large."""


class _Same:
    """An object at one version of its contents; equal to the same object at the same version."""

    def __init__(self, value: object, version: int = 0) -> None:
        self._value, self._version = value, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value and self._version == other._version

    def __hash__(self) -> int:
        return hash((id(self._value), self._version))


class _Value(NamedTuple):
    """A copy of a plain value, or the value itself, and its form, which is equal for equal values alone."""

    copy: Any
    form: object
    is_plain: bool


class Change(NamedTuple):
    """An attribute, or a variable, that has changed since the object was built."""

    holder: MutableMapping[str, Any]
    """The object's attributes; a module's, or a closure's, variables."""
    name: str
    """`self.weight` of the task, `model.blocks.0.count` of a module, `train.STEP` of a file."""
    key: str
    built: tuple[_Value, ...]
    """Empty: there was none."""


class PlainAttributes:
    """The attributes of a task and of modules, as they are at the construction, of what they hold, and variables.

    Training thread only.
    """

    def __init__(
        self, objects: Mapping[str, object], *, of_model: Collection[nn.Module] = (), code: Collection[object] = ()
    ) -> None:
        """`objects`: name, as written in Python -> object. `of_model`: the model's modules, whose buffers are state.

        `code`: objects whose methods' variables are compared, with those of what `objects` hold; empty: no variables.
        """
        without = {id(one) for one in (*of_model, *objects.values())}
        held = _held_by([part for name, one in objects.items() for part in _parts_of(name, one)], without)
        variables = variables_of([*code, *held.values()]) if code else []
        without |= {id(one) for one in held.values()}
        held |= _held_by([(one.name, one.holder.get(one.key)) for one in variables], without)
        self._built = {
            name: (one, is_held, _values_of(one, is_held))
            for group, is_held in ((objects, False), (held, True))
            for name, one in group.items()
        }
        self._variables = [(one, _variable_values(one)) for one in variables]

    def changes(self) -> list[Change]:
        """The plain values that are new, others or gone, except those of objects with other such attributes."""
        found = self._built.items()
        attributes = [one for name, (one, is_held, built) in found for one in _changes(name, one, is_held, built)]
        return attributes + [change for one, built in self._variables for change in _variable_changes(one, built)]


@contextmanager
def as_built(changes: list[Change]) -> Iterator[None]:
    """A context in which these attributes are as they were built; afterwards they are again what they were before."""
    now = [(one, one.key in one.holder, one.holder.get(one.key)) for one in changes]
    try:
        for one in changes:
            if one.built:
                one.holder[one.key] = _value_of(one.built[0].copy).copy
            else:
                one.holder.pop(one.key, None)
        yield
    finally:
        for one, was_there, value in now:
            if was_there:
                one.holder[one.key] = value
            else:
                one.holder.pop(one.key, None)


def _changes(name: str, one: object, is_held: bool, built: Mapping[str, _Value]) -> list[Change]:
    now, found = _values_of(one, is_held), []
    for key in sorted(now.keys() | built.keys()):
        before, after = built.get(key), now.get(key)
        if before is not None and after is not None and before.form == after.form:
            continue
        if not all(value is None or value.is_plain for value in (before, after)):
            return []
        holder = one._buffers if isinstance(one, nn.Module) and is_held and key not in vars(one) else vars(one)
        found.append(Change(holder, f"{name}.{key}", key, () if before is None else (before,)))
    return found


def _values_of(one: object, is_held: bool) -> dict[str, _Value]:
    """Values of an object's attributes.

    A module's buffers are among them. Those of the model's modules are values that are not plain, as modules are: they
    belong to the state.
    """
    if not isinstance(one, nn.Module):
        return {name: _value_of(value) for name, value in getattr(one, "__dict__", {}).items()}
    found = {name: _value_of(value) for name, value in vars(one).items() if name not in _OF_MODULES}
    parts = (*(() if is_held else one._buffers.items()), *one._modules.items())
    found |= {name: _value_of(value) for name, value in one._buffers.items() if is_held}
    return found | {f"({name})": _Value(part, _Same(part), False) for name, part in parts}


def _variable_values(one: Variable) -> tuple[_Value, ...]:
    return (_value_of(one.holder[one.key]),) if one.key in one.holder else ()


def _variable_changes(one: Variable, built: tuple[_Value, ...]) -> Iterator[Change]:
    now = _variable_values(one)
    if [value.form for value in now] != [value.form for value in built] and all(each.is_plain for each in now + built):
        yield Change(one.holder, one.name, one.key, built)


def _held_by(starts: Iterable[tuple[str, object]], without: Collection[int]) -> dict[str, object]:
    """Modules and objects of the user's classes that can be reached through attributes and containers, each once.

    `starts`: (name, object). `without`: ids of objects that are not followed.
    """
    left, seen = deque(starts), dict[int, object]()
    found: dict[str, object] = {}
    while left and len(seen) < _MOST_OBJECTS:
        path, one = left.popleft()
        if id(one) in seen or id(one) in without:
            continue
        if isinstance(one, (list, tuple, dict)):
            seen[id(one)] = one
            left.extend(_parts_of(path, one))
        elif isinstance(one, nn.Module) or _has_own_attributes(one):
            seen[id(one)] = found[path] = one
            left.extend(_parts_of(path, one))
    return found


def _parts_of(name: str, one: object) -> Iterator[tuple[str, object]]:
    match one:
        case list() | tuple() if len(one) <= _MOST_ITEMS:
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(one))
        case dict() if len(one) <= _MOST_ITEMS:
            yield from ((f"{name}[{key!r}]", part) for key, part in one.items() if type(key) in _SCALARS)
        case nn.Module():
            yield from ((f"{name}.{key}", part) for key, part in one._modules.items())
            yield from ((f"{name}.{key}", part) for key, part in vars(one).items() if key not in _OF_MODULES)
        case list() | tuple() | dict():
            return
        case _:
            yield from ((f"{name}.{key}", part) for key, part in getattr(one, "__dict__", {}).items())


def _has_own_attributes(one: object) -> bool:
    """True for an object with attributes, of a user's class, that no thread may use."""
    if isinstance(one, (type, torch.Tensor, np.ndarray)) or not is_a_users(type(one).__module__):
        return False
    return type(getattr(one, "__dict__", None)) is dict and not is_in_use_elsewhere(one)


def _value_of(value: object) -> _Value:
    try:
        return _plain(value, _MOST_LEVELS)
    except _NotPlain:
        return _Value(value, _Same(value), False)


def _plain(value: Any, levels: int) -> _Value:
    kind = type(value)
    if kind in _SCALARS:
        return _Value(value, (kind, repr(value) if kind in (float, complex) else value), True)
    if isinstance(value, np.generic):
        return _Value(value, (kind, value.tobytes()), True)
    if kind is np.ndarray and value.size <= _MOST_ELEMENTS and not value.dtype.hasobject:
        return _Value(value.copy(), (kind, value.dtype.str, value.shape, value.tobytes()), True)
    if kind is torch.Tensor and _is_small(value):
        return _Value(value.detach().clone(), (kind, _Same(value, value._version)), True)
    if kind in (list, tuple, set, dict) and len(value) <= _MOST_ITEMS and levels:
        if kind is dict:
            items = [(key, _plain(one, levels - 1)) for key, one in value.items() if _plain(key, 1)]
            return _Value(
                {key: one.copy for key, one in items}, (kind, tuple((repr(key), one.form) for key, one in items)), True
            )
        parts = [_plain(one, levels - 1) for one in value]
        forms = tuple(sorted(repr(part.form) for part in parts)) if kind is set else tuple(part.form for part in parts)
        return _Value(kind(part.copy for part in parts), (kind, forms), True)
    raise _NotPlain


def _is_small(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.requires_grad and not tensor.is_inference()
    return is_plain and not tensor.is_meta and tensor.numel() <= _MOST_ELEMENTS
