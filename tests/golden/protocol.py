"""What crosses between a driver, its workers and whoever attaches: `python -m tests.golden.protocol` writes it down.

Of every message its fields, of every call its parameters, with their types as they stand in the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from raysharded.actors.worker import Worker
from raysharded.orphans.leased_worker import LeasedWorker
from raysharded.protocol import death, link_messages, messages, session
from raysharded.protocol.version import PROTOCOL
from raysharded.run.hosted.driver_actor import DriverActor
from raysharded.run.hosted.registry import About
from raysharded.run.hosted.submission import RunSubmission
from raysharded.run.results import Result, Status

LIST = Path(__file__).parent / "protocol.txt"
_CALLED: tuple[type, ...] = (Worker, LeasedWorker, DriverActor)


def lines() -> Iterator[str]:
    """The protocol's number, then everything that it has."""
    yield f"protocol {PROTOCOL}"
    begin = [
        *_defined_in(messages),
        *_defined_in(link_messages),
        *_defined_in(death),
        *_defined_in(session),
        About,
        RunSubmission,
        Result,
        Status,
    ]
    for cls in sorted(_reached(begin), key=lambda cls: f"{cls.__module__}.{cls.__qualname__}"):
        yield f"{cls.__module__}.{cls.__qualname__}"  # by which it is pickled
        yield from (f"    {field.name}: {field.type}" for field in dataclasses.fields(cls))
    for called in _CALLED:
        yield called.__name__
        for name, method in sorted(vars(called).items()):
            if callable(method) and (not name.startswith("_") or name == "__init__"):
                yield f"    {name}{inspect.signature(method)}"


def _defined_in(module: ModuleType) -> list[Any]:
    found = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [value for value in found if isinstance(value, type) and dataclasses.is_dataclass(value)]


def _reached(begin: list[Any]) -> set[Any]:
    """These classes, and those of ours that their fields have."""
    waiting, seen, found = begin, set[Any](), set[Any]()
    while waiting:
        hint = waiting.pop()
        if hint in seen:
            continue
        seen.add(hint)
        waiting += typing.get_args(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint.__module__.startswith("raysharded"):
            found.add(hint)
            waiting += typing.get_type_hints(hint, localns={"torch": torch}).values()
    return found


def kept() -> list[str]:
    """The list."""
    return LIST.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    LIST.write_text("\n".join(lines()) + "\n", encoding="utf-8")
