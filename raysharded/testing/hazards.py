"""The hazards of chaos and their times. Pure."""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raysharded.errors import ConfigError
from raysharded.testing.faults import Kind

SIGNALLED: tuple[Kind, ...] = ("kill", "stop", "term", "slow")
"""Faults inflicted on a process from outside."""
ORDERED: tuple[Kind, ...] = ("wedge", "stuck", "raise", "drop", "corrupt")
"""Faults that the worker inflicts on itself; it needs a fault plan that listens."""
_DEFAULT_SECONDS: dict[Kind, float] = {"slow": 5.0, "wedge": 60.0}
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)?")
_EXAMPLE = "kill:every=30s,stop:every=2m,slow:every=1m:seconds=5"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """A kind of fault, its average interval, and its duration."""

    kind: Kind
    every_s: float
    seconds: float | None = None


def parse_hazards(text: str) -> tuple[Hazard, ...]:
    """The hazards in a text like "kill:every=30s,slow:every=1m:seconds=5".

    Raises ConfigError, which names the wrong part. Times have a unit (ms, s, m, h), or are seconds.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"chaos {text!r} names no fault; give some, as in {_EXAMPLE!r}.")
    return tuple(_hazard(part) for part in parts)


def _hazard(part: str) -> Hazard:
    name, *settings = part.split(":")
    kinds = {kind: kind for kind in (*SIGNALLED, *ORDERED)}
    if name not in kinds:
        raise ConfigError(f"chaos {part!r}: there is no fault {name!r}; choose one of {', '.join(kinds)}.")
    given = dict(_setting(part, setting) for setting in settings)
    if "every" not in given:
        raise ConfigError(f"chaos {part!r} does not set an interval: add every=, as in {name}:every=30s.")
    seconds = given.get("seconds", _DEFAULT_SECONDS.get(kinds[name]))
    return Hazard(kind=kinds[name], every_s=given["every"], seconds=seconds)


def _setting(part: str, setting: str) -> tuple[str, float]:
    name, sign, value = setting.partition("=")
    if not sign or name not in ("every", "seconds"):
        raise ConfigError(f"chaos {part!r}: {setting!r} is an invalid setting; use every= and seconds=.")
    match = _DURATION.fullmatch(value)
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else math.nan
    if not seconds > 0:
        raise ConfigError(f"chaos {part!r}: {name}={value!r} is invalid; give a time above 0, like 500ms, 30s or 2m.")
    return name, seconds


def moments(hazards: Sequence[Hazard], seed: int) -> Iterator[tuple[float, Hazard]]:
    """The times of all strikes, in seconds from the beginning, with their hazards; in order, without end.

    The time between two strikes of a hazard is half to one and a half times its interval; on average it is the
    interval. So it does not synchronise with the run. The same seed gives the same times.
    """
    draw = random.Random(seed)
    queue = [(hazard.every_s * draw.uniform(0.5, 1.5), number) for number, hazard in enumerate(hazards)]
    heapq.heapify(queue)
    while queue:
        at_s, number = queue[0]
        yield at_s, hazards[number]
        heapq.heapreplace(queue, (at_s + hazards[number].every_s * draw.uniform(0.5, 1.5), number))
