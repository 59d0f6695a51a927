"""Variables of modules and closures that a task's code uses: its methods, those of its model, and what they call.

Code of installed packages is not followed, nor is what a name reaches only at run time.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

from raysharded.actors.task_calls.task_errors import is_installed

_MOST_FUNCTIONS = 5_000


class Variable(NamedTuple):
    """A place of a variable."""

    name: str
    """`train.STEP` of a module; `make.<locals>.Task: count` of the closures of a class."""
    holder: MutableMapping[str, Any]
    key: str


class Cell(MutableMapping[str, Any]):
    """A closure's variable as a mapping with one key, or with none while it has no value."""

    KEY = "cell_contents"

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter([self.KEY] if len(self) else [])

    def __len__(self) -> int:
        try:
            _ = self._cell.cell_contents
        except ValueError:
            return 0
        return 1


def is_a_users(module: str) -> bool:
    """True for the name of a module that no installed package has, and raysharded has not."""
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not is_installed(file) and module.partition(".")[0] != "raysharded"


def variables_of(used: Iterable[object]) -> list[Variable]:
    """The variables that the methods of objects use, each once. `used`: objects; functions and classes, too.

    Classes, functions and modules among the variables are followed, and are not returned.
    """
    code = (one if isinstance(one, (type, types.FunctionType)) else type(one) for one in used)
    left, seen = deque(dict.fromkeys(code)), dict[int, object]()
    found: dict[tuple[int, str], Variable] = {}
    while left and len(seen) < _MOST_FUNCTIONS:
        one = left.popleft()
        for part in _functions_of(one):
            if id(part) in seen:
                continue
            seen[id(part)] = part
            is_own = not is_installed(part.__code__.co_filename)  # or a decorator's, around one of the user's
            for variable in (*(_of_modules(part) if is_own else ()), *_of_closures(part)):
                value = variable.holder.get(variable.key)
                if isinstance(value, (type, types.FunctionType)):
                    left.append(value)
                elif is_own and not isinstance(value, types.ModuleType):
                    found.setdefault((_id_of(variable), variable.key), variable)
    return list(found.values())


def _id_of(variable: Variable) -> int:
    holder = variable.holder
    return id(holder._cell) if isinstance(holder, Cell) else id(holder)


def _functions_of(one: type | types.FunctionType) -> Iterator[types.FunctionType]:
    """The user's functions of a class and its bases, or the function itself."""
    if isinstance(one, types.FunctionType):
        if (one.__module__ or "").partition(".")[0] != "raysharded":
            yield one
        return
    for base in one.__mro__:
        for held in vars(base).values() if is_a_users(base.__module__) else ():
            match held:
                case staticmethod() | classmethod():
                    part: object = held.__func__
                case property():
                    part = held.fget
                case _:
                    part = held
            if isinstance(part, types.FunctionType):
                yield part


def _of_modules(function: types.FunctionType) -> Iterator[Variable]:
    names, scope = set(_names_in(function.__code__)), function.__globals__
    label = scope.get("__name__", "")
    for name in names & scope.keys():
        yield Variable(f"{label}.{name}", scope, name)
        value = scope[name]
        if isinstance(value, types.ModuleType) and is_a_users(value.__name__):
            inner = vars(value)
            yield from (Variable(f"{value.__name__}.{key}", inner, key) for key in names & inner.keys())


def _of_closures(function: types.FunctionType) -> Iterator[Variable]:
    around = function.__qualname__.rpartition(".")[0]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Variable(f"{around}: {name}", Cell(cell), Cell.KEY)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in(part)
