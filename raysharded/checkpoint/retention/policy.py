"""Which of a run's committed checkpoints stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raysharded.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The checkpoints with the best values of a metric: a number in `metadata["metrics"]` of their manifests."""

    metric: str
    """The number's name."""
    mode: Literal["min", "max"]
    """Whether the smallest or the largest is best."""
    count: int = 1
    """How many of them stay."""

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max") or self.count < 1 or not self.metric:
            raise ConfigError(f"{self}: give a metric's name, mode 'min' or 'max', and a count of 1 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """What stays: whatever one of the rules wants, and what is pinned. The newest usable one always stays."""

    last: int = 2
    """So many of the newest that can be used: 1 or more."""
    every_steps: int | None = None
    """Of every stretch of so many steps, (0, n], (n, 2n], ..., the last: 1 or more. None: no such rule."""
    best: Best | None = None
    """The best by a number; None: no such rule."""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ConfigError(f"last={self.last}: the newest complete checkpoint always stays; give 1 or more.")
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"every_steps={self.every_steps}: give 1 or more, or None to have no such rule.")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A committed checkpoint, as the policy sees it."""

    prefix: str
    step: int


def to_delete(
    candidates: Sequence[Candidate],
    keep: Keep,
    *,
    pinned: Collection[str] = (),
    usable: Callable[[str], bool],
    metrics: Callable[[str], Mapping[str, Any]],
) -> list[Candidate]:
    """Those of the candidates (oldest first) that go, oldest first.

    `usable(prefix)`, asked of the newest ones until `keep.last` are found, says whether a checkpoint can be opened and
    has all its files; what cannot be used does not count as kept, and stays until `keep.last` newer ones can.
    `metrics(prefix)` is asked only if `keep.best` is set.

    Laws: if the newest `last` usable ones are fewer than `last`, nothing goes; otherwise none of them, nothing newer
    than the oldest of them and nothing pinned goes; what is left, asked again, loses nothing more.
    """
    found = 0
    for at in range(len(candidates) - 1, -1, -1):
        found += usable(candidates[at].prefix)
        if found == keep.last:
            break
    else:
        return []
    stay = {*pinned, *_last_of_stretches(candidates, keep), *_best(candidates, keep, metrics)}
    return [candidate for candidate in candidates[:at] if candidate.prefix not in stay]


def _last_of_stretches(candidates: Sequence[Candidate], keep: Keep) -> list[str]:
    if keep.every_steps is None:
        return []
    last = {(candidate.step - 1) // keep.every_steps: candidate.prefix for candidate in candidates}
    return list(last.values())


def _best(candidates: Sequence[Candidate], keep: Keep, metrics: Callable[[str], Mapping[str, Any]]) -> list[str]:
    """Of equal ones the newest; what has no such number, or one that is not finite, is never among the best."""
    if keep.best is None:
        return []
    sign = 1 if keep.best.mode == "max" else -1
    scored = []
    for at, candidate in enumerate(candidates):
        value = metrics(candidate.prefix).get(keep.best.metric)
        if isinstance(value, (int, float)) and _is_comparable(value):
            scored.append((sign * value, at, candidate.prefix))
    return [prefix for _, _, prefix in sorted(scored, reverse=True)[: keep.best.count]]


def _is_comparable(value: float) -> bool:
    """Whether it is finite, and within what a float can be. A truth is no number."""
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
