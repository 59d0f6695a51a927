"""The state machine's events and first state as JSON values, and back. Pure.

cattrs follows the annotations of events, messages and state; this module states only what it cannot know. A long value
that recurs (the state's spec, a worker's stack) is written once, and is a number from then on. Values that the machine
only forwards are omitted: the digests, boxes and fingerprint of a part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, get_type_hints

from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

from raysharded import errors
from raysharded.driver.replay.names import FORMAT, FORMATS
from raysharded.driver.state.events import Event, WorkerReply
from raysharded.driver.state.state import State
from raysharded.errors import RayshardedError, TaskError
from raysharded.layout import StateSpec
from raysharded.protocol.messages import ProbeReply, Saved

Json: TypeAlias = Any
"""A value that `json` reads or writes. Floats may be NaN or infinite; they may also come as strings."""
_ONCE = "once"
"""Key of the long values that an entry is the first to name, in the order of their numbers."""


class RecordedError(Exception):
    """A recorded error of a class outside raysharded. Its type is a subclass with the original class's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """A checkpoint's file, reduced to what the machine reads."""

    size_bytes: int


class Encoder:
    """Encodes one recording, from its beginning on. Used by one thread at a time."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._new: list[Json] = []
        converter = _converter(FORMAT)
        self._of_event: Callable[[Event], Json] = converter.get_unstructure_hook(Event)
        self._of_state: Callable[[State], Json] = converter.get_unstructure_hook(State)

    def event(self, event: Event) -> dict[str, Json]:
        """Fields of a journal entry: `event`, and the long values that it is the first to name."""
        with _long_values(self._number):
            return {"event": self._of_event(event), **self._newly_named()}

    def state(self, state: State) -> dict[str, Json]:
        """Fields of a journal entry: `state`, and the long values that it is the first to name.

        No generation may have been formed in this state. Its `source` and `saves` are omitted.
        """
        with _long_values(self._number):
            return {"state": self._of_state(state), **self._newly_named()}

    def _number(self, value: StateSpec | str) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._numbers)
            self._new.append(value if isinstance(value, str) else value.to_rows())
        return number

    def _newly_named(self) -> dict[str, Json]:
        new, self._new = self._new, []
        return {_ONCE: new} if new else {}


class Decoder:
    """Decodes one recording; takes its entries in order.

    Raises LookupError, TypeError or ValueError for values that no encoder wrote.
    """

    def __init__(self, format: object = FORMAT) -> None:  # noqa: A002 - the entry's name
        """`format`: one of `FORMATS`."""
        self._values: list[Json] = []
        converter = _converter(format)
        self._to_event: Callable[[Json, Any], Event] = converter.get_structure_hook(Event)
        self._to_state: Callable[[Json, Any], State] = converter.get_structure_hook(State)

    def event(self, fields: Mapping[str, Json]) -> Event:
        self._learn(fields)
        with _long_values(self._values.__getitem__):
            return self._to_event(fields["event"], Event)

    def state(self, fields: Mapping[str, Json]) -> State:
        self._learn(fields)
        with _long_values(self._values.__getitem__):
            return self._to_state(fields["state"], State)

    def _learn(self, fields: Mapping[str, Json]) -> None:
        for value in fields.get(_ONCE, ()):
            self._values.append(value if isinstance(value, str) else StateSpec.from_rows(value))


_LONG_VALUE: ContextVar[Callable[[Any], Any]] = ContextVar("_LONG_VALUE")
"""Conversion of the recording in progress: of a long value to its number, or of a number to its value."""


@contextmanager
def _long_values(convert: Callable[[Any], Any]) -> Iterator[None]:
    token = _LONG_VALUE.set(convert)
    try:
        yield
    finally:
        _LONG_VALUE.reset(token)


def _long_value(value: Any, _: Any = None) -> Any:
    return _LONG_VALUE.get()(value)


@cache
def _converter(format: object) -> Converter:  # noqa: A002 - the entry's name
    """Converter of all recordings of a format. It takes a tenth of a second to make."""
    names = FORMATS[format]
    converter = make_converter(omit_if_default=True, detailed_validation=False)
    converter.register_unstructure_hook(StateSpec, _long_value)
    converter.register_structure_hook(StateSpec, _long_value)
    converter.register_unstructure_hook_func(_is_error, _from_error)
    converter.register_structure_hook_func(_is_error, _to_error)
    special: dict[type, dict[str, dict[str, Any]]] = {
        Saved: {"files": {"unstruct_hook": _from_files, "struct_hook": _to_files}, "fingerprint": {"omit": True}},
        ProbeReply: {"stack": {"unstruct_hook": _long_value, "struct_hook": _long_value}},
        State: {"source": {"omit": True}, "saves": {"omit": True}, "rendezvous": {"struct_hook": _to_tuple}},
    }
    for cls in [*(names.fields.keys() - special.keys()), *special]:  # the state last: it consists of the others
        fields = {name: dict(how) for name, how in special.get(cls, {}).items()}
        for name, recorded in names.fields.get(cls, {}).items():
            fields.setdefault(name, {})["rename"] = recorded
        _except(converter, cls, **{name: override(**how) for name, how in fields.items()})
    for union in (get_type_hints(WorkerReply)["message"], Event):
        configure_tagged_union(union, converter, tag_name="is", tag_generator=names.classes.__getitem__)
    return converter


def _except(converter: Converter, cls: type, **overrides: Any) -> None:
    """Convert a class as usual, with these overrides for its fields."""
    converter.register_unstructure_hook(
        cls, make_dict_unstructure_fn(cls, converter, _cattrs_omit_if_default=True, **overrides)
    )
    converter.register_structure_hook(
        cls, make_dict_structure_fn(cls, converter, _cattrs_detailed_validation=False, **overrides)
    )


def _from_files(files: tuple[Any, ...]) -> list[int]:
    return [file.size_bytes for file in files]


def _to_files(sizes: list[int], _: Any) -> tuple[WrittenFile, ...]:
    return tuple(WrittenFile(size_bytes=size) for size in sizes)


def _to_tuple(values: list[Json], _: Any) -> tuple[Json, ...]:
    return tuple(values)


# -- errors: the machine uses their class, its name, and their text --


def _is_error(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, BaseException)


def _from_error(error: BaseException) -> dict[str, str]:
    ours = next((cls.__name__ for cls in type(error).__mro__ if _of_ours(cls.__name__) is cls), "")
    fields = {"type": type(error).__name__, "ours": ours, "text": str(error)}
    if isinstance(error, TaskError):
        fields["traceback"] = getattr(error, "user_traceback", "")  # a subclass may not call our __init__
    return fields


def _to_error(fields: dict[str, str], _: Any) -> BaseException:
    name, ours = fields["type"], _of_ours(fields["ours"])
    cls: type[Exception] = ours or RecordedError
    if cls.__name__ != name:
        cls = type(name, (cls,), {})
    given = (fields["text"], fields["traceback"]) if issubclass(cls, TaskError) else (fields["text"],)
    return cls(*given)


def _of_ours(name: str) -> type[RayshardedError] | None:
    """The raysharded error of this name, which the machine may test for; None if there is none."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, RayshardedError) else None
