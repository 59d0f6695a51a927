"""Checks of user input: each error names the wrong value and a valid one."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeVar

from raysharded.errors import ConfigError

T = TypeVar("T")


def require(ok: bool, message: str) -> None:
    """Raise ConfigError with this message unless `ok`."""
    if not ok:
        raise ConfigError(message)


def is_int(value: object) -> bool:
    """True for a whole number; False for True and False."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_number(owner: str, name: str, value: object, lowest: float, *, above: bool = False) -> None:
    """Raise ConfigError unless the value is a finite number of at least `lowest`, or above it if `above`."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (value > lowest if above else value >= lowest)  # type: ignore[operator] # a number
    require(ok, f"{owner}.{name}={value!r}: give a number {'above' if above else 'of at least'} {lowest:g}.")


def require_norm(owner: str, name: str, value: object) -> None:
    """Raise ConfigError unless the value is a number above 0; infinity and NumPy's numbers are valid."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) and not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):  # an array of several
        number = math.nan
    require(number > 0, f"{owner}.{name}={value!r}: give a number above 0.")


def require_kind(owner: str, name: str, value: object, kind: type) -> None:
    """Raise ConfigError unless the value is of that type."""
    require(isinstance(value, kind), f"{owner}.{name}={value!r}: give a {kind.__name__}.")


def names_checked(cls: type[T]) -> type[T]:
    """Class decorator: reject unknown or missing arguments of the constructor, with a suggestion.

    `cls._SET_LATER`, if there is one: attributes that the constructor does not take -> the end of the message.
    """
    later: Mapping[str, str] = getattr(cls, "_SET_LATER", {})
    original = cls.__init__
    parameters = [p for p in inspect.signature(original).parameters.values() if p.name != "self"]
    names = [p.name for p in parameters]
    required = [p.name for p in parameters if p.default is p.empty]

    @functools.wraps(original)
    def __init__(self: T, *args: Any, **given: Any) -> None:  # noqa: N807 - it becomes one
        require(not args, f"{cls.__name__}: give its fields by name: {', '.join(names)}.")
        for name in given.keys() - set(names):
            close = difflib.get_close_matches(name, names, n=1)
            hint = f": did you mean {close[0]!r}?" if close else f"{later[name]}." if name in later else "."
            raise ConfigError(f"{cls.__name__} has no field {name!r}{hint} Its fields are {', '.join(names)}.")
        missing = [name for name in required if name not in given]
        require(
            not missing, f"{cls.__name__} needs {', '.join(missing)}; give {'them' if missing[1:] else 'it'} by name."
        )
        original(self, **given)

    cls.__init__ = __init__  # type: ignore[method-assign,assignment] # takes any names, to report the wrong ones
    return cls
