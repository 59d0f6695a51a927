"""Retention rules: a run's committed checkpoints that stay. Pure."""

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
    """Name of the metric."""
    mode: Literal["min", "max"]
    """Whether the smallest or the largest value is best."""
    count: int = 1
    """Number of checkpoints that stay."""

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max") or self.count < 1 or not self.metric:
            raise ConfigError(f"{self}: give a metric's name, mode 'min' or 'max', and a count of 1 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Retention rules: pinned checkpoints and all that a rule keeps stay. The newest usable one always stays."""

    last: int = 2
    """Number of newest usable checkpoints that stay: 1 or more."""
    every_steps: int | None = None
    """Interval of n steps, 1 or more: the last checkpoint of each (0, n], (n, 2n], ... stays. None: no such rule."""
    best: Best | None = None
    """Rule for the best by a metric; None: no such rule."""

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
    """The candidates (oldest first) to delete, oldest first.

    `usable(prefix)` is whether a checkpoint can be opened and has all its files. It is called for the newest ones until
    `keep.last` are found. Unusable ones do not count as kept, and stay until `keep.last` newer ones are usable.
    `metrics(prefix)` is called only if `keep.best` is set.

    Laws: with fewer than `last` usable ones, nothing is deleted. Otherwise the newest `last` usable ones, all newer
    than the oldest of them, and all pinned ones stay. A second call with the rest deletes nothing.
    """
    found = 0
    for at in range(len(candidates) - 1, -1, -1):
        found += usable(candidates[at].prefix)
        if found == keep.last:
            break
    else:
        return []
    best = ranked(candidates, keep.best, metrics)[: keep.best.count] if keep.best is not None else []
    stay = {*pinned, *_last_of_stretches(candidates, keep), *(candidate.prefix for candidate, _ in best)}
    return [candidate for candidate in candidates[:at] if candidate.prefix not in stay]


def _last_of_stretches(candidates: Sequence[Candidate], keep: Keep) -> list[str]:
    if keep.every_steps is None:
        return []
    last = {(candidate.step - 1) // keep.every_steps: candidate.prefix for candidate in candidates}
    return list(last.values())


def ranked(
    candidates: Sequence[Candidate], best: Best, metrics: Callable[[str], Mapping[str, Any]]
) -> list[tuple[Candidate, float]]:
    """The candidates (oldest first) with their values of the metric, best first; of equal ones the newest first.

    Those whose metric is missing or not finite are omitted.
    """
    sign = 1 if best.mode == "max" else -1
    scored = []
    for at, candidate in enumerate(candidates):
        value = metrics(candidate.prefix).get(best.metric)
        if isinstance(value, (int, float)) and _is_comparable(value):
            scored.append((sign * value, at, candidate))
    scored.sort(key=lambda one: one[:2], reverse=True)
    return [(candidate, sign * value) for value, _, candidate in scored]


def _is_comparable(value: float) -> bool:
    """Whether a value is finite and within the range of a float. A bool is not a number."""
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
