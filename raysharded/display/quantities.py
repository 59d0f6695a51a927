"""Durations, rates and sizes as text for people. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def duration(seconds: float) -> str:
    """ "0.25 s", "42 s", "3 min 20 s", "2 h 13 min", "4 d 7 h"; "?" if unknown (not finite)."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    for name, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"


def short(number: float) -> str:
    """Three digits and a power of a thousand: "0.87", "42.1", "980", "12.3k", "4.56M"; "?" if not finite."""
    if not math.isfinite(number):
        return "?"
    for suffix in ("", "k", "M", "G"):
        digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
        if abs(number) < 999.5:
            text = f"{number:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if digits and not suffix else text}{suffix}"
        number /= 1000
    return f"{number:.0f}T"


def size(num_bytes: float) -> str:
    """ "512 B", "3.4 KiB", "1.2 GiB"."""
    for unit in _SIZES[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_SIZES[-1]}"


def moment(epoch_seconds: float) -> str:
    """Date and time, UTC, to the second."""
    return datetime.fromtimestamp(epoch_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def count(number: int, thing: str, things: str | None = None) -> str:
    """ "1 worker", "3 workers"; `things` is the plural unless it is `thing` with an s."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def steps_done(done: int, of: int | None) -> str:
    """ "3 of 6 steps", "1 step"; `of` is None if not known."""
    return count(done, "step") if of is None else f"{done} of {count(of, 'step')}"


def listing(items: list[str] | tuple[str, ...]) -> str:
    """ "3", "3 and 5", "3, 5 and 8"."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def span(seconds: float) -> str:
    """As `duration`, but in milliseconds below a tenth of a second: "85 ms", "<1 ms"."""
    if not 0 <= seconds < 0.0995:
        return duration(seconds)
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 else "0 s" if seconds == 0 else "<1 ms"


def weights_text(weights: Mapping[str, float]) -> str:
    """Weights of sources: "web 0.7, code 0.3"."""
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
